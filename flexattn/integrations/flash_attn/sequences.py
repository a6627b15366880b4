"""Lengths of sequences: FlashAttention 3's and 4's arguments, their conversion to `attention`'s, and masks that depend on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.integrations.arguments import check_index_tensor, int_of

Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Lengths(NamedTuple):
    """Lengths of q's or k's sequences: [b, s, ...] or, with cu_seqlens, [total, ...]; used is the number of valid tokens.

    With a table, int32 [b, columns], k's x is pages [pages, page_size, ...]. The lengths are used or cu_seqlens, or if both are
    None, the capacity of a row of the table.
    """

    x: Tensor
    cu_seqlens: Tensor | None
    used: Tensor | None
    max_seqlen: int | None = None
    table: Tensor | None = None

    @property
    def format(self) -> str:
        return "bshd" if self.cu_seqlens is None or self.table is not None else "thd"

    @property
    def longest(self) -> int:
        """Capacity of a sequence in tokens, without cu_seqlens."""
        return int(self.x.shape[1]) * (1 if self.table is None else self.table.shape[1])

    def longest_packed(self, side: str) -> int | None:
        """Returns the longest of the sequences with cu_seqlens, as the caller gives it."""
        return None if self.max_seqlen is None else int_of(f"max_seqlen_{side}", self.max_seqlen)

    def cumulative(self) -> Tensor:
        """Returns 0 and the running sum of the lengths, int32 [b + 1]."""
        if self.used is not None:
            sequences = self.x.shape[:1] if self.table is None else self.table.shape[:1]
            shape = tuple(sequences) if self.cu_seqlens is None else (self.cu_seqlens.shape[0] - 1,)
            check_index_tensor("seqused", self.used, (shape,))
            return torch.cat((self.used.new_zeros(1), self.used.cumsum(0))).int()
        if self.cu_seqlens is not None:
            return self.cu_seqlens
        b = (self.x if self.table is None else self.table).shape[0]
        return torch.arange(b + 1, dtype=torch.int32, device=self.x.device) * self.longest

    def named(self, side: str) -> dict[str, Any]:
        """Returns the lengths under `attention`'s names; side is q or kv."""
        result: dict[str, object] = {f"cu_seqlens_{side}": self.cumulative()}
        if self.table is not None:
            result |= {"page_table": self.table, f"max_seqlen_{side}": self.longest_packed(side)}
        elif self.cu_seqlens is not None:
            result[f"max_seqlen_{side}"] = self.longest_packed(side)
            result[f"cu_seqlens_{side}_padded"] = None if self.used is None else self.cu_seqlens
        return result


def named(q: Lengths, k: Lengths) -> dict[str, Any]:
    """Returns the formats and lengths of both sides under `attention`'s names."""
    return {"qkv_format": q.format if q.format == k.format else f"{q.format}_2{k.format}"} | q.named("q") | k.named("kv")


def diagonals(q: Lengths, k: Lengths) -> int | Tensor:
    """Returns the number of keys minus the number of queries: an int if all sequences have full length, else int32 [b]."""
    if all(side.cu_seqlens is side.used is side.table is None for side in (q, k)):
        return int(k.x.shape[1] - q.x.shape[1])
    return k.cumulative().diff() - q.cumulative().diff()


class SequenceInfo:
    """A sequence's offsets and lengths, under the names that FlashAttention 4's mods read.

    A plain class, because a mod that makes a named tuple is traced in each call.
    """

    def __init__(self, offset_q: object, offset_k: object, seqlen_q: object, seqlen_k: object) -> None:
        self.offset_q, self.offset_k, self.seqlen_q, self.seqlen_k = offset_q, offset_k, seqlen_q, seqlen_k


def select_sequence(values: int | Tensor, b: Tensor) -> int | Tensor:
    """Returns sequence b's value."""
    return values[b] if isinstance(values, Tensor) else values


def chunked(chunk: int, diagonal: int | Tensor) -> Mask:
    """Returns a mask that shows a query the keys of its own chunk; queries are aligned to the bottom-right corner."""

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        position = q_idx + select_sequence(diagonal, b)
        start = position - position % chunk
        return (kv_idx >= start) & (kv_idx < start + chunk)

    return mask


def band(left: int | None, right: int | None, diagonal: int | Tensor) -> Mask:
    """Returns a window's mask. Sides may be negative; None is open."""

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        distance = kv_idx - q_idx - select_sequence(diagonal, b)
        visible = distance >= distance if left is None else distance >= -left
        return visible if right is None else visible & (distance <= right)

    return mask
