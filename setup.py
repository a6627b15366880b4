"""The README as a package index shows it, which pyproject.toml cannot say: its links lead to the repository at this version."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
PICTURES = (".png", ".svg")


def readme() -> str:
    """Returns README.md with every relative link made absolute: pages as the repository shows them, pictures as files."""
    repository = _only(r'^Repository = "(.*)"$', "pyproject.toml")
    tag = "v" + _only(r'^__version__ = "(.*)"$', "flexattn/__init__.py")

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link[1].endswith(PICTURES) else "blob"
        return f"]({repository}/{kind}/{tag}/{link[1]})"

    return re.sub(r"\]\((?![a-z]+:|#)([^)\s]+)\)", absolute, (ROOT / "README.md").read_text("utf-8"))


def _only(pattern: str, file: str) -> str:
    [found] = re.findall(pattern, (ROOT / file).read_text("utf-8"), re.MULTILINE)
    return str(found)


setup(long_description=readme(), long_description_content_type="text/markdown")
