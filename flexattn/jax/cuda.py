"""A call on a CUDA device: each launch of its plan becomes a custom call that jaxlib runs, without Python at run time.

The backends of `HOSTED` have no plan: torch runs them, in the handlers of `host`.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.typing import DTypeLike
from torch import Tensor

from flexattn import fp8, fp8_ops, ops
from flexattn.dispatch import options, triton_backend
from flexattn.dispatch import plan as plans
from flexattn.dispatch.plan import Buffer, Device, Kernel, Op, Plan, View, Zero, large_l2_by_name
from flexattn.dispatch.select import BackendError, select
from flexattn.dispatch.spec import AttentionSpec, Direction, Gradients, Operands, with_classes
from flexattn.jax.call import Call, jax_dtype, shape_of_words, torch_dtype
from flexattn.jax.custom_call import TARGET, custom_call

HOSTED = ("cudnn", "eager")  # only used if requested by name


class _Thread(threading.local):
    device: Device | None = None


_thread = _Thread()


@contextlib.contextmanager
def compiled_for(capability: tuple[int, int], processors: int) -> Iterator[None]:
    """Context in which this thread compiles calls for CUDA devices of a kind that may be absent, such as for `jax.export`.

    Args:
        capability: the compute capability, such as (9, 0).
        processors: number of streaming multiprocessors, such as 132. Programs are divided by it; another number gives the same
            results.
    """
    before, _thread.device = _thread.device, Device(capability, processors)
    try:
        yield
    finally:
        _thread.device = before


def device() -> Device | None:
    """Returns the kind of CUDA device for compilation: that of `compiled_for`, or JAX's first device, or None if there is none."""
    return _thread.device or _first_device()


@functools.cache
def _first_device() -> Device | None:
    try:
        first = jax.devices("cuda")[0]
    except RuntimeError:  # JAX has no such platform
        return None
    major, minor = map(int, first.compute_capability.split("."))
    return Device((major, minor), first.core_count, large_l2_by_name(first.device_kind))  # JAX does not tell the size


