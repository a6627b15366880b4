"""Attention over keys in a cache, by the cells of serving: decode, pages, chunked prefill, shared prefixes, absorbed latents (MLA).

    python -m flexattn.bench.decode --out decode.json [--only PATTERN]

Each cell is one step's call. Rows of the cache that are not in use hold NaN, and unused entries of the page table numbers out of
range. Timed beside each other: the call, the same with `batch_invariant`, over a dense cache, on cuDNN, and SDPA where it can do
the same. Each result is checked against the eager backend in fp64 before it is timed; a time is that of the replay of a CUDA graph
with L2 emptied before. Needs a GPU.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

FLUSH_BYTES = 2**28  # written before each replay: empties L2
HOST_CALLS = 50
ROUNDS, CALLS = 5, 8  # turns of each implementation, and replays in each
WORST = 2.0**-6  # |got - exact| / |exact| in the Euclidean norm: several times the rounding of bf16, far below a wrong result
GARBAGE = 2147480000  # in the entries of the page table that no length reaches
MEAN_KEYS = 2048  # where lengths are log-normal
LATENT = 512  # columns of a latent cache that are v
DTYPE = torch.bfloat16

Call = Callable[[], Any]


class Cell(NamedTuple):
    """A step of serving: sequences with `keys` in the cache, the last `queries` of which attend."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    heads: int = 32
    heads_kv: int = 8
    head_dim: int = 128
    page: int = 16
    more: str = ""  # a name of OPTIONS
    is_fp8: bool = False  # keys and values
    is_latent: bool = False  # v is the first LATENT columns of k
    prefix: int = 0  # tokens that all sequences share


def decodes(batch: int, keys: int, queries: int = 1, **more: Any) -> Cell:
    return Cell((queries,) * batch, (keys,) * batch, **more)


def _log_normal(batch: int) -> tuple[int, ...]:
    lengths = torch.empty(batch).log_normal_(0.0, 1.0, generator=torch.Generator().manual_seed(0))
    return tuple((lengths * (MEAN_KEYS / lengths.mean())).long().clamp(min=1).tolist())


PREFILLS, DECODES = ((2048,) * 2, (2048,) * 2), ((1,) * 128, (2048,) * 128)

CELLS: dict[str, Cell] = {
    **{f"64 x 8192, page {page}": decodes(64, 8192, page=page) for page in (1, 4, 16, 64, 256)},
    "64 x 2048, page 16": decodes(64, 2048),
    "128 x 1024, page 16": decodes(128, 1024),
    "16 x 8192, page 64": decodes(16, 8192, page=64),
    "10 x 8192, page 64": decodes(10, 8192, page=64),
    "8 x 4096, page 16": decodes(8, 4096),
    "1 x 1024, page 16": decodes(1, 1024),
    "1 x 4096, page 16": decodes(1, 4096),
    "1 x 65536, page 64": decodes(1, 65536, page=64),
    "1 x 131072, page 64": decodes(1, 131072, page=64),
    "131072 among 63 x 1024, page 16": Cell((1,) * 64, (131072, *(1024,) * 63)),
    "256 log-normal, page 16": Cell((1,) * 256, _log_normal(256)),
    "d 64, sinks, window 128, page 16": decodes(64, 8192, heads=64, head_dim=64, more="sinks, window"),
    "d 64, sinks, page 16": decodes(64, 8192, heads=64, head_dim=64, more="sinks"),
    "d 256, softcap, page 64": decodes(32, 8192, heads=16, heads_kv=4, head_dim=256, page=64, more="softcap"),
    "32 key heads, page 16": decodes(64, 2048, heads_kv=32),
    "48 query heads, page 16": decodes(64, 8192, heads=48),
    "4 queries, page 16": decodes(64, 8192, 4),
    "8 queries of a tree, page 16": decodes(64, 8192, 8, more="tree"),
    "2048 queries over 32768, page 16": decodes(1, 32768, 2048),
    "2048 queries over 32768, page 64": decodes(1, 32768, 2048, page=64),
    "2 prefills and 128 decodes, page 16": Cell(PREFILLS[0] + DECODES[0], PREFILLS[1] + DECODES[1]),
    "2 prefills, page 16": Cell(*PREFILLS),
    "128 decodes, page 16": Cell(*DECODES),
    "FP8 cache, page 16": decodes(64, 8192, is_fp8=True),
    "32 with a prefix of 32768, page 16": decodes(32, 32768 + 512, prefix=32768),
    "MLA 128 heads, 128 x 4096, page 64": decodes(128, 4096, heads=128, heads_kv=1, head_dim=576, page=64, is_latent=True),
    "MLA 64 heads, 132 x 8192, page 64": decodes(132, 8192, heads=64, heads_kv=1, head_dim=576, page=64, is_latent=True),
    "MLA 16 heads, 32 x 8192, page 64": decodes(32, 8192, heads=16, heads_kv=1, head_dim=576, page=64, is_latent=True),
    "MLA 16 heads, 1 x 65536, page 64": decodes(1, 65536, heads=16, heads_kv=1, head_dim=576, page=64, is_latent=True),
}


