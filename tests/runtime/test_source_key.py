"""Keys of compiled kernels on disk: if a source, constant or named tuple anywhere in a kernel changes, so does the key."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from triton.runtime.jit import JITFunction

from flexattn.kernels_triton.runtime.sources import source_key
from tests.conftest import FreshPython

KERNELS = """
from typing import NamedTuple
import triton.language as tl
from flexattn_helpers import twice
import flexattn_helpers as helpers

FACTOR = tl.constexpr(3)
KIND = tl.float32


class Group(NamedTuple):
    a: int
    b: int = 1


def inner(x):
    return twice(x) * FACTOR


def outer(x):  # calls itself by `outer`, as nothing here runs
    group = Group(x, 2)
    return inner(group.a).to(KIND) + helpers.thrice(x)


def unused(x):
    return x
"""
HELPERS = """
OFFSET = 5


def twice(x):
    return x + x


def thrice(x):
    return 3 * x + OFFSET
"""


def key_of(folder: Path, kernels: str, helpers: str) -> str:
    """Returns the key of `outer` in files of these texts, whose functions are all Triton's."""
    made: dict[str, Any] = {}
    try:
        for name, text in (("flexattn_helpers", helpers), ("flexattn_kernels", kernels)):
            file = folder / f"{name}.py"
            file.write_text(text)
            spec = importlib.util.spec_from_file_location(name, file)
            assert spec is not None
            assert spec.loader is not None
            module = sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            for function in [value for value in vars(module).values() if getattr(value, "__module__", "") == name]:
                if not isinstance(function, type):
                    made[function.__name__] = JITFunction(function)
                    setattr(module, function.__name__, made[function.__name__])
        return source_key(made["outer"])
    finally:
        for name in ("flexattn_helpers", "flexattn_kernels"):
            sys.modules.pop(name, None)


OTHER = {
    "its own source": ("Group(x, 2)", "Group(x, 3)"),
    "a function that it calls": ("twice(x) * FACTOR", "twice(x) + FACTOR"),
    "a function further down, of another file": ("return x + x", "return x * 2"),
    "a function by its module": ("return 3 * x", "return x * 3"),
    "a constant further down": ("constexpr(3)", "constexpr(4)"),
    "a constant's type": ("constexpr(3)", "constexpr(3.0)"),
    "a dtype": ("KIND = tl.float32", "KIND = tl.float16"),
    "a number of another file": ("OFFSET = 5", "OFFSET = 6"),
    "the order of fields": ("    a: int\n    b: int = 1", "    b: int\n    a: int = 1"),
    "a field's default": ("b: int = 1", "b: int = 2"),
}


@pytest.mark.parametrize(("old", "new"), OTHER.values(), ids=OTHER)
def test_another_key_for_another(old: str, new: str, tmp_path: Path) -> None:
    assert old in KERNELS + HELPERS
    before = key_of(tmp_path, KERNELS, HELPERS)
    (tmp_path / "other").mkdir()
    assert key_of(tmp_path / "other", KERNELS.replace(old, new), HELPERS.replace(old, new)) != before


def test_the_same_key_in_another_place_beside_other_functions(tmp_path: Path) -> None:
    before = key_of(tmp_path, KERNELS, HELPERS)
    (tmp_path / "other").mkdir()
    moved = KERNELS.replace("FACTOR = ", "\n\nFACTOR = ").replace("return x\n", "return -x\n")
    assert moved != KERNELS
    assert key_of(tmp_path / "other", moved, HELPERS) == before


COUNTED = """
import importlib, pkgutil
import flexattn.kernels_triton
from triton.language import constexpr
from triton.runtime import jit
from flexattn.kernels_triton.runtime.sources import _referred, source_key

functions, kernels = {}, []
for found in pkgutil.walk_packages(flexattn.kernels_triton.__path__, "flexattn.kernels_triton."):
    for made in vars(importlib.import_module(found.name)).values():
        if isinstance(made, jit.JITCallable):
            functions[id(made)] = made
            kernels += [made] if hasattr(made, "group") and made not in kernels else []

counted = {}  # by a function's name, the names of those that Triton's key counts in
update = jit.DependenciesFinder._update_hash
def noting(self, function):
    counted.setdefault(self.name, set()).add(function._fn_name)
    update(self, function)
jit.DependenciesFinder._update_hash = noting

ours, constants = {}, 0
for function in [*kernels, *functions.values()]:
    function.cache_key
    reached, pending = {id(function): function}, [function]
    known = set()
    while pending:
        caller = pending.pop()
        for name, value in _referred(caller):
            if isinstance(value, jit.JITCallable):
                ours.setdefault(caller._fn_name, set()).add(value._fn_name)
                if id(value) not in reached:
                    reached[id(value)] = value
                    pending.append(value)
            elif isinstance(value, constexpr):
                known.add((name.rpartition(".")[2], str(value)))
    used = {(name, str(value)) for (name, _), (value, _) in function.used_global_vals.items() if isinstance(value, constexpr)}
    assert used <= known, (function, used - known)
    constants += len(used)
missing = {f"{name}: {callee}" for name, found in counted.items() for callee in found - ours.get(name, set())}
assert not {line for line in missing if ": triton." not in line}, missing  # those of its own go by its version
assert len({source_key(kernel) for kernel in kernels}) == len(kernels)
print(len(kernels), sum(map(len, counted.values())), constants)
"""


@pytest.mark.slow
def test_every_kernel_is_known_by_all_that_triton_hashes_of_it(fresh_python: FreshPython) -> None:
    ran = fresh_python("-c", COUNTED, env={"TRITON_INTERPRET": "0"})
    assert ran.returncode == 0, ran.stderr[-2000:]
    kernels, references, constants = map(int, ran.stdout.split())
    assert kernels >= 35
    assert references >= 600
    assert constants >= 50
