"""Quantisation to FP8 (amax, scale, rotation and cast of q, k and v together), and copies of FP8 tensors with tokens innermost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexattn.kernels_triton.common.addressing import row_pointer, row_steps
from flexattn.kernels_triton.common.arguments import Channels, Lengths, Pointer, Rows
from flexattn.kernels_triton.common.copies import packed_start, transposed_column
from flexattn.kernels_triton.common.padding import load_padding
from flexattn.kernels_triton.common.problem import Problem, rows
from flexattn.kernels_triton.common.sequences import load_sequence
from flexattn.kernels_triton.common.tile_memory import load_tile, store_tile
from flexattn.kernels_triton.common.tiles import split_head_dim
from flexattn.kernels_triton.runtime.device import Tile, capability_of
from flexattn.kernels_triton.runtime.entry import WidePointer
from flexattn.kernels_triton.runtime.launch import kernel, launch

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
LARGEST_SCALE = tl.constexpr(2.0**120)
SMALLEST_SCALE = tl.constexpr(2.0**-120)
GOLDEN = tl.constexpr(0x9E3779B1)

_TILE = Tile(64, 32, 4, 1)
_ELEMENTS = 8192  # elements of a tile that a program holds at once
_TILES = 2  # tiles of a program that only computes the amax or only casts
_ROTATED_ROWS = 256  # rows of a program, which computes the rotation matrix once
_COLUMNS = Tile(64, 32, 4, 1)  # tokens of a program of the transposition


class _Meta(NamedTuple):
    """Constants that a pass over a tensor is compiled for; shared functions read some by their names in `Meta`."""

    IS_RAGGED: bool
    HAS_GAPS: bool
    ALIGN: int
    WIDE_STRIDES: bool
    HEAD_DIM: int
    W0: int  # widths of the one to four parts of the head dim; 0: no such part
    W1: int
    W2: int
    W3: int
    ROWS: int  # rows of a tile
    ITEM_ROWS: int  # rows of a program
    BY_BLOCK: bool  # each ITEM_ROWS rows have a scale
    ROTATION: int  # number of channels that are mixed; 0: none


class TensorArguments(NamedTuple):
    """One tensor to quantise, and the output tensors: data, amax, descale."""

    x: Rows
    data: Rows
    scale_ptr: Pointer  # None: computed from the amax
    history_ptr: Pointer  # a history with the strides of amax, whose first row also receives it; or None
    amax_ptr: Pointer  # 0 before the launch, unless each block has one
    descale_ptr: Pointer
    stride_b: int  # strides of amax and descale
    stride_h: int
    num_blocks: int
    num_heads: int
    num_items: int


class QuantizeArguments(NamedTuple):
    q: TensorArguments
    k: TensorArguments | None  # None: only q
    v: TensorArguments | None
    lengths_q: Lengths
    lengths_kv: Lengths
    range_scale: float  # the dtype's largest value * 2**-margin


class _TileRows(NamedTuple):
    """Locations of the rows of a tile, inside a kernel."""

    pointer: tl.tensor
    offsets: tl.tensor  # offset of each row from the pointer
    first: tl.tensor  # number of the first row
    end: tl.tensor  # rows from this number on are neither loaded nor stored


class _Parts(NamedTuple):
    """A value for each part of the head dim, inside a kernel; arbitrary for a part that does not exist."""

    x0: float | tl.tensor
    x1: float | tl.tensor
    x2: float | tl.tensor
    x3: float | tl.tensor


@triton.jit
def hadamard_tile(ROWS: tl.constexpr, SIZE: tl.constexpr):
    # Returns Hadamard matrices of SIZE along the diagonal, times sqrt(SIZE).
    i = tl.arange(0, ROWS)
    both = i[:, None] & i[None, :] & (SIZE - 1)
    both ^= both >> 4
    parity = tl.full([], 0x6996, tl.int32) >> (both & 15)
    matrix = tl.where((parity & 1) == 1, -1.0, 1.0)
    if SIZE < ROWS:
        matrix = tl.where((i // SIZE)[:, None] == (i // SIZE)[None, :], matrix, 0.0)
    return matrix


@triton.jit
def rotation_signs(FIRST: tl.constexpr, WIDTH: tl.constexpr):
    # Returns signs of channels FIRST .. FIRST + WIDTH from a fixed hash. Without them the rotation would turn a constant row into
    # one outlier.
    i = FIRST + tl.arange(0, WIDTH)
    return tl.where((((i.to(tl.int64) * GOLDEN) >> 15) & 1) == 1, -1.0, 1.0)


@triton.jit
def _mix_parts(parts, SIZE: tl.constexpr):
    # Multiplies by the rest of a Hadamard matrix of SIZE, after each part of 64 channels has been multiplied by one.
    x0, x1, x2, x3 = parts.x0, parts.x1, parts.x2, parts.x3
    if SIZE > 64:
        x0, x1 = x0 + x1, x0 - x1
    if SIZE > 128:
        x2, x3 = x2 + x3, x2 - x3
        x0, x2 = x0 + x2, x0 - x2
        x1, x3 = x1 + x3, x1 - x3
    return _Parts(x0=x0, x1=x1, x2=x2, x3=x3)


@triton.jit
def _rotation(FIRST: tl.constexpr, WIDTH: tl.constexpr, DTYPE: tl.constexpr, META: tl.constexpr):
    # Returns the matrix for a part that is rotated; otherwise an arbitrary value. Signs are exact in every dtype, so the products
    # are too.
    if META.ROTATION > 0 and WIDTH > 0:
        matrix = hadamard_tile(WIDTH, min(META.ROTATION, WIDTH))
        return (rotation_signs(FIRST, WIDTH)[:, None] * matrix).to(DTYPE)
    else:
        return 0.0


@triton.jit
def _rotations(DTYPE: tl.constexpr, META: tl.constexpr):
    return _Parts(
        x0=_rotation(0, META.W0, DTYPE, META),
        x1=_rotation(META.W0, META.W1, DTYPE, META),
        x2=_rotation(META.W0 + META.W1, META.W2, DTYPE, META),
        x3=_rotation(META.W0 + META.W1 + META.W2, META.W3, DTYPE, META),
    )


@triton.jit
def _load_part(rows, matrix, COLUMN: tl.constexpr, WIDTH: tl.constexpr, META: tl.constexpr):
    if WIDTH > 0:
        x = load_tile(rows.pointer, rows.offsets, rows.first, rows.end, COLUMN, WIDTH, META.HEAD_DIM, True)
        if META.ROTATION > 0:
            return tl.dot(x, matrix, input_precision="tf32x3")  # almost all bits of fp32 count
        else:
            return x.to(tl.float32)
    else:
        return 0.0


@triton.jit
def _load_parts(rows, matrices, META: tl.constexpr):
    # Returns the parts in fp32, 0 past the end.
    x0 = _load_part(rows, matrices.x0, 0, META.W0, META)
    x1 = _load_part(rows, matrices.x1, META.W0, META.W1, META)
    x2 = _load_part(rows, matrices.x2, META.W0 + META.W1, META.W2, META)
    x3 = _load_part(rows, matrices.x3, META.W0 + META.W1 + META.W2, META.W3, META)
    parts = _Parts(x0=x0, x1=x1, x2=x2, x3=x3)
    if META.ROTATION > 0:
        mixed = _mix_parts(parts, META.ROTATION)
        inverse_root = tl.div_rn(1.0, tl.sqrt_rn(tl.full([], META.ROTATION, tl.float32)))
        return _Parts(
            x0=mixed.x0 * inverse_root, x1=mixed.x1 * inverse_root, x2=mixed.x2 * inverse_root, x3=mixed.x3 * inverse_root
        )
    else:
        return parts


@triton.jit
def largest_of_rows(x):
    # Returns the largest finite magnitude of each row.
    x = tl.abs(x)
    return tl.max(tl.where(x < float("inf"), x, 0.0), 1)


@triton.jit
def _largest_of_parts(largest, parts, META: tl.constexpr):
    largest = tl.maximum(largest, largest_of_rows(parts.x0))
    if META.W1 > 0:
        largest = tl.maximum(largest, largest_of_rows(parts.x1))
    if META.W2 > 0:
        largest = tl.maximum(largest, largest_of_rows(parts.x2))
    if META.W3 > 0:
        largest = tl.maximum(largest, largest_of_rows(parts.x3))
    return largest


@triton.jit
def to_fp8(x, scale, DTYPE: tl.constexpr):
    # Converts from fp32: non-finite numbers become NaN, and other numbers saturate.
    return tl.where(tl.abs(x) < float("inf"), x * scale, float("nan")).to(DTYPE)


@triton.jit
def _store_part(rows, x, scale, COLUMN: tl.constexpr, WIDTH: tl.constexpr, META: tl.constexpr):
    if WIDTH > 0:
        y = to_fp8(x, scale, rows.pointer.dtype.element_ty)
        store_tile(rows.pointer, y, rows.offsets, rows.first, rows.end, COLUMN, WIDTH, META.HEAD_DIM)


@triton.jit
def _store_parts(rows, parts, scale, META: tl.constexpr):
    _store_part(rows, parts.x0, scale, 0, META.W0, META)
    _store_part(rows, parts.x1, scale, META.W0, META.W1, META)
    _store_part(rows, parts.x2, scale, META.W0 + META.W1, META.W2, META)
    _store_part(rows, parts.x3, scale, META.W0 + META.W1 + META.W2, META.W3, META)


@triton.jit
def scale_of(amax, range_scale):
    scale = tl.maximum(tl.div_rn(range_scale, tl.where(amax > 0.0, amax, 1.0)), SMALLEST_SCALE)
    return tl.where((amax > 0.0) & (scale <= LARGEST_SCALE), scale, 1.0)


@triton.jit
def _tile_of(tile, lengths, META: tl.constexpr):
    # Returns (sequence, its block). In [total, h, d] the blocks of a sequence begin at tile n // ITEM_ROWS + b, if n tokens are
    # before it: that leaves enough tiles for each sequence, wherever its slot is.
    num_tokens = lengths.num_tokens
    if META.IS_RAGGED:
        b = tile * 0
        after = tile * 0 + lengths.batch
        while after - b > 1:
            middle = (b + after) // 2
            before = tl.minimum(tl.maximum(tl.load(lengths.cu_seqlens_ptr + middle), 0), num_tokens)
            is_before = before // META.ITEM_ROWS + middle <= tile
            b = tl.where(is_before, middle, b)
            after = tl.where(is_before, after, middle)
        before = tl.minimum(tl.maximum(tl.load(lengths.cu_seqlens_ptr + b), 0), num_tokens)
        return b, tile - before // META.ITEM_ROWS - b
    else:
        blocks = tl.cdiv(lengths.max_seqlen, META.ITEM_ROWS)
        return tile // blocks, tile % blocks


@triton.jit
def _quantize_item(item, tensor, lengths, range_scale, FINDS_AMAX: tl.constexpr, CASTS: tl.constexpr, META: tl.constexpr):
    # Processes ITEM_ROWS rows of a head.
    ROWS: tl.constexpr = META.ROWS
    num_blocks = tensor.num_blocks
    amax_ptr = tensor.amax_ptr
    descale_ptr = tensor.descale_ptr
    h = item % tensor.num_heads
    b, block = _tile_of(item // tensor.num_heads, lengths, META)
    start, length = load_sequence(lengths, b, META.IS_RAGGED)
    front, slot = -start, length
    if not META.HAS_GAPS:  # gaps are 0 already
        front, slot = load_padding(lengths, b, start, length, META.IS_RAGGED)
    first = block * META.ITEM_ROWS
    if (block == 0) | ((block > 0) & (first < slot)):
        group = b * tensor.stride_b + h * tensor.stride_h
        if META.BY_BLOCK:
            group += block
        x_base = row_pointer(tensor.x, b, h, start + first, META)
        x_step, x_offsets = row_steps(tensor.x.stride_s, ROWS, META)
        matrices = _rotations(tensor.x.ptr.dtype.element_ty, META)
        largest = tl.zeros([ROWS], tl.float32)
        if FINDS_AMAX and (META.BY_BLOCK or not CASTS):
            for row in range(0, META.ITEM_ROWS, ROWS):
                source_rows = _TileRows(pointer=x_base + row * x_step, offsets=x_offsets, first=first + row, end=length)
                largest = _largest_of_parts(largest, _load_parts(source_rows, matrices, META), META)
        if CASTS:
            if tensor.scale_ptr is not None:
                scale = tl.load(tensor.scale_ptr + group)
            elif META.BY_BLOCK:
                amax = tl.max(largest, 0)
                scale = scale_of(amax, range_scale)
                tl.store(amax_ptr + group, amax, mask=block < num_blocks)
            else:
                scale = scale_of(tl.load(amax_ptr + group), range_scale)
            if META.BY_BLOCK:
                tl.store(descale_ptr + group, tl.div_rn(1.0, scale), mask=block < num_blocks)
                if block == 0:  # blocks without rows
                    for other in range(tl.maximum(1, tl.cdiv(length, META.ITEM_ROWS)), num_blocks):
                        tl.store(amax_ptr + group + other, 0.0)
                        tl.store(descale_ptr + group + other, 1.0)
            elif block == 0:
                tl.store(descale_ptr + group, tl.div_rn(1.0, scale))
            data_base = row_pointer(tensor.data, b, h, start + first, META)
            data_step, data_offsets = row_steps(tensor.data.stride_s, ROWS, META)
            for row in range(0, META.ITEM_ROWS, ROWS):  # padding is loaded as 0, and stored
                source_rows = _TileRows(pointer=x_base + row * x_step, offsets=x_offsets, first=first + row, end=length)
                parts = _load_parts(source_rows, matrices, META)
                target = _TileRows(pointer=data_base + row * data_step, offsets=data_offsets, first=first + row, end=slot)
                _store_parts(target, parts, scale, META)
                if FINDS_AMAX and not META.BY_BLOCK:
                    largest = _largest_of_parts(largest, parts, META)
            if META.IS_RAGGED and not META.HAS_GAPS:  # rows before the first sequence
                for row in range(tl.where(block == 0, -start, front), front, ROWS):
                    no_rows = _TileRows(pointer=x_base + row * x_step, offsets=x_offsets, first=length, end=length)
                    target = _TileRows(pointer=data_base + row * data_step, offsets=data_offsets, first=row, end=front)
                    _store_parts(target, _load_parts(no_rows, matrices, META), scale, META)
        if FINDS_AMAX and not META.BY_BLOCK:
            # Non-negative floats order like their bits, and a maximum does not depend on the order of the atomics.
            bits = tl.max(largest, 0).to(tl.int32, bitcast=True)
            tl.atomic_max((amax_ptr + group).to(tl.pointer_type(tl.int32)), bits, sem="relaxed")
            if tensor.history_ptr is not None:
                tl.atomic_max((tensor.history_ptr + group).to(tl.pointer_type(tl.int32)), bits, sem="relaxed")


@kernel
def _quantize_kernel(
    args: QuantizeArguments,
    FINDS_AMAX: tl.constexpr,
    CASTS: tl.constexpr,
    Q_META: tl.constexpr,
    K_META: tl.constexpr,
    V_META: tl.constexpr,
):
    item = tl.program_id(0)
    if not CASTS:  # Reverse order: blocks read last for the amax are cast first, because they are likely still in L2.
        item = tl.num_programs(0) - 1 - item
    if item < args.q.num_items:
        _quantize_item(item, args.q, args.lengths_q, args.range_scale, FINDS_AMAX, CASTS, Q_META)
    elif args.k.x.ptr is not None:
        item -= args.q.num_items
        if item < args.k.num_items:
            _quantize_item(item, args.k, args.lengths_kv, args.range_scale, FINDS_AMAX, CASTS, K_META)
        else:
            _quantize_item(item - args.k.num_items, args.v, args.lengths_kv, args.range_scale, FINDS_AMAX, CASTS, V_META)


class Source(NamedTuple):
    """A tensor to quantise, its lengths and scales, and the tensor for its data."""

    x: Tensor  # [b, s, h, d] or [total, h, d] with any strides but a contiguous last dim
    data: Tensor  # FP8, the same shape
    cu_seqlens: Tensor | None = None
    cu_seqlens_padded: Tensor | None = None
    max_seqlen: int = 0
    scale: Tensor | None = None  # fp32 [h | 1]; None: computed from the amax
    history: Tensor | None = None  # fp32 [n, h | 1], contiguous: its first row becomes the maximum of itself and the amax
    sizes: tuple[int, int, int] = (1, 1, 1)  # [b | 1, h | 1, blocks | 1]: the shape of the scales
    rotation: bool = False

    @property
    def batch(self) -> int:
        return self.x.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def longest(self) -> int:
        return max(1, self.max_seqlen if self.x.dim() == 3 else self.x.shape[1])

    @property
    def num_scales(self) -> int:
        b, h, blocks = self.sizes
        return b * h * blocks

    @property
    def lengths(self) -> Lengths:
        return Lengths(
            cu_seqlens_ptr=self.cu_seqlens,
            cu_seqlens_padded_ptr=self.cu_seqlens_padded,
            seqused_ptr=None,
            batch=self.batch,
            num_tokens=self.x.shape[-3],
            max_seqlen=self.longest,
        )

    def arguments(self, meta: _Meta, amax: Tensor, descale: Tensor) -> TensorArguments:
        stride_b, stride_h = _strides(self.sizes)
        return TensorArguments(
            x=rows(self.x, meta),
            data=rows(self.data, meta),
            scale_ptr=self.scale,
            history_ptr=self.history,
            amax_ptr=amax,
            descale_ptr=descale,
            stride_b=stride_b,
            stride_h=stride_h,
            num_blocks=self.sizes[2],
            num_heads=self.x.shape[-2],
            num_items=self.items(meta),
        )

    def meta(self, block_rows: int, tiles: int, tile_rows: int | None = None) -> _Meta:
        """Returns the constants. block_rows: of a block with a scale, or 0. tiles: of a program. tile_rows: None: the default."""
        x, data, head_dim = self.x, self.data, self.x.shape[-1]
        strides = [
            (0 if size == 1 else stride) for t in (x, data) for size, stride in zip(t.shape[:-1], t.stride()[:-1], strict=True)
        ]
        widths = _widths(head_dim, self.rotation)
        if tile_rows is None:
            tile_rows = 64 if self.rotation or block_rows else max(32, _ELEMENTS // triton.next_power_of_2(head_dim))
        return _Meta(
            IS_RAGGED=x.dim() == 3,
            HAS_GAPS=self.cu_seqlens_padded is not None,
            ALIGN=16 if all(stride % 16 == 0 for stride in strides) else 8 if all(stride % 8 == 0 for stride in strides) else 1,
            WIDE_STRIDES=any(abs(t.stride(-3)) * max(tile_rows, block_rows) >= 2**31 for t in (x, data)),
            HEAD_DIM=head_dim,
            W0=widths[0],
            W1=widths[1],
            W2=widths[2],
            W3=widths[3],
            ROWS=tile_rows,
            ITEM_ROWS=block_rows or (_ROTATED_ROWS if self.rotation else tiles * tile_rows),
            BY_BLOCK=block_rows > 0,
            ROTATION=head_dim & -head_dim if self.rotation else 0,
        )

    def items(self, meta: _Meta) -> int:
        if meta.IS_RAGGED:
            return int((self.x.shape[0] // meta.ITEM_ROWS + self.batch) * self.x.shape[-2])
        return int(self.batch * triton.cdiv(self.longest, meta.ITEM_ROWS) * self.x.shape[-2])


def quantize(sources: Sequence[Source], block_rows: int, margin: int) -> tuple[list[Tensor], Tensor]:
    """Writes each source's x * scale into its data; returns its descales, fp32 of `sizes`, and the amax of all sources, flat.

    sources: q, k and v, if k and v share their lengths; or one tensor. Either all have scales, or none has.
    block_rows: if above 0, each block of that many rows has a scale.

    One launch computes all amax and a second one casts. If the scales are known, or each block has its own, one launch does both.
    NaN and infinity become NaN and are ignored by the amax. Rows past a sequence's end are 0.
    """
    first = sources[0]
    descales = [s.x.new_empty(s.sizes, dtype=torch.float32) for s in sources]
    counts = [s.num_scales for s in sources]
    amax = first.x.new_zeros(sum(counts), dtype=torch.float32)
    if first.batch == 0:
        for source, descale in zip(sources, descales, strict=True):
            source.data.zero_()
            descale.fill_(1.0)
        return descales, amax
    for source in sources:
        if source.cu_seqlens_padded is not None:  # slots may be in any order, so no program knows the gaps next to its slot
            source.data.zero_()
    is_known = first.scale is not None
    metas = [s.meta(block_rows, 1 if is_known else _TILES) for s in sources]
    arguments_of_each = zip(sources, metas, amax.split(counts), descales, strict=True)
    tensors = [source.arguments(meta, part, descale) for source, meta, part, descale in arguments_of_each]
    args = QuantizeArguments(
        q=tensors[0],
        k=tensors[1] if len(tensors) > 1 else None,
        v=tensors[2] if len(tensors) > 1 else None,
        lengths_q=first.lengths,
        lengths_kv=sources[-1].lengths,
        range_scale=LARGEST[first.data.dtype] * 2.0**-margin,
    )
    tile = _rotation_tile(first.x) if first.rotation else _TILE
    programs = sum(tensor.num_items for tensor in tensors)
    q_meta, k_meta, v_meta = metas if len(metas) > 1 else metas * 3
    for finds_amax, casts in ((True, True),) if block_rows or is_known else ((True, False), (False, True)):
        launch(_quantize_kernel, programs, first.x.device, tile, (args, finds_amax, casts, q_meta, k_meta, v_meta))
    return descales, amax


def _rotation_tile(x: Tensor) -> Tile:
    capability = capability_of(x.device)
    in_registers = capability not in (90, 100)  # matrix operands are in registers rather than in shared memory
    num_warps = 8 if x.element_size() > 2 or (in_registers and x.shape[-1] > 128) else 4
    return Tile(64, 32, num_warps, 1 if capability >= 100 else 2)  # with two stages Triton 3.6 and 3.7 fail for sm_100


def _widths(head_dim: int, rotation: bool) -> tuple[int, ...]:
    """Returns the widths of a head dim's parts, powers of two: 64 each if it is rotated and they fit, otherwise one or two."""
    parts = [64] * (head_dim // 64) if rotation and head_dim % 64 == 0 else split_head_dim(head_dim)
    return (*parts, 0, 0, 0)[:4]


def _strides(sizes: tuple[int, int, int]) -> tuple[int, int]:
    """Returns strides of batch and head in a contiguous tensor of these sizes; the stride of a dim of size 1 is 0."""
    return (sizes[1] * sizes[2] if sizes[0] > 1 else 0, sizes[2] if sizes[1] > 1 else 0)


class GradientRows(NamedTuple):
    """The gradient of a rotated tensor, contiguous, and memory for the gradient of the original tensor."""

    x_ptr: WidePointer
    out_ptr: WidePointer
    num_rows: int


class UnrotateArguments(NamedTuple):
    q: GradientRows
    programs_q: int
    k: GradientRows


@triton.jit
def _store_signed(rows, x, COLUMN: tl.constexpr, WIDTH: tl.constexpr, META: tl.constexpr):
    if WIDTH > 0:
        y = x * rotation_signs(COLUMN, WIDTH)[None, :]
        store_tile(rows.pointer, y, rows.offsets, rows.first, rows.end, COLUMN, WIDTH, META.HEAD_DIM)


@kernel
def _unrotate_kernel(args: UnrotateArguments, META: tl.constexpr):
    # The rotation's transpose: Hadamard matrices, which are symmetric, and then the signs.
    is_q = tl.program_id(0) < args.programs_q
    x_ptr = tl.where(is_q, args.q.x_ptr, args.k.x_ptr)
    out_ptr = tl.where(is_q, args.q.out_ptr, args.k.out_ptr)
    num_rows = tl.where(is_q, args.q.num_rows, args.k.num_rows)
    begin = (tl.program_id(0) - tl.where(is_q, 0, args.programs_q)) * META.ITEM_ROWS
    offsets = tl.arange(0, META.ROWS) * META.HEAD_DIM
    DTYPE: tl.constexpr = args.q.x_ptr.dtype.element_ty
    matrix0 = hadamard_tile(META.W0, min(META.ROTATION, META.W0)).to(DTYPE)
    matrix1 = matrix0
    if META.W1 > 0 and META.W1 != META.W0:
        matrix1 = hadamard_tile(META.W1, min(META.ROTATION, META.W1)).to(DTYPE)
    matrices = _Parts(x0=matrix0, x1=matrix1, x2=matrix0, x3=matrix0)
    for row in range(0, META.ITEM_ROWS, META.ROWS):
        first = begin + row
        base = tl.cast(first, tl.int64) * META.HEAD_DIM
        parts = _load_parts(_TileRows(pointer=x_ptr + base, offsets=offsets, first=first, end=num_rows), matrices, META)
        target = _TileRows(pointer=out_ptr + base, offsets=offsets, first=first, end=num_rows)
        _store_signed(target, parts.x0, 0, META.W0, META)
        _store_signed(target, parts.x1, META.W0, META.W1, META)
        _store_signed(target, parts.x2, META.W0 + META.W1, META.W2, META)
        _store_signed(target, parts.x3, META.W0 + META.W1 + META.W2, META.W3, META)


def unrotate(dq: Tensor, dk: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients of q and k from the gradients of their rotated forms, times the transpose of `quantize`'s rotation.

    Both are contiguous, with the same head dim and dtype.
    """
    head_dim = dq.shape[-1]
    out_q, out_k = torch.empty_like(dq), torch.empty_like(dk)
    meta = Source(x=dq, data=out_q, rotation=True).meta(0, 1)._replace(IS_RAGGED=False, ALIGN=8, WIDE_STRIDES=False)
    rows_q, rows_k = dq.numel() // head_dim, dk.numel() // head_dim
    programs_q, programs_k = (triton.cdiv(count, _ROTATED_ROWS) for count in (rows_q, rows_k))
    args = UnrotateArguments(
        q=GradientRows(x_ptr=dq, out_ptr=out_q, num_rows=rows_q),
        programs_q=programs_q,
        k=GradientRows(x_ptr=dk, out_ptr=out_k, num_rows=rows_k),
    )
    launch(_unrotate_kernel, programs_q + programs_k, dq.device, _rotation_tile(dq), (args, meta))
    return out_q, out_k


class TransposeArguments(NamedTuple):
    x: Rows
    lengths: Lengths
    num_heads: int
    out: Channels


@triton.jit
def _transpose_part(out_base, stride_d, column, rows, COLUMN: tl.constexpr, WIDTH: tl.constexpr, META: tl.constexpr):
    d = COLUMN + tl.arange(0, WIDTH)
    x = load_tile(rows.pointer, rows.offsets, rows.first, rows.end, COLUMN, WIDTH, META.HEAD_DIM, True)
    inside = (d < META.HEAD_DIM)[:, None] & (rows.first + tl.arange(0, META.ROWS) // 16 * 16 < rows.end)[None, :]
    tl.store(out_base + d.to(tl.int64)[:, None] * stride_d * 16 + column[None, :], tl.trans(x), mask=inside)


@kernel
def _transpose_kernel(args: TransposeArguments, META: tl.constexpr):
    ROWS: tl.constexpr = META.ROWS
    lengths = args.lengths
    out = args.out
    blocks = tl.cdiv(lengths.max_seqlen, ROWS)
    first = tl.program_id(0) % blocks * ROWS
    h = tl.program_id(0) // blocks % args.num_heads
    b = tl.program_id(0) // blocks // args.num_heads
    start, length = load_sequence(lengths, b, META.IS_RAGGED)
    if first >= length:
        return
    pointer = row_pointer(args.x, b, h, start + first, META)
    _, offsets = row_steps(args.x.stride_s, ROWS, META)
    rows = _TileRows(pointer=pointer, offsets=offsets, first=first, end=length)
    place = packed_start(lengths, b, start)
    column = transposed_column(place, b, META.IS_RAGGED) + first + tl.arange(0, ROWS)
    out_base = out.ptr + (tl.cast(b, tl.int64) * out.stride_b + tl.cast(h, tl.int64) * out.stride_h) * 16
    _transpose_part(out_base, out.stride_d, column, rows, 0, META.W0, META)
    if META.W1 > 0:
        _transpose_part(out_base, out.stride_d, column, rows, META.W0, META.W1, META)


def _channels(copy: Tensor) -> Channels:
    """Returns a copy from `transpose_tokens` as a kernel argument."""
    stride_b = 0 if copy.dim() == 3 else copy.stride(0) // 16
    return Channels(ptr=copy, stride_b=stride_b, stride_h=copy.stride(-3) // 16, stride_d=copy.stride(-2) // 16)


def transpose_tokens(x: Tensor, cu_seqlens: Tensor | None, cu_seqlens_padded: Tensor | None, max_seqlen: int) -> Tensor:
    """Returns a copy of FP8 x, [b, s, h, d] or [total, h, d], with the tokens innermost: [b, h, d, columns] or [h, d, columns].

    Every row begins at a multiple of 16 bytes, and so does every sequence within its row, at its `transposed_column`. Zeros fill a
    sequence's last 16 bytes. Gaps after that are not written.
    """
    source = Source(x, x, cu_seqlens, cu_seqlens_padded, max_seqlen)
    meta, batch = source.meta(0, 1, _COLUMNS.block_m), source.batch
    tokens, heads, head_dim = x.shape[-3:]
    columns = triton.cdiv(tokens + (16 * batch if meta.IS_RAGGED else 0), 16) * 16
    out = x.new_empty((*(() if meta.IS_RAGGED else (batch,)), heads, head_dim, columns))
    args = TransposeArguments(x=rows(x, meta), lengths=source.lengths, num_heads=heads, out=_channels(out))
    programs = triton.cdiv(source.longest, _COLUMNS.block_m) * heads * batch
    launch(_transpose_kernel, programs, x.device, _COLUMNS, (args, meta))
    return out


def transposed(problem: Problem, name: Literal["q", "k", "v"], x: Tensor | None = None) -> Channels | None:
    """Returns the transposed copy of a tensor that an FP8 kernel reads; None if the problem is not in FP8.

    x: replaces the problem's tensor of that name, with the same layout.
    """
    if not problem.is_fp8:
        return None
    p = problem
    x = getattr(p, name) if x is None else x
    lengths_q = (p.cu_seqlens_q, p.cu_seqlens_q_padded, p.longest_q)
    lengths = lengths_q if name == "q" else (p.cu_seqlens_kv, p.cu_seqlens_kv_padded, p.longest_kv)
    return _channels(transpose_tokens(x, *lengths))
