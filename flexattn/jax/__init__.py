"""flexattn for JAX: `attention` of JAX arrays, with mods written in JAX. No other module of flexattn imports this one or JAX."""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("jax") is None:
    raise ImportError("flexattn.jax needs JAX, which is not installed; pip install 'flexattn[jax]'")

from flexattn.jax.append import append_kv
from flexattn.jax.block_mask import BlockMask, create_block_mask
from flexattn.jax.cuda import compiled_for
from flexattn.jax.front import attention, explain
from flexattn.jax.nn import dot_product_attention
from flexattn.jax.sequence import attention_over_axis, sequence_order

__all__ = [
    "BlockMask",
    "append_kv",
    "attention",
    "attention_over_axis",
    "compiled_for",
    "create_block_mask",
    "dot_product_attention",
    "explain",
    "sequence_order",
]
