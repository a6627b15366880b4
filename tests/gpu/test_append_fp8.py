"""On a GPU: append_kv to FP8 caches writes the same bits as on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flexattn import append_kv
from tests.api.test_append_fp8 import E4M3, E5M2, KINDS, bits, descales_of, int32
from tests.support.pages import make_pool

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and torch.cuda.is_available() is False")


@pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page_size", [0, 1, 48])
def test_append_to_fp8(page_size: int, kind: str, dtype: torch.dtype, fp8: torch.dtype) -> None:
    """The bytes and descales of the same call on a CPU, outliers and non-finite values included."""
    generator = torch.Generator().manual_seed(0)
    before, counts = (17, 0, 250, -1), (3, 5, 1, 2)
    k, v = (torch.randn(4, 256, 2, 64, generator=generator) for _ in "kv")
    new = [(torch.randn(sum(counts), 2, 64, generator=generator) * 100).to(dtype) for _ in "kv"]
    new[0][0, 0, :4] = torch.tensor([6e4, float("inf"), float("-inf"), float("nan")]).to(dtype)
    new[1][1] = 0.0
    call: dict[str, Any] = {"qkv_format": "thd_2bshd", "seqused_kv": int32(*before)}
    call["cu_seqlens_q"] = torch.tensor([0, *counts]).cumsum(0).int()
    if page_size:
        pool = make_pool(k, v, (256,) * 4, page_size)
        k, v, call["page_table"] = pool.k, pool.v, pool.page_table
    caches = [x.to(fp8) for x in (k, v)]
    call |= dict(zip(("descale_k", "descale_v"), (descales_of(kind, x, 4) for x in caches), strict=True))
    written = []
    for device in ("cuda", "cpu"):
        copies = [x.to(device, copy=True) for x in caches]
        there = {name: t.to(device, copy=True) if isinstance(t, Tensor) else t for name, t in call.items()}
        append_kv(*copies, *(x.to(device) for x in new), **there)
        written.append([*copies, *(there[name] for name in ("descale_k", "descale_v") if kind == "token")])
    for found, wanted in zip(*written, strict=True):
        found = found.cpu()
        is_nan = wanted.float().isnan()
        assert torch.equal(found.float().isnan(), is_nan)
        same = bits(found) == bits(wanted)
        # NaN has a sign: a CPU keeps the sign of a NaN in bf16, a GPU does not.
        assert (same.view(*wanted.shape, -1).all(-1) | is_nan).all()
    assert not torch.equal(bits(written[1][0]), bits(caches[0]))
