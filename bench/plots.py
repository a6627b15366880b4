"""PNG plots of a record: rates against the length, rates of the other groups, and time and memory at fixed tokens."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexattn.bench.record import Record, Row
from flexattn.bench.shapes import Workload
from flexattn.bench.tables import panel, sweep_panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    "flexattn triton": "#d62728",
    "flexattn portable": "#e7969c",
    "flexattn cudnn": "#ff7f0e",
    "flexattn score_mod": "#8c1c13",
    "flexattn eager": "#e377c2",
    "SDPA flash": "#1f77b4",
    "SDPA efficient": "#17becf",
    "SDPA cuDNN": "#2ca02c",
    "SDPA math": "#7f7f7f",
    "varlen_attn": "#393b79",
    "FlexAttention": "#9467bd",
    "cuDNN frontend": "#637939",
    "flash-attn 2": "#aec7e8",
    "flash-attn 3": "#6baed6",
    "flash-attn 4": "#08519c",
    "materialised": "#bdbdbd",
}
"""Color of each implementation, the same in every plot of every run; others are drawn black."""

MARKERS = {"flexattn triton": "o", "flexattn portable": "v", "flexattn cudnn": "s", "flexattn score_mod": "D"}
DPI = 110


def figures(record: Record) -> Iterator[tuple[str, Figure]]:
    """(name, figure) of every plot that the record has data for."""
    for direction in dict.fromkeys(direction for _, direction in record.cells()):
        panels = [(d, mask) for of_direction, d, mask in sweep_panels(record) if of_direction == direction]
        if panels and any(row.tflops is not None for row in record.rows if record.workloads[row.workload].group == "sweep"):
            yield f"sweep_{direction}", _sweep(record, direction, panels)
    for group in dict.fromkeys(w.group for w in record.workloads.values()):
        if group in ("sweep", "scaling", "memory"):
            continue
        names = [w.name for w in record.workloads.values() if w.group == group]
        if any(row.tflops is not None for row in record.rows if row.workload in names):
            yield group, _group(record, group, names)
    for group in ("scaling", "memory"):
        shapes = [w for w in record.workloads.values() if w.group == group]
        if len(shapes) > 1:
            yield group, _scaling(record, group, shapes)


def _figure(rows: int, columns: int, width: float, height: float) -> tuple[Figure, list[list[Axes]]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", dpi=DPI)
    return figure, [list(row) for row in figure.subplots(rows, columns, squeeze=False)]


def _sweep(record: Record, direction: str, panels: Sequence[tuple[int, str]]) -> Figure:
    head_dims, masks = (list(dict.fromkeys(column)) for column in zip(*panels, strict=True))
    figure, axes = _figure(len(masks), len(head_dims), 4.2 * len(head_dims), 3.4 * len(masks) + 0.6)
    for row, mask in zip(axes, masks, strict=True):
        for ax, head_dim in zip(row, head_dims, strict=True):
            shapes = panel(record, head_dim, mask)
            _lines(ax, record, shapes, direction, lambda r: r.tflops)
            ax.set_title(f"head dim {head_dim}, {mask}", fontsize=10)
            ax.set_ylabel("TFLOP/s")
            if record.ceilings:
                ceiling = record.ceilings["matmul_tflops"]
                ax.axhline(ceiling, color="#555555", linestyle=":", linewidth=1)
                ax.set_ylim(0, 1.05 * max([ceiling, *(r.tflops or 0.0 for r in record.rows)]))  # one scale for all panels
    dotted = "; dotted: a matrix product in the same run" if record.ceilings else ""
    _finish(figure, axes, f"{direction}, {_device(record)}, 16384 tokens, heads x head dim = 2048{dotted}")
    return figure


def _lines(ax: Axes, record: Record, shapes: Sequence[Workload], direction: str, of: Callable[[Row], float | None]) -> None:
    """One line for each implementation that has two figures or more, over the sequence length."""
    for name in record.implementations():
        points = [(w.seqlen_q, of(row)) for w in shapes if (row := record.of(w.name, direction).get(name)) is not None]
        points = [(x, y) for x, y in points if y is not None]
        if len(points) > 0:
            ax.plot(*zip(*points, strict=True), color=COLOURS.get(name, "black"), marker=MARKERS.get(name, "."), label=name)
    ax.set_xscale("log", base=2)
    seqlens = sorted({w.seqlen_q for w in shapes})
    ax.set_xticks(seqlens, [str(s) if s < 1024 else f"{s // 1024}k" for s in seqlens])
    ax.minorticks_off()
    ax.set_xlabel("sequence length, tokens")
    ax.grid(alpha=0.3)


def _group(record: Record, group: str, names: Sequence[str]) -> Figure:
    """Bars of a group's workloads, a row for each direction."""
    directions = [d for d in dict.fromkeys(d for _, d in record.cells()) if any(record.of(name, d) for name in names)]
    figure, axes = _figure(len(directions), 1, max(7.0, 2.2 * len(names)), 3.2 * len(directions) + 0.6)
    for [ax], direction in zip(axes, directions, strict=True):
        shown = [n for n in record.implementations() if any(_tflops(record, w, direction, n) is not None for w in names)]
        width = 0.8 / max(1, len(shown))
        for n, name in enumerate(shown):
            at = [x + (n - (len(shown) - 1) / 2) * width for x in range(len(names))]
            heights = [_tflops(record, w, direction, name) or 0.0 for w in names]
            ax.bar(at, heights, width, color=COLOURS.get(name, "black"), label=name)
        ax.set_xticks(range(len(names)), names, fontsize=8)
        ax.set_ylabel("TFLOP/s")
        ax.set_title(direction, fontsize=10)
        ax.grid(alpha=0.3, axis="y")
    _finish(figure, axes, f"{group}, {_device(record)}; no bar: refused, or not measured")
    return figure


