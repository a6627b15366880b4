"""The stand-in for cuEquivariance's triangle_attention, against a formula in float64, and its signature."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

import flexattn
from flexattn import integrations, ops
from flexattn.dispatch import triton_backend
from flexattn.functional import bind_call
from flexattn.integrations import cuequivariance
from flexattn.integrations.cuequivariance import TriangleAttention, triangle_attention
from flexattn.testing import check_close

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
B, N, H, SQ, SKV, D = 2, 3, 2, 20, 33, 16
NEG_INF = float("-inf")


def inputs(dtype: torch.dtype = torch.float32, bias_dtype: torch.dtype | None = None) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (B, N, H, SQ, D), (B, N, H, SKV, D), (B, N, H, SKV, D), (B, 1, H, SQ, SKV)
    q, k, v, bias = (torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes)
    return [t.requires_grad_() for t in (q, k, v, bias.to(bias_dtype or dtype))]


def holes() -> Tensor:
    """Returns a mask with holes. One row of the pair representation sees no key."""
    mask = torch.rand(B, N, 1, 1, SKV, generator=torch.Generator().manual_seed(1)) > 0.4
    mask[1, 0] = False
    return mask.to(DEVICE)


def formula(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None, scale: float) -> list[Tensor]:
    """Returns out, lse and the largest score of each query, from complete scores in the dtype of the inputs."""
    scores = q @ k.mT * scale + bias
    if mask is not None:
        scores = scores.masked_fill(~mask, NEG_INF)
    lse, largest = scores.logsumexp(-1), scores.amax(-1)
    shift = largest.masked_fill(largest == NEG_INF, 0.0)[..., None].detach()
    weights = (scores - shift).exp()
    total = weights.sum(-1, keepdim=True)
    return [weights / total.masked_fill(total == 0, 1.0) @ v, lse, largest]


def lengths() -> Tensor:
    return torch.tensor([[SKV, 0, 7], [1, SKV + 5, 20]], dtype=torch.int32, device=DEVICE).view(B, N, 1, 1, 1)


@pytest.mark.filterwarnings("ignore:the (forward|backward) runs on the eager backend")  # float64 on a GPU
@pytest.mark.parametrize("kind", ["no mask", "mask", "kv_lengths"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_values_and_gradients(kind: str, dtype: torch.dtype) -> None:
    given: dict[str, Any] = {"no mask": {}, "mask": {"mask": holes()}, "kv_lengths": {"kv_lengths": lengths()}}[kind]
    mask = given.get("mask")
    if kind == "kv_lengths":
        mask = torch.arange(SKV, device=DEVICE) < given["kv_lengths"]
    leaves = inputs(dtype)
    found = triangle_attention(*leaves, **given, scale=0.3, return_aux=True)
    assert isinstance(found, TriangleAttention)
    assert found.out.shape == leaves[0].shape
    assert found.out.is_contiguous()
    assert found.lse.dtype == found.max.dtype == (torch.float64 if dtype is torch.float64 else torch.float32)
    dout = torch.randn(found.out.shape, generator=torch.Generator().manual_seed(2)).to(DEVICE, dtype)
    gradients = torch.autograd.grad(found.out, leaves, dout)
    exact, eager = ([t.detach().to(to).requires_grad_() for t in leaves] for to in (torch.float64, dtype))
    names = ("out", "lse", "max", "dq", "dk", "dv", "dbias")
    wanted = zip(*(_both(x, mask, dout) for x in (exact, eager)), strict=True)
    for name, got, both in zip(names, (*found, *gradients), wanted, strict=True):
        check_close(name, got, *both, factor=3.0, largest_score=float(found.max.max()))


def _both(leaves: list[Tensor], mask: Tensor | None, dout: Tensor) -> list[Tensor]:
    results = formula(*leaves, mask, 0.3)
    return [t.detach() for t in results] + list(torch.autograd.grad(results[0], leaves, dout.to(results[0].dtype)))


def test_a_pair_representation_without_rows() -> None:
    q, k, v, bias = (x.detach() for x in inputs())
    bias.requires_grad_()
    out = triangle_attention(q[:, :0], k[:, :0], v[:, :0], bias)
    assert out.shape == (B, 0, H, SQ, D)
    [dbias] = torch.autograd.grad(out.sum(), bias)
    assert not dbias.any()


@pytest.mark.parametrize("dims", [4, 3])
def test_missing_dims_are_added_in_front(dims: int) -> None:
    """As cuEquivariance does, whose result keeps them."""
    q, k, v, bias = inputs()
    mask = holes()
    index = (0,) if dims == 4 else (0, 1)
    small = [t[index] for t in (q, k, v)]
    out = triangle_attention(*small, bias[0], mask[0] if dims == 4 else mask[0, 1:2])
    whole = triangle_attention(q, k, v, bias, mask)
    torch.testing.assert_close(out, whole[:1] if dims == 4 else whole[:1, 1:2])


def test_the_signature_and_the_attribute_of_the_package() -> None:
    parameters = inspect.signature(triangle_attention).parameters
    assert list(parameters) == ["q", "k", "v", "bias", "mask", "scale", "return_aux", "kv_lengths"]
    assert [p.default for p in parameters.values()][4:] == [None, None, False, None]
    assert integrations.triangle_attention is triangle_attention
    with pytest.raises(TypeError, match="dropout"):
        triangle_attention(*inputs(), dropout=0.1)  # type: ignore[call-arg]


def test_other_dtypes_of_bias_and_mask() -> None:
    q, k, v, bias = inputs(torch.bfloat16, torch.float16)
    out = triangle_attention(q, k, v, bias, holes().float() * 2)
    torch.testing.assert_close(out, triangle_attention(q, k, v, bias.float(), holes()))
    (gradient,) = torch.autograd.grad(out.sum(), bias)
    assert gradient.dtype == torch.float16


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"k": (B, N, H, SKV, D + 8)}, "k has shape"),
        ({"v": (B, N, H, SKV + 1, D)}, "v has shape"),
        ({"bias": (B, N, H, SQ, SKV)}, r"bias has shape \(2, 3, 2, 20, 33\); accepted: \[B, 1, H, Sq, Skv\] = \[2, 1, 2, 20, 33\]"),
        ({"bias": (1, 1, H, SQ, SKV)}, "bias has shape"),
        ({"mask": (B, N, 1, SQ, SKV)}, r"mask has shape"),
        ({"mask": (B, N, 1, 1, SKV), "kv_lengths": (B, N, 1, 1, 1)}, "mask and kv_lengths are given"),
        ({"kv_lengths": (B, N)}, "kv_lengths has shape"),
        ({"kv_lengths": (B, N, 1, 1, 1)}, "kv_lengths has dtype torch.float32; accepted: torch.int32"),
        ({"q": (1, B, N, H, SQ, D)}, "q is a torch.float32 tensor of shape"),
    ],
    ids=str,
)
def test_errors(change: dict[str, tuple[int, ...]], text: str) -> None:
    call = dict(zip(("q", "k", "v", "bias"), inputs(), strict=True)) | {name: torch.ones(shape) for name, shape in change.items()}
    with pytest.raises((ValueError, TypeError), match=text):
        triangle_attention(**call)


def test_5120_tokens_by_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor is repeated, whatever the size: the bias and the mask reach `attention` as views."""
    seen: dict[str, Any] = {}

    def watched(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> Tensor:
        x, _ = bind_call(q, k, v, **arguments)
        seen.update(q=q, bias=x.bias, mask=x.mod_tensors[0])
        return torch.empty_like(q)

    monkeypatch.setattr(cuequivariance, "attention", watched)
    s = 5120
    q = torch.empty(2, 8, 4, s, 32, device="meta", dtype=torch.bfloat16)
    bias = torch.empty(2, 1, 4, s, s, device="meta", dtype=torch.bfloat16)
    mask = torch.empty(2, 8, 1, 1, s, device="meta", dtype=torch.bool)
    assert triangle_attention(q, q, q, bias, mask).shape == q.shape
    assert seen["q"]._is_view()
    assert seen["bias"].shape == (2, 4, s, s)
    assert seen["bias"]._is_view()
    assert seen["mask"].untyped_storage().nbytes() == mask.numel()


@pytest.mark.slow
def test_compiled_calls() -> None:
    compiled = torch.compile(triangle_attention, backend="aot_eager", fullgraph=True)
    leaves = inputs()
    results = []
    for call in (compiled, triangle_attention):
        out = call(*leaves, holes())
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    torch.testing.assert_close(*results)


def test_kernels_read_a_byte_for_each_key() -> None:
    """The mask is no dense matrix: one program owns a tile, and its queries share the keys' bytes."""
    q, k, v, bias = inputs()
    rows = {"qkv_format": "bhsd", "bias": bias[:, 0], "mask": holes().flatten(0, 1), "backend": "triton"}
    x, settings = bind_call(*(t.flatten(0, 1) for t in (q, k, v)), **rows)
    spec = ops.spec_to_run(x, settings)
    assert [t.numel() for t in x.mod_tensors] == [B * N * SKV]
    assert x.mod_tensors[0].dtype == torch.bool
    assert "q_idx *" not in triton_backend.mod_source(spec.mods, x.mod_tensors)
    assert not triton_backend.to_problem(spec, x).mods.reads_tiles
    out, lse = flexattn.attention(*(t.flatten(0, 1) for t in (q, k, v)), **rows, return_lse=True)
    gradients = torch.autograd.grad(out.square().sum(), (q, k, v, bias))
    exact = [t.detach().double().requires_grad_() for t in (q, k, v, bias)]
    wanted, wanted_lse, _ = formula(*exact, holes(), D**-0.5)
    torch.testing.assert_close(out.unflatten(0, (B, N)), wanted.float())
    torch.testing.assert_close(lse.unflatten(0, (B, N)), wanted_lse.float())
    assert (lse[N] == NEG_INF).all()
    for got, want in zip(gradients, torch.autograd.grad(wanted.square().sum(), exact), strict=True):
        torch.testing.assert_close(got, want.float(), atol=1e-5, rtol=1e-4)
