"""Private names of torch: one file has them all, and this torch has each of them."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest
import torch

from flexattn import compat
from tests import structure

ROOT = Path(__file__).parents[2]
NAMES = [name for name in vars(compat) if not name.startswith("_") and name not in ("annotations", "functools", "torch")]
LATE = ("device_context", "dynamo", "functorch_config", "is_ring_balanced", "side_effects_allowed", "symmetric_memory")
VERSION = ".".join(torch.__version__.split(".")[:2])


@pytest.mark.parametrize("name", NAMES)
def test_this_torch_has_each_name(name: str) -> None:
    is_absent = getattr(compat, name) is None
    assert not is_absent or (name in compat.CUDA_ONLY and not torch.version.cuda)


@pytest.mark.parametrize("name", LATE)
def test_this_torch_has_each_name_that_is_imported_late(name: str) -> None:
    assert getattr(compat, name)() is not None


def test_late_names_work_with_this_torch() -> None:
    assert compat.symmetric_memory()._SymmetricMemory.empty_strided_p2p is not None
    assert callable(compat.dynamo().decorators.substitute_in_graph)
    assert compat.empty_strided("cpu") is not None
    assert isinstance(compat.functorch_config().donated_buffer, bool)


def test_all_late_names_are_tested() -> None:
    late = {node.name for node in ast.walk(ast.parse(inspect.getsource(compat))) if isinstance(node, ast.FunctionDef)}
    imported = {name for name in late if re.search(r"^    (from|import) ", inspect.getsource(getattr(compat, name)), re.MULTILINE)}
    assert imported == set(LATE)


def test_this_torch_is_among_the_versions_seen() -> None:
    assert VERSION in compat.SEEN_IN, "these tests pass with it: add it to compat.SEEN_IN"


def private_names(tree: ast.AST) -> list[str]:
    """Returns the private names of torch that a module reads or imports; operators (torch.ops.aten._x) have public schemas."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "torch":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.partition(".")[0] == "torch"]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        else:
            continue
        found += [name for name in names if re.match(r"(torch|forward_ad)\.(?!ops\.)([a-z]\w*\.)*_[a-zA-Z]", name)]
    return found


def test_other_files_have_no_private_name_of_torch() -> None:
    pattern = r"(torch|forward_ad)[\w.]*(\._[a-zA-Z]|\s+import\s+(\([^)]*|[^\n]*)\b_[a-zA-Z])"
    source = structure.modules(ROOT, pattern)
    found = {str(module.path): names for module in source if (names := private_names(module.tree))}
    assert found.keys() == {"flexattn/compat.py"}, found


@pytest.mark.parametrize(
    "line",
    [
        "torch._C.f()",
        "from torch import _C",
        "import torch._dynamo",
        "from torch._decomp import x",
        "from torch.utils._pytree import x",
        "from torch.utils import _pytree",
        "torch.overrides._modes()",
        "forward_ad._current_level",
    ],
)
def test_the_search_finds_a_private_name(line: str) -> None:
    assert private_names(ast.parse(line))
