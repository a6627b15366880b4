"""The fused backward for sm_90 at head dims of q and k from 136 to 192: in the emulator, on a GPU, and the choice of its calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flexattn import emulator
from flexattn.bench.emulated import emulated
from flexattn.dispatch import triton_backend
from flexattn.dispatch.spec import Window, as_bshd
from flexattn.kernels_triton.ahead_of_time.compile_report import SHARED_MEMORY_LIMIT, request_for
from flexattn.kernels_triton.common import crossovers
from flexattn.kernels_triton.common.facts import facts_of
from flexattn.kernels_triton.common.problem import Backward, Problem
from flexattn.kernels_triton.families import Policy, choose
from flexattn.kernels_triton.hopper import backward_fused_192, conditions, dkdv_loader
from flexattn.kernels_triton.runtime.device import pretended_device
from flexattn.kernels_triton.runtime.launch import recorded_launches
from flexattn.testing import (
    make_call,
    make_dlse,
    make_dout,
    make_inputs,
    reference_attention,
)
from tests.hopper.test_attention import FUSED_192, check, check_bits_but_for_dq, on_hopper
from tests.hopper.test_attention import launches as launches
from tests.hopper.test_query_walk import CALLS as WALKS
from tests.hopper.test_query_walk import single_turns as single_turns
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
from tests.support.inject import drop, kernels_with, move, with_argument, wrong_phase

KERNEL = "_attn_bwd_fused_192_hopper_kernel"
DIMS = {"head_dim_qk": 192, "head_dim_v": 128}
DENSE = {"lengths_q": [200] * 2, "lengths_kv": [330] * 2, "num_heads": 2, "num_heads_kv": 2, **DIMS}


def problem_of(dims: tuple[int, int] = (192, 128), shape: tuple[int, int, int] = (4, 4096, 16), **more: Any) -> Problem:
    q = torch.empty((*shape, dims[0]), dtype=torch.bfloat16, device="meta")
    v = torch.empty((*shape, dims[1]), dtype=torch.bfloat16, device="meta")
    return Problem(q, q, v, softmax_scale=0.1, **more)


def backward_of(problem: Problem) -> Backward:
    x = problem
    out = torch.empty_like(x.v)
    lse = torch.empty((x.batch, x.num_heads, x.longest_q), dtype=torch.float32, device="meta")
    return Backward(x, out, lse, out, None, *(torch.empty_like(t) for t in (x.q, x.k, x.v)), None)


def family_of(problem: Problem, policy: Policy | None = None, *, deterministic: bool = False) -> tuple[str, dict[str, str]]:
    with pretended_device(90, 132):
        choice = choose(backward_of(problem)._replace(deterministic=deterministic), policy or Policy())
    return choice.family.name, dict(choice.rejected)


@pytest.mark.parametrize(
    ("dims", "more", "reason"),
    [
        ((128, 128), {}, "head dims of q and k from 136 to 192, and of v up to 128"),
        ((200, 128), {}, "head dims of q and k from 136 to 192, and of v up to 128"),
        ((192, 136), {}, "head dims of q and k from 136 to 192, and of v up to 128"),
        ((192, 128), {"softcap": 30.0}, "only scaled scores"),
        ((192, 128), {"dropout_p": 0.1}, "only scaled scores"),
        ((192, 128), {"alibi_slopes": torch.ones(16)}, "only scaled scores"),
        (
            (192, 128),
            {"shape": (2, 8192, 16), "window_left": 511, "window_right": 0},
            "from 1023 keys left of the diagonal on",
        ),
        (
            (192, 128),
            {"window_left": 1023, "window_right": 0},
            "it is faster from 8192 tokens of the longest sequence on, and this call has 4096",
        ),
        ((192, 128), {"shape": (16, 300, 16)}, "from 1024 tokens of the longest sequence on, and this call has 300"),
        ((192, 128), {"shape": (1, 4096, 1)}, "from 60 keys of all heads for each multiprocessor on, and this call has 31"),
    ],
)
def test_other_calls_have_a_reason(dims: tuple[int, int], more: dict[str, Any], reason: str) -> None:
    x = problem_of(dims, **more)
    assert family_of(x)[0] != "sm_90 fused 192"
    with pretended_device(90, 132):
        assert reason in str(conditions.fused_192_unsupported(x, x.v, x.v) or crossovers.slower("sm_90 fused 192", facts_of(x)))


def test_plain_calls_take_it_that_need_not_repeat() -> None:
    for more in ({}, {"window_right": 0}, {"window_right": 0, "bottom_right": True, "has_sink": True}):
        assert family_of(problem_of(**more))[0] == family_of(problem_of((136, 64), **more))[0] == "sm_90 fused 192"
    name, rejected = family_of(problem_of(), deterministic=True)
    assert name == "sm_90 two-kernel"
    assert "not deterministic" in rejected["sm_90 fused 192"]
    assert family_of(problem_of(shape=(16, 512, 16)), Policy(ignores_measurements=True))[0] == "sm_90 fused 192"


@pytest.mark.sample(values=False)
@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, False])
def test_compiled(causal: bool) -> None:
    """The kernel is short of registers: a version with 49 spilled words in each loop took up to 10 % longer (notes/bounds.md)."""
    x = torch.zeros(1, 256, 2, 192, dtype=torch.bfloat16)
    v = torch.zeros(1, 256, 2, 128, dtype=torch.bfloat16)
    problem = Problem(x, x, v, softmax_scale=0.1, window_right=0 if causal else None)
    with recorded_launches() as seen:
        backward_fused_192.fused_192_backward(
            Backward(problem, v, torch.zeros(1, 2, 256), v, None, *(torch.zeros_like(t) for t in (x, x, v)), None)
        )
    (report,) = compile_sound([request_for(launch, 90) for launch in seen if launch.kernel.__name__ == KERNEL])
    assert not report.warnings  # C7512: ptxas serialises the products
    assert report.exposed_exponentials == report.idle_barriers == 0
    assert report.shared_bytes <= SHARED_MEMORY_LIMIT[90]
    loops = [loop for loop in report.loops if "HGMMA" in loop]
    assert [loop["HGMMA"] for loop in loops] == [56, 56]
    assert all(loop.get("STL", 0) + loop.get("LDL", 0) <= 10 for loop in loops), loops
    expected = 680 if causal else 620
    assert all(abs(sum(loop.values()) - expected) <= 0.05 * expected for loop in loops), [sum(loop.values()) for loop in loops]


def run(
    seed: int,
    call: dict[str, Any],
    fp32: bool = False,
    kernels: Any = backward_fused_192,
    **inputs: Any,
) -> emulator.Report:
    """The backward in the emulator, with the reference's forward, compared with its gradients. fp32: whether they are fp32."""
    given = make_inputs(**{"dtype": torch.bfloat16, **inputs})
    spec, x = make_call(given, **call, return_max_logit=False)
    out, lse = reference_attention(spec, x, dtype=spec.dtype)[:2]
    dout, dlse = make_dout(given), make_dlse(given)
    memory = gradient_memory(spec, x, torch.float32 if fp32 else None)
    rows, dout_rows = (as_bshd(t.to(spec.dtype), spec.q_format) for t in (out, dout))
    with emulated(seed, kernels) as reports:
        problem = triton_backend.to_problem(spec, x)
        kernels.fused_192_backward(Backward(problem, rows, lse.float(), dout_rows, dlse, *memory.views, memory.doffset))
    report = reports[KERNEL]
    if not report.bugs:
        check_gradients(memory, wanted_gradients(spec, x, dout, dlse))
        assert not fp32 or all(is_wide(t, spec.dtype) for t in memory.gradients)
    return report


