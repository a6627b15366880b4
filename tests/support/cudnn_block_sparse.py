"""A stand-in for `cudnn.block_sparse_attention` in plain torch, on any device, by the contract of its `api.py` in frontend 1.32.

It refuses all that the frontend refuses on sm_90, and pointers and strides that its kernels cannot read. It reads no entry past a
count, and returns NaN for a query without blocks unless such queries are announced.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor

NEG_INF = float("-inf")
ALIGNMENT = 64  # bytes: torch's on a CPU. A kernel needs 128, and on a GPU torch has 512.


def install(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Makes the stand-in a module of the installed frontend, and its version 1.32. Returns the counts of calls."""
    import cudnn

    module: Any = types.ModuleType("cudnn.block_sparse_attention")
    calls = types.SimpleNamespace(forward=0, backward=0)

    def forward(*args: Any, **options: Any) -> dict[str, Tensor]:
        calls.forward += 1
        return block_sparse_attention_forward(*args, **options)

    def backward(*args: Any, **options: Any) -> dict[str, Tensor]:
        calls.backward += 1
        return block_sparse_attention_backward(*args, **options)

    module.block_sparse_attention_forward, module.block_sparse_attention_backward = forward, backward
    monkeypatch.setattr(cudnn, "__version__", "1.32.0")
    monkeypatch.setattr(cudnn, "backend_version", lambda: 91900)
    monkeypatch.setitem(sys.modules, "cudnn.block_sparse_attention", module)
    return calls


def block_sparse_attention_forward(
    q_tensor: Tensor,
    k_tensor: Tensor,
    v_tensor: Tensor,
    q2k_block_index: Tensor,
    block_sparse_num: int | None = None,
    block_sizes: Tensor | None = None,
    q2k_block_nums: Tensor | None = None,
    *,
    sparse_block_size: int | None = None,
    allow_empty_block_nums: bool = False,
    softmax_scale: float | None = None,
    pack_gqa: bool | None = None,
    layout: str = "bhsd",
    kv_splits: int | str = 1,
    use_clc: bool | None = None,
) -> dict[str, Tensor]:
    assert block_sparse_num is block_sizes is pack_gqa is use_clc is None
    assert kv_splits == 1
    assert softmax_scale is not None
    assert sparse_block_size is not None
    _check_inputs(q_tensor, k_tensor, v_tensor, sparse_block_size)
    q, k, v = (t.transpose(1, 2) if layout == "bshd" else t for t in (q_tensor, k_tensor, v_tensor))
    assert {q.shape[-1], v.shape[-1]} <= {64, 96, 128}
    assert sparse_block_size == 128 or q.shape[2] % 64 == 0
    assert sparse_block_size == 128 or softmax_scale > 0, "the largest score is taken before the scale"
    seen = _seen(q, k, q2k_block_index, q2k_block_nums, sparse_block_size)
    scores = _scores(q, k, softmax_scale).masked_fill(~seen, NEG_INF)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().masked_fill(~seen, 0.0)
    out = (weights.to(v.dtype).float() @ _for_queries(v, q)).to(q.dtype)
    if not allow_empty_block_nums:
        out, lse = (t.masked_fill(~seen.any(-1).view(*lse.shape, *[1] * (t.dim() - 3)), float("nan")) for t in (out, lse))
    return {"o_tensor": out.transpose(1, 2).contiguous() if layout == "bshd" else out, "lse_tensor": lse}


