"""Forward attention on sm_90 of few queries over FP8 keys and values, in Gluon, without shared memory for the cache.

Loading the keys is almost all of the work, so there are few steps. Each warp loads 32 keys at a time in the operand layout of
mma.sync, converts them in registers, and has its own softmax. Warps meet only at the end of a work tile. The next block is loaded
while one is multiplied. A tile is 16 rows: the queries of heads that share a key head.

Products are in fp16, which represents every FP8 number. It also represents q after each row is multiplied by a power of two.
Factors of k multiply the scores. If v has a factor for each token, it multiplies the weights, relative to the power of two below
the largest factor so far. That power multiplies the sums at the end.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flexattn.kernels_triton.common.addressing import row_pointer
from flexattn.kernels_triton.common.arguments import Head
from flexattn.kernels_triton.common.band import visible_keys, visible_range_of_keys
from flexattn.kernels_triton.common.exponents import LN2, LOG2E, exponent_factor, log_of_sum, scaled_row_max
from flexattn.kernels_triton.common.fp8_tiles import descaled, load_descale
from flexattn.kernels_triton.common.heads import head_of
from flexattn.kernels_triton.common.launch_order import wait_for_previous
from flexattn.kernels_triton.common.plan_pieces import entry_at, first_row_of_part, part_of_piece, piece_at, share_of_program
from flexattn.kernels_triton.common.problem import Problem, rows
from flexattn.kernels_triton.common.scores import logits
from flexattn.kernels_triton.common.sequences import load_sequence
from flexattn.kernels_triton.common.split_kv import PlannedTile, combine_parts, number_of_splits, split_results, tiles_and_room
from flexattn.kernels_triton.common.split_ranges import part_row, range_of_blocks, range_of_split
from flexattn.kernels_triton.common.tile_schedule import zero_padding
from flexattn.kernels_triton.common.tiles import slots_of_heads
from flexattn.kernels_triton.gluon.conditions import unsupported_values
from flexattn.kernels_triton.hopper.fp8_cache_operands import (
    CacheArguments,
    CacheMeta,
    Keys,
    Work,
    find_pages,
    inverse_power,
    key_layout,
    keys_of_warps,
    largest_exponent,
    load_keys,
    load_queries,
    load_token_factors,
    load_values,
    product_with_keys,
    rows_and_heads,
    scores_layout,
    sum_of_warps,
    sum_with_values,
    value_layout,
    with_blocks,
    words_of,
)
from flexattn.kernels_triton.runtime.device import Tile
from flexattn.kernels_triton.runtime.launch import hopper_kernel, launch

_ROWS = 16  # rows of mma.sync
_WARPS = 8  # warps that fit in the registers of a multiprocessor
_HEAD_DIMS = (64, 128, 256)
# added to exponents of weights: multiplied by a factor below 2, they are in fp16 from 2**-24 up to less than 2**16
_OFFSET = gl.constexpr(14.0)


class _Sequence(NamedTuple):
    """A work tile's sequence."""

    start_q: int | gl.tensor
    len_q: gl.tensor
    len_kv: gl.tensor
    shift: gl.tensor  # the band's diagonal


class _Queries(NamedTuple):
    """A tile's operand of products, and its rows."""

    q: gl.tensor
    factor: gl.tensor  # factor of each row
    i: gl.tensor  # query positions that broadcast against scores
    head: Head
    descale: float | gl.tensor  # k's, if it has one for the head


class _Products(NamedTuple):
    """Products of a block of keys with q."""

    qk: gl.tensor
    factors_k: gl.tensor  # if each token has one
    factors_v: gl.tensor
    first: gl.tensor  # the block's first key
    is_cut: gl.tensor  # whether an edge hides some


class _Sums(NamedTuple):
    """The softmax of each warp, or of all warps, so far."""

    acc: gl.tensor
    row_sum: gl.tensor
    row_max: gl.tensor  # in units of log2; for unbounded logits in natural units, which keeps the maximum exact
    unit: int | gl.tensor  # factor of acc if v's tokens have factors: the bits of a power of two for each warp


class _Results(NamedTuple):
    """The results of a tile, or of its part."""

    out: gl.tensor
    columns: gl.tensor
    lse: gl.tensor
    lost: float | gl.tensor  # rounding error of lse, for unbounded logits
    i: gl.tensor  # queries
    heads: gl.tensor
    is_real: gl.tensor  # whether the query exists


