"""Derivatives of JAX calls: tangents, whose transpose is the backward, and second derivatives.

The forward's tangent and the backward's tangent are one primitive that is linear in its last arguments. Its transpose is the
backward, or the same primitive of another kind. `dispatch.second_order` computes it on the host. On a CUDA device its arrays are
copied there and back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from torch import Tensor

from flexattn import ops
from flexattn.dispatch import second_order
from flexattn.jax.call import LISTS, Call
from flexattn.jax.host import operands_of
from flexattn.jax.primitives import alike, backward_p, bind, forward_p, result_like

# tangent: (operands, out, lse, amaxes, t, histories) -> tangents of out and lse. bend: (operands, out, lse, t, s) -> derivatives of
# the tangents along s. Only its transpose runs. hessian: (operands, dout, dlse, t, t_dout, t_dlse) -> tangents of the gradients.
# gradients: (operands, dout, dlse) -> gradients. double: (operands, dout, dlse, c) -> gradients of <c, gradients>.
Kind = Literal["tangent", "gradients", "hessian", "double", "bend"]
Maps = tuple[tuple[int | None, ...], ...]  # the mapped axis of each argument for each jax.vmap around the call, innermost first
Noted = tuple[tuple[str, int], ...]  # FP8 histories whose cotangents are this call's amaxes: names of their tensors, and rows
_AMAXES = ("q", "k", "v", "out", "dout")  # the last results of a forward with delayed scaling, and the last of a backward


def refuse(*_: object, **__: object) -> Any:
    """Raises NotImplementedError for a derivative that a call does not have."""
    raise NotImplementedError(
        "a third derivative of attention, a forward-mode derivative of a forward-mode one, or a forward-mode or second derivative "
        "in FP8 was asked for; accepted: jax.grad of jax.grad, jax.jvp of jax.grad, jax.grad of jax.jvp, jax.hessian"
    )


def _run(arrays: Sequence[np.ndarray[Any, Any]], call: Call, kind: Kind, moved: Sequence[int], other: Sequence[int]) -> Any:
    """Returns the results on the host. moved: the operands that have tangents, or gradients. other: those of c."""
    count = call.num_operands
    tensors = [_to_torch(array) for array in arrays]
    x, rest = operands_of(call, tensors[:count]), tensors[count:]
    spec = ops.spec_to_run(x, call.settings)
    places = _places(call)
    size = len(second_order.inputs(x))

    def along(operands: Sequence[int], values: Sequence[Tensor]) -> list[Tensor | None]:
        found: list[Tensor | None] = [None] * size
        for operand, value in zip(operands, values, strict=True):
            found[places[operand]] = value
        return found

    def chosen(operands: Sequence[int], values: Sequence[Tensor | None]) -> list[Tensor]:
        return [value for operand in operands if (value := values[places[operand]]) is not None]

    def flags(operands: Sequence[int]) -> list[bool]:
        chosen_places = {places[operand] for operand in operands}
        return [place in chosen_places for place in range(size)]

    results: Sequence[Tensor]
    if kind == "tangent":
        results = second_order.tangent(spec, x, along(moved, rest))
    elif kind == "gradients":
        results = chosen(moved, second_order.gradients(spec, x, rest[0], rest[1], flags(moved)))
    elif kind == "hessian":
        dout, dlse, *tangents, t_dout, t_dlse = rest
        wanted = flags(call.wanted())
        second = second_order.double_backward(spec, x, dout, dlse, along(moved, tangents), wanted).inputs
        linear = second_order.gradients(spec, x, t_dout, t_dlse, wanted)
        results = [a + b for a, b in zip(chosen(call.wanted(), second), chosen(call.wanted(), linear), strict=True)]
    else:
        dout, dlse, *cotangents = rest
        found = second_order.double_backward(spec, x, dout, dlse, along(other, cotangents), flags(moved))
        results = (found.ddout, found.ddlse, *chosen(moved, found.inputs))
    return tuple(map(_to_numpy, results))


def _places(call: Call) -> dict[int, int]:
    """Returns the place among `second_order.inputs` of each operand that may have a derivative."""
    dense = {name: i for i, name in enumerate(("q", "k", "v", "bias", "softmax_offset"))}
    found = {i: dense[name] for i, name in enumerate(call.present) if name in dense}
    first = len(call.present)
    return found | {first + i: len(dense) + i for i in range(call.counts[LISTS.index("mod_tensors")])}


def _to_torch(array: Any) -> Tensor:
    array = np.array(array)  # writable, and on the host
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array.view(np.int32) if array.dtype == np.uint32 else array)


def _to_numpy(t: Tensor) -> np.ndarray[Any, Any]:
    t = t.detach().contiguous()
    return t.view(torch.int16).numpy().view(jnp.bfloat16) if t.dtype is torch.bfloat16 else t.numpy()


def _shapes(
    arrays: Sequence[Any], call: Call, kind: Kind, moved: Sequence[int], other: object = (), noted: object = ()
) -> list[jax.ShapeDtypeStruct]:
    results = arrays[call.num_operands : call.num_operands + 2]  # out and lse, or dout and dlse
    if kind in ("tangent", "bend"):
        like = results
    elif kind == "hessian":
        like = [arrays[operand] for operand in call.wanted()]
    else:
        like = [*(() if kind == "gradients" else results), *(arrays[operand] for operand in moved)]
    return [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in like]


def _abstract(*avals: Any, maps: Maps, **parameters: Any) -> list[Any]:
    first, sizes = avals[0], []
    for dims in reversed(maps):
        sizes.append(next(a.shape[dim] for a, dim in zip(avals, dims, strict=True) if dim is not None))
        parts = ([size for i, size in enumerate(a.shape) if i != dim] for a, dim in zip(avals, dims, strict=True))
        avals = tuple(jax.ShapeDtypeStruct(shape, a.dtype) for shape, a in zip(parts, avals, strict=True))
    shapes = _shapes(avals, **parameters)
    return [result_like(jax.ShapeDtypeStruct((*sizes, *shape.shape), shape.dtype), first) for shape in shapes]


def _evaluated(*arrays: Any, maps: Maps, **parameters: Any) -> Any:
    """Returns the results of the primitive, in a loop over each mapped axis."""
    call, kind = parameters["call"], parameters["kind"]
    if kind == "bend" or _is_fp8(call):
        refuse()

    def one(*arrays: Any) -> Any:
        given = arrays if kind != "tangent" else (*arrays[: call.num_operands], *arrays[call.num_operands + 2 :])
        run = functools.partial(_run, call=call, kind=kind, moved=parameters["moved"], other=parameters["other"])
        shapes = tuple(_shapes(arrays, **parameters))
        return tuple(jax.pure_callback(lambda *given: run(given), shapes, *given, vmap_method="sequential"))

    for dims in maps:
        one = jax.vmap(one, in_axes=dims)
    return list(one(*arrays))


def _is_fp8(call: Call) -> bool:
    return call.config is not None or bool(call.settings.fp8_out) or call.is_delayed or call.out8 is not None


def _bind(arrays: Sequence[Any], call: Call, kind: Kind, moved: Sequence[int], **others: Any) -> list[jax.Array]:
    parameters: dict[str, Any] = {"other": (), "noted": (), "maps": ()} | others
    return list(derivative_p.bind(*alike(arrays), call=call, kind=kind, moved=tuple(moved), **parameters))


def _num_linear(kind: Kind, moved: Sequence[int], noted: Noted) -> int:
    """Returns the number of last arguments in which the primitive is linear."""
    if kind not in ("tangent", "bend", "hessian"):
        refuse()
    return len(moved) + len(noted) + (2 if kind == "hessian" else 0)


def _transposed(cotangents: Sequence[Any], *arrays: Any, maps: Maps, **parameters: Any) -> list[Any]:
    """Returns the cotangents of the linear arguments."""
    known = len(arrays) - _num_linear(parameters["kind"], parameters["moved"], parameters["noted"])
    are_zero = [type(ct) is ad.Zero for ct in cotangents]

    def one(*given: Any) -> list[Any]:
        left = iter(given[known:])
        return _cotangents(given[:known], [None if is_zero else next(left) for is_zero in are_zero], **parameters)

    run = one
    incoming = [ct for ct, is_zero in zip(cotangents, are_zero, strict=True) if not is_zero]
    for dims in maps:
        run = _over(run, (*dims[:known], *(0 for _ in incoming)), dims[known:])
    found = [None] * known + run(*arrays[:known], *incoming)
    return [ct if ad.is_undefined_primal(a) else None for ct, a in zip(found, arrays, strict=True)]


def _over(function: Callable[..., list[Any]], dims: tuple[int | None, ...], results: tuple[int | None, ...]) -> Any:
    """Returns the function over a mapped axis. results: the axis of each result; None: a sum over the axis."""

    def run(*arrays: Any) -> list[Any]:
        found = jax.vmap(function, in_axes=dims, out_axes=[0 if dim is None else dim for dim in results])(*arrays)
        return [t.sum(0).astype(t.dtype) if dim is None else t for t, dim in zip(found, results, strict=True)]

    return run


def _cotangents(
    known: Sequence[Any], given: Sequence[Any], call: Call, kind: Kind, moved: Sequence[int], other: Any, noted: Noted
) -> list[Any]:
    count = call.num_operands
    operands, (first, second) = known[:count], known[count : count + 2]  # out and lse, or dout and dlse
    if kind == "hessian":
        wanted = tuple(call.wanted())
        filled = [jnp.zeros_like(operands[i]) if ct is None else ct for i, ct in zip(wanted, given, strict=True)]
        ddout, ddlse, *rest = _bind([*operands, first, second, *filled], call, "double", moved, other=wanted)
        return [*rest, ddout, ddlse]
    dout, dlse = given
    dout = jnp.zeros_like(first) if dout is None else dout
    if kind == "bend" or not {*moved} <= {*call.wanted()}:
        both = [*operands, dout, jnp.zeros_like(second) if dlse is None else dlse]
        if kind == "bend":
            return _bind([*both, *known[count + 2 :]], call, "double", moved, other=other)[2:]
        return _bind(both, call, "gradients", moved)
    found = bind(backward_p, [*operands, first, second, dout, *([] if dlse is None else [dlse])], call)
    by_operand = dict(zip(call.wanted(), found, strict=False))
    results = [by_operand[i].reshape(operands[i].shape).astype(operands[i].dtype) for i in moved]
    # The cotangent of a history is this call's amax, whatever the incoming gradients are.
    amaxes = dict(zip(_AMAXES, (*known[count + 2 :], found[-1]), strict=False))
    return results + [jnp.zeros((rows, *amaxes[name].shape), jnp.float32).at[0].set(amaxes[name]) for name, rows in noted]


def _derivative_rule(primals: Sequence[Any], tangents: Sequence[Any], maps: Maps, **parameters: Any) -> tuple[Any, Any]:
    """Returns the results and their tangents. The tangent along operands is a `bend`, which only reverse mode computes."""
    call, kind, moved, noted = (parameters[name] for name in ("call", "kind", "moved", "noted"))
    known, count = len(primals) - _num_linear(kind, moved, noted), call.num_operands
    found = derivative_p.bind(*primals, maps=maps, **parameters)
    sums: list[Any] = [ad.Zero(jax.typeof(a).to_tangent_aval()) for a in found]
    again = tuple(i for i in _places(call) if type(tangents[i]) is not ad.Zero)
    if again and (kind != "tangent" or _is_fp8(call)):
        refuse()
    if again:
        given = [*primals[: count + 2], *primals[known:], *(tangents[i] for i in again)]
        mapped = tuple((*dims[: count + 2], *dims[known:], *(dims[i] for i in again)) for dims in maps)
        sums = _bind(given, call, "bend", again, other=moved, maps=mapped)
    if any(type(t) is not ad.Zero for t in tangents[known:]):
        filled = map(ad.instantiate_zeros, tangents[known:])
        linear = derivative_p.bind(*primals[:known], *filled, maps=maps, **parameters)
        sums = [ad.add_tangents(a, b) for a, b in zip(sums, linear, strict=True)]
    return found, sums


def _batched(arrays: Sequence[Any], dims: Sequence[int | None], maps: Maps, **parameters: Any) -> tuple[Any, Any]:
    found = derivative_p.bind(*arrays, maps=(*maps, tuple(dims)), **parameters)
    return found, [0] * len(found)


derivative_p = Primitive("flexattn_derivative")
derivative_p.multiple_results = True
derivative_p.def_impl(jax.jit(_evaluated, static_argnames=("call", "kind", "moved", "other", "noted", "maps")))
derivative_p.def_abstract_eval(_abstract)
mlir.register_lowering(derivative_p, mlir.lower_fun(_evaluated, multiple_results=True))
batching.primitive_batchers[derivative_p] = _batched
ad.primitive_transposes[derivative_p] = _transposed
ad.primitive_jvps[derivative_p] = _derivative_rule


def tangent(
    call: Call, operands: Sequence[Any], found: Sequence[Any], along: Mapping[int, Any], histories: Mapping[str, Any]
) -> list[Any]:
    """Returns the tangents of out and lse.

    found: the results of the forward. along: the tangents by operand. histories: those of FP8 histories, by their tensors' names.
    """
    amaxes = found[1 - len(_AMAXES) :] if call.is_delayed else ()
    given = [*operands, *found[:2], *amaxes, *along.values(), *histories.values()]
    return _bind(given, call, "tangent", tuple(along), noted=tuple((name, t.shape[0]) for name, t in histories.items()))


def _moved(call: Call, tangents: Sequence[Any]) -> dict[int, Any]:
    if _is_fp8(call):
        refuse()
    return {i: tangents[i] for i in _places(call) if type(tangents[i]) is not ad.Zero}


def _forward_rule(primals: Sequence[Any], tangents: Sequence[Any], call: Call) -> tuple[Any, Any]:
    """Returns the results of a forward, and their tangents."""
    along = _moved(call, tangents)
    found = forward_p.bind(*primals, call=call)
    return found, [*tangent(call, primals, found, along, {}), *(ad.Zero(jax.typeof(a).to_tangent_aval()) for a in found[2:])]


def _backward_rule(primals: Sequence[Any], tangents: Sequence[Any], call: Call) -> tuple[Any, Any]:
    """Returns the gradients of a backward, and their tangents. out and lse are functions of the operands."""
    along = _moved(call, tangents)
    found = backward_p.bind(*primals, call=call)
    count = call.num_operands
    operands, (_, lse, dout, *more) = primals[:count], primals[count:]
    given = [*operands, dout, more[0] if more else jnp.zeros_like(lse), *along.values()]
    given.append(ad.instantiate_zeros(tangents[count + 2]))
    given.append(ad.instantiate_zeros(tangents[count + 3]) if more else jnp.zeros_like(lse))
    return found, _bind(given, call, "hessian", tuple(along))


ad.primitive_jvps[forward_p] = _forward_rule
ad.primitive_jvps[backward_p] = _backward_rule
