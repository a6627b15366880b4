"""Automatic sharding: a call on several devices is split over its batch and its key heads.

XLA's partitioner, Shardy, reads a rule that names the factors of every dimension (https://openxla.org/shardy/propagation). Each
device then runs its own call. Results that depend on the whole batch or on all heads are reduced over the devices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import ArrayMapping, CompoundFactor, SdyShardingRule, custom_partitioning
from jax.extend.core import Primitive
from jax.sharding import NamedSharding, PartitionSpec

from flexattn.dispatch.mod_program import looks_at, parse_program
from flexattn.dispatch.spec import parse_format
from flexattn.jax.call import SCALED, Call

Factor = str | tuple[str, ...]
Factors = tuple[Factor, ...]
"""The factors of each dimension of an array: batch, head (key head, query head of a group), others; ("key_head", "in_group")."""


class Layout(NamedTuple):
    """The factors of a call's arrays and results, the reductions of results, and the factors that may be split."""

    operands: list[Factors]
    results: list[Factors]
    reductions: list[Callable[[object, object], object] | None]  # over the devices of factors that a result lacks
    sizes: dict[str, int]  # sizes of key_head and in_group, and of batch if there is one
    split: frozenset[str]  # factors that devices may split without changing the result; all others are gathered first


def partitioned(primitive: Primitive, layout_of: Callable[[object, Sequence[tuple[int, ...]]], Layout]) -> Callable[..., object]:
    """Returns a call of the primitive that XLA may split over devices; layout_of: a function of a call and its arrays' shapes."""

    def run(*arrays: jax.Array, call: Call) -> object:
        def run_whole(*arrays: jax.Array) -> Any:
            return primitive.bind(*arrays, call=call)

        layout = layout_of(call, [tuple(x.shape) for x in arrays])

        def partition(mesh: jax.sharding.Mesh, operand_infos: Any, results: object) -> object:
            axes = _axes(layout, operand_infos)

            def local(*arrays: jax.Array) -> Any:
                local_results = run_whole(*arrays)
                return [
                    x if reduce is None else _reduce(x, reduce, factors, axes)
                    for x, reduce, factors in zip(local_results, layout.reductions, layout.results, strict=True)
                ]

            result_shardings, operand_shardings = (
                [NamedSharding(mesh, PartitionSpec(*(axes.get(_names(factor)[0]) for factor in factors))) for factors in side]
                for side in (layout.results, layout.operands)
            )
            return mesh, local, result_shardings, tuple(operand_shardings)

        sharded = custom_partitioning(run_whole)
        sharded.def_partition(partition=partition, sharding_rule=_rule(layout))
        return sharded(*arrays)

    return run


def _split_factors(call: Call, key_heads: int) -> frozenset[str]:
    """Returns the factors that a call may be split over without changing the result."""
    names, settings = call.names(), call.settings
    if call.config is not None or call.out8 is not None or {"rng_state", "block_mask", "kv_indices"} & {*names}:
        return frozenset()  # these need whole tensors (scales), positions (dropout), or whole lists
    factors = {"batch", "key_head", "in_group"}
    program = parse_program(settings.mods)
    if {"cu_seqlens_q", "cu_seqlens_kv"} & {*names} or (program is not None and looks_at(program, "b")):
        factors.discard("batch")
    if program is not None and looks_at(program, "h"):
        factors -= {"key_head", "in_group"}
    if key_heads > 1:
        factors.discard("in_group")  # split only with one key head, whose gradients are then sums over the devices
    return frozenset(factors)


