"""Tiles and rules for older GPUs that a result of `python -m flexattn.bench.older_tiles` supports."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from flexattn.bench.tables import geometric_mean
from flexattn.bench.tiles import parse_tile

if TYPE_CHECKING:
    from flexattn.kernels_triton.common.tiles import Row

Rows = Sequence[Mapping[str, Any]]

TIE = 0.03
"""A tile replaces another one if it is faster by more than this share."""


def scores(rows: Rows, kernel: str, head_dim: int, cells: Sequence[str]) -> dict[str, float]:
    """Returns the mean of each tile's times, as multiples of the fastest; of tiles that were timed in all cells.

    cells: for example "causal s4096@80", a mask and a key of the times.
    """
    times: dict[str, dict[str, float]] = {}
    for row in rows:
        if (row["kernel"], row.get("head_dim")) == (kernel, head_dim):
            own = {f"{row['mask']} {key}": ms for key, ms in row.get("ms", {}).items()}
            times.setdefault(row["tile"], {}).update({cell: own[cell] for cell in cells if cell in own})
    whole = {tile: own for tile, own in times.items() if len(own) == len(cells)}
    best = {cell: min(own[cell] for own in whole.values()) for cell in cells} if whole else {}
    return {tile: geometric_mean([own[cell] / best[cell] for cell in cells]) for tile, own in whole.items()}


def fastest(found: Mapping[str, float], committed: str | None) -> str | None:
    """Returns the fastest tile; `committed` if none is faster by more than TIE."""
    if not found:
        return committed
    best = min(found, key=lambda tile: found[tile])
    is_tie = committed is not None and found.get(committed, math.inf) <= found[best] * (1 + TIE)
    return committed if is_tie else best


class Chosen(NamedTuple):
    """Tiles by the fields of `tiles.Row`; None if nothing was measured, or if `tile` is as fast."""

    tile: str | None
    open: str | None
    short: str | None
    loaded: str | None


def choose(rows: Rows, kernel: str, head_dim: int, sm: int) -> Chosen:
    """Returns the fastest tiles for a kernel and head dim on a GPU with the occupancy of `sm`, 80 or 89."""
    lengths = sorted({key.partition("@")[0] for row in rows for key in row.get("ms", {})}, key=lambda text: int(text[1:]))
    capability = 86 if sm == 89 else sm
    own = {
        row["mask"]: row["tile"]
        for row in rows
        if (row["kernel"], row.get("head_dim")) == (kernel, head_dim) and capability in row["committed"]
    }

    def best(name: str, mask: str, lengths: Sequence[str], other: str | None) -> str | None:
        return fastest(scores(rows, name, head_dim, [f"{mask} {length}@{sm}" for length in lengths]), other)

    tile = best(kernel, "causal", lengths[-1:], own.get("causal"))
    open_tile, short = best(kernel, "full", lengths, tile), best(kernel, "causal", lengths[:1], tile)
    loaded = best(f"{kernel}+bias", "full", lengths, None)
    return Chosen(tile, None if open_tile == tile else open_tile, None if short == tile else short, loaded)


def choose_few(rows: Rows, head_dim: int, sm: int) -> str | None:
    """Returns the fastest tile for few queries. It has two stages or more, because its row also serves head dims in two parts."""
    cells = [f"full s{length}@{sm}" for length in (1024, 4096)]
    return fastest({tile: x for tile, x in scores(rows, "decode", head_dim, cells).items() if not tile.endswith("x1")}, None)


def summary(rows: Rows) -> list[str]:
    """Returns a line for each cell and occupancy: the fastest tile, and the time of the committed one beside its time."""
    lines = []
    cells: dict[tuple[Any, ...], list[tuple[float, Mapping[str, Any]]]] = {}
    for row in rows:
        for key, ms in row.get("ms", {}).items():
            cells.setdefault((row["kernel"], row["head_dim"], row["mask"], key), []).append((ms, row))
    for cell, found in cells.items():
        found.sort(key=lambda pair: pair[0])
        sm = 80 if cell[3].endswith("@80") else 86
        own = next((ms for ms, row in found if sm in row["committed"]), None)
        gain = "" if own is None else f" {own / found[0][0]:.2f}x"
        lines.append(f"{cell[0]} d{cell[1]} {cell[2]} {cell[3]} {found[0][1]['tile']} {found[0][0]:.3f}{gain}")
    return lines


CAPABILITIES = {80: "80", 89: "(86, 89, 120)"}
"""The devices whose rules a time with an occupancy supports."""


def emit_rules(rows: Rows, source: str) -> list[str]:
    """Returns the rules of `crossovers.py` for calls that FlashAttention-2 runs faster than the chosen tiles."""
    lines = []
    flash = [row for row in rows if row["kernel"] == "flash forward" and "backward_ms" in row]
    for sm, head_dim, mask, direction in itertools.product(
        CAPABILITIES, (32, 64, 96, 128, 192, 256), MASKS, ("forward", "backward")
    ):
        ratios = []
        for row in flash:
            if (row["head_dim"], row["mask"]) == (head_dim, mask):
                key = f"s{row['length']}@{sm}"
                parts = ("forward",) if direction == "forward" else ("dq", "dkdv")
                times = [_chosen_time(rows, part, head_dim, mask, key) for part in parts]
                if None not in times:
                    ratios.append(sum(filter(None, times)) / row[f"{direction}_ms"])
        gain = geometric_mean(ratios) if ratios else 0
        if gain > 1 + TIE:
            mask_word = "open" if mask == "full" else mask
            call = f'direction="{direction}", capability={CAPABILITIES[sm]}, head_dim_qk={head_dim}, head_dim_v={head_dim}'
            lines.append(f'Rule(use="sdpa", {call}, mask="{mask_word}", **_OLDER, gain={gain:.2f}, source="{source}"),')
    return lines


def _chosen_time(rows: Rows, kernel: str, head_dim: int, mask: str, key: str) -> float | None:
    """Returns the time of the tile that `choose` selects for a cell."""
    sm = int(key.partition("@")[2])
    chosen = choose(rows, kernel, head_dim, sm)
    is_short = key.startswith("s1024")
    tile = chosen.open if mask == "full" and chosen.open else chosen.short if is_short and chosen.short else chosen.tile
    cell = (kernel, head_dim, mask, tile)
    times = (row["ms"].get(key) for row in rows if "ms" in row and tuple(row.get(n) for n in _CELL) == cell)
    return next((float(ms) for ms in times if ms is not None), None)


_CELL = ("kernel", "head_dim", "mask", "tile")
MASKS = ("causal", "full")


def emit_rows(rows: Rows) -> list[str]:
    """Returns the rows of `common/tiles.py` for 8.0 and 8.6 with the chosen tiles, ready to paste; other rows stay as they are."""
    from flexattn.bench.rows import _row_code
    from flexattn.kernels_triton.common.tiles import DKDV, DQ, FORWARD

    lines = []
    for (kernel, table), sm in itertools.product((("forward", FORWARD), ("dq", DQ), ("dkdv", DKDV)), (80, 89)):
        capability = 86 if sm == 89 else sm
        lines.append(f"{kernel.upper()} ({capability}, 2):")
        lines += [f"        {_row_code(row)}," for row in _with_chosen(table[capability, 2], rows, kernel, sm)]
    return lines


# The head dim that decides a row of `tiles.py`, by the sum of head dims that the row serves
_HEAD_DIM_OF_ROW = {128: 64, 192: 96, 256: 128, 384: 192, 512: 256}


def _with_chosen(committed: Sequence[Row], rows: Rows, kernel: str, sm: int) -> list[Row]:
    """Returns the rows of a table with the chosen tiles of the head dims that were measured; equal neighbours are one row."""
    found: list[Row] = []
    for width in sorted({*_HEAD_DIM_OF_ROW, 320, *(row.head_dims for row in committed)}):
        row = next(row for row in committed if width <= row.head_dims)._replace(head_dims=width)
        chosen = choose(rows, kernel, _HEAD_DIM_OF_ROW[width], sm) if width in _HEAD_DIM_OF_ROW else None
        if chosen is not None and chosen.tile is not None:
            tiles: dict[str, Any] = {name: tile and parse_tile(tile) for name, tile in chosen._asdict().items()}
            few = choose_few(rows, _HEAD_DIM_OF_ROW[width], sm) if kernel == "forward" else None
            row = row._replace(**tiles | {"loaded": tiles["loaded"] or row.loaded, "few": few and parse_tile(few)})
        if found and found[-1][1:] == row[1:]:
            found.pop()
        found.append(row)
    return found
