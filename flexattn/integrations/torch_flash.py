"""flexattn as backend of torch's own functions: scaled_dot_product_attention (flash and memory-efficient backends) and varlen_attn.

    from flexattn.integrations import torch_flash
    torch_flash.register()
    torch.nn.attention.activate_flash_attention_impl("flexattn")

After the activation, flexattn runs the calls that torch dispatches to FlashAttention and to its memory-efficient kernels, which
accept masks. The calling code stays the same. `torch.nn.attention.restore_flash_attention_impl()` ends it. Importing this module
changes nothing, and neither does `register`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from flexattn import ops
from flexattn.dispatch.spec import Operands
from flexattn.functional import bind_call

NAME = "flexattn"
_Call = tuple[Operands, ops.Settings]


def register() -> None:
    """Adds flexattn to torch's flash attention implementations, for `activate_flash_attention_impl("flexattn")`."""
    import torch.nn.attention

    torch.nn.attention.register_flash_attention_impl(NAME, register_fn=_activate)


class _Handle:
    """Owner of the operator overrides: they last until it is removed."""

    def __init__(self, library: torch.library.Library | None) -> None:
        self.library = library

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
            library.impl(name, _with_names(name, function), key)
    return _Handle(library)


def _with_names(operator: str, function: Callable[[SimpleNamespace], object]) -> Callable[..., object]:
    """Returns an operator's implementation from a function of its arguments, which have the names of the operator's schema."""
    schema = getattr(torch.ops.aten, operator).default._schema
    names = [argument.name for argument in schema.arguments]
    defaults = {argument.name: argument.default_value for argument in schema.arguments if argument.has_default_value()}

    def run(*by_position: object, **by_name: object) -> object:
        return function(SimpleNamespace(**defaults | dict(zip(names, by_position, strict=False)) | by_name))

    return run


def _call(x: SimpleNamespace, qkv: Sequence[Tensor], causal: str, rng_state: Tensor | None, **others: object) -> _Call:
    """Returns the operands and settings of an operator's call. causal: the mask type of a causal call."""
    mask = causal if x.is_causal else "no_mask"
    scores = {"attn_mask_type": mask, "softmax_scale": x.scale, "dropout_p": x.dropout_p, "rng_state": rng_state}
    return bind_call(*qkv, **scores, **others)


def _run(call: _Call, needs_grad: bool) -> tuple[Tensor, Tensor]:
    operands, settings = call
    out, lse, _ = ops._forward_op(*operands, *settings._replace(needs_grad=needs_grad))
    return out, lse


def _gradients(call: _Call, dout: Tensor, out: Tensor, lse: Tensor) -> Sequence[Tensor]:
    """Returns the gradients of q, k, v and the bias."""
    operands, settings = call
    gradients: Sequence[Tensor] = ops._backward_op(dout, None, out, lse, *operands, *settings._replace(needs_grad=True))
    return gradients[:4]


def _needs_grad(x: SimpleNamespace) -> bool:
    return bool(x.query.requires_grad or x.key.requires_grad or x.value.requires_grad)


def _with_strides_of(result: Tensor, x: Tensor) -> Tensor:
    """Returns result with the strides of torch.empty_like(x), which torch's own operators promise."""
    if result.stride() == torch.empty_like(x, device="meta").stride():
        return result
    return torch.empty_like(x).copy_(result)


def _new_rng_state(x: SimpleNamespace) -> Tensor | None:
    if x.dropout_p == 0.0:
        return None
    return torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64, device=x.query.device)


