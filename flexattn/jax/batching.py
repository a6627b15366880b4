"""vmap of a call: the mapped axis joins the batch of a single call, or if the semantics forbid that, a loop runs.

A loop (`jax.lax.map`) runs if results depend on the whole call or on the batch index: with dropout, max_logit, FP8, caches,
lists of keys, softmax_offset or captures with gradients, mapped captures or offsets, mods that read b, and an axis of size 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive

from flexattn.dispatch.mod_program import looks_at, parse_program
from flexattn.dispatch.spec import TENSOR_FIELDS, parse_format
from flexattn.jax.call import Call, cumulative

Batched = tuple[Sequence[jax.Array], Sequence[int | None]]  # results, and the mapped dim of each

_CACHE_ARGUMENTS = {"seqused_q", "seqused_kv", "page_table"}
_LENGTHS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")


def fold_forward(primitive: Primitive) -> Callable[..., Batched]:
    """Returns the batching rule of the forward."""

    def rule(arrays: Sequence[jax.Array], dims: Sequence[int | None], *, call: Call) -> Batched:
        if _mapped_size(arrays, dims) == 0 or _needs_loop(call, dims, is_backward=False):
            return loop(primitive, arrays, dims, call)
        n, operands, folded = _fold(call, arrays, dims)
        out, lse, max_logit = primitive.bind(*operands, call=folded)
        q_format, _ = parse_format(call.settings.qkv_format)
        max_logit = jnp.broadcast_to(max_logit, (n, *max_logit.shape))  # max_logit is empty
        return [_split_batch(out, q_format, n), _split_lse(lse, q_format, n), max_logit], [0, 0, 0]

    return rule


def fold_backward(primitive: Primitive) -> Callable[..., Batched]:
    """Returns the batching rule of the backward."""

    def rule(arrays: Sequence[jax.Array], dims: Sequence[int | None], *, call: Call) -> Batched:
        if _mapped_size(arrays, dims) == 0 or _needs_loop(call, dims, is_backward=True):
            return loop(primitive, arrays, dims, call)
        count = call.num_operands
        n, operands, folded = _fold(call, arrays[:count], dims[:count], _mapped_size(arrays, dims))
        q_format, kv_format = parse_format(call.settings.qkv_format)
        out, lse, dout, *dlse = (_move_to_front(x, dim, n) for x, dim in zip(arrays[count:], dims[count:], strict=True))
        incoming = [_join_batch(out, q_format), _join_lse(lse, q_format), _join_batch(dout, q_format)]
        incoming += [_join_lse(x, q_format) for x in dlse]
        results = primitive.bind(*operands, *incoming, call=folded)
        formats = (q_format, kv_format, kv_format)
        dense = [_split_batch(x, fmt, n) for x, fmt in zip(results[:3], formats, strict=True)]
        for dbias in results[3:]:
            split_dbias = dbias.reshape(n, dbias.shape[0] // n, *dbias.shape[1:])
            index = call.names().index("bias")
            bias_batch = arrays[index].shape[0 if dims[index] is None else (1 if dims[index] == 0 else 0)]
            dense.append(split_dbias if bias_batch > 1 else split_dbias.sum(1, keepdims=True).astype(dbias.dtype))
        return dense, [0] * len(dense)

    return rule


def _needs_loop(call: Call, dims: Sequence[int | None], is_backward: bool) -> bool:
    names, settings = call.names(), call.settings
    mapped = {name for name, dim in zip(names, dims[: len(names)], strict=True) if dim is not None}
    if call.config is not None or settings.fp8_out or settings.return_max_logit or "rng_state" in names:
        return True
    if mapped & {"softmax_offset", "mod_tensors", "block_mask", "alibi_slopes"} or ("softmax_offset" in names and is_backward):
        return True
    if _CACHE_ARGUMENTS & {*names} or "kv_indices" in names:
        return True
    if any(fmt == "thd" for fmt in parse_format(settings.qkv_format)) and "bias" in names:
        return True
    program = parse_program(settings.mods)
    if "block_mask" in names or (program is not None and is_backward and any(program.tensor_needs_grad)):
        return True
    return program is not None and looks_at(program, "b")


def loop(primitive: Primitive, arrays: Sequence[jax.Array], dims: Sequence[int | None], call: Call) -> Batched:
    """Returns the results of one call per index of the mapped axis, and 0 as their mapped axes."""
    moved = [None if dim is None else jnp.moveaxis(x, dim, 0) for x, dim in zip(arrays, dims, strict=True)]
    mapped = [x for x in moved if x is not None]

    def run_one(parts: Any) -> object:
        remaining = iter(parts)
        return primitive.bind(*(x if m is None else next(remaining) for x, m in zip(arrays, moved, strict=True)), call=call)

    # A custom_jvp in a scan or a checkpoint needs the same place for an outer vmap's axis from its rule, which may fold the call.
    # A loop puts it second, and a reshape puts it first, as a fold does.
    results = [jax.lax.reshape(x, (1, *x.shape))[0] for x in jax.lax.map(run_one, mapped)]
    return results, [0] * len(results)


def _mapped_size(arrays: Sequence[jax.Array], dims: Sequence[int | None]) -> int:
    return int(next(x.shape[dim] for x, dim in zip(arrays, dims, strict=True) if dim is not None))


def _move_to_front(x: jax.Array, dim: int | None, n: int) -> jax.Array:
    """Returns x with its mapped axis first; without a mapped axis, x is broadcast."""
    return jnp.broadcast_to(x, (n, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)


def _fold(call: Call, arrays: Sequence[jax.Array], dims: Sequence[int | None], n: int = 0) -> tuple[int, list[object], Call]:
    """Returns the number of joined calls, the joined operands, and the joined call."""
    n = n or _mapped_size(arrays, dims)
    operands_and_dims: dict[str, tuple[Any, Any]] = dict(zip(call.names(), zip(arrays, dims, strict=True), strict=False))
    q_format, kv_format = parse_format(call.settings.qkv_format)
    formats = {"q": q_format, "k": kv_format, "v": kv_format}
    new = {name: _join_batch(_move_to_front(*operands_and_dims[name], n), fmt) for name, fmt in formats.items()}
    if "cu_seqlens_q" in operands_and_dims:
        batch = operands_and_dims["cu_seqlens_q"][0].shape[-1 if operands_and_dims["cu_seqlens_q"][1] != 1 else 0] - 1
        for side, fmt, x in (("q", q_format, "q"), ("kv", kv_format, "k")):
            tokens = new[x].shape[0] // n if fmt == "thd" else 0
            new |= _join_lengths(operands_and_dims, side, n, tokens)
    else:
        q, dim = operands_and_dims["q"]
        shape = [size for i, size in enumerate(q.shape) if i != dim]
        batch = shape[q_format.index("b")]
    if "bias" in operands_and_dims:
        bias = _move_to_front(*operands_and_dims["bias"], n)
        if bias.shape[1] != 1 or call.settings.needs_bias_grad or operands_and_dims["bias"][1] is not None:
            bias = jnp.broadcast_to(bias, (n, batch if bias.shape[1] == 1 else bias.shape[1], *bias.shape[2:]))
            new["bias"] = jax.lax.collapse(bias, 0, 2)
    if "alibi_slopes" in operands_and_dims and operands_and_dims["alibi_slopes"][0].ndim == 2:
        new["alibi_slopes"] = jnp.tile(operands_and_dims["alibi_slopes"][0], (n, 1))
    present = tuple(name for name in TENSOR_FIELDS if name in new or (name in call.present and name not in _LENGTHS))
    operands = [new[name] if name in new else operands_and_dims[name][0] for name in present]
    for name, x, dim in zip(call.names(), arrays, dims, strict=False):
        if name == "descales":
            operands.append(_join_descale(x, dim, n, batch, kv_format))
        elif name not in TENSOR_FIELDS:
            operands.append(x)
    return n, operands, call._replace(present=present)


def _join_lengths(operands_and_dims: dict[str, tuple[Any, Any]], side: str, n: int, tokens: int) -> dict[str, object]:
    """Returns cu_seqlens of n calls as one array. tokens: number of tokens of each call in a packed format, else 0."""
    name = f"cu_seqlens_{side}"
    cu = _move_to_front(*operands_and_dims[name], n)
    lengths = jnp.diff(cu, axis=1).reshape(-1)
    joined = {name: cumulative(lengths)}
    if tokens:
        starts = _move_to_front(*operands_and_dims[f"{name}_padded"], n) if f"{name}_padded" in operands_and_dims else cu
        starts = (starts[:, :-1] + tokens * jnp.arange(n, dtype=cu.dtype)[:, None]).reshape(-1)
        joined[f"{name}_padded"] = jnp.concatenate([starts, jnp.full(1, n * tokens, cu.dtype)])
    return joined


def _join_descale(x: jax.Array, dim: int | None, n: int, batch: int, kv_format: str) -> jax.Array:
    """Returns the factors of n calls: [b | 1, h | 1, blocks | 1], or one for each token, in k's dims with 1 for the last."""
    is_by_token = x.ndim - (dim is not None) == 4
    if dim is None and x.shape[0] == 1 and not is_by_token:
        return x
    x = _move_to_front(x, dim, n)
    if is_by_token:
        return _join_batch(x, kv_format)
    return jnp.broadcast_to(x, (n, batch, *x.shape[2:])).reshape(-1, *x.shape[2:])


def _join_batch(x: jax.Array, fmt: str) -> jax.Array:
    """Returns x, [n, *dims of fmt], with n merged into the batch or the tokens."""
    axis = 0 if fmt == "thd" else fmt.index("b")
    return jax.lax.collapse(jnp.moveaxis(x, 0, axis), axis, axis + 2)


def _split_batch(x: jax.Array, fmt: str, n: int) -> jax.Array:
    axis = 0 if fmt == "thd" else fmt.index("b")
    return jnp.moveaxis(x.reshape(*x.shape[:axis], n, x.shape[axis] // n, *x.shape[axis + 1 :]), axis, 0)


def _join_lse(lse: jax.Array, q_format: str) -> jax.Array:
    if q_format == "thd":  # [n, h, t]
        return jax.lax.collapse(jnp.moveaxis(lse, 0, 1), 1, 3)
    return jax.lax.collapse(lse, 0, 2)


def _split_lse(lse: jax.Array, q_format: str, n: int) -> jax.Array:
    if q_format == "thd":
        return jnp.moveaxis(lse.reshape(lse.shape[0], n, lse.shape[1] // n), 1, 0)
    return lse.reshape(n, lse.shape[0] // n, *lse.shape[1:])
