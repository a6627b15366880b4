"""Forward-mode and second derivatives of attention, as torch.autograd.Functions that torch.func's transforms take too.

Each Function has derivatives in terms of the others. `Attend` returns out and lse. Its tangent is `Tangent`, and its gradient is
`Backward`, whose derivatives are `DoubleBackward`. The gradient of `Tangent` is both: <dout, J t> has the gradient J^T dout for t,
and H t for the inputs (`dispatch.second_order`). `DoubleBackward` has a derivative only in the direction, in which it is linear.

A call whose tensors carry tangents of the innermost level is `AttendAlong`, a function of both: one kernel may compute out and its
tangent. `Attend` has no tangents of its level when it runs, but its arguments may have those of an outer one.

A plain call does not come here: its Function calls `differentiable`, only if its gradients are made with create_graph=True.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from flexattn import compat, ops
from flexattn.dispatch import second_order, triton_second_order
from flexattn.dispatch.select import OWN_DROPOUT
from flexattn.dispatch.spec import DIFFERENTIABLE, NUM_TENSORS, AttentionSpec, Operands
from flexattn.first_order import PART
from flexattn.function_context import FunctionContext

THIRD = (
    "flexattn's attention has derivatives up to the second, and a derivative of a second derivative was asked for; accepted: "
    "torch.func.jvp, gradients, gradients of both (backward of a tangent after dual_level(), not in it), and for third derivatives "
    "attention in plain torch ops: softmax(q @ k.mT * scale) @ v"
)
FORWARD_TWICE = (
    "flexattn's attention has no forward-mode derivative of a forward-mode derivative (torch.func.jvp of jvp, or jacfwd of "
    "jacfwd); accepted: one of the two in reverse mode, such as torch.func.jvp of torch.func.grad"
)

_DENSE = tuple(map(Operands._fields.index, DIFFERENTIABLE))

Tensors = Sequence[Tensor | None]


class Call:
    """A call without its tensors, and the places of the inputs that it is differentiated for.

    The tensors of a call are the operands' fields, then the captures of mods, then the tensors of a block mask.
    """

    def __init__(self, x: Operands, settings: ops.Settings, wanted: Sequence[bool], given: Tensors | None = None) -> None:
        """wanted: of `second_order.inputs`, those with gradients. given: the gradients, if they are known."""
        self.rest = x._replace(mod_tensors=(), block_mask=())[NUM_TENSORS:]
        self.settings, self.wanted, self.given = settings, tuple(wanted), given
        self.ends = NUM_TENSORS + len(x.mod_tensors), NUM_TENSORS + len(x.mod_tensors) + len(x.block_mask)
        every = (*_DENSE, *range(NUM_TENSORS, self.ends[0]))
        self.places = [place for place, is_wanted in zip(every, wanted, strict=True) if is_wanted]

    def operands(self, tensors: Tensors) -> Operands:
        mods, blocks = self.ends
        stored: Sequence[Any] = [_stored(t) for t in tensors[:blocks]]
        fields: tuple[Any, ...] = (*stored[:NUM_TENSORS], *self.rest)
        x = Operands._make(fields)
        return x._replace(mod_tensors=tuple(stored[NUM_TENSORS:mods]), block_mask=tuple(stored[mods:]))

    def spec_of(self, x: Operands) -> AttentionSpec:
        return ops.spec_to_run(x, self.settings)

    def runs_kernels(self, spec: AttentionSpec, x: Operands, wanted: Sequence[bool]) -> bool:
        """Returns whether Triton kernels compute a tangent, or the derivatives of the wanted tensors."""
        if triton_second_order.unsupported(spec, x, wanted[DIFFERENTIABLE.index("bias")]):
            return False
        return ops.backend_name(spec, "forward", self.settings.backend, x) == "triton"

    def mod_of(self, spec: AttentionSpec, along: Tensors, wanted: Sequence[bool]) -> second_order.SecondMod | None:
        """Returns the second derivatives of the call's score_mod, or None without one."""
        if spec.mods is None or spec.mods.score is None:
            return None
        from flexattn.mods.second import second  # here, because few calls have a score_mod

        return second(spec.mods.text, tuple(t is not None for t in along[len(_DENSE) :]), tuple(wanted[len(_DENSE) :]))

    def along(self, tangents: Tensors) -> list[Tensor | None]:
        """Returns the tangents of all inputs from the tangents of the wanted ones."""
        left = iter(tangents)
        return [_stored(next(left)) if is_wanted else None for is_wanted in self.wanted]

    def scattered(self, gradients: Tensors) -> list[Tensor | None]:
        """Returns the gradients of all tensors from the gradients of the wanted ones."""
        found: list[Tensor | None] = [None] * self.ends[1]
        for place, gradient in zip(self.places, gradients, strict=True):
            found[place] = gradient
        return found

    def gathered(self, tangents: Tensors) -> list[Tensor | None]:
        """Returns the tangents of the wanted tensors from the tangents of all."""
        return [tangents[place] for place in self.places]


