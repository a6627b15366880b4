"""Stand-in for `jax.nn.dot_product_attention`, with the same signature."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from flexattn.jax.call import cumulative
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
    """Returns `attention` with the arguments of `jax.nn.dot_product_attention`.

    A query that sees no key gets 0, not the mean of v; so do queries beyond query_seq_lengths.

    Args:
        query: [b, sq, h, d] or [sq, h, d].
        key, value: [b, skv, h_kv, d] or, like query, without b; h is a multiple of h_kv.
        bias: added to the scaled scores, [b, h, sq, skv]. Each dim may be 1, and the first ones may be missing. A bias of floats is
            differentiable; integers of any dtype are accepted too.
        mask: bool, with bias's shapes: whether the query sees the key.
        scale: scale of the scores. None: 1/sqrt(d).
        is_causal: if True, query i sees keys j <= i.
        query_seq_lengths, key_value_seq_lengths: int32 [b], number of valid tokens of each sequence.
        local_window_size: w, or (left, right): query i sees keys i - left to i + right.
        implementation: None: flexattn selects a backend (see `flexattn.jax.explain`). "cudnn": backend="cudnn".
        return_residual: if True, also returns lse, [b, sq, h] or [sq, h], in query's dtype and without a gradient, as in JAX. If a
            query sees no key, it is -0.7 times the largest float32, as in JAX; in float16 that is -inf.

    Raises ValueError and TypeError like `attention`.
    """
    if implementation not in (None, "cudnn"):
        raise ValueError(f"implementation is {implementation!r}; accepted: None, so that flexattn selects a backend, or 'cudnn'")
    single = jnp.ndim(query) == 3
    arrays = {"query": query, "key": key, "value": value}
    for name, x in arrays.items():
        if jnp.ndim(x) not in (3, 4):
            raise ValueError(f"{name} has shape {jnp.shape(x)}; accepted: an array of 4 dims, or of 3 without the batch")
    q, k, v = (_four_dims(name, x) for name, x in arrays.items())
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
    kind: Any = f"{'padding_' if lengths else ''}causal" if is_causal else ("padding" if lengths else "no_mask")
    out, lse = attention(
        q,
        k,
        v,
        attn_mask_type=kind,
        window_size=(window[0], -1 if is_causal else window[1]),
        bottom_right_diagonal=None if is_causal else False,
        bias=bias,
        softmax_scale=scale,
        mask_mod=None if mask is None else reads_mask(mask, (batch, q.shape[2], q.shape[1], k.shape[1])),
        return_lse=True,
        backend="cudnn" if implementation else None,
        **lengths,
    )
    hidden = jnp.asarray(-0.7 * jnp.finfo(jnp.float32).max, jnp.float32)
    residual = jax.lax.stop_gradient(jnp.where(jnp.isneginf(lse), hidden, lse).astype(out.dtype))
    residual = jnp.swapaxes(residual, 1, 2)
    if single:
        out, residual = out[0], residual[0]
    return (out, residual) if return_residual else out


def _four_dims(name: str, x: jax.Array) -> jax.Array:
    """Returns an array with leading dims of size 1, up to 4 dims."""
    if jnp.ndim(x) > 4:
        raise ValueError(f"{name} has shape {jnp.shape(x)}; accepted: an array of at most 4 dims")
    return jnp.asarray(x).reshape((1,) * (4 - jnp.ndim(x)) + jnp.shape(x))


def _cumulative(name: str, lengths: jax.Array, batch: int, longest: int) -> jax.Array:
    """Returns lengths as cu_seqlens; None: all sequences have full length."""
    lengths = jnp.full(batch, longest, jnp.int32) if lengths is None else jnp.asarray(lengths, jnp.int32)
    if lengths.shape != (batch,):
        raise ValueError(f"{name} has shape {lengths.shape}; accepted: {(batch,)}, one length for each sequence")
    return cumulative(lengths)


def reads_mask(mask: jax.Array, sizes: tuple[int, int, int, int]) -> Callable[..., jax.Array]:
    """Returns the mask_mod that reads a mask; dims of size 1 broadcast."""
    if any(size not in (1, full) for size, full in zip(mask.shape, sizes, strict=True)):
        raise ValueError(f"mask has shape {mask.shape}; accepted: {sizes}, where any dim may be 1")

    def mask_mod(*indices: jax.Array) -> jax.Array:
        return mask[tuple(0 if size == 1 else index for index, size in zip(indices, mask.shape, strict=True))]

    return mask_mod
