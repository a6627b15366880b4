"""Uniform registers that a kernel's code reads and never writes, which are the symptom of a defect of ptxas.

ptxas 12.8.93, which Triton 3.6.0 and 3.7.1 ship, loses writes to uniform registers. On sm_90 this affects the descriptors by which
wgmma addresses its operands in shared memory. They have 64 bits, so each is in two uniform registers.

If a loop's tiles are not pipelined, they are at the same address in each iteration, and LLVM computes their descriptors before the
loop. A kernel has two or three such loops, for keys that all rows see and for keys that the band cuts. Tiles of head dims in two
parts (96 = 64 + 32) have so many descriptors that ptxas moves them between registers. Then half of a descriptor may be in a
register that is written only before another loop, which may be skipped, or nowhere. The product reads shared memory at an arbitrary
address: silently wrong numbers, NaN, or "an illegal memory access". The PTX is right, ptxas -O1 and -O2 do not help, and ptxas 13.1
compiles the same PTX correctly.

If tiles are pipelined, a descriptor depends on the iteration's buffer. LLVM then computes only the descriptors of operands of the
whole kernel before a loop. So the defect needs tiles that are not pipelined, of head dims in two parts. There are three kinds:

- Rows that are loaded element by element because of their strides or addresses: Triton does not pipeline loads of fewer than 4
  bytes. A `Problem` rejects such rows on a GPU.
- Keys and values that are converted from FP8: they go from the pipeline through registers to one address. A `Problem` uses one part
  for their head dims.
- Tiles of one stage: some tiles of backwards. Forwards with 16 keys at a time have two stages for this reason.

If ptxas computes a descriptor in ordinary registers, it may lose a write of theirs. Then the descriptor is made of a number that
was loaded for something else, such as the seed of dropout. The dataflow of unwritten registers does not see it, because something
wrote the register. So the origin of each descriptor is followed too: no load and no floating-point number may be part of one.

`tests/portable/test_sound_kernels.py` draws calls of all head dims and features, and finds no such register in their kernels. If a
kernel has one anyway, it is compiled with another number of stages, and at last by ptxas -O0, whose code is slow (`store.sound`).
If nothing helps, it is not launched.
"""

from __future__ import annotations

import functools
import operator
import re
import subprocess
import tempfile
from collections.abc import Sequence
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
_ORDINARY = 256  # the bit of R0; there are fewer uniform registers (sm_90 has 63)

# Operations that write no register, so their first operand is a register that they read: comparisons, stores, and sends to the
# tensor cores (of sm_100) or elsewhere. All other operations write their first operand that is not a predicate.
_WRITES_NONE = re.compile(
    r"\w+SETP\d?|U?PLOP3|FCHK|R2P|UR2UP|UTMA\w+|UBLK\w+|UTC(?!ATOMSWS)\w+|USETMAXREG|BAR|BRXU?|RET|WARPSYNC|NANOSLEEP"
)
_ENDS = {"EXIT", "BRA", "BRX", "BRXU", "JMP", "CALL", "RET", "KILL"}  # unless under a predicate, they end a path or jump
_GOES_ON = {"RET", "BSSY"}  # operations that end or continue, whatever label they name


class _Instruction(NamedTuple):
    reads: int  # a bit for each register: uniform registers first, ordinary ones from _ORDINARY
    writes: int
    is_copy: bool  # from the one register that it reads to the one register that it writes
    next: tuple[int, ...]  # indices in the code
    name: str  # the operation with its modifiers
    text: str  # its operands


# The search for the origin of a descriptor's lower half ends at the 14 bits of its address, at a constant, or at a spill.
_ADDRESS = re.compile(r"U?SGXT\S* \w+, \S+, 0xe|U?LOP3\S* (U?P\w+, )?\w+, [^,]+, 0x[0-3]?[0-9a-f]{1,3},|LDL")
_FOREIGN = re.compile(r"LD[GCS]|F(ADD|MUL|FMA|SEL|MNMX)|MUFU|I2F")


