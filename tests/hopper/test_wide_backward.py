"""The backward for sm_90 at head dims above 256, in the emulator: right, race-free, and with equal bits under every schedule.

An injected fault must be found.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flexattn import emulator
from flexattn.bench.emulated import emulated
from flexattn.dispatch import triton_backend
from flexattn.dispatch.spec import Window, as_bshd
from flexattn.kernels_triton.ahead_of_time.compile_report import SHARED_MEMORY_LIMIT, request_for
from flexattn.kernels_triton.common.problem import Backward, Problem
from flexattn.kernels_triton.hopper import backward_wide, conditions
from flexattn.kernels_triton.mods import mask_blocks
from flexattn.kernels_triton.runtime.device import pretended_device
from flexattn.kernels_triton.runtime.launch import recorded_launches
from flexattn.mods.trace import trace_mods
from flexattn.testing import make_call, make_dlse, make_dout, make_inputs, reference_attention
from tests.hopper.test_attention import on_hopper
from tests.support import inject
from tests.support.compiled_kernels import compile_sound
from tests.support.gluon_calls import (
    EVERYTHING,
    HARMLESS,
    SINKS,
    UNEVEN,
    check_gradients,
    gradient_memory,
    is_wide,
    wanted_gradients,
    without_gpu,
)
from tests.support.inject import drop, kernels_with, move, with_argument

KERNEL = "_attn_bwd_wide_hopper_kernel"
DIMS = {"head_dim_qk": 512, "head_dim_v": 512}
SMALL = {"lengths_q": [70], "lengths_kv": [100], "num_heads": 2, "num_heads_kv": 1, **DIMS}


def run(
    seed: int | None, call: dict[str, Any], fp32: bool = False, kernels: Any = backward_wide, **inputs: Any
) -> tuple[emulator.Report | None, list[Tensor]]:
    """The backward with the reference's forward, compared with its gradients: in the emulator with a seed, otherwise on a GPU.

    fp32: whether gradients are fp32.
    """
    given = make_inputs(**{"dtype": torch.bfloat16, **DIMS, **inputs})
    spec, x = make_call(given, **call, return_max_logit=False)
    out, lse = reference_attention(spec, x, dtype=torch.float64)[:2]
    dout, dlse = make_dout(given), make_dlse(given)
    memory = gradient_memory(spec, x, torch.float32 if fp32 else None)
    rows, dout_rows = (as_bshd(t.to(spec.dtype), spec.q_format) for t in (out, dout))
    problem = mask_blocks.with_key_lists(mask_blocks.with_mask_blocks(triton_backend.to_problem(spec, x), "backward"))
    with pretended_device(90, 132):
        assert conditions.wide_backward_unsupported(problem, rows, dout_rows) is None
    with emulated(seed, kernels) if seed is not None else nullcontext({}) as reports:
        kernels.wide_backward(Backward(problem, rows, lse.float(), dout_rows, dlse, *memory.views, memory.doffset))
    report = reports.get(KERNEL)
    if report is None or not report.bugs:
        check_gradients(memory, wanted_gradients(spec, x, dout, dlse))
        assert not fp32 or all(is_wide(t, spec.dtype) for t in memory.gradients)
    return report, memory.gradients


def check(seed: int, call: dict[str, Any], **inputs: Any) -> list[Tensor]:
    report, gradients = run(seed, call, **inputs)
    assert report is not None
    assert {finding.kind for finding in report.findings} <= HARMLESS, f"seed {seed}: {report}"
    return gradients


@without_gpu
def test_a_causal_call() -> None:
    check(1, {"attn_mask_type": "causal_bottom_right"}, **SMALL)


@pytest.mark.slow
@without_gpu
def test_bits_repeat() -> None:
    first, *others = (check(seed, {"attn_mask_type": "causal"}, fp32=True, **SMALL) for seed in (2, 5, 6))
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


BANDS: list[dict[str, Any]] = [
    {"attn_mask_type": "padding"},
    EVERYTHING | {"softmax_offset": SINKS},
    {"attn_mask_type": "padding_causal"},
    {"attn_mask_type": "padding", "window_size": (60, 20)},
    {"attn_mask_type": "padding", "window_size": Window(60, -20)},
]


@pytest.mark.slow
@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize("call", BANDS, ids=str)
@pytest.mark.parametrize("fmt", ["thd", "bshd", "sbhd", "bhsd"])
def test_formats_and_bands(fmt: str, call: dict[str, Any]) -> None:
    """Head dims that do not fill the second part, keys that no query sees, two query heads to each key head."""
    dims = {"head_dim_qk": 264, "head_dim_v": 320} if fmt in ("thd", "sbhd") else DIMS
    check(len(fmt), call, qkv_format=fmt, gap=3, padding=True, **dims, **UNEVEN)


FEATURES: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 3.0},
    "ALiBi": {"bias_type": "alibi", "alibi_slopes": torch.tensor([0.3, 0.02]), "attn_mask_type": "causal"},
    "bias": {"bias_type": "post_scale_bias", "bias": torch.sin(torch.arange(2 * 70 * 100.0)).view(1, 2, 70, 100)},
    "dropout": {"dropout_p": 0.2, "rng_state": torch.tensor([3, 4])},
    "score_mod": {"mods": trace_mods(lambda score, b, h, i, j: 2 * score + 0.01 * (j - i) * (h + 1), None, needs_grad=True)},
    "mask_mod": {"mods": trace_mods(None, lambda b, h, i, j: (i + j) % 3 != 0)},
}


@pytest.mark.slow
@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize("name", FEATURES)
def test_features(name: str) -> None:
    check(3, FEATURES[name], **SMALL)


@pytest.mark.slow
@without_gpu
def test_a_block_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_blocks, "BLOCK", 128)
    monkeypatch.setattr(mask_blocks, "SHORTEST", 1)
    call = {"mods": trace_mods(None, lambda b, h, i, j: (j < 100) | (j > 200 + i))}
    check(5, call, **SMALL | {"lengths_q": [150], "lengths_kv": [400]})


@pytest.mark.exhaustive
@without_gpu
def test_twenty_schedules() -> None:
    for seed in range(20):
        check(seed, EVERYTHING | {"softmax_offset": SINKS}, qkv_format="thd", gap=3, **UNEVEN)


FAULTS: dict[str, inject.Fault] = {
    "rows are read before they have come": drop("wait(rows_full)", within="_multiply"),
    "a block is read before it has come": drop("wait(tiles.full)", within="_add_part"),
    "dout is read before it has come": drop("wait(tiles.full)", within="_add_block"),
    "a block is overwritten before it is read": drop("wait(tiles.empty)"),
    "the loader waits for the wrong phase": with_argument("wait(tiles.empty)", 1, "slot.phase"),
    "scores are read before they are written": drop("named_barrier_sync(S_WRITTEN)", within="_differentiate"),
    "ds is read before it is written": drop("named_barrier_sync(DS_WRITTEN)"),
    "ds is read without a fence": drop("fence_async_shared()"),
    "a block is released before its product has read it": move(
        "arrive(tiles.empty)", before="warpgroup_mma(tiles.ds)", within="_add_block"
    ),
    "q and k are released after the scores of dk": with_argument("_add_part(SCORES + 1)", 4, "True", within="_multiply"),
    "both parts of a gradient are the first": with_argument("_store(1)", 4, "0", within="_differentiate"),
    "dv has dout's other part": with_argument("_slot(DP)", 1, "DP + 1 - CONSUMER", within="_add_block"),
}


@pytest.mark.slow
@pytest.mark.sample(values=False)
@without_gpu
@pytest.mark.parametrize("name", FAULTS)
def test_injected_fault_is_found(name: str, tmp_path: Path) -> None:
    (kernels,) = kernels_with((backward_wide,), backward_wide, FAULTS[name], tmp_path)
    for seed in (2, 5):  # round robin and random
        try:
            report, _ = run(seed, {}, kernels=kernels, **SMALL | {"lengths_q": [140], "lengths_kv": [150]})
        except AssertionError:  # a wrong result
            continue
        assert report is not None
        assert report.bugs, f"not found on seed {seed}"


def problem_of(dims: tuple[int, int] = (512, 512), heads_kv: int = 1, **more: Any) -> Problem:
    """Gemma 4's call: 8192 tokens, 16 heads."""
    q = torch.empty((1, 8192, 16, dims[0]), dtype=torch.bfloat16, device="meta")
    k, v = (torch.empty((1, 8192, heads_kv, dim), dtype=torch.bfloat16, device="meta") for dim in dims)
    return Problem(q, k, v, softmax_scale=1.0, **more)


