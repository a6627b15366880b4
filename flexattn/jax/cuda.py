"""A call on a CUDA device: each launch of its plan becomes a custom call that jaxlib itself runs, with no Python when it runs.

The backends of `HOSTED` have no plan: torch runs them, in the handlers of `host`.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import Tensor

from flexattn import fp8, fp8_ops, ops
from flexattn.dispatch import options, triton_backend
from flexattn.dispatch import plan as plans
from flexattn.dispatch.plan import Buffer, Device, Kernel, Op, Plan, View, Zero, large_l2_by_name
from flexattn.dispatch.select import BackendError, select
from flexattn.dispatch.spec import AttentionSpec, Direction, Gradients, Operands, with_classes
from flexattn.jax.call import Call, jax_dtype, shape_of_words, torch_dtype
from flexattn.jax.custom_call import TARGET, custom_call

HOSTED = ("cudnn", "eager")  # asked for by name


class _Thread(threading.local):
    device: Device | None = None


_thread = _Thread()


@contextlib.contextmanager
def compiled_for(capability: tuple[int, int], processors: int) -> Iterator[None]:
    """Inside, this thread compiles calls for CUDA devices of a kind that need not be there, as for `jax.export`.

    Args:
        capability: the compute capability, as (9, 0).
        processors: streaming multiprocessors, as 132. Programs are divided by it; another number gives the same results.
    """
    before, _thread.device = _thread.device, Device(capability, processors)
    try:
        yield
    finally:
        _thread.device = before


def device() -> Device | None:
    """Returns the kind of CUDA device that calls are compiled for: that of `compiled_for`, or of JAX's first; None without one."""
    return _thread.device or _found()


@functools.cache
def _found() -> Device | None:
    try:
        first = jax.devices("cuda")[0]
    except RuntimeError:  # JAX has no such platform
        return None
    major, minor = map(int, first.compute_capability.split("."))
    return Device((major, minor), first.core_count, large_l2_by_name(first.device_kind))  # JAX does not say how large it is


def forward(call: Call, arrays: Sequence[Any]) -> list[Any]:
    """Returns out, lse and max_logit of a call in a trace for a CUDA device."""
    return run_plan(_forward_plan(call, _signature(call, arrays), needed_device(), options.hopper()), arrays)


def backward(call: Call, arrays: Sequence[Any]) -> list[Any]:
    """Returns the gradients of a call in a trace for a CUDA device; arrays: operands, out, lse, dout, and dlse if it counts."""
    return run_plan(_backward_plan(call, _signature(call, arrays), needed_device(), options.hopper()), arrays)


def needed_device() -> Device:
    """Returns `device`, or raises where there is none."""
    found = device()
    if found is None:
        raise NotImplementedError(
            "the call is compiled for CUDA, and JAX has no CUDA device to ask for its compute capability; accepted: "
            "flexattn.jax.compiled_for((9, 0), processors=132) around the compilation"
        )
    return found


_Signature = tuple[tuple[tuple[int, ...], torch.dtype], ...]


def _signature(call: Call, arrays: Sequence[Any]) -> _Signature:
    names = (*call.names(), *("what the backward is given",) * (len(arrays) - call.num_operands))
    return tuple(
        (shape_of_words(x.shape), torch.int64) if name == "rng_state" else (tuple(x.shape), torch_dtype(name, x.dtype))
        for name, x in zip(names, arrays, strict=True)
    )


def _metas(signature: _Signature) -> list[Tensor]:
    return [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in signature]


def _spec_on(device: Device, call: Call, x: Operands) -> AttentionSpec:
    return with_classes(call.spec(x), x)._replace(device_type="cuda", capability=device.capability)


