"""Nodes of a callback's graph: all nodes of cuDNN frontend, the result of each, and the error of each wrong call."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flexattn import attention
from flexattn.integrations.te.graph_nodes import NODES, ON_EVERY_NODE
from flexattn.integrations.te.score_graph import GraphTensor, ScoreGraph
from flexattn.integrations.te.score_mod import TEScoreMod
from flexattn.mods.trace import trace_mods

X = torch.tensor([-7.5, -2.0, -0.75, -0.1, 0.1, 0.6, 1.25, 3.0, 9.0], dtype=torch.float64)
Y = torch.tensor([3.0, -3.0, 2.0, 0.5, -1.5, 2.0, 0.25, 1.0, -4.0], dtype=torch.float64)
functional = torch.nn.functional

# Names of cudnn.pygraph, 1.28 to 1.32, that are no pointwise nodes: they work on whole tensors, or build and run a graph.
_OTHERS = """
adalayernorm adalayernorm_backward backend_plan_entries batchnorm batchnorm_backward batchnorm_inference block_scale_dequantize
block_scale_quantize build build_operation_graph build_plan_at_index build_plans check_support concatenate context conv_dgrad
conv_fprop conv_wgrad create_execution_plan create_execution_plans deselect_behavior_notes deselect_engines deselect_numeric_notes
deselect_workspace_greater_than deserialize execute execute_plan_at_index find_tensor gdn gdn2 gdn2_bwd gdn2_summary
gdn2_summary_bwd gdn_bwd gdn_summary gdn_summary_bwd gdp gdp_bwd gdp_summary gdp_summary_bwd genstats get_behavior_notes
get_behavior_notes_for_plan_at_index get_cuda_graph_retention get_engine_and_knobs_at_index get_execution_plan_count get_inputs
get_node get_outputs get_plan_name_at_index get_workspace_size get_workspace_size_plan_at_index inspect instancenorm
instancenorm_backward kda kda_bwd kda_summary kda_summary_bwd key layernorm layernorm_backward mamba2 mamba2_bwd mamba2_summary
mamba2_summary_bwd matmul moe_grouped_matmul moe_grouped_matmul_bwd nodes plans populate_cuda_graph reduction reshape rmsnorm
rmsnorm_backward rope rope_backward sdpa sdpa_backward sdpa_fp8 sdpa_fp8_backward sdpa_mxfp8 sdpa_mxfp8_backward
select_behavior_notes select_numeric_notes select_plan selected_engine serialize slice tensor tensor_like tensors transpose
update_cuda_graph validate
"""


def call(name: str, *operands: Tensor, **parameters: Any) -> Tensor:
    graph = ScoreGraph((), torch.zeros((), dtype=torch.float64))
    result = getattr(graph, name)(*map(GraphTensor, operands), **parameters).value
    assert isinstance(result, Tensor)
    return result


def test_the_graph_has_the_nodes_of_cudnn_frontend_with_their_parameters() -> None:
    cudnn = pytest.importorskip("cudnn", reason="nvidia-cudnn-frontend is not installed")
    theirs = {name for name in dir(cudnn.pygraph) if not name.startswith("_")} - {*_OTHERS.split()}
    assert theirs == {*NODES, "gen_index", "tensor_scalar"}
    uniform = cudnn.pygraph._POINTWISE_TENSOR_ARGS
    for name, node in NODES.items():
        if name in uniform:
            assert node.operands == uniform[name]
            assert not node.parameters
        else:
            signature = inspect.signature(getattr(cudnn.pygraph, name))
            assert [*signature.parameters][1:] == [*node.accepted]
            without_default = [p.name for p in signature.parameters.values() if p.default is p.empty][1:]
            assert without_default == [*node.operands, *node.required]
    for name in ("gen_index", "tensor_scalar"):
        theirs_takes = [*inspect.signature(getattr(cudnn.pygraph, name)).parameters]
        assert [*inspect.signature(getattr(ScoreGraph, name)).parameters] == theirs_takes


def derivative(function: Callable[[Tensor], Tensor]) -> Tensor:
    x = X.clone().requires_grad_()
    return torch.autograd.grad(function(x), x, Y)[0]


FORWARDS: dict[str, tuple[Callable[[Tensor], Tensor], dict[str, float]]] = {
    "tanh": (torch.tanh, {}),
    "sigmoid": (torch.sigmoid, {}),
    "elu": (functional.elu, {}),
    "softplus": (functional.softplus, {}),
    "gelu": (functional.gelu, {}),
    "gelu_approx_tanh": (lambda x: functional.gelu(x, approximate="tanh"), {}),
    "relu": (torch.relu, {}),
    "leaky_relu": (lambda x: functional.leaky_relu(x, 0.3), {"negative_slope": 0.3}),
    "swish": (functional.silu, {}),
    "swish, beta": (lambda x: x * torch.sigmoid(1.7 * x), {"swish_beta": 1.7}),
    "relu, lower clip": (lambda x: x.clamp(min=-1.0), {"lower_clip": -1.0}),
    "relu, upper clip": (lambda x: x.clamp(0.0, 2.0), {"upper_clip": 2.0}),
    "relu, both clips": (lambda x: x.clamp(0.5, 2.0), {"lower_clip": 0.5, "upper_clip": 2.0}),
    "relu, slope": (lambda x: functional.leaky_relu(x, 0.2), {"negative_slope": 0.2}),
    "relu, slope and upper clip": (
        lambda x: functional.leaky_relu(x, 0.2).clamp(max=2.0),
        {"negative_slope": 0.2, "upper_clip": 2.0},
    ),
}


@pytest.mark.parametrize("what", FORWARDS)
def test_activations_and_their_backwards(what: str) -> None:
    function, parameters = FORWARDS[what]
    name = what.partition(",")[0]
    torch.testing.assert_close(call(name, X, **parameters), function(X))
    if what == "relu, slope and upper clip":  # cuDNN's own rule: values above the clip have the slope too
        wanted = torch.where((X > 0) & (X < 2.0), Y, Y * 0.2)
    else:
        wanted = derivative(function)
    torch.testing.assert_close(call(f"{name}_backward", Y, X, **parameters), wanted, atol=1e-9, rtol=1e-9)


def test_a_slope_and_a_lower_clip_apply_in_this_order() -> None:
    assert call("relu", X, negative_slope=0.5, lower_clip=-0.2).tolist() == pytest.approx(
        [-0.2, -0.2, -0.2, -0.05, 0.1, 0.6, 1.25, 3.0, 9.0]
    )


def test_operands_have_cudnns_order() -> None:
    """Written by hand, because an operand's sign or place matters."""
    x, y = torch.tensor([-5.0, 5.0, -7.5]), torch.tensor([3.0, -3.0, 2.0])
    assert call("mod", x, y).tolist() == [-2.0, 2.0, -1.5]  # it has the sign of the first
    assert call("add_square", x, y).tolist() == [4.0, 14.0, -3.5]
    assert call("sub", x, y).tolist() == [-8.0, 8.0, -9.5]
    assert call("pow", torch.tensor([2.0]), torch.tensor([3.0])).tolist() == [8.0]
    assert call("binary_select", x, y, x < y).tolist() == [-5.0, -3.0, -7.5]
    assert call("binary_select", x, y, torch.tensor([1, 0, 2])).tolist() == [-5.0, -3.0, -7.5]
    assert call("div", torch.tensor([7]), torch.tensor([2])).tolist() == [3.5]  # indices too
    assert call("logical_and", torch.tensor([2, 0]), torch.tensor([True, True])).tolist() == [True, False]


