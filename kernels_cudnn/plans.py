"""Built graphs, kept: bounded, locked, per device, counted; on disk too, so that a second process need not build them."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import hashlib
import json
import logging
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import cudnn
import torch

from flexattn import kept_files
from flexattn.forks import fork_safe
from flexattn.kernels_cudnn.graphs import Sdpa, Target, build
from flexattn.kernels_cudnn.handles import handle_of

_log = logging.getLogger(__name__)

CAPACITY = 256  # plans; one holds about 1 to 2 MB of host memory
FILE_FORMAT = 2  # format of a plan on disk; every change to what a Uid means or to how a graph is built makes another number


_KIND = f"plan {FILE_FORMAT}"


class PlanNotSupported(RuntimeError):
    """cuDNN has no plan for a graph; the text is its own."""


@dataclasses.dataclass
class Plan:
    """A graph that is ready to run."""

    sdpa: Sdpa
    graph: Any
    workspace_bytes: int
    seconds: float  # that building or loading it took
    is_loaded: bool  # from disk
    is_pinned: bool = False  # a captured CUDA graph may use it: never evicted
    lock: threading.Lock = dataclasses.field(
        default_factory=lambda: fork_safe(threading.Lock()), repr=False
    )  # held while the graph runs


@dataclasses.dataclass
class Counters:
    """Counters of the cache since it was made or cleared."""

    hits: int = 0
    misses: int = 0
    builds: int = 0
    loads: int = 0  # from disk, in place of a build
    failures: int = 0  # builds that cuDNN refused
    evictions: int = 0
    seconds: float = 0.0  # spent in builds, loads and failures


class PlanCache:
    """Least recently used plans by (what they are compiled for, device); what cuDNN does not support is remembered too.

    Safe in threads: two that ask for the same plan build it once. Builds of different plans wait for one another, as cuDNN holds
    Python's lock all through a build.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.capacity = capacity
        self.counters = Counters()
        self._plans: OrderedDict[tuple[Sdpa, Any], Plan | PlanNotSupported] = OrderedDict()
        self._lock = fork_safe(threading.Lock())
        self._building = fork_safe(threading.Lock())

    def get(self, sdpa: Sdpa, device: torch.device, directory: str | None = None) -> Plan:
        """The plan, built at the first call for it, or read from `directory`, where it is then kept.

        Raises:
            PlanNotSupported: cuDNN has none, now or when it was first asked.
            RuntimeError: it would have to be built while a CUDA graph is captured.
            Anything else that building raises, which says nothing of the graph (MemoryError, torch.OutOfMemoryError, an error of
                CUDA, a library that is not found): it is passed on, nothing is kept, and the next call tries again.
        """
        key = (sdpa, place_of(device))
        found = self._find(key)
        if found is None:
            with self._building:
                found = self._find(key, counted=False)  # another thread may have built it meanwhile
                if found is None:
                    found = self._make(sdpa, device, directory)
                    self._keep(key, found)
        if isinstance(found, PlanNotSupported):
            raise PlanNotSupported(str(found))
        return found

    def known(self, sdpa: Sdpa, device: torch.device) -> Plan | PlanNotSupported | None:
        """Returns what `get` would without building anything, uncounted."""
        with self._lock:
            return self._plans.get((sdpa, place_of(device)))

    def inspect(self) -> list[Plan]:
        """The plans that are kept, least recently used first."""
        with self._lock:
            return [plan for plan in self._plans.values() if isinstance(plan, Plan)]

    def clear(self) -> None:
        """Forget all plans, failures and counts. A captured CUDA graph that uses one of the plans must not be replayed again."""
        with self._lock:
            self._plans.clear()
            self.counters = Counters()

    def forget_failures(self) -> None:
        """Ask cuDNN again for what it did not support."""
        with self._lock:
            for key in [key for key, found in self._plans.items() if isinstance(found, PlanNotSupported)]:
                del self._plans[key]

    def _find(self, key: tuple[Sdpa, Any], counted: bool = True) -> Plan | PlanNotSupported | None:
        with self._lock:
            found = self._plans.get(key)
            if found is not None:
                self._plans.move_to_end(key)
            if counted:
                self.counters.hits += found is not None
                self.counters.misses += found is None
            return found

    def _keep(self, key: tuple[Sdpa, Any], made: Plan | PlanNotSupported) -> None:
        with self._lock:
            self._plans[key] = made
            for old in [k for k, plan in self._plans.items() if not (isinstance(plan, Plan) and plan.is_pinned)]:
                if len(self._plans) <= self.capacity:
                    break
                del self._plans[old]
                self.counters.evictions += 1

    def _make(self, sdpa: Sdpa, device: torch.device, directory: str | None) -> Plan | PlanNotSupported:
        if device.type == "cuda" and _deviceless.get() is None and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a cuDNN plan cannot be built while a CUDA graph is captured; run the call once before, or flexattn.warmup()"
            )
        began = time.perf_counter()
        path = Path(directory) / f"{_fingerprint(sdpa, device)}.cudnn" if directory else None
        with _on(device):
            graph = _load(path, device) if path is not None else None
            is_loaded = graph is not None
            if graph is None:
                try:
                    graph = build(sdpa, target_of(device))
                except Exception as e:
                    if not _is_unsupported(e):
                        raise
                    self.counters.failures += 1
                    self.counters.seconds += time.perf_counter() - began
                    _log.info("cuDNN refused a plan for %s: %s", sdpa, e)
                    return PlanNotSupported(_summary(e))
                if path is not None:
                    _save(graph, path)
            workspace_bytes = graph.get_workspace_size()
        seconds = time.perf_counter() - began
        self.counters.builds += not is_loaded
        self.counters.loads += is_loaded
        self.counters.seconds += seconds
        _log.info("%s a plan in %.3f s: %s", "loaded" if is_loaded else "built", seconds, sdpa)
        return Plan(sdpa, graph, workspace_bytes, seconds, is_loaded)


