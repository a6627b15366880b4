"""XLA's C API for handlers, by ctypes: a call's buffers as torch tensors on its stream, and exceptions as XLA's errors.

XLA calls a handler with a frame (https://github.com/openxla/xla/blob/main/xla/ffi/api/c_api.h): operands, results, and a text as
the only attribute. XLA's threads wait for Python's lock; JAX does not hold it while they run.
"""

from __future__ import annotations

import contextlib
import ctypes as c
import math
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import torch
from torch import Tensor

Platform = Literal["cpu", "cuda"]
Run = Callable[[bytes, list[Tensor]], Sequence[Tensor]]


def _struct(**fields: object) -> Any:
    """Returns a C struct. Its fields have the names and order of c_api.h; unused fields are untyped pointers."""
    return type("Struct", (c.Structure,), {"_fields_": [*fields.items()]})


_SIZE: Any = {"struct_size": c.c_size_t}
_HEAD: Any = _SIZE | {"extension": c.c_void_p}
_POINTERS, _CONTEXT = c.POINTER(c.c_void_p), {"context": c.c_void_p}
_Buffers = _struct(**_HEAD, size=c.c_int64, types=c.c_void_p, items=_POINTERS)
_Attributes = _struct(**_HEAD, size=c.c_int64, types=c.c_void_p, names=_POINTERS, items=_POINTERS)
_Frame = _struct(
    **_HEAD,
    **{"api": c.c_void_p, **_CONTEXT, "stage": c.c_int},
    operands=_Buffers,
    results=_Buffers,
    attributes=_Attributes,
    future=c.c_void_p,
)
_Buffer = _struct(**_HEAD, dtype=c.c_int, data=c.c_void_p, rank=c.c_int64, dims=c.POINTER(c.c_int64))
_Text = _struct(data=c.c_void_p, size=c.c_size_t)
_Version = _struct(**_HEAD, major=c.c_int, minor=c.c_int)
_Metadata = _struct(**_SIZE, version=_Version, traits=c.c_uint32, state_type=c.c_int64)
_Extension = _struct(**_SIZE, type=c.c_int, next=c.c_void_p)
_MetadataExtension = _struct(base=_Extension, metadata=c.POINTER(_Metadata))
_FUNCTIONS = (
    *("internal", "error_create", "error_get", "error_destroy", "register", "stream_get", "type_register", "context_get"),
    *("state_set", "state_get", "allocate", "free", "schedule", "num_threads", "future_create", "future_set", "future_fail"),
    *("run_id", "ordinal_get"),
)
_Api = _struct(**_HEAD, version=_Version, **dict.fromkeys(_FUNCTIONS, c.c_void_p))
_Error = _struct(**_HEAD, message=c.c_char_p, code=c.c_int)
_ErrorGet = _struct(**_HEAD, error=c.c_void_p, message=c.c_char_p, code=c.c_int)
_ErrorDestroy = _struct(**_HEAD, error=c.c_void_p)
_Stream = _struct(**_HEAD, **_CONTEXT, value=c.c_void_p)
_Ordinal = _struct(**_HEAD, **_CONTEXT, value=c.c_int32)

_METADATA = 1  # XLA_FFI_Extension_Metadata: XLA queries the API version of a handler
_EXECUTE = 3  # XLA_FFI_ExecutionStage_EXECUTE
_INTERNAL = 13  # XLA_FFI_Error_Code_INTERNAL
_DTYPES = {  # XLA_FFI_DataType
    1: torch.bool,
    2: torch.int8,
    3: torch.int16,
    4: torch.int32,
    5: torch.int64,
    6: torch.uint8,
    8: torch.uint32,
    10: torch.float16,
    11: torch.float32,
    12: torch.float64,
    16: torch.bfloat16,
    19: torch.float8_e5m2,
    20: torch.float8_e4m3fn,
}


def register(name: str, run: Run) -> None:
    """Registers `run` for custom calls of this name, on CPUs and on CUDA devices; see `handler`."""
    platforms: tuple[tuple[str, Platform], ...] = (("cpu", "cpu"), ("CUDA", "cuda"))
    for jax_name, platform in platforms:
        _handlers.append(handler(run, platform))
        jax.ffi.register_ffi_target(name, capsule(_handlers[-1]), platform=jax_name)


_handlers: list[object] = []  # XLA keeps their addresses


def capsule(function: Any) -> object:
    """Returns a handler's capsule for `jax.ffi.register_ffi_target`; the handler must live as long as the process."""
    return jax.ffi.pycapsule(c.cast(function, c.c_void_p).value)


def handler(run: Run, platform: Platform) -> Any:
    """Returns a handler for XLA on a platform, which writes the tensors of `run(text, tensors)` into its results.

    text: the custom call's only attribute. tensors: its operands, in XLA's own memory. On a CUDA device, XLA's stream is torch's
    current stream meanwhile. An exception is printed, and fails the program with its text.
    """

    def handle(pointer: Any) -> object:
        frame = pointer.contents
        try:
            if _answers_metadata(frame) or frame.stage != _EXECUTE:
                return None
            _keep_thread()
            with contextlib.nullcontext(torch.device("cpu")) if platform == "cpu" else _on_cuda(frame) as device:
                outputs = run(_text(frame.attributes), _tensors(frame.operands, device))
                _write(_tensors(frame.results, device), outputs)
            return None
        except BaseException as e:  # ctypes would only print it, and XLA would read results that are not written
            return _failure(frame, e)

    return c.CFUNCTYPE(c.c_void_p, c.POINTER(_Frame))(handle)


