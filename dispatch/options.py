"""Settings around a call: the environment variables, and `attention_backend`.

No other file of the package reads a variable, except for TransformerEngine's variables in `integrations.te`.

| variable           | values                           | meaning                                                              |
|--------------------|----------------------------------|----------------------------------------------------------------------|
| `FLEXATTN_BACKEND` | auto (default), triton, cudnn,   | the backend if neither the call's `backend=` nor                     |
|                    | eager                            | `attention_backend()` names one.                                     |
| `FLEXATTN_CHECK`   | 0, 1; unset                      | 1: checks the values of `cu_seqlens` and of descales, and the sizes  |
|                    |                                  | of logits, each with a transfer from the device. It also compares    |
|                    |                                  | one replayed call in a hundred with an unrecorded one. 0: no checks. |
|                    |                                  | Unset: checks only on a CPU that lengths fit their tensors.          |
| `FLEXATTN_CANARY`  | 0 (default), 1                   | 1: checks each selected backend against the reference, on a small    |
|                    |                                  | input, before it runs a spec for the first time.                     |
| `FLEXATTN_HOPPER`  | auto (default), always, never    | auto: the triton backend's kernels for sm_90 run if they were        |
|                    |                                  | measured to be faster. always: they run if they support the call,    |
|                    |                                  | as do the kernels for sm_100, which no GPU has run yet.              |
| `FLEXATTN_BATCH_INVARIANT` | 0 (default), 1           | 1: makes every forward `batch_invariant`.                            |
| `FLEXATTN_PLANS`   | a directory; unset: none         | the directory that keeps cuDNN plans for other processes.            |
| `FLEXATTN_KERNELS` | a directory; unset: `flexattn`   | the directory that keeps compiled Triton kernels. You can copy the   |
|                    | in Triton's cache directory      | files of `python -m flexattn build` into it.                         |
| `FLEXATTN_PEER_MEMORY` | auto (default), never        | never: ranks of one host share no memory, and exchange data only     |
|                    |                                  | through the process group. Set it to the same value on all ranks.    |
| `FLEXATTN_AS`      | sm_80, sm_86, sm_89, sm_120;     | the target that `python -m flexattn` commands with `--as`, and the   |
|                    | unset: the GPU's own             | tests, compile for. The GPU at hand runs the older code.             |

Every call reads them, so a change takes effect at once. If a value is not accepted, the next call and the next `explain` raise a
ValueError, even if they do not use it. A function under `torch.compile` keeps the `FLEXATTN_BACKEND` that it was compiled with
(`attention_backend()` is guarded, and recompiles).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from flexattn.dispatch.spec import REQUESTS as REQUESTS

_FLAG = ("0", "1")
ACCEPTED = {  # the values of each variable that has a fixed set of them, its default first
    "FLEXATTN_CANARY": _FLAG,
    "FLEXATTN_BACKEND": REQUESTS,
    "FLEXATTN_CHECK": _FLAG,
    "FLEXATTN_HOPPER": ("auto", "always", "never"),
    "FLEXATTN_BATCH_INVARIANT": _FLAG,
    "FLEXATTN_PEER_MEMORY": ("auto", "never"),
}
VARIABLES = (*ACCEPTED, "FLEXATTN_PLANS", "FLEXATTN_KERNELS", "FLEXATTN_AS")


def check_name(argument: str, value: object, accepted: Sequence[str]) -> None:
    """Raises ValueError if an argument, or a variable, is none of the accepted names."""
    if not isinstance(value, str) or value not in accepted:
        raise ValueError(f"{argument} is {value!r}; accepted: {', '.join(accepted)}")


def _value(variable: str) -> str:
    """Returns the value of a variable of ACCEPTED, or its default if it is unset or empty. Raises if it is not accepted."""
    accepted = ACCEPTED[variable]
    value = os.environ.get(variable) or accepted[0]
    check_name(f"the environment variable {variable}", value, accepted)
    return value


def hopper() -> str:
    """Returns FLEXATTN_HOPPER."""
    return _value("FLEXATTN_HOPPER")


def check_values() -> bool:
    """Returns whether FLEXATTN_CHECK is 1."""
    return _value("FLEXATTN_CHECK") == "1"


def are_lengths_checked(device_type: str) -> bool:
    """Returns whether calls on such a device check that lengths fit their tensors. By default, only calls on a CPU do."""
    return check_values() or (device_type == "cpu" and not os.environ.get("FLEXATTN_CHECK"))


def canary() -> bool:
    """Returns whether FLEXATTN_CANARY is 1."""
    return _value("FLEXATTN_CANARY") == "1"


def batch_invariant() -> bool:
    """Returns whether FLEXATTN_BATCH_INVARIANT is 1."""
    return _value("FLEXATTN_BATCH_INVARIANT") == "1"


def peer_memory() -> str:
    """Returns FLEXATTN_PEER_MEMORY."""
    return _value("FLEXATTN_PEER_MEMORY")


def imitated_target() -> str | None:
    """Returns FLEXATTN_AS, or None if it is unset or empty."""
    return os.environ.get("FLEXATTN_AS") or None


def plan_directory() -> str | None:
    """Returns FLEXATTN_PLANS, or None if it is unset or empty."""
    return os.environ.get("FLEXATTN_PLANS") or None


def kernel_directory() -> str | None:
    """Returns FLEXATTN_KERNELS, or None if it is unset or empty."""
    return os.environ.get("FLEXATTN_KERNELS") or None


_checked: tuple[object, ...] | None = None  # the last values of all variables that were accepted.


def check_all() -> None:
    """Raises a ValueError for the first variable with a value that is not accepted. It is fast if no variable changed."""
    global _checked
    data = getattr(os.environ, "_data", os.environ)
    values = tuple(map(data.get, _KEYS))
    if values != _checked:
        for variable in ACCEPTED:
            _value(variable)
        _checked = values


_KEYS = tuple(map(getattr(os.environ, "encodekey", str), VARIABLES))  # FLEXATTN_CANARY is first


def snapshot() -> tuple[Any, ...] | None:
    """Returns the values of all variables, to compare with earlier ones. Returns None if no call may be replayed.

    That is so if FLEXATTN_CANARY is set, or after keep_calls(False). This function reads the dict inside of os.environ if there is
    one, because a look-up in os.environ itself takes half a microsecond.
    """
    data = getattr(os.environ, "_data", os.environ)
    if data.keys().isdisjoint(_KEYS):
        return _when_unset
    if _when_unset is None:
        return None
    values = tuple(map(data.get, _KEYS))
    return None if values[0] and values[0] not in ("0", b"0") else values


_UNSET = (None,) * len(_KEYS)
_when_unset: tuple[object, ...] | None = _UNSET


def keep_calls(wanted: bool) -> None:
    """Sets whether calls may be kept and replayed. If not, `snapshot` returns None."""
    global _when_unset
    _when_unset = _UNSET if wanted else None


class _Thread(threading.local):
    """One thread's request. It is a threading.local because torch.compile guards that, and breaks the graph at a ContextVar."""

    def __init__(self) -> None:
        self.requested: str | None = None


