"""Real cuDNN plans in FP8 for sm_90, built without a GPU: calls that pass our rules build, and rules explain cuDNN's refusals."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

from tests.support import cudnn_stub

if reason := (
    "a GPU is here: tests/gpu/test_cudnn_fp8.py builds plans for it" if torch.cuda.is_available() else cudnn_stub.missing()
):
    pytest.skip(reason, allow_module_level=True)

from flexattn.dispatch import cudnn_rules
from flexattn.dispatch.cudnn_rules import refusal
from flexattn.dispatch.spec import AttentionSpec, Band, Direction
from flexattn.kernels_cudnn import plans
from flexattn.kernels_cudnn.attention import Written
from flexattn.kernels_cudnn.fp8 import fp8_call
from flexattn.kernels_cudnn.graphs import Sdpa
from flexattn.kernels_cudnn.plans import PlanCache, PlanNotSupported
from flexattn.kernels_cudnn.problem import Problem
from flexattn.testing import make_call, make_inputs
from tests.support.fp8_cases import E4M3, E5M2

DEVICE = torch.device("cpu")
DIRECTIONS = cudnn_rules.BOTH


@pytest.fixture(scope="module", autouse=True)
def h200() -> Iterator[None]:
    cudnn_stub.load()
    with plans.without_device(cudnn_stub.H200):
        yield


def sdpa_of(
    direction: str,
    fmt: str = "bshd",
    *,
    sizes: tuple[int, int] = (200, 200),
    heads: tuple[int, int] = (8, 2),
    head_dims: tuple[int, int] = (128, 128),
    dtype: torch.dtype = E4M3,
    out: torch.dtype = torch.bfloat16,
    dout: torch.dtype = E5M2,
    gradients: torch.dtype = torch.bfloat16,
    lengths: bool = False,
    **problem: Any,
) -> Sdpa:
    """Returns the description that a launcher would ask a plan for."""
    (sq, skv), (h, h_kv), (d_qk, d_v) = sizes, heads, head_dims

    def tokens(length: int, num_heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
        if fmt == "thd":
            return torch.empty(2 * length, num_heads, head_dim, dtype=dtype, device="meta")
        dims = {"b": 2, "s": length, "h": num_heads, "d": head_dim}
        order = [fmt.index(dim) for dim in "bshd"]
        return torch.empty([dims[dim] for dim in fmt], dtype=dtype, device="meta").permute(order)

    cu = torch.empty(3, dtype=torch.int32, device="meta") if lengths or fmt == "thd" else None
    x = Problem(
        tokens(sq, h, d_qk, dtype),
        tokens(skv, h_kv, d_qk, dtype),
        tokens(skv, h_kv, d_v, dtype),
        0.1,
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        max_seqlen_q=sq,
        max_seqlen_kv=skv,
        **problem,
    )
    lse = torch.empty((h, 2 * sq) if fmt == "thd" else (2, h, sq), dtype=torch.float32, device="meta")
    written = tokens(sq, h, d_v, out)
    if direction == "forward":
        return fp8_call(x, written, lse).sdpa
    grads = Written(tokens(sq, h, d_qk, gradients), tokens(skv, h_kv, d_qk, gradients), tokens(skv, h_kv, d_v, gradients))
    sdpa = fp8_call(x, written, lse, tokens(sq, h, d_v, dout), grads).sdpa
    assert sdpa.fp8 is not None
    return sdpa if gradients is torch.bfloat16 else sdpa._replace(fp8=sdpa.fp8._replace(gradients=gradients))


def cudnns_answer(sdpa: Sdpa) -> str | None:
    """Returns cuDNN's answer about a plan, whatever our rules say."""
    try:
        plan = PlanCache().get(sdpa, DEVICE)
    except PlanNotSupported as e:
        return str(e)
    assert plan.graph.selected_engine is None, "a kernel of the frontend's own stands in for cuDNN's"
    return None


CAUSAL = {"window_right": 0}
SUPPORTED: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "plain": (DIRECTIONS, {}),
    "sbhd": (DIRECTIONS, {"fmt": "sbhd"}),
    "bhsd": (DIRECTIONS, {"fmt": "bhsd"}),
    "causal": (DIRECTIONS, CAUSAL),
    "causal, sq < skv": (DIRECTIONS, {**CAUSAL, "sizes": (130, 333)}),
    "causal, sq > skv": (DIRECTIONS, {**CAUSAL, "sizes": (333, 130)}),
    "window": (DIRECTIONS, {"window_left": 9, "window_right": 4}),
    "window, sq > skv": (("backward",), {"window_left": 9, "window_right": 4, "sizes": (333, 130)}),
    "lengths": (DIRECTIONS, {"lengths": True}),
    "lengths, causal": (DIRECTIONS, {"lengths": True, **CAUSAL}),
    "lengths, window": (("backward",), {"lengths": True, "window_left": 9}),
    "thd": (("forward",), {"fmt": "thd"}),
    "thd, causal": (("forward",), {"fmt": "thd", **CAUSAL}),
    "a bucketed dense shape": (("forward",), {"is_bucketed": True}),
    "whole tiles": (DIRECTIONS, {"sizes": (256, 384)}),
    "one key head": (DIRECTIONS, {"heads": (5, 1)}),
    "equal heads": (DIRECTIONS, {"heads": (4, 4)}),
    "e5m2": (DIRECTIONS, {"dtype": E5M2}),
    "e4m3 gradients": (("backward",), {"dout": E4M3}),
    "e4m3 dq of e5m2 dout": (("backward",), {"gradients": E4M3}),
    "out in FP8": (DIRECTIONS, {"out": E4M3}),
    "out in e5m2": (DIRECTIONS, {"out": E5M2}),
    **{
        f"head dims {d}": (("forward",), {"head_dims": d}) for d in ((16, 16), (64, 64), (96, 96), (192, 128), (256, 256), (48, 80))
    },
}


