"""Logits of any size on a GPU: each compiled family of kernels, both ways, with keys split and not, at lengths of many tiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flexattn import attention, fp8
from flexattn.dispatch import triton_backend
from flexattn.kernels_triton.runtime.device import capability_of
from tests.common.test_large_logits import CASES, call_of, features_of, run
from tests.support.large_logits import Rounding, check, make_case

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and torch.cuda.is_available() is False")
HAS_HOPPER = torch.cuda.is_available() and capability_of(torch.device("cuda")) == 90
HAS_FP8 = torch.cuda.is_available() and capability_of(torch.device("cuda")) >= 89
FAMILIES = ("never", "always") if HAS_HOPPER else ("never",)
HALVES = (torch.bfloat16, torch.float16)
E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize("hopper", FAMILIES)
@pytest.mark.parametrize("sizes", [(300, 300), (4, 300), (1000, 700), (1, 4096)], ids=str)
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize(("kind", "how"), CASES, ids=str)
def test_families(
    kind: str, how: str, dtype: torch.dtype, sizes: tuple[int, int], hopper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One query sees keys in splits; in larger calls some rows are completely hidden."""
    monkeypatch.setenv("FLEXATTN_HOPPER", hopper)
    case = make_case(kind, dtype, *sizes, 64, "cuda", 2)
    got = run(case, how)
    got.pop("dadded", None)
    check(got, case, Rounding(dtype), replaces=how == "replacing")


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("hopper", FAMILIES)
@pytest.mark.parametrize("dim", [128, 256])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_head_dims(dtype: torch.dtype, dim: int, hopper: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXATTN_HOPPER", hopper)
    for kind, how in (CASES[0], CASES[1], CASES[4]):
        case = make_case(kind, dtype, 300, 500, dim, "cuda")
        got = run(case, how, deterministic=deterministic)
        check(got, case, Rounding(dtype))


@pytest.mark.parametrize("hopper", FAMILIES)
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
def test_bands(dtype: torch.dtype, hopper: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXATTN_HOPPER", hopper)
    case = make_case("ladder", dtype, 700, 600, 64, "cuda")
    i, j = torch.arange(700, device="cuda")[:, None] - 100, torch.arange(600, device="cuda")
    for band, visible in (
        ({"attn_mask_type": "causal_bottom_right"}, j <= i),
        ({"attn_mask_type": "causal_bottom_right", "window_size": (150, 0)}, (j <= i) & (j >= i - 150)),
    ):
        check(run(case, "post_scale_bias", **band), case, Rounding(dtype), visible=visible)


@pytest.mark.parametrize("hopper", FAMILIES)
@pytest.mark.parametrize("value", [-1e8, -1e9, -1e10, -1e15, -1e30, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
def test_left_padding(dtype: torch.dtype, value: float, hopper: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """200 of 300 keys are hidden as in transformers, under a causal mask that hides the others from the first queries."""
    monkeypatch.setenv("FLEXATTN_HOPPER", hopper)
    for queries in (4, 300):
        case = make_case("hidden", dtype, queries, 300, 64, "cuda", 2)
        added = torch.zeros_like(case.added)
        added[..., :200] = value
        visible = torch.ones(queries, 300, dtype=torch.bool, device="cuda").tril(300 - queries)
        for how in ("post_scale_bias", "score_mod", "replacing"):
            got = run(case._replace(added=added), how, attn_mask_type="causal_bottom_right")
            check(got, case._replace(added=added), Rounding(dtype), visible=visible, replaces=how == "replacing")


@pytest.mark.skipif(not HAS_FP8, reason="FP8 matrix instructions begin with compute capability 8.9")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("hopper", FAMILIES)
@pytest.mark.parametrize(("kind", "how"), [CASES[0], CASES[1], CASES[4]], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_fp8(dim: int, kind: str, how: str, hopper: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """FP8 can represent q, k, v and dout exactly."""
    monkeypatch.setenv("FLEXATTN_HOPPER", hopper)
    case = make_case(kind, torch.bfloat16, 300, 500, dim, "cuda")
    q, k, v = (t.detach().requires_grad_() for t in case[:3])
    features: dict[str, Any] = features_of(case, how)
    if "bias" in features:
        features["bias"] = features["bias"].detach()
    how_many = {"backend": "triton", "return_lse": True, "softmax_scale": case.scale, "deterministic": deterministic}
    out, lse = attention(q, k, v, fp8_recipe=fp8.Recipe(), **how_many, **features)
    out.backward(case.dout)
    got = {"out": out.detach(), "lse": lse.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}
    check(got, case, Rounding(torch.bfloat16, E4M3, E4M3))  # type: ignore[arg-type]  # there are gradients


@pytest.mark.skipif(not HAS_HOPPER, reason="the kernels of sm_90 need compute capability 9.0")
def test_calls_reach_the_kernels_that_they_are_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXATTN_HOPPER", "always")
    case = make_case("hidden", torch.bfloat16, 300, 300, 64, "cuda")
    _, spec, x = call_of(case, "post_scale_bias", torch.bfloat16)
    families = {direction: triton_backend.choice_of(spec, x, direction) for direction in ("forward", "backward")}  # type: ignore[arg-type]
    assert {direction: found and found.family.name for direction, found in families.items()} == {
        "forward": "sm_90",
        "backward": "sm_90 fused",
    }
