"""Packed trees of shared prefixes beside a dense causal row of as many tokens: time, and TFLOP/s of the visible pairs.

    python -m flexattn.bench.trees --out trees.json

A tree is given as `mods.tree`, from which each call makes lists of blocks, and as a BlockMask. The eager backend checks the results
of a few queries in fp32. Needs a GPU.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn import attention, create_block_mask, mods
from flexattn.bench import harness
from flexattn.bench.harness import Row, Run, event_times, in_turns, make_parser, need_gpu, quartiles

ROUNDS, CALLS = 3, 4
CHECKED = 64  # queries whose results are compared with the eager backend
HEADS, HEADS_KV, HEAD_DIM = 32, 8, 128


class Tree(NamedTuple):
    """Prompts of `prompt` tokens, each with `answers` answers, each of them with `continuations` continuations."""

    name: str
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


TREES = (
    Tree("16 answers", 1, 4096, 16, 768),
    Tree("8 prompts, 8 answers each", 8, 512, 8, 192),
    Tree("4 answers, 4 continuations each", 1, 4096, 4, 1024, 4, 512),
)


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


def measure(tree: Tree, run: Run, device: str = "cuda") -> None:
    mask_mod, tokens = mask_of(tree, device)
    qkv = tensors(tokens, device)
    ways: dict[str, dict[str, Any]] = {
        "dense causal": {"attn_mask_type": "causal"},
        "mods.tree": {"mask_mod": mask_mod},
        "BlockMask": {"block_mask": create_block_mask(mask_mod, None, None, tokens, tokens, device)},
    }
    pairs = dict.fromkeys(ways, tree.visible_pairs()) | {"dense causal": tokens * (tokens + 1) // 2}
    attends = {way: functools.partial(attention, backend="triton", **options) for way, options in ways.items()}
    calls = {way: harness.forward_and_backward(attend, qkv) for way, attend in attends.items()}
    masks = dict.fromkeys(ways, mask_mod) | {"dense causal": mods.causal()}
    errors = {way: error_of(masks[way], qkv, attend(*qkv)) for way, attend in attends.items()}
    for direction, products in (("forward", 2), ("backward", 5)):
        own = {way: calls[way][direction] for way in ways}
        for call in own.values():
            for _ in range(3):
                call()
        samples = in_turns(own, ROUNDS, lambda way: event_times(calls[way][direction], CALLS, int))  # noqa: B023 (runs at once)
        rates = {}
        for way in ways:
            times = quartiles(samples[way])
            rates[way] = 2 * products * pairs[way] * HEADS * HEAD_DIM / times["us"] / 1e6
            share = rates[way] / rates["dense causal"]
            row: Row = {"tree": tree.name, "tokens": tokens, "way": way, "direction": direction, "visible_pairs": pairs[way]}
            row |= {"error": errors[way], "tflops": rates[way], "share_of_dense": share, **times}
            row["status"] = "measured" if errors[way] < harness.WORST else "wrong"
            text = f"{tree.name:32} {way:13} {direction:9} {times['us']:9.0f} us {rates[way]:6.1f} TFLOP/s of visible pairs"
            run.add(row, f"{text}, {share:.2f} of dense, error {errors[way]:.1e}")


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__)
    arguments = parser.parse_args(argv)
    need_gpu(parser)
    run = Run("flexattn.bench.trees", __doc__, arguments.out)
    for tree in TREES:
        measure(tree, run)
        torch.cuda.empty_cache()
    run.write()
    return run.status()


if __name__ == "__main__":
    sys.exit(main())
