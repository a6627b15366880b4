"""The environment variables, all of them: nothing else in the package reads one.

| variable           | values                           | meaning                                                              |
|--------------------|----------------------------------|----------------------------------------------------------------------|
| `FLEXATTN_BACKEND` | auto (default), triton, cudnn,   | the backend where neither the call's `backend=` nor                  |
|                    | eager                            | `attention_backend()` names one                                      |
| `FLEXATTN_CHECK`   | 0 (default), 1                   | 1 also checks the values of `cu_seqlens`, at the cost of one         |
|                    |                                  | transfer from the device (a synchronisation) in each forward         |

They are read on each call, so a change takes effect at once; a function under `torch.compile` keeps the `FLEXATTN_BACKEND` it
was compiled with (`attention_backend()` is guarded, and recompiles).
"""

from __future__ import annotations

import os

from flexattn.dispatch.spec import BACKENDS

REQUESTS = ("auto", *BACKENDS)


def backend() -> str | None:
    """FLEXATTN_BACKEND, or None where it is unset or empty; a ValueError names the variable where it holds anything else."""
    value = os.environ.get("FLEXATTN_BACKEND") or None
    if value is not None and value not in REQUESTS:
        raise ValueError(f"the environment variable FLEXATTN_BACKEND is {value!r}; accepted: {', '.join(REQUESTS)}")
    return value


def check_values() -> bool:
    """Whether FLEXATTN_CHECK is 1; a ValueError names the variable where it is neither 0 nor 1."""
    value = os.environ.get("FLEXATTN_CHECK") or "0"
    if value not in ("0", "1"):
        raise ValueError(f"the environment variable FLEXATTN_CHECK is {value!r}; accepted: 0, 1")
    return value == "1"
