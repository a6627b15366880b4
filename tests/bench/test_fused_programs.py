"""The benchmark of persistent backwards: its calls have both kernels' rows, and it needs a device."""

from __future__ import annotations

import pytest
import torch

from flexattn.bench import fused_programs
from flexattn.bench.counts import band_of
from flexattn.bench.shapes import Workload
from flexattn.kernels_triton.common.crossovers import TILES, Rule
from flexattn.kernels_triton.common.tiles import HOPPER_FUSED


def test_every_persistent_tile_is_measured() -> None:
    cells = list(fused_programs.workloads())
    assert len({cell.name for cell in cells}) == len(cells)
    for rule in TILES["sm_90 fused"]:
        if HOPPER_FUSED[rule.tile].is_persistent:
            assert any(_is_for(rule, cell) for cell in cells), rule


def _is_for(rule: Rule, cell: Workload) -> bool:
    left, right, _ = band_of(cell)
    assert rule.tokens is not None
    first, last = rule.tokens
    assert first is not None
    assert last is not None
    mask = "windowed" if left is not None else "open" if right is None else "causal"
    is_plain = cell.head_dim_qk == rule.head_dim and cell.group_size == 1 and not cell.score
    return is_plain and mask == rule.mask and first <= cell.seqlen_q <= last


def test_without_a_device_it_measures_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit):
            fused_programs.main([])
        assert "compute capability 9.0" in capsys.readouterr().err
