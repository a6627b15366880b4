"""The cache of cuDNN plans by itself: what it remembers of a build that fails. cuDNN is played by a function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("cudnn", reason="nvidia-cudnn-frontend is not installed")

import cudnn

from flexattn.kernels_cudnn import plans
from flexattn.kernels_cudnn.plans import PlanCache, PlanNotSupported

CPU = torch.device("cpu")


class Graph:
    def get_workspace_size(self) -> int:
        return 0


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[BaseException | None], list[Any]]]:
    """build(error): building raises it from here on, or gives a graph; the list says what was asked for."""
    monkeypatch.setattr(plans, "target_of", lambda device: None)
    asked: list[Any] = []

    def set_error(error: BaseException | None) -> list[Any]:
        def answer(sdpa: Any, target: Any) -> Graph:
            asked.append(sdpa)
            if error is not None:
                raise error
            return Graph()

        monkeypatch.setattr(plans, "build", answer)
        return asked

    with plans.without_device("a device that is described"):
        yield set_error


PASSING = [
    MemoryError("no host memory"),
    torch.OutOfMemoryError("CUDA out of memory"),
    torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("CUDNN_BACKEND_TENSOR_DESCRIPTOR cudnnFinalize failed cudnn_status: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cudnnHandle Create failed cudaGetDeviceCount"),
    OSError("libnvrtc.so.13: cannot open shared object file"),
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("error", PASSING, ids=lambda e: f"{type(e).__name__}-{str(e)[:12]}")
def test_what_may_be_over_the_next_time_is_passed_on_and_not_kept(build, error) -> None:
    cache, asked = PlanCache(), build(error)
    with pytest.raises(type(error)) as e:
        cache.get("a graph", CPU)
    assert e.value is error
    assert cache.known("a graph", CPU) is None
    assert cache.counters.refusals == 0
    build(None)
    assert cache.get("a graph", CPU).graph is not None
    assert asked == ["a graph"] * 2


REFUSALS = [
    cudnn.cudnnGraphNotSupportedError("no engine"),
    ValueError("dims not set"),
    TypeError("unexpected keyword"),
    RuntimeError("argument not found"),
]


@pytest.mark.parametrize("error", REFUSALS, ids=lambda e: type(e).__name__)
def test_cudnns_own_answers_are_kept_until_they_are_forgotten(build, error) -> None:
    cache, asked = PlanCache(), build(error)
    for _ in range(3):
        with pytest.raises(PlanNotSupported, match=str(error)):
            cache.get("a graph", CPU)
    assert asked == ["a graph"]
    assert cache.counters.refusals == 1
    build(None)
    plan = cache.get("another", CPU)
    cache.forget_refusals()
    assert cache.get("a graph", CPU).graph is not None
    assert cache.get("another", CPU) is plan
