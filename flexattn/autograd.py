"""Autograd around the operators, for calls that a mode, a trace or a tensor subclass sees. `cached_call` has that of cached calls.

In FP8, q, k and v are quantised before attention runs, and the quantised tensors are saved for the backward.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from flexattn import fp8_ops, ops
from flexattn.dispatch.spec import DIFFERENTIABLE, NUM_TENSORS, Gradients, Operands
from flexattn.first_order import second_order
from flexattn.fp8_ops import Delayed, QuantizeConfig
from flexattn.function_context import FunctionContext

_NUM_OPERANDS = len(Operands._fields)


def attention(
    x: Operands, settings: ops.Settings, config: QuantizeConfig | None, delayed: Delayed
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (out, lse, max_logit) of a checked call by the operators; out and lse are differentiable.

    config: how q, k and v are quantised first, or None.
    """
    if ops.is_differentiated((*ops.tensors_of(x), *x.descales)):
        from flexattn.second_order import attention as differentiated  # here, because few calls are under a transform

        return differentiated(x, settings)
    if settings.needs_grad:
        return Attention.apply(*_flat(_distinct(x), settings, config, delayed))  # type: ignore[no-any-return, no-untyped-call]
    return ops.attend(_quantized(x, settings, config, delayed), settings)


def gradients(
    x: Operands, settings: ops.Settings, config: QuantizeConfig | None, delayed: Delayed, incoming: ops.Incoming
) -> Gradients:
    """Returns the gradients of a call by the operators.

    x: for a backward in FP8, q, k and v are in FP8, and q and k are also in 16 bits if they were kept. delayed: dout's.
    """
    if config is None or settings.bf16_backward:
        return ops.gradients(x, ops.settings_of_backward(settings), incoming)

    def attend(x: Operands, dout: Tensor) -> Gradients:
        return ops.gradients(x, settings, incoming._replace(dout=dout))

    return fp8_ops.gradients(x, settings.qkv_format, config, delayed, incoming.dout, fp8_ops.OPERATORS, attend)


def _quantized(x: Operands, settings: ops.Settings, config: QuantizeConfig | None, delayed: Delayed) -> Operands:
    if config is None:
        return x
    return fp8_ops.quantize_inputs(x, settings.qkv_format, config, delayed, fp8_ops.OPERATORS)


def _distinct(x: Operands) -> Operands:
    """Replaces tensors by views under Dynamo, which refuses a Function that gets one twice, such as cu_seqlens."""
    if not torch.compiler.is_compiling():
        return x
    fields = (t.view_as(t) if isinstance(t, Tensor) else t for t in x)
    lists = {name: [t.view_as(t) for t in getattr(x, name)] for name in ("mod_tensors", "block_mask")}
    return Operands(*fields)._replace(**lists)  # type: ignore[arg-type]


def _flat(x: Operands, settings: ops.Settings, config: QuantizeConfig | None, delayed: Delayed) -> tuple[object, ...]:
    """Returns the call with each tensor of its lists as a separate argument, because autograd does not look into lists."""
    call = (*x._replace(mod_tensors=(), block_mask=()), *settings, len(x.mod_tensors), len(x.block_mask))
    quantisation = () if config is None else (*config, *delayed._replace(scale_out=None, history_out=None))
    return (*call, *x.mod_tensors, *x.block_mask, *quantisation)


def _unflat(call: tuple[Any, ...]) -> tuple[Operands, ops.Settings, QuantizeConfig | None, Delayed]:
    sizes = _NUM_OPERANDS + len(ops.Settings._fields)
    x, settings = Operands(*call[:_NUM_OPERANDS]), ops.Settings(*call[_NUM_OPERANDS:sizes])
    mods = sizes + 2 + call[sizes]
    blocks = mods + call[sizes + 1]
    x = x._replace(mod_tensors=call[sizes + 2 : mods], block_mask=call[mods:blocks])
    if len(call) == blocks:
        return x, settings, None, Delayed()
    end = blocks + len(QuantizeConfig._fields)
    return x, settings, QuantizeConfig(*call[blocks:end]), Delayed(*call[end:])


