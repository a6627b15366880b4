"""Conditions of the kernels for sm_90: the problems that they support, and their tiles.

For q, k and v in 16 bits; the FP8 kernels have their own conditions.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from flexattn.kernels_triton.common import tiles
from flexattn.kernels_triton.common.crossovers import fastest_tile
from flexattn.kernels_triton.common.facts import ProblemFacts, facts_of
from flexattn.kernels_triton.common.problem import Problem
from flexattn.kernels_triton.gluon import conditions
from flexattn.kernels_triton.gluon.descriptors import descriptor_error
from flexattn.kernels_triton.gluon.operands import ROWS
from flexattn.kernels_triton.runtime.device import capability_of

_FEW_KEYS, _MANY_QUERIES = 128, 256  # a program keeps so many keys for so many queries
_TOO_WIDE = "its accumulators hold head dims up to 128"


def forward_facts(problem: Problem) -> ProblemFacts:
    """Returns the columns of a forward in `crossovers`."""
    facts = _tile_facts(problem)
    facts["decode"] = _decode(problem, tiles.HOPPER_FORWARD[fastest_tile("sm_90", facts)])
    return facts


def _tile_facts(problem: Problem) -> ProblemFacts:
    """Returns the columns that select a tile."""
    x = problem
    # If keys are in pages, the maximum counts, because long sequences dominate beside many sequences of one query.
    is_mixed = x.page_table is not None and x.longest_q > ROWS.value
    has_mean = x.q.dim() == 3 and not is_mixed
    mean_tokens = x.q.shape[0] // max(1, x.batch) if has_mean else max(x.longest_q, x.longest_kv)
    return facts_of(x, mean_tokens=mean_tokens, rows=conditions.rows_of_a_tile(x))


def _decode(problem: Problem, tile: tiles.HopperTile) -> str:
    """Returns "no" if queries fill more than half of a tile or other work counts; otherwise how heads use the keys."""
    x = problem
    is_plain = not x.is_modified and x.dropout_p == 0
    if 2 * x.longest_q > tile.block_m or x.block_mask is not None:
        return "no"
    if x.page_table is not None:
        return "shared"
    return "no" if not is_plain else "shared" if conditions.heads_of_a_tile(x, tile) > 1 else "alone"


def forward_tile(problem: Problem) -> tiles.HopperTile:
    """Returns the committed tile."""
    return tiles.HOPPER_FORWARD[fastest_tile("sm_90", _tile_facts(problem))]


def fitted_forward_tile(problem: Problem) -> tiles.HopperTile | None:
    """Returns the tile that fits the problem's head dims; None: there is none for this problem."""
    x = problem
    if x.page_table is not None or x.is_batch_invariant:  # the number of queries decides about these tiles
        return None
    d_qk, d_v = x.q.shape[-1], x.v.shape[-1]
    tile = tiles.select_fitted_tile(d_qk, d_v, is_modified=x.is_modified or x.dropout_p > 0)
    if tile is None or 2 * x.longest_q <= tile.block_m or _unsupported_tile(x, tile):
        return None
    return replace(tile, is_lazy=True) if fastest_tile("sm_90 fitted", facts_of(x)) == "lazy" else tile


def few_keys_tile(problem: Problem) -> tiles.HopperTile:
    """Returns the tile for few keys."""
    x = problem
    return tiles.few_keys_tile(x.q.shape[-1], x.v.shape[-1], x.longest_kv)


def few_keys_unsupported(problem: Problem, out: Tensor) -> str | None:
    """Returns the reason if the forward for few keys cannot run this problem; None: it can."""
    x = problem
    if x.longest_kv > _FEW_KEYS or x.longest_q < _MANY_QUERIES:
        return f"it takes up to {_FEW_KEYS} keys, and {_MANY_QUERIES} queries or more"
    if max(x.q.shape[-1], x.v.shape[-1]) > 128:
        return _TOO_WIDE
    if x.bias is not None or x.block_mask is not None or x.page_table is not None:
        return "it takes no bias, block mask or pages"
    if x.is_batch_invariant:
        return "the number of queries decides about it, on which batch_invariant results do not depend"
    return conditions.unsupported_operands(x, out)


def _is_wide(problem: Problem) -> bool:
    return max(problem.q.shape[-1], problem.v.shape[-1]) > 256


def forward_unsupported(problem: Problem, out: Tensor) -> str | None:
    """Returns the reason if the forward cannot run this problem; None: it can."""
    if _is_wide(problem):
        return "it takes head dims up to 256"
    return conditions.unsupported_operands(problem, out) or _unsupported_tile(problem, forward_tile(problem))


def wide_tile(problem: Problem) -> tiles.HopperTile:
    """Returns the committed tile for head dims above 256; if v is columns of k, two stages fit."""
    x = problem
    tile = next(tile for tile in tiles.HOPPER_WIDE if x.q.shape[-1] <= tile.head_dim_qk)
    return replace(tile, num_stages=2) if x.is_latent else tile


def wide_unsupported(problem: Problem, out: Tensor, has_max_logit: bool) -> str | None:
    """Returns the reason if the forward for head dims above 256 cannot run this problem; None: it can."""
    if not _is_wide(problem):
        return "it takes head dims above 256"
    if has_max_logit:
        return "it does not return max_logit"
    return conditions.unsupported_operands(problem, out) or _unsupported_tile(problem, wide_tile(problem))


