"""Results in layouts of their own: `flexattn.in_layout`, `flexattn.backward.differentiate` and `flexattn.packed_tensors`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flexattn import attention, call_cache, fp8, ops, packed_tensors
from flexattn.backward import Given, differentiate
from flexattn.dispatch import eager_backend, replay, triton_backend
from flexattn.dispatch.spec import PACKINGS, AttentionSpec, Direction, Results, empty_gradients, empty_outputs
from flexattn.functional import bind_call
from flexattn.in_layout import attend
from flexattn.packed_tensors import unpack
from flexattn.prepare import prepare
from flexattn.shorthands import in_full

pytest.importorskip("triton", reason="triton is not installed")

from flexattn.kernels_triton.families import Policy

B, S, H, D = 2, 9, 4, 16
OTHER_FORMAT = {"bshd": "sbhd", "sbhd": "bshd", "bhsd": "bshd", "thd": ""}


def arguments_of(fmt: str) -> dict[str, Any]:
    if fmt != "thd":
        return {"qkv_format": fmt, "attn_mask_type": "causal"}
    cu = torch.tensor([0, S - 3, 2 * S - 4], dtype=torch.int32)
    lengths = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "max_seqlen_q": S, "max_seqlen_kv": S}
    return {"qkv_format": fmt, "attn_mask_type": "padding_causal", **lengths}


def tokens(fmt: str, heads: int = H) -> list[int]:
    sizes = {"b": B, "s": S, "h": heads, "d": D, "t": B * S}
    return [sizes[name] for name in fmt]


def packed_leaves(fmt: str, packing: str) -> tuple[list[Tensor], list[Tensor], int]:
    """(leaves, q, k and v as views of them, the dim)."""
    count, dim = PACKINGS[packing]
    shape = tokens(fmt)
    shape.insert(len(shape) + dim + 1, count)
    leaf = torch.randn(shape, requires_grad=True)
    if count == 3:
        return [leaf], list(unpack(leaf, dim)), dim
    q = torch.randn(tokens(fmt), requires_grad=True)
    return [q, leaf], [q, *unpack(leaf, dim)], dim


@pytest.mark.sample
@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("packing", list(PACKINGS))
@pytest.mark.parametrize("fmt", ["bshd", "sbhd", "thd"])
def test_gradients_are_written_into_one_buffer(fmt: str, packing: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def join(slices: Any, dim: int) -> Tensor:
        joins.append((slices, real(slices, dim)))
        return joins[-1][1]

    joins: list[tuple[Any, Tensor]] = []
    real = packed_tensors.joined
    monkeypatch.setattr(packed_tensors, "joined", join)
    arguments = arguments_of(fmt) | {"backend": backend}
    results = Results(out=OTHER_FORMAT[fmt], packing=packing)
    for _ in range(2):  # the second call is a known one
        leaves, (q, k, v), dim = packed_leaves(fmt, packing)
        apart = [t.detach().clone().requires_grad_() for t in (q, k, v)]
        wanted = attention(*apart, **arguments)
        dout = torch.randn_like(wanted)
        dqkv = torch.autograd.grad(wanted, apart, dout)
        out, lse, _ = attend(results, q, k, v, **arguments)
        torch.testing.assert_close(out, wanted)
        assert out.is_contiguous() == (fmt == "thd")
        *gradients, gradient = torch.autograd.grad(out, leaves, dout)
        shared = dqkv if len(leaves) == 1 else dqkv[1:]
        torch.testing.assert_close(gradient, torch.stack(shared, dim))
        for found, want in zip(gradients, dqkv, strict=False):
            torch.testing.assert_close(found, want)
        slices, joined = joins[-1]
        assert gradient.is_contiguous()
        assert {t.untyped_storage().data_ptr() for t in slices} == {joined.untyped_storage().data_ptr()}
        assert gradient.data_ptr() == slices[0].data_ptr()
        alone = differentiate(results, Given(dout, *(t.detach() for t in (q, k, v, out, lse))), arguments)
        for name, want in zip(("dq", "dk", "dv"), dqkv, strict=True):
            torch.testing.assert_close(getattr(alone, name), want)
        assert alone.dk.untyped_storage().data_ptr() == alone.dv.untyped_storage().data_ptr()
    assert call_cache.cache_info()["hits"] >= 2


def test_gradients_that_lie_apart_are_joined_by_a_copy() -> None:
    leaf = torch.randn(B, S, 3, H, D, requires_grad=True)
    q, k, _ = unpack(leaf, 2)
    assert q.data_ptr() == leaf.data_ptr()
    (q + 2 * k).sum().backward()
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, torch.tensor([1.0, 2.0, 0.0])[:, None, None].expand_as(leaf))
    square = torch.randn(3, S, S)
    a, b, c = square.unbind(0)
    for slices in ((c, b, a), (a, c, b), (a, b.T, c.T), (a, b.clone(), c)):
        with torch.no_grad():
            assert torch.equal(packed_tensors.joined(slices, 0), torch.stack(slices))
    with torch.no_grad():
        assert packed_tensors.joined((a, b, c), 0).data_ptr() == square.data_ptr()


@pytest.mark.sample("backend", "fmt")
@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("fmt", ["bshd", "sbhd", "bhsd"])
def test_formats_in_memory(fmt: str, backend: str) -> None:
    """The dims stay q's; the order in memory is the requested one, in both directions."""
    q, k, v = (torch.randn(tokens(fmt, heads), requires_grad=True) for heads in (H, 2, 2))
    arguments = arguments_of(fmt) | {"backend": backend}
    memory = OTHER_FORMAT[fmt]
    out, *_ = attend(Results(memory, memory, memory), q, k, v, **arguments)
    wanted = attention(q, k, v, **arguments)
    torch.testing.assert_close(out, wanted)
    order = [fmt.index(name) for name in memory]
    assert out.permute(order).is_contiguous()
    dout = torch.randn_like(out)
    for found, want in zip(torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(wanted, (q, k, v), dout), strict=True):
        torch.testing.assert_close(found, want)
        assert found.permute(order).is_contiguous()


