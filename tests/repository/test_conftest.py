"""The tests' own safety net: unwritten memory is never a plausible number."""

from __future__ import annotations

import re
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.conftest import FIND_FAULTS, ROOT, FreshPython, pytest_collection_modifyitems, sampled, values_shown

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
INTEGERS = (torch.int32, torch.int64)


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
def test_uninitialised_memory_is_poisoned(dtype: torch.dtype, device: str) -> None:
    x = torch.zeros(3, dtype=dtype, device=device)
    made = (
        torch.empty(3, dtype=dtype, device=device),
        torch.empty_like(x),
        torch.empty_strided((3,), (2,), dtype=dtype, device=device),
        x.new_empty(3),
        x.new_empty_strided((3,), (2,)),
    )
    for out in made:
        assert out.dtype is dtype
        values = out.double()
        assert (values.isnan() if dtype.is_floating_point else values == torch.iinfo(dtype).max).all()


def test_fresh_processes_inherit_no_settings(fresh_python: FreshPython, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXATTN_BACKEND", "eager")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    ran: subprocess.CompletedProcess[str] = fresh_python("-c", "import os; print(*sorted(os.environ), sep='\\n')")
    names = set(ran.stdout.split())
    assert not {"FLEXATTN_BACKEND", "TRITON_INTERPRET"} & names
    assert "PATH" in names


def test_a_sample_has_each_value_of_each_parameter() -> None:
    grid = [frozenset({("x", x), ("y", y)}) for x in "abc" for y in "de"]
    chosen = sampled(grid)
    assert frozenset().union(*(grid[i] for i in chosen)) == frozenset().union(*grid)
    assert len(chosen) == 3
    assert sampled(grid, {5, 1}) == {5, 1, 2}
    assert sampled([frozenset()] * 4) == {0}
    assert sampled([frozenset()] * 4, {3}) == {3}


def test_a_sample_has_each_value_on_the_backend_with_kernels() -> None:
    cases = [{"x": x, "y": 0, "backend": backend} for x in "abc" for backend in ("eager", "triton")]
    chosen = sampled(values_shown(cases, {"x", "backend"}))
    assert {(cases[i]["x"], cases[i]["backend"]) for i in chosen if cases[i]["backend"] == "triton"} == {
        (x, "triton") for x in "abc"
    }
    assert len(chosen) == 4
    assert values_shown([{"x": 1, "backend": "eager"}], {"x"}) == [frozenset({("x", "1")})]


SLOW, EXHAUSTIVE = {"slow"}, {"exhaustive"}
CASES = {(1, 1): set(), (2, 1): set(), (1, 2): SLOW, (1, 3): SLOW}


@pytest.mark.sample("x")
@pytest.mark.parametrize("y", [1, 2, 3])
@pytest.mark.parametrize("x", [1, 2])
def test_cases_of_a_sample_with_a_new_value_are_slow_and_the_others_exhaustive(
    x: int, y: int, request: pytest.FixtureRequest
) -> None:
    assert marks_of(request) == CASES.get((x, y), EXHAUSTIVE)


@pytest.mark.sample(values=False)
@pytest.mark.parametrize("x", [1, 2])
def test_all_but_the_sample_is_exhaustive_if_the_mark_says_so(x: int, request: pytest.FixtureRequest) -> None:
    assert marks_of(request) == (set() if x == 1 else EXHAUSTIVE)


def test_a_mark_with_an_unknown_argument_is_named(request: pytest.FixtureRequest) -> None:
    item: Any = SimpleNamespace(
        nodeid="tests/x.py::test_x[1]",
        get_closest_marker={"sample": pytest.mark.sample(pairs=False).mark}.get,
        callspec=SimpleNamespace(marks=[], params={"x": 1}),
    )
    with pytest.raises(pytest.UsageError, match=r"test_x\[1\]: the mark sample has \['pairs'\]; accepted: parameters, and values"):
        pytest_collection_modifyitems(request.config, [item])


def test_what_finds_a_fault_is_not_exhaustive(request: pytest.FixtureRequest) -> None:
    item: Any = SimpleNamespace(nodeid=min(FIND_FAULTS), get_closest_marker={"slow": True}.get)
    pytest_collection_modifyitems(request.config, [item])
    item.get_closest_marker = {"exhaustive": True}.get
    with pytest.raises(pytest.UsageError, match=f"find faults of tests/faults.json: .*{re.escape(item.nodeid)}.* Mark them slow"):
        pytest_collection_modifyitems(request.config, [item])


def marks_of(request: pytest.FixtureRequest) -> set[str]:
    return {mark.name for mark in request.node.iter_markers()} & {"slow", "exhaustive"}


def test_tests_that_find_faults_are_known() -> None:
    assert len(FIND_FAULTS) > 100
    assert all((ROOT / re.split("::| ", test)[0]).is_file() for test in FIND_FAULTS)


def test_every_test_has_one_thread() -> None:
    assert torch.get_num_threads() == 1
