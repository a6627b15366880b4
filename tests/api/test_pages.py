"""Keys in pages and lengths in seqused: the bits of the same call over dense keys, for every feature, format and page size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flexattn import attention, ops
from flexattn.dispatch.cudnn_backend import rule_error
from flexattn.functional import bind_call
from tests.support.pages import LAYOUTS, make_pool

LENGTHS_Q, LENGTHS_KV = (5, 0, 1, 9), (70, 33, 0, 129)
HEADS, HEADS_KV, DIM = 4, 2, 16
PAGE_SIZES = (1, 3, 16, 48, 256)


def causal_with_distance(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score - 0.01 * (h + 1) * (i - j).abs() + 0.1 * b


CALLS: dict[str, dict[str, Any]] = {
    "plain": {"attn_mask_type": "padding"},
    "causal": {"attn_mask_type": "padding_causal_bottom_right"},
    "window": {"attn_mask_type": "padding_causal_bottom_right", "window_size": (20, 0)},
    "sink": {"attn_mask_type": "padding", "softmax_type": "learnable"},
    "softcap": {"attn_mask_type": "padding_causal_bottom_right", "softcap": 5.0},
    "alibi": {"attn_mask_type": "padding_causal_bottom_right", "bias_type": "alibi"},
    "bias": {"attn_mask_type": "padding", "bias_type": "post_scale_bias"},
    "score_mod": {"attn_mask_type": "padding", "score_mod": causal_with_distance},
    "mask_mod": {"attn_mask_type": "padding", "mask_mod": lambda b, h, i, j: (i + j) % 3 != b % 3},
    "max_logit": {"attn_mask_type": "padding", "return_max_logit": True},
    "dropout": {"attn_mask_type": "padding", "dropout_p": 0.25, "rng_state": torch.tensor([3, 8])},
}


def arguments_of(name: str) -> dict[str, Any]:
    call = dict(CALLS[name])
    if name == "sink":
        call["softmax_offset"] = torch.tensor([0.5, -1.0, 2.0, 0.0])
    if name == "bias":
        call["bias"] = torch.randn(1, HEADS, 1, max(LENGTHS_KV), generator=torch.Generator().manual_seed(4))
    return call


class Case:
    """Queries packed or dense, and dense keys."""

    def __init__(self, q_format: str, dtype: torch.dtype = torch.float32, lengths_q: tuple[int, ...] = LENGTHS_Q) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        self.k, self.v = normal(4, max(LENGTHS_KV), HEADS_KV, DIM), normal(4, max(LENGTHS_KV), HEADS_KV, DIM)
        self.used = torch.tensor(LENGTHS_KV, dtype=torch.int32)
        self.q_format = q_format
        if q_format == "thd":
            self.q = normal(sum(lengths_q), HEADS, DIM)
            starts = torch.tensor([0, *lengths_q]).cumsum(0).int()
            self.q_arguments: dict[str, Any] = {"cu_seqlens_q": starts, "max_seqlen_q": max(lengths_q)}
        else:
            self.q = normal(4, 3, HEADS, DIM) if q_format == "bshd" else normal(3, 4, HEADS, DIM)
            self.q_arguments = {}

    def dense(self, **call: Any) -> Any:
        """The same keys, one sequence's after the other in a row."""
        return attention(
            self.q,
            self.k,
            self.v,
            qkv_format=f"{self.q_format}_2bshd",
            seqused_kv=self.used,
            return_lse=True,
            **self.q_arguments,
            **call,
        )

    def paged(self, page_size: int, layout: str, **call: Any) -> Any:
        pool = make_pool(self.k, self.v, LENGTHS_KV, page_size, layout)
        return attention(
            self.q,
            pool.k,
            pool.v,
            qkv_format=f"{self.q_format}_2{pool.fmt}",
            seqused_kv=pool.seqused,
            page_table=pool.page_table,
            max_seqlen_kv=max(LENGTHS_KV),
            return_lse=True,
            **self.q_arguments,
            **call,
        )


def same(found: Any, wanted: Any) -> None:
    for got, want in zip(found, wanted, strict=True):
        assert not got.isnan().any()
        assert torch.equal(got, want)


