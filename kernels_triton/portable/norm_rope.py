"""RMSNorm of each head of q and k, then rotary positions: one launch for both tensors forward, and one backward.

A row is a head of a token. The backward computes the norms again. Each of its programs adds the gradient of the weight over its
rows, and one sum over programs follows, so results repeat to the bit on one GPU.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexattn.kernels_triton.common.addressing import row_pointer
from flexattn.kernels_triton.common.arguments import Pointer, Rows
from flexattn.kernels_triton.common.tiles import cdiv
from flexattn.kernels_triton.runtime.device import INTERPRETER, Tile, capability_of, num_processors
from flexattn.kernels_triton.runtime.entry import WidePointer
from flexattn.kernels_triton.runtime.launch import Launchable, kernel, launch


class Block(NamedTuple):
    """The rows that a program processes at a time."""

    elements: int
    num_warps: int
    programs: int = 0  # for each processor, in a backward


BLOCKS = {
    "forward": Block(2048, 4),
    "backward": Block(2048, 4, 5),
}


class Settings(NamedTuple):
    eps: float  # is added to the mean square
    interleaved: bool  # pairs are neighbours; else the halves of the rotated part
    zero_centered: bool  # weights are stored less 1


class Side(NamedTuple):
    """q or k."""

    x: Rows
    y: Rows  # the result; for a backward its gradient
    dx: Rows | None
    weight_ptr: WidePointer  # [HEAD_DIM], or None


class Arguments(NamedTuple):
    q: Side
    k: Side
    cos: Rows  # [b, s, ROTATED], heads apart; arbitrary without rotation
    sin: Rows
    parts_ptr: Pointer  # fp32 [programs, HEAD_DIM] of a backward: the gradient of the weight over a program's rows
    num_tokens: int  # in all sequences
    length: int  # tokens of a sequence
    programs_q: int  # the first programs are q's, the others k's
    programs_k: int
    eps: float


class Tokens(NamedTuple):
    """The tokens of a block's rows, inside a kernel."""

    b: tl.tensor  # batch entries
    s: tl.tensor  # places in the sequence
    is_row: tl.tensor  # [rows, 1]: whether a row exists


class NormMeta(NamedTuple):
    """Constants that the kernels are compiled for, of q or of k; `row_pointer` reads `ALIGN` like that of `Meta`."""

    NUM_HEADS: int
    HEAD_DIM: int
    ROTATED: int  # the first columns; 0: no rotation
    FIRST: int  # columns of the first of a head's two tiles
    WIDTH: int  # FIRST rounded up to a power of two
    ROWS: int
    ALIGN: int
    INTERLEAVED: bool
    HAS_NORM: bool
    WEIGHT_OFFSET: float


@triton.jit
def _rows_of_block(args, block, META: tl.constexpr):
    # Returns the batch entry, token and head of each row, and whether it exists.
    row = block * META.ROWS + tl.arange(0, META.ROWS)
    token = row // META.NUM_HEADS
    return token // args.length, token % args.length, row % META.NUM_HEADS, (token < args.num_tokens)[:, None]


@triton.jit
def _columns(META: tl.constexpr):
    # Returns the columns of a head's two tiles, and whether each exists. Both tiles have one layout. The halves of the rotated part
    # are at equal places of both, and neighbours are in one tile.
    HALF: tl.constexpr = 0 if META.INTERLEAVED else META.ROTATED // 2
    place = tl.arange(0, META.WIDTH)
    first = tl.where(place < HALF, place, place + HALF)
    second = tl.where(place < HALF, place + HALF, place + META.FIRST)
    return first, second, place < META.FIRST, place < META.HEAD_DIM - META.FIRST


@triton.jit
def _load_tile(pointers, columns, inside, other: tl.constexpr):
    return tl.load(pointers[:, None] + columns[None, :], mask=inside, other=other).to(tl.float32)


@triton.jit
def _load_tiles(pointers, is_row, META: tl.constexpr):
    first, second, has_first, has_second = _columns(META)
    x0 = _load_tile(pointers, first, is_row & has_first[None, :], 0.0)
    return x0, _load_tile(pointers, second, is_row & has_second[None, :], 0.0)


