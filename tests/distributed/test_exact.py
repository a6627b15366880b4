"""Attention over 2 and 4 ranks equals that of one process, forward and backward; the calls are in context_parallel_calls.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import FreshPython
from tests.support.ranks import run_ranks


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_feature(ranks: int, forked_python: FreshPython, tmp_path: Path) -> None:
    run_ranks(forked_python, tmp_path, "features", ranks)


def test_decoding_layouts_and_wrapped_calls(forked_python: FreshPython, tmp_path: Path) -> None:
    run_ranks(forked_python, tmp_path, "others", 2)


def test_ranks_that_differ_or_do_not_come(forked_python: FreshPython, tmp_path: Path) -> None:
    run_ranks(forked_python, tmp_path, "faults", 2)


@pytest.mark.slow
@pytest.mark.parametrize("suite", ["all_features", "drawn", "in_float32"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_strategy_in_every_layout(ranks: int, suite: str, forked_python: FreshPython, tmp_path: Path) -> None:
    run_ranks(forked_python, tmp_path, suite, ranks)
