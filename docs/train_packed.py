"""Trains a small model on packed documents over the ranks of torchrun: the losses are the same on any number of them.

torchrun --standalone --nproc-per-node 2 docs/train_packed.py [--steps 5] [--strategy auto] [--device cpu]

Each step has new documents, so a new plan. A rank holds its tokens of all of them, and computes its part of the sum of the losses;
gradients are summed over the ranks.
"""

from __future__ import annotations

import argparse
import os
import random
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from flexattn import distributed

VOCABULARY, DIM, HEADS, HEADS_KV, HEAD_DIM, LAYERS, TOKENS = 64, 64, 4, 2, 16, 2, 256
WINDOW = 24


class Layer(nn.Module):
    def __init__(self, window: int | None) -> None:
        super().__init__()
        self.mask = {} if window is None else {"attn_mask_type": "causal", "window_size": (window, 0)}
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))
        self.qkv = nn.Linear(DIM, (HEADS + 2 * HEADS_KV) * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, DIM, bias=False)
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.sink = nn.Parameter(torch.zeros(HEADS))

    def forward(self, x: Tensor, angles: Tensor, plan: distributed.Plan, strategy: str) -> Tensor:
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (-1, HEAD_DIM))
        q, k, v = qkv.split((HEADS, HEADS_KV, HEADS_KV), 1)
        q, k = rotated(q, angles), rotated(k, angles)
        sink = {"softmax_type": "learnable", "softmax_offset": self.sink}
        attended = distributed.attention(q, k, v, plan=plan, strategy=strategy, **self.mask, **sink)
        x = x + self.out(attended.flatten(1))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary positions: x [tokens, heads, head_dim], angles [tokens, head_dim / 2]."""
    a, b = x.chunk(2, -1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList(Layer(WINDOW if i % 2 else None) for i in range(LAYERS))
        self.head = nn.Linear(DIM, VOCABULARY)

    def forward(self, tokens: Tensor, plan: distributed.Plan, strategy: str) -> Tensor:
        frequencies = 10000 ** (-torch.arange(0, HEAD_DIM, 2, device=tokens.device) / HEAD_DIM)
        angles = distributed.positions(plan, device=tokens.device)[:, None] * frequencies
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, angles, plan, strategy)
        return self.head(x)


def documents(step: int) -> tuple[list[int], Tensor]:
    """Returns the lengths of a step's documents and their tokens, which count up from a random one; the same on each rank."""
    rng, lengths = random.Random(step), []
    while sum(lengths) < TOKENS:
        lengths.append(min(rng.randint(1, TOKENS // 3), TOKENS - sum(lengths)))
    counts = [torch.arange(n) * rng.randint(1, 3) + rng.randrange(VOCABULARY) for n in lengths]
    return lengths, torch.cat(counts) % VOCABULARY


def labels_of(lengths: list[int], tokens: Tensor) -> Tensor:
    """Returns each token's next one in its document, -100 for the last one, which cross_entropy leaves out."""
    labels = tokens.roll(-1)
    labels[torch.tensor(lengths).cumsum(0) - 1] = -100
    return labels


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    device = torch.device(options.device, int(os.environ["LOCAL_RANK"]) if options.device == "cuda" else None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)
    model = Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(options.steps):
        lengths, tokens = documents(step)
        plan = distributed.plan(dist.group.WORLD, documents=lengths)
        labels = labels_of(lengths, tokens)
        count = int((labels >= 0).sum())
        own_tokens, own_labels = (t.to(device) for t in distributed.shard(plan, tokens, labels))
        logits = model(own_tokens, plan, options.strategy)
        loss = functional.cross_entropy(logits, own_labels, reduction="sum") / count
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)  # each rank's is that of its tokens
        optimizer.step()
        optimizer.zero_grad()
        whole = loss.detach()
        dist.all_reduce(whole)
        if dist.get_rank() == 0:
            sys.stdout.write(f"step {step}: {len(lengths)} documents, loss {whole.item():.6f}\n")
            sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # gloo's threads may abort a process that shuts down (pytorch/pytorch#179291)


if __name__ == "__main__":
    main()
