"""Tile sizes as data, by compute capability, element size and head dim. There is no autotuner.

Tests compile rows ahead of time for their architecture and check shared memory, spills and matrix instructions. Every test run
compiles one row of each kernel, `pytest -m slow` the most important rows, and `-m exhaustive` all of them. The fp16 and bf16 rows
of 9.0 were the fastest of several on an NVIDIA H200 at 512 to 4096 tokens, causal and full (bench/results/tiles_*_h200.json). Other
rows have not been timed.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from flexattn.kernels_triton.runtime.device import INTERPRETER, Tile


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


SHORT = 1024
"""The one length that selects a kernel: a configuration is compiled at most twice, for longer and for shorter sequences."""


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
        Row(128, Tile(128, 64, 4, 3), Tile(64, 64, 4, 2)),
        Row(256, Tile(128, 64, 8, 2), Tile(64, 64, 8, 2)),
        Row(512, Tile(64, 64, 8, 2), Tile(64, 32, 8, 2)),
        Row(640, Tile(64, 32, 8, 2), Tile(32, 32, 8, 1)),
        Row(1088, Tile(64, 16, 8, 2), Tile(32, 32, 8, 1)),
    ),
    (86, 2): (
        Row(128, Tile(128, 64, 4, 2), Tile(64, 64, 4, 2), open=Tile(128, 64, 8, 2)),
        Row(256, Tile(128, 32, 8, 2), Tile(64, 32, 8, 2)),
        Row(320, Tile(64, 32, 8, 2), Tile(32, 32, 8, 1)),
        Row(384, Tile(64, 32, 8, 1), Tile(32, 32, 8, 1)),
        Row(512, Tile(64, 32, 8, 2), Tile(32, 32, 8, 1)),
        Row(640, Tile(32, 32, 8, 2), Tile(16, 32, 8, 1)),
        Row(1088, Tile(32, 16, 8, 2), Tile(16, 32, 8, 1)),
    ),
    (90, 2): (
        Row(128, Tile(64, 64, 4, 3), Tile(64, 64, 4, 3)),
        Row(192, Tile(128, 64, 4, 3), Tile(64, 32, 4, 3)),
        Row(256, Tile(128, 64, 8, 3), Tile(64, 32, 4, 3), short=Tile(128, 32, 8, 3)),
        Row(384, Tile(128, 64, 8, 3), Tile(64, 32, 4, 3)),
        Row(512, Tile(128, 64, 8, 2), Tile(128, 32, 8, 2)),
        Row(640, Tile(64, 32, 8, 3), Tile(64, 16, 8, 1)),
        Row(1088, Tile(64, 32, 8, 2), Tile(64, 16, 8, 1)),
    ),
    (100, 2): (
        Row(128, Tile(128, 64, 4, 3), Tile(128, 64, 8, 2)),
        Row(256, Tile(128, 128, 8, 2), Tile(128, 64, 8, 2)),
        Row(512, Tile(128, 64, 8, 2), Tile(64, 64, 8, 1)),
        Row(640, Tile(64, 32, 8, 2), Tile(32, 32, 8, 1)),
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
        Row(128, Tile(64, 64, 4, 2), Tile(64, 32, 4, 2)),
        Row(256, Tile(64, 64, 8, 2), Tile(64, 32, 8, 2)),
        Row(512, Tile(64, 32, 8, 1), Tile(32, 32, 8, 1)),
        Row(1088, Tile(32, 32, 8, 1), Tile(32, 16, 8, 1)),
    ),
    (86, 2): (
        Row(128, Tile(64, 64, 4, 2), Tile(64, 32, 4, 2)),
        Row(256, Tile(64, 32, 8, 2), Tile(32, 32, 8, 1)),
        Row(512, Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
        Row(1088, Tile(16, 32, 8, 1), Tile(16, 16, 8, 1)),
    ),
    (90, 2): (
        Row(192, Tile(64, 64, 4, 3), Tile(64, 64, 4, 3)),
        Row(256, Tile(128, 64, 8, 3), Tile(64, 32, 4, 3), open=Tile(128, 64, 8, 3), short=Tile(64, 32, 4, 3)),
        Row(512, Tile(128, 32, 8, 3), Tile(128, 32, 8, 2)),
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
        Row(128, Tile(64, 64, 4, 2), Tile(32, 64, 4, 2)),
        Row(256, Tile(32, 64, 4, 2), Tile(32, 64, 8, 1)),
        Row(512, Tile(32, 32, 8, 1), Tile(16, 32, 8, 1)),
        Row(1088, Tile(16, 32, 8, 1, apart=True), Tile(16, 32, 8, 1, apart=True)),
    ),
    (86, 2): (
        Row(128, Tile(32, 64, 4, 2), Tile(32, 64, 4, 2)),
        Row(256, Tile(32, 64, 8, 1), Tile(32, 32, 8, 1)),
        Row(512, Tile(16, 32, 8, 1), Tile(16, 32, 8, 1)),
        Row(1088, Tile(16, 16, 8, 1, apart=True), Tile(16, 16, 8, 1, apart=True)),
    ),
    (90, 2): (
        Row(128, Tile(64, 64, 4, 2), Tile(64, 64, 4, 2), open=Tile(64, 64, 4, 3)),
        Row(192, Tile(64, 64, 4, 3), Tile(32, 64, 4, 3)),
        Row(256, Tile(32, 64, 4, 3), Tile(32, 64, 4, 3)),
        Row(320, Tile(32, 128, 8, 3), Tile(32, 128, 8, 2, apart=True)),
        Row(512, Tile(32, 128, 8, 2, apart=True), Tile(32, 128, 8, 2, apart=True), open=Tile(64, 128, 8, 1, apart=True)),
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
"""Tile for programs of dq and of dk with dv in one launch, on 9.0 (bench/results/short_backwards_h100.json).

