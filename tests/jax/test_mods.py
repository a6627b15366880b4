"""Mods written in JAX: the same programs, results and gradients as the same mods in torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flexattn
from flexattn.mods.bands import Masks
from flexattn.mods.trace import trace_mods
from flexattn.testing import (
    GRADIENT_FACTOR,
    check_close,
    make_call,
    make_dout,
    make_inputs,
    reference_attention,
    reference_gradients,
)

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'flexattn[jax]'")
jnp = jax.numpy
fj = pytest.importorskip("flexattn.jax")
mods = pytest.importorskip("flexattn.jax.mods")
meta_tensor = pytest.importorskip("flexattn.jax.call").meta_tensor

SLOPES = [0.5, 0.25, 0.125, 0.1]
EIGHT = jnp.arange(8.0)


def to_torch(array: Any) -> torch.Tensor:
    return torch.from_numpy(jax.device_get(array).copy())


def pairs(m: Any, slopes: Any, scale: Any, table: Any, documents: Any) -> dict[str, tuple[Any, Any]]:
    """Returns mods over m, torch or jax.numpy: (score_mod, mask_mod) by name."""

    def capped(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return 5 * m.tanh(score * scale / 5) - slopes[h] * m.abs(i - j)

    def read(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return score + table[h, i - j + 20] * slopes[h] + table[0, j]

    def pointwise(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        x = m.exp(-m.square(score)) + m.sqrt(m.abs(score) + 1) + m.sin(score) * m.cos(score) + score**3 / 7
        return m.where((i % 3 == j % 2) | (score > 1), x, m.maximum(score, m.log1p(m.abs(score))))

    def in_document(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (documents[b, i] == documents[b, j]) & (i >= j)

    return {
        "capped": (capped, lambda b, h, i, j: i >= j),
        "read": (read, None),
        "pointwise": (pointwise, lambda b, h, i, j: (i - j <= 7) & (j - i < 4)),
        "documents": (None, in_document),
    }


def captures() -> tuple[Any, ...]:
    table = jax.random.normal(jax.random.key(5), (4, 41))
    documents = jnp.sort(jax.random.randint(jax.random.key(6), (2, 21), 0, 4), 1)
    return jnp.asarray(SLOPES), jnp.float32(1.5), table, documents


@pytest.mark.parametrize("name", ["capped", "read", "pointwise", "documents"])
def test_results_and_gradients(name: str) -> None:
    inputs = make_inputs(lengths_q=[21, 21])
    dout = make_dout(inputs)
    arrays = captures()
    tensors = [to_torch(a).requires_grad_(a.dtype == jnp.float32) for a in arrays]
    score_mod, mask_mod = pairs(torch, *tensors)[name]
    traced = trace_mods(score_mod, mask_mod, needs_grad=True)
    spec, x = make_call(inputs, mods=traced)

    def call(q: Any, k: Any, v: Any, *floats: Any) -> Any:
        score_mod, mask_mod = pairs(jnp, *floats, arrays[-1])[name]
        return fj.attention(q, k, v, score_mod=score_mod, mask_mod=mask_mod)

    given = [jnp.asarray(t.numpy()) for t in (inputs.q, inputs.k, inputs.v)]
    out, pull = jax.vjp(call, *given, *arrays[:3])
    dq, dk, dv, *found = pull(jnp.asarray(dout.numpy()))
    out_exact, out_budget = (reference_attention(spec, x, dtype=d)[0] for d in (torch.float64, torch.float32))
    check_close("out", to_torch(out), out_exact, out_budget)
    exact, budget = (reference_gradients(spec, x, dout, dtype=d) for d in (torch.float64, torch.float32))
    for field, got in (("dq", dq), ("dk", dk), ("dv", dv)):
        check_close(field, to_torch(got), getattr(exact, field), getattr(budget, field), factor=GRADIENT_FACTOR)
    wanted = spec.mods.wanted(x.mod_tensors) if spec.mods else ()
    for tensor, *three in zip(wanted, exact.dmod_tensors or (), budget.dmod_tensors or (), strict=True):
        place = next(i for i, t in enumerate(tensors) if t is tensor)
        check_close(f"capture {place}", to_torch(found[place]), *three, factor=GRADIENT_FACTOR)


@pytest.mark.parametrize("name", ["capped", "pointwise", "documents"])
def test_bands_and_masks_equal_those_of_torch(name: str) -> None:
    """Names of captures may differ; score_mods differ in conversions, which JAX writes down."""
    arrays = captures()
    torch_traced = trace_mods(*pairs(torch, *map(to_torch, arrays))[name], masks=Masks.ALL)
    written = {}
    for role, mod in zip(("score_mod", "mask_mod"), pairs(jnp, *arrays)[name], strict=True):
        if mod is not None:
            traced = mods.trace(role, mod)
            written[role] = traced.written({id(array): meta_tensor("a capture", array) for array in traced.arrays})
    jax_traced = trace_mods(written.get("score_mod"), written.get("mask_mod"), masks=Masks.ALL)
    assert (jax_traced.left, jax_traced.right) == (torch_traced.left, torch_traced.right)

    def ops_of(graph: Any) -> list[str] | None:
        return None if graph is None else [str(node.target) for node in graph.nodes if node.op == "call_function"]

    assert ops_of(jax_traced.program.mask) == ops_of(torch_traced.program.mask)


def test_stop_gradient() -> None:
    q, k, v = (jax.random.normal(jax.random.key(n), (2, 5, 2, 8)) for n in range(3))

    def mod(score: Any, *_: Any) -> Any:
        return jax.nn.relu(score) * jax.lax.stop_gradient(score)  # JAX has a rule of its own for relu

    def plain(q: Any) -> Any:
        return jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(mod(jnp.einsum("bihd,bjhd->bhij", q, k) * 8**-0.5), -1), v)

    found = jax.grad(lambda q: (fj.attention(q, k, v, score_mod=mod) ** 2).sum())(q)
    expected = jax.grad(lambda q: (plain(q) ** 2).sum())(q)
    assert jnp.allclose(found, expected, atol=1e-5)


def test_explicit_tensors_and_a_given_gradient() -> None:
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 9, 4, 16))
    slopes = jnp.asarray(SLOPES)

    def mod(score: Any, b: Any, h: Any, i: Any, j: Any, slopes: Any) -> Any:
        return score * slopes[h]

    a = fj.attention(q, k, v, score_mod=mod, score_mod_tensors=(slopes,))
    b = fj.attention(q, k, v, score_mod=mod, score_mod_tensors={"slopes": slopes})
    assert jnp.array_equal(a, b)

    def halved(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return score

    whole = jax.grad(lambda q: fj.attention(q, k, v, score_mod=halved).sum())(q)
    halved.score_mod_gradient = lambda dscore, score, b, h, i, j: dscore / 2  # type: ignore[attr-defined]
    half = jax.grad(lambda q: fj.attention(q, k, v, score_mod=halved).sum())(q)
    assert jnp.allclose(half, whole / 2, atol=1e-7)


def test_a_read_outside_gives_zero() -> None:
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 9, 4, 16))
    table = jnp.full(4, 100.0)
    out = fj.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + table[j + 50])
    assert jnp.allclose(out, fj.attention(q, k, v), atol=1e-6)


def test_block_mask() -> None:
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 40, 4, 16))
    documents = jnp.sort(jax.random.randint(jax.random.key(6), (40,), 0, 3))

    def mask_mod(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (documents[i] == documents[j]) & (i >= j)

    made = fj.create_block_mask(mask_mod, None, None, 40, 40, BLOCK_SIZE=16)
    plain = jax.jit(lambda q: fj.attention(q, k, v, mask_mod=mask_mod))(q)
    assert jnp.allclose(jax.jit(lambda q: fj.attention(q, k, v, block_mask=made))(q), plain, atol=1e-6)
    ours = flexattn.create_block_mask(lambda b, h, i, j: i >= j, None, None, 40, 40, "cpu", 16)
    assert jnp.array_equal(
        fj.create_block_mask(lambda b, h, i, j: i >= j, None, None, 40, 40, 16).lists[0], ours.kv_num_blocks.numpy()
    )
    with pytest.raises(ValueError, match="outside of jit"):
        jax.jit(lambda d: fj.create_block_mask(lambda b, h, i, j: d[i] == d[j], None, None, 40, 40).lists)(documents)
    with pytest.raises(ValueError, match="accepted: one of the two"):
        fj.attention(q, k, v, block_mask=made, mask_mod=mask_mod)
    with pytest.raises(ValueError, match="at least 64 queries"):
        long = jax.random.normal(jax.random.key(0), (1, 64, 4, 16))
        fj.attention(long, long, long, block_mask=made)


@jax.custom_jvp
def rounded(x: Any) -> Any:
    return jnp.round(x)


rounded.defjvp(lambda primals, tangents: (rounded(*primals), tangents[0]))


@pytest.mark.parametrize(
    ("mod", "text"),
    [
        (lambda s, b, h, i, j: rounded(s), "score_mod calls rounded, whose jax.custom_jvp or custom_vjp no kernel runs; accepted"),
        (lambda s, b, h, i, j: jnp.sum(jnp.ones(3) * s), "score_mod uses broadcast_in_dim to (3,)"),
        (lambda s, b, h, i, j: jnp.stack([s, s]), "score_mod returned arrays of shapes (2,)"),
        (lambda s, b, h, i, j: jax.lax.lgamma(s), "score_mod uses lgamma, which mods do not support; accepted: scalar arithmetic"),
        (lambda s, b, h, i, j: s + i.astype(jnp.uint32), "score_mod uses uint32 numbers"),
        (lambda s, b, h, i, j: s + EIGHT[::2][h], "score_mod uses a slice with strides (2,)"),
        (3, "score_mod is 3 (int); accepted: a function"),
    ],
    ids=["a rule", "arrays", "shape", "op", "dtype", "strides", "kind"],
)
def test_errors(mod: Any, text: str) -> None:
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 9, 4, 16))
    with pytest.raises((ValueError, TypeError)) as caught:
        fj.attention(q, k, v, score_mod=mod)
    assert text in str(caught.value)
