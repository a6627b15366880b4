"""The benchmark of lists of keys: its tensors, its count of operations and its check, on small cells."""

from __future__ import annotations

import sys

import pytest
import torch

from flexattn import attention
from flexattn.bench import sparse


@pytest.mark.parametrize("cell", [cell for cell in sparse.CELLS if cell.listed], ids=lambda cell: cell.name)
def test_lists_name_keys_that_each_query_sees(cell: sparse.Cell) -> None:
    small = cell._replace(queries=cell.queries // 64, keys=cell.keys // 64, heads=(cell.heads[0] // 8, cell.heads[1]), listed=4)
    qkv, options = sparse.tensors(small, "cpu")
    last = torch.arange(small.queries) + small.keys - small.queries
    first = options["kv_indices"].flatten(2).amax(-1)[0] * small.block
    assert (first <= last).all()
    options["backend"] = "eager"
    out = attention(*qkv, **options)
    assert sparse.error_of(small, qkv, options, out) < sparse.WORST
    assert sparse.error_of(small, qkv, options, out + 0.1) > sparse.WORST


def test_attention_gym_gives_the_same_results() -> None:
    pytest.importorskip("attn_gym", reason="attention-gym is not installed")
    cell = next(cell for cell in sparse.CELLS if sparse.peer_unsupported(cell) is None)
    small = cell._replace(queries=64, keys=128, heads=(16, 1), listed=4)
    qkv, options = sparse.tensors(small, "cpu")
    out = sparse.peer(qkv[0], qkv[1], options["kv_indices"], impl="reference")
    options["backend"] = "eager"
    assert sparse.error_of(small, qkv, options, out) < sparse.WORST


def test_a_missing_peer_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "attn_gym", None)
    reasons = [sparse.peer_unsupported(cell) for cell in sparse.CELLS if cell.listed]
    assert all(reasons)
    assert any("pip install attn_gym" in str(reason) for reason in reasons)


def test_operations_count_the_keys_that_are_seen() -> None:
    cell = sparse.Cell("", 3, 5, (2, 1), (4, 4), 0)
    assert sparse.flops_of(cell, "forward") == 2 * (3 + 4 + 5) * 2 * 8
    assert sparse.flops_of(cell._replace(listed=2, block=2), "backward") == 2.5 * 2 * 12 * 2 * 8