One stage is 8 to 13 % faster, but ptxas 12.8 generates wrong code for such loops at some head dims (`undefined_registers`).
"""

for _table in (FORWARD, DQ, DKDV):
    _table[120, 2] = _table[86, 2]
    _table[INTERPRETER, 1] = _SMALL

# FP8: PV, and in the backward each product, has its own accumulator beside the sum. The first tile in the rows of 9.0 up to 256 is
# the fastest of a few on an NVIDIA H200, causal at 8192 (fp8_tiles_h200.json). Other rows have not been timed.
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
DQ[90, 1] = (
    Row(256, Tile(64, 64, 4, 3), Tile(64, 64, 4, 2)),
    Row(512, Tile(64, 64, 8, 2), Tile(64, 32, 8, 2)),
)
DQ[100, 1] = (
    Row(128, Tile(128, 64, 8, 2), Tile(128, 64, 8, 2)),
    Row(512, Tile(64, 64, 8, 2), Tile(64, 32, 8, 1)),
)
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
    (80, 4): (
        Row(256, Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
        Row(512, Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
    ),
    (INTERPRETER, 1): _SMALL,
    (89, 1): (Row(512, Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),),
}


def select_tile(
    table: Table,
    capability: int,
    element_size: int,
    head_dims: int,
    *,
    is_whole: bool,
    is_loaded: bool,
    is_open: bool,
    length: int,
) -> Tile:
    """Returns the committed tile of a problem.

    head_dims: `Problem.head_dims`. is_whole: each head dim is one part. is_loaded: the problem has a bias or dropout. is_open: its
    band is open on both sides. length: its longest sequence, of queries or of keys.
    """
    newest = max(sm for sm, size in table if size == element_size and sm <= capability)
    row = next(row for row in table[newest, element_size] if head_dims <= row.head_dims)
    if is_loaded:
        return row.loaded
    # ptxas miscompiles tiles of one stage if a head dim has two parts (`sass_registers`).
    if is_open and row.open is not None and (is_whole or row.open.num_stages > 1):
        return row.open
    if length <= SHORT and row.short is not None:
        return row.short
    return row.tile


NEVER = 2**31
"""Longer than any sequence: the row was measured to be slower, or was not measured."""


class HopperTile(NamedTuple):
    """A row for the Gluon kernels of sm_90. It serves head dims up to `head_dim_qk` and `head_dim_v`, padded with zeros."""

    head_dim_qk: int
    head_dim_v: int
    block_m: int  # 64 for each consumer warpgroup
    block_n: int
    num_stages: int  # stages of k and of v in shared memory
    registers: int  # registers of a consumer's thread
    q_stages: int  # stages of q: with 2, the next tile's q is loaded while the last q is still needed
    out_parts: int  # number of parts in which out passes through one buffer: 2 if shared memory is scarce
    # Minimum length of the longest sequence for this row, by band: from there on it was faster than `FORWARD`
    # (bench/results/standard_h200.json and lengths_h200.json; 192/128, except causal at 4096, by a run that was not kept).
    open_from: int
    causal_from: int  # open on the left
    windowed_from: int
    # By bench/results/modified_scores_h200.json (192/128 uses 128):
    modified_from: int  # with a softcap, ALiBi or mods, whatever the band
    loaded_from: int  # with a bias or a block mask
    flops_from: int  # minimum FLOPs of a call: with less work, the large tiles leave much of the device idle
    # By bench/results/forward_turns_h200.json, as for `out_parts`: with out in q's buffer instead, kernels were 1 to 7 % slower.
    # Consumers take turns at the tensor cores. Three are 3 to 6 % faster with that; four are faster in causal calls and slower in
    # others.
    pingpong: bool = True
    # Rescales a row only if its maximum has risen by a factor of 2**8: 2 to 4 % faster at 64 and at 256. At 64 with windows of 384
    # keys and more it is 2 to 8 % faster (bench/results/windows_h100.json). At 128 without a band it is up to 4 % slower.
    is_lazy: bool = False


class BlackwellTile(NamedTuple):
    """A row for the Gluon kernels of sm_100, not measured; its fields are those of `HopperTile`."""

    head_dim_qk: int
    head_dim_v: int
    block_m: int  # 128 for each consumer warpgroup
    block_n: int
    num_stages: int
    registers: int
    q_stages: int
    out_parts: int
    pingpong: bool = False  # products are issued in turn
    is_lazy: bool = True


BLACKWELL_FORWARD = (
    BlackwellTile(64, 64, 256, 128, 4, 224, 1, 1),
    BlackwellTile(128, 128, 256, 128, 2, 224, 1, 2),
    BlackwellTile(192, 128, 256, 64, 2, 224, 1, 2),
)

BLACKWELL_MODIFIED = (
    BlackwellTile(64, 64, 256, 64, 8, 224, 1, 1),
    BlackwellTile(128, 128, 256, 64, 4, 224, 1, 2),
    BlackwellTile(192, 128, 256, 64, 2, 224, 1, 2),
)
"""Rows for modified scores: values of a mod or a bias need registers beside a row's scores, and one thread has a whole row."""


