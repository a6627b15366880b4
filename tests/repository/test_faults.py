"""The list of faults of tests/faults.py: each can be injected, and a test finds it unless a reason explains why none does."""

from __future__ import annotations

import ast
import json
import re
import textwrap
from pathlib import Path

import pytest

from tests import faults

FAULTS = faults.faults()


@pytest.mark.slow
@pytest.mark.parametrize("file", sorted({fault.file for fault in FAULTS}))
def test_faults_of_a_file_can_be_injected(file: str) -> None:
    source = (faults.ROOT / file).read_text()
    for fault in FAULTS:
        if fault.file == file:
            compile(faults.edit(source, fault), file, "exec", dont_inherit=True)
            assert dump(fault.old) != dump(fault.new), fault.says


def dump(fragment: str) -> str:
    return ast.dump(ast.parse(textwrap.dedent(fragment)))


def test_faults_name_tests_that_exist() -> None:
    for fault in FAULTS:
        named = faults.test_files(fault.tests)
        assert named, fault.says
        assert all((faults.ROOT / path).exists() for path in named), fault.says
        path, _, name = fault.found_by.partition("::")
        if name:
            function = name.partition("[")[0].partition(" ")[0].rpartition("::")[2]
            defined = rf"^ *(def {function}\(|{function} = )|^    {function},$"  # or made, or imported
            assert re.search(defined, (faults.ROOT / path).read_text("utf-8"), re.MULTILINE), fault.found_by


def test_each_fault_is_found_or_explained() -> None:
    for fault in FAULTS:
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
