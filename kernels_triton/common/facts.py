"""The facts of a call that `crossovers` has columns for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from flexattn.kernels_triton.common.crossovers import UNLIMITED
from flexattn.kernels_triton.common.problem import Problem
from flexattn.kernels_triton.common.tiles import cdiv, slots_of_heads
from flexattn.kernels_triton.runtime.device import capability_of, has_large_l2, num_processors

Mask = Literal["open", "causal", "windowed", "modified", "loaded"]

_HEAD_DIMS = ((64, 64, 64), (128, 128, 128), (192, 192, 128), (256, 256, 256))  # (column, largest of q and k, largest of v)
_BLOCK = 64  # queries or keys, for `blocks_per_sm` and `partial`


class ProblemFacts(dict[str, Any]):
    """The columns of a problem. A column is computed when it is first read, because few rules read all of them."""

    def __init__(self, problem: Problem, **known: Any) -> None:
        super().__init__(known)
        self._problem = problem

    def __missing__(self, name: str) -> Any:
        self[name] = value = COLUMNS[name](self._problem)
        return value


def facts_of(problem: Problem, **known: Any) -> ProblemFacts:
    """Returns the columns of a problem; `known` has those that only one family knows (`rows`, `mean_tokens`, `decode`)."""
    return ProblemFacts(problem, **known)


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


def key_bytes(problem: Problem) -> int:
    """Returns the bytes of k and v."""
    x = problem
    return x.num_keys * x.num_heads_kv * (x.k.shape[-1] + x.v.shape[-1]) * x.k.element_size()


def most_head_parts(problem: Problem) -> int:
    """Returns the maximum number of programs that divide the query heads of a key head in a backward of sm_90.

    Their fp32 sums of dk and dv need at most the memory of fp32 sums of dq.
    """
    x = problem
    return max(1, min(x.group_size, x.q.numel() // max(1, x.k.numel() + x.v.numel())))


def _head_dim(x: Problem) -> int:
    d_qk, d_v = x.q.shape[-1], x.v.shape[-1]
    return next((name for name, most_qk, most_v in _HEAD_DIMS if d_qk <= most_qk and d_v <= most_v), 512)


def _flops(x: Problem) -> float:
    queries = x.q.numel() // x.q.shape[-1]  # counted for each head
    return 2 * queries * x.longest_kv * (x.q.shape[-1] + x.v.shape[-1]) * _visible_share(x)


def _visible_share(x: Problem) -> float:
    """Returns the share of all (query, key) pairs that are visible, approximately."""
    mask = mask_class(x)
    if mask == "windowed":
        assert x.window_left is not None
        return min(1.0, (x.window_left + 1) / x.longest_kv)
    return 1.0 if mask in ("open", "loaded") or (mask == "modified" and x.window_right is None) else 0.5


def _window(x: Problem) -> int:
    return UNLIMITED if x.window_left is None or x.window_right is None else x.window_left + 1 + x.window_right


def _blocks_per_sm(x: Problem) -> int:
    blocks = (cdiv(x.longest_q, _BLOCK) + cdiv(x.longest_kv, _BLOCK)) * x.num_heads * x.batch
    return cdiv(blocks, num_processors(x.device))


def _rows_of_one_wave(x: Problem) -> int:
    """Returns the fewest of 128, 192 and 256 queries of a tile with which each multiprocessor has at most one; 0: there is none."""
    sequences, processors = x.num_heads * x.batch, num_processors(x.device)
    return next((rows for rows in (128, 192, 256) if cdiv(x.longest_q, rows) * sequences <= processors), 0)


COLUMNS: dict[str, Callable[[Problem], Any]] = {
    "head_dim": _head_dim,
    "width": lambda x: max(x.q.shape[-1], x.v.shape[-1]),
    "is_full_width": lambda x: x.q.shape[-1] == _head_dim(x),
    "element_size": lambda x: x.q.element_size() if x.q.element_size() == x.k.element_size() else 0,
    "mask": mask_class,
    "softcap": lambda x: x.has_softcap_alone,
    "has_left": lambda x: x.window_left is not None,
    "window": _window,
    "window_left": lambda x: UNLIMITED if x.window_left is None else x.window_left,
    "dropout": lambda x: x.dropout_p > 0,
    "bias": lambda x: x.bias is not None,
    "by_distance": lambda x: x.mods is not None and (x.mods.per_distance is not None or x.mods.num_tables > 0),
    "listed": lambda x: x.is_listed,
    "paged": lambda x: x.page_table is not None,
    "packed": lambda x: x.has_lengths,
    "grouped": lambda x: x.group_size > 1,
    "batch_invariant": lambda x: x.is_batch_invariant,
    "tokens": lambda x: max(x.longest_q, x.longest_kv),
    "queries": lambda x: x.longest_q,
    "keys": lambda x: x.longest_kv,
    "query_rows": lambda x: x.longest_q * slots_of_heads(x.group_size),
    "flops": _flops,
    "bytes": key_bytes,
    "keys_per_sm": lambda x: x.k.shape[:-1].numel() * most_head_parts(x) // num_processors(x.device),
    "block": lambda x: x.kv_block,
    "blocks_per_sm": _blocks_per_sm,
    "rows_of_one_wave": _rows_of_one_wave,
    "partial": lambda x: x.has_lengths or x.longest_q % _BLOCK > 0 or x.longest_kv % _BLOCK > 0,
    "gpu": lambda x: "H200" if has_large_l2(x.device) else "H100",
    "capability": lambda x: capability_of(x.device),
}
"""How each column of `crossovers.Rule` is computed for a problem."""
