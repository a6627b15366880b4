"""The tensors of a workload, and the arguments of flexattn and its peers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.bench.counts import band_of
from flexattn.bench.shapes import Workload

SOFTCAP = 50.0  # cap of Gemma 2's attention scores

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Tensors(NamedTuple):
    """q, k, v, dout: [b, s, h, d], or [total, h, d] for thd; standard normal. The others are None if the workload has none."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    cu_seqlens_q: Tensor | None
    cu_seqlens_kv: Tensor | None
    softmax_offset: Tensor | None  # fp32 [h]
    alibi_slopes: Tensor | None  # fp32 [h]
    bias_table: Tensor | None  # q's dtype, [h, len_q + len_kv - 1]: the bias of each distance i - j, from -(len_kv - 1) on
    dense_bias: Tensor | None = None  # q's dtype, [biases, h, len_q, len_kv]
    sees: Tensor | None = None  # bool, [b, len_kv]: False for keys that are hidden from all queries


def make_tensors(workload: Workload, device: str, seed: int = 0) -> Tensors:
    """Standard normal numbers: the rate of a power-limited GPU depends on its data."""
    generator = torch.Generator(device).manual_seed(seed) if device != "meta" else None  # which has no numbers to draw
    dtype = getattr(torch, workload.dtype)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        if device == "meta":  # its randn takes 0.3 ms, in Python
            return torch.empty(shape, dtype=dtype, device=device)
        return torch.randn(shape, dtype=dtype, device=device, generator=generator)

    def offsets(lengths: tuple[int, ...]) -> Tensor | None:
        return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device) if workload.is_ragged else None

    def tokens(lengths: tuple[int, ...], heads: int, dim: int) -> Tensor:
        return normal(*((sum(lengths),) if workload.is_ragged else (len(lengths), lengths[0])), heads, dim)

    heads = workload.num_heads
    slopes = torch.tensor([2 ** (-8 * (h + 1) / heads) for h in range(heads)], device=device) if workload.score == "alibi" else None
    distances = workload.seqlen_q + workload.seqlen_kv - 1
    is_dense = workload.score == "dense_bias"
    sees = None
    if workload.hidden_keys:
        shape = workload.batch, workload.seqlen_kv
        sees = torch.rand(shape, device=device, generator=generator) >= workload.hidden_keys
        sees[:, 0] = True  # so that each query sees a key
    return Tensors(
        q=tokens(workload.lengths_q, heads, workload.head_dim_qk),
        k=tokens(workload.lengths_kv, workload.num_heads_kv, workload.head_dim_qk),
        v=tokens(workload.lengths_kv, workload.num_heads_kv, workload.head_dim_v),
        dout=tokens(workload.lengths_q, heads, workload.head_dim_v),
        cu_seqlens_q=offsets(workload.lengths_q),
        cu_seqlens_kv=offsets(workload.lengths_kv),
        softmax_offset=normal(heads, dtype=torch.float32) if workload.softmax_type == "learnable" else None,
        alibi_slopes=slopes,
        bias_table=normal(heads, distances) if workload.score == "relative_bias" else None,
        dense_bias=normal(workload.biases, heads, workload.seqlen_q, workload.seqlen_kv) if is_dense else None,
        sees=sees,
    )


