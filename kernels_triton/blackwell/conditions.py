"""Conditions of the kernels for sm_100: the problems that they support, and their tiles."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from flexattn.kernels_triton.common.problem import Problem
from flexattn.kernels_triton.common.tiles import (
    BLACKWELL_BACKWARD,
    BLACKWELL_FORWARD,
    BLACKWELL_MODIFIED,
    BlackwellBackwardTile,
    BlackwellTile,
)
from flexattn.kernels_triton.gluon import conditions
from flexattn.kernels_triton.gluon.descriptors import descriptor_error


def forward_tile(problem: Problem) -> BlackwellTile:
    """Returns the tile, which was not measured; random numbers for dropout need registers, like modified scores."""
    d_qk, d_v = problem.q.shape[-1], problem.v.shape[-1]
    tiles = BLACKWELL_MODIFIED if problem.is_modified or problem.dropout_p > 0 else BLACKWELL_FORWARD
    return next(tile for tile in tiles if d_qk <= tile.head_dim_qk and d_v <= tile.head_dim_v)


def forward_unsupported(problem: Problem, out: Tensor) -> str | None:
    """Returns the reason if the forward cannot run this problem; None: it can."""
    x = problem
    widest = BLACKWELL_FORWARD[-1]
    if x.q.shape[-1] > widest.head_dim_qk or x.v.shape[-1] > widest.head_dim_v:
        return f"it takes head dims up to {widest.head_dim_qk} of q and k, and up to {widest.head_dim_v} of v"
    tile = forward_tile(x)
    return (
        conditions.unsupported_operands(x, out)
        or conditions.unsupported_block_mask(x, (tile.block_m, tile.block_n))
        or conditions.unsupported_pages(x, tile.block_n)
    )


def backward_tile(problem: Problem) -> BlackwellBackwardTile:
    """Returns the tile; modified scores halve its columns, because values of a mod or a bias need registers beside them."""
    x = problem
    width = max(x.q.shape[-1], x.v.shape[-1])
    tile = next(tile for tile in BLACKWELL_BACKWARD if width <= tile.head_dim)
    return replace(tile, columns=tile.columns // 2) if x.is_modified else tile


def backward_unsupported(problem: Problem, out: Tensor, dout: Tensor) -> str | None:
    """Returns the reason if the backward cannot run this problem; None: it can."""
    x = problem
    widest = BLACKWELL_BACKWARD[-1]
    if max(x.q.shape[-1], x.v.shape[-1]) > widest.head_dim:
        return f"it takes head dims up to {widest.head_dim}"
    if x.dropout_p > 0:
        return "it does not draw dropout"
    if error := conditions.unsupported_operands(x, out) or descriptor_error("dout", dout) or conditions.unsupported_statistics(x):
        return error
    return conditions.backward_unsupported_block_mask(x, widest.block_n, widest.block_m, widest.block_n)
