"""Host side of backwards in two kernels, for sm_90 and for mma.sync: the arguments that all of their kernels have."""

from __future__ import annotations

from typing import Any

from flexattn.kernels_triton.common.preprocess import Tiled
from flexattn.kernels_triton.common.problem import Problem
from flexattn.kernels_triton.gluon.backward_blocks import LargeLse


def shared_arguments(problem: Problem, tiled: Tiled) -> dict[str, Any]:
    """Returns the arguments that all kernels of a two-kernel backward have, by name."""
    x = problem
    return {
        "tiles_of_statistics": tiled.tiles,
        "large": LargeLse(is_any_ptr=tiled.large.is_any, lse_ptr=tiled.large.lse),
        "lengths_q": x.lengths_q,
        "lengths_kv": x.lengths_kv,
        "band": x.band,
        "scores": x.scores,
    }