class Step(NamedTuple):
    """The tensors of a cell: packed queries, keys and values, and the arguments that say which are whose."""

    q: Tensor  # [total, h, d]
    k: Tensor  # [pages, page_size, h_kv, d], or dense [b, longest, h_kv, d]
    v: Tensor
    where: dict[str, Any]  # arguments of attention()


def exact(dense: Step, cell: Cell) -> Tensor:
    """Returns out in fp64 by the eager backend; sequences of several lengths one by one, as each needs its own keys alone."""
    from flexattn import attention

    where = {name: t for name, t in dense.where.items() if not name.startswith("descale")}
    one, scales = torch.ones(1, device=dense.q.device), (dense.where.get("descale_k"), dense.where.get("descale_v"))

    def attend(q: Tensor, rows: slice, longest: int, **more: Any) -> Tensor:
        caches = ((t[rows, :longest], one if scale is None else scale) for t, scale in zip((dense.k, dense.v), scales, strict=True))
        k, v = (t.double() * scale.double()[:, None] for t, scale in caches)
        out = attention(q.double(), k, v, **where | more, backend="eager")
        assert isinstance(out, Tensor)
        return out

    if len(set(cell.keys)) == 1:
        return attend(dense.q, slice(None), max(cell.keys))
    parts = []
    starts = itertools.accumulate(cell.queries, initial=0)
    for b, (start, count, length) in enumerate(zip(starts, cell.queries, cell.keys, strict=False)):
        q = dense.q[start : start + count]
        own = {"cu_seqlens_q": torch.tensor((0, len(q)), dtype=torch.int32, device=q.device)}
        own["seqused_kv"] = where["seqused_kv"][b : b + 1]
        parts.append(attend(q, slice(b, b + 1), length, **own))
    return torch.cat(parts)


