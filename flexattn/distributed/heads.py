"""Heads for tokens: an all-to-all gives each rank all tokens of some heads, of several tensors at once; another one returns them.

A message has a block for each tensor, so that q, k and v, or out and lse, travel together, whatever their dtypes. Heads that every
rank has as many of come and go in slices: the next slice travels while one is computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from flexattn.distributed.exchange import Pending, all_to_all, as_sent
from flexattn.distributed.layout import Run, Runs, cut, rows_of, size_of
from flexattn.distributed.sums import copy_all

ALIGNMENT = 16  # bytes at which a block begins in a message
TO_HEADS, TO_TOKENS = "the all-to-all from tokens to heads", "the all-to-all from heads to tokens"


class Split(NamedTuple):
    """Heads by rank, and the key heads that they read."""

    q: tuple[Run, ...]
    kv: tuple[Run, ...]

    @classmethod
    def of(cls, heads: int, heads_kv: int, ranks: int) -> Split:
        group = heads // heads_kv
        q = cut(heads, ranks)
        return cls(tuple(q), tuple(Run(run.start // group, (run.stop - 1) // group + 1) for run in q))

    def slices(self, count: int) -> list[Split]:
        """Returns slices of every rank's heads, whose numbers `count` divides."""

        def slice_of(run: Run, i: int) -> Run:
            part = cut(run.size, count)[i]
            return Run(run.start + part.start, run.start + part.stop)

        return [Split(*(tuple(slice_of(run, i) for run in of) for of in self)) for i in range(count)]


