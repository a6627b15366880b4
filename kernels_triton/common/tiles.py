"""Tile sizes as data, per compute capability, element size and head dim. No autotuner: what is here is what runs.

Every row is compiled ahead of time for its architecture, and held to its shared memory, its spills and the matrix instructions
expected of it: one of each kernel in every test run, the ones that matter most with `pytest -m slow`, all of them with `-m
exhaustive`. The fp16 and bf16 rows of 9.0 were chosen among several on an NVIDIA H200, by times at 512 to 4096 tokens, causal and
full (bench/results/tiles_*_h200.json has the last of them); no other row has been timed.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from flexattn.kernels_triton.runtime.launch import INTERPRETER, Tile


def slots_of_heads(heads: int) -> int:
    """Returns how many rows of a tile a query of so many heads takes: the power of two from their number on."""
    return 1 << (heads - 1).bit_length()


def cdiv(x: int, y: int) -> int:
    """Returns x / y, rounded up; on the host, where triton.cdiv takes ten times as long."""
    return -(-x // y)


def split_head_dim(head_dim: int, smallest: int = 16) -> tuple[int, int]:
    """The widths, powers of two and at least `smallest`, of the one or two parts a head dim is taken in; the second may be 0.

    96 = 64 + 32, 80 = 64 + 16, 192 = 128 + 64; where two parts would be as wide as the next power of two, one part is it.
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
    head_dims: int  # the largest d_qk + d_v, as the tiles hold them, that this row serves
    tile: Tile
    loaded: Tile  # with a bias or dropout, whose tiles are beside the scores in registers and shared memory
    # Where another is measured to be faster, or does without spills, and nothing is loaded:
    open: Tile | None = None  # with a band open on both sides: no block is cut, so that larger ones waste nothing
    short: Tile | None = None  # for at most SHORT queries and keys: two small programs hide what one waits for at its ends


SHORT = 1024
"""The one length that decides a kernel: a configuration is compiled at most twice, for what is longer and what is not."""


# By (compute capability, bytes of an element). A device takes the rows of the newest capability that is not newer than its own.
# 8.6, 8.9 and 12.0 have 99 KiB of shared memory for a program, 8.0 has 163, 9.0 and 10.0 have 227.
Table = dict[tuple[int, int], tuple[Row, ...]]

_SMALL = (Row(1088, Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),)

LATENT = 640
"""The row of a forward that takes v from the tiles of k, of head dims up to 576: it has memory for as many columns in all."""

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
    # d 256: dk, dv and two tiles of scores are more than tensor memory has; tiles of 32 keys are multiplied in registers
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
"""The tile of programs of dq beside those of dk and dv in one launch, on 9.0 (bench/results/short_backwards_h100.json).

One stage is 8 to 13 % faster, but ptxas 12.8 makes wrong code of such loops at some head dims (`undefined_registers`).
"""

for _table in (FORWARD, DQ, DKDV):
    _table[120, 2] = _table[86, 2]
    _table[INTERPRETER, 1] = _SMALL

# FP8: PV, and in the backward each product, has an accumulator of its own beside the sum. The rows of 9.0 up to 256 have first the
# fastest of a few on an NVIDIA H200, causal at 8192 (fp8_tiles_h200.json); no other has been timed.
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
    """The committed tile of a problem: its `head_dims`; whether each of them `is_whole`, in one part; whether it `is_loaded` with a
    bias or dropout; whether its band `is_open` on both sides; and its longest sequence, of queries or keys."""
    newest = max(sm for sm, size in table if size == element_size and sm <= capability)
    row = next(row for row in table[newest, element_size] if head_dims <= row.head_dims)
    if is_loaded:
        return row.loaded
    # ptxas miscompiles tiles of one stage whose head dims are in two parts (`sass_registers`).
    if is_open and row.open is not None and (is_whole or row.open.num_stages > 1):
        return row.open
    if length <= SHORT and row.short is not None:
        return row.short
    return row.tile


NEVER = 2**31
"""Longer than any sequence: measured to be slower, or not measured."""


