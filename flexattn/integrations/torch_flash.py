"""flexattn as backend of torch's own functions: scaled_dot_product_attention (flash and memory-efficient backends) and varlen_attn.

    from flexattn.integrations import torch_flash
    torch_flash.register()
    torch.nn.attention.activate_flash_attention_impl("flexattn")

After the activation, flexattn runs the calls that torch dispatches to FlashAttention and to its memory-efficient kernels, which
accept masks. The calling code stays the same. `torch.nn.attention.restore_flash_attention_impl()` ends it. Importing this module
changes nothing, and neither does `register`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn import ops
from flexattn.dispatch.spec import Operands
from flexattn.functional import bind_call

NAME = "flexattn"


def register() -> None:
    """Adds flexattn to torch's flash attention implementations, for `activate_flash_attention_impl("flexattn")`.

    Raises:
        RuntimeError: if this torch version has no such registry.
    """
    import torch.nn.attention

    if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
        raise RuntimeError(
            f"torch {torch.__version__} has no torch.nn.attention.register_flash_attention_impl; use torch 2.11 or later, or "
            "call flexattn.attention directly"
        )
    torch.nn.attention.register_flash_attention_impl(NAME, register_fn=_activate)


class _Handle:
    """Owner of the operator overrides: they last until it is removed."""

    def __init__(self, library: Any) -> None:
        self.library: Any = library

    def remove(self) -> None:
        self.library = None


def _activate(key: str = "CUDA") -> _Handle:
    library: Any = torch.library.Library("aten", "IMPL", key)  # type: ignore[no-untyped-call]
    for name, function in {
        "_flash_attention_forward": _forward,
        "_flash_attention_forward_no_dropout_inplace": _forward_into,
        "_flash_attention_backward": _backward,
        "_scaled_dot_product_flash_attention": _sdpa_forward,
        "_scaled_dot_product_flash_attention_backward": _sdpa_backward,
        "_scaled_dot_product_efficient_attention": _masked_forward,
        "_scaled_dot_product_efficient_attention_backward": _masked_backward,
    }.items():
        if hasattr(torch.ops.aten, name):  # torch 2.13 added the operator that writes into an existing tensor
            library.impl(name, function, key)
    return _Handle(library)


class _Packed(NamedTuple):
    """Packed sequences, under the names of torch's operators; without cum_seq_q the batch is dense."""

    cum_seq_q: Tensor | None
    cum_seq_k: Tensor | None
    max_q: int
    max_k: int
    seqused_k: Tensor | None = None


_DENSE = _Packed(None, None, 0, 0)


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    packed: _Packed = _DENSE,
    window: tuple[int | None, int | None] = (None, None),
    **arguments: Any,
) -> tuple[Operands, ops.Settings]:
    """Returns the operands and settings of a call. Windows are relative to the bottom-right diagonal, as in FlashAttention."""
    left, right = (-1 if side is None or side < 0 else side for side in window)
    arguments |= {"window_size": (left, right)}
    if packed.cum_seq_q is not None:
        prefix = "padding_" if arguments["attn_mask_type"] != "no_mask" else "padding"
        arguments["attn_mask_type"] = prefix + arguments["attn_mask_type"].removeprefix("no_mask")
        arguments |= {"qkv_format": "thd", "cu_seqlens_q": packed.cum_seq_q, "cu_seqlens_kv": packed.cum_seq_k}
        arguments |= {"max_seqlen_q": packed.max_q, "max_seqlen_kv": packed.max_k}
        if packed.seqused_k is not None:  # the first tokens of each slot are keys
            zero = packed.seqused_k.new_zeros(1)
            arguments["cu_seqlens_kv"] = torch.cat((zero, packed.seqused_k.cumsum(0, dtype=torch.int32)))
            arguments["cu_seqlens_kv_padded"] = packed.cum_seq_k
    return bind_call(q, k, v, **arguments)


