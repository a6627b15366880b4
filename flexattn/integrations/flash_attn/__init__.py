"""A stand-in for the flash_attn package: FlashAttention 2's functions, with its signatures, on flexattn.

    from flexattn.integrations import flash_attn
    flash_attn.install()
    from flash_attn import flash_attn_func  # this package's

Importing this package changes nothing; only `install` does.
"""

from __future__ import annotations

import importlib.util
import sys

from flexattn.integrations.flash_attn import bert_padding, flash_attn_interface
from flexattn.integrations.flash_attn.flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

__all__ = [
    "bert_padding",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "install",
]


def install(override: bool = False) -> None:
    """Makes `import flash_attn`, `flash_attn.flash_attn_interface` and `flash_attn.bert_padding` give this package's modules.

    Args:
        override: whether to do so where another flash_attn is imported or installed.

    Raises:
        RuntimeError: there is another flash_attn, and override is False.
    """
    ours = sys.modules[__name__]
    loaded = sys.modules.get("flash_attn")
    is_there = loaded is not ours if loaded is not None else importlib.util.find_spec("flash_attn") is not None
    if is_there and not override:
        raise RuntimeError(
            "another flash_attn is installed; accepted: none, or install(override=True), which hides it in this process"
        )
    for name in [n for n in sys.modules if n.startswith("flash_attn.")]:
        del sys.modules[name]
    sys.modules["flash_attn"] = ours
    sys.modules["flash_attn.flash_attn_interface"] = flash_attn_interface
    sys.modules["flash_attn.bert_padding"] = bert_padding
