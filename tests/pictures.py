"""Pictures of docs/cookbook.md and docs/distributed.md, each drawn by the example above it, and outputs of docs/first_steps.ipynb.

`python -m tests.pictures` writes them anew; tests/repository/test_pictures.py holds the files to the code.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import pyplot

ROOT = Path(__file__).parent.parent
COOKBOOK = ROOT / "docs" / "cookbook.md"
PAGES = COOKBOOK, ROOT / "docs" / "distributed.md"  # of the second not every example draws
NOTEBOOK = ROOT / "docs" / "first_steps.ipynb"
EXAMPLE = re.compile(r"^```python\n(?P<code>(?:(?!^```).*\n)*)^```\n\n!\[.+\]\((?P<picture>pictures/\w+\.png)\)$", re.MULTILINE)
DPI = 110


class Example(NamedTuple):
    code: str
    picture: Path


def examples() -> Iterator[Example]:
    for page in PAGES:
        for found in EXAMPLE.finditer(page.read_text("utf-8")):
            yield Example(found["code"], page.parent / found["picture"])


def draw(code: str) -> bytes:
    """Runs an example, and returns the PNG of the one figure that it makes."""
    _pictures()  # closes those of others
    exec(compile(code, "docs/cookbook.md", "exec"), {"__name__": "cookbook"})
    (picture,) = _pictures()
    return picture


def cells() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    return found


def run(notebook: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Runs the cells of code, one after the other, and yields the outputs of each as Jupyter would write them."""
    names: dict[str, Any] = {"__name__": "__main__"}
    code = [cell for cell in notebook if cell["cell_type"] == "code"]
    for count, cell in enumerate(code, 1):
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(tree, f"cell {count}", "exec"), names)
            value = None if last is None else eval(compile(ast.Expression(last.value), f"cell {count}", "eval"), names)
        outputs: list[dict[str, Any]] = []
        if printed.getvalue():
            outputs.append({"output_type": "stream", "name": "stdout", "text": printed.getvalue().splitlines(keepends=True)})
        for picture in _pictures():
            data = {"image/png": base64.b64encode(picture).decode()}
            outputs.append({"output_type": "display_data", "metadata": {}, "data": data})
        if value is not None:
            data = {"text/plain": repr(value).splitlines(keepends=True)}
            outputs.append({"output_type": "execute_result", "metadata": {}, "execution_count": count, "data": data})
        yield outputs


def _pictures() -> list[bytes]:
    """Returns the open figures as PNGs, the same for the same figure and matplotlib, and closes them."""
    found = []
    for number in pyplot.get_fignums():
        written = io.BytesIO()
        pyplot.figure(number).savefig(written, dpi=DPI, metadata={"Software": None})
        found.append(written.getvalue())
    pyplot.close("all")
    return found


def main() -> None:
    pyplot.switch_backend("agg")
    for code, picture in examples():
        picture.parent.mkdir(exist_ok=True)
        picture.write_bytes(draw(code))
    notebook = json.loads(NOTEBOOK.read_text("utf-8"))
    outputs = run(notebook["cells"])
    for count, cell in enumerate((cell for cell in notebook["cells"] if cell["cell_type"] == "code"), 1):
        cell |= {"execution_count": count, "metadata": {}, "outputs": next(outputs)}
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main()
