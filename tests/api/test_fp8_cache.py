"""Keys and values in FP8 with queries in 16 or 32 bits: results equal those on dequantised tensors, in every feature."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flexattn
from flexattn import attention, call_cache, ops
from flexattn.dispatch.cudnn_backend import rule_error
from flexattn.dispatch.triton_backend import unsupported
from flexattn.functional import bind_call
from flexattn.testing import check_close
from tests.support.pages import make_pool

B, SQ, SKV, HEADS, HEADS_KV, DIM = 3, 5, 70, 8, 2, 16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"attn_mask_type": "causal_bottom_right"},
    "window": {"attn_mask_type": "causal_bottom_right", "window_size": (20, 0)},
    "softcap": {"softcap": 3.0},
    "sink": {"softmax_type": "off-by-one"},
    "alibi": {"bias_type": "alibi"},
    "bias": {"bias_type": "pre_scale_bias", "bias": torch.linspace(-2, 2, SKV).view(1, 1, 1, SKV)},
    "score_mod": {"score_mod": lambda score, b, h, i, j: score * 0.5 + 0.01 * (j - i)},
    "max_logit": {"return_max_logit": True},
}


def tensors(dtype: torch.dtype = torch.float32, fp8: torch.dtype = E4M3) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(B, SQ, HEADS, DIM, generator=generator).to(dtype)
    k, v = (torch.randn(B, SKV, HEADS_KV, DIM, generator=generator).to(fp8) for _ in "kv")
    return q, k, v


SCALES = {
    "none": (None, None),
    "one": (torch.tensor(0.5), torch.tensor(3.0)),
    "by head": (torch.tensor([0.5, 2.0]), torch.tensor([3.0, 0.1])),
    "by sequence and head": (torch.rand(B, HEADS_KV) + 0.5, torch.rand(B, HEADS_KV) + 0.5),
}


def wide(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Returns dequantised values of data in FP8."""
    if scale is None:
        return x.to(dtype)
    sizes = (1,) * (2 - scale.dim()) + tuple(scale.shape)
    return (x.double() * scale.double().view(sizes[0], 1, sizes[1], 1)).to(dtype)


def check(q: Tensor, k: Tensor, v: Tensor, scales: tuple[Tensor | None, Tensor | None], backend: str, **call: Any) -> None:
    found = attention(q, k, v, descale_k=scales[0], descale_v=scales[1], return_lse=True, backend=backend, **call)
    exact_call = {name: t.double() if name == "bias" else t for name, t in call.items()}
    exact, same = (
        attention(
            q.to(dtype), *(wide(t, s, dtype) for t, s in zip((k, v), scales, strict=True)), return_lse=True, backend="eager", **c
        )
        for dtype, c in ((torch.float64, exact_call), (q.dtype, call))
    )
    assert found[0].dtype is q.dtype
    for name, got, want, budget in zip(("out", "lse"), found, exact, same, strict=False):
        check_close(name, got, want.float() if name == "max_logit" else want, budget)


@pytest.mark.sample("name", "backend")
@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("name", CALLS)
def test_features(name: str, backend: str) -> None:
    check(*tensors(), SCALES["by sequence and head"], backend, **CALLS[name])


@pytest.mark.sample("scales", "fp8", "backend")
@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("scales", SCALES)
def test_scales_and_dtypes(scales: str, fp8: torch.dtype, backend: str) -> None:
    dtype = torch.bfloat16 if scales == "one" else torch.float16 if scales == "by head" else torch.float32
    check(*tensors(dtype, fp8), SCALES[scales], backend)


@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_pages(backend: str) -> None:
    q, k, v = tensors()
    lengths = [70, 0, 33]
    pool = make_pool(k.float(), v.float(), lengths, 16)
    scales = dict(zip(("descale_k", "descale_v"), SCALES["by sequence and head"], strict=True))
    call: dict[str, Any] = {
        "attn_mask_type": "padding_causal_bottom_right",
        "seqused_kv": pool.seqused,
        "backend": backend,
        **scales,
    }
    paged = attention(q, pool.k.to(E4M3), pool.v.to(E4M3), page_table=pool.page_table, max_seqlen_kv=SKV, return_lse=True, **call)
    dense = attention(q, k, v, return_lse=True, **call)
    for got, want in zip(paged, dense, strict=True):
        assert torch.equal(got, want)


