"""Stand-in for TransformerEngine's flax module `DotProductAttention`, run by `flexattn.jax.te.fused_attn`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

from jax.typing import DTypeLike

if importlib.util.find_spec("flax") is None:
    raise ImportError("flexattn.jax.te.flax needs flax, which is not installed; pip install flax")

import jax
import jax.numpy as jnp
from flax import linen as nn

from flexattn.jax.te.fused_attn import fused_attn, separate
from flexattn.jax.te.names import AttnBiasType, AttnSoftmaxType, CPStrategy, QKVLayout, canonicalize_attn_mask_type
from flexattn.jax.te.sequences import SequenceDescriptor
from flexattn.validation import check_name

_STRATEGIES = {
    "DEFAULT": CPStrategy.DEFAULT,
    "ALL_GATHER": CPStrategy.ALL_GATHER,
    "ALLGATHER": CPStrategy.ALL_GATHER,
    "RING": CPStrategy.RING,
}


class _FusedDotProductAttention(nn.Module):  # type: ignore[misc]
    """Owner of the sink's parameter, named as in TransformerEngine, so that its checkpoints can be loaded."""

    @nn.compact  # type: ignore[untyped-decorator]
    def __call__(self, heads: int) -> Any:
        return self.param("softmax_offset", nn.initializers.zeros, (1, heads, 1, 1), jnp.float32)


