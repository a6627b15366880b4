"""Quantising by programs that draw items and hold them: the bits of `quantize`, whichever program is where when another goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flexattn.dispatch import triton_backend
from flexattn.dispatch.quantization import Unquantized
from flexattn.kernels_triton.ahead_of_time.compile_report import request_for
from flexattn.kernels_triton.common import quantize, quantize_once
from flexattn.kernels_triton.runtime.launch import pretended_device, recorded_launches
from tests.support.compiled_kernels import compile_sound
from tests.support.interleaved import interleaved

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
GPU = torch.cuda.is_available()
without_gpu = pytest.mark.skipif(GPU, reason="the GPU runs programs at a time, in an order of its own")
HEADS = (6, 2, 2)


def unquantized(fmt: str, rotation: bool = False, kv_fmt: str | None = None, device: str = "cpu") -> list[Unquantized]:
    """q, k and v, of which each head has a largest number of its own; q and k are of unlike lengths."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for i, (heads, tokens) in enumerate(zip(HEADS, (130, 170, 170), strict=True)):
        x = torch.randn(2, tokens, heads, 16, generator=generator) * torch.arange(1, heads + 1)[:, None]
        own_fmt = fmt if i == 0 or kv_fmt is None else kv_fmt
        cu, longest = None, tokens
        if own_fmt == "thd":
            x, longest = x.flatten(0, 1), tokens + 20
            cu = torch.tensor([0, tokens + 20, 2 * tokens], dtype=torch.int32, device=device)
        elif own_fmt == "sbhd":
            x = x.transpose(0, 1).contiguous()
        found.append(Unquantized(x.to(device, BF16), own_fmt, cu, None, longest, None, rotation and i < 2))
    return found


def run(given: list[Unquantized], granularity: str) -> list[Tensor]:
    data, descales, amax = triton_backend.quantize(given, E4M3, granularity, 0, 0)
    return [*(t.view(torch.uint8) for t in data), *descales, amax]


def check(given: list[Unquantized], granularity: str, monkeypatch: pytest.MonkeyPatch, **turns: int) -> None:
    monkeypatch.delenv("FLEXATTN_HOPPER", raising=False)
    wanted = run(given, granularity)
    monkeypatch.setenv("FLEXATTN_HOPPER", "always")
    if turns:
        with interleaved(**turns):
            found = run(given, granularity)
    else:
        found = run(given, granularity)
    assert all(map(torch.equal, found, wanted)), turns


