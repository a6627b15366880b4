"""Quantising to FP8 and back: torch's pass for CPUs, and the kernels', against an oracle that goes by tokens in fp64."""

from __future__ import annotations

import mmap
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import flexattn
from flexattn import fp8
from flexattn.dispatch import quantization, triton_backend
from flexattn.dispatch.quantization import Unquantized
from tests.support import fp8_oracle
from tests.support.fp8_oracle import Packing

BF16 = torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
GPU = torch.cuda.is_available()


@pytest.fixture(params=["torch", "triton"])
def quantiser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Chooses the quantising pass for any device."""
    if request.param == "torch":
        monkeypatch.setattr(triton_backend, "_can_quantize", lambda device: False)
    assert triton_backend.can_quantize(torch.empty(0, device="cuda" if GPU else "cpu")) == (request.param == "triton")
    return str(request.param)


def draw(seed: int, device: str) -> tuple[Tensor, Packing, fp8.Recipe, torch.dtype]:
    """A tensor with NaN, infinities and numbers of all sizes, and NaN or huge numbers in its padding."""
    rng, generator = Random(seed), torch.Generator().manual_seed(seed)
    fmt = rng.choice(["bshd", "sbhd", "bhsd", "thd", "thd", "thd"])
    batch, heads, head_dim = rng.choice([1, 2, 3]), rng.choice([1, 2, 3]), rng.choice([16, 24, 48])
    lengths = [rng.choice([0, 1, 40, 70, 150]) for _ in range(batch)]
    padding = rng.choice([torch.nan, torch.inf, 3e4])
    cu, padded, longest = torch.tensor([0, *lengths]).cumsum(0).int(), None, None
    if fmt == "thd":
        longest = rng.choice([max(lengths), max(lengths) + 100, max(1, max(lengths) // 2)])
        slots = lengths
        if rng.random() < 0.6:
            slots = [n + rng.choice([0, 3, 20]) for n in lengths]
            padded = (torch.tensor([0, *slots]).cumsum(0) + rng.choice([0, 0, 5])).int()
        shape: tuple[int, ...] = (int(cu[-1] if padded is None else padded[-1]) + rng.choice([0, 4]), heads, head_dim)
    else:
        most = max(1, *lengths)
        shape = tuple({"b": batch, "s": most, "h": heads, "d": head_dim}[dim] for dim in fmt)
    where = Packing(fmt, cu if fmt == "thd" or rng.random() < 0.6 else None, padded, longest)
    values = torch.randn(shape, generator=generator) * rng.choice([1e-5, 1.0, 1.0, 300.0])
    dtype = rng.choice([BF16, torch.float16, torch.float32])
    if dtype is not torch.float16:
        values *= rng.choice([1.0, 1.0, 1e-36, 1e30])
    x = torch.full(shape, padding, dtype=dtype)
    for (*_, row), (*_, target) in zip(
        fp8_oracle.tokens(values, where._replace(max_seqlen=None)),
        fp8_oracle.tokens(x, where._replace(max_seqlen=None)),
        strict=True,
    ):
        target.copy_(row * (100.0 if rng.random() < 0.1 else 1.0))
        if rng.random() < 0.05:
            target[rng.randrange(heads), rng.randrange(head_dim)] = rng.choice([torch.nan, torch.inf, -torch.inf])
    granularity = rng.choice(quantization.GRANULARITIES)
    rows = rng.choice([64, 128]) if granularity == "block" else None
    recipe = fp8.Recipe(granularity=granularity, block_rows=rows, margin=rng.choice([0, 0, rng.randint(-14, 14)]))
    where = Packing(*(t.to(device) if isinstance(t, Tensor) else t for t in where))
    return x.to(device), where, recipe, rng.choice([E4M3, E5M2])


def check_drawn(seed: int, device: str) -> None:
    x, where, recipe, dtype = draw(seed, device)
    lengths = {"qkv_format": where.fmt, "cu_seqlens": where.cu_seqlens, "cu_seqlens_padded": where.cu_seqlens_padded}
    got = fp8.quantize(x, recipe, **lengths, max_seqlen=where.max_seqlen, dtype=dtype)
    on_host = Packing(*(t.cpu() if isinstance(t, Tensor) else t for t in where))
    want = fp8_oracle.quantize(x.cpu(), on_host, dtype, recipe.granularity, recipe.rows, recipe.margin)
    blocks = got.amax.shape[2]  # as many blocks as the tokens fill, up to the next power of two, for any max_seqlen
    assert torch.equal(got.amax.cpu().double(), want.amax[..., :blocks]), (seed, "amax")
    assert torch.equal(got.descale.cpu().double(), want.descale[..., :blocks]), (seed, "descale")
    assert not want.amax[..., blocks:].any(), seed
    codes = got.data.cpu().double()
    assert torch.equal(codes.isnan(), want.codes.isnan()), (seed, "NaN")
    assert torch.equal(codes.nan_to_num(), want.codes.nan_to_num()), (seed, "data")
    exact = fp8_oracle.dequantized(want, on_host, recipe.rows)
    for to in (torch.float16, BF16, torch.float32):
        back = fp8.dequantize(got, recipe, **lengths, dtype=to).cpu()
        assert torch.equal(back.nan_to_num(), exact.float().to(to).nan_to_num()), (seed, to)


@pytest.mark.sample("quantiser")
@pytest.mark.parametrize("seed", range(20))
def test_drawn_tensors(seed: int, quantiser: str, device: str) -> None:
    check_drawn(seed, device)


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", range(100, 1100, 100))
def test_more_drawn_tensors(first: int, quantiser: str, device: str) -> None:
    for seed in range(first, first + 100):
        check_drawn(seed, device)


@pytest.mark.sample("margin", "amax", "quantiser")
@pytest.mark.parametrize("margin", [-14, -8, 1, 14])
@pytest.mark.parametrize("amax", [3.38e38, 1.0, 1e-30, 1e-38])
def test_every_margin(margin: int, amax: float, quantiser: str, device: str) -> None:
    """For numbers of any size, scales and descales are finite, normal and each other's inverse."""
    x = (torch.linspace(-1, 1, 64 * 16).view(1, 64, 1, 16) * amax).to(BF16)
    for dtype in (E4M3, E5M2):
        got = fp8.quantize(x.to(device), fp8.Recipe(margin=margin), dtype=dtype)
        want = fp8_oracle.quantize(x, Packing("bshd"), dtype, "head", 0, margin)
        assert torch.equal(got.data.cpu().double(), want.codes)
        assert torch.equal(got.descale.cpu().double(), want.descale)
        assert 2.0**-120 <= float(got.descale) <= 2.0**120
        if margin > 0 and amax >= 1e-30:  # the largest number is still a normal one
            assert float(got.data.float().abs().max()) >= torch.finfo(dtype).tiny


