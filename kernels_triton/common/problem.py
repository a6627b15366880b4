"""One attention problem as the kernels see it: its tensors, band and lengths, and the constants that kernels are compiled for."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from flexattn.kernels_triton.common.arguments import (
    Alibi,
    Band,
    Bias,
    BlockKinds,
    BlockMaskLists,
    Dropout,
    Inputs,
    Lengths,
    Pages,
    Rows,
    Scale,
    Scales,
    Scores,
)
from flexattn.kernels_triton.common.tiles import (
    FORWARD,
    LATENT,
    NEVER,
    SPLIT_MOST,
    SPLIT_PIECE,
    Table,
    cdiv,
    select_tile,
    split_head_dim,
)
from flexattn.kernels_triton.runtime.launch import Tile, capability_of
from flexattn.kernels_triton.runtime.varying import as_number

MASK_BLOCK = 128  # queries, and keys, of a block of the lists that are made from a mask_mod
_MOST_ROWS = 256  # the most rows of any tile
_OPEN = 2**30  # a window side is cut to this, so that position + window stays inside int32
_LARGE_SOFTCAP = 256.0  # times the 5e-7 that `tanh_in_half` is off by: a rounding of fp16, which a logit must not be moved by


class Mods(NamedTuple):
    """The Triton functions of a score_mod, its derivative and a mask_mod, as `lowering` makes them, each with the captures last.

    Those of a tile find behind the captures what `of_head` gives.
    """

    score: Any = None  # (score, b, h, q_idx, kv_idx) -> the modified score
    gradient: Any = None  # (dscore, score, b, h, q_idx, kv_idx) -> the gradient of the score
    accumulate: Any = None  # (dscore, score, b, h, q_idx, kv_idx, captures, sums, scales, MODE): adds to the captures' gradients
    mask: Any = None  # (b, h, q_idx, kv_idx) -> whether the query sees the key
    of_head: Any = None  # (b, h) -> a tuple of what the others read once for a head; None: nothing
    of_distance: Any = None  # (b, h, distance) -> a tuple of what `diagonals` can tabulate; None: nothing, or it is tabulated
    distance_depends_on: tuple[bool, bool] = (True, True)  # whether it differs by (b, h)
    num_tables: int = 0
    mask_of_block: Any = None  # what asks the mask of blocks, and of a block what that reads, as `intervals.BlockTest` has them
    ranges_of_q_block: Any = None
    ranges_of_kv_block: Any = None
    num_ranges_of_block: tuple[int, int] = (0, 0)
    can_hide_block: bool = False
    can_show_block: bool = False
    mask_depends_on: tuple[bool, bool] = (True, True)  # whether the mask differs by (b, h)
    score_is_finite: bool = False  # whether it is for every finite score, in rows past the end too
    reads_tiles: bool = False  # whether they read a captured tensor once for each query and key


class BlockLists(NamedTuple):
    """A block mask: for each block of queries the blocks of keys that it sees, and the other way round, int32, contiguous.

    Counts are [b | 1, h | 1, rows], indices [b | 1, h | 1, rows, columns], of which the first `count` are valid and ascending. A
    block in the full lists is seen whole, one in the others as far as the mask_mod says; in neither, not at all.
    """

    kv_num_blocks: Tensor | None  # None: not made, as a backward in one pass reads the others alone
    kv_indices: Tensor | None
    full_kv_num_blocks: Tensor | None
    full_kv_indices: Tensor | None
    q_num_blocks: Tensor | None  # the other way round, which only a backward reads
    q_indices: Tensor | None
    full_q_num_blocks: Tensor | None
    full_q_indices: Tensor | None
    block_size_q: int
    block_size_kv: int
    is_cut: bool = False  # no block in them is past the end or out of the problem's band

    @property
    def heads(self) -> int:
        """Number of heads that have lists of their own, or 1."""
        counts = self.q_num_blocks if self.kv_num_blocks is None else self.kv_num_blocks
        assert counts is not None
        return counts.shape[1]

    def lists(self, blocks: Literal["kv", "q"]) -> BlockMaskLists:
        """The lists of blocks of keys, one for each block of queries ("kv"), or those of blocks of queries."""
        counts, indices, full_counts, full_indices = self[:4] if blocks == "kv" else self[4:8]
        stride_b, stride_h = _list_strides(counts)
        return BlockMaskLists(
            counts_ptr=counts,
            indices_ptr=indices,
            full_counts_ptr=full_counts,
            full_indices_ptr=full_indices,
            stride_b=stride_b,
            stride_h=stride_h,
            length=indices.shape[-1],
        )

    def kinds(self) -> Tensor:
        """Returns int8 [b | 1, h | 1, blocks of queries, blocks of keys]: 0 hidden, 1 masked, 2 full."""
        assert self.kv_indices is not None
        columns = self.kv_indices.shape[-1]
        kinds = self.kv_indices.new_zeros((*self.kv_indices.shape[:-1], columns + 1), dtype=torch.int8)
        place = torch.arange(columns, device=kinds.device)
        for kind, counts, indices in ((1, *self[:2]), (2, *self[2:4])):
            assert counts is not None
            kinds.scatter_(-1, torch.where(place < counts[..., None], indices, columns).long(), kind)
        return kinds[..., :columns].contiguous()


class Features(NamedTuple):
    """Constants of a call that every attention kernel is compiled for; `with_features` puts them in front of a kernel's own."""

    IS_RAGGED_Q: bool  # q is [total, h, d]
    IS_RAGGED_KV: bool
    HAS_LENGTHS: bool
    HAS_LEFT: bool  # the band has a left side
    HAS_RIGHT: bool
    HAS_PRE_SCALE_BIAS: bool
    HAS_POST_SCALE_BIAS: bool
    IS_BIAS_CONTIGUOUS: bool  # neighbouring keys are neighbours in memory
    HAS_ALIBI: bool
    HAS_SOFTCAP: bool
    HAS_EXACT_TANH: bool  # for the softcap, `primitives.tanh`
    IS_UNBOUNDED: bool  # logits may be of any size, whatever q and k are
    HAS_DROPOUT: bool
    ORIGIN: int  # columns of an rng_state by which dropout is drawn at positions of a whole; 0: it is not
    HAS_SCORE_MOD: bool
    HAS_MASK_MOD: bool
    BLOCK_SIZE_Q: int  # queries of the block mask's blocks; 0: there is none
    BLOCK_SIZE_KV: int
    LISTS_ARE_CUT: bool  # the block mask's lists have no block that the band or the end hides
    PIECE: int  # keys of a KV split that is cut at multiples of it; 0: the splits share the keys that a tile sees


