"""The older GPU whose code this process runs on the GPU at hand, if any. `runtime/other_target.py` sets it."""

from __future__ import annotations

from typing import NamedTuple

# Capabilities that can be imitated, and the capability that Triton compiles for. Kernels of 12.0 use the instructions of 8.9, but
# PTX of 12.0 is not assembled for an older GPU.
COMPILED_FOR = {80: 80, 86: 86, 89: 89, 120: 89}


class Imitation(NamedTuple):
    """The arguments of `imitate`, and the GPU that runs the code."""

    capability: int
    real: int

    @property
    def code(self) -> str:
        return f"sm_{COMPILED_FOR[self.capability]} code" + (" with tiles of sm_120" if self.capability == 120 else "")


current: Imitation | None = None  # set by `other_target.install`


def imitated() -> int | None:
    """Returns the capability that this process imitates; None if it imitates none."""
    return None if current is None else current.capability


def label(device: str) -> str:
    """Returns a name for results on a device: "sm_80 code on an NVIDIA H100"; without an imitation, the device's name."""
    if current is None:
        return device
    article = "an" if device[:1] in "AEFHILMNORSXaeiou" else "a"
    return f"{current.code} on {article} {device}"


def code_key() -> str:
    """Returns the part of the key of compiled code that depends on the imitation; "" without one."""
    return "" if current is None else f"{current.code} on sm_{current.real}"
