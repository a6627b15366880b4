"""The guard of attention's backwards: their gradients get derivatives if the call has second ones, or else raise if differentiated.

A gradient has no batch: one gradient at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from flexattn import compat
from flexattn.function_context import FunctionContext

MESSAGE = (
    "attention in FP8 or over ranks and attention_backward() have no second derivative, and a derivative of their gradients was "
    "asked for (a gradient of a loss that was made of them, as a gradient penalty or a Hessian-vector product); accepted: first "
    "derivatives, attention() on one device in float16, bfloat16, float32 or float64, or attention in plain torch ops: "
    "softmax(q @ k.mT * scale) @ v"
)

PART = (
    "attention_backward() has no derivative, and a transform of torch.func or forward mode differentiates one of its tensors; "
    "accepted: torch.autograd.grad(..., create_graph=True) of attention()"
)

BATCHED = (
    "attention()'s backward has no rule for torch.vmap, and the gradient of its output is batched (by is_grads_batched=True, by "
    "torch.autograd.functional.jacobian or hessian with vectorize=True, or by torch.vmap over torch.autograd.grad); accepted: one "
    "backward for each gradient, in a loop, as vectorize=False has it"
)

Backward = Callable[..., tuple[Tensor | None, ...]]
# differentiate(ctx, saved tensors, gradients, *incoming gradients) returns the gradients with derivatives, or None without them.
Differentiate = Callable[..., "Sequence[Tensor | None] | None"]


def first_order(backward: Backward, differentiate: Differentiate | None = None) -> Backward:
    """Makes a Function's backward of backward(ctx, saved tensors, *incoming gradients); the Function must have saved out first."""

    @functools.wraps(backward)
    def wrapper(ctx: FunctionContext, *incoming: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: checkpointing gives them only once
        try:
            if not torch.is_grad_enabled() or torch.compiler.is_compiling():
                return backward(ctx, saved, *incoming)
            with torch.no_grad():
                gradients = backward(ctx, saved, *incoming)
        except RuntimeError:  # raised by the address of a batched tensor, and by operators that get one
            refuse_batched(*incoming)
            raise
        found = None if differentiate is None else differentiate(ctx, saved, gradients, *incoming)
        # Without derivatives, autograd finds every input by the node of out.
        return guarded(gradients, saved[0], *incoming) if found is None else tuple(found)

    return wrapper


def second_order(differentiate: Differentiate) -> Callable[[Backward], Backward]:
    """Decorates a backward whose gradients have derivatives: see `first_order`."""
    return functools.partial(first_order, differentiate=differentiate)


def guarded(tensors: Sequence[Tensor | None], *sources: Tensor | None, message: str = MESSAGE) -> tuple[Tensor | None, ...]:
    """Returns the tensors, tied to the graphs of their sources, so that a derivative of them raises NotImplementedError."""
    tied: tuple[Tensor | None, ...] = _Guard.apply(message, len(tensors), *tensors, *sources)  # type: ignore[no-untyped-call]
    return tied


def refuse_batched(*gradients: Tensor | None) -> None:
    """Raises RuntimeError if a gradient is batched, by torch.vmap or by torch.autograd."""
    if torch.compiler.is_compiling():
        return
    if any(t is not None and (compat.is_legacy_batched(t) or compat.is_batched(t)) for t in gradients):
        raise RuntimeError(BATCHED) from None


class _Guard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionContext, message: str, count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.message = message
        return tuple(None if t is None else t.detach() for t in tensors[:count])

    @staticmethod
    def backward(ctx: FunctionContext, *_: Tensor | None) -> NoReturn:
        raise NotImplementedError(ctx.message)  # a RuntimeError