class HopperTile(NamedTuple):
    """A row for the Gluon kernels of sm_90: it serves head dims up to `head_dim_qk` and `head_dim_v`, with zeros past their own."""

    head_dim_qk: int
    head_dim_v: int
    block_m: int  # 64 for each consumer warpgroup
    block_n: int
    num_stages: int  # stages of k and of v in shared memory
    registers: int  # registers of a consumer's thread
    q_stages: int  # stages of q: with 2 the next tile's comes while the last is still needed
    out_parts: int  # that out leaves in, one after the other through one buffer: 2 for want of shared memory
    # How long the longest sequence of a call must be for the row to be used, by its band: from there on it is measured to be faster
    # than `FORWARD` (bench/results/standard_h200.json and lengths_h200.json; 192/128 but for causal at 4096 in a run that was not
    # kept).
    open_from: int
    causal_from: int  # open on the left
    windowed_from: int
    # By bench/results/modified_scores_h200.json (192/128 as 128):
    modified_from: int  # with a softcap, ALiBi or mods, whatever the band
    loaded_from: int  # with a bias or a block mask
    flops_from: int  # least work of a call: with less, its large tiles leave much of the device idle
    # By bench/results/forward_turns_h200.json, as is `out_parts`: through q's buffer instead, out was 1 to 7 % slower.
    # Consumers, at the matrix unit: three are 3 to 6 % faster so. Four are faster in causal calls and slower in others.
    pingpong: bool = True
    # A row is rescaled when its maximum has risen by a factor of 2**8, not each time: 2 to 4 % faster at 64 and at 256, at 64 with
    # windows from 384 keys on 2 to 8 % (bench/results/windows_h100.json), and up to 4 % slower without a band at 128.
    is_lazy: bool = False


class BlackwellTile(NamedTuple):
    """A row for the Gluon kernels of sm_100, which no measurement chose; the fields are those of `HopperTile`."""

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
"""The same for modified scores: what a mod or a bias computes stands beside a row's scores, of which a thread has all."""


class BlackwellBackwardTile(NamedTuple):
    """A row for the backward on sm_100: it serves head dims up to `head_dim`, of q and k and of v. No measurement chose it."""

    head_dim: int
    columns: int  # queries whose scores with a key a thread has at a time
    q_stages: int
    dout_stages: int
    block_m: int = 128
    block_n: int = 128


BLACKWELL_BACKWARD = (BlackwellBackwardTile(64, 64, 2, 2), BlackwellBackwardTile(128, 64, 2, 1))
"""For modified scores with half of the columns, `conditions.backward_tile`."""

HOPPER_FLOPS = 2**36
"""Of a call, from which the kernels of sm_90 are used where nothing with less to do was measured to be faster."""

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
"""Rows for head dims above 256, where two warpgroups have half of out's columns each."""

HOPPER_FEW_ROWS: dict[int, dict[str, Any]] = {
    64: {"block_m": 128, "block_n": 128, "num_stages": 3, "registers": 240, "q_stages": 2, "pingpong": False, "is_lazy": False},
}
"""What changes in a row of this head dim of q and k where all queries of a tile's heads fit in `block_m` rows.

Loading keys is all there is to do then, and rows without queries are only in the way: 64 sequences of 8192 keys take 252 us instead
of 402 (bench/results/few_queries_h200.json).
"""

NARROW_WINDOW = 256
HOPPER_NARROW_WINDOWS: dict[int, dict[str, Any]] = {
    64: {"block_m": 192, "block_n": 64, "num_stages": 4, "registers": 160, "q_stages": 2, "pingpong": False, "is_lazy": True},
}
"""What changes in a row of this head dim of q and k under a window of at most `NARROW_WINDOW` keys.

A tile with more queries goes through more keys that few of them see: windows of 128 keys take 4 to 5 % less time, of 256 3 %
(bench/results/windows_h100.json).
"""

HOPPER_PAGED = (
    HopperTile(64, 64, 128, 128, 2, 240, 1, 1, 2048, 4096, NEVER, NEVER, NEVER, flops_from=2**29),
    HopperTile(64, 64, 128, 128, 3, 240, 2, 1, 256, 256, 256, NEVER, NEVER, 2**29, pingpong=False, is_lazy=True),
    *HOPPER_FORWARD[2:],
)
"""The rows of `HOPPER_FORWARD` over pages, which a lone warp finds beside two consumers: beside more it would be a warpgroup.

At head dim 64, 1024 tokens and more take 0.58 to 0.72 of the portable kernel's time, and 512 tokens beside 31 sequences with one
query each 0.27 (bench/results/paged_prefill_h100.json).
"""
HOPPER_PAGED_NARROW_WINDOWS: dict[int, dict[str, Any]] = {64: HOPPER_NARROW_WINDOWS[64] | {"block_m": 128, "registers": 240}}
"""The same for `HOPPER_NARROW_WINDOWS`: windows of 128 keys take 0.61 to 0.65 of the portable kernel's time (the same file)."""

