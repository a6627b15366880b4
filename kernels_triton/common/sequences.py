"""The rows and tokens of one sequence of a call, dense or packed."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl


# Returns (first row, real tokens), clamped. Whatever the lengths and starts contain, the result is inside the tensor. If slots
# are consecutive, each sequence is also inside its part of a packed buffer (`packed_start`).
@triton.jit
def load_sequence(lengths, b, IS_RAGGED: tl.constexpr):
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


class Sequence(NamedTuple):
    """Locations of the queries and the keys of one sequence, inside a kernel."""

    start_q: int | tl.tensor
    len_q: tl.tensor
    start_kv: int | tl.tensor
    len_kv: tl.tensor


@triton.jit
def sequence_of(lengths_q, lengths_kv, b, META: tl.constexpr):
    start_q, len_q = load_sequence(lengths_q, b, META.IS_RAGGED_Q)
    start_kv, len_kv = load_sequence(lengths_kv, b, META.IS_RAGGED_KV)
    return Sequence(start_q=start_q, len_q=len_q, start_kv=start_kv, len_kv=len_kv)


class Program(NamedTuple):
    """A program's block of queries or of keys of one head, inside a kernel."""

    b: tl.tensor
    h: tl.tensor
    block: tl.tensor  # the block's number, of `blocks` of the longest sequence
    blocks: tl.tensor
    sequence: Sequence
    split: int | tl.tensor = 0  # number of a split of the query heads that share the keys


# The last block is first, because it has the most work under a causal band.
@triton.jit
def program_of_queries(pid, inputs, META: tl.constexpr):
    blocks = tl.cdiv(inputs.lengths_q.max_seqlen, META.BLOCK_M)
    block = blocks - 1 - pid % blocks
    h = pid // blocks % inputs.num_heads
    b = pid // blocks // inputs.num_heads
    sequence = sequence_of(inputs.lengths_q, inputs.lengths_kv, b, META)
    return Program(b=b, h=h, block=block, blocks=blocks, sequence=sequence)
