"""The operators that quantise, and attention on 16-bit tensors in FP8 with autograd around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flexattn import ops
from flexattn.dispatch import quantization, triton_backend
from flexattn.dispatch.quantization import Unquantized
from flexattn.dispatch.spec import Gradients, Operands, parse_format

_library: Any = torch.library.Library("flexattn", "FRAGMENT")  # type: ignore[no-untyped-call]
_LENGTHS = "Tensor? cu_seqlens{0}, Tensor? cu_seqlens{0}_padded, SymInt max_seqlen{0}"
_KIND = "str granularity, int block_rows, int margin, bool rotation"
_library.define(
    f"quantize(Tensor x, {_LENGTHS.format('')}, Tensor? scale, str fmt, str dtype, {_KIND})"
    " -> (Tensor data, Tensor descale, Tensor amax)"
)
_library.define(
    f"quantize_qkv(Tensor q, Tensor k, Tensor v, {_LENGTHS.format('_q')}, {_LENGTHS.format('_kv')},"
    f" Tensor? scale_q, Tensor? scale_k, Tensor? scale_v, str qkv_format, {_KIND})"
    " -> (Tensor q8, Tensor k8, Tensor v8, Tensor descale_q, Tensor descale_k, Tensor descale_v, Tensor amax)"
)
_library.define("unrotate(Tensor dq, Tensor dk) -> (Tensor, Tensor)")
_library.define("note_amax(Tensor(a!) history, Tensor amax) -> ()")
quantize = torch.ops.flexattn.quantize.default
_quantize_qkv_op = torch.ops.flexattn.quantize_qkv.default
_unrotate_op = torch.ops.flexattn.unrotate.default
note_amax = torch.ops.flexattn.note_amax.default


class State(Protocol):
    """What delayed scaling is to a call."""

    def scale(self, name: str) -> Tensor: ...

    def history(self, name: str) -> Tensor: ...


class Plan(NamedTuple):
    """The static half of quantising inside, in types that an operator's schema has."""

    granularity: str
    block_rows: int
    margin: int
    rotation: bool
    grad_dtype: str  # of dout


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
    fmt: str,
    dtype: str,
    *kind: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    of_x = Unquantized(x, fmt, cu_seqlens, cu_seqlens_padded, max_seqlen, scale, _Kind(*kind).rotation)
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
    qkv_format: str,
    *,
    rotation: bool,
) -> list[Unquantized]:
    q_format, kv_format = parse_format(qkv_format)
    of_kv = (kv_format, cu_seqlens_kv, cu_seqlens_kv_padded, max_seqlen_kv)
    return [
        Unquantized(q, q_format, cu_seqlens_q, cu_seqlens_q_padded, max_seqlen_q, scale_q, rotation),
        Unquantized(k, *of_kv, scale_k, rotation),
        Unquantized(v, *of_kv, scale_v),
    ]


def _quantize_qkv(*call: Any) -> tuple[Tensor, ...]:
    kind = _Kind(*call[-4:])
    data, descales, amax = _run(_of_qkv(*call[:-4], rotation=kind.rotation), torch.float8_e4m3fn, kind)
    return *data, *descales, amax


def _empty(t: Unquantized, dtype: torch.dtype, kind: _Kind) -> tuple[Tensor, Tensor]:
    sizes = quantization.amax_sizes(t.x, t.fmt, t.cu_seqlens, t.max_seqlen, kind.granularity, kind.block_rows)
    return t.x.new_empty(t.x.shape, dtype=dtype), t.x.new_empty(sizes, dtype=torch.float32)