@triton.jit
def _store_tiles(pointers, is_row, x0, x1, META: tl.constexpr):
    first, second, has_first, has_second = _columns(META)
    dtype: tl.constexpr = pointers.dtype.element_ty
    tl.store(pointers[:, None] + first[None, :], x0.to(dtype), mask=is_row & has_first[None, :])
    tl.store(pointers[:, None] + second[None, :], x1.to(dtype), mask=is_row & has_second[None, :])


@triton.jit
def _load_angles(args, tokens, columns, is_rotated, DIRECTION: tl.constexpr, META: tl.constexpr):
    # Returns cos and sin of columns; 1 and 0 for a column that is not rotated.
    inside = tokens.is_row & is_rotated[None, :]
    cos = _load_tile(row_pointer(args.cos, tokens.b, 0, tokens.s, META), columns, inside, 1.0)
    return cos, DIRECTION * _load_tile(row_pointer(args.sin, tokens.b, 0, tokens.s, META), columns, inside, 0.0)


@triton.jit
def _rotate_neighbours(x, args, tokens, columns, DIRECTION: tl.constexpr, META: tl.constexpr):
    cos, sin = _load_angles(args, tokens, columns, columns < META.ROTATED, DIRECTION, META)
    a, b = tl.split(tl.reshape(x, [META.ROWS, META.WIDTH // 2, 2]))
    return x * cos + tl.interleave(-b, a) * sin


@triton.jit
def _rotate(x0, x1, args, tokens, DIRECTION: tl.constexpr, META: tl.constexpr):
    # DIRECTION: 1.0, or for a gradient -1.0.
    if META.ROTATED > 0:
        if META.INTERLEAVED:
            first, second, _, _ = _columns(META)
            x0 = _rotate_neighbours(x0, args, tokens, first, DIRECTION, META)
            x1 = _rotate_neighbours(x1, args, tokens, second, DIRECTION, META)
        else:
            place = tl.arange(0, META.WIDTH)
            cos, sin = _load_angles(args, tokens, place, place < META.ROTATED // 2, DIRECTION, META)
            x0, x1 = x0 * cos - x1 * sin, x1 * cos + x0 * sin
    return x0, x1


@triton.jit
def _load_weights(pointer, META: tl.constexpr):
    # In the layout of the tiles: a vector would move to it through shared memory.
    rows = tl.arange(0, META.ROWS)
    w0, w1 = _load_tiles(pointer + 0 * rows, (rows >= 0)[:, None], META)
    return w0 + META.WEIGHT_OFFSET, w1 + META.WEIGHT_OFFSET


@triton.jit
def _inverse_rms(x0, x1, eps, META: tl.constexpr):
    return (1.0 / tl.sqrt(tl.sum(x0 * x0 + x1 * x1, 1) / META.HEAD_DIM + eps))[:, None]


@triton.jit
def _forward_block(side, args, block, META: tl.constexpr):
    b, s, h, is_row = _rows_of_block(args, block, META)
    x0, x1 = _load_tiles(row_pointer(side.x, b, h, s, META), is_row, META)
    if META.HAS_NORM:
        factor = _inverse_rms(x0, x1, args.eps, META)
        w0, w1 = _load_weights(side.weight_ptr, META)
        x0 *= factor * w0
        x1 *= factor * w1
    x0, x1 = _rotate(x0, x1, args, Tokens(b=b, s=s, is_row=is_row), 1.0, META)
    _store_tiles(row_pointer(side.y, b, h, s, META), is_row, x0, x1, META)


@kernel
def _forward_kernel(args: Arguments, META_Q: tl.constexpr, META_K: tl.constexpr):
    block = tl.program_id(0)
    if block < args.programs_q:
        _forward_block(args.q, args, block, META_Q)
    else:
        _forward_block(args.k, args, block - args.programs_q, META_K)


@triton.jit
def _backward_blocks(side, args, program, programs, META: tl.constexpr):
    # Processes every block whose number is `program` modulo `programs`.
    ROWS: tl.constexpr = META.ROWS
    WIDTH: tl.constexpr = META.WIDTH
    dw0 = tl.zeros([ROWS, WIDTH], tl.float32)
    dw1 = tl.zeros([ROWS, WIDTH], tl.float32)
    if META.HAS_NORM:
        w0, w1 = _load_weights(side.weight_ptr, META)
    for block in range(program, tl.cdiv(args.num_tokens * META.NUM_HEADS, ROWS), programs):
        b, s, h, is_row = _rows_of_block(args, block, META)
        d0, d1 = _load_tiles(row_pointer(side.y, b, h, s, META), is_row, META)
        d0, d1 = _rotate(d0, d1, args, Tokens(b=b, s=s, is_row=is_row), -1.0, META)
        if META.HAS_NORM:  # dx = (d w - n mean(d w n)) / rms, where n = x / rms
            n0, n1 = _load_tiles(row_pointer(side.x, b, h, s, META), is_row, META)
            # 0 for a row that does not exist, whose norm is sqrt(eps): without an eps, 0 * inf would be NaN in the sums of weights
            factor = tl.where(is_row, _inverse_rms(n0, n1, args.eps, META), 0.0)
            n0 *= factor
            n1 *= factor
            dw0 += d0 * n0
            dw1 += d1 * n1
            d0 *= w0
            d1 *= w1
            mean = (tl.sum(d0 * n0 + d1 * n1, 1) / META.HEAD_DIM)[:, None]
            d0 = factor * (d0 - n0 * mean)
            d1 = factor * (d1 - n1 * mean)
        _store_tiles(row_pointer(side.dx, b, h, s, META), is_row, d0, d1, META)
    if META.HAS_NORM:
        first, second, has_first, has_second = _columns(META)
        parts_ptr = args.parts_ptr + tl.program_id(0) * META.HEAD_DIM
        tl.store(parts_ptr + first, tl.sum(dw0, 0), mask=has_first)
        tl.store(parts_ptr + second, tl.sum(dw1, 0), mask=has_second)


@kernel
def _backward_kernel(args: Arguments, META_Q: tl.constexpr, META_K: tl.constexpr):
    program = tl.program_id(0)
    if program < args.programs_q:
        _backward_blocks(args.q, args, program, args.programs_q, META_Q)
    else:
        _backward_blocks(args.k, args, program - args.programs_q, args.programs_k, META_K)


class Call(NamedTuple):
    """The tensors of a call, of any strides but a contiguous last dim."""

    q: Tensor  # [b, s, h, d]
    k: Tensor  # [b, s, h_kv, d]
    cos: Tensor | None  # [b, s, rotated] or [1, s, rotated], as sin; None: no rotation
    sin: Tensor | None
    q_weight: Tensor | None  # [d], as k_weight; None: no norm
    k_weight: Tensor | None
    settings: Settings

    @property
    def rows(self) -> tuple[int, int]:
        """Rows of q and of k."""
        q, k = (x.shape[0] * x.shape[1] * x.shape[2] for x in (self.q, self.k))
        return q, k

    @property
    def rotated(self) -> int:
        return 0 if self.cos is None else self.cos.shape[-1]

    def metas(self, block: Block, others: tuple[Tensor, ...]) -> tuple[NormMeta, NormMeta]:
        """Returns the constants for q and for k. others: further tensors that the kernel accesses by rows."""
        tables = () if self.cos is None or self.sin is None else (self.cos, self.sin)
        strides = {stride for x in (self.q, self.k, *tables, *others) for stride in x.stride()[:-1]}
        align = 8 if all(stride % 8 == 0 for stride in strides) else 1
        elements = 0 if capability_of(self.q.device) == INTERPRETER else block.elements
        constants = (self.q.shape[-1], self.rotated, elements, align, self.q_weight is not None)
        return _meta(self.q.shape[2], constants, self.settings), _meta(self.k.shape[2], constants, self.settings)

    def arguments(self, sides: tuple[Side, Side], parts: Tensor | None, programs: tuple[int, int], align: int) -> Arguments:
        cos, sin = (_rows(self.q[:, :, 0] if table is None else table, align) for table in (self.cos, self.sin))
        batch, length = self.q.shape[:2]
        return Arguments(*sides, cos, sin, parts, batch * length, length, *programs, self.settings.eps)


@functools.lru_cache(maxsize=256)
def _meta(num_heads: int, constants: tuple[int, int, int, int, bool], settings: Settings) -> NormMeta:
    """Returns the constants for a tensor. constants: head dim, rotated numbers, elements of a block (0: few), ALIGN, HAS_NORM."""
    head_dim, rotated, elements, align, has_norm = constants
    first = (head_dim + 3) // 4 * 2 if settings.interleaved else (head_dim + 1) // 2
    width = triton.next_power_of_2(first)
    return NormMeta(
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        ROTATED=rotated,
        FIRST=first,
        WIDTH=width,
        ROWS=elements // (2 * width) or 8,
        ALIGN=align,
        INTERLEAVED=settings.interleaved,
        HAS_NORM=has_norm,
        WEIGHT_OFFSET=float(settings.zero_centered),
    )


def norm_rope(call: Call) -> tuple[Tensor, Tensor]:
    """Returns q and k, normalised and rotated; contiguous."""
    results, block = _empty(call), BLOCKS["forward"]
    metas = call.metas(block, results)
    align = metas[0].ALIGN
    sides = (
        Side(_rows(call.q, align), _rows(results[0], align), None, call.q_weight),
        Side(_rows(call.k, align), _rows(results[1], align), None, call.k_weight),
    )
    programs = cdiv(call.rows[0], metas[0].ROWS), cdiv(call.rows[1], metas[1].ROWS)
    _launch(_forward_kernel, call.arguments(sides, None, programs, align), metas, block)
    return results


def norm_rope_backward(call: Call, dout: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Returns the gradients of q and k, contiguous, and of their weights, or None without a norm.

    dout: gradients of the results, of any strides but a contiguous last dim.
    """
    (dq, dk), block = _empty(call), BLOCKS["backward"]
    metas = call.metas(block, (dq, dk, *dout))
    align, device = metas[0].ALIGN, dq.device
    sides = (
        Side(_rows(call.q, align), _rows(dout[0], align), _rows(dq, align), call.q_weight),
        Side(_rows(call.k, align), _rows(dout[1], align), _rows(dk, align), call.k_weight),
    )
    # Each program has about as many rows of q or of k as any other.
    most = num_processors(device) * (1 if capability_of(device) == INTERPRETER else block.programs)
    share = min(most - 1, most * call.rows[0] // max(1, sum(call.rows)))
    programs = min(max(1, share), cdiv(call.rows[0], metas[0].ROWS)), min(most - share, cdiv(call.rows[1], metas[1].ROWS))
    parts = dq.new_empty(sum(programs), dq.shape[-1], dtype=torch.float32) if metas[0].HAS_NORM else None
    _launch(_backward_kernel, call.arguments(sides, parts, programs, align), metas, block)
    if parts is None or call.q_weight is None or call.k_weight is None:
        return dq, dk, None, None
    dq_weight, dk_weight = parts[: programs[0]].sum(0), parts[programs[0] :].sum(0)
    return dq, dk, dq_weight.to(call.q_weight.dtype), dk_weight.to(call.k_weight.dtype)


def _empty(call: Call) -> tuple[Tensor, Tensor]:
    return call.q.new_empty(call.q.shape), call.k.new_empty(call.k.shape)


def _launch(which: Launchable, arguments: Arguments, metas: tuple[NormMeta, NormMeta], block: Block) -> None:
    tile = Tile(metas[0].ROWS, metas[0].HEAD_DIM, block.num_warps, 1)
    launch(which, arguments.programs_q + arguments.programs_k, arguments.q.x.ptr.device, tile, (arguments, *metas))


def _rows(x: Tensor, align: int) -> Rows:
    """Returns [b, s, h, d], or a table [b, s, rotated], whose only sequence counts for all."""
    stride_b, stride_s, stride_h = x.stride()[:3] if x.dim() == 4 else (*x.stride()[:2], 0)
    return Rows(ptr=x, stride_b=0 if x.shape[0] == 1 else stride_b // align, stride_s=stride_s // align, stride_h=stride_h // align)
