"""Triton kernels for lists of keys against the fp64 reference, interpreted, and compiled for other GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flexattn
from flexattn import attention
from flexattn.call_cache import clear_cache
from flexattn.dispatch import reference, triton_backend
from flexattn.dispatch.sample import sample_operands
from flexattn.functional import bind_call
from flexattn.kernels_triton.ahead_of_time.compile_report import SHARED_MEMORY_LIMIT, request_for
from flexattn.kernels_triton.families import Policy
from flexattn.kernels_triton.runtime.device import pretended_device
from flexattn.kernels_triton.runtime.launch import recorded_launches
from flexattn.kernels_triton.sparse import backward, inversion, tiles, weights
from flexattn.ops import make_spec, spec_to_run
from flexattn.testing import GRADIENT_FACTOR, check_close
from tests.support.compiled_kernels import compile_sound
from tests.support.key_lists import draw_lists

LENGTHS_Q, LENGTHS_KV = [2, 0, 4, 1], [7, 4, 13, 5]
ENTRIES = 18  # two tiles of the interpreter


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # with a GPU the kernels run compiled, else interpreted


def rand(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype).requires_grad_()


def call(case: str, dtype: torch.dtype = torch.float32, dims: tuple[int, int] = (16, 24)) -> dict[str, Any]:
    """Returns the arguments of a call with features by name. Packed sequences have gaps, and dense ones padding that is NaN."""
    heads, heads_kv = (
        (3, 1) if "three heads" in case else (20, 1) if "many heads" in case else (100, 1) if "hundred" in case else (4, 2)
    )
    lists = 0 if "one list" in case else heads_kv
    factor = 3 if "long" in case else 1
    lengths_kv = [factor * n for n in LENGTHS_KV]
    sq, skv = max(LENGTHS_Q), max(lengths_kv)
    given: dict[str, Any] = {}
    if "lengths" in case:
        given = {"attn_mask_type": "padding_causal_bottom_right", "window_size": (9, 0)}
        given |= {f"cu_seqlens_{name}": torch.tensor([0, *x]).cumsum(0).int() for name, x in (("q", LENGTHS_Q), ("kv", lengths_kv))}
    elif "causal" in case:
        given = {"attn_mask_type": "causal_bottom_right", "window_size": (9, 0)}
    if "packed" in case:
        given |= {"qkv_format": "thd", "max_seqlen_q": sq, "max_seqlen_kv": skv}
        for name, x in (("q", LENGTHS_Q), ("kv", lengths_kv)):
            given[f"cu_seqlens_{name}_padded"] = torch.tensor([3, *(n + 2 for n in x)]).cumsum(0).int()
        tokens: tuple[int, ...] = (int(given["cu_seqlens_q_padded"][-1]),)
        keys: tuple[int, ...] = (int(given["cu_seqlens_kv_padded"][-1]),)
    else:
        tokens, keys = (4, sq), (4, skv)
    if "softcap" in case:
        given |= {"softcap": 1.5, "softmax_scale": 0.7}
    if "sink" in case:
        given["softmax_offset"] = torch.linspace(-1, 2, heads, device=DEVICE).requires_grad_()
    block = 16 if "wide blocks" in case else 4 if "blocks" in case else 1
    if block > 1:
        given["kv_block_size"] = (1, block)
    q, k, v = (
        rand(*lead, n, dim, dtype=dtype, seed=n + dim)
        for lead, n, dim in zip((tokens, keys, keys), (heads, heads_kv, heads_kv), (dims[0], *dims), strict=True)
    )
    if "latent" in case:
        v = k.detach()[..., : dims[1]].requires_grad_()  # the same memory, with a gradient of its own
    listed = -(-skv // block)
    indices, counts = draw_lists(tokens, lists, listed, 3 if block == 16 else ENTRIES, repeats=True, device=DEVICE)
    given |= {"q": q, "k": k, "v": v, "kv_indices": indices}
    given |= {"kv_index_counts": counts} if "counts" in case else {}
    return {name: t.to(DEVICE) if isinstance(t, Tensor) and t.dtype is torch.int32 else t for name, t in given.items()}


SPILLS = 0
CASES = [
    "plain, one list, counts",
    "causal, counts, softcap, sink",
    "three heads, lengths, sink, counts",
    "many heads, packed lengths, counts",
    "packed lengths, one list, softcap, blocks",
    "long, causal, counts, softcap, wide blocks",
    "long, packed lengths, three heads, one list, sink, wide blocks",
]


def check(given: dict[str, Any], deterministic: bool) -> None:
    arguments = {name: value for name, value in given.items() if name not in "qkv"} | {"deterministic": deterministic}
    result = attention(given["q"], given["k"], given["v"], backend="triton", return_lse=True, **arguments)
    dout = torch.randn(result.out.shape, generator=torch.Generator().manual_seed(7)).to(result.out)
    dlse = torch.randn(result.lse.shape, generator=torch.Generator().manual_seed(8)).to(DEVICE).masked_fill(result.lse.isinf(), 0.0)
    leaves = [t for t in (given["q"], given["k"], given["v"], given.get("softmax_offset")) if t is not None]
    x, settings = bind_call(**given)
    spec = make_spec(x, settings, None)
    exact = reference.reference_attention(spec, x)
    eager = reference.reference_attention(spec, x, dtype=x.q.dtype)
    for name, got, i in (("out", result.out, 0), ("lse", result.lse, 1)):
        check_close(name, got, exact[i], eager[i])
    gradients = torch.autograd.grad((result.out, result.lse), leaves, (dout, dlse))
    wanted, budget = (reference.reference_gradients(spec, x, dout, dlse, dtype=dtype) for dtype in (torch.float64, x.q.dtype))
    names = ("dq", "dk", "dv", "dsoftmax_offset")
    for name, gradient in zip(names, gradients, strict=False):
        check_close(name, gradient, getattr(wanted, name), getattr(budget, name), factor=GRADIENT_FACTOR)


@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients(case: str) -> None:
    check(call(case), deterministic=False)


@pytest.mark.parametrize("case", [CASES[0], *(pytest.param(case, marks=pytest.mark.slow) for case in CASES[1:6]), CASES[6]])
def test_repeatable_gradients(case: str) -> None:
    check(call(case), deterministic=True)


@pytest.mark.parametrize("case", ["three heads, packed lengths, counts", "long, packed lengths, counts, sink, wide blocks"])
def test_chunks_of_queries(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inversion, "MOST_BYTES", 5 << 10)
    given = call(case)
    for deterministic in (False, True):
        check(given, deterministic)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    ["many heads, packed lengths, counts, softcap, sink", pytest.param("many heads, causal, latent", marks=pytest.mark.slow)],
)
def test_weights_may_have_a_kernel_of_their_own(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tile = tiles.backward_tile
    monkeypatch.setattr(tiles, "backward_tile", lambda problem: tile(problem)._replace(apart=True))
    clear_cache()
    check(call(case, torch.float16, (272, 256) if "latent" in case else (24, 40)), deterministic=True)
    clear_cache()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [pytest.param(torch.float16, marks=pytest.mark.slow), torch.bfloat16])
@pytest.mark.parametrize("deterministic", [pytest.param(False, marks=pytest.mark.slow), True])
def test_half_types_and_two_parts_of_a_head_dim(dtype: torch.dtype, deterministic: bool) -> None:
    check(call("causal, counts, sink", dtype, (48, 40)), deterministic)


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True], ids=["atomics", "repeatable"])
@pytest.mark.parametrize("dims", [(576, 512), (64, 64), (192, 128)])
def test_head_dims_of_models(dims: tuple[int, int], deterministic: bool) -> None:
    check(call("many heads, packed lengths, counts", torch.bfloat16, dims), deterministic)


@pytest.mark.parametrize("dims", [(320, 256), pytest.param((512, 512), marks=pytest.mark.slow)])
def test_v_may_be_the_first_columns_of_k(dims: tuple[int, int]) -> None:
    given = call("many heads, causal, counts, latent", torch.float16, dims)
    q, k = given["q"], given["k"]
    arguments = {name: value for name, value in given.items() if name not in "qkv"}
    apart = attention(q, k, given["v"].detach().clone(), backend="triton", **arguments)
    latent = attention(q, k, given["v"], backend="triton", **arguments)
    has_own_kernel = q.is_cuda and dims == (512, 512)  # on sm_90, which only columns of k take
    error = 1e-3 if has_own_kernel else 0.0
    torch.testing.assert_close(latent, apart, rtol=error, atol=error)
    x, settings = bind_call(**given)
    exact, _, _ = reference.reference_attention(spec_to_run(x, settings), x)
    torch.testing.assert_close(latent.double(), exact, rtol=2e-3, atol=2e-3)


@pytest.mark.slow
def test_repeated_runs_with_deterministic_are_bitwise_identical() -> None:
    given = call("causal, counts, sink")
    arguments = {name: value for name, value in given.items() if name not in "qkv"} | {"deterministic": True}
    runs = []
    for _ in range(2):
        out = attention(given["q"], given["k"], given["v"], backend="triton", **arguments)
        runs.append(torch.autograd.grad(out.square().sum(), (given["q"], given["k"], given["v"], given["softmax_offset"])))
    for gradients in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(gradients, runs[0], strict=True))


def test_keys_may_lie_in_pages() -> None:
    q, k, v = (rand(4, n, heads, 16).detach() for n, heads in ((4, 4), (13, 2), (13, 2)))
    indices, counts = draw_lists((4, 4), 2, 13, 10, device=DEVICE)
    options = {"attn_mask_type": "padding", "kv_indices": indices, "kv_index_counts": counts, "backend": "triton"}
    lengths = torch.tensor(LENGTHS_KV, dtype=torch.int32, device=DEVICE)
    wanted = attention(q, k, v, seqused_kv=lengths, **options)
    table = torch.randperm(20, generator=torch.Generator().manual_seed(0)).view(4, 5).int().to(DEVICE)
    pools = []
    for t in (k, v):
        pool = torch.full((20, 3, 2, 16), float("nan"), device=DEVICE)
        for b, n in enumerate(LENGTHS_KV):
            for j in range(n):
                pool[table[b, j // 3], j % 3] = t[b, j]
        pools.append(pool)
    paged = attention(q, *pools, seqused_kv=lengths, page_table=table, max_seqlen_kv=13, **options)
    torch.testing.assert_close(paged, wanted, rtol=0, atol=0)


def test_calls_without_a_kernel_are_refused_by_name() -> None:
    q, k, v = (rand(2, 16, 2, 16) for _ in range(3))
    indices, _ = draw_lists((2, 16), 0, 16, 4, device=DEVICE)
    for options, name in (
        ({"bias": torch.zeros(1, 1, 16, 16, device=DEVICE)}, "a bias"),
        ({"bias_type": "alibi"}, "ALiBi"),
        ({"mask_mod": lambda b, h, i, j: (i + j) % 3 > 0}, "score_mod or mask_mod"),
        ({"return_max_logit": True}, "max_logit"),
    ):
        with pytest.raises(flexattn.BackendError, match=f"kv_indices with {name} has no kernel"):
            attention(q, k, v, kv_indices=indices, backend="triton", **options)


def test_explain_names_the_family() -> None:
    q, k, v = (rand(2, 16, 2, 16) for _ in range(3))
    text = flexattn.explain(q, k, v, kv_indices=draw_lists((2, 16), 0, 16, 4, device=DEVICE)[0], backend="triton").details
    assert "sparse" in text
    assert "the kernels for lists of keys" in text


def test_the_canary_draws_lists() -> None:
    given = call("packed lengths, counts")
    x, settings = bind_call(**given)
    spec = spec_to_run(x, settings)
    drawn = sample_operands(spec, DEVICE, [5, 3], [7, 2], gap=1)
    assert drawn.kv_indices is not None
    assert drawn.kv_indices.shape == (10, 2, 24)


def launches_of(given: dict[str, Any], sm: int, deterministic: bool) -> list[Any]:
    with pretended_device(sm, 132), recorded_launches() as launches:
        arguments = {name: value for name, value in given.items() if name not in "qkv"}
        out = attention(given["q"], given["k"], given["v"], backend="triton", deterministic=deterministic, **arguments)
        out.sum().backward()
    return [launch for launch in launches if "sparse" in launch.kernel.__name__]


GATES = [
    (90, (576, 512), "many heads, causal, counts, latent"),
    (90, (512, 512), "hundred heads, causal, counts, sink, latent"),
    (90, (128, 128), "packed lengths, counts, softcap, sink, blocks"),
    (90, (128, 128), "packed lengths, counts, wide blocks"),
    (80, (64, 64), "packed lengths, one list, counts"),
    (100, (128, 128), "causal, counts"),
]


def compile_gates(
    gates: list[tuple[int, tuple[int, int], str]], dtype: torch.dtype = torch.bfloat16, ways: tuple[bool, ...] = (False, True)
) -> None:
    requests, names = [], []
    for sm, dims, case in gates:
        found = {}
        for deterministic in ways:
            for launch in launches_of(call(case, dtype, dims), sm, deterministic):
                target = [x for x in launch.arguments if isinstance(x, backward.Target)]
                key = (launch.kernel.__name__, deterministic, *(x.IS_K for x in target))
                found[key] = launch
        assert len({name for name, *_ in found}) >= 4
        requests += [request_for(launch, sm) for launch in found.values()]
        names += [(sm, dims, *key) for key in found]
    for name, report in zip(names, compile_sound(requests), strict=True):
        assert report.shared_bytes <= SHARED_MEMORY_LIMIT[name[0]], f"{name}: {report.shared_bytes}"
        if not any(text in name[2] for text in ("entries", "slots", "sums", "delta")):
            assert report.matrix_instructions, name
        assert report.spill_instructions <= SPILLS, f"{name}: {report.spill_instructions}"


@pytest.mark.exhaustive
def test_kernels_compile_for_sm_90() -> None:
    compile_gates([(90, (64, 64), "causal, one list")], ways=(False,))


@pytest.mark.sample(values=False)
@pytest.mark.slow
@pytest.mark.parametrize("sm", [90, 80])
def test_kernels_of_weights_alone_compile(sm: int) -> None:
    launches = launches_of(call("hundred heads, causal, counts, latent", torch.bfloat16, (576, 512)), sm, False)
    requests = [request_for(launch, sm) for launch in launches if launch.kernel.fn.__module__ == weights.__name__]
    assert len(requests) == 3
    for report in compile_sound(requests):
        assert report.shared_bytes <= SHARED_MEMORY_LIMIT[sm]
        assert not report.spill_instructions


@pytest.mark.slow
@pytest.mark.sample("sm", values=False)
@pytest.mark.parametrize(("sm", "gate"), [(gate[0], gate) for gate in GATES], ids=str)
@pytest.mark.parametrize("way", [False, True])
def test_kernels_compile_for_each_gpu(sm: int, gate: tuple[int, tuple[int, int], str], way: bool) -> None:
    compile_gates([gate], ways=(way,))


def test_no_queries_give_no_gradients() -> None:
    """A fuzz on a GPU found that the backward divided by the number of queries."""
    q, k, v = (torch.randn(1, tokens, 4, 16, device=DEVICE, requires_grad=True) for tokens in (0, 8, 8))
    indices = torch.zeros(1, 0, 3, dtype=torch.int32, device=DEVICE)
    attention(q, k, v, kv_indices=indices, backend="triton").sum().backward()
    assert q.grad is not None
    assert q.grad.shape == q.shape
    for t in (k, v):
        assert t.grad is not None
        assert not t.grad.any()


@pytest.mark.parametrize("block", [None, (1, 16)])
def test_lists_without_entries(block: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """An indexer that selects nothing gives lists of length 0."""
    monkeypatch.setattr(triton_backend, "policy_of", lambda spec: Policy(takes_what_never_ran=True))
    q, k, v = (rand(1, tokens, 4, 16, dtype=torch.bfloat16) for tokens in (5, 32, 32))
    sink = torch.linspace(-1, 2, 4, device=DEVICE).requires_grad_()
    indices = torch.zeros(1, 5, 4, 0, dtype=torch.int32, device=DEVICE)
    out, lse = attention(
        q, k, v, kv_indices=indices, kv_block_size=block, softmax_offset=sink, backend="triton", deterministic=True, return_lse=True
    )
    assert not out.any()
    torch.testing.assert_close(lse, sink[None, :, None].expand_as(lse))
    dq, dk, dv, dsink = torch.autograd.grad((out.sum(), lse.sum()), (q, k, v, sink))
    assert not any(t.any() for t in (dq, dk, dv))
    torch.testing.assert_close(dsink, torch.full_like(sink, 5.0))
