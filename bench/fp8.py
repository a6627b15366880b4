"""`python -m flexattn fp8`: how exact FP8 attention is, by recipe, and a small transformer trained with it and without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import flexattn
from flexattn import fp8
from flexattn.cli import Parser, program

RECIPES: dict[str, fp8.Recipe | None] = {
    "bf16": None,
    "tensor": fp8.Recipe(granularity="tensor"),
    "head": fp8.Recipe(),
    "head, rotation": fp8.Recipe(rotation=True),
    "batch_head, rotation": fp8.Recipe(granularity="batch_head", rotation=True),
    "block, rotation": fp8.Recipe(granularity="block", rotation=True),
    "head, HYBRID, rotation": fp8.Recipe(fp8_format="HYBRID", rotation=True),
    "head, bf16_backward, rotation": fp8.Recipe(bf16_backward=True, rotation=True),
}
INPUTS = ("normal", "outliers", "RoPE")
BATCH, HEADS, HEADS_KV, HEAD_DIM = 1, 4, 2, 128

# Sizes of the model that is trained: a byte-level transformer.
WIDTH, LAYERS, MODEL_HEADS, CONTEXT, MODEL_BATCH = 128, 2, 2, 128, 8
LAST = 20  # the last steps, whose mean loss is compared


def make_tensors(kind: str, length: int, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns q, k, v and dout in bfloat16, [b, s, h, d].

    kind: standard normal; q and k with four channels of each head 10 to 60 times as large, normalised to rows of root mean square 1
    as after a QK norm; or q and k rotated by position as by RoPE, so that slow channels hardly vary.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(heads: int) -> Tensor:
        return torch.randn(BATCH, length, heads, HEAD_DIM, generator=generator, dtype=torch.float64)

    q, k, v, dout = (normal(heads) for heads in (HEADS, HEADS_KV, HEADS_KV, HEADS))
    if kind == "outliers":
        for kv_head in range(HEADS_KV):
            channels = torch.randperm(HEAD_DIM, generator=generator)[:4]
            factors = 10 + 50 * torch.rand(4, generator=generator, dtype=torch.float64)
            group = HEADS // HEADS_KV
            q[:, :, kv_head * group : (kv_head + 1) * group, channels] *= factors
            k[:, :, kv_head, channels] *= factors
        q, k = (t / t.square().mean(-1, keepdim=True).sqrt() for t in (q, k))
    elif kind == "RoPE":
        mean = torch.randn(2, HEAD_DIM, generator=generator, dtype=torch.float64)
        q, k = (_rope(t + 3 * m) for t, m in zip((q, k), mean, strict=True))
    tensors = [t.to(torch.bfloat16).to(device) for t in (q, k, v, dout)]
    return tensors[0], tensors[1], tensors[2], tensors[3]


def _rope(x: Tensor) -> Tensor:
    """Su et al., "RoFormer" (2021), halves of the head dim as pairs."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None, None] * 10000.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


def attend(tensors: tuple[Tensor, ...], recipe: fp8.Recipe | None, dtype: torch.dtype, backend: Any) -> list[Tensor]:
    """out, dq, dk, dv under a causal mask"""
    *qkv, dout = (t.detach().to(dtype) for t in tensors)
    leaves = [t.requires_grad_() for t in qkv]
    out = flexattn.attention(*leaves, attn_mask_type="causal", fp8_recipe=recipe, backend=backend)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def accuracy(length: int, device: torch.device, backend: str) -> Iterator[tuple[str, str, list[tuple[float, float]]]]:
    """Yields (input, recipe, errors). The errors of out, dq, dk and dv are root mean square and largest, relative to fp64's."""
    for kind in INPUTS:
        tensors = make_tensors(kind, length, device)
        exact = attend(tensors, None, torch.float64, "eager")
        for name, recipe in RECIPES.items():
            got = attend(tensors, recipe, torch.bfloat16, backend)
            errors = [g.double() - e for g, e in zip(got, exact, strict=True)]
            yield (
                kind,
                name,
                [(float(d.norm() / e.norm()), float(d.abs().max() / e.abs().max())) for d, e in zip(errors, exact, strict=True)],
            )


class _Block(nn.Module):
    def __init__(self, recipe: fp8.Recipe | None) -> None:
        super().__init__()
        self.recipe = recipe
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.before(x)).unflatten(-1, (3, MODEL_HEADS, WIDTH // MODEL_HEADS)).to(torch.bfloat16)
        out = flexattn.attention(*heads.unbind(2), attn_mask_type="causal", fp8_recipe=self.recipe)
        x = x + self.project(out.flatten(-2).to(x.dtype))
        return x + self.mlp(self.between(x))  # type: ignore[no-any-return]


class _Model(nn.Module):
    def __init__(self, recipe: fp8.Recipe | None) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(_Block(recipe) for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.bytes(tokens) + self.positions(positions))))  # type: ignore[no-any-return]


def train(recipe: fp8.Recipe | None, steps: int, device: torch.device) -> list[float]:
    """The loss of each step, on the library's own sources; the same weights and batches for every recipe."""
    folder = Path(flexattn.__file__).parent
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    torch.manual_seed(0)
    model = _Model(recipe).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(data) - CONTEXT - 1, (MODEL_BATCH,), generator=generator)
        batch = torch.stack([data[start : start + CONTEXT + 1] for start in starts.tolist()]).to(device)
        loss = functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def main(argv: list[str]) -> int:
    parser = Parser(prog=program("fp8"), description=__doc__)
    parser.add_argument("--length", type=int, default=256, metavar="N", help="queries and keys (default: %(default)s)")
    parser.add_argument("--backend", default="auto", choices=("auto", "triton", "eager", "cudnn"), help="default: %(default)s")
    parser.add_argument("--train", type=int, metavar="STEPS", help="train instead, so many steps, in bf16 and in FP8")
    args = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.train is not None:
        return _compare_training(args.train, device)
    print(f"{'':10}{'recipe':30}" + "".join(f"{name + ' rms':>11}{'max':>8}" for name in ("out", "dq", "dk", "dv")))
    for kind, name, found in accuracy(args.length, device, args.backend):
        print(f"{kind:10}{name:30}" + "".join(f"{rms:11.4f}{largest:8.4f}" for rms, largest in found))
    return 0


def _compare_training(steps: int, device: torch.device) -> int:
    means = {}
    for name in ("bf16", "head", "head, HYBRID, rotation"):
        losses = train(RECIPES[name], steps, device)
        means[name] = sum(losses[-LAST:]) / len(losses[-LAST:])
        beside = means[name] / means["bf16"] - 1
        print(f"{name:30} first loss {losses[0]:.3f}, mean of the last {LAST} {means[name]:.4f} ({beside:+.2%})")
    return 0
