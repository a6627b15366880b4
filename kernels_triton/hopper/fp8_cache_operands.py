"""Operands of the forward for FP8 caches on sm_90: its arguments, and keys, values and queries as `mma.sync` wants them.

The bytes of k and v are read as words of four numbers, 16 bytes a load, in the registers of the threads that multiply them; a word
becomes two pairs of 16 bits. What order a product has its columns in is free as long as both operands, or v and out, have the same:
so each thread's columns are neighbours in memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from flexattn.kernels_triton.common.arguments import Inputs, Pointer, Rows, Scale
from flexattn.kernels_triton.common.primitives import row_pointer
from flexattn.kernels_triton.common.problem import with_features
from flexattn.kernels_triton.common.split_plan import Plan


@with_features
class CacheMeta(NamedTuple):
    """Constants that the kernel is compiled for, besides `Features`."""

    HAS_SINK: bool
    HAS_OFFSET: bool
    HAS_TOKEN_SCALES_K: bool  # a factor for each token and head of k, and of v; else one for each head
    HAS_TOKEN_SCALES_V: bool
    HAS_BLOCK_SCALES: bool  # never: `primitives.load_descale` asks
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
    WARPS: int  # each has as many keys of a block
    ALIGN: int  # strides of q and out are multiples of this many elements


class CacheArguments(NamedTuple):
    inputs: Inputs  # with k and v as `words_of` has them
    page_shift: int  # logarithm of a page's size, where that is a power of two
    out: Rows
    lse_ptr: Pointer
    num_splits: int | None  # parts of the keys, with out and lse as `split_kv.Parts`; None: out and lse are the results, but
    plan: Plan | None  # with a plan those of `split_plan`


class Work(NamedTuple):
    """A work tile inside a kernel."""

    b: Any
    h: Any  # the first of HEADS heads
    block: Any  # number among the blocks of queries
    split: Any  # its number; with a plan its first block of keys
    end: Any  # with a plan, the end of its blocks of keys, and the number of its part
    part: Any


class Keys(NamedTuple):
    """Keys of one sequence and head inside a kernel."""

    b: Any
    h_kv: Any
    start: Any
    last: Any  # the last one that is to be loaded


def words_of(x: Tensor) -> Rows:
    """Returns k or v as words of four numbers, with strides in units of 16 bytes."""
    words = x.view(torch.int32)
    strides = [0 if size == 1 else stride // 4 for size, stride in zip(words.shape[:-1], words.stride()[:-1], strict=True)]
    stride_b, stride_s, stride_h = (0, *strides) if x.dim() == 3 else strides
    return Rows(ptr=words, stride_b=stride_b, stride_s=stride_s, stride_h=stride_h)


@gluon.constexpr_function
def scores_layout(WARPS):
    # Layout of [warps, rows, keys of a warp], and of out with columns in place of keys
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[WARPS, 1, 1], instr_shape=[1, 16, 8])


@gluon.constexpr_function
def _bits(count, step, place):
    # Bases of a layout along the axis `place` of five: step, 2 * step, .. below count * step
    return [[step << bit if axis == place else 0 for axis in range(5)] for bit in range(count.bit_length() - 1)]


@gluon.constexpr_function
def key_words(WARPS, KEYS, HEAD_DIM):
    # Layout of words [warps, keys, head dim / 64, 4, 4]. In each 64 columns a thread has 16 that are neighbours, which in the
    # product are pairs at 0 and 8 of each of four groups of 16.
    registers = _bits(4, 1, 4) + _bits(HEAD_DIM // 64, 1, 2) + _bits(KEYS // 8, 8, 1)
    lanes = _bits(4, 1, 3) + _bits(8, 1, 1)
    return gl.DistributedLinearLayout(registers, lanes, _bits(WARPS, 1, 0), [], [WARPS, KEYS, HEAD_DIM // 64, 4, 4])


@gluon.constexpr_function
def words_of_thread(HEAD_DIM):
    # Words of a row of v that are neighbours and one thread's
    return min(4, HEAD_DIM // 32)


@gluon.constexpr_function
def value_words(WARPS, KEYS, HEAD_DIM):
    # Layout of words [warps, keys, head dim / 32 / words, 8, words of a thread]. The product has a thread's columns eight apart.
    words = words_of_thread(HEAD_DIM)
    parts = HEAD_DIM // (32 * words)
    registers = _bits(words, 1, 4) + _bits(parts, 1, 2) + _bits(2, 1, 1) + _bits(KEYS // 8, 8, 1)
    lanes = _bits(4, 2, 1) + _bits(8, 1, 3)
    return gl.DistributedLinearLayout(registers, lanes, _bits(WARPS, 1, 0), [], [WARPS, KEYS, parts, 8, words])


@gluon.constexpr_function
def _conversion(IS_E5M2):
    # Four numbers of FP8 in 32 bits as two pairs of fp16
    cvt = "cvt.rn.f16x2.e5m2x2" if IS_E5M2 else "cvt.rn.f16x2.e4m3x2"
    return f"{{ .reg .b16 a, b; mov.b32 {{a, b}}, $2; {cvt} $0, a; {cvt} $1, b; }}"


@gluon.jit
def _numbers_of_words(words, META: gl.constexpr):
    # [..., 2, 2]: the numbers of each word in fp16, those at 0 and 2 in [0, 0] and [0, 1]
    assembly: gl.constexpr = _conversion(META.IS_E5M2)
    low, high = gl.inline_asm_elementwise(assembly, "=r,=r,r", [words], dtype=(gl.int32, gl.int32), is_pure=True, pack=1)
    low = gl.join(low.to(gl.int16), (low >> 16).to(gl.int16))
    high = gl.join(high.to(gl.int16), (high >> 16).to(gl.int16))
    return gl.join(low, high).to(gl.float16, bitcast=True)


@gluon.jit
def keys_of_warps(LAYOUT: gl.constexpr, META: gl.constexpr):
    # [warps, keys]: numbers of the keys of a block
    WARPS: gl.constexpr = META.WARPS
    KEYS: gl.constexpr = META.BLOCK_N // WARPS
    warps = gl.arange(0, WARPS, layout=gl.SliceLayout(1, LAYOUT))
    keys = gl.arange(0, KEYS, layout=gl.SliceLayout(0, LAYOUT))
    return warps[:, None] * KEYS + keys[None, :]


@gluon.jit
def rows_and_heads(work: Work, len_q, LAYOUT: gl.constexpr, META: gl.constexpr):
    # (query, head) of each row; rows of no head are as those past the sequence's end
    own = gl.arange(0, META.BLOCK_M, layout=LAYOUT)
    i = work.block * (META.BLOCK_M // META.GROUP) + own // META.GROUP
    own_head = own % META.GROUP
    if META.HEADS < META.GROUP:
        i = gl.where(own_head < META.HEADS, i, len_q)
        own_head = gl.minimum(own_head, META.HEADS - 1)
    return i, work.h + own_head


@gluon.jit
def _slots(numbers, keys: Keys, args: CacheArguments, META: gl.constexpr):
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
def _load_words(x: Rows, first, keys: Keys, args: CacheArguments, LAYOUT: gl.constexpr, META: gl.constexpr):
    # The words of a block of keys or values from `first` on
    PARTS: gl.constexpr = LAYOUT.shape[2]
    GROUPS: gl.constexpr = LAYOUT.shape[3]
    WORDS: gl.constexpr = LAYOUT.shape[4]
    OF_GROUPS: gl.constexpr = gl.SliceLayout(4, LAYOUT)
    OF_PARTS: gl.constexpr = gl.SliceLayout(3, OF_GROUPS)
    PART: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, OF_PARTS))
    GROUP: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, OF_GROUPS)))
    WORD: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))))
    slot, row = _slots(first + keys_of_warps(gl.SliceLayout(2, OF_PARTS), META), keys, args, META)
    start = slot * x.stride_b + row * x.stride_s + keys.h_kv.to(gl.int64) * x.stride_h
    part = gl.arange(0, PARTS, layout=PART)[None, None, :, None, None]
    group = gl.arange(0, GROUPS, layout=GROUP)[None, None, None, :, None]
    word = gl.arange(0, WORDS, layout=WORD)[None, None, None, None, :]
    return gl.load((x.ptr + start * 4)[:, :, None, None, None] + ((part * GROUPS + group) * WORDS + word))


@gluon.jit
def load_keys(first, keys: Keys, args: CacheArguments, META: gl.constexpr):
    LAYOUT: gl.constexpr = key_words(META.WARPS, META.BLOCK_N // META.WARPS, META.HEAD_DIM_QK)
    return _load_words(args.inputs.k, first, keys, args, LAYOUT, META)


@gluon.jit
def load_values(first, keys: Keys, args: CacheArguments, META: gl.constexpr):
    LAYOUT: gl.constexpr = value_words(META.WARPS, META.BLOCK_N // META.WARPS, META.HEAD_DIM_V)
    return _load_words(args.inputs.v, first, keys, args, LAYOUT, META)


@gluon.jit
def _token_factors(scale: Scale, slot, row, keys: Keys):
    return gl.load(scale.ptr + slot * scale.stride_b + row * scale.stride_block + keys.h_kv.to(gl.int64) * scale.stride_h)


@gluon.jit
def load_token_factors(first, keys: Keys, args: CacheArguments, META: gl.constexpr):
    # (factors [warps, keys] of the tokens of a block of k, and of v); 1 where they have none
    LAYOUT: gl.constexpr = gl.SliceLayout(1, scores_layout(META.WARPS))
    scales = args.inputs.scales
    factors_k, factors_v = 1.0, 1.0
    if META.HAS_TOKEN_SCALES_K or META.HAS_TOKEN_SCALES_V:
        slot, row = _slots(first + keys_of_warps(LAYOUT, META), keys, args, META)
        if META.HAS_TOKEN_SCALES_K:
            factors_k = _token_factors(scales.k, slot, row, keys)
        if META.HAS_TOKEN_SCALES_V:
            factors_v = _token_factors(scales.v, slot, row, keys)
    return factors_k, factors_v


@gluon.jit
def largest_exponent(x, AXIS: gl.constexpr):
    # The bits of the largest power of two, of those that have an inverse, up to the largest number in size
    largest = gl.max(x.to(gl.int32, bitcast=True) & 0x7FFFFFFF, AXIS)  # bits are in the order of the numbers
    return gl.minimum(gl.maximum(largest & 0x7F800000, 0x00800000), 0x7E800000)


@gluon.jit
def inverse_power(exponent):
    return (0x7F000000 - exponent).to(gl.float32, bitcast=True)


@gluon.jit
def load_queries(work: Work, start_q, len_q, args: CacheArguments, META: gl.constexpr):
    # (q in fp16 as the operand of products, the factor of each row: of bf16, a power of two, so that none is too large)
    SCORES: gl.constexpr = scores_layout(META.WARPS)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    WARPS: gl.constexpr = META.WARPS
    BLOCK_M: gl.constexpr = META.BLOCK_M
    i, heads = rows_and_heads(work, len_q, gl.SliceLayout(0, gl.SliceLayout(2, OPERAND)), META)
    pointers = row_pointer(args.inputs.q, work.b, heads, start_q + i, META)[None, :, None]
    place = gl.arange(0, META.HEAD_DIM_QK, layout=gl.SliceLayout(0, gl.SliceLayout(1, OPERAND)))
    # The columns of `key_words`: a pair's, the two pairs of a word, words, threads, 64 columns
    column = (place & 1) | ((place >> 3 & 1) << 1) | ((place >> 4 & 3) << 2) | ((place >> 1 & 3) << 4) | (place >> 6 << 6)
    warps = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, OPERAND)))[:, None, None]
    columns = column[None, None, :] + warps * 0
    q = gl.load(pointers + columns, mask=(i < len_q)[None, :, None] & (columns >= 0), other=0.0)
    factor = gl.full([WARPS, BLOCK_M], 1.0, gl.float32, layout=gl.SliceLayout(2, SCORES))
    if META.IS_BF16:
        q = q.to(gl.float32)
        exponent = largest_exponent(q, 2)
        q = (q * inverse_power(exponent)[:, :, None]).to(gl.float16)
        factor = gl.convert_layout(exponent.to(gl.float32, bitcast=True), gl.SliceLayout(2, SCORES))
    return q, factor


@gluon.jit
def product_with_keys(q, words, META: gl.constexpr):
    # Products of q with a block of keys: [warps, rows, keys]
    SCORES: gl.constexpr = scores_layout(META.WARPS)
    WARPS: gl.constexpr = META.WARPS
    BLOCK_M: gl.constexpr = META.BLOCK_M
    HEAD_DIM: gl.constexpr = META.HEAD_DIM_QK
    KEYS: gl.constexpr = META.BLOCK_N // WARPS
    k = gl.permute(_numbers_of_words(words, META), [0, 2, 4, 6, 3, 5, 1])
    k = gl.convert_layout(gl.reshape(k, [WARPS, HEAD_DIM, KEYS]), gl.DotOperandLayout(1, SCORES, 2), assert_trivial=True)
    return mma_v2(q, k, gl.zeros([WARPS, BLOCK_M, KEYS], gl.float32, layout=SCORES))


@gluon.jit
def sum_with_values(p, words, acc, META: gl.constexpr):
    # acc and the product of weights with values
    SCORES: gl.constexpr = scores_layout(META.WARPS)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    WARPS: gl.constexpr = META.WARPS
    HEAD_DIM: gl.constexpr = META.HEAD_DIM_V
    KEYS: gl.constexpr = META.BLOCK_N // WARPS
    v = gl.permute(_numbers_of_words(words, META), [0, 1, 2, 4, 6, 5, 3])
    v = gl.convert_layout(gl.reshape(v, [WARPS, KEYS, HEAD_DIM]), gl.DotOperandLayout(1, SCORES, 2), assert_trivial=True)
    return mma_v2(gl.convert_layout(p.to(gl.float16), WEIGHTS), v, acc)


@gluon.jit
def columns_in_order(acc, META: gl.constexpr):
    # [rows, columns] of out from those that `sum_with_values` makes
    BLOCK_M: gl.constexpr = META.BLOCK_M
    HEAD_DIM: gl.constexpr = META.HEAD_DIM_V
    OF_THREAD: gl.constexpr = 4 * words_of_thread(HEAD_DIM)
    parts = gl.reshape(acc, [BLOCK_M, HEAD_DIM // (8 * OF_THREAD), OF_THREAD, 8])
    return gl.reshape(gl.permute(parts, [0, 1, 3, 2]), [BLOCK_M, HEAD_DIM])
