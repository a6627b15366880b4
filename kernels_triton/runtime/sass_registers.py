"""Uniform registers that a kernel's code reads and that nothing wrote: how a defect of ptxas shows.

ptxas 12.8.93, which Triton 3.6.0 and 3.7.1 ship, loses writes to uniform registers. It happens on sm_90 to the descriptors by
which wgmma finds its operands in shared memory, of 64 bits and so in two uniform registers each. Where a loop's tiles are not
pipelined, they lie at the same place in each turn, and LLVM computes their descriptors in front of the loop. A kernel has two such
loops or three, for keys that all rows see and for those that the band cuts, and tiles of head dims in two parts (96 = 64 + 32) have
descriptors enough that ptxas moves them about: half of one is then a register that is written in front of another loop alone, which
may have been skipped, or nowhere. The product reads shared memory wherever the register happens to point: numbers that are wrong
without a word, NaN, or "an illegal memory access". The PTX is right, ptxas -O1 and -O2 are no help, and ptxas 13.1 compiles the
same PTX rightly.

If tiles are pipelined, a descriptor depends on the turn's buffer, and LLVM computes none in front of a loop but that of an
operand of the whole kernel. The defect needs tiles that are not pipelined, of head dims in two parts. There are three kinds:

- Rows that are loaded element by element, for their strides or their addresses, as Triton does not pipeline loads of fewer than
  4 bytes. A `Problem` takes no such rows on a GPU.
- Keys and values that are converted from FP8: they go from the pipeline through registers to one place. A `Problem` takes their
  head dims in one part.
- Tiles of one stage: some of backwards, and of forwards with 16 keys at a time. A forward with a bias at head dims 152 and 368
  reads such registers. With two stages it reads none.

`tests/portable/test_sound_kernels.py` draws calls of all head dims and features, and finds no such register in their kernels. A
kernel that has one all the same is compiled with another number of stages (`store.sound`). If none helps, it is not launched.
"""

from __future__ import annotations

import functools
import operator
import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import triton

_LABEL = re.compile(r"^\s*([.$][^\s:]+):")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);")  # "/*0010*/ @!P0 BRA `(.L_x_0) ;"
_TARGET = re.compile(r"\.L_x_\d+|(?<=`\()[^)]+")
_PREDICATE = re.compile(r"!?U?P[\dTR]")
_REGISTER = re.compile(r"(?:\b(\w+)\[)?\b(U?R)(\d+)\b(\.64)?")

_COPY = re.compile(
    r"(UMOV UR\d+, UR\d+|(MOV(\.SPILL)? R\d+,|IMAD\.(MOV\.)?U32 R\d+, RZ, RZ,) UR\d+|R2UR(\.FILL)? UR\d+, R\d+(\.reuse)?)"
)
_ORDINARY = 256  # the bit of R0; there are fewer uniform registers, of which sm_90 has 63

# Operations that write no register, and whose first operand is therefore one that they read: what compares, goes to memory, to the
# tensor cores (of sm_100) or elsewhere. All others write the first operand that is no predicate.
_WRITES_NONE = re.compile(
    r"\w+SETP\d?|U?PLOP3|FCHK|R2P|UR2UP|UTMA\w+|UBLK\w+|UTC(?!ATOMSWS)\w+|USETMAXREG|BAR|BRXU?|RET|WARPSYNC|NANOSLEEP"
)
_ENDS = {"EXIT", "BRA", "BRX", "BRXU", "JMP", "CALL", "RET", "KILL"}  # a path, or go elsewhere, unless under a predicate
_GOES_ON = {"RET", "BSSY"}  # or ends, whatever it names


class _Instruction(NamedTuple):
    reads: int  # a bit for each register: uniform ones first, ordinary ones from _ORDINARY
    writes: int
    is_copy: bool  # from the one register that it reads to the one that it writes
    next: tuple[int, ...]  # by place in the code


class MiscompiledError(RuntimeError):
    """A kernel of which ptxas made wrong code: to launch it would give wrong numbers, or read memory of others."""


def check_code(name: str, ptx: str, cubin: bytes) -> None:
    """Raises MiscompiledError for a kernel whose code reads uniform registers that nothing wrote.

    Only wgmma is known to be hit, so kernels without it are not searched; nor is any where Triton has no nvdisasm, which it ships.
    """
    if "wgmma" not in ptx:
        return
    try:
        tool = triton.knobs.nvidia.nvdisasm.path
    except RuntimeError:  # there is none
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        sass = subprocess.run([tool, "-c", str(path)], capture_output=True, text=True, check=True).stdout
    if found := undefined_registers(sass):
        raise MiscompiledError(
            f"ptxas {triton.knobs.nvidia.ptxas.version} made wrong code of {name}, which is therefore not launched: it reads "
            f"{', '.join(found)}, and nothing writes them; set TRITON_PTXAS_PATH to the ptxas of CUDA 13.1 or later, or pass "
            "backend='eager', and report the call"
        )


