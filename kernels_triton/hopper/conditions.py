"""Conditions of the kernels for sm_90: the problems that they support, and their tiles.

For q, k and v in 16 bits; the FP8 kernels have their own conditions.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from flexattn.kernels_triton.common.crossovers import fastest_tile
from flexattn.kernels_triton.common.facts import ProblemFacts, facts_of
from flexattn.kernels_triton.common.problem import Problem
from flexattn.kernels_triton.common.tiles import (
    HOPPER_FORWARD,
    HOPPER_FUSED,
    HOPPER_FUSED_192,
    HOPPER_WIDE,
    HopperBackwardTile,
    HopperFusedTile,
    HopperTile,
    cdiv,
    select_hopper_backward_tile,
    slots_of_heads,
)
from flexattn.kernels_triton.hopper.descriptors import DTYPES, descriptor_error
from flexattn.kernels_triton.hopper.operands import ROWS
from flexattn.kernels_triton.hopper.pages import unsupported_pages
from flexattn.kernels_triton.runtime.launch import capability_of

QUERIES = 128  # queries of a program of dq: two warpgroups
KEYS = 128  # keys of a program of the fused backward: two warpgroups
_TOO_WIDE = "its accumulators hold head dims up to 128"


def _shares(problem: Problem) -> list[int]:
    """Returns how many query heads of one key head may share a warpgroup's rows: a power of two that divides them, or all."""
    size = problem.group_size
    power = min(size & -size, ROWS.value)
    return [power, size] if slots_of_heads(size) <= ROWS.value else [power]


