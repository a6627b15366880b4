"""FP8 through the public API: recipes, FP8 tensors, delayed scaling, output in FP8, and refusals."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import flexattn
from flexattn import fp8, fp8_ops
from flexattn.bench.fp8 import RECIPES, attend, make_tensors, train
from flexattn.dispatch import canary, triton_backend
from flexattn.dispatch.quantization import dout_like, scale_of
from flexattn.dispatch.sample import sample_operands
from flexattn.functional import bind_call
from flexattn.ops import spec_to_run
from flexattn.testing import make_dout, make_inputs

BF16 = torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def inputs(device: str, fmt: str = "bshd", outliers: bool = False, head_dim: int = 32, **given: Any) -> dict[str, Any]:
    dims = {"head_dim_qk": head_dim, "head_dim_v": head_dim}
    call = make_inputs(fmt, lengths_q=[40, 40], lengths_kv=[70, 70], dtype=BF16, device=device, **dims, **given)._asdict()
    if outliers:  # in a few channels, as in the activations of trained models, and rows of one length, as behind an RMSNorm
        for name in ("q", "k"):
            for channel, factor in ((5, 10), (19, 60), (70, 30), (100, 15)):
                call[name][..., channel] *= factor
            call[name] /= call[name].float().square().mean(-1, keepdim=True).sqrt()
    for name in "qkv":
        call[name].requires_grad_()
    if fmt == "thd":
        call["attn_mask_type"] = "padding_causal"
    return call


def run(call: dict[str, Any], **arguments: Any) -> tuple[Tensor, ...]:
    """out, dq, dk, dv"""
    out = flexattn.attention(**call | arguments)
    dout = make_dout(flexattn.testing.Inputs(**{name: call.get(name) for name in flexattn.testing.Inputs._fields}))
    return out, *torch.autograd.grad(out, [call[name] for name in "qkv"], dout.to(out.dtype))


def errors(call: dict[str, Any], got: Sequence[Tensor] | None = None, **arguments: Any) -> list[float]:
    """Returns the errors of out, dq, dk and dv, or of the given ones: the norm of each relative to the result in fp64."""
    exact = call | {name: call[name].detach().double().requires_grad_() for name in "qkv"}
    wanted = run(exact, backend="eager")
    got = run(call, **arguments) if got is None else got
    return [float((g.double() - w).detach().norm() / w.detach().norm()) for g, w in zip(got, wanted, strict=True)]


# Errors of normal inputs with three bits of mantissa, and of gradients with E5M2's two.
USUAL, COARSE = 0.08, 0.14


@pytest.mark.slow
@pytest.mark.sample(values=False)
@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_recipes_on_normal_inputs(backend: str, device: str) -> None:
    for fmt, recipe in (
        ("bshd", fp8.Recipe()),
        ("thd", fp8.Recipe(granularity="block", block_rows=64)),
        ("thd", fp8.Recipe(fp8_format="HYBRID", granularity="batch_head", margin=1, rotation=True)),
        ("bshd", fp8.Recipe(granularity="tensor", bf16_backward=True)),
    ):
        call = inputs(device, fmt)
        out, *gradients = run(call, fp8_recipe=recipe, backend=backend)
        assert all(t.dtype is BF16 and t.is_contiguous() for t in (out, *gradients))
        found = errors(call, (out, *gradients))
        assert max(found) < (COARSE if recipe.fp8_format == "HYBRID" else USUAL), (recipe, found)
        if recipe.bf16_backward:
            assert max(found[1:]) < 0.03  # out, from FP8, is in it still


@pytest.mark.sample
@pytest.mark.slow
@pytest.mark.parametrize("is_new", [True, False])
def test_no_more_is_kept_for_a_backward_than_the_recipe_says(is_new: bool, device: str) -> None:
    """In FP8 q, k and v take a byte an element; kept as they came q and k take two more, and give no other results elsewhere."""
    call = inputs(device) | {"backend": "eager"}
    numel = [call[name].numel() for name in "qkv"]
    results = {}
    for keep in (False, True, None):
        kept: list[Tensor] = []

        def keep_in_mind(t: Tensor, kept: list[Tensor] = kept) -> Tensor:
            kept.append(t)
            return t

        recipe = fp8.Recipe(keep_16_bit=keep)
        if not is_new:
            run(call, fp8_recipe=recipe)
        with torch.autograd.graph.saved_tensors_hooks(keep_in_mind, lambda t: t):
            results[keep] = run(call, fp8_recipe=recipe)
        assert [t.numel() for t in kept if t.dtype is E4M3] == numel
        has_halves = (keep is None and capability_of(device) == (9, 0)) or bool(keep)
        assert [sum(t is call[name] for t in kept) for name in "qkv"] == [has_halves, has_halves, False]
    assert all(torch.equal(a, b) for keep in (True, None) for a, b in zip(results[False], results[keep], strict=True))


@pytest.mark.parametrize(
    ("own", "backend", "is_before"),
    [
        ({}, "auto", False),
        ({"granularity": "head", "rotation": True, "keep_16_bit": False}, "triton", False),
        ({"granularity": "block"}, "auto", False),
        ({"granularity": "block", "block_rows": 64}, "auto", True),
        ({"margin": 1}, "auto", True),
        ({"scaling": "delayed"}, "auto", True),
        ({}, "cudnn", True),
    ],
    ids=str,
)
def test_when_dout_is_quantised_before_the_backward(
    own: dict[str, Any], backend: str, is_before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = fp8.Recipe(**own)
    monkeypatch.setattr(fp8, "_reads_16_bit", lambda device: False)
    assert recipe.quantises_dout(torch.device("cpu"), backend)
    monkeypatch.setattr(fp8, "_reads_16_bit", lambda device: True)
    assert recipe.quantises_dout(torch.device("cpu"), backend) == is_before


@pytest.mark.sample(values=False)
@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_dout_is_quantised_by_the_backward(backend: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With blocks of 128 rows, large numbers in one block do not cost precision in another."""
    monkeypatch.setattr(fp8, "_reads_16_bit", lambda device: True)
    for passes in ("OPERATORS", "FUNCTIONS"):  # no pass of dout's own
        monkeypatch.setattr(fp8_ops, passes, getattr(fp8_ops, passes)._replace(quantize=None))
    for fmt, recipe in (
        ("bshd", fp8.Recipe()),
        ("thd", fp8.Recipe(granularity="block")),
        ("bhsd", fp8.Recipe(fp8_format="HYBRID")),
    ):
        call = inputs(device, fmt)
        assert max(errors(call, fp8_recipe=recipe, backend=backend)) < (COARSE if recipe.fp8_format == "HYBRID" else USUAL)
    call = make_inputs("bshd", lengths_q=[150], lengths_kv=[40], head_dim_qk=32, head_dim_v=32, dtype=BF16, device=device)._asdict()
    for name in "qkv":
        call[name].requires_grad_()
    dout = make_dout(flexattn.testing.Inputs(**call))
    dout[:, 128:] *= 2.0**-20
    grads = [
        torch.autograd.grad(flexattn.attention(**call, backend=backend, fp8_recipe=recipe), call["q"], dout)[0][:, 128:].double()
        for recipe in (None, fp8.Recipe())
    ]
    assert float((grads[1] - grads[0]).norm() / grads[0].norm()) < USUAL


