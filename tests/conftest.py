"""Conditions that every test runs under: Triton's interpreter without a GPU, poisoned uninitialised memory, one thread."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Before torch and numpy read it. The tests' tensors are small: more threads make them several times slower, workers or not.
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import pytest
import torch
from _pytest.runner import runtestprotocol

from tests.support import forked

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before any test imports triton, which reads it once per kernel

from flexattn import call_cache
from flexattn.dispatch import options

ROOT = Path(__file__).parent.parent

# What a fresh process must not inherit: the interpreter, which is set above, and the user's settings.
SETTINGS = ("TRITON_INTERPRET", "FLEXATTN_", "PYTHONPATH")

FreshPython = Callable[..., "subprocess.CompletedProcess[str]"]

# Tests that find a fault of faults.json. CI runs them: by default if they have the mark `sample`, otherwise as they are marked.
FIND_FAULTS = frozenset(
    fault["found_by"] for fault in json.loads((ROOT / "tests/faults.json").read_text("utf-8")) if "found_by" in fault
)


def sampled(cases: Sequence[frozenset[Any]], begin: Iterable[int] = ()) -> set[int]:
    """Returns which cases, each a set of parameters with their values, have every element together: `begin`, and at least one."""
    chosen = set(begin) or {0}
    missing = frozenset().union(*cases).difference(*(cases[i] for i in chosen))
    while missing:
        chosen.add(max(range(len(cases)), key=lambda i: len(cases[i] & missing)))
        missing = missing.difference(*(cases[i] for i in chosen))
    return chosen


def values_shown(cases: Sequence[Mapping[str, Any]], names: Collection[str]) -> list[frozenset[tuple[str, str]]]:
    """Returns which values of the parameters in `names` each case shows.

    If some cases have backend="triton", the others show no other parameter: only the former run the kernels.
    """
    has_kernels = any(case.get("backend") == "triton" for case in cases)
    shown = [("backend",) if has_kernels and case["backend"] != "triton" else tuple(case) for case in cases]
    return [frozenset((x, repr(case[x])) for x in own if x in names) for case, own in zip(cases, shown, strict=True)]


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "run the code of an older target on the GPU, as `python -m flexattn bench --as`; also by FLEXATTN_AS"
    parser.addoption("--as", dest="target", metavar="sm_80", help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Imitates a GPU before a test module is imported, whose conditions depend on the device."""
    target = config.getoption("target") or options.imitated_target()
    if target is not None:
        from flexattn.kernels_triton.runtime import other_target

        other_target.imitate_named(target)


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_auto_num_workers() -> int:
    """Returns a worker for each core: one more would collect all tests once more, which takes longer than a core ever waits."""
    return os.cpu_count() or 1


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Returns a scheduler that gives a worker a run of tests, for pytest's default, which deals tests out one by one.

    With the default, each worker imports all modules, makes the fixtures of all files, and rewrites all interpreted kernels.
    """
    if config.option.dist != "load":
        return None
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Keeps the garbage collector from what is collected, torch and Triton, which stay: looking there takes a third of the time.

    During the tests it looks less often than Python's default of 700 objects.
    """
    gc.disable()
    gc.set_threshold(10_000)
    try:
        with compiled_once(getattr(session.config, "workerinput", None)):
            return (yield)
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def compiled_once(worker: dict[str, Any] | None) -> Iterator[None]:
    """In a fresh clone, one worker imports first and the others wait: each would compile the same hundreds of files."""
    if worker is None or sys.platform == "win32" or (ROOT / "tests/sparse/__pycache__").exists():
        yield
        return
    import fcntl

    path = Path(tempfile.gettempdir(), f"flexattn-tests-{worker['testrunuid']}")
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(file, fcntl.LOCK_SH)
        yield
    path.unlink(missing_ok=True)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """A worker sends one message for a test that passes, and not five, which take longer than most tests."""
    if not hasattr(item.config, "workerinput"):
        return None
    for report in runtestprotocol(item, log=False, nextitem=nextitem):
        if report.when == "call" or not report.passed:
            item.ihook.pytest_runtest_logreport(report=report)
    return True


