"""Rows of data that a result file supports: tiles for `kernels_triton/configs.py`, preferences for `dispatch/heuristics.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from flexattn.bench.implementations import CUDNN, KERNELS, TRITON
from flexattn.bench.record import Record
from flexattn.bench.tables import geometric_mean, is_ours
from flexattn.bench.tiles import parse_tile, tile_name

if TYPE_CHECKING:
    from flexattn.kernels_triton.configs import Row, Tile

TIE = 0.02  # of the time: what runs of one tile differ by on one device; within it nothing is replaced


class Swept(NamedTuple):
    """What one result file says of one kernel's tiles at one width."""

    kernel: str
    capability: int
    element_size: int
    head_dims: int  # d_qk + d_v, as the tiles hold them
    times: Mapping[Tile, float]  # us, the geometric mean over the workloads where all were measured

    def best(self, committed: Tile) -> Tile:
        """The fastest tile; the committed one where nothing measured beside it is faster by more than TIE."""
        fastest = min(self.times, key=lambda tile: self.times[tile])
        known = self.times.get(committed)
        return committed if known is not None and known <= self.times[fastest] * (1 + TIE) else fastest


def swept(record: Record) -> list[Swept]:
    """Of a sweep's record, each kernel and width; nothing of another record."""
    import torch

    from flexattn.kernels_triton.configs import split_head_dim

    times: dict[tuple[str, int, int], dict[Tile, dict[str, float]]] = {}
    for row in record.rows:
        kernel, _, tile = row.implementation.removesuffix(" committed").removesuffix(" (this)").partition(" ")
        if kernel not in KERNELS or row.us is None:
            continue
        w = record.workloads[row.workload]
        width = sum(split_head_dim(w.head_dim_qk)) + sum(split_head_dim(w.head_dim_v))
        key = kernel, getattr(torch, w.dtype).itemsize, width
        times.setdefault(key, {}).setdefault(parse_tile(tile), {})[row.workload] = row.us
    major, minor = record.device.get("capability", (0, 0))
    found = []
    for (kernel, element_size, width), of_tiles in times.items():
        common = set.intersection(*(set(of_workload) for of_workload in of_tiles.values()))
        if common:
            means = {tile: geometric_mean(of_workload[name] for name in common) for tile, of_workload in of_tiles.items()}
            found.append(Swept(kernel, 10 * major + minor, element_size, width, means))
    return found


def committed_row(found: Swept) -> Row:
    """The row of the tables that serves what was swept."""
    from flexattn.kernels_triton.configs import DKDV, DQ, FORWARD

    table = {"forward": FORWARD, "dq": DQ, "dkdv": DKDV}[found.kernel]
    newest = max(sm for sm, size in table if size == found.element_size and sm <= found.capability)
    return next(row for row in table[newest, found.element_size] if found.head_dims <= row.head_dims)


def tile_rows(name: str, record: Record) -> list[str]:
    """A line for each kernel and width that was swept: the row of `configs.py`, and what speaks for it."""
    lines = []
    for found in swept(record):
        row = committed_row(found)
        best = found.best(row.tile)
        proposed = f"Row({row.head_dims}, {_code(best)}, {_code(row.loaded)}),"
        us, committed_us = found.times[best], found.times.get(row.tile)
        if best == row.tile:
            others = [time for tile, time in found.times.items() if tile != best]
            why = f"as committed; {us:.0f} us, the next {min(others):.0f}" if others else f"as committed; {us:.0f} us, alone"
        elif committed_us is None:
            why = f"{us:.0f} us; the committed {tile_name(row.tile)} was not measured beside it"
        else:
            why = f"{us:.0f} us, {committed_us / us - 1:.0%} faster than the committed {tile_name(row.tile)}"
        table = {"forward": "FORWARD", "dq": "DQ", "dkdv": "DKDV"}[found.kernel]
        lines.append(f"{table}[{found.capability}, {found.element_size}]: {proposed}  # {why} ({name})")
    return lines


