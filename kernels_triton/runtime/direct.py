"""Launches of compiled kernels by the driver's own call: arguments are packed into one buffer, without any code of Triton.

Triton's launchers inspect each argument's type in each launch. Here that happens once for a compiled kernel. A launch is then
`struct.pack_into` and `cuLaunchKernelEx`, and is the same for every version of Triton. The library's kernels need nothing beyond
that, such as scratch memory or clusters; for such a kernel `Direct.of` returns None. A kernel that waits for the kernel before it
(`launch_order`) has the launch attribute that lets it begin early.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import triton
from triton.backends.nvidia import driver as triton_driver

from flexattn import compat
from flexattn.forks import fork_safe
from flexattn.kernels_triton.runtime import call_numbers
from flexattn.kernels_triton.runtime.call_numbers import Path
from flexattn.kernels_triton.runtime.store import Binary

# C types, by the type names of cuda.h and of Triton's signatures
_CODES = {"i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H", "u32": "I", "u64": "Q"}
_CODES |= {"fp32": "f", "f32": "f", "fp64": "d"}
_CONFIG = "7I4xQQI12x"  # CUlaunchConfig: grid, block, shared memory, stream, attributes, their number; then padding to _PARAMETERS
_STREAM = 32  # offset of the stream in the configuration
_PARAMETERS = 64  # offset of the arguments: the tensor maps are first, aligned to 64 bytes
_MAP_BYTES = 128
_MOST_DESCRIPTORS = 256  # maximum descriptors of a kernel whose tensor maps are cached
# maximum cached tensor maps of one descriptor, by address: tensors of a deep model's layers have hundreds of addresses
_MOST_MAPS = 1024


class _BeginsEarly(ctypes.Structure):
    """CUlaunchAttribute with CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION set."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))


_BEGINS_EARLY = _BeginsEarly(id=6, value=1)


class LaunchError(RuntimeError):
    """The driver refused a launch."""


@functools.cache
def _library() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _check(status: int, action: str) -> None:
    if status:
        text = ctypes.c_char_p()
        _library().cuGetErrorString(status, ctypes.byref(text))
        raise LaunchError(f"CUDA error {status} in {action}: {(text.value or b'unknown').decode()}")


_MAX_SHARED, _MOST_STATIC = 8, 48 * 1024  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES; the size that needs no attribute


def _load(binary: Binary) -> int:
    """Returns the kernel's handle in the current context, valid for the lifetime of the process."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    driver = _library()
    _make_current()
    _check(driver.cuModuleLoadData(ctypes.byref(module), binary.code), f"loading {binary.name}")
    _check(driver.cuModuleGetFunction(ctypes.byref(function), module, binary.name.encode()), f"loading {binary.name}")
    if binary.shared > _MOST_STATIC:
        status = driver.cuFuncSetAttribute(function, _MAX_SHARED, binary.shared)
        _check(status, f"giving {binary.name} {binary.shared} bytes of shared memory")
    assert function.value is not None
    return function.value


def _launched_shared(binary: Binary, function: int) -> int:
    """Returns the bytes of shared memory of a launch; `other_target` adds some."""
    return binary.shared


_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT


def _make_current() -> None:
    """Gives this thread the context of torch's current device: an autograd thread may have none yet."""
    driver, context = _library(), ctypes.c_void_p()
    _check(driver.cuCtxGetCurrent(ctypes.byref(context)), "cuCtxGetCurrent")
    if not context.value:
        _check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), current_device()), "cuDevicePrimaryCtxRetain")
        _check(driver.cuCtxSetCurrent(context), "cuCtxSetCurrent")


def current_device() -> int:
    return compat.current_device()


def set_to_zero(stream: int, address: int, size: int) -> None:
    """Sets `size` bytes to 0, in stream order."""
    if _zeroed(stream, address, size) == _NO_CONTEXT:
        _make_current()
        _check(_zeroed(stream, address, size), "cuMemsetD8Async")


def _zeroed(stream: int, address: int, size: int) -> int:
    status: int = _library().cuMemsetD8Async(ctypes.c_void_p(address), 0, ctypes.c_size_t(size), ctypes.c_void_p(stream))
    if status != _NO_CONTEXT:
        _check(status, "cuMemsetD8Async")
    return status


class _Base:
    """Stands for a tensor with a known address."""

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


