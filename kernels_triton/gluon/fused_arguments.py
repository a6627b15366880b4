"""The fused backward's constants, arguments, tiles in shared memory and barriers, by name."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flexattn.kernels_triton.common.arguments import Band, BlockMaskLists, Dropout, Lengths, Scores
from flexattn.kernels_triton.common.features import with_features
from flexattn.kernels_triton.gluon.backward_blocks import LargeLse
from flexattn.kernels_triton.gluon.descales import Descales
from flexattn.kernels_triton.gluon.descriptors import Step
from flexattn.kernels_triton.gluon.dq_parts import SumsOfDq
from flexattn.kernels_triton.gluon.fp32_gradients import GradientRows
from flexattn.kernels_triton.gluon.tile_scheduler import Work


@with_features
class FusedMeta(NamedTuple):
    """Constants that a fused backward is compiled for, besides `Features`."""

    IS_FP8: bool  # q, k, v and dout are FP8, with copies of q, k and dout in 16 bits
    IS_PLAIN: bool  # a logit is a scaled score
    BLOCK_M: int
    BLOCK_N: int
    DIM: int  # columns of the first part of a head dim
    DIM1: int  # columns of the second part; 0: there is one part
    DP_FIRST: bool  # for this and the next four see `HopperFusedTile`
    IS_AHEAD: bool
    PINGPONG: bool
    DV_WITH_DK: bool
    DOUT_APART: bool
    DQ_STAGES: int  # stages of dq in shared memory
    NUMBERS: int  # integers of a tile message of a persistent kernel; 0: a program has one key block
    K_STAGES: int  # key blocks whose k is in shared memory: 2 in a persistent kernel, otherwise 1
    V_STAGES: int  # 1, or K_STAGES
    CONVERTED: int  # rows of a part of dq that a persistent kernel converts; 0: another kernel converts dq


class SecondDescriptors(NamedTuple):
    """Descriptors of the second parts of the head dim, in 16 bits."""

    q: TensorDescriptor
    dout: TensorDescriptor
    k: TensorDescriptor
    v: TensorDescriptor
    dq: TensorDescriptor  # its fp32 sums
    dk: TensorDescriptor | None  # None if dk and dv are fp32
    dv: TensorDescriptor | None


class FusedDescriptors(NamedTuple):
    """Descriptors of the tensors; q16, k16 and dout16 are None if q, k and dout have 16 bits."""

    q: TensorDescriptor
    q16: TensorDescriptor | None
    dout: TensorDescriptor
    dout16: TensorDescriptor | None
    k: TensorDescriptor
    k16: TensorDescriptor | None
    v: TensorDescriptor
    statistics: TensorDescriptor
    dq: TensorDescriptor  # its fp32 sums
    dk: TensorDescriptor | None  # None if dk and dv are fp32
    dv: TensorDescriptor | None
    second: SecondDescriptors | None = None  # if META.DIM1 > 0


class FusedSteps(NamedTuple):
    q: Step
    q16: Step | None
    dout: Step
    dout16: Step | None
    k: Step
    k16: Step | None
    v: Step
    dk: Step
    dv: Step


class FusedArguments(NamedTuple):
    descriptors: FusedDescriptors
    tiles_of_statistics: int  # tiles of one head
    large: LargeLse
    work: Work
    descales: Descales | None  # descales of q, k, v and dout in FP8
    lengths_q: Lengths
    lengths_kv: Lengths
    band: Band
    steps: FusedSteps
    scores: Scores
    dropout: Dropout | None  # None in FP8
    lists: BlockMaskLists | None  # lists of query blocks
    sums: SumsOfDq | None  # if META.CONVERTED > 0
    dk32: GradientRows | None  # outputs for dk and dv in fp32
    dv32: GradientRows | None


class SecondTiles(NamedTuple):
    """The second parts of the tiles in `FusedTiles`. The first consumer computes the first part of dq, the second one this part."""

    q: gl.shared_memory_descriptor
    dout: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    dq: gl.shared_memory_descriptor


class FusedTiles(NamedTuple):
    """Tiles in shared memory: q, dout and statistics by stage; k, v, ds and dq by stage and consumer.

    q16, k16, dout16 and the factors are None if q, k and dout have 16 bits.
    """

    q: gl.shared_memory_descriptor
    q16: gl.shared_memory_descriptor | None
    dout: gl.shared_memory_descriptor
    dout16: gl.shared_memory_descriptor | None
    k: gl.shared_memory_descriptor
    k16: gl.shared_memory_descriptor | None
    v: gl.shared_memory_descriptor
    statistics: gl.shared_memory_descriptor
    factors: gl.shared_memory_descriptor | None  # for each query block the factors of its scores and of its dp
    ds: gl.shared_memory_descriptor
    dq: gl.shared_memory_descriptor
    second: Any = None  # `SecondTiles` if META.DIM1 > 0, or ()


class FusedBarriers(NamedTuple):
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    dout_full: gl.shared_memory_descriptor
    dout_empty: gl.shared_memory_descriptor | None  # used if META.DOUT_APART
    dq_full: gl.shared_memory_descriptor
    dq_empty: gl.shared_memory_descriptor
    dkdv_full: gl.shared_memory_descriptor
    # in FP8, for programs with one block: loading k and v with the first q and dout was 3 % slower there
    kv_full: gl.shared_memory_descriptor | None = None
    # for this and the other fields of tiles see `ForwardBarriers`; in a persistent kernel
    tile_full: gl.shared_memory_descriptor | None = None
    tile_empty: gl.shared_memory_descriptor | None = None
    tile_slots: gl.shared_memory_descriptor | None = None


class Begun(NamedTuple):
    """Counts of a program before a key block: of its blocks and their iterations."""

    blocks: int
    iterations: int | gl.tensor
