"""Block masks that a mask_mod makes by itself: no visible block is hidden, no partial one is full, and attention uses them."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import flexattn
from flexattn import mods
from flexattn.dispatch import triton_backend
from flexattn.dispatch.mod_program import evaluate
from flexattn.kernels_triton.ahead_of_time.compile_report import request_for
from flexattn.kernels_triton.common.problem import BlockLists, Problem
from flexattn.kernels_triton.mods import mask_blocks
from flexattn.kernels_triton.runtime.launch import recorded_launches
from flexattn.mods.trace import trace_mods
from flexattn.testing import make_call, make_inputs
from tests.mods.test_score_mod_triton import HEADS, check
from tests.support.compiled_kernels import compile_sound

BLOCK = 16
LENGTH = 150  # the last block is partial


def ids(device: str, *ends: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """A document's number for each token, from the documents' ends."""
    return torch.bucketize(torch.arange(LENGTH), torch.tensor(ends), right=True).to(device, dtype)


# The results of each, and whether its blocks are known exactly, as create_block_mask knows them.
MASKS: dict[str, tuple[Any, bool]] = {
    "document": (lambda device: mods.document(ids(device, 37, 80, 81)), True),
    "document by batch": (lambda device: mods.document(torch.stack([ids(device, 50), ids(device, 9, 100)])), True),
    "causal document": (lambda device: mods.both(mods.causal(), mods.document(ids(device, 48, 100, dtype=torch.int32))), True),
    "unsorted document": (lambda device: mods.document((ids(device, 37, 80) * 7 + 2) % 5), True),
    "ids beyond what is followed": (lambda device: mods.document(ids(device, 37, 80) + 2**62), False),
    "prefix": (lambda device: mods.prefix_lm(torch.tensor([40, 100], device=device)), True),
    "padding keys": (lambda device: keep(torch.arange(LENGTH, device=device) < torch.tensor([[30], [150]], device=device)), True),
    "tree": (
        lambda device: mods.tree(*torch.tensor([[-1, 0, 1, 0], [0, 40, 70, 90], [40, 70, 90, 150]], device=device), 150),
        True,
    ),
    "natten": (lambda device: mods.natten_2d(10, 15, 3), False),
    "dilated": (lambda device: mods.dilated_sliding_window(5, 3), False),
    "window or document": (lambda device: mods.either(mods.sliding_window(4, 4), mods.document(ids(device, 60))), True),
    "by head": (lambda device: lambda b, h, i, j: (j * 2 <= i + 10 * h) | (j // 32 == 0), True),
    "counted from the end": (lambda device: shifted(torch.tensor([3, -9], device=device)), True),
    "keys counted from the end": (lambda device: same_as_before(ids(device, 37, 80)), False),
    "flags counted from the end": (lambda device: keys_of(flags(device)), False),
    "every other flag": (lambda device: every_other(flags(device)), False),
    "read at a condition": (
        lambda device: at_condition(ids(device, 37, 80), torch.linspace(-1, 2, LENGTH, device=device)),
        False,
    ),
    "number minus a position": (lambda device: lambda b, h, i, j: -j > 3 - i, True),
    "past the tensor": (lambda device: mods.document(ids(device, 37)[:70]), True),
    "remainder": (lambda device: lambda b, h, i, j: (i % 40 >= j % 40) & (j // 40 == i // 40), False),
    "where": (lambda device: lambda b, h, i, j: torch.where(b == 0, i - j, (j - i).clamp(-20, 30)) >= 25, True),
    "not": (lambda device: lambda b, h, i, j: ~((i - j > 20) | (i != i)), False),
    # Values beyond int64 wrap around, so nothing is known of them.
    "product that wraps": (lambda device: lambda b, h, i, j: i * 2**20 * 2**20 * 2**19 + j > 0, False),
    "negated": (lambda device: extremes(device, lambda x, i, j: -x[i] <= j), False),
    "absolute": (lambda device: extremes(device, lambda x, i, j: x[i].abs() <= j), False),
    "doubled": (lambda device: extremes(device, lambda x, i, j: x[i] + x[i] <= j), False),
    "difference": (lambda device: extremes(device, lambda x, i, j: x[i] - x[i + 1] <= j), False),
    "index of a head that wraps": (lambda device: wrapped_index(torch.arange(8, device=device) * 20), False),
}


def extremes(device: str, condition: Any) -> Any:
    x = torch.tensor([2**62, -(2**63), 3], device=device).repeat_interleave(LENGTH // 2)
    return lambda b, h, i, j: condition(x, i, j)


def wrapped_index(x: Tensor) -> Any:
    return lambda b, h, i, j: j >= x[((h + 2) * 1000003 * 1000003 * 1000003 * 1000003) % 8]


def keep(kept: Tensor) -> Any:
    return lambda b, h, i, j: kept[b, j]


def shifted(by: Tensor) -> Any:
    return lambda b, h, i, j: (i - j + by[b - 1]).abs() < 20


def flags(device: str) -> Tensor:
    return torch.arange(2 * LENGTH, device=device) % 50 < 40


def keys_of(shown: Tensor) -> Any:
    return lambda b, h, i, j: shown[j - 20]


def every_other(shown: Tensor) -> Any:
    return lambda b, h, i, j: shown[2 * i] | (j > i)


def at_condition(numbers: Tensor, values: Tensor) -> Any:
    return lambda b, h, i, j: numbers[torch.where(values[j] > 0, j, 0)] == numbers[i]


def same_as_before(numbers: Tensor) -> Any:
    return lambda b, h, i, j: numbers[i] == numbers[j - 20]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_blocks, "BLOCK", BLOCK)
    monkeypatch.setattr(mask_blocks, "SHORTEST", 1)
    monkeypatch.setattr(mask_blocks, "_CHUNK", 4)  # a row of blocks is examined in more than one step


def problem_of(mask: Any, device: str, **call: Any) -> tuple[Problem, Tensor]:
    """A problem with the mask's blocks, and its visible scores, [b | 1, h | 1, sq, skv]."""
    inputs = make_inputs(device=device, lengths_q=[LENGTH] * 2)
    spec, x = make_call(inputs, mods=trace_mods(None, mask), **call)
    assert spec.mods is not None
    assert spec.mods.mask is not None
    every = torch.arange(LENGTH, device=device)
    positions = {"b": every[:2].view(2, 1, 1, 1), "h": every[:HEADS].view(HEADS, 1, 1), "q_idx": every[:, None], "kv_idx": every}
    shown = evaluate(spec.mods.mask, {**positions, **spec.mods.inputs(x.mod_tensors, x.mod_numbers)}, torch.float32)
    return mask_blocks.with_mask_blocks(triton_backend.to_problem(spec, x), "backward"), shown.expand(2, HEADS, LENGTH, LENGTH)


