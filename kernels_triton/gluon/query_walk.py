"""Order in which a program of dk and dv visits the query blocks of all heads that share its keys.

If programs of a causal call visit one head after the other, they drift apart. A program with few queries is at the last head while
another is still at the first. Together they access the data of all heads, which does not fit in L2.

If `walk_of_call` returns a walk, heads take turns of a few blocks each. Programs that begin together start with the last queries,
which all of them visit. Programs begin together in every other wave. In the next wave each program begins when one of the last wave
ends, in order of work. They are at the same queries at the same time if they start with their first queries. With turns, Llama 3
70B's backward of 8192 tokens reads and writes 0.86 GB of memory on an NVIDIA H100. Head by head it is 7.5 GB
(bench/results/query_walks_h100.json).
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


class Walk(NamedTuple):
    """Turns of the heads of a group, and the waves of programs that visit them."""

    turn: int  # query blocks of a head's turn
    wave: int  # programs that begin together; programs of every other wave visit the last turns first


class HeadParts(NamedTuple):
    """Parts of the query heads that share a key head. A program visits one part, and dk and dv are the sums over the parts."""

    number: int  # parts of a key head
    heads: int  # query heads of a part; the last part may have fewer


class QueryPlace(NamedTuple):
    """Position of a program in its walk: one query block of one head."""

    n: int | gl.tensor  # the block's index among the blocks of one head
    head: int | gl.tensor  # the head's index among the program's heads
    end: int | gl.tensor  # end of the head's turn, exclusive


@gluon.jit
def num_parts(work):
    # Returns the number of parts of all key heads of one batch element; without `HeadParts`, a key head is one part.
    heads = work.num_heads // work.group_size
    if work.parts.number is not None:
        heads *= work.parts.number
    return heads


@gluon.jit
def heads_of_part(part, work):
    # Returns (the key head, the first query head, the number of query heads) of one of the `num_parts`
    if work.parts.number is None:
        return part, part * work.group_size, work.group_size
    else:
        h_kv = part // work.parts.number
        first = part % work.parts.number * work.parts.heads
        return h_kv, h_kv * work.group_size + first, gl.minimum(work.parts.heads, work.group_size - first)


@gluon.jit
def _work_tile(block, head, num_heads, work):
    # Returns the number of the work tile with this block and head, over all batch elements' heads: the inverse of
    # `swizzle_heads_for_l2`
    first_head = head // work.heads_per_l2_section * work.heads_per_l2_section
    heads_in_section = gl.minimum(work.heads_per_l2_section, num_heads - first_head)
    return first_head * work.blocks + block * heads_in_section + head - first_head


@gluon.jit
def turn_of_program(block, part, b, args):
    # Returns the blocks of a turn in the program with this key block, negative if the last ones come first; 0 without turns
    work = args.work
    if work.walk.turn is None:
        return 0
    else:
        parts = num_parts(work)
        t = _work_tile(block, b * parts + part, args.lengths_kv.batch * parts, work)
        return gl.where(t // work.walk.wave % 2 == 0, -work.walk.turn, work.walk.turn)


@gluon.jit
def first_queries(block, work):
    # Returns the first position of a program in its key block
    if work.walk.turn is None:
        return QueryPlace(n=0, head=0, end=block.num_blocks)
    else:
        # Turns are counted from the end, so that they cover the same queries in all programs.
        end = block.num_blocks
        if block.turn > 0:
            end -= gl.maximum(end - 1, 0) // block.turn * block.turn
        return QueryPlace(n=gl.maximum(end - work.walk.turn, 0), head=0, end=end)


@gluon.jit
def next_queries(position: QueryPlace, block, work):
    # Returns the position after `at`. After the last one, n is meaningless, but the head is one of the program's.
    n, head, end = position.n + 1, position.head, position.end
    if n == end:
        n = 0
        head += 1
        if head == block.heads:
            head = 0
            if work.walk.turn is not None:
                end += block.turn
        if work.walk.turn is not None:
            n = gl.maximum(end - work.walk.turn, 0)
    return QueryPlace(n=n, head=head, end=end)
