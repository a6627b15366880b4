"""The kernels for sm_100 through the backend, on such a GPU; none has run them yet.

Without a GPU, this file tests the path to the kernels, with the kernels in the emulator.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flexattn.bench.emulated import PROGRAMS, emulated
from flexattn.dispatch import triton_backend
from flexattn.dispatch.spec import AttentionSpec, Operands
from flexattn.kernels_triton.blackwell import backward as blackwell_backward
from flexattn.kernels_triton.blackwell import forward as blackwell_forward
from flexattn.kernels_triton.families import Policy
from flexattn.kernels_triton.runtime.device import capability_of, pretended_device
from flexattn.testing import (
    GRADIENT_FACTOR,
    Inputs,
    check_close,
    make_call,
    make_dlse,
    make_dout,
    make_inputs,
    reference_attention,
    reference_gradients,
)
from tests.hopper.test_attention import BANDS, UNEVEN
from tests.hopper.test_dropout import dropped
from tests.hopper.test_mods import FEATURES
from tests.support.gluon_calls import without_gpu

HAS_BLACKWELL = torch.cuda.is_available() and capability_of(torch.device("cuda")) == 100
on_blackwell = pytest.mark.skipif(
    not HAS_BLACKWELL, reason="no GPU of compute capability 10.0; the emulator holds it to the oracle"
)
BOTH = ["_attn_fwd_blackwell_kernel", "_attn_bwd_blackwell_kernel"]
FORMATS = ["bshd", "sbhd", "bhsd", "thd", "thd_2bshd"]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of both directions' launches if these kernels are requested."""
    monkeypatch.setenv("FLEXATTN_HOPPER", "always")
    seen: list[str] = []
    launch = blackwell_forward.launch

    def noted(kernel: Any, *arguments: Any) -> None:
        seen.append(kernel.__name__)
        launch(kernel, *arguments)

    for module in (blackwell_forward, blackwell_backward):
        monkeypatch.setattr(module, "launch", noted)
    return seen


def call_of(device: str, call: dict[str, Any], **inputs: Any) -> tuple[Inputs, AttentionSpec, Operands]:
    given = make_inputs(**{"dtype": torch.bfloat16, "device": device, "head_dim_qk": 128, "head_dim_v": 128, **inputs})
    return given, *make_call(given, **call, return_max_logit=False)


def check_forward(spec: AttentionSpec, x: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse, _ = triton_backend.forward(spec, x)
    exact, budget = reference_attention(spec, x), reference_attention(spec, x, dtype=spec.dtype)
    check_close("out", out, exact[0], budget[0])
    check_close("lse", lse, exact[1], budget[1])
    return out, lse


def check(given: Inputs, spec: AttentionSpec, x: Operands) -> None:
    """Forward and backward."""
    out, lse = check_forward(spec, x)
    dout, dlse = make_dout(given), make_dlse(given)
    gradients = triton_backend.backward(spec, x, out, lse, dout, dlse)
    wanted = reference_gradients(spec, x, dout, dlse)
    budgets = reference_gradients(spec, x, dout, dlse, dtype=spec.dtype)
    for name, got, want, budget in zip(("dq", "dk", "dv"), gradients, wanted, budgets, strict=False):
        check_close(name, got, want, budget, factor=GRADIENT_FACTOR)


@pytest.mark.slow
@without_gpu
def test_the_way_through_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy(ignores_measurements=True, takes_what_never_ran=True)
    monkeypatch.setattr(triton_backend, "policy_of", lambda spec: policy)
    for fmt, band, seed in (("thd", {"attn_mask_type": "padding_causal"}, 3), ("sbhd", {"window_size": (40, 9)}, 4)):
        inputs = {"lengths_q": [70, 140], "lengths_kv": [90, 130], "padding": True, "qkv_format": fmt}
        case = call_of("cpu", {"attn_mask_type": "padding", **band}, **inputs)
        with emulated(seed, blackwell_forward, blackwell_backward) as reports, pretended_device(100, PROGRAMS):
            check(*case)
        assert reports.keys() == set(BOTH)
        assert not any(report.bugs for report in reports.values())


@on_blackwell
@pytest.mark.parametrize("dim", [64, 128, 192])
@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("fmt", FORMATS)
def test_formats_and_bands(fmt: str, band: dict[str, Any], dim: int, launched: list[str]) -> None:
    inputs = {"qkv_format": fmt, "padding": True, "gap": 13, "head_dim_qk": dim, "head_dim_v": min(dim, 128), **UNEVEN}
    check(*call_of("cuda", {"attn_mask_type": "padding", **band}, **inputs))
    assert launched == (BOTH if dim <= 128 else BOTH[:1])


@on_blackwell
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("mask", ["no_mask", "causal", "causal_bottom_right"])
@pytest.mark.parametrize(("sq", "skv"), [(4096, 4096), (700, 333), (333, 700), (1, 5000), (300, 1)])
def test_dense(sq: int, skv: int, mask: str, dim: int, launched: list[str]) -> None:
    """A second forward is bitwise identical."""
    inputs = {"lengths_q": [sq] * 2, "lengths_kv": [skv] * 2, "head_dim_qk": dim, "head_dim_v": dim}
    given, spec, x = call_of("cuda", {"attn_mask_type": mask}, **inputs)
    out, lse = check_forward(spec, x)
    for _ in range(5):
        again = triton_backend.forward(spec, x)
        assert torch.equal(again[0], out)
        assert torch.equal(again[1], lse)
    assert set(launched) == {"_attn_fwd_blackwell_kernel"}
    check(given, spec, x)
    assert set(launched) == set(BOTH)


@on_blackwell
@pytest.mark.parametrize("name", [*FEATURES, "dropout", "sinks"])
def test_features(name: str, launched: list[str]) -> None:
    device_options = {"dropout": lambda device: dropped(device), "sinks": lambda device: {"softmax_type": "off-by-one"}}
    call = {"attn_mask_type": "padding_causal", **(FEATURES | device_options)[name]("cuda")}
    check(*call_of("cuda", call, qkv_format="thd", gap=3, num_heads=4, num_heads_kv=2, **UNEVEN))
    assert launched == (BOTH[:1] if name == "dropout" else BOTH)
