"""Masks as host data: documents, a band and blocks. They give the keys that queries see, and the pieces of a rank's work.

A query at position i of its document sees keys j with i + shift - left <= j <= i + shift + right. shift is 0, or the difference of
the lengths if the diagonal is bottom-right. If there is a block mask, the query sees those of them that it does not hide.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from flexattn.dispatch.spec import Band
from flexattn.distributed.blocks import Blocks
from flexattn.distributed.layout import Run, Runs


class DocumentOffsets(NamedTuple):
    """Documents in a full tensor: the first token and the length of each."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]

    def within(self, run: Run) -> Iterator[tuple[int, Run]]:
        """Yields each document with tokens in a run of the full sequence, with their positions in the document."""
        for document in range(max(0, bisect.bisect_right(self.starts, run.start) - 1), len(self.starts)):
            start, length = self.starts[document], self.lengths[document]
            if start >= run.stop:
                return
            part = Run(max(run.start - start, 0), min(run.stop - start, length))
            if part.size > 0:
                yield document, part


@dataclass(frozen=True)
class Mask:
    """A band, equal for each document, None if a side is open. An optional block mask, one for each document or one for all."""

    left: int | None
    right: int | None
    bottom_right: bool
    lengths_q: tuple[int, ...]
    lengths_kv: tuple[int, ...]
    blocks: Blocks | None = None

    @property
    def digest(self) -> tuple[object, ...]:
        """Returns values that are equal for equal masks, in any process."""
        return (*self.band, self.lengths_q, self.lengths_kv, None if self.blocks is None else self.blocks.digest)

    @property
    def band(self) -> Band:
        return Band(self.left, self.right, self.bottom_right)

    def row(self, document: int) -> int | None:
        """Returns the block mask's row for a document. None if there is one sequence, which uses all rows of a batch."""
        return document if len(self.lengths_q) > 1 else None

    @functools.cached_property
    def q(self) -> DocumentOffsets:
        return DocumentOffsets(tuple(itertools.accumulate(self.lengths_q, initial=0))[:-1], self.lengths_q)

    @functools.cached_property
    def kv(self) -> DocumentOffsets:
        return DocumentOffsets(tuple(itertools.accumulate(self.lengths_kv, initial=0))[:-1], self.lengths_kv)

    def shift(self, document: int) -> int:
        return self.lengths_kv[document] - self.lengths_q[document] if self.bottom_right else 0

    def keys(self, document: int, queries: Run) -> Run:
        """Returns the smallest run that contains all keys of a document that at least one of the queries sees."""
        keys = self.in_band(document, queries)
        return keys if self.blocks is None else hull(self.seen(document, queries, keys))

    def in_band(self, document: int, queries: Run) -> Run:
        """Returns the keys in the band of at least one of the queries."""
        shift, length = self.shift(document), self.lengths_kv[document]
        start = 0 if self.left is None else queries.start + shift - self.left
        stop = length if self.right is None else queries.stop + shift + self.right
        start = min(max(start, 0), length)
        return Run(start, min(max(stop, start), length))

    def seen(self, document: int, queries: Run, keys: Run) -> Runs:
        """Returns the runs within a document's `keys` in blocks that at least one of the queries sees a part of."""
        return (keys,) if self.blocks is None else tuple(self.blocks.keys(self.row(document), queries, keys))

    def needs(self, queries: Run) -> Iterator[Run]:
        """Yields the keys that a run of queries sees, for each document, all in positions of the full sequence."""
        for document, part in self.q.within(queries):
            start = self.kv.starts[document]
            for keys in self.seen(document, part, self.in_band(document, part)):
                yield Run(start + keys.start, start + keys.stop)

    def hulls(self, queries: Run) -> Iterator[Run]:
        """Yields the smallest run of keys that contains all that a run of queries sees, for each document."""
        for document, part in self.q.within(queries):
            start, keys = self.kv.starts[document], self.keys(document, part)
            yield Run(start + keys.start, start + keys.stop)

    @functools.cached_property
    def ends(self) -> tuple[int, ...]:
        """[documents + 1]: the scores in the bands of all documents before each."""
        areas = (self.scores(document, Run(0, length)) for document, length in enumerate(self.lengths_q))
        return tuple(itertools.accumulate(areas, initial=0))

    def area(self, queries: Run) -> int:
        """Returns the number of scores of a run of the full sequence's queries. A block with a visible score counts in full."""
        if queries.size == 0:
            return 0
        if self.blocks is not None:
            return round(float(self._in_blocks[queries.stop] - self._in_blocks[queries.start]))
        return self._before(queries.stop) - self._before(queries.start)

    def _before(self, query: int) -> int:
        """Returns the scores of all queries before a position of the full sequence."""
        document = bisect.bisect_right(self.q.starts, query) - 1
        return self.ends[document] + self.scores(document, Run(0, query - self.q.starts[document]))

    def scores(self, document: int, queries: Run) -> int:
        """Returns the scores in the band of a run of a document's queries."""
        (start, stop), keys = queries, self.lengths_kv[document]
        if self.left is not None and self.right is not None and self.left + self.right < 0:
            return 0
        shift = self.shift(document)
        last = (stop - start) * keys
        if self.right is not None:
            last = _clamped_sum(stop + shift + self.right + 1, keys) - _clamped_sum(start + shift + self.right + 1, keys)
        if self.left is None:
            return last
        return last - _clamped_sum(stop + shift - self.left, keys) + _clamped_sum(start + shift - self.left, keys)

    @functools.cached_property
    def _in_blocks(self) -> torch.Tensor:
        """[tokens + 1]: the scores of all queries before each, in visible blocks."""
        assert self.blocks is not None
        counts = []
        for document, (len_q, len_kv) in enumerate(zip(self.lengths_q, self.lengths_kv, strict=True)):
            diagonal = torch.arange(len_q, device="cpu") + self.shift(document)
            first = torch.zeros_like(diagonal) if self.left is None else (diagonal - self.left).clamp(0, len_kv)
            last = torch.full_like(diagonal, len_kv) if self.right is None else (diagonal + self.right + 1).clamp(0, len_kv)
            counts.append(self.blocks.counts(self.row(document), first, last.clamp(min=first)))
        return torch.cat((torch.zeros(1, dtype=torch.float64, device="cpu"), *counts)).cumsum(0)


