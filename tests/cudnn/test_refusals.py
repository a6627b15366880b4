"""Memory of a failed build: cuDNN's own answer is kept for calls of the same shapes, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("cudnn", reason="nvidia-cudnn-frontend is not installed")

import cudnn

from flexattn.build_ahead import explain_built
from flexattn.dispatch import cudnn_backend
from flexattn.dispatch.explain import explain
from flexattn.dispatch.select import BackendError, RuntimeFailure, forget_rejections
from flexattn.dispatch.spec import AttentionSpec, Operands
from flexattn.kernels_cudnn import attention
from flexattn.kernels_cudnn.plans import PLANS
from flexattn.testing import make_call, make_inputs
from tests.api.test_support import on_h200
from tests.support.cudnn_builds import pretended_builds


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[BaseException | None], list[Any]]]:
    monkeypatch.delenv("FLEXATTN_PLANS", raising=False)
    monkeypatch.delenv("FLEXATTN_BACKEND", raising=False)
    monkeypatch.setattr(attention, "_reads_ragged_padding", lambda: False)  # this asks the library for its version
    monkeypatch.setattr(cudnn_backend, "unsupported", lambda spec, direction: None)

    def forget() -> None:
        forget_rejections()
        PLANS.clear()
        cudnn_backend.exact_shapes.clear()

    forget()
    with pretended_builds(monkeypatch) as build:
        yield build
    forget()


def call_of(length: int = 200, batch: int = 2, fmt: str = "bshd") -> tuple[AttentionSpec, Operands]:
    lengths = [length] * batch
    sizes = {"num_heads": 2, "head_dim_qk": 64, "head_dim_v": 64, "dtype": torch.bfloat16}
    spec, x = make_call(make_inputs(fmt, lengths_q=lengths, lengths_kv=lengths, **sizes), return_max_logit=False)
    return on_h200(spec, x)._replace(needs_grad=False), x


NO_ANSWERS = [
    MemoryError("no host memory"),
    torch.OutOfMemoryError("CUDA out of memory"),
    OSError("libnvrtc.so.13: cannot open shared object file"),
    RuntimeError("argument not found"),
    cudnn.cudnnGraphNotSupportedError("CUDNN_STATUS_NOT_SUPPORTED_RUNTIME_PREREQUISITE_MISSING"),
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("error", NO_ANSWERS, ids=lambda e: type(e).__name__)
def test_what_is_no_answer_is_raised_and_nothing_is_kept_of_it(build, error) -> None:
    build(error)
    for ask in (lambda: cudnn_backend.prepare(*call_of(), "forward"), lambda: explain_built(call_of()[0], "cudnn", call_of()[1])):
        with pytest.raises(type(error)) as e:
            ask()
        assert e.value is error
    assert explain(call_of()[0], "cudnn", call_of()[1]).failures == ()
    build(None)
    assert explain_built(call_of()[0], "cudnn", call_of()[1]).is_final


def test_cudnns_answer_holds_for_the_shapes_that_it_was_given_for(build) -> None:
    asked = build(cudnn.cudnnGraphNotSupportedError("no engine"))
    for _ in range(2):
        with pytest.raises(BackendError, match="no engine"):
            explain_built(call_of()[0], "cudnn", call_of()[1])
    assert len(asked) == 1
    build(None)
    assert explain_built(call_of(199)[0], "cudnn", call_of(199)[1]).is_final, "another length, of the same class"
    assert explain_built(call_of(batch=3)[0], "cudnn", call_of(batch=3)[1]).is_final
    with pytest.raises(BackendError, match="no engine"):
        explain(call_of()[0], "cudnn", call_of()[1])


def test_packed_calls_of_other_batches_are_asked_apart(build) -> None:
    """Their q, k and v look alike: 1200 tokens, up to 300 in a sequence."""
    asked = build(None)
    four, twelve = call_of(300, 4, "thd"), call_of(100, 12, "thd")
    twelve = (four[0], twelve[1]._replace(max_seqlen_q=300, max_seqlen_kv=300))
    assert four[1].q.shape == twelve[1].q.shape
    cudnn_backend.prepare(*four, "forward")
    cudnn_backend.prepare(*four, "forward")
    assert len(asked) == 1
    build(cudnn.cudnnGraphNotSupportedError("no engine"))
    with pytest.raises(RuntimeFailure, match="no engine"):
        cudnn_backend.prepare(*twelve, "forward")


def test_one_call_forgets_every_refusal(build, monkeypatch) -> None:
    build(cudnn.cudnnGraphNotSupportedError("no engine"))
    with pytest.raises(BackendError):
        explain_built(call_of()[0], "cudnn", call_of()[1])
    cudnn_backend.library_error.cache_clear()
    monkeypatch.setattr(cudnn, "backend_version", lambda: 1)
    assert "older than" in str(cudnn_backend.library_error())
    monkeypatch.setattr(cudnn, "backend_version", lambda: 92400)
    assert "older than" in str(cudnn_backend.library_error()), "looked for once"
    build(None)
    forget_rejections()
    assert cudnn_backend.library_error() is None
    assert explain_built(call_of()[0], "cudnn", call_of()[1]).is_final
