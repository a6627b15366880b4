"""Forward attention on sm_90 of few queries over keys and values in FP8, in Gluon: a cache's bytes go from memory to registers.

To load keys is all there is to do, so nothing else is between: each warp loads 32 keys at a time as the operands of `mma.sync` want
them, 16 bytes a load, converts them in registers, and has a softmax of its own. Warps meet only when a work tile ends. The next block
is loaded while one is multiplied. A tile is 16 rows: the queries of heads that share a key head.

Products are in fp16, which holds every number of FP8, and q as well, once a row is multiplied by a power of two. Where v has a factor
for each token, weights times these are in bf16, as they may be of any size: for q in fp16 in two parts, so that 16 bits of them count.
Factors of k are multiplied with scores.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from flexattn.kernels_triton.common.arguments import Head, Inputs, Pointer, Rows
from flexattn.kernels_triton.common.primitives import (
    LN2,
    LOG2E,
    descaled,
    exponent_factor,
    head_of,
    load_descale,
    load_sequence,
    log_of_sum,
    logits,
    row_pointer,
    scaled_row_max,
    visible_keys,
    visible_range_of_keys,
)
from flexattn.kernels_triton.common.problem import Problem, rows, with_features
from flexattn.kernels_triton.common.split_kv import (
    BY_LENGTHS,
    Parts,
    combine_splits,
    number_of_splits,
    part_row,
    range_of_blocks,
    range_of_split,
)
from flexattn.kernels_triton.common.split_plan import (
    Plan,
    PlannedTile,
    combine_pieces,
    entry_at,
    first_row_of_part,
    make_plan,
    piece_at,
    share_of_program,
)
from flexattn.kernels_triton.common.tile_schedule import zero_padding
from flexattn.kernels_triton.common.tiles import SPLIT_PROGRAMS, cdiv, slots_of_heads
from flexattn.kernels_triton.runtime.launch import Tile, capability_of, hopper_kernel, launch, num_processors

TILE = Tile(16, 128, 4, 1)
"""Rows of mma.sync, and 32 keys of each of four warps."""

_HEAD_DIMS = (64, 128)
_WEIGHTS_OFFSET = gl.constexpr(14.0)  # added to exponents of weights in fp16, whose largest is 2**15.99 and whose smallest 2**-24

# Four numbers of FP8 in 32 bits as two pairs of 16 bits
_TO_FP16 = gl.constexpr("{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.rn.f16x2.KINDx2 $0, a; cvt.rn.f16x2.KINDx2 $1, b; }")
_TO_BF16 = gl.constexpr(
    "{ .reg .b16 a, b, c, d; .reg .b32 x, y; .reg .f32 f, g; mov.b32 {a, b}, $2; "
    "cvt.rn.f16x2.KINDx2 x, a; mov.b32 {c, d}, x; cvt.f32.f16 f, c; cvt.f32.f16 g, d; cvt.rn.bf16x2.f32 $0, g, f; "
    "cvt.rn.f16x2.KINDx2 y, b; mov.b32 {c, d}, y; cvt.f32.f16 f, c; cvt.f32.f16 g, d; cvt.rn.bf16x2.f32 $1, g, f; }"
)


@with_features
class CacheMeta(NamedTuple):
    """Constants that the kernel is compiled for, besides `Features`."""

    HAS_SINK: bool
    HAS_OFFSET: bool
    HAS_TOKEN_SCALES_K: bool  # a factor for each token and head of k, and of v; else one for each head
    HAS_TOKEN_SCALES_V: bool
    HAS_BLOCK_SCALES: bool  # no: `primitives.load_descale` asks
    IS_E5M2: bool  # k and v, else e4m3
    IS_BF16: bool  # q and out, else fp16
    IS_PAGED: bool
    IS_POWER: bool  # a page's size is a power of two
    IS_SPLIT: bool  # the keys, between programs: each leaves a part, as `split_kv.Parts` has them, or with
    IS_PLANNED: bool  # as `split_plan` has them
    HEADS: int  # query heads of a tile, whose rows are the first query of each, then the second, ..
    GROUP: int  # rows that a query's heads take: the power of two from HEADS on, so that the last may be rows of no head
    HEAD_DIM_QK: int
    HEAD_DIM_V: int
    BLOCK_M: int
    BLOCK_N: int
    WARPS: int
    ALIGN: int  # strides of q and out are multiples of this many elements


class CacheArguments(NamedTuple):
    inputs: Inputs  # with k and v as words of four numbers, and their strides in units of four words
    page_shift: int  # of pages whose size is a power of two: its logarithm
    out: Rows
    lse_ptr: Pointer
    num_splits: int | None  # parts of the keys, with out and lse as `split_kv.Parts`; None: out and lse are the results, but
    plan: Plan | None  # with a plan those of `split_plan`


class _Work(NamedTuple):
    """A work tile inside a kernel."""

    b: Any
    h: Any  # the first of HEADS heads
    block: Any  # of queries
    split: Any  # its number; with a plan its first block of keys
    end: Any  # with a plan, the end of its blocks of keys, and the number of its part
    part: Any


class _Keys(NamedTuple):
    """Keys of one sequence and head inside a kernel."""

    b: Any
    h_kv: Any
    start: Any
    last: Any  # the last one that is to be loaded


class _Queries(NamedTuple):
    """A tile's operand of products, and its rows."""

    q: Any
    factor: Any  # of each row of q
    i: Any  # queries, as they broadcast against scores
    head: Head
    descale: Any  # of k, where it is one for the head