@pytest.fixture
def small_items(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sections of 10 to 110 items each, and 12 programs to draw them."""
    monkeypatch.setattr(quantize, "_ELEMENTS", 16)
    monkeypatch.setattr(quantize_once, "_PROGRAMS", 3)


@pytest.mark.parametrize("granularity", ["tensor", "head", "batch_head"])
@pytest.mark.parametrize(("fmt", "kv_fmt", "rotation"), [("bshd", None, False), ("thd", None, True), ("sbhd", "thd", False)])
def test_its_bits_are_those_of_two_launches(
    fmt: str, kv_fmt: str | None, rotation: bool, granularity: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(30 if GPU else 1):
        check(unquantized(fmt, rotation, kv_fmt, device), granularity, monkeypatch)


@pytest.mark.skipif(not GPU, reason="CUDA graphs are a GPU's")
@pytest.mark.parametrize("granularity", ["tensor", "head"])
def test_a_graph_that_is_replayed_begins_with_zeros(granularity: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counters and amax of a replay are not those that the one before left: each has numbers of its own, smaller ones at last."""
    monkeypatch.setenv("FLEXATTN_HOPPER", "always")
    given = [t._replace(x=t.x.repeat(1, 16, 1, 1), max_seqlen=16 * t.max_seqlen) for t in unquantized("bshd", device="cuda")]
    run(given, granularity)  # which compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(given, granularity)
    for factor in (3.0, 0.25, 0.5):
        for t in given:
            t.x.mul_(factor)
        graph.replay()
        monkeypatch.delenv("FLEXATTN_HOPPER")
        assert all(map(torch.equal, found, run(given, granularity)))
        monkeypatch.setenv("FLEXATTN_HOPPER", "always")


@without_gpu
@pytest.mark.parametrize("at_once", [1, 3, 12])
@pytest.mark.parametrize("granularity", ["tensor", "head", "batch_head"])
def test_programs_in_turns(granularity: str, at_once: int, small_items: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many run at a time: with one of them nobody else ever finds what it waits for."""
    for seed in range(2):
        check(unquantized("thd"), granularity, monkeypatch, seed=seed, at_once=at_once)


@without_gpu
@pytest.mark.exhaustive
@pytest.mark.parametrize("at_once", [2, 5, 12])
def test_programs_in_many_turns(at_once: int, small_items: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(3, 40):
        check(unquantized("bshd"), "head", monkeypatch, seed=seed, at_once=at_once)


def test_tensors_that_are_alike_share_a_launch(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXATTN_HOPPER", "always")
    launches: list[Any] = []
    monkeypatch.setattr(quantize_once, "launch", lambda kernel, *rest: launches.append(kernel.__name__))
    padded = unquantized("bshd")
    padded[0] = padded[0]._replace(cu_seqlens=torch.tensor([0, 100, 170], dtype=torch.int32, device=device))
    for given, count in (
        (unquantized("bshd"), 1),
        (unquantized("bshd", rotation=True), 2),
        (unquantized("bshd", kv_fmt="thd"), 2),
        (padded, 2),
    ):
        launches.clear()
        run([t._replace(x=t.x.to(device)) for t in given], "head")
        assert launches == ["_quantize_once_kernel"] * count


@pytest.mark.parametrize("wish", ["auto", "never", "always"])
def test_what_never_ran_on_a_gpu_runs_where_it_is_asked_for_alone(wish: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXATTN_HOPPER", wish)
    launches: list[Any] = []
    for module in (quantize, quantize_once):
        monkeypatch.setattr(module, "launch", lambda kernel, *rest: launches.append(kernel.__name__))
    given = [t._replace(x=t.x.to(device)) for t in unquantized("bshd")]
    run(given, "head")
    assert launches == (["_quantize_once_kernel"] if wish == "always" else ["_quantize_kernel"] * 2)
    launches.clear()
    triton_backend.quantize(
        [t._replace(scale=torch.ones(h, device=device)) for t, h in zip(given, HEADS, strict=True)], E4M3, "head", 0, 0
    )
    run(given, "tensor")
    triton_backend.quantize(given, E4M3, "block", 64, 0)
    assert launches[0] == launches[-1] == "_quantize_kernel"


COMPILED = [(sm, dims, rotation) for sm in (89, 90, 100, 120) for dims in (64, 128, 192, 256) for rotation in (False, True)]


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param([(90, 128, False), (90, 128, True), (100, 128, True)], marks=pytest.mark.slow, id="some"),
        pytest.param(COMPILED, marks=pytest.mark.exhaustive, id="all"),
    ],
)
def test_compiled(cases: list[tuple[int, int, bool]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A program holds a tile of 8192 numbers in registers, and nothing of it is spilled."""
    monkeypatch.setenv("FLEXATTN_HOPPER", "always")
    requests = []
    for sm, dim, rotation in cases:
        x = torch.empty(2, 256, 4, dim, dtype=BF16)
        given = [Unquantized(x, "bshd", None, None, 256, None, rotation and i < 2) for i in range(3)]
        with pretended_device(sm, 132), recorded_launches() as launches:
            triton_backend.quantize(given, E4M3, "head", 0, 0)
        requests += [request_for(launch, sm) for launch in launches]
    for report in compile_sound(requests):
        assert report.spill_store_bytes == 0, str(report)
        assert report.shared_bytes <= 48 * 2**10, str(report)
