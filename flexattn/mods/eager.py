"""Functions that torch.compile does not trace."""

from __future__ import annotations

from typing import Any

import torch


def runs_as_it_is(function: Any) -> None:
    """Keeps torch.compile from tracing a function and its callees, by a graph break, without cost in eager mode.

    torch.compiler.disable would cost a microsecond in each call.
    """
    dynamo = torch._C._dynamo.eval_frame
    skip = dynamo._FrameExecStrategy(dynamo._FrameAction.SKIP, dynamo._FrameAction.SKIP)
    dynamo.set_code_exec_strategy(function.__code__, skip)
