"""Captures of a mod are reused without a search, and searched again when a value that the mod reads has changed."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import flexattn
from flexattn.mods import captures
from flexattn.mods.captures import MEMO, Captures, find_captures
from flexattn.mods.trace import trace_mods

SOURCE = """
def inner(score):
    return score * factor

def mod(score, b, h, q_idx, kv_idx, bias=1.0):
    return inner(score) + abs(table[h]) * scale + holder.weight[h] * holder.power(2) + bias + settings.shift
"""


class Holder(torch.nn.Module):
    exponent = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def power(self, x: int) -> int:
        return int(x**self.exponent)


def make() -> tuple[Any, dict[str, Any]]:
    names: dict[str, Any] = {
        "factor": 0.5,
        "scale": 3,
        "table": torch.ones(4),
        "holder": Holder(),
        "settings": types.ModuleType("settings"),
        "__name__": "mods",
    }
    names["settings"].shift = 7
    exec(SOURCE, names)
    return names["mod"], names


def walked(mod: Any) -> Captures:
    """Returns the captures that a walk finds."""
    memo = mod.__dict__.pop(MEMO, None)
    found = find_captures(mod)
    mod.__dict__.pop(MEMO, None)
    if memo is not None:
        mod.__dict__[MEMO] = memo
    return found


def defaults(names: dict[str, Any]) -> None:
    names["mod"].__defaults__ = (2.0,)


def code(names: dict[str, Any]) -> None:
    names["inner"].__code__ = (lambda score: score * factor * 2).__code__  # type: ignore[name-defined] # noqa: F821


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a float": lambda names: names.update(factor=0.25),
    "an int": lambda names: names.update(scale=4),
    "a tensor": lambda names: names.update(table=torch.zeros(4)),
    "a tensor of another dtype": lambda names: names.update(table=torch.ones(4, dtype=torch.float16)),
    "requires_grad": lambda names: names["table"].requires_grad_(),
    "a builtin's name": lambda names: names.update(abs=torch.square),
    "a function": lambda names: names.update(inner=lambda score: score),
    "its code": code,
    "defaults": defaults,
    "a module's attribute": lambda names: setattr(names["settings"], "shift", 8),
    "a parameter": lambda names: setattr(names["holder"], "weight", torch.nn.Parameter(torch.zeros(4))),
    "an attribute that hides the class's": lambda names: setattr(names["holder"], "exponent", 3),
    "another object": lambda names: names.update(holder=Holder()),
}


def same(a: Captures, b: Captures) -> bool:
    return (
        a.key == b.key
        and a.floats == b.floats
        and [(name, id(t)) for name, t in a.tensors] == [(name, id(t)) for name, t in b.tensors]
    )


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen(name: str) -> None:
    mod, names = make()
    before = find_captures(mod)
    assert before.key is not None
    assert find_captures(mod) is before
    CHANGES[name](names)
    after = find_captures(mod)
    assert after is not before
    assert same(after, walked(mod))
    assert not same(after, before)
    assert find_captures(mod) is after


def test_a_class_that_changes_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    mod, _ = make()
    before = find_captures(mod)
    monkeypatch.setattr(Holder, "exponent", 5)
    assert find_captures(mod).key != before.key
    monkeypatch.setattr(Holder, "power", lambda self, x: x)
    assert same(find_captures(mod), walked(mod))


def test_grad_mode_is_seen() -> None:
    mod, names = make()
    names["table"].requires_grad_()
    before = find_captures(mod)
    with torch.no_grad():
        assert find_captures(mod).key != before.key
    assert find_captures(mod).key == before.key


def test_a_cell_that_is_bound_anew_is_seen() -> None:
    slopes, by = torch.ones(4), 1

    def mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score * by + slopes[h]

    before = find_captures(mod)
    by = 2
    after = find_captures(mod)
    assert after.key != before.key
    slopes = torch.zeros(4)
    assert find_captures(mod).tensors[0][1] is slopes


def test_lists_and_dicts_are_looked_at_each_time() -> None:
    values = [1, 2]

    def mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score * values[0]

    before = find_captures(mod)
    values[0] = 3
    assert find_captures(mod).key != before.key


def test_what_wraps_copies_is_not_believed() -> None:
    mod, _ = make()
    find_captures(mod)

    @functools.wraps(mod)
    def wrapper(score: Tensor, *others: Tensor) -> Tensor:
        return score

    assert MEMO in wrapper.__dict__
    assert same(find_captures(wrapper), walked(wrapper))


def test_a_mod_with_captures_of_two_dtypes() -> None:
    """The dtype of a capture is part of its trace, because a mod may depend on it."""

    def make(table: Tensor) -> Any:
        def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score * table[h] if table.dtype.is_floating_point else score - 2.0 * table[h]

        return score_mod

    q, k, v = (torch.randn(1, 6, 2, 8) for _ in "qkv")
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * 8**-0.5
    table = torch.tensor([3, 1])
    for dtype in (torch.float32, torch.int64, torch.float64, torch.int32, torch.float32):
        factors = table.view(2, 1, 1)
        modified = scores * factors if dtype.is_floating_point else scores - 2.0 * factors
        wanted = torch.einsum("bhij,bjhd->bihd", modified.softmax(-1), v)
        for _ in range(3):
            out = flexattn.attention(q, k, v, score_mod=make(table.to(dtype)))
            torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)


MANY = 100_000


@pytest.mark.sample
@pytest.mark.parametrize(
    "make",
    [
        lambda offset: [float(i) + offset for i in range(MANY)],
        lambda offset: tuple(float(i) + offset for i in range(MANY)),
        lambda offset: [[float(i + j) + offset for j in range(500)] for i in range(MANY // 500)],
        lambda offset: {i: float(i) + offset for i in range(MANY)},
        lambda offset: [i + int(offset * 2) for i in range(MANY)],
    ],
    ids=["list", "tuple", "nested", "dict", "ints"],
)
def test_many_captured_numbers_are_constants_whose_key_is_made_at_once(make: Any) -> None:
    def mod_of(table: Any) -> Any:
        def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            row = table[3]
            return score * (row[0] if isinstance(row, list) else row)

        return mod

    found = find_captures(mod_of(make(0.0)))
    assert found.key is not None
    assert not found.floats
    assert find_captures(mod_of(make(0.0))).key == found.key
    assert find_captures(mod_of(make(0.5))).key != found.key
    traced = trace_mods(mod_of(make(0.5)), None)
    assert traced.numbers == ()
    with watched_visits() as visits:
        find_captures(mod_of(make(0.0)))
    assert len(visits) < 2000


@contextlib.contextmanager
def watched_visits() -> Iterator[list[str]]:
    """Yields the names of the values that walks visit one by one."""
    visits: list[str] = []
    visit = captures._Walk.visit

    def watched(self: Any, name: str, *arguments: Any, **named: Any) -> Any:
        visits.append(name)
        return visit(self, name, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(captures._Walk, "visit", watched)
        yield visits


def test_a_thousand_captured_numbers_are_inputs() -> None:
    def mod_of(table: Any) -> Any:
        return lambda score, b, h, q_idx, kv_idx: score * table[3]

    few, other, many = (find_captures(mod_of([float(i) * k for i in range(n)])) for n, k in ((1000, 1), (1000, 2), (1001, 1)))
    assert (len(few.floats), len(many.floats)) == (1000, 0)
    assert few.key == other.key
