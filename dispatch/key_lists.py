"""Lists of keys (kv_indices) in plain torch: the keys that each query's list names, and their rows of k and v."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from flexattn.dispatch.reference import Sequences
    from flexattn.dispatch.spec import Operands


def listed(x: Operands, sequences: Sequences, rows: range, kv_block: int) -> Tensor:
    """Returns the keys in the lists of a block's queries, int64 [b, 1 or h_kv, r, n * kv_block], and -1 for empty entries.

    An entry is empty if it is no key of the sequence, or is behind the count of its list. kv_block: the keys that an entry names.
    """
    assert x.kv_indices is not None
    indices, counts = x.kv_indices, x.kv_index_counts
    if counts is not None:
        place = torch.arange(indices.shape[-1], device=indices.device)
        indices = torch.where(place < counts[..., None], indices, -1)
    is_packed = x.q.dim() == 3
    tokens = slice(sequences.q.start + rows.start, sequences.q.start + rows.stop)
    indices = indices[tokens][None] if is_packed else indices[sequences.batch.start : sequences.batch.stop, tokens]
    indices = indices[:, None] if indices.dim() == 3 else indices.transpose(1, 2)
    if not sequences.kv:
        return indices[..., :0].long()
    keys = indices.long()
    if kv_block > 1:
        keys = (keys[..., None] * kv_block + torch.arange(kv_block, device=keys.device)).flatten(-2)
    return torch.where((keys >= 0) & (keys < len(sequences.kv)), keys, -1)


def gathered(t: Tensor, lists: Tensor) -> Tensor:
    """Returns the rows of t, [b, h_kv, s, d], that lists [b, 1 or h_kv, r, n] name: [b, h_kv, r, n, d], and 0 for empty entries."""
    batch, heads, keys, head_dim = t.shape
    if not lists.shape[-1]:
        return t[:, :, None, :0].expand(-1, -1, lists.shape[2], -1, -1)  # a view, which has a gradient
    first = torch.arange(batch * heads, device=t.device).view(batch, heads, 1, 1) * keys
    # An embedding adds a key's gradients in a fixed order.
    rows = torch.nn.functional.embedding(first + lists.clamp(min=0), t.reshape(batch * heads * keys, head_dim))
    return torch.where(lists[..., None] < 0, 0.0, rows)
