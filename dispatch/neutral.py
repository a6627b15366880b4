"""Torch's settings of a thread, set aside: what the library computes for itself must not depend on who asked first."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

_Key, _Keys = torch._C.DispatchKey, torch._C.DispatchKeySet
_INCLUDED = _Keys(_Key.BackendSelect).add(_Key.ADInplaceOrView)  # c10's default_included_set
_NO_KEYS = _Keys(_Key.BackendSelect).remove(_Key.BackendSelect)


@contextlib.contextmanager
def neutral_state() -> Iterator[None]:
    """Run a block as a thread that has only begun would run it: with gradients on, and with nothing of the caller's.

    Set aside are saved-tensor hooks, modes of both kinds (default devices, fake tensors and tracers are such), autocast, grad and
    inference mode, torch.func's transforms, and the dispatch keys of an operator that is being run: what of at::ThreadLocalState
    decides what an op gives. The default dtype stays, as it belongs to the process: what depends on it has it in its key.
    """
    was_tracing = torch._C._autograd._saved_tensors_hooks_set_tracing(True)  # hooks then wait for what is traced to run
    try:
        with (
            torch._C._ForceDispatchKeyGuard(_INCLUDED, _NO_KEYS),  # first, as modes come with keys of their own
            torch._C._DisableAutocast(),
            _no_function_modes(),
            temporarily_clear_interpreter_stack(),
            _disable_current_modes(),
            torch._C._DisablePythonDispatcher(),
            torch.inference_mode(False),
            torch.enable_grad(),
        ):
            yield
    finally:
        torch._C._autograd._saved_tensors_hooks_set_tracing(was_tracing)


@contextlib.contextmanager
def _no_function_modes() -> Iterator[None]:
    """Without the modes of torch functions, and with torch functions on, which DisableTorchFunction may have turned off."""
    modes = [torch._C._pop_torch_function_stack() for _ in range(torch._C._len_torch_function_stack())]
    try:
        with torch._C._EnableTorchFunction():
            yield
    finally:
        for mode in reversed(modes):
            torch._C._push_on_torch_function_stack(mode)