Kind = Literal["open", "causal", "windowed", "modified", "loaded"]
"""What decides a row beside the head dims: which of its `..._from` a call must reach."""

HOPPER_BYTES = 2**23
"""Of k and v, where few queries make loading them all there is to do: of less, both families take the 16 us of two launches."""

HOPPER_PAGED_BYTES = 2**22
"""The same of k and v in pages: 1024 keys of 8 heads take 14.2 us instead of 17.9 (bench/results/overlap_h200.json)."""

HOPPER_UNSHARED_BYTES = 2**30
"""Of k and v, where queries are few and each query head has a key head of its own: 64 sequences of 2048 keys and 32 such heads take
518 us instead of 597 (bench/results/decode_paged_h200.json); less was not measured. Over pages, which the portable kernel reads at
half its speed, `HOPPER_PAGED_BYTES` serves all calls."""

# As `open_from` and the like, by a row's head dim of q and k (bench/results/dropout_h200.json, decode_h200.json and
# splits_h200.json).
HOPPER_DROPOUT_FROM = {64: 1024, 128: 512, 192: 4096, 256: 4096}
"""With dropout, forward and backward, whatever the band; a window and modified scores need their own length too."""
HOPPER_SHARED_FROM = {64: 1024, 128: 1024, 192: 4096, 256: 8192}
"""Keys, where query heads of one key head share a tile (`hopper_forward.heads_of_a_tile`): few queries, as in decoding."""
HOPPER_PAGED_WINDOW_FROM = {64: 1024}
"""Keys of a window, for few queries over pages: with 64 sequences the portable kernel takes 19 us instead of 26 for windows of 128
keys and 67 instead of 76 for 1000, and at wider heads 1.2 to 1.5 times as long (bench/results/few_queries_windows_h100.json)."""