class MiscompiledError(RuntimeError):
    """A kernel that ptxas miscompiled: a launch could give wrong numbers, or read other memory."""


def check_code(name: str, ptx: str, cubin: bytes) -> None:
    """Raises MiscompiledError for a kernel whose code reads uniform registers that it never writes.

    Only wgmma is known to be affected, so other kernels are not checked. Nothing is checked if nvdisasm, which Triton ships, is
    missing.
    """
    if "wgmma" not in ptx:
        return
    try:
        tool = triton.knobs.nvidia.nvdisasm.path
    except RuntimeError:  # nvdisasm is missing
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        sass = subprocess.run([tool, "-c", str(path)], capture_output=True, text=True, check=True).stdout
    if registers := undefined_registers(sass):
        raise MiscompiledError(
            f"ptxas {triton.knobs.nvidia.ptxas.version} miscompiles {name}: the code reads "
            f"{', '.join(registers)} but never writes them; set TRITON_PTXAS_PATH to the ptxas of CUDA 13.1 or later, or pass "
            "backend='eager', and report the call"
        )


def undefined_registers(sass: str) -> tuple[str, ...]:
    """Returns the uniform registers that some path through a kernel uses before it writes them, as "UR4", sorted by number.

    sass: the code of one kernel, as printed by `nvdisasm -c`.

    The method is forward dataflow of the registers that may be undefined (Aho et al., Compilers, 9.2). A copy does not count as a
    use, but its target is then undefined too: ptxas copies pairs of which one half is not yet written, and writes that half in the
    copy. So a uniform register may be parked in an ordinary one. If that is used for something else, it is in the result ("R14"). A
    write under a predicate counts as a write, because the read has the same predicate.
    """
    code = _instructions(sass)
    if not code:
        return ()
    undefined = [0] * len(code)  # before each instruction, by the paths that are known to reach it
    undefined[0] = _bits("UR", 0, _ORDINARY)
    reached, used, todo = {0}, 0, [0]
    while todo:
        place = todo.pop()
        before, (reads, writes, is_copy, following, _, _) = undefined[place], code[place]
        after = before & ~writes
        if is_copy and before & reads:
            after |= writes
        elif not is_copy:
            used |= before & reads
        for other in following:
            if other not in reached or after & ~undefined[other]:
                reached.add(other)
                undefined[other] |= after
                todo.append(other)
    registers = (f"UR{n}" if n < _ORDINARY else f"R{n - _ORDINARY}" for n in range(used.bit_length()) if used >> n & 1)
    return (*registers, *_stray_descriptors(code))


def _stray_descriptors(code: Sequence[_Instruction]) -> tuple[str, ...]:
    """Returns the descriptors of wgmma, as "gdesc[UR8]", that are computed from a load or a floating-point number."""
    before: list[list[int]] = [[] for _ in code]
    for place, instruction in enumerate(code):
        for following in instruction.next:
            before[following].append(place)
    found = []
    for place, instruction in enumerate(code):
        used = re.search(r"gdesc\[UR(\d+)\]", instruction.text) if instruction.name.partition(".")[0].endswith("GMMA") else None
        if used is None:
            continue
        first = int(used[1])
        lower = (first, first + 2) if instruction.reads >> first & 1 else (first + 2,)  # halves with an address
        if any(_has_foreign_origin(code, before, place, register) for register in lower):
            found.append(used[0])
    return tuple(dict.fromkeys(found))


