"""Pools of pages made of dense keys and values: pages in any order, garbage in unused entries and NaN in unused rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

GARBAGE = (2147480000, -5)
LAYOUTS = ("bshd", "bhsd", "interleaved")  # the last: k and v of a page side by side, [pages, 2, page_size, h_kv, d]


class Pool(NamedTuple):
    """Keys and values in pages, for `attention`; `fmt` is their format."""

    k: Tensor
    v: Tensor
    page_table: Tensor
    seqused: Tensor
    fmt: str


def make_pool(k: Tensor, v: Tensor, lengths: Sequence[int], page_size: int, layout: str = "bshd", seed: int = 0) -> Pool:
    """Returns the first tokens of each row of k and v, [b, s, h_kv, d], in pages; rows beyond a length are NaN."""
    generator = torch.Generator().manual_seed(seed)
    batch, columns = len(lengths), -(-max(k.shape[1], 1) // page_size)
    needed = [-(-n // page_size) for n in lengths]
    ids = torch.randperm(sum(needed) + 3, generator=generator)
    table = torch.tensor(GARBAGE, dtype=torch.int32).repeat(batch, columns)[:, :columns].contiguous()
    joined = torch.full((len(ids), 2, page_size, k.shape[2], max(k.shape[3], v.shape[3])), float("nan"), dtype=k.dtype)
    taken = 0
    for b, length in enumerate(lengths):
        for n in range(needed[b]):
            page = int(ids[taken])
            taken += 1
            table[b, n] = page
            rows = slice(n * page_size, min(length, (n + 1) * page_size))
            size = rows.stop - rows.start
            joined[page, 0, :size, :, : k.shape[3]] = k[b, rows]
            joined[page, 1, :size, :, : v.shape[3]] = v[b, rows]
    pool_k, pool_v = joined[:, 0, ..., : k.shape[3]], joined[:, 1, ..., : v.shape[3]]
    if layout == "bshd":
        pool_k, pool_v = pool_k.contiguous(), pool_v.contiguous()
    if layout == "bhsd":
        pool_k, pool_v = (t.transpose(1, 2).contiguous() for t in (pool_k, pool_v))
    device = k.device
    used = torch.tensor(list(lengths), dtype=torch.int32)
    return Pool(pool_k.to(device), pool_v.to(device), table.to(device), used.to(device), "bhsd" if layout == "bhsd" else "bshd")