@gluon.jit
def _weights(products: _Products, sums: _Sums, queries: _Queries, args: CacheArguments, MODS: gl.constexpr, META: gl.constexpr):
    # Returns (weights of a block of keys, sums without its values)
    head, i = queries.head, queries.i
    j = (products.first + keys_of_warps(gl.SliceLayout(1, scores_layout(META.WARPS)), META))[:, None, :]
    qk = products.qk
    if META.IS_BF16:
        qk = qk * queries.factor[:, :, None]
    score_scale = args.inputs.scores.scale
    if META.HAS_TOKEN_SCALES_K:
        qk = qk * products.factors_k[:, None, :]
    else:
        qk, score_scale = descaled(qk, queries.descale, score_scale, META)
    s, factor, _cap_tanh, _score = logits(qk, i, j, score_scale, head, MODS, META)
    if products.is_cut:
        s = gl.where(visible_keys(i, j, head.len_kv, head.shift, args.inputs.band, META), s, float("-inf"))
    if META.HAS_MASK_MOD:
        s = gl.where(MODS.mask(head.b, head.h, i, j, head.captures), s, float("-inf"))
    if META.IS_UNBOUNDED:
        new_max = gl.maximum(sums.row_max, gl.max(s, 2))
        factor = exponent_factor(new_max)
        scaled_max = scaled_row_max(new_max, factor, _OFFSET)
        correction = gl.exp2(scaled_row_max(sums.row_max, factor, _OFFSET) - scaled_max)
        p = gl.exp2(gl.fma(s, factor[:, :, None], -scaled_max[:, :, None]))
    else:
        new_max = gl.maximum(sums.row_max, gl.max(s, 2) * factor)
        scaled_max = gl.where(new_max == float("-inf"), 0.0, new_max)  # if a row has seen nothing yet, exp2(-inf - 0) is 0
        correction = gl.exp2(sums.row_max - scaled_max)
        p = gl.exp2(gl.fma(s, factor, _OFFSET - scaled_max[:, :, None]))
    row_sum = sums.row_sum * correction + gl.sum(p, 2)
    unit = sums.unit
    if META.HAS_TOKEN_SCALES_V:
        unit = gl.maximum(unit, largest_exponent(products.factors_v, 1))
        p = p * (products.factors_v * inverse_power(unit)[:, None])[:, None, :]
        change = sums.unit.to(gl.float32, bitcast=True) * inverse_power(unit)
        correction = correction * gl.convert_layout(change, gl.SliceLayout(1, correction.type.layout))[:, None]
    return p, _Sums(acc=sums.acc * correction[:, :, None], row_sum=row_sum, row_max=new_max, unit=unit)


@gluon.jit
def _queries_of_tile(work: Work, sequence: _Sequence, h_kv, args: CacheArguments, MODS: gl.constexpr, META: gl.constexpr):
    inputs = args.inputs
    descale = 1.0
    if not META.HAS_TOKEN_SCALES_K:
        descale = load_descale(inputs.scales.k, work.b, h_kv, 0, 1, META)
    q, factor = load_queries(work, sequence.start_q, sequence.len_q, args, META)
    i, heads = rows_and_heads(work, sequence.len_q, gl.SliceLayout(0, gl.SliceLayout(2, scores_layout(META.WARPS))), META)
    len_q, len_kv = sequence.len_q, sequence.len_kv
    return _Queries(
        q=q,
        factor=factor,
        i=i[None, :, None],
        head=head_of(inputs.scores, work.b, heads[None, :, None], len_q, len_kv, sequence.shift, MODS, META),
        descale=descale,
    )


@gluon.jit
def _sums_of_blocks(
    sums: _Sums, visible, work: Work, sequence: _Sequence, keys: Keys, args: CacheArguments, MODS: gl.constexpr, META: gl.constexpr
):
    BLOCK_N: gl.constexpr = META.BLOCK_N
    pages_k = find_pages(visible.begin, keys, args, key_layout(META), META)
    pages_v = find_pages(visible.begin, keys, args, value_layout(META), META)
    pages = pages_v
    k = load_keys(visible.begin, pages_k, keys, args, META)
    v = load_values(visible.begin, pages_v, keys, args, META)
    pages_k = find_pages(visible.begin + BLOCK_N, keys, args, key_layout(META), META)
    pages_v = find_pages(visible.begin + BLOCK_N, keys, args, value_layout(META), META)
    queries = _queries_of_tile(work, sequence, keys.h_kv, args, MODS, META)
    for first in range(visible.begin, visible.end, BLOCK_N):
        factors_k, factors_v = load_token_factors(first, pages, keys, args, META)
        is_cut = (first < visible.full_begin) | (first >= visible.full_end)
        products = _Products(
            qk=product_with_keys(queries.q, k, META), factors_k=factors_k, factors_v=factors_v, first=first, is_cut=is_cut
        )
        k = load_keys(first + BLOCK_N, pages_k, keys, args, META)
        pages_k = find_pages(first + 2 * BLOCK_N, keys, args, key_layout(META), META)
        p, sums = _weights(products, sums, queries, args, MODS, META)
        acc = sum_with_values(p, v, sums.acc, META)
        sums = _Sums(acc=acc, row_sum=sums.row_sum, row_max=sums.row_max, unit=sums.unit)
        v = load_values(first + BLOCK_N, pages_v, keys, args, META)
        pages = pages_v
        pages_v = find_pages(first + 2 * BLOCK_N, keys, args, value_layout(META), META)
    return sums


