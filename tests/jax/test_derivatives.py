"""Second derivatives and forward mode in JAX, against plain JAX operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'flexattn[jax]'")
import jax.numpy as jnp  # noqa: E402

import flexattn.jax as fj  # noqa: E402
from flexattn.fp8 import Recipe  # noqa: E402

RNG = np.random.default_rng(0)
QKV = tuple(jnp.asarray(RNG.normal(size=(2, 5, heads, 8)), jnp.float32) for heads in (4, 2, 2))
BIAS = jnp.asarray(RNG.normal(size=(1, 4, 5, 5)), jnp.float32)
X = (*QKV, BIAS)
ALONG = tuple(jnp.asarray(RNG.normal(size=x.shape), jnp.float32) for x in X)

Attend = Callable[..., Any]


def ours(q: Any, k: Any, v: Any, bias: Any) -> Any:
    return fj.attention(q, k, v, bias=bias, bias_type="post_scale_bias", attn_mask_type="causal", softcap=2.0)


def plain(q: Any, k: Any, v: Any, bias: Any) -> Any:
    k, v = (jnp.repeat(x, 2, 2) for x in (k, v))
    s = 2.0 * jnp.tanh(jnp.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5 / 2.0) + bias
    s = jnp.where(jnp.tril(jnp.ones((5, 5), bool)), s, -jnp.inf)
    return jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(s, -1), v)


def loss(attend: Attend) -> Attend:
    return lambda *x: (attend(*x) ** 3).sum()


def grad_of_grad(attend: Attend) -> Any:
    def penalty(*x: Any) -> Any:
        return sum((g**2).sum() for g in jax.grad(loss(attend), (0, 1, 2, 3))(*x))

    return jax.grad(penalty, (0, 1, 2, 3))(*X)


def mean_flow(attend: Attend, *x: Any) -> Any:
    out, tangent = jax.jvp(attend, x, ALONG)
    return ((out + jax.lax.stop_gradient(tangent)) ** 2).sum()


def linearized(attend: Attend, *x: Any) -> Any:
    """Returns out, its tangents along three directions, and the transpose of the linear function."""
    out, run = jax.linearize(attend, *x)
    directions = [jnp.stack([t, 2 * t, t[::-1]]) for t in ALONG]
    return out, run(*ALONG), jax.vmap(run)(*directions), jax.linear_transpose(run, *x)(out)


def in_checkpoint(attend: Attend) -> Any:
    """Returns the gradient and the tangent of layers in a scan, each a checkpoint that keeps out."""
    policy = jax.checkpoint_policies.save_only_these_names("flexattn_out")
    block = jax.checkpoint(attend, policy=policy)

    def layers(q: Any) -> Any:
        return jax.lax.scan(lambda q, _: (block(q, *X[1:]), None), q, None, length=2)[0]

    return jax.grad(lambda q: (layers(q) ** 3).sum())(QKV[0]), jax.jvp(layers, QKV[:1], ALONG[:1])


def in_vmap(attend: Attend) -> Any:
    """Returns derivatives of calls under a vmap, with a tensor that all calls share."""
    q = jnp.stack([QKV[0], -QKV[0]])

    def each(q: Any, k: Any) -> Any:
        return jax.vmap(lambda q: attend(q, k, *X[2:]))(q)

    def both(q: Any, k: Any) -> Any:
        return (jax.vmap(lambda q: jax.jvp(lambda q, k: attend(q, k, *X[2:]), (q, k), ALONG[:2])[1])(q) ** 2).sum()

    gradients = jax.grad(lambda q, k: (each(q, k) ** 3).sum(), (0, 1))(q, QKV[1])
    return gradients, jax.linearize(each, q, QKV[1])[1](q, ALONG[1]), jax.grad(both, (0, 1))(q, QKV[1])


USES: dict[str, Callable[[Attend], Any]] = {
    "jvp": lambda attend: jax.jvp(attend, X, ALONG),
    "jvp of k": lambda attend: jax.jvp(lambda k: attend(QKV[0], k, QKV[2], BIAS), QKV[1:2], ALONG[1:2]),
    "grad of grad": grad_of_grad,
    "jvp of grad": lambda attend: jax.jvp(jax.grad(loss(attend), (0, 1, 2, 3)), X, ALONG),
    "grad of jvp": lambda attend: jax.grad(lambda *x: (jax.jvp(attend, x, ALONG)[1] ** 2).sum(), (0, 1, 2, 3))(*X),
    "mean flow": lambda attend: jax.grad(lambda *x: mean_flow(attend, *x), (0, 1, 2, 3))(*X),
    "linearize": lambda attend: linearized(attend, *X),
    "linearize of grad": lambda attend: jax.linearize(jax.grad(loss(attend), (0, 1, 2, 3)), *X)[1](*ALONG),
    "jvp of jit": lambda attend: jax.jvp(jax.jit(attend), X, ALONG),
    "linearize of jit": lambda attend: linearized(jax.jit(attend), *X),
    "jacfwd of jit": lambda attend: jax.jacfwd(lambda b: loss(jax.jit(attend))(*QKV, b + BIAS))(jnp.ones((1, 1, 1, 5))),
    "checkpoint": in_checkpoint,
    "vmap": in_vmap,
    "hessian": lambda attend: jax.hessian(lambda b: loss(attend)(*QKV, b + BIAS))(jnp.ones((1, 1, 1, 5))),
}

BY_DEFAULT = ("grad of grad", "mean flow", "linearize of jit", "vmap")


@pytest.mark.parametrize("is_jitted", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["jit", "eager"])
@pytest.mark.parametrize("use", [use if use in BY_DEFAULT else pytest.param(use, marks=pytest.mark.slow) for use in USES])
def test_derivatives_equal_those_of_plain_operations(use: str, is_jitted: bool) -> None:
    run = (lambda attend: jax.jit(lambda: USES[use](attend))()) if is_jitted else USES[use]
    for found, wanted in zip(jax.tree.leaves(run(ours)), jax.tree.leaves(run(plain)), strict=True):
        scale = float(jnp.abs(wanted).max())
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * max(scale, 1.0))


@pytest.mark.slow
def test_bfloat16() -> None:
    x, along = (tuple(a.astype(jnp.bfloat16) for a in arrays) for arrays in (X, ALONG))
    found, wanted = jax.jvp(ours, x, along)[1], jax.jvp(plain, X, ALONG)[1]
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(found.astype(jnp.float32), wanted, rtol=0, atol=0.1)


def test_third_derivatives_and_fp8_are_refused() -> None:
    def first(q: Any) -> Any:
        return jax.grad(lambda q: loss(ours)(q, *X[1:]))(q).sum()

    with pytest.raises(NotImplementedError, match="third derivative"):
        jax.grad(lambda q: jax.grad(lambda q: (jax.grad(first)(q) ** 2).sum())(q).sum())(X[0])
    half = [x.astype(jnp.bfloat16) for x in QKV]
    with pytest.raises(NotImplementedError, match="in FP8"):
        jax.jvp(lambda q: fj.attention(q, *half[1:], fp8_recipe=Recipe()), (half[0],), (half[0],))
