"""docs/performance.md and the README's section on performance, made from result files; tests hold both to them.

python -m flexattn bench --from bench/results/RESULT.json --page docs/performance.md --readme README.md --picture docs/speed.svg
"""

from __future__ import annotations

from collections.abc import Mapping

from flexattn.bench.record import Record
from flexattn.bench.tables import (
    Standing,
    Table,
    geometric_mean,
    is_ours,
    panel,
    refusals,
    standing_table,
    standings,
    sweep_panels,
    tables,
    versions_of_implementations,
)

BEGIN, END = "<!-- made by `python -m flexattn bench --readme`: begin -->", "<!-- end -->"


def performance(records: Mapping[str, Record]) -> str:
    """The page: the first record in full, of the others their tables. Names are those of the files in bench/results."""
    [(name, main), *others] = records.items()
    command = f"python -m flexattn bench --from {' '.join(f'bench/results/{n}' for n in records)} --page docs/performance.md"
    parts = [
        "# Performance",
        f"Made by `{command}`; a test holds the page to the files.",
        provenance(name, main),
        method(main),
        *standing(main),
        *beside_the_fastest(main),
        *(t.markdown("TFLOP/s" if ":" not in t.title else "") for t in tables(main)),
        *lost(main),
        *refused(main),
    ]
    for other_name, other in others:
        parts += [f"## {other_name.removesuffix('.json').replace('_', ' ')}", provenance(other_name, other)]
        parts += [method(other), *(t.markdown("") for t in tables(other))]
    return "\n\n".join(parts) + "\n"


def provenance(name: str, record: Record) -> str:
    versions = ", ".join(f"{package} {text}" for package, text in record.versions.items() if text)
    when = f", begun {record.started}" if record.started else ""
    return (
        f"One run on {_article(record.device['name'])}{when}, with {versions}. "
        f"[`bench/results/{name}`](../bench/results/{name}) has every figure that was measured; "
        f"its command was `{record.command}`. Measured: "
        f"{versions_of_implementations(record)}."
        + ("" if record.complete else " It did not measure all that it set out to; the file has what was left out.")
    )


def _article(device: str) -> str:
    return f"an {device}" if device.startswith("NVIDIA") else device


def method(record: Record) -> str:
    lines = [f"- {name}: {text}." for name, text in record.method.items()]
    if record.ceilings is not None:
        found = record.ceilings
        copy = f", and a copy of {found['copy_bytes'] / 2**30:g} GiB at {found['copy_gb_s']:.0f} GB/s" if found["copy_gb_s"] else ""
        product = f"{found['matmul_dtype']} matrix product of {found['matmul_size']}³ ran at {found['matmul_tflops']:.0f} TFLOP/s"
        lines.append(f"- ceilings: a {product}{copy} in the same run.")
    return "\n".join(lines)


def standing(record: Record) -> list[str]:
    """flexattn beside each peer: cells won, and speeds. Nothing that is not in the file."""
    table, every = standing_table(record), standings(record)
    if table is None:
        return []
    behind = sum(s.speed <= 1 for s in every)
    return [
        f"{table.title}:",
        table._replace(title="").markdown("peer"),
        f"The fastest peer of a cell is as fast as the fastest of flexattn, or faster, in {behind} of {len(every)} cells.",
    ]


def lost(record: Record) -> list[str]:
    """Every cell where a peer is as fast or faster, worst first."""
    cells = sorted((s for s in standings(record) if s.speed <= 1), key=lambda s: s.speed)
    if not cells:
        return []
    rows = [(f"{s.workload} {s.direction}", [s.peer.implementation, f"{s.speed:.2f}"]) for s in cells]
    return ["## Lost cells", Table("", ["fastest peer", "flexattn's speed, the peer's being 1"], rows).markdown("cell")]


def refused(record: Record) -> list[str]:
    found = refusals(record)
    if not found:
        return []
    lines = [f"- {name}, {len(cells)} cells, as {cells[0]}: {_plain(reason)}" for name, reason, cells in found]
    return ["## Refused or wrong", "\n".join(lines)]


