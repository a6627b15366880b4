"""Cache of built graphs: bounded, locked, per device, with counters. A copy on disk spares other processes the builds."""

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
from collections.abc import Hashable, Iterator
from contextvars import ContextVar
from pathlib import Path

import cudnn
import torch

from flexattn import kept_files
from flexattn.forks import fork_safe
from flexattn.kernels_cudnn.execute import handle_of
from flexattn.kernels_cudnn.frontend import Graph
from flexattn.kernels_cudnn.graphs import Sdpa, Target, build

_log = logging.getLogger(__name__)

CAPACITY = 256  # plans. One plan has about 1 to 2 MB of host memory.
FILE_FORMAT = 2  # the format of a plan on disk. Increase it if the meaning of a Uid or the building of graphs changes.
_KIND = f"plan {FILE_FORMAT}"


class PlanNotSupported(RuntimeError):
    """Raised if cuDNN has no plan for a graph, with cuDNN's text."""


@dataclasses.dataclass
class Plan:
    """A graph that is ready to run."""

    sdpa: Sdpa
    graph: Graph
    workspace_bytes: int
    seconds: float  # the time of building or loading it.
    is_loaded: bool  # whether it comes from disk.
    is_pinned: bool = False  # whether a captured CUDA graph may use it. If so, it is never evicted.
    # The lock is held while the graph runs.
    lock: threading.Lock = dataclasses.field(default_factory=lambda: fork_safe(threading.Lock()), repr=False)


@dataclasses.dataclass
class Counters:
    """Counters of the cache since it was made or cleared."""

    hits: int = 0
    misses: int = 0
    builds: int = 0
    loads: int = 0  # plans from disk, in place of a build.
    failures: int = 0  # builds that cuDNN refused.
    evictions: int = 0
    seconds: float = 0.0  # the time of builds, loads and failures.


Place = Hashable  # the key of a device, as `place_of` returns it.


