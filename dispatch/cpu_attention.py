"""Attention on a CPU by torch's own fused operator, where that computes exactly what is asked: dense, causal, with a bias, grouped.

The operator keeps no scores and runs on all threads of torch (`aten::_scaled_dot_product_flash_attention_for_cpu`, which
`torch.nn.functional.scaled_dot_product_attention` calls: https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/
transformers/attention.cpp). Its logsumexp of a row without keys is 0; it is -inf here.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flexattn.dispatch.spec import AttentionSpec, Gradients, Operands, Results, as_bshd, empty_outputs

# Weights made again from an lse of this size have an error of 4e-6 of themselves in fp32; with larger ones the eager backend finds
# them without it.
LARGEST_LSE = 64.0

_aten = torch.ops.aten
_forward_op = _aten._scaled_dot_product_flash_attention_for_cpu.default
_backward_op = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def takes(spec: AttentionSpec, x: Operands) -> bool:
    """Returns whether the operator computes a call: in fp32.

    In 16 bits it sums approximate exponentials (an lse of 7.5 was off by 5e-5), and in fp64 the eager backend is the reference to
    others.
    """
    if x.q.device.type != "cpu" or spec.dtype is not torch.float32 or spec.head_dim_qk != spec.head_dim_v:
        return False
    if "t" in spec.q_format + spec.kv_format or 0 in (*x.q.shape, *x.k.shape):
        return False
    if any((spec.fp8, spec.kv_dtype, spec.mods, spec.padding, spec.softcap, spec.dropout, spec.is_part, spec.needs_lse_grad)):
        return False
    if spec.return_max_logit or spec.bias_type == "alibi" or spec.softmax_type != "vanilla":
        return False
    if x.bias is not None and (spec.needs_bias_grad or x.bias.dtype is not torch.float32):
        return False
    return _causal(spec, x) is not None


def _causal(spec: AttentionSpec, x: Operands) -> bool | None:
    """Returns False where queries see all keys, True where each sees those up to its own place, and None for other bands."""
    len_q, len_kv = x.q.shape[spec.q_format.index("s")], x.k.shape[spec.kv_format.index("s")]
    left, right, bottom_right = spec.band
    shift = len_kv - len_q if bottom_right else 0
    if left is not None and len_q - 1 + shift > left:
        return None
    if right is None or shift + right >= len_kv - 1:
        return False
    return True if right == shift == 0 and x.bias is None else None


def forward(spec: AttentionSpec, x: Operands) -> tuple[Tensor, Tensor, Tensor] | None:
    """Returns out, lse and max_logit as `empty_outputs` lays them out, or None where a number is not finite.

    spec, x: a call that `takes` takes. What is not finite comes from inputs that the eager backend has rules for.
    """
    mask = _mask(spec, x)
    with _without_autocast():
        found, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            *_qkv(spec, x), 0.0, bool(_causal(spec, x)), attn_mask=mask, scale=x.softmax_scale
        )
        if not math.isfinite(found.sum().item()):
            return None
        if mask is not None and bool((lse == 0).any()):
            lse.masked_fill_(mask.isneginf().all(-1), float("-inf"))
    bshd = found.transpose(1, 2)  # in memory too, as the operator lays it out
    if spec.q_format == "bshd" and spec.results == Results() and x.out is None:
        out = _contiguous(bshd)
    else:
        out = empty_outputs(spec, x)[0]
        as_bshd(out, spec.q_format).copy_(bshd)
    return out, _contiguous(lse), lse.new_empty(0)


def backward(spec: AttentionSpec, x: Operands, out: Tensor, lse: Tensor, dout: Tensor) -> Gradients | None:
    """Returns the gradients, or None where those of the eager backend are more exact: of a large or infinite lse."""
    given_lse = lse.masked_fill(lse.isneginf(), 0.0)
    if not bool(given_lse.abs().amax() <= LARGEST_LSE):
        return None
    out, dout = (as_bshd(t, spec.q_format).transpose(1, 2) for t in (out, dout))
    mask = _mask(spec, x)
    with torch.no_grad(), _without_autocast():
        found = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, *_qkv(spec, x), out, given_lse, 0.0, bool(_causal(spec, x)), attn_mask=mask, scale=x.softmax_scale
        )
    formats = (spec.q_format, spec.kv_format, spec.kv_format)
    dq, dk, dv = (_contiguous(as_bshd(t.transpose(1, 2), fmt)) for t, fmt in zip(found, formats, strict=True))
    return Gradients(*spec.results.stored((dq, dk, dv), (spec.q_format, spec.kv_format), spec.out_dtype), None, None, None)


class KeptForward:
    """A forward that `takes` takes, of a kept call: with what follows from its shapes found once. Called as a `Recording` is."""

    can_vary = False  # its numbers are in it

    def __init__(self, spec: AttentionSpec, x: Operands, otherwise: Callable[[Sequence[Any]], Sequence[Any]]) -> None:
        """otherwise: computes a call in which a number is not finite, from the same tensors."""
        self.otherwise = otherwise
        self.is_causal, self.scale = bool(_causal(spec, x)), x.softmax_scale
        self.to_bhsd = _orders(spec, "bhsd")
        self.to_q = tuple("bhsd".index(dim) for dim in spec.q_format)

    def can_replay(self) -> bool:
        return True

    def replay(self, tensors: Sequence[Any], addresses: Sequence[int]) -> Sequence[Any]:
        """Returns out, lse and None for max_logit. tensors: q, k, v, and others that are None."""
        qkv = [t.permute(order) for t, order in zip(tensors, self.to_bhsd, strict=False)]
        found, lse = _forward_op(*qkv, 0.0, self.is_causal, attn_mask=None, scale=self.scale)
        if not math.isfinite(found.sum().item()):
            return self.otherwise(tensors)
        return _contiguous(found.permute(self.to_q)), _contiguous(lse), None


class KeptBackward:
    """The backward likewise."""

    can_vary = False

    def __init__(self, spec: AttentionSpec, x: Operands, otherwise: Callable[[Sequence[Any]], Sequence[Any]]) -> None:
        """otherwise: computes a backward of a large lse, from the same tensors."""
        self.otherwise = otherwise
        self.is_causal, self.scale = bool(_causal(spec, x)), x.softmax_scale
        self.to_bhsd = _orders(spec, "bhsd")
        formats = (spec.q_format, spec.kv_format, spec.kv_format)
        self.from_bhsd = [tuple("bhsd".index(dim) for dim in fmt) for fmt in formats]

    def can_replay(self) -> bool:
        return True

    def replay(self, tensors: Sequence[Any], addresses: Sequence[int]) -> Sequence[Any]:
        """Returns the gradients of q, k and v, and None twice. tensors: those of the forward, then out, lse, dout and None."""
        *_, out, lse, dout, _dlse = tensors
        if not lse.abs().amax().item() <= LARGEST_LSE:
            return self.otherwise(tensors)
        qkv = [t.permute(order) for t, order in zip(tensors, self.to_bhsd, strict=False)]
        out, dout = (t.permute(self.to_bhsd[0]) for t in (out, dout))
        found = _backward_op(dout, *qkv, out, lse, 0.0, self.is_causal, attn_mask=None, scale=self.scale)
        return *(_contiguous(t.permute(order)) for t, order in zip(found, self.from_bhsd, strict=True)), None, None


def can_be_kept(spec: AttentionSpec, x: Operands) -> bool:
    """Returns whether `KeptForward` and `KeptBackward` take a call: such as `takes` takes, in dense rows, without a bias or out."""
    is_plain = x.bias is None and x.out is None and spec.results == Results() and not torch.is_autocast_enabled("cpu")
    return is_plain and all(t.stride(-1) == 1 for t in (x.q, x.k, x.v)) and takes(spec, x)


def _orders(spec: AttentionSpec, order: str) -> list[tuple[int, ...]]:
    """Returns for q, k and v the dims in another order."""
    return [tuple(fmt.index(dim) for dim in order) for fmt in (spec.q_format, spec.kv_format, spec.kv_format)]


def _without_autocast() -> contextlib.AbstractContextManager[Any]:
    """Returns what keeps autocast off; entering it where it is off takes as long as a small product."""
    return torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else contextlib.nullcontext()


def _contiguous(t: Tensor) -> Tensor:
    """Returns a tensor with the strides of a new one, in dims of size 1 too."""
    copy = t.contiguous()
    return copy.view(-1).view(t.shape) if copy is t and 1 in t.shape else copy


def _qkv(spec: AttentionSpec, x: Operands) -> tuple[Tensor, ...]:
    """Returns q, k and v as bhsd with a last stride of 1: the operator asks q, k and v for every stride but that."""
    formats = (spec.q_format, spec.kv_format, spec.kv_format)
    given = (t.detach() if t.requires_grad else t for t in (x.q, x.k, x.v))
    bhsd = [t if fmt == "bhsd" else as_bshd(t, fmt).transpose(1, 2) for t, fmt in zip(given, formats, strict=True)]
    return tuple([t if t.stride(-1) == 1 else t.contiguous() for t in bhsd])


def _mask(spec: AttentionSpec, x: Operands) -> Tensor | None:
    """Returns what the operator adds to scaled scores."""
    if x.bias is None:
        return None
    bias = x.bias.detach()
    return bias * x.softmax_scale if spec.bias_type == "pre_scale_bias" else bias
