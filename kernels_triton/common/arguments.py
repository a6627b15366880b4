"""The arguments of kernels in named groups. `Problem` makes each group, and `runtime.entry` flattens it for a launch.

A group that a call does not need is None, for example the bias of a call without one, and so are all of its fields.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl

from flexattn.kernels_triton.runtime.entry import WidePointer

Pointer = Any  # a tensor, or inside a kernel the pointer to its data; or None


class Rows(NamedTuple):
    """A tensor [b, s, h, d] or [total, h, d]. Strides are in units of `Meta.ALIGN`; the batch stride of [total, h, d] is 0."""

    ptr: WidePointer
    stride_b: int
    stride_s: int
    stride_h: int


class Channels(NamedTuple):
    """An FP8 copy of a tensor with its tokens innermost, from `quantize.transpose_tokens`. Strides are in units of 16."""

    ptr: WidePointer
    stride_b: int
    stride_h: int
    stride_d: int


class Lengths(NamedTuple):
    """The sequences of one side, queries or keys."""

    cu_seqlens_ptr: Pointer  # int32 [batch + 1]; None: each sequence is num_tokens long
    cu_seqlens_padded_ptr: Pointer  # likewise for the start of each sequence's slot; None: sequences are consecutive
    seqused_ptr: Pointer  # int32 [batch], tokens that a sequence uses of its slot or row; None: all of them
    batch: int
    num_tokens: int  # all tokens of [total, h, d], otherwise of one sequence
    max_seqlen: int


class Pages(NamedTuple):
    """The page table, which locates the keys of each sequence; k and v are then [pages, page_size, h_kv, d]."""

    table_ptr: Pointer  # int32 [batch, columns]; None: k and v are not in pages
    stride: int  # entries from one row to the next
    page_size: int
    num_pages: int


class Band(NamedTuple):
    """The keys that a query sees: `Problem`'s window, with 0 for an open side."""

    left: int
    right: int
    bottom_right: int


class Bias(NamedTuple):
    """A bias [b | b / group | 1, h | 1, sq | 1, skv | 1]; the stride of a dim of size 1 is 0."""

    ptr: WidePointer
    stride_b: int
    stride_h: int
    stride_m: int
    stride_n: int
    group: int | None  # consecutive batch entries that share an entry of the bias; None: all or one


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
    """`Scores` of one head of one sequence, inside a kernel, from `heads.head_of`."""

    b: int | tl.tensor
    h: tl.tensor
    len_q: tl.tensor
    len_kv: tl.tensor
    shift: tl.tensor  # the band's diagonal: query i aligns with key i + shift
    softcap: float | tl.tensor
    bias_ptr: float | tl.tensor  # pointer to the head's bias
    bias_stride_m: tl.tensor
    bias_stride_n: tl.tensor
    alibi_slope: float | tl.tensor
    captures: Any  # the captures, then the results of `Mods.per_head`


class Parts(NamedTuple):
    """Tiles of the one or two parts of a head dim, inside a kernel; without a second part, the first is repeated."""

    first: Any
    second: Any


class Dropout(NamedTuple):
    """The state of the random numbers, the threshold for dropping a weight, and the factor of kept weights."""

    rng_state_ptr: Pointer
    threshold: int  # 32 bits as an int32: a weight is kept if its random number is at least this
    keep_scale: float  # factor of a kept weight


class Scale(NamedTuple):
    """Factors of a tensor in FP8, fp32: [b | 1, h | 1, blocks | 1], or [b | pages, s, h] if each token is a block."""

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
    """A block mask's lists for the blocks of one side: the blocks of the other side that each of them sees."""

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
    """The inputs of a call that all of its kernels read."""

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
    lse_ptr: Pointer  # for unbounded logits the remainder of lse, from `large_rows`
    dlse_ptr: Pointer  # the gradient of lse; None: 0


class Statistics(NamedTuple):
    """Numbers of each query that the portable backward kernels read, fp32; `row_statistics.statistics_row` gives their index."""

    lse_log2_ptr: Pointer  # lse in units of log2, +inf for a row that sees nothing
    delta_ptr: Pointer  # sum(out * dout) - dlse
    p_scale_ptr: Pointer  # for fp32: the factor that corrects probabilities computed from lse_log2
    large_ptr: Pointer  # for unbounded logits, int32 [1]: whether any lse is large, by `large_rows`
    large_lse_ptr: Pointer  # for unbounded logits: lse
