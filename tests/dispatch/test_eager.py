"""The eager backend against the oracle, in one block and in many, and its promises about memory, work and synchronisation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from flexattn.dispatch import eager_backend
from flexattn.dispatch.reference import reference_attention, reference_gradients
from flexattn.dispatch.spec import AttentionSpec, Gradients, Operands, Window
from flexattn.testing import FORWARD_FACTOR, GRADIENT_FACTOR, Inputs, check_close, make_call, make_dlse, make_dout, make_inputs

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
ALL_FORMATS = ("bshd", "sbhd", "bhsd", "thd", "thd_2bshd", "bhsd_2thd", "sbhd_2bhsd")
NEG_INF = float("-inf")

# No power of two, sq above and below skv, an empty sequence on either side, rows that bottom-right masks hide.
LENGTHS_Q, LENGTHS_KV = [5, 0, 19, 23], [11, 4, 23, 0]
SLOT_Q, SLOT_KV = 23, 23
EVEN_Q, EVEN_KV = [13, 13], [21, 21]


@pytest.fixture(params=["one block", "many blocks"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """No result may depend on the ends of blocks; if there are many blocks, each has two to five rows."""
    if request.param == "many blocks":
        monkeypatch.setattr(eager_backend, "SCORE_BYTES", 2 << 10)
        monkeypatch.setattr(eager_backend, "BAND_ROWS", 3)


def random(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(device, dtype)


def run(spec: AttentionSpec, x: Operands, dout: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Gradients]:
    for direction in ("forward", "backward"):
        assert eager_backend.unsupported(spec, direction) is None  # type: ignore[arg-type]
    out, lse, max_logit = eager_backend.forward(spec, x)
    return out, lse, max_logit, eager_backend.backward(spec, x, out, lse, dout, dlse)


def check(inputs: Inputs, **arguments: Any) -> None:
    """Forward and backward, lse's gradient included, within the error budget; layouts, dtypes and exact zeros at padding."""
    spec, x = make_call(inputs, **arguments)
    dout, dlse = make_dout(inputs), make_dlse(inputs)
    out, lse, max_logit, gradients = run(spec, x, dout, dlse)

    expected, in_dtype = (reference_attention(spec, x, dtype) for dtype in (torch.float64, spec.dtype))
    largest_score = max(0.0, float(expected[2].max()))
    for name, got, ref, eager in zip(("out", "lse", "max_logit"), (out, lse, max_logit), expected, in_dtype, strict=True):
        check_close(name, got, ref, eager, factor=FORWARD_FACTOR, largest_score=largest_score)
    ref_gradients, eager_gradients = (reference_gradients(spec, x, dout, dlse, dtype) for dtype in (torch.float64, spec.dtype))
    operands = (x.q, x.k, x.v, x.bias, x.softmax_offset, None)
    for name, got, ref, eager, operand in zip(Gradients._fields, gradients, ref_gradients, eager_gradients, operands, strict=True):
        if operand is None:
            assert got is None
            continue
        check_close(name, got, ref, eager, factor=GRADIENT_FACTOR, largest_score=largest_score)
        assert got.isfinite().all(), name
        assert got.dtype == operand.dtype
        assert got.is_contiguous()
    assert out.dtype == x.q.dtype
    assert out.is_contiguous()
    assert lse.dtype == max_logit.dtype == dlse.dtype

    is_padding_q, is_padding_kv = x.q[..., 0].isnan(), x.k[..., 0].isnan()
    assert not out[is_padding_q].any()
    assert not gradients.dq[is_padding_q].any()
    assert not gradients.dk[is_padding_kv].any()
    assert not gradients.dv[is_padding_kv].any()
    assert bool((lse[dlse.isnan()] == NEG_INF).all())


def ragged(qkv_format: str = "thd", **options: Any) -> Inputs:
    return make_inputs(qkv_format, lengths_q=LENGTHS_Q, lengths_kv=LENGTHS_KV, padding=True, **options)


