"""docs/emulator.md shows its kernel's output, unchanged and with each of the page's edits, and lists every kind of finding."""

from __future__ import annotations

import re
import runpy
from itertools import pairwise
from pathlib import Path

import pytest

from flexattn import emulator
from tests.conftest import ROOT
from tests.emulator import test_attention as subjects
from tests.repository.test_docs import shape_of

PAGE = (ROOT / "docs" / "emulator.md").read_text("utf-8")
BLOCKS = re.findall(r"^```(python|diff|text)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
KERNEL = BLOCKS[0][1]
SHOWN = {edit: shown for (language, edit), (_, shown) in pairwise(BLOCKS) if language == "diff"}


def edited(text: str, diff: str) -> str:
    old, new = ("".join(line[1:] for line in diff.splitlines(keepends=True) if line[0] in kept) for kept in (" -", " +"))
    assert text.count(old) == 1
    return text.replace(old, new)


@pytest.mark.slow
@pytest.mark.parametrize("edit", ["", *SHOWN], ids=["as it is", *map(str, range(1, len(SHOWN) + 1))])
def test_output_is_as_shown(edit: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "double.py"
    script.write_text(edited(KERNEL, edit) if edit else KERNEL, "utf-8")
    runpy.run_path(str(script), run_name="__main__")
    printed = capsys.readouterr().out
    assert shape_of(SHOWN[edit] if edit else BLOCKS[1][1]) in shape_of(printed), printed


def test_the_page_edits_its_kernel() -> None:
    assert len(SHOWN) == 1


def test_page_states_the_number_of_injected_faults() -> None:
    text = " ".join(PAGE.split())
    injected = len(subjects.FORWARD_FAULTS) + len(subjects.BACKWARD_FAULTS)
    legal = len(subjects.BENIGN_FORWARD) + len(subjects.BENIGN_BACKWARD)
    assert f"injects {injected} faults" in text
    assert f"under each of {len(subjects.SEEDS)} seeds. It reports none of {legal} legal edits" in text


def test_every_kind_is_listed() -> None:
    listed = dict(re.findall(r"^\| `([a-z-]+)` +\| (.*) \|$", PAGE, re.MULTILINE))
    assert listed == emulator.BUGS | emulator.WARNINGS
