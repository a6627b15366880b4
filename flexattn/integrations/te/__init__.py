"""TransformerEngine's attention under its own names, run by flexattn's kernels; TransformerEngine need not be installed."""

from __future__ import annotations

from flexattn.integrations.te.backend_selection import (
    AttentionParams,
    explain_attention_backend,
    get_attention_backend,
    is_fused_attn_available,
)
from flexattn.integrations.te.dot_product_attention import DotProductAttention
from flexattn.integrations.te.fused_attn import fused_attn_bwd, fused_attn_fwd
from flexattn.integrations.te.inference import InferenceParams
from flexattn.integrations.te.names import (
    META_DO,
    META_DP,
    META_DQKV,
    META_O,
    META_QKV,
    META_S,
    AttnBiasType,
    AttnMaskType,
    FusedAttnBackend,
    QKVFormat,
    QKVLayout,
    SoftmaxType,
)
from flexattn.integrations.te.quantizers import Float8CurrentScalingQuantizer, Float8Quantizer, Float8Tensor
from flexattn.integrations.te.recipe import autocast, checkpoint, fp8_autocast
from flexattn.integrations.te.score_mod import TEScoreMod

__all__ = [
    "META_DO",
    "META_DP",
    "META_DQKV",
    "META_O",
    "META_QKV",
    "META_S",
    "AttentionParams",
    "AttnBiasType",
    "AttnMaskType",
    "DotProductAttention",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "Float8Tensor",
    "FusedAttnBackend",
    "InferenceParams",
    "QKVFormat",
    "QKVLayout",
    "SoftmaxType",
    "TEScoreMod",
    "autocast",
    "checkpoint",
    "explain_attention_backend",
    "fp8_autocast",
    "fused_attn_bwd",
    "fused_attn_fwd",
    "get_attention_backend",
    "is_fused_attn_available",
]
