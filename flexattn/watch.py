"""FLEXATTN_LOG and FLEXATTN_DUMP: a log of all calls of a process, and files with the inputs of calls that fail.

`start` replaces the operators' implementations, which are looked up in each call: a process without these variables pays nothing.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import flexattn
from flexattn import ops
from flexattn.call_log import CallLog
from flexattn.dispatch import options
from flexattn.dispatch.describe import describe
from flexattn.dispatch.neutral import is_capturing, neutral_state
from flexattn.dispatch.spec import AttentionSpec, Direction, Operands
from flexattn.forks import fork_safe

OPERATORS = ("attention_forward", "attention_forward_out", "attention_backward")

logger = logging.getLogger("flexattn")
_lock = fork_safe(threading.Lock())
_number = 0  # dumped calls so far, for the names of files
_running = threading.local()  # whether this thread is inside of a call, whose operators may call each other


def start() -> None:
    """Begins to log and to dump what the two variables ask for, for the rest of the process."""
    options.check_all()
    level, folder = options.log_level(), options.dump_directory()
    if level != "off" and not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(level.upper())
    if folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name in OPERATORS:
            attribute = f"{name}_implementation"
            setattr(ops, attribute, _dumping(name, getattr(ops, attribute), Path(folder)))
    log = CallLog()
    ops.observers = (*ops.observers, functools.partial(_observe, log))  # which also keeps calls from being replayed
    options.keep_calls(False)


def _observe(log: CallLog, direction: Direction, spec: AttentionSpec, request: str, x: Operands) -> None:
    """Logs a run: at level info the first of each call, at level debug every one."""
    if logger.isEnabledFor(logging.INFO):
        count = len(log.calls)
        log.observe(direction, spec, request, x)
        for call in log.calls[count:]:
            logger.info("%s: %s", call.text, call.runs_on)
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("%s: %s", direction, describe(spec, x))


def _dumping(operator: str, implementation: Callable[..., object], folder: Path) -> Callable[..., object]:
    @functools.wraps(implementation)
    def run(*arguments: object) -> object:
        device = next(t.device for t in arguments if isinstance(t, Tensor))
        if device.type == "meta" or is_capturing(device) or getattr(_running, "is_inside", False):
            return implementation(*arguments)
        with _file_of(operator, arguments, device, folder):
            results = implementation(*arguments)
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # an error of a kernel comes late otherwise
            return results

    return run


@contextmanager
def _file_of(operator: str, arguments: tuple[object, ...], device: torch.device, folder: Path) -> Iterator[None]:
    """Writes a call's inputs before a block that runs it, and removes the file if the block succeeds."""
    global _number
    with _lock:
        _number += 1
        path = folder / f"flexattn-{os.getpid()}-{_number}.pt"
    with neutral_state(), torch.no_grad():
        saved = {
            "operator": operator,
            "arguments": copied(arguments, "cpu"),
            "device": str(device),
            "variables": {name: os.environ[name] for name in options.VARIABLES if name in os.environ},
            "version": flexattn.__version__,
            "torch": str(torch.__version__),
            "error": "the process ended during the call",
        }
        torch.save(saved, path)
    _running.is_inside = True
    try:
        yield
    except Exception as error:
        saved["error"] = f"{type(error).__name__}: {error}"
        torch.save(saved, path)
        text = f"the inputs of this call are in {path}; `python -m flexattn replay {path}` runs it again"
        logger.error(text)
        if hasattr(error, "add_note"):  # Python 3.11 and later
            error.add_note(text)
        raise
    finally:
        _running.is_inside = False
    path.unlink()


def copied(value: Any, device: torch.device | str) -> Any:
    """Returns an operator's argument with copies of its tensors on a device, in the same strides and without other memory."""
    if isinstance(value, Tensor):
        ends = [(size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True)]
        span = 1 + sum(ends) if value.numel() else 0
        flat = value.detach().as_strided((span,), (1,), value.storage_offset())
        return torch.empty(span, dtype=value.dtype, device=device).copy_(flat).as_strided(value.shape, value.stride())
    return [copied(x, device) for x in value] if isinstance(value, (list, tuple)) else value