@pytest.mark.sample("name", "backend", values=False)
@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("name", CALLS)
def test_every_feature(name: str, backend: str) -> None:
    case = Case("thd")
    call = arguments_of(name) | {"backend": backend}
    same(case.paged(16, "bshd", **call), case.dense(**call))


@pytest.mark.sample("page_size", "layout", "backend")
@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_page_sizes_and_layouts(page_size: int, layout: str, backend: str) -> None:
    case = Case("thd" if page_size != 16 else "bshd")
    call = {"attn_mask_type": "padding_causal_bottom_right", "backend": backend}
    same(case.paged(page_size, layout, **call), case.dense(**call))


@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("q_format", ["thd", "bshd", "sbhd"])
def test_lengths_in_seqused_are_those_of_cu_seqlens(q_format: str, backend: str) -> None:
    case = Case(q_format)
    call: dict[str, Any] = {"attn_mask_type": "padding_causal_bottom_right", "backend": backend}
    starts = torch.nn.functional.pad(case.used.cumsum(0), (1, 0)).int()
    q_arguments = case.q_arguments or {"cu_seqlens_q": torch.arange(5, dtype=torch.int32) * 3}
    wanted = attention(
        case.q, case.k, case.v, qkv_format=f"{q_format}_2bshd", cu_seqlens_kv=starts, return_lse=True, **q_arguments, **call
    )
    same(case.dense(**call), wanted)


@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_queries_that_use_a_part_of_their_slots(backend: str) -> None:
    case = Case("thd")
    used = torch.tensor([3, 0, 1, 4], dtype=torch.int32)
    slots = case.q_arguments["cu_seqlens_q"]
    call: dict[str, Any] = {"attn_mask_type": "padding_causal_bottom_right", "backend": backend}
    starts = torch.nn.functional.pad(used.cumsum(0), (1, 0)).int()
    kv = {"qkv_format": "thd_2bshd", "seqused_kv": case.used, "max_seqlen_q": 9, "return_lse": True}
    wanted = attention(case.q, case.k, case.v, cu_seqlens_q=starts, cu_seqlens_q_padded=slots, **kv, **call)
    same(attention(case.q, case.k, case.v, cu_seqlens_q=slots, seqused_q=used, **kv, **call), wanted)


