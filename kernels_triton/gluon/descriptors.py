"""Tiles in global memory by the copy engine (TMA): descriptors that clip at a sequence's end, loads, stores, additions."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flexattn.kernels_triton.runtime.gluon_names import load_tile, store_tile

# TMA clips a row of one sequence at the sequence's end in hardware: the copy engine compares each coordinate with its extent, and
# adds coordinate times stride modulo 2**64. In the three outer dims the strides cancel except for `start + row`, and the third
# coordinate reaches its extent when the row reaches the length. (The idea is from triton.tools.ragged_tma.)
_FAR = 0x7FFF0000
_RAGGED = gl.constexpr(2**30)
_WRAP = 2**34  # elements: 2**30 times this, times 1 or 2 bytes, is 0 modulo 2**64

DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
FP8_DTYPES = {torch.float8_e4m3fn: gl.float8e4nv, torch.float8_e5m2: gl.float8e5}


def ragged_descriptor(x: Tensor, rows: int, width: int, heads: int = 1) -> TensorDescriptor:
    """Returns a descriptor for tiles of `rows` tokens and `width` columns of one head, or of `heads` neighbouring ones.

    x: [b, s, h, d] or [total, h, d], in 16 bits or FP8. The coordinates are those of `load_rows` and `store_rows`, which add the
    batch as an offset in tokens or heads (`batch_steps`). Heads after x's last one are loaded as zeros.
    """
    stride_s = x.stride(-3) if x.shape[-3] > 1 else 16
    stride_h = x.stride(-2) if x.shape[-2] > 1 else 16
    if x.dim() == 4 and batch_steps(x) == (0, 1):
        stride_h = x.stride(0)
    block = [1, 1, rows, heads, width]
    layout = gl.NVMMASharedLayout.get_default_for(block, (DTYPES | FP8_DTYPES)[x.dtype])
    all_heads = _FAR
    if heads > 1:
        all_heads = x.shape[-2] + (x.shape[0] - 1) * (batch_steps(x) or (0, 0))[1] if x.dim() == 4 else x.shape[-2]
    shape = [_FAR, _FAR, _RAGGED.value, all_heads, x.shape[-1]]
    return TensorDescriptor(x, shape, [_WRAP - stride_s, stride_s, stride_s, stride_h, 1], block, layout)


def batch_steps(x: Tensor) -> tuple[int, int] | None:
    """Returns the distance of batch elements in (tokens, heads), one of them 0; None if it is a multiple of neither's stride.

    If there is one head, the batch elements are the descriptor's heads.
    """
    if x.dim() == 3 or x.shape[0] == 1:
        return 0, 0
    stride_b, stride_s, stride_h, _ = x.stride()
    if x.shape[1] > 1 and stride_s > 0 and stride_b % stride_s == 0:
        return stride_b // stride_s, 0
    if x.shape[2] == 1:
        return 0, 1
    return (0, stride_b // stride_h) if stride_h > 0 and stride_b % stride_h == 0 else None


def batch_steps_of(*tensors: Tensor) -> list[int]:
    """Returns `batch_steps` of each tensor, one after the other. Raises ValueError for a tensor without them."""
    steps: list[int] = []
    for x in tensors:
        batch_step = batch_steps(x)
        if batch_step is None:
            raise ValueError(
                f"a tensor has strides {x.stride()}; the batch stride must be a multiple of the token or the head stride"
            )
        steps += batch_step
    return steps


def descriptor_error(name: str, x: Tensor) -> str | None:
    """Returns the reason if TMA cannot read and write x tile by tile; None: it can."""
    if x.data_ptr() % 16:
        return f"{name} begins at an address that is no multiple of 16 bytes"
    unit = 16 // x.element_size()
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if size > 1 and (stride <= 0 or stride % unit):
            return f"{name} has a stride of {stride} elements; the copy engine takes positive multiples of {unit}"
    if batch_steps(x) is None:
        return f"the batch stride of {name} is a multiple of neither its token nor its head stride"
    return None


def readable(x: Tensor) -> Tensor:
    """Returns x, or a contiguous copy if TMA cannot read it."""
    return x if descriptor_error("x", x) is None else x.clone(memory_format=torch.contiguous_format)


class Step(NamedTuple):
    """Distance between the batch elements of a tensor: `batch_steps`."""

    tokens: int
    heads: int


def step_of(x: Tensor) -> Step:
    tokens, heads = batch_steps_of(x)
    return Step(tokens=tokens, heads=heads)


@gluon.jit
def load_rows(descriptor, start, length, row, head, COLUMN: gl.constexpr, barrier, tile):
    # Loads rows from `row` on of the sequence that begins at token `start`; rows from `length` on are zeros.
    load_tile(descriptor, [_RAGGED, start + length, _RAGGED - length + row, head, COLUMN], barrier, tile)


@gluon.jit
def store_rows(descriptor, start, length, row, head, COLUMN: gl.constexpr, tile):
    # Stores the same rows, without those from `length` on.
    store_tile(descriptor, [_RAGGED, start + length, _RAGGED - length + row, head, COLUMN], tile)


@gluon.jit
def finish_additions():
    # Returns once the additions of this warp's `reduce_add` are in the sums, for all threads of the warp. `tma.store_wait` has
    # .read, and waits only until tiles have been read. Without .read it waits for "writes being made visible to the executing
    # thread" (PTX ISA, cp.async.bulk.wait_group). No fence.proxy.async is needed after it: "the completion of a
    # cp{.reduce}.async.bulk operation is followed by an implicit generic-async proxy fence" (Async Proxy). One thread has issued
    # the additions. bar.warp.sync orders them before the other threads' later accesses: it "also guarantees memory ordering among
    # threads".
    assembly: gl.constexpr = "cp.async.bulk.wait_group 0; bar.warp.sync -1; mov.b32 $0, 0;"
    gl.inline_asm_elementwise(assembly, "=r,r", [0], dtype=gl.int32, is_pure=False, pack=1)


def statistics_descriptor(statistics: Tensor, size: int) -> TensorDescriptor:
    """Returns the descriptor of `tiled_statistics`, a tile of which has lse and delta of `size` queries."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    return TensorDescriptor(statistics, [statistics.numel()], [1], [2 * size], layout)


@gluon.jit
def load_statistics(descriptor, first_tile, row, len_q, barrier, destination, META: gl.constexpr):
    # Loads the statistics of BLOCK_M queries from `row` on, for the head whose tiles begin at first_tile. A listed block may be
    # past the end, at the next head's tiles. Then the tile of no query is loaded instead, whose p is 0 whatever a mod makes of the
    # scores.
    index = (first_tile + row // META.BLOCK_M) * (2 * META.BLOCK_M)
    if META.BLOCK_SIZE_Q > 0:
        index = gl.where(row < len_q, index, 0)
    load_tile(descriptor, [index], barrier, destination)
