"""FP8 in JAX: out in FP8 with its scales, and delayed scaling as a function of its state. Recipes are `flexattn.fp8.Recipe`."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch
from torch import Tensor

from flexattn import fp8, validation
from flexattn.dispatch.quantization import LARGEST, LARGEST_SCALE, SMALLEST_SCALE
from flexattn.dispatch.spec import parse_format

__all__ = ["DelayedScaling", "QuantizedTensor", "dequantize"]


@dataclasses.dataclass(frozen=True)
class QuantizedTensor:
    """x ≈ data * descale: `data` in float8, laid out as x; descale and amax fp32 [b | 1, h | 1, blocks | 1], by the granularity.

    `source` is x in 16 bits, which alone has a gradient: that of data * descale.
    """

    data: jax.Array
    descale: jax.Array
    amax: jax.Array  # largest magnitude of x's finite values
    source: jax.Array
    block_rows: int = 0  # that share a descale, for granularity "block"; else 0


jax.tree_util.register_dataclass(QuantizedTensor, ["data", "descale", "amax", "source"], ["block_rows"])


class DelayedScaling(NamedTuple):
    """The scales and the amax history of one attention layer, fp32: `create` makes one, `update` the next step's.

    Calls read its scales. What they note is its gradient: `jax.grad` of a loss with respect to a state gives a state whose
    histories have, in their first row, the amax of q, k, v, dout and, where it is in FP8, out; all else in it is 0. A call that is
    not differentiated notes nothing.
    """

    scale_q: jax.Array  # [heads], or [1] by tensor: what q is multiplied with
    scale_k: jax.Array
    scale_v: jax.Array
    scale_dout: jax.Array
    scale_out: jax.Array
    amax_history_q: jax.Array  # [amax_history_len, heads | 1]: this step's, and those before
    amax_history_k: jax.Array
    amax_history_v: jax.Array
    amax_history_dout: jax.Array
    amax_history_out: jax.Array

    @classmethod
    def create(cls, recipe: fp8.Recipe, num_heads: int, num_heads_kv: int | None = None) -> DelayedScaling:
        """Returns the state before the first step, whose scales are 1. Takes and raises what `flexattn.fp8.DelayedScaling` does."""
        made = fp8.DelayedScaling(recipe, num_heads, num_heads_kv)
        return cls(*(jnp.asarray(getattr(made, name).numpy()) for name in fp8.BUFFERS))

    def update(self, recipe: fp8.Recipe, noted: DelayedScaling) -> DelayedScaling:
        """Returns the next step's state: scales follow the history, which moves on by one.

        noted: the state's gradient. One state for several calls of a step, or on several devices, has the sum of what they note:
        scales are then smaller than they need be. Take the maximum of what each notes where that matters.
        """
        found: dict[str, Any] = {}
        for name in fp8.TENSORS:
            history = jnp.maximum(getattr(self, f"amax_history_{name}"), getattr(noted, f"amax_history_{name}"))
            amax, before = (
                history[0] if recipe.amax_compute_algo == "most_recent" else history.max(0),
                getattr(self, f"scale_{name}"),
            )
            dtype = fp8.delayed_dtype(recipe, name)
            found[f"scale_{name}"] = jnp.where(amax > 0, _scale_of(amax, dtype, recipe.margin), before)
            found[f"amax_history_{name}"] = jnp.roll(history, 1, 0).at[0].set(0.0)
        return DelayedScaling(**found)


def _scale_of(amax: Any, dtype: torch.dtype, margin: int) -> Any:
    """Returns what `flexattn.dispatch.quantization.scale_of` does, to the bit."""
    scale = jnp.maximum(jnp.float32(LARGEST[dtype] * 2.0**-margin) / amax, SMALLEST_SCALE)
    return jnp.where((amax > 0) & (scale <= LARGEST_SCALE), scale, 1.0)


def stand_in(recipe: Any, arrays: dict[str, Tensor]) -> Any:
    """Returns what the checks of `flexattn.attention` take for a state, with tensors in the place of its buffers."""
    made = fp8.DelayedScaling(recipe, 1)
    made._buffers.update(arrays)
    return made


def checked_state(state: Any) -> DelayedScaling | None:
    """Returns a state whose fields are arrays; raises TypeError for what is none."""
    if state is None:
        return None
    if not isinstance(state, DelayedScaling):
        raise TypeError(f"fp8_state is {validation.describe(state)}; accepted: a flexattn.jax.fp8.DelayedScaling, or None")
    return DelayedScaling(*map(jnp.asarray, state))


def dequantize(
    x: QuantizedTensor,
    *,
    qkv_format: str = "bshd",
    cu_seqlens: jax.Array | None = None,
    cu_seqlens_padded: jax.Array | None = None,
    dtype: Any = None,
) -> jax.Array:
    """Returns data * descale of an out in FP8, multiplied in float32 and rounded once. Its gradient is that of `source`.

    Args:
        x: what `attention` returned.
        qkv_format: x's own format, or that of the call.
        cu_seqlens, cu_seqlens_padded: the call's cu_seqlens_q and cu_seqlens_q_padded, for thd with scales for each sequence.
        dtype: None is that of `source`.
    """
    fmt, _ = parse_format(str(qkv_format))
    if x.data.ndim != len(fmt):
        raise ValueError(f"x.data has shape {x.data.shape} with qkv_format {fmt!r}; accepted: {len(fmt)} dims")
    if fmt == "thd" and cu_seqlens is None and (x.descale.shape[0] > 1 or x.descale.shape[2] > 1):
        raise ValueError("cu_seqlens is None with thd and scales for each sequence; accepted: an int32 array [batch + 1]")
    scale = _scales_of_rows(x, fmt, cu_seqlens, cu_seqlens_padded)
    return _dequantized(x.source, x.data, scale, dtype)


def _scales_of_rows(x: QuantizedTensor, fmt: str, cu_seqlens: Any, cu_seqlens_padded: Any) -> Any:
    """Returns the descale of each row of data, with 1 for its last dim and wherever it is the same."""
    descale = x.descale  # [b, h, blocks]
    if descale.size == 0:  # tokens of no sequence, which are 0
        return jnp.ones((1,) * x.data.ndim, jnp.float32)
    if fmt == "thd":
        if cu_seqlens is None:
            return jnp.broadcast_to(descale[0, :, 0][None, :, None], (1, descale.shape[1], 1))
        token, lengths = jnp.arange(x.data.shape[0]), jnp.diff(cu_seqlens)
        starts = (cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded)[:-1]
        position = token - starts[:, None]  # slots may be in any order
        sequence = jnp.argmax((position >= 0) & (position < lengths[:, None]), 0)
        block = jnp.take_along_axis(position, sequence[None], 0)[0] // max(1, x.block_rows)
        sequence, block = (jnp.clip(at, 0, size - 1) for at, size in ((sequence, descale.shape[0]), (block, descale.shape[2])))
        return descale[sequence, :, block][..., None]
    rows = descale[..., None]  # [b, h, blocks, 1]
    if descale.shape[2] > 1:
        rows = jnp.repeat(rows, x.block_rows, 2)[:, :, : x.data.shape[fmt.index("s")]]
    return jnp.transpose(rows, ["bhsd".index(letter) for letter in fmt])


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _dequantized(source: Any, data: Any, scale: Any, dtype: Any) -> Any:
    return (data.astype(jnp.float32) * scale).astype(source.dtype if dtype is None else dtype)


def _dequantized_forward(source: Any, data: Any, scale: Any, dtype: Any) -> Any:
    return _dequantized(source, data, scale, dtype), (jnp.zeros((), source.dtype), data, scale)


def _dequantized_backward(dtype: Any, saved: Any, gradient: Any) -> Any:
    like, data, scale = saved
    return gradient.astype(like.dtype), jnp.zeros_like(data), jnp.zeros_like(scale)


_dequantized.defvjp(_dequantized_forward, _dequantized_backward)
