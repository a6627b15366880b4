"""xformers' memory_efficient_attention, argument for argument, run by `flexattn.attention`, with xformers' bias classes.

The signature and the classes are those of https://github.com/facebookresearch/xformers/blob/main/xformers/ops/fmha/__init__.py and
attn_bias.py beside it, and of mslk.attention.fmha, where they went. The classes are known by their names: neither is imported here.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from flexattn.functional import attention
from flexattn.validation import describe

# attn_mask_type by class, of a dense batch and of sequences packed one after another
_DENSE = {
    "LowerTriangularMask": "causal",
    "LowerTriangularMaskWithTensorBias": "causal",
    "LowerTriangularFromBottomRightMask": "causal_bottom_right",
    "LowerTriangularFromBottomRightLocalAttentionMask": "causal_bottom_right",
    "LocalAttentionFromBottomRightMask": "no_mask",
}
_PACKED = {
    "BlockDiagonalMask": "padding",
    "BlockDiagonalCausalMask": "padding_causal",
    "BlockDiagonalCausalFromBottomRightMask": "padding_causal_bottom_right",
    "BlockDiagonalCausalLocalAttentionMask": "padding_causal",
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": "padding_causal_bottom_right",
    "BlockDiagonalPaddedKeysMask": "padding",
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": "padding_causal_bottom_right",
    "BlockDiagonalLocalAttentionPaddedKeysMask": "padding",
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": "padding_causal_bottom_right",
    "BlockDiagonalGappyKeysMask": "padding",
    "BlockDiagonalCausalWithOffsetGappyKeysMask": "padding_causal_bottom_right",
    "BlockDiagonalLocalAttentionFromBottomRightGappyKeysMask": "padding",
}


def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """Returns attention as xformers.ops.memory_efficient_attention does.

    Args:
        query: [b, sq, h, d], [b, sq, d] (one head) or [b, sq, groups, heads of a group, d]; float16, bfloat16, float32 or (on a
            CPU) float64.
        key, value: as query, with skv tokens; value's last dim may be another. With groups, heads that are expanded from one are
            read once where they need no gradient. With four dims h may be a multiple of their heads.
        attn_bias: None; a tensor that is added to the scaled scores, query's dtype or float32, [b, h, sq, skv], [b, sq, skv] or
            [b, groups, heads of a group, sq, skv], where any dim may be 1 instead, differentiable; or an object of one of xformers'
            classes without pages. With those of packed sequences b is 1.
        p: the probability of dropout, in [0, 1).
        scale: of the scores; None is 1/sqrt(d).
        op: which of xformers' kernels were to run. Not used.
        output_dtype: None or query's dtype.

    Returns:
        query's shape with value's last dim, in query's dtype; 0 for a query that sees no key.

    Raises:
        NotImplementedError: attn_bias of a class with pages, or of one that is not known; another output_dtype.
        ValueError, TypeError: shapes or dtypes that do not fit together; sequences of attn_bias that do not end where query or key
            does, or that overlap; what `flexattn.attention` raises.
        BackendError: no backend can run the call.
    """
    if output_dtype not in (None, query.dtype):
        raise NotImplementedError(f"output_dtype is {output_dtype}; accepted: None or query's, {query.dtype}; convert the result")
    q, k, v = _four_dims(query, key, value)
    if scale is not None and scale < 0:
        q, scale = -q, -scale
    arguments: dict[str, Any] = {"softmax_scale": scale, "dropout_p": p}
    name = type(attn_bias).__name__
    if name in _PACKED:
        if q.shape[0] != 1 or k.shape[0] != 1:
            raise ValueError(f"query and key have batches {q.shape[0]} and {k.shape[0]} with a {name}; accepted: 1")
        arguments |= _packed(attn_bias, _PACKED[name], q, k)
        out = attention(q[0], k[0], v[0], **arguments)[None]
    else:
        arguments |= _dense(attn_bias, name, query)
        out = attention(q, k, v, **arguments)
    return out.reshape(*query.shape[:-1], value.shape[-1])  # type: ignore[no-any-return]


def _four_dims(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns all three as [b, s, h, d]."""
    tensors = (query, key, value)
    for name, x in zip(("query", "key", "value"), tensors, strict=True):
        if not isinstance(x, Tensor) or x.dim() not in (3, 4, 5) or x.dim() != query.dim():
            raise ValueError(
                f"{name} is {describe(x)}; accepted: [b, tokens, d], [b, tokens, heads, d] or [b, tokens, groups, heads, d], "
                "the same number of dims for query, key and value"
            )
    if query.dim() == 3:
        return query.unsqueeze(2), key.unsqueeze(2), value.unsqueeze(2)
    if query.dim() == 4:
        return query, key, value
    if not query.shape[2:4] == key.shape[2:4] == value.shape[2:4]:
        shapes = ", ".join(str(tuple(x.shape)) for x in tensors)
        raise ValueError(f"query, key and value have shapes {shapes}; accepted: the same groups and heads of a group, expanded")
    return query.flatten(2, 3), *_heads(key, value)


