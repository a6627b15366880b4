"""The library's own computations run outside of torch's modes; this module also has the rule for values that are kept.

A value that is kept for later calls is made outside of all modes, as a function under `keep` makes it. Nothing is kept while
a mode, a transform or a trace records operators. Nothing is kept while a CUDA graph is captured, as it would own the memory.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flexattn import compat

_Key, _Keys = compat.DispatchKey, compat.DispatchKeySet
_INCLUDED = _Keys(_Key.BackendSelect).add(_Key.ADInplaceOrView)  # c10's default_included_set
_NO_KEYS = _Keys(_Key.BackendSelect).remove(_Key.BackendSelect)
_Arguments = ParamSpec("_Arguments")
_Made = TypeVar("_Made")


@contextlib.contextmanager
def neutral_state() -> Iterator[None]:
    """Runs a block as a new thread would run it: with gradients on, and without the caller's modes.

    It suspends saved-tensor hooks, modes of both kinds (such as default devices, fake tensors and tracers), torch.jit.trace,
    autocast, grad mode, inference mode and torch.func's transforms. It also suspends the dispatch keys of a running operator.
    These are the parts of at::ThreadLocalState that change an operator's result. The default dtype stays, as it belongs to the
    process: values that depend on it have it in their keys.
    """
    was_tracing = compat.set_saved_tensors_hooks_tracing(True)  # hooks then wait for what is traced to run
    try:
        with (
            compat.dispatch_keys(_INCLUDED, _NO_KEYS),  # first, as modes come with keys of their own
            compat.autocast_disabled(),
            _no_function_modes(),
            compat.temporarily_clear_interpreter_stack(),
            compat.no_dispatch_modes(),
            compat.python_dispatcher_disabled(),
            _no_jit_trace(),
            torch.inference_mode(False),
            torch.enable_grad(),
        ):
            yield
    finally:
        compat.set_saved_tensors_hooks_tracing(was_tracing)


@contextlib.contextmanager
def _no_function_modes() -> Iterator[None]:
    """Suspends the modes of torch functions, and turns torch functions on if DisableTorchFunction has turned them off."""
    modes = [compat.pop_function_mode() for _ in range(compat.num_function_modes())]
    try:
        with compat.functions_enabled():
            yield
    finally:
        for mode in reversed(modes):
            compat.push_function_mode(mode)


@contextlib.contextmanager
def _no_jit_trace() -> Iterator[None]:
    """Suspends torch.jit.trace, so that ops are not recorded and sizes are ints."""
    state = compat.jit_trace()
    compat.set_jit_trace(None)
    try:
        yield
    finally:
        compat.set_jit_trace(state)


# These are looked up once, as each look into torch's modules costs a call about 20 ns.
_num_modes, _has_function_mode = compat.num_dispatch_modes, compat.has_function_mode
_transform, _jit_trace, _level = compat.innermost_transform, compat.jit_trace, compat.forward_mode_level


def is_ordinary() -> bool:
    """Returns whether no mode, transform or trace sees the operators that run."""
    return not (
        _num_modes()
        or _transform() is not None
        or _level() >= 0
        or _jit_trace() is not None
        or (_has_function_mode() and not _are_device_contexts())
    )


def _are_device_contexts() -> bool:
    """Returns whether all modes of torch functions come from torch.set_default_device. Such modes change nothing here."""
    context = compat.device_context()
    return all(type(mode) is context for mode in compat.function_modes())  # type: ignore[no-untyped-call]


def is_fake() -> bool:
    """Returns whether a FakeTensorMode is active, whose operators refuse tensors that have data."""
    return compat.fake_mode() is not None


def is_jit_traced() -> bool:
    """Returns whether torch.jit.trace records the call."""
    return not torch.compiler.is_compiling() and _jit_trace() is not None


def is_traced() -> bool:
    """Returns whether torch.compile, torch.export or torch.jit.trace records the call. If so, no value may be read."""
    return torch.compiler.is_compiling() or _jit_trace() is not None


def is_capturing(device: torch.device | None = None) -> bool:
    """Returns whether a CUDA graph is captured on the current stream; False under torch.compile, which cannot know.

    device: the device of a call's tensors, if it is known. The answer for tensors on the host is False.
    """
    if (device is not None and device.type != "cuda") or torch.compiler.is_compiling() or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    return torch.cuda.is_current_stream_capturing()


def refuse_capture(call: str) -> None:
    """Raises RuntimeError while a CUDA graph is captured. It is for calls whose numbers on the host would not change in replays."""
    if is_capturing():
        raise RuntimeError(
            f"{call} is called while a CUDA graph is captured, and each replay would repeat its present numbers; accepted: a call "
            "before the capture and before each replay"
        )


@contextlib.contextmanager
def making_state(call: str) -> Iterator[None]:
    """Runs a block that makes the state of a first call; the state's tensors belong to no mode. Raises as `refuse_capture` does."""
    if torch.compiler.is_compiling():  # it makes the state after the graph
        yield
        return
    refuse_capture(call)
    with neutral_state():
        yield


def may_keep() -> bool:
    """Returns whether values that are made now may be kept for later calls, and kept ones be read.

    A captured graph owns the memory of the values that it makes. It does not own kept values, which may be dropped before a replay.
    """
    return not (torch.compiler.is_compiling() or not is_ordinary() or is_capturing())


def keep(maxsize: int) -> Callable[[Callable[_Arguments, _Made]], Callable[_Arguments, _Made]]:
    """Returns a decorator like functools.lru_cache for functions that make tensors.

    The values are made in `neutral_state`. Without `may_keep` each call makes a value of its own, in the modes of the caller.
    """

    def decorate(make: Callable[_Arguments, _Made]) -> Callable[_Arguments, _Made]:
        @functools.lru_cache(maxsize)
        def kept(*arguments: _Arguments.args, **named: _Arguments.kwargs) -> _Made:
            with neutral_state():
                return make(*arguments, **named)

        @functools.wraps(make)
        def get(*arguments: _Arguments.args, **named: _Arguments.kwargs) -> _Made:
            return kept(*arguments, **named) if may_keep() else make(*arguments, **named)  # type: ignore[arg-type]

        get.cache_clear = kept.cache_clear  # type: ignore[attr-defined]
        return get

    return decorate


class _FixedSizes(TorchFunctionMode):
    """Mode in which sizes are ints; torch.jit.trace makes them tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> object:
        if func not in _SIZES:
            return func(*args, **(kwargs or {}))
        with _no_jit_trace():
            return func(*args, **(kwargs or {}))


_SIZES = frozenset((Tensor.shape.__get__, Tensor.size, Tensor.numel, Tensor.nelement, Tensor.__len__))  # type: ignore[attr-defined]


def fixed_sizes(function: Callable[_Arguments, _Made]) -> Callable[_Arguments, _Made]:
    """Decorates a function that decides by sizes: torch.jit.trace records the sizes of its example inputs as constants."""

    @functools.wraps(function)
    def checked(*arguments: _Arguments.args, **named: _Arguments.kwargs) -> _Made:
        if not is_jit_traced():
            return function(*arguments, **named)
        with _FixedSizes():
            return function(*arguments, **named)

    return checked


def sizes_of(x: Tensor) -> torch.Size:
    """Returns the shape of a tensor in ints, under torch.jit.trace too."""
    if not is_jit_traced():
        return x.shape
    with _no_jit_trace():
        return x.shape