def capability_of(device: str) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(device) if device == "cuda" else None


@pytest.mark.slow
def test_rotation_halves_the_error_of_outliers(device: str) -> None:
    call = inputs(device, outliers=True, head_dim=128)
    per_tensor = errors(call, fp8_recipe=fp8.Recipe(granularity="tensor"))
    rotated = errors(call, fp8_recipe=fp8.Recipe(rotation=True))
    for name, a, b in zip(("out", "dk", "dv"), (rotated[0], *rotated[2:]), (per_tensor[0], *per_tensor[2:]), strict=True):
        assert a < b / 2, (name, per_tensor, rotated)


@pytest.mark.exhaustive
def test_rotation_halves_the_error_of_dq_too() -> None:
    """The lengths make it a sum of many terms; it is the one nearest to twice."""
    tensors = make_tensors("outliers", 1024, torch.device("cpu"))
    exact = attend(tensors, None, torch.float64, "eager")
    per_tensor, rotated = (
        [float((a.double() - b).norm()) for a, b in zip(attend(tensors, RECIPES[name], BF16, "eager"), exact, strict=True)]
        for name in ("tensor", "head, rotation")
    )
    assert all(a < b / 2 for a, b in zip(rotated, per_tensor, strict=True)), (rotated, per_tensor)


