"""Attention in FP8 on the CPU and by the kernels, against a separate oracle, with refusals and hidden values."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import flexattn
from flexattn import fp8
from flexattn.dispatch import triton_backend
from tests.conftest import FreshPython
from tests.support import fp8_oracle
from tests.support.fp8_oracle import Packing

BF16 = torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
WAYS = [("torch", "eager"), ("triton", "eager"), ("triton", "triton")]  # (device of the quantiser, backend)


@pytest.fixture(params=WAYS, ids="-".join)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The backend; on CPUs without the interpreter it is the eager one, with torch's quantising pass."""
    quantiser, backend = request.param
    if quantiser == "torch":
        monkeypatch.setattr(triton_backend, "_can_quantize", lambda device: False)
    return str(backend)


def sums_error(device: str) -> float:
    """Returns the error of a score relative to the largest: fp32 rounding, or the precision of Hopper's FP8 sums (`fp8_sums`)."""
    return 2.0**-11 if device == "cuda" and torch.cuda.get_device_capability() < (10, 0) else 2.0**-20


RECIPES = [
    {},
    {"granularity": "tensor", "fp8_format": "HYBRID", "margin": 3},
    {"granularity": "batch_head", "margin": -2},
    {"granularity": "block", "block_rows": 64, "margin": 14},
    {"scaling": "delayed", "margin": 1, "fp8_format": "HYBRID"},
]


@pytest.mark.sample("own", "way")
@pytest.mark.parametrize("own", RECIPES, ids=str)
def test_one_key_shows_what_every_tensor_became(own: dict[str, Any], way: str, device: str) -> None:
    """With one key its weight is 1: out is v, dv is dout and lse the score, each of the numbers in FP8."""
    recipe = fp8.Recipe(**own)
    draw = torch.Generator().manual_seed(3)
    # Heads and sequences differ in magnitude, and three of four numbers are small relative to their head's largest.
    sizes = torch.rand(2, 1, 2, 32, generator=draw) ** 6 * torch.tensor([[1.0, 30.0], [4.0, 0.2]])[:, None, :, None]
    q, k, v, dout = ((torch.randn(2, 1, 2, 32, generator=draw) * sizes * n).to(BF16) for n in (1, 2, 3, 40))
    leaves = [t.to(device).requires_grad_() for t in (q, k, v)]
    state = fp8.DelayedScaling(recipe, 2, device=device) if recipe.scaling == "delayed" else None
    for _ in range(1 if state is None else 2):
        out, lse = flexattn.attention(*leaves, fp8_recipe=recipe, fp8_state=state, return_lse=True, backend=way)
        dv = torch.autograd.grad(out, leaves[2], dout.to(device))[0]
        if state is not None:
            state.update()
    where, values = Packing("bshd"), []
    for t, dtype in ((q, E4M3), (k, E4M3), (v, E4M3), (dout, recipe.grad_dtype)):
        kind = (recipe.granularity, recipe.rows)
        if t is dout and not recipe.quantises_dout(leaves[0].device, way):  # then the backward does
            kind = ("block", 128)
        rounded = fp8_oracle.quantize(t.detach(), where, dtype, *kind, recipe.margin)
        values.append(fp8_oracle.dequantized(rounded, where, kind[1]))
    assert torch.equal(out.cpu(), values[2].to(BF16))
    assert torch.equal(dv.cpu(), values[3].to(BF16))
    scores = (values[0] * values[1]).sum(-1) / 32**0.5
    assert torch.allclose(lse[..., 0].cpu().double(), scores[:, 0], rtol=0, atol=sums_error(device) * float(scores.abs().max()))


