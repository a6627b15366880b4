"""The operators that quantise, and attention on 16-bit tensors in FP8 with autograd around it."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flexattn import ops
from flexattn.dispatch import quantization, triton_backend
from flexattn.dispatch.program import parse_program
from flexattn.dispatch.quantization import Unquantized
from flexattn.dispatch.spec import Operands, parse_format

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
quantize = torch.ops.flexattn.quantize.default
_quantize_qkv_op = torch.ops.flexattn.quantize_qkv.default
_unrotate_op = torch.ops.flexattn.unrotate.default


class State(Protocol):
    """What delayed scaling is to a call."""

    def scale(self, name: str) -> Tensor: ...

    def note(self, name: str, amax: Tensor) -> None: ...


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


for _name, _call, _fake in (
    ("quantize", _quantize, _quantize_fake),
    ("quantize_qkv", _quantize_qkv, _quantize_qkv_fake),
    ("unrotate", _unrotate, _unrotate_fake),
):
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _call, _key)
    torch.library.register_fake(f"flexattn::{_name}", _fake, lib=_library)


def attention(x: Operands, settings: ops.Settings, plan: Plan, state: State | None) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, max_logit) of a checked call on 16-bit q, k and v; out and lse are differentiable."""
    ops.refuse_transforms(x)
    scales = (None,) * 4 if state is None else tuple(state.scale(name) for name in ("q", "k", "v", "dout"))
    if settings.needs_grad:
        note = None if state is None else state.note
        call = (*x._replace(mod_tensors=(), block_mask=()), *settings, *plan, *scales, note, len(x.mod_tensors))
        *results, amax = _Attention.apply(*call, *x.mod_tensors, *x.block_mask)  # type: ignore[no-untyped-call]
    else:
        x8, amax = _quantized(x, settings, plan, scales[:3])
        results = ops._forward_op(*x8, *settings)
    if state is not None:
        names = ("q", "k", "v")
        for name, of_one in zip(names, amax.split([state.scale(name).numel() for name in names]), strict=True):
            state.note(name, of_one)
    return tuple(results)


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


_OPERANDS, _SETTINGS, _PLAN = (len(fields) for fields in (Operands._fields, ops.Settings._fields, Plan._fields))
_NUM_TENSORS = Operands._fields.index("max_seqlen_q")


def _unflat(call: tuple[Any, ...]) -> tuple[Operands, ops.Settings, Plan, tuple[Tensor | None, ...], Any]:
    ends = [_OPERANDS, _OPERANDS + _SETTINGS, _OPERANDS + _SETTINGS + _PLAN, _OPERANDS + _SETTINGS + _PLAN + 4]
    x, settings, plan = Operands(*call[: ends[0]]), ops.Settings(*call[ends[0] : ends[1]]), Plan(*call[ends[1] : ends[2]])
    scales, (note, num_mods), lists = call[ends[2] : ends[3]], call[ends[3] : ends[3] + 2], call[ends[3] + 2 :]
    return x._replace(mod_tensors=lists[:num_mods], block_mask=lists[num_mods:]), settings, plan, scales, note


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *call: Any) -> tuple[Tensor, ...]:
        x, settings, plan, scales, note = _unflat(call)
        x8, amax = _quantized(x, settings, plan, scales[:3])
        out, lse, max_logit = ops._forward_op(*x8, *settings)
        ctx.mark_non_differentiable(max_logit, amax)
        ctx.set_materialize_grads(False)
        kept = x if settings.bf16_backward else x8
        ctx.save_for_backward(out, lse, scales[3], *kept[:_NUM_TENSORS], *kept.mod_tensors, *kept.block_mask, *kept.descales)
        ctx.sizes = len(x.mod_tensors), len(x.block_mask)
        ctx.rest = x._replace(mod_tensors=(), block_mask=())[_NUM_TENSORS:], settings, plan, note
        return out, lse, max_logit, amax

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: None) -> tuple[Any, ...]:
        out, lse, scale, *tensors = ctx.saved_tensors
        values, settings, plan, note = ctx.rest
        mods, blocks = ctx.sizes
        if dout is None:  # only lse was used
            dout = torch.zeros_like(out)
        lists = tensors[_NUM_TENSORS:]
        x = Operands(*tensors[:_NUM_TENSORS], *values)._replace(
            mod_tensors=lists[:mods], block_mask=lists[mods : mods + blocks], descales=lists[mods + blocks :]
        )
        if settings.bf16_backward:
            settings = settings._replace(fp8_out="", fp8_grad="", fp8_block_rows=0, bf16_backward=False)
        else:
            lengths = (x.cu_seqlens_q, x.cu_seqlens_q_padded, x.max_seqlen_q)
            fmt = parse_format(settings.qkv_format)[0]
            kind = (plan.granularity, plan.block_rows, plan.margin, False)
            dout, descale, amax = quantize(dout, *lengths, scale, fmt, plan.grad_dtype, *kind)
            if note is not None:
                note("dout", amax)
            x = x._replace(descales=[*x.descales, descale])
        dq, dk, dv, dbias, doffset, dmod_tensors = ops._backward_op(dout, dlse, out, lse, *x, *settings)
        if plan.rotation and settings.fp8_out:
            dq, dk = _unrotate_op(dq, dk)
        gradients = {
            "q": dq,
            "k": dk,
            "v": dv,
            "bias": dbias if settings.needs_bias_grad else None,
            "softmax_offset": None if x.softmax_offset is None else doffset,
        }
        program, left = parse_program(settings.mods) if settings.mods else None, iter(dmod_tensors)
        of_mods = (next(left) if needs_grad else None for needs_grad in (program.tensor_needs_grad if program else ()))
        of_fields = (gradients.get(name) for name in Operands._fields)
        others = _SETTINGS + _PLAN + 4 + 2
        return (*of_fields, *(None,) * others, *of_mods, *(None,) * blocks)
