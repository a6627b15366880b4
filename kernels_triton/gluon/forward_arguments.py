"""The forward's constants and arguments, and its tiles in shared memory."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flexattn.kernels_triton.common.arguments import Band, BlockMaskLists, Dropout, Lengths, Pages, Pointer, Rows, Scores
from flexattn.kernels_triton.common.features import with_features
from flexattn.kernels_triton.common.plan_pieces import Plan
from flexattn.kernels_triton.gluon.descales import Descales
from flexattn.kernels_triton.gluon.descriptors import Step
from flexattn.kernels_triton.gluon.pairs import Pair
from flexattn.kernels_triton.gluon.pipeline import ForwardBarriers
from flexattn.kernels_triton.gluon.tile_scheduler import Work


@with_features
class ForwardMeta(NamedTuple):
    """Constants that a kernel is compiled for, besides `Features`."""

    HAS_SINK: bool
    HAS_OFFSET: bool
    HAS_MAX_LOGIT: bool
    HEADS: int  # query heads of a tile; its rows are the first query of each head, then the second, ..
    GROUP: int  # rows of one query: the next power of two from HEADS; the last rows may belong to no head
    IS_SPLIT: bool  # KV is split across programs, and each writes a partial result, see `split_ranges.Parts`
    IS_PLANNED: bool  # split points come from a `Plan`
    BLOCK_M: int
    BLOCK_N: int
    PAGE_ROWS: int  # keys of a page that one copy loads; 0: no pages
    QK0: int  # head dims of the tiles, in one or two parts
    QK1: int
    V0: int  # columns of v and of a part of a split: both of the next two
    VALUES0: int  # widths of the one or two parts of v's head dim; the second may be 0
    VALUES1: int
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
    NUMBERS: int  # integers of a tile message, see `forward_work.pack_tile`
    ASKS_OF_BLOCKS: bool  # the mask_mod's block test runs before the mask_mod is evaluated for each query and key
    SENDS_LISTS: bool  # with a block mask, the loader cuts its lists for the consumers
    IS_MODIFIED: bool  # in FP8: a logit is more than a scaled score
    IS_LATENT: bool = False  # v is the first columns of k, and is read from k's tiles
    WIDTH_V: int = 0  # columns of out, if `Results.out` is set
    ALIGN: int = 1  # strides of `Results.out` are multiples of it
    KEYS1: int = 0  # few keys in two parts: 64 and so many
    IS_FP8: bool = False
    PARTS: int = 1  # for this and the rest, in FP8: parts of V0 columns in which v is summed
    Q_BLOCKWISE: bool = False  # the scales of q, of k, of v vary along the sequence
    K_BLOCKWISE: bool = False
    V_BLOCKWISE: bool = False


class Cut(NamedTuple):
    """The form of a KV split: are the keys split, and does a plan give the split points?"""

    is_split: bool
    is_planned: bool


class Descriptors(NamedTuple):
    q: Pair
    k: Pair
    v: TensorDescriptor  # transposed in FP8
    out: TensorDescriptor | None  # None if out is fp32
    v1: TensorDescriptor | None = None  # the second parts of v and out, if META.VALUES1 > 0
    out1: TensorDescriptor | None = None


class Steps(NamedTuple):
    q: Step
    k: Step
    v: Step | None  # None in FP8
    out: Step | None


class Results(NamedTuple):
    """Results that are not stored by a descriptor."""

    lse_ptr: Pointer
    max_logit_ptr: Pointer  # or None; [h], -inf before the launch
    parts_ptr: Pointer  # with IS_SPLIT, out of the parts; lse then also belongs to the parts
    whole_lse_ptr: Pointer  # with IS_PLANNED, lse of tiles that have no parts
    # Set if out is stored from registers: if HEADS is no power of two, because a copy would also write other heads; in fp32; with a
    # plan
    out: Rows | None


class Arguments(NamedTuple):
    descriptors: Descriptors | None  # None for mma.sync, like `steps`
    results: Results
    descales: Descales | None  # in FP8, like `v_blocks`
    work: Work
    num_splits: int | None
    plan: Plan | None  # instead of `work` and `num_splits`
    lengths_q: Lengths
    lengths_kv: Lengths
    v_blocks: int | None  # transposed tiles of a head of v
    pages: Pages | None
    band: Band
    steps: Steps | None
    scores: Scores
    softmax_offset_ptr: Pointer
    dropout: Dropout | None  # None in FP8
    lists: BlockMaskLists | None  # lists of key blocks


class Tiles(NamedTuple):
    """In shared memory: q by consumer and stage, k and v by stage, out by consumer; v1 and out1 are their second parts, or ()."""

    q: Pair
    k: Pair
    v: gl.shared_memory_descriptor
    out: gl.shared_memory_descriptor
    ones: gl.shared_memory_descriptor | None = None  # in FP8: operand of the product that sums p
    v1: Any = None
    out1: Any = None


class Buffers(NamedTuple):
    tiles: Tiles
    barriers: ForwardBarriers
