"""Tile sizes as data, by compute capability, element size and head dim. There is no autotuner.

`crossovers.py` says which of several tiles a call takes, and for which calls a kernel is faster than others.

Tests compile rows ahead of time for their architecture and check shared memory, spills and matrix instructions. Every test run
compiles one row of each kernel, `pytest -m slow` the most important rows, and `-m exhaustive` all of them. The fp16 and bf16 rows
of 9.0 were the fastest of several on an NVIDIA H200 at 512 to 4096 tokens, causal and full (bench/results/tiles_*_h200.json). Most
of 8.0, 8.6 and 12.0 up to 512 were the fastest of several when an NVIDIA H200 ran the code of sm_80
(bench/results/older_tiles_h200.json). Other rows of these tables have not been timed. Figures of single tiles, in bench/results:

- the first FP8 row of 9.0 up to 256, the fastest of a few, causal at 8,192 tokens on an NVIDIA H200: fp8_tiles_h200.json
- `ONE_GRID` and `DQ_PART`: short_backwards_h100.json
- `PREPROCESS`: small_kernels_h200.json
- `Row.brief`, 5 to 25 % less time than the tiles before: biased_tiles_h200.json
- `Row.biased_mask`: biased_addresses_h200.json
- `Row.biased` and the other tiles for a bias: biased_tiles_again_h200.json
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from flexattn.kernels_triton.runtime.device import INTERPRETER, Tile


class QueryTile(Protocol):
    """A forward's tile, of any architecture."""

    @property
    def block_m(self) -> int: ...


def slots_of_heads(heads: int) -> int:
    """Returns the rows of a tile that a query of `heads` heads occupies: the next power of two."""
    return 1 << (heads - 1).bit_length()


