"""Cells of `flexattn.bench.decode`: steps of serving, their tensors and results in fp64, and their bytes and operations."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

GARBAGE = 2147480000  # value of the entries of the page table that no length reaches
MEAN_KEYS = 2048  # mean of the log-normal lengths
LATENT = 512  # columns of a latent cache that are v
SOFTCAP = 30.0
WINDOW = 128  # keys that a query sees, itself among them
DTYPE = torch.bfloat16
EXACT_BYTES = 2**28  # bytes of keys in fp64 that `exact` holds at a time

Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Cell(NamedTuple):
    """A step of serving: sequences with `keys` in the cache; the last `queries` of them attend."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    heads: int = 32
    heads_kv: int = 8
    head_dim: int = 128
    page: int = 16
    more: str = ""  # a name of OPTIONS
    is_fp8: bool = False  # keys and values
    is_latent: bool = False  # v is the first LATENT columns of k
    prefix: int = 0  # tokens that all sequences share


def decodes(batch: int, keys: int, queries: int = 1, **more: Any) -> Cell:
    return Cell((queries,) * batch, (keys,) * batch, **more)


def _log_normal(batch: int) -> tuple[int, ...]:
    lengths = torch.empty(batch).log_normal_(0.0, 1.0, generator=torch.Generator().manual_seed(0))
    return tuple((lengths * (MEAN_KEYS / lengths.mean())).long().clamp(min=1).tolist())


PREFILLS, DECODES = ((2048,) * 2, (2048,) * 2), ((1,) * 128, (2048,) * 128)

CELLS: dict[str, Cell] = {
    **{f"64 x 8192, page {page}": decodes(64, 8192, page=page) for page in (1, 4, 16, 64, 256)},
    "64 x 2048, page 16": decodes(64, 2048),
    "128 x 1024, page 16": decodes(128, 1024),
    "16 x 8192, page 64": decodes(16, 8192, page=64),
    "10 x 8192, page 64": decodes(10, 8192, page=64),
    "8 x 4096, page 16": decodes(8, 4096),
    "1 x 1024, page 16": decodes(1, 1024),
    "1 x 4096, page 16": decodes(1, 4096),
    "1 x 65536, page 64": decodes(1, 65536, page=64),
    "1 x 131072, page 64": decodes(1, 131072, page=64),
    "131072 among 63 x 1024, page 16": Cell((1,) * 64, (131072, *(1024,) * 63)),
    "256 log-normal, page 16": Cell((1,) * 256, _log_normal(256)),
    "d 64, sinks, window 128, page 16": decodes(64, 8192, heads=64, head_dim=64, more="sinks, window"),
    "d 64, sinks, page 16": decodes(64, 8192, heads=64, head_dim=64, more="sinks"),
    "d 256, softcap, page 64": decodes(32, 8192, heads=16, heads_kv=4, head_dim=256, page=64, more="softcap"),
    "32 key heads, page 16": decodes(64, 2048, heads_kv=32),
    "48 query heads, page 16": decodes(64, 8192, heads=48),
    "4 queries, page 16": decodes(64, 8192, 4),
    "8 queries of a tree, page 16": decodes(64, 8192, 8, more="tree"),
    "2048 queries over 32768, page 16": decodes(1, 32768, 2048),
    "2048 queries over 32768, page 64": decodes(1, 32768, 2048, page=64),
    "2 prefills and 128 decodes, page 16": Cell(PREFILLS[0] + DECODES[0], PREFILLS[1] + DECODES[1]),
    "2 prefills, page 16": Cell(*PREFILLS),
    "128 decodes, page 16": Cell(*DECODES),
    "FP8 cache, page 16": decodes(64, 8192, is_fp8=True),
    "32 with a prefix of 32768, page 16": decodes(32, 32768 + 512, prefix=32768),
    "MLA 128 heads, 128 x 4096, page 64": decodes(128, 4096, heads=128, heads_kv=1, head_dim=576, page=64, is_latent=True),
    "MLA 64 heads, 132 x 8192, page 64": decodes(132, 8192, heads=64, heads_kv=1, head_dim=576, page=64, is_latent=True),
    "MLA 16 heads, 32 x 8192, page 64": decodes(32, 8192, heads=16, heads_kv=1, head_dim=576, page=64, is_latent=True),
    "MLA 16 heads, 1 x 65536, page 64": decodes(1, 65536, heads=16, heads_kv=1, head_dim=576, page=64, is_latent=True),
}


class Step(NamedTuple):
    """The tensors of a cell: packed queries, keys and values, and the arguments that assign them to sequences."""

    q: Tensor  # [total, h, d]
    k: Tensor  # [pages, page_size, h_kv, d], or dense [b, longest, h_kv, d]
    v: Tensor
    where: dict[str, Any]  # arguments of attention()


