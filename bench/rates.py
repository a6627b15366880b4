"""The kernels' rates beside their peers', in one run on one GPU: FlashAttention's sweep, bf16, 16k tokens, heads * head dim = 2048.

    python -m bench.rates --out bench/results/rates.json
    python -m bench.rates --quick
    python -m bench.rates --head-dims 128 --tiles forward=128x128x8x3
    python -m bench.rates --head-dims 128 --seqlens 8192 --sweep forward=128x128x8x2,128x64x4x3 dkdv=64x128x8x2

Inputs are standard normal. Each result is checked in fp64, on one head of one sequence, before it is timed; a wrong one never is.
Times are of CUDA events around single calls, the implementations taking turns, L2 emptied before each: median and quartiles.
"""

from __future__ import annotations

import argparse
import csv
import functools
import json
import platform
import shlex
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

import flexattn
from flexattn.testing import GRADIENT_FACTOR, Inputs, check_close, make_call, reference_attention, reference_gradients

TOKENS = 16384
MODEL_DIM = 2048
HEAD_DIMS = (64, 128, 256)
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
DIRECTIONS = ("forward", "backward")
MASKS = ("causal", "full")
DTYPE = torch.bfloat16
QUICK_SEQLENS = (4096,)

OURS, FLEX = "flexattn", "FlexAttention"
MEASURES = "CUDA events around one call; median and quartiles over calls that take turns with the others', L2 emptied before each"
FLOPS = "4 * batch * heads * seqlen**2 * head_dim, half of it with a causal mask, times 2.5 backward (FlashAttention's count)"
BYTES = "each of q, k, v, out (backward: q, k, v, out, dout, dq, dk, dv) once"
KERNEL_FLOPS = "those of a kernel's own products: forward 2 of 2 * batch * heads * seqlen**2 * head_dim, dq 3, dkdv 4; causal half"
KERNELS = {
    "forward": ("forward", "_attn_fwd_kernel", 2, 4),
    "dq": ("backward", "_attn_bwd_dq_kernel", 3, 6),
    "dkdv": ("backward", "_attn_bwd_dkdv_kernel", 4, 6),
}
"""Of each kernel: the direction it runs in, its name in the source, its products, the tensors it touches."""

MATMUL_SIZE = 8192
WARM_UPS = 3
ROUNDS = (10, 200)  # at least, at most
FLUSH_BYTES = 2**30  # several times any L2; writing it also takes longer than a host takes to enqueue a call


class Work(NamedTuple):
    flops: float
    bytes: float