@pytest.mark.sample
@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_nan_and_infinity_are_in_their_rows_alone(backend: str, device: str) -> None:
    recipe = fp8.Recipe(granularity="tensor", rotation=True)
    call = inputs(device, "thd") | {"backend": backend, "fp8_recipe": recipe}
    with torch.no_grad():
        clean = flexattn.attention(**call)
        q, k = (call[name].detach().clone() for name in "qk")
        q[3, 1, 5], q[7, 2, 0], k[75, 0, 1] = torch.nan, torch.inf, torch.nan  # k's is the second sequence's sixth
        out = flexattn.attention(**call | {"q": q, "k": k})
    rows = out.isnan().any(-1)
    wanted = torch.zeros_like(rows)
    wanted[3, 1], wanted[7, 2], wanted[45:, :2] = True, True, True  # causal: queries from the sixth on, by both heads of the key's
    assert torch.equal(rows, wanted)
    assert float((out - clean)[~rows].abs().max()) < 0.2  # the amax may have been another element's


@pytest.mark.sample
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_zeros(backend: str, device: str) -> None:
    call = inputs(device) | {"backend": backend, "fp8_recipe": fp8.Recipe(granularity="block")}
    call |= {name: torch.zeros_like(call[name]).requires_grad_() for name in "qkv"}
    out, dq, dk, dv = run(call)
    assert not out.any()
    assert not dq.any()
    assert not dk.any()
    assert dv.isfinite().all()
    call = inputs(device) | {"backend": backend, "fp8_recipe": fp8.Recipe()}
    out = flexattn.attention(**call)
    assert not any(gradient.any() for gradient in torch.autograd.grad(out, [call[name] for name in "qkv"], torch.zeros_like(out)))


def test_given_in_fp8(device: str) -> None:
    call = inputs(device, "thd")
    recipe = fp8.Recipe(granularity="block", block_rows=64)
    lengths = {
        "q": ("cu_seqlens_q", "max_seqlen_q"),
        "k": ("cu_seqlens_kv", "max_seqlen_kv"),
        "v": ("cu_seqlens_kv", "max_seqlen_kv"),
    }
    given, descales = {}, {}
    for name, (cu_seqlens, longest) in lengths.items():
        found = fp8.quantize(call[name], recipe, qkv_format="thd", cu_seqlens=call[cu_seqlens], max_seqlen=call[longest])
        given[name], descales[f"descale_{name}"] = found.data, found.descale
    with torch.no_grad():
        want = flexattn.attention(**call, fp8_recipe=recipe)
        got = flexattn.attention(**call | given, **descales, fp8_recipe=recipe)
        assert torch.equal(got, want)
        half = flexattn.attention(
            **call | given, **descales, fp8_recipe=fp8.Recipe(granularity="block", block_rows=64, out_dtype=torch.float16)
        )
    assert got.dtype is BF16
    assert half.dtype is torch.float16
    # one number for all: the same as the tensor's own scale
    tensors = {name: call[name].detach().to(E4M3) for name in "qkv"}
    scalar = torch.tensor(0.5, device=device)
    a = flexattn.attention(**call | tensors, descale_q=scalar, descale_v=scalar)
    b = flexattn.attention(**call | tensors, descale_q=scalar.expand(2, 4), descale_v=scalar.expand(2, 2, 1))
    assert torch.equal(a, b)


