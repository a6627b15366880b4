"""The `attention_fn` of flax's multi-head attention, in linen and in nnx; flax itself is not imported."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from flexattn.jax.front import attention
from flexattn.jax.nn import reads_mask


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    *,
    is_causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    backend: str | None = None,
) -> jax.Array:
    """Returns `attention` by the arguments of `flax.linen.dot_product_attention` and `flax.nnx.dot_product_attention`.

    A query that sees no key gets 0, not the mean of value. A mask is read pair by pair; with `is_causal` or `window_size`, which
    functools.partial gives to a linen module, keys out of sight are not visited.

    Args:
        query: [batch..., sq, h, d], with any number of batch dims, or none.
        key, value: [batch..., skv, h_kv, d]; h is a multiple of h_kv.
        bias: added to the scaled scores, broadcasts to [batch..., h, sq, skv]. Differentiable.
        mask: broadcasts to that too, where not 0 the query sees the key.
        broadcast_dropout: without effect: each sequence and head draws its own.
        dropout_rng: a key of jax.random, for dropout_rate > 0 and not deterministic.
        deterministic: whether nothing is dropped.
        dtype: query, key and value are cast to it; None: to the one that they have in common.
        precision, module: None; weights are nowhere as a whole, so no module can keep them.
        is_causal: whether query i sees keys j <= i alone.
        window_size: (left, right): query i sees keys i - left to i + right; -1 is open.
        backend: as `attention` takes it.

    Raises ValueError and TypeError as `attention` does.
    """
    for name, value_of in (("precision", precision), ("module", module)):
        if value_of is not None:
            more = ", as attention weights are nowhere as a whole (sow_weights=False)" if name == "module" else ""
            raise ValueError(f"{name} is {value_of!r}; accepted: None{more}")
    if min(x.ndim for x in (query, key, value)) < 3 or not query.shape[:-3] == key.shape[:-3] == value.shape[:-3]:
        raise ValueError(
            f"query has shape {query.shape}, key {key.shape} and value {value.shape}; accepted: [batch..., length, heads, head "
            "dim], with the same batch dims"
        )
    lead, dtype = query.shape[:-3], jnp.result_type(query, key, value) if dtype is None else dtype
    batch = math.prod(lead)
    q, k, v = (x.reshape(batch, *x.shape[-3:]).astype(dtype) for x in (query, key, value))
    sizes = (query.shape[-2], query.shape[-3], key.shape[-3])
    bias = None if bias is None else _of_batch("bias", bias, lead, sizes)
    mask_mod = None if mask is None else reads_mask(_of_batch("mask", mask, lead, sizes) != 0, (batch, *sizes))
    drops = dropout_rate > 0.0 and not deterministic
    out = attention(
        q,
        k,
        v,
        attn_mask_type="causal" if is_causal else "no_mask",
        window_size=window_size,
        bottom_right_diagonal=None if is_causal else False,
        bias_type="no_bias" if bias is None else "post_scale_bias",
        bias=bias,
        mask_mod=mask_mod,
        dropout_p=dropout_rate if drops else 0.0,
        rng_state=dropout_rng if drops else None,
        backend=backend,
    )
    return out.reshape(*lead, *out.shape[1:])


def _of_batch(name: str, x: jax.Array, lead: tuple[int, ...], sizes: tuple[int, int, int]) -> jax.Array:
    """Returns what broadcasts to [batch..., h, sq, skv] with one batch dim, of size 1 where it is the same for all."""
    whole = (*lead, *sizes)
    x = jnp.asarray(x)
    shape = (1,) * (len(whole) - x.ndim) + x.shape
    if len(shape) != len(whole) or any(size not in (1, full) for size, full in zip(shape, whole, strict=True)):
        raise ValueError(f"{name} has shape {x.shape}; accepted: what broadcasts to [batch..., h, sq, skv] = {list(whole)}")
    own, rest = shape[: len(lead)], shape[len(lead) :]
    if any(size != 1 for size in own):
        x = jnp.broadcast_to(x.reshape(shape), (*lead, *rest))
    return x.reshape(-1, *rest)