@pytest.mark.sample("qkv_format")
@pytest.mark.parametrize("qkv_format", ALL_FORMATS)
@pytest.mark.parametrize("attn_mask_type", ["padding", "padding_causal", "padding_causal_bottom_right"])
def test_padded_formats(qkv_format: str, attn_mask_type: str, blocks: None, device: str) -> None:
    inputs = ragged(qkv_format, gap=3, strided=True, num_heads=6, head_dim_v=24, device=device)
    check(inputs, attn_mask_type=attn_mask_type)


@pytest.mark.sample("qkv_format", "attn_mask_type")
@pytest.mark.parametrize("qkv_format", ["bshd", "sbhd", "bhsd", "sbhd_2bhsd"])
@pytest.mark.parametrize("attn_mask_type", ["no_mask", "causal", "causal_bottom_right"])
@pytest.mark.parametrize("lengths", [(EVEN_Q, EVEN_KV), (EVEN_KV, EVEN_Q)])
def test_dense_formats(
    qkv_format: str, attn_mask_type: str, lengths: tuple[list[int], list[int]], blocks: None, device: str
) -> None:
    inputs = make_inputs(
        qkv_format, lengths_q=lengths[0], lengths_kv=lengths[1], strided=True, head_dim_qk=24, dtype=torch.float64, device=device
    )
    check(inputs, attn_mask_type=attn_mask_type)


@pytest.mark.sample("window_size", "bottom_right_diagonal", "qkv_format")
@pytest.mark.parametrize("window_size", [(0, 0), (4, 0), (2, 3), (-1, 2), (5, -1), (100, 100), Window(-3, None), Window(9, -1)])
@pytest.mark.parametrize("bottom_right_diagonal", [False, True])
@pytest.mark.parametrize("qkv_format", ["thd", "bshd"])
def test_windows(window_size: tuple[int, int], bottom_right_diagonal: bool, qkv_format: str, blocks: None, device: str) -> None:
    check(ragged(qkv_format, device=device), window_size=window_size, bottom_right_diagonal=bottom_right_diagonal)


@pytest.mark.parametrize(("num_heads", "num_heads_kv"), [(4, 4), (4, 2), (6, 2), (4, 1)])
def test_gqa(num_heads: int, num_heads_kv: int, blocks: None, device: str) -> None:
    check(ragged(num_heads=num_heads, num_heads_kv=num_heads_kv, device=device), attn_mask_type="padding_causal")


@pytest.mark.sample("shape", "bias_type", "qkv_format")
@pytest.mark.parametrize("shape", ["bhss", "1hss", "b1ss", "11ss", "111s", "11s1", "bh11", "1111"])
@pytest.mark.parametrize("bias_type", ["pre_scale_bias", "post_scale_bias"])
@pytest.mark.parametrize("qkv_format", ["thd", "bshd"])
def test_bias(shape: str, bias_type: str, qkv_format: str, blocks: None, device: str) -> None:
    sizes = (len(LENGTHS_Q), 4, SLOT_Q, SLOT_KV)
    bias = random(*(size if letter != "1" else 1 for letter, size in zip(shape, sizes, strict=True)), device=device)
    check(ragged(qkv_format, device=device), attn_mask_type="padding_causal", bias_type=bias_type, bias=bias)


SLOPES = torch.tensor([0.5, 0.25, 0.125, 1.0])

