"""The softmax of a block of keys, with or without lazy rescaling (`HopperTile.is_lazy`)."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flexattn.kernels_triton.common.exponents import LN2, LOWEST, exponent_factor, scaled_row_max
from flexattn.kernels_triton.gluon.dropout import kept
from flexattn.kernels_triton.gluon.fp8_operands import P_SHIFT
from flexattn.kernels_triton.gluon.operands import pack_pairs

_RESCALE_THRESHOLD = gl.constexpr(8.0)  # maximum rise of a row's maximum, in units of log2, without a rescaling of sums


@gluon.constexpr_function
def _rescale_assembly(count):
    # Multiplies a thread's part of acc by the correction factors of its two rows, which alternate every two columns. It is skipped
    # if all rows of the warp have a factor of 1.
    lines = [
        "{ .reg .pred p, q;",
        f"setp.neu.f32 p, ${2 * count}, 0f3F800000; setp.neu.f32 q, ${2 * count + 2}, 0f3F800000;",
        "or.pred p, p, q; vote.sync.any.pred p, p, 0xffffffff; @!p bra SAME;",
    ]
    lines += [f"mul.f32 ${i}, ${i}, ${2 * count + (i & 2)};" for i in range(count)]
    return " ".join([*lines, "SAME: }"])


@gluon.constexpr_function
def _rescale_constraints(count):
    return ",".join(["=f"] * count + [str(i) for i in range(count)] + ["f"] * count)


@gluon.jit
def rescaled(acc, correction, META: gl.constexpr):
    correction = gl.convert_layout(correction, gl.SliceLayout(1, acc.type.layout))[:, None]
    if META.LAZY:
        COUNT: gl.constexpr = acc.type.shape[1] // 2  # elements of a thread
        assembly: gl.constexpr = _rescale_assembly(COUNT)
        constraints: gl.constexpr = _rescale_constraints(COUNT)
        acc, correction = gl.broadcast(acc, correction)
        return gl.inline_asm_elementwise(assembly, constraints, [acc, correction], dtype=gl.float32, is_pure=False, pack=COUNT)
    else:
        return acc * correction


@gluon.jit
def row_maximum(s, COLUMNS: gl.constexpr):
    # The maximum of a thread's elements is a tree, because each step of a chain waits for the previous one. Then the four threads
    # that share a row combine theirs.
    if COLUMNS < 32:
        row_max_of_threads = gl.max(gl.max(gl.reshape(s, [s.shape[0], COLUMNS // 8, 4, 2]), 3), 1)
    else:
        parts = gl.reshape(s, [s.shape[0], COLUMNS // 32, 4, 4, 2])
        row_max_of_threads = gl.max(gl.max(gl.max(parts, 4), 2), 1)
    return gl.convert_layout(gl.max(row_max_of_threads, 1), gl.SliceLayout(1, s.type.layout))


@gluon.jit
def sums_of_threads(p, COLUMNS: gl.constexpr):
    # Returns [rows, 4]: separate sums of the four threads that share a row, which exchange nothing until the end
    return gl.sum(gl.sum(gl.reshape(p, [p.shape[0], COLUMNS // 8, 4, 2]), 3), 1)


@gluon.jit
def for_threads(x, sums):
    # Returns x of rows in the layout of `sums_of_threads`
    return gl.convert_layout(x, gl.SliceLayout(1, sums.type.layout))[:, None]


@gluon.jit
def exponentials(s, highest, row_max, scale_log2, META: gl.constexpr):
    # Returns (weights, row maximum, correction factor of earlier sums). highest: the largest score of each row. The maximum is in
    # units of log2, or exact in natural units for unbounded logits. In FP8, scale_log2 has a factor for each row, and the weights
    # are scaled by P_SCALE.
    SHIFT: gl.constexpr = P_SHIFT if META.IS_FP8 else 0.0
    if META.IS_UNBOUNDED:
        new_max = highest
        if META.LAZY:
            new_max = gl.where(new_max - row_max > _RESCALE_THRESHOLD * LN2, new_max, row_max)
        else:
            new_max = gl.maximum(row_max, new_max)
        factor = exponent_factor(new_max)
        scaled_max = scaled_row_max(new_max, factor, SHIFT)
        p = gl.exp2(gl.fma(s, factor[:, None], -scaled_max[:, None]))
        correction = gl.exp2(scaled_row_max(row_max, factor, SHIFT) - scaled_max)
    else:
        new_max = highest * scale_log2
        if META.LAZY:  # a maximum that is too small by up to 8 scales p and its sum by up to 2**8; out and lse stay right
            new_max = gl.where(new_max - row_max > _RESCALE_THRESHOLD, new_max, row_max)
        else:
            new_max = gl.maximum(row_max, new_max)
        if META.IS_FP8:
            scaled_max = gl.maximum(new_max, LOWEST)  # for -inf too, exp2(-inf - scaled_max) is 0
            p = gl.exp2(s * scale_log2[:, None] - (scaled_max - SHIFT)[:, None])
        else:
            scaled_max = gl.where(new_max == float("-inf"), 0.0, new_max)  # if a row has seen nothing yet, exp2(-inf - 0) is 0
            p = gl.exp2(s * scale_log2 - scaled_max[:, None])
        correction = gl.exp2(row_max - scaled_max)
    return p, new_max, correction


@gluon.jit
def softmax(qk, row_max, row_sum, scale_log2, drawn, DTYPE: gl.constexpr, META: gl.constexpr):
    # Returns (weights in pairs, row maximum, row sum, correction factor of earlier sums)
    p, new_max, correction = exponentials(qk, row_maximum(qk, META.BLOCK_N), row_max, scale_log2, META)
    row_sum = row_sum * for_threads(correction, row_sum) + sums_of_threads(p, META.BLOCK_N)
    pairs = pack_pairs(kept(p, drawn, False, META), qk.shape[0], META.BLOCK_N, DTYPE)
    return pairs, new_max, row_sum, correction
