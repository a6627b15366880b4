"""Functions that torch.compile leaves alone."""

from __future__ import annotations

from typing import Any

import torch


def runs_as_it_is(function: Any) -> None:
    """Keeps torch.compile away from a function and all that it calls, behind a graph break, at no cost.

    torch.compiler.disable would cost a microsecond in each call.
    """
    dynamo = torch._C._dynamo.eval_frame
    skip = dynamo._FrameExecStrategy(dynamo._FrameAction.SKIP, dynamo._FrameAction.SKIP)
    dynamo.set_code_exec_strategy(function.__code__, skip)
