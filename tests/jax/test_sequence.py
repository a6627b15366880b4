"""Sequences over a mesh axis of four CPU devices: the numbers of one device, forward and backward."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flexattn import Window

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'flexattn[jax]'")
jnp = jax.numpy
fj = pytest.importorskip("flexattn.jax")

P = jax.sharding.PartitionSpec
TOKENS = 48


@pytest.fixture(scope="module")
def mesh() -> Any:
    if len(jax.devices()) < 4:
        pytest.skip(f"JAX has {len(jax.devices())} devices, and the mesh needs four")
    return jax.make_mesh((4,), ("sp",), axis_types=(jax.sharding.AxisType.Auto,))


def normal(seed: int, *shape: int) -> Any:
    return jax.random.normal(jax.random.key(seed), shape)


def qkv(fmt: str = "bshd") -> dict[str, Any]:
    sizes = {"b": 2, "s": TOKENS, "d": 16}
    return {n: normal(i, *((sizes | {"h": 4 if n == "q" else 2})[letter] for letter in fmt)) for i, n in enumerate("qkv")}


def both(attend: Any, leaves: dict[str, Any], dout: Any, dlse: Any) -> Any:
    (out, lse, largest), pull = jax.vjp(attend, leaves)
    return (out, lse, largest), pull((dout, dlse, jnp.zeros_like(largest)))[0]


CASES: dict[str, tuple[dict[str, tuple[int, ...]], dict[str, Any]]] = {
    "causal": ({}, {"attn_mask_type": "causal"}),
    "no mask": ({}, {}),
    "causal, window, softcap": ({}, {"attn_mask_type": "causal_bottom_right", "window_size": (13, 0), "softcap": 5.0}),
    "window": ({}, {"window_size": (7, 4)}),
    "window, right side alone": ({}, {"window_size": (-1, 5)}),
    "wide window": ({}, {"window_size": (40, 3)}),
    "window before the diagonal": ({}, {"window_size": Window(12, -5)}),
    "causal, window before the diagonal": ({}, {"attn_mask_type": "causal", "window_size": Window(20, -3)}),
    "sink": ({"softmax_offset": (4,)}, {"attn_mask_type": "causal", "softmax_type": "learnable"}),
    "ALiBi": ({}, {"attn_mask_type": "causal", "bias_type": "alibi"}),
    "bias, window": ({"bias": (1, 4, TOKENS, TOKENS)}, {"bias_type": "post_scale_bias", "window_size": (9, 2)}),
    "bias, causal": ({"bias": (2, 1, TOKENS, TOKENS)}, {"bias_type": "pre_scale_bias", "attn_mask_type": "causal"}),
    "mods": (
        {},
        {
            "attn_mask_type": "causal",
            "score_mod": lambda s, b, h, i, j: s - 0.1 * (i - j) + 0.01 * i,
            "mask_mod": lambda b, h, i, j: (i + 2 * j) % 5 != 0,
        },
    ),
}
FORMATS = {"causal, window, softcap": "sbhd", "window": "bhsd"}
BY_DEFAULT = {
    ("causal", "zigzag"),
    ("window", "contiguous"),
    ("mods", "zigzag"),
    ("bias, window", "zigzag"),
    ("sink", "contiguous"),
}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=() if (name, layout) in BY_DEFAULT else pytest.mark.slow)
        for name in CASES
        for layout in ("contiguous", "zigzag")
    ],
)
def test_over_an_axis(mesh: Any, name: str, layout: str) -> None:
    shapes, arguments = CASES[name]
    fmt = FORMATS.get(name, "bshd")
    dim = fmt.index("s")
    arguments = {**arguments, "qkv_format": fmt}
    leaves = qkv(fmt) | {n: normal(5, *shape) for n, shape in shapes.items()}
    dout, dlse = normal(7, *leaves["q"].shape), normal(8, 2, 4, TOKENS)
    if name == "mods" or "before" in name:
        dlse = jnp.where(jnp.isfinite(fj.attention(**leaves, **arguments, return_lse=True)[1]), dlse, 0)

    def whole(leaves: Any) -> Any:
        return fj.attention(**leaves, **arguments, return_lse=True, return_max_logit=True)

    expected = both(whole, leaves, dout, dlse)
    of_tokens = P(*(None,) * dim, "sp")
    specs = {n: of_tokens if n in "qkv" else P(None, None, "sp") if n == "bias" else P() for n in leaves}
    over = {**dict.fromkeys("qkv", dim), "bias": 2}
    order = fj.sequence_order(TOKENS, 4, layout)
    in_order = {n: jnp.take(x, order, over[n]) if n in over else x for n, x in leaves.items()}

    def part(leaves: Any) -> Any:
        return fj.attention_over_axis(**leaves, **arguments, axis_name="sp", layout=layout, return_lse=True, return_max_logit=True)

    sharded = jax.shard_map(part, mesh=mesh, in_specs=(specs,), out_specs=(of_tokens, P(None, None, "sp"), P()), check_vma=False)
    call = jax.jit(lambda *x: both(sharded, *x))
    given = in_order, jnp.take(dout, order, dim), jnp.take(dlse, order, 2)
    (out, lse, largest), gradients = call(*given)
    back = np.argsort(order)
    results = jnp.take(out, back, dim), jnp.take(lse, back, 2), largest
    gradients = {n: jnp.take(x, back, over[n]) if n in over else x for n, x in gradients.items()}
    for a, b in zip(jax.tree.leaves((results, gradients)), jax.tree.leaves(expected), strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * max(1.0, float(abs(b[jnp.isfinite(b)]).max())))


def test_the_backward_fetches_keys_again_and_keeps_none(mesh: Any) -> None:
    def loss(leaves: Any) -> Any:
        out = fj.attention_over_axis(**leaves, axis_name="sp", attn_mask_type="causal")
        return jax.lax.psum((out**2).sum(), "sp") / 4

    spec = P(None, "sp")
    parts = jax.shard_map(loss, mesh=mesh, in_specs=(dict.fromkeys("qkv", spec),), out_specs=P(), check_vma=False)
    saved = jax._src.ad_checkpoint.saved_residuals(parts, qkv())
    sizes = [aval.shape for aval, _ in saved]
    assert max(int(np.prod(shape)) for shape in sizes) <= 2 * TOKENS * 4 * 16, sizes
    text = str(jax.make_jaxpr(jax.grad(parts))(qkv()))
    assert text.count("all_gather[") == 4, text.count("all_gather[")  # k and v, forward and backward
    assert text.count("flexattn_forward[") == 1


@pytest.mark.usefixtures("four_devices")
def test_beside_split_heads() -> None:
    mesh = jax.make_mesh((2, 2), ("sp", "heads"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    leaves, dout = qkv(), normal(7, 2, TOKENS, 4, 16)
    how = {"attn_mask_type": "causal"}
    spec = P(None, "sp", "heads")

    def part(leaves: Any, dout: Any) -> Any:  # the gradient is taken inside
        out, pull = jax.vjp(lambda leaves: fj.attention_over_axis(**leaves, **how, axis_name="sp"), leaves)
        return out, pull(dout)[0]

    found = jax.jit(jax.shard_map(part, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False))(leaves, dout)
    out, pull = jax.vjp(lambda leaves: fj.attention(**leaves, **how), leaves)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves((out, pull(dout)[0])), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * float(abs(b).max()))


def test_order_of_a_sequence() -> None:
    assert fj.sequence_order(12, 3).tolist() == [0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7]
    assert fj.sequence_order(6, 3, "contiguous").tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(ValueError, match="length is 10 with layout 'zigzag'; accepted: a multiple of 8"):
        fj.sequence_order(10, 4)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"attn_mask_type": "padding"}, "attn_mask_type is 'padding'; accepted: no_mask, causal, causal_bottom_right"),
        ({"dropout_p": 0.1}, "dropout_p is given to attention_over_axis; accepted: no dropout"),
        ({"layout": "dealt"}, "layout is 'dealt'; accepted: contiguous, zigzag"),
        ({"qkv_format": "thd"}, "qkv_format is 'thd'; accepted: bshd, sbhd, bhsd"),
        ({"attn_mask_type": "causal", "window_size": (3, 2)}, "window_size is"),
        ({"bias_type": "alibi"}, "bias_type is 'alibi' with 'no_mask'"),
        ({"k": (2, 24, 2, 16)}, "as many tokens of both on each device"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_cannot_be_split_is_refused(mesh: Any, arguments: dict[str, Any], text: str) -> None:
    leaves = qkv()
    arguments = dict(arguments)
    if "k" in arguments:
        leaves |= dict.fromkeys("kv", jnp.zeros(arguments.pop("k")))
    call = lambda leaves: fj.attention_over_axis(**leaves, **arguments, axis_name="sp")  # noqa: E731
    with pytest.raises(ValueError, match=text):
        jax.shard_map(call, mesh=mesh, in_specs=P(None, "sp"), out_specs=P(None, "sp"), check_vma=False)(leaves)