def with_features(own: Any) -> Any:
    """Returns a NamedTuple class of the fields of `Features` and then those of `own`, a NamedTuple class, under its name.

    Flat, so that kernels and what they share read `META.HAS_LEFT`, whatever else a kernel is compiled for.
    """
    made: Any = NamedTuple(own.__name__, [*Features.__annotations__.items(), *own.__annotations__.items()])  # type: ignore[misc]
    made.__module__, made.__qualname__, made.__doc__ = own.__module__, own.__qualname__, own.__doc__  # where pickle finds it
    return made


@with_features
class Meta(NamedTuple):
    """Constants that a portable kernel is compiled for.

    A tuple, because Triton writes what a kernel is compiled for as JSON where hooks watch it.
    """

    IS_GROUPED: bool  # several query heads share a key head
    HEADS: int  # query heads of a forward's tile, whose rows are the first query of each, then the second, ..
    GROUP: int  # rows that a query's heads take: the power of two from HEADS on, so that the last may be rows of no head
    IS_LATENT: bool  # a forward takes v from the tile of k
    ASKS_OF_BLOCKS: bool  # a forward asks the mask_mod of a whole block before it asks of each query and key
    OVERLAPS: bool  # a forward begins while the kernel before it runs, and lets the next begin (`launch_order`)
    PAGE_ROWS: int  # keys of a block that lie one after the other in a page; 0: they lie in no pages
    IS_FP8: bool  # q, k, v and dout; p and ds become it
    IS_KV_FP8: bool  # k and v alone: they are products' operands in q's dtype
    HAS_TOKEN_SCALES_K: bool  # a factor for each token and head of such k, and of such v
    HAS_TOKEN_SCALES_V: bool
    HAS_BLOCK_SCALES: bool
    SCALE_ROWS: int  # rows of a block with a scale of its own
    NORMALIZES: bool  # the backward makes a row's probabilities, from an lse in fp32 too, sum to exactly 1
    HAS_SINK: bool
    HAS_OFFSET: bool
    HEAD_DIM_QK: int
    HEAD_DIM_V: int
    QK0: int  # head dims are taken in one or two parts, each a power of two
    QK1: int
    V0: int
    V1: int
    ALIGN: int  # all strides are multiples of this many elements
    WIDE_STRIDES: bool  # the rows of one tile may lie 2**31 elements or more apart
    PRECISION: str  # precision of a dot product of two fp32 tiles
    BLOCK_M: int
    BLOCK_N: int


