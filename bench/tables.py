"""A record in words and tables, for terminals and pages alike."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from statistics import geometric_mean
from typing import NamedTuple

from flexattn.bench.record import Record, Row
from flexattn.bench.shapes import MASKS, PUBLISHED, SWEEP_HEAD_DIMS, SWEEP_SEQLENS, Workload, title_of


class Table(NamedTuple):
    """A grid of figures with a title, row names and column names."""

    title: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[str]]]

    def text(self) -> str:
        """Right-aligned, for a terminal."""
        names = max((len(name) for name, _ in self.rows), default=0)
        widths = [max([len(c), *(len(cells[n]) for _, cells in self.rows)]) for n, c in enumerate(self.columns)]

        def line(name: str, cells: Sequence[str]) -> str:
            return f"{name:{names}}  " + "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))

        return "\n".join([self.title, line("", self.columns), *(line(*row) for row in self.rows)])

    def markdown(self, corner: str) -> str:
        lines = [f"#### {self.title}", ""] if self.title else []
        lines += [f"| {corner} | {' | '.join(self.columns)} |", f"|---|{'---:|' * len(self.columns)}"]
        return "\n".join([*lines, *(f"| {name} | {' | '.join(cells)} |" for name, cells in self.rows)])


def figure(row: Row | None, with_share: bool = False) -> str:
    """Returns the TFLOP/s, or the status if there are none."""
    if row is None:
        return "-"
    if row.tflops is None:
        return row.status
    share = f" ({row.share:.0%})" if with_share and row.share is not None else ""
    return f"{row.tflops:.0f}{share}" if row.tflops >= 10 else f"{row.tflops:.2g}{share}"


class Group(NamedTuple):
    """Workloads that share tables, in one direction: a part of the sweep, or a group."""

    name: str
    title: str
    direction: str
    columns: Mapping[str, str]  # by workload
    differ_in_length: bool


def tables(record: Record) -> list[Table]:
    """Returns the TFLOP/s of each group, the host's times of small calls, and the memory of calls that differ in length."""
    found = []
    for group in groups(record):
        kinds: list[tuple[str, Callable[[Row], str], Callable[[Row], bool]]] = []
        if group.name != "memory":
            kinds.append(("", lambda r: figure(r, with_share=True), lambda r: r.status != "refused"))
        if group.name in ("small", "decode"):
            title = ": host us to enqueue a call, median (99th percentile)"
            kinds.append((title, lambda r: f"{r.host_us:.0f} ({r.host_us_p99:.0f})", lambda r: r.host_us_p99 is not None))
        if group.differ_in_length:
            kinds.append((": peak MiB of a call", lambda r: f"{r.peak_mib:.0f}", lambda r: bool(r.peak_mib)))
        for title, show, has in kinds:
            rows = _rows(record, group, show, has)
            found += [Table(group.title + title, list(group.columns.values()), rows)] if rows else []
    return found


MEMORY_PANEL = 128, "causal"  # the part of the sweep with a memory table; its tokens are fixed


def groups(record: Record) -> list[Group]:
    """Returns the parts of the sweep, then the other groups, without the shapes of published models."""
    found = []
    for direction, head_dim, mask in sweep_panels(record):
        columns = {w.name: str(w.seqlen_q) for w in panel(record, head_dim, mask) if record.of(w.name, direction)}
        title = f"{direction}, head dim {head_dim}, {mask}"
        found.append(Group("sweep", title, direction, columns, (head_dim, mask) == MEMORY_PANEL))
    for name in dict.fromkeys(w.group for w in record.workloads.values()):
        for direction in dict.fromkeys(d for _, d in record.cells()):
            workloads = [w for w in record.workloads.values() if w.group == name and record.of(w.name, direction)]
            if workloads and name not in ("sweep", PUBLISHED):
                columns = {w.name: str(w.seqlen_q) if name == "memory" else w.name for w in workloads}
                found.append(Group(name, f"{direction}, {name}", direction, columns, name == "memory"))
    return found


