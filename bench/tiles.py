"""Tiles by name and by option, the space that a sweep explores, and candidates for older GPUs."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import flexattn
from flexattn.bench.implementations import (
    KERNELS,
    MMA_CAPABILITIES,
    Implementation,
    Prepared,
    committed_launchers,
    committed_tile,
    one_kernel,
)
from flexattn.bench.inputs import Tensors
from flexattn.bench.shapes import OLDER, Workload

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
"""The tiles that `bench --as sm_80 --portable-tiles` times beside the committed ones, by kernel and head dim."""
PORTABLE_TILE = "flexattn portable tile"
SWEPT_SEQLENS = (1024, 4096)  # a candidate is timed at these lengths


def is_swept(workload: Workload) -> bool:
    """Returns whether candidates of tiles for older GPUs are timed on a workload without a bias."""
    is_plain = workload.group in ("sweep", OLDER) and workload.window_size == (-1, -1)
    return is_plain and workload.seqlen_q in SWEPT_SEQLENS


@functools.cache
def older_tiles(kernel: str, workload: Workload) -> list[str]:
    """Returns the names of the committed tiles and the candidates of a portable kernel on a workload, for GPUs with mma.sync."""
    is_decode, has_bias = workload.seqlen_q == 1, workload.score == "relative_bias"
    if not (is_decode or has_bias or is_swept(workload)):
        return []
    committed = [tile_name(committed_tile(kernel, workload, capability)) for capability in MMA_CAPABILITIES]
    width = next(width for width in (64, 128, 256) if workload.head_dim_qk <= width)
    space = OLDER_SPACE["decode" if is_decode else f"{kernel}+bias" if has_bias else kernel][width]
    return list(dict.fromkeys([*committed, *space.split()]))


def tile_implementations(workloads: Sequence[Workload]) -> list[Implementation]:
    """Returns each tile of `older_tiles` as an implementation, whose time is that of the kernel alone."""
    pairs = ((kernel, tile) for kernel, w in itertools.product(KERNELS, workloads) for tile in older_tiles(kernel, w))
    return [_implementation(kernel, tile) for kernel, tile in dict.fromkeys(pairs)]


def _implementation(kernel: str, tile: str) -> Implementation:
    def prepare(workload: Workload, tensors: Tensors, direction: str) -> Prepared:
        return one_kernel(kernel, committed_launchers({kernel: parse_tile(tile)}), workload, tensors, direction)

    def serves(workload: Workload, direction: str) -> bool:
        return direction == KERNELS[kernel][0] and tile in older_tiles(kernel, workload)

    name = f"{PORTABLE_TILE} {kernel} {tile}"
    return Implementation(name, flexattn.__version__, prepare, compiles=True, serves=serves)


def is_candidate(implementation: str) -> bool:
    """Returns whether an implementation is a candidate of a tile, of the portable kernels or those for mma.sync."""
    return implementation.startswith("flexattn ") and " tile " in implementation


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