@dataclasses.dataclass(frozen=True)
class Problem:
    """The inputs of one attention call, as views of whatever layout they have.

    q is [b, sq, h, d_qk], k [b, skv, h_kv, d_qk] and v [b, skv, h_kv, d_v] (views: any strides but a contiguous last dim), or
    [total, h, d] with `cu_seqlens_*` saying where each sequence lies; q may be of one kind and k, v of the other. The rest is
    as in `flexattn.attention`, with one band instead of a mask type: query i sees key j iff
    -window_left <= j - i - shift <= window_right, None leaving a side open, shift = len_kv - len_q with `bottom_right` else 0.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    softmax_scale: float
    window_left: int | None = None
    window_right: int | None = None
    bottom_right: bool = False
    bias: Tensor | None = None  # [b | 1, h | 1, sq | 1, skv | 1]
    bias_is_pre_scale: bool = False
    alibi_slopes: Tensor | None = None  # fp32 [h] or [b, h], contiguous
    softcap: float = 0.0
    has_sink: bool = False
    softmax_offset: Tensor | None = None  # [h], contiguous; None with a sink: 0
    dropout_p: float = 0.0
    rng_state: Tensor | None = None  # int64 [2]; or [b, 5 or 6], with where each sequence begins in a whole
    cu_seqlens_q: Tensor | None = None  # int32 [b + 1]; None: each sequence is as long as its dim
    cu_seqlens_kv: Tensor | None = None
    cu_seqlens_q_padded: Tensor | None = None
    cu_seqlens_kv_padded: Tensor | None = None
    seqused_q: Tensor | None = None  # int32 [b], tokens that a sequence uses of its slot or row; None: as many as the others say
    seqused_kv: Tensor | None = None
    page_table: Tensor | None = None  # int32 [b, columns]; k and v are then [pages, page size, h_kv, d]. For a forward alone
    max_seqlen_q: int = 0  # only for [total, h, d], and of keys for pages; else the sequence dim
    max_seqlen_kv: int = 0
    mods: Mods | None = None
    mods_of_tables: Mods | None = None  # the same mods, reading tables; None: there is nothing to tabulate
    captures: tuple[Any, ...] | None = None  # what the mods read, as `lowering.flatten` gives it
    block_mask: BlockLists | None = None
    # Factors of q, k, v and, for a backward, dout in FP8: fp32 [b | 1, h | 1, blocks | 1].
    descales: tuple[Tensor, ...] = ()
    # Likewise of k and v, where they are in FP8 and q is not, or [b, s, h, 1] and [pages, page_size, h, 1]; for a forward alone.
    descales_kv: tuple[Tensor, ...] = ()
    scale_rows: int = 0  # rows of a block with a scale of its own; 0: there is one block
    copies16: tuple[Tensor, ...] = ()  # for a backward in FP8, where they are at hand: dout, and q and k too, in 16 bits
    # For a backward: out and lse are of more keys than these, so that no row's probabilities sum to 1. Else they do, with which
    # fp32, and a large lse (`large_rows`), are made good.
    is_part: bool = False
    is_batch_invariant: bool = False  # a forward's bits of a sequence depend on nothing else of the call
    dout_is_to_come: bool = False  # dout in FP8 and its descale, one for each scale_rows rows, are yet to be made of copies16[0]

    @property
    def is_fp8(self) -> bool:
        return self.q.element_size() == 1

    @property
    def batch(self) -> int:
        return self.cu_seqlens_q.shape[0] - 1 if self.cu_seqlens_q is not None else self.q.shape[0]

    @property
    def num_heads(self) -> int:
        return self.q.shape[-2]

    @property
    def num_heads_kv(self) -> int:
        return self.k.shape[-2]

    @property
    def group_size(self) -> int:
        return self.num_heads // self.num_heads_kv

    # At most all tokens, whatever was asked for; at least 1, so that there is always a block to zero the padding.
    @property
    def longest_q(self) -> int:
        return max(1, min(self.max_seqlen_q, self.q.shape[0]) if self.q.dim() == 3 else self.q.shape[1])

    @property
    def longest_kv(self) -> int:
        if self.page_table is not None:
            return max(1, min(self.max_seqlen_kv, self.num_tokens_kv))
        return max(1, min(self.max_seqlen_kv, self.k.shape[0]) if self.k.dim() == 3 else self.k.shape[1])

    @property
    def num_tokens_kv(self) -> int:
        """All tokens of [total, h_kv, d], else those that a sequence has room for."""
        return self.k.shape[-3] if self.page_table is None else self.page_table.shape[1] * self.k.shape[1]

    @property
    def num_keys(self) -> int:
        """Keys of all sequences that there is room for."""
        return self.k.shape[:-2].numel() if self.page_table is None else self.batch * self.longest_kv

    @property
    def piece(self) -> int:
        """Keys of a KV split of a batch-invariant call, cut at multiples of it whatever the batch; 0 for any other call."""
        if not self.is_batch_invariant:
            return 0
        piece = SPLIT_PIECE
        while cdiv(self.longest_kv, piece) > SPLIT_MOST:
            piece *= 2
        return piece

    @property
    def has_lengths(self) -> bool:
        """True where the sequences have lengths of their own."""
        given = (self.cu_seqlens_q, self.cu_seqlens_kv, self.seqused_q, self.seqused_kv)
        return any(x is not None for x in given)

    @property
    def has_padding_q(self) -> bool:
        """True where rows of q may be no sequence's."""
        return self.cu_seqlens_q is not None or self.seqused_q is not None

    @property
    def is_loaded(self) -> bool:
        """True where other tiles lie beside those of scores: a bias, random numbers, captures, keys in FP8 as 16 bits."""
        reads_tiles = self.mods is not None and self.mods.reads_tiles
        return self.bias is not None or self.dropout_p > 0 or reads_tiles or bool(self.descales_kv)

    @property
    def is_modified(self) -> bool:
        """True where a logit is more than a scaled score in a band."""
        given = (self.bias, self.alibi_slopes, self.mods, self.block_mask)
        return self.softcap > 0 or any(x is not None for x in given)

    @property
    def is_unbounded(self) -> bool:
        """True where logits may be of any size, whatever q and k are: a bias, ALiBi or a score_mod adds to them."""
        return self.bias is not None or self.alibi_slopes is not None or (self.mods is not None and self.mods.score is not None)

    @property
    def device(self) -> torch.device:
        return self.q.device

    def without_block_mask(self) -> Problem:
        """Returns the problem without it: the same one, where the block mask only leaves out what the mask_mod hides."""
        return dataclasses.replace(self, block_mask=None)

    @property
    def window(self) -> tuple[int, int]:
        """(left, right) as the kernels take it: 0 for an open side, which they are compiled for."""
        return tuple(min(side, _OPEN) if side is not None else 0 for side in (self.window_left, self.window_right))

    @property
    def head_dims(self) -> int:
        """d_qk + d_v as the tiles hold them: registers and shared memory grow with it."""
        return sum(self._parts(self.q)) + sum(self._parts(self.v))

    def asks_of_blocks(self, group: int) -> bool:
        """Returns whether a forward, of tiles of `group` heads, asks the mask_mod of whole blocks: of few queries without lists."""
        mods = self.mods
        if mods is None or self.block_mask is not None or self.longest_q >= MASK_BLOCK or (group > 1 and mods.mask_depends_on[1]):
            return False
        return mods.can_show_block and mods.num_ranges_of_block == (0, 0)

    @property
    def is_latent(self) -> bool:
        """True where v is the first columns of k, in the same memory, as absorbed latent attention (MLA) has them.

        Only of head dims above 256, and where v's columns are those of k's first part: then one tile serves both products.
        """
        k, v = self.k, self.v
        if k.shape[-1] <= 256 or k.is_meta or k.data_ptr() != v.data_ptr() or k.stride() != v.stride():
            return False
        return (self._parts(k)[0], 0) == self._parts(v)

    def _parts(self, x: Tensor) -> tuple[int, int]:
        first, second = split_head_dim(x.shape[-1], 32 if self.is_fp8 else 16)  # an FP8 matrix instruction multiplies 32 at a time
        # Keys and values that are converted lie in no pipeline, and ptxas miscompiles such tiles in two parts (`sass_registers`).
        return (2 * first, 0) if second and self.descales_kv else (first, second)

    def tile(self, table: Table, capability: int | None = None) -> Tile:
        """The committed tile for this problem, on its own device or on one of `capability`."""
        capability = capability_of(self.device) if capability is None else capability
        tile = select_tile(
            table,
            capability,
            self.q.element_size(),
            LATENT if table is FORWARD and self.is_latent else self.head_dims,
            is_whole=not (self._parts(self.q)[1] or self._parts(self.v)[1]),
            is_loaded=self.is_loaded,
            is_open=self.window_left is None and self.window_right is None and not self.is_batch_invariant,
            length=NEVER if self.is_batch_invariant else max(self.longest_q, self.longest_kv),
        )
        if self.has_block_scales:
            tile = _cut(tile, self.scale_rows, self.scale_rows)
        return tile if self.block_mask is None else _cut(tile, self.block_mask.block_size_q, self.block_mask.block_size_kv)

    def meta(self, tile: Tile, others: Iterable[Tensor] = ()) -> Meta:
        """Returns the constants of a kernel with this tile that also touches the tensors `others`."""
        qk0, qk1 = self._parts(self.q)
        v0, v1 = self._parts(self.v)
        tensors = (self.q, self.k, self.v, *others)
        for name, x in zip(("q", "k", "v"), tensors, strict=False):
            if not is_loadable(x):
                raise ValueError(
                    f"{name} has shape {tuple(x.shape)} and strides {x.stride()}; accepted on a GPU: strides that are 1 for the "
                    f"last dim and multiples of 8 for the others, and data at a multiple of 16 bytes; pass {name}.contiguous()"
                )
        return Meta(
            **self.features._asdict(),
            IS_GROUPED=self.group_size > 1,
            HEADS=1,
            GROUP=1,
            IS_LATENT=False,
            ASKS_OF_BLOCKS=False,
            OVERLAPS=False,
            PAGE_ROWS=0 if self.page_table is None else math.gcd(self.k.shape[1], tile.block_n),
            IS_FP8=self.is_fp8,
            IS_KV_FP8=bool(self.descales_kv),
            HAS_TOKEN_SCALES_K=self.has_token_scales[0],
            HAS_TOKEN_SCALES_V=self.has_token_scales[1],
            HAS_BLOCK_SCALES=self.has_block_scales,
            SCALE_ROWS=self.scale_rows,
            HAS_SINK=self.has_sink,
            HAS_OFFSET=self.softmax_offset is not None,
            NORMALIZES=self.q.dtype is torch.float32 and not self.is_part,
            HEAD_DIM_QK=self.q.shape[-1],
            HEAD_DIM_V=self.v.shape[-1],
            QK0=qk0,
            QK1=qk1,
            V0=v0,
            V1=v1,
            ALIGN=_alignment(tensors, self.is_fp8),
            WIDE_STRIDES=any(abs(x.stride(-3)) * _MOST_ROWS >= 2**31 for x in tensors),
            PRECISION="ieee" if self.q.dtype is torch.float32 else "tf32",
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
        )

    @property
    def features(self) -> Features:
        has_bias, mods, mask = self.bias is not None, self.mods, self.block_mask
        return Features(
            IS_RAGGED_Q=self.q.dim() == 3,
            IS_RAGGED_KV=self.k.dim() == 3,
            HAS_LENGTHS=self.has_lengths,
            HAS_LEFT=self.window_left is not None,
            HAS_RIGHT=self.window_right is not None,
            HAS_PRE_SCALE_BIAS=has_bias and self.bias_is_pre_scale,
            HAS_POST_SCALE_BIAS=has_bias and not self.bias_is_pre_scale,
            IS_BIAS_CONTIGUOUS=self.bias is not None and _strides(self.bias, 4)[3] == 1,
            HAS_ALIBI=self.alibi_slopes is not None,
            HAS_SOFTCAP=self.softcap > 0,
            HAS_EXACT_TANH=self.q.dtype is torch.float32 or self.softcap > _LARGE_SOFTCAP,
            IS_UNBOUNDED=self.is_unbounded,
            HAS_DROPOUT=self.dropout_p > 0,
            ORIGIN=self.origin,
            HAS_SCORE_MOD=mods is not None and mods.score is not None,
            HAS_MASK_MOD=mods is not None and mods.mask is not None,
            BLOCK_SIZE_Q=0 if mask is None else mask.block_size_q,
            BLOCK_SIZE_KV=0 if mask is None else mask.block_size_kv,
            LISTS_ARE_CUT=mask is not None and mask.is_cut,
            PIECE=self.piece,
        )

    @property
    def has_block_scales(self) -> bool:
        return any(descale.shape[2] > 1 for descale in self.descales)

    @property
    def lengths_q(self) -> Lengths:
        return Lengths(
            cu_seqlens_ptr=self.cu_seqlens_q,
            cu_seqlens_padded_ptr=self.cu_seqlens_q_padded,
            seqused_ptr=self.seqused_q,
            batch=self.batch,
            num_tokens=self.q.shape[-3],
            max_seqlen=self.longest_q,
        )

    @property
    def lengths_kv(self) -> Lengths:
        return Lengths(
            cu_seqlens_ptr=self.cu_seqlens_kv,
            cu_seqlens_padded_ptr=self.cu_seqlens_kv_padded,
            seqused_ptr=self.seqused_kv,
            batch=self.batch,
            num_tokens=self.num_tokens_kv,
            max_seqlen=self.longest_kv,
        )

    @property
    def pages(self) -> Pages | None:
        """The table of k's and v's pages; None where they lie in none."""
        table = self.page_table
        if table is None:
            return None
        return Pages(table_ptr=table, stride=table.stride(0), page_size=self.k.shape[1], num_pages=self.k.shape[0])

    @property
    def band(self) -> Band:
        left, right = self.window
        return Band(left=left, right=right, bottom_right=int(self.bottom_right))

    @property
    def scores(self) -> Scores:
        return Scores(
            scale=as_number(self.softmax_scale),
            softcap=as_number(self.softcap),
            bias=_bias(self.bias),
            alibi=_alibi(self.alibi_slopes),
            captures=self.captures,
        )

    @property
    def origin(self) -> int:
        return self.rng_state.shape[1] if self.dropout_p > 0 and self.rng_state is not None and self.rng_state.dim() == 2 else 0

    @property
    def dropout(self) -> Dropout:
        dropped = round(self.dropout_p * 2**16)  # weights dropped of 2**16
        return Dropout(
            rng_state_ptr=self.rng_state,
            threshold=(dropped - 2**16 if dropped >= 2**15 else dropped) << 16,
            keep_scale=2**16 / (2**16 - dropped),
        )

    @property
    def has_token_scales(self) -> tuple[bool, bool]:
        """Returns whether k, and whether v, has a factor for each token and head."""
        if not self.descales_kv:
            return False, False
        k, v = (descale.dim() == 4 for descale in self.descales_kv)
        return k, v

    @property
    def scales(self) -> Scales | None:
        """The descales of q, k, v and, for a backward, dout; None where they are not in FP8."""
        if self.descales_kv:
            k, v = (_scale(descale) for descale in self.descales_kv)
            return Scales(q=k, k=k, v=v, dout=None)  # q's is never read
        if not self.descales:
            return None
        q, k, v, *dout = (_scale(descale) for descale in self.descales)
        return Scales(q=q, k=k, v=v, dout=dout[0] if dout else None)

    def inputs(self, meta: Meta) -> Inputs:
        """The arguments that the kernels of the call share."""
        return Inputs(
            q=rows(self.q, meta),
            k=rows(self.k, meta),
            v=rows(self.v, meta),
            lengths_q=self.lengths_q,
            lengths_kv=self.lengths_kv,
            pages=self.pages,
            num_heads=self.num_heads,
            group_size=self.group_size,
            band=self.band,
            scores=self.scores,
            softmax_offset_ptr=self.softmax_offset,
            dropout=self.dropout,
            scales=self.scales,
        )

    def lists(self, blocks: Literal["kv", "q"]) -> BlockMaskLists | None:
        """Returns the block mask's lists, of blocks of keys or of queries; None without a block mask."""
        return None if self.block_mask is None else self.block_mask.lists(blocks)

    def kinds(self) -> BlockKinds | None:
        """Returns the kinds of all blocks of the block mask; None without one."""
        if self.block_mask is None:
            return None
        kinds = self.block_mask.kinds()
        stride_b, stride_h = _list_strides(kinds[..., 0])
        return BlockKinds(ptr=kinds, stride_b=stride_b, stride_h=stride_h, length=kinds.shape[-1])


