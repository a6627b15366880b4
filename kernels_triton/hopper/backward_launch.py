"""Host side of the backwards for sm_90 up to head dim 256, in 16 bits and in FP8: arguments, constants, launches."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from flexattn.kernels_triton.common.features import is_plain, with_features
from flexattn.kernels_triton.common.preprocess import Tiled, tiled_statistics
from flexattn.kernels_triton.common.problem import Backward, Problem
from flexattn.kernels_triton.common.tile_schedule import zero_padding_of_gradients
from flexattn.kernels_triton.common.tiles import DQ_PART, HopperBackwardTile, HopperFusedTile, split_head_dim
from flexattn.kernels_triton.gluon.backward_launch import shared_arguments
from flexattn.kernels_triton.gluon.conditions import KEYS, QUERIES, converts_dq
from flexattn.kernels_triton.gluon.descales import descales_of
from flexattn.kernels_triton.gluon.descriptors import ragged_descriptor, statistics_descriptor, step_of
from flexattn.kernels_triton.gluon.fp32_gradients import add_parts, fp32_rows, in_parts
from flexattn.kernels_triton.gluon.fused_arguments import FusedMeta
from flexattn.kernels_triton.gluon.fused_launch import Fp8Operands, finish_fused, launch_of_fused
from flexattn.kernels_triton.gluon.operands import ROWS
from flexattn.kernels_triton.gluon.pairs import pair_descriptor
from flexattn.kernels_triton.gluon.tile_scheduler import Work
from flexattn.kernels_triton.gluon.work_order import backward_work, head_parts, key_block_numbers
from flexattn.kernels_triton.hopper.backward_arguments import (
    DkdvArguments,
    DkdvDescriptors,
    DkdvSteps,
    DqArguments,
    DqDescriptors,
    DqSteps,
)
from flexattn.kernels_triton.hopper.fp8_backward_operands import copies_in_16_bits
from flexattn.kernels_triton.runtime.device import Tile, num_processors
from flexattn.kernels_triton.runtime.launch import Launchable, launch


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


def arguments_of_dkdv(call: Backward, tiled: Tiled, work: Work, tile: tuple[int, tuple[int, int], int]) -> DkdvArguments:
    """Returns the arguments of a kernel for dk and dv, without those of FP8.

    tile: queries of a block; widths of both parts of q's and k's head dim; v's head dim.
    """
    x, dout, dk, dv = call.problem, call.dout, call.dk, call.dv
    size, widths, v0 = tile
    dk32, dv32 = fp32_rows(dk), fp32_rows(dv)
    return DkdvArguments(
        descriptors=DkdvDescriptors(
            q=pair_descriptor(x.q, size, widths),
            dout=ragged_descriptor(dout, size, v0),
            k=pair_descriptor(x.k, ROWS.value, widths),
            v=ragged_descriptor(x.v, ROWS.value, v0),
            statistics=statistics_descriptor(tiled.statistics, size),
            dk=pair_descriptor(dk, ROWS.value, widths) if dk32 is None else None,
            dv=ragged_descriptor(dv, ROWS.value, v0) if dv32 is None else None,
        ),
        steps=DkdvSteps(q=step_of(x.q), dout=step_of(dout), k=step_of(x.k), v=step_of(x.v), dk=step_of(dk), dv=step_of(dv)),
        work=work,
        dropout=x.dropout,
        lists=x.lists("q"),
        dk32=dk32,
        dv32=dv32,
        **shared_arguments(x, tiled),
    )


def launch_two_kernels(
    kernels: tuple[Launchable, Launchable], call: Backward, tile: HopperBackwardTile, dq_stages: Stages, dkdv_stages: Stages
) -> None:
    """Launches a kernel for dq and one for dk and dv; in FP8, k, q and dout are read in both forms."""
    x, dout, dq = call.problem, call.dout, call.dq
    widths, v0, size, is_fp8 = split_head_dim(tile.head_dim_qk), tile.head_dim_v, tile.block_m, x.is_fp8
    constants = partial(backward_meta, x, widths=widths, v0=v0, statistics=size)
    tiled = tiled_statistics(call, size)
    shared = shared_arguments(x, tiled) | {"descales": descales_of(x) if is_fp8 else None, "dropout": None if is_fp8 else x.dropout}
    q16, k16, dout16 = copies_in_16_bits(x, dout, call.out.dtype) if is_fp8 else (None, None, None)
    dq32 = fp32_rows(dq)
    # Bytes of the operands that a head reads repeatedly: k and v for dq, q and dout for dk and dv (counted twice, to leave room).
    bytes_of_keys, bytes_of_queries = (3 * sum(widths) + v0, 6) if is_fp8 else (2 * (sum(widths) + v0), 4)
    work, programs = backward_work(x, QUERIES, "q", x.longest_kv * bytes_of_keys)
    dq_arguments = DqArguments(
        descriptors=DqDescriptors(
            q=pair_descriptor(x.q, ROWS.value, widths),
            dout=ragged_descriptor(dout, ROWS.value, v0),
            k=pair_descriptor(x.k, tile.block_n, widths),
            v=ragged_descriptor(x.v, tile.block_n, v0),
            dq=pair_descriptor(dq, ROWS.value, widths) if dq32 is None else None,
            k16=None if k16 is None else pair_descriptor(k16, tile.block_n, widths),
        ),
        steps=DqSteps(
            q=step_of(x.q),
            dout=step_of(dout),
            k=step_of(x.k),
            v=step_of(x.v),
            dq=step_of(dq),
            k16=None if k16 is None else step_of(k16),
        ),
        statistics_ptr=tiled.statistics,
        work=work,
        lists=x.lists("kv"),
        dq32=dq32,
        **shared,
    )
    shares_tiles = is_fp8 and tile.block_n == ROWS.value and dq_stages.ds >= 2
    meta = constants((QUERIES, tile.block_n), dq_stages, shares_tiles=shares_tiles)
    launch(kernels[0], programs, x.device, Tile(QUERIES, tile.block_n, 4, 2), (dq_arguments, x.mods, meta))
    parts = head_parts(x, tile.keys)
    call_in_parts = in_parts(call, parts)
    work, programs = backward_work(x, tile.keys, "kv", x.longest_q * bytes_of_queries * (sum(widths) + v0), parts=parts)
    dkdv_arguments = arguments_of_dkdv(call_in_parts, tiled, work, (size, widths, v0))._replace(**shared)
    if q16 is not None and dout16 is not None:
        descriptors, steps = dkdv_arguments.descriptors, dkdv_arguments.steps
        dkdv_arguments = dkdv_arguments._replace(
            descriptors=descriptors._replace(q16=pair_descriptor(q16, size, widths), dout16=ragged_descriptor(dout16, size, v0)),
            steps=steps._replace(q16=step_of(q16), dout16=step_of(dout16)),
        )
    can_share = tile.splits_columns or min(dkdv_stages.p, dkdv_stages.ds) >= 2
    shares_tiles = is_fp8 and size == ROWS.value and can_share
    meta = constants((size, tile.keys), dkdv_stages, shares_tiles=shares_tiles, splits_columns=tile.splits_columns)
    launch(kernels[1], programs, x.device, Tile(size, tile.keys, 4, 2), (dkdv_arguments, x.mods, meta))
    add_parts(call, call_in_parts, parts)
    zero_padding_of_gradients(call)


def launch_fused(kernel: Launchable, call: Backward, tile: HopperFusedTile) -> None:
    """Launches a fused backward for sm_90, whose dq, dk and dv are contiguous.

    tile: an `Fp8FusedTile` if q, k, v and dout are in FP8.
    """
    x = call.problem
    is_fp8 = x.q.element_size() == 1
    dim, dim1 = split_head_dim(tile.head_dim)
    parts = head_parts(x, KEYS)
    call_in_parts = in_parts(call, parts)
    meta = FusedMeta(
        **x.features._asdict(),
        IS_FP8=is_fp8,
        IS_PLAIN=is_plain(x.features),
        BLOCK_M=tile.queries,
        BLOCK_N=KEYS,
        DIM=dim,
        DIM1=dim1,
        DP_FIRST=tile.dp_first,
        IS_AHEAD=tile.is_ahead,
        PINGPONG=tile.pingpong,
        DV_WITH_DK=tile.dv_with_dk,
        DOUT_APART=tile.dout_apart,
        DQ_STAGES=tile.dq_stages,
        NUMBERS=key_block_numbers(x.features) if tile.is_persistent else 0,
        K_STAGES=2 if tile.is_persistent and not is_fp8 else 1,
        V_STAGES=2 if tile.is_persistent and not is_fp8 and tile.head_dim <= 64 else 1,
        CONVERTED=DQ_PART // tile.head_dim if parts is None and converts_dq(x, call.dq, tile) else 0,
    )
    dq_block = (ROWS.value, dim if dim1 else tile.queries * dim // KEYS)

    def fp8_operands() -> Fp8Operands:
        return Fp8Operands(descales_of(x), copies_in_16_bits(x, call.dout, call.out.dtype))

    prepared = launch_of_fused(call_in_parts, meta, ROWS.value, dq_block, fp8_operands if is_fp8 else None, parts)
    programs = min(prepared.programs, num_processors(x.device)) if tile.is_persistent else prepared.programs
    launch(kernel, programs, x.device, prepared.tile, prepared.arguments)
    add_parts(call, call_in_parts, parts)
    finish_fused(call, prepared)
