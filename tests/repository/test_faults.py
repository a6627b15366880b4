"""The list of faults of tests/faults.py: each can still be put in, and its page says what became of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import faults


@pytest.mark.parametrize("fault", faults.faults(), ids=lambda fault: f"{fault.file}: {fault.says}")
def test_fault_can_be_injected(fault: faults.Fault) -> None:
    assert (faults.ROOT / fault.file).read_text().count(fault.old) == 1
    assert fault.new != fault.old
    named = faults.test_files(fault.tests)
    assert named
    assert all((faults.ROOT / path).exists() for path in named)


def test_page_lists_every_fault() -> None:
    page = faults.PAGE.read_text()
    for fault in faults.faults():
        assert f"| `{fault.file}` | {fault.says} |" in page
    assert "not explained yet" not in page


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
