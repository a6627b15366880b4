"""The arguments of kernels in named groups. `Problem` makes each one; `runtime.entry` takes them apart for a launch.

A group that a call has no use for, as the bias of one without a bias, is None, and so are all of its fields.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from flexattn.kernels_triton.runtime.entry import WidePointer

Pointer = Any  # a tensor, and in a kernel the pointer to its data; or None


class Rows(NamedTuple):
    """A tensor [b, s, h, d] or [total, h, d]. Strides are in units of `Meta.ALIGN`; that of the batch is 0 for the latter."""

    ptr: WidePointer
    stride_b: int
    stride_s: int
    stride_h: int


class Channels(NamedTuple):
    """A copy of a tensor in FP8 with its tokens innermost, as `quantize.transpose_tokens` makes it. Strides are in units of 16."""

    ptr: WidePointer
    stride_b: int
    stride_h: int
    stride_d: int


class Lengths(NamedTuple):
    """The sequences of one side: of the queries or of the keys."""

    cu_seqlens_ptr: Pointer  # int32 [batch + 1]; None: each sequence is num_tokens long
    cu_seqlens_padded_ptr: Pointer  # likewise, where the slots of the sequences begin; None: one sequence follows another
    seqused_ptr: (
        Pointer  # int32 [batch], how many tokens of its slot, or of its row, a sequence uses; None: all that the others say
    )
    batch: int
    num_tokens: int  # all tokens of [total, h, d], else those of one sequence
    max_seqlen: int


class Pages(NamedTuple):
    """A table of the pages in which the keys of each sequence lie; k and v are then [pages, page_size, h_kv, d]."""

    table_ptr: Pointer  # int32 [batch, columns]; None: k and v lie in no pages
    stride: int  # entries from one row to the next
    page_size: int
    num_pages: int


class Band(NamedTuple):
    """The keys that a query sees: `Problem`'s window, with 0 for a side that is open."""

    left: int
    right: int
    bottom_right: int


class Bias(NamedTuple):
    """A bias [b | 1, h | 1, sq | 1, skv | 1]; its strides are 0 where it has one."""

    ptr: Pointer
    stride_b: int
    stride_h: int
    stride_m: int
    stride_n: int


class Alibi(NamedTuple):
    """ALiBi's slopes, fp32 [h] or [b, h]."""

    ptr: Pointer
    stride_b: int


class Scores(NamedTuple):
    """Arguments that turn the product of a query and a key into a logit."""

    scale: float
    bias: Bias | None
    alibi: Alibi | None
    softcap: float
    captures: Any  # the tensors and numbers that the mods read, a tuple


class Head(NamedTuple):
    """`Scores` of one head of one sequence, inside a kernel: `primitives.head_of` makes it."""

    b: Any
    h: Any
    len_q: Any
    len_kv: Any
    shift: Any  # the band's diagonal: query i is at key i + shift
    softcap: Any
    bias_ptr: Any  # where the head's bias begins
    bias_stride_m: Any
    bias_stride_n: Any
    alibi_slope: Any
    captures: Any  # and behind them what `Mods.of_head` gives


class Dropout(NamedTuple):
    """The state of the random numbers, and the factors of weights that are kept or dropped."""

    rng_state_ptr: Pointer
    threshold: int  # 32 bits, as an int32: a weight whose number is at least this is kept
    keep_scale: float  # by which a weight that is kept is multiplied


class Scale(NamedTuple):
    """Factors of a tensor in FP8, fp32 [b | 1, h | 1, blocks | 1], or [b | pages, s, h], where a block is a token."""

    ptr: Pointer
    stride_block: int
    stride_b: int
    stride_h: int


class Scales(NamedTuple):
    """A `Scale` for each tensor in FP8."""

    q: Scale
    k: Scale
    v: Scale
    dout: Scale | None


class BlockMaskLists(NamedTuple):
    """A block mask's lists for the blocks of one side: the blocks of the other side that each sees."""

    counts_ptr: Pointer
    indices_ptr: Pointer
    full_counts_ptr: Pointer
    full_indices_ptr: Pointer
    stride_b: int  # in rows
    stride_h: int
    length: int  # entries of a row


class BlockKinds(NamedTuple):
    """A block mask as int8 [b | 1, h | 1, blocks of queries, blocks of keys]: 0 hidden, 1 masked, 2 full."""

    ptr: Pointer
    stride_b: int  # in rows
    stride_h: int
    length: int  # entries of a row


class Inputs(NamedTuple):
    """The inputs of a call, which all of its kernels read."""

    q: Rows
    k: Rows
    v: Rows
    lengths_q: Lengths
    lengths_kv: Lengths
    pages: Pages | None
    num_heads: int
    group_size: int  # query heads that share a key head
    band: Band
    scores: Scores
    softmax_offset_ptr: Pointer
    dropout: Dropout
    scales: Scales | None


class Saved(NamedTuple):
    """The forward's results that a backward reads, and the gradient of lse."""

    out: Rows
    lse_ptr: Pointer  # for unbounded logits what `large_rows` leaves of it
    dlse_ptr: Pointer  # the gradient of lse; None: 0


class Statistics(NamedTuple):
    """Numbers of each query that the portable backward kernels read: fp32, from `primitives.statistics_row` on."""

    lse_log2_ptr: Pointer  # lse in units of log2, +inf for a row that sees nothing
    delta_ptr: Pointer  # sum(out * dout) - dlse
    p_scale_ptr: Pointer  # for fp32: what probabilities computed from lse_log2 are to be multiplied with
    large_ptr: Pointer  # for unbounded logits, int32 [1]: whether any lse is large, by `large_rows`
    large_lse_ptr: Pointer  # and lse
