"""Attention of DTensors that are sharded over their sequence: `flexattn.distributed` puts its function here when it is imported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

attend: Callable[..., Any] | None = None  # (q, k, v, group, (queries, keys), arguments) -> what attention gives, of local tensors
NO_TENSORS = ("cu_seqlens_q", "cu_seqlens_kv", "seqused_q", "seqused_kv", "page_table")


def can_attend(arguments: dict[str, Any]) -> bool:
    """Returns whether a dense call with these arguments stays sharded over its sequence."""
    return attend is not None and all(arguments.get(name) is None for name in NO_TENSORS)
