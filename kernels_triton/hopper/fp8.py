"""Shared parts of the FP8 kernels for Hopper (sm_90): operands with their scales, transposed tiles, fp8 tiles packed by four.

FP8 wgmma reads both operands along the summed dim, so the operand of a product with p or ds must be transposed: tiles of `BLOCK`
tokens of one head, [d, BLOCK], which `fp8_passes` writes. A tile has a special order of tokens: in each group of 16, the tokens 2t,
2t + 1, 8 + 2t, 9 + 2t for t = 0 .. 3. So the accumulator of one product, packed by four, is the operand of the next product without
a shuffle.
"""

from __future__ import annotations

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flexattn.kernels_triton.common.arguments import Head
from flexattn.kernels_triton.common.scores import logits
from flexattn.kernels_triton.gluon.descriptors import FP8_DTYPES
from flexattn.kernels_triton.gluon.fp8_operands import BLOCK


@gluon.jit
def allocate_factors(STAGES: gl.constexpr):
    # Two factors for each stage: for the scores and for dp of its block
    return gl.allocate_shared_memory(gl.float32, [2 * STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def write_factor(factors, index, factor):
    # All lanes write the value, and the first lane's arrival publishes it.
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    factors.index(index).store(gl.full([1], factor, gl.float32, layout=LANES))


@gluon.jit
def write_factors(factors, stage, s_factor, dp_factor):
    write_factor(factors, 2 * stage, gl.maximum(s_factor, 1e-37))  # a masked score is -inf, and -inf * 0 would be NaN
    write_factor(factors, 2 * stage + 1, dp_factor)


@gluon.jit
def read_factor(factors, index, COLUMNS: gl.constexpr):
    return factors.index(index).load(COLUMNS)[None, :]


@gluon.jit
def score_factor(factors, stage, COLUMNS: gl.constexpr, META: gl.constexpr):
    # Returns the descales of the scores in a stage, with `IS_PLAIN` times their scale in units of log2; 1 for 16-bit operands.
    if META.IS_FP8:
        return read_factor(factors, 2 * stage, COLUMNS)
    else:
        return 1.0


@gluon.jit
def dp_factor_of(factors, stage, COLUMNS: gl.constexpr, META: gl.constexpr):
    # Returns the descales of dp in a stage; 1 for 16-bit operands
    if META.IS_FP8:
        return read_factor(factors, 2 * stage + 1, COLUMNS)
    else:
        return 1.0


@gluon.jit
def product_logits(product, i, j, head: Head, scale, s_factor, MODS: gl.constexpr, META: gl.constexpr):
    # Returns `logits` of a product of 16-bit numbers, or of FP8 numbers with their `score_factor`
    if META.IS_FP8 and not META.IS_PLAIN:
        product = product * s_factor
    s, factor, cap_tanh, score = logits(product, i, j, scale, head, MODS, META)
    if META.IS_FP8 and META.IS_PLAIN:
        factor = s_factor
    return s, factor, cap_tanh, score


def transposed_blocks(batch: int, num_tokens: int, is_ragged: bool) -> int:
    """Returns the number of transposed tiles of one head. A sequence begins at tile place // BLOCK + b, or b * cdiv(s, BLOCK)."""
    return num_tokens // BLOCK.value + batch if is_ragged else batch * int(triton.cdiv(num_tokens, BLOCK.value))


def empty_transposed(x: Tensor, batch: int) -> Tensor:
    """Returns memory [h, blocks, d, BLOCK] for x, [b, s, h, d] or [total, h, d] with `batch` sequences."""
    return x.new_empty((x.shape[-2], transposed_blocks(batch, x.shape[-3], x.dim() == 3), x.shape[-1], BLOCK.value))


def transposed_descriptor(x: Tensor, width: int, tokens: int) -> TensorDescriptor:
    """Returns tiles of `width` columns of the head dim and `tokens` tokens of a transposed x, [h, blocks, d, BLOCK]."""
    heads, blocks, head_dim, _ = x.shape
    block = [1, width, tokens]
    layout = gl.NVMMASharedLayout.get_default_for(block, FP8_DTYPES[x.dtype])
    return TensorDescriptor(x, [heads * blocks, head_dim, BLOCK.value], [head_dim * BLOCK.value, BLOCK.value, 1], block, layout)


@gluon.jit
def compute_here(x):
    # Uses fp32 x, so that its computation is not delayed until after the next product, which would keep its operands' registers.
    gl.inline_asm_elementwise("mov.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)


def _quads_assembly(to: str) -> str:
    """Returns PTX that packs four fp32 numbers as "e4m3" or "e5m2", the first lowest; too large numbers saturate."""
    cvt = f"cvt.rn.satfinite.{to}x2.f32"
    return "{ .reg .b16 a, b; " + f"{cvt} a, $2, $1; {cvt} b, $4, $3; " + "mov.b32 $0, {a, b}; }"


_E4M3 = gl.constexpr(_quads_assembly("e4m3"))
_E5M2 = gl.constexpr(_quads_assembly("e5m2"))


# Packs fp32 [ROWS, COLUMNS] to int32 [ROWS, COLUMNS // 4], four fp8 each, in the token order of the transposed tiles.
@gluon.jit
def pack_quads(x, ROWS: gl.constexpr, COLUMNS: gl.constexpr, DTYPE: gl.constexpr):
    x = gl.permute(gl.reshape(x, [ROWS, COLUMNS // 16, 2, 4, 2]), [0, 1, 3, 2, 4])
    first, second = gl.split(gl.reshape(x, [ROWS, COLUMNS // 4, 2, 2]))
    x0, x2 = gl.split(first)
    x1, x3 = gl.split(second)
    assembly: gl.constexpr = _E4M3 if gl.float8e4nv == DTYPE else _E5M2
    return gl.inline_asm_elementwise(assembly, "=r,r,r,r,r", [x0, x1, x2, x3], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def unpack_quads(x, ROWS: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr, DTYPE: gl.constexpr):
    low, high = x.to(gl.int16), (x >> 16).to(gl.int16)
    even = gl.join(low.to(gl.int8), high.to(gl.int8))
    odd = gl.join((low >> 8).to(gl.int8), (high >> 8).to(gl.int8))
    return gl.convert_layout(gl.reshape(gl.join(even, odd), [ROWS, COLUMNS]).to(DTYPE, bitcast=True), LAYOUT)
