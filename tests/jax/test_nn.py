"""dot_product_attention against JAX's own, which computes in float32 too; the reference in fp64 checks `attention` itself."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import flexattn
from tests.jax.arrays import normal

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'flexattn[jax]'")
jnp = jax.numpy
fj = pytest.importorskip("flexattn.jax")


MASK = jax.random.bernoulli(jax.random.key(4), 0.7, (2, 1, 9, 11)).at[..., 0].set(True)


@pytest.mark.parametrize(
    "arguments",
    [
        {"is_causal": True, "scale": 0.3},
        {"local_window_size": 3},
        {"is_causal": True, "local_window_size": (4, 0)},
        {"bias": normal(5, 1, 4, 9, 11), "mask": MASK},
        {"query_seq_lengths": jnp.array([9, 9]), "key_value_seq_lengths": jnp.array([4, 11])},
    ],
    ids=lambda arguments: "-".join(arguments),
)
def test_equals_that_of_jax(arguments: dict[str, Any]) -> None:
    q, k, v = normal(0, 2, 9, 4, 16), normal(1, 2, 11, 2, 16), normal(2, 2, 11, 2, 16)

    def both(function: Any) -> Any:
        (out, lse), pull = jax.vjp(lambda *x: function(*x, **arguments, return_residual=True), q, k, v)
        return out, lse, pull((out, jnp.zeros_like(lse)))

    found, expected = both(fj.dot_product_attention), both(jax.nn.dot_product_attention)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert jnp.allclose(a, b, rtol=1e-5, atol=1e-5)


BIASES: dict[str, Any] = {
    "one dim": {"bias": normal(6, 11), "mask": jnp.arange(11) < 7},
    "two dims": {"bias": normal(6, 9, 11), "mask": jnp.tril(jnp.ones((9, 11), bool))},
    "integers": {"bias": jnp.arange(11)},
    "booleans": {"bias": jnp.arange(11) > 4},
    "another dtype": {"bias": normal(6, 9, 11).astype(jnp.float16)},
    "numbers": {"bias": jnp.float32(2.0), "mask": jnp.array(True)},
}


@pytest.mark.parametrize("name", BIASES)
def test_biases_and_masks_that_jax_takes(name: str) -> None:
    q, k, v = normal(0, 2, 9, 4, 16), normal(1, 2, 11, 2, 16), normal(2, 2, 11, 2, 16)
    found, expected = (f(q, k, v, **BIASES[name]) for f in (fj.dot_product_attention, jax.nn.dot_product_attention))
    assert jnp.allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.sample(values=False)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_the_residual_is_that_of_jax(dtype: Any) -> None:
    """In the dtype of query, without a gradient, and with JAX's number if a query sees no key."""
    q, k, v = (x.astype(dtype) for x in (normal(0, 2, 9, 4, 16), normal(1, 2, 11, 4, 16), normal(2, 2, 11, 4, 16)))
    mask = jnp.arange(9)[:, None] < jnp.full((1, 11), 5)

    def both(function: Any) -> Any:
        residual, pull = jax.vjp(lambda *x: function(*x, mask=mask, return_residual=True)[1], q, k, v)
        return residual, *pull(jnp.ones_like(residual))

    (found, *gradients), (expected, *_) = both(fj.dot_product_attention), both(jax.nn.dot_product_attention)
    assert found.dtype == expected.dtype == dtype
    assert jnp.allclose(found.astype(jnp.float32), expected.astype(jnp.float32), rtol=1e-2 if dtype != jnp.float32 else 1e-6)
    assert not any(x.any() for x in gradients)


def test_without_a_batch() -> None:
    q, k, v = normal(0, 9, 4, 16), normal(1, 11, 4, 16), normal(2, 11, 4, 16)
    out, lse = fj.dot_product_attention(q, k, v, is_causal=True, return_residual=True)
    assert lse.shape == (9, 4)
    assert jnp.allclose(out, jax.nn.dot_product_attention(q, k, v, is_causal=True), atol=1e-5)


def test_signature_is_that_of_the_installed_jax() -> None:
    ours, theirs = (inspect.signature(f).parameters for f in (fj.dot_product_attention, jax.nn.dot_product_attention))
    assert [(p.name, p.kind, p.default) for p in ours.values()] == [(p.name, p.kind, p.default) for p in theirs.values()]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"implementation": "xla"}, "implementation is 'xla'; accepted: None, so that flexattn selects a backend, or 'cudnn'"),
        ({"mask": jnp.ones((1, 1, 9, 11))}, "mask has dtype float32; accepted: bool"),
        ({"mask": jnp.ones((1, 1, 8, 11), bool)}, "mask has shape (1, 1, 8, 11); accepted: (2, 4, 9, 11)"),
        ({"query": jnp.ones(3)}, "query has shape (3,); accepted: an array of 4 dims"),
        ({"query_seq_lengths": jnp.ones(3, int)}, "query_seq_lengths has shape (3,); accepted: (2,)"),
    ],
    ids=["implementation", "dtype", "shape", "query", "lengths"],
)
def test_errors(arguments: dict[str, Any], text: str) -> None:
    given = {"query": normal(0, 2, 9, 4, 16), "key": normal(1, 2, 11, 2, 16), "value": normal(2, 2, 11, 2, 16)}
    with pytest.raises((ValueError, TypeError)) as caught:
        fj.dot_product_attention(**(given | arguments))
    assert text in str(caught.value)


def test_implementation_cudnn_asks_for_that_backend() -> None:
    q = jax.random.normal(jax.random.key(0), (2, 32, 4, 16))
    with pytest.raises(flexattn.BackendError, match="backend='cudnn' cannot run the forward"):
        fj.dot_product_attention(q, q, q, implementation="cudnn")
