"""Fused attention for PyTorch: Triton kernels, cuDNN graphs, one reference, and a dispatcher that says what it chose and why."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from flexattn.dispatch.context import attention_backend
from flexattn.dispatch.select import BackendError
from flexattn.dispatch.spec import AttentionSpec, Window
from flexattn.functional import attention, explain, merge_attention

if TYPE_CHECKING:
    from flexattn import fp8, mods, nn
    from flexattn.append import append_kv
    from flexattn.backward import Gradients, attention_backward
    from flexattn.block_mask import create_block_mask
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

# Names whose module is imported when they are first asked for, which most processes never do.
_LATER = {
    "Gradients": "backward",
    "PagedKVCache": "kv_cache",
    "append_kv": "append",
    "attention_backward": "backward",
    "attention_with_prefix": "prefix",
    "create_block_mask": "block_mask",
    "fp8": "fp8",
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
