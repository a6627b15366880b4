"""Calls with logits of any size that fp32 holds, for tests of every kernel family, and their expected results.

An exact softmax of exact scores is not an oracle: near -1e9 it keeps differences that no fp32 score holds. Therefore q and k are
small multiples of 1/8, so that their products are exact in any order of summation. Each logit is rounded to fp32 once, like in any
implementation with fp32 logits, and all later steps are exact.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flexattn.testing import FORWARD_FACTOR, GRADIENT_FACTOR, check_close

LOWEST = torch.finfo(torch.float32).min
VALUES = (-1e4, -1e6, -1e8, -1e9, -1e10, -1e12, -1e30, LOWEST)  # one for each head
HEADS, HEADS_KV = len(VALUES), 2
SLOPES = (0.3, -0.01, *(sign * 2.0**n for n in (27, 40, 100) for sign in (1, -1)))  # the large ones' products are exact
ORIGIN = 1.4  # weights are rounded as a kernel has them, relative to an origin of its own: even a lone 1 is
# Logits of a row's blocks of keys, in any order: values that a mask, a bias or a bug may leave in them, and 0.
LADDER = (LOWEST, -1e30, -(2.0**28), -1.9e8, -1.8e8, -(2.0**22), -1e4, 0.0, 0.0, 1e4, 2.0**22, 1.8e8, 1.9e8, 1e30, -LOWEST)


class Case(NamedTuple):
    q: Tensor  # [b, s, h, d]
    k: Tensor
    v: Tensor
    dout: Tensor
    added: Tensor  # fp32 [h, sq, skv], to the scaled score
    scale: float


def make_case(kind: str, dtype: torch.dtype, sq: int, skv: int, dim: int = 64, device: str = "cpu", batch: int = 1) -> Case:
    """Returns a bias. kind: "hidden", "ladder" or "alibi".

    "hidden" hides the first keys of all queries, the last keys of some queries, and all keys of others. The diagonal of "alibi"
    ends at the last key.
    """
    numbers = torch.Generator().manual_seed(sq + skv)

    def eighths(*shape: int) -> Tensor:
        x = torch.randint(-7, 8, shape, generator=numbers) / 8
        x[..., :1] = 0.875  # in FP8 the scale is a power of two then, and the product exact too
        return x.to(device, dtype)

    q, k = eighths(batch, sq, HEADS, dim), eighths(batch, skv, HEADS_KV, dim)
    v, dout = eighths(batch, skv, HEADS_KV, dim), eighths(batch, sq, HEADS, dim)
    i, j = torch.arange(sq)[:, None], torch.arange(skv)
    if kind == "alibi":
        added = -torch.tensor(SLOPES)[:, None, None] * (j - i - (skv - sq)).abs()
    elif kind == "ladder":
        block = 24  # no multiple of any tile
        steps = torch.randint(len(LADDER), (HEADS, sq, -(-skv // block)), generator=numbers)
        added = torch.tensor(LADDER)[steps].repeat_interleave(block, 2)[..., :skv]
    else:
        hidden = (j < 2 * skv // 3) | (i % 7 == 3) | ((i % 7 == 5) & (j >= skv - skv // 6))
        added = torch.where(hidden, torch.tensor(VALUES)[:, None, None], 0.0)
    return Case(q, k, v, dout, added.to(device, torch.float32).contiguous(), dim**-0.5 if dim in (16, 64) else 0.125)


class Results(NamedTuple):
    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dadded: Tensor  # [h, sq, skv]


class Rounding(NamedTuple):
    """Roundings of kernels: the multiplied weights (relative to an origin) and their gradients, and the stored results."""

    stored: torch.dtype
    weights: torch.dtype | None = None  # None: stored
    gradients: torch.dtype | None = None

    def store(self, x: Tensor) -> Tensor:
        return x.to(self.stored).to(x.dtype)

    def weight(self, p: Tensor) -> Tensor:
        origin = ORIGIN * (2.0**-2 if self.weights is None else 2.0**8)  # FP8's range is filled
        return (p * origin).to(self.weights or self.stored).to(p.dtype) / origin

    def gradient(self, x: Tensor) -> Tensor:
        if self.gradients is None:
            return self.store(x)
        scale = torch.finfo(self.gradients).max / x.abs().amax(-1, keepdim=True).clamp(min=1e-30)
        return (x * scale).to(self.gradients).to(x.dtype) / scale


class _Exact(Rounding):
    def store(self, x: Tensor) -> Tensor:
        return x

    weight = gradient = store


def results_of(case: Case, visible: Tensor | None = None, replaces: bool = False, rounding: Rounding | None = None) -> Results:
    """Returns the results exactly, or with sums in fp32 and the roundings of `rounding`.

    visible: [sq, skv], the keys that a band shows. replaces: a value other than 0 replaces the score instead of being added.
    """
    rounds = rounding or _Exact(torch.float64)
    sums = torch.float64 if rounding is None else torch.float32
    q, k, v, dout = (t.to(sums).transpose(1, 2) for t in case[:4])
    k, v = (t.repeat_interleave(HEADS // HEADS_KV, 1) for t in (k, v))
    score = (q @ k.mT * case.scale).float()  # exact in either
    is_replaced = (case.added != 0) & replaces
    logit = torch.where(is_replaced, case.added, score + case.added).double()
    if visible is not None:
        logit = logit.masked_fill(~visible, float("-inf"))
    p = torch.softmax(logit, -1).nan_to_num().to(sums)  # of a row that sees nothing
    weights = rounds.weight(p)
    out = rounds.store(weights @ v)
    dlogit = p * (dout @ v.mT - (out * dout).sum(-1, keepdim=True))
    dscore = rounds.gradient(dlogit.masked_fill(is_replaced, 0.0))
    dq, dk = rounds.store(dscore @ k * case.scale), rounds.gradient(dscore.mT).contiguous() @ q * case.scale
    dv = weights.mT @ dout
    shared = (len(q), HEADS_KV, HEADS // HEADS_KV, *dk.shape[2:])
    dk, dv = (rounds.store(t.reshape(shared).sum(2)) for t in (dk, dv))
    out, dq, dk, dv = (t.transpose(1, 2) for t in (out, dq, dk, dv))
    return Results(out, torch.logsumexp(logit, -1), dq, dk, dv, dlogit.sum(0))


def check(got: dict[str, Tensor], case: Case, rounding: Rounding, visible: Tensor | None = None, replaces: bool = False) -> None:
    """Compares results. got: any fields of `Results`, under names that end in the field's name.

    The budget is the larger error of two orders of summation, this device's and the CPU's: if all terms cancel or are equal, one
    order may be exact by chance.
    """
    exact = results_of(case, visible, replaces)
    on_cpu = case._replace(**{name: t.cpu() for name, t in case._asdict().items() if isinstance(t, Tensor)})
    rounded = [results_of(case, visible, replaces, rounding)]
    if case.q.is_cuda:
        rounded.append(results_of(on_cpu, None if visible is None else visible.cpu(), replaces, rounding))
    for name, result in got.items():
        field = name.split()[-1]
        assert not result.isnan().any(), name
        want = getattr(exact, field)
        budget = max((getattr(r, field).to(want.device) for r in rounded), key=lambda t: (t - want).abs().nan_to_num().max())
        if field == "lse" and rounding.weights is None:  # to fp32's rounding, however large
            assert torch.equal(result.isfinite(), want.isfinite()), name
            torch.testing.assert_close(result.double(), want, rtol=3e-7, atol=3e-6)
        elif field == "lse":  # FP8's sums are of rounded weights
            torch.testing.assert_close(result.double(), want, rtol=3e-7, atol=0.07)
        else:
            check_close(name, result, want, budget, factor=FORWARD_FACTOR if field == "out" else GRADIENT_FACTOR)
