"""`python -m flexattn.bench.older_tiles`: times tiles of the portable kernels, as code of sm_80 on a newer GPU.

Each candidate is compiled once for sm_80, because 16-bit code of 8.6, 8.9 and 12.0 is the same, and is assembled for the GPU at
hand. A launch is padded with shared memory so that a multiprocessor holds as many programs as one of the older GPU: `@80` has an
A100's occupancy, `@89` that of 8.6, 8.9 and 12.0. Torch's FlashAttention-2, which uses the same instructions, is timed in the same
run. A candidate is timed only if its results are right.

Processes without a GPU compile, each candidate in a process of its own, while this process times what is ready. The result file is
complete after each step, and the command ends on time.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import itertools
import json
import math
import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from flexattn import compat
from flexattn.bench import record
from flexattn.cli import Parser

if TYPE_CHECKING:
    from flexattn.kernels_triton.common.tiles import Row
    from flexattn.kernels_triton.runtime.device import Tile
    from flexattn.kernels_triton.runtime.launch import Launch

ASSEMBLED_FOR = 90
SEED = 0
DEVICE = "cuda"
CHECKED_LENGTH = 512
CHECKED_KEYS = 2048  # keys of a checked decode: enough to be split
MAX_ERROR = 2e-2  # errors are shares of the largest value, in bf16
COMPILE_SECONDS = 90  # limit for one candidate
WORDS_OF_TIME = "CUDA events, median of 7 with a cold L2, 3 if the first call takes twice the time of the fastest candidate"

# Resources of a multiprocessor, by compute capability: bytes of shared memory, warps. CUDA C++ Programming Guide, "Compute
# Capabilities", technical specifications.
SHARED_OF_PROCESSOR = {80: 164 << 10, 89: 100 << 10, 90: 228 << 10}
WARPS_OF_PROCESSOR = {80: 64, 89: 48, 90: 64}
REGISTERS_OF_PROCESSOR = 65536
RESERVED = 1024  # bytes of shared memory that the system uses for each program

_WIDE_FORWARD = "128x64x4x2 128x64x8x2 128x64x8x3 128x32x4x2 128x32x8x2 64x64x4x1 64x64x4x2 64x64x4x3 64x32x4x2 64x32x4x3"
_SPACE = {
    "forward": {
        64: "128x64x4x2 128x64x4x3 128x64x8x2 128x32x4x2 128x32x4x3 64x64x4x2 64x64x4x3 128x128x4x2 128x128x8x2",
        128: _WIDE_FORWARD,
        256: "128x64x8x1 128x64x8x2 128x32x8x2 64x64x4x1 64x64x4x2 64x64x8x2 64x32x4x1 64x32x4x2 64x16x4x2",
    },
    "dq": {
        64: "128x64x4x2 128x64x4x1 128x64x8x2 64x64x4x2 64x64x4x1 64x64x4x3 128x32x4x2 128x32x4x3",
        128: "64x64x4x2 64x64x4x1 64x32x4x2 64x32x4x3 128x64x8x2 128x64x8x1 128x32x8x2 64x64x8x2",
        256: "32x32x4x2 32x32x4x1 64x32x4x1 64x32x4x2 64x64x4x1 64x64x8x1 128x32x8x1 64x32x8x2 64x16x4x2",
    },
    "dkdv": {
        64: "32x128x4x2 32x128x4x3 32x64x4x2 64x64x4x2 64x64x4x1 64x128x8x2 64x128x4x1 32x64x4x3 32x128x8x2",
        128: "64x64x4x2 64x64x4x1 32x64x4x2 32x64x4x1 64x128x8x2 64x128x8x1 32x128x8x2 16x64x4x2 64x64x4x2xapart",
        256: "64x64x4x1xapart 32x64x4x1 32x64x4x1xapart 32x64x4x2xapart 16x64x4x1 16x64x4x2 32x64x8x1 64x128x8x1xapart 32x32x4x1",
    },
    "one_grid": {
        64: "64x64x4x2 64x64x4x1 32x64x4x2",
        128: "64x64x4x2 64x64x4x1 32x64x4x2",
        256: "32x32x4x1 32x64x4x1 64x64x4x1",
    },
    "decode": {
        64: "16x64x4x2 16x64x4x3 16x128x4x2 16x32x4x3 32x64x4x2 64x64x4x2",
        128: "16x64x4x2 16x64x4x3 16x128x4x2 16x32x4x3 32x64x4x2 64x64x4x2",
        256: "16x64x4x1 16x64x4x2 16x32x4x2 16x32x4x3 32x32x4x2 64x32x4x2",
    },
    "forward+bias": {
        64: "64x64x4x2 128x64x4x2 128x64x8x2 64x32x4x2 64x64x4x1 128x32x4x2",
        128: "64x64x4x2 64x64x8x2 64x32x4x2 64x32x8x2 128x64x8x2 64x64x4x1 128x32x8x2",
        256: "32x32x8x1 64x32x8x2 64x32x4x1 64x32x4x2 64x16x4x2 32x32x4x2 64x64x8x1",
    },
    "dq+bias": {
        64: "64x32x4x2 64x64x4x2 64x64x4x1 128x32x4x2 128x64x8x2 64x32x4x1",
        128: "64x32x8x2 32x32x8x1 64x32x4x2 64x64x4x1 64x64x4x2 64x64x8x2 32x32x4x2",
        256: "32x32x8x1 32x32x4x1 32x32x4x2 64x16x4x2 64x32x4x1 64x32x8x1",
    },
    "dkdv+bias": {
        64: "32x64x4x2 64x64x4x2 64x64x4x1 32x128x4x2 32x128x8x2 32x64x4x1",
        128: "32x64x8x1 32x32x8x1 32x64x4x2 32x64x4x1 64x64x4x1 32x128x8x2 32x64x4x2xapart",
        256: "16x32x8x1 32x32x4x1 32x64x4x1xapart 16x64x4x1 32x32x8x1 32x64x8x1",
    },
}


class Job(NamedTuple):
    """One candidate."""

    kernel: str
    head_dim: int
    is_causal: bool
    tile: str
    committed: tuple[int, ...] = ()  # capabilities whose table has this tile

    @property
    def cell(self) -> tuple[str, int, bool]:
        return self.kernel, self.head_dim, self.is_causal

    @property
    def base(self) -> str:
        """The kernel without its features."""
        return self.kernel.partition("+")[0]

    @property
    def checked_length(self) -> int:
        return CHECKED_KEYS if self.kernel == "decode" else CHECKED_LENGTH


class Part(NamedTuple):
    """One compiled kernel of a candidate. registers and spills: as ptxas compiles for the true architecture, sm_80."""

    binary: Any
    names: list[str]
    stages: int
    registers: int
    spilled_bytes: int
    registers_here: int  # in the code for the GPU at hand


class Built(NamedTuple):
    parts: dict[int, list[Part]]  # by length: the kernel that combines split keys depends on their number
    failure: str | None
    seconds: float

    def parts_of(self, length: int) -> list[Part]:
        return self.parts.get(length) or self.parts[CHECKED_LENGTH]


def jobs_of(head_dims: Sequence[int], kernels: Sequence[str], masks: Sequence[str]) -> list[Job]:
    """Returns all candidates, each cell's committed tiles first; cells in the order of the arguments."""
    from flexattn.bench.tiles import parse_tile, tile_name

    jobs: list[Job] = []
    groups = (("forward", "dq", "dkdv"), ("one_grid", "decode"), ("forward+bias", "dq+bias", "dkdv+bias"))
    for kernel_group in ([kernel for kernel in group if kernel in kernels] for group in groups):
        for head_dim in head_dims:
            for mask in masks:
                for kernel in kernel_group:
                    if (kernel == "decode" or "+" in kernel) and mask == "causal" and "full" in masks:
                        continue  # the single query of a decode sees all keys
                    own = {sm: tile_name(_committed(kernel, head_dim, mask == "causal", sm)) for sm in (80, 86)}
                    space = _SPACE[kernel][64 if head_dim <= 64 else 128 if head_dim <= 128 else 256].split()
                    for tile in dict.fromkeys([*own.values(), *space]):
                        assert tile_name(parse_tile(tile)) == tile
                        committed = tuple(sm for sm in own if own[sm] == tile)
                        jobs.append(Job(kernel, head_dim, mask == "causal", tile, committed))
    return jobs


