"""The device run without a device: the results of its steps, the result file, and the page that is made from it."""

from __future__ import annotations

import fnmatch
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from flexattn.bench import command
from tests.conftest import ROOT
from tests.device import __main__ as device_run
from tests.device import older, status, steps
from tests.fuzz import processes

RUN: dict[str, Any] = {
    "name": "device_some.json",
    "started": "2026-01-02T03:04:05+00:00",
    "complete": False,
    "device": {"name": "Some GPU"},
    "versions": {"torch": "2.11", "triton": "3.6"},
    "families": {"reached": ["portable forward"]},
    "steps": {
        "fuzz": {
            "compositions": 3000,
            "configurations": 20,
            "wrong": 1,
            "features": {"dropout: dropout": [3, 0], "mask: causal": [5, 1]},
        },
        "memcheck": {"not run": "compute-sanitizer is not there"},
    },
}


TESTS = {
    "passed": 7,
    "failed": 2,
    "skipped": 1,
    "not run": 3,
    "files": {"tests/a.py": {"passed": 7, "failed": 2}, "tests/b.py": {"not run": 3}, "tests/c.py": {"skipped": 1}},
}


def test_the_page_is_made_of_the_result_files() -> None:
    text = status.PAGE.read_text("utf-8")
    assert status.page(text, status.result_files()) == text, "python -m tests.device.status"


def test_cells_sum_the_runs_of_a_device() -> None:
    other = RUN | {"device": {"name": "Other GPU"}, "steps": {"tests": TESTS}}
    made = status.tables([RUN, RUN, other])
    for row in (
        "| fuzz | 6,000 compositions of 40 configurations, 2 wrong | not run |",
        "| tests | not run | 7 passed, 2 failed, 1 skipped, 3 not run |",
        "| memcheck | not run | not run |",
        "| portable backward | not run | not run |",
        "| portable forward | reached | reached |",
    ):
        assert row in made.splitlines(), row
    assert "ended before its time" in made


def test_without_a_run_nothing_has_run() -> None:
    made = status.tables([])
    assert "| fuzz | not run |" in made
    assert "random calls" not in made


def cells_of(made: str, feature: str) -> list[str]:
    [line] = [line for line in made.splitlines() if line.startswith(f"| {feature} |")]
    return [cell.strip() for cell in line.split("|")[2:-1]]


def test_features_have_the_calls_and_failures_of_their_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    on_h200 = RUN | {"device": {"name": "NVIDIA H200"}}
    made = status.tables([on_h200, on_h200, RUN])
    assert cells_of(made, "Dropout") == ["tests", "no run", "6 random calls", "-"]
    assert cells_of(made, "Causal masks") == ["tests", "measured", "10 random calls, 2 failed, measured", "-"]
    assert cells_of(made, "torch.export") == ["tests", "no run", "no run", "-"]
    assert cells_of(made, "flexattn.distributed") == ["tests", "-", "-", "2 H100, 4 H100, 2 H200, 4 H200"]
    wrong = {"status": "wrong", "implementation": "flexattn, batch_invariant"}
    content = {"device": {"name": "NVIDIA H200"}, "rows": [wrong, {"status": "measured", "implementation": "flexattn"}]}
    monkeypatch.setattr(status, "_content", lambda name: content)
    assert cells_of(status.tables([]), "batch_invariant") == ["tests", "no run", "no run", "-"]
    assert status._measured([("x.json", "flexattn")]) == {("NVIDIA H200", 1)}


def test_failed_calls_are_counted_by_their_error() -> None:
    whats = (["first call: dk, largest error: 2e-04, at most 1e-04"], ["flexattn.x.MiscompiledError: ptxas"], ["TypeError: y"])
    found = RUN["steps"]["fuzz"] | {"failures": [{"what": what} for what in (*whats, whats[1])]}
    made = status.tables([RUN | {"steps": {"fuzz": found}}])
    assert "| MiscompiledError | 2 |\n| larger error than allowed | 1 |\n| TypeError | 1 |" in made


