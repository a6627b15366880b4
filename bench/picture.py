"""docs/speed.svg, which the README shows: flexattn's speed beside the fastest peer, every cell of a run as one dot.

python -m flexattn bench --from bench/results/RESULT.json --picture docs/speed.svg

SVG written as text, so that the same file comes out with or without matplotlib.
"""

from __future__ import annotations

import math
from xml.sax.saxutils import escape

from flexattn.bench.record import Record
from flexattn.bench.tables import Standing, panel, standings, sweep_panels

LEFT, RIGHT, TOP, ROW = 220, 830, 62, 17  # pixels: the axis from LEFT to RIGHT, the first row's upper edge, a row's height
WIDTH = 860
COLOURS = {"forward": "#08519c", "backward": "#d62728"}
TICKS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)


def svg(record: Record) -> str:
    """Returns the picture. Raises ValueError where the run has no cell with both flexattn and a peer."""
    rows = _rows(record)
    if not rows:
        raise ValueError("the result has no cell in which both flexattn and a peer were measured")
    speeds = [s.speed for _, cells in rows for s in cells]
    low, high = min(*speeds, 1.0) / 1.03, max(*speeds, 1.0) * 1.03

    def x(speed: float) -> float:
        return LEFT + (RIGHT - LEFT) * math.log(speed / low) / math.log(high / low)

    bottom = TOP + ROW * len(rows)
    ahead = sum(speed > 1 for speed in speeds)
    title = f"Speed beside the fastest peer, {record.device['name']}: faster in {ahead} of {len(speeds)} cells"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{bottom + 34}" viewBox="0 0 {WIDTH} {bottom + 34}" '
        'font-family="sans-serif" font-size="12">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{bottom + 34}" fill="#ffffff"/>',
        _text(12, 22, title, size=15),
        *_legend(),
        f'<rect x="{LEFT}" y="{TOP}" width="{x(1.0) - LEFT:.1f}" height="{ROW * len(rows)}" fill="#f0f0f0"/>',
    ]
    for tick in (t for t in TICKS if low <= t <= high):
        stroke = "#555555" if tick == 1 else "#dddddd"
        parts.append(f'<line x1="{x(tick):.1f}" y1="{TOP}" x2="{x(tick):.1f}" y2="{bottom}" stroke="{stroke}"/>')
        parts.append(_text(x(tick), bottom + 16, f"{tick:g}", anchor="middle"))
    parts.append(_text(LEFT, bottom + 30, "the fastest peer is faster", colour="#777777"))
    parts.append(_text(RIGHT, bottom + 30, "flexattn is faster", anchor="end", colour="#777777"))
    for n, (name, cells) in enumerate(rows):
        middle = TOP + ROW * n + ROW / 2
        parts.append(_text(LEFT - 8, middle + 4, name, anchor="end"))
        parts += [_dot(x(s.speed), middle, s.direction) for s in cells]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _rows(record: Record) -> list[tuple[str, list[Standing]]]:
    """Head dims and masks of the sweep, each with all its lengths, then the other workloads."""
    every = standings(record)
    rows = []
    for head_dim, mask in dict.fromkeys((head_dim, mask) for _, head_dim, mask in sweep_panels(record)):
        names = {w.name for w in panel(record, head_dim, mask)}
        lengths = [w.seqlen_q for w in panel(record, head_dim, mask)]
        title = f"head dim {head_dim}, {mask}, {_short(min(lengths))} to {_short(max(lengths))}"
        rows.append((title, [s for s in every if s.workload in names]))
    others = dict.fromkeys(s.workload for s in every if record.workloads[s.workload].group != "sweep")
    rows += [(workload, [s for s in every if s.workload == workload]) for workload in others]
    return [(title, cells) for title, cells in rows if cells]


def _short(length: int) -> str:
    return str(length) if length < 1024 else f"{length // 1024}k"


def _legend() -> list[str]:
    forward, backward = LEFT + 6, LEFT + 96
    return [
        _dot(forward, 45, "forward"),
        _text(forward + 10, 49, "forward"),
        _dot(backward, 45, "backward"),
        _text(backward + 10, 49, "backward"),
    ]


def _dot(x: float, y: float, direction: str) -> str:
    """A dot for a forward, a ring for a backward: told apart without colour too."""
    colour = COLOURS.get(direction, "#000000")
    fill = "none" if direction == "backward" else colour
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{fill}" fill-opacity="0.7" stroke="{colour}" stroke-width="1.5"/>'


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, colour: str = "#222222") -> str:
    where = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {where} font-size="{size}" fill="{colour}">{escape(text)}</text>'
