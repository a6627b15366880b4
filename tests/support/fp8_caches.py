"""Steps over caches in FP8: the tensors of a call, dense or in pages, and its expected result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn import attention
from tests.support.pages import make_pool

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
LENGTHS = (70, 0, 1, 300)
SCALES = ("none", "tensor", "head", "sequence and head", "token and head")


class Case(NamedTuple):
    """A step over a cache: the arguments of the call, and those over dense keys and values in fp64."""

    arguments: dict[str, Any]
    dense: dict[str, Any]


def _descales(scales: str, shape: tuple[int, int, int]) -> tuple[Tensor, Tensor] | None:
    sizes = {"tensor": (), "head": shape[2:], "sequence and head": shape[::2], "token and head": shape}.get(scales)
    if sizes is None:
        return None
    growing = torch.arange(1.0, 1.0 + shape[1])[:, None] if scales == "token and head" else 1.0
    return torch.rand(sizes) + 0.5, (torch.rand(sizes) + 0.1) * 0.01 * growing


def _stands_for(x: Tensor, descale: Tensor) -> Tensor:
    sizes = {0: (1, 1, 1, 1), 1: (1, 1, -1, 1), 2: (len(descale) if descale.dim() == 2 else 1, 1, -1, 1)}
    return x.double() * descale.double().view(sizes[descale.dim()] if descale.dim() < 3 else (*descale.shape, 1))


def make_case(
    dtype: torch.dtype = BF16,
    fp8: torch.dtype = E4M3,
    *,
    page_size: int = 16,
    scales: str = "head",
    queries: int | tuple[int, ...] = 1,
    heads: tuple[int, int] = (8, 2),
    dims: tuple[int, int] = (128, 128),
    lengths: Sequence[int] = LENGTHS,
    **call: Any,
) -> Case:
    """Returns a case with these numbers of keys. queries: per sequence, packed if several; page_size 0: dense."""
    torch.manual_seed(0)
    longest, batch = max(lengths), len(lengths)
    k, v = (torch.randn(batch, longest, heads[1], dim).to(fp8) for dim in dims)
    shape = (sum(queries),) if isinstance(queries, tuple) else (batch, queries)
    arguments: dict[str, Any] = {
        "q": torch.randn(*shape, heads[0], dims[0]).to(dtype),
        "attn_mask_type": "padding_causal_bottom_right",
        "seqused_kv": torch.tensor(lengths, dtype=torch.int32),
        **call,
    }
    if isinstance(queries, tuple):
        cu_seqlens = torch.tensor([0, *queries]).cumsum(0).int()
        arguments |= {"qkv_format": "thd_2bshd", "cu_seqlens_q": cu_seqlens, "max_seqlen_q": max(queries)}
    descales = _descales(scales, (batch, longest, heads[1]))
    wide = (k.double(), v.double())
    if descales is not None:
        wide = (_stands_for(k, descales[0]), _stands_for(v, descales[1]))
    dense = {**arguments, "k": wide[0], "v": wide[1]}
    if page_size:
        pool = make_pool(k.float(), v.float(), lengths, page_size)
        k, v = pool.k.to(fp8), pool.v.to(fp8)
        arguments |= {"page_table": pool.page_table, "max_seqlen_kv": longest}
        if descales is not None and scales == "token and head":
            scale_pages = make_pool(descales[0][..., None], descales[1][..., None], lengths, page_size)
            descales = scale_pages.k[..., 0].contiguous(), scale_pages.v[..., 0].contiguous()
    if descales is not None:
        arguments |= {"descale_k": descales[0], "descale_v": descales[1]}
    return Case({**arguments, "k": k, "v": v}, dense)


def exact(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns out and lse by the eager backend in this dtype, from the dequantised cache."""
    cast = {name: x.to(dtype) for name, x in case.dense.items() if name in ("q", "k", "v", "bias")}
    out, lse = attention(**case.dense | cast, return_lse=True, backend="eager")
    return out, lse
