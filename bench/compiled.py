"""The compiler's output for a kernel, if needed for an absent GPU: reports, the gates that a tile must pass, and dumps."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flexattn.bench.implementations import KERNELS, Launchers, environment, recorded, with_launchers
from flexattn.bench.inputs import make_tensors
from flexattn.bench.shapes import Workload

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from flexattn.kernels_triton.ahead_of_time.compile_report import CompileReport, CompileRequest
    from flexattn.kernels_triton.runtime.device import Tile

    Compile = Callable[[Sequence[CompileRequest]], list[CompileReport]]

DUMPS = ("ttir", "ttgir", "llir", "ptx", "sass")
LOOP_SPILLS = 0.1  # share of the instructions in loops with matrix products; with fewer spills a tile may still be the fastest
MATRIX_INSTRUCTION = {80: "HMMA", 86: "HMMA", 89: "HMMA", 90: "HGMMA", 100: "UTCHMMA", 120: "HMMA"}


def requests(kernel: str, launchers: Launchers, workload: Workload, arch: int) -> list[CompileRequest]:
    """Returns requests that compile the kernel for these launchers; two requests if dk and dv have separate kernels."""
    from flexattn.kernels_triton.ahead_of_time.compile_report import request_for

    small = workload.shortened(32)
    if workload.group_size > 1:
        small = small._replace(num_heads=2)
    tensors = make_tensors(small, "cpu")
    direction, _ = KERNELS[kernel]
    return [request_for(x, arch) for x in recorded(lambda: with_launchers(launchers, small, tensors, direction), kernel)]


def reports(
    groups: Sequence[Sequence[CompileRequest]], advance: Callable[[], object] = lambda: None, compile_many: Compile | None = None
) -> list[list[CompileReport] | str]:
    """Returns for each group of requests its reports, or the compiler's message; `advance` is called after each group."""
    from flexattn.kernels_triton.ahead_of_time import compile_report

    compile_many = compile_many or compile_report.compile_many

    answers: list[list[CompileReport] | str] = []
    batch = 2 * (os.cpu_count() or 1)
    for start in range(0, len(groups), batch):
        part = groups[start : start + batch]
        try:
            made = iter(compile_many([request for group in part for request in group]))
            answers += [[next(made) for _ in group] for group in part]
        except compile_report.CompileError:  # find out whose fault it is
            answers += [_alone(group, compile_many) for group in part]
        for _ in part:
            advance()
    return answers


def _alone(group: Sequence[CompileRequest], compile_many: Compile) -> list[CompileReport] | str:
    from flexattn.kernels_triton.ahead_of_time.compile_report import CompileError

    try:
        return compile_many(group)
    except CompileError as e:
        return str(e)


class Compiler:
    """A second process that compiles. It is forked before Triton is imported, because Triton interprets in this process."""

    def __init__(self) -> None:
        assert "triton" not in sys.modules
        fork = multiprocessing.get_context("fork")
        self._pipe, theirs = fork.Pipe()
        self._process = fork.Process(target=_serve, args=(theirs, self._pipe))
        self._process.start()
        theirs.close()

    def compile_many(self, requests: Sequence[CompileRequest]) -> list[CompileReport]:
        """Returns the reports of `compile_report.compile_many`, without the seconds in which a new process imports torch."""
        from flexattn.kernels_triton.ahead_of_time.compile_report import CompileError, checked_answers

        self._pipe.send((list(sys.path), pickle.dumps(list(requests))))
        try:
            answers, stderr = self._pipe.recv()
        except EOFError:
            raise CompileError("the compiling process died") from None
        return checked_answers(requests, answers, stderr)

    def close(self) -> None:
        self._pipe.close()
        self._process.terminate()
        self._process.join()


def _serve(pipe: Connection, other_end: Connection) -> None:
    """Compiles the requests from `pipe` until its other end is closed. The fork's copy of that end is closed first."""
    other_end.close()
    os.environ.pop("TRITON_INTERPRET", None)
    with tempfile.TemporaryFile() as log:
        os.dup2(log.fileno(), 2)
        from flexattn.kernels_triton.ahead_of_time.compile_report import answers_to

        importlib.import_module("flexattn.kernels_triton.portable.backward")  # while the other process runs the check
        while True:
            try:
                sys.path[:], requests = pipe.recv()
            except EOFError:
                return
            answers = answers_to(pickle.loads(requests))
            log.seek(0)
            pipe.send((answers, log.read().decode(errors="replace")))


def complaints(kernel: str, tile: Tile, arch: int, made: Sequence[CompileReport] | str) -> list[str]:
    """Returns reasons against running a tile in half precision; none for a good one."""
    from flexattn.kernels_triton.ahead_of_time.compile_report import SHARED_MEMORY_LIMIT

    if isinstance(made, str):
        return [next((line for line in reversed(made.splitlines()) if line.strip()), "it does not compile")[:200]]
    found = []
    for report in made:
        limit = SHARED_MEMORY_LIMIT[arch]
        if report.shared_bytes > limit:
            found.append(f"{report.shared_bytes} bytes of shared memory, and there are {limit}")
        if report.loop_spill_share > LOOP_SPILLS:
            found.append(f"{report.loop_spill_share:.0%} of the loops' instructions are spills")
        rows = tile.block_n if kernel == "dkdv" else tile.block_m
        expected = MATRIX_INSTRUCTION[arch] if rows >= 64 else "HMMA"  # wgmma and tcgen05 begin at 64 rows
        if set(report.matrix_instructions) != {expected}:
            found.append(f"matrix instructions are {' and '.join(report.matrix_instructions) or 'none'}, not {expected} alone")
        if any("serialized" in warning for warning in report.warnings):
            found.append("ptxas serialized wgmma")
        if report.undefined_registers:
            found.append("ptxas made code that reads registers before it writes them")
        if report.folded_operands:
            found.append(f"Triton multiplies only a part of operands: {', '.join(report.folded_operands)}")
    return list(dict.fromkeys(found))


def dump(asked: Sequence[CompileRequest], kinds: Sequence[str], folder: Path) -> list[Path]:
    """Writes the kernels' intermediate code to `<kernel>.<kind>` (`<kernel>.1.<kind>` for a second launch); returns the paths."""
    from flexattn.kernels_triton.ahead_of_time.compile_report import compile_many, disassembled

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for n, request in enumerate(asked):
        with tempfile.TemporaryDirectory() as scratch:
            with environment({"TRITON_CACHE_DIR": scratch}):  # Triton saves every stage with the kernel
                compile_many([request], workers=1)
            for kind in kinds:
                [source] = Path(scratch).rglob(f"{request.kernel}.{'cubin' if kind == 'sass' else kind}")
                target = folder / f"{request.kernel}{f'.{n}' if n else ''}.{kind}"
                if kind == "sass":
                    target.write_text(disassembled(source))
                else:
                    shutil.copyfile(source, target)
                written.append(target)
    return written
