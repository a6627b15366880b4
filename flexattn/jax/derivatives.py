"""Second derivatives of JAX calls: rules that call `dispatch.second_order` on the host.

The forward's tangent and the backward's tangent are one primitive that is linear in its last arguments. Its transpose is the same
primitive of another kind. On a CUDA device its arrays are copied to the host and back.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
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

# tangent: (operands, t) -> tangents of out and lse. gradients: (operands, dout, dlse) -> gradients. hessian: (operands, dout, dlse,
# t, t_dout, t_dlse) -> tangents of the gradients. double: (operands, dout, dlse, c) -> gradients of <c, gradients>.
# bend: (operands, t, s) -> derivatives of the tangents along s. Only its transpose runs, which is a `double`.
Kind = Literal["tangent", "gradients", "hessian", "double", "bend"]


def refuse(*_: object, **__: object) -> Any:
    """Raises NotImplementedError for a derivative that a call does not have."""
    raise NotImplementedError(
        "a third derivative of attention, a forward-mode derivative of a forward-mode one, or a second derivative in FP8 was asked "
        "for; accepted: jax.grad of jax.grad, jax.jvp of jax.grad, jax.grad of jax.jvp, jax.hessian"
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
    arrays: Sequence[Any], call: Call, kind: Kind, moved: Sequence[int], results: Any, other: Sequence[int] = ()
) -> list[jax.ShapeDtypeStruct]:
    like: Sequence[Any]
    if kind in ("tangent", "bend"):
        like = results
    elif kind == "hessian":
        like = [arrays[operand] for operand in call.wanted()]
    else:
        outer = () if kind == "gradients" else arrays[call.num_operands : call.num_operands + 2]
        like = [*outer, *(arrays[operand] for operand in moved)]
    return [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in like]


def _call_host(
    *arrays: jax.Array, call: Call, kind: Kind, moved: tuple[int, ...], results: Any, other: tuple[int, ...] = ()
) -> list[jax.Array]:
    if kind == "bend":
        refuse()
    shapes = _shapes(arrays, call, kind, moved, results)
    run = functools.partial(_run, call=call, kind=kind, moved=moved, other=other)
    return list(jax.pure_callback(lambda *given: run(given), tuple(shapes), *arrays, vmap_method="sequential"))


def _batched(arrays: Sequence[jax.Array], dims: Sequence[int | None], **parameters: Any) -> tuple[Any, Any]:
    found = jax.vmap(functools.partial(_call_host, **parameters), in_axes=tuple(dims))(*arrays)
    return found, [0] * len(found)


def _transposed(
    cotangents: Sequence[Any],
    *arrays: Any,
    call: Call,
    kind: Kind,
    moved: tuple[int, ...],
    results: Any,
    other: tuple[int, ...] = (),
) -> list[Any]:
    """Returns the cotangents of the linear arguments of a tangent, a hessian or a bend."""
    count = call.num_operands
    given: list[Any] = [ad.instantiate_zeros(c) for c in cotangents]
    rest: list[Any]
    if kind == "tangent":
        found = derivative_p.bind(*arrays[:count], *given, call=call, kind="gradients", moved=moved, results=results)
        return [None] * count + list(found)
    if kind == "bend":
        fixed = arrays[count : count + len(other)]
        _, _, *rest = derivative_p.bind(
            *arrays[:count], *given, *fixed, call=call, kind="double", moved=moved, results=None, other=other
        )
        return [None] * (count + len(other)) + rest
    if kind != "hessian":
        refuse()
    known = arrays[: count + 2]
    wanted = tuple(call.wanted())
    ddout, ddlse, *rest = derivative_p.bind(*known, *given, call=call, kind="double", moved=moved, results=None, other=wanted)
    return [None] * len(known) + [*rest, ddout, ddlse]


def _derivative_rule(primals: Sequence[Any], tangents: Sequence[Any], **parameters: Any) -> tuple[Any, Any]:
    """Returns tangents of out and lse, and their tangents, which only reverse mode computes."""
    call, moved = parameters["call"], parameters["moved"]
    if parameters["kind"] != "tangent":
        refuse()
    count = call.num_operands
    found = derivative_p.bind(*primals, **parameters)
    sums: list[Any] = [ad.Zero(jax.typeof(a).to_tangent_aval()) for a in found]
    again = tuple(i for i in _places(call) if type(tangents[i]) is not ad.Zero)
    if again:
        given = [*primals, *(tangents[i] for i in again)]
        sums = derivative_p.bind(*given, **parameters | {"kind": "bend", "moved": again, "other": moved})
    if any(type(t) is not ad.Zero for t in tangents[count:]):
        linear = derivative_p.bind(*primals[:count], *map(ad.instantiate_zeros, tangents[count:]), **parameters)
        sums = [ad.add_tangents(a, b) for a, b in zip(sums, linear, strict=True)]
    return found, sums


derivative_p = Primitive("flexattn_derivative")
derivative_p.multiple_results = True
derivative_p.def_impl(jax.jit(_call_host, static_argnames=("call", "kind", "moved", "results", "other")))
derivative_p.def_abstract_eval(
    lambda *avals, **parameters: [jax.core.ShapedArray(s.shape, s.dtype) for s in _shapes(avals, **parameters)]
)
mlir.register_lowering(derivative_p, mlir.lower_fun(_call_host, multiple_results=True))
batching.primitive_batchers[derivative_p] = _batched
ad.primitive_transposes[derivative_p] = _transposed
ad.primitive_jvps[derivative_p] = _derivative_rule


def _moved(call: Call, tangents: Sequence[Any]) -> tuple[int, ...]:
    if call.config is not None or call.settings.fp8_out or call.is_delayed or call.out8 is not None:
        refuse()
    return tuple(i for i in _places(call) if type(tangents[i]) is not ad.Zero)


def forward_rule(primitive: Primitive, primals: Sequence[Any], tangents: Sequence[Any], call: Call) -> tuple[Any, Any]:
    """Returns the results of a forward, and their tangents."""
    moved = _moved(call, tangents)
    found = primitive.bind(*primals, call=call)
    results = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in found[:2])
    along = derivative_p.bind(*primals, *(tangents[i] for i in moved), call=call, kind="tangent", moved=moved, results=results)
    return found, [*along, *(ad.Zero(jax.typeof(a).to_tangent_aval()) for a in found[2:])]


def backward_rule(primitive: Primitive, primals: Sequence[Any], tangents: Sequence[Any], call: Call) -> tuple[Any, Any]:
    """Returns the gradients of a backward, and their tangents. out and lse are functions of the operands."""
    moved = _moved(call, tangents)
    found = primitive.bind(*primals, call=call)
    count = call.num_operands
    operands, (_, lse, dout, *more) = primals[:count], primals[count:]
    given = [*operands, dout, more[0] if more else jnp.zeros(lse.shape, lse.dtype), *(tangents[i] for i in moved)]
    given.append(ad.instantiate_zeros(tangents[count + 2]))
    given.append(ad.instantiate_zeros(tangents[count + 3]) if more else jnp.zeros(lse.shape, lse.dtype))
    return found, derivative_p.bind(*given, call=call, kind="hessian", moved=moved, results=None)