def test_fp8_output(device: str) -> None:
    call = inputs(device)
    with torch.no_grad():
        want = flexattn.attention(**call, fp8_recipe=fp8.Recipe())
        out, lse = flexattn.attention(**call, fp8_recipe=fp8.Recipe(out_dtype=E4M3), return_lse=True)
    assert isinstance(out, fp8.QuantizedTensor)
    assert out.data.dtype is E4M3
    assert lse.shape == (2, 4, 40)
    assert torch.equal(out.amax.flatten(), want.float().abs().amax((0, 1, 3)))
    back = out.data.float() * out.descale.view(1, 1, 4, 1)
    assert float((back - want.float()).norm() / want.float().norm()) < 0.04


@pytest.mark.sample
@pytest.mark.slow
@pytest.mark.parametrize("granularity", ["tensor", "block"])
@pytest.mark.parametrize("fmt", ["bhsd", "thd"])
def test_fp8_output_in_training(fmt: str, granularity: str, device: str) -> None:
    """Follows TransformerEngine: the gradient of the dequantised output is that of out."""
    call = inputs(device, fmt, gap=3) if fmt == "thd" else inputs(device, fmt)
    plain = fp8.Recipe(granularity=granularity)
    recipe = dataclasses.replace(plain, out_dtype=E4M3)
    qkv = [call[name] for name in "qkv"]
    want = flexattn.attention(**call, fp8_recipe=plain)
    dout = torch.where(want.isnan(), 0.0, torch.randn_like(want))
    out = flexattn.attention(**call, fp8_recipe=recipe)
    given = {"cu_seqlens": call["cu_seqlens_q"], "cu_seqlens_padded": call["cu_seqlens_q_padded"]}
    back = fp8.dequantize(out, recipe, qkv_format=fmt, **given)
    assert out.data.dtype is E4M3
    assert not out.data.requires_grad
    assert back.dtype is BF16
    assert float((back - want).detach().float().norm() / want.detach().float().norm()) < 0.04
    for a, b in zip(torch.autograd.grad(back, qkv, dout), torch.autograd.grad(want, qkv, dout), strict=True):
        assert torch.equal(a, b)


def test_dequantize_is_the_inverse(device: str) -> None:
    call = inputs(device, "thd", gap=3)
    x = call["q"].detach()
    given = {"qkv_format": "thd", "cu_seqlens": call["cu_seqlens_q"], "cu_seqlens_padded": call["cu_seqlens_q_padded"]}
    for granularity in ("tensor", "head", "batch_head", "block"):
        recipe = fp8.Recipe(granularity=granularity, block_rows=64 if granularity == "block" else None)
        found = fp8.quantize(x, recipe, **given, max_seqlen=call["max_seqlen_q"])
        back = fp8.dequantize(found, recipe, **given, dtype=torch.float32)
        real = ~x.isnan()
        assert float((back - x)[real].norm() / x[real].norm()) < 0.04
        assert not back[~real].any()
    with pytest.raises(ValueError, match="scaled by blocks"):
        fp8.dequantize(found._replace(descale=found.descale.repeat(1, 1, 2)), **given)


