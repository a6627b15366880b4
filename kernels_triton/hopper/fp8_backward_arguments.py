"""The arguments of the two kernels of the FP8 backward for sm_90, and their data in shared memory, by name."""

from __future__ import annotations

from typing import Any, NamedTuple

from flexattn.kernels_triton.common.arguments import Band, BlockMaskLists, Dropout, Lengths, Scores
from flexattn.kernels_triton.gluon.backward_blocks import LargeLse
from flexattn.kernels_triton.gluon.descales import Descales
from flexattn.kernels_triton.gluon.descriptors import Step
from flexattn.kernels_triton.gluon.fp32_gradients import Fp32Rows
from flexattn.kernels_triton.gluon.pairs import Origin, Pair
from flexattn.kernels_triton.gluon.tile_scheduler import Work


class DqDescriptors(NamedTuple):
    q: Pair
    k: Pair
    k16: Pair
    dq: Pair | None  # None if dq is fp32
    dout: Any
    v: Any


class DqSteps(NamedTuple):
    q: Step
    dout: Step
    k: Step
    k16: Step
    v: Step
    dq: Step


class DqArguments(NamedTuple):
    descriptors: DqDescriptors
    statistics_ptr: Any
    tiles_of_statistics: int  # tiles of one head
    large: LargeLse
    work: Work
    descales: Descales
    lengths_q: Lengths
    lengths_kv: Lengths
    band: Band
    steps: DqSteps
    scores: Scores
    dropout: Dropout | None  # None: no dropout
    lists: BlockMaskLists | None  # lists of key blocks
    dq32: Fp32Rows | None  # output for dq in fp32


class DqTiles(NamedTuple):
    """In shared memory: q, dout and dq by consumer, k, v and the factors by stage."""

    q: Pair
    k: Pair
    k16: Pair
    dq: Pair
    dout: Any
    v: Any
    factors: Any


class DqBarriers(NamedTuple):
    q_full: Any
    full8: Any  # k and v in FP8
    empty8: Any
    full16: Any  # k in 16 bits
    empty16: Any
    dq_full: Any


class DqBuffers(NamedTuple):
    tiles: DqTiles
    barriers: DqBarriers


class DqOrigins(NamedTuple):
    """First rows of a program's heads."""

    q: Origin
    dout: Origin
    k: Origin
    k16: Origin
    v: Origin
    dq: Origin


class DkdvDescriptors(NamedTuple):
    q: Pair
    q16: Pair
    k: Pair
    dk: Pair | None  # None if dk and dv are fp32
    dout: Any
    dout16: Any
    v: Any
    dv: Any
    statistics: Any


class DkdvSteps(NamedTuple):
    q: Step
    q16: Step
    dout: Step
    dout16: Step
    k: Step
    v: Step
    dk: Step
    dv: Step


class DkdvArguments(NamedTuple):
    descriptors: DkdvDescriptors
    tiles_of_statistics: int  # tiles of one head
    large: LargeLse
    work: Work
    descales: Descales
    lengths_q: Lengths
    lengths_kv: Lengths
    band: Band
    steps: DkdvSteps
    scores: Scores
    dropout: Dropout | None  # None: no dropout
    lists: BlockMaskLists | None  # lists of query blocks
    dk32: Fp32Rows | None  # outputs for dk and dv in fp32
    dv32: Fp32Rows | None


class DkdvTiles(NamedTuple):
    """In shared memory: q, dout, the statistics and the factors by stage, k, v, dk and dv by consumer."""

    q: Pair
    q16: Pair
    k: Pair
    dk: Pair
    dout: Any
    dout16: Any
    v: Any
    dv: Any
    statistics: Any
    factors: Any
    p: Any  # exchanged between the warpgroups, if columns are split
    ds: Any


class DkdvBarriers(NamedTuple):
    full8: Any  # q and dout in FP8
    empty8: Any
    full16: Any  # dout in 16 bits, and q unless it has separate barriers
    empty16: Any
    q16_full: Any
    q16_empty: Any
    kv_full: Any
    dkdv_full: Any


class DkdvBuffers(NamedTuple):
    tiles: DkdvTiles
    barriers: DkdvBarriers


class DkdvOrigins(NamedTuple):
    """First rows of a program's heads; for queries, of the first head."""

    q: Origin
    q16: Origin
    dout: Origin
    dout16: Origin
    k: Origin
    v: Origin
    dk: Origin
    dv: Origin
