"""On a GPU: cuDNN's forward over pages against the reference in fp64, and in a CUDA graph."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cudnn", reason="nvidia-cudnn-frontend is not installed")

from flexattn import attention
from flexattn.dispatch import cudnn_backend
from flexattn.testing import check_close, reference_attention
from tests.cudnn.test_pages import CALLS, arguments, call_of, int32
from tests.support.pages import LAYOUTS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and torch.cuda.is_available() is False")


def on_gpu(given: dict[str, Any]) -> dict[str, Any]:
    """The same call on a GPU; views of one storage, such as pages side by side, stay views."""
    return {name: t.cuda() if isinstance(t, Tensor) and name not in ("k", "v") else t for name, t in given.items()} | {
        name: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda").copy_(t)
        for name, t in given.items()
        if name in ("k", "v")
    }


def check(**given: Any) -> None:
    if cudnn_backend.device_error("cuda", torch.cuda.get_device_capability()):
        pytest.skip("cuDNN is not to be had")
    spec, x = call_of(**given)
    results = attention(**on_gpu(given), return_lse=True, backend="cudnn")
    exact, same = (reference_attention(spec, x, dtype=dtype) for dtype in (torch.float64, torch.bfloat16))
    for name, got, want, budget in zip(("out", "lse", "max_logit"), results, exact, same, strict=False):
        check_close(name, got.cpu(), want, budget)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "thd"])
@pytest.mark.parametrize("name", CALLS)
def test_cudnn_over_pages(name: str, packed: bool) -> None:
    check(**arguments(packed=packed, **CALLS[name]))


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "thd"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", [1, 8, 64, 256])
def test_cudnn_over_pages_of_all_sizes(page_size: int, layout: str, packed: bool) -> None:
    check(**arguments(page_size, layout, packed))


def test_cudnn_over_pages_in_a_graph() -> None:
    """Tables and lengths change between replays, and so do a table's entries past the keys."""
    if cudnn_backend.device_error("cuda", torch.cuda.get_device_capability()):
        pytest.skip("cuDNN is not to be had")
    given = on_gpu(arguments(max_seqlen_kv=304))
    given["k"], given["v"] = (given[name].nan_to_num(0.5) for name in ("k", "v"))

    def run() -> Tensor:
        return attention(**given, backend="cudnn")  # type: ignore[return-value]

    run()
    torch.cuda.synchronize()
    gc.collect()  # drops plans of other tests: unloading a module invalidates a capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for lengths in ((17, 300, 0, 129, 1), (0, 0, 1, 304, 2)):
        given["seqused_kv"].copy_(int32(*lengths))
        given["page_table"].copy_(given["page_table"].roll(1, 0))
        given["page_table"][2, 5:] = 2147480000
        graph.replay()
        assert torch.equal(out, attention(**given, backend="cudnn"))
