"""Comparison of calls that multiply in FP8, by sums of magnitudes and root mean squares. One rounding is up to 2**-4."""

from __future__ import annotations

from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from tests.fuzz.calls import Call
from tests.fuzz.delta import fp8_delta_deviations
from tests.fuzz.oracle import Result, exact

WEIGHTS = 2.0**-3  # share of a sum of weights times magnitudes of v: E4M3 rounds the weights, and their sum
LSE = 0.06  # twice the largest error in notes/measured_fp8.md (Sums of weights)
# Limits of the error's root mean square by the result's: q, k and v are rounded too, and scores are sums of their products.
RELATIVE, OF_INPUTS, OF_PRODUCTS = 0.3, 0.3, 2.0**-3
NOTHING, CANCELLED = 2e-3, 0.02  # in out, and in a gradient
DEVIATIONS = 4.5  # of an error that many calls do not reach


class Limits(Protocol):
    def limit(self, what: str, error: Tensor, limit: Tensor) -> None: ...

    def never(self, what: str, is_wrong: Tensor) -> None: ...


def compare(verdicts: Limits, when: str, call: Call, got: dict[str, Tensor]) -> None:
    """Compares the results of a call with q, k and v in FP8, or quantised by a recipe, with the oracle's."""
    meant, problem = call.meant, call.problem()
    ref = exact(problem, meant, call.dout, call.dlse, call.wanted, partial(fp8_delta_deviations, call))
    is_rounded = call.config.fp8_of == "recipe"
    finite = ref.max_logit.masked_fill(ref.max_logit.isinf(), 0.0).abs()
    score_error = OF_INPUTS + OF_PRODUCTS * float(finite.max()) if is_rounded and finite.numel() else 0.0
    for name, t in got.items():
        what = f"{when}: {name} in FP8"
        if name == "lse":
            verdicts.never(f"{what} has other rows without a key", (t.isinf() != ref.lse.isinf()).any())
            error = torch.where(ref.lse.isinf(), 0.0, (t.double() - ref.lse).abs())
            _limit(verdicts, what, error, LSE + score_error)
            continue
        if name == "max_logit":
            error = torch.where(t == ref.max_logit, 0.0, (t.double() - ref.max_logit).abs())
            _limit(verdicts, what, error, 0.01 + score_error)
            continue
        verdicts.never(f"{what} is not finite", ~t.isfinite().all())
        if name == "out" and not is_rounded:
            sizes = exact(problem, meant | {"v": meant["v"].abs()}, None, None, []).out
            _limit(verdicts, what, (t.double() - ref.out).abs() - WEIGHTS * sizes, NOTHING)
        elif name in ("out", "dq", "dk", "dv"):
            wanted = ref.out if name == "out" else ref.gradients[name[1:]]
            if wanted.numel():
                verdicts.limit(what, _rms(t.double() - wanted), RELATIVE * _rms(wanted) + _least(ref, name))


def _least(ref: Result, name: str) -> Tensor | float:
    """Returns the error that is allowed if a gradient nearly cancels; it is of the size of the terms, or what roundings make of it.

    The root mean square of n independent normal numbers exceeds 1 + t / sqrt(n) with a probability of at most exp(-t**2 / 2)
    (Boucheron et al., Concentration Inequalities, theorem 5.6). The errors of rows are independent, with unequal shares of the sum
    of squares, and a gradient has no more directions than numbers: 1 / n is the sum of squared shares, and of 1 / numbers.
    """
    if name == "out":
        return NOTHING
    noise = ref.noise.get(name[1:])
    if noise is None:
        return CANCELLED
    sizes = ref.noise.get("q", noise).square().sum(-1)
    shares = sizes / sizes.sum().clamp(min=torch.finfo(torch.float64).tiny)
    spread = (shares.square().sum() + 1.0 / max(1, noise.numel())).sqrt()
    return (_rms(noise) * (1.0 + DEVIATIONS * spread)).clamp(min=CANCELLED)


def _limit(verdicts: Limits, what: str, error: Tensor, limit: float) -> None:
    if error.numel():
        verdicts.limit(what, error.max(), torch.full_like(error.max(), limit))


def _rms(t: Tensor) -> Tensor:
    return t.square().mean().sqrt()