def _has_foreign_origin(code: Sequence[_Instruction], before: Sequence[Sequence[int]], place: int, register: int) -> bool:
    """Returns whether the value of a register before an instruction is from a load or a floating-point number."""
    todo, seen = [(n, register) for n in before[place]], set()
    while todo:
        at = todo.pop()
        if at in seen:
            continue
        seen.add(at)
        place, register = at
        reads, writes, _, _, name, text = code[place]
        sources = [register]
        if writes >> register & 1:
            if _FOREIGN.match(name):
                return True
            sources = [] if _ADDRESS.match(f"{name} {text}") else [n for n in range(reads.bit_length()) if reads >> n & 1]
            if name == "UIADD3.64":  # a carry may go up, and no part of an upper half goes down
                lowest = (writes & -writes).bit_length() - 1
                sources = [n + register - lowest for n in map(int, re.findall(r"\bUR(\d+)", text)[1:])]
        todo += [(previous, source) for source in sources for previous in before[place]]
    return False


def _instructions(sass: str) -> list[_Instruction]:
    lines: list[tuple[str, ...]] = []
    labels: dict[str, int] = {}
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
        code.append(_Instruction(reads, writes, is_copy, tuple(n for n in following if n < len(lines)), name, text))
    starts = sorted(place for label, place in labels.items() if label.startswith("$"))  # functions, which follow the kernel's code
    for place, (_, name, text) in enumerate(lines):
        if name.startswith("CALL") and (called := [labels[label] for label in _TARGET.findall(text) if label.startswith("$")]):
            end = next((start for start in starts if start > called[0]), len(code))
            written = functools.reduce(operator.or_, (instruction.writes for instruction in code[called[0] : end]))
            code[place] = code[place]._replace(writes=written)
    return code


def _registers(name: str, text: str) -> tuple[int, int]:
    """Returns (reads, writes) of an operation with its modifiers, "UIADD3.64", and operands, "UR8, UR16, 0x4, URZ"."""
    operation, *modifiers = name.split(".")
    if operation == "UIMNMX" and {"S64", "U64"} & {*modifiers}:  # sm_120 has it
        modifiers.append("64")
    operands = [part for part in map(str.strip, text.split(",")) if not _PREDICATE.fullmatch(part)]
    reads, writes = 0, 0
    if operands and not _WRITES_NONE.fullmatch(operation) and (target := _REGISTER.fullmatch(operands[0])):
        size = 4 if "128" in modifiers else 2 if {"64", "WIDE"} & {*modifiers} else 1
        if operation == "LDTM":  # "LDTM.x64 R4" writes R4 to R67
            size = int(modifiers[-1].removeprefix("x"))
        elif operation == "LDSM" and modifiers[-1].isdigit():  # "LDSM.16.M88.4"
            size = int(modifiers[-1])
        elif operation == "CS2R" and "32" not in modifiers:  # ptxas clears a pair by "CS2R R4, SRZ"
            size = 2
        writes = _bits(target[2], target[3], size)
        operands[0] = ""
    for place, operand in enumerate(operands):
        for prefix, kind, number, has_64 in _REGISTER.findall(operand):
            is_number = kind == "UR" and "[" not in operand
            is_pair = has_64 or prefix in ("desc", "gdesc") or (is_number and "64" in modifiers and operation[0] in "US")
            if operation == "UIMAD" and "WIDE" in modifiers and place == 3:  # the summand, after two factors
                is_pair = True
            first, size = int(number), 2 if is_pair else 1
            if prefix == "gdesc" and operation.endswith("GMMA"):
                # Descriptors of both factors; if the first factor is in ordinary registers, the second factor's, at its usual
                # place.
                first, size = (first, 4) if place == 1 else (first + 2, 2)
            elif operation.startswith("UTMA"):
                # The first operand has the address in shared memory, the barrier of a load, and the coordinates; the second has the
                # descriptor.
                size = int(modifiers[0][0]) + (2 if operation == "UTMALDG" else 1) if place == 0 else 2
            reads |= _bits(kind, first, size)
    return reads, writes


def _bits(kind: str, first: int | str, size: int) -> int:
    return ((1 << size) - 1) << int(first) + (_ORDINARY if kind == "R" else 0)
