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
import multiprocessing
import os
import pickle
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from flexattn import compat
from flexattn.bench import older_rows, record
from flexattn.bench.harness import Row, Run, event_times, make_parser
from flexattn.bench.inputs import make_tensors
from flexattn.bench.older_candidates import (
    CHECKED_LENGTH,
    DEVICE,
    Cell,
    Job,
    empty_cell,
    error_of,
    jobs_of,
    launches_of,
    make_cell,
    outputs_of,
    workload_of,
)
from flexattn.bench.shapes import Workload
from flexattn.bench.tiles import OLDER_SPACE

if TYPE_CHECKING:
    from flexattn.kernels_triton.runtime.direct import Direct
    from flexattn.kernels_triton.runtime.launch import Launch

ASSEMBLED_FOR = 90
MAX_ERROR = 2e-2  # errors are shares of the largest value, in bf16
COMPILE_SECONDS = 90  # limit for one candidate
SECONDS_BETWEEN_WRITES = 3.0
WORDS_OF_TIME = "CUDA events, median of 7 with a cold L2, 3 if the first call takes twice the time of the fastest candidate"

# Resources of a multiprocessor, by compute capability: bytes of shared memory, warps. CUDA C++ Programming Guide, "Compute
# Capabilities", technical specifications.
SHARED_OF_PROCESSOR = {80: 164 << 10, 89: 100 << 10, 90: 228 << 10}
WARPS_OF_PROCESSOR = {80: 64, 89: 48, 90: 64}
REGISTERS_OF_PROCESSOR = 65536
RESERVED = 1024  # bytes of shared memory that the system uses for each program


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


# --- Compilation, in processes without a GPU


def build(job: Job, lengths: Sequence[int]) -> Built:
    """Compiles a candidate for sm_80 and assembles it for the GPU at hand; failures are results too."""
    start = time.monotonic()
    try:
        parts: dict[int, list[Part]] = {}
        for length in (job.checked_length, *(lengths if job.kernel == "decode" else ())):
            cell = empty_cell(workload_of(*job.cell, length))
            parts[length] = [_built_part(launch) for launch in launches_of(job, cell, outputs_of(cell))]
        return Built(parts, None, time.monotonic() - start)
    except BaseException as error:
        return Built({}, f"{type(error).__name__}: {str(error)[:300]}", time.monotonic() - start)


def _built_part(launch: Launch) -> Part:
    from flexattn.kernels_triton.ahead_of_time.compile_report import request_for, sound_from

    compiled, binary = sound_from(request_for(launch, 80))
    if binary is None:
        raise RuntimeError("it needs scratch memory or launch attributes")
    (registers, spilled), (here, _) = (_resources(compiled.asm["ptx"], sm) for sm in (80, ASSEMBLED_FOR))
    return Part(binary, list(launch.kernel.arg_names), compiled.metadata.num_stages, registers, spilled, here)


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


