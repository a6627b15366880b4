"""Block masks of JAX arrays: made by `flexattn.create_block_mask`, from a mask_mod written in JAX."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

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
    """A mask_mod, and which blocks of queries and keys it leaves; `create_block_mask` makes one."""

    mask_mod: mods.Mod
    lists: tuple[jax.Array, ...]  # int32, in the order of NAMES: how many blocks, [b, h, blocks], and which, [b, h, blocks, most]
    block_size: tuple[int, int]
    seq_lengths: tuple[int, int]

    def stand_in(self, lists: list[Tensor], mask_mod: mods.Mod) -> Any:
        """Returns what `attention`'s checks take for a BlockMask, with tensors in the place of the lists."""
        named = dict(zip(NAMES, lists, strict=True))
        return SimpleNamespace(**named, BLOCK_SIZE=self.block_size, mask_mod=mask_mod, seq_lengths=self.seq_lengths)


def create_block_mask(
    mask_mod: mods.Mod, B: int | None, H: int | None, Q_LEN: int, KV_LEN: int, BLOCK_SIZE: int | tuple[int, int] = 128
) -> BlockMask:
    """Returns which blocks of keys each block of queries sees under a mask_mod written in JAX, and which it sees whole.

    As `flexattn.create_block_mask`, outside of jit: what mask_mod captures must have values. A mask made so holds for those values.

    Args:
        mask_mod: mask_mod(b, h, q_idx, kv_idx) -> whether the query sees the key, as `attention` takes it.
        B, H: batch and query heads; None or 1 where the mask is the same for all.
        Q_LEN, KV_LEN: the longest sequences that it is to be used with.
        BLOCK_SIZE: queries and keys of a block, multiples of 16.

    Raises:
        ValueError, TypeError: what `flexattn.create_block_mask` raises; ValueError where mask_mod captures a traced array.
    """
    traced = mods.trace("mask_mod", mask_mod)
    tensors = {}
    for array in traced.all_arrays():
        if isinstance(array, jax.core.Tracer):
            raise ValueError("mask_mod captures a traced array; accepted: arrays with values: make the block mask outside of jit")
        tensors[id(array)] = _to_torch(array)
    made = torch_masks.create_block_mask(traced.written(tensors), B, H, Q_LEN, KV_LEN, "cpu", BLOCK_SIZE)
    lists = torch_masks.block_lists(made, B or 1, H or 1, Q_LEN, KV_LEN, torch.device("cpu"))
    arrays = tuple(jnp.asarray(t.numpy()) for t in lists.tensors)
    return BlockMask(mask_mod, arrays, lists.block_size, (Q_LEN, KV_LEN))


def _to_torch(array: Any) -> Tensor:
    values = np.asarray(array)
    return torch.from_numpy(values.astype(np.float32) if values.dtype.name == "bfloat16" else values.copy())
