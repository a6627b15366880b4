"""Replayed calls of tensors in one storage and of tensors apart: a replay reads the tensors that it is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flexattn import attention, call_cache
from flexattn.dispatch import replay
from flexattn.dispatch.recorder import Recorder
from tests.support.replayed import allocate_only, replay_on_cpus
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


@pytest.mark.sample
@pytest.mark.parametrize(("recorded", "replayed"), WAYS)
@pytest.mark.parametrize("name", CASES)
def test_a_replay_reads_the_tensors_it_is_given(name: str, recorded: str, replayed: str) -> None:
    check_replay((CASES[name](SIZES), CASES[name](SIZES)), PLACES[recorded], PLACES[replayed])


@pytest.mark.slow
@pytest.mark.parametrize("from_one", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fmt", ["sbhd", "bhsd"])
def test_slices_of_a_packed_tensor(fmt: str, from_one: bool) -> None:
    drawn = [dense(fmt)(SIZES) for _ in range(2)]
    for tensors, _ in drawn:
        tensors |= {name: torch.randn_like(tensors["q"]) for name in "kv"}
        tensors |= {name: slices(tensors)[name] for name in "qkv"}  # so that separate tensors have the strides
    check_replay((drawn[0], drawn[1]), *((slices, apart) if from_one else (apart, slices)))


def test_a_view_is_found_by_the_operator_that_made_it() -> None:
    """Views of views, views of the second of two inputs in one storage, and an operator whose schema names no alias."""
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


def scaled(factor: float, offset: float) -> Callable[..., Tensor]:
    return lambda score, b, h, q_idx, kv_idx: score * factor + offset * (kv_idx - q_idx)


NUMBERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "softmax_scale": ({"softmax_scale": 0.5}, {"softmax_scale": 0.125}),
    "softcap": ({"softmax_scale": 0.5, "softcap": 3.0}, {"softmax_scale": 0.25, "softcap": 1.5}),
    "captured": ({"score_mod": scaled(0.5, 0.25)}, {"score_mod": scaled(0.25, -0.5)}),
}
APART: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a scale of 0": ({"softmax_scale": 0.5}, {"softmax_scale": 0.0}),
    "no softcap": ({"softmax_scale": 0.5, "softcap": 3.0}, {"softmax_scale": 0.5, "softcap": 0.0}),
    "a large softcap": ({"softmax_scale": 0.5, "softcap": 3.0}, {"softmax_scale": 0.5, "softcap": 300.0}),
}


@pytest.mark.sample
@pytest.mark.parametrize("name", [*NUMBERS, *APART])
def test_a_call_with_other_numbers_replays_recordings_with_its_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both directions are replayed in its first call, unless launchers choose otherwise for its numbers."""
    allocate_only(monkeypatch)
    before, after = (NUMBERS | APART)[name]
    leaves = [torch.randn(1, 20, 2, 16, requires_grad=True) for _ in "qkv"]

    def results(numbers: dict[str, Any]) -> list[Tensor]:
        out = attention(*leaves, attn_mask_type="causal", backend="triton", **numbers)
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    want = results(after)
    call_cache.clear_cache()
    for _ in range(3):
        first = results(before)
    assert call_cache.cache_info()["recordings"] == 2
    for _ in range(3):
        for a, b in zip(results(after), want, strict=True):
            assert torch.equal(a, b)
    assert call_cache.cache_info()["recordings"] == (2 if name in NUMBERS else 4)
    for a, b in zip(results(before), first, strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(first[0], want[0])


@pytest.mark.parametrize("numbers", [None, (0.5, 0.0), (0.5, 0.0, 2.0)])
def test_numbers_that_launches_do_not_have_by_name_are_not_replaced(numbers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch's softmax_scale differs from the call's, or torch's operators run too and may contain it."""
    allocate_only(monkeypatch)
    x = torch.ones(3)
    watchers: list[Any] = []

    def watched(watcher: Any) -> AbstractContextManager[None]:
        watchers.append(watcher)
        return nullcontext()

    def kernel(scale: float) -> Any:
        prepared = SimpleNamespace(launch=lambda stream, addresses: None, has_numbers=lambda numbers: numbers[0] == scale)
        return SimpleNamespace(tensors_of=list, prepare=lambda programs, arguments: prepared)

    def recorded(scale: float, also: Callable[[Tensor], Tensor]) -> replay.Recording:
        def call() -> Tensor:
            out = torch.empty(2)
            watchers[-1](kernel(scale), 1, (x, out))
            return also(out)

        backend: Any = SimpleNamespace(watched=watched)
        _, recording = replay.record(backend, call, (x,), lambda out: (out,), torch.device("cpu"), None, numbers)
        assert recording is not None
        return recording

    assert recorded(0.5, lambda out: out).numbers == numbers
    assert recorded(0.25, lambda out: out).numbers is None
    assert recorded(0.5, lambda out: out * 2).numbers is None
    assert recorded(0.25, lambda out: out).with_numbers((0.5, 0.0)) is None