class Cell(NamedTuple):
    """One shape in one direction."""

    direction: str
    head_dim: int
    causal: bool
    seqlen: int

    @property
    def batch(self) -> int:
        return max(1, TOKENS // self.seqlen)

    @property
    def heads(self) -> int:
        return max(1, MODEL_DIM // self.head_dim)

    @property
    def tensor_bytes(self) -> int:
        return self.batch * self.seqlen * self.heads * self.head_dim * DTYPE.itemsize

    @property
    def product(self) -> float:
        """Operations of one product with a score matrix in it."""
        return 2 * self.batch * self.heads * self.seqlen**2 * self.head_dim * (0.5 if self.causal else 1.0)

    @property
    def work(self) -> Work:
        """What FLOPS and BYTES say."""
        if self.direction == "forward":
            return Work(2 * self.product, 4 * self.tensor_bytes)
        return Work(5 * self.product, 8 * self.tensor_bytes)

    def kernel_work(self, kernel: str) -> Work:
        """What KERNEL_FLOPS says; the backward's kernels each compute the scores again."""
        _, _, products, tensors = KERNELS[kernel]
        return Work(products * self.product, tensors * self.tensor_bytes)

    def __str__(self) -> str:
        return f"{self.direction} d{self.head_dim} {'causal' if self.causal else 'full'} s{self.seqlen}"


class Tensors(NamedTuple):
    """The inputs of a cell, [batch, seqlen, heads, head_dim]."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


class Prepared(NamedTuple):
    results: Callable[[], Sequence[Tensor]]  # (out,) or (dq, dk, dv), [batch, seqlen, heads, head_dim]: what is checked
    timed: Callable[[], object]


class Implementation(NamedTuple):
    name: str
    version: str
    prepare: Callable[[Cell, Tensors], Prepared]  # raises where it cannot run the cell


class Row(NamedTuple):
    """One implementation in one cell; what is None was not measured, and `reason` says why."""

    name: str
    version: str
    direction: str
    head_dim: int
    causal: bool
    seqlen: int
    batch: int
    heads: int
    status: str  # "measured", "wrong" or "refused"
    reason: str | None = None
    calls: int | None = None
    us: float | None = None
    us_q1: float | None = None
    us_q3: float | None = None
    tflops: float | None = None
    gb_s: float | None = None
    share: float | None = None  # of the matrix product's TFLOP/s

    def __str__(self) -> str:
        head = f"{self.direction} d{self.head_dim} {'causal' if self.causal else 'full':6} s{self.seqlen:<5} {self.name:24}"
        if self.us is None or self.share is None:
            return f"{head} {self.status}: {self.reason}"
        quartiles = f"[{self.us_q1:.1f}, {self.us_q3:.1f}]"
        return f"{head} {self.us:9.1f} us {quartiles:20} {self.tflops:6.1f} TFLOP/s {self.share:4.0%} {self.gb_s:7.1f} GB/s"


Timer = Callable[[dict[str, Callable[[], object]]], dict[str, list[float]]]
Check = Callable[[Sequence[Tensor]], None]


def measure(
    cell: Cell,
    candidates: Sequence[Implementation],
    tensors: Tensors,
    check: Check,
    timer: Timer,
    matmul_tflops: float,
    work: Work | None = None,
) -> list[Row]:
    """A row for each candidate. Only those whose results pass `check` are given to `timer` (milliseconds of each call)."""
    work = work or cell.work
    rows: dict[str, Row] = {}
    timed: dict[str, Callable[[], object]] = {}
    for name, its_version, prepare in candidates:
        rows[name] = Row(name, its_version, *cell, cell.batch, cell.heads, "measured")
        with warnings.catch_warnings(record=True) as said:  # SDPA gives its reasons as warnings
            warnings.simplefilter("always")
            try:
                prepared = prepare(cell, tensors)
                results = prepared.results()
            except Exception as e:  # whatever keeps a peer from running is its row in the table
                texts = dict.fromkeys([f"{type(e).__name__}: {e}", *(str(w.message) for w in said)])
                reason = "; ".join(" ".join(text.split())[:300] for text in texts)
                rows[name] = rows[name]._replace(status="refused", reason=reason)
                continue
        try:
            check(results)
        except AssertionError as e:
            rows[name] = rows[name]._replace(status="wrong", reason=str(e))
        else:
            timed[name] = prepared.timed
    for name, times in (timer(timed) if timed else {}).items():
        q1, median, q3 = statistics.quantiles(times, n=4, method="inclusive")
        tflops = work.flops / median * 1e-9
        rows[name] = rows[name]._replace(
            calls=len(times),
            us=median * 1e3,
            us_q1=q1 * 1e3,
            us_q3=q3 * 1e3,
            tflops=tflops,
            gb_s=work.bytes / median * 1e-6,
            share=tflops / matmul_tflops,
        )
    return list(rows.values())


def checker(cell: Cell, tensors: Tensors) -> Check:
    """Compares with the reference in fp64 on the last head of the last sequence; elsewhere it looks for NaN and infinity."""
    head = Tensors(*(t[-1:, :, -1:].contiguous() for t in tensors))
    inputs = Inputs(head.q, head.k, head.v, "bshd", None, None, None, None, None, None)
    spec, x = make_call(inputs, attn_mask_type="causal" if cell.causal else "no_mask", return_max_logit=False)
    if cell.direction == "forward":
        names, factor = ("out",), {}
        wanted, budget = ([reference_attention(spec, x, dtype=dtype)[0]] for dtype in (torch.float64, spec.dtype))
    else:
        names, factor = ("dq", "dk", "dv"), {"factor": GRADIENT_FACTOR}
        wanted, budget = (reference_gradients(spec, x, head.dout, dtype=dtype)[:3] for dtype in (torch.float64, spec.dtype))

    def check(results: Sequence[Tensor]) -> None:
        for name, got, want, eager in zip(names, results, wanted, budget, strict=True):
            check_close(name, got[-1:, :, -1:], want, eager, **factor)
            assert got.isfinite().all(), f"{name} is not finite outside the head that was compared"

    return check


def make_tensors(cell: Cell, device: str, seed: int = 0) -> Tensors:
    generator = torch.Generator(device).manual_seed(seed)
    shape = (cell.batch, cell.seqlen, cell.heads, cell.head_dim)
    return Tensors(*(torch.randn(shape, dtype=DTYPE, device=device, generator=generator) for _ in Tensors._fields))


def time_on_device(timed: dict[str, Callable[[], object]], budget_ms: float) -> dict[str, list[float]]:
    """Milliseconds of each call, all taking turns, in about `budget_ms` of device time for each of them."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")

    def one_round() -> list[tuple[torch.cuda.Event, torch.cuda.Event]]:
        events = []
        for call in timed.values():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            start.record()
            call()
            end.record()
            events.append((start, end))
        return events

    for _ in range(WARM_UPS):
        events = one_round()
    torch.cuda.synchronize()
    round_ms = events[0][0].elapsed_time(events[-1][1])
    least, most = ROUNDS
    rounds = [one_round() for _ in range(min(most, max(least, int(budget_ms * len(timed) / round_ms))))]
    torch.cuda.synchronize()
    return {name: [row[i][0].elapsed_time(row[i][1]) for row in rounds] for i, name in enumerate(timed)}


def measure_matmul(timer: Timer) -> float:
    """TFLOP/s of a bf16 matrix product, the ceiling of every rate here."""
    a, b = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, dtype=DTYPE, device="cuda") for _ in range(2))
    times = timer({"matmul": lambda: a @ b})["matmul"]
    return 2 * MATMUL_SIZE**3 / statistics.median(times) * 1e-9


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "bshd": lambda t: t,
    "bhsd": lambda t: t.transpose(1, 2).contiguous(),
    "bhsd, a view of bshd": lambda t: t.transpose(1, 2),
}