def _heads(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Returns key and value [b, s, groups, heads of a group, d] with one head for each group, or for each head of each group.

    One for each group would give all of an expanded tensor's gradient to its first head.
    """
    is_trained = torch.is_grad_enabled() and (key.requires_grad or value.requires_grad)
    if not is_trained and key.stride(3) == value.stride(3) == 0:
        return key[:, :, :, 0], value[:, :, :, 0]
    return key.flatten(2, 3), value.flatten(2, 3)


def _dense(attn_bias: Any, name: str, query: Tensor) -> dict[str, Any]:
    """Returns attention's arguments for an attn_bias that is no packed sequences, whose class is called name."""
    if attn_bias is None:
        return {}
    if isinstance(attn_bias, Tensor):
        return _added(attn_bias, query)
    if name not in _DENSE:
        raise NotImplementedError(
            f"attn_bias is a {name}; accepted: None, a tensor, {', '.join((*_DENSE, *_PACKED))}; for keys in "
            "pages gather them first, for any other class pass attn_bias.materialize(shape)"
        )
    arguments = {"attn_mask_type": _DENSE[name], "window_size": _window(attn_bias)}
    return arguments | _added(attn_bias._bias, query) if name == "LowerTriangularMaskWithTensorBias" else arguments


def _added(bias: Tensor, query: Tensor) -> dict[str, Any]:
    if query.dim() == 3:
        bias = bias.unsqueeze(1)
    elif query.dim() == 5:
        bias = bias.expand(-1, *query.shape[2:4], -1, -1).flatten(1, 2)
    return {"bias_type": "post_scale_bias", "bias": bias}


def _window(attn_bias: Any) -> tuple[int, int]:
    """Returns (left, right) of a class that has a window; `_window_size` counts the query's own key."""
    size = getattr(attn_bias, "_window_size", None)
    if size is not None:
        return size - 1, 0
    return getattr(attn_bias, "window_left", -1), getattr(attn_bias, "window_right", -1)


def _packed(attn_bias: Any, mask_type: str, q: Tensor, k: Tensor) -> dict[str, Any]:
    """Returns attention's arguments for an attn_bias of packed sequences."""
    of_q, of_k = attn_bias.q_seqinfo, attn_bias.k_seqinfo
    for name, x, info in (("query", q, of_q), ("key", k, of_k)):
        if info.seqstart_py[-1] != x.shape[1]:
            raise ValueError(f"attn_bias ends at {name} {info.seqstart_py[-1]}; accepted: {x.shape[1]}, where {name} ends")
    arguments = {
        "qkv_format": "thd",
        "attn_mask_type": mask_type,
        "window_size": _window(attn_bias),
        "cu_seqlens_q": of_q.seqstart.to(q.device),
        "cu_seqlens_kv": of_k.seqstart.to(q.device),
        "max_seqlen_q": of_q.max_seqlen,
        "max_seqlen_kv": of_k.max_seqlen,
    }
    if hasattr(of_k, "seqlen"):  # so many tokens of each slot, or from each start on, are keys
        _refuse_overlap(of_k.seqstart_py, of_k.seqlen_py)
        lengths = of_k.seqlen.to(q.device)
        arguments["cu_seqlens_kv"] = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        arguments["cu_seqlens_kv_padded"] = of_k.seqstart.to(q.device)
    return arguments


def _refuse_overlap(starts: list[int], lengths: list[int]) -> None:
    slots = sorted((start, start + length) for start, length in zip(starts, lengths, strict=False) if length)
    for (start, end), (following, _) in pairwise(slots):
        if end > following:
            raise ValueError(
                f"attn_bias has keys {start} to {end} in one sequence and {following} and on in another; accepted: sequences that "
                "do not overlap"
            )
