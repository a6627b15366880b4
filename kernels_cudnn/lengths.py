"""Lengths, offsets and padding on the device, from cu_seqlens, as torch operations that wait for nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.kernels_cudnn.problem import Problem


class Side(NamedTuple):
    """The sequences of q, or of k and v, padded to the plan's batch with empty ones."""

    lengths: Tensor | None  # int32, at least [plan batch]; None where the plan takes none
    units: Tensor | None  # int32, at least [plan batch + 1]: the first token of each sequence, or its row of a dense tensor
    is_packed: bool  # [total, h, d]
    tokens: int  # tokens of the tensor: in total, or in each row
    has_gaps: bool = False  # [total, h, d] with slots, in any order

    def offsets(self, steps: tuple[int, ...]) -> Tensor:
        """int64 [len(steps), ...]: the first element of each sequence in tensors whose units are so many elements apart."""
        assert self.units is not None
        return self.units * _column(steps, self.units.device)


def sides(x: Problem, has_lengths: bool) -> tuple[Side, Side]:
    """Returns the lengths and offsets of q, and of k and v, that the plan for `x` gets.

    `has_lengths` is whether it takes lengths. Lengths and starts that do not fit the tensors are cut to them, as the other
    backends do.
    """
    batch, _, _ = x.sizes
    q = _side(x.q, x.cu_seqlens_q, x.cu_seqlens_q_padded, x.longest_q, x.batch, batch, x.is_ragged, has_lengths)
    if is_self_attention(x):
        return q, q
    if x.page_table is not None:
        assert x.cu_seqlens_kv is not None
        lengths = x.cu_seqlens_kv.index_select(0, _rows(x.batch, batch, x.q.device)).diff().clamp_(0, x.longest_kv)
        return q, Side(lengths, None, False, x.longest_kv)
    return q, _side(x.k, x.cu_seqlens_kv, x.cu_seqlens_kv_padded, x.longest_kv, x.batch, batch, x.is_ragged, has_lengths)


def queries_with_keys(q: Side, kv: Side) -> Side:
    """`q` with no query in the sequences that have no key."""
    if kv is q or kv.lengths is None or q.lengths is None:
        return q
    return q._replace(lengths=q.lengths * (kv.lengths > 0))


def is_self_attention(x: Problem) -> bool:
    """Returns whether queries and keys are known, without reading anything, to have the same lengths and starts."""
    if x.page_table is not None:
        return False
    same = x.cu_seqlens_q is x.cu_seqlens_kv and x.cu_seqlens_q_padded is x.cu_seqlens_kv_padded
    return same and x.longest_q == x.longest_kv and x.q.shape[:-2] == x.k.shape[:-2]


def _side(
    t: Tensor,
    cu: Tensor | None,
    cu_padded: Tensor | None,
    longest: int,
    batch: int,
    plan_batch: int,
    is_ragged: bool,
    has_lengths: bool,
) -> Side:
    is_packed = t.dim() == 3
    tokens = t.shape[0 if is_packed else 1]
    if cu is None:
        units = _rows(batch, plan_batch, t.device) if is_ragged else None
        lengths = _full_lengths(batch, plan_batch, tokens, t.device) if has_lengths else None
        return Side(lengths, units, False, tokens)
    rows = _rows(batch, plan_batch, t.device)  # those past the batch repeat its end, so that they are empty
    ends = cu.index_select(0, rows)
    if not is_packed:
        lengths = ends.diff().clamp_(0, min(longest, tokens))
        return Side(lengths, rows if is_ragged else None, False, tokens)
    ends = ends.clamp(0, tokens)
    starts = ends if cu_padded is None else cu_padded.index_select(0, rows).clamp_(0, tokens)
    lengths = ends.diff()
    if cu_padded is not None:
        lengths = torch.minimum(lengths, tokens - starts[:-1])
    return Side(lengths.clamp_(0, longest), starts, True, tokens, cu_padded is not None)


