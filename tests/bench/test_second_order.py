"""The benchmark of second derivatives: its calls and its check, on a small cell."""

from __future__ import annotations

import pytest
import torch

from flexattn import attention
from flexattn.bench import second_order

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


def test_lines_of_rows() -> None:
    row = {"cell": "8 x 2048", "implementation": "math"}
    measured = row | {"direction": "jvp", "us": 7.4, "peak_mib": 3.0}
    assert second_order.line(measured).split() == ["8", "x", "2048", "math", "jvp", "7", "us", "3", "MiB"]
    assert second_order.line(row | {"error": "jvp: error 1e-1"}).endswith("jvp: error 1e-1")