def attention(x: Operands, settings: ops.Settings) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (out, lse, max_logit) of a checked call under a transform; out and lse may be differentiated in both modes."""
    refuse(x, settings)
    wanted = [t is not None and t.is_floating_point() for t in second_order.inputs(x)]
    settings = settings._replace(needs_grad=True, needs_bias_grad=x.bias is not None)
    call, tensors = Call(x, settings, wanted), ops.tensors_of(x)
    if compat.is_forward_mode_innermost():
        duals = [(t, None) if t is None or not t.is_floating_point() else compat.unpack_dual(t) for t in tensors]
        along = call.gathered([tangent for _, tangent in duals])
        # A graph of this level may be differentiated within it, and then its saved tensors need their tangents: `Attend` has them.
        is_recorded = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t, _ in duals)
        if not is_recorded and any(t is not None for t in along):
            found = AttendAlong.apply(call, *(primal for primal, _ in duals), *along)  # type: ignore[no-untyped-call]
            out, lse, max_logit, tout, tlse = found
            return compat.make_dual(out, tout), compat.make_dual(lse, tlse), max_logit
    return Attend.apply(call, *tensors)  # type: ignore[no-any-return, no-untyped-call]


def differentiable(x: Operands, settings: ops.Settings, gradients: Tensors, incoming: ops.Incoming) -> list[Tensor | None]:
    """Returns the gradients of a backward, with derivatives. gradients: of `second_order.inputs`; None if it is not wanted."""
    refuse(x, settings)
    wanted = [t is not None for t in gradients]
    given = [t for t in gradients if t is not None]
    call = Call(x, settings, wanted, given)
    found = iter(_gradients(call, *incoming, *ops.tensors_of(x)))
    return [next(found) if is_wanted else None for is_wanted in wanted]


def _stored(t: Tensor | None) -> Tensor | None:
    """Returns t with the numbers in its memory, which a kernel reads: a tensor with torch's negative bit has others."""
    return None if t is None else t.resolve_neg()


def _with_zeros(t: Tensor, dim: int) -> Tensor:
    return torch.cat((t, t.new_zeros((*t.shape[:dim], 1, *t.shape[dim + 1 :]))), dim)


def refuse(x: Operands, settings: ops.Settings) -> None:
    """Raises RuntimeError for a call that does not combine with these derivatives."""
    if settings.fp8_out or x.q.dtype != x.k.dtype:
        raise RuntimeError(
            "attention() in FP8 has no forward-mode and no second derivative; accepted: q, k and v in float16, bfloat16, float32 "
            "or float64, without an fp8_recipe"
        )
    if settings.is_part:
        raise RuntimeError(PART)


class _WithRule(torch.autograd.Function):
    """A Function that torch.vmap runs once for each entry of the mapped dim."""

    @classmethod
    def vmap(cls, info: Any, in_dims: Sequence[int | None], *arguments: Any) -> tuple[Any, Any]:
        def entry(i: int) -> Any:
            return cls.apply(*(a if dim is None else a.select(dim, i) for a, dim in zip(arguments, in_dims, strict=True)))  # type: ignore[no-untyped-call]

        size = info.batch_size
        if size == 0:  # an entry of zeros has the shapes of the results
            arguments = tuple(a if dim is None else _with_zeros(a, dim) for a, dim in zip(arguments, in_dims, strict=True))
        entries = [entry(i) for i in range(max(size, 1))]
        stacked = tuple(torch.stack(parts)[:size] for parts in zip(*entries, strict=True))
        return stacked, (0,) * len(stacked)


