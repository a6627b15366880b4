"""Operands in FP8 inside kernels: their scales, and the transposed tiles of `hopper/fp8.py`."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flexattn.kernels_triton.gluon.descales import Descale, Descales

BLOCK = gl.constexpr(128)
"""Tokens of a transposed tile. Tokens past a sequence's end are 0."""

P_SHIFT = gl.constexpr(8.0)
"""p is scaled by 2 to this power: at most 256, it uses the range of E4M3 (maximum 448, minimum 2**-9)."""
P_SCALE = gl.constexpr(2.0**P_SHIFT.value)


# Returns the descale of the block that contains `row`; a tile of descales for a tile of rows. A listed block, and a program's
# own rows, may be past the end, where no descale is.
@gluon.jit
def load_descale(scale: Descale, b, h, row, length):
    row = gl.maximum(gl.minimum(row, length - 1), 0)
    return gl.load(scale.ptr + b * scale.stride_b + h * scale.stride_h + row // scale.block_rows * scale.stride_block)


@gluon.jit
def first_descales(descales: Descales, b, h, h_kv):
    # Returns the bits of the factors of the first blocks of q, k and v
    q = load_descale(descales.q, b, h, 0, 1).to(gl.int32, bitcast=True)
    k = load_descale(descales.k, b, h_kv, 0, 1).to(gl.int32, bitcast=True)
    v = load_descale(descales.v, b, h_kv, 0, 1).to(gl.int32, bitcast=True)
    return q, k, v


@gluon.jit
def first_transposed_block(b, place, num_tokens, IS_RAGGED: gl.constexpr):
    # place: the sequence's `packed_start`
    if IS_RAGGED:
        return place // BLOCK + b
    else:
        return b * gl.cdiv(num_tokens, BLOCK)
