"""The benchmark of decoding: its cells hold what they say, and every implementation of a cell is asked for the same attention."""

from __future__ import annotations

import pytest
import torch

from flexattn import attention
from flexattn.bench import decode, decode_cells, decode_peers
from flexattn.bench.implementations import Unavailable

SMALL = {
    "page 4": decode_cells.decodes(3, 16, page=4, heads=4, heads_kv=2, head_dim=32),
    "rows not in use": decode_cells.Cell((1, 2, 1), (5, 23, 8), heads=4, heads_kv=2, head_dim=32, page=8),
    "sinks, window": decode_cells.decodes(2, 160, heads=4, heads_kv=2, head_dim=32, more="sinks, window"),
    "softcap": decode_cells.decodes(2, 32, heads=4, heads_kv=2, head_dim=32, more="softcap"),
    "tree": decode_cells.decodes(2, 32, 4, heads=4, heads_kv=2, head_dim=32, more="tree"),
    "FP8": decode_cells.decodes(2, 32, heads=4, heads_kv=2, head_dim=32, is_fp8=True),
    "prefix": decode_cells.decodes(3, 48, heads=4, heads_kv=2, head_dim=32, prefix=32),
    "latent": decode_cells.decodes(2, 32, heads=4, heads_kv=1, head_dim=576, is_latent=True),
}


@pytest.mark.parametrize("cell", SMALL.values(), ids=SMALL.keys())
def test_pages_and_dense_keys_are_the_same_attention(cell: decode_cells.Cell) -> None:
    paged, dense = decode_cells.make_steps(cell, "cpu")
    got, same = (attention(step.q, step.k, step.v, **step.where, backend="eager") for step in (paged, dense))
    wanted = decode_cells.exact(dense, cell)
    assert torch.equal(got, same)
    assert float((got.double() - wanted).norm() / wanted.norm()) < decode.WORST


@pytest.mark.parametrize(
    "cell", [cell for name, cell in SMALL.items() if name != "FP8"], ids=[name for name in SMALL if name != "FP8"]
)
def test_flex_attention_is_asked_for_the_cell(cell: decode_cells.Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch, "compile", lambda function, **_: function
    )  # FlexAttention itself, which compiles for minutes on a CPU
    steps = decode_cells.make_steps(cell, "cpu")
    wanted = decode_cells.exact(steps[1], cell)
    flex = next(peer for peer in decode_peers.peers() if peer.name.startswith("FlexAttention"))
    if len(set(cell.queries)) > 1:
        with pytest.raises(Unavailable, match="different numbers of queries"):
            flex.prepare(cell, *steps)
        return
    got = flex.prepare(cell, *steps)()
    assert float((got.double() - wanted).norm() / wanted.norm()) < decode.WORST


def test_peers_that_are_missing_or_cannot_say_so() -> None:
    steps = decode_cells.make_steps(SMALL["FP8"], "cpu")
    for peer in decode_peers.peers():
        with pytest.raises(Unavailable, match=r"not installed|FP8|takes"):
            peer.prepare(SMALL["FP8"], *steps)


def test_peers_get_tables_and_caches_without_poison() -> None:
    paged, _ = decode_cells.make_steps(SMALL["rows not in use"], "cpu")
    k, v, table = decode_peers._pages(SMALL["rows not in use"], paged)
    assert not torch.stack([k, v]).isnan().any()
    assert int(table.max()) < len(k)


def test_unused_entries_and_rows_are_poisoned() -> None:
    paged, _ = decode_cells.make_steps(SMALL["rows not in use"], "cpu")
    table = paged.where["page_table"]
    assert (table == decode_cells.GARBAGE).sum() == 2 + 0 + 2
    assert paged.k[table[0, 0], 5:].isnan().all()
    assert not paged.k[table[0, 0], :5].isnan().any()


def test_a_prefix_is_stored_once_and_counted_once() -> None:
    cell = SMALL["prefix"]
    paged, _ = decode_cells.make_steps(cell, "cpu")
    table = paged.where["page_table"]
    assert (table[:, :2] == table[0, :2]).all()
    assert len(paged.k) == 2 + 3
    assert decode_cells.bytes_of(cell) == 2 * (3 * 4 * 64 + (32 + 3 * 16) * 2 * 64)


def test_bytes_and_operations() -> None:
    assert decode_cells.bytes_of(SMALL["latent"]) == 2 * (2 * 4 * (576 + 512) + 64 * 576)
    assert decode_cells.flops_of(SMALL["tree"]) == 2 * 2 * (4 * 32 - 6) * 4 * 64


def test_without_a_device_it_lists_cells_and_measures_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert decode.main(["--list", "--only", "MLA*"]) == 0
    assert capsys.readouterr().out.splitlines() == [name for name in decode_cells.CELLS if name.startswith("MLA")]
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit):
            decode.main([])
