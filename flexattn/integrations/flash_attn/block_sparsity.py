"""FlashAttention 4's lists of blocks, and their conversion to a BlockMask.

The fields are those of https://github.com/Dao-AILab/flash-attention/blob/main/flash_attn/cute/block_sparsity.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from flexattn.integrations.arguments import check_fit
from flexattn.validation import describe

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


class BlockSparseTensorsTorch(NamedTuple):
    """Blocks of keys that each block of queries sees.

    mask_block_cnt and full_block_cnt are int32 [b, h, query blocks]: how many blocks are seen in part, and how many entirely.
    mask_block_idx and full_block_idx are int32 [b, h, query blocks, key blocks]: their indices.
    block_size is (queries, keys). The other fields are None.
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


def _pad_columns(lists: Tensor, key_blocks: int) -> Tensor:
    """Returns lists of blocks with one column per key block; entries after the count are not read."""
    return pad(lists, (0, max(key_blocks - lists.shape[-1], 0)))


def to_block_mask(blocks: Any, mask_mod: Callable[..., Any] | None, seqlens: tuple[int, int]) -> BlockMask:
    """Returns the BlockMask that FlashAttention 4's lists describe.

    Args:
        blocks: a BlockSparseTensorsTorch, of this module or FlashAttention's.
        mask_mod: mask_mod(b, h, q_idx, kv_idx), for blocks that are seen in part. If None, they are seen entirely.
        seqlens: number of queries and of keys.

    Raises:
        ValueError: if block_size is None, or the lists are of packed sequences.
    """
    from torch.nn.attention.flex_attention import BlockMask

    if blocks.block_size is None or blocks.cu_total_m_blocks is not None:
        raise ValueError(
            f"block_sparse_tensors has block_size {blocks.block_size} and cu_total_m_blocks "
            f"{'None' if blocks.cu_total_m_blocks is None else 'set'}; accepted: block_size (queries, keys), and lists of a dense "
            "batch with cu_total_m_blocks None"
        )
    given: dict[str, tuple[object, str]] = {
        "mask_block_cnt": (blocks.mask_block_cnt, "b h rows"),
        "mask_block_idx": (blocks.mask_block_idx, "b h rows columns"),
    }
    if blocks.full_block_cnt is not None:
        given |= {
            "full_block_cnt": (blocks.full_block_cnt, "b h rows"),
            "full_block_idx": (blocks.full_block_idx, "b h rows full_columns"),
        }
    check_fit(**given)
    for name in given:
        lists = getattr(blocks, name)
        if lists.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"block_sparse_tensors.{name} is {describe(lists)}; accepted: integers, int32")
    key_blocks = -(-seqlens[1] // blocks.block_size[1])
    return BlockMask.from_kv_blocks(
        blocks.mask_block_cnt.to(torch.int32),
        _pad_columns(blocks.mask_block_idx, key_blocks),
        blocks.full_block_cnt,
        None if blocks.full_block_idx is None else _pad_columns(blocks.full_block_idx, key_blocks),
        BLOCK_SIZE=tuple(blocks.block_size),
        mask_mod=mask_mod,
        seq_lengths=seqlens,
    )
