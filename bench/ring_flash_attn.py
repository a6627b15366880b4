"""ring-flash-attn's zigzag attention, as a peer of `flexattn.distributed`; needs its package (written for 0.1.8).

Its package imports transformers' models and flash_attn. Attention alone needs neither: its module is imported without the first,
and where flash_attn is not installed, FlashAttention 2 is the one in torch, behind the two functions that are called.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from typing import Any
from unittest import mock

import torch
from torch import Tensor

_PACKAGE, _KERNELS = "ring_flash_attn", "flash_attn.flash_attn_interface"


def _flash_attn_forward(**of: Any) -> tuple[Tensor | None, ...]:
    """Returns out [b, s, h, d], lse [b, h, s], and what dropout has, which is none here."""
    q, k = of["q"], of["k"]
    scores = (q.shape[1], k.shape[1], of["dropout_p"], of["causal"], False)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, of["v"], None, None, *scores, scale=of["softmax_scale"])
    return out, lse, None, None


def _flash_attn_backward(**of: Any) -> None:
    """Writes the gradients to the tensors dq, dk and dv."""
    given = [of[name] for name in ("dout", "q", "k", "v", "out", "softmax_lse")]
    _, q, k, *_ = given
    no_dropout = torch.empty(0, dtype=torch.int64)
    scores = (q.shape[1], k.shape[1], of["dropout_p"], of["causal"], no_dropout, no_dropout)
    found = torch.ops.aten._flash_attention_backward(*given, None, None, *scores, scale=of["softmax_scale"])
    for name, gradient in zip(("dq", "dk", "dv"), found, strict=True):
        of[name].copy_(gradient)


def _kernels_of_torch() -> dict[str, types.ModuleType]:
    """Returns the modules that `import flash_attn` is to find."""
    package, interface = types.ModuleType("flash_attn"), types.ModuleType(_KERNELS)
    for name, function in (("_flash_attn_forward", _flash_attn_forward), ("_flash_attn_backward", _flash_attn_backward)):
        setattr(interface, name, function)
    package.flash_attn_interface = interface  # type: ignore[attr-defined]
    return {"flash_attn": package, _KERNELS: interface}


def zigzag() -> Any:
    """Returns ring-flash-attn's `zigzag_ring_flash_attn_func`, for q, k and v [b, s, h, d] of parts in zigzag order.

    Raises ModuleNotFoundError without the package, and whatever its module raises as it is imported.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.submodule_search_locations is None:
        raise ModuleNotFoundError(f"No module named {_PACKAGE!r}")
    package = types.ModuleType(_PACKAGE)
    package.__path__ = list(spec.submodule_search_locations)
    modules = {_PACKAGE: package} | ({} if importlib.util.find_spec("flash_attn") else _kernels_of_torch())
    with mock.patch.dict(sys.modules, modules):  # what is imported here is forgotten again
        return importlib.import_module(f"{_PACKAGE}.zigzag_ring_flash_attn").zigzag_ring_flash_attn_func