@gluon.jit
def _sums_of_warps(sums: _Sums, META: gl.constexpr):
    # Returns the softmax of all warps; acc stays separate for each warp, scaled for the final sum
    row_max = gl.max(sums.row_max, 0)
    if META.IS_UNBOUNDED:
        factor = exponent_factor(row_max)[None, :]
        correction = gl.exp2(scaled_row_max(sums.row_max, factor, _OFFSET) - scaled_row_max(row_max[None, :], factor, _OFFSET))
    else:
        correction = gl.exp2(sums.row_max - gl.where(row_max == float("-inf"), 0.0, row_max)[None, :])
    row_sum = gl.sum(sums.row_sum * correction, 0)
    if META.HAS_TOKEN_SCALES_V:
        unit = sums.unit.to(gl.float32, bitcast=True)
        correction = correction * gl.convert_layout(unit, gl.SliceLayout(1, correction.type.layout))[:, None]
    return _Sums(acc=sums.acc * correction[:, :, None], row_sum=row_sum, row_max=row_max, unit=0)


@gluon.jit
def _with_sink(row_sum, row_max, sink, META: gl.constexpr):
    # Returns (row sum, row maximum, correction of the earlier sums)
    new_max = gl.maximum(row_max, sink)
    if META.IS_UNBOUNDED:
        factor = exponent_factor(new_max)
        scaled_max = scaled_row_max(new_max, factor, _OFFSET)
        correction = gl.exp2(scaled_row_max(row_max, factor, _OFFSET) - scaled_max)
        sink_weight = gl.exp2(gl.fma(sink, factor, -scaled_max))
    else:
        scaled_max = gl.where(new_max == float("-inf"), 0.0, new_max)
        correction = gl.exp2(row_max - scaled_max)
        sink_weight = gl.exp2(sink - scaled_max + _OFFSET)
    return row_sum * correction + sink_weight, new_max, correction


@gluon.jit
def _lse(row_sum, row_max, META: gl.constexpr):
    # Returns (lse, its rounding error for unbounded logits)
    if META.IS_UNBOUNDED:
        factor = exponent_factor(row_max)
        return log_of_sum(row_max, factor, scaled_row_max(row_max, factor, _OFFSET), row_sum)
    else:
        return (row_max - _OFFSET + gl.log2(row_sum)) * LN2, 0.0


@gluon.jit
def _store_results(results: _Results, work: Work, start_q, args: CacheArguments, META: gl.constexpr):
    place = (results.heads if META.IS_RAGGED_Q else work.b * args.inputs.num_heads + results.heads).to(gl.int64)
    gl.store(args.lse_ptr + place * args.inputs.lengths_q.num_tokens + start_q + results.i, results.lse, mask=results.is_real)
    pointers = row_pointer(args.out, work.b, results.heads, start_q + results.i, META)[:, None] + results.columns
    gl.store(pointers, results.out.to(args.out.ptr.dtype.element_ty), mask=results.is_real[:, None] & (results.columns >= 0))


