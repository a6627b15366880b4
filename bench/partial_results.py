"""Results in float32, as sums over parts take them, beside those in 16 bits: what making them costs a forward and a backward.

    python -m flexattn.bench.partial_results --out partial_results.json

A time is the median of replays of a CUDA graph with L2 emptied before, the variants taking turns. Before, float32 is rounded and
held to the bits in 16, but for a dq that does not repeat to the bit, which is held to be near. Needs a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.bench.decode import FLUSH_BYTES, Captured, captured, distance, time_replays
from flexattn.bench.decode_cells import DTYPE
from flexattn.dispatch.spec import FP32_GRADIENTS, Results

ROUNDS, CALLS = 5, 3  # turns of each variant, and replays in each
NEAR = 2.0**-7  # distance between two dq by its norm: two roundings in bfloat16


class Cell(NamedTuple):
    """Causal self-attention in bfloat16, a part of which has all keys."""

    tokens: int
    heads: int
    heads_kv: int
    head_dim: int
    deterministic: bool = False


CELLS = {
    "16384 tokens, 32 heads over 8, head dim 128": Cell(16384, 32, 8, 128),
    "16384 tokens, 32 heads over 8, head dim 128, deterministic": Cell(16384, 32, 8, 128, deterministic=True),
    "4096 tokens, 32 heads over 8, head dim 128": Cell(4096, 32, 8, 128),
    "16384 tokens, 16 heads, head dim 64": Cell(16384, 16, 16, 64),
}


def variants(cell: Cell, device: str, backend: str) -> dict[str, Callable[[], tuple[Tensor, ...]]]:
    """Returns the calls by name; of a backward (dq, dk, dv)."""
    from flexattn import attention, attention_backward
    from flexattn.in_layout import attend

    def normal(heads: int) -> Tensor:
        return torch.randn(1, cell.tokens, heads, cell.head_dim, device=device, dtype=DTYPE)

    q, dout, k, v = map(normal, (cell.heads, cell.heads, cell.heads_kv, cell.heads_kv))
    how: dict[str, Any] = {"attn_mask_type": "causal", "backend": backend, "deterministic": cell.deterministic}
    out, lse = attention(q, k, v, **how, return_lse=True)

    def forward(in_fp32: bool) -> tuple[Tensor, ...]:
        return (attend(Results(fp32_out=in_fp32), q, k, v, **how)[0],)

    def backward(fp32: Any) -> tuple[Tensor, ...]:
        return attention_backward(dout, q, k, v, out, lse, **how, fp32_gradients=fp32)[:3]

    calls: dict[str, Callable[[], tuple[Tensor, ...]]] = {}
    for in_fp32 in (False, True):
        calls[f"forward, out in {'float32' if in_fp32 else '16 bits'}"] = lambda in_fp32=in_fp32: forward(in_fp32)  # type: ignore[misc]
    for fp32 in FP32_GRADIENTS:
        calls[f"backward, {fp32} in float32"] = lambda fp32=fp32: backward(fp32)  # type: ignore[misc]
    return calls


def wrong(calls: dict[str, Callable[[], tuple[Tensor, ...]]], cell: Cell) -> str | None:
    """Returns what is not the rounded result of the first variant in its direction; None: all is."""
    for direction in ("forward", "backward"):
        [(_, wanted), *others] = [(name, call()) for name, call in calls.items() if name.startswith(direction)]
        for name, found in others:
            for number, (got, want) in enumerate(zip(found, wanted, strict=True)):
                varies = direction == "backward" and number == 0 and not cell.deterministic
                if not (distance(got, want.double()) < NEAR if varies else torch.equal(got.to(want.dtype), want)):
                    return f"{name}: result {number}"
    return None


def measure(cell: Cell, flush: Tensor) -> dict[str, Any]:
    """Returns the times in microseconds of all variants, if none is wrong."""
    calls = variants(cell, "cuda", "triton")
    if reason := wrong(calls, cell):
        return {"status": "wrong", "reason": reason}
    graphs: dict[str, Captured] = {name: captured(call) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for graph in graphs.values():
        time_replays(graph, flush, 1)
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            times[name] += time_replays(graph, flush, CALLS)
    return {"status": "measured", "us": {name: statistics.median(found) for name, found in times.items()}}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="where the JSON is written, after every cell")
    parser.add_argument("--only", default="", metavar="TEXT", help="cells with this in their names")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("no CUDA device, on which kernels are timed")
    from flexattn.bench import record

    facts = {
        "command": record.command_line("flexattn.bench.partial_results", sys.argv[1:], options.out),
        "started": record.now(),
        "device": record.device_facts(),
        "versions": record.versions(),
        "method": __doc__,
    }
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    rows: list[dict[str, Any]] = []
    for name, cell in ((name, cell) for name, cell in CELLS.items() if options.only in name):
        rows.append({"cell": name, **cell._asdict(), **measure(cell, flush)})
        print(name, {key: rows[-1].get(key) for key in ("status", "us", "reason")}, flush=True)
        if options.out is not None:
            options.out.write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")
    return int(any(row["status"] == "wrong" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
