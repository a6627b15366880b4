"""cuDNN on a GPU: every result against the reference in fp64, known failures avoided, and execution."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import flexattn
from flexattn.dispatch import cudnn_backend, triton_backend
from flexattn.dispatch.select import select
from flexattn.dispatch.spec import AttentionSpec, Gradients, Operands, as_bshd, with_classes
from flexattn.testing import (
    GRADIENT_FACTOR,
    Inputs,
    check_close,
    make_call,
    make_dout,
    make_inputs,
    reference_attention,
    reference_gradients,
)
from tests.conftest import FreshPython


def why_not() -> str | None:
    if not torch.cuda.is_available():
        return "needs a GPU, and torch.cuda.is_available() is False"
    return cudnn_backend.device_error("cuda", torch.cuda.get_device_capability())


pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

NEG_INF = float("-inf")
RNG_STATE = (-7777777777777, 31415926535)
REPEATS = 64


def call_of(inputs: Inputs, **call: Any) -> tuple[AttentionSpec, Operands]:
    """`make_call`, with the fields of the spec that only an operator fills in; max_logit only if requested."""
    spec, x = make_call(inputs, **({"return_max_logit": False} | call))
    return with_classes(spec, x), x


def run(spec: AttentionSpec, x: Operands, dout: Tensor) -> tuple[tuple[Tensor, ...], Gradients]:
    """Forward and backward on cuDNN, which refuses neither."""
    for direction in ("forward", "backward"):
        assert cudnn_backend.unsupported(spec, direction) is None
    results = cudnn_backend.forward(spec, x)
    return results, cudnn_backend.backward(spec, x, results[0], results[1], dout, None)


def check(spec: AttentionSpec, x: Operands, dout: Tensor, results: tuple[Tensor, ...], gradients: Gradients | None) -> None:
    exact, same_dtype = reference_attention(spec, x), reference_attention(spec, x, dtype=spec.dtype)
    names = ("out", "lse", "max_logit") if spec.return_max_logit else ("out", "lse")
    for name, got, ref, eager in zip(names, results, exact, same_dtype, strict=False):
        check_close(name, got, ref, eager)
    if gradients is None:
        return
    exact_gradients = reference_gradients(spec, x, dout)
    budget = reference_gradients(spec, x, dout, dtype=spec.dtype)
    for name, got, ref, eager in zip(Gradients._fields, gradients, exact_gradients, budget, strict=True):
        assert (got is None) == (ref is None)
        if got is not None:
            check_close(name, got, ref, eager, factor=GRADIENT_FACTOR)


def inputs_of(fmt: str = "bshd", **kwargs: Any) -> Inputs:
    defaults: dict[str, Any] = {"num_heads": 6, "num_heads_kv": 2, "head_dim_qk": 64, "head_dim_v": 64, "dtype": torch.bfloat16}
    return make_inputs(fmt, device="cuda", **(defaults | kwargs))


UNEVEN = {"lengths_q": [333, 70], "lengths_kv": [201, 389]}
EQUAL = {"lengths_q": [333, 333], "lengths_kv": [389, 389]}
FORMATS: dict[str, dict[str, Any]] = {
    "bshd": EQUAL,
    "sbhd": EQUAL,
    "bhsd": EQUAL,
    "bshd strided": {**EQUAL, "strided": True},
    "bshd padded": {**UNEVEN, "padding": True, "gap": 5},
    "sbhd padded": {**UNEVEN, "padding": True, "gap": 5},
    "bhsd padded": {**UNEVEN, "padding": True, "gap": 5},
    "thd": {"lengths_q": [333, 0, 70, 129], "lengths_kv": [333, 0, 70, 129]},
    "thd gaps": {"lengths_q": [333, 0, 70, 129], "lengths_kv": [201, 40, 389, 0], "gap": 5},
    "thd_2bshd": {**UNEVEN, "padding": True, "gap": 5},
}
MASKS = ("no_mask", "causal", "causal_bottom_right")


@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (192, 128), (256, 256), (40, 72), (8, 8)], ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_formats_and_masks(fmt: str, mask: str, head_dims: tuple[int, int]) -> None:
    given = inputs_of(fmt.split()[0], **FORMATS[fmt], head_dim_qk=head_dims[0], head_dim_v=head_dims[1])
    if given.cu_seqlens_q is not None:
        mask = "padding" if mask == "no_mask" else f"padding_{mask}"
    spec, x = call_of(given, attn_mask_type=mask)
    dout = make_dout(given)
    check(spec, x, dout, *run(spec, x, dout))


@pytest.mark.parametrize("sizes", [(333, 389), (389, 333), (256, 256), (128, 640), (129, 2)], ids=str)
@pytest.mark.parametrize("bottom_right", [False, True])
@pytest.mark.parametrize("window", [(9, 4), (0, 0), (70, 0), (-1, 40), (130, -1), (2**31, 2**31)], ids=str)
@pytest.mark.parametrize("fmt", ["bshd", "thd"])
def test_windows(fmt: str, window: tuple[int, int], bottom_right: bool, sizes: tuple[int, int]) -> None:
    given = inputs_of(fmt, lengths_q=[sizes[0]] * 2, lengths_kv=[sizes[1]] * 2)
    spec, x = call_of(given, window_size=window, bottom_right_diagonal=bottom_right)
    dout = make_dout(given)
    check(spec, x, dout, *run(spec, x, dout))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (5, 1), (12, 1), (32, 8)], ids=str)
def test_heads_and_outliers(heads: tuple[int, int], dtype: torch.dtype) -> None:
    given = inputs_of(**EQUAL, num_heads=heads[0], num_heads_kv=heads[1], dtype=dtype, outliers=True)
    spec, x = call_of(given, attn_mask_type="causal", softmax_scale=0.02)
    dout = make_dout(given)
    check(spec, x, dout, *run(spec, x, dout))


@pytest.mark.parametrize("head_dims", [(264, 264), (512, 512), (320, 264), (576, 512)], ids=str)
def test_head_dims_past_256_run_forward(head_dims: tuple[int, int]) -> None:
    given = inputs_of(**EQUAL, head_dim_qk=head_dims[0], head_dim_v=head_dims[1])
    spec, x = call_of(given, attn_mask_type="causal")
    if max(head_dims) > 512:
        assert "multiples of 8 up to 512" in str(cudnn_backend.unsupported(spec, "forward"))
        return
    check(spec, x, make_dout(given), cudnn_backend.forward(spec, x), None)
    assert "up to 256" in str(cudnn_backend.unsupported(spec, "backward"))


@pytest.mark.parametrize("skv", [389, 384, 320, 392])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dims", ["bhss", "1hss", "b1ss", "11ss"])
def test_bias_and_its_gradient(dims: str, dtype: torch.dtype, skv: int) -> None:
    given = inputs_of(lengths_q=[333, 333], lengths_kv=[skv, skv])
    full = (2, 6, 333, skv)
    shape = [1 if dim == "1" else n for dim, n in zip(dims, full, strict=True)]
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(5)).to("cuda", dtype)
    spec, x = call_of(given, bias_type="post_scale_bias", bias=bias)
    dout = make_dout(given)
    check(spec, x, dout, *run(spec, x, dout))


@pytest.mark.parametrize("mask", ["padding", "padding_causal"])
@pytest.mark.parametrize("dims", ["bhss", "1hss", "11ss"])
@pytest.mark.parametrize("fmt", ["bshd", "sbhd"])
def test_bias_with_lengths(fmt: str, dims: str, mask: str) -> None:
    given = inputs_of(fmt, **FORMATS["bshd padded"])
    full = (2, 6, 338, 394)
    shape = [1 if dim == "1" else n for dim, n in zip(dims, full, strict=True)]
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(5)).to("cuda", torch.bfloat16)
    spec, x = call_of(given, attn_mask_type=mask, bias_type="post_scale_bias", bias=bias)
    dout = make_dout(given)
    check(spec, x, dout, *run(spec, x, dout))


def test_bias_over_the_keys_alone_runs_forward() -> None:
    given = inputs_of(**EQUAL)
    bias = torch.randn(1, 1, 1, 389, device="cuda")
    spec, x = call_of(given, bias_type="post_scale_bias", bias=bias)
    check(spec, x, make_dout(given), cudnn_backend.forward(spec, x), None)
    assert "broadcast over the queries" in str(cudnn_backend.unsupported(spec, "backward"))


@pytest.mark.parametrize("mask", ["no_mask", "causal"])
@pytest.mark.parametrize("kind", ["off-by-one", "learnable"])
@pytest.mark.parametrize("fmt", ["bshd", "bshd padded"])
def test_sinks(fmt: str, kind: str, mask: str) -> None:
    given = inputs_of("bshd", **FORMATS[fmt])
    if given.cu_seqlens_q is not None:
        mask = "padding" if mask == "no_mask" else f"padding_{mask}"
    offset = torch.randn(6, device="cuda") if kind == "learnable" else None
    spec, x = call_of(given, attn_mask_type=mask, softmax_type=kind, softmax_offset=offset)
    dout = make_dout(given)
    check(spec, x, dout, *run(spec, x, dout))


def test_a_sink_over_packed_sequences_runs_forward() -> None:
    given = inputs_of("thd", **FORMATS["thd gaps"])
    offset = torch.randn(6, device="cuda")
    spec, x = call_of(given, attn_mask_type="padding_causal", softmax_type="learnable", softmax_offset=offset)
    check(spec, x, make_dout(given), cudnn_backend.forward(spec, x), None)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("fmt", ["bshd", "bhsd", "bshd padded", "thd gaps"])
def test_max_logit(fmt: str, mask: str) -> None:
    given = inputs_of(fmt.split()[0], **FORMATS[fmt])
    if given.cu_seqlens_q is not None:
        mask = "padding" if mask == "no_mask" else f"padding_{mask}"
    spec, x = call_of(given, attn_mask_type=mask, return_max_logit=True)
    dout = make_dout(given)
    check(spec, x, dout, *run(spec, x, dout))


@pytest.mark.parametrize("skv", [192, 256])
@pytest.mark.parametrize("mask", ["no_mask", "causal", "padding", "padding_causal"])
@pytest.mark.parametrize("dropout_p", [0.125, 0.5])
def test_dropout_is_the_same_in_both_directions(dropout_p: float, mask: str, skv: int) -> None:
    """With an identity for v, out is the kept weights; with them the reference is plain torch."""
    padded = {"padding": True} if "padding" in mask else {}
    lengths = {"lengths_q": [160, 160], "lengths_kv": [skv, skv], "num_heads": 4, **padded}
    if padded:
        lengths |= {"lengths_q": [160, 90], "lengths_kv": [130, skv]}
    given = inputs_of(**lengths, head_dim_qk=64, head_dim_v=skv)
    state = torch.tensor(RNG_STATE, device="cuda")
    spec, x = call_of(given, attn_mask_type=mask, dropout_p=dropout_p, rng_state=state)
    eye = torch.eye(skv, dtype=x.v.dtype, device="cuda")[None, :, None].expand(2, skv, 2, skv).contiguous()
    weights, *_ = cudnn_backend.forward(spec, x._replace(v=eye))
    again, *_ = cudnn_backend.forward(spec, x._replace(v=eye))
    other, *_ = cudnn_backend.forward(spec, x._replace(v=eye, rng_state=state + 1))
    assert torch.equal(weights, again)
    assert not torch.equal(weights, other)
    kept = weights.transpose(1, 2) != 0  # [b, h, sq, skv]
    visible = torch.ones(160, skv, dtype=torch.bool, device="cuda")
    if "causal" in mask:
        visible = visible.tril()
    visible = visible.repeat(2, 1, 1)
    for b in range(2):
        visible[b, lengths["lengths_q"][b] :] = visible[b, :, lengths["lengths_kv"][b] :] = False
    visible = visible[:, None]
    share = kept[visible.expand_as(kept)].double().mean()
    assert abs(share - (1 - dropout_p)) < 0.01, f"{share} of the weights are kept"

    # With a v and head dims that training has.
    given = inputs_of(**lengths)
    spec, x = call_of(given, attn_mask_type=mask, dropout_p=dropout_p, rng_state=state)
    dout = make_dout(given)
    (out, _, _), gradients = run(spec, x, dout)

    def plain(dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [t.detach().nan_to_num().to(dtype).requires_grad_() for t in (x.q, x.k, x.v)]
        q, k, v = (t.transpose(1, 2).repeat_interleave(4 // t.shape[2], 1) for t in leaves)
        scores = (q * x.softmax_scale) @ k.transpose(-1, -2)
        p = scores.masked_fill(~visible, -1e4).softmax(-1)
        p = p.masked_fill(~(kept & visible), 0.0) / (1 - dropout_p)
        result = (p @ v).transpose(1, 2)
        return (result.detach(), *torch.autograd.grad(result, leaves, dout.nan_to_num().to(dtype)))

    names = ("out", "dq", "dk", "dv")
    got = (out, *gradients[:3])
    for name, a, ref, eager in zip(names, got, plain(torch.float64), plain(spec.dtype), strict=True):
        check_close(name, a, ref, eager, **({} if name == "out" else {"factor": GRADIENT_FACTOR}))


# Known failures, each shown to be avoided.


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("skv", [192, 320, 64, 200])
def test_very_negative_lse_gives_no_nan(skv: int, bias: bool) -> None:
    """pytorch issue 196678, cudnn-frontend issue 628: skv % 128 == 64 and a row whose lse is below -88.7."""
    given = inputs_of(lengths_q=[256, 256], lengths_kv=[skv, skv])
    q, k = given.q.abs() + 1.0, -given.k.abs() - 1.0
    given = given._replace(q=q * 4, k=k)
    extra = {"bias_type": "post_scale_bias", "bias": torch.full((1, 1, 256, skv), -50.0, device="cuda")} if bias else {}
    spec, x = call_of(given, **extra)
    dout = make_dout(given)
    results, gradients = run(spec, x, dout)
    assert results[1].min() < -89
    check(spec, x, dout, results, gradients)


@pytest.mark.parametrize("fmt", ["thd", "bshd padded"])
@pytest.mark.parametrize("mask", ["padding", "padding_causal_bottom_right"])
def test_sequences_without_keys_or_queries(fmt: str, mask: str) -> None:
    """cudnn-frontend issue 943: NaN rows if a sequence has no key."""
    lengths = {"lengths_q": [100, 0, 37, 129], "lengths_kv": [0, 55, 200, 128]}
    given = inputs_of(fmt.split()[0], **lengths, gap=3, **({} if fmt == "thd" else {"padding": True}))
    spec, x = call_of(given, attn_mask_type=mask)
    dout = make_dout(given)
    check(spec, x, dout, *run(spec, x, dout))


@pytest.mark.parametrize("fmt", ["bshd", "thd"])
def test_queries_that_see_no_key(fmt: str) -> None:
    for lengths_q, lengths_kv, mask, window in (
        (300, 120, "causal_bottom_right", (-1, 0)),
        (300, 120, "no_mask", (20, 20)),
        (300, 120, "causal", (20, 0)),
    ):
        given = inputs_of(fmt, lengths_q=[lengths_q] * 2, lengths_kv=[lengths_kv] * 2)
        full = mask if fmt == "bshd" else ("padding" if mask == "no_mask" else f"padding_{mask}")
        spec, x = call_of(given, attn_mask_type=full, window_size=window)
        dout = make_dout(given)
        results, gradients = run(spec, x, dout)
        assert (results[1] == NEG_INF).any()
        check(spec, x, dout, results, gradients)


def test_one_query_runs_forward() -> None:
    given = inputs_of(lengths_q=[1, 1], lengths_kv=[777, 777])
    for mask in ("no_mask", "causal_bottom_right"):
        spec, x = call_of(given, attn_mask_type=mask)
        check(spec, x, make_dout(given), cudnn_backend.forward(spec, x), None)
        assert "one query" in str(cudnn_backend.unsupported(spec, "backward"))


def test_packed_sequences_of_one_query() -> None:
    """cudnn-frontend issue 1083: statistics are only written for the first head of each group."""
    given = inputs_of("thd", lengths_q=[1, 1, 1], lengths_kv=[100, 7, 301])
    spec, x = call_of(given, attn_mask_type="padding")
    check(spec, x, make_dout(given), cudnn_backend.forward(spec, x), None)


# Execution.


def leaves(inputs: Inputs) -> dict[str, Any]:
    call = inputs._asdict()
    return call | {name: call[name].nan_to_num().requires_grad_() for name in "qkv"}


def results(call: dict[str, Any], dout: Tensor) -> tuple[Tensor, ...]:
    out = flexattn.attention(**call)
    return (out.detach(), *torch.autograd.grad(out, [call[name] for name in "qkv"], dout))


def test_the_name_gets_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLEXATTN_CANARY", raising=False)  # it runs each once more
    given = inputs_of(**EQUAL)
    call = leaves(given) | {"attn_mask_type": "causal", "backend": "cudnn"}
    ran = []
    for name in ("forward", "backward"):
        original = getattr(cudnn_backend, name)
        monkeypatch.setattr(cudnn_backend, name, lambda *args, name=name, original=original: ran.append(name) or original(*args))
    results(call, make_dout(given))
    assert ran == ["forward", "backward"]
    explanation = flexattn.explain(**call)
    assert (explanation.forward.backend, explanation.backward.backend) == ("cudnn", "cudnn")


def test_auto_takes_cudnn_where_triton_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLEXATTN_BACKEND", raising=False)
    given = inputs_of(**EQUAL, head_dim_qk=320, head_dim_v=320)
    call = given._asdict() | {"attn_mask_type": "causal"}
    monkeypatch.setattr(triton_backend, "unsupported", lambda spec, direction: "it is not here")
    select.cache_clear()
    decision = flexattn.explain(**call).forward
    assert decision.backend == "cudnn"
    spec, x = call_of(given, attn_mask_type="causal")
    check(spec, x, make_dout(given), flexattn.attention(**call, return_lse=True), None)
    monkeypatch.undo()
    select.cache_clear()


def test_views_that_cudnn_cannot_read_are_copied() -> None:
    """Rows off 16-byte boundaries, expanded heads, a last dim that is not contiguous, an expanded dout."""
    given = inputs_of(lengths_q=[100, 100])
    odd = torch.zeros(2, 100, 6, 67, dtype=torch.bfloat16, device="cuda")[..., 3:].copy_(given.q)
    turned = given.k.transpose(-1, -2).contiguous().transpose(-1, -2)
    shared = given.v[:, :, :1].expand(2, 100, 2, 64)
    given = given._replace(q=odd, k=turned, v=shared)
    spec, x = call_of(given)
    dout = torch.ones((), dtype=torch.bfloat16, device="cuda").expand(2, 100, 6, 64)
    check(spec, x, dout, *run(spec, x, dout))


@pytest.mark.parametrize("fmt", ["bshd", "sbhd", "bhsd", "bshd padded"])
def test_a_stream_of_shapes_stops_building(fmt: str) -> None:
    from flexattn.kernels_cudnn.plans import PLANS

    PLANS.clear()
    cudnn_backend.exact_shapes.clear()
    cudnn_backend.prepared_calls.clear()
    builds = []
    for step in range(30):
        batch, length = 1 + step % 4, 140 + 7 * step
        padded = {"padding": True, "gap": 2} if "padded" in fmt else {}
        given = inputs_of(fmt.split()[0], lengths_q=[length] * batch, **padded)
        spec, x = call_of(given, attn_mask_type="padding_causal" if padded else "causal")
        dout = make_dout(given)
        check(spec, x, dout, *run(spec, x, dout))
        builds.append(PLANS.counters.builds)
    exact = 2 * cudnn_backend.EXACT_SHAPES
    assert exact < builds[-1] <= exact + 2 * 3 * 4  # lengths of 192, 256 and 384 for batches of 1, 2 and 4, and token totals


@pytest.mark.parametrize("fmt", ["bshd", "thd"])
def test_forwards_repeat_to_the_bit(fmt: str) -> None:
    given = inputs_of(fmt, lengths_q=[1311, 1311], head_dim_qk=128, head_dim_v=128)
    call = given._asdict() | {"attn_mask_type": "padding_causal" if fmt == "thd" else "causal", "backend": "cudnn"}
    call |= {"deterministic": True, "return_lse": True}
    first = flexattn.attention(**call)
    for _ in range(REPEATS):
        assert all(torch.equal(a, b) for a, b in zip(first, flexattn.attention(**call), strict=True))


def test_alternating_streams() -> None:
    """Two streams alternate with different inputs, and each gets its own results."""
    streams = [torch.cuda.Stream() for _ in range(2)]
    calls, expected = [], []
    for seed in range(2):
        given = inputs_of(lengths_q=[700, 700], head_dim_qk=128, head_dim_v=128, seed=seed)
        call = leaves(given) | {"attn_mask_type": "causal", "backend": "cudnn"}
        calls.append((call, make_dout(given, seed=9 + seed)))
        expected.append(results(*calls[-1]))
    torch.cuda.synchronize()
    got: list[list[tuple[Tensor, ...]]] = [[], []]
    for _ in range(20):
        for which, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                got[which].append(results(*calls[which]))
    torch.cuda.synchronize()
    for which in range(2):
        for found in got[which]:
            assert torch.equal(found[0], expected[which][0])
            for a, b in zip(found[1:], expected[which][1:], strict=True):
                torch.testing.assert_close(a, b)


def test_two_threads() -> None:
    given = [inputs_of(lengths_q=[500 + 9 * n] * 2, seed=n) for n in range(2)]
    work = []
    for inputs in given:
        spec, x = call_of(inputs, attn_mask_type="causal")
        work.append((spec, x, make_dout(inputs)))
    errors: list[BaseException] = []
    found: dict[int, list[Any]] = {0: [], 1: []}

    def loop(which: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for step in range(20):
                    found[which].append(run(*work[(which + step) % 2]))
                torch.cuda.current_stream().synchronize()
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=loop, args=(which,)) for which in range(2)]
    torch.cuda.synchronize()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    for which in range(2):
        for step, got in enumerate(found[which][:4]):
            check(*work[(which + step) % 2], *got)


def test_cuda_graph_replays_with_new_lengths() -> None:
    total, room = 900, 512
    given = inputs_of("thd", lengths_q=[500, 400])
    call = leaves(given) | {"attn_mask_type": "padding_causal", "backend": "cudnn", "max_seqlen_q": room, "max_seqlen_kv": room}
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
    for step, lengths in enumerate(([500, 400], [512, 3], [0, 511], [1, 450])):
        with torch.no_grad():
            for name in "qkv":
                call[name].copy_(torch.randn(call[name].shape, generator=torch.Generator().manual_seed(step)))
            cu = offsets(lengths)
            call["cu_seqlens_q"].copy_(cu)
            call["cu_seqlens_kv"].copy_(cu)
        graph.replay()
        expected = results(call, dout)
        assert total >= sum(lengths)
        assert not captured[0][sum(lengths) :].any()
        assert torch.equal(captured[0], expected[0])
        for a, b in zip(captured[1:], expected[1:], strict=True):
            torch.testing.assert_close(a, b)


def offsets(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32, device="cuda").cumsum(0, dtype=torch.int32)


def test_building_inside_a_capture_says_what_to_do() -> None:
    given = inputs_of(lengths_q=[77, 77], head_dim_qk=72)
    spec, x = call_of(given)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="warmup"), torch.cuda.graph(graph):
        cudnn_backend.forward(spec, x)


def test_lengths_beyond_the_tensors_touch_nothing_outside() -> None:
    given = inputs_of("thd", lengths_q=[100, 100])
    wrong = torch.tensor([0, 5000, 90], dtype=torch.int32, device="cuda")
    spec, x = call_of(given._replace(cu_seqlens_q=wrong, cu_seqlens_kv=wrong), attn_mask_type="padding")
    out, *_ = cudnn_backend.forward(spec, x)
    torch.cuda.synchronize()
    assert out.isfinite().all()


SECOND_PROCESS = """
import torch, flexattn
from flexattn.kernels_cudnn.plans import PLANS
torch.manual_seed(0)
q = torch.randn(2, 300, 4, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
out = flexattn.attention(q, q, q, attn_mask_type="causal", backend="cudnn")
out.sum().backward()
print(PLANS.counters.builds, PLANS.counters.loads, float(out.double().sum()), float(q.grad.isfinite().all()))
"""


def test_a_second_process_loads_its_plans(fresh_python: FreshPython, tmp_path: Any) -> None:
    import os

    env = {"FLEXATTN_PLANS": str(tmp_path), "PYTHONPATH": os.pathsep.join([*os.environ.get("PYTHONPATH", "").split(os.pathsep)])}
    first, second = (fresh_python("-c", SECOND_PROCESS, env=env) for _ in range(2))
    assert first.returncode == 0, first.stderr
    assert second.returncode == 0, second.stderr
    assert first.stdout.split()[:2] == ["2", "0"]
    assert second.stdout.split()[:2] == ["0", "2"]
    assert first.stdout.split()[2:] == second.stdout.split()[2:]


def test_padding_is_written_as_zero() -> None:
    given = inputs_of("bshd", **FORMATS["bshd padded"])
    spec, x = call_of(given, attn_mask_type="padding_causal")
    (out, lse, _), gradients = run(spec, x, make_dout(given))
    for got, source in ((out, given.q), (gradients.dq, given.q), (gradients.dk, given.k), (gradients.dv, given.v)):
        assert not got[as_bshd(source, "bshd")[..., 0].isnan()].any()
    assert (lse.transpose(1, 2)[given.q[..., 0].isnan()] == NEG_INF).all()