def page_table(x: Problem) -> Tensor:
    """Returns the table as the plan takes it, int32 [plan batch, columns of its longest keys].

    All ids are clamped to pages that there are, so that whatever entries hold, cuDNN reads nothing outside of the pools: those past
    a sequence's keys too, which it may look up. Lengths are clamped in `sides`. Nothing waits for the device.
    """
    assert x.page_table is not None
    batch, _, longest = x.sizes
    columns = -(-longest // x.k.shape[1])
    table = x.page_table[:, :columns].clamp(0, x.k.shape[0] - 1)
    missing = columns - table.shape[1], batch - table.shape[0]
    return torch.nn.functional.pad(table, (0, missing[0], 0, missing[1])) if any(missing) else table


def hidden_tokens(side: Side, batch: int) -> Tensor:
    """bool [b, s] or [total]: which tokens belong to no sequence."""
    if not side.is_packed:
        return torch.arange(side.tokens, device=side.lengths.device) >= side.lengths[:batch, None]
    position, sequence = _places(side)
    assert side.units is not None
    start = side.units[sequence]
    return (position < start) | (position >= start + side.lengths[sequence])


def blind_queries(x: Problem, q: Side, kv: Side) -> Tensor:
    """bool [b, s] or [total]: which tokens of q see no key, padding included. In self-attention that is padding alone."""
    left, right = x.window_left, x.window_right
    if q.is_packed:
        position, sequence = _places(q)
        assert q.units is not None
        i = position - q.units[sequence]
        len_q, len_kv = q.lengths[sequence], kv.lengths[sequence]
    else:
        i = torch.arange(q.tokens, device=q.lengths.device)
        len_q, len_kv = q.lengths[: x.batch, None], kv.lengths[: x.batch, None]
    diagonal = i + (len_kv - len_q) if x.bottom_right else i
    blind = (i < 0) | (i >= len_q) | (len_kv == 0)
    if left is not None:
        blind |= diagonal - min(left, 2**30) >= len_kv
    if right is not None:
        blind |= diagonal + min(right, 2**30) < 0
    return blind


def blind_rows(x: Problem) -> tuple[int, int]:
    """(first, last): without padding, the queries before `first` and from `last` on see no key; known on the host."""
    shift = x.longest_kv - x.longest_q if x.bottom_right else 0
    first = 0 if x.window_right is None else -(shift + x.window_right)
    last = x.longest_q if x.window_left is None else x.longest_kv - shift + x.window_left
    first = min(max(first, 0), x.longest_q)
    return first, min(max(last, first), x.longest_q)


def _places(side: Side) -> tuple[Tensor, Tensor]:
    """(position, sequence) of each token of [total, h, d]; one of no sequence is before or past the one that is named."""
    assert side.units is not None
    assert side.lengths is not None
    position = torch.arange(side.tokens, dtype=torch.int32, device=side.units.device)
    if not side.has_gaps:
        sequence = torch.searchsorted(side.units[1:], position, right=True, out_int32=False)
        return position, sequence.clamp_(max=side.units.shape[0] - 2)
    # slots may be in any order, and an empty one inside of another
    ordered, order = torch.where(side.lengths > 0, side.units[:-1], side.tokens).sort(stable=True)
    sequence = torch.searchsorted(ordered, position, right=True, out_int32=False) - 1
    return position, order[sequence.clamp_(min=0)]


_CONSTANTS: dict[tuple[Any, ...], Tensor] = {}
_MOST_CONSTANTS = 1024


def constant(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Keeps what `make` gives, but not in a CUDA graph, whose replays would read it after it was dropped here, nor without data."""

    @functools.wraps(make)
    def get(*args: Any) -> Tensor:
        device = args[-1]
        if device.type == "meta" or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            return make(*args)
        key = (make.__name__, *args)
        kept = _CONSTANTS.get(key)
        if kept is not None:
            return kept
        with torch.inference_mode(False):
            constant = make(*args)
        if len(_CONSTANTS) >= _MOST_CONSTANTS:
            _CONSTANTS.clear()  # streams of ever new batch sizes only
        return _CONSTANTS.setdefault(key, constant)

    return get


@constant
def _rows(batch: int, plan_batch: int, device: torch.device) -> Tensor:
    """int32 0, 1, ..., batch, batch, ...: more than the plan's batch, and even, so that rows of offsets begin on 16 bytes."""
    return torch.arange(_even(plan_batch + 1), dtype=torch.int32, device=device).clamp_(max=batch)


@constant
def _full_lengths(batch: int, plan_batch: int, length: int, device: torch.device) -> Tensor:
    lengths = torch.zeros(_even(plan_batch + 1) - 1, dtype=torch.int32, device=device)
    lengths[:batch] = length
    return lengths


def _even(n: int) -> int:
    return n + n % 2


@constant
def _column(steps: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.stack(
        [torch.full((1,), step, dtype=torch.int64, device=device) for step in steps]
    )  # fills, so no copy to wait for
