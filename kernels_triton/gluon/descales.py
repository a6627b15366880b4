"""Scales of tensors in FP8 as arguments of kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flexattn.kernels_triton.common.arguments import Pointer
from flexattn.kernels_triton.common.problem import Problem


class Descale(NamedTuple):
    """A `Scale` as a kernel argument."""

    ptr: Pointer
    stride_b: int
    stride_h: int
    stride_block: int
    block_rows: int  # at least 1


class Descales(NamedTuple):
    q: Descale
    k: Descale
    v: Descale
    dout: Descale | None = None  # in a backward


class Scale(NamedTuple):
    """Dequantisation factors of a tensor in FP8: x is about x8 * descale."""

    descale: Tensor  # fp32 [b, h, blocks], positive; h are that tensor's heads; a dim in which it is constant may be 1
    block_rows: int = 0  # tokens of a block, counted within each sequence; 0: one block

    @property
    def is_blockwise(self) -> bool:
        return self.block_rows > 0 and self.descale.shape[-1] > 1

    @property
    def argument(self) -> Descale:
        shape, strides = self.descale.shape, self.descale.stride()
        stride_b, stride_h, stride_block = (0 if size == 1 else stride for size, stride in zip(shape, strides, strict=True))
        return Descale(
            ptr=self.descale, stride_b=stride_b, stride_h=stride_h, stride_block=stride_block, block_rows=max(1, self.block_rows)
        )


def scales_of(problem: Problem) -> tuple[Scale, ...]:
    """Returns the scales of q, k, v and dout that the problem has."""
    return tuple(Scale(descale, problem.scale_rows) for descale in problem.descales)


def descales_of(problem: Problem) -> Descales:
    """Returns the descales of a problem in FP8 as a kernel argument."""
    return Descales(*(scale.argument for scale in scales_of(problem)))


def scale_error(name: str, scale: Scale, problem: Problem, heads: int, multiple: int) -> str | None:
    """Returns the reason if the kernels do not support a tensor's scale; None: they do. multiple: required divisor of its blocks'
    rows.
    """
    shape = scale.descale.shape
    if scale.descale.dtype is not torch.float32 or len(shape) != 3:
        dtype = str(scale.descale.dtype).removeprefix("torch.")
        return f"descale_{name} is {dtype} of shape {tuple(shape)}, not fp32 [b, h, blocks]"
    if shape[0] not in (1, problem.batch) or shape[1] not in (1, heads):
        return f"descale_{name} has shape {tuple(shape)}, not [{problem.batch}, {heads}, blocks]"
    if scale.is_blockwise and scale.block_rows % multiple:
        return f"descale_{name} has blocks of {scale.block_rows} rows, no multiple of {multiple}"
    return None