# Calls, and the largest share of spills in the loops with Triton 3.6 and 3.7.
COMPILED: dict[str, tuple[dict[str, Any], float]] = {
    "causal": ({"window_right": 0}, 0.0),
    "full": ({}, 0.0),
    "softcap, dropout and a window": (
        {"softcap": 30.0, "dropout_p": 0.1, "rng_state": torch.tensor([1, 2]), "window_left": 100},
        0.005,
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "causal" else pytest.mark.exhaustive) for name in COMPILED]
)
def test_compiled(name: str) -> None:
    more, spills = COMPILED[name]
    x = problem_of(**more)
    out, lse = torch.empty_like(x.q), torch.empty(1, 16, 8192, device="meta")
    gradients = [torch.empty_like(t) for t in (x.q, x.k, x.v)]
    with pretended_device(90, 132), recorded_launches() as seen:
        backward_wide.wide_backward(Backward(x, out, lse, out, None, *gradients, None))
    reports = compile_sound([request_for(launch, 90) for launch in seen if launch.kernel.__name__ == KERNEL])
    assert len(reports) == 2
    for report in reports:
        assert report.loop_spill_share <= spills
        assert report.spill_store_bytes <= (40 if spills else 0)
        assert report.shared_bytes <= SHARED_MEMORY_LIMIT[90]
        assert set(report.matrix_instructions) == {"HGMMA"}
        assert report.idle_barriers == 0
        assert not report.warnings
        # 16 steps along a head dim's part, twice, and 2 along a block
        assert [loop["HGMMA"] for loop in report.loops if "HGMMA" in loop] == [34, 34]


