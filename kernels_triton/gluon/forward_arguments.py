"""The forward's constants and arguments, and its tiles in shared memory."""

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
from flexattn.kernels_triton.gluon.descriptors import Step
from flexattn.kernels_triton.gluon.operands import ROWS
from flexattn.kernels_triton.gluon.pages import rows_of_a_copy
from flexattn.kernels_triton.gluon.pairs import (
    Pair,
)
from flexattn.kernels_triton.gluon.pipeline import (
    ForwardBarriers,
)
from flexattn.kernels_triton.gluon.tile_scheduler import (
    Work,
)
from flexattn.kernels_triton.runtime.launch import Tile


@with_features
class ForwardMeta(NamedTuple):
    """Constants that a kernel is compiled for, besides `Features`."""

    HAS_SINK: bool
    HAS_OFFSET: bool
    HAS_MAX_LOGIT: bool
    HEADS: int  # query heads of a tile; its rows are the first query of each head, then the second, ..
    GROUP: int  # rows of one query: the next power of two from HEADS; the last rows may belong to no head
    IS_SPLIT: bool  # KV is split across programs, and each writes a partial result, see `split_kv.Parts`
    IS_PLANNED: bool  # split points come from `split_plan`
    BLOCK_M: int
    BLOCK_N: int
    PAGE_ROWS: int  # keys of a page that one copy loads; 0: no pages
    QK0: int  # head dims of the tiles, in one or two parts
    QK1: int
    V0: int
    STAGES: int
    CONSUMERS: int
    PINGPONG: bool  # consumers take turns at the tensor cores
    LAZY: bool  # rows are rescaled only if their maximum has risen by much
    OUT_PARTS: int
    REGISTERS: int
    HAS_IDLE: bool  # some consumers of a tile may have no queries
    SKIPS: bool  # consumers skip key blocks that none of their queries sees
    Q_STAGES: int
    UNMASKED_LOOP: bool  # separate loop without masks for key blocks that all queries see; other blocks may be cut
    HAS_CUT_LOOP: bool  # loop with masks for blocks that may be cut, like most blocks in a narrow window
    # Integers of a tile message: (first query, first head, batch, split). With lengths, (first token, queries, keys) follow; with a
    # plan, (end of the split, part); with a block mask, the results of `cut_key_lists` and `unmasked_blocks`.
    NUMBERS: int
    IS_LATENT: bool  # v is the first columns of k, and is read from k's tiles
    ASKS_OF_BLOCKS: bool  # the mask_mod's block test runs before the mask_mod is evaluated for each query and key
    WIDTH_V: int  # columns of out, if `Results.out` is set
    ALIGN: int  # strides of `Results.out` are multiples of it


class Descriptors(NamedTuple):
    q: Pair
    k: Pair
    v: Any
    out: Any  # None if out is fp32


class Steps(NamedTuple):
    q: Step
    k: Step
    v: Step
    out: Step


class Results(NamedTuple):
    """Results that are not stored by a descriptor."""

    lse_ptr: Any
    max_logit_ptr: Any  # or None; [h], -inf before the launch
    parts_ptr: Any  # with IS_SPLIT, out of the parts; lse then also belongs to the parts
    whole_lse_ptr: Any  # with IS_PLANNED, lse of tiles that have no parts
    # Set if out is stored from registers: if HEADS is no power of two, because a copy would also write other heads; in fp32; with a
    # plan
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
    """Returns the maximum number of key blocks that all queries of a consumer see completely."""
    x = problem
    if x.window_left is None or x.window_right is None:
        return math.inf
    return (x.window_left + x.window_right + 2 - queries) // tile.block_n


def number_of_tiles(problem: Problem, tile: HopperTile, group: int) -> int:
    """Returns the number of query tiles, each with `group` heads."""
    queries = tile.block_m // slots_of_heads(group)
    return -(-problem.longest_q // queries) * problem.batch * problem.num_heads // group


class Cut(NamedTuple):
    """The form of a KV split: are the keys split, and does a plan give the split points?"""

    is_split: bool
    is_planned: bool


def forward_meta(
    problem: Problem, tile: HopperTile, group: int, cut: Cut, has_max_logit: bool = False, rows: int = ROWS.value
) -> Any:
    """Returns the `ForwardMeta` of a kernel whose consumers have `rows` rows each, of `group` heads."""
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
        LAZY=tile.is_lazy and not has_max_logit and not x.is_batch_invariant,  # one row decides for the others of its warpgroup
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
    """Returns the meta of a kernel that stores out from registers."""
    return meta._replace(WIDTH_V=problem.v.shape[-1], ALIGN=problem.meta(tile, (out,)).ALIGN)


class SplitKeys(NamedTuple):
    """The number of KV splits, or the plan; None: not split that way."""

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
