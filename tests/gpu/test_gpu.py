"""Properties that only a GPU can show: sizes past 32 bits, determinism, no synchronisation, graphs, compilations, memory."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import flexattn
from flexattn.dispatch import triton_backend
from flexattn.dispatch.reference import Differentiable, Sequences, attend, lse_view, slice_block, token_view
from flexattn.dispatch.spec import AttentionSpec, Gradients, Operands
from flexattn.kernels_triton.runtime.launch import kernel_cache_info
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

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and torch.cuda.is_available() is False")

INT32 = 2**31
PAST_ROOT = 46_400  # a little more than sqrt(2**31): a product of two positions no longer fits 32 bits
RNG_STATE = (-7777777777777, 31415926535)
REPEATS = 64
LINEAR = 2.1  # times the memory for twice the length, with room for the allocator's rounding; quadratic would be 4


def need(gib: float) -> None:
    """Skips the test if the device has less free memory."""
    torch.cuda.empty_cache()
    free, total = (size / 2**30 for size in torch.cuda.mem_get_info())
    if free < gib:
        pytest.skip(f"needs {gib} GiB of device memory; {free:.1f} of {total:.1f} GiB are free")


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=dtype, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))


def offsets(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32, device="cuda").cumsum(0, dtype=torch.int32)


def packed(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Inputs:
    cu_seqlens = offsets(lengths)
    return Inputs(q, k, v, "thd", cu_seqlens, cu_seqlens, None, None, max(lengths), max(lengths))


def on_rows(
    spec: AttentionSpec, x: Operands, sequences: Sequences, blocks: Sequence[range], dout: Tensor, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The reference in `dtype` on some query rows of some sequences, with the gradients of those rows alone: bounded memory.

    out, lse, dq and dbias hold the blocks' rows, one block after the other; dk and dv all keys. Layouts are `attend`'s.
    """
    keys = range(len(sequences.kv))
    parts: list[dict[str, Tensor]] = []
    for rows in blocks:
        block = slice_block(spec, Differentiable.of(x), sequences, rows, keys).map(lambda t: t.detach().to(dtype).requires_grad_())
        out, lse, _ = attend(spec, x, sequences, rows, keys, block)
        seed = token_view(dout, spec.q_format, sequences.batch, sequences.q[rows.start : rows.stop]).to(dtype)
        leaves = {name: leaf for name, leaf in block._asdict().items() if isinstance(leaf, Tensor)}
        grads = torch.autograd.grad(out, list(leaves.values()), seed)
        parts.append({"out": out.detach(), "lse": lse.detach()} | {f"d{name}": g for name, g in zip(leaves, grads, strict=True)})
    sums = {name: torch.stack([part[name].double() for part in parts]).sum(0) for name in ("dk", "dv")}
    rest = {name: torch.cat([part[name] for part in parts], 2) for name in parts[0] if name not in sums}
    return rest | sums


def check_rows(
    spec: AttentionSpec,
    x: Operands,
    sequences: Sequences,
    blocks: Sequence[range],
    dout: Tensor,
    got: tuple[Tensor, Tensor, Gradients],
) -> None:
    """Compares the results on these rows, and for all keys, with the reference in fp64 on the same rows.

    dout is 0 on all other rows.
    """
    out, lse, gradients = got
    views = {"out": out, "dq": gradients.dq}
    got_rows = {
        name: torch.cat([token_view(t, spec.q_format, sequences.batch, sequences.q[r.start : r.stop]) for r in blocks], 2)
        for name, t in views.items()
    }
    got_rows["lse"] = torch.cat([lse_view(lse, spec.q_format, sequences.batch, sequences.q[r.start : r.stop]) for r in blocks], 2)
    got_rows["dk"], got_rows["dv"] = (
        token_view(t, spec.kv_format, sequences.batch, sequences.kv) for t in (gradients.dk, gradients.dv)
    )
    if gradients.dbias is not None:
        got_rows["dbias"] = torch.cat([gradients.dbias[:, :, r.start : r.stop] for r in blocks], 2)
    want = on_rows(spec, x, sequences, blocks, dout, torch.float64)
    budget = on_rows(spec, x, sequences, blocks, dout, spec.dtype)
    assert got_rows.keys() == want.keys()
    for name, rows in got_rows.items():
        factor = {"factor": GRADIENT_FACTOR} if name.startswith("d") else {}
        check_close(name, rows, want[name], budget[name], **factor)


def run(spec: AttentionSpec, x: Operands, dout: Tensor) -> tuple[Tensor, Tensor, Gradients]:
    for direction in ("forward", "backward"):
        assert triton_backend.unsupported(spec, direction) is None
    out, lse, _ = triton_backend.forward(spec, x)
    return out, lse, triton_backend.backward(spec, x, out, lse, dout, None)


