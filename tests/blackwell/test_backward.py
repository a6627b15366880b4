"""The Gluon backward for sm_100: compiled ahead of time and checked by gates, and the calls left to the portable kernels.

No GPU has run it. `tests/blackwell/test_backward_emulated.py` compares its results with the oracle; `test_device.py` will if there
is such a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from flexattn import create_block_mask
from flexattn.block_mask import block_lists
from flexattn.dispatch import triton_backend
from flexattn.kernels_triton.ahead_of_time.compile_report import (
    SHARED_MEMORY_LIMIT,
    TENSOR_COLUMNS_LIMIT,
    CompileReport,
    request_for,
)
from flexattn.kernels_triton.blackwell import conditions
from flexattn.kernels_triton.blackwell.backward import blackwell_backward
from flexattn.kernels_triton.common.problem import Backward, Problem
from flexattn.kernels_triton.common.tiles import BLACKWELL_BACKWARD
from flexattn.kernels_triton.runtime.device import pretended_device
from flexattn.kernels_triton.runtime.launch import Launch, recorded_launches
from flexattn.mods.trace import trace_mods
from flexattn.testing import make_call, make_inputs
from tests.blackwell.test_attention import CODE, LOOP_SPILLS
from tests.hopper.test_attention import FEATURES
from tests.hopper.test_mods import FEATURES as MODS
from tests.support.compiled_kernels import compile_sound

DIMS = tuple(tile.head_dim for tile in BLACKWELL_BACKWARD)
SPILLS_OF_MODS = 0.01  # as a share of the instructions of loops with products


def launch_of(problem: Problem, dtype: torch.dtype = torch.bfloat16) -> Launch:
    x = problem
    dq, dk, dv, out, dout = (torch.zeros(t.shape, dtype=dtype) for t in (x.q, x.k, x.v, x.q, x.q))
    lse = torch.zeros(x.batch, x.num_heads, x.q.shape[-3])
    doffset = None if x.softmax_offset is None else torch.zeros(x.num_heads)
    with recorded_launches() as launches:
        blackwell_backward(Backward(problem, out, lse, dout, None, dq, dk, dv, doffset))
    return next(launch for launch in launches if "blackwell" in launch.kernel.__name__)


def check_report(case: Any, report: CompileReport) -> None:
    assert set(report.matrix_instructions) == {"UTCHMMA"}, f"{case}: {report.matrix_instructions}"
    assert {"UTMALDG", "UTMASTG", "UTMAREDG", "LDTM", "STTM", "UTCBAR"} <= report.instructions.keys(), case
    assert 0 < report.tensor_columns <= TENSOR_COLUMNS_LIMIT, f"{case}: {report.tensor_columns}"
    assert report.shared_bytes <= SHARED_MEMORY_LIMIT[100], f"{case}: {report.shared_bytes}"
    assert report.idle_barriers == 0, f"{case}: {report.idle_barriers} barriers that nothing uses"
    assert not report.warnings, f"{case}: {report.warnings}"


def check_compiled(cases: list[tuple[int, str]], dtype: torch.dtype = torch.bfloat16) -> None:
    requests = []
    for head_dim, features in cases:
        q = torch.zeros(2, 512, 4, head_dim, dtype=dtype)
        requests.append(request_for(launch_of(Problem(q, q, q, softmax_scale=0.1, **FEATURES[features]), dtype), 100))
    for case, report in zip(cases, compile_sound(requests), strict=True):
        check_report(case, report)
        assert sum(report.instructions.values()) <= CODE, f"{case}: {sum(report.instructions.values())} instructions"
        consumers = [loop for loop in report.loops if loop.get("MUFU", 0) >= 64]
        assert len(consumers) == 2, f"{case}: {len(consumers)} loops with exponentials"
        product_loops = [loop for loop in report.loops if "UTCHMMA" in loop]
        dq_loops = [loop for loop in report.loops if "UTMAREDG" in loop]
        assert len(product_loops) == len(dq_loops) == 1, case
        spills = [loop.get("STL", 0) + loop.get("LDL", 0) for loop in consumers + product_loops + dq_loops]
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
        pytest.param(128, ("mod: softcap, documents", "bias", "block mask"), marks=pytest.mark.slow),
        *(pytest.param(dim, (), marks=pytest.mark.exhaustive, id=f"{dim}") for dim in DIMS),
    ],
)
def test_mods_compiled(dim: int, some: Sequence[str]) -> None:
    bias = {"bias_type": "post_scale_bias", "bias": torch.zeros(1, 4, 512, 512, dtype=torch.bfloat16)}
    mask = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx // 75 == kv_idx // 75, None, None, 512, 512, "cpu")
    lists = block_lists(mask, 1, 4, 512, 512, torch.device("cpu"))
    blocks = {"mods": trace_mods(None, mask.mask_mod, needs_grad=True), "blocks": lists}
    cases = {name: make("cpu") for name, make in MODS.items()} | {"bias": bias, "block mask": blocks}
    requests = []
    cases = {name: cases[name] for name in some or cases}
    for features in cases.values():
        inputs = {"lengths_q": [512], "num_heads": 4, "num_heads_kv": 4, "head_dim_qk": dim, "head_dim_v": dim}
        spec, x = make_call(
            make_inputs(dtype=torch.bfloat16, **inputs), attn_mask_type="causal", return_max_logit=False, **features
        )
        requests.append(request_for(launch_of(triton_backend.to_problem(spec, x)), 100))
    for name, report in zip(cases, compile_sound(requests), strict=True):
        check_report(name, report)
        assert report.loop_spill_share <= SPILLS_OF_MODS, f"{name}: {report}"


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({}, None),
        ({"dtype": torch.float32}, "bf16 and fp16, not float32"),
        ({"shape": (2, 1024, 16, 192)}, "head dims up to 128"),
        ({"dropout_p": 0.1, "rng_state": torch.zeros(2, dtype=torch.int64)}, "does not draw dropout"),
        ({"softmax_scale": 0.0}, "softmax_scale of 0"),
        ({"shape": (2, 0, 16, 128)}, "nothing to load"),
        ({"shape": (2, 2**24, 16, 8)}, "statistics exceed"),
        ({"strided": True}, "dout has a stride of 4 elements"),
    ],
    ids=str,
)
def test_calls_left_to_the_portable_kernels_have_a_reason(more: dict[str, Any], reason: str | None) -> None:
    settings = {name: value for name, value in more.items() if name not in ("shape", "dtype", "strided")}
    x = torch.empty(more.get("shape", (2, 1024, 16, 128)), dtype=more.get("dtype", torch.bfloat16), device="meta")
    dout = x.as_strided(x.shape, (2**20, 2**10, 4, 1)) if more.get("strided") else x
    problem = Problem(x, x, x, **{"softmax_scale": 0.1, **settings})
    with pretended_device(100, 148):
        said = conditions.backward_unsupported(problem, x, dout)
    assert said is None if reason is None else reason in str(said)


@pytest.mark.parametrize(
    ("size", "heads", "reason"),
    [
        (128, None, None),
        (64, None, "128 x 128, and the block mask's blocks 64 x 64"),
        (128, 4, "each have their own block mask"),
    ],
)
def test_block_masks_that_do_not_fit_are_refused(size: int, heads: int | None, reason: str | None) -> None:
    mask = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx // 75 >= kv_idx // 75 + h % 2, None, heads, 256, 256, "cpu", size)
    call = {"mods": trace_mods(None, mask.mask_mod), "blocks": block_lists(mask, 1, 4, 256, 256, torch.device("cpu"))}
    given = make_inputs(lengths_q=[256], lengths_kv=[256], num_heads=4, num_heads_kv=2, dtype=torch.bfloat16)
    spec, x = make_call(given, return_max_logit=False, **call)
    problem = triton_backend.to_problem(spec, x)
    with pretended_device(100, 148):
        said = conditions.backward_unsupported(problem, x.q, x.q)
    assert said is None if reason is None else reason in str(said)
