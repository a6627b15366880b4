"""A function in the place of cuDNN's build of graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from flexattn.kernels_cudnn import plans


class Graph:
    def get_workspace_size(self) -> int:
        return 0


@contextmanager
def pretended_builds(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[BaseException | None], list[Any]]]:
    """build(error): from here on a build raises it, or returns a graph if it is None; the list has all requests."""
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