def forward(call: Call, arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns out, lse and max_logit of a call in a trace for a CUDA device."""
    return run_plan(_forward_plan(call, _signature(call, arrays), needed_device(), options.hopper()), arrays)


def backward(call: Call, arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns a call's gradients in a trace for a CUDA device; arrays: operands, out, lse, dout, and dlse if it is not zero."""
    return run_plan(_backward_plan(call, _signature(call, arrays), needed_device(), options.hopper()), arrays)


def needed_device() -> Device:
    """Returns `device`'s result; raises if there is none."""
    kind = device()
    if kind is None:
        raise NotImplementedError(
            "the call is compiled for CUDA, but JAX has no CUDA device to read the compute capability of; accepted: "
            "flexattn.jax.compiled_for((9, 0), processors=132) around the compilation"
        )
    return kind


_Signature = tuple[tuple[tuple[int, ...], torch.dtype], ...]


def _signature(call: Call, arrays: Sequence[jax.Array]) -> _Signature:
    names = (*call.names(), *("the backward's input",) * (len(arrays) - call.num_operands))
    return tuple(
        (shape_of_words(x.shape), torch.int64) if name == "rng_state" else (tuple(x.shape), torch_dtype(name, x.dtype))
        for name, x in zip(names, arrays, strict=True)
    )


def _metas(signature: _Signature) -> list[Tensor]:
    return [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in signature]


def _spec_on(device: Device, call: Call, x: Operands) -> AttentionSpec:
    return with_classes(call.spec(x), x)._replace(device_type="cuda", capability=device.capability)


def check(spec: AttentionSpec, backend: str, direction: Direction) -> None:
    """Raises BackendError if the backend, or this process, cannot run a call on a CUDA device."""
    if backend in HOSTED:
        if _thread.device is None and not torch.cuda.is_available():
            raise BackendError(
                f"backend, or FLEXATTN_BACKEND, is {backend!r}, which torch runs, but torch {torch.__version__} sees no CUDA "
                "device; install torch for CUDA (https://pytorch.org/get-started/locally), or use 'triton', whose kernels XLA "
                "launches itself"
            )
        select(spec, direction, backend)  # raises BackendError
    elif reason := triton_backend.unsupported(spec, direction) or _unplanned(spec, backend, direction):
        raise BackendError(
            f"triton cannot run the {direction}: {reason}; from JAX on a CUDA device 'auto' tries no other backend; for torch's, "
            "pass backend='cudnn' or backend='eager'"
        )


def _unplanned(spec: AttentionSpec, backend: str, direction: Direction) -> str | None:
    """Returns why XLA should not launch the kernels that torch launches for a call; None: it may."""
    if not spec.kv_lists:
        return None
    if backend != "triton":
        return "no GPU has run them for kv_indices in JAX; backend='triton' runs them"
    if direction == "backward" and spec.deterministic:
        return "deterministic=True sorts kv_indices, which no launch of XLA does; pass deterministic=False"
    return None


def checked(call: Call, arrays: Sequence[jax.Array], direction: Direction) -> Call:
    """Returns a call of one of `HOSTED` in the form that torch runs; arrays: its operands, and the arrays after them.

    Raises BackendError like `check`.
    """
    target = needed_device()
    call = call if call.settings.backend == "cudnn" else _resolve_fp8(target, call)
    spec = _spec_on(target, call, call.operands(_metas(_signature(call, arrays))[: call.num_operands]))
    if spec.needs_grad or direction == "backward":  # a call without a backward fails before its forward runs
        with_dlse = direction == "backward" and len(arrays) > call.num_operands + len(("out", "lse", "dout"))
        check(spec.for_backward()._replace(needs_lse_grad=with_dlse), call.settings.backend, "backward")
    if direction == "forward":
        check(spec, call.settings.backend, "forward")
    return call


def _resolve_fp8(device: Device, call: Call) -> Call:
    """Returns the call with `fp8.Recipe`'s settings for the device, which a trace does not know yet."""
    config = call.config
    if config is None or device.capability != (9, 0):
        return call
    keeps_16_bit, own_scales = not config.rotation, not fp8.chooses_scales(config.margin, config.block_rows)
    quantises_dout = call.is_delayed or not own_scales
    return call._replace(config=config._replace(keeps_16_bit=keeps_16_bit, quantises_dout=quantises_dout))


@functools.lru_cache(maxsize=256)
def _forward_plan(call: Call, signature: _Signature, target: Device, hopper: str) -> Plan:
    """Returns the plan of a forward; hopper: FLEXATTN_HOPPER, a part of the cache's key."""
    call, metas = _resolve_fp8(target, call), _metas(signature)
    x = call.operands(metas)
    spec = _spec_on(target, call, x)
    check(spec, call.settings.backend, "forward")
    if spec.needs_grad:  # a call without a backward fails before its forward runs
        check(spec, call.settings.backend, "backward")
    return plans.record(lambda: call.forward(x, call.delayed(metas), lambda x: triton_backend.forward(spec, x)), metas, target)


@functools.lru_cache(maxsize=256)
def _backward_plan(call: Call, signature: _Signature, target: Device, hopper: str) -> Plan:
    """Returns the plan of a backward; hopper: FLEXATTN_HOPPER, a part of the cache's key."""
    call, metas = _resolve_fp8(target, call), _metas(signature)
    x, incoming = call.operands(metas[: call.num_operands]), metas[call.num_operands :]
    out, lse, dout, dlse = (*incoming, None)[:4]
    if call.settings.bf16_backward:
        call = call._replace(settings=ops.settings_of_backward(call.settings), config=None)
    spec = _spec_on(target, call, x)
    check(spec, call.settings.backend, "backward")
    spec = spec._replace(needs_lse_grad=dlse is not None)

    def attend(x: Operands, dout: Tensor) -> Gradients:
        return triton_backend.backward(spec, x, out, lse, dout, dlse)  # type: ignore[arg-type]

    def run() -> list[Tensor]:
        delayed = call.delayed(metas)
        if call.config is None:
            gradients = attend(x, dout)  # type: ignore[arg-type]
        else:
            inputs = (call.quantized_for_backward(x, delayed), call.settings.qkv_format, call.config, delayed)
            gradients = fp8_ops.gradients(*inputs, dout, fp8_ops.FUNCTIONS, attend)  # type: ignore[arg-type]
        amax = None if delayed.history_dout is None else delayed.history_dout.view(-1)
        return [t for t in (*gradients.flat(), amax) if t is not None]

    return plans.record(run, metas, target)


def run_plan(plan: Plan, arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns a plan's results for arrays of its inputs, in a trace."""
    with jax.enable_x64(True):  # launchers sum some gradients in 64 bits, which JAX would silently reduce to 32
        return _run_steps(plan, arrays)


def _run_steps(plan: Plan, arrays: Sequence[jax.Array]) -> list[jax.Array]:
    memory = _Memory(plan, arrays)
    for step in plan.steps:
        if isinstance(step, Zero):
            memory.zero(step.view)
        elif isinstance(step, Op):
            _compute(step, memory)
        else:
            _launch(step, memory)
    return [memory.read(view) for view in plan.results]


class _Memory:
    """The arrays of a plan's buffers between two steps."""

    def __init__(self, plan: Plan, arrays: Sequence[jax.Array]) -> None:
        self.buffers, self.written = plan.buffers, plan.written()
        self.arrays: dict[int, jax.Array] = {index: x for index, x in zip(plan.inputs, arrays, strict=True) if index is not None}
        self.zeroed: set[int] = set()  # zeroed buffers without an array

    def array(self, index: int) -> jax.Array:
        """Returns the array of a buffer. If no step has written to it, the array is uninitialised."""
        if index in self.zeroed:
            self.zeroed.remove(index)
            self.arrays[index] = jnp.zeros(self.buffers[index].size, jax_dtype(self.buffers[index].dtype))
        elif index not in self.arrays:
            self.arrays[index] = _uninitialised(self.buffers[index])
        return self.arrays[index]

    def read(self, view: View) -> jax.Array:
        """Returns the array of a view."""
        if view.buffer is None:
            return jnp.zeros(view.shape, jax_dtype(view.dtype))
        array, size = _bitcast(self.array(view.buffer), jax_dtype(view.dtype)), math.prod(view.shape)
        if array.size != size:
            array = jax.lax.dynamic_slice(array.reshape(-1), (view.offset,), (size,))
        if not view.order:
            return array.reshape(view.shape)
        in_memory = array.reshape([view.shape[dim] for dim in view.order])
        return in_memory.transpose([view.order.index(dim) for dim in range(len(view.order))])

    def write(self, view: View, value: jax.Array) -> None:
        """Replaces the value of a view."""
        if view.buffer is None:
            return
        buffer, size = self.buffers[view.buffer], math.prod(view.shape)
        value = jnp.broadcast_to(value, view.shape).astype(jax_dtype(view.dtype))
        value = _bitcast((value.transpose(view.order) if view.order else value).reshape(-1), jax_dtype(buffer.dtype))
        if size == buffer.size:
            self.zeroed.discard(view.buffer)
            self.arrays[view.buffer] = value
        else:
            array = self.array(view.buffer).reshape(-1)
            self.arrays[view.buffer] = jax.lax.dynamic_update_slice(array, value, (view.offset,))

    def zero(self, view: View) -> None:
        """Sets a view to zero. If its buffer has no array yet, the whole buffer becomes zero, because the rest has no value."""
        if view.buffer is None or view.buffer in self.arrays:
            self.write(view, jnp.zeros((), jax_dtype(view.dtype)))
        else:
            self.zeroed.add(view.buffer)


def _bitcast(array: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Returns the array bitcast to another dtype of the same size."""
    if array.dtype == dtype:
        return array
    if array.dtype.itemsize != dtype.itemsize:
        raise plans.PlanError(f"memory of {array.dtype} is used as {dtype}; such a call does not run from JAX on a CUDA device")
    return jax.lax.bitcast_convert_type(array, dtype)


def _uninitialised(buffer: Buffer) -> jax.Array:
    return jax.lax.empty((max(1, buffer.size),), jax_dtype(buffer.dtype))  # XLA may give empty arrays no address


def _launch(step: Kernel, memory: _Memory) -> None:
    """Adds one custom call. Afterwards, the buffers that its kernel may write have new arrays."""
    sizes = {index: memory.buffers[index].size * memory.buffers[index].dtype.itemsize for index in memory.zeroed}
    call = custom_call(step, memory.written, needed_device().architecture, sizes)
    memory.zeroed -= set(call.zeroed)
    arrays = {index: memory.array(index) for index in call.operands}
    written = [*call.aliased, *sorted((memory.written & set(call.operands)) - set(call.aliased))]
    # XLA merges two equal operands, and passes a slice in a loop as part of the whole array. If it fuses the call with the slices
    # that the call reads, it does not copy operands that are aliased to a result. Then two results share memory, or the kernel
    # writes to the slice and not to the result. Outputs of one barrier are neither equal nor slices.
    # https://github.com/openxla/xla/blob/main/xla/service/gpu/transforms/dynamic_slice_fusion_rewriter.cc
    arrays |= zip(written, jax.lax.optimization_barrier([arrays[index] for index in written]), strict=True)
    results = jax.ffi.ffi_call(
        TARGET,
        [jax.ShapeDtypeStruct(arrays[index].shape, arrays[index].dtype) for index in written],
        input_output_aliases={call.operands.index(index): i for i, index in enumerate(written)},
    )(*(arrays[index] for index in call.operands), opaque=call.text)
    # Without a barrier, XLA may place a result that becomes a slice, as in a scan, in that slice's memory. But the kernel writes to
    # the operand that is aliased to the result. Later versions check aliases first:
    # https://github.com/openxla/xla/blob/main/xla/backends/gpu/transforms/dynamic_slice_fusion_rewriter_v2.cc
    memory.arrays |= zip(written, jax.lax.optimization_barrier(results), strict=True)


_aten = torch.ops.aten


def _sum(
    x: jax.Array, dims: Any = None, keepdim: bool = False, *, dtype: DTypeLike | None = None, out: jax.Array | None = None
) -> jax.Array:
    return jnp.sum(x, None if dims is None else tuple(dims), dtype=None if dtype is None else jax_dtype(dtype), keepdims=keepdim)


def _cast(x: jax.Array, *, dtype: DTypeLike | None = None, **_: object) -> jax.Array:
    return x if dtype is None else x.astype(jax_dtype(dtype))


def quotient(x: jax.Array, y: object) -> jax.Array:
    """Returns x / y; float32 is rounded to nearest, as in torch; below 2^-126 the result is 0."""
    dtype = jnp.result_type(x, y)
    if dtype != jnp.float32:
        return x / y
    # XLA divides float32 by div.full on a GPU, which has an error of up to 2 units in the last place (`-nvptx-prec-divf32=1` in
    # https://github.com/openxla/xla/blob/main/xla/service/gpu/llvm_gpu_backend/nvptx_backend.cc). LLVM folds a division in float64
    # with a cast into the same: fptrunc(fdiv(fpext x, fpext y)) becomes a division of floats (visitFPTrunc in
    # https://github.com/llvm/llvm-project/blob/main/llvm/lib/Transforms/InstCombine/InstCombineCasts.cpp). reduce_precision rounds
    # by integer operations, so the cast is exact and is not folded. 53 bits are at least 2 * 24 + 2, so double rounding equals
    # single rounding (Figueroa, "When is double rounding innocuous?", SIGNUM Newsletter 30(3), 1995).
    with jax.enable_x64(True):
        wide = jnp.asarray(x, jnp.float64) / jnp.asarray(y, jnp.float64)  # y may be a number
        return jax.lax.reduce_precision(wide, exponent_bits=8, mantissa_bits=23).astype(dtype)


# Torch operators of launchers, in JAX. If an operator writes to a tensor, that is its first argument.
_FUNCTIONS: dict[object, Callable[..., object]] = {
    _aten.fill_.Scalar: lambda x, value: jnp.asarray(value),
    _aten.copy_.default: lambda x, value, non_blocking=False: value,
    _aten.clone.default: lambda x, memory_format=None: x,
    _aten._to_copy.default: _cast,
    _aten.sum.dim_IntList: _sum,
    _aten.sum.IntList_out: _sum,
    _aten.amax.default: lambda x, dims, keepdim=False: jnp.max(x, tuple(dims), keepdims=keepdim),
    _aten.amax.out: lambda x, dims, keepdim=False, out=None: jnp.max(x, tuple(dims), keepdims=keepdim),
    _aten.div.Tensor: quotient,
    _aten.mul.Tensor: lambda x, y: x * y,
    _aten.abs.default: jnp.abs,
    _aten.full.default: lambda size, value, dtype=None, **_: jnp.full(tuple(size), value, jax_dtype(dtype)),
    _aten.arange.default: lambda stop, dtype=torch.int64, **_: jnp.arange(stop, dtype=jax_dtype(dtype)),
    **dict.fromkeys((_aten.eq.Tensor, _aten.eq.Scalar), lambda x, y: x == y),
    **dict.fromkeys((_aten.lt.Tensor, _aten.lt.Scalar), lambda x, y: x < y),
    _aten.gt.Scalar: lambda x, y: x > y,
    _aten.ne.Scalar: lambda x, y: x != y,
    _aten.sort.default: lambda x, dim=-1: jax.lax.sort_key_val(x, jax.lax.broadcasted_iota(jnp.int32, x.shape, dim % x.ndim), dim),
    _aten.gather.default: lambda x, dim, index: jnp.take_along_axis(x, index, dim),
    _aten.scatter_.value: lambda x, dim, index, value: jnp.put_along_axis(x, index, value, dim, inplace=False),
    _aten.scalar_tensor.default: lambda x, dtype=None, **_: jnp.asarray(x, None if dtype is None else jax_dtype(dtype)),
    _aten.rsub.Scalar: lambda x, y: y - x,
    _aten.clamp.default: lambda x, low=None, high=None: jnp.clip(x, low, high),
    _aten.ones_like.default: lambda x, dtype=None, **_: jnp.ones(x.shape, x.dtype if dtype is None else jax_dtype(dtype)),
    _aten.cat.default: lambda arrays, dim=0: jnp.concatenate(arrays, dim),
    _aten.frexp.Tensor: jnp.frexp,
    _aten.ldexp.Tensor: jnp.ldexp,
    _aten.where.self: jnp.where,
}


def _compute(step: Op, memory: _Memory) -> None:
    function = _FUNCTIONS.get(step.func)
    if function is None:
        raise plans.PlanError(f"{step.func} has no counterpart in JAX; such a call does not run from JAX on a CUDA device")

    def read(argument: object) -> jax.Array:
        if isinstance(argument, (list, tuple)) and not isinstance(argument, View):
            return [read(x) for x in argument]
        return memory.read(argument) if isinstance(argument, View) else argument

    if step.func in (_aten.fill_.Scalar, _aten.copy_.default):  # the overwritten memory may be uninitialised
        values = function(None, *map(read, step.arguments[1:]))
    else:
        values = function(*map(read, step.arguments), **{name: x for name, x in step.keywords.items() if name != "out"})
    for view, value in zip(step.results, values if isinstance(values, tuple) else (values,), strict=True):
        memory.write(view, value)
