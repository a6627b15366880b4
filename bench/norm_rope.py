"""QK-norm with rotary positions, forward and backward, beside torch.compile of two forms of it.

    python -m flexattn.bench.norm_rope --out norm_rope.json [--only PATTERN ...]

Each row is the device time of one call in bfloat16 in microseconds (`measure.time_on_device`), as median and quartiles. The forward
is a training step's. `torch.compile, as written` compiles the form of the models' packages, and `torch.compile, fused` the one with
the fewest bytes. `speed` is the time of the faster of both over flexattn's. Before the timing, results and gradients are compared
with float64: flexattn's error may be twice that of the fused form without torch.compile. Needs a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from flexattn.bench import harness
from flexattn.bench.harness import Program, Row
from flexattn.nn import qk_norm_rope

BUDGET_MS = 20.0  # device time of each call
EPS = 1e-6
OURS, WRITTEN, FUSED = "flexattn", "torch.compile, as written", "torch.compile, fused"


class Shape(NamedTuple):
    tokens: int
    heads: int
    heads_kv: int
    head_dim: int
    rotated: int
    interleaved: bool = False
    zero_centered: bool = False


SHAPES = {
    "Qwen3": Shape(8192, 32, 8, 128, 128),
    "Qwen3.5": Shape(8192, 16, 2, 256, 64, zero_centered=True),
    "FLUX.1": Shape(4608, 24, 24, 128, 128, interleaved=True),
}


class Inputs(NamedTuple):
    """Parts of one packed projection, weights, and tables in which each angle is there once, fp32 [s, rotated / 2]."""

    leaves: tuple[Tensor, ...]
    cos: Tensor
    sin: Tensor
    dout: tuple[Tensor, ...]


def inputs_of(shape: Shape, dtype: torch.dtype, device: str) -> Inputs:
    generator = torch.Generator(device).manual_seed(0)

    def random(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, device=device)

    d, heads, heads_kv = shape.head_dim, shape.heads, shape.heads_kv
    qkv = random(1, shape.tokens, heads + 2 * heads_kv, d).to(dtype)
    q, k = qkv[:, :, :heads], qkv[:, :, heads : heads + heads_kv]
    weights = (0.1 * random(2, d) + (not shape.zero_centered)).to(dtype)
    steps = torch.arange(shape.rotated // 2, device=device, dtype=torch.float64) / (shape.rotated // 2)
    angles = torch.arange(shape.tokens, device=device)[:, None] * 10000.0**-steps
    dout = tuple(random(*x.shape).to(dtype) for x in (q, k))
    return Inputs((q, k, *weights), angles.cos().float(), angles.sin().float(), dout)


def repeated(table: Tensor, shape: Shape) -> Tensor:
    """Returns a table with each angle twice, as models have it."""
    return table.repeat_interleave(2, -1) if shape.interleaved else torch.cat((table, table), -1)


def fused(shape: Shape, cos: Tensor, sin: Tensor, q: Tensor, k: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """The form with the fewest bytes: in float32, rounded once; in float64 for float64."""
    results = []
    for x, weight in zip((q, k), weights, strict=True):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * (weight + float(shape.zero_centered))
        pairs, c, s = wide[..., : shape.rotated], cos[:, None], sin[:, None]
        if shape.interleaved:
            a, b = pairs.view(*pairs.shape[:-1], shape.rotated // 2, 2).unbind(-1)
            pairs = torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2)
        else:
            a, b = pairs.chunk(2, -1)
            pairs = torch.cat((a * c - b * s, b * c + a * s), -1)
        results.append(torch.cat((pairs, wide[..., shape.rotated :]), -1).to(x.dtype))
    return tuple(results)


def as_written(shape: Shape, cos: Tensor, sin: Tensor, q: Tensor, k: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """The form of transformers 5.17 (models/qwen3, models/qwen3_5), or with interleaved pairs of diffusers 0.42 (FLUX)."""
    results = []
    for x, weight in zip((q, k), weights, strict=True):
        if shape.interleaved:
            x = rms_norm(x, x.shape[-1:], weight, EPS)
            a, b = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
            turned = torch.stack((-b, a), -1).flatten(3)
            results.append((x.float() * cos[None, :, None] + turned.float() * sin[None, :, None]).to(x.dtype))
            continue
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
        x = (wide * (1.0 + weight.float())).type_as(x) if shape.zero_centered else weight * wide.to(x.dtype)
        x, rest = x[..., : shape.rotated], x[..., shape.rotated :]
        half = torch.cat((-x[..., shape.rotated // 2 :], x[..., : shape.rotated // 2]), -1)
        results.append(torch.cat((x * cos[None, :, None] + half * sin[None, :, None], rest), -1))
    return tuple(results)


def ours(shape: Shape, cos: Tensor, sin: Tensor, q: Tensor, k: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    named = dict(zip(("q_weight", "k_weight"), weights, strict=True))
    return qk_norm_rope(q, k, (cos, sin), eps=EPS, interleaved=shape.interleaved, zero_centered=shape.zero_centered, **named)


Function = Callable[..., tuple[Tensor, ...]]


def tables_of(function: Function, shape: Shape, x: Inputs) -> tuple[Tensor, Tensor]:
    """Returns cos and sin as a form takes them: transformers casts them to the dtype of q."""
    if function is fused:
        return x.cos, x.sin
    dtype = x.leaves[0].dtype if function is as_written and not shape.interleaved else x.cos.dtype
    return repeated(x.cos, shape).to(dtype), repeated(x.sin, shape).to(dtype)


def calls_of(function: Function, shape: Shape, x: Inputs, *, compiles: bool) -> dict[str, Callable[[], Any]]:
    """Returns the calls of each direction."""
    leaves = [t.detach().requires_grad_() for t in x.leaves]
    cos, sin = tables_of(function, shape, x)
    run: Function = torch.compile(function, dynamic=False) if compiles else function

    def forward() -> tuple[Tensor, ...]:
        return run(shape, cos, sin, *leaves)

    out = forward()
    return {"forward": forward, "backward": lambda: torch.autograd.grad(out, leaves, x.dout, retain_graph=True)}


def results_of(calls: dict[str, Callable[[], Any]]) -> list[Tensor]:
    return [t.detach() for call in calls.values() for t in call()]


def in_float64(shape: Shape, x: Inputs) -> list[Tensor]:
    leaves, dout = (tuple(t.double() for t in tensors) for tensors in (x.leaves, x.dout))
    return results_of(calls_of(fused, shape, Inputs(leaves, x.cos.double(), x.sin.double(), dout), compiles=False))


def errors_of(got: Sequence[Tensor], exact: Sequence[Tensor]) -> list[float]:
    return [float((a.double() - b).abs().max()) for a, b in zip(got, exact, strict=True)]


def wrong(got: Sequence[Tensor], exact: Sequence[Tensor], same: Sequence[Tensor]) -> str:
    """Returns the first result whose error exceeds its budget; "": none. same: results of the fused form in the same dtype."""
    names = ("q", "k", "dq", "dk", "dq_weight", "dk_weight")
    for name, t, b, error, eager in zip(names, got, exact, errors_of(got, exact), errors_of(same, exact), strict=True):
        budget = 2 * eager + torch.finfo(t.dtype).eps * float(b.abs().max())
        if not error <= budget:
            return f"{name}: error {error:.1e}, budget {budget:.1e}"
    return ""


def measure(shape: Shape, device: str = "cuda") -> Iterator[Row]:
    """Yields a row for each direction and implementation."""
    x = inputs_of(shape, torch.bfloat16, device)
    calls = {OURS: calls_of(ours, shape, x, compiles=False)}
    same = results_of(calls_of(fused, shape, x, compiles=False))
    row: Row = {"sizes": shape, "implementation": OURS}
    if error := wrong(results_of(calls[OURS]), in_float64(shape, x), same):
        yield row | {"status": "wrong", "error": error}
        return
    for name, form in ((FUSED, fused), (WRITTEN, as_written)):
        calls[name] = calls_of(form, shape, x, compiles=True)
    for direction in calls[OURS]:
        times = harness.times({name: call[direction] for name, call in calls.items()}, BUDGET_MS)
        fastest = min(taken["us"] for name, taken in times.items() if name != OURS)
        for name, taken in times.items():
            speed = {"speed": fastest / taken["us"]} if name == OURS else {}
            yield row | {"implementation": name, "direction": direction, "status": "measured", **taken, **speed}


def line(row: Row) -> str:
    facts = f"{row['us']:8.1f} us {row.get('speed', '')!s:5.5}" if "us" in row else row["error"]
    return f"{row['shape']:8} {row.get('direction', ''):9} {row['implementation']:26} {facts}"


PROGRAM = Program("flexattn.bench.norm_rope", __doc__, "shape", SHAPES, lambda shape, options: measure(shape), line)

if __name__ == "__main__":
    sys.exit(PROGRAM.run())