PLANS = PlanCache()


_deviceless: ContextVar[str | None] = ContextVar("deviceless", default=None)  # properties of a device that is not here, as JSON


@contextlib.contextmanager
def without_device(properties: str) -> Iterator[None]:
    """Inside, this thread's plans are built for the device that `properties` describes (JSON, as cudnn's device_properties
    serialize), not for one that is here. They cannot run."""
    token = _deviceless.set(properties)
    try:
        yield
    finally:
        _deviceless.reset(token)


def target_of(device: torch.device) -> Target:
    """Returns the target that a graph for `device` is built for."""
    described = _deviceless.get()
    if described is not None:
        properties = cudnn.create_device_properties(described)
        return Target(properties=properties, sm_version=json.loads(described)["deviceVer"] // 10)
    return Target(handle=handle_of(device))


def is_without_device() -> bool:
    """Returns whether this thread is inside `without_device`."""
    return _deviceless.get() is not None


def place_of(device: torch.device) -> Any:
    """Returns what plans for a device are kept under."""
    return _deviceless.get() or (device.type, device.index)


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(device) if _deviceless.get() is None else contextlib.nullcontext()


def _fingerprint(sdpa: Sdpa, device: torch.device) -> str:
    """Hash of all that must match for a plan on disk to be this one: its format, both versions of cuDNN, the device, the graph."""
    place: Any = _deviceless.get()
    if place is None:
        p = torch.cuda.get_device_properties(device)
        place = (p.name, p.major, p.minor, p.multi_processor_count, _driver_version())
    what = (FILE_FORMAT, cudnn.__version__, cudnn.backend_version(), place, tuple(sdpa._asdict().items()))
    return hashlib.sha256(repr(what).encode()).hexdigest()


def _driver_version() -> int:
    version = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return version.value


def _load(path: Path, device: torch.device) -> Any:
    """The graph in a file; None where there is no file, or one that cuDNN does not accept."""
    data = kept_files.read(path, _KIND, says=True)
    if data is None:
        return None
    target = target_of(device)
    graph = cudnn.pygraph(handle=target.handle, device_property=target.properties, sm_version=target.sm_version)
    try:
        if target.handle is not None:
            graph.deserialize(target.handle, list(data))
        else:
            graph.deserialize(list(data))
    except Exception as e:  # whatever it is, building anew is right
        if _is_passing(e):
            raise
        _log.warning("the cuDNN plan in %s cannot be used, so it is built anew: %s", path, e)
        return None
    return graph


def _save(graph: Any, path: Path) -> None:
    try:
        data = bytes(graph.serialize())
    except Exception as e:  # the plan is built and can run
        _log.warning("a cuDNN plan cannot be kept in %s: %s", path, e)
    else:
        kept_files.write(path, _KIND, data, says=True)


_PASSING = re.compile(
    "CUDA error|out of memory|cuda[A-Z]|CUDNN_STATUS_(ALLOC_FAILED|EXECUTION_FAILED|INTERNAL_ERROR|NOT_INITIALIZED|SUBLIBRARY)"
)
# In cuDNN's own type for graphs that it does not support, which it raises for these too. Its list of engines has other words.
_NOT_THERE = re.compile("out of memory|ALLOC_FAILED|PREREQUISITE_MISSING|SUBLIBRARY_|[Dd]isplay driver|driver library")
_REFUSING = re.compile("CUDNN_STATUS_(NOT_SUPPORTED|BAD_PARAM|ARCH_MISMATCH)")


def _is_passing(e: Exception) -> bool:
    """Returns whether an exception may not come again: it tells of the device, the driver or the memory of the moment."""
    if isinstance(e, (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)):
        return True
    if isinstance(e, cudnn.cudnnGraphNotSupportedError):
        return _NOT_THERE.search(str(e)) is not None
    return isinstance(e, RuntimeError) and (_PASSING.search(str(e)) or _NOT_THERE.search(str(e))) is not None


def _is_unsupported(e: Exception) -> bool:
    """Returns whether an exception is cuDNN's answer about a graph: of its own type, of its checks, or with its status for that.

    Any other tells nothing of the graph that would hold at the next call.
    """
    if _is_passing(e):
        return False
    if isinstance(e, RuntimeError):
        return _REFUSING.search(str(e)) is not None
    return isinstance(e, (cudnn.cudnnGraphNotSupportedError, ValueError, TypeError))


def _summary(e: Exception) -> str:
    """The type and the first lines of what cuDNN says, which may list every engine that it tried."""
    lines = [line.strip() for line in str(e).strip().splitlines()[:2]]
    text = " ".join(line if len(line) <= _MOST_TEXT else f"{line[:_MOST_TEXT]}..." for line in lines)
    return f"{type(e).__name__}: {text or 'no text'}"


_MOST_TEXT = 300
