"""Reports on Triton kernels that are compiled for a GPU that need not be present.

    request = CompileRequest("flexattn.kernels_triton.portable.forward", "_attn_fwd_kernel",
                             signature={"q_ptr": "*bf16", "seqlen": "i32"}, constexprs={"BLOCK_M": 128},
                             sm=90, num_warps=8, num_stages=2)
    [report] = compile_many([request])

`compile_many` compiles in separate processes. So it also works in a process whose kernels are interpreted (TRITON_INTERPRET=1) and
cannot be compiled. `python -m flexattn.kernels_triton.ahead_of_time.compile_report` is the first of these processes.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
import io
import multiprocessing
import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton._utils import type_canonicalisation_dict
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.cache import get_cache_manager, triton_key
from triton.runtime.jit import JITFunction

from flexattn.kernels_triton.mods.lowering import compile_source, source_of
from flexattn.kernels_triton.runtime import store
from flexattn.kernels_triton.runtime.compiler import SHARED_MEMORY_LIMIT as SHARED_MEMORY_LIMIT
from flexattn.kernels_triton.runtime.compiler import compiling, options_of
from flexattn.kernels_triton.runtime.launch import Launch
from flexattn.kernels_triton.runtime.sass_registers import undefined_registers

TENSOR_COLUMNS_LIMIT = 512
"""Columns of tensor memory of a multiprocessor of sm_100, and so of a program: PTX ISA, "Tensor Memory Addressing"."""

PTXAS_LOG = "ptxas.log"
PTXAS_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
PTXAS_WARNING = re.compile(r"warning|\(C75\d\d\)")
SASS_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;")
SASS_WHOLE_OPERATION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")
DEBUG_LINE = re.compile(r"\s*(\.(loc|file)\b|\$L__(tmp|func_(begin|end))\d+:)")
SASS_OPERATION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)")  # "/*0010*/  @!P0 LDG.E R2, ..." -> LDG

TTGIR_DOT_OPERAND = re.compile(r"tensor<([\dx]+)x[a-z]\w*, #ttg\.dot_op<\{opIdx = ([01]), parent = #\w+, kWidth = (\d+)\}>>")
TTGIR_RESULTS = re.compile(r"^\s*%[\w:]+(, %[\w:]+)* = ")
SASS_WAIT_FOR_ALL = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x0")  # "WARPGROUP.DEPBAR.LE gsb0, 0x1" lets one product continue
SASS_LABEL = re.compile(r"^\s*\.(L_x_\d+):")
SASS_BRANCH = re.compile(r"\bBRA\b.*`\(\.(L_x_\d+)\)")


class CompileError(RuntimeError):
    """Kernels that do not compile: the request of each and the compiler's message."""


@dataclass(frozen=True)
class CompileRequest:
    """A kernel by name and its specialisation, picklable, so that another process can compile it.

    module, kernel: the @triton.jit function's module and name; the module must be importable in a new process.
    signature: Triton's type of each argument that is not a constexpr: "*bf16" a pointer, "i32", "fp32", "tensordesc<bf16[128, 64]>"
        a host tensor descriptor (in Gluon with its layout's repr: "tensordesc<bf16[128,64],NVMMASharedLayout(...)>"); a tuple of
        types for an argument that is a tuple.
    constexprs: the value of each constexpr argument, anything that pickles; a dtype by its name in the language, "tl.bfloat16".
    sm: compute capability, 90 for 9.0.
    aligned: pointers and integers to treat as divisible by 16; None: every pointer.
    registers: most registers of a thread; None: no limit.
    """

    module: str
    kernel: str
    signature: Mapping[str, Any]
    constexprs: Mapping[str, Any]
    sm: int
    num_warps: int
    num_stages: int
    aligned: Sequence[str] | None = None
    registers: int | None = None

    def __str__(self) -> str:
        constants = ", ".join(f"{name}={value!r}" for name, value in self.constexprs.items())
        return (
            f"{self.module}:{self.kernel} for sm_{self.sm}, num_warps={self.num_warps}, num_stages={self.num_stages}, {constants}"
        )


