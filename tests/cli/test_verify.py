"""`python -m flexattn verify`: its checks find wrong kernels, its report names them, and its exit status says so."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flexattn.cli import verify
from flexattn.cli.verify import CASES, SMALL_CASES, Case, Outcome, Time

CPU_CASES = tuple(case for case in CASES if case.name != "FP8")


def test_without_a_gpu_it_says_so_and_checks_the_interpreter(
    tmp_path: Path, forked_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    done = forked_python("-m", "flexattn", "verify", "--out", str(tmp_path / "report.md"), env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr
    assert "no GPU. Only Triton's interpreter was checked" in done.stdout
    assert f"{len(SMALL_CASES)} of {len(SMALL_CASES)} checks are right." in done.stdout
    assert done.stdout == (tmp_path / "report.md").read_text("utf-8")


def test_a_target_that_does_not_exist_is_refused(forked_python: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = forked_python("-m", "flexattn", "verify", "--as", "sm_70")
    assert done.returncode == 2
    assert "accepted: sm_80, sm_86, sm_89, sm_120" in done.stderr


@pytest.mark.sample
@pytest.mark.parametrize("case", CPU_CASES, ids=lambda case: case.name)
def test_each_case_is_a_call_that_the_reference_takes(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    small = case._replace(keys=min(case.keys, 700), batch=min(case.batch, 1))
    results = verify._results(small.tensors("cpu"), {**small.options("cpu"), "backend": "eager"})
    assert set(results) >= ({"out", "dq", "dk", "dv"} if case.has_gradient else {"out"})


@pytest.mark.skipif(torch.cuda.is_available(), reason="the small cases are for machines without a GPU")
@pytest.mark.parametrize("wrong", ["out", "dq", "dv", "nothing"])
def test_a_wrong_result_is_found(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = verify._results

    def results(leaves: Any, options: dict[str, Any]) -> dict[str, torch.Tensor]:
        found = plain(leaves, {**options, "backend": "eager"})
        if options["backend"] == "triton" and wrong in found:
            found[wrong] = found[wrong] + 0.5
        return found

    monkeypatch.setattr(verify, "_results", results)
    failure = verify.check(SMALL_CASES[0])
    assert (failure is None) == (wrong == "nothing")
    assert failure is None or failure.startswith(f"{wrong}: ")


def test_a_case_without_an_outcome_has_failed() -> None:
    def said(event: str, outcome: Outcome) -> str:
        return json.dumps({"event": event, **outcome._asdict()})

    lines = [
        said(verify.STARTED, Outcome("a", "portable")),
        said(verify.ENDED, Outcome("a", "portable", None, 1.0)),
        "a warning",
        said(verify.STARTED, Outcome("b", "portable")),
    ]
    found = list(verify._read("\n".join(lines), ["a", "b", "c"], "it died"))
    assert found == [
        Outcome("a", "portable", None, 1.0),
        Outcome("b", "portable", "it died"),
        Outcome("c", "not reached", "it died"),
    ]


def test_the_report_has_failures_and_ratios() -> None:
    outcomes = [Outcome("a", "portable"), Outcome("b", "sm_90", "out: max error 1")]
    text = verify.report(outcomes, [Time("causal", 1.0, 4.0, 2.0, None)])
    assert "1 of 2 checks are right. FAILURES are below." in text
    assert "| b | sm_90 | FAILED |" in text
    assert "- b (sm_90): out: max error 1" in text
    assert "| causal | 1.000 / 4.000 | 2.000 / - | 2.00 / - |" in text


@pytest.mark.parametrize("failure", [None, "wrong"])
def test_the_exit_status_is_1_if_a_check_failed(
    failure: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verify, "_outcomes", lambda stop: [Outcome("a", "portable", failure)])
    monkeypatch.setattr(verify, "_times", lambda stop: [])
    assert verify.main([]) == (0 if failure is None else 1)
    assert "### flexattn verify" in capsys.readouterr().out


def test_each_family_is_checked_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """FLEXATTN_HOPPER's values reach the families; a check that raises is a failure, and the others go on."""
    import os

    families = {"auto": "sm_90", "always": "sm_90", "never": "portable"}
    monkeypatch.setenv("FLEXATTN_HOPPER", "auto")
    monkeypatch.setattr(verify, "_kernels_of", lambda case: families[os.environ["FLEXATTN_HOPPER"]])

    def check(case: Case) -> str | None:
        if case is SMALL_CASES[0] and os.environ["FLEXATTN_HOPPER"] == "never":
            raise RuntimeError("no room")
        return None

    monkeypatch.setattr(verify, "check", check)
    monkeypatch.setattr(verify, "_cases", lambda: SMALL_CASES[:2])
    assert verify._run_part(0, 1) == 0
    found = list(verify._read(capsys.readouterr().out, [case.name for case in SMALL_CASES[:2]], "it died"))
    first, second = SMALL_CASES[0].name, SMALL_CASES[1].name
    assert [(x.name, x.kernels, x.failure) for x in found] == [
        (first, "sm_90", None),
        (first, "portable", "RuntimeError: no room"),
        (second, "sm_90", None),
        (second, "portable", None),
    ]