class _Maps:
    """The tensor maps of one descriptor, encoded once for each address, because its other properties do not change.

    Triton encodes them, because it corrects maps that some drivers encode wrongly. The map is the last part of its object.
    """

    def __init__(self, descriptor: Any, meta: Any) -> None:
        self.descriptor = copy.copy(descriptor)
        self.descriptor.base = None  # keeps no memory alive
        self.meta = meta
        self.known: dict[int, bytes] = {}

    def at(self, address: int) -> bytes:
        found = self.known.get(address)
        return self._encode(address) if found is None else found

    def _encode(self, address: int) -> bytes:
        descriptor = copy.copy(self.descriptor)
        descriptor.base = _Base(address)
        _make_current()  # CUDA encodes a map in the thread's context, and a thread whose first call is a replay has none
        encoded = triton_driver.make_tensordesc_arg(descriptor, self.meta)[0]
        start = id(encoded) + type(encoded).__basicsize__ - _MAP_BYTES
        if len(self.known) >= _MOST_MAPS:
            self.known.clear()
        found = self.known[address] = ctypes.string_at(start, _MAP_BYTES)
        return found


def _has_maps() -> bool:
    """Returns whether Triton's tensor maps are objects of a head and the map, aligned to 64 or 128 bytes.

    Their class exists once Triton's driver does. If all kernels so far came from files, nothing has created the driver yet.
    """
    triton.runtime.driver.active.utils  # noqa: B018 (the first read creates it)
    kind = getattr(triton_driver, "PyCUtensorMap", None)
    return kind is not None and kind.__basicsize__ in (64 + _MAP_BYTES, 128 + _MAP_BYTES)


class _Buffer:
    """Memory for one launch's configuration and arguments, and the call that reads it; locked, because threads may share it."""

    def __init__(self, layout: Direct) -> None:
        self.memory = bytearray(layout.size + _PARAMETERS)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.offset = -start % _PARAMETERS
        base = start + self.offset
        self.parameters = (ctypes.c_void_p * len(layout.offsets))(*(base + offset for offset in layout.offsets))
        # Converted once here, not in each call.
        pointers = (base, layout.function, ctypes.addressof(self.parameters))
        self.call = (*map(ctypes.c_void_p.from_param, pointers), None)
        self.lock = fork_safe(threading.Lock())


