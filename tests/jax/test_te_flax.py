"""TransformerEngine's flax module: its fields as arguments of `fused_attn`, its parameter, its signature."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from tests.jax.test_te import PLAIN, normal

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'flexattn[jax]'")
pytest.importorskip("flax", reason="flax is not installed: pip install flax")
jnp = jax.numpy
te = pytest.importorskip("flexattn.jax.te")

from flexattn.jax.te.flax import DotProductAttention  # noqa: E402

B, S, H, D = 2, 9, 4, 16
FIELDS = {"head_dim": D, "num_attention_heads": H}
GIVEN = PLAIN | {"scaling_factor": D**-0.5}


def qkv() -> tuple[Any, Any, Any]:
    return normal(0, B, S, H, D), normal(1, B, S, H, D), normal(2, B, S, H, D)


def doubled(graph: Any, score: Any, tensors: Any) -> Any:
    return graph.mul(a=score, b=tensors["factor"])


LENGTHS = jnp.asarray([4, 9], jnp.int32)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {  # fields, arguments of the call and of fused_attn
    "defaults": ({}, {}, {"attn_mask_type": te.AttnMaskType.CAUSAL_MASK}),
    "lengths": (
        {"attn_mask_type": "padding_causal", "window_size": (3, 0), "scale_factor": 0.5},
        {"sequence_descriptor": te.SequenceDescriptor.from_seqlens(LENGTHS)},
        {
            "attn_mask_type": te.AttnMaskType.PADDING_CAUSAL_MASK,
            "window_size": (3, 0),
            "scaling_factor": 0.5,
            "sequence_descriptor": te.SequenceDescriptor.from_seqlens(LENGTHS),
        },
    ),
    "bias": (
        {"attn_mask_type": "no_mask", "softmax_type": "off_by_one"},
        {"bias": normal(3, 1, H, S, S)},
        {
            "bias": normal(3, 1, H, S, S),
            "attn_bias_type": te.AttnBiasType.POST_SCALE_BIAS,
            "softmax_type": te.AttnSoftmaxType.OFF_BY_ONE_SOFTMAX,
        },
    ),
    "score_mod": (
        {"attn_mask_type": "no_mask", "score_mod": doubled, "score_mod_bprop": doubled},
        {"score_mod_tensors": {"factor": 2.0}, "score_mod_bprop_tensors": {"factor": 2.0}},
        {"scaling_factor": 2 * D**-0.5},
    ),
}


@pytest.mark.sample("name", "layout")
@pytest.mark.parametrize("layout", ["bshd_bshd_bshd", "bshd_bs2hd", "bs3hd"])
@pytest.mark.parametrize("name", list(CASES))
def test_equals_fused_attn(name: str, layout: str) -> None:
    fields, call, arguments = CASES[name]
    q, k, v = qkv()
    given = {
        "bshd_bshd_bshd": (q, k, v),
        "bshd_bs2hd": (q, jnp.stack([k, v], 2), None),
        "bs3hd": (jnp.stack([q, k, v], 2), None, None),
    }
    module = DotProductAttention(**FIELDS, **fields, qkv_layout=layout)
    out = module.apply({}, *given[layout], **call)
    assert jnp.allclose(out, te.fused_attn((q, k, v), **GIVEN | arguments), atol=1e-6)
    turned = DotProductAttention(**FIELDS, **fields, qkv_layout=layout, transpose_batch_sequence=True)
    transposed = [None if x is None else jnp.swapaxes(x, 0, 1) for x in given[layout]]
    assert jnp.array_equal(jnp.swapaxes(turned.apply({}, *transposed, **call), 0, 1), out)


def test_the_sinks_parameter_and_its_gradient() -> None:
    module = DotProductAttention(**FIELDS, softmax_type="learnable", attn_mask_type="no_mask")
    variables = module.init(jax.random.key(0), *qkv())
    offset = variables["params"]["_FusedDotProductAttention_0"]["softmax_offset"]
    assert (offset.shape, offset.dtype) == ((1, H, 1, 1), jnp.float32)
    softmax = te.AttnSoftmaxType.LEARNABLE_SOFTMAX
    found = jax.grad(lambda x: module.apply(x, *qkv()).sum())(variables)
    expected = jax.grad(lambda x: te.fused_attn(qkv(), **GIVEN | {"softmax_type": softmax, "softmax_offset": x}).sum())(offset)
    assert abs(expected).min() > 0
    assert jnp.allclose(jax.tree.leaves(found)[0], expected, atol=1e-6)


def test_dropout_follows_its_rng() -> None:
    module = DotProductAttention(**FIELDS, attention_dropout=0.5)
    first, again, other = (module.apply({}, *qkv(), rngs={"dropout": jax.random.key(i)}) for i in (0, 0, 1))
    assert jnp.array_equal(first, again)
    assert not jnp.allclose(first, other, atol=1e-3)
    without = module.apply({}, *qkv(), deterministic=True)
    assert jnp.array_equal(without, DotProductAttention(**FIELDS).apply({}, *qkv()))


NAMES = (  # from transformer_engine/jax/flax/transformer.py, with pull request 2985
    *("head_dim", "num_attention_heads", "num_gqa_groups", "attention_dropout", "attn_mask_type", "attn_bias_type", "dtype"),
    *("dropout_rng_name", "float32_logits", "qkv_layout", "scale_factor", "transpose_batch_sequence", "window_size"),
    *("max_segments_per_seq", "context_parallel_causal_load_balanced", "context_parallel_axis", "context_parallel_strategy"),
    *("context_checkpoint_name", "softmax_type", "score_mod", "score_mod_bprop"),
)


def test_signature() -> None:
    assert tuple(inspect.signature(DotProductAttention).parameters)[: len(NAMES)] == NAMES
    call = tuple(inspect.signature(DotProductAttention.__call__).parameters)
    assert call[1:6] == ("query", "key", "value", "sequence_descriptor", "bias")
    assert call[6:] == ("deterministic", "mask", "score_mod_tensors", "score_mod_bprop_tensors")


@pytest.mark.parametrize(
    ("fields", "call", "text"),
    [
        ({"head_dim": 8}, {}, "head_dim is 8 but the arrays have 16"),
        ({"num_gqa_groups": 2}, {}, "num_gqa_groups is 2 but the arrays have 4"),
        ({"dtype": jnp.float16}, {}, "dtype is"),
        ({"qkv_layout": "sbhd_sbhd_sbhd"}, {}, "qkv_layout is 'sbhd_sbhd_sbhd'; accepted: bs3hd"),
        ({"attn_bias_type": "no_bias"}, {"bias": jnp.ones((1, 1, S, S))}, "bias is float32"),
        ({"context_parallel_strategy": "ring"}, {}, "sequences are not split over devices"),
        ({"context_parallel_strategy": "tree"}, {}, "context_parallel_strategy is 'TREE'; accepted: DEFAULT"),
        (
            {},
            {"mask": LENGTHS, "sequence_descriptor": te.SequenceDescriptor.from_seqlens(LENGTHS)},
            "mask and sequence_descriptor are both set",
        ),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_errors(fields: dict[str, Any], call: dict[str, Any], text: str) -> None:
    with pytest.raises((ValueError, NotImplementedError)) as caught:
        DotProductAttention(**FIELDS | fields).apply({}, *qkv(), **call)
    assert text in str(caught.value)
