"""Sums of rows from several tensors, in few launches: one for all copies, and one for all adds of a step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flexattn.distributed.layout import Run, Runs, common, union, without


class Move(NamedTuple):
    """Rows of a source, by its number, and the rows of the sum to which they are copied or added."""

    to: slice
    source: int
    rows: slice


class Share(NamedTuple):
    """An addend of a sum: the number of its tensor, the rows of the sum that it covers, and the first of its own rows."""

    source: int
    rows: Run
    first: int = 0


class Steps(NamedTuple):
    """Steps of a sum of rows. Some rows are set to zero and some are copied. The adds of one level then run at once."""

    zeros: list[slice]
    copies: list[Move]
    adds: list[list[Move]]

    @classmethod
    def of(cls, rows: Run, shares: Sequence[Share], at: int = 0) -> Steps:
        """Returns steps that sum the addends for `rows`, in order. at: the row of the sum for the first of `rows`."""
        taken: list[Runs] = []  # for each level, rows that have an addend there
        levels: list[list[Move]] = []
        moved = at - rows.start
        for source, of, first in shares:
            rest, level = tuple(common((of,), (rows,))), 0
            while rest:
                if level == len(levels):
                    levels.append([])
                    taken.append(())
                here, rest = tuple(without(rest, taken[level])), tuple(common(taken[level], rest))
                levels[level] += [
                    Move(slice(start + moved, stop + moved), source, slice(start - of.start + first, stop - of.start + first))
                    for start, stop in here
                ]
                taken[level] = union((*taken[level], *here))
                level += 1
        left = without((rows,), taken[0] if taken else ())
        return cls([slice(start + moved, stop + moved) for start, stop in left], levels[0] if levels else [], levels[1:])

    def __add__(self, other: Steps) -> Steps:  # type: ignore[override]
        """Returns the steps of both. Their rows of the sum must be disjoint."""
        adds = [[*a, *b] for a, b in itertools.zip_longest(self.adds, other.adds, fillvalue=())]
        return Steps([*self.zeros, *other.zeros], [*self.copies, *other.copies], adds)

    def without(self, source: int) -> Steps:
        """Returns the steps of all other sources."""
        copies, *adds = ([m for m in moves if m.source != source] for moves in (self.copies, *self.adds))
        return Steps(self.zeros, copies, adds)

    def apart(self, count: int) -> tuple[Steps, Steps]:
        """Returns the steps of the first `count` sources, and those of the others, renumbered from 0."""
        levels = (self.copies, *self.adds)
        first = [[m for m in moves if m.source < count] for moves in levels]
        others = [[m._replace(source=m.source - count) for m in moves if m.source >= count] for moves in levels]
        return Steps(self.zeros, first[0], first[1:]), Steps([], others[0], others[1:])

    def run(self, totals: Sequence[Tensor], sources: Sequence[Sequence[Tensor]]) -> None:
        """Writes sums to each of `totals`, each with its own sources. Usually takes one launch for each level."""
        for total in totals if self.zeros else ():
            for rows in self.zeros:
                total[rows].zero_()
        for number, moves in enumerate((self.copies, *self.adds)):
            pairs = [(total[m.to], of[m.source][m.rows]) for total, of in zip(totals, sources, strict=True) for m in moves]
            (_add_all if number else copy_all)(pairs)


NO_STEPS = Steps([], [], [])
_Pairs = Sequence[tuple[Tensor, Tensor]]


def copy_all(pairs: _Pairs) -> None:
    """Copies the second tensor of each pair to the first."""
    if pairs:
        to, of = _alike(pairs)
        if all(_is_of_words(t, to[0].dtype) for t in (*to, *of)):
            to, of = ([t.view(torch.int64) for t in side] for side in (to, of))
        torch._foreach_copy_(to, of)


def _add_all(pairs: _Pairs) -> None:
    """Adds the second tensor of each pair to the first."""
    if pairs:
        torch._foreach_add_(*_alike(pairs))


def _alike(pairs: _Pairs) -> tuple[list[Tensor], list[Tensor]]:
    """Returns both sides, flattened if all are contiguous, because torch's foreach kernels need equal strides."""
    if all(t.is_contiguous() for pair in pairs for t in pair):
        pairs = [(to.view(-1), of.view(-1)) for to, of in pairs]
    return [to for to, _ in pairs], [of for _, of in pairs]


def _is_of_words(t: Tensor, dtype: torch.dtype) -> bool:
    """Returns whether a tensor of this dtype can be copied in words of eight bytes, which takes fewer loads."""
    return t.dtype is dtype and t.dim() == 1 and t.numel() * t.element_size() % 8 == t.storage_offset() * t.element_size() % 8 == 0


def add_up(total: Tensor, rows: Sequence[Run], sources: Sequence[Tensor]) -> None:
    """Writes the sum of tensors to `total`. Each covers some rows. Rows that none covers become zero."""
    Steps.of(Run(0, total.shape[0]), list(map(Share, range(len(rows)), rows))).run([total], [sources])
