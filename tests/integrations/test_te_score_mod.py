"""TransformerEngine's callbacks, as its own tests write them, on each backend."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from flexattn import attention
from flexattn.integrations.te.score_mod import GraphTensor, ScoreGraph, TEScoreMod
from flexattn.mods.trace import cache_info, clear_cache
from tests.mods.test_score_mod import HEADS, HEADS_KV

LIMIT = 2e-5  # of the largest value: fp32 against fp64


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
    shapes = ((2, 37, HEADS, 16), (2, 45, HEADS_KV, 16), (2, 45, HEADS_KV, 16))
    q, k, v = (torch.randn(s, generator=generator).to(device).requires_grad_() for s in shapes)
    out = attention(q, k, v, score_mod=mod, backend=backend, **call)
    dout = torch.randn(2, 37, HEADS, 16, generator=generator).to(device)
    return [out, *torch.autograd.grad(out, (q, k, v, *captured), dout)]  # type: ignore[arg-type]


def close(got: list[Tensor], want: list[Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        assert (a - b).abs().max() <= LIMIT * max(1.0, float(b.abs().max()))


@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_causal(backend: str, device: str) -> None:
    want = run(None, device, backend, attn_mask_type="causal")
    neg_inf, zero = scalar(-math.inf), scalar(0.0)
    close(run(TEScoreMod(causal, score_mod_tensors={"neg_inf": neg_inf}), device, backend), want)
    mod = TEScoreMod(causal, causal_bprop, {"neg_inf": neg_inf}, {"zero": zero})
    mod.check_bprop()
    close(run(mod, device, backend), want)


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


@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_tensors_get_gradients(backend: str, device: str) -> None:
    bias = torch.randn(1, HEADS, 37, 45, generator=torch.Generator().manual_seed(2)).to(device).requires_grad_()
    want = run(None, device, backend, (bias,), bias=bias, bias_type="post_scale_bias")
    close(run(TEScoreMod(post_scale_bias, score_mod_tensors={"bias": bias}), device, backend, (bias,)), want)
    with pytest.raises(ValueError, match=r"score_mod_tensors\['bias'\] requires a gradient"):
        TEScoreMod(post_scale_bias, lambda graph, gradient, tensors: gradient, {"bias": bias})


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


def test_nodes_are_those_of_cudnn() -> None:
    """By hand, where an operand's sign or place matters."""
    graph, x, y = ScoreGraph(()), GraphTensor(torch.tensor([-5.0, 5.0, -7.5])), GraphTensor(torch.tensor([3.0, -3.0, 2.0]))
    assert graph.mod(input0=x, input1=y).value.tolist() == [-2.0, 2.0, -1.5]  # has the sign of the first
    assert graph.add_square(a=x, b=y).value.tolist() == [4.0, 14.0, -3.5]
    assert graph.sub(a=x, b=y).value.tolist() == [-8.0, 8.0, -9.5]
    assert graph.binary_select(x, y, graph.cmp_lt(x, y)).value.tolist() == [-5.0, -3.0, -7.5]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is traced again in each call")  # as it names the nodes by text
def test_every_node_is_recorded(device: str) -> None:
    smooth = ("exp", "log", "abs", "neg", "sqrt", "rsqrt", "sin", "cos", "erf", "reciprocal", "sigmoid", "relu", "gelu", "softplus")
    smooth = (*smooth, "swish", "tanh", "identity")

    def everything(graph: Any, score: Any, tensors: Any) -> Any:
        row, column = graph.gen_index(score, axis=2), graph.gen_index(score, axis=3)
        positive = graph.add_square(a=tensors["one"], b=graph.tanh(score))  # from 1 to 2: large scores would round
        parts = [getattr(graph, name)(input=positive) for name in smooth]
        parts += [getattr(graph, name)(positive, tensors["one"]) for name in ("sub", "mul", "div", "pow")]
        parts += [getattr(graph, name)(input0=positive, input1=tensors["one"]) for name in ("max", "min")]
        parts += [graph.tan(graph.tanh(score)), graph.mod(input0=row, input1=tensors["three"])]
        parts += [getattr(graph, name)(graph.scale(column, tensors["quarter"])) for name in ("floor", "ceil")]
        total = score
        for part in parts:
            total = graph.add(a=total, b=graph.scale(part, tensors["quarter"]))
        masks = [getattr(graph, f"cmp_{name}")(row, column) for name in ("eq", "neq", "gt", "ge", "lt", "le")]
        either = graph.logical_or(masks[0], graph.logical_not(graph.logical_and(masks[2], masks[3])))
        return graph.bias(graph.binary_select(total, score, either), tensors["quarter"])

    tensors = {"one": scalar(1.0), "quarter": scalar(0.25), "three": scalar(3.0)}
    close(*(run(TEScoreMod(everything, score_mod_tensors=tensors), device, backend) for backend in ("triton", "eager")))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TEScoreMod(causal, None, None, {"zero": scalar(0.0)}), "without a score_mod_bprop"),
        (lambda: TEScoreMod(3), "score_mod is 3"),  # type: ignore[arg-type]
        (lambda: TEScoreMod(causal, score_mod_tensors={"x": torch.zeros(3)}), "accepted: a tensor"),
        (lambda: TEScoreMod(causal).check_bprop(), "was given none"),
        (
            lambda: attention(*[torch.zeros(1, 4, 1, 8)] * 3, score_mod=TEScoreMod(lambda g, s, t: g.reduction(s))),
            "no node 'reduction'",
        ),
    ],
)
def test_errors(make: Any, words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        make()
