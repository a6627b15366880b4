"""Attention on a CPU with torch's own fused operator, if it supports the call: dense, causal, with a bias, with grouped heads.

A short call with another band passes the band as a mask, because the operator then takes a fraction of the time of the blocks.

The operator stores no scores and uses all threads of torch. It is `aten::_scaled_dot_product_flash_attention_for_cpu`, which
`torch.nn.functional.scaled_dot_product_attention` calls
(https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/transformers/attention.cpp). If a row sees no key, the operator's
logsumexp is 0, and this file returns -inf.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flexattn.dispatch.neutral import neutral_state
from flexattn.dispatch.spec import AttentionSpec, Flat, Gradients, Operands, Results, as_bshd, empty_outputs

# In fp32, weights recomputed from an lse of this size have a relative error of 4e-6. If an lse is larger, the eager backend
# computes the weights without it.
LARGEST_LSE = 64.0
# Scores of one head up to which a band becomes a mask. With more, the eager backend's blocks gain by leaving out hidden keys.
MOST_MASKED = 1 << 14

_aten = torch.ops.aten
_forward_op = _aten._scaled_dot_product_flash_attention_for_cpu.default
_backward_op = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def takes(spec: AttentionSpec, x: Operands) -> bool:
    """Returns whether the operator runs a call. It runs only fp32 calls.

    In 16 bits the operator sums approximate exponentials (an lse of 7.5 was off by 5e-5). In fp64 the eager backend must run,
    because it is the reference for other backends.
    """
    if x.q.device.type != "cpu" or spec.dtype is not torch.float32 or spec.head_dim_qk != spec.head_dim_v:
        return False
    if "t" in spec.q_format + spec.kv_format or 0 in (*x.q.shape, *x.k.shape):
        return False
    if any(
        (
            spec.kv_lists,
            spec.block_size,
            spec.fp8,
            spec.kv_dtype,
            spec.mods,
            spec.padding,
            spec.softcap,
            spec.dropout,
            spec.is_part,
            spec.needs_lse_grad,
        )
    ):
        return False
    if spec.return_max_logit or spec.bias_type == "alibi" or spec.softmax_type != "vanilla":
        return False
    if x.bias is not None and (spec.needs_bias_grad or spec.bias_is_shared or x.bias.dtype is not torch.float32):
        return False
    return _causal(spec, x) is not None or _is_short(spec, x)


def _causal(spec: AttentionSpec, x: Operands) -> bool | None:
    """Returns True for a causal mask, False if all queries see all keys, and None for other bands."""
    len_q, len_kv = x.q.shape[spec.q_format.index("s")], x.k.shape[spec.kv_format.index("s")]
    left, right, bottom_right = spec.band
    shift = len_kv - len_q if bottom_right else 0
    if left is not None and len_q - 1 + shift > left:
        return None
    if right is None or shift + right >= len_kv - 1:
        return False
    return True if right == shift == 0 and x.bias is None else None


def _is_short(spec: AttentionSpec, x: Operands) -> bool:
    """Returns whether `_mask` can be the band of a call, which then has no bias and few scores, and whose rows each see a key."""
    len_q, len_kv = x.q.shape[spec.q_format.index("s")], x.k.shape[spec.kv_format.index("s")]
    left, right, bottom_right = spec.band
    shift = len_kv - len_q if bottom_right else 0
    if x.bias is not None or len_q * len_kv > MOST_MASKED or (left is not None and right is not None and left + right < 0):
        return False
    return (right is None or shift + right >= 0) and (left is None or len_q - 1 + shift - left < len_kv)


def _mask(spec: AttentionSpec, x: Operands) -> Tensor:
    """Returns the mask that the operator adds to scaled scores, for a bias, or for a band that `_causal` does not have.

    The mask of a band is float32 [len_q, len_kv]: 0 for the keys that a query sees, and -inf for the others.
    """
    if x.bias is not None:
        bias = x.bias.detach()
        return bias * x.softmax_scale if spec.bias_type == "pre_scale_bias" else bias
    len_q, len_kv = x.q.shape[spec.q_format.index("s")], x.k.shape[spec.kv_format.index("s")]
    left, right, bottom_right = spec.band
    with neutral_state():
        distance = torch.arange(len_kv, device="cpu") - torch.arange(len_q, device="cpu").unsqueeze(1)
        distance -= len_kv - len_q if bottom_right else 0
        is_hidden = torch.zeros(len_q, len_kv, dtype=torch.bool, device="cpu")
        if left is not None:
            is_hidden |= distance < -left
        if right is not None:
            is_hidden |= distance > right
        return torch.zeros(len_q, len_kv, dtype=torch.float32, device="cpu").masked_fill_(is_hidden, float("-inf"))


def forward(spec: AttentionSpec, x: Operands) -> tuple[Tensor, Tensor, Tensor] | None:
    """Returns out, lse and max_logit as `empty_outputs` lays them out, or None if an element is not finite.

    spec, x: a call that `takes` accepts. The eager backend has rules for inputs that lead to elements that are not finite.
    """
    is_causal = _causal(spec, x)
    mask = None if x.bias is None and is_causal is not None else _mask(spec, x)
    q, k, v = _bhsd(x.q, spec.q_format), _bhsd(x.k, spec.kv_format), _bhsd(x.v, spec.kv_format)
    with _without_autocast():
        bhsd, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, bool(is_causal), attn_mask=mask, scale=x.softmax_scale
        )
        if not math.isfinite(bhsd.sum().item()):
            return None
        if x.bias is not None and mask is not None and bool((lse == 0).any()):
            lse.masked_fill_(mask.isneginf().all(-1), float("-inf"))
    bshd = bhsd.transpose(1, 2)  # the operator's memory layout.
    if spec.q_format == "bshd" and spec.results == Results() and x.out is None:
        out = _contiguous(bshd)
    else:
        out = empty_outputs(spec, x)[0]
        as_bshd(out, spec.q_format).copy_(bshd)
    return out, _contiguous(lse), lse.new_empty(0)


def backward(spec: AttentionSpec, x: Operands, out: Tensor, lse: Tensor, dout: Tensor) -> Gradients | None:
    """Returns the gradients, or None if an lse is so large that the eager backend is more exact, or a hidden key is not finite."""
    finite_lse = lse.masked_fill(lse.isneginf(), 0.0)
    if not bool(finite_lse.abs().amax() <= LARGEST_LSE):
        return None
    q, k, v = _bhsd(x.q, spec.q_format), _bhsd(x.k, spec.kv_format), _bhsd(x.v, spec.kv_format)
    out, dout = _bhsd(out, spec.q_format), _bhsd(dout, spec.q_format)
    is_causal = _causal(spec, x)
    mask = None if x.bias is None and is_causal is not None else _mask(spec, x)
    with torch.no_grad(), _without_autocast():
        gradients = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, finite_lse, 0.0, bool(is_causal), attn_mask=mask, scale=x.softmax_scale
        )
    if mask is not None and x.bias is None and not _are_finite(gradients):
        return None
    formats = (spec.q_format, spec.kv_format, spec.kv_format)
    dq, dk, dv = (_contiguous(as_bshd(t.transpose(1, 2), fmt)) for t, fmt in zip(gradients, formats, strict=True))
    return Gradients(*spec.results.stored((dq, dk, dv), (spec.q_format, spec.kv_format), spec.out_dtype), None, None, None)


class KeptForward:
    """The forward of a cached call that `takes` accepts, with its shapes analysed once. It is used as a `Recording`."""

    def __init__(self, spec: AttentionSpec, x: Operands, otherwise: Callable[[Flat], Flat]) -> None:
        """otherwise: computes the results from the same tensors if the operator cannot."""
        self.otherwise = otherwise
        is_causal = _causal(spec, x)
        self.is_causal, self.scale = bool(is_causal), x.softmax_scale
        self.mask = None if is_causal is not None else _mask(spec, x)  # `can_be_kept` refuses a bias
        formats = (spec.q_format, spec.kv_format, spec.kv_format)
        self.to_bhsd = [tuple(fmt.index(dim) for dim in "bhsd") for fmt in formats]
        self.from_bhsd = [tuple("bhsd".index(dim) for dim in fmt) for fmt in formats]

    def can_replay(self) -> bool:
        """Returns True."""
        return True

    def with_numbers(self, numbers: Sequence[float]) -> None:
        """Returns None: torch's operator gets the call's numbers as arguments, so each call needs its own."""

    def replay(self, tensors: Flat, addresses: Sequence[int]) -> Flat:
        """Returns out, lse and None for max_logit. tensors: q, k, v, then only None."""
        qkv = [t.permute(order) for t, order in zip(tensors, self.to_bhsd, strict=False)]
        bhsd, lse = _forward_op(*qkv, 0.0, self.is_causal, attn_mask=self.mask, scale=self.scale)
        if not math.isfinite(bhsd.sum().item()):
            return self.otherwise(tensors)
        return _contiguous(bhsd.permute(self.from_bhsd[0])), _contiguous(lse), None


class KeptBackward(KeptForward):
    """The backward of such a call."""

    def replay(self, tensors: Flat, addresses: Sequence[int]) -> Flat:
        """Returns the gradients of q, k and v, and None twice. tensors: the forward's, then out, lse, dout and None."""
        *_, out, lse, dout, _dlse = tensors
        if not lse.abs().amax().item() <= LARGEST_LSE:
            return self.otherwise(tensors)
        qkv = [t.permute(order) for t, order in zip(tensors, self.to_bhsd, strict=False)]
        out, dout = (_bhsd(t.permute(self.to_bhsd[0]), "bhsd") for t in (out, dout))
        gradients = _backward_op(dout, *qkv, out, lse, 0.0, self.is_causal, attn_mask=self.mask, scale=self.scale)
        if self.mask is not None and not _are_finite(gradients):
            return self.otherwise(tensors)
        return *(_contiguous(t.permute(order)) for t, order in zip(gradients, self.from_bhsd, strict=True)), None, None


