"""The cache of cuDNN plans by itself: its memory of a failed build, and its files. A function plays cuDNN."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("cudnn", reason="nvidia-cudnn-frontend is not installed")

import cudnn

from flexattn.kernels_cudnn import plans
from flexattn.kernels_cudnn.graphs import Target
from flexattn.kernels_cudnn.plans import PlanCache, PlanNotSupported
from tests.support.cudnn_builds import Graph, pretended_builds

CPU = torch.device("cpu")


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[BaseException | None], list[Any]]]:
    with pretended_builds(monkeypatch) as build:
        yield build


PASSING = [
    MemoryError("no host memory"),
    torch.OutOfMemoryError("CUDA out of memory"),
    torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("CUDNN_BACKEND_TENSOR_DESCRIPTOR cudnnFinalize failed cudnn_status: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cudnnHandle Create failed cudaGetDeviceCount"),
    OSError("libnvrtc.so.13: cannot open shared object file"),
    RuntimeError("argument not found"),
    RuntimeError("Cannot load CUDA driver library"),
    cudnn.cudnnGraphNotSupportedError("CUDNN_STATUS_NOT_SUPPORTED_RUNTIME_PREREQUISITE_MISSING: Cannot load CUDA driver library"),
    cudnn.cudnnGraphNotSupportedError("Ensure the NVIDIA display driver is installed"),
    RuntimeError("CUDNN_STATUS_NOT_SUPPORTED_SUBLIBRARY_UNAVAILABLE"),
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("error", PASSING, ids=lambda e: f"{type(e).__name__}-{str(e)[:12]}")
def test_what_may_be_over_the_next_time_is_passed_on_and_not_kept(build, error) -> None:
    cache, asked = PlanCache(), build(error)
    with pytest.raises(type(error)) as e:
        cache.get("a graph", CPU)
    assert e.value is error
    assert cache.known("a graph", CPU) is None
    assert cache.counters.failures == 0
    build(None)
    assert cache.get("a graph", CPU).graph is not None
    assert asked == ["a graph"] * 2


REFUSALS = [
    cudnn.cudnnGraphNotSupportedError("no engine"),
    ValueError("dims not set"),
    TypeError("unexpected keyword"),
    RuntimeError("cudnnBackendFinalize failed: CUDNN_STATUS_NOT_SUPPORTED"),
    RuntimeError("cudnnBackendFinalize failed: CUDNN_STATUS_BAD_PARAM"),
]


@pytest.mark.parametrize("error", REFUSALS, ids=lambda e: type(e).__name__)
def test_cudnns_own_answers_are_kept_until_they_are_forgotten(build, error) -> None:
    cache, asked = PlanCache(), build(error)
    for _ in range(3):
        with pytest.raises(PlanNotSupported, match=str(error)):
            cache.get("a graph", CPU)
    assert asked == ["a graph"]
    assert cache.counters.failures == 1
    build(None)
    plan = cache.get("another", CPU)
    cache.forget_failures()
    assert cache.get("a graph", CPU).graph is not None
    assert cache.get("another", CPU) is plan


class KeptGraph(Graph):
    """A graph that can be written and read, made of its text."""

    def __init__(self, **target: Any) -> None:
        self.text = b"the plan"

    def serialize(self) -> bytes:
        return self.text

    def deserialize(self, data: list[int]) -> None:
        self.text = bytes(data)
        if self.text != b"the plan":
            raise RuntimeError("no plan of cuDNN's")


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    monkeypatch.setattr("flexattn.warn._warned", set())
    monkeypatch.setattr(plans, "target_of", lambda device: Target())
    monkeypatch.setattr(plans, "_fingerprint", lambda sdpa, device: "fingerprint")
    monkeypatch.setattr(plans, "build", lambda sdpa, target: KeptGraph())
    monkeypatch.setattr(cudnn, "pygraph", KeptGraph)
    with plans.without_device("a device that is described"):
        yield tmp_path / "plans"


def loads_of_two(directory: Path) -> tuple[int, int]:
    """Returns the number of loads from the directory if two processes want one plan."""
    caches = PlanCache(), PlanCache()
    for cache in caches:
        assert cache.get("a graph", CPU, str(directory)).graph.text == b"the plan"
    return caches[0].counters.loads, caches[1].counters.loads


def test_a_plan_is_kept_and_loaded(directory: Path) -> None:
    assert loads_of_two(directory) == (0, 1)


SPOILT: dict[str, Callable[[Path], object]] = {
    "a file in the directory's place": lambda directory: directory.write_text("mine"),
    "a directory in the file's place": lambda directory: (directory / "fingerprint.cudnn").mkdir(parents=True),
    "a directory that others can write": lambda directory: (directory.mkdir(), directory.chmod(0o777)),
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_directory_that_cannot_be_used_is_said_once_and_fails_no_call(directory: Path, name: str) -> None:
    SPOILT[name](directory)
    with pytest.warns(RuntimeWarning, match="compiled plans are not (read|written)"):
        assert loads_of_two(directory) == (0, 0)


@pytest.mark.parametrize("content", [b"", b"not a plan", b"\xff" * 1000, b"flexattn plan 2 0\nthe plan"], ids=repr)
def test_a_damaged_plan_is_built_anew(directory: Path, content: bytes) -> None:
    directory.mkdir(mode=0o700)
    (directory / "fingerprint.cudnn").write_bytes(content)
    with pytest.warns(RuntimeWarning, match="damaged"):
        assert loads_of_two(directory) == (0, 1)


def test_a_plan_that_cudnn_does_not_take_is_built_anew(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KeptGraph, "serialize", lambda self: b"another plan")
    assert loads_of_two(directory) == (0, 0)


def test_a_plan_that_cannot_be_written_down_runs(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any) -> bytes:
        raise RuntimeError("not serializable")

    monkeypatch.setattr(KeptGraph, "serialize", fail)
    assert loads_of_two(directory) == (0, 0)


def test_memory_that_is_short_while_a_plan_is_loaded_is_passed_on(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads_of_two(directory)

    def fail(self: Any, data: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(KeptGraph, "deserialize", fail)
    with pytest.raises(torch.OutOfMemoryError):
        PlanCache().get("a graph", CPU, str(directory))
