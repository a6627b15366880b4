"""Largest score of each query, which FlexAttention returns on request: computed in plain torch, because no kernel stores it."""

from __future__ import annotations

import torch
from torch import Tensor

from flexattn import ops
from flexattn.dispatch.quantization import dequantize
from flexattn.dispatch.reference import NEG_INF, Differentiable, attend, slice_block, split_sequences
from flexattn.functional import bind_call

MOST_AT_ONCE = 1 << 24  # scores in memory at a time


def row_maxima(query: Tensor, key: Tensor, value: Tensor, **arguments: object) -> Tensor:
    """Returns the largest modified score that each query sees, [b, h, sq] in float32 (float64 for float64); -inf if it sees none.

    query, key, value: [b, heads, tokens, d]. arguments: further arguments of `attention`. The result is computed a few queries at
    a time and is not differentiable.
    """
    with torch.no_grad(), torch.autocast(query.device.type, enabled=False):
        x, settings = bind_call(query, key, value, qkv_format="bhsd", **arguments)
        spec = ops.spec_to_run(x, settings)
        dtype = torch.promote_types(query.dtype, torch.float32)
        maxima = torch.full(query.shape[:3], NEG_INF, dtype=dtype, device=query.device)
        operands = Differentiable.of(dequantize(spec, x, dtype))
        _, heads, sq = maxima.shape
        cols, step = range(key.shape[2]), max(1, MOST_AT_ONCE // max(1, heads * key.shape[2]))
        for sequences in split_sequences(spec, x):
            for b in sequences.batch:
                sequence = sequences._replace(batch=range(b, b + 1))
                for first in range(0, sq, step):
                    rows = range(first, min(sq, first + step))
                    block = slice_block(spec, operands, sequence, rows, cols).map(lambda t: t.to(dtype))
                    _, _, maxima[b : b + 1, :, rows.start : rows.stop] = attend(spec, x, sequence, rows, cols, block)
    return maxima
