"""Charts of result files as SVG: TFLOP/s against the length, bars of other workloads, memory against the length.

SVG written as text, so that the same file comes out everywhere, and without matplotlib.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

from flexattn.bench.record import Record, Row
from flexattn.bench.shapes import title_of
from flexattn.bench.tables import AUTO, groups, name_of, panel, sweep_panels

COLOURS = {
    AUTO: "#d62728",
    "flexattn triton": "#d62728",
    "flexattn portable": "#e7969c",
    "flexattn cudnn": "#ff7f0e",
    "flexattn score_mod": "#8c1c13",
    "flexattn eager": "#d62728",
    "SDPA flash": "#1f77b4",
    "SDPA efficient": "#17becf",
    "SDPA cuDNN": "#2ca02c",
    "SDPA math": "#7f7f7f",
    "varlen_attn": "#393b79",
    "FlexAttention": "#9467bd",
    "cuDNN frontend": "#b5cf6b",
    "flash-attn 2": "#aec7e8",
    "flash-attn 3": "#6baed6",
    "flash-attn 3 forward": "#3182bd",
    "flash-attn 4": "#08519c",
    "materialised": "#7f7f7f",
    "vLLM": "#ff7f0e",
    "SGLang": "#17becf",
}
"""Color of each implementation, the same in every chart; others are gray."""
MARKERS = ("circle", "square", "triangle", "diamond")
COLUMN = 240  # pixels: the width of one plot with its labels
NARROWEST = 460
GRAY, DARK = "#777777", "#222222"


class Bar(NamedTuple):
    name: str
    value: float
    colour: str = GRAY


class Panel(NamedTuple):
    """One plot of several: lines by their names, or bars."""

    title: str
    lines: Mapping[str, Sequence[tuple[float, float]]] = {}
    bars: Sequence[Bar] = ()


def text(
    x: float, y: float, content: str, *, anchor: str = "start", size: int = 12, colour: str = DARK, turned: bool = False
) -> str:
    where = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"' + f' transform="rotate(-90 {x:.1f} {y:.1f})"' * turned
    return f'<text {where} font-size="{size}" fill="{colour}">{escape(content)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def document(title: str, width: int, height: int, parts: Iterable[str]) -> str:
    """Returns the SVG of a white page with a title."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
            'font-family="sans-serif" font-size="12">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
            text(12, 22, title, size=14),
            *parts,
            "</svg>\n",
        ]
    )


def short(number: float) -> str:
    """Returns 512 as "512" and 8192 as "8k"."""
    return f"{number:g}" if number < 1024 or number % 1024 else f"{number / 1024:g}k"


def _ticks(highest: float, most: int = 5) -> list[float]:
    """Returns round numbers from 0 to at least `highest`."""
    step = 10.0 ** math.floor(math.log10(highest / most))
    step *= next(n for n in (1, 2, 5, 10) if highest <= most * n * step)
    return [n * step for n in range(math.ceil(highest / step) + 1)]


def line_chart(title: str, panels: Sequence[Panel], x_label: str, y_label: str, *, log_y: bool = False) -> str:
    """Returns up to three plots in a row, all with one scale: x by powers of two."""
    columns, plot_width, plot_height, row, top = _columns(panels), 170, 150, 216, 74
    names = list(dict.fromkeys(name for p in panels for name in p.lines))
    points = [point for p in panels for line in p.lines.values() for point in line]
    xs = sorted({x for x, _ in points})
    ys = [y for _, y in points]
    low, high = (
        (2.0 ** math.floor(math.log2(min(ys))), 2.0 ** math.ceil(math.log2(max(ys)))) if log_y else (0.0, _ticks(max(ys))[-1])
    )
    ticks = [2.0**n for n in range(round(math.log2(low)), round(math.log2(high)) + 1)] if log_y else _ticks(max(ys))
    parts = _legend(names)
    for n, p in enumerate(panels):
        left, upper = 60 + n % columns * COLUMN, top + n // columns * row

        def at(x: float, y: float, left: float = left, upper: float = upper) -> tuple[float, float]:
            across = math.log2(x / xs[0]) / math.log2(xs[-1] / xs[0])
            up = math.log2(y / low) / math.log2(high / low) if log_y else y / high
            return left + 8 + (plot_width - 16) * across, upper + plot_height * (1 - up)

        parts.append(text(left, upper - 8, p.title))
        for tick in ticks:
            y = at(xs[0], tick)[1]
            parts += [line(left, y, left + plot_width, y, "#dddddd"), text(left - 6, y + 4, f"{tick:g}", anchor="end", colour=GRAY)]
        parts += [text(at(x, high)[0], upper + plot_height + 16, short(x), anchor="middle", colour=GRAY) for x in xs]
        parts.append(text(left + plot_width / 2, upper + plot_height + 34, x_label, anchor="middle"))
        parts.append(text(left - 44, upper + plot_height / 2, y_label, anchor="middle", turned=True))
        for name in reversed(names):  # the first on top
            if found := p.lines.get(name):
                parts.append(_line([at(x, y) for x, y in found], name, names))
    return document(title, max(NARROWEST, columns * COLUMN), top + math.ceil(len(panels) / columns) * row - 20, parts)


def _columns(panels: Sequence[Panel]) -> int:
    return 2 if len(panels) in (2, 4) else min(3, len(panels))


