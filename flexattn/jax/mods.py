"""A score_mod or mask_mod written in JAX, converted to a torch function that `flexattn.mods` traces: one lowering for both.

JAX traces the mod on scalars. Each equation of its jaxpr becomes a line of a Python function in torch ops. Captured arrays become
arguments of the factory of that function. The key of a trace is the function's contents, so equal mods share one.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.extend.core import Literal
from torch import Tensor

from flexattn.jax.call import torch_dtype

Mod = Callable[..., Any]
_SCALARS = {"score_mod": 1, "mask_mod": 0, "score_mod_gradient": 2}  # float32 arguments before the four indices
_NAMES = ("score", "b", "h", "q_idx", "kv_idx")
_INFIX = dict(
    zip(
        ["add", "sub", "mul", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor"],
        ["+", "-", "*", "==", "!=", "<", "<=", ">", ">=", "&", "|", "^"],
        strict=True,
    )
)
_SAME_NAME = "neg exp exp2 log log1p expm1 tanh sin cos tan sinh cosh abs sign floor ceil sqrt rsqrt erf erfc square pow"
_CALLS = {name: f"torch.{name}" for name in _SAME_NAME.split()} | {
    "max": "torch.maximum",
    "min": "torch.minimum",
    "logistic": "torch.sigmoid",
    "is_finite": "torch.isfinite",
    "not": "torch.bitwise_not",
    "rem": "torch.fmod",
    "integer_pow": "torch.pow",
    "copy": "",
    "copy_p": "",
}
_NESTED = ("jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call")
_JAX = os.path.dirname(jax.__file__) + os.sep
_ACCEPTED = (
    "scalar arithmetic of jax.numpy and jax.lax, jnp.where, and reads of captured arrays by one index per dim, such as table[h, i]"
)


class Traced(NamedTuple):
    """The source of a mod's torch function, and its captured arrays."""

    source: str
    arrays: tuple[jax.Array, ...]
    gradient: Traced | None  # the mod score_mod_gradient

    def written(self, stand_ins: Mapping[int, Tensor]) -> Mod:
        """Returns the function; stand_ins: a tensor for each captured array, by the array's id."""
        function: Mod = _maker(self.source)(*(stand_ins[id(array)] for array in self.arrays))
        if self.gradient is not None:
            function.score_mod_gradient = self.gradient.written(stand_ins)  # type: ignore[attr-defined]
        return function

    def all_arrays(self) -> list[jax.Array]:
        """Returns the captured arrays, each once."""
        arrays = [*self.arrays, *(self.gradient.all_arrays() if self.gradient else ())]
        return list({id(array): array for array in arrays}.values())


class InTorch(NamedTuple):
    """A mod that is already in torch, for callers whose mods are not in JAX: its factory, and the JAX arrays that it reads."""

    make: Callable[[tuple[Tensor, ...]], Mod]  # takes one tensor per array
    arrays: tuple[jax.Array, ...]

    def written(self, stand_ins: Mapping[int, Tensor]) -> Mod:
        """Returns the mod; stand_ins: a tensor for each array, by the array's id."""
        return self.make(tuple(stand_ins[id(array)] for array in self.arrays))

    def all_arrays(self) -> list[jax.Array]:
        """Returns the arrays, each once."""
        return list({id(array): array for array in self.arrays}.values())


def trace(role: str, mod: Mod | InTorch, explicit: Sequence[object] | Mapping[str, object] = ()) -> Traced | InTorch:
    """Returns a mod's torch source; explicit: arrays that score_mod takes after its arguments, or by name.

    Raises TypeError if the mod is not a function, and ValueError for unsupported operations, with JAX's names of them.
    """
    return mod if isinstance(mod, InTorch) else _trace(role, mod, explicit)


