"""Host side that the fused backwards share: a kernel's launch, and the steps after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flexattn.kernels_triton.common.preprocess import tiled_statistics
from flexattn.kernels_triton.common.problem import Backward
from flexattn.kernels_triton.common.tile_schedule import zero_padding_of_gradients
from flexattn.kernels_triton.common.tiles import cdiv
from flexattn.kernels_triton.gluon.backward_launch import shared_arguments
from flexattn.kernels_triton.gluon.conditions import KEYS
from flexattn.kernels_triton.gluon.descales import Descales
from flexattn.kernels_triton.gluon.descriptors import ragged_descriptor, statistics_descriptor, step_of
from flexattn.kernels_triton.gluon.dq_conversion import convert_dq
from flexattn.kernels_triton.gluon.dq_parts import sums_of_dq
from flexattn.kernels_triton.gluon.fp32_gradients import fp32_rows
from flexattn.kernels_triton.gluon.fused_arguments import FusedArguments, FusedDescriptors, FusedSteps, SecondDescriptors
from flexattn.kernels_triton.gluon.query_walk import HeadParts
from flexattn.kernels_triton.gluon.work_order import backward_work
from flexattn.kernels_triton.runtime.device import Tile


class Fp8Operands(NamedTuple):
    """Operands of a fused backward in FP8 besides q, k, v and dout."""

    descales: Descales
    copies16: tuple[Tensor, Tensor, Tensor]  # q, k and dout in 16 bits


class FusedLaunch(NamedTuple):
    """Launch of a fused kernel, and the values that `finish_fused` needs after it."""

    programs: int  # programs; for a persistent kernel its work tiles
    tile: Tile
    arguments: tuple[Any, ...]
    dq_sums: Tensor | None  # None: the kernel has converted them
    tiles_of_statistics: int


def launch_of_fused(
    call: Backward,
    meta: Any,
    rows_of_keys: int,
    dq_block: tuple[int, int],
    fp8_operands: Callable[[], Fp8Operands] | None = None,
    parts: HeadParts | None = None,
) -> FusedLaunch:
    """Returns the launch of a fused backward with its constants, a `FusedMeta` or a class with the fields that this function
    reads.

    rows_of_keys: rows of k and v that the copy engine loads at a time. dq_block: rows and columns that it adds to dq's sums.
    fp8_operands: makes the operands of FP8; None if q, k, v and dout have 16 bits. parts: for a call from `in_parts`.
    """
    x, dout, dq, dk, dv = call.problem, call.dout, call.dq, call.dk, call.dv
    dim, dim1, size = meta.DIM, meta.DIM1, meta.BLOCK_M
    head_dim = x.q.shape[-1]
    converts = meta.CONVERTED > 0
    tiled = tiled_statistics(call, size, with_dq_sums=True, with_dq_arrivals=converts)
    dq_sums = tiled.dq_sums
    assert dq_sums is not None
    dq_layout = gl.NVMMASharedLayout.get_default_for(list(dq_block), gl.float32)
    bytes_per_head = (
        12 * (dim + dim1) * max(x.longest_q, x.longest_kv)
    )  # approximate: two bytes each of k, v, q and dout, four of dq
    work, programs = backward_work(x, KEYS, "kv", bytes_per_head, is_fused=True, parts=parts)
    if meta.NUMBERS > 0 and not x.has_lengths:  # a persistent kernel
        # the first tile, which belongs to no query, has room for the counter
        work = work._replace(table_ptr=dq_sums.view(torch.int32))
    in_fp8 = fp8_operands() if fp8_operands else None
    q16, k16, dout16 = in_fp8.copies16 if in_fp8 else (None, None, None)
    query_tensors = {"q": x.q, "q16": q16, "dout": dout, "dout16": dout16}
    dk32, dv32 = fp32_rows(dk), fp32_rows(dv)
    key_tensors = {"k": x.k, "k16": k16, "v": x.v, "dk": dk, "dv": dv}
    sizes = dict.fromkeys(query_tensors, size) | dict.fromkeys(key_tensors, rows_of_keys)
    tensors = query_tensors | key_tensors
    copied_tensors = tensors if dk32 is None else tensors | {"dk": None, "dv": None}
    arguments = FusedArguments(
        descriptors=FusedDescriptors(
            **{name: None if t is None else ragged_descriptor(t, sizes[name], dim) for name, t in copied_tensors.items()},
            statistics=statistics_descriptor(tiled.statistics, size),
            dq=TensorDescriptor(dq_sums, list(dq_sums.shape), [head_dim, 1], list(dq_block), dq_layout),
            second=_second_descriptors(copied_tensors, sizes, dq_sums, (dq_block[0], dim1)) if dim1 else None,
        ),
        steps=FusedSteps._make(None if (t := tensors[name]) is None else step_of(t) for name in FusedSteps._fields),
        work=work,
        descales=in_fp8.descales if in_fp8 else None,
        **shared_arguments(x, tiled),
        dropout=None if in_fp8 else x.dropout,
        lists=x.lists("q"),
        sums=sums_of_dq(tiled.dq_arrivals, dq_sums, dq) if converts else None,
        dk32=dk32,
        dv32=dv32,
    )
    if converts:
        programs += cdiv(x.longest_q, meta.CONVERTED) * x.num_heads * x.batch
    return FusedLaunch(programs, Tile(size, KEYS, 4, 2), (arguments, x.mods, meta), None if converts else dq_sums, tiled.tiles)


def _second_descriptors(
    tensors: Mapping[str, Tensor | None], sizes: Mapping[str, int], dq_sums: Tensor, dq_block: tuple[int, int]
) -> SecondDescriptors:
    """Returns descriptors of `dq_block` columns of each tensor. sizes: rows of a tile."""
    layout = gl.NVMMASharedLayout.get_default_for(list(dq_block), gl.float32)
    names = (name for name in SecondDescriptors._fields if name != "dq")
    return SecondDescriptors(
        **{name: None if (t := tensors[name]) is None else ragged_descriptor(t, sizes[name], dq_block[1]) for name in names},
        dq=TensorDescriptor(dq_sums, list(dq_sums.shape), [dq_sums.shape[1], 1], list(dq_block), layout),
    )


def finish_fused(call: Backward, launched: FusedLaunch) -> None:
    """Converts dq from its sums if the kernel has not, and writes zeros into the gradients' rows without a token."""
    x = call.problem
    if launched.dq_sums is not None:
        convert_dq(x, launched.dq_sums, launched.tiles_of_statistics, launched.tile.block_m, call.dq)
    zero_padding_of_gradients(call)
