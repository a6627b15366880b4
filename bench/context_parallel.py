"""Attention over the GPUs of one host (context parallelism): each strategy, one GPU, and torch's context_parallel.

    torchrun --standalone --nproc-per-node 2 -m flexattn.bench.context_parallel --out context_parallel.json

The calls have 32 heads over 8, head dim 128, bf16, causal. Before anything is timed, each rank's out, dq, dk and dv are compared
with one GPU's, and the GPUs are warmed. A time is the median over queued calls of the slowest rank's time. Efficiency is one GPU's
time over the number of ranks times their time; one GPU's time is the mean of all ranks' before and after. Memory is the peak of
a forward and backward above the memory held before. With --graphs, "auto" is also captured in a CUDA graph for each direction and
replayed. Shared memory is the memory that ranks keep for each other to read, in addition to the peak; with
FLEXATTN_PEER_MEMORY=never there is none. If there is no GPU, the program runs over gloo at toy sizes, to check itself.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import importlib
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from flexattn import attention, distributed
from flexattn.bench import harness, record
from flexattn.bench.harness import Row, Run, host_us, make_parser
from flexattn.bench.measure import peak_bytes, quartiles, reason_of
from flexattn.bench.shapes import log_normal_lengths
from flexattn.distributed import peer_memory
from flexattn.distributed.cost import Heads

DTYPE = torch.bfloat16
STRATEGIES = ("gather", "halo", "ulysses", "ring")
KERNELS_AND_WAYS = tuple(itertools.product(("cuDNN", "flash"), ("allgather", "alltoall")))
PEERS = tuple(f"torch context_parallel, {kernel}, {how}" for kernel, how in KERNELS_AND_WAYS)
WARM_SECONDS = 1.0  # one GPU's calls before a cell take that long: a GPU's clock falls as it warms
SECONDS, MOST_CALLS = 0.8, 60  # timed calls of one direction
HOST_MATTERS_MS = 100  # the host's time to enqueue a longer forward and backward is not measured
NAMES = ("out", "dq", "dk", "dv")
SETTINGS = ("NCCL_", "TORCH_NCCL_", "TORCH_SYMM_", "FLEXATTN_")  # environment variables that a run notes

Call = Callable[[Tensor, Tensor, Tensor], Tensor]


class Cell(NamedTuple):
    """A causal call of the whole: one sequence, or packed documents."""

    length: int
    window: int = 0  # 0: none
    documents: tuple[int, ...] = ()
    heads: int = 32
    heads_kv: int = 8
    head_dim: int = 128


CELLS: dict[str, Cell] = {
    "32k": Cell(32768),
    "128k, window 4096": Cell(131072, window=4096),
    "128k, documents": Cell(131072, documents=log_normal_lengths(131072, 1096.6, 1.0, 131072)),
    "128k": Cell(131072),
}


def small(cell: Cell) -> Cell:
    """Returns a cell of the same kind that is small enough for a CPU."""
    documents = tuple(n // 512 for n in cell.documents)
    return Cell(sum(documents) if documents else cell.length // 512, cell.window // 512, documents, 4, 2, 16)


class Whole(NamedTuple):
    """Tensors of a cell before they are divided, the same on each rank, and the arguments."""

    qkv: tuple[Tensor, Tensor, Tensor]
    dout: Tensor
    arguments: dict[str, Any]  # arguments of `attention`
    plan_arguments: dict[str, Any]


def make_whole(cell: Cell, device: torch.device) -> Whole:
    generator = torch.Generator(device=device).manual_seed(cell.length)
    batch = () if cell.documents else (1,)

    def normal(heads: int) -> Tensor:
        return torch.randn(*batch, cell.length, heads, cell.head_dim, generator=generator, device=device, dtype=DTYPE)

    qkv = (normal(cell.heads), normal(cell.heads_kv), normal(cell.heads_kv))
    window = {"window_size": (cell.window or -1, 0 if cell.window else -1)}
    if not cell.documents:
        arguments: dict[str, Any] = {"attn_mask_type": "causal", **window}
        return Whole(qkv, normal(cell.heads), arguments, {"length": cell.length, **arguments})
    ends = torch.tensor((0, *cell.documents), device=device).cumsum(0, dtype=torch.int32)
    lengths = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends}
    most = {"max_seqlen_q": max(cell.documents), "max_seqlen_kv": max(cell.documents)}
    arguments = {"qkv_format": "thd", "attn_mask_type": "padding_causal", **window, **lengths, **most}
    return Whole(qkv, normal(cell.heads), arguments, {"documents": cell.documents, "attn_mask_type": "causal", **window})


def both(call: Call, qkv: Sequence[Tensor], dout: Tensor) -> tuple[Tensor, ...]:
    """Returns out, dq, dk and dv."""
    leaves = [t.detach().requires_grad_() for t in qkv]
    out = call(*leaves)
    return (out.detach(), *torch.autograd.grad(out, leaves, dout))


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def wait_for_all() -> None:
    """Returns when the device's queue of each rank is empty."""
    synchronize()
    dist.barrier()
    synchronize()


