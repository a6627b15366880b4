"""Preparation of a call: its arguments are checked, cast under autocast and sorted, and its mods traced."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from flexattn import compat, lengths, ops, validation
from flexattn.call_options import NO_TENSORS, TENSOR_OPTIONS
from flexattn.dispatch import options
from flexattn.dispatch.neutral import fixed_sizes, keep
from flexattn.dispatch.options import requested_backend
from flexattn.dispatch.pages import with_cu_seqlens
from flexattn.dispatch.spec import BIAS_TYPES, SOFTMAX_TYPES, Band, Operands, Results, make_band, misses_diagonal, parse_format

if TYPE_CHECKING:
    from flexattn import fp8_ops
    from flexattn.block_mask import BlockLists
    from flexattn.call_options import Arguments
    from flexattn.mods.dynamo import Recorded
    from flexattn.mods.trace import Mod, Traced


_has_transforms, _level = compat.has_transforms, compat.forward_mode_level  # looked up once, as in `dispatch.neutral`


class Prepared(NamedTuple):
    """A call that is checked and can run."""

    x: Operands
    settings: ops.Settings
    config: fp8_ops.QuantizeConfig | None  # how to quantise q, k and v, if the call does


class _Sizes(NamedTuple):
    batch: int
    heads: int
    heads_kv: int
    max_q: int
    max_kv: int


class _Mods(NamedTuple):
    """Traced mods, the band that they leave, and the lists of a block mask."""

    traced: Traced | Recorded | None
    band: Band
    blocks: BlockLists | None
    needs_grad: bool


@fixed_sizes
def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    arguments: Arguments,
    *,
    is_backward: bool = False,
    results: Results = Results(),  # noqa: B008  # immutable
    can_check_floor: bool = True,
) -> Prepared:
    """Returns a checked call.

    arguments: all arguments of `attention`, as `in_full` returns them. is_backward: True if only a backward will run. It computes
    the gradients of q, k and v whether they require one or not; grad mode must be on. results: the formats in memory of out and
    the gradients. can_check_floor: whether lse can be read while the call runs. If False, a finite score that masks is computed as
    it is written, and never becomes a band.
    """
    arguments = arguments.copy()
    formats = q_format, kv_format = parse_format(str(arguments["qkv_format"]))
    is_autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    if is_autocast and (dtype := _autocast_dtype(q)) is not None:
        q, k, v = _autocast(q, dtype), _autocast(k, dtype), _autocast(v, dtype)
        # float32 is accepted with any dtype of q, and is more exact
        arguments["bias"] = _autocast(arguments["bias"], dtype, torch.float32)
    _check_names_and_numbers(arguments)
    band = make_band(arguments["attn_mask_type"], arguments["window_size"], arguments["bottom_right_diagonal"])
    recipe, state = arguments["fp8_recipe"], arguments["fp8_state"]
    if recipe is not None or state is not None or any(isinstance(x, tuple) for x in (q, k, v)):
        from flexattn.fp8 import check_recipe, check_unpacked  # here, because calls without FP8 should not wait for its import

        check_unpacked(q, k, v)
        check_recipe(recipe, state)
    validation.check_qkv(q, k, v, q_format, kv_format)
    if results != Results():
        results = validation.checked_results(results, q, k, v, formats)
    sizes = _checked_sizes(q, k, formats, arguments)
    validation.warn_of_mistakes(q, k, v, formats, arguments["attn_mask_type"], (sizes.max_q, sizes.max_kv))
    bias, out = arguments["bias"], arguments["out"]
    tensors = (q, k, v, bias, arguments["softmax_offset"])
    needs_grad = is_backward or (torch.is_grad_enabled() and any(t.requires_grad for t in tensors if t is not None))
    if _has_transforms() or _level() >= 0:
        needs_grad = needs_grad or ops.is_differentiated(tensors)
    if arguments["return_aux"] is not None:
        from flexattn.statistics import check_request  # here, because calls without such a request should not wait for its import

        check_request(arguments["return_aux"], q, k, sizes.batch, arguments)
        arguments["return_max_logit"] = arguments["return_aux"].max_logit
    kv_block = 1
    if arguments["kv_indices"] is not None or arguments["kv_index_counts"] is not None:
        from flexattn.key_lists import check_lists  # here, because calls without lists of keys should not wait for its import

        kv_block = check_lists(q, q_format, sizes.heads_kv, arguments)
    mods = _prepared_mods(q, sizes, band, arguments, needs_grad, can_check_floor)
    needs_grad, traced = mods.needs_grad, mods.traced
    if results.fp32_out and needs_grad:
        raise ValueError(
            "out is to be in float32 and a gradient is asked for; accepted: no gradient, as a backward takes out in q's dtype"
        )
    request = requested_backend(arguments["backend"])
    dropout_p = arguments["dropout_p"]
    config: fp8_ops.QuantizeConfig | None = None
    fp8_settings: dict[str, Any] = {}
    is_fp8 = q.dtype in validation.FP8_DTYPES
    if recipe is not None or is_fp8:
        from flexattn.fp8 import quantize_config

        trains = needs_grad and not is_backward
        config, fp8_settings = quantize_config(recipe, state, q, (sizes.heads, sizes.heads_kv), trains, dropout_p > 0, request)
    if arguments["page_table"] is not None:
        lengths.check_pages(config is not None or is_fp8, needs_grad)
    if k.dtype != q.dtype:
        lengths.check_kept_keys(k, q, needs_grad, recipe is not None)
    if out is not None:
        fp8_out = fp8_settings.get("fp8_out")
        validation.check_out(out, q, v, ops.dtype_of(fp8_out) if fp8_out else q.dtype, needs_grad)
        if getattr(recipe, "out_dtype", None) in validation.FP8_DTYPES:
            raise ValueError("out is given and fp8_recipe.out_dtype is an FP8 dtype. Leave out out, or use a 16-bit out_dtype.")
    given: Mapping[str, Any] = arguments
    scale = arguments["softmax_scale"]
    blocks = mods.blocks
    x = Operands(
        q=q,
        k=k,
        v=v,
        **{name: given[name] for name in TENSOR_OPTIONS},
        max_seqlen_q=sizes.max_q,
        max_seqlen_kv=sizes.max_kv,
        softmax_scale=1.0 / math.sqrt(operator.index(q.shape[-1])) if scale is None else float(scale),
        softcap=float(arguments["softcap"]),
        dropout_p=float(dropout_p),
        mod_tensors=() if traced is None else traced.tensors,
        mod_numbers=() if traced is None else traced.numbers,
        block_mask=() if blocks is None else blocks.tensors,
        descales=validation.check_fp8(
            q,
            k,
            q_format,
            kv_format,
            sizes.batch,
            ((sizes.max_q, arguments["max_seqlen_q"]), (sizes.max_kv, arguments["max_seqlen_kv"])),
            0 if recipe is None else recipe.rows,
            (arguments["descale_q"], arguments["descale_k"], arguments["descale_v"]),
        ),
    )
    if "torch.distributed.tensor" in sys.modules and type(q).__name__ != "DTensor":
        validation.check_local(x._asdict(), ", or q, k and v as DTensors too")
    if dropout_p == 0.0:
        x = x._replace(rng_state=None)
    if out is not None:
        validation.check_apart(x)
    if needs_grad or is_fp8 or config is not None:
        x = with_cu_seqlens(x, formats)
    if results.packing and config is not None and config.rotation:
        raise ValueError("fp8_recipe.rotation is True and the gradients share a buffer; accepted: rotation False")
    out_dtype = None if recipe is None else recipe.out_dtype
    if results.out and out_dtype in validation.FP8_DTYPES:
        raise ValueError(f"fp8_recipe.out_dtype is {out_dtype} and out is to lie in {results.out}; accepted: a 16-bit dtype there")
    deterministic = arguments["deterministic"]
    settings = ops.Settings(
        qkv_format=arguments["qkv_format"],
        padding="padding" in arguments["attn_mask_type"],
        window_left=mods.band.left,
        window_right=mods.band.right,
        bottom_right=mods.band.bottom_right,
        bias_type=given["bias_type"],
        softmax_type=given["softmax_type"],
        return_max_logit=arguments["return_max_logit"],
        needs_grad=needs_grad,
        needs_bias_grad=torch.is_grad_enabled() and bias is not None and bias.requires_grad,
        deterministic=torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic,
        backend=request,
        is_part=is_backward,
        mods="" if traced is None or traced.program.is_empty else traced.program.text,
        has_floor=traced is not None and traced.has_floor,
        block_size_q=0 if blocks is None else blocks.block_size[0],
        block_size_kv=0 if blocks is None else blocks.block_size[1],
        out_format=results.out,
        dq_format=results.dq,
        dkv_format=results.dkv,
        dqkv_packing=results.packing,
        fp32_gradients=results.fp32,
        fp32_out=results.fp32_out,
        batch_invariant=not is_backward and (arguments["batch_invariant"] or options.batch_invariant()),
        kv_block=kv_block,
        **fp8_settings,
    )
    return Prepared(x, settings, config)


def check_whole(q: Tensor, k: Tensor, v: Tensor, arguments: Arguments) -> None:
    """Raises if whole tensors do not fit, before ranks divide them. The default slopes of ALiBi become an argument."""
    formats = parse_format(str(arguments["qkv_format"]))
    given = arguments.copy()
    if (dtype := _autocast_dtype(q)) is not None:  # in place of casts, tensors without memory of their own
        q, k, v = (_like(t, dtype) if _is_cast(t) else t for t in (q, k, v))
        given["bias"] = _like(given["bias"], dtype) if _is_cast(given["bias"], torch.float32) else given["bias"]
    _check_names_and_numbers(given)
    make_band(given["attn_mask_type"], given["window_size"], given["bottom_right_diagonal"])
    validation.check_qkv(q, k, v, *formats)
    sizes = _checked_sizes(q, k, formats, given)
    mask_mod = given["mask_mod"]
    if given["block_mask"] is not None:
        from flexattn.block_mask import checked_tensors  # here, because calls without a block mask should not wait for its import

        checked_tensors(given["block_mask"], sizes.batch, sizes.heads, (sizes.max_q, sizes.max_kv), q.device)
        mask_mod = given["block_mask"].mask_mod
    _check_mod_sizes((given["score_mod"], mask_mod), sizes, "padding" in given["attn_mask_type"])
    arguments["alibi_slopes"] = given["alibi_slopes"]


def _check_names_and_numbers(arguments: Arguments) -> None:
    """Raises for invalid names, flags and numbers. The numbers become Python's own."""
    validation.check_name("bias_type", arguments["bias_type"], BIAS_TYPES)
    validation.check_name("softmax_type", arguments["softmax_type"], SOFTMAX_TYPES)
    validation.check_flag("bottom_right_diagonal", arguments["bottom_right_diagonal"], optional=True)
    validation.check_flag("deterministic", arguments["deterministic"], optional=True)
    validation.check_flag("batch_invariant", arguments["batch_invariant"])
    validation.check_flag("return_lse", arguments["return_lse"])
    validation.check_flag("return_max_logit", arguments["return_max_logit"])
    numbers = validation.check_scalars(arguments["softmax_scale"], arguments["softcap"], arguments["dropout_p"])
    arguments["softmax_scale"], arguments["softcap"], arguments["dropout_p"] = numbers