def test_delayed_scaling(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "_reads_16_bit", lambda device: False)  # with current scaling too dout has the granularity's scales
    recipe = fp8.Recipe(scaling="delayed", amax_history_len=3, amax_compute_algo="max", fp8_format="HYBRID")
    state = fp8.DelayedScaling(recipe, 4, 2, device=device)
    call = inputs(device) | {"fp8_recipe": recipe, "fp8_state": state}
    before = run(call)
    assert bool((state.scale_q == 1).all())
    state.update()
    amax = call["q"].detach().float().abs().amax((0, 1, 3))
    assert torch.equal(state.scale_q, scale_of(amax, E4M3))
    assert bool((state.scale_dout > 1000).all())  # of E5M2's range
    # By heads, now that this step's amax is the last one's, it is current scaling.
    current = run(inputs(device), fp8_recipe=fp8.Recipe(fp8_format="HYBRID"))
    assert all(torch.equal(a, b) for a, b in zip(run(call), current, strict=True))
    assert not torch.equal(before[0], current[0])
    # The largest of three steps counts, then it is forgotten.
    with torch.no_grad():
        state.note("q", 7 * amax.view(1, 4, 1))
        state.update()
        flexattn.attention(**call)
        for expected in (7, 7, 1):
            state.update()
            assert torch.equal(state.scale_q, scale_of(expected * amax, E4M3)), expected
            flexattn.attention(**call)
    for other in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        assert all(torch.equal(a, b) for a, b in zip(state.state_dict().values(), other.state_dict().values(), strict=True))
        assert other.recipe == recipe


@pytest.mark.slow
def test_delayed_scaling_under_checkpointing(device: str) -> None:
    """The forward that is done again finds the scales of the first, and notes no other amax."""
    recipe = fp8.Recipe(scaling="delayed")
    states = [fp8.DelayedScaling(recipe, 4, 2, device=device) for _ in range(2)]
    results = []
    for state, again in zip(states, (False, True), strict=True):
        for _ in range(2):
            call = inputs(device)

            def attend(q: Tensor, k: Tensor, v: Tensor, call: dict[str, Any] = call, state: fp8.DelayedScaling = state) -> Tensor:
                out: Tensor = flexattn.attention(**call | {"q": q, "k": k, "v": v}, fp8_recipe=recipe, fp8_state=state)
                return out

            qkv = [call[name] for name in "qkv"]
            out = checkpoint(attend, *qkv, use_reentrant=False) if again else attend(*qkv)
            gradients = torch.autograd.grad(out.float().square().sum(), qkv)
            state.update()
        results.append((out, *gradients, *state.state_dict().values()))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_other_arguments_get_gradients(device: str) -> None:
    call = inputs(device)
    bias = torch.randn(1, 4, 40, 70, device=device, requires_grad=True)
    offset = torch.randn(4, device=device, requires_grad=True)
    slope = torch.randn(4, device=device, requires_grad=True)

    def found(**extra: Any) -> tuple[Tensor, ...]:
        out, lse = flexattn.attention(
            **call,
            bias_type="post_scale_bias",
            bias=bias,
            softmax_type="learnable",
            softmax_offset=offset,
            score_mod=lambda s, b, h, i, j: s + slope[h] * 0.01 * (i - j),
            return_lse=True,
            **extra,
        )
        return torch.autograd.grad(out.float().sin().sum() + lse.sum(), (bias, offset, slope))

    for got, want in zip(found(fp8_recipe=fp8.Recipe()), found(), strict=True):
        assert float((got - want).norm() / want.norm()) < 0.2


@pytest.mark.slow
def test_operators_are_what_torch_asks_of_them(device: str) -> None:
    call = inputs(device, "thd")
    x = call["q"].detach()
    arguments = (x, call["cu_seqlens_q"], None, 40, None, None, "thd", "float8_e4m3fn", "block", 64, 0, True)
    torch.library.opcheck(torch.ops.flexattn.quantize.default, arguments)
    lengths = (call["cu_seqlens_q"], None, 40, call["cu_seqlens_kv"], None, 70)
    scales, histories = ([torch.ones(*size, n, device=device) for n in (4, 2, 2)] for size in ((), (3,)))
    for delayed in ((None,) * 6, (*scales, *(None,) * 3), (*scales, *histories)):
        qkv = [call[name].detach() for name in "qkv"]
        torch.library.opcheck(torch.ops.flexattn.quantize_qkv.default, (*qkv, *lengths, *delayed, "thd", "head", 0, 0, False))
    torch.library.opcheck(torch.ops.flexattn.unrotate.default, (x, call["k"].detach()))
    x, settings = bind_call(**inputs(device), fp8_recipe=fp8.Recipe(granularity="block"), backend="eager")
    x = x._replace(q=x.q.zero_(), k=x.k.zero_(), v=x.v.zero_())
    forward = x._replace(descales=list(x.descales)[:3])
    utils = ("test_autograd_registration", "test_faketensor")  # the others multiply the results, which torch cannot do in FP8
    torch.library.opcheck(torch.ops.flexattn.attention_forward.default, (*forward, *settings), test_utils=utils)
    out, lse, _ = torch.ops.flexattn.attention_forward(*forward, *settings)
    call = (dout_like(spec_to_run(x, settings), x, out), None, out, lse, *x, *settings)
    torch.library.opcheck(torch.ops.flexattn.attention_backward.default, call, test_utils=utils)


