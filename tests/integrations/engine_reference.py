"""Attention of a serving engine's batch in plain torch, for the tests of both engines' integrations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexattn.testing import check_close

PAGES = 24
COLUMNS = 4  # pages of a sequence
BATCHES = {  # (tokens before the step, new tokens) of each sequence
    "prefill": [(0, 9), (0, 37)],
    "chunked prefill": [(20, 13), (16, 16)],
    "decode": [(0, 1), (41, 1), (15, 1)],
    "mixed": [(41, 1), (0, 21), (3, 1), (18, 30)],
}


def page_tables(sequences: int, columns: int = COLUMNS, pages: int = PAGES) -> Tensor:
    """Returns int32 [sequences, columns], pages from 1 on in any order. No two places have one page."""
    return torch.randperm(pages - 1, generator=torch.Generator().manual_seed(0))[: sequences * columns].view(-1, columns).int() + 1


def random_rows(tokens: int, heads: Sequence[int], d: int, dtype: torch.dtype) -> list[Tensor]:
    """Returns a tensor [tokens, h, d] for each number of heads."""
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(tokens, h, d, generator=generator).to(dtype) for h in heads]


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    keys_before: int | None = None,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
    slopes: list[float] | None = None,
) -> Tensor:
    """Returns attention of the last queries of one sequence: [s, h, d], and for keys [s, 1 or h_kv, d]."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    distance = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if slopes is not None:
        scores = scores - torch.tensor(slopes, dtype=q.dtype)[:, None, None] * distance
    hidden = (distance < 0) | (distance > (len(k) if keys_before is None else keys_before))
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(q)[:, None, None].expand(-1, len(q), 1)), -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(k)], v)


class Expected:
    """A batch after its step: the bounds of its queries, its lengths and its page tables."""

    def __init__(self, cu_seqlens_q: Tensor, seqused_kv: Tensor, page_table: Tensor) -> None:
        self.bounds, self.lengths, self.page_table = cu_seqlens_q.tolist(), seqused_kv.tolist(), page_table.long().cpu()

    def out(self, q: Tensor, pages: tuple[Tensor, Tensor], scale: float, **options: object) -> Tensor:
        """Returns out of each token, in q's dtype. pages: [pages, page_size, h_kv, d] of k and v."""
        out = torch.zeros(*q.shape[:2], pages[1].shape[-1], dtype=q.dtype)
        for i, length in enumerate(self.lengths):
            k, v = (page[self.page_table[i]].flatten(0, 1)[:length] for page in pages)
            queries = slice(self.bounds[i], self.bounds[i + 1])
            out[queries] = _attend(q[queries], k, v, scale, **options)  # type: ignore[arg-type]
        return out

    def check(self, out: Tensor, q: Tensor, pages: tuple[Tensor, Tensor], scale: float, **options: object) -> None:
        """Compares out with float64 arithmetic on the CPU, within twice the error of arithmetic in q's dtype."""
        out, q, k, v = (t.cpu() for t in (out, q, *pages))
        ref, eager = (self.out(q.to(d), (k.to(d), v.to(d)), scale, **options) for d in (torch.float64, q.dtype))
        check_close("out", out, ref, eager)