def exact(dense: Step, cell: Cell) -> Tensor:
    """Returns out in fp64 by the eager backend, for several sequences of one length at a time, within EXACT_BYTES."""
    from flexattn import attention

    one, scales = torch.ones(1, device=dense.q.device), [dense.where.get(name) for name in ("descale_k", "descale_v")]
    starts = (0, *itertools.accumulate(cell.queries))
    parts, first = [], 0
    while first < len(cell.keys):
        longest = cell.keys[first]
        most = first + max(1, EXACT_BYTES // (8 * longest * cell.heads_kv * cell.head_dim))
        end = next((n for n in range(first, min(most, len(cell.keys))) if cell.keys[n] != longest), min(most, len(cell.keys)))
        caches = zip((dense.k, dense.v), scales, strict=True)
        k, v = (t[first:end, :longest].double() * (one if scale is None else scale).double()[:, None] for t, scale in caches)
        where = {name: t for name, t in dense.where.items() if not name.startswith("descale")}
        where["seqused_kv"] = where["seqused_kv"][first:end]
        where["cu_seqlens_q"] = where["cu_seqlens_q"][first : end + 1] - starts[first]
        if "mask_mod" in where:
            where["mask_mod"] = _of_later_sequences(where["mask_mod"], first)
        out = attention(dense.q[starts[first] : starts[end]].double(), k, v, **where, backend="eager")
        assert isinstance(out, Tensor)
        parts.append(out)
        first = end
    return torch.cat(parts)


def _of_later_sequences(mask_mod: Mask, first: int) -> Mask:
    return lambda b, h, i, j: mask_mod(b + first, h, i, j)


def _options(cell: Cell, lengths: Tensor) -> dict[str, object]:
    device, own = lengths.device, cell.queries[0]
    sinks = {"softmax_type": "learnable", "softmax_offset": torch.linspace(-1, 1, cell.heads, device=device)}
    nodes = torch.rand(len(cell.keys), own, own, device=device) < 0.5

    def tree(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        node = j - (lengths[b] - own)  # a key of this step is visible if the tree has the edge, or if it is the query's
        return (node < 0) | (node == i) | nodes[b, i, node.clamp(0, own - 1)]

    found: dict[str, dict[str, Any]] = {
        "": {},
        "sinks": sinks,
        "sinks, window": {**sinks, "window_size": (WINDOW - 1, 0)},
        "softcap": {"softcap": SOFTCAP},
        "tree": {"mask_mod": tree, "attn_mask_type": "padding"},
    }
    return found[cell.more]


def _page_table(cell: Cell) -> tuple[int, Tensor]:
    """Returns the number of pages, and int32 [b, columns]: pages in a random order. Sequences share the pages of a prefix."""
    used = [-(-n // cell.page) for n in cell.keys]
    shared = cell.prefix // cell.page
    pages = shared + sum(count - shared for count in used)
    order = torch.randperm(pages, dtype=torch.int32)
    table = torch.full((len(used), max(used)), GARBAGE, dtype=torch.int32)
    at = shared
    for row, count in zip(table, used, strict=True):
        row[:shared] = order[:shared]
        row[shared:count] = order[at : at + count - shared]
        at += count - shared
    return pages, table


def _pool(cell: Cell, pages: int, columns: int, device: str) -> Tensor:
    x = torch.randn(pages, cell.page, cell.heads_kv, columns, device=device, dtype=DTYPE)
    return x.to(torch.float8_e4m3fn) if cell.is_fp8 else x


def make_steps(cell: Cell, device: str = "cuda") -> tuple[Step, Step]:
    """Returns the step over pages, and over a dense cache with the same keys."""
    torch.manual_seed(0)
    lengths = torch.tensor(cell.keys, dtype=torch.int32, device=device)
    q = torch.randn(sum(cell.queries), cell.heads, cell.head_dim, device=device, dtype=DTYPE)
    where: dict[str, Any] = {
        "qkv_format": "thd_2bshd",
        "attn_mask_type": "padding_causal_bottom_right",
        "cu_seqlens_q": torch.tensor((0, *itertools.accumulate(cell.queries)), dtype=torch.int32, device=device),
        "max_seqlen_q": max(cell.queries),
        "seqused_kv": lengths,
        **_options(cell, lengths),
    }
    if cell.is_fp8:
        where |= {name: torch.linspace(0.5, 1.5, cell.heads_kv, device=device) for name in ("descale_k", "descale_v")}
    pages, table = _page_table(cell)
    pools = [_pool(cell, pages, cell.head_dim, device)]
    if not cell.is_latent:
        pools.append(_pool(cell, pages, cell.head_dim, device))
    for row, length in zip(table, cell.keys, strict=True):
        if rest := length % cell.page:
            for pool in pools:
                pool[row[length // cell.page], rest:] = torch.nan
    dense = [pool.view(torch.uint8)[table.where(table != GARBAGE, 0).to(device)].view(pool.dtype).flatten(1, 2) for pool in pools]
    steps = []
    for caches, more in ((pools, {"page_table": table.to(device)}), (dense, {})):
        k, v = caches * 2 if cell.is_latent else caches
        steps.append(Step(q, k, v[..., :LATENT] if cell.is_latent else v, where | more))
    return steps[0], steps[1]


def bytes_of(cell: Cell) -> int:
    """Returns the bytes that a call must move: q and out, and each key and value once."""
    d_v = LATENT if cell.is_latent else cell.head_dim
    columns = cell.head_dim if cell.is_latent else cell.head_dim + d_v
    window = WINDOW if "window" in cell.more else max(cell.keys)
    keys = sum(min(n, window) for n in cell.keys) - cell.prefix * (len(cell.keys) - 1)
    queries = 2 * sum(cell.queries) * cell.heads * (cell.head_dim + d_v)
    return queries + keys * cell.heads_kv * columns * (1 if cell.is_fp8 else 2)


def flops_of(cell: Cell) -> int:
    """Returns the operations of the two products, if no window hides keys."""
    d_v = LATENT if cell.is_latent else cell.head_dim
    pairs = sum(n * m - n * (n - 1) // 2 for n, m in zip(cell.queries, cell.keys, strict=True))
    return 2 * pairs * cell.heads * (cell.head_dim + d_v)
