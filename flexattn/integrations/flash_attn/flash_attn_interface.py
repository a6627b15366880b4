"""FlashAttention 2's functions under their own names and signatures, run by `flexattn.attention`.

The signatures are those of https://github.com/Dao-AILab/flash-attention/blob/main/flash_attn/flash_attn_interface.py. q, k and v
are [b, s, h, d], packed sequences [total, h, d]; masks, windows and ALiBi are aligned to the bottom-right corner.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from flexattn.functional import attention
from flexattn.packed import unpack

Result = Tensor | tuple[Tensor, Tensor, None]


class _Options(NamedTuple):
    """The arguments that all functions share, after FlashAttention's names."""

    dropout_p: float
    softmax_scale: float | None
    causal: bool
    window_size: tuple[int, int]
    softcap: float
    alibi_slopes: Tensor | None
    deterministic: bool
    return_attn_probs: bool


def _named(options: _Options, prefix: str = "") -> dict[str, Any]:
    """Returns the options as `attention` names them."""
    left, right = (-1 if side < 0 else int(side) for side in options.window_size)
    if options.causal:
        mask, right = prefix + "causal_bottom_right", 0
    else:
        mask = "padding" if prefix else "no_mask"
    return {
        "attn_mask_type": mask,
        "window_size": (left, right),
        "softmax_scale": options.softmax_scale,
        "softcap": options.softcap,
        "dropout_p": options.dropout_p,
        "bias_type": "no_bias" if options.alibi_slopes is None else "alibi",
        "alibi_slopes": options.alibi_slopes,
        "deterministic": options.deterministic or None,
    }


def _attend(tensors: tuple[Tensor, ...], options: _Options, packed: dict[str, Any] | None = None) -> Result:
    if options.return_attn_probs and options.dropout_p > 0.0:
        raise NotImplementedError(
            f"return_attn_probs is True and dropout_p is {options.dropout_p}; accepted: return_attn_probs with dropout_p 0, which "
            "gives (out, softmax_lse, None), as the matrix with dropout is never made; leave return_attn_probs out"
        )
    q, k, v = tensors
    named = _named(options, "padding_" if packed else "") | (packed or {})
    if not options.return_attn_probs:
        result: Tensor = attention(q, k, v, **named)
        return result
    out, lse = attention(q, k, v, return_lse=True, **named)
    return out, lse, None


def _packed(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int) -> dict[str, Any]:
    return {
        "qkv_format": "thd",
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_kv": cu_seqlens_k,
        "max_seqlen_q": int(max_seqlen_q),
        "max_seqlen_kv": int(max_seqlen_k),
    }


def refuse(name: str, came: object, instead: str) -> None:
    """Raises NotImplementedError for an argument that is given and not served.

    Args:
        name: the argument's.
        came: what was given; None passes.
        instead: the way out, for the text.
    """
    if came is not None:
        raise NotImplementedError(f"{name} is given ({type(came).__name__}) and is not there yet; accepted: None; {instead}")


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Returns attention of a dense batch.

    Args:
        q, k, v: [b, sq, h, d], [b, sk, h_k, d] and [b, sk, h_k, d_v].
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic: as FlashAttention's; a side of
            window_size below 0 is open, alibi_slopes is float32 [h] or [b, h].
        return_attn_probs: whether to return (out, softmax_lse, None); softmax_lse is float32 [b, h, sq].

    Raises:
        NotImplementedError: return_attn_probs with dropout_p above 0.
        ValueError, TypeError, BackendError: as `flexattn.attention`.
    """
    options = _Options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return _attend((q, k, v), options)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Returns attention of a dense batch, k and v in one tensor.

    Args:
        q, kv: [b, sq, h, d] and [b, sk, 2, h_k, d].
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic: as FlashAttention's; a side of
            window_size below 0 is open, alibi_slopes is float32 [h] or [b, h].
        return_attn_probs: whether to return (out, softmax_lse, None); softmax_lse is float32 [b, h, sq].

    Raises:
        NotImplementedError: return_attn_probs with dropout_p above 0.
        ValueError, TypeError, BackendError: as `flexattn.attention`.
    """
    options = _Options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return _attend((q, *unpack(kv, 2)), options)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Returns attention of a dense batch, q, k and v in one tensor.

    Args:
        qkv: [b, s, 3, h, d].
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic: as FlashAttention's; a side of
            window_size below 0 is open, alibi_slopes is float32 [h] or [b, h].
        return_attn_probs: whether to return (out, softmax_lse, None); softmax_lse is float32 [b, h, s].

    Raises:
        NotImplementedError: return_attn_probs with dropout_p above 0.
        ValueError, TypeError, BackendError: as `flexattn.attention`.
    """
    options = _Options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return _attend(tuple(unpack(qkv, 2)), options)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Result:
    """Returns attention of packed sequences.

    Args:
        q, k, v: [total_q, h, d], [total_k, h_k, d] and [total_k, h_k, d_v].
        cu_seqlens_q, cu_seqlens_k: int32 [b + 1], where each sequence starts, and the end.
        max_seqlen_q, max_seqlen_k: the longest lengths.
        block_table: None.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic: as FlashAttention's; a side of
            window_size below 0 is open, alibi_slopes is float32 [h] or [b, h].
        return_attn_probs: whether to return (out, softmax_lse, None); softmax_lse is float32 [h, total_q].

    Raises:
        NotImplementedError: return_attn_probs with dropout_p above 0, or block_table.
        ValueError, TypeError, BackendError: as `flexattn.attention`.
    """
    options = _Options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    refuse("block_table", block_table, "gather the pages")
    return _attend((q, k, v), options, _packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k))


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Returns attention of packed sequences, k and v in one tensor.

    Args:
        q, kv: [total_q, h, d] and [total_k, 2, h_k, d].
        cu_seqlens_q, cu_seqlens_k: int32 [b + 1], where each sequence starts, and the end.
        max_seqlen_q, max_seqlen_k: the longest lengths.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic: as FlashAttention's; a side of
            window_size below 0 is open, alibi_slopes is float32 [h] or [b, h].
        return_attn_probs: whether to return (out, softmax_lse, None); softmax_lse is float32 [h, total_q].

    Raises:
        NotImplementedError: return_attn_probs with dropout_p above 0.
        ValueError, TypeError, BackendError: as `flexattn.attention`.
    """
    options = _Options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return _attend((q, *unpack(kv, 1)), options, _packed(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k))


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Returns attention of packed sequences, q, k and v in one tensor.

    Args:
        qkv: [total, 3, h, d].
        cu_seqlens, max_seqlen: int32 [b + 1], where each sequence starts, and the end; the longest length.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic: as FlashAttention's; a side of
            window_size below 0 is open, alibi_slopes is float32 [h] or [b, h].
        return_attn_probs: whether to return (out, softmax_lse, None); softmax_lse is float32 [h, total].

    Raises:
        NotImplementedError: return_attn_probs with dropout_p above 0.
        ValueError, TypeError, BackendError: as `flexattn.attention`.
    """
    options = _Options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    packed = _packed(cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return _attend(tuple(unpack(qkv, 1)), options, packed)
