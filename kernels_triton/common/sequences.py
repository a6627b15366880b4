"""The rows and tokens of one sequence of a call, dense or packed."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_sequence(lengths, b, IS_RAGGED: tl.constexpr):
    # Returns (first row, real tokens), clamped. Whatever the lengths and starts contain, the result is inside the tensor. If slots
    # are consecutive, each sequence is also inside its part of a packed buffer (`packed_start`).
    start = 0
    length = lengths.num_tokens
    if IS_RAGGED:
        before = tl.minimum(tl.maximum(tl.load(lengths.cu_seqlens_ptr + b), 0), lengths.num_tokens)
        length = tl.minimum(tl.maximum(tl.load(lengths.cu_seqlens_ptr + b + 1), before), lengths.num_tokens) - before
        start = before
        if lengths.cu_seqlens_padded_ptr is not None:
            start = tl.minimum(tl.maximum(tl.load(lengths.cu_seqlens_padded_ptr + b), 0), lengths.num_tokens)
            length = tl.minimum(length, lengths.num_tokens - start)
        length = tl.minimum(length, lengths.max_seqlen)
    elif lengths.cu_seqlens_ptr is not None:
        length = tl.load(lengths.cu_seqlens_ptr + b + 1) - tl.load(lengths.cu_seqlens_ptr + b)
        length = tl.minimum(tl.maximum(length, 0), tl.minimum(lengths.num_tokens, lengths.max_seqlen))
    if lengths.seqused_ptr is not None:
        length = tl.minimum(tl.maximum(tl.load(lengths.seqused_ptr + b), 0), tl.minimum(length, lengths.max_seqlen))
    return start, length
