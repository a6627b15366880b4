"""Calls that versions of cuDNN accept and compute wrongly, as data. The rows are checked before a plan is built.

A row has the error, the versions, the GPUs, the specs, and a public source. If the graphs avoid an error by construction, there
is no row, and `kernels_cudnn` documents the error next to the code that avoids it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from flexattn.dispatch.spec import AttentionSpec, Direction

ALWAYS = 10**9
HOPPER = ((9, 0),)
BLACKWELL = ((10, 0), (10, 3))


class KnownBad(NamedTuple):
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
    has_lengths = spec.padding or "thd" in (spec.q_format, spec.kv_format)
    return has_lengths or spec.length_q > spec.length_kv > 0


KNOWN_BAD = (
    KnownBad(
        0,
        92600,
        ("backward",),
        lambda spec: spec.softmax_type != "vanilla" and "thd" in (spec.q_format, spec.kv_format),
        "the gradient of a sink over packed sequences is read out of bounds",
        "https://github.com/NVIDIA/TransformerEngine/issues/3249",
    ),
    KnownBad(
        0,
        91800,
        ("backward",),
        lambda spec: "thd" in (spec.q_format, spec.kv_format),
        "gradients of packed sequences may be NaN, because a workspace is not cleared",
        "https://github.com/NVIDIA/TransformerEngine/issues/2186",
    ),
    KnownBad(
        91100,
        ALWAYS,
        ("backward",),
        _wide_and_uneven,
        "gradients are wrong if both head dims are 128 or more and differ, except for 192 and 128",
        "https://github.com/NVIDIA/TransformerEngine, nvte_get_fused_attn_backend",
        HOPPER,
    ),
    KnownBad(
        92500,
        ALWAYS,
        ("backward",),
        lambda spec: spec.length_q == 1,
        "dk and dv of a single query are NaN if its lse is very negative",
        "https://github.com/NVIDIA/cudnn-frontend/issues/1072",
    ),
    KnownBad(
        0,
        ALWAYS,
        ("forward", "backward"),
        lambda spec: spec.dropout and not spec.dropout_in_sixteenths,
        "some kernels round dropout_p to a multiple of 1/16",
        "https://github.com/pytorch/pytorch/issues/174245",
    ),
    KnownBad(
        0,
        92300,
        ("forward",),
        lambda spec: spec.fp8 is not None and "thd" in (spec.q_format, spec.kv_format),
        "packed sequences in FP8 end in an illegal instruction (seen on 9.19; TransformerEngine supports them from 9.23 on)",
        "https://github.com/NVIDIA/TransformerEngine/pull/2994",
    ),
    KnownBad(
        0,  # seen in 9.25 and 9.27. No version without the error is known.
        ALWAYS,
        ("forward",),
        _may_leave_fp8_queries_without_keys,
        "an FP8 kernel on sm_90 never ends if a tile of queries sees no key, as may happen with a window and lengths; use "
        "backend='triton', or a window without a left side",
        "https://github.com/NVIDIA/cudnn-frontend/issues/1009",
    ),
    KnownBad(
        0,  # seen in 9.19 and 9.20, on a B200. No version without the error is known.
        ALWAYS,
        ("forward",),
        lambda spec: spec.length_q == 1 and spec.num_heads_kv < 8,
        "a decoded token is wrong if keys and values have fewer than 8 heads; use backend='triton'",
        "https://github.com/pytorch/pytorch/issues/193893",
        BLACKWELL,
    ),
    KnownBad(
        0,
        ALWAYS,
        ("forward",),
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
