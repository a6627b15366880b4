"""The attention_fn of flax's multi-head attention: flax's numbers, in its modules if flax is installed."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import numpy as np
import pytest

from tests.jax.arrays import normal

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'flexattn[jax]'")
jnp = jax.numpy
fj = pytest.importorskip("flexattn.jax")
from flexattn.jax.flax import dot_product_attention  # noqa: E402


def plain(q: Any, k: Any, v: Any, bias: Any = 0.0, mask: Any = True) -> Any:
    """Returns attention as flax computes it."""
    scores = jnp.einsum("...qhd,...khd->...hqk", q, k) / np.sqrt(q.shape[-1]) + bias
    return jnp.einsum("...hqk,...khd->...qhd", jax.nn.softmax(jnp.where(mask, scores, -1e30)), v)


TREE = jnp.tril(jnp.ones((9, 9)))
CASES: dict[str, tuple[tuple[int, ...], dict[str, Any], dict[str, Any]]] = {  # batch dims, arguments, arguments of `plain`
    "plain": ((2,), {}, {}),
    "no batch": ((), {"is_causal": True}, {"mask": TREE > 0}),
    "two batch dims, bias of one": ((2, 3), {"bias": normal(4, 3, 1, 9, 9)}, {"bias": normal(4, 3, 1, 9, 9)}),
    "mask of numbers, bias of heads": (
        (2,),
        {"mask": TREE[None, None], "bias": normal(4, 4, 1, 9)},
        {"mask": TREE > 0, "bias": normal(4, 4, 1, 9)},
    ),
    "mask of each sequence": ((3,), {"mask": normal(5, 3, 1, 1, 9) < 1.0}, {"mask": normal(5, 3, 1, 1, 9) < 1.0}),
    "window": ((2,), {"is_causal": True, "window_size": (3, 0)}, {"mask": (TREE - jnp.tril(TREE, -4)) > 0}),
}


@pytest.mark.sample
@pytest.mark.parametrize("name", CASES)
def test_flaxs_numbers_and_gradients(name: str) -> None:
    lead, given, as_plain = CASES[name]
    leaves = [normal(i, *lead, 9, 4, 16) for i in range(3)]
    out, pull = jax.vjp(functools.partial(dot_product_attention, **given), *leaves)
    exact, pull_exact = jax.vjp(functools.partial(plain, **as_plain), *leaves)
    dout = normal(7, *exact.shape)
    for a, b in zip((out, *pull(dout)), (exact, *pull_exact(dout)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5)


def test_dropout_and_dtypes() -> None:
    q, k, v = (normal(i, 2, 9, 4, 16) for i in range(3))
    key = jax.random.key(3)
    dropped = dot_product_attention(q, k, v, dropout_rng=key, dropout_rate=0.5)
    assert (dropped == fj.attention(q, k, v, dropout_p=0.5, rng_state=key)).all()
    assert (dot_product_attention(q, k, v, dropout_rng=key, dropout_rate=0.5, deterministic=True) == fj.attention(q, k, v)).all()
    assert dot_product_attention(q, k.astype(jnp.bfloat16), v).dtype == jnp.float32
    assert dot_product_attention(q, k, v, dtype=jnp.bfloat16).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"precision": "highest"}, "precision is 'highest'; accepted: None"),
        ({"module": 1}, "module is 1; accepted: None, because weights"),
        (
            {"mask": jnp.ones((3, 1, 9, 9))},
            r"mask has shape \(3, 1, 9, 9\); accepted: a shape that broadcasts to .* = \[2, 4, 9, 9\]",
        ),
        ({"key": jnp.ones((1, 9, 4, 16))}, "with the same batch dims"),
        ({"dropout_rate": 0.5}, "rng_state is None with dropout_p > 0"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_has_no_meaning_is_refused(arguments: dict[str, Any], text: str) -> None:
    q = normal(0, 2, 9, 4, 16)
    with pytest.raises(ValueError, match=text):
        dot_product_attention(**({"query": q, "key": q, "value": q} | arguments))


def test_modules_of_linen_and_nnx_take_it() -> None:
    pytest.importorskip("flax", reason="flax is not installed: pip install flax")
    from flax import linen, nnx

    x = normal(0, 2, 9, 32)
    mask = linen.make_causal_mask(x[..., 0])
    theirs, ours = (
        linen.MultiHeadDotProductAttention(num_heads=4, **more) for more in ({}, {"attention_fn": dot_product_attention})
    )
    weights = theirs.init(jax.random.key(1), x)
    expected = theirs.apply(weights, x, mask=mask)
    np.testing.assert_allclose(ours.apply(weights, x, mask=mask), expected, rtol=0, atol=2e-6)
    causal = functools.partial(dot_product_attention, is_causal=True)
    np.testing.assert_allclose(ours.clone(attention_fn=causal).apply(weights, x), expected, rtol=0, atol=2e-6)
    dropping = ours.clone(dropout_rate=0.5, deterministic=False)
    assert abs(dropping.apply(weights, x, rngs={"dropout": jax.random.key(2)}) - expected).max() > 0.1

    made = [
        nnx.MultiHeadAttention(4, 32, decode=False, rngs=nnx.Rngs(0), **more)
        for more in ({}, {"attention_fn": dot_product_attention})
    ]
    a, b = (layer(x, is_causal=True) for layer in made)
    np.testing.assert_allclose(a, b, rtol=0, atol=2e-6)
    for function in (linen.dot_product_attention, nnx.dot_product_attention):
        shared = [*inspect.signature(function).parameters][:12]
        assert [*inspect.signature(dot_product_attention).parameters][:12] == shared
