"""The choice of a backend: pure, cached, from a spec and a request to a decision that says why."""

from __future__ import annotations

import functools
import importlib
import logging
from typing import NamedTuple, Protocol, cast

from torch import Tensor

from flexattn.dispatch.heuristics import preference
from flexattn.dispatch.spec import BACKENDS, AttentionSpec, Direction, Gradients, Operands

_log = logging.getLogger(__name__)


class Backend(Protocol):
    """What each module `<name>_backend` offers."""

    def support_error(self, spec: AttentionSpec, direction: Direction) -> str | None:
        """None where it can run the spec, else the reason and what to change."""

    def forward(self, spec: AttentionSpec, x: Operands) -> tuple[Tensor, Tensor, Tensor]:
        """(out, lse, max_logit), laid out as `spec.empty_outputs` does."""

    def backward(
        self, spec: AttentionSpec, x: Operands, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
    ) -> Gradients: ...


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


@functools.lru_cache(maxsize=1024)
def select(spec: AttentionSpec, direction: Direction, request: str) -> Decision:
    """The backend that runs `spec` in `direction`, where `request` is "auto" or a backend's name.

    "auto" takes the first in the order of `heuristics` that can run it; a name never falls back.

    Raises:
        BackendError: nothing can run it, or the backend asked for cannot.
    """
    decision = _first_that_can(spec, direction) if request == "auto" else _only(request, spec, direction)
    _log.info("%s: %s, as %s", direction, decision.backend, decision.why)
    for name, reason in decision.rejected:
        _log.debug("%s: not %s: %s", direction, name, reason)
    return decision


def _first_that_can(spec: AttentionSpec, direction: Direction) -> Decision:
    preferred = preference(spec, direction)
    rejected: list[tuple[str, str]] = []
    for name in preferred.order:
        reason = backend_module(name).support_error(spec, direction)
        if reason is None:
            measured = preferred.source or "not measured yet"
            first = "the first" if not rejected else "the first that can run it"
            why = f"{first} in the order {', '.join(preferred.order)} for {spec.device_type}: {preferred.why} ({measured})"
            return Decision(name, why, tuple(rejected), _slow_path_warning(spec, direction, name, rejected))
        rejected.append((name, reason))
    raise BackendError(_lines(f"no backend can run the {direction} of this call:", rejected))


def _only(request: str, spec: AttentionSpec, direction: Direction) -> Decision:
    reason = backend_module(request).support_error(spec, direction)
    if reason is None:
        return Decision(request, "it was asked for by name", (), None)
    head = f"backend={request!r} cannot run the {direction} of this call, and a backend asked for by name never falls back:"
    others = [(name, standing(name, spec, direction)) for name in BACKENDS if name != request]
    raise BackendError(_lines(head, [(request, reason), *others]))


def standing(name: str, spec: AttentionSpec, direction: Direction) -> str:
    """Where a backend stands that was not chosen: that it could run the spec too, or why not."""
    return backend_module(name).support_error(spec, direction) or f"can run it; ask for it with backend={name!r}"


def _slow_path_warning(spec: AttentionSpec, direction: Direction, chosen: str, rejected: list[tuple[str, str]]) -> str | None:
    if chosen != "eager" or spec.device_type != "cuda":
        return None
    head = f"the {direction} runs on the eager backend, much slower than a fused kernel (backend='eager' asks for it silently):"
    return _lines(head, rejected)


def _lines(head: str, reasons: list[tuple[str, str]]) -> str:
    return "\n".join([head, *(f"  {name}: {reason}" for name, reason in reasons)])