def _checked_sizes(q: Tensor, k: Tensor, formats: tuple[str, str], arguments: Arguments) -> _Sizes:
    """Returns the sizes of a call. Raises if its tensors and lengths disagree. The default slopes of ALiBi become an argument."""
    (q_format, kv_format), mask_type, bias = formats, arguments["attn_mask_type"], arguments["bias"]
    table, max_seqlen_q, max_seqlen_kv = arguments["page_table"], arguments["max_seqlen_q"], arguments["max_seqlen_kv"]
    missing: list[str] = []
    bias_q = bias_kv = None  # sizes of the bias
    if bias is not None:
        bias_q, bias_kv = bias.shape[2:] if isinstance(bias, Tensor) and bias.dim() == 4 else (0, 0)
        lengths_by_format = (("max_seqlen_q", max_seqlen_q, q_format), ("max_seqlen_kv", max_seqlen_kv, kv_format))
        missing = [name for name, value, fmt in lengths_by_format if fmt == "thd" and value is None]
    sides = lengths.Side.of("q", q, q_format, arguments), lengths.Side.of("kv", k, kv_format, arguments)
    batch = lengths.check_lengths(mask_type, *sides, missing)
    max_q = lengths.resolve_max_seqlen("max_seqlen_q", max_seqlen_q, q, q_format, bias_q)
    if table is None:
        max_kv = lengths.resolve_max_seqlen("max_seqlen_kv", max_seqlen_kv, k, kv_format, bias_kv)
    else:
        max_kv = lengths.longest_in_pages(max_seqlen_kv, table, k.shape[kv_format.index("s")])
    heads, bias_type = q.shape[q_format.index("h")], str(arguments["bias_type"])
    slopes, rng_state = arguments["alibi_slopes"], arguments["rng_state"]
    validation.check_bias(bias_type, bias, q, (batch, heads, max_q, max_kv))
    if slopes is not None:
        validation.check_alibi_slopes(bias_type, slopes, q, batch, heads)
    elif bias_type == "alibi":
        arguments["alibi_slopes"] = default_alibi_slopes(heads, q.device)
    validation.check_softmax_offset(str(arguments["softmax_type"]), arguments["softmax_offset"], q, heads)
    if rng_state is not None:
        validation.check_rng_state(rng_state, q, batch)
    return _Sizes(batch, heads, k.shape[kv_format.index("h")], max_q, max_kv)


