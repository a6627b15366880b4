"""score_mod and mask_mod on cuDNN on a GPU: against the reference in fp64, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flexattn
from flexattn.dispatch import cudnn_backend
from flexattn.dispatch.spec import AttentionSpec, Gradients, Operands
from flexattn.mods.trace import trace_mods
from flexattn.testing import GRADIENT_FACTOR, check_close, make_dout, reference_gradients
from tests.gpu.test_cudnn import EQUAL, RNG_STATE, call_of, check, inputs_of, leaves, results, run, why_not
from tests.support.cudnn_mods import CALLS, CASES, HEADS, SHAPES, WITH, Case, Shape, mods_call, numbers

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


LENGTHS = {
    "equal": ([333, 333], [389, 389]),
    "uneven": ([333, 70], [201, 389]),
    "fewer keys": ([389, 389], [201, 201]),
    "empty": ([333, 0, 70, 129], [201, 40, 389, 0]),
    "whole tiles": ([256, 256], [384, 384]),
    "half a tile": ([256, 256], [320, 320]),
    "few keys": ([129, 129], [3, 3]),
}


def check_mods(case: Case, spec: AttentionSpec, x: Operands, dout: Tensor) -> None:
    if case.refused:
        assert case.refused in str(cudnn_backend.unsupported(spec, "forward"))
        return
    if not case.backward_refused:
        check(spec, x, dout, *run(spec, x, dout))
        return
    assert cudnn_backend.unsupported(spec, "forward") is None
    assert case.backward_refused in str(cudnn_backend.unsupported(spec, "backward"))
    check(spec, x, dout, cudnn_backend.forward(spec, x), None)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", CASES)
def test_mods(name: str, shape: str) -> None:
    spec, x, given = mods_call(CASES[name], SHAPES[shape], LENGTHS, "cuda")
    check_mods(CASES[name], spec, x, make_dout(given))


@pytest.mark.parametrize("name", WITH)
@pytest.mark.parametrize("call", CALLS)
def test_mods_with_the_rest(call: str, name: str) -> None:
    spec, x, given = mods_call(CASES[name], CALLS[call], LENGTHS, "cuda")
    check_mods(CASES[name], spec, x, make_dout(given))


@pytest.mark.parametrize("skv", [384, 389])
def test_mods_with_a_bias(skv: int) -> None:
    """A bias without its gradient; if the gradient is requested, the backward is refused."""
    bias = numbers(2, HEADS, 333, skv, device="cuda")
    shape = Shape("bshd", "these", {"bias_type": "post_scale_bias", "bias": bias})
    spec, x, given = mods_call(CASES["softcap under a document mask"], shape, {"these": ([333] * 2, [skv] * 2)}, "cuda")
    assert "no gradient of a bias" in str(cudnn_backend.unsupported(spec._replace(needs_bias_grad=True), "backward"))
    spec, dout = spec._replace(needs_bias_grad=False), make_dout(given)
    results, gradients = run(spec, x, dout)
    exact, budget = (reference_gradients(spec, x, dout, dtype=dtype)._replace(dbias=None) for dtype in (torch.float64, spec.dtype))
    check(spec, x, dout, results, None)
    for name, got, ref, eager in zip(Gradients._fields, gradients, exact, budget, strict=True):
        assert (got is None) == (ref is None)
        if got is not None:
            check_close(name, got, ref, eager, factor=GRADIENT_FACTOR)


def test_mods_with_very_negative_lse() -> None:
    """Repeats `test_very_negative_lse_gives_no_nan`, but nodes hide the keys' last tile instead of a padding mask."""
    given = inputs_of(lengths_q=[256, 256], lengths_kv=[320, 320])
    given = given._replace(q=(given.q.abs() + 1.0) * 4, k=-given.k.abs() - 1.0)
    spec, x = call_of(given, mods=trace_mods(lambda score, b, h, i, j: score * 1.5, None, needs_grad=True))
    dout = make_dout(given)
    results, gradients = run(spec, x, dout)
    assert results[1].min() < -89
    check(spec, x, dout, results, gradients)


def test_a_mod_that_is_large_past_the_last_query() -> None:
    """Rows past sq have a score of 0 in cuDNN's tiles, and no lse: the mod must not reach dk and dv there."""
    given = inputs_of(**EQUAL)
    spec, x = call_of(given, mods=trace_mods(lambda score, b, h, i, j: torch.exp(i * 0.01) + score, None, needs_grad=True))
    dout = make_dout(given)
    check(spec, x, dout, *run(spec, x, dout))