class BlackwellBackwardTile(NamedTuple):
    """A row for the backward on sm_100, not measured. It serves head dims up to `head_dim`, of q and k and of v."""

    head_dim: int
    columns: int  # queries of which a thread holds the scores with one key at a time
    q_stages: int
    dout_stages: int
    block_m: int = 128
    block_n: int = 128


BLACKWELL_BACKWARD = (BlackwellBackwardTile(64, 64, 2, 2), BlackwellBackwardTile(128, 64, 2, 1))
"""`conditions.backward_tile` halves the columns for modified scores."""

HOPPER_FLOPS = 2**36
"""Default minimum FLOPs of a call for the sm_90 kernels; rows that were measured to be faster with less override it."""

HOPPER_FORWARD = (
    HopperTile(64, 64, 192, 128, 2, 160, 1, 1, 2048, 2048, NEVER, NEVER, NEVER, HOPPER_FLOPS, is_lazy=True),
    HopperTile(64, 64, 256, 64, 4, 112, 2, 1, 256, 512, 2048, NEVER, NEVER, 2**35, pingpong=False, is_lazy=True),
    HopperTile(64, 64, 128, 128, 2, 240, 1, 1, NEVER, NEVER, NEVER, NEVER, loaded_from=1024, flops_from=HOPPER_FLOPS),
    HopperTile(128, 128, 128, 128, 2, 240, 1, 1, 4096, 4096, 2048, 1024, 1024, flops_from=2**31),
    HopperTile(128, 128, 128, 128, 2, 240, 2, 1, 256, 256, NEVER, NEVER, NEVER, flops_from=2**31),
    HopperTile(192, 128, 128, 128, 2, 240, 1, 2, 512, 512, NEVER, 1024, 1024, flops_from=2**31),
    HopperTile(256, 256, 128, 64, 2, 240, 1, 2, 256, 256, NEVER, 1024, 1024, flops_from=2**29, is_lazy=True),
)

