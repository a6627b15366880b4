"""The Gluon forward for mma.sync: compiled ahead of time and checked by gates, and the calls that it leaves to portable kernels.

`tests/mma/test_emulated.py` compares its results with the oracle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from flexattn.dispatch import triton_backend
from flexattn.dispatch.explain import explain
from flexattn.functional import bind_call
from flexattn.kernels_triton.ahead_of_time.compile_report import request_for
from flexattn.kernels_triton.common.problem import Problem
from flexattn.kernels_triton.common.split_kv import BY_LENGTHS
from flexattn.kernels_triton.mma import conditions
from flexattn.kernels_triton.mma.forward import mma_forward
from flexattn.kernels_triton.runtime import interpreter
from flexattn.kernels_triton.runtime.device import pretended_device
from flexattn.kernels_triton.runtime.launch import Launch, recorded_launches
from flexattn.ops import spec_to_run
from flexattn.testing import make_call, make_inputs
from tests.hopper.test_attention import FEATURES, cumulative
from tests.hopper.test_dropout import dropped
from tests.hopper.test_mods import FEATURES as MODS
from tests.mma.test_emulated import LIMITS
from tests.support.compiled_kernels import compile_sound

DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
LOOP_SPILLS = 32  # instructions; 256 has the most
BARRIERS = 2  # of an iteration: a block has come, and its buffer is free
Case = tuple[int, int, int, str]  # capability, head dims, features


def launch_of(case: Case, dtype: torch.dtype = torch.bfloat16) -> Launch:
    capability, dim_qk, dim_v, features = case
    is_ragged = features == "everything"
    shape = (512, 4) if is_ragged else (2, 512, 4)
    q, k = (torch.zeros(*shape, dim_qk, dtype=dtype) for _ in "qk")
    v, out = (torch.zeros(*shape, dim_v, dtype=dtype) for _ in "vo")
    lse = torch.zeros(4, 512) if is_ragged else torch.zeros(2, 4, 512)
    offsets = cumulative([256, 256])
    lengths = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"), offsets)
    lengths |= {"max_seqlen_q": 256, "max_seqlen_kv": 256}
    problem = Problem(q, k, v, softmax_scale=0.1, **FEATURES[features], **(lengths if is_ragged else {}))
    with pretended_device(capability, 108), recorded_launches() as launches:
        mma_forward(problem, out, lse)
    return next(launch for launch in launches if "mma" in launch.kernel.__name__)


def check_compiled(cases: list[Case], dtype: torch.dtype = torch.bfloat16) -> None:
    requests = [request_for(launch_of(case, dtype), case[0]) for case in cases]
    for case, launched, report in zip(cases, requests, compile_sound(requests), strict=True):
        assert set(report.matrix_instructions) == {"HMMA"}, f"{case}: {report.matrix_instructions}"
        assert {"LDGSTS", "LDSM"} <= report.instructions.keys(), case
        assert report.shared_bytes <= LIMITS[case[0]], f"{case}: {report.shared_bytes}"
        loops = [loop for loop in report.loops if loop.get("HMMA", 0)]
        assert loops, case
        meta = launched.constexprs["META"]
        needed = meta.BLOCK_N * (meta.QK0 + meta.QK1 + meta.V0) * meta.BLOCK_M // meta.WARPS // (16 * 8 * 16)
        for loop in loops:
            assert loop["HMMA"] == needed, f"{case}: {loop['HMMA']} products, not {needed}"
            assert loop.get("BAR", 0) <= BARRIERS, f"{case}: {loop['BAR']} barriers"
            spills = loop.get("STL", 0) + loop.get("LDL", 0)
            assert spills <= LOOP_SPILLS, f"{case}: {spills} spills"


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param([(80, 128, 128, "causal")], marks=pytest.mark.slow),
        pytest.param([(80, *dims, "everything") for dims in (DIMS[0], DIMS[-1])], marks=pytest.mark.slow),
        pytest.param([(sm, *dims, name) for sm in LIMITS for dims in DIMS for name in FEATURES], marks=pytest.mark.exhaustive),
    ],
    ids=["one", "more", "all"],
)
def test_compiled(cases: list[Case]) -> None:
    check_compiled(cases)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sm", [80, pytest.param(89, marks=pytest.mark.exhaustive), pytest.param(120, marks=pytest.mark.exhaustive)]
)
def test_few_queries_compiled(sm: int) -> None:
    """With a plan of pieces of keys: rings of two and no spills, except at head dim 256."""
    requests, dims = [], (64, 96, 128, 256)
    for dim in dims:
        q, k = torch.zeros(4, 8, dim, dtype=torch.bfloat16), torch.zeros(8192, 2, dim, dtype=torch.bfloat16)
        offsets = {"cu_seqlens_q": cumulative([2, 2]), "cu_seqlens_kv": cumulative([4096, 4096])}
        problem = Problem(q, k, k, softmax_scale=0.1, **offsets, max_seqlen_q=2, max_seqlen_kv=4096)
        with pretended_device(sm, 108), recorded_launches() as launches:
            mma_forward(problem, torch.empty_like(q), torch.zeros(8, 4), splits=BY_LENGTHS)
        requests += [request_for(launch, sm) for launch in launches if "mma" in launch.kernel.__name__]
    for dim, request, report in zip(dims, requests, compile_sound(requests), strict=True):
        assert request.constexprs["META"].IS_PLANNED
        assert report.shared_bytes <= LIMITS[sm] // 2, f"{dim}: {report.shared_bytes}"  # two programs, at least
        [loop] = [loop for loop in report.loops if loop.get("HMMA", 0)]
        assert loop.get("STL", 0) + loop.get("LDL", 0) <= (8 if dim == 256 else 0), f"{dim}: {loop}"


@pytest.mark.exhaustive
def test_compiled_in_fp16() -> None:
    check_compiled([(sm, *dims, "causal") for sm in (80, 89) for dims in DIMS], torch.float16)


@pytest.mark.parametrize(
    ("dim", "sm", "some"),
    [
        pytest.param(128, 80, ("mod: softcap, documents", "bias", "dropout"), marks=pytest.mark.slow),
        *(pytest.param(dim, sm, (), marks=pytest.mark.exhaustive, id=f"{dim}-{sm}") for dim in (64, 128, 256) for sm in (80, 89)),
    ],
)
def test_mods_compiled(dim: int, sm: int, some: Sequence[str]) -> None:
    requests = []
    bias = {"bias_type": "post_scale_bias", "bias": torch.zeros(1, 4, 512, 512, dtype=torch.bfloat16)}
    cases = {name: make("cpu") for name, make in MODS.items()} | {"bias": bias, "dropout": dropped()}
    cases = {name: cases[name] for name in some or cases}
    for features in cases.values():
        inputs = {"lengths_q": [512], "num_heads": 4, "num_heads_kv": 4, "head_dim_qk": dim, "head_dim_v": dim}
        given = make_inputs(dtype=torch.bfloat16, **inputs)
        spec, x = make_call(given, attn_mask_type="causal", return_max_logit=False, **features)
        with pretended_device(sm, 108), recorded_launches() as launches:
            mma_forward(triton_backend.to_problem(spec, x), torch.empty_like(x.v), torch.empty(1, 4, 512))
        requests += [request_for(launch, sm) for launch in launches if "mma" in launch.kernel.__name__]
    for name, report in zip(cases, compile_sound(requests), strict=True):
        assert set(report.matrix_instructions) == {"HMMA"}, name
        assert report.loop_spill_share <= 0.03, f"{name}: {report}"
        assert report.shared_bytes <= LIMITS[sm], name


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({}, None),
        ({"dtype": torch.float32}, "bf16 and fp16, not float32"),
        ({"shape": (2, 1024, 4, 512)}, "head dims up to 256"),
        ({"shape": (2, 1024, 4, 36)}, "multiples of 8"),
        ({"dropout_p": 0.1, "rng_state": torch.zeros(2, dtype=torch.int64)}, None),
        ({"softmax_scale": 0.0}, "softmax_scale of 0"),
        ({"shape": (2, 0, 16, 128)}, "nothing to load"),
    ],
    ids=str,
)
def test_calls_left_to_the_portable_kernel_have_a_reason(more: dict[str, Any], reason: str | None) -> None:
    x = torch.empty(more.get("shape", (2, 1024, 16, 128)), dtype=more.get("dtype", torch.bfloat16), device="meta")
    problem = Problem(x, x, x, **{"softmax_scale": 0.1, **{k: v for k, v in more.items() if k not in ("shape", "dtype")}})
    for capability in LIMITS:
        with pretended_device(capability, 108):
            said = conditions.forward_unsupported(problem, x)
        assert said is None if reason is None else reason in str(said)


@pytest.mark.parametrize("wish", ["auto", "never", "always"])
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (12, 0)])
def test_auto_takes_it_where_a_run_shows_that_it_is_faster(
    wish: str, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interpreter, "INTERPRETED", False)  # it runs no Gluon; here nothing is run at all
    monkeypatch.setenv("FLEXATTN_HOPPER", wish)

    def text(tokens: int) -> str:
        q = torch.empty(2, tokens, 16, 128, dtype=torch.bfloat16, device="meta")
        x, settings = bind_call(q=q, k=q, v=q)
        spec = spec_to_run(x, settings)._replace(device_type="cuda", capability=capability)
        return explain(spec, "triton", x).details

    assert ("forward: triton (mma.sync)" in text(4096)) == (wish != "never")
    assert ("forward: triton (mma.sync)" in text(128)) == (wish == "always")
    said = {
        "auto": "not mma.sync: no benchmark shows it to be faster for such a call; the nearest rule is for queries ",
        "never": "FLEXATTN_HOPPER=never",
        "always": "  mma.sync: FLEXATTN_HOPPER=always",
    }
    assert said[wish] in text(128), text(128)
