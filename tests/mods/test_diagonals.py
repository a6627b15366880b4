"""Parts of a mod that are computed once: for a head before the loops, for a distance in a table.

Results are compared with the fp64 reference.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flexattn import create_block_mask, mods
from flexattn.block_mask import block_lists
from flexattn.dispatch import triton_backend
from flexattn.kernels_triton.mods import diagonals
from flexattn.kernels_triton.mods.diagonals import with_diagonals
from flexattn.kernels_triton.mods.hoisting import hoist
from flexattn.kernels_triton.mods.lowering import layouts, num_outputs, source_of
from flexattn.mods.trace import mod_source, trace_mods
from flexattn.testing import make_call, make_inputs
from tests.mods.test_score_mod_triton import HEADS, check, lengths, rand
from tests.support.memory_check import checked_memory

TABLE = torch.arange(40.0)


@pytest.fixture
def tabulated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tables are made even if there are few scores; yields the numbers of tables that calls made."""
    made: list[int] = []
    monkeypatch.setattr(diagonals, "TABLE_SCORES", 0)
    monkeypatch.setattr(diagonals, "TABLE_SCORES_OF_ENTRY", 0)

    def watched(problem: Any) -> Any:
        new = with_diagonals(problem)
        made.append(0 if new is problem else new.mods.num_tables)
        return new

    monkeypatch.setattr(diagonals, "with_diagonals", watched)
    return made


def t5(device: str) -> tuple[Any, Any]:
    return mods.relative_bias(rand(32, HEADS, device=device).requires_grad_(), max_distance=30), None


def decay_and_mask(device: str) -> tuple[Any, Any]:
    """Two tables in the score, one of them in the derivative too, differing by batch and head; and one in the mask."""
    rates, shifts = rand(4, HEADS, device=device).abs().requires_grad_(), rand(90, device=device, dtype=torch.bfloat16)
    visible = rand(300, device=device) > -1.2

    def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return score * torch.exp(-rates[b, h] * (i - j).abs() * 0.1) + shifts[j - i + 45]

    return score_mod, lambda b, h, i, j: visible[i - j] | (h == 1)


def from_the_head_alone(device: str) -> tuple[Any, Any]:
    slopes, limits = rand(HEADS, device=device).requires_grad_(), torch.tensor([30, 5, 50, 0], device=device)

    def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return slopes[h] * (j - i) * 0.1 + (score * 2.0 ** -(h + 1) - slopes[h]) + (i - j) * slopes[h]

    return score_mod, lambda b, h, i, j: (j < limits[b]) | (i - j == 1)


CASES = [(t5, 1, "thd"), (decay_and_mask, 4, "bshd"), (from_the_head_alone, 0, "thd")]
MORE = [(t5, 1, "bshd"), (decay_and_mask, 4, "thd"), (from_the_head_alone, 0, "bshd")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make_mods", "tables", "fmt"), [*CASES, *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in MORE)]
)
def test_results(make_mods: Any, tables: int, fmt: str, tabulated: list[int], device: str) -> None:
    mask = {"thd": "padding_causal_bottom_right", "bshd": "padding"}[fmt]
    dtype = {"thd": torch.bfloat16, "bshd": torch.float32}[fmt]
    inputs: dict[str, Any] = {"lengths_q": lengths(37, 0, 5), "lengths_kv": lengths(50, 9, 0), "gap": 3}
    call = {"attn_mask_type": mask, "deterministic": dtype is torch.float32}  # atomics lose more than fp32's budget
    check(make_mods(device), device, call, qkv_format=fmt, padding=True, dtype=dtype, **inputs)
    assert tabulated == [tables, tables]


def test_blocks_past_the_end(tabulated: list[int], device: str) -> None:
    """If a block begins before a sequence's end and goes far past it, its tiles are within the tables."""
    (length,) = lengths(40)
    mask = create_block_mask(mods.causal(), None, None, length, length, device, BLOCK_SIZE=512)
    lists = block_lists(mask, 1, 1, length, length, mask.kv_indices.device)
    inputs: dict[str, Any] = {"lengths_q": [length], "lengths_kv": [length], "num_heads": 1, "num_heads_kv": 1}
    with checked_memory():
        check((t5(device)[0], mask.mask_mod), device, {"blocks": lists, "deterministic": True}, **inputs)
    assert tabulated == [1, 1]


