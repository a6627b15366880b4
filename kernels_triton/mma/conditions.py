"""Conditions of the kernels for mma.sync: the problems that they support."""

from __future__ import annotations

from torch import Tensor

from flexattn.kernels_triton.common.problem import Backward, Problem, is_loadable
from flexattn.kernels_triton.common.split_kv import BY_LENGTHS, number_of_splits
from flexattn.kernels_triton.common.tiles import SPLIT_PROGRAMS
from flexattn.kernels_triton.gluon.conditions import heads_of_a_tile, tiles_and_room, unsupported_block_mask, unsupported_call
from flexattn.kernels_triton.mma.tiles import CAPABILITIES, WIDEST, backward_tile, dq_tile, forward_tile
from flexattn.kernels_triton.runtime.device import Tile, capability_of


def forward_unsupported(problem: Problem, out: Tensor) -> str | None:
    """Returns the reason if the forward cannot run this problem; None: it can."""
    x = problem
    if capability_of(x.device) not in CAPABILITIES:
        return "it is written for compute capability 8.0, 8.6, 8.9 and 12.0"
    if reason := unsupported_call(x) or _unsupported_rows(x, out):
        return reason
    tile = forward_tile(x)
    if reason := unsupported_block_mask(x, (tile.block_m, tile.block_n)):
        return reason
    if number_of_splits(x, *tiles_and_room(x, tile, heads_of_a_tile(x, tile), SPLIT_PROGRAMS)) == BY_LENGTHS:
        return "it does not split the keys of few queries by their lengths"
    return None


def backward_unsupported(call: Backward) -> str | None:
    """Returns the reason if the fused backward cannot run this problem; None: it can."""
    return "its dq is not deterministic" if call.deterministic else _unsupported_backward(call)


def two_kernels_unsupported(call: Backward) -> str | None:
    """Returns the reason if the two-kernel backward cannot run this problem; None: it can."""
    if reason := _unsupported_backward(call):
        return reason
    tile = dq_tile(call.problem)
    return unsupported_block_mask(call.problem, (tile.block_m, tile.block_n))


def _unsupported_backward(call: Backward) -> str | None:
    x = call.problem
    if capability_of(x.device) not in CAPABILITIES:
        return "it is written for compute capability 8.0, 8.6, 8.9 and 12.0"
    if reason := unsupported_call(x) or _unsupported_rows(x, call.out, call.dout, call.dq, call.dk, call.dv):
        return reason
    if x.block_mask is not None and x.group_size > 1 and x.block_mask.heads > 1:
        return "query heads that share a key head each have their own block mask"
    tile = backward_tile(x)
    return unsupported_block_mask(x, (tile.block_m, tile.block_n))


def _unsupported_rows(problem: Problem, *others: Tensor) -> str | None:
    x = problem
    widest = max(x.q.shape[-1], x.v.shape[-1])
    if widest > WIDEST:
        return f"it takes head dims up to {WIDEST}"
    if x.q.shape[-1] % 8 or x.v.shape[-1] % 8:
        return "it takes head dims that are multiples of 8"
    if not all(is_loadable(t) for t in (x.q, x.k, x.v, *others)):
        return "its copies need rows at multiples of 16 bytes"
    meta = x.meta(Tile(64, 32, 4, 1), others)
    if meta.ALIGN % 8:
        return "its copies need strides that are multiples of 8"
    return "a tile's rows are too far apart for 32-bit offsets" if meta.WIDE_STRIDES else None