class Forward(NamedTuple):
    """A forward: its problem, and the tensors that it writes."""

    problem: Problem
    out: Tensor  # laid out as the problem's q, with v's head dim
    lse: Tensor
    max_logit: Tensor | None = None  # None: not asked for


class Backward(NamedTuple):
    """A backward: its problem, what comes from the forward and the loss, and the gradients that it writes.

    dout is laid out as out, in any view with a contiguous last dim; dlse, contiguous, as lse; each gradient as its input.
    """

    problem: Problem
    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsoftmax_offset: Tensor | None = None  # fp32 [h]; it and dbias: None where nobody asks for it
    dbias: Tensor | None = None
    dcaptures: Sequence[Tensor] = ()  # gradients of the captures that need one, contiguous
    deterministic: bool = False  # every bit is the same from run to run


def rows(x: Tensor, meta: Meta) -> Rows:
    """A tensor laid out as q, for a kernel that is compiled with `meta`."""
    stride_b, stride_s, stride_h = row_strides(x, meta)
    return Rows(ptr=x, stride_b=stride_b, stride_s=stride_s, stride_h=stride_h)


def _list_strides(counts: Tensor) -> tuple[int, int]:
    """(batch, head) strides, in rows, of lists with these counts."""
    batch, heads, lists = counts.shape
    return heads * lists if batch > 1 else 0, lists if heads > 1 else 0