# Where the keys of few queries are split between programs (`splits.py`; bench/results/splits_h200.json).
SPLIT_QUERIES = 128
"""Of the longest sequence, at most: what has more was measured without a split."""
SPLIT_FROM = 1024
"""Keys; of fewer, combining the parts would cost what they save."""
SPLIT_KEYS = 128
"""At least, for each split: of 1024 keys of one sequence 8 splits take 16 us, 4 17 and one 21."""
SPLIT_MOST = 128
"""Splits of a tile, at most: the lse of all of them are in registers at once."""
SPLIT_PIECE = 2048
"""Keys of a split of a batch-invariant call, at least: a multiple of every tile's keys."""
PLAN_QUERIES = 16
"""Of the longest sequence, at most, where the keys are split by the lengths that the device finds (`split_plan.py`)."""
SPLIT_PROGRAMS = 2
"""Programs of the portable kernel for each multiprocessor; those of sm_90 have one."""


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
    """Returns the first of the narrowest rows for the head dims (at most 256) that `length` tokens are enough for, or the last.

    Scores that are modified need a row with registers. Head dim 64 has a row for what is long, one for what is not, and tiles for
    few `rows` of queries and for a narrow `window`, in keys. Keys in pages have rows of their own.
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
    """A row for the backward on sm_90, as `HopperTile`."""

    head_dim_qk: int
    head_dim_v: int
    block_n: int  # keys that dq takes at a time
    v_stages: int  # stages of v in shared memory, for dq; k has two
    block_m: int  # queries that dk and dv take at a time
    splits_columns: bool  # the warpgroups split columns of dk and dv: 64 keys a program instead of 128
    open_from: int  # as in `HopperTile`
    causal_from: int
    windowed_from: int
    modified_from: int
    loaded_from: int
    flops_from: int = HOPPER_FLOPS

    @property
    def keys(self) -> int:
        """Keys of a program of dk and dv."""
        return 64 if self.splits_columns else 128


_SHORT_FLOPS = 2**35  # as `HOPPER_FLOPS`: 16384 tokens of a short length have little to do under a causal mask, but many programs

HOPPER_BACKWARD = (
    HopperBackwardTile(64, 64, 128, 2, 64, False, NEVER, 2048, 8192, modified_from=2048, loaded_from=1024),
    HopperBackwardTile(128, 128, 128, 1, 64, False, 512, 512, 8192, modified_from=1024, loaded_from=1024),
    # 9 to 19 % less time than the portable kernels at 256 to 512 tokens on an H200, on an H100 2 to 14 % (fused_192_*.json).
    HopperBackwardTile(192, 128, 64, 2, 32, False, 256, 256, 8192, modified_from=1024, loaded_from=1024, flops_from=2**33),
    # 21 to 49 % less time than the portable kernels at 256 to 512 tokens (short_backwards_more_h200.json, and _h100).
    HopperBackwardTile(256, 256, 64, 1, 64, True, 256, 256, NEVER, modified_from=1024, loaded_from=1024, flops_from=2**34),
)


def select_hopper_backward_tile(head_dim_qk: int, head_dim_v: int, *, is_modified: bool = False) -> HopperBackwardTile:
    """As `select_hopper_tile`; for modified scores dq takes fewer keys at a time, which leaves them registers."""
    tile = next(tile for tile in HOPPER_BACKWARD if head_dim_qk <= tile.head_dim_qk and head_dim_v <= tile.head_dim_v)
    return tile._replace(block_n=64, v_stages=2) if is_modified and tile.block_n == 128 else tile


class HopperFusedTile(NamedTuple):
    """A row for the backward on sm_90 in one pass: it serves head dims up to `head_dim`, of q and k and of v.

    Percentages without a source are of bench/results/one_pass_orders_h200.json, at 16384 tokens.
    """

    head_dim: int
    # Queries of an iteration. 128 are 22 % faster than 64 at head dim 64; modified scores and dropout lack registers for that.
    queries: int
    # True: the first product of a turn is dp and the last dq of the turn before, so that a warpgroup may be half a turn ahead of
    # the other; else dq is the first, and dp comes behind dv. At 128 5 % faster without a mask, and 6 % slower with a causal one.
    dp_first: bool
    # True: scores are begun in the turn before, under its last products: 5 % faster at 64 with a causal mask, and 5 to 13 %
    # slower at 128 with dp first.
    is_ahead: bool
    # True: the warpgroups take turns with what is between scores and p: 1 to 8 % faster at 64, 2 to 3 % at 128.
    pingpong: bool
    # Tiles of dq in shared memory. With one instead of two a causal call at 128 is 4 to 6 % faster
    # (bench/results/one_pass_ported_h200.json).
    dq_stages: int
    # With dp first, whether dv and dk are waited for at once. With 128 queries and scores that are ahead ptxas serialises the
    # products for it.
    dv_with_dk: bool = False
    # True: dout has a barrier of its own to be released by. It needs none, having as many slots as q; but where scores were the
    # first product of a turn, of 64 queries, the consumers, which meet at it, were 2 to 7 % faster with it at 64, and up to 9 %
    # slower at 128 (bench/results/hopper_turns_h200.json).
    dout_apart: bool = False
    # True: programs, one for each multiprocessor, draw blocks of keys, and load the next block's k while the one before ends. For
    # calls in which each query head has a key head of its own, or of `HOPPER_FUSED_GROUPED`, of at least the kind's length and at
    # most `up_to` tokens.
    is_persistent: bool = False
    up_to: int = NEVER
    # True: persistent programs draw parts of dq too, and convert them once all blocks of keys have been added; no kernel of its own
    # does so. For calls that `conditions.converts_dq` takes. At 128 without a mask 2 to 7 % faster, with one and at 64 up to 7 %
    # slower (bench/results/short_backwards_h100.json).
    converts: bool = False
    # As in `HopperTile`, but faster than `HOPPER_BACKWARD` too (bench/results/lengths_h200.json).
    open_from: int = NEVER
    causal_from: int = NEVER
    windowed_from: int = NEVER
    modified_from: int = NEVER  # bench/results/one_pass_modified_h200.json
    loaded_from: int = NEVER  # with a block mask; a bias was not measured
    flops_from: int = HOPPER_FLOPS


def _for_lengths(tile: HopperFusedTile, **more: int) -> HopperFusedTile:
    """Returns the row for the kinds and lengths that `more`, its fields, has, and no others."""
    kinds = dict.fromkeys((field for field in tile._fields if field.endswith("_from") and field != "flops_from"), NEVER)
    return tile._replace(**kinds | more)


def persistent(tile: HopperFusedTile, **more: int) -> HopperFusedTile:
    """Returns the row with persistent programs. more: its fields; without a length of its own it is for no kind."""
    return _for_lengths(tile, **more)._replace(is_persistent=True)


_SHORT_ROW = {"causal_from": 384, "up_to": 1023, "flops_from": 2**33}  # `LeastCausal` says which of these calls are faster with it


# The rows of a head dim in the order of `select_hopper_fused_tile`. A call with dropout has the length of its own band too.
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
    # small_kernels_h100.json and _h200: without a mask too short calls are faster in the order of those with one, packed batches
    # by 3 to 7 %. Above, one tile of dq in shared memory is 2 to 5 % faster than persistent programs (short_backwards_h100.json).
    persistent(_FUSED[3], open_from=512, up_to=4096, converts=True),
    persistent(_FUSED[3], open_from=512, up_to=4096),
    persistent(_FUSED[3], **_SHORT_ROW),
    persistent(_FUSED[3], causal_from=1024, windowed_from=2048, up_to=8192),
    *_FUSED,
)


class HopperFused192Tile(NamedTuple):
    """A row for the backward on sm_90 in one pass at head dims of q and k above 128, as `HopperFusedTile`."""

    head_dim_qk: int
    head_dim_v: int
    queries: int
    open_from: int
    causal_from: int
    windowed_from: int
    flops_from: int = HOPPER_FLOPS


HOPPER_FUSED_192 = HopperFused192Tile(192, 128, 64, open_from=1024, causal_from=1024, windowed_from=8192)
"""7 to 19 % less time than two kernels from 1024 tokens on an H200, from 2048 on an H100, where 1024 causal tokens take 2 % more
(bench/results/fused_192_h200.json and fused_192_h100.json)."""

HOPPER_FUSED_GROUPED = (
    persistent(_FUSED[0], **_SHORT_ROW),
    _for_lengths(_FUSED[3], **_SHORT_ROW),
    persistent(_FUSED[3], open_from=512, up_to=4096),
    *_FUSED,
)
"""Rows for several query heads to each key head.

