"""Check of the sizes of logits under FLEXATTN_CHECK=1. Larger logits make the kernels' softmax of plain scores wrong."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flexattn.dispatch.spec import AttentionSpec, Direction, Operands

# A row's largest logit times log2(e) is rounded to float32 before it is subtracted in an exponent: the error is up to 2**-24 of it.
# Weights and their sum, and so out and lse, are relative to the rounded number. They are right if the type holds every weight.
LARGEST = 2.0**26  # the rounding error is 6 in units of log2. A lazy maximum may lag behind by 8 more, and float16 holds 2**16
LARGEST_FP8 = 2.0**22  # the rounding error is 3/8. Weights are up to 2**8, and E4M3 holds 2**8.8
# A backward computes weights from lse, which is rounded four times. Their relative error is at most |lse| / 2**22, here 1.6 %.
LARGEST_OF_GRADIENTS = 2.0**16


def check_logits(spec: AttentionSpec, x: Operands, lse: Tensor, direction: Direction) -> None:
    """Raises ValueError if logits of plain scores are larger than the kernels take. Waits for the device.

    Biases, ALiBi and score_mods have kernels of their own, for logits of any size.
    """
    if spec.bias_type != "no_bias" or (spec.mods is not None and spec.mods.score is not None):
        return
    largest = LARGEST_FP8 if spec.fp8 is not None else LARGEST
    if direction == "backward" and spec.dtype is not torch.float32:  # float32's weights are divided by their sum
        largest = LARGEST_OF_GRADIENTS
    found = float(torch.where(lse == float("-inf"), 0.0, lse.abs()).amax()) if lse.numel() else 0.0
    if found <= largest or (math.isnan(found) and not all(bool(t.float().isfinite().all()) for t in (x.q, x.k))):
        return
    raise ValueError(
        f"the logits of this call are so large that lse is {found:.3g}; accepted in a {direction} on the triton backend: up to "
        f"{largest:.3g} without a bias or a score_mod. Pass a smaller softmax_scale, softmax_offset, q or k. A score_mod such as "
        "lambda score, b, h, q_idx, kv_idx: score * 1.0, or backend='eager', takes logits of any size"
    )