def check_run(seed: int, call: dict[str, Any], **inputs: Any) -> None:
    report = run(seed, call, **inputs)
    assert {finding.kind for finding in report.findings} <= HARMLESS, f"seed {seed}: {report}"


BANDS: list[dict[str, Any]] = [
    {"attn_mask_type": "padding"},
    EVERYTHING | {"softmax_offset": SINKS},
    {"attn_mask_type": "padding_causal"},
    {"attn_mask_type": "padding", "window_size": (60, 20)},
    {"attn_mask_type": "padding", "window_size": Window(60, -20)},
]


@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize("call", BANDS, ids=str)
@pytest.mark.parametrize("fmt", ["thd", "bshd", "sbhd", "bhsd"])
def test_emulated(fmt: str, call: dict[str, Any]) -> None:
    """Keys that no query sees, sequences of one block and of an odd number of blocks, two query heads to each key head."""
    dims = {"head_dim_qk": 136, "head_dim_v": 72} if fmt in ("thd", "sbhd") else DIMS
    check_run(len(fmt), call, qkv_format=fmt, gap=3, padding=True, **dims, **UNEVEN)


@pytest.mark.slow
@pytest.mark.sample("mask", "seed")
@without_gpu
@pytest.mark.parametrize("mask", ["no_mask", "causal", "causal_bottom_right"])
@pytest.mark.parametrize("seed", [1, 5, 6])  # lazy, random, eager
def test_dense_calls_emulated(seed: int, mask: str) -> None:
    check_run(seed, {"attn_mask_type": mask}, fp32=seed == 5, **DENSE)


