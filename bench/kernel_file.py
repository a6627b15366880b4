"""A developer's copy of a kernel file, loaded in addition to the library's."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from flexattn.bench.implementations import KERNELS, Launchers, committed_launchers

NEEDED = ("triton", "numpy")  # modules for which the playground prints how to install them

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flexattn.kernels_triton.runtime.device import Tile


def load(path: Path) -> ModuleType:
    """The file as a top-level module under its own name, so that the compiling processes can import it too.

    Raises FileNotFoundError, or ValueError for a name that another module has and for a file that does not parse, raises or exits,
    with its own line.
    """
    if not path.is_file():
        raise FileNotFoundError(f"--kernel-file {path}: there is no such file")
    name, folder = path.stem, str(path.resolve().parent)
    if path.suffix != ".py" or not name.isidentifier():
        raise ValueError(f"--kernel-file {path}: accepted: a Python file whose name is an identifier, as my_forward.py")
    if folder not in sys.path:
        sys.path.append(folder)  # last: it must not hide anything
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None or Path(spec.origin).resolve() != path.resolve():
        raise ValueError(f"--kernel-file {path}: a module {name!r} exists already; give the file a name of its own")
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as e:  # a developer's file may do anything
        if isinstance(e, ModuleNotFoundError) and e.name in NEEDED:
            raise
        lines = [
            frame.lineno for frame in traceback.extract_tb(e.__traceback__) if Path(frame.filename).resolve() == path.resolve()
        ]
        line = e.lineno if isinstance(e, SyntaxError) else lines[-1] if lines else None
        raise ValueError(f"--kernel-file {path}, line {line}: {type(e).__name__}: {e}") from e


def launchers(kernel: str, path: Path | None, tiles: Mapping[str, Tile]) -> Launchers:
    """Returns the library's launchers, with the file's launcher for `kernel`.

    Raises the errors of `load`, and ValueError if the file does not have that launcher.
    """
    library = committed_launchers(tiles)
    if path is None:
        return library
    direction, name = KERNELS[kernel]
    launcher = f"attention_{direction}"
    module = load(path)
    for needed in (launcher, name):
        if not hasattr(module, needed):
            raise ValueError(
                f"--kernel-file {path} has no {needed}; begin with a copy of "
                f"kernels_triton/portable/{direction}.py and keep its names"
            )
    return library._replace(**{direction: getattr(module, launcher)})
