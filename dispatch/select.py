"""The choice of a backend: a pure, cached function from a spec and a request to a decision with its reason.

A backend may fail at run time. The cache of failures is bounded and thread-safe. If a backend refuses a call, the reason is cached
for calls of the same shapes, because other shapes may run. If the canary finds a wrong result, the reason is cached for the spec,
in all shapes.
"""

from __future__ import annotations

import functools
import importlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, cast

from torch import Tensor

from flexattn.dispatch.spec import BACKENDS, AttentionSpec, Direction, Gradients, Operands
from flexattn.forks import fork_safe

_log = logging.getLogger(__name__)

Request = tuple[str, AttentionSpec, Direction]  # a backend, and the spec and direction to run on it.
Failures = tuple[tuple[Request, str], ...]  # failed requests, with the reasons.

_CAPACITY = 1024
_by_request: OrderedDict[Request, str] = OrderedDict()
_by_shape: OrderedDict[Hashable, Failures] = OrderedDict()
_lock = fork_safe(threading.Lock())

_ON = {"cuda": "a GPU", "cpu": "a CPU"}
OWN_DROPOUT = {"cudnn"}  # backends that drop other weights than the rest for the same rng_state.


class Backend(Protocol):
    """Functions of each module `<name>_backend`. All but `unsupported` raise RuntimeFailure if a call cannot run after all.

    Only backends whose support is not final have `cannot_build`, `provisional` and `not_run_yet`.
    """

    SUPPORT_IS_FINAL: bool  # if False, building a kernel may fail although `unsupported` returns None.

    def unsupported(self, spec: AttentionSpec, direction: Direction) -> str | None:
        """Returns why the backend cannot run the spec, with an alternative, or None if it can."""

    def forward(self, spec: AttentionSpec, x: Operands) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (out, lse, max_logit), laid out as by `spec.empty_outputs`."""

    def backward(
        self, spec: AttentionSpec, x: Operands, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
    ) -> Gradients: ...

    def prepare(self, spec: AttentionSpec, x: Operands, direction: Direction) -> None:
        """Builds or compiles the kernels of the call, unless they are built."""

    def cannot_build(self, spec: AttentionSpec, x: Operands) -> str | None:
        """Returns why `prepare` cannot build for the spec's GPU, or None if it can. The tensors may be on another device."""

    def provisional(self, spec: AttentionSpec, x: Operands, direction: Direction) -> str | None:
        """Returns the open question about a call and how to settle it, or None if the call is known to run."""

    def not_run_yet(self, spec: AttentionSpec) -> str | None:
        """Returns the untested part of a spec, or None if results on the spec's kind of GPU were checked."""

    def can_be_recorded(self) -> bool:
        """Returns whether the backend runs only torch's ops and the launches that `watched` reports."""

    def watched(self, watcher: Callable[..., None]) -> AbstractContextManager[None]:
        """Calls `watcher` inside the block for each launch (kernel, programs, arguments) or plan (plan, buffers)."""


class Decision(NamedTuple):
    backend: str
    why: str
    rejected: tuple[tuple[str, str], ...]  # (backend, reason) of each backend that was tried first and cannot run the call.
    warning: str | None  # a warning to show once, if "auto" selected a much slower backend.


class BackendError(RuntimeError):
    """No backend can run a call, or the requested one cannot. The text has each backend's reason and an alternative."""


class RuntimeFailure(Exception):
    """Raised by a backend if it cannot run a call for which its `unsupported` returned None. Nothing is written before."""


def remember_call(x: Operands, request: Request, reason: str) -> None:
    """Caches a failure for calls whose operands have the same shapes."""
    shape = shape_of(x)
    with _lock:
        before = dict(_by_shape.get(shape, ()))
        _keep(_by_shape, shape, (*{**before, request: reason}.items(),))


def failures_of(x: Operands) -> Failures:
    """Returns the failures, in both directions, of calls whose operands have the same shapes."""
    return _by_shape.get(shape_of(x), ()) if _by_shape else ()


def _keep(kept: OrderedDict[Any, Any], key: Hashable, value: object) -> None:
    kept[key] = value
    kept.move_to_end(key)
    while len(kept) > _CAPACITY:
        kept.popitem(last=False)


# Plans and kernels do not depend on the values of these inputs. If a call leaves out rng_state, its plan is the same.
_RUN_TIME = ("softmax_scale", "softcap", "mod_numbers", "rng_state")


def shape_of(x: Operands) -> Hashable:
    """Returns everything that a plan may depend on, apart from the spec."""
    return tuple(_look(value) for name, value in x._asdict().items() if name not in _RUN_TIME)


def _look(value: object) -> Hashable:
    if isinstance(value, Tensor):
        offset = value.storage_offset() * value.element_size() % 16
        return value.shape, value.stride(), value.dtype, value.device, offset
    return tuple(map(_look, value)) if isinstance(value, (tuple, list)) else value


@functools.cache
def backend_module(name: str) -> Backend:
    """Returns the backend's module. It is imported at the first use, so that a missing dependency never breaks another backend."""
    return cast(Backend, importlib.import_module(f"flexattn.dispatch.{name}_backend"))


class _Select:
    """`select`, a cached function. Its generation changes when the cache is cleared, so that callers can drop old decisions."""

    def __init__(self) -> None:
        self.generation = 0  # the number of times that the cache was cleared.
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
    """Returns the backend that runs `spec` in `direction`. It builds nothing.

    request: "auto" or a backend's name. "auto" selects the first backend in the order of `heuristics` that can run the spec. A
        named backend never falls back.
    failures: earlier failures of backends on calls of the same shapes (`failures_of`).
    generation: a number that changes when the cache is cleared, so that decisions from before are not returned after.

    Raises:
        BackendError: no backend can run the spec, or the named one cannot.
    """
    decision = _first_that_can(spec, direction, failures) if request == "auto" else _only(request, spec, direction, failures)
    if _log.isEnabledFor(logging.INFO):
        from flexattn.dispatch.describe import describe  # imported here, because few processes log it.

        lines = [f"{direction} of {describe(spec)}: {decision.backend}", *reasons(spec, direction, decision, failures)]
        _log.info("%s", "\n  ".join(lines))
    return decision


