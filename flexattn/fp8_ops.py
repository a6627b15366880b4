"""The operators that quantise, and attention on 16-bit tensors in FP8 with autograd around it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from flexattn import ops
from flexattn.dispatch import quantization, triton_backend
from flexattn.dispatch.quantization import Unquantized
from flexattn.dispatch.spec import Gradients, Operands, parse_format
from flexattn.first_order import first_order

_library: Any = torch.library.Library("flexattn", "FRAGMENT")  # type: ignore[no-untyped-call]
_LENGTHS = "Tensor? cu_seqlens{0}, Tensor? cu_seqlens{0}_padded, SymInt max_seqlen{0}"
_KIND = "str granularity, int block_rows, int margin, bool rotation"
_library.define(
    f"quantize(Tensor x, {_LENGTHS.format('')}, Tensor? scale, Tensor(a!)? history, str fmt, str dtype, {_KIND})"
    " -> (Tensor data, Tensor descale, Tensor amax)"
)
_library.define(
    f"quantize_qkv(Tensor q, Tensor k, Tensor v, {_LENGTHS.format('_q')}, {_LENGTHS.format('_kv')},"
    f" Tensor? scale_q, Tensor? scale_k, Tensor? scale_v,"
    f" Tensor(a!)? history_q, Tensor(b!)? history_k, Tensor(c!)? history_v, str qkv_format, {_KIND})"
    " -> (Tensor q8, Tensor k8, Tensor v8, Tensor descale_q, Tensor descale_k, Tensor descale_v)"
)
_library.define("unrotate(Tensor dq, Tensor dk) -> (Tensor, Tensor)")
quantize = torch.ops.flexattn.quantize.default
_quantize_qkv_op = torch.ops.flexattn.quantize_qkv.default
_unrotate_op = torch.ops.flexattn.unrotate.default


class State(Protocol):
    """What delayed scaling is to a call."""

    def scale(self, name: str) -> Tensor: ...

    def history(self, name: str) -> Tensor: ...


class QuantizeConfig(NamedTuple):
    """The static half of quantising inside, in types that an operator's schema has."""

    granularity: str
    block_rows: int
    margin: int
    rotation: bool
    grad_dtype: str  # of dout
    keeps_16_bit: bool  # q and k, for the backward
    quantises_dout: bool  # before the backward, with scales like q's; else the backward does, by blocks of rows


class _Kind(NamedTuple):
    granularity: str
    block_rows: int
    margin: int
    rotation: bool


def _run(tensors: list[Unquantized], dtype: torch.dtype, kind: _Kind) -> tuple[list[Tensor], list[Tensor], Tensor]:
    run = triton_backend.quantize if triton_backend.can_quantize(tensors[0].x) else quantization.quantize
    return run(tensors, dtype, kind.granularity, kind.block_rows, kind.margin)


def _quantize(
    x: Tensor,
    cu_seqlens: Tensor | None,
    cu_seqlens_padded: Tensor | None,
    max_seqlen: int,
    scale: Tensor | None,
    history: Tensor | None,
    fmt: str,
    dtype: str,
    *kind: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    of_x = Unquantized(x, fmt, cu_seqlens, cu_seqlens_padded, max_seqlen, scale, _Kind(*kind).rotation, history)
    (data,), (descale,), amax = _run([of_x], quantization.dtype_of(dtype), _Kind(*kind))
    return data, descale, amax.view(descale.shape)


def _of_qkv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_q_padded: Tensor | None,
    max_seqlen_q: int,
    cu_seqlens_kv: Tensor | None,
    cu_seqlens_kv_padded: Tensor | None,
    max_seqlen_kv: int,
    scale_q: Tensor | None,
    scale_k: Tensor | None,
    scale_v: Tensor | None,
    history_q: Tensor | None,
    history_k: Tensor | None,
    history_v: Tensor | None,
    qkv_format: str,
    *,
    rotation: bool,
) -> list[Unquantized]:
    q_format, kv_format = parse_format(qkv_format)
    of_kv = (kv_format, cu_seqlens_kv, cu_seqlens_kv_padded, max_seqlen_kv)
    return [
        Unquantized(q, q_format, cu_seqlens_q, cu_seqlens_q_padded, max_seqlen_q, scale_q, rotation, history_q),
        Unquantized(k, *of_kv, scale_k, rotation, history_k),
        Unquantized(v, *of_kv, scale_v, False, history_v),
    ]


def _quantize_qkv(*call: Any) -> tuple[Tensor, ...]:
    kind = _Kind(*call[-4:])
    data, descales, _ = _run(_of_qkv(*call[:-4], rotation=kind.rotation), torch.float8_e4m3fn, kind)
    return *data, *descales


def _empty(t: Unquantized, dtype: torch.dtype, kind: _Kind) -> tuple[Tensor, Tensor]:
    sizes = quantization.amax_sizes(t.x, t.fmt, t.cu_seqlens, t.max_seqlen, kind.granularity, kind.block_rows)
    return t.x.new_empty(t.x.shape, dtype=dtype), t.x.new_empty(sizes, dtype=torch.float32)


