"""Times of the tiles for head dims of two parts on sm_90 beside the kernels that `auto` takes today, checked against them.

    python -m tests.device.fitted --out fitted.json --minutes 4

`pytest tests/hopper/test_fitted.py tests/hopper/test_few_keys.py -k gpu` compares the same kernels with the reference.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.bench import harness
from flexattn.kernels_triton import families
from flexattn.kernels_triton.common.problem import Backward, Forward, Problem
from flexattn.kernels_triton.common.tiles import HOPPER_FUSED_160, select_fitted_tile
from flexattn.kernels_triton.hopper import conditions
from flexattn.kernels_triton.hopper.backward_fused_192 import fused_192_backward
from flexattn.kernels_triton.hopper.forward import hopper_forward

HEAD_DIMS = (112, 128, 96, 80, 72, 160, 192)
TOLERANCE = 0.02  # of the largest element, beside today's kernels in the same dtype


class Shape(NamedTuple):
    """q has `queries` tokens in each of `batch` sequences, k and v have `keys`."""

    batch: int
    queries: int
    keys: int
    heads: int
    causal: bool


SHAPES = (
    Shape(4, 4096, 4096, 16, causal=True),
    Shape(4, 4096, 4096, 16, causal=False),
    Shape(16, 1024, 1024, 16, causal=True),
    Shape(64, 256, 256, 16, causal=False),
    Shape(32, 512, 512, 16, causal=False),
    Shape(32, 512, 512, 16, causal=True),
    Shape(2, 16384, 16384, 8, causal=True),
)
FEW = {
    64: Shape(16, 4096, 77, 8, causal=False),
    40: Shape(16, 4096, 77, 8, causal=False),
    112: Shape(8, 4096, 120, 20, causal=False),
}
"""Shapes with few keys, by head dim; forward alone."""


class Call(NamedTuple):
    forward: Forward
    backward: Backward


def call_of(shape: Shape, head_dim: int, device: str = "cuda") -> Call:
    def rows(tokens: int) -> Tensor:
        return torch.randn(shape.batch, tokens, shape.heads, head_dim, dtype=torch.bfloat16, device=device)

    q, k, v, dout = rows(shape.queries), rows(shape.keys), rows(shape.keys), rows(shape.queries)
    problem = Problem(q, k, v, softmax_scale=head_dim**-0.5, window_right=0 if shape.causal else None)
    out, lse = torch.empty_like(q), torch.empty(shape.batch, shape.heads, shape.queries, device=device)
    gradients = (torch.empty_like(t) for t in (q, k, v))
    return Call(Forward(problem, out, lse), Backward(problem, out, lse, dout, None, *gradients))


def forwards(call: Forward) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yields the kernels of `auto`, the fitted tile, and others that could replace it."""
    today = families.choose(call, families.Policy())
    yield f"today: {today.family.name}", lambda: today.family.run(call, today.tile)
    x = call.problem
    tile = select_fitted_tile(x.q.shape[-1], x.v.shape[-1], is_modified=False)
    few = families.HOPPER_FEW_KEYS
    if few.unsupported(call) is None:
        yield "few keys", lambda: few.run(call, few.tile(call))
        committed = conditions.forward_tile(x)
        yield "sm_90", lambda: hopper_forward(x, call.out, call.lse, tile=committed)
    elif tile is not None:
        tiles = {"next power of two": conditions.forward_tile(x), "fitted": tile, "fitted, lazy": replace(tile, is_lazy=True)}
        if tile.head_dim_v <= 96:
            tiles["fitted, two stages of q"] = replace(tile, q_stages=2, num_stages=2)
        for name, other in tiles.items():
            yield name, lambda other=other: hopper_forward(x, call.out, call.lse, tile=other)


def backwards(call: Backward) -> Iterator[tuple[str, Callable[[], None]]]:
    today = families.choose(call, families.Policy())
    yield f"today: {today.family.name}", lambda: today.family.run(call, today.tile)
    head_dim = call.problem.q.shape[-1]
    if 128 < head_dim <= 160:
        yield "fused 160", lambda: fused_192_backward(call, HOPPER_FUSED_160)
    portable = families.PORTABLE_BACKWARD
    if today.family is not portable:
        yield "portable", lambda: portable.run(call, portable.tile(call))


def is_close(results: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(
        bool(((a.float() - b.float()).abs().max() <= TOLERANCE * b.float().abs().max()).item())
        for a, b in zip(results, wanted, strict=True)
    )


def main() -> int:
    parser = harness.make_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--budget-ms", type=float, default=40.0, help="device time of each kernel")
    parser.add_argument("--head-dims", type=int, nargs="*", default=HEAD_DIMS)
    options = parser.parse_args()
    harness.need_gpu(parser)
    return measure(options)


def measure(options: argparse.Namespace) -> int:
    end = time.monotonic() + 60.0 * options.minutes
    out: Path | None = options.out
    run = harness.Run("tests.device.fitted", __doc__, out)
    for head_dim, shape in FEW.items():
        call = call_of(shape, head_dim)
        facts = {"head_dim": head_dim, **shape._asdict(), "direction": "forward"}
        add_rows(run, dict(forwards(call.forward)), call, facts, 4.0 * call.forward.out.numel() * shape.keys, options.budget_ms)
    for head_dim in options.head_dims:
        for shape in SHAPES:
            call = call_of(shape, head_dim)
            x = call.forward.problem
            flops = 4.0 * x.q.numel() * shape.keys * (0.5 if shape.causal else 1.0)
            facts = {"head_dim": head_dim, **shape._asdict()}
            kernels = {"forward": (forwards(call.forward), flops), "backward": (backwards(call.backward), 2.5 * flops)}
            for direction, (named, work) in kernels.items():
                if time.monotonic() > end:
                    return run.status()
                add_rows(run, dict(named), call, {**facts, "direction": direction}, work, options.budget_ms)
    return run.status()


def add_rows(
    run: harness.Run, kernels: dict[str, Callable[[], None]], call: Call, facts: dict[str, Any], flops: float, budget_ms: float
) -> None:
    """Runs, checks and times the kernels of one call, the first of which is today's."""
    backward = call.backward
    results = [backward.out, backward.lse] if facts["direction"] == "forward" else [backward.dq, backward.dk, backward.dv]
    wanted: list[Tensor] = []
    statuses = {}
    for name, kernel in list(kernels.items()):
        for t in results:
            t.fill_(float("nan"))
        try:
            kernel()
            torch.cuda.synchronize()
        except Exception as e:  # a variant that does not fit must not end the run
            statuses[name] = f"{type(e).__name__}: {e}"[:200]
            del kernels[name]
            continue
        wanted = wanted or [t.clone() for t in results]
        statuses[name] = "ok" if is_close(results, wanted) else "wrong"
    times = harness.times(kernels, budget_ms)
    first = None
    for name, status in statuses.items():
        row: dict[str, Any] = {**facts, "implementation": name, "status": status}
        if name in times:
            row |= times[name]
            first = first or row["us"]
            row |= {"tflops": flops / row["us"] / 1e6, "speed": first / row["us"]}
        text = f"{row['us']:9.1f} us {row['tflops']:6.0f} TFLOP/s {row['speed']:.2f}" if "us" in row else status
        causal = "causal" if facts["causal"] else "open"
        run.add(row, f"{facts['head_dim']:4} {facts['queries']:6} {causal:6} {facts['direction']:8} {name:24} {status:6} {text}")


if __name__ == "__main__":
    sys.exit(main())