def _quantize_fake(
    x: Tensor,
    cu_seqlens: Tensor | None,
    cu_seqlens_padded: Tensor | None,
    max_seqlen: int,
    scale: Tensor | None,
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
    descales = [descale for _, descale in found]
    return *(data for data, _ in found), *descales, call[0].new_empty(sum(t.numel() for t in descales), dtype=torch.float32)


def _unrotate(dq: Tensor, dk: Tensor) -> tuple[Tensor, Tensor]:
    if triton_backend.can_quantize(dq):
        return triton_backend.unrotate(dq, dk)
    matrix = quantization.rotation_matrix(dq.shape[-1], dq.device)
    return (dq.float() @ matrix.T).to(dq.dtype), (dk.float() @ matrix.T).to(dk.dtype)


def _unrotate_fake(dq: Tensor, dk: Tensor) -> tuple[Tensor, Tensor]:
    return dq.new_empty(dq.shape), dk.new_empty(dk.shape)


def _note_amax(history: Tensor, amax: Tensor) -> None:
    """The largest of a step, in the newest row of a history."""
    newest = history[0]
    torch.maximum(newest, amax.view(-1), out=newest)


KERNELS: dict[Any, Callable[..., Any]] = {ops._forward_op: ops._forward, ops._backward_op: ops._backward}  # of a call's operators
for _name, _call, _fake in (
    ("quantize", _quantize, _quantize_fake),
    ("quantize_qkv", _quantize_qkv, _quantize_qkv_fake),
    ("unrotate", _unrotate, _unrotate_fake),
    ("note_amax", _note_amax, lambda history, amax: None),
):
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _call, _key)
    torch.library.register_fake(f"flexattn::{_name}", _fake, lib=_library)
    KERNELS[getattr(torch.ops.flexattn, _name).default] = _call


