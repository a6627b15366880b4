"""Fused attention for PyTorch: Triton kernels, cuDNN graphs, one reference, and a dispatcher that says what it chose and why."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

# The commands `flexattn` and `python -m flexattn` import torch when they need it: --help does not.
_ARGV = getattr(sys, "argv", None) or [""]
_IS_SCRIPT = os.path.basename(_ARGV[0]) in ("flexattn", "flexattn.exe")
_IS_COMMAND = _IS_SCRIPT or (_ARGV[0] == "-m" and sys.orig_argv[-len(_ARGV) - 1 :] == ["-m", "flexattn", *_ARGV[1:]])

if TYPE_CHECKING or not _IS_COMMAND:
    from flexattn.dispatch.context import attention_backend
    from flexattn.dispatch.select import BackendError
    from flexattn.dispatch.spec import AttentionSpec, Window
    from flexattn.functional import attention, explain, merge_attention

if TYPE_CHECKING:
    from flexattn import fp8, mods, nn
    from flexattn.append import append_kv
    from flexattn.backward import Gradients, attention_backward
    from flexattn.block_mask import create_block_mask
    from flexattn.call_log import explaining
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
    "explaining",
    "fp8",
    "merge_attention",
    "mods",
    "nn",
    "plot_mask",
    "warmup",
]

# Names whose module is imported when they are first used. Most processes never use them, and commands not even `attention`.
_LATER = {
    "AttentionSpec": "dispatch.spec",
    "BackendError": "dispatch.select",
    "Gradients": "backward",
    "PagedKVCache": "kv_cache",
    "Window": "dispatch.spec",
    "append_kv": "append",
    "attention": "functional",
    "attention_backend": "dispatch.context",
    "attention_backward": "backward",
    "attention_with_prefix": "prefix",
    "create_block_mask": "block_mask",
    "explain": "functional",
    "explaining": "call_log",
    "fp8": "fp8",
    "merge_attention": "functional",
    "mods": "mods",
    "nn": "nn",
    "plot_mask": "plot",
    "warmup": "warm_up",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if not TYPE_CHECKING:  # else any name would pass as one of the package's

    def __getattr__(name: str) -> Any:
        module = _LATER.get(name)
        if module is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = importlib.import_module(f"{__name__}.{module}")
        if name != module:
            found = globals()[name] = getattr(found, name)
        return found
