"""The FP8 forward for mma.sync: compiled ahead of time and checked by gates, and the calls that it leaves to portable kernels.

`tests/mma/test_fp8_emulated.py` compares its results with the oracle.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flexattn.dispatch.explain import explain
from flexattn.functional import bind_call
from flexattn.kernels_triton.ahead_of_time.compile_report import request_for
from flexattn.kernels_triton.common.problem import Problem
from flexattn.kernels_triton.mma import conditions
from flexattn.kernels_triton.mma.forward import mma_forward
from flexattn.kernels_triton.runtime import interpreter
from flexattn.kernels_triton.runtime.device import pretended_device
from flexattn.kernels_triton.runtime.launch import Launch, recorded_launches
from flexattn.ops import spec_to_run
from tests.hopper.test_attention import FEATURES, cumulative
from tests.mma.test_attention import BARRIERS
from tests.mma.test_emulated import LIMITS
from tests.support.compiled_kernels import compile_sound

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
LOOP_SPILLS = 40  # instructions; 256 with scales of blocks has the most
Case = tuple[int, int, int, str]  # capability, head dims, features


def launch_of(case: Case, dtype: torch.dtype = E4M3) -> Launch:
    """The launch of a call; with all features, its scales are of blocks."""
    capability, dim_qk, dim_v, features = case
    is_ragged = features == "everything"
    shape = (512, 4) if is_ragged else (2, 512, 4)
    q, k, v = (torch.zeros(*shape, dim).to(dtype) for dim in (dim_qk, dim_qk, dim_v))
    lse = torch.zeros(4, 512) if is_ragged else torch.zeros(2, 4, 512)
    offsets = cumulative([256, 256])
    lengths: dict[str, Any] = dict.fromkeys((f"cu_seqlens_{x}" for x in ("q", "kv", "q_padded", "kv_padded")), offsets)
    lengths |= {"max_seqlen_q": 256, "max_seqlen_kv": 256}
    scales = {"descales": (torch.ones(2, 4, 2 if is_ragged else 1),) * 3, "scale_rows": 128}
    problem = Problem(q, k, v, softmax_scale=0.1, **scales, **FEATURES[features], **(lengths if is_ragged else {}))
    with pretended_device(capability, 128), recorded_launches() as launches:
        mma_forward(problem, torch.zeros(*shape, dim_v, dtype=torch.bfloat16), lse)
    return next(launch for launch in launches if "mma" in launch.kernel.__name__)


def check_compiled(cases: list[Case], dtype: torch.dtype = E4M3) -> None:
    """Products are in FP8, and nothing but the bytes of v moves between their operands."""
    requests = [request_for(launch_of(case, dtype), case[0]) for case in cases]
    for case, launched, report in zip(cases, requests, compile_sound(requests), strict=True):
        assert set(report.matrix_instructions) == {"QMMA"}, f"{case}: {report.matrix_instructions}"
        assert report.shared_bytes <= LIMITS[case[0]], f"{case}: {report.shared_bytes}"
        loops = [loop for loop in report.loops if loop.get("QMMA", 0)]
        assert loops, case
        meta = launched.constexprs["META"]
        tiles = meta.BLOCK_M // meta.WARPS // 16  # of rows of a warp
        columns = 2 * (meta.QK0 + meta.QK1), meta.V0
        products, values = (meta.BLOCK_N * width // (8 * 32) for width in (sum(columns), columns[1]))
        for loop in loops:
            assert loop["QMMA"] == products * tiles, f"{case}: {loop['QMMA']} products, not {products * tiles}"
            assert {"LDGSTS", "LDSM", "PRMT"} <= loop.keys(), f"{case}: {loop}"
            assert not {"STS", "STSM"} & loop.keys(), f"{case}: {loop}"
            assert 2 * values <= loop["PRMT"] <= 2 * values + 2, f"{case}: {loop['PRMT']} permutations for {values} operands of v"
            assert loop.get("SHFL", 0) <= 4 * tiles, f"{case}: {loop['SHFL']} shuffles"  # of rows' maxima
            assert loop.get("BAR", 0) <= BARRIERS, f"{case}: {loop['BAR']} barriers"
            spills = loop.get("STL", 0) + loop.get("LDL", 0)
            assert spills <= LOOP_SPILLS, f"{case}: {spills} spills"


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param([(89, 128, 128, "causal")], marks=pytest.mark.slow),
        pytest.param([(120, 128, 128, "everything")], marks=pytest.mark.slow),
        pytest.param([(sm, *dims, "everything") for sm in (89, 120) for dims in DIMS], marks=pytest.mark.exhaustive),
        pytest.param([(sm, *dims, name) for sm in (89, 120) for dims in DIMS for name in FEATURES], marks=pytest.mark.exhaustive),
    ],
    ids=["one", "two", "more", "all"],
)
def test_compiled(cases: list[Case]) -> None:
    check_compiled(cases)


def test_windows_have_fewer_keys_at_a_time_on_120() -> None:
    """With 64, ptxas spills more for 12.0 than for 8.9."""
    metas = [next(x for x in launch_of((sm, 128, 128, "window")).arguments if hasattr(x, "BLOCK_N")) for sm in (89, 120)]
    assert [meta.BLOCK_N for meta in metas] == [64, 32]


@pytest.mark.exhaustive
def test_compiled_in_e5m2() -> None:
    """Weights stay in E4M3, so the product with v has two dtypes."""
    check_compiled([(sm, 64, 64, "causal") for sm in (89, 120)], E5M2)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({}, None),
        ({"dtype": E5M2}, None),
        ({"dtype": torch.bfloat16}, "all in float8_e4m3fn or all in float8_e5m2, not bfloat16"),
        ({"dtype_v": E5M2}, "all in float8_e5m2, not float8_e4m3fn and float8_e5m2"),
        ({"shape": (2, 1024, 4, 512)}, "head dims up to 256"),
        ({"shape": (2, 1024, 4, 40)}, "multiples of 16"),
        ({"strides": (4 * 72 * 1024, 4 * 72, 72, 1), "shape": (2, 1024, 4, 64)}, "strides that are multiples of 16"),
        ({"dropout_p": 0.1, "rng_state": torch.zeros(2, dtype=torch.int64)}, None),
        ({"softmax_scale": 0.0}, "softmax_scale of 0"),
        ({"shape": (2, 0, 16, 128)}, "nothing to load"),
        ({"max_logit": True}, "max_logit"),
        ({"scale_rows": 48, "blocks": 22}, "blocks of 48 rows, no multiple of 64"),
    ],
    ids=str,
)
def test_calls_left_to_the_portable_kernel_have_a_reason(more: dict[str, Any], reason: str | None) -> None:
    shape = more.get("shape", (2, 1024, 16, 128))
    x = torch.empty(shape, dtype=more.get("dtype", E4M3), device="meta")
    if "strides" in more:
        x = torch.empty_strided(shape, more["strides"], dtype=E4M3, device="meta")
    v = torch.empty(shape, dtype=more.get("dtype_v", x.dtype), device="meta")
    fields = {name: more[name] for name in ("dropout_p", "rng_state", "softmax_scale", "scale_rows") if name in more}
    descales = (torch.ones(2, shape[2], more.get("blocks", 1)),) * 3
    problem = Problem(x, x, v, **{"softmax_scale": 0.1, "descales": descales, **fields})
    out = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    for capability in (89, 120):
        with pretended_device(capability, 128):
            said = conditions.fp8_forward_unsupported(problem, out, "max_logit" in more)
        assert said is None if reason is None else reason in str(said)


@pytest.mark.parametrize(("wish", "tokens"), [("auto", 4096), ("auto", 512), ("always", 512), ("never", 4096)])
@pytest.mark.parametrize("capability", [(8, 9), (12, 0)])
def test_the_calls_that_it_serves(wish: str, tokens: int, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "INTERPRETED", False)  # it runs no Gluon; here nothing is run at all
    monkeypatch.setenv("FLEXATTN_HOPPER", wish)
    q = torch.empty(2, tokens, 16, 128, dtype=E4M3, device="meta")
    descales = {f"descale_{x}": torch.ones(1, device="meta") for x in "qkv"}
    x, settings = bind_call(q=q, k=q, v=q, **descales)
    spec = spec_to_run(x, settings)._replace(device_type="cuda", capability=capability)
    text = explain(spec, "triton", x).details
    said = {
        ("auto", 4096): "mma.sync FP8: the fastest in benchmarks of such calls",
        ("auto", 512): "not mma.sync FP8: no benchmark shows it to be faster for such a call",
        ("always", 512): "mma.sync FP8: FLEXATTN_HOPPER=always",
        ("never", 4096): "FLEXATTN_HOPPER=never",
    }
    assert said[wish, tokens] in text
    assert ("forward: triton (mma.sync FP8)" in text) == ((wish, tokens) in [("auto", 4096), ("always", 512)])