def _options(cell: Cell, lengths: Tensor) -> dict[str, Any]:
    device, own = lengths.device, cell.queries[0]
    sinks = {"softmax_type": "learnable", "softmax_offset": torch.linspace(-1, 1, cell.heads, device=device)}
    nodes = torch.rand(len(cell.keys), own, own, device=device) < 0.5

    def tree(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        node = j - (lengths[b] - own)  # a key of the step itself is seen where the tree says so, or is the query's own
        return (node < 0) | (node == i) | nodes[b, i, node.clamp(0, own - 1)]

    found: dict[str, dict[str, Any]] = {
        "": {},
        "sinks": sinks,
        "sinks, window": {**sinks, "window_size": (127, 0)},
        "softcap": {"softcap": 30.0},
        "tree": {"mask_mod": tree, "attn_mask_type": "padding"},
    }
    return found[cell.more]


def _page_table(cell: Cell) -> tuple[int, Tensor]:
    """Returns the number of pages, and int32 [b, columns], pages in a random order, those of a shared prefix once."""
    used = [-(-n // cell.page) for n in cell.keys]
    shared = cell.prefix // cell.page
    pages = shared + sum(count - shared for count in used)
    order = torch.randperm(pages, dtype=torch.int32)
    table = torch.full((len(used), max(used)), GARBAGE, dtype=torch.int32)
    at = shared
    for row, count in zip(table, used, strict=True):
        row[:shared] = order[:shared]
        row[shared:count] = order[at : at + count - shared]
        at += count - shared
    return pages, table


def _pool(cell: Cell, pages: int, columns: int, device: str) -> Tensor:
    x = torch.randn(pages, cell.page, cell.heads_kv, columns, device=device, dtype=DTYPE)
    return x.to(torch.float8_e4m3fn) if cell.is_fp8 else x


def make_steps(cell: Cell, device: str = "cuda") -> tuple[Step, Step]:
    """Returns the step over pages, and over a dense cache with the same keys."""
    torch.manual_seed(0)
    lengths = torch.tensor(cell.keys, dtype=torch.int32, device=device)
    q = torch.randn(sum(cell.queries), cell.heads, cell.head_dim, device=device, dtype=DTYPE)
    where: dict[str, Any] = {
        "qkv_format": "thd_2bshd",
        "attn_mask_type": "padding_causal_bottom_right",
        "cu_seqlens_q": torch.tensor((0, *itertools.accumulate(cell.queries)), dtype=torch.int32, device=device),
        "max_seqlen_q": max(cell.queries),
        "seqused_kv": lengths,
        **_options(cell, lengths),
    }
    if cell.is_fp8:
        where |= {name: torch.linspace(0.5, 1.5, cell.heads_kv, device=device) for name in ("descale_k", "descale_v")}
    pages, table = _page_table(cell)
    pools = [_pool(cell, pages, cell.head_dim, device)]
    if not cell.is_latent:
        pools.append(_pool(cell, pages, cell.head_dim, device))
    for row, length in zip(table, cell.keys, strict=True):
        if rest := length % cell.page:
            for pool in pools:
                pool[row[length // cell.page], rest:] = torch.nan
    dense = [pool.view(torch.uint8)[table.where(table != GARBAGE, 0).to(device)].view(pool.dtype).flatten(1, 2) for pool in pools]
    steps = []
    for caches, more in ((pools, {"page_table": table.to(device)}), (dense, {})):
        k, v = caches * 2 if cell.is_latent else caches
        steps.append(Step(q, k, v[..., :LATENT] if cell.is_latent else v, where | more))
    return steps[0], steps[1]


def _sdpa(step: Step, backend: Any) -> Tensor:
    """Equally long sequences with a query each, by SDPA, over the dense cache as SDPA has it (bhsd)."""
    from torch.nn.attention import sdpa_kernel

    with sdpa_kernel([backend]):
        out: Tensor = torch.nn.functional.scaled_dot_product_attention(
            step.q[:, :, None], step.k.transpose(1, 2), step.v.transpose(1, 2), enable_gqa=step.q.shape[1] != step.k.shape[2]
        )
    return out[:, :, 0]


def implementations(cell: Cell, paged: Step, dense: Step) -> dict[str, Call]:
    """Calls that compute the cell, by name."""
    from torch.nn.attention import SDPBackend

    from flexattn import attention, attention_with_prefix

    def ours(step: Step, **more: Any) -> Call:
        return functools.partial(attention, step.q, step.k, step.v, **step.where, **more)

    made = {"flexattn": ours(paged, backend="triton")}
    if cell.prefix:
        made["flexattn, attention_with_prefix"] = functools.partial(
            attention_with_prefix, paged.q, paged.k, paged.v, prefix_length=cell.prefix, **paged.where
        )
    made["flexattn, batch_invariant"] = ours(paged, backend="triton", batch_invariant=True)
    made["flexattn, dense"] = ours(dense, backend="triton")
    made["flexattn, cuDNN"] = ours(paged, backend="cudnn")
    is_plain = not (cell.more or cell.is_fp8 or cell.is_latent) and set(cell.queries) == {1} and len(set(cell.keys)) == 1
    if is_plain:
        for name in ("CUDNN_ATTENTION", "FLASH_ATTENTION"):
            made[f"SDPA {name}, dense"] = functools.partial(_sdpa, dense, getattr(SDPBackend, name))
    return made


def bytes_of(cell: Cell) -> int:
    """Bytes that a call must move: q and out, and each key and value once."""
    d_v = LATENT if cell.is_latent else cell.head_dim
    columns = cell.head_dim if cell.is_latent else cell.head_dim + d_v
    window = 128 if "window" in cell.more else max(cell.keys)
    keys = sum(min(n, window) for n in cell.keys) - cell.prefix * (len(cell.keys) - 1)
    queries = 2 * sum(cell.queries) * cell.heads * (cell.head_dim + d_v)
    return queries + keys * cell.heads_kv * columns * (1 if cell.is_fp8 else 2)


def flops_of(cell: Cell) -> int:
    """Operations of the two products, where no window hides keys."""
    d_v = LATENT if cell.is_latent else cell.head_dim
    pairs = sum(n * m - n * (n - 1) // 2 for n, m in zip(cell.queries, cell.keys, strict=True))
    return 2 * pairs * cell.heads * (cell.head_dim + d_v)


def captured(call: Call) -> torch.cuda.CUDAGraph:
    """A CUDA graph of the call, after calls that compile and warm what it needs."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def time_replays(graph: torch.cuda.CUDAGraph, flush: Tensor, calls: int = CALLS) -> list[float]:
    """Microseconds of device time of each replay."""
    made = [torch.cuda.Event(enable_timing=True) for _ in range(2 * calls)]  # type: ignore[no-untyped-call]
    events = list(zip(made[::2], made[1::2], strict=True))
    for start, end in events:
        flush.zero_()
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return [1e3 * start.elapsed_time(end) for start, end in events]


def host_time(call: Call) -> float:
    """Microseconds until an ordinary call returns to Python, with nothing before it in the device's queue."""
    times = []
    for _ in range(HOST_CALLS):
        torch.cuda.synchronize()
        before = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - before))
    return statistics.median(times)


def measure_merge(flush: Tensor) -> dict[str, Any]:
    """Returns a row for `merge_attention` of the results of two calls, 16384 queries of 32 heads of 128."""
    from flexattn import merge_attention

    sides = [torch.randn(16384, 32, 128, device="cuda", dtype=DTYPE), torch.randn(32, 16384, device="cuda")]
    sides += [torch.randn_like(side) for side in sides]
    call = functools.partial(merge_attention, *sides, qkv_format="thd")
    wanted = merge_attention(*(side.double() for side in sides), qkv_format="thd")
    error = float((call()[0].double() - wanted[0]).norm() / wanted[0].norm())
    row: dict[str, Any] = {"cell": "merge of 16384 queries", "implementation": "flexattn", "error": error}
    if not error < WORST:
        return row | {"status": "wrong"}
    graph = captured(call)
    times = [us for _ in range(ROUNDS) for us in time_replays(graph, flush)]
    moved = 3 * sides[0].nbytes + 3 * sides[1].nbytes
    us = statistics.median(times)
    return row | {"status": "measured", "us": us, "gb_s": moved / us * 1e-3, "tflops": 0.0, "host_us": host_time(call)}


def measure(name: str, cell: Cell, flush: Tensor) -> list[dict[str, Any]]:
    """Returns a row for each implementation of the cell."""
    from flexattn import BackendError

    paged, dense = make_steps(cell)
    wanted = exact(dense, cell)
    rows: list[dict[str, Any]] = []
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    for implementation, call in implementations(cell, paged, dense).items():
        row: dict[str, Any] = {"cell": name, "implementation": implementation}
        try:
            got = call()
        except (BackendError, ValueError, TypeError, RuntimeError) as e:  # a refusal is a row of the table
            lines = str(e).strip().splitlines()
            rows.append(row | {"status": "refused", "reason": lines[min(1, len(lines) - 1)].strip()[:300]})
            continue
        error = float((got.double() - wanted).norm() / wanted.norm())
        if not error < WORST:
            rows.append(row | {"status": "wrong", "error": error})
            continue
        rows.append(row | {"status": "measured", "error": error, "host_us": host_time(call)})
        graphs[implementation] = captured(call)
    times: dict[str, list[float]] = {implementation: [] for implementation in graphs}
    for graph in graphs.values():
        time_replays(graph, flush, 2)
    for _ in range(ROUNDS):
        for implementation, graph in graphs.items():
            times[implementation] += time_replays(graph, flush)
    for row in rows:
        if row["status"] == "measured":
            q1, median, q3 = statistics.quantiles(times[row["implementation"]], n=4)
            rates = {"gb_s": bytes_of(cell) / median * 1e-3, "tflops": flops_of(cell) / median * 1e-6}
            row |= {"us": median, "us_q1": q1, "us_q3": q3, **rates}
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="where the JSON is written, after every cell")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="cells whose name matches, as 'MLA*'")
    parser.add_argument("--list", action="store_true", help="print the cells' names, and measure nothing")
    options = parser.parse_args(argv)
    chosen = {name: cell for name, cell in CELLS.items() if fnmatch.fnmatchcase(name, options.only)}
    if options.list:
        print("\n".join(chosen))
        return 0
    if not torch.cuda.is_available():
        parser.error("no CUDA device; decode measures device time")
    from flexattn.bench import record

    facts = {
        "command": record.command_line("flexattn.bench.decode", sys.argv[1:], options.out),
        "started": record.now(),
        "device": record.device_facts(),
        "versions": record.versions(),
        "method": __doc__,
    }
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    rows: list[dict[str, Any]] = []
    for name, cell in [*chosen.items(), ("merge", None)]:
        if cell is None and options.only != "*":
            continue
        new = [measure_merge(flush)] if cell is None else measure(name, cell, flush)
        for row in new:
            said = (
                f"{row['us']:9.1f} us {row['gb_s']:6.0f} GB/s {row['tflops']:6.1f} TFLOP/s, host {row['host_us']:5.1f} us"
                if row["status"] == "measured"
                else f"{row['status']}: {row.get('reason', row.get('error'))}"
            )
            print(f"{name:36} {row['implementation']:32} {said}", flush=True)
        rows += new
        if options.out is not None:
            options.out.write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")
    return int(any(row["status"] == "wrong" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
