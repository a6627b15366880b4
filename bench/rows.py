"""Rows that a result file supports: tiles for `kernels_triton/common/tiles.py`, and rules for backends in `crossovers.py`.

Rules among kernel families are written by hand, because "flexattn triton" may be any family, except for the families for mma.sync.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any, NamedTuple

from flexattn.bench import mma
from flexattn.bench.counts import band_of
from flexattn.bench.implementations import CUDNN, KERNELS, MMA_CAPABILITIES, PORTABLE, TRITON, committed_tile
from flexattn.bench.record import Record
from flexattn.bench.shapes import Workload
from flexattn.bench.tables import is_ours, standings
from flexattn.bench.tiles import parse_tile, tile_name

if TYPE_CHECKING:
    from flexattn.kernels_triton.common.crossovers import Rule
    from flexattn.kernels_triton.common.tiles import Row
    from flexattn.kernels_triton.runtime.device import Tile

KINDS = {("", "vanilla"): "plain", ("relative_bias", "vanilla"): "bias", ("", "learnable"): "sink"}  # heuristics.KINDS
PORTABLE_TILE = "flexattn portable tile"  # prefix of such a kernel and its tile in runs beside other implementations
TIE = 0.02  # share of a time by which runs of one tile differ on one device; within it nothing is replaced
RESOLUTION_US = 1.0  # smallest difference; events have "a resolution of around 0.5 microseconds" (CUDA Runtime API)


class Swept(NamedTuple):
    """Measurements in one result file of one kernel's tiles, at one width and in one slot of a row."""

    kernel: str
    capability: int
    element_size: int
    head_dims: int  # d_qk + d_v, as in the tiles' rows
    slot: str  # field of the row: "tile", "loaded", "open", "short" or "few"
    committed: Tile
    times: Mapping[Tile, float]  # us, the geometric mean over the slot's workloads that all tiles were measured on

    @property
    def best(self) -> Tile:
        """The fastest tile, or the committed one if no other is faster by more than TIE."""
        fastest = min(self.times, key=lambda tile: self.times[tile])
        known = self.times.get(self.committed)
        return self.committed if known is not None and known <= self.times[fastest] * (1 + TIE) else fastest

    @property
    def why(self) -> str:
        us, committed_us = self.times[self.best], self.times.get(self.committed)
        if self.best == self.committed:
            others = [time for tile, time in self.times.items() if tile != self.best]
            return f"{self.slot} as committed, {us:.0f} us" + (f", the next {min(others):.0f}" if others else "")
        if committed_us is None:
            return f"{self.slot} {us:.0f} us; the committed {tile_name(self.committed)} was not measured beside it"
        return f"{self.slot} {us:.0f} us, {committed_us / us - 1:.0%} faster than the committed {tile_name(self.committed)}"


def slot_of(workload: Workload) -> str:
    """Returns the field of a row that has the workload's tile."""
    from flexattn.kernels_triton.common.tiles import SHORT

    band = band_of(workload)
    if workload.seqlen_q == 1:
        return "few"
    if workload.score == "relative_bias":
        return "loaded"
    if band.left is None and band.right is None:
        return "open"
    return "short" if max(workload.seqlen_q, workload.seqlen_kv) <= SHORT else "tile"


def swept(record: Record) -> list[Swept]:
    """Returns each kernel, width and slot of a sweep's record; empty for another record."""
    import torch

    from flexattn.kernels_triton.common.tiles import split_head_dim

    times: dict[tuple[str, int, int, str], dict[Tile, dict[str, float]]] = {}
    for row in record.rows:
        name = row.implementation.removeprefix(f"{PORTABLE_TILE} ").removesuffix(" committed").removesuffix(" (this)")
        kernel, _, tile = name.partition(" ")
        if kernel in KERNELS and row.us is not None:
            w = record.workloads[row.workload]
            width = sum(split_head_dim(w.head_dim_qk)) + sum(split_head_dim(w.head_dim_v))
            key = kernel, getattr(torch, w.dtype).itemsize, width, slot_of(w)
            times.setdefault(key, {}).setdefault(parse_tile(tile), {})[row.workload] = row.us
    capability = mma.capability_in(record)
    found = []
    for (kernel, element_size, width, slot), tiles in times.items():
        common = set.intersection(*(set(workloads) for workloads in tiles.values()))
        if common:
            means = {tile: geometric_mean(workloads[name] for name in common) for tile, workloads in tiles.items()}
            committed = committed_tile(kernel, record.workloads[min(common)], capability)
            found.append(Swept(kernel, capability, element_size, width, slot, committed, means))
    return found


def tile_rows(name: str, record: Record) -> list[str]:
    """Returns a line for each kernel and width of a sweep: the row of `tiles.py`, and the times behind each of its tiles."""
    from flexattn.kernels_triton.common.tiles import DKDV, DQ, FORWARD

    tables = {"forward": FORWARD, "dq": DQ, "dkdv": DKDV}
    rows: dict[tuple[str, int, int, int], list[Swept]] = {}
    for found in swept(record):
        rows.setdefault(found[:4], []).append(found)
    lines = []
    for (kernel, capability, element_size, head_dims), slots in rows.items():
        newest = max(sm for sm, size in tables[kernel] if size == element_size and sm <= capability)
        row = next(row for row in tables[kernel][newest, element_size] if head_dims <= row.head_dims)
        better: dict[str, Any] = {found.slot: found.best for found in slots if found.best != found.committed}
        row = row._replace(**better)
        why = "; ".join(found.why for found in slots)
        lines.append(f"{kernel.upper()}[{newest}, {element_size}]: {_row_code(row)},  # {why} ({name})")
    return lines


