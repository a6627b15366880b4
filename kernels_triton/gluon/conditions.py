"""Conditions that kernels in Gluon share: operands and block masks that they support, and query heads that share a tile."""

from __future__ import annotations

import math

from torch import Tensor

from flexattn.kernels_triton.common.problem import Problem
from flexattn.kernels_triton.common.tiles import HopperFusedTile, QueryTile, cdiv, slots_of_heads
from flexattn.kernels_triton.gluon.descriptors import DTYPES, FP8_DTYPES, batch_steps, descriptor_error
from flexattn.kernels_triton.gluon.operands import ROWS

QUERIES = 128  # queries of a program of dq: two warpgroups
KEYS = 128  # keys of a program of the fused backward: two warpgroups


def shares(problem: Problem) -> list[int]:
    """Returns how many query heads of one key head may share a warpgroup's rows: a power of two that divides them, or all."""
    size = problem.group_size
    power = min(size & -size, ROWS.value)
    return [power, size] if slots_of_heads(size) <= ROWS.value else [power]


def heads_of_a_tile(problem: Problem, tile: QueryTile) -> int:
    """Returns how many query heads of one key head share a tile: more than 1 if queries leave half of the tile empty.

    For a packed batch the mean counts: a few long sequences among many short ones lose nothing by sharing.
    """
    x = problem
    queries = x.longest_q if x.q.dim() == 4 else min(x.longest_q, cdiv(x.q.shape[0], max(1, x.batch)))
    if 2 * queries > tile.block_m or x.block_mask is not None:
        return 1
    # The fewest tiles; among equal numbers, the tiles whose keys are loaded for more heads.
    return min(shares(x), key=lambda heads: (cdiv(queries * slots_of_heads(heads), tile.block_m) * x.group_size // heads, -heads))


def rows_of_a_tile(problem: Problem) -> int:
    """Returns the maximum number of rows that hold all queries of a tile's heads."""
    x = problem
    return x.longest_q if x.block_mask is not None else x.longest_q * slots_of_heads(shares(x)[-1])


def unsupported_block_mask(problem: Problem, tile: tuple[int, int]) -> str | None:
    """Returns the reason if the blocks of the problem's block mask are not multiples of a tile (queries, keys); None: they are."""
    if problem.block_mask is None:
        return None
    if problem.is_batch_invariant:
        return "it has the blocks of a block mask in an order that depends on all queries of a tile"
    sizes = (problem.block_mask.block_size_q, problem.block_mask.block_size_kv)
    if all(size % block == 0 for size, block in zip(sizes, tile, strict=True)):
        return None
    return f"its tiles are {tile[0]} x {tile[1]}, and the block mask's blocks {sizes[0]} x {sizes[1]}: no multiples"


def unsupported_call(problem: Problem) -> str | None:
    """Returns the reason if no kernel in Gluon for 16 bits runs this problem, whatever its strides; None: they can."""
    x = problem
    if x.q.dtype not in DTYPES:
        return f"it takes bf16 and fp16, not {str(x.q.dtype).removeprefix('torch.')}"
    if x.descales_kv:
        return "it takes k and v in q's dtype, and they are in FP8"
    return unsupported_values(x)


def unsupported_fp8_call(problem: Problem) -> str | None:
    """Returns the reason if no kernel in Gluon for mma.sync in FP8 runs this problem, whatever its strides; None: they can."""
    x = problem
    dtypes = sorted({str(t.dtype).removeprefix("torch.") for t in (x.q, x.k, x.v)})
    if x.q.dtype not in FP8_DTYPES or len(dtypes) > 1:
        return f"it takes q, k and v all in float8_e4m3fn or all in float8_e5m2, not {' and '.join(dtypes)}"
    return unsupported_values(x)


def unsupported_values(problem: Problem) -> str | None:
    """Returns the reason if no kernel in Gluon runs this problem, whatever its dtypes and strides; None: they can."""
    x = problem
    if x.softmax_scale == 0:
        return "it does not support a softmax_scale of 0"
    if x.origin:
        return "it draws dropout at the call's own positions, and rng_state has origins in a larger problem"
    if 0 in x.q.shape or 0 in x.k.shape or x.batch == 0:
        return "there is nothing to load"
    return None


def unsupported_operands(problem: Problem, out: Tensor) -> str | None:
    """Returns the reason if the copy engine or the forwards cannot handle this problem's operands, for any head dims; None: they
    can.
    """
    x = problem
    errors = (descriptor_error(name, t) for name, t in (("q", x.q), ("k", x.k), ("v", x.v), ("out", out)))
    return unsupported_call(x) or next((error for error in errors if error), None)


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


def converts_dq(problem: Problem, dq: Tensor, tile: HopperFusedTile) -> bool:
    """Returns whether the fused backward with this tile converts dq: if the tile does, dq's rows have its width, there are no
    lengths, and no fewer keys than queries. Programs wait for a head's keys, and 4096 queries of 300 keys took 2.5 times as long.
    """
    x = problem
    is_wide = x.q.shape[-1] == tile.head_dim and not any(n % tile.head_dim for n in dq.stride()[:-1])
    return tile.converts and is_wide and not x.has_lengths and x.longest_q <= x.longest_kv


_FEWEST = 8  # minimum rows of one copy: the period of the swizzle of shared memory


def rows_of_a_copy(problem: Problem, block_n: int) -> int:
    """Returns how many keys one copy loads; 0: the keys are not in pages."""
    return 0 if problem.page_table is None else math.gcd(problem.k.shape[1], block_n)


def unsupported_pages(problem: Problem, block_n: int) -> str | None:
    """Returns the reason if the copy engine cannot load a problem's pages; None: it can, or there are none."""
    x = problem
    if x.page_table is None:
        return None
    if rows_of_a_copy(x, block_n) < _FEWEST:
        return f"its copies take {_FEWEST} keys of a page or more, and pages have {x.k.shape[1]}: no multiple of {_FEWEST}"
    steps = (batch_steps(t) or (0, 0) for t in (x.k, x.v))
    if max(max(step) for step in steps) * x.k.shape[0] >= 2**31:
        return f"it counts the rows of all {x.k.shape[0]} pages in 32 bits, and there are 2**31 or more"
    return None
