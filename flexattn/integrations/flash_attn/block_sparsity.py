"""FlashAttention 4's lists of blocks, and the BlockMask that says the same.

The fields are those of https://github.com/Dao-AILab/flash-attention/blob/main/flash_attn/cute/block_sparsity.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


class BlockSparseTensorsTorch(NamedTuple):
    """Blocks of keys that each block of queries sees.

    mask_block_cnt, full_block_cnt are int32 [b, h, query blocks], how many blocks are seen in part and whole; mask_block_idx and
    full_block_idx int32 [b, h, query blocks, key blocks], which ones; block_size is (queries, keys). The others are None.
    """

    mask_block_cnt: Tensor
    mask_block_idx: Tensor
    full_block_cnt: Tensor | None = None
    full_block_idx: Tensor | None = None
    cu_total_m_blocks: Tensor | None = None
    cu_block_idx_offsets: Tensor | None = None
    block_size: tuple[int, int] | None = None
    dq_write_order: Tensor | None = None
    dq_write_order_full: Tensor | None = None
    spt: bool | None = None


def _whole(lists: Tensor, key_blocks: int) -> Tensor:
    """Returns lists of blocks with as many columns as there are key blocks; entries behind the count are not read."""
    return pad(lists, (0, max(key_blocks - lists.shape[-1], 0)))


def block_mask_of(blocks: Any, mask_mod: Callable[..., Any] | None, seqlens: tuple[int, int]) -> BlockMask:
    """Returns the BlockMask of FlashAttention 4's lists.

    Args:
        blocks: a BlockSparseTensorsTorch, of this module or FlashAttention's.
        mask_mod: mask_mod(b, h, q_idx, kv_idx), for blocks that are seen in part; None sees all of them.
        seqlens: queries and keys.

    Raises:
        ValueError: block_size is None, or the lists are of packed sequences.
    """
    from torch.nn.attention.flex_attention import BlockMask

    if blocks.block_size is None or blocks.cu_total_m_blocks is not None:
        raise ValueError(
            f"block_sparse_tensors has block_size {blocks.block_size} and cu_total_m_blocks "
            f"{'None' if blocks.cu_total_m_blocks is None else 'given'}; accepted: block_size (queries, keys) and lists of a dense "
            "batch, cu_total_m_blocks None"
        )
    key_blocks = -(-seqlens[1] // blocks.block_size[1])
    return BlockMask.from_kv_blocks(
        blocks.mask_block_cnt.to(torch.int32),
        _whole(blocks.mask_block_idx, key_blocks),
        blocks.full_block_cnt,
        None if blocks.full_block_idx is None else _whole(blocks.full_block_idx, key_blocks),
        BLOCK_SIZE=tuple(blocks.block_size),
        mask_mod=mask_mod,
        seq_lengths=seqlens,
    )
