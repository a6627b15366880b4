"""The backend that runs a spec, why, and what the others lack."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from flexattn.dispatch import options, runtime_failures
from flexattn.dispatch.describe import describe, versions
from flexattn.dispatch.runtime_failures import Failures
from flexattn.dispatch.select import Decision, backend_module, reasons, select
from flexattn.dispatch.spec import AttentionSpec, Direction, Operands
from flexattn.dispatch.triton_backend import choice_of

if TYPE_CHECKING:
    from flexattn.kernels_triton.families import Choice


class Explanation(NamedTuple):
    """The result of `flexattn.explain`; print it, or read the decisions."""

    spec: AttentionSpec
    request: str
    forward: Decision
    backward: Decision | None  # None: the call asks for no gradient
    # The Triton backend's choice among its kernels, where it runs a direction of a call whose tensors are known.
    forward_kernels: Choice | None = None
    backward_kernels: Choice | None = None
    failures: Failures = ()  # failures of calls of these very shapes, by the backends that were asked to run one
    # What is not known yet and may move a direction to another backend; None where nothing is.
    forward_provisional: str | None = None
    backward_provisional: str | None = None
    is_built: bool = False  # what runs the call was built for the answer

    @property
    def is_final(self) -> bool:
        """True where the call will run as said: no build that has not been tried yet can change it."""
        return self.forward_provisional is None and self.backward_provisional is None

    def __str__(self) -> str:
        return "\n".join(
            [
                f"{describe(self.spec)}; backend={self.request!r}",
                f"with {versions()}",
                *self._section("forward", self.forward, self.forward_kernels, self.forward_provisional),
                *(
                    self._section("backward", self.backward, self.backward_kernels, self.backward_provisional)
                    if self.backward
                    else ["backward: not needed, no input requires a gradient"]
                ),
            ]
        )

    def _section(self, direction: Direction, decision: Decision, kernels: Choice | None, provisional: str | None) -> list[str]:
        spec = self.spec if direction == "forward" else self.spec.of_backward()
        lines = reasons(spec, direction, decision, self.failures)
        if kernels is not None:
            lines[1:1] = [
                f"{kernels.family.name}: {kernels.why}",
                *_rejected(kernels),
                f"tile: {kernels.blocks}",
                *_splits(kernels),
            ]
        backend = backend_module(decision.backend)
        if not backend.SUPPORT_IS_FINAL and (unproved := backend.not_run_yet(spec)):
            lines.insert(1, unproved)
        if provisional is not None:
            lines.insert(1, f"provisional: {provisional}")
        elif self.is_built and spec is self.spec:
            lines.insert(1, "final: what runs it is built")
        name = decision.backend if kernels is None else f"{decision.backend} ({kernels.family.name})"
        return [f"{direction}: {name}", *(f"  {line}" for line in lines)]


def explain(spec: AttentionSpec, request: str, x: Operands | None = None) -> Explanation:
    """Returns what `select` decides for a spec in each direction, and the kernels that run these operands.

    Raises what the call would raise: the BackendError, of the backward first as the call asks that before it runs anything, or the
    ValueError that names an environment variable.
    """
    options.check_all()
    failures = () if x is None else runtime_failures.of_call(x)
    backward = select(spec.of_backward(), "backward", request, failures) if spec.needs_grad else None
    forward = select(spec, "forward", request, failures)

    def kernels(direction: Direction, decision: Decision | None) -> Choice | None:
        is_triton = decision is not None and decision.backend == "triton"
        return choice_of(spec, x, direction) if x is not None and is_triton else None

    return Explanation(
        spec,
        request,
        forward,
        backward,
        forward_kernels=kernels("forward", forward),
        backward_kernels=kernels("backward", backward),
        failures=failures,
        forward_provisional=_provisional(spec, x, "forward", forward),
        backward_provisional=_provisional(spec, x, "backward", backward),
    )


def directions_of(spec: AttentionSpec) -> tuple[Direction, ...]:
    """Returns the directions that a call needs."""
    return ("forward", "backward") if spec.needs_grad else ("forward",)


def _provisional(spec: AttentionSpec, x: Operands | None, direction: Direction, decision: Decision | None) -> str | None:
    """Returns what is not known yet of the backend that was decided on; None where it will run the call."""
    if decision is None or (backend := backend_module(decision.backend)).SUPPORT_IS_FINAL:
        return None
    if x is None:
        return f"{decision.backend} answers for shapes, which a spec does not have; give explain the call's q, k and v"
    if direction == "backward" and spec.of_backward() is not spec:
        return f"the forward makes its operands, so that {decision.backend} is asked when it runs"
    return backend.provisional(spec, x, direction)


def _rejected(kernels: Choice) -> list[str]:
    """Returns a line for each reason against families, which may be several that follow one another."""
    by_reason = groupby(kernels.rejected, lambda pair: pair[1])
    return [f"not {' or '.join(name for name, _ in pairs)}: {reason}" for reason, pairs in by_reason]


def _splits(kernels: Choice) -> list[str]:
    """Returns what there is to say about few queries."""
    if kernels.splits is None or not kernels.splits.why:
        return []
    count = kernels.splits.count
    how = {0: "split by their lengths", 1: "not split"}.get(count, f"in {count} splits")
    return [f"keys {how}: {kernels.splits.why}"]
