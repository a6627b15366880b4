"""The frame of the benchmark programs: rows are written when they are measured, calls alternate, and the exit status is right."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch

from flexattn.bench import harness, measure
from flexattn.bench.measure import Samples


def test_a_run_writes_each_row_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "result.json"
    run = harness.Run("flexattn.bench.decode", "Decode.", out, ["--out", str(out)], peers={"a": "1"}, device="a device")
    run.add({"implementation": "a", "status": "measured"}, "one")
    content = json.loads(out.read_text())
    assert content["command"] == "python -m flexattn.bench.decode --out bench/results/result.json"
    assert (content["peers"], content["device"], content["rows"]) == ({"a": "1"}, "a device", run.rows)
    run.add({"implementation": "b", "status": "wrong"}, "two")
    assert len(json.loads(out.read_text())["rows"]) == 2
    assert capsys.readouterr().out == "one\ntwo\n"
    assert (run.status(), run.status("a"), run.status("b")) == (1, 0, 1)


def test_calls_alternate_and_change_places() -> None:
    order: list[str] = []

    def turn(name: str) -> list[float]:
        order.append(name)
        return [float(len(order))]

    assert measure.in_turns("abc", 3, turn) == {"a": [1.0, 6.0, 8.0], "b": [2.0, 4.0, 9.0], "c": [3.0, 5.0, 7.0]}
    assert "".join(order) == "abcbcacab"
    assert measure.in_turns((), 3, turn) == {}


def test_quartiles_have_the_names_of_their_unit() -> None:
    assert measure.quartiles([1.0, 2.0, 4.0], "ms") == {"ms": 2.0, "ms_q1": 1.5, "ms_q3": 3.0}


def test_a_program_measures_the_chosen_cases_and_names_them_in_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(case: int, options: argparse.Namespace) -> list[harness.Row]:
        return [{"us": case, "status": "wrong" if options.spoil else "measured"}]

    program = harness.Program(
        "flexattn.bench.decode",
        "Decode.",
        "cell",
        {"a 1": 1, "b 2": 2, "a 3": 3},
        measure,
        lambda row: f"{row['cell']}: {row['us']} us",
        add_options=lambda parser: parser.add_argument("--spoil", action="store_true"),
        facts=lambda: {"peers": {}},
    )
    assert program.run(["--list", "--only", "a*"]) == 0
    assert capsys.readouterr().out == "a 1\na 3\n"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        program.run([])
    assert "no CUDA device" in capsys.readouterr().err
    monkeypatch.setattr(harness, "need_gpu", lambda parser: None)
    monkeypatch.setattr(harness, "free_memory", lambda: None)
    out = tmp_path / "result.json"
    assert program.run(["--only", "b*", "a 1", "--out", str(out)]) == 0
    content = json.loads(out.read_text())
    assert content["rows"] == [{"cell": "b 2", "us": 2, "status": "measured"}, {"cell": "a 1", "us": 1, "status": "measured"}]
    assert content["peers"] == {}
    assert capsys.readouterr().out == "b 2: 2 us\na 1: 1 us\n"
    assert program.run(["--spoil"]) == 1


def test_times_have_the_unit_of_their_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "time_on_device", lambda calls, budget_ms: dict.fromkeys(calls, Samples([1.0, 2.0, 3.0], [])))
    assert harness.times({"a": int}, 1.0)["a"]["us"] == 2000.0
    assert harness.times({"a": int}, 1.0, "ms")["a"]["ms"] == 2.0