def test_what_it_refuses() -> None:
    def reason(problem: Problem) -> str | None:
        return conditions.wide_backward_unsupported(problem, torch.empty_like(problem.v), torch.empty_like(problem.v))

    with pretended_device(90, 132):
        assert reason(problem_of()) is reason(problem_of((264, 512))) is None
        for dims in ((576, 512), (512, 256), (128, 128)):
            assert reason(problem_of(dims)) == "it takes head dims above 256, up to 512, of q and k and of v"


@on_hopper
@pytest.mark.parametrize("fmt", ["bshd", "sbhd", "bhsd", "thd"])
@pytest.mark.parametrize("mask", ["no_mask", "causal", "causal_bottom_right"])
@pytest.mark.parametrize(("sq", "skv"), [(1024, 1024), (700, 333), (333, 700), (1, 500), (300, 1)])
def test_on_a_gpu(fmt: str, mask: str, sq: int, skv: int) -> None:
    padding = "padding" if mask == "no_mask" else f"padding_{mask}"
    call = {"attn_mask_type": padding if fmt == "thd" else mask}
    inputs = {"lengths_q": [sq] * 3, "lengths_kv": [skv] * 3, "num_heads": 4, "num_heads_kv": 2, "device": "cuda"}
    first, again = (run(None, call, qkv_format=fmt, **inputs)[1] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