def kinds(counts: Tensor, indices: Tensor, full_counts: Tensor, full_indices: Tensor) -> Tensor:
    return BlockLists(counts, indices, full_counts, full_indices, *[None] * 4, BLOCK, BLOCK).kinds()[..., :-1]


def kinds_of(shown: Tensor) -> Tensor:
    """0 for a block with no visible score, 2 for one in which all that exist are visible, else 1."""
    blocks = -(-LENGTH // BLOCK)
    pad = (0, blocks * BLOCK - LENGTH) * 2

    def by_block(x: Tensor, value: bool) -> Tensor:
        padded = torch.nn.functional.pad(x, pad, value=value)
        return padded.unflatten(-1, (blocks, BLOCK)).unflatten(-3, (blocks, BLOCK)).transpose(-2, -3)

    return by_block(shown, False).any(-1).any(-1).to(torch.int8) + by_block(shown, True).all(-1).all(-1).to(torch.int8)


def check_lists(problem: Problem, shown: Tensor, is_exact: bool) -> None:
    lists = problem.block_mask
    assert lists is not None
    by_keys, by_queries = kinds(*lists[:4]), kinds(*lists[4:8])
    assert torch.equal(by_keys, by_queries.mT)
    want = kinds_of(shown)
    got = by_keys.expand_as(want)
    assert not (want[got == 0] > 0).any(), "a block that shows something is hidden"
    assert not (want[got == 2] < 2).any(), "a block that hides something is called full"
    if is_exact:
        assert torch.equal(got, want)


@pytest.mark.sample
@pytest.mark.parametrize("name", MASKS)
def test_lists(name: str, device: str) -> None:
    make_mask, is_exact = MASKS[name]
    problem, shown = problem_of(make_mask(device), device)
    check_lists(problem, shown, is_exact)


@pytest.mark.parametrize("window", [(-1, 0), (20, 7)])
def test_what_the_band_hides_is_not_listed(window: tuple[int, int], device: str) -> None:
    problem, shown = problem_of(mods.document(ids(device, 37, 80)), device, window_size=window, bottom_right_diagonal=False)
    distance = torch.arange(LENGTH, device=device)[:, None] - torch.arange(LENGTH, device=device)
    band = (distance >= -window[1]) & ((distance <= window[0]) | (window[0] < 0))
    lists = problem.block_mask
    assert lists is not None
    got, mask_kinds, band_kinds = kinds(*lists[:4]), kinds_of(shown), kinds_of(band[None, None])
    assert torch.equal(got, kinds(*lists[4:8]).mT)
    assert torch.equal(got.expand_as(mask_kinds), torch.where(band_kinds > 0, mask_kinds, 0))  # the mask shows all of a full block


INTEGERS = [
    ("i", lambda i, j, t: i),
    ("j", lambda i, j, t: j),
    ("t[i]", lambda i, j, t: t[i]),
    ("t[j - 20]", lambda i, j, t: t[j - 20]),
    ("t[i // 3]", lambda i, j, t: t[i // 3]),
    ("t[5]", lambda i, j, t: t[i * 0 + 5]),
]
STEPS = [
    ("neg", lambda x, y: -x),
    ("abs", lambda x, y: x.abs()),
    ("clamp", lambda x, y: x.clamp(-7, 90)),
    ("times", lambda x, y: x * -3),
    ("floor_divide", lambda x, y: x // 16),
    ("remainder", lambda x, y: x % 40),
    ("bool", lambda x, y: (x > 20) * 30),
    ("add", operator.add),
    ("sub", operator.sub),
    ("minimum", torch.minimum),
    ("maximum", torch.maximum),
    ("where", lambda x, y: torch.where(x > y, x, y - 5)),
    ("product", operator.mul),
]
TESTS = [operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge]
JOINS = [
    lambda a, b: a & b,
    lambda a, b: a | b,
    lambda a, b: ~a & b,
    lambda a, b: a ^ b,
    lambda a, b: torch.where(a, b, ~b),
    lambda a, b: torch.logical_or(a, torch.logical_not(b)),
]
terms = st.tuples(st.sampled_from(INTEGERS), st.lists(st.tuples(st.sampled_from(STEPS), st.sampled_from(INTEGERS)), max_size=2))
tests = st.tuples(terms, st.sampled_from(TESTS), terms)


@pytest.mark.slow
@given(tests, st.sampled_from(JOINS), tests, st.integers(0, 3))
@settings(max_examples=8, deadline=None, derandomize=True)
def test_random_masks(left: Any, join: Any, right: Any, seed: int) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    table = torch.randint(-60, 160, (LENGTH - 10,), generator=torch.Generator().manual_seed(seed)).sort().values.to(device)

    def term(parts: Any, i: Any, j: Any) -> Any:
        (_, first), steps = parts
        x = first(i, j, table)
        for (_, step), (_, other) in steps:
            x = step(x, other(i, j, table))
        return x

    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        results = [test(term(x, i, j), term(y, i, j)) for x, test, y in (left, right)]
        return join(*results)

    if trace_mods(None, mask).program.mask is None:
        return  # it is always true
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(mask_blocks, "BLOCK", BLOCK)
        monkeypatch.setattr(mask_blocks, "SHORTEST", 1)
        problem, shown = problem_of(mask, device)
    if problem.block_mask is not None:
        check_lists(problem, shown, False)


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.parametrize(
    ("name", "fmt", "attn_mask_type"),
    [("causal document", "bshd", None), ("prefix", "sbhd", "causal"), ("by head", "thd", "padding_causal_bottom_right")],
)
def test_attention(name: str, fmt: str, attn_mask_type: str | None, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():  # compiled tiles are larger
        monkeypatch.setattr(mask_blocks, "BLOCK", 64)
    made: list[Any] = []
    with_mask_blocks = mask_blocks.with_mask_blocks
    monkeypatch.setattr(mask_blocks, "with_mask_blocks", lambda *x: made.append(with_mask_blocks(*x)) or made[-1])
    given = {"lengths_q": [LENGTH]} if fmt != "thd" else {"lengths_q": [70, 133], "lengths_kv": [150, 40], "gap": 3}
    call = {"attn_mask_type": attn_mask_type}
    check((None, MASKS[name][0](device)), device, call, qkv_format=fmt, dtype=torch.bfloat16, **given)
    forward, backward = (problem.block_mask for problem in made)
    assert forward.kv_indices is not None
    assert forward.q_indices is None
    assert backward.q_indices is not None


def test_where_there_are_none(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=device)
    ends = torch.tensor([20, 90], device=device)
    masks: list[Any] = [
        lambda b, h, i, j: table[i, j],
        lambda b, h, i, j: (i * j) % 3 == 0,
        lambda b, h, i, j: j < ends[(h == 1).to(torch.int64)],
    ]
    assert [problem_of(mask, device)[0].block_mask for mask in masks] == [None] * 3  # nothing is known of a block's scores
    monkeypatch.setattr(mask_blocks, "SHORTEST", LENGTH + 1)
    assert problem_of(mods.document(ids(device, 37)), device)[0].block_mask is None


def test_a_given_block_mask_stays(device: str) -> None:
    q = torch.randn(1, LENGTH, 2, 16, device=device)
    mask = mods.document(ids(device, 37))
    block_mask = flexattn.create_block_mask(mask, None, None, LENGTH, LENGTH, device, BLOCK)
    with recorded_launches() as launches:
        flexattn.attention(q, q, q, block_mask=block_mask, backend="triton")
    assert [launch.kernel.__name__ for launch in launches] == ["_attn_fwd_kernel"]
    with recorded_launches() as launches:
        flexattn.attention(q, q, q, mask_mod=mask, backend="triton")
    assert [launch.kernel.__name__ for launch in launches] == [
        "_block_ranges_kernel",
        "_mask_blocks_kernel",
        "_attn_fwd_kernel",
    ]


@pytest.mark.slow
@pytest.mark.sample(values=False)
@pytest.mark.parametrize("name", ["causal document", "natten"])
@pytest.mark.parametrize("sm", [90, 80, 100])
def test_compiled_ahead_of_time(sm: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_blocks, "BLOCK", 128)
    inputs = make_inputs(lengths_q=[LENGTH] * 2)
    spec, x = make_call(inputs, mods=trace_mods(None, MASKS[name][0]("cpu")), attn_mask_type="causal")
    with recorded_launches() as launches:
        mask_blocks.with_mask_blocks(triton_backend.to_problem(spec, x), "backward")
    assert len(launches) == {"causal document": 3, "natten": 2}[name]  # natten reads nothing
    for report in compile_sound([request_for(launch, sm) for launch in launches]):
        assert report.spill_store_bytes == 0
        assert report.shared_bytes < 48 * 1024