@pytest.mark.slow
def test_the_evidence_of_each_feature_is_there() -> None:
    known = status.known_features()
    for name, feature in status.FEATURES.items():
        assert all("def test_" in (status.ROOT / path).read_text("utf-8") for path in feature.tests), name
        for pattern in feature.random:
            groups = {one.split(":")[0] for one in fnmatch.filter(known, pattern)}
            assert len(groups) == 1, f"{name}: {pattern}"
        for evidence in feature.measured:
            assert status._measured([evidence]), f"{name}: {evidence}"


@pytest.mark.parametrize(
    ("step", "nothing"),
    [
        ("tests", {"passed": 0, "failed": 0, "skipped": 4, "not run": 9}),
        ("tests", {"not run": "no test was found"}),
        ("fuzz", {"compositions": 0, "configurations": 0, "wrong": 0, "features": {}}),
        ("jax", {"compositions": 0, "wrong": 0, "features": {}, "ended": ["ImportError"]}),
        ("jax", {"not run": "jax is not there"}),
        ("memcheck", {"calls of attention": 0, "errors": 0, "wrong": 0, "processes": 14, "processes with a summary": 14}),
    ],
)
def test_a_step_that_made_no_call_has_not_run(step: str, nothing: dict[str, Any]) -> None:
    assert f"| {step} | not run |" in status.tables([RUN | {"steps": {step: nothing}}])


def test_a_memory_check_that_was_cut_off_says_so() -> None:
    found = {"calls of attention": 30, "errors": 0, "wrong": 2, "processes": 14, "processes with a summary": 12}
    made = status.tables([RUN | {"steps": {"memcheck": found}}])
    assert "| memcheck | 30 calls, 0 errors, 2 wrong; 2 of 14 processes ended without a summary |" in made


def test_each_file_of_gpu_tests_begins_before_another_goes_on() -> None:
    names = [f"{file}.py::test_{n}" for file in ("tests/a", "tests/gpu/b", "tests/gpu/c") for n in range(steps.CHUNK + 1)]
    chunks = steps.chunks_in_order(names)
    assert [chunk[0].split(".py")[0] for chunk in chunks] == [
        "tests/gpu/b",
        "tests/gpu/c",
        "tests/gpu/b",
        "tests/gpu/c",
        *["tests/a"] * 2,
    ]
    assert sorted(name for chunk in chunks for name in chunk) == sorted(names)


def test_large_tests_and_tests_of_jax_have_processes_of_their_own() -> None:
    files = (steps.LARGE, f"{steps.JAX}_caches.py", "tests/gpu/test_captures.py")
    names = [f"{file}::test_{n}" for file in files for n in range(80)]
    for count in (1, 2, 3, 8):
        shares = steps.shares(names, count)
        assert all(len({name.split("::")[0] for name in share}) == 1 for share in shares)
        assert sorted(name for share in shares for name in share) == sorted(names)
        assert len(shares) == max(3, count)
    assert len(steps.shares(names[80:160], 4)) == len(steps.shares(names[160:], 4)) == 4


def test_files_that_did_not_run_and_reasons_of_skips_are_told(tmp_path: Path) -> None:
    log = tmp_path / "tests0.jsonl"
    line = {"test": "tests/a.py::test_x", "outcome": "skipped", "seconds": 0.0, "text": "Skipped: needs 2 GPUs", "families": []}
    log.write_text(json.dumps(line) + "\n")
    found = steps._outcomes(["tests/a.py::test_x", "tests/b.py::test_y"], [log])
    assert found["skipped for"] == {"Skipped: needs 2 GPUs": 1}
    assert found["files"] == {"tests/a.py": {"skipped": 1}, "tests/b.py": {"not run": 1}}


