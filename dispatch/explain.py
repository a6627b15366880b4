"""Which backend runs a spec, why, and what the others lack."""

from __future__ import annotations

from typing import NamedTuple

from flexattn.dispatch.describe import describe, versions
from flexattn.dispatch.select import Decision, reasons, select
from flexattn.dispatch.spec import AttentionSpec, Direction


class Explanation(NamedTuple):
    """What `flexattn.explain` returns; print it, or read the decisions."""

    spec: AttentionSpec
    request: str
    forward: Decision
    backward: Decision | None  # None: the call asks for no gradient

    def __str__(self) -> str:
        return "\n".join(
            [
                f"{describe(self.spec)}; backend={self.request!r}",
                f"with {versions()}",
                *_section(self.spec, "forward", self.forward),
                *(
                    _section(self.spec.of_backward(), "backward", self.backward)
                    if self.backward
                    else ["backward: not needed, no input requires a gradient"]
                ),
            ]
        )


def explain(spec: AttentionSpec, request: str) -> Explanation:
    """What `select` decides for a spec in each direction; raises the BackendError that the call would raise."""
    return Explanation(
        spec,
        request,
        select(spec, "forward", request),
        select(spec.of_backward(), "backward", request) if spec.needs_grad else None,
    )


def _section(spec: AttentionSpec, direction: Direction, decision: Decision) -> list[str]:
    return [f"{direction}: {decision.backend}", *(f"  {line}" for line in reasons(spec, direction, decision))]
