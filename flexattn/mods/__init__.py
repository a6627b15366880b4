"""Score and mask modifications: common ones, and the path from any mod to a program."""

from __future__ import annotations

from flexattn.mods.library import (
    alibi,
    both,
    causal,
    dilated_sliding_window,
    document,
    either,
    natten_2d,
    prefix_lm,
    relative_bias,
    sliding_window,
    softcap,
    tree,
)

__all__ = [
    "alibi",
    "both",
    "causal",
    "dilated_sliding_window",
    "document",
    "either",
    "natten_2d",
    "prefix_lm",
    "relative_bias",
    "sliding_window",
    "softcap",
    "tree",
]