@pytest.mark.parametrize(
    "results", [Results("sbhd", packing="3hd"), Results("sbhd", "sbhd", "bhsd"), Results("bhsd", "sbhd", "sbhd", "hd_h2d")]
)
def test_the_fakes_know_the_strides(results: Results) -> None:
    q, k, v = (torch.randn(B, S, H, D) for _ in range(3))
    x, settings, _ = prepare(q, k, v, in_full(q, k, {"backend": "eager"}), is_backward=True, results=results)
    call, checks = (*x, *settings), ("test_schema", "test_faketensor")
    torch.library.opcheck(ops._forward_op, call, test_utils=checks)
    out, lse, _ = ops._forward_op(*call)
    torch.library.opcheck(ops._backward_op, (torch.randn_like(out), None, out, lse, *call), test_utils=checks)


@pytest.mark.slow
def test_compiled() -> None:
    def function(qkv: Tensor) -> Tensor:
        q, k, v = unpack(qkv, -3)
        return attend(Results("sbhd", packing="3hd"), q, k, v, backend="eager")[0]

    qkv = torch.randn(B, S, 3, H, D, requires_grad=True)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    out, wanted = compiled(qkv), function(qkv)
    assert out.stride() == wanted.stride()
    torch.testing.assert_close(out, wanted)
    grads = [torch.autograd.grad(t.sin().sum(), qkv)[0] for t in (out, wanted)]
    torch.testing.assert_close(*grads)


def test_a_played_backward_gives_views_of_the_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    def record(backend: Any, run: Callable[[], Any], inputs: Any, results_of: Callable[[Any], Any], *_: Any) -> Any:
        result = run()
        found: Any = object.__new__(replay.Recording)
        found.can_replay = lambda: True
        found.replay = lambda tensors, addresses: (played.append(True), results_of(result))[1]
        return result, found

    played: list[bool] = []
    monkeypatch.setattr(replay, "record", record)
    monkeypatch.setattr(eager_backend, "can_be_recorded", lambda: True)
    qkv = torch.randn(B, S, 3, H, D, requires_grad=True)
    out, *_ = attend(Results(packing="3hd"), *unpack(qkv, 2), backend="eager")
    dout = torch.randn_like(out)
    first, *more = (torch.autograd.grad(out, qkv, dout, retain_graph=True)[0].clone() for _ in range(3))
    assert played == [True]
    assert all(torch.equal(first, t) for t in more)