def differentiable(attend: Callable[[Cell], Attend], layout: str) -> Callable[[Cell, Tensors], Prepared]:
    """How to prepare what is a differentiable function of q, k and v in `layout`."""

    def prepare(cell: Cell, tensors: Tensors) -> Prepared:
        q, k, v, dout = (_LAYOUTS[layout](t) for t in tensors)
        call = attend(cell)

        def as_bshd(results: Sequence[Tensor]) -> Sequence[Tensor]:
            return results if layout == "bshd" else [t.transpose(1, 2) for t in results]

        if cell.direction == "forward":
            return Prepared(lambda: as_bshd([call(q, k, v)]), lambda: call(q, k, v))
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        out = call(*leaves)
        backward = functools.partial(torch.autograd.grad, out, leaves, dout, retain_graph=True)
        return Prepared(lambda: as_bshd(backward()), backward)

    return prepare


def _flexattn(cell: Cell) -> Attend:
    mask = "causal" if cell.causal else "no_mask"
    return lambda q, k, v: flexattn.attention(q, k, v, attn_mask_type=mask, backend="triton")


def _sdpa(backend: str, cell: Cell) -> Attend:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=cell.causal)

    return attend


def _flex_attention(mode: str, cell: Cell) -> Attend:
    import torch._functorch.config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()  # past its limit of recompilations a shape would run uncompiled
    torch._functorch.config.donated_buffer = False  # so that one graph's backward can run again and again
    compiled = torch.compile(flex_attention, dynamic=False, mode=mode)
    block_mask = None
    if cell.causal:
        block_mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, cell.seqlen, cell.seqlen, device="cuda")
    return lambda q, k, v: compiled(q, k, v, block_mask=block_mask)


