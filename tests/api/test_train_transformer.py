"""docs/train_transformer.py: a model that is trained through attention() learns."""

from __future__ import annotations

import importlib.util

import pytest

from tests.conftest import ROOT


@pytest.mark.slow
def test_the_loss_falls() -> None:
    spec = importlib.util.spec_from_file_location("train_transformer", ROOT / "docs" / "train_transformer.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    first, *_, last = script.main(["--steps", "41", "--device", "cpu"])
    assert last < 0.6 * first