def cdiv(x: int, y: int) -> int:
    """Returns x / y, rounded up; on the host, because triton.cdiv takes ten times as long."""
    return -(-x // y)


def split_head_dim(head_dim: int, smallest: int = 16) -> tuple[int, int]:
    """Returns the widths of the one or two parts of a head dim: powers of two of at least `smallest`; the second may be 0.

    96 = 64 + 32, 80 = 64 + 16, 192 = 128 + 64. If two parts would be as wide as the next power of two, there is one part of that
    width.
    """
    first = smallest
    while first * 2 <= head_dim:
        first *= 2
    if head_dim <= first:
        return first, 0
    second = smallest
    while second < head_dim - first:
        second *= 2
    return (2 * first, 0) if second == first else (first, second)


class Row(NamedTuple):
    head_dims: int  # largest d_qk + d_v, padded as in the tiles, that this row serves
    tile: Tile
    loaded: Tile  # with a bias or dropout, whose tiles are beside the scores in registers and shared memory
    # If measured to be faster, or if it avoids spills, and nothing is loaded:
    open: Tile | None = None  # for a band that is open on both sides: no block is cut, so larger blocks waste nothing
    short: Tile | None = None  # for at most SHORT queries and keys: two small programs hide each other's latency at their ends
    few: Tile | None = None  # for a forward of at most FEW queries: small programs hide each other's waits for keys
    half: Tile | None = None  # for a forward of at most HALF queries, and more than FEW: larger tiles would be half empty
    tiny: Tile | None = None  # if a bias or dropout is loaded, for at most TINY queries and keys, which one block holds
    biased: Tile | None = None  # for a `Loaded.bias_align` of 8: narrower loads need more registers
    biased_brief: Tile | None = None  # for one of 1 or more, and at most BRIEF queries and keys
    biased_band: Tile | None = None  # for a bias with a band
    biased_mask: Tile | None = None  # for a bias with a mask_mod
    brief: Tile | None = None  # for at most BRIEF queries and keys, if nothing is loaded
    # For a block mask whose blocks have at most 64 queries, if nothing is loaded. 8 warps share rows of 64 queries: a forward at
    # head dim 128 then takes 810 us on an H200 instead of 369 (bench/results/blocks_of_64_h200.json, script not kept).
    blocks: Tile | None = None


class Loaded(NamedTuple):
    """Tensors or random numbers beside the scores, as they select a tile. Fields are set if a bias is alone but for masks."""

    bias_align: int = 0  # elements, up to 8, that divide the bias's strides and keys; 0 with a band or a mask
    has_band: bool = False
    has_mask: bool = False  # a mask_mod, and no band


SHORT = 1024
"""A configuration is compiled for longer sequences, for others, for BRIEF ones, for FEW queries, and for TINY sequences with a
bias. No other length selects a kernel."""

BRIEF = 272
"""Most queries and most keys for `Row.brief` and `Row.biased_brief`."""

TINY = 64
"""Most queries and most keys for `Row.tiny`."""

SMALL_MEMORY = (86, 89, 120)
"""Capabilities with 99 KiB of shared memory, through which ALiBi's distances pass in a backward with larger tiles than 64x64."""

FEW = 16
"""Most queries for `Row.few`, those of all heads of a key head together: the rows of the smallest product."""

HALF = 64
"""Most queries for `Row.half`, counted in the same way."""


# By (compute capability, bytes of an element). A device uses the rows of the newest capability that is not newer than its own. A
# program has 99 KiB of shared memory on 8.6, 8.9 and 12.0, 163 on 8.0, and 227 on 9.0 and 10.0.
Table = dict[tuple[int, int], tuple[Row, ...]]

_SMALL = (Row(1088, Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),)

LATENT = 640
"""Selects the row of a forward that takes v from the tiles of k, for head dims up to 576: it needs memory for 640 columns."""

FORWARD: Table = {
    (INTERPRETER, 2): _SMALL,
    (INTERPRETER, 4): _SMALL,
    (80, 2): (
        Row(192, Tile(128, 64, 4, 2), Tile(64, 64, 4, 2), few=Tile(16, 64, 4, 3)),
        Row(256, Tile(128, 64, 4, 2), Tile(128, 32, 8, 2), few=Tile(16, 32, 4, 3)),
        Row(320, Tile(64, 64, 8, 2), Tile(64, 32, 8, 2), few=Tile(16, 32, 4, 3)),
        Row(384, Tile(64, 64, 4, 2), Tile(64, 16, 4, 2), few=Tile(16, 32, 4, 3)),
        Row(512, Tile(64, 64, 4, 1), Tile(32, 32, 4, 2), few=Tile(16, 64, 4, 2)),
        Row(640, Tile(64, 32, 8, 2), Tile(32, 32, 8, 1)),
        Row(1088, Tile(64, 16, 8, 2), Tile(32, 32, 8, 1)),
    ),
    (86, 2): (
        Row(128, Tile(128, 64, 4, 2), Tile(64, 64, 4, 2), few=Tile(16, 64, 4, 3)),
        Row(192, Tile(128, 64, 4, 2), Tile(64, 64, 4, 2), few=Tile(16, 32, 4, 3)),
        Row(256, Tile(128, 64, 8, 3), Tile(128, 32, 8, 2), open=Tile(128, 32, 4, 2), few=Tile(16, 32, 4, 3)),
        Row(320, Tile(64, 32, 8, 2), Tile(32, 32, 8, 1), few=Tile(16, 32, 4, 2)),
        Row(384, Tile(128, 64, 8, 2), Tile(64, 16, 4, 2), few=Tile(16, 32, 4, 2)),
        Row(512, Tile(64, 64, 4, 1), Tile(64, 32, 8, 2), few=Tile(16, 32, 4, 2)),
        Row(640, Tile(32, 32, 8, 2), Tile(16, 32, 8, 1)),
        Row(1088, Tile(32, 16, 8, 2), Tile(16, 32, 8, 1)),
    ),
    (90, 2): (
        Row(
            64,
            Tile(64, 64, 4, 3),
            Tile(128, 32, 4, 3),
            tiny=Tile(64, 32, 4, 4),
            biased=Tile(64, 64, 4, 3, registers=96),
            biased_brief=Tile(64, 32, 4, 3, registers=80),
            biased_band=Tile(64, 64, 4, 3, registers=96),
            biased_mask=Tile(64, 64, 4, 3, registers=96),
            few=Tile(16, 128, 4, 2),
        ),
        Row(
            128,
            Tile(64, 64, 4, 3),
            Tile(64, 64, 4, 3),
            brief=Tile(64, 32, 4, 3),
            biased=Tile(128, 64, 8, 3, registers=128),
            biased_brief=Tile(64, 32, 4, 3, registers=128),
            biased_band=Tile(64, 64, 4, 2, registers=128),
            few=Tile(16, 64, 4, 3),
        ),
        Row(
            192,
            Tile(128, 64, 4, 3),
            Tile(64, 32, 4, 3),
            biased=Tile(64, 32, 4, 3, registers=128),
            biased_brief=Tile(64, 32, 4, 3, registers=128),
            few=Tile(16, 128, 4, 2),
            half=Tile(64, 64, 4, 3),
        ),
        Row(
            256,
            Tile(128, 64, 8, 3),
            Tile(64, 32, 4, 3),
            short=Tile(128, 32, 8, 3),
            few=Tile(16, 128, 4, 2),
            half=Tile(64, 64, 4, 3),
            blocks=Tile(64, 64, 4, 3),
        ),
        Row(384, Tile(128, 64, 8, 3), Tile(64, 32, 4, 3), few=Tile(16, 64, 4, 3), half=Tile(64, 64, 4, 3)),
        Row(512, Tile(128, 64, 8, 2), Tile(128, 32, 8, 2), few=Tile(16, 64, 4, 3), blocks=Tile(64, 32, 4, 2)),
        Row(640, Tile(64, 32, 8, 3), Tile(64, 16, 8, 2)),
        Row(1088, Tile(64, 32, 8, 2), Tile(64, 16, 8, 2)),
    ),
    (100, 2): (
        Row(128, Tile(128, 64, 4, 3), Tile(128, 64, 8, 2), few=Tile(16, 64, 4, 3)),
        Row(256, Tile(128, 128, 8, 2), Tile(128, 64, 8, 2), few=Tile(16, 128, 4, 2)),
        Row(512, Tile(128, 64, 8, 2), Tile(64, 64, 8, 1), few=Tile(16, 64, 4, 3)),
        Row(1088, Tile(64, 32, 8, 2), Tile(32, 32, 8, 1)),
    ),
    (80, 4): (
        Row(128, Tile(32, 32, 4, 2), Tile(32, 32, 4, 1)),
        Row(256, Tile(32, 32, 8, 1), Tile(16, 32, 8, 1)),
        Row(512, Tile(16, 32, 8, 1), Tile(16, 16, 8, 1)),
    ),
}

DQ: Table = {
    (INTERPRETER, 2): _SMALL,
    (INTERPRETER, 4): _SMALL,
    (80, 2): (
        Row(128, Tile(128, 64, 4, 2), Tile(64, 64, 4, 2)),
        Row(256, Tile(64, 64, 4, 2), Tile(64, 32, 4, 2)),
        Row(320, Tile(64, 32, 8, 1), Tile(32, 32, 8, 1)),
        Row(384, Tile(64, 32, 4, 2), Tile(64, 16, 4, 2)),
        Row(512, Tile(32, 32, 4, 2), Tile(32, 32, 4, 2)),
        Row(1088, Tile(32, 32, 8, 1), Tile(32, 16, 8, 1)),
    ),
    (86, 2): (
        Row(128, Tile(128, 64, 4, 2), Tile(64, 64, 4, 2)),
        Row(192, Tile(64, 64, 4, 2), Tile(64, 32, 4, 2)),
        Row(256, Tile(128, 64, 8, 2), Tile(64, 64, 8, 2)),
        Row(320, Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
        Row(384, Tile(64, 32, 4, 2), Tile(64, 16, 4, 2)),
        Row(512, Tile(32, 32, 4, 2), Tile(32, 32, 4, 2)),
        Row(1088, Tile(16, 32, 8, 1), Tile(16, 16, 8, 1)),
    ),
    (90, 2): (
        Row(96, Tile(64, 64, 4, 3), Tile(64, 32, 4, 3)),
        Row(192, Tile(64, 64, 4, 3), Tile(64, 64, 4, 3)),
        Row(
            256,
            Tile(128, 64, 8, 3),
            Tile(64, 32, 4, 3),
            open=Tile(128, 64, 8, 3),
            short=Tile(64, 32, 4, 3),
            blocks=Tile(64, 64, 4, 2),
        ),
        Row(512, Tile(128, 32, 8, 3), Tile(128, 32, 8, 2), blocks=Tile(64, 64, 4, 2)),
        Row(1088, Tile(32, 32, 8, 2), Tile(32, 32, 8, 1)),
    ),
    (100, 2): (
        Row(128, Tile(128, 128, 8, 2), Tile(128, 64, 8, 2)),
        Row(256, Tile(128, 64, 8, 2), Tile(64, 64, 8, 2)),
        Row(512, Tile(64, 64, 8, 2), Tile(64, 32, 8, 1)),
        Row(1088, Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    ),
    (80, 4): (
        Row(128, Tile(32, 32, 8, 1), Tile(16, 32, 4, 1)),
        Row(256, Tile(16, 32, 8, 1), Tile(16, 16, 8, 1)),
        Row(512, Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
    ),
}

DKDV: Table = {
    (INTERPRETER, 2): _SMALL,
    (INTERPRETER, 4): _SMALL,
    (80, 2): (
        Row(128, Tile(32, 128, 4, 2), Tile(32, 64, 4, 2)),
        Row(256, Tile(64, 64, 4, 2), Tile(32, 64, 4, 2)),
        Row(320, Tile(32, 32, 8, 1), Tile(16, 32, 8, 1)),
        Row(384, Tile(16, 64, 4, 2), Tile(16, 64, 4, 1)),
        Row(512, Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
        Row(1088, Tile(16, 32, 8, 1, apart=True), Tile(16, 32, 8, 1, apart=True)),
    ),
    (86, 2): (
        Row(128, Tile(32, 128, 4, 2), Tile(32, 64, 4, 2)),
        Row(192, Tile(64, 64, 4, 2), Tile(32, 64, 4, 2)),
        Row(256, Tile(64, 128, 8, 2), Tile(32, 128, 8, 2)),
        Row(320, Tile(16, 32, 8, 1), Tile(16, 32, 8, 1)),
        Row(384, Tile(32, 64, 4, 2, apart=True), Tile(32, 64, 4, 1, apart=True)),
        Row(512, Tile(32, 32, 4, 1), Tile(32, 32, 8, 1)),
        Row(1088, Tile(16, 16, 8, 1, apart=True), Tile(16, 16, 8, 1, apart=True)),
    ),
    (90, 2): (
        Row(64, Tile(64, 64, 4, 2), Tile(64, 64, 4, 3), open=Tile(64, 64, 4, 3), tiny=Tile(64, 64, 4, 1)),
        Row(96, Tile(64, 64, 4, 2), Tile(64, 64, 4, 3), open=Tile(64, 64, 4, 3)),
        Row(128, Tile(64, 64, 4, 2), Tile(64, 64, 4, 2), open=Tile(64, 64, 4, 3)),
        Row(192, Tile(64, 64, 4, 3), Tile(32, 64, 4, 3)),
        Row(256, Tile(32, 64, 4, 3), Tile(32, 64, 4, 3)),
        Row(320, Tile(32, 128, 8, 3), Tile(32, 128, 8, 2, apart=True)),
        Row(
            512,
            Tile(32, 128, 8, 2, apart=True),
            Tile(32, 128, 8, 2, apart=True),
            open=Tile(64, 128, 8, 1, apart=True),
            blocks=Tile(64, 64, 8, 3),
        ),
        Row(1088, Tile(16, 64, 8, 2, apart=True), Tile(16, 32, 8, 1, apart=True)),
    ),
    # d 256: dk, dv and two tiles of scores exceed tensor memory, so tiles of 32 keys are multiplied in registers
    (100, 2): (
        Row(128, Tile(64, 128, 8, 2), Tile(32, 128, 8, 2)),
        Row(256, Tile(32, 128, 8, 2), Tile(32, 64, 8, 2)),
        Row(384, Tile(32, 64, 8, 2), Tile(32, 64, 8, 1)),
        Row(512, Tile(32, 32, 8, 1), Tile(16, 32, 8, 1)),
        Row(1088, Tile(16, 32, 8, 1, apart=True), Tile(16, 32, 8, 1, apart=True)),
    ),
    (80, 4): (
        Row(128, Tile(32, 32, 4, 1), Tile(16, 32, 4, 1)),
        Row(256, Tile(16, 32, 8, 1), Tile(16, 16, 8, 1)),
        Row(512, Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
    ),
}

ONE_GRID = Tile(64, 64, 4, 2)
"""Tile for programs of dq and of dk with dv in one launch, on 9.0.

One stage is 8 to 13 % faster, but ptxas 12.8 generates wrong code for such loops at some head dims (`undefined_registers`).
"""

for _table in (FORWARD, DQ, DKDV):
    _table[120, 2] = _table[86, 2]
    _table[INTERPRETER, 1] = _SMALL

# FP8: PV, and in the backward each product, has its own accumulator beside the sum.
FORWARD[89, 1] = FORWARD[120, 1] = (
    Row(128, Tile(64, 64, 4, 2), Tile(64, 32, 4, 2)),
    Row(256, Tile(64, 64, 4, 2), Tile(32, 32, 4, 2)),
    Row(512, Tile(32, 64, 8, 2), Tile(32, 32, 8, 1)),
)
FORWARD[90, 1] = (
    Row(128, Tile(64, 64, 4, 3), Tile(64, 64, 4, 2)),
    Row(256, Tile(64, 128, 4, 3), Tile(64, 64, 4, 2)),
    Row(384, Tile(64, 64, 4, 3), Tile(64, 64, 8, 2)),
    Row(512, Tile(64, 64, 8, 3), Tile(64, 32, 8, 2)),
)
FORWARD[100, 1] = (
    Row(128, Tile(128, 64, 4, 2), Tile(128, 64, 8, 2)),
    Row(256, Tile(128, 64, 8, 2), Tile(128, 64, 8, 2)),
    Row(512, Tile(64, 64, 8, 2), Tile(64, 64, 8, 1)),
)
DQ[89, 1] = DQ[120, 1] = (
    Row(128, Tile(64, 64, 8, 2), Tile(64, 32, 8, 1)),
    Row(256, Tile(64, 32, 8, 1), Tile(32, 32, 8, 1)),
    Row(512, Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
)
DQ[90, 1] = (Row(256, Tile(64, 64, 4, 3), Tile(64, 64, 4, 2)), Row(512, Tile(64, 64, 8, 2), Tile(64, 32, 8, 2)))
DQ[100, 1] = (Row(128, Tile(128, 64, 8, 2), Tile(128, 64, 8, 2)), Row(512, Tile(64, 64, 8, 2), Tile(64, 32, 8, 1)))
DKDV[89, 1] = DKDV[120, 1] = (
    Row(128, Tile(32, 64, 8, 2), Tile(32, 64, 8, 1)),
    Row(256, Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    Row(512, Tile(32, 32, 8, 1, apart=True), Tile(32, 32, 8, 1, apart=True)),
)
DKDV[90, 1] = (
    Row(128, Tile(64, 64, 4, 3), Tile(64, 64, 4, 2)),
    Row(192, Tile(32, 64, 4, 3), Tile(64, 64, 4, 2)),
    Row(256, Tile(64, 64, 4, 3), Tile(32, 64, 4, 2)),
    Row(512, Tile(64, 64, 8, 2, apart=True), Tile(32, 64, 8, 2, apart=True)),
)
DKDV[100, 1] = (
    Row(128, Tile(64, 64, 8, 2), Tile(32, 64, 8, 2)),
    Row(256, Tile(32, 64, 8, 2), Tile(32, 64, 8, 2)),
    Row(512, Tile(32, 64, 8, 1, apart=True), Tile(32, 64, 8, 1, apart=True)),
)

BIAS_GRADIENT: Table = {
    (INTERPRETER, 2): _SMALL,
    (INTERPRETER, 4): _SMALL,
    (80, 2): (
        Row(256, Tile(64, 64, 8, 1), Tile(64, 64, 8, 1)),
        Row(512, Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
        Row(1088, Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
    ),
    (80, 4): (Row(256, Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)), Row(512, Tile(16, 16, 4, 1), Tile(16, 16, 4, 1))),
    (INTERPRETER, 1): _SMALL,
    (89, 1): (Row(512, Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),),
}

SHARED_BIAS_GRADIENT: Table = {
    (INTERPRETER, 2): _SMALL,
    (INTERPRETER, 4): _SMALL,
    (80, 2): (
        Row(64, Tile(64, 64, 4, 3), Tile(64, 64, 4, 3)),
        Row(256, Tile(64, 64, 8, 2), Tile(64, 64, 8, 2)),
    ),
    (86, 2): (
        Row(64, Tile(64, 64, 4, 3), Tile(64, 64, 4, 3)),
        Row(128, Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
        Row(192, Tile(64, 64, 8, 2), Tile(64, 64, 8, 2)),
        Row(256, Tile(64, 32, 8, 2), Tile(64, 32, 8, 2)),
    ),
    (90, 2): (
        Row(128, Tile(64, 64, 4, 3), Tile(64, 64, 4, 3)),
        Row(256, Tile(64, 64, 8, 2), Tile(64, 64, 8, 2)),
    ),
    (80, 4): (Row(128, Tile(32, 32, 4, 2), Tile(32, 32, 4, 2)), Row(256, Tile(16, 32, 8, 2), Tile(16, 32, 8, 2))),
}
"""The loop over batch entries copies the next one's tiles ahead. 384 entries with 384 tokens and 4 heads at head dim 32 take 241 us
on an H200 with three stages and four warps. They take 379 us with one stage, and 389 us with eight warps
(bench/results/bias_tiles_h200.json, script not kept)."""


def row_of(table: Table, capability: int, element_size: int, head_dims: int) -> Row:
    """Returns the row that serves `Problem.head_dims` on a device."""
    newest = max(sm for sm, size in table if size == element_size and sm <= capability)
    return next(row for row in table[newest, element_size] if head_dims <= row.head_dims)


def select_tile(
    table: Table,
    capability: int,
    element_size: int,
    head_dims: int,
    *,
    is_whole: bool,
    loaded: Loaded | None,
    is_open: bool,
    length: int,
) -> Tile:
    """Returns the committed tile of a problem with more than FEW queries.

    head_dims: `Problem.head_dims`. is_whole: each head dim is one part. loaded: None without a bias and dropout. is_open: its band
    is open on both sides. length: its longest sequence, of queries or of keys.
    """
    row = row_of(table, capability, element_size, head_dims)
    # ptxas miscompiles tiles of one stage if a head dim has two parts (`sass_registers`).
    if loaded is not None:
        # At head dims up to 32, 256 tokens take 2 to 6 % less time in `biased` (bench/results/biased_addresses_h200.json).
        most = TINY if loaded.bias_align == 8 and row.head_dims == 64 else BRIEF
        if length <= most and row.biased_brief is not None and loaded.bias_align > 0:
            return row.biased_brief
        if length <= TINY and row.tiny is not None and (is_whole or row.tiny.num_stages > 1):
            return row.tiny
        own = (loaded.bias_align == 8, row.biased), (loaded.has_band, row.biased_band), (loaded.has_mask, row.biased_mask)
        return next((tile for applies, tile in own if applies and tile is not None), row.loaded)
    if length <= BRIEF and row.brief is not None:
        return row.brief
    if is_open and row.open is not None and (is_whole or row.open.num_stages > 1):
        return row.open
    if length <= SHORT and row.short is not None:
        return row.short
    return row.tile


@dataclass(frozen=True, kw_only=True)
class HopperTile:
    """A tile of the Gluon forwards of sm_90. It serves head dims up to `head_dim_qk` and `head_dim_v`, padded with zeros."""

    head_dim_qk: int
    head_dim_v: int
    block_m: int  # 64 for each consumer warpgroup
    block_n: int
    num_stages: int  # stages of k and of v in shared memory
    registers: int  # registers of a consumer's thread
    q_stages: int = 1  # stages of q: with 2, the next tile's q is loaded while the last q is still needed
    # Number of parts in which out passes through one buffer: 2 if shared memory is scarce. With out in q's buffer instead, kernels
    # were 1 to 7 % slower (bench/results/forward_turns_h200.json).
    out_parts: int = 1
    # Consumers take turns at the tensor cores. Three are 3 to 6 % faster with that; four are faster in causal calls and slower in
    # others (bench/results/forward_turns_h200.json).
    pingpong: bool = True
    # Rescales a row only if its maximum has risen by a factor of 2**8: 2 to 4 % faster at 64 and at 256. At 64 with windows of 384
    # keys and more it is 2 to 8 % faster (bench/results/windows_h100.json). At 128 without a band it is up to 4 % slower.
    is_lazy: bool = False
    # For few keys, the scores of a row have two parts: those of 64 keys, and of so many more. 0: they have one part.
    last_keys: int = 0


_LONG_64 = HopperTile(head_dim_qk=64, head_dim_v=64, block_m=192, block_n=128, num_stages=2, registers=160, is_lazy=True)
_FEW_64 = HopperTile(
    head_dim_qk=64, head_dim_v=64, block_m=128, block_n=128, num_stages=3, registers=240, q_stages=2, pingpong=False
)
_NARROW_64 = HopperTile(
    head_dim_qk=64, head_dim_v=64, block_m=192, block_n=64, num_stages=4, registers=160, q_stages=2, pingpong=False, is_lazy=True
)
_LONG_128 = HopperTile(head_dim_qk=128, head_dim_v=128, block_m=128, block_n=128, num_stages=2, registers=240)
_NARROW_128 = HopperTile(
    head_dim_qk=128, head_dim_v=128, block_m=192, block_n=64, num_stages=3, registers=160, pingpong=False, is_lazy=True
)

HOPPER_FORWARD: dict[str, HopperTile] = {
    "d64_long": _LONG_64,
    # Scores have 48 = 32 + 16 columns. A product with values is as fast with 64 columns as with two parts.
    "d48_long": replace(_LONG_64, head_dim_qk=48, num_stages=3),
    "d64_short": replace(_NARROW_64, block_m=256, registers=112),
    # Registers for values beside the scores: a bias, mods, random numbers. If keys are in pages, a single warp finds the pages
    # beside two consumers; with more it would be a warpgroup.
    "d64_two_consumers": HopperTile(head_dim_qk=64, head_dim_v=64, block_m=128, block_n=128, num_stages=2, registers=240),
    # For calls in which loading keys is the only work, and rows without queries are overhead.
    "d64_few_rows": _FEW_64,
    # A tile with more queries processes more keys that few of them see.
    "d64_narrow": _NARROW_64,
    "d64_paged_short": replace(_FEW_64, is_lazy=True),
    "d64_narrow_two_consumers": replace(_NARROW_64, block_m=128, registers=240),
    "d128_long": _LONG_128,
    "d128": replace(_LONG_128, q_stages=2),
    "d128_narrow": replace(_NARROW_128, block_m=128, num_stages=4, registers=240, q_stages=2),
    "d128_three_consumers": _NARROW_128,
    "d192": replace(_LONG_128, head_dim_qk=192, out_parts=2),
    "d192_narrow": replace(_NARROW_128, head_dim_qk=192, block_m=128, registers=240),
    "d192_three_consumers": replace(_NARROW_128, head_dim_qk=192, out_parts=2),
    "d256": HopperTile(
        head_dim_qk=256, head_dim_v=256, block_m=128, block_n=64, num_stages=2, registers=240, out_parts=2, is_lazy=True
    ),
}
"""Tiles for head dims up to 256; `crossovers` selects one for a call."""

HOPPER_FITTED = (
    replace(_LONG_128, head_dim_qk=80, head_dim_v=80, num_stages=3, q_stages=2),
    replace(_LONG_128, head_dim_qk=96, head_dim_v=96, q_stages=2),
    replace(_LONG_128, head_dim_qk=160, head_dim_v=160, out_parts=2),
    HopperTile(head_dim_qk=192, head_dim_v=192, block_m=128, block_n=64, num_stages=2, registers=240, out_parts=2, is_lazy=True),
)
"""Tiles whose head dims have two parts: 80 = 64 + 16, 96 = 64 + 32, 160 = 128 + 32 and 192 = 128 + 64.

`crossovers` has rules for the calls in which they were measured to be faster. Others take them on request.
"""


def select_fitted_tile(head_dim_qk: int, head_dim_v: int, *, is_modified: bool) -> HopperTile | None:
    """Returns the narrowest of HOPPER_FITTED; None if a tile of HOPPER_FORWARD is as narrow.

    For modified scores a block has fewer keys, which frees registers.
    """
    widest = max(head_dim_qk, head_dim_v)
    if widest <= 64 or 96 < widest <= 128 or head_dim_v <= 128 < head_dim_qk:
        return None
    tile = next((tile for tile in HOPPER_FITTED if widest <= tile.head_dim_v), None)
    if tile is None or not is_modified or tile.block_n == 64:
        return tile
    return replace(tile, block_n=64, num_stages=tile.num_stages + 1)


def few_keys_tile(head_dim_qk: int, head_dim_v: int, keys: int) -> HopperTile:
    """Returns the tile of a forward whose keys, up to 128, are one block. Head dims are up to 128.

    65 to 80 keys have products with 64 and with 16 keys, instead of 128: 13 to 21 % less time (few_keys_parts_h200.json). 96 keys
    take as long in 64 and 32.
    """
    d_qk, d_v = (sum(split_head_dim(head_dim)) for head_dim in (head_dim_qk, head_dim_v))
    block_n = next(n for n in (32, 64, 128) if keys <= n)
    stages = 2 if d_qk + d_v <= 192 or block_n < 128 else 1
    return HopperTile(
        head_dim_qk=d_qk,
        head_dim_v=d_v,
        block_m=192,
        block_n=block_n,
        num_stages=stages,
        registers=160,
        q_stages=2,
        pingpong=False,
        last_keys=16 if 64 < keys <= 80 else 0,
    )


HOPPER_TANGENT = tuple(
    HopperTile(
        head_dim_qk=head_dim,
        head_dim_v=head_dim,
        block_m=128,
        block_n=block_n,
        num_stages=num_stages,
        registers=240,
        q_stages=q_stages,
        out_parts=2,
        pingpong=head_dim > 64,
        is_lazy=is_lazy,
    )
    for head_dim, block_n, num_stages, q_stages, is_lazy in (
        (64, 128, 2, 1, True),
        (80, 64, 3, 2, False),
        (96, 64, 3, 1, True),
        (128, 64, 2, 1, True),
    )
)
"""Tiles of the forward with a tangent. q, k and v have tiles of their tangents beside theirs. Out and its tangent pass through one
buffer in turn, or have one each if `out_parts` is 1. Times of other tiles are
in bench/results/second_order_tiles_h200.json (script not kept)."""


HOPPER_WIDE = tuple(
    HopperTile(
        head_dim_qk=head_dim_qk, head_dim_v=512, block_m=64, block_n=64, num_stages=1, registers=240, pingpong=False, is_lazy=True
    )
    for head_dim_qk in (512, 576)
)
"""Tiles for head dims above 256: each of two warpgroups has half of out's columns."""


@dataclass(frozen=True, kw_only=True)
class BlackwellTile(HopperTile):
    """A tile of the Gluon forward of sm_100, not measured."""

    block_m: int = 256  # 128 for each consumer warpgroup
    registers: int = 224
    out_parts: int = 2
    pingpong: bool = False  # products are issued in turn
    is_lazy: bool = True


BLACKWELL_FORWARD = (
    BlackwellTile(head_dim_qk=64, head_dim_v=64, block_n=128, num_stages=4, out_parts=1),
    BlackwellTile(head_dim_qk=128, head_dim_v=128, block_n=128, num_stages=2),
    BlackwellTile(head_dim_qk=192, head_dim_v=128, block_n=64, num_stages=2),
)

BLACKWELL_MODIFIED = (
    BlackwellTile(head_dim_qk=64, head_dim_v=64, block_n=64, num_stages=8, out_parts=1),
    BlackwellTile(head_dim_qk=128, head_dim_v=128, block_n=64, num_stages=4),
    BlackwellTile(head_dim_qk=192, head_dim_v=128, block_n=64, num_stages=2),
)
"""Tiles for modified scores: values of a mod or a bias need registers beside a row's scores, and one thread has a whole row."""


@dataclass(frozen=True, kw_only=True)
class BlackwellBackwardTile:
    """A tile of the backward on sm_100, not measured. It serves head dims up to `head_dim`, of q and k and of v."""

    head_dim: int
    columns: int = 64  # queries of which a thread holds the scores with one key at a time
    q_stages: int = 2
    dout_stages: int
    block_m: int = 128
    block_n: int = 128


BLACKWELL_BACKWARD = (BlackwellBackwardTile(head_dim=64, dout_stages=2), BlackwellBackwardTile(head_dim=128, dout_stages=1))
"""`conditions.backward_tile` halves the columns for modified scores."""

# Tiles of the preprocess kernel. 32 rows instead of 128, also in the conversion of dq, save 1 to 2 % of a backward of 512 to 2048
# tokens, together with `place_of_program`.
PREPROCESS = Tile(32, 64, 4, 1)
PREPROCESS_OF_FP8 = Tile(128, 64, 8, 1)  # for a program that quantises dout
PREPROCESS_OF_WIDE_FP8 = Tile(32, 64, 8, 1)  # for wide heads: a larger tile in registers would leave room for few programs

DQ_PART = 256 * 128
"""Elements of a part of dq that a fused backward converts. At head dim 128 without a mask, double parts took up to 5 % longer, and
half parts up to 3 % longer.
"""


@dataclass(frozen=True, kw_only=True)
class HopperBackwardTile:
    """A tile of the two-kernel backward on sm_90. It serves head dims up to `head_dim_qk` and `head_dim_v`."""

    head_dim_qk: int
    head_dim_v: int
    block_n: int  # keys of an iteration of dq
    v_stages: int = 2  # stages of v in shared memory, for dq; k has two
    block_m: int  # queries of an iteration of dk and dv
    splits_columns: bool = False  # the warpgroups split columns of dk and dv: a program has 64 keys instead of 128

    @property
    def keys(self) -> int:
        """Keys of a program of dk and dv."""
        return 64 if self.splits_columns else 128


HOPPER_BACKWARD = (
    HopperBackwardTile(head_dim_qk=64, head_dim_v=64, block_n=128, block_m=64),
    HopperBackwardTile(head_dim_qk=128, head_dim_v=128, block_n=128, v_stages=1, block_m=64),
    HopperBackwardTile(head_dim_qk=192, head_dim_v=128, block_n=64, block_m=32),
    HopperBackwardTile(head_dim_qk=256, head_dim_v=256, block_n=64, v_stages=1, block_m=64, splits_columns=True),
)


HOPPER_BACKWARD_WIDE = HopperBackwardTile(head_dim_qk=512, head_dim_v=512, block_n=32, v_stages=1, block_m=32, splits_columns=True)
"""The tile of the backward for head dims above 256, not measured: k has one and a half stages for dq."""


def select_hopper_backward_tile(head_dim_qk: int, head_dim_v: int, *, is_modified: bool = False) -> HopperBackwardTile:
    """Returns the narrowest tile. For modified scores an iteration of dq has fewer keys, which frees registers."""
    tile = next(tile for tile in HOPPER_BACKWARD if head_dim_qk <= tile.head_dim_qk and head_dim_v <= tile.head_dim_v)
    return replace(tile, block_n=64, v_stages=2) if is_modified and tile.block_n == 128 else tile


@dataclass(frozen=True, kw_only=True)
class HopperFusedTile:
    """A tile of the fused backward on sm_90. It serves head dims up to `head_dim`, of q and k and of v.

    Percentages without a source are from bench/results/one_pass_orders_h200.json, at 16384 tokens.
    """

    head_dim: int
    # Queries of an iteration. At head dim 64, 128 are 22 % faster than 64; modified scores and dropout lack the registers for that.
    queries: int
    # True: dp is the first product of an iteration, and dq of the previous iteration the last. So one warpgroup may be half an
    # iteration ahead of the other. False: dq is first, and dp follows dv. At 128, True is 5 % faster without a mask, and 6 % slower
    # with a causal one.
    dp_first: bool
    # True: scores begin in the previous iteration, during its last products. That is 5 % faster at 64 with a causal mask, and 5 to
    # 13 % slower at 128 with dp first.
    is_ahead: bool
    # True: the warpgroups take turns with the arithmetic between scores and p: 1 to 8 % faster at 64, 2 to 3 % at 128.
    pingpong: bool
    # Tiles of dq in shared memory. With one instead of two, a causal call at 128 is 4 to 6 % faster
    # (bench/results/one_pass_ported_h200.json).
    dq_stages: int
    # With dp first: one wait for both dv and dk. With 128 queries and scores ahead, it must be False, or ptxas serialises the
    # products.
    dv_with_dk: bool = False
    # True: a separate barrier releases dout. It is not necessary, because dout has as many slots as q. The consumers meet at it.
    # With scores as the first product of an iteration of 64 queries, they were 2 to 7 % faster with it at 64. At 128 they were up
    # to 9 % slower (bench/results/hopper_turns_h200.json).
    dout_apart: bool = False
    # True: programs, one for each multiprocessor, draw blocks of keys, and load the next block's k while the last one ends.
    is_persistent: bool = False
    # True: persistent programs draw parts of dq too, and convert them once all blocks of keys have been added, without a separate
    # kernel. For calls that `converts_dq` accepts.
    converts: bool = False


_FUSED_64 = HopperFusedTile(head_dim=64, queries=128, dp_first=True, is_ahead=True, pingpong=True, dq_stages=1)
_FUSED_128 = HopperFusedTile(head_dim=128, queries=64, dp_first=False, is_ahead=True, pingpong=True, dq_stages=1)

HOPPER_FUSED: dict[str, HopperFusedTile] = {
    "d64": _FUSED_64,
    "d64_persistent": replace(_FUSED_64, is_persistent=True),
    "d64_modified": HopperFusedTile(
        head_dim=64, queries=64, dp_first=True, is_ahead=True, pingpong=False, dq_stages=2, dv_with_dk=True, dout_apart=True
    ),
    "d128": _FUSED_128,
    "d128_persistent": replace(_FUSED_128, is_persistent=True),
    "d128_converting": replace(_FUSED_128, is_persistent=True, converts=True),
    "d128_open": HopperFusedTile(
        head_dim=128, queries=64, dp_first=True, is_ahead=False, pingpong=False, dq_stages=1, dv_with_dk=True
    ),
}
"""Tiles for head dims up to 128; `crossovers` selects one for a call."""

HOPPER_FUSED_FITTED: dict[str, HopperFusedTile] = {
    f"d{head_dim}_{name}": replace(_FUSED_128, head_dim=head_dim, is_persistent=True, **order)
    for head_dim in (80, 96)
    for name, order in (
        ("long", {"dp_first": True, "is_ahead": False, "dv_with_dk": True}),
        ("modified", {"dp_first": True}),
        ("short", {}),
    )
}
"""Tiles for head dims from 72 to 96. Rules for "sm_90 fused fitted" name the last word of a tile's name."""


@dataclass(frozen=True, kw_only=True)
class HopperFused192Tile:
    """A tile of the fused backward on sm_90 at head dims above 128, like `HopperFusedTile`."""

    head_dim_qk: int
    head_dim_v: int
    queries: int


HOPPER_FUSED_192 = HopperFused192Tile(head_dim_qk=192, head_dim_v=128, queries=64)
HOPPER_FUSED_160 = HopperFused192Tile(head_dim_qk=160, head_dim_v=160, queries=64)
