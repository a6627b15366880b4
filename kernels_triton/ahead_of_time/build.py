"""Kernels compiled ahead of time into `store`'s files, several at a time, for a GPU that need not be present.

`build` compiles in separate processes, because one process compiles one kernel at a time. The first of them is `python -m
flexattn.kernels_triton.ahead_of_time.build`.
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

_DONE = "built"  # printed by the compiling process for each kernel, followed by an error's text if there was one


def missing(launches: Sequence[Launch], architecture: int, directory: Path | None = None) -> list[Launch]:
    """Returns the launches whose kernels are not in the directory (default: the directory that launches read), each kernel once."""
    target = directory or store.default_directory()
    launch_by_text = {description_of(launch, architecture): launch for launch in launches}
    return [launch for text, launch in launch_by_text.items() if store.find(target, text) is None]


def build(
    launches: Sequence[Launch],
    architecture: int,
    directory: Path | None = None,
    workers: int | None = None,
    advance: Callable[[], object] = lambda: None,
) -> None:
    """Compiles the kernels of recorded launches for an architecture (90 for sm_90) into the directory; default: on all cores.

    advance: called after each kernel. Raises CompileError once all are tried if any failed.
    """
    target = directory or store.default_directory()
    items = [(request_for(launch, architecture), description_of(launch, architecture)) for launch in launches]
    if not items:
        return
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    failures = []
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder, "job")
        job.write_bytes(pickle.dumps((workers or os.cpu_count(), items, target)))
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
        for future in as_completed([pool.submit(_build, request, text, directory) for request, text in items]):
            print(_DONE, " ".join(future.result().split()), flush=True)  # noqa: T201


def _build(request: CompileRequest, text: str, directory: Path) -> str:
    """Returns the error message, or ""."""
    try:
        _, binary = sound_from(request)
        if binary is None:
            return f"{request.kernel} needs more than its arguments, and only Triton can launch it"
        reason = store.keep(directory, text, binary)
    except Exception as error:  # one kernel's failure, of any kind, must not hide the others
        return f"{request}: {type(error).__name__}: {error}"
    return "" if reason is None else f"{directory} cannot be written: {reason}"


if __name__ == "__main__":
    # By its full name, because unpickled objects must have the module's classes, not those of __main__.
    importlib.import_module("flexattn.kernels_triton.ahead_of_time.build").main(*sys.argv[1:])
