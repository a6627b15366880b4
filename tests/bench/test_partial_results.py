"""The benchmark of results in float32: its variants are what their names say, and a wrong one is named."""

from __future__ import annotations

import pytest
import torch

from flexattn.bench import partial_results
from flexattn.bench.partial_results import Cell


@pytest.mark.parametrize("deterministic", [False, True])
def test_variants_are_what_their_names_say(deterministic: bool) -> None:
    cell = Cell(40, 4, 2, 16, deterministic)
    calls = partial_results.variants(cell, "cpu", "eager")
    wide = {
        name: "".join(t for t, x in zip(("q", "k", "v"), call(), strict=False) if x.dtype is torch.float32)
        for name, call in calls.items()
    }
    assert wide == {
        "forward, out in 16 bits": "",
        "forward, out in float32": "q",
        "backward, none in float32": "",
        "backward, dq in float32": "q",
        "backward, dkv in float32": "kv",
        "backward, dqkv in float32": "qkv",
    }
    assert partial_results.wrong(calls, cell) is None
    dq, dk, dv = calls["backward, dkv in float32"]()
    assert (
        partial_results.wrong(calls | {"backward, dkv in float32": lambda: (dq, dk * 1.01, dv)}, cell)
        == "backward, dkv in float32: result 1"
    )
    assert (
        partial_results.wrong(calls | {"backward, dkv in float32": lambda: (dq * 1.02, dk, dv)}, cell)
        == "backward, dkv in float32: result 0"
    )


def test_without_a_device_it_measures_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit):
            partial_results.main([])
        assert "no CUDA device" in capsys.readouterr().err
