"""The weights that dropout keeps, from Philox at a weight's own position."""

from __future__ import annotations

import triton
import triton.language as tl

DROPOUT_ROUNDS = tl.constexpr(7)  # rounds of Philox4x32: the fewest that pass BigCrush (Salmon and others, SC 2011, table 2)


@triton.jit
def dropout_keep(inputs, b, h, first_row, first_column, META: tl.constexpr):
    # Returns a mask [BLOCK_M, BLOCK_N]. Philox runs at counter (j // 8, i, b * heads + h, offset). Each of eight neighbouring
    # columns gets a half of one of its four words. A lower half is shifted up. An upper half is compared together with the bits
    # below it, which does not change the result.
    dropout = inputs.dropout
    state = dropout.rng_state_ptr
    b_h = b * inputs.num_heads + h
    if META.ORIGIN > 0:
        state += tl.cast(b, tl.int64) * META.ORIGIN
        first_row += tl.load(state + 2).to(tl.int32)
        first_column += tl.load(state + 3).to(tl.int32)
        b_h = h + tl.load(state + 4).to(tl.int32)
    seed = tl.load(state)
    offset = tl.load(state + 1).to(tl.int32)
    if META.ORIGIN > 5:
        first_column += tl.load(state + 5).to(tl.int32)
    # If weights depend on a join and on a load of bytes, such as a mod's bool table, Triton 3.6 and 3.7 treat them as 4-bit
    # numbers. They then multiply half of 16 keys twice (triton-lang/triton#10645; `CompileReport.folded_operands`).
    CAN_JOIN: tl.constexpr = META.BLOCK_M >= 32 and META.BLOCK_N >= 32
    if META.ORIGIN > 5 or not CAN_JOIN:
        numbers = _numbers_of_columns(seed, offset, b_h, first_row, first_column, META)
    else:
        numbers = _numbers_of_groups(seed, offset, b_h, first_row, first_column, META)
    return numbers >= dropout.threshold.to(tl.uint32, bitcast=True)


@triton.jit
def _numbers_of_groups(seed, offset, b_h, first_row, first_column, META: tl.constexpr):
    BLOCK_M: tl.constexpr = META.BLOCK_M
    BLOCK_N: tl.constexpr = META.BLOCK_N
    zero = tl.zeros([BLOCK_M, BLOCK_N // 8], tl.int32)
    c0 = zero + (first_column // 8 + tl.arange(0, BLOCK_N // 8))[None, :]
    c1 = zero + (first_row + tl.arange(0, BLOCK_M))[:, None]
    w0, w1, w2, w3 = tl.philox(seed, c0, c1, zero + b_h, zero + offset, n_rounds=DROPOUT_ROUNDS)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [BLOCK_M, BLOCK_N // 8, 2, 2], the last two in column order
    halves = tl.join(words << 16, words)
    return tl.reshape(halves, [BLOCK_M, BLOCK_N])


@triton.jit
def _numbers_of_columns(seed, offset, b_h, first_row, first_column, META: tl.constexpr):
    # For a tile that is small or may begin inside of a group of eight: one Philox call for each number, which uses one word of it.
    BLOCK_M: tl.constexpr = META.BLOCK_M
    BLOCK_N: tl.constexpr = META.BLOCK_N
    zero = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    columns = zero + (first_column + tl.arange(0, BLOCK_N))[None, :]
    c1 = zero + (first_row + tl.arange(0, BLOCK_M))[:, None]
    w0, w1, w2, w3 = tl.philox(seed, columns // 8, c1, zero + b_h, zero + offset, n_rounds=DROPOUT_ROUNDS)
    place = columns % 8
    words = tl.where(place < 4, tl.where(place < 2, w0, w1), tl.where(place < 6, w2, w3))
    return tl.where(place % 2 == 0, words << 16, words)
