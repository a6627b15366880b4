"""TransformerEngine's query for kernels, answered by `flexattn.jax.explain`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from flexattn.dispatch.select import BackendError
from flexattn.jax.front import explain
from flexattn.jax.te.fused_attn import window_of
from flexattn.jax.te.names import AttnBiasType, AttnMaskType, AttnSoftmaxType, QKVLayout, member, name_of
from flexattn.jax.te.sequences import Rows


def is_fused_attn_kernel_available(
    is_training: bool,
    q_dtype: DTypeLike,
    kv_dtype: DTypeLike,
    qkv_layout: QKVLayout,
    attn_bias_type: AttnBiasType,
    attn_mask_type: AttnMaskType,
    softmax_type: AttnSoftmaxType,
    dropout_probability: float,
    q_num_heads: int,
    kv_num_heads: int,
    q_max_seqlen: int,
    kv_max_seqlen: int,
    head_dim_qk: int,
    head_dim_v: int,
    window_size: tuple[int, int] | None = None,
) -> bool:
    """Returns whether `fused_attn` supports such calls and their gradients on JAX's target: its first CUDA device, or a CPU.

    Dtypes are JAX's. dropout_probability is only used if is_training is True. Nothing is run.

    Source of the signature: https://github.com/NVIDIA/TransformerEngine/blob/main/transformer_engine/jax/attention.py

    Raises ValueError if an argument is not a member of its enumeration, or if the window is invalid.
    """
    kind = member(AttnMaskType, "attn_mask_type", attn_mask_type)
    layout = member(QKVLayout, "qkv_layout", qkv_layout)
    softmax = member(AttnSoftmaxType, "softmax_type", softmax_type)
    bias_type = member(AttnBiasType, "attn_bias_type", attn_bias_type)
    rows = Rows(1, (q_max_seqlen, kv_max_seqlen), layout.is_thd(), kind, window_of(window_size, kind))
    batch_dim = () if layout.is_thd() else (1,)
    kv = (*batch_dim, kv_max_seqlen, kv_num_heads)
    arrays = {
        "q": jax.ShapeDtypeStruct((*batch_dim, q_max_seqlen, q_num_heads, head_dim_qk), q_dtype),
        "k": jax.ShapeDtypeStruct((*kv, head_dim_qk), kv_dtype),
        "v": jax.ShapeDtypeStruct((*kv, head_dim_v), kv_dtype),
    }
    arguments: dict[str, object] = {"qkv_format": "thd" if layout.is_thd() else "bshd"}
    arguments |= {"bias_type": name_of(bias_type), "softmax_type": name_of(softmax)}
    arguments |= rows.padded_band if kind.is_padding() else rows.band
    if kind.is_padding():
        arrays |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), jax.ShapeDtypeStruct((2,), jnp.int32))
    if layout.is_thd():
        arguments |= {"max_seqlen_q": q_max_seqlen, "max_seqlen_kv": kv_max_seqlen}
    if bias_type is not AttnBiasType.NO_BIAS:
        arrays["bias"] = jax.ShapeDtypeStruct((1, q_num_heads, q_max_seqlen, kv_max_seqlen), q_dtype)
    if softmax is AttnSoftmaxType.LEARNABLE_SOFTMAX:
        arrays["softmax_offset"] = jax.ShapeDtypeStruct((q_num_heads,), jnp.float32)
    if is_training and dropout_probability:
        arrays["rng_state"] = jax.ShapeDtypeStruct((2,), jnp.uint32)
        arguments["dropout_p"] = dropout_probability

    def run_explain(operands: dict[str, object]) -> None:
        explain(**operands, **arguments)

    try:
        jax.eval_shape(run_explain, arrays)
    except (BackendError, ValueError, TypeError):
        return False
    return True
