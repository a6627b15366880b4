"""FP8 on cuDNN on a GPU: every result against the reference in fp64 on the same FP8 values, and its execution."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.gpu.test_cudnn import why_not

if reason := why_not():
    pytest.skip(reason, allow_module_level=True)

import flexattn
from flexattn.kernels_cudnn import fp8
from flexattn.testing import GRADIENT_FACTOR, check_close, make_dout, make_inputs
from tests.support.fp8_cases import E4M3, E5M2, Case, backward, forward, make_case, rounded_attention, takes_backward

NEG_INF = float("-inf")
NAN = float("nan")
EQUAL = {"lengths_q": [333, 333], "lengths_kv": [389, 389]}
FEWER_KEYS = {"lengths_q": [389, 389], "lengths_kv": [201, 201]}
TILES = {"lengths_q": [256, 256], "lengths_kv": [384, 384]}
HALF_A_TILE = {"lengths_q": [256, 256], "lengths_kv": [320, 320]}
UNEVEN = {"lengths_q": [333, 70], "lengths_kv": [201, 389], "padding": True, "gap": 5}
EMPTY = {"lengths_q": [333, 0, 70, 129], "lengths_kv": [201, 40, 389, 0], "padding": True, "gap": 5}
PACKED = {**EMPTY, "padding": False}
CAUSAL = {"attn_mask_type": "causal"}
PADDED_CAUSAL = {"attn_mask_type": "padding_causal"}


def top_left(left: int, right: int, **call: Any) -> dict[str, Any]:
    return {"window_size": (left, right), "bottom_right_diagonal": False, **call}


DENSE: dict[str, dict[str, Any]] = {
    "bshd": EQUAL,
    "sbhd": {**EQUAL, "fmt": "sbhd"},
    "bhsd": {**EQUAL, "fmt": "bhsd"},
    "strided": {**EQUAL, "strided": True},
    "causal": {**EQUAL, "call": CAUSAL},
    "causal, fewer keys": {**FEWER_KEYS, "call": CAUSAL},
    "fewer keys": FEWER_KEYS,
    "whole tiles": TILES,
    "whole tiles, causal": {**TILES, "call": CAUSAL},
    "half a tile": HALF_A_TILE,
    "few keys": {"lengths_q": [129, 129], "lengths_kv": [3, 3]},
    "one key head": {**EQUAL, "num_heads": 5, "num_heads_kv": 1},
    "equal heads": {**EQUAL, "num_heads": 4, "num_heads_kv": 4, "call": CAUSAL},
    "e5m2": {**EQUAL, "dtype": E5M2},
    "e4m3 gradients": {**EQUAL, "dout_dtype": E4M3},
    "e4m3 gradients, causal": {**TILES, "dout_dtype": E4M3, "call": CAUSAL},
    "scales of 1": {**EQUAL, "fills": False},
    "outliers": {**EQUAL, "outliers": True, "call": {"softmax_scale": 0.02}},
    "long": {"lengths_q": [4096], "lengths_kv": [4096], "num_heads": 2, "num_heads_kv": 1, "call": CAUSAL},
    **{f"head dims {d}": {**EQUAL, "head_dim_qk": d[0], "head_dim_v": d[1]} for d in ((64, 64), (96, 96), (192, 128), (256, 256))},
    **{f"head dims {d}": {**TILES, "head_dim_qk": d[0], "head_dim_v": d[1]} for d in ((16, 16), (48, 80), (64, 128))},
}
LENGTHS: dict[str, dict[str, Any]] = {
    "lengths": UNEVEN,
    "lengths, sbhd": {**UNEVEN, "fmt": "sbhd"},
    "lengths, causal": {**UNEVEN, "call": PADDED_CAUSAL},
    "empty sequences": EMPTY,
    "empty sequences, causal": {**EMPTY, "call": PADDED_CAUSAL},
    "no key but one": {"lengths_q": [300, 300], "lengths_kv": [0, 1], "padding": True, "gap": 5},
}
PACKINGS: dict[str, dict[str, Any]] = {
    "thd": {**PACKED, "fmt": "thd", "gap": 0},
    "thd without empty sequences": {"lengths_q": [333, 70, 129, 200], "lengths_kv": [333, 70, 129, 200], "fmt": "thd"},
    "thd with gaps": {**PACKED, "fmt": "thd"},
    "thd, causal": {**PACKED, "fmt": "thd", "call": PADDED_CAUSAL},
    "mixed": {**EMPTY, "fmt": "thd_2bshd"},
    "thd, head dim 64": {**PACKED, "fmt": "thd", "head_dim_qk": 64, "head_dim_v": 64},
}
WINDOWS: dict[str, dict[str, Any]] = {
    "both sides": {**EQUAL, "call": top_left(9, 4)},
    "under a causal mask": {**EQUAL, "call": top_left(70, 0)},
    "itself": {**TILES, "call": top_left(0, 0)},
    "open on the left": {**FEWER_KEYS, "call": top_left(-1, 40)},
    "open on the right": {**EQUAL, "call": top_left(130, -1)},
    "as far as each query sees a key": {"lengths_q": [300], "lengths_kv": [270], "call": top_left(30, 4)},
}


def check(case: Case) -> None:
    budget = rounded_attention(case)
    ref_out, ref_lse = case.reference()
    out, lse = forward(case, torch.float32)
    check_close("lse", lse, ref_lse, budget.lse)
    check_close("out", out, ref_out, budget.out)
    if takes_backward(case):
        grads = backward(case, out.bfloat16(), lse, torch.float32)
        exact = case.reference_gradients()
        for name, got, ref, eager in zip(("dq", "dk", "dv"), grads, exact[:3], budget.gradients, strict=True):
            check_close(name, got, ref, eager, factor=GRADIENT_FACTOR)


@pytest.mark.parametrize("name", DENSE)
def test_dense(name: str) -> None:
    check(make_case(**DENSE[name], device="cuda"))


@pytest.mark.parametrize("name", LENGTHS)
def test_lengths(name: str) -> None:
    check(make_case(**LENGTHS[name], device="cuda"))


@pytest.mark.parametrize("name", PACKINGS)
def test_packed(name: str) -> None:
    check(make_case(**PACKINGS[name], device="cuda"))


@pytest.mark.parametrize("name", WINDOWS)
def test_windows(name: str) -> None:
    check(make_case(**WINDOWS[name], device="cuda"))


def test_backward_of_a_window_that_the_forward_refuses() -> None:
    """With lengths, after a forward on another backend: queries without keys too."""
    case = make_case(**UNEVEN, call=top_left(20, 20, attn_mask_type="padding"), device="cuda")
    ref_out, ref_lse = case.reference()
    budget = rounded_attention(case)
    grads = backward(case, ref_out.bfloat16(), ref_lse.float(), torch.float32)
    for name, got, ref, eager in zip(("dq", "dk", "dv"), grads, case.reference_gradients()[:3], budget.gradients, strict=True):
        check_close(name, got, ref, eager, factor=GRADIENT_FACTOR)


@pytest.mark.parametrize("skv", [192, 320, 256, 200])
def test_very_negative_lse_gives_no_nan(skv: int) -> None:
    """pytorch issue 196678, in FP8: a row whose lse is below -88.7, and a last tile of keys that is not full."""
    case = make_case(lengths_q=[256, 256], lengths_kv=[skv, skv], device="cuda")
    q, k = (case.given.q.float().abs(), -case.given.k.float().abs())
    given = case.given._replace(q=q.to(E4M3), k=k.to(E4M3))
    x = case.x._replace(q=given.q.double() * case.descales.q, k=given.k.double() * case.descales.k, softmax_scale=1.5)
    case = case._replace(given=given, x=x)
    assert case.reference()[1].min() < -89
    check(case)


def test_a_nan_stays_in_its_row() -> None:
    case = make_case(**TILES, device="cuda")
    clean, _ = forward(case, torch.float32)
    q = case.given.q.clone()
    q.view(torch.uint8)[0, 17, 2, 5] = 0x7F  # NaN
    out, lse = forward(case._replace(given=case.given._replace(q=q)), torch.float32)
    assert out[0, 17, 2].isnan().all()
    assert lse[0, 2, 17].isnan()
    out[0, 17, 2] = clean[0, 17, 2]
    assert torch.equal(out, clean)


def test_zeros_are_right() -> None:
    case = make_case(**EQUAL, device="cuda")
    zeros = {name: torch.zeros_like(getattr(case.given, name)) for name in "qkv"}
    case = case._replace(given=case.given._replace(**zeros), dout=torch.zeros_like(case.dout))
    out, lse = forward(case, torch.float32)
    assert not out.any()
    torch.testing.assert_close(lse, torch.full_like(lse, 389.0).log())
    grads = backward(case, out.bfloat16(), lse, torch.float32)
    assert not any(grad.any() for grad in grads)


def test_forwards_repeat_to_the_bit() -> None:
    case = make_case(lengths_q=[1311, 1311], device="cuda", call=CAUSAL)
    first = forward(case, torch.float32)
    for _ in range(16):
        again = forward(case, torch.float32)
        assert torch.equal(again[0], first[0])
        assert torch.equal(again[1], first[1])


def leaves_of(inputs: Any) -> list[torch.Tensor]:
    return [t.detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]


CALL = {
    "fp8_recipe": flexattn.fp8.Recipe(fp8_format="HYBRID", granularity="tensor"),
    "attn_mask_type": "causal",
    "backend": "cudnn",
}


def given_of(seed: int = 0) -> Any:
    kwargs = {"head_dim_qk": 128, "head_dim_v": 128, "dtype": torch.bfloat16, "device": "cuda", "seed": seed}
    return make_inputs(lengths_q=[700, 700], **kwargs)


def test_a_call_by_name() -> None:
    given = given_of()
    leaves, dout = leaves_of(given), make_dout(given)
    explained = flexattn.explain(*leaves, **CALL)
    assert (explained.forward.backend, explained.backward.backend) == ("cudnn", "cudnn")
    out = flexattn.attention(*leaves, **CALL)
    half = flexattn.attention(*leaves, attn_mask_type="causal", backend="cudnn")
    for got, ref in zip(
        (out, *torch.autograd.grad(out, leaves, dout)), (half, *torch.autograd.grad(half, leaves, dout)), strict=True
    ):
        error = (got.double() - ref.double()).detach().square().mean().sqrt() / ref.detach().double().square().mean().sqrt()
        assert error < 0.15  # e5m2 has two bits, and dout, the scores' gradient and dq use it


def test_a_cuda_graph_replays_with_new_inputs() -> None:
    given = given_of()
    leaves, dout = leaves_of(given), make_dout(given)

    def step() -> list[torch.Tensor]:
        out = flexattn.attention(*leaves, **CALL)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in (1, 2):
        other = given_of(seed)
        with torch.no_grad():
            for leaf, t in zip(leaves, (other.q, other.k, other.v), strict=True):
                leaf.copy_(t)
        graph.replay()
        expected = step()
        assert torch.equal(captured[0], expected[0])
        for a, b in zip(captured[1:], expected[1:], strict=True):
            torch.testing.assert_close(a, b, rtol=0.26, atol=float(b.abs().max()) / 64)


def test_launchers_refuse_what_may_never_end() -> None:
    from flexattn.kernels_cudnn.plans import PlanNotSupported

    case = make_case(**UNEVEN, call=top_left(9, 4, attn_mask_type="padding"), device="cuda")
    with pytest.raises(PlanNotSupported, match="issues/1009"):
        forward(case, torch.float32)
    assert fp8._may_hang(case.problem())
