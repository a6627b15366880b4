"""Small kernels for batches with lengths that run beside the sm_90 kernels: a table of the work tiles, and zeros in the padding."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from flexattn.kernels_triton.common.addressing import row_pointer, row_steps
from flexattn.kernels_triton.common.arguments import Lengths, Pointer, Rows
from flexattn.kernels_triton.common.padding import load_padding, store_zeros
from flexattn.kernels_triton.common.problem import Backward, Problem, rows
from flexattn.kernels_triton.common.sequences import load_sequence
from flexattn.kernels_triton.common.tiles import cdiv, split_head_dim
from flexattn.kernels_triton.runtime.device import Tile
from flexattn.kernels_triton.runtime.launch import kernel, launch

_TILE = Tile(64, 64, 4, 1)
_PARTS = 4
_MOST_PROGRAMS = 1024  # about as many programs look for padding at once; without padding that is all they do
_CHUNK = tl.constexpr(64)  # blocks for which a program finds table entries, and sequences that it reads together


class Side(NamedTuple):
    """The lengths of one side of a problem, queries or keys."""

    lengths: Lengths
    is_ragged: bool


def side_of(problem: Problem, side: Literal["q", "kv"]) -> Side:
    x = problem
    return Side(x.lengths_q, x.q.dim() == 3) if side == "q" else Side(x.lengths_kv, x.k.dim() == 3)


class TableArguments(NamedTuple):
    lengths: Lengths
    table_ptr: Pointer
    blocks: int
    capacity: int


class TableMeta(NamedTuple):
    """Constants that the kernel is compiled for."""

    BLOCK: int
    LAST_FIRST: bool
    BY_SEQUENCE: bool
    IS_RAGGED: bool


@kernel
def _tile_schedule_kernel(args: TableArguments, META: tl.constexpr):
    BLOCK: tl.constexpr = META.BLOCK
    CHUNK: tl.constexpr = _CHUNK
    lengths = args.lengths
    batch = lengths.batch
    table_ptr = args.table_ptr
    capacity = args.capacity
    b = tl.program_id(0) % batch
    block = tl.program_id(0) // batch * CHUNK + tl.arange(0, CHUNK)
    _sequence_start, sequence_length = load_sequence(lengths, b, META.IS_RAGGED)
    sequence_blocks = tl.cdiv(sequence_length, BLOCK)
    after = block if META.LAST_FIRST else sequence_blocks - 1 - block  # blocks of its sequence that come after this one
    before = sequence_blocks - 1 - after if META.BY_SEQUENCE else tl.zeros([CHUNK], tl.int32)  # entries that come before this one
    total = 0
    for first in range(0, batch, CHUNK):
        other = first + tl.arange(0, CHUNK)
        last = batch - 1
        _, length = load_sequence(lengths, tl.minimum(other, last), META.IS_RAGGED)
        count = tl.where(other < batch, tl.cdiv(length, BLOCK), 0)
        total += tl.sum(count, 0)
        if META.BY_SEQUENCE:
            is_before = (count > sequence_blocks) | ((count == sequence_blocks) & (other < b))
            before += tl.sum(tl.where(is_before, count, 0), 0)
        else:
            heavier = tl.maximum(count[None, :] - (after + 1)[:, None], 0)
            same = (count[None, :] > after[:, None]) & (other < b)[None, :]
            before += tl.sum(heavier + same.to(tl.int32), 1)
    # Overlapping sequences, which only wrong cu_seqlens cause, may have more blocks than the table has room for.
    tl.store(table_ptr + 2 + before, b * args.blocks + block, mask=(block < sequence_blocks) & (before < capacity))
    if tl.program_id(0) == 0:
        tl.store(table_ptr, 0)
        tl.store(table_ptr + 1, tl.minimum(total, capacity))


def tile_schedule(problem: Problem, block: int, side: Literal["q", "kv"], *, by_sequence: bool) -> Tensor:
    """Returns int32: a counter at 0, the number of entries, then b * blocks + n for each block n of `block` tokens that exists.

    `blocks` is the number of blocks of the longest sequence. The blocks with the most work under a causal band come first: the last
    blocks of queries, the first blocks of keys.
    by_sequence: sequences follow one another, the longest first, so that data that the blocks of one share stays in L2. If False,
    blocks of all sequences are sorted by work, and the short ones fill up the end.
    """
    x = side_of(problem, side)
    batch = x.lengths.batch
    blocks = cdiv(x.lengths.max_seqlen, block)
    capacity = batch * blocks
    if x.is_ragged:
        capacity = min(capacity, x.lengths.num_tokens // block + batch)
    table = torch.empty(2 + capacity, dtype=torch.int32, device=problem.device)
    args = TableArguments(lengths=x.lengths, table_ptr=table, blocks=blocks, capacity=capacity)
    meta = TableMeta(BLOCK=block, LAST_FIRST=side == "q", BY_SEQUENCE=by_sequence, IS_RAGGED=x.is_ragged)
    launch(_tile_schedule_kernel, batch * cdiv(blocks, _CHUNK.value), problem.device, _TILE, (args, meta))
    return table


class PaddingArguments(NamedTuple):
    lengths: Lengths
    out: Rows
    lse_ptr: Pointer
    num_heads: int
    program_heads: int  # maximum heads of a program


class PaddingMeta(NamedTuple):
    """Constants that the kernel is compiled for; shared functions read some by their names in `Meta`."""

    PARTS: int  # programs that share the padding of one sequence and its heads
    HEAD_DIM: int
    WIDTH0: int  # widths of the one or two parts of the head dim
    WIDTH1: int
    IS_RAGGED: bool
    ROWS: int  # rows of a tile
    ALIGN: int
    WIDE_STRIDES: bool


@kernel
def _padding_kernel(args: PaddingArguments, META: tl.constexpr):
    ROWS: tl.constexpr = META.ROWS
    PARTS: tl.constexpr = META.PARTS
    lengths = args.lengths
    num_heads = args.num_heads
    groups = tl.cdiv(num_heads, args.program_heads)
    part = tl.program_id(0) % PARTS
    first_head = tl.program_id(0) // PARTS % groups * args.program_heads
    b = tl.program_id(0) // PARTS // groups
    start, length = load_sequence(lengths, b, META.IS_RAGGED)
    front, slot = load_padding(lengths, b, start, length, META.IS_RAGGED)
    step, offsets = row_steps(args.out.stride_s, ROWS, META)
    for n in tl.static_range(2 if META.IS_RAGGED else 1):
        first, last = (length, slot) if n == 0 else (-start, front)
        share = tl.cdiv(last - first, PARTS)
        begin = first + part * share
        end = tl.minimum(begin + share, last)
        end_head = tl.minimum(first_head + args.program_heads, num_heads)
        for h in range(first_head, tl.where(begin < end, end_head, first_head)):
            base = row_pointer(args.out, b, h, start, META)
            store_zeros(base, step, offsets, begin, end, META.HEAD_DIM, META.WIDTH0, META.WIDTH1)
            if args.lse_ptr is not None:
                row_of_lse = tl.cast(h if META.IS_RAGGED else b * num_heads + h, tl.int64) * lengths.num_tokens
                lse_base = args.lse_ptr + row_of_lse + start
                for row in range(begin, end, ROWS):
                    rows = row + tl.arange(0, ROWS)
                    tl.store(lse_base + rows, tl.full([ROWS], float("-inf"), tl.float32), mask=rows < end)


def zero_padding(problem: Problem, out: Tensor, side: Literal["q", "kv"], lse: Tensor | None = None) -> None:
    """Writes out = 0, and lse = -inf, in the rows without a token.

    out has the layout of q or k, with any head dim.
    """
    x = side_of(problem, side)
    meta = problem.meta(_TILE, (out,))
    heads, head_dim = out.shape[-2:]
    width0, width1 = split_head_dim(head_dim)
    programs = _PARTS * x.lengths.batch
    program_heads = max(1, programs * heads // _MOST_PROGRAMS)
    args = PaddingArguments(lengths=x.lengths, out=rows(out, meta), lse_ptr=lse, num_heads=heads, program_heads=program_heads)
    padding_meta = PaddingMeta(
        PARTS=_PARTS,
        HEAD_DIM=head_dim,
        WIDTH0=width0,
        WIDTH1=width1,
        IS_RAGGED=x.is_ragged,
        ROWS=_TILE.block_m,
        ALIGN=meta.ALIGN,
        WIDE_STRIDES=meta.WIDE_STRIDES,
    )
    launch(_padding_kernel, programs * cdiv(heads, program_heads), problem.device, _TILE, (args, padding_meta))


def zero_padding_of_gradients(call: Backward) -> None:
    """Writes zeros into the gradients' rows without a token."""
    x = call.problem
    if x.has_lengths:
        zero_padding(x, call.dq, "q")
        zero_padding(x, call.dk, "kv")
        zero_padding(x, call.dv, "kv")
