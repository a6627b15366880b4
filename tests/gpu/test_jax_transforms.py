"""JAX's transforms of calls on a GPU against plain fp64: XLA fuses slices of a loop into launches, and merges equal arrays."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # before JAX reads it: torch needs memory too

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and torch.cuda.is_available() is False")

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'flexattn[jax]'")
jnp = jax.numpy
fj = pytest.importorskip("flexattn.jax")

MANY = 3  # calls that a transform combines
SIZES = {  # queries, keys, heads, key heads, head dim: rows of 128 bytes or more, whose slices XLA fuses
    "one group, several splits": (512, 512, 32, 1, 64),
    "groups": (200, 328, 8, 2, 128),
    "one key head": (200, 200, 1, 1, 16),
}


@pytest.fixture(autouse=True)
def _needs_jax_on_cuda() -> None:
    from flexattn.jax import cuda

    if cuda.device() is None:
        pytest.skip("JAX has no CUDA device: pip install 'jax[cuda13]>=0.11.1'")


def drawn(sizes: tuple[int, ...], dtype: Any) -> dict[str, Any]:
    """Returns arrays of several calls, one after another."""
    sq, skv, h, h_kv, d = sizes
    shapes = {"q": (1, sq, h, d), "k": (1, skv, h_kv, d), "v": (1, skv, h_kv, d), "sink": (h,), "bias": (1, h, sq, skv)}
    shapes |= {"table": (h,), "dout": (1, sq, h, d)}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    with_dtype = ("q", "k", "v", "dout")
    return {
        name: jax.random.normal(key, (MANY, *shape)).astype(dtype if name in with_dtype else jnp.float32)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def ours(x: dict[str, Any]) -> Any:
    return fj.attention(
        x["q"],
        x["k"],
        x["v"],
        attn_mask_type="causal_bottom_right",
        **({"softmax_type": "learnable", "softmax_offset": x["sink"]} if "sink" in x else {}),
        **({"bias_type": "post_scale_bias", "bias": x["bias"]} if "bias" in x else {}),
        **({"score_mod": lambda s, b, h, i, j: s + x["table"][h] * (j % 7)} if "table" in x else {}),
    )


def plain(x: dict[str, Any]) -> Any:
    """Returns the same, step by step in the arrays' own dtype."""
    q, k, v = x["q"], x["k"], x["v"]
    group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(y, group, 2) for y in (k, v))
    scores = jnp.einsum("bihd,bjhd->bhij", q, k) / q.shape[3] ** 0.5
    i, j = jnp.arange(q.shape[1])[:, None], jnp.arange(k.shape[1])[None]
    if "bias" in x:
        scores = scores + x["bias"]
    if "table" in x:
        scores = scores + x["table"][:, None, None] * (j % 7)
    scores = jnp.where(i + k.shape[1] - q.shape[1] >= j, scores, -jnp.inf)
    if "sink" in x:
        sink = jnp.broadcast_to(x["sink"][None, :, None, None], (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, sink], 3)
    p = jax.nn.softmax(scores)[..., : k.shape[1]]
    return jnp.einsum("bhij,bjhd->bihd", p, v)


def gradients(function: Callable[[dict[str, Any]], Any], x: dict[str, Any], dout: Any) -> dict[str, Any]:
    out, pull = jax.vjp(function, x)
    return {"out": out, **pull(dout.astype(out.dtype))[0]}


def stacked(function: Callable[[dict[str, Any]], Any], x: dict[str, Any], dout: Any) -> dict[str, Any]:
    """Returns the gradients of each call, one after another."""
    found = [gradients(function, {name: y[i] for name, y in x.items()}, dout[i]) for i in range(MANY)]
    return {name: jnp.stack([one[name] for one in found]) for name in found[0]}


def on_one_device(x: dict[str, Any], dout: Any) -> dict[str, Any]:
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("x")
    call = jax.shard_map(jax.vmap(lambda x, dout: gradients(ours, x, dout)), mesh=mesh, in_specs=spec, out_specs=spec)
    return call(x, dout)  # type: ignore[no-any-return]


TRANSFORMS: dict[str, Callable[[dict[str, Any], Any], dict[str, Any]]] = {
    "vmap of grad": jax.vmap(lambda x, dout: gradients(ours, x, dout)),
    "grad of vmap": lambda x, dout: gradients(jax.vmap(ours), x, dout),
    "scan": lambda x, dout: jax.lax.scan(lambda carry, one: (carry, gradients(ours, *one)), 0, (x, dout))[1],
    "map": lambda x, dout: jax.lax.map(lambda one: gradients(ours, *one), (x, dout)),
    "remat in a scan": lambda x, dout: jax.lax.scan(
        lambda carry, one: (carry, gradients(jax.checkpoint(ours), *one)), 0, (x, dout)
    )[1],
    "shard_map": on_one_device,
}
FEATURES = {"plain": (), "sink": ("sink",), "bias": ("bias",), "capture": ("table",), "all": ("sink", "bias", "table")}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_transforms(dtype: Any, feature: str, size: str) -> None:
    every = drawn(SIZES[size], dtype)
    x, dout = {name: every[name] for name in ("q", "k", "v", *FEATURES[feature])}, every["dout"]
    same = jax.jit(lambda x, dout: stacked(plain, x, dout))(x, dout)
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        wide = jax.tree.map(lambda y: y.astype(jnp.float64), (x, dout))
        exact = jax.jit(lambda x, dout: stacked(plain, x, dout))(*wide)
    for transform, function in TRANSFORMS.items():
        found = jax.jit(function)(x, dout)
        for name, truth in exact.items():
            truth = truth.astype(jnp.float32)
            error, budget = (float(abs(y.astype(jnp.float32) - truth).max()) for y in (found[name], same[name]))
            floor = (2.0**-6 if dtype == jnp.bfloat16 else 2.0**-9) * float(abs(truth).max())  # fp32 products are TF32 in plain JAX
            assert error <= 3.0 * budget + floor, (
                f"{transform}: {name} is off by {error}, plain JAX in {dtype.__name__} by {budget}"
            )


