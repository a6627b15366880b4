"""Two primitives, attention forward and backward: their shapes, their rules, and their lowering for each platform.

Each has an inner primitive, the call of one device, which is lowered for a platform. The outer one may be split over devices.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax._src import dispatch
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import PartitionSpec

from flexattn.dispatch.plan import Plan
from flexattn.dispatch.select import select
from flexattn.dispatch.spec import Direction, with_classes
from flexattn.jax import cuda, ffi, host
from flexattn.jax.batching import fold_backward, fold_forward, loop
from flexattn.jax.call import Call, meta_tensor, shape_of_words, shaped, torch_dtype
from flexattn.jax.sharding import layout_of_call, partitioned


def _metas(call: Call, avals: Sequence[jax.core.ShapedArray]) -> Any:
    names = call.names()
    shapes = [  # an rng_state has its shape in int64 and any dtype, because no spec depends on that
        jax.ShapeDtypeStruct(shape_of_words(aval.shape), "float32") if name == "rng_state" else aval
        for name, aval in zip(names, avals, strict=True)
    ]
    return call.operands(list(map(meta_tensor, names, shapes)))


def forward_shapes(call: Call, avals: Sequence[jax.core.ShapedArray]) -> list[jax.ShapeDtypeStruct]:
    """Returns the shapes of a forward's results; avals: the operands'."""
    return shaped(call.results(_metas(call, avals), _scales(call, avals)))


def backward_shapes(call: Call, avals: Sequence[jax.core.ShapedArray]) -> list[jax.ShapeDtypeStruct]:
    """Returns the shapes of the gradients; avals: those of the operands and of the other inputs."""
    return shaped(call.gradients(_metas(call, avals[: call.num_operands]), _scales(call, avals)))


def _scales(call: Call, avals: Sequence[jax.core.ShapedArray]) -> list[Any]:
    return [meta_tensor(name, aval) for name, aval in zip(call.names(), avals, strict=False) if name == "scales"]


def result_like(shape: jax.ShapeDtypeStruct, like: Any) -> object:
    """Returns the type of a result, which varies over the same axes of a `jax.shard_map` as the argument `like`."""
    if not like.mat.varying:
        return jax.core.ShapedArray(shape.shape, shape.dtype)
    sharding = like.sharding.update(spec=PartitionSpec(*(None for _ in shape.shape)))
    return like.update(shape=shape.shape, dtype=shape.dtype, weak_type=False, sharding=sharding)


def alike(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns arrays that all vary over the same axes of a `jax.shard_map`; if one did not, its gradient is a sum over them."""
    varying = [jax.typeof(x).mat.varying for x in arrays]
    union: frozenset[str] = frozenset().union(*varying)
    return [
        jax.lax.pcast(x, tuple(sorted(union - axes)), to="varying") if axes != union else x
        for x, axes in zip(arrays, varying, strict=True)
    ]


def bind(primitive: Primitive, arrays: Sequence[jax.Array], call: Hashable) -> list[jax.Array]:
    """Returns the results of a primitive of this package."""
    return list(primitive.bind(*alike(arrays), call=call))


def _on_host(name: str, shapes: object) -> object:
    direction = _direction(name)

    def run(*arrays: jax.Array, call: Call) -> object:
        x = _metas(call, arrays[: call.num_operands])
        spec = with_classes(call.spec(x), x)._replace(device_type="cpu")
        select(spec.for_backward() if direction == "backward" else spec, direction, call.settings.backend)  # raises BackendError
        return _call_handler(name, shapes, call, arrays)

    return run


def _on_cuda(name: str, shapes: object, planned: Callable[[Call, Sequence[jax.Array]], object]) -> object:
    def run(*arrays: jax.Array, call: Call) -> object:
        if call.settings.backend not in cuda.HOSTED:
            return planned(call, arrays)
        return _call_handler(name, shapes, cuda.checked(call, arrays, _direction(name)), arrays)

    return run