def flexattn_and_peers(flex_mode: str) -> list[Implementation]:
    """Each in the layout that it is made for."""
    torch_version = f"torch {torch.__version__}"
    return [
        Implementation(OURS, flexattn.__version__, differentiable(_flexattn, "bshd")),
        Implementation(
            "SDPA flash", torch_version, differentiable(functools.partial(_sdpa, "FLASH_ATTENTION"), "bhsd, a view of bshd")
        ),
        Implementation(
            "SDPA cuDNN",
            f"{torch_version}, cuDNN {torch.backends.cudnn.version()}",
            differentiable(functools.partial(_sdpa, "CUDNN_ATTENTION"), "bhsd"),
        ),
        Implementation(
            FLEX, f"{torch_version}, {flex_mode}", differentiable(functools.partial(_flex_attention, flex_mode), "bhsd")
        ),
    ]


def with_tiles(tiles: dict[str, Any], cell: Cell, tensors: Tensors) -> Prepared:
    """Our launchers, with these tiles instead of the committed ones; `tiles` has them by KERNELS' names."""
    from flexattn.kernels_triton.backward import attention_backward
    from flexattn.kernels_triton.forward import attention_forward
    from flexattn.kernels_triton.problem import Problem

    q, k, v, dout = tensors
    problem = Problem(q, k, v, softmax_scale=cell.head_dim**-0.5, window_right=0 if cell.causal else None)

    def forward() -> tuple[Tensor, Tensor]:
        out = torch.empty_like(q)
        lse = torch.empty(cell.batch, cell.heads, cell.seqlen, dtype=torch.float32, device=q.device)
        attention_forward(problem, out, lse, tile=tiles.get("forward"))
        return out, lse

    if cell.direction == "forward":
        return Prepared(lambda: forward()[:1], forward)
    out, lse = forward()

    def backward() -> list[Tensor]:
        gradients = [torch.empty_like(t) for t in (q, k, v)]
        attention_backward(problem, out, lse, dout, None, *gradients, tile_dq=tiles.get("dq"), tile_dkdv=tiles.get("dkdv"))
        return gradients

    return Prepared(backward, backward)


@contextmanager
def _captured_launches(kernel: str, launches: list[tuple[Any, ...]]) -> Iterator[None]:
    """Inside, what launches that kernel is kept as well as run."""
    from flexattn.kernels_triton import backward, forward
    from flexattn.kernels_triton.launch import launch

    def launch_and_keep(*arguments: Any) -> None:
        if arguments[0].__name__ == KERNELS[kernel][1]:
            launches.append(arguments)
        launch(*arguments)

    with mock.patch.object(forward, "launch", launch_and_keep), mock.patch.object(backward, "launch", launch_and_keep):
        yield


def one_kernel(kernel: str, tile: Any, cell: Cell, tensors: Tensors) -> Prepared:
    """One of our kernels alone, launched again and again on what a whole call gave it."""
    from flexattn.kernels_triton.launch import launch

    whole = with_tiles({kernel: tile}, cell, tensors)
    launches: list[tuple[Any, ...]] = []

    def results() -> Sequence[Tensor]:
        with _captured_launches(kernel, launches):
            return whole.results()

    def timed() -> None:
        for arguments in launches:
            launch(*arguments)

    return Prepared(results, timed)


def committed_tile(kernel: str, head_dim: int, device: str) -> Any:
    from flexattn.kernels_triton.configs import DKDV, DQ, FORWARD
    from flexattn.kernels_triton.problem import Problem

    x = torch.empty(1, 1, 1, head_dim, dtype=DTYPE, device=device)
    return Problem(x, x, x, softmax_scale=1.0).tile({"forward": FORWARD, "dq": DQ, "dkdv": DKDV}[kernel])


def parse_tiles(text: str) -> tuple[str, list[Any]]:
    """'dq=64x64x4x2,128x64x8x2' -> ('dq', [Tile(64, 64, 4, 2), Tile(128, 64, 8, 2)]); a flag follows by its name."""
    from flexattn.kernels_triton.configs import Tile

    kernel, _, tiles = text.partition("=")
    try:
        split = [tile.split("x") for tile in tiles.split(",")]
        parsed = [Tile(*map(int, fields[:4]), **dict.fromkeys(fields[4:], True)) for fields in split]
    except (TypeError, ValueError):
        parsed = []
    if kernel not in KERNELS or not parsed:
        raise argparse.ArgumentTypeError(
            f"{text!r}; accepted: {', '.join(KERNELS)}, then = and tiles (block_m, block_n, warps, stages), as forward=128x64x4x3"
        )
    return kernel, parsed


