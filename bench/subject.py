"""A kernel that is played with: its launchers, from the library or a developer's file, its tile and shape, and its check."""

from __future__ import annotations

import functools
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import flexattn
from flexattn.bench.check import Checker, Error
from flexattn.bench.implementations import KERNELS, Implementation, Launchers, committed_launchers, one_kernel, with_launchers
from flexattn.bench.inputs import make_tensors
from flexattn.bench.shapes import Workload
from flexattn.bench.tiles import tile_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flexattn.kernels_triton.runtime.device import Tile


PASSED, WRONG, REFUSED = 0, 1, 2  # exit statuses of the playground


class Subject(NamedTuple):
    """One kernel on one workload in the playground."""

    kernel: str
    workload: Workload
    launchers: Launchers  # the candidate
    tile: Tile
    committed: Tile
    arch: int

    @property
    def label(self) -> str:
        return f"{self.kernel} {tile_name(self.tile)}"

    def with_tile(self, tile: Tile) -> Subject:
        return self._replace(tile=tile, launchers=self.launchers._replace(tiles={self.kernel: tile}))


def small_enough(workload: Workload, tile: Tile) -> Workload:
    """Returns the workload with few heads and sequences, long enough for three blocks each way, the last of them partial."""
    return workload.shortened(2 * max(tile.block_m, tile.block_n) + 3)


def check(subject: Subject, workload: Workload, device: str) -> tuple[list[Error], str | None]:
    """Returns (errors of each result, the failure if there is one)."""
    direction, _ = KERNELS[subject.kernel]
    tensors = make_tensors(workload, device)
    checker = Checker(workload, tensors)
    results = with_launchers(subject.launchers, workload, tensors, direction).results()
    errors = checker.errors(direction, results)
    try:
        checker.check(direction, results)
    except AssertionError as e:
        return errors, str(e)
    return errors, None


def alone(subject: Subject, name: str) -> Implementation:
    """Returns the kernel as an implementation, with the subject's launchers and tile."""
    prepare = functools.partial(one_kernel, subject.kernel, subject.launchers)
    return Implementation(name, flexattn.__version__, prepare)


NEEDED = ("triton", "numpy")  # modules for which the playground prints how to install them


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


def launchers_of(kernel: str, path: Path | None, tiles: Mapping[str, Tile]) -> Launchers:
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
