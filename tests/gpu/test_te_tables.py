"""TransformerEngine's tables through its API, compiled, against the oracle.

Layouts, masks, biases, softmaxes, the other features, FP8.

The cases are those of `tests/integrations/test_te_fused_attn.py`, at sizes of several tiles. With a process for each core the whole
file takes minutes, most of them the compiler's:

    python -m pytest -n auto tests/gpu/test_te_tables.py -m ""
"""

from __future__ import annotations

import pytest
import torch

from tests.integrations import test_te_fused_attn as door

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and torch.cuda.is_available() is False"),
    pytest.mark.slow,
]

LONGER = 20  # times as many tokens as on a CPU, and some more
LARGE = {"sq": 203, "skv": 203, "dims": (64, 64), "dtype": torch.bfloat16}


@pytest.fixture(autouse=True)
def on_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXATTN_BACKEND", "triton")


@pytest.mark.parametrize(("layout", "mask", "bias", "softmax"), door.GRID)
def test_layouts_masks_biases_and_softmaxes(layout: str, mask: str, bias: str, softmax: str) -> None:
    door.run(door.Case(layout=layout, mask=mask, bias=bias, softmax=softmax, **LARGE), "cuda")


@pytest.mark.parametrize("case", door.by_difference(door.OTHERS))
def test_other_features(case: door.Case) -> None:
    """In float32 at their own sizes; in 16 bits longer, with windows of as many more tokens."""
    door.run(case, "cuda")
    left, right = (LONGER * side if side > 0 else side for side in case.window)
    dtype = torch.bfloat16 if case.dtype is torch.float32 else case.dtype
    dims = (64, 64) if case.dims == (16, 16) else case.dims
    sizes = {"sq": LONGER * case.sq + 3, "skv": LONGER * case.skv + 3, "window": (left, right), "dims": dims, "dtype": dtype}
    door.run(case._replace(**sizes), "cuda")


@pytest.mark.parametrize("layout", door.FP8_LAYOUTS)
@pytest.mark.parametrize("scaling", door.RECIPES)
def test_fp8(scaling: str, layout: str) -> None:
    door.run_fp8(scaling, layout, "cuda")
    door.run_fp8(scaling, layout, "cuda", size=200, head_dim=64)
