"""Kernels compiled ahead into `store`'s files, several at a time, for a GPU that need not be there.

`build` compiles in processes of its own, as one process compiles one kernel at a time; the first of them is
`python -m flexattn.kernels_triton.ahead_of_time.build`.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from flexattn.kernels_triton.ahead_of_time.compile_report import CompileError, CompileRequest, request_for, sound_from
from flexattn.kernels_triton.runtime import store
from flexattn.kernels_triton.runtime.launch import Launch, description_of

_DONE = "built"  # what the compiling process prints for each kernel, and then an error's text if there was one


def missing(launches: Sequence[Launch], architecture: int, directory: Path | None = None) -> list[Launch]:
    """Returns the launches whose kernels are not in the directory (by default where launches look), each kernel once."""
    where = directory or store.default_directory()
    found = {description_of(launch, architecture): launch for launch in launches}
    return [launch for text, launch in found.items() if store.find(where, text) is None]


def build(
    launches: Sequence[Launch],
    architecture: int,
    directory: Path | None = None,
    workers: int | None = None,
    advance: Callable[[], object] = lambda: None,
) -> None:
    """Compile the kernels of recorded launches for an architecture (90 for sm_90) into the directory, all cores by default.

    advance: called after each. Raises CompileError once all are tried if any failed.
    """
    where = directory or store.default_directory()
    items = [(request_for(launch, architecture), description_of(launch, architecture)) for launch in launches]
    if not items:
        return
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    failures = []
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder, "job")
        job.write_bytes(pickle.dumps((workers or os.cpu_count(), items, where)))
        command = [sys.executable, "-m", __name__, str(job)]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(_DONE):
                    advance()
                    failures += [line.removeprefix(_DONE).strip()]
    failures = [text for text in failures if text]
    if failures or process.returncode:
        raise CompileError("\n".join([f"{len(failures)} of {len(items)} kernels do not compile", *failures]))


def main(job: str) -> None:
    workers, items, directory = pickle.loads(Path(job).read_bytes())
    # Forked, so that torch and triton are imported once.
    with ProcessPoolExecutor(min(workers, len(items)), mp_context=multiprocessing.get_context("fork")) as pool:
        for future in as_completed([pool.submit(_build, *item, directory) for item in items]):
            print(_DONE, " ".join(future.result().split()), flush=True)  # noqa: T201


def _build(request: CompileRequest, text: str, directory: Path) -> str:
    """Returns the message of what went wrong, or None."""
    try:
        _, binary = sound_from(request)
        if binary is None:
            return f"{request.kernel} needs more than its arguments, and only Triton can launch it"
        reason = store.keep(directory, text, binary)
    except Exception as error:  # one kernel's failure, of whatever kind, must not hide the others
        return f"{request}: {type(error).__name__}: {error}"
    return "" if reason is None else f"{directory} cannot be written: {reason}"


if __name__ == "__main__":
    # By its full name: what is unpickled must be the classes of the module, not those of __main__.
    importlib.import_module("flexattn.kernels_triton.ahead_of_time.build").main(*sys.argv[1:])