def _prepared_mods(q: Tensor, sizes: _Sizes, band: Band, arguments: Arguments, needs_grad: bool, can_check_floor: bool) -> _Mods:
    """Returns the traced mods of a call, if it has any. needs_grad: whether another tensor of the call needs a gradient."""
    score_mod, mask_mod, tensors = arguments["score_mod"], arguments["mask_mod"], arguments["score_mod_tensors"]
    batch, heads, _, max_q, max_kv = sizes
    block_mask, blocks = arguments["block_mask"], None
    if block_mask is not None:
        if mask_mod is not None:
            raise ValueError("mask_mod is given with a block_mask, which has one of its own; accepted: one of the two")
        from flexattn.block_mask import block_lists  # here, because calls without a block mask should not wait for its import

        blocks = block_lists(block_mask, batch, heads, max_q, max_kv, q.device)
        mask_mod = block_mask.mask_mod
    if score_mod is None and mask_mod is None and tensors is NO_TENSORS:
        return _Mods(None, band, blocks, needs_grad)
    validation.check_mod_arguments(score_mod, mask_mod, tensors)
    if score_mod is None and mask_mod is None:
        return _Mods(None, band, blocks, needs_grad)
    has_padding, bias_type = "padding" in arguments["attn_mask_type"], arguments["bias_type"]
    _check_mod_sizes((score_mod, mask_mod), sizes, has_padding)
    # A band that the mods imply can join one on the same diagonal. ALiBi measures from the band's diagonal, so with ALiBi the band
    # stays. A block mask's full blocks are not masked.
    is_open = band.left is None and band.right is None
    masks = 0
    if bias_type != "alibi" and blocks is None and (is_open or not band.bottom_right):
        returns_scores = arguments["return_max_logit"] or arguments["return_aux"] is not None
        is_plain = bias_type == "no_bias" and not has_padding and mask_mod is None and not returns_scores
        masks = _masks(band, max_q, max_kv) if is_plain and can_check_floor else 1
    traced = _trace_mods(score_mod, mask_mod, tensors, needs_grad, masks, q)
    if traced.left is not None or traced.right is not None:
        band = Band(_narrower(band.left, traced.left), _narrower(band.right, traced.right), bottom_right=False)
    traced = traced._replace(tensors=validation.check_mod_tensors(traced.program.captures, traced.tensors, q))
    return _Mods(traced, band, blocks, needs_grad or any(traced.program.tensor_needs_grad))


