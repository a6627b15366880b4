"""The Gluon forward for sm_100: compiled ahead of time and checked by gates, and the calls that it leaves to the portable kernels.

No GPU has run it. `tests/blackwell/test_emulated.py` compares its results with the oracle; `test_device.py` will if there is such a
GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from flexattn.dispatch import triton_backend
from flexattn.dispatch.explain import explain
from flexattn.functional import bind_call
from flexattn.kernels_triton.ahead_of_time.compile_report import SHARED_MEMORY_LIMIT, TENSOR_COLUMNS_LIMIT, request_for
from flexattn.kernels_triton.blackwell import conditions
from flexattn.kernels_triton.blackwell.forward import blackwell_forward
from flexattn.kernels_triton.common.problem import Problem
from flexattn.kernels_triton.common.tiles import BLACKWELL_FORWARD
from flexattn.kernels_triton.runtime import interpreter
from flexattn.kernels_triton.runtime.device import pretended_device
from flexattn.kernels_triton.runtime.launch import Launch, recorded_launches
from flexattn.ops import spec_to_run
from flexattn.testing import make_call, make_inputs
from tests.hopper.test_attention import FEATURES, cumulative
from tests.hopper.test_dropout import dropped
from tests.hopper.test_mods import FEATURES as MODS
from tests.support.compiled_kernels import compile_sound

DIMS = tuple(tile.head_dim_qk for tile in BLACKWELL_FORWARD)
LOOP_SPILLS = 3  # one register of a consumer, stored and loaded
SPILLS_OF_MODS = {"alibi": 0.08, "mod: alibi": 0.08}  # as a share of a loop's instructions
CODE = 2**17 // 16  # instructions of 16 bytes: with more than 128 KiB of them forwards were slower on sm_90


def launch_of(head_dim: int, features: str, dtype: torch.dtype = torch.bfloat16) -> Launch:
    is_ragged = features == "everything"
    shape = (512, 4) if is_ragged else (2, 512, 4)
    q, k = (torch.zeros(*shape, head_dim, dtype=dtype) for _ in "qk")
    v, out = (torch.zeros(*shape, min(head_dim, 128), dtype=dtype) for _ in "vo")
    lse = torch.zeros(4, 512) if is_ragged else torch.zeros(2, 4, 512)
    offsets = cumulative([256, 256])
    lengths = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"), offsets)
    lengths |= {"max_seqlen_q": 256, "max_seqlen_kv": 256}
    problem = Problem(q, k, v, softmax_scale=0.1, **FEATURES[features], **(lengths if is_ragged else {}))
    with recorded_launches() as launches:
        blackwell_forward(problem, out, lse)
    return next(launch for launch in launches if "blackwell" in launch.kernel.__name__)


def check_compiled(cases: list[tuple[int, str]], dtype: torch.dtype = torch.bfloat16) -> None:
    requests = [request_for(launch_of(head_dim, features, dtype), 100) for head_dim, features in cases]
    for case, report in zip(cases, compile_sound(requests), strict=True):
        assert set(report.matrix_instructions) == {"UTCHMMA"}, f"{case}: {report.matrix_instructions}"
        assert {"UTMALDG", "UTMASTG", "LDTM", "STTM", "UTCBAR"} <= report.instructions.keys(), case
        assert 0 < report.tensor_columns <= TENSOR_COLUMNS_LIMIT, f"{case}: {report.tensor_columns}"
        assert report.shared_bytes <= SHARED_MEMORY_LIMIT[100], f"{case}: {report.shared_bytes}"
        assert report.idle_barriers == 0, f"{case}: {report.idle_barriers} barriers that nothing uses"
        assert not report.warnings, f"{case}: {report.warnings}"
        assert sum(report.instructions.values()) <= CODE, f"{case}: {sum(report.instructions.values())} instructions"
        consumers = [loop for loop in report.loops if loop.get("MUFU", 0) >= 64]
        assert len(consumers) == 2, f"{case}: {len(consumers)} loops with exponentials"
        spills = [loop.get("STL", 0) + loop.get("LDL", 0) for loop in consumers]
        assert max(spills) <= LOOP_SPILLS, f"{case}: {spills}"


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param([(128, "causal")], marks=pytest.mark.slow),
        pytest.param([(dim, "everything") for dim in (DIMS[0], DIMS[-1])], marks=pytest.mark.slow),
        pytest.param([(dim, features) for dim in DIMS for features in FEATURES], marks=pytest.mark.exhaustive),
    ],
    ids=["one", "more", "all"],
)
def test_compiled(cases: list[tuple[int, str]]) -> None:
    check_compiled(cases)


@pytest.mark.exhaustive
def test_compiled_in_fp16() -> None:
    check_compiled([(dim, features) for dim in DIMS for features in FEATURES], torch.float16)


@pytest.mark.parametrize(
    ("dim", "some"),
    [
        pytest.param(128, ("mod: softcap, documents", "bias", "dropout"), marks=pytest.mark.slow),
        *(pytest.param(dim, (), marks=pytest.mark.exhaustive, id=f"{dim}") for dim in DIMS),
    ],
)
def test_mods_compiled(dim: int, some: Sequence[str]) -> None:
    requests = []
    bias = {"bias_type": "post_scale_bias", "bias": torch.zeros(1, 4, 512, 512, dtype=torch.bfloat16)}
    cases = {name: make("cpu") for name, make in MODS.items()} | {"bias": bias, "dropout": dropped()}
    cases = {name: cases[name] for name in some or cases}
    for features in cases.values():
        inputs = {"lengths_q": [512], "num_heads": 4, "num_heads_kv": 4, "head_dim_qk": dim, "head_dim_v": min(dim, 128)}
        given = make_inputs(dtype=torch.bfloat16, **inputs)
        spec, x = make_call(given, attn_mask_type="causal", return_max_logit=False, **features)
        with recorded_launches() as launches:
            blackwell_forward(triton_backend.to_problem(spec, x), torch.empty_like(x.v), torch.empty(1, 4, 512))
        requests += [request_for(launch, 100) for launch in launches if "blackwell" in launch.kernel.__name__]
    for name, report in zip(cases, compile_sound(requests), strict=True):
        assert set(report.matrix_instructions) == {"UTCHMMA"}, name
        assert report.loop_spill_share <= SPILLS_OF_MODS.get(name, 0.01), f"{name}: {report}"
        assert report.shared_bytes <= SHARED_MEMORY_LIMIT[100], name
        assert report.idle_barriers == 0, name


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({}, None),
        ({"dtype": torch.float32}, "bf16 and fp16, not float32"),
        ({"shape": (2, 1024, 16, 192)}, "up to 192 of q and k, and up to 128 of v"),
        ({"dropout_p": 0.1, "rng_state": torch.zeros(2, dtype=torch.int64)}, None),
        ({"softmax_scale": 0.0}, "softmax_scale of 0"),
        ({"shape": (2, 0, 16, 128)}, "nothing to load"),
    ],
    ids=str,
)
def test_calls_left_to_the_portable_kernel_have_a_reason(more: dict[str, Any], reason: str | None) -> None:
    x = torch.empty(more.get("shape", (2, 1024, 16, 128)), dtype=more.get("dtype", torch.bfloat16), device="meta")
    problem = Problem(x, x, x, **{"softmax_scale": 0.1, **{k: v for k, v in more.items() if k not in ("shape", "dtype")}})
    with pretended_device(100, 148):
        said = conditions.forward_unsupported(problem, x)
    assert said is None if reason is None else reason in str(said)


@pytest.mark.parametrize(
    ("wish", "more", "forward"),
    [
        ("auto", {}, "not sm_100: no run on such a GPU shows that it is faster; FLEXATTN_HOPPER=always runs it"),
        ("auto", {"batch_invariant": True}, "not sm_100: no run on such a GPU shows that it is faster"),
        ("never", {}, "FLEXATTN_HOPPER=never"),
        ("always", {}, "  sm_100: FLEXATTN_HOPPER=always; no run on such a GPU shows that it is faster"),
    ],
)
def test_only_who_asks_for_it_gets_it(wish: str, more: dict[str, Any], forward: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "INTERPRETED", False)  # it runs no Gluon; here nothing is run at all
    monkeypatch.setenv("FLEXATTN_HOPPER", wish)
    q = torch.empty(2, 4096, 16, 128, dtype=torch.bfloat16, device="meta", requires_grad=not more)
    x, settings = bind_call(q=q, k=q, v=q, **more)
    spec = spec_to_run(x, settings)._replace(device_type="cuda", capability=(10, 0))
    text = explain(spec, "triton", x).details
    assert forward in text
    assert ("forward: triton (sm_100)" in text) == (wish == "always")
    if more:
        return  # no gradient is requested
    assert forward.replace("sm_100", "sm_100 fused", 1) in text
    assert f"backward: triton ({'sm_100 fused' if wish == 'always' else 'portable'})" in text
    text = explain(spec._replace(deterministic=True), "triton", x).details
    assert "backward: triton (portable)" in text
    if wish == "always":
        assert "not sm_100 fused: its dq is not deterministic" in text
