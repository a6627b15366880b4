"""The one place that launches, compiles or interprets kernels."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import triton

from flexattn import compat
from flexattn.forks import fork_safe
from flexattn.kernels_triton.runtime import compiler, interpreter, store
from flexattn.kernels_triton.runtime.device import Tile, capability_of, set_here, thread
from flexattn.kernels_triton.runtime.direct import Direct
from flexattn.kernels_triton.runtime.entry import fields_of, flat_function, flattening

MAX_PROGRAMS = 2**31 - 1  # CUDA C++ Programming Guide, "Compute Capabilities": maximum x-dimension of a grid


class Launchable(Protocol):
    """A kernel as `kernel` returns it: Triton's JITFunction, with the class of the kernel's arguments."""

    __name__: str
    fn: Callable[..., None]
    arg_names: list[str]
    params: Sequence[Any]  # Triton's KernelParam
    group: type  # the class of the first argument as written
    wide: frozenset[str]  # arguments that the kernel is specialised for at multiples of 16 bytes
    parts_of: Callable[..., tuple[object, ...]]  # `_compiled_parts`, from the first launch on

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]: ...

    def warmup(self, *arguments: object, grid: tuple[int, ...], **options: object) -> Any: ...


def kernel(function: Callable[..., None]) -> Launchable:
    """`triton.jit` for a function that is launched. It specialises for no integer's value, and for no small tensor's address.

    So a new length, batch size, stride or window never recompiles it. Strides are in units of `Meta.ALIGN` instead. For wide
    tensors the kernel still depends on 16-byte alignment.

    function: `def _name_kernel(args: Arguments, MODS: tl.constexpr, META: tl.constexpr)`. `Arguments` is a NamedTuple whose fields
        may be NamedTuples themselves (`entry`), and `launch` takes an instance of it.
    """
    return _launchable(function, triton.jit)


def asserting_kernel(function: Callable[..., None]) -> Launchable:
    """`kernel` with its tl.device_assert compiled in; a failed assertion ends the context with a device-side assertion."""
    return _launchable(function, functools.partial(triton.jit, debug=True))


def hopper_kernel(function: Callable[..., None]) -> Launchable:
    """`kernel` in Gluon: it accesses tiles by descriptors, and is specialised for no address but a bias's."""
    from triton.experimental import gluon  # imported here, so that calls on other GPUs do not wait for it

    return _launchable(function, gluon.jit)


def _launchable(function: Callable[..., None], jit: Callable[..., Launchable]) -> Launchable:
    flat, group = flat_function(function, jit)
    fields = fields_of(group)
    run_time = [field.name for field in fields if not field.is_wide]
    launchable = jit(flat, do_not_specialize=run_time, do_not_specialize_on_alignment=run_time)
    launchable.group = group
    launchable.wide = frozenset(field.name for field in fields if field.is_wide)
    return launchable


class Launch(NamedTuple):
    """The parameters of one launch: enough for `make` to run it and for `compile_report.request_for` to compile its kernel."""

    kernel: Launchable
    tile: Tile
    arguments: tuple[object, ...]
    programs: int


Watcher = Callable[[Direct | None, int, tuple[Any, ...]], None]


def redirected_launches(take: Callable[[Launch], None]) -> contextlib.AbstractContextManager[None]:
    """Inside, this thread launches nothing: it passes its launches to `take`. Outputs are not written."""
    return set_here("recording", take)


@contextlib.contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Inside, this thread launches nothing: it appends its launches to the list. Outputs are not written."""
    launches: list[Launch] = []
    with redirected_launches(launches.append):
        yield launches


@contextlib.contextmanager
def watched_launches(watcher: Watcher) -> Iterator[None]:
    """Inside, this thread reports each launch to `watcher` after running it: its kernel, programs and arguments.

    The kernel is None if only Triton can launch it.
    """
    before, thread.watcher = thread.watcher, watcher
    try:
        yield
    finally:
        thread.watcher = before


_runtime = triton.knobs.runtime


def is_plain() -> bool:
    """Returns whether this thread's launches may bypass Triton: there is no recording and no profiler hook."""
    if thread.recording is not None:
        return False
    enter, leave = _runtime.launch_enter_hook, _runtime.launch_exit_hook
    if (enter is not None and getattr(enter, "calls", True)) or (leave is not None and getattr(leave, "calls", True)):
        return False
    return not _runtime.debug and _runtime.add_stages_inspection_hook is None


def current_stream(device: torch.device) -> int:
    return compat.current_raw_stream(device.index)


def stream_of(device: torch.device) -> Callable[[], int]:
    """Returns a function that returns the device's current stream."""
    return functools.partial(compat.current_raw_stream, device.index)