def _check_mod_sizes(mods: tuple[Mod | None, Mod | None], sizes: _Sizes, has_padding: bool) -> None:
    """Raises ValueError if a tensor of one of the library's mods is too small for the call."""
    # Sequences with lengths may be shorter than any number on the host says.
    longest = (None, None) if has_padding else (sizes.max_q, sizes.max_kv)
    for mod in mods if not torch.compiler.is_compiling() else ():
        check_sizes = getattr(mod, "_flexattn_check_sizes", None)
        if check_sizes is not None:
            check_sizes(sizes.batch, sizes.heads, *longest)


def _autocast_dtype(q: object) -> torch.dtype | None:
    """Returns the dtype of autocast, or None if it is off for q."""
    if isinstance(q, Tensor) and q.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(q.device.type):
        return torch.get_autocast_dtype(q.device.type)
    return None


def _is_cast(x: object, *kept: torch.dtype) -> bool:
    """Returns whether autocast casts x: not float64, FP8 or a tensor without floating point numbers."""
    return isinstance(x, Tensor) and x.is_floating_point() and x.dtype not in (torch.float64, *validation.FP8_DTYPES, *kept)


def _autocast(x: Any, dtype: torch.dtype, *kept: torch.dtype) -> Any:
    """Returns x as autocast gives it to a matrix product."""
    return x.to(dtype) if _is_cast(x, *kept) else x


