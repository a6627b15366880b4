"""Packed trees of shared prefixes beside a dense causal row of as many tokens: time, and TFLOP/s of the visible pairs.

    python -m flexattn.bench.trees --out trees.json

A tree is given as `mods.tree`, from which each call makes lists of blocks, and as a BlockMask. The eager backend checks the results
of a few queries in fp32. Needs a GPU.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn import attention, create_block_mask, mods
from flexattn.bench import harness
from flexattn.bench.harness import Call, Program, Row

BUDGET_MS = 100.0  # device time of each call
DENSE = "dense causal"
CHECKED = 64  # queries whose results are compared with the eager backend
HEADS, HEADS_KV, HEAD_DIM = 32, 8, 128


class Tree(NamedTuple):
    """Prompts of `prompt` tokens, each with `answers` answers, each of them with `continuations` continuations."""

    prompts: int
    prompt: int
    answers: int
    answer: int
    continuations: int = 0
    continuation: int = 0

    def segments(self) -> tuple[list[int], list[int]]:
        """Returns the parent and the length of each segment, in depth-first order."""
        parents: list[int] = []
        lengths: list[int] = []
        for _ in range(self.prompts):
            root = len(parents)
            parents, lengths = [*parents, -1], [*lengths, self.prompt]
            for _ in range(self.answers):
                own = len(parents)
                parents = [*parents, root, *[own] * self.continuations]
                lengths = [*lengths, self.answer, *[self.continuation] * self.continuations]
        return parents, lengths

    def visible_pairs(self) -> int:
        """Returns the pairs of a query and a key that it sees, in one head."""
        parents, lengths = self.segments()
        before: list[int] = []  # tokens of a segment's ancestors
        for parent in parents:
            before.append(0 if parent < 0 else before[parent] + lengths[parent])
        return sum(n * b + n * (n + 1) // 2 for n, b in zip(lengths, before, strict=True))


TREES = {
    "16 answers": Tree(1, 4096, 16, 768),
    "8 prompts, 8 answers each": Tree(8, 512, 8, 192),
    "4 answers, 4 continuations each": Tree(1, 4096, 4, 1024, 4, 512),
}


def mask_of(tree: Tree, device: str) -> tuple[Callable[..., Tensor], int]:
    """Returns the mask_mod, and the tokens of the row."""
    parents, lengths = tree.segments()
    ends = torch.tensor(lengths, device=device).cumsum(0)
    tokens = sum(lengths)
    return mods.tree(torch.tensor(parents, device=device), ends - torch.tensor(lengths, device=device), ends, tokens), tokens


def tensors(tokens: int, device: str) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    make = functools.partial(torch.randn, generator=generator, device=device, dtype=torch.bfloat16)
    return [make(1, tokens, heads, HEAD_DIM) for heads in (HEADS, HEADS_KV, HEADS_KV)]


def error_of(mask_mod: Callable[..., Tensor], qkv: list[Tensor], out: Tensor) -> float:
    """Returns the relative error of the last queries."""
    first = out.shape[1] - min(CHECKED, out.shape[1])
    q, k, v = (t.float() for t in (qkv[0][:, first:], *qkv[1:]))
    exact = attention(q, k, v, mask_mod=lambda b, h, i, j: mask_mod(b, h, i + first, j), backend="eager")
    return harness.distance(out[:, first:], exact)


def measure(tree: Tree, device: str = "cuda") -> Iterator[Row]:
    """Yields a row for each direction, and each way to call."""
    mask_mod, tokens = mask_of(tree, device)
    qkv = tensors(tokens, device)
    ways: dict[str, dict[str, Any]] = {
        DENSE: {"attn_mask_type": "causal"},
        "mods.tree": {"mask_mod": mask_mod},
        "BlockMask": {"block_mask": create_block_mask(mask_mod, None, None, tokens, tokens, device)},
    }
    leaves, dout = [t.detach().requires_grad_() for t in qkv], torch.randn_like(qkv[0])
    attends = {way: functools.partial(attention, backend="triton", **options) for way, options in ways.items()}
    errors = {way: error_of(mods.causal() if way == DENSE else mask_mod, qkv, attend(*qkv)) for way, attend in attends.items()}
    graphs = {way: functools.partial(torch.autograd.grad, attend(*leaves), leaves, dout) for way, attend in attends.items()}
    calls: dict[str, dict[str, Call]] = {
        "forward": {way: functools.partial(attend, *qkv) for way, attend in attends.items()},
        "backward": {way: functools.partial(backward, retain_graph=True) for way, backward in graphs.items()},
    }
    for direction, products in (("forward", 2), ("backward", 5)):
        dense = 0.0
        for way, taken in harness.times(calls[direction], BUDGET_MS).items():
            pairs = tokens * (tokens + 1) // 2 if way == DENSE else tree.visible_pairs()
            rate = 2 * products * pairs * HEADS * HEAD_DIM / taken["us"] / 1e6
            dense = dense or rate
            row: Row = {"tokens": tokens, "way": way, "direction": direction, "visible_pairs": pairs, "error": errors[way]}
            row |= {"tflops": rate, "share_of_dense": rate / dense, **taken}
            yield row | {"status": "measured" if errors[way] < harness.WORST else "wrong"}


def line(row: Row) -> str:
    times = f"{row['us']:9.0f} us {row['tflops']:6.1f} TFLOP/s of visible pairs, {row['share_of_dense']:.2f} of dense"
    return f"{row['tree']:32} {row['way']:13} {row['direction']:9} {times}, error {row['error']:.1e}"


PROGRAM = Program("flexattn.bench.trees", __doc__, "tree", TREES, lambda tree, options: measure(tree), line)

if __name__ == "__main__":
    sys.exit(PROGRAM.run())
