"""Stand-ins for TransformerEngine's `fused_attn_fwd` and `fused_attn_bwd`, with its arguments, defaults and results.

Their contract is that of `transformer_engine/pytorch/cpp_extensions/fused_attn.py`. Both use `flexattn.attention`'s cache of calls,
copy no tensors, and build no autograd graph.
"""

from __future__ import annotations

import contextlib
import functools
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn import fp8
from flexattn.backward import Given, GivenInFp8, Gradients, differentiate
from flexattn.dispatch.neutral import may_keep, neutral_state
from flexattn.dispatch.options import requested_backend
from flexattn.dispatch.spec import FORMATS, OPEN_WINDOW, PACKINGS, Results, as_index, in_format
from flexattn.in_layout import attend_with
from flexattn.integrations.te.names import (
    AttnBiasType,
    AttnMaskType,
    FusedAttnBackend,
    Layout,
    SoftmaxType,
    parse_layout,
    unpaged_layout,
)
from flexattn.integrations.te.quantizers import Float8CurrentScalingQuantizer, Float8Tensor, InFp8, Quantizer, fp8_dtype_of, in_fp8
from flexattn.likeness import PLAIN
from flexattn.packed_tensors import joined
from flexattn.validation import check_flags, check_name, describe

_BIASES = ("pre_scale_bias", "post_scale_bias")
_BOTTOM_RIGHT = ("causal_bottom_right", "padding_causal_bottom_right")


