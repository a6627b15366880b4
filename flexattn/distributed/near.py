"""Exchanges through symmetric memory, for the ranks of one host: the rows that each rank reads and their places."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from flexattn.distributed.layout import Run, Runs, common, places, row_of, rows_of, size_of, union
from flexattn.distributed.peer_memory import Pull, RemoteRows, RowLayout, aligned


class SymmetricFetch(NamedTuple):
    """One rank's part of a fetch: it copies rows that others need to its symmetric memory, and reads the rows that it needs.

    Gradients use the same memory. A rank writes gradients of its fetched rows, one owner after another, and each owner reads its
    own.
    """

    copies: tuple[tuple[Run, Run], ...]  # rows of this rank's tensor, and their place in its symmetric memory
    moves: tuple[RemoteRows, ...]  # reads into the held rows
    back: tuple[RemoteRows, ...]  # reads into the received gradients, from one rank after another
    most_sent: int  # rows that any rank copies, equal on all ranks
    most_fetched: int  # rows that any rank fetches


def make_symmetric_fetch(kv_runs: Sequence[Runs], wanted: Sequence[Runs], held: Runs, rank: int) -> SymmetricFetch:
    """Returns a rank's part of a fetch. The arguments are those of `exchange.make_send_receive_lists`."""
    ranks = range(len(kv_runs))
    fetched = [[tuple(common(wanted[reader], kv_runs[owner])) if reader != owner else () for owner in ranks] for reader in ranks]
    sent = [union(run for reader in ranks for run in fetched[reader][owner]) for owner in ranks]
    copied = tuple(common(sent[rank], kv_runs[rank]))
    copies = tuple(zip(places(copied, kv_runs[rank]), places(copied, sent[rank]), strict=True))
    moves = tuple(
        RemoteRows(owner, row_of(run.start, sent[owner], rows_of(sent[owner])), row_of(run.start, held, rows_of(held)), run.size)
        for owner in ranks
        for run in fetched[rank][owner]
    )
    back, row = [], 0
    for owner in ranks:
        count = size_of(fetched[owner][rank])
        if count:
            back.append(RemoteRows(owner, sum(size_of(runs) for runs in fetched[owner][:rank]), row, count))
        row += count
    most = max(sum(map(size_of, runs)) for runs in fetched)
    return SymmetricFetch(copies, moves, tuple(back), max(map(size_of, sent)), most)


def starts(rows: int, sizes: Sequence[int]) -> list[int]:
    """Returns the first byte of each tensor of an exchange, for tensors with `rows` rows one after another, and the total.

    sizes: bytes of one row of each tensor.
    """
    return list(itertools.accumulate((aligned(rows * size) for size in sizes), initial=0))


def pull_of_rows(first: int, out: Tensor, moves: tuple[RemoteRows, ...], own: Tensor | None = None) -> Pull:
    """Returns a pull of whole rows of `out`, a contiguous tensor [rows, ...]. own: another tensor of such rows."""
    row = math.prod(out.shape[1:])
    return Pull(out, first, moves, (RowLayout(row), RowLayout(row)), row, own)


def row_size(x: Tensor) -> int:
    """Returns the bytes of one row."""
    return math.prod(x.shape[1:]) * x.element_size()