def _tflops(record: Record, workload: str, direction: str, name: str) -> float | None:
    row = record.of(workload, direction).get(name)
    return None if row is None else row.tflops


def _scaling(record: Record, group: str, shapes: Sequence[Workload]) -> Figure:
    """Time (where there are times) and peak memory against the length."""
    directions = [d for d in dict.fromkeys(d for _, d in record.cells()) if any(record.of(w.name, d) for w in shapes)]
    measures: dict[str, tuple[str, Callable[[Row], float | None]]] = {
        "time": ("time of a call, ms", lambda r: None if r.us is None else r.us / 1e3),
        "memory": ("peak memory of a call, MiB", lambda r: r.peak_mib),
    }
    has = {
        name: any(of(r) is not None for r in record.rows if r.workload in {w.name for w in shapes})
        for name, (_, of) in measures.items()
    }
    chosen = [measures[name] for name in measures if has[name]]
    figure, axes = _figure(len(directions), len(chosen), 5.2 * len(chosen), 3.6 * len(directions) + 0.6)
    for row, direction in zip(axes, directions, strict=True):
        for ax, (label, of) in zip(row, chosen, strict=True):
            _lines(ax, record, shapes, direction, of)
            ax.set_yscale("log", base=2)
            ax.yaxis.set_major_formatter("{x:g}")
            ax.set_ylabel(label)
            ax.set_title(direction, fontsize=10)
    tokens = {sum(w.lengths_q) for w in shapes}
    fixed = f"{tokens.pop()} tokens at every length" if len(tokens) == 1 else "one sequence"
    _finish(figure, axes, f"{group}, {_device(record)}, {fixed}")
    return figure


def _device(record: Record) -> str:
    return f"{record.device['name']}, torch {record.versions['torch']}"


def _finish(figure: Figure, axes: Sequence[Sequence[Axes]], title: str) -> None:
    handles: Mapping[str, Any] = {
        label: handle for row in axes for ax in row for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)
    }
    figure.suptitle(title, fontsize=11)
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=min(6, max(1, len(handles))), fontsize=8)


def png(figure: Figure) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer)
    return buffer.getvalue()


def write(folder: Path, record: Record) -> list[Path]:
    """One PNG for each figure. Raises ModuleNotFoundError without matplotlib."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, figure in figures(record):
        path = folder / f"{name}.png"
        path.write_bytes(png(figure))
        written.append(path)
    return written
