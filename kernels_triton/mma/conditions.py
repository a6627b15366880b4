"""Conditions of the kernels for mma.sync: the problems that they support."""

from __future__ import annotations

from torch import Tensor

from flexattn.kernels_triton.common.problem import Backward, Problem, is_loadable
from flexattn.kernels_triton.gluon.conditions import unsupported_block_mask, unsupported_call, unsupported_fp8_call
from flexattn.kernels_triton.gluon.descales import scale_error, scales_of
from flexattn.kernels_triton.mma.tiles import WIDEST, backward_tile, dq_tile, forward_tile
from flexattn.kernels_triton.runtime.device import Tile


def forward_unsupported(problem: Problem, out: Tensor) -> str | None:
    """Returns the reason if the forward cannot run this problem in 16 bits; None: it can."""
    x = problem
    return unsupported_call(x) or _unsupported_rows(x, out) or _unsupported_tile(x)


def fp8_forward_unsupported(problem: Problem, out: Tensor, return_max_logit: bool) -> str | None:
    """Returns the reason if the forward cannot run this problem in FP8; None: it can."""
    x = problem
    if return_max_logit:
        return "it does not support max_logit in FP8"
    if reason := unsupported_fp8_call(x) or _unsupported_rows(x, out):
        return reason
    block_n = forward_tile(x).block_n
    sides = zip("qkv", scales_of(x), (x.num_heads, x.num_heads_kv, x.num_heads_kv), (1, block_n, block_n), strict=False)
    errors = (scale_error(name, scale, x, heads, multiple) for name, scale, heads, multiple in sides)
    return next((error for error in errors if error), None) or _unsupported_tile(x)


def _unsupported_tile(problem: Problem) -> str | None:
    x = problem
    tile = forward_tile(x)
    return unsupported_block_mask(x, (tile.block_m, tile.block_n))


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
    multiple = 16 // x.q.element_size()
    if x.q.shape[-1] % multiple or x.v.shape[-1] % multiple:
        return f"it takes head dims that are multiples of {multiple}"
    if not all(is_loadable(t) for t in (x.q, x.k, x.v, *others)):
        return "its copies need rows at multiples of 16 bytes"
    meta = x.meta(Tile(64, 32, 4, 1), others)
    if meta.ALIGN % 8 or x.meta(Tile(64, 32, 4, 1)).ALIGN % multiple:
        return f"its copies need strides that are multiples of {multiple}"
    return "a tile's rows are too far apart for 32-bit offsets" if meta.WIDE_STRIDES else None
