"""Hooks of mkdocs: the site's files lie as the repository's do, so that every relative link of a page holds on the site too.

Pages are the Markdown files that the navigation names; those under reference/ are made here, one for each public module, and that
of a notebook of its cells. What else a page links to (result files, sources) is copied, so that a link to what is not there fails
`mkdocs build --strict`. Links to lab notes become their names.
"""

from __future__ import annotations

import ast
import json
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"\]\(([^)\s#:]+)(?:#[^)\s]*)?\)")
STYLE = "docs/site.css"
FIRST = ("attention", "packed", "explain", "explaining", "warmup", "attention_backend")
NOTES = re.compile(r"\[([^\]]+)\]\((?:\.\./)?(notes/\w+\.md)(?:#[\w-]+)?\)")
NOTEBOOK = re.compile(r"(\]\([^)\s#:]+)\.ipynb(?=[)#])")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Returns the theme's files, the pages, and what they link to."""
    found = [file for file in files if file.src_dir is None or Path(file.src_dir) != ROOT / "docs"]
    pages = list(_pages(config.nav))
    for page in pages:
        if page.startswith("reference/"):
            text = _reference(page.removeprefix("reference/").removesuffix(".md"))
            found.append(File.generated(config, page, content=text))
        elif (source := ROOT / page).with_suffix(".ipynb").is_file():
            found.append(File.generated(config, page, content=_notebook(source.with_suffix(".ipynb"))))
    # Pages that the navigation lacks are there too: that they are left out of it is then an error.
    written = {page for page in pages if (ROOT / page).is_file()} | {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}
    linked = {target for page in written for target in _linked(page)} - written
    linked |= {STYLE, *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.ipynb"))}
    for path in sorted(written | linked):
        level = InclusionLevel.NOT_IN_NAV if path in linked else InclusionLevel.UNDEFINED
        found.append(File(path, str(ROOT), config.site_dir, config.use_directory_urls, inclusion=level))
    return Files(found)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Returns a page whose links to notebooks lead to their pages, and which names lab notes, as the site does not have them.

    The page of a notebook keeps its link to the file.
    """
    if not (ROOT / page.file.src_uri).with_suffix(".ipynb").is_file():
        markdown = NOTEBOOK.sub(r"\1.md", markdown)
    return NOTES.sub(r"\1, `\2` in the repository", markdown)


def _pages(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [page for part in (nav.values() if isinstance(nav, dict) else nav) for page in _pages(part)]


def _linked(page: str) -> set[str]:
    """Returns the files of the repository that a page links to, but for other pages of Markdown."""
    text = FENCE.sub("", (ROOT / page).read_text("utf-8"))
    targets = {os.path.normpath(Path(page).parent / target) for target in LINK.findall(text)}
    return {target for target in targets if not target.endswith(".md") and (ROOT / target).is_file()}


def _notebook(path: Path) -> str:
    """Returns a notebook as a page: its text, its code and the outputs that it was saved with."""
    parts = []
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {"text/plain": output.get("text", [])})
            if "image/png" in data:
                parts.append(f"![What the cell draws](data:image/png;base64,{data['image/png']})")
            else:
                parts.append(f"```text\n{''.join(data['text/plain']).rstrip()}\n```")
    title, _, rest = "\n\n".join(parts).partition("\n")
    return f"{title}\n\nThis page is [a notebook]({path.name}).\n{rest}\n"


def _reference(module: str) -> str:
    options = ["show_root_heading: false", "show_root_toc_entry: false"]
    if module == "flexattn":  # the functions of a call first, not in the order of `__all__`, which is alphabetical
        options += ["group_by_category: false", f"members: {[*FIRST, *sorted({*_public_names(module)} - {*FIRST})]}"]
    lines = [f"# {module}", "", f"::: {module}", "    options:", *(f"      {option}" for option in options)]
    return "\n".join(lines) + "\n"


def _public_names(module: str) -> list[str]:
    """Returns the `__all__` of a module, which is not imported."""
    tree = ast.parse((ROOT / module / "__init__.py").read_text("utf-8"))
    assigned = (node for node in tree.body if isinstance(node, ast.Assign))
    return next(ast.literal_eval(node.value) for node in assigned if ast.unparse(node.targets[0]) == "__all__")