def tile_name(tile: Any) -> str:
    return "x".join(name if value is True else str(value) for name, value in tile._asdict().items() if value is not False)


def tables(rows: Sequence[Row]) -> str:
    """TFLOP/s and share of the matrix product's, a table for each direction, head dim and mask, a column for each length."""
    text: list[str] = []
    for direction, head_dim, causal in dict.fromkeys((r.direction, r.head_dim, r.causal) for r in rows):
        here = [r for r in rows if (r.direction, r.head_dim, r.causal) == (direction, head_dim, causal)]
        seqlens = sorted({r.seqlen for r in here})
        names = list(dict.fromkeys(r.name for r in here))
        width = max(map(len, names))
        text += ["", f"{direction}, head dim {head_dim}, {'causal' if causal else 'full'}: TFLOP/s (share of the matrix product)"]
        text.append(" " * width + "".join(f"{f's{seqlen}':>14}" for seqlen in seqlens))
        for name in names:
            cells = {r.seqlen: r for r in here if r.name == name}
            text.append(f"{name:{width}}" + "".join(f"{_figure(cells.get(seqlen)):>14}" for seqlen in seqlens))
    return "\n".join(text).lstrip("\n")


def _figure(row: Row | None) -> str:
    if row is None:
        return "-"
    return row.status if row.tflops is None or row.share is None else f"{row.tflops:.0f} ({row.share:.0%})"


def verdict(rows: Sequence[Row], peer: str = FLEX) -> str:
    """In how many cells flexattn's median is below the peer's, and each cell where it is not."""
    ours, theirs = ({r[2:6]: r for r in rows if r.name == name and r.us is not None} for name in (OURS, peer))
    both = [(cell, ours[cell].us, theirs[cell].us) for cell in ours if cell in theirs]
    slower = [f"  {Cell(*cell)}: {us / their_us:.2f} times its time" for cell, us, their_us in both if us >= their_us]
    return "\n".join(
        [f"faster than {peer} in {len(both) - len(slower)} of the {len(both)} cells where both were measured", *slower]
    )


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {
        "flexattn": flexattn.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": str(torch.backends.cudnn.version()),
    }
    try:
        found["triton"] = version("triton")
    except PackageNotFoundError:
        found["triton"] = None
    return found


def write(out: Path, command: str, matmul_tflops: float, rows: Sequence[Row], kernels: bool) -> None:
    """All of it as JSON at `out`, and the rows as CSV beside it."""
    result = {
        "command": command,
        "measures": MEASURES,
        "flops": KERNEL_FLOPS if kernels else FLOPS,
        "bytes": "each tensor that the kernel reads or writes once" if kernels else BYTES,
        "dtype": str(DTYPE).removeprefix("torch."),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "versions": versions(),
        "matmul": {"shape": [MATMUL_SIZE] * 3, "tflops": matmul_tflops},
        "rows": [row._asdict() for row in rows],
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    with out.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(Row._fields)
        writer.writerows(rows)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.rates", description="rates of attention kernels on one GPU")
    parser.add_argument("--head-dims", type=int, nargs="+", default=HEAD_DIMS, metavar="D")
    parser.add_argument("--seqlens", type=int, nargs="+", metavar="S", help=f"default {' '.join(map(str, SEQLENS))}")
    parser.add_argument("--directions", nargs="+", choices=DIRECTIONS, default=DIRECTIONS)
    parser.add_argument("--masks", nargs="+", choices=MASKS, default=MASKS)
    parser.add_argument("--quick", action="store_true", help=f"seqlen {QUICK_SEQLENS[0]} alone, and fewer calls")
    parser.add_argument("--budget-ms", type=float, help="device time for each implementation in each cell (default 200, quick 50)")
    parser.add_argument(
        "--tiles", type=parse_tiles, nargs="+", default=[], metavar="KERNEL=BMxBNxWxS", help="also run ours with these tiles"
    )
    parser.add_argument(
        "--sweep", type=parse_tiles, nargs="+", metavar="KERNEL=TILE,TILE", help="time our kernels alone, with each of these tiles"
    )
    parser.add_argument("--flex-mode", default="default", help="torch.compile's mode for FlexAttention: max-autotune-no-cudagraphs")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="where to write the result; its rows go to FILE.csv too")
    args = parser.parse_args(arguments)
    args.seqlens = args.seqlens or (QUICK_SEQLENS if args.quick else SEQLENS)
    args.budget_ms = args.budget_ms or (50.0 if args.quick else 200.0)
    if any(len(tiles) != 1 for _, tiles in args.tiles):
        parser.error("--tiles takes one tile a kernel; --sweep compares several")
    return args


