"""Host side of the sm_90 backwards that share a loader or a consumer, in 16 bits and in FP8."""

from __future__ import annotations

from typing import NamedTuple

from flexattn.kernels_triton.common.features import is_plain, with_features
from flexattn.kernels_triton.common.problem import Problem


class Stages(NamedTuple):
    """Stages in shared memory of the operands that are loaded block by block, by the product that reads them.

    For dq: k, v, none, k in 16 bits. For dk and dv: q, dout, dout in 16 bits, q in 16 bits.
    """

    scores: int
    dp: int
    p: int
    ds: int


@with_features
class BackwardMeta(NamedTuple):
    """Constants that a kernel is compiled for, besides `Features`."""

    IS_FP8: bool  # q, k, v and dout are FP8, with copies of q, k and dout in 16 bits
    IS_PLAIN: bool  # a logit is a scaled score
    BLOCK_M: int
    BLOCK_N: int
    STATISTICS: int  # queries of a tile of statistics
    QK0: int
    QK1: int
    V0: int
    STAGES_SCORES: int  # for this and the next three see `Stages`
    STAGES_DP: int
    STAGES_P: int
    STAGES_DS: int
    SHARES_TILES: bool  # gradients are stored through tiles of operands that both consumers read
    SPLITS_COLUMNS: bool  # the consumers split columns of dk and dv rather than rows
    V1: int = 0  # columns of the second part of v; 0: there is one part


def backward_meta(
    problem: Problem,
    block: tuple[int, int],
    stages: Stages,
    *,
    widths: tuple[int, int],
    v0: int,
    statistics: int,
    shares_tiles: bool = False,
    splits_columns: bool = False,
) -> BackwardMeta:
    """Returns the constants of one of the two kernels.

    block: queries and keys of a tile. widths: of the parts of q's and k's head dim. statistics: queries of a tile of statistics.
    """
    x = problem
    return BackwardMeta(
        **x.features._asdict(),
        IS_FP8=x.q.element_size() == 1,
        IS_PLAIN=is_plain(x.features),
        BLOCK_M=block[0],
        BLOCK_N=block[1],
        STATISTICS=statistics,
        QK0=widths[0],
        QK1=widths[1],
        V0=v0,
        STAGES_SCORES=stages.scores,
        STAGES_DP=stages.dp,
        STAGES_P=stages.p,
        STAGES_DS=stages.ds,
        SHARES_TILES=shares_tiles,
        SPLITS_COLUMNS=splits_columns,
    )
