"""The choices of `auto` in the calls of tests/device/small_calls.py, beside the measured times of all candidates."""

from __future__ import annotations

import math

import pytest

from flexattn.kernels_triton.runtime.device import pretended_device
from flexattn.kernels_triton.runtime.launch import recorded_launches
from tests.conftest import ROOT
from tests.device import small_calls

RESULTS = ROOT / "bench" / "results"
# The mean and the maximum of auto's time in multiples of the fastest candidate's, and the number of calls above 1.1. The rules come
# from all files but the drawn one, which set five thresholds.
BOUNDS = {
    "small_calls_h200": (1.008, 1.25, 12),
    "small_calls_64_h200": (1.015, 1.25, 1),
    "small_calls_drawn_h200": (1.026, 1.3, 12),
    "small_calls_few_h200": (1.026, 1.35, 46),
    "small_calls_few_alone_h200": (1.005, 1.1, 0),
    "small_calls_unequal_h200": (1.01, 1.4, 6),
    "small_calls_modified_h200": (1.012, 1.4, 9),
    "small_calls_modified_more_h200": (1.012, 1.45, 4),
}


def test_each_result_file_has_bounds() -> None:
    assert {path.stem for path in RESULTS.glob("small_calls*.json")} == set(BOUNDS)


@pytest.mark.parametrize(
    ("name", "direction"),
    [(name, way) for name in BOUNDS for way in ("forward", "backward") if "few" not in name or way == "forward"],
)
def test_auto_takes_nearly_the_fastest_kernel(name: str, direction: str) -> None:
    ratios = small_calls.regrets(RESULTS / f"{name}.json")[direction]
    mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
    worst = max(ratios, key=ratios.__getitem__)
    slow = [call for call, ratio in ratios.items() if ratio > 1.1]
    most_mean, most, most_slow = BOUNDS[name]
    assert mean <= most_mean
    assert ratios[worst] <= most, worst
    assert len(slow) <= most_slow, slow


def test_each_candidate_is_launched_and_the_choice_is_one_of_them() -> None:
    chosen = [
        *small_calls.drawn_shapes(24),
        *list(small_calls.modified_shapes())[::17],
        *list(small_calls.more_modified_shapes())[::17],
    ]
    masks = {*small_calls.MANY_MASKS, *small_calls.modified_calls.MASKS}
    assert {shape.mask for shape in chosen} == masks
    with pretended_device(90, 132), recorded_launches() as launches:
        for call in (call for shape in chosen for call in small_calls.calls_of(shape, "meta")):
            candidates = small_calls.candidates(call)
            assert next(iter(candidates)) == "portable"
            assert small_calls.choice_of(call) in candidates
            for family, tile in candidates.values():
                before = len(launches)
                family.run(call, tile)
                assert len(launches) > before