HOPPER_WIDE = (
    HopperTile(512, 512, 64, 64, 1, 240, 1, 1, NEVER, NEVER, NEVER, NEVER, NEVER, HOPPER_FLOPS, pingpong=False, is_lazy=True),
    HopperTile(576, 512, 64, 64, 1, 240, 1, 1, NEVER, NEVER, NEVER, NEVER, NEVER, HOPPER_FLOPS, pingpong=False, is_lazy=True),
)
"""Rows for head dims above 256: each of two warpgroups has half of out's columns."""

HOPPER_FEW_ROWS: dict[int, dict[str, Any]] = {
    64: {"block_m": 128, "block_n": 128, "num_stages": 3, "registers": 240, "q_stages": 2, "pingpong": False, "is_lazy": False},
}
"""Fields that replace those of a row of this head dim of q and k if all queries of a tile's heads fit in `block_m` rows.

Then loading keys is the only work, and rows without queries are overhead: 64 sequences of 8192 keys take 252 us instead of 402
(bench/results/few_queries_h200.json).
"""

NARROW_WINDOW = 256
HOPPER_NARROW_WINDOWS: dict[int, dict[str, Any]] = {
    64: {"block_m": 192, "block_n": 64, "num_stages": 4, "registers": 160, "q_stages": 2, "pingpong": False, "is_lazy": True},
}
"""Fields that replace those of a row of this head dim of q and k under a window of at most `NARROW_WINDOW` keys.

A tile with more queries processes more keys that few of them see. Windows of 128 keys take 4 to 5 % less time, windows of 256 take
3 % less (bench/results/windows_h100.json).
"""

HOPPER_PAGED = (
    HopperTile(64, 64, 128, 128, 2, 240, 1, 1, 2048, 4096, NEVER, NEVER, NEVER, flops_from=2**29),
    HopperTile(64, 64, 128, 128, 3, 240, 2, 1, 256, 256, 256, NEVER, NEVER, 2**29, pingpong=False, is_lazy=True),
    *HOPPER_FORWARD[2:],
)
"""The rows of `HOPPER_FORWARD` for pages. A single warp finds the pages beside two consumers; with more it would be a warpgroup.

At head dim 64, calls of 1024 tokens and more take 0.58 to 0.72 of the portable kernel's time. 512 tokens with 31 sequences of one
query each take 0.27 (bench/results/paged_prefill_h100.json).
"""
HOPPER_PAGED_NARROW_WINDOWS: dict[int, dict[str, Any]] = {64: HOPPER_NARROW_WINDOWS[64] | {"block_m": 128, "registers": 240}}
"""`HOPPER_NARROW_WINDOWS` for pages: windows of 128 keys take 0.61 to 0.65 of the portable kernel's time (the same file)."""

Kind = Literal["open", "causal", "windowed", "modified", "loaded"]
"""The property that selects a row beside the head dims: the `..._from` length that a call must reach."""

HOPPER_BYTES = 2**23
"""Minimum bytes of k and v if queries are few: below it both families are bound by the latency of two launches (16 us)."""

HOPPER_PAGED_BYTES = 2**22
"""The same for k and v in pages: 1024 keys of 8 heads take 14.2 us instead of 17.9 (bench/results/overlap_h200.json)."""

HOPPER_UNSHARED_BYTES = 2**30
"""Minimum bytes of k and v if queries are few and each query head has its own key head.

64 sequences of 2048 keys and 32 such heads take 518 us instead of 597 (bench/results/decode_paged_h200.json); less was not
measured. The portable kernel reads pages at half its speed, so `HOPPER_PAGED_BYTES` serves all calls over pages.
"""

# Minimum lengths like `open_from`, by a row's head dim of q and k (bench/results/dropout_h200.json, decode_h200.json and
# splits_h200.json).
HOPPER_DROPOUT_FROM = {64: 1024, 128: 512, 192: 4096, 256: 4096}
"""With dropout, forward and backward, for any band; a window and modified scores must reach their own length too."""
HOPPER_SHARED_FROM = {64: 1024, 128: 1024, 192: 4096, 256: 8192}
"""Keys, if query heads of one key head share a tile (`heads_of_a_tile`): few queries, as in decoding."""
HOPPER_PAGED_WINDOW_FROM = {64: 1024}
"""Keys of a window, for few queries over pages (bench/results/few_queries_windows_h100.json).

With 64 sequences the portable kernel takes 19 us instead of 26 for windows of 128 keys, and 67 instead of 76 for 1000. At wider
heads it takes 1.2 to 1.5 times as long.
"""