def _call_handler(
    name: str, shapes: Any, call: Sequence[Any], arrays: Sequence[jax.Array], aliases: Mapping[int, int] | None = None
) -> object:
    """Returns the results of a handler of `ffi`, to which a call comes as JSON. aliases: results in the memory of operands."""
    text = json.dumps(call, separators=(",", ":"))
    return jax.ffi.ffi_call(name, shapes(call, arrays), input_output_aliases=aliases)(*arrays, call=text)


def _direction(name: str) -> Direction:
    return "forward" if name == host.FORWARD else "backward"


def _refuse_platform(*arrays: jax.Array, call: Call) -> object:
    raise NotImplementedError(
        "flexattn.jax runs on CUDA devices and on CPUs; accepted: a computation on one of those, for example under "
        "jax.default_device(jax.devices('cpu')[0])"
    )


def primitive(name: str, shapes: Any) -> Primitive:
    """Returns a new primitive with a parameter `call`; shapes: a function of the call and its operands to the results' shapes."""
    new = Primitive(name)
    new.multiple_results = True
    new.def_impl(functools.partial(dispatch.apply_primitive, new))
    new.def_abstract_eval(lambda *avals, call: [result_like(shape, avals[0]) for shape in shapes(call, avals)])
    return new


def register(outer: Primitive, inner: Primitive, on_host: object, on_cuda: object, layout_of: Any) -> None:
    """Registers the split of a primitive into calls of `inner` over devices, and the lowering of those for each platform."""
    mlir.register_lowering(inner, mlir.lower_fun(_refuse_platform, multiple_results=True))
    mlir.register_lowering(inner, mlir.lower_fun(on_cuda, multiple_results=True), platform="cuda")
    mlir.register_lowering(inner, mlir.lower_fun(on_host, multiple_results=True), platform="cpu")
    dispatch.prim_requires_devices_during_lowering.add(outer)  # as JAX does for custom_partitioning, which the lowering uses
    mlir.register_lowering(outer, mlir.lower_fun(partitioned(inner, layout_of), multiple_results=True))


class Operator(NamedTuple):
    """A primitive, the one that it is split into, and the lowering of that for each platform."""

    whole: Primitive
    local: Primitive
    on_host: Callable[..., object]
    on_cuda: Callable[..., object]


def operator(name: str, shapes: Any, run: ffi.Run, plan: Callable[..., Plan], layout_of: Any) -> Operator:
    """Returns an operator besides attention. Its calls have the `names` of their arrays, and may have `aliases` of them.

    run: runs a call in torch, on a CPU. plan: returns the plan of a call, its arrays' shapes and dtypes, and a CUDA device.
    """
    ffi.register(name, run)
    kept = functools.lru_cache(maxsize=64)(plan)

    def on_host(*arrays: jax.Array, call: Any) -> object:
        return _call_handler(name, shapes, call, arrays, call.aliases(arrays) if hasattr(call, "aliases") else None)

    def on_cuda(*arrays: jax.Array, call: Any) -> object:
        signature = tuple((tuple(x.shape), torch_dtype(argument, x.dtype)) for argument, x in zip(call.names, arrays, strict=True))
        return cuda.run_plan(kept(call, signature, cuda.needed_device()), arrays)

    made = Operator(primitive(name, shapes), primitive(f"{name}_of_one_device", shapes), on_host, on_cuda)
    register(*made, layout_of)
    batching.primitive_batchers[made.whole] = functools.partial(loop, made.whole)
    return made


forward_p, backward_p = primitive(host.FORWARD, forward_shapes), primitive(host.BACKWARD, backward_shapes)
local_forward_p, local_backward_p = (
    primitive(f"{name}_of_one_device", shapes)
    for name, shapes in ((host.FORWARD, forward_shapes), (host.BACKWARD, backward_shapes))
)

for _outer, _inner, _name, _shapes, _planned, _fold in (
    (forward_p, local_forward_p, host.FORWARD, forward_shapes, cuda.forward, fold_forward),
    (backward_p, local_backward_p, host.BACKWARD, backward_shapes, cuda.backward, fold_backward),
):
    _layout_of = functools.partial(layout_of_call, is_backward=_outer is backward_p)
    register(_outer, _inner, _on_host(_name, _shapes), _on_cuda(_name, _shapes, _planned), _layout_of)
    batching.primitive_batchers[_outer] = _fold(_outer)
