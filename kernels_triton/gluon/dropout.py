"""Dropout in Gluon: the weights that `common.dropout.dropout_keep` keeps, in the layout of a product's scores.

One Philox call decides about eight neighbouring keys. They belong to four threads if keys are the product's columns, and to eight
if keys are its rows. So each thread makes a share of the calls, and shuffles distribute the bits: no call is made twice.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flexattn.kernels_triton.common.arguments import Dropout
from flexattn.kernels_triton.common.dropout import DROPOUT_ROUNDS

_ROWS = gl.constexpr(64)
# Philox4x32, with the constants of `tl.philox`
_FACTOR0 = gl.constexpr(0xD2511F53)
_FACTOR2 = gl.constexpr(0xCD9E8D57)
_STEP0 = gl.constexpr(0x9E3779B9)
_STEP1 = gl.constexpr(0xBB67AE85)


# Calls have the layout [rows, PACK, rest]. One thread has all of PACK, and packs eight bits of each into one number. A thread has
# the rows and columns of a product's accumulator, except that lanes that would repeat a call take another row or column.


@gluon.constexpr_function
def _calls(columns, keys_are_rows):
    if keys_are_rows:  # [groups of eight keys, PACK, rest of the queries]
        pack = min(4, columns // 16)
        rest = columns // pack
        registers = [[0, 0, 16 << n] for n in range(rest.bit_length() - 5)]
        lanes = [[0, 0, 2], [0, 0, 4], [1, 0, 0], [0, 0, 1], [0, 0, 8]]
        warps, shape = [[2, 0, 0], [4, 0, 0]], [8, pack, rest]
    else:  # [queries, PACK, rest of the groups of eight keys]
        pack = min(4, columns // 16)
        rest = columns // 8 // pack
        registers = [[0, 0, 2 << n] for n in range(rest.bit_length() - 2)]
        lanes = [[8, 0, 0], [0, 0, 1], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
        warps, shape = [[16, 0, 0], [32, 0, 0]], [64, pack, rest]
    registers += [[0, 1 << n, 0] for n in range(pack.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], shape)


@gluon.constexpr_function
def _handed_on(calls, keys_are_rows, steps):
    # Layout of packed calls, [rows, rest], after the first of those lanes get back their own rows or columns. One at a time is a
    # shuffle; two at once would go through shared memory.
    _, _, rest = calls.shape
    lanes = [[row, column] for row, _, column in calls.lane_bases]
    registers = [[row, column] for row, pack, column in calls.reg_bases if pack == 0]
    first = 2 if keys_are_rows else 0
    for lane in range(first, first + steps):
        registers.append(lanes[lane])
        lanes[lane] = [0, 0]
    registers.sort(key=lambda base: base[1] if base[1] else 1.5)
    warps = [[row, column] for row, _, column in calls.warp_bases]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [calls.shape[0], rest])


@gluon.constexpr_function
def _weights(columns, keys_are_rows):
    # Layout of a product's accumulator: [groups, 8, PACK, rest] or [queries, PACK, rest, 4, 2].
    pack = min(4, columns // 16)
    packed = [[0, 0, 1 << n, 0] if keys_are_rows else [0, 1 << n, 0, 0, 0] for n in range(pack.bit_length() - 1)]
    if keys_are_rows:
        rest = columns // pack
        registers = [[0, 0, 0, 1], [1, 0, 0, 0], *([0, 0, 0, 8 << n] for n in range(rest.bit_length() - 4))]
        lanes = [[0, 0, 0, 2], [0, 0, 0, 4], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]]
        warps, shape = [[2, 0, 0, 0], [4, 0, 0, 0]], [8, 8, pack, rest]
    else:
        rest = columns // 8 // pack
        registers = [[0, 0, 0, 0, 1], [8, 0, 0, 0, 0], *([0, 0, 1 << n, 0, 0] for n in range(rest.bit_length() - 1))]
        lanes = [[0, 0, 0, 1, 0], [0, 0, 0, 2, 0], [1, 0, 0, 0, 0], [2, 0, 0, 0, 0], [4, 0, 0, 0, 0]]
        warps, shape = [[16, 0, 0, 0, 0], [32, 0, 0, 0, 0]], [64, pack, rest, 4, 2]
    return gl.DistributedLinearLayout(registers + packed, lanes, warps, [], shape)


@gluon.jit
def _product(x, FACTOR: gl.constexpr):
    # Returns (lower, upper word), by one multiplication: with 64-bit numbers the compiler would make two.
    assembly: gl.constexpr = "{ .reg .b64 p; mul.wide.u32 p, $2, $3; mov.b64 {$0, $1}, p; }"
    return gl.inline_asm_elementwise(assembly, "=r,=r,r,r", [x, FACTOR], dtype=(gl.uint32, gl.uint32), is_pure=True, pack=1)


@gluon.jit
def philox(key0, key1, c0, c1, c2, c3):
    # Counters that differ only in some dims have a size of 1 in the others, so that the first rounds are shared.
    for _ in gl.static_range(DROPOUT_ROUNDS):
        low0, high0 = _product(c0, _FACTOR0)
        low2, high2 = _product(c2, _FACTOR2)
        c0, c1, c2, c3 = high2 ^ c1 ^ key0, low2, high0 ^ c3 ^ key1, low0
        key0 += _STEP0
        key1 += _STEP1
    return c0, c1, c2, c3


class DropoutState(NamedTuple):
    """The state that the functions below draw from, and the factor of kept weights."""

    key0: int | gl.tensor
    key1: int | gl.tensor
    offset: int | gl.tensor
    threshold: int | gl.tensor
    keep_scale: float | gl.tensor
    first_head: int | gl.tensor  # first head of the batch element: its head h draws as first_head + h


@gluon.jit
def dropout_state(dropout: Dropout, first_head, META: gl.constexpr):
    # Without dropout nothing is read.
    if META.HAS_DROPOUT:
        seed = gl.load(dropout.rng_state_ptr).to(gl.uint64)
        return DropoutState(
            key0=seed.to(gl.uint32),
            key1=(seed >> 32).to(gl.uint32),
            offset=gl.load(dropout.rng_state_ptr + 1).to(gl.uint32),
            threshold=dropout.threshold.to(gl.uint32),  # type: ignore[attr-defined]
            keep_scale=dropout.keep_scale,
            first_head=first_head,
        )
    else:
        return DropoutState(key0=0, key1=0, offset=0, threshold=0, keep_scale=1.0, first_head=first_head)


@gluon.constexpr_function
def _along(layout, dim):
    for other in reversed(range(len(layout.shape))):
        if other != dim:
            layout = gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def _places(DIM: gl.constexpr, LAYOUT: gl.constexpr):
    # Returns 0, 1, .. along one dim of a linear layout; the other dims have size 1.
    x = gl.arange(0, LAYOUT.shape[DIM], layout=_along(LAYOUT, DIM))
    RANK: gl.constexpr = len(LAYOUT.shape)
    for other in gl.static_range(RANK):
        if other != DIM:
            x = gl.expand_dims(x, other)
    return x


@gluon.jit
def _bits(word, threshold, FIRST: gl.constexpr):
    # Returns two bits: the lower half of the word decides about one weight, the upper half about another. (The lower half does not
    # change the second comparison.)
    return gl.where(word << 16 >= threshold, 1 << FIRST, 0) | gl.where(word >= threshold, 2 << FIRST, 0)


@gluon.jit
def drawn_weights(
    state, h, queries, keys, COLUMNS: gl.constexpr, KEYS_ARE_ROWS: gl.constexpr, META: gl.constexpr, GROUP: gl.constexpr = 1
):
    # Returns the kept weights of a tile [64, COLUMNS] of scores, as bits in the layout that `kept` needs. The tile begins at query
    # `queries` and key `keys`. Call it while a product runs. Rows of queries may alternate between GROUP heads, from h on.
    if META.HAS_DROPOUT:
        b_h = state.first_head + h
        threshold = state.threshold
        CALLS: gl.constexpr = _calls(COLUMNS, KEYS_ARE_ROWS)
        WEIGHTS: gl.constexpr = _weights(COLUMNS, KEYS_ARE_ROWS)
        pack = _places(1, CALLS)
        rows = _places(0, CALLS)
        columns = pack * CALLS.shape[2] + _places(2, CALLS)
        if KEYS_ARE_ROWS:
            group, i = keys // 8 + rows, queries + columns
        else:
            group, i = keys // 8 + columns, queries + rows // GROUP
            if GROUP > 1:
                b_h = b_h + rows % GROUP
        w0, w1, w2, w3 = philox(state.key0, state.key1, group.to(gl.uint32), i.to(gl.uint32), b_h.to(gl.uint32), state.offset)
        bits = _bits(w0, threshold, 0) | _bits(w1, threshold, 2) | _bits(w2, threshold, 4) | _bits(w3, threshold, 6)
        packed = gl.sum(bits << 8 * pack, 1)  # [rows, REST]
        packed = gl.convert_layout(packed, _handed_on(CALLS, KEYS_ARE_ROWS, 1))
        if KEYS_ARE_ROWS:
            packed = gl.convert_layout(packed, _handed_on(CALLS, KEYS_ARE_ROWS, 2))
            return gl.convert_layout(packed, gl.SliceLayout(1, gl.SliceLayout(2, WEIGHTS)))
        else:
            return gl.convert_layout(packed, gl.SliceLayout(1, gl.SliceLayout(3, gl.SliceLayout(4, WEIGHTS))))
    else:
        return 0


@gluon.jit
def kept(x, drawn, KEYS_ARE_ROWS: gl.constexpr, META: gl.constexpr):
    # Returns x with 0 for dropped weights.
    if META.HAS_DROPOUT:
        WEIGHTS: gl.constexpr = _weights(x.shape[1], KEYS_ARE_ROWS)
        if KEYS_ARE_ROWS:
            bits = drawn[:, None, :][:, :, None, :] >> _places(1, WEIGHTS)
            mask = 1 << 8 * _places(2, WEIGHTS)
        else:
            bits = drawn[:, None, :][:, :, :, None][:, :, :, :, None] >> 2 * _places(3, WEIGHTS)
            mask = 1 << 8 * _places(1, WEIGHTS) + _places(4, WEIGHTS)
        bits, mask = gl.broadcast(bits, mask)
        bits = gl.convert_layout(gl.reshape(bits, x.shape), x.type.layout)
        mask = gl.convert_layout(gl.reshape(mask, x.shape), x.type.layout)
        # Test and selection of one weight after the other: for 64 tests at once the compiler packs the outcomes into registers.
        assembly: gl.constexpr = (
            "{ .reg .pred p; .reg .b32 b; and.b32 b, $2, $3; setp.ne.b32 p, b, 0; selp.f32 $0, $1, 0f00000000, p; }"
        )
        return gl.inline_asm_elementwise(assembly, "=f,f,r,r", [x, bits, mask], dtype=gl.float32, is_pure=True, pack=1)
    else:
        return x


@gluon.jit
def kept_gradient(dp, drawn, state, KEYS_ARE_ROWS: gl.constexpr, META: gl.constexpr):
    # Returns the gradient of a weight, before the row's delta is subtracted
    return scaled(kept(dp, drawn, KEYS_ARE_ROWS, META), state, META)


@gluon.jit
def scaled(x, state, META: gl.constexpr):
    # Scales sums over kept weights to compensate for the dropped ones
    if META.HAS_DROPOUT:
        x = x * state.keep_scale
    return x


@gluon.jit
def numbers_by_calls(state, b_h, queries, keys, ROWS: gl.constexpr, COLUMNS: gl.constexpr, CALLS: gl.constexpr, META: gl.constexpr):
    # Returns random numbers [ROWS, COLUMNS] of queries and keys; a weight is kept if its number reaches the threshold. CALLS: the
    # layout of the calls, [queries, groups of eight keys]. Rows may alternate between GROUP heads, from b_h on.
    in_tile = gl.arange(0, ROWS, layout=gl.SliceLayout(1, CALLS))[:, None]
    i = queries + in_tile // META.GROUP
    if META.GROUP > 1:
        b_h = b_h + in_tile % META.GROUP
    group = keys // 8 + gl.arange(0, COLUMNS // 8, layout=gl.SliceLayout(0, CALLS))[None, :]
    counters = group.to(gl.uint32), i.to(gl.uint32), b_h.to(gl.uint32)
    w0, w1, w2, w3 = philox(state.key0, state.key1, counters[0], counters[1], counters[2], state.offset)
    words = gl.join(gl.join(w0, w2), gl.join(w1, w3))  # the last two dims in the order of keys
    return gl.reshape(gl.join(words << 16, words), [ROWS, COLUMNS])  # a half of a word for each key


@gluon.jit
def kept_by_calls(weights, state, b_h, queries, keys, CALLS: gl.constexpr, META: gl.constexpr):
    # Like `kept`, for weights [queries, keys] of any layout; for the other arguments see `numbers_by_calls`
    numbers = numbers_by_calls(state, b_h, queries, keys, weights.shape[0], weights.shape[1], CALLS, META)
    return gl.where(gl.convert_layout(numbers, weights.type.layout) >= state.threshold, weights, 0.0)