def on_sm_90(results: Results, fmt: str, **arguments: Any) -> tuple[AttentionSpec, Any]:
    shape = [{"b": 2, "s": 4096, "h": 16, "d": 128}[name] for name in fmt]
    q, k, v = (torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True) for _ in range(3))
    x, settings = bind_call(q, k, v, qkv_format=fmt, attn_mask_type="causal", **arguments)
    return ops.spec_to_run(x, settings)._replace(device_type="cuda", capability=(9, 0), results=results), x


@pytest.mark.sample("recipe", "results", "fmt")
@pytest.mark.parametrize("recipe", [None, fp8.Recipe()])
@pytest.mark.parametrize("results", [Results("bhsd", "bhsd", "bhsd"), *(Results(packing=packing) for packing in PACKINGS)])
@pytest.mark.parametrize("fmt", ["bshd", "sbhd"])
def test_the_families_of_sm_90_take_every_layout(fmt: str, results: Results, recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend, "policy_of", lambda spec: Policy())
    plain, x = on_sm_90(Results(), fmt, fp8_recipe=recipe)
    for direction in ("forward", "backward"):
        choices = [
            triton_backend.choice_of(spec, x, direction)  # type: ignore[arg-type]
            for spec in (plain, plain._replace(results=results))
        ]
        assert choices[0] is not None
        assert choices[1] is not None
        assert choices[0][:3] == choices[1][:3]
        assert choices[0].family.name.startswith("sm_90")


