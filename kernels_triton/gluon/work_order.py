"""Work tiles of a call and their order, which the host decides."""

from __future__ import annotations

from typing import Literal

import torch
import triton

from flexattn.kernels_triton.common import crossovers
from flexattn.kernels_triton.common.facts import most_head_parts
from flexattn.kernels_triton.common.features import Features
from flexattn.kernels_triton.common.problem import Problem
from flexattn.kernels_triton.common.tile_schedule import tile_schedule
from flexattn.kernels_triton.common.tiles import cdiv
from flexattn.kernels_triton.gluon.query_walk import HeadParts, Walk
from flexattn.kernels_triton.gluon.tile_scheduler import Work
from flexattn.kernels_triton.runtime.device import has_large_l2, num_processors

_MIB = 2**20


_L2_BYTES = 32 * _MIB  # bytes that are read, or added to, repeatedly while they are in L2


def _heads_in_l2(heads: int, bytes_per_head: int, room: int = _L2_BYTES) -> int:
    """Returns how many of `heads` heads fit in L2 together, at least one."""
    return min(heads, max(1, room // bytes_per_head))


def section_of_one_size(heads: int, most: int) -> int:
    """Returns a size of sections of `heads` heads, about `most`, whose last section is as full as possible.

    A small last section leaves multiprocessors idle: gpt-oss's backward takes 4820 us in sections of 4, 4, 4 and 4 heads, and 5547
    in sections of 5, 5, 5 and 1. Short calls also gain from sections of up to a third more than fits in L2
    (bench/results/sections_h200.json).
    """
    return max(range(cdiv(most, 2), min(heads, most * 4 // 3) + 1), key=lambda size: (-(-heads % size), size))


def _bytes_of_forward_section(problem: Problem) -> int:
    """Returns the maximum bytes of keys and values of a forward's section of heads.

    If all tiles have equal length, small sections run all tiles of a head side by side. At 512 tokens of head dim 128 such a call
    takes 132 us on an NVIDIA H100, and 201 us in sections of 32 MiB (bench/results/forward_sections_h100.json). Its 50 MB of L2, in
    two halves, are too small for those. If there is a band, large sections run the long tiles of many heads first. 16 MiB are best
    for that on an H100, and 32 on an NVIDIA H200, which has 60 MB (bench/results/forward_turns_h200.json).
    """
    x = problem
    if x.window_left is None and x.window_right is None and x.block_mask is None and not x.has_lengths:
        return 8 * _MIB
    return 32 * _MIB if has_large_l2(x.device) else 16 * _MIB


def query_heads_per_l2_section(problem: Problem) -> int:
    """Returns how many query heads a persistent forward processes together; with lengths, in all sequences at once."""
    x = problem
    heads, tokens = x.batch * x.num_heads_kv, x.longest_kv
    if x.has_lengths:
        heads, tokens = x.num_heads_kv, x.num_keys
    bytes_per_head = tokens * (x.q.shape[-1] + x.v.shape[-1]) * x.k.element_size()
    section = _heads_in_l2(heads, bytes_per_head, _bytes_of_forward_section(x))
    return (section if x.has_lengths else section_of_one_size(heads, section)) * x.group_size


def forward_work(problem: Problem, queries: int, group: int = 1, *, has_table: bool = True) -> Work:
    """Returns the work tiles of a persistent forward, `queries` of each of `group` heads, which programs draw dynamically."""
    x = problem
    if not has_table:
        table = None
    elif not x.has_lengths:
        table = torch.zeros(1, dtype=torch.int32, device=x.device)
    else:
        table = tile_schedule(x, queries, "q", by_sequence=False)
    return Work(
        table_ptr=table,
        num_heads=x.num_heads,
        group_size=x.group_size,
        blocks=cdiv(x.longest_q, queries),
        heads_per_l2_section=query_heads_per_l2_section(x) // group,
    )


def heads_per_l2_section(problem: Problem, heads: int, bytes_per_head: int) -> int:
    """Returns how many heads a backward processes together; 2 for packed batches (bench/results/packed_orders_h200.json)."""
    x = problem
    return min(heads, 2) if x.has_lengths else _heads_in_l2(heads * x.batch, bytes_per_head)


_TURN = 4  # blocks of queries


_WHOLE = 2**20  # more blocks than a head has


_FULL = 0.9  # minimum share of the multiprocessors that a wave fills


_MOST_HEADS = 16  # maximum key heads that are visited side by side


_ALL = 2**30  # more work tiles than a call has


def number_of_head_parts(problem: Problem, rows: int) -> int:
    """Returns how many programs divide the query heads of a key head, if a program of dk and dv has `rows` keys.

    One program with all of them leaves multiprocessors idle if there are few keys of few key heads.
    """
    x = problem
    programs = x.k.shape[:-1].numel() / rows
    is_unequal = x.block_mask is not None or x.has_lengths
    processors, most = num_processors(x.device), most_head_parts(x)
    wanted = round((crossovers.UNEQUAL_PART_WAVES if is_unequal else crossovers.PART_WAVES) * processors / programs)
    if _has_wide_window(x) and programs <= crossovers.WINDOW_WAVES * processors and most >= crossovers.WINDOW_PARTS:
        wanted = max(wanted, crossovers.WINDOW_PARTS)
    return max(1, min(wanted, most))


def _has_wide_window(problem: Problem) -> bool:
    """Returns whether `WINDOW_PARTS` were measured for such a window."""
    x = problem
    keys = 0 if x.window_left is None or x.window_right is None else x.window_left + 1 + x.window_right
    is_plain = not (x.is_modified or x.has_lengths or x.dropout_p > 0)
    return is_plain and keys >= crossovers.WIDE_WINDOW and max(x.q.shape[-1], x.v.shape[-1]) <= 128


def head_parts(problem: Problem, rows: int) -> HeadParts | None:
    """Returns the parts of the `number_of_head_parts`, all but the last one of equal size; None: there is one part."""
    heads = cdiv(problem.group_size, number_of_head_parts(problem, rows))
    number = cdiv(problem.group_size, heads)
    return HeadParts(number=number, heads=heads) if number > 1 else None


def walk_of_call(
    problem: Problem, blocks: int, section: int, *, is_fused: bool = False, parts: HeadParts | None = None
) -> tuple[int, Walk | None]:
    """Returns (key heads whose programs precede those of other heads, the walk) of a backward with `blocks` key blocks a head.

    section: number of key heads that fit in L2. is_fused: whether the backward is fused. parts: each counts like a key head. The
    walk is None if the kernel has no turns: if a program has one query head, without a causal mask, and with a window or a block
    mask. It is also None for two kernels at head dims above 128 in 16 bits, because turns take 3 % longer there.

    Waves of whole heads are best, if they leave few multiprocessors idle. Otherwise, with few heads, programs of all heads are
    ordered by length, and a wave has as many programs as there are multiprocessors. In packed batches of unequal sequences no wave
    begins together, and all programs visit their sequence's last queries first.
    """
    x = problem
    visited, lists = (x.group_size, 1) if parts is None else (parts.heads, parts.number)
    if visited == 1 or x.window_right is None or x.window_left is not None or x.block_mask is not None:
        return section, None
    if not is_fused and x.q.shape[-1] > 128 and x.q.element_size() > 1:
        return section, None
    if x.has_lengths:
        is_uneven = x.num_keys < x.batch * x.longest_kv
        return section, Walk(turn=_TURN if is_uneven else _WHOLE, wave=_ALL)
    heads, processors = x.batch * x.num_heads_kv * lists, num_processors(x.device)
    size = processors // blocks  # heads whose blocks fill one wave
    if size > 0 and heads % size == 0 and size * blocks >= _FULL * processors:
        return size, Walk(turn=_TURN, wave=size * blocks)
    if size > 0 and heads <= _MOST_HEADS:
        return heads, Walk(turn=_TURN, wave=processors)
    return section, Walk(turn=_WHOLE, wave=_ALL)


def last_section(problem: Problem, heads: int, blocks: int, section: int) -> int | None:
    """Returns the first head of a larger last section for a backward with a block mask; None: all sections are alike.

    Programs of one head may have very unequal work under a block mask. If the longest programs of the last heads began after all
    others, most multiprocessors would wait for them.
    """
    x = problem
    if x.block_mask is None or x.has_lengths:
        return None
    last = cdiv(crossovers.LAST_WAVES * num_processors(x.device), blocks)
    return max(0, heads - last) // section * section if last > section else None


def backward_work(
    problem: Problem,
    rows: int,
    side: Literal["q", "kv"],
    bytes_per_head: int,
    *,
    is_fused: bool = False,
    parts: HeadParts | None = None,
) -> tuple[Work, int]:
    """Returns (the order of programs of `rows` queries or keys each, their number).

    bytes_per_head: bytes that the programs of one head read, or add to, repeatedly. is_fused: whether they are a fused backward's,
    which has heads in sections of equal size in dense calls (`section_of_one_size`). parts: for keys; each has programs like a key
    head.
    """
    x = problem
    longest, heads = (x.longest_q, x.num_heads) if side == "q" else (x.longest_kv, x.num_heads_kv)
    heads *= 1 if parts is None else parts.number
    blocks = triton.cdiv(longest, rows)
    table = None if not x.has_lengths else tile_schedule(x, rows, side, by_sequence=True)
    section, walk = heads_per_l2_section(x, heads, bytes_per_head), None
    if is_fused and not x.has_lengths:
        section = section_of_one_size(x.batch * heads, section)
    if side == "kv":
        section, walk = walk_of_call(x, blocks, section, is_fused=is_fused, parts=parts)
    work = Work(
        table_ptr=table,
        num_heads=x.num_heads,
        group_size=x.group_size,
        blocks=blocks,
        heads_per_l2_section=section,
        walk=walk,
        parts=parts,
        last_section=last_section(x, x.batch * heads, blocks, section),
    )
    return work, (blocks * x.batch if table is None else table.shape[0] - 2) * heads


def key_block_numbers(features: Features) -> int:
    """Returns how many integers `find_key_block` returns."""
    return 3 + 4 * features.HAS_LENGTHS + 4 * (features.BLOCK_SIZE_Q > 0)
