"""Faults in copies of kernel files: each injection changes one call, and fails if there is no such call or if there are several."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from flexattn.kernels_triton.portable import forward as portable_forward
from tests.common import test_split_kv
from tests.hopper import test_emulated, test_fp8_backward, test_fp8_emulated
from tests.support.inject import Fault, add, assign, call_instead, drop, move, with_argument, wrong_phase

KERNEL = """
def load(barriers):
    mbarrier.wait(barriers.k_full.index(0), phase)
    wait_full(barriers.v_full, n, STAGES)
    if is_there:
        release(barriers.k_empty, n, STAGES)
    store(x, mask=seen)
    total = 0
    total += 1

def other(barriers):
    store(y, mask=seen)
"""


def changed(fault: Fault) -> tuple[Sequence[str], Sequence[str]]:
    """Returns the lines that are gone and the lines that are new, in order."""
    tree = ast.parse(KERNEL)
    old = ast.unparse(tree).splitlines()
    fault(tree)
    new = ast.unparse(ast.fix_missing_locations(tree)).splitlines()
    return [x.strip() for x in old if x not in new], [x.strip() for x in new if x not in old]


@pytest.mark.parametrize(
    ("fault", "gone", "new"),
    [
        (drop("wait(k_full)"), ["mbarrier.wait(barriers.k_full.index(0), phase)"], ["pass"]),
        (drop("arrive(k_empty)"), ["if is_there:", "release(barriers.k_empty, n, STAGES)"], ["pass"]),
        (add("fence()", before="store(y)"), [], ["fence()"]),
        (call_instead("store(x)", "keep"), ["store(x, mask=seen)"], ["keep(x, mask=seen)"]),
        (
            wrong_phase("wait(k_full)"),
            ["mbarrier.wait(barriers.k_full.index(0), phase)"],
            ["mbarrier.wait(barriers.k_full.index(0), phase ^ 1)"],
        ),
        (
            wrong_phase("wait(v_full)"),
            ["wait_full(barriers.v_full, n, STAGES)"],
            ["wait_empty(barriers.v_full, n, STAGES)"],
        ),
        (with_argument("store()", 0, "{} // 2", within="other"), ["store(y, mask=seen)"], ["store(y // 2, mask=seen)"]),
        (with_argument("store()", "mask", "None", nth=1), ["store(y, mask=seen)"], ["store(y, mask=None)"]),
        (assign("total", "2", nth=-1), ["total += 1"], ["total += 2"]),
    ],
)
def test_one_statement_is_changed(fault: Fault, gone: Sequence[str], new: Sequence[str]) -> None:
    assert changed(fault) == (gone, new)


def test_a_statement_is_moved_with_its_condition() -> None:
    for fault in (move("arrive(k_empty)", before="wait(v_full)"), move("arrive(k_empty)", after="wait(k_full)")):
        tree = ast.parse(KERNEL)
        fault(tree)
        lines = [line.strip() for line in ast.unparse(tree).splitlines()]
        assert lines[2:5] == ["if is_there:", "release(barriers.k_empty, n, STAGES)", "wait_full(barriers.v_full, n, STAGES)"]


@pytest.mark.parametrize("fault", [drop("wait(q_full)"), drop("store(seen)"), drop("wait(k_full)", within="other")])
def test_a_call_that_is_not_there_once_is_an_error(fault: Fault) -> None:
    with pytest.raises(AssertionError, match=r"\d statements with"):
        changed(fault)


KERNEL_FAULTS = [
    *((module, fault, name) for name, (module, fault) in test_emulated.FAULTS.items()),
    *((module, fault, name) for name, (module, fault) in test_fp8_emulated.FAULTS.items()),
    *((module, fault, name) for name, (module, fault) in test_fp8_emulated.FAULTS_OF_THE_BACKWARD.items()),
    *((module, fault, name) for name, (module, fault) in test_fp8_backward.FAULTS.items()),
    *((module, fault, name) for name, (module, fault) in test_split_kv.FAULTS_IN_GLUON.items()),
    *((portable_forward, fault, name) for name, fault in test_split_kv.FAULTS.items()),
]


@pytest.mark.slow
@pytest.mark.parametrize(("module", "fault"), [pytest.param(*faults, id=name) for *faults, name in KERNEL_FAULTS])
def test_fault_of_a_kernel_can_be_injected(module: ModuleType, fault: Fault) -> None:
    """Also the faults that only slow tests find: if you rename a call or a barrier, this test names the faults to update."""
    tree = ast.parse(Path(str(module.__file__)).read_text("utf-8"))
    before = ast.dump(tree)
    fault(tree)
    assert ast.dump(tree) != before
