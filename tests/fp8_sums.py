"""What the tensor cores of compute capability 8.9 and 9.0 make of sums of FP8 products, emulated in fp64: the budget of scores.

Their accumulator keeps 13 bits of fraction ("Some Matrix Multiplication Engines Are Not As Accurate As We Thought", PyTorch blog,
2026; SageAttention2, arXiv 2411.10958): 32 products at a time are shifted to the largest exponent among them and the sum so far,
cut there, and added (DeepSeek-V3, arXiv 2412.19437, section 3.3.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

FRACTION_BITS = 13
TOGETHER = 32
_MOST = 2**26  # products that are held at once


def short_sums(q: Tensor, k: Tensor) -> Tensor:
    """q k^T of [.., i, d] and [.., j, d], as such a tensor core adds it up."""
    rows = max(1, _MOST // max(1, q.shape[:-2].numel() * k.shape[-2] * TOGETHER))
    return torch.cat([_short_sums(part, k) for part in q.split(rows, -2)], -2)


def _short_sums(q: Tensor, k: Tensor) -> Tensor:
    total = torch.zeros(
        (*torch.broadcast_shapes(q.shape[:-2], k.shape[:-2]), q.shape[-2], k.shape[-2]), dtype=q.dtype, device=q.device
    )
    if not total.numel():
        return total
    for first in range(0, q.shape[-1], TOGETHER):
        products = q[..., :, None, first : first + TOGETHER] * k[..., None, :, first : first + TOGETHER]
        largest = torch.maximum(products.abs().amax(-1), total.abs())
        step = torch.exp2(torch.floor(torch.log2(largest.clamp(min=2.0**-200))) - FRACTION_BITS)
        total = ((total / step).trunc() + (products / step[..., None]).trunc().sum(-1)) * step
    return total


@contextmanager
def scores_summed_short() -> Iterator[None]:
    """Inside, the reference and the eager backend add scores up as those tensor cores do; in the forward alone."""
    einsum = torch.einsum

    def summed(equation: str, *operands: Any) -> Tensor:
        if equation != "bngid,bnjd->bngij":
            return einsum(equation, *operands)
        q, k = operands
        return short_sums(q.double(), k.double()[:, :, None]).to(q.dtype)

    with mock.patch.object(torch, "einsum", summed):
        yield