def appended(k: Any, v: Any, new: Any, used: Any) -> Any:
    return fj.append_kv(k, v, new, 2 * new, seqused_kv=used)


def expected_of(k: Any, v: Any, new: Any, used: Any) -> Any:
    rows = jnp.arange(k.shape[1])[None, :, None, None] == used[:, None, None, None]
    return jnp.where(rows, new, k), jnp.where(rows, 2 * new, v)


@pytest.mark.parametrize("kind", ["same", "zeros", "vmap", "vmap of one cache", "scan"])
def test_caches_that_begin_equal_or_are_slices(kind: str) -> None:
    """Both caches of a call are one array, or parts of an array that is read later."""
    cache, news = (
        jax.random.normal(jax.random.key(i), shape).astype(jnp.bfloat16)
        for i, shape in ((1, (3, 2, 64, 4, 64)), (2, (3, 2, 1, 4, 64)))
    )
    used = jnp.array([[3, 60], [0, 1], [5, 6]], jnp.int32)

    def run(append: Any) -> Any:
        zeros = lambda: jnp.zeros(cache.shape[1:], cache.dtype)  # noqa: E731
        cases: dict[str, Callable[[Any], Any]] = {
            "same": lambda c: (append(c[0], c[0], news[0], used[0]), c),
            "zeros": lambda c: append(zeros(), zeros(), news[0], used[0]),
            "vmap": lambda c: (jax.vmap(append)(c, c + 1, news, used), c),
            "vmap of one cache": lambda c: (jax.vmap(append)(c, c, news, used), c),
            "scan": lambda c: jax.lax.scan(lambda kv, x: (append(*kv, *x), kv[0]), (zeros(), zeros()), (news, used)),
        }
        return jax.jit(cases[kind])(cache)

    before = jnp.array(cache, copy=True)
    for a, b in zip(jax.tree.leaves(run(appended)), jax.tree.leaves(run(expected_of)), strict=True):
        assert (a == b).all()
    assert (cache == before).all()


def test_split_keys_in_formats_with_other_strides() -> None:
    x = {name: y[0] for name, y in drawn((200, 200, 4, 1, 16), jnp.float32).items()}

    def loss(fmt: str, q: Any, k: Any, v: Any) -> Any:
        there = ["bshd".index(letter) for letter in fmt]
        return (fj.attention(*(y.transpose(there) for y in (q, k, v)), qkv_format=fmt) ** 2).sum()

    wanted = jax.jit(jax.grad(lambda *y: loss("bshd", *y), (0, 1, 2)))(x["q"], x["k"], x["v"])
    for fmt in ("sbhd", "bhsd"):
        found = jax.jit(jax.grad(lambda *y, fmt=fmt: loss(fmt, *y), (0, 1, 2)))(x["q"], x["k"], x["v"])
        for a, b in zip(found, wanted, strict=True):
            assert float(abs(a - b).max()) <= 2.0**-9 * float(abs(b).max())


def test_deterministic_gradients_of_several_captures_repeat() -> None:
    x = {name: y[0] for name, y in drawn((200, 200, 4, 4, 64), jnp.bfloat16).items()}

    def loss(one: Any, two: Any) -> Any:
        mod = lambda s, b, h, i, j: s * one[h] + two[h] * (j % 7)  # noqa: E731
        out = fj.attention(x["q"], x["k"], x["v"], score_mod=mod, deterministic=True)
        return (out.astype(jnp.float32) ** 2).sum()

    call = jax.jit(jax.grad(loss, (0, 1)))
    first = call(x["table"], x["sink"])
    assert all(abs(g).max() > 0 for g in first)
    for _ in range(5):
        assert all((a == b).all() for a, b in zip(first, call(x["table"], x["sink"]), strict=True))


def test_random_calls_under_transforms() -> None:
    """For a quarter of a minute; `python -m tests.fuzz.jax_calls --device cuda` goes on for longer."""
    from tests.fuzz import jax_calls

    failures: list[Any] = []
    seed = int.from_bytes(os.urandom(3), "big") * 1000
    jax_calls.run(jax_calls.PLACES["cuda"], seed, 15.0, lambda what: failures.append(what) if what["wrong"] else None)
    assert not failures, failures