@pytest.mark.parametrize("recipe", [None, fp8.Recipe()])
def test_the_families_of_sm_90_write_float32(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the forward in FP8."""
    monkeypatch.setattr(triton_backend, "policy_of", lambda spec: Policy(takes_what_never_ran=True))
    plain, x = on_sm_90(Results(), "bshd", fp8_recipe=recipe)
    for direction, results in (("forward", Results(fp32_out=True)), ("backward", Results(fp32="dqkv"))):
        before, now = (triton_backend.choice_of(spec, x, direction) for spec in (plain, plain._replace(results=results)))  # type: ignore[arg-type]
        assert before is not None
        assert now is not None
        assert before.family.name.startswith("sm_90")
        if recipe is not None and direction == "forward":
            assert now.family.name == "portable"
            assert ("sm_90 FP8", "it writes out in 16 bits") in now.rejected
        else:
            assert now[:3] == before[:3]


@pytest.mark.parametrize("results", [Results(fp32_out=True), Results(fp32="dkv"), Results(fp32="dq")])
def test_the_families_of_sm_100_write_dq_alone_in_float32(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend, "policy_of", lambda spec: Policy(takes_what_never_ran=True))
    spec, x = on_sm_90(Results(), "bshd")
    direction: Direction = "forward" if results.fp32_out else "backward"
    choice = triton_backend.choice_of(spec._replace(capability=(10, 0), results=results), x, direction)
    assert choice is not None
    if results.fp32 == "dq":
        assert choice.family.name == "sm_100 fused"
    else:
        assert choice.family.name == "portable"
        name, dtype = ("sm_100", "out") if results.fp32_out else ("sm_100 fused", "dk and dv")
        assert (name, f"it writes {dtype} in 16 bits") in choice.rejected


@pytest.mark.sample("fmt", "backend")
@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("fmt", ["bshd", "sbhd", "bhsd", "thd"])
def test_an_out_in_float32(fmt: str, backend: str, device: str) -> None:
    """It rounds to the 16-bit result, and keeps the bits that the rounding drops."""
    q, k, v = (torch.randn(tokens(fmt, heads), dtype=torch.bfloat16, device=device) for heads in (H, 2, 2))
    arguments = {name: t.to(device) if isinstance(t, Tensor) else t for name, t in arguments_of(fmt).items()} | {"backend": backend}
    wanted = attention(q, k, v, **arguments)
    for _ in range(2):  # the second call is a known one
        out, *_ = attend(Results(fp32_out=True), q, k, v, **arguments)
        assert out.dtype is torch.float32
        assert torch.equal(out.bfloat16(), wanted)
        assert (out != wanted).float().mean() > 0.5


def test_a_family_refuses_gradients_that_it_cannot_write(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, x = on_sm_90(Results(), "bshd")
    monkeypatch.setattr(triton_backend, "policy_of", lambda spec: Policy())
    wide = torch.empty(2, 4096, 16, 132, dtype=torch.bfloat16, device="meta")[..., :128]
    monkeypatch.setattr(triton_backend, "empty_gradients", lambda spec, x: empty_gradients(spec, x)._replace(dk=wide))
    choice = triton_backend.choice_of(spec, x, "backward")
    assert choice is not None
    assert choice.family.name == "portable"
    assert "dk has a stride of 132" in choice.rejected[0][1]


def test_room_is_made_once_for_each_result() -> None:
    x, settings, _ = prepare(
        *(torch.empty(B, S, H, D, device="meta") for _ in range(3)),
        in_full(None, None, {}),
        is_backward=True,
        results=Results("sbhd", packing="h3d"),
    )
    spec = ops.make_spec(x, settings, None)
    assert empty_outputs(spec, x)[0].stride() == (H * D, B * H * D, D, 1)
    gradients = empty_gradients(spec, x)
    assert gradients.dq.shape == (B, S, H, 3, D)
    assert gradients.dk is None
    assert gradients.dv is None


@pytest.mark.parametrize(
    ("results", "heads", "fmt", "message"),
    [
        (Results(packing="3hd"), 2, "bshd", r"q, k and v have shapes .*accepted: equal shapes and formats"),
        (Results(packing="3hd", dq="sbhd"), H, "bshd", "accepted: equal shapes and formats"),
        (Results(packing="hd3"), H, "bshd", "packing of dq, dk and dv is 'hd3'; accepted: 3hd, h3d, hd_2hd, hd_h2d"),
        (Results(out="thd"), H, "bshd", "the format of out is 'thd' for a tensor in bshd; accepted: bshd, sbhd, bhsd"),
        (Results(dkv="bshd"), H, "thd", "the format of dkv is 'bshd' for a tensor in thd; accepted: thd"),
        (Results(packing="h3d", fp32="dkv"), H, "bshd", "dkv is to be in float32 in a buffer .*accepted: separate gradients"),
        (Results(fp32_out=True), 2, "bshd", "out is to be in float32 and a gradient is asked for; accepted: no gradient"),
    ],
)
def test_layouts_without_meaning(results: Results, heads: int, fmt: str, message: str) -> None:
    q, k, v = (torch.randn(tokens(fmt, n), dtype=torch.bfloat16, requires_grad=True) for n in (H, heads, heads))
    with pytest.raises(ValueError, match=message):
        attend(results, q, k, v, **arguments_of(fmt))


def test_a_rotation_and_a_shared_buffer() -> None:
    q, k, v = (torch.randn(B, S, H, D, dtype=torch.bfloat16) for _ in range(3))
    with pytest.raises(ValueError, match="rotation is True and the gradients share a buffer; accepted: rotation False"):
        attend(Results(packing="3hd"), q, k, v, fp8_recipe=fp8.Recipe(rotation=True))


def test_an_out_in_fp8_and_another_format() -> None:
    q, k, v = (torch.randn(B, S, H, D, dtype=torch.bfloat16) for _ in range(3))
    with pytest.raises(ValueError, match=r"out_dtype is torch.float8_e4m3fn and out is to lie in sbhd; accepted: a 16-bit dtype"):
        attend(Results("sbhd"), q, k, v, fp8_recipe=fp8.Recipe(out_dtype=torch.float8_e4m3fn))


@pytest.mark.sample
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_fp8(backend: str) -> None:
    """A call on 16-bit tensors in FP8 writes its gradients into the buffer too."""
    qkv = torch.randn(B, S, 3, H, D, dtype=torch.bfloat16, requires_grad=True)
    recipe = {"fp8_recipe": fp8.Recipe(), "backend": backend}
    q, k, v = unpack(qkv, 2)
    out, *_ = attend(Results("sbhd", packing="3hd"), q, k, v, **recipe)
    wanted = attention(q, k, v, **recipe)
    assert torch.equal(out, wanted)
    dout = torch.randn_like(out)
    found, want = (torch.autograd.grad(t, qkv, dout)[0] for t in (out, wanted))
    assert torch.equal(found, want)