def _quantize_fake(
    x: Tensor,
    cu_seqlens: Tensor | None,
    cu_seqlens_padded: Tensor | None,
    max_seqlen: int,
    scale: Tensor | None,
    history: Tensor | None,
    fmt: str,
    dtype: str,
    *kind: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    of_x = Unquantized(x, fmt, cu_seqlens, cu_seqlens_padded, max_seqlen, scale)
    data, descale = _empty(of_x, quantization.dtype_of(dtype), _Kind(*kind))
    return data, descale, torch.empty_like(descale)


def _quantize_qkv_fake(*call: Any) -> tuple[Tensor, ...]:
    kind = _Kind(*call[-4:])
    found = [_empty(t, torch.float8_e4m3fn, kind) for t in _of_qkv(*call[:-4], rotation=kind.rotation)]
    return *(data for data, _ in found), *(descale for _, descale in found)


def _unrotate(dq: Tensor, dk: Tensor) -> tuple[Tensor, Tensor]:
    if triton_backend.can_quantize(dq):
        return triton_backend.unrotate(dq, dk)
    matrix = quantization.rotation_matrix(dq.shape[-1], dq.device)
    return (dq.float() @ matrix.T).to(dq.dtype), (dk.float() @ matrix.T).to(dk.dtype)


def _unrotate_fake(dq: Tensor, dk: Tensor) -> tuple[Tensor, Tensor]:
    return dq.new_empty(dq.shape), dk.new_empty(dk.shape)


KERNELS: dict[Any, Callable[..., Any]] = {ops._forward_op: ops._forward, ops._backward_op: ops._backward}  # of a call's operators
for _name, _call, _fake in (
    ("quantize", _quantize, _quantize_fake),
    ("quantize_qkv", _quantize_qkv, _quantize_qkv_fake),
    ("unrotate", _unrotate, _unrotate_fake),
):
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _call, _key)
    torch.library.register_fake(f"flexattn::{_name}", _fake, lib=_library)
    KERNELS[getattr(torch.ops.flexattn, _name).default] = _call