def test_repeated_calls() -> None:
    """No kept call has another's values."""
    q, k, v = tensors()
    scale = torch.tensor([0.5, 2.0])
    for factor in (1.0, 3.0, 0.25):
        scale.copy_(torch.tensor([0.5, 2.0]) * factor)
        check(q, k, v, (scale, scale), "triton")


@pytest.mark.slow
def test_one_graph_under_compile() -> None:
    q, k, v = tensors()
    scale = torch.tensor(0.5)
    compiled = torch.compile(lambda *x: attention(*x, descale_k=scale), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v), attention(q, k, v, descale_k=scale))


def test_who_cannot() -> None:
    q, k, v = tensors(torch.bfloat16)
    x, settings = bind_call(q, k, v)
    spec = ops.spec_to_run(x, settings)._replace(device_type="cuda", capability=(8, 0))
    assert "keys in float8_e4m3fn need compute capability 8.9 (Ada) or later" in str(unsupported(spec, "forward"))
    assert unsupported(spec._replace(kv_dtype=E5M2), "forward") is None
    assert "only one dtype for q, k and v" in str(rule_error(spec, "forward"))


def test_wrong_arguments() -> None:
    q, k, v = tensors()
    with pytest.raises(TypeError, match=r"k has dtype torch.float8_e4m3fn and q has torch.float32; accepted: the same"):
        attention(q, k, v.to(E5M2))
    with pytest.raises(TypeError, match=r"v has dtype torch.bfloat16 and q has torch.float32"):
        attention(q, k.float(), v.bfloat16())
    with pytest.raises(ValueError, match=r"descale_q is given with q in torch.float32"):
        attention(q, k, v, descale_q=torch.tensor(1.0))
    with pytest.raises(ValueError, match="descale_k has shape"):
        attention(q, k, v, descale_k=torch.ones(3))
    packed: dict[str, Any] = {f"cu_seqlens_{side}": torch.tensor([0, 3, 7], dtype=torch.int32) for side in ("q", "kv")}
    packed |= {f"max_seqlen_{side}": 4 for side in ("q", "kv")}
    by_token = torch.randn(7, 2, 16), torch.randn(7, 2, 16).to(E4M3)
    with pytest.raises(ValueError, match=r"descale_k has shape \(7, 2\)") as refused:
        attention(
            by_token[0],
            by_token[1],
            by_token[1],
            qkv_format="thd",
            attn_mask_type="padding",
            descale_k=torch.ones(7, 2),
            **packed,
        )
    assert "each token" not in str(refused.value)
    with pytest.raises(ValueError, match="a gradient is needed; accepted: a forward only"):
        attention(q.requires_grad_(), k, v)
    with pytest.raises(ValueError, match=r"fp8_recipe is given with k and v in torch.float8_e4m3fn"):
        attention(q.detach().bfloat16(), k, v, fp8_recipe=flexattn.fp8.Recipe())


@pytest.mark.parametrize("kind", [*SCALES, "by token and head"])
def test_calls_are_kept(kind: str) -> None:
    """With other scales of the same shape too, and none of another shape."""
    q, k, v = tensors()
    shape = k.shape[:-1]
    call_cache.clear_cache()
    for turn in range(4):
        scales = SCALES[kind] if kind in SCALES else (torch.rand(shape) + 0.5, torch.rand(shape) + 0.5)
        given = [None if t is None else t * (turn + 1) for t in scales]
        found = attention(q, k, v, descale_k=given[0], descale_v=given[1])
        by_token = [None if t is None else t[..., None].double() if t.shape == shape else t for t in given]
        exact = [
            x.double() * t if t is not None and t.dim() == 4 else wide(x, t, torch.float64)
            for x, t in zip((k, v), by_token, strict=True)
        ]
        check_close("out", found, attention(q.double(), *exact), attention(q, *(t.float() for t in exact)))
    info = call_cache.cache_info()
    attention(q, k, v, descale_k=torch.ones(B, 1))
    assert call_cache.cache_info()["misses"] == info["misses"] + 1
    attention(q, k, v, descale_k=torch.full((B, 1), 2.0))
    assert call_cache.cache_info()["misses"] == info["misses"] + 1
