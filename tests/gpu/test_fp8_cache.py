"""On a GPU: few queries over caches in FP8, against eager in fp64, and their bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from flexattn import attention
from flexattn.testing import check_close
from tests.support.fp8_caches import SCALES, Case, exact, make_case

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and torch.cuda.is_available() is False")

LENGTHS = (3000, 0, 1, 700, 64, 4096)
FP16, E5M2 = torch.float16, torch.float8_e5m2
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "packed": {"queries": (1, 3, 2, 0, 1, 3)},
    "sinks": {"softmax_type": "learnable", "softmax_offset": torch.linspace(-1, 3, 8), "queries": 2},
    "window, softcap": {"window_size": (200, 0), "softcap": 5.0, "queries": 4},
    "ALiBi": {"bias_type": "alibi"},
    "score_mod": {"score_mod": lambda score, b, h, i, j: score - 0.001 * (h + 1) * (i - j).abs()},
    "mask_mod": {"mask_mod": lambda b, h, i, j: (i + j) % 3 != b % 3},
    "8 queries": {"queries": 8},
    "12 heads": {"heads": (12, 2)},
}


def on_gpu(lengths: Sequence[int] = LENGTHS, **given: Any) -> Case:
    case = make_case(lengths=lengths, **given)
    arguments, dense = ({name: x.cuda() if isinstance(x, Tensor) else x for name, x in part.items()} for part in case)
    return Case(arguments, dense)


def run(case: Case) -> tuple[Tensor, Tensor]:
    out, lse = attention(**case.arguments, return_lse=True, backend="triton")
    return out, lse


def check(case: Case) -> None:
    wanted, budget = (exact(case, dtype) for dtype in (torch.float64, case.arguments["q"].dtype))
    for name, got, want, same in zip(("out", "lse"), run(case), wanted, budget, strict=True):
        check_close(name, got, want, same)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256), (64, 128)], ids=str)
@pytest.mark.parametrize("page_size", [0, 1, 3, 16, 64])
@pytest.mark.parametrize("scales", SCALES)
def test_scales_pages_and_head_dims(scales: str, page_size: int, dims: tuple[int, int]) -> None:
    more = {"dtype": FP16, "fp8": E5M2} if page_size in (1, 64) else {}
    check(on_gpu(scales=scales, page_size=page_size, dims=dims, **more))


@pytest.mark.parametrize("name", FEATURES)
def test_features(name: str) -> None:
    check(on_gpu(**FEATURES[name]))


def test_thirty_repeats_have_the_same_bits() -> None:
    case = on_gpu(scales="token and head")
    first = run(case)
    for _ in range(30):
        assert all(torch.equal(got, want) for got, want in zip(run(case), first, strict=True))


def test_a_graph_replays_with_other_lengths() -> None:
    case = on_gpu()
    lengths = case.arguments["seqused_kv"]
    run(case)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(case)
    for shift in range(1, len(LENGTHS)):
        lengths.copy_(torch.tensor(LENGTHS).roll(shift).clamp(max=torch.tensor(LENGTHS)))
        graph.replay()
        assert all(torch.equal(got, want) for got, want in zip(captured, run(case), strict=True))