def is_current(device: torch.device) -> bool:
    return compat.current_device() == device.index


_MOST_KERNELS = 1024
_kernels: OrderedDict[object, Direct | None] = OrderedDict()  # by everything that Triton specialises a kernel for
_options: OrderedDict[object, dict[str, object]] = OrderedDict()  # by the same key, for kernels that Triton launches
_counts = {"hits": 0, "misses": 0}
_lock = fork_safe(threading.Lock())


def kernel_cache_info() -> dict[str, int]:
    """Returns hits and misses of launches since the start or `clear_kernels`, and the number of cached kernels (at most 1024)."""
    with _lock:
        return {**_counts, "size": len(_kernels)}


def clear_kernels() -> None:
    """Clears the cache of kernels, but not Triton's own caches."""
    with _lock:
        _kernels.clear()
        _options.clear()
        _counts.update(hits=0, misses=0)


def flat_arguments(kernel: Launchable, arguments: tuple[object, ...]) -> tuple[object, ...]:
    """Returns the arguments of the flat function that is launched, from the arguments of the kernel as written."""
    return flattening(kernel.group)(arguments[0]) + arguments[1:]


def launch(kernel: Launchable, programs: int, device: torch.device, tile: Tile, arguments: tuple[object, ...]) -> None:
    """Runs `programs` programs of `kernel` on `device`; none for 0.

    arguments: of the kernel as written; the first is a NamedTuple.

    Triton compiles and launches a kernel the first time. Later launches call the driver directly.

    Raises ValueError for more programs than CUDA allows.
    """
    if programs > MAX_PROGRAMS:
        raise ValueError(
            f"the call needs {programs} programs of {kernel.__name__}, and a launch has at most {MAX_PROGRAMS}; pass max_seqlen_q "
            "and max_seqlen_kv (without them every sequence counts as long as all together), or split the batch"
        )
    if programs:
        make(Launch(kernel, tile, flat_arguments(kernel, arguments), programs), device)


def make(launch: Launch, device: torch.device) -> None:
    """Runs a launch, for example a recorded one: its arguments are flat."""
    kernel, tile, arguments, programs = launch
    recording = thread.recording
    if recording is not None:
        recording(launch)
        return
    if interpreter.INTERPRETED:
        with interpreter.right_arithmetic():
            kernel[(programs,)](*arguments)
        return
    if is_current(device):
        _launch(kernel, programs, device, tile, arguments)
    else:
        with torch.cuda.device(device):
            _launch(kernel, programs, device, tile, arguments)


def _options_of(tile: Tile, ptx_options: str | None = None) -> dict[str, object]:
    return compiler.options_of(tile.num_warps, tile.num_stages, ptx_options, tile.registers)


_directory: Path | None = None


def keep_in(directory: str | None) -> None:
    """Sets the directory of compiled kernels from now on; None: a folder in Triton's own cache."""
    global _directory
    _directory = Path(directory) if directory is not None else None


def _launch(kernel: Launchable, programs: int, device: torch.device, tile: Tile, arguments: tuple[object, ...]) -> None:
    parts = _parts_of(kernel)(*arguments)
    # The key has the function, because hashing Triton's object hashes the sources of all that it calls.
    key = (kernel.fn, device, tile.num_warps, tile.num_stages, tile.registers, *parts)
    is_quick = is_plain()
    direct = _kernels.get(key) if is_quick else None
    if direct is None and is_quick and key not in _kernels:
        direct = _find_or_compile(kernel, parts, capability_of(device), tile, arguments)
        with _lock:
            _counts["misses"] += 1
            _kernels[key] = direct
            while len(_kernels) > _MOST_KERNELS:
                _kernels.popitem(last=False)
    elif direct is not None:
        _counts["hits"] += 1
    if direct is not None:
        direct.launch(programs, current_stream(device), arguments)
    else:
        options = _sound_options(kernel, key, tile, arguments)
        with compiler.compiling():
            kernel[(programs,)](*arguments, **options)
    watcher = thread.watcher
    if watcher is not None:
        watcher(direct, programs, arguments)


def _find_or_compile(
    kernel: Launchable, parts: tuple[Any, ...], architecture: int, tile: Tile, arguments: tuple[object, ...]
) -> Direct | None:
    """Loads a kernel from disk, or compiles and stores it; None if only Triton can launch it."""
    text, directory = "", _directory or store.default_directory()
    if store.is_used():
        text = store.description(kernel, parts, _options_of(tile), architecture)
        found = store.find(directory, text, says=_directory is not None)
        if found is not None:
            return Direct.of(found, kernel.arg_names)
    _, binary = _compile(kernel, tile, arguments)
    if binary is not None and text:
        store.keep(directory, text, binary, says=_directory is not None)
    return Direct.of(binary, kernel.arg_names)


