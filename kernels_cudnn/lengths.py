"""Lengths, offsets and padding on the device, computed from cu_seqlens by torch operations that never synchronise."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.kernels_cudnn.problem import Problem


class Side(NamedTuple):
    """The sequences of q, or of k and v, padded with empty sequences to the plan's batch."""

    lengths: Tensor | None  # int32, at least [plan batch]. None if the plan has no lengths.
    units: Tensor | None  # int32, at least [plan batch + 1]: each sequence's first token if packed, or its row if dense.
    is_packed: bool  # whether the tensor is [total, h, d].
    tokens: int  # tokens of the tensor: in total if packed, or in each row.
    has_gaps: bool = False  # whether a packed tensor has slots, which may be in any order.

    @property
    def known_lengths(self) -> Tensor:
        """Returns the lengths of a plan that has lengths."""
        assert self.lengths is not None
        return self.lengths

    def offsets(self, steps: tuple[int, ...]) -> Tensor:
        """Returns the first element of each sequence, int64 [len(steps), ...], if units are `step` elements apart."""
        assert self.units is not None
        return self.units * _column(steps, self.units.device)


def sides(x: Problem, has_lengths: bool) -> tuple[Side, Side]:
    """Returns the lengths and offsets of q, and of k and v, for the plan of `x`.

    `has_lengths` says whether the plan has lengths. If lengths or starts exceed the tensors, they are clamped, as in the other
    backends.
    """
    batch, _, _ = x.sizes
    q = _side(x.q, x.cu_seqlens_q, x.cu_seqlens_q_padded, x.longest_q, x.batch, batch, x.is_ragged, has_lengths)
    if is_self_attention(x):
        return q, q
    return q, _side(x.k, x.cu_seqlens_kv, x.cu_seqlens_kv_padded, x.longest_kv, x.batch, batch, x.is_ragged, has_lengths)


def queries_with_keys(q: Side, kv: Side) -> Side:
    """Returns `q` without queries in the sequences that have no key."""
    if kv is q or kv.lengths is None or q.lengths is None:
        return q
    return q._replace(lengths=q.lengths * (kv.lengths > 0))


def is_self_attention(x: Problem) -> bool:
    """Returns whether queries and keys are known to have the same lengths and starts, without reading data."""
    has_same_lengths = x.cu_seqlens_q is x.cu_seqlens_kv and x.cu_seqlens_q_padded is x.cu_seqlens_kv_padded
    return has_same_lengths and x.longest_q == x.longest_kv and x.q.shape[:-2] == x.k.shape[:-2]


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
    rows = _rows(batch, plan_batch, t.device)  # rows past the batch repeat its end, so that their sequences are empty.
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


def hidden_tokens(side: Side, batch: int) -> Tensor:
    """Returns the tokens that belong to no sequence, bool [b, s] or [total]."""
    lengths = side.known_lengths
    if not side.is_packed:
        return torch.arange(side.tokens, device=lengths.device) >= lengths[:batch, None]
    position, sequence = _places(side)
    assert side.units is not None
    start = side.units[sequence]
    return (position < start) | (position >= start + lengths[sequence])


def blind_queries(x: Problem, q: Side, kv: Side) -> Tensor:
    """Returns the tokens of q that see no key, bool [b, s] or [total]. Padding sees none. In self-attention all others see one."""
    left, right = x.window_left, x.window_right
    lengths_q, lengths_kv = q.known_lengths, kv.known_lengths
    if q.is_packed:
        position, sequence = _places(q)
        assert q.units is not None
        i = position - q.units[sequence]
        len_q, len_kv = lengths_q[sequence], lengths_kv[sequence]
    else:
        i = torch.arange(q.tokens, device=lengths_q.device)
        len_q, len_kv = lengths_q[: x.batch, None], lengths_kv[: x.batch, None]
    diagonal = i + (len_kv - len_q) if x.bottom_right else i
    blind = (i < 0) | (i >= len_q) | (len_kv == 0)
    if left is not None:
        blind |= diagonal - min(left, 2**30) >= len_kv
    if right is not None:
        blind |= diagonal + min(right, 2**30) < 0
    return blind


def blind_rows(x: Problem) -> tuple[int, int]:
    """Returns (first, last) for a problem without padding: queries before `first` and from `last` on see no key."""
    shift = x.longest_kv - x.longest_q if x.bottom_right else 0
    first = 0 if x.window_right is None else -(shift + x.window_right)
    last = x.longest_q if x.window_left is None else x.longest_kv - shift + x.window_left
    first = min(max(first, 0), x.longest_q)
    return first, min(max(last, first), x.longest_q)


def _places(side: Side) -> tuple[Tensor, Tensor]:
    """Returns (position, sequence) of each packed token. If a token is in no sequence, it lies before or after the returned one."""
    assert side.units is not None
    position = torch.arange(side.tokens, dtype=torch.int32, device=side.units.device)
    if not side.has_gaps:
        sequence = torch.searchsorted(side.units[1:], position, right=True, out_int32=False)
        return position, sequence.clamp_(max=side.units.shape[0] - 2)
    # Slots may be in any order, and an empty slot may lie inside of another one.
    ordered, order = torch.where(side.known_lengths > 0, side.units[:-1], side.tokens).sort(stable=True)
    sequence = torch.searchsorted(ordered, position, right=True, out_int32=False) - 1
    return position, order[sequence.clamp_(min=0)]


_CONSTANTS: dict[tuple[object, ...], Tensor] = {}
_MOST_CONSTANTS = 1024


def constant(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Caches the tensors of `make`, except on the meta device and while a CUDA graph is captured.

    If a captured graph used a cached tensor, its replays could read it after it was dropped from the cache.
    """

    @functools.wraps(make)
    def get(*args: Any) -> Tensor:
        device = args[-1]
        if device.type == "meta" or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            return make(*args)
        key = (make.__name__, *args)
        cached = _CONSTANTS.get(key)
        if cached is not None:
            return cached
        with torch.inference_mode(False):
            constant = make(*args)
        if len(_CONSTANTS) >= _MOST_CONSTANTS:
            _CONSTANTS.clear()  # the cache fills only if batch sizes keep changing.
        return _CONSTANTS.setdefault(key, constant)

    return get


@constant
def _rows(batch: int, plan_batch: int, device: torch.device) -> Tensor:
    """Returns int32 0, 1, ..., batch, batch, ...: more entries than the plan's batch.

    The number of entries is even, so that rows of offsets begin on 16-byte boundaries.
    """
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
    # Fills on the device: a tensor made from a list would be a copy that waits.
    return torch.stack([torch.full((1,), step, dtype=torch.int64, device=device) for step in steps])