def test_numbers_are_tensors() -> None:
    graph = ScoreGraph((), torch.zeros(()))
    assert graph.tensor_scalar(2.5, "COMPILE_TIME_CONST").value.item() == 2.5
    assert graph.mul(graph.tensor_scalar(value=3, scalar_type=None), 2).value.item() == 6


def test_what_is_said_of_a_tensor_is_kept_and_changes_nothing() -> None:
    tensor = GraphTensor(torch.ones(()))
    assert tensor.get_dim() == []
    assert tensor.get_data_type() is None
    assert tensor.set_uid(7).set_dim([1, 2, 3, 4]).set_stride([24, 12, 4, 1]).set_data_type("INT32").set_name("x") is tensor
    assert (tensor.get_uid(), tensor.get_dim(), tensor.get_data_type(), tensor.get_name()) == (7, [1, 2, 3, 4], "INT32", "x")
    tensor.set_is_pass_by_value(True).set_ragged_offset(None).set_is_virtual(False).set_output(True).set_reordering_type("NONE")
    assert tensor.get_is_pass_by_value() is True
    assert tensor.value.item() == 1.0
    with pytest.raises(AttributeError, match="no 'get_shape'; it has set_ and get_ of: uid"):
        tensor.get_shape()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda g, s: g.relu(s, slope=0.1), "relu was given slope=0.1, .*accepted: input, negative_slope, lower_clip, upper_clip"),
        (lambda g, s: g.tanh(s, alpha=1.0), "tanh was given alpha=1.0, which it does not take; accepted: input, name, compute"),
        (lambda g, s: g.add(s), "add was given no b; accepted: a, b, name, compute_data_type"),
        (lambda g, s: g.add(s, s, a=s), "add was given a twice"),
        (lambda g, s: g.add(s, s, s), "add was given 3 arguments by position; accepted: a, b, and by name"),
        (lambda g, s: g.leaky_relu(s), "leaky_relu was given no negative_slope"),
        (lambda g, s: g.swish(s, swish_beta="x"), "swish_beta of swish is 'x'; accepted: a number"),
        (lambda g, s: g.add(s, "x"), "b of add is str; accepted: a tensor of the graph"),
        (lambda g, s: g.gen_index(s, axis=4), "axis of gen_index is 4; accepted: 0"),
    ],
)
def test_wrong_calls_name_the_node_and_the_line(wrong: Callable[[Any, Any], Any], words: str) -> None:
    with pytest.raises(TypeError, match=words) as caught:
        trace_mods(TEScoreMod(lambda graph, score, tensors: wrong(graph, score)), None)
    assert f"{__file__}:{wrong.__code__.co_firstlineno}, `" in str(caught.value)


