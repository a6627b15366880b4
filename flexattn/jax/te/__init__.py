"""TransformerEngine's attention for JAX under its own names, run by `flexattn.jax.attention`.

TransformerEngine need not be installed. `flexattn.jax.te.flax` has its flax module.
"""

from __future__ import annotations

from flexattn.jax.te.fused_attn import fused_attn, is_fused_attn_kernel_available
from flexattn.jax.te.names import (
    AttnBiasType,
    AttnMaskType,
    AttnSoftmaxType,
    CPStrategy,
    QKVFormat,
    QKVLayout,
    canonicalize_attn_mask_type,
)
from flexattn.jax.te.sequences import SequenceDescriptor

__all__ = [
    "AttnBiasType",
    "AttnMaskType",
    "AttnSoftmaxType",
    "CPStrategy",
    "QKVFormat",
    "QKVLayout",
    "SequenceDescriptor",
    "canonicalize_attn_mask_type",
    "fused_attn",
    "is_fused_attn_kernel_available",
]
