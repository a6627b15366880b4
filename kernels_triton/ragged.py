"""What batches with lengths need beside the attention kernels of sm_90: a table of the work there is, and zeros in the padding."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexattn.kernels_triton.configs import Tile
from flexattn.kernels_triton.launch import kernel, launch
from flexattn.kernels_triton.primitives import load_sequence, row_pointer, row_steps, store_zeros
from flexattn.kernels_triton.problem import Problem, row_strides

_TILE = Tile(64, 64, 4, 1)
_PARTS = 4  # programs that share the padding of one sequence and head


@kernel
def _work_table_kernel(
    cu_seqlens_q_ptr,
    cu_seqlens_q_padded_ptr,
    table_ptr,
    batch,
    num_tokens,
    max_seqlen,
    blocks,
    capacity,
    BLOCK_M: tl.constexpr,
    META: tl.constexpr,
):
    CHUNK: tl.constexpr = 64
    b = tl.program_id(0) % batch
    block = tl.program_id(0) // batch * CHUNK + tl.arange(0, CHUNK)
    before = tl.zeros([CHUNK], tl.int32)  # entries before this block's
    total = 0
    own_blocks = 0
    for first in range(0, batch, CHUNK):
        other = first + tl.arange(0, CHUNK)
        _, length, _ = load_sequence(
            cu_seqlens_q_ptr,
            cu_seqlens_q_padded_ptr,
            tl.minimum(other, batch - 1),
            batch,
            num_tokens,
            max_seqlen,
            META.IS_RAGGED_Q,
            META.HAS_GAPS_Q,
            META,
        )
        count = tl.where(other < batch, tl.cdiv(length, BLOCK_M), 0)
        total += tl.sum(count, 0)
        own_blocks += tl.sum(tl.where(other == b, count, 0), 0)
        later = tl.maximum(count[None, :] - (block + 1)[:, None], 0)
        same = (count[None, :] > block[:, None]) & (other < b)[None, :]
        before += tl.sum(later + same.to(tl.int32), 1)
    # Sequences that overlap, as only wrong cu_seqlens make them, may have more blocks than there is room for.
    tl.store(table_ptr + 2 + before, b * blocks + block, mask=(block < own_blocks) & (before < capacity))
    if tl.program_id(0) == 0:
        tl.store(table_ptr, 0)
        tl.store(table_ptr + 1, tl.minimum(total, capacity))


def work_table(problem: Problem, block_m: int) -> Tensor:
    """int32: a counter at 0, the number of entries, then b * blocks + block for each block of `block_m` queries that has one.

    blocks is what the longest sequence has; the last blocks, which have the most to do under a causal band, come first.
    """
    x = problem
    blocks = triton.cdiv(x.longest_q, block_m)
    capacity = x.batch * blocks
    if x.q.dim() == 3:
        capacity = min(capacity, x.q.shape[0] // block_m + x.batch)
    table = torch.empty(2 + capacity, dtype=torch.int32, device=x.device)
    arguments = (x.cu_seqlens_q, x.cu_seqlens_q_padded, table, x.batch, x.q.shape[-3], x.longest_q, blocks, capacity, block_m)
    launch(_work_table_kernel, x.batch * triton.cdiv(blocks, 64), x.device, _TILE, (*arguments, x.meta(_TILE)))
    return table


@kernel
def _pad_kernel(
    out_ptr,
    stride_ob,
    stride_os,
    stride_oh,
    lse_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_q_padded_ptr,
    batch,
    num_heads,
    num_tokens_q,
    max_seqlen_q,
    PARTS: tl.constexpr,
    META: tl.constexpr,
):
    ROWS: tl.constexpr = META.BLOCK_M
    part = tl.program_id(0) % PARTS
    h = tl.program_id(0) // PARTS % num_heads
    b = tl.program_id(0) // PARTS // num_heads
    start, length, slot = load_sequence(
        cu_seqlens_q_ptr, cu_seqlens_q_padded_ptr, b, batch, num_tokens_q, max_seqlen_q, META.IS_RAGGED_Q, META.HAS_GAPS_Q, META
    )
    share = tl.cdiv(slot - length, PARTS)
    begin = length + part * share
    end = tl.minimum(begin + share, slot)
    base = row_pointer(out_ptr, b, h, start, stride_ob, stride_os, stride_oh, META)
    step, offsets = row_steps(stride_os, ROWS, META)
    store_zeros(base, step, offsets, begin, end, ROWS, META.HEAD_DIM_V, META.V0, META.V1)
    lse_base = lse_ptr + tl.cast(h if META.IS_RAGGED_Q else b * num_heads + h, tl.int64) * num_tokens_q + start
    for row in range(begin, end, ROWS):
        rows = row + tl.arange(0, ROWS)
        tl.store(lse_base + rows, tl.full([ROWS], float("-inf"), tl.float32), mask=rows < end)


def pad_outputs(problem: Problem, out: Tensor, lse: Tensor) -> None:
    """out = 0 and lse = -inf in the rows that follow each sequence's last token, up to where the next one begins."""
    x = problem
    meta = x.meta(_TILE, (out,))
    lengths = (x.cu_seqlens_q, x.cu_seqlens_q_padded, x.batch, x.num_heads, x.q.shape[-3], x.longest_q)
    arguments = (out, *row_strides(out, meta), lse, *lengths, _PARTS, meta)
    launch(_pad_kernel, _PARTS * x.batch * x.num_heads, x.device, _TILE, arguments)
