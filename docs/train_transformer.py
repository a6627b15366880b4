"""Trains a small transformer on packed documents: the library's own sources, byte by byte.

python docs/train_transformer.py [--steps 41] [--device cpu]

It has rotary positions, grouped heads, bf16 by autocast, checkpoints, and on a GPU torch.compile. On a CPU it is small, and takes
half a minute.
"""

from __future__ import annotations

import argparse
import math
import pathlib
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import flexattn

Rotation = tuple[Tensor, Tensor]  # cosines and sines, [tokens, 1, head_dim / 2]


class Size(NamedTuple):
    width: int
    layers: int
    heads: int
    heads_kv: int
    tokens: int  # of a step
    longest: int  # document
    learning_rate: float


SIZES = {"cuda": Size(1024, 12, 16, 4, 32768, 4096, 3e-4), "cpu": Size(96, 2, 4, 2, 512, 256, 3e-3)}


class Batch(NamedTuple):
    """Documents of different lengths, one after another."""

    text: Tensor  # [tokens]
    target: Tensor  # the next token of each
    positions: Tensor  # of each token in its document
    packed: dict[str, Any]  # arguments of attention()


class Attention(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head_dim, self.heads = size.width // size.heads, (size.heads, size.heads_kv, size.heads_kv)
        self.qkv = nn.Linear(size.width, sum(self.heads) * self.head_dim, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)

    def forward(self, x: Tensor, rotation: Rotation, packed: dict[str, Any]) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (-1, self.head_dim)).split(self.heads, 1)
        out = flexattn.attention(rotated(q, rotation), rotated(k, rotation), v, **packed)
        return self.out(out.flatten(1))


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(size.width) for _ in range(2))
        self.attention = Attention(size)
        self.up = nn.Linear(size.width, 8 * size.width // 3, bias=False)
        self.down = nn.Linear(8 * size.width // 3, size.width, bias=False)

    def forward(self, x: Tensor, rotation: Rotation, packed: dict[str, Any]) -> Tensor:
        x = x + self.attention(self.norms[0](x), rotation, packed)
        return x + self.down(functional.silu(self.up(self.norms[1](x))))


class Transformer(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.half_dim = size.width // size.heads // 2
        self.embedding = nn.Embedding(256, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm, self.head = nn.RMSNorm(size.width), nn.Linear(size.width, 256, bias=False)

    def forward(self, batch: Batch) -> Tensor:
        frequencies = 10000.0 ** -torch.linspace(0, 1, self.half_dim, device=batch.text.device)
        angles = batch.positions[:, None, None] * frequencies
        rotation = angles.cos(), angles.sin()
        x = self.embedding(batch.text)
        for block in self.blocks:
            x = checkpoint(block, x, rotation, batch.packed, use_reentrant=False)
        return self.head(self.norm(x))


def rotated(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotary positions: x [tokens, heads, head_dim]."""
    cos, sin = rotation
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x)


def batches(size: Size, device: str) -> Iterator[Batch]:
    files = sorted(pathlib.Path(flexattn.__file__).parent.rglob("*.py"))
    documents = [torch.tensor(list(path.read_bytes())) for path in files if path.stat().st_size > 100]
    generator = torch.Generator().manual_seed(0)
    while True:
        pieces: list[Tensor] = []
        lengths: list[int] = []
        while sum(lengths) < size.tokens:
            document = documents[int(torch.randint(len(documents), (), generator=generator))]
            length = min(size.longest, size.tokens - sum(lengths), len(document) - 1)
            start = int(torch.randint(len(document) - length, (), generator=generator))
            pieces.append(document[start : start + length + 1])
            lengths.append(length)
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32).to(device)
        yield Batch(
            text=torch.cat([piece[:-1] for piece in pieces]).to(device),
            target=torch.cat([piece[1:] for piece in pieces]).to(device),
            positions=torch.cat([torch.arange(length, dtype=torch.float32) for length in lengths]).to(device),
            packed={
                "qkv_format": "thd",
                "attn_mask_type": "padding_causal",
                "cu_seqlens_q": cu_seqlens,
                "cu_seqlens_kv": cu_seqlens,
                "max_seqlen_q": size.longest,
                "max_seqlen_kv": size.longest,
            },
        )


def main(argv: list[str] | None = None) -> list[float]:
    """Returns the losses of the steps, in bits per byte."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=41)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(argv)
    size, on_gpu = SIZES[options.device], options.device == "cuda"
    torch.manual_seed(0)
    model = Transformer(size).to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.learning_rate, fused=on_gpu)
    if on_gpu:
        for block in model.blocks:
            block.compile(fullgraph=True)  # one graph, which all blocks share
    losses, start = [], time.perf_counter()
    for step, batch in zip(range(options.steps), batches(size, options.device), strict=False):
        with torch.autocast(options.device, torch.bfloat16, enabled=on_gpu):
            loss = functional.cross_entropy(model(batch).float(), batch.target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach() / math.log(2))
        if step % 20 == 0:
            seconds = time.perf_counter() - start
            sys.stdout.write(f"step {step:3}: {losses[-1].item():.2f} bits per byte, {seconds:.0f} s\n")
    return [loss.item() for loss in losses]


if __name__ == "__main__":
    main()
