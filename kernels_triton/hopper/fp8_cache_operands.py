"""Operands of the forward for FP8 caches on sm_90: its arguments, and keys, values and queries in the layouts of `mma.sync`.

The bytes of k and v are read as words of four numbers, 16 bytes a load, into the registers of the threads that multiply them. A
word becomes two pairs of 16 bits. A product's columns may have any order if both operands, or v and out, have the same order. So
each thread's columns are neighbours in memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from flexattn.kernels_triton.common.arguments import Inputs, Pointer, Rows, Scale
from flexattn.kernels_triton.common.features import with_features
from flexattn.kernels_triton.common.plan_pieces import Plan
from flexattn.kernels_triton.runtime.entry import WidePointer


@with_features
class CacheMeta(NamedTuple):
    """Constants that the kernel is compiled for, besides `Features`."""

    HAS_SINK: bool
    HAS_OFFSET: bool
    HAS_TOKEN_SCALES_K: bool  # k has a factor for each token and head, and so has v; otherwise one for each head
    HAS_TOKEN_SCALES_V: bool
    IS_E5M2: bool  # k and v are E5M2, otherwise E4M3
    IS_BF16: bool  # q and out are bf16, otherwise fp16
    IS_PAGED: bool
    IS_POWER: bool  # a page's size is a power of two
    RUN: int  # maximum contiguous keys of a warp's block: in one page if there are pages
    IS_SPLIT: bool  # KV is split across programs, and each writes a partial result, see `split_ranges.Parts`
    IS_PLANNED: bool  # split points come from a `Plan`, for all heads together
    SLOTS: int  # rows of such a part for a query: the number of heads, rounded up to a power of two
    HEADS: int  # query heads of a tile; its rows are the first query of each head, then the second, ..
    GROUP: int  # rows of one query: the next power of two from HEADS; the last rows may belong to no head
    HEAD_DIM_QK: int
    HEAD_DIM_V: int
    BLOCK_M: int
    BLOCK_N: int
    WARPS: int  # warps, which share the keys of a block equally
    ALIGN: int  # strides of q and out are multiples of this many elements
    HAS_BLOCK_SCALES: bool = False  # always False; `fp8_tiles.load_descale` reads it


class CacheArguments(NamedTuple):
    inputs: Inputs  # with q, k and v from `words_of`
    page_shift: int  # logarithm of a page's size, if that is a power of two
    out: Rows
    lse_ptr: Pointer
    parts_ptr: WidePointer  # `split_ranges.Parts`, if keys are split
    parts_lse_ptr: Pointer
    num_splits: int | None  # number of KV splits
    plan: Plan | None  # the plan of the parts, instead of num_splits


class Work(NamedTuple):
    """A work tile inside a kernel."""

    b: gl.tensor
    h: gl.tensor  # the first of HEADS heads
    block: gl.tensor  # number among the query blocks
    split: int | gl.tensor  # number of the split; with a plan, its first key block
    end: int | gl.tensor  # with a plan, the end of its key blocks, and the number of its part
    part: int | gl.tensor
    is_whole: bool | gl.tensor  # with a plan, whether no other program has key blocks of this tile


class Keys(NamedTuple):
    """Keys of one sequence and head inside a kernel."""

    b: gl.tensor
    h_kv: gl.tensor
    start: int
    last: gl.tensor  # the last key to load
    last_run: gl.tensor  # the first key of its run


@gluon.jit
def with_blocks(work: Work, seen):
    # Returns a planned tile that sees `seen` key blocks
    is_whole = (work.split == 0) & (work.end >= seen)
    return Work(b=work.b, h=work.h, block=work.block, split=work.split, end=work.end, part=work.part, is_whole=is_whole)


class _Strides(NamedTuple):
    """Strides of a tensor of keys, or of their factors, inside a kernel."""

    slot: gl.tensor  # a page or a sequence
    token: gl.tensor
    head: gl.tensor


def words_of(x: Tensor) -> Rows:
    """Returns q, k or v as words of 32 bits, with strides in units of 16 bytes."""
    # Dims of size 1 may have any stride, and `view` rejects a stride that is not a multiple of a word.
    strides = [0 if size == 1 else stride for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)]
    words = x.as_strided(x.shape, (*strides, 1)).view(torch.int32)
    strides = [stride // 4 for stride in words.stride()[:-1]]
    stride_b, stride_s, stride_h = (0, *strides) if x.dim() == 3 else strides
    return Rows(ptr=words, stride_b=stride_b, stride_s=stride_s, stride_h=stride_h)


@gluon.constexpr_function
def scores_layout(WARPS):
    # Layout of [warps, rows, keys of a warp], and of out with columns in place of keys
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[WARPS, 1, 1], instr_shape=[1, 16, 8])


@gluon.constexpr_function
def _bits(count, step, axis, RUN=0):
    # Bases of a layout along one of its six axes: step, 2 * step, .. below count * step; keys have two axes, by their RUN
    steps = [step << bit for bit in range(count.bit_length() - 1)]
    if RUN > 0:
        return [[0, x // RUN, 0, 0, 0, 0] if x >= RUN else [0, 0, x, 0, 0, 0] for x in steps]
    return [[x if row_in_tile == axis else 0 for row_in_tile in range(6)] for x in steps]


@gluon.constexpr_function
def _key_words(WARPS, KEYS, RUN, HEAD_DIM):
    # Layout of words [warps, runs, keys of a run, head dim / 64, 4, 4]. In each 64 columns a thread has 16 neighbouring ones. In
    # the product they are pairs at 0 and 8 of each of four groups of 16.
    registers = _bits(4, 1, 5) + _bits(HEAD_DIM // 64, 1, 3) + _bits(KEYS // 8, 8, 1, RUN)
    lanes = _bits(4, 1, 4) + _bits(8, 1, 1, RUN)
    return gl.DistributedLinearLayout(registers, lanes, _bits(WARPS, 1, 0), [], [WARPS, KEYS // RUN, RUN, HEAD_DIM // 64, 4, 4])


@gluon.constexpr_function
def words_of_thread(HEAD_DIM):
    # Neighbouring words of a row of v that one thread has
    return min(4, HEAD_DIM // 32)


@gluon.constexpr_function
def _value_words(WARPS, KEYS, RUN, HEAD_DIM):
    # Layout of words [warps, runs, keys of a run, head dim / 32 / words, 8, words of a thread]. In the product a thread's columns
    # are eight apart.
    words = words_of_thread(HEAD_DIM)
    parts = HEAD_DIM // (32 * words)
    registers = _bits(words, 1, 5) + _bits(parts, 1, 3) + _bits(2, 1, 1, RUN) + _bits(KEYS // 8, 8, 1, RUN)
    lanes = _bits(4, 2, 1, RUN) + _bits(8, 1, 4)
    return gl.DistributedLinearLayout(registers, lanes, _bits(WARPS, 1, 0), [], [WARPS, KEYS // RUN, RUN, parts, 8, words])


@gluon.constexpr_function
def key_layout(META):
    return _key_words(META.WARPS, META.BLOCK_N // META.WARPS, META.RUN, META.HEAD_DIM_QK)


@gluon.constexpr_function
def value_layout(META):
    return _value_words(META.WARPS, META.BLOCK_N // META.WARPS, META.RUN, META.HEAD_DIM_V)


@gluon.constexpr_function
def _conversion(IS_E5M2):
    # Converts four FP8 numbers in 32 bits to two pairs of fp16
    cvt = "cvt.rn.f16x2.e5m2x2" if IS_E5M2 else "cvt.rn.f16x2.e4m3x2"
    return f"{{ .reg .b16 a, b; mov.b32 {{a, b}}, $2; {cvt} $0, a; {cvt} $1, b; }}"


@gluon.jit
def _numbers_of_words(words, META: gl.constexpr):
    # Returns [..., 2, 2]: the numbers of each word in fp16; numbers 0 and 2 are at [0, 0] and [0, 1]
    assembly: gl.constexpr = _conversion(META.IS_E5M2)
    low, high = gl.inline_asm_elementwise(assembly, "=r,=r,r", [words], dtype=(gl.int32, gl.int32), is_pure=True, pack=1)
    low = gl.join(low.to(gl.int16), (low >> 16).to(gl.int16))
    high = gl.join(high.to(gl.int16), (high >> 16).to(gl.int16))
    return gl.join(low, high).to(gl.float16, bitcast=True)


@gluon.jit
def keys_of_warps(LAYOUT: gl.constexpr, META: gl.constexpr):
    # Returns [warps, keys]: numbers of the keys of a block
    WARPS: gl.constexpr = META.WARPS
    KEYS: gl.constexpr = META.BLOCK_N // WARPS
    warps = gl.arange(0, WARPS, layout=gl.SliceLayout(1, LAYOUT))
    keys = gl.arange(0, KEYS, layout=gl.SliceLayout(0, LAYOUT))
    return warps[:, None] * KEYS + keys[None, :]


@gluon.jit
def rows_and_heads(work: Work, len_q, LAYOUT: gl.constexpr, META: gl.constexpr):
    # Returns (query, head) of each row; rows of no head count as rows past the sequence's end
    row_in_tile = gl.arange(0, META.BLOCK_M, layout=LAYOUT)
    i = work.block * (META.BLOCK_M // META.GROUP) + row_in_tile // META.GROUP
    head_in_tile = row_in_tile % META.GROUP
    if META.HEADS < META.GROUP:
        i = gl.where(head_in_tile < META.HEADS, i, len_q)
        head_in_tile = gl.minimum(head_in_tile, META.HEADS - 1)
    return i, work.h + head_in_tile


@gluon.constexpr_function
def _keys_layout(LAYOUT):
    return gl.SliceLayout(3, gl.SliceLayout(4, gl.SliceLayout(5, LAYOUT)))


@gluon.jit
def _runs(first, keys: Keys, LAYOUT: gl.constexpr, META: gl.constexpr):
    # Returns [warps, runs]: the first key of each run of a block; past the end, the last run's
    RUN: gl.constexpr = META.RUN
    WARPS: gl.constexpr = META.WARPS
    KEYS: gl.constexpr = META.BLOCK_N // WARPS
    RUNS: gl.constexpr = gl.SliceLayout(2, _keys_layout(LAYOUT))
    warps = gl.arange(0, WARPS, layout=gl.SliceLayout(1, RUNS)) * KEYS
    runs = gl.arange(0, KEYS // RUN, layout=gl.SliceLayout(0, RUNS)) * RUN
    return gl.minimum(first + warps[:, None] + runs[None, :], keys.last_run)


@gluon.jit
def _column(key, args: CacheArguments, META: gl.constexpr):
    # Returns the index of a key's page among the pages of its sequence
    if META.IS_POWER:
        return key >> args.page_shift
    else:
        return key // args.inputs.pages.page_size


@gluon.jit
def find_pages(first, keys: Keys, args: CacheArguments, LAYOUT: gl.constexpr, META: gl.constexpr):
    # Returns [warps, runs]: ids of the pages of a block's keys, clamped; 0 for a dense cache. No entry after the last key's is
    # read.
    key = _runs(first, keys, LAYOUT, META)
    if META.IS_PAGED:
        pages = args.inputs.pages
        page = gl.load(pages.table_ptr + keys.b.to(gl.int64) * pages.stride + _column(key, args, META))
        return gl.minimum(gl.maximum(page, 0), pages.num_pages - 1)
    else:
        return key * 0


@gluon.jit
def _places(first, pages, strides: _Strides, keys: Keys, args: CacheArguments, LAYOUT: gl.constexpr, META: gl.constexpr):
    # Returns [warps, runs, keys of a run]: offsets of the head's rows, in units of the strides (sequence or page, token, head).
    # Past the end: the last row's.
    RUN: gl.constexpr = META.RUN
    key = _runs(first, keys, LAYOUT, META)
    slot, row = keys.b.to(gl.int64), key + keys.start
    if META.IS_PAGED:
        slot, row = pages.to(gl.int64), key - _column(key, args, META) * args.inputs.pages.page_size
    start = slot * strides.slot + row.to(gl.int64) * strides.token + keys.h_kv.to(gl.int64) * strides.head
    in_run = gl.arange(0, RUN, layout=gl.SliceLayout(0, gl.SliceLayout(1, _keys_layout(LAYOUT))))[None, None, :]
    in_run = gl.minimum(in_run, (keys.last - key)[:, :, None])
    return start[:, :, None] + in_run.to(gl.int64) * strides.token


@gluon.jit
def _words_of_row(LAYOUT: gl.constexpr):
    # Returns numbers of the words of a row, along the last three axes
    PARTS: gl.constexpr = LAYOUT.shape[3]
    GROUPS: gl.constexpr = LAYOUT.shape[4]
    WORDS: gl.constexpr = LAYOUT.shape[5]
    GROUPS_LAYOUT: gl.constexpr = gl.SliceLayout(5, LAYOUT)
    PARTS_LAYOUT: gl.constexpr = gl.SliceLayout(4, GROUPS_LAYOUT)
    PART: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, PARTS_LAYOUT)))
    GROUP: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, GROUPS_LAYOUT))))
    WORD: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, LAYOUT)))))
    part = gl.arange(0, PARTS, layout=PART)[None, None, None, :, None, None]
    group = gl.arange(0, GROUPS, layout=GROUP)[None, None, None, None, :, None]
    word = gl.arange(0, WORDS, layout=WORD)[None, None, None, None, None, :]
    return (part * GROUPS + group) * WORDS + word


@gluon.jit
def _load_words(x: Rows, first, pages, keys: Keys, args: CacheArguments, LAYOUT: gl.constexpr, META: gl.constexpr):
    # Loads the words of a block of keys or values from `first` on
    strides = _Strides(slot=x.stride_b, token=x.stride_s, head=x.stride_h)
    rows = _places(first, pages, strides, keys, args, LAYOUT, META)
    return gl.load((x.ptr + rows * 4)[:, :, :, None, None, None] + _words_of_row(LAYOUT))


@gluon.jit
def load_keys(first, pages, keys: Keys, args: CacheArguments, META: gl.constexpr):
    return _load_words(args.inputs.k, first, pages, keys, args, key_layout(META), META)


@gluon.jit
def load_values(first, pages, keys: Keys, args: CacheArguments, META: gl.constexpr):
    return _load_words(args.inputs.v, first, pages, keys, args, value_layout(META), META)


@gluon.jit
def _token_factors(scale: Scale, first, pages, keys: Keys, args: CacheArguments, META: gl.constexpr):
    # Returns [warps, keys]: the factors of a block's tokens, in the pages of its values
    WARPS: gl.constexpr = META.WARPS
    KEYS: gl.constexpr = META.BLOCK_N // WARPS
    LAYOUT: gl.constexpr = value_layout(META)
    strides = _Strides(slot=scale.stride_b, token=scale.stride_block, head=scale.stride_h)
    factors = gl.load(scale.ptr + _places(first, pages, strides, keys, args, LAYOUT, META))
    return gl.convert_layout(gl.reshape(factors, [WARPS, KEYS]), gl.SliceLayout(1, scores_layout(WARPS)))


@gluon.jit
def load_token_factors(first, pages, keys: Keys, args: CacheArguments, META: gl.constexpr):
    # Returns (factors of the tokens of a block of k, and of v); 1 without factors
    factors_k, factors_v = 1.0, 1.0
    if META.HAS_TOKEN_SCALES_K:
        factors_k = _token_factors(args.inputs.scales.k, first, pages, keys, args, META)
    if META.HAS_TOKEN_SCALES_V:
        factors_v = _token_factors(args.inputs.scales.v, first, pages, keys, args, META)
    return factors_k, factors_v


@gluon.jit
def largest_exponent(x, AXIS: gl.constexpr):
    # Returns the bits of the largest power of two, among those that have an inverse, up to the largest magnitude
    largest = gl.max(x.to(gl.int32, bitcast=True) & 0x7FFFFFFF, AXIS)  # bits order like the numbers
    return gl.minimum(gl.maximum(largest & 0x7F800000, 0x00800000), 0x7E800000)


@gluon.jit
def inverse_power(exponent):
    return (0x7F000000 - exponent).to(gl.float32, bitcast=True)


@gluon.constexpr_function
def _query_words(WARPS, ROWS, HEAD_DIM):
    # Layout of words [warps, rows, 1, head dim / 64, 4, 8], with the columns in the same threads as in `_key_words`
    registers = _bits(8, 1, 5) + _bits(HEAD_DIM // 64, 1, 3) + _bits(ROWS // 8, 8, 1)
    lanes = _bits(4, 1, 4) + _bits(8, 1, 1)
    return gl.DistributedLinearLayout(registers, lanes, _bits(WARPS, 1, 0), [], [WARPS, ROWS, 1, HEAD_DIM // 64, 4, 8])


@gluon.jit
def load_queries(work: Work, start_q, len_q, args: CacheArguments, META: gl.constexpr):
    # Returns (q in fp16 as the operand of products, the factor of each row: for bf16 a power of two that keeps q in range)
    SCORES: gl.constexpr = scores_layout(META.WARPS)
    WARPS: gl.constexpr = META.WARPS
    BLOCK_M: gl.constexpr = META.BLOCK_M
    HEAD_DIM: gl.constexpr = META.HEAD_DIM_QK
    LAYOUT: gl.constexpr = _query_words(WARPS, BLOCK_M, HEAD_DIM)
    ROWS: gl.constexpr = gl.SliceLayout(2, _keys_layout(LAYOUT))
    q_words = args.inputs.q
    i, heads = rows_and_heads(work, len_q, gl.SliceLayout(0, ROWS), META)
    rows = (
        heads.to(gl.int64) * q_words.stride_h
        + (start_q + i).to(gl.int64) * q_words.stride_s
        + work.b.to(gl.int64) * q_words.stride_b
    )
    warps = gl.arange(0, WARPS, layout=gl.SliceLayout(1, ROWS))[:, None] * 0
    columns = _words_of_row(LAYOUT)
    inside = (i[None, :] + warps < len_q)[:, :, None, None, None, None] & (columns >= 0)
    words = gl.load(q_words.ptr + (rows[None, :] * 4 + warps)[:, :, None, None, None, None] + columns, mask=inside, other=0)
    factor = gl.full([WARPS, BLOCK_M], 1.0, gl.float32, layout=gl.SliceLayout(2, SCORES))
    if META.IS_BF16:
        q = gl.join((words << 16).to(gl.float32, bitcast=True), (words & -65536).to(gl.float32, bitcast=True))
    else:
        q = gl.join(words.to(gl.int16), (words >> 16).to(gl.int16)).to(gl.float16, bitcast=True)
    q = gl.reshape(gl.permute(q, [0, 1, 2, 3, 5, 4, 6]), [WARPS, BLOCK_M, HEAD_DIM])
    if META.IS_BF16:
        exponent = largest_exponent(q, 2)
        q = (q * inverse_power(exponent)[:, :, None]).to(gl.float16)
        factor = gl.convert_layout(exponent.to(gl.float32, bitcast=True), gl.SliceLayout(2, SCORES))
    return gl.convert_layout(q, gl.DotOperandLayout(0, SCORES, 2), assert_trivial=True), factor


@gluon.jit
def product_with_keys(q, words, META: gl.constexpr):
    # Returns products of q with a block of keys: [warps, rows, keys]
    SCORES: gl.constexpr = scores_layout(META.WARPS)
    WARPS: gl.constexpr = META.WARPS
    BLOCK_M: gl.constexpr = META.BLOCK_M
    HEAD_DIM: gl.constexpr = META.HEAD_DIM_QK
    KEYS: gl.constexpr = META.BLOCK_N // WARPS
    k = gl.permute(_numbers_of_words(words, META), [0, 3, 5, 7, 4, 6, 1, 2])
    k = gl.convert_layout(gl.reshape(k, [WARPS, HEAD_DIM, KEYS]), gl.DotOperandLayout(1, SCORES, 2), assert_trivial=True)
    return mma_v2(q, k, gl.zeros([WARPS, BLOCK_M, KEYS], gl.float32, layout=SCORES))


@gluon.jit
def sum_with_values(p, words, acc, META: gl.constexpr):
    # Returns acc plus the product of weights with values
    SCORES: gl.constexpr = scores_layout(META.WARPS)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    WARPS: gl.constexpr = META.WARPS
    HEAD_DIM: gl.constexpr = META.HEAD_DIM_V
    KEYS: gl.constexpr = META.BLOCK_N // WARPS
    v = gl.permute(_numbers_of_words(words, META), [0, 1, 2, 3, 5, 7, 6, 4])
    v = gl.convert_layout(gl.reshape(v, [WARPS, KEYS, HEAD_DIM]), gl.DotOperandLayout(1, SCORES, 2), assert_trivial=True)
    return mma_v2(gl.convert_layout(p.to(gl.float16), WEIGHTS), v, acc)


@gluon.jit
def sum_of_warps(acc, buffer, LAYOUT: gl.constexpr, META: gl.constexpr):
    # Returns [rows, columns] of out, in order, from the results of `sum_with_values` in each warp
    WARPS: gl.constexpr = META.WARPS
    BLOCK_M: gl.constexpr = META.BLOCK_M
    HEAD_DIM: gl.constexpr = META.HEAD_DIM_V
    WORDS_PER_THREAD: gl.constexpr = 4 * words_of_thread(HEAD_DIM)
    parts = gl.reshape(acc, [WARPS, BLOCK_M, HEAD_DIM // (8 * WORDS_PER_THREAD), WORDS_PER_THREAD, 8])
    buffer.store(gl.reshape(gl.permute(parts, [0, 1, 2, 4, 3]), [WARPS, BLOCK_M, HEAD_DIM]))
    return gl.sum(buffer.load(LAYOUT), 0)
