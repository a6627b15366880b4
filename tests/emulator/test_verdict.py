"""The text that a kernel developer gets."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flexattn import emulator
from tests.support import gluon_samples as samples


def hand_over(seed: int, sync: bool = True) -> emulator.Report:
    x, y = torch.randn(128), torch.empty(128)
    options = emulator.Options(race_detector=False)
    report = emulator.launch(samples.hand_over, (1,), x, y, SYNC=sync, INIT=1, REGISTERS=64, seed=seed, options=options)
    torch.testing.assert_close(y, x)
    return report


def test_clean() -> None:
    verdict = emulator.judge(hand_over)
    assert verdict.is_clean
    assert str(verdict) == (
        "hand_over: 24 seeds (1 eager, 1 lazy, 1 round-robin, 21 random)\n"
        "grid (1, 1, 1), 520 bytes of shared memory, registers a thread: 256, 64, 0 wgmma\n\nclean"
    )


def test_wrong_numbers_and_bugs() -> None:
    verdict = emulator.judge(lambda seed: hand_over(seed, sync=False), range(12), "no barrier")
    assert not verdict.is_clean
    assert 0 < len(verdict.wrong) < 12
    text = str(verdict)
    assert text.startswith("no barrier: 12 seeds")
    assert f"wrong numbers, on {len(verdict.wrong)} of 12 seeds" in text
    assert "Tensor-likes are not close" in text
    race = emulator.judge(
        lambda seed: emulator.launch(samples.hand_over, (1,), *torch.zeros(2, 128), SYNC=False, INIT=1, REGISTERS=64, seed=seed)
    )
    assert "bug: race, on 24 of 24 seeds: two accesses to shared or tensor memory" in str(race)
    assert str(race).endswith("not clean")


def test_by_name(tmp_path: Path) -> None:
    here = Path(__file__)
    assert emulator.judge_by_name(f"{here}:hand_over", range(2)).name == f"{here}:hand_over"
    assert emulator.judge_by_name(f"{here.stem}:hand_over", range(2)).is_clean


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("kernels", "names no run"),
        ("kernels.py:", "names no run"),
        ("missing.py:run", "there is no file missing.py"),
        (f"{__file__}:run", "has no function run"),
    ],
)
def test_a_name_that_is_none(target: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        emulator.judge_by_name(target)
