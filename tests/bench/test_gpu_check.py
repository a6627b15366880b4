"""The driver of all steps on a machine with a GPU, without one: what runs, what becomes of it, what it leaves."""

from __future__ import annotations

import fcntl
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flexattn.bench import command, gpu_check


def python(name: str, code: str, seconds: float = 30.0, **environment: str) -> gpu_check.Step:
    return gpu_check.Step(name, [sys.executable, "-c", code], seconds, environment)


def test_each_step_runs_whatever_became_of_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    todo = [
        python("fails", "print('1 failed, 2 passed in 3.21s'); raise SystemExit(3)"),
        python("hangs", "import time; print('still here', flush=True); time.sleep(60)", 1.5),
        gpu_check.Step("missing", ["/no/such/program"], 10.0),
        python("works", "import os; print('ERROR SUMMARY:', os.environ['GIVEN'], 'errors')", GIVEN="0"),
    ]
    outcomes = gpu_check.check(todo, out, 60.0)
    assert [outcome.status for outcome in outcomes] == ["failed (3)", "timed out", "failed (not started)", "ok"]
    assert [o.last_words for o in outcomes[::3]] == ["1 failed, 2 passed in 3.21s", "ERROR SUMMARY: 0 errors"]
    assert outcomes[1].last_words == "still here"
    assert outcomes[1].seconds < 30
    assert (out / "summary.txt").read_text() == gpu_check.table(outcomes) + "\n"
    assert {path.name for path in out.iterdir()} == {"summary.txt", *(f"{step.name}.log" for step in todo)}


def is_locked(path: Path) -> bool:
    """A lock goes with the process that took it."""
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def test_what_a_step_started_ends_with_it(tmp_path: Path) -> None:
    held = tmp_path / "held"
    child = f"import fcntl, time; file = open({str(held)!r}, 'w'); fcntl.flock(file, fcntl.LOCK_EX); time.sleep(60)"
    parent = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(60)"
    assert gpu_check.run(python("parent", parent), tmp_path, 2.0).status == "timed out"
    deadline = time.monotonic() + 10
    while is_locked(held) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_locked(held)


def test_no_step_starts_when_the_time_is_spent(tmp_path: Path) -> None:
    [outcome] = gpu_check.check([python("late", "print('ran')")], tmp_path, 0.0)
    assert (outcome.status, outcome.seconds) == ("not run", 0.0)


def test_the_steps_fit_what_they_are_for(tmp_path: Path) -> None:
    todo = {step.name: step for step in gpu_check.steps(tmp_path)}
    assert list(todo) == ["triton", "gpu", "memcheck", "bench"]
    assert gpu_check.TOTAL_SECONDS < 600
    assert len(todo) + len(["summary.txt", "bench.json"]) <= 8  # files
    for step in todo.values():
        assert all((gpu_check.ROOT / word).exists() for word in step.command if word.startswith("tests/"))
    assert todo["memcheck"].environment == {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    module, tool, *arguments = todo["bench"].command[2:]
    assert (module, tool) == ("flexattn", "bench")
    args = command.make_parser().parse_args(arguments)
    assert args.out == tmp_path / "bench.json"
    assert args.budget_s < todo["bench"].seconds  # so that it ends by itself, and with a whole file


def test_memcheck_selects_every_kind_of_test_that_it_names(forked_python: Callable[..., Any]) -> None:
    [command] = (step.command for step in gpu_check.steps(Path()) if step.name == "memcheck")
    done = forked_python("-m", *command[command.index("pytest") :], "--collect-only")
    for name in ("everything_together", "bias_of_ragged", "wrong_cu_seqlens", "head_dims", "dropout", "grouped_heads", "thd"):
        assert name in done.stdout


def test_an_installed_package_has_no_tests_to_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    with pytest.raises(SystemExit):
        gpu_check.main([])
    assert "it runs the tests of a checkout" in capsys.readouterr().err


def test_steps_are_chosen_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(
        gpu_check, "steps", lambda out: [python("a", "print('a')"), python("b", "raise SystemExit(1)"), python("c", "print('c')")]
    )
    assert gpu_check.main(["c", "a"]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"c.log", "a.log", "summary.txt"}
    assert gpu_check.main([]) == 1
    assert "b          failed (1)" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        gpu_check.main(["d"])