def _run(x: Operands, settings: ops.Settings, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    needs_grad = any(t.requires_grad for t in inputs)
    out, lse, _ = ops._forward_op(*x, *settings._replace(needs_grad=needs_grad))
    return out, lse


def _with_strides_of(result: Tensor, x: Tensor) -> Tensor:
    """Returns result with the strides of torch.empty_like(x), which torch's own operators promise."""
    if result.stride() == torch.empty_like(x, device="meta").stride():
        return result
    return torch.empty_like(x).copy_(result)


def _rng_state(dropout_p: float, device: torch.device) -> Tensor | None:
    if dropout_p == 0.0:
        return None
    return torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64, device=device)


def _states(rng_state: Tensor | None, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns an operator's auxiliary results: the states of its random generator, and an empty mask."""
    if rng_state is None:
        rng_state = torch.zeros(2, dtype=torch.int64, device=q.device)
    return rng_state.view(torch.uint64), torch.zeros((), dtype=torch.uint64, device=q.device), q.new_empty(0)


def _refuse(**unsupported: Any) -> None:
    for name, value in unsupported.items():
        if value:
            raise RuntimeError(f"flexattn as a flash attention implementation has no {name}; restore torch's own for this call")


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,  # keys are never split, as 1 requests; other values would be hints
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    inputs = (query, key, value)
    needs_grad = any(t.requires_grad for t in inputs)
    _refuse(return_debug_mask=return_debug_mask, block_table=block_table is not None)
    _refuse(alibi_slopes_in_training=needs_grad and alibi_slopes is not None)  # the backward operator does not receive them
    _refuse(seqused_k_in_training=needs_grad and seqused_k is not None)
    if cum_seq_q is None:
        _refuse(seqused_k_of_a_dense_batch=seqused_k is not None)
    rng_state = _rng_state(dropout_p, query.device)
    x, settings = _call(
        *inputs,
        packed=_Packed(cum_seq_q, cum_seq_k, max_q, max_k, seqused_k),
        window=(window_size_left, 0 if is_causal else window_size_right),
        bias_type="no_bias" if alibi_slopes is None else "alibi",
        alibi_slopes=alibi_slopes,
        **_flash_arguments("bshd", dropout_p, is_causal, scale, rng_state),
    )
    out, lse = _run(x, settings, inputs)
    return (_with_strides_of(out, query), lse, *_states(rng_state, query))


def _forward_into(out: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
    result, lse, *_ = _forward(*arguments, **keywords)
    out.copy_(result)
    return lse


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:
    x, settings = _call(
        query,
        key,
        value,
        packed=_Packed(cum_seq_q, cum_seq_k, max_q, max_k),
        window=(window_size_left, 0 if is_causal else window_size_right),
        **_flash_arguments("bshd", dropout_p, is_causal, scale, rng_state.view(torch.int64) if dropout_p else None),
    )
    gradients = ops._backward_op(grad_out, None, out, logsumexp, *x, *settings._replace(needs_grad=True))[:3]
    return tuple(_with_strides_of(g, t) for g, t in zip(gradients, (query, key, value), strict=True))


def _format(query: Tensor) -> tuple[str, bool]:
    """Returns the format that gives out query's memory layout, and whether heads and tokens must be swapped for it."""
    swapped = query.stride(1) < query.stride(2)
    return ("bshd" if swapped else "bhsd"), swapped


def _sdpa_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    _refuse(return_debug_mask=return_debug_mask)
    fmt, swapped = _format(query)
    q, k, v = (t.transpose(1, 2) if swapped else t for t in (query, key, value))
    rng_state = _rng_state(dropout_p, query.device)
    x, settings = _call(q, k, v, **_flash_arguments(fmt, dropout_p, is_causal, scale, rng_state))
    out, lse = _run(x, settings, (query, key, value))
    out = _with_strides_of(out.transpose(1, 2) if swapped else out, query)
    return (out, lse, None, None, query.shape[2], key.shape[2], *_states(rng_state, query))


def _sdpa_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    fmt, swapped = _format(query)
    tensors = (t.transpose(1, 2) if swapped else t for t in (query, key, value, grad_out, out))
    q, k, v, dout, result = tensors
    rng_state = philox_seed.view(torch.int64) if dropout_p else None
    x, settings = _call(q, k, v, **_flash_arguments(fmt, dropout_p, is_causal, scale, rng_state))
    gradients = ops._backward_op(dout, None, result, logsumexp, *x, *settings._replace(needs_grad=True))[:3]
    inputs = (query, key, value)
    return tuple(_with_strides_of(g.transpose(1, 2) if swapped else g, t) for g, t in zip(gradients, inputs, strict=True))


def _masked_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    rng_state = _rng_state(dropout_p, query.device)
    x, settings = _call(q, k, v, **_sdpa_arguments("bshd", dropout_p, is_causal, scale, rng_state), **_bias(attn_bias))
    out, lse, _ = ops._forward_op(*x, *settings._replace(needs_grad=compute_log_sumexp))
    sq = query.shape[2]
    length = -(-sq // 32) * 32 if compute_log_sumexp else 0  # torch's kernels pad to 32, which compiled code relies on
    padded = lse.new_zeros(*lse.shape[:2], length)
    padded[..., :sq].copy_(lse[..., :length])
    seed, offset = torch.zeros(2, dtype=torch.int64, device=query.device) if rng_state is None else rng_state
    return out.transpose(1, 2), padded, seed.clone(), offset.clone()


def _masked_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    dropout_p: float,
    grad_input_mask: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor | None, ...]:
    q, k, v, dout, result = (t.transpose(1, 2) for t in (query, key, value, grad_out, out))
    rng_state = torch.stack((philox_seed, philox_offset)) if dropout_p else None
    x, settings = _call(q, k, v, **_sdpa_arguments("bshd", dropout_p, is_causal, scale, rng_state), **_bias(attn_bias))
    needs_bias_grad = attn_bias is not None and grad_input_mask[3]
    settings = settings._replace(needs_grad=True, needs_bias_grad=needs_bias_grad)
    lse = logsumexp[..., : query.shape[2]].contiguous()
    dq, dk, dv, dbias, *_ = ops._backward_op(dout, None, result, lse, *x, *settings)
    return (*(g.contiguous().transpose(1, 2) for g in (dq, dk, dv)), _pad_row_stride(dbias) if needs_bias_grad else None)


def _bias(attn_bias: Tensor | None) -> dict[str, Any]:
    return {} if attn_bias is None else {"bias_type": "post_scale_bias", "bias": attn_bias}


def _pad_row_stride(dbias: Tensor) -> Tensor:
    """Returns dbias in rows with a stride that is a multiple of 16, like torch's kernels; compiled code relies on it."""
    *outer, columns = dbias.shape
    if columns % 16 == 0:
        return dbias
    return dbias.new_empty(*outer, -(-columns // 16) * 16)[..., :columns].copy_(dbias)


def _sdpa_arguments(fmt: str, dropout_p: float, is_causal: bool, scale: float | None, rng_state: Tensor | None) -> dict[str, Any]:
    """Returns the arguments of `attention`. The memory-efficient operator's causal mask is aligned to the top-left corner."""
    return {
        "qkv_format": fmt,
        "attn_mask_type": "causal" if is_causal else "no_mask",
        "softmax_scale": scale,
        "dropout_p": dropout_p,
        "rng_state": rng_state,
    }


def _flash_arguments(fmt: str, dropout_p: float, is_causal: bool, scale: float | None, rng_state: Tensor | None) -> dict[str, Any]:
    """Returns the arguments for the flash operator, whose causal mask is aligned to the bottom-right corner, like FlashAttention's.

    If lengths differ, torch only dispatches causal calls of `torch.nn.attention.bias.causal_lower_right` to it.
    """
    arguments = _sdpa_arguments(fmt, dropout_p, is_causal, scale, rng_state)
    return arguments | {"attn_mask_type": "causal_bottom_right"} if is_causal else arguments
