"""A packed tree equals its root-to-leaf rows, each run alone, in results and in the sums of their gradients."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flexattn import attention, mods
from flexattn.dispatch import options

H, H_KV, D = 4, 2, 16


def random_tree(seed: int, segments: int = 9, longest: int = 7) -> tuple[list[int], list[int], list[int], int]:
    """Returns parents, starts, ends and the row's tokens, of a random tree in depth-first order with a gap before each tree."""
    draw = random.Random(seed)
    parents: list[int] = []
    path: list[int] = []
    starts, ends, position = [], [], 2
    for n in range(segments):
        path = path[: draw.randint(0, len(path))]
        parents.append(path[-1] if path else -1)
        path.append(n)
        position += 3 * (parents[-1] == -1)
        starts.append(position)
        position += draw.randint(0, longest)
        ends.append(position)
    return parents, starts, ends, position + 4


def rows_of(parents: list[int], starts: list[int], ends: list[int]) -> list[list[int]]:
    """Returns for each segment the positions of its root-to-segment row."""
    rows: list[list[int]] = []
    for n, parent in enumerate(parents):
        rows.append((rows[parent] if parent >= 0 else []) + list(range(starts[n], ends[n])))
    return rows


def tensors(tokens: int, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((1, tokens, H, D), (1, tokens, H_KV, D), (1, tokens, H_KV, D), (1, tokens, H, D))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype) for shape in shapes]


@pytest.mark.parametrize("seed", range(6))
def test_a_packed_tree_equals_separate_rows(seed: int) -> None:
    parents, starts, ends, tokens = random_tree(seed)
    mask = mods.tree(*(torch.tensor(x) for x in (parents, starts, ends)), tokens)
    *qkv, dout = tensors(tokens, torch.float64)
    qkv = [x.requires_grad_() for x in qkv]
    out = attention(*qkv, mask_mod=mask)
    wanted = torch.zeros_like(out)
    for n, row in enumerate(rows_of(parents, starts, ends)):
        own = ends[n] - starts[n]
        if own:
            alone = attention(*(x[:, row] for x in qkv), causal=True)
            wanted = wanted.index_add(1, torch.tensor(row[-own:]), alone[:, -own:])
    torch.testing.assert_close(out, wanted, atol=1e-12, rtol=0)
    for found, expected in zip(*(torch.autograd.grad(x, qkv, dout) for x in (out, wanted)), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


def test_a_long_chain_and_a_star() -> None:
    """The end of a subtree travels up over any number of levels, and from any number of children."""
    n = 37
    for parents in (range(-1, n - 1), [-1] + [0] * (n - 1)):
        mask = mods.tree(torch.tensor(list(parents)), 2 * torch.arange(n), 2 * torch.arange(n) + 2, 2 * n)
        i, j = torch.arange(2 * n)[:, None], torch.arange(2 * n)
        is_chain = parents == range(-1, n - 1)
        wanted = (j <= i) & (torch.ones(()).bool() if is_chain else (j < 2) | (i // 2 == j // 2))
        torch.testing.assert_close(mask(0, 0, i, j), wanted)


@pytest.mark.sample
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_triton_backend_skips_blocks_of_a_tree(dtype: torch.dtype, device: str) -> None:
    parents, starts, ends, tokens = random_tree(3, segments=5, longest=60)
    mask = mods.tree(*(torch.tensor(x, device=device, dtype=dtype) for x in (parents, starts, ends)), tokens)
    *qkv, dout = tensors(tokens, torch.float32, device)
    results = []
    for backend in ("triton", "eager"):
        leaves = [x.clone().requires_grad_() for x in qkv]
        out = attention(*leaves, mask_mod=mask, backend=backend)
        results.append([out, *torch.autograd.grad(out, leaves, dout)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda parents, starts, ends: parents.__setitem__(2, 1), None),
        (lambda parents, starts, ends: parents.__setitem__(3, 1), r"parents\[3\] is 1; accepted: -1, 2 or one of its ancestors"),
        (lambda parents, starts, ends: parents.__setitem__(0, 0), r"parents\[0\] is 0; accepted: -1, because no segment precedes"),
        (lambda parents, starts, ends: starts.__setitem__(1, 3), r"starts\[1\] is 3 and ends\[1\] is 8; accepted: 4 <= start"),
        (lambda parents, starts, ends: ends.__setitem__(3, 99), r"ends\[3\] is 99; accepted: 12 <= start <= end <= 16"),
    ],
    ids=["another tree", "a parent that is no ancestor", "a root's parent", "overlapping segments", "past the row"],
)
def test_segments_in_another_order_are_refused(change: Callable[..., None], text: str | None) -> None:
    lists = [-1, 0, 0, 2], [0, 4, 8, 12], [4, 8, 12, 16]
    change(*lists)
    call = [torch.tensor(x) for x in lists]
    if text is None:
        mods.tree(*call, 16)
        return
    with pytest.raises(ValueError, match=text):
        mods.tree(*call, 16)


def test_arguments() -> None:
    parents, starts, ends = torch.tensor([-1, 0]), torch.tensor([0, 4]), torch.tensor([4, 8])
    with pytest.raises(TypeError, match=r"starts is \[0, 4\] \(list\); accepted: a tensor"):
        mods.tree(parents, [0, 4], ends, 8)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ends is a torch"):
        mods.tree(parents, starts, ends.float(), 8)
    with pytest.raises(ValueError, match=r"starts is a torch.int64 tensor of shape \(1,\)"):
        mods.tree(parents, starts[:1], ends, 8)
    with pytest.raises(ValueError, match=r"tokens is 8\.0"):
        mods.tree(parents, starts, ends, 8.0)  # type: ignore[arg-type]
    q = torch.randn(1, 9, H, D)
    with pytest.raises(ValueError, match=r"the tree has shape \(8,\)"):
        attention(q, q, q, mask_mod=mods.tree(parents, starts, ends, 8))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_values_on_a_gpu_are_read_on_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = [torch.tensor(x, device="cuda") for x in ([0, 0], [0, 4], [4, 8])]
    mods.tree(*wrong, 8)
    monkeypatch.setattr(options, "check_values", lambda: True)
    with pytest.raises(ValueError, match=r"parents\[0\] is 0"):
        mods.tree(*wrong, 8)