def fused_attn_fwd(
    is_training: bool,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    fake_dtype: torch.dtype,
    fused_attention_backend: FusedAttnBackend,
    attn_bias: Tensor | None = None,
    cu_seqlens_q_padded: Tensor | None = None,
    cu_seqlens_kv_padded: Tensor | None = None,
    page_table_k: Tensor | None = None,
    page_table_v: Tensor | None = None,
    s_quantizer: Quantizer | None = None,
    o_quantizer: Quantizer | None = None,
    attn_scale: float | None = None,
    dropout: float = 0.0,
    fast_zero_fill: bool = True,
    qkv_layout: str = "sbh3d",
    o_format: str = "sbhd",
    qkv_scale_inv_format: str | None = None,
    attn_bias_type: str = "no_bias",
    attn_mask_type: str = "padding",
    softmax_type: str = "vanilla",
    window_size: tuple[int, int] = (-1, -1),
    bottom_right_diagonal: bool | None = None,
    rng_gen: torch.Generator | None = None,
    softmax_offset: Tensor | None = None,
    return_max_logit: bool = False,
    cuda_graph: bool = False,
) -> tuple[Any, ...]:
    """Returns attention's output, and the results of the forward that `fused_attn_bwd` needs.

    b is the batch, h the query heads, sq the queries of a sequence, t the tokens of all sequences. d_v is v's head dim.

    Args:
        is_training: if False, no weights are dropped, whatever `dropout` is.
        max_seqlen_q, max_seqlen_kv: at least the longest sequences; only used for thd.
        cu_seqlens_q, cu_seqlens_kv: int32 [b + 1], only used with a padding mask type.
        q, k, v: the views of `qkv_layout`'s tensors, such as [b, s, h, d], according to the format, in float16, bfloat16 or
            float32. For backend FP8: `Float8Tensor`s (TransformerEngine's own too), with one scale each.
        fake_dtype: torch.bfloat16 or torch.float16: the dtype that FP8 tensors represent, and out's dtype without an o_quantizer.
        fused_attention_backend: a `FusedAttnBackend`, or an argument of `FusedAttnBackend.cast`.
        attn_bias: for the types pre_scale_bias and post_scale_bias: q's dtype (float32 with FP8), [b, h, sq, skv]; any dim may
            be 1.
        cu_seqlens_q_padded, cu_seqlens_kv_padded: int32 [b + 1], start offsets of the sequences of a thd tensor with gaps.
        page_table_k, page_table_v: int32 [b, columns], the pages of each sequence's keys and values: one tensor for both, only
            with the paged layouts. Entries beyond a sequence's length are not read.
        s_quantizer: ignored; the kernels round softmax weights to FP8 with a fixed scale.
        o_quantizer: quantizer of out. None: out is in q's dtype, or in fake_dtype.
        attn_scale: scale of the scores. None: 1/sqrt(head dim of q and k).
        dropout: dropout probability of a weight.
        fast_zero_fill: ignored; padding is 0 in every output.
        qkv_layout: a name in `QKVLayout`. With a paged layout k and v are [pages, page_size, h_kv, d], or if they are sbhd
            [page_size, pages, h_kv, d]. A paged layout has no backward.
        o_format: the format of out.
        qkv_scale_inv_format: must be None, because MXFP8 is not supported.
        attn_bias_type, attn_mask_type, softmax_type, window_size: as in `flexattn.attention`.
        bottom_right_diagonal: None: True for mask types with bottom_right in their names, else False.
        rng_gen: the generator of the dropout seed. None: torch's generator of the device.
        softmax_offset: [1, h, 1, 1] or [h], for softmax_type learnable.
        return_max_logit: whether to also return max_logit.
        cuda_graph: ignored; every call can be captured.

    Returns:
        (out, aux), or (out, aux, max_logit).

        - out: in o_format, with d_v last, contiguous, in q's dtype; or o_quantizer's result.
        - aux: [stats, rng_state], then the bias and the softmax_offset if they are used. stats is float32 [b, h, sq, 1], or
          [t, h, 1] for thd: the natural logarithm of each softmax denominator. rng_state is int64 [2], the seed and offset of the
          Philox generator, 0 without dropout.
        - max_logit: [h], in q's dtype or fake_dtype: the largest visible score of each head.

    Raises:
        ValueError, TypeError: if an argument is invalid; the text names it, its value and the accepted values.
        NotImplementedError: for MXFP8, pages in FP8, and two page tables.
        BackendError: if no kernel supports the call; the text gives the reasons.
    """
    _refuse_scale_formats(qkv_scale_inv_format, None)
    names = (qkv_layout, o_format, attn_bias_type, attn_mask_type, softmax_type)
    call = _static_call(_kind_of(fused_attention_backend), _hashable(names), _window(window_size), bottom_right_diagonal)
    _check_operands(call, q, attn_bias)
    _check_callable("o_quantizer", o_quantizer)
    check_flags(is_training=is_training)
    _refuse_unread(call, attn_bias, softmax_offset)
    page_table = _page_table(call, page_table_k, page_table_v)
    arguments = call.arguments.copy()
    arguments["softmax_scale"] = attn_scale
    arguments["return_lse"], arguments["return_max_logit"] = True, return_max_logit
    if call.has_bias:
        arguments["bias"] = attn_bias
    if call.has_offset and softmax_offset is not None:
        arguments["softmax_offset"] = softmax_offset.reshape(-1)
    if call.has_lengths:
        lengths = (cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded)
        _add_lengths(arguments, call, lengths, max_seqlen_q, max_seqlen_kv)
    if page_table is not None:
        k, v = call.layout.in_bshd(k), call.layout.in_bshd(v)
        arguments |= {"page_table": page_table, "max_seqlen_kv": max_seqlen_kv}
    if call.kind is FusedAttnBackend.FP8:
        (q, k, v), descales = zip(*_all_in_fp8(q=q, k=k, v=v), strict=True)
        arguments.update(zip(("descale_q", "descale_k", "descale_v"), descales, strict=True))
        arguments["fp8_recipe"] = _recipe(fake_dtype)
    if is_training and dropout != 0:
        if rng_gen is not None and not isinstance(rng_gen, torch.Generator):
            raise TypeError(f"rng_gen is {describe(rng_gen)}; accepted: None, or a torch.Generator")
        rng_state = torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64, device=q.device, generator=rng_gen)
        arguments |= {"dropout_p": dropout, "rng_state": rng_state, "backend": _dropout_backend(q.device)}
    else:
        rng_state = _no_dropout(q)
    with _without_graph(q, k, v, arguments.get("bias"), arguments.get("softmax_offset")):
        out, lse, max_logit = attend_with(call.results, q, k, v, arguments)
        assert lse is not None
        result: Any = in_format(out, call.layout.q_format, o_format)
        if o_quantizer is not None:
            result = o_quantizer(result)
        aux = [lse.transpose(0, 1).unsqueeze(-1) if call.layout.q_format == "thd" else lse.unsqueeze(-1), rng_state]
        if call.has_bias and attn_bias is not None:
            aux.append(attn_bias)
        if softmax_type != "vanilla" and softmax_offset is not None:
            aux.append(softmax_offset)
        if max_logit is None or not return_max_logit:
            return result, aux
        return result, aux, max_logit.to(out.dtype)


