"""Attention over ranks under torch.compile: one operator for each direction. A tensor with a number identifies the plan.

Plans with the same number of tokens share a graph, because the plan's token is an input. The tensors that a forward saves depend on
the plan, so an operator cannot return them. The backward makes them again: it repeats the all-to-all of "ulysses", and it quantises
q, k and v again.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn import compat, fp8, validation
from flexattn.dispatch.mod_program import parse_program
from flexattn.dispatch.spec import Window, as_bshd, from_bshd, window_of
from flexattn.distributed import exchange
from flexattn.distributed.calls import Results, sum_dtype
from flexattn.distributed.plans import Plan, plan_of
from flexattn.distributed.whole_call import (
    CheckedCall,
    check_arguments,
    checked_call,
    resume_forward,
    run_backward,
    run_forward,
)
from flexattn.first_order import first_order
from flexattn.function_context import FunctionContext
from flexattn.functional import chosen
from flexattn.mods.bands import Masks
from flexattn.mods.dynamo import record_mods
from flexattn.mods.program_source import mods_of
from flexattn.ops import dtype_of, new_rng_state
from flexattn.prepare import cast_for_autocast

_TENSORS = ("q", "k", "v", "bias", "alibi_slopes", "softmax_offset", "rng_state", "descale_q", "descale_k", "descale_v")
_BIAS, _OFFSET, _RNG_STATE = map(_TENSORS.index, ("bias", "softmax_offset", "rng_state"))
_STATIC = ("qkv_format", "attn_mask_type", "window_size", "bottom_right_diagonal", "bias_type", "softmax_type", "deterministic")
_RECIPE = ("fp8_format", "granularity", "block_rows", "margin", "rotation", "bf16_backward", "keep_16_bit", "out_dtype")
_CALL = "Tensor?[] tensors, Tensor[] mod_tensors, Tensor plan, Scalar softmax_scale, Scalar softcap, Scalar dropout_p, str static"
_library: Any = torch.library.Library("flexattn", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(f"over_ranks_forward({_CALL}) -> (Tensor out, Tensor lse, Tensor max_logit, Tensor rng_state)")
_library.define(
    f"over_ranks_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, {_CALL})"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsoftmax_offset, Tensor[] dmod_tensors)"
)
_forward_op = torch.ops.flexattn.over_ranks_forward.default
_backward_op = torch.ops.flexattn.over_ranks_backward.default


class _Operands(NamedTuple):
    """Arguments of the operators, in the order of their schema. tensors: those of `_TENSORS`."""

    tensors: list[Any]
    mod_tensors: list[Tensor]
    plan: Tensor
    softmax_scale: float
    softcap: float
    dropout_p: float
    static: str


_NUM_CONSTANTS = len(_Operands._fields) - 2  # those that are neither tensors nor mod_tensors


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _to_json(names: tuple[str, ...], values: tuple[object, ...]) -> str:
    """Returns constants as a JSON text, because an operator's schema takes no dict."""
    by_name = {name: str(value) if isinstance(value, torch.dtype) else value for name, value in zip(names, values, strict=True)}
    return json.dumps(by_name, separators=(",", ":"))


@functools.lru_cache(maxsize=256)
def _from_json(static: str) -> dict[str, Any]:
    options: dict[str, object] = json.loads(static)
    return options


