"""The frame of the benchmark programs: rows are written when they are measured, calls alternate, and the exit status is right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flexattn.bench import harness


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

    assert harness.in_turns("abc", 3, turn) == {"a": [1.0, 6.0, 8.0], "b": [2.0, 4.0, 9.0], "c": [3.0, 5.0, 7.0]}
    assert "".join(order) == "abcbcacab"
    assert harness.in_turns((), 3, turn) == {}


def test_quartiles_have_the_names_of_their_unit() -> None:
    assert harness.quartiles([1.0, 2.0, 3.0], "ms") == {"ms": 2.0, "ms_q1": 1.0, "ms_q3": 3.0}
