"""Kept calls: the second of two equal calls is not prepared again, and a call that differs in anything is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import flexattn

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'flexattn[jax]'")
jnp = jax.numpy
front = pytest.importorskip("flexattn.jax.front")
attention = front.attention

Q, K, V = (jax.random.normal(jax.random.key(n), (1, 5, 2, 16)) for n in range(3))
CU = jnp.array([0, 2, 5], jnp.int32)


@pytest.fixture(autouse=True)
def prepared(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The arguments of each call that is prepared, from an empty cache on."""
    calls: list[Any] = []
    given = front._given

    def note(arguments: Any) -> Any:
        calls.append(arguments)
        return given(arguments)

    monkeypatch.setattr(front, "_given", note)
    front._kept.clear()
    yield calls
    front._kept.clear()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"window_size": (1, 0), "softmax_scale": 0.5},
        {"attn_mask_type": "padding", "cu_seqlens": jnp.array([0, 3], jnp.int32)},
        {"bias": jnp.ones((1, 1, 5, 5)), "return_lse": True},
        {"softmax_offset": jnp.ones(2)},
    ],
)
def test_a_second_call_is_not_prepared_and_reads_its_own_arrays(prepared, options):
    attention(Q, K, V, **options)
    found = attention(K, V, Q, **options)
    assert len(prepared) == 1
    front._kept.clear()
    wanted = attention(K, V, Q, **options)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True))


def test_a_call_that_differs_is_prepared(prepared, monkeypatch):
    calls = [
        {},
        {"softmax_scale": 0.5},
        {"softmax_scale": 0.25},
        {"window_size": (2, 1)},
        {"window_size": flexattn.Window(2, 1)},
        {"deterministic": True},
        {"return_lse": True},
        {"alibi_slopes": jnp.ones(2)},
        {"alibi_slopes": jnp.ones((1, 2))},
        {"score_mod": lambda score, b, h, q_idx, kv_idx: score * 2.0},
    ]
    for n, options in enumerate(calls, start=1):
        attention(Q, K, V, **options)
        assert len(prepared) == n, options
    attention(Q, Q, V)  # one array twice
    attention(Q[:, :3], K, V)
    attention(*(x.astype(jnp.bfloat16) for x in (Q, K, V)))
    with flexattn.attention_backend("eager"):
        attention(Q, K, V)
    monkeypatch.setenv("FLEXATTN_BACKEND", "eager")
    attention(Q, K, V)
    assert len(prepared) == len(calls) + 5


def test_what_was_right_does_not_excuse_what_is_not(prepared):
    attention(Q, K, V, softcap=1.0, return_lse=True)
    for wrong in ({"softcap": True}, {"return_lse": 1}, {"softcap": jnp.float32(1.0)}):
        with pytest.raises((TypeError, ValueError)):
            attention(Q, K, V, **{"softcap": 1.0, "return_lse": True} | wrong)
    q, k, v = (x[0] for x in (Q, K, V))
    packing: dict[str, Any] = {"qkv_format": "thd", "causal": True, "max_seqlen": 3, "cu_seqlens_q": CU}
    attention(q, k, v, **packing, cu_seqlens_kv=CU)
    with pytest.raises(ValueError, match="diagonal"):
        attention(q, k, v, **packing, cu_seqlens_kv=CU + 0)


def test_a_mod_is_traced_in_each_call(prepared):
    factor = 1.0

    def scaled(score, b, h, q_idx, kv_idx):
        return score * factor

    first = attention(Q, K, V, score_mod=scaled)
    factor = 2.0
    assert not np.array_equal(first, attention(Q, K, V, score_mod=scaled))


def test_gradients_of_a_kept_call(prepared):
    def loss(q, k, v):
        return (attention(q, k, v, causal=True) ** 2).sum()

    first = jax.grad(loss, (0, 1, 2))(Q, K, V)
    again = jax.grad(loss, (0, 1, 2))(Q, K, V)
    only_k = jax.grad(loss, 1)(Q, K, V)
    jitted = jax.jit(jax.grad(loss, (0, 1, 2)))(Q, K, V)
    for a, b, c in zip(first, again, jitted, strict=True):
        assert np.array_equal(a, b)
        np.testing.assert_allclose(a, c, rtol=1e-5, atol=1e-6)
    assert np.array_equal(first[1], only_k)


def test_kept_calls_are_bounded(prepared, monkeypatch):
    monkeypatch.setattr(front, "MOST_CALLS", 3)
    for n in range(1, 6):
        attention(Q, K, V, softmax_scale=float(n))
        assert len(front._kept) <= 3