class _Block(NamedTuple):
    """A block of keys and values on its way, and the factors of its tokens."""

    k: Any
    v: Any
    scale_k: Any
    scale_v: Any


class _Sums(NamedTuple):
    """The softmax of each warp so far."""

    acc: Any  # [warps, rows, columns of v in the order of `_value_words`]
    row_sum: Any
    row_max: Any  # in units of log2, but for unbounded logits, whose largest is exact


@gluon.constexpr_function
def _bits(count, step, place):
    # Bases of a layout along the axis `place` of five: step, 2 * step, .. below count * step
    return [[step << bit if axis == place else 0 for axis in range(5)] for bit in range(count.bit_length() - 1)]


@gluon.constexpr_function
def _key_words(WARPS, KEYS, HEAD_DIM):
    # Layout of words [warps, keys, head dim / 64, 4, 4]. In each 64 columns a thread has 16 that are neighbours; of the product's own
    # columns these are pairs at 0 and 8 of each of four groups of 16.
    registers = _bits(4, 1, 4) + _bits(HEAD_DIM // 64, 1, 2) + _bits(KEYS // 8, 8, 1)
    lanes = _bits(4, 1, 3) + _bits(8, 1, 1)
    return gl.DistributedLinearLayout(registers, lanes, _bits(WARPS, 1, 0), [], [WARPS, KEYS, HEAD_DIM // 64, 4, 4])


@gluon.constexpr_function
def _words_of_thread(HEAD_DIM):
    return min(4, HEAD_DIM // 32)


@gluon.constexpr_function
def _value_words(WARPS, KEYS, HEAD_DIM):
    # Layout of words [warps, keys, head dim / 32 / words, 8, words of a thread], whose columns are neighbours; the product has them
    # eight apart.
    words = _words_of_thread(HEAD_DIM)
    parts = HEAD_DIM // (32 * words)
    registers = _bits(words, 1, 4) + _bits(parts, 1, 2) + _bits(2, 1, 1) + _bits(KEYS // 8, 8, 1)
    lanes = _bits(4, 2, 1) + _bits(8, 1, 3)
    return gl.DistributedLinearLayout(registers, lanes, _bits(WARPS, 1, 0), [], [WARPS, KEYS, parts, 8, words])


@gluon.constexpr_function
def _conversion(IS_E5M2, IS_BF16):
    return (_TO_BF16 if IS_BF16 else _TO_FP16).value.replace("KIND", "e5m2" if IS_E5M2 else "e4m3")


@gluon.jit
def _numbers_of_words(words, DTYPE: gl.constexpr, META: gl.constexpr):
    # [..., 2, 2]: the numbers of each word in 16 bits, those at 0 and 2 in [0, 0] and [0, 1]
    assembly: gl.constexpr = _conversion(META.IS_E5M2, gl.bfloat16 == DTYPE)
    low, high = gl.inline_asm_elementwise(assembly, "=r,=r,r", [words], dtype=(gl.int32, gl.int32), is_pure=True, pack=1)
    low = gl.join(low.to(gl.int16), (low >> 16).to(gl.int16))
    high = gl.join(high.to(gl.int16), (high >> 16).to(gl.int16))
    return gl.join(low, high).to(DTYPE, bitcast=True)


@gluon.jit
def _keys_of_warps(WARPS: gl.constexpr, KEYS: gl.constexpr, LAYOUT: gl.constexpr):
    # [warps, keys]: numbers of the keys of a block
    warps = gl.arange(0, WARPS, layout=gl.SliceLayout(1, LAYOUT))
    keys = gl.arange(0, KEYS, layout=gl.SliceLayout(0, LAYOUT))
    return warps[:, None] * KEYS + keys[None, :]


@gluon.jit
def _slots(numbers, keys: _Keys, args: CacheArguments, META: gl.constexpr):
    # (page or sequence, row in it) of keys by number. Ids of pages are clamped; no entry beyond the last key's is read.
    numbers = gl.minimum(numbers, keys.last)
    if META.IS_PAGED:
        pages = args.inputs.pages
        if META.IS_POWER:
            column = numbers >> args.page_shift
        else:
            column = numbers // pages.page_size
        page = gl.load(pages.table_ptr + keys.b.to(gl.int64) * pages.stride + column)
        page = gl.minimum(gl.maximum(page, 0), pages.num_pages - 1)
        return page.to(gl.int64), (numbers - column * pages.page_size).to(gl.int64)
    else:
        return keys.b.to(gl.int64), (numbers + keys.start).to(gl.int64)


@gluon.jit
def _load_words(x: Rows, first, keys: _Keys, args: CacheArguments, LAYOUT: gl.constexpr, META: gl.constexpr):
    # The words of a block of keys or values from `first` on
    WARPS: gl.constexpr = META.WARPS
    PARTS: gl.constexpr = LAYOUT.shape[2]
    GROUPS: gl.constexpr = LAYOUT.shape[3]
    WORDS: gl.constexpr = LAYOUT.shape[4]
    IN_GROUP: gl.constexpr = gl.SliceLayout(4, LAYOUT)
    IN_PART: gl.constexpr = gl.SliceLayout(3, IN_GROUP)
    IN_ROW: gl.constexpr = gl.SliceLayout(2, IN_PART)
    slot, row = _slots(first + _keys_of_warps(WARPS, META.BLOCK_N // WARPS, IN_ROW), keys, args, META)
    start = slot * x.stride_b + row * x.stride_s + keys.h_kv.to(gl.int64) * x.stride_h
    OF_PART: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, IN_PART))
    OF_GROUP: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, IN_GROUP)))
    OF_WORD: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))))
    part = gl.arange(0, PARTS, layout=OF_PART)[None, None, :, None, None]
    group = gl.arange(0, GROUPS, layout=OF_GROUP)[None, None, None, :, None]
    word = gl.arange(0, WORDS, layout=OF_WORD)[None, None, None, None, :]
    pointers = (x.ptr + start * 4)[:, :, None, None, None]
    return gl.load(pointers + ((part * GROUPS + group) * WORDS + word))