# Limits for splitting the keys of few queries between programs (`split_kv.py`; bench/results/splits_h200.json).
SPLIT_QUERIES = 128
"""Maximum queries of the longest sequence; longer ones were measured only without a split."""
SPLIT_FROM = 1024
"""Minimum keys; with fewer, combining the parts costs as much as the split saves."""
SPLIT_KEYS = 128
"""Minimum keys of each split. For one sequence of 1024 keys, 8 splits take 16 us, 4 splits 17 us and no split 21 us."""
SPLIT_MOST = 128
"""Maximum splits of a tile: the lse values of all splits are in registers at once."""
SPLIT_PIECE = 2048
"""Minimum keys of a split of a batch-invariant call: a multiple of every tile's keys."""
PLAN_QUERIES = 16
"""Maximum queries of the longest sequence for splits by lengths on the device (`split_plan.py`)."""
SPLIT_PROGRAMS = 2
"""Programs of the portable kernel for each multiprocessor; the kernels of sm_90 have one."""


def select_hopper_tile(
    head_dim_qk: int,
    head_dim_v: int,
    *,
    is_modified: bool = False,
    kind: Kind = "open",
    length: int = NEVER - 1,
    rows: int = NEVER,
    window: int = NEVER,
    is_paged: bool = False,
) -> HopperTile:
    """Returns the first of the narrowest rows for the head dims (at most 256) whose minimum `length` tokens reach, or the last
    one.

    Modified scores need a row with many registers. Head dim 64 has rows for long and for short sequences, and tiles for few `rows`
    of queries and for a narrow `window`, in keys. Keys in pages have their own rows.
    """
    wide_enough = [
        tile
        for tile in (HOPPER_PAGED if is_paged else HOPPER_FORWARD)
        if head_dim_qk <= tile.head_dim_qk and head_dim_v <= tile.head_dim_v and (tile.registers >= 240 or not is_modified)
    ]
    narrowest = [tile for tile in wide_enough if tile[:2] == wide_enough[0][:2]]
    tile = next((tile for tile in narrowest if length >= getattr(tile, f"{kind}_from")), narrowest[-1])
    few = HOPPER_FEW_ROWS.get(tile.head_dim_qk)
    narrow = (HOPPER_PAGED_NARROW_WINDOWS if is_paged else HOPPER_NARROW_WINDOWS).get(tile.head_dim_qk)
    if few is not None and rows <= few["block_m"]:
        return tile._replace(**few)
    if narrow is not None and window <= NARROW_WINDOW and kind == "windowed" and length >= tile.windowed_from:
        return tile._replace(**narrow)
    return tile


class HopperBackwardTile(NamedTuple):
    """A row for the backward on sm_90, like `HopperTile`."""

    head_dim_qk: int
    head_dim_v: int
    block_n: int  # keys of an iteration of dq
    v_stages: int  # stages of v in shared memory, for dq; k has two
    block_m: int  # queries of an iteration of dk and dv
    splits_columns: bool  # the warpgroups split columns of dk and dv: a program has 64 keys instead of 128
    open_from: int  # see `HopperTile`
    causal_from: int
    windowed_from: int
    modified_from: int
    loaded_from: int
    flops_from: int = HOPPER_FLOPS

    @property
    def keys(self) -> int:
        """Keys of a program of dk and dv."""
        return 64 if self.splits_columns else 128


_SHORT_FLOPS = 2**35  # see `HOPPER_FLOPS`: 16384 tokens in short sequences have little work under a causal mask, but many programs

HOPPER_BACKWARD = (
    HopperBackwardTile(64, 64, 128, 2, 64, False, NEVER, 2048, 8192, modified_from=2048, loaded_from=1024),
    HopperBackwardTile(128, 128, 128, 1, 64, False, 512, 512, 8192, modified_from=1024, loaded_from=1024),
    # 9 to 19 % less time than the portable kernels at 256 to 512 tokens on an H200, 2 to 14 % on an H100 (fused_192_*.json).
    HopperBackwardTile(192, 128, 64, 2, 32, False, 256, 256, 8192, modified_from=1024, loaded_from=1024, flops_from=2**33),
    # 21 to 49 % less time than the portable kernels at 256 to 512 tokens (short_backwards_more_h200.json, and _h100).
    HopperBackwardTile(256, 256, 64, 1, 64, True, 256, 256, NEVER, modified_from=1024, loaded_from=1024, flops_from=2**34),
)


