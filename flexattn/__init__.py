"""Fused attention for PyTorch: Triton kernels, cuDNN graphs, one reference, and a dispatcher that explains its choice."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from typing import TYPE_CHECKING, Any

# The commands `flexattn` and `python -m flexattn` import torch when they need it: --help does not.
_ARGV = getattr(sys, "argv", None) or [""]
_IS_SCRIPT = os.path.basename(_ARGV[0]) in ("flexattn", "flexattn.exe")
_IS_COMMAND = _IS_SCRIPT or (_ARGV[0] == "-m" and sys.orig_argv[-len(_ARGV) - 1 :] == ["-m", "flexattn", *_ARGV[1:]])

if TYPE_CHECKING or not _IS_COMMAND:
    from flexattn.dispatch.options import attention_backend
    from flexattn.dispatch.select import BackendError
    from flexattn.dispatch.spec import Window
    from flexattn.functional import OutLse, OutLseMaxLogit, OutMaxLogit, attention, explain, merge_attention

if TYPE_CHECKING:
    from flexattn import distributed, fp8, integrations, jax, mods, nn, testing  # noqa: F401
    from flexattn.append import append_kv
    from flexattn.backward import Gradients, attention_backward
    from flexattn.block_mask import create_block_mask
    from flexattn.call_log import explaining
    from flexattn.indexer import SelectedKeys, key_weights, select_keys, selection_loss
    from flexattn.kv_cache import PagedKVCache
    from flexattn.latent_rows import append_latents, latent_attention, pack_latents, unpack_latents
    from flexattn.packing import packed
    from flexattn.plot import plot_mask
    from flexattn.prefix import attention_with_prefix
    from flexattn.statistics import AuxOutput, AuxRequest, OutAux
    from flexattn.warm_up import warmup

__version__ = "0.1.0"

__all__ = [
    "AuxOutput",
    "AuxRequest",
    "BackendError",
    "Gradients",
    "OutAux",
    "OutLse",
    "OutLseMaxLogit",
    "OutMaxLogit",
    "PagedKVCache",
    "SelectedKeys",
    "Window",
    "append_kv",
    "append_latents",
    "attention",
    "attention_backend",
    "attention_backward",
    "attention_with_prefix",
    "create_block_mask",
    "explain",
    "explaining",
    "fp8",
    "key_weights",
    "latent_attention",
    "merge_attention",
    "mods",
    "nn",
    "pack_latents",
    "packed",
    "plot_mask",
    "select_keys",
    "selection_loss",
    "unpack_latents",
    "warmup",
]

# Names whose module is imported when they are first used. Most processes use few of them; commands may not use `attention`.
_NAMES = {
    "append": "append_kv",
    "backward": "Gradients attention_backward",
    "block_mask": "create_block_mask",
    "call_log": "explaining",
    "dispatch.options": "attention_backend",
    "dispatch.select": "BackendError",
    "dispatch.spec": "Window",
    "fp8": "fp8",
    "functional": "OutLse OutLseMaxLogit OutMaxLogit attention explain merge_attention",
    "indexer": "SelectedKeys key_weights select_keys selection_loss",
    "kv_cache": "PagedKVCache",
    "latent_rows": "append_latents latent_attention pack_latents unpack_latents",
    "mods": "mods",
    "nn": "nn",
    "packing": "packed",
    "plot": "plot_mask",
    "prefix": "attention_with_prefix",
    "statistics": "AuxOutput AuxRequest OutAux",
    "warm_up": "warmup",
}
_LATER = {name: module for module, names in _NAMES.items() for name in names.split()}
# Modules that are imported when they are first used. `import *` omits them: torch.distributed is large, and JAX is optional.
_MODULES = ("distributed", "integrations", "jax", "testing")


def __dir__() -> list[str]:
    """Returns the public names, without modules that happen to be imported."""
    available = [name for name in _MODULES if name != "jax" or importlib.util.find_spec("jax") is not None]
    return sorted({*__all__, *available, *(name for name in globals() if name.startswith("__"))})


if not TYPE_CHECKING:  # else mypy would accept any name of the package

    def __getattr__(name: str) -> Any:
        module = name if name in _MODULES else _LATER.get(name)
        if module is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = importlib.import_module(f"{__name__}.{module}")
        if name != module:
            value = globals()[name] = getattr(value, name)
        return value

    if "attention" in globals() and sys.modules[f"{__name__}.dispatch.options"].is_watched():  # no command
        importlib.import_module("flexattn.watch").start()
