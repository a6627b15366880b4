"""Which backend runs a spec, why, and what the others lack."""

from __future__ import annotations

from typing import NamedTuple

from flexattn.dispatch.select import Decision, select, standing
from flexattn.dispatch.spec import BACKENDS, AttentionSpec, Direction


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
                *_section(self.spec, "forward", self.forward),
                *(
                    _section(self.spec, "backward", self.backward)
                    if self.backward
                    else ["backward: not needed, no input requires a gradient"]
                ),
            ]
        )


def explain(spec: AttentionSpec, request: str) -> Explanation:
    """What `select` decides for a spec in each direction; raises the BackendError that the call would raise."""
    return Explanation(
        spec, request, select(spec, "forward", request), select(spec, "backward", request) if spec.needs_grad else None
    )


def describe(spec: AttentionSpec) -> str:
    """One line with what sets a spec apart from plain attention."""
    formats = spec.q_format if spec.q_format == spec.kv_format else f"{spec.q_format}_2{spec.kv_format}"
    heads = f"{spec.num_heads} heads" if spec.group_size == 1 else f"{spec.num_heads} heads over {spec.num_heads_kv}"
    head_dim = str(spec.head_dim_qk) if spec.head_dim_qk == spec.head_dim_v else f"{spec.head_dim_qk}/{spec.head_dim_v}"
    left, right, bottom_right = spec.band
    parts = [formats, str(spec.dtype).removeprefix("torch."), heads, f"head dim {head_dim}"]
    if spec.padding:
        parts.append("padding")
    if left is not None or right is not None:
        sides = ", ".join("open" if side is None else str(side) for side in (left, right))
        parts.append(f"band ({sides}) on the {'bottom-right' if bottom_right else 'top-left'} diagonal")
    if spec.bias_type != "no_bias":
        parts.append(spec.bias_type)
    if spec.softmax_type != "vanilla":
        parts.append(f"{spec.softmax_type} softmax")
    parts += [name for name in ("softcap", "dropout", "return_max_logit", "deterministic") if getattr(spec, name)]
    capability = "" if spec.capability is None else f" sm_{spec.capability[0]}{spec.capability[1]}"
    return ", ".join([*parts, spec.device_type + capability])


def _section(spec: AttentionSpec, direction: Direction, decision: Decision) -> list[str]:
    refusals = dict(decision.rejected)
    others = [name for name in BACKENDS if name != decision.backend]
    return [
        f"{direction}: {decision.backend}",
        f"  why: {decision.why}",
        *(f"  not {name}: {refusals.get(name) or standing(name, spec, direction)}" for name in others),
    ]
