"""Python in a process that is forked from a server with torch imported, because the import takes most of a small script's time."""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
import warnings
from multiprocessing import util
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

ROOT = Path(__file__).parents[2]
_SERVER = multiprocessing.get_context("forkserver")
# The last two are half of the imports of a mod's first trace. They do not import triton, whose settings belong to a test.
_SERVER.set_forkserver_preload(["numpy", "torch", "torch.fx.experimental.symbolic_shapes", "torch.distributed.fsdp"])


def run(arguments: list[str], environment: dict[str, str], folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Runs `python FILE ...`, `python -m MODULE ...` or `python -c CODE ...`, in this environment.

    Settings that torch reads during its import are the server's. "-W ACTION" may precede the other arguments.
    """
    with tempfile.TemporaryDirectory() as scratch:
        outputs = [Path(scratch, name) for name in ("stdout", "stderr")]
        process = _SERVER.Process(target=_main, args=(arguments, environment, folder, outputs))
        process.start()
        process.join()
        assert process.exitcode is not None
        return subprocess.CompletedProcess(arguments, process.exitcode, *(path.read_text("utf-8") for path in outputs))


def _main(arguments: list[str], environment: dict[str, str], folder: Path, outputs: list[Path]) -> None:
    for descriptor, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8")  # type: ignore[union-attr]  # a TextIOWrapper
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    if arguments[0] == "-W":
        warnings.simplefilter(cast("Any", arguments[1]))
        arguments = arguments[2:]
    is_file = arguments[0] not in ("-m", "-c")
    sys.argv = arguments if is_file else arguments[1:]
    own = str(Path(arguments[0]).parent if is_file else folder)
    installed = [path for path in sys.path if path.startswith((sys.prefix, sys.base_prefix))]
    sys.path[:] = [own, *environment["PYTHONPATH"].split(os.pathsep), *installed]
    if arguments[0] == "-m":
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec"), vars(sys.modules["__main__"]))
    else:
        runpy.run_path(arguments[0], run_name="__main__")


def run_main(arguments: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Runs main(...) of `-m MODULE ...` in a process that stays for all calls, with its imports. Each call has its environment."""
    pipe = _staying()
    try:
        pipe.send((arguments[1:], environment))
        return subprocess.CompletedProcess(arguments, *pipe.recv())
    except (BrokenPipeError, EOFError):  # the process died, and the next call starts another
        _staying.cache_clear()
        return subprocess.CompletedProcess(arguments, 1, "", "the process died")


@functools.cache
def _staying() -> Connection:
    """Returns a pipe to a process that ends when the pipe is closed."""
    pipe, theirs = _SERVER.Pipe()
    _SERVER.Process(target=_serve, args=(theirs,)).start()
    theirs.close()
    util.Finalize(None, pipe.close, exitpriority=0)  # multiprocessing calls it before it waits for the process
    return pipe


def _serve(pipe: Connection) -> None:
    while True:
        try:
            (module, *arguments), environment = pipe.recv()
        except EOFError:
            return
        with tempfile.TemporaryFile() as log:
            os.dup2(log.fileno(), 2)
            os.environ.clear()
            os.environ.update(environment)
            sys.path[:] = environment["PYTHONPATH"].split(os.pathsep)
            try:
                importlib.import_module(module).main(*arguments)
                status = 0
            except Exception:
                traceback.print_exc()
                status = 1
            sys.stderr.flush()
            log.seek(0)
            pipe.send((status, "", log.read().decode("utf-8", "replace")))
