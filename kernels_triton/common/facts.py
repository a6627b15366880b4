"""The facts of a call that `crossovers` has columns for."""

from __future__ import annotations

from typing import Any, Literal

from flexattn.kernels_triton.common.crossovers import UNLIMITED
from flexattn.kernels_triton.common.problem import Problem
from flexattn.kernels_triton.common.tiles import cdiv, slots_of_heads
from flexattn.kernels_triton.runtime.launch import capability_of, has_large_l2, num_processors

Mask = Literal["open", "causal", "windowed", "modified", "loaded"]

_HEAD_DIMS = ((64, 64, 64), (128, 128, 128), (192, 192, 128), (256, 256, 256))  # (column, largest of q and k, largest of v)
_BLOCK = 64  # queries or keys, for `blocks_per_sm`


def mask_class(problem: Problem) -> Mask:
    """Returns the class of the scores: with a bias or a block mask, otherwise modified, or plain with one of three bands."""
    x = problem
    if x.bias is not None or x.block_mask is not None:
        return "loaded"
    if x.is_modified:
        return "modified"
    if x.window_left is not None and x.window_left >= 0:
        return "windowed"
    is_open = x.window_left is None and x.window_right is None
    return "open" if is_open else "causal"  # also for a window that begins after the diagonal


def visible_share(problem: Problem) -> float:
    """Returns the share of all (query, key) pairs that are visible, approximately."""
    x, mask = problem, mask_class(problem)
    if mask == "windowed":
        assert x.window_left is not None
        return min(1.0, (x.window_left + 1) / x.longest_kv)
    return 1.0 if mask in ("open", "loaded") or (mask == "modified" and x.window_right is None) else 0.5


def key_bytes(problem: Problem) -> int:
    """Returns the bytes of k and v."""
    x = problem
    return x.num_keys * x.num_heads_kv * (x.k.shape[-1] + x.v.shape[-1]) * x.k.element_size()


def facts_of(problem: Problem) -> dict[str, Any]:
    """Returns the columns of a call, except `rows`, `mean_tokens` and `decode` of the forward for sm_90."""
    x = problem
    d_qk, d_v = x.q.shape[-1], x.v.shape[-1]
    head_dim = next((name for name, most_qk, most_v in _HEAD_DIMS if d_qk <= most_qk and d_v <= most_v), 512)
    queries, keys = x.longest_q, x.longest_kv
    processors = num_processors(x.device)
    blocks = (cdiv(queries, _BLOCK) + cdiv(keys, _BLOCK)) * x.num_heads * x.batch
    is_windowed = x.window_left is not None and x.window_right is not None
    all_queries = x.q.numel() // d_qk  # of all heads
    return {
        "head_dim": head_dim,
        "width": max(d_qk, d_v),
        "is_full_width": d_qk == head_dim,
        "element_size": x.q.element_size() if x.q.element_size() == x.k.element_size() else 0,
        "mask": mask_class(x),
        "has_left": x.window_left is not None,
        "window": x.window_left + 1 + x.window_right if is_windowed else UNLIMITED,  # type: ignore[operator]
        "window_left": UNLIMITED if x.window_left is None else x.window_left,
        "dropout": x.dropout_p > 0,
        "bias": x.bias is not None,
        "paged": x.page_table is not None,
        "packed": x.has_lengths,
        "grouped": x.group_size > 1,
        "batch_invariant": x.is_batch_invariant,
        "tokens": max(queries, keys),
        "queries": queries,
        "keys": keys,
        "query_rows": queries * slots_of_heads(x.group_size),
        "flops": 2 * all_queries * keys * (d_qk + d_v) * visible_share(x),
        "bytes": key_bytes(x),
        "keys_per_sm": x.k.numel() // x.k.shape[-1] // processors,
        "blocks_per_sm": cdiv(blocks, processors),
        "gpu": "H200" if has_large_l2(x.device) else "H100",
        "capability": capability_of(x.device),
    }