def cast_for_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns tensors in autocast's dtype if it is on. float64 and FP8 stay."""
    dtype = _autocast_dtype(q)
    return (q, k, v) if dtype is None else (_autocast(q, dtype), _autocast(k, dtype), _autocast(v, dtype))


def _like(x: Any, dtype: torch.dtype) -> Tensor:
    """Returns a tensor of x's shape in another dtype, whose elements are one place in memory."""
    return torch.empty((), dtype=dtype, device=x.device).expand(x.shape)


def _narrower(a: int | None, b: int | None) -> int | None:
    if a is None or b is None:
        return b if a is None else a
    return min(a, b)


def _masks(band: Band, max_q: int, max_kv: int) -> int:
    """Returns a `Masks`: the scores that may become a band beside that of a call without padding, bias and mask_mod.

    If a finite score hides all keys of a query, that query sees all keys alike. So each query that sees a key of the call's own
    band must see one of the mod's too.
    """
    if misses_diagonal(band.left, band.right):
        return 1
    if torch.compiler.is_exporting():  # a comparison would hold for the sizes of the program's inputs
        from torch.fx.experimental.symbolic_shapes import statically_known_true  # here, because few processes export

        return 3 if statically_known_true(max_q <= max_kv) else 1
    if max_q <= max_kv:
        return 3
    return 2 if band.left is None and max_kv > 0 else 1


def _trace_mods(
    score_mod: Mod | None, mask_mod: Mod | None, tensors: Any, needs_grad: bool, masks: int, q: Tensor
) -> Traced | Recorded:
    from flexattn.mods.bands import Masks  # here, because calls without mods should not wait for its import

    if torch.compiler.is_dynamo_compiling():
        from flexattn.mods.dynamo import record_mods

        return record_mods(score_mod, mask_mod, tensors, needs_grad, Masks(masks), q)
    from flexattn.mods.trace import trace_mods

    return trace_mods(score_mod, mask_mod, tensors, needs_grad, Masks(masks))


@keep(64)
def default_alibi_slopes(heads: int, device: torch.device) -> Tensor:
    """Returns the slopes of Press et al. (2022): 2**(-8 i / n) for head i = 1..n if n is a power of two.

    Otherwise n' < n, the power of two below, has these slopes. The other heads have every other slope of 2 n'.
    """
    power = 2 ** (heads.bit_length() - 1)
    head = torch.arange(heads, dtype=torch.float32, device=device)
    exponent = torch.where(head < power, (head + 1) * 8 / power, (2 * (head - power) + 1) * 4 / power)
    return torch.exp2(-exponent)
