"""Budgets of gradients that cancel: of one key, whose score has no gradient, so that dq and dk are roundings of dp minus delta."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.fuzz import check, delta, in_fp8, second
from tests.fuzz.calls import Call
from tests.fuzz.check import EAGER, Verdicts
from tests.fuzz.config import Config, draw_config
from tests.fuzz.delta import ADDED_AT_ONCE
from tests.fuzz.oracle import _noise, exact

QUERIES, DIM = 130, 128
SEEDS = range(60, 100)


def config_of_one_key(dtype: torch.dtype, fp8_of: str) -> Config:
    config = draw_config(0, EAGER._replace(head_dims=(DIM,)))
    return config._replace(
        kind="ordinary",
        dtype=dtype,
        q_format="bshd",
        kv_format="bshd",
        has_lengths=False,
        listed=0,
        lengths_in="",
        packing="",
        batch=2,
        heads_kv=2,
        group=2,
        head_dim_qk=DIM,
        head_dim_v=DIM,
        mask="",
        window=("open", "open"),
        bias_type="no_bias",
        softmax_type="vanilla",
        has_scale=False,
        has_softcap=False,
        dropout_p=0.0,
        score_mod=None,
        mask_mod=None,
        block_mask=None,
        extreme=None,
        wants=frozenset("qk"),
        loss=frozenset({"out"}),
        sets=(0, 0, 0),
        layouts={},
        page_size=0,
        fp8="float8_e4m3fn" if fp8_of else "",
        fp8_of=fp8_of,
        descales=("one",) * 3,
        longest=(QUERIES, 1),
    )


def cut_sum(a: Tensor, b: Tensor) -> Tensor:
    """Returns the sums of products as tensor cores add them: ADDED_AT_ONCE at a time, cut to float32."""
    total = torch.zeros(a.shape[:-1], dtype=torch.float32)
    for products in (a.double() * b.double()).split(ADDED_AT_ONCE, -1):
        exact = total.double() + products.sum(-1)
        total = exact.float()
        total = torch.where(total.double().abs() > exact.abs(), torch.nextafter(total, torch.zeros_like(total)), total)
    return total


@pytest.mark.parametrize("size_of_delta", [1.0, 1.01])
@pytest.mark.parametrize(("dtype", "fp8_of"), [(torch.float16, ""), (torch.bfloat16, ""), (torch.bfloat16, "all")])
def test_what_rounding_leaves_of_a_score_is_granted(dtype: torch.dtype, fp8_of: str, size_of_delta: float) -> None:
    """An error of delta of 1 % is not."""
    config = config_of_one_key(dtype, fp8_of)
    lengths = (QUERIES, 1)
    calls = (Call(config, seed) for seed in range(100))
    call = next(x for x in calls if (x.tensors["q"].shape[1], x.tensors["k"].shape[1]) == lengths)
    q, k, v = (call.meant[name].detach().double() for name in "qkv")
    k, v = (t.repeat_interleave(call.config.group, 2) for t in (k, v))
    dout = call.tensors["dout"].double()
    out = v.expand_as(dout).to(dtype)
    ds = cut_sum(dout, v.expand_as(dout)) - size_of_delta * (out.float() * dout.float()).sum(-1)
    ds = ds.to(dtype).double()[..., None] * call.problem().scale
    dk = (ds * q).sum(1, keepdim=True).unflatten(2, (-1, call.config.group)).sum(3)
    got = {"dq": (ds * k).to(dtype), "dk": dk.to(dtype)}
    judge, verdicts = in_fp8.compare if fp8_of else check.compare, Verdicts()
    with mock.patch.object(check, "is_cut", return_value=True), mock.patch.object(delta, "is_cut", return_value=True):
        judge(verdicts, "a call", call, got)
    assert bool(verdicts.failures()) == (size_of_delta != 1.0)


@pytest.mark.parametrize("size_of_delta", [1.0, 1.01])
def test_what_a_capture_multiplies_by_a_distance_is_granted(size_of_delta: float) -> None:
    """The gradient of ALiBi's slopes, of scores that have none. An error of delta of 1 % is not granted."""
    config = config_of_one_key(torch.float32, "")._replace(score_mod="alibi", wants=frozenset({"by_head"}))
    calls = (Call(config, seed) for seed in range(100))
    call = next(x for x in calls if (x.tensors["q"].shape[1], x.tensors["k"].shape[1]) == (QUERIES, 1))
    dout = call.tensors["dout"]
    out = call.tensors["v"].detach().repeat_interleave(config.group, 2).expand_as(dout)
    ds = cut_sum(dout, out) - size_of_delta * (out * dout).sum(-1)
    slopes = -(ds * torch.arange(QUERIES)[:, None]).sum((0, 1))
    verdicts = Verdicts()
    with mock.patch.object(check, "is_cut", return_value=True), mock.patch.object(delta, "is_cut", return_value=True):
        check.compare(verdicts, "a call", call, {"dby_head": slopes})
    assert bool(verdicts.failures()) == (size_of_delta != 1.0)


