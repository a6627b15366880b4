"""On a GPU: caches in FP8 at all head dims that are multiples of 8, dense and in pages, with features drawn at random."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch

from tests.gpu.test_fp8_cache import check, on_gpu
from tests.support.fp8_caches import SCALES

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and torch.cuda.is_available() is False")

DIMS = range(8, 257, 8)
LENGTHS = (700, 0, 1, 64, 300)
FEATURES: tuple[dict[str, Any], ...] = (
    {},
    {"window_size": (100, 0)},
    {"softcap": 5.0},
    {"bias_type": "alibi"},
    {"softmax_type": "learnable", "softmax_offset": torch.linspace(-1, 3, 8)},
    {"score_mod": lambda score, b, h, i, j: score - 0.001 * (h + 1) * (i - j).abs()},
    {"mask_mod": lambda b, h, i, j: (i + j) % 3 != b % 3},
)


@pytest.mark.parametrize("is_paged", [False, True])
@pytest.mark.parametrize("dim", DIMS)
def test_head_dims(dim: int, is_paged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The portable kernels with one feature or two; `tests/gpu/test_fp8_cache.py` has few queries for sm_90."""
    monkeypatch.setenv("FLEXATTN_HOPPER", "never")
    rng = Random(2 * dim + is_paged)
    drawn: dict[str, Any] = {}
    for feature in rng.sample(FEATURES, rng.choice([1, 2])):
        drawn |= feature
    case = on_gpu(
        dtype=rng.choice([torch.bfloat16, torch.float16]),
        fp8=rng.choice([torch.float8_e4m3fn, torch.float8_e5m2]),
        page_size=rng.choice([1, 3, 16, 64]) if is_paged else 0,
        scales=rng.choice(SCALES),
        queries=rng.choice([1, 2, 8, 40, (1, 3, 2, 0, 1)]),
        heads=rng.choice([(8, 1), (8, 2), (8, 8)]),
        dims=(dim, rng.choice([dim, dim, rng.choice(DIMS)])),
        lengths=LENGTHS,
        **drawn,
    )
    check(case)


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("dim", [40, 96, 160])
def test_descales_of_head_dims_in_parts(dim: int, scales: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each descale shape, at head dims whose kernels ptxas 12.8 miscompiles if they have two parts."""
    monkeypatch.setenv("FLEXATTN_HOPPER", "never")
    check(on_gpu(scales=scales, page_size=16, dims=(dim, dim), lengths=LENGTHS, queries=2, window_size=(100, 0)))
