"""Device functions that every kernel shares: addressing, the band, the logits and their derivative, dropout.

Tiles are [queries, keys] or [keys, queries]. Functions with arguments `i` and `j` serve both. These are positions within their
sequence, in a shape that broadcasts against the tile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flexattn.kernels_triton.common.arguments import Head

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
DROPOUT_ROUNDS = tl.constexpr(7)  # rounds of Philox4x32: the fewest that pass BigCrush (Salmon and others, SC 2011, table 2)
LOWEST = tl.constexpr(-3.4028234663852886e38)  # the lowest finite fp32 number
FAR = tl.constexpr(2.0**28 * 0.6931471805599453)  # from this logit on, neighbouring fp32 numbers are at least 16 apart
NEAR = tl.constexpr(2.0**22)  # up to this logit, its product with log2(e) is rounded by at most 1/4
LARGE = tl.constexpr(8192.0)  # from this lse on, fp32 represents it, and so the probabilities computed from it, to 2**-11 at best
# added to the exponents of softmax weights in FP8: they are at most 2**8, and E4M3 represents up to 448
FP8_OFFSET = tl.constexpr(8.0)


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


@triton.jit
def packed_start(lengths, b, start):
    # Returns the first row of a sequence in a kernel's own buffer. There sequences are consecutive, whatever the order of their
    # slots.
    if lengths.cu_seqlens_padded_ptr is not None:
        start = tl.minimum(tl.maximum(tl.load(lengths.cu_seqlens_ptr + b), 0), lengths.num_tokens)
    return start


@triton.jit
def load_padding(lengths, b, start, length, IS_RAGGED: tl.constexpr):
    # Returns (front, slot), relative to the start of the sequence: the rows without a token for which this sequence writes zeros.
    # These are -start .. front, which only the first sequence has, and length .. slot. They end at the start of the next slot in
    # memory, because slots may be in any order.
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
def paged_rows(pages, x, base, b, first, num_rows, META: tl.constexpr):
    # Returns (pointer, offsets) of BLOCK_N keys of a sequence from `first` on, a multiple of BLOCK_N. base: the first key of page
    # 0. Page ids are clamped, so they are inside the tensor whatever the table contains, and no entry past the sequence is read.
    # PAGE_ROWS keys are contiguous in a page, so one entry is read for all of them.
    BLOCK_N: tl.constexpr = META.BLOCK_N
    PAGE_ROWS: tl.constexpr = META.PAGE_ROWS
    table_ptr = pages.table_ptr + tl.cast(b, tl.int64) * pages.stride
    if PAGE_ROWS == BLOCK_N:
        page = tl.cast(_clamped(tl.load(table_ptr + first // pages.page_size), pages), tl.int64)
        offset = page * x.stride_b + tl.cast(first % pages.page_size, tl.int64) * x.stride_s
        return base + offset * META.ALIGN, row_steps(x.stride_s, BLOCK_N, META)[1]
    else:
        rows = first + tl.arange(0, BLOCK_N // PAGE_ROWS) * PAGE_ROWS
        page = _clamped(tl.load(table_ptr + rows // pages.page_size, mask=rows < num_rows, other=0), pages)
        offsets = tl.cast(page, tl.int64) * x.stride_b + tl.cast(rows % pages.page_size, tl.int64) * x.stride_s
        if PAGE_ROWS > 1:
            offsets = offsets[:, None] + tl.arange(0, PAGE_ROWS).to(tl.int64)[None, :] * x.stride_s
            offsets = tl.reshape(offsets, [BLOCK_N])
        return base, offsets * META.ALIGN


@triton.jit
def _clamped(page, pages):
    return tl.minimum(tl.maximum(page, 0), pages.num_pages - 1)


@triton.jit
def row_pointer(x, b, h, row, META: tl.constexpr):
    # Strides are passed divided by ALIGN, so the compiler knows their divisor without compiling for their values.
    offset = tl.cast(b, tl.int64) * x.stride_b + tl.cast(h, tl.int64) * x.stride_h + tl.cast(row, tl.int64) * x.stride_s
    return x.ptr + offset * META.ALIGN


@triton.jit
def row_steps(stride_s, ROWS: tl.constexpr, META: tl.constexpr):
    # Returns (elements from one row to the next, offsets of a tile's rows from its first row). The offsets fit 32 bits unless the
    # stride is very large. Then a tile's address is one 64-bit scalar, which a loop increments, and a 32-bit register for each row.
    step = tl.cast(stride_s, tl.int64) * META.ALIGN
    rows = tl.arange(0, ROWS)
    if META.WIDE_STRIDES:
        rows = rows.to(tl.int64)
    return step, rows * stride_s * META.ALIGN


@triton.jit
def queries_of_tile(first_row, META: tl.constexpr):
    # Returns the query of each row of a forward's tile.
    rows = tl.arange(0, META.BLOCK_M)
    if META.GROUP > 1:
        rows = rows // META.GROUP
    return first_row + rows


@triton.jit
def heads_of_tile(h, META: tl.constexpr):
    # Returns the head of each row of a forward's tile, or one head for all rows.
    if META.GROUP > 1:
        return h + _head_in_tile(META)
    else:
        return h


@triton.jit
def _head_in_tile(META: tl.constexpr):
    # Rows that belong to no head repeat the last head: the same numbers, written to the same addresses.
    head = tl.arange(0, META.BLOCK_M) % META.GROUP
    if META.HEADS < META.GROUP:
        head = tl.minimum(head, META.HEADS - 1)
    return head


@triton.jit
def offsets_of_tile(x, META: tl.constexpr):
    # Returns the offsets of the rows of a forward's tile from its first query and head.
    if META.GROUP > 1:
        rows = tl.arange(0, META.BLOCK_M).to(tl.int64)
        return (rows // META.GROUP * x.stride_s + _head_in_tile(META).to(tl.int64) * x.stride_h) * META.ALIGN
    else:
        return row_steps(x.stride_s, META.BLOCK_M, META)[1]


@triton.jit
def load_head(bias, alibi, b, h, META: tl.constexpr):
    # Returns (pointer to the head's bias, its ALiBi slope).
    bias_ptr = 0.0  # never used
    if META.HAS_PRE_SCALE_BIAS or META.HAS_POST_SCALE_BIAS:
        bias_ptr = bias.ptr + tl.cast(b, tl.int64) * bias.stride_b + tl.cast(h, tl.int64) * bias.stride_h
    alibi_slope = 0.0
    if META.HAS_ALIBI:
        alibi_slope = tl.load(alibi.ptr + b * alibi.stride_b + h)
    return bias_ptr, alibi_slope


@triton.jit
def head_values(b, h, captures, MODS: tl.constexpr, META: tl.constexpr):
    # Returns the values of a head that the mods' functions read after the captures.
    values = ()
    if META.HAS_SCORE_MOD or META.HAS_MASK_MOD:  # noqa: SIM102  # otherwise MODS is None
        if MODS.per_head is not None:
            values = MODS.per_head(b, h, captures)
    return values


@triton.jit
def with_head_values(captures, values, META: tl.constexpr):
    if META.HAS_SCORE_MOD or META.HAS_MASK_MOD:
        return captures + values
    else:
        return ()


@triton.jit
def captures_of_head(b, h, captures, MODS: tl.constexpr, META: tl.constexpr):
    return with_head_values(captures, head_values(b, h, captures, MODS, META), META)


@triton.jit
def head_of(scores, b, h, len_q, len_kv, shift, MODS: tl.constexpr, META: tl.constexpr):
    bias_ptr, alibi_slope = load_head(scores.bias, scores.alibi, b, h, META)
    return Head(
        b=b,
        h=h,
        len_q=len_q,
        len_kv=len_kv,
        shift=shift,
        softcap=scores.softcap,
        bias_ptr=bias_ptr,
        bias_stride_m=scores.bias.stride_m,
        bias_stride_n=scores.bias.stride_n,
        alibi_slope=alibi_slope,
        captures=captures_of_head(b, h, scores.captures, MODS, META),
    )


@triton.jit
def shows_block(head, first_q, NUM_Q: tl.constexpr, first_kv, NUM_KV: tl.constexpr, MODS: tl.constexpr):
    # Returns whether intervals prove that the mask_mod shows all these keys to all these queries, so that no pair needs the
    # mask_mod.
    q_low, kv_low = tl.cast(first_q, tl.int64), tl.cast(first_kv, tl.int64)
    q_high = tl.maximum(tl.minimum(q_low + NUM_Q, head.len_q) - 1, q_low)
    kv_high = tl.maximum(tl.minimum(kv_low + NUM_KV, head.len_kv) - 1, kv_low)
    b, h = tl.cast(head.b, tl.int64), tl.cast(head.h, tl.int64)
    surely, _possibly = MODS.mask_of_block(b, h, q_low, q_high, kv_low, kv_high, None, None, head.captures)
    return surely


@triton.jit
def load_sink(softmax_offset_ptr, h, UNIT: tl.constexpr, META: tl.constexpr):
    # UNIT: LOG2E for units of log2, or 1
    sink = tl.zeros([], tl.float32)
    if META.HAS_OFFSET:
        sink = tl.load(softmax_offset_ptr + h).to(tl.float32) * UNIT
    return sink


class Queries(NamedTuple):
    """The queries of one sequence and head, inside a kernel."""

    b: Any
    h: Any
    num_heads: Any
    start: Any
    length: Any
    num_tokens: Any  # tokens of all sequences if they are packed, otherwise of each


@triton.jit
def make_row_statistics(dout0, dout1, saved, scale, queries, first_row, META: tl.constexpr):
    # Returns (lse in units of log2, sum(out * dout) - dlse) of rows with their dout. The lse is +inf for a row that sees nothing or
    # does not exist. scale: of dout in FP8.
    BLOCK_M: tl.constexpr = META.BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    out_pointer = row_pointer(saved.out, queries.b, queries.h, queries.start + first_row, META)
    _, out_offsets = row_steps(saved.out.stride_s, BLOCK_M, META)
    out0 = load_tile(out_pointer, out_offsets, first_row, queries.length, 0, META.V0, META.HEAD_DIM_V, True)
    delta = tl.sum(out0.to(tl.float32) * dout0.to(tl.float32), 1)
    if META.V1 > 0:
        out1 = load_tile(out_pointer, out_offsets, first_row, queries.length, META.V0, META.V1, META.HEAD_DIM_V, True)
        delta += tl.sum(out1.to(tl.float32) * dout1.to(tl.float32), 1)
    if META.IS_FP8:
        delta *= load_descale(scale, queries.b, queries.h, first_row, META)
    row = lse_row(queries.b, queries.h, queries.num_heads, queries.num_tokens, queries.start, META)
    if saved.dlse_ptr is not None:
        delta -= tl.load(saved.dlse_ptr + row + rows, mask=rows < queries.length, other=0.0)
    lse = tl.load(saved.lse_ptr + row + rows, mask=rows < queries.length, other=float("inf"))
    lse_log2 = tl.where(lse == float("-inf"), float("inf"), lse) * LOG2E
    return lse_log2, delta


@triton.jit
def lse_row(b, h, num_heads, num_tokens_q, start_q, META: tl.constexpr):
    # Returns the first index of a sequence and head in lse.
    return tl.cast(h if META.IS_RAGGED_Q else b * num_heads + h, tl.int64) * num_tokens_q + start_q


@triton.jit
def large_part(lse):
    # Returns the part of lse to subtract from the logits before exp2: all of it if it is large, otherwise 0. See `large_rows`.
    size = tl.abs(lse)
    return tl.where((size >= LARGE) & (size < float("inf")), lse, 0.0)


class Large(NamedTuple):
    """A sequence with unbounded logits, as `relative_to_lse` reads it inside a kernel."""

    is_any: Any  # whether any lse of the call is large
    lse_ptr: Any
    num_heads: Any
    num_tokens_q: Any
    start_q: Any


@triton.jit
def load_large(large_ptr, lse_ptr, num_heads, num_tokens_q, start_q, META: tl.constexpr):
    if META.IS_UNBOUNDED:
        return Large(is_any=tl.load(large_ptr), lse_ptr=lse_ptr, num_heads=num_heads, num_tokens_q=num_tokens_q, start_q=start_q)
    else:
        return ()


@triton.jit
def _load_shift(large, b, h, rows, len_q, META: tl.constexpr):
    row = lse_row(b, h, large.num_heads, large.num_tokens_q, large.start_q, META)
    return large_part(tl.load(large.lse_ptr + row + rows, mask=rows < len_q, other=0.0))


@triton.jit
def is_any_large(large, META: tl.constexpr):
    if META.IS_UNBOUNDED:
        return large.is_any != 0
    else:
        return False


@triton.jit
def relative_to_lse(s, minus_lse, large, b, h, i, len_q, META: tl.constexpr):
    # Returns the logits that belong with minus_lse, in units of log2. In rows with a large lse they are relative to it, and
    # minus_lse is the remainder. A logit near a rounding boundary may have been rounded differently in the forward; the minimum
    # keeps its probability at most 1.
    if META.IS_UNBOUNDED:  # noqa: SIM102  # the first condition is known at compile time, the second at run time
        if large.is_any != 0:
            shift = _load_shift(large, b, h, i, len_q, META)
            s = tl.minimum(s - shift, minus_lse * -LN2)
    return s


@triton.jit
def sink_probability(softmax_offset_ptr, lse_log2, large, b, h, rows, len_q, META: tl.constexpr):
    sink = load_sink(softmax_offset_ptr, h, 1.0 if META.IS_UNBOUNDED else LOG2E, META)
    if META.IS_UNBOUNDED:
        shift = tl.zeros_like(lse_log2)
        if large.is_any != 0:
            shift = _load_shift(large, b, h, rows, len_q, META)
        sink = (sink - shift) * LOG2E
    return tl.exp2(sink - lse_log2)


@triton.jit
def statistics_row(b, h, num_heads, num_tokens_q, start_q, META: tl.constexpr):
    # Returns the first index of a sequence and head in the backward's own statistics, whichever kernel wrote them. For dense
    # tensors it is a multiple of 16 bytes, so that several elements are loaded at a time.
    if META.IS_RAGGED_Q:
        return tl.cast(h, tl.int64) * num_tokens_q + start_q
    else:
        return tl.cast(b * num_heads + h, tl.int64) * (tl.cdiv(num_tokens_q, 4) * 4)


class RowStatistics(NamedTuple):
    """The statistics of a tile's queries, inside a kernel."""

    lse_log2: Any  # in units of log2; +inf makes every probability of a row exactly 0
    delta: Any
    p_scale: Any


