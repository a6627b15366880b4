"""The gradient of a dense bias that each batch entry has for itself: the kernel of dq has each of its tiles once, and writes it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexattn.kernels_triton.common.problem import Backward


@triton.jit
def store_bias_gradient(pointer, gradient, tile, head, inputs, META: tl.constexpr):
    # The pointer is to the gradient of the whole bias, one [len_q, len_kv] for each head.
    dbias = gradient.dscore * inputs.scores.scale if META.HAS_PRE_SCALE_BIAS else gradient.dlogit
    first = (tl.cast(head.b, tl.int64) * inputs.num_heads + head.h) * head.len_q * head.len_kv
    place = first + tile.i.to(tl.int64) * head.len_kv + tile.j
    tl.store(pointer + place, dbias.to(pointer.dtype.element_ty), mask=(tile.i < head.len_q) & (tile.j < head.len_kv))


def owned_gradient(call: Backward) -> Tensor | None:
    """Returns `dbias`, with zeros where a mask hides blocks of keys, if the kernel of dq can write the rest; otherwise None."""
    x, dbias = call.problem, call.dbias
    if dbias is None or x.q.dtype is torch.float32 or x.is_fp8 or x.has_lengths or x.q.dim() == 3 or x.k.dim() == 3:
        return None
    if tuple(dbias.shape) != (x.batch, x.num_heads, x.q.shape[1], x.k.shape[1]) or not dbias.is_contiguous():
        return None
    if x.window_left is not None or x.window_right is not None or x.block_mask is not None:
        dbias.zero_()
    return dbias
