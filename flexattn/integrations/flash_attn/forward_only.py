"""Calls that FlashAttention runs forward for tensors that require a gradient, though it has no backward of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T", bound=Tensor | tuple[Tensor, ...])


class _ForwardOnly(torch.autograd.Function):
    """Returns out as it is, and raises NotImplementedError in a backward."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, why: str, *inputs: Tensor) -> Tensor:
        ctx.why = why
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(ctx.why)


def needs_gradient(*tensors: Tensor) -> bool:
    """Returns whether a gradient of one of the tensors is wanted."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def forward_only(attend: Callable[..., T], tensors: tuple[Tensor, ...], why: str) -> T:
    """Returns attend(*tensors) of detached tensors; a backward of out, its first or only result, raises.

    Args:
        attend: the call.
        tensors: what it takes.
        why: the text of the NotImplementedError.
    """
    result: Any = attend(*(x.detach() for x in tensors))
    out, *others = result if isinstance(result, tuple) else (result,)
    out = _ForwardOnly.apply(out, why, *tensors)  # type: ignore[no-untyped-call]
    whole: Any = (out, *others) if isinstance(result, tuple) else out
    return whole  # type: ignore[no-any-return]


PAGES = (
    "a gradient of a call over pages is asked for; accepted: a forward alone, as in FlashAttention, or k and v gathered by "
    "k[page_table]"
)
FP8 = (
    "a gradient of q, k and v in FP8 is asked for; accepted: a forward alone, as in FlashAttention; to train give q, k and v in "
    "float16 or bfloat16, or give such with an fp8_recipe to flexattn.attention"
)
