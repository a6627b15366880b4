"""The benchmark of packed trees: its count of visible pairs and its check, on small trees."""

from __future__ import annotations

import pytest
import torch

from flexattn import attention
from flexattn.bench import harness, trees


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
