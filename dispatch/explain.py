"""The backend that runs a spec, the reason, and the reasons against the other backends."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from flexattn.dispatch import options, triton_second_order
from flexattn.dispatch.describe import describe, versions
from flexattn.dispatch.heuristics import facts_of
from flexattn.dispatch.select import OWN_DROPOUT, Decision, Failures, backend_module, failures_of, reasons, select
from flexattn.dispatch.spec import AttentionSpec, Direction, Operands
from flexattn.dispatch.triton_backend import choice_of

if TYPE_CHECKING:
    from flexattn.kernels_triton.families import Choice


class Explanation(NamedTuple):
    """The result of `flexattn.explain`: print it, print its `details`, or read the decisions."""

    spec: AttentionSpec
    request: str
    forward: Decision
    backward: Decision | None  # None: the call asks for no gradient
    # The Triton backend's choice among its kernels, if it runs the direction and the call's tensors are known
    forward_kernels: Choice | None = None
    backward_kernels: Choice | None = None
    failures: Failures = ()  # failed calls of the same shapes, by backend
    # The reason if a direction may still move to another backend; None: it cannot
    forward_provisional: str | None = None
    backward_provisional: str | None = None
    is_built: bool = False  # the kernels or plans were built for the answer
    second_order: str | None = None  # what computes tangents and second derivatives; None: the call has none
    statistics: str | None = None  # the kernels or operations behind return_aux; None: the call needs none beside its forward

    @property
    def is_final(self) -> bool:
        """True if the call will run as explained, and no build that has not been tried yet can change it."""
        return self.forward_provisional is None and self.backward_provisional is None

    @property
    def runs_on(self) -> str:
        """The backend of each direction and the kernels of Triton: "triton / sm_90 (forward), triton / sm_90 fused (backward)"."""
        forward, backward = (self.runs("forward"), self.runs("backward")) if self.backward else (self.runs("forward"), None)
        if forward == backward:
            return f"{forward} (forward and backward)"
        return f"{forward} (forward)" + (f", {backward} (backward)" if backward else "")

    def runs(self, direction: Direction) -> str:
        """Returns the backend of one direction, with the kernels if it is Triton: "triton / sm_90"."""
        (name,) = (part.runs_on(" / ") for part in self._parts() if part.direction == direction)
        return name

    @property
    def details(self) -> str:
        """The whole explanation: the reason against each other backend and kernel family, the rule, tiles, and versions."""
        lines = [f"runs on: {self.runs_on}", f"{describe(self.spec)}; backend={self.request!r}", f"with {versions()}"]
        for part in self._parts():
            is_built = self.is_built and part.spec is self.spec
            lines += [f"{part.direction}: {part.runs_on()}", *(f"  {line}" for line in part.details(self.failures, is_built))]
        if self.backward is None:
            lines.append("backward: not needed, no input requires a gradient")
        lines += [] if self.second_order is None else [f"tangents and second derivatives: {self.second_order}"]
        lines += [] if self.statistics is None else [f"statistics of the weights: {self.statistics}"]
        return "\n".join(lines)

    def __str__(self) -> str:
        request = "" if self.request == "auto" else f"; backend={self.request!r}"
        found = {part.direction: part.reasons() for part in self._parts()}
        shared = [line for line in found["forward"] if line in found.get("backward", found["forward"])]
        single = [
            line.replace(":", f" ({direction}):", 1) for direction, lines in found.items() for line in lines if line not in shared
        ]
        return "\n".join([f"runs on: {self.runs_on}", f"call: {describe(self.spec)}{request}", *shared, *single])

    def _parts(self) -> list[_Part]:
        spec, parts = self.spec, [_Part("forward", self.spec, self.forward, self.forward_kernels, self.forward_provisional)]
        if self.backward is not None:
            kernels, provisional = self.backward_kernels, self.backward_provisional
            parts.append(_Part("backward", spec.for_backward(), self.backward, kernels, provisional))
        return parts


class _Part(NamedTuple):
    """The answer for one direction."""

    direction: Direction
    spec: AttentionSpec
    decision: Decision
    kernels: Choice | None
    provisional: str | None

    def runs_on(self, form: str = "") -> str:
        """Returns "triton (sm_90)", or "triton / sm_90" if `form` is the separator."""
        name = self.decision.backend
        if self.kernels is None:
            return name
        return f"{name}{form}{self.kernels.family.name}" if form else f"{name} ({self.kernels.family.name})"

    def reasons(self) -> list[str]:
        """Returns the reason for the backend and the kernels, and the reasons against earlier ones."""
        decision, kernels = self.decision, self.kernels
        lines = [f"{decision.backend}: {decision.why}", *self.notes(False)]
        lines += [f"not {name}: {reason}" for name, reason in decision.rejected]
        if kernels is None:
            return lines
        lines.append(f"{kernels.family.name}: {kernels.why}")
        major, minor = self.spec.capability or (0, 0)
        is_portable = not kernels.family.capabilities
        return lines + (_rejected(kernels, f"sm_{major}{minor}") if is_portable else [])

    def details(self, failures: Failures, is_built: bool) -> list[str]:
        why, *others = reasons(self.spec, self.direction, self.decision, failures)
        kernels, lines = self.kernels, [why, *self.notes(is_built)]
        if kernels is not None:
            rule, tile_rule = ("" if rule is None else f"; rule: {rule}" for rule in (kernels.rule, kernels.tile_rule))
            lines += [f"{kernels.family.name}: {kernels.why}{rule}", *_rejected(kernels), f"tile: {kernels.blocks}{tile_rule}"]
            lines += _splits(kernels)
        return lines + others

    def notes(self, is_built: bool) -> list[str]:
        """Returns whether the answer is final, and whether results of such a call were checked."""
        backend = backend_module(self.decision.backend)
        unproved = None if backend.SUPPORT_IS_FINAL else backend.not_run_yet(self.spec)
        final = ["final: what runs it is built"] if is_built else []
        notes = (f"provisional: {self.provisional}" if self.provisional else None, unproved, self._faster_elsewhere())
        return [*(final if not self.provisional else []), *filter(None, notes)]

    def _faster_elsewhere(self) -> str | None:
        """Returns a warning if PyTorch's own attention was measured to be faster than the chosen kernels for such a call."""
        if self.kernels is None:
            return None
        is_mma = self.kernels.family.name.startswith("mma.sync")
        if self.kernels.family.capabilities and not is_mma:
            return None
        from flexattn.kernels_triton.common.crossovers import deciding

        rule = deciding("sdpa beside mma.sync" if is_mma else "sdpa", facts_of(self.spec, self.direction))
        if rule is None:
            return None
        return (
            f"slower than SDPA: PyTorch's FlashAttention-2 was {rule.gain:.2f} times as fast "
            f"in a run of sm_80 code on a newer GPU ({', '.join(rule.files)})"
        )


