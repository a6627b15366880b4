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


def tile_name(tile: Tile) -> str:
    """128x64x8x3: block_m, block_n, warps, stages; then "apart", and "r128" for at most 128 registers."""
    sizes = (tile.block_m, tile.block_n, tile.num_warps, tile.num_stages)
    others = ("apart" if tile.apart else "", f"r{tile.registers}" if tile.registers else "")
    return "x".join(filter(None, (*map(str, sizes), *others)))


def parse_tile(name: str) -> Tile:
    """The inverse of `tile_name`. Raises ValueError."""
    from flexattn.kernels_triton.runtime.device import Tile

    fields = name.split("x")
    try:
        block_m, block_n, num_warps, num_stages = map(int, fields[:4])
        tile = Tile(block_m, block_n, num_warps, num_stages)
        for field in fields[4:]:
            tile = tile._replace(registers=int(field[1:])) if field[:1] == "r" else tile._replace(**{field: True})
        return tile
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
