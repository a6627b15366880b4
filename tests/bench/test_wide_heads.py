"""The benchmark of head dims above 256: its calls are what their cells say."""

from __future__ import annotations

import pytest
import torch

from flexattn import attention
from flexattn.bench import wide_heads


@pytest.mark.parametrize("name", ["latents, 1 of 1024, 16 heads", "head dim 320, 1 x 128", "head dim 512, one query, 1 of 1024"])
def test_calls_are_what_their_cells_say(name: str) -> None:
    cell = wide_heads.CELLS[name]
    (q, k, v), others = wide_heads.make_call(cell, "cpu")
    out, lse = attention(q, k, v, **others, return_lse=True, backend="eager")
    assert out.shape == (cell.batch, cell.queries, cell.heads, cell.head_dim_v)
    assert (v.data_ptr() == k.data_ptr()) == cell.is_latent
    keys = k[others["page_table"][0].long()].flatten(0, 1) if cell.is_latent else k[0]
    scores = torch.einsum("hd,shd->hs", q[0, -1].double(), keys.double().repeat_interleave(cell.heads // cell.heads_kv, 1))
    torch.testing.assert_close(lse[0, :, -1], (scores * cell.head_dim**-0.5).logsumexp(1).float(), rtol=1e-2, atol=1e-2)


def test_without_a_device_it_measures_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit):
            wide_heads.main([])
        assert "compute capability 9.0" in capsys.readouterr().err
