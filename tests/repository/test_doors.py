"""docs/migrate.md and docs/doors.md name every integration, and all named modules, pages and tests exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import ROOT

README = (ROOT / "README.md").read_text("utf-8")
DOORS = (ROOT / "docs" / "doors.md").read_text("utf-8")
MIGRATE = (ROOT / "docs" / "migrate.md").read_text("utf-8")
IMPORTS, OF_README = (re.findall(r"^\|[^|]*\| `((?:from|import) flexattn[^`]*)`", page, re.M) for page in (MIGRATE, README))
PLUGINS = set(re.findall(r"^\|[^|]*\| `--attention-backend \w+`, without an import \(`(flexattn[\w.]*)`\)", MIGRATE, re.M))
MODULES = [f"flexattn.{name}" for name in re.findall(r"^\| \[`([\w.]+)`\]", DOORS, re.M)]
ROWS = [line for line in DOORS.splitlines() if line.startswith("| [")]
HELPERS = {"arguments", "engines"}  # parts of doors


def source_of(module: str) -> Path:
    """Found without an import, because transformers and jax may not be installed."""
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


@pytest.mark.parametrize("line", dict.fromkeys([*IMPORTS, *OF_README]))
def test_what_a_page_says_to_write_can_be_imported(line: str) -> None:
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
    assert {re.findall(r"flexattn[\w.]*", line)[0] for line in IMPORTS} | PLUGINS == expected


def test_every_row_names_its_tests_and_every_test_of_a_door_is_named() -> None:
    assert len(ROWS) > len(MODULES)
    found = set()
    for row in ROWS:
        patterns = re.findall(r"`(tests/[\w/*]+\.py)`", row)
        assert patterns, row
        for pattern in patterns:
            assert list(ROOT.glob(pattern)), pattern
            found |= set(ROOT.glob(pattern))
    assert set((ROOT / "tests" / "integrations").glob("test_*.py")) <= found


class Row(NamedTuple):
    """A row of the table of integrations: its page, the served and unserved names, and the text of its code and tests."""

    module: str
    page: str
    served: list[str]
    not_served: list[str]
    code: str
    tests: list[str]


def row_of(line: str) -> Row:
    door, _, maps, does_not_map, shown_by = (cell.strip() for cell in line.strip("|").split(" | "))
    parts = re.match(r"\[`([\w.]+)(?:\(\))?`\]\(([^)#]+)", door)
    assert parts is not None
    module = parts[1] if parts[1] != "attention" else "nested"
    path = source_of(f"flexattn.{module}")
    files = sorted(path.parent.rglob("*.py")) if path.name == "__init__.py" else [path]
    tests = [file for pattern in re.findall(r"`(tests/[\w/*]+\.py)`", shown_by) for file in ROOT.glob(pattern)]
    served, not_served = (re.findall(r"`(\w{3,})(?:\(\))?`", re.sub(r"\]\([^)]*\)", "]", cell)) for cell in (maps, does_not_map))
    code, test_texts = "".join(file.read_text("utf-8") for file in files), [file.read_text("utf-8") for file in tests]
    return Row(module, (ROOT / "docs" / parts[2]).read_text("utf-8"), served, not_served, code, test_texts)


@pytest.mark.parametrize("line", ROWS, ids=lambda line: line.split("`")[1])
def test_a_row_says_what_its_code_and_tests_say(line: str) -> None:
    row = row_of(line)
    tests = "".join(row.tests)
    assert [name for name in row.served if name not in row.code or name not in tests] == []
    assert [name for name in row.not_served if name not in tests and name not in row.page] == []
    assert all(row.module.rpartition(".")[2] in text for text in row.tests)


def headings(page: Path) -> set[str]:
    """Anchors of a page's headings on the sites that show Markdown."""
    titles = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", ["README.md", "docs/doors.md", "docs/migrate.md"])
def test_every_link_leads_somewhere(name: str) -> None:
    page = ROOT / name
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")) if "://" not in link]
    assert len(links) > 10
    for link in links:
        path, _, anchor = link.partition("#")
        target = page.parent / path
        assert target.exists(), link
        assert not anchor or anchor in headings(target), link