def check(spec: AttentionSpec, backend: str, direction: Direction) -> None:
    """Raises BackendError for a call on a CUDA device that the backend cannot run, or that this process cannot."""
    if backend in HOSTED:
        if _thread.device is None and not torch.cuda.is_available():
            raise BackendError(
                f"backend, or FLEXATTN_BACKEND, is {backend!r}, which torch runs, and torch {torch.__version__} sees no CUDA "
                "device; install torch for CUDA (https://pytorch.org/get-started/locally), or ask for 'triton', whose kernels XLA "
                "launches itself"
            )
        select(spec, direction, backend)  # raises it
    elif reason := triton_backend.unsupported(spec, direction):
        raise BackendError(
            f"triton cannot run the {direction}: {reason}; from JAX on a CUDA device 'auto' tries no other backend: torch runs "
            "backend='cudnn' and backend='eager', where they are asked for by name"
        )


def checked(call: Call, arrays: Sequence[Any], direction: Direction) -> Call:
    """Returns a call of one of `HOSTED` as torch is to run it on the device; arrays: its operands, and what follows them.

    Raises BackendError as `check` does.
    """
    on = needed_device()
    call = call if call.settings.backend == "cudnn" else _for(on, call)
    spec = _spec_on(on, call, call.operands(_metas(_signature(call, arrays))[: call.num_operands]))
    if spec.needs_grad or direction == "backward":  # a call without a backward fails here, not after its forward
        with_dlse = direction == "backward" and len(arrays) > call.num_operands + len(("out", "lse", "dout"))
        check(spec.of_backward()._replace(needs_lse_grad=with_dlse), call.settings.backend, "backward")
    if direction == "forward":
        check(spec, call.settings.backend, "forward")
    return call


def _for(device: Device, call: Call) -> Call:
    """Returns the call with FP8 as `fp8.Recipe` has it on the device, which a trace does not know yet."""
    config = call.config
    if config is None or device.capability != (9, 0):
        return call
    takes_16_bit, own_scales = not config.rotation, not fp8.chooses_scales(config.margin, config.block_rows)
    quantises_dout = call.is_delayed or not own_scales
    return call._replace(config=config._replace(keeps_16_bit=takes_16_bit, quantises_dout=quantises_dout))


@functools.lru_cache(maxsize=256)
def _forward_plan(call: Call, signature: _Signature, on: Device, hopper: str) -> Plan:
    """Returns the plan of a forward; hopper: FLEXATTN_HOPPER, which the backend reads and plans are kept by."""
    call, metas = _for(on, call), _metas(signature)
    x = call.operands(metas)
    spec = _spec_on(on, call, x)
    check(spec, call.settings.backend, "forward")
    if spec.needs_grad:  # a call without a backward fails here, not after its forward
        check(spec, call.settings.backend, "backward")
    return plans.record(lambda: call.forward(x, call.delayed(metas), lambda x: triton_backend.forward(spec, x)), metas, on)


@functools.lru_cache(maxsize=256)
def _backward_plan(call: Call, signature: _Signature, on: Device, hopper: str) -> Plan:
    """Returns the plan of a backward; hopper: FLEXATTN_HOPPER, which the backend reads and plans are kept by."""
    call, metas = _for(on, call), _metas(signature)
    x, incoming = call.operands(metas[: call.num_operands]), metas[call.num_operands :]
    out, lse, dout, dlse = (*incoming, None)[:4]
    if call.settings.bf16_backward:
        call = call._replace(settings=ops.settings_of_backward(call.settings), config=None)
    spec = _spec_on(on, call, x)
    check(spec, call.settings.backend, "backward")
    spec = spec._replace(needs_lse_grad=dlse is not None)

    def attend(x: Operands, dout: Tensor) -> Gradients:
        return triton_backend.backward(spec, x, out, lse, dout, dlse)  # type: ignore[arg-type]

    def run() -> list[Tensor]:
        delayed = call.delayed(metas)
        if call.config is None:
            found = attend(x, dout)  # type: ignore[arg-type]
        else:
            of_x = (call.quantized_for_backward(x, delayed), call.settings.qkv_format, call.config, delayed)
            found = fp8_ops.gradients(*of_x, dout, fp8_ops.FUNCTIONS, attend)  # type: ignore[arg-type]
        amax = None if delayed.history_dout is None else delayed.history_dout.view(-1)
        return [t for t in (*found[:-1], *(found.dmod_tensors or ()), amax) if t is not None]

    return plans.record(run, metas, on)


