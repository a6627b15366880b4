"""Host side of the fused backwards for sm_90, in 16 bits and in FP8."""

from __future__ import annotations

from typing import Any

from flexattn.kernels_triton.common.features import is_plain
from flexattn.kernels_triton.common.problem import Backward
from flexattn.kernels_triton.common.tiles import DQ_PART, split_head_dim
from flexattn.kernels_triton.gluon.conditions import KEYS, converts_dq
from flexattn.kernels_triton.gluon.descales import descales_of
from flexattn.kernels_triton.gluon.fp32_gradients import add_parts, in_parts
from flexattn.kernels_triton.gluon.fused_arguments import FusedMeta
from flexattn.kernels_triton.gluon.fused_launch import Fp8Operands, finish_fused, launch_of_fused
from flexattn.kernels_triton.gluon.operands import ROWS
from flexattn.kernels_triton.gluon.work_order import head_parts, key_block_numbers
from flexattn.kernels_triton.hopper.fp8_backward_operands import copies_in_16_bits
from flexattn.kernels_triton.runtime.device import num_processors
from flexattn.kernels_triton.runtime.launch import launch


def launch_fused(kernel: Any, call: Backward, tile: Any) -> None:
    """Launches a fused backward for sm_90, whose dq, dk and dv are contiguous.

    tile: a `HopperFusedTile`, or an `Fp8FusedTile` if q, k, v and dout are in FP8.
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