def select_hopper_backward_tile(head_dim_qk: int, head_dim_v: int, *, is_modified: bool = False) -> HopperBackwardTile:
    """Like `select_hopper_tile`. For modified scores an iteration of dq has fewer keys, which frees registers."""
    tile = next(tile for tile in HOPPER_BACKWARD if head_dim_qk <= tile.head_dim_qk and head_dim_v <= tile.head_dim_v)
    return tile._replace(block_n=64, v_stages=2) if is_modified and tile.block_n == 128 else tile


class HopperFusedTile(NamedTuple):
    """A row for the fused backward on sm_90. It serves head dims up to `head_dim`, of q and k and of v.

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
    # True: programs, one for each multiprocessor, draw blocks of keys, and load the next block's k while the last one ends. For
    # calls in which each query head has its own key head, or for `HOPPER_FUSED_GROUPED`, from the kind's minimum length to `up_to`
    # tokens.
    is_persistent: bool = False
    up_to: int = NEVER
    # True: persistent programs draw parts of dq too, and convert them once all blocks of keys have been added, without a separate
    # kernel. For calls that `converts_dq` accepts. At 128 it is 2 to 7 % faster without a mask, and up to 7 % slower
    # with one and at 64 (bench/results/short_backwards_h100.json).
    converts: bool = False
    # See `HopperTile`, but also faster than `HOPPER_BACKWARD` (bench/results/lengths_h200.json).
    open_from: int = NEVER
    causal_from: int = NEVER
    windowed_from: int = NEVER
    modified_from: int = NEVER  # bench/results/one_pass_modified_h200.json
    loaded_from: int = NEVER  # with a block mask; a bias was not measured
    flops_from: int = HOPPER_FLOPS


def _for_lengths(tile: HopperFusedTile, **more: int) -> HopperFusedTile:
    """Returns the row for only the kinds and lengths in `more`, which are fields of it."""
    kinds = dict.fromkeys((field for field in tile._fields if field.endswith("_from") and field != "flops_from"), NEVER)
    return tile._replace(**kinds | more)


def persistent(tile: HopperFusedTile, **more: int) -> HopperFusedTile:
    """Returns the row with persistent programs. more: its fields; without a minimum length it serves no kind."""
    return _for_lengths(tile, **more)._replace(is_persistent=True)


_SHORT_ROW = {"causal_from": 384, "up_to": 1023, "flops_from": 2**33}  # `LeastCausal` has the calls that are faster with it


# The rows of a head dim, in the order of `select_hopper_fused_tile`. A call with dropout must reach its own band's length too.
_FUSED = (
    HopperFusedTile(
        64,
        queries=128,
        dp_first=True,
        is_ahead=True,
        pingpong=True,
        dq_stages=1,
        open_from=1024,
        causal_from=1024,
        windowed_from=2048,
    ),
    HopperFusedTile(
        64,
        queries=64,
        dp_first=True,
        is_ahead=True,
        pingpong=False,
        dq_stages=2,
        dv_with_dk=True,
        dout_apart=True,
        windowed_from=2048,
        modified_from=1024,
        loaded_from=1024,
    ),
    HopperFusedTile(128, queries=64, dp_first=True, is_ahead=False, pingpong=False, dq_stages=1, dv_with_dk=True, open_from=512),
    HopperFusedTile(
        128,
        queries=64,
        dp_first=False,
        is_ahead=True,
        pingpong=True,
        dq_stages=1,
        causal_from=1024,
        windowed_from=2048,
        modified_from=1024,
        loaded_from=1024,
    ),
)

HOPPER_FUSED = (
    # bench/results/fused_programs_h100.json, fused_variants_h100.json
    persistent(_FUSED[0], open_from=512, up_to=4096),
    persistent(_FUSED[0], **_SHORT_ROW),
    persistent(_FUSED[0], causal_from=1024, windowed_from=2048, up_to=8192),
    # small_kernels_h100.json and _h200: without a mask, short calls are also faster in the causal order, packed batches by 3 to 7
    # %. In longer calls one tile of dq in shared memory is 2 to 5 % faster than persistent programs (short_backwards_h100.json).
    persistent(_FUSED[3], open_from=512, up_to=4096, converts=True),
    persistent(_FUSED[3], open_from=512, up_to=4096),
    persistent(_FUSED[3], **_SHORT_ROW),
    persistent(_FUSED[3], causal_from=1024, windowed_from=2048, up_to=8192),
    *_FUSED,
)


class HopperFused192Tile(NamedTuple):
    """A row for the fused backward on sm_90 at head dims of q and k above 128, like `HopperFusedTile`."""

    head_dim_qk: int
    head_dim_v: int
    queries: int
    open_from: int
    causal_from: int
    windowed_from: int
    flops_from: int = HOPPER_FLOPS


HOPPER_FUSED_192 = HopperFused192Tile(192, 128, 64, open_from=1024, causal_from=1024, windowed_from=8192)
"""7 to 19 % less time than two kernels from 1024 tokens on an H200, and from 2048 on an H100.