def run_plan(plan: Plan, arrays: Sequence[Any]) -> list[Any]:
    """Returns a plan's results for the arrays of its inputs, in a trace."""
    with jax.enable_x64(True):  # launchers sum some gradients in 64 bits, which JAX would make 32 in silence
        return _stepped(plan, arrays)


def _stepped(plan: Plan, arrays: Sequence[Any]) -> list[Any]:
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
    """The arrays that a plan's buffers hold between two of its steps."""

    def __init__(self, plan: Plan, arrays: Sequence[Any]) -> None:
        self.buffers, self.written = plan.buffers, plan.written()
        self.of: dict[int, Any] = {place: x for place, x in zip(plan.inputs, arrays, strict=True) if place is not None}
        self.zeroed: set[int] = set()  # buffers of zeros that have no array yet

    def whole(self, place: int) -> Any:
        """Returns the array of a buffer. If no step has written to it, the array is memory without a value."""
        if place in self.zeroed:
            self.zeroed.remove(place)
            self.of[place] = jnp.zeros(self.buffers[place].size, jax_dtype(self.buffers[place].dtype))
        elif place not in self.of:
            self.of[place] = _uninitialised(self.buffers[place])
        return self.of[place]

    def read(self, view: View) -> Any:
        """Returns the tensor of a view."""
        if view.buffer is None:
            return jnp.zeros(view.shape, jax_dtype(view.dtype))
        array, size = _viewed(self.whole(view.buffer), jax_dtype(view.dtype)), _size(view)
        if array.size != size:
            array = jax.lax.dynamic_slice(array.reshape(-1), (view.offset,), (size,))
        if not view.order:
            return array.reshape(view.shape)
        in_memory = array.reshape([view.shape[dim] for dim in view.order])
        return in_memory.transpose([view.order.index(dim) for dim in range(len(view.order))])

    def write(self, view: View, value: Any) -> None:
        """Replaces the value of a view."""
        if view.buffer is None:
            return
        buffer, size = self.buffers[view.buffer], _size(view)
        value = jnp.broadcast_to(value, view.shape).astype(jax_dtype(view.dtype))
        value = _viewed((value.transpose(view.order) if view.order else value).reshape(-1), jax_dtype(buffer.dtype))
        if size == buffer.size:
            self.zeroed.discard(view.buffer)
            self.of[view.buffer] = value
        else:
            array = self.whole(view.buffer).reshape(-1)
            self.of[view.buffer] = jax.lax.dynamic_update_slice(array, value, (view.offset,))

    def zero(self, view: View) -> None:
        """Sets a view to zero. If its buffer has no array yet, all of the buffer becomes zero, as the rest has no value."""
        if view.buffer is None or view.buffer in self.of:
            self.write(view, jnp.zeros((), jax_dtype(view.dtype)))
        else:
            self.zeroed.add(view.buffer)


def _viewed(array: Any, dtype: Any) -> Any:
    """Returns the same bits in another dtype of the same size."""
    if array.dtype == dtype:
        return array
    if array.dtype.itemsize != dtype.itemsize:
        raise plans.PlanError(f"memory of {array.dtype} is used as {dtype}; such a call does not run from JAX on a CUDA device yet")
    return jax.lax.bitcast_convert_type(array, dtype)


def _size(view: View) -> int:
    return functools.reduce(lambda a, b: a * b, view.shape, 1)


def _uninitialised(buffer: Buffer) -> Any:
    return jax.lax.empty((buffer.size,), jax_dtype(buffer.dtype))