class Compilers:
    """Processes that compile all jobs in order, each job in a process of its own. Start them before this process uses CUDA."""

    def __init__(self, jobs: Sequence[Job], lengths: Sequence[int], workers: int) -> None:
        self.context = multiprocessing.get_context("fork")
        self.jobs, self.lengths, self.folder = jobs, lengths, Path(tempfile.mkdtemp(prefix="older_tiles_"))
        self.counter = self.context.Value("i", 0)
        self.processes = [self.context.Process(target=self._work) for _ in range(workers)]
        for process in self.processes:
            process.start()

    def _work(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for stream in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        while True:
            with self.counter.get_lock():
                number = self.counter.value
                self.counter.value += 1
            if number >= len(self.jobs):
                return
            child = self.context.Process(target=self._build, args=(number,))
            child.start()
            child.join(COMPILE_SECONDS)
            if child.exitcode is None:
                child.kill()
                child.join()
            if not self._path(number).exists():
                self._write(number, Built({}, "its process died or took too long", COMPILE_SECONDS))

    def _build(self, number: int) -> None:
        self._write(number, build(self.jobs[number], self.lengths))

    def _path(self, number: int) -> Path:
        return self.folder / f"{number}.pickle"

    def _write(self, number: int, built: Built) -> None:
        partial = self._path(number).with_suffix(".partial")
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


def _loaded(part: Part) -> Direct:
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


def _run(directs: Sequence[Direct], launches: Sequence[Launch], shared: Sequence[int] | None) -> None:
    stream = torch.cuda.current_stream().cuda_stream
    for n, (direct, launch) in enumerate(zip(directs, launches, strict=True)):
        if shared is not None:
            direct.shared = shared[n]
        direct.launch(launch.programs, stream, launch.arguments)


@functools.cache
def _flushed() -> Tensor:
    return torch.empty(128 << 20, dtype=torch.uint8, device=DEVICE)


def _before_a_call() -> None:
    _flushed().zero_()
    compat.gpu_sleep(400_000)  # the host is ahead of the GPU


def time_of(run: Callable[[], object], best: float | None = None) -> float:
    """Returns the median time of a call in ms; of fewer calls if one takes twice as long as `best`."""
    run()
    torch.cuda.synchronize()
    first, more = (functools.partial(event_times, run, calls, _before_a_call) for calls in (3, 7))
    ms = statistics.median(first()) / 1e3
    return ms if best is not None and ms > 2 * best else statistics.median(more()) / 1e3


def measured(job: Job, built: Built, cells: Callable[[Job, int], Cell], lengths: Sequence[int], best: dict[Any, float]) -> Row:
    """Returns the error of a candidate, and its times in ms by length and occupancy if it is right."""
    directs = [_loaded(part) for part in built.parts_of(job.checked_length)]
    cell = cells(job, job.checked_length)
    outputs = outputs_of(cell)
    _run(directs, launches_of(job, cell, outputs), None)
    torch.cuda.synchronize()
    row: Row = {"error": error_of(job, cell, outputs)}
    if row["error"] > MAX_ERROR:
        return {**row, "failure": "wrong"}
    row["ms"] = times = {}
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
    return row


def flash_rows(head_dims: Sequence[int], masks: Sequence[str], lengths: Sequence[int], kernels: Sequence[str]) -> Iterator[Row]:
    """Yields the times of torch's FlashAttention-2 in the cells of the candidates."""
    for head_dim, mask, kernel, length in itertools.product(head_dims, masks, ("forward", "one_grid", "decode"), lengths):
        if kernel not in kernels or (kernel == "decode" and mask == "causal"):
            continue
        row: Row = {"kernel": f"flash {kernel}", "head_dim": head_dim, "mask": mask, "length": length}
        try:
            workload = workload_of(kernel, head_dim, mask == "causal", length)
            q, k, v, dout = (x.transpose(1, 2).contiguous() for x in make_tensors(workload, DEVICE)[:4])
            leaves = [x.requires_grad_(kernel != "decode") for x in (q, k, v)]
            forward = functools.partial(_flash, *leaves, is_causal=workload.is_causal, enable_gqa=workload.group_size > 1)
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


def options() -> argparse.ArgumentParser:
    def numbers(text: str) -> list[int]:
        return [int(x) for x in text.split(",")]

    parser = make_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=400, help="end within this time (default: %(default)s)")
    parser.add_argument("--rows", type=Path, metavar="FILE.json", help="only print the tiles that a result supports")
    parser.add_argument("--head-dims", type=numbers, default=[128, 64, 256, 96, 192, 32], metavar="N,N")
    parser.add_argument("--lengths", type=numbers, default=[4096, 1024], metavar="N,N")
    parser.add_argument("--kernels", type=lambda text: text.split(","), default=list(OLDER_SPACE), metavar="NAME,NAME")
    parser.add_argument("--masks", type=lambda text: text.split(","), default=["causal", "full"], metavar="NAME,NAME")
    parser.add_argument("--workers", type=int, default=max(1, len(os.sched_getaffinity(0)) - 1), metavar="N")
    parser.add_argument("--most", type=int, metavar="N", help="only the first N candidates")
    parser.add_argument("--compile-only", action="store_true", help="time nothing; it needs no GPU")
    return parser


