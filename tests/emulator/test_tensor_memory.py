"""Tensor memory and tcgen05 in the emulator: numbers against torch, rules, and the report of each misuse, under every schedule."""

from __future__ import annotations

import pytest
import torch

from flexattn import emulator
from flexattn.emulator.rules import split_registers
from flexattn.kernels_triton.ahead_of_time.compile_report import CompileRequest
from tests.support import gluon_tensor_memory as samples
from tests.support.compiled_kernels import compile_beside

SEEDS = range(8)


def misuse(seed: int, what: str) -> emulator.Report:
    return emulator.launch(samples.misuse, (1,), torch.randn(128, 64).bfloat16(), torch.empty(128, 64), WHAT=what, seed=seed)


def hand_over(seed: int, sync: bool = True, before: bool = True, after: bool = True) -> emulator.Report:
    x, y = torch.randn(128, 64), torch.empty(128, 64)
    report = emulator.launch(samples.hand_over, (1,), x, y, SYNC=sync, BEFORE=before, AFTER=after, seed=seed)
    assert not sync or torch.equal(x, y)
    return report


@pytest.mark.parametrize("by_argument", [False, True])
@pytest.mark.parametrize("in_tensor_memory", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_products(dtype: torch.dtype, in_tensor_memory: bool, by_argument: bool) -> None:
    a, b = torch.randn(128, 64).to(dtype), torch.randn(64, 64).to(dtype)
    want = a.double() @ b.double().T + a.double() @ b.double()
    for seed in SEEDS:
        out = torch.full((128, 64), float("nan"))
        how = {"IN_TENSOR_MEMORY": in_tensor_memory, "BY_ARGUMENT": by_argument}
        report = emulator.launch(samples.products, (1,), a, b, out, **how, seed=seed)
        assert not report.findings, str(report)
        assert (report.products, report.tensor_columns) == (2, 128)
        torch.testing.assert_close(out.double(), want, atol=1e-4, rtol=1e-5)


def test_right_kernels_have_no_findings() -> None:
    for seed in SEEDS:
        for report in (misuse(seed, ""), hand_over(seed)):
            assert not report.findings, str(report)


@pytest.mark.parametrize(
    ("what", "kind"),
    [
        ("race", "race"),
        ("overwritten operand", "race"),
        ("missing-fence", "missing-fence"),
        ("uninitialised-read", "uninitialised-read"),
        ("unwritten sum", "uninitialised-read"),
        ("product-not-waited", "product-not-waited"),
        ("tmem-limit", "tmem-limit"),
    ],
)
def test_misuse_is_found_on_every_seed(what: str, kind: str) -> None:
    for seed in SEEDS:
        assert kind in misuse(seed, what).kinds, f"seed {seed}"


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("layout", "accepted: a row for each thread, DistributedLinearLayout("),
        ("operand", "accepted: shared memory, and for a tensor memory too"),
        ("dtype", "which is fp32[128, 64]"),
        ("shape", "into [128, 32]"),
        ("reinterpretation", "reinterpreted as bf16[128, 64]"),
        ("index", "which has rank 2"),
        ("slice", "which has 64 columns"),
    ],
)
def test_illegal_programs_are_refused(what: str, said: str) -> None:
    report = misuse(3, what)
    assert report.kinds == ["illegal-program"], str(report)
    assert said in str(report)


def test_partitions_need_a_barrier_and_a_fence_on_both_sides() -> None:
    for seed in SEEDS:
        assert "race" in hand_over(seed, sync=False).kinds
        for fences in ({"before": False}, {"after": False}, {"before": False, "after": False}):
            report = hand_over(seed, **fences)
            assert {finding.kind for finding in report.findings} == {"tensor-fence"}, str(report)


@pytest.mark.slow
def test_these_kernels_compile_for_sm_100() -> None:
    bf16_arguments, fp32_arguments = {"a_ptr": "*bf16", "b_ptr": "*bf16", "out_ptr": "*fp32"}, {"x_ptr": "*fp32", "y_ptr": "*fp32"}
    kernels = [
        *(
            ("products", bf16_arguments, {"IN_TENSOR_MEMORY": in_tensor_memory, "BY_ARGUMENT": by_argument})
            for in_tensor_memory, by_argument in ((False, True), (True, False))
        ),
        ("misuse", {"x_ptr": "*bf16", "out_ptr": "*fp32"}, {"WHAT": ""}),
        ("hand_over", fp32_arguments, {"SYNC": True, "BEFORE": True, "AFTER": True}),
    ]
    requests = [CompileRequest(samples.__name__, name, types, constants, 100, 4, 1) for name, types, constants in kernels]
    for (name, *_), report in zip(kernels, compile_beside(requests), strict=True):
        assert set(report.matrix_instructions) == (set() if name == "hand_over" else {"UTCHMMA"}), f"{name}: {report}"
        assert report.tensor_columns > 0, name


def test_small_workers_share_a_warpgroups_registers() -> None:
    """Triton compiles the forward for sm_100 and the one-pass backward for sm_90 so: 12 warps, which begin with 168 each."""
    assert split_registers(4, [4, 1, 1], [224, 56, 56]) == ((224, 224, 56, 56), None)
    assert split_registers(4, [1, 4, 1], [24, 240, 40]) == ((224, 24, 240, 40), None)
    assert split_registers(4, [4, 4, 4], [160, 160, 160]) == ((32, 160, 160, 160), None)
    assert split_registers(4, [4, 1], [512, 24])[1] is not None