def _launch(step: Kernel, memory: _Memory) -> None:
    """Adds one custom call. The buffers that its kernel may write have new arrays afterwards."""
    sizes = {place: memory.buffers[place].size * memory.buffers[place].dtype.itemsize for place in memory.zeroed}
    call = custom_call(step, memory.written, needed_device().architecture, sizes)
    memory.zeroed -= set(call.zeroed)
    arrays = {place: memory.whole(place) for place in call.operands}
    written = [*call.again, *sorted((memory.written & set(call.operands)) - set(call.again))]
    # XLA merges two operands that are equal, and passes a slice in a loop as part of the whole array. If it fuses the call with the
    # slices that the call reads, it copies no operand that is aliased to a result. Then two results are one, or the kernel writes
    # to the slice and not to the result. Outputs of one barrier are neither equal nor slices.
    # https://github.com/openxla/xla/blob/main/xla/service/gpu/transforms/dynamic_slice_fusion_rewriter.cc
    arrays |= zip(written, jax.lax.optimization_barrier([arrays[place] for place in written]), strict=True)
    results = jax.ffi.ffi_call(
        TARGET,
        [jax.ShapeDtypeStruct(arrays[place].shape, arrays[place].dtype) for place in written],
        input_output_aliases={call.operands.index(place): i for i, place in enumerate(written)},
    )(*(arrays[place] for place in call.operands), opaque=call.text)
    # Without a barrier, XLA may give a result that becomes a slice of something, as in a scan, that slice for its memory, although
    # the kernel writes to the operand that the result is aliased to. Later versions look at aliases first:
    # https://github.com/openxla/xla/blob/main/xla/backends/gpu/transforms/dynamic_slice_fusion_rewriter_v2.cc
    memory.of |= zip(written, jax.lax.optimization_barrier(results), strict=True)


_aten = torch.ops.aten


def _sum(x: Any, dims: Any = None, keepdim: bool = False, *, dtype: Any = None, out: Any = None) -> Any:
    return jnp.sum(x, None if dims is None else tuple(dims), dtype=None if dtype is None else jax_dtype(dtype), keepdims=keepdim)


def _cast(x: Any, *, dtype: Any = None, **_: Any) -> Any:
    return x if dtype is None else x.astype(jax_dtype(dtype))


def quotient(x: Any, y: Any) -> Any:
    """Returns x / y, float32 rounded to nearest, as torch does; below 2^-126 it is 0."""
    dtype = jnp.result_type(x, y)
    if dtype != jnp.float32:
        return x / y
    # XLA divides float32 by div.full on a GPU, which is up to 2 units in the last place off (`-nvptx-prec-divf32=1` in
    # https://github.com/openxla/xla/blob/main/xla/service/gpu/llvm_gpu_backend/nvptx_backend.cc). A division in float64 that is
    # cast becomes one again: LLVM makes fptrunc(fdiv(fpext x, fpext y)) a division of floats, as both round alike (visitFPTrunc in
    # https://github.com/llvm/llvm-project/blob/main/llvm/lib/Transforms/InstCombine/InstCombineCasts.cpp). reduce_precision rounds
    # by integers, so the cast is exact and there is nothing to be folded; and 53 bits are at least 2 * 24 + 2, so rounding twice
    # is rounding once (Figueroa, "When is double rounding innocuous?", SIGNUM Newsletter 30(3), 1995).
    with jax.enable_x64(True):
        wide = jnp.asarray(x, jnp.float64) / jnp.asarray(y, jnp.float64)  # y may be a number
        return jax.lax.reduce_precision(wide, exponent_bits=8, mantissa_bits=23).astype(dtype)


# What launchers compute by torch, in JAX; the first argument of an operator that writes is where the result goes.
_FUNCTIONS: dict[Any, Callable[..., Any]] = {
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
    _aten.eq.Tensor: lambda x, y: x == y,
    _aten.ne.Scalar: lambda x, y: x != y,
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
        raise plans.PlanError(f"{step.func} has no counterpart in JAX; such a call does not run from JAX on a CUDA device yet")

    def given(x: Any) -> Any:
        if isinstance(x, (list, tuple)) and not isinstance(x, View):
            return [given(one) for one in x]
        return memory.read(x) if isinstance(x, View) else x

    if step.func in (_aten.fill_.Scalar, _aten.copy_.default):  # what they overwrite may be memory without a value
        found = function(None, *map(given, step.arguments[1:]))
    else:
        found = function(*map(given, step.arguments), **{name: x for name, x in step.keywords.items() if name != "out"})
    for view, value in zip(step.results, found if isinstance(found, tuple) else (found,), strict=True):
        memory.write(view, value)
