"""The README is short, and each of its commands makes an environment of its own."""

from __future__ import annotations

import re

from tests.conftest import ROOT

README = (ROOT / "README.md").read_text("utf-8")
MOST_LINES = 95  # but for the part that is made of results


def test_each_command_makes_its_environment() -> None:
    commands = re.findall(r"^python3 -m venv .*$", README, re.M)
    assert [command.rpartition(" -m ")[2].split()[0] for command in commands] == ["flexattn", "pytest"]
    assert all(".venv/bin/pip install -c constraints.txt" in command for command in commands)


def test_it_is_short() -> None:
    written = re.sub(r"^<!-- made by .*?^<!-- end -->$", "", README, flags=re.MULTILINE | re.DOTALL)
    assert len(written.splitlines()) <= MOST_LINES
