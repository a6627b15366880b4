"""`python -m flexattn demo` at a small size: its output, and its failure if a result is wrong."""

from __future__ import annotations

import re

import pytest
import torch

from flexattn.cli import demo
from tests.conftest import FreshPython

TOKENS = 300  # four or more documents of uneven lengths

# name | max error | RMS error | the same of plain torch | verdict
ROW = re.compile(r"^. (out|dq|dk|dv) +. +(\S+) . +(\S+) . +(\S+) . +(\S+) . +(\S+) .$", re.MULTILINE)


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_demo_checks_every_result_and_names_the_backends(where: str, forked_python: FreshPython) -> None:
    if where == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    environment = {"CUDA_VISIBLE_DEVICES": ""} if where == "cpu" else {}
    ran = forked_python("-m", "flexattn", "demo", "--tokens", str(TOKENS), env=environment)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stderr == ""
    backends = re.findall(r"^runs on: (\w+)(?: / \w+)? \(forward and backward\)$", ran.stdout, re.MULTILINE)
    # Without a GPU the Triton kernels are interpreted, after the batch that runs eagerly.
    ran_on = ("eager", "triton") if where == "cpu" else ("triton",)
    assert backends == [*ran_on]
    rows = ROW.findall(ran.stdout)
    assert [row[0] for row in rows] == ["out", "dq", "dk", "dv"] * len(ran_on)
    for name, largest, rms, *_, verdict in rows:
        assert 0 < float(rms) <= float(largest) < 1e-2, name  # between no error at all, which would be no check, and a wrong result
        assert verdict == "ok", name
    assert "padded, bshd, plain causal" in ran.stdout
    assert (" ms " in ran.stdout) == (where == "cuda"), "a CPU's times say nothing of the kernels"


def test_times_are_the_least_of_runs_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, ran = [0.0], []
    durations = {"a": iter([9.0, 5.0, 2.0, 7.0]), "b": iter([9.0, 1.0, 8.0, 3.0])}

    def run(name: str) -> None:
        ran.append(name)
        clock[0] += next(durations[name])

    monkeypatch.setattr(demo.time, "perf_counter", lambda: clock[0])
    assert demo.least_times([lambda: run("a"), lambda: run("b")], range(3)) == [2.0, 1.0]
    assert "".join(ran) == "aabb" + "ab" + "ab", "the first run of each, which may compile, is not timed"


@pytest.mark.sample
@pytest.mark.parametrize("wrong", [1e-2, float("nan")])
def test_a_wrong_gradient_fails(wrong: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = demo.forward_backward

    def forward_backward(*args: torch.Tensor, **call: object) -> demo.Results:
        results = right(*args, **call)
        return results._replace(dk=results.dk + wrong)

    monkeypatch.setattr(demo, "forward_backward", forward_backward)
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # the demo may set it; this restores it
    assert demo.run(TOKENS, "eager") == 1
    printed = capsys.readouterr().out
    assert [row[0] for row in ROW.findall(printed) if row[-1] == "FAILED"] == ["dk"]
    assert printed.splitlines()[-1].startswith("FAILED")


def test_a_backend_that_cannot_run_it_says_why(forked_python: FreshPython) -> None:
    ran = forked_python("-m", "flexattn", "demo", "--tokens", str(TOKENS), "--backend", "cudnn", env={"CUDA_VISIBLE_DEVICES": ""})
    assert ran.returncode == 1
    assert "cudnn:" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_documents_differ_in_length_and_fit() -> None:
    lengths = demo.make_batch(demo.SMALL._replace(tokens=TOKENS), "cpu").lengths
    assert sum(lengths) <= TOKENS
    assert len(lengths) >= 4
    assert len(set(lengths)) > 1
