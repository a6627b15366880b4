"""Dropout in the forward for sm_100: the weights that `common.dropout.dropout_keep` keeps, if one thread has a row of weights.

A thread makes all Philox calls of its row, one for each eight neighbouring keys, and also holds all weights that they decide about.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flexattn.kernels_triton.blackwell.tensor_memory import LANES, row_layout
from flexattn.kernels_triton.gluon.dropout import DropoutState, philox


@gluon.jit
def kept(weights, state: DropoutState, b_h, queries, keys, META: gl.constexpr):
    # Returns the weights with 0 for dropped ones, for LANES rows from query `queries` on and BLOCK_N keys from `keys` on. Rows may
    # alternate between GROUP heads, from b_h on.
    if META.HAS_DROPOUT:
        COLUMNS: gl.constexpr = META.BLOCK_N
        CALLS: gl.constexpr = row_layout(COLUMNS // 8)
        in_tile = gl.arange(0, LANES, layout=gl.SliceLayout(1, CALLS))[:, None]
        i = queries + in_tile // META.GROUP
        if META.GROUP > 1:
            b_h = b_h + in_tile % META.GROUP
        group = keys // 8 + gl.arange(0, COLUMNS // 8, layout=gl.SliceLayout(0, CALLS))[None, :]
        counters = group.to(gl.uint32), i.to(gl.uint32), b_h.to(gl.uint32)
        w0, w1, w2, w3 = philox(state.key0, state.key1, counters[0], counters[1], counters[2], state.offset)
        words = gl.join(gl.join(w0, w2), gl.join(w1, w3))  # the last two dims in the order of keys
        numbers = gl.reshape(gl.join(words << 16, words), [LANES, COLUMNS])  # a half of a word for each key
        numbers = gl.convert_layout(numbers, weights.type.layout)
        weights = gl.where(numbers >= state.threshold, weights, 0.0)
    return weights