def attention(x: Operands, settings: ops.Settings, plan: Plan, state: State | None) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, max_logit) of a checked call on 16-bit q, k and v; out and lse are differentiable."""
    ops.refuse_transforms(x)
    if settings.needs_grad:
        scales = _scales(state)
        x = ops.distinct(x)
        history = None if state is None else state.history("dout")
        call = (*x._replace(mod_tensors=(), block_mask=()), *settings, *plan, *scales, history, len(x.mod_tensors))
        *results, amax = _Attention.apply(*call, *x.mod_tensors, *x.block_mask)  # type: ignore[no-untyped-call]
        _note(state, amax)
        return tuple(results)
    return forward(x, settings, plan, state)[0]


def forward(x: Operands, settings: ops.Settings, plan: Plan, state: State | None) -> tuple[tuple[Tensor, Tensor, Tensor], Operands]:
    """(out, lse, max_logit) without autograd, and the call in FP8."""
    x8, amax = _quantized(x, settings, plan, _scales(state)[:3])
    results = ops._forward_op(*x8, *settings)
    _note(state, amax)
    return tuple(results), x8


def _scales(state: State | None) -> tuple[Tensor | None, ...]:
    return (None,) * 4 if state is None else tuple(state.scale(name) for name in ("q", "k", "v", "dout"))


def _note(state: State | None, amax: Tensor) -> None:
    """amax: of q, k and v, flat."""
    if state is not None:
        sizes = [state.scale(name).numel() for name in "qkv"]
        for name, of_one in zip("qkv", amax.split(sizes), strict=True):  # type: ignore[no-untyped-call]
            note_amax(state.history(name), of_one)


def planned(x: Operands, settings: ops.Settings, plan: Plan) -> Operands:
    """The call as its kernels would get it, for `explain` and `warmup`: q, k, v and descales with arbitrary values."""
    q_format, kv_format = parse_format(settings.qkv_format)
    of_q, of_kv = (x.q, q_format, x.cu_seqlens_q, x.max_seqlen_q), (x.k, kv_format, x.cu_seqlens_kv, x.max_seqlen_kv)
    sizes = (quantization.amax_sizes(*side, plan.granularity, plan.block_rows) for side in (of_q, of_kv, of_kv, of_q))
    q, k, v = (torch.empty_like(t, dtype=torch.float8_e4m3fn, requires_grad=False) for t in (x.q, x.k, x.v))
    return x._replace(q=q, k=k, v=v, descales=[x.q.new_ones(size, dtype=torch.float32) for size in sizes])


def _quantized(x: Operands, settings: ops.Settings, plan: Plan, scales: tuple[Tensor | None, ...]) -> tuple[Operands, Tensor]:
    """The call with q, k and v in FP8 and their descales; and the three amaxes, flat."""
    of_q = (x.cu_seqlens_q, x.cu_seqlens_q_padded, x.max_seqlen_q)
    of_kv = (x.cu_seqlens_kv, x.cu_seqlens_kv_padded, x.max_seqlen_kv)
    kind = (plan.granularity, plan.block_rows, plan.margin, plan.rotation)
    q, k, v, *descales, amax = _quantize_qkv_op(x.q, x.k, x.v, *of_q, *of_kv, *scales, settings.qkv_format, *kind)
    return x._replace(q=q, k=k, v=v, descales=descales), amax


def gradients(
    x: Operands,
    settings: ops.Settings,
    plan: Plan,
    scale: Tensor | None,
    history: Tensor | None,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
) -> Gradients:
    """Of a call whose forward gave out and lse.

    x: in FP8, or as it came with bf16_backward. scale, history: dout's, of delayed scaling.
    """
    if settings.bf16_backward:
        settings = settings._replace(fp8_out="", fp8_grad="", fp8_block_rows=0, bf16_backward=False)
        return ops.gradients(x, settings, out, lse, dout, dlse)
    lengths = (x.cu_seqlens_q, x.cu_seqlens_q_padded, x.max_seqlen_q)
    kind = (plan.granularity, plan.block_rows, plan.margin, False)
    dout, descale, amax = quantize(dout, *lengths, scale, parse_format(settings.qkv_format)[0], plan.grad_dtype, *kind)
    if history is not None:
        note_amax(history, amax)
    found = ops.gradients(x._replace(descales=[*x.descales, descale]), settings, out, lse, dout, dlse)
    if not plan.rotation:
        return found
    dq, dk = _unrotate_op(found.dq, found.dk)
    return found._replace(dq=dq, dk=dk)


_OPERANDS, _SETTINGS, _PLAN = (len(fields) for fields in (Operands._fields, ops.Settings._fields, Plan._fields))
_NUM_TENSORS = Operands._fields.index("max_seqlen_q")


def _unflat(call: tuple[Any, ...]) -> tuple[Operands, ops.Settings, Plan, tuple[Tensor | None, ...], Any]:
    ends = [_OPERANDS, _OPERANDS + _SETTINGS, _OPERANDS + _SETTINGS + _PLAN, _OPERANDS + _SETTINGS + _PLAN + 4]
    x, settings, plan = Operands(*call[: ends[0]]), ops.Settings(*call[ends[0] : ends[1]]), Plan(*call[ends[1] : ends[2]])
    scales, (history, num_mods), lists = call[ends[2] : ends[3]], call[ends[3] : ends[3] + 2], call[ends[3] + 2 :]
    return x._replace(mod_tensors=lists[:num_mods], block_mask=lists[num_mods:]), settings, plan, scales, history


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *call: Any) -> tuple[Tensor, ...]:
        x, settings, plan, scales, history = _unflat(call)
        x8, amax = _quantized(x, settings, plan, scales[:3])
        out, lse, max_logit = ops._forward_op(*x8, *settings)
        ctx.mark_non_differentiable(max_logit, amax)
        ctx.set_materialize_grads(False)
        kept = x if settings.bf16_backward else x8
        ctx.save_for_backward(out, lse, scales[3], *kept[:_NUM_TENSORS], *kept.mod_tensors, *kept.block_mask, *kept.descales)
        ctx.sizes = len(x.mod_tensors), len(x.block_mask)
        ctx.rest = x._replace(mod_tensors=(), block_mask=())[_NUM_TENSORS:], settings, plan
        ctx.history = history  # which is not saved, as it changes
        return out, lse, max_logit, amax

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: None) -> tuple[Any, ...]:
        out, lse, scale, *tensors = ctx.saved_tensors
        values, settings, plan = ctx.rest
        mods, blocks = ctx.sizes
        if dout is None:  # only lse was used
            dout = torch.zeros_like(out)
        lists = tensors[_NUM_TENSORS:]
        x = Operands(*tensors[:_NUM_TENSORS], *values)._replace(
            mod_tensors=lists[:mods], block_mask=lists[mods : mods + blocks], descales=lists[mods + blocks :]
        )
        found = gradients(x, settings, plan, scale, ctx.history, out, lse, dout, dlse)
        named = dict(zip(("q", "k", "v", "bias", "softmax_offset"), found[:-1], strict=True))
        flags, left = ops.captures_with_gradients(settings.mods), iter(found.dmod_tensors or ())
        of_mods = (next(left) if needs_grad else None for needs_grad in flags)
        of_fields = (named.get(name) for name in Operands._fields)
        others = _SETTINGS + _PLAN + 4 + 2
        return (*of_fields, *(None,) * others, *of_mods, *(None,) * blocks)
