"""TransformerEngine's module over 2 and 4 ranks equals that of one process; the cases are in tests/support/te_ranks.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import FreshPython
from tests.support.ranks import run_ranks


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.exhaustive)])
def test_every_way_of_communicating(ranks: int, forked_python: FreshPython, tmp_path: Path) -> None:
    run_ranks(forked_python, tmp_path, "served", ranks, module="tests.support.te_ranks")


@pytest.mark.slow
def test_compiled(forked_python: FreshPython, tmp_path: Path) -> None:
    run_ranks(forked_python, tmp_path, "compiled", 2, module="tests.support.te_ranks")
