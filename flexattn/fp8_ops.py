"""The operators that quantise, and the steps that they add to an FP8 call on 16-bit tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from flexattn import ops
from flexattn.dispatch import quantization, triton_backend
from flexattn.dispatch.quantization import Unquantized
from flexattn.dispatch.spec import Gradients, Operands, parse_format

_operators = torch.ops.flexattn
quantize = _operators.quantize.default


class State(Protocol):
    """Scales and histories of delayed scaling, by tensor name."""

    def scale(self, name: str) -> Tensor: ...

    def history(self, name: str) -> Tensor: ...


class QuantizeConfig(NamedTuple):
    """Static settings for quantising q, k, v and dout inside a call, in types of an operator's schema."""

    granularity: str
    block_rows: int
    margin: int
    rotation: bool
    grad_dtype: str  # dtype of dout
    keeps_16_bit: bool  # keep q and k in 16 bits for the backward
    quantises_dout: bool  # quantise dout before the backward, with scales like q's; else the backward does it by blocks of rows


class Delayed(NamedTuple):
    """Scales and histories of delayed scaling, in the order of `fp8.BUFFERS`; None for current scaling."""

    scale_q: Tensor | None = None
    scale_k: Tensor | None = None
    scale_v: Tensor | None = None
    scale_dout: Tensor | None = None
    scale_out: Tensor | None = None
    history_q: Tensor | None = None
    history_k: Tensor | None = None
    history_v: Tensor | None = None
    history_dout: Tensor | None = None
    history_out: Tensor | None = None


def delayed_of(state: State | None) -> Delayed:
    """Returns the tensors of a state, or a Delayed of None if there is no state."""
    if state is None:
        return Delayed()
    names = ("q", "k", "v", "dout", "out")
    return Delayed(*map(state.scale, names), *map(state.history, names))


class _Kind(NamedTuple):
    granularity: str
    block_rows: int
    margin: int
    rotation: bool


def _run(tensors: list[Unquantized], dtype: torch.dtype, kind: _Kind) -> tuple[list[Tensor], list[Tensor], Tensor]:
    run = triton_backend.quantize if triton_backend.can_quantize(tensors[0].x) else quantization.quantize
    return run(tensors, dtype, kind.granularity, kind.block_rows, kind.margin)


def _unquantized(x: Tensor, *call: Any) -> tuple[Unquantized, torch.dtype, _Kind]:
    """Takes the arguments of the operator `quantize`, in the order of its schema."""
    (ends, starts, longest, scale, history, fmt, dtype), kind = call[:7], _Kind(*call[7:])
    return Unquantized(x, fmt, ends, starts, longest, scale, kind.rotation, history), ops.dtype_of(dtype), kind


def quantize_implementation(*call: Any) -> tuple[Tensor, Tensor, Tensor]:
    unquantized, dtype, kind = _unquantized(*call)
    (data,), (descale,), amax = _run([unquantized], dtype, kind)
    return data, descale, amax.view(descale.shape)


def _unquantized_qkv(q: Tensor, k: Tensor, v: Tensor, *call: Any) -> tuple[list[Unquantized], _Kind]:
    """Takes the arguments of the operator `quantize_qkv`, in the order of its schema."""
    queries, keys, scales, histories, (qkv_format, *settings) = call[:3], call[3:6], call[6:9], call[9:12], call[12:]
    (q_format, kv_format), kind = parse_format(qkv_format), _Kind(*settings)
    formats, lengths, rotations = (q_format, kv_format, kv_format), (queries, keys, keys), (kind.rotation, kind.rotation, False)
    tensors = zip((q, k, v), formats, lengths, scales, rotations, histories, strict=True)
    return [
        Unquantized(x, fmt, ends, starts, longest, scale, rotates, history)
        for x, fmt, (ends, starts, longest), scale, rotates, history in tensors
    ], kind


def quantize_qkv_implementation(*call: Any) -> tuple[Tensor, ...]:
    tensors, kind = _unquantized_qkv(*call)
    data, descales, _ = _run(tensors, torch.float8_e4m3fn, kind)
    return *data, *descales


def _empty(t: Unquantized, dtype: torch.dtype, kind: _Kind) -> tuple[Tensor, Tensor]:
    sizes = quantization.amax_sizes(t.x, t.fmt, t.cu_seqlens, t.max_seqlen, kind.granularity, kind.block_rows)
    return t.x.new_empty(t.x.shape, dtype=dtype), t.x.new_empty(sizes, dtype=torch.float32)


