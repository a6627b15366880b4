"""The README's figures of a model are those of their result file, and its commands those of CI."""

from __future__ import annotations

import json
import re

from tests.conftest import ROOT

README = (ROOT / "README.md").read_text("utf-8")
MODELS = json.loads((ROOT / "bench" / "results" / "transformers_h200.json").read_text("utf-8"))
MOST_LINES = 120


def test_figures_of_a_packed_llama_are_those_of_the_file() -> None:
    title, columns, text = re.findall(
        r"^(A training step .*:)\n\n\| packed Llama step \|(.*)\|\n\|[-:| ]+\|\n((?:\|.*\n)+)", README, re.M
    )[0]
    assert MODELS["device"]["name"] in title
    assert f"{MODELS['tokens']:,} tokens" in title
    packed = {"model": "llama", "batch": "packed", "status": "measured"}
    measured = {row["implementation"]: row for row in MODELS["rows"] if packed.items() <= row.items()}
    implementations = [column.strip().lower() for column in columns.split("|")]
    assert implementations == sorted(measured, key=list(measured).index)
    shown = {label: cells.split("|") for label, cells in re.findall(r"^\| (.*?) \|(.*)\|$", text, re.M)}
    for label, key in (("time, ms", "ms"), ("peak memory, GiB", "peak_gib")):
        assert [cell.strip() for cell in shown.pop(label)] == [f"{measured[name][key]:.1f}" for name in implementations]
    assert not shown


def test_each_command_makes_its_environment() -> None:
    commands = re.findall(r"^python3 -m venv .*$", README, re.M)
    assert [command.rpartition(" -m ")[2].split()[0] for command in commands] == ["flexattn", "pytest"]
    assert all(".venv/bin/pip install -c constraints.txt" in command for command in commands)


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= MOST_LINES
