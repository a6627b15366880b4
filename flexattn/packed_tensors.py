"""Slices of a packed tensor as views, whose gradients form one tensor without a copy if they lie in one buffer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexattn import compat
from flexattn.function_context import FunctionContext


def unpack(packed: Tensor, dim: int) -> tuple[Tensor, ...]:
    """Returns the slices of a tensor along `dim` as views: q, k and v, or k and v, of one tensor.

    Differentiable. If the gradients of the slices lie in one tensor in the same way, the gradient of `packed` is that tensor,
    without a copy. A call with a packing in its `Results` returns such gradients. All others are copied as by torch.stack.
    """
    if packed.requires_grad and not compat.has_transforms():
        return Unpacked.apply(packed, dim)  # type: ignore[no-any-return, no-untyped-call]
    return packed.unbind(dim)


class Unpacked(torch.autograd.Function):
    """Autograd function of `unpack`."""

    @staticmethod
    def forward(ctx: FunctionContext, packed: Tensor, dim: int) -> tuple[Tensor, ...]:
        ctx.dim = dim
        ctx.set_materialize_grads(False)
        return packed.unbind(dim)

    @staticmethod
    def backward(ctx: FunctionContext, *gradients: Tensor | None) -> tuple[Tensor | None, None]:
        like = next((t for t in gradients if t is not None), None)
        if like is None:
            return None, None
        return joined([torch.zeros_like(like) if t is None else t for t in gradients], ctx.dim), None


def joined(slices: Sequence[Tensor], dim: int) -> Tensor:
    """Returns the tensor with these slices along `dim`: a view if the slices lie in one storage, else a copy."""
    first = slices[0]
    if torch.compiler.is_compiling() or torch.is_grad_enabled():  # a trace has no storages, and as_strided would lose the graph
        return torch.stack(tuple(slices), dim)
    axis = dim if dim >= 0 else first.dim() + 1 + dim
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
    shape = (*first.shape[:axis], len(slices), *first.shape[axis:])
    return first.as_strided(shape, (*strides[:axis], step, *strides[axis:]), first.storage_offset())