class PlanCache:
    """LRU cache of plans by (description, device). Refusals by cuDNN are cached too.

    It is thread-safe: if two threads need the same plan, it is built once. Builds of different plans wait for one another, because
    cuDNN holds Python's lock during a build.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.capacity = capacity
        self.counters = Counters()
        self._plans: OrderedDict[tuple[Sdpa, Place], Plan | PlanNotSupported] = OrderedDict()
        self._lock = fork_safe(threading.Lock())
        self._building = fork_safe(threading.Lock())

    def get(self, sdpa: Sdpa, device: torch.device, directory: str | None = None) -> Plan:
        """Returns the plan. The first call builds it, or reads it from `directory`. A built plan is also written to `directory`.

        Raises:
            PlanNotSupported: cuDNN has no plan, now or at the first call.
            RuntimeError: the plan is not built yet, and a CUDA graph is captured.
            Other errors of a build (MemoryError, torch.OutOfMemoryError, a CUDA error, a missing library): they do not depend on
                the graph. Nothing is cached, and the next call tries again.
        """
        key = (sdpa, place_of(device))
        entry = self._find(key)
        if entry is None:
            with self._building:
                entry = self._find(key, counted=False)  # another thread may have built it in the meantime.
                if entry is None:
                    entry = self._make(sdpa, device, directory)
                    self._keep(key, entry)
        if isinstance(entry, PlanNotSupported):
            raise PlanNotSupported(str(entry))
        return entry

    def known(self, sdpa: Sdpa, device: torch.device) -> Plan | PlanNotSupported | None:
        """Returns the cached plan or refusal, or None. It builds nothing and changes no counter."""
        with self._lock:
            return self._plans.get((sdpa, place_of(device)))

    def inspect(self) -> list[Plan]:
        """Returns the cached plans, least recently used first."""
        with self._lock:
            return [plan for plan in self._plans.values() if isinstance(plan, Plan)]

    def clear(self) -> None:
        """Forgets all plans, failures and counts. If a captured CUDA graph uses one of the plans, it must not be replayed again."""
        with self._lock:
            self._plans.clear()
            self.counters = Counters()

    def forget_failures(self) -> None:
        """Forgets refusals, so that cuDNN is asked again."""
        with self._lock:
            for key in [key for key, entry in self._plans.items() if isinstance(entry, PlanNotSupported)]:
                del self._plans[key]

    def _find(self, key: tuple[Sdpa, Place], counted: bool = True) -> Plan | PlanNotSupported | None:
        with self._lock:
            entry = self._plans.get(key)
            if entry is not None:
                self._plans.move_to_end(key)
            if counted:
                self.counters.hits += entry is not None
                self.counters.misses += entry is None
            return entry

    def _keep(self, key: tuple[Sdpa, Place], entry: Plan | PlanNotSupported) -> None:
        with self._lock:
            self._plans[key] = entry
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
        start = time.perf_counter()
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
                    self.counters.seconds += time.perf_counter() - start
                    _log.info("cuDNN refused a plan for %s: %s", sdpa, e)
                    return PlanNotSupported(_summary(e))
                if path is not None:
                    _save(graph, path)
            workspace_bytes = graph.get_workspace_size()
        seconds = time.perf_counter() - start
        self.counters.builds += not is_loaded
        self.counters.loads += is_loaded
        self.counters.seconds += seconds
        _log.info("%s a plan in %.3f s: %s", "loaded" if is_loaded else "built", seconds, sdpa)
        return Plan(sdpa, graph, workspace_bytes, seconds, is_loaded)


PLANS = PlanCache()


# The properties of a device that this machine lacks, as JSON.
_deviceless: ContextVar[str | None] = ContextVar("deviceless", default=None)


@contextlib.contextmanager
def without_device(properties: str) -> Iterator[None]:
    """Builds this thread's plans for the device of `properties` inside the block. Such plans cannot run.

    properties: JSON, as cudnn's device_properties serialize it.
    """
    token = _deviceless.set(properties)
    try:
        yield
    finally:
        _deviceless.reset(token)


def target_of(device: torch.device) -> Target:
    """Returns the target of a graph for `device`."""
    text = _deviceless.get()
    if text is not None:
        properties = cudnn.create_device_properties(text)
        return Target(properties=properties, sm_version=json.loads(text)["deviceVer"] // 10)
    return Target(handle=handle_of(device))


def is_without_device() -> bool:
    """Returns whether this thread is inside `without_device`."""
    return _deviceless.get() is not None


def place_of(device: torch.device) -> Place:
    """Returns the key of a device in the cache."""
    return _deviceless.get() or (device.type, device.index)


def _on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.device(device) if _deviceless.get() is None else contextlib.nullcontext()


def _fingerprint(sdpa: Sdpa, device: torch.device) -> str:
    """Returns a hash of everything that a plan on disk depends on: format, both versions of cuDNN, the device, the description."""
    place: object = _deviceless.get()
    if place is None:
        p = torch.cuda.get_device_properties(device)
        place = (p.name, p.major, p.minor, p.multi_processor_count, _driver_version())
    identity = (FILE_FORMAT, cudnn.__version__, cudnn.backend_version(), place, tuple(sdpa._asdict().items()))
    return hashlib.sha256(repr(identity).encode()).hexdigest()


def _driver_version() -> int:
    version = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return version.value


def _load(path: Path, device: torch.device) -> Graph | None:
    """Returns the graph in a file, or None if there is no file or cuDNN does not accept it."""
    data = kept_files.read(path, _KIND, says=True)
    if data is None:
        return None
    target = target_of(device)
    graph: Graph = cudnn.pygraph(handle=target.handle, device_property=target.properties, sm_version=target.sm_version)
    try:
        if target.handle is not None:
            graph.deserialize(target.handle, list(data))
        else:
            graph.deserialize(list(data))
    except Exception as e:  # for any lasting error, the plan is rebuilt.
        if _is_transient(e):
            raise
        _log.warning("the cuDNN plan in %s cannot be used, so it is rebuilt: %s", path, e)
        return None
    return graph


def _save(graph: Graph, path: Path) -> None:
    try:
        data = bytes(graph.serialize())
    except Exception as e:  # the plan is built and can run.
        _log.warning("a cuDNN plan cannot be written to %s: %s", path, e)
    else:
        kept_files.write(path, _KIND, data, says=True)


_TRANSIENT = re.compile(
    "CUDA error|out of memory|cuda[A-Z]|CUDNN_STATUS_(ALLOC_FAILED|EXECUTION_FAILED|INTERNAL_ERROR|NOT_INITIALIZED|SUBLIBRARY)"
)
# Missing parts of an installation. cuDNN raises its type for unsupported graphs for them too. Its list of engines has none of
# these words.
_MISSING = re.compile("out of memory|ALLOC_FAILED|PREREQUISITE_MISSING|SUBLIBRARY_|[Dd]isplay driver|driver library")
_REFUSED = re.compile("CUDNN_STATUS_(NOT_SUPPORTED|BAD_PARAM|ARCH_MISMATCH)")


def _is_transient(e: Exception) -> bool:
    """Returns whether an exception may not come again, because it depends on the present device, driver or memory."""
    if isinstance(e, (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)):
        return True
    if isinstance(e, cudnn.cudnnGraphNotSupportedError):
        return _MISSING.search(str(e)) is not None
    return isinstance(e, RuntimeError) and (_TRANSIENT.search(str(e)) or _MISSING.search(str(e))) is not None


def _is_unsupported(e: Exception) -> bool:
    """Returns whether an exception is cuDNN's refusal of a graph: by its own type, by its checks, or by its status.

    Other errors do not depend on the graph, and the next call may succeed.
    """
    if _is_transient(e):
        return False
    if isinstance(e, RuntimeError):
        return _REFUSED.search(str(e)) is not None
    return isinstance(e, (cudnn.cudnnGraphNotSupportedError, ValueError, TypeError))


def _summary(e: Exception) -> str:
    """Returns the type and the first lines of cuDNN's message, which may list every engine that cuDNN tried."""
    lines = [line.strip() for line in str(e).strip().splitlines()[:2]]
    text = " ".join(line if len(line) <= _MOST_TEXT else f"{line[:_MOST_TEXT]}..." for line in lines)
    return f"{type(e).__name__}: {text or 'no text'}"


_MOST_TEXT = 300