def can_be_kept(spec: AttentionSpec, x: Operands) -> bool:
    """Returns whether `KeptForward` and `KeptBackward` support a call: if `takes` does, rows are dense, without a bias or out."""
    is_plain = x.bias is None and x.out is None and spec.results == Results() and not torch.is_autocast_enabled("cpu")
    return is_plain and all(t.stride(-1) == 1 for t in (x.q, x.k, x.v)) and takes(spec, x)


def _without_autocast() -> contextlib.AbstractContextManager[object]:
    """Returns a context without autocast. If autocast is off, the context does nothing, which saves the time of a small product."""
    return torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else contextlib.nullcontext()


def _contiguous(t: Tensor) -> Tensor:
    """Returns a contiguous tensor that is no view. Its dims of size 1 also have the strides of a new tensor."""
    copy = t.contiguous()
    copy = copy.view(-1).view(t.shape) if copy is t and 1 in t.shape else copy
    return copy.data  # autograd refuses writes to a view that a Function makes


def _bhsd(t: Tensor, fmt: str) -> Tensor:
    """Returns a tensor as bhsd with a last stride of 1. The operator assumes that stride, and reads the others."""
    t = t.detach() if t.requires_grad else t
    t = t if fmt == "bhsd" else as_bshd(t, fmt).transpose(1, 2)
    return t if t.stride(-1) == 1 else t.contiguous()


def _are_finite(tensors: Sequence[Tensor]) -> bool:
    """Returns whether all elements are finite. A hidden key that is not makes a product with a mask NaN."""
    return all(math.isfinite(t.sum().item()) for t in tensors)
