"""The choice of a backend: pure, cached, from a spec and a request to a decision that says why."""

from __future__ import annotations

import functools
import importlib
import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol, cast

from torch import Tensor

from flexattn.dispatch import runtime_failures
from flexattn.dispatch.runtime_failures import Failures
from flexattn.dispatch.spec import BACKENDS, AttentionSpec, Direction, Gradients, Operands
from flexattn.forks import fork_safe

_log = logging.getLogger(__name__)

_ON = {"cuda": "a GPU", "cpu": "a CPU"}
OWN_DROPOUT = {"cudnn"}  # backends that drop other weights than the rest do for the same rng_state


class Backend(Protocol):
    """Functions of each module `<name>_backend`. All but `unsupported` raise RuntimeFailure where a call does not run after all.

    `cannot_build`, `provisional` and `not_run_yet` are those of backends whose support is not final.
    """

    SUPPORT_IS_FINAL: bool  # False: where `unsupported` has nothing against a call, building its kernel may

    def unsupported(self, spec: AttentionSpec, direction: Direction) -> str | None:
        """None where it can run the spec, else the reason and what to change."""

    def forward(self, spec: AttentionSpec, x: Operands) -> tuple[Tensor, Tensor, Tensor]:
        """(out, lse, max_logit), laid out as `spec.empty_outputs` does."""

    def backward(
        self, spec: AttentionSpec, x: Operands, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
    ) -> Gradients: ...

    def prepare(self, spec: AttentionSpec, x: Operands, direction: Direction) -> None:
        """Builds or compiles what the call will run, where that is not done yet."""

    def cannot_build(self, spec: AttentionSpec, x: Operands) -> str | None:
        """None where `prepare` can build for the spec's GPU, else why: tensors may be elsewhere, to ask about a GPU alone."""

    def provisional(self, spec: AttentionSpec, x: Operands, direction: Direction) -> str | None:
        """None where the call is known to run, else what is not known and how to learn it."""

    def not_run_yet(self, spec: AttentionSpec) -> str | None:
        """None where results on the spec's kind of GPU were checked, else what is not known."""

    def can_be_recorded(self) -> bool:
        """Returns whether all that it does is torch's ops and what `watched` passes on."""

    def watched(self, watcher: Callable[..., None]) -> AbstractContextManager[None]:
        """Inside, `watcher` is called for each launch (kernel, programs, arguments), or each plan that runs (plan, buffers)."""


class Decision(NamedTuple):
    backend: str
    why: str
    rejected: tuple[tuple[str, str], ...]  # (backend, reason) of each one that was tried first and cannot run it
    warning: str | None  # for the user to see once: "auto" had to take a slower class of path


class BackendError(RuntimeError):
    """No backend can run a call, or the one that was asked for cannot; the text gives each backend's reason and what to change."""


@functools.cache
def backend_module(name: str) -> Backend:
    """The backend's module; imported when first asked for, so that one backend's dependencies never break another."""
    return cast(Backend, importlib.import_module(f"flexattn.dispatch.{name}_backend"))


class _Select:
    """`select`, a function with a cache that says when it was emptied: what rests on its decisions is stale then."""

    def __init__(self) -> None:
        self.generation = 0  # how often that was
        self._lock = fork_safe(threading.Lock())

    def __call__(self, spec: AttentionSpec, direction: Direction, request: str, failures: Failures = ()) -> Decision:
        return _decide(spec, direction, request, failures, self.generation)

    def cache_clear(self) -> None:
        with self._lock:
            self.generation += 1
        _decide.cache_clear()


select = _Select()


@functools.lru_cache(maxsize=1024)
def _decide(spec: AttentionSpec, direction: Direction, request: str, failures: Failures, generation: int) -> Decision:
    """The backend that runs `spec` in `direction`, where `request` is "auto" or a backend's name.

    "auto" takes the first in the order of `heuristics` that can run it; a name never falls back. Nothing is built to find out.

    failures: of backends that were asked to run calls of these very shapes (`runtime_failures.of_call`).
    generation: a number that changes when the cache is emptied, so that a thread's decision from before is not found after.

    Raises:
        BackendError: nothing can run it, or the backend asked for cannot.
    """
    decision = _first_that_can(spec, direction, failures) if request == "auto" else _only(request, spec, direction, failures)
    if _log.isEnabledFor(logging.INFO):
        from flexattn.dispatch.describe import describe  # here, as few processes log it

        lines = [f"{direction} of {describe(spec)}: {decision.backend}", *reasons(spec, direction, decision, failures)]
        _log.info("%s", "\n  ".join(lines))
    return decision


def mark_unsupported(name: str, spec: AttentionSpec, direction: Direction, reason: str) -> None:
    """From now on `select` knows that a backend cannot run `spec`, whatever the shapes."""
    runtime_failures.remember(name, spec, direction, reason)
    select.cache_clear()


