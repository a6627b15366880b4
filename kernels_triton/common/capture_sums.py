"""The gradients of a score_mod's captures: how kernels add many numbers to few elements."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# elements of a capture that millions of scores may read each: n roundings in fp32 cause an error of about sqrt(n) / 2**25
FEW = 2**16


def sum_addends(
    run: Callable[[str, Sequence[Tensor], Sequence[Tensor]], None], gradients: Sequence[Tensor], deterministic: bool, addends: int
) -> None:
    """Writes `gradients`, contiguous, by launches `run(mode, sums, scales)` of `mod_math.accumulate`. addends: at most.

    Memory is linear in the captures. Atomics compute the sums, so their order varies from run to run. Sums are in fp32, or in fp64
    for captures with few elements. With `deterministic` there are two stages that do not depend on an order: the largest addend,
    then int64 fixed-point sums in a unit derived from it. An addend is rounded to 2**-(62 - log2(addends)) of the largest one.
    """
    if not deterministic:
        sums = [g.new_zeros(g.shape, dtype=torch.float64 if g.numel() <= FEW else torch.float32) for g in gradients]
        run("add", sums, ())
        for gradient, total in zip(gradients, sums, strict=True):
            gradient.copy_(total)
        return
    device = gradients[0].device
    largest = [torch.zeros(1, dtype=torch.int32, device=device) for _ in gradients]  # the bits of a non-negative float
    run("max", largest, ())
    room = 62 - max(0, math.ceil(math.log2(addends)))
    _, exponents = torch.frexp(torch.cat(largest).view(torch.float32))
    powers = torch.clamp(room - exponents, max=126)
    scales = torch.ldexp(torch.ones_like(powers, dtype=torch.float32), powers)
    fixed = [torch.zeros(g.shape, dtype=torch.int64, device=device) for g in gradients]
    # each at the beginning of its memory, because plans need that
    run("fixed", fixed, [scale.clone() for scale in scales.split(1)])
    for i, gradient in enumerate(gradients):
        total = fixed[i].to(torch.float64) / scales[i].to(torch.float64)
        is_finite = largest[i][0].view(torch.float32).isfinite()
        gradient.copy_(torch.where(is_finite, total, math.nan))
