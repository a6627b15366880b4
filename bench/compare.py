"""Two result files side by side: `python -m flexattn bench --compare A B`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from flexattn.bench.record import Record, Row
from flexattn.bench.tables import Table, geometric_mean, headline


class Pair(NamedTuple):
    """One implementation in one cell of both records, measured in both."""

    a: Row
    b: Row

    @property
    def ratio(self) -> float:
        """B's time over A's: below 1 if B is faster."""
        assert self.a.us is not None
        assert self.b.us is not None
        return self.b.us / self.a.us

    @property
    def is_apart(self) -> bool:
        """Returns whether the quartiles of the two do not touch, so that the difference is more than the spread of either run."""
        bounds = (self.a.us_q1, self.a.us_q3, self.b.us_q1, self.b.us_q3)
        a1, a3, b1, b3 = (bound if bound is not None else float("nan") for bound in bounds)
        return b1 > a3 or b3 < a1


def pairs(a: Record, b: Record) -> list[Pair]:
    """Returns the pairs in A's order. If a name stands for different workloads in A and B, its rows are omitted."""
    known = {(r.implementation, r.workload, r.direction): r for r in b.rows if r.us is not None}
    found = []
    for row in a.rows:
        other = known.get((row.implementation, row.workload, row.direction))
        if row.us is not None and other is not None and a.workloads[row.workload] == b.workloads[other.workload]:
            found.append(Pair(row, other))
    return found


def compare(a: Record, b: Record, names: Sequence[str] = ("A", "B")) -> str:
    """Returns a table of every pair, and the geometric mean of each implementation's ratios.

    Raises ValueError if the two records have no pair.
    """
    both = pairs(a, b)
    if not both:
        raise ValueError("the two files have no implementation measured in the same workload and direction")
    rows = [
        (
            f"{p.a.workload} {p.a.direction} {p.a.implementation}",
            [f"{p.a.us:.1f}", f"{p.b.us:.1f}", f"{p.ratio:.3f}", "*" if p.is_apart else ""],
        )
        for p in both
    ]
    text = [f"{name}: {headline(record)}" for name, record in zip(names, (a, b), strict=True)]
    if a.device["name"] != b.device["name"]:
        text.append("The devices differ: the ratios compare devices as much as code.")
    text += [
        "",
        Table(
            "us, median; ratio B / A, below 1 where B is faster; * where the quartiles do not overlap",
            ["A", "B", "B / A", ""],
            rows,
        ).text(),
        "",
    ]
    for name in dict.fromkeys(p.a.implementation for p in both):
        ratios = [p.ratio for p in both if p.a.implementation == name]
        text.append(f"{name}: B / A {geometric_mean(ratios):.3f} (geometric mean of {len(ratios)} cells)")
    for record, other, label in ((a, b, "A"), (b, a, "B")):
        missing = {(r.implementation, r.workload, r.direction) for r in record.rows if r.us is not None} - {
            (r.implementation, r.workload, r.direction) for r in other.rows if r.us is not None
        }
        text += [f"{len(missing)} rows were measured in {label} alone"] if missing else []
    return "\n".join(text)
