"""Dropout in the products of mma.sync: the weights that `common.dropout.dropout_keep` keeps.

One Philox call decides about eight neighbouring keys, which belong to the four threads that share a row. Each of them makes a share
of the calls.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flexattn.kernels_triton.gluon.dropout import DropoutState, kept_by_calls, numbers_by_calls


@gluon.constexpr_function
def _calls(rows, columns, warps):
    # Layout of the calls, [rows, groups of eight keys]: the rows of a product, and groups in turn for the threads of a row
    groups = columns // 8
    registers = [[8, 0], *([0, 4 << n] for n in range((groups // 4).bit_length() - 1))]
    registers += [[16 * warps << n, 0] for n in range((rows // 16 // warps).bit_length() - 1)]
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    warp_bases = [[16 << n, 0] for n in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, warp_bases, [], [rows, groups])


@gluon.jit
def kept(weights, state: DropoutState, b_h, queries, keys, META: gl.constexpr):
    # Returns the weights with 0 for dropped ones, for BLOCK_M rows from query `queries` on and BLOCK_N keys from `keys` on. Rows
    # may alternate between GROUP heads, from b_h on.
    if META.HAS_DROPOUT:
        CALLS: gl.constexpr = _calls(META.BLOCK_M, META.BLOCK_N, META.WARPS)
        weights = kept_by_calls(weights, state, b_h, queries, keys, CALLS, META)
    return weights


@gluon.jit
def keeps(scores, state: DropoutState, h, queries, keys, META: gl.constexpr):
    # Returns whether weights are kept, for transposed scores of BLOCK_N keys from `keys` on and BLOCK_M queries from `queries` on
    CALLS: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [META.WARPS, 1], [1, 0])
    numbers = numbers_by_calls(state, state.first_head + h, queries, keys, META.BLOCK_M, META.BLOCK_N, CALLS, META)
    return gl.convert_layout(gl.permute(numbers, (1, 0)), scores.type.layout) >= state.threshold
