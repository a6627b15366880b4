"""The problems that the kernels for sm_100 take, and with which tile."""

from __future__ import annotations

from flexattn.kernels_triton.common.problem import Problem
from flexattn.kernels_triton.common.tiles import BLACKWELL_FORWARD, BlackwellTile


def forward_tile(problem: Problem) -> BlackwellTile:
    """Returns the tile."""
    d_qk, d_v = problem.q.shape[-1], problem.v.shape[-1]
    return next(tile for tile in BLACKWELL_FORWARD if d_qk <= tile.head_dim_qk and d_v <= tile.head_dim_v)
