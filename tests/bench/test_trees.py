"""The benchmark of packed trees: its count of visible pairs and its check, on small trees."""

from __future__ import annotations

import pytest
import torch

from flexattn import attention
from flexattn.bench import harness, trees
from flexattn.bench.measure import Calls, Samples


@pytest.mark.parametrize("tree", trees.TREES.values(), ids=trees.TREES.keys())
def test_pairs_and_the_check(tree: trees.Tree) -> None:
    short = tree._replace(**{name: getattr(tree, name) // 64 for name in ("prompt", "answer", "continuation")})
    mask_mod, tokens = trees.mask_of(short, "cpu")
    seen = mask_mod(0, 0, torch.arange(tokens)[:, None], torch.arange(tokens))
    assert int(seen.sum()) == short.visible_pairs()
    qkv = [t[:, :, :1] for t in trees.tensors(tokens, "cpu")]
    out = attention(*qkv, mask_mod=mask_mod, backend="eager")
    assert trees.error_of(mask_mod, qkv, out) < harness.WORST
    assert trees.error_of(mask_mod, qkv, attention(*qkv, attn_mask_type="causal", backend="eager")) > harness.WORST


def test_each_way_is_measured_beside_the_dense_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(calls: Calls, budget_ms: float) -> dict[str, Samples]:
        for call in calls.values():
            call()
        return {name: Samples([float(n)] * 3, []) for n, name in enumerate(calls, 1)}

    monkeypatch.setattr(harness, "time_on_device", timed)
    for name, value in {"HEADS": 2, "HEADS_KV": 1, "HEAD_DIM": 16}.items():
        monkeypatch.setattr(trees, name, value)
    tree = trees.Tree(1, 8, 2, 6)
    rows = list(trees.measure(tree, "cpu"))
    assert [(row["direction"], row["way"]) for row in rows] == [
        (direction, way) for direction in ("forward", "backward") for way in (trees.DENSE, "mods.tree", "BlockMask")
    ]
    assert {row["status"] for row in rows} == {"measured"}
    dense, by_mod, by_mask, *_ = rows
    assert (dense["visible_pairs"], by_mod["visible_pairs"]) == (20 * 21 // 2, tree.visible_pairs())
    assert dense["tflops"] == pytest.approx(2 * 2 * 210 * 2 * 16 / 1e3 / 1e6)
    assert by_mask["share_of_dense"] == pytest.approx(tree.visible_pairs() / 210 / 3)
    assert "of dense" in trees.line({"tree": "small", **by_mod})
