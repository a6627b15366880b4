"""The gradients that pass through the scores besides those of q and k: of a bias, and of the mods' captures."""

from __future__ import annotations

from flexattn.kernels_triton.common.arguments import Statistics
from flexattn.kernels_triton.common.preprocess import row_statistics
from flexattn.kernels_triton.common.problem import Backward
from flexattn.kernels_triton.portable import shared_bias_gradient as by_rows
from flexattn.kernels_triton.portable.bias_gradient import bias_gradient
from flexattn.kernels_triton.portable.capture_gradient import capture_gradients


def bias_and_capture_gradients(call: Backward) -> None:
    """Writes the rest of a backward if other kernels computed dq, dk, dv and dsoftmax_offset; not for fp32."""
    if call.dbias is not None or call.dcaptures:
        score_gradients(call, row_statistics(call._replace(dsoftmax_offset=None)))


def score_gradients(call: Backward, statistics: Statistics) -> None:
    """Writes dbias, unless it is None, and dcaptures, from the statistics that the dq kernel wrote."""
    if call.dbias is not None and by_rows.unsupported(call.problem) is None:
        by_rows.shared_bias_gradient(call.problem, statistics, call.dout, call.dbias)
    elif call.dbias is not None:
        bias_gradient(call.problem, statistics, call.dout, call.dlse, call.dbias)
    if call.dcaptures:
        capture_gradients(call.problem, statistics, call.dout, call.dcaptures, call.deterministic)
