"""docs/emulator.md shows what its kernel prints, as it is and with each of the page's edits, and lists every kind of finding."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
from conftest import ROOT, FreshPython
from test_docs import shape_of

from flexattn import emulator

PAGE = (ROOT / "docs" / "emulator.md").read_text("utf-8")
BLOCKS = re.findall(r"^```(python|diff|text)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
KERNEL = BLOCKS[0][1]
SHOWN = {edit: shown for (language, edit), (_, shown) in pairwise(BLOCKS) if language == "diff"}


def edited(text: str, diff: str) -> str:
    old, new = ("".join(line[1:] for line in diff.splitlines(keepends=True) if line[0] in kept) for kept in (" -", " +"))
    assert text.count(old) == 1
    return text.replace(old, new)


@pytest.mark.parametrize("edit", ["", *SHOWN], ids=["as it is", *map(str, range(1, len(SHOWN) + 1))])
def test_output_is_as_shown(edit: str, fresh_python: FreshPython, tmp_path: Path) -> None:
    script = tmp_path / "double.py"
    script.write_text(edited(KERNEL, edit) if edit else KERNEL, "utf-8")
    ran = fresh_python(str(script), env={"OPENBLAS_NUM_THREADS": "1"})
    assert ran.returncode == 0, ran.stderr
    shown = SHOWN[edit] if edit else BLOCKS[1][1]
    assert shape_of(shown) in shape_of(ran.stdout), ran.stdout


def test_the_page_edits_its_kernel_twice() -> None:
    assert len(SHOWN) == 2


def test_every_kind_is_listed() -> None:
    listed = dict(re.findall(r"^\| `([a-z-]+)` +\| (.*) \|$", PAGE, re.MULTILINE))
    assert listed == emulator.BUGS | emulator.WARNINGS