class Ranks:
    """This process as a rank of torchrun."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self.seconds = seconds
        self.on_gpu = torch.cuda.is_available()
        if self.on_gpu:
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(self.device)
        else:
            self.device = torch.device("cpu")
        options: dict[str, Any] = {"device_id": self.device} if self.on_gpu else {}
        if not dist.is_initialized():
            dist.init_process_group("nccl" if self.on_gpu else "gloo", timeout=datetime.timedelta(seconds=90), **options)
        self.group: Any = dist.group.WORLD
        self.rank, self.count = dist.get_rank(), dist.get_world_size()

    def gathered(self, numbers: list[float]) -> Tensor:
        """Returns all ranks' numbers, [ranks, numbers]."""
        own = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        found = [torch.empty_like(own) for _ in range(self.count)]
        dist.all_gather(found, own)
        return torch.stack(found).cpu()

    def said_by_any(self, is_true: bool) -> bool:
        return bool(self.gathered([float(is_true)]).any())

    def milliseconds(self, call: Callable[[], object]) -> Tensor:
        """Returns the times of calls in a row, [ranks, calls]."""
        call()
        synchronize()
        before = time.perf_counter()
        call()
        synchronize()
        one = float(self.gathered([time.perf_counter() - before]).max())
        count = max(3, min(MOST_CALLS, int(self.seconds / one)))
        wait_for_all()
        marks = [self.mark()]
        for _ in range(count):
            call()
            marks.append(self.mark())
        synchronize()
        return self.gathered([a.elapsed_time(b) if self.on_gpu else b - a for a, b in itertools.pairwise(marks)])

    def mark(self) -> Any:
        """Returns an event in the device's queue; without a GPU, milliseconds of the host."""
        if not self.on_gpu:
            return 1e3 * time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def peak_mib(self, call: Callable[[], object]) -> float | None:
        return float(self.gathered([peak_bytes(call) / 2**20]).max()) if self.on_gpu else None

    def shared_mib(self) -> float:
        """Returns the memory of a rank that others read, in MiB. It is kept between calls: the most that any call needed."""
        return peer_memory.shared_bytes(dist.group.WORLD, self.device) / 2**20

    def host_us(self, call: Callable[[], object]) -> float:
        """Returns the median time until a call returns if the device's queue is empty, of the slowest rank."""
        return float(self.gathered([host_us(call, 3, wait_for_all)]).max())


class Implementation(NamedTuple):
    call: Call
    plan: distributed.Plan
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    facts: Row = {}  # noqa: RUF012  # nothing writes to it
    is_captured: bool = False  # in a CUDA graph


def steps_of(call: Call, qkv: Sequence[Tensor], dout: Tensor) -> dict[str, Callable[[], Any]]:
    """Returns the timed steps: a forward, and a forward and backward that returns out, dq, dk and dv."""

    def forward() -> Tensor:
        with torch.no_grad():
            return call(*qkv)

    return {"forward": forward, "both": lambda: both(call, qkv, dout)}


def _replaying(step: Callable[[], object]) -> Callable[[], Any]:
    graph, results = harness.capture(step, wait_for_all)

    def replay() -> Any:
        graph.replay()
        return results

    return replay


def ours(cell: Cell, whole: Whole, group: Any, graphs: bool = False) -> dict[str, Implementation]:
    """Returns flexattn's calls by name: each strategy, the choice of auto, and, if `graphs`, that choice in a CUDA graph."""
    plan = distributed.plan(group, **whole.plan_arguments)
    heads = Heads(cell.heads, cell.heads_kv, cell.head_dim, cell.head_dim, DTYPE.itemsize, 1)
    found = {}
    for strategy in ("auto", *STRATEGIES):
        call = functools.partial(distributed.attention, plan=plan, strategy=strategy)
        facts = {"layout": plan.layout} | ({"takes": plan.chosen(heads, "auto")} if strategy == "auto" else {})
        found[f"flexattn, {strategy}"] = Implementation(call, plan, facts=facts)
    if graphs:
        found["flexattn, auto, in a graph"] = found["flexattn, auto"]._replace(is_captured=True)
    return found


