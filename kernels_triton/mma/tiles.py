"""Tiles of the kernels for mma.sync, by head dim and by the shared memory of a program."""

from __future__ import annotations

from dataclasses import dataclass

from flexattn.kernels_triton.common.problem import Problem
from flexattn.kernels_triton.runtime.device import capability_of

CAPABILITIES = frozenset((80, 86, 89, 120))


@dataclass(frozen=True, kw_only=True)
class MmaTile:
    """A tile of the forward. It serves head dims up to `head_dim_qk` and `head_dim_v`."""

    head_dim_qk: int
    head_dim_v: int
    block_m: int
    block_n: int
    warps: int  # each has 16 rows of a product at a time
    # 1: k and v have one buffer each. v comes during the scores, and the next k during the softmax and the product with v.
    # 2: k and v have rings of two, and a block comes during the products of the block before.
    num_stages: int
    holds_q: bool = False  # q is in registers, and its shared memory is free for k and v


# Not measured on such a GPU: code for sm_80 and sm_89 was timed on an NVIDIA H100.
_LARGE_MEMORY = (  # 163 KiB
    MmaTile(head_dim_qk=64, head_dim_v=64, block_m=128, block_n=64, warps=4, num_stages=2, holds_q=True),
    MmaTile(head_dim_qk=96, head_dim_v=96, block_m=128, block_n=64, warps=4, num_stages=1),
    MmaTile(head_dim_qk=128, head_dim_v=128, block_m=128, block_n=32, warps=4, num_stages=2),
    MmaTile(head_dim_qk=192, head_dim_v=128, block_m=128, block_n=64, warps=8, num_stages=1),
    MmaTile(head_dim_qk=256, head_dim_v=256, block_m=128, block_n=64, warps=8, num_stages=1),
)
_SMALL_MEMORY = (  # 99 KiB
    MmaTile(head_dim_qk=64, head_dim_v=64, block_m=128, block_n=64, warps=4, num_stages=2, holds_q=True),
    MmaTile(head_dim_qk=96, head_dim_v=96, block_m=128, block_n=64, warps=4, num_stages=1),
    MmaTile(head_dim_qk=128, head_dim_v=128, block_m=128, block_n=32, warps=4, num_stages=1),
    MmaTile(head_dim_qk=192, head_dim_v=128, block_m=128, block_n=32, warps=8, num_stages=1),
    MmaTile(head_dim_qk=256, head_dim_v=256, block_m=128, block_n=32, warps=8, num_stages=1),
)
_MODIFIED = (  # registers for values beside the scores: a bias, mods, random numbers
    MmaTile(head_dim_qk=64, head_dim_v=64, block_m=64, block_n=64, warps=4, num_stages=2, holds_q=True),
    MmaTile(head_dim_qk=128, head_dim_v=128, block_m=64, block_n=64, warps=4, num_stages=1),
    MmaTile(head_dim_qk=256, head_dim_v=256, block_m=64, block_n=32, warps=4, num_stages=1),
)
WIDEST = _LARGE_MEMORY[-1].head_dim_qk


def forward_tile(problem: Problem, capability: int | None = None) -> MmaTile:
    """Returns the tile for this problem, for its own device or for one of `capability`."""
    x = problem
    tiles: tuple[MmaTile, ...] = _LARGE_MEMORY if (capability or capability_of(x.device)) == 80 else _SMALL_MEMORY
    if x.is_modified or x.dropout_p > 0:
        tiles = _MODIFIED
    return next(tile for tile in tiles if x.q.shape[-1] <= tile.head_dim_qk and x.v.shape[-1] <= tile.head_dim_v)
