"""TransformerEngine's `fused_attn` for JAX, and its descriptors, layouts and types, against plain attention in fp64."""

from __future__ import annotations

import inspect
import re
from typing import Any

import numpy as np
import pytest
import torch

from flexattn.testing import check_close
from tests.jax.test_attention import to_torch

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'flexattn[jax]'")
jnp = jax.numpy
te = pytest.importorskip("flexattn.jax.te")

from flexattn.jax.te import AttnBiasType, AttnMaskType, AttnSoftmaxType, QKVLayout, SequenceDescriptor  # noqa: E402

B, SQ, SKV, H, HKV, D = 2, 11, 14, 4, 2, 16
SCALE = 0.3
PLAIN: dict[str, Any] = {
    "bias": None,
    "sequence_descriptor": None,
    "seed": None,
    "attn_bias_type": AttnBiasType.NO_BIAS,
    "attn_mask_type": AttnMaskType.NO_MASK,
    "qkv_layout": QKVLayout.BSHD_BSHD_BSHD,
    "softmax_type": AttnSoftmaxType.VANILLA_SOFTMAX,
    "scaling_factor": SCALE,
    "dropout_probability": 0.0,
    "is_training": True,
}


def normal(seed: int, *shape: int) -> Any:
    return jax.random.normal(jax.random.key(seed), shape)


def qkv() -> tuple[Any, Any, Any]:
    return normal(0, B, SQ, H, D), normal(1, B, SKV, HKV, D), normal(2, B, SKV, HKV, D)


