"""Fused attention for PyTorch: Triton kernels, cuDNN graphs, one reference, and a dispatcher that says what it chose and why."""

from __future__ import annotations

from flexattn import fp8, mods, nn
from flexattn.append import append_kv
from flexattn.backward import Gradients, attention_backward
from flexattn.block_mask import create_block_mask
from flexattn.dispatch.context import attention_backend
from flexattn.dispatch.select import BackendError
from flexattn.dispatch.spec import AttentionSpec, Window
from flexattn.functional import attention, explain, merge_attention
from flexattn.kv_cache import PagedKVCache
from flexattn.plot import plot_mask
from flexattn.prefix import attention_with_prefix
from flexattn.warm_up import warmup

__version__ = "0.1.0"

__all__ = [
    "AttentionSpec",
    "BackendError",
    "Gradients",
    "PagedKVCache",
    "Window",
    "append_kv",
    "attention",
    "attention_backend",
    "attention_backward",
    "attention_with_prefix",
    "create_block_mask",
    "explain",
    "fp8",
    "merge_attention",
    "mods",
    "nn",
    "plot_mask",
    "warmup",
]
