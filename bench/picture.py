"""docs/speed.svg, which the README shows: flexattn's speed relative to the fastest peer, each cell of a run as one dot."""

from __future__ import annotations

import math

from flexattn.bench.charts import GRAY, document, line, short, text
from flexattn.bench.record import Record
from flexattn.bench.shapes import title_of
from flexattn.bench.tables import Standing, panel, standings, sweep_panels

LEFT, RIGHT, TOP, ROW = 206, 700, 62, 17  # pixels: the axis from LEFT to RIGHT, the first row's upper edge, a row's height
WIDTH = 720
COLOURS = {"forward": "#08519c", "backward": "#d62728"}
TICKS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
AXIS = "#555555"


def svg(record: Record) -> str:
    """Returns the picture. Raises ValueError if the run has no cell with both flexattn and a peer."""
    rows = _rows(record)
    if not rows:
        raise ValueError("the result has no cell in which both flexattn and a peer were measured")
    speeds = [s.speed for _, cells in rows for s in cells]
    low, high = min(*speeds, 1.0) / 1.03, max(*speeds, 1.0) * 1.03

    def x(speed: float) -> float:
        return LEFT + (RIGHT - LEFT) * math.log(speed / low) / math.log(high / low)

    bottom = TOP + ROW * len(rows)
    parts = [*_legend(), f'<rect x="{LEFT}" y="{TOP}" width="{x(1.0) - LEFT:.1f}" height="{ROW * len(rows)}" fill="#f0f0f0"/>']
    for tick in (t for t in TICKS if low <= t <= high):
        parts.append(line(x(tick), TOP, x(tick), bottom, AXIS if tick == 1 else "#dddddd"))
        parts.append(text(x(tick), bottom + 16, f"{tick:g}", anchor="middle"))
    parts.append(text(LEFT, bottom + 34, "another is faster", colour=GRAY))
    parts.append(text((LEFT + RIGHT) / 2, bottom + 34, "speed, the fastest other's being 1", anchor="middle"))
    parts.append(text(RIGHT, bottom + 34, "flexattn is faster", anchor="end", colour=GRAY))
    for n, (name, cells) in enumerate(rows):
        middle = TOP + ROW * n + ROW / 2
        parts.append(text(LEFT - 8, middle + 4, name, anchor="end"))
        parts += [_dot(x(s.speed), middle, s.direction) for s in cells]
    ahead = sum(speed > 1 for speed in speeds)
    device = record.device["name"]
    title = f"Speed of flexattn beside the fastest other, {device}: faster in {ahead} of {len(speeds)} cells"
    return document(title, WIDTH, bottom + 46, parts)


def _rows(record: Record) -> list[tuple[str, list[Standing]]]:
    """Head dims and masks of the sweep, each with all its lengths, then the other workloads."""
    every = standings(record)
    rows = []
    for head_dim, mask in dict.fromkeys((head_dim, mask) for _, head_dim, mask in sweep_panels(record)):
        names = {w.name for w in panel(record, head_dim, mask)}
        lengths = [w.seqlen_q for w in panel(record, head_dim, mask)]
        title = (
            f"Head dim {head_dim}, {'causal' if mask == 'causal' else 'no mask'}, {short(min(lengths))} to {short(max(lengths))}"
        )
        rows.append((title, [s for s in every if s.workload in names]))
    others = dict.fromkeys(s.workload for s in every if record.workloads[s.workload].group != "sweep")
    rows += [(title_of(record.workloads[name]), [s for s in every if s.workload == name]) for name in others]
    return [(title, cells) for title, cells in rows if cells]


def _legend() -> list[str]:
    forward, backward = LEFT + 6, LEFT + 96
    return [
        _dot(forward, 45, "forward"),
        text(forward + 10, 49, "forward"),
        _dot(backward, 45, "backward"),
        text(backward + 10, 49, "backward"),
    ]


def _dot(x: float, y: float, direction: str) -> str:
    """Returns a dot for a forward and a ring for a backward, which differ without colour too."""
    colour = COLOURS.get(direction, "#000000")
    fill = "none" if direction == "backward" else colour
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{fill}" fill-opacity="0.7" stroke="{colour}" stroke-width="1.5"/>'
