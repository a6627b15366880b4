"""Stand-in for xformers' memory_efficient_attention, with the same arguments and bias classes, run by `flexattn.attention`.

The signature and the classes are those of https://github.com/facebookresearch/xformers/blob/main/xformers/ops/fmha/__init__.py, of
attn_bias.py in the same folder, and of their successor mslk.attention.fmha. Classes are recognised by name, without an import.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from flexattn.functional import attention
from flexattn.integrations.arguments import without_sign
from flexattn.validation import describe

# attn_mask_type by class, for a dense batch and for packed sequences
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
    attn_bias: object = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: object = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """Returns attention as xformers.ops.memory_efficient_attention does.

    Args:
        query: [b, sq, h, d], [b, sq, d] (one head) or [b, sq, groups, heads of a group, d]. Its dtype is float16, bfloat16,
            float32 or (on a CPU) float64.
        key, value: query's dims, with skv tokens; value's last dim may differ. With four dims, h may be a multiple of their heads.
            With groups, heads that are expanded from one are read once if no gradient is needed.
        attn_bias: None; a tensor; or an object of one of xformers' classes without pages. A tensor is added to the scaled scores
            and is differentiable. Its dtype is query's or float32. Its shape is [b, h, sq, skv], [b, sq, skv] or
            [b, groups, heads of a group, sq, skv]; any dim may be 1. With classes of packed sequences b is 1.
        p: dropout probability, in [0, 1).
        scale: scale of the scores. None: 1/sqrt(d).
        op: ignored; it selects xformers' kernels.
        output_dtype: None or query's dtype.

    Returns:
        query's shape with value's last dim, in query's dtype; 0 for a query that sees no key.

    Raises:
        NotImplementedError: if attn_bias is of a class with pages or of an unknown class, or output_dtype is another.
        ValueError, TypeError: if shapes or dtypes do not match, or if sequences of attn_bias overlap or do not end with query or
            key; also as `flexattn.attention`.
        BackendError: if no backend supports the call.
    """
    if output_dtype not in (None, query.dtype):
        raise NotImplementedError(f"output_dtype is {output_dtype}; accepted: None or {query.dtype}; convert the result")
    q, k, v = _four_dims(query, key, value)
    q, scale = without_sign(q, scale)
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
                "with equally many dims in query, key and value"
            )
    if query.dim() == 3:
        return query.unsqueeze(2), key.unsqueeze(2), value.unsqueeze(2)
    if query.dim() == 4:
        return query, key, value
    if not query.shape[2:4] == key.shape[2:4] == value.shape[2:4]:
        shapes = ", ".join(str(tuple(x.shape)) for x in tensors)
        raise ValueError(f"query, key and value have shapes {shapes}; accepted: equal groups and heads of a group, expanded")
    return query.flatten(2, 3), *_heads(key, value)


def _heads(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Returns key and value [b, s, groups, heads of a group, d] with one head per group, or one head per head of each group.

    One head per group would assign all of an expanded tensor's gradient to its first head, so it is only used without gradients.
    """
    needs_gradient = torch.is_grad_enabled() and (key.requires_grad or value.requires_grad)
    if not needs_gradient and key.stride(3) == value.stride(3) == 0:
        return key[:, :, :, 0], value[:, :, :, 0]
    return key.flatten(2, 3), value.flatten(2, 3)


def _dense(attn_bias: Any, name: str, query: Tensor) -> dict[str, Any]:
    """Returns `attention`'s arguments for an attn_bias without packed sequences; name is its class's name."""
    if attn_bias is None:
        return {}
    if isinstance(attn_bias, Tensor):
        return _bias_arguments(attn_bias, query)
    if name not in _DENSE:
        raise NotImplementedError(
            f"attn_bias is a {name}; accepted: None, a tensor, {', '.join((*_DENSE, *_PACKED))}; gather keys in "
            "pages first; for any other class pass attn_bias.materialize(shape)"
        )
    arguments = {"attn_mask_type": _DENSE[name], "window_size": _window(attn_bias)}
    return arguments | _bias_arguments(attn_bias._bias, query) if name == "LowerTriangularMaskWithTensorBias" else arguments


def _bias_arguments(bias: Tensor, query: Tensor) -> dict[str, object]:
    if query.dim() == 3:
        bias = bias.unsqueeze(1)
    elif query.dim() == 5:
        bias = bias.expand(-1, *query.shape[2:4], -1, -1).flatten(1, 2)
    return {"bias_type": "post_scale_bias", "bias": bias}


def _window(attn_bias: object) -> tuple[int, int]:
    """Returns (left, right) for a class with a window; `_window_size` includes the query's own key."""
    size = getattr(attn_bias, "_window_size", None)
    if size is not None:
        return size - 1, 0
    return getattr(attn_bias, "window_left", -1), getattr(attn_bias, "window_right", -1)


def _packed(attn_bias: Any, mask_type: str, q: Tensor, k: Tensor) -> dict[str, object]:
    """Returns `attention`'s arguments for an attn_bias of packed sequences."""
    info_q, info_k = attn_bias.q_seqinfo, attn_bias.k_seqinfo
    for name, x, info in (("query", q, info_q), ("key", k, info_k)):
        if info.seqstart_py[-1] != x.shape[1]:
            raise ValueError(f"attn_bias ends at {name} {info.seqstart_py[-1]}; accepted: {x.shape[1]}, the end of {name}")
    arguments = {
        "qkv_format": "thd",
        "attn_mask_type": mask_type,
        "window_size": _window(attn_bias),
        "cu_seqlens_q": info_q.seqstart.to(q.device),
        "cu_seqlens_kv": info_k.seqstart.to(q.device),
        "max_seqlen_q": info_q.max_seqlen,
        "max_seqlen_kv": info_k.max_seqlen,
    }
    if hasattr(info_k, "seqlen"):  # each slot has this many keys, from its start on
        _refuse_overlap(info_k.seqstart_py, info_k.seqlen_py)
        lengths = info_k.seqlen.to(q.device)
        arguments["cu_seqlens_kv"] = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        arguments["cu_seqlens_kv_padded"] = info_k.seqstart.to(q.device)
    return arguments


def _refuse_overlap(starts: list[int], lengths: list[int]) -> None:
    slots = sorted((start, start + length) for start, length in zip(starts, lengths, strict=False) if length)
    for (start, end), (following, _) in pairwise(slots):
        if end > following:
            raise ValueError(
                f"attn_bias has keys {start} to {end} in one sequence and keys from {following} on in another; accepted: sequences "
                "that do not overlap"
            )
