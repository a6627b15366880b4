"""Foreign argument names, given to `flexattn.jax.attention`."""

from __future__ import annotations

import inspect

import pytest

import flexattn

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'flexattn[jax]'")
fj = pytest.importorskip("flexattn.jax")


def test_foreign_names_and_positions_raise_what_is_ours() -> None:
    x = jax.numpy.ones((1, 3, 2, 8))
    with pytest.raises(TypeError, match=r"is_causal is no argument of attention\(\) but of SDPA, jax.nn"):
        fj.attention(x, x, x, is_causal=True)
    with pytest.raises(TypeError, match="FlashAttention's order these are dropout_p="):
        jax.jit(lambda x: fj.attention(x, x, x, 0.0))(x)
    with pytest.raises(TypeError, match="missing a required argument: 'v'"):
        fj.attention(x, x)
    assert [*inspect.signature(fj.attention).parameters] == [*inspect.signature(flexattn.attention).parameters]