@pytest.mark.sample("name")
@pytest.mark.parametrize(
    ("direction", "name"), [(direction, name) for name, (directions, _) in SUPPORTED.items() for direction in directions]
)
def test_what_the_rules_let_through_builds(direction: Direction, name: str) -> None:
    sdpa = sdpa_of(direction, **SUPPORTED[name][1])
    assert refusal(cudnn_rules.FP8, spec_of(sdpa), direction) is None
    assert cudnns_answer(sdpa) is None


# For each rule: graphs that it refuses, by direction. A rule has none if no graph can express the call.
SINK = {"has_sink": True}
REFUSED: dict[str, dict[str, Any]] = {
    "multiples of 16 up to 256": {"head_dims": (40, 40)},
    "more than 256": {"head_dims": (272, 272)},
    "128 alone": {"head_dims": (64, 64)},
    "no packed sequences": {"fmt": "thd"},
    "bottom-right": {"window_right": 0, "bottom_right": True},
    "bottom-right window": {"window_left": 9, "window_right": 0, "bottom_right": True},
    "no single query": {"sizes": (1, 200)},
    "take no bias": {"bias": torch.empty(1, 8, 200, 200, device="meta")},
    "with a sink": SINK,
}


SPEC = make_call(make_inputs(lengths_q=[200, 200], device="meta", dtype=torch.bfloat16), return_max_logit=False)[0]


def spec_of(sdpa: Sdpa) -> AttentionSpec:
    """Returns a spec with the facts of a plan that the rules test."""
    fmt = "thd" if sdpa.is_ragged else "bshd"
    return SPEC._replace(
        q_format=fmt,
        kv_format=fmt,
        head_dim_qk=sdpa.head_dim_qk,
        head_dim_v=sdpa.head_dim_v,
        length_q=sdpa.len_q,
        band=Band(sdpa.window_left, sdpa.window_right, sdpa.bottom_right),
        bias_type="no_bias" if sdpa.bias_shape is None else "post_scale_bias",
        softmax_type="learnable" if sdpa.has_sink else "vanilla",
    )


@pytest.mark.sample("name")
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", REFUSED)
def test_refusals_agree_with_cudnns_own_answer(name: str, direction: Direction) -> None:
    """A rule names the directions that cuDNN itself declines; in any other direction a plan would build."""
    sdpa = sdpa_of(direction, **REFUSED[name])
    spec = spec_of(sdpa)
    against = [rule for rule in cudnn_rules.FP8 if rule.applies(spec)]
    ours = [rule for rule in against if direction in rule.directions]
    assert (cudnns_answer(sdpa) is not None) == any(direction in rule.declined for rule in against)
    assert (refusal(cudnn_rules.FP8, spec, direction) is not None) == bool(ours)
    assert all(direction in rule.directions for rule in against if direction in rule.declined)


def test_half_precision_results_are_for_other_devices() -> None:
    """cuDNN only writes results in fp16 and bf16 on other devices, so here a later conversion makes them."""
    forward, backward = sdpa_of("forward"), sdpa_of("backward")
    assert forward.fp8 is not None
    assert backward.fp8 is not None
    assert forward.fp8.out is E4M3
    assert backward.fp8.gradients is E5M2
    assert "only supported on Blackwell" in str(cudnns_answer(forward._replace(fp8=forward.fp8._replace(out=torch.bfloat16))))
    assert "only supported on Blackwell" in str(
        cudnns_answer(backward._replace(fp8=backward.fp8._replace(gradients=torch.bfloat16)))
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("direction", "fmt", "dims", "mask"),
    list(product(DIRECTIONS, ("bshd", "sbhd", "bhsd", "thd", "lengths"), range(16, 257, 16), ("no_mask", "causal", "window"))),
)
def test_grid(direction: Direction, fmt: str, dims: int, mask: str) -> None:
    """Every head dim, format and mask: our answer equals cuDNN's."""
    band = {"no_mask": {}, "causal": CAUSAL, "window": {"window_left": 9, "window_right": 4}}[mask]
    layout = {"fmt": "bshd", "lengths": True} if fmt == "lengths" else {"fmt": fmt}
    sdpa = sdpa_of(direction, head_dims=(dims, dims), **layout, **band)
    assert (refusal(cudnn_rules.FP8, spec_of(sdpa), direction) is None) == (cudnns_answer(sdpa) is None)