def test_dropout_with_mods_is_the_same_in_both_directions() -> None:
    """Repeats `test_dropout_is_the_same_in_both_directions`: with an identity for v, out is the kept weights."""
    given = inputs_of(lengths_q=[160, 160], lengths_kv=[200, 200], num_heads=4, head_dim_v=200)
    state = torch.tensor(RNG_STATE, device="cuda")
    traced = trace_mods(lambda score, b, h, i, j: 3.0 * torch.tanh(score / 3.0), lambda b, h, i, j: i + 40 >= j, needs_grad=True)
    spec, x = call_of(given, mods=traced, dropout_p=0.25, rng_state=state)
    eye = torch.eye(200, dtype=x.v.dtype, device="cuda")[None, :, None].expand(2, 200, 2, 200).contiguous()
    weights, *_ = cudnn_backend.forward(spec, x._replace(v=eye))
    kept = weights.transpose(1, 2) != 0
    visible = torch.arange(160, device="cuda")[:, None] + 40 >= torch.arange(200, device="cuda")
    share = kept[visible.expand_as(kept)].double().mean()
    assert abs(share - 0.75) < 0.01, f"{share} of the weights are kept"
    given = inputs_of(lengths_q=[160, 160], lengths_kv=[200, 200], num_heads=4)
    spec, x = call_of(given, mods=traced, dropout_p=0.25, rng_state=state)
    dout = make_dout(given)
    (out, _, _), gradients = run(spec, x, dout)

    def plain(dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in (x.q, x.k, x.v)]
        q, k, v = (t.transpose(1, 2).repeat_interleave(4 // t.shape[2], 1) for t in leaves)
        scores = 3.0 * torch.tanh((q * x.softmax_scale) @ k.transpose(-1, -2) / 3.0)
        p = scores.masked_fill(~visible, -1e4).softmax(-1).masked_fill(~(kept & visible), 0.0) / 0.75
        result = (p @ v).transpose(1, 2)
        return (result.detach(), *torch.autograd.grad(result, leaves, dout.to(dtype)))

    names = ("out", "dq", "dk", "dv")
    for name, a, ref, eager in zip(names, (out, *gradients[:3]), plain(torch.float64), plain(spec.dtype), strict=True):
        check_close(name, a, ref, eager, **({} if name == "out" else {"factor": GRADIENT_FACTOR}))


def test_new_values_of_mods_build_nothing_and_count() -> None:
    """Numbers and tensors that a mod captures are inputs of its plan; the public call gets cudnn in both directions."""
    from flexattn.kernels_cudnn.plans import PLANS

    PLANS.clear()
    given = inputs_of(**EQUAL)
    call = leaves(given) | {"attn_mask_type": "causal", "backend": "cudnn"}
    dout = make_dout(given)
    for step in range(3):
        cap, slopes = 1.0 + step, numbers(HEADS, device="cuda", seed=step).abs()

        def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, cap: float = cap, slopes: Tensor = slopes) -> Any:
            return cap * torch.tanh(score / cap) - slopes[h] * (q_idx - kv_idx).abs()

        explanation = flexattn.explain(**call, score_mod=score_mod)
        assert (explanation.forward.backend, explanation.backward.backend) == ("cudnn", "cudnn")
        got = results(call | {"score_mod": score_mod}, dout)
        want = results(call | {"score_mod": score_mod, "backend": "eager"}, dout)
        for a, b in zip(got, want, strict=True):
            assert (a - b).abs().max() <= 0.02 * b.abs().max()
        assert PLANS.counters.builds == 2


def test_mods_in_a_cuda_graph() -> None:
    given = inputs_of(**EQUAL)
    slopes = numbers(HEADS, device="cuda").abs()
    call = leaves(given) | {"backend": "cudnn", "score_mod": lambda score, b, h, i, j: score - slopes[h] * (i - j).abs()}
    dout = make_dout(given)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            results(call, dout)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results(call, dout)
    slopes.mul_(0.5)
    graph.replay()
    expected = results(call, dout)
    assert torch.equal(captured[0], expected[0])
    for a, b in zip(captured[1:], expected[1:], strict=True):
        torch.testing.assert_close(a, b)


def test_a_stream_of_shapes_with_mods_stops_building() -> None:
    from flexattn.kernels_cudnn.plans import PLANS

    PLANS.clear()
    cudnn_backend.exact_shapes.clear()
    cudnn_backend.prepared_calls.clear()
    builds = []
    for step in range(20):
        length = 140 + 7 * step
        shape = Shape("bshd", "these", {"attn_mask_type": "causal"})
        lengths = {"these": ([length] * 2, [length] * 2)}
        spec, x, given = mods_call(CASES["softcap under a document mask"], shape, lengths, "cuda")
        dout = make_dout(given)
        check(spec, x, dout, *run(spec, x, dout))
        builds.append(PLANS.counters.builds)
    exact = 2 * cudnn_backend.EXACT_SHAPES
    assert exact < builds[-1] <= exact + 2 * 3 * 2
