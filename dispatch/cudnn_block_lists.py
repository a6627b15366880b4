"""Lists of blocks on cuDNN: the calls that its block-sparse attention supports, and the step from a spec to its launchers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from flexattn.dispatch.select import RuntimeFailure
from flexattn.dispatch.spec import (
    AttentionSpec,
    Direction,
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
SIZES = (64, 128)  # tokens of a block, for queries and keys alike.
HEAD_DIMS = (64, 96, 128)
BACKWARD_HEAD_DIM = 128
MOST_HEADS = 65535  # in all batch entries: a dim of a grid.
BOTH: tuple[Direction, ...] = ("forward", "backward")
_GET_FRONTEND = f"pip install 'nvidia-cudnn-frontend>={'.'.join(map(str, OLDEST_FRONTEND))}'"


class _Rule(NamedTuple):
    """A condition for a refusal, and the rest of the sentence "cuDNN's block-sparse attention ..."."""

    directions: tuple[Direction, ...]
    applies: Callable[[AttentionSpec], bool]
    reason: Callable[[AttentionSpec], str]


def _rule(applies: Callable[[AttentionSpec], bool], reason: str, *directions: Direction) -> _Rule:
    return _Rule(directions or BOTH, applies, lambda spec: reason.format(spec=spec))


_TRITON = "; use backend='triton'"
RULES = (
    _rule(lambda spec: spec.capability != (9, 0), "is untested on GPUs other than those of compute capability 9.0" + _TRITON),
    _rule(
        lambda spec: spec.mods is not None,
        "has no block masks with a mask_mod or score_mod; pass the mask as a mask_mod only, or use backend='triton'",
    ),
    _rule(
        lambda spec: spec.block_size not in [(size, size) for size in SIZES],
        "supports blocks of 64 x 64 and 128 x 128 tokens, not {spec.block_size[0]} x {spec.block_size[1]}; pass kv_block_size=64 "
        "or 128, or use backend='triton'",
    ),
    _rule(lambda spec: spec.fp8 is not None or spec.kv_dtype is not None, "is not supported here in FP8" + _TRITON),
    _rule(
        lambda spec: spec.dtype not in (torch.float16, torch.bfloat16),
        "supports fp16 and bf16, not {spec.dtype}; cast q, k and v, or use backend='triton'",
    ),
    _rule(lambda spec: bool(spec.page_size), "has no pages (page_table)" + _TRITON),
    _rule(
        lambda spec: spec.padding or "thd" in (spec.q_format, spec.kv_format),
        "has no lengths (cu_seqlens, seqused)" + _TRITON,
    ),
    _rule(
        lambda spec: spec.band.left is not None or spec.band.right is not None,
        "has no causal mask or window (attn_mask_type, window_size)" + _TRITON,
    ),
    _rule(lambda spec: spec.bias_type != "no_bias", "has no bias and no alibi_slopes" + _TRITON),
    _rule(lambda spec: spec.softmax_type != "vanilla", "has no sink (softmax_type)" + _TRITON),
    _rule(lambda spec: spec.softcap, "has no softcap" + _TRITON),
    _rule(lambda spec: spec.dropout, "has no dropout (dropout_p)" + _TRITON),
    _rule(lambda spec: spec.return_max_logit, "returns no max_logit (return_max_logit)" + _TRITON, "forward"),
    _rule(lambda spec: spec.batch_invariant, "gives no guarantee of batch_invariant" + _TRITON, "forward"),
    _rule(lambda spec: spec.results.fp32_out, "returns out in 16 bits" + _TRITON, "forward"),
    _rule(
        lambda spec: not {spec.head_dim_qk, spec.head_dim_v}.issubset(HEAD_DIMS),
        "supports head dims of 64, 96 and 128, not {spec.head_dim_qk} and {spec.head_dim_v}; pad with zeros, or "
        "use backend='triton'",
        "forward",
    ),
    _rule(
        lambda spec: {spec.head_dim_qk, spec.head_dim_v} != {BACKWARD_HEAD_DIM},
        "has gradients for head dims of 128, not {spec.head_dim_qk} and {spec.head_dim_v}; pad with zeros, or use backend='triton'",
        "backward",
    ),
    _rule(lambda spec: spec.dtype is not torch.bfloat16, "has gradients in bf16 alone, not in {spec.dtype}" + _TRITON, "backward"),
    _rule(
        lambda spec: spec.group_size != 1,
        "has gradients for as many key heads as query heads, not for {spec.num_heads} over {spec.num_heads_kv}" + _TRITON,
        "backward",
    ),
    _rule(lambda spec: spec.deterministic, "adds gradients in any order (deterministic)" + _TRITON, "backward"),
    _rule(
        lambda spec: spec.needs_lse_grad, "takes no gradient of lse; leave lse out of the loss, or use backend='triton'", "backward"
    ),
    _rule(lambda spec: spec.results.fp32 != "none", "returns gradients in 16 bits (fp32_gradients)" + _TRITON, "backward"),
)


def rule_error(spec: AttentionSpec, direction: Direction) -> str | None:
    """Returns why a spec with a block mask is refused, or None if it is not."""
    for rule in RULES:
        if direction in rule.directions and rule.applies(spec):
            return f"cuDNN's block-sparse attention {rule.reason(spec)}"
    return None


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