def _sdpa(kernel: str) -> Call:
    """Returns SDPA of [1, s, h, d] by one of torch's kernels."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    chosen = SDPBackend.FLASH_ATTENTION if kernel == "flash" else SDPBackend.CUDNN_ATTENTION

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        with sdpa_kernel(chosen):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2)

    return call


@contextlib.contextmanager
def _torch_context(length: int, ranks: Ranks, how: str) -> Iterator[None]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    module = importlib.import_module("torch.distributed.tensor.experimental._attention")
    mesh = init_device_mesh(ranks.device.type, (ranks.count,))
    module.set_rotate_method(how)
    with context_parallel(mesh, buffers=[torch.zeros(1, length, device=ranks.device)], buffer_seq_dims=[1]):
        yield


def peers(cell: Cell, ranks: Ranks) -> dict[str, Implementation | str]:
    """Returns the peers' calls by name, or the reason that a peer cannot run."""
    if cell.documents:
        return dict.fromkeys(PEERS, "takes no packed documents")
    if cell.window:
        return dict.fromkeys(PEERS, "takes no window")
    plan = distributed.plan(ranks.group, length=cell.length, layout="zigzag")
    return {
        f"torch context_parallel, {kernel}, {how}": Implementation(
            _sdpa(kernel), plan, functools.partial(_torch_context, cell.length, ranks, how)
        )
        for kernel, how in KERNELS_AND_WAYS
    }


class Comparison:
    """A cell on these ranks, with one GPU's results and times for comparison."""

    def __init__(self, cell: Cell, ranks: Ranks) -> None:
        self.cell, self.ranks, self.whole = cell, ranks, make_whole(cell, ranks.device)
        one = functools.partial(attention, **self.whole.arguments)
        self.results = both(one, self.whole.qkv, self.whole.dout)
        warm = time.perf_counter() + (WARM_SECONDS if ranks.on_gpu else 0.0)
        while time.perf_counter() < warm:
            both(one, self.whole.qkv, self.whole.dout)
            synchronize()
        area = distributed.plan(1, **self.whole.plan_arguments).area(0)
        flops = 4 * area * cell.heads * cell.head_dim
        self.row: Row = {"implementation": "one GPU", "ranks": 1, "status": "measured", "scores": area}
        self.one, self.flops = one, flops
        self.measure_one()
        self.row["peak_mib"] = ranks.peak_mib(lambda: both(one, self.whole.qkv, self.whole.dout))

    def measure_one(self) -> None:
        """Measures one GPU. A second call adds to the times of the first."""
        for direction, step in steps_of(self.one, self.whole.qkv, self.whole.dout).items():
            by_rank = [statistics.median(of.tolist()) for of in self.ranks.milliseconds(step)]
            taken = [*self.row.get(f"{direction}_ms_by_rank", []), by_rank]
            mean = statistics.mean(ms for of in taken for ms in of)
            products = 1.0 if direction == "forward" else 3.5
            self.row |= {f"{direction}_ms": mean, f"{direction}_ms_by_rank": taken}
            self.row[f"{direction}_tflops"] = products * self.flops / mean * 1e-9

    def compared(self, row: Row) -> Row:
        """Adds the efficiencies to a row."""
        for direction in ("forward", "both"):
            if row["status"] == "measured" and row["ranks"] > 1:
                row[f"{direction}_efficiency"] = self.row[f"{direction}_ms"] / (row["ranks"] * row[f"{direction}_ms"])
        return row

    def measured(self, way: Implementation) -> Row:
        ranks, packed = self.ranks, way.plan.is_packed
        parts = distributed.shard(way.plan, *self.whole.qkv, self.whole.dout)
        assert isinstance(parts, tuple)
        *qkv, dout = parts
        steps = steps_of(way.call, qkv, dout)
        row: Row = {"ranks": ranks.count, **way.facts}
        reason, got = "", None
        with way.context():
            try:
                if way.is_captured:
                    steps = {direction: _replaying(step) for direction, step in steps.items()}
                got = steps["both"]()
                synchronize()
            except Exception as e:  # a refusal is a row of the table
                reason = reason_of(e)
            if ranks.said_by_any(bool(reason)):
                return row | {"status": "refused", "reason": reason or "raised on another rank"}
            assert got is not None
            wanted = distributed.shard(way.plan, *self.results, dim=0 if packed else 1)
            assert isinstance(wanted, tuple)
            errors = ranks.gathered(list(map(harness.distance, got, wanted))).amax(0)
            bits = ranks.gathered([float(torch.equal(a, b)) for a, b in zip(got, wanted, strict=True)]).amin(0)
            row["errors"] = dict(zip(NAMES, errors.tolist(), strict=True))
            row["equal_bits"] = [name for name, equal in zip(NAMES, bits.tolist(), strict=True) if equal]
            del got, wanted
            if not bool((errors < harness.WORST).all()):
                return row | {"status": "wrong"}
            row["status"] = "measured"
            for direction, step in steps.items():
                row |= quartiles(ranks.milliseconds(step).amax(0).tolist(), f"{direction}_ms")
            row["peak_mib"] = None if way.is_captured else ranks.peak_mib(steps["both"])
            row["shared_mib"] = ranks.shared_mib()
            if row["both_ms"] < HOST_MATTERS_MS:
                row |= {f"host_us_{direction}": ranks.host_us(step) for direction, step in steps.items()}
        return self.compared(row)


