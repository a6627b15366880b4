"""Rules for the calls that cuDNN's FP8 graphs do not support on sm_90, as data. This file needs neither cuDNN nor torch.

cuDNN's own answers are the same from 9.15.1 to 9.24. The tests compare them with these rules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

BOTH = ("forward", "backward")


class Fp8Call(NamedTuple):
    """Facts of a call that the rules test."""

    direction: str  # "forward" or "backward".
    head_dim_qk: int
    head_dim_v: int
    per_tensor: bool = True  # whether each tensor has one scale.
    is_packed: bool = False  # whether q, or k and v, are [total, h, d].
    one_query: bool = False
    is_bottom_right: bool = False  # whether there is a band on the bottom-right diagonal.
    has_bias: bool = False
    has_sink: bool = False
    has_mods: bool = False
    has_dropout: bool = False
    wants_max: bool = False


class Rule(NamedTuple):
    """A condition for a refusal, and the reason with an alternative."""

    directions: tuple[str, ...]
    applies: Callable[[Fp8Call], bool]
    reason: str  # a format string with the call's fields by name.
    declined: tuple[str, ...] = ()  # the directions in which cuDNN itself declines the graph. In others only this rule does.


RULES = (
    Rule(
        BOTH,
        lambda x: not x.per_tensor,
        "cuDNN supports one scale per FP8 tensor, and this call has scales per head, batch entry or block of rows; quantise with "
        "granularity='tensor', or use backend='triton'",
    ),
    Rule(
        BOTH,
        lambda x: max(x.head_dim_qk, x.head_dim_v) > 256,
        "the head dims are {head_dim_qk} and {head_dim_v}; cuDNN supports up to 256 in FP8; larger ones run on backend='eager'",
        declined=BOTH,
    ),
    Rule(
        ("forward",),
        lambda x: any(dim % 16 or not 16 <= dim <= 256 for dim in (x.head_dim_qk, x.head_dim_v)),
        "the head dims are {head_dim_qk} and {head_dim_v}; cuDNN's FP8 forward supports multiples of 16 up to 256; pad with zeros",
        declined=("forward",),
    ),
    Rule(
        ("backward",),
        lambda x: (x.head_dim_qk, x.head_dim_v) != (128, 128),
        "the head dims are {head_dim_qk} and {head_dim_v}; cuDNN's FP8 backward supports only 128 on sm_90; pad smaller "
        "ones with zeros, or use backend='triton'",
        declined=("backward",),
    ),
    Rule(
        ("backward",),
        lambda x: x.is_packed,
        "cuDNN's FP8 backward does not support packed sequences on sm_90; use backend='triton', or a dense format with cu_seqlens",
        declined=("backward",),
    ),
    Rule(
        BOTH,
        lambda x: x.is_bottom_right,
        "cuDNN's FP8 graphs do not support the bottom-right diagonal on sm_90; if sq == skv, use the top-left diagonal, which is "
        "the same (attn_mask_type='causal', or bottom_right_diagonal=False)",
        declined=BOTH,
    ),
    Rule(
        ("forward",),
        lambda x: x.one_query,
        "cuDNN's FP8 forward does not support a single query on sm_90; use backend='triton'",
        declined=("forward",),
    ),
    Rule(BOTH, lambda x: x.has_bias, "cuDNN's FP8 graphs do not support a bias; use backend='triton'", declined=BOTH),
    Rule(
        BOTH,
        lambda x: x.has_sink,
        "cuDNN's FP8 forward with a sink does not compile on sm_90; use backend='triton'",
        declined=("forward",),
    ),
    Rule(BOTH, lambda x: x.has_mods, "cuDNN's FP8 graphs do not support score_mod or mask_mod; use backend='triton'"),
    Rule(BOTH, lambda x: x.has_dropout, "dropout in FP8 is untested on cuDNN; use backend='triton'"),
    Rule(("forward",), lambda x: x.wants_max, "cuDNN's FP8 graphs do not return max_logit; use backend='triton'"),
)


@functools.lru_cache(maxsize=1024)
def fp8_error(call: Fp8Call) -> str | None:
    """Returns the reason of the first rule that applies to `call`, or None if no rule applies."""
    for rule in RULES:
        if call.direction in rule.directions and rule.applies(call):
            return rule.reason.format(**call._asdict())
    return None
