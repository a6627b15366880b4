"""Stand-in for cuEquivariance's triangle_attention, with the same arguments, run by `flexattn.attention`.

The signature is that of cuequivariance_ops_torch 0.13. https://docs.nvidia.com/cuda/cuequivariance/ describes the function.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.functional import attention
from flexattn.validation import describe


class TriangleAttention(NamedTuple):
    """Results of `triangle_attention` with return_aux."""

    out: Tensor
    lse: Tensor
    max: Tensor


def triangle_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    return_aux: bool = False,
    kv_lengths: Tensor | None = None,
) -> Tensor | TriangleAttention:
    """Returns attention of the rows of a pair representation, as cuequivariance_ops_torch.triangle_attention does.

    No tensor is repeated for the N rows. If the dims B and N of q, k or v are not adjacent in memory and B is above 1, that tensor
    is copied.

    Args:
        q: [B, N, H, Sq, D], in float16, bfloat16, float32 or (on a CPU) float64. If q, k, v, bias, mask or kv_lengths has fewer
            dims, dims of size 1 are added in front.
        k, v: [B, N, H, Skv, D], in q's dtype. The last dim of v may differ.
        bias: [B, 1, H, Sq, Skv], of any floating-point dtype, added to the scaled scores. Its gradient is the sum over the N rows.
        mask: [B, N, 1, 1, Skv]: True, or another number than 0, for the keys that all queries of a row see.
        scale: scale of the scores, at least 0. None: 1/sqrt(D).
        return_aux: if True, lse and the largest score of each query are returned too. The largest scores take a second pass
            over the scores.
        kv_lengths: int32 [B, N, 1, 1, 1]: the number of keys that all queries of a row see. Not with mask.

    Returns:
        out [B, N, H, Sq, D], contiguous. With return_aux the tuple (out, lse, max), whose lse and max are float32 [B, N, H, Sq].
        out and lse are differentiable with respect to q, k, v and bias. If a row sees no key, its out is 0, and its lse and max are
        -inf. (cuEquivariance returns a mean of v there, because its mask adds -1e9.)

    Raises:
        ValueError, TypeError: if shapes or dtypes do not match, or mask and kv_lengths are both given; also as
            `flexattn.attention`.
        BackendError: if no backend supports the call.
    """
    q, k, v, bias = (_five_dims(*item) for item in (("q", q), ("k", k), ("v", v), ("bias", bias)))
    lead, queries, keys = q.shape[:2], q.shape[3], k.shape[3]
    _check("k", k, (*q.shape[:3], keys, q.shape[4]), "[B, N, H, Skv, D]")
    _check("v", v, (*q.shape[:3], keys, v.shape[4]), "[B, N, H, Skv, D]")
    _check("bias", bias, (lead[0], 1, q.shape[2], queries, keys), "[B, 1, H, Sq, Skv]")
    if bias.dtype not in (q.dtype, torch.float32):
        bias = bias.float()
    bias = bias[: lead[0] if lead[1] else 0]  # one for each batch entry, of which there are none without rows
    call: dict[str, Any] = {"bias": bias[:, 0], "softmax_scale": scale}
    if mask is not None and kv_lengths is not None:
        raise ValueError("mask and kv_lengths are given. Pass one of them: a mask may hide the keys beyond each length too.")
    if mask is not None:
        mask = _five_dims("mask", mask)
        _check("mask", mask, (*lead, 1, 1, keys), "[B, N, 1, 1, Skv]")
        call["mask"] = mask.bool().flatten(0, 1)
    if kv_lengths is not None:
        kv_lengths = _five_dims("kv_lengths", kv_lengths)
        _check("kv_lengths", kv_lengths, (*lead, 1, 1, 1), "[B, N, 1, 1, 1]")
        if kv_lengths.dtype != torch.int32:
            raise TypeError(f"kv_lengths has dtype {kv_lengths.dtype}; accepted: torch.int32. Convert it with kv_lengths.int().")
        call |= {"attn_mask_type": "padding", "seqused_kv": kv_lengths.flatten().contiguous()}
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    if not return_aux:
        only_out: Tensor = attention(*rows, qkv_format="bhsd", **call).unflatten(0, lead)
        return only_out
    from flexattn.statistics import AuxRequest  # a late import: few calls need it

    out, aux = attention(*rows, qkv_format="bhsd", return_aux=AuxRequest(lse=True, max_scores=True), **call)
    assert aux.lse is not None
    assert aux.max_scores is not None
    results = (out, aux.lse, aux.max_scores.detach())
    return TriangleAttention(*(x.unflatten(0, lead) for x in results))  # type: ignore[no-untyped-call]


def _five_dims(name: str, x: Tensor) -> Tensor:
    if not isinstance(x, Tensor) or not 1 <= x.dim() <= 5:
        raise TypeError(f"{name} is {describe(x)}; accepted: a tensor of at most 5 dims")
    return x[(None,) * (5 - x.dim())]


def _check(name: str, x: Tensor, shape: tuple[int, ...], dims: str) -> None:
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; accepted: {dims} = {list(shape)}, the sizes of q and k")