def fused_attn_bwd(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    d_o: Tensor,
    fake_dtype: torch.dtype,
    aux_ctx_tensors: list[Tensor],
    fused_attention_backend: FusedAttnBackend,
    cu_seqlens_q_padded: Tensor | None = None,
    cu_seqlens_kv_padded: Tensor | None = None,
    s_quantizer: Quantizer | None = None,
    dp_quantizer: Quantizer | None = None,
    dqkv_quantizer: Quantizer | None = None,
    attn_scale: float | None = None,
    dropout: float = 0.0,
    fast_zero_fill: bool = True,
    qkv_layout: str = "sbh3d",
    o_format: str = "sbhd",
    do_format: str = "sbhd",
    dqkv_layout: str = "sbh3d",
    qkv_scale_inv_format: str | None = None,
    do_scale_inv_format: str | None = None,
    attn_bias_type: str = "no_bias",
    attn_mask_type: str = "padding",
    softmax_type: str = "vanilla",
    window_size: tuple[int, int] = (-1, -1),
    bottom_right_diagonal: bool | None = None,
    deterministic: bool = False,
    cuda_graph: bool = False,
) -> list[Any]:
    """Returns the gradients of `fused_attn_fwd`, in the layout `dqkv_layout`.

    The arguments that are not listed are the forward's. A call with dropout runs on the backend that FLEXATTN_BACKEND or
    `attention_backend` names; it must be the same for both directions. The default is Triton (eager on a CPU).

    Args:
        o, d_o: the output of the forward, and its gradient, in o_format and do_format, of q's dtype; for backend FP8 each in FP8 or
            in fake_dtype.
        aux_ctx_tensors: the forward's aux.
        dp_quantizer: ignored, like s_quantizer; the kernels round the gradient of the scores.
        dqkv_quantizer: quantizer of dq, dk and dv; gradients that share a tensor are quantised together. None: they are in q's
            dtype, or in fake_dtype.
        dqkv_layout: the layout of the gradients; its formats may differ from the inputs'. If it packs dq, dk and dv, they are
            views of one tensor.
        do_scale_inv_format: must be None, because MXFP8 is not supported.
        deterministic: if True, repeated runs are bitwise identical, or the call raises.

    Returns:
        [dq, dk, dv, dbias, d_softmax_offset]. dbias has the bias's shape and dtype, and is None without one; d_softmax_offset is
        float32 [1, h, 1, 1], and None unless softmax_type is learnable.

    Raises:
        ValueError, TypeError: as `fused_attn_fwd`, and if aux_ctx_tensors is not the forward's aux.
        NotImplementedError: for MXFP8, and for pages, which have no gradients.
    """
    if not isinstance(aux_ctx_tensors, (list, tuple)) or len(aux_ctx_tensors) < 2:
        raise ValueError(f"aux_ctx_tensors is {describe(aux_ctx_tensors)}; accepted: the list that fused_attn_fwd returned")
    _refuse_scale_formats(qkv_scale_inv_format, do_scale_inv_format)
    names = (qkv_layout, o_format, attn_bias_type, attn_mask_type, softmax_type)
    call = _static_call(_kind_of(fused_attention_backend), _hashable(names), _window(window_size), bottom_right_diagonal)
    layout = unpaged_layout(qkv_layout)
    stats, rng_state, *rest = aux_ctx_tensors
    attn_bias = rest.pop(0) if call.has_bias and rest else None
    softmax_offset = rest.pop(0) if call.has_offset and rest else None
    _check_operands(call, q, attn_bias)
    _check_backward(call, do_format, stats, o, d_o)
    _check_callable("dqkv_quantizer", dqkv_quantizer)
    results, gradient_layout = _gradient_results(dqkv_layout, layout, o_format, (q, k, v))
    arguments = call.arguments.copy()
    arguments["softmax_scale"] = attn_scale
    arguments["deterministic"] = deterministic
    if attn_bias is not None:
        arguments["bias"] = attn_bias.detach().requires_grad_()
    if softmax_offset is not None:
        arguments["softmax_offset"] = softmax_offset.detach().reshape(-1)
    if call.has_lengths:
        lengths = (cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded)
        _add_lengths(arguments, call, lengths, max_seqlen_q, max_seqlen_kv)
    if dropout != 0:
        arguments |= {"dropout_p": dropout, "rng_state": rng_state, "backend": _dropout_backend(stats.device)}
    with torch.no_grad():
        lse = stats.squeeze(-1).transpose(0, 1) if layout.q_format == "thd" else stats.squeeze(-1)
        if call.kind is FusedAttnBackend.FP8:
            qkv = _all_in_fp8(q=q, k=k, v=v)
            formats = o_format, do_format, layout.q_format
            gradients = _fp8_gradients(results, _recipe(fake_dtype), qkv, (o, d_o, lse), formats, arguments)
        else:
            out, dout = in_format(o, o_format, layout.q_format), in_format(d_o, do_format, layout.q_format)
            gradients = differentiate(results, Given(dout, q, k, v, out, lse), arguments)
        dq = in_format(gradients.dq, layout.q_format, gradient_layout.q_format)
        dk, dv = (in_format(t, layout.kv_format, gradient_layout.kv_format) for t in (gradients.dk, gradients.dv))
        dqkv = (dq, dk, dv) if dqkv_quantizer is None else _quantized((dq, dk, dv), gradient_layout.packing, dqkv_quantizer)
        doffset = gradients.dsoftmax_offset
        return [*dqkv, gradients.dbias, None if doffset is None else doffset.float().view(1, -1, 1, 1)]


