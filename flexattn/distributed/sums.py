"""Sums of rows from several tensors, in few launches: one for all copies, and one for all adds of a step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flexattn import compat
from flexattn.distributed.layout import Run, Runs, common, union, without


class RowMove(NamedTuple):
    """Rows of a source, by its number, and the rows of the sum to which they are copied or added."""

    to: slice
    source: int
    rows: slice


class Addend(NamedTuple):
    """An addend of a sum: the number of its tensor, the rows of the sum that it covers, and the first of its own rows."""

    source: int
    rows: Run
    first: int = 0


class SumSteps(NamedTuple):
    """Steps of a sum of rows. Some rows are set to zero and some are copied. The adds of one level then run at once."""

    zeros: list[slice]
    copies: list[RowMove]
    adds: list[list[RowMove]]

    @classmethod
    def of(cls, rows: Run, addends: Sequence[Addend], at: int = 0) -> SumSteps:
        """Returns steps that sum the addends for `rows`, in order. at: the row of the sum for the first of `rows`."""
        taken: list[Runs] = []  # for each level, rows that have an addend there
        levels: list[list[RowMove]] = []
        moved = at - rows.start
        for source, run, first in addends:
            rest, level = tuple(common((run,), (rows,))), 0
            while rest:
                if level == len(levels):
                    levels.append([])
                    taken.append(())
                new, rest = tuple(without(rest, taken[level])), tuple(common(taken[level], rest))
                levels[level] += [
                    RowMove(slice(start + moved, stop + moved), source, slice(start - run.start + first, stop - run.start + first))
                    for start, stop in new
                ]
                taken[level] = union((*taken[level], *new))
                level += 1
        left = without((rows,), taken[0] if taken else ())
        return cls([slice(start + moved, stop + moved) for start, stop in left], levels[0] if levels else [], levels[1:])

    def __add__(self, other: SumSteps) -> SumSteps:  # type: ignore[override]
        """Returns the steps of both. Their rows of the sum must be disjoint."""
        adds = [[*a, *b] for a, b in itertools.zip_longest(self.adds, other.adds, fillvalue=())]
        return SumSteps([*self.zeros, *other.zeros], [*self.copies, *other.copies], adds)

    def without(self, source: int) -> SumSteps:
        """Returns the steps of all other sources."""
        copies, *adds = ([m for m in moves if m.source != source] for moves in (self.copies, *self.adds))
        return SumSteps(self.zeros, copies, adds)

    def split_sources(self, count: int) -> tuple[SumSteps, SumSteps]:
        """Returns the steps of the first `count` sources, and those of the others, renumbered from 0."""
        levels = (self.copies, *self.adds)
        first = [[m for m in moves if m.source < count] for moves in levels]
        others = [[m._replace(source=m.source - count) for m in moves if m.source >= count] for moves in levels]
        return SumSteps(self.zeros, first[0], first[1:]), SumSteps([], others[0], others[1:])

    def run(self, totals: Sequence[Tensor], sources: Sequence[Sequence[Tensor]]) -> None:
        """Writes sums to each of `totals`, each with its own sources. Usually takes one launch for each level."""
        for total in totals if self.zeros else ():
            for rows in self.zeros:
                total[rows].zero_()
        for number, moves in enumerate((self.copies, *self.adds)):
            pairs = [(total[m.to], parts[m.source][m.rows]) for total, parts in zip(totals, sources, strict=True) for m in moves]
            (_add_all if number else copy_all)(pairs)


NO_STEPS = SumSteps([], [], [])
_Pairs = Sequence[tuple[Tensor, Tensor]]


def copy_all(pairs: _Pairs) -> None:
    """Copies the second tensor of each pair to the first."""
    if pairs:
        targets, sources = _flattened(pairs)
        if all(_has_words(t, targets[0].dtype) for t in (*targets, *sources)):
            targets, sources = ([t.view(torch.int64) for t in side] for side in (targets, sources))
        compat.foreach_copy(targets, sources)


def _add_all(pairs: _Pairs) -> None:
    """Adds the second tensor of each pair to the first."""
    if pairs:
        compat.foreach_add(*_flattened(pairs))


def _flattened(pairs: _Pairs) -> tuple[list[Tensor], list[Tensor]]:
    """Returns both sides, flattened if all are contiguous, because torch's foreach kernels need equal strides."""
    if all(t.is_contiguous() for pair in pairs for t in pair):
        pairs = [(target.view(-1), source.view(-1)) for target, source in pairs]
    return [target for target, _ in pairs], [source for _, source in pairs]


def _has_words(t: Tensor, dtype: torch.dtype) -> bool:
    """Returns whether a tensor of this dtype can be copied in words of eight bytes, which takes fewer loads."""
    return t.dtype is dtype and t.dim() == 1 and t.numel() * t.element_size() % 8 == t.storage_offset() * t.element_size() % 8 == 0


def add_up(total: Tensor, rows: Sequence[Run], sources: Sequence[Tensor]) -> None:
    """Writes the sum of tensors to `total`. Each covers some rows. Rows that none covers become zero."""
    SumSteps.of(Run(0, total.shape[0]), list(map(Addend, range(len(rows)), rows))).run([total], [sources])
