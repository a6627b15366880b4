"""Keys that a layer of a transformers model selects for each query, as lists of keys of `attention`, and sinks for each token."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.validation import describe


class Selection(NamedTuple):
    """Lists of keys, `kv_indices` of `attention`, and the keys and values that they are for."""

    kv_indices: Tensor  # int32 [b, sq, n], or [b, sq, heads of keys, n]
    key: Tensor
    value: Tensor
    block: int = 1  # keys of a block that an entry names

    @property
    def arguments(self) -> dict[str, Any]:
        size = {} if self.block == 1 else {"kv_block_size": (1, self.block)}
        return {"kv_indices": self.kv_indices.to(torch.int32), **size}

    def hidden_by(self, mask: Tensor) -> Selection:
        """Returns the lists without keys that a bool mask [b, 1, sq, keys] hides, with 1 for b or sq too."""
        indices = self.kv_indices.long()
        if self.block > 1:
            keys = indices[..., None] * self.block + torch.arange(self.block, device=indices.device)
            indices = torch.where(indices[..., None] < 0, -1, keys).flatten(-2)
        seen = mask[:, 0].expand(indices.shape[0], indices.shape[1], -1)
        seen = seen if indices.dim() == 3 else seen[:, :, None].expand(-1, -1, indices.shape[2], -1)
        is_key = (indices >= 0) & (indices < seen.shape[-1])
        is_seen = seen.gather(-1, torch.where(is_key, indices, 0)) & is_key
        return self._replace(kv_indices=torch.where(is_seen, indices, -1), block=1)


def selection_of(
    module: torch.nn.Module, indices: Tensor | None, block_indices: Tensor | None, key: Tensor, value: Tensor
) -> Selection | None:
    """Returns the keys that a layer selects; None if it selects none.

    indices: keys of each query, [b, sq, n], for all heads (DeepSeek's sparse attention). block_indices: blocks of keys of each
    query, [b, heads of the indexer, sq, n], with -1 for none, in the module's `indexer.block_size` (MiniMax-M3). Query heads are
    divided evenly among the indexer's heads.
    """
    if indices is not None and block_indices is not None:
        raise ValueError("indices and block_indices are passed; accepted: one of the two")
    for name, given in (("indices", indices), ("block_indices", block_indices)):
        if given is not None and given.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name} is {describe(given)}; accepted: integers, int32 or int64")
    if indices is not None:
        return Selection(indices, key, value)
    if block_indices is None:
        return None
    block = getattr(getattr(module, "indexer", None), "block_size", None)
    if not isinstance(block, int):
        raise ValueError(
            f"block_indices is passed by {type(module).__name__}, which has no indexer.block_size; accepted: a layer with one, as "
            "MiniMax-M3's"
        )
    lists, heads = block_indices.transpose(1, 2), key.shape[1]
    if lists.shape[2] < heads:  # several key heads have one list
        lists = lists.repeat_interleave(heads // lists.shape[2], 2)
    elif lists.shape[2] > heads:  # query heads that share a key head have several lists
        key, value = (t.repeat_interleave(lists.shape[2] // heads, 1) for t in (key, value))
    return Selection(lists, key, value, block)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Returns attention with another logit in each softmax, which has no value. It takes a share of each row's weight.

    out: [b, h, sq, d]. lse: [b, h, sq]. sinks: [b, h, sq, 1]. All are differentiable.
    """
    shape = (*lse.shape, 1)
    does_fit = sinks.dim() == 4 and all(size in (1, full) for size, full in zip(sinks.shape, shape, strict=True))
    if not does_fit or not sinks.is_floating_point():
        raise ValueError(f"sinks is {describe(sinks)}; accepted: floating point, {list(shape)}, any dim of which may be 1")
    return out * torch.sigmoid(lse[..., None] - sinks.to(lse.dtype)).to(out.dtype)
