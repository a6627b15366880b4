"""Random calls against the fuzz's own oracle (fuzz.py) for a fixed short time, and for longer with -m exhaustive.

Each run has a seed of its own, or FLEXATTN_FUZZ_SEED; the summary prints it, and a failure the command that repeats it.
"""

from __future__ import annotations

import json
import os
import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flexattn.dispatch import eager_backend, reference
from tests.conftest import FreshPython
from tests.fuzz.check import EAGER, check_by_name, place
from tests.fuzz.config import draw_config
from tests.fuzz.oracle import philox
from tests.support.guarded_memory import Allocations, Block, Layout, guarded_allocations

CALLS = {"eager": 10, "triton": 1}  # of so many configurations; in the interpreter a call takes a third of a second
SECONDS = [pytest.param(2, marks=pytest.mark.slow), pytest.param(600, marks=pytest.mark.exhaustive)]
BACKENDS = pytest.mark.parametrize("backend", ["eager", "triton"])
ENOUGH = 150  # drawn calls, among which each fault shows
Record = Callable[[str, Any], None]


def drawn_seed() -> int:
    return int(os.environ.get("FLEXATTN_FUZZ_SEED") or random.SystemRandom().randrange(10**6))


@BACKENDS
def test_random_calls(backend: str, device: str, allocations: Allocations, record_property: Record) -> None:
    device, seed = device if backend == "triton" else "cpu", drawn_seed()
    where, first = place(backend, device, []), seed * 10**9
    for name in (f"{first + n}.0" for n in range(CALLS[backend])):
        wrong = check_by_name(where, name, allocations)
        assert not wrong, "\n".join([f"python -m tests.fuzz --backend {backend} --device {device} --only {name}", *wrong])
    record_property("fuzz", f"{3 * CALLS[backend]} random calls on {backend} ({device}), seed {seed}")


@pytest.mark.parametrize("seconds", SECONDS)
@BACKENDS
def test_random_calls_of_a_run(
    backend: str, seconds: int, device: str, fresh_python: FreshPython, record_property: Record, tmp_path: Path
) -> None:
    device, seed, out = device if backend == "triton" else "cpu", drawn_seed(), tmp_path / "fuzz.json"
    options = {"backend": backend, "device": device, "seconds": seconds, "seed": seed, "out": out}
    run = fresh_python("-m", "tests.fuzz", *(f"--{name}={value}" for name, value in options.items()))
    assert out.exists(), f"seed {seed}: {run.stderr}"
    result = json.loads(out.read_text())
    record_property("fuzz", f"{result['calls of attention']} random calls on {backend} ({device}), seed {seed}")
    failures = ["\n".join([f["again"], *f["what"]]) for f in result["failures"]]
    assert not failures, f"seed {seed}: " + "\n\n".join(failures)
    assert result["calls of attention"]


@pytest.fixture
def allocations(monkeypatch: pytest.MonkeyPatch) -> Iterator[Allocations]:
    monkeypatch.setenv("FLEXATTN_CHECK", "0")  # lengths that do not fit are drawn on purpose
    with guarded_allocations() as found, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # max_seqlen may be left out
        yield found


def calls_until_found(allocations: Allocations, seeds: Iterable[int] = range(ENOUGH)) -> int | None:
    """Returns how many calls are drawn until one is wrong, if one is."""
    for seed in seeds:
        try:
            is_wrong = bool(check_by_name(EAGER, f"{seed}.0", allocations))
        except RuntimeError:  # a run takes it for a failure too
            is_wrong = True
        if is_wrong:
            return 3 * (seed + 1)
    return None


def attend_wrongly(change: Callable[[reference.Sequences, range, range, Tensor], None]) -> Callable[..., Any]:
    right = reference.attend

    def attend(spec: Any, x: Any, sequences: Any, rows: range, cols: range, *others: Any, **named: Any) -> Any:
        out, lse, row_max = right(spec, x, sequences, rows, cols, *others, **named)
        with torch.no_grad():
            change(sequences, rows, cols, out)
        return out, lse, row_max

    return attend


