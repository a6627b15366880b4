"""One attention problem as the kernels see it: its tensors, band and lengths, and the constants that kernels are compiled for."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from flexattn.compat import storage_of
from flexattn.kernels_triton.common import arguments, tiles
from flexattn.kernels_triton.common.crossovers import SPLIT_MOST, SPLIT_PIECE
from flexattn.kernels_triton.common.features import Features, with_features
from flexattn.kernels_triton.runtime.call_numbers import LARGE_SOFTCAP
from flexattn.kernels_triton.runtime.device import Tile, capability_of

MASK_BLOCK = 128  # queries, and keys, of a block of the lists that are made from a mask_mod
_MOST_ROWS = 256  # maximum rows of a tile
_OPEN = 2**30  # upper bound of a window side, so that position + window fits int32


class Mods(NamedTuple):
    """The Triton functions of a score_mod, its derivative and a mask_mod, which `lowering` makes.

    The last argument of each function is the tuple of captures. In a kernel, the results of `per_head` are appended to it.
    """

    score: Any = None  # (score, b, h, q_idx, kv_idx) -> the modified score
    gradient: Any = None  # (dscore, score, b, h, q_idx, kv_idx) -> the gradient of the score
    accumulate: Any = None  # (dscore, score, b, h, q_idx, kv_idx, captures, sums, scales, MODE): adds to the captures' gradients
    mask: Any = None  # (b, h, q_idx, kv_idx) -> whether the query sees the key
    per_head: Any = None  # (b, h) -> a tuple of values that the others read once for a head; None: no such values
    # (b, h, distance) -> a tuple of values that `diagonals` can tabulate; None: no such values, or they are tabulated
    per_distance: Any = None
    distance_depends_on: tuple[bool, bool] = (True, True)  # whether the values differ by (b, h)
    num_tables: int = 0
    mask_of_block: Any = None  # the block test and the key and query ranges that it reads, see `intervals.BlockTest`
    ranges_of_q_block: Any = None
    ranges_of_kv_block: Any = None
    num_ranges_of_block: tuple[int, int] = (0, 0)
    can_hide_block: bool = False
    can_show_block: bool = False
    mask_depends_on: tuple[bool, bool] = (True, True)  # whether the mask differs by (b, h)
    masks_keys: bool = False  # whether the mask reads the key's position and not the query's
    score_is_finite: bool = False  # whether a finite score stays finite, in rows past the end too
    reads_tiles: bool = False  # whether a mod reads a captured tensor once for each query and key


class BlockLists(NamedTuple):
    """A block mask: the key blocks that each query block sees, and the query blocks that see each key block; int32, contiguous.

    Counts are [b | 1, h | 1, rows], indices [b | 1, h | 1, rows, columns]. The first `count` indices of a row are valid and
    ascending. A block in the full lists is fully visible. In a block of the other lists, the mask_mod decides. A block in neither
    list is hidden.
    """

    kv_num_blocks: Tensor | None  # None: not made, because a fused backward reads only the lists of query blocks
    kv_indices: Tensor | None
    full_kv_num_blocks: Tensor | None
    full_kv_indices: Tensor | None
    q_num_blocks: Tensor | None  # lists of query blocks, one for each key block; only a backward reads them
    q_indices: Tensor | None
    full_q_num_blocks: Tensor | None
    full_q_indices: Tensor | None
    block_size_q: int
    block_size_kv: int
    is_cut: bool = False  # whether the lists omit all blocks past the end or outside the problem's band

    @property
    def heads(self) -> int:
        """Number of heads that have lists of their own, or 1."""
        counts = self.q_num_blocks if self.kv_num_blocks is None else self.kv_num_blocks
        assert counts is not None
        return counts.shape[1]

    def lists(self, blocks: Literal["kv", "q"]) -> arguments.BlockMaskLists:
        """The lists of key blocks, one for each query block ("kv"), or the lists of query blocks, one for each key block ("q")."""
        counts, indices, full_counts, full_indices = self[:4] if blocks == "kv" else self[4:8]
        assert counts is not None
        assert indices is not None
        stride_b, stride_h = _list_strides(counts)
        return arguments.BlockMaskLists(
            counts_ptr=counts,
            indices_ptr=indices,
            full_counts_ptr=full_counts,
            full_indices_ptr=full_indices,
            stride_b=stride_b,
            stride_h=stride_h,
            length=indices.shape[-1],
        )

    def in_order(self) -> arguments.BlockMaskLists:
        """The key blocks that each query block sees, full or not, in one ascending list, with 1 for each full one beside it."""
        kinds = self.kinds()
        blocks = torch.arange(kinds.shape[-1], dtype=torch.int32, device=kinds.device)
        blocks, order = torch.where(kinds > 0, blocks, kinds.shape[-1]).sort(dim=-1)
        counts = (kinds > 0).sum(-1, dtype=torch.int32)
        stride_b, stride_h = _list_strides(counts)
        return arguments.BlockMaskLists(
            counts_ptr=counts,
            indices_ptr=blocks,
            full_counts_ptr=counts,
            full_indices_ptr=(kinds == 2).gather(-1, order).int(),
            stride_b=stride_b,
            stride_h=stride_h,
            length=blocks.shape[-1],
        )

    def kinds(self) -> Tensor:
        """Returns int8 [b | 1, h | 1, blocks of queries, blocks of keys + 1]: 0 hidden, 1 masked, 2 full; 0 in the last column."""
        assert self.kv_indices is not None
        columns = self.kv_indices.shape[-1]
        kinds = self.kv_indices.new_zeros((*self.kv_indices.shape[:-1], columns + 1), dtype=torch.int8)
        every = torch.arange(columns + 1, device=kinds.device)
        place = every[:columns]
        for kind, counts, indices in ((1, *self[:2]), (2, *self[2:4])):
            assert counts is not None
            assert indices is not None
            kinds.scatter_(-1, torch.where(place < counts[..., None], indices, columns).long(), kind)
        return torch.where(every < columns, kinds, 0)  # a slice would have gaps, which a plan cannot express


@with_features
class Meta(NamedTuple):
    """Constants that a portable kernel is compiled for.

    It is a tuple because Triton writes a kernel's constants as JSON if hooks watch compilation.
    """

    IS_GROUPED: bool  # several query heads share a key head
    PAGE_ROWS: int  # keys of a block that are contiguous in a page; 0: no pages
    IS_FP8: bool  # q, k, v and dout are FP8; p and ds are converted to it
    IS_KV_FP8: bool  # only k and v are FP8; they are converted to q's dtype for the products
    HAS_TOKEN_SCALES_K: bool  # k in FP8 has a factor for each token and head
    HAS_TOKEN_SCALES_V: bool
    HAS_BLOCK_SCALES: bool
    SCALE_ROWS: int  # rows of a block that has its own scale
    NORMALIZES: bool  # the backward normalises a row's probabilities to sum to exactly 1, although fp32 rounds lse
    HAS_SINK: bool
    HAS_OFFSET: bool
    HEAD_DIM_QK: int
    HEAD_DIM_V: int
    QK0: int  # widths of the one or two parts of a head dim, powers of two
    QK1: int
    V0: int
    V1: int
    ALIGN: int  # all strides are multiples of this many elements
    WIDE_STRIDES: bool  # the rows of one tile may be 2**31 elements or more apart
    PRECISION: str  # precision of a dot product of two fp32 tiles
    BLOCK_M: int
    BLOCK_N: int
    HEADS: int = 1  # query heads of a forward's tile; its rows are the first query of each head, then the second, ..
    GROUP: int = 1  # rows of one query: the next power of two from HEADS; the last rows may belong to no head
    IS_LATENT: bool = False  # the forward takes v from the tile of k
    ASKS_OF_BLOCKS: bool = False  # the forward tests the mask_mod of a block before it evaluates each query and key
    MASKS_KEYS: bool = False  # a mask_mod of keys alone, beside a bias: the forward loads it for the next tile ahead
    OVERLAPS: bool = False  # the forward begins while the kernel before it runs, and lets the next one begin (`launch_order`)
    IS_NEAR: bool = False  # a forward with a bias addresses the keys of a head with 32 bits
    IS_WHOLE: bool = False  # a forward with a bias: its keys fill their tiles, so no loop has the end


@dataclasses.dataclass(frozen=True)
class Problem:
    """The inputs of one attention call, as views with any layout.

    q is [b, sq, h, d_qk], k [b, skv, h_kv, d_qk] and v [b, skv, h_kv, d_v], as views with any strides but a contiguous last dim.
    Packed tensors are [total, h, d], and `cu_seqlens_*` locate each sequence; q may be packed and k, v dense, or the reverse. The
    other fields are those of `flexattn.attention`, with one band instead of a mask type: query i sees key j if -window_left <= j -
    i - shift <= window_right. A side that is None is open. shift is len_kv - len_q with `bottom_right`, else 0.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    softmax_scale: float
    window_left: int | None = None
    window_right: int | None = None
    bottom_right: bool = False
    bias: Tensor | None = None  # [b | a divisor of b, h | 1, sq | 1, skv | 1]
    bias_is_pre_scale: bool = False
    alibi_slopes: Tensor | None = None  # fp32 [h] or [b, h], contiguous
    softcap: float = 0.0
    has_sink: bool = False
    softmax_offset: Tensor | None = None  # [h], contiguous; None if there is a sink: 0
    dropout_p: float = 0.0
    rng_state: Tensor | None = None  # int64 [2]; or [b, 5 or 6] with each sequence's origin in a larger problem
    cu_seqlens_q: Tensor | None = None  # int32 [b + 1]; None: each sequence has the length of its dim
    cu_seqlens_kv: Tensor | None = None
    cu_seqlens_q_padded: Tensor | None = None
    cu_seqlens_kv_padded: Tensor | None = None
    seqused_q: Tensor | None = None  # int32 [b], tokens that a sequence uses of its slot or row; None: all of them
    seqused_kv: Tensor | None = None
    page_table: Tensor | None = None  # int32 [b, columns]; k and v are then [pages, page size, h_kv, d]; forward only
    kv_indices: Tensor | None = None  # int32 [b, sq, 1 | h_kv, n], [total_q, 1 | h_kv, n] for packed q, contiguous
    kv_index_counts: Tensor | None = None  # int32, the same without the last dim; None: all entries of a list count
    kv_block: int = 1  # keys of a block that an entry of kv_indices names
    latent_rows: Tensor | None = None  # bytes of latents in k's layout, that the kernels for kv_indices read instead of k and v
    max_seqlen_q: int = 0  # used for [total, h, d], and for keys in pages; otherwise the sequence dim counts
    max_seqlen_kv: int = 0
    mods: Mods | None = None
    mods_of_tables: Mods | None = None  # the same mods with tabulated values; None: no value can be tabulated
    captures: tuple[Any, ...] | None = None  # the tensors and numbers that the mods read, from `lowering.flatten`
    block_mask: BlockLists | None = None
    # Factors of q, k, v and, for a backward, dout in FP8: fp32 [b | 1, h | 1, blocks | 1].
    descales: tuple[Tensor, ...] = ()
    # Factors of FP8 k and v if q is not FP8: [b | 1, h | 1, 1], [b, s, h, 1], or [pages, page_size, h, 1]; forward only.
    descales_kv: tuple[Tensor, ...] = ()
    scale_rows: int = 0  # rows of a block that has its own scale; 0: one block
    copies16: tuple[Tensor, ...] = ()  # for an FP8 backward, if available: dout, or dout, q and k, in 16 bits
    # For a backward: out and lse cover more keys than this problem has, so a row's probabilities do not sum to 1. If False, they
    # do, and the backward uses that to correct for fp32's rounding and for a large lse (`large_rows`).
    is_part: bool = False
    is_batch_invariant: bool = False  # whether a sequence's forward is bitwise independent of the rest of the call
    # dout in FP8 and its descale for each scale_rows rows are not made yet; copies16[0] is their source
    dout_is_to_come: bool = False

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

    # Never more than all tokens, and at least 1, so that a block exists to write zeros into the padding.
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
        """All tokens of [total, h_kv, d], otherwise the capacity of one sequence."""
        return self.k.shape[-3] if self.page_table is None else self.page_table.shape[1] * self.k.shape[1]

    @property
    def num_keys(self) -> int:
        """Total key capacity of all sequences."""
        return self.k.shape[:-2].numel() if self.page_table is None else self.batch * self.longest_kv

    @property
    def piece(self) -> int:
        """Keys of a KV split of a batch-invariant call, which is cut at multiples of it whatever the batch; 0 for other calls."""
        if not self.is_batch_invariant:
            return 0
        piece = SPLIT_PIECE
        while tiles.cdiv(self.longest_kv, piece) > SPLIT_MOST:
            piece *= 2
        return piece

    @property
    def has_lengths(self) -> bool:
        """True if sequences have their own lengths."""
        optional_tensors = (self.cu_seqlens_q, self.cu_seqlens_kv, self.seqused_q, self.seqused_kv)
        return any(x is not None for x in optional_tensors)

    @property
    def has_padding_q(self) -> bool:
        """True if some rows of q may belong to no sequence."""
        return self.cu_seqlens_q is not None or self.seqused_q is not None

    @property
    def is_loaded(self) -> bool:
        """True if the kernel holds tiles beside the scores: a bias, random numbers, captures, FP8 keys converted to 16 bits."""
        reads_tiles = self.mods is not None and self.mods.reads_tiles
        return self.bias is not None or self.dropout_p > 0 or reads_tiles or bool(self.descales_kv)

    @property
    def loaded(self) -> tiles.Loaded | None:
        """The numbers that are loaded beside the scores; None if there are none (`is_loaded`)."""
        if not self.is_loaded:
            return None
        is_scored = self.softcap > 0 or self.alibi_slopes is not None or (self.mods is not None and self.mods.score is not None)
        is_bias_alone = not (is_scored or self.dropout_p > 0 or self.is_fp8 or self.descales_kv or self.is_batch_invariant)
        if self.bias is None or not is_bias_alone:
            return tiles.Loaded()
        if self.window_left is not None or self.window_right is not None:
            return tiles.Loaded(has_band=True)
        has_mask = self.mods is not None or self.block_mask is not None
        return tiles.Loaded(has_mask=True) if has_mask else tiles.Loaded(bias_align=_bias_alignment(self.bias))

    @property
    def is_modified(self) -> bool:
        """True if a logit is more than a scaled score in a band."""
        return self.softcap > 0 or self._has_optional_scores

    @property
    def has_softcap_alone(self) -> bool:
        """True if softcap is all that changes the scores."""
        return self.softcap > 0 and not self._has_optional_scores

    @property
    def _has_optional_scores(self) -> bool:
        return any(x is not None for x in (self.bias, self.alibi_slopes, self.mods, self.block_mask))

    @property
    def is_listed(self) -> bool:
        """True if a block mask is all that changes the scores, with blocks of multiples of 128."""
        mask = self.block_mask
        if mask is None or self.is_unbounded or self.softcap > 0:
            return False
        return not (mask.block_size_q % MASK_BLOCK or mask.block_size_kv % MASK_BLOCK)

    @property
    def is_unbounded(self) -> bool:
        """True if logits may have any size, whatever q and k are: a bias, ALiBi or a score_mod adds to them."""
        return self.bias is not None or self.alibi_slopes is not None or (self.mods is not None and self.mods.score is not None)

    @property
    def device(self) -> torch.device:
        return self.q.device

    def without_block_mask(self) -> Problem:
        """Returns the problem without its block mask. It is the same problem if the block mask only omits blocks that the mask_mod
        hides.
        """
        return dataclasses.replace(self, block_mask=None)

    @property
    def window(self) -> tuple[int, int]:
        """(left, right) as kernel arguments: 0 for an open side, because openness is compiled in."""
        left, right = (min(side, _OPEN) if side is not None else 0 for side in (self.window_left, self.window_right))
        return left, right

    @property
    def head_dims(self) -> int:
        """d_qk + d_v of the tiles, which include padding; registers and shared memory grow with it."""
        return sum(self._parts(self.q)) + sum(self._parts(self.v))

    def asks_of_blocks(self, group: int) -> bool:
        """Returns whether a forward with tiles of `group` heads applies the mask_mod's block test.

        It does if the queries are few and there is no block mask.
        """
        mods = self.mods
        if mods is None or self.block_mask is not None or self.longest_q >= MASK_BLOCK or (group > 1 and mods.mask_depends_on[1]):
            return False
        return mods.can_show_block and mods.num_ranges_of_block == (0, 0)

    def masks_keys(self, group: int) -> bool:
        """Returns whether a forward with tiles of `group` heads loads the mask_mod of keys ahead, beside a bias."""
        mods = self.mods
        if mods is None or self.bias is None or self.block_mask is not None or self.asks_of_blocks(group):
            return False
        return mods.masks_keys and not (group > 1 and mods.mask_depends_on[1])

    @property
    def is_near(self) -> bool:
        """True if 32 bits count the elements of a head's keys and of a tile's bias, and that was measured to be faster.

        With one part of 64 and more columns it was up to 39 % slower (bench/results/biased_addresses_h200.json), except with a band
        or a mask.
        """
        if self.bias is None or self.page_table is not None:
            return False
        if self.loaded == tiles.Loaded(bias_align=_bias_alignment(self.bias)) and self._is_one_part and self.head_dims >= 128:
            return False
        *_, stride_m, stride_n = _strides(self.bias, 4)
        extents = [x.shape[-3] * abs(x.stride(-3)) for x in (self.k, self.v)]
        return max(*extents, _MOST_ROWS * stride_m + self.bias.shape[3] * stride_n) < 2**31 - _MOST_ROWS * max(1, stride_n)

    def fills_tiles(self, tile: Tile) -> bool:
        """Returns whether a bias is present and each tile is full of keys, which none of a band, lengths and a block mask cut."""
        has_band = self.window_left is not None or self.window_right is not None
        is_cut = has_band or self.has_lengths or self.page_table is not None or self.block_mask is not None
        return self.bias is not None and self.k.dim() == 4 and not is_cut and self.k.shape[1] % tile.block_n == 0

    @property
    def is_latent(self) -> bool:
        """True if v is the first columns of k, in the same memory, as in absorbed latent attention (MLA).

        The head dim of k must be above 256 and v's columns must be those of k's first part. Then one tile serves both products.
        """
        k, v = self.k, self.v
        return k.shape[-1] > 256 and (self._parts(k)[0], 0) == self._parts(v) and are_first_columns(v, k)

    def _parts(self, x: Tensor) -> tuple[int, int]:
        # an FP8 matrix instruction multiplies 32 columns at a time
        first, second = tiles.split_head_dim(x.shape[-1], 32 if self.is_fp8 else 16)
        # Keys and values that are converted are in no pipeline, and ptxas miscompiles such tiles in two parts (`sass_registers`).
        return (2 * first, 0) if second and self.descales_kv else (first, second)

    @property
    def _is_one_part(self) -> bool:
        return not (self._parts(self.q)[1] or self._parts(self.v)[1])

    def tile(self, table: tiles.Table, capability: int | None = None) -> Tile:
        """Returns the committed tile for this problem, for its own device or for one of `capability`."""
        capability = capability_of(self.device) if capability is None else capability
        head_dims = tiles.LATENT if table is tiles.FORWARD and self.is_latent and not self.is_batch_invariant else self.head_dims
        row = tiles.row_of(table, capability, self.q.element_size(), head_dims)
        tile = self._tile_for_rows(row) or tiles.select_tile(
            table,
            capability,
            self.q.element_size(),
            head_dims,
            is_whole=self._is_one_part,
            loaded=self.loaded,
            is_open=self.window_left is None and self.window_right is None and not self.is_batch_invariant,
            length=tiles.SHORT + 1 if self.is_batch_invariant else max(self.longest_q, self.longest_kv),
        )
        if self.alibi_slopes is not None and table is not tiles.FORWARD and capability in tiles.SMALL_MEMORY:
            tile = _cut(tile, 64, 64)
        if self.has_block_scales:
            tile = _cut(tile, self.scale_rows, self.scale_rows)
        return self.cut(tile)

    def cut(self, tile: Tile) -> Tile:
        """Returns the tile with sides that divide the sides of the block mask's blocks."""
        return tile if self.block_mask is None else _cut(tile, self.block_mask.block_size_q, self.block_mask.block_size_kv)

    def _tile_for_rows(self, row: tiles.Row) -> Tile | None:
        """Returns the tile for few queries or for small blocks of a block mask, if this problem has them."""
        if self.is_loaded:
            return None
        rows = self.longest_q * tiles.slots_of_heads(self.group_size)
        if rows <= tiles.FEW and row.few is not None and not self.is_batch_invariant:
            return row.few
        if self.block_mask is not None and self.block_mask.block_size_q <= 64:
            return row.blocks
        return row.half if rows <= tiles.HALF and not self.is_batch_invariant else None

    def meta(self, tile: Tile, others: Iterable[Tensor] = ()) -> Meta:
        """Returns the constants of a kernel with this tile that also accesses the tensors `others`."""
        qk0, qk1 = self._parts(self.q)
        v0, v1 = self._parts(self.v)
        tensors = (self.q, self.k, self.v, *others)
        for name, x in zip(("q", "k", "v"), tensors, strict=False):
            if not is_loadable(x):
                raise ValueError(
                    f"{name} has shape {tuple(x.shape)} and strides {x.stride()}; accepted on a GPU: strides that are 1 for the "
                    f"last dim and multiples of 8 for the others, and data at a multiple of 16 bytes; pass {name}.contiguous()"
                )
        strides = [*(abs(x.stride(-3)) for x in tensors), 0 if self.bias is None else _strides(self.bias, 4)[2]]
        return Meta(
            **self.features._asdict(),
            IS_GROUPED=self.group_size > 1,
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
            WIDE_STRIDES=any(stride * _MOST_ROWS >= 2**31 for stride in strides),
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
            BIAS_ALIGN=0 if self.bias is None else _bias_alignment(self.bias),
            HAS_ALIBI=self.alibi_slopes is not None,
            HAS_SOFTCAP=self.softcap > 0,
            HAS_EXACT_TANH=self.q.dtype is torch.float32 or self.softcap > LARGE_SOFTCAP,
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
    def lengths_q(self) -> arguments.Lengths:
        return arguments.Lengths(
            cu_seqlens_ptr=self.cu_seqlens_q,
            cu_seqlens_padded_ptr=self.cu_seqlens_q_padded,
            seqused_ptr=self.seqused_q,
            batch=self.batch,
            num_tokens=self.q.shape[-3],
            max_seqlen=self.longest_q,
        )

    @property
    def lengths_kv(self) -> arguments.Lengths:
        return arguments.Lengths(
            cu_seqlens_ptr=self.cu_seqlens_kv,
            cu_seqlens_padded_ptr=self.cu_seqlens_kv_padded,
            seqused_ptr=self.seqused_kv,
            batch=self.batch,
            num_tokens=self.num_tokens_kv,
            max_seqlen=self.longest_kv,
        )

    @property
    def pages(self) -> arguments.Pages | None:
        """The page table of k and v; None if they are not in pages."""
        table = self.page_table
        if table is None:
            return None
        return arguments.Pages(table_ptr=table, stride=table.stride(0), page_size=self.k.shape[1], num_pages=self.k.shape[0])

    @property
    def band(self) -> arguments.Band:
        left, right = self.window
        return arguments.Band(left=left, right=right, bottom_right=int(self.bottom_right))

    @property
    def scores(self) -> arguments.Scores:
        return arguments.Scores(
            scale=float(self.softmax_scale),
            softcap=float(self.softcap),
            bias=bias_rows(self.bias, self.batch),
            alibi=_alibi(self.alibi_slopes),
            captures=self.captures,
        )

    @property
    def origin(self) -> int:
        return self.rng_state.shape[1] if self.dropout_p > 0 and self.rng_state is not None and self.rng_state.dim() == 2 else 0

    @property
    def dropout(self) -> arguments.Dropout:
        dropped = round(self.dropout_p * 2**16)  # dropped weights of every 2**16
        return arguments.Dropout(
            rng_state_ptr=self.rng_state,
            threshold=(dropped - 2**16 if dropped >= 2**15 else dropped) << 16,
            keep_scale=2**16 / (2**16 - dropped),
        )

    @property
    def has_token_scales(self) -> tuple[bool, bool]:
        """(k, v): True if the tensor has a factor for each token and head."""
        if not self.descales_kv:
            return False, False
        k, v = (descale.dim() == 4 for descale in self.descales_kv)
        return k, v

    @property
    def scales(self) -> arguments.Scales | None:
        """The descales of q, k, v and, for a backward, dout; None if nothing is FP8."""
        if self.descales_kv:
            k, v = (_scale(descale) for descale in self.descales_kv)
            return arguments.Scales(q=k, k=k, v=v, dout=None)  # the kernel does not read q's
        if not self.descales:
            return None
        q, k, v, *dout = (_scale(descale) for descale in self.descales)
        return arguments.Scales(q=q, k=k, v=v, dout=dout[0] if dout else None)

    def inputs(self, meta: Meta) -> arguments.Inputs:
        """Returns the arguments that the kernels of the call share."""
        return arguments.Inputs(
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

    def lists(self, blocks: Literal["kv", "q"]) -> arguments.BlockMaskLists | None:
        """Returns the block mask's lists of key blocks or of query blocks; None without a block mask."""
        return None if self.block_mask is None else self.block_mask.lists(blocks)

    def kinds(self) -> arguments.BlockKinds | None:
        """Returns the kinds of all blocks of the block mask; None without a block mask."""
        if self.block_mask is None:
            return None
        kinds = self.block_mask.kinds()
        stride_b, stride_h = _list_strides(kinds[..., 0])
        return arguments.BlockKinds(ptr=kinds, stride_b=stride_b, stride_h=stride_h, length=kinds.shape[-1])


class Forward(NamedTuple):
    """A forward: its problem, and the tensors that it writes."""

    problem: Problem
    out: Tensor  # layout of the problem's q, with v's head dim
    lse: Tensor
    max_logit: Tensor | None = None  # None: not requested


class Backward(NamedTuple):
    """A backward: its problem, the tensors from the forward and the loss, and the gradients that it writes.

    dout has out's layout, as any view with a contiguous last dim. dlse has lse's layout and is contiguous. Each gradient has its
    input's layout.
    """

    problem: Problem
    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsoftmax_offset: Tensor | None = None  # fp32 [h]; None: not requested, also for dbias
    dbias: Tensor | None = None
    dcaptures: Sequence[Tensor] = ()  # gradients of the captures that need one, contiguous
    deterministic: bool = False  # gradients are bitwise identical from run to run


class Along(NamedTuple):
    """Tangents of the inputs, in their shapes; q's, k's and v's with a contiguous last dim."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None
    softmax_offset: Tensor | None = None


class Aligned(Protocol):
    """Constants of a kernel that say of how many elements all strides are multiples."""

    @property
    def ALIGN(self) -> int: ...


def rows(x: Tensor, meta: Aligned) -> arguments.Rows:
    """Returns a tensor with q's layout as an argument of a kernel that is compiled with `meta`."""
    stride_b, stride_s, stride_h = row_strides(x, meta)
    return arguments.Rows(ptr=x, stride_b=stride_b, stride_s=stride_s, stride_h=stride_h)


def _list_strides(counts: Tensor) -> tuple[int, int]:
    """Returns the (batch, head) strides, in rows, of lists with these counts."""
    batch, heads, lists = counts.shape
    return heads * lists if batch > 1 else 0, lists if heads > 1 else 0


def bias_rows(bias: Tensor | None, batch: int) -> arguments.Bias:
    # Triton 3.6 has no tuples with None that are made in a kernel, and `Head` is one that contains these strides
    if bias is None:
        return arguments.Bias(ptr=None, stride_b=0, stride_h=0, stride_m=0, stride_n=0, group=None)
    stride_b, stride_h, stride_m, stride_n = _strides(bias, 4)
    group = None if bias.shape[0] in (1, batch) else batch // bias.shape[0]
    return arguments.Bias(ptr=bias, stride_b=stride_b, stride_h=stride_h, stride_m=stride_m, stride_n=stride_n, group=group)


def _alibi(slopes: Tensor | None) -> arguments.Alibi | None:
    return None if slopes is None else arguments.Alibi(ptr=slopes, stride_b=slopes.stride(0) if slopes.dim() == 2 else 0)


def _scale(descale: Tensor) -> arguments.Scale:
    if descale.dim() == 4:
        stride_b, stride_block, stride_h = _strides(descale, 3)
    else:
        stride_b, stride_h, stride_block = _strides(descale, 3)
    return arguments.Scale(ptr=descale, stride_block=stride_block, stride_b=stride_b, stride_h=stride_h)


def row_strides(x: Tensor, meta: Aligned) -> tuple[int, int, int]:
    """Returns the (batch, sequence, head) strides in units of meta.ALIGN; the batch stride of [total, h, d] is 0."""
    align = meta.ALIGN
    stride_b, stride_s, stride_h = (0, *_strides(x, 2)) if x.dim() == 3 else _strides(x, 3)
    return stride_b // align, stride_s // align, stride_h // align


def _strides(x: Tensor, dims: int) -> tuple[int, ...]:
    return tuple([0 if size == 1 else stride for size, stride in zip(x.shape[:dims], x.stride(), strict=False)])


def is_loadable(x: Tensor) -> bool:
    """Returns whether kernels can load the rows of x: contiguous, and on a GPU at multiples of 8 elements and of 16 bytes.

    The compiler cannot pipeline loads of other rows. ptxas 12.8, which Triton 3.6 and 3.7 ship, miscompiles the matrix products of
    some of these kernels for sm_90 (`sass_registers`). Triton's interpreter, on a CPU, accepts any strides.
    """
    if x.stride(-1) != 1:
        return False
    if x.device.type == "cpu" or not x.numel():
        return True
    steps = (stride for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1)
    return (x.is_meta or x.data_ptr() % 16 == 0) and all(step % 8 == 0 for step in steps)


def are_first_columns(v: Tensor, k: Tensor) -> bool:
    """Returns whether v is the first columns of k, in the same memory. On the meta device, which has no addresses, it is a view."""
    columns = k[..., : v.shape[-1]]
    if v.shape != columns.shape or v.stride() != columns.stride():
        return False
    return storage_of(v) == storage_of(k) if k.is_meta else v.data_ptr() == k.data_ptr()


def _alignment(tensors: Iterable[Tensor], is_fp8: bool) -> int:
    # 8 elements of a 16-bit type are 16 bytes, the widest load; of FP8 it is 16 elements. An empty tensor may have any strides.
    each = (zip(x.shape[:-1], x.stride(), strict=False) for x in tensors if x.numel())
    strides = [stride for dims in each for size, stride in dims if size != 1]
    divisor = math.gcd(*strides)  # 0 if there are no strides
    return 16 if is_fp8 and divisor % 16 == 0 else 8 if divisor % 8 == 0 else 1


def _bias_alignment(bias: Tensor) -> int:
    *strides, step = _strides(bias, 4)
    if step != 1:
        return 0
    return math.gcd(8, bias.shape[3], *strides)


def _cut(tile: Tile, block_q: int, block_kv: int) -> Tile:
    """Returns the tile with sides that divide the block's sides: each at most the largest power of two in the block's side."""
    block_m, block_n = (min(side, size & -size) for side, size in ((tile.block_m, block_q), (tile.block_n, block_kv)))
    return tile._replace(block_m=block_m, block_n=block_n)