FAKE = """
import json, sys, time
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
first, log = int(options["--first"]), open(options["--log"], "a")
for n in range(first, first + 3):
    if n > 14:
        sys.exit(0)
    print(json.dumps({"begins": f"{n}.0"}), file=log, flush=True)
    if n == 11:
        sys.exit(3)
    if n == 13:
        time.sleep(60)
    event = {"name": f"{n}.0", "has": ["a: x", "b: y"], "dims": [8, 16], "kept": 1, "families": ["f"], "kernels": {"k": 1}}
    event["seconds"] = 0.5
    event["wrong"] = ["off"] if n == 12 else []
    print(json.dumps(event), file=log, flush=True)
"""


def test_a_process_that_crashes_or_hangs_is_started_again_behind_its_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "LEAST", 0.0)
    found, _ = processes.run_all([processes.Job([sys.executable, "-c", FAKE], 10)], tmp_path, 40.0, grace=1.0)
    assert [name for name, _ in found.failures] == ["11.0", "12.0", "13.0"]
    assert found.failures[0][1][0] == "ended with status 3"
    assert found.failures[2][1][0] == "hung"
    assert found.calls == 3  # of configurations 10, 12 and 14
    summary = found.summary()
    assert summary["pairs of features"] == "1 of 1"
    assert summary["features"] == {"a: x": [3, 1], "b: y": [3, 1]}
    assert summary["kernels compiled or loaded"] == {"k": 3}
    assert 8 not in summary["head dims missing"]
    assert summary["seconds for a composition"] == {"that compiled": 0.5, "other": 0.0}


def test_a_run_writes_what_each_step_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "device.json"
    kept: list[dict[str, Any]] = []

    def step(run: steps.Run, tell: steps.Tell) -> dict[str, Any]:
        tell({"compositions": 1, "wrong": 0, "families": {"portable forward": 1}})
        kept.append(json.loads(out.read_text()))
        assert 0 < run.seconds < 48
        return {"compositions": 2, "wrong": 1, "families": {"portable forward": 2}}

    monkeypatch.setattr(steps, "fuzz", step)
    monkeypatch.setattr(steps, "jax", step)
    monkeypatch.setattr(sys, "argv", ["device", "--out", str(out), "--minutes", "1", "--only", "fuzz", "jax"])
    assert device_run.main() == 1
    assert (kept[0]["complete"], kept[0]["steps"]["fuzz"]["compositions"]) == (False, 1)
    assert kept[1]["steps"]["fuzz"]["compositions"] == 2
    content = json.loads(out.read_text())
    assert content["complete"]
    assert content["families"]["reached"] == ["portable forward"]
    assert "portable backward" in content["families"]["not reached"]
    assert "sm_100 forward" in content["families"]["for other devices"]  # no GPU of 10.0 runs the tests


def test_the_tests_that_a_run_makes_are_there() -> None:
    assert all((status.ROOT / name).exists() for name in (*steps.TESTS, steps.LARGE))


def test_a_run_of_an_older_target_is_three_programs_in_their_shares(tmp_path: Path) -> None:
    made = older.commands("sm_89", 300.0, tmp_path, "h200", 14)
    assert [command[2] for command in made.values()] == ["tests.device", "tests.device", "flexattn"]
    assert (ROOT / older.TESTS).is_file()
    assert made["tests"][-1] == str(tmp_path / "device_mma_sm_89_tests.json")
    assert made["bench"][-1] == str(tmp_path / "mma_sm_89_h200.json")
    for name in ("tests", "calls"):
        sys_argv = [device_run.__file__, *made[name][3:]]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", sys_argv)
            options = device_run.parse()
        assert (options.target, options.processes) == ("sm_89", 14)
        assert abs(options.minutes * 60 - older.SHARES[name] * 300) < 1
    args = command.make_parser().parse_args(made["bench"][4:])
    assert (args.preset, args.target, args.mma_tiles) == ("older", "sm_89", True)
    assert sum(older.SHARES.values()) == 1


def test_a_program_that_does_not_end_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert (
        older.run([sys.executable, "-c", "print('begun', flush=True); import time; time.sleep(60)"], log, 3.0) == "killed after 3 s"
    )
    assert log.read_text() == "begun\n"
    assert older.run([sys.executable, "-c", "raise SystemExit(4)"], log, 30.0) == "status 4"
