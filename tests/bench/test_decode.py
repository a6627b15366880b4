"""The benchmark of decoding: its cells hold what they say, and every implementation of a cell is asked for the same attention."""

from __future__ import annotations

import pytest
import torch

from flexattn import attention
from flexattn.bench import decode

SMALL = {
    "page 4": decode.decodes(3, 16, page=4, heads=4, heads_kv=2, head_dim=32),
    "rows not in use": decode.Cell((1, 2, 1), (5, 23, 8), heads=4, heads_kv=2, head_dim=32, page=8),
    "sinks, window": decode.decodes(2, 160, heads=4, heads_kv=2, head_dim=32, more="sinks, window"),
    "softcap": decode.decodes(2, 32, heads=4, heads_kv=2, head_dim=32, more="softcap"),
    "tree": decode.decodes(2, 32, 4, heads=4, heads_kv=2, head_dim=32, more="tree"),
    "FP8": decode.decodes(2, 32, heads=4, heads_kv=2, head_dim=32, is_fp8=True),
    "prefix": decode.decodes(3, 48, heads=4, heads_kv=2, head_dim=32, prefix=32),
    "latent": decode.decodes(2, 32, heads=4, heads_kv=1, head_dim=576, is_latent=True),
}


@pytest.mark.parametrize("cell", SMALL.values(), ids=SMALL.keys())
def test_pages_and_dense_keys_are_the_same_attention(cell: decode.Cell) -> None:
    paged, dense = decode.make_steps(cell, "cpu")
    got, same = (attention(step.q, step.k, step.v, **step.where, backend="eager") for step in (paged, dense))
    wanted = decode.exact(dense, cell)
    assert torch.equal(got, same)
    assert float((got.double() - wanted).norm() / wanted.norm()) < decode.WORST


def test_unused_entries_and_rows_are_poisoned() -> None:
    paged, _ = decode.make_steps(SMALL["rows not in use"], "cpu")
    table = paged.where["page_table"]
    assert (table == decode.GARBAGE).sum() == 2 + 0 + 2
    assert paged.k[table[0, 0], 5:].isnan().all()
    assert not paged.k[table[0, 0], :5].isnan().any()


def test_a_prefix_is_stored_once_and_counted_once() -> None:
    cell = SMALL["prefix"]
    paged, _ = decode.make_steps(cell, "cpu")
    table = paged.where["page_table"]
    assert (table[:, :2] == table[0, :2]).all()
    assert len(paged.k) == 2 + 3
    assert decode.bytes_of(cell) == 2 * (3 * 4 * 64 + (32 + 3 * 16) * 2 * 64)


def test_bytes_and_operations() -> None:
    assert decode.bytes_of(SMALL["latent"]) == 2 * (2 * 4 * (576 + 512) + 64 * 576)
    assert decode.flops_of(SMALL["tree"]) == 2 * 2 * (4 * 32 - 6) * 4 * 64


def test_without_a_device_it_lists_cells_and_measures_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert decode.main(["--list", "--only", "MLA*"]) == 0
    assert capsys.readouterr().out.splitlines() == [name for name in decode.CELLS if name.startswith("MLA")]
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit):
            decode.main([])