@pytest.mark.slow
@pytest.mark.sample(values=False)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_canary_and_warm_up_know_fp8(direction: Any, device: str) -> None:
    for recipe in (fp8.Recipe(granularity="block", fp8_format="HYBRID"), fp8.Recipe(bf16_backward=True)):
        call = inputs(device) | {"fp8_recipe": recipe, "backend": "triton"}
        [found] = flexattn.warmup(call)
        assert found.backward is not None
        x, settings = bind_call(**call)
        spec = spec_to_run(x, settings)
        spec = spec.for_backward() if direction == "backward" else spec
        assert canary.mismatch("triton", spec, direction, torch.device(device)) is None


@pytest.mark.parametrize(("name", "hopper", "expected"), [("triton", True, True), ("triton", False, False), ("eager", True, False)])
def test_the_canary_knows_what_sums_rounded_weights(
    name: str, hopper: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    families = pytest.importorskip("flexattn.kernels_triton.families", reason="triton is not installed")
    policy = families.Policy(portable_only=None if hopper else "for a test", ignores_measurements=True)
    monkeypatch.setattr(triton_backend, "policy_of", lambda spec: policy)
    spec = spec_to_run(*bind_call(**inputs("cpu"), fp8_recipe=fp8.Recipe()))._replace(device_type="cuda", capability=(9, 0))
    x = sample_operands(spec, torch.device("cpu"), [150, 150], [130, 130])
    assert canary._sums_rounded_weights(name, spec, x) == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_captured_in_a_cuda_graph() -> None:
    call = inputs("cuda", "thd") | {"fp8_recipe": fp8.Recipe(rotation=True)}
    leaves = {name: call[name].detach().clone() for name in "qkv"}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # whose gradient nodes are then of no stream that must not be waited for
        call |= {name: t.requires_grad_() for name, t in leaves.items()}
        want = run(call)
        dout = torch.ones_like(want[0])
        out = flexattn.attention(**call)
        wanted = torch.autograd.grad(out, [call[name] for name in "qkv"], dout)
    torch.cuda.current_stream().wait_stream(stream)
    del out
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = flexattn.attention(**call)
        gradients = torch.autograd.grad(out, [call[name] for name in "qkv"], dout)
    graph.replay()
    assert torch.equal(out, want[0])
    assert all(torch.equal(a, b) for a, b in zip(gradients, wanted, strict=True))


@pytest.mark.exhaustive
def test_training_ends_at_the_same_loss(device: str) -> None:
    bf16, *others = (
        sum(train(RECIPES[name], 200, torch.device(device))[-20:]) / 20 for name in ("bf16", "head", "head, HYBRID, rotation")
    )
    assert bf16 < 3.0  # of 5.8 at first
    assert all(abs(loss / bf16 - 1) < 0.01 for loss in others)


def test_explain(device: str) -> None:
    text = str(flexattn.explain(**inputs(device), fp8_recipe=fp8.Recipe(granularity="block", fp8_format="HYBRID")))
    assert "float8_e4m3fn" in text
    assert "scaled per batch and head, out in bfloat16, backward by dout in float8_e5m2" in text
    text = str(flexattn.explain(**inputs(device), fp8_recipe=fp8.Recipe(bf16_backward=True)))
    assert "backward of the 16-bit tensors" in text


@pytest.mark.parametrize(
    ("error", "recipe"),
    [
        ("fp8_format is 'E5M2'", {"fp8_format": "E5M2"}),
        ("granularity is 'row'", {"granularity": "row"}),
        ("block_rows is given with granularity 'head'", {"block_rows": 128}),
        ("a multiple of 64", {"granularity": "block", "block_rows": 100}),
        ("amax_history_len is given with scaling 'current'", {"amax_history_len": 16}),
        ("whose scales outlive a batch", {"scaling": "delayed", "granularity": "batch_head"}),
        ("out_dtype is torch.float32", {"out_dtype": torch.float32}),
        ("margin is", {"margin": 0.5}),
        ("keep_16_bit is 2", {"keep_16_bit": 2}),
        ("keep_16_bit is True with rotation", {"keep_16_bit": True, "rotation": True}),
        ("keep_16_bit is True with bf16_backward", {"keep_16_bit": True, "bf16_backward": True}),
    ],
)
def test_recipes_without_meaning(error: str, recipe: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError), match=error):
        fp8.Recipe(**recipe)


