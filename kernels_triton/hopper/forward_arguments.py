"""The forward's arguments for sm_90: what its kernels are compiled for, what they are given, and their tiles in shared memory."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from torch import Tensor

from flexattn.kernels_triton.common.arguments import Band, BlockMaskLists, Dropout, Lengths, Pages, Rows, Scores
from flexattn.kernels_triton.common.problem import Problem, with_features
from flexattn.kernels_triton.common.split_plan import (
    Plan,
)
from flexattn.kernels_triton.common.tiles import (
    HopperTile,
    slots_of_heads,
    split_head_dim,
)
from flexattn.kernels_triton.hopper.descriptors import Step
from flexattn.kernels_triton.hopper.operands import ROWS
from flexattn.kernels_triton.hopper.pages import rows_of_a_copy
from flexattn.kernels_triton.hopper.pairs import (
    Pair,
)
from flexattn.kernels_triton.hopper.pipeline import (
    ForwardBarriers,
)
from flexattn.kernels_triton.hopper.tile_scheduler import (
    Work,
)
from flexattn.kernels_triton.runtime.launch import Tile


@with_features
class ForwardMeta(NamedTuple):
    """Constants that a kernel is compiled for, besides `Features`."""

    HAS_SINK: bool
    HAS_OFFSET: bool
    HAS_MAX_LOGIT: bool
    HEADS: int  # query heads of a tile, whose rows are the first query of each, then the second, ..
    GROUP: int  # rows that a query's heads take: the power of two from HEADS on, so that the last may be rows of no head
    IS_SPLIT: bool  # the keys, between programs: each leaves a part, as `splits.Parts` has them, or with
    IS_PLANNED: bool  # as `split_plan` has them
    BLOCK_M: int
    BLOCK_N: int
    PAGE_ROWS: int  # keys that one copy brings of a page; 0: they lie in no pages
    QK0: int  # head dims as the tiles hold them, in one or two parts
    QK1: int
    V0: int
    STAGES: int
    CONSUMERS: int
    PINGPONG: bool  # between consumers, at the tensor cores
    LAZY: bool  # rows are rescaled when their maximum has risen by much
    OUT_PARTS: int
    REGISTERS: int
    HAS_IDLE: bool  # a tile may leave consumers without queries
    SKIPS: bool  # consumers skip the blocks of keys that none of their queries sees
    Q_STAGES: int
    UNMASKED_LOOP: bool  # a loop without masks, for blocks of keys that all queries see, among others that may be cut
    HAS_CUT_LOOP: bool  # a loop with masks, for blocks that may be cut, as are most in a narrow window
    # Numbers that make a tile: (first query, first head, batch, split), with lengths (first token, queries, keys) too, with a plan
    # (end of the split, part), and with a block mask what `cut_key_lists` and `_unmasked_blocks` find
    NUMBERS: int
    IS_LATENT: bool  # v is the first columns of k, and read from its tiles
    ASKS_OF_BLOCKS: bool  # the mask_mod is asked of a whole block before it is asked of each query and key
    WIDTH_V: int  # columns of out, where `Results.out` is it
    ALIGN: int  # strides of `Results.out` are multiples of it


class Descriptors(NamedTuple):
    q: Pair
    k: Pair
    v: Any
    out: Any  # None for one in fp32


class Steps(NamedTuple):
    q: Step
    k: Step
    v: Step
    out: Step


class Results(NamedTuple):
    """Results that no descriptor stores."""

    lse_ptr: Any
    max_logit_ptr: Any  # or None; [h], -inf before
    parts_ptr: Any  # with IS_SPLIT, where out goes; lse is then of the parts too
    whole_lse_ptr: Any  # with IS_PLANNED, that of tiles that have no parts
    # Where registers store it: where HEADS is no power of two, as a copy would write other heads too; in fp32; with a plan
    out: Rows | None


class Arguments(NamedTuple):
    descriptors: Descriptors
    results: Results
    work: Work
    num_splits: int | None
    plan: Plan | None  # instead of `work` and `num_splits`
    lengths_q: Lengths
    lengths_kv: Lengths
    pages: Pages | None
    band: Band
    steps: Steps
    scores: Scores
    softmax_offset_ptr: Any
    dropout: Dropout
    lists: BlockMaskLists | None  # lists of key blocks


class Tiles(NamedTuple):
    """In shared memory: q by consumer and stage, k and v by stage, out by consumer."""

    q: Pair
    k: Pair
    v: Any
    out: Any


class Buffers(NamedTuple):
    tiles: Tiles
    barriers: ForwardBarriers


def _whole_blocks_of_window(problem: Problem, tile: HopperTile, queries: int) -> float:
    """Number of blocks of keys, at most, that all queries of a consumer see whole."""
    x = problem
    if x.window_left is None or x.window_right is None:
        return math.inf
    return (x.window_left + x.window_right + 2 - queries) // tile.block_n


def number_of_tiles(problem: Problem, tile: HopperTile, group: int) -> int:
    """Number of tiles of queries, of so many heads each."""
    queries = tile.block_m // slots_of_heads(group)
    return -(-problem.longest_q // queries) * problem.batch * problem.num_heads // group


class Cut(NamedTuple):
    """Answers to two questions: are keys cut into parts, and by a plan?"""

    is_split: bool
    is_planned: bool


def forward_meta(
    problem: Problem, tile: HopperTile, group: int, cut: Cut, has_max_logit: bool = False, rows: int = ROWS.value
) -> Any:
    """Returns the `ForwardMeta` of a kernel whose consumers have so many rows each, of `group` heads."""
    x = problem
    qk0, qk1 = split_head_dim(tile.head_dim_qk)
    slots = slots_of_heads(group)
    has_lengths = x.has_lengths
    is_banded = x.window_left is not None or x.window_right is not None
    is_narrow = x.block_mask is None and _whole_blocks_of_window(x, tile, rows // slots) < 2
    has_idle = has_lengths or x.longest_q * slots <= tile.block_m - rows
    return ForwardMeta(
        HAS_SINK=x.has_sink,
        HAS_OFFSET=x.softmax_offset is not None,
        HAS_MAX_LOGIT=has_max_logit,
        **x.features._asdict(),
        HEADS=group,
        GROUP=slots,
        IS_SPLIT=cut.is_split,
        IS_PLANNED=cut.is_planned,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        PAGE_ROWS=rows_of_a_copy(x, tile.block_n),
        QK0=qk0,
        QK1=qk1,
        V0=tile.head_dim_v,
        STAGES=tile.num_stages,
        CONSUMERS=tile.block_m // rows,
        PINGPONG=tile.pingpong,
        LAZY=tile.is_lazy and not has_max_logit and not x.is_batch_invariant,  # one row decides for others of its warpgroup
        OUT_PARTS=tile.out_parts,
        REGISTERS=tile.registers,
        HAS_IDLE=has_idle,
        SKIPS=x.block_mask is None and (has_idle or is_banded),
        Q_STAGES=tile.q_stages,
        UNMASKED_LOOP=(is_banded and not is_narrow) or x.block_mask is not None,
        HAS_CUT_LOOP=is_narrow or x.block_mask is not None,
        NUMBERS=4 + 3 * has_lengths + 2 * cut.is_planned + 6 * (x.block_mask is not None),
        IS_LATENT=False,
        ASKS_OF_BLOCKS=x.asks_of_blocks(group),
        WIDTH_V=0,
        ALIGN=1,
    )


def with_rows_of(meta: Any, problem: Problem, tile: Tile, out: Tensor) -> Any:
    """Returns the meta of a kernel whose registers store out."""
    return meta._replace(WIDTH_V=problem.v.shape[-1], ALIGN=problem.meta(tile, (out,)).ALIGN)


class SplitKeys(NamedTuple):
    """The number of parts that keys are cut into, or the plan; None: not so."""

    count: int | None
    plan: Plan | None


def forward_arguments(
    problem: Problem, descriptors: Descriptors, steps: Steps, results: Results, work: Work, split: SplitKeys
) -> Arguments:
    """Returns a kernel's arguments."""
    x = problem
    return Arguments(
        descriptors=descriptors,
        steps=steps,
        results=results,
        work=work,
        num_splits=split.count,
        plan=split.plan,
        lengths_q=x.lengths_q,
        lengths_kv=x.lengths_kv,
        pages=x.pages,
        band=x.band,
        scores=x.scores,
        softmax_offset_ptr=x.softmax_offset,
        dropout=x.dropout,
        lists=x.lists("kv"),
    )
