"""A log of the distinct calls of attention that a block of code makes, and of the kernels that run them."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

from flexattn import ops
from flexattn.dispatch import options
from flexattn.dispatch.describe import describe
from flexattn.dispatch.explain import Explanation, explain
from flexattn.dispatch.neutral import neutral_state
from flexattn.dispatch.select import failures_of
from flexattn.dispatch.spec import AttentionSpec, Direction, Operands
from flexattn.forks import fork_safe

_lock = fork_safe(threading.Lock())


@dataclass
class LoggedCall:
    """Calls that read alike in the log; print it for its line."""

    text: str  # format, dtype, shapes, mask and features
    runs_on: str
    explanation: Explanation
    forwards: int = 0
    backwards: int = 0

    def __str__(self) -> str:
        counts = [f"{n} {name}" for n, name in ((self.forwards, "forward"), (self.backwards, "backward")) if n]
        return f"{self.text}: {self.runs_on}; {', '.join(counts)}"


@contextmanager
def explaining(*, file: TextIO | None = None) -> Iterator[list[LoggedCall]]:
    """Prints, when the block ends, one line for each distinct call of attention in it: the call, the kernels, and how often it ran.

    The block's calls skip flexattn's cache of calls, so calls that ran before the block are listed too, and results are the same.
    A warm call outside of such a block costs nothing more. Blocks may be nested; each lists all calls within it.

    The log has the calls of all threads: those of `attention`, of the functions and modules built on it, and of compiled models,
    whose operators it sees when they run. It does not have calls in a replayed CUDA graph (as in torch.compile's mode
    "reduce-overhead"), nor kernels that XLA launches for `flexattn.jax` on a GPU. Of a model over several ranks it has the calls
    of this process, each with its local tensors. A backward that checkpointing runs counts its second forward.

    Args:
        file: where to print, sys.stdout by default.

    Yields:
        The list of calls so far, in the order of their first appearance, each with its `text`, `runs_on`, `explanation`,
        `forwards` and `backwards`.

    Examples:
        >>> import torch, flexattn
        >>> q = torch.randn(2, 128, 8, 64)
        >>> with flexattn.explaining():
        ...     for _ in range(3):
        ...         _ = flexattn.attention(q, q, q, attn_mask_type="causal")
        bshd, float32, q [2, 128, 8, 64], k and v [2, 128, 8, 64], causal, cpu: eager (forward); 3 forward
    """
    log = CallLog()
    with _lock:
        ops.observers = (*ops.observers, log.observe)
        options.keep_calls(False)
    try:
        yield log.calls
    finally:
        with _lock:
            ops.observers = tuple(observe for observe in ops.observers if observe != log.observe)
            options.keep_calls(not ops.observers)
        for call in log.calls:
            print(call, file=file)


class CallLog:
    def __init__(self) -> None:
        self.calls: list[LoggedCall] = []
        self._by_line: dict[tuple[str, str], LoggedCall] = {}
        self._known: dict[Hashable, LoggedCall] = {}

    def observe(self, direction: Direction, spec: AttentionSpec, request: str, x: Operands) -> None:
        """Counts a direction of a call that ran."""
        shapes = tuple((t.shape, t.stride()) for t in (x.q, x.k, x.v))
        key = (direction, spec, request, shapes, x.max_seqlen_q, x.max_seqlen_kv, failures_of(x))
        with _lock:
            call = self._known.get(key)
        if call is None:
            call = self._new(direction, key, spec, request, x)
        with _lock:
            if direction == "forward":
                call.forwards += 1
            else:
                call.backwards += 1

    def _new(self, direction: Direction, key: Hashable, spec: AttentionSpec, request: str, x: Operands) -> LoggedCall:
        with neutral_state():  # as modes of the caller would see the tensors that this makes
            found = explain(spec, request, x)
        text, runs_on = describe(spec, x), found.runs_on
        with _lock:
            if direction == "backward" and (text, runs_on) not in self._by_line:  # its forward ran before the block, or otherwise
                runs_on = f"{found.runs('backward')} (backward)"
            call = self._by_line.get((text, runs_on))
            if call is None:
                call = self._by_line[text, runs_on] = LoggedCall(text, runs_on, found)
                self.calls.append(call)
            self._known[key] = call
        return call
