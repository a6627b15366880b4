"""Tiles of the kernels for lists of keys: heads of a query, and entries of its list."""

from __future__ import annotations

from flexattn.kernels_triton.common.problem import Problem
from flexattn.kernels_triton.common.tiles import slots_of_heads
from flexattn.kernels_triton.runtime.device import INTERPRETER, Tile, capability_of

_WIDE = 512  # from these head dims on, of q and v together, a tile of 64 keys leaves no room for a second one


LARGE_MEMORY = (80, 90, 100)  # GPUs whose programs can have over 160 KB of shared memory

BLOCKS = (16, 32, 64, 128)
"""Sizes of blocks of keys whose gradients one program sums."""

MOST_ENTRIES = 128
"""Entries of the largest tile of `rows_tile`."""


def forward_tile(problem: Problem) -> Tile:
    return _tile(problem, 64)


def backward_tile(problem: Problem) -> Tile:
    """Returns the tile of dq and the weights, or with `apart` of a kernel for the weights alone.

    With 128 heads of 576 and 512 columns, a kernel for the weights alone halves the time (sparse_weights_h200.json).
    """
    x = problem
    heads = padded_heads(x)
    if x.head_dims < _WIDE or x.q.element_size() > 2 or _is_interpreted(x):
        return _tile(x, 64 if x.q.element_size() == 2 else 32)
    is_large = capability_of(x.device) in LARGE_MEMORY
    if is_large and heads >= 64:
        return Tile(min(heads, 128), 128, 8, 3, apart=True)
    return Tile(min(heads, 32), 32 if is_large else 16, 8, 2)


def delta_tile(problem: Problem) -> Tile:
    return Tile(16, 16, 4, 1)


def dq_tile(problem: Problem) -> Tile:
    """Returns the tile of dq, if weights have a kernel of their own: heads, and entries of an iteration."""
    return Tile(16, 16, 4, 1) if _is_interpreted(problem) else Tile(min(padded_heads(problem), 128), 64, 8, 3)


def columns(problem: Problem) -> tuple[int, int]:
    """Returns the columns of an iteration of the weights' kernel, and of a program of dq's kernel."""
    return (16, 16) if _is_interpreted(problem) else (64, 128)


def padded_heads(problem: Problem) -> int:
    return max(16, slots_of_heads(problem.group_size))


def entries_tile(problem: Problem) -> Tile:
    return Tile(padded_heads(problem), 16 if _is_interpreted(problem) else 1024, 4, 1)


def rows_tile(problem: Problem) -> Tile:
    """Returns the tile of the rows of listed keys: columns, and entries."""
    if _is_interpreted(problem):
        return Tile(16, 16, 4, 1)
    side = 2**15 // problem.q.element_size() // padded_heads(problem)
    return Tile(min(64, side), min(MOST_ENTRIES, side), 4, 2)


def sums_tile(problem: Problem) -> Tile:
    """Returns the tile of the sums of rows: columns, and rows of an iteration."""
    return Tile(16, 16, 4, 1) if _is_interpreted(problem) else Tile(128, 16, 4, 2)


def block_forward_tile(problem: Problem) -> Tile:
    """Returns the tile of the queries and heads that list a block: one warpgroup, so that two programs share a multiprocessor."""
    return Tile(32, problem.kv_block, 4, 1) if _is_interpreted(problem) else Tile(64, problem.kv_block, 4, 2)


def block_backward_tile(problem: Problem) -> Tile:
    return Tile(32, problem.kv_block, 4, 1) if _is_interpreted(problem) else Tile(64, problem.kv_block, 8, 2)


def pairs_tile(problem: Problem) -> Tile:
    """Returns the tile of the sums of partial results: heads, and entries of an iteration."""
    heads = padded_heads(problem)
    return Tile(heads, 2 if _is_interpreted(problem) else max(1, 64 // heads), 4, 2)


def blocks_tile(problem: Problem) -> Tile:
    """Returns the tile of the sums of a block of keys: queries and heads of an iteration, and columns."""
    if _is_interpreted(problem):
        return Tile(32, 16, 4, 1)
    return Tile(64, 128 if problem.q.element_size() == 2 else 64, 8, 3 if problem.q.element_size() == 2 else 1)


def _is_interpreted(problem: Problem) -> bool:
    return capability_of(problem.device) == INTERPRETER


def _tile(problem: Problem, most: int) -> Tile:
    """Returns the tile. most: the most heads of a program, and entries of an iteration."""
    x = problem
    if _is_interpreted(x):
        return Tile(16, 16, 4, 1)
    is_wide = x.head_dims >= _WIDE or x.q.element_size() > 2
    heads = min(max(slots_of_heads(x.group_size), 16), most)
    keys = most // 2 if is_wide or x.descales_kv else most  # a tile of keys that are converted is in registers
    return Tile(heads, keys, 8 if is_wide or heads > 32 else 4, 2)
