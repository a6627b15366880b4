"""Attention in FP8 with a scale per tensor: inputs, the reference on dequantised values, and the error of rounding to FP8."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.dispatch.spec import AttentionSpec, Band, Gradients, Operands, as_bshd, empty_outputs
from flexattn.kernels_cudnn.attention import Written
from flexattn.kernels_cudnn.fp8 import Descales, Incoming, fp8_backward, fp8_forward
from flexattn.kernels_cudnn.problem import Problem
from flexattn.testing import Inputs, make_call, make_dout, make_inputs, reference_attention, reference_gradients
from tests.support.fp8_sums import short_sums

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
WEIGHTS_SCALE = 256.0


class Case(NamedTuple):
    """A call in FP8 and the same call in fp64."""

    given: Inputs  # q, k and v in FP8, NaN in the padding
    descales: Descales
    dout: Tensor  # FP8
    descale_dout: Tensor
    spec: AttentionSpec  # spec of the same values in fp64
    x: Operands
    dout64: Tensor

    def reference(self) -> tuple[Tensor, Tensor]:
        return reference_attention(self.spec, self.x)[:2]

    def reference_gradients(self) -> Gradients:
        return reference_gradients(self.spec, self.x, self.dout64)

    def problem(self) -> Problem:
        band = self.spec.band
        return Problem(
            q=as_bshd(self.given.q, self.spec.q_format),
            k=as_bshd(self.given.k, self.spec.kv_format),
            v=as_bshd(self.given.v, self.spec.kv_format),
            softmax_scale=self.x.softmax_scale,
            window_left=band.left,
            window_right=band.right,
            bottom_right=band.bottom_right,
            cu_seqlens_q=self.x.cu_seqlens_q,
            cu_seqlens_kv=self.x.cu_seqlens_kv,
            cu_seqlens_q_padded=self.x.cu_seqlens_q_padded,
            cu_seqlens_kv_padded=self.x.cu_seqlens_kv_padded,
            max_seqlen_q=self.x.max_seqlen_q,
            max_seqlen_kv=self.x.max_seqlen_kv,
        )


def make_case(
    fmt: str = "bshd",
    dtype: torch.dtype = E4M3,
    dout_dtype: torch.dtype = E5M2,
    call: dict[str, Any] | None = None,
    fills: bool = True,
    **inputs: Any,
) -> Case:
    """`make_inputs` and `make_dout`, quantised with a scale from each tensor's largest magnitude, or without `fills` as they are.

    `call` is for `make_call`.
    """
    exact = make_inputs(fmt, **({"head_dim_qk": 128, "head_dim_v": 128, "dtype": torch.float64} | inputs))
    (q, dq), (k, dk), (v, dv) = (quantized(t, dtype, fills) for t in (exact.q, exact.k, exact.v))
    dout, descale_dout = quantized(make_dout(exact), dout_dtype, fills)
    values = exact._replace(q=q.double() * dq, k=k.double() * dk, v=v.double() * dv)
    spec, x = make_call(values, **{"return_max_logit": False, **(call or {})})
    given = exact._replace(q=q, k=k, v=v)
    return Case(given, Descales(dq, dk, dv), dout, descale_dout, spec, x, dout.double() * descale_dout)


def quantized(t: Tensor, dtype: torch.dtype, fills: bool = True) -> tuple[Tensor, Tensor]:
    """(t / descale in FP8, laid out as t; descale, fp32 [1]); NaN stays NaN."""
    largest = torch.finfo(dtype).max
    amax = t.nan_to_num().abs().amax().float() if t.numel() else torch.ones((), device=t.device)
    descale = torch.where((amax > 0) & fills, amax / largest, 1.0).reshape(1)
    rounded = (t.float() / descale).clamp(-largest, largest).to(dtype)
    return torch.empty_strided(t.shape, t.stride(), dtype=dtype, device=t.device).copy_(rounded), descale


def forward(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    q = case.given.q
    out = torch.empty((*q.shape[:-1], case.spec.head_dim_v), dtype=dtype, device=q.device)
    lse = empty_outputs(case.spec, case.x)[1].float()
    fp8_forward(case.problem(), case.descales, as_bshd(out, case.spec.q_format), lse)
    return out, lse


def backward(case: Case, out: Tensor, lse: Tensor, dtype: torch.dtype) -> list[Tensor]:
    given, spec = case.given, case.spec
    grads = [torch.empty(t.shape, dtype=dtype, device=t.device) for t in (given.q, given.k, given.v)]
    formats = (spec.q_format, spec.kv_format, spec.kv_format)
    fp8_backward(
        case.problem(),
        case.descales,
        Incoming(as_bshd(out, spec.q_format), lse, as_bshd(case.dout, spec.q_format), case.descale_dout),
        Written(*(as_bshd(t, f) for t, f in zip(grads, formats, strict=True))),
    )
    return grads


def takes_backward(case: Case) -> bool:
    return case.spec.head_dim_qk == 128 and "thd" not in (case.spec.q_format, case.spec.kv_format)


class Rounded(NamedTuple):
    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor

    @property
    def gradients(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.dq, self.dk, self.dv


def rounded_attention(case: Case, out_dtype: torch.dtype | None = None) -> Rounded:
    """Returns attention and gradients in fp64 by the textbook, with the roundings of FP8 kernels.

    Scores are summed like Hopper's FP8 instructions. Weights, the scores' gradient and all results are rounded to FP8, and the out
    from which gradients start to bfloat16. The error is the budget of a kernel with these roundings. `out_dtype` None: q's dtype.
    """
    dtype, dout_dtype = case.given.q.dtype, case.dout.dtype
    q, k, v, dout = (as_bshd(t, f).double() for t, f in _tensors(case))
    out, dq, dk, dv = (torch.zeros_like(t) for t in (dout, q, k, v))
    lse = torch.full_like(empty_outputs(case.spec, case.x)[1], -torch.inf)
    bound = v.nan_to_num().abs().max()
    parts = []
    for rows_q, rows_kv in _sequences(case):
        p, lse_of = _weights(case, q[rows_q], k[rows_kv])
        (lse.mT if lse.dim() == 2 else lse.transpose(1, 2))[rows_q] = lse_of.mT
        weights = round8(p, dtype, WEIGHTS_SCALE)
        out[rows_q] = _from_heads(round8(weights @ _heads(case, v[rows_kv]), out_dtype or dtype, None, bound))
        delta = (_to_heads(dout[rows_q]) * _to_heads(out[rows_q].bfloat16().double())).sum(-1, keepdim=True)
        ds = p * (_to_heads(dout[rows_q]) @ _heads(case, v[rows_kv]).transpose(-1, -2) - delta) * case.x.softmax_scale
        parts.append((rows_q, rows_kv, weights, ds))
    largest = max((ds.abs().max() for *_, ds in parts if ds.numel()), default=torch.ones(()))
    for rows_q, rows_kv, weights, ds in parts:
        ds = round8(ds, dout_dtype, None, largest)
        dq[rows_q] = _from_heads(ds @ _heads(case, k[rows_kv]))
        dk[rows_kv] = _from_heads(_grouped(case, ds.transpose(-1, -2) @ _to_heads(q[rows_q])))
        dv[rows_kv] = _from_heads(_grouped(case, weights.transpose(-1, -2) @ _to_heads(dout[rows_q])))
    dq, dk, dv = (round8(t, dout_dtype, None, t.abs().max()) for t in (dq, dk, dv))
    q_format, kv_format = case.spec.q_format, case.spec.kv_format
    formats = (q_format, q_format, kv_format, kv_format)
    out, dq, dk, dv = (as_bshd(t, f) for t, f in zip((out, dq, dk, dv), formats, strict=True))
    return Rounded(out, lse, dq, dk, dv)


def round8(t: Tensor, dtype: torch.dtype, scale: float | None, amax: Tensor | float = 1.0) -> Tensor:
    """Returns `t` rounded through an FP8 dtype with `scale`, or with the scale that maps `amax` to its largest number."""
    largest = torch.finfo(dtype).max
    by = scale if scale is not None else largest / torch.as_tensor(amax, device=t.device)
    return (t * by).clamp(-largest, largest).float().to(dtype).double() / by


def _tensors(case: Case) -> tuple[tuple[Tensor, str], ...]:
    q_format, kv_format = case.spec.q_format, case.spec.kv_format
    return ((case.x.q, q_format), (case.x.k, kv_format), (case.x.v, kv_format), (case.dout64, q_format))


def _sequences(case: Case) -> Iterator[tuple[Any, Any]]:
    """Indices of each sequence's tokens in [b, s, h, d] or [total, h, d]."""

    def rows(fmt: str, cu: Tensor | None, padded: Tensor | None, batch: int, whole: int) -> list[Any]:
        if cu is None:
            return [(b, slice(0, whole)) for b in range(batch)]
        lengths = cu.diff().tolist()
        if fmt != "thd":
            return [(b, slice(0, n)) for b, n in enumerate(lengths)]
        starts = (cu if padded is None else padded).tolist()
        return [slice(start, start + n) for start, n in zip(starts, lengths, strict=False)]

    x, spec = case.x, case.spec
    batch = x.q.shape[spec.q_format.index("b")] if "b" in spec.q_format else 0
    sides = (
        rows(spec.q_format, x.cu_seqlens_q, x.cu_seqlens_q_padded, batch, x.max_seqlen_q),
        rows(spec.kv_format, x.cu_seqlens_kv, x.cu_seqlens_kv_padded, batch, x.max_seqlen_kv),
    )
    yield from zip(*sides, strict=True)


