"""The eager backend's calls of torch's fused operator for CPUs: they match the reference, and unsupported calls avoid it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flexattn import Window, attention, call_cache
from flexattn.dispatch import cpu_attention, eager_backend
from flexattn.testing import (
    GRADIENT_FACTOR,
    check_close,
    make_call,
    make_dout,
    make_inputs,
    reference_attention,
    reference_gradients,
)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Directions for which the operator gave results."""
    found: list[str] = []
    for name in ("forward", "backward"):
        run = getattr(cpu_attention, name)

        def noted(*call: Any, run: Any = run, name: str = name) -> Any:
            results = run(*call)
            found.extend([name] if results is not None else [])
            return results

        monkeypatch.setattr(cpu_attention, name, noted)
    return found


def call_of(inputs: Any, **arguments: Any) -> tuple[Any, Any]:
    spec, x = make_call(inputs, **{"return_max_logit": False, **arguments})
    return spec._replace(needs_bias_grad=False), x


def check(inputs: Any, dout: torch.Tensor | None = None, **arguments: Any) -> None:
    spec, x = call_of(inputs, **arguments)
    dout = make_dout(inputs) if dout is None else dout
    out, lse, _ = eager_backend.forward(spec, x)
    exact, budget = (reference_attention(spec, x, dtype=dtype) for dtype in (torch.float64, spec.dtype))
    check_close("out", out, exact[0], budget[0])
    check_close("lse", lse, exact[1], budget[1])
    found = eager_backend.backward(spec, x, out, lse, dout, None)
    exact_g, budget_g = (reference_gradients(spec, x, dout, None, dtype) for dtype in (torch.float64, spec.dtype))
    for name in ("dq", "dk", "dv"):
        check_close(name, getattr(found, name), getattr(exact_g, name), getattr(budget_g, name), factor=GRADIENT_FACTOR)


@pytest.mark.parametrize("fmt", ["bshd", "sbhd", "bhsd"])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"attn_mask_type": "causal"},
        {"window_size": (60, 2**40)},
        {"attn_mask_type": "causal_bottom_right", "lengths_q": [37, 37], "softmax_scale": 0.3},
        {"attn_mask_type": "causal_bottom_right"},
        {"window_size": (5, 2)},
        {"attn_mask_type": "causal", "window_size": (5, 0)},
        {"attn_mask_type": "causal_bottom_right", "window_size": (60, 0)},
        {"bias": (1, 1, 37, 53), "bias_type": "post_scale_bias"},
        {"bias": (2, 4, 1, 53), "bias_type": "pre_scale_bias"},
    ],
    ids=lambda arguments: "-".join(map(str, arguments)) or "full",
)
def test_the_references_numbers(fmt: str, arguments: dict[str, Any], asked: list[str]) -> None:
    given = dict(arguments)
    lengths_kv = given.pop("lengths_q", [53, 53])
    if "bias" in given:
        given["bias"] = torch.randn(given["bias"], generator=torch.Generator().manual_seed(2))
    check(make_inputs(fmt, lengths_q=[37, 37], lengths_kv=lengths_kv), **given)
    assert asked == ["forward", "backward"]


@pytest.mark.parametrize("name", ["q", "k", "v", "dout", "bias"])
@pytest.mark.parametrize("layout", ["strided", "transposed", "expanded"])
def test_any_strides(name: str, layout: str, asked: list[str]) -> None:
    inputs = make_inputs(lengths_q=[37, 37], lengths_kv=[53, 53])
    tensors = {"dout": make_dout(inputs), "bias": torch.randn(2, 4, 37, 53, generator=torch.Generator().manual_seed(2))}
    given = tensors.get(name, getattr(inputs, name, None))
    assert given is not None
    if layout == "strided":
        laid_out = torch.stack([given, torch.full_like(given, float("nan"))], -1)[..., 0]
    elif layout == "transposed":
        laid_out = given.transpose(-1, -2).contiguous().transpose(-1, -2)
    else:
        laid_out = given[..., :1].expand(given.shape)
    tensors = {**tensors, name: laid_out} if name in tensors else tensors
    inputs = inputs if name in tensors else inputs._replace(**{name: laid_out})
    check(inputs, tensors["dout"], bias=tensors["bias"], bias_type="post_scale_bias")
    assert asked == ["forward", "backward"]