def block_sparse_attention_backward(
    do_tensor: Tensor,
    q_tensor: Tensor,
    k_tensor: Tensor,
    v_tensor: Tensor,
    o_tensor: Tensor,
    lse_tensor: Tensor,
    q2k_block_index: Tensor,
    block_sparse_num: int | None = None,
    block_sizes: Tensor | None = None,
    q2k_block_nums: Tensor | None = None,
    *,
    softmax_scale: float | None = None,
    dq_tensor: Tensor | None = None,
    dk_tensor: Tensor | None = None,
    dv_tensor: Tensor | None = None,
    bucket_size_blocks: int | None = None,
    sparse_block_size: int | None = None,
    layout: str = "bhsd",
) -> dict[str, Tensor]:
    assert block_sparse_num is block_sizes is bucket_size_blocks is None
    assert softmax_scale is not None
    assert sparse_block_size is not None
    tensors = (do_tensor, q_tensor, k_tensor, v_tensor, o_tensor)
    _check_inputs(*tensors, sparse_block_size)
    assert q_tensor.dtype is torch.bfloat16
    assert {t.shape[-1] for t in tensors} == {128}
    written = (dq_tensor, dk_tensor, dv_tensor)
    for t, like in zip(written, (q_tensor, k_tensor, v_tensor), strict=True):
        assert t is not None
        assert (t.shape, t.dtype, t.stride(-1)) == (like.shape, like.dtype, 1)
        _check_layout(t, 16)
    dout, q, k, v, out = (t.transpose(1, 2) if layout == "bshd" else t for t in tensors)
    assert q.shape[1] == k.shape[1]
    assert (lse_tensor.shape, lse_tensor.dtype) == (q.shape[:3], torch.float32)
    assert lse_tensor.is_contiguous()
    assert not lse_tensor.requires_grad
    seen = _seen(q, k, q2k_block_index, q2k_block_nums, sparse_block_size)
    scores = _scores(q, k, softmax_scale)
    weights = (scores - lse_tensor[..., None]).exp().masked_fill(~seen, 0.0)
    delta = (dout.float() * out.float()).sum(-1, keepdim=True)
    dscores = weights * (dout.float() @ v.float().transpose(-1, -2) - delta) * softmax_scale
    gradients = (dscores @ k.float(), dscores.transpose(-1, -2) @ q.float(), weights.transpose(-1, -2) @ dout.float())
    for t, gradient in zip(written, gradients, strict=True):
        assert t is not None
        t.copy_(gradient.transpose(1, 2) if layout == "bshd" else gradient)
    return {"dq_tensor": dq_tensor, "dk_tensor": dk_tensor, "dv_tensor": dv_tensor}  # type: ignore[dict-item]


def _check_inputs(*inputs: Any) -> None:
    *tensors, size = inputs
    assert size in (64, 128)
    for t in tensors:
        assert t.dtype is tensors[0].dtype
        assert t.dtype in (torch.float16, torch.bfloat16)
        _check_layout(t, ALIGNMENT)


def _check_layout(t: Tensor, alignment: int) -> None:
    if t.data_ptr() % alignment:
        raise RuntimeError(f"Tensor data pointer is not aligned to {alignment} bytes.")
    assert not t.requires_grad, "DLPack exports no tensor that requires a gradient"
    assert t.stride(-1) == 1
    assert all(step > 0 and step % 8 == 0 for step in t.stride()[:-1]), t.stride()


def _seen(q: Tensor, k: Tensor, indices: Tensor, counts: Tensor | None, size: int) -> Tensor:
    """Returns bool [b, h, sq, skv]: whether a query's list has the key's block."""
    assert counts is not None
    (batch, heads, queries, _), keys = q.shape, k.shape[2]
    rows, columns = -(-queries // size), -(-keys // size)
    assert indices.shape[:3] == counts.shape == (batch, heads, rows)
    for t in (indices, counts):
        assert t.dtype is torch.int32
        assert t.is_contiguous()
    assert int(counts.min()) >= 0
    assert int(counts.max()) <= indices.shape[-1]
    is_listed = torch.arange(indices.shape[-1]) < counts[..., None]
    listed = torch.where(is_listed, indices, 0).long()
    assert int(listed.min()) >= 0
    assert int(listed.max()) < columns
    times = torch.zeros(batch, heads, rows, columns, dtype=torch.int64).scatter_add_(-1, listed, is_listed.long())
    assert int(times.max()) <= 1, "a block counts once"
    blocks = times.bool().repeat_interleave(size, 2)[:, :, :queries]
    return blocks.repeat_interleave(size, 3)[..., :keys]


def _for_queries(t: Tensor, q: Tensor) -> Tensor:
    return t.float().repeat_interleave(q.shape[1] // t.shape[1], 1)


def _scores(q: Tensor, k: Tensor, softmax_scale: float) -> Tensor:
    return q.float() @ _for_queries(k, q).transpose(-1, -2) * softmax_scale
