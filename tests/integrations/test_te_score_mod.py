"""TransformerEngine's callbacks, as its own tests write them, on each backend."""

from __future__ import annotations

import importlib
import math
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from flexattn import attention, call_cache
from flexattn.integrations.te import TEScoreMod
from flexattn.mods.trace import cache_info, clear_cache
from tests.mods.test_score_mod import HEADS, HEADS_KV
from tests.support import te_callbacks

LIMIT = 2e-5  # share of the largest value: fp32 against fp64


def causal(graph: Any, score: Any, tensors: Any) -> Any:
    row = graph.gen_index(input=score, axis=2).set_data_type("INT32")
    column = graph.gen_index(input=score, axis=3)
    column.set_data_type("INT32")
    keep = graph.cmp_ge(input=row, comparison=column, compute_data_type="BOOLEAN")
    return graph.binary_select(input0=score, input1=tensors["neg_inf"], mask=keep)


def causal_bprop(graph: Any, gradient: Any, tensors: Any) -> Any:
    keep = graph.cmp_ge(graph.gen_index(gradient, 2), graph.gen_index(gradient, 3))
    return graph.binary_select(input0=gradient, input1=tensors["zero"], mask=keep)


class Softcap:
    """Keeps the tanh of the forward on itself for the backward."""

    def __init__(self, wrong: bool = False) -> None:
        self.wrong = wrong

    def forward(self, graph: Any, score: Any, tensors: Any) -> Any:
        self.tanh = graph.tanh(input=graph.div(a=score, b=tensors["cap"]))
        return graph.mul(a=self.tanh, b=tensors["cap"])

    def backward(self, graph: Any, gradient: Any, tensors: Any) -> Any:
        one = tensors["one"]
        square = self.tanh if self.wrong else graph.mul(a=self.tanh, b=self.tanh)
        return graph.mul(a=gradient, b=graph.sub(a=one, b=square))

    def score_mod_graph_cache_key(self) -> str:
        return "softcap"


def post_scale_bias(graph: Any, score: Any, tensors: Any) -> Any:
    return graph.add(a=score, b=tensors["bias"])


def scalar(value: float) -> Tensor:
    return torch.full((1, 1, 1, 1), value)


def run(mod: Any, device: str, backend: str, captured: tuple[Tensor, ...] = (), **call: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 20, HEADS, 16), (2, 45, HEADS_KV, 16), (2, 45, HEADS_KV, 16))
    q, k, v = (torch.randn(s, generator=generator).to(device).requires_grad_() for s in shapes)
    out = attention(q, k, v, score_mod=mod, backend=backend, **call)
    dout = torch.randn(2, 20, HEADS, 16, generator=generator).to(device)
    return [out, *torch.autograd.grad(out, (q, k, v, *captured), dout)]  # type: ignore[arg-type]


