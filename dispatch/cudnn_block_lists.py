"""Lists of blocks on cuDNN: the calls that its block-sparse attention supports, and the step from a spec to its launchers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor

from flexattn.dispatch.select import RuntimeFailure
from flexattn.dispatch.spec import (
    AttentionSpec,
    Gradients,
    Operands,
    as_bshd,
    dqkv_of,
    empty_gradients,
    empty_outputs,
    from_bshd,
)

if TYPE_CHECKING:
    from flexattn.kernels_cudnn.block_lists import Problem

OLDEST_FRONTEND = (1, 32)
RUN_WITH = ((1, 32),)  # frontends with checked results, on an NVIDIA H200.
MOST_HEADS = 65535  # in all batch entries: a dim of a grid.
_GET_FRONTEND = f"pip install 'nvidia-cudnn-frontend>={'.'.join(map(str, OLDEST_FRONTEND))}'"


@functools.cache
def frontend_error() -> str | None:
    """Returns why the frontend has no block-sparse attention, with an installation command, or None if it has."""
    import cudnn

    if _frontend_version() < OLDEST_FRONTEND:
        return f"the cuDNN frontend is version {cudnn.__version__}, and its block-sparse attention needs 1.32; {_GET_FRONTEND}"
    try:
        from cudnn.block_sparse_attention import block_sparse_attention_forward  # noqa: F401
    except MemoryError:
        raise
    except Exception as e:  # a broken installation may raise any error.
        return f"cuDNN's block-sparse attention cannot be imported ({type(e).__name__}: {e}); {_GET_FRONTEND}"
    return None


def not_run_yet() -> str | None:
    """Returns the frontend whose results were not checked, or None if they were."""
    if frontend_error() is not None or _frontend_version() in RUN_WITH:
        return None
    return f"with cuDNN's frontend {'.'.join(map(str, _frontend_version()))}"


def _frontend_version() -> tuple[int, ...]:
    import cudnn

    return tuple(int(part) for part in cudnn.__version__.split(".")[:2])


def shape_error(spec: AttentionSpec, x: Operands) -> str | None:
    """Returns why the shapes of a call are refused, with an alternative, or None if they are not. It reads no data."""
    batch, queries, heads = as_bshd(x.q, spec.q_format).shape[:3]
    if spec.block_size == (64, 64) and queries % 64:
        return (
            f"q has {queries} queries, and cuDNN's kernel for blocks of 64 needs a multiple of 64; pad q, pass blocks of 128 "
            "tokens, or use backend='triton'"
        )
    if batch * heads > MOST_HEADS:
        return (
            f"q has {batch * heads} heads in {batch} batch entries, and cuDNN's block-sparse attention supports up to "
            f"{MOST_HEADS}; split the batch, or use backend='triton'"
        )
    return None


def provisional(spec: AttentionSpec, x: Operands) -> str:
    """Returns the open question about a call. The frontend has no function that only compiles."""
    if reason := shape_error(spec, x):
        return f"it will be refused when the call first runs: {reason}"
    return "the frontend compiles its kernels when the call first runs, and may refuse it"


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except NotImplementedError as e:  # the frontend raises it before it launches.
        raise RuntimeFailure(f"cuDNN's frontend refuses it: {e}") from e


def forward(spec: AttentionSpec, x: Operands) -> tuple[Tensor, Tensor, Tensor]:
    from flexattn.kernels_cudnn.block_lists import forward as launch

    problem = _problem(spec, x)
    with _refusals():
        written, lse = launch(problem)
    written = from_bshd(written, spec.q_format)
    if x.out is None and not spec.results.out and written.is_contiguous():
        return written, lse, x.q.new_empty(0, dtype=lse.dtype)
    out, _, max_logit = empty_outputs(spec, x)
    return out.copy_(written), lse, max_logit


def backward(spec: AttentionSpec, x: Operands, out: Tensor, lse: Tensor, dout: Tensor) -> Gradients:
    from flexattn.kernels_cudnn.block_lists import backward as launch

    problem, gradients = _problem(spec, x), empty_gradients(spec, x)
    dq, dk, dv = dqkv_of(spec, gradients)
    views = as_bshd(dq, spec.q_format), as_bshd(dk, spec.kv_format), as_bshd(dv, spec.kv_format)
    with _refusals():
        launch(problem, as_bshd(out, spec.q_format), lse, as_bshd(dout, spec.q_format), views)
    return gradients


def _problem(spec: AttentionSpec, x: Operands) -> Problem:
    """Returns the launchers' problem. Raises RuntimeFailure if its shapes are refused."""
    from flexattn.kernels_cudnn.block_lists import Problem

    if reason := shape_error(spec, x):
        raise RuntimeFailure(reason)
    assert spec.block_size is not None
    q, k, v = as_bshd(x.q, spec.q_format), as_bshd(x.k, spec.kv_format), as_bshd(x.v, spec.kv_format)
    layout = "bhsd" if spec.q_format == "bhsd" else "bshd"
    return Problem(q, k, v, x.block_mask[:4], spec.block_size[0], x.softmax_scale, layout)
