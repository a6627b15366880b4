"""The README is short, claims the speed of its results, and each of its commands makes an environment of its own."""

from __future__ import annotations

import re

from tests.conftest import ROOT

README = (ROOT / "README.md").read_text("utf-8")
CLAIM = re.compile(r"faster than the fastest of (\d+) other implementations in (\d+) of (\d+)")
MOST_LINES = 95  # except for the part that is made of results


def test_each_command_makes_its_environment() -> None:
    commands = re.findall(r"^python3 -m venv .*$", README, re.M)
    assert [command.rpartition(" -m ")[2].split()[0] for command in commands] == ["flexattn", "pytest"]
    assert all(".venv/bin/pip install -c constraints.txt" in command for command in commands)


def test_it_is_short() -> None:
    written = re.sub(r"^<!-- made by .*?^<!-- end -->$", "", README, flags=re.MULTILINE | re.DOTALL)
    assert len(written.splitlines()) <= MOST_LINES


def test_the_claim_at_the_top_is_that_of_the_results() -> None:
    top, made = CLAIM.findall(README)
    assert top == made
