"""Every example in the documentation runs, and prints the text that the page shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.conftest import ROOT, FreshPython

PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")} - {ROOT / "docs" / "cookbook.md"})  # test_pictures.py runs it
COMMAND = "$ python -m flexattn "

BY_DEFAULT = ("README.md",)  # the other pages' examples are slow: each is a process, and some compile

BLOCKS = [
    pytest.param(
        language,
        text,
        id=f"{page.name}-{language}-{number}",
        marks=[] if page.name in BY_DEFAULT else [pytest.mark.slow],
    )
    for page in PAGES
    for number, (language, text) in enumerate(re.findall(r"^```(python|console)\n(.*?)^```$", page.read_text("utf-8"), re.M | re.S))
]


def shape_of(output: str) -> str:
    """The text without its variable parts: numbers, and the spaces and rules that follow their widths."""
    words = re.sub(r"[-+]?\d[\d.,]*(e[-+]?\d+)?", "#", output.strip())
    return "\n".join(re.sub(r"[ ─━]+", " ", line).strip() for line in words.splitlines())


def printed_as_shown(printed: str, shown: str) -> bool:
    """Compares the output with the page's text, in which a line of `...` matches any lines."""
    parts = shape_of(shown).split("\n...\n")
    return re.fullmatch("\n(?s:.*)\n".join(map(re.escape, parts)), shape_of(printed)) is not None


@pytest.mark.parametrize(("language", "text"), BLOCKS)
def test_example_runs(language: str, text: str, forked_python: FreshPython, tmp_path: Path) -> None:
    environment = {"CUDA_VISIBLE_DEVICES": ""}  # pages show the output of a machine without a GPU
    if language == "python":
        script = tmp_path / "example.py"  # a kernel's source must be in a file
        script.write_text(text, "utf-8")
        ran = forked_python(str(script), env=environment)
        assert ran.returncode == 0, ran.stderr
        return
    command, _, expected = text.partition("\n")
    if not command.startswith(COMMAND):
        pytest.skip(f"not a command of flexattn: {command}")
    ran = forked_python("-m", "flexattn", *shlex.split(command.removeprefix(COMMAND)), env=environment)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert printed_as_shown(ran.stdout, expected), ran.stdout


def test_a_page_that_shows_something_else_fails() -> None:
    printed = "2 documents\n│ dq │ 1.2e-06 │ ok │\ndone\n"
    assert printed_as_shown(printed, "11 documents\n...\ndone\n")
    assert printed_as_shown(printed, "2 documents\n│ dq │     9 │ ok │\ndone\n")
    assert not printed_as_shown(printed, "2 documents\n│ dq │ 1.2e-06 │ FAILED │\ndone\n")
    assert not printed_as_shown(printed, "2 documents\n...\n│ dk │ 1.2e-06 │ ok │\ndone\n")


def test_there_are_examples() -> None:
    languages = [block.values[0] for block in BLOCKS]
    assert "python" in languages
    assert "console" in languages


def test_reading_order_of_kernels_names_files_that_exist() -> None:
    page = (ROOT / "docs" / "kernels.md").read_text("utf-8")
    listed = re.findall(r"^\| `([a-z0-9_/]+\.py)` ", page, re.MULTILINE)
    assert len(listed) >= 10
    assert [name for name in listed if not (ROOT / "kernels_triton" / name).is_file()] == []
