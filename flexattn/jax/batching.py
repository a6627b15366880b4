"""vmap of a call: the mapped axis joins the batch, one call for all; or, where a call's meaning forbids that, a loop.

A loop (`jax.lax.map`) is taken where results belong to the whole of a call or depend on the index of a batch: dropout, max_logit,
FP8, softmax_offset or captures with gradients, mapped captures or offsets, mods that look at b, and caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from flexattn.dispatch.mod_program import looks_at, parse_program
from flexattn.dispatch.spec import parse_format
from flexattn.jax.call import TENSORS, Call

_OF_CACHES = {"seqused_q", "seqused_kv", "page_table"}
_LENGTHS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")


def fold_forward(primitive: Any) -> Any:
    """Returns the rule of the forward."""

    def rule(arrays: Sequence[Any], dims: Sequence[Any], *, call: Call) -> tuple[Any, Any]:
        if _needs_loop(call, dims, is_backward=False):
            return loop(primitive, arrays, dims, call)
        n, operands, folded, _ = _folded(call, arrays, dims)
        out, lse, max_logit = primitive.bind(*operands, call=folded)
        q_format, _ = parse_format(call.settings.qkv_format)
        max_logit = jnp.broadcast_to(max_logit, (n, *max_logit.shape))  # has no entries here
        return [_apart(out, q_format, n), _apart_lse(lse, q_format, n), max_logit], [0, 0, 0]

    return rule


def fold_backward(primitive: Any) -> Any:
    """Returns the rule of the backward."""

    def rule(arrays: Sequence[Any], dims: Sequence[Any], *, call: Call) -> tuple[Any, Any]:
        if _needs_loop(call, dims, is_backward=True):
            return loop(primitive, arrays, dims, call)
        count = call.num_operands
        n, operands, folded, batch = _folded(call, arrays[:count], dims[:count], _mapped_size(arrays, dims))
        q_format, kv_format = parse_format(call.settings.qkv_format)
        out, lse, dout, *dlse = (_front(x, dim, n) for x, dim in zip(arrays[count:], dims[count:], strict=True))
        incoming = [_joined(out, q_format), _joined_lse(lse, q_format), _joined(dout, q_format)]
        incoming += [_joined_lse(x, q_format) for x in dlse]
        found = primitive.bind(*operands, *incoming, call=folded)
        formats = (q_format, kv_format, kv_format)
        dense = [_apart(x, fmt, n) for x, fmt in zip(found[:3], formats, strict=True)]
        for dbias in found[3:]:
            whole = dbias.reshape(n, batch, *dbias.shape[1:])
            place = call.names().index("bias")
            own = arrays[place].shape[0 if dims[place] is None else (1 if dims[place] == 0 else 0)]
            dense.append(whole if own == batch else whole.sum(1, keepdims=True).astype(dbias.dtype))
        return dense, [0] * len(dense)

    return rule


def _needs_loop(call: Call, dims: Sequence[Any], is_backward: bool) -> bool:
    names, settings = call.names(), call.settings
    mapped = {name for name, dim in zip(names, dims[: len(names)], strict=True) if dim is not None}
    if call.config is not None or settings.fp8_out or settings.return_max_logit or "rng_state" in names:
        return True
    if mapped & {"softmax_offset", "mod_tensors", "block_mask", "alibi_slopes"} or ("softmax_offset" in names and is_backward):
        return True
    if _OF_CACHES & {*names}:
        return True
    if any(fmt == "thd" for fmt in parse_format(settings.qkv_format)) and "bias" in names:
        return True
    program = parse_program(settings.mods)
    if "block_mask" in names or (program is not None and is_backward and any(program.tensor_needs_grad)):
        return True
    return program is not None and looks_at(program, "b")


def loop(primitive: Any, arrays: Sequence[Any], dims: Sequence[Any], call: Call) -> tuple[Any, Any]:
    """Returns the results of a call for each index of the mapped axis, one after another, and that their first axis is that."""
    moved = [None if dim is None else jnp.moveaxis(x, dim, 0) for x, dim in zip(arrays, dims, strict=True)]
    mapped = [x for x in moved if x is not None]

    def one(parts: Any) -> Any:
        left = iter(parts)
        return primitive.bind(*(x if m is None else next(left) for x, m in zip(arrays, moved, strict=True)), call=call)

    found = jax.lax.map(one, mapped)
    return found, [0] * len(found)


def _mapped_size(arrays: Sequence[Any], dims: Sequence[Any]) -> int:
    return int(next(x.shape[dim] for x, dim in zip(arrays, dims, strict=True) if dim is not None))


def _front(x: Any, dim: Any, n: int) -> Any:
    """Returns x with its mapped axis first, one copy for each where it has none."""
    return jnp.broadcast_to(x, (n, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)


def _folded(call: Call, arrays: Sequence[Any], dims: Sequence[Any], n: int = 0) -> tuple[int, list[Any], Call, int]:
    """Returns how many calls are one now, its operands, the call, and the batch that each had."""
    n = n or _mapped_size(arrays, dims)
    given: dict[str, tuple[Any, Any]] = dict(zip(call.names(), zip(arrays, dims, strict=True), strict=False))
    q_format, kv_format = parse_format(call.settings.qkv_format)
    formats = {"q": q_format, "k": kv_format, "v": kv_format}
    new = {name: _joined(_front(*given[name], n), fmt) for name, fmt in formats.items()}
    if "cu_seqlens_q" in given:
        batch = given["cu_seqlens_q"][0].shape[-1 if given["cu_seqlens_q"][1] != 1 else 0] - 1
        for side, fmt, x in (("q", q_format, "q"), ("kv", kv_format, "k")):
            tokens = new[x].shape[0] // n if fmt == "thd" else 0
            new |= _joined_lengths(given, side, n, tokens)
    else:
        q, dim = given["q"]
        shape = [size for i, size in enumerate(q.shape) if i != dim]
        batch = shape[q_format.index("b")]
    if "bias" in given:
        bias = _front(*given["bias"], n)
        if bias.shape[1] != 1 or call.settings.needs_bias_grad or given["bias"][1] is not None:
            bias = jnp.broadcast_to(bias, (n, batch, *bias.shape[2:]))
            new["bias"] = bias.reshape(n * batch, *bias.shape[2:])
    if "alibi_slopes" in given and given["alibi_slopes"][0].ndim == 2:
        new["alibi_slopes"] = jnp.tile(given["alibi_slopes"][0], (n, 1))
    present = tuple(name for name in TENSORS if name in new or (name in call.present and name not in _LENGTHS))
    operands = [new[name] if name in new else given[name][0] for name in present]
    operands += arrays[len(call.present) : call.num_operands]
    return n, operands, call._replace(present=present), batch


def _joined_lengths(given: dict[str, tuple[Any, Any]], side: str, n: int, tokens: int) -> dict[str, Any]:
    """Returns cu_seqlens of n calls as those of one; tokens: of each call in a packed format, else 0."""
    name = f"cu_seqlens_{side}"
    cu = _front(*given[name], n)
    lengths = jnp.diff(cu, axis=1).reshape(-1)
    found = {name: jnp.concatenate([jnp.zeros(1, cu.dtype), jnp.cumsum(lengths, dtype=cu.dtype)])}
    if tokens:
        starts = _front(*given[f"{name}_padded"], n) if f"{name}_padded" in given else cu
        starts = (starts[:, :-1] + tokens * jnp.arange(n, dtype=cu.dtype)[:, None]).reshape(-1)
        found[f"{name}_padded"] = jnp.concatenate([starts, jnp.full(1, n * tokens, cu.dtype)])
    return found


def _joined(x: Any, fmt: str) -> Any:
    """Returns [n, *dims of fmt] with n in front of the batch, or of the tokens, and one with it."""
    at = 0 if fmt == "thd" else fmt.index("b")
    x = jnp.moveaxis(x, 0, at)
    return x.reshape(*x.shape[:at], x.shape[at] * x.shape[at + 1], *x.shape[at + 2 :])


def _apart(x: Any, fmt: str, n: int) -> Any:
    at = 0 if fmt == "thd" else fmt.index("b")
    return jnp.moveaxis(x.reshape(*x.shape[:at], n, x.shape[at] // n, *x.shape[at + 1 :]), at, 0)


def _joined_lse(lse: Any, q_format: str) -> Any:
    if q_format == "thd":  # [n, h, t]
        return jnp.moveaxis(lse, 0, 1).reshape(lse.shape[1], -1)
    return lse.reshape(-1, *lse.shape[2:])


def _apart_lse(lse: Any, q_format: str, n: int) -> Any:
    if q_format == "thd":
        return jnp.moveaxis(lse.reshape(lse.shape[0], n, -1), 1, 0)
    return lse.reshape(n, -1, *lse.shape[1:])
