"""The forward's constants and arguments, and its tiles in shared memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flexattn.kernels_triton.common.arguments import Parts, Rows
from flexattn.kernels_triton.common.features import is_plain, with_features
from flexattn.kernels_triton.common.problem import Problem
from flexattn.kernels_triton.common.tiles import slots_of_heads, split_head_dim
from flexattn.kernels_triton.gluon.forward_arguments import Arguments, Cut
from flexattn.kernels_triton.mma.tiles import MmaTile


@with_features
class MmaMeta(NamedTuple):
    """Constants that the forward is compiled for, besides `Features`; names are those that shared functions read."""

    HAS_SINK: bool
    HAS_OFFSET: bool
    HAS_MAX_LOGIT: bool
    HEADS: int
    GROUP: int
    IS_SPLIT: bool
    IS_PLANNED: bool
    BLOCK_M: int
    BLOCK_N: int
    HAS_PAGES: bool
    IS_FP8: bool  # widths of tiles are then in words of two numbers, see `fp8`
    IS_E5M2: bool  # for this and the next two, in FP8
    IS_MODIFIED: bool  # a logit is more than a scaled score
    HAS_BLOCK_SCALES: bool  # the descales of k or of v vary along the sequence
    SENDS_LISTS: bool  # with a block mask, as in `ForwardMeta`
    WARPS: int
    QK0: int  # widths of the one or two parts of a head dim
    QK1: int
    V0: int  # columns of a part of a split: both parts of v
    VALUES0: int
    VALUES1: int
    HEAD_DIM_QK: int
    HEAD_DIM_V: int
    WIDTH_V: int  # columns of out
    STAGES: int
    HOLDS_Q: bool
    ASKS_OF_BLOCKS: bool
    CONSUMERS: int = 1
    LAZY: bool = False
    HAS_CUT_LOOP: bool = False
    ALIGN: int = 8


def _per_word(problem: Problem) -> int:
    return 2 if problem.is_fp8 else 1  # numbers


def columns_of_part(problem: Problem) -> int:
    """Returns the columns of the result of a KV split: the widths of v's parts."""
    return _per_word(problem) * sum(split_head_dim(problem.v.shape[-1] // _per_word(problem)))


def forward_meta(problem: Problem, tile: MmaTile, group: int, cut: Cut, has_max_logit: bool) -> Any:
    """Returns the `MmaMeta` of a launch whose tiles have `group` heads each."""
    x = problem
    head_dim_qk, head_dim_v = (t.shape[-1] // _per_word(x) for t in (x.q, x.v))
    qk, values = split_head_dim(head_dim_qk), split_head_dim(head_dim_v)
    return MmaMeta(
        **x.features._asdict(),
        HAS_SINK=x.has_sink,
        HAS_OFFSET=x.softmax_offset is not None,
        HAS_MAX_LOGIT=has_max_logit,
        HEADS=group,
        GROUP=slots_of_heads(group),
        IS_SPLIT=cut.is_split,
        IS_PLANNED=cut.is_planned,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        HAS_PAGES=x.page_table is not None,
        IS_FP8=x.is_fp8,
        IS_E5M2=x.q.dtype is torch.float8_e5m2,
        IS_MODIFIED=not is_plain(x.features),
        HAS_BLOCK_SCALES=x.has_block_scales,
        SENDS_LISTS=x.block_mask is not None,
        WARPS=tile.warps,
        QK0=qk[0],
        QK1=qk[1],
        V0=columns_of_part(x),
        VALUES0=values[0],
        VALUES1=values[1],
        HEAD_DIM_QK=head_dim_qk,
        HEAD_DIM_V=head_dim_v,
        WIDTH_V=x.v.shape[-1],
        STAGES=tile.num_stages,
        HOLDS_Q=tile.holds_q,
        ASKS_OF_BLOCKS=x.asks_of_blocks(group),
    )


class MmaArguments(NamedTuple):
    q: Rows
    k: Rows
    v: Rows
    call: Arguments  # without descriptors and their steps


@gluon.constexpr_function
def rows_layout(width, warps):
    # Layout of rows of `width` columns for copies of 16 bytes
    across = min(width // 8, 32)
    return gl.BlockedLayout([1, 8], [32 // across, across], [warps, 1], [1, 0])


@gluon.constexpr_function
def swizzled(width):
    # Eight rows of 16 bytes are in different banks
    return gl.SwizzledSharedLayout(8, max(1, 64 // width), min(8, width // 8), [1, 0])


@gluon.constexpr_function
def product_layout(warps, across=1):
    # Layout of a product. Without warps `across`, each warp has all columns of its rows
    return gl.NVMMADistributedLayout([2, 0], [warps, across], [16, 8])


@gluon.jit
def allocate_parts(DTYPE: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr, WIDTH0: gl.constexpr, WIDTH1: gl.constexpr):
    first = gl.allocate_shared_memory(DTYPE, [STAGES, ROWS, WIDTH0], swizzled(WIDTH0))
    if WIDTH1 > 0:
        return Parts(first=first, second=gl.allocate_shared_memory(DTYPE, [STAGES, ROWS, WIDTH1], swizzled(WIDTH1)))
    else:
        return Parts(first=first, second=first)
