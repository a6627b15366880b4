"""Calls that cuDNN does not support, or that some versions of it compute wrongly, as data.

The rows of FP8 are cuDNN's answers on sm_90, which are the same from 9.15.1 to 9.24. The tests compare them with cuDNN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from flexattn.dispatch.spec import AttentionSpec, Direction

FORWARD: tuple[Direction, ...] = ("forward",)
BACKWARD: tuple[Direction, ...] = ("backward",)
BOTH = FORWARD + BACKWARD
_TRITON = "; use backend='triton'"


class Rule(NamedTuple):
    """A condition for a refusal, and the reason with an alternative."""

    applies: Callable[[AttentionSpec], bool]
    reason: str  # a format string with `spec`.
    directions: tuple[Direction, ...] = BOTH
    declined: tuple[Direction, ...] = ()  # in FP8, the directions in which cuDNN itself declines the graph. In others only we do.


def refusal(rules: tuple[Rule, ...], spec: AttentionSpec, direction: Direction) -> str | None:
    """Returns the reason of the first rule that applies to `spec`, or None if no rule applies."""
    for rule in rules:
        if direction in rule.directions and rule.applies(spec):
            return rule.reason.format(spec=spec)
    return None


def is_banded_bottom_right(spec: AttentionSpec) -> bool:
    return spec.band.bottom_right and (spec.band.left is not None or spec.band.right is not None)


def is_packed(spec: AttentionSpec) -> bool:
    return "thd" in (spec.q_format, spec.kv_format)


FP8 = (
    Rule(
        lambda spec: spec.fp8 is not None and any(spec.fp8.descale_dims),
        "cuDNN supports one scale per FP8 tensor, and this call has scales per head, batch entry or block of rows; quantise with "
        "granularity='tensor', or use backend='triton'",
    ),
    Rule(
        lambda spec: max(spec.head_dim_qk, spec.head_dim_v) > 256,
        "the head dims are {spec.head_dim_qk} and {spec.head_dim_v}; cuDNN supports up to 256 in FP8; larger ones run on "
        "backend='eager'",
        declined=BOTH,
    ),
    Rule(
        lambda spec: any(dim % 16 or not 16 <= dim <= 256 for dim in (spec.head_dim_qk, spec.head_dim_v)),
        "the head dims are {spec.head_dim_qk} and {spec.head_dim_v}; cuDNN's FP8 forward supports multiples of 16 up to 256; "
        "pad with zeros",
        FORWARD,
        declined=FORWARD,
    ),
    Rule(
        lambda spec: (spec.head_dim_qk, spec.head_dim_v) != (128, 128),
        "the head dims are {spec.head_dim_qk} and {spec.head_dim_v}; cuDNN's FP8 backward supports only 128 on sm_90; pad smaller "
        "ones with zeros, or use backend='triton'",
        BACKWARD,
        declined=BACKWARD,
    ),
    Rule(
        is_packed,
        "cuDNN's FP8 backward does not support packed sequences on sm_90; use backend='triton', or a dense format with cu_seqlens",
        BACKWARD,
        declined=BACKWARD,
    ),
    Rule(
        is_banded_bottom_right,
        "cuDNN's FP8 graphs do not support the bottom-right diagonal on sm_90; if sq == skv, use the top-left diagonal, which is "
        "the same (attn_mask_type='causal', or bottom_right_diagonal=False)",
        declined=BOTH,
    ),
    Rule(
        lambda spec: spec.length_q == 1,
        "cuDNN's FP8 forward does not support a single query on sm_90; use backend='triton'",
        FORWARD,
        declined=FORWARD,
    ),
    Rule(lambda spec: spec.bias_type != "no_bias", "cuDNN's FP8 graphs do not support a bias; use backend='triton'", declined=BOTH),
    Rule(
        lambda spec: spec.softmax_type != "vanilla",
        "cuDNN's FP8 forward with a sink does not compile on sm_90; use backend='triton'",
        declined=FORWARD,
    ),
    Rule(lambda spec: spec.mods is not None, "cuDNN's FP8 graphs do not support score_mod or mask_mod; use backend='triton'"),
    Rule(lambda spec: spec.dropout, "dropout in FP8 is untested on cuDNN; use backend='triton'"),
    Rule(lambda spec: spec.return_max_logit, "cuDNN's FP8 graphs do not return max_logit; use backend='triton'", FORWARD),
)

# The rest of the sentence "cuDNN's block-sparse attention ...".
BLOCK_LISTS = (
    Rule(lambda spec: spec.capability != (9, 0), "is untested on GPUs other than those of compute capability 9.0" + _TRITON),
    Rule(
        lambda spec: spec.mods is not None,
        "has no block masks with a mask_mod or score_mod; pass the mask as a mask_mod only, or use backend='triton'",
    ),
    Rule(
        lambda spec: spec.block_size not in ((64, 64), (128, 128)),
        "supports blocks of 64 x 64 and 128 x 128 tokens, not {spec.block_size[0]} x {spec.block_size[1]}; pass kv_block_size=64 "
        "or 128, or use backend='triton'",
    ),
    Rule(lambda spec: spec.fp8 is not None or spec.kv_dtype is not None, "is not supported here in FP8" + _TRITON),
    Rule(
        lambda spec: spec.dtype not in (torch.float16, torch.bfloat16),
        "supports fp16 and bf16, not {spec.dtype}; cast q, k and v, or use backend='triton'",
    ),
    Rule(lambda spec: bool(spec.page_size), "has no pages (page_table)" + _TRITON),
    Rule(lambda spec: spec.padding or is_packed(spec), "has no lengths (cu_seqlens, seqused)" + _TRITON),
    Rule(
        lambda spec: spec.band.left is not None or spec.band.right is not None,
        "has no causal mask or window (attn_mask_type, window_size)" + _TRITON,
    ),
    Rule(lambda spec: spec.bias_type != "no_bias", "has no bias and no alibi_slopes" + _TRITON),
    Rule(lambda spec: spec.softmax_type != "vanilla", "has no sink (softmax_type)" + _TRITON),
    Rule(lambda spec: spec.softcap, "has no softcap" + _TRITON),
    Rule(lambda spec: spec.dropout, "has no dropout (dropout_p)" + _TRITON),
    Rule(lambda spec: spec.return_max_logit, "returns no max_logit (return_max_logit)" + _TRITON, FORWARD),
    Rule(lambda spec: spec.batch_invariant, "gives no guarantee of batch_invariant" + _TRITON, FORWARD),
    Rule(lambda spec: spec.results.fp32_out, "returns out in 16 bits" + _TRITON, FORWARD),
    Rule(
        lambda spec: not {spec.head_dim_qk, spec.head_dim_v}.issubset((64, 96, 128)),
        "supports head dims of 64, 96 and 128, not {spec.head_dim_qk} and {spec.head_dim_v}; pad with zeros, or "
        "use backend='triton'",
        FORWARD,
    ),
    Rule(
        lambda spec: {spec.head_dim_qk, spec.head_dim_v} != {128},
        "has gradients for head dims of 128, not {spec.head_dim_qk} and {spec.head_dim_v}; pad with zeros, or use backend='triton'",
        BACKWARD,
    ),
    Rule(lambda spec: spec.dtype is not torch.bfloat16, "has gradients in bf16 alone, not in {spec.dtype}" + _TRITON, BACKWARD),
    Rule(
        lambda spec: spec.group_size != 1,
        "has gradients for as many key heads as query heads, not for {spec.num_heads} over {spec.num_heads_kv}" + _TRITON,
        BACKWARD,
    ),
    Rule(lambda spec: spec.deterministic, "adds gradients in any order (deterministic)" + _TRITON, BACKWARD),
    Rule(
        lambda spec: spec.needs_lse_grad, "takes no gradient of lse; leave lse out of the loss, or use backend='triton'", BACKWARD
    ),
    Rule(lambda spec: spec.results.fp32 != "none", "returns gradients in 16 bits (fp32_gradients)" + _TRITON, BACKWARD),
)

ALWAYS = 10**9
HOPPER = ((9, 0),)
BLACKWELL = ((10, 0), (10, 3))


class KnownBad(NamedTuple):
    """An error, its versions, GPUs and specs, and a public source. The rows are checked before a plan is built.

    If the graphs avoid an error by construction, there is no row, and `kernels_cudnn` documents the error next to the code that
    avoids it.
    """

    first: int  # the first affected cuDNN version as a number, such as 91900 for 9.19.0.
    fixed: int  # the first version without the error, or ALWAYS if none is known.
    directions: tuple[Direction, ...]
    applies: Callable[[AttentionSpec], bool]
    what: str
    issue: str
    capabilities: tuple[tuple[int, int], ...] | None = None  # affected compute capabilities. None stands for all of them.


def _wide_and_uneven(spec: AttentionSpec) -> bool:
    dims = (spec.head_dim_qk, spec.head_dim_v)
    return min(dims) >= 128 and dims[0] != dims[1] and dims != (192, 128)


def _may_leave_fp8_queries_without_keys(spec: AttentionSpec) -> bool:
    """Returns whether a window's left side may pass the last key. If dense lengths are unknown here, the launcher checks them."""
    if spec.fp8 is None or spec.band.left is None:
        return False
    has_lengths = spec.padding or is_packed(spec)
    return has_lengths or spec.length_q > spec.length_kv > 0