def _plain(text: str) -> str:
    """Without what Markdown would take for its own."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("_", "\\_")


def beside_the_fastest(record: Record) -> list[str]:
    """Every cell of the sweep as flexattn's speed beside its fastest peer, then the other workloads."""
    every = {(s.workload, s.direction): s for s in standings(record)}
    if not every:
        return []
    parts = [
        "## Beside the fastest peer",
        "Speed of the fastest of flexattn's backends that were measured, the speed of the fastest peer of each cell being 1.00. "
        "Below 1.00 the peer is faster.",
    ]
    rows = []
    seqlens: list[int] = []
    for direction, head_dim, mask in sweep_panels(record):
        shapes = panel(record, head_dim, mask)
        seqlens = sorted({*seqlens, *(w.seqlen_q for w in shapes)})
        found = {w.seqlen_q: every.get((w.name, direction)) for w in shapes}
        rows.append((f"{direction}, head dim {head_dim}, {mask}", found))
    if rows:
        cells = []
        for title, found in rows:
            fastest = dict.fromkeys(s.peer.implementation for s in found.values() if s is not None)
            cells.append((title, [*(_speed(found.get(s)) for s in seqlens), ", ".join(fastest)]))
        parts.append(Table("", [*map(str, seqlens), "fastest peer"], cells).markdown("16384 tokens, length"))
    others = [s for (workload, _), s in every.items() if record.workloads[workload].group != "sweep"]
    if others:
        listed = [(f"{s.workload} {s.direction}", [_speed(s), s.peer.implementation]) for s in others]
        parts.append(Table("", ["speed", "fastest peer"], listed).markdown("workload"))
    return [*parts, "## TFLOP/s"]


def readme_section(records: Mapping[str, Record]) -> str:
    """The picture, and a line for each peer."""
    name, record = next(iter(records.items()))
    every = standings(record)
    device = record.device["name"]
    ahead = sum(s.speed > 1 for s in every)
    peers = []
    for peer in (name for name in record.implementations() if not is_ours(name)):
        speeds = [s.speed for s in standings(record, peer)]
        if speeds:
            won = sum(speed > 1 for speed in speeds)
            figures = [f"{won} of {len(speeds)}", f"{geometric_mean(speeds):.2f}", f"{min(speeds):.2f} to {max(speeds):.2f}"]
            peers.append((peer, figures))
    title = f"Each cell's speed beside the fastest peer's, on {_article(device)}: flexattn is faster in {ahead} of {len(every)}"
    summary = (
        f"On {_article(device)}, torch {record.versions['torch']}, {_dtypes(record)}: the fastest of flexattn's backends "
        f"({_ours(record)}) is faster than the fastest of {len(peers)} peers in {ahead} of {len(every)} cells, and as fast or "
        "slower in the others. [docs/performance.md](docs/performance.md) has every cell, TFLOP/s, the peers' versions, and how "
        f"it was measured; the file is `bench/results/{name}`."
    )
    table = Table("", ["cells where flexattn is faster", "mean speed, the peer's being 1", "from, to"], peers)
    return "\n\n".join([f"![{title}](docs/speed.svg)", summary, table.markdown("peer")])


def _speed(cell: Standing | None) -> str:
    return "-" if cell is None else f"{cell.speed:.2f}"


def _ours(record: Record) -> str:
    return ", ".join(name.removeprefix("flexattn ") for name in record.implementations() if is_ours(name))


def _dtypes(record: Record) -> str:
    return " and ".join(dict.fromkeys(w.dtype for w in record.workloads.values()))


def with_readme_section(text: str, records: Mapping[str, Record]) -> str:
    """The README with the part between its two marks made anew. Raises ValueError where it has no marks."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the file has no part to make: it needs the lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{readme_section(records)}\n\n{END}{after}"
