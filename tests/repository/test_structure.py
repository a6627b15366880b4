"""Structure of the code: the counts of tests/structure.py, and the rules that must hold."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

from tests import structure


@functools.cache
def modules() -> list[structure.Module]:
    return structure.modules(structure.ROOT)


@pytest.mark.slow
def test_no_files_import_each_other_in_a_circle() -> None:
    assert structure.circles(structure.imports(modules())) == []


@pytest.mark.slow
def test_device_functions_take_few_arguments_by_name() -> None:
    functions = [function for module in modules() for function in structure.device_functions(module)]
    assert [x.name for x in functions if structure.parameters(x) > structure.MOST_PARAMETERS or any(structure.unpackings(x))] == []


@pytest.mark.slow
def test_docstrings_name_their_subject() -> None:
    assert {module.name: found for module in modules() if (found := [*structure.unclear_docstrings(module)])} == {}


def test_comments_name_their_subject() -> None:
    code_modules = [module for module in structure.modules(structure.ROOT, "  # of ") if module.path.parts[0] != "tests"]
    assert {module.name: found for module in code_modules if (found := [*structure.unclear_comments(module)])} == {}


def test_a_comment_without_its_subject_is_found() -> None:
    text = "x = 1  # of a call\n# of a call, further\ny = 2  # calls of x\n"
    module = structure.Module("m", Path("m.py"), text, ast.parse(text))
    assert [*structure.unclear_comments(module)] == ["x = 1  # of a call"]


def test_each_defect_is_counted(tmp_path: Path) -> None:
    """Defects are counted: a circle, a wide signature, a tuple that is unpacked by position, a kernel that imports a kernel."""
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


def _stores_into_stars(function: ast.FunctionDef) -> list[str]:
    """Returns the names, in a function, of values that a star collected, or of parts of them, whose items are then written."""
    starred: set[str] = set()
    found = []
    for node in sorted(ast.walk(function), key=lambda node: getattr(node, "lineno", 0)):
        if isinstance(node, ast.Assign):
            targets = [t for target in node.targets for t in (target.elts if isinstance(target, ast.Tuple) else [target])]
            values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value] * len(targets)
            starred |= {t.value.id for t in targets if isinstance(t, ast.Starred) and isinstance(t.value, ast.Name)}
            for target, value in zip(targets, values, strict=False):
                is_part = isinstance(value, ast.Subscript) and isinstance(value.value, ast.Name) and value.value.id in starred
                starred |= {target.id} if is_part and isinstance(target, ast.Name) else set()
            found += [t.value.id for t in targets if isinstance(t, ast.Subscript) and isinstance(t.value, ast.Name)]
    return [name for name in found if name in starred]


def test_a_traced_backward_writes_into_nothing_that_a_star_collected() -> None:
    """Dynamo of torch 2.11 treats it as a tuple, and refuses to trace the write."""
    backwards = [
        (module.name, node)
        for module in structure.modules(structure.ROOT, "first_order")
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef) and any(isinstance(d, ast.Name) and d.id == "first_order" for d in node.decorator_list)
    ]
    assert len(backwards) >= 3
    assert {name: found for name, node in backwards if (found := _stores_into_stars(node))} == {}