def test_the_reference() -> None:
    """Both against plain arithmetic in fp64."""
    case = Case("thd", torch.float64)
    out, lse = case.paged(16, "interleaved", attn_mask_type="padding_causal_bottom_right", backend="eager")
    start = 0
    for b, (n_q, n_kv) in enumerate(zip(LENGTHS_Q, LENGTHS_KV, strict=True)):
        q = case.q[start : start + n_q].view(n_q, HEADS_KV, HEADS // HEADS_KV, DIM)
        scores = torch.einsum("ingd,jnd->ngij", q, case.k[b, :n_kv]) * DIM**-0.5
        hidden = torch.arange(n_kv) > torch.arange(n_q)[:, None] + n_kv - n_q
        scores = scores.masked_fill(hidden, float("-inf"))
        wanted = torch.einsum("ngij,jnd->ingd", scores.softmax(-1).nan_to_num(), case.v[b, :n_kv]).flatten(1, 2)
        torch.testing.assert_close(out[start : start + n_q], wanted, rtol=1e-12, atol=1e-12)
        wanted_lse = scores.logsumexp(-1).flatten(0, 1) if n_kv else torch.full((HEADS, n_q), float("-inf"), dtype=torch.float64)
        torch.testing.assert_close(lse[:, start : start + n_q], wanted_lse, rtol=1e-12, atol=1e-12)
        start += n_q


@pytest.mark.sample
@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_gradients_with_seqused(backend: str) -> None:
    case = Case("bshd")
    leaves = [t.clone().requires_grad_() for t in (case.q, case.k, case.v)]
    starts = torch.nn.functional.pad(case.used.cumsum(0), (1, 0)).int()
    call: dict[str, Any] = {"attn_mask_type": "padding_causal_bottom_right", "backend": backend}
    lengths = {"cu_seqlens_kv": starts, "cu_seqlens_q": torch.arange(5, dtype=torch.int32) * 3}
    found = torch.autograd.grad(attention(*leaves, seqused_kv=case.used, **call).sum(), leaves)
    wanted = torch.autograd.grad(attention(*leaves, **lengths, **call).sum(), leaves)
    same(found, wanted)


def test_shared_and_repeated_pages() -> None:
    """Two sequences of one prefix, and a page that a sequence reads twice."""
    generator = torch.Generator().manual_seed(1)
    k, v = torch.randn(2, 3, 8, HEADS_KV, DIM, generator=generator)
    q = torch.randn(3, 1, HEADS, DIM, generator=generator)
    table = torch.tensor([[2, 0, 7], [2, 1, 7], [1, 1, 1]], dtype=torch.int32)
    used = torch.tensor([13, 16, 24], dtype=torch.int32)
    call = {"attn_mask_type": "padding", "seqused_kv": used}
    for backend in ("eager", "triton"):
        found = attention(q, k, v, page_table=table, backend=backend, **call)
        wanted = attention(q, *(t[table.clamp(max=2).long()].flatten(1, 2) for t in (k, v)), backend=backend, **call)
        assert torch.equal(found, wanted)


def test_repeated_calls_with_other_lengths_and_tables() -> None:
    """Cached calls read the current content of the tensors."""
    case = Case("bshd")
    pool = make_pool(case.k, case.v, LENGTHS_KV, 16)
    other = make_pool(case.k, case.v, LENGTHS_KV, 16, seed=5)
    call: dict[str, Any] = {"attn_mask_type": "padding", "max_seqlen_kv": max(LENGTHS_KV), "backend": "triton"}
    lengths, table = pool.seqused.clone(), pool.page_table.clone()
    k, v = pool.k.clone(), pool.v.clone()
    for used in (LENGTHS_KV, (7, 33, 0, 100), (70, 1, 0, 129)):
        lengths.copy_(torch.tensor(used))
        table.copy_(other.page_table)
        k.copy_(other.k)
        v.copy_(other.v)
        found = attention(case.q, k, v, seqused_kv=lengths, page_table=table, **call)
        wanted = attention(case.q, case.k, case.v, seqused_kv=lengths.clone(), attn_mask_type="padding", backend="triton")
        assert torch.equal(found, wanted)


@pytest.mark.slow
def test_one_graph_under_compile() -> None:
    case = Case("bshd")
    pool = make_pool(case.k, case.v, LENGTHS_KV, 16)

    def call(q: Tensor, used: Tensor, table: Tensor) -> Tensor:
        return attention(q, pool.k, pool.v, attn_mask_type="padding", seqused_kv=used, page_table=table)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(case.q, pool.seqused, pool.page_table), call(case.q, pool.seqused, pool.page_table))


