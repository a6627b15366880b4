"""Short forms of `attention`'s arguments, and the long forms that they become; later code only knows the long forms."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flexattn.call_options import ALIASES, BOTH_SIDES, DEFAULTS
from flexattn.dispatch.neutral import sizes_of
from flexattn.dispatch.spec import BiasType, SoftmaxType, as_index, parse_format, with_padding
from flexattn.lengths import longest_in_pages
from flexattn.validation import check_flag, describe

DIAGONALS = (
    "Pass attn_mask_type={0!r} if query i sees keys j <= i (top-left diagonal, SDPA's is_causal), or {1!r} if the last query sees "
    "every key (bottom-right diagonal, FlashAttention's causal, and decoding)"
)


def in_full(q: object, k: object, arguments: Mapping[str, object]) -> Any:
    """Returns all arguments except q, k and v without short forms: the `Arguments` that `prepare` takes.

    arguments: arguments of `attention`. Missing ones get their defaults. Raises if a short form contradicts another argument;
    `prepare` checks everything else. `q` and `k` may be arrays of any library.
    """
    full = DEFAULTS | without_aliases(q, k, arguments)
    for name in ALIASES:
        del full[name]
    formats = parse_format(str(full["qkv_format"]))
    causal, mask_type = full.pop("causal"), full["attn_mask_type"]
    check_flag("causal", causal)
    if isinstance(mask_type, str) and mask_type in ("no_mask", "causal", "causal_bottom_right", "padding"):
        is_packed = "thd" in formats
        if causal and "causal" not in mask_type:
            has_lengths = mask_type == "padding" or is_packed
            _check_one_diagonal(q, k, full, formats, has_lengths)
            mask_type = "padding_causal" if has_lengths else "causal"
        full["attn_mask_type"] = with_padding(mask_type) if is_packed else mask_type
    full["bias_type"] = bias_type_of(full["bias_type"], full["bias"], full["alibi_slopes"])
    full["softmax_type"] = softmax_type_of(full["softmax_type"], full["softmax_offset"])
    return full


def without_aliases(q: Any, k: Any, options: Mapping[str, object]) -> dict[str, Any]:
    """Returns the options with cu_seqlens, max_seqlen, mask and lists of blocks written as other options."""
    given = dict(options)
    for name in BOTH_SIDES:
        value = given.pop(name, None)
        if value is not None:
            for side in (f"{name}_q", f"{name}_kv"):
                if given.get(side) is not None:
                    raise ValueError(f"{name} and {side} are given. Pass {name} for both sides, or {name}_q and {name}_kv.")
                given[side] = value
    if given.get("kv_block_size") is not None:
        from flexattn.key_lists import with_block_mask  # here, because calls without lists of blocks should not wait for its import

        given = with_block_mask(q, k, given, functools.partial(score_sizes, argument="kv_block_size"))
    mask = given.pop("mask", None)
    if mask is not None:
        given.update(masked(q, mask, score_sizes(q, k, DEFAULTS | given), DEFAULTS | given))
    return given


def bias_type_of(bias_type: object, bias: object, alibi_slopes: object) -> Any:
    """Returns the type of bias that the tensors imply if no type is given."""
    if bias_type is not None:
        return bias_type
    if bias is not None and alibi_slopes is not None:
        raise ValueError(
            "bias and alibi_slopes are given, and a call adds one of them. Leave one out, or add ALiBi in a score_mod, such as "
            "flexattn.mods.alibi(slopes)."
        )
    implied: BiasType = "post_scale_bias" if bias is not None else "alibi" if alibi_slopes is not None else "no_bias"
    return implied


def softmax_type_of(softmax_type: object, softmax_offset: object) -> Any:
    """Returns the type of softmax that the tensor implies if no type is given."""
    if softmax_type is not None:
        return softmax_type
    implied: SoftmaxType = "vanilla" if softmax_offset is None else "learnable"
    return implied


def _check_one_diagonal(q: object, k: object, full: dict[str, object], formats: tuple[str, str], has_lengths: bool) -> None:
    """Raises if the diagonals from the first key and from the last key may differ."""
    if has_lengths:
        pairs = [(full.get(f"{name}_q"), full.get(f"{name}_kv")) for name in ("cu_seqlens", "seqused")]
        if formats[0] == formats[1] and full.get("page_table") is None and all(a is b for a, b in pairs):
            return
        why = "queries and keys have lengths of their own, so their diagonals may differ"
        hint = "Pass one tensor, as cu_seqlens=, if their lengths are the same. "
    else:
        sizes = [sizes_of(x) if isinstance(x, Tensor) else getattr(x, "shape", ()) for x in (q, k)]
        if any(len(shape) != len(fmt) for shape, fmt in zip(sizes, formats, strict=True)):
            return  # whose dims raise
        len_q, len_kv = (shape[fmt.index("s")] for shape, fmt in zip(sizes, formats, strict=True))
        if len_q == len_kv:
            return  # before a text has the lengths, which torch.compile would take for constants
        why, hint = f"there are {len_q} queries and {len_kv} keys, so two diagonals are possible", ""
    names = ("padding_causal", "padding_causal_bottom_right") if has_lengths else ("causal", "causal_bottom_right")
    raise ValueError(f"causal is True and {why}. {hint}{DIAGONALS.format(*names)}.")


def score_sizes(q: Any, k: Any, full: dict[str, Any], argument: str = "mask") -> tuple[object, ...]:
    """Returns the sizes [b, h, sq, skv] of the scores of a mask or a bias. Raises if they are not known.

    argument: the name of the mask in errors.
    """
    q_format, kv_format = parse_format(str(full["qkv_format"]))
    for name, x, fmt in (("q", q, q_format), ("k", k, kv_format)):
        if not isinstance(x, Tensor) or is_jagged(x) or x.dim() != len(fmt):
            nested = isinstance(x, Tensor) and is_jagged(x)
            instead = "Pass a mask_mod instead of mask." if nested else f"Pass a tensor with the {len(fmt)} dims of {fmt}."
            raise ValueError(f"{argument} is given and {name} is {'nested' if nested else describe(x)}. {instead}")
    lengths = []
    for end, x, fmt in (("q", q, q_format), ("kv", k, kv_format)):
        length = as_index(full[f"max_seqlen_{end}"]) if fmt == "thd" else sizes_of(x)[fmt.index("s")]
        if length is None:
            raise ValueError(
                f"{argument} is given with packed sequences and without max_seqlen_{end}. Pass max_seqlen_{end}, the size of the "
                "mask in that dim; the mask is indexed within each sequence."
            )
        lengths.append(length)
    table, cu_seqlens = full.get("page_table"), full["cu_seqlens_q"]
    if table is not None and isinstance(table, Tensor) and table.dim() == 2:
        lengths[1] = longest_in_pages(full["max_seqlen_kv"], table, sizes_of(k)[kv_format.index("s")])
    if q_format != "thd":
        batch = sizes_of(q)[q_format.index("b")]
    else:
        batch = sizes_of(cu_seqlens)[0] - 1 if isinstance(cu_seqlens, Tensor) and cu_seqlens.dim() == 1 else 1
    return batch, sizes_of(q)[q_format.index("h")], *lengths


def masked(q: Tensor, mask: Any, sizes: tuple[Any, ...], full: Mapping[str, Any]) -> dict[str, Any]:
    """Returns bias_type, bias and mask_mod of a call with a mask.

    sizes: the sizes of the scores. full: the other arguments.
    """
    from flexattn.masks import (  # here, because calls without a mask should not wait for their import
        mask_arguments,
        mask_dtypes,
        seen_by_both,
    )

    mask_options = mask_arguments("mask", mask, sizes[:1], sizes[1:], mask_dtypes(q), q.device)
    bias_type, mask_mod = full["bias_type"], full["mask_mod"]
    if "bias" in mask_options:
        if full["bias"] is not None:
            raise ValueError("bias and a float mask are given, and both are added to scores. Pass their sum as bias.")
        if full["alibi_slopes"] is not None or bias_type not in (None, "post_scale_bias"):
            came = "alibi_slopes is" if full["alibi_slopes"] is not None else f"bias_type {bias_type!r} is"
            raise ValueError(
                f"{came} given beside a float mask, which is a bias of type 'post_scale_bias'. Pass a bool mask, or leave one out."
            )
        return mask_options
    if full["block_mask"] is not None:
        raise ValueError("mask is given with a block_mask, which has a mask_mod of its own. Put the mask into that mask_mod.")
    return mask_options if mask_mod is None else {"mask_mod": seen_by_both(mask_mod, mask_options["mask_mod"])}


def is_jagged(x: object) -> bool:
    """Returns whether x is a jagged nested tensor. Quick if it is a plain one."""
    return type(x) is not Tensor and isinstance(x, Tensor) and x.layout == torch.jagged