def _trace(role: str, mod: Mod, explicit: Sequence[object] | Mapping[str, object] = ()) -> Traced:
    if not callable(mod):
        raise TypeError(f"{role} is {mod!r} ({type(mod).__name__}); accepted: a function, or None")
    floats = _SCALARS[role]
    scalars = [jax.ShapeDtypeStruct((), jnp.float32)] * floats + [jax.ShapeDtypeStruct((), jnp.int32)] * 4
    named, listed = (explicit, ()) if isinstance(explicit, Mapping) else ({}, tuple(explicit))
    closed = jax.make_jaxpr(lambda *indices: mod(*indices, *listed, **named))(*scalars)
    if len(closed.out_avals) != 1 or closed.out_avals[0].shape != ():
        shapes = ", ".join(str(tuple(aval.shape)) for aval in closed.out_avals)
        raise ValueError(f"{role} returned arrays of shapes {shapes}; accepted: one 0-d array or a number")
    gradient = getattr(mod, "score_mod_gradient", None) if role == "score_mod" else None
    writer = _Writer(role, is_derived=role == "score_mod" and gradient is None)
    names = ("dscore", *_NAMES)[-(4 + floats) :]
    result = writer.run(closed.jaxpr, [writer.capture(value) for value in closed.consts], list(names))
    body = "".join(f"        {line}\n" for line in [*writer.lines, f"return {writer.scalar(result[0])}"])
    parameters = ", ".join(f"capture_{i}" for i in range(len(writer.arrays)))
    source = f"def make({parameters}):\n    def {role}({', '.join(names)}):\n{body}    return {role}\n"
    return Traced(source, tuple(writer.arrays), None if gradient is None else _trace("score_mod_gradient", gradient))


@functools.lru_cache(maxsize=256)
def _maker(source: str) -> Mod:
    scope: dict[str, Any] = {"torch": torch}
    exec(compile(source, "<a mod written in JAX>", "exec"), scope)
    return scope["make"]  # type: ignore[no-any-return]


class _Scalar(NamedTuple):
    """A scalar: its expression and dtype; is_number tells whether it is a constant."""

    text: str
    dtype: torch.dtype
    is_number: bool = False


class _Array(NamedTuple):
    """A captured array or a part of it: an index for each of its dims, or None for an unindexed dim; and the remaining dims."""

    name: str
    indices: tuple[str | None, ...]
    left: tuple[int, ...]  # the captured array's dim for each dim of this one
    dtype: torch.dtype


