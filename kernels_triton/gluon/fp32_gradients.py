"""Gradients of keys, and gradients that are stored from registers to global memory.

Gradients in fp32 are, for sums over calls. Most 16-bit gradients leave by the copy engine.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flexattn.kernels_triton.common.problem import Backward
from flexattn.kernels_triton.gluon.backward_blocks import Block
from flexattn.kernels_triton.gluon.dropout import scaled
from flexattn.kernels_triton.gluon.operands import ROWS
from flexattn.kernels_triton.gluon.pairs import Pair
from flexattn.kernels_triton.gluon.query_walk import HeadParts
from flexattn.kernels_triton.runtime.entry import WidePointer

_UNIT = gl.constexpr(4)  # elements: 16 bytes, which `descriptor_error` also requires of strides


class GradientRows(NamedTuple):
    """A gradient [b, s, h, d] or [total, h, d] in fp32 or 16 bits. Strides and `head_dim` are in units of 4 elements."""

    ptr: WidePointer
    stride_b: int  # 0 for [total, h, d]
    stride_s: int
    stride_h: int
    head_dim: int


def gradient_rows(gradient: Tensor) -> GradientRows:
    """Returns a gradient as an argument of `store_gradient`."""
    stride_b, stride_s, stride_h = (stride // _UNIT.value for stride in (0, *gradient.stride())[-4:-1])
    return GradientRows(
        ptr=gradient, stride_b=stride_b, stride_s=stride_s, stride_h=stride_h, head_dim=gradient.shape[-1] // _UNIT.value
    )


def fp32_rows(gradient: Tensor) -> GradientRows | None:
    """Returns `gradient_rows` of a gradient in fp32; None for a 16-bit one."""
    return gradient_rows(gradient) if gradient.dtype is torch.float32 else None


def in_parts(call: Backward, parts: HeadParts | None) -> Backward:
    """Returns the call with memory for the fp32 sums of each part in place of dk and dv; None: all heads are one part."""
    if parts is None:
        return call
    dk, dv = (
        x.new_empty((*x.shape[:-2], x.shape[-2] * parts.number, x.shape[-1]), dtype=torch.float32) for x in (call.dk, call.dv)
    )
    return call._replace(dk=dk, dv=dv)


def add_parts(call: Backward, call_in_parts: Backward, parts: HeadParts | None) -> None:
    """Writes dk and dv of a call from the sums of `in_parts`, in a fixed order; their rows without a token are undefined."""
    if parts is None:
        return
    for gradient, sums in ((call.dk, call_in_parts.dk), (call.dv, call_in_parts.dv)):
        gradient.copy_(sums.unflatten(-2, (-1, parts.number)).sum(-2))


@gluon.jit
def store_gradient(target: GradientRows, tile, b, h, start, length, row, COLUMN: gl.constexpr):
    # Stores rows from `row` on of the sequence that begins at token `start`, without rows from `length` on and columns past the
    # head dim.
    LAYOUT: gl.constexpr = tile.type.layout
    rows = row + gl.arange(0, tile.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    columns = COLUMN + gl.arange(0, tile.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    first = gl.to_tensor(b).to(gl.int64) * target.stride_b + gl.to_tensor(h).to(gl.int64) * target.stride_h
    first += gl.to_tensor(start).to(gl.int64) * target.stride_s
    offsets = (first + rows.to(gl.int64) * target.stride_s) * _UNIT
    inside = (rows < length)[:, None] & (columns < target.head_dim * _UNIT)[None, :]
    gl.store(target.ptr + (offsets[:, None] + columns[None, :]), tile.to(target.ptr.dtype.element_ty), mask=inside)


@gluon.jit
def store_key_gradient(target: GradientRows, tile, block: Block, ROW: gl.constexpr, COLUMN: gl.constexpr):
    # Stores dk or dv of a block of keys, from its ROW-th on, or the sums of a head part
    sequence = block.sequence
    store_gradient(target, tile, block.b, block.part, sequence.start_kv, sequence.len_kv, block.first_row + ROW, COLUMN)


class KeyGradients(NamedTuple):
    """dk, without the softmax scale, and dv of a consumer's 64 keys. If the head dim has one part, dk1 is dk."""

    dk: gl.tensor
    dk1: gl.tensor
    dv: gl.tensor


@gluon.jit
def store_key_gradients(
    sums: KeyGradients, draws, args, dk_tiles: Pair, dv_tiles, block: Block, CONSUMER: gl.constexpr, META: gl.constexpr
):
    # Stores 16-bit gradients in shared memory, in a consumer's tile. args: a `DkdvArguments`
    QK0: gl.constexpr = META.QK0
    DTYPE: gl.constexpr = dv_tiles.dtype
    scores = args.scores
    if args.dk32.ptr is not None:
        store_key_gradient(args.dk32, sums.dk * scores.scale, block, CONSUMER * ROWS, 0)
        if META.QK1 > 0:
            store_key_gradient(args.dk32, sums.dk1 * scores.scale, block, CONSUMER * ROWS, QK0)
        store_key_gradient(args.dv32, scaled(sums.dv, draws, META), block, CONSUMER * ROWS, 0)
    else:
        dk_tiles.first.index(CONSUMER).reshape([ROWS, QK0]).store((sums.dk * scores.scale).to(DTYPE))
        if META.QK1 > 0:
            dk_tiles.second.index(CONSUMER).reshape([ROWS, META.QK1]).store((sums.dk1 * scores.scale).to(DTYPE))
        dv_tiles.index(CONSUMER).reshape([ROWS, META.V0]).store(scaled(sums.dv, draws, META).to(DTYPE))
