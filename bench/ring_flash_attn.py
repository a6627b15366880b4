"""ring-flash-attn's zigzag attention, as a peer of `flexattn.distributed`; needs its package (written for 0.1.8).

The package imports transformers' models and flash_attn, although its attention needs neither. This module imports the attention
without transformers. If flash_attn is not installed, its two functions call the FlashAttention 2 in torch.
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


def _flash_attn_forward(**call: Any) -> tuple[Tensor | None, ...]:
    """Returns out [b, s, h, d], lse [b, h, s], and None for the two results of dropout."""
    q, k = call["q"], call["k"]
    scores = (q.shape[1], k.shape[1], call["dropout_p"], call["causal"], False)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, call["v"], None, None, *scores, scale=call["softmax_scale"])
    return out, lse, None, None


def _flash_attn_backward(**call: Any) -> None:
    """Writes the gradients to the tensors dq, dk and dv."""
    tensors = [call[name] for name in ("dout", "q", "k", "v", "out", "softmax_lse")]
    _, q, k, *_ = tensors
    no_dropout = torch.empty(0, dtype=torch.int64)
    scores = (q.shape[1], k.shape[1], call["dropout_p"], call["causal"], no_dropout, no_dropout)
    gradients = torch.ops.aten._flash_attention_backward(*tensors, None, None, *scores, scale=call["softmax_scale"])
    for name, gradient in zip(("dq", "dk", "dv"), gradients, strict=True):
        call[name].copy_(gradient)


def _kernels_of_torch() -> dict[str, types.ModuleType]:
    """Returns modules that replace `import flash_attn`."""
    package, interface = types.ModuleType("flash_attn"), types.ModuleType(_KERNELS)
    for name, function in (("_flash_attn_forward", _flash_attn_forward), ("_flash_attn_backward", _flash_attn_backward)):
        setattr(interface, name, function)
    package.flash_attn_interface = interface  # type: ignore[attr-defined]
    return {"flash_attn": package, _KERNELS: interface}


def zigzag() -> Any:
    """Returns ring-flash-attn's `zigzag_ring_flash_attn_func`, for q, k and v [b, s, h, d] of parts in zigzag order.

    Raises ModuleNotFoundError if the package is missing, and any error that its import raises.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.submodule_search_locations is None:
        raise ModuleNotFoundError(f"No module named {_PACKAGE!r}")
    package = types.ModuleType(_PACKAGE)
    package.__path__ = list(spec.submodule_search_locations)
    modules = {_PACKAGE: package} | ({} if importlib.util.find_spec("flash_attn") else _kernels_of_torch())
    with mock.patch.dict(sys.modules, modules):  # the imported modules leave sys.modules afterwards
        return importlib.import_module(f"{_PACKAGE}.zigzag_ring_flash_attn").zigzag_ring_flash_attn_func