@pytest.mark.slow
@pytest.mark.sample("name")
@without_gpu
@pytest.mark.usefixtures("single_turns")
@pytest.mark.parametrize("name", WALKS)
def test_turns_of_heads_emulated(name: str) -> None:
    call, inputs = WALKS[name]
    check_run(3, call, num_heads=4, **DIMS, **inputs)


@without_gpu
@pytest.mark.exhaustive
def test_twenty_schedules() -> None:
    for seed in range(20):
        check_run(seed, EVERYTHING | {"softmax_offset": SINKS}, qkv_format="thd", **DIMS, **UNEVEN)


FAULTS: dict[str, tuple[Any, inject.Fault]] = {
    "q is read before it has come": (backward_fused_192, drop("wait(scores_full)")),
    "dout is read before it has come": (backward_fused_192, drop("wait(dp_full)")),
    "k is read before it has come": (backward_fused_192, drop("mbarrier.wait(kv_full)")),
    "dq is summed before the other half of ds is there": (
        backward_fused_192,
        drop("wait_written(last)", within="consume_fused_192", nth=0),
    ),
    "ds is overwritten before the other warpgroup's dq has read it": (backward_fused_192, drop("wait_read(current)")),
    "ds is released before dq has read it": (
        backward_fused_192,
        move(
            "announce_read(last)",
            before="warpgroup_mma_wait(PARTS, dq)",
            within="consume_fused_192",
        ),
    ),
    "ds is read without a fence": (backward_fused_192, drop("fence_async_shared()", within="consume_fused_192", nth=1)),
    "dq is added before it is written": (backward_fused_192, drop("wait(full)")),
    "dq is overwritten before it is added": (backward_fused_192, drop("tma.store_wait()")),
    "dq is added without a fence": (backward_fused_192, drop("fence_async_shared()", within="_hand_over_dq")),
    "columns of dq are added to others": (
        backward_fused_192,
        with_argument("reduce_add(sums.narrow)", 1, "[sums_row, (3 - consumer) * NARROW]", nth=0),
    ),
    "k is overwritten while the other warpgroup multiplies by it": (backward_fused_192, drop("named_barrier_sync(LAST)")),
    "q is released before dk has read it": (
        backward_fused_192,
        move("release(ds_empty)", before="_wait_for_sums(dk)", within="consume_fused_192", nth_there=1),
    ),
    "the loader waits for the wrong phase of q": (dkdv_loader, wrong_phase("wait(ds_empty)")),
}


@pytest.mark.slow
@pytest.mark.sample(values=False)
@without_gpu
@pytest.mark.parametrize("name", FAULTS)
def test_injected_fault_is_found(name: str, tmp_path: Path) -> None:
    (kernels,) = kernels_with((backward_fused_192,), *FAULTS[name], tmp_path)
    inputs = {"lengths_q": [330], "lengths_kv": [390], "num_heads": 2, "num_heads_kv": 1, **DIMS}
    for seed in (2, 5):  # round robin and random
        try:
            report = run(seed, {}, kernels=kernels, **inputs)
        except AssertionError:  # a wrong result
            continue
        assert report.bugs, f"not found on seed {seed}"


@on_hopper
@pytest.mark.parametrize("fmt", ["bshd", "sbhd", "bhsd", "thd"])
@pytest.mark.parametrize("mask", ["no_mask", "causal", "causal_bottom_right"])
@pytest.mark.parametrize(("sq", "skv"), [(1024, 1024), (700, 333), (333, 700), (1, 500), (300, 1)])
def test_on_a_gpu(fmt: str, mask: str, sq: int, skv: int, launches: list[str]) -> None:
    padding = "padding" if mask == "no_mask" else f"padding_{mask}"
    call = {"attn_mask_type": padding if fmt == "thd" else mask}
    check(launches, call, qkv_format=fmt, lengths_q=[sq] * 3, lengths_kv=[skv] * 3, num_heads=4, num_heads_kv=2, **DIMS)


@on_hopper
@pytest.mark.parametrize("mask", ["padding", "padding_causal"])
def test_bits_of_dk_and_dv_repeat(mask: str, launches: list[str]) -> None:
    check_bits_but_for_dq((192, 128), mask)
    assert set(launches) == {"_attn_fwd_hopper_kernel", *FUSED_192}
