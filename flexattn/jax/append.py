"""`append_kv` for JAX arrays: a function from caches to caches, which XLA computes in place if possible."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.interpreters import ad
from torch import Tensor

from flexattn import append as torch_append
from flexattn import validation
from flexattn.dispatch import append as dispatched
from flexattn.dispatch import options
from flexattn.dispatch import plan as plans
from flexattn.dispatch.plan import Device, Plan
from flexattn.dispatch.select import BackendError
from flexattn.dispatch.spec import parse_format
from flexattn.jax.call import meta_tensor
from flexattn.jax.primitives import bind, operator
from flexattn.jax.sharding import Factor, Factors, Layout

_ARGUMENTS = (
    *("k_cache", "v_cache", "k_new", "v_new", "seqused_kv", "page_table", "cu_seqlens_q", "seqused_q"),
    *("descale_k", "descale_v"),
)
_OPTIONAL = _ARGUMENTS[_ARGUMENTS.index("seqused_kv") + 1 :]


def append_kv(
    k_cache: jax.Array,
    v_cache: jax.Array,
    k_new: jax.Array,
    v_new: jax.Array,
    *,
    seqused_kv: jax.Array,
    page_table: jax.Array | None = None,
    qkv_format: str = "bshd",
    cu_seqlens_q: jax.Array | None = None,
    seqused_q: jax.Array | None = None,
    descale_k: jax.Array | None = None,
    descale_v: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """Returns caches with new keys and values appended to each sequence; arguments and rules are those of `flexattn.append_kv`.

    The arguments are unchanged. XLA writes the new rows into the same memory, on a GPU by one kernel, in two cases: if the caches
    are donated to a jitted function (`jax.jit(step, donate_argnames=...)`), or if a `jax.lax.scan` carries them. Otherwise XLA
    copies the caches first.

    Returns:
        (k_cache, v_cache). If descale_k or descale_v has a factor for each token and head: (k_cache, v_cache, descale_k,
        descale_v), including the new tokens' factors.

    Raises:
        ValueError, TypeError: as `flexattn.append_kv`, when the call is traced.
        BackendError: if the CUDA device has no kernel for such caches, when the call is compiled.
    """
    lengths = (seqused_kv, page_table, cu_seqlens_q, seqused_q)
    values = dict(zip(_ARGUMENTS, (k_cache, v_cache, k_new, v_new, *lengths, descale_k, descale_v), strict=True))
    arrays = {}
    for name, value in values.items():
        if value is None and name in _OPTIONAL:
            continue
        if not isinstance(value, (jax.Array, np.ndarray)):
            raise TypeError(f"{name} is {validation.describe(value)}; accepted: a JAX or NumPy array")
        arrays[name] = jnp.asarray(value)
    call = AppendCall(str(qkv_format), tuple(arrays))
    metas = [meta_tensor(name, x) for name, x in arrays.items()]
    call.checked(metas)
    updated = dict(zip(call.updated(metas), bind(OPERATOR.whole, [*arrays.values()], call), strict=True))
    if len(updated) == 2:
        return tuple(updated.values())
    return tuple(updated.get(name, values[name]) for name in ("k_cache", "v_cache", "descale_k", "descale_v"))


class AppendCall(NamedTuple):
    """A call without its arrays."""

    qkv_format: str
    names: tuple[str, ...]  # the arrays that are passed, in the order of _ARGUMENTS

    def updated(self, arrays: Sequence[jax.Array]) -> list[str]:
        """Returns the names of the updated arrays: the caches, and descales per token."""
        return [
            name
            for name, x in zip(self.names, arrays, strict=True)
            if name.endswith("_cache") or (name.startswith("descale_") and len(x.shape) == 3)
        ]

    def aliases(self, arrays: Sequence[jax.Array]) -> dict[int, int]:
        """Returns the place of each updated array among the results, by its place among the arrays."""
        return {self.names.index(name): i for i, name in enumerate(self.updated(arrays))}

    def checked(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor, dispatched.Appended]:
        """Returns the caches, and the other tensors; raises if an argument is invalid."""
        arguments = dict.fromkeys(_ARGUMENTS) | dict(zip(self.names, tensors, strict=True))
        k_cache, v_cache, k_new, v_new, used, table, cu, used_q, descale_k, descale_v = arguments.values()
        assert k_cache is not None
        assert v_cache is not None
        x = dispatched.Appended(k_new, v_new, table, used, cu, used_q, parse_format(self.qkv_format), descale_k, descale_v)  # type: ignore[arg-type]
        return k_cache, v_cache, torch_append.checked(k_cache, v_cache, x)


def _shapes(call: AppendCall, arrays: Sequence[jax.Array]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(arrays[place].shape, arrays[place].dtype) for place in call.aliases(arrays)]


def run(text: bytes, tensors: list[Tensor]) -> list[Tensor]:
    """Appends, in XLA's memory, and returns the updated tensors."""
    qkv_format, names = json.loads(text)
    torch_append.append_kv(**dict(zip(names, tensors, strict=True)), qkv_format=qkv_format)
    return [tensors[place] for place in AppendCall(qkv_format, tuple(names)).aliases(tensors)]