def test_rows_that_a_bias_hides_see_nothing(asked: list[str]) -> None:
    bias = torch.zeros(2, 1, 37, 53)
    bias[:, :, 5] = float("-inf")
    bias[1, :, :, :40] = float("-inf")
    inputs = make_inputs(lengths_q=[37, 37], lengths_kv=[53, 53])
    check(inputs, bias=bias, bias_type="post_scale_bias")
    assert asked == ["forward", "backward"]
    spec, x = call_of(inputs, bias=bias, bias_type="post_scale_bias")
    out, lse, _ = eager_backend.forward(spec, x)
    assert bool(lse[:, :, 5].isneginf().all())
    assert not bool(out[:, 5].any())


def test_large_scores_are_differentiated_without_lse(asked: list[str]) -> None:
    check(make_inputs(lengths_q=[37, 37], outliers=True), softmax_scale=4.0)
    assert asked == ["forward"]


def test_what_is_not_finite_is_left_to_the_blocks(asked: list[str]) -> None:
    inputs = make_inputs(lengths_q=[8], lengths_kv=[8])
    inputs.q[0, 3, 1, 2] = float("inf")
    spec, x = call_of(inputs)
    eager_backend.forward(spec, x)
    assert asked == []


@pytest.mark.parametrize(
    "arguments",
    [
        {"attn_mask_type": "causal_bottom_right", "lengths_q": [53, 53]},  # the first rows see no key
        {"window_size": Window(5, -11), "bottom_right_diagonal": True, "lengths_kv": [40, 40]},  # no row sees a key
        {"window_size": (5, 2), "lengths_q": [400, 400], "lengths_kv": [400, 400]},  # of many scores, most are hidden
        {"attn_mask_type": "causal_bottom_right", "bias": torch.zeros(1, 1, 17, 23), "bias_type": "post_scale_bias"},
        {"softcap": 3.0},
        {"return_max_logit": True},
        {"bias_type": "alibi"},
        {"softmax_type": "off-by-one"},
        {"softmax_type": "learnable", "softmax_offset": torch.zeros(4)},
        {"dropout_p": 0.5, "rng_state": torch.tensor([1, 2])},
    ],
    ids=lambda arguments: "-".join(map(str, arguments)),
)
def test_calls_that_it_does_not_compute(arguments: dict[str, Any]) -> None:
    lengths = {"lengths_q": [17, 17], "lengths_kv": [23, 23]}
    given = {name: value for name, value in arguments.items() if name not in lengths}
    inputs = make_inputs(**lengths | {name: value for name, value in arguments.items() if name in lengths})
    spec, x = call_of(inputs, **given)
    assert not cpu_attention.takes(spec, x)
    assert cpu_attention.takes(*call_of(inputs))


def test_hidden_keys_may_be_anything(asked: list[str]) -> None:
    """The blocks leave out keys that no row sees. The operator reads them, so it has no results if they are not finite."""
    given = {"attn_mask_type": "causal_bottom_right", "window_size": (4, 0)}
    for name, value in (("k", float("nan")), ("v", float("inf"))):
        results = []
        for hidden in (value, 0.0):
            inputs = make_inputs(lengths_q=[16, 16], lengths_kv=[40, 40])
            getattr(inputs, name)[:, :8] = hidden
            asked.clear()
            spec, x = call_of(inputs, **given)
            out, lse, _ = eager_backend.forward(spec, x)
            gradients = eager_backend.backward(spec, x, out, lse, make_dout(inputs), None)
            results.append((out, lse, gradients.dq, gradients.dk, gradients.dv))
            assert asked == ([] if hidden else ["forward", "backward"])
        for got, wanted in zip(*results, strict=True):
            torch.testing.assert_close(got, wanted)


def test_other_head_dims_of_v_packed_sequences_and_other_dtypes() -> None:
    for inputs in (
        *(make_inputs(lengths_q=[17], dtype=dtype) for dtype in (torch.float64, torch.bfloat16, torch.float16)),
        make_inputs(lengths_q=[17], head_dim_v=8),
        make_inputs("thd", lengths_q=[17]),
        make_inputs(lengths_q=[17], padding=True),
    ):
        assert not cpu_attention.takes(*call_of(inputs))