def _weights(case: Case, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """[h, sq, skv], 0 in the rows that see nothing, and lse [h, sq]."""
    rows, keys = _to_heads(q), _heads(case, k)
    if rows.is_cuda:  # of the FP8 numbers themselves, as their exponents count
        codes = [(t / descale.double()).float().double() for t, descale in zip((rows, keys), case.descales, strict=False)]
        products = short_sums(*codes) * (case.descales.q * case.descales.k).double()
    else:  # emulated in fp32
        products = rows @ keys.transpose(-1, -2)
    s = products * case.x.softmax_scale
    s = s.masked_fill(~_visible(case.spec.band, *s.shape[1:], s.device), -torch.inf)
    return torch.softmax(s, -1).nan_to_num(0.0), s.logsumexp(-1)


def _visible(band: Band, sq: int, skv: int, device: torch.device) -> Tensor:
    distance = torch.arange(skv, device=device) - torch.arange(sq, device=device)[:, None] - (skv - sq if band.bottom_right else 0)
    left, right = (2**30 if side is None else side for side in (band.left, band.right))
    return (distance >= -left) & (distance <= right)


def _to_heads(t: Tensor) -> Tensor:
    return t.transpose(0, 1)


_from_heads = _to_heads


def _heads(case: Case, t: Tensor) -> Tensor:
    return _to_heads(t).repeat_interleave(case.spec.group_size, 0)


def _grouped(case: Case, t: Tensor) -> Tensor:
    return t.unflatten(0, (-1, case.spec.group_size)).sum(1)
