"""Sources of kernels as Triton gets them: identical to the results of `inspect`, for every function in every file."""

from __future__ import annotations

import functools
import importlib
import inspect
import linecache
import pkgutil
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from triton.runtime import jit
from triton.runtime.jit import JITCallable

import flexattn.kernels_triton
from flexattn.kernels_triton.runtime import sources


def kernels() -> Iterator[tuple[str, Any]]:
    """Yields each function that Triton compiles or interprets, including launched kernels, which are generated."""
    for found in pkgutil.walk_packages(flexattn.kernels_triton.__path__, "flexattn.kernels_triton."):
        module = importlib.import_module(found.name)
        for name, made in vars(module).items():
            if isinstance(getattr(made, "fn", None), types.FunctionType) and made.fn.__module__ == module.__name__:
                yield f"{module.__name__}.{name}", made


def test_every_function_of_a_kernel_is_found_as_inspect_finds_it() -> None:
    known = dict(kernels())
    assert len(known) > 350
    for name, made in known.items():
        found = sources.lines_of(made.fn)
        assert found == inspect.getsourcelines(made.fn), name
        if isinstance(made, JITCallable):  # otherwise the interpreter's, which reads no source before it runs
            assert (made.raw_src, made.starting_line_number) == found, name


BODIES = {
    "a comment behind it": "def f(x):\n    y = x\n    return y\n    # still its own\n\n\n# of the next one\ndef g():\n    pass\n",
    "a branch that is never compiled": "def f(x):\n    if False:\n        y = 1\n\n        z = 2\n\n\ng = 1\n",
    "the last of its file": "def f(x):\n    return x\n\n\n",
    "a long signature": "def f(\n    x,\n    y=1,\n):\n    return (\n        x\n    )\n\n\n@g\ndef h():\n    pass\n",
    "a text that goes on at the margin": 'def f(x):\n    y = x\n    """\ntext\n"""\n\n\ndef g():\n    pass\n',
    "a bracket that ends at the margin": "def f(x):\n    return [\n        x,\n]\n\n\ndef g():\n    pass\n",
    "a function within": "def f(x):\n    def g(y):\n        return y\n\n    return g\n",
}


def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> Any:
    """Returns the first function of a file that counts as one of the package's."""
    file = tmp_path / "kernels.py"
    file.write_text(text)
    monkeypatch.setattr(sources, "_OURS", (f"{tmp_path}/",))
    linecache.checkcache(str(file))
    namespace: dict[str, Any] = {"g": lambda function: function, "__name__": "kernels"}
    exec(compile(text, str(file), "exec"), namespace)
    return namespace["f"]


@pytest.mark.parametrize("text", BODIES.values(), ids=BODIES)
def test_where_a_function_ends(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    function = written(tmp_path, monkeypatch, text)
    found = sources.lines_of(function)
    assert found is None or found == inspect.getsourcelines(function)
    assert (found is None) == ("at the margin" in next(name for name, body in BODIES.items() if body == text))
    assert sources._Inspect.getsourcelines(function) == inspect.getsourcelines(function)


def test_what_it_has_no_answer_for_goes_to_inspect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sources.lines_of(len) is None
    assert sources.lines_of(test_where_a_function_ends) is None, "not in a file of kernels"
    inner = written(tmp_path, monkeypatch, "if True:\n    def f(x):\n        return x\n")
    assert sources.lines_of(inner) is None
    wrapped = functools.wraps(written)(written(tmp_path, monkeypatch, BODIES["the last of its file"]))
    assert sources.lines_of(wrapped) is None
    assert jit.inspect.getsourcelines(wrapped) == inspect.getsourcelines(written)
    assert jit.inspect.signature is inspect.signature
    gone = written(tmp_path, monkeypatch, "\n\n\n" + BODIES["the last of its file"])
    Path(gone.__code__.co_filename).write_text("")
    assert sources.lines_of(gone) is None
