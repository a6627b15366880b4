"""The arguments of the kernels for dq and for dk and dv for sm_90, their tiles in shared memory and their barriers, by name.

Fields of arguments with a default are those of FP8.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flexattn.kernels_triton.common.arguments import Band, BlockMaskLists, Dropout, Head, Lengths, Pointer, Scores
from flexattn.kernels_triton.gluon.backward_blocks import LargeLse
from flexattn.kernels_triton.gluon.descales import Descales
from flexattn.kernels_triton.gluon.descriptors import Step
from flexattn.kernels_triton.gluon.fp32_gradients import GradientRows
from flexattn.kernels_triton.gluon.pairs import Origin, Pair
from flexattn.kernels_triton.gluon.tile_scheduler import Work


class DqDescriptors(NamedTuple):
    q: Pair
    dout: TensorDescriptor
    k: Pair
    v: TensorDescriptor
    dq: Pair | None  # None if dq is fp32
    k16: Pair | None = None


class DqSteps(NamedTuple):
    q: Step
    dout: Step
    k: Step
    v: Step
    dq: Step
    k16: Step | None = None


class DqArguments(NamedTuple):
    descriptors: DqDescriptors
    statistics_ptr: Pointer
    tiles_of_statistics: int  # tiles of one head
    large: LargeLse
    work: Work
    lengths_q: Lengths
    lengths_kv: Lengths
    band: Band
    steps: DqSteps
    scores: Scores
    dropout: Dropout | None  # None: no dropout
    lists: BlockMaskLists | None  # lists of key blocks
    dq32: GradientRows | None  # output for dq in fp32
    descales: Descales | None = None


class DqOrigins(NamedTuple):
    """First rows of a program's heads."""

    q: Origin
    dout: Origin
    k: Origin
    k16: Origin
    v: Origin
    dq: Origin


class DqTiles(NamedTuple):
    """Tiles in shared memory: q, dout and dq by consumer, the others by stage."""

    q: Pair
    dout: gl.shared_memory_descriptor
    k: Pair
    v: gl.shared_memory_descriptor
    k16: Pair  # in 16 bits, for the product with ds; equal to k if k has 16 bits
    dq: Pair  # output of the epilogue
    factors: gl.shared_memory_descriptor | None  # in FP8, from `fp8.write_factors`


class DqBarriers(NamedTuple):
    """Barriers of the rings by the product that reads their tiles: of q and k, of dout and v, of ds and k in 16 bits.

    In 16 bits, the first and the last are one ring; in FP8, the first two are. A barrier is () if another one covers its wait.
    """

    q_full: gl.shared_memory_descriptor  # barrier of q and dout
    scores_full: gl.shared_memory_descriptor
    ds_empty: gl.shared_memory_descriptor
    dp_full: gl.shared_memory_descriptor | None
    dp_empty: gl.shared_memory_descriptor
    ds_full: gl.shared_memory_descriptor | None
    dq_full: gl.shared_memory_descriptor


class DqRows(NamedTuple):
    """The head of a block of queries, and a pointer to the statistics of its sequence."""

    head: Head
    statistics_ptr: gl.tensor


class DkdvDescriptors(NamedTuple):
    q: Pair
    dout: TensorDescriptor
    k: Pair
    v: TensorDescriptor
    statistics: TensorDescriptor
    dk: Pair | None  # None if dk and dv are fp32
    dv: TensorDescriptor | None
    q16: Pair | None = None
    dout16: TensorDescriptor | None = None
    dout1: TensorDescriptor | None = None  # for this and the next two, the second parts if META.V1 > 0
    v1: TensorDescriptor | None = None
    dv1: TensorDescriptor | None = None


class DkdvSteps(NamedTuple):
    q: Step
    dout: Step
    k: Step
    v: Step
    dk: Step
    dv: Step
    q16: Step | None = None
    dout16: Step | None = None


class DkdvArguments(NamedTuple):
    descriptors: DkdvDescriptors
    tiles_of_statistics: int  # tiles of one head
    large: LargeLse
    work: Work
    lengths_q: Lengths
    lengths_kv: Lengths
    band: Band
    steps: DkdvSteps
    scores: Scores
    dropout: Dropout | None  # None: no dropout
    lists: BlockMaskLists | None  # lists of query blocks
    dk32: GradientRows | None  # outputs for dk and dv in fp32
    dv32: GradientRows | None
    descales: Descales | None = None


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


class DkdvTiles(NamedTuple):
    """Tiles in shared memory: k, v, dk and dv by consumer, the others by stage."""

    q: Pair
    dout: gl.shared_memory_descriptor
    k: Pair
    v: gl.shared_memory_descriptor
    statistics: gl.shared_memory_descriptor
    # The other tiles of the two kernels
    q16: Pair | None = None  # in 16 bits, for the products with ds and p; equal to q and dout if these have 16 bits
    dout16: gl.shared_memory_descriptor | None = None
    dk: Pair | None = None  # outputs of the epilogue
    dv: gl.shared_memory_descriptor | None = None
    factors: gl.shared_memory_descriptor | None = None  # in FP8, from `fp8.write_factors`
    p: gl.shared_memory_descriptor | None = (
        None  # if columns are split: results of one warpgroup for both, of the last two iterations
    )
    ds: gl.shared_memory_descriptor | None = None
    dout1: gl.shared_memory_descriptor | None = None  # for this and the next, the second parts if META.V1 > 0
    v1: gl.shared_memory_descriptor | None = None


class DkdvBarriers(NamedTuple):
    """Barriers of the rings by the product that reads their tiles: of k and q, of v and dout, of p and dout, of ds and q.

    In 16 bits, q and dout have one ring each. In FP8, both share one ring in FP8 and one in 16 bits; if columns are split, q in 16
    bits has its own ring. A barrier is () or None if another one covers its wait or release.
    """

    scores_full: gl.shared_memory_descriptor
    ds_empty: gl.shared_memory_descriptor
    dp_full: gl.shared_memory_descriptor | None
    dp_empty: gl.shared_memory_descriptor | None
    kv_full: gl.shared_memory_descriptor
    dkdv_full: gl.shared_memory_descriptor
    p_full: gl.shared_memory_descriptor | None = None
    p_empty: gl.shared_memory_descriptor | None = None
    ds_full: gl.shared_memory_descriptor | None = None