@gluon.jit
def _load_token_factors(scale, first, keys: _Keys, args: CacheArguments, SCORES: gl.constexpr, META: gl.constexpr):
    numbers = first + _keys_of_warps(META.WARPS, META.BLOCK_N // META.WARPS, gl.SliceLayout(1, SCORES))
    slot, row = _slots(numbers, keys, args, META)
    return gl.load(scale.ptr + slot * scale.stride_b + row * scale.stride_block + keys.h_kv.to(gl.int64) * scale.stride_h)


@gluon.jit
def _load_keys(first, keys: _Keys, args: CacheArguments, SCORES: gl.constexpr, META: gl.constexpr):
    LAYOUT: gl.constexpr = _key_words(META.WARPS, META.BLOCK_N // META.WARPS, META.HEAD_DIM_QK)
    words = _load_words(args.inputs.k, first, keys, args, LAYOUT, META)
    if META.HAS_TOKEN_SCALES_K:
        return words, _load_token_factors(args.inputs.scales.k, first, keys, args, SCORES, META)
    else:
        return words, 1.0


@gluon.jit
def _load_values(first, keys: _Keys, args: CacheArguments, SCORES: gl.constexpr, META: gl.constexpr):
    LAYOUT: gl.constexpr = _value_words(META.WARPS, META.BLOCK_N // META.WARPS, META.HEAD_DIM_V)
    words = _load_words(args.inputs.v, first, keys, args, LAYOUT, META)
    if META.HAS_TOKEN_SCALES_V:
        return words, _load_token_factors(args.inputs.scales.v, first, keys, args, SCORES, META)
    else:
        return words, 1.0


@gluon.jit
def _scores(words, queries: _Queries, SCORES: gl.constexpr, META: gl.constexpr):
    # [warps, rows, keys]: products of q with keys
    WARPS: gl.constexpr = META.WARPS
    BLOCK_M: gl.constexpr = META.BLOCK_M
    HEAD_DIM: gl.constexpr = META.HEAD_DIM_QK
    KEYS: gl.constexpr = META.BLOCK_N // WARPS
    k = gl.permute(_numbers_of_words(words, gl.float16, META), [0, 2, 4, 6, 3, 5, 1])
    k = gl.reshape(k, [WARPS, HEAD_DIM, KEYS])
    k = gl.convert_layout(k, gl.DotOperandLayout(1, SCORES, 2), assert_trivial=True)
    return mma_v2(queries.q, k, gl.zeros([WARPS, BLOCK_M, KEYS], gl.float32, layout=SCORES))


@gluon.jit
def _sum_of_values(p, words, factors, acc, SCORES: gl.constexpr, META: gl.constexpr):
    # acc and the products of weights with values
    DTYPE: gl.constexpr = gl.bfloat16 if META.HAS_TOKEN_SCALES_V else gl.float16
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    WARPS: gl.constexpr = META.WARPS
    HEAD_DIM: gl.constexpr = META.HEAD_DIM_V
    KEYS: gl.constexpr = META.BLOCK_N // WARPS
    v = gl.permute(_numbers_of_words(words, DTYPE, META), [0, 1, 2, 4, 6, 5, 3])
    v = gl.reshape(v, [WARPS, KEYS, HEAD_DIM])
    v = gl.convert_layout(v, gl.DotOperandLayout(1, SCORES, 2), assert_trivial=True)
    if META.HAS_TOKEN_SCALES_V:
        p = p * factors[:, None, :]
    rounded = p.to(DTYPE)
    acc = mma_v2(gl.convert_layout(rounded, WEIGHTS), v, acc)
    if META.HAS_TOKEN_SCALES_V and not META.IS_BF16:
        rest = (p - rounded.to(gl.float32)).to(DTYPE)
        acc = mma_v2(gl.convert_layout(rest, WEIGHTS), v, acc)
    return acc


@gluon.jit
def _load_queries(work: _Work, start_q, len_q, args: CacheArguments, SCORES: gl.constexpr, META: gl.constexpr):
    # (q in fp16 as the operand of products, the factor of each row)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    WARPS: gl.constexpr = META.WARPS
    BLOCK_M: gl.constexpr = META.BLOCK_M
    OF_ROW: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, OPERAND))
    i, heads = _rows_and_heads(work, len_q, OF_ROW, META)
    pointers = row_pointer(args.inputs.q, work.b, heads, start_q + i, META)[None, :, None]
    place = gl.arange(0, META.HEAD_DIM_QK, layout=gl.SliceLayout(0, gl.SliceLayout(1, OPERAND)))
    # The columns of `_key_words`: pairs, the two of a word, words, threads, 64 columns
    column = (place & 1) | ((place >> 3 & 1) << 1) | ((place >> 4 & 3) << 2) | ((place >> 1 & 3) << 4) | (place >> 6 << 6)
    warps = gl.arange(0, META.WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, OPERAND)))[:, None, None]
    columns = column[None, None, :] + warps * 0
    q = gl.load(pointers + columns, mask=(i < len_q)[None, :, None] & (columns >= 0), other=0.0)
    factor = gl.full([WARPS, BLOCK_M], 1.0, gl.float32, layout=gl.SliceLayout(2, SCORES))
    if META.IS_BF16:
        q = q.to(gl.float32)
        largest = gl.max(q.to(gl.int32, bitcast=True) & 0x7FFFFFFF, 2)  # as numbers are in order by their bits
        exponent = gl.minimum(gl.maximum(largest & 0x7F800000, 0x00800000), 0x7F000000)
        q = (q * (0x7F000000 - exponent).to(gl.float32, bitcast=True)[:, :, None]).to(gl.float16)
        factor = gl.convert_layout(exponent.to(gl.float32, bitcast=True), gl.SliceLayout(2, SCORES))
    return q, factor