@triton.jit
def load_row_statistics(statistics, row, num_rows, ROWS: tl.constexpr, CHECK_ROWS: tl.constexpr, META: tl.constexpr):
    # Loads the statistics of ROWS rows from `row` on, of which num_rows exist.
    rows = tl.arange(0, ROWS)
    lse_log2_ptr = statistics.lse_log2_ptr + row
    delta_ptr = statistics.delta_ptr + row
    if not META.IS_RAGGED_Q:
        lse_log2_ptr = tl.multiple_of(lse_log2_ptr, 16)
        delta_ptr = tl.multiple_of(delta_ptr, 16)
    p_scale = tl.full([1], 1.0, tl.float32)
    if CHECK_ROWS:
        lse_log2 = tl.load(lse_log2_ptr + rows, mask=rows < num_rows, other=float("inf"))
        delta = tl.load(delta_ptr + rows, mask=rows < num_rows, other=0.0)
        if META.NORMALIZES:
            p_scale = tl.load(statistics.p_scale_ptr + row + rows, mask=rows < num_rows, other=1.0)
    else:
        lse_log2 = tl.load(lse_log2_ptr + rows)
        delta = tl.load(delta_ptr + rows)
        if META.NORMALIZES:
            p_scale = tl.load(statistics.p_scale_ptr + row + rows)
    return RowStatistics(lse_log2=lse_log2, delta=delta, p_scale=p_scale)


