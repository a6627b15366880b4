"""The benchmark of lists of keys: its tensors, its count of operations and its check, on small cells."""

from __future__ import annotations

import sys

import pytest
import torch

from flexattn import attention
from flexattn.bench import harness, sparse


@pytest.mark.sample
@pytest.mark.parametrize("cell", [cell for cell in sparse.CELLS if cell.listed and cell.rows == 1], ids=lambda cell: cell.name)
def test_lists_name_keys_that_each_query_sees(cell: sparse.Cell) -> None:
    small = cell._replace(queries=-(-cell.queries // 64), keys=cell.keys // 64, heads=(cell.heads[0] // 8, cell.heads[1]), listed=4)
    qkv, options = sparse.tensors(small, "cpu")
    last = torch.arange(small.queries) + small.keys - small.queries
    first = options["kv_indices"].flatten(2).amax(-1)[0] * small.block
    if cell.window:
        last = small.queries + (torch.arange(small.queries) + 1) * small.keys // small.queries - 1
        assert (options["kv_indices"][0, :, 0] == torch.arange(small.queries)).all()
    assert (first <= last).all()
    options["backend"] = "eager"
    out = attention(*qkv, **options)
    assert sparse.error_of(small, qkv, options, out) < harness.WORST
    assert sparse.error_of(small, qkv, options, out + 0.1) > harness.WORST


@pytest.mark.parametrize("name", ["blocks of 64, 8k", "blocks of 128, 8k", "blocks, dense, 8k"])
def test_results_of_blocks_are_checked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (cell,) = (cell for cell in sparse.CELLS if cell.name == name)
    small = cell._replace(queries=512, keys=512, heads=(2, 2), listed=min(cell.listed, 3))
    monkeypatch.setattr(sparse, "BLOCK_BACKENDS", {"eager": ", eager"})
    found: dict[str, float] = {}
    monkeypatch.setattr(
        sparse,
        "add_times",
        lambda cell, run, calls, error: found.update({name: error for name, call in calls.items() if call() is not None}),
    )
    sparse.measure_blocks(small, None, "cpu")  # type: ignore[arg-type]
    wanted = ["forward, eager", "backward, eager", *(["forward with its lists, eager"] if small.listed else [])]
    assert list(found) == wanted
    assert 0 < max(found.values()) < harness.WORST
    monkeypatch.setattr(sparse, "exact_gradients", lambda cell, qkv, options, dout: [t[0, :, 0] + 1.0 for t in qkv])
    sparse.measure_blocks(small, None, "cpu")  # type: ignore[arg-type]
    assert found["backward, eager"] > harness.WORST


def test_attention_gym_gives_the_same_results() -> None:
    pytest.importorskip("attn_gym", reason="attention-gym is not installed")
    for window in (0, 8):
        cell = next(cell for cell in sparse.CELLS if sparse.peer_unsupported(cell) is None and bool(cell.window) == bool(window))
        small = cell._replace(queries=64, keys=128, heads=(16, 1), listed=4, window=window)
        qkv, options = sparse.tensors(small, "cpu")
        call = sparse.peer_call(small, qkv, options)
        out = sparse.peer_forward(small, call, impl="reference")
        assert sparse.error_of(small, qkv, options, out) < harness.WORST
        on_meta = sparse.PeerCall(*(None if t is None else t.to("meta") for t in call))
        lse = torch.empty(1, 16, 64, device="meta")
        backward = sparse.peer_backward(small, on_meta, out.to("meta"), lse, out.to("meta"))
        assert [t.shape for t in sparse.peer_gradients(small, backward)] == [qkv[0].shape, qkv[1].shape]


def test_a_missing_peer_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "attn_gym", None)
    reasons = [sparse.peer_unsupported(cell) for cell in sparse.CELLS if cell.listed]
    assert all(reasons)
    assert any("pip install attn_gym" in str(reason) for reason in reasons)


def test_operations_count_the_keys_that_are_seen() -> None:
    cell = sparse.Cell("", 3, 5, (2, 1), (4, 4), 0)
    assert sparse.flops_of(cell, "forward") == 2 * (3 + 4 + 5) * 2 * 8
    assert sparse.flops_of(cell._replace(listed=2, block=2), "backward") == 2.5 * 2 * 12 * 2 * 8
    assert sparse.flops_of(cell._replace(listed=2, window=3), "forward") == 2 * 15 * 2 * 8
    assert sparse.flops_of(cell._replace(rows=64), "forward") == 2 * 15 * 2 * 8
