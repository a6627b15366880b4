"""Forward calls on tensors that require a gradient, for cases without a backward, as in FlashAttention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from flexattn.first_order import guarded

T = TypeVar("T", bound=Tensor | tuple[Tensor, ...])


def needs_gradient(*tensors: Tensor) -> bool:
    """Returns whether gradients are enabled and one of the tensors requires one."""
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in tensors)


def forward_only(attend: Callable[..., T], tensors: tuple[Tensor, ...], why: str) -> T:
    """Returns attend(*tensors), computed on detached tensors. A backward of out, the first or only result, raises.

    why: the text of the NotImplementedError.
    """
    result: object = attend(*(x.detach() for x in tensors))
    out, *others = result if isinstance(result, tuple) else (result,)
    [tied] = guarded((out,), *tensors, message=why)
    results: Any = (tied, *others) if isinstance(result, tuple) else tied
    return results  # type: ignore[no-any-return]


PAGES = "a call over pages has no backward; accepted: a forward alone, as in FlashAttention, or k and v gathered by k[page_table]"
FP8 = (
    "a call with q, k and v in FP8 has no backward; accepted: a forward alone, as in FlashAttention; to train, pass q, k and v in "
    "float16 or bfloat16, or pass such tensors with an fp8_recipe to flexattn.attention"
)
