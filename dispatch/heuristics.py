"""Which backend "auto" prefers where several can run a call, as data."""

from __future__ import annotations

from typing import NamedTuple

from flexattn.dispatch.spec import AttentionSpec, Direction


class Preference(NamedTuple):
    device_type: str
    order: tuple[str, ...]
    why: str
    source: str | None  # the file in bench/results that it rests on; None: nothing is measured yet


PREFERENCES = (
    Preference(
        "cuda", ("triton", "cudnn", "eager"), "the Triton kernels take every feature, and no measurement speaks against them", None
    ),
    Preference(
        "cpu", ("eager", "triton", "cudnn"), "on a CPU the Triton kernels only run interpreted, which is for checking them", None
    ),
)


def preference(spec: AttentionSpec, direction: Direction) -> Preference:
    """The row for a spec; each direction has its own once there are measurements to tell them apart."""
    return next((row for row in PREFERENCES if row.device_type == spec.device_type), PREFERENCES[0])