@pytest.mark.parametrize("margin", [15, -15, 100, 2000, -2000])
def test_margins_that_leave_no_number(margin: int) -> None:
    with pytest.raises(ValueError, match=f"margin is {margin}; accepted: an int from -14 to 14"):
        fp8.Recipe(margin=margin)


def test_tokens_before_the_first_slot_and_behind_max_seqlen_count_for_nothing(quantiser: str, device: str) -> None:
    x = torch.ones(20, 2, 16, dtype=BF16, device=device)
    x[:4], x[10:12], x[17:] = 1000.0, 1000.0, 1000.0  # before the first slot, behind max_seqlen, behind the last sequence
    cu, padded = (torch.tensor(t, dtype=torch.int32, device=device) for t in ([0, 8, 13], [4, 12, 17]))
    for granularity in quantization.GRANULARITIES:
        lengths = {"qkv_format": "thd", "cu_seqlens": cu, "cu_seqlens_padded": padded}
        got = fp8.quantize(x, fp8.Recipe(granularity=granularity), **lengths, max_seqlen=6)
        assert bool((got.amax == 1).all())
        is_real = torch.zeros(20, dtype=torch.bool, device=device)
        is_real[4:10], is_real[12:17] = True, True
        assert bool((got.data[is_real].float() == 448).all())
        assert not got.data[~is_real].float().any()


def test_slots_in_any_order(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend, "_can_quantize", lambda device: False)
    x = torch.arange(1, 13, dtype=torch.float32, device=device).to(BF16).view(12, 1, 1).expand(12, 2, 16).contiguous()
    # tokens 7 8 9 | none, at the same place | 1 2: amax 9, 0 and 2 of numbers that are the row's index plus one
    cu, padded = (torch.tensor(t, dtype=torch.int32, device=device) for t in ([0, 3, 3, 5], [6, 6, 0, 3]))
    lengths = {"qkv_format": "thd", "cu_seqlens": cu, "cu_seqlens_padded": padded}
    recipe = fp8.Recipe(granularity="batch_head")
    got = fp8.quantize(x, recipe, **lengths, max_seqlen=3)
    assert got.amax.flatten().tolist() == [9, 9, 0, 0, 2, 2]
    back = fp8.dequantize(got, recipe, **lengths)
    wanted = torch.zeros(12, device=device)
    wanted[:2], wanted[6:9] = x[:2, 0, 0], x[6:9, 0, 0]
    assert torch.allclose(back[:, 1, 3].float(), wanted, rtol=2**-4)


def test_rows_that_are_far_apart(device: str) -> None:
    """Rows of one tile are 2**31 elements or more from its first row; the last one is read and written at its own address."""
    rows, stride = 260, 2**23
    size = ((rows - 1) * stride + 16) * 2
    if GPU:
        whole = torch.empty(size // 2, dtype=BF16, device=device)
    else:  # untouched pages take no memory
        whole = torch.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=BF16)
    x = whole.as_strided((1, rows, 1, 16), (0, stride, 16, 1))
    x.copy_(torch.linspace(-1, 1, rows * 16).view(1, rows, 1, 16))
    want = fp8_oracle.quantize(x.cpu(), Packing("bshd"), E4M3, "tensor", 0, 0)
    got = triton_backend.quantize([Unquantized(x, "bshd", None, None, rows, None)], E4M3, "tensor", 0, 0)
    assert torch.equal(got[0][0].cpu().double(), want.codes)
    assert float(got[2]) == float(want.amax)


