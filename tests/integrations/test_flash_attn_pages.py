"""FlashAttention's functions over pages: as over the same keys in rows, and against attention written out in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from flexattn.integrations import flash_attn as fa
from flexattn.integrations.flash_attn import cute, flash_attn_3
from tests.integrations.flash_attn_reference import band_of, close, reference

B, SQ, S, SIZE, H, H_K, D = 2, 3, 12, 4, 4, 2, 16  # rows of S tokens, in pages of SIZE
TABLE = torch.tensor([[5, 0, 3], [1, 6, 2]], dtype=torch.int32)  # page 4 is nobody's
ENDS = torch.tensor([5, 8], dtype=torch.int32)


@pytest.fixture
def rows() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(B, SQ, H, D), torch.randn(B, S, H_K, D), torch.randn(B, S, H_K, D)


def paged(x: Tensor) -> Tensor:
    """Returns rows [b, s, ...] in the pages of TABLE, others NaN."""
    pages = torch.full((7, SIZE, *x.shape[2:]), math.nan)
    pages[TABLE.long()] = x.unflatten(1, (-1, SIZE))
    return pages


def in_rows(pages: Tensor) -> Tensor:
    return pages[TABLE.long()].flatten(1, 2)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (3, 1), "softcap": 2.0},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("version", [2, 3])
def test_cache_is_written_and_read(rows: tuple[Tensor, ...], options: dict[str, Any], version: int) -> None:
    q, k, v = rows
    new = torch.randn(2, B, SQ, H_K, D)
    angles = torch.rand(S, D // 2) * 6
    more = {"k": new[0], "v": new[1], "rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "cache_seqlens": ENDS, **options}
    pages_k, pages_v = paged(k), paged(v)
    if version == 2:
        want = fa.flash_attn_with_kvcache(q, k, v, **more, return_softmax_lse=True)
        got = fa.flash_attn_with_kvcache(q, pages_k, pages_v, **more, block_table=TABLE, return_softmax_lse=True)
    else:
        want = flash_attn_3.flash_attn_with_kvcache(q, k, v, **more, return_softmax_lse=True)[:2]
        got = flash_attn_3.flash_attn_with_kvcache(q, pages_k, pages_v, **more, page_table=TABLE, return_softmax_lse=True)[:2]
    for a, b in zip((*got, in_rows(pages_k), in_rows(pages_v)), (*want, k, v), strict=True):
        close(a, b)
    assert pages_k[4].isnan().all()  # nobody's page


def test_version_3_with_packed_queries_chunks_and_qv(rows: tuple[Tensor, ...]) -> None:
    q, k, v = rows
    qv = torch.randn(B, SQ, H, D)
    starts = torch.tensor([0, 1, 4], dtype=torch.int32)
    options = {"cache_seqlens": ENDS, "cu_seqlens_q": starts, "max_seqlen_q": 3, "attention_chunk": 3, "causal": True}
    packed = {"q": q.flatten(0, 1)[:4], "qv": qv.flatten(0, 1)[:4], **options}
    want = flash_attn_3.flash_attn_with_kvcache(k_cache=k, v_cache=v, **packed)
    close(flash_attn_3.flash_attn_with_kvcache(k_cache=paged(k), v_cache=paged(v), page_table=TABLE, **packed), want)


def test_without_lengths_every_page_of_a_row_is_read(rows: tuple[Tensor, ...]) -> None:
    q, k, v = rows
    right, _ = reference(q, k, v, band_of(SQ, S))
    close(fa.flash_attn_with_kvcache(q, paged(k), paged(v), block_table=TABLE), right)
    starts = torch.arange(B + 1, dtype=torch.int32) * SQ
    out, _ = cute.flash_attn_varlen_func(
        q.flatten(0, 1), paged(k), paged(v), cu_seqlens_q=starts, max_seqlen_q=SQ, page_table=TABLE
    )
    close(out.view_as(q), right)


def test_version_2_varlen(rows: tuple[Tensor, ...]) -> None:
    q, k, v = rows
    starts_q, starts_k = torch.tensor([0, 3, 5], dtype=torch.int32), torch.tensor([0, 5, 13], dtype=torch.int32)
    arguments = (q.flatten(0, 1)[:5], paged(k), paged(v), starts_q, starts_k, 3, 8)
    out, lse, _ = fa.flash_attn_varlen_func(*arguments, causal=True, block_table=TABLE, return_attn_probs=True)
    for i, (rows_q, end) in enumerate(((slice(0, 3), 5), (slice(3, 5), 8))):
        sq = rows_q.stop - rows_q.start
        right, right_lse = reference(arguments[0][None, rows_q], k[i : i + 1, :end], v[i : i + 1, :end], band_of(sq, end, right=0))
        close(out[rows_q], right[0])
        close(lse[:, rows_q], right_lse[0])


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("case", ["causal", "negative window", "mod", "qv"])
def test_version_4_varlen(rows: tuple[Tensor, ...], case: str, is_packed: bool) -> None:
    q, k, v = rows
    qv = torch.randn(B, SQ, H, D)
    options: dict[str, Any] = {
        "causal": {"causal": True},
        "negative window": {"window_size": (4, -1)},
        "mod": {"score_mod": lambda score, b, h, i, j, info, aux: score + 0.1 * (info.seqlen_k - j) * (b + 1)},
        "qv": {"qv": qv.flatten(0, 1) if is_packed else qv},
    }[case]
    if is_packed:
        options |= {"cu_seqlens_q": torch.arange(B + 1, dtype=torch.int32) * SQ, "max_seqlen_q": SQ}
    queries = q.flatten(0, 1) if is_packed else q
    out, _ = cute.flash_attn_varlen_func(queries, paged(k), paged(v), page_table=TABLE, seqused_k=ENDS, **options)
    for i, end in enumerate(ENDS.tolist()):
        mask = band_of(SQ, end, 4 if case == "negative window" else None, {"causal": 0, "negative window": -1}.get(case))
        bias, scale = torch.zeros(()).double(), None
        if case == "mod":
            bias = 0.1 * (end - torch.arange(end)).double() * (i + 1)
        if case == "qv":
            scale = 1 / math.sqrt(2 * D)
            bias = torch.einsum("qhd,khd->hqk", qv[i].double(), v[i, :end].double().repeat_interleave(H // H_K, 1)) * scale
        right, _ = reference(q[i : i + 1], k[i : i + 1, :end], v[i : i + 1, :end], mask, scale=scale, bias=bias)
        close(out.view_as(q)[i], right[0])


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (2, 0)}, {"attention_chunk": 3}], ids=str)
@pytest.mark.parametrize("has_new", [False, True])
def test_rows_of_a_table_and_left_padding(rows: tuple[Tensor, ...], options: dict[str, Any], has_new: bool) -> None:
    q, k, v = rows
    new = torch.randn(2, B, SQ, H_K, D)
    where = {"cache_batch_idx": torch.tensor([1, 0]).int(), "cache_leftpad": torch.tensor([2, 3]).int(), "cache_seqlens": ENDS}
    named = {**where, **options} | ({"k": new[0], "v": new[1]} if has_new else {})
    pages = paged(k), paged(v)
    want = flash_attn_3.flash_attn_with_kvcache(q, k, v, **named, return_softmax_lse=True)
    got = flash_attn_3.flash_attn_with_kvcache(q, *pages, **named, page_table=TABLE, return_softmax_lse=True)
    for a, b in zip((*got[:2], *map(in_rows, pages)), (*want[:2], k, v), strict=True):
        close(a, b)


def test_pages_are_read_forward_alone(rows: tuple[Tensor, ...]) -> None:
    q, k, v = rows
    leaf = q.flatten(0, 1).requires_grad_()
    starts_q, starts_k = torch.arange(B + 1, dtype=torch.int32) * SQ, torch.tensor([0, 5, 13], dtype=torch.int32)
    of_2 = fa.flash_attn_varlen_func(leaf, paged(k), paged(v), starts_q, starts_k, SQ, 8, block_table=TABLE, return_attn_probs=True)
    of_4 = cute.flash_attn_varlen_func(
        leaf, paged(k), paged(v), cu_seqlens_q=starts_q, max_seqlen_q=SQ, page_table=TABLE, seqused_k=ENDS
    )
    close(of_2[0], of_4[0])
    for out in (of_2[0], of_4[0]):
        with pytest.raises(NotImplementedError, match="a call over pages has no backward"):
            out.sum().backward()


def test_tokens_beyond_a_row_of_the_table_are_refused(rows: tuple[Tensor, ...]) -> None:
    q, k, v = rows
    pages = paged(k), paged(v)
    new = {"k": k[:, :1], "v": v[:, :1]}
    for ends, tokens in ((13, {}), (12, new)):
        with pytest.raises(ValueError, match="make a sequence of 13 tokens; accepted: at most 12"):
            fa.flash_attn_with_kvcache(q, *pages, **tokens, cache_seqlens=ends, block_table=TABLE)
    assert fa.flash_attn_with_kvcache(q, *pages, cache_seqlens=12, block_table=TABLE).shape == q.shape