def pytest_sessionfinish() -> None:
    """Keeps the garbage collector from all that the session leaves, where pytest and Python look several times at their ends."""
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the cases of a test with the mark `sample` as slow or exhaustive, if they are not in the sample that the mark names.

    Cases with a new value of any parameter are slow, all others exhaustive. If the mark has values=False, only values of the mark's
    parameters count, which the sample may have without the kernels (`values_shown`). Tests that find a fault of faults.json must
    not be exhaustive.
    """
    # By default both slow and exhaustive cases are left out.
    is_default = config.option.markexpr in config.getini("addopts")
    tests: dict[str, list[Any]] = {}
    for item in items:
        if item.get_closest_marker("sample") and not {mark.name for mark in item.callspec.marks} & {"slow", "exhaustive"}:
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        mark = cases[0].get_closest_marker("sample")
        if unknown := mark.kwargs.keys() - {"values"}:
            raise pytest.UsageError(f"{cases[0].nodeid}: the mark sample has {sorted(unknown)}; accepted: parameters, and values")
        values = [frozenset((name, repr(case.callspec.params[name])) for name in mark.args) for case in cases]
        chosen = sampled(values, (i for i, case in enumerate(cases) if case.nodeid in FIND_FAULTS))
        others: set[int] = set()
        if not is_default:
            parameters = [case.callspec.params for case in cases]
            has_every = mark.kwargs.get("values", True)
            others = sampled(values_shown(parameters, parameters[0].keys() if has_every else mark.args), chosen)
        for i, case in enumerate(cases):
            if i not in chosen:
                case.add_marker(pytest.mark.slow if i in others else pytest.mark.exhaustive)
    if unseen := [item.nodeid for item in items if item.nodeid in FIND_FAULTS and item.get_closest_marker("exhaustive")]:
        raise pytest.UsageError(
            f"CI does not run these exhaustive tests, which find faults of tests/faults.json: {unseen}. Mark them slow, or record"
            " other tests by python -m tests.faults --record."
        )


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="session")
def fresh_python() -> FreshPython:
    """run(*args, env=..., cwd=...): `python *args` in a new process, with this checkout importable and no settings inherited."""

    def run(*args: str, env: dict[str, str] | None = None, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *args]
        return subprocess.run(command, env=without_settings(env), cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True)

    return run


@pytest.fixture(scope="session")
def forked_python() -> FreshPython:
    """run(...) as that of `fresh_python`, in a process that begins with torch imported: a second less for each."""

    def run(*args: str, env: dict[str, str] | None = None, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
        return forked.run(list(args), without_settings(env), cwd)

    return run


def without_settings(more: dict[str, str] | None) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(SETTINGS)}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])  # which may name another Triton
    return clean | {"PYTHONPATH": path, "PYTHONIOENCODING": "utf-8"} | (more or {})


@pytest.fixture(scope="session")
def tracked_files() -> list[Path]:
    """Every file of the checkout that git does not ignore, relative to its root."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (FileNotFoundError, subprocess.CalledProcessError) as e:
        pytest.skip(f"not a git checkout, so which files are the project's own is not known: {e}")
    return [path for path in map(Path, listing.split("\0")[:-1]) if (ROOT / path).exists()]


def pytest_runtest_setup() -> None:
    """Each test's first call is an ordinary one: what a test before it made, or patched, is forgotten."""
    call_cache.clear_cache()


@pytest.fixture(scope="session", autouse=True)
def poisoned_memory() -> Iterator[None]:
    """An element that a kernel forgets to write is NaN, or an absurd integer, and never a 0 that happens to be right."""

    def poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
            out = make(*args, **kwargs)
            if out.is_meta:  # there is no memory, and a plan would hold the filling
                return out
            with torch.no_grad():
                if out.is_floating_point() or out.is_complex():
                    out.fill_(float("nan"))
                else:
                    out.fill_(True if out.dtype is torch.bool else torch.iinfo(out.dtype).max)
            return out

        return wrapper

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (
            (torch, "empty"),
            (torch, "empty_like"),
            (torch, "empty_strided"),
            (torch.Tensor, "new_empty"),
            (torch.Tensor, "new_empty_strided"),
        ):
            patch.setattr(owner, name, poisoned(getattr(owner, name)))
        yield


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The seeds of what was drawn at random, which no report of a passed test shows."""
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name == "fuzz" and report.when == "call":
                    terminalreporter.write_line(f"fuzz: {value}")
