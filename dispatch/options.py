"""The environment variables, all of them: nothing else in the package reads one, but for TransformerEngine's in its front door.

| variable           | values                           | meaning                                                              |
|--------------------|----------------------------------|----------------------------------------------------------------------|
| `FLEXATTN_BACKEND` | auto (default), triton, cudnn,   | the backend where neither the call's `backend=` nor                  |
|                    | eager                            | `attention_backend()` names one                                      |
| `FLEXATTN_CHECK`   | 0, 1; unset                      | 1 also checks the values of `cu_seqlens` and of descales, and the    |
|                    |                                  | sizes of logits, each at the cost of a transfer from the device, and |
|                    |                                  | compares one replayed call in a hundred with an unrecorded one;      |
|                    |                                  | unset checks on a CPU alone that lengths fit their tensors; 0: not   |
| `FLEXATTN_CANARY`  | 0 (default), 1                   | 1 checks each backend that is chosen against the reference, on a     |
|                    |                                  | small input, before it runs a spec for the first time                |
| `FLEXATTN_HOPPER`  | auto (default), always, never    | whether the triton backend's kernels for sm_90 run where they are    |
|                    |                                  | measured to be faster, wherever they can, or not at all; `always`    |
|                    |                                  | also runs the kernels for sm_100, which no GPU has run yet           |
| `FLEXATTN_BATCH_INVARIANT` | 0 (default), 1           | 1 makes every forward `batch_invariant`                              |
| `FLEXATTN_PLANS`   | a directory; unset: none         | where cuDNN plans are kept, so that other processes need not build   |
|                    |                                  | them                                                                 |
| `FLEXATTN_KERNELS` | a directory; unset: `flexattn`   | where compiled Triton kernels are looked for and kept; what          |
|                    | in Triton's cache directory      | `python -m flexattn build` wrote elsewhere can be put there          |
| `FLEXATTN_PEER_MEMORY` | auto (default), never        | `never`: what ranks of one host exchange travels in messages of the  |
|                    |                                  | process group, and no memory is shared; the same on all ranks        |

They are read on each call, so a change takes effect at once, and a value that is not accepted is a ValueError in the next call
and the next `explain`, whether that would have used it or not. A function under `torch.compile` keeps the `FLEXATTN_BACKEND` it was
compiled with (`attention_backend()` is guarded, and recompiles).
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
)
HOPPER = ("auto", "always", "never")
PEER_MEMORY = ("auto", "never")


def backend() -> str | None:
    """FLEXATTN_BACKEND, or None where it is unset or empty; a ValueError names the variable where it holds anything else."""
    return _choice("FLEXATTN_BACKEND", REQUESTS)


def hopper() -> str:
    """FLEXATTN_HOPPER; a ValueError names the variable where it holds anything but HOPPER."""
    return _choice("FLEXATTN_HOPPER", HOPPER) or "auto"


def check_values() -> bool:
    """Returns whether FLEXATTN_CHECK is 1; a ValueError names the variable where it is neither 0 nor 1."""
    return _flag("FLEXATTN_CHECK")


def are_lengths_checked(device_type: str) -> bool:
    """Returns whether calls on such a device compare lengths with their tensors: always, never, or by default on a CPU alone."""
    return check_values() or (device_type == "cpu" and not os.environ.get("FLEXATTN_CHECK"))


def canary() -> bool:
    """Returns whether FLEXATTN_CANARY is 1; a ValueError names the variable where it is neither 0 nor 1."""
    return _flag("FLEXATTN_CANARY")


def batch_invariant() -> bool:
    """Returns whether FLEXATTN_BATCH_INVARIANT is 1; a ValueError names the variable where it is neither 0 nor 1."""
    return _flag("FLEXATTN_BATCH_INVARIANT")


def peer_memory() -> str:
    """FLEXATTN_PEER_MEMORY; a ValueError names the variable where it holds anything but PEER_MEMORY."""
    return _choice("FLEXATTN_PEER_MEMORY", PEER_MEMORY) or "auto"


def plan_directory() -> str | None:
    """FLEXATTN_PLANS, or None where it is unset or empty."""
    return os.environ.get("FLEXATTN_PLANS") or None


def kernel_directory() -> str | None:
    """FLEXATTN_KERNELS, or None where it is unset or empty."""
    return os.environ.get("FLEXATTN_KERNELS") or None


_checked: tuple[Any, ...] | None = None  # values that all are accepted


def check_all() -> None:
    """Raises the ValueError that names the first variable whose value is not accepted. Quick where nothing changed."""
    global _checked
    held = getattr(os.environ, "_data", os.environ)
    values = tuple(map(held.get, _KEYS))
    if values != _checked:
        for read in (backend, check_values, canary, hopper, batch_invariant, peer_memory):
            read()
        _checked = values


_KEYS = tuple(
    getattr(os.environ, "encodekey", str)(name)
    for name in ("FLEXATTN_CANARY", *(name for name in VARIABLES if name != "FLEXATTN_CANARY"))
)


def snapshot() -> tuple[Any, ...] | None:
    """The values of all variables, to compare with an earlier one's; None if FLEXATTN_CANARY or `keep_calls` needs each call whole.

    Reads what os.environ keeps them in, where it has that: asking os.environ for one takes half a microsecond.
    """
    held = getattr(os.environ, "_data", os.environ)
    if held.keys().isdisjoint(_KEYS):
        return _when_unset
    if _when_unset is None:
        return None
    values = tuple(map(held.get, _KEYS))
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
