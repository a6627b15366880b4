"""Names in Gluon that differ between versions of Triton. The kernels import each of them only from this file.

| here            | Triton 3.6 and 3.7              | 3.8                                        | 3.9               |
|-----------------|---------------------------------|--------------------------------------------|-------------------|
| `load_tile`     | tma.async_copy_global_to_shared | tma.async_load, and the old name           | tma.async_load    |
| `load_elements` | async_copy_global_to_shared     | async_copy.async_load, and the old name    | async_load        |
| `store_tile`    | tma.async_copy_shared_to_global | tma.async_store, and the old name          | tma.async_store   |
| `reduce_add`    | none: the IR builder's method   | tma.async_atomic_add                       | as in 3.8         |
| `tensor_rows`   | get_tmem_reg_layout             | tensor_memory_descriptor_type's method     | as in 3.8         |
| `reinterpreted` | a descriptor's _reinterpret     | as in 3.7                                  | its reinterpret   |

The emulator does not import the library. It emulates each of these functions and methods under all of its names.
"""

from __future__ import annotations

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia import blackwell
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

_HAS_REINTERPRET = gl.constexpr(hasattr(blackwell.tensor_memory_descriptor, "reinterpret"))


@builtin
def _add_by_builder(descriptor, coordinates, tile, _semantic=None):
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, coordinates, tile.handle)


load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # (descriptor, coordinates, barrier, tile)
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global  # (descriptor, coordinates, tile)
load_elements = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared  # (tile, pointers, mask)
reduce_add = getattr(tma, "async_atomic_add", None) or _add_by_builder  # like store_tile, but adds to global memory


@gluon.constexpr_function
def tensor_rows(dtype, shape, layout, warps):
    # Returns the register layout of a tile of tensor memory with this layout. Each thread has a row
    if hasattr(blackwell, "get_tmem_reg_layout"):
        return blackwell.get_tmem_reg_layout(dtype, shape, layout, warps)
    return blackwell.tensor_memory_descriptor_type(dtype, shape, layout, shape).get_reg_layout(warps)


@gluon.jit
def reinterpreted(memory, DTYPE: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    # Returns the same bytes of shared or tensor memory as a tile of another type
    if _HAS_REINTERPRET:
        return memory.reinterpret(DTYPE, SHAPE, LAYOUT)
    else:
        return memory._reinterpret(DTYPE, SHAPE, LAYOUT)