def line_of(row: Row) -> str:
    head = f"{row['cell']:18} {row['implementation']:42}"
    if row["status"] != "measured":
        return f"{head} {row['status']}: {row.get('reason', row.get('errors'))}"
    texts = []
    for direction in ("forward", "both"):
        share = f" ({row[f'{direction}_efficiency']:.3f})" if f"{direction}_efficiency" in row else ""
        texts.append(f"{direction} {row[f'{direction}_ms']:8.3f} ms{share}")
    if row.get("peak_mib") is not None:
        texts.append(f"{row['peak_mib']:.0f} + {row.get('shared_mib', 0.0):.0f} MiB")
    if "host_us_both" in row:
        texts.append(f"host {row['host_us_forward']:.0f} + {row['host_us_both']:.0f} us")
        texts.append(f"bits {row['equal_bits']} {row.get('takes', '')}")
    return f"{head} {', '.join(texts)}"


class Session:
    """Measures cells until the time is over. Rank 0 prints and writes the rows."""

    def __init__(self, ranks: Ranks, run: Run, seconds: float) -> None:
        self.ranks, self.run = ranks, run
        self.end = time.perf_counter() + seconds

    def say(self, row: Row) -> None:
        self.run.add(row, line_of(row) if self.ranks.rank == 0 else "")

    def is_over(self) -> bool:
        return self.ranks.said_by_any(time.perf_counter() > self.end)

    def measure(self, name: str, cell: Cell, options: argparse.Namespace) -> None:
        left_out = {"status": "left out", "reason": "the time was over"}
        if self.is_over():
            self.say({"cell": name, "implementation": "all", **left_out})
            return
        comparison = Comparison(cell, self.ranks)
        rows: list[Row] = [{"cell": name, **comparison.row}]
        self.say(rows[0])
        every = ours(cell, comparison.whole, self.ranks.group, options.graphs) | peers(cell, self.ranks)
        for called, way in harness.chosen(every, options.implementations).items():
            if isinstance(way, str):
                row: Row = {"status": "refused", "reason": way}
            else:
                row = left_out if self.is_over() else comparison.measured(way)
            rows.append({"cell": name, "implementation": called, **row})
            self.say(rows[-1])
            if self.ranks.on_gpu:
                torch.cuda.empty_cache()
        comparison.measure_one()
        for row in rows:
            row |= comparison.row if row["implementation"] == "one GPU" else comparison.compared(row)
            if row["status"] == "measured" and self.ranks.rank == 0:
                print(line_of(row), flush=True)
        self.run.write()


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__, only="patterns of cells, such as '128k*'")
    parser.add_argument("--implementations", nargs="+", default=["*"], metavar="PATTERN", help="such as 'flexattn, *'")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after this time, start no further implementation")
    parser.add_argument(
        "--timed-seconds", type=float, default=SECONDS, help="seconds of timed calls in a direction, at least 3 calls"
    )
    parser.add_argument("--graphs", action="store_true", help="measure auto in a CUDA graph too, over NCCL")
    options = parser.parse_args(argv)
    if "RANK" not in os.environ:
        parser.error("no RANK; torchrun runs this: torchrun --standalone --nproc-per-node 2 -m flexattn.bench.context_parallel")
    ranks = Ranks(options.timed_seconds)
    cells = {name: cell if ranks.on_gpu else small(cell) for name, cell in harness.chosen(CELLS, options.only).items()}
    versions: dict[str, Any] = record.versions()
    if ranks.on_gpu:
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    facts: Row = {
        "ranks": ranks.count,
        "versions": versions,
        "settings": {name: value for name, value in os.environ.items() if name.startswith(SETTINGS)},
        "cells": {name: cell._asdict() for name, cell in cells.items()},
    }
    run = Run("flexattn.bench.context_parallel", __doc__, options.out if ranks.rank == 0 else None, argv, **facts)
    run.content["command"] = run.content["command"].replace("python", f"torchrun --standalone --nproc-per-node {ranks.count}", 1)
    session = Session(ranks, run, options.seconds)
    for name, cell in cells.items():
        session.measure(name, cell, options)
    dist.barrier()
    sys.stdout.flush()
    dist.destroy_process_group()
    return run.status()


if __name__ == "__main__":
    sys.exit(main())