# One entry for each way of changing scores or weights, then some combinations.
FEATURES: dict[str, dict[str, Any]] = {
    "alibi": {"bias_type": "alibi", "alibi_slopes": SLOPES, "attn_mask_type": "padding"},
    "alibi per batch": {
        "bias_type": "alibi",
        "alibi_slopes": SLOPES * torch.arange(1, 5)[:, None],
        "attn_mask_type": "padding_causal",
    },
    "softcap": {"softcap": 3.0},
    "off-by-one": {"softmax_type": "off-by-one", "attn_mask_type": "padding_causal_bottom_right"},
    "learnable": {"softmax_type": "learnable", "attn_mask_type": "padding_causal_bottom_right"},
    "dropout": {"dropout_p": 0.3},
    "scale": {"softmax_scale": 0.7},
    "softcap, pre-bias, sink, window": {
        "softcap": 2.0,
        "bias_type": "pre_scale_bias",
        "softmax_type": "learnable",
        "window_size": (6, 1),
    },
    "softcap, alibi, dropout, causal": {
        "softcap": 2.0,
        "bias_type": "alibi",
        "alibi_slopes": SLOPES,
        "dropout_p": 0.2,
        "attn_mask_type": "padding_causal",
    },
    "post-bias, sink, dropout, window": {
        "bias_type": "post_scale_bias",
        "softmax_type": "learnable",
        "dropout_p": 0.5,
        "attn_mask_type": "padding_causal_bottom_right",
        "window_size": (7, 0),
    },
}


@pytest.mark.sample("feature", "dtype")
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_features(feature: str, dtype: torch.dtype, blocks: None, device: str) -> None:
    arguments = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in FEATURES[feature].items()}
    if arguments.get("softmax_type") == "learnable":
        arguments["softmax_offset"] = random(4, dtype=dtype, device=device)
    if arguments.get("bias_type", "alibi") != "alibi":
        arguments["bias"] = random(1, 4, SLOT_Q, SLOT_KV, dtype=dtype, device=device)
    if "dropout_p" in arguments:
        arguments["rng_state"] = torch.tensor([-(2**60) - 7, 12], device=device)
    check(ragged(dtype=dtype, gap=1, device=device), **arguments)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_outliers(dtype: torch.dtype, blocks: None, device: str) -> None:
    check(ragged(dtype=dtype, outliers=True, device=device), attn_mask_type="padding_causal")


def test_dropout_is_the_same_in_every_format(device: str) -> None:
    arguments = {"dropout_p": 0.4, "rng_state": torch.tensor([11, 12], device=device)}
    packed, padded = ragged(gap=3, device=device), ragged("bshd", gap=3, device=device)
    real_packed, real_padded = ~packed.q[:, 0, 0].isnan(), ~padded.q[:, :, 0, 0].isnan()
    assert packed.q[real_packed].equal(padded.q[real_padded])
    out_packed, _, _ = eager_backend.forward(*make_call(packed, **arguments))
    out_padded, _, _ = eager_backend.forward(*make_call(padded, **arguments))
    torch.testing.assert_close(out_packed[real_packed], out_padded[real_padded])


@pytest.mark.parametrize("softmax_type", ["vanilla", "off-by-one", "learnable"])
@pytest.mark.parametrize(("batch", "sq", "skv"), [(0, 3, 3), (2, 0, 3), (2, 3, 0), (2, 0, 0)])
def test_nothing_at_all(softmax_type: str, batch: int, sq: int, skv: int, device: str) -> None:
    inputs = make_inputs(lengths_q=[sq] * batch, lengths_kv=[skv] * batch, device=device)
    inputs = inputs._replace(
        q=inputs.q.reshape(batch, sq, 4, 16), k=inputs.k.reshape(batch, skv, 2, 16), v=inputs.v.reshape(batch, skv, 2, 16)
    )
    check(inputs, softmax_type=softmax_type, softmax_offset=random(4, device=device) if softmax_type == "learnable" else None)
    check(ragged(device=device)._replace(q=torch.empty(0, 4, 16, device=device), max_seqlen_q=0))


def test_wrong_cu_seqlens_stay_inside(device: str) -> None:
    inputs = ragged(gap=2, device=device)
    for cu_seqlens in ([0, 9, 4, 3, 70], [0, 500, 700, 900, 1000], [-7, 3, 6, 5, 2], [60, 40, 30, 20, 10]):
        wrong = torch.tensor(cu_seqlens, dtype=torch.int32, device=device)
        spec, x = make_call(inputs._replace(cu_seqlens_q=wrong, cu_seqlens_kv_padded=wrong))
        out, _, _, gradients = run(spec, x, torch.ones_like(inputs.q), None)
        assert out.shape == inputs.q.shape
        assert gradients.dk.shape == inputs.k.shape


