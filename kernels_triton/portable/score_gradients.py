"""The gradients that come through the scores beside those of q and k: of a bias, and of what the mods capture."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from flexattn.kernels_triton.common.preprocess import Statistics, row_statistics
from flexattn.kernels_triton.common.problem import Problem
from flexattn.kernels_triton.portable.bias_gradient import bias_gradient
from flexattn.kernels_triton.portable.capture_gradient import capture_gradients


def bias_and_capture_gradients(
    problem: Problem,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    dbias: Tensor | None,
    dcaptures: Sequence[Tensor],
    deterministic: bool,
) -> None:
    """The part of `backward.attention_backward` that is left where other kernels made dq, dk and dv; not for fp32."""
    if dbias is not None or dcaptures:
        statistics = row_statistics(problem, out, lse, dout, dlse, None)
        score_gradients(problem, statistics, dout, dlse, dbias, dcaptures, deterministic)


def score_gradients(
    problem: Problem,
    statistics: Statistics,
    dout: Tensor,
    dlse: Tensor | None,
    dbias: Tensor | None,
    dcaptures: Sequence[Tensor],
    deterministic: bool,
) -> None:
    """Write dbias, unless it is None, and dcaptures, from the statistics that the dq kernel wrote."""
    if dbias is not None:
        bias_gradient(problem, statistics, dout, dlse, dbias)
    if dcaptures:
        capture_gradients(problem, statistics, dout, dcaptures, deterministic)
