"""Attention has first derivatives only, of one gradient at a time: a guard makes any derivative of its gradients raise."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from flexattn import compat

MESSAGE = (
    "flexattn's attention has no second derivative, and a derivative of its gradients was asked for (a gradient of a loss that was "
    "made of them, as a gradient penalty or a Hessian-vector product); accepted: first derivatives, or for this part of the model "
    "attention in plain torch ops: softmax(q @ k.mT * scale) @ v, or torch's scaled_dot_product_attention under "
    "sdpa_kernel(SDPBackend.MATH)"
)

BATCHED = (
    "attention()'s backward has no rule for torch.vmap, and the gradient of its output is batched (by is_grads_batched=True, by "
    "torch.autograd.functional.jacobian or hessian with vectorize=True, or by torch.vmap over torch.autograd.grad); accepted: one "
    "backward for each gradient, in a loop, as vectorize=False has it"
)

Backward = Callable[..., tuple[Tensor | None, ...]]


def first_order(backward: Backward) -> Backward:
    """Makes a Function's backward of backward(ctx, saved tensors, *incoming gradients); the Function must have saved out first."""

    @functools.wraps(backward)
    def wrapper(ctx: Any, *incoming: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: checkpointing gives them only once
        try:
            if not torch.is_grad_enabled() or torch.compiler.is_compiling():
                return backward(ctx, saved, *incoming)
            with torch.no_grad():
                gradients = backward(ctx, saved, *incoming)
        except RuntimeError:  # raised by the address of a batched tensor, and by operators that get one
            refuse_batched(*incoming)
            raise
        return guarded(gradients, saved[0], *incoming)  # autograd finds every input by the node of out

    return wrapper


def guarded(gradients: Sequence[Tensor | None], *sources: Tensor | None) -> tuple[Tensor | None, ...]:
    """Returns the gradients, tied to the graphs of their sources, so that a derivative of them raises RuntimeError."""
    tied: tuple[Tensor | None, ...] = _Guard.apply(len(gradients), *gradients, *sources)  # type: ignore[no-untyped-call]
    return tied


def refuse_batched(*gradients: Tensor | None) -> None:
    """Raises RuntimeError if a gradient is batched, by torch.vmap or by torch.autograd."""
    if torch.compiler.is_compiling():
        return
    if any(t is not None and (compat.is_legacy_batched(t) or compat.is_batched(t)) for t in gradients):
        raise RuntimeError(BATCHED) from None


class _Guard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if t is None else t.detach() for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> NoReturn:
        raise RuntimeError(MESSAGE)