def _bias(bias: Tensor | None) -> Bias:
    # Triton 3.6 has no tuples with None that are made in a kernel, as `Head` is of these strides
    if bias is None:
        return Bias(ptr=None, stride_b=0, stride_h=0, stride_m=0, stride_n=0)
    stride_b, stride_h, stride_m, stride_n = _strides(bias, 4)
    return Bias(ptr=bias, stride_b=stride_b, stride_h=stride_h, stride_m=stride_m, stride_n=stride_n)


def _alibi(slopes: Tensor | None) -> Alibi | None:
    return None if slopes is None else Alibi(ptr=slopes, stride_b=slopes.stride(0) if slopes.dim() == 2 else 0)


def _scale(descale: Tensor) -> Scale:
    if descale.dim() == 4:
        stride_b, stride_block, stride_h = _strides(descale, 3)
    else:
        stride_b, stride_h, stride_block = _strides(descale, 3)
    return Scale(ptr=descale, stride_block=stride_block, stride_b=stride_b, stride_h=stride_h)


def row_strides(x: Tensor, meta: Meta) -> tuple[int, int, int]:
    """(batch, sequence, head) strides in units of meta.ALIGN; the batch stride of [total, h, d] is 0."""
    align = meta.ALIGN
    stride_b, stride_s, stride_h = (0, *_strides(x, 2)) if x.dim() == 3 else _strides(x, 3)
    return stride_b // align, stride_s // align, stride_h // align