class _Call(NamedTuple):
    """The part of a call that its names determine: checked once for all calls with these names."""

    kind: FusedAttnBackend
    layout: Layout
    results: Results  # results' layouts of a forward
    arguments: dict[str, Any]  # arguments of `flexattn.attention`; callers copy them
    has_bias: bool
    has_offset: bool  # whether softmax_offset is read
    has_lengths: bool


@functools.lru_cache(maxsize=1024)
def _static_call(
    kind: FusedAttnBackend, names: tuple[str, str, str, str, str], window: tuple[int, int], diagonal: bool | None
) -> _Call:
    """Returns a call's checked names; raises ValueError for unknown names.

    names: qkv_layout, o_format, attn_bias_type, attn_mask_type and softmax_type.
    """
    qkv_layout, o_format, bias_type, mask_type, softmax_type = names
    if kind is FusedAttnBackend.No_Backend:
        raise ValueError("fused_attention_backend is No_Backend; accepted: F16_arbitrary_seqlen, FP8")
    check_name("attn_bias_type", bias_type, tuple(AttnBiasType))
    check_name("attn_mask_type", mask_type, tuple(AttnMaskType))
    check_name("softmax_type", softmax_type, tuple(SoftmaxType))
    layout = parse_layout(qkv_layout)
    check_name("o_format", o_format, _formats_like(layout.q_format))
    arguments = {
        "qkv_format": layout.qkv_format,
        "attn_mask_type": mask_type,
        "window_size": OPEN_WINDOW if window == OPEN_WINDOW else window,
        "bottom_right_diagonal": mask_type in _BOTTOM_RIGHT if diagonal is None else diagonal,
        "bias_type": bias_type,
        "softmax_type": softmax_type,
    }
    has_bias, has_offset = bias_type in _BIASES, softmax_type == "learnable"
    return _Call(kind, layout, Results(out=o_format), arguments, has_bias, has_offset, "padding" in mask_type)


def _formats_like(fmt: str) -> tuple[str, ...]:
    return tuple(known for known in FORMATS if (known == "thd") == (fmt == "thd"))


def _hashable(names: tuple[object, ...]) -> tuple[Any, ...]:
    """Returns the names, with any non-string replaced by its repr for the error message."""
    return names if all(type(name) is str for name in names) else tuple(n if isinstance(n, str) else repr(n) for n in names)