def mark_unsupported(name: str, spec: AttentionSpec, direction: Direction, reason: str) -> None:
    """Makes `select` refuse a backend for `spec` from now on, in any shapes."""
    with _lock:
        _keep(_by_request, (name, spec, direction), reason)
    select.cache_clear()


def forget_rejections() -> None:
    """Forgets every refusal: failures at run time, cuDNN's refusals of plans, and missing installations.

    Call it after an installation was changed, or in tests. Plans and kernels that are built stay.
    """
    from flexattn.dispatch.describe import versions

    with _lock:
        _by_request.clear()
        _by_shape.clear()
    versions.cache_clear()
    backend_module("cudnn").forget_failures()  # type: ignore[attr-defined]
    select.cache_clear()


def unsupported(name: str, spec: AttentionSpec, direction: Direction, request: str, failures: Failures = ()) -> str | None:
    """Returns why a backend cannot run `spec`, or None if it can.

    The reason is a rule of the backend, an earlier failure, or dropout, which needs one backend for both directions.
    """
    reason = backend_module(name).unsupported(spec, direction) or _by_request.get((name, spec, direction))
    reason = reason or dict(failures).get((name, spec, direction))
    if reason is not None or not spec.dropout:
        return reason
    if direction == "forward":
        if name in OWN_DROPOUT and spec.needs_grad and (reason := unsupported(name, spec, "backward", name, failures)):
            return f"{name} draws its own dropout, and its backward, which must drop the same weights, cannot run: {reason}"
        return None
    forward_spec = spec._replace(needs_lse_grad=False, is_part=False)
    before = request if request != "auto" else select(forward_spec, "forward", "auto", failures).backend
    if name != before and not OWN_DROPOUT.isdisjoint((name, before)):
        return f"the forward runs on {before}, and {name} drops other weights; name one backend for both, or leave out dropout"
    return None


def answer_of(name: str, spec: AttentionSpec, direction: Direction, failures: Failures = ()) -> str:
    """Returns why a backend that was not selected cannot run the spec, or how to request it."""
    if reason := unsupported(name, spec, direction, name, failures):
        return reason
    backend = backend_module(name)
    so_far = "" if backend.SUPPORT_IS_FINAL else ", as far as is known before its kernel is built"
    untested = None if backend.SUPPORT_IS_FINAL else backend.not_run_yet(spec)
    return f"can run it{so_far}{f' ({untested})' if untested else ''}; ask for it with backend={name!r}"


def reasons(spec: AttentionSpec, direction: Direction, decision: Decision, failures: Failures = ()) -> list[str]:
    """Returns a line with the reason of a decision, and a line for each other backend."""
    rejected = dict(decision.rejected)
    others = [name for name in BACKENDS if name != decision.backend]
    answers = (f"not {name}: {rejected.get(name) or answer_of(name, spec, direction, failures)}" for name in others)
    return [f"why: {decision.why}", *answers]


def _first_that_can(spec: AttentionSpec, direction: Direction, failures: Failures) -> Decision:
    from flexattn.dispatch.heuristics import preference  # imported here, because a call that names its backend does not need it.

    preferred = preference(spec, direction)
    rejected: list[tuple[str, str]] = []
    for name in preferred.order:
        reason = unsupported(name, spec, direction, "auto", failures)
        if reason is None:
            source = f" ({preferred.source})" if preferred.source else ""
            why = f"the first choice on {_ON.get(spec.device_type, spec.device_type)}: {preferred.why}{source}"
            if rejected:  # the reason of the order is about a backend that cannot run the call.
                why = f"the first of {', '.join(preferred.order)} that can run the call"
            reasons_of_path = rejected or [("why", preferred.why)]
            return Decision(name, why, tuple(rejected), _slow_path_warning(spec, direction, name, reasons_of_path))
        rejected.append((name, reason))
    rejected += [(name, answer_of(name, spec, direction, failures)) for name in BACKENDS if name not in preferred.order]
    raise BackendError(_error_text(f"no backend can run the {direction} of this call", spec, rejected))


def _only(request: str, spec: AttentionSpec, direction: Direction, failures: Failures) -> Decision:
    reason = unsupported(request, spec, direction, request, failures)
    if reason is None:
        return Decision(request, "requested by name", (), None)
    head = f"backend={request!r} cannot run the {direction} of this call, and a backend requested by name never falls back"
    others = [(name, answer_of(name, spec, direction, failures)) for name in BACKENDS if name != request]
    raise BackendError(_error_text(head, spec, [(request, reason), *others]))


def _slow_path_warning(spec: AttentionSpec, direction: Direction, chosen: str, rejected: list[tuple[str, str]]) -> str | None:
    if chosen != "eager" or spec.device_type != "cuda":
        return None
    head = f"the {direction} runs on the eager backend, much slower than a fused kernel (backend='eager' silences this warning):"
    return _lines(head, rejected)


def _error_text(head: str, spec: AttentionSpec, answers: list[tuple[str, str]]) -> str:
    from flexattn.dispatch.describe import describe, versions  # imported here, because few processes raise this error.

    return _lines(f"{head}:", [*answers, ("the call", describe(spec)), ("with", versions())])


def _lines(head: str, answers: list[tuple[str, str]]) -> str:
    return "\n".join([head, *(f"  {name}: {answer}" for name, answer in answers)])
