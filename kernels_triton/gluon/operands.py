"""Operands of matrix products: tiles in shared memory, 16-bit pairs in registers, and an index that the compiler cannot analyse."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ROWS = gl.constexpr(64)  # rows of a warpgroup's operand: wgmma's M


@gluon.jit
def allocate_tiles(NUM: gl.constexpr, descriptor):
    return gl.allocate_shared_memory(descriptor.dtype, [NUM] + descriptor.block_type.shape, descriptor.layout)


@gluon.jit
def allocate_blocks(NUM: gl.constexpr, descriptor, ROWS: gl.constexpr):
    # Allocates tiles of ROWS rows of one head, which the descriptor may load in parts
    WIDTH: gl.constexpr = descriptor.block_type.shape[4]
    return gl.allocate_shared_memory(descriptor.dtype, [NUM, 1, 1, ROWS, 1, WIDTH], descriptor.layout)


@gluon.jit
def opaque_zero(x):
    # Returns a 0 that LLVM cannot analyse: an index with it keeps the descriptors of shared memory from being hoisted into
    # registers.
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


# A 16-bit tile that a loop carries is stored as pairs in 32-bit registers: ptxas splits and merges single elements in each
# iteration.
@gluon.jit
def pack_pairs(x, ROWS: gl.constexpr, COLUMNS: gl.constexpr, DTYPE: gl.constexpr):
    low, high = gl.split(gl.reshape(x, [ROWS, COLUMNS // 2, 2]))
    assembly: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if gl.bfloat16 == DTYPE else "cvt.rn.f16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(assembly, "=r,r,r", [low, high], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def unpack_pairs(x, ROWS: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr, DTYPE: gl.constexpr):
    pairs = gl.join(x.to(gl.int16), (x >> 16).to(gl.int16))
    return gl.convert_layout(gl.reshape(pairs, [ROWS, COLUMNS]).to(DTYPE, bitcast=True), LAYOUT)


@gluon.jit
def keep_pairs(x):
    # Uses x after the wait for the product that reads it, so that its registers are not reused before.
    gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)