def _compile(kernel: Launchable, tile: Tile, arguments: tuple[object, ...]) -> tuple[Any, store.Binary | None]:
    """Returns a kernel like `store.sound`."""

    def compile_with(num_stages: int, ptx_options: str | None) -> object:
        with compiler.compiling():
            options = _options_of(tile._replace(num_stages=num_stages), ptx_options)
            return kernel.warmup(*arguments, grid=(1,), **options)

    return store.sound(compile_with, tile.num_stages)


def _sound_options(kernel: Launchable, key: tuple[object, ...], tile: Tile, arguments: tuple[object, ...]) -> dict[str, object]:
    """Returns the options with which `_compile` compiles the kernel of a key."""
    found = _options.get(key)
    if found is None:
        metadata = _compile(kernel, tile, arguments)[0].metadata
        found = _options_of(tile._replace(num_stages=metadata.num_stages), metadata.ptx_options)
        with _lock:
            _options[key] = found
            while len(_options) > _MOST_KERNELS:
                _options.popitem(last=False)
    return found


def description_of(launch: Launch, architecture: int) -> str:
    """Returns the `store.description` of a recorded launch's kernel, for tensors at multiples of 16 bytes."""
    kernel, tile = launch.kernel, launch.tile
    parts = _parts_of(kernel)(*launch.arguments)
    return store.description(kernel, parts, _options_of(tile), architecture)


def _parts_of(kernel: Launchable) -> Callable[..., tuple[object, ...]]:
    found = getattr(kernel, "parts_of", None)
    if found is None:
        found = kernel.parts_of = _compiled_parts(kernel.params)
    return found


def _compiled_parts(params: Sequence[Any]) -> Callable[..., tuple[object, ...]]:
    """Returns a function from a kernel's flat arguments to the properties that Triton specialises it for, see `_compiled_for`.

    The function is generated, because every launch that is not replayed calls it: the usual case of a parameter costs no call.
    """
    parts = []
    for p in params:
        by_value, by_address = p.is_constexpr or not p.do_not_specialize, not p.do_not_specialize_on_alignment
        x, other = p.name, f"_compiled_for({p.name}, {(by_value, by_address)})"
        if p.is_constexpr:
            parts.append(f"None if {x} is None else (type({x}), {x})")
        elif by_value:
            parts.append(other)
        elif by_address:
            parts.append(f"({x}.dtype, {x}.data_ptr() % 16 == 0) if type({x}) is Tensor else {other}")
        elif x.endswith("ptr"):
            parts.append(f"{x}.dtype if type({x}) is Tensor else None if {x} is None else {other}")
        else:
            is_small = f"type({x}) is int and {-(2**31)} <= {x} < {2**31}"
            parts.append(f"'i32' if {is_small} else float if type({x}) is float else None if {x} is None else {other}")
    source = f"lambda {', '.join(p.name for p in params)}: ({', '.join(parts)},)"
    found: Callable[..., tuple[Any, ...]] = eval(source, {"Tensor": torch.Tensor, "_compiled_for": _compiled_for})
    return found


def _compiled_for(argument: Any, compared: tuple[bool, bool]) -> object:
    """Returns the properties of an argument that Triton specialises a kernel for. Arguments that differ in them share no kernel.

    compared: whether the kernel is specialised for the argument's value, and for whether its address is a multiple of 16 bytes.
    """
    kind = type(argument)
    if argument is None:
        return None
    by_value, by_address = compared
    if isinstance(argument, torch.Tensor):
        return (argument.dtype, argument.data_ptr() % 16 == 0) if by_address else argument.dtype
    if kind is float and not by_value:
        return float
    if kind is int and not by_value:
        return "i32" if -(2**31) <= argument < 2**31 else "i64" if argument < 2**63 else "u64"
    if hasattr(argument, "block_shape"):  # a descriptor
        return (argument.base.dtype, *argument.block_shape, argument.layout, argument.padding)
    if isinstance(argument, tuple) and not by_value:
        return tuple(map(_compiled_for_in_tuple, argument))
    return kind, argument  # 1, 1.0 and True are equal


def _compiled_for_in_tuple(part: object) -> object:
    """`_compiled_for` a part of a tuple: there Triton specialises for an integer if it is 1 or a multiple of 16."""
    if isinstance(part, tuple):
        return tuple(map(_compiled_for_in_tuple, part))
    kind = _compiled_for(part, (False, True))
    return (kind, part == 1, part % 16 == 0) if type(part) is int else kind
