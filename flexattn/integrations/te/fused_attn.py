"""TransformerEngine's `fused_attn_fwd` and `fused_attn_bwd`, with its arguments, defaults and results, over this library's kernels.

Their contract is that of `transformer_engine/pytorch/cpp_extensions/fused_attn.py`. Both go through the cache of calls that
`flexattn.attention` has, copy nothing on the way, and make no graph for autograd.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn import fp8, ops
from flexattn.backward import Given, differentiate
from flexattn.dispatch.context import requested_backend
from flexattn.dispatch.spec import PACKINGS, Gradients, Results, dense_in, in_format, parse_format
from flexattn.in_layout import DEFAULTS, attend
from flexattn.integrations.te.layouts import Layout, unpaged_layout
from flexattn.integrations.te.names import AttnBiasType, AttnMaskType, FusedAttnBackend, SoftmaxType
from flexattn.integrations.te.quantizers import Float8Tensor, InFp8, Quantizer, fp8_dtype_of, in_fp8
from flexattn.packed import joined
from flexattn.prepare import prepare
from flexattn.validation import check_name, describe

_BIASES = ("pre_scale_bias", "post_scale_bias")
_BOTTOM_RIGHT = ("causal_bottom_right", "padding_causal_bottom_right")
_OF_BACKWARD = {name: DEFAULTS[name] for name in DEFAULTS if not name.startswith(("fp8_", "descale_", "return_"))}


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
    """Returns attention's output, and what `fused_attn_bwd` needs of the forward.

    b is the batch, h the query heads, sq the queries of a sequence, t the tokens of all sequences, d_v the head dim of v.

    Args:
        is_training: False drops no weights, whatever `dropout` says.
        max_seqlen_q, max_seqlen_kv: at least the longest sequences; read for thd alone.
        cu_seqlens_q, cu_seqlens_kv: int32 [b + 1], read with a padding mask type alone.
        q, k, v: the views of `qkv_layout`'s tensors, each [b, s, h, d] and so on as its format says, in float16, bfloat16 or
            float32; or for backend FP8 `Float8Tensor`s (TransformerEngine's own too), each with a scale of its own.
        fake_dtype: what FP8 tensors stand for, and out's dtype where no o_quantizer is given: torch.bfloat16 or torch.float16.
        fused_attention_backend: a `FusedAttnBackend`, or what `FusedAttnBackend.cast` takes.
        attn_bias: for the types pre_scale_bias and post_scale_bias: q's dtype, [b, h, sq, skv], where any dim may be 1.
        cu_seqlens_q_padded, cu_seqlens_kv_padded: int32 [b + 1], where the sequences of a thd tensor begin, if there are gaps.
        page_table_k, page_table_v: None, as there are no page tables yet.
        s_quantizer: accepted, and without effect: softmax weights are rounded to FP8 inside the kernels, with a fixed scale.
        o_quantizer: what out is quantised by; None leaves it in q's dtype, or in fake_dtype.
        attn_scale: None is 1/sqrt(head dim of q and k).
        dropout: the probability that a weight is dropped.
        fast_zero_fill: accepted, and without effect: padding is 0 in every output.
        qkv_layout: one of the names in `QKVLayout`, but for those with page tables.
        o_format: the format of out.
        qkv_scale_inv_format: None, as MXFP8 is not supported.
        attn_bias_type, attn_mask_type, softmax_type, window_size: as `flexattn.attention` takes them.
        bottom_right_diagonal: None is True for the mask types with bottom_right in their names, else False.
        rng_gen: the generator that the seed of dropout is drawn from; None is torch's own of the device.
        softmax_offset: [1, h, 1, 1] or [h], for softmax_type learnable.
        return_max_logit: whether to return max_logit as well.
        cuda_graph: accepted, and without effect: every call can be captured.

    Returns:
        (out, aux), or (out, aux, max_logit).

        - out: in o_format, with d_v last, contiguous: in q's dtype, or what o_quantizer made.
        - aux: [stats, rng_state], then the bias and the softmax_offset where they are used. stats is float32 [b, h, sq, 1], or
          [t, h, 1] for thd: the natural logarithm of each softmax denominator. rng_state is int64 [2], the seed and offset of the
          Philox generator, 0 without dropout.
        - max_logit: [h], in q's dtype or fake_dtype: the largest visible score of each head.

    Raises:
        ValueError, TypeError: an argument that has no meaning; the text names it, what came and what is accepted.
        NotImplementedError: page tables and MXFP8.
        BackendError: no kernel can run the call; the text gives the reasons.
    """
    layout = _checked(q, fused_attention_backend, qkv_layout, (attn_bias_type, attn_bias), attn_mask_type, softmax_type)
    _refuse_pages(page_table_k, page_table_v)
    _refuse_scale_formats(qkv_scale_inv_format=qkv_scale_inv_format)
    rate = dropout if is_training else 0.0
    arguments = _arguments(
        layout,
        _Lengths(max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded),
        _Scores(attn_bias_type, attn_bias, softmax_type, softmax_offset, attn_scale, rate),
        _Mask(attn_mask_type, window_size, bottom_right_diagonal),
    )
    tensors = [in_fp8(t, name) for name, t in (("q", q), ("k", k), ("v", v))]
    of_q, of_k, of_v = tensors
    if of_q is not None and of_k is not None and of_v is not None:
        q, k, v = of_q.data, of_k.data, of_v.data
        arguments |= {"descale_q": of_q.descale, "descale_k": of_k.descale, "descale_v": of_v.descale}
        arguments["fp8_recipe"] = _recipe_of(fake_dtype)
    rng_state = _no_dropout(q.device)
    if rate > 0:
        rng_state = torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64, device=q.device, generator=rng_gen)
        arguments["rng_state"] = rng_state
        arguments["backend"] = _backend_of_dropout(q.device)
    arguments["return_max_logit"] = return_max_logit
    with torch.no_grad():
        out, lse, max_logit = attend(Results(out=o_format), q, k, v, **arguments)
        assert lse is not None
        made: Any = in_format(out, layout.q_format, o_format)
        if o_quantizer is not None:
            made = o_quantizer(made)
        aux = [lse.transpose(0, 1).unsqueeze(-1) if layout.q_format == "thd" else lse.unsqueeze(-1), rng_state]
        aux += [attn_bias] if attn_bias_type in _BIASES and attn_bias is not None else []
        aux += [softmax_offset] if softmax_type != "vanilla" and softmax_offset is not None else []
        if not return_max_logit:
            return made, aux
        assert max_logit is not None
        return made, aux, max_logit.to(out.dtype)


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
    """Returns the gradients of `fused_attn_fwd`, written where `dqkv_layout` says.

    Args:
        o, d_o: the output of the forward, and its gradient, in o_format and do_format, of q's dtype; for backend FP8 each in FP8 or
            in fake_dtype.
        aux_ctx_tensors: what the forward gave.
        dp_quantizer: accepted, and without effect, as s_quantizer: the gradient of the scores is rounded inside the kernels.
        dqkv_quantizer: what dq, dk and dv are quantised by: those that share a tensor together. None leaves them in q's dtype, or
            in fake_dtype.
        dqkv_layout: the layout of the gradients, of the same formats or others. dq, dk and dv are views of one tensor where it
            packs them.
        do_scale_inv_format: None, as MXFP8 is not supported.
        deterministic: True makes repeated runs equal to the bit, or raises.

        All others: what the forward was given. A call with dropout runs on the backend that FLEXATTN_BACKEND or
        `attention_backend` names, which must be the same for both directions, or on Triton (eager on a CPU).

    Returns:
        [dq, dk, dv, dbias, d_softmax_offset]. dbias has the bias's shape and dtype, and is None without one; d_softmax_offset is
        float32 [1, h, 1, 1], and None unless softmax_type is learnable.

    Raises:
        As `fused_attn_fwd`, and ValueError for aux_ctx_tensors that are not the forward's.
    """
    if not isinstance(aux_ctx_tensors, (list, tuple)) or len(aux_ctx_tensors) < 2:
        raise ValueError(f"aux_ctx_tensors is {describe(aux_ctx_tensors)}; accepted: the list that fused_attn_fwd gave")
    stats, rng_state, *rest = aux_ctx_tensors
    attn_bias = rest.pop(0) if attn_bias_type in _BIASES and rest else None
    softmax_offset = rest.pop(0) if softmax_type != "vanilla" and rest else None
    layout = _checked(q, fused_attention_backend, qkv_layout, (attn_bias_type, attn_bias), attn_mask_type, softmax_type)
    _refuse_scale_formats(qkv_scale_inv_format=qkv_scale_inv_format, do_scale_inv_format=do_scale_inv_format)
    results, of_gradients = _gradient_results(dqkv_layout, layout, q, k, v)
    arguments = _arguments(
        layout,
        _Lengths(max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded),
        _Scores(attn_bias_type, attn_bias, softmax_type, softmax_offset, attn_scale, dropout),
        _Mask(attn_mask_type, window_size, bottom_right_diagonal),
    )
    arguments["deterministic"] = deterministic
    if attn_bias is not None:
        arguments["bias"] = attn_bias.detach().requires_grad_()
    with torch.no_grad():
        lse = stats.squeeze(-1).transpose(0, 1) if layout.q_format == "thd" else stats.squeeze(-1)
        if dropout > 0:
            arguments |= {"rng_state": rng_state, "backend": _backend_of_dropout(stats.device)}
        tensors = [in_fp8(t, name) for name, t in (("q", q), ("k", k), ("v", v), ("o", o), ("d_o", d_o))]
        of_q, of_k, of_v, of_o, of_do = tensors
        out = in_format(o if of_o is None else of_o.dequantize(_dtype_of(fake_dtype)), o_format, layout.q_format)
        results = results._replace(out=o_format)
        if of_q is not None and of_k is not None and of_v is not None:
            dout: Any = d_o if of_do is None else of_do.data
            dout = in_format(dout, do_format, layout.q_format)
            dout16 = None if of_do is None else in_format(of_do.dequantize(_dtype_of(fake_dtype)), do_format, layout.q_format)
            given = _Fp8Given((of_q, of_k, of_v), out, lse, dout, dout16, None if of_do is None else of_do.descale)
            found: Any = _fp8_gradients(results, given, arguments, fake_dtype)
        else:
            dout = in_format(d_o, do_format, layout.q_format)
            found = differentiate(results, Given(dout, q, k, v, out, lse), _OF_BACKWARD | arguments)
        dq = in_format(found.dq, layout.q_format, of_gradients.q_format)
        dk, dv = (in_format(t, layout.kv_format, of_gradients.kv_format) for t in (found.dk, found.dv))
        dqkv = (dq, dk, dv) if dqkv_quantizer is None else _quantized((dq, dk, dv), of_gradients.packing, dqkv_quantizer)
        doffset = found.dsoftmax_offset
        return [*dqkv, found.dbias, None if doffset is None else doffset.float().view(1, -1, 1, 1)]


class _Lengths(NamedTuple):
    max_seqlen_q: int
    max_seqlen_kv: int
    cu_seqlens_q: Tensor
    cu_seqlens_kv: Tensor
    cu_seqlens_q_padded: Tensor | None
    cu_seqlens_kv_padded: Tensor | None


class _Scores(NamedTuple):
    bias_type: str
    bias: Tensor | None
    softmax_type: str
    softmax_offset: Tensor | None
    attn_scale: float | None
    dropout: float


class _Mask(NamedTuple):
    attn_mask_type: str
    window_size: tuple[int, int]
    bottom_right_diagonal: bool | None


class _Fp8Given(NamedTuple):
    """Tensors of a backward with q, k and v in FP8."""

    qkv: tuple[InFp8, InFp8, InFp8]
    out: Tensor
    lse: Tensor
    dout: Tensor  # in FP8 or in 16 bits
    dout16: Tensor | None  # None: dout is it
    descale_dout: Tensor | None


def _checked(
    q: Any, backend: Any, qkv_layout: str, bias: tuple[str, Tensor | None], attn_mask_type: str, softmax_type: str
) -> Layout:
    """Returns the layout of q, k and v; raises for names that are not accepted, and for a backend that does not fit q."""
    check_name("attn_bias_type", bias[0], tuple(AttnBiasType))
    check_name("attn_mask_type", attn_mask_type, tuple(AttnMaskType))
    check_name("softmax_type", softmax_type, tuple(SoftmaxType))
    kind = backend if type(backend) is FusedAttnBackend else FusedAttnBackend.cast(backend)
    if kind is FusedAttnBackend.No_Backend:
        raise ValueError(
            "fused_attention_backend is No_Backend; accepted: F16_arbitrary_seqlen, FP8; get_attention_backend says why"
        )
    is_fp8 = in_fp8(q, "q") is not None
    if is_fp8 != (kind is FusedAttnBackend.FP8):
        wanted = "Float8Tensors" if kind is FusedAttnBackend.FP8 else "float16, bfloat16 or float32"
        came = "in FP8" if is_fp8 else f"of dtype {q.dtype}"
        raise ValueError(f"q is {came} with fused_attention_backend {kind.name}; accepted: q, k and v as {wanted}")
    bias_type, attn_bias = bias
    if bias_type in _BIASES:
        if attn_bias is None:
            raise ValueError(f"attn_bias is None with attn_bias_type {bias_type!r}; accepted: a tensor of q's dtype")
        if not is_fp8 and attn_bias.dtype is not q.dtype:
            raise ValueError(f"attn_bias has dtype {attn_bias.dtype} and q has {q.dtype}; accepted: the same dtype")
    return unpaged_layout(qkv_layout)


def _refuse_pages(page_table_k: Any, page_table_v: Any) -> None:
    for name, table in (("page_table_k", page_table_k), ("page_table_v", page_table_v)):
        if table is not None:
            raise NotImplementedError(f"{name} is given, and there are no page tables yet; accepted: None")


def _refuse_scale_formats(**formats: str | None) -> None:
    for name, value in formats.items():
        if value is not None:
            raise NotImplementedError(f"{name} is {value!r}, which is of MXFP8; accepted: None, with one scale for each tensor")


def _arguments(layout: Layout, lengths: _Lengths, scores: _Scores, mask: _Mask) -> dict[str, Any]:
    """Returns the call as arguments of `flexattn.attention`."""
    mask_type, window, diagonal = mask
    diagonal = mask_type in _BOTTOM_RIGHT if diagonal is None else diagonal
    made: dict[str, Any] = {
        "qkv_format": layout.qkv_format,
        "attn_mask_type": mask_type,
        "window_size": tuple(window),
        "bottom_right_diagonal": diagonal,
        "bias_type": scores.bias_type,
        "softmax_type": scores.softmax_type,
        "softmax_scale": scores.attn_scale,
        "dropout_p": scores.dropout,
    }
    if scores.bias_type in _BIASES:
        made["bias"] = scores.bias
    if scores.softmax_type == "learnable" and scores.softmax_offset is not None:
        made["softmax_offset"] = scores.softmax_offset.reshape(-1)
    if "padding" in mask_type:
        made |= {"cu_seqlens_q": lengths.cu_seqlens_q, "cu_seqlens_kv": lengths.cu_seqlens_kv}
        if layout.q_format == "thd":
            made["max_seqlen_q"] = lengths.max_seqlen_q
            if lengths.cu_seqlens_q_padded is not lengths.cu_seqlens_q:
                made["cu_seqlens_q_padded"] = lengths.cu_seqlens_q_padded
        if layout.kv_format == "thd":
            made["max_seqlen_kv"] = lengths.max_seqlen_kv
            if lengths.cu_seqlens_kv_padded is not lengths.cu_seqlens_kv:
                made["cu_seqlens_kv_padded"] = lengths.cu_seqlens_kv_padded
    return made


def _gradient_results(dqkv_layout: str, layout: Layout, q: Any, k: Any, v: Any) -> tuple[Results, Layout]:
    """Returns where dq, dk and dv lie; raises ValueError for a layout that q, k and v do not fit."""
    wanted = unpaged_layout(dqkv_layout, "dqkv_layout")
    if wanted.packing:
        shared = (q, k, v) if PACKINGS[wanted.packing][0] == 3 else (k, v)
        formats = {layout.q_format, layout.kv_format} if len(shared) == 3 else {layout.kv_format}
        shapes = [tuple(t.shape) for t in shared]
        if len(set(shapes)) > 1 or len(formats) > 1:
            names = "q, k and v" if len(shared) == 3 else "k and v"
            raise ValueError(
                f"dqkv_layout is {dqkv_layout!r}, whose one tensor holds gradients of equal shapes, and those of {names} are "
                f"{', '.join(map(str, shapes))}; accepted: a layout with them apart, as "
                f"'{wanted.q_format}_{wanted.kv_format}_{wanted.kv_format}'"
            )
    return Results(dq=wanted.q_format, dkv=wanted.kv_format, packing=wanted.packing), wanted


@functools.cache
def _no_dropout(device: torch.device) -> Tensor:
    """Returns the rng_state of calls that drop nothing: one tensor for all of them, as it is never read."""
    with torch.inference_mode(False):
        return torch.zeros(2, dtype=torch.int64, device=device)


def _backend_of_dropout(device: torch.device) -> str:
    """Returns one backend for both directions, which do not know of each other, and must drop the same weights."""
    asked = requested_backend(None)
    return asked if asked != "auto" else "triton" if device.type == "cuda" else "eager"


def _dtype_of(fake_dtype: Any) -> torch.dtype:
    if fake_dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"fake_dtype is {fake_dtype!r}; accepted with FP8: torch.bfloat16, torch.float16")
    return fake_dtype  # type: ignore[no-any-return]


@functools.cache
def _recipe_of(fake_dtype: Any) -> fp8.Recipe:
    return fp8.Recipe(out_dtype=_dtype_of(fake_dtype))


def _fp8_gradients(results: Results, given: _Fp8Given, arguments: dict[str, Any], fake_dtype: Any) -> Gradients:
    """Returns the gradients of a call on FP8 tensors by the backward operator."""
    q, k, v = given.qkv
    named = {"descale_q": q.descale, "descale_k": k.descale, "descale_v": v.descale, "fp8_recipe": _recipe_of(fake_dtype)}
    x, settings, _ = prepare(q.data, k.data, v.data, **(DEFAULTS | arguments | named), results=results)
    settings = settings._replace(needs_grad=True, needs_bias_grad="bias" in arguments)
    if given.dout16 is not None and given.descale_dout is not None:
        x = x._replace(descales=[*x.descales, given.descale_dout.view(1, 1, 1)], copies16=[given.dout16])
        settings = settings._replace(fp8_grad=str(given.dout.dtype).removeprefix("torch."))
    out = dense_in(given.out, parse_format(settings.qkv_format)[0], settings.out_format)
    return ops.gradients(x, settings, ops.Incoming(out, given.lse.contiguous(), given.dout, None))


def _quantized(dqkv: tuple[Tensor, Tensor, Tensor], packing: str, quantizer: Quantizer) -> tuple[Any, ...]:
    """Returns dq, dk and dv in FP8; those that share a tensor are quantised together and stay views of one."""
    if not packing:
        return tuple(quantizer(t) for t in dqkv)
    count, dim = PACKINGS[packing]
    together = quantizer(joined(dqkv[-count:], dim))
    how = (together._scale_inv, fp8_dtype_of(together._fp8_dtype), dqkv[0].dtype)
    apart = tuple(quantizer(t) for t in dqkv[: 3 - count])
    return *apart, *(Float8Tensor(part, *how) for part in together._data.unbind(dim))