def test_more_than_2_31_elements() -> None:
    need(40)
    heads, head_dim = 16, 128
    lengths = [1021, 1027] * 513
    total = sum(lengths)
    q, k, v, dout = (randn(total, heads, head_dim, seed=seed) for seed in range(4))
    assert q.numel() > INT32 > q.numel() - 3 * 1027 * heads * head_dim  # the last few sequences lie past it
    spec, x = make_call(packed(q, k, v, lengths), attn_mask_type="padding_causal", return_max_logit=False)
    got = run(spec, x, dout)
    starts = offsets(lengths).tolist()
    for b in (0, len(lengths) // 2, len(lengths) - 2, len(lengths) - 1):
        tokens = range(starts[b], starts[b + 1])
        check_rows(spec, x, Sequences(range(b, b + 1), tokens, tokens), [range(len(tokens))], dout, got)


@pytest.mark.parametrize("wide", ["b", "s", "h"])
def test_strides_past_2_31(wide: str) -> None:
    """Small tensors whose last batch, row or head lies more than 2**31 elements behind the first; between them is NaN."""
    need(24)

    def spread(t: Tensor) -> Tensor:
        dim = "bsh".index(wide)
        step = -(-INT32 // ((t.shape[dim] - 1) * 8)) * 8 + 64
        strides = list(t.stride())
        inner = [d for d in range(3) if d != dim]
        strides[inner[1]], strides[inner[0]], strides[dim] = t.shape[3], t.shape[3] * t.shape[inner[1]], step
        span = sum((size - 1) * stride for size, stride in zip(t.shape, strides, strict=True)) + 1
        view = torch.full((span,), float("nan"), dtype=t.dtype, device="cuda").as_strided(t.shape, strides)
        assert (t.shape[dim] - 1) * step > INT32
        return view.copy_(t)

    # sequences so short that a row's stride stays larger than the row's data
    given = make_inputs(
        lengths_q=[307] * 3, lengths_kv=[291] * 3, head_dim_qk=64, head_dim_v=64, dtype=torch.bfloat16, device="cuda"
    )
    dout = make_dout(given)
    spec, x = make_call(given, attn_mask_type="causal_bottom_right", return_max_logit=False)
    out, lse, gradients = run(spec, x._replace(q=spread(x.q), k=spread(x.k), v=spread(x.v)), spread(dout))
    want, budget = reference_attention(spec, x), reference_attention(spec, x, dtype=spec.dtype)
    check_close("out", out, want[0], budget[0])
    check_close("lse", lse, want[1], budget[1])
    wanted, budgets = reference_gradients(spec, x, dout), reference_gradients(spec, x, dout, dtype=spec.dtype)
    for name in ("dq", "dk", "dv"):
        check_close(name, getattr(gradients, name), getattr(wanted, name), getattr(budgets, name), factor=GRADIENT_FACTOR)


SOME_ROWS = [range(40), range(23_170, 23_210), range(PAST_ROOT - 40, PAST_ROOT)]


def dout_on(blocks: Sequence[range], like: Tensor, start: int, sequence_dim: int) -> Tensor:
    """A standard normal dout on these rows, behind `start` tokens; 0 on all others, which then give no gradient."""
    dout = torch.zeros_like(like)
    for rows in blocks:
        part = dout.narrow(sequence_dim, start + rows.start, len(rows))
        part.copy_(randn(*part.shape, seed=7))
    return dout


@pytest.mark.parametrize("fmt", ["bshd", "thd"])
@pytest.mark.parametrize("mask", ["padding_causal", "padding"])
def test_longer_than_46341(fmt: str, mask: str) -> None:
    need(16)
    before = 300 if fmt == "thd" else 0  # tokens of another sequence
    shape = (before + PAST_ROOT, 2, 64) if fmt == "thd" else (1, PAST_ROOT, 2, 64)
    kv_shape = (*shape[:-2], 1, 64)
    q, k, v = randn(*shape), randn(*kv_shape, seed=1), randn(*kv_shape, seed=2)
    given = packed(q, k, v, [before, PAST_ROOT]) if fmt == "thd" else Inputs(q, k, v, fmt, None, None, None, None, None, None)
    spec, x = make_call(given, attn_mask_type=mask if fmt == "thd" else mask.replace("padding_", "").replace("padding", "no_mask"))
    dout = dout_on(SOME_ROWS, q, before, 0 if fmt == "thd" else 1)
    got = run(spec, x, dout)
    tokens = range(before, before + PAST_ROOT)
    batch = range(1, 2) if fmt == "thd" else range(1)
    check_rows(spec, x, Sequences(batch, tokens, tokens), SOME_ROWS, dout, got)


@pytest.mark.parametrize("kind", ["pre_scale_bias", "post_scale_bias"])
def test_bias_of_more_than_2_31_elements(kind: str) -> None:
    need(28)
    q, k, v = (randn(1, PAST_ROOT, 2, 64, seed=seed) for seed in range(3))
    bias = randn(1, 1, PAST_ROOT, PAST_ROOT, seed=3)
    assert bias.numel() > INT32
    given = Inputs(q, k, v, "bshd", None, None, None, None, None, None)
    spec, x = make_call(given, attn_mask_type="causal", bias_type=kind, bias=bias, return_max_logit=False)
    dout = dout_on(SOME_ROWS, q, 0, 1)
    out, lse, gradients = run(spec, x, dout)
    tokens = range(PAST_ROOT)
    check_rows(spec, x, Sequences(range(1), tokens, tokens), SOME_ROWS, dout, (out, lse, gradients))
    assert gradients.dbias is not None
    for rows in SOME_ROWS:
        gradients.dbias[:, :, rows.start : rows.stop] = 0
    assert not gradients.dbias.any()


def leaves(inputs: Inputs) -> dict[str, Any]:
    """`attention`'s arguments, with q, k and v as leaves that require a gradient; padding is 0."""
    call = inputs._asdict()
    return call | {name: call[name].nan_to_num().requires_grad_() for name in "qkv"}


def results(call: dict[str, Any], dout: Tensor) -> tuple[Tensor, ...]:
    """out and the gradients of q, k, v and, if the call has them, of the bias and the offset."""
    out = flexattn.attention(**call)
    wanted = [t for name in ("q", "k", "v", "bias", "softmax_offset") if (t := call.get(name)) is not None]
    return (out.detach(), *torch.autograd.grad(out, wanted, dout))


@pytest.mark.parametrize("fmt", ["bshd", "thd"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_64_runs_are_equal_to_the_bit(head_dim: int, fmt: str) -> None:
    lengths = [1500, 777, 0, 1311] if fmt == "thd" else [1311] * 3
    heads, longest = 12, max(lengths)  # over one key head: dk and dv come from more than one program
    given = make_inputs(
        fmt,
        lengths_q=lengths,
        num_heads=heads,
        num_heads_kv=1,
        head_dim_qk=head_dim,
        head_dim_v=head_dim,
        dtype=torch.bfloat16,
        device="cuda",
    )
    call = leaves(given) | {
        "attn_mask_type": "padding_causal" if fmt == "thd" else "causal",
        "bias_type": "post_scale_bias",
        "bias": randn(1, heads, longest, longest).requires_grad_(),
        "softmax_type": "learnable",
        "softmax_offset": randn(heads, dtype=torch.float32).requires_grad_(),
        "dropout_p": 0.1,
        "rng_state": torch.tensor(RNG_STATE, device="cuda"),
        "deterministic": True,
        "backend": "triton",
    }
    dout = make_dout(given).nan_to_num()
    first = results(call, dout)
    for _ in range(REPEATS):
        assert all(torch.equal(a, b) for a, b in zip(first, results(call, dout), strict=True))


@pytest.mark.parametrize("fmt", ["bshd", "thd"])
def test_auto_takes_triton_in_both_directions(fmt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLEXATTN_BACKEND", raising=False)
    given = make_inputs(fmt, lengths_q=[70, 33] if fmt == "thd" else [70], dtype=torch.bfloat16, device="cuda")
    call = leaves(given) | {"attn_mask_type": "padding_causal" if fmt == "thd" else "causal"}
    explanation = flexattn.explain(**call)
    assert explanation.backward is not None
    assert (explanation.forward.backend, explanation.backward.backend) == ("triton", "triton")
    ran = []
    for name in ("forward", "backward"):
        original = getattr(triton_backend, name)
        monkeypatch.setattr(triton_backend, name, lambda *args, name=name, original=original: ran.append(name) or original(*args))
    results(call, make_dout(given).nan_to_num())
    assert ran == ["forward", "backward"]


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Inside, an operation that torch knows to wait for the device raises."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "prototype feature"
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("max_seqlen", ["given", "not given"])
def test_a_call_waits_for_nothing(max_seqlen: str) -> None:
    given = make_inputs("thd", lengths_q=[70, 0, 333], gap=3, num_heads=12, num_heads_kv=1, dtype=torch.bfloat16, device="cuda")
    call = leaves(given) | {
        "attn_mask_type": "padding_causal",
        "bias_type": "alibi",
        "softmax_type": "learnable",
        "softmax_offset": randn(12, dtype=torch.float32).requires_grad_(),
        "dropout_p": 0.1,
    }
    if max_seqlen == "not given":
        call |= {"max_seqlen_q": None, "max_seqlen_kv": None}
    dout = make_dout(given).nan_to_num()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the cost of a missing max_seqlen
        results(call, dout)  # loading a kernel may wait
        with no_synchronisation():
            results(call, dout)
            with pytest.raises(RuntimeError, match="synchroni"):
                dout.sum().item()  # so the mode is on


def test_cuda_graph_replays_with_new_lengths() -> None:
    total, room = 900, 512  # the capture's bounds: its grid has room for a sequence of 512
    q, k, v = (randn(total, heads, 64, seed=heads).requires_grad_() for heads in (4, 2, 2))
    dout = randn(total, 4, 64, seed=5)
    cu_seqlens, rng_state = offsets([500, 400]), torch.tensor(RNG_STATE, device="cuda")
    call: dict[str, Any] = {
        "q": q,
        "k": k,
        "v": v,
        "qkv_format": "thd",
        "attn_mask_type": "padding_causal",
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_kv": cu_seqlens,
        "max_seqlen_q": room,
        "max_seqlen_kv": room,
        "dropout_p": 0.1,
        "rng_state": rng_state,
    }
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles, loads and caches everything once
        results(call, dout)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results(call, dout)
    for step, lengths in enumerate(([500, 400], [512, 3], [0, 511], [1, 450])):
        with torch.no_grad():
            for t in (q, k, v):
                t.copy_(randn(*t.shape, seed=10 + step))
            cu_seqlens.copy_(offsets(lengths))
            rng_state += 1
        graph.replay()
        assert not captured[0][sum(lengths) :].any()
        assert captured[0][: sum(lengths)].any()
        assert all(torch.equal(a, b) for a, b in zip(captured, results(call, dout), strict=True))


def test_dropout_in_a_cuda_graph_is_drawn_anew() -> None:
    q = randn(1, 300, 2, 64)
    flexattn.attention(q, q, q, dropout_p=0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flexattn.attention(q, q, q, dropout_p=0.5)
    graph.replay()
    first = out.clone()
    graph.replay()
    assert not torch.equal(out, first)


def compilations() -> int:
    return kernel_cache_info()["misses"]


BATCHES = ([64, 128], [63, 128], [70], [97, 16, 15], [80] * 16, [129, 0, 2])  # up to 64 tokens, calls have other tiles


@pytest.mark.parametrize("heads", [(4, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("kind", ["thd", "bshd", "thd bias"])
def test_new_lengths_compile_nothing(kind: str, heads: tuple[int, int]) -> None:
    seen = set()
    for lengths in BATCHES:
        fmt, _, bias = kind.partition(" ")
        lengths = lengths if fmt == "thd" else [max(lengths)] * len(lengths)
        given = make_inputs(fmt, lengths_q=lengths, num_heads=heads[0], num_heads_kv=heads[1], dtype=torch.bfloat16, device="cuda")
        call: dict[str, Any] = {"attn_mask_type": "padding_causal" if fmt == "thd" else "causal"}
        if bias:
            call |= {"bias_type": "post_scale_bias", "bias": randn(1, heads[0], max(lengths) + 1, max(lengths) + 1)[..., 1:, 1:]}
        spec, x = make_call(given, **call)
        run(spec, x, make_dout(given))
        seen.add(compilations())
    assert len(seen) == 1, f"compiled kernels after each batch: {sorted(seen)}"


def test_memory_is_linear() -> None:
    need(4)

    def peak(seqlen: int) -> int:
        q, k, v = (randn(1, seqlen, 8, 64, seed=seed).requires_grad_() for seed in range(3))
        dout = randn(1, seqlen, 8, 64, seed=3)
        call = {"q": q, "k": k, "v": v, "attn_mask_type": "causal"}
        results(call, dout)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        results(call, dout)
        return torch.cuda.max_memory_allocated() - before

    short, long = peak(8192), peak(16384)
    assert long <= LINEAR * short, f"{short} bytes at 8192 tokens, {long} at 16384"
    assert long < 16384 * 16384  # less than one head's scores, even in 8 bits


def test_a_device_that_is_not_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs, and there is one")
    given = make_inputs(lengths_q=[70], dtype=torch.bfloat16, device="cuda:1")
    call, dout = leaves(given), make_dout(given)
    there = results(call, dout)
    with torch.cuda.device(1):
        assert all(torch.equal(a, b) for a, b in zip(there, results(call, dout), strict=True))