class Direct:
    """A compiled kernel on one device.

    Its arguments are in the buffer in this order: tensor maps, pointers, then all other values, the widest first.
    """

    def __init__(self, binary: Binary, names: Sequence[str]) -> None:
        """names: the names of the kernel's flat arguments."""
        self.name, self.signature, self.metas = binary.name, binary.signature, binary.maps
        self.block, self.function = 32 * binary.num_warps, _load(binary)
        self.shared = _launched_shared(binary, self.function)
        self.attributes = (ctypes.addressof(_BEGINS_EARLY), 1) if binary.waits else (0, 0)
        self.maps: list[Path] = []
        self.pointers: list[Path] = []
        others: list[tuple[Path, str, str]] = []  # (path, code, part of a descriptor or "")
        order: list[tuple[str, int]] = []  # for each parameter of the kernel, its list and its index there
        for path, kind in leaves(binary.signature, ()):
            if kind.startswith("tensordesc"):
                rank = len(self.metas[len(self.maps)]["block_size"])
                order.append(("maps", len(self.maps)))
                for part in range(2 * rank):
                    order.append(("others", len(others)))
                    part_text = f".shape[{part}]" if part < rank else f".strides[{part - rank}]"
                    others.append((path, "i" if part < rank else "q", part_text))
                self.maps.append(path)
            elif kind.startswith("*"):
                order.append(("pointers", len(self.pointers)))
                self.pointers.append(path)
            else:
                order.append(("others", len(others)))
                others.append((path, _CODES[kind], ""))
        widest_first = sorted(range(len(others)), key=lambda i: -struct.calcsize("=" + others[i][1]))
        self.numbers_of = _reader(_place(others[i][0]) + others[i][2] for i in widest_first)
        # tensors whose addresses a launch needs: of the descriptors, then of the pointers
        self.tensors_of = _reader([*(f"{_place(path)}.base" for path in self.maps), *map(_place, self.pointers)])
        codes = "".join(others[i][1] for i in widest_first)
        maps_end = _PARAMETERS + _MAP_BYTES * len(self.maps)
        pointers_end = maps_end + 8 * len(self.pointers)
        offset_of_other, at = {}, pointers_end
        for i in widest_first:
            offset_of_other[i] = at
            at += struct.calcsize("=" + others[i][1])
        floats = sorted((others[i][0], offset_of_other[i], others[i][1]) for i in widest_first if others[i][1] in "fd")
        paths = call_numbers.places(names, (path for path, *_ in floats))
        slots = {path: (start, code) for path, start, code in floats}
        self.numbers = [(place, *slots[path]) for place, path in paths]  # the call's: (index, start in the buffer, code)
        scratch = at + -at % 8  # two null pointers for scratch memory, which does not exist
        self.size = scratch + 16
        starts: dict[str, Callable[[int], int]] = {
            "maps": lambda i: _PARAMETERS + _MAP_BYTES * i,
            "pointers": lambda i: maps_end + 8 * i,
            "others": lambda i: offset_of_other[i],
        }
        widths: dict[str, Callable[[int], int]] = {
            "maps": lambda i: _MAP_BYTES,
            "pointers": lambda i: 8,
            "others": lambda i: struct.calcsize("=" + others[i][1]),
        }
        self.offsets = [starts[group](i) for group, i in order] + [scratch, scratch + 8]
        self.sizes = [widths[group](i) for group, i in order] + [8, 8]
        addresses = f"{_MAP_BYTES}s" * len(self.maps) + f"{len(self.pointers)}Q"
        self.layout_struct = struct.Struct(f"={_CONFIG}{addresses}{codes}")
        self.addresses = struct.Struct(f"=QQI12x{addresses}")  # from the stream on
        self.encoders: dict[Any, _Maps] = {}
        self.buffer = _Buffer(self)

    @classmethod
    def of(cls, binary: Binary | None, names: Sequence[str]) -> Direct | None:
        """Loads a kernel; None if it has arguments that this class does not support."""
        if binary is None:
            return None
        kinds = [kind for _, kind in leaves(binary.signature, ())]
        if any(kind not in _CODES and kind[0] != "*" and not kind.startswith("tensordesc") for kind in kinds):
            return None
        descriptors = sum(kind.startswith("tensordesc") for kind in kinds)
        if descriptors and (len(binary.maps) != descriptors or None in binary.maps or not _has_maps()):
            return None
        return cls(binary, names)

    def launch(self, programs: int, stream: int, arguments: Sequence[object]) -> None:
        count = len(self.maps)
        addresses = [t.data_ptr() for t in self.tensors_of(arguments)]
        encoded = [m.at(address) for m, address in zip(self._maps(arguments), addresses[:count], strict=True)]
        self._pack(self.buffer, programs, stream, (*encoded, *addresses[count:]), arguments, launches=True)

    def prepare(self, programs: int, arguments: Sequence[Any]) -> Prepared:
        """Returns the launch with everything but its addresses in place; `tensors_of` gives the tensors that have them."""
        return Prepared(self, programs, arguments)

    def _maps(self, arguments: Sequence[object]) -> list[_Maps]:
        found = []
        for position, path in enumerate(self.maps):
            descriptor = value_at(arguments, path)
            key = (position, *descriptor.shape, *descriptor.strides)
            maps = self.encoders.get(key)
            if maps is None:
                if len(self.encoders) >= _MOST_DESCRIPTORS:
                    self.encoders.clear()
                maps = self.encoders[key] = _Maps(descriptor, self.metas[position])
            found.append(maps)
        return found

    def _pack(
        self, buffer: _Buffer, programs: int, stream: int, addresses: Sequence[object], arguments: Sequence[object], launches: bool
    ) -> None:
        """Fills a buffer, and launches it if `launches`. addresses: the encoded tensor maps, and then the pointers."""
        config = (programs, 1, 1, self.block, 1, 1, self.shared, stream, *self.attributes)
        others = self.numbers_of(arguments)
        with buffer.lock:
            try:
                self.layout_struct.pack_into(buffer.memory, buffer.offset, *config, *addresses, *others)
            except OverflowError:  # a Python float above the largest number of the kernel's type
                others = tuple(ctypes.c_float(x).value if isinstance(x, float) else x for x in others)
                self.layout_struct.pack_into(buffer.memory, buffer.offset, *config, *addresses, *others)
            status = _library().cuLaunchKernelEx(*buffer.call) if launches else 0
            if status == _NO_CONTEXT:
                _make_current()
                status = _library().cuLaunchKernelEx(*buffer.call)
        _check(status, f"the launch of {self.name}")


