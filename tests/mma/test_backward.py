"""The Gluon backward for mma.sync: compiled ahead of time and checked by gates, and the calls that it leaves to portable kernels.

`tests/mma/test_backward_emulated.py` compares its gradients with the oracle.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flexattn.dispatch.explain import explain
from flexattn.functional import bind_call
from flexattn.kernels_triton.ahead_of_time.compile_report import request_for
from flexattn.kernels_triton.common.problem import Backward, Problem
from flexattn.kernels_triton.mma import conditions
from flexattn.kernels_triton.mma.backward import mma_backward
from flexattn.kernels_triton.runtime import interpreter
from flexattn.kernels_triton.runtime.device import pretended_device
from flexattn.kernels_triton.runtime.launch import Launch, recorded_launches
from flexattn.ops import spec_to_run
from tests.mma.test_emulated import LIMITS
from tests.support.compiled_kernels import compile_sound

DIMS = (64, 128, 256)
LOOP_SPILLS = {64: 32, 128: 56, 256: 44}  # instructions of a loop
BARRIERS = 4  # of an iteration
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"window_right": 0},
    "window": {"window_left": 100, "window_right": 0},
    "softcap": {"softcap": 20.0},
    "dropout": {"dropout_p": 0.1, "rng_state": torch.zeros(2, dtype=torch.int64)},
}
Case = tuple[int, int, str]  # capability, head dim, mask


def call_of(x: torch.Tensor, **more: Any) -> Backward:
    lse = torch.empty(x.shape[0], x.shape[2], x.shape[1], device=x.device)
    deterministic = more.pop("deterministic", False)
    problem = Problem(x, x, x, **{"softmax_scale": 0.1, **more})
    return Backward(problem, x, lse, x, None, *(torch.empty_like(x) for _ in range(3)), deterministic=deterministic)


def launch_of(case: Case) -> Launch:
    capability, dim, mask = case
    with pretended_device(capability, 108), recorded_launches() as launches:
        mma_backward(call_of(torch.zeros(2, 512, 4, dim, dtype=torch.bfloat16), **MASKS[mask]))
    return next(launch for launch in launches if "mma" in launch.kernel.__name__)


@pytest.mark.parametrize(
    "cases",
    [
        [(80, 128, "causal")],
        pytest.param([(sm, dim, "causal") for sm in (80, 89) for dim in DIMS], marks=pytest.mark.slow),
        pytest.param([(sm, dim, mask) for sm in LIMITS for dim in DIMS for mask in MASKS], marks=pytest.mark.exhaustive),
    ],
    ids=["one", "more", "all"],
)
def test_compiled(cases: list[Case]) -> None:
    requests = [request_for(launch_of(case), case[0]) for case in cases]
    for case, request, report in zip(cases, requests, compile_sound(requests), strict=True):
        assert set(report.matrix_instructions) == {"HMMA"}, f"{case}: {report.matrix_instructions}"
        assert {"LDGSTS", "LDSM"} <= report.instructions.keys(), case
        assert {"RED", "REDG"} & report.instructions.keys(), case
        assert report.shared_bytes <= LIMITS[case[0]], f"{case}: {report.shared_bytes}"
        meta = request.constexprs["META"]
        needed = 5 * meta.BLOCK_N * meta.BLOCK_M * meta.DIM // meta.WARPS // (16 * 8 * 16)
        loops = [loop for loop in report.loops if loop.get("HMMA", 0)]
        assert [loop["HMMA"] for loop in loops] == [needed], f"{case}: {loops}"
        if case[2] not in ("softcap", "dropout"):
            assert loops[0].get("BAR", 0) <= BARRIERS, f"{case}: {loops[0]['BAR']} barriers"
            spills = loops[0].get("STL", 0) + loops[0].get("LDL", 0)
            assert spills <= LOOP_SPILLS[case[1]], f"{case}: {spills} spills"


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({}, None),
        ({"deterministic": True}, "its dq is not deterministic"),
        ({"dropout_p": 0.1, "rng_state": torch.zeros(2, dtype=torch.int64)}, None),
        ({"dtype": torch.float32}, "bf16 and fp16, not float32"),
        ({"dim": 512}, "head dims up to 256"),
        ({"softmax_scale": 0.0}, "softmax_scale of 0"),
    ],
    ids=str,
)
def test_calls_left_to_the_portable_kernels_have_a_reason(more: dict[str, Any], reason: str | None) -> None:
    dim, dtype = more.get("dim", 128), more.get("dtype", torch.bfloat16)
    x = torch.empty(2, 1024, 16, dim, dtype=dtype, device="meta")
    call = call_of(x, **{name: value for name, value in more.items() if name not in ("dim", "dtype")})
    for capability in LIMITS:
        with pretended_device(capability, 108):
            said = conditions.backward_unsupported(call)
        assert said is None if reason is None else reason in str(said)
    with pretended_device(90, 132):
        assert "compute capability 8.0, 8.6, 8.9 and 12.0" in str(conditions.backward_unsupported(call))


@pytest.mark.parametrize("wish", ["auto", "always"])
def test_only_who_asks_for_it_gets_it(wish: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "INTERPRETED", False)  # it runs no Gluon; here nothing is run at all
    monkeypatch.setenv("FLEXATTN_HOPPER", wish)
    q = torch.empty(2, 4096, 16, 128, dtype=torch.bfloat16, device="meta", requires_grad=True)
    x, settings = bind_call(q=q, k=q, v=q)
    spec = spec_to_run(x, settings)._replace(device_type="cuda", capability=(8, 9))
    text = explain(spec, "triton", x).details
    assert f"backward: triton ({'mma.sync fused' if wish == 'always' else 'portable'})" in text
