"""Callbacks of TransformerEngine's own tests, of its pull requests 2984 and 2985: causal, softcap with state, a bias."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.integrations.te import TEScoreMod

SOFTCAP, MASK = 0.8, -1e9


def cudnn_frontend() -> Any:
    return importlib.import_module("cudnn")


def keeps(graph: Any, like: Any) -> Any:
    cudnn = cudnn_frontend()
    row = graph.gen_index(input=like, axis=2)
    row.set_data_type(cudnn.data_type.INT32)
    column = graph.gen_index(input=like, axis=3)
    column.set_data_type(cudnn.data_type.INT32)
    keep = graph.cmp_ge(input=row, comparison=column, compute_data_type=cudnn.data_type.BOOLEAN)
    keep.set_data_type(cudnn.data_type.BOOLEAN)
    return keep


def causal(graph: Any, score: Any, tensors: Any) -> Any:
    return graph.binary_select(input0=score, input1=tensors["neg_inf"], mask=keeps(graph, score))


def causal_bprop(graph: Any, gradient: Any, tensors: Any) -> Any:
    return graph.binary_select(input0=gradient, input1=tensors["zero"], mask=keeps(graph, gradient))


def post_scale_bias(graph: Any, score: Any, tensors: Any) -> Any:
    float32 = cudnn_frontend().data_type.FLOAT
    row, column = graph.gen_index(input=score, axis=2), graph.gen_index(input=score, axis=3)
    bias = graph.sub(a=row, b=column, compute_data_type=float32)
    bias.set_data_type(float32)
    return graph.add(a=score, b=bias, compute_data_type=float32)


def identity_bprop(graph: Any, gradient: Any, tensors: Any) -> Any:
    return gradient


class Softcap:
    """Saves the argument of its tanh for the backward."""

    def __init__(self) -> None:
        self.share = None

    def score_mod_graph_cache_key(self) -> Any:
        return ("softcap",)

    def forward(self, graph: Any, score: Any, tensors: Any) -> Any:
        float32 = cudnn_frontend().data_type.FLOAT
        self.share = graph.div(a=score, b=tensors["softcap"], compute_data_type=float32)
        self.share.set_data_type(float32)
        bounded = graph.tanh(input=self.share)
        bounded.set_data_type(float32)
        return graph.mul(a=bounded, b=tensors["softcap"], compute_data_type=float32)

    def backward(self, graph: Any, gradient: Any, tensors: Any) -> Any:
        float32 = cudnn_frontend().data_type.FLOAT
        tanh_gradient = graph.mul(a=gradient, b=tensors["softcap"], compute_data_type=float32)
        tanh_gradient.set_data_type(float32)
        share_gradient = graph.tanh_backward(loss=tanh_gradient, input=self.share, compute_data_type=float32)
        share_gradient.set_data_type(float32)
        return graph.div(a=share_gradient, b=tensors["softcap"], compute_data_type=float32)


def by_value(number: float) -> Tensor:
    """Returns a number in the form of pull request 2984's tests; the tests of 2985 pass Python numbers."""
    return torch.full((1, 1, 1, 1), number)


class Case(NamedTuple):
    """make(with_bprop, number) -> the mod; expected(scores, q_idx, kv_idx) -> its scores; unit: inputs are not scaled by 0.1."""

    make: Callable[[bool, Callable[[float], Any]], TEScoreMod]
    expected: Callable[[Tensor, Tensor, Tensor], Tensor]
    length: int
    tolerance: float
    unit: bool = False


def _causal(with_bprop: bool, number: Callable[[float], Any]) -> TEScoreMod:
    given = (causal_bprop, {"neg_inf": number(MASK)}, {"zero": number(0.0)})
    return TEScoreMod(causal, *given) if with_bprop else TEScoreMod(causal, None, given[1])


def _softcap(with_bprop: bool, number: Callable[[float], Any]) -> TEScoreMod:
    softcap, tensors = Softcap(), {"softcap": number(SOFTCAP)}
    return TEScoreMod(softcap.forward, softcap.backward if with_bprop else None, tensors, tensors if with_bprop else None)


def _post_scale_bias(with_bprop: bool, number: Callable[[float], Any]) -> TEScoreMod:
    return TEScoreMod(post_scale_bias, identity_bprop if with_bprop else None)


CASES = {
    "causal": Case(_causal, lambda s, i, j: s.masked_fill(i < j, max(MASK, torch.finfo(s.dtype).min)), 64, 5e-2),
    "softcap": Case(_softcap, lambda s, i, j: SOFTCAP * torch.tanh(s / SOFTCAP), 16, 7e-2, unit=True),
    "post_scale_bias": Case(_post_scale_bias, lambda s, i, j: s + (i - j), 16, 5e-2),
}