KNOWN_BAD = (
    KnownBad(
        0,
        92600,
        BACKWARD,
        lambda spec: spec.softmax_type != "vanilla" and is_packed(spec),
        "the gradient of a sink over packed sequences is read out of bounds",
        "https://github.com/NVIDIA/TransformerEngine/issues/3249",
    ),
    KnownBad(
        0,
        91800,
        BACKWARD,
        is_packed,
        "gradients of packed sequences may be NaN, because a workspace is not cleared",
        "https://github.com/NVIDIA/TransformerEngine/issues/2186",
    ),
    KnownBad(
        91100,
        ALWAYS,
        BACKWARD,
        _wide_and_uneven,
        "gradients are wrong if both head dims are 128 or more and differ, except for 192 and 128",
        "https://github.com/NVIDIA/TransformerEngine, nvte_get_fused_attn_backend",
        HOPPER,
    ),
    KnownBad(
        92500,
        ALWAYS,
        BACKWARD,
        lambda spec: spec.length_q == 1,
        "dk and dv of a single query are NaN if its lse is very negative",
        "https://github.com/NVIDIA/cudnn-frontend/issues/1072",
    ),
    KnownBad(
        0,
        ALWAYS,
        BOTH,
        lambda spec: spec.dropout and not spec.dropout_in_sixteenths,
        "some kernels round dropout_p to a multiple of 1/16",
        "https://github.com/pytorch/pytorch/issues/174245",
    ),
    KnownBad(
        0,
        92300,
        FORWARD,
        lambda spec: spec.fp8 is not None and is_packed(spec),
        "packed sequences in FP8 end in an illegal instruction (seen on 9.19; TransformerEngine supports them from 9.23 on)",
        "https://github.com/NVIDIA/TransformerEngine/pull/2994",
    ),
    KnownBad(
        0,  # seen in 9.25 and 9.27. No version without the error is known.
        ALWAYS,
        FORWARD,
        _may_leave_fp8_queries_without_keys,
        "an FP8 kernel on sm_90 never ends if a tile of queries sees no key, as may happen with a window and lengths; use "
        "backend='triton', or a window without a left side",
        "https://github.com/NVIDIA/cudnn-frontend/issues/1009",
    ),
    KnownBad(
        0,  # seen in 9.19 and 9.20, on a B200. No version without the error is known.
        ALWAYS,
        FORWARD,
        lambda spec: spec.length_q == 1 and spec.num_heads_kv < 8,
        "a decoded token is wrong if keys and values have fewer than 8 heads; use backend='triton'",
        "https://github.com/pytorch/pytorch/issues/193893",
        BLACKWELL,
    ),
    KnownBad(
        0,
        ALWAYS,
        FORWARD,
        lambda spec: spec.fp8 is not None and max(spec.head_dim_qk, spec.head_dim_v) > 192,
        "FP8 results have wrong elements at head dim 256, and head dims above 192 are untested; use backend='triton'",
        "https://github.com/NVIDIA/cudnn-frontend/issues/981",
        BLACKWELL,
    ),
)


def known_bad(spec: AttentionSpec, direction: Direction, version: int) -> str | None:
    """Returns the reason of the first row that applies to `spec` on cuDNN `version`, or None if no row applies."""
    for row in KNOWN_BAD:
        is_affected = row.capabilities is None or spec.capability in row.capabilities
        if is_affected and row.first <= version < row.fixed and direction in row.directions and row.applies(spec):
            return f"cuDNN {version_text(version)} computes it wrongly: {row.what} ({row.issue})"
    return None


def version_text(version: int) -> str:
    """Returns a version number as text, such as '9.19.0' for 91900."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