def request_for(launch: Launch, sm: int) -> CompileRequest:
    """Returns the request for a recorded launch's kernel on `sm`, specialised as for tensors at multiples of 16 bytes."""
    function = launch.kernel.fn
    signature, constexprs = {}, {}
    parameters = inspect.signature(function).parameters
    for name, value in zip(launch.kernel.arg_names, launch.arguments, strict=True):
        is_constant = "constexpr" in str(parameters[name].annotation)
        if not is_constant and (isinstance(value, (torch.Tensor, TensorDescriptor)) or type(value) in (int, float, tuple)):
            signature[name] = _type_of(value)
        else:
            constexprs[name] = _picklable(value)
    aligned = [name for name in signature if name in launch.kernel.wide]
    tile = launch.tile
    names = function.__module__, function.__name__
    return CompileRequest(*names, signature, constexprs, sm, tile.num_warps, tile.num_stages, aligned, tile.registers)


def _type_name(dtype: torch.dtype) -> str:
    return str(type_canonicalisation_dict[str(dtype).removeprefix("torch.")])


def _type_of(value: Any) -> Any:
    """Returns Triton's type of an argument; for a tuple, such as the captures of a mod, a tuple of types."""
    if isinstance(value, torch.Tensor):
        return f"*{_type_name(value.dtype)}"
    if isinstance(value, TensorDescriptor):
        block = ",".join(map(str, value.block_shape))
        return f"tensordesc<{_type_name(value.base.dtype)}[{block}],{value.layout!r}>"
    if isinstance(value, tuple):
        return tuple(map(_type_of, value))
    if isinstance(value, float):
        return "fp32"
    return "i32" if value < 2**31 else "i64"


@dataclass(frozen=True)
class _Generated:
    """A generated Triton function: its name and source, which another process can compile."""

    name: str
    source: str


def _picklable(value: Any) -> Any:
    if isinstance(value, tuple):
        parts = map(_picklable, value)
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return _Generated(value.__name__, source_of(value)) if hasattr(value, "fn") else value


@dataclass(frozen=True)
class CompileReport:
    """Figures of one compiled kernel.

    registers: 32-bit registers per thread at entry (a warp-specialised kernel moves them later), from the cubin.
    stack_bytes: local memory per thread for spills and for arrays that do not fit in registers, from the cubin.
    spill_store_bytes, spill_load_bytes: bytes per thread that ptxas spilled; each spill counts once even if it is in a loop.
    shared_bytes: shared memory per block; compare with SHARED_MEMORY_LIMIT.
    instructions: occurrences of each SASS operation in the code, without its modifiers ("HGMMA", "FFMA", "STL"): static counts,
        not executed ones.
    loops: the same for each innermost loop, in the order of the code.
    exposed_exponentials: exp2 operations in innermost loops after a wait for all products of wgmma. They overlap with no product
        of this warpgroup: ptxas moves such a wait to the start of its basic block.
    idle_barriers: arrays of mbarriers (Gluon's) that are initialised, and that nothing waits for or arrives at. Triton 3.6 and
        3.7 reuse their memory for the arguments of warp_specialize partitions, without ordering the two writes. Occasionally, and
        often if processes share a GPU, a partition reads a count instead of a row.
    folded_operands: shapes of product operands whose threads hold more elements along k than exist ("16x16, 8 a thread"). Triton
        3.6 and 3.7 then read some twice and others never (triton-lang/triton#10645 and #11691), so each one means wrong results.
    undefined_registers: uniform registers that some path reads before it writes them. Each one is a defect of ptxas, and results
        are arbitrary (`sass_registers` explains it).
    warnings: the lines of ptxas that warn; C7510 and similar codes mean that it serialised wgmma.
    tensor_columns: 32-bit columns of tensor memory of a program, on sm_100; compare with TENSOR_COLUMNS_LIMIT.
    ptx_digest: of the PTX without debug information, and without the kernel's name.
    sass_digest: of the SASS instructions with their operands, in order.
    operations_digest: of the SASS operations alone, in order. It does not change if an argument of a kernel is at another place, or
        a value in another register.
    """

    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    shared_bytes: int
    instructions: dict[str, int] = field(repr=False)
    loops: tuple[dict[str, int], ...] = field(repr=False)
    warnings: tuple[str, ...]
    exposed_exponentials: int = 0
    idle_barriers: int = 0
    folded_operands: tuple[str, ...] = ()
    undefined_registers: tuple[str, ...] = ()
    tensor_columns: int = 0
    ptx_digest: str = ""
    sass_digest: str = ""
    operations_digest: str = ""

    @property
    def matrix_instructions(self) -> dict[str, int]:
        """The tensor core operations: HMMA and QMMA (fp8), on sm_90 HGMMA and QGMMA (wgmma), on 100 UTCHMMA and UTCQMMA."""
        return {name: count for name, count in self.instructions.items() if name.endswith("MMA")}

    @property
    def spill_instructions(self) -> int:
        """Number of stores to and loads from local memory in the code."""
        return _spills(self.instructions)

    @property
    def loop_spill_share(self) -> float:
        """Stores to and loads from local memory, as a share of the instructions of the innermost loops with matrix products."""
        products = [loop for loop in self.loops if any(name.endswith("MMA") or name == "FFMA" for name in loop)]
        return sum(map(_spills, products)) / max(1, sum(sum(loop.values()) for loop in products))