On an H100, 1024 causal tokens take 2 % more (bench/results/fused_192_h200.json and fused_192_h100.json).
"""

HOPPER_FUSED_GROUPED = (
    persistent(_FUSED[0], **_SHORT_ROW),
    _for_lengths(_FUSED[3], **_SHORT_ROW),
    persistent(_FUSED[3], open_from=512, up_to=4096),
    *_FUSED,
)
"""Rows for several query heads to each key head.

Persistent programs take 2 to 5 % less time at head dim 64 below 1024 tokens (bench/results/short_causal_h200.json and _h100). They
take 2 to 7 % less at 128 without a mask (small_kernels_h100.json). Elsewhere they take equal or up to 4 % more time.
"""


class LeastCausal(NamedTuple):
    """Smallest causal call below 1024 tokens for which the fused backward is faster than the portable kernels."""

    tokens: int  # tokens of the longest sequence
    grouped_tokens: int  # the same if several query heads share a key head
    flops: int  # see `flops_from`


LEAST_CAUSAL_LARGE_L2 = LeastCausal(384, 384, 2**33)
"""For an H200's memory: 1 to 11 % less time at 384 tokens, and 9 to 21 % at 512 (bench/results/short_causal_h200.json).

Packed batches of up to 384 to 640 tokens take 6 to 29 % less (short_backwards_more_h200.json).
"""

LEAST_CAUSAL = LeastCausal(704, 640, _SHORT_FLOPS)
"""For an H100: 641 tokens take up to 2 % more time, with grouped heads 3 to 6 % less (bench/results/short_causal_h100.json)."""

LEAST_CAUSAL_PACKED = LeastCausal(704, 704, _SHORT_FLOPS)
"""For packed batches on an H100 (bench/results/short_backwards_more_h100.json).

If the longest sequence has 640 tokens, head dim 128 takes 2 to 8 % more time, and head dim 64 takes 2 to 13 % less.
"""


def select_hopper_fused_tile(
    head_dim_qk: int,
    head_dim_v: int,
    kind: Kind = "open",
    length: int = 0,
    *,
    has_lengths: bool = True,
    is_grouped: bool = False,
) -> HopperFusedTile:
    """Returns the first of the narrowest rows for the head dims (at most 128) that has a length for the kind, or the last one.

    length: tokens of the longest sequence. Rows for some lengths come first; 0 excludes them.
    has_lengths: whether sequences have their own lengths. If so, a row that converts dq is excluded. It is also excluded if it is
    wider than q.
    is_grouped: whether several query heads share a key head.
    """
    narrowest = min(tile.head_dim for tile in HOPPER_FUSED if max(head_dim_qk, head_dim_v) <= tile.head_dim)
    may_convert = not has_lengths and head_dim_qk == narrowest
    every_row = HOPPER_FUSED_GROUPED if is_grouped else HOPPER_FUSED
    rows = [tile for tile in every_row if tile.head_dim == narrowest and may_convert >= tile.converts]
    starts = [getattr(tile, f"{kind}_from") for tile in rows]
    fitting = (
        tile
        for tile, start in zip(rows, starts, strict=True)
        if (start < NEVER if tile in _FUSED else start <= length <= tile.up_to)
    )
    return next(fitting, rows[-1])