@triton.jit
def by_rows(statistics):
    # For a tile [queries, keys].
    p_scale = statistics.p_scale[:, None]
    return RowStatistics(lse_log2=statistics.lse_log2[:, None], delta=statistics.delta[:, None], p_scale=p_scale)


@triton.jit
def by_columns(statistics):
    # For a tile [keys, queries].
    p_scale = statistics.p_scale[None, :]
    return RowStatistics(lse_log2=statistics.lse_log2[None, :], delta=statistics.delta[None, :], p_scale=p_scale)


class HeadChannels(NamedTuple):
    """One sequence and head of `arguments.Channels`, inside a kernel."""

    ptr: Any
    stride_d: Any


@triton.jit
def load_tile(
    pointer,
    offsets,
    first,
    num_rows,
    COLUMN: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CHECK_ROWS: tl.constexpr,
):
    # Loads columns COLUMN .. COLUMN + WIDTH of the rows at `offsets` from `pointer`. `first` is the first row's number in its
    # sequence. The result is 0 past HEAD_DIM and, with CHECK_ROWS, from row num_rows on.
    columns = COLUMN + tl.arange(0, WIDTH)
    pointers = pointer + (offsets[:, None] + columns[None, :])
    inside = (first + tl.arange(0, offsets.shape[0]) < num_rows)[:, None]
    if CHECK_ROWS and COLUMN + WIDTH > HEAD_DIM:
        tile = tl.load(pointers, mask=inside & (columns < HEAD_DIM)[None, :], other=0.0)
    elif CHECK_ROWS:
        tile = tl.load(pointers, mask=inside, other=0.0)
    elif COLUMN + WIDTH > HEAD_DIM:
        tile = tl.load(pointers, mask=(columns < HEAD_DIM)[None, :], other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def transposed_column(start, b, IS_RAGGED: tl.constexpr):
    # Returns the first column of a sequence with this `packed_start` in a row of a transposed copy. It is a multiple of 16, and
    # sequences do not overlap.
    return (start + 16 * b) // 16 * 16 if IS_RAGGED else 0


@triton.jit
def transposed_head(copy, b, h, start, IS_RAGGED: tl.constexpr):
    # Returns one sequence and head of a transposed copy; ptr points to its first channel and token.
    row = (tl.cast(b, tl.int64) * copy.stride_b + tl.cast(h, tl.int64) * copy.stride_h) * 16
    return HeadChannels(ptr=copy.ptr + row + transposed_column(start, b, IS_RAGGED), stride_d=copy.stride_d)


@triton.jit
def load_columns(
    copy,
    first,
    num_rows,
    ROWS: tl.constexpr,
    COLUMN: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CHECK_ROWS: tl.constexpr,
):
    # Like `load_tile`, for ROWS rows of a transposed copy: [WIDTH, ROWS]. The row mask covers 16 rows at a time, so that 16 bytes
    # are loaded at a time; the copy has zeros up to there.
    channels = COLUMN + tl.arange(0, WIDTH)
    rows = first + tl.arange(0, ROWS)
    pointers = copy.ptr + (channels.to(tl.int64) * copy.stride_d * 16)[:, None] + rows[None, :]
    inside = (first + tl.arange(0, ROWS) // 16 * 16 < num_rows)[None, :]
    if CHECK_ROWS and COLUMN + WIDTH > HEAD_DIM:
        tile = tl.load(pointers, mask=inside & (channels < HEAD_DIM)[:, None], other=0.0)
    elif CHECK_ROWS:
        tile = tl.load(pointers, mask=inside, other=0.0)
    elif COLUMN + WIDTH > HEAD_DIM:
        tile = tl.load(pointers, mask=(channels < HEAD_DIM)[:, None], other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


def encoded_size(size: int) -> int:
    """Returns a size or stride, encoded as an odd number above 1 for a tuple of launch arguments.

    Triton specialises a kernel for an integer in a tuple if it is 1 or a multiple of 16.
    """
    return 2 * size + 3


@triton.jit
def read_size(encoded):
    # Decodes a size from `encoded_size`.
    return (encoded - 3) >> 1


@triton.jit
def load_descale(scale, b, h, row, META: tl.constexpr):
    # Returns the factor of the block of rows that contains `row`.
    offset = b * scale.stride_b + h * scale.stride_h
    if META.HAS_BLOCK_SCALES:
        offset += row // META.SCALE_ROWS * scale.stride_block
    return tl.load(scale.ptr + offset)


@triton.jit
def load_token_descales(scale, pages, b, h, first, num_rows, ROWS: tl.constexpr):
    # Returns the factors of ROWS keys of a sequence and head, dense or in pages (page ids are clamped); 0 past the sequence's end.
    rows = first + tl.arange(0, ROWS)
    is_row = rows < num_rows
    place = tl.zeros([ROWS], tl.int64) + b
    row = rows
    if pages.table_ptr is not None:
        page = tl.load(pages.table_ptr + tl.cast(b, tl.int64) * pages.stride + rows // pages.page_size, mask=is_row, other=0)
        place = tl.cast(tl.minimum(tl.maximum(page, 0), pages.num_pages - 1), tl.int64)
        row = rows % pages.page_size
    offsets = place * scale.stride_b + tl.cast(row, tl.int64) * scale.stride_block + tl.cast(h, tl.int64) * scale.stride_h
    return tl.load(scale.ptr + offsets, mask=is_row, other=0.0)


@triton.jit
def descaled(qk, descale, softmax_scale, META: tl.constexpr):
    # Returns (product, scale), whose product is the scaled score. Only a bias that is added before the scale needs an exact
    # product.
    if META.HAS_PRE_SCALE_BIAS:
        return qk * descale, softmax_scale
    else:
        return qk, softmax_scale * descale


class Products(NamedTuple):
    """The two products of a tile that the backward computes, inside a kernel."""

    qk: Any
    dp: Any  # the product of dout and v
    scale: Any  # multiplied with qk, it gives the scaled score


@triton.jit
def descaled_products(qk, dp, inputs, head, h_kv, row, column, META: tl.constexpr):
    scale = inputs.scores.scale
    if META.IS_FP8:
        scales = inputs.scales
        descale = load_descale(scales.q, head.b, head.h, row, META) * load_descale(scales.k, head.b, h_kv, column, META)
        qk, scale = descaled(qk, descale, scale, META)
        dp *= load_descale(scales.dout, head.b, head.h, row, META) * load_descale(scales.v, head.b, h_kv, column, META)
    return Products(qk=qk, dp=dp, scale=scale)


@triton.jit
def to_fp8_rows(x, DTYPE: tl.constexpr):
    # Returns (x in FP8, a factor for each row). A row's largest value becomes the dtype's largest, so it is exact: it matters most
    # if softmax is peaked.
    TOP: tl.constexpr = 448.0 if tl.float8e4nv == DTYPE else 57344.0
    largest = tl.minimum(tl.maximum(tl.max(tl.abs(x), 1), 2.0**-100), 2.0**100)
    return (x * (TOP / largest)[:, None]).to(DTYPE), largest * (1.0 / TOP)


@triton.jit
def fp8_product(
    x,
    copy,
    first,
    num_rows,
    COLUMN: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CHECK_ROWS: tl.constexpr,
):
    # Returns x @ y for y in a transposed copy, in its own accumulator: the matrix instruction accumulates in about 14 bits.
    y = load_columns(copy, first, num_rows, x.shape[1], COLUMN, WIDTH, HEAD_DIM, CHECK_ROWS)
    return tl.dot(x, tl.trans(y))


@triton.jit
def store_tile(
    pointer,
    tile,
    offsets,
    first,
    num_rows,
    COLUMN: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    columns = COLUMN + tl.arange(0, WIDTH)
    inside = (first + tl.arange(0, offsets.shape[0]) < num_rows)[:, None] & (columns < HEAD_DIM)[None, :]
    tl.store(pointer + (offsets[:, None] + columns[None, :]), tile.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def store_zeros(
    base,
    step,
    offsets,
    begin,
    end,
    HEAD_DIM: tl.constexpr,
    WIDTH0: tl.constexpr,
    WIDTH1: tl.constexpr,
):
    ROWS: tl.constexpr = offsets.shape[0]
    for row in range(begin, end, ROWS):
        pointer = base + tl.cast(row, tl.int64) * step
        store_tile(pointer, tl.zeros([ROWS, WIDTH0], tl.float32), offsets, row, end, 0, WIDTH0, HEAD_DIM)
        if WIDTH1 > 0:
            store_tile(pointer, tl.zeros([ROWS, WIDTH1], tl.float32), offsets, row, end, WIDTH0, WIDTH1, HEAD_DIM)


class Padding(NamedTuple):
    """The rows that a block fills with zeros, inside a kernel."""

    begin: Any  # begin .. end: all rows of a block without a token; for the last block the rest of the slot
    end: Any
    front_begin: Any  # front_begin .. front: rows before all slots, for the first block of all
    front: Any
    slot: Any  # a block with some tokens masks its other rows up to here itself


@triton.jit
def padding_rows(lengths, b, start, length, first, is_last, BLOCK: tl.constexpr, IS_RAGGED: tl.constexpr):
    # Returns the padding of a block that begins at `first`.
    front = b * 0 - start
    slot = b * 0 + length
    if (first + BLOCK > length) | is_last | ((b == 0) & (first == 0)):
        front, slot = load_padding(lengths, b, start, length, IS_RAGGED)
    begin = tl.where(first < length, first + BLOCK, first)
    end = tl.where(is_last, slot, tl.minimum(slot, first + BLOCK))
    return Padding(begin=begin, end=end, front_begin=tl.where(first == 0, -start, front), front=front, slot=slot)


class VisibleRange(NamedTuple):
    """The rows of the other side that a block of rows sees, inside a kernel: all but `end` are multiples of that side's block."""

    begin: Any
    full_begin: Any  # full_begin .. full_end: every row of the block sees all of these
    full_end: Any
    end: Any


@triton.jit
def _visible_range(first, BLOCK: tl.constexpr, STEP: tl.constexpr, length, shift, before, after):
    # Rows first .. first + BLOCK of one side see row + shift - before .. row + shift + after of the other side; None: no limit.
    begin = 0
    full_begin = 0
    end = length
    full_end = length
    if before is not None:
        begin = tl.maximum(first + shift - before, 0) // STEP * STEP
        full_begin = tl.maximum(first + BLOCK - 1 + shift - before, 0)
    if after is not None:
        end = tl.minimum(length, first + BLOCK + shift + after)
        full_end = tl.minimum(length, first + 1 + shift + after)
    end = tl.maximum(end, begin)
    full_begin = tl.minimum(tl.cdiv(full_begin, STEP), tl.cdiv(end, STEP)) * STEP
    full_end = tl.maximum(tl.maximum(full_end, 0) // STEP * STEP, full_begin)
    return VisibleRange(begin=begin, full_begin=full_begin, full_end=full_end, end=end)


@triton.jit
def visible_range_of_keys(first_row, len_kv, shift, band, META: tl.constexpr):
    # Returns the keys that BLOCK_M queries see.
    before = band.left if META.HAS_LEFT else None
    after = band.right if META.HAS_RIGHT else None
    return _visible_range(first_row, META.BLOCK_M, META.BLOCK_N, len_kv, shift, before, after)


@triton.jit
def visible_range_of_queries(first_column, len_q, shift, band, META: tl.constexpr):
    # Returns the queries that see BLOCK_N keys.
    before = band.right if META.HAS_RIGHT else None
    after = band.left if META.HAS_LEFT else None
    return _visible_range(first_column, META.BLOCK_N, META.BLOCK_M, len_q, -shift, before, after)


@triton.jit
def visible_keys(i, j, len_kv, shift, band, META: tl.constexpr):
    # For a tile [queries, keys]. The bounds are computed for each query, so an element costs one comparison a side.
    last = len_kv - 1
    if META.HAS_RIGHT:
        last = tl.minimum(last, i + shift + band.right)
    visible = j <= last
    if META.HAS_LEFT:
        visible = visible & (j >= i + shift - band.left)
    return visible


@triton.jit
def visible_queries(i, j, shift, band, META: tl.constexpr):
    # For a tile [keys, queries]; the bounds are computed for each key. Keys and queries past the end need no mask here: results of
    # a key past the end are not stored, and a query past the end has probability 0.
    visible = i >= j - shift - band.right
    if META.HAS_LEFT:
        in_window = i <= j - shift + band.left
        visible = (visible & in_window) if META.HAS_RIGHT else in_window
    return visible


@triton.jit
def tanh(x):
    # 1 - 2 / (1 + e^2x) has an absolute error of 2e-7. That needs a correction for the rounding of x * 2 log2(e), and a division
    # that rounds to nearest. Near 0 the error is not small relative to x, so the Taylor series replaces it.
    exponent = x * (2 * LOG2E)
    power = tl.exp2(exponent)
    lost = tl.where(tl.abs(x) < 20.0, power * (tl.fma(x, 2 * LOG2E, -exponent) * LN2), 0.0)
    far = 1 - tl.div_rn(2.0, 1 + (power + lost))
    x2 = x * x
    near = x * (1 + x2 * (-1 / 3 + x2 * (2 / 15 + x2 * (-17 / 315 + x2 * (62 / 2835)))))
    return tl.where(x2 < 0.0625, near, far)


@triton.jit
def tanh_in_half(x):
    # tanh with an absolute error of 5e-7, below the resolution of 16-bit logits, for a third of the instructions: no series, and no
    # division, because 1 / y is the square of 1 / sqrt(y).
    root = tl.rsqrt(1.0 + tl.exp2(x * (2 * LOG2E)))
    return 1.0 - 2.0 * (root * root)


@triton.jit
def load_bias(head, i, j, META: tl.constexpr):
    offsets = i.to(tl.int64) * head.bias_stride_m + (j if META.IS_BIAS_CONTIGUOUS else j.to(tl.int64) * head.bias_stride_n)
    return tl.load(head.bias_ptr + offsets, mask=(i < head.len_q) & (j < head.len_kv), other=0.0).to(tl.float32)


@triton.jit
def logits(qk, i, j, softmax_scale, head, MODS: tl.constexpr, META: tl.constexpr):
    # Returns (s, factor, cap_tanh, score). s * factor is the logit in units of log2, before the mask. cap_tanh is the softcap's
    # tanh, and score is score_mod's input. If nothing is added, s is the raw product, and the scale is folded into the exponent's
    # multiply-add.
    s = qk
    factor = tl.maximum(softmax_scale * LOG2E, 1e-37)  # a masked score is -inf, and -inf * 0 would be NaN
    cap_tanh = 0.0
    score = qk
    if META.HAS_PRE_SCALE_BIAS or META.HAS_POST_SCALE_BIAS or META.HAS_ALIBI or META.HAS_SOFTCAP or META.HAS_SCORE_MOD:
        factor = LOG2E
        if META.HAS_PRE_SCALE_BIAS:
            s += load_bias(head, i, j, META)
        s *= softmax_scale
        if META.HAS_SOFTCAP:
            cap_tanh = tanh(s / head.softcap) if META.HAS_EXACT_TANH else tanh_in_half(s * (1.0 / head.softcap))
            s = head.softcap * cap_tanh
        score = s
        if META.HAS_SCORE_MOD:
            s = MODS.score(score, head.b, head.h, i, j, head.captures)
        if META.HAS_POST_SCALE_BIAS:
            s += load_bias(head, i, j, META)
        if META.HAS_ALIBI:
            s -= head.alibi_slope * tl.abs(j - i - head.shift).to(tl.float32)
    return s, factor, cap_tanh, score


@triton.jit
def positive_factor(factor):
    # Like the factor in `logits`, for FP8 products: a NaN among the descales propagates to the result.
    return tl.maximum(factor, 1e-37, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def exponent_factor(row_max):
    # Returns the factor of a row's logits in exp2: log2(e), or 1 if the row's largest logit is very far from 0. Then the next
    # smaller number has no weight. row_max * 1 is exact and never overflows, but the rounding of row_max * log2(e) could overflow
    # exp2.
    return tl.where(tl.abs(row_max) < FAR, LOG2E, 1.0)


@triton.jit
def scaled_row_max(row_max, factor, OFFSET: tl.constexpr):
    # Returns the number to subtract from the product. It is finite for a row_max of -inf too, so that exp2(-inf - scaled_max) is 0.
    # Products of equal numbers are rounded equally. So weights relative to two maxima differ by exactly exp2(difference of the
    # maxima), however coarse the rounding is. With an OFFSET, weights are at most 2**OFFSET. The OFFSET is 0 if rounding could lift
    # weights above FP8's range.
    scaled_max = tl.maximum(row_max * factor, LOWEST)
    if OFFSET > 0.0:
        scaled_max -= tl.where(tl.abs(row_max) < NEAR, OFFSET, 0.0)
    return scaled_max


@triton.jit
def log_of_sum(row_max, factor, scaled_max, row_sum):
    # Returns (lse, its rounding error) of rows with the largest logit row_max, and with the sum row_sum of exp2(logit * factor -
    # scaled_max). For example, fp32 numbers near -1e9 are multiples of 64, so only the second number tells how many keys share such
    # an lse.
    above = (tl.log2(row_sum) - tl.fma(row_max, factor, -scaled_max)) * LN2
    above = tl.where(row_max == float("-inf"), 0.0, above)
    lse = row_max + above
    return lse, tl.where(row_max == float("-inf"), 0.0, row_max - lse + above)


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


class ScoreTile(NamedTuple):
    """A tile of scores, [queries, keys] or [keys, queries], inside a kernel."""

    i: Any  # query positions that broadcast against the tile
    j: Any  # key positions
    keep: Any  # True for weights that dropout keeps
    is_full: Any  # whether the block is full, so that the mask_mod is not needed
    large: Any  # result of `load_large`


class ScoreGradient(NamedTuple):
    """The derivatives of a tile of scores, and the factors of the products that follow, inside a kernel."""

    p: Any  # probabilities
    p_dropped: Any  # the same after dropout, as they multiply v
    dlogit: Any
    dscore: Any  # the gradient of the scaled score
    score: Any  # score_mod's input


@triton.jit
def score_gradient(
    products,
    statistics,
    tile,
    head,
    inputs,
    MODS: tl.constexpr,
    MASK: tl.constexpr,  # "none", "keys" for a tile [queries, keys], "queries" for a tile [keys, queries]
    META: tl.constexpr,
):
    i = tile.i
    j = tile.j
    keep_scale = inputs.dropout.keep_scale
    dp = products.dp
    s, factor, cap_tanh, score = logits(products.qk, i, j, products.scale, head, MODS, META)
    s = relative_to_lse(s, -statistics.lse_log2, tile.large, head.b, head.h, i, head.len_q, META)
    p = tl.exp2(tl.fma(s, factor, -statistics.lse_log2))
    if META.NORMALIZES:
        p *= statistics.p_scale
    if MASK == "keys":
        p = tl.where(visible_keys(i, j, head.len_kv, head.shift, inputs.band, META), p, 0.0)
    elif MASK == "queries" and (META.HAS_LEFT or META.HAS_RIGHT):
        p = tl.where(visible_queries(i, j, head.shift, inputs.band, META), p, 0.0)
    if MASK != "none" and META.HAS_SCORE_MOD and not MODS.score_is_finite:  # for a query past the end
        p = tl.where(i < head.len_q, p, 0.0)
    if META.HAS_MASK_MOD and (MASK != "none" or META.BLOCK_SIZE_Q == 0):
        p = tl.where(MODS.mask(head.b, head.h, i, j, head.captures) | tile.is_full, p, 0.0)
    p_dropped = p
    if META.HAS_DROPOUT:
        p_dropped = tl.where(tile.keep, p * keep_scale, 0.0)
        dp = tl.where(tile.keep, dp * keep_scale, 0.0)
    dlogit = p * (dp - statistics.delta)
    dscore = through_mods(dlogit, cap_tanh, score, i, j, head, MODS, META)
    return ScoreGradient(p=p, p_dropped=p_dropped, dlogit=dlogit, dscore=dscore, score=score)


@triton.jit
def through_mods(dlogit, cap_tanh, score, i, j, head, MODS: tl.constexpr, META: tl.constexpr):
    # Returns d loss / d scaled score from d loss / d logit and the results of `logits`.
    dscore = dlogit
    if META.HAS_SCORE_MOD:
        dscore = MODS.gradient(dlogit, score, head.b, head.h, i, j, head.captures)
    if META.HAS_SOFTCAP:
        dscore *= 1 - cap_tanh * cap_tanh
    return dscore