def main(arguments: Sequence[str]) -> int:
    start = time.monotonic()
    parser = options()
    args = parser.parse_args(arguments)
    if args.rows is not None:
        rows = json.loads(args.rows.read_text("utf-8"))["rows"]
        print("\n".join([*older_rows.emit_rows(rows), *older_rows.emit_rules(rows, args.rows.name)]))
        return 0
    if args.out is None:
        parser.error("--out is missing; accepted: the path of a result file")
    os.environ.setdefault("TRITON_CACHE_DIR", tempfile.mkdtemp(prefix="older_tiles_"))
    os.environ.pop("TRITON_INTERPRET", None)
    torch.set_num_threads(1)
    _warm_up()
    jobs = jobs_of(args.head_dims, args.kernels, args.masks)[: args.most]
    compilers = Compilers(jobs, args.lengths, args.workers)
    print(f"{len(jobs)} candidates, {args.workers} processes", flush=True)
    check = f"at {CHECKED_LENGTH} tokens beside fp32, largest error {MAX_ERROR} of the largest value"
    run = Run("flexattn.bench.older_tiles", None, args.out, arguments, schema=record.SCHEMA, complete=False)
    run.content["method"] = {"time": WORDS_OF_TIME, "check": check}
    run.pause = SECONDS_BETWEEN_WRITES
    try:
        _sweep(args, compilers, run, start + args.seconds - 6)
    except BaseException:
        traceback.print_exc()
        run.content["failure"] = traceback.format_exc()[-2000:]
    finally:
        compilers.end()
        run.content["complete"] = len(run.rows) >= len(jobs)
        run.write()
    timed = sum("ms" in row for row in run.rows)
    print(f"{timed} candidates timed, {len(run.rows)} rows, {time.monotonic() - start:.0f} s", flush=True)
    print("\n".join(older_rows.summary(run.rows)), flush=True)
    os._exit(0)  # compilations may be under way


def _warm_up() -> None:
    """Imports and hashes all that the compiling processes need, so that they inherit it."""
    from triton.runtime.cache import triton_key

    from flexattn.kernels_triton.runtime import other_target

    other_target.install(80, ASSEMBLED_FOR)
    from flexattn.kernels_triton.ahead_of_time import compile_report  # noqa: F401
    from flexattn.kernels_triton.common import large_rows, split_kv
    from flexattn.kernels_triton.portable import backward, forward

    triton_key()
    for kernel in (
        forward._attn_fwd_kernel,
        backward._attn_bwd_dq_kernel,
        backward._attn_bwd_dkdv_kernel,
        backward._attn_bwd_one_grid_kernel,
        split_kv._combine_splits_kernel,
        large_rows._attn_bwd_large_rows_kernel,
    ):
        _ = kernel.cache_key


def _sweep(args: argparse.Namespace, compilers: Compilers, run: Run, stop: float) -> None:
    """Times FlashAttention-2, then each candidate once it is compiled."""
    if not args.compile_only:
        for flash in flash_rows(args.head_dims, args.masks, args.lengths, args.kernels):
            run.add(flash)
            if time.monotonic() > stop:
                return
        print(f"{len(run.rows)} cells of FlashAttention-2", flush=True)

    @functools.lru_cache(maxsize=16)
    def cell_of(workload: Workload) -> Cell:
        return make_cell(workload, DEVICE)

    def cells(job: Job, length: int) -> Cell:
        kernel = "forward+bias" if "+bias" in job.kernel else job.kernel if job.kernel in ("decode", "one_grid") else "forward"
        return cell_of(workload_of(kernel, job.head_dim, job.is_causal, length))

    best: dict[Any, float] = {}
    for done, (job, built) in enumerate(compilers.results(stop), 1):
        row: Row = {"kernel": job.kernel, "head_dim": job.head_dim, "mask": "causal" if job.is_causal else "full"}
        row |= {"tile": job.tile, "committed": list(job.committed), "compile_s": round(built.seconds, 1)}
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
        run.add(row, f"{done} of {len(compilers.jobs)} candidates" if done % 50 == 0 else "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
