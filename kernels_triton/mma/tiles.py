"""Tiles of the kernels for mma.sync, by head dim and by the shared memory of a program."""

from __future__ import annotations

from dataclasses import dataclass, replace

from flexattn.kernels_triton.common.problem import Problem
from flexattn.kernels_triton.gluon.conditions import rows_of_a_tile
from flexattn.kernels_triton.runtime.device import capability_of


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

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n}x{self.warps}x{self.num_stages}" + (" q" if self.holds_q else "")


# Timed as code of sm_80 on an NVIDIA H200, and on none of these GPUs. For a causal mask at head dim 256, 64x64 is the fastest tile
# if a multiprocessor holds two programs of 96 KiB. An H200's does, and an A100's does not.
_LARGE_MEMORY = (  # 163 KiB
    MmaTile(head_dim_qk=64, head_dim_v=64, block_m=128, block_n=64, warps=4, num_stages=2, holds_q=True),
    MmaTile(head_dim_qk=96, head_dim_v=96, block_m=128, block_n=64, warps=4, num_stages=1),
    MmaTile(head_dim_qk=128, head_dim_v=128, block_m=128, block_n=64, warps=4, num_stages=1),
    MmaTile(head_dim_qk=192, head_dim_v=128, block_m=128, block_n=64, warps=8, num_stages=1),
    MmaTile(head_dim_qk=256, head_dim_v=256, block_m=128, block_n=32, warps=8, num_stages=2, holds_q=True),
)
_SMALL_MEMORY = (  # 99 KiB
    MmaTile(head_dim_qk=64, head_dim_v=64, block_m=128, block_n=64, warps=4, num_stages=2, holds_q=True),
    MmaTile(head_dim_qk=96, head_dim_v=96, block_m=128, block_n=64, warps=4, num_stages=1),
    MmaTile(head_dim_qk=128, head_dim_v=128, block_m=128, block_n=32, warps=4, num_stages=1),
    MmaTile(head_dim_qk=192, head_dim_v=128, block_m=128, block_n=32, warps=8, num_stages=1),
    MmaTile(head_dim_qk=256, head_dim_v=256, block_m=128, block_n=32, warps=8, num_stages=2, holds_q=True),
)
_MODIFIED = (  # registers for values beside the scores: a bias, mods, random numbers
    MmaTile(head_dim_qk=64, head_dim_v=64, block_m=64, block_n=64, warps=4, num_stages=2, holds_q=True),
    MmaTile(head_dim_qk=128, head_dim_v=128, block_m=64, block_n=64, warps=4, num_stages=1),
    MmaTile(head_dim_qk=256, head_dim_v=256, block_m=64, block_n=32, warps=4, num_stages=1),
)
_FP8 = (  # 99 KiB. Timed on an NVIDIA H200, which has no such product in FP8, and converts its operands
    MmaTile(head_dim_qk=64, head_dim_v=64, block_m=128, block_n=64, warps=4, num_stages=2, holds_q=True),
    MmaTile(head_dim_qk=128, head_dim_v=128, block_m=128, block_n=64, warps=4, num_stages=2),
    MmaTile(head_dim_qk=192, head_dim_v=128, block_m=128, block_n=64, warps=8, num_stages=2),
    MmaTile(head_dim_qk=256, head_dim_v=256, block_m=128, block_n=32, warps=8, num_stages=2),
)
_FEW_QUERIES = (  # not timed: each warp has 16 rows, and copies are ahead of the products
    MmaTile(head_dim_qk=64, head_dim_v=64, block_m=64, block_n=64, warps=4, num_stages=2, holds_q=True),
    MmaTile(head_dim_qk=128, head_dim_v=128, block_m=64, block_n=32, warps=4, num_stages=2),
    MmaTile(head_dim_qk=256, head_dim_v=256, block_m=64, block_n=32, warps=4, num_stages=2, holds_q=True),
)
# Not timed. Two programs with 32 keys of 256 columns would need 128 KiB.
_FEW_QUERIES_SMALL_MEMORY = (*_FEW_QUERIES[:2], replace(_FEW_QUERIES[2], block_n=16))
# Not timed. ptxas spills most for 12.0, and with 64 keys it loads 40 spilled numbers in the loop of blocks that the left side cuts.
_LEFT_SIDE_120 = (_SMALL_MEMORY[0], replace(_SMALL_MEMORY[1], block_n=32, num_stages=2), *_SMALL_MEMORY[2:])
_FP8_LEFT_SIDE_120 = (_FP8[0], replace(_FP8[1], block_n=32), *_FP8[2:])
WIDEST = _LARGE_MEMORY[-1].head_dim_qk


def forward_tile(problem: Problem, capability: int | None = None) -> MmaTile:
    """Returns the tile for this problem, for its own device or for one of `capability`."""
    x = problem
    capability = capability or capability_of(x.device)
    is_large, has_left_120 = capability == 80, capability == 120 and x.window_left is not None
    tiles: tuple[MmaTile, ...] = _LARGE_MEMORY if is_large else _SMALL_MEMORY
    if x.is_modified or x.dropout_p > 0:
        tiles = _MODIFIED
    elif rows_of_a_tile(x) <= _FEW_QUERIES[0].block_m and not x.is_batch_invariant:
        tiles = _FEW_QUERIES if is_large or x.is_fp8 else _FEW_QUERIES_SMALL_MEMORY
    elif x.is_fp8:
        tiles = _FP8_LEFT_SIDE_120 if has_left_120 else _FP8
    elif has_left_120:
        tiles = _LEFT_SIDE_120
    return next(tile for tile in tiles if x.q.shape[-1] <= tile.head_dim_qk and x.v.shape[-1] <= tile.head_dim_v)