class Prepared:
    """A launch whose buffer has everything but the stream and the addresses: `launch(stream, addresses)`."""

    def __init__(self, direct: Direct, programs: int, arguments: Sequence[Any]) -> None:
        self.direct = direct
        self.buffer = _Buffer(direct)
        self.maps = direct._maps(arguments)
        count = len(direct.maps)
        addresses = [t.data_ptr() for t in direct.tensors_of(arguments)]
        encoded = [m.at(address) for m, address in zip(self.maps, addresses[:count], strict=True)]
        direct._pack(self.buffer, programs, 0, (*encoded, *addresses[count:]), arguments, launches=False)
        self.launch = self._launch_with_maps() if self.maps else self._launcher()

    def has_numbers(self, numbers: Sequence[float]) -> bool:
        """Returns whether the arguments that are named as numbers of a call have the values of these."""
        memory, at = self.buffer.memory, self.buffer.offset
        found = ((place, struct.unpack_from(f"={code}", memory, at + start)[0], code) for place, start, code in self.direct.numbers)
        return all(place < len(numbers) and value == _rounded(numbers[place], code) for place, value, code in found)

    def with_numbers(self, numbers: Sequence[float]) -> Prepared:
        """Returns the launch of a call with other numbers, in memory of its own."""
        copied = copy.copy(self)
        copied.buffer = buffer = _Buffer(self.direct)
        before, size = self.buffer.offset, self.direct.size
        buffer.memory[buffer.offset : buffer.offset + size] = self.buffer.memory[before : before + size]
        for place, start, code in self.direct.numbers:
            struct.pack_into(f"={code}", buffer.memory, buffer.offset + start, _rounded(numbers[place], code))
        copied.launch = copied._launch_with_maps() if copied.maps else copied._launcher()
        return copied

    def _launch_with_maps(self) -> Callable[[int, Sequence[int]], None]:
        maps, plain, count = self.maps, self._launcher(), len(self.maps)

        def launch(stream: int, addresses: Sequence[int]) -> None:
            encoded = [m.known.get(address) or m.at(address) for m, address in zip(maps, addresses, strict=False)]
            plain(stream, (*encoded, *addresses[count:]))

        return launch

    def _launcher(self) -> Callable[[int, Sequence[Any]], None]:
        """Returns a closure, because its names are faster to read than attributes: it is every call's last step."""
        lock, call, memory, at = self.buffer.lock, self.buffer.call, self.buffer.memory, self.buffer.offset + _STREAM
        pack, driver, name = self.direct.addresses.pack_into, _library().cuLaunchKernelEx, self.direct.name
        attributes, count = self.direct.attributes

        def launch(stream: int, addresses: Sequence[object]) -> None:
            with lock:
                pack(memory, at, stream, attributes, count, *addresses)
                status = driver(*call)
                if status == _NO_CONTEXT:
                    _make_current()
                    status = driver(*call)
            if status:
                _check(status, f"the launch of {name}")

        return launch


def _rounded(number: float, code: str) -> float:
    """Returns a number as the kernel gets it: in float32 for the code "f", infinite past the largest."""
    return ctypes.c_float(number).value if code == "f" else number


class _Kind(NamedTuple):
    path: Path
    kind: str


def leaves(signature: Sequence[Any], path: Path) -> Iterator[_Kind]:
    """Yields the parts of a signature that are passed to the kernel: the path of each among the arguments, and its type."""
    for i, kind in enumerate(signature):
        if isinstance(kind, (tuple, list)):
            yield from leaves(kind, (*path, i))
        elif kind != "constexpr":
            yield _Kind((*path, i), kind)


def value_at(arguments: Sequence[Any], path: Path) -> Any:
    found = arguments[path[0]]
    for i in path[1:]:
        found = found[i]
    return found


def _place(path: Path) -> str:
    """Returns the expression for the value at a path in `arguments`."""
    return "".join(["arguments", *(f"[{i}]" for i in path)])


def _reader(expressions: Iterable[str]) -> Callable[[Sequence[object]], tuple[Any, ...]]:
    """Returns a function from a kernel's arguments to the values of these expressions; compiled, because each launch calls it."""
    found: Callable[[Sequence[Any]], tuple[Any, ...]] = eval(f"lambda arguments: ({''.join(f'{x}, ' for x in expressions)})")
    return found