def wrong(**changes: Any) -> Any:
    case = Case("bshd")
    pool = make_pool(case.k, case.v, LENGTHS_KV, 16)
    call: dict[str, Any] = {"attn_mask_type": "padding", "seqused_kv": pool.seqused, "page_table": pool.page_table}
    q, k = changes.pop("q", case.q), changes.pop("k", pool.k)
    return attention(q, k, pool.v, **(call | changes))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no padding": ({"attn_mask_type": "causal"}, "seqused_kv is given with attn_mask_type 'causal'"),
    "pages without padding": (
        {"attn_mask_type": "causal", "seqused_kv": None},
        "page_table is given with attn_mask_type 'causal'",
    ),
    "no lengths": ({"seqused_kv": None}, "cu_seqlens_kv is None"),
    "no lengths of keys": ({"seqused_kv": None, "seqused_q": torch.ones(4, dtype=torch.int32)}, "cu_seqlens_kv is None"),
    "two kinds of lengths": ({"cu_seqlens_kv": torch.zeros(5, dtype=torch.int32)}, "cu_seqlens_kv and seqused_kv are given"),
    "one dim": ({"page_table": torch.zeros(4, dtype=torch.int32)}, "page_table is a torch.int32 tensor of shape"),
    "dtype": ({"page_table": torch.zeros(4, 9, dtype=torch.int64)}, "page_table has dtype torch.int64"),
    "batch": ({"page_table": torch.zeros(3, 9, dtype=torch.int32)}, "the rows of page_table is 3"),
    "other batch": ({"seqused_kv": torch.zeros(3, dtype=torch.int32)}, "the length of seqused_kv is 3"),
    "dtype of lengths": ({"seqused_kv": torch.zeros(4)}, "seqused_kv has dtype torch.float32"),
    "format": ({"qkv_format": "sbhd"}, "page_table is given with k and v in sbhd"),
    "gradient": ({"q": torch.ones(4, 3, HEADS, DIM, requires_grad=True)}, "a gradient is needed"),
    "negative": ({"max_seqlen_kv": -3}, "max_seqlen_kv is -3"),
    "no number": ({"max_seqlen_kv": "many"}, "max_seqlen_kv is 'many'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str) -> None:
    changes, text = WRONG[name]
    with pytest.raises((ValueError, TypeError), match=text):
        wrong(**changes)


def test_values_are_checked_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXATTN_CHECK", "1")
    case = Case("bshd")
    pool = make_pool(case.k, case.v, LENGTHS_KV, 16)
    wrong(seqused_kv=pool.seqused)
    with pytest.raises(ValueError, match=r"page_table\[0, 4\] is 99; accepted: 0 to"):
        table = pool.page_table.clone()
        table[0, 4] = 99
        wrong(page_table=table)
    with pytest.raises(ValueError, match=r"seqused_kv\[3\] is 500; accepted: 0 to 144"):
        wrong(seqused_kv=torch.tensor([70, 33, 0, 500], dtype=torch.int32))


def test_what_cudnn_and_fp8_say() -> None:
    case = Case("bshd")
    pool = make_pool(case.k, case.v, LENGTHS_KV, 16)
    lengths = {"attn_mask_type": "padding", "seqused_kv": pool.seqused, "page_table": pool.page_table}
    x, settings = bind_call(case.q.half(), pool.k.half(), pool.v.half(), **lengths)
    spec = ops.spec_to_run(x, settings)
    assert rule_error(spec, "forward") is None
    assert "page sizes that are a power of two, not 24" in str(rule_error(spec._replace(page_size=24), "forward"))
    with pytest.raises(ValueError, match="page_table is given with q, k and v in FP8"):
        attention(*(t.to(torch.float8_e4m3fn) for t in (case.q, pool.k, pool.v)), **lengths)


@pytest.mark.sample("dtype", "layout", "backend")
@pytest.mark.parametrize("backend", ["triton", "eager"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_pages_behind_a_window_may_hold_any_finite_numbers(dtype: torch.dtype, layout: str, backend: str) -> None:
    """A program over long sequences frees such pages, and the block of keys in which the window begins is still read."""
    case = Case("thd", torch.bfloat16 if dtype.itemsize == 1 else dtype)
    call = {"attn_mask_type": "padding_causal_bottom_right", "window_size": (20, 0), "backend": backend}
    if dtype.itemsize == 1:
        case.k, case.v = case.k.to(dtype).to(torch.bfloat16), case.v.to(dtype).to(torch.bfloat16)
    pool = make_pool(case.k, case.v, LENGTHS_KV, 3, layout)
    k, v = (torch.cat([t, torch.full_like(t[:1], sign * torch.finfo(dtype).max)]) for t, sign in ((pool.k, -1), (pool.v, 1)))
    k, v = k.to(dtype), v.to(dtype)
    table = pool.page_table.clone()
    for b, (queries, keys) in enumerate(zip(LENGTHS_Q, LENGTHS_KV, strict=True)):
        table[b, : max(0, keys - queries - 20) // 3] = len(k) - 1
    pages = {"qkv_format": f"thd_2{pool.fmt}", "seqused_kv": pool.seqused, "max_seqlen_kv": max(LENGTHS_KV), "return_lse": True}
    found, wanted = (attention(case.q, k, v, page_table=t, **pages, **case.q_arguments, **call) for t in (table, pool.page_table))
    assert not torch.equal(table, pool.page_table)
    same(found, wanted)
