"""Block masks with wrong lists: named under FLEXATTN_CHECK=1, else clamped before any kernel sees them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import flexattn
from flexattn.block_mask import block_lists


def block_mask(device: str = "cpu", **changes: Any) -> Any:
    """Returns a mask of 4 query blocks and 4 key blocks with changed entries in its lists, given as (place, value)."""
    mask = flexattn.create_block_mask(lambda b, h, i, j: (i >= j) & (j != 5), None, None, 64, 64, device, 16)
    for name, (place, value) in changes.items():
        getattr(mask, name)[place] = value
    return mask


def masked(device: str, **changes: Any) -> dict[str, Any]:
    q = torch.randn(1, 60, 2, 16, device=device)
    return {"q": q, "k": q, "v": q, "block_mask": block_mask(device, **changes)}


BAD_BLOCKS: dict[str, tuple[dict[str, Any], str]] = {
    "count past the list": ({"kv_num_blocks": ((0, 0, 1), 5)}, "block_mask.kv_num_blocks has a count of 5; accepted: 0 to 4"),
    "count far past it": ({"full_q_num_blocks": ((0, 0, 1), 1000)}, "block_mask.full_q_num_blocks has a count of 1000"),
    "count negative": ({"q_num_blocks": ((0, 0, 1), -3)}, "block_mask.q_num_blocks has a count of -3"),
    "index negative": ({"kv_indices": ((0, 0, 2, 0), -1)}, "block_mask.kv_indices has an index of -1; accepted: 0 to 3"),
    "index far": ({"full_kv_indices": ((0, 0, 3, 0), 2**27)}, "block_mask.full_kv_indices has an index of 134217728"),
    "index of queries far": ({"q_indices": ((0, 0, 0, 1), 4)}, "block_mask.q_indices has an index of 4"),
    "block twice": ({"full_kv_indices": ((0, 0, 3, 0), 0)}, "block_mask lists block 0 twice in kv_indices and the full ones"),
}


@pytest.mark.parametrize(("changes", "message"), BAD_BLOCKS.values(), ids=BAD_BLOCKS.keys())
def test_block_masks_are_checked_on_request(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str, device: str
) -> None:
    monkeypatch.setenv("FLEXATTN_CHECK", "1")
    assert flexattn.attention(**masked(device), backend="eager").isfinite().all()
    with pytest.raises(ValueError, match=re.escape(message)):
        flexattn.attention(**masked(device, **changes))


@pytest.mark.sample("changes")
@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("changes", [changes for changes, _ in BAD_BLOCKS.values()], ids=BAD_BLOCKS.keys())
def test_wrong_block_masks_are_clamped(changes: dict[str, Any], backend: str, device: str) -> None:
    call = masked(device, **changes)
    lists = block_lists(call["block_mask"], 1, 2, 60, 60, call["q"].device).tensors
    for counts, indices in zip(lists[::2], lists[1::2], strict=True):
        assert ((counts >= 0) & (counts <= 4)).all()
        assert ((indices >= 0) & (indices < 4)).all()
        for count, index in zip(counts.flatten().tolist(), indices.flatten(0, -2), strict=True):
            assert (index[:count].diff() >= 0).all()  # as the kernels' search wants them
    q = call["q"].requires_grad_()
    for _ in range(3):
        torch.autograd.grad(flexattn.attention(**call, backend=backend).sum(), q)


def test_block_masks_of_other_shapes_are_refused(device: str) -> None:
    mask = block_mask(device)
    mask.q_indices = mask.q_indices[..., :2, :]
    q = torch.randn(1, 60, 2, 16, device=device)
    with pytest.raises(ValueError, match=re.escape("block_mask.q_num_blocks has shape (1, 1, 4) and q_indices (1, 1, 2, 4)")):
        flexattn.attention(q, q, q, block_mask=mask)
    mask = block_mask(device)
    for name in ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices"):
        setattr(mask, name, getattr(mask, name)[:, :, :2])
    with pytest.raises(ValueError, match=r"block_mask.q_num_blocks has shape \(1, 1, 2\), and the call has 4 blocks of keys"):
        flexattn.attention(q, q, q, block_mask=mask)
