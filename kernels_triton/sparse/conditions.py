"""Conditions of the kernels for blocks of keys and of the kernels on sm_90, and the tiles of the latter."""

from __future__ import annotations

import torch

from flexattn.kernels_triton.common.problem import Problem
from flexattn.kernels_triton.common.tiles import split_head_dim
from flexattn.kernels_triton.runtime.device import INTERPRETER, Tile, capability_of
from flexattn.kernels_triton.sparse.tiles import BLOCKS, LARGE_MEMORY


def widths(problem: Problem) -> tuple[int, int, int]:
    """Returns the widths of both parts of q and k, and of v, in shared memory."""
    first, second = split_head_dim(problem.q.shape[-1])
    return first, second, sum(split_head_dim(problem.v.shape[-1]))


def _not_in_16_bits(problem: Problem) -> str | None:
    x = problem
    if x.q.dtype not in (torch.float16, torch.bfloat16) or x.descales_kv or x.latent_rows is not None:
        return "it takes q, k and v in 16 bits"
    return None


def wide_unsupported(problem: Problem) -> str | None:
    """Returns the reason if the kernel for latent attention cannot run this problem; None: it can."""
    x = problem
    if reason := _not_in_16_bits(x):
        return reason
    if not x.is_latent or widths(x)[1] not in (0, 64):
        return "it takes v = k[..., :n] that is no copy, and k with 289 to 320, 385 to 512, or 545 to 576 columns"
    return None


def block_unsupported(problem: Problem) -> str | None:
    """Returns the reason if the kernels that go block by block cannot run this problem; None: they can."""
    x = problem
    if reason := _not_in_16_bits(x):
        return reason
    if capability_of(x.device) not in (INTERPRETER, *LARGE_MEMORY):
        return "it needs the shared memory of compute capability 8.0, 9.0 or 10.0"
    if x.page_table is not None:
        return "it takes k and v without pages"
    if x.kv_block not in BLOCKS or x.group_size > 32 or max(x.q.shape[-1], x.v.shape[-1]) > 128:
        return "it takes blocks of 16 to 128 keys, up to 32 query heads for each key head, and head dims up to 128"
    return None


def wide_tile(problem: Problem) -> Tile:
    return Tile(64, 64, 4, 2)
