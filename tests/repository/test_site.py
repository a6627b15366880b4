"""The site's navigation: every page is in it, and every public module has a reference page. Only CI builds the site."""

from __future__ import annotations

import re
from pathlib import Path

from tests.conftest import ROOT

NAVIGATION = re.findall(r"^ +- .*?: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2], re.MULTILINE)
PUBLIC = (
    *(
        "flexattn",
        "flexattn.distributed",
        "flexattn.fp8",
        "flexattn.jax",
        "flexattn.jax.fp8",
        "flexattn.jax.te",
        "flexattn.mods",
        "flexattn.nn",
    ),
    "flexattn.testing",
)
INNER = ("flexattn.integrations.arguments", "flexattn.integrations.engines")  # parts of others


def test_navigation_names_every_page_once(tracked_files: list[Path]) -> None:
    folders = [path for path in tracked_files if path.parts[0] in ("docs", "bench")]
    pages = {path.with_suffix(".md").as_posix() for path in folders if path.suffix in (".md", ".ipynb")}
    written = [page for page in NAVIGATION if not page.startswith("reference/")]
    assert sorted(written) == sorted(pages | {"README.md", "CONTRIBUTING.md", "CHANGELOG.md"})


def test_reference_has_every_public_module(tracked_files: list[Path]) -> None:
    folder = Path("flexattn/integrations")
    names = [path.relative_to(folder).parts[0].removesuffix(".py") for path in tracked_files if folder in path.parents]
    integrations = {f"flexattn.integrations.{name}" for name in names if name != "__init__"} - {*INNER}
    listed = [page.removeprefix("reference/").removesuffix(".md") for page in NAVIGATION if page.startswith("reference/")]
    assert sorted(listed) == sorted({*PUBLIC, *integrations})
