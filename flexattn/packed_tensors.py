"""Packed tensors as views, whose gradients come back as one tensor without a copy where they were written into one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def unpack(packed: Tensor, dim: int) -> tuple[Tensor, ...]:
    """Returns the slices of a tensor along `dim` as views: q, k and v, or k and v, that lie in one tensor.

    Differentiable. The gradient of `packed` is made without a copy where those of the slices are views that lie in one tensor as
    the slices do, which they are of a call with a packing among its `Results`; else they are copied together, as torch.stack does.
    """
    return Unpacked.apply(packed, dim) if packed.requires_grad else packed.unbind(dim)  # type: ignore[no-untyped-call]


class Unpacked(torch.autograd.Function):
    """`unpack` with its gradient."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, dim: int) -> tuple[Tensor, ...]:
        ctx.dim = dim
        ctx.set_materialize_grads(False)
        return packed.unbind(dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None]:
        given = next((t for t in gradients if t is not None), None)
        if given is None:
            return None, None
        return joined([torch.zeros_like(given) if t is None else t for t in gradients], ctx.dim), None


def joined(slices: Sequence[Tensor], dim: int) -> Tensor:
    """Returns the tensor whose slices along `dim` are given: as a view of what they lie in, or by a copy."""
    first = slices[0]
    if torch.compiler.is_compiling() or torch.is_grad_enabled():  # a trace has no storages, and a view here would have no graph
        return torch.stack(tuple(slices), dim)
    at = dim if dim >= 0 else first.dim() + 1 + dim
    storage, strides = first.untyped_storage()._cdata, first.stride()
    step = slices[1].storage_offset() - first.storage_offset()
    is_one = step > 0 and all(
        t.untyped_storage()._cdata == storage
        and t.stride() == strides
        and t.shape == first.shape
        and t.storage_offset() == first.storage_offset() + i * step
        for i, t in enumerate(slices)
    )
    if not is_one:
        return torch.stack(tuple(slices), dim)
    shape = (*first.shape[:at], len(slices), *first.shape[at:])
    return first.as_strided(shape, (*strides[:at], step, *strides[at:]), first.storage_offset())