def heads_of_a_tile(problem: Problem, tile: HopperTile) -> int:
    """Returns how many query heads of one key head share a tile: more than 1 if queries leave half of the tile empty.

    For a packed batch the mean counts: a few long sequences among many short ones lose nothing by sharing.
    """
    x = problem
    queries = x.longest_q if x.q.dim() == 4 else min(x.longest_q, cdiv(x.q.shape[0], max(1, x.batch)))
    if 2 * queries > tile.block_m or x.block_mask is not None:
        return 1
    # The fewest tiles; among equal numbers, the tiles whose keys are loaded for more heads.
    return min(_shares(x), key=lambda heads: (cdiv(queries * slots_of_heads(heads), tile.block_m) * x.group_size // heads, -heads))


def rows_of_a_tile(problem: Problem) -> int:
    """Returns the maximum number of rows that hold all queries of a tile's heads."""
    x = problem
    return x.longest_q if x.block_mask is not None else x.longest_q * slots_of_heads(_shares(x)[-1])


def forward_facts(problem: Problem) -> ProblemFacts:
    """Returns the columns of a forward in `crossovers`."""
    facts = _tile_facts(problem)
    facts["decode"] = _decode(problem, HOPPER_FORWARD[fastest_tile("sm_90", facts)])
    return facts


def _tile_facts(problem: Problem) -> ProblemFacts:
    """Returns the columns that select a tile."""
    x = problem
    # Over pages the maximum, because long sequences dominate beside many sequences of one query.
    is_mixed = x.page_table is not None and x.longest_q > ROWS.value
    has_mean = x.q.dim() == 3 and not is_mixed
    mean_tokens = x.q.shape[0] // max(1, x.batch) if has_mean else max(x.longest_q, x.longest_kv)
    return facts_of(x, mean_tokens=mean_tokens, rows=rows_of_a_tile(x))


def _decode(problem: Problem, tile: HopperTile) -> str:
    """Returns "no" if queries fill more than half of a tile or other work counts; otherwise how heads use the keys."""
    x = problem
    is_plain = not x.is_modified and x.dropout_p == 0
    if 2 * x.longest_q > tile.block_m or x.block_mask is not None:
        return "no"
    if x.page_table is not None:
        return "shared"
    return "no" if not is_plain else "shared" if heads_of_a_tile(x, tile) > 1 else "alone"


def forward_tile(problem: Problem) -> HopperTile:
    """Returns the committed tile."""
    return HOPPER_FORWARD[fastest_tile("sm_90", _tile_facts(problem))]


def unsupported_block_mask(problem: Problem, tile: tuple[int, int]) -> str | None:
    """Returns the reason if the blocks of the problem's block mask are not multiples of a tile (queries, keys); None: they are."""
    if problem.block_mask is None:
        return None
    sizes = (problem.block_mask.block_size_q, problem.block_mask.block_size_kv)
    if all(size % block == 0 for size, block in zip(sizes, tile, strict=True)):
        return None
    return f"its tiles are {tile[0]} x {tile[1]}, and the block mask's blocks {sizes[0]} x {sizes[1]}: no multiples"


def _is_wide(problem: Problem) -> bool:
    return max(problem.q.shape[-1], problem.v.shape[-1]) > 256


def forward_unsupported(problem: Problem, out: Tensor) -> str | None:
    """Returns the reason if the forward cannot run this problem; None: it can."""
    if capability_of(problem.device) == 90 and _is_wide(problem):
        return "it takes head dims up to 256"
    return _unsupported_device(problem) or unsupported_operands(problem, out) or _unsupported_tile(problem, forward_tile(problem))


def wide_tile(problem: Problem) -> HopperTile:
    """Returns the committed tile for head dims above 256; if v is columns of k, two stages fit."""
    x = problem
    tile = next(tile for tile in HOPPER_WIDE if x.q.shape[-1] <= tile.head_dim_qk)
    return replace(tile, num_stages=2) if x.is_latent else tile


def wide_unsupported(problem: Problem, out: Tensor, has_max_logit: bool) -> str | None:
    """Returns the reason if the forward for head dims above 256 cannot run this problem; None: it can."""
    if capability_of(problem.device) == 90 and not _is_wide(problem):
        return "it takes head dims above 256"
    if has_max_logit:
        return "it does not return max_logit"
    return _unsupported_device(problem) or unsupported_operands(problem, out) or _unsupported_tile(problem, wide_tile(problem))


def _unsupported_device(problem: Problem) -> str | None:
    return None if capability_of(problem.device) == 90 else "it is written for Hopper, sm_90"


def unsupported_operands(problem: Problem, out: Tensor) -> str | None:
    """Returns the reason if the copy engine or the forwards cannot handle this problem's operands, for any head dims; None: they
    can.
    """
    x = problem
    if x.q.dtype not in DTYPES:
        return f"it takes bf16 and fp16, not {str(x.q.dtype).removeprefix('torch.')}"
    if x.descales_kv:
        return "it takes k and v in q's dtype, and they are in FP8"
    if x.softmax_scale == 0:
        return "it does not support a softmax_scale of 0"
    if x.origin:
        return "it draws dropout at the call's own positions, and rng_state has origins in a larger problem"
    if 0 in x.q.shape or 0 in x.k.shape or x.batch == 0:
        return "there is nothing to load"
    errors = (descriptor_error(name, t) for name, t in (("q", x.q), ("k", x.k), ("v", x.v), ("out", out)))
    return next((error for error in errors if error), None)


def _unsupported_tile(problem: Problem, tile: HopperTile) -> str | None:
    return unsupported_block_mask(problem, (tile.block_m, tile.block_n)) or unsupported_pages(problem, tile.block_n)


def backward_unsupported_block_mask(problem: Problem, block_n: int, block_m: int, keys: int) -> str | None:
    """Returns the reason if kernels with these tiles (see `HopperBackwardTile`) do not support the block mask; None: they do."""
    x = problem
    if x.block_mask is None:
        return None
    if x.group_size > 1 and x.block_mask.heads > 1:
        return "query heads that share a key head each have their own block mask"
    errors = (unsupported_block_mask(x, tile) for tile in ((QUERIES, block_n), (block_m, keys)))
    return next((error for error in errors if error), None)


def unsupported_statistics(problem: Problem) -> str | None:
    """Returns the reason if the copy engine cannot address all statistics of a backward's rows; None: it can."""
    x = problem
    is_reached = x.num_heads * (x.q.shape[-3] + 256) * x.batch < 2**29
    return None if is_reached else "its statistics exceed the range of the copy engine's coordinates"


def backward_unsupported(problem: Problem, out: Tensor, dout: Tensor) -> str | None:
    """Returns the reason if the two-kernel backward cannot run this problem; None: it can."""
    x = problem
    if error := forward_unsupported(x, out) or descriptor_error("dout", dout) or unsupported_statistics(x):
        return error
    tile = select_hopper_backward_tile(x.q.shape[-1], x.v.shape[-1], is_modified=True)
    return backward_unsupported_block_mask(x, tile.block_n, tile.block_m, tile.keys)


def backward_tile(problem: Problem) -> HopperBackwardTile:
    """Returns the committed tile."""
    x = problem
    return select_hopper_backward_tile(x.q.shape[-1], x.v.shape[-1], is_modified=x.is_modified)


def fused_tile(problem: Problem) -> HopperFusedTile:
    """Returns the committed tile."""
    return HOPPER_FUSED[fastest_tile("sm_90 fused", facts_of(problem))]


def converts_dq(problem: Problem, dq: Tensor, tile: HopperFusedTile) -> bool:
    """Returns whether the fused backward with this tile converts dq: if the tile does, dq's rows have its width, and there are no
    lengths.
    """
    x = problem
    is_wide = x.q.shape[-1] == tile.head_dim and not any(n % tile.head_dim for n in dq.stride()[:-1])
    return tile.converts and is_wide and not x.has_lengths


def fused_unsupported(problem: Problem, out: Tensor, dout: Tensor) -> str | None:
    """Returns the reason if the fused backward cannot run this problem; None: it can."""
    x = problem
    if max(x.q.shape[-1], x.v.shape[-1]) > 128:
        return _TOO_WIDE
    return backward_unsupported(x, out, dout)


def fused_192_unsupported(problem: Problem, out: Tensor, dout: Tensor) -> str | None:
    """Returns the reason if the fused backward for head dims above 128 cannot run this problem; None: it can."""
    x, tile = problem, HOPPER_FUSED_192
    if not 128 < x.q.shape[-1] <= tile.head_dim_qk or x.v.shape[-1] > tile.head_dim_v:
        return f"it takes head dims of q and k from 136 to {tile.head_dim_qk}, and of v up to {tile.head_dim_v}"
    if x.is_modified or x.dropout_p > 0:
        return "it supports only scaled scores with an optional band: no bias, mod, softcap, dropout or block mask"
    return backward_unsupported(x, out, dout)
