"""A tree of drafts, as in speculative decoding: the last keys of each sequence are its nodes and its queries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def tree(lengths_q: Sequence[int], lengths_kv: Sequence[int], device: Any = "cpu") -> Any:
    """Returns a mask_mod: a query sees all keys before the tree's, its own, and a random choice of the others."""
    nodes = torch.rand(len(lengths_q), *[max(lengths_q)] * 2, generator=torch.Generator().manual_seed(0)).to(device) < 0.5
    before = torch.tensor([kv - q for q, kv in zip(lengths_q, lengths_kv, strict=True)], device=device)
    last = max(lengths_q) - 1

    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        node = j - before[b]
        return (node < 0) | (node == i) | nodes[b, i, node.clamp(0, last)]

    return mask
