"""Sequences over a mesh axis of four CPU devices: the numbers of one device, forward and backward."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flexattn import Window, fp8
from tests.jax.arrays import normal

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'flexattn[jax]'")
jnp = jax.numpy
fj = pytest.importorskip("flexattn.jax")
from flexattn.jax import fp8 as jax_fp8  # noqa: E402

P = jax.sharding.PartitionSpec
TOKENS = 48
CU = jnp.array([0, TOKENS, TOKENS + 19], jnp.int32)  # lengths of two sequences of a batch
DROPOUT: dict[str, Any] = {"dropout_p": 0.3, "rng_state": jax.random.key(2**33 + 5)}


@pytest.fixture(scope="module")
def mesh() -> Any:
    if len(jax.devices()) < 4:
        pytest.skip(f"JAX has {len(jax.devices())} devices, and the mesh needs four")
    return jax.make_mesh((4,), ("sp",), axis_types=(jax.sharding.AxisType.Auto,))


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
    "dropout": ({}, DROPOUT),
    "dropout, causal": ({}, {"attn_mask_type": "causal", **DROPOUT}),
    "dropout, window": ({}, {"window_size": (5, 3), **DROPOUT}),
    "lengths, dropout": ({}, {"attn_mask_type": "padding", "cu_seqlens_q": CU, "window_size": (-1, 9), **DROPOUT}),
    "lengths, causal": ({}, {"attn_mask_type": "padding_causal", "cu_seqlens_q": CU}),
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
    ("dropout, causal", "zigzag"),
    ("lengths, dropout", "zigzag"),
    ("lengths, causal", "contiguous"),
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

    def whole(leaves: Any) -> Any:
        key_lengths = {"cu_seqlens_kv": CU} if "cu_seqlens_q" in arguments else {}
        return fj.attention(**leaves, **arguments, **key_lengths, return_lse=True, return_max_logit=True)

    if name == "mods" or "before" in name or "lengths" in name:
        dlse = jnp.where(jnp.isfinite(whole(leaves)[1]), dlse, 0)

    expected = both(whole, leaves, dout, dlse)
    token_spec = P(*(None,) * dim, "sp")
    specs = {n: token_spec if n in "qkv" else P(None, None, "sp") if n == "bias" else P() for n in leaves}
    over = {**dict.fromkeys("qkv", dim), "bias": 2}
    order = fj.sequence_order(TOKENS, 4, layout)
    in_order = {n: jnp.take(x, order, over[n]) if n in over else x for n, x in leaves.items()}

    def part(leaves: Any) -> Any:
        return fj.attention_over_axis(**leaves, **arguments, axis_name="sp", layout=layout, return_lse=True, return_max_logit=True)

    sharded = jax.shard_map(part, mesh=mesh, in_specs=(specs,), out_specs=(token_spec, P(None, None, "sp"), P()), check_vma=False)
    call = jax.jit(lambda *x: both(sharded, *x))
    given = in_order, jnp.take(dout, order, dim), jnp.take(dlse, order, 2)
    (out, lse, largest), gradients = call(*given)
    back = np.argsort(order)
    results = jnp.take(out, back, dim), jnp.take(lse, back, 2), largest
    gradients = {n: jnp.take(x, back, over[n]) if n in over else x for n, x in gradients.items()}
    for a, b in zip(jax.tree.leaves((results, gradients)), jax.tree.leaves(expected), strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * max(1.0, float(abs(b[jnp.isfinite(b)]).max())))


DOCUMENTS: dict[str, dict[str, Any]] = {
    "causal": {"attn_mask_type": "padding_causal"},
    "no mask": {"attn_mask_type": "padding", "softcap": 5.0},
    "window": {"attn_mask_type": "padding", "window_size": (9, 4)},
    "window, right side alone": {"attn_mask_type": "padding", "window_size": (-1, 2)},
    "window before the diagonal": {"attn_mask_type": "padding", "window_size": Window(12, -2)},
    "causal, window": {"attn_mask_type": "padding_causal_bottom_right", "window_size": (6, 0)},
    "ALiBi": {"attn_mask_type": "padding_causal", "bias_type": "alibi", "alibi_slopes": 0.1 * (1 + jnp.arange(20.0).reshape(5, 4))},
    "mods": {
        "attn_mask_type": "padding",
        "window_size": (11, -1),
        "score_mod": lambda s, b, h, i, j: s - 0.1 * b * (i - j) + 0.01 * i,
        "mask_mod": lambda b, h, i, j: (i + 2 * j + b) % 5 != 0,
    },
    "dropout": {"attn_mask_type": "padding_causal", **DROPOUT},
    "dropout, window": {"attn_mask_type": "padding", "window_size": (5, 3), **DROPOUT},
}


# If tokens lie between documents, the cases of windows have each way to find them.
OF_DOCUMENTS = [(name, layout, 0) for name in DOCUMENTS for layout in ("contiguous", "zigzag")]
OF_DOCUMENTS += [(name, layout, 3) for name, layout, _ in OF_DOCUMENTS if "window" in name]
DOCUMENTS_BY_DEFAULT = {
    ("mods", "contiguous", 0),
    ("dropout", "zigzag", 0),
    ("causal, window", "zigzag", 3),
    ("dropout, window", "contiguous", 3),
}


@pytest.mark.parametrize(
    ("name", "layout", "gap"),
    [pytest.param(*case, marks=() if case in DOCUMENTS_BY_DEFAULT else pytest.mark.slow) for case in OF_DOCUMENTS],
)
def test_packed_documents_over_an_axis(mesh: Any, name: str, layout: str, gap: int) -> None:
    """Some documents are within one device's part, one covers three, one has one token, and one has none."""
    arguments = {**DOCUMENTS[name], "qkv_format": "thd"}
    cu = np.cumsum([0, 4, 0, 1, 24, 10], dtype=np.int32)
    lengths, is_real = {"cu_seqlens_q": jnp.asarray(cu), "max_seqlen_q": 24}, np.arange(TOKENS) < cu[-1]
    if gap:
        starts = cu + gap * np.array([1, 1, 2, 2, 3, 3])
        lengths["cu_seqlens_q_padded"] = jnp.asarray(starts.astype(np.int32))
        is_real = ((np.arange(TOKENS) >= starts[:-1, None]) & (np.arange(TOKENS) < (starts[:-1] + np.diff(cu))[:, None])).any(0)
    key_lengths = {name.replace("_q", "_kv"): x for name, x in lengths.items()}
    leaves = {n: normal(i, TOKENS, 4 if n == "q" else 2, 16) for i, n in enumerate("qkv")}
    leaves = {n: jnp.where(is_real[:, None, None], x, jnp.nan) for n, x in leaves.items()}
    whole = lambda leaves: fj.attention(**leaves, **arguments, **lengths, **key_lengths, return_lse=True, return_max_logit=True)  # noqa: E731
    dout = jnp.where(is_real[:, None, None], normal(7, TOKENS, 4, 16), jnp.nan)
    dlse = jnp.where(jnp.isfinite(whole(leaves)[1]) & is_real, normal(8, 4, TOKENS), 0)
    expected = both(whole, leaves, dout, dlse)
    order = fj.sequence_order(TOKENS, 4, layout)

    def part(leaves: Any) -> Any:
        how = {"axis_name": "sp", "layout": layout, "return_lse": True, "return_max_logit": True}
        return fj.attention_over_axis(**leaves, **arguments, **lengths, **how)

    lse_spec = P(None, "sp")
    sharded = jax.shard_map(part, mesh=mesh, in_specs=P("sp"), out_specs=(P("sp"), lse_spec, P()), check_vma=False)
    found = jax.jit(lambda *x: both(sharded, *x))({n: x[order] for n, x in leaves.items()}, dout[order], dlse[:, order])
    (out, lse, largest), gradients = found
    back = np.argsort(order)
    results = out[back], jnp.where(is_real, lse[:, back], 0), largest
    expected = (expected[0][0], jnp.where(is_real, expected[0][1], 0), expected[0][2]), expected[1]
    gradients = {n: x[back] for n, x in gradients.items()}
    for a, b in zip(jax.tree.leaves((results, gradients)), jax.tree.leaves(expected), strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * max(1.0, float(abs(b[jnp.isfinite(b)]).max())))


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_numbers_in_fp8_travel_as_they_are(mesh: Any, layout: str) -> None:
    eight = {n: jax_fp8.quantize(x.astype(jnp.bfloat16)) for n, x in qkv().items()}
    given = {f"descale_{n}": x.descale for n, x in eight.items()} | {"attn_mask_type": "causal"}
    expected = fj.attention(**{n: x.data for n, x in eight.items()}, **given)
    order, spec = fj.sequence_order(TOKENS, 4, layout), P(None, "sp")
    part = lambda q, k, v: fj.attention_over_axis(q, k, v, **given, axis_name="sp", layout=layout)  # noqa: E731
    call = jax.jit(jax.shard_map(part, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    arrays = [x.data[:, order] for x in eight.values()]
    found = call(*arrays)[:, np.argsort(order)]
    gathers = [line for line in str(jax.make_jaxpr(call)(*arrays)).splitlines() if "all_gather[" in line]
    assert len(gathers) == 2
    assert all("f8_e4m3fn" in line for line in gathers), gathers
    off = abs(found.astype(jnp.float32) - expected.astype(jnp.float32))
    assert (off > 0).mean() < 0.02  # the last bit of a score may round weights differently
    assert off.max() < 0.05


def test_kernels_drop_over_an_axis_what_they_drop_on_one_device(
    mesh: Any, interpreted: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They also take all of a part's 67 keys, which are more than a block. A trace has no values to check."""
    monkeypatch.setenv("FLEXATTN_CHECK", "1")
    lengths = {"cu_seqlens_q": jnp.array([0, 1, 1, 96], jnp.int32), "max_seqlen_q": 95}
    how = {"qkv_format": "thd", "attn_mask_type": "padding", "window_size": (36, 4), **DROPOUT}
    leaves, dout = {n: normal(i, 96, 2, 16) for i, n in enumerate("qkv")}, normal(7, 96, 2, 16)

    def whole(leaves: Any) -> Any:
        return fj.attention(**leaves, **how, **lengths, **{n.replace("_q", "_kv"): x for n, x in lengths.items()})

    def gradients(call: Any) -> Any:
        out, pull = jax.vjp(call, leaves)
        return out, pull(dout)[0]

    part = lambda leaves: fj.attention_over_axis(**leaves, **how, **lengths, axis_name="sp")  # noqa: E731
    sharded = jax.shard_map(part, mesh=mesh, in_specs=P("sp"), out_specs=P("sp"), check_vma=False)
    for a, b in zip(jax.tree.leaves(jax.jit(lambda: gradients(sharded))()), jax.tree.leaves(gradients(whole)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * float(abs(b).max()))
    assert any("bwd" in one.launch.kernel.__name__ for one in interpreted)


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
        ({"attn_mask_type": "padding"}, "cu_seqlens_q is None with attn_mask_type 'padding'; accepted: int32"),
        ({"attn_mask_type": "caused"}, "attn_mask_type is 'caused'; accepted: no_mask, causal, causal_bottom_right"),
        ({"cu_seqlens_q": CU}, "attn_mask_type is 'no_mask'; accepted: padding, padding_causal, padding_causal_bottom_right"),
        ({"cu_seqlens_q": CU, "cu_seqlens_kv": CU + 0}, "cu_seqlens_kv is not the array cu_seqlens_q"),
        ({"cu_seqlens_q": CU, "cu_seqlens_q_padded": CU}, "cu_seqlens_q_padded is set with format bshd"),
        ({"cu_seqlens_q": CU[None]}, r"cu_seqlens_q is .* accepted: a contiguous tensor of shape \[batch \+ 1\]"),
        ({"max_seqlen_q": 8}, "cu_seqlens_q is None but cu_seqlens_q_padded or max_seqlen_q"),
        ({"cu_seqlens_q": CU, "max_seqlen_q": 8, "max_seqlen_kv": 9}, r"max_seqlen_q and max_seqlen_kv are \[8, 9\]"),
        ({"dropout_p": 0.1}, "rng_state is None with dropout_p > 0; accepted: a key"),
        (
            {"fp8_recipe": fp8.Recipe()},
            "fp8_recipe is not supported by attention_over_axis; accepted: q, k and v in FP8 with their descales",
        ),
        ({"layout": "dealt"}, "layout is 'dealt'; accepted: contiguous, zigzag"),
        ({"qkv_format": "thd"}, "cu_seqlens_q is None with thd"),
        ({"qkv_format": "thd_2bshd"}, "qkv_format is 'thd_2bshd'; accepted: bshd, sbhd, bhsd, thd"),
        ({"attn_mask_type": "causal", "window_size": (3, 2)}, "window_size is"),
        ({"bias_type": "alibi"}, "bias_type is 'alibi' with 'no_mask'"),
        ({"k": (2, 24, 2, 16)}, "equally many tokens of both on each device"),
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
