"""Calls over several JAX devices, split by XLA and by shard_map, compared with the same calls on one device.

GPUs run the kernels. If JAX has several CPU devices (XLA_FLAGS=--xla_force_host_platform_device_count=4), they run the eager
backend on smaller shapes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # before JAX reads it: torch needs memory too

import numpy as np
import pytest
import torch

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'flexattn[jax]'")
jnp = jax.numpy
fj = pytest.importorskip("flexattn.jax")

HAS_GPU = torch.cuda.is_available()
pytestmark = [] if HAS_GPU else [pytest.mark.slow]  # tests/jax/test_sharding.py has as much by default

NamedSharding, P = jax.sharding.NamedSharding, jax.sharding.PartitionSpec
DTYPE, TOKENS, DIM = (jnp.bfloat16, 1024, 128) if HAS_GPU else (jnp.float32, 24, 16)
PARTS = {"batch": P("x"), "heads": P(None, None, "x")}  # of [b, s, h, d]
ROUNDING = 2.0**-7 if HAS_GPU else 2e-5  # sums over devices are made in float32 and rounded to DTYPE once more


@pytest.fixture(scope="module", autouse=True)
def mesh() -> Any:
    devices = jax.devices()
    if len(devices) < 2:
        pytest.skip(f"needs two devices or more, and JAX has {len(devices)}: {devices[0].platform}")
    return jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=devices[:2])


def normal(seed: int, *shape: int, dtype: Any = DTYPE) -> Any:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def qkv(heads_kv: int = 4) -> dict[str, Any]:
    return {"q": normal(0, 4, TOKENS, 4, DIM), **{n: normal(i, 4, TOKENS, heads_kv, DIM) for i, n in enumerate("kv", 1)}}


def both(leaves: dict[str, Any], dout: Any, **arguments: Any) -> dict[str, Any]:
    """Returns out, lse and the gradients of the leaves."""

    def call(leaves: dict[str, Any]) -> Any:
        given = {name: x for name, x in leaves.items() if name != "slopes"}
        more = {"score_mod": lambda s, b, h, i, j: s - leaves["slopes"][h] * (i - j)} if "slopes" in leaves else {}
        return fj.attention(**given, **more, **arguments, return_lse=True, deterministic=True)

    (out, lse), pull = jax.vjp(call, leaves)
    (gradients,) = pull((dout, lse / 8))
    return {"out": out, "lse": lse} | {f"d{name}": x for name, x in gradients.items()}


def differences(found: dict[str, Any], expected: dict[str, Any], exact: Sequence[str]) -> list[str]:
    """Returns results that differ by more than the rounding of a sum over devices; results in `exact` must not differ."""
    wrong = []
    for name, b in expected.items():
        a, b = jax.device_get(found[name]).astype("float32"), jax.device_get(b).astype("float32")
        assert a.shape == b.shape, name
        off = abs(np.subtract(a, b, where=a != b, out=np.zeros_like(b))).max()  # a query without keys has -inf in both
        if name in exact and off != 0:
            wrong.append(f"{name} differs by {off}, where it must not")
        elif not off <= ROUNDING * max(1.0, abs(b[np.isfinite(b)]).max()):
            wrong.append(f"{name} differs by {off}")
    return wrong


SINK = {"softmax_type": "learnable"}
CAUSAL = {"attn_mask_type": "causal"}
WINDOW = {**CAUSAL, "window_size": (TOKENS // 3, 0), "softcap": 20.0}
QKV = ("out", "lse", "dq", "dk", "dv")
# name: (leaves beside q, k, v, heads of k and v, arguments, results that must be equal to the bit), for each way to split
CASES: dict[str, tuple[dict[str, tuple[int, ...]], int, dict[str, Any], Sequence[str]]] = {
    "causal": ({}, 4, CAUSAL, QKV),
    "grouped heads, window, softcap": ({}, 2, WINDOW, QKV),
    "bias for all sequences": ({"bias": (1, 4, TOKENS, TOKENS)}, 4, {"bias_type": "post_scale_bias"}, QKV),
    "sink": ({"softmax_offset": (4,)}, 4, {**CAUSAL, **SINK}, QKV),
    "ALiBi": ({}, 4, {**CAUSAL, "bias_type": "alibi"}, QKV),
    "mod of positions": ({}, 2, {**CAUSAL, "score_mod": lambda s, b, h, i, j: s - 0.125 * (i - j)}, QKV),
    "mod that captures": ({"slopes": (4,)}, 4, CAUSAL, QKV),
    "dropout": ({}, 4, {**CAUSAL, "dropout_p": 0.25, "rng_state": np.array([0, 3], np.uint32)}, QKV),
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", CASES)
def test_split_by_xla(mesh: Any, name: str, part: str) -> None:
    shapes, heads_kv, arguments, exact = CASES[name]
    leaves = qkv(heads_kv) | {n: normal(5, *s, dtype=jnp.float32 if n == "slopes" else DTYPE) for n, s in shapes.items()}
    dout = normal(7, 4, TOKENS, 4, DIM)
    if not HAS_GPU:
        exact = ()  # torch's matrix products on a CPU round by the size of a batch
    expected = jax.jit(partial(both, **arguments))(leaves, dout)
    specs = {n: PARTS[part] if x.shape == dout.shape or n in "qkv" else P() for n, x in leaves.items()}
    placed = {n: jax.device_put(x, NamedSharding(mesh, specs[n])) for n, x in leaves.items()}
    compiled = jax.jit(partial(both, **arguments)).lower(placed, jax.device_put(dout, NamedSharding(mesh, PARTS[part]))).compile()
    found = compiled(placed, jax.device_put(dout, NamedSharding(mesh, PARTS[part])))
    assert not differences(found, expected, exact)
    gathers = [line for line in compiled.as_text().splitlines() if " all-gather" in line and f",{TOKENS}," in line]
    must_gather = name == "dropout" or (name == "mod that captures" and part == "heads")
    assert bool(gathers) == must_gather, gathers
    if not must_gather:
        assert {shard.device for shard in found["dk"].addressable_shards} == set(mesh.devices.flat)
        assert found["dk"].addressable_shards[0].data.size == leaves["k"].size // 2


@pytest.mark.parametrize("part", PARTS)
def test_shard_map(mesh: Any, part: str) -> None:
    leaves, dout = qkv(2), normal(7, 4, TOKENS, 4, DIM)
    expected = jax.jit(partial(both, **WINDOW))(leaves, dout)
    lse_spec = P("x") if part == "batch" else P(None, "x")
    results = dict.fromkeys(expected, PARTS[part]) | {"lse": lse_spec}
    specs: dict[str, Any] = {"mesh": mesh, "in_specs": (PARTS[part], PARTS[part]), "out_specs": results, "check_vma": False}
    found = jax.jit(jax.shard_map(partial(both, **WINDOW), **specs))(leaves, dout)
    assert not differences(found, expected, QKV if HAS_GPU else ())


def test_packed_sequences_by_batch(mesh: Any) -> None:
    """Each device has sequences of its own: equally many tokens and sequences in all, of other lengths."""
    lengths = [(TOKENS // 2, 0, TOKENS // 3), (7, TOKENS - 100 if HAS_GPU else 9, 5)]
    cu = jnp.array([[0, *(sum(some[: i + 1]) for i in range(3))] for some in lengths], jnp.int32)
    leaves = {n: normal(i, 2, TOKENS, heads, DIM) for i, (n, heads) in enumerate((("q", 4), ("k", 2), ("v", 2)))}
    dout = normal(7, 2, TOKENS, 4, DIM)

    def one(leaves: Any, dout: Any, cu: Any) -> Any:
        arguments = {"qkv_format": "thd", "attn_mask_type": "padding_causal", "cu_seqlens_q": cu, "cu_seqlens_kv": cu}
        return both(leaves, dout, **arguments, max_seqlen_q=TOKENS, max_seqlen_kv=TOKENS)

    def local(*parts: Any) -> Any:
        return jax.tree.map(lambda x: x[None], one(*jax.tree.map(lambda x: x[0], parts)))

    found = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False))(leaves, dout, cu)
    for i in range(2):
        expected = jax.jit(one)(*jax.tree.map(lambda x: x[i], (leaves, dout, cu)))  # noqa: B023
        assert not differences({n: x[i] for n, x in found.items()}, expected, QKV if HAS_GPU else ())


def test_each_device_drops_by_its_own_key(mesh: Any) -> None:
    leaves, dout = qkv(), normal(7, 4, TOKENS, 4, DIM)
    keys = jax.random.key_data(jax.random.split(jax.random.key(3), 2))

    def one(leaves: Any, dout: Any, key: Any) -> Any:
        return both(leaves, dout, **CAUSAL, dropout_p=0.25, rng_state=key)

    local: Callable[..., Any] = lambda leaves, dout, key: one(leaves, dout, key[0])  # noqa: E731
    found = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False))(leaves, dout, keys)
    for i in range(2):
        half = slice(2 * i, 2 * i + 2)
        expected = jax.jit(one)(*jax.tree.map(lambda x: x[half], (leaves, dout)), keys[i])  # noqa: B023
        assert not differences({n: x[half] for n, x in found.items()}, expected, QKV if HAS_GPU else ())


def test_scan_over_layers_of_a_mesh(mesh: Any) -> None:
    """Each of three calls in a row reads the results of the call before it, on all devices."""
    leaves = qkv()

    def layers(leaves: Any) -> Any:
        call = partial(fj.attention, **CAUSAL, deterministic=True)
        return jax.lax.scan(lambda x, _: (call(x, leaves["k"], leaves["v"]), None), leaves["q"], None, length=3)[0]

    expected = jax.jit(jax.grad(lambda x: (layers(x).astype(jnp.float32) ** 2).sum()))(leaves)
    placed = jax.device_put(leaves, NamedSharding(mesh, PARTS["heads"]))
    found = jax.jit(jax.grad(lambda x: (layers(x).astype(jnp.float32) ** 2).sum()))(placed)
    assert not differences(found, expected, ("q", "k", "v") if HAS_GPU else ())


OVER_AXIS: dict[str, dict[str, Any]] = {
    "causal": CAUSAL,
    "causal, window, softcap": WINDOW,
    "no mask": {},
    "window": {"window_size": (TOKENS // 4, 5)},
    "mod of positions": {**CAUSAL, "score_mod": lambda s, b, h, i, j: s - 0.01 * (i - j)},
    "dropout": {**CAUSAL, "dropout_p": 0.25, "rng_state": np.array([0, 3], np.uint32)},
    "dropout, window": {"window_size": (TOKENS // 4, 5), "dropout_p": 0.25, "rng_state": np.array([0, 3], np.uint32)},
}


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("name", OVER_AXIS)
def test_sequences_over_an_axis(mesh: Any, name: str, layout: str) -> None:
    leaves, dout = qkv(2), normal(7, 4, TOKENS, 4, DIM)
    expected = jax.jit(partial(both, **OVER_AXIS[name]))(leaves, dout)
    order, spec = fj.sequence_order(TOKENS, 2, layout), P(None, "x")

    def part(leaves: Any, dout: Any) -> Any:
        def call(leaves: Any) -> Any:
            how = {"axis_name": "x", "layout": layout, "return_lse": True, "deterministic": True}
            return fj.attention_over_axis(**leaves, **OVER_AXIS[name], **how)

        (out, lse), pull = jax.vjp(call, leaves)
        (gradients,) = pull((dout, lse / 8))
        return {"out": out, "lse": lse} | {f"d{n}": x for n, x in gradients.items()}

    results = dict.fromkeys(expected, spec) | {"lse": P(None, None, "x")}
    sharded = jax.jit(jax.shard_map(part, mesh=mesh, in_specs=spec, out_specs=results, check_vma=False))
    found = sharded({n: x[:, order] for n, x in leaves.items()}, dout[:, order])
    back = np.argsort(order)
    found = {n: x[:, :, back] if n == "lse" else x[:, back] for n, x in found.items()}
    assert not differences(found, expected, ())
