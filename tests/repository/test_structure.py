"""Structure of the code: what tests/structure.py counts, and what must stay as it is."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

from tests import structure


@functools.cache
@functools.cache
def modules() -> list[structure.Module]:
    return structure.modules(structure.ROOT)


@pytest.mark.slow
def test_no_files_import_each_other_in_a_circle() -> None:
    assert structure.circles(structure.imports(modules())) == []


def test_device_functions_take_few_arguments_by_name() -> None:
    functions = [function for module in modules() for function in structure.device_functions(module)]
    assert [x.name for x in functions if structure.parameters(x) > structure.MOST_PARAMETERS or any(structure.unpackings(x))] == []


def test_docstrings_name_their_subject() -> None:
    assert {module.name: found for module in modules() if (found := [*structure.unclear_docstrings(module)])} == {}


def test_comments_name_their_subject() -> None:
    of_code = [module for module in modules() if module.path.parts[0] != "tests"]
    assert {module.name: found for module in of_code if (found := [*structure.unclear_comments(module)])} == {}


def test_a_comment_without_its_subject_is_found() -> None:
    text = "x = 1  # of a call\n# of a call, further\ny = 2  # calls of x\n"
    module = structure.Module("m", Path("m.py"), text, ast.parse(text))
    assert [*structure.unclear_comments(module)] == ["x = 1  # of a call"]


def test_each_defect_is_counted(tmp_path: Path) -> None:
    """Faults are counted: a circle, a wide signature, a tuple that is taken apart by place, a kernel that imports a kernel."""
    for folder in structure.FOLDERS:
        (tmp_path / folder).mkdir()
    wide = "@kernel\ndef f(a, b, c, d, e, g, h, i, j):\n    _, _, x = a\n"
    (tmp_path / "kernels_triton" / "first.py").write_text(f"from flexattn.kernels_triton import second\n\n{wide}")
    others = '@triton.jit\ndef g(a):\n    x, y = a\n\n@hopper_kernel\ndef k(a):\n    """What it is."""\n'
    later = "def later():\n    import flexattn.kernels_triton.first\n"
    (tmp_path / "kernels_triton" / "second.py").write_text(f"{later}\n{others}")
    assert structure.measured(tmp_path) == {
        "lines": {"kernels_triton": 15},
        "largest kernel file": "kernels_triton/second.py, 10 lines",
        "largest signature of a device function": "f in kernels_triton/first.py, 9 parameters",
        "device functions with more than 8 parameters": 1,
        "files of kernels that import files of kernels": 2,
        "modules on the longest way of imports in kernels_triton": 2,
        "tuples taken apart by position in device functions": 1,
        "docstrings that do not name their subject": 1,
        "circles of imports": ["flexattn.kernels_triton.first <-> flexattn.kernels_triton.second"],
    }