def _unsupported_tile(problem: Problem, tile: tiles.HopperTile) -> str | None:
    return conditions.unsupported_block_mask(problem, (tile.block_m, tile.block_n)) or conditions.unsupported_pages(
        problem, tile.block_n
    )


def tangent_tile(problem: Problem) -> tiles.HopperTile:
    """Returns the committed tile of the forward with a tangent."""
    x = problem
    tile = next(tile for tile in tiles.HOPPER_TANGENT if max(x.q.shape[-1], x.v.shape[-1]) <= tile.head_dim_v)
    # A lazy maximum lets weights grow to 2**8, and their products with tangents of scores then exceed fp16's range sooner.
    return replace(tile, is_lazy=False) if x.q.dtype is torch.float16 else tile


def tangent_unsupported(problem: Problem) -> str | None:
    """Returns the reason if the forward with a tangent cannot run this problem; None: it can."""
    x = problem
    if max(x.q.shape[-1], x.v.shape[-1]) > 128:
        return _TOO_WIDE
    if x.is_modified or x.dropout_p > 0 or x.has_sink or x.page_table is not None:
        return "it supports only scaled scores with an optional band: no bias, mod, softcap, sink, dropout, block mask or pages"
    if capability_of(x.device) != 90:
        return "it is written for Hopper, sm_90"
    return conditions.unsupported_operands(x, x.q)  # out is contiguous


def backward_unsupported(problem: Problem, out: Tensor, dout: Tensor) -> str | None:
    """Returns the reason if the two-kernel backward cannot run this problem; None: it can."""
    x = problem
    if error := forward_unsupported(x, out) or descriptor_error("dout", dout) or conditions.unsupported_statistics(x):
        return error
    tile = tiles.select_hopper_backward_tile(x.q.shape[-1], x.v.shape[-1], is_modified=True)
    return conditions.backward_unsupported_block_mask(x, tile.block_n, tile.block_m, tile.keys)


def wide_backward_unsupported(problem: Problem, out: Tensor, dout: Tensor) -> str | None:
    """Returns the reason if the backward for head dims above 256 cannot run this problem; None: it can."""
    x, tile = problem, tiles.HOPPER_BACKWARD_WIDE
    head_dims = (x.q.shape[-1], x.v.shape[-1])
    if min(head_dims) <= 256 or max(head_dims) > tile.head_dim_qk:
        return f"it takes head dims above 256, up to {tile.head_dim_qk}, of q and k and of v"
    error = conditions.unsupported_operands(x, out) or descriptor_error("dout", dout) or conditions.unsupported_statistics(x)
    return error or conditions.backward_unsupported_block_mask(x, tile.block_n, tile.block_m, tile.keys)


def backward_tile(problem: Problem) -> tiles.HopperBackwardTile:
    """Returns the committed tile."""
    x = problem
    return tiles.select_hopper_backward_tile(x.q.shape[-1], x.v.shape[-1], is_modified=x.is_modified)


def fused_tile(problem: Problem) -> tiles.HopperFusedTile:
    """Returns the committed tile."""
    return tiles.HOPPER_FUSED[fastest_tile("sm_90 fused", facts_of(problem))]


def fitted_fused_tile(problem: Problem) -> tiles.HopperFusedTile | None:
    """Returns the tile of the fused backward that fits the problem's head dims; None: there is none."""
    x = problem
    widest = max(x.q.shape[-1], x.v.shape[-1])
    if not 64 < widest <= 96:
        return None
    columns = 80 if widest <= 80 else 96
    return tiles.HOPPER_FUSED_FITTED[f"d{columns}_{fastest_tile('sm_90 fused fitted', facts_of(x))}"]


def fused_unsupported(problem: Problem, out: Tensor, dout: Tensor) -> str | None:
    """Returns the reason if the fused backward cannot run this problem; None: it can."""
    x = problem
    if max(x.q.shape[-1], x.v.shape[-1]) > 128:
        return _TOO_WIDE
    return backward_unsupported(x, out, dout)


def fused_192_tile(problem: Problem) -> tiles.HopperFused192Tile:
    """Returns the committed tile."""
    return tiles.HOPPER_FUSED_192 if problem.v.shape[-1] <= tiles.HOPPER_FUSED_192.head_dim_v else tiles.HOPPER_FUSED_160


def fused_192_unsupported(problem: Problem, out: Tensor, dout: Tensor) -> str | None:
    """Returns the reason if the fused backward for head dims above 128 cannot run this problem; None: it can."""
    x, tile = problem, fused_192_tile(problem)
    d_qk, d_v = x.q.shape[-1], x.v.shape[-1]
    if max(d_qk, d_v) <= 128 or d_qk > tile.head_dim_qk or d_v > tile.head_dim_v:
        wide, square = tiles.HOPPER_FUSED_192, tiles.HOPPER_FUSED_160
        pair = f"it takes head dims of q and k from 136 to {wide.head_dim_qk}, and of v up to {wide.head_dim_v}"
        return f"{pair}; or of v from 136 to {square.head_dim_v}, and of q and k up to {square.head_dim_qk}"
    if x.is_modified or x.dropout_p > 0:
        return "it supports only scaled scores with an optional band: no bias, mod, softcap, dropout or block mask"
    return backward_unsupported(x, out, dout)