def test_only_what_is_asked_for(device: str) -> None:
    bias = random(1, 1, SLOT_Q, SLOT_KV, device=device)
    spec, x = make_call(ragged(device=device), bias_type="post_scale_bias", bias=bias, return_max_logit=False)
    spec = spec._replace(needs_bias_grad=False)
    x = x._replace(q=x.q.requires_grad_(), bias=bias.requires_grad_())
    out, lse, max_logit, gradients = run(spec, x, torch.ones_like(x.q), None)
    assert not out.requires_grad
    assert not lse.requires_grad
    assert max_logit.shape == (0,)
    assert gradients.dbias is None
    assert not gradients.dq.requires_grad
    assert x.q.grad is None


def test_sums_over_blocks_round_once(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(eager_backend, "SCORE_BYTES", 1)  # one query row per block
    inputs = make_inputs(lengths_q=[100], lengths_kv=[20], dtype=torch.bfloat16, device=device)
    bias = random(1, 1, 1, 20, dtype=torch.bfloat16, device=device)
    spec, x = make_call(inputs, bias_type="post_scale_bias", bias=bias)
    dout = make_dout(inputs)
    gradients, expected = run(spec, x, dout, None)[3], reference_gradients(spec, x, dout)
    for name in ("dk", "dv", "dbias"):
        ref = getattr(expected, name)
        check_close(name, getattr(gradients, name), ref, ref.to(torch.bfloat16), factor=1.0, atol=1e-4)


def test_gradient_with_strides_of_zero(device: str) -> None:
    inputs = make_inputs(lengths_q=EVEN_Q, lengths_kv=EVEN_KV, device=device)
    spec, x = make_call(inputs)
    expanded = torch.ones((), device=device).expand(x.q.shape)  # the gradient of out.sum()
    got = run(spec, x, expanded, None)[3]
    for gradient, expected in zip(got, run(spec, x, expanded.contiguous(), None)[3], strict=True):
        assert (gradient is None) == (expected is None)
        assert gradient is None or gradient.equal(expected)


def test_autocast_changes_nothing(device: str) -> None:
    inputs = make_inputs(lengths_q=EVEN_Q, lengths_kv=EVEN_KV, device=device)
    spec, x = make_call(inputs)
    dout = make_dout(inputs)
    expected = run(spec, x, dout, None)
    with torch.autocast(device, torch.bfloat16):
        got = run(spec, x, dout, None)
    assert got[0].equal(expected[0])
    assert got[3].dk.equal(expected[3].dk)


def test_repeats_bitwise(blocks: None, device: str) -> None:
    inputs = ragged(dtype=torch.bfloat16, num_heads=6, device=device)
    bias = random(1, 1, 1, SLOT_KV, dtype=torch.bfloat16, device=device)
    spec, x = make_call(inputs, bias_type="post_scale_bias", bias=bias, deterministic=True)
    dout = make_dout(inputs)
    first, second = run(spec, x, dout, None), run(spec, x, dout, None)
    for a, b in zip((*first[:3], *first[3][:4]), (*second[:3], *second[3][:4]), strict=True):
        assert a is not None
        assert b is not None
        assert a.equal(b)


def test_unsupported_dtype_says_what_to_use() -> None:
    spec, _ = make_call(ragged())
    reason = eager_backend.unsupported(spec._replace(dtype=torch.float8_e4m3fn), "forward")
    assert reason is not None
    assert "float8_e4m3fn" in reason
    assert "torch.bfloat16" in reason


class Watch(TorchDispatchMode):
    """The most elements of any tensor that an operation made, and how often a value went to the host."""

    largest = 0
    host_reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.host_reads += func is torch.ops.aten._local_scalar_dense.default
        for t in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(t, Tensor):
                # Only stored tensors count: an expanded or sliced view allocates nothing.
                self.largest = max(self.largest, min(t.numel(), t.untyped_storage().nbytes() // t.element_size()))
        return result


LONG = 1000
LONG_BUDGET = 256 << 10  # bytes of scores: a sixteenth of LONG * LONG fp32 scores


def long_calls() -> Iterator[tuple[str, Inputs, dict[str, Any]]]:
    dense = make_inputs(lengths_q=[LONG], num_heads=2, head_dim_qk=8, head_dim_v=8)
    packed = make_inputs("thd", lengths_q=[30, LONG], lengths_kv=[LONG, LONG], num_heads=2, head_dim_qk=8, head_dim_v=8)
    yield "dense", dense, {}
    yield "causal", dense, {"attn_mask_type": "causal"}
    yield "window", dense, {"window_size": (20, 20)}
    yield "dropout", dense, {"dropout_p": 0.1, "rng_state": torch.tensor([1, 2])}
    yield (
        "alibi, softcap, sink",
        dense,
        {"bias_type": "alibi", "alibi_slopes": torch.ones(2), "softcap": 9.0, "softmax_type": "off-by-one"},
    )
    yield "thd", packed, {"attn_mask_type": "padding_causal_bottom_right"}


@pytest.mark.sample
@pytest.mark.parametrize(("inputs", "arguments"), [pytest.param(*case[1:], id=case[0]) for case in long_calls()])
def test_no_tensor_grows_with_sq_times_skv(inputs: Inputs, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager_backend, "SCORE_BYTES", LONG_BUDGET)
    spec, x = make_call(inputs, **arguments)
    dout, dlse = make_dout(inputs), make_dlse(inputs)
    with Watch() as watch:
        run(spec, x, dout, dlse)
    assert watch.largest <= LONG_BUDGET // 4
    assert watch.host_reads == 0  # if there are lengths, one transfer copies all of them


def score_flops(**arguments: Any) -> int:
    spec, x = make_call(make_inputs(lengths_q=[LONG], num_heads=2, head_dim_qk=8, head_dim_v=8), **arguments)
    with FlopCounterMode(display=False) as counter:
        run(spec, x, torch.ones_like(x.q), None)
    return int(counter.get_total_flops())


@pytest.mark.slow
def test_bands_cost_what_they_show() -> None:
    full = score_flops()
    block = eager_backend.BAND_ROWS / LONG  # the share of keys that a block's own rows span
    assert score_flops(attn_mask_type="causal") <= (0.5 + block) * full
    assert score_flops(window_size=(50, 50)) <= (0.1 + block) * full


def test_dense_calls_do_not_synchronise(device: str) -> None:
    if device != "cuda":
        pytest.skip("there is no CUDA device to synchronise with")
    inputs = make_inputs(lengths_q=EVEN_Q, lengths_kv=EVEN_KV, device=device)
    spec, x = make_call(inputs, attn_mask_type="causal", dropout_p=0.1, rng_state=torch.tensor([1, 2], device=device))
    dout = make_dout(inputs)
    run(spec, x, dout, None)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(spec, x, dout, None)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_graph_capture(device: str) -> None:
    if device != "cuda":
        pytest.skip("there is no CUDA device to capture a graph on")
    inputs = make_inputs(lengths_q=EVEN_Q, lengths_kv=EVEN_KV, device=device)
    spec, x = make_call(inputs, attn_mask_type="causal")
    dout = make_dout(inputs)
    expected = run(spec, x, dout, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(spec, x, dout, None)
    graph.replay()
    assert captured[0].equal(expected[0])
    assert captured[3].dk.equal(expected[3].dk)

    packed = make_call(ragged(device=device))
    with pytest.raises(RuntimeError, match="cu_seqlens"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        eager_backend.forward(*packed)