def undefined_registers(sass: str) -> tuple[str, ...]:
    """Returns the uniform registers that some path through a kernel uses before it writes them, as "UR4", sorted by number.

    sass: of one kernel, as `nvdisasm -c` prints it.

    Forward dataflow of the registers that may be undefined (Aho et al., Compilers, 9.2). A copy is no use, but what it writes is
    then undefined too: ptxas copies pairs of which one half is not yet written, and writes that half in the copy. So a uniform
    register may be parked in an ordinary one, which is named ("R14") where it is used for something else. A write under a
    predicate counts as a write: what reads it has the same predicate.
    """
    code = _instructions(sass)
    if not code:
        return ()
    undefined = [0] * len(code)  # in front of each instruction, by the paths that are known to reach it
    undefined[0] = _bits("UR", 0, _ORDINARY)
    reached, found, todo = {0}, 0, [0]
    while todo:
        place = todo.pop()
        before, (reads, writes, is_copy, following) = undefined[place], code[place]
        after = before & ~writes
        if is_copy and before & reads:
            after |= writes
        elif not is_copy:
            found |= before & reads
        for other in following:
            if other not in reached or after & ~undefined[other]:
                reached.add(other)
                undefined[other] |= after
                todo.append(other)
    return tuple(f"UR{n}" if n < _ORDINARY else f"R{n - _ORDINARY}" for n in range(found.bit_length()) if found >> n & 1)


def _instructions(sass: str) -> list[_Instruction]:
    lines, labels = [], {}
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(lines)
        elif instruction := _INSTRUCTION.search(line):
            lines.append(instruction.groups())
    code = []
    for place, (guard, name, text) in enumerate(lines):
        operation = name.partition(".")[0]
        following = [labels[label] for label in _TARGET.findall(text) if label in labels] if operation not in _GOES_ON else []
        returns = operation == "CALL" and "$" in text  # a call of a label of the kernel's own is a jump
        if operation not in _ENDS or returns or guard or _PREDICATE.match(text):
            following.append(place + 1)
        reads, writes = _registers(name, text)
        is_copy = _COPY.fullmatch(f"{name} {text.strip()}") is not None
        code.append(_Instruction(reads, writes, is_copy, tuple(n for n in following if n < len(lines))))
    starts = sorted(place for label, place in labels.items() if label.startswith("$"))  # functions, which lie behind the kernel
    for place, (_, name, text) in enumerate(lines):
        if name.startswith("CALL") and (called := [labels[label] for label in _TARGET.findall(text) if label.startswith("$")]):
            end = next((start for start in starts if start > called[0]), len(code))
            written = functools.reduce(operator.or_, (instruction.writes for instruction in code[called[0] : end]))
            code[place] = code[place]._replace(writes=written)
    return code


def _registers(name: str, text: str) -> tuple[int, int]:
    """(reads, writes) of an operation with its modifiers, "UIADD3.64", and operands, "UR8, UR16, 0x4, URZ"."""
    operation, *modifiers = name.split(".")
    operands = [part for part in map(str.strip, text.split(",")) if not _PREDICATE.fullmatch(part)]
    reads, writes = 0, 0
    if operands and not _WRITES_NONE.fullmatch(operation) and (target := _REGISTER.fullmatch(operands[0])):
        size = 4 if "128" in modifiers else 2 if {"64", "WIDE"} & {*modifiers} else 1
        if operation == "LDTM":  # "LDTM.x64 R4" writes R4 to R67
            size = int(modifiers[-1].removeprefix("x"))
        writes = _bits(target[2], target[3], size)
        operands[0] = ""
    for place, operand in enumerate(operands):
        for prefix, kind, number, has_64 in _REGISTER.findall(operand):
            is_number = kind == "UR" and "[" not in operand
            is_pair = has_64 or prefix in ("desc", "gdesc") or (is_number and "64" in modifiers and operation[0] in "US")
            if operation == "UIMAD" and "WIDE" in modifiers and place == 3:  # the summand, behind two factors
                is_pair = True
            first, size = int(number), 2 if is_pair else 1
            if prefix == "gdesc" and operation.endswith("GMMA"):
                # Descriptors of both factors; where the first one is in ordinary registers, of the second, in its usual place.
                first, size = (first, 4) if place == 1 else (first + 2, 2)
            elif operation.startswith("UTMA"):
                # First the address in shared memory, of a load its barrier's too, and the coordinates; then the descriptor's.
                size = int(modifiers[0][0]) + (2 if operation == "UTMALDG" else 1) if place == 0 else 2
            reads |= _bits(kind, first, size)
    return reads, writes


def _bits(kind: str, first: int | str, size: int) -> int:
    return ((1 << size) - 1) << int(first) + (_ORDINARY if kind == "R" else 0)