def _plan(call: AppendCall, signature: tuple[tuple[tuple[int, ...], torch.dtype], ...], target: Device) -> Plan:
    metas = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in signature]
    options.check_all()
    k_cache, v_cache, x = call.checked(metas)
    if reason := dispatched.kernel_error("cuda", target.capability, k_cache.dtype):
        raise BackendError(f"triton cannot append to a cache in {k_cache.dtype}: {reason}; accepted from JAX: a cache in 16 bits")
    updated = [*call.aliases(metas)]

    def append() -> list[Tensor]:
        dispatched.append_by_kernel(k_cache, v_cache, x)
        return [metas[i] for i in updated]

    return plans.record(append, metas, target, updated)


def _layout(call: AppendCall, shapes: Sequence[tuple[int, ...]]) -> Layout:
    """Returns the layout of a call: heads can be split, and the batch of a dense cache with dense new rows."""
    new_format, cache_format = parse_format(call.qkv_format)
    shapes_by_name = dict(zip(call.names, shapes, strict=True))
    has_pages = "page_table" in shapes_by_name
    cache_factors = {"b": "page" if has_pages else "batch", "s": "row", "h": "key_head", "d": "dim"}
    new_factors = {"b": "batch", "s": "token", "t": "token", "h": "key_head", "d": "dim"}

    def factors(name: str, shape: tuple[int, ...]) -> Factors:
        if name.endswith(("_cache", "_new")):
            fmt, dim_factors = (cache_format, cache_factors) if name.endswith("_cache") else (new_format, new_factors)
            return tuple((f"dim_{name[0]}" if letter == "d" else dim_factors[letter]) for letter in fmt)
        if name.startswith("descale_"):
            if len(shape) == 3:
                return tuple(cache_factors[letter] for letter in cache_format[:-1])
            batch_factors: Factors = ("batch", "key_head")[2 - len(shape) :]
            return tuple(f"one_{name}{i}" if size == 1 else f for i, (size, f) in enumerate(zip(shape, batch_factors, strict=True)))
        if name == "cu_seqlens_q":
            return ("ends",)
        table_factors: tuple[Factor, ...] = ("batch", "column")
        return table_factors[: len(shape)]

    operands = [factors(*item) for item in shapes_by_name.items()]
    results = [operands[place] for place in call.aliases([jax.ShapeDtypeStruct(s, "int8") for s in shapes])]
    split = {"key_head"} if has_pages or "cu_seqlens_q" in shapes_by_name else {"key_head", "batch"}
    heads = shapes_by_name["k_cache"][cache_format.index("h")]
    return Layout(
        operands, results, [None] * len(results), {"key_head": heads, "batch": shapes_by_name["seqused_kv"][0]}, frozenset(split)
    )


def _no_gradient(*_: object, **__: object) -> object:
    raise NotImplementedError(
        "append_kv has no gradient but is differentiated; accepted: jax.lax.stop_gradient of the caches and of the new rows"
    )


OPERATOR = operator("flexattn_append", _shapes, run, _plan, _layout)
ad.primitive_jvps[OPERATOR.whole] = _no_gradient