@pytest.mark.parametrize("keyword", ON_EVERY_NODE)
def test_every_node_takes_what_changes_nothing(keyword: str) -> None:
    for name, node in NODES.items():
        given = {operand: GraphTensor(torch.ones(())) for operand in node.operands} | dict.fromkeys(node.required, 0.5)
        getattr(ScoreGraph((), torch.zeros(())), name)(**given, **{keyword: "x"})


EVERY = sorted(NODES)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is traced again in each call")  # because it names the nodes by text
@pytest.mark.parametrize("first", range(0, len(EVERY), 15))
def test_every_node_is_recorded_and_runs(first: int, device: str) -> None:
    """Traced, in the interpreter and with a derived backward, against the same nodes in plain torch in fp64."""
    names = EVERY[first : first + 15]

    def total(graph: Any, score: Any, tensors: Any) -> Any:
        x = graph.add(a=graph.tanh(input=score), b=tensors["offset"])  # from 1 to 3: each node is smooth there
        parts = []
        for name in names:
            node = NODES[name]
            operands = [x] + [tensors["half"]] * (len(node.operands) - 1)
            parameters = dict.fromkeys(node.required, 0.25)
            if name == "binary_select":
                operands[2] = graph.cmp_gt(x, tensors["offset"])
            parts.append(getattr(graph, name)(*operands, **parameters))
        result = score
        for part in parts:
            result = graph.add(result, graph.mul(graph.scale(score, tensors["half"]), graph.mul(part, tensors["half"])))
        return result

    tensors = {"offset": 2.0, "half": 0.5}
    q = (torch.randn(1, 20, 1, 16, generator=torch.Generator().manual_seed(3)) / 2).to(device).requires_grad_()
    results = []
    for backend in ("triton", "eager"):
        x = q if backend == "triton" else q.detach().double().cpu().requires_grad_()
        out = attention(x, x, x, score_mod=TEScoreMod(total, None, tensors), backend=backend)
        results.append([out, *torch.autograd.grad(out.square().sum(), x)])
    for got, want in zip(*results, strict=True):
        assert (got.double().cpu() - want).abs().max() <= 1e-4 * max(1.0, float(want.detach().abs().max()))
    assert math.isfinite(results[0][0].sum().item())