def bias_of(tensors: Tensors, workload: Workload, heads: slice = slice(None)) -> Tensor | None:
    """Returns the dense bias, or the relative bias as a matrix: [1 | b, h, sq, skv].

    A matrix that more than one sequence, but not all, share is copied for each, because SDPA and cuDNN need it so.
    """
    if tensors.dense_bias is not None:
        bias = tensors.dense_bias[:, heads]
        return bias.repeat_interleave(workload.batch // workload.biases, 0) if workload.repeats_bias else bias
    if tensors.bias_table is None:
        return None
    i = torch.arange(workload.seqlen_q, device=tensors.q.device)[:, None]
    j = torch.arange(workload.seqlen_kv, device=tensors.q.device)
    return tensors.bias_table[heads][None, :, i - j + workload.seqlen_kv - 1]


def arguments_of(workload: Workload, tensors: Tensors) -> dict[str, Any]:
    """Returns arguments of `flexattn.attention` that change scores by its own options and not by a score_mod."""
    arguments: dict[str, Any] = {
        "qkv_format": workload.qkv_format,
        "attn_mask_type": workload.attn_mask_type,
        "window_size": workload.window_size,
        "softmax_type": workload.softmax_type,
    }
    if workload.is_ragged:
        arguments |= {"cu_seqlens_q": tensors.cu_seqlens_q, "cu_seqlens_kv": tensors.cu_seqlens_kv}
        arguments |= {"max_seqlen_q": workload.seqlen_q, "max_seqlen_kv": workload.seqlen_kv}
    if tensors.softmax_offset is not None:
        arguments["softmax_offset"] = tensors.softmax_offset
    if workload.score == "softcap":
        arguments["softcap"] = SOFTCAP
    if tensors.alibi_slopes is not None:
        arguments |= {"bias_type": "alibi", "alibi_slopes": tensors.alibi_slopes}
    bias = bias_of(tensors, workload) if tensors.dense_bias is None else tensors.dense_bias
    if bias is not None:
        arguments |= {"bias_type": "post_scale_bias", "bias": bias}
    if tensors.sees is not None:
        arguments["mask"] = tensors.sees[:, None, None]
    return arguments


def score_mod_of(workload: Workload, tensors: Tensors) -> ScoreMod | None:
    """Returns the workload's score as FlexAttention's users write it; positions count from 0 in q and in k."""
    last_key = workload.seqlen_kv - 1
    slopes, table, bias, sees = tensors.alibi_slopes, tensors.bias_table, tensors.dense_bias, tensors.sees
    sequences = workload.batch // workload.biases  # that share a matrix of the bias

    def softcap(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return SOFTCAP * torch.tanh(score / SOFTCAP)

    def alibi(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        assert slopes is not None
        return score + slopes[h] * (j - i)  # causal: j <= i

    def relative_bias(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        assert table is not None
        return score + table[h, i - j + last_key]

    def dense_bias(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        assert bias is not None
        return score + bias[b // sequences, h, i, j]

    named = {"softcap": softcap, "alibi": alibi, "relative_bias": relative_bias, "dense_bias": dense_bias}
    changed = named.get(workload.score)
    if sees is None:
        return changed

    def hidden(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.where(sees[b, j], score if changed is None else changed(score, b, h, i, j), float("-inf"))

    return hidden


def mask_mod_of(workload: Workload, tensors: Tensors) -> MaskMod | None:
    """Returns the band, and the documents of a packed batch, as a mask_mod of FlexAttention; None if everything is visible.

    A packed batch is one sequence, [1, h, total, d]. A diagonal stays in place in a document if its lengths of q and k are equal.
    """
    left, right, bottom_right = band_of(workload)
    shift = workload.seqlen_kv - workload.seqlen_q if bottom_right and not workload.is_ragged else 0
    tests: list[MaskMod] = []
    if right is not None:
        tests.append(lambda b, h, i, j: j <= i + shift + right)
    if left is not None:
        tests.append(lambda b, h, i, j: j >= i + shift - left)
    if tensors.cu_seqlens_q is not None:
        assert workload.lengths_q == workload.lengths_kv
        lengths = torch.tensor(workload.lengths_q, device=tensors.q.device)
        document = torch.repeat_interleave(torch.arange(workload.batch, device=tensors.q.device), lengths)
        tests.append(lambda b, h, i, j: document[i] == document[j])
    if not tests:
        return None

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return functools.reduce(torch.logical_and, [test(b, h, i, j) for test in tests])

    return mask_mod