def plain(leaves: dict[str, torch.Tensor], visible: np.ndarray | None, dtype: torch.dtype, softmax: Any) -> torch.Tensor:
    """Returns attention [b, sq, h, d] in torch; visible: bool [b, sq, skv]; bias before (pre) or after the scale."""
    x = {name: t.to(dtype) for name, t in leaves.items()}
    k, v = (x[name].repeat_interleave(x["q"].shape[2] // x[name].shape[2], 2) for name in ("k", "v"))
    scores = torch.einsum("bihd,bjhd->bhij", x["q"], k)
    scores = (scores + x.get("pre", 0)) * SCALE + x.get("post", 0)
    if visible is not None:
        scores = scores.masked_fill(~torch.from_numpy(visible)[:, None], -torch.inf)
    sink = {"VANILLA_SOFTMAX": -torch.inf, "OFF_BY_ONE_SOFTMAX": 0.0}.get(softmax.name)
    sinks = x["offset"].expand(*scores.shape[:3], 1) if sink is None else torch.full((*scores.shape[:3], 1), sink, dtype=dtype)
    weights = torch.cat([scores, sinks], 3)
    is_empty = (weights == -torch.inf).all(3, keepdim=True)
    weights = weights.masked_fill(is_empty, 0.0).softmax(3).masked_fill(is_empty, 0.0)[..., :-1]
    return torch.einsum("bhij,bjhd->bihd", weights, v)


def compare(leaves: dict[str, Any], call: Any, visible: np.ndarray | None, softmax: Any = AttnSoftmaxType.VANILLA_SOFTMAX) -> None:
    """Compares a call of the leaves, and the gradients of all of them, with `plain`."""
    out, pull = jax.vjp(jax.jit(call), leaves)
    dout = normal(9, *out.shape)
    found = {"out": out, **pull(dout)[0]}
    results = []
    for dtype in (torch.float64, torch.float32):
        tensors = {name: to_torch(x).to(dtype).requires_grad_() for name, x in leaves.items()}
        expected = plain(tensors, visible, dtype, softmax)
        gradients = torch.autograd.grad(expected, list(tensors.values()), to_torch(dout).to(dtype))
        results.append({"out": expected.detach(), **dict(zip(tensors, gradients, strict=True))})
    for name, got in found.items():
        check_close(name, to_torch(got), results[0][name], results[1][name], factor=2.0 if name == "out" else 3.0)


def pairs_seen(kind: Any, window: Any, ids: Any, pos: Any, lengths: Any = None) -> np.ndarray:
    """Returns bool [b, sq, skv], pair by pair; lengths: of each token's segment, if the diagonal needs them."""
    (ids_q, ids_kv), (pos_q, pos_kv) = ids, pos
    left, right = (-1, -1) if window is None else window
    seen = np.zeros((len(ids_q), len(ids_q[0]), len(ids_kv[0])), bool)
    for b, i, j in np.ndindex(*seen.shape):
        diagonal = pos_q[b][i]
        if kind.is_bottom_right():
            diagonal += lengths[1][b][j] - lengths[0][b][i]
        distance = diagonal - pos_kv[b][j]
        is_inside = not (kind.is_causal() and distance < 0) and not (0 <= left < distance)
        is_inside = is_inside and not (right >= 0 and -distance > right)
        seen[b, i, j] = is_inside and ids_q[b][i] == ids_kv[b][j] != 0
    return seen


def rows(starts_and_lengths: list[list[tuple[int, int]]], size: int) -> tuple[list[list[int]], ...]:
    """Returns ids, positions and lengths by token, of each row's segments by start and length."""
    ids, pos, lengths = ([[0] * size for _ in starts_and_lengths] for _ in range(3))
    for b, row in enumerate(starts_and_lengths):
        for number, (start, length) in enumerate(row, 1):
            for i in range(length):
                ids[b][start + i], pos[b][start + i], lengths[b][start + i] = number, i, length
    return ids, pos, lengths


def by_ids(q: Any, kv: Any) -> Any:
    arrays = [tuple(jnp.asarray(side[i], jnp.int32) for side in (q, kv)) for i in range(2)]
    return SequenceDescriptor.from_segment_ids_and_pos(*arrays)


WINDOWS = {False: (3, 2), True: (4, 0)}  # by whether the type is causal


@pytest.mark.parametrize("kind", list(AttnMaskType), ids=lambda kind: kind.name)
def test_lengths_with_a_window(kind: Any) -> None:
    check_one_sequence(kind, "both", "seqlens")


@pytest.mark.sample("kind", "window", "how")
@pytest.mark.parametrize("how", ["seqlens", "ids", "mask", "none"])
@pytest.mark.parametrize("window", [None, "both", "open"])
@pytest.mark.parametrize("kind", list(AttnMaskType), ids=lambda kind: kind.name)
def test_one_sequence_a_row(kind: Any, window: Any, how: str) -> None:
    check_one_sequence(kind, window, how)


def check_one_sequence(kind: Any, window: Any, how: str) -> None:
    window = {None: None, "open": (-1, -2), "both": WINDOWS[kind.is_causal()]}[window]
    lengths = ([7, 11], [9, 0]) if kind.is_padding() else ([SQ] * B, [SKV] * B)
    q, kv = (rows([[(0, n)] for n in side], size) for side, size in zip(lengths, (SQ, SKV), strict=True))
    seen = pairs_seen(kind, window, (q[0], kv[0]), (q[1], kv[1]), (q[2], kv[2]))
    hidden = ~pairs_seen(AttnMaskType.PADDING_MASK, None, (q[0], kv[0]), (q[1], kv[1]))
    descriptor = {
        "seqlens": SequenceDescriptor.from_seqlens(tuple(jnp.asarray(n, jnp.int32) for n in lengths)),
        "ids": by_ids(q, kv),
        "mask": jnp.asarray(hidden[:, None]),
        "none": None,
    }[how]
    if kind.is_padding() and (how == "none" or (how == "mask" and kind.is_bottom_right())):
        with pytest.raises(ValueError, match=r"accepted: SequenceDescriptor\.from_seqlens"):
            te.fused_attn(qkv(), **PLAIN | {"attn_mask_type": kind, "sequence_descriptor": descriptor})
        return
    given = PLAIN | {"attn_mask_type": kind, "window_size": window, "sequence_descriptor": descriptor}
    compare(dict(zip("qkv", qkv(), strict=True)), lambda x: te.fused_attn((x["q"], x["k"], x["v"]), **given), seen)


PACKED_Q, PACKED_KV = [[(0, 3), (3, 2), (6, 4)], [(1, 5), (7, 4)]], [[(0, 2), (4, 5), (9, 4)], [(0, 6), (6, 7)]]


def by_offsets() -> Any:
    """Returns PACKED_Q and PACKED_KV with the end that TransformerEngine's docstring puts behind offsets, and -1 for none."""

    def listed(packed: Any, part: int) -> Any:
        values = [[segment[part] for segment in row] for row in packed]
        last = [[sum(row[-1])] * (1 - part) for row in packed]
        return jnp.asarray([(v + e + [-1, -1])[: 4 - part] for v, e in zip(values, last, strict=True)], jnp.int32)

    return SequenceDescriptor.from_seqlens_and_offsets(
        (listed(PACKED_Q, 1), listed(PACKED_KV, 1)), (listed(PACKED_Q, 0), listed(PACKED_KV, 0))
    )


@pytest.mark.sample("kind", "how")
@pytest.mark.parametrize("how", ["offsets", "ids"])
@pytest.mark.parametrize("kind", [kind for kind in AttnMaskType if kind.is_padding()], ids=lambda kind: kind.name)
def test_several_sequences_a_row(kind: Any, how: str) -> None:
    window = WINDOWS[kind.is_causal()]
    q, kv = rows(PACKED_Q, SQ), rows(PACKED_KV, SKV)
    seen = pairs_seen(kind, window, (q[0], kv[0]), (q[1], kv[1]), (q[2], kv[2]))
    given = PLAIN | {
        "qkv_layout": QKVLayout.THD_THD_THD,
        "attn_mask_type": kind,
        "window_size": window,
        "sequence_descriptor": by_offsets() if how == "offsets" else by_ids(q, kv),
        "max_segments_per_seq": 3,
    }
    compare(dict(zip("qkv", qkv(), strict=True)), lambda x: te.fused_attn((x["q"], x["k"], x["v"]), **given), seen)


@pytest.mark.sample("kind", "what")
@pytest.mark.parametrize("what", ["pre-scale bias", "score_mod", "bias and score_mod"])
@pytest.mark.parametrize("kind", [kind for kind in AttnMaskType if kind.is_padding()], ids=lambda kind: kind.name)
def test_offsets_beside_what_knows_places_in_rows(kind: Any, what: str) -> None:
    """A bias and the tensor of a score_mod, [b, h, sq, skv], and their gradients."""
    q, kv = rows(PACKED_Q, SQ), rows(PACKED_KV, SKV)
    seen = pairs_seen(kind, WINDOWS[kind.is_causal()], (q[0], kv[0]), (q[1], kv[1]), (q[2], kv[2]))
    leaves = dict(zip("qkv", qkv(), strict=True))
    leaves |= {"pre": normal(5, B, H, SQ, SKV)} if "bias" in what else {}
    leaves |= {"post": normal(6, B, H, SQ, SKV)} if "score_mod" in what else {}
    given = PLAIN | {
        "qkv_layout": QKVLayout.THD_THD_THD,
        "attn_mask_type": kind,
        "window_size": WINDOWS[kind.is_causal()],
        "sequence_descriptor": by_offsets(),
    }

    def call(x: Any) -> Any:
        more: dict[str, Any] = {}
        if "pre" in x:
            more |= {"attn_bias_type": AttnBiasType.PRE_SCALE_BIAS, "bias": x["pre"]}
        if "post" in x:
            more["score_mod"] = lambda graph, score, tensors: graph.add(a=score, b=tensors["post"])
            more["score_mod_tensors"] = {"post": x["post"]}
        return te.fused_attn((x["q"], x["k"], x["v"]), **given | more)

    compare(leaves, call, seen)


def test_tokens_out_of_order() -> None:
    """Load balancing over devices orders them so."""
    order_q, order_kv = np.random.RandomState(0).permutation(SQ), np.random.RandomState(1).permutation(SKV)
    q, kv = (
        [np.asarray(part)[:, order] for part in rows(p, n)] for p, n, order in ((PACKED_Q, SQ, order_q), (PACKED_KV, SKV, order_kv))
    )
    kind = AttnMaskType.PADDING_CAUSAL_MASK
    given = PLAIN | {"qkv_layout": QKVLayout.THD_THD_THD, "attn_mask_type": kind, "sequence_descriptor": by_ids(q, kv)}
    seen = pairs_seen(kind, None, (q[0], kv[0]), (q[1], kv[1]))
    compare(dict(zip("qkv", qkv(), strict=True)), lambda x: te.fused_attn((x["q"], x["k"], x["v"]), **given), seen)


@pytest.mark.sample("bias_type", "softmax")
@pytest.mark.parametrize("bias_type", [AttnBiasType.PRE_SCALE_BIAS, AttnBiasType.POST_SCALE_BIAS], ids=lambda kind: kind.name)
@pytest.mark.parametrize("softmax", list(AttnSoftmaxType), ids=lambda kind: kind.name)
def test_bias_and_softmax_types(bias_type: Any, softmax: Any) -> None:
    field = "pre" if bias_type is AttnBiasType.PRE_SCALE_BIAS else "post"
    leaves = dict(zip("qkv", qkv(), strict=True)) | {field: normal(5, 1, H, SQ, SKV)}
    if softmax is AttnSoftmaxType.LEARNABLE_SOFTMAX:
        leaves["offset"] = normal(6, 1, H, 1, 1)
    given = PLAIN | {"attn_bias_type": bias_type, "softmax_type": softmax}

    def call(x: Any) -> Any:
        return te.fused_attn((x["q"], x["k"], x["v"]), **given | {"bias": x[field], "softmax_offset": x.get("offset")})

    compare(leaves, call, None, softmax)


@pytest.mark.parametrize("layout", list(QKVLayout), ids=lambda layout: layout.name)
def test_layouts(layout: Any) -> None:
    """Each has the memory order of its name; the gradient of a packed array is one array."""
    q, k, v = normal(0, B, SQ, H, D), normal(1, B, SQ, H, D), normal(2, B, SQ, H, D)
    arrays = (
        (jnp.stack([q, k, v], 2),) if layout.is_qkvpacked() else (q, jnp.stack([k, v], 2)) if layout.is_kvpacked() else (q, k, v)
    )
    lengths = jnp.asarray([[5, 3], [SQ, 0]], jnp.int32)
    kind = AttnMaskType.PADDING_CAUSAL_MASK
    descriptor = SequenceDescriptor.from_seqlens(lengths[:, 0])
    if layout.is_thd():
        descriptor = SequenceDescriptor.from_seqlens_and_offsets(lengths, jnp.asarray([[0, 6], [0, -1]], jnp.int32))
    given = PLAIN | {"attn_mask_type": kind, "sequence_descriptor": descriptor}
    out, pull = jax.vjp(lambda *x: te.fused_attn(x, **given | {"qkv_layout": layout}), *arrays)
    expected, backward = jax.vjp(lambda *x: te.fused_attn(x, **given | {"qkv_layout": layout.to_separate()}), q, k, v)
    dout = normal(3, *out.shape)
    assert jnp.array_equal(out, expected)
    parts = [part for x in pull(dout) for part in (jnp.moveaxis(x, 2, 0) if x.ndim == 5 else [x])]
    for a, b in zip(parts, backward(dout), strict=True):
        assert jnp.array_equal(a, b)
    assert layout.to_qkvpacked().is_qkvpacked()
    assert layout.to_kvpacked().is_kvpacked()
    assert layout.get_qkv_format().name == ("THD" if layout.is_thd() else "BSHD")
    assert layout.name.startswith(("T", "THD")) is layout.is_thd()


def test_dropout_is_that_of_attention_and_of_training_alone() -> None:
    from flexattn.jax import attention

    key = jax.random.key(5)
    expected = attention(*qkv(), dropout_p=0.25, rng_state=key, softmax_scale=SCALE)
    words = jax.random.key_data(key)
    for seed in (key, words, jnp.stack([words, words + 1]), words.astype(jnp.int32)):  # one, and one for each device
        out = te.fused_attn(qkv(), **PLAIN | {"dropout_probability": 0.25, "seed": seed})
        assert jnp.array_equal(out, expected)
    given = PLAIN | {"dropout_probability": 0.25, "seed": words}
    without = te.fused_attn(qkv(), **PLAIN)
    assert jnp.array_equal(te.fused_attn(qkv(), **given | {"is_training": False}), without)
    assert not jnp.allclose(expected, without, atol=1e-2)


def test_what_a_checkpoint_policy_keeps() -> None:
    """With the given name kept, the backward computes no forward again."""

    def forwards(name: str) -> int:
        policy = jax.checkpoint_policies.save_only_these_names("kept")
        call = jax.checkpoint(lambda *x: te.fused_attn(x, **PLAIN | {"context_checkpoint_name": name}).sum(), policy=policy)
        return str(jax.make_jaxpr(jax.grad(call))(*qkv())).count("flexattn_forward[")

    assert (forwards("kept"), forwards("other")) == (1, 2)


def test_descriptors_are_pytrees() -> None:
    descriptor = by_ids(rows(PACKED_Q, SQ), rows(PACKED_KV, SKV))
    leaves, tree = jax.tree.flatten(descriptor)
    assert len(leaves) == 8
    again = jax.tree.unflatten(tree, leaves)
    assert again.segment_ids[1] is descriptor.segment_ids[1]
    assert [x.size for pair in (again.seqlens, again.seq_offsets) for x in pair] == [0, 0, 0, 0]


def test_nvte_variable_asks_for_determinism(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_deterministic() -> list[bool]:
        text = str(jax.make_jaxpr(lambda *x: te.fused_attn(x, **PLAIN))(*qkv()))
        return [word == "True" for word in re.findall(r"deterministic=(\w+)", text)]

    assert is_deterministic() == [False]
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    assert is_deterministic() == [True]


SIGNATURE = {  # from fused_attn in transformer_engine/jax/attention.py, with pull request 2985
    **dict.fromkeys(("qkv", "bias", "sequence_descriptor", "seed", "attn_bias_type", "attn_mask_type"), inspect.Parameter.empty),
    **dict.fromkeys(
        ("qkv_layout", "softmax_type", "scaling_factor", "dropout_probability", "is_training"), inspect.Parameter.empty
    ),
    "max_segments_per_seq": 1,
    "window_size": None,
    "context_parallel_strategy": te.CPStrategy.DEFAULT,
    "context_parallel_causal_load_balanced": False,
    "context_parallel_axis": "",
    "context_checkpoint_name": "context",
    **dict.fromkeys(("softmax_offset", "stripe_size", "score_mod", "score_mod_bprop", "score_mod_tensors")),
    "score_mod_bprop_tensors": None,
}


def test_signature() -> None:
    parameters = inspect.signature(te.fused_attn).parameters
    assert {name: p.default for name, p in parameters.items()} == SIGNATURE
    assert list(parameters) == list(SIGNATURE)


def available(**given: Any) -> bool:
    arguments = {
        "is_training": True,
        "q_dtype": jnp.bfloat16,
        "kv_dtype": jnp.bfloat16,
        "qkv_layout": QKVLayout.BSHD_BSHD_BSHD,
        "attn_bias_type": AttnBiasType.NO_BIAS,
        "attn_mask_type": AttnMaskType.CAUSAL_MASK,
        "softmax_type": AttnSoftmaxType.VANILLA_SOFTMAX,
        "dropout_probability": 0.0,
        "q_num_heads": 8,
        "kv_num_heads": 2,
        "q_max_seqlen": 256,
        "kv_max_seqlen": 512,
        "head_dim_qk": 128,
        "head_dim_v": 128,
    }
    return te.is_fused_attn_kernel_available(**arguments | given)


@pytest.mark.parametrize(
    ("arguments", "on_cuda", "on_a_cpu"),
    [
        ({}, True, True),
        ({"qkv_layout": QKVLayout.T3HD, "attn_mask_type": AttnMaskType.PADDING_CAUSAL_MASK, "window_size": (64, 0)}, True, True),
        ({"qkv_layout": QKVLayout.T3HD}, False, False),  # without padding
        ({"attn_bias_type": AttnBiasType.POST_SCALE_BIAS, "softmax_type": AttnSoftmaxType.LEARNABLE_SOFTMAX}, True, True),
        ({"dropout_probability": 0.1}, True, True),
        ({"kv_num_heads": 3}, False, False),
        ({"kv_dtype": jnp.float16}, False, False),
        ({"head_dim_qk": 600}, False, True),
    ],
    ids=range(8),
)
def test_is_fused_attn_kernel_available(arguments: dict[str, Any], on_cuda: bool, on_a_cpu: bool) -> None:
    from flexattn.jax import compiled_for

    assert available(**arguments) is on_a_cpu
    with compiled_for((9, 0), processors=132):
        assert available(**arguments) is on_cuda


def test_names() -> None:
    assert te.canonicalize_attn_mask_type("causal_padding") is AttnMaskType.PADDING_CAUSAL_MASK
    assert te.canonicalize_attn_mask_type("no_mask") is AttnMaskType.NO_MASK
    assert te.canonicalize_attn_mask_type("bottom_right_padding_causal") is AttnMaskType.PADDING_CAUSAL_BOTTOM_RIGHT_MASK
    assert AttnSoftmaxType.from_str("off_by_one") is AttnSoftmaxType.OFF_BY_ONE_SOFTMAX
    with pytest.raises(ValueError, match="attn_mask_type is 'arbitrary'; accepted: no_mask, padding"):
        te.canonicalize_attn_mask_type("arbitrary")
    with pytest.raises(ValueError, match="softmax_type is 'sink'; accepted: 'vanilla'"):
        AttnSoftmaxType.from_str("sink")


ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"attn_mask_type": "causal"}, "attn_mask_type is 'causal' (str); accepted: a AttnMaskType: NO_MASK"),
    ({"qkv_layout": QKVLayout.BS3HD}, "qkv is a tuple of 3 with qkv_layout BS3HD; accepted: (qkv)"),
    ({"qkv": (jnp.ones((2, 3, 4)),) * 3}, "q of qkv has shape (2, 3, 4) with qkv_layout BSHD_BSHD_BSHD; accepted: [b, s, h, d]"),
    ({"qkv": (jnp.ones((2, 3, 2, 4, 8)),), "qkv_layout": QKVLayout.T3HD}, "accepted: [b, s, 3, h, d]"),
    ({"bias": jnp.ones((1, 1, 11, 14))}, "bias is float32 (1, 1, 11, 14) with attn_bias_type NO_BIAS; accepted: None"),
    ({"attn_bias_type": AttnBiasType.POST_SCALE_BIAS}, "bias is None (NoneType) with attn_bias_type POST_SCALE_BIAS; accepted"),
    ({"softmax_type": AttnSoftmaxType.LEARNABLE_SOFTMAX}, "softmax_offset is None (NoneType) with LEARNABLE_SOFTMAX; accepted"),
    ({"softmax_offset": jnp.ones((1, 4, 1, 1))}, "softmax_offset is set with softmax_type VANILLA_SOFTMAX; accepted: None"),
    ({"dropout_probability": 0.5}, "seed is None (NoneType) with dropout; accepted: a key of jax.random"),
    ({"dropout_probability": 0.5, "seed": jnp.ones(2)}, "seed is float32 (2,) with dropout"),
    ({"window_size": 3}, "window_size is 3; accepted: None, or a pair of ints"),
    ({"window_size": (3, 2), "attn_mask_type": AttnMaskType.CAUSAL_MASK}, "window_size is (3, 2) with attn_mask_type CAUSAL_MASK"),
    ({"qkv_layout": QKVLayout.THD_THD_THD}, "attn_mask_type is NO_MASK with a THD layout; accepted: a type with PADDING"),
    ({"max_segments_per_seq": 0}, "max_segments_per_seq is 0 (int); accepted: an int of at least 1"),
    ({"score_mod_tensors": {}}, "score_mod_tensors comes without a score_mod"),
    ({"context_parallel_axis": "cp"}, "context_parallel_axis is 'cp', but sequences are not split over devices"),
    ({"context_parallel_strategy": te.CPStrategy.RING}, "context_parallel_strategy is <CPStrategy.RING"),
    ({"context_parallel_causal_load_balanced": True}, "context_parallel_causal_load_balanced is True"),
    ({"stripe_size": 1}, "stripe_size is 1"),
    ({"sequence_descriptor": 3}, "sequence_descriptor is 3 (int); accepted: a SequenceDescriptor, a mask (2, 1, 11, 14), or None"),
]
PADDING = {"attn_mask_type": AttnMaskType.PADDING_MASK}
THD = PADDING | {"qkv_layout": QKVLayout.THD_THD_THD}
LENGTHS = jnp.ones(2, jnp.int32)
OFFSETS = SequenceDescriptor.from_seqlens_and_offsets(LENGTHS[:, None], LENGTHS[:, None])
ERRORS += [
    (PADDING | {"sequence_descriptor": SequenceDescriptor.from_seqlens(jnp.ones(3, int))}, "shape (3,); accepted: integers (2,)"),
    (
        PADDING | {"sequence_descriptor": SequenceDescriptor.from_seqlens(jnp.ones(2))},
        "seqlens of the sequence_descriptor has dtype",
    ),
    (
        PADDING | {"sequence_descriptor": OFFSETS},
        "is a SequenceDescriptor with seqlens, seq_offsets, with attn_mask_type PADDING_MASK",
    ),
    (PADDING | {"sequence_descriptor": SequenceDescriptor()}, "is a SequenceDescriptor with nothing"),
    (PADDING | {"sequence_descriptor": SequenceDescriptor(None, None)}, "is a SequenceDescriptor with nothing"),
    (PADDING | {"sequence_descriptor": jnp.ones((2, 11, 14))}, "is a mask of shape (2, 11, 14); accepted: (2, 1, 11, 14)"),
    (
        THD | {"sequence_descriptor": SequenceDescriptor.from_seqlens(LENGTHS)},
        "accepted: SequenceDescriptor.from_seqlens_and_offsets",
    ),
    (THD | {"sequence_descriptor": jnp.ones((2, 1, 11, 14))}, "sequence_descriptor is a mask with a THD layout"),
]


@pytest.mark.parametrize(("arguments", "text"), ERRORS, ids=range(len(ERRORS)))
def test_errors(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises((ValueError, TypeError, NotImplementedError)) as caught:
        te.fused_attn(**{"qkv": qkv()} | PLAIN | arguments)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: SequenceDescriptor.from_seqlens((LENGTHS,) * 3), "seqlens is a tuple of 3; accepted: an array, or a pair"),
        (lambda: SequenceDescriptor.from_seqlens([1, 2]), "seqlens is [1, 2] (list); accepted: an array, or a pair"),
        (lambda: SequenceDescriptor.from_segment_ids_and_pos(LENGTHS), "segment_pos is None; accepted: integers [b, s]"),
    ],
    ids=["three", "list", "no positions"],
)
def test_errors_of_descriptors(make: Any, text: str) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        make()
    assert text in str(caught.value)