def _line(points: Sequence[tuple[float, float]], name: str, names: Sequence[str]) -> str:
    colour = COLOURS.get(name, GRAY)
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    width = 2.5 if name.startswith("flexattn") else 1.3
    marks = "".join(_marker(x, y, MARKERS[names.index(name) % len(MARKERS)]) for x, y in points)
    return (
        f'<g stroke="{colour}" fill="{colour}"><polyline points="{joined}" fill="none" stroke-width="{width}"/>{marks}'
        f"<title>{escape(name_of(name))}</title></g>"
    )


def _marker(x: float, y: float, kind: str) -> str:
    corners = {
        "square": ((-3, -3), (3, -3), (3, 3), (-3, 3)),
        "triangle": ((0, -4), (4, 3), (-4, 3)),
        "diamond": ((0, -4), (4, 0), (0, 4), (-4, 0)),
    }
    if kind == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"/>'
    return f'<polygon points="{" ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners[kind])}"/>'


def _legend(names: Sequence[str]) -> list[str]:
    parts, x = [], 20.0
    for name in names:
        parts += [_line([(x, 41), (x + 22, 41)], name, names), text(x + 30, 45, name_of(name))]
        x += 52 + 7 * len(name_of(name))
    return parts


def bar_chart(title: str, panels: Sequence[Panel], x_label: str) -> str:
    """Returns up to three plots in a row of horizontal bars, each with a scale of its own, from 0."""
    columns, names_width, bars_width, row, top = _columns(panels), 90, 86, 18, 62
    parts, upper, below = [], 0, top
    for n, p in enumerate(panels):
        if n % columns == 0:
            upper, below = below, below + row * max(len(p.bars) for p in panels[n : n + columns]) + 50
        left = 10 + names_width + n % columns * COLUMN
        longest = max(bar.value for bar in p.bars)
        parts.append(text(left - names_width, upper - 6, p.title))
        parts.append(text(left, upper + row * len(p.bars) + 16, x_label, colour=GRAY))
        for i, bar in enumerate(p.bars):
            y, width = upper + row * i, bars_width * bar.value / longest
            parts.append(f'<rect x="{left}" y="{y + 2}" width="{width:.1f}" height="{row - 5}" fill="{bar.colour}"/>')
            parts.append(text(left - 6, y + 13, bar.name, anchor="end"))
            parts.append(text(left + width + 5, y + 13, f"{bar.value:,.0f}" if bar.value >= 99.95 else f"{bar.value:.1f}"))
    return document(title, max(NARROWEST, columns * COLUMN), below - 20, parts)


def figures(record: Record) -> Iterator[tuple[str, str]]:
    """Yields (name, SVG) of each chart that the record has data for."""
    record = record._replace(rows=sorted(record.rows, key=lambda row: not row.implementation.startswith("flexattn")))
    device = "a CPU" if record.device["type"] == "cpu" else record.device["name"]
    for direction in dict.fromkeys(direction for _, direction in record.cells()):
        panels = [
            Panel(
                f"Head dim {d}, {'causal' if mask == 'causal' else 'no mask'}",
                _lines(record, [w.name for w in panel(record, d, mask)], direction, lambda row: row.tflops),
            )
            for panel_direction, d, mask in sorted(sweep_panels(record), key=lambda p: (p[2], p[1]))
            if panel_direction == direction
        ]
        if any(p.lines for p in panels):
            title = f"{direction.capitalize()} on {device}: TFLOP/s by sequence length, 16,384 tokens in all"
            yield f"sweep_{direction}", line_chart(title, panels, "sequence length, tokens", "TFLOP/s")
    for group in groups(record):
        name, title = f"{group.name}_{group.direction}", group.direction.capitalize()
        if group.name != "sweep" and group.differ_in_length:
            if lines := _lines(record, list(group.columns), group.direction, lambda row: row.peak_mib):
                panels = [Panel(f"{'Forward and backward' if group.direction == 'both' else title}, one sequence", lines)]
                title = f"Peak memory of a call by sequence length on {device}"
                yield name, line_chart(title, panels, "sequence length, tokens", "MiB", log_y=True)
        elif group.name != "sweep":
            bars = {w: _bars(record.of(w, group.direction)) for w in group.columns}
            if panels := [Panel(title_of(record.workloads[w]), bars=own) for w, own in bars.items() if own]:
                yield name, bar_chart(f"{title} on {device}: TFLOP/s, longer is faster", panels, "TFLOP/s")


def _lines(
    record: Record, names: Sequence[str], direction: str, of: Callable[[Row], float | None]
) -> dict[str, list[tuple[float, float]]]:
    """Returns the points of each implementation over the length."""
    found: dict[str, list[tuple[float, float]]] = {}
    for name in names:
        for row in record.of(name, direction).values():
            if value := of(row):
                found.setdefault(row.implementation, []).append((record.workloads[name].seqlen_q, value))
    return found


def _bars(rows: Mapping[str, Row]) -> list[Bar]:
    return [Bar(name_of(name), row.tflops, COLOURS.get(name, GRAY)) for name, row in rows.items() if row.tflops is not None]


def write(folder: Path, record: Record) -> None:
    """Writes one SVG file for each chart."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, svg in figures(record):
        (folder / f"{name}.svg").write_text(svg, "utf-8")