def _committed(kernel: str, head_dim: int, is_causal: bool, sm: int) -> Tile:
    from flexattn.kernels_triton.common.tiles import DKDV, DQ, FORWARD, ONE_GRID, row_of, select_tile, split_head_dim

    if kernel == "one_grid":
        return ONE_GRID
    parts = split_head_dim(head_dim)
    if kernel == "decode" and (few := row_of(FORWARD, sm, 2, 2 * sum(parts)).few):
        return few
    return select_tile(
        {"forward": FORWARD, "decode": FORWARD, "dq": DQ, "dkdv": DKDV}[kernel.partition("+")[0]],
        sm,
        2,
        2 * sum(parts),
        is_whole=not parts[1],
        is_loaded="+" in kernel,
        is_open=not is_causal,
        length=4096,
    )


# --- A cell's tensors


class Cell(NamedTuple):
    """The inputs of one cell, and results that another implementation computed."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    out: Tensor
    lse: Tensor
    gradients: tuple[Tensor, ...]
    bias: Tensor | None = None


def sizes_of(kernel: str, head_dim: int, length: int) -> tuple[int, int, int, int]:
    """Returns (batch, query heads, key heads, queries) of a timed cell; small ones for the checked length."""
    if kernel == "decode":
        return (2, 8, 2, 1) if length == CHECKED_KEYS else (max(1, 32768 // length), 32, 8, 1)
    if length == CHECKED_LENGTH:
        return 1, 2, 2, length
    tokens, columns = (4096, 1024) if kernel == "one_grid" else (16384, 2048)
    heads = max(1, columns // head_dim)
    return max(1, tokens // length), heads, heads, length


def make_cell(kernel: str, head_dim: int, is_causal: bool, length: int, device: str) -> Cell:
    """Returns a cell with results in fp32; without gradients for a decode."""
    batch, heads, heads_kv, queries = sizes_of(kernel, head_dim, length)
    generator = torch.Generator(device).manual_seed(SEED)

    def random(tokens: int, heads: int) -> Tensor:
        return torch.randn(batch, tokens, heads, head_dim, generator=generator, device=device).to(torch.bfloat16)

    q, k, v, dout = random(queries, heads), random(length, heads_kv), random(length, heads_kv), random(queries, heads)
    bias = None
    if "+bias" in kernel:
        bias = torch.randn(1, heads, length, length, generator=generator, device=device, dtype=torch.bfloat16)
    if length != CHECKED_LENGTH and device == DEVICE and kernel != "decode":  # in fp32 the scores would not fit
        return Cell(q, k, v, dout, *_by_flash(q, k, v, is_causal), (), bias)
    leaves = [x.float().requires_grad_() for x in (q, k, v)]
    scores = torch.einsum("bihd,bjhd->bhij", leaves[0], leaves[1].repeat_interleave(heads // heads_kv, 2)) * head_dim**-0.5
    if bias is not None:
        scores = scores + bias.float()
    if is_causal:
        hidden = torch.ones(queries, length, dtype=torch.bool, device=device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), leaves[2].repeat_interleave(heads // heads_kv, 2))
    gradients = () if kernel == "decode" else torch.autograd.grad(out, leaves, dout.float(), retain_graph=True)
    return Cell(q, k, v, dout, out.detach().to(torch.bfloat16), scores.detach().logsumexp(-1).contiguous(), gradients, bias)


def _by_flash(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    found = torch.ops.aten._scaled_dot_product_flash_attention(*(x.transpose(1, 2) for x in (q, k, v)), 0.0, is_causal)
    return found[0].transpose(1, 2).contiguous(), found[1].float().contiguous()


class Outputs(NamedTuple):
    out: Tensor
    lse: Tensor
    gradients: tuple[Tensor, ...]


def outputs_of(cell: Cell) -> Outputs:
    """Returns outputs of NaN. A decode, which has one query, has no gradients."""
    gradients = () if cell.q.shape[1] == 1 else tuple(torch.full_like(x, float("nan")) for x in (cell.q, cell.k, cell.v))
    return Outputs(torch.full_like(cell.out, float("nan")), torch.full_like(cell.lse, float("nan")), gradients)


def launches_of(job: Job, cell: Cell, outputs: Outputs) -> list[Launch]:
    """Returns the launches of a candidate; before dk and dv the statistics are in place."""
    from flexattn.bench.tiles import parse_tile
    from flexattn.kernels_triton.common.problem import Backward, Problem
    from flexattn.kernels_triton.portable.backward import attention_backward
    from flexattn.kernels_triton.portable.forward import attention_forward
    from flexattn.kernels_triton.runtime.device import pretended_device
    from flexattn.kernels_triton.runtime.launch import recorded_launches

    tile = parse_tile(job.tile)
    right = 0 if job.is_causal else None
    problem = Problem(cell.q, cell.k, cell.v, job.head_dim**-0.5, window_right=right, bias=cell.bias)
    with pretended_device(80, 132), recorded_launches() as launches:
        if job.base in ("forward", "decode"):
            attention_forward(problem, outputs.out, outputs.lse, None, tile)
            return list(launches)
        dq, dk, dv = outputs.gradients
        call = Backward(problem, cell.out, cell.lse, cell.dout, None, dq, dk, dv)
        if job.base == "one_grid":
            attention_backward(call, tile, tile, one_grid=True)
            return list(launches)
        small = parse_tile("16x16x4x1")
        attention_backward(call, tile if job.base == "dq" else small, tile if job.base == "dkdv" else small)
    own = [
        x for x in launches if job.base in x.kernel.__name__ or "large_rows" in x.kernel.__name__
    ]  # which looks at each lse first
    for launch in own:
        if "dkdv" in launch.kernel.__name__:
            _fill_statistics(launch, cell)
    return own


def _fill_statistics(launch: Launch, cell: Cell) -> None:
    """Writes the statistics of each query, which the kernel of dq computes, to the tensors of a launch of dk and dv."""
    values = dict(zip(launch.kernel.arg_names, launch.arguments, strict=True))
    if values["statistics_lse_log2_ptr"].is_meta or values["statistics_lse_log2_ptr"].shape.numel() < cell.lse.numel():
        raise RuntimeError(f"statistics of {tuple(values['statistics_lse_log2_ptr'].shape)} for lse of {tuple(cell.lse.shape)}")
    delta = (cell.out.float() * cell.dout.float()).sum(-1).transpose(1, 2)
    for name, source in (("statistics_lse_log2_ptr", cell.lse * 1.4426950408889634), ("statistics_delta_ptr", delta)):
        values[name].view(-1)[: source.numel()].copy_(source.reshape(-1))


def error_of(job: Job, cell: Cell, outputs: Outputs) -> float:
    """Returns the largest error of the results of a candidate, as a share of the largest value."""
    pairs: list[tuple[Tensor, Tensor]] = []
    if job.base in ("forward", "decode"):
        pairs = [(outputs.out, cell.out), (outputs.lse, cell.lse)]
    if job.base in ("dq", "one_grid"):
        pairs += [(outputs.gradients[0], cell.gradients[0])]
    if job.base in ("dkdv", "one_grid"):
        pairs += list(zip(outputs.gradients[1:], cell.gradients[1:], strict=True))
    errors = [((a.double() - b.double()).abs().max() / b.double().abs().max().clamp_min(1e-6)).item() for a, b in pairs]
    return max(error if error < float("inf") else 1e9 for error in errors)  # JSON has no NaN


# --- Compilation, in processes without a GPU


def build(job: Job, lengths: Sequence[int]) -> Built:
    """Compiles a candidate for sm_80 and assembles it for the GPU at hand; failures are results too."""
    start = time.monotonic()
    try:
        wanted = (job.checked_length, *lengths) if job.kernel == "decode" else (CHECKED_LENGTH,)
        parts: dict[int, list[Part]] = {}
        for length in wanted:
            cell = _empty_cell(job, length)
            parts[length] = [_built_part(launch) for launch in launches_of(job, cell, outputs_of(cell))]
        return Built(parts, None, time.monotonic() - start)
    except BaseException as error:
        return Built({}, f"{type(error).__name__}: {str(error)[:300]}", time.monotonic() - start)


def _built_part(launch: Launch) -> Part:
    from flexattn.kernels_triton.ahead_of_time.compile_report import request_for, sound_from

    compiled, binary = sound_from(request_for(launch, 80))
    if binary is None:
        raise RuntimeError("it needs scratch memory or launch attributes")
    registers, spilled = _resources(compiled.asm["ptx"], 80)
    names = list(launch.kernel.arg_names)
    return Part(binary, names, compiled.metadata.num_stages, registers, spilled, _registers_of_cubin(binary.code))


def _empty_cell(job: Job, length: int) -> Cell:
    """Returns a cell on the CPU with arbitrary values."""
    batch, heads, heads_kv, queries = sizes_of(job.kernel, job.head_dim, length)
    q = torch.zeros(batch, queries, heads, job.head_dim, dtype=torch.bfloat16)
    k, v = (torch.empty(batch, length, heads_kv, job.head_dim, dtype=torch.bfloat16) for _ in range(2))
    bias = torch.zeros(1, heads, queries, length, dtype=torch.bfloat16) if "+bias" in job.kernel else None
    return Cell(q, k, v, q.clone(), q.clone(), torch.zeros(batch, heads, queries), (), bias)


def _resources(ptx: str, sm: int) -> tuple[int, int]:
    """Returns the registers and the spilled bytes of a kernel as ptxas compiles it for a capability."""
    import triton

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "kernel.ptx").write_text(ptx)
        command = [triton.knobs.nvidia.ptxas.path, "-v", f"--gpu-name=sm_{sm}", "kernel.ptx", "-o", "kernel.cubin"]
        log = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if log.returncode:
            raise RuntimeError(f"ptxas for sm_{sm}: {log.stderr[-200:]}")
    registers = re.findall(r"Used (\d+) registers", log.stderr)
    spilled = re.findall(r"(\d+) bytes spill (?:stores|loads)", log.stderr)
    return max(map(int, registers)), sum(map(int, spilled))


def _registers_of_cubin(code: bytes) -> int:
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        usage = subprocess.run([triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name], capture_output=True, text=True).stdout
    return max(map(int, re.findall(r"REG:(\d+)", usage)), default=0)


class Compilers:
    """Processes that compile all jobs in order, each job in a process of its own. Start them before this process uses CUDA."""

    def __init__(self, jobs: Sequence[Job], lengths: Sequence[int], folder: Path, workers: int) -> None:
        context = multiprocessing.get_context("fork")
        self.jobs, self.lengths, self.folder = jobs, lengths, folder
        self.counter = context.Value("i", 0)
        self.processes = [context.Process(target=self._work, daemon=True) for _ in range(workers)]
        for process in self.processes:
            process.start()

    def _work(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        while True:
            with self.counter.get_lock():
                number = self.counter.value
                self.counter.value += 1
            if number >= len(self.jobs):
                return
            path = self._path(number)
            if path.exists():
                continue
            start = time.monotonic()
            child = os.fork()
            if child == 0:
                try:
                    os.setsid()
                    null = os.open(os.devnull, os.O_WRONLY)
                    os.dup2(null, 1)
                    os.dup2(null, 2)
                    self._write(number, build(self.jobs[number], self.lengths))
                finally:
                    os._exit(0)
            while os.waitpid(child, os.WNOHANG)[0] == 0:
                if time.monotonic() - start > COMPILE_SECONDS:
                    os.killpg(child, signal.SIGKILL)
                    os.waitpid(child, 0)
                    break
                time.sleep(0.05)
            if not path.exists():
                self._write(number, Built({}, "its process died or took too long", time.monotonic() - start))

    def _path(self, number: int) -> Path:
        return self.folder / f"{number}.pickle"

    def _write(self, number: int, built: Built) -> None:
        partial = self._path(number).with_suffix(f".{os.getpid()}")
        partial.write_bytes(pickle.dumps(built))
        os.replace(partial, self._path(number))

    def results(self, until: float) -> Iterator[tuple[Job, Built]]:
        """Yields each job with its result as they become ready, until all are or time is up."""
        missing = list(range(len(self.jobs)))
        while missing and time.monotonic() < until:
            ready = [n for n in missing if self._path(n).exists()]
            if not ready:
                time.sleep(0.05)
                continue
            missing.remove(ready[0])
            yield self.jobs[ready[0]], pickle.loads(self._path(ready[0]).read_bytes())

    def end(self) -> None:
        for process in self.processes:
            process.kill()


# --- Timing


def programs_of_processor(part: Part, sm: int) -> int:
    """Returns how many programs of a kernel a multiprocessor of a capability holds."""
    warps = part.binary.num_warps
    registers = part.registers_here if sm == ASSEMBLED_FOR else part.registers
    per_program = -(-max(registers, 1) * 32 // 256) * 256 * warps
    limits = (
        SHARED_OF_PROCESSOR[sm] // (part.binary.shared + RESERVED),
        REGISTERS_OF_PROCESSOR // per_program,
        WARPS_OF_PROCESSOR[sm] // warps,
    )
    return int(min(limits))


def padded(part: Part, sm: int) -> int | None:
    """Returns bytes of shared memory with which the GPU at hand holds as many programs as one of `sm`; None if `sm` has too few."""
    from flexattn.kernels_triton.runtime.compiler import SHARED_MEMORY_LIMIT

    if part.binary.shared > SHARED_MEMORY_LIMIT[sm]:
        return None
    here, there = programs_of_processor(part, ASSEMBLED_FOR), max(1, programs_of_processor(part, sm))
    if here <= there:
        return int(part.binary.shared)
    need = SHARED_OF_PROCESSOR[ASSEMBLED_FOR] // (there + 1) - RESERVED + 16  # the least with which one more does not fit
    return int(min(max(part.binary.shared, -(-need // 128) * 128), SHARED_MEMORY_LIMIT[ASSEMBLED_FOR]))


def _loaded(part: Part) -> Any:
    """Returns the kernel on the GPU, with permission for all of its shared memory, so that a launch may be padded."""
    from flexattn.kernels_triton.runtime.compiler import SHARED_MEMORY_LIMIT
    from flexattn.kernels_triton.runtime.direct import Direct

    direct = Direct.of(part.binary, part.names)
    if direct is None:
        raise RuntimeError("only Triton can launch it")
    status = ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute(ctypes.c_void_p(direct.function), 8, SHARED_MEMORY_LIMIT[ASSEMBLED_FOR])
    if status:
        raise RuntimeError(f"cuFuncSetAttribute: CUDA error {status}")
    return direct


def _run(directs: Sequence[Any], launches: Sequence[Launch], shared: Sequence[int] | None) -> None:
    stream = torch.cuda.current_stream().cuda_stream
    for n, (direct, launch) in enumerate(zip(directs, launches, strict=True)):
        if shared is not None:
            direct.shared = shared[n]
        direct.launch(launch.programs, stream, launch.arguments)


@functools.cache
def _flushed() -> Tensor:
    return torch.empty(128 << 20, dtype=torch.uint8, device=DEVICE)


def time_of(run: Callable[[], Any], best: float | None = None) -> float:
    """Returns the median time of a call in ms; of fewer calls if one takes twice as long as `best`."""

    def times(count: int) -> list[float]:
        event: Any = torch.cuda.Event
        events = [(event(enable_timing=True), event(enable_timing=True)) for _ in range(count)]
        for begin, end in events:
            _flushed().zero_()
            compat.gpu_sleep(400_000)  # the host is ahead of the GPU
            begin.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return sorted(begin.elapsed_time(end) for begin, end in events)

    run()
    torch.cuda.synchronize()
    first = times(3)[1]
    return first if best is not None and first > 2 * best else times(7)[3]


def measured(
    job: Job, built: Built, cells: Callable[[Job, int], Cell], lengths: Sequence[int], best: dict[Any, float]
) -> dict[str, Any]:
    """Returns the error of a candidate, and its times in ms by length and occupancy if it is right."""
    directs = [_loaded(part) for part in built.parts_of(job.checked_length)]
    cell = cells(job, job.checked_length)
    outputs = outputs_of(cell)
    launches = launches_of(job, cell, outputs)
    _run(directs, launches, None)
    torch.cuda.synchronize()
    found: dict[str, Any] = {"error": error_of(job, cell, outputs)}
    if found["error"] > MAX_ERROR:
        return {**found, "failure": "wrong"}
    found["ms"] = times = {}
    for length in lengths:
        cell = cells(job, length)
        launches = launches_of(job, cell, outputs_of(cell))
        parts = built.parts_of(length)
        directs = [_loaded(part) for part in parts] if job.kernel == "decode" else directs
        known: dict[tuple[int, ...], float] = {}
        for sm in (80, 89):
            pads = [padded(part, sm) for part in parts]
            shared = tuple(pad for pad in pads if pad is not None)
            if len(shared) < len(pads):
                continue
            key = (*job.cell, length, sm)
            if shared not in known:
                known[shared] = time_of(functools.partial(_run, directs, launches, shared), best.get(key))
            best[key] = min(best.get(key, float("inf")), known[shared])
            times[f"s{length}@{sm}"] = round(known[shared], 4)
    return found


def flash_rows(
    head_dims: Sequence[int], masks: Sequence[str], lengths: Sequence[int], kernels: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yields the times of torch's FlashAttention-2 in the cells of the candidates."""
    for head_dim, mask, kernel, length in itertools.product(head_dims, masks, ("forward", "one_grid", "decode"), lengths):
        if kernel not in kernels or (kernel == "decode" and mask == "causal"):
            continue
        row = {"kernel": f"flash {kernel}", "head_dim": head_dim, "mask": mask, "length": length}
        try:
            batch, heads, heads_kv, queries = sizes_of(kernel, head_dim, length)
            q, dout = (torch.randn(batch, heads, queries, head_dim, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
            k, v = (torch.randn(batch, heads_kv, length, head_dim, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
            leaves = [x.requires_grad_(kernel != "decode") for x in (q, k, v)]
            forward = functools.partial(_flash, *leaves, is_causal=mask == "causal", enable_gqa=heads != heads_kv)
            row["forward_ms"] = round(time_of(torch.no_grad()(forward)), 4)
            if kernel != "decode":
                out = forward()
                row["backward_ms"] = round(time_of(functools.partial(torch.autograd.grad, out, leaves, dout, retain_graph=True)), 4)
        except Exception as error:
            row["failure"] = f"{type(error).__name__}: {str(error)[:200]}"
        yield row


def _flash(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, enable_gqa: bool) -> Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=enable_gqa)


# --- The command


class Results:
    """The result file, replaced after every few seconds."""

    def __init__(self, path: Path, facts: dict[str, Any]) -> None:
        self.path, self.facts, self.written = path, facts, 0.0
        self.rows: list[dict[str, Any]] = []
        path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        if time.monotonic() - self.written > 3:
            self.write()

    def write(self, is_complete: bool = False) -> None:
        partial = self.path.with_name(self.path.name + ".partial")
        partial.write_text(record._json({**self.facts, "complete": is_complete, "rows": self.rows}))
        os.replace(partial, self.path)
        self.written = time.monotonic()


def make_parser() -> argparse.ArgumentParser:
    def numbers(text: str) -> list[int]:
        return [int(x) for x in text.split(",")]

    parser = Parser(prog="python -m flexattn.bench.older_tiles", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=400, help="end within this time (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="where to write the result")
    parser.add_argument("--rows", type=Path, metavar="FILE.json", help="only print the tiles that a result supports")
    parser.add_argument("--head-dims", type=numbers, default=[128, 64, 256, 96, 192, 32], metavar="N,N")
    parser.add_argument("--lengths", type=numbers, default=[4096, 1024], metavar="N,N")
    parser.add_argument("--kernels", type=lambda text: text.split(","), default=list(_SPACE), metavar="NAME,NAME")
    parser.add_argument("--masks", type=lambda text: text.split(","), default=["causal", "full"], metavar="NAME,NAME")
    parser.add_argument("--workers", type=int, default=max(1, len(os.sched_getaffinity(0)) - 1), metavar="N")
    parser.add_argument("--most", type=int, metavar="N", help="only the first N candidates")
    parser.add_argument("--compile-only", action="store_true", help="time nothing; it needs no GPU")
    return parser


def main(arguments: Sequence[str]) -> int:
    start = time.monotonic()
    parser = make_parser()
    args = parser.parse_args(arguments)
    if args.rows is not None:
        rows = json.loads(args.rows.read_text("utf-8"))["rows"]
        print("\n".join([*emit_rows(rows), *emit_rules(rows, args.rows.name)]))
        return 0
    if args.out is None:
        parser.error("--out is missing; accepted: the path of a result file")
    stop = start + args.seconds - 6
    os.environ.setdefault("TRITON_CACHE_DIR", tempfile.mkdtemp(prefix="older_tiles_"))
    os.environ.pop("TRITON_INTERPRET", None)
    torch.set_num_threads(1)
    _warm_up()
    jobs = jobs_of(args.head_dims, args.kernels, args.masks)[: args.most]
    compilers = Compilers(jobs, args.lengths, Path(tempfile.mkdtemp(prefix="older_tiles_")), args.workers)
    print(f"{len(jobs)} candidates, {args.workers} processes", flush=True)
    facts = {
        "schema": 1,
        "command": record.command_line("flexattn.bench.older_tiles", arguments, args.out),
        "started": record.now(),
        "device": {"type": "none", "name": "none: compiled only"},
        "versions": {},
        "method": {
            "time": WORDS_OF_TIME,
            "check": f"at {CHECKED_LENGTH} tokens beside fp32, largest error {MAX_ERROR} of the largest value",
        },
    }
    results = Results(args.out, facts)
    try:
        _sweep(args, compilers, results, stop)
    except BaseException:
        traceback.print_exc()
        results.facts["failure"] = traceback.format_exc()[-2000:]
    finally:
        compilers.end()
        timed = sum("ms" in row for row in results.rows)
        results.write(is_complete=len(results.rows) >= len(jobs))
        print(f"{timed} candidates timed, {len(results.rows)} rows, {time.monotonic() - start:.0f} s", flush=True)
        try:
            print("\n".join(summary(results.rows)), flush=True)
        except Exception:
            traceback.print_exc()
    sys.stdout.flush()
    os._exit(0)


def _warm_up() -> None:
    """Imports and hashes all that the compiling processes need, so that they inherit it."""
    from triton.runtime.cache import triton_key

    from flexattn.kernels_triton.runtime import other_target

    other_target.install(80, ASSEMBLED_FOR)
    from flexattn.kernels_triton.ahead_of_time import compile_report  # noqa: F401
    from flexattn.kernels_triton.common import large_rows, split_kv
    from flexattn.kernels_triton.portable import backward, forward

    triton_key()
    kernels = (forward._attn_fwd_kernel, backward._attn_bwd_dq_kernel, backward._attn_bwd_dkdv_kernel)
    for kernel in (
        *kernels,
        backward._attn_bwd_one_grid_kernel,
        split_kv._combine_splits_kernel,
        large_rows._attn_bwd_large_rows_kernel,
    ):
        _ = kernel.cache_key


def _sweep(args: argparse.Namespace, compilers: Compilers, results: Results, stop: float) -> None:
    """Times FlashAttention-2, then each candidate once it is compiled."""
    results.facts["versions"] = record.versions()
    if not args.compile_only:
        results.facts["device"] = record.device_facts()
        for flash in flash_rows(args.head_dims, args.masks, args.lengths, args.kernels):
            results.add(flash)
            if time.monotonic() > stop:
                return
        print(f"{len(results.rows)} cells of FlashAttention-2", flush=True)

    @functools.lru_cache(maxsize=16)
    def cell_of(kernel: str, head_dim: int, is_causal: bool, length: int) -> Cell:
        return make_cell(kernel, head_dim, is_causal, length, DEVICE)

    def cells(job: Job, length: int) -> Cell:
        kernel = "forward+bias" if "+bias" in job.kernel else job.kernel if job.kernel in ("decode", "one_grid") else "forward"
        return cell_of(kernel, job.head_dim, job.is_causal, length)

    best: dict[Any, float] = {}
    failures, said = 0, time.monotonic()
    for done, (job, built) in enumerate(compilers.results(stop), 1):
        row: dict[str, Any] = {
            "kernel": job.kernel,
            "head_dim": job.head_dim,
            "mask": "causal" if job.is_causal else "full",
            "tile": job.tile,
            "committed": list(job.committed),
            "compile_s": round(built.seconds, 1),
        }
        if built.failure is not None:
            row["failure"] = built.failure
        else:
            parts = built.parts_of(job.checked_length)
            row["registers"] = max(part.registers for part in parts)
            row["spilled_bytes"] = sum(part.spilled_bytes for part in parts)
            row["shared"] = max(part.binary.shared for part in parts)
            row["stages"] = parts[-1].stages if job.base != "decode" else parts[0].stages
            row["programs"] = {str(sm): min(programs_of_processor(part, sm) for part in parts) for sm in SHARED_OF_PROCESSOR}
            if not args.compile_only:
                try:
                    row |= measured(job, built, cells, args.lengths, best)
                except Exception as error:
                    row["failure"] = f"{type(error).__name__}: {str(error)[:300]}"
                    failures += 1
                    if failures <= 5:
                        traceback.print_exc()
        results.add(row)
        if time.monotonic() - said > 20:
            said = time.monotonic()
            print(f"{done} of {len(compilers.jobs)} after {said - stop + args.seconds:.0f} s", flush=True)


def summary(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Returns a line for each cell and occupancy: the fastest tile, and the time of the committed one beside its time."""
    lines = []
    cells: dict[tuple[Any, ...], list[tuple[float, dict[str, Any]]]] = {}
    for row in rows:
        for key, ms in row.get("ms", {}).items():
            cells.setdefault((row["kernel"], row["head_dim"], row["mask"], key), []).append((ms, row))
    for cell, found in cells.items():
        found.sort(key=lambda pair: pair[0])
        sm = 80 if cell[3].endswith("@80") else 86
        own = next((ms for ms, row in found if sm in row["committed"]), None)
        gain = "" if own is None else f" {own / found[0][0]:.2f}x"
        lines.append(f"{cell[0]} d{cell[1]} {cell[2]} {cell[3]} {found[0][1]['tile']} {found[0][0]:.3f}{gain}")
    return lines


# --- Rows of the tables


TIE = 0.03
"""A tile replaces another one if it is faster by more than this share."""


def scores(rows: Sequence[Mapping[str, Any]], kernel: str, head_dim: int, cells: Sequence[str]) -> dict[str, float]:
    """Returns the mean of each tile's times, as multiples of the fastest; of tiles that were timed in all cells.

    cells: for example "causal s4096@80", a mask and a key of the times.
    """
    times: dict[str, dict[str, float]] = {}
    for row in rows:
        if (row["kernel"], row.get("head_dim")) == (kernel, head_dim):
            own = {f"{row['mask']} {key}": ms for key, ms in row.get("ms", {}).items()}
            times.setdefault(row["tile"], {}).update({cell: own[cell] for cell in cells if cell in own})
    whole = {tile: own for tile, own in times.items() if len(own) == len(cells)}
    best = {cell: min(own[cell] for own in whole.values()) for cell in cells} if whole else {}
    return {tile: math.exp(sum(math.log(own[cell] / best[cell]) for cell in cells) / len(cells)) for tile, own in whole.items()}


def fastest(found: Mapping[str, float], committed: str | None) -> str | None:
    """Returns the fastest tile; `committed` if none is faster by more than TIE."""
    if not found:
        return committed
    best = min(found, key=lambda tile: found[tile])
    is_tie = committed is not None and found.get(committed, math.inf) <= found[best] * (1 + TIE)
    return committed if is_tie else best


class Chosen(NamedTuple):
    """Tiles by the fields of `tiles.Row`; None if nothing was measured, or if `tile` is as fast."""

    tile: str | None
    open: str | None
    short: str | None
    loaded: str | None


def choose(rows: Sequence[Mapping[str, Any]], kernel: str, head_dim: int, sm: int) -> Chosen:
    """Returns the fastest tiles for a kernel and head dim on a GPU with the occupancy of `sm`, 80 or 89."""
    lengths = sorted({key.partition("@")[0] for row in rows for key in row.get("ms", {})}, key=lambda text: int(text[1:]))
    capability = 86 if sm == 89 else sm
    own = {
        row["mask"]: row["tile"]
        for row in rows
        if (row["kernel"], row.get("head_dim")) == (kernel, head_dim) and capability in row["committed"]
    }

    def best(name: str, mask: str, lengths: Sequence[str], other: str | None) -> str | None:
        return fastest(scores(rows, name, head_dim, [f"{mask} {length}@{sm}" for length in lengths]), other)

    tile = best(kernel, "causal", lengths[-1:], own.get("causal"))
    open_tile, short = best(kernel, "full", lengths, tile), best(kernel, "causal", lengths[:1], tile)
    loaded = best(f"{kernel}+bias", "full", lengths, None)
    return Chosen(tile, None if open_tile == tile else open_tile, None if short == tile else short, loaded)


def choose_few(rows: Sequence[Mapping[str, Any]], head_dim: int, sm: int) -> str | None:
    """Returns the fastest tile for few queries. It has two stages or more, because its row also serves head dims in two parts."""
    cells = [f"full s{length}@{sm}" for length in (1024, 4096)]
    return fastest({tile: x for tile, x in scores(rows, "decode", head_dim, cells).items() if not tile.endswith("x1")}, None)


CAPABILITIES = {80: "80", 89: "(86, 89, 120)"}
"""The devices whose rules a time with an occupancy supports."""


def emit_rules(rows: Sequence[Mapping[str, Any]], source: str) -> list[str]:
    """Returns the rules of `crossovers.py` for calls that FlashAttention-2 runs faster than the chosen tiles."""
    lines = []
    flash = [row for row in rows if row["kernel"] == "flash forward" and "backward_ms" in row]
    for sm, head_dim, mask, direction in itertools.product(
        CAPABILITIES, (32, 64, 96, 128, 192, 256), MASKS, ("forward", "backward")
    ):
        ratios = []
        for row in flash:
            if (row["head_dim"], row["mask"]) == (head_dim, mask):
                key = f"s{row['length']}@{sm}"
                parts = ("forward",) if direction == "forward" else ("dq", "dkdv")
                times = [_chosen_time(rows, part, head_dim, mask, key) for part in parts]
                if None not in times:
                    ratios.append(sum(filter(None, times)) / row[f"{direction}_ms"])
        gain = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else 0
        if gain > 1 + TIE:
            mask_word = "open" if mask == "full" else mask
            call = f'direction="{direction}", capability={CAPABILITIES[sm]}, head_dim_qk={head_dim}, head_dim_v={head_dim}'
            lines.append(f'Rule(use="sdpa", {call}, mask="{mask_word}", **_OLDER, gain={gain:.2f}, source="{source}"),')
    return lines


def _chosen_time(rows: Sequence[Mapping[str, Any]], kernel: str, head_dim: int, mask: str, key: str) -> float | None:
    """Returns the time of the tile that `choose` selects for a cell."""
    sm = int(key.partition("@")[2])
    chosen = choose(rows, kernel, head_dim, sm)
    is_short = key.startswith("s1024")
    tile = chosen.open if mask == "full" and chosen.open else chosen.short if is_short and chosen.short else chosen.tile
    cell = (kernel, head_dim, mask, tile)
    times = (row["ms"].get(key) for row in rows if "ms" in row and tuple(row.get(n) for n in _CELL) == cell)
    return next((float(ms) for ms in times if ms is not None), None)


_CELL = ("kernel", "head_dim", "mask", "tile")
MASKS = ("causal", "full")


def emit_rows(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the rows of `common/tiles.py` for 8.0 and 8.6 with the chosen tiles, ready to paste; other rows stay as they are."""
    from flexattn.bench.rows import _row_code
    from flexattn.kernels_triton.common.tiles import DKDV, DQ, FORWARD

    lines = []
    for (kernel, table), sm in itertools.product((("forward", FORWARD), ("dq", DQ), ("dkdv", DKDV)), (80, 89)):
        capability = 86 if sm == 89 else sm
        lines.append(f"{kernel.upper()} ({capability}, 2):")
        lines += [f"        {_row_code(row)}," for row in _with_chosen(table[capability, 2], rows, kernel, sm)]
    return lines


# The head dim that decides a row of `tiles.py`, by the sum of head dims that the row serves
_HEAD_DIM_OF_ROW = {128: 64, 192: 96, 256: 128, 384: 192, 512: 256}


def _with_chosen(committed: Sequence[Row], rows: Sequence[Mapping[str, Any]], kernel: str, sm: int) -> list[Row]:
    """Returns the rows of a table with the chosen tiles of the head dims that were measured; equal neighbours are one row."""
    from flexattn.bench.tiles import parse_tile

    found: list[Row] = []
    for width in sorted({*_HEAD_DIM_OF_ROW, 320, *(row.head_dims for row in committed)}):
        row = next(row for row in committed if width <= row.head_dims)._replace(head_dims=width)
        chosen = choose(rows, kernel, _HEAD_DIM_OF_ROW[width], sm) if width in _HEAD_DIM_OF_ROW else None
        if chosen is not None and chosen.tile is not None:
            tiles: dict[str, Any] = {name: tile and parse_tile(tile) for name, tile in chosen._asdict().items()}
            few = choose_few(rows, _HEAD_DIM_OF_ROW[width], sm) if kernel == "forward" else None
            row = row._replace(**tiles | {"loaded": tiles["loaded"] or row.loaded, "few": few and parse_tile(few)})
        if found and found[-1][1:] == row[1:]:
            found.pop()
        found.append(row)
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