def _check_backward(call: _Call, do_format: str, stats: Any, o: Any, d_o: Any) -> None:
    """Raises ValueError if do_format does not fit, or if tensors are not the forward's."""
    check_name("do_format", do_format, _formats_like(call.layout.q_format))
    if not isinstance(stats, Tensor) or stats.dim() != len(call.layout.q_format) or stats.shape[-1] != 1:
        raise ValueError(f"aux_ctx_tensors begins with {describe(stats)}; accepted: the list that fused_attn_fwd returned")
    for name, t in (("o", o), ("d_o", d_o)):
        if len(t.shape) != len(do_format):
            raise ValueError(f"{name} has shape {tuple(t.shape)}; accepted: the {len(do_format)} dims of {do_format}")


def _check_callable(name: str, quantizer: object) -> None:
    if quantizer is not None and not callable(quantizer):
        raise TypeError(f"{name} is {describe(quantizer)}; accepted: None, or a quantizer such as Float8Quantizer")


_NO_CONTEXT = contextlib.nullcontext()


def _without_graph(*tensors: Tensor | None) -> AbstractContextManager[Any]:
    """Returns a context without an autograd graph for the tensors. It enters torch.no_grad() only if needed, to save host time."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return torch.no_grad()
    return _NO_CONTEXT


def _window(window_size: object) -> tuple[int, int]:
    sides = tuple(window_size) if isinstance(window_size, (tuple, list, torch.Size)) else ()
    if len(sides) == 2 and type(sides[0]) is int is type(sides[1]):
        return sides
    sides_as_int = [as_index(side) for side in sides]
    if len(sides_as_int) != 2 or sides_as_int[0] is None or sides_as_int[1] is None:
        raise ValueError(f"window_size is {describe(window_size)}; accepted: a pair of ints (left, right), inclusive, -1 for open")
    return sides_as_int[0], sides_as_int[1]


def _refuse_unread(call: _Call, attn_bias: Tensor | None, softmax_offset: Tensor | None) -> None:
    """Raises ValueError for a tensor that the call's types do not read. TransformerEngine passes zeros with off-by-one."""
    if attn_bias is not None and not call.has_bias:
        bias_type = call.arguments["bias_type"]
        raise ValueError(f"attn_bias is given with attn_bias_type {bias_type!r}; accepted: None, or {' or '.join(_BIASES)}")
    if softmax_offset is None:
        return
    if call.arguments["softmax_type"] == "vanilla":
        raise ValueError("softmax_offset is given with softmax_type 'vanilla'; accepted: None, or softmax_type 'learnable'")
    if isinstance(softmax_offset, Tensor) and softmax_offset.numel() not in softmax_offset.shape:
        raise ValueError(f"softmax_offset is {describe(softmax_offset)}; accepted: [1, h, 1, 1] or [h]")


def _kind_of(backend: object) -> FusedAttnBackend:
    return backend if type(backend) is FusedAttnBackend else FusedAttnBackend.cast(backend)


def _check_operands(call: _Call, q: Any, attn_bias: Tensor | None) -> None:
    """Raises ValueError if q does not match the backend, or if the bias is missing or has another dtype."""
    is_fp8 = in_fp8(q, "q") is not None
    if is_fp8 != (call.kind is FusedAttnBackend.FP8):
        accepted = "float16, bfloat16 or float32" if is_fp8 else "Float8Tensors"
        description = "in FP8" if is_fp8 else f"of dtype {q.dtype}"
        raise ValueError(f"q is {description} with fused_attention_backend {call.kind.name}; accepted: q, k and v as {accepted}")
    if not call.has_bias:
        return
    bias_type = call.arguments["bias_type"]
    if attn_bias is None:
        raise ValueError(f"attn_bias is None with attn_bias_type {bias_type!r}; accepted: a tensor of q's dtype")
    wanted_dtype = torch.float32 if is_fp8 else q.dtype
    if attn_bias.dtype is not wanted_dtype:
        kind = "is in FP8" if is_fp8 else f"has {q.dtype}"
        raise ValueError(f"attn_bias has dtype {attn_bias.dtype} and q {kind}; accepted: {wanted_dtype}")