def _clamped_sum(stop: int, most: int) -> int:
    """Returns the sum of min(i, most) over the integers i in [0, stop)."""
    if stop <= 0:
        return 0
    if stop <= most:
        return stop * (stop - 1) // 2
    return most * (most - 1) // 2 + (stop - most) * most


def hull(runs: Runs) -> Run:
    """Returns the run from the first to the last position of sorted runs."""
    return Run(runs[0].start, runs[-1].stop) if runs else Run(0, 0)


class Piece(NamedTuple):
    """A run of queries and a run of keys of one document. Each query sees a key, and each key is seen: low <= j - i <= high.

    low, high: None if open. rows, keys: rows in the tensors of the call. diagonal: j - i on the diagonal of the full sequence.
    """

    document: int
    q_start: int  # in the document
    kv_start: int
    rows: Run
    keys: Run
    low: int | None
    high: int | None
    diagonal: int


def make_piece(mask: Mask, document: int, queries: Run, keys: Run, rows: tuple[int, int]) -> Piece | None:
    """Returns the piece of a document's queries and keys, trimmed to those that see or are seen. None if none is left.

    rows: the rows of the first query and of the first key.
    """
    len_q, len_kv = queries.size, keys.size
    diagonal = queries.start + mask.shift(document) - keys.start
    low = None if mask.left is None else diagonal - mask.left
    high = None if mask.right is None else diagonal + mask.right
    first, last = 0 if high is None else max(0, -high), len_q if low is None else min(len_q, len_kv - low)
    if first >= last:
        return None
    first_key, last_key = 0 if low is None else max(0, first + low), len_kv if high is None else min(len_kv, last + high)
    if first_key >= last_key:
        return None
    moved, len_q, len_kv = first_key - first, last - first, last_key - first_key
    low = None if low is None or low - moved <= 1 - len_q else low - moved
    high = None if high is None or high - moved >= len_kv - 1 else high - moved
    return Piece(
        document,
        queries.start + first,
        keys.start + first_key,
        Run(rows[0] + first, rows[0] + last),
        Run(rows[1] + first_key, rows[1] + last_key),
        low,
        high,
        diagonal - moved,
    )