def _answers_metadata(frame: Any) -> bool:
    """Answers a metadata query about the handler; returns False if the frame is a call."""
    if not frame.extension:
        return False
    extension = c.cast(frame.extension, c.POINTER(_MetadataExtension)).contents
    if extension.base.type != _METADATA:
        return False
    metadata = extension.metadata.contents
    metadata.version.major, metadata.version.minor = 0, _api(frame).version.minor if frame.api else 1
    metadata.traits = 0  # so the handler is not captured in a CUDA graph
    return True


def _api(frame: Any) -> Any:
    return c.cast(frame.api, c.POINTER(_Api)).contents


class _Thread(threading.local):
    is_kept = False


_thread = _Thread()


def _keep_thread() -> None:
    """Keeps Python's state of XLA's thread until the thread ends.

    Otherwise Python creates one for each call and drops it afterwards, with all thread-locals, such as cuDNN's handles.
    https://docs.python.org/3/c-api/init.html#c.PyGILState_Ensure
    """
    if not _thread.is_kept:
        c.pythonapi.PyGILState_Ensure()  # never released
        _thread.is_kept = True


@contextlib.contextmanager
def _on_cuda(frame: object) -> Iterator[torch.device]:
    """Makes XLA's stream torch's current stream, and yields the device."""
    device = torch.device("cuda", _query(frame, "ordinal_get", _Ordinal))
    stream = torch.cuda.ExternalStream(_query(frame, "stream_get", _Stream) or 0, device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):  # also sets the device
        yield device


def _query(frame: Any, name: str, kind: Any) -> Any:
    """Returns the result of an XLA API function about the frame's context; kind: the function's struct."""
    api = _api(frame)
    if api.struct_size < getattr(_Api, name).offset + c.sizeof(c.c_void_p):
        raise RuntimeError(f"jaxlib {jax.lib.__version__} does not tell handlers their device; pip install 'jax[cuda13]>=0.11.1'")
    request = kind(c.sizeof(kind), None, frame.context)
    error = c.CFUNCTYPE(c.c_void_p, c.POINTER(kind))(getattr(api, name))(c.byref(request))
    if error:
        text = _ErrorGet(c.sizeof(_ErrorGet), None, error)
        c.CFUNCTYPE(None, c.POINTER(_ErrorGet))(api.error_get)(c.byref(text))
        message = c.string_at(text.message).decode(errors="replace") if text.message else "no text"
        destroy = _ErrorDestroy(c.sizeof(_ErrorDestroy), None, error)
        c.CFUNCTYPE(None, c.POINTER(_ErrorDestroy))(api.error_destroy)(c.byref(destroy))
        raise RuntimeError(f"XLA's {name} failed: {message}")
    return request.value


class _Memory:
    """Bytes of a CUDA device, for `torch.as_tensor` without a copy.

    https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html; without a stream there is no synchronisation.
    """

    def __init__(self, address: int, size: int) -> None:
        interface = {"data": (address, False), "shape": (size,), "strides": None, "typestr": "|u1", "version": 3}
        self.__cuda_array_interface__ = interface


def _tensor(address: int, device: torch.device) -> Tensor:
    buffer = c.cast(address, c.POINTER(_Buffer)).contents
    shape = [buffer.dims[i] for i in range(buffer.rank)]
    if buffer.dtype not in _DTYPES:
        raise TypeError(f"a buffer's dtype is number {buffer.dtype} of XLA_FFI_DataType; accepted: {sorted(_DTYPES)}")
    dtype = _DTYPES[buffer.dtype]
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return torch.empty(shape, dtype=dtype, device=device)
    if device.type == "cpu":
        raw = torch.frombuffer((c.c_uint8 * size).from_address(buffer.data), dtype=torch.uint8)
    else:
        raw = torch.as_tensor(_Memory(buffer.data, size), device=device)
    return raw.view(dtype).view(shape)


def _tensors(buffers: Any, device: torch.device) -> list[Tensor]:
    return [_tensor(buffers.items[i], device) for i in range(buffers.size)]


def _text(attributes: Any) -> bytes:
    text = c.cast(attributes.items[0], c.POINTER(_Text)).contents
    return c.string_at(text.data, text.size)


def _write(results: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    for i, (result, t) in enumerate(zip(results, outputs, strict=True)):
        if (result.shape, result.dtype) != (t.shape, t.dtype):  # copy_ would broadcast and cast
            raise RuntimeError(f"result {i} is {t.dtype} {tuple(t.shape)} but XLA expects {result.dtype} {tuple(result.shape)}")
        result.copy_(t)


def _failure(frame: object, e: BaseException) -> Any:
    """Returns XLA's error for an exception, and prints the exception with its traceback."""
    with contextlib.suppress(Exception):  # for example without stderr
        traceback.print_exception(e, file=sys.stderr)
    try:
        text = f"{type(e).__name__}: {e}"
    except Exception:  # an exception whose text raises
        text = type(e).__name__
    error = _Error(c.sizeof(_Error), None, text.encode(errors="replace"), _INTERNAL)
    return c.CFUNCTYPE(c.c_void_p, c.POINTER(_Error))(_api(frame).error_create)(c.byref(error))
