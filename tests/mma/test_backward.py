"""The Gluon backward for mma.sync: compiled ahead of time and checked by gates, and the calls that it leaves to portable kernels.

`tests/mma/test_backward_emulated.py` compares its gradients with the oracle.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flexattn.dispatch import triton_backend
from flexattn.dispatch.explain import explain
from flexattn.functional import bind_call
from flexattn.kernels_triton.ahead_of_time.compile_report import request_for
from flexattn.kernels_triton.common.problem import Backward, Problem
from flexattn.kernels_triton.mma import conditions
from flexattn.kernels_triton.mma.backward import mma_backward
from flexattn.kernels_triton.mma.backward_dq import mma_two_kernel_backward
from flexattn.kernels_triton.mma.forward import mma_forward
from flexattn.kernels_triton.runtime import interpreter
from flexattn.kernels_triton.runtime.device import pretended_device
from flexattn.kernels_triton.runtime.launch import Launch, recorded_launches
from flexattn.ops import spec_to_run
from tests.mma.test_emulated import LIMITS
from tests.support.compiled_kernels import compile_sound

DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
FUSED, DKDV, DQ = "fused", "dk and dv", "dq"
KERNELS = {FUSED: "_attn_bwd_mma_kernel", DKDV: "_attn_bwd_mma_kernel", DQ: "_attn_bwd_dq_mma_kernel"}
LOOP_SPILLS = {64: 32, 96: 40, 128: 56, 192: 40, 256: 60}  # instructions of a loop
BARRIERS = {FUSED: 4, DKDV: 4, DQ: 3}  # of an iteration
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"window_right": 0},
    "window": {"window_left": 100, "window_right": 0},
    "softcap": {"softcap": 20.0},
    "dropout": {"dropout_p": 0.1, "rng_state": torch.zeros(2, dtype=torch.int64)},
}
Case = tuple[int, tuple[int, int], str, str]  # capability, head dims, mask, kernel


def call_of(x: torch.Tensor, v: torch.Tensor | None = None, **more: Any) -> Backward:
    v = x if v is None else v
    lse = torch.empty(x.shape[0], x.shape[2], x.shape[1], device=x.device)
    deterministic = more.pop("deterministic", False)
    problem = Problem(x, x, v, **{"softmax_scale": 0.1, **more})
    gradients = (torch.empty_like(t) for t in (x, x, v))
    return Backward(problem, v, lse, v, None, *gradients, deterministic=deterministic)


def launch_of(case: Case) -> Launch:
    capability, dims, mask, kernel = case
    x, v = (torch.zeros(2, 512, 4, dim, dtype=torch.bfloat16) for dim in dims)
    with pretended_device(capability, 108), recorded_launches() as launches:
        run = mma_backward if kernel == FUSED else mma_two_kernel_backward
        run(call_of(x, v, **MASKS[mask]))
    return next(launch for launch in launches if launch.kernel.__name__ == KERNELS[kernel])


def products_of(meta: Any, kernel: str) -> int:
    """Returns the products of a warp in an iteration."""
    qk, v = meta.QK0 + meta.QK1, meta.V0 + meta.V1
    columns = {FUSED: 3 * qk + 2 * v, DKDV: 2 * qk + 2 * v, DQ: 2 * qk + v}[kernel]
    return columns * int(meta.BLOCK_N) * int(meta.BLOCK_M) // int(meta.WARPS) // (16 * 8 * 16)


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param([(80, (128, 128), "causal", FUSED)], marks=pytest.mark.slow),
        pytest.param([(80, (96, 96), "causal", DKDV), (80, (128, 128), "causal", DQ)], marks=pytest.mark.slow),
        pytest.param(
            [(sm, dims, "causal", kernel) for sm in (80, 89) for dims in DIMS for kernel in KERNELS],
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            [(sm, dims, mask, kernel) for sm in LIMITS for dims in DIMS for mask in MASKS for kernel in KERNELS],
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["one", "two", "more", "all"],
)
def test_compiled(cases: list[Case]) -> None:
    requests = [request_for(launch_of(case), case[0]) for case in cases]
    for case, request, report in zip(cases, requests, compile_sound(requests), strict=True):
        kernel = case[3]
        assert set(report.matrix_instructions) == {"HMMA"}, f"{case}: {report.matrix_instructions}"
        assert {"LDGSTS", "LDSM"} <= report.instructions.keys(), case
        assert bool({"RED", "REDG"} & report.instructions.keys()) == (kernel == FUSED), case
        assert report.shared_bytes <= LIMITS[case[0]], f"{case}: {report.shared_bytes}"
        needed = products_of(request.constexprs["META"], kernel)
        loops = [loop for loop in report.loops if loop.get("HMMA", 0)]
        assert [loop["HMMA"] for loop in loops] == [needed], f"{case}: {loops}"
        if case[2] not in ("softcap", "dropout"):
            assert loops[0].get("BAR", 0) <= BARRIERS[kernel], f"{case}: {loops[0]['BAR']} barriers"
            spills = loops[0].get("STL", 0) + loops[0].get("LDL", 0)
            allowed = LOOP_SPILLS[case[1][0]] + (40 if case[0] == 120 else 0)  # ptxas spills more for 12.0
            assert spills <= allowed, f"{case}: {spills} spills"


@pytest.mark.slow
def test_tiles_of_scores_that_a_mod_ignores_keep_their_memory() -> None:
    """Copies by cp.async write to tiles of which the compiler removes all loads. They must not be under way in another tile."""
    mods = (lambda score, b, h, i, j: 0.25 * (i % 7), lambda score, b, h, i, j: score + 0.25 * (i % 7))
    q = torch.zeros(1, 512, 4, 128, dtype=torch.bfloat16, requires_grad=True)
    out, lse = torch.empty_like(q), torch.empty(1, 4, 512)
    requests = []
    for mod in mods:
        x, settings = bind_call(q=q, k=q, v=q, score_mod=mod)
        problem = triton_backend.to_problem(spec_to_run(x, settings), x)
        call = Backward(problem, out, lse, out, None, *(torch.empty_like(out) for _ in range(3)))
        with pretended_device(80, 108), recorded_launches() as launches:
            mma_forward(problem, out, lse)
            mma_backward(call)
            mma_two_kernel_backward(call)
        requests += [
            request_for(launch, 80) for launch in launches if launch.kernel.__name__ in ("_attn_fwd_mma_kernel", *KERNELS.values())
        ]
    sizes = [report.shared_bytes for report in compile_sound(requests)]
    assert len(sizes) == 8
    assert sizes[:4] == sizes[4:]


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
            two_kernels = conditions.two_kernels_unsupported(call)
        assert said is None if reason is None else reason in str(said)
        assert two_kernels == (None if call.deterministic else said)


@pytest.mark.parametrize(
    ("wish", "tokens", "deterministic", "name"),
    [
        ("auto", 4096, False, "mma.sync fused"),
        ("auto", 128, False, "portable"),
        ("auto", 128, True, "portable"),
        ("auto", 8192, True, "mma.sync two-kernel"),
        ("always", 128, False, "mma.sync fused"),
        ("always", 128, True, "mma.sync two-kernel"),
    ],
)
def test_auto_takes_it_where_a_run_shows_that_it_is_faster(
    wish: str, tokens: int, deterministic: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interpreter, "INTERPRETED", False)  # it runs no Gluon; here nothing is run at all
    monkeypatch.setenv("FLEXATTN_HOPPER", wish)
    q = torch.empty(2, tokens, 16, 128, dtype=torch.bfloat16, device="meta", requires_grad=True)
    x, settings = bind_call(q=q, k=q, v=q, deterministic=deterministic, attn_mask_type="causal")
    spec = spec_to_run(x, settings)._replace(device_type="cuda", capability=(8, 9))
    assert f"backward: triton ({name})" in explain(spec, "triton", x).details