YES = {
    "one read": lambda s, b, h, i, j: s + TABLE[i - j],
    "an offset": lambda s, b, h, i, j: s + TABLE[5 - j + h + (i - 3)],
    "twice the distance": lambda s, b, h, i, j: s + TABLE[2 * i - j * 2],
    "clamped": lambda s, b, h, i, j: s * TABLE[(j - i).abs().clamp(0, 9) // 2],
    "a number for a head": lambda s, b, h, i, j: s + TABLE[h] * TABLE[i - j],
    "nothing read": lambda s, b, h, i, j: s + torch.log1p((i - j).abs()),
}
NO = {
    "cheap": lambda s, b, h, i, j: s + (i - j).abs() * TABLE[h],
    "twice a position": lambda s, b, h, i, j: s + TABLE[2 * i - j],
    "rounded first": lambda s, b, h, i, j: s + TABLE[i // 2 - j // 2],
    "a position": lambda s, b, h, i, j: s + TABLE[j],
    "the score": lambda s, b, h, i, j: torch.exp(s * (i - j)),
    "a whole number": lambda s, b, h, i, j: s + TABLE[(TABLE[i - j]).to(torch.int64) + j] * 0 + j,
}


@pytest.mark.parametrize("name", [*YES, *NO])
def test_functions_of_a_distance_are_tabulated(name: str) -> None:
    traced = trace_mods((YES | NO)[name], None)
    found = hoist((traced.program.score, None, None), tabulates=True)
    assert num_outputs(found.per_distance) == int(name in YES or name == "a whole number")  # the last name's inner read


def test_what_a_head_reads_is_read_before_the_loop() -> None:
    slopes, documents = torch.rand(HEADS), torch.arange(90)
    traced = trace_mods(lambda s, b, h, i, j: s * slopes[h] + 2.0**-h, lambda b, h, i, j: documents[b] < j, needs_grad=True)
    captures = [(c.name, c.dtype, c.ndim) for c in traced.program.captures]
    lowered, with_tables = triton_backend._lowered(traced.program, layouts(captures, traced.tensors), False)
    assert with_tables is None
    for function in (lowered.score, lowered.gradient, lowered.mask):
        assert "tl.load" not in source_of(function)
    assert source_of(lowered.per_head).count("tl.load") == 2
    nothing = trace_mods(mods.softcap(2.0), None)
    assert triton_backend._lowered(nothing.program, layouts([("cap", torch.float32, -1)], ()), False)[0].per_head is None


def test_a_product_is_subtracted_from_the_score() -> None:
    """The score's scale then is part of a multiply-add."""
    for mod in (lambda s, b, h, i, j: s + TABLE[h] * (j - i), lambda s, b, h, i, j: (j - i) * TABLE[h] + s):
        source = mod_source(mod)
        assert "neg = -table_value" in source[: source.index("def score_mod_")]
        assert "= score - mul" in source


def test_tables_are_for_many_scores(device: str) -> None:
    """For a decoded token or a short sequence, kernels read the captures themselves."""
    for length_q, length_kv, heads, is_tabulated in ((1, 4096, 64, False), (64, 64, 8, False), (256, 256, 8, True)):
        sizes = {"lengths_q": [length_q], "lengths_kv": [length_kv], "num_heads": heads, "num_heads_kv": heads, "head_dim_qk": 8}
        given = make_inputs(**sizes, device=device)
        spec, x = make_call(given, mods=trace_mods(mods.relative_bias(rand(32, heads, device=device)), None))
        problem = triton_backend.to_problem(spec, x)
        assert (with_diagonals(problem) is not problem) == is_tabulated


def test_the_source_says_it() -> None:
    source = mod_source(YES["a number for a head"])
    assert source.index("def per_distance_") < source.index("def per_head_") < source.index("def score_mod_")
    assert "mod_math.read_diagonal" in source
