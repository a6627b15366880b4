"""The list of faults of tests/faults.py: each can be injected, and a test finds it unless a reason explains why none does."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from tests import faults


@pytest.mark.parametrize("fault", faults.faults(), ids=lambda fault: f"{fault.file}: {fault.says}")
def test_fault_can_be_injected(fault: faults.Fault) -> None:
    source = (faults.ROOT / fault.file).read_text()
    edited = faults.edit(source, fault)
    assert ast.dump(ast.parse(edited)) != ast.dump(ast.parse(source))
    named = faults.test_files(fault.tests)
    assert named
    assert all((faults.ROOT / path).exists() for path in named)


def test_each_fault_is_found_or_explained() -> None:
    for fault in faults.faults():
        assert bool(fault.found_by) != bool(fault.survives_because), fault.says


def test_record_keeps_the_faults_that_were_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "LIST", tmp_path / "faults.json")
    entries = [{"says": says, "file": "a.py", "old": "1", "new": "2", "tests": ["tests/a.py"]} for says in "abc"]
    faults.LIST.write_text(json.dumps([*entries[:2], {**entries[2], "found_by": "tests/a.py::test_old"}]))
    first, second, _ = faults.faults()
    faults.record([faults.Outcome(first, "tests/a.py::test_new"), faults.Outcome(second, "")])
    assert [fault.found_by for fault in faults.faults()] == ["tests/a.py::test_new", "", "tests/a.py::test_old"]


def test_injected_fault_is_found(tmp_path: Path) -> None:
    (tmp_path / "answer.py").write_text("def answer() -> int:\n    return 42\n")
    (tmp_path / "test_answer.py").write_text(
        "from answer import answer\n\n\ndef test_answer() -> None:\n    assert answer() == 42\n"
    )
    fault = faults.Fault("another answer", "answer.py", "return 42", "return 41", ["test_answer.py"])
    assert faults.first_failure(tmp_path, fault.tests) == ""
    with faults.injected(tmp_path, fault):
        assert faults.first_failure(tmp_path, fault.tests) == "test_answer.py::test_answer"
    assert (tmp_path / "answer.py").read_text().endswith("return 42\n")
