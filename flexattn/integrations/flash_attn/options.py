"""Arguments that FlashAttention's functions share, and their conversion to `flexattn.attention`'s names."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from flexattn.integrations.arguments import check_fit, window_sides
from flexattn.validation import check_flags

F = TypeVar("F", bound=Callable[..., Any])


class Options(NamedTuple):
    """Arguments of most functions, under FlashAttention's names; a side of window_size below 0 is open."""

    dropout_p: float = 0.0
    softmax_scale: float | None = None
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    deterministic: bool = False


def named(options: Options, is_padded: bool) -> dict[str, Any]:
    """Returns the options under `attention`'s names. is_padded: whether the sequences have different lengths."""
    prefix = "padding_" if is_padded else ""
    check_flags(causal=options.causal)
    left, right = (-1 if side is None or side < 0 else side for side in window_sides(options.window_size))
    if options.causal:
        mask, right = prefix + "causal_bottom_right", 0
    else:
        mask = "padding" if is_padded else "no_mask"
    return {
        "attn_mask_type": mask,
        "window_size": (left, right),
        "softmax_scale": options.softmax_scale,
        "softcap": options.softcap,
        "dropout_p": options.dropout_p,
        "bias_type": "no_bias" if options.alibi_slopes is None else "alibi",
        "alibi_slopes": options.alibi_slopes,
        "deterministic": options.deterministic or None,
    }


def with_qv(q: Tensor, qv: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the rows whose product is q k^T + qv v^T. Raises if the tensors do not fit, or differ in dtype."""
    rows, keys = ("t" if isinstance(q, Tensor) and q.dim() == 3 else "b s"), ("t_k" if k.dim() == 3 else "rows s_k")
    check_fit(q=(q, f"{rows} h d"), qv=(qv, f"{rows} h d_v"), v=(v, f"{keys} h_k d_v"), k=(k, f"{keys} h_k d"))
    if not q.dtype == qv.dtype == k.dtype == v.dtype:
        dtypes = ", ".join(str(x.dtype) for x in (q, qv, k, v))
        raise TypeError(f"q, qv, k and v have dtypes {dtypes}; accepted: one dtype")
    return torch.cat((q, qv), -1), torch.cat((k, v), -1)


def refuse(name: str, value: object, instead: str) -> None:
    """Raises NotImplementedError, with the alternative in its text, unless the argument's value is None."""
    if value is not None:
        raise NotImplementedError(f"{name} is not supported (got {type(value).__name__}); accepted: None; {instead}")


def with_options_of(other: Callable[..., object]) -> Callable[[F], F]:
    """Decorates a function that passes *options on to another, so that its signature shows the other's optional parameters."""
    options = [x for x in inspect.signature(other).parameters.values() if x.default is not x.empty]

    def with_signature(function: F) -> F:
        signature = inspect.signature(function)
        own = [x for x in signature.parameters.values() if x.kind is x.POSITIONAL_OR_KEYWORD]
        function.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
        return function

    return with_signature
