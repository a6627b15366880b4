"""Preparation of a call: its arguments are checked, cast under autocast and sorted, and its mods traced."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flexattn import lengths, ops, validation
from flexattn.dispatch import options
from flexattn.dispatch.context import requested_backend
from flexattn.dispatch.neutral import fixed_sizes, keep
from flexattn.dispatch.pages import with_cu_seqlens
from flexattn.dispatch.spec import (
    BIAS_TYPES,
    SOFTMAX_TYPES,
    Band,
    Operands,
    Results,
    Window,
    make_band,
    misses_diagonal,
    parse_format,
)

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from flexattn import fp8, fp8_ops
    from flexattn.mods.dynamo import Recorded
    from flexattn.mods.trace import Mod, Traced


@fixed_sizes
def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    qkv_format: str,
    attn_mask_type: str,
    window_size: tuple[int, int] | Window,
    bottom_right_diagonal: bool | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_kv: Tensor | None,
    cu_seqlens_q_padded: Tensor | None,
    cu_seqlens_kv_padded: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_kv: int | None,
    bias_type: str,
    bias: Tensor | None,
    alibi_slopes: Tensor | None,
    softmax_type: str,
    softmax_offset: Tensor | None,
    softmax_scale: float | None,
    softcap: float,
    dropout_p: float,
    rng_state: Tensor | None,
    score_mod: Mod | None,
    mask_mod: Mod | None,
    score_mod_tensors: Sequence[Tensor] | Mapping[str, Tensor],
    block_mask: BlockMask | None,
    fp8_recipe: fp8.Recipe | None,
    fp8_state: fp8.DelayedScaling | None,
    descale_q: Tensor | None,
    descale_k: Tensor | None,
    descale_v: Tensor | None,
    deterministic: bool | None,
    return_lse: bool,
    return_max_logit: bool,
    backend: str | None,
    seqused_q: Tensor | None = None,  # these five are a forward's alone
    seqused_kv: Tensor | None = None,
    page_table: Tensor | None = None,
    out: Tensor | None = None,
    batch_invariant: bool = False,
    is_backward: bool = False,
    results: Results = Results(),  # noqa: B008  # immutable
    can_check_floor: bool = True,
) -> tuple[Operands, ops.Settings, fp8_ops.QuantizeConfig | None]:
    """Returns a call's tensors and settings, checked, and how q, k and v are to be quantised, or None.

    is_backward: True where a backward is all that will run, which wants gradients of q, k and v whatever they require; then call it
    with grad mode on. results: the formats in memory of out and the gradients. can_check_floor: whether lse can be looked at where
    the call runs; else a finite score that masks is computed as it is written, and never becomes a band.
    """
    q_format, kv_format = parse_format(str(qkv_format))
    if isinstance(q, Tensor) and q.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = _autocast(q, dtype), _autocast(k, dtype), _autocast(v, dtype)
        bias = _autocast(bias, dtype, torch.float32)  # float32 is accepted beside any dtype of q, and is more exact
    validation.check_name("bias_type", bias_type, BIAS_TYPES)
    validation.check_name("softmax_type", softmax_type, SOFTMAX_TYPES)
    validation.check_flag("bottom_right_diagonal", bottom_right_diagonal, optional=True)
    validation.check_flag("deterministic", deterministic, optional=True)
    validation.check_flag("batch_invariant", batch_invariant)
    validation.check_flag("return_lse", return_lse)
    validation.check_flag("return_max_logit", return_max_logit)
    softmax_scale, softcap, dropout_p = validation.check_scalars(softmax_scale, softcap, dropout_p)
    band = make_band(attn_mask_type, window_size, bottom_right_diagonal)
    given: tuple[Any, ...] = (q, k, v)
    if fp8_recipe is not None or fp8_state is not None or any(isinstance(x, tuple) for x in given):
        from flexattn.fp8 import check_recipe, check_unpacked  # here, as calls without FP8 should not wait for its import

        check_unpacked(q, k, v)
        check_recipe(fp8_recipe, fp8_state)
    validation.check_qkv(q, k, v, q_format, kv_format)
    results = validation.checked_results(results, q, k, v, (q_format, kv_format))
    heads = q.shape[q_format.index("h")]
    batch = lengths.check_lengths(
        attn_mask_type,
        lengths.Side(q, q_format, cu_seqlens_q, cu_seqlens_q_padded, seqused_q),
        lengths.Side(k, kv_format, cu_seqlens_kv, cu_seqlens_kv_padded, seqused_kv, page_table),
        [
            name
            for name, value, fmt in (("max_seqlen_q", max_seqlen_q, q_format), ("max_seqlen_kv", max_seqlen_kv, kv_format))
            if bias is not None and fmt == "thd" and value is None
        ],
    )
    max_q = lengths.resolve_max_seqlen("max_seqlen_q", max_seqlen_q, q, q_format, validation.bias_size(bias, 2))
    if page_table is None:
        max_kv = lengths.resolve_max_seqlen("max_seqlen_kv", max_seqlen_kv, k, kv_format, validation.bias_size(bias, 3))
    else:
        max_kv = lengths.longest_in_pages(max_seqlen_kv, page_table, k.shape[kv_format.index("s")])
    validation.warn_of_one_query(attn_mask_type, max_q, max_kv)
    validation.warn_of_swapped_dims(q, k, v, (q_format, kv_format))
    validation.check_bias(bias_type, bias, q, (batch, heads, max_q, max_kv))
    validation.check_alibi_slopes(bias_type, alibi_slopes, q, batch, heads)
    validation.check_softmax_offset(softmax_type, softmax_offset, q, heads)
    validation.check_rng_state(rng_state, q, batch)
    if bias_type == "alibi" and alibi_slopes is None:
        alibi_slopes = default_alibi_slopes(heads, q)
    needs_grad = is_backward or (
        torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v, bias, softmax_offset) if t is not None)
    )
    mods, blocks = None, None
    if block_mask is not None:
        if mask_mod is not None:
            raise ValueError("mask_mod is given with a block_mask, which has one of its own; accepted: one of the two")
        from flexattn.block_mask import block_lists  # here, as calls without a block mask should not wait for its import

        blocks = block_lists(block_mask, batch, heads, max_q, max_kv, q.device)
        mask_mod = block_mask.mask_mod
    validation.check_mod_arguments(score_mod, mask_mod, score_mod_tensors)
    if (score_mod is not None or mask_mod is not None) and not torch.compiler.is_compiling():
        # Sequences with lengths may be shorter than any number on the host says.
        known_q, known_kv = (None, None) if "padding" in attn_mask_type else (max_q, max_kv)
        for mod in (score_mod, mask_mod):
            check_sizes = getattr(mod, "_flexattn_check_sizes", None)
            if check_sizes is not None:
                check_sizes(batch, heads, known_q, known_kv)
    if score_mod is not None or mask_mod is not None:
        # A band that the mods imply can join one on the same diagonal. ALiBi measures from the band's, so there it stays as it is;
        # and a block mask's full blocks are not masked.
        is_open = band.left is None and band.right is None
        masks = 0
        if bias_type != "alibi" and blocks is None and (is_open or not band.bottom_right):
            is_plain = bias_type == "no_bias" and "padding" not in attn_mask_type and mask_mod is None and not return_max_logit
            masks = _masks(band, max_q, max_kv) if is_plain and can_check_floor else 1
        mods = _trace_mods(score_mod, mask_mod, score_mod_tensors, needs_grad, masks, q)
        if mods.left is not None or mods.right is not None:
            band = Band(_narrower(band.left, mods.left), _narrower(band.right, mods.right), bottom_right=False)
        mods = mods._replace(tensors=validation.check_mod_tensors(mods.program.captures, mods.tensors, q))
        needs_grad = needs_grad or any(mods.program.tensor_needs_grad)
    if results.fp32_out and needs_grad:
        raise ValueError(
            "out is to be in float32 and a gradient is asked for; accepted: no gradient, as a backward takes out in q's dtype"
        )
    request = requested_backend(backend)
    of_heads = (heads, k.shape[kv_format.index("h")])
    config: fp8_ops.QuantizeConfig | None = None
    fp8_settings: dict[str, Any] = {}
    if fp8_recipe is not None or q.dtype in validation.FP8_DTYPES:
        from flexattn.fp8 import quantize_config

        trains = needs_grad and not is_backward
        config, fp8_settings = quantize_config(fp8_recipe, fp8_state, q, of_heads, trains, dropout_p > 0, request)
    lengths.check_pages(page_table, config is not None or q.dtype in validation.FP8_DTYPES, needs_grad)
    lengths.check_kept_keys(k, q, needs_grad, fp8_recipe is not None)
    if out is not None:
        of_fp8 = fp8_settings.get("fp8_out")
        validation.check_out(out, q, v, ops.dtype_of(of_fp8) if of_fp8 else q.dtype, needs_grad)
        if getattr(fp8_recipe, "out_dtype", None) in validation.FP8_DTYPES:
            raise ValueError("out is given and fp8_recipe.out_dtype is an FP8 dtype. Leave out out, or use a 16-bit out_dtype.")
    x = Operands(
        q=q,
        k=k,
        v=v,
        bias=bias,
        alibi_slopes=alibi_slopes,
        softmax_offset=softmax_offset,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_kv=cu_seqlens_kv,
        cu_seqlens_q_padded=cu_seqlens_q_padded,
        cu_seqlens_kv_padded=cu_seqlens_kv_padded,
        rng_state=rng_state if dropout_p > 0.0 else None,
        seqused_q=seqused_q,
        seqused_kv=seqused_kv,
        page_table=page_table,
        out=out,
        max_seqlen_q=max_q,
        max_seqlen_kv=max_kv,
        softmax_scale=1.0 / math.sqrt(operator.index(q.shape[-1])) if softmax_scale is None else float(softmax_scale),
        softcap=float(softcap),
        dropout_p=float(dropout_p),
        mod_tensors=() if mods is None else mods.tensors,
        mod_numbers=() if mods is None else mods.numbers,
        block_mask=() if blocks is None else blocks.tensors,
        descales=validation.check_fp8(
            q,
            k,
            q_format,
            kv_format,
            batch,
            ((max_q, max_seqlen_q), (max_kv, max_seqlen_kv)),
            0 if fp8_recipe is None else fp8_recipe.rows,
            (descale_q, descale_k, descale_v),
        ),
    )
    validation.check_apart(x)
    if needs_grad or q.dtype in validation.FP8_DTYPES or config is not None:
        x = with_cu_seqlens(x, (q_format, kv_format))
    if results.packing and config is not None and config.rotation:
        raise ValueError("fp8_recipe.rotation is True and the gradients share a buffer; accepted: rotation False")
    out_dtype = None if fp8_recipe is None else fp8_recipe.out_dtype
    if results.out and out_dtype in validation.FP8_DTYPES:
        raise ValueError(f"fp8_recipe.out_dtype is {out_dtype} and out is to lie in {results.out}; accepted: a 16-bit dtype there")
    settings = ops.Settings(
        qkv_format=qkv_format,
        padding="padding" in attn_mask_type,
        window_left=band.left,
        window_right=band.right,
        bottom_right=band.bottom_right,
        bias_type=bias_type,
        softmax_type=softmax_type,
        return_max_logit=return_max_logit,
        needs_grad=needs_grad,
        needs_bias_grad=torch.is_grad_enabled() and bias is not None and bias.requires_grad,
        deterministic=torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic,
        backend=request,
        is_part=is_backward,
        mods="" if mods is None or mods.program.is_empty else mods.program.text,
        has_floor=mods is not None and mods.has_floor,
        block_size_q=0 if blocks is None else blocks.block_size[0],
        block_size_kv=0 if blocks is None else blocks.block_size[1],
        out_format=results.out,
        dq_format=results.dq,
        dkv_format=results.dkv,
        dqkv_packing=results.packing,
        fp32_gradients=results.fp32,
        fp32_out=results.fp32_out,
        batch_invariant=not is_backward and (batch_invariant or options.batch_invariant()),
        **fp8_settings,
    )
    return x, settings, config


def _autocast(x: Any, dtype: torch.dtype, *kept: torch.dtype) -> Any:
    """Returns x as autocast gives it to a matrix product: in its dtype, unless it is float64, FP8 or no floating point tensor."""
    if isinstance(x, Tensor) and x.is_floating_point() and x.dtype not in (torch.float64, *validation.FP8_DTYPES, *kept):
        return x.to(dtype)
    return x


def _narrower(a: int | None, b: int | None) -> int | None:
    if a is None or b is None:
        return b if a is None else a
    return min(a, b)


def _masks(band: Band, max_q: int, max_kv: int) -> int:
    """Returns a `Masks`: which scores, finite ones too, may become a band beside that of a call without padding, bias and mask_mod.

    Under a finite one a query whose keys are all hidden sees all keys alike, so there must be none: each that sees a key of the
    call's own band sees one of the mod's too.
    """
    if misses_diagonal(band.left, band.right):
        return 1
    if max_q <= max_kv:
        return 3
    return 2 if band.left is None and max_kv > 0 else 1


def _trace_mods(
    score_mod: Mod | None, mask_mod: Mod | None, tensors: Any, needs_grad: bool, masks: int, q: Tensor
) -> Traced | Recorded:
    from flexattn.mods.bands import Masks  # here, as calls without mods should not wait for its import

    if torch.compiler.is_dynamo_compiling():
        from flexattn.mods.dynamo import record_mods

        return record_mods(score_mod, mask_mod, tensors, needs_grad, Masks(masks), q)
    from flexattn.mods.trace import trace_mods

    return trace_mods(score_mod, mask_mod, tensors, needs_grad, Masks(masks))


def default_alibi_slopes(heads: int, q: Tensor) -> Tensor:
    """Returns the slopes of Press et al. (2022)."""
    return _alibi_slopes(heads, q.device)


@keep(64)
def _alibi_slopes(heads: int, device: torch.device) -> Tensor:
    """Returns 2**(-8 i / n) for head i = 1..n where n is a power of two; else the n' < n below it, then every other one of 2 n'."""
    power = 2 ** (heads.bit_length() - 1)
    head = torch.arange(heads, dtype=torch.float32, device=device)
    exponent = torch.where(head < power, (head + 1) * 8 / power, (2 * (head - power) + 1) * 4 / power)
    return torch.exp2(-exponent)
