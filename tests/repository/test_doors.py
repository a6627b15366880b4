"""The README's table of other libraries and docs/doors.md name every door, and only what is there: modules, pages, tests."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.conftest import ROOT

README = (ROOT / "README.md").read_text("utf-8")
DOORS = (ROOT / "docs" / "doors.md").read_text("utf-8")
IMPORTS = re.findall(r"^\|[^|]*\| `((?:from|import) flexattn[^`]*)`", README, re.M)
MODULES = [f"flexattn.{name}" for name in re.findall(r"^\| \[`([\w.]+)`\]", DOORS, re.M)]
HELPERS = {"flex_maxima"}  # part of flex, not a door


def source_of(module: str) -> Path:
    """Found without importing it, as transformers and jax may not be installed."""
    path = ROOT.joinpath(*module.split("."))
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    assert source.is_file(), module
    return source


def defined_in(module: str) -> set[str]:
    """Names that a module defines or imports, read from its source."""
    found: set[str] = set()
    for node in ast.parse(source_of(module).read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
    return found


@pytest.mark.parametrize("line", IMPORTS)
def test_what_the_readme_says_to_write_can_be_imported(line: str) -> None:
    [node] = ast.parse(line).body
    if isinstance(node, ast.ImportFrom):
        assert node.module is not None
        assert {alias.name for alias in node.names} <= defined_in(node.module)
    else:
        assert isinstance(node, ast.Import)
        source_of(node.names[0].name)


def test_every_door_is_in_both_tables() -> None:
    folder = ROOT / "flexattn" / "integrations"
    doors = {path.stem for path in folder.glob("[!_]*.py")} | {path.parent.name for path in folder.glob("*/__init__.py")}
    expected = {f"flexattn.integrations.{name}" for name in doors - HELPERS} | {"flexattn.nn", "flexattn.jax", "flexattn.jax.te"}
    assert set(MODULES) == expected
    assert {re.findall(r"flexattn[\w.]*", line)[0] for line in IMPORTS} == expected


def test_every_row_names_its_tests_and_every_test_of_a_door_is_named() -> None:
    rows = [line for line in DOORS.splitlines() if line.startswith("| [")]
    assert len(rows) > len(MODULES)
    found = set()
    for row in rows:
        patterns = re.findall(r"`(tests/[\w/*]+\.py)`", row)
        assert patterns, row
        for pattern in patterns:
            assert list(ROOT.glob(pattern)), pattern
            found |= set(ROOT.glob(pattern))
    assert set((ROOT / "tests" / "integrations").glob("test_*.py")) <= found


def headings(page: Path) -> set[str]:
    """Anchors that a page's headings get on the sites that show Markdown."""
    titles = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "docs" / "doors.md"], ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")) if "://" not in link]
    assert len(links) > 10
    for link in links:
        path, _, anchor = link.partition("#")
        target = page.parent / path
        assert target.exists(), link
        assert not anchor or anchor in headings(target), link
