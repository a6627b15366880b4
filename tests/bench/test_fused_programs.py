"""The benchmark of persistent backwards: its calls have both kernels' rows, and it needs a device."""

from __future__ import annotations

import pytest
import torch

from flexattn.bench import fused_programs
from flexattn.bench.counts import band_of
from flexattn.kernels_triton.common.tiles import HOPPER_FUSED


def test_every_persistent_row_is_measured() -> None:
    cells = list(fused_programs.workloads())
    assert len({cell.name for cell in cells}) == len(cells)
    for tile in (tile for tile in HOPPER_FUSED if tile.is_persistent):
        for kind in ("open", "causal", "windowed"):
            first = getattr(tile, f"{kind}_from")
            fitting = []
            for cell in cells:
                left, right, _ = band_of(cell)
                own = "windowed" if left is not None else "open" if right is None else "causal"
                fits = cell.head_dim_qk == tile.head_dim and cell.group_size == 1 and own == kind and not cell.score
                fitting += [cell] if fits and first <= cell.seqlen_q <= tile.up_to else []
            assert fitting or first == 2**31, (tile, kind)


def test_without_a_device_it_measures_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit):
            fused_programs.main([])
        assert "compute capability 9.0" in capsys.readouterr().err