def quantize_fake(*call: Any) -> tuple[Tensor, Tensor, Tensor]:
    data, descale = _empty(*_unquantized(*call))
    return data, descale, torch.empty_like(descale)


def quantize_qkv_fake(*call: Any) -> tuple[Tensor, ...]:
    tensors, kind = _unquantized_qkv(*call)
    results = [_empty(t, torch.float8_e4m3fn, kind) for t in tensors]
    return *(data for data, _ in results), *(descale for _, descale in results)


def unrotate_implementation(dq: Tensor, dk: Tensor) -> tuple[Tensor, Tensor]:
    if triton_backend.can_quantize(dq):
        return triton_backend.unrotate(dq, dk)
    matrix = quantization.rotation_matrix(dq.shape[-1], dq.device)
    return quantization.rotated(dq.float(), matrix.T).to(dq.dtype), quantization.rotated(dk.float(), matrix.T).to(dk.dtype)


def unrotate_fake(dq: Tensor, dk: Tensor) -> tuple[Tensor, Tensor]:
    return dq.new_empty(dq.shape), dk.new_empty(dk.shape)


class Passes(NamedTuple):
    """The passes over memory that FP8 adds to a call, as operators, which modes and traces record, or as plain functions."""

    quantize_qkv: Callable[..., tuple[Tensor, ...]]
    quantize: Callable[..., tuple[Tensor, Tensor, Tensor]]
    unrotate: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


OPERATORS = Passes(_operators.quantize_qkv.default, quantize, _operators.unrotate.default)
FUNCTIONS = Passes(quantize_qkv_implementation, quantize_implementation, unrotate_implementation)


def planned(x: Operands, settings: ops.Settings, config: QuantizeConfig) -> Operands:
    """Returns the operands that the kernels would get, for `explain` and `warmup`: q, k, v and descales have arbitrary values."""
    q_format, kv_format = parse_format(settings.qkv_format)
    q_side, kv_side = (x.q, q_format, x.cu_seqlens_q, x.max_seqlen_q), (x.k, kv_format, x.cu_seqlens_kv, x.max_seqlen_kv)
    sides = [q_side, kv_side, kv_side, q_side][: 4 if config.quantises_dout else 3]
    sizes = (quantization.amax_sizes(*side, config.granularity, config.block_rows) for side in sides)
    q, k, v = (torch.empty_like(t, dtype=torch.float8_e4m3fn, requires_grad=False) for t in (x.q, x.k, x.v))
    return x._replace(q=q, k=k, v=v, descales=[x.q.new_ones(size, dtype=torch.float32) for size in sizes])


def quantize_inputs(x: Operands, qkv_format: str, config: QuantizeConfig, delayed: Delayed, passes: Passes) -> Operands:
    """Returns the call with q, k and v in FP8 and their descales."""
    packings = (*x.packing("q"), *x.packing("kv"))
    scales = (delayed.scale_q, delayed.scale_k, delayed.scale_v)
    histories = (delayed.history_q, delayed.history_k, delayed.history_v)
    kind = (config.granularity, config.block_rows, config.margin, config.rotation)
    q, k, v, *descales = passes.quantize_qkv(x.q, x.k, x.v, *packings, *scales, *histories, qkv_format, *kind)
    return x._replace(q=q, k=k, v=v, descales=descales)


def gradients(
    x: Operands,
    qkv_format: str,
    config: QuantizeConfig,
    delayed: Delayed,
    dout: Tensor,
    passes: Passes,
    attend: Callable[[Operands, Tensor], Gradients],
) -> Gradients:
    """Returns the gradients of a call in FP8: quantises dout, runs `attend`, and rotates dq and dk back.

    x: operands in FP8, plus q and k in 16 bits if the forward kept them.
    """
    if config.quantises_dout:
        kind = (config.granularity, config.block_rows, config.margin, False)
        fmt, _ = parse_format(qkv_format)
        scale, history = delayed.scale_dout, delayed.history_dout
        dout8, descale, _ = passes.quantize(dout, *x.packing("q"), scale, history, fmt, config.grad_dtype, *kind)
        x, dout = x._replace(descales=[*x.descales, descale], copies16=[dout, *x.copies16]), dout8
    results = attend(x, dout)
    if not config.rotation:
        return results
    dq, dk = passes.unrotate(results.dq, results.dk)
    return results._replace(dq=dq, dk=dk)