def attend(q: Tensor, k: Tensor, v: Tensor, plan: Plan, strategy: str | None, options: dict[str, Any]) -> Any:
    """Does the same as `flexattn.distributed.attention`, for Dynamo to trace."""
    check_arguments(plan, options)
    if options.get("block_mask") is not None:
        raise ValueError("block_mask is given to a call under torch.compile. Pass it to the plan instead")
    if options.get("fp8_state") is not None:
        raise ValueError("fp8_state is given under torch.compile. Over ranks, use current scaling or eager mode")
    recipe = options.get("fp8_recipe")
    if recipe is not None and recipe.out_dtype in validation.FP8_DTYPES:
        raise ValueError(f"fp8_recipe.out_dtype is {recipe.out_dtype} under torch.compile. Over ranks, use a 16-bit out_dtype")
    q, k, v = cast_for_autocast(q, k, v)
    is_grad = torch.is_grad_enabled()
    score_mod, mask_mod, program = options.get("score_mod"), options.get("mask_mod"), ""
    mod_tensors: tuple[Tensor, ...] = ()
    flags: tuple[bool, ...] = ()
    tensors = [q, k, v, *(options.get(name) for name in _TENSORS[3:])]
    needs_grad = is_grad and any(t is not None and t.requires_grad for t in tensors)
    if score_mod is not None or mask_mod is not None:
        recorded = record_mods(score_mod, mask_mod, options.get("score_mod_tensors", ()), needs_grad, Masks.NONE, q)
        program, mod_tensors, flags = recorded.program.text, recorded.tensors, recorded.program.tensor_needs_grad
        needs_grad = needs_grad or any(flags)
    dropout_p, fmt = options.get("dropout_p", 0.0), options.get("qkv_format") or ("thd" if plan.is_packed else "bshd")
    is_drawn = dropout_p > 0.0 and tensors[_RNG_STATE] is None
    if is_drawn:
        tensors[_RNG_STATE] = new_rng_state(q.device)
    wanted = (*(is_grad and t is not None and t.requires_grad for t in tensors), *flags)
    return_max_logit = options.get("return_max_logit", False)
    static = {name: options.get(name) for name in _STATIC}
    if "window_size" in options:
        static["window_size"] = window_of(options["window_size"], options.get("attn_mask_type") or "")
    static |= {"qkv_format": fmt, "strategy": strategy, "backend": options.get("backend"), "mods": program, "wanted": wanted}
    static |= {"return_max_logit": return_max_logit, "is_drawn": is_drawn}
    fields = () if recipe is None else (getattr(recipe, name) for name in _RECIPE)
    static["recipe"] = None if recipe is None else tuple(str(x) if isinstance(x, torch.dtype) else x for x in fields)
    scale = options.get("softmax_scale")
    numbers = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale, options.get("softcap", 0.0), dropout_p
    constants = plan.token, *numbers, _to_json(tuple(static), tuple(static.values()))
    if needs_grad:
        # Pass views, because Dynamo refuses a Function that gets one tensor twice.
        views = [None if t is None else t.view_as(t) for t in (*tensors, *mod_tensors)]
        out, lse, max_logit, _ = _Attend.apply(*constants, *views)  # type: ignore[no-untyped-call]
    else:
        out, lse, max_logit, _ = _forward_op(tensors, list(mod_tensors), *constants)
    return chosen(out, lse, max_logit, options.get("return_lse", False), return_max_logit)


