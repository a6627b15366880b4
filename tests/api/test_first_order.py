"""Gradients of attention in FP8, over ranks and of `attention_backward` have no derivative: a request for one raises."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import flexattn
from flexattn import call_cache, first_order, fp8
from flexattn.packed_tensors import unpack
from tests.conftest import ROOT

SENTENCE = "have no second derivative"
# Functions that need no guard of their own, and why.
UNGUARDED = {
    "flexattn.first_order._Guard": "raises",
    **{
        f"flexattn.second_order.{name}": "has derivatives"
        for name in ("_WithRule", "Attend", "AttendAlong", "Tangent", "Backward", "DoubleBackward")
    },
    "flexattn.second_order._NoThird": "raises",
    "flexattn.indexer._Scores": "torch refuses to differentiate its backward",
    "flexattn.fp8._Dequantized": "torch differentiates its backward",
    "flexattn.packed_tensors.Unpacked": "torch differentiates its backward",
    "flexattn.norm_rope._NormRope": "torch differentiates its backward",
    "flexattn.dispatch.reference._WithGivenDerivative": "runs in attention's backward alone",
    "flexattn.dispatch.quantization._RoundedWeights": "runs in attention's backward alone",
    "flexattn.dispatch.quantization._RoundedGradient": "runs in attention's backward alone",
}


def functions(tracked_files: list[Path]) -> dict[str, type]:
    """Returns every torch.autograd.Function of the package by its name."""
    found = {}
    for path in tracked_files:
        if path.suffix != ".py" or path.parts[0] not in ("flexattn", "dispatch", "kernels_triton", "kernels_cudnn", "bench"):
            continue
        text = (ROOT / path).read_text()
        for node in ast.walk(ast.parse(text)) if "autograd.Function)" in text else ():
            if isinstance(node, ast.ClassDef) and any(
                ast.unparse(base).endswith(("autograd.Function", "_WithRule")) for base in node.bases
            ):
                module = ".".join((*(() if path.parts[0] == "flexattn" else ("flexattn",)), *path.with_suffix("").parts))
                found[f"{module}.{node.name}"] = getattr(importlib.import_module(module), node.name)
    return found


def test_every_function_has_the_guard_or_needs_none(tracked_files: list[Path]) -> None:
    """`tests/support/rank_guards.py` runs the calls over ranks."""
    found = functions(tracked_files)
    assert {*UNGUARDED} < {*found}
    guard = first_order.first_order(lambda ctx: ()).__code__
    guarded = {name for name, function in found.items() if function.backward.__code__ is guard}
    assert guarded == {*found} - {*UNGUARDED}
    assert len(guarded) >= 5


def leaves(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(1, 16, 2, 16, generator=generator).to(dtype).requires_grad_() for name in "qkv"}


def out_of(call: dict[str, Any]) -> Tensor:
    out: Tensor = flexattn.attention(**call)
    return out


def lse_of(call: dict[str, Any]) -> Tensor:
    lse: Tensor = flexattn.attention(**call, return_lse=True)[1]
    return lse


def checkpointed(call: dict[str, Any]) -> Tensor:
    out: Tensor = checkpoint(lambda q: flexattn.attention(**call | {"q": q}), call["q"], use_reentrant=False)
    return out


def dequantized(call: dict[str, Any]) -> Tensor:
    return fp8.dequantize(flexattn.attention(**call))


def packed_out(call: dict[str, Any]) -> Tensor:
    packed = torch.stack([call[name] for name in "qkv"])
    return flexattn.attention(*unpack(packed, 0), fp8_recipe=call["fp8_recipe"])  # type: ignore[no-any-return]


HALVES = leaves(torch.bfloat16)
DELAYED = fp8.Recipe(scaling="delayed")
CASES: dict[str, tuple[Callable[[dict[str, Any]], Tensor], dict[str, Any]]] = {
    "fp8": (out_of, HALVES | {"fp8_recipe": fp8.Recipe()}),
    "fp8, lse": (lse_of, HALVES | {"fp8_recipe": fp8.Recipe()}),
    "fp8, checkpoint": (checkpointed, HALVES | {"fp8_recipe": fp8.Recipe()}),
    "fp8, delayed": (out_of, HALVES | {"fp8_recipe": DELAYED, "fp8_state": fp8.DelayedScaling(DELAYED, 2)}),
    "fp8, packed": (packed_out, HALVES | {"fp8_recipe": fp8.Recipe()}),
    "fp8 out": (dequantized, HALVES | {"fp8_recipe": fp8.Recipe(out_dtype=torch.float8_e4m3fn)}),
    "fp8, bf16_backward": (out_of, HALVES | {"fp8_recipe": fp8.Recipe(bf16_backward=True)}),
}


@pytest.mark.sample("is_linear")
@pytest.mark.parametrize("is_linear", [True, False], ids=["linear", "squares"])
@pytest.mark.parametrize("case", CASES)
def test_a_gradient_penalty_raises_in_the_first_call_and_in_kept_ones(case: str, is_linear: bool) -> None:
    run, call = CASES[case]
    wanted = [t for t in call.values() if isinstance(t, Tensor) and t.requires_grad]
    call_cache.clear_cache()
    for _ in range(4):
        out = run(call)
        loss = out.sum() if is_linear else out.square().sum()
        for gradient in torch.autograd.grad(loss, wanted, create_graph=True):
            penalty = loss + gradient.square().sum()
            for t in wanted:
                with pytest.raises(RuntimeError, match=SENTENCE):
                    torch.autograd.grad(penalty, t, retain_graph=True, allow_unused=True)
    assert call_cache.cache_info()["hits"] > 0 or case == "fp8 out"  # which has no kept calls


def rows_of_ones(out: Tensor) -> Tensor:
    return torch.ones(2, *out.shape)


BATCHED: dict[str, Callable[[Tensor, dict[str, Any]], Any]] = {
    "is_grads_batched": lambda out, call: torch.autograd.grad(out, [*call.values()], rows_of_ones(out), is_grads_batched=True),
    "create_graph": lambda out, call: torch.autograd.grad(
        out, [*call.values()], rows_of_ones(out), is_grads_batched=True, create_graph=True
    ),
    "jacobian": lambda out, call: torch.autograd.functional.jacobian(
        lambda q: flexattn.attention(q, call["k"], call["v"]), call["q"], vectorize=True
    ),
    "vmap": lambda out, call: torch.func.vmap(lambda dout: torch.autograd.grad(out, call["q"], dout))(rows_of_ones(out)),
    "attention_backward": lambda out, call: torch.func.vmap(
        lambda dout: flexattn.attention_backward(dout, *call.values(), out, torch.zeros(1, 2, 16)).dq
    )(rows_of_ones(out)),
}


@pytest.mark.parametrize("way", BATCHED)
def test_batched_gradients_are_refused(way: str) -> None:
    call = leaves()
    call_cache.clear_cache()
    for run in (out_of, out_of, out_of, lse_of):
        with pytest.raises(RuntimeError, match=r"attention\(\)'s backward has no rule for torch.vmap"):
            BATCHED[way](run(call), call)
    (row,) = torch.autograd.functional.jacobian(lambda q: flexattn.attention(q, call["k"], call["v"]), (call["q"][:, :1],))
    assert row.shape == (1, 1, 2, 16, 1, 1, 2, 16)


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph")
def test_backward_with_create_graph_is_refused_where_its_result_is_used() -> None:
    call = leaves(torch.bfloat16) | {"fp8_recipe": fp8.Recipe()}
    for _ in range(4):
        out_of(call).sum().backward(create_graph=True)
        assert call["q"].grad is not None
        with pytest.raises(RuntimeError, match=SENTENCE):
            call["q"].grad.sum().backward()
        for name in "qkv":
            call[name].grad = None


def test_second_derivatives_of_other_parts_of_a_model_pass_through() -> None:
    """If a Hessian-vector product needs only attention's first derivative, it equals plain torch's."""
    call, weight = leaves(), torch.randn(16, 16, requires_grad=True)
    vector = torch.randn(16, 16)

    def product(out: Tensor) -> tuple[Tensor, ...]:
        (dweight,) = torch.autograd.grad((out @ weight).square().sum(), weight, create_graph=True)
        return torch.autograd.grad((dweight * vector).sum(), [weight, call["q"]])

    q, k, v = (call[name].transpose(1, 2) for name in "qkv")
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        wanted = product(scaled_dot_product_attention(q, k, v).transpose(1, 2))
    for _ in range(4):
        torch.testing.assert_close(product(out_of(call)), wanted, rtol=1e-4, atol=1e-3)


def test_gradients_that_were_made_with_create_graph_are_the_same_and_can_be_changed_in_place() -> None:
    call = leaves()
    for _ in range(4):
        loss = out_of(call).square().sum()
        plain = torch.autograd.grad(loss, list(call.values()), retain_graph=True)
        found = torch.autograd.grad(loss, list(call.values()), create_graph=True)
        for gradient, wanted in zip(found, plain, strict=True):
            assert gradient.requires_grad
            assert torch.equal(gradient, wanted)
            with torch.no_grad():
                gradient.mul_(2.0)  # as clip_grad_norm_ does
            gradient.add_(1.0)


def test_a_plain_backward_does_without_the_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_order._Guard, "apply", lambda *_: pytest.fail("guarded"))
    call = leaves()
    for _ in range(4):
        out_of(call).sum().backward()


@pytest.mark.slow
def test_compiled_code_raises_torchs_own_sentence() -> None:
    call = leaves()
    out = torch.compile(lambda q, k, v: flexattn.attention(q, k, v), backend="aot_eager", fullgraph=True)(**call)
    (dq,) = torch.autograd.grad(out.sum(), call["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(dq.sum(), call["q"])