def attention(x: Operands, settings: ops.Settings, plan: QuantizeConfig, state: State | None) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, max_logit) of a checked call on 16-bit q, k and v; out and lse are differentiable."""
    ops.refuse_transforms(x)
    if settings.needs_grad:
        x = ops.distinct(x)
        call = (*x._replace(mod_tensors=(), block_mask=()), *settings, *plan, *_delayed(state), len(x.mod_tensors))
        return _Attention.apply(*call, *x.mod_tensors, *x.block_mask)  # type: ignore[no-any-return, no-untyped-call]
    return forward(x, settings, plan, state)[0]


def forward(
    x: Operands, settings: ops.Settings, plan: QuantizeConfig, state: State | None
) -> tuple[tuple[Tensor, Tensor, Tensor], Operands]:
    """(out, lse, max_logit) without autograd, and the call in FP8."""
    x8 = _quantized(x, settings, plan, _delayed(state))
    return tuple(ops._forward_op(*x8, *settings)), x8


class _Delayed(NamedTuple):
    """Of delayed scaling: scales and histories."""

    scale_q: Tensor | None = None
    scale_k: Tensor | None = None
    scale_v: Tensor | None = None
    history_q: Tensor | None = None
    history_k: Tensor | None = None
    history_v: Tensor | None = None
    scale_dout: Tensor | None = None
    history_dout: Tensor | None = None


def _delayed(state: State | None) -> _Delayed:
    if state is None:
        return _Delayed()
    scale, history = state.scale, state.history
    of_qkv = (scale("q"), scale("k"), scale("v"), history("q"), history("k"), history("v"))
    return _Delayed(*of_qkv, scale("dout"), history("dout"))


def planned(x: Operands, settings: ops.Settings, plan: QuantizeConfig) -> Operands:
    """The call as its kernels would get it, for `explain` and `warmup`: q, k, v and descales with arbitrary values."""
    q_format, kv_format = parse_format(settings.qkv_format)
    of_q, of_kv = (x.q, q_format, x.cu_seqlens_q, x.max_seqlen_q), (x.k, kv_format, x.cu_seqlens_kv, x.max_seqlen_kv)
    sides = [of_q, of_kv, of_kv, of_q][: 4 if plan.quantises_dout else 3]
    sizes = (quantization.amax_sizes(*side, plan.granularity, plan.block_rows) for side in sides)
    q, k, v = (torch.empty_like(t, dtype=torch.float8_e4m3fn, requires_grad=False) for t in (x.q, x.k, x.v))
    return x._replace(q=q, k=k, v=v, descales=[x.q.new_ones(size, dtype=torch.float32) for size in sizes])


def _quantized(x: Operands, settings: ops.Settings, plan: QuantizeConfig, delayed: _Delayed) -> Operands:
    """The call with q, k and v in FP8 and their descales."""
    of_q = (x.cu_seqlens_q, x.cu_seqlens_q_padded, x.max_seqlen_q)
    of_kv = (x.cu_seqlens_kv, x.cu_seqlens_kv_padded, x.max_seqlen_kv)
    kind = (plan.granularity, plan.block_rows, plan.margin, plan.rotation)
    q, k, v, *descales = _quantize_qkv_op(x.q, x.k, x.v, *of_q, *of_kv, *delayed[:6], settings.qkv_format, *kind)
    return x._replace(q=q, k=k, v=v, descales=descales)


def gradients(
    x: Operands,
    settings: ops.Settings,
    plan: QuantizeConfig,
    scale: Tensor | None,
    history: Tensor | None,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
) -> Gradients:
    """Of a call whose forward gave out and lse.

    x: in FP8, with q and k too as they came where they were kept so; or all as it came, with bf16_backward. scale, history: dout's,
    of delayed scaling.
    """
    if settings.bf16_backward:
        settings = settings._replace(fp8_out="", fp8_grad="", fp8_block_rows=0, bf16_backward=False)
        return ops.gradients(x, settings, out, lse, dout, dlse)
    lengths = (x.cu_seqlens_q, x.cu_seqlens_q_padded, x.max_seqlen_q)
    kind = (plan.granularity, plan.block_rows, plan.margin, False)
    fmt, _ = parse_format(settings.qkv_format)
    if plan.quantises_dout:
        dout8, descale, _ = quantize(dout, *lengths, scale, history, fmt, plan.grad_dtype, *kind)
        x, dout = x._replace(descales=[*x.descales, descale], halves=[dout, *x.halves]), dout8
    found = ops.gradients(x, settings, out, lse, dout, dlse)
    if not plan.rotation:
        return found
    dq, dk = _unrotate_op(found.dq, found.dk)
    return found._replace(dq=dq, dk=dk)


_ENDS = tuple(itertools.accumulate(len(kind._fields) for kind in (Operands, ops.Settings, QuantizeConfig, _Delayed)))
_NUM_TENSORS = Operands._fields.index("max_seqlen_q")


def _unflat(call: tuple[Any, ...]) -> tuple[Operands, ops.Settings, QuantizeConfig, _Delayed]:
    a, b, c, d = _ENDS
    x, settings, plan, delayed = Operands(*call[:a]), ops.Settings(*call[a:b]), QuantizeConfig(*call[b:c]), _Delayed(*call[c:d])
    num_mods, lists = call[d], call[d + 1 :]
    return x._replace(mod_tensors=lists[:num_mods], block_mask=lists[num_mods:]), settings, plan, delayed


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *call: Any) -> tuple[Tensor, ...]:
        x, settings, plan, delayed = _unflat(call)
        x8 = _quantized(x, settings, plan, delayed)
        out, lse, max_logit = ops._forward_op(*x8, *settings)
        ctx.mark_non_differentiable(max_logit)
        ctx.set_materialize_grads(False)
        kept = x if settings.bf16_backward else x8
        lists = (x.mod_tensors, x.block_mask, kept.descales, (x.q, x.k) if plan.keeps_16_bit else ())
        scale_dout = None if settings.bf16_backward else delayed.scale_dout
        ctx.save_for_backward(out, lse, scale_dout, *kept[:_NUM_TENSORS], *itertools.chain(*lists))
        ctx.ends = list(itertools.accumulate(map(len, lists)))
        ctx.rest = x._replace(mod_tensors=(), block_mask=())[_NUM_TENSORS:], settings, plan
        ctx.history = delayed.history_dout  # which is not saved, as it changes
        return out, lse, max_logit

    @staticmethod
    @first_order
    def backward(ctx: Any, saved: Any, dout: Tensor | None, dlse: Tensor | None, *_: None) -> tuple[Any, ...]:
        out, lse, scale, *tensors = saved
        values, settings, plan = ctx.rest
        if dout is None:  # only lse was used
            dout = torch.zeros_like(out)
        lists, (a, b, c, d) = tensors[_NUM_TENSORS:], ctx.ends
        x = Operands(*tensors[:_NUM_TENSORS], *values)._replace(
            mod_tensors=lists[:a], block_mask=lists[a:b], descales=lists[b:c], halves=lists[c:d]
        )
        found = gradients(x, settings, plan, scale, ctx.history, out, lse, dout, dlse)
        named = dict(zip(("q", "k", "v", "bias", "softmax_offset"), found[:-1], strict=True))
        flags, left = ops.captures_with_gradients(settings.mods), iter(found.dmod_tensors or ())
        of_mods = (next(left) if needs_grad else None for needs_grad in flags)
        of_fields = (named.get(name) for name in Operands._fields)
        others = _ENDS[-1] + 1 - _ENDS[0]
        return (*of_fields, *(None,) * others, *of_mods, *(None,) * (b - a))
