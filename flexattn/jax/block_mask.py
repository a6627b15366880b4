"""Block masks for JAX arrays, by `flexattn.create_block_mask`, from a mask_mod written in JAX."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor

from flexattn import block_mask as torch_masks
from flexattn.jax import mods

_LISTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
NAMES = (*_LISTS, *(name.replace("kv_", "q_") for name in _LISTS))


class BlockMask(NamedTuple):
    """A mask_mod, and the visible blocks of queries and keys; `create_block_mask` creates one."""

    mask_mod: mods.Mod
    lists: tuple[jax.Array, ...]  # int32, in the order of NAMES: counts [b, h, blocks] and indices [b, h, blocks, most]
    block_size: tuple[int, int]
    seq_lengths: tuple[int, int]

    def stand_in(self, lists: list[Tensor], mask_mod: mods.Mod) -> object:
        """Returns a substitute for torch's BlockMask that `attention`'s checks accept, with tensors as lists."""
        named = dict(zip(NAMES, lists, strict=True))
        return SimpleNamespace(**named, BLOCK_SIZE=self.block_size, mask_mod=mask_mod, seq_lengths=self.seq_lengths)


def create_block_mask(
    mask_mod: mods.Mod, B: int | None, H: int | None, Q_LEN: int, KV_LEN: int, BLOCK_SIZE: int | tuple[int, int] = 128
) -> BlockMask:
    """Returns the blocks of keys that each block of queries sees, in part or entirely, under a mask_mod written in JAX.

    Like `flexattn.create_block_mask`, but outside of jit: captured arrays must have values, and the mask is only valid for them.

    Args:
        mask_mod: mask_mod(b, h, q_idx, kv_idx) -> whether the query sees the key, as for `attention`.
        B, H: batch and query heads. Pass None or 1 if the mask is the same for all.
        Q_LEN, KV_LEN: the longest sequences for which the mask is used.
        BLOCK_SIZE: queries and keys of a block, multiples of 16.

    Raises:
        ValueError, TypeError: as `flexattn.create_block_mask`; ValueError if mask_mod captures a traced array.
    """
    traced = mods.trace("mask_mod", mask_mod)
    tensors = {}
    for array in traced.all_arrays():
        if isinstance(array, jax.core.Tracer):
            raise ValueError("mask_mod captures a traced array; accepted: arrays with values; create the block mask outside of jit")
        tensors[id(array)] = _to_torch(array)
    mask = torch_masks.create_block_mask(traced.written(tensors), B, H, Q_LEN, KV_LEN, "cpu", BLOCK_SIZE)
    lists = torch_masks.block_lists(mask, B or 1, H or 1, Q_LEN, KV_LEN, torch.device("cpu"))
    arrays = tuple(jnp.asarray(t.numpy()) for t in lists.tensors)
    return BlockMask(mask_mod, arrays, lists.block_size, (Q_LEN, KV_LEN))


def _to_torch(array: jax.Array) -> Tensor:
    values = np.asarray(array)
    return torch.from_numpy(values.astype(np.float32) if values.dtype.name == "bfloat16" else values.copy())
