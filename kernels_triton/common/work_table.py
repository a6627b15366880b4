"""What batches with lengths need beside the attention kernels of sm_90: a table of the work there is, and zeros in the padding."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexattn.kernels_triton.common.arguments import Lengths, Rows
from flexattn.kernels_triton.common.primitives import load_padding, load_sequence, row_pointer, row_steps, store_zeros
from flexattn.kernels_triton.common.problem import Problem, row_strides
from flexattn.kernels_triton.common.tiles import split_head_dim
from flexattn.kernels_triton.runtime.launch import Tile, kernel, launch

_TILE = Tile(64, 64, 4, 1)
_PARTS = 4  # programs that share the padding of one sequence and head


class _Side(NamedTuple):
    """The queries' or the keys' half of a problem's lengths."""

    cu_seqlens: Tensor | None
    cu_seqlens_padded: Tensor | None
    batch: int
    num_tokens: int
    longest: int
    is_ragged: bool

    @property
    def arguments(self) -> tuple[Tensor | None, Tensor | None, int, int, int]:
        return self[:5]


def side_of(problem: Problem, side: Literal["q", "kv"]) -> _Side:
    x = problem
    if side == "q":
        return _Side(x.cu_seqlens_q, x.cu_seqlens_q_padded, x.batch, x.q.shape[-3], x.longest_q, x.q.dim() == 3)
    return _Side(x.cu_seqlens_kv, x.cu_seqlens_kv_padded, x.batch, x.k.shape[-3], x.longest_kv, x.k.dim() == 3)


@kernel
def _work_table_kernel(
    cu_seqlens_ptr,
    cu_seqlens_padded_ptr,
    batch,
    num_tokens,
    max_seqlen,
    table_ptr,
    blocks,
    capacity,
    BLOCK: tl.constexpr,
    LAST_FIRST: tl.constexpr,
    BY_SEQUENCE: tl.constexpr,
    IS_RAGGED: tl.constexpr,
    HAS_GAPS: tl.constexpr,
    META: tl.constexpr,
):
    CHUNK: tl.constexpr = 64
    b = tl.program_id(0) % batch
    block = tl.program_id(0) // batch * CHUNK + tl.arange(0, CHUNK)
    _own_start, own_length = load_sequence(
        Lengths(cu_seqlens_ptr, cu_seqlens_padded_ptr, batch, num_tokens, max_seqlen), b, IS_RAGGED
    )
    own_blocks = tl.cdiv(own_length, BLOCK)
    after = block if LAST_FIRST else own_blocks - 1 - block  # of its sequence's, as many come after this one
    before = own_blocks - 1 - after if BY_SEQUENCE else tl.zeros([CHUNK], tl.int32)  # of all entries
    total = 0
    for first in range(0, batch, CHUNK):
        other = first + tl.arange(0, CHUNK)
        last = batch - 1
        _, length = load_sequence(
            Lengths(cu_seqlens_ptr, cu_seqlens_padded_ptr, batch, num_tokens, max_seqlen), tl.minimum(other, last), IS_RAGGED
        )
        count = tl.where(other < batch, tl.cdiv(length, BLOCK), 0)
        total += tl.sum(count, 0)
        if BY_SEQUENCE:
            is_before = (count > own_blocks) | ((count == own_blocks) & (other < b))
            before += tl.sum(tl.where(is_before, count, 0), 0)
        else:
            heavier = tl.maximum(count[None, :] - (after + 1)[:, None], 0)
            same = (count[None, :] > after[:, None]) & (other < b)[None, :]
            before += tl.sum(heavier + same.to(tl.int32), 1)
    # Sequences that overlap, as only wrong cu_seqlens make them, may have more blocks than there is room for.
    tl.store(table_ptr + 2 + before, b * blocks + block, mask=(block < own_blocks) & (before < capacity))
    if tl.program_id(0) == 0:
        tl.store(table_ptr, 0)
        tl.store(table_ptr + 1, tl.minimum(total, capacity))