def _add_lengths(
    arguments: dict[str, Any], call: _Call, lengths: tuple[Tensor | None, ...], max_seqlen_q: int, max_seqlen_kv: int
) -> None:
    """Adds the length arguments.

    lengths: cu_seqlens_q, cu_seqlens_kv, and both with padding. Padded offsets that are the plain tensors are left out.
    """
    cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded = lengths
    arguments["cu_seqlens_q"], arguments["cu_seqlens_kv"] = cu_seqlens_q, cu_seqlens_kv
    if call.layout.q_format == "thd":
        arguments["max_seqlen_q"] = max_seqlen_q
        if cu_seqlens_q_padded is not cu_seqlens_q:
            arguments["cu_seqlens_q_padded"] = cu_seqlens_q_padded
    if call.layout.kv_format == "thd":
        arguments["max_seqlen_kv"] = max_seqlen_kv
        if cu_seqlens_kv_padded is not cu_seqlens_kv:
            arguments["cu_seqlens_kv_padded"] = cu_seqlens_kv_padded


def _all_in_fp8(**tensors: Any) -> list[InFp8]:
    """Returns the tensors' data and descales; raises ValueError if one is not in FP8."""
    results = []
    for name, t in tensors.items():
        x = in_fp8(t, name)
        if x is None:
            raise ValueError(f"{name} has dtype {t.dtype} with fused_attention_backend FP8; accepted: q, k and v as Float8Tensors")
        results.append(x)
    return results


def _page_table(call: _Call, page_table_k: Tensor | None, page_table_v: Tensor | None) -> Tensor | None:
    """Returns the page table of a call over pages, or None. Raises if it is missing, or if the call does not support pages."""
    tables = {"page_table_k": page_table_k, "page_table_v": page_table_v}
    if not call.layout.is_paged:
        for name, table in tables.items():
            if table is not None:
                raise ValueError(f"{name} comes with a qkv_layout without pages; accepted: None, or a layout paged_kv_...")
        return None
    for name, table in tables.items():
        if not isinstance(table, Tensor):
            raise ValueError(f"{name} is {describe(table)} with a layout paged_kv_...; accepted: an int32 tensor [b, columns]")
    assert page_table_k is not None
    assert page_table_v is not None
    if page_table_k is not page_table_v and not page_table_k.is_set_to(page_table_v):
        raise NotImplementedError(
            "page_table_v is a different tensor from page_table_k; accepted: the same tensor, as in InferenceParams, with keys "
            "and values at the same positions"
        )
    if call.kind is FusedAttnBackend.FP8:
        raise NotImplementedError("fused_attention_backend is FP8 with a layout paged_kv_...; accepted: F16_arbitrary_seqlen")
    if not call.has_lengths:
        mask_type = call.arguments["attn_mask_type"]
        raise ValueError(
            f"attn_mask_type is {mask_type!r} with a layout paged_kv_...; accepted: a type with padding in its name, because the "
            "last page of a sequence may be partly empty"
        )
    return page_table_k


def _refuse_scale_formats(qkv_scale_inv_format: str | None, do_scale_inv_format: str | None) -> None:
    for name, value in (("qkv_scale_inv_format", qkv_scale_inv_format), ("do_scale_inv_format", do_scale_inv_format)):
        if value is not None:
            raise NotImplementedError(f"{name} is {value!r}, a format of MXFP8; accepted: None, with one scale for each tensor")


def _gradient_results(dqkv_layout: str, layout: Layout, o_format: str, qkv: tuple[Any, Any, Any]) -> tuple[Results, Layout]:
    """Returns the results' layouts and the gradients' layout; raises ValueError if q, k and v do not fit the layout."""
    gradient_layout = unpaged_layout(_hashable((dqkv_layout,))[0], "dqkv_layout")
    if gradient_layout.packing:
        shared = qkv if PACKINGS[gradient_layout.packing][0] == 3 else qkv[1:]
        formats = {layout.q_format, layout.kv_format} if len(shared) == 3 else {layout.kv_format}
        shapes = [tuple(t.shape) for t in shared]
        if len(set(shapes)) > 1 or len(formats) > 1:
            names = "q, k and v" if len(shared) == 3 else "k and v"
            raise ValueError(
                f"dqkv_layout is {dqkv_layout!r}, which packs gradients of equal shapes, but {names} have shapes "
                f"{', '.join(map(str, shapes))}; accepted: a layout with separate gradients, such as "
                f"'{gradient_layout.q_format}_{gradient_layout.kv_format}_{gradient_layout.kv_format}'"
            )
    return Results(o_format, gradient_layout.q_format, gradient_layout.kv_format, gradient_layout.packing), gradient_layout


