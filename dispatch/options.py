"""The environment variables. No other file of the package reads one, except for TransformerEngine's variables in `integrations.te`.

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
from typing import Any

from flexattn.dispatch.spec import REQUESTS as REQUESTS

VARIABLES = (
    "FLEXATTN_BACKEND",
    "FLEXATTN_CHECK",
    "FLEXATTN_CANARY",
    "FLEXATTN_HOPPER",
    "FLEXATTN_BATCH_INVARIANT",
    "FLEXATTN_PLANS",
    "FLEXATTN_KERNELS",
    "FLEXATTN_PEER_MEMORY",
    "FLEXATTN_AS",
)
HOPPER = ("auto", "always", "never")
PEER_MEMORY = ("auto", "never")


def backend() -> str | None:
    """Returns FLEXATTN_BACKEND, or None if it is unset or empty. Raises ValueError if the value is not accepted."""
    return _choice("FLEXATTN_BACKEND", REQUESTS)


def hopper() -> str:
    """Returns FLEXATTN_HOPPER. Raises ValueError if the value is not accepted."""
    return _choice("FLEXATTN_HOPPER", HOPPER) or "auto"


def check_values() -> bool:
    """Returns whether FLEXATTN_CHECK is 1. Raises ValueError if it is neither 0 nor 1."""
    return _flag("FLEXATTN_CHECK")


def are_lengths_checked(device_type: str) -> bool:
    """Returns whether calls on such a device check that lengths fit their tensors. By default, only calls on a CPU do."""
    return check_values() or (device_type == "cpu" and not os.environ.get("FLEXATTN_CHECK"))


def canary() -> bool:
    """Returns whether FLEXATTN_CANARY is 1. Raises ValueError if it is neither 0 nor 1."""
    return _flag("FLEXATTN_CANARY")


def batch_invariant() -> bool:
    """Returns whether FLEXATTN_BATCH_INVARIANT is 1. Raises ValueError if it is neither 0 nor 1."""
    return _flag("FLEXATTN_BATCH_INVARIANT")


def peer_memory() -> str:
    """Returns FLEXATTN_PEER_MEMORY. Raises ValueError if the value is not accepted."""
    return _choice("FLEXATTN_PEER_MEMORY", PEER_MEMORY) or "auto"


def imitated_target() -> str | None:
    """Returns FLEXATTN_AS, or None if it is unset or empty."""
    return os.environ.get("FLEXATTN_AS") or None


def plan_directory() -> str | None:
    """Returns FLEXATTN_PLANS, or None if it is unset or empty."""
    return os.environ.get("FLEXATTN_PLANS") or None


def kernel_directory() -> str | None:
    """Returns FLEXATTN_KERNELS, or None if it is unset or empty."""
    return os.environ.get("FLEXATTN_KERNELS") or None


_checked: tuple[Any, ...] | None = None  # the last values of all variables that were accepted.


def check_all() -> None:
    """Raises a ValueError for the first variable with a value that is not accepted. It is fast if no variable changed."""
    global _checked
    data = getattr(os.environ, "_data", os.environ)
    values = tuple(map(data.get, _KEYS))
    if values != _checked:
        for read in (backend, check_values, canary, hopper, batch_invariant, peer_memory):
            read()
        _checked = values


_KEYS = tuple(
    getattr(os.environ, "encodekey", str)(name)
    for name in ("FLEXATTN_CANARY", *(name for name in VARIABLES if name != "FLEXATTN_CANARY"))
)


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
_when_unset: tuple[Any, ...] | None = _UNSET


def keep_calls(wanted: bool) -> None:
    """Sets whether calls may be kept and replayed. If not, `snapshot` returns None."""
    global _when_unset
    _when_unset = _UNSET if wanted else None


def _choice(variable: str, accepted: tuple[str, ...]) -> str | None:
    value = os.environ.get(variable) or None
    if value is not None and value not in accepted:
        raise ValueError(f"the environment variable {variable} is {value!r}; accepted: {', '.join(accepted)}")
    return value


def _flag(variable: str) -> bool:
    value = os.environ.get(variable) or "0"
    if value not in ("0", "1"):
        raise ValueError(f"the environment variable {variable} is {value!r}; accepted: 0, 1")
    return value == "1"
