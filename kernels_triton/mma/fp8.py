"""FP8 in the forward for mma.sync: the operands of its products (m16n8k32), and their descales.

Copies see two neighbouring FP8 numbers as one word of 16 bits. The product with v needs operands along the keys, and ldmatrix only
transposes words. So a thread gets words of two columns and four keys, and two byte permutations make two operands of them: one
for even columns, one for odd columns. Each group of 16 keys is then in the order 2t, 2t + 1, 8 + 2t, 9 + 2t for t = 0 .. 3. In this
order the accumulator of the scores is an operand too, so weights stay in their thread.

Tensor cores of sm_89 accumulate FP8 products in 22 bits (SageAttention2, arXiv 2411.10958). So the product of each key block with
v has its own accumulator.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from flexattn.kernels_triton.common.arguments import Parts
from flexattn.kernels_triton.common.exponents import LOG2E, exponent_factor, positive_factor, scaled_row_max
from flexattn.kernels_triton.gluon.descales import Descale, Descales
from flexattn.kernels_triton.gluon.forward_rows import rows_and_heads
from flexattn.kernels_triton.gluon.forward_work import ReceivedTile
from flexattn.kernels_triton.gluon.fp8_operands import P_SCALE, P_SHIFT, load_descale
from flexattn.kernels_triton.gluon.softmax import for_threads
from flexattn.kernels_triton.runtime.gluon_names import reinterpreted

# Four fp32 numbers to E4M3, the first lowest; too large ones saturate
_TO_E4M3 = gl.constexpr(
    "{ .reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, $2, $1; cvt.rn.satfinite.e4m3x2.f32 b, $4, $3; mov.b32 $0, {a, b}; }"
)
# Four words to their lower and their upper bytes
_SPLIT_WORDS = gl.constexpr("prmt.b32 $0, $2, $3, 0x6420; prmt.b32 $1, $2, $3, 0x7531;")


class HeadScales(NamedTuple):
    """The descales of one tile of queries and its key head, inside a kernel."""

    q: Any  # a factor for each row
    k: Any  # the first block's factor
    v: Any
    k_blocks: Descale
    v_blocks: Descale
    b: Any
    h_kv: Any
    len_kv: Any


def words(x: Tensor) -> Tensor:
    """Returns a tensor in FP8 as words of two numbers, and one in 16 bits itself."""
    if x.element_size() > 1:
        return x
    # A dim of one entry may have an odd stride, which a view of wider elements would refuse.
    steps = [stride if size > 1 else 0 for size, stride in zip(x.shape, x.stride(), strict=True)]
    return x.as_strided(x.shape, steps).view(torch.int16)


@gluon.constexpr_function
def _numbers_layout(width):
    # Layout of FP8 numbers in a tile whose layout is `arguments.swizzled` of words
    return gl.SwizzledSharedLayout(16, max(1, 128 // width), min(8, width // 16), [1, 0])


@gluon.jit
def _as_numbers(tile, META: gl.constexpr):
    DTYPE: gl.constexpr = gl.float8e5 if META.IS_E5M2 else gl.float8e4nv
    WIDTH: gl.constexpr = 2 * tile.shape[1]
    SHAPE: gl.constexpr = [tile.shape[0], WIDTH]
    return reinterpreted(tile, DTYPE, SHAPE, _numbers_layout(WIDTH))


@gluon.jit
def as_numbers(tiles: Parts, META: gl.constexpr):
    # Returns tiles of words in shared memory as FP8 numbers; tiles of 16-bit numbers themselves
    if META.IS_FP8:
        return Parts(first=_as_numbers(tiles.first, META), second=_as_numbers(tiles.second, META))
    else:
        return tiles


@gluon.jit
def to_operand(p, PRODUCT: gl.constexpr):
    # Returns weights in E4M3 as an operand of the product with `_values_of`, whose order of keys they get
    KEYS: gl.constexpr = p.shape[1]
    p = gl.permute(gl.reshape(p, [p.shape[0], KEYS // 16, 2, 4, 2]), [0, 1, 3, 2, 4])
    p = gl.convert_layout(gl.reshape(p, [p.shape[0], KEYS]), gl.DotOperandLayout(0, PRODUCT, 4))
    return gl.inline_asm_elementwise(_TO_E4M3, "=r,r,r,r,r", [p], dtype=gl.float8e4nv, is_pure=True, pack=4)


@gluon.jit
def _values_of(v, PRODUCT: gl.constexpr, META: gl.constexpr):
    # Returns FP8 values as an operand: the even columns of a tile of words, then the odd ones
    DTYPE: gl.constexpr = gl.float8e5 if META.IS_E5M2 else gl.float8e4nv
    KEYS: gl.constexpr = v.shape[0]
    WORDS: gl.constexpr = v.shape[1]
    pairs = v.load(gl.DotOperandLayout(1, PRODUCT, 2))
    even, odd = gl.inline_asm_elementwise(_SPLIT_WORDS, "=r,=r,r,r", [pairs], dtype=(gl.int8, gl.int8), is_pure=True, pack=4)
    both = gl.reshape(gl.join(even, odd), [KEYS // 16, 2, 4, 2, WORDS, 2])
    both = gl.reshape(gl.permute(both, [0, 2, 1, 3, 5, 4]), [KEYS, 2 * WORDS])
    return gl.convert_layout(both, gl.DotOperandLayout(1, PRODUCT, 4)).to(DTYPE, bitcast=True)


@gluon.jit
def add_fp8_values(acc, weights, v, META: gl.constexpr):
    # Adds weights times v to sums whose columns are in the order of `_values_of`
    PRODUCT: gl.constexpr = acc.type.layout
    no_sum = gl.zeros(acc.shape, gl.float32, layout=PRODUCT)
    return acc + mma_v2(weights, _values_of(v, PRODUCT, META), no_sum)


@gluon.jit
def columns_in_order(acc, META: gl.constexpr):
    # Returns sums with their columns in order: in FP8 the even ones come first
    if META.IS_FP8:
        ROWS: gl.constexpr = acc.shape[0]
        WIDTH: gl.constexpr = acc.shape[1]
        acc = gl.reshape(gl.permute(gl.reshape(acc, [ROWS, 2, WIDTH // 2]), [0, 2, 1]), [ROWS, WIDTH])
    return acc


@gluon.jit
def head_scales(descales: Descales, received: ReceivedTile, h_kv, ROW: gl.constexpr, META: gl.constexpr):
    len_q, b = received.band.len_q, received.tile.b
    rows, heads = rows_and_heads(received.tile.first_row, received.tile.h, len_q, ROW, META)
    return HeadScales(
        q=load_descale(descales.q, b, heads, rows, len_q),
        k=load_descale(descales.k, b, h_kv, 0, 1),
        v=load_descale(descales.v, b, h_kv, 0, 1),
        k_blocks=descales.k,
        v_blocks=descales.v,
        b=b,
        h_kv=h_kv,
        len_kv=received.band.len_kv,
    )


@gluon.jit
def score_descale(scales: HeadScales, column, META: gl.constexpr):
    # Returns the descale of each row's scores with the block of keys at `column`
    k = scales.k
    if META.HAS_BLOCK_SCALES:
        k = load_descale(scales.k_blocks, scales.b, scales.h_kv, column, scales.len_kv)
    return scales.q * k


@gluon.jit
def factor_of_rows(factor, descale, scale, META: gl.constexpr):
    # Returns each row's factor in the exponent, for the factor from `logits`
    if META.IS_MODIFIED:
        return gl.zeros_like(descale) + factor
    else:
        return positive_factor(descale * (scale * LOG2E))


@gluon.jit
def scaled_sink_sum(row_max, row_sum, META: gl.constexpr):
    # Returns the sums that `sums_with_sink` begins with, scaled like weights in FP8
    if META.IS_UNBOUNDED:
        factor = exponent_factor(row_max)
        weight = gl.exp2(gl.fma(row_max, factor, -scaled_row_max(row_max, factor, P_SHIFT)))
        return row_sum * for_threads(weight, row_sum)
    else:
        return row_sum * P_SCALE