def report_of(request: CompileRequest) -> CompileReport:
    """Compiles the kernel in this process; for its errors see `compiled_from`."""
    compiled, ptxas_log = _compiled_with_log(request)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(compiled.asm["cubin"])
        usage = _run(triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(cubin))
        sass = disassembled(cubin)
    entry = re.search(rf"Function {compiled.metadata.name}:\s+REG:(\d+) STACK:(\d+)", usage)
    if entry is None:
        raise RuntimeError(f"cuobjdump does not report {compiled.metadata.name}: {usage}")
    stores, loads = zip(*PTXAS_SPILLS.findall(ptxas_log), strict=True)  # one pair per function of the kernel
    loops = _innermost_loops(sass)
    return CompileReport(
        registers=int(entry[1]),
        stack_bytes=int(entry[2]),
        spill_store_bytes=sum(map(int, stores)),
        spill_load_bytes=sum(map(int, loads)),
        shared_bytes=compiled.metadata.shared,
        instructions=dict(Counter(SASS_OPERATION.findall(sass))),
        loops=tuple(dict(Counter(SASS_OPERATION.findall("\n".join(lines)))) for lines in loops),
        warnings=tuple(line for line in ptxas_log.splitlines() if PTXAS_WARNING.search(line)),
        exposed_exponentials=sum(map(_exposed_exponentials, loops)),
        idle_barriers=_idle_barriers(compiled.asm["ttgir"]),
        folded_operands=folded_operands(compiled.asm["ttgir"]),
        undefined_registers=undefined_registers(sass),
        tensor_columns=getattr(compiled.metadata, "tmem_size", 0) or 0,
        ptx_digest=_digest(_without_debug_lines(compiled.asm["ptx"]).replace(compiled.metadata.name, "kernel")),
        sass_digest=_digest("\n".join(SASS_INSTRUCTION.findall(sass))),
        operations_digest=_digest("\n".join(SASS_WHOLE_OPERATION.findall(sass))),
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _without_debug_lines(ptx: str) -> str:
    """Returns the PTX without line numbers, comments, the labels that these need, and debug sections."""
    lines = (line.partition("//")[0].rstrip() for line in ptx.partition(".section\t.debug")[0].splitlines())
    return "\n".join(line for line in lines if line.strip() and not DEBUG_LINE.match(line))


def folded_operands(ttgir: str) -> tuple[str, ...]:
    """Returns the product operands, [..., m, k] or [..., k, n], with more than k elements in the four threads of a row."""
    matches = set()
    for shape, place, held in TTGIR_DOT_OPERAND.findall(ttgir):
        *_, rows, columns = map(int, shape.split("x"))
        if (columns if place == "0" else rows) < 4 * int(held):
            matches.add(f"{shape}, {held} a thread")
    return tuple(sorted(matches))


def _idle_barriers(ttgir: str) -> int:
    """Returns the number of allocations whose only uses, direct or by an index, initialise barriers."""
    if "ttng.init_barrier" not in ttgir:
        return 0
    lines = ttgir.splitlines()
    operands = [TTGIR_RESULTS.sub("", line) for line in lines]

    def uses(name: str) -> list[str]:
        used = re.compile(rf"{re.escape(name)}(?!\w)")
        return [line for line, text in zip(lines, operands, strict=True) if used.search(text)]

    idle = 0
    for name in re.findall(r"^\s*(%\w+) = ttg.local_alloc :", ttgir, re.MULTILINE):
        matches = uses(name)
        for index in re.findall(r"(%\w+) = ttg.memdesc_index ", "\n".join(matches)):
            matches = [line for line in matches if f"{index} = " not in line] + uses(index)
        idle += bool(matches) and all("ttng.init_barrier" in line for line in matches)
    return idle


def sound_from(request: CompileRequest) -> tuple[CompiledKernel, store.Binary | None]:
    """Returns the kernel like `store.sound`, in this process, whose kernels must not be interpreted."""

    def compile_with(num_stages: int, ptx_options: str | None) -> CompiledKernel:
        return compiled_from(replace(request, num_stages=num_stages), ptx_options)

    return store.sound(compile_with, request.num_stages)


def compiled_from(request: CompileRequest, ptx_options: str | None = None) -> CompiledKernel:
    """Compiles the kernel in this process; for ptx_options see `options_of`.

    Raises TypeError for an interpreted kernel. Raises ValueError if signature and constexprs do not name each argument once, or if
    aligned names another. Raises Triton's error if a kernel does not compile.
    """
    kernel, signature, aligned = (
        getattr(importlib.import_module(request.module), request.kernel),
        request.signature,
        request.aligned,
    )
    if not isinstance(kernel, JITFunction):
        raise TypeError(
            f"kernel is {kernel!r}; accepted: a @triton.jit function of a process without TRITON_INTERPRET; use compile_many"
        )
    names = kernel.arg_names
    if wrong := (set(signature) ^ set(request.constexprs) ^ set(names)) | (set(aligned or ()) - set(signature)):
        raise ValueError(
            f"signature and constexprs together must name each argument of {kernel.__name__} once, and aligned some of those in "
            f"signature; wrong or missing: {', '.join(sorted(wrong))}"
        )
    types = {name: signature.get(name, "constexpr") for name in names}
    aligned = [name for name in names if types[name].startswith("*")] if aligned is None else aligned
    language = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    source = language(  # attrs in the arguments' order, which is part of Triton's cache key
        fn=kernel,
        signature=types,
        constexprs={(names.index(name),): _constant(value) for name, value in request.constexprs.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in aligned},
    )
    options = options_of(request.num_warps, request.num_stages, ptx_options, request.registers)
    if kernel.debug:  # enables the assertions of an `asserting_kernel`
        options["debug"] = True
    with compiling():
        return triton.compile(source, target=GPUTarget("cuda", request.sm, 32), options=options)


def _spills(instructions: Mapping[str, int]) -> int:
    return instructions.get("STL", 0) + instructions.get("LDL", 0)


def _innermost_loops(sass: str) -> list[list[str]]:
    """Returns the lines between each backward branch and its label, if no other such range lies inside."""
    lines = sass.splitlines()
    labels = {matches[1]: n for n, line in enumerate(lines) if (matches := SASS_LABEL.match(line))}
    branches = ((n, SASS_BRANCH.search(line)) for n, line in enumerate(lines))
    loops = [(labels[matches[1]], n) for n, matches in branches if matches and labels.get(matches[1], n) < n]
    innermost = [(a, b) for a, b in loops if not any((a, b) != (c, d) and a <= c and d <= b for c, d in loops)]
    return [lines[a : b + 1] for a, b in innermost]


def _exposed_exponentials(loop: list[str]) -> int:
    first = next((n for n, line in enumerate(loop) if SASS_WAIT_FOR_ALL.search(line)), len(loop))
    return sum("MUFU.EX2" in line for line in loop[first:])


def _compiled_with_log(request: CompileRequest) -> tuple[CompiledKernel, str]:
    """Returns the kernel, and ptxas's output from its compilation, which is stored beside it in Triton's cache."""
    for always in (False, True):  # Triton's cache may have the kernel without the log
        log = io.StringIO()
        with triton.knobs.nvidia.scope(), triton.knobs.compilation.scope(), contextlib.redirect_stdout(log):
            triton.knobs.nvidia.dump_ptxas_log = True
            triton.knobs.compilation.always_compile = always
            compiled = compiled_from(request)
        cache = get_cache_manager(compiled.hash)
        if PTXAS_SPILLS.search(log.getvalue()):
            cache.put(log.getvalue(), PTXAS_LOG, binary=False)
        if path := cache.get_file(PTXAS_LOG):
            return compiled, Path(path).read_text()
    raise RuntimeError(f"triton {triton.__version__} does not print the output of ptxas; {__name__} must be adapted to it")


def disassembled(cubin: Path) -> str:
    return _run(triton.knobs.nvidia.nvdisasm.path, "-c", str(cubin))


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def compile_many(requests: Sequence[CompileRequest], workers: int | None = None) -> list[CompileReport]:
    """Compiles `requests`, `workers` at a time (all cores by default), and returns their reports in the same order.

    Raises CompileError once all are tried if any failed. Triton's cache on disk (TRITON_CACHE_DIR) makes repeats cheap.
    """
    if not requests:
        return []
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    with tempfile.TemporaryDirectory() as folder:
        job, answer = Path(folder, "job"), Path(folder, "answer")
        job.write_bytes(pickle.dumps((workers or os.cpu_count(), list(requests))))
        done = _run_python(["-m", __name__, str(job), str(answer)], environment)
        if done.returncode:
            raise CompileError(f"the compiling process ended with {done.returncode}: {done.stderr[-4000:]}")
        answers = pickle.loads(answer.read_bytes())
    return checked_answers(requests, answers, done.stderr)


def _run_python(arguments: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)


def checked_answers(requests: Sequence[CompileRequest], answers: Sequence[CompileReport | str], stderr: str) -> list[CompileReport]:
    """Returns the reports; raises CompileError if an answer is an error message. stderr: of the compiling process."""
    if failures := [f"{request}\n{answer}" for request, answer in zip(requests, answers, strict=True) if isinstance(answer, str)]:
        message = f"{len(failures)} of {len(requests)} kernels do not compile"
        raise CompileError("\n\n".join([message, *failures, stderr[-4000:]]))
    return [answer for answer in answers if not isinstance(answer, str)]


def main(job: str, answer: str) -> None:
    workers, requests = pickle.loads(Path(job).read_bytes())
    Path(answer).write_bytes(pickle.dumps(answers_to(requests, workers)))


def answers_to(requests: Sequence[CompileRequest], workers: int | None = None) -> list[CompileReport | str]:
    """Returns a report or an error message for each request, from forked processes, which need not import torch again."""
    triton_key()  # a digest of the compiler, which Triton keeps: the processes need not compute it again
    with ProcessPoolExecutor(workers or os.cpu_count(), mp_context=multiprocessing.get_context("fork")) as pool:
        futures = [pool.submit(_answer, request) for request in requests]
        return [_outcome(future) for future in futures]


def _answer(request: CompileRequest) -> CompileReport | str:
    """Returns the report, or the error message."""
    try:
        return report_of(request)
    except Exception as error:  # one kernel's failure, of any kind, must not hide the others' reports
        return "\nin which\n".join(f"{type(e).__name__}: {e}" for e in _with_causes(error))


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error and its causes: Triton's error has only a location, for each function that was being inlined."""
    while error is not None:
        yield error
        error = error.__cause__


def _outcome(future: Future[CompileReport | str]) -> CompileReport | str:
    try:
        return future.result()
    except BrokenProcessPool:
        return "a compiling process died on this kernel or on one that was compiled beside it"


def _constant(value: object) -> Any:
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_constant, value))
    if isinstance(value, _Generated):
        return compile_source(value.name, value.source)
    return getattr(tl, value.removeprefix("tl.")) if isinstance(value, str) and value.startswith("tl.") else value


if __name__ == "__main__":
    # By its full name, because unpickled objects must have the module's classes, not those of __main__.
    importlib.import_module("flexattn.kernels_triton.ahead_of_time.compile_report").main(*sys.argv[1:])
