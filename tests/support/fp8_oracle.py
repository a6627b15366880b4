"""Quantising to FP8 and attention over FP8 numbers, one token at a time in fp64; shares no code with the library."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
MANTISSA, LEAST_EXPONENT = {E4M3: 3, E5M2: 2}, {E4M3: -6, E5M2: -14}
ORDER = {"bshd": (0, 1, 2, 3), "sbhd": (1, 0, 2, 3), "bhsd": (0, 2, 1, 3)}  # order of the dims b, s, h, d


class Packing(NamedTuple):
    """Positions of a tensor's sequences; None for a dense tensor in which all rows are real."""

    fmt: str
    cu_seqlens: Tensor | None = None
    cu_seqlens_padded: Tensor | None = None
    max_seqlen: int | None = None


class Quantized(NamedTuple):
    codes: Tensor  # fp64, laid out as x, 0 in the padding
    descale: Tensor  # fp64 [b | 1, h | 1, blocks | 1]
    amax: Tensor


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """fp64 x to the nearest number of an FP8 dtype, of two the even one; the too large saturates, the not finite is NaN."""
    exponent = torch.frexp(x.nan_to_num(0.0, 1.0, 1.0))[1] - 1
    quantum = torch.ldexp(torch.ones_like(x), exponent.clamp(min=LEAST_EXPONENT[dtype]) - MANTISSA[dtype])
    found = ((x / quantum).round() * quantum).clamp(-LARGEST[dtype], LARGEST[dtype])
    return torch.where(x.isfinite(), found, torch.nan)


def tokens(x: Tensor, where: Packing) -> Iterator[tuple[int, int, Tensor]]:
    """(sequence, position, its row [h, d], which writes through) of each real token of x."""
    if where.fmt == "thd":
        assert where.cu_seqlens is not None
        lengths = where.cu_seqlens.diff().tolist()
        starts = (where.cu_seqlens if where.cu_seqlens_padded is None else where.cu_seqlens_padded).tolist()
        for b, length in enumerate(lengths):
            for i in range(min(length, length if where.max_seqlen is None else where.max_seqlen)):
                yield b, i, x[starts[b] + i]
        return
    rows = x.permute(ORDER[where.fmt])
    lengths = [rows.shape[1]] * len(rows) if where.cu_seqlens is None else where.cu_seqlens.diff().tolist()
    for b, length in enumerate(lengths):
        for i in range(length):
            yield b, i, rows[b, i]


def sizes_of(x: Tensor, where: Packing, granularity: str, block_rows: int) -> tuple[int, int, int]:
    batch = x.shape[where.fmt.index("b")] if where.fmt != "thd" else len(where.cu_seqlens) - 1  # type: ignore[arg-type]
    longest = x.shape[where.fmt.index("s")] if where.fmt != "thd" else where.max_seqlen or len(x)
    return (
        batch if granularity in ("batch_head", "block") else 1,
        1 if granularity == "tensor" else x.shape[where.fmt.index("h")],
        max(1, math.ceil(longest / block_rows)) if granularity == "block" else 1,
    )


def quantize(x: Tensor, where: Packing, dtype: torch.dtype, granularity: str, block_rows: int, margin: int) -> Quantized:
    """Returns scales: LARGEST * 2**-margin / amax, in [2**-120, 2**120] or 1. Each step is rounded to fp32, like a stored value."""
    wide = x.double()
    amax = torch.zeros(sizes_of(x, where, granularity, block_rows), dtype=torch.float64)

    def place(b: int, i: int, h: int) -> tuple[int, int, int]:
        return b % amax.shape[0], h % amax.shape[1], i // block_rows if amax.shape[2] > 1 else 0

    for b, i, row in tokens(wide, where):
        for h, values in enumerate(row):
            finite = values[values.isfinite()].abs()
            at = place(b, i, h)
            amax[at] = max(float(amax[at]), float(finite.max()) if len(finite) else 0.0)
    scale = torch.ones_like(amax)
    for at in zip(*torch.where(amax > 0), strict=True):
        found = max(LARGEST[dtype] * 2.0**-margin / float(amax[at]), 2.0**-120)
        scale[at] = found if found <= 2.0**120 else 1.0
    scale = scale.float().double()
    codes = torch.zeros_like(wide)
    for (b, i, row), (*_, target) in zip(tokens(wide, where), tokens(codes, where), strict=True):
        for h, values in enumerate(row):
            target[h] = rounded((values * scale[place(b, i, h)]).float().double(), dtype)
    return Quantized(codes, (1.0 / scale).float().double(), amax)


def dequantized(found: Quantized, where: Packing, block_rows: int) -> Tensor:
    """codes * descale in fp64, exactly."""
    values = torch.zeros_like(found.codes)
    b_sizes, h_sizes, blocks = found.descale.shape
    for (b, i, row), (*_, target) in zip(tokens(found.codes, where), tokens(values, where), strict=True):
        for h in range(len(row)):
            target[h] = row[h] * found.descale[b % b_sizes, h % h_sizes, i // block_rows if blocks > 1 else 0]
    return values


class Attended(NamedTuple):
    out: Tensor  # fp64, laid out like q with v's head dim; 0 if a query sees no key
    lse: Tensor  # the same without the last dim; -inf if a query sees no key
    bound: Tensor  # [..., 2], of out: the sum of weight * |v|, and the largest weight times that of |v|
    largest: float  # magnitude of a score


def attention(q: Tensor, k: Tensor, v: Tensor, q_packing: Packing, kv_packing: Packing, is_causal: bool) -> Attended:
    """The textbook's attention of fp64 values, one query at a time, with the diagonal at the top left."""
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    lse, bound = torch.full_like(out, -math.inf), torch.zeros((*out.shape, 2), dtype=out.dtype)
    largest = 0.0
    group = q.shape[q_packing.fmt.index("h")] // k.shape[kv_packing.fmt.index("h")]
    keys: dict[int, list[Tensor]] = {}
    values: dict[int, list[Tensor]] = {}
    for source, found in ((k, keys), (v, values)):
        for b, _, row in tokens(source, kv_packing):
            found.setdefault(b, []).append(row)
    targets = zip(
        tokens(q, q_packing), tokens(out, q_packing), tokens(lse, q_packing), tokens(bound.flatten(-2), q_packing), strict=True
    )
    for (b, i, row), (*_, row_out), (*_, row_lse), (*_, row_bound) in targets:
        count = min(len(keys.get(b, [])), i + 1 if is_causal else 10**9)
        for h in range(len(row) if count else 0):
            seen = torch.stack([t[h // group] for t in keys[b][:count]]), torch.stack([t[h // group] for t in values[b][:count]])
            scores = seen[0] @ row[h] / math.sqrt(q.shape[-1])
            largest = max(largest, float(scores.abs().max()))
            weights = torch.softmax(scores, 0)
            row_out[h], row_lse[h] = weights @ seen[1], torch.logsumexp(scores, 0)
            size = seen[1].abs()
            row_bound[h] = torch.stack((weights @ size, weights.max() * size.sum(0)), -1).flatten()
    return Attended(out, lse[..., 0], bound, largest)