def sweep_panels(record: Record) -> list[tuple[str, int, str]]:
    """Returns (direction, head dim, mask) of the sweep's cells that the record has."""
    directions = dict.fromkeys(direction for _, direction in record.cells())
    return [
        (direction, head_dim, mask)
        for head_dim in sorted(SWEEP_HEAD_DIMS)
        for direction in directions
        for mask in MASKS
        if any(record.of(w.name, direction) for w in panel(record, head_dim, mask))
    ]


def panel(record: Record, head_dim: int, mask: str) -> list[Workload]:
    names = [f"sweep-d{head_dim}-{mask}-s{s}" for s in SWEEP_SEQLENS]
    return [record.workloads[name] for name in names if name in record.workloads]


def _rows(record: Record, group: Group, show: Callable[[Row], str], has: Callable[[Row], bool]) -> list[tuple[str, list[str]]]:
    """Returns a line for each implementation that has a figure. Other cells show the status, or "-" if there is no row."""
    cells = [record.of(name, group.direction) for name in group.columns]
    rows = []
    for implementation in record.implementations():
        found = [cell.get(implementation) for cell in cells]
        if any(row is not None and has(row) for row in found):
            texts = ["-" if row is None else show(row) if has(row) else row.status for row in found]
            rows.append((implementation, texts))
    return rows


AUTO = "flexattn auto"
"""The rows of the backend that `auto` selects, which `flexattn.bench.regret.with_auto` adds to a record."""


def name_of(implementation: str) -> str:
    """Returns an implementation's name as pages have it."""
    return "flexattn" if implementation == AUTO else implementation


class Standing(NamedTuple):
    """The comparison of flexattn with a peer in one cell."""

    workload: str
    direction: str
    ours: Row  # the fastest of flexattn's own
    peer: Row  # the fastest of all others

    @property
    def is_level(self) -> bool:
        """Returns whether the quartiles of the two times overlap."""
        return _overlap(self.ours, self.peer)

    @property
    def speed(self) -> float:
        """The peer's time over flexattn's: above 1 if flexattn is faster."""
        return _us(self.peer) / _us(self.ours)


def is_ours(name: str) -> bool:
    return name.startswith("flexattn ")


def is_candidate(implementation: str) -> bool:
    """Returns whether an implementation is a tile that was timed beside the committed one."""
    return is_ours(implementation) and " tile " in implementation


def standings(record: Record, peer: str | None = None, ours: str | None = None) -> list[Standing]:
    """Returns the cells in which flexattn (or its implementation `ours`) and a peer (or the named implementation) were measured."""
    found = []
    for workload, direction in record.cells():
        rows = [r for r in record.of(workload, direction).values() if r.us is not None]
        mine = [r for r in rows if is_ours(r.implementation) and ours in (None, r.implementation)]
        theirs = [r for r in rows if (r.implementation == peer if peer else not is_ours(r.implementation))]
        if mine and theirs:
            found.append(Standing(workload, direction, min(mine, key=_us), min(theirs, key=_us)))
    return found


def _us(row: Row) -> float:
    assert row.us is not None
    return row.us


def _overlap(a: Row, b: Row) -> bool:
    """Returns whether the quartiles of the times of two rows overlap."""
    (a1, a3), (b1, b3) = ((row.us_q1 or _us(row), row.us_q3 or _us(row)) for row in (a, b))
    return a1 <= b3 and b1 <= a3


def microseconds(us: float | None) -> str:
    """Returns a time of a page with three digits or all before the point."""
    assert us is not None
    return f"{us:,.0f}" if us >= 100 else f"{us:.1f}"


def peers_of(record: Record) -> list[str]:
    """Returns the implementations that were measured beside flexattn."""
    return [name for name in record.implementations() if not is_ours(name) and standings(record, name)]