def _states(rng_state: Tensor | None, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns an operator's auxiliary results: the states of its random generator, and an empty mask."""
    if rng_state is None:
        rng_state = torch.zeros(2, dtype=torch.int64, device=q.device)
    return rng_state.view(torch.uint64), torch.zeros((), dtype=torch.uint64, device=q.device), q.new_empty(0)


def _refuse(**unsupported: bool) -> None:
    for name, value in unsupported.items():
        if value:
            raise RuntimeError(f"flexattn as a flash attention implementation has no {name}; restore torch's own for this call")


# The flash operators: a causal mask and windows are aligned to the bottom-right corner, like FlashAttention's. If lengths differ,
# torch only dispatches causal calls of `torch.nn.attention.bias.causal_lower_right` to them. num_splits is not read: keys are never
# split, as 1 requests, and other values would be hints.


def _flash_call(x: SimpleNamespace, rng_state: Tensor | None, seqused_k: Tensor | None = None, **others: object) -> _Call:
    """Returns the call for a dense batch, or for packed sequences if there is a cum_seq_q."""
    sides = (x.window_size_left, 0 if x.is_causal else x.window_size_right)
    others["window_size"] = tuple(-1 if side is None or side < 0 else side for side in sides)
    if x.cum_seq_q is not None:
        others |= {"qkv_format": "thd", "cu_seqlens_q": x.cum_seq_q, "cu_seqlens_kv": x.cum_seq_k}
        others |= {"max_seqlen_q": x.max_q, "max_seqlen_kv": x.max_k}
        if seqused_k is not None:  # the first tokens of each slot are keys
            zero = seqused_k.new_zeros(1)
            others["cu_seqlens_kv"] = torch.cat((zero, seqused_k.cumsum(0, dtype=torch.int32)))
            others["cu_seqlens_kv_padded"] = x.cum_seq_k
    return _call(x, (x.query, x.key, x.value), "causal_bottom_right", rng_state, **others)


def _forward(x: SimpleNamespace) -> tuple[Tensor, ...]:
    needs_grad = _needs_grad(x)
    _refuse(return_debug_mask=x.return_debug_mask, block_table=getattr(x, "block_table", None) is not None)
    _refuse(alibi_slopes_in_training=needs_grad and x.alibi_slopes is not None)  # the backward operator does not receive them
    _refuse(seqused_k_in_training=needs_grad and x.seqused_k is not None)
    _refuse(seqused_k_of_a_dense_batch=x.cum_seq_q is None and x.seqused_k is not None)
    rng_state = _new_rng_state(x)
    out, lse = _run(_flash_call(x, rng_state, x.seqused_k, alibi_slopes=x.alibi_slopes), needs_grad)
    return _with_strides_of(out, x.query), lse, *_states(rng_state, x.query)


def _forward_into(x: SimpleNamespace) -> Tensor:
    result, lse, *_ = _forward(x)
    x.out.copy_(result)
    return lse


def _backward(x: SimpleNamespace) -> tuple[Tensor, ...]:
    call = _flash_call(x, x.rng_state.view(torch.int64) if x.dropout_p else None)
    dq, dk, dv, _ = _gradients(call, x.grad_out, x.out, x.logsumexp)
    return _with_strides_of(dq, x.query), _with_strides_of(dk, x.key), _with_strides_of(dv, x.value)


# SDPA's flash operators, [b, h, s, d]: the results have the inputs' memory layout.


def _sdpa_call(x: SimpleNamespace, rng_state: Tensor | None) -> tuple[_Call, Callable[[Tensor], Tensor]]:
    """Returns the call, and a function that turns results and their gradients from the operator's dims to the call's, and back."""
    has_tokens_first = x.query.stride(1) < x.query.stride(2)

    def turned(t: Tensor) -> Tensor:
        return t.transpose(1, 2) if has_tokens_first else t

    qkv = turned(x.query), turned(x.key), turned(x.value)
    return _call(x, qkv, "causal_bottom_right", rng_state, qkv_format="bshd" if has_tokens_first else "bhsd"), turned


def _sdpa_forward(x: SimpleNamespace) -> tuple[Tensor | int | None, ...]:
    _refuse(return_debug_mask=x.return_debug_mask)
    rng_state = _new_rng_state(x)
    call, turned = _sdpa_call(x, rng_state)
    out, lse = _run(call, _needs_grad(x))
    lengths = x.query.shape[2], x.key.shape[2]
    return _with_strides_of(turned(out), x.query), lse, None, None, *lengths, *_states(rng_state, x.query)


def _sdpa_backward(x: SimpleNamespace) -> tuple[Tensor, ...]:
    call, turned = _sdpa_call(x, x.philox_seed.view(torch.int64) if x.dropout_p else None)
    gradients = _gradients(call, turned(x.grad_out), turned(x.out), x.logsumexp)[:3]
    return tuple(_with_strides_of(turned(g), t) for g, t in zip(gradients, (x.query, x.key, x.value), strict=True))


# SDPA's memory-efficient operators, [b, h, s, d] with a bias: a causal mask is aligned to the top-left corner.


def _masked_call(x: SimpleNamespace, rng_state: Tensor | None) -> _Call:
    return _call(x, [t.transpose(1, 2) for t in (x.query, x.key, x.value)], "causal", rng_state, bias=x.attn_bias)


def _masked_forward(x: SimpleNamespace) -> tuple[Tensor, ...]:
    rng_state, sq = _new_rng_state(x), x.query.shape[2]
    out, lse = _run(_masked_call(x, rng_state), x.compute_log_sumexp)
    length = -(-sq // 32) * 32 if x.compute_log_sumexp else 0  # torch's kernels pad to 32, which compiled code relies on
    padded = lse.new_zeros(*lse.shape[:2], length)
    padded[..., :sq].copy_(lse[..., :length])
    seed, offset = torch.zeros(2, dtype=torch.int64, device=x.query.device) if rng_state is None else rng_state
    return out.transpose(1, 2), padded, seed.clone(), offset.clone()


def _masked_backward(x: SimpleNamespace) -> tuple[Tensor | None, ...]:
    rng_state = torch.stack((x.philox_seed, x.philox_offset)) if x.dropout_p else None
    operands, settings = _masked_call(x, rng_state)
    needs_bias_grad = x.attn_bias is not None and x.grad_input_mask[3]
    lse = x.logsumexp[..., : x.query.shape[2]].contiguous()
    call = operands, settings._replace(needs_bias_grad=needs_bias_grad)
    *gradients, dbias = _gradients(call, x.grad_out_.transpose(1, 2), x.out.transpose(1, 2), lse)
    return *(g.contiguous().transpose(1, 2) for g in gradients), _pad_row_stride(dbias) if needs_bias_grad else None


def _pad_row_stride(dbias: Tensor) -> Tensor:
    """Returns dbias in rows with a stride that is a multiple of 16, like torch's kernels; compiled code relies on it."""
    *outer, columns = dbias.shape
    if columns % 16 == 0:
        return dbias
    return dbias.new_empty(*outer, -(-columns // 16) * 16)[..., :columns].copy_(dbias)
