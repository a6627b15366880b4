"""Compiled kernels on disk, found without Triton, which would first scan its whole installation in each process.

A file's name is a hash of everything that determines the machine code. That is the source with the functions that it calls, the
specialised properties of the arguments and the compiler's options. It is also the architecture, Triton's version, and the
environment variables that Triton's compiler reads. The file contains that text too, before the binary. So a directory can be copied
to a machine without a compiler. `flexattn.kept_files` defines the owner that a file must have to be read.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITCallable

from flexattn import kept_files
from flexattn.kernels_triton.runtime import imitation
from flexattn.kernels_triton.runtime.compiler import UNOPTIMISED, shared_memory_limit
from flexattn.kernels_triton.runtime.sass_registers import MiscompiledError, check_code
from flexattn.kernels_triton.runtime.sources import source_key

FILE_FORMAT = 4
_KIND = f"kernel {FILE_FORMAT}"
_PREFIXES = ("TRITON_", "PTXAS_", "NVPTX_", "MLIR_", "LLVM_", "DISABLE_", "USE_IR_LOC")
_ELSEWHERE = (
    "TRITON_CACHE_DIR",
    "TRITON_HOME",
    "TRITON_LIBCUDA_PATH",
    "TRITON_DUMP_DIR",
    "TRITON_OVERRIDE_DIR",
    "TRITON_INTERPRET",
)


class Binary(NamedTuple):
    """A kernel as the driver loads it, and the description of its arguments."""

    name: str
    signature: list[Any]  # Triton's type of each argument; a list for a tuple
    num_warps: int
    shared: int  # bytes
    maps: list[Any]  # for each descriptor, the metadata that its tensor map is encoded with
    waits: bool  # whether it waits for the kernel launched before it (`launch_order`)
    code: bytes


def sound(compile_with: Callable[[int, str | None], Any], num_stages: int) -> tuple[object, Binary | None]:
    """Returns a kernel as Triton compiled it, and its `binary_of`.

    If ptxas miscompiles the kernel, or if the kernel needs more shared memory than a program has, other numbers of stages are
    tried: fewer, then one more. Layouts pass through shared memory beside the tiles, and mods decide how many. If ptxas miscompiles
    each of them, it compiles without optimisations.

    compile_with: compiles the kernel with a number of stages and options of ptxas. Raises MiscompiledError if no code is right, and
    Triton's OutOfResources if no number of stages fits.
    """
    errors: list[Exception] = []
    miscompiled: list[int] = []
    for stages in (num_stages, *range(num_stages - 1, 0, -1), num_stages + 1):
        compiled = compile_with(stages, None)
        needed, limit = compiled.metadata.shared, shared_memory_limit(compiled.metadata.target.arch)
        if needed > limit:
            errors.append(OutOfResources(needed, limit, "shared memory"))
            continue
        try:
            return compiled, binary_of(compiled)
        except MiscompiledError as error:
            errors.append(error)
            miscompiled.append(stages)
    for stages in miscompiled[:1]:
        compiled = compile_with(stages, UNOPTIMISED)
        with contextlib.suppress(MiscompiledError):
            return compiled, binary_of(compiled)
    raise errors[0]


def binary_of(compiled: Any) -> Binary | None:
    """Returns a compiled kernel as it is stored; None if it needs scratch memory, clusters or launch attributes.

    Raises MiscompiledError if ptxas miscompiled it.
    """
    metadata, (ptx, cubin) = compiled.metadata, (compiled.asm["ptx"], compiled.asm["cubin"])
    check_code(metadata.name, ptx, cubin)
    needs = ("global_scratch_size", "profile_scratch_size", "launch_pdl", "launch_cooperative_grid")
    if metadata.num_ctas != 1 or any(getattr(metadata, name, 0) for name in needs):
        return None
    signature = json.loads(json.dumps(list(compiled.src.signature.values())))  # tuples as lists, because JSON has no tuples
    maps = [dict(meta) if meta is not None else None for meta in getattr(metadata, "tensordesc_meta", None) or ()]
    waits = "griddepcontrol.wait" in ptx
    return Binary(metadata.name, signature, metadata.num_warps, metadata.shared, maps, waits, cubin)


def description(kernel: Any, parts: Sequence[object], options: Mapping[str, object], architecture: int) -> str:
    """Returns a text that identifies a kernel; `parts` are the properties of each argument that it is specialised for."""
    properties = (
        (FILE_FORMAT, triton.__version__, _library_bytes(), architecture, imitation.code_key(), sorted(options.items())),
        (f"{kernel.fn.__module__}.{kernel.fn.__qualname__}", source_key(kernel)),
        tuple(map(_text, parts)),
        sorted((name, value) for name, value in os.environ.items() if name.startswith(_PREFIXES) and name not in _ELSEWHERE),
    )
    return repr(properties)


def is_used() -> bool:
    """Returns whether kernels on disk may be used: not if Triton must recompile, or dump or override its stages."""
    wishes = triton.knobs.compilation
    return not (wishes.always_compile or wishes.dump_ir or wishes.override)


def default_directory() -> Path:
    return Path(triton.knobs.cache.dir) / "flexattn"


def find(directory: Path, text: str, says: bool = False) -> Binary | None:
    """Returns the kernel with this `description`; None if no readable file exists.

    says: whether an unusable file causes a warning, once for a directory that the user has named.
    """
    content = kept_files.read(_path(directory, text), _KIND, says)
    if content is None:
        return None
    try:
        head, _, code = content.partition(b"\n")
        saved = json.loads(head)
        return Binary._make([*saved["binary"], code]) if saved["text"] == text else None
    except (ValueError, KeyError, TypeError, RecursionError):  # another program wrote the file
        return None


def keep(directory: Path, text: str, binary: Binary, says: bool = False) -> str | None:
    """Writes a kernel's file; returns None, or the reason if it could not be written."""
    head = json.dumps({"text": text, "binary": binary[:-1]}).encode()
    return kept_files.write(_path(directory, text), _KIND, head + b"\n" + binary.code, says)


def _path(directory: Path, text: str) -> Path:
    return directory / f"{hashlib.sha256(text.encode()).hexdigest()}.kernel"


@functools.cache
def _library_bytes() -> int:
    """Returns the size of Triton's compiler: a local build has the version number of the release that it is based on."""
    from triton._C import libtriton

    return Path(libtriton.__file__).stat().st_size


def _text(part: object) -> str:
    """Returns a text of a part that is equal in every process: for a Triton function, the hash of its source."""
    if isinstance(part, JITCallable):
        return source_key(part)
    if isinstance(part, tuple):
        return f"({', '.join(map(_text, part))})"
    return repr(part)