def drawn_call(seed: int, device: str) -> tuple[dict[str, Any], fp8_oracle.Attended]:
    """A call on FP8 tensors with NaN's code in their padding, and its dequantised tensors in fp64."""
    rng, draw = Random(seed), torch.Generator().manual_seed(seed)
    fmt, batch, heads_kv, head_dim = rng.choice(["bshd", "sbhd", "bhsd", "thd"]), rng.choice([1, 2]), rng.choice([1, 2]), 16
    heads, is_causal, granularity = (
        heads_kv * rng.choice([1, 2]),
        rng.random() < 0.5,
        rng.choice(["tensor", "head", "batch_head", "block"]),
    )
    recipe = fp8.Recipe(granularity=granularity, block_rows=64 if granularity == "block" else None)
    dtype, sides, given = rng.choice([E4M3, E4M3, E5M2]), [], {}
    has_lengths = fmt == "thd" or rng.random() < 0.5
    for side, longest in (("q", 33), ("kv", 70)):
        lengths = [rng.choice([0, 1, rng.randint(1, longest), longest]) for _ in range(batch)]
        cu, padded = torch.tensor([0, *lengths]).cumsum(0).int(), None
        if fmt == "thd" and rng.random() < 0.5:
            padded = torch.tensor([0, *(n + rng.choice([0, 5]) for n in lengths)]).cumsum(0).int()
        sides.append(Packing(fmt, cu if has_lengths else None, padded, max(1, *lengths) if fmt == "thd" else None))
        given |= {
            f"cu_seqlens_{side}": sides[-1].cu_seqlens,
            f"cu_seqlens_{side}_padded": padded,
            f"max_seqlen_{side}": sides[-1].max_seqlen,
        }
    exact = []
    for name, count in (("q", heads), ("k", heads_kv), ("v", heads_kv)):
        where = sides[name != "q"]
        total = int((where.cu_seqlens if where.cu_seqlens_padded is None else where.cu_seqlens_padded)[-1]) if fmt == "thd" else 0  # type: ignore[index]
        shape = tuple({"t": total, "b": batch, "s": 33 if name == "q" else 70, "h": count, "d": head_dim}[dim] for dim in fmt)
        x = torch.randn(shape, generator=draw) * torch.rand((*shape[:-1], 1), generator=draw) * rng.choice([0.3, 1.0, 3.0])
        codes = fp8_oracle.quantize(x, where, dtype, granularity, recipe.rows, 0)
        poisoned = torch.full_like(x, torch.nan)
        for (*_, row), (*_, target) in zip(fp8_oracle.tokens(codes.codes, where), fp8_oracle.tokens(poisoned, where), strict=True):
            target.copy_(row)
        given |= {name: poisoned.to(dtype), f"descale_{name}": codes.descale.float()}
        exact.append(fp8_oracle.dequantized(codes, where, recipe.rows))
    kinds = ["padding" if has_lengths else "", "causal" if is_causal else ""]
    given |= {"qkv_format": fmt, "attn_mask_type": "_".join(filter(None, kinds)) or "no_mask", "return_lse": True}
    given |= {"fp8_recipe": recipe} if granularity == "block" else {}
    return {n: t.to(device) if isinstance(t, Tensor) else t for n, t in given.items()}, fp8_oracle.attention(
        *exact, *sides, is_causal
    )


def check_drawn(seed: int, backend: str, device: str) -> None:
    call, want = drawn_call(seed, device)
    out, lse = (t.cpu().double() for t in flexattn.attention(**call, backend=backend))
    # A weight is rounded by 2**-4 of it at most, or by half of E4M3's least number where it is smaller, times 256 relative to its
    # row's largest; out to bf16; and there are roundings of fp32.
    off = sums_error(device) * max(1.0, want.largest)
    most = (2.0**-4 + 4 * off) * want.bound[..., 0] + 2.0**-10 / 256 * want.bound[..., 1] + 2.0**-8 * want.out.abs() + 1e-5
    assert bool(((out - want.out).abs() <= most).all()), (seed, float(((out - want.out).abs() / most).max()))
    wanted = want.lse
    if call["qkv_format"] == "thd":
        wanted = wanted.mT
    else:
        wanted = wanted.permute(tuple(call["qkv_format"].index(dim) for dim in "bhs"))
    assert torch.allclose(lse, wanted, rtol=0, atol=4 * off), (seed, "lse")


@pytest.mark.sample("backend")
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_drawn_calls(seed: int, backend: str, device: str) -> None:
    check_drawn(seed, backend, device)


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", range(100, 600, 100))
def test_more_drawn_calls(first: int, device: str) -> None:
    for seed in range(first, first + 100):
        check_drawn(seed, "eager", device)
        if seed % 10 == 0:
            check_drawn(seed, "triton", device)