Group = tuple[Cell, list[Implementation], Work]


def groups(args: argparse.Namespace, device: str) -> list[Group]:
    """What is measured together, in order."""
    shapes = [(d, mask == "causal", s) for d in args.head_dims for mask in args.masks for s in args.seqlens]
    if args.sweep:
        return [_sweep(kernel, tiles, Cell(KERNELS[kernel][0], *shape), device) for shape in shapes for kernel, tiles in args.sweep]
    everyone = flexattn_and_peers(args.flex_mode)
    if args.tiles:
        tiles = {kernel: tile for kernel, [tile] in args.tiles}
        name = " ".join(f"{kernel}={tile_name(tile)}" for kernel, tile in tiles.items())
        everyone.insert(1, Implementation(name, flexattn.__version__, functools.partial(with_tiles, tiles)))
    cells = [Cell(direction, *shape) for shape in shapes for direction in args.directions]
    return [(cell, everyone, cell.work) for cell in cells]


def _sweep(kernel: str, tiles: Sequence[Any], cell: Cell, device: str) -> Group:
    committed = committed_tile(kernel, cell.head_dim, device)
    candidates = [
        Implementation(
            f"{kernel} {tile_name(tile)}{' committed' if tile == committed else ''}",
            flexattn.__version__,
            functools.partial(one_kernel, kernel, tile),
        )
        for tile in dict.fromkeys([committed, *tiles])
    ]
    return cell, candidates, cell.kernel_work(kernel)


def main(arguments: Sequence[str]) -> int:
    args = parse(arguments)
    if not torch.cuda.is_available():
        print("nothing is measured: no GPU, torch.cuda.is_available() is False", file=sys.stderr)
        return 2
    from tqdm import tqdm

    timer = functools.partial(time_on_device, budget_ms=args.budget_ms)
    matmul_tflops = measure_matmul(timer)
    command = f"python -m bench.rates {shlex.join(arguments)}".rstrip()
    print(f"{torch.cuda.get_device_name()}, {', '.join(f'{name} {text}' for name, text in versions().items())}")
    print(f"matrix product {MATMUL_SIZE}^3 {DTYPE}: {matmul_tflops:.1f} TFLOP/s; FLOP: {KERNEL_FLOPS if args.sweep else FLOPS}")
    rows: list[Row] = []
    todo = groups(args, "cuda")
    with tqdm(todo, unit="cell", mininterval=1) as progress:
        for cell, candidates, work in progress:
            progress.set_postfix_str(str(cell))
            tensors = make_tensors(cell, "cuda")
            new = measure(cell, candidates, tensors, checker(cell, tensors), timer, matmul_tflops, work)
            if args.sweep:
                new.sort(key=lambda row: float("inf") if row.us is None else row.us)
            rows += new
            for row in new:
                progress.write(str(row))
            if args.out is not None:  # after each cell, so that what was measured outlives an interruption
                write(args.out, command, matmul_tflops, rows, bool(args.sweep))
    if not args.sweep:
        print(tables(rows))
        print(verdict(rows))
    return int(any(row.status == "wrong" or (row.name == OURS and row.status != "measured") for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