class _Attend(torch.autograd.Function):
    """Autograd function of the operators. Its arguments are the constants, and then each tensor, the mods' last."""

    @staticmethod
    def forward(ctx: FunctionContext, *operands: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        constants, tensors = operands[:_NUM_CONSTANTS], operands[_NUM_CONSTANTS:]
        out, lse, max_logit, state = _forward_op(tensors[: len(_TENSORS)], tensors[len(_TENSORS) :], *constants)
        ctx.mark_non_differentiable(max_logit, state)
        ctx.set_materialize_grads(False)
        plan, *numbers = constants
        ctx.save_for_backward(out, lse, state, plan, *tensors)
        ctx.numbers = numbers
        return out, lse, max_logit, state

    @staticmethod
    @first_order
    def backward(
        ctx: FunctionContext, saved: Any, dout: Tensor | None, dlse: Tensor | None, _max_logit: None, _state: None
    ) -> tuple[Tensor | None, ...]:
        out, lse, state, plan, *tensors = saved
        # Copy to a list: Dynamo of torch 2.11 treats the value that a star collects as a tuple, which cannot be changed.
        own, mod_tensors = list(tensors[: len(_TENSORS)]), list(tensors[len(_TENSORS) :])
        if dout is None:
            dout = torch.zeros_like(out)
        if own[_RNG_STATE] is not None:
            own[_RNG_STATE] = state
        dq, dk, dv, dbias, doffset, dmods = _backward_op(dout, dlse, out, lse, own, mod_tensors, plan, *ctx.numbers)
        gradients: list[Tensor | None] = [dq, dk, dv, *(None,) * (len(_TENSORS) - 3), *dmods]
        gradients[_BIAS], gradients[_OFFSET] = dbias, doffset
        needed = ctx.needs_input_grad[_NUM_CONSTANTS:]
        return (*(None,) * _NUM_CONSTANTS, *[t if needs else None for t, needs in zip(gradients, needed, strict=True)])


def _check_operands(x: _Operands, static: dict[str, Any], check: Callable[..., CheckedCall]) -> CheckedCall:
    """Returns the checked call for an operator's arguments. check: the function that checks it."""
    options = {name: static[name] for name in (*_STATIC, "backend", "return_max_logit") if static[name] is not None}
    if "window_size" in options:
        options["window_size"] = Window(*options["window_size"])
    tensors = zip((*x.tensors, *x.mod_tensors), static["wanted"], strict=True)
    leaves: list[Any] = [None if t is None else t.detach().requires_grad_(needs) for t, needs in tensors]
    (q, k, v, *others), mod_tensors = leaves[: len(_TENSORS)], leaves[len(_TENSORS) :]
    options |= dict(zip(_TENSORS[3:], others, strict=True))
    options |= {"softmax_scale": float(x.softmax_scale), "softcap": float(x.softcap), "dropout_p": float(x.dropout_p)}
    if static["mods"]:
        program = parse_program(static["mods"])
        assert program is not None
        options["score_mod"], options["mask_mod"] = mods_of(program, mod_tensors)
        options["score_mod_tensors"] = mod_tensors if options["score_mod"] is not None else ()
    if static["recipe"] is not None:
        fields: dict[str, Any] = dict(zip(_RECIPE, static["recipe"], strict=True))
        dtype = fields["out_dtype"]
        options["fp8_recipe"] = fp8.Recipe(
            **fields | {"out_dtype": None if dtype is None else dtype_of(dtype.removeprefix("torch."))}
        )
    return check(q, k, v, plan_of(x.plan), static["strategy"], options)


def _no_autocast(x: _Operands) -> torch.autocast:
    return torch.autocast(x.tensors[0].device.type, enabled=False)


def _forward(*operands: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = _Operands(*operands)
    static = _from_json(x.static)
    if static["is_drawn"]:
        x.tensors[_RNG_STATE] = exchange.from_first_rank(x.tensors[_RNG_STATE].clone(), plan_of(x.plan).group)
    with torch.enable_grad(), _no_autocast(x):  # checks look at requires_grad
        call = _check_operands(x, static, checked_call)
    with torch.no_grad(), _no_autocast(x):
        out, lse = run_forward(call.runner, call.plan, [None if t is None else t.detach() for t in call.inputs()]).results
    peaks = call.scores.peaks
    max_logit = lse.new_empty(0) if peaks is None else exchange.all_reduce_max(peaks, call.plan.group)
    state = x.tensors[_RNG_STATE]
    state = torch.empty(0, dtype=torch.int64, device=out.device) if state is None else state.clone()
    return from_bshd(out, call.qkv_format).contiguous(), lse.contiguous(), max_logit, state


def _backward(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, *operands: Any) -> tuple[object, ...]:
    x = _Operands(*operands)
    static = _from_json(x.static)
    # Eager gradients use autograd, which torch turns off inside an operator.
    with compat.dispatch_key_excluded(compat.DispatchKey.AutogradFunctionality, False):
        with torch.enable_grad(), _no_autocast(x):
            call = _check_operands(x, static | {"return_max_logit": None}, CheckedCall.of)
        fmt = call.qkv_format
        with torch.no_grad(), _no_autocast(x):
            inputs = [None if t is None else t.detach() for t in call.inputs()]
            results = Results(as_bshd(out, fmt), lse)
            forward = resume_forward(call.runner, call.plan, inputs, results)
            incoming = as_bshd(dout, fmt).contiguous(), None if dlse is None else dlse.contiguous()
            dq, dk, dv, *shared_gradients = run_backward(call.runner, call.plan, forward, call.inputs()[3:], incoming)
    qkv = (from_bshd(t, fmt).contiguous() for t in (dq, dk, dv) if t is not None)
    dense = [dout.new_empty(0) if t is None else t for t in (shared_gradients[_BIAS - 3], shared_gradients[_OFFSET - 3])]
    dmods = shared_gradients[-len(x.mod_tensors) :] if call.scores.score_mod is not None else [None] * len(x.mod_tensors)
    return *qkv, *dense, [torch.zeros_like(t) if g is None else g for t, g in zip(x.mod_tensors, dmods, strict=False)]


def _forward_fake(*operands: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = _Operands(*operands)
    static, (q, _, v, *_), state = _from_json(x.static), x.tensors, x.tensors[_RNG_STATE]
    fmt = static["qkv_format"]
    sizes = dict(zip(fmt, q.shape, strict=False))
    dtype = q.dtype if q.dtype not in validation.FP8_DTYPES else torch.bfloat16
    if static["recipe"] is not None and (wanted := static["recipe"][_RECIPE.index("out_dtype")]) is not None:
        dtype = dtype_of(wanted.removeprefix("torch."))
    wide = sum_dtype(q.dtype)
    lse = q.new_empty([sizes[name] for name in ("ht" if fmt == "thd" else "bhs")], dtype=wide)
    max_logit = q.new_empty(sizes["h"] if static["return_max_logit"] else 0, dtype=wide)
    new_state = q.new_empty(0 if state is None else 2, dtype=torch.int64)
    return q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=dtype), lse, max_logit, new_state


def _backward_fake(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, *operands: Any) -> tuple[object, ...]:
    x = _Operands(*operands)
    wanted = _from_json(x.static)["wanted"]
    dense = [x.tensors[i].new_empty(x.tensors[i].shape) if wanted[i] else dout.new_empty(0) for i in (_BIAS, _OFFSET)]
    return *(t.new_empty(t.shape, dtype=dout.dtype) for t in x.tensors[:3]), *dense, [t.new_empty(t.shape) for t in x.mod_tensors]


for _key in ("CPU", "CUDA"):
    _library.impl("over_ranks_forward", _forward, _key)
    _library.impl("over_ranks_backward", _backward, _key)
torch.library.register_fake("flexattn::over_ranks_forward", _forward_fake, lib=_library)
torch.library.register_fake("flexattn::over_ranks_backward", _backward_fake, lib=_library)
