"""The command that compares FP8 recipes with float64 prints its page's numbers."""

from __future__ import annotations

import re

import pytest
import torch

from flexattn.bench import fp8
from tests.conftest import ROOT


@pytest.mark.slow
def test_the_page_shows_the_numbers_that_the_command_prints() -> None:
    page = (ROOT / "docs" / "accuracy.md").read_text("utf-8")
    for kind, recipe, found in fp8.accuracy(256, torch.device("cpu"), "eager"):
        row = re.search(rf"^{kind} +{re.escape(recipe)} +((?:\d\.\d+ *)+)$", page, re.MULTILINE)
        assert row is not None, (kind, recipe)
        shown = [float(number) for number in row[1].split()]
        assert shown[::2] == pytest.approx([rms for rms, _ in found], rel=0.05, abs=1e-4)
        assert shown[1::2] == pytest.approx([largest for _, largest in found], rel=0.3, abs=1e-4)
