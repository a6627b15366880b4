"""Fused backward for Hopper (sm_90) in Gluon for head dims above 128: 192 of q and k with 128 of v, as in DeepSeek-V3, and 160.

One kernel computes the scores once, like `backward_fused`: for dk and dv, which stay in registers, and for dq. The copy engine adds
dq to fp32 sums in an arbitrary order, so the last bits of dq differ from run to run. It supports only plain scores. Calls that
`conditions.fused_192_unsupported` rejects, and deterministic calls, run on `backward`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flexattn.kernels_triton.common.preprocess import tiled_statistics
from flexattn.kernels_triton.common.problem import Backward
from flexattn.kernels_triton.common.tile_schedule import zero_padding_of_gradients
from flexattn.kernels_triton.common.tiles import HopperFused192Tile, split_head_dim
from flexattn.kernels_triton.gluon.backward_blocks import key_block_of_program
from flexattn.kernels_triton.gluon.conditions import KEYS
from flexattn.kernels_triton.gluon.descriptors import ragged_descriptor
from flexattn.kernels_triton.gluon.dq_conversion import convert_dq
from flexattn.kernels_triton.gluon.dq_sums import DqRing
from flexattn.kernels_triton.gluon.fp32_gradients import add_parts, in_parts
from flexattn.kernels_triton.gluon.operands import ROWS, allocate_tiles
from flexattn.kernels_triton.gluon.pairs import allocate_pair
from flexattn.kernels_triton.gluon.pipeline import allocate_barriers
from flexattn.kernels_triton.gluon.work_order import backward_work, head_parts
from flexattn.kernels_triton.hopper.backward_arguments import DkdvArguments, DkdvBarriers, DkdvTiles
from flexattn.kernels_triton.hopper.backward_launch import Stages, arguments_of_dkdv, backward_meta
from flexattn.kernels_triton.hopper.conditions import fused_192_tile
from flexattn.kernels_triton.hopper.dkdv_loader import load_dkdv
from flexattn.kernels_triton.hopper.fused_192_consumer import NARROW, Fused192Tiles, add_dq_192, consume_fused_192
from flexattn.kernels_triton.runtime.device import Tile
from flexattn.kernels_triton.runtime.launch import hopper_kernel, launch


class DqSums(NamedTuple):
    """Descriptors of dq's fp32 sums, by the parts of `fused_192_consumer`: tiles of 32 columns and of 64."""

    narrow: Any
    wide: Any


class Fused192Arguments(NamedTuple):
    dkdv: DkdvArguments
    sums: DqSums


@hopper_kernel
def _attn_bwd_fused_192_hopper_kernel(args: Fused192Arguments, MODS: gl.constexpr, META: gl.constexpr):
    descriptors = args.dkdv.descriptors
    DTYPE: gl.constexpr = descriptors.dout.dtype
    SCORES: gl.constexpr = META.STAGES_SCORES
    DP: gl.constexpr = META.STAGES_DP
    loaded = DkdvTiles(
        q=allocate_pair(SCORES, descriptors.q, META),
        dout=allocate_tiles(DP, descriptors.dout),
        k=allocate_pair(2, descriptors.k, META),
        v=allocate_tiles(2, descriptors.v),
        statistics=gl.allocate_shared_memory(gl.float32, [SCORES, 2 * META.BLOCK_M], descriptors.statistics.layout),
        dout1=allocate_tiles(DP, descriptors.dout1) if META.V1 > 0 else (),
        v1=allocate_tiles(2, descriptors.v1) if META.V1 > 0 else (),
    )
    EXCHANGE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, META.BLOCK_M], DTYPE)
    ds_tiles = gl.allocate_shared_memory(DTYPE, [4, 64, META.BLOCK_M], EXCHANGE)
    dq_tiles = allocate_tiles(2, args.sums.wide)
    barriers = DkdvBarriers(
        scores_full=allocate_barriers(SCORES, 1),
        ds_empty=allocate_barriers(SCORES, 2),
        dp_full=allocate_barriers(DP, 1),
        dp_empty=None,
        kv_full=allocate_barriers(1, 1),
        dkdv_full=allocate_barriers(1, 2),
    )
    ring = DqRing(tiles=dq_tiles, full=allocate_barriers(1, 2), empty=allocate_barriers(1, 1))
    tiles = Fused192Tiles(loaded=loaded, ds=ds_tiles, dq=ring)
    block = key_block_of_program(args.dkdv, META)
    gl.warp_specialize(
        [
            (consume_fused_192, (args.dkdv, tiles, barriers, block, 0, MODS, META)),
            (consume_fused_192, (args.dkdv, tiles, barriers, block, 1, MODS, META)),
            (load_dkdv, (args.dkdv, loaded, barriers, block, META)),
            (add_dq_192, (args.dkdv, args.sums, ring, block, META)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )


def fused_192_backward(call: Backward, tile: HopperFused192Tile | None = None) -> None:
    """Launches the backward of a call that `fused_192_unsupported` does not reject; the last bits of dq differ from run to run."""
    x, dq = call.problem, call.dq
    tile = fused_192_tile(x) if tile is None else tile
    widths, (v0, v1), size = split_head_dim(tile.head_dim_qk), split_head_dim(tile.head_dim_v), tile.queries
    tiled = tiled_statistics(call, size, with_dq_sums=True)
    dq_sums = tiled.dq_sums
    assert dq_sums is not None
    bytes_per_head = (8 * sum(widths) + 4 * (v0 + v1)) * max(x.longest_q, x.longest_kv)  # approximate, see `fused_launch`
    parts = head_parts(x, KEYS)
    call_in_parts = in_parts(call, parts)
    work, programs = backward_work(x, KEYS, "kv", bytes_per_head, is_fused=True, parts=parts)

    def sums_descriptor(columns: int) -> TensorDescriptor:
        layout = gl.NVMMASharedLayout.get_default_for([ROWS.value, columns], gl.float32)
        return TensorDescriptor(dq_sums, list(dq_sums.shape), [dq_sums.shape[1], 1], [ROWS.value, columns], layout)

    dkdv = arguments_of_dkdv(call_in_parts, tiled, work, (size, widths, v0))
    if v1:
        second = {"dout1": ragged_descriptor(call.dout, size, v1), "v1": ragged_descriptor(x.v, ROWS.value, v1)}
        second["dv1"] = None if dkdv.dv32 else ragged_descriptor(call.dv, ROWS.value, v1)
        dkdv = dkdv._replace(descriptors=dkdv.descriptors._replace(**second))
    arguments = Fused192Arguments(
        dkdv=dkdv,
        sums=DqSums(narrow=sums_descriptor(NARROW.value), wide=sums_descriptor(2 * NARROW.value)),
    )
    stages = Stages(scores=2, dp=2, p=2, ds=2)
    meta = backward_meta(x, (size, KEYS), stages, widths=widths, v0=v0, statistics=size)._replace(V1=v1)
    launch(_attn_bwd_fused_192_hopper_kernel, programs, x.device, Tile(size, KEYS, 4, 2), (arguments, x.mods, meta))
    add_parts(call, call_in_parts, parts)
    convert_dq(x, dq_sums, tiled.tiles, size, dq)
    zero_padding_of_gradients(call)
