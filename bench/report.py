"""A record as one HTML file that needs nothing else: the verdict, plots, tables, what was refused, and how it was measured."""

from __future__ import annotations

import base64
import html as markup
import importlib.util
import json
from collections.abc import Iterable, Sequence

from flexattn.bench.counts import roofline, work
from flexattn.bench.record import Record
from flexattn.bench.tables import Table, is_ours, refusals, standing_table, standings, tables, versions_of_implementations

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 1180px; margin: 2rem auto; padding: 0 1rem; color: #1c1c1c; }
table { border-collapse: collapse; margin: .6rem 0 1.4rem; font-variant-numeric: tabular-nums; font-size: 13.5px; }
th, td { padding: .22rem .6rem; border-bottom: 1px solid #ddd; text-align: right; }
th:first-child, td:first-child { text-align: left; }
tr.ours td { background: #fbeeee; }
td.best { font-weight: 700; }
td.lost { color: #b00020; }
img { max-width: 100%; }
dt { font-weight: 600; margin-top: .4rem; }
code { font-size: 13px; overflow-wrap: anywhere; }
details { margin: .6rem 0; }
"""


def html(record: Record) -> str:
    """The page. Plots are drawn where matplotlib is installed, and the page says so where it is not."""
    title = f"Attention on {record.device['name']}"
    parts = [
        f"<h1>{_text(title)}</h1>",
        f"<p>{_text(_summary(record))}</p>",
        *_standing(record),
        *_plots(record),
        "<h2>Every figure</h2>",
        "<p>TFLOP/s, unless a title says otherwise; the best of a column is bold. flexattn's rows are shaded.</p>",
        *map(_table, tables(record)),
        *_lost(record),
        *_roofline(record),
        *_refused(record),
        *_rows(record),
        *_method(record),
    ]
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{_text(title)}</title>\n<style>{STYLE}</style>\n'
        + "\n".join([*parts, "</html>\n"])
    )


def _text(value: object) -> str:
    return markup.escape(str(value))


def _summary(record: Record) -> str:
    versions = ", ".join(f"{name} {text}" for name, text in record.versions.items() if text)
    when = f"Started {record.started}. " if record.started else ""
    unfinished = "" if record.complete else " This run did not measure all that it set out to."
    return f"{when}{versions}.{unfinished}"


def _standing(record: Record) -> list[str]:
    table = standing_table(record)
    return [] if table is None else ["<h2>Where flexattn stands</h2>", _table(table, plain=True)]


def _plots(record: Record) -> list[str]:
    if importlib.util.find_spec("matplotlib") is None:
        return ["<p>There are no plots, as matplotlib is not installed where this page was made.</p>"]
    from flexattn.bench import plots

    images = [(name, base64.b64encode(plots.png(figure)).decode()) for name, figure in plots.figures(record)]
    return [f'<img alt="{_text(name)}" src="data:image/png;base64,{data}">' for name, data in images]


def _table(table: Table, plain: bool = False) -> str:
    best = [_best(column) for column in zip(*(cells for _, cells in table.rows), strict=True)]
    is_rate = not plain and ":" not in table.title
    head = "".join(f"<th>{_text(name)}</th>" for name in ("", *table.columns))
    lines = []
    for name, cells in table.rows:
        marks = [
            ' class="best"' if is_rate and _number(cell) == top is not None else "" for cell, top in zip(cells, best, strict=True)
        ]
        data = "".join(f"<td{mark}>{_text(cell)}</td>" for cell, mark in zip(cells, marks, strict=True))
        lines.append(f"<tr{' class=' + chr(34) + 'ours' + chr(34) if is_ours(name) else ''}><td>{_text(name)}</td>{data}</tr>")
    title = f"<h3>{_text(table.title)}</h3>" if table.title else ""
    return f"{title}<table><tr>{head}</tr>{''.join(lines)}</table>"


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def _best(cells: Iterable[str]) -> float | None:
    return max((number for cell in cells if (number := _number(cell)) is not None), default=None)


def _lost(record: Record) -> list[str]:
    every = standings(record)
    lost = sorted((s for s in every if s.speed <= 1), key=lambda s: s.speed)
    if not every:
        return []
    rows = [(f"{s.workload} {s.direction}", [s.peer.implementation, f"{s.speed:.2f}"]) for s in lost]
    head = f"<h2>Lost cells: {len(lost)} of {len(every)}</h2><p>Where a peer is as fast as flexattn, or faster.</p>"
    return (
        [
            head,
            _fold(
                f"all {len(lost)}", _table(Table("", ["fastest peer", "flexattn's speed, the peer's being 1"], rows), plain=True)
            ),
        ]
        if rows
        else [head]
    )


def _fold(summary: str, content: str) -> str:
    return f"<details><summary>{_text(summary)}</summary>{content}</details>"


def _roofline(record: Record) -> list[str]:
    if record.ceilings is None or record.ceilings.get("copy_gb_s") is None:
        return []
    rows = []
    for workload, direction in record.cells():
        mine = [
            r
            for name, r in record.of(workload, direction).items()
            if is_ours(name) and r.tflops is not None and r.roofline_share is not None
        ]
        if mine:
            best = max(mine, key=lambda r: r.roofline_share or 0.0)
            ceilings = record.ceilings["matmul_tflops"], record.ceilings["copy_gb_s"]
            found = roofline(work(record.workloads[workload], direction), *ceilings)
            cells = [
                f"{found.intensity:.0f}",
                found.bound,
                f"{found.attainable_tflops:.0f}",
                f"{best.tflops:.0f}",
                f"{best.roofline_share:.0%}",
            ]
            rows.append((f"{workload} {direction}", cells))
    columns = ["FLOP per byte", "bound by", "attainable TFLOP/s", "flexattn", "of it"]
    return ["<h2>Roofline</h2>", _fold("under the ceilings of the same run", _table(Table("", columns, rows), plain=True))]


def _refused(record: Record) -> list[str]:
    found = refusals(record)
    items = [
        f"<li><b>{_text(name)}</b>, {len(cells)} cells ({_text(_few(cells))}): {_text(reason)}</li>"
        for name, reason, cells in found
    ]
    left_out = [f"<li>{_text(x['workload'])} {_text(x['direction'])}: {_text(x['reason'])}</li>" for x in record.left_out]
    parts = ["<h2>Refused or wrong</h2>", f"<ul>{''.join(items)}</ul>"] if items else []
    return [*parts, *(["<h2>Left out</h2>", f"<ul>{''.join(left_out)}</ul>"] if left_out else [])]


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _rows(record: Record) -> list[str]:
    columns = ["us", "quartiles", "TFLOP/s", "of the matrix product", "GB/s", "host us (p99)", "peak MiB", "calls"]
    rows = []
    for r in record.rows:
        if r.us is not None:
            quartiles = f"{_figure(r.us_q1, '.1f')} to {_figure(r.us_q3, '.1f')}"
            host = f"{_figure(r.host_us, '.1f')} ({_figure(r.host_us_p99, '.1f')})" if r.host_us is not None else "-"
            rates = [_figure(r.tflops, ".3g"), _figure(r.share, ".0%"), _figure(r.gb_s, ".0f")]
            others = [host, _figure(r.peak_mib, ".1f"), _figure(r.calls, "d")]
            name = f"{r.workload} {r.direction} {r.implementation} ({r.version})"
            rows.append((name, [f"{r.us:.1f}", quartiles, *rates, *others]))
    return ["<h2>Every row</h2>", _fold(f"{len(rows)} rows", _table(Table("", columns, rows), plain=True))] if rows else []


def _figure(value: float | None, how: str) -> str:
    """A number; "-" where it was not measured."""
    return "-" if value is None else format(value, how)


def _method(record: Record) -> list[str]:
    facts = {
        "measured": versions_of_implementations(record),
        "command": record.command,
        "device": json.dumps(record.device),
        "ceilings": json.dumps(record.ceilings),
        **record.method,
    }
    items = "".join(f"<dt>{_text(name)}</dt><dd><code>{_text(text)}</code></dd>" for name, text in facts.items())
    shapes = [(w.name, [str(w)]) for w in record.workloads.values()]
    return ["<h2>How it was measured</h2>", f"<dl>{items}</dl>", _fold("shapes", _table(Table("", ["shape"], shapes), plain=True))]
