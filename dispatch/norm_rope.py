"""RMSNorm of each head and rotary positions: the formula in torch operations, and the kernels of the same result."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from flexattn.dispatch import triton_backend
from flexattn.dispatch.spec import capability_of

if TYPE_CHECKING:
    from flexattn.kernels_triton.portable.norm_rope import Call

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_WIDEST = 512
_MOST_ROWS = 2**30  # the kernels number rows in 32 bits, and a little beyond the last


class NormRope(NamedTuple):
    """A call, in the order of the operators' schemas."""

    q: Tensor  # [b, s, h, d]
    k: Tensor  # [b, s, h_kv, d]
    cos: Tensor | None  # [b, s, rotated] or [1, s, rotated]; None: no rotation
    sin: Tensor | None
    q_weight: Tensor | None  # [d]; None: no norm
    k_weight: Tensor | None
    eps: float
    interleaved: bool
    zero_centered: bool

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.q, self.k, self.cos, self.sin, self.q_weight, self.k_weight


def kernel_error(x: NormRope) -> str | None:
    """Returns why no kernel runs a call, or None."""
    if any(t is not None and t.dtype not in _DTYPES for t in x.tensors):
        return "the kernels support fp16, bf16 and fp32"
    if x.q.shape[-1] > _WIDEST or x.q.shape[-1] < 2:
        return f"the kernels support head dims of 2 to {_WIDEST}"
    if max(t.shape[0] * t.shape[1] * t.shape[2] for t in (x.q, x.k)) > _MOST_ROWS:
        return "the kernels support up to 2**30 heads of tokens"
    return _device_error(x.q.device)


def _device_error(device: torch.device) -> str | None:
    return triton_backend.device_error(device.type, capability_of(device))


# The flag that torch.compiler.assume_constant_result sets; calling that would import Dynamo.
_device_error._dynamo_marked_constant = True  # type: ignore[attr-defined]


def forward(x: NormRope) -> tuple[Tensor, Tensor]:
    """Returns q and k by the kernel."""
    from flexattn.kernels_triton.portable.norm_rope import norm_rope

    return norm_rope(_call(x))


def backward(x: NormRope, dq_out: Tensor, dk_out: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Returns the gradients of q, k and the weights by the kernel."""
    from flexattn.kernels_triton.portable.norm_rope import norm_rope_backward

    return norm_rope_backward(_call(x), (_with_contiguous_rows(dq_out), _with_contiguous_rows(dk_out)))


def _call(x: NormRope) -> Call:
    from flexattn.kernels_triton.portable.norm_rope import Call, Settings

    q, k = _with_contiguous_rows(x.q), _with_contiguous_rows(x.k)
    cos, sin = (None if t is None else _with_contiguous_rows(t) for t in (x.cos, x.sin))
    q_weight, k_weight = (None if t is None else t.resolve_neg().contiguous() for t in (x.q_weight, x.k_weight))
    return Call(q, k, cos, sin, q_weight, k_weight, Settings(x.eps, x.interleaved, x.zero_centered))


def _with_contiguous_rows(x: Tensor) -> Tensor:
    x = x.resolve_neg()
    return x if x.stride(-1) == 1 else x.contiguous()


def reference(x: NormRope) -> tuple[Tensor, Tensor]:
    """Returns q and k by torch operations, in float32 or float64, rounded once. Differentiable any number of times."""
    return _reference(x.q, x.q_weight, x), _reference(x.k, x.k_weight, x)


def _reference(t: Tensor, weight: Tensor | None, x: NormRope) -> Tensor:
    wide = t.to(torch.promote_types(t.dtype, torch.float32))
    if weight is not None:
        weight = weight.to(wide.dtype) + (1.0 if x.zero_centered else 0.0)
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + x.eps) * weight
    if x.cos is None or x.sin is None:
        return wide.to(t.dtype).contiguous()
    rotated = x.cos.shape[-1]
    columns = slice(None, None, 2) if x.interleaved else slice(rotated // 2)
    cos, sin = (table[:, :, None, columns].to(wide.dtype) for table in (x.cos, x.sin))
    pairs, rest = wide[..., :rotated], wide[..., rotated:]
    if x.interleaved:
        a, b = pairs.view(*pairs.shape[:-1], rotated // 2, 2).unbind(-1)
        pairs = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    else:
        a, b = pairs.chunk(2, -1)
        pairs = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    return torch.cat((pairs, rest), -1).to(t.dtype).contiguous()