@gluon.jit
def _rows_and_heads(work: _Work, len_q, LAYOUT: gl.constexpr, META: gl.constexpr):
    # (query, head) of each row; rows of no head are as those past the sequence's end
    own = gl.arange(0, META.BLOCK_M, layout=LAYOUT)
    i = work.block * (META.BLOCK_M // META.GROUP) + own // META.GROUP
    own_head = own % META.GROUP
    if META.HEADS < META.GROUP:
        i = gl.where(own_head < META.HEADS, i, len_q)
        own_head = gl.minimum(own_head, META.HEADS - 1)
    return i, work.h + own_head


@gluon.jit
def _next_sums(
    sums: _Sums, qk, factors_k, first, is_cut, queries: _Queries, args: CacheArguments, SCORES: gl.constexpr, MODS: gl.constexpr, META: gl.constexpr
):
    # (weights of a block of keys, sums with all but its values)
    OFFSET: gl.constexpr = 0.0 if META.HAS_TOKEN_SCALES_V else _WEIGHTS_OFFSET
    head = queries.head
    j = (first + _keys_of_warps(META.WARPS, META.BLOCK_N // META.WARPS, gl.SliceLayout(1, SCORES)))[:, None, :]
    if META.IS_BF16:
        qk = qk * queries.factor[:, :, None]
    if META.HAS_TOKEN_SCALES_K:
        qk = qk * factors_k[:, None, :]
    score_scale = args.inputs.scores.scale
    if not META.HAS_TOKEN_SCALES_K:
        qk, score_scale = descaled(qk, queries.descale, score_scale, META)
    s, factor, _cap_tanh, _score = logits(qk, queries.i, j, score_scale, head, MODS, META)
    if is_cut:
        s = gl.where(visible_keys(queries.i, j, head.len_kv, head.shift, args.inputs.band, META), s, float("-inf"))
    if META.HAS_MASK_MOD:
        s = gl.where(MODS.mask(head.b, head.h, queries.i, j, head.captures), s, float("-inf"))
    if META.IS_UNBOUNDED:
        new_max = gl.maximum(sums.row_max, gl.max(s, 2))
        factor = exponent_factor(new_max)
        scaled_max = scaled_row_max(new_max, factor, OFFSET)
        correction = gl.exp2(scaled_row_max(sums.row_max, factor, OFFSET) - scaled_max)
        p = gl.exp2(gl.fma(s, factor[:, :, None], -scaled_max[:, :, None]))
    else:
        new_max = gl.maximum(sums.row_max, gl.max(s, 2) * factor)
        scaled_max = gl.where(new_max == float("-inf"), 0.0, new_max)  # where a row has seen nothing yet, exp2(-inf - 0) is 0
        correction = gl.exp2(sums.row_max - scaled_max)
        p = gl.exp2(gl.fma(s, factor, OFFSET - scaled_max[:, :, None]))
    row_sum = sums.row_sum * correction + gl.sum(p, 2)
    return p, _Sums(acc=sums.acc * correction[:, :, None], row_sum=row_sum, row_max=new_max)


@gluon.jit
def _sums_of_blocks(sums: _Sums, visible, queries: _Queries, keys: _Keys, args: CacheArguments, SCORES: gl.constexpr, MODS: gl.constexpr, META: gl.constexpr):
    BLOCK_N: gl.constexpr = META.BLOCK_N
    k, factors_k = _load_keys(visible.begin, keys, args, SCORES, META)
    v, factors_v = _load_values(visible.begin, keys, args, SCORES, META)
    for first in range(visible.begin, visible.end, BLOCK_N):
        is_cut = (first < visible.full_begin) | (first >= visible.full_end)
        qk = _scores(k, queries, SCORES, META)
        factors_of_k = factors_k
        k, factors_k = _load_keys(first + BLOCK_N, keys, args, SCORES, META)
        p, sums = _next_sums(sums, qk, factors_of_k, first, is_cut, queries, args, SCORES, MODS, META)
        acc = _sum_of_values(p, v, factors_v, sums.acc, SCORES, META)
        sums = _Sums(acc=acc, row_sum=sums.row_sum, row_max=sums.row_max)
        v, factors_v = _load_values(first + BLOCK_N, keys, args, SCORES, META)
    return sums


@gluon.jit
def _sums_of_warps(sums: _Sums, META: gl.constexpr):
    # (sums of all warps: acc [rows, columns], row sum, row maximum)
    OFFSET: gl.constexpr = 0.0 if META.HAS_TOKEN_SCALES_V else _WEIGHTS_OFFSET
    row_max = gl.max(sums.row_max, 0)
    if META.IS_UNBOUNDED:
        factor = exponent_factor(row_max)[None, :]
        correction = gl.exp2(scaled_row_max(sums.row_max, factor, OFFSET) - scaled_row_max(row_max[None, :], factor, OFFSET))
    else:
        correction = gl.exp2(sums.row_max - gl.where(row_max == float("-inf"), 0.0, row_max)[None, :])
    acc = gl.sum(sums.acc * correction[:, :, None], 0)
    return _Sums(acc=acc, row_sum=gl.sum(sums.row_sum * correction, 0), row_max=row_max)


@gluon.jit
def _store_tile(sums: _Sums, work: _Work, start_q, len_q, args: CacheArguments, META: gl.constexpr):
    # The results of a tile, or its part
    OFFSET: gl.constexpr = 0.0 if META.HAS_TOKEN_SCALES_V else _WEIGHTS_OFFSET
    HEAD_DIM: gl.constexpr = META.HEAD_DIM_V
    BLOCK_M: gl.constexpr = META.BLOCK_M
    OUT: gl.constexpr = gl.BlockedLayout([1, 4], [128 // HEAD_DIM, HEAD_DIM // 4], [META.WARPS, 1], [1, 0])
    OF_ROW: gl.constexpr = gl.SliceLayout(1, OUT)
    inputs = args.inputs
    batch = inputs.lengths_q.batch
    num_heads = inputs.num_heads
    num_tokens = inputs.lengths_q.num_tokens
    row_sum = gl.convert_layout(sums.row_sum, OF_ROW)
    row_max = gl.convert_layout(sums.row_max, OF_ROW)
    WORDS: gl.constexpr = _words_of_thread(HEAD_DIM)
    acc = gl.reshape(sums.acc, [BLOCK_M, HEAD_DIM // (32 * WORDS), 4 * WORDS, 8])
    acc = gl.convert_layout(gl.reshape(gl.permute(acc, [0, 1, 3, 2]), [BLOCK_M, HEAD_DIM]), OUT)
    i, heads = _rows_and_heads(work, len_q, OF_ROW, META)
    is_real = i < len_q
    rescale = gl.full([BLOCK_M], 1.0, gl.float32, layout=OF_ROW)
    if META.HAS_SINK:
        sink = gl.zeros([BLOCK_M], gl.float32, layout=OF_ROW)
        if META.HAS_OFFSET:
            sink = gl.load(inputs.softmax_offset_ptr + heads).to(gl.float32) * (1.0 if META.IS_UNBOUNDED else LOG2E)
        if META.IS_SPLIT:
            sink = gl.where(work.split == 0, sink, float("-inf"))
        new_max = gl.maximum(row_max, sink)
        if META.IS_UNBOUNDED:
            factor = exponent_factor(new_max)
            scaled_max = scaled_row_max(new_max, factor, OFFSET)
            rescale = gl.exp2(scaled_row_max(row_max, factor, OFFSET) - scaled_max)
            row_sum = row_sum * rescale + gl.exp2(gl.fma(sink, factor, -scaled_max))
        else:
            scaled_max = gl.where(new_max == float("-inf"), 0.0, new_max)
            rescale = gl.exp2(row_max - scaled_max)
            row_sum = row_sum * rescale + gl.exp2(sink - scaled_max + OFFSET)
        row_max = new_max
    row_sum = gl.where(row_sum == 0.0, 1.0, row_sum)  # where a row sees nothing, out is 0 / 1 and lse -inf + 0
    rescale = rescale / row_sum
    if not META.HAS_TOKEN_SCALES_V:
        rescale *= load_descale(inputs.scales.v, work.b, work.h // inputs.group_size, 0, META)
    lse_row = (heads if META.IS_RAGGED_Q else work.b * num_heads + heads).to(gl.int64) * num_tokens + start_q + i
    num_rows = part_row(1, batch, num_heads, num_tokens, META) * (args.num_splits if args.num_splits is not None else 1)
    if META.IS_PLANNED:
        lse_row = first_row_of_part(args.plan, work.part) + gl.arange(0, META.BLOCK_M, layout=OF_ROW)
        num_rows = first_row_of_part(args.plan, args.plan.num_parts)
    elif META.IS_SPLIT:
        lse_row += part_row(work.split, batch, num_heads, num_tokens, META)
    if META.IS_UNBOUNDED:
        factor = exponent_factor(row_max)
        lse, lost = log_of_sum(row_max, factor, scaled_row_max(row_max, factor, OFFSET), row_sum)
        if META.IS_SPLIT:
            gl.store(args.lse_ptr + num_rows + lse_row, lost, mask=is_real)
    else:
        lse = (row_max - OFFSET + gl.log2(row_sum)) * LN2
    gl.store(args.lse_ptr + lse_row, lse, mask=is_real)
    columns = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, OUT))[None, :]
    if META.IS_SPLIT:
        pointers = args.out.ptr + lse_row * HEAD_DIM
    else:
        pointers = row_pointer(args.out, work.b, heads, start_q + i, META)
    result = (acc * rescale[:, None]).to(args.out.ptr.dtype.element_ty)
    gl.store(pointers[:, None] + columns, result, mask=is_real[:, None] & (columns >= 0))


@gluon.jit
def _attend(work: _Work, args: CacheArguments, MODS: gl.constexpr, META: gl.constexpr):
    # A work tile, or its part
    WARPS: gl.constexpr = META.WARPS
    BLOCK_M: gl.constexpr = META.BLOCK_M
    HEAD_DIM: gl.constexpr = META.HEAD_DIM_V
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[WARPS, 1, 1], instr_shape=[1, 16, 8])
    inputs = args.inputs
    start_q, len_q = load_sequence(inputs.lengths_q, work.b, META.IS_RAGGED_Q)
    start_kv, len_kv = load_sequence(inputs.lengths_kv, work.b, META.IS_RAGGED_KV)
    shift = (len_kv - len_q) * inputs.band.bottom_right
    first_row = work.block * (BLOCK_M // META.GROUP)
    visible = visible_range_of_keys(first_row, len_kv, shift, inputs.band, META)
    if META.IS_PLANNED:
        visible = range_of_blocks(visible, work.split, work.end, META.BLOCK_N)
    elif META.IS_SPLIT:
        visible = range_of_split(visible, work.split, args.num_splits, META.BLOCK_N, META.PIECE)
    h_kv = work.h // inputs.group_size
    q, factor = _load_queries(work, start_q, len_q, args, SCORES, META)
    i, heads = _rows_and_heads(work, len_q, gl.SliceLayout(0, gl.SliceLayout(2, SCORES)), META)
    descale = 1.0
    if not META.HAS_TOKEN_SCALES_K:
        descale = load_descale(inputs.scales.k, work.b, h_kv, 0, META)
    queries = _Queries(
        q=q,
        factor=factor,
        i=i[None, :, None],
        head=head_of(inputs.scores, work.b, heads[None, :, None], len_q, len_kv, shift, MODS, META),
        descale=descale,
    )
    ROW: gl.constexpr = gl.SliceLayout(2, SCORES)
    sums = _Sums(
        acc=gl.zeros([WARPS, BLOCK_M, HEAD_DIM], gl.float32, layout=SCORES),
        row_sum=gl.zeros([WARPS, BLOCK_M], gl.float32, layout=ROW),
        row_max=gl.full([WARPS, BLOCK_M], float("-inf"), gl.float32, layout=ROW),
    )
    if (visible.begin < visible.end) & (first_row < len_q):
        keys = _Keys(b=work.b, h_kv=h_kv, start=start_kv, last=visible.end - 1)
        sums = _sums_of_blocks(sums, visible, queries, keys, args, SCORES, MODS, META)
    _store_tile(_sums_of_warps(sums, META), work, start_q, len_q, args, META)


@hopper_kernel
def _attn_fwd_fp8_cache_kernel(args: CacheArguments, MODS: gl.constexpr, META: gl.constexpr):
    inputs = args.inputs
    QUERIES: gl.constexpr = META.BLOCK_M // META.GROUP
    if META.IS_PLANNED:
        plan = args.plan
        share, total = share_of_program(plan)
        t = gl.program_id(0) * share  # blocks of keys of all work tiles
        end = gl.minimum(t + share, total)
        entry = entry_at(plan, t)
        while t < end:
            piece = piece_at(plan, gl.program_id(0), t, end, entry)
            entry = piece.entry
            work = _Work(
                b=entry // plan.blocks,
                h=piece.head * META.HEADS,
                block=entry % plan.blocks,
                split=piece.first,
                end=piece.end,
                part=entry * plan.groups + piece.head + piece.program,
            )
            _attend(work, args, MODS, META)
            t += piece.end - piece.first
    else:
        pid = gl.program_id(0)
        split = 0
        if META.IS_SPLIT:
            split = pid % args.num_splits
            pid = pid // args.num_splits
        blocks = gl.cdiv(inputs.lengths_q.max_seqlen, QUERIES)
        groups = inputs.num_heads // META.HEADS
        work = _Work(b=pid // blocks // groups, h=pid // blocks % groups * META.HEADS, block=pid % blocks, split=split, end=0, part=0)
        _attend(work, args, MODS, META)


def unsupported(problem: Problem, out: Tensor, has_max_logit: bool) -> str | None:
    """Returns why the kernel cannot run this problem; None: it can."""
    x = problem
    if not x.descales_kv:
        return "it takes k and v in FP8, beside q that is not"
    if capability_of(x.device) != 90:
        return "it was run on Hopper alone, sm_90"
    if x.q.dtype not in (torch.bfloat16, torch.float16):
        return f"it takes q in bf16 and fp16, not {str(x.q.dtype).removeprefix('torch.')}"
    if has_max_logit:
        return "it does not return max_logit"
    if x.dropout_p > 0 or x.block_mask is not None:
        return "it takes no dropout and no block mask"
    if x.softmax_scale == 0:
        return "it does not do a softmax_scale of 0"
    if 0 in x.q.shape or 0 in x.k.shape or x.batch == 0:
        return "there is nothing to load"
    if x.q.shape[-1] not in _HEAD_DIMS or x.v.shape[-1] not in _HEAD_DIMS:
        return f"it takes head dims {' and '.join(map(str, _HEAD_DIMS))}, not {x.q.shape[-1]} and {x.v.shape[-1]}"
    errors = (_unaligned(name, t) for name, t in (("k", x.k), ("v", x.v)))
    return next((error for error in errors if error), None)


def slower(problem: Problem) -> str | None:
    """Returns why the kernel is not expected to be faster than the portable one; None: it is."""
    x = problem
    if x.is_batch_invariant:
        return "a step's queries have the bits that they have among others in a longer call"
    if 2 * x.longest_q > TILE.block_m:
        return f"its tiles are {TILE.block_m} rows, and there are {x.longest_q} queries"
    return None


def _unaligned(name: str, x: Tensor) -> str | None:
    steps = [stride for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1]
    if x.stride(-1) == 1 and all(step % 16 == 0 for step in steps) and (x.is_meta or x.data_ptr() % 16 == 0):
        return None
    return f"it loads 16 bytes at a time, and {name}'s rows do not begin at multiples of them"


def heads_of_a_tile(problem: Problem, tile: Tile) -> int:
    """Returns how many query heads of one key head share a tile: all of them where it has rows for them, else a power of two."""
    x = problem
    room = max(1, tile.block_m // x.longest_q)
    if slots_of_heads(x.group_size) <= room:
        return x.group_size
    return min(x.group_size & -x.group_size, 1 << (room.bit_length() - 1))


def tiles_and_room(problem: Problem, tile: Tile, group: int) -> tuple[int, int]:
    """Returns (tiles of so many heads, programs that the device runs at once), for `number_of_splits`."""
    tiles = cdiv(problem.longest_q, tile.block_m // slots_of_heads(group)) * (problem.num_heads // group) * problem.batch
    return tiles, SPLIT_PROGRAMS * num_processors(problem.device)


def _words(x: Tensor) -> Rows:
    """k or v as words of four numbers, with strides in units of 16 bytes."""
    words = x.view(torch.int32)
    strides = [0 if size == 1 else stride // 4 for size, stride in zip(words.shape[:-1], words.stride()[:-1], strict=True)]
    stride_b, stride_s, stride_h = (0, *strides) if x.dim() == 3 else strides
    return Rows(ptr=words, stride_b=stride_b, stride_s=stride_s, stride_h=stride_h)


def fp8_cache_forward(
    problem: Problem,
    out: Tensor,
    lse: Tensor,
    tile: Tile = TILE,
    group: int | None = None,
    splits: int | None = None,
) -> None:
    """Launches the forward, of calls that `unsupported` does not name. Writes out, laid out as q with v's head dim, and lse.

    group: query heads of a tile; None: `heads_of_a_tile`.
    splits: parts of the keys, or BY_LENGTHS; None: `number_of_splits`.
    """
    x = problem
    group = heads_of_a_tile(x, tile) if group is None else group
    tiles, room = tiles_and_room(x, tile, group)
    splits = number_of_splits(x, tiles, room) if splits is None else splits
    slots = slots_of_heads(group)
    planned = PlannedTile(heads=group, queries=tile.block_m // slots, seen=tile.block_m, keys=tile.block_n)
    plan, parts, programs = None, None, tiles * splits
    if splits == BY_LENGTHS:
        plan, programs = make_plan(x, planned, room), room
        parts = plan.empty_parts(lse, out.shape[-1], x.is_unbounded)
    elif splits > 1:
        parts = Parts.empty(splits, lse, out.shape[-1], x.is_unbounded)
    of_all = x.meta(tile, (out,))
    page_size = 0 if x.page_table is None else x.k.shape[1]
    meta = CacheMeta(
        **x.features._asdict(),
        HAS_SINK=x.has_sink,
        HAS_OFFSET=x.softmax_offset is not None,
        HAS_TOKEN_SCALES_K=x.has_token_scales[0],
        HAS_TOKEN_SCALES_V=x.has_token_scales[1],
        HAS_BLOCK_SCALES=False,
        IS_E5M2=x.k.dtype is torch.float8_e5m2,
        IS_BF16=x.q.dtype is torch.bfloat16,
        IS_PAGED=page_size > 0,
        IS_POWER=page_size & (page_size - 1) == 0,
        IS_SPLIT=parts is not None,
        IS_PLANNED=plan is not None,
        HEADS=group,
        GROUP=slots,
        HEAD_DIM_QK=x.q.shape[-1],
        HEAD_DIM_V=x.v.shape[-1],
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        WARPS=tile.num_warps,
        ALIGN=of_all.ALIGN,
    )
    args = CacheArguments(
        inputs=x.inputs(of_all)._replace(k=_words(x.k), v=_words(x.v)),
        page_shift=max(0, page_size.bit_length() - 1),
        out=rows(out, of_all) if parts is None else Rows(ptr=parts.out, stride_b=0, stride_s=0, stride_h=0),
        lse_ptr=lse if parts is None else parts.lse,
        num_splits=splits if splits > 1 else None,
        plan=plan,
    )
    launch(_attn_fwd_fp8_cache_kernel, programs, out.device, tile, (args, x.mods, meta))
    if plan is not None and parts is not None:
        combine_pieces(x, plan, planned, parts, (out, lse))
    elif parts is not None:
        combine_splits(x, parts, out, lse)
    if plan is None and (x.cu_seqlens_q is not None or x.seqused_q is not None):
        zero_padding(x, out, "q", lse)
