"""Rules for what cuDNN's FP8 graphs take on sm_90, as data: one for each thing that they do not. Needs neither cuDNN nor torch.

From 9.15.1 to 9.24 cuDNN's own answers are the same; the tests ask both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

BOTH = ("forward", "backward")


class Fp8Call(NamedTuple):
    """Facts of a call that the rules ask about."""

    direction: str  # "forward" or "backward"
    head_dim_qk: int
    head_dim_v: int
    one_dtype: bool = True  # q, k and v have one dtype
    per_tensor: bool = True  # each of the tensors has one scale
    is_packed: bool = False  # q, or k and v, are [total, h, d]
    one_query: bool = False
    is_bottom_right: bool = False  # there is a band, and it follows that diagonal
    has_bias: bool = False
    has_sink: bool = False
    has_mods: bool = False
    has_dropout: bool = False
    wants_max: bool = False
    is_deterministic: bool = False


class Rule(NamedTuple):
    """Calls that are refused, and what to do instead."""

    directions: tuple[str, ...]
    applies: Callable[[Fp8Call], bool]
    reason: str  # with the call's fields by name
    declined: tuple[str, ...] = ()  # the directions in which cuDNN itself declines such a graph; else it is we who do


RULES = (
    Rule(
        BOTH,
        lambda x: not x.per_tensor,
        "cuDNN takes one scale for a tensor in FP8, and there are scales for heads, batch entries or blocks of rows; scale per "
        "tensor, or use backend='triton'",
    ),
    Rule(
        BOTH,
        lambda x: not x.one_dtype,
        "q, k and v are in different FP8 dtypes, and cuDNN's forward takes one; quantise all three to the same",
    ),
    Rule(
        BOTH,
        lambda x: max(x.head_dim_qk, x.head_dim_v) > 256,
        "the head dims are {head_dim_qk} and {head_dim_v}; cuDNN's FP8 graphs take up to 256; larger ones run on backend='eager'",
        declined=BOTH,
    ),
    Rule(
        ("forward",),
        lambda x: any(dim % 16 or not 16 <= dim <= 256 for dim in (x.head_dim_qk, x.head_dim_v)),
        "the head dims are {head_dim_qk} and {head_dim_v}; cuDNN's FP8 forward takes multiples of 16 up to 256; pad with zeros",
        declined=("forward",),
    ),
    Rule(
        ("backward",),
        lambda x: (x.head_dim_qk, x.head_dim_v) != (128, 128),
        "the head dims are {head_dim_qk} and {head_dim_v}; cuDNN's FP8 backward takes 128 alone on sm_90; pad smaller "
        "ones with zeros, or use backend='triton'",
        declined=("backward",),
    ),
    Rule(
        ("backward",),
        lambda x: x.is_packed,
        "cuDNN's FP8 backward takes no packed sequences on sm_90; use backend='triton', or a dense format with cu_seqlens",
        declined=("backward",),
    ),
    Rule(
        BOTH,
        lambda x: x.is_bottom_right,
        "cuDNN's FP8 graphs take no mask along the bottom-right diagonal on sm_90; where sq == skv the top-left one is the same: "
        "attn_mask_type='causal', or bottom_right_diagonal=False",
        declined=BOTH,
    ),
    Rule(
        ("forward",),
        lambda x: x.one_query,
        "cuDNN's FP8 forward takes no single query on sm_90; use backend='triton'",
        declined=("forward",),
    ),
    Rule(BOTH, lambda x: x.has_bias, "cuDNN's FP8 graphs take no bias; use backend='triton'", declined=BOTH),
    Rule(
        BOTH,
        lambda x: x.has_sink,
        "cuDNN's FP8 forward with a sink does not compile on sm_90; use backend='triton'",
        declined=("forward",),
    ),
    Rule(BOTH, lambda x: x.has_mods, "score_mod and mask_mod are not built into the FP8 graphs; use backend='triton'"),
    Rule(BOTH, lambda x: x.has_dropout, "dropout in FP8 is not proved right on cuDNN; use backend='triton'"),
    Rule(("forward",), lambda x: x.wants_max, "the FP8 graphs give no max_logit; use backend='triton'"),
    Rule(
        ("backward",),
        lambda x: x.is_deterministic,
        "cuDNN's deterministic backward needs memory quadratic in the length; use backend='triton'",
    ),
)


@functools.lru_cache(maxsize=1024)
def fp8_error(call: Fp8Call) -> str | None:
    """The reason of the first rule against `call`; None where there is none."""
    for rule in RULES:
        if call.direction in rule.directions and rule.applies(call):
            return rule.reason.format(**call._asdict())
    return None
