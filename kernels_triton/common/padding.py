"""The rows without a token, and the block that fills each of them with zeros."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from flexattn.kernels_triton.common.sequences import load_sequence
from flexattn.kernels_triton.common.tile_memory import store_tile


# Returns (front, slot), relative to the start of the sequence: the rows without a token for which this sequence writes zeros.
# These are -start .. front, which only the first sequence has, and length .. slot. They end at the start of the next slot in
# memory, because slots may be in any order.
@triton.jit
def load_padding(lengths, b, start, length, IS_RAGGED: tl.constexpr):
    front = b * 0 - start
    slot = b * 0 + lengths.num_tokens
    if IS_RAGGED:
        batch = lengths.batch
        num_tokens = lengths.num_tokens
        first = start
        end = start + length
        after = num_tokens
        if lengths.cu_seqlens_padded_ptr is not None:
            CHUNK: tl.constexpr = 64
            first = num_tokens
            for others in range(0, batch, CHUNK):
                other = others + tl.arange(0, CHUNK)
                other_start, other_length = load_sequence(lengths, tl.minimum(other, batch - 1), IS_RAGGED)
                other_start = tl.where(other_length > 0, other_start, num_tokens)
                first = tl.minimum(first, tl.min(other_start, 0))
                after = tl.minimum(after, tl.min(tl.where(other_start >= end, other_start, num_tokens), 0))
            after = tl.where(length > 0, after, end)  # a sequence without tokens has no slot
        else:
            following = tl.load(lengths.cu_seqlens_ptr + tl.minimum(b + 1, batch))
            after = tl.where(b == batch - 1, num_tokens, tl.minimum(tl.maximum(following, end), num_tokens))
        front = tl.where(b == 0, first - start, front)
        slot = after - start
    return front, slot


@triton.jit
def store_zeros(base, step, offsets, begin, end, HEAD_DIM: tl.constexpr, WIDTH0: tl.constexpr, WIDTH1: tl.constexpr):
    ROWS: tl.constexpr = offsets.shape[0]
    for row in range(begin, end, ROWS):
        pointer = base + tl.cast(row, tl.int64) * step
        store_tile(pointer, tl.zeros([ROWS, WIDTH0], tl.float32), offsets, row, end, 0, WIDTH0, HEAD_DIM)
        if WIDTH1 > 0:
            store_tile(pointer, tl.zeros([ROWS, WIDTH1], tl.float32), offsets, row, end, WIDTH0, WIDTH1, HEAD_DIM)


# Writes zeros into the rows of a `Padding`.
@triton.jit
def clear_padding(
    base, step, offsets, padding, HEAD_DIM: tl.constexpr, WIDTH0: tl.constexpr, WIDTH1: tl.constexpr, IS_RAGGED: tl.constexpr
):
    store_zeros(base, step, offsets, padding.begin, padding.end, HEAD_DIM, WIDTH0, WIDTH1)
    if IS_RAGGED:
        store_zeros(base, step, offsets, padding.front_begin, padding.front, HEAD_DIM, WIDTH0, WIDTH1)


class Padding(NamedTuple):
    """The rows that a block fills with zeros, inside a kernel."""

    begin: tl.tensor  # begin .. end: all rows of a block without a token; for the last block the rest of the slot
    end: tl.tensor
    front_begin: tl.tensor  # front_begin .. front: rows before all slots, for the first block of all
    front: tl.tensor
    slot: tl.tensor  # a block with some tokens masks its other rows up to here itself


# Returns the padding of a block that begins at `first`.
@triton.jit
def padding_rows(lengths, b, start, length, first, is_last, BLOCK: tl.constexpr, IS_RAGGED: tl.constexpr):
    front = b * 0 - start
    slot = b * 0 + length
    if (first + BLOCK > length) | is_last | ((b == 0) & (first == 0)):
        front, slot = load_padding(lengths, b, start, length, IS_RAGGED)
    begin = tl.where(first < length, first + BLOCK, first)
    end = tl.where(is_last, slot, tl.minimum(slot, first + BLOCK))
    return Padding(begin=begin, end=end, front_begin=tl.where(first == 0, -start, front), front=front, slot=slot)