def peer_table(record: Record, mark: Callable[[Standing], str] = lambda standing: "") -> Table:
    """Returns the table of peers: cells won, level and lost, and speeds. mark: a sign for the name of a peer with such a cell."""
    rows = []
    for peer in peers_of(record):
        every = standings(record, peer)
        level = sum(s.is_level for s in every)
        faster = sum(s.speed > 1 and not s.is_level for s in every)
        speeds = [s.speed for s in every]
        counts = [len(every), faster, level, len(every) - faster - level]
        texts = [*map(str, counts), *(f"{x:.3f}" for x in (geometric_mean(speeds), min(speeds), max(speeds)))]
        rows.append((peer + max(map(mark, every)), texts))
    return Table("", ["cells", "faster", "level", "slower", "mean speed", "lowest", "highest"], rows)


def slower_table(record: Record, title: Callable[[Workload], str] = title_of) -> Table:
    """Returns the cells in which a peer is faster, the worst first; cells that are level are left out."""
    cells = sorted((s for s in standings(record) if s.speed <= 1 and not s.is_level), key=lambda s: s.speed)
    rows = [(f"{title(record.workloads[s.workload])}, {s.direction}", [f"{s.speed:.3f}", s.peer.implementation]) for s in cells]
    return Table("", ["speed", "faster implementation"], rows)


def verdict(record: Record) -> list[Table]:
    """Returns how flexattn compares with each peer, and the cells in which one is faster."""
    slower = slower_table(record, lambda workload: workload.name)
    found = [
        peer_table(record)._replace(title="Cells where flexattn is faster, level and slower, and its speed, the peer's being 1"),
        slower._replace(title=f"slower in {len(slower.rows)} of {len(standings(record))} cells"),
    ]
    return [table for table in found if table.rows]


def headline(record: Record) -> str:
    """Device and versions, on one line."""
    known = [f"{name} {text}" for name, text in record.versions.items() if text]
    return f"{record.device['name']}; {', '.join(known)}"


class Pair(NamedTuple):
    """One implementation in one cell of both records, measured in both."""

    a: Row
    b: Row

    @property
    def ratio(self) -> float:
        """B's time over A's: below 1 if B is faster."""
        return _us(self.b) / _us(self.a)

    @property
    def is_apart(self) -> bool:
        """Returns whether the quartiles of the two do not touch, so that the difference is more than the spread of either run."""
        return not _overlap(self.a, self.b)


def pairs(a: Record, b: Record) -> list[Pair]:
    """Returns the pairs in A's order. If a name stands for different workloads in A and B, its rows are omitted."""
    known = {(r.implementation, r.workload, r.direction): r for r in b.rows if r.us is not None}
    found = []
    for row in a.rows:
        other = known.get((row.implementation, row.workload, row.direction))
        if row.us is not None and other is not None and a.workloads[row.workload] == b.workloads[other.workload]:
            found.append(Pair(row, other))
    return found


def _slower_beside_others(both: Sequence[Pair]) -> list[str]:
    """Returns a line for each row of flexattn with a ratio of 3 % or more above the median ratio of the cell's other libraries.

    Another machine changes the times of all libraries. A change of flexattn's code changes the times of flexattn alone.
    """
    others: dict[tuple[str, str], list[float]] = {}
    for p in both:
        if not is_ours(p.a.implementation):
            others.setdefault((p.a.workload, p.a.direction), []).append(p.ratio)
    found = []
    for p in both:
        ratios = others.get((p.a.workload, p.a.direction))
        if is_ours(p.a.implementation) and ratios and (excess := p.ratio / statistics.median(ratios)) >= 1.03:
            found.append((excess, f"slower beside the others: {p.a.workload} {p.a.direction} {p.a.implementation} {excess:.3f}"))
    return [line for _, line in sorted(found, reverse=True)]


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
    text += _slower_beside_others(both)
    for record, other, label in ((a, b, "A"), (b, a, "B")):
        missing = {(r.implementation, r.workload, r.direction) for r in record.rows if r.us is not None} - {
            (r.implementation, r.workload, r.direction) for r in other.rows if r.us is not None
        }
        text += [f"{len(missing)} rows were measured in {label} alone"] if missing else []
    return "\n".join(text)