_thread = _Thread()
_is_used = False  # whether any thread has ever entered a block. If not, calls skip the look-up in the threading.local.


@contextmanager
def attention_backend(backend: str) -> Iterator[None]:
    """Sets the backend for calls of this thread that name none: "auto", "triton", "cudnn" or "eager".

    It holds until the block ends. Like `torch.no_grad()`, it holds only for the thread that entered the block. It can be nested,
    and works inside and around `torch.compile`. A backward uses the backend that was requested in its forward, in any thread.

    `torch.utils.checkpoint` recomputes a forward on a GPU in a thread of autograd, so this block does not apply to it. Pass
    `backend` in such calls. A named backend never falls back: if it cannot run a call, the call raises a BackendError with the
    reason. FLEXATTN_BACKEND sets the backend for the whole process.

    Raises:
        ValueError: an unknown name.
    """
    global _is_used
    check_name("backend", backend, REQUESTS)
    _is_used = True
    previous, _thread.requested = _thread.requested, backend
    try:
        yield
    finally:
        _thread.requested = previous


def current() -> str | None:
    """Returns the backend of this thread's innermost `attention_backend()`, or None outside of such blocks."""
    return _thread.requested if _is_used else None


def requested_backend(backend: str | None) -> str:
    """Returns the request of a call with this `backend` argument."""
    if backend is not None:
        check_name("backend", backend, REQUESTS)
        return backend
    return _thread.requested or _value("FLEXATTN_BACKEND")
