"""Dropout in the forward for sm_100: the weights that `common.dropout.dropout_keep` keeps, if one thread has a row of weights.

A thread makes all Philox calls of its row, one for each eight neighbouring keys, and also holds all weights that they decide about.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flexattn.kernels_triton.blackwell.tensor_memory import row_layout
from flexattn.kernels_triton.gluon.dropout import DropoutState, kept_by_calls


@gluon.jit
def kept(weights, state: DropoutState, b_h, queries, keys, META: gl.constexpr):
    # Returns the weights with 0 for dropped ones, for LANES rows from query `queries` on and BLOCK_N keys from `keys` on. Rows may
    # alternate between GROUP heads, from b_h on.
    if META.HAS_DROPOUT:
        CALLS: gl.constexpr = row_layout(META.BLOCK_N // 8)
        weights = kept_by_calls(weights, state, b_h, queries, keys, CALLS, META)
    return weights
