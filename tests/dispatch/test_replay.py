"""Replayed calls of tensors in one storage and of tensors apart: a replay reads the tensors that it is given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flexattn import call_cache
from flexattn.dispatch import replay
from flexattn.dispatch.recorder import Recorder
from tests.support.replayed import replay_on_cpus
from tests.support.storages import CASES, PLACES, Sizes, apart, check_replay, dense, slices

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="beside a GPU calls on a CPU are not replayed; see tests/gpu")

SIZES = Sizes(20, 16, torch.float32)


@pytest.fixture(autouse=True)
def on_cpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    replay_on_cpus(monkeypatch)
    torch.manual_seed(0)
    call_cache.clear_cache()
    yield
    call_cache.clear_cache()


WAYS = [
    ("one storage", "apart"),
    ("apart", "one storage"),
    ("one storage", "one storage, reversed"),
    ("one storage, reversed", "apart"),
]


@pytest.mark.sample(values=True)
@pytest.mark.parametrize(("recorded", "replayed"), WAYS)
@pytest.mark.parametrize("name", CASES)
def test_a_replay_reads_the_tensors_it_is_given(name: str, recorded: str, replayed: str) -> None:
    check_replay((CASES[name](SIZES), CASES[name](SIZES)), PLACES[recorded], PLACES[replayed])


@pytest.mark.parametrize("from_one", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fmt", ["sbhd", "bhsd"])
def test_slices_of_a_packed_tensor(fmt: str, from_one: bool) -> None:
    drawn = [dense(fmt)(SIZES) for _ in range(2)]
    for tensors, _ in drawn:
        tensors |= {name: torch.randn_like(tensors["q"]) for name in "kv"}
        tensors |= {name: slices(tensors)[name] for name in "qkv"}  # so that those apart have the strides
    check_replay((drawn[0], drawn[1]), *((slices, apart) if from_one else (apart, slices)))


def test_a_view_is_found_by_the_operator_that_made_it() -> None:
    """Views of views, of the second of two inputs in one storage, and by an operator whose schema tells of no alias."""
    memory = torch.zeros(2, 6)
    x, y = memory[0], memory[1]
    recorder = Recorder((x, y))
    with recorder:
        whole = y.view(2, 3)
        row = whole[1]
        wide = torch.ops.aten._unsafe_view(y, [3, 2])
        made = torch.empty(4)
        part = made[2:][1:]
        same = x.detach()
    first, second, third = (recorder.slot(t) for t in (x, y, made))
    wanted = {x: (first, 0), same: (first, 0), y: (second, 0), whole: (second, 0), row: (second, 12), wide: (second, 0)}
    for t, root in (wanted | {made: (third, 0), part: (third, 12)}).items():
        assert recorder.root(recorder.slot(t)) == root


@pytest.mark.parametrize("is_hidden", [False, True])
def test_a_part_of_an_input_that_no_operator_made_is_not_recorded(is_hidden: bool) -> None:
    x = torch.ones(3)
    hidden = x[1:]
    kernel = SimpleNamespace(
        tensors_of=list, prepare=lambda programs, arguments: SimpleNamespace(launch=lambda stream, addresses: None)
    )
    watchers: list[Any] = []

    def watched(watcher: Any) -> AbstractContextManager[None]:
        watchers.append(watcher)
        return nullcontext()

    def call() -> Tensor:
        watchers[0](kernel, 1, (hidden if is_hidden else x[1:],))
        return torch.empty(2)

    backend: Any = SimpleNamespace(watched=watched)
    _, recording = replay.record(backend, call, (x,), lambda out: (out,), torch.device("cpu"))
    assert (recording is None) == is_hidden