@pytest.mark.parametrize("size_of_tangent", [1.0, 1.01])
def test_what_a_rounded_lse_leaves_of_a_second_derivative_is_granted(size_of_tangent: float) -> None:
    """For a factor of the distance from the only key. An error of delta's tangent of 1 % is not granted."""
    config = config_of_one_key(torch.float32, "")._replace(score_mod="distance", wants=frozenset({"v", "by_head"}), has_scale=True)
    calls = (Call(config, seed) for seed in range(100))
    call = next(x for x in calls if (x.tensors["q"].shape[1], x.tensors["k"].shape[1]) == (QUERIES, 1))
    call._scale = 0.0
    along, distance = second._draw(call), torch.arange(QUERIES)[:, None]
    in_log2 = (call.tensors["by_head"].detach() * distance).double() * math.log2(math.e)
    weights = torch.exp2(in_log2 - in_log2.float().double())  # a kernel subtracts the rounded lse from an exact product
    dp = (call.tensors["dout"].double() * along["v"].double().repeat_interleave(config.group, 2)).sum(-1)
    found = (distance * weights * (dp - size_of_tangent * weights * dp)).sum((0, 1))
    verdicts = Verdicts()
    with mock.patch.multiple(second, _double=lambda *_: {"by_head": found.float()}, _tangents=lambda *_: {}):
        second.compare_second(verdicts, call)
    assert bool(verdicts.failures()) == (size_of_tangent != 1.0)


@pytest.mark.parametrize("size_of_tangent", [1.0 + 2.0**-9, 1.05])
def test_what_a_rounded_weight_leaves_of_second_derivatives_is_granted(size_of_tangent: float) -> None:
    """For q and k, of a score that has no gradient: all columns of out's tangent are wrong by half a step. 5 % is not granted."""
    config = config_of_one_key(torch.bfloat16, "")._replace(wants=frozenset("qkv"))
    calls = (Call(config, seed) for seed in range(100))
    call = next(x for x in calls if (x.tensors["q"].shape[1], x.tensors["k"].shape[1]) == (QUERIES, 1))
    along = second._draw(call)
    q, k, tv = (x.detach().double() for x in (call.tensors["q"], call.tensors["k"], along["v"]))
    k, tv = (t.repeat_interleave(config.group, 2) for t in (k, tv))
    ds = (1.0 - size_of_tangent) * (call.tensors["dout"].double() * tv).sum(-1, keepdim=True) * call.problem().scale
    found = {"q": ds * k, "k": (ds * q).sum(1, keepdim=True).unflatten(2, (-1, config.group)).sum(3)}
    halves, verdicts = {name: t.bfloat16() for name, t in found.items()}, Verdicts()
    with mock.patch.multiple(second, _draw=lambda _: along, _double=lambda *_: halves, _tangents=lambda *_: {}):
        second.compare_second(verdicts, call)
    assert bool(verdicts.failures()) == (size_of_tangent == 1.05)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a tensor [b, s, h, d] rounded to FP8, with a scale for each head of a sequence."""
    x = x.detach().double()
    scale = torch.finfo(dtype).max / x.abs().amax((1, 3), keepdim=True)
    return (x * scale).float().to(dtype).double() / scale


@pytest.mark.sample
@pytest.mark.parametrize("factor", [1.0, 3.0, -1.0])
def test_what_a_recipe_rounds_is_granted_in_calls_of_one_query(factor: float) -> None:
    """Exact gradients of rounded operands always are, also of the call with seed 67, whose dp nearly cancels; wrong ones rarely."""
    config = config_of_one_key(torch.float16, "all")._replace(
        head_dim_qk=16,
        head_dim_v=48,
        longest=(1, 1),
        batch=1,
        heads_kv=1,
        group=3,
        softmax_type="off-by-one",
        dropout_p=0.5,
        wants=frozenset("qkv"),
        fp8="float8_e5m2",
        fp8_of="recipe",
        descales=("none",) * 3,
    )
    calls = [call for call in (Call(config, seed) for seed in SEEDS) if call.tensors["q"].numel() and call.tensors["k"].numel()]
    failures = 0
    for call in calls:
        tensors = call.tensors | {name: rounded(call.tensors[name], torch.float8_e4m3fn) for name in "qkv"}
        assert call.dout is not None
        result = exact(call.problem(), tensors, rounded(call.dout, torch.float8_e5m2), call.dlse, call.wanted)
        verdicts = Verdicts()
        got = {f"d{name}": (factor * result.gradients[name]).to(config.dtype) for name in "qk"}
        in_fp8.compare(verdicts, "a call", call, got)
        failures += bool(verdicts.failures())
    assert failures == 0 if factor == 1.0 else failures > len(calls) / 2


@pytest.mark.parametrize("error", [0.0, 1e-4])
def test_what_rounding_makes_of_a_score_that_cancels_is_granted(error: float) -> None:
    """Sums of 192 products of a size of 1, of which a softcap of 2 leaves the ones that nearly cancel. Plain torch is exact."""
    config = config_of_one_key(torch.float32, "")._replace(
        head_dim_qk=192, has_scale=True, has_softcap=True, return_lse=True, wants=frozenset(), loss=frozenset({"lse"})
    )
    calls = (Call(config, seed) for seed in range(100))
    call = next(x for x in calls if (x.tensors["q"].shape[1], x.tensors["k"].shape[1]) == (QUERIES, 1))
    call._scale, call._softcap = 1.0, 2.0
    q, k = call.tensors["q"], call.tensors["k"].repeat_interleave(config.group, 2)
    lse = 2.0 * torch.tanh(cut_sum(q, k.expand_as(q)).double() / 2.0) + error
    verdicts = Verdicts()
    with mock.patch.object(check, "is_cut", return_value=True), mock.patch.object(check, "plain", check.exact):
        check.compare(verdicts, "a call", call, {"lse": lse.float().movedim(2, 1)})
    assert bool(verdicts.failures()) == (error != 0.0)


def test_errors_of_a_few_rows_do_not_cancel() -> None:
    """Four heads may have the same q and k, and two deltas of each sign."""
    k = torch.ones((), dtype=torch.float64, requires_grad=True)
    errors = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    assert 2.0 <= _noise(k.expand(4) * 1.0, {"k": k}, errors)["k"].item() <= 4.0
