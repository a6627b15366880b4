"""Products by mma.sync of tiles whose head dim has one or two parts, and the rows of a result."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from flexattn.kernels_triton.common.addressing import row_pointer
from flexattn.kernels_triton.common.arguments import Parts, Rows
from flexattn.kernels_triton.mma.arguments import rows_layout


@gluon.jit
def zeros_of_part(ROWS: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr):
    return gl.zeros([ROWS, WIDTH], gl.float32, layout=LAYOUT)


@gluon.jit
def at(tiles: Parts, slot):
    return Parts(first=tiles.first.index(slot), second=tiles.second.index(slot))


@gluon.jit
def load_operand(tiles: Parts, LAYOUT: gl.constexpr):
    return Parts(first=tiles.first.load(LAYOUT), second=tiles.second.load(LAYOUT))


@gluon.jit
def _add_part(s, a, b, IN_REGISTERS: gl.constexpr):
    # Adds a b^T of one part. If a is in shared memory, a few columns are loaded at a time.
    K_WIDTH: gl.constexpr = 32 // b.dtype.primitive_bitwidth
    A: gl.constexpr = gl.DotOperandLayout(0, s.type.layout, K_WIDTH)
    B: gl.constexpr = gl.DotOperandLayout(1, s.type.layout, K_WIDTH)
    WIDTH: gl.constexpr = b.shape[1]
    if IN_REGISTERS:
        s = mma_v2(a, b.permute((1, 0)).load(B), s)
    else:
        AT_ONCE: gl.constexpr = min(WIDTH, 32 * K_WIDTH)
        for first in gl.static_range(0, WIDTH, AT_ONCE):
            s = mma_v2(a.slice(first, AT_ONCE, 1).load(A), b.slice(first, AT_ONCE, 1).permute((1, 0)).load(B), s)
    return s


@gluon.jit
def product_of_rows(a: Parts, b: Parts, zeros, IN_REGISTERS: gl.constexpr, HAS_SECOND: gl.constexpr):
    # Returns a b^T over the head dim. IN_REGISTERS: a is an operand, and not a tile in shared memory
    s = _add_part(zeros, a.first, b.first, IN_REGISTERS)
    if HAS_SECOND:
        s = _add_part(s, a.second, b.second, IN_REGISTERS)
    return s


@gluon.jit
def add_product(acc, weights, tile):
    # Adds the product of weights, an operand, and a tile of one part
    return mma_v2(weights, tile.load(gl.DotOperandLayout(1, acc.type.layout, 2)), acc)


class Destination(NamedTuple):
    """The rows of a result: rows of one head from token `first` on, of which `left` exist."""

    x: Rows
    b: Any
    h: Any
    first: Any
    left: Any


@gluon.jit
def store_part(to: Destination, total, FIRST: gl.constexpr, HEAD_DIM: gl.constexpr, META: gl.constexpr):
    # Stores the columns of a part, from FIRST on: in rows, so that a thread stores 16 bytes
    WIDTH: gl.constexpr = total.shape[1]
    LAYOUT: gl.constexpr = rows_layout(WIDTH, META.WARPS)
    total = gl.convert_layout(total.to(to.x.ptr.dtype.element_ty), LAYOUT)
    rows = gl.arange(0, total.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    columns = FIRST + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))
    pointers = row_pointer(to.x, to.b, to.h, to.first + rows, META)
    inside = (rows < to.left)[:, None] & (columns < HEAD_DIM)[None, :]
    gl.store(pointers[:, None] + columns[None, :], total, mask=inside)