def _with_derivatives(
    ctx: FunctionContext, saved: Any, gradients: tuple[object, ...], dout: Tensor | None, dlse: Tensor | None, _: None
) -> list[Any] | None:
    """Returns the gradients of `Attention.backward` with derivatives, or None for a call in FP8."""
    from flexattn.second_order import differentiable  # here, because few backwards are differentiated

    _, settings, config = ctx.rest
    if config is not None or settings.fp8_out:
        return None
    x = Attention.operands(ctx, saved)
    lists = len(Operands._fields) + len(ops.Settings._fields) + 2
    places = [*(Operands._fields.index(name) for name in DIFFERENTIABLE), *range(lists, lists + len(x.mod_tensors))]
    incoming = ops.Incoming(saved[0], saved[1], torch.zeros_like(saved[0]) if dout is None else dout, dlse)
    found = list(gradients)
    for place, t in zip(places, differentiable(x, settings, [gradients[place] for place in places], incoming), strict=True):
        found[place] = t
    return found


class Attention(torch.autograd.Function):
    """Attention by the operators; its arguments are those of `_flat`."""

    @staticmethod
    def forward(ctx: FunctionContext, *call: object) -> tuple[Tensor, Tensor, Tensor]:
        x, settings, config, delayed = _unflat(call)
        quantized = _quantized(x, settings, config, delayed)
        out, lse, max_logit = ops._forward_op(*quantized, *settings)
        ctx.mark_non_differentiable(max_logit)
        ctx.set_materialize_grads(False)
        kept = x if settings.bf16_backward else quantized
        in_16_bits = (x.q, x.k) if config is not None and config.keeps_16_bit else ()
        lists = (x.mod_tensors, x.block_mask, kept.descales, in_16_bits)
        scale_dout = None if settings.bf16_backward else delayed.scale_dout
        ctx.save_for_backward(out, lse, scale_dout, *kept[:NUM_TENSORS], *itertools.chain(*lists))
        ctx.ends = list(itertools.accumulate(map(len, lists)))
        ctx.rest = x._replace(mod_tensors=(), block_mask=())[NUM_TENSORS:], settings, config
        ctx.history = delayed.history_dout  # it is not saved, because it changes
        ctx.num_arguments = len(call)
        return out, lse, max_logit

    @staticmethod
    def operands(ctx: FunctionContext, saved: Any) -> Operands:
        """Returns the operands of the backward from the saved tensors."""
        tensors, values = saved[3:], ctx.rest[0]
        lists, (a, b, c, d) = tensors[NUM_TENSORS:], ctx.ends
        return Operands(*tensors[:NUM_TENSORS], *values)._replace(
            mod_tensors=lists[:a], block_mask=lists[a:b], descales=lists[b:c], copies16=lists[c:d]
        )

    @staticmethod
    @second_order(_with_derivatives)
    def backward(ctx: FunctionContext, saved: Any, dout: Tensor | None, dlse: Tensor | None, _: None) -> tuple[Any, ...]:
        out, lse, scale_dout, *_ = saved
        _, settings, config = ctx.rest
        if dout is None:  # only lse was used
            dout = torch.zeros_like(out)
        x = Attention.operands(ctx, saved)
        delayed = Delayed(scale_dout=scale_dout, history_dout=ctx.history)
        found = gradients(x, settings, config, delayed, ops.Incoming(out, lse, dout, dlse))
        named = dict(zip(DIFFERENTIABLE, found[:-1], strict=True))
        flags, left = ops.captures_with_gradients(settings.mods), iter(found.dmod_tensors or ())
        dmods = [next(left) if needs_grad else None for needs_grad in flags]
        first = (*(named.get(name) for name in Operands._fields), *(None,) * (len(ops.Settings._fields) + 2), *dmods)
        return (*first, *(None,) * (ctx.num_arguments - len(first)))
