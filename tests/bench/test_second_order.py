"""The benchmark of second derivatives: its calls, and its check of tiles, on small cells."""

from __future__ import annotations

import pytest
import torch

from flexattn import attention
from flexattn.bench import harness, second_order

SHAPE = (1, 18, 1, 16)


@pytest.mark.slow
def test_calls_equal_those_of_the_math_backend() -> None:
    ours, wanted = (second_order.calls_of(attend, SHAPE, "cpu") for attend in (attention, second_order.math_backend))
    for direction, call in ours.items():
        torch.testing.assert_close(call(), wanted[direction](), rtol=5e-2, atol=5e-2)


def test_a_wrong_result_is_named() -> None:
    calls = second_order.calls_of(attention, SHAPE, "cpu")
    assert not second_order.wrong(calls, SHAPE, "cpu")
    calls["jvp"] = lambda: torch.func.jvp(attention, tuple(qkv := second_order.qkv_of(SHAPE, "cpu")[:3]), tuple(qkv))
    assert second_order.wrong(calls, SHAPE, "cpu").startswith("jvp: error")


@pytest.mark.parametrize("kernel", ["tangent", "keys"])
def test_a_tile_that_computes_nothing_is_found(kernel: str) -> None:
    tiles = {name: [(16, 16, 4, 1), (32, 16, 4, 1)] for name in second_order.TILES}
    found = second_order.candidates(kernel, SHAPE, "cpu", tiles)
    first, second = (candidate.results for candidate in found)
    found[0].run()
    for result in second:
        result.zero_()
    assert second_order.error_of(second, first) > harness.WORST
    found[1].run()
    assert second_order.error_of(second, first) < harness.WORST
