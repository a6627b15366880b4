"""A launch as jaxlib's custom call for Triton kernels.

jaxlib passes the call's operands, then its results, to the kernel's pointer parameters in their order
(https://github.com/jax-ml/jax/blob/main/jaxlib/gpu/triton_kernels.cc). So each array that a kernel may write is an operand that is
aliased to a result. Since jaxlib 0.11.1 it also creates tensor maps, which the kernels for sm_90 need.
"""

from __future__ import annotations

import re
import threading
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from flexattn.dispatch.plan import Kernel, PlanError
from flexattn.dispatch.recorder import tensors_of
from flexattn.forks import fork_safe

TARGET = "triton_kernel_call_ffi"


class CustomCall(NamedTuple):
    """A launch's description, and the buffers of its kernel.

    A kernel may receive a written array by two parameters. XLA would copy an operand that a call both aliases and reads again, so
    the second parameter comes last: jaxlib passes the results there, and the aliased result is the same memory.
    """

    text: bytes
    operands: tuple[int, ...]
    aliased: tuple[int, ...] = ()  # passed as results, before all other results
    zeroed: frozenset[int] = frozenset()  # set to zero by jaxlib, before the launch


class _Argument(NamedTuple):
    parameters: list[Any]  # jaxlib's parameters
    numbers: range  # their indices among the kernel's parameters
    buffer: int | None  # the buffer that the first parameter points to
    is_pointer: bool


def custom_call(step: Kernel, written: frozenset[int], architecture: int, zeros: Mapping[int, int]) -> CustomCall:
    """Returns a launch's custom call.

    Args:
        step: the launch.
        written: the buffers that the plan may write.
        architecture: 90 for sm_90.
        zeros: the size in bytes of each buffer that must be zero before the launch. `CustomCall.zeroed` lists the buffers that
            jaxlib sets to zero: those that the kernel receives by pointer, and not only by tensor map.

    Raises PlanError if jaxlib does not support the launch.
    """
    launch, lib = step.launch, _jaxlib()
    compiled, binary = _compiled(launch, architecture)
    if binary is None:
        raise PlanError(f"{launch.kernel.__name__} needs scratch memory, a cluster or attributes of a launch")
    operands: list[_Argument] = []
    aliased: list[_Argument] = []
    for argument in _arguments(step, compiled, binary, zeros):
        is_second = argument.buffer in written and any(argument.buffer == other.buffer for other in operands)
        (aliased if is_second else operands).append(argument)
    if len({argument.buffer for argument in aliased}) < len(aliased):
        raise PlanError(
            f"{launch.kernel.__name__} receives a written array by three arguments, which XLA's custom call cannot express; such a "
            "call does not run from JAX on a CUDA device"
        )
    ptx = compiled.asm["ptx"]
    if aliased:
        ptx = _with_parameters_in_order(ptx, [n for argument in (*operands, *aliased) for n in argument.numbers])
    kernel = lib.TritonKernel(binary.name, binary.num_warps, 1, binary.shared, ptx, "", architecture)
    parameters = [parameter for argument in (*operands, *aliased) for parameter in argument.parameters]
    call = lib.TritonKernelCall(kernel, launch.programs, 1, 1, parameters)
    operands_buffers, aliased_buffers = (
        tuple(argument.buffer for argument in group if argument.buffer is not None) for group in (operands, aliased)
    )
    pointers = {argument.buffer for argument in (*operands, *aliased) if argument.is_pointer}
    zeroed = frozenset(index for index in zeros if index in pointers)
    return CustomCall(zlib.compress(call.to_proto(f"flexattn {binary.name}", b"")), operands_buffers, aliased_buffers, zeroed)


