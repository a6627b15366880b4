"""FP8 for JAX: out in FP8 with its scales, and delayed scaling as a function of its state. Recipes are `flexattn.fp8.Recipe`."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.typing import DTypeLike
from torch import Tensor

from flexattn import fp8, fp8_ops, validation
from flexattn.dispatch import plan as plans
from flexattn.dispatch.append import kernel_error
from flexattn.dispatch.plan import Device, Plan
from flexattn.dispatch.quantization import LARGEST, LARGEST_SCALE, SMALLEST_SCALE, amax_sizes
from flexattn.dispatch.select import BackendError
from flexattn.dispatch.spec import parse_format
from flexattn.jax import cuda
from flexattn.jax.call import meta_tensor, torch_dtype
from flexattn.jax.primitives import bind, operator
from flexattn.jax.sharding import Factors, Layout

__all__ = ["DelayedScaling", "QuantizedTensor", "dequantize", "quantize"]


@dataclasses.dataclass(frozen=True)
class QuantizedTensor:
    """x ≈ data * descale: `data` in float8, in x's format; descale and amax fp32 [b | 1, h | 1, blocks | 1], by the granularity.

    `source` is x in 16 bits. Only `attention` sets it, and only it has a gradient: that of data * descale.
    """

    data: jax.Array
    descale: jax.Array
    amax: jax.Array  # largest magnitude of x's finite values
    source: jax.Array | None = None
    block_rows: int = 0  # number of rows that share a descale, for granularity "block"; else 0


jax.tree_util.register_dataclass(QuantizedTensor, ["data", "descale", "amax", "source"], ["block_rows"])


class DelayedScaling(NamedTuple):
    """The scales and the amax history of one attention layer, fp32. `create` creates one, `update` the next step's.

    Calls read its scales, and record amaxes as its gradient: `jax.grad` of a loss with respect to a state is a state too. The first
    row of its histories has the amax of q, k, v, dout and, if it is in FP8, out. Everything else in it is 0. A call that is not
    differentiated records nothing.
    """

    scale_q: jax.Array  # [heads], or [1] by tensor: q's multiplier
    scale_k: jax.Array
    scale_v: jax.Array
    scale_dout: jax.Array
    scale_out: jax.Array
    amax_history_q: jax.Array  # [amax_history_len, heads | 1]: this step's amax first, then earlier steps'
    amax_history_k: jax.Array
    amax_history_v: jax.Array
    amax_history_dout: jax.Array
    amax_history_out: jax.Array

    @classmethod
    def create(cls, recipe: fp8.Recipe, num_heads: int, num_heads_kv: int | None = None) -> DelayedScaling:
        """Returns the state before the first step, with scales of 1; arguments and errors are `flexattn.fp8.DelayedScaling`'s."""
        state = fp8.DelayedScaling(recipe, num_heads, num_heads_kv, device="cpu")
        return cls(*(jnp.asarray(getattr(state, name).numpy()) for name in fp8.BUFFERS))

    def update(self, recipe: fp8.Recipe, noted: DelayedScaling) -> DelayedScaling:
        """Returns the next step's state: scales follow the history, which advances by one step.

        noted: the state's gradient. If several calls of a step, or several devices, share a state, it has the sum of their amaxes,
        so scales are smaller than necessary. To avoid that, take the maximum of the gradients of each call.
        """
        fields: dict[str, Any] = {}
        for name in fp8.TENSORS:
            history = jnp.maximum(getattr(self, f"amax_history_{name}"), getattr(noted, f"amax_history_{name}"))
            amax = history[0] if recipe.amax_compute_algo == "most_recent" else history.max(0)
            scale = _scale_of(amax, fp8.delayed_dtype(recipe, name), recipe.margin)
            fields[f"scale_{name}"] = jnp.where(amax > 0, scale, getattr(self, f"scale_{name}"))
            fields[f"amax_history_{name}"] = jnp.roll(history, 1, 0).at[0].set(0.0)
        return DelayedScaling(**fields)


def _scale_of(amax: jax.Array, dtype: torch.dtype, margin: int) -> jax.Array:
    """Returns the scale for an amax, bitwise identical to `flexattn.dispatch.quantization.scale_of`."""
    scale = jnp.maximum(cuda.quotient(jnp.full_like(amax, LARGEST[dtype] * 2.0**-margin), amax), SMALLEST_SCALE)
    return jnp.where((amax > 0) & (scale <= LARGEST_SCALE), scale, 1.0)