@gluon.jit
def _store_part(results: _Results, work: Work, start_q, args: CacheArguments, META: gl.constexpr):
    inputs = args.inputs
    lengths = inputs.lengths_q
    if META.IS_PLANNED:
        in_tile = results.i - work.block * (META.BLOCK_M // META.GROUP)
        place = first_row_of_part(args.plan, work.part) + in_tile * META.SLOTS + results.heads
        num_rows = first_row_of_part(args.plan, args.plan.num_parts)
    else:
        place = (results.heads if META.IS_RAGGED_Q else work.b * inputs.num_heads + results.heads).to(gl.int64)
        place = place * lengths.num_tokens + start_q + results.i
        place += part_row(work.split, lengths.batch, inputs.num_heads, lengths.num_tokens, META)
        num_rows = part_row(args.num_splits, lengths.batch, inputs.num_heads, lengths.num_tokens, META)
    gl.store(args.parts_lse_ptr + place, results.lse, mask=results.is_real)
    if META.IS_UNBOUNDED:
        gl.store(args.parts_lse_ptr + num_rows + place, results.lost, mask=results.is_real)
    pointers = (args.parts_ptr + place * META.HEAD_DIM_V)[:, None] + results.columns
    gl.store(pointers, results.out, mask=results.is_real[:, None] & (results.columns >= 0))


@gluon.jit
def _store_tile(sums: _Sums, buffer, work: Work, start_q, len_q, args: CacheArguments, META: gl.constexpr):
    # Stores the results of a tile, or its part
    HEAD_DIM: gl.constexpr = META.HEAD_DIM_V
    BLOCK_M: gl.constexpr = META.BLOCK_M
    THREADS: gl.constexpr = min(32, HEAD_DIM // 4)  # threads that share a row
    WARPS: gl.constexpr = META.WARPS
    WARPS_LAYOUT: gl.constexpr = gl.BlockedLayout([WARPS, 1, 4], [1, 32 // THREADS, THREADS], [1, WARPS, 1], [2, 1, 0])
    OUT: gl.constexpr = gl.SliceLayout(0, WARPS_LAYOUT)
    ROW: gl.constexpr = gl.SliceLayout(1, OUT)
    inputs = args.inputs
    row_sum = gl.convert_layout(sums.row_sum, ROW)
    row_max = gl.convert_layout(sums.row_max, ROW)
    i, heads = rows_and_heads(work, len_q, ROW, META)
    is_real = i < len_q
    rescale = gl.full([BLOCK_M], 1.0, gl.float32, layout=ROW)
    if META.HAS_SINK:
        sink = gl.zeros([BLOCK_M], gl.float32, layout=ROW)
        if META.HAS_OFFSET:
            sink = gl.load(inputs.softmax_offset_ptr + heads).to(gl.float32) * (1.0 if META.IS_UNBOUNDED else LOG2E)
        if META.IS_SPLIT:
            sink = gl.where(work.split == 0, sink, float("-inf"))
        row_sum, row_max, rescale = _with_sink(row_sum, row_max, sink, META)
    row_sum = gl.where(row_sum == 0.0, 1.0, row_sum)  # if a row sees nothing, out is 0 / 1 and lse -inf + 0
    rescale = rescale / row_sum
    if not META.HAS_TOKEN_SCALES_V:
        rescale *= load_descale(inputs.scales.v, work.b, work.h // inputs.group_size, 0, 1, META)
    lse, lost = _lse(row_sum, row_max, META)
    results = _Results(
        out=sum_of_warps(sums.acc, buffer, WARPS_LAYOUT, META) * rescale[:, None],
        columns=gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, OUT))[None, :],
        lse=lse,
        lost=lost,
        i=i,
        heads=heads,
        is_real=is_real,
    )
    if META.IS_PLANNED:
        if work.is_whole:
            _store_results(results, work, start_q, args, META)
        else:
            _store_part(results, work, start_q, args, META)
    elif META.IS_SPLIT:
        _store_part(results, work, start_q, args, META)
    else:
        _store_results(results, work, start_q, args, META)


@gluon.jit
def _attend(work: Work, buffer, args: CacheArguments, MODS: gl.constexpr, META: gl.constexpr):
    # Runs a work tile, or its part
    SCORES: gl.constexpr = scores_layout(META.WARPS)
    ROW: gl.constexpr = gl.SliceLayout(2, SCORES)
    WARPS: gl.constexpr = META.WARPS
    BLOCK_M: gl.constexpr = META.BLOCK_M
    HEAD_DIM: gl.constexpr = META.HEAD_DIM_V
    inputs = args.inputs
    start_q, len_q = load_sequence(inputs.lengths_q, work.b, META.IS_RAGGED_Q)
    start_kv, len_kv = load_sequence(inputs.lengths_kv, work.b, META.IS_RAGGED_KV)
    shift = (len_kv - len_q) * inputs.band.bottom_right
    first_row = work.block * (BLOCK_M // META.GROUP)
    visible = visible_range_of_keys(first_row, len_kv, shift, inputs.band, META)
    if META.IS_PLANNED:
        # the plan has one block even if the tile sees none
        seen = gl.maximum(gl.cdiv(visible.end - visible.begin, META.BLOCK_N), 1)
        work = with_blocks(work, seen)
        visible = range_of_blocks(visible, work.split, work.end, META.BLOCK_N)
    elif META.IS_SPLIT:
        visible = range_of_split(visible, work.split, args.num_splits, META.BLOCK_N, META.PIECE)
    sums = _Sums(
        acc=gl.zeros([WARPS, BLOCK_M, HEAD_DIM], gl.float32, layout=SCORES),
        row_sum=gl.zeros([WARPS, BLOCK_M], gl.float32, layout=ROW),
        row_max=gl.full([WARPS, BLOCK_M], float("-inf"), gl.float32, layout=ROW),
        unit=gl.full([WARPS], 0x00800000, gl.int32, layout=gl.SliceLayout(1, gl.SliceLayout(1, SCORES))),
    )
    if (visible.begin < visible.end) & (first_row < len_q):
        last = visible.end - 1
        h_kv = work.h // inputs.group_size
        keys = Keys(b=work.b, h_kv=h_kv, start=start_kv, last=last, last_run=last // META.RUN * META.RUN)
        sequence = _Sequence(start_q=start_q, len_q=len_q, len_kv=len_kv, shift=shift)
        sums = _sums_of_blocks(sums, visible, work, sequence, keys, args, MODS, META)
    _store_tile(_sums_of_warps(sums, META), buffer, work, start_q, len_q, args, META)


@hopper_kernel
def _attn_fwd_fp8_cache_kernel(args: CacheArguments, MODS: gl.constexpr, META: gl.constexpr):
    WARPS: gl.constexpr = META.WARPS
    BLOCK_M: gl.constexpr = META.BLOCK_M
    HEAD_DIM: gl.constexpr = META.HEAD_DIM_V
    SUMS: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [2, 1, 0])
    buffer = gl.allocate_shared_memory(gl.float32, [WARPS, BLOCK_M, HEAD_DIM], SUMS)
    wait_for_previous(META.IS_SPLIT)
    if META.IS_PLANNED:
        plan = args.plan
        groups = args.inputs.num_heads // META.HEADS
        program = gl.program_id(0) // groups  # programs of all heads process the same keys side by side
        share, total = share_of_program(plan)
        t = program * share  # counts the key blocks of all sequences
        end = gl.minimum(t + share, total)
        entry = entry_at(plan, t)
        while t < end:
            piece = piece_at(plan, program, t, end, entry)
            entry = piece.entry
            work = Work(
                b=entry // plan.blocks,
                h=gl.program_id(0) % groups * META.HEADS,
                block=entry % plan.blocks,
                split=piece.first,
                end=piece.end,
                part=part_of_piece(plan, piece),
                is_whole=False,
            )
            _attend(work, buffer, args, MODS, META)
            t += piece.end - piece.first
    else:
        t = gl.program_id(0)
        split = 0
        if META.IS_SPLIT:
            split = t % args.num_splits
            t = t // args.num_splits
        blocks = gl.cdiv(args.inputs.lengths_q.max_seqlen, META.BLOCK_M // META.GROUP)
        groups = args.inputs.num_heads // META.HEADS
        work = Work(
            b=t // blocks // groups,
            h=t // blocks % groups * META.HEADS,
            block=t % blocks,
            split=split,
            end=0,
            part=0,
            is_whole=True,
        )
        _attend(work, buffer, args, MODS, META)


def unsupported(problem: Problem, out: Tensor, has_max_logit: bool) -> str | None:
    """Returns the reason if the kernel cannot run this problem, with k and v in FP8 and q in 16 bits; None: it can."""
    x = problem
    if x.q.dtype not in (torch.bfloat16, torch.float16):
        return f"it takes q in bf16 and fp16, not {str(x.q.dtype).removeprefix('torch.')}"
    if has_max_logit:
        return "it does not return max_logit"
    if x.dropout_p > 0 or x.block_mask is not None:
        return "it takes neither dropout nor a block mask"
    if x.is_batch_invariant:
        return "it supports only few queries, with results that differ bitwise from those among many queries"
    if error := unsupported_values(x):
        return error
    if x.q.shape[-1] not in _HEAD_DIMS or x.v.shape[-1] not in _HEAD_DIMS:
        return f"it takes head dims 64, 128 and 256, not {x.q.shape[-1]} and {x.v.shape[-1]}"
    return _unaligned("q", x.q) or _unaligned("k", x.k) or _unaligned("v", x.v)


def _unaligned(name: str, x: Tensor) -> str | None:
    steps = [stride for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1]
    if x.stride(-1) == 1 and all(step * x.element_size() % 16 == 0 for step in steps) and (x.is_meta or x.data_ptr() % 16 == 0):
        return None
    return f"it loads 16 bytes at a time, and not all rows of {name} begin at multiples of that"


def tile_of(problem: Problem) -> Tile:
    """Returns the committed tile: 32 keys of each warp, or 16 if registers allow no more.

    At head dim 128, programs of two warps were 7 % faster than programs of four in two runs on an H200: fewer warps wait when one
    ends.
    """
    widest = max(problem.q.shape[-1], problem.v.shape[-1])
    return Tile(_ROWS, 64, 2, 1) if widest == 128 else Tile(_ROWS, 128 if widest == 64 else 64, 4, 1)


def heads_of_a_tile(problem: Problem, tile: Tile) -> int:
    """Returns how many query heads of one key head share a tile: all of them if the tile has rows for them, otherwise a power of
    two.
    """
    x = problem
    room = max(1, tile.block_m // x.longest_q)
    if slots_of_heads(x.group_size) <= room:
        return x.group_size
    return min(x.group_size & -x.group_size, 1 << (room.bit_length() - 1))


def programs_of(tile: Tile) -> int:
    """Returns the number of programs that a multiprocessor runs at once."""
    return _WARPS // tile.num_warps


def fp8_cache_forward(problem: Problem, out: Tensor, lse: Tensor, tile: Tile | None = None, splits: int | None = None) -> None:
    """Launches the forward of a call that `unsupported` does not reject. Writes out, in q's layout with v's head dim, and lse.

    splits: number of KV splits, or BY_LENGTHS; None: `number_of_splits`.
    """
    x = problem
    tile = tile or tile_of(x)
    group = heads_of_a_tile(x, tile)
    tiles, room = tiles_and_room(x, tile, group, programs_of(tile))
    splits = number_of_splits(x, tiles, room) if splits is None else splits
    slots = slots_of_heads(group)
    # Programs of all heads process the same keys side by side: the plan is for one head, and a part has the rows of all heads.
    planned = PlannedTile(heads=x.num_heads, queries=tile.block_m // slots, seen=tile.block_m, keys=tile.block_n, writes_whole=True)
    groups = x.num_heads // group
    plan, parts = split_results(x, planned, splits, max(1, room // groups), lse, out.shape[-1])
    programs = tiles * splits if plan is None else plan.programs * groups
    rows_meta = x.meta(tile, (out,))
    page_size = 0 if x.page_table is None else x.k.shape[1]
    meta = CacheMeta(
        **x.features._asdict(),
        HAS_SINK=x.has_sink,
        HAS_OFFSET=x.softmax_offset is not None,
        HAS_TOKEN_SCALES_K=x.has_token_scales[0],
        HAS_TOKEN_SCALES_V=x.has_token_scales[1],
        IS_E5M2=x.k.dtype is torch.float8_e5m2,
        IS_BF16=x.q.dtype is torch.bfloat16,
        IS_PAGED=page_size > 0,
        IS_POWER=page_size & (page_size - 1) == 0,
        RUN=math.gcd(page_size, tile.block_n // tile.num_warps),
        IS_SPLIT=parts is not None,
        IS_PLANNED=plan is not None,
        SLOTS=slots_of_heads(x.num_heads),
        HEADS=group,
        GROUP=slots,
        HEAD_DIM_QK=x.q.shape[-1],
        HEAD_DIM_V=x.v.shape[-1],
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        WARPS=tile.num_warps,
        ALIGN=rows_meta.ALIGN,
    )
    args = CacheArguments(
        inputs=x.inputs(rows_meta)._replace(q=words_of(x.q), k=words_of(x.k), v=words_of(x.v)),
        page_shift=max(0, page_size.bit_length() - 1),
        out=rows(out, rows_meta),
        lse_ptr=lse,
        parts_ptr=None if parts is None else parts.out,
        parts_lse_ptr=None if parts is None else parts.lse,
        num_splits=splits if splits > 1 else None,
        plan=plan,
    )
    launch(_attn_fwd_fp8_cache_kernel, programs, out.device, tile, (args, x.mods, meta))
    if parts is not None:
        combine_parts(x, parts, (out, lse), plan, planned)
    elif x.has_padding_q:
        zero_padding(x, out, "q", lse)
