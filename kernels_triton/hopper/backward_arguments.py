"""The arguments of the kernels for dq and for dk and dv for sm_90, by name. Fields with a default are those of FP8."""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flexattn.kernels_triton.common.arguments import Band, BlockMaskLists, Dropout, Lengths, Pointer, Scores
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