def _row_code(row: Row) -> str:
    fields = [str(row.head_dims), _tile_code(row.tile), _tile_code(row.loaded)]
    fields += [f"{name}={_tile_code(tile)}" for name in ("open", "short", "few") if (tile := getattr(row, name)) is not None]
    return f"Row({', '.join(fields)})"


def _tile_code(tile: Tile) -> str:
    others = ", apart=True" if tile.apart else ""
    others += f", registers={tile.registers}" if tile.registers else ""
    return f"Tile({tile.block_m}, {tile.block_n}, {tile.num_warps}, {tile.num_stages}{others})"


def contradictions(name: str, record: Record) -> list[str]:
    """Returns the committed tiles that a record contradicts: another one is faster by more than TIE, or they were not measured."""
    return [f"{name}: {found.kernel} {found.head_dims} {found.why}" for found in swept(record) if found.best != found.committed]


def _rule_code(rule: Rule) -> str:
    given = {field.name: getattr(rule, field.name) for field in dataclasses.fields(rule)}
    columns = (f"{name}={value!r}" for name, value in given.items() if value not in ("", (), None))
    return f"Rule({', '.join(columns)}),".replace("'", '"')


def faster_rows(name: str, record: Record) -> list[Rule]:
    """Returns the calls for which cuDNN is preferred: one rule for each kind of plain call and run of adjacent length classes.

    A class has a rule if cuDNN was faster by more than TIE in a cell, and loses less in its worst cell than Triton in its own.
    Triton comes first by default, so other classes have no rule.
    """
    from flexattn.kernels_triton.common.crossovers import Rule

    ratios: dict[tuple[str, str, tuple[int, int], str, str, str], dict[int, list[float]]] = {}
    for s in standings(record, CUDNN, TRITON):
        w = record.workloads[s.workload]
        kind = KINDS.get((w.score, w.softmax_type))
        if kind is None or s.direction == "both":
            continue
        if w.seqlen_q not in (1, w.seqlen_kv):  # a row has one length
            continue
        mask = "windowed" if w.window_size != (-1, -1) else "causal" if w.is_causal else "open"
        layout = "packed" if w.is_ragged else "decode" if w.seqlen_q == 1 else "dense"
        key = s.direction, w.dtype, (w.head_dim_qk, w.head_dim_v), mask, layout, kind
        ratios.setdefault(key, {}).setdefault(1 << (w.seqlen_kv - 1).bit_length(), []).append(1 / s.speed)
    found = []
    for (direction, dtype, head_dims, mask, layout, kind), classes in ratios.items():
        runs: list[list[int]] = [[]]
        for length in sorted(classes):
            triton_loses, cudnn_loses = max(classes[length]), max(1 / ratio for ratio in classes[length])
            if triton_loses > max(1 + TIE, cudnn_loses):
                runs[-1].append(length)
            else:
                runs.append([])
        for run in filter(None, runs):
            factor = round(geometric_mean(ratio for length in run for ratio in classes[length]), 2)
            rule = Rule(
                use="cudnn",
                direction=direction,
                capability=mma.capability_in(record),
                dtype=dtype,
                head_dim_qk=head_dims[0],
                head_dim_v=head_dims[1],
                mask=mask,
                layout=layout,
                kind=kind,
                tokens=(run[0], run[-1]),
                gain=factor,
                source=name,
            )
            found.append(rule)
    return found


def emit(records: Mapping[str, Record]) -> str:
    """Returns the rows as source lines. Raises ValueError if a file supports none."""
    tiles: list[str] = []
    preferences: list[str] = []
    for name, record in records.items():
        lines, rules = tile_rows(name, record), [_rule_code(rule) for rule in faster_rows(name, record)]
        if mma.MMA in record.implementations():
            lines += mma.tile_lines(record)
            rules += [_rule_code(rule) for rule in (*mma.rules(name, record), *mma.sdpa_rules(name, record))]
        if mma.capability_in(record) in MMA_CAPABILITIES:
            rules += [_rule_code(rule) for rule in mma.sdpa_rules(name, record, PORTABLE, "sdpa")]
        if not lines and not rules:
            ours = [n for n in record.implementations() if is_ours(n)]
            raise ValueError(
                f"{name} supports no row: it has neither the tiles of a sweep (`play --sweep --out`) nor cells in which {CUDNN} "
                f"was faster than {TRITON}; its implementations of flexattn: {', '.join(ours) or 'none'}"
            )
        tiles += lines
        preferences += rules
    text = ["kernels_triton/common/tiles.py:", *tiles] if tiles else []
    return "\n".join([*text, *(["kernels_triton/common/crossovers.py:", *preferences] if preferences else [])])
