"""Results under `neutral_state` do not depend on settings of the caller's thread, and every setting stays as it was."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from flexattn.dispatch.neutral import keep, neutral_state, sizes_of


class Doubles(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.ops.aten.tanh.default else out


class DoublesFunctions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.tanh else out


def raise_error(*_: Any) -> Any:
    raise AssertionError("a hook of the caller's was run")


AROUND: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "nothing": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "default device": lambda: torch.device("meta"),
    "dispatch mode": Doubles,
    "function mode": DoublesFunctions,
    "fake tensors": FakeTensorMode,
    "no torch functions": torch._C.DisableTorchFunction,
    "saved-tensor hooks": lambda: saved_tensors_hooks(raise_error, raise_error),
    "saved-tensor hooks disabled": lambda: disable_saved_tensors_hooks("not here"),
    "inside an operator": torch._C._AutoDispatchBelowAutograd,
    "python dispatcher": enable_python_dispatcher,
}


def thread_state() -> tuple[Any, ...]:
    keys = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    stacks = torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
    is_plain = torch._C._functorch.peek_interpreter_stack() is None
    return (*map(str, keys), *stacks, *modes, is_plain, torch._C._get_torch_function_state())


def compute() -> None:
    x = torch.full((3,), 0.5, requires_grad=True)
    weights = torch.eye(3)
    y = (weights @ torch.tanh(x)).sum()
    y.backward()
    assert type(y) is torch.Tensor
    assert (y.dtype, y.device.type) == (torch.float32, "cpu")
    assert y.item() == pytest.approx(3 * 0.46211715)
    assert x.grad is not None
    assert x.grad.tolist() == pytest.approx([0.78644770] * 3)


def of_a_new_thread() -> tuple[Any, ...]:
    found: list[tuple[Any, ...]] = []
    thread = threading.Thread(target=lambda: found.append(thread_state()))
    thread.start()
    thread.join()
    return found[0]


def check() -> None:
    before = thread_state()
    with neutral_state():
        assert thread_state() == of_a_new_thread()
        compute()
    assert thread_state() == before
    with pytest.raises(KeyError), neutral_state():
        raise KeyError
    assert thread_state() == before


@pytest.mark.parametrize("name", AROUND)
def test_nothing_of_the_caller_is_left(name: str) -> None:
    with AROUND[name]():
        check()


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.grad, lambda f: make_fx(f, pre_dispatch=True)])
def test_nor_of_transforms_and_traces(transform: Any) -> None:
    ran = []

    def function(x: torch.Tensor) -> torch.Tensor:
        check()
        ran.append(True)
        return x.sum()

    transform(function)(torch.ones(3))
    assert ran


def test_all_of_them_together() -> None:
    with contextlib.ExitStack() as stack:
        for name in AROUND.keys() - {"saved-tensor hooks disabled"}:  # torch refuses them beside hooks
            stack.enter_context(AROUND[name]())
        check()


def test_nor_of_a_trace_of_torch_jit() -> None:
    ran = []

    def function(x: torch.Tensor) -> torch.Tensor:
        assert not isinstance(x.shape[0], int)
        with neutral_state():
            assert x.shape[0] == 3
            assert type(x.shape[0]) is int
            compute()
        assert [type(size) for size in sizes_of(x)] == [int]
        ran.append(torch._C._get_tracing_state())
        return x + 1

    traced = torch.jit.trace(function, (torch.ones(3),), check_trace=False)
    assert ran[0] is not None
    assert "tanh" not in str(traced.graph)


def test_what_is_kept_is_made_outside_of_modes_alone() -> None:
    made = []

    @keep(4)
    def double(number: float) -> torch.Tensor:
        made.append(number)
        return torch.full((), 2 * number, device="cpu")

    with torch.inference_mode():
        kept = double(1.0)
    assert not kept.is_inference()
    assert double(1.0) is kept
    with FakeTensorMode():
        assert double(1.0) is not kept
        assert type(double(3.0)) is not torch.Tensor
    assert type(double(3.0)) is torch.Tensor
    with pytest.MonkeyPatch.context() as capture:
        capture.setattr(torch.cuda, "is_initialized", lambda: True)
        capture.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert double(1.0) is not kept
    assert double(1.0) is kept
    assert made == [1.0, 1.0, 3.0, 3.0, 1.0]
