"""vmap of calls: one call for all if the results are equal, and the results of a loop over the mapped axis in every case."""

from __future__ import annotations

from typing import Any

import pytest

from tests.jax.arrays import normal

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'flexattn[jax]'")
jnp = jax.numpy
fj = pytest.importorskip("flexattn.jax")

N = 3


CU = jnp.asarray([[0, 5, 9], [0, 1, 12], [0, 0, 12]], jnp.int32)
CASES = {
    "bshd": ({"q": (N, 2, 9, 4, 16), "k": (2, 11, 2, 16), "v": (N, 2, 11, 2, 8)}, {"attn_mask_type": "causal"}, False),
    "sbhd": ({"q": (N, 9, 2, 4, 16), "k": (N, 11, 2, 2, 16), "v": (11, 2, 2, 8)}, {"qkv_format": "sbhd"}, False),
    "bhsd": ({"q": (2, 4, 9, 16), "k": (N, 2, 2, 11, 16), "v": (2, 2, 11, 8)}, {"qkv_format": "bhsd"}, False),
    "bias": (
        {"q": (N, 2, 9, 4, 16), "k": (2, 11, 2, 16), "v": (2, 11, 2, 8), "bias": (1, 4, 9, 11)},
        {"bias_type": "post_scale_bias"},
        False,
    ),
    "mapped bias": (
        {"q": (2, 9, 4, 16), "k": (2, 11, 2, 16), "v": (2, 11, 2, 8), "bias": (N, 2, 1, 9, 1)},
        {"bias_type": "post_scale_bias"},
        False,
    ),
    "shared bias": (
        {"q": (N, 4, 9, 4, 16), "k": (4, 11, 2, 16), "v": (4, 11, 2, 8), "bias": (2, 4, 9, 11)},
        {"bias_type": "post_scale_bias"},
        False,
    ),
    "mapped bias of pairs": (
        {"q": (4, 9, 4, 16), "k": (N, 4, 11, 2, 16), "v": (4, 11, 2, 8), "bias": (N, 2, 1, 9, 11)},
        {"bias_type": "pre_scale_bias"},
        False,
    ),
    "thd": (
        {"q": (N, 12, 4, 16), "k": (N, 12, 2, 16), "v": (12, 2, 8)},
        {
            "qkv_format": "thd",
            "attn_mask_type": "padding_causal",
            "cu_seqlens_q": CU,
            "cu_seqlens_kv": CU,
            "max_seqlen_q": 12,
            "max_seqlen_kv": 12,
        },
        False,
    ),
    "padding": (
        {"q": (N, 2, 12, 4, 16), "k": (N, 2, 12, 2, 16), "v": (2, 12, 2, 8), "alibi_slopes": (2, 4)},
        {"attn_mask_type": "padding", "cu_seqlens_q": CU, "cu_seqlens_kv": CU, "bias_type": "alibi"},
        False,
    ),
    "sink": (
        {"q": (N, 2, 9, 4, 16), "k": (2, 11, 2, 16), "v": (2, 11, 2, 8), "softmax_offset": (4,)},
        {"softmax_type": "learnable"},
        True,
    ),
    "mod of b": (
        {"q": (N, 2, 9, 4, 16), "k": (2, 11, 2, 16), "v": (2, 11, 2, 8)},
        {"score_mod": lambda s, b, h, i, j: s * b},
        True,
    ),
}
_RANKS = {"q": 4, "k": 4, "v": 4, "bias": 4, "softmax_offset": 1, "alibi_slopes": 2}


@pytest.mark.parametrize("name", list(CASES))
def test_equals_a_loop(name: str) -> None:
    shapes, arguments, _ = CASES[name]
    arrays = {key: normal(i, *shape) for i, (key, shape) in enumerate(shapes.items())}
    rank = 3 if name == "thd" else 4
    axes = {key: 0 if x.ndim > (rank if key in "qkv" else _RANKS[key]) else None for key, x in arrays.items()}
    given_lengths = {key: x for key, x in arguments.items() if key.startswith("cu_")}
    rest = {key: x for key, x in arguments.items() if key not in given_lengths}

    def call(leaves: Any, lengths: Any) -> Any:
        out, lse = fj.attention(**leaves, **lengths, **rest, return_lse=True)
        # Out and lse of tokens beyond their lengths may be NaN, so they are not summed.
        return (out**2).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum(), (out, lse)

    whole = jax.value_and_grad(call, has_aux=True)
    lengths_axes = dict.fromkeys(given_lengths, 0)
    found = jax.jit(jax.vmap(whole, (axes, lengths_axes)))(arrays, given_lengths)
    alone = jax.jit(whole)
    for n in range(N):
        one = {key: x if axes[key] is None else x[n] for key, x in arrays.items()}
        expected = alone(one, {key: x[n] for key, x in given_lengths.items()})
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert jnp.allclose(a[n], b, rtol=2e-5, atol=2e-5, equal_nan=False), name