class _Writer:
    """Writes the lines of one mod's function. is_derived: its derivative is that of its ops."""

    def __init__(self, role: str, is_derived: bool) -> None:
        self.role, self.is_derived = role, is_derived
        self.lines: list[str] = []
        self.captures: list[jax.Array] = []  # its captures, unconverted
        self.arrays: list[jax.Array] = []
        self.count = 0

    def capture(self, value: Any) -> _Array:
        """Returns a captured array as an argument of the function's factory."""
        index = next((i for i, x in enumerate(self.captures) if x is value), len(self.captures))
        if index == len(self.captures):
            self.captures.append(value)
            self.arrays.append(jnp.asarray(value))  # in JAX's dtype, if it is a NumPy array
        dtype = torch_dtype(f"an array that {self.role} captures", self.arrays[index].dtype)
        return _Array(f"capture_{index}", (None,) * value.ndim, tuple(range(value.ndim)), dtype)

    def scalar(self, value: Any) -> str:
        """Returns the expression of a scalar as a tensor."""
        if isinstance(value, _Array):
            text = ", ".join(str(i) for i in value.indices)
            return f"{value.name}[{text}]" if text else value.name
        return f"torch.full((), {value.text}, dtype={value.dtype})" if value.is_number else value.text

    def run(self, jaxpr: Any, consts: Sequence[jax.Array], arguments: Sequence[object]) -> list[object]:
        """Writes a jaxpr's equations and returns its results. arguments: values, or names of the function's own arguments."""
        env: dict[object, object] = dict(zip(jaxpr.constvars, consts, strict=True))
        producers = {out: e for e in jaxpr.eqns for out in e.outvars}
        for var, value in zip(jaxpr.invars, arguments, strict=True):
            env[var] = _Scalar(value, self.kept_dtype(var.aval)) if isinstance(value, str) else value

        def read(x: object) -> jax.Array:
            if not isinstance(x, Literal):
                return env[x]
            if getattr(x.val, "ndim", 0):
                return self.capture(x.val)
            return self.number(np.asarray(x.val).item(), self.kept_dtype(x.aval))

        for e in jaxpr.eqns:
            name = e.primitive.name
            if name in _NESTED:
                inner = e.params.get("jaxpr") or e.params.get("call_jaxpr")
                if name.startswith("custom") and self.is_derived:
                    self.check_rule(str(getattr(inner, "jaxpr", inner).debug_info.func_src_info))
                inner_consts = [self.capture(value) for value in getattr(inner, "consts", ())]
                values = self.run(getattr(inner, "jaxpr", inner), inner_consts, [read(x) for x in e.invars])
            elif name == "pvary":  # shard_map adds it; the value is unchanged
                values = [read(x) for x in e.invars]
            elif name == "dynamic_slice":
                table, *indices = e.invars
                values = [
                    self.part(read(table), [read(_unwrapped(producers, i)) for i in indices], e.params["slice_sizes"], table.aval)
                ]
            elif name == "slice":
                values = [self.fixed_part(read(e.invars[0]), e)]
            elif name in ("squeeze", "reshape", "broadcast_in_dim", "transpose"):
                values = [self.view(name, read(e.invars[0]), e)]
            else:
                if any(v.aval.shape for v in (*e.invars, *e.outvars)):
                    raise self.refusal(f"{name} of arrays of more than one element")
                values = [self.line(name, [read(x) for x in e.invars], e)]
            env.update(zip(e.outvars, values, strict=True))
        return [read(x) for x in jaxpr.outvars]

    def number(self, value: object, dtype: torch.dtype) -> _Scalar:
        text = f"float({str(value)!r})" if isinstance(value, float) and not np.isfinite(value) else repr(value)
        return _Scalar(text, dtype, is_number=True)

    def kept_dtype(self, aval: jax.core.ShapedArray) -> torch.dtype:
        """Returns a scalar's dtype in a program: float32, int64 or bool."""
        dtype = jnp.dtype(aval.dtype)
        if jnp.issubdtype(dtype, jnp.floating):
            return torch.float32
        if jnp.issubdtype(dtype, jnp.signedinteger) or dtype == jnp.uint8:
            return torch.int64
        if dtype == jnp.bool_:
            return torch.bool
        raise self.refusal(f"{dtype.name} numbers")

    def check_rule(self, source: str) -> None:
        """Raises ValueError for a function with a rule of its own, unless it is JAX's: those rules equal the ops' derivatives.

        source: its name and place, "name at file:line".
        """
        name, _, file = source.partition(" at ")
        if not file.startswith(_JAX):
            raise ValueError(
                f"{self.role} calls {name}, whose jax.custom_jvp or custom_vjp no kernel runs; accepted: functions without a rule, "
                "jax.lax.stop_gradient, and score_mod.score_mod_gradient for a derivative of your own"
            )

    def refusal(self, feature: str) -> ValueError:
        return ValueError(f"{self.role} uses {feature}, which mods do not support; accepted: {_ACCEPTED}")

    def part(self, table: jax.Array, indices: Sequence[Any], sizes: Sequence[int], aval: jax.core.ShapedArray) -> _Array:
        """Returns the part of an array that a dynamic_slice reads: one index of a dim, or the whole dim."""
        if not isinstance(table, _Array):
            raise self.refusal("dynamic_slice of an array that is not captured")
        new_indices = list(table.indices)
        for dim, (index, size) in enumerate(zip(indices, sizes, strict=True)):
            if size == aval.shape[dim] and size != 1:
                continue
            if size != 1:
                raise self.refusal(f"a slice of {size} entries of {aval.shape[dim]}")
            if new_indices[table.left[dim]] is None:
                new_indices[table.left[dim]] = self.scalar(index) if not getattr(index, "is_number", False) else index.text
        return table._replace(indices=tuple(new_indices))

    def fixed_part(self, table: Any, e: Any) -> object:
        """Returns the part of an array that a slice with fixed bounds reads."""
        starts, limits, shape = e.params["start_indices"], e.params["limit_indices"], e.invars[0].aval.shape
        if not shape:
            return table
        if any(step != 1 for step in e.params["strides"] or ()):
            raise self.refusal(f"a slice with strides {e.params['strides']}")
        indices = [_Scalar(str(start), torch.int64, is_number=True) for start in starts]
        return self.part(table, indices, [limit - start for start, limit in zip(starts, limits, strict=True)], e.invars[0].aval)

    def view(self, name: str, value: Any, e: Any) -> object:
        """Returns a value with other dims; only dims of size 1 are added or removed."""
        shape, new = e.invars[0].aval.shape, e.outvars[0].aval.shape
        if shape == new and name != "transpose":
            return value
        if isinstance(value, _Scalar):
            if any(n != 1 for n in new):
                raise self.refusal(f"{name} to {tuple(new)}")
            return value
        if name == "transpose":
            return value._replace(left=tuple(value.left[dim] for dim in e.params["permutation"]))
        remaining = [dim for dim, n in enumerate(shape) if n != 1]
        if name == "squeeze":
            removed = {dim % len(shape) for dim in e.params["dimensions"]}
            indices = list(value.indices)
            for dim in removed:
                indices[value.left[dim]] = indices[value.left[dim]] or "0"
            left = tuple(dim_of_captured for dim, dim_of_captured in enumerate(value.left) if dim not in removed)
            return value._replace(indices=tuple(indices), left=left)
        if not new and not remaining:
            return value._replace(indices=tuple(i or "0" for i in value.indices), left=())
        raise self.refusal(f"{name} of an array from {tuple(shape)} to {tuple(new)}")

    def line(self, name: str, values: Sequence[Any], e: Any) -> _Scalar:
        """Writes one pointwise equation and returns its result."""
        dtype = self.kept_dtype(e.outvars[0].aval)
        dtypes = [self.kept_dtype(x.aval) for x in e.invars]
        texts = [
            f"{self.scalar(x)}.to({d})" if isinstance(x, _Array) and x.dtype is not d else self.scalar(x)
            for x, d in zip(values, dtypes, strict=True)
        ]
        if name in _INFIX or (name == "div" and dtype.is_floating_point):
            are_numbers = [getattr(x, "is_number", False) for x in values]
            # A number stays a number next to a tensor, as in traces of torch mods.
            left, right = (
                x.text if is_known and not all(are_numbers) else t
                for x, t, is_known in zip(values, texts, are_numbers, strict=True)
            )
            text = f"{left} {_INFIX.get(name, '/')} {right}"
        elif name == "div":
            text = f"torch.div({texts[0]}, {texts[1]}, rounding_mode='trunc')"
        elif name == "integer_pow":
            text = f"torch.pow({texts[0]}, {e.params['y']})"
        elif name == "convert_element_type":
            text = texts[0] if dtypes[0] is dtype else f"{texts[0]}.to({dtype})"
        elif name == "select_n":
            if len(values) != 3 or dtypes[0] is not torch.bool:
                raise self.refusal("select_n with more than two cases")
            text = f"torch.where({texts[0]}, {texts[2]}, {texts[1]})"
        elif name == "clamp":
            text = f"torch.minimum(torch.maximum({texts[1]}, {texts[0]}), {texts[2]})"
        elif name == "stop_gradient":
            text = f"{texts[0]}.detach()"
        elif name in _CALLS:
            text = f"{_CALLS[name]}({', '.join(texts)})" if _CALLS[name] else texts[0]
        else:
            raise self.refusal(name)
        self.count += 1
        self.lines.append(f"x{self.count} = {text}")
        return _Scalar(f"x{self.count}", dtype)


def _unwrapped(producers: Mapping[object, Any], x: object) -> object:
    """Returns i of select_n(i < 0, i, i + n), which JAX creates for an index; a read handles negative indices itself."""
    e = None if isinstance(x, Literal) else producers.get(x)
    if e is None or e.primitive.name != "select_n" or len(e.invars) != 3:
        return x
    test, plain, wrapped = e.invars
    t, w = (None if isinstance(v, Literal) else producers.get(v) for v in (test, wrapped))
    if t is None or w is None or t.primitive.name != "lt" or w.primitive.name != "add":
        return x
    zero = t.invars[1]
    is_wrap = t.invars[0] is plain and w.invars[0] is plain and isinstance(zero, Literal) and zero.val == 0
    return plain if is_wrap else x
