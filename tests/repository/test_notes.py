"""Lab notes: links from and to them are valid. The site has no lab notes, so mkdocs does not check these links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.repository.test_doors import headings

OWN = [
    *sorted(ROOT.glob("notes/*.md")),
    ROOT / "docs" / "performance.md",
    ROOT / "docs" / "status.md",
    ROOT / "bench" / "README.md",
]


def links_of(page: Path) -> list[tuple[Path, str]]:
    """Returns the file and the anchor of each relative link."""
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")) if "://" not in link]
    return [(page.parent / path if path else page, anchor) for path, _, anchor in (link.partition("#") for link in links)]


@pytest.mark.parametrize("page", OWN, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target, anchor in links_of(page):
        assert target.exists(), target
        assert not anchor or anchor in headings(target), f"{target}#{anchor}"


def test_links_of_pages_to_lab_notes_lead_somewhere() -> None:
    links = {link for page in (ROOT / "docs").glob("*.md") for link in links_of(page) if link[0].parent.name == "notes"}
    assert links
    assert [link for link in links if not link[0].exists() or (link[1] and link[1] not in headings(link[0]))] == []