def merged(pieces: Sequence[Piece]) -> list[Piece]:
    """Returns fewer pieces with the same scores, by joining adjacent pieces that form one band.

    A joined piece knows only the positions of its first query and key. So do not join pieces if a mod, a bias or ALiBi reads
    positions.
    """
    joined = list(pieces)
    for i in range(len(joined) - 1, 0, -1):
        for j in range(i - 1, -1, -1):
            one = _merged(joined[j], joined[i])
            if one is not None:
                joined[j] = one
                del joined[i]
                break
    return joined


def _merged(a: Piece, b: Piece) -> Piece | None:
    if a.document != b.document or a.low is not None or b.low is not None:
        return None
    if a.rows == b.rows and a.keys.stop == b.keys.start and a.high is None:  # b's keys come after the keys that all rows see
        keys, high = Run(a.keys.start, b.keys.stop), None if b.high is None else b.high + a.keys.size
        return a._replace(keys=keys, high=high)
    if a.rows.stop != b.rows.start or a.keys.start != b.keys.start:
        return None
    rows = Run(a.rows.start, b.rows.stop)
    if a.keys == b.keys and a.high is None and b.high is None:
        return a._replace(rows=rows)
    is_corner = a.high is not None and a.high == a.keys.size - a.rows.size  # a's last row sees a's last key and no later one
    if is_corner and b.high is not None and a.high == b.high - a.rows.size and a.keys.stop <= b.keys.stop:
        return a._replace(rows=rows, keys=b.keys)
    return None


class LocalBand(NamedTuple):
    """A band as `attention` takes it, counted from a diagonal of the piece itself."""

    window_size: tuple[int, int]
    bottom_right: bool
    is_exact: bool  # whether that diagonal is the diagonal of the full sequence


def local_band(piece: Piece, wants_diagonal: bool) -> LocalBand:
    """Returns the piece's band, counted from one of its two diagonals. If wants_diagonal, prefers the full sequence's diagonal.

    The top-left diagonal always lies in the band: the first query sees a key, so high >= 0, and the first key is seen, so low <= 0.
    """
    shifts = [(piece.keys.size - piece.rows.size, True), (0, False)]
    if wants_diagonal:
        shifts.sort(key=lambda pair: pair[0] != piece.diagonal)
    for shift, bottom_right in shifts:
        left = -1 if piece.low is None else shift - piece.low
        right = -1 if piece.high is None else piece.high - shift
        if (piece.low is None or left >= 0) and (piece.high is None or right >= 0):
            return LocalBand((left, right), bottom_right, shift == piece.diagonal)
    raise AssertionError(f"{piece} has a query that sees no key, or a key that no query sees")


def sees_all(piece: Piece, band: LocalBand) -> bool:
    """Returns whether each query of a piece sees each of its keys under a local band. An exact band must have the same diagonal."""
    (left, right), bottom_right, is_exact = band
    shift = piece.keys.size - piece.rows.size if bottom_right else 0
    in_left, in_right = left < 0 or left >= piece.rows.size - 1 + shift, right < 0 or right >= piece.keys.size - 1 - shift
    return in_left and in_right and (shift == piece.diagonal or not is_exact)
