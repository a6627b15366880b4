"""Order in which a program of dk and dv goes through the blocks of queries of all heads that share its keys.

Head by head, the programs of a causal call drift apart: with few queries to go through, a program is at the last head when another
is still at the first, and what they read, and add to, of all heads does not fit L2. Where `walk_of_call` says so heads take turns
instead, of a few blocks each, and programs that begin together begin at the last queries, which all of them go through. Programs
begin together in every other wave; in the next ones each begins when one of the last wave ends, those with the most to do first, so
that they are at the same queries at the same time if they begin at their first. Llama 3 70B's backward of 8192 tokens reads and
writes 0.86 GB of memory that way on an NVIDIA H100, and 7.5 GB head by head (bench/results/query_walks_h100.json).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flexattn.kernels_triton.common.problem import Problem
from flexattn.kernels_triton.runtime.launch import num_processors

_TURN = 4  # blocks of queries
_WHOLE = 2**20  # more than a head has
_FULL = 0.9  # share of the multiprocessors that a wave has programs for
_MOST_HEADS = 16  # key heads that are gone through side by side
_ALL = 2**30  # work tiles


class Walk(NamedTuple):
    """Turns of the heads of a group, and the waves of programs that go through them."""

    turn: int  # blocks of queries that a head has in its turn
    wave: int  # programs that begin together; those of every other wave go through the last turns first


def walk_of_call(problem: Problem, blocks: int, section: int, *, is_fused: bool = False) -> tuple[int, Walk | None]:
    """Returns (key heads whose programs come before those of others, the walk) of a backward with `blocks` blocks of keys a head.

    section: as many key heads as L2 has room for. is_fused: of a fused backward. The walk is None in kernels that know no turns:
    with a key head for each query head, without a causal mask, with a window or a block mask, and in two kernels at head dims above
    128 in 16 bits, where turns take 3 % longer.
    Waves of whole heads are best, if they leave few multiprocessors idle. Else, with few heads, programs of all heads come by their
    length, and a wave is as many as there are multiprocessors. In packed batches of unequal sequences no wave begins together, and
    all programs go through their sequence's last queries first.
    """
    x = problem
    if x.group_size == 1 or x.window_right is None or x.window_left is not None or x.block_mask is not None:
        return section, None
    if not is_fused and x.q.shape[-1] > 128 and x.q.element_size() > 1:
        return section, None
    if x.has_lengths:
        is_uneven = x.num_keys < x.batch * x.longest_kv
        return section, Walk(turn=_TURN if is_uneven else _WHOLE, wave=_ALL)
    heads, processors = x.batch * x.num_heads_kv, num_processors(x.device)
    size = processors // blocks  # heads whose blocks a wave has programs for
    if size > 0 and heads % size == 0 and size * blocks >= _FULL * processors:
        return size, Walk(turn=_TURN, wave=size * blocks)
    if size > 0 and heads <= _MOST_HEADS:
        return heads, Walk(turn=_TURN, wave=processors)
    return section, Walk(turn=_WHOLE, wave=_ALL)


class QueryPlace(NamedTuple):
    """Place of a program: one block of queries of one head."""

    n: Any  # the block's number, of those that each head has
    head: Any  # its number in the group
    end: Any  # behind the last block of the head's turn


@gluon.jit
def _work_tile(block, head, num_heads, work):
    # The number of the work tile that has this block of this head, of all batch elements' heads: `swizzle_heads_for_l2` reversed
    first_head = head // work.heads_per_l2_section * work.heads_per_l2_section
    heads_here = gl.minimum(work.heads_per_l2_section, num_heads - first_head)
    return first_head * work.blocks + block * heads_here + head - first_head


@gluon.jit
def turn_of_program(block, h_kv, b, args):
    # Blocks of a turn in the program that has this block of keys, below 0 where the last ones come first; 0 without turns
    work = args.work
    if work.walk.turn is None:
        return 0
    else:
        heads = work.num_heads // work.group_size
        t = _work_tile(block, b * heads + h_kv, args.lengths_kv.batch * heads, work)
        return gl.where(t // work.walk.wave % 2 == 0, -work.walk.turn, work.walk.turn)


@gluon.jit
def first_queries(block, work):
    # The first place of a program in its block of keys
    if work.walk.turn is None:
        return QueryPlace(n=0, head=0, end=block.num_blocks)
    else:
        # Turns are counted from the end, where they are the same queries for all programs.
        end = block.num_blocks
        if block.turn > 0:
            end -= gl.maximum(end - 1, 0) // block.turn * block.turn
        return QueryPlace(n=gl.maximum(end - work.walk.turn, 0), head=0, end=end)


@gluon.jit
def next_queries(at: QueryPlace, block, work):
    # The place after `at`. Behind the last one n means nothing, but the head is one of the group.
    n, head, end = at.n + 1, at.head, at.end
    if n == end:
        n = 0
        head += 1
        if head == work.group_size:
            head = 0
            if work.walk.turn is not None:
                end += block.turn
        if work.walk.turn is not None:
            n = gl.maximum(end - work.walk.turn, 0)
    return QueryPlace(n=n, head=head, end=end)
