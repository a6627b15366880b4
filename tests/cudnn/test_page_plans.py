"""Real cuDNN plans over pages for sm_90, built without a GPU, and cuDNN's reasons against page sizes that are refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support import cudnn_stub

if reason := ("a GPU is here: plans are built for it" if torch.cuda.is_available() else cudnn_stub.missing()):
    pytest.skip(reason, allow_module_level=True)

from flexattn.dispatch import cudnn_backend
from flexattn.dispatch.select import RuntimeFailure
from flexattn.kernels_cudnn import attention, plans
from flexattn.kernels_cudnn.plans import PLANS
from tests.cudnn.test_pages import CALLS, arguments, call_of, forget


@pytest.fixture(scope="module", autouse=True)
def h200() -> Iterator[None]:
    cudnn_stub.load()
    with plans.without_device(cudnn_stub.H200):
        yield


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("FLEXATTN_PLANS", raising=False)
    monkeypatch.setattr(attention, "_reads_no_page_padding", lambda: True)
    PLANS.clear()
    forget()
    yield
    PLANS.clear()
    forget()


BUILT: dict[str, dict[str, Any]] = {
    **CALLS,
    "thd": {"packed": True},
    "one token a page": {"page_size": 1},
    "heads before tokens": {"layout": "bhsd"},
}


@pytest.mark.parametrize(
    "name", [name if name in ("thd", "one token a page") else pytest.param(name, marks=pytest.mark.slow) for name in BUILT]
)
def test_plans_build(name: str) -> None:
    spec, x = call_of(**arguments(**BUILT[name]))
    assert cudnn_backend.unsupported(spec, "forward") is None
    cudnn_backend.prepare(spec, x, "forward")
    (plan,) = PLANS.inspect()
    assert plan.sdpa.pages is not None


@pytest.mark.parametrize("page_size", [3, 48])
def test_other_page_sizes_are_cudnns_own_refusal(page_size: int) -> None:
    spec, x = call_of(**arguments(page_size))
    assert "power of two" in str(cudnn_backend.unsupported(spec, "forward"))
    with pytest.raises(RuntimeFailure, match="power of 2"):
        cudnn_backend.prepare(spec, x, "forward")
