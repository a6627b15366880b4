"""Ways in which JAX runs a function: shard_map with its check, eager, without jit, exported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import flexattn

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'flexattn[jax]'")
jnp = jax.numpy
fj = pytest.importorskip("flexattn.jax")

P = jax.sharding.PartitionSpec
BY_BATCH = P("b")


@pytest.fixture(scope="module")
def qkv() -> list[Any]:
    return list(jax.random.normal(jax.random.key(0), (3, 4, 12, 2, 16)))


def causal(*x: Any) -> Any:
    return fj.attention(*x, attn_mask_type="causal")


def both(function: Callable[..., Any], *x: Any) -> Any:
    """Returns a function's result and the gradients of its arguments."""
    out, pull = jax.vjp(function, *x)
    return (out, *pull(jnp.cos(out)))


def check(found: Any, expected: Any) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert jnp.allclose(a, b, rtol=1e-5, atol=1e-5)


def on_mesh(function: Callable[..., Any], specs: Any = BY_BATCH, **how: Any) -> Callable[..., Any]:
    mesh = jax.make_mesh((4,), ("b",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=BY_BATCH, **how)  # type: ignore[no-any-return]


@pytest.mark.usefixtures("four_devices")
@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("jitted", [True, False])
def test_gradients_inside_of_a_shard_map(qkv: list[Any], jitted: bool, checked: bool) -> None:
    call = on_mesh(lambda *x: both(causal, *x), check_vma=checked)
    check((jax.jit(call) if jitted else call)(*qkv), both(causal, *qkv))


@pytest.mark.usefixtures("four_devices")
def test_a_shard_map_without_jit(qkv: list[Any]) -> None:
    check(on_mesh(causal)(*qkv), causal(*qkv))


@pytest.mark.usefixtures("four_devices")
def test_the_gradient_of_what_all_devices_share_is_summed(qkv: list[Any]) -> None:
    """q is split, and all devices have the same k, v, sink and table."""
    q, k, v = qkv[0], qkv[1][:1], qkv[2][:1]
    more = (jnp.array([0.5, -1.0]), jnp.array([0.3, 0.7]))

    def call(q: Any, k: Any, v: Any, sink: Any, table: Any) -> Any:
        k, v = (jnp.broadcast_to(x, (q.shape[0], *x.shape[1:])) for x in (k, v))
        return fj.attention(
            q, k, v, softmax_type="learnable", softmax_offset=sink, score_mod=lambda s, b, h, i, j: s + table[h] * j
        )

    sharded = on_mesh(call, (P("b"), P(), P(), P(), P()))
    check(jax.jit(lambda *x: both(sharded, *x))(q, k, v, *more), both(call, q, k, v, *more))


@pytest.mark.usefixtures("four_devices")
def test_caches_and_quantities_inside_of_a_checked_shard_map(qkv: list[Any]) -> None:
    q, k, v = qkv
    append = lambda k, v: fj.append_kv(k, v, k[:, :1], v[:, :1], seqused_kv=jnp.full(k.shape[0], 5, jnp.int32))  # noqa: E731
    check(jax.jit(on_mesh(append))(k, v), append(k, v))
    quantised = lambda q: fj.fp8.quantize(q.astype(jnp.bfloat16), flexattn.fp8.Recipe(granularity="head")).descale  # noqa: E731
    assert jax.jit(on_mesh(quantised))(q).shape == (4, 2, 1)


@pytest.mark.usefixtures("four_devices")
def test_mods_inside_of_a_shard_map_may_mix_what_devices_share_and_what_they_do_not(qkv: list[Any]) -> None:
    table, factor = jax.random.normal(jax.random.key(1), (4, 2)), jnp.float32(0.5)

    def call(q: Any, k: Any, v: Any, table: Any) -> Any:
        return fj.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + table[0, h] * factor * j)

    found = jax.jit(on_mesh(lambda *x: both(call, *x)))(*qkv, table)
    check([x[2:3] for x in found], both(call, *(x[2:3] for x in (*qkv, table))))


CALLS: dict[str, Callable[..., Any]] = {
    "attention": lambda q, k, v: both(causal, q, k, v),
    "vmap": lambda q, k, v: jax.vmap(causal)(*(x[:, None] for x in (q, k, v))),
    "loop": lambda q, k, v: jax.vmap(
        lambda sink: both(lambda q: fj.attention(q, k, v, softmax_type="learnable", softmax_offset=sink), q)
    )(jnp.ones((2, 2))),
    "scan": lambda q, k, v: jax.lax.scan(lambda carry, x: (carry, both(causal, x, k, v)), 0, q[None])[1],
    "append_kv": lambda q, k, v: fj.append_kv(k, v, q[:, :1], q[:, :1], seqused_kv=jnp.zeros(4, jnp.int32)),
    "quantize": lambda q, k, v: fj.fp8.quantize(q.astype(jnp.bfloat16)).descale,
}


@pytest.mark.parametrize("name", CALLS)
def test_disable_jit(qkv: list[Any], name: str) -> None:
    expected = jax.jit(CALLS[name])(*qkv)
    with jax.disable_jit():
        check(CALLS[name](*qkv), expected)


def test_checkpoint_of_calls_in_a_scan(qkv: list[Any]) -> None:
    """The gradient of several layers, each of which runs its forward again."""

    def layers(attend: Any, q: Any) -> Any:
        return jax.lax.scan(lambda x, _: (attend(x, x, x), None), q, None, length=3)[0]

    expected = both(lambda q: layers(causal, q), qkv[0])
    check(jax.jit(lambda q: both(lambda q: layers(jax.checkpoint(causal), q), q))(qkv[0]), expected)


@pytest.mark.parametrize("place", [0, 1])
def test_export_of_symbolic_sizes_is_refused(place: int) -> None:
    shape: list[Any] = [2, 12, 2, 16]
    (shape[place],) = jax.export.symbolic_shape("n")
    q = jax.ShapeDtypeStruct(tuple(shape), jnp.float32)
    with pytest.raises(ValueError, match=r"q has shape \(.*n.*\), with symbolic sizes; accepted: sizes that are numbers"):
        jax.export.export(jax.jit(causal))(q, q, q)


def test_torchs_default_device_changes_nothing(qkv: list[Any]) -> None:
    recipe = flexattn.fp8.Recipe(scaling="delayed")
    expected = both(lambda *x: fj.attention(*x, bias_type="alibi"), *qkv), fj.fp8.DelayedScaling.create(recipe, 2)
    with torch.device("meta"):
        found = both(lambda *x: fj.attention(*x, bias_type="alibi"), *qkv), fj.fp8.DelayedScaling.create(recipe, 2)
    check(found, expected)
