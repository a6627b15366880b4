"""Random lists of keys (kv_indices), and the dense mask that lists spell."""

from __future__ import annotations

import torch
from torch import Tensor


def draw_lists(
    tokens: tuple[int, ...], heads: int, keys: int, n: int, *, repeats: bool = False, seed: int = 0, device: str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Returns kv_indices [*tokens, n], or [*tokens, heads, n] if there are heads, and their counts.

    The entries are keys in any order, once each unless `repeats`, with empty ones in between. The first token's list is empty.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (*tokens, heads) if heads else tokens
    if repeats:
        indices = torch.randint(-1, keys, (*shape, n), generator=generator)
    else:
        indices = torch.rand(*shape, keys, generator=generator).argsort(-1)[..., :n]
        indices = torch.where(torch.rand(indices.shape, generator=generator) < 0.15, -1, indices)
    counts = torch.randint(1, indices.shape[-1] + 1, shape, generator=generator)
    counts.view(-1, max(heads, 1))[0] = 0
    return indices.to(device, torch.int32), counts.to(device, torch.int32)


def dense(indices: Tensor, counts: Tensor | None, keys: int, heads: int) -> Tensor:
    """Returns how often each list names each key: int64 [b, heads, sq, keys]. indices: [b, sq, n] or [b, sq, h_kv, n]."""
    is_listed = (indices >= 0) & (indices < keys)
    if counts is not None:
        is_listed = is_listed & (torch.arange(indices.shape[-1]) < counts[..., None])
    times = torch.zeros(*indices.shape[:-1], keys, dtype=torch.int64)
    times.scatter_add_(-1, torch.where(is_listed, indices, 0).long(), is_listed.long())
    times = times[:, None] if times.dim() == 3 else times.transpose(1, 2)
    return times.repeat_interleave(heads // times.shape[1], 1)