@pytest.mark.parametrize("dtype", [torch.float16, BF16, torch.float32, torch.float64])
def test_dequantize_rounds_once(dtype: torch.dtype, device: str) -> None:
    """Values that 16 bits can hold are not lost, even if 16 bits cannot hold their descale."""
    for size, to in ((1e-3, E5M2), (1e-4, E4M3), (3.0, E4M3), (1e9, E4M3)):
        x = (torch.linspace(-1, 1, 64 * 32) * size).view(1, 64, 1, 32).to(BF16)
        x[0, 1] = 0.0
        want = fp8_oracle.quantize(x, Packing("bshd"), to, "head", 0, 0)
        back = fp8.dequantize(fp8.quantize(x.to(device), dtype=to), dtype=dtype)
        exact = fp8_oracle.dequantized(want, Packing("bshd"), 0)
        assert back.dtype is dtype
        assert torch.equal(back.cpu(), exact if dtype is torch.float64 else exact.float().to(dtype))


@pytest.mark.parametrize("fmt", ["bshd", "thd"])
def test_dequantize_refuses_what_did_not_make_the_tensor(fmt: str, device: str) -> None:
    x = torch.randn(2, 256, 2, 16).to(device, BF16) if fmt == "bshd" else torch.randn(512, 2, 16).to(device, BF16)
    cu = torch.tensor([0, 256, 512], dtype=torch.int32, device=device) if fmt == "thd" else None
    how: dict[str, Any] = {"qkv_format": fmt, "cu_seqlens": cu}
    own = fp8.Recipe(granularity="block", block_rows=192)
    found = fp8.quantize(x, own, **how, max_seqlen=256 if fmt == "thd" else None)
    assert found.block_rows == 192
    assert float((fp8.dequantize(found, own, **how) - x).float().norm() / x.float().norm()) < 0.04
    # As many blocks, and others: shapes cannot tell them apart.
    for recipe in (fp8.Recipe(), fp8.Recipe(granularity="block"), fp8.Recipe(granularity="block", block_rows=64)):
        with pytest.raises(ValueError, match=r"scaled by blocks of 192 rows.*accepted: the recipe that made x"):
            fp8.dequantize(found, recipe, **how)
    with pytest.raises(ValueError, match="scaled by blocks of 0 rows"):
        fp8.dequantize(found._replace(block_rows=0), own, **how)
    with pytest.raises(ValueError, match=r"x.descale has shape \(3, 2, 2\); accepted: \[2 \| 1, 2 \| 1, blocks\]"):
        fp8.dequantize(found._replace(descale=torch.ones(3, 2, 2, device=device)), own, **how)
    if fmt == "thd":
        with pytest.raises(ValueError, match="cu_seqlens is None"):
            fp8.dequantize(found, own, qkv_format=fmt)


def test_a_quantized_tensor_says_how_it_is_given(device: str) -> None:
    x = torch.randn(1, 64, 2, 32, device=device).to(BF16)
    found = fp8.quantize(x)
    for name in "qkv":
        given = {"q": found.data, "k": found.data, "v": found.data, name: found}
        with pytest.raises(
            TypeError, match=rf"^{name} is a QuantizedTensor; accepted: {name}\.data, with descale_{name}={name}\.descale"
        ):
            flexattn.attention(**given)


@pytest.mark.parametrize("granularity", quantization.GRANULARITIES)
@pytest.mark.parametrize(
    ("fmt", "tokens", "cu_seqlens"),
    [("thd", 0, [0, 0, 0]), ("thd", 4, [0]), ("thd", 0, [0]), ("bshd", 0, None), ("sbhd", 0, None), ("bhsd", 3, None)],
)
def test_nothing_to_quantise(
    fmt: str, tokens: int, cu_seqlens: list[int] | None, granularity: str, quantiser: str, device: str
) -> None:
    """No tokens, no sequences, or a batch of none."""
    shape = tuple({"t": tokens, "b": 0 if tokens else 2, "s": tokens, "h": 2, "d": 16}[dim] for dim in fmt)
    x, recipe = torch.randn(shape, device=device).to(BF16), fp8.Recipe(granularity=granularity)
    cu = None if cu_seqlens is None else torch.tensor(cu_seqlens, dtype=torch.int32, device=device)
    for padded in (None, cu) if fmt == "thd" else (None,):
        lengths = {"qkv_format": fmt, "cu_seqlens": cu, "cu_seqlens_padded": padded}
        found = fp8.quantize(x, recipe, **lengths, max_seqlen=tokens if fmt == "thd" else None)
        assert not found.data.float().any()
        assert bool((found.descale == 1).all())
        assert not found.amax.any()
        back = fp8.dequantize(found, recipe, **lengths)
        assert back.shape == x.shape
        assert not back.any()


@pytest.mark.parametrize("shape", [(2, 4, 0, 16), (2, 4, 2, 0)])
def test_no_heads_or_channels(shape: tuple[int, ...], device: str) -> None:
    with pytest.raises(ValueError, match="accepted: at least one head and a head dim of at least 1"):
        fp8.quantize(torch.ones(shape, device=device))