def _strides(x: Tensor, dims: int) -> tuple[int, ...]:
    return tuple([0 if size == 1 else stride for size, stride in zip(x.shape[:dims], x.stride(), strict=False)])


def is_loadable(x: Tensor) -> bool:
    """Returns whether kernels take the rows of x: contiguous ones that, on a GPU, begin at multiples of 8 elements and of 16 bytes.

    From others the compiler makes loads that it cannot pipeline, and ptxas 12.8, which Triton 3.6 and 3.7 ship, miscompiles the
    matrix products of some of these kernels for sm_90 (`sass_registers`). Triton's interpreter, on a CPU, takes any strides.
    """
    if x.stride(-1) != 1:
        return False
    if x.device.type == "cpu" or not x.numel():
        return True
    steps = (stride for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1)
    return (x.is_meta or x.data_ptr() % 16 == 0) and all(step % 8 == 0 for step in steps)


def _alignment(tensors: Iterable[Tensor], is_fp8: bool) -> int:
    # 8 elements are 16 bytes of a half type, the widest load there is, and 16 of FP8
    strides = [stride for x in tensors for size, stride in zip(x.shape[:-1], x.stride(), strict=False) if size != 1]
    divisor = math.gcd(*strides)  # 0 of no strides
    return 16 if is_fp8 and divisor % 16 == 0 else 8 if divisor % 8 == 0 else 1


def _cut(tile: Tile, block_q: int, block_kv: int) -> Tile:
    """Returns the tile with sides that divide those of a block: at most the largest power of two in each."""
    block_m, block_n = (min(side, size & -size) for side, size in ((tile.block_m, block_q), (tile.block_n, block_kv)))
    return tile._replace(block_m=block_m, block_n=block_n)