def layout_of_call(call: Call, shapes: Sequence[tuple[int, ...]], is_backward: bool) -> Layout:
    """Returns the layout of attention; shapes: those of the operands, and in a backward of the other inputs."""
    q_format, kv_format = parse_format(call.settings.qkv_format)
    fresh = (f"other{i}" for i in itertools.count())
    key_heads = shapes[1][kv_format.index("h")]
    in_group = shapes[0][q_format.index("h")] // key_heads
    heads: Factor = ("key_head", "in_group") if key_heads > 1 and in_group > 1 else "in_group" if in_group > 1 else "key_head"
    q_factors: dict[str, Factor] = {"b": "batch", "s": "query", "t": "query", "h": heads, "d": "dim"}
    kv_factors: dict[str, Factor] = {"b": "batch", "s": "key", "t": "key", "h": "key_head", "d": "dim"}
    names, batch = call.names(), shapes[0][q_format.index("b")] if "b" in q_format else 0
    if "page_table" in names:  # all sequences may read all pages
        kv_factors |= {"b": "page", "s": "page_row"}
        batch = shapes[names.index("page_table")][0]
    shares_bias = "bias" in names and "t" not in q_format and shapes[names.index("bias")][0] not in (1, batch)
    q, k = tuple(q_factors[letter] for letter in q_format), tuple(kv_factors[letter] for letter in kv_format)
    out, v = _with_value_dim(q), _with_value_dim(k)
    lse: Factors = (heads, "query") if q_format == "thd" else ("batch", heads, "query")
    descale_factors: tuple[Factor, ...] = (heads, "key_head", "key_head")
    descales = iter(descale_factors[-names.count("descales") :])  # with q in 16 bits only k and v have descales

    def factors(name: str, shape: tuple[int, ...]) -> Factors:
        if name in ("q", "k", "v"):
            return {"q": q, "k": k, "v": v}[name]
        if name == "bias":
            return _broadcast((next(fresh) if shares_bias else "batch", heads, "query", "key"), shape, fresh)
        if name in ("softmax_offset", "alibi_slopes"):
            return ("batch", heads)[-len(shape) :]
        if name in ("page_table", "seqused_q", "seqused_kv"):
            return ("batch", next(fresh))[: len(shape)]
        if name == "descales":
            if len(shape) == 4:  # one for each token of a cache
                return (*k[:-1], next(fresh))
            return _broadcast(("batch", next(descales), next(fresh)), shape, fresh)
        return tuple(next(fresh) for _ in shape)

    operands = [factors(*item) for item in zip(names, shapes, strict=False)]
    sizes, split = {"key_head": key_heads, "in_group": in_group, "batch": batch}, _split_factors(call, key_heads)
    if shares_bias:
        split -= {"batch"}  # a device would need its part of the bias, which has fewer entries than the batch
    if not is_backward:
        has_max = call.settings.return_max_logit
        max_logit = (heads if has_max else next(fresh),)
        results: list[Factors] = [out, lse, max_logit]
        if call.out8 is not None:
            results += [out, *(tuple(next(fresh) for _ in range(3)) for _ in range(2))]
        results += [(next(fresh),) for _ in SCALED[1:] if call.is_delayed]
        reductions = [None, None, jax.lax.pmax if has_max else None, *(None for _ in results[3:])]
        return Layout(operands, results, reductions, sizes, split)
    incoming = [out, lse, out, lse][: len(shapes) - len(operands)]
    gradients = [operands[i] for i in call.wanted()]
    amaxes: list[Factors] = [(next(fresh),)] if call.is_delayed else []
    return Layout(
        [*operands, *incoming], [*gradients, *amaxes], [*(jax.lax.psum for _ in gradients), *(None for _ in amaxes)], sizes, split
    )


def _with_value_dim(factors: Factors) -> Factors:
    return tuple("value_dim" if factor == "dim" else factor for factor in factors)


def _broadcast(factors: Factors, shape: tuple[int, ...], fresh: Iterator[str]) -> Factors:
    """Returns the factors of an array, with new factors for dims of size 1."""
    return tuple(next(fresh) if size == 1 else factor for factor, size in zip(factors, shape, strict=True))


def _rule(layout: Layout) -> SdyShardingRule:
    def mapping(factors: Factors) -> ArrayMapping:
        return ArrayMapping(*(CompoundFactor(*factor) if isinstance(factor, tuple) else factor for factor in factors))

    all_names = (name for factors in (*layout.operands, *layout.results) for factor in factors for name in _names(factor))
    in_order = dict.fromkeys(all_names)  # in the order of the first mention, as Shardy requires
    return SdyShardingRule(
        tuple(map(mapping, layout.operands)),
        tuple(map(mapping, layout.results)),
        need_replication_factors=tuple(name for name in in_order if name not in layout.split),
        **({"in_group": layout.sizes["in_group"]} if ("key_head", "in_group") in layout.operands[0] else {}),
    )


def _names(factor: Factor) -> tuple[str, ...]:
    return factor if isinstance(factor, tuple) else (factor,)


def _axes(layout: Layout, operand_infos: Sequence[Any]) -> dict[str, tuple[str, ...]]:
    """Returns the mesh axes over which each factor is split, from the first array that splits it."""
    axes: dict[str, tuple[str, ...]] = {}
    for factors, info in zip(layout.operands, operand_infos, strict=True):
        if not isinstance(info.sharding, NamedSharding):
            continue
        for factor, chosen in zip(factors, info.sharding.spec, strict=False):
            name, names = _names(factor)[0], () if chosen is None else _names(chosen)
            parts = math.prod(info.sharding.mesh.shape[axis] for axis in names)
            taken = {axis for chosen_axes in axes.values() for axis in chosen_axes}
            if name in layout.split - axes.keys() and names and layout.sizes[name] % parts == 0 and not taken & set(names):
                axes[name] = names
    return axes


def _reduce(
    x: jax.Array, reduce: Callable[[object, object], jax.Array], factors: Factors, axes: dict[str, tuple[str, ...]]
) -> jax.Array:
    own_names = {name for factor in factors for name in _names(factor)}
    over = tuple(axis for name, chosen_axes in axes.items() if name not in own_names for axis in chosen_axes)
    if not over:
        return x
    # Only 16 bits are cast: XLA may call this outside of the caller's jax.enable_x64, and a cast to 64 bits would then give 32.
    return reduce(x, over) if x.dtype.itemsize > 2 else reduce(x.astype(jnp.float32), over).astype(x.dtype)