def stand_in(recipe: Any, arrays: dict[str, Tensor]) -> Any:
    """Returns a substitute for a state that `flexattn.attention`'s checks accept, with tensors as buffers."""
    state = fp8.DelayedScaling(recipe, 1, device="meta")
    state._buffers.update(arrays)
    return state


def checked_state(state: object) -> DelayedScaling | None:
    """Returns a state whose fields are arrays; raises TypeError for any other object."""
    if state is None:
        return None
    if not isinstance(state, DelayedScaling):
        raise TypeError(f"fp8_state is {validation.describe(state)}; accepted: a flexattn.jax.fp8.DelayedScaling, or None")
    return DelayedScaling(*map(jnp.asarray, state))


def quantize(
    x: jax.Array,
    recipe: fp8.Recipe | None = None,
    *,
    qkv_format: str = "bshd",
    cu_seqlens: jax.Array | None = None,
    cu_seqlens_padded: jax.Array | None = None,
    max_seqlen: int | None = None,
    dtype: DTypeLike = jnp.float8_e4m3fn,
) -> QuantizedTensor:
    """Returns x in FP8 with current scaling, for `attention`'s descale_q, descale_k and descale_v. Not differentiable.

    Arguments, results and errors are those of `flexattn.fp8.quantize`. On a CUDA device below compute capability 8.9, the call
    raises BackendError.
    """
    inputs = {"x": x, "cu_seqlens": cu_seqlens, "cu_seqlens_padded": cu_seqlens_padded}
    for name, value in inputs.items():
        if not isinstance(value, (jax.Array, np.ndarray)) and (value is not None or name == "x"):
            raise TypeError(f"{name} is {validation.describe(value)}; accepted: a JAX or NumPy array")
    arrays = {name: jnp.asarray(value) for name, value in inputs.items() if value is not None}
    metas = dict.fromkeys(inputs) | {name: meta_tensor(name, value) for name, value in arrays.items()}
    recipe_in_use = fp8.Recipe() if recipe is None else recipe
    lengths = (metas["cu_seqlens"], metas["cu_seqlens_padded"], max_seqlen)
    settings = fp8.quantize_arguments(metas["x"], recipe_in_use, qkv_format, lengths, torch_dtype("dtype", dtype))  # type: ignore[arg-type]
    call = QuantizeCall(tuple(arrays), *settings[2:3], *settings[5:])
    data, descale, amax = bind(OPERATOR.whole, [*map(jax.lax.stop_gradient, arrays.values())], call)
    return QuantizedTensor(data, descale, amax, block_rows=recipe_in_use.rows)


