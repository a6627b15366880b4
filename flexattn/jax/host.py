"""The call on the host: an XLA handler, by ctypes, that makes torch tensors of XLA's buffers and runs a backend on them.

XLA calls it with a frame of its C API (xla/ffi/api/c_api.h): operands, results, and one attribute, the call as text. Everything
that it needs is in those, so compiled programs may be kept and loaded in other processes.
"""

from __future__ import annotations

import ctypes as c
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch
from torch import Tensor

from flexattn import autograd, fp8_ops, ops
from flexattn.dispatch.spec import Operands
from flexattn.jax.call import Call, parse

FORWARD, BACKWARD = "flexattn_forward", "flexattn_backward"

# Names and order are those of the C structs; what is not read here is a pointer without a type.
_HEAD: Any = (("struct_size", c.c_size_t), ("extension", c.c_void_p))


class _Buffers(c.Structure):
    _fields_ = (*_HEAD, ("size", c.c_int64), ("types", c.c_void_p), ("items", c.POINTER(c.c_void_p)))


class _Attributes(c.Structure):
    _fields_ = (
        *_HEAD,
        ("size", c.c_int64),
        ("types", c.c_void_p),
        ("names", c.POINTER(c.c_void_p)),
        ("items", c.POINTER(c.c_void_p)),
    )


class _Frame(c.Structure):
    _fields_ = (
        *_HEAD,
        ("api", c.c_void_p),
        ("context", c.c_void_p),
        ("stage", c.c_int),
        ("operands", _Buffers),
        ("results", _Buffers),
        ("attributes", _Attributes),
        ("future", c.c_void_p),
    )


class _Buffer(c.Structure):
    _fields_ = (*_HEAD, ("dtype", c.c_int), ("data", c.c_void_p), ("rank", c.c_int64), ("dims", c.POINTER(c.c_int64)))


class _Text(c.Structure):
    _fields_ = (("data", c.c_void_p), ("size", c.c_size_t))


class _Version(c.Structure):
    _fields_ = (*_HEAD, ("major", c.c_int), ("minor", c.c_int))


class _Metadata(c.Structure):
    _fields_ = (("struct_size", c.c_size_t), ("version", _Version), ("traits", c.c_uint32), ("state_type", c.c_int64))


class _Extension(c.Structure):
    _fields_ = (("struct_size", c.c_size_t), ("type", c.c_int), ("next", c.c_void_p))


class _MetadataExtension(c.Structure):
    _fields_ = (("base", _Extension), ("metadata", c.POINTER(_Metadata)))


class _Api(c.Structure):
    _fields_ = (*_HEAD, ("version", _Version), ("internal", c.c_void_p), ("error_create", c.c_void_p))


class _Error(c.Structure):
    _fields_ = (*_HEAD, ("message", c.c_char_p), ("code", c.c_int))


_METADATA = 1  # XLA_FFI_Extension_Metadata: XLA asks which version of the API a handler is for
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


def _tensor(address: int) -> Tensor:
    buffer = c.cast(address, c.POINTER(_Buffer)).contents
    shape = [buffer.dims[i] for i in range(buffer.rank)]
    dtype = _DTYPES[buffer.dtype]
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer((c.c_uint8 * size).from_address(buffer.data), dtype=torch.uint8).view(dtype).view(shape)


def _tensors(buffers: Any) -> list[Tensor]:
    return [_tensor(buffers.items[i]) for i in range(buffers.size)]


def _text(attributes: Any) -> bytes:
    text = c.cast(attributes.items[0], c.POINTER(_Text)).contents
    return c.string_at(text.data, text.size)


def run_forward(call: Call, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Returns out, lse and max_logit of a call on tensors with memory."""
    x = call.quantized(_operands(call, operands))
    with torch.no_grad():
        return ops.run_forward(ops.spec_to_run(x, call.settings), call.settings.backend, x)


def run_backward(call: Call, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns the gradients that `Call.gradients` gives room for; tensors: operands, out, lse, dout, and dlse if it counts."""
    count = call.num_operands
    x = _operands(call, tensors[:count])
    out, lse, dout = tensors[count : count + 3]
    incoming = ops.Incoming(out, lse, dout, tensors[count + 3] if len(tensors) > count + 3 else None)
    with torch.no_grad():
        found = autograd.gradients(call.quantized_for_backward(x), call.settings, call.config, fp8_ops.Delayed(), incoming)
    given = (*found[:-1], *(found.dmod_tensors or ()))
    return [t for t in given if t is not None]


def _operands(call: Call, tensors: Sequence[Tensor]) -> Operands:
    x = call.operands(tensors)
    # Two words of seed and two of offset, as JAX has no int64 unless it is told to.
    return x if x.rng_state is None else x._replace(rng_state=x.rng_state.view(torch.int64))


def handler(run: Callable[[bytes, list[Tensor]], Sequence[Tensor]]) -> Any:
    """Returns a handler that XLA can call on a CPU, which writes what `run(text, tensors)` gives into its results.

    text: the custom call's only attribute. tensors: its operands, in XLA's own memory.
    """

    def handle(pointer: Any) -> Any:
        frame = pointer.contents
        api = c.cast(frame.api, c.POINTER(_Api)).contents if frame.api else None
        try:
            if frame.extension:
                extension = c.cast(frame.extension, c.POINTER(_MetadataExtension)).contents
                if extension.base.type == _METADATA:
                    metadata = extension.metadata.contents
                    metadata.version.major, metadata.version.minor = 0, 1 if api is None else api.version.minor
                    metadata.traits = 0
                    return None
            if frame.stage == _EXECUTE:
                found = run(_text(frame.attributes), _tensors(frame.operands))
                for to, t in zip(_tensors(frame.results), found, strict=True):
                    to.copy_(t)
            return None
        except Exception as e:  # XLA's own would be a crash
            error = _Error(c.sizeof(_Error), None, f"{type(e).__name__}: {e}".encode(), _INTERNAL)
            return c.CFUNCTYPE(c.c_void_p, c.POINTER(_Error))(api.error_create)(c.byref(error))  # type: ignore[union-attr]

    return c.CFUNCTYPE(c.c_void_p, c.POINTER(_Frame))(handle)


_handlers = {  # XLA keeps their addresses
    FORWARD: handler(lambda text, tensors: run_forward(parse(text.decode()), tensors)),
    BACKWARD: handler(lambda text, tensors: run_backward(parse(text.decode()), tensors)),
}
for _name, _function in _handlers.items():
    jax.ffi.register_ffi_target(_name, jax.ffi.pycapsule(c.cast(_function, c.c_void_p).value), platform="cpu")