@pytest.mark.parametrize("name", list(CASES))
def test_what_is_a_loop(name: str) -> None:
    shapes, arguments, is_loop = CASES[name]
    arrays = {key: normal(i, *shape) for i, (key, shape) in enumerate(shapes.items())}
    rank = 3 if name == "thd" else 4
    axes = {key: 0 if x.ndim > (rank if key in "qkv" else _RANKS[key]) else None for key, x in arrays.items()}
    given_lengths = {key: 0 for key in arguments if key.startswith("cu_")}
    static = {key: x for key, x in arguments.items() if key not in given_lengths}

    def both(leaves: Any, lengths: Any) -> Any:
        out, pull = jax.vjp(lambda leaves: fj.attention(**leaves, **lengths, **static), leaves)
        return pull(out)

    text = str(jax.make_jaxpr(jax.vmap(both, (axes, given_lengths)))(arrays, {key: arguments[key] for key in given_lengths}))
    assert ("scan[" in text) == is_loop


def test_outer_axes_other_than_the_first() -> None:
    q, k, v = normal(0, 2, 9, N, 4, 16), normal(1, 2, 9, 4, 16), normal(2, 2, 9, 4, 16)
    found = jax.vmap(lambda q: fj.attention(q, k, v), in_axes=2, out_axes=1)(q)
    assert jnp.allclose(found[:, 1], fj.attention(q[:, :, 1], k, v), atol=1e-6)
    twice = jax.vmap(jax.vmap(lambda q: fj.attention(q, k, v), 2), 0)(jnp.stack([q, 2 * q]))
    assert jnp.allclose(twice[1, 2], fj.attention(2 * q[:, :, 2], k, v), atol=1e-6)


def test_two_vmaps_of_a_loop_whose_derivative_is_folded() -> None:
    """A call without gradients reads seqused_kv, in a loop; its derivative reads cu_seqlens, which join in one call."""
    q, k, v = normal(0, 2, N, 2, 9, 4, 16), normal(1, 2, N, 2, 11, 4, 16), normal(2, N, 2, 11, 4, 16)
    used = jnp.asarray([[3, 11], [0, 5], [11, 1]], jnp.int32)

    def one(q: Any, k: Any, v: Any, used: Any) -> Any:
        return fj.attention(q, k, v, attn_mask_type="padding", seqused_kv=used)

    both = jax.vmap(jax.vmap(one), (0, 0, None, None))
    found, pull = jax.vjp(jax.checkpoint(lambda q: both(q, k, v, used)), q)
    expected, pull_one = jax.vjp(lambda q: jnp.stack([jax.vmap(one)(q[m], k[m], v, used) for m in range(2)]), q)
    assert jnp.allclose(found, expected, atol=1e-6)
    assert jnp.allclose(pull(expected)[0], pull_one(expected)[0], atol=1e-5)


def test_dropout_is_the_same_for_each_where_the_key_is() -> None:
    q, k, v = normal(0, 1, 9, 4, 16), normal(1, 1, 9, 4, 16), normal(2, 1, 9, 4, 16)
    key = jax.random.key(0)
    found = jax.vmap(lambda q: fj.attention(q, k, v, dropout_p=0.5, rng_state=key))(jnp.stack([q, q]))
    assert jnp.array_equal(found[0], found[1])
    assert jnp.array_equal(found[0], fj.attention(q, k, v, dropout_p=0.5, rng_state=key))


DESCALES: dict[str, tuple[int, ...]] = {
    "one": (),
    "heads": (2,),
    "rows and heads": (2, 2),
    "blocks": (2, 1, 1),
    "tokens": (2, 11, 2),
}


@pytest.mark.parametrize("name", list(DESCALES))
@pytest.mark.parametrize(
    "mapped", ["q", *(pytest.param(names, marks=pytest.mark.slow) for names in ("k, v", "descales")), "k, descale_k"]
)
def test_keys_in_fp8(name: str, mapped: str) -> None:
    shapes = {"q": (2, 9, 4, 16), "k": (2, 11, 2, 16), "v": (2, 11, 2, 8), "descale_k": DESCALES[name], "descale_v": DESCALES[name]}
    names = mapped.replace("descales", "descale_k, descale_v").split(", ")
    arrays = {key: normal(i, *((N,) if key in names else ()), *shape) for i, (key, shape) in enumerate(shapes.items())}
    arrays = {
        key: x.astype(jnp.float8_e4m3fn) if key in "kv" else abs(x) + 0.5 if "descale" in key else x for key, x in arrays.items()
    }
    axes = {key: 0 if key in names else None for key in arrays}
    found = jax.jit(jax.vmap(lambda given: fj.attention(**given), (axes,)))(arrays)
    for n in range(N):
        expected = fj.attention(**{key: x[n] if key in names else x for key, x in arrays.items()})
        assert jnp.allclose(found[n], expected, atol=1e-6)


def test_an_axis_of_size_0() -> None:
    q, k = jnp.zeros((0, 2, 9, 4, 16)), normal(0, 2, 9, 4, 16)
    gradient = jax.vmap(jax.grad(lambda q, k: fj.attention(q, k, k).sum(), (0, 1)), (0, None))
    assert [x.shape for x in gradient(q, k)] == [(0, 2, 9, 4, 16)] * 2


def test_no_queries() -> None:
    q, k, bias = jnp.zeros((N, 2, 0, 4, 16)), normal(0, 2, 9, 4, 16), jnp.zeros((1, 4, 0, 9))
    gradient = jax.vmap(jax.grad(lambda q, k, bias: fj.attention(q, k, k, bias=bias).sum(), (0, 1, 2)), (0, None, None))
    found = gradient(q, k, bias)
    assert [x.shape for x in found] == [(N, 2, 0, 4, 16), (N, 2, 9, 4, 16), (N, 1, 4, 0, 9)]
    assert not found[1].any()
