"""The cells of published models: speed of flexattn beside the fastest other implementation, with unseen shapes apart."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import geometric_mean

from flexattn.bench.record import Record
from flexattn.bench.shapes import PUBLISHED, is_unseen
from flexattn.bench.tables import AUTO, Standing, Table, is_ours, microseconds, standings

AHEAD, BEHIND = 1.02, 0.99


def published(record: Record) -> dict[tuple[str, str], Standing]:
    """Returns the standing of each cell of a published model in which `auto` and a peer were measured."""
    found = {(s.workload, s.direction): s for s in standings(record, ours=AUTO)}
    return {cell: s for cell, s in found.items() if record.workloads[s.workload].group == PUBLISHED}


def summary(record: Record) -> Table:
    """Returns the counts of cells ahead and behind: of all shapes, of the unseen ones and of the others."""
    every = list(published(record).values())
    unseen = [s for s in every if is_unseen(record.workloads[s.workload])]
    groups = {"all": every, "unseen": unseen, "others": [s for s in every if s not in unseen]}
    columns = ["cells", "faster", "by 2 % or more", "slower by more than 1 %", "mean speed", "lowest"]
    return Table("Published models", columns, [(name, _counts(cells)) for name, cells in groups.items() if cells])


def _counts(cells: Sequence[Standing]) -> list[str]:
    speeds = [s.speed for s in cells]
    ahead, behind = sum(x >= AHEAD for x in speeds), sum(x < BEHIND for x in speeds)
    shares = [f"{n} ({n / len(speeds):.0%})" for n in (sum(x > 1 for x in speeds), ahead, behind)]
    return [str(len(speeds)), *shares, f"{geometric_mean(speeds):.3f}", f"{min(speeds):.3f}"]


def cells_table(record: Record, title: str, unseen: bool) -> Table:
    """Returns the cells of the unseen shapes or of the others, a row for each shape: time, speed and the fastest peer."""
    every = published(record)
    rows = [
        (name.removeprefix("models-"), [*_cell(record, every, name, "forward"), *_cell(record, every, name, "backward")])
        for name in dict.fromkeys(name for name, _ in record.cells())
        if record.workloads[name].group == PUBLISHED and is_unseen(record.workloads[name]) == unseen
    ]
    return Table(title, ["forward, us", "speed", "beside", "backward, us", "speed", "beside"], rows)


def slower_rows(table: Table) -> Table:
    """Returns a table of cells with the shapes that are slower by more than 1 % in a direction."""
    rows = [row for row in table.rows if any(speed != "-" and float(speed) < BEHIND for speed in (row[1][1], row[1][4]))]
    return table._replace(title=f"{table.title} that are slower", rows=rows)


def without_times(table: Table) -> Table:
    """Returns a table of cells with the speeds alone, for a page."""
    return table._replace(columns=["forward", "backward"], rows=[(name, [cells[1], cells[4]]) for name, cells in table.rows])


def _cell(record: Record, every: dict[tuple[str, str], Standing], name: str, direction: str) -> list[str]:
    s = every.get((name, direction))
    if s is not None:
        return [microseconds(s.ours.us), f"{s.speed:.3f}", s.peer.implementation]
    ours = record.of(name, direction).get(AUTO)
    return ["-" if ours is None else ours.status if ours.us is None else microseconds(ours.us), "-", "-"]


def own_table(record: Record) -> list[Table]:
    """Returns the cells in which another implementation of flexattn is faster than `auto` by 2 % or more, without unseen shapes."""
    rows = []
    for name, direction in record.cells():
        times = {n: row.us for n, row in record.of(name, direction).items() if is_ours(n) and row.us is not None}
        fastest = min(times, key=lambda n: times[n], default=AUTO)
        if AUTO in times and times[AUTO] >= AHEAD * times[fastest] and not is_unseen(record.workloads[name]):
            rows.append((f"{name}, {direction}", [f"{times[AUTO] / times[fastest]:.3f}", fastest]))
    return [Table("Time of auto, that of the fastest of flexattn's own being 1", ["time", "fastest"], rows)] if rows else []


def model_tables(record: Record) -> list[Table]:
    """Returns the summary, the unseen shapes and the others; nothing for a record without published models."""
    tables = [summary(record), cells_table(record, "Unseen shapes", True), cells_table(record, "Other shapes", False)]
    return [table for table in tables if table.rows]