def forget_rejections() -> None:
    """Forgets every refusal: what failed at run time, what cuDNN answered of its plans, and that it was not to be had.

    For after something was installed or mended, and for tests. Plans and kernels that are built stay.
    """
    from flexattn.dispatch.describe import versions

    runtime_failures.clear()
    versions.cache_clear()
    backend_module("cudnn").forget_failures()  # type: ignore[attr-defined]
    select.cache_clear()


def unsupported(name: str, spec: AttentionSpec, direction: Direction, request: str, failures: Failures = ()) -> str | None:
    """Returns why a backend cannot run `spec`: by its rules, as it failed before, or as dropout ties it to the other direction."""
    reason = backend_module(name).unsupported(spec, direction) or runtime_failures.remembered(name, spec, direction)
    reason = reason or dict(failures).get((name, spec, direction))
    if reason is not None or not spec.dropout:
        return reason
    if direction == "forward":
        if name in OWN_DROPOUT and spec.needs_grad and (reason := unsupported(name, spec, "backward", name, failures)):
            return f"it drops weights of its own, and the backward, which must drop the same, cannot run on it: {reason}"
        return None
    of_forward = spec._replace(needs_lse_grad=False, is_part=False)
    before = request if request != "auto" else select(of_forward, "forward", "auto", failures).backend
    if name != before and not OWN_DROPOUT.isdisjoint((name, before)):
        return f"the forward runs on {before}, and {name} drops other weights; ask for one backend by name, or leave out dropout"
    return None


def answer_of(name: str, spec: AttentionSpec, direction: Direction, failures: Failures = ()) -> str:
    """Returns why a backend that was not chosen cannot run the spec, or how to ask for it."""
    if reason := unsupported(name, spec, direction, name, failures):
        return reason
    backend = backend_module(name)
    so_far = "" if backend.SUPPORT_IS_FINAL else ", as far as is known before its kernel is built"
    unproved = None if backend.SUPPORT_IS_FINAL else backend.not_run_yet(spec)
    return f"can run it{so_far}{f' ({unproved})' if unproved else ''}; ask for it with backend={name!r}"


def reasons(spec: AttentionSpec, direction: Direction, decision: Decision, failures: Failures = ()) -> list[str]:
    """Returns the reason of a decision, and that for each other backend, a line each."""
    rejected = dict(decision.rejected)
    others = [name for name in BACKENDS if name != decision.backend]
    answers = (f"not {name}: {rejected.get(name) or answer_of(name, spec, direction, failures)}" for name in others)
    return [f"why: {decision.why}", *answers]


def _first_that_can(spec: AttentionSpec, direction: Direction, failures: Failures) -> Decision:
    from flexattn.dispatch.heuristics import preference  # here, as a call that names its backend has no use for it

    preferred = preference(spec, direction)
    rejected: list[tuple[str, str]] = []
    for name in preferred.order:
        reason = unsupported(name, spec, direction, "auto", failures)
        if reason is None:
            source = f" ({preferred.source})" if preferred.source else ""
            why = f"the first choice on {_ON.get(spec.device_type, spec.device_type)}: {preferred.why}{source}"
            if rejected:  # the order's reason speaks for one that cannot run it
                why = f"the first of {', '.join(preferred.order)} that can run the call"
            return Decision(name, why, tuple(rejected), _slow_path_warning(spec, direction, name, rejected))
        rejected.append((name, reason))
    rejected += [(name, answer_of(name, spec, direction, failures)) for name in BACKENDS if name not in preferred.order]
    raise BackendError(_error_text(f"no backend can run the {direction} of this call", spec, rejected))


def _only(request: str, spec: AttentionSpec, direction: Direction, failures: Failures) -> Decision:
    reason = unsupported(request, spec, direction, request, failures)
    if reason is None:
        return Decision(request, "requested by name", (), None)
    head = f"backend={request!r} cannot run the {direction} of this call, and a backend asked for by name never falls back"
    others = [(name, answer_of(name, spec, direction, failures)) for name in BACKENDS if name != request]
    raise BackendError(_error_text(head, spec, [(request, reason), *others]))


def _slow_path_warning(spec: AttentionSpec, direction: Direction, chosen: str, rejected: list[tuple[str, str]]) -> str | None:
    if chosen != "eager" or spec.device_type != "cuda":
        return None
    head = f"the {direction} runs on the eager backend, much slower than a fused kernel (backend='eager' asks for it silently):"
    return _lines(head, rejected)


def _error_text(head: str, spec: AttentionSpec, answers: list[tuple[str, str]]) -> str:
    from flexattn.dispatch.describe import describe, versions  # here, as few processes have anything to tell

    return _lines(f"{head}:", [*answers, ("the call", describe(spec)), ("with", versions())])


def _lines(head: str, answers: list[tuple[str, str]]) -> str:
    return "\n".join([head, *(f"  {name}: {answer}" for name, answer in answers)])
