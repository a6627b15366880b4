"""The backend that runs a spec, why, and what the others lack."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from flexattn.dispatch import options, runtime_failures
from flexattn.dispatch.describe import describe, versions
from flexattn.dispatch.runtime_failures import Failures
from flexattn.dispatch.select import Decision, reasons, select
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
    failures: Failures = ()  # of calls of these very shapes, by backends that were asked to run one

    def __str__(self) -> str:
        return "\n".join(
            [
                f"{describe(self.spec)}; backend={self.request!r}",
                f"with {versions()}",
                *_section(self.spec, "forward", self.forward, self.forward_kernels, self.failures),
                *(
                    _section(self.spec.of_backward(), "backward", self.backward, self.backward_kernels, self.failures)
                    if self.backward
                    else ["backward: not needed, no input requires a gradient"]
                ),
            ]
        )


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

    return Explanation(spec, request, forward, backward, kernels("forward", forward), kernels("backward", backward), failures)


def _section(
    spec: AttentionSpec, direction: Direction, decision: Decision, kernels: Choice | None, failures: Failures
) -> list[str]:
    lines = reasons(spec, direction, decision, failures)
    if kernels is None:
        return [f"{direction}: {decision.backend}", *(f"  {line}" for line in lines)]
    name = kernels.family.name
    lines[1:1] = [f"{name}: {kernels.why}", *_rejected(kernels), f"tile: {kernels.blocks}", *_splits(kernels)]
    return [f"{direction}: {decision.backend} ({name})", *(f"  {line}" for line in lines)]


def _rejected(kernels: Choice) -> list[str]:
    """Returns a line for each reason against families, which may be several that follow one another."""
    by_reason = groupby(kernels.rejected, lambda pair: pair[1])
    return [f"not {' or '.join(name for name, _ in pairs)}: {reason}" for reason, pairs in by_reason]


def _splits(kernels: Choice) -> list[str]:
    """Returns what there is to say about few queries."""
    if kernels.splits is None or not kernels.splits.why:
        return []
    count = kernels.splits.count
    return [f"keys {'not split' if count == 1 else f'in {count} splits'}: {kernels.splits.why}"]