def test_nothing_is_accepted_and_ignored(device: str) -> None:
    call = inputs(device)
    plain = {name: call[name].detach() for name in "qkv"}
    eight = {name: t.to(E4M3) for name, t in plain.items()}
    one = torch.ones(1, device=device)
    delayed = fp8.Recipe(scaling="delayed")
    for error, arguments in (
        ("descale_q is given with q, k and v in torch.bfloat16", call | {"descale_q": one}),
        ("fp8_state is None", call | {"fp8_recipe": delayed}),
        ("fp8_state is given", call | {"fp8_state": fp8.DelayedScaling(delayed, 4, 2, device)}),
        ("made for 3 heads", call | {"fp8_recipe": delayed, "fp8_state": fp8.DelayedScaling(delayed, 3, 2, device)}),
        ("out_dtype is torch.float16 and a gradient is needed", call | {"fp8_recipe": fp8.Recipe(out_dtype=torch.float16)}),
        ("rotation is True, which has no effect", call | eight | {"fp8_recipe": fp8.Recipe(rotation=True)}),
        ("margin is 1, which has no effect", call | eight | {"fp8_recipe": fp8.Recipe(margin=1)}),
        ("which are for inference", call | {"q": eight["q"].requires_grad_(), "k": eight["k"], "v": eight["v"]}),
        ("descale_k has shape", call | eight | {"descale_k": torch.ones(3, device=device)}),
        (
            "has dtype torch.float32 with an fp8_recipe",
            call | {n: t.float() for n, t in plain.items()} | {"fp8_recipe": fp8.Recipe()},
        ),
        ("bf16_backward is True with dropout_p", call | {"dropout_p": 0.1, "fp8_recipe": fp8.Recipe(bf16_backward=True)}),
        ("fp8_recipe is 'E4M3'", call | {"fp8_recipe": "E4M3"}),
    ):
        eight["q"].requires_grad_(error == "which are for inference")
        with pytest.raises((ValueError, TypeError), match=error):
            flexattn.attention(**arguments)


def test_a_rotation_stays_in_float32_inside_of_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend, "can_quantize", lambda *_: False)
    torch.manual_seed(0)
    q, k, v = (torch.randn(40, 3, 2, 72, dtype=torch.float16) for _ in "qkv")

    def results() -> list[Tensor]:
        out, lse = flexattn.attention(
            q, k, v, qkv_format="sbhd", fp8_recipe=fp8.Recipe(rotation=True), return_lse=True, backend="eager"
        )
        return [out, lse, *fp8_ops.unrotate_implementation(q, k)]

    with torch.autocast("cpu", dtype=torch.float16):
        inside = results()
    for a, b in zip(inside, results(), strict=True):
        assert torch.equal(a, b)
