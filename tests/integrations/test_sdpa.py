"""scaled_dot_product_attention with torch's signature, against torch's own function in float64, gradients included."""

from __future__ import annotations

import inspect
import itertools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as torchs

import flexattn
from flexattn.integrations.sdpa import scaled_dot_product_attention as ours
from tests.support.marked import marked

H, SQ, SKV, D, D_V = 4, 5, 7, 8, 6


def make(*sizes: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype).requires_grad_()


def qkv(lead: tuple[int, ...] = (2, H), lead_kv: tuple[int, ...] | None = None, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    lead_kv = lead if lead_kv is None else lead_kv
    sizes = ((*lead, SQ, D), (*lead_kv, SKV, D), (*lead_kv, SKV, D_V))
    return [make(*size, seed=i, dtype=dtype) for i, size in enumerate(sizes)]


def check(tensors: list[Tensor], mask: Tensor | None = None, tolerance: float = 1e-12, **named: Any) -> None:
    """Compares out and all gradients, the mask's too, with torch's for the same numbers in float64."""
    double = [t.detach().double().requires_grad_() for t in tensors]
    masks = [mask, mask]
    if mask is not None and mask.requires_grad:
        masks[1] = mask.detach().double().requires_grad_()
    theirs_mask = None if masks[1] is None else torch.atleast_2d(masks[1])  # torch broadcasts fewer dims on some paths only
    out, want = ours(*tensors, masks[0], **named), torchs(*double, theirs_mask, **named)
    assert out.shape == want.shape
    assert out.dtype == tensors[0].dtype
    torch.testing.assert_close(out.double(), want, rtol=tolerance, atol=tolerance)
    leaves, theirs = ([*x, m] if m is not None and m.requires_grad else x for x, m in ((tensors, masks[0]), (double, masks[1])))
    dout = make(*out.shape, seed=9, dtype=out.dtype).detach()
    got = torch.autograd.grad(out, leaves, dout)
    for a, b in zip(got, torch.autograd.grad(want, theirs, dout.double()), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)


MASKS = [
    *((), (1,), (SKV,)),
    *((SQ, SKV), (1, SKV), (SQ, 1), (1, 1), (H, SQ, SKV), (1, SQ, SKV), (H, 1, SKV)),
    *((2, H, SQ, SKV), (2, 1, SQ, SKV), (1, H, SQ, SKV), (2, H, 1, SKV), (2, 1, 1, SKV), (2, H, SQ, 1), (1, 1, 1, 1)),
]


@pytest.mark.parametrize("shape", MASKS, ids=str)
def test_every_shape_of_mask(shape: tuple[int, ...]) -> None:
    mask = make(*shape, seed=5)
    check(qkv(), mask)
    check(qkv(), mask.detach() > 0.0)  # hides all keys of some queries in most shapes
    check(qkv(lead_kv=(2, 2)), mask, enable_gqa=True)


def test_a_query_without_keys_gets_zeros_and_no_gradient() -> None:
    seen = torch.ones(SQ, SKV, dtype=torch.bool)
    seen[2] = False
    hidden = torch.zeros(SQ, SKV, dtype=torch.float64).masked_fill(~seen, -math.inf).requires_grad_()
    for mask in (seen, hidden):
        check(qkv(), mask)
        assert not ours(*qkv(), mask)[:, :, 2].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_other_dtypes(dtype: torch.dtype) -> None:
    tolerance = {torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    for mask in (None, make(SQ, SKV, dtype=dtype), make(2, 1, SQ, SKV, dtype=torch.float32), make(SQ, SKV).detach() > 0):
        check(qkv(dtype=dtype), mask, tolerance, scale=0.3)


MIXES = list(itertools.product((torch.float32, torch.float16, torch.bfloat16), repeat=3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_takes_the_dtypes_that_torch_takes(dtype: torch.dtype) -> None:
    q, k, v = (t.detach() for t in qkv(dtype=torch.float32))
    mask = make(SQ, SKV, seed=5).detach()
    want = torchs(q, k, v, mask.float())
    with torch.autocast("cpu", dtype):
        for q_dtype, kv_dtype, mask_dtype in MIXES:
            tensors = (q.to(q_dtype), k.to(kv_dtype), v.to(kv_dtype), mask.to(mask_dtype))
            out = ours(*tensors)
            assert out.dtype == torchs(*tensors).dtype == dtype
            torch.testing.assert_close(out.float(), want, rtol=3e-2, atol=3e-2)
        with pytest.raises(TypeError, match=r"attn_mask is .*: bool, torch\.float32 or torch\.float16 or torch\.bfloat16"):
            ours(q, k, v, mask)


@pytest.mark.parametrize("make_mask", [causal_upper_left, causal_lower_right])
def test_causal_biases_of_torch(make_mask: Any) -> None:
    """Their memory is uninitialised and is never read: only their class, corner and lengths count."""
    q, k, v = qkv()
    mask = make_mask(SQ, SKV)
    mask.data.fill_(math.nan)
    torch.testing.assert_close(ours(q, k, v, mask), torchs(q, k, v, mask._materialize()))
    heads = [t[0].detach() for t in (q, k, v)]  # without a batch
    torch.testing.assert_close(ours(*heads, mask), torchs(*heads, mask._materialize()))


SIZES_OF_0 = {  # heads, head dim of query and key, head dim of value
    "no head dim": (H, 0, D_V),
    "no head dim of value": (H, D, 0),
    "no head dim at all": (H, 0, 0),
    "no heads": (0, D, D_V),
    "no heads and no head dim": (0, 0, 0),
}


@pytest.mark.parametrize("sizes", SIZES_OF_0.values(), ids=SIZES_OF_0.keys())
def test_heads_and_head_dims_of_0(sizes: tuple[int, int, int]) -> None:
    heads, dim, dim_v = sizes
    tensors = [make(2, heads, SQ, dim), make(2, heads, SKV, dim, seed=1), make(2, heads, SKV, dim_v, seed=2)]
    mask = make(SQ, SKV, seed=5).detach()
    with sdpa_kernel(SDPBackend.MATH):  # another kernel of torch 2.11 ends the process without heads and head dims
        for given in (None, mask, mask > 0):
            check(tensors, given, scale=1.0)
        check(tensors, is_causal=True)
    if heads == 0:
        assert ours(*tensors, enable_gqa=True).shape == (2, 0, SQ, dim_v)  # torch 2.11 ends the process
        assert ours(*tensors, make(SQ, SKV)).requires_grad


def test_head_dims_of_0_without_a_batch_or_heads() -> None:
    check([make(SQ, 0), make(SKV, 0), make(SKV, D_V)], scale=1.0)
    check([make(H, SQ, 0), make(H, SKV, 0), make(H, SKV, 0)], scale=1.0)
    check([make(0, SQ, D), make(0, SKV, D), make(0, SKV, D_V)])


LEADS = {
    "one head": ((), ()),
    "no batch": ((H,), (H,)),
    "no batch, one head of keys": ((H,), (1,)),
    "heads for a query without": ((), (H,)),
    "keys without heads": ((H,), ()),
    "one batch of keys": ((2, H), (1, H)),
    "one batch of queries": ((1, H), (2, H)),
    "keys without a batch": ((2, H), (H,)),
    "one head of keys": ((2, H), (2, 1)),
    "one head of queries": ((2, 1), (2, H)),
    "five dims": ((3, 2, H), (3, 2, H)),
    "five dims, broadcast": ((3, 1, H), (1, 2, H)),
}


@pytest.mark.parametrize("lead", LEADS.values(), ids=LEADS.keys())
@pytest.mark.parametrize("is_causal", [False, True])
def test_leading_dims(lead: tuple[tuple[int, ...], tuple[int, ...]], is_causal: bool) -> None:
    check(qkv(*lead), is_causal=is_causal)
    if not is_causal:
        check(qkv(*lead), make(SQ, SKV, seed=6))


def test_masks_of_five_dims() -> None:
    for shape in ((3, 2, H, SQ, SKV), (3, 1, 1, SQ, SKV), (1, 2, 1, 1, SKV), (2, 1, SQ, SKV), (1, 1, H, 1, SKV)):
        check(qkv((3, 2, H)), make(*shape, seed=6))
        check(qkv((3, 2, H)), make(*shape, seed=6).detach() > 0)


def test_key_and_value_may_have_different_heads() -> None:
    q, k, v = make(2, H, SQ, D), make(2, 2, SKV, D, seed=1), make(2, 1, SKV, D_V, seed=2)
    check([q, k, v], enable_gqa=True)
    check([q[0].detach().requires_grad_(), k[0].detach().requires_grad_(), v[0].detach().requires_grad_()], enable_gqa=True)


@pytest.mark.parametrize("scale", [None, 0.0, 0.7, -0.7])
def test_scale(scale: float | None) -> None:
    check(qkv(), make(SQ, SKV, seed=6), scale=scale)


def test_causal_begins_top_left_on_top_of_a_mask() -> None:
    mask = make(SQ, SKV, seed=6).detach() > -0.5
    q, k, v = qkv()
    torch.testing.assert_close(ours(q, k, v, mask, is_causal=True), torchs(q, k, v, mask & torch.ones_like(mask).tril()))


@pytest.mark.parametrize("is_causal", [False, True])
def test_nested_tensors(is_causal: bool) -> None:
    parts = [[make(n, H, d, seed=i) for n in (5, 3, 7)] for i, d in ((0, D), (1, D), (2, D))]
    nested = [torch.nested.as_nested_tensor(some, layout=torch.jagged).transpose(1, 2) for some in parts]
    out = ours(*nested, is_causal=is_causal, scale=0.3).transpose(1, 2).values()
    alone = [torchs(*(part.transpose(0, 1) for part in trio), is_causal=is_causal, scale=0.3) for trio in zip(*parts, strict=True)]
    outs = [out, torch.cat([one.transpose(0, 1) for one in alone])]
    torch.testing.assert_close(*outs, rtol=1e-12, atol=1e-12)
    leaves, dout = [part for some in parts for part in some], make(*outs[0].shape, seed=9)
    for a, b in zip(*(torch.autograd.grad(out, leaves, dout) for out in outs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_no_keys_or_queries() -> None:
    for sq, skv in ((0, SKV), (SQ, 0)):
        tensors = [make(2, H, sq, D), make(2, H, skv, D), make(2, H, skv, D)]
        assert torch.equal(ours(*tensors), torchs(*tensors))
    assert ours(*qkv((0, H))).shape == (0, H, SQ, D_V)


def test_dropout_keeps_the_mean_and_follows_torchs_generator() -> None:
    q, k = make(1, 2, 64, D, dtype=torch.float32), make(1, 2, 512, D, dtype=torch.float32)
    v, mask = torch.ones(1, 2, 512, 1), make(64, 512, dtype=torch.float32).detach()
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(ours(q, k, v, mask, dropout_p=0.25))
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])
    assert abs(outs[0].mean() - 1.0) < 0.02
    assert outs[0].std() > 0.01


def test_out_is_laid_out_as_the_query_is() -> None:
    for order in ((0, 1, 2, 3), (0, 2, 1, 3)):
        tensors = [t.detach().permute(order).contiguous().permute(order) for t in qkv()]
        assert ours(*tensors).permute(order).is_contiguous()
        torch.testing.assert_close(ours(*tensors), torchs(*tensors))


@pytest.mark.sample
@pytest.mark.parametrize("shape", [(33, 50), (2, 1, 1, 50), (1, 1, 33, 1), (2, H, 33, 50)], ids=str)
@pytest.mark.parametrize("is_float", [False, True])
def test_the_kernels_read_every_shape_of_mask(shape: tuple[int, ...], is_float: bool) -> None:
    tensors = [make(2, H, n, 16, seed=i, dtype=torch.float32) for i, n in enumerate((33, 50, 50))]
    mask = make(*shape, seed=5, dtype=torch.float32)
    with flexattn.attention_backend("triton"):
        check(tensors, mask if is_float else mask.detach() > 0, 1e-5)


@pytest.mark.sample
@pytest.mark.slow
@pytest.mark.parametrize(
    "mask",
    [
        lambda: make(2, 1, 1, SKV).detach() > 0,
        lambda: make(SQ, SKV, dtype=torch.float32),
        lambda: None,
        lambda: causal_lower_right(SQ, SKV),
    ],
    ids=["bool", "float", "none", "causal"],
)
def test_compiles_in_one_graph(mask: Callable[[], Any]) -> None:
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    tensors = qkv(dtype=torch.float32)
    torch.testing.assert_close(compiled(*tensors, mask()), ours(*tensors, mask()))


@pytest.mark.slow
def test_a_mask_for_no_queries_compiles() -> None:
    q, k = torch.randn(1, 2, 0, 8), torch.randn(1, 2, 5, 8)
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    assert compiled(q, k, k, torch.ones(0, 5, dtype=torch.bool)).shape == (1, 2, 0, 8)


def test_signature_is_torchs() -> None:
    doc = torchs.__doc__ or ""
    text = re.search(r"\((query.*?)\)", doc, re.DOTALL)
    assert text is not None
    names = [part.split("=")[0].strip() for part in text[1].split(",")]
    defaults = {part.split("=")[0].strip(): part.split("=")[1].strip() for part in text[1].split(",") if "=" in part}
    parameters = inspect.signature(ours).parameters
    assert list(parameters) == names
    assert {n: str(p.default) for n, p in parameters.items() if p.default is not p.empty} == defaults


REFUSED = {
    "an int mask": ({"attn_mask": torch.ones(SQ, SKV, dtype=torch.int32)}, TypeError, "attn_mask is .*accepted: bool"),
    "a mask of another half type": ({"attn_mask": torch.ones(SQ, SKV).half()}, TypeError, "attn_mask is"),
    "a causal bias for other lengths": ({"attn_mask": causal_upper_left(SQ, SQ)}, ValueError, r"for lengths \(5, 5\); accepted"),
    "a causal bias that is causal twice": (
        {"attn_mask": causal_upper_left(SQ, SKV), "is_causal": True},
        ValueError,
        "a CausalBias and is_causal is True",
    ),
    "a mask whose class gives it a meaning": (
        {"attn_mask": marked(torch.ones(SQ, SKV))},
        TypeError,
        "attn_mask is a Marked",
    ),
    "a mask of another length": ({"attn_mask": torch.ones(SQ, SKV + 1)}, ValueError, r"\[2, 4, 5, 7\]"),
    "a mask of three dims that begins with a batch": ({"attn_mask": torch.ones(2, SQ, SKV)}, ValueError, "attn_mask is"),
    "a mask with a dim too many": ({"attn_mask": torch.ones(2, 2, H, SQ, SKV)}, ValueError, "attn_mask is"),
    "grouped heads": ({"key": torch.ones(2, 2, SKV, D), "value": torch.ones(2, 2, SKV, D)}, ValueError, "enable_gqa=True"),
    "heads that do not divide": (
        {"key": torch.ones(2, 3, SKV, D), "value": torch.ones(2, 3, SKV, D), "enable_gqa": True},
        ValueError,
        "query's heads a multiple",
    ),
    "nested with a mask": (
        {n: torch.nested.nested_tensor([torch.ones(H, 2, D)], layout=torch.jagged) for n in ("query", "key", "value")}
        | {"attn_mask": torch.ones(2, 2)},
        ValueError,
        "query is a nested tensor.*without attn_mask",
    ),
    "a vector": ({"query": torch.ones(D)}, ValueError, "query is"),
    "lengths that differ": ({"value": torch.ones(2, H, SKV + 1, D)}, ValueError, "v has"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
def test_refusals(case: tuple[dict[str, Any], type[Exception], str]) -> None:
    change, error, text = case
    q, k, v = (t.detach() for t in qkv(dtype=torch.float32))
    with pytest.raises(error, match=text):
        ours(**{"query": q, "key": k, "value": v, **change})


def test_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "sdpa.md").read_text("utf-8")
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(code, {"__name__": "page"})


def test_dynamic_shapes_with_shared_heads_compile() -> None:
    torch.compiler.reset()
    compiled = torch.compile(ours, fullgraph=True, dynamic=True, backend="eager")
    q, kv = torch.randn(2, 4, 5, 16), torch.randn(2, 2, 7, 16)
    torch.testing.assert_close(compiled(q, kv, kv, enable_gqa=True), ours(q, kv, kv, enable_gqa=True))