def work_table(problem: Problem, block: int, side: Literal["q", "kv"], *, by_sequence: bool) -> Tensor:
    """int32: a counter at 0, the number of entries, then b * blocks + n for each block n of `block` tokens that has one.

    blocks is what the longest sequence has. The blocks to which a causal band gives the most to do come first: the last of queries,
    the first of keys.
    by_sequence: one sequence comes after the other, the longest first, so that what its blocks share is in L2 while they run;
    else those of all sequences come together, the longest ones first and the short ones to fill up the end.
    """
    x = side_of(problem, side)
    blocks = triton.cdiv(x.longest, block)
    capacity = x.batch * blocks
    if x.is_ragged:
        capacity = min(capacity, x.num_tokens // block + x.batch)
    table = torch.empty(2 + capacity, dtype=torch.int32, device=problem.device)
    kind = (block, side == "q", by_sequence, x.is_ragged, x.cu_seqlens_padded is not None, problem.meta(_TILE))
    programs = x.batch * triton.cdiv(blocks, 64)
    launch(_work_table_kernel, programs, problem.device, _TILE, (*x.arguments, table, blocks, capacity, *kind))
    return table


@kernel
def _padding_kernel(
    cu_seqlens_ptr,
    cu_seqlens_padded_ptr,
    batch,
    num_tokens,
    max_seqlen,
    out_ptr,
    stride_ob,
    stride_os,
    stride_oh,
    lse_ptr,
    num_heads,
    PARTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH0: tl.constexpr,
    WIDTH1: tl.constexpr,
    IS_RAGGED: tl.constexpr,
    HAS_GAPS: tl.constexpr,
    META: tl.constexpr,
):
    ROWS: tl.constexpr = META.BLOCK_M
    part = tl.program_id(0) % PARTS
    h = tl.program_id(0) // PARTS % num_heads
    b = tl.program_id(0) // PARTS // num_heads
    lengths = Lengths(cu_seqlens_ptr, cu_seqlens_padded_ptr, batch, num_tokens, max_seqlen)
    start, length = load_sequence(lengths, b, IS_RAGGED)
    front, slot = load_padding(lengths, b, start, length, IS_RAGGED)
    base = row_pointer(Rows(out_ptr, stride_ob, stride_os, stride_oh), b, h, start, META)
    step, offsets = row_steps(stride_os, ROWS, META)
    for n in tl.static_range(2 if IS_RAGGED else 1):
        first, last = (length, slot) if n == 0 else (-start, front)
        share = tl.cdiv(last - first, PARTS)
        begin = first + part * share
        end = tl.minimum(begin + share, last)
        store_zeros(base, step, offsets, begin, end, HEAD_DIM, WIDTH0, WIDTH1)
        if lse_ptr is not None:
            lse_base = lse_ptr + tl.cast(h if IS_RAGGED else b * num_heads + h, tl.int64) * num_tokens + start
            for row in range(begin, end, ROWS):
                rows = row + tl.arange(0, ROWS)
                tl.store(lse_base + rows, tl.full([ROWS], float("-inf"), tl.float32), mask=rows < end)


def zero_padding(problem: Problem, out: Tensor, side: Literal["q", "kv"], lse: Tensor | None = None) -> None:
    """out = 0, and lse = -inf, in the rows that no sequence has a token in.

    out is laid out as q or k, with any head dim.
    """
    x = side_of(problem, side)
    meta = problem.meta(_TILE, (out,))
    heads, head_dim = out.shape[-2:]
    kind = (_PARTS, head_dim, *split_head_dim(head_dim), x.is_ragged, x.cu_seqlens_padded is not None, meta)
    arguments = (*x.arguments, out, *row_strides(out, meta), lse, heads, *kind)
    launch(_padding_kernel, _PARTS * x.batch * heads, problem.device, _TILE, arguments)
