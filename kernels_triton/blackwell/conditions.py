"""The problems that the kernels for sm_100 take, and with which tile."""

from __future__ import annotations

from torch import Tensor

from flexattn.kernels_triton.common.problem import Problem
from flexattn.kernels_triton.common.tiles import BLACKWELL_FORWARD, BLACKWELL_MODIFIED, BlackwellTile
from flexattn.kernels_triton.hopper.conditions import unsupported_block_mask, unsupported_operands
from flexattn.kernels_triton.hopper.pages import unsupported_pages
from flexattn.kernels_triton.runtime.launch import capability_of


def forward_tile(problem: Problem) -> BlackwellTile:
    """Returns the tile, which no measurement chose; numbers drawn for dropout need registers as modified scores do."""
    d_qk, d_v = problem.q.shape[-1], problem.v.shape[-1]
    tiles = BLACKWELL_MODIFIED if problem.is_modified or problem.dropout_p > 0 else BLACKWELL_FORWARD
    return next(tile for tile in tiles if d_qk <= tile.head_dim_qk and d_v <= tile.head_dim_v)


def forward_unsupported(problem: Problem, out: Tensor) -> str | None:
    """Returns why the forward cannot run this problem; None: it can."""
    x = problem
    if capability_of(x.device) != 100:
        return "it is written for Blackwell, sm_100"
    widest = BLACKWELL_FORWARD[-1]
    if x.q.shape[-1] > widest.head_dim_qk or x.v.shape[-1] > widest.head_dim_v:
        return f"it takes head dims up to {widest.head_dim_qk} of q and k, and up to {widest.head_dim_v} of v"
    tile = forward_tile(x)
    return unsupported_operands(x, out) or unsupported_block_mask(x, tile[2:4]) or unsupported_pages(x, tile.block_n)