_no_dropout_states: dict[torch.device, Tensor] = {}


def _no_dropout(q: Tensor) -> Tensor:
    """Returns the rng_state of calls without dropout: one tensor for all of them, because it is never read."""
    state = _no_dropout_states.get(q.device)
    if state is None or type(q) not in PLAIN:
        if not may_keep():
            return torch.zeros(2, dtype=torch.int64, device=q.device)
        with neutral_state():
            state = _no_dropout_states[q.device] = torch.zeros(2, dtype=torch.int64, device=q.device)
    return state


def _dropout_backend(device: torch.device) -> str:
    """Returns one backend for both directions, because they must drop the same weights but do not know of each other."""
    requested = requested_backend(None)
    return requested if requested != "auto" else "triton" if device.type == "cuda" else "eager"


@functools.cache
def _recipe(fake_dtype: object) -> fp8.Recipe:
    if fake_dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"fake_dtype is {fake_dtype!r}; accepted with FP8: torch.bfloat16, torch.float16")
    return fp8.Recipe(out_dtype=fake_dtype)


def _fp8_gradients(
    results: Results,
    recipe: fp8.Recipe,
    qkv: list[InFp8],
    incoming: tuple[Any, Any, Tensor],
    formats: tuple[str, str, str],
    arguments: dict[str, object],
) -> Gradients:
    """Returns the gradients of a call on FP8 tensors. incoming: o, d_o and lse. formats: those of o, d_o and q."""
    (q, k, v), (o, d_o, lse), (o_format, do_format, q_format) = qkv, incoming, formats
    dtype = recipe.out_dtype
    assert dtype is not None
    fp8_o, fp8_do = in_fp8(o, "o"), in_fp8(d_o, "d_o")
    out = in_format(o if fp8_o is None else fp8_o.dequantize(dtype), o_format, q_format)
    dout16 = in_format(d_o if fp8_do is None else fp8_do.dequantize(dtype), do_format, q_format)
    if fp8_do is None and recipe.quantises_dout(d_o.device, requested_backend(None)):
        fp8_do = in_fp8(Float8CurrentScalingQuantizer(torch.float8_e4m3fn)(d_o), "d_o")
    # Without fp8_do, the backward rounds dout.
    dout = dout16 if fp8_do is None else in_format(fp8_do.data, do_format, q_format)
    grad_dtype = str(recipe.grad_dtype if fp8_do is None else dout.dtype).removeprefix("torch.")
    descale_dout, kept16 = (None, None) if fp8_do is None else (fp8_do.descale.view(1, 1, 1), dout16)
    in_8_bits = GivenInFp8(recipe, grad_dtype, (q.descale, k.descale, v.descale), descale_dout, kept16, is_part=False)
    return differentiate(results, Given(dout, q.data, k.data, v.data, out, lse), arguments, in_8_bits)


def _quantized(dqkv: tuple[Tensor, Tensor, Tensor], packing: str, quantizer: Quantizer) -> tuple[Any, ...]:
    """Returns dq, dk and dv in FP8. Gradients that share a tensor are quantised together and stay views of one tensor."""
    if not packing:
        return tuple(quantizer(t) for t in dqkv)
    count, dim = PACKINGS[packing]
    packed = quantizer(joined(dqkv[-count:], dim))
    constructor_arguments = (packed._scale_inv, fp8_dtype_of(packed._fp8_dtype), dqkv[0].dtype)
    separate = tuple(quantizer(t) for t in dqkv[: 3 - count])
    return *separate, *(Float8Tensor(part, *constructor_arguments) for part in packed._data.unbind(dim))