Persistent programs take 2 to 5 % less time at head dim 64 below 1024 tokens (bench/results/short_causal_h200.json and _h100), 2 to
7 % less at 128 without a mask (small_kernels_h100.json), and elsewhere as much or up to 4 % more.
"""


class LeastCausal(NamedTuple):
    """Least causal call below 1024 tokens that the fused backward is faster for than the portable kernels are."""

    tokens: int  # the longest sequence's
    grouped_tokens: int  # the same with several query heads to each key head
    flops: int  # as `flops_from`


LEAST_CAUSAL_LARGE_L2 = LeastCausal(384, 384, 2**33)
"""With an NVIDIA H200's memory: 1 to 11 % less time at 384 tokens, and 9 to 21 % at 512 (bench/results/short_causal_h200.json);
6 to 29 % in packed batches of up to 384 to 640 tokens (short_backwards_more_h200.json)."""

LEAST_CAUSAL = LeastCausal(704, 640, _SHORT_FLOPS)
"""With an H100's: 641 tokens take up to 2 % more time, with grouped heads 3 to 6 % less (bench/results/short_causal_h100.json)."""

LEAST_CAUSAL_PACKED = LeastCausal(704, 704, _SHORT_FLOPS)
"""With an H100's, for packed batches: with 640 tokens in the longest sequence head dim 128 takes 2 to 8 % more time, and 64 2 to
13 % less (bench/results/short_backwards_more_h100.json)."""


def select_hopper_fused_tile(
    head_dim_qk: int,
    head_dim_v: int,
    kind: Kind = "open",
    length: int = 0,
    *,
    has_lengths: bool = True,
    is_grouped: bool = False,
) -> HopperFusedTile:
    """Returns the first of the narrowest rows for the head dims (at most 128) that has a length for the kind, or the last.

    length: tokens of the longest sequence, by which a row that is for some lengths is taken before others; 0: none is.
    has_lengths: whether sequences have lengths of their own. With them no row that converts dq is taken, nor is one wider than q.
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
