"""Check of the sizes of logits, under FLEXATTN_CHECK=1: up to which the kernels' softmax of plain scores is right."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flexattn.dispatch.spec import AttentionSpec, Direction, Operands

# A row's largest logit times log2(e) is rounded to float32, by 2**-24 of itself, before it is subtracted in an exponent. Weights,
# their sum and so out and lse are relative to the rounded number, and right as long as the largest weight can be held.
LARGEST = 2.0**26  # rounded by 6, in units of log2; with the 8 that a lazy maximum may lag behind, float16 holds it with 2**16
LARGEST_FP8 = 2.0**22  # by 3/8, where E4M3 holds 2**8.8 and weights are up to 2**8
# A backward makes the weights of lse, which is rounded four times: they are wrong by |lse| / 2**22 at most, so here by 1.6 %.
LARGEST_OF_GRADIENTS = 2.0**16


def check_logits(spec: AttentionSpec, x: Operands, lse: Tensor, direction: Direction) -> None:
    """Raises ValueError where logits of plain scores are larger than the kernels take. Waits for the device.

    Biases, ALiBi and score_mods have kernels of their own, for logits of any size.
    """
    largest = LARGEST_FP8 if spec.fp8 is not None else LARGEST
    if direction == "backward" and spec.dtype is not torch.float32:  # float32's weights are divided by their sum
        largest = LARGEST_OF_GRADIENTS
    found = float(torch.where(lse == float("-inf"), 0.0, lse.abs()).amax()) if lse.numel() else 0.0
    if found <= largest or (math.isnan(found) and not all(bool(t.float().isfinite().all()) for t in (x.q, x.k))):
        return
    raise ValueError(
        f"the logits of this call are so large that lse is {found:.3g}; accepted in a {direction} on the triton backend: up to "
        f"{largest:.3g} without a bias or a score_mod; pass a smaller softmax_scale, smaller q and k or a smaller softmax_offset, "
        "a score_mod such as lambda score, b, h, q_idx, kv_idx: score * 1.0, by which logits may have any size, or backend='eager'"
    )