CPU_USER = """
import torch, flexattn
from flexattn import fp8
from flexattn.dispatch import triton_backend

q = torch.randn(1, 20, 2, 16).bfloat16()
assert not triton_backend.can_quantize(q)
found = fp8.quantize(q)
scale = (448 / q.double().abs().amax((0, 1, 3))).float()
assert torch.equal(found.descale.flatten(), 1 / scale)
assert torch.equal(found.data.float(), (q.float() * scale[:, None]).to(torch.float8_e4m3fn).float())
leaves = [q.clone().requires_grad_() for _ in range(3)]
exact = [t.detach().double().requires_grad_() for t in leaves]
outs = []
for tensors, recipe in ((leaves, fp8.Recipe()), (exact, None)):
    out = flexattn.attention(*tensors, attn_mask_type="causal", fp8_recipe=recipe)
    out.sum().backward()
    outs.append((out, *(t.grad for t in tensors)))
for got, want in zip(*outs):
    assert float((got - want).norm() / want.norm()) < 0.1
print("as it should be")
"""


def test_a_cpu_without_the_interpreter(forked_python: FreshPython) -> None:
    done = forked_python("-c", CPU_USER, env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.stdout == "as it should be\n", done.stderr


def bf16_call(device: str, **changes: Any) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(5)
    heads = {"q": 4, "k": 2, "v": 2}
    return {n: torch.randn(2, 24, h, 16, generator=draw).to(device, BF16) for n, h in heads.items()} | changes


def fp8_call(device: str, **changes: Any) -> dict[str, Any]:
    call = {name: fp8.quantize(t) for name, t in bf16_call(device).items()}
    descales = {f"descale_{name}": t.descale for name, t in call.items()}
    return {name: t.data for name, t in call.items()} | descales | changes


@pytest.mark.sample
@pytest.mark.parametrize("is_known", [False, True])
def test_lse_alone_has_a_gradient(is_known: bool, way: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Out has no gradient then: v gets zeros, and q and k get the gradients of lse, by the operators and in a cached call."""
    monkeypatch.setenv("FLEXATTN_CHECK", "0" if is_known else "1")
    call = bf16_call(device)
    leaves = {name: t.requires_grad_() for name, t in call.items()}
    weights = torch.linspace(-1, 1, 2 * 4 * 24, device=device).view(2, 4, 24)
    for _ in range(3 if is_known else 1):
        _, lse = flexattn.attention(**leaves, fp8_recipe=fp8.Recipe(), return_lse=True, backend=way)
        dq, dk, dv = torch.autograd.grad(lse, leaves.values(), weights, materialize_grads=True)
    assert not dv.any()
    exact = {name: t.detach().double().requires_grad_() for name, t in leaves.items()}
    _, lse = flexattn.attention(**exact, return_lse=True, backend="eager")
    for got, want in zip((dq, dk), torch.autograd.grad(lse, (exact["q"], exact["k"]), weights.double()), strict=True):
        assert float((got - want).norm() / want.norm()) < 0.08


@pytest.mark.sample
@pytest.mark.parametrize("which", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_where_nan_and_infinity_may_be(which: str, backend: str, device: str) -> None:
    call = bf16_call(device) | {"dout": torch.ones(2, 24, 4, 16, device=device, dtype=BF16)}
    token, head, channel = 13, 1, 7
    call[which][0, token, head, channel] = torch.inf  # which is NaN in FP8
    dout = call.pop("dout")
    leaves = [call[name].requires_grad_() for name in "qkv"]
    out = flexattn.attention(**call, attn_mask_type="causal", fp8_recipe=fp8.Recipe(granularity="tensor"), backend=backend)
    dq, dk, dv = (t.isfinite() for t in torch.autograd.grad(out, leaves, dout))
    kv_head = head // 2 if which in ("q", "dout") else head
    own = [2 * kv_head, 2 * kv_head + 1]  # query heads
    rows = ~out.isfinite()
    wanted = torch.zeros_like(rows)
    if which == "q":
        wanted[0, token, head] = True
    if which == "k":
        wanted[0, token:, own] = True
    if which == "v":
        wanted[0, token:, own, channel] = True
        assert bool(rows[wanted].all())
        wanted[0, :, own, channel] = rows[0, :, own, channel]  # 0 * NaN
    assert torch.equal(rows, wanted)
    if which in ("q", "dout"):
        bad = ~dq
        assert bool(bad[0, token, head].all())
        bad[0, token, head] = False
        assert not bad.any()
    for finite, heads in ((dq, own), (dk, [kv_head]), (dv, [kv_head])):
        elsewhere = torch.ones_like(finite)
        elsewhere[0, :, heads] = False
        assert bool(finite[elsewhere].all())


@pytest.mark.sample("name")
@pytest.mark.parametrize("value", [-0.5, 0.0, torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_values_of_descales_are_checked_where_asked_for(
    name: str, value: float, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = fp8_call(device, backend="eager")
    descale = call[f"descale_{name}"].clone()
    descale[0, 1, 0] = value
    call[f"descale_{name}"] = descale
    flexattn.attention(**call)
    monkeypatch.setenv("FLEXATTN_CHECK", "1")
    with pytest.raises(ValueError, match=rf"descale_{name} is {value} at \[0, 1, 0\] of \[b, h, blocks\]; accepted: positive"):
        flexattn.attention(**call)
    flexattn.attention(**call | {f"descale_{name}": descale.abs().nan_to_num(1.0, 1.0).clamp(min=1e-3)})


def test_scales_of_a_state_are_checked_where_asked_for(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = fp8.Recipe(scaling="delayed")
    state = fp8.DelayedScaling(recipe, 4, 2, device)
    state.scale_k[1] = torch.inf
    monkeypatch.setenv("FLEXATTN_CHECK", "1")
    with pytest.raises(ValueError, match=r"descale_k is 0.0 at \[0, 1, 0\]"):
        flexattn.attention(**bf16_call(device), fp8_recipe=recipe, fp8_state=state, backend="eager")


@pytest.mark.parametrize("name", ["descale_q", "descale_k", "descale_v"])
def test_a_descale_has_no_gradient_and_says_so(name: str, device: str) -> None:
    call = fp8_call(device, backend="eager")
    for _ in range(3):  # a call that is known by then
        flexattn.attention(**call)
    asking = call | {name: call[name].clone().requires_grad_()}
    with pytest.raises(ValueError, match=f"{name} requires a gradient; accepted: a detached descale"):
        flexattn.attention(**asking)
    with torch.no_grad():
        assert torch.equal(flexattn.attention(**asking), flexattn.attention(**call))


@pytest.mark.sample
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_autocast_leaves_fp8_as_it_is(dtype: torch.dtype, device: str) -> None:
    call = fp8_call(device, backend="eager")
    want = flexattn.attention(**call)
    plain = {name: call[name] for name in "qkv"}
    without = flexattn.attention(**plain)
    for _ in range(3):
        with torch.autocast(device, dtype=dtype):
            assert torch.equal(flexattn.attention(**call), want)
            assert torch.equal(flexattn.attention(**plain), without)
            assert flexattn.explain(**call).forward.backend == "eager"
            assert torch.equal(fp8.quantize(bf16_call(device)["q"]).data.float(), call["q"].float())


def test_blocks_of_a_max_seqlen_beyond_all_tokens(device: str) -> None:
    """The number of blocks may be that of the longest length, as in a buffer that is allocated once, or that of `quantize`."""
    recipe = fp8.Recipe(granularity="block", block_rows=64)
    cu = torch.tensor([0, 30, 70], dtype=torch.int32, device=device)
    lengths: dict[str, Any] = {"qkv_format": "thd", "attn_mask_type": "padding", "cu_seqlens_q": cu, "cu_seqlens_kv": cu}
    x = torch.randn(70, 2, 16, device=device).to(BF16)
    found = fp8.quantize(x, recipe, qkv_format="thd", cu_seqlens=cu, max_seqlen=1000)
    assert found.descale.shape == (2, 2, 2)
    outs = []
    for n in (2, 16):
        descale = torch.full((2, 2, n), torch.nan, device=device)
        descale[..., :2] = found.descale
        call = dict.fromkeys("qkv", found.data) | {f"descale_{name}": descale for name in "qkv"}
        outs += [flexattn.attention(**call, **lengths, max_seqlen_q=1000, max_seqlen_kv=1000, fp8_recipe=recipe, backend="eager")]
        with pytest.raises(ValueError, match="descale_q has shape"):
            call["descale_q"] = descale[..., :1].expand(2, 2, 3).contiguous()
            flexattn.attention(**call, **lengths, max_seqlen_q=1000, max_seqlen_kv=1000, fp8_recipe=recipe, backend="eager")
    assert torch.equal(*outs)
    assert bool(outs[0].isfinite().all())