class QuantizeCall(NamedTuple):
    """A call of `quantize` without its arrays."""

    names: tuple[str, ...]  # the arrays that are passed: x, cu_seqlens, cu_seqlens_padded
    max_seqlen: int
    fmt: str
    dtype: str
    granularity: str
    block_rows: int
    margin: int
    rotation: bool

    def run(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Returns data, descale and amax."""
        inputs = dict(zip(self.names, tensors, strict=True))
        lengths = (inputs.get("cu_seqlens"), inputs.get("cu_seqlens_padded"), self.max_seqlen)
        return fp8_ops.FUNCTIONS.quantize(inputs["x"], *lengths, None, None, *self[2:])


def _shapes(call: QuantizeCall, arrays: Sequence[jax.Array]) -> list[jax.ShapeDtypeStruct]:
    x, cu_seqlens, *_ = *(meta_tensor(name, a) for name, a in zip(call.names, arrays, strict=True)), None
    sizes = amax_sizes(x, call.fmt, cu_seqlens, call.max_seqlen, call.granularity, call.block_rows)
    scale = jax.ShapeDtypeStruct(sizes, jnp.float32)
    return [jax.ShapeDtypeStruct(tuple(x.shape), jnp.dtype(call.dtype)), scale, scale]


def _run(text: bytes, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    names, *settings = json.loads(text)
    return QuantizeCall(tuple(names), *settings).run(tensors)


def _plan(call: QuantizeCall, signature: tuple[tuple[tuple[int, ...], torch.dtype], ...], target: Device) -> Plan:
    if reason := kernel_error("cuda", target.capability, torch.float8_e4m3fn):
        raise BackendError(f"triton cannot quantise: {reason}")
    metas = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in signature]
    return plans.record(lambda: call.run(metas), metas, target)


def _unsplit_layout(call: QuantizeCall, shapes: Sequence[tuple[int, ...]]) -> Layout:
    """Returns a layout that splits nothing, because scales may depend on all elements."""
    names = (f"dim{i}" for i in itertools.count())
    factors: list[Factors] = [tuple(next(names) for _ in shape) for shape in shapes]
    results: list[Factors] = [factors[0], *(tuple(next(names) for _ in range(3)) for _ in range(2))]
    return Layout(factors, results, [None] * 3, {}, frozenset())


OPERATOR = operator("flexattn_quantize", _shapes, _run, _plan, _unsplit_layout)


def dequantize(
    x: QuantizedTensor,
    *,
    qkv_format: str = "bshd",
    cu_seqlens: jax.Array | None = None,
    cu_seqlens_padded: jax.Array | None = None,
    dtype: DTypeLike | None = None,
) -> jax.Array:
    """Returns data * descale of an out in FP8, multiplied in float32 and rounded once. Its gradient is that of `source`.

    Args:
        x: a result of `attention` or `quantize`.
        qkv_format: x's own format, or that of the call.
        cu_seqlens, cu_seqlens_padded: the call's cu_seqlens_q and cu_seqlens_q_padded, for thd with scales for each sequence.
        dtype: dtype of the result. None: `source`'s dtype, or bfloat16 without a source.
    """
    fmt, _ = parse_format(str(qkv_format))
    if x.data.ndim != len(fmt):
        raise ValueError(f"x.data has shape {x.data.shape} with qkv_format {fmt!r}; accepted: {len(fmt)} dims")
    if fmt == "thd" and cu_seqlens is None and (x.descale.shape[0] > 1 or x.descale.shape[2] > 1):
        raise ValueError("cu_seqlens is None with thd and scales for each sequence; accepted: an int32 array [batch + 1]")
    scale = _scales_of_rows(x, fmt, cu_seqlens, cu_seqlens_padded)
    if x.source is None:
        return (x.data.astype(jnp.float32) * scale).astype(jnp.bfloat16 if dtype is None else dtype)
    result: jax.Array = _dequantize(x.source, x.data, scale, dtype)
    return result


def _scales_of_rows(x: QuantizedTensor, fmt: str, cu_seqlens: jax.Array, cu_seqlens_padded: jax.Array) -> jax.Array:
    """Returns the descale of each row of data; its last dim is 1, and so are dims along which it is constant."""
    descale = x.descale  # [b, h, blocks]
    if descale.size == 0:  # no sequence has tokens, so data is 0
        return jnp.ones((1,) * x.data.ndim, jnp.float32)
    if fmt == "thd":
        if cu_seqlens is None:
            return jnp.broadcast_to(descale[0, :, 0][None, :, None], (1, descale.shape[1], 1))
        token, lengths = jnp.arange(x.data.shape[0]), jnp.diff(cu_seqlens)
        starts = (cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded)[:-1]
        position = token - starts[:, None]  # slots may be in any order
        sequence = jnp.argmax((position >= 0) & (position < lengths[:, None]), 0)
        block = jnp.take_along_axis(position, sequence[None], 0)[0] // max(1, x.block_rows)
        sequence, block = (
            jnp.clip(index, 0, size - 1) for index, size in ((sequence, descale.shape[0]), (block, descale.shape[2]))
        )
        return descale[sequence, :, block][..., None]
    rows = descale[..., None]  # [b, h, blocks, 1]
    if descale.shape[2] > 1:
        rows = jnp.repeat(rows, x.block_rows, 2)[:, :, : x.data.shape[fmt.index("s")]]
    return jnp.transpose(rows, ["bhsd".index(letter) for letter in fmt])


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _dequantize(source: Any, data: jax.Array, scale: jax.Array, dtype: DTypeLike) -> jax.Array:
    return (data.astype(jnp.float32) * scale).astype(source.dtype if dtype is None else dtype)


def _dequantize_backward(dtype: DTypeLike, saved: Any, gradient: jax.Array) -> object:
    like, data, scale = saved
    return gradient.astype(like.dtype), jnp.zeros_like(data), jnp.zeros_like(scale)


_dequantize.defvjp(
    lambda source, data, scale, dtype: (_dequantize(source, data, scale, dtype), (jnp.zeros((), source.dtype), data, scale)),
    _dequantize_backward,
)