def _arguments(step: Kernel, compiled: Any, binary: Any, zeros: Mapping[int, int]) -> list[_Argument]:
    """Returns the arguments of a launch that have parameters in its kernel."""
    from flexattn.kernels_triton.runtime.direct import leaves, value_at

    lib, arguments = _jaxlib(), step.launch.arguments
    buffer_of = {id(t): index for t, index in zip(tensors_of(arguments), step.buffers, strict=True)}
    aligned = {path for path, attributes in compiled.src.attrs.items() if ["tt.divisibility", 16] in attributes}
    parsed: list[_Argument] = []
    count, maps = 0, iter(binary.maps)
    for path, kind in leaves(binary.signature, ()):
        value, buffer = value_at(arguments, path), None
        if kind.startswith("tensordesc"):
            parameters, buffer = _descriptor(lib, value, next(maps)), buffer_of[id(value.base)]
        elif kind.startswith("*"):
            buffer = buffer_of[id(value)]
            parameters = [lib.create_array_parameter(zeros.get(buffer, 0), 16 if path in aligned else 0)]
        else:
            parameters = [lib.create_scalar_parameter(float(value) if kind.startswith("fp") else int(value), kind)]
        parsed.append(_Argument(parameters, range(count, count + len(parameters)), buffer, kind.startswith("*")))
        count += len(parameters)
    return parsed


def _with_parameters_in_order(ptx: str, order: Sequence[int]) -> str:
    """Returns PTX whose kernel declares its parameters in another order: their indices in `order`, then the others.

    Parameters have names, by which the kernel reads them, so only the declarations move
    (https://docs.nvidia.com/cuda/parallel-thread-execution/#kernel-function-parameters).
    """
    entry = re.search(r"(\.entry\s+\w+\()(.*?)(\)\s)", ptx, re.DOTALL)
    assert entry is not None
    declared = [text.strip() for text in entry[2].split(",")]
    moved = [*(declared[i] for i in order), *declared[len(order) :]]
    assert sorted(moved) == sorted(declared)
    return ptx[: entry.start()] + entry[1] + "\n\t" + ",\n\t".join(moved) + "\n" + entry[3] + ptx[entry.end() :]


def _descriptor(lib: Any, descriptor: Any, meta: Any) -> list[object]:
    """Returns the parameters of a tensor map, which jaxlib encodes from its buffer's address, and of its shape and strides."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    if not hasattr(lib, "create_tma_descriptor_parameter"):
        raise NotImplementedError(
            f"jaxlib {jax.lib.__version__} passes no tensor maps, which the kernels for compute capability 9.0 need; "
            "pip install 'jax[cuda13]>=0.11.1', or set FLEXATTN_HOPPER=never for the portable kernels"
        )
    shape, strides = [int(n) for n in descriptor.shape], [int(n) for n in descriptor.strides]
    tensor_map = lib.create_tma_descriptor_parameter(
        elem_type=TMA_DTYPE_DEVICE_TO_HOST[meta["elem_type"]],
        swizzle=meta["swizzle"],
        shape=shape,
        strides=strides,
        block_shape=list(meta["block_size"]),
        oob_fill=int(descriptor.padding == "nan"),
    )
    numbers = [lib.create_scalar_parameter(n, "i32") for n in shape] + [lib.create_scalar_parameter(n, "i64") for n in strides]
    return [tensor_map, *numbers]


def _jaxlib() -> Any:
    from jax._src.lib import gpu_triton  # no public name exists; jax-triton and TransformerEngine also import it from here

    if not hasattr(gpu_triton, "TritonKernel"):
        raise NotImplementedError(
            "JAX's CUDA plugin, which describes kernels to XLA, is not installed; pip install 'jax[cuda13]>=0.11.1'"
        )
    return gpu_triton


def _compiled(launch: Any, architecture: int) -> tuple[Any, Any]:
    """Returns the kernel of a launch, and its `store.Binary` or None."""
    from flexattn.kernels_triton.ahead_of_time.compile_report import request_for, sound_from
    from flexattn.kernels_triton.runtime.launch import description_of

    text = description_of(launch, architecture)
    with _lock:
        entry = _kernels.get(text)
        if entry is None:
            entry = _kernels[text] = sound_from(request_for(launch, architecture))
        return entry


_kernels: dict[str, tuple[object, object]] = {}
_lock = fork_safe(threading.Lock())
