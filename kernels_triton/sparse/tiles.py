"""Tiles of the kernels for lists of keys: heads of a query, and entries of its list."""

from __future__ import annotations

from flexattn.kernels_triton.common.problem import Problem
from flexattn.kernels_triton.common.tiles import slots_of_heads
from flexattn.kernels_triton.runtime.device import INTERPRETER, Tile, capability_of

_WIDE = 512  # from these head dims on, of q and v together, a tile of 64 keys leaves no room for a second one


def forward_tile(problem: Problem) -> Tile:
    return _tile(problem, 64)


def backward_tile(problem: Problem) -> Tile:
    return _tile(problem, 32)


def _tile(problem: Problem, most: int) -> Tile:
    """Returns the tile. most: the most heads of a program, and entries of an iteration."""
    x = problem
    if capability_of(x.device) == INTERPRETER:
        return Tile(16, 16, 4, 1)
    is_wide = x.head_dims >= _WIDE or x.q.element_size() > 2
    heads = min(max(slots_of_heads(x.group_size), 16), most)
    keys = most // 2 if is_wide or x.descales_kv else most  # a tile of keys that are converted is in registers
    return Tile(heads, keys, 8 if is_wide or heads > 32 else 4, 2)
