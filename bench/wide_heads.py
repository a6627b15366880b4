"""Forwards at head dims above 256: the kernel for sm_90 beside the portable one.

    python -m flexattn.bench.wide_heads --out wide_heads.json

A time is the median of replays of a CUDA graph with L2 emptied before, the two taking turns. Results of the smaller cells are held
to the eager backend's in fp64 before. Needs a GPU of compute capability 9.0.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.bench.decode import FLUSH_BYTES, WORST, Captured, captured, time_replays
from flexattn.bench.decode_cells import DTYPE, LATENT

ROUNDS, CALLS = 4, 4  # turns of each kernel, and replays in each
PAGE = 64
MOST_CHECKED = 30_000_000  # elements of q, k and v, at most, of cells that are held to fp64
FAMILIES = {"portable": "never", "sm_90 wide": "always"}  # by FLEXATTN_HOPPER


class Cell(NamedTuple):
    """A causal call; latents lie in pages, and v is their first columns."""

    batch: int
    queries: int
    keys: int
    heads: int
    heads_kv: int
    head_dim: int = 576
    head_dim_v: int = LATENT
    is_latent: bool = False


def latents(batch: int, heads: int, keys: int, queries: int = 1) -> Cell:
    return Cell(batch, queries, keys, heads, 1, is_latent=True)


def prefill(batch: int, length: int, heads: int, head_dim: int, heads_kv: int | None = None) -> Cell:
    return Cell(batch, length, length, heads, heads_kv or heads, head_dim, head_dim)


CELLS: dict[str, Cell] = {
    **{
        f"latents, {batch} of {keys}, {heads} heads": latents(batch, heads, keys)
        for batch, heads, keys in (
            (1, 16, 1024), (4, 16, 1024), (1, 128, 1024), (4, 128, 1024), (16, 16, 1024), (16, 128, 1024), (1, 16, 8192),
            (8, 32, 4096), (64, 128, 8192), (64, 64, 8192), (128, 128, 4096),
        )
    },
    **{f"latents, 4 of 4096, 128 heads, {queries} queries": latents(4, 128, 4096, queries) for queries in (2, 4, 64, 512)},
    **{
        f"head dim {dim}, {batch} x {length}": prefill(batch, length, 8, dim)
        for dim in (320, 384, 512)
        for batch, length in ((1, 128), (4, 512), (1, 1024), (1, 2048), (1, 4096), (2, 8192))
    },
    "head dim 512, 4 x 2048, 8 heads over 4": prefill(4, 2048, 8, 512, 4),
    **{
        f"head dim 512, one query, {batch} of {keys}": Cell(batch, 1, keys, 16, 8, 512, 512)
        for batch, keys in ((1, 1024), (1, 8192), (16, 4096), (64, 4096))
    },
    "576 beside 512, 1 x 2048, 16 heads": Cell(1, 2048, 2048, 16, 16),
}  # fmt: skip


def make_call(cell: Cell, device: str = "cuda") -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    """Returns q, k and v, and the other arguments of a cell."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=DTYPE)

    q = normal(cell.batch, cell.queries, cell.heads, cell.head_dim)
    if not cell.is_latent:
        k, v = (normal(cell.batch, cell.keys, cell.heads_kv, dim) for dim in (cell.head_dim, cell.head_dim_v))
        return (q, k, v), {"attn_mask_type": "causal_bottom_right"}
    columns = cell.keys // PAGE
    cache = normal(cell.batch * columns, PAGE, 1, cell.head_dim)
    table = torch.randperm(cell.batch * columns, device=device).view(cell.batch, columns).int()
    used = torch.full((cell.batch,), cell.keys, dtype=torch.int32, device=device)
    where = {"page_table": table, "seqused_kv": used, "max_seqlen_kv": cell.keys}
    return (q, cache, cache[..., : cell.head_dim_v]), {"attn_mask_type": "padding_causal_bottom_right", **where}


def measure(cell: Cell, flush: Tensor) -> dict[str, Any]:
    """Returns the times in microseconds and, where they were compared, the errors of both kernels."""
    from flexattn import attention
    from flexattn.call_cache import clear_cache

    given, others = make_call(cell)
    exact = None
    if sum(t.numel() for t in given) <= MOST_CHECKED:
        exact = attention(*(t.double() for t in given), **others, backend="eager")
    graphs: dict[str, Captured] = {}
    errors: dict[str, float] = {}
    for name, setting in FAMILIES.items():
        os.environ["FLEXATTN_HOPPER"] = setting
        clear_cache()

        def attend() -> Any:
            return attention(*given, **others, backend="triton")

        if exact is not None:
            errors[name] = float((attend() - exact).norm() / exact.norm())
            if not errors[name] < WORST:
                return {"status": "wrong", "errors": errors}
        graphs[name] = captured(attend)
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for graph in graphs.values():
        time_replays(graph, flush, 2)
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            times[name] += time_replays(graph, flush, CALLS)
    return {"status": "measured", "us": {name: statistics.median(found) for name, found in times.items()}, "errors": errors}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="where the JSON is written, after every cell")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        parser.error("no CUDA device of compute capability 9.0, for which one of the two kernels is")
    from flexattn.bench import record

    facts = {
        "command": record.command_line("flexattn.bench.wide_heads", sys.argv[1:], options.out),
        "started": record.now(),
        "device": record.device_facts(),
        "versions": record.versions(),
        "method": __doc__,
    }
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    rows: list[dict[str, Any]] = []
    for name, cell in CELLS.items():
        rows.append({"cell": name, **cell._asdict(), **measure(cell, flush)})
        print(name, {key: rows[-1].get(key) for key in ("status", "us", "errors")}, flush=True)
        if options.out is not None:
            options.out.write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")
    return int(any(row["status"] == "wrong" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
