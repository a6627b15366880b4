"""Launchers of cuDNN's block-sparse attention: CuTe DSL kernels in its frontend, which compute the blocks that lists name.

The contract is that of `cudnn/block_sparse_attention/api.py` in frontend 1.32. The first call of a kind compiles its kernels, which
takes seconds. Later calls do not wait for the device, so a CUDA graph can contain them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_ALIGNMENT = 128  # bytes: the kernel for blocks of 64 refuses tensors at other addresses.
_ROW = 8  # elements of 16 bytes, of which each stride is a multiple.


class Problem(NamedTuple):
    """q is [b, sq, h, d_qk], k is [b, skv, h_kv, d_qk] and v is [b, skv, h_kv, d_v], with any strides."""

    q: Tensor
    k: Tensor
    v: Tensor
    lists: Sequence[Tensor]  # counts and ascending indices of blocks, of two kinds whose keys are all visible.
    size: int  # tokens of a block.
    softmax_scale: float
    layout: str  # the format of out in memory, "bshd" or "bhsd".

    @property
    def is_empty(self) -> bool:
        return 0 in (*self.q.shape, *self.k.shape)


def forward(x: Problem) -> tuple[Tensor, Tensor]:
    """Returns out as [b, sq, h, d_v], a view of dense memory, and lse as fp32 [b, h, sq]."""
    from cudnn.block_sparse_attention import block_sparse_attention_forward  # here, because its import takes seconds.

    if x.is_empty:
        batch, queries, heads, _ = x.q.shape
        lse = x.q.new_full((batch, heads, queries), float("-inf"), dtype=torch.float32)
        return x.q.new_zeros(batch, queries, heads, x.v.shape[-1]), lse
    q, scale = _with_positive_scale(x)
    tensors = [_view(_readable(t), x.layout) for t in (q, x.k, x.v)]
    counts, indices = blocks_of(x)
    result = block_sparse_attention_forward(
        *tensors,
        q2k_block_index=indices,
        q2k_block_nums=counts,
        sparse_block_size=x.size,
        allow_empty_block_nums=True,
        softmax_scale=scale,
        layout=x.layout,
    )
    return _view(result["o_tensor"], x.layout), result["lse_tensor"]


def backward(x: Problem, out: Tensor, lse: Tensor, dout: Tensor, gradients: tuple[Tensor, Tensor, Tensor]) -> None:
    """Writes dq, dk and dv, with the dims of q, k and v. `out` and `lse` come from a forward of any kernel."""
    from cudnn.block_sparse_attention import block_sparse_attention_backward

    if x.is_empty:
        for gradient in gradients:
            gradient.zero_()
        return
    q, scale = _with_positive_scale(x)
    written = [t if _fits(t) else torch.empty_like(t, memory_format=torch.contiguous_format) for t in gradients]
    dq, dk, dv = written
    counts, indices = blocks_of(x)
    block_sparse_attention_backward(
        *(_readable(t) for t in (dout, q, x.k, x.v, out)),
        lse.detach().contiguous(),
        q2k_block_index=indices,
        q2k_block_nums=counts,
        softmax_scale=scale,
        dq_tensor=dq,
        dk_tensor=dk,
        dv_tensor=dv,
        sparse_block_size=x.size,
        layout="bshd",
    )
    if not x.softmax_scale:
        dq.zero_()
    for target, t in zip(gradients, written, strict=True):
        if t is not target:
            target.copy_(t)


def blocks_of(x: Problem) -> tuple[Tensor, Tensor]:
    """Returns counts [b, h, query blocks] and indices [b, h, query blocks, key blocks] of the blocks of both kinds.

    A list may be for more tokens than a call has, so blocks past its last key are left out. Nothing waits for the device.
    """
    (batch, queries, heads, _), keys = x.q.shape, x.k.shape[1]
    rows, columns = -(-queries // x.size), -(-keys // x.size)
    counts, indices, more_counts, more_indices = (t[:, :, :rows] for t in x.lists)
    place = torch.arange(columns, device=x.q.device)
    if indices.shape[-1] > columns:
        indices, more_indices = indices[..., :columns], more_indices[..., :columns]
        counts = ((place < counts[..., None]) & (indices < columns)).sum(-1)
        more_counts = ((place < more_counts[..., None]) & (more_indices < columns)).sum(-1)
    after = place - counts[..., None]  # the place in the second list, if it is not negative.
    indices = torch.where(after < 0, indices, more_indices.gather(-1, after.clamp(min=0)))
    counts = (counts + more_counts).clamp(max=columns).int()
    return counts.expand(batch, heads, -1).contiguous(), indices.expand(batch, heads, -1, -1).contiguous()


def _with_positive_scale(x: Problem) -> tuple[Tensor, float]:
    """Returns q and the scale. A scale of 0 becomes a q of 0: a kernel scales hidden scores, which are -inf."""
    return (x.q, x.softmax_scale) if x.softmax_scale else (torch.zeros_like(x.q), 1.0)


def _fits(t: Tensor) -> bool:
    """Returns whether a kernel can access `t`: rows on 16-byte boundaries, and no expanded dim."""
    *steps, last = t.stride()
    return last == 1 and all(step > 0 and step % _ROW == 0 for step in steps) and t.data_ptr() % _ALIGNMENT == 0


def _readable(t: Tensor) -> Tensor:
    """Returns `t` for a kernel, or a copy if it cannot access `t`. DLPack exports no tensor that requires a gradient."""
    t = t.detach()
    return t if _fits(t) else t.clone(memory_format=torch.contiguous_format)


def _view(t: Tensor, layout: str) -> Tensor:
    """Returns a [b, s, h, d] tensor in `layout`, or the inverse."""
    return t.transpose(1, 2) if layout == "bhsd" else t