@pytest.mark.slow
def test_a_wrong_row_is_found(monkeypatch: pytest.MonkeyPatch, allocations: Allocations) -> None:
    def last_row(sequences: Any, rows: range, cols: range, out: Tensor) -> None:
        if len(rows) > 40:
            out[:, :, -1] *= 1.05

    monkeypatch.setattr(reference, "attend", attend_wrongly(last_row))
    assert calls_until_found(allocations)


def test_lengths_that_are_not_cut_are_found(monkeypatch: pytest.MonkeyPatch, allocations: Allocations) -> None:
    right = reference._tokens
    monkeypatch.setattr(reference, "_tokens", lambda fmt, total, cu, slot, max_seqlen: right(fmt, total, cu, slot, total))
    drawn = ((seed, draw_config(seed, EAGER)) for seed in range(20 * ENOUGH))
    packed = ((seed, config) for seed, config in drawn if config.q_format == config.kv_format == "thd")
    are_cut = (seed for seed, config in packed if config.max_seqlen == "cut" and config.bias_type == "no_bias")
    assert calls_until_found(allocations, islice(are_cut, ENOUGH))


def test_a_write_beside_an_output_is_found(monkeypatch: pytest.MonkeyPatch, allocations: Allocations) -> None:
    right = eager_backend.forward

    def forward(spec: Any, x: Any) -> Any:
        out, lse, max_logit = right(spec, x)
        lse.as_strided((1,), (1,), lse.storage_offset() + lse.numel()).fill_(0.0)
        return out, lse, max_logit

    monkeypatch.setattr(eager_backend, "forward", forward)
    assert calls_until_found(allocations) == 3


@pytest.mark.slow
def test_what_is_right_passes(allocations: Allocations) -> None:
    """A draw contains combinations that no other test has."""
    drawn = [draw_config(seed, EAGER) for seed in range(ENOUGH)]
    assert {"ordinary", "empty", "wrong lengths"} == {config.kind for config in drawn}
    assert all(any(getattr(config, name) for config in drawn) for name in ("extreme", "is_offset", "block_mask", "dropout_p"))
    for seed in range(5):
        assert check_by_name(EAGER, f"{seed}.0", allocations) == []


def test_guards() -> None:
    layouts = {"x": Layout((3, 4), (8, 2), torch.float16, offset=1), "n": Layout((2,), (1,), torch.int32)}
    block = Block(layouts, "cpu")
    x, n = block.tensors["x"], block.tensors["n"]
    assert x.data_ptr() % 16 == 2
    assert x._base is None
    x.fill_(1.0)
    n.fill_(1)
    block.remember()
    assert not block.is_changed()
    for t, where in ((x, -1), (x, 1), (x, 21), (n, -1), (n, 2)):  # before, between elements, behind
        byte = t.as_strided((1,), (1,), t.storage_offset() + where)
        kept = byte.clone()
        assert kept.isnan() or kept > 2**30
        byte.fill_(1)
        assert block.is_changed()
        byte.copy_(kept)
    assert not block.is_changed()
    with guarded_allocations() as allocations:
        out = torch.empty(5)
        assert out.isnan().all()
        out.fill_(0.0)
        assert not allocations.are_damaged()
        for where in (-1, 5):
            out = torch.empty_like(out)
            out.as_strided((1,), (1,), out.storage_offset() + where).fill_(0.0)
            assert allocations.are_damaged()


def test_the_oracles_philox() -> None:
    """Random123's known answers (kat_vectors, philox4x32 with 7 rounds)."""
    zero, ones = torch.zeros((), dtype=torch.int64), torch.full((), 0xFFFFFFFF)
    assert philox((0, 0), [zero] * 4).tolist() == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]
    assert philox((0xFFFFFFFF,) * 2, [ones] * 4).tolist() == [0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662]