def explain(spec: AttentionSpec, request: str, x: Operands | None = None) -> Explanation:
    """Returns the decision of `select` in each direction, and the kernels that run these operands.

    Raises the errors of the call. A BackendError of the backward comes first, because the call checks the backward before it runs
    anything. A ValueError names an environment variable with a wrong value.
    """
    options.check_all()
    failures = () if x is None else failures_of(x)
    backward = select(spec.for_backward(), "backward", request, failures) if spec.needs_grad else None
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
        second_order=None if x is None else _second_order(spec, x, forward),
    )


def _second_order(spec: AttentionSpec, x: Operands, forward: Decision) -> str | None:
    """Returns what computes tangents and second derivatives of a call, or None if it has none."""
    if spec.fp8 is not None or spec.kv_dtype is not None or spec.is_part or x.page_table is not None:
        return None
    if spec.dropout and forward.backend in OWN_DROPOUT:
        return None
    if forward.backend != "triton":
        return "torch operations"
    if reason := triton_second_order.unsupported(spec, x, spec.needs_bias_grad):
        return f"torch operations, because {reason}"
    reason = triton_second_order.joint_unsupported_on_device(spec, x)
    return "triton" if reason else "triton, with a jvp and its forward in one kernel"


def directions_of(spec: AttentionSpec) -> tuple[Direction, ...]:
    """Returns the directions that a call needs."""
    return ("forward", "backward") if spec.needs_grad else ("forward",)


def _provisional(spec: AttentionSpec, x: Operands | None, direction: Direction, decision: Decision | None) -> str | None:
    """Returns the reason if another backend may still run the call; None: the choice is final."""
    if decision is None or (backend := backend_module(decision.backend)).SUPPORT_IS_FINAL:
        return None
    if x is None:
        return f"{decision.backend} answers for shapes, which a spec does not have; give explain the call's q, k and v"
    if direction == "backward" and spec.for_backward() is not spec:
        return f"the forward makes its operands, so that {decision.backend} is asked when it runs"
    return backend.provisional(spec, x, direction)


def _rejected(kernels: Choice, prefix: str = "") -> list[str]:
    """Returns a line for each reason against families whose names have the prefix; several in a row may share a reason."""
    by_reason = groupby((pair for pair in kernels.rejected if pair[0].startswith(prefix)), lambda pair: pair[1])
    return [f"not {' or '.join(name for name, _ in pairs)}: {reason}" for reason, pairs in by_reason]


def _splits(kernels: Choice) -> list[str]:
    """Returns a line about the splits of the keys if queries are few."""
    if kernels.splits is None or not kernels.splits.why:
        return []
    count = kernels.splits.count
    how = {0: "split by their lengths", 1: "not split"}.get(count, f"in {count} splits")
    return [f"keys {how}: {kernels.splits.why}"]
