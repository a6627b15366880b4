"""Each kind of finding from a kernel of a few lines, under every schedule; and the schedules themselves."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flexattn import emulator
from flexattn.emulator import inline_asm
from flexattn.emulator.scheduler import SCHEDULES
from tests.emulator import test_tensor_memory as tensor_memory
from tests.support import gluon_samples as samples

SEEDS = range(8)


def integers() -> torch.Tensor:
    return torch.zeros(128, dtype=torch.int32)


def rows(t: torch.Tensor) -> TensorDescriptor:
    return TensorDescriptor(t, [64, 64], [64, 1], [64, 64], gl.NVMMASharedLayout.get_default_for([64, 64], gl.float32))


def tma(seed: int, what: str) -> emulator.Report:
    return emulator.launch(samples.tma_misuse, (1,), rows(torch.randn(64, 64)), rows(torch.zeros(64, 64)), WHAT=what, seed=seed)


def wgmma(seed: int, what: str) -> emulator.Report:
    x = torch.randn(64, 64).bfloat16()
    return emulator.launch(samples.wgmma_misuse, (1,), x, torch.empty(64, 64), WHAT=what, seed=seed)


def hand_over(seed: int, sync: bool = True, init: int = 1, registers: int = 64, **options: Any) -> emulator.Report:
    x, y = torch.randn(128), torch.empty(128)
    report = emulator.launch(
        samples.hand_over, (1,), x, y, SYNC=sync, INIT=init, REGISTERS=registers, seed=seed, options=emulator.Options(**options)
    )
    assert not sync or torch.equal(x, y)
    return report


def barrier(seed: int, asm: str, pure: bool = False, programs: int = 1) -> emulator.Report:
    return emulator.launch(samples.named_barrier, (programs,), integers(), ASM=asm + " mov.b32 $0, 0;", PURE=pure, seed=seed)


def misuse(kernel: Any, programs: int = 1, size: int = 128) -> Any:
    out = lambda: torch.zeros(size, dtype=torch.int32)  # noqa: E731
    return lambda seed, what: emulator.launch(kernel, (programs,), out(), WHAT=what, seed=seed)


def copies(seed: int, what: str) -> emulator.Report:
    x, y = torch.arange(4096).half(), torch.zeros(4096, dtype=torch.float16)
    report = emulator.launch(samples.doubled_by_copies, (1,), x, y, 4, WHAT=what, seed=seed)
    right = 2 * x
    if what == "masked":
        right.view(4, 1024)[1:, 512:] = 0
    assert report.bugs or torch.equal(y, right)
    return report


CASES = {
    "race": lambda seed: hand_over(seed, sync=False),
    "missing-fence": lambda seed: tma(seed, "missing-fence"),
    "uninitialised-read": lambda seed: misuse(samples.memory_misuse)(seed, "uninitialised-read"),
    "deadlock": lambda seed: misuse(samples.mbarrier_misuse)(seed, "deadlock"),
    "timeout": lambda seed: emulator.launch(
        samples.endless, (1,), integers(), STEPS=False, seed=seed, options=emulator.Options(timeout_s=0.3)
    ),
    "step-limit": lambda seed: emulator.launch(
        samples.endless, (1,), integers(), STEPS=True, seed=seed, options=emulator.Options(max_steps=500)
    ),
    "expect-bytes": lambda seed: tma(seed, "expect-bytes"),
    "arrive-overflow": lambda seed: misuse(samples.mbarrier_misuse)(seed, "arrive-overflow"),
    "barrier-uninitialised": lambda seed: misuse(samples.memory_misuse)(seed, "barrier-uninitialised"),
    "barrier-reinit": lambda seed: hand_over(seed, init=2),
    "phase": lambda seed: misuse(samples.mbarrier_misuse)(seed, "phase"),
    "phase-alias": lambda seed: misuse(samples.mbarrier_misuse)(seed, "phase-alias"),
    "wgmma-wait": lambda seed: wgmma(seed, "wgmma-wait"),
    "wgmma-not-waited": lambda seed: wgmma(seed, "wgmma-not-waited"),
    "product-not-waited": lambda seed: tensor_memory.misuse(seed, "product-not-waited"),
    "store-not-waited": lambda seed: tma(seed, "store-not-waited"),
    "copy-not-waited": lambda seed: copies(seed, "copy-not-waited"),
    "named-barrier": lambda seed: barrier(seed, "bar.sync 0, 128;"),
    "shared-index": lambda seed: misuse(samples.memory_misuse)(seed, "shared-index"),
    "global-write-race": lambda seed: misuse(samples.memory_misuse, programs=2)(seed, "global-write-race"),
    "out-of-bounds": lambda seed: misuse(samples.memory_misuse)(seed, "out-of-bounds"),
    "int-overflow": lambda seed: emulator.launch(samples.product, (1,), integers(), 1 << 20, 1 << 12, seed=seed),
    "assertion": lambda seed: misuse(samples.memory_misuse)(seed, "assertion"),
    "smem-limit": lambda seed: misuse(samples.memory_misuse)(seed, "smem-limit"),
    "tmem-limit": lambda seed: tensor_memory.misuse(seed, "tmem-limit"),
    "register-budget": lambda seed: hand_over(seed, registers=512),
    "illegal-program": lambda seed: wgmma(seed, "illegal-program"),
    "not-modelled": lambda seed: misuse(samples.memory_misuse)(seed, "not-modelled"),
    "phase-repeat": lambda seed: misuse(samples.mbarrier_misuse)(seed, "phase-repeat"),
    "wgmma-register-operand": lambda seed: wgmma(seed, "wgmma-register-operand"),
    "tensor-fence": lambda seed: tensor_memory.hand_over(seed, before=False),
    "named-barrier-leftover": lambda seed: barrier(seed, "bar.arrive 9, 256;"),
    "tma-out-of-bounds": lambda seed: tma(seed, "tma-out-of-bounds"),
    "slice-in-swizzle": lambda seed: wgmma(seed, "slice-in-swizzle"),
}


def test_every_kind_has_a_case() -> None:
    assert CASES.keys() == emulator.BUGS.keys() | emulator.WARNINGS.keys()


@pytest.mark.parametrize("kind", CASES)
def test_kind_is_found_on_every_seed(kind: str) -> None:
    for seed in SEEDS if kind != "timeout" else SEEDS[:1]:
        report = CASES[kind](seed)
        found = {finding.kind for finding in report.findings}
        assert kind in found, str(report)
        assert kind in emulator.BUGS or not report.bugs, str(report)
        if kind in emulator.BUGS:
            with pytest.raises(emulator.EmulationError, match=kind):
                report.check()


@pytest.mark.parametrize("what", ["load not waited for", "source overwritten"])
def test_races_with_tma(what: str) -> None:
    for seed in SEEDS:
        assert "race" in tma(seed, what).kinds


@pytest.mark.parametrize("what", ["not committed", "not waited for", "overwritten"])
def test_races_with_cp_async(what: str) -> None:
    for seed in SEEDS:
        assert "race" in copies(seed, what).kinds


@pytest.mark.parametrize(
    ("asm", "pure", "says"),
    [
        ("bar.sync 16, 128;", False, "free are 2 to 15"),
        ("bar.sync 9, 100;", False, "multiple of 32"),
        ("bar.sync 9, 128; bar.arrive 9, 256;", False, "count of 128"),
        ("bar.sync 9, 128;", True, "is_pure"),
        ("bar.arrive 9, 256; bar.arrive 9, 256;", False, "twice in one generation"),
    ],
)
def test_named_barriers(asm: str, pure: bool, says: str) -> None:
    report = barrier(3, asm, pure)
    assert "named-barrier" in report.kinds, str(report)
    assert says in str(report)


def test_right_kernels_have_no_findings() -> None:
    for seed in SEEDS:
        for report in (
            tma(seed, ""),
            wgmma(seed, ""),
            hand_over(seed),
            barrier(seed, "bar.sync 9, 128;"),
            copies(seed, ""),
            copies(seed, "masked"),
        ):
            assert not report.findings, str(report)
            report.check()


def test_a_deadlock_says_who_waits_for_what() -> None:
    text = str(CASES["deadlock"](3))
    assert "mbarrier_misuse: at gluon_samples.py:" in text
    assert "waits for bar parity 0 (phase #0); bar: in phase #0 (parity 0), 1 of 2 arrivals pending" in text
    assert "last arrivals: mbarrier_misuse arrive(1) in phase #0" in text


def test_a_loop_that_waits_for_a_counter_ends_or_is_a_deadlock() -> None:
    for seed in SEEDS:
        counter, x, y = (torch.zeros(1, dtype=torch.int32) for _ in range(3))
        emulator.launch(samples.counted_by_another, (1,), counter, x, y, TIMES=3, seed=seed).check()
        assert (counter.item(), y.item()) == (3, 7)
        report = emulator.launch(samples.counted_by_another, (1,), torch.zeros_like(counter), x, y, TIMES=2, seed=seed)
        assert report.kinds == ["deadlock"], str(report)
        assert "polls an element of global memory, which stays 2" in str(report)
        assert "_wait_for_count" in str(report)


def test_a_race_names_both_lines() -> None:
    [finding] = hand_over(3, sync=False).bugs[-1:]
    assert finding.kind == "race"
    assert "smem.load(LINE)" in finding.message or "smem.store" in finding.message
    assert "_read" in finding.message
    assert "_write" in finding.message


def test_without_the_race_detector_memory_alone_decides() -> None:
    found = emulator.sweep(lambda seed: hand_over(seed, sync=False, race_detector=False), range(20))
    assert "race" not in found
    seeds, finding = found["uninitialised-read"]  # if the reader came first
    assert 0 < len(seeds) < 20
    assert finding.is_bug


def test_sweep_lists_the_seeds() -> None:
    found = emulator.sweep(lambda seed: hand_over(seed, sync=False), range(5))
    assert found["race"][0] == [0, 1, 2, 3, 4]


def test_seeds_choose_the_schedule_and_repeat() -> None:
    assert [hand_over(seed).schedule for seed in range(5)] == [*SCHEDULES, "random"]
    traces = {}
    for seed in range(20):
        first, second = (hand_over(seed, trace=True, schedule="random").trace for _ in range(2))
        assert first == second
        traces[str(first)] = seed
    assert len(traces) > 1  # different seeds are different orders


def test_programs_run_in_order_where_asked() -> None:
    def first_writer(seed: int, in_order: bool) -> str:
        out = integers()
        options = emulator.Options(in_order=in_order)
        report = emulator.launch(samples.memory_misuse, (4,), out, WHAT="global-write-race", seed=seed, options=options)
        return report.bugs[0].message.split("of program")[1][:5]

    assert {first_writer(seed, True) for seed in range(3, 12)} == {" (1, "}
    assert len({first_writer(seed, False) for seed in range(3, 12)}) > 1


def test_a_run_that_is_given_up_leaves_no_thread_and_no_launch_behind() -> None:
    before = threading.active_count()
    assert CASES["timeout"](0).kinds == ["timeout"]
    assert threading.active_count() == before
    hand_over(0).check()


def test_launches_do_not_nest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inline_asm, "_KNOWN", list(inline_asm._KNOWN))

    def nested(operand: Any) -> Any:
        hand_over(0)
        return operand

    emulator.register_asm(r"^nested;", nested)
    report = barrier(0, "nested;")
    assert "a launch inside or beside another" in str(report)
    assert report.kinds == ["illegal-program"]
