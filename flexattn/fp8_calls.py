"""Calls in FP8 like an earlier one: quantising, attention and what is noted are taken down together, and played."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flexattn import call_cache, fp8, fp8_ops, ops, validation
from flexattn.call_cache import CachedCall, CallKey
from flexattn.dispatch import triton_backend
from flexattn.dispatch.select import Backend
from flexattn.dispatch.spec import AttentionSpec, Gradients, Operands
from flexattn.dispatch.tape import Tape, record

_HALVES = 2  # q and k, the first two of a call's tensors
_DESCALES = 3  # of q, k and v, which come first among what a call in FP8 has more than others; then a state's scales and histories


def state_tensors(state: fp8.DelayedScaling | None) -> tuple[Tensor, ...] | None:
    """What a call reads and writes of a state; None where that may not be all."""
    if state is None:
        return ()
    if type(state) is not fp8.DelayedScaling or not all(name in state._buffers for name in fp8.BUFFERS):
        return None
    return tuple(state._buffers[name] for name in fp8.BUFFERS)  # type: ignore[misc]  # none is None


class _State:
    """A state's tensors, as they came with a call."""

    def __init__(self, tensors: Sequence[Any]) -> None:
        self.scales = dict(zip(fp8.TENSORS, tensors, strict=False))
        self.histories = dict(zip(fp8.TENSORS, tensors[len(fp8.TENSORS) :], strict=True))

    def scale(self, name: str) -> Tensor:
        found: Tensor = self.scales[name]
        return found

    def history(self, name: str) -> Tensor:
        found: Tensor = self.histories[name]
        return found


class Fp8Call(CachedCall):
    """Its tensors end with the descales of q, k and v and with a state's; those for a backward with descales, q and k as they came,
    and dout's scale and history.

    What its forward gives begins with out (in FP8: its data), lse and max_logit. Then come an FP8 out's descale and amax, or what a
    backward needs of q, k and v in FP8.
    """

    def __init__(
        self,
        x: Operands,
        settings: ops.Settings,
        names: Sequence[str],
        sources: Sequence[int | Tensor | None],
        plan: fp8_ops.QuantizeConfig | None,
        recipe: fp8.Recipe | None,
    ) -> None:
        super().__init__(x if plan is None else fp8_ops.planned(x, settings, plan), settings, names, sources)
        self.template = self.template._replace(descales=())
        self.plan, self.recipe = plan, recipe
        self.has_fp8_out = recipe is not None and recipe.out_dtype in validation.FP8_DTYPES
        self.has_fp8_backward = settings.needs_grad and not settings.bf16_backward
        self.has_state = recipe is not None and recipe.scaling == "delayed"
        if (plan is not None or self.has_fp8_out) and triton_backend.quantises_untaped(self.device):
            self.is_tapeable = False
        keeps_16_bit = self.has_fp8_backward and plan is not None and plan.keeps_16_bit
        more = [self.has_fp8_backward] * _DESCALES + [keeps_16_bit] * _HALVES + [self.has_fp8_backward and self.has_state]
        self.given += [self.num_inputs + i for i, is_there in enumerate(more) if is_there]
        self.num_saved = self.num_inputs + len(more)

    def run(self, key: CallKey, returns_lse: bool) -> Any:
        tensors, addresses = key.tensors, key.addresses
        if not self.is_as_given:
            tensors, addresses = self._inputs(key)
        if self.spec.needs_grad:
            return _record((self, tensors, addresses, returns_lse), *self.leaves(tensors))
        out, lse, max_logit, *more = self.forward(tensors, addresses)
        if self.recipe is not None and self.has_fp8_out:
            descale, amax = more
            out = fp8.QuantizedTensor(out, descale, amax, block_rows=self.recipe.rows)
        return out, lse, max_logit

    def compute(self, tensors: Sequence[Tensor | None]) -> Sequence[Any]:
        """By the operators; of a tape their kernels."""
        x, more = self.operands(tensors), tensors[self.num_inputs :]
        state = _State(more[_DESCALES:]) if self.has_state else None
        kept: tuple[Tensor, ...] = ()
        if self.plan is None:
            descales = [validation.as_scales(t, self.device) for t in more[:_DESCALES]]
            out, lse, max_logit = ops._forward_op(*x._replace(descales=descales), *self.settings)
        else:
            (out, lse, max_logit), x8 = fp8_ops.forward(x, self.settings, self.plan, state)
            if self.has_fp8_backward:
                kept = (x8.q, x8.k, x8.v, *x8.descales)
        if self.has_fp8_out:
            assert self.recipe is not None
            found = fp8.quantize_out(out, x, self.settings, self.recipe, state)
            out, kept = found.data, (found.descale, found.amax)
        return out, lse, max_logit if self.spec.return_max_logit else None, *kept

    def take_down(self, tensors: Sequence[Tensor | None]) -> tuple[Sequence[Any], Tape | None]:
        backend = ops.backend_of(self.spec, "forward", self.backend, self.operands(tensors))
        return record(
            backend, lambda: self.compute(tensors), tensors, tuple, self.device, also=_quantiser(backend), inlined=fp8_ops.KERNELS
        )

    def compute_backward(self, inputs: Sequence[Any], spec: AttentionSpec) -> Gradients:
        return self.operator_backward(inputs)

    def take_down_backward(self, inputs: Sequence[Any], spec: AttentionSpec) -> tuple[Gradients, Tape | None]:
        backend = ops.backend_of(spec, "backward", self.backend, self.operands(inputs))
        how: Any = {"also": _quantiser(backend), "inlined": fp8_ops.KERNELS}
        return record(backend, lambda: self.operator_backward(inputs), inputs, call_cache.flat_gradients, self.device, **how)

    def operator_backward(self, inputs: Sequence[Any]) -> Gradients:
        *more, scale, history = inputs[self.num_inputs : -4]
        x = self.operands(inputs)
        if self.has_fp8_backward:
            x = x._replace(descales=more[:_DESCALES], halves=[t for t in more[_DESCALES:] if t is not None])
        assert self.plan is not None
        return fp8_ops.gradients(x, self.settings, self.plan, scale, history, *inputs[-4:])


def _quantiser(backend: Backend) -> Backend | None:
    """The backend that quantises beside another one; None where that is the same, or where torch's ops do it."""
    triton: Any = triton_backend
    return triton if backend is not triton and triton_backend.can_be_taped() else None


class _Attention(torch.autograd.Function):
    """Same as `call_cache._Attention`, for FP8."""

    @staticmethod
    def forward(ctx: Any, made: tuple[Fp8Call, Sequence[Any], list[int], bool], *leaves: Tensor) -> tuple[Any, ...]:
        call, tensors, addresses, returns_lse = made
        out, lse, max_logit, *kept = call.forward(tensors, addresses)
        state = tensors[call.num_inputs + _DESCALES :]
        inputs = [*tensors[: call.num_inputs], *(None,) * (_DESCALES + _HALVES + 1)]
        if kept:
            scale = state[fp8.TENSORS.index("dout")] if state else None
            inputs[:3], inputs[call.num_inputs :] = kept[:3], (*kept[3:], *tensors[:_HALVES], scale)
        ctx.call = call
        ctx.history = state[len(fp8.TENSORS) + fp8.TENSORS.index("dout")] if state else None
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(out, lse, *[inputs[i] for i in call.given])
        if max_logit is not None:
            ctx.mark_non_differentiable(max_logit)
        return out, lse if returns_lse else None, max_logit

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        return call_cache.run_backward(ctx, dout, dlse, ctx.history)


_record: Any = super(torch.autograd.Function, _Attention).apply  # as in `call_cache`
