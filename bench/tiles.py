"""Tiles by name and by option, and the space that a sweep explores."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flexattn.kernels_triton.runtime.device import Tile

FIELDS = ("block_m", "block_n", "num_warps", "num_stages", "apart")
SPACE: dict[str, Mapping[str, Sequence[int]]] = {
    "forward": {"block_m": (64, 128), "block_n": (32, 64, 128), "num_warps": (4, 8), "num_stages": (2, 3, 4)},
    "dq": {"block_m": (64, 128), "block_n": (32, 64, 128), "num_warps": (4, 8), "num_stages": (2, 3)},
    "dkdv": {"block_m": (32, 64), "block_n": (64, 128), "num_warps": (4, 8), "num_stages": (1, 2, 3), "apart": (0, 1)},
}

_WIDE_FORWARD = "128x64x4x2 128x64x8x2 128x64x8x3 128x32x4x2 128x32x8x2 64x64x4x1 64x64x4x2 64x64x4x3 64x32x4x2 64x32x4x3"
OLDER_SPACE: dict[str, dict[int, str]] = {
    "forward": {
        64: "128x64x4x2 128x64x4x3 128x64x8x2 128x32x4x2 128x32x4x3 64x64x4x2 64x64x4x3 128x128x4x2 128x128x8x2",
        128: _WIDE_FORWARD,
        256: "128x64x8x1 128x64x8x2 128x32x8x2 64x64x4x1 64x64x4x2 64x64x8x2 64x32x4x1 64x32x4x2 64x16x4x2",
    },
    "dq": {
        64: "128x64x4x2 128x64x4x1 128x64x8x2 64x64x4x2 64x64x4x1 64x64x4x3 128x32x4x2 128x32x4x3",
        128: "64x64x4x2 64x64x4x1 64x32x4x2 64x32x4x3 128x64x8x2 128x64x8x1 128x32x8x2 64x64x8x2",
        256: "32x32x4x2 32x32x4x1 64x32x4x1 64x32x4x2 64x64x4x1 64x64x8x1 128x32x8x1 64x32x8x2 64x16x4x2",
    },
    "dkdv": {
        64: "32x128x4x2 32x128x4x3 32x64x4x2 64x64x4x2 64x64x4x1 64x128x8x2 64x128x4x1 32x64x4x3 32x128x8x2",
        128: "64x64x4x2 64x64x4x1 32x64x4x2 32x64x4x1 64x128x8x2 64x128x8x1 32x128x8x2 16x64x4x2 64x64x4x2xapart",
        256: "64x64x4x1xapart 32x64x4x1 32x64x4x1xapart 32x64x4x2xapart 16x64x4x1 16x64x4x2 32x64x8x1 64x128x8x1xapart 32x32x4x1",
    },
    "one_grid": {
        64: "64x64x4x2 64x64x4x1 32x64x4x2",
        128: "64x64x4x2 64x64x4x1 32x64x4x2",
        256: "32x32x4x1 32x64x4x1 64x64x4x1",
    },
    "decode": {
        64: "16x64x4x2 16x64x4x3 16x128x4x2 16x32x4x3 32x64x4x2 64x64x4x2",
        128: "16x64x4x2 16x64x4x3 16x128x4x2 16x32x4x3 32x64x4x2 64x64x4x2",
        256: "16x64x4x1 16x64x4x2 16x32x4x2 16x32x4x3 32x32x4x2 64x32x4x2",
    },
    "forward+bias": {
        64: "64x64x4x2 128x64x4x2 128x64x8x2 64x32x4x2 64x64x4x1 128x32x4x2",
        128: "64x64x4x2 64x64x8x2 64x32x4x2 64x32x8x2 128x64x8x2 64x64x4x1 128x32x8x2",
        256: "32x32x8x1 64x32x8x2 64x32x4x1 64x32x4x2 64x16x4x2 32x32x4x2 64x64x8x1",
    },
    "dq+bias": {
        64: "64x32x4x2 64x64x4x2 64x64x4x1 128x32x4x2 128x64x8x2 64x32x4x1",
        128: "64x32x8x2 32x32x8x1 64x32x4x2 64x64x4x1 64x64x4x2 64x64x8x2 32x32x4x2",
        256: "32x32x8x1 32x32x4x1 32x32x4x2 64x16x4x2 64x32x4x1 64x32x8x1",
    },
    "dkdv+bias": {
        64: "32x64x4x2 64x64x4x2 64x64x4x1 32x128x4x2 32x128x8x2 32x64x4x1",
        128: "32x64x8x1 32x32x8x1 32x64x4x2 32x64x4x1 64x64x4x1 32x128x8x2 32x64x4x2xapart",
        256: "16x32x8x1 32x32x4x1 32x64x4x1xapart 16x64x4x1 32x32x8x1 32x64x8x1",
    },
}
"""The tiles that `older_tiles` times, by kernel and head dim; `tile_name` reads them."""


def tile_name(tile: Tile) -> str:
    """128x64x8x3: block_m, block_n, warps, stages; a flag follows by its name."""
    return "x".join(name if value is True else str(value) for name, value in tile._asdict().items() if value is not False)


def parse_tile(name: str) -> Tile:
    """The inverse of `tile_name`. Raises ValueError."""
    from flexattn.kernels_triton.runtime.device import Tile

    fields = name.split("x")
    try:
        block_m, block_n, num_warps, num_stages = map(int, fields[:4])
        return Tile(block_m, block_n, num_warps, num_stages, **dict.fromkeys(fields[4:], True))
    except (TypeError, ValueError) as e:
        raise ValueError(f"{name!r} is no tile; accepted: block_m x block_n x warps x stages, as 128x64x8x3") from e


def with_options(tile: Tile, options: Mapping[str, int | None]) -> Tile:
    """The tile with the fields that `options` gives. Raises ValueError for block sizes that are no power of two of at least 16."""
    given = {name: value for name, value in options.items() if value is not None}
    for name in ("block_m", "block_n"):
        size = given.get(name, 16)
        if size < 16 or size & (size - 1):
            raise ValueError(f"--{name.replace('_', '-')} is {size}; accepted: powers of two from 16 on")
    if given.get("num_warps", 4) not in (1, 2, 4, 8, 16):
        raise ValueError(f"--num-warps is {given['num_warps']}; accepted: 1, 2, 4, 8, 16")
    if given.get("num_stages", 1) < 1:
        raise ValueError(f"--num-stages is {given['num_stages']}; accepted: 1 or more")
    return type(tile)(**tile._asdict() | {name: bool(value) if name == "apart" else value for name, value in given.items()})


def candidates(kernel: str, committed: Tile, options: Mapping[str, Sequence[int] | None]) -> list[Tile]:
    """The committed tile first, then every tile of the kernel's SPACE, with the values that `options` gives in place of its own."""
    space = {name: options.get(name) or values for name, values in SPACE[kernel].items()}
    combinations = (dict(zip(space, values, strict=True)) for values in itertools.product(*space.values()))
    return list(dict.fromkeys([committed, *(with_options(committed, combination) for combination in combinations)]))