def _code(tile: Tile) -> str:
    apart = ", apart=True" if tile.apart else ""
    return f"Tile({tile.block_m}, {tile.block_n}, {tile.num_warps}, {tile.num_stages}{apart})"


class Faster(NamedTuple):
    """cuDNN faster than Triton, as a row `Measured(...)` of `dispatch/heuristics.py` says it: its fields, in its order."""

    backend: str
    direction: str
    capability: tuple[int, int]
    dtypes: tuple[str, ...]
    head_dims: tuple[int, int]  # (d_qk, d_v)
    mask: str  # "full", "causal" or "window"
    layout: str  # "dense" or "packed"
    lengths: tuple[int, int]  # the smallest and the largest length class (the power of two that is at least the length)
    factor: float  # Triton's time over cuDNN's, geometric mean
    source: str

    def __str__(self) -> str:
        return f"Measured({', '.join(map(_quoted, self))}),"


def _quoted(value: object) -> str:
    return repr(value).replace("'", '"')


def faster_rows(name: str, record: Record) -> list[Faster]:
    """Where cuDNN was faster by more than TIE: one row for each kind of plain call and run of neighbouring length classes.

    Triton comes first by default, so a class where it was faster, or that was not measured, has no row.
    """
    ratios: dict[tuple[str, str, tuple[int, int], str, str], dict[int, list[float]]] = {}
    for workload, direction in record.cells():
        w, rows = record.workloads[workload], record.of(workload, direction)
        triton, cudnn = (rows[n].us if n in rows else None for n in (TRITON, CUDNN))
        if triton is None or cudnn is None or w.score or w.softmax_type != "vanilla" or direction == "both":
            continue
        mask = "window" if w.window_size != (-1, -1) else "causal" if w.is_causal else "full"
        key = direction, w.dtype, (w.head_dim_qk, w.head_dim_v), mask, "packed" if w.is_ragged else "dense"
        longest = max(w.seqlen_q, w.seqlen_kv)
        ratios.setdefault(key, {}).setdefault(1 << (longest - 1).bit_length(), []).append(triton / cudnn)
    major, minor = record.device.get("capability", (0, 0))
    found = []
    for (direction, dtype, head_dims, mask, layout), of_class in ratios.items():
        runs: list[list[int]] = [[]]
        for length in sorted(of_class):
            if geometric_mean(of_class[length]) > 1 + TIE:
                runs[-1].append(length)
            else:
                runs.append([])
        for run in filter(None, runs):
            factor = round(geometric_mean(ratio for length in run for ratio in of_class[length]), 2)
            kind = direction, (major, minor), (dtype,), head_dims, mask, layout
            found.append(Faster("cudnn", *kind, (run[0], run[-1]), factor, name))
    return found


def emit(records: Mapping[str, Record]) -> str:
    """The rows, as source lines. Raises ValueError where a file supports none."""
    tiles: list[str] = []
    preferences: list[str] = []
    for name, record in records.items():
        of_tiles, of_backends = tile_rows(name, record), [str(row) for row in faster_rows(name, record)]
        if not of_tiles and not of_backends:
            ours = [n for n in record.implementations() if is_ours(n)]
            raise ValueError(
                f"{name} supports no row: it has neither the tiles of a sweep (`play --sweep --out`) nor cells where {CUDNN} was "
                f"faster than {TRITON}; its implementations of flexattn: {', '.join(ours) or 'none'}"
            )
        tiles += of_tiles
        preferences += of_backends
    text = ["kernels_triton/configs.py:", *tiles] if tiles else []
    return "\n".join([*text, *(["dispatch/heuristics.py:", *preferences] if preferences else [])])


def contradictions(name: str, record: Record) -> Sequence[str]:
    """The committed rows that the record speaks against."""
    return [line for line in tile_rows(name, record) if "# as committed" not in line]