@dataclass(frozen=True, kw_only=True)
class MmaBackwardTile:
    """A tile of the fused backward. It serves head dims up to `head_dim`, of q and k and of v."""

    head_dim: int
    block_m: int  # queries of an iteration
    block_n: int  # keys of a program
    warps: int
    # Warps along the keys in scores, along the keys in dk and dv, and along the queries in dq; the others are along columns
    score_warps: int
    key_warps: int
    query_warps: int
    q_stages: int
    holds_v: bool  # v is in registers, and its shared memory is free for other tiles

    def __str__(self) -> str:
        warps = f"{self.score_warps}-{self.key_warps}-{self.query_warps}"
        return f"{self.block_m}x{self.block_n}x{self.warps}x{self.q_stages} {warps}" + (" v" if self.holds_v else "")


_BACKWARD_LARGE_MEMORY = (
    MmaBackwardTile(
        head_dim=64, block_m=32, block_n=128, warps=4, score_warps=4, key_warps=4, query_warps=2, q_stages=2, holds_v=True
    ),
    MmaBackwardTile(
        head_dim=96, block_m=64, block_n=64, warps=4, score_warps=2, key_warps=2, query_warps=1, q_stages=2, holds_v=True
    ),
    MmaBackwardTile(
        head_dim=128, block_m=64, block_n=128, warps=8, score_warps=4, key_warps=2, query_warps=2, q_stages=2, holds_v=False
    ),
    MmaBackwardTile(
        head_dim=256, block_m=64, block_n=64, warps=8, score_warps=4, key_warps=1, query_warps=1, q_stages=1, holds_v=False
    ),
)
_BACKWARD_SMALL_MEMORY = (
    _BACKWARD_LARGE_MEMORY[0],
    MmaBackwardTile(
        head_dim=96, block_m=64, block_n=64, warps=4, score_warps=4, key_warps=4, query_warps=1, q_stages=1, holds_v=True
    ),
    MmaBackwardTile(
        head_dim=128, block_m=32, block_n=64, warps=4, score_warps=4, key_warps=1, query_warps=1, q_stages=2, holds_v=True
    ),
    MmaBackwardTile(
        head_dim=256, block_m=32, block_n=64, warps=8, score_warps=4, key_warps=1, query_warps=1, q_stages=1, holds_v=True
    ),
)


def backward_tile(problem: Problem, capability: int | None = None) -> MmaBackwardTile:
    """Returns the tile for this problem, for its own device or for one of `capability`."""
    x = problem
    width = max(x.q.shape[-1], x.v.shape[-1])
    is_large = (capability or capability_of(x.device)) == 80
    tile = next(tile for tile in (_BACKWARD_LARGE_MEMORY if is_large else _BACKWARD_SMALL_MEMORY) if width <= tile.head_dim)
    if x.dropout_p > 0 and tile.block_m * tile.block_n > 64 * 64:  # random numbers need shared memory on their way to their threads
        return replace(tile, q_stages=1)
    return tile


@dataclass(frozen=True, kw_only=True)
class MmaDqTile:
    """A tile of the kernel that computes dq alone. It serves head dims up to `head_dim`, of q and k and of v."""

    head_dim: int
    block_m: int  # queries of a program
    block_n: int  # keys of an iteration
    warps: int
    num_stages: int  # 1: the next v comes during the product with k, and then the next k; 2: k and v have rings of two

    def __str__(self) -> str:
        return f"{self.block_m}x{self.block_n}x{self.warps}x{self.num_stages}"


_DQ_LARGE_MEMORY = (
    MmaDqTile(head_dim=64, block_m=128, block_n=32, warps=4, num_stages=2),
    MmaDqTile(head_dim=96, block_m=128, block_n=32, warps=4, num_stages=1),
    MmaDqTile(head_dim=128, block_m=128, block_n=32, warps=4, num_stages=1),
    MmaDqTile(head_dim=256, block_m=128, block_n=32, warps=8, num_stages=1),
)
_DQ_SMALL_MEMORY = (
    _DQ_LARGE_MEMORY[0],
    MmaDqTile(head_dim=96, block_m=64, block_n=64, warps=4, num_stages=1),
    MmaDqTile(head_dim=128, block_m=64, block_n=32, warps=4, num_stages=1),
    MmaDqTile(head_dim=256, block_m=64, block_n=32, warps=4, num_stages=1),
)


def dq_tile(problem: Problem, capability: int | None = None) -> MmaDqTile:
    """Returns the tile of dq for this problem, for its own device or for one of `capability`."""
    x = problem
    width = max(x.q.shape[-1], x.v.shape[-1])
    is_large = (capability or capability_of(x.device)) == 80 and not (x.dropout_p > 0 and width > 128)  # random numbers need memory
    return next(tile for tile in (_DQ_LARGE_MEMORY if is_large else _DQ_SMALL_MEMORY) if width <= tile.head_dim)