def close(got: list[Tensor], want: list[Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        assert (a - b).abs().max() <= LIMIT * max(1.0, float(b.abs().max()))


@pytest.mark.sample
@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_causal(backend: str, device: str) -> None:
    want = run(None, device, backend, attn_mask_type="causal")
    neg_inf, zero = scalar(-math.inf), scalar(0.0)
    close(run(TEScoreMod(causal, score_mod_tensors={"neg_inf": neg_inf}), device, backend), want)
    mod = TEScoreMod(causal, causal_bprop, {"neg_inf": neg_inf}, {"zero": zero})
    mod.check_bprop()
    close(run(mod, device, backend), want)


@pytest.mark.sample
@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_softcap_with_state_and_every_other_feature(backend: str, device: str) -> None:
    call = {"attn_mask_type": "causal_bottom_right", "window_size": (20, 0), "softmax_type": "off-by-one"}
    want = run(None, device, backend, softcap=1.5, **call)
    tensors = {"cap": scalar(1.5), "one": scalar(1.0)}
    softcap = Softcap()
    close(run(TEScoreMod(softcap.forward, score_mod_tensors=tensors), device, backend, **call), want)
    mod = TEScoreMod(softcap.forward, softcap.backward, tensors)
    mod.check_bprop()
    close(run(mod, device, backend, **call), want)
    assert not hasattr(softcap, "tanh"), "a trace leaves nothing on the user's object"


@pytest.mark.sample
@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_tensors_get_gradients(backend: str, device: str) -> None:
    bias = torch.randn(1, HEADS, 20, 45, generator=torch.Generator().manual_seed(2)).to(device).requires_grad_()
    want = run(None, device, backend, (bias,), bias=bias, bias_type="post_scale_bias")
    close(run(TEScoreMod(post_scale_bias, score_mod_tensors={"bias": bias}), device, backend, (bias,)), want)
    with pytest.raises(ValueError, match=r"score_mod_tensors\['bias'\] requires a gradient"):
        TEScoreMod(post_scale_bias, lambda graph, gradient, tensors: gradient, {"bias": bias})


@pytest.mark.sample
@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_a_bprop_is_used_as_it_is_given(backend: str, device: str) -> None:
    right, wrong = Softcap(), Softcap(wrong=True)
    tensors = {"cap": scalar(1.5), "one": scalar(1.0)}
    results = [run(TEScoreMod(s.forward, s.backward, tensors), device, backend) for s in (right, wrong)]
    assert torch.equal(results[0][0], results[1][0])
    assert not torch.allclose(results[0][1], results[1][1], atol=1e-3)
    with pytest.raises(ValueError, match=r"score_mod_bprop gives .* and the derivative of score_mod is .* at score ="):
        TEScoreMod(wrong.forward, wrong.backward, tensors).check_bprop()


def test_new_values_are_no_new_trace(device: str) -> None:
    clear_cache()
    for cap in (1.0, 2.0, 3.0):
        softcap = Softcap()
        run(TEScoreMod(softcap.forward, softcap.backward, {"cap": scalar(cap), "one": scalar(1.0)}), device, "eager")
    assert cache_info()["traces"] == 2  # the score and its gradient


RANKS: dict[int, tuple[int, ...]] = {1: (45,), 2: (20, 1), 3: (HEADS, 1, 45), 4: (2, 1, 20, 45)}


@pytest.mark.sample
@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("rank", RANKS)
def test_tensors_are_broadcast_from_the_right(rank: int, backend: str, device: str) -> None:
    bias = torch.randn(RANKS[rank], generator=torch.Generator().manual_seed(2)).to(device).requires_grad_()
    whole = bias.expand(2, HEADS, 20, 45).detach().clone().requires_grad_()
    want = run(None, device, backend, (whole,), bias=whole, bias_type="post_scale_bias")
    want[-1] = want[-1].sum_to_size(bias.shape)
    close(run(TEScoreMod(post_scale_bias, score_mod_tensors={"bias": bias}), device, backend, (bias,)), want)


NUMBERS = {
    "float": 1.5,
    "int": 2,
    "numpy": numpy.float32(1.5),
    "numpy half": numpy.float16(1.5),
    "numpy integer": numpy.int64(2),
    "rank 0": torch.tensor(1.5),
    "rank 1": torch.tensor([1.5], dtype=torch.float64),
    "rank 4": torch.full((1, 1, 1, 1), 1.5, dtype=torch.float16),
    "integer tensor": torch.tensor([2]),
}


@pytest.mark.sample
@pytest.mark.parametrize("what", NUMBERS)
def test_numbers_and_tensors_of_one_element_are_numbers(what: str, device: str) -> None:
    number = NUMBERS[what]
    mod = TEScoreMod(lambda graph, score, tensors: graph.mul(score, tensors["x"]), score_mod_tensors={"x": number})
    close(run(mod, device, "triton"), run(None, device, "eager", softmax_scale=float(number) / 4))


@pytest.mark.slow
def test_a_number_on_the_cpu_is_read_in_each_call(device: str) -> None:
    cap = scalar(1.5)
    mod = TEScoreMod(Softcap().forward, score_mod_tensors={"cap": cap})
    for value in (1.5, 0.5, 1.5):
        cap.fill_(value)
        close(run(mod, device, "triton"), run(None, device, "eager", softcap=value))


def test_a_backward_has_the_number_of_its_forward(device: str) -> None:
    """If a number changed in between, TransformerEngine refuses the backward. Here the forward has already read it."""
    cap, softcap = scalar(1.5), Softcap()
    q = torch.randn(1, 20, HEADS, 16, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
    want = torch.autograd.grad(attention(q, q, q, softcap=1.5).sum(), q)
    out = attention(q, q, q, score_mod=TEScoreMod(softcap.forward, softcap.backward, {"cap": cap, "one": 1.0}))
    cap.fill_(0.1)
    close(list(torch.autograd.grad(out.sum(), q)), list(want))


def test_repeated_calls_are_kept_though_a_callback_imports_cudnn(device: str) -> None:
    pytest.importorskip("cudnn", reason="nvidia-cudnn-frontend is not installed")
    q = torch.randn(1, 20, HEADS, 16).to(device)
    case = te_callbacks.CASES["causal"]
    clear_cache()
    call_cache.clear_cache()
    for _ in range(3):
        attention(q, q, q, score_mod=case.make(True, te_callbacks.by_value))
    assert cache_info()["traces"] == 2
    assert call_cache.cache_info()["hits"] == 2


def test_an_import_of_a_module_whose_name_is_computed_is_traced_in_each_call(device: str) -> None:
    q, name = torch.randn(1, 20, HEADS, 16).to(device), "math"

    def scaled(graph: Any, score: Any, tensors: Any) -> Any:
        return graph.mul(score, importlib.import_module(name).e)

    with pytest.warns(RuntimeWarning, match="import_module of a name that is no constant"):
        attention(q, q, q, score_mod=TEScoreMod(scaled))


def takes_three(graph: Any, score: Any, tensors: Any) -> Any:
    return score


def bad_line(graph: Any, score: Any, tensors: Any) -> Any:
    return graph.mul(score, 1 / len(tensors))


def called(callback: Any, tensors: Any = None) -> Tensor:
    return attention(*[torch.zeros(2, 4, 2, 8)] * 3, score_mod=TEScoreMod(callback, score_mod_tensors=tensors))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TEScoreMod(causal, None, None, {"zero": scalar(0.0)}), "without a score_mod_bprop"),
        (lambda: TEScoreMod(3), "score_mod is 3"),  # type: ignore[arg-type]
        (lambda: TEScoreMod(causal, score_mod_tensors=[scalar(0.0)]), "score_mod_tensors is a list; accepted: a dict"),  # type: ignore[arg-type]
        (lambda: TEScoreMod(causal, score_mod_tensors={1: scalar(0.0)}), "has the name 1, a int; .*str names"),  # type: ignore[dict-item]
        (lambda: TEScoreMod(causal, score_mod_tensors={"x": torch.zeros(2, 1, 1, 1, 1)}), "accepted: up to 4 dims"),
        (lambda: TEScoreMod(causal, score_mod_tensors={"x": numpy.zeros(3)}), "is a numpy.ndarray; .*torch.from_numpy"),
        (lambda: TEScoreMod(causal, score_mod_tensors={"x": "y"}), "is a builtins.str"),
        (lambda: TEScoreMod(causal).check_bprop(), "pass a score_mod_bprop"),
        (lambda: called(lambda g, s, t: g.reduction(s)), r"no node 'reduction'; it has: abs, .* at .*test_te_score_mod.py:\d+, `"),
        (
            lambda: called(causal),
            r"tensors\['neg_inf'\], which was not passed; accepted: none at .*test_te_score_mod.py:\d+, `return",
        ),
        (lambda: called(causal, {"zero": 0.0, "x": 1}), r"which was not passed; accepted: 'zero', 'x' at"),
        (lambda: called(bad_line), r"at .*test_te_score_mod.py:\d+, `return graph.mul.*ZeroDivisionError"),
        (lambda: called(lambda g, s, t: None), "score_mod .*<lambda> returned None; accepted: a tensor of its graph"),
        (lambda: called(post_scale_bias, {"bias": torch.zeros(3, 1, 1)}), r"has shape \(3, 1, 1\), with 3 for h"),
        (lambda: called(post_scale_bias, {"bias": torch.zeros(2, 3)}), r"with 2 for sq, but the call has 4"),
        (
            lambda: attention(*[torch.zeros(1, 4, 1, 8)] * 3, score_mod=takes_three, score_mod_tensors={"x": scalar(1.0)}),
            "score_mod takes_three has three arguments",
        ),
        (
            lambda: attention(*[torch.zeros(1, 4, 1, 8)] * 3, score_mod=takes_three),
            r"score_mod takes_three has three arguments \(graph.*TEScoreMod\(score_mod, score_mod_bprop, score_mod_tensors\)",
        ),
    ],
)
def test_errors(make: Any, words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        make()


class Identity:
    def check_sizes(self) -> None:
        """A method of the user's own."""

    def __call__(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score


def test_a_mods_own_methods_are_not_called(device: str) -> None:
    close(run(Identity(), device, "eager"), run(None, device, "eager"))
