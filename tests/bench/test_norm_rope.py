"""The benchmark of QK-norm with rotary positions: its forms and its comparison with float64, on small shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flexattn.bench import harness, norm_rope
from flexattn.bench.measure import Samples
from flexattn.bench.norm_rope import Shape

SHAPES = (Shape(5, 2, 1, 16, 16), Shape(5, 2, 1, 32, 8, zero_centered=True), Shape(5, 2, 2, 16, 16, interleaved=True))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_forms_agree_and_a_wrong_result_is_named(shape: Shape) -> None:
    x = norm_rope.inputs_of(shape, torch.float32, "cpu")
    forms = {
        form: norm_rope.results_of(norm_rope.calls_of(form, shape, x, compiles=False)) for form in (norm_rope.ours, norm_rope.fused)
    }
    exact = norm_rope.in_float64(shape, x)
    written = norm_rope.results_of(norm_rope.calls_of(norm_rope.as_written, shape, x, compiles=False))
    for got, wanted in zip(written, exact, strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-4)
    got = forms[norm_rope.ours]
    assert norm_rope.wrong(got, exact, forms[norm_rope.fused]) == ""
    got[-1][0] += 0.01
    assert norm_rope.wrong(got, exact, forms[norm_rope.fused]).startswith("dk_weight: error")


def test_speed_is_that_beside_the_faster_form(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(calls: dict[str, Any], budget_ms: float) -> dict[str, Samples]:
        return {name: Samples([ms] * 3, []) for name, ms in zip(calls, (1.0, 3.0, 2.0), strict=True)}

    monkeypatch.setattr(harness, "time_on_device", timed)
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    rows = list(norm_rope.measure(SHAPES[1], "cpu"))
    assert [row["speed"] for row in rows if "speed" in row] == [2.0, 2.0]
    monkeypatch.setattr(norm_rope, "ours", lambda shape, *tensors: [1.1 * t for t in norm_rope.fused(shape, *tensors)])
    monkeypatch.setattr(norm_rope, "tables_of", lambda function, shape, x: (x.cos, x.sin))
    [row] = norm_rope.measure(SHAPES[0], "cpu")
    assert row["status"] == "wrong"
