"""Rules for code that keeps state: tensors name their device, and locks are free in a forked child."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from flexattn import cached_call, forks
from tests import structure

FACTORIES = frozenset(
    ("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "normal", "ones", "rand")
) | frozenset(("randint", "randn", "randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros"))
LOCKS = frozenset(("Lock", "RLock", "Condition", "Semaphore"))
OF_THE_LIBRARY = ("flexattn", "dispatch", "kernels_triton", "kernels_cudnn")


@functools.cache
def library() -> list[structure.Module]:
    """Returns the library's files that make tensors or locks."""
    found = []
    for folder in OF_THE_LIBRARY:
        for path in sorted((structure.ROOT / folder).rglob("*.py")):
            text = path.read_text("utf-8")
            if re.search(rf"\btorch\.({'|'.join(FACTORIES)})\(|\bthreading\.", text):
                found.append(structure.Module(path.stem, path.relative_to(structure.ROOT), text, ast.parse(text)))
    return found


def calls(module: structure.Module, owner: str) -> Iterator[tuple[str, ast.Call]]:
    """Yields the name and the node of each call owner.name(...)."""
    for node in ast.walk(module.tree):
        function = node.func if isinstance(node, ast.Call) else None
        if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.value.id == owner:
            yield function.attr, node


def without_device(module: structure.Module) -> list[str]:
    """Returns the calls of torch's factories without a device, which torch.set_default_device would change."""
    return [
        f"{module.path}:{node.lineno}: {ast.unparse(node)}"
        for name, node in calls(module, "torch")
        if name in FACTORIES and not any(keyword.arg in ("device", None) for keyword in node.keywords)
    ]


def test_each_tensor_is_made_on_a_device_that_the_code_names() -> None:
    found = [line for module in library() for line in without_device(module)]
    assert found == []


def test_a_tensor_on_the_default_device_is_found() -> None:
    text = "torch.zeros(3)\ntorch.zeros(3, device='cpu')\ntorch.full((), 1.0, **named)\nx.new_zeros(3)\n"
    module = structure.Module("m", Path("m.py"), text, ast.parse(text))
    assert without_device(module) == ["m.py:1: torch.zeros(3)"]


def test_each_lock_is_free_in_a_forked_child() -> None:
    found = []
    for module in library():
        safe = {id(node.args[0]) for node in ast.walk(module.tree) if isinstance(node, ast.Call) and _is_fork_safe(node)}
        found += [
            f"{module.path}:{node.lineno}" for name, node in calls(module, "threading") if name in LOCKS and id(node) not in safe
        ]
    assert [line for line in found if not line.startswith("flexattn/cached_call.py")] == []
    assert cached_call.lock in forks._locks  # call_cache registers it


def _is_fork_safe(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Name) and node.func.id == "fork_safe" and len(node.args) == 1