class Attend(_WithRule):
    """out, lse and max_logit of (call, *tensors)."""

    @staticmethod
    def forward(call: Call, *tensors: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        x = call.operands(tensors)
        if x.dropout_p:
            refuse_own_dropout(call.spec_of(x), call.settings, x)
        return ops.attend(x, call.settings)

    @staticmethod
    def setup_context(ctx: FunctionContext, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        ctx.call, *tensors = inputs
        out, lse, max_logit = output
        ctx.mark_non_differentiable(max_logit)
        _save(ctx, out, lse, *tensors)

    @staticmethod
    def backward(ctx: FunctionContext, dout: Tensor | None, dlse: Tensor | None, _: object) -> tuple[Tensor | None, ...]:
        call, (out, lse, *tensors) = ctx.call, ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        return None, *call.scattered(_gradients(call, out, lse, dout, dlse, *tensors))

    @staticmethod
    def jvp(ctx: FunctionContext, _: object, *tangents: Tensor | None) -> tuple[Tensor, Tensor, None]:
        call, (out, lse, *tensors) = ctx.call, ctx.saved_tensors
        tout, tlse = Tangent.apply(call, out.detach(), lse.detach(), *tensors, *call.gathered(tangents))  # type: ignore[no-untyped-call]
        return tout, tlse, None


class AttendAlong(_WithRule):
    """out, lse, max_logit and the tangents of out and lse, of (call, *tensors, *tangents of the wanted tensors)."""

    @staticmethod
    def forward(call: Call, *rest: Tensor | None) -> tuple[Tensor, ...]:
        tensors, along = rest[: call.ends[1]], call.along(rest[call.ends[1] :])
        x = call.operands(tensors)
        spec = call.spec_of(x)
        if call.runs_kernels(spec, x, [False] * len(along)) and not triton_second_order.joint_unsupported(spec, x):
            ops.check_operands(spec, x)
            results = triton_second_order.joint(spec, x, along)
            for observe in ops.observers:
                observe("forward", spec, call.settings.backend, x)
            return results
        results = Attend.forward(call, *tensors)
        return *results, *Tangent.forward(call, *results[:2], *rest)

    @staticmethod
    def setup_context(ctx: FunctionContext, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.call, *tensors = inputs
        out, lse, max_logit, _, _ = output
        ctx.mark_non_differentiable(max_logit)
        _save(ctx, out, lse, *tensors)

    @staticmethod
    def backward(
        ctx: FunctionContext, dout: Tensor | None, dlse: Tensor | None, _: object, dtout: Tensor | None, dtlse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        call, saved = ctx.call, ctx.saved_tensors  # once: checkpointing gives them only once
        out, lse, *rest = saved
        tensors = rest[: call.ends[1]]
        tensor_gradients: list[Tensor | None] = [None] * len(tensors)
        tangent_gradients: list[Tensor | None] = [None] * (len(rest) - len(tensors))
        if dout is not None or dlse is not None:
            dout = torch.zeros_like(out) if dout is None else dout
            tensor_gradients = call.scattered(_gradients(call, out, lse, dout, dlse, *tensors))
        if dtout is not None or dtlse is not None:
            second, tangent_gradients = Tangent.gradients(call, saved, dtout, dtlse)
            tensor_gradients = [
                b if a is None else a if b is None else a + b for a, b in zip(tensor_gradients, second, strict=True)
            ]
        return None, *tensor_gradients, *tangent_gradients

    @staticmethod
    def jvp(ctx: FunctionContext, *_: Tensor | None) -> NoReturn:
        raise RuntimeError(FORWARD_TWICE)

    @classmethod
    def vmap(cls, info: Any, in_dims: Sequence[int | None], *arguments: Any) -> tuple[Any, Any]:
        call, *rest = arguments
        dims = in_dims[1:]
        if any(dim is not None for dim in dims[: call.ends[1]]):
            return super().vmap(info, in_dims, *arguments)
        # once for all tangents, as of jacfwd
        results = Attend.apply(call, *rest[: call.ends[1]])  # type: ignore[no-untyped-call]
        found, _ = Tangent.vmap(info, (None, None, None, *dims), call, *results[:2], *rest)
        return (*results, *found), (None, None, None, 0, 0)


class Tangent(_WithRule):
    """The tangents of out and lse, of (call, out, lse, *tensors, *tangents of the wanted tensors)."""

    @staticmethod
    def forward(call: Call, out: Tensor, lse: Tensor, *rest: Tensor | None) -> tuple[Tensor, Tensor]:
        x = call.operands(rest)
        spec, along = call.spec_of(x), call.along(rest[call.ends[1] :])
        wanted = [False] * len(along)
        if call.runs_kernels(spec, x, wanted):
            return triton_second_order.tangent(spec, x, lse.resolve_neg(), along, call.mod_of(spec, along, wanted))
        return second_order.tangent(spec, x, along)

    @staticmethod
    def setup_context(ctx: FunctionContext, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.call, *tensors = inputs
        _save(ctx, *tensors)

    @staticmethod
    def backward(ctx: FunctionContext, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        tensor_gradients, tangent_gradients = Tangent.gradients(ctx.call, ctx.saved_tensors, dout, dlse)
        return None, None, None, *tensor_gradients, *tangent_gradients

    @staticmethod
    def gradients(
        call: Call, saved: Tensors, dout: Tensor | None, dlse: Tensor | None
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Returns the gradients of the tensors and of the tangents. saved: the inputs behind the call. dout, dlse: results'."""
        out, lse, *rest = saved
        assert out is not None
        assert lse is not None
        tensors, tangents = rest[: call.ends[1]], rest[call.ends[1] :]
        dout = torch.zeros_like(out) if dout is None else dout
        _, _, *hessian = _twice(call, (out, lse, dout, dlse, *tensors), tangents)
        transposed = _gradients(call, out, lse, dout, dlse, *tensors)
        given = [gradient if t is not None else None for gradient, t in zip(transposed, tangents, strict=True)]
        return call.scattered(hessian), given

    @staticmethod
    def jvp(ctx: FunctionContext, *_: Tensor | None) -> NoReturn:
        raise RuntimeError(FORWARD_TWICE)


class Backward(_WithRule):
    """The gradients of the wanted tensors, of (call, out, lse, dout, dlse, *tensors).

    Its derivatives are for dout, dlse and the tensors: out and lse are functions of the tensors.
    """

    @staticmethod
    def forward(call: Call, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, *tensors: Tensor | None) -> Any:
        if call.given is not None:
            given, call.given = call.given, None
            return tuple(t.detach() for t in given if t is not None)
        x = call.operands(tensors)
        flags = ops.captures_with_gradients(call.settings.mods) or (False,) * len(x.mod_tensors)
        if flags == call.wanted[len(_DENSE) :]:
            found = ops.gradients(x, call.settings, ops.Incoming(out, lse, dout, dlse))
            dense = (t for t in (*found[:-1], *(found.dmod_tensors or ())) if t is not None)
            return tuple(t.to(tensors[place].dtype) for t, place in zip(dense, call.places, strict=True))
        every = second_order.gradients(call.spec_of(x), x, dout, dlse, call.wanted)
        return tuple(t for t in every if t is not None)

    @staticmethod
    def setup_context(ctx: FunctionContext, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.call, *tensors = inputs
        _save(ctx, *tensors)

    @staticmethod
    def backward(ctx: FunctionContext, *along: Tensor | None) -> tuple[Tensor | None, ...]:
        ddout, ddlse, *hessian = _twice(ctx.call, ctx.saved_tensors, along)
        return None, None, None, ddout, None if ctx.saved_tensors[3] is None else ddlse, *ctx.call.scattered(hessian)

    @staticmethod
    def jvp(ctx: FunctionContext, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        call, (out, lse, dout, dlse, *tensors) = ctx.call, ctx.saved_tensors
        _, _, _, tdout, tdlse, *rest = tangents
        along = call.gathered(rest)
        _, _, *found = _twice(call, (out, lse, dout, dlse, *tensors), along)
        if tdout is None and tdlse is None:
            return tuple(found)
        tdout = torch.zeros_like(dout) if tdout is None else tdout
        linear = _gradients(call, out, lse, tdout, tdlse, *tensors)
        return tuple(a + b for a, b in zip(found, linear, strict=True))


class DoubleBackward(_WithRule):
    """Derivatives of <along, gradients> for dout, dlse and the wanted tensors, of (call, *inputs of `Backward`, *along).

    It has derivatives for `along` only, in which it is linear: <(dout2, t), result> has the gradient J^T dout2 + H t for along.
    """

    @staticmethod
    def forward(call: Call, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, *rest: Tensor | None) -> Any:
        x = call.operands(rest)
        spec = call.spec_of(x)
        if x.dropout_p:
            refuse_own_dropout(spec, call.settings, x)
        lse, dout = lse.resolve_neg(), dout.resolve_neg()
        dlse, along = _stored(dlse), call.along(rest[call.ends[1] :])
        if call.runs_kernels(spec, x, call.wanted):
            given, mod = triton_second_order.Given(lse, dout, dlse), call.mod_of(spec, along, call.wanted)
            found = triton_second_order.double_backward(spec, x, given, along, call.wanted, mod)
        else:
            found = second_order.double_backward(spec, x, dout, dlse, along, call.wanted)
        return found.ddout, found.ddlse, *(t for t in found.inputs if t is not None)

    @staticmethod
    def setup_context(ctx: FunctionContext, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.call, *tensors = inputs
        _save(ctx, *tensors)

    @staticmethod
    def backward(ctx: FunctionContext, dout2: Tensor | None, dlse2: Tensor | None, *tangents: Tensor | None) -> tuple[object, ...]:
        call, (out, lse, dout, dlse, *rest) = ctx.call, ctx.saved_tensors
        tensors = rest[: call.ends[1]]
        _, _, *found = _twice(call, (out, lse, dout, dlse, *tensors), tangents)
        dout2 = torch.zeros_like(out) if dout2 is None else dout2
        linear = _gradients(call, out, lse, dout2, dlse2, *tensors)
        sums = (a + b for a, b in zip(found, linear, strict=True))
        given = (t if along is not None else None for t, along in zip(sums, rest[call.ends[1] :], strict=True))
        # Zeros go to `_NoThird`, which raises if a derivative for its tensor is asked for.
        inputs = (None if t is None or not t.is_floating_point() else torch.zeros_like(t) for t in (dout, dlse, *tensors))
        return None, None, None, *inputs, *given

    @staticmethod
    def jvp(ctx: FunctionContext, *tangents: Tensor | None) -> Any:
        count = 5 + ctx.call.ends[1]
        return DoubleBackward.apply(ctx.call, *ctx.saved_tensors[: count - 1], *tangents[count:])  # type: ignore[no-untyped-call]


class _NoThird(_WithRule):
    """An input of `DoubleBackward`, for which that has no derivative."""

    @staticmethod
    def forward(t: Tensor) -> Tensor:
        return t.view_as(t)

    @staticmethod
    def setup_context(ctx: FunctionContext, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: FunctionContext, *_: Tensor | None) -> NoReturn:
        raise RuntimeError(THIRD)

    @staticmethod
    def jvp(ctx: FunctionContext, *_: Tensor | None) -> NoReturn:
        raise RuntimeError(THIRD)

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], t: Tensor) -> tuple[Tensor, int | None]:
        return _NoThird.apply(t), in_dims[0]  # type: ignore[no-untyped-call]


def _gradients(call: Call, out: Tensor, lse: Tensor, *rest: Tensor | None) -> Any:
    """Returns the results of `Backward`.

    Autograd would run the backward of out's and lse's node too, on zeros, if they were attached to it.
    """
    return Backward.apply(call, out.detach(), lse.detach(), *rest)  # type: ignore[no-untyped-call]


def _twice(call: Call, inputs: Tensors, along: Tensors) -> Any:
    """Returns the results of `DoubleBackward`. inputs: of `Backward`."""
    out, lse, *rest = inputs
    assert out is not None
    assert lse is not None
    kept = (t if t is None or not t.is_floating_point() else _NoThird.apply(t) for t in rest)  # type: ignore[no-untyped-call]
    return DoubleBackward.apply(call, out.detach(), lse.detach(), *kept, *along)  # type: ignore[no-untyped-call]


def _save(ctx: FunctionContext, *tensors: Tensor | None) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)


def refuse_own_dropout(spec: AttentionSpec, settings: ops.Settings, x: Operands) -> None:
    """Raises RuntimeError if the forward drops weights that only its own backend knows."""
    name = ops.backend_name(spec, "forward", settings.backend, x)
    if name in OWN_DROPOUT:
        raise RuntimeError(
            f"attention() with dropout has no forward-mode and no second derivative on {name}, which drops other weights than the "
            "other backends; accepted: backend='triton', or dropout_p 0"
        )


def _run_as_they_are() -> None:
    """Keeps torch.compile, which has no double backward, from tracing these functions, by a graph break."""
    rules = (_WithRule.vmap.__func__, AttendAlong.vmap.__func__, _NoThird.vmap)  # type: ignore[attr-defined]
    for function in (attention, differentiable, *rules):
        compat.runs_as_it_is(function)
    for cls in (Attend, AttendAlong, Tangent, Backward, DoubleBackward, _NoThird):
        for method in (cls.forward, cls.setup_context, cls.backward, cls.jvp):
            compat.runs_as_it_is(method)


_run_as_they_are()