class DotProductAttention(nn.Module):  # type: ignore[misc]
    """Attention with the fields and arguments of `transformer_engine.jax.flax.DotProductAttention`.

    Source: https://github.com/NVIDIA/TransformerEngine/blob/main/transformer_engine/jax/flax/transformer.py

    Fields:
        head_dim, num_attention_heads, num_gqa_groups: head dim and heads of the queries, and heads of the keys (None:
            num_attention_heads). All must match the arrays.
        attention_dropout, dropout_rng_name: dropout probability of a softmax weight, and the name of its rng.
        attn_mask_type, attn_bias_type, softmax_type, qkv_layout: names, such as "causal", "post_scale_bias" (None: no_bias or
            post_scale_bias, according to bias), "learnable" (with a parameter float32 [1, h, 1, 1]), "bs3hd".
        scale_factor: scale of q k^T. None: 1/sqrt(head_dim).
        transpose_batch_sequence: whether arrays are [s, b, ...], which a layout's name does not say. None: False.
        score_mod, score_mod_bprop: as in `fused_attn`.
        float32_logits: ignored; scores are always float32. dtype: None, or the arrays' dtype.
        window_size, max_segments_per_seq, context_parallel_causal_load_balanced, context_parallel_axis, context_parallel_strategy,
            context_checkpoint_name: as in `fused_attn`.
    """

    head_dim: int
    num_attention_heads: int
    num_gqa_groups: int | None = None
    attention_dropout: float = 0.0
    attn_mask_type: str = "causal"
    attn_bias_type: str | None = None
    dtype: DTypeLike | None = None
    dropout_rng_name: str = "dropout"
    float32_logits: bool = False
    qkv_layout: str = "bshd_bshd_bshd"
    scale_factor: float | None = None
    transpose_batch_sequence: bool | None = None
    window_size: tuple[int, int] | None = None
    max_segments_per_seq: int | None = 1
    context_parallel_causal_load_balanced: bool = False
    context_parallel_axis: str = ""
    context_parallel_strategy: str = "DEFAULT"
    context_checkpoint_name: str = "context"
    softmax_type: str = "vanilla"
    score_mod: Callable[..., object] | None = None
    score_mod_bprop: Callable[..., object] | None = None

    @nn.compact  # type: ignore[untyped-decorator]
    def __call__(
        self,
        query: jax.Array,
        key: jax.Array | None,
        value: jax.Array | None,
        sequence_descriptor: SequenceDescriptor | None = None,
        bias: jax.Array | None = None,
        *,
        deterministic: bool = False,
        mask: Any = None,
        score_mod_tensors: Mapping[str, object] | None = None,
        score_mod_bprop_tensors: Mapping[str, Any] | None = None,
    ) -> jax.Array:
        """Returns attention, [b, sq, h, d_v] or, transposed, [sq, b, h, d_v].

        Args:
            query, key, value: arrays according to qkv_layout. If q, k and v share one array, it is query, and key and value are not
                read. If k and v share one array, it is key, and value is not read.
            sequence_descriptor, bias, score_mod_tensors, score_mod_bprop_tensors: as in `fused_attn`.
            deterministic: if True, there is no dropout.
            mask: an older name of sequence_descriptor.

        Raises the errors of `fused_attn`, and ValueError for invalid names and fields.
        """
        if mask is not None:
            if sequence_descriptor is not None:
                raise ValueError("mask and sequence_descriptor are both set; accepted: one of the two")
            sequence_descriptor = mask
        layout = _member(QKVLayout, "qkv_layout", self.qkv_layout)
        arrays = (query,) if layout.is_qkvpacked() else (query, key) if layout.is_kvpacked() else (query, key, value)
        transposed = tuple(jnp.swapaxes(x, 0, 1) if self.transpose_batch_sequence and x is not None else x for x in arrays)
        q, k, v = separate(transposed, layout)
        self._check_fields(q, k)
        kind = "NO_BIAS" if bias is None else "POST_SCALE_BIAS"
        bias_type = _member(AttnBiasType, "attn_bias_type", kind if self.attn_bias_type is None else self.attn_bias_type)
        if bias is not None and bias.dtype not in (q.dtype, jnp.float32):
            bias = bias.astype(q.dtype)
        softmax_type = AttnSoftmaxType.from_str(self.softmax_type)
        offset = None
        if softmax_type is AttnSoftmaxType.LEARNABLE_SOFTMAX:
            offset = _FusedDotProductAttention()(q.shape[2])
        drops = not deterministic and self.attention_dropout > 0.0
        check_name("context_parallel_strategy", str(self.context_parallel_strategy).upper(), tuple(_STRATEGIES))
        out = fused_attn(
            (q, k, v),
            bias,
            sequence_descriptor,
            self.make_rng(self.dropout_rng_name) if drops else None,
            attn_bias_type=bias_type,
            attn_mask_type=canonicalize_attn_mask_type(self.attn_mask_type),
            qkv_layout=layout.to_separate(),
            softmax_type=softmax_type,
            scaling_factor=self.head_dim**-0.5 if self.scale_factor is None else self.scale_factor,
            dropout_probability=self.attention_dropout,
            is_training=not deterministic,
            max_segments_per_seq=1 if self.max_segments_per_seq is None else self.max_segments_per_seq,
            window_size=self.window_size,
            context_parallel_strategy=_STRATEGIES[self.context_parallel_strategy.upper()],
            context_parallel_causal_load_balanced=self.context_parallel_causal_load_balanced,
            context_parallel_axis=self.context_parallel_axis,
            context_checkpoint_name=self.context_checkpoint_name,
            softmax_offset=offset,
            score_mod=self.score_mod,
            score_mod_bprop=self.score_mod_bprop,
            score_mod_tensors=score_mod_tensors,
            score_mod_bprop_tensors=score_mod_bprop_tensors,
        )
        return jnp.swapaxes(out, 0, 1) if self.transpose_batch_sequence else out

    def _check_fields(self, q: jax.Array, k: jax.Array) -> None:
        heads_kv = self.num_attention_heads if self.num_gqa_groups is None else self.num_gqa_groups
        for field, value, actual in (
            ("head_dim", self.head_dim, q.shape[3]),
            ("num_attention_heads", self.num_attention_heads, q.shape[2]),
            ("num_gqa_groups", heads_kv, k.shape[2]),
            ("dtype", self.dtype, None if self.dtype is None else q.dtype),
        ):
            if value != actual:
                raise ValueError(f"{field} is {value} but the arrays have {actual}; accepted: equal values")


def _member(kind: Any, field: str, name: str) -> Any:
    check_name(field, str(name).lower(), tuple(known.lower() for known in kind.__members__))
    return kind[str(name).upper()]
