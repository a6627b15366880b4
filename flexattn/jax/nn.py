"""The signature of `jax.nn.dot_product_attention`, so that a user swaps one line."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from flexattn.jax.front import attention


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Any:
    """Returns `attention` by the arguments of `jax.nn.dot_product_attention`.

    A query that sees no key gets 0, not the mean of v; so do those beyond query_seq_lengths.

    Args:
        query: [b, sq, h, d] or [sq, h, d].
        key, value: [b, skv, h_kv, d] or without b, as query; h is a multiple of h_kv.
        bias: added to the scaled scores, [b, h, sq, skv], where b, h, sq and skv may be 1 and the first ones may be missing; of
            floats, which is differentiable, or of integers, in any dtype.
        mask: bool, of such a shape: whether the query sees the key.
        scale: None is 1/sqrt(d).
        is_causal: whether query i sees keys j <= i alone.
        query_seq_lengths, key_value_seq_lengths: int32 [b]: how many tokens of each sequence count.
        local_window_size: w, or (left, right): query i sees keys i - left to i + right.
        implementation: None, and flexattn chooses (`flexattn.jax.explain` says what runs), or "cudnn" for backend="cudnn".
        return_residual: whether to return lse, [b, sq, h] or [sq, h], as well: in the dtype of query and without a gradient, as
            JAX has it. A query that sees no key has JAX's number, -0.7 times the largest of float32; in float16 that is -inf.

    Raises ValueError and TypeError as `attention` does.
    """
    if implementation not in (None, "cudnn"):
        raise ValueError(f"implementation is {implementation!r}; accepted: None, and flexattn chooses a backend, or 'cudnn'")
    single = jnp.ndim(query) == 3
    given = {"query": query, "key": key, "value": value}
    for name, x in given.items():
        if jnp.ndim(x) not in (3, 4):
            raise ValueError(f"{name} is of shape {jnp.shape(x)}; accepted: an array of 4 dims, or of 3 without the batch")
    q, k, v = (_four_dims(name, x) for name, x in given.items())
    bias, mask = (None if x is None else _four_dims(name, x) for name, x in (("bias", bias), ("mask", mask)))
    if bias is not None and bias.dtype not in (q.dtype, jnp.float32):
        bias = bias.astype(jnp.float32)
    if mask is not None and mask.dtype != jnp.bool_:
        raise TypeError(f"mask has dtype {mask.dtype}; accepted: bool")
    batch, lengths = q.shape[0], {}
    if query_seq_lengths is not None or key_value_seq_lengths is not None:
        lengths["cu_seqlens_q"] = _cumulative("query_seq_lengths", query_seq_lengths, batch, q.shape[1])
        lengths["cu_seqlens_kv"] = _cumulative("key_value_seq_lengths", key_value_seq_lengths, batch, k.shape[1])
    window: Any = (-1, -1)
    if local_window_size is not None:
        window = (local_window_size,) * 2 if isinstance(local_window_size, int) else tuple(local_window_size)
        if min(window) < -1:
            raise ValueError(f"local_window_size is {local_window_size}; accepted: numbers of 0 or more, or -1 for open")
    kind = f"{'padding_' if lengths else ''}causal" if is_causal else ("padding" if lengths else "no_mask")
    out, lse = attention(
        q,
        k,
        v,
        attn_mask_type=kind,
        window_size=(window[0], -1 if is_causal else window[1]),
        bottom_right_diagonal=None if is_causal else False,
        bias_type="no_bias" if bias is None else "post_scale_bias",
        bias=bias,
        softmax_scale=scale,
        mask_mod=None if mask is None else reads_mask(mask, (batch, q.shape[2], q.shape[1], k.shape[1])),
        return_lse=True,
        backend=implementation,
        **lengths,
    )
    hidden = jnp.asarray(-0.7 * jnp.finfo(jnp.float32).max, jnp.float32)
    residual = jax.lax.stop_gradient(jnp.where(jnp.isneginf(lse), hidden, lse).astype(out.dtype))
    residual = jnp.swapaxes(residual, 1, 2)
    if single:
        out, residual = out[0], residual[0]
    return (out, residual) if return_residual else out


def _four_dims(name: str, x: Any) -> Any:
    """Returns an array with dims of size 1 in front, as many as 4 dims need."""
    if jnp.ndim(x) > 4:
        raise ValueError(f"{name} is of shape {jnp.shape(x)}; accepted: an array of at most 4 dims")
    return jnp.asarray(x).reshape((1,) * (4 - jnp.ndim(x)) + jnp.shape(x))


def _cumulative(name: str, lengths: Any, batch: int, longest: int) -> Any:
    """Returns lengths as cu_seqlens; all of them whole where there are none."""
    lengths = jnp.full(batch, longest, jnp.int32) if lengths is None else jnp.asarray(lengths, jnp.int32)
    if lengths.shape != (batch,):
        raise ValueError(f"{name} has shape {lengths.shape}; accepted: {(batch,)}, one length for each sequence")
    return jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(lengths, dtype=jnp.int32)])


def reads_mask(mask: Any, sizes: tuple[int, int, int, int]) -> Any:
    """Returns the mask_mod that reads a mask, whose dims of size 1 stand for all."""
    if any(size not in (1, full) for size, full in zip(mask.shape, sizes, strict=True)):
        raise ValueError(f"mask has shape {mask.shape}; accepted: {sizes}, where any may be 1 instead")

    def mask_mod(*indices: Any) -> Any:
        return mask[tuple(0 if size == 1 else index for index, size in zip(indices, mask.shape, strict=True))]

    return mask_mod