@pytest.mark.parametrize("mask", ["no_mask", "causal", "window"])
@pytest.mark.parametrize("fmt", ["bshd", "sbhd", "bhsd"])
def test_kept_calls(fmt: str, mask: str) -> None:
    """The second and later ones reuse the results of shape analysis; each is right, with its layout, and so are its gradients."""
    call_cache.clear_cache()
    band = {"window_size": (3, 1)} if mask == "window" else {"attn_mask_type": mask}
    call: dict[str, Any] = {"qkv_format": fmt, **band}
    for turn in range(4):
        generator = torch.Generator().manual_seed(turn)
        sizes = [{"b": 2, "s": 20, "h": heads, "d": 16} for heads in (4, 2, 2)]
        leaves = [torch.randn([size[dim] for dim in fmt], generator=generator).requires_grad_() for size in sizes]
        out, lse = attention(*leaves, return_lse=True, **call)
        dout = torch.randn(out.shape, generator=generator)
        found = torch.autograd.grad(out, leaves, dout)
        exact = [t.detach().double().requires_grad_() for t in leaves]
        exact_out, exact_lse = attention(*exact, return_lse=True, **call)
        wanted = torch.autograd.grad(exact_out, exact, dout.double())
        for a, b in zip((out, lse, *found), (exact_out, exact_lse, *wanted), strict=True):
            torch.testing.assert_close(a, b.float(), rtol=1e-4, atol=1e-5)
            assert a.is_contiguous()
        assert torch.equal(out, attention(*(t.detach() for t in leaves), **call))
    kept = [call for call in call_cache.kept_calls() if isinstance(call.forwards.recording, cpu_attention.KeptForward)]
    assert len(kept) == 2  # with gradients and without
    assert any(isinstance(runs.recording, cpu_attention.KeptBackward) for call in kept for runs in call.backwards.values())


def test_kept_calls_leave_to_others_what_is_not_finite() -> None:
    """The same for a backward whose lse is large, which the operator would compute less exactly."""
    q, k, v = (torch.randn(1, 8, 2, 16, generator=torch.Generator().manual_seed(n)) for n in range(3))
    infinite = k.clone()
    infinite[0, 3, 1] = float("inf")
    for _ in range(3):
        call_cache.clear_cache()
        wanted = attention(q, infinite, v)
        attention(q, k, v)
        for _ in range(3):
            torch.testing.assert_close(attention(q, infinite, v), wanted, rtol=0, atol=0, equal_nan=True)
    leaves = [(30 * t).requires_grad_() for t in (q, k, v)]
    dout = torch.randn(1, 8, 2, 16)
    first = torch.autograd.grad(attention(*leaves), leaves, dout)
    for _ in range(4):
        for a, b in zip(torch.autograd.grad(attention(*leaves), leaves, dout), first, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("only_results", [True, False])
@pytest.mark.parametrize("fmt", ["bshd", "bhsd"])
def test_saved_tensors_may_come_back_in_other_strides(fmt: str, only_results: bool) -> None:
    def reversed_dims(t: torch.Tensor) -> torch.Tensor:
        order = [*reversed(range(t.dim()))]
        is_leaf = any(t.data_ptr() == leaf.data_ptr() for leaf in leaves)
        return t if only_results and is_leaf else t.permute(order).contiguous().permute(order)

    leaves = [torch.randn(2, 5, 3, 16, generator=torch.Generator().manual_seed(n)).requires_grad_() for n in range(3)]
    dout = torch.randn(2, 5, 3, 16)
    wanted = torch.autograd.grad(attention(*leaves, qkv_format=fmt), leaves, dout)
    for _ in range(4):  # computed, kept and found
        with torch.autograd.graph.saved_tensors_hooks(reversed_dims, lambda t: t):
            out = attention(*leaves, qkv_format=fmt)
        for a, b in zip(torch.autograd.grad(out, leaves, dout), wanted, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", ["out", "lse"])
def test_results_may_be_written_if_no_backward_follows(name: str) -> None:
    q = torch.randn(1, 1, 2, 16).requires_grad_()
    for _ in range(4):
        results = attention(q, q, q, return_lse=True)
        getattr(results, name).mul_(2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            results.out.sum().backward()