def local_key_heads(split: Split, rank: int, group: int) -> tuple[int, ...] | None:
    """Returns for each query head of a rank its key head among the rank's; None where they are as grouped heads are anyway."""
    q, kv = split.q[rank], split.kv[rank]
    found = [head // group - kv.start for head in range(q.start, q.stop)]
    even = q.size % kv.size == 0 and found == [i // (q.size // kv.size) for i in range(q.size)]
    return None if even else tuple(found)


class Side(NamedTuple):
    """Places of a tensor's rows and heads by rank: the runs of the whole's rows, and the heads."""

    runs: tuple[Runs, ...]
    heads: tuple[Run, ...]

    def places(self) -> list[list[tuple[Run, Run]]]:
        """Returns by rank its runs of the whole, each with its rows in a tensor of that rank's rows."""
        return [list(zip(of, rows_of(of), strict=True)) for of in self.runs]


class _Blocks:
    """Room for one message for each rank, in which every tensor has a block: `of` has them by tensor and rank."""

    def __init__(self, like: Sequence[Tensor], shapes: Sequence[Sequence[tuple[int, ...]]]) -> None:
        ranks = len(shapes[0])
        starts: list[list[int]] = [[] for _ in like]
        ends: list[int] = []
        at = 0
        for rank in range(ranks):
            for t, found, of_ranks in zip(like, starts, shapes, strict=True):
                found.append(at)
                at += -(-math.prod(of_ranks[rank]) * t.element_size() // ALIGNMENT) * ALIGNMENT
            ends.append(at)
        self.counts = [end - start for start, end in zip((0, *ends), ends, strict=False)]
        self.bytes = torch.empty(at, dtype=torch.uint8, device=like[0].device)
        self.of = [
            [self._block(t, start, shape).view(shape) for start, shape in zip(found, of_ranks, strict=True)]
            for t, found, of_ranks in zip(like, starts, shapes, strict=True)
        ]
        self._firsts = [(t, found[0], of_ranks[0]) for t, found, of_ranks in zip(like, starts, shapes, strict=True)]
        self._are_alike = all(len(set(of_ranks)) == 1 for of_ranks in shapes)

    def _block(self, t: Tensor, start: int, shape: tuple[int, ...]) -> Tensor:
        return self.bytes[start : start + math.prod(shape) * t.element_size()].view(t.dtype)

    def together(self, i: int) -> Tensor | None:
        """Returns the blocks of tensor i as one tensor, [ranks, *shape]; None where shapes differ, or nothing is sent."""
        if not self._are_alike or not self.bytes.numel():
            return None
        t, start, shape = self._firsts[i]
        of_ranks = self.bytes.view(len(self.counts), -1)[:, start : start + math.prod(shape) * t.element_size()]
        return of_ranks.view(t.dtype).view(len(self.counts), *shape)


def _by_rank(x: Tensor, heads: tuple[Run, ...]) -> Tensor | None:
    """Returns a view of [rows, ..., h, d] as [ranks, rows, ..., heads of a rank, d]; None where ranks have not equally many."""
    width, ranks = heads[0].size, len(heads)
    step = x.shape[-2] // ranks
    first = heads[0].start
    if step * ranks != x.shape[-2] or any(run != Run(first + i * step, first + i * step + width) for i, run in enumerate(heads)):
        return None
    return x.view(*x.shape[:-2], ranks, step, x.shape[-1])[..., first : first + width, :].movedim(-3, 0)


def _copy(to: Tensor, of: Tensor) -> None:
    """Copies a tensor, in words of eight bytes where both can be read so."""
    pair = [as_sent(to), as_sent(of)]
    if all(_has_words(t) for t in pair):
        pair = [t.view(torch.int64) for t in pair]
    pair[0].copy_(pair[1])


def _has_words(t: Tensor) -> bool:
    size = t.element_size()
    strides = (*t.stride()[:-1], t.shape[-1], t.storage_offset())
    return t.stride(-1) == 1 and all(stride * size % 8 == 0 for stride in strides)


class Sent(NamedTuple):
    """Tensors that are on their way, and their blocks in what is received."""

    pending: Pending
    blocks: _Blocks


def _send(sent: _Blocks, received: _Blocks, group: Any, what: str) -> Sent:
    work = all_to_all(received.bytes, sent.bytes, (received.counts, sent.counts), group)
    return Sent(Pending((received.bytes,), [work], (sent.bytes,), what), received)


def _rows(wholes: Sequence[Tensor], sides: Sequence[Side], blocks: _Blocks) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Yields for each dtype the runs of rows of tensors [whole, ...], each with where a block has them."""
    found: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
    for whole, side, of in zip(wholes, sides, blocks.of, strict=True):
        pairs = found.setdefault(whole.dtype, [])
        for block, places in zip(of, side.places(), strict=True):
            pairs += [(as_sent(whole)[slice(*run)], as_sent(block)[slice(*rows)]) for run, rows in places]
    yield from found.values()


def begin_to_heads(tensors: Sequence[Tensor], sides: Sequence[Side], group: Any) -> Sent:
    """Begins to bring each rank the heads that `sides` gives it, of all ranks' tensors [rows, ..., h, d]."""
    rank = dist.get_rank(group)
    sent = _Blocks(
        tensors, [[(*x.shape[:-2], run.size, x.shape[-1]) for run in side.heads] for x, side in zip(tensors, sides, strict=True)]
    )
    for i, (x, side, blocks) in enumerate(zip(tensors, sides, sent.of, strict=True)):
        together, of_ranks = sent.together(i), _by_rank(x, side.heads)
        if together is not None and of_ranks is not None:
            _copy(together, of_ranks)
        else:
            for block, run in zip(blocks, side.heads, strict=True):
                _copy(block, x[..., slice(*run), :])
    shapes = [
        [(size_of(of), *x.shape[1:-2], side.heads[rank].size, x.shape[-1]) for of in side.runs]
        for x, side in zip(tensors, sides, strict=True)
    ]
    return _send(sent, _Blocks(tensors, shapes), group, TO_HEADS)


def finish_to_heads(sent: Sent, sides: Sequence[Side], rooms: Sequence[Tensor], group: Any) -> None:
    """Writes to rooms, [whole, ..., own heads, d], what came, in the whole's order."""
    sent.pending.wait(group)
    for of in _rows(rooms, sides, sent.blocks):
        copy_all(of)


def begin_to_tokens(tensors: Sequence[Tensor], sides: Sequence[Side], group: Any) -> Sent:
    """Begins to return each rank its rows of tensors [whole, ..., own heads, d]."""
    rank = dist.get_rank(group)
    sent = _Blocks(tensors, [[(size_of(of), *x.shape[1:]) for of in side.runs] for x, side in zip(tensors, sides, strict=True)])
    for of in _rows(tensors, sides, sent):
        copy_all([(block, whole) for whole, block in of])
    shapes = [
        [(size_of(side.runs[rank]), *x.shape[1:-2], run.size, x.shape[-1]) for run in side.heads]
        for x, side in zip(tensors, sides, strict=True)
    ]
    return _send(sent, _Blocks(tensors, shapes), group, TO_TOKENS)


def finish_to_tokens(sent: Sent, sides: Sequence[Side], rooms: Sequence[Tensor], group: Any) -> None:
    """Writes to rooms, [rows, ..., h, d], the heads that came: sums in the ranks' order where several have a head."""
    sent.pending.wait(group)
    for i, (room, side, blocks) in enumerate(zip(rooms, sides, sent.blocks.of, strict=True)):
        together, of_ranks = sent.blocks.together(i), _by_rank(room, side.heads)
        if together is not None and of_ranks is not None:
            _copy(of_ranks, together)
        elif sum(run.size for run in side.heads) > room.shape[-2]:
            room.zero_()
            for block, run in zip(blocks, side.heads, strict=True):
                room[..., slice(*run), :] += block
        else:
            for block, run in zip(blocks, side.heads, strict=True):
                _copy(room[..., slice(*run), :], block)
