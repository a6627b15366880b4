"""The `attention_fn` of flax's multi-head attention, for linen and nnx; flax itself is not imported."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from flexattn.dispatch.spec import BackendName
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
    dtype: DTypeLike | None = None,
    precision: object = None,
    module: object = None,
    *,
    is_causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    backend: BackendName | None = None,
) -> jax.Array:
    """Returns `attention` with the arguments of `flax.linen.dot_product_attention` and `flax.nnx.dot_product_attention`.

    A query that sees no key gets 0, not the mean of value. A mask is read for each pair. With `is_causal` or `window_size`, hidden
    keys are skipped; to pass these to a linen module, use functools.partial.

    Args:
        query: [batch..., sq, h, d], with any number of batch dims.
        key, value: [batch..., skv, h_kv, d]; h is a multiple of h_kv.
        bias: added to the scaled scores, broadcasts to [batch..., h, sq, skv]. Differentiable.
        mask: broadcasts to [batch..., h, sq, skv]; the query sees keys with a nonzero value.
        broadcast_dropout: ignored; each sequence and head has its own dropout.
        dropout_rng: a key of jax.random, used if dropout_rate > 0 and deterministic is False.
        dropout_rate: dropout probability of a softmax weight.
        deterministic: if True, there is no dropout.
        dtype: dtype that query, key and value are cast to. None: their common dtype.
        precision, module: must be None; the weights are never computed as a whole, so no module can store them.
        is_causal: if True, query i sees keys j <= i.
        window_size: (left, right): query i sees keys i - left to i + right; -1 is open.
        backend: as in `attention`.

    Raises ValueError and TypeError like `attention`.
    """
    for name, setting in (("precision", precision), ("module", module)):
        if setting is not None:
            reason = ", because weights are never computed as a whole (sow_weights=False)" if name == "module" else ""
            raise ValueError(f"{name} is {setting!r}; accepted: None{reason}")
    if min(x.ndim for x in (query, key, value)) < 3 or not query.shape[:-3] == key.shape[:-3] == value.shape[:-3]:
        raise ValueError(
            f"query has shape {query.shape}, key {key.shape} and value {value.shape}; accepted: [batch..., length, heads, head "
            "dim], with the same batch dims"
        )
    lead, dtype = query.shape[:-3], jnp.result_type(query, key, value) if dtype is None else dtype
    batch = math.prod(lead)
    q, k, v = (x.reshape(batch, *x.shape[-3:]).astype(dtype) for x in (query, key, value))
    sizes = (query.shape[-2], query.shape[-3], key.shape[-3])
    bias = None if bias is None else _merge_batch("bias", bias, lead, sizes)
    mask_mod = None if mask is None else reads_mask(_merge_batch("mask", mask, lead, sizes) != 0, (batch, *sizes))
    drops = dropout_rate > 0.0 and not deterministic
    out = attention(
        q,
        k,
        v,
        attn_mask_type="causal" if is_causal else "no_mask",
        window_size=window_size,
        bottom_right_diagonal=None if is_causal else False,
        bias=bias,
        mask_mod=mask_mod,
        dropout_p=dropout_rate if drops else 0.0,
        rng_state=dropout_rng if drops else None,
        backend=backend,
    )
    return out.reshape(*lead, *out.shape[1:])


def _merge_batch(name: str, x: jax.Array, lead: tuple[int, ...], sizes: tuple[int, int, int]) -> jax.Array:
    """Returns x, which broadcasts to [batch..., h, sq, skv], with one batch dim; its size is 1 if x is the same for all."""
    full_shape = (*lead, *sizes)
    x = jnp.asarray(x)
    shape = (1,) * (len(full_shape) - x.ndim) + x.shape
    if len(shape) != len(full_shape) or any(size not in (1, full) for size, full in zip(shape, full_shape, strict=True)):
        raise ValueError(
            f"{name} has shape {x.shape}; accepted: a shape that broadcasts to [batch..., h, sq, skv] = {list(full_shape)}"
        )
    batch_dims, rest = shape[: len(lead)], shape[len(lead) :]
    if any(size != 1 for size in batch_dims):
        x, batch_dims = jnp.broadcast_to(x.reshape(shape), (*lead, *rest)), lead
    return x.reshape(math.prod(batch_dims), *rest)
