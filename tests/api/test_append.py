"""append_kv: new rows in dense caches and in pages, the operator that writes them, and its refusals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flexattn import append_kv, attention
from flexattn.dispatch import triton_backend
from flexattn.kernels_triton.ahead_of_time.compile_report import request_for
from flexattn.kernels_triton.portable import append as kernels
from flexattn.kernels_triton.runtime.device import pretended_device
from flexattn.kernels_triton.runtime.launch import recorded_launches
from tests.support.compiled_kernels import compile_sound
from tests.support.pages import LAYOUTS, Pool, make_pool

HEADS, HEADS_KV, DIM, DIM_V = 4, 2, 16, 8
BEFORE, NEW = (70, 33, 0, 15), (1, 0, 20, 9)
WAYS = ("triton", "torch")


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yields the kernel, and the torch ops that replace it."""
    if request.param == "torch":
        monkeypatch.setattr(triton_backend, "device_error", lambda *_: "not here")
    return request.param


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def int32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def starts_of(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


class Case:
    """Sequences before and after new tokens: `k` and `v` have all of them, [b, s, h_kv, d]."""

    def __init__(self, before: Sequence[int] = BEFORE, new: Sequence[int] = NEW, dtype: torch.dtype = torch.float32) -> None:
        self.before, self.new = tuple(before), tuple(new)
        self.after = tuple(a + b for a, b in zip(before, new, strict=True))
        batch, longest = len(before), max(*self.after, 1)
        self.k, self.v = (
            normal(batch, longest, HEADS_KV, DIM, dtype=dtype),
            normal(batch, longest, HEADS_KV, DIM_V, seed=1, dtype=dtype),
        )

    def packed(self) -> tuple[Tensor, Tensor]:
        """New rows of k and of v, [total, h_kv, d]."""
        k, v = (torch.cat([x[b, self.before[b] : self.after[b]] for b in range(len(self.new))]) for x in (self.k, self.v))
        return k, v

    def rows(self, fill: float = float("nan")) -> tuple[Tensor, Tensor]:
        """Returns new rows, [b, longest, h_kv, d], with `fill` after them."""
        found = []
        for x in (self.k, self.v):
            dense = torch.full((len(self.new), max(*self.new, 1), *x.shape[2:]), fill, dtype=x.dtype)
            for b, count in enumerate(self.new):
                dense[b, :count] = x[b, self.before[b] : self.after[b]]
            found.append(dense)
        return found[0], found[1]

    def caches(self) -> tuple[Tensor, Tensor]:
        """Returns dense caches with the earlier rows, and NaN after them."""
        found = []
        for x in (self.k, self.v):
            cache = torch.full_like(x, float("nan"))
            for b, length in enumerate(self.before):
                cache[b, :length] = x[b, :length]
            found.append(cache)
        return found[0], found[1]

    def pool(self, page_size: int, layout: str) -> tuple[Pool, Pool]:
        """Returns pages with room for all tokens that hold the earlier ones, and pages that hold all of them."""
        full = make_pool(self.k, self.v, self.after, page_size, layout)
        k, v = (x.clone() for x in (full.k, full.v))
        for pages in (k, v):
            as_bshd = pages.transpose(1, 2) if full.fmt == "bhsd" else pages
            for b in range(len(self.new)):
                for row in range(self.before[b], self.after[b]):
                    as_bshd[int(full.page_table[b, row // page_size]), row % page_size] = float("nan")
        return full._replace(k=k, v=v, seqused=int32(*self.before)), full


def same(found: Tensor, wanted: Tensor) -> None:
    assert torch.equal(found.nan_to_num(nan=-777.0), wanted.nan_to_num(nan=-777.0))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", [1, 3, 16, 48])
def test_pages(page_size: int, layout: str, way: str) -> None:
    case = Case()
    pool, full = case.pool(page_size, layout)
    call: dict[str, Any] = {"page_table": pool.page_table, "seqused_kv": pool.seqused, "cu_seqlens_q": starts_of(NEW)}
    append_kv(pool.k, pool.v, *case.packed(), qkv_format=f"thd_2{pool.fmt}", **call)
    same(pool.k, full.k)
    same(pool.v, full.v)


@pytest.mark.parametrize("fmt", ["bshd", "bhsd", "sbhd"])
@pytest.mark.parametrize("lengths", ["cu_seqlens_q", "seqused_q"])
def test_dense_caches(fmt: str, lengths: str, way: str) -> None:
    case = Case()
    to = {"bshd": (0, 1, 2, 3), "bhsd": (0, 2, 1, 3), "sbhd": (1, 0, 2, 3)}[fmt]
    k, v = (x.permute(to).contiguous() for x in case.caches())
    new = (x.permute(to).contiguous() for x in case.rows())
    counts = {"cu_seqlens_q": starts_of(NEW)} if lengths == "cu_seqlens_q" else {"seqused_q": int32(*NEW)}
    append_kv(k, v, *new, qkv_format=fmt, seqused_kv=int32(*BEFORE), **counts)
    for cache, x in ((k, case.k), (v, case.v)):
        for b, length in enumerate(case.after):
            assert torch.equal(cache.permute(to)[b, :length], x[b, :length])
            assert cache.permute(to)[b, length:].isnan().all()


def test_all_rows_of_a_dense_tensor(way: str) -> None:
    """Decoding: a token for each sequence, and no lengths of queries."""
    case = Case(BEFORE, (1, 1, 1, 1))
    k, v = case.caches()
    append_kv(k, v, *case.rows(), seqused_kv=int32(*BEFORE))
    for b, length in enumerate(case.after):
        assert torch.equal(k[b, :length], case.k[b, :length])
        assert torch.equal(v[b, :length], case.v[b, :length])


def test_slots_of_which_a_part_is_used(way: str) -> None:
    case = Case()
    pool, full = case.pool(16, "bshd")
    k, v = (x.flatten(0, 1) for x in case.rows(fill=9.0))
    slots = torch.arange(5, dtype=torch.int32) * max(NEW)
    append_kv(
        pool.k,
        pool.v,
        k,
        v,
        qkv_format="thd_2bshd",
        seqused_kv=pool.seqused,
        page_table=pool.page_table,
        cu_seqlens_q=slots,
        seqused_q=int32(*NEW),
    )
    same(pool.k, full.k)
    same(pool.v, full.v)


@pytest.mark.parametrize("of", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("to", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_rows_are_rounded_to_the_caches_dtype(of: torch.dtype, to: torch.dtype, way: str) -> None:
    new = (1e5 * normal(2, 3, HEADS_KV, 24)).to(of), normal(2, 3, HEADS_KV, 24, seed=1, dtype=of)
    k, v = (torch.zeros(2, 8, HEADS_KV, 24, dtype=to) for _ in "kv")
    append_kv(k, v, *new, seqused_kv=int32(2, 5))
    for cache, x in ((k, new[0]), (v, new[1])):
        assert torch.equal(cache[0, 2:5], x[0].to(to))
        assert torch.equal(cache[1, 5:8], x[1].to(to))


def test_rows_that_do_not_fit_are_left_out(way: str) -> None:
    """Lengths below 0, beyond the table, or that wrap, and ids out of range; a page that fits in the same call is written."""
    k, v = torch.zeros(6, 4, HEADS_KV, DIM), torch.zeros(6, 4, HEADS_KV, DIM_V)
    guarded = [torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 0, 1, 1), value=7.0) for x in (k, v)]
    k, v = (x[1:-1] for x in guarded)
    table = torch.tensor([[0, 1], [2, 2147480000], [3, -5], [4, 4], [5, 5], [2, 2]], dtype=torch.int32)
    used = int32(7, 3, 3, -1, 2147483647, 4)
    new = normal(6, 2, HEADS_KV, DIM), normal(6, 2, HEADS_KV, DIM_V, seed=1)
    append_kv(k, v, *new, seqused_kv=used, page_table=table)
    wanted = [torch.zeros(6, 4, HEADS_KV, x.shape[-1]) for x in new]
    for cache, x in zip(wanted, new, strict=True):
        cache[1, 3] = x[0, 0]  # the second row is past the table
        cache[2, 3], cache[3, 3] = x[1, 0], x[2, 0]  # and here its page is none
        cache[2, :2] = x[5]
    assert torch.equal(k, wanted[0])
    assert torch.equal(v, wanted[1])
    assert all((x[[0, -1]] == 7.0).all() for x in guarded)


def test_nothing_fits_and_nothing_is_new(way: str) -> None:
    k, v = normal(2, 4, HEADS_KV, DIM), normal(2, 4, HEADS_KV, DIM_V)
    copies = k.clone(), v.clone()
    append_kv(k, v, normal(2, 1, HEADS_KV, DIM), normal(2, 1, HEADS_KV, DIM_V), seqused_kv=int32(4, -1))
    append_kv(k, v, k[:, :0], v[:, :0], seqused_kv=int32(1, 1))
    none = k[:0].flatten(0, 1), v[:0].flatten(0, 1)
    append_kv(k, v, *none, qkv_format="thd_2bshd", seqused_kv=int32(1, 1), cu_seqlens_q=int32(0, 0, 0))
    assert torch.equal(k, copies[0])
    assert torch.equal(v, copies[1])


@pytest.mark.parametrize("cu", [(0, 9, 3), (-4, 2, 100), (5, 5, 5), (2147480000, 1, 2)], ids=str)
def test_starts_that_have_no_meaning_write_within_the_caches(cu: tuple[int, int, int], way: str) -> None:
    guarded = [torch.full((4, 8, HEADS_KV, dim), 7.0) for dim in (DIM, DIM_V)]
    new = normal(6, HEADS_KV, DIM), normal(6, HEADS_KV, DIM_V)
    append_kv(guarded[0][1:3], guarded[1][1:3], *new, qkv_format="thd_2bshd", seqused_kv=int32(1, 3), cu_seqlens_q=int32(*cu))
    assert all((x[[0, -1]] == 7.0).all() for x in guarded)


@settings(max_examples=25, deadline=None)
@given(
    page_size=st.integers(1, 40),
    lengths=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 20)), min_size=1, max_size=5),
    layout=st.sampled_from(LAYOUTS),
    by_kernel=st.booleans(),
)
def test_append_then_attend_is_dense(page_size: int, lengths: list[tuple[int, int]], layout: str, by_kernel: bool) -> None:
    """The bits of the same keys in dense tensors."""
    case = Case(*zip(*lengths, strict=True))  # type: ignore[arg-type]
    case.v = case.k[..., :DIM_V].contiguous()
    pool, _ = case.pool(page_size, layout)
    with pytest.MonkeyPatch.context() as patch:
        if not by_kernel:
            patch.setattr(triton_backend, "device_error", lambda *_: "not here")
        starts = starts_of(case.new)
        page_arguments: dict[str, Any] = {"qkv_format": f"thd_2{pool.fmt}", "page_table": pool.page_table, "cu_seqlens_q": starts}
        append_kv(pool.k, pool.v, *case.packed(), seqused_kv=pool.seqused, **page_arguments)
    q = normal(sum(case.new), HEADS, DIM, seed=2)
    call: dict[str, Any] = {"attn_mask_type": "padding_causal_bottom_right", "max_seqlen_q": max(case.new), "backend": "eager"}
    call |= {"seqused_kv": int32(*case.after)}
    found = attention(q, pool.k, pool.v, max_seqlen_kv=max(*case.after, 1), **page_arguments, **call)
    wanted = attention(q, case.k, case.v, qkv_format="thd_2bshd", cu_seqlens_q=starts, **call)
    assert not found.isnan().any()
    assert torch.equal(found, wanted)


def test_operator() -> None:
    """The schema marks the written tensors, and the fake and functionalisation agree with it."""
    case = Case()
    pool, _ = case.pool(16, "bshd")
    operator = torch.ops.flexattn.append_kv.default
    call = (pool.k, pool.v, *case.packed(), pool.page_table, pool.seqused, starts_of(NEW), None, "thd_2bshd")
    torch.library.opcheck(operator, call)
    before = pool.k._version, pool.v._version
    operator(*call)
    assert (pool.k._version, pool.v._version) > before


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_graph_under_compile(layout: str) -> None:
    case = Case()
    pool, full = case.pool(16, layout)

    def step(k: Tensor, v: Tensor, used: Tensor, q: Tensor, *new: Tensor) -> Tensor:
        call: dict[str, Any] = {"page_table": pool.page_table, "qkv_format": f"thd_2{pool.fmt}", "cu_seqlens_q": starts_of(NEW)}
        append_kv(k, v, *new, seqused_kv=used, **call)
        call |= {"attn_mask_type": "padding_causal_bottom_right", "max_seqlen_q": max(NEW)}
        return attention(q, k, v, seqused_kv=used + call["cu_seqlens_q"].diff(), **call)  # type: ignore[no-any-return]

    q = normal(sum(NEW), HEADS, DIM)
    compiled_caches = [x.clone() for x in (pool.k, pool.v)]
    new = case.packed()
    found = torch.compile(step, backend="aot_eager", fullgraph=True)(*compiled_caches, pool.seqused, q, *new)
    assert torch.equal(found, step(pool.k, pool.v, pool.seqused, q, *new))
    same(compiled_caches[0], full.k)
    same(compiled_caches[1], full.v)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "thd caches": ({"qkv_format": "thd"}, "qkv_format has 'thd' for the caches"),
    "sbhd pages": ({"qkv_format": "thd_2sbhd"}, "page_table is given with k_cache and v_cache in sbhd"),
    "format": ({"qkv_format": "hsd"}, "qkv_format is 'hsd'"),
    "fp8 beside 32 bits": ({"k_cache": torch.zeros(9, 4, 2, 8).to(torch.float8_e4m3fn)}, "v_cache has dtype torch.float32"),
    "dtypes apart": ({"v_cache": torch.zeros(9, 4, 2, 8).half()}, "v_cache has dtype torch.float16"),
    "double": ({"k_new": torch.zeros(5, 2, 8).double()}, "k_new has dtype torch.float64"),
    "no tensor": ({"v_new": None}, "v_new is None"),
    "dims": ({"k_new": torch.zeros(5, 8)}, "k_new is a torch.float32 tensor of shape"),
    "last dim": ({"k_new": torch.zeros(5, 2, 16)[..., ::2]}, "k_new is a torch.float32 tensor of shape .* the last contiguous"),
    "heads": ({"k_new": torch.zeros(5, 1, 8), "v_new": torch.zeros(5, 1, 8)}, "accepted: the cache's 2 heads of 8 elements"),
    "head dim": ({"v_new": torch.zeros(5, 2, 4)}, "v_new has shape .* accepted: the cache's 2 heads of 8 elements"),
    "tokens": ({"v_new": torch.zeros(4, 2, 8)}, "accepted: equal shapes, except for the last dim"),
    "no starts": ({"cu_seqlens_q": None}, "cu_seqlens_q is None with new rows in thd"),
    "starts": ({"cu_seqlens_q": int32(0, 2, 4, 5)}, "the length of cu_seqlens_q less one is 3"),
    "two lengths": (
        {"qkv_format": "bshd", "k_new": torch.zeros(2, 3, 2, 8), "v_new": torch.zeros(2, 3, 2, 8), "seqused_q": int32(1, 1)},
        "cu_seqlens_q and seqused_q are given",
    ),
    "long lengths": ({"seqused_kv": torch.zeros(2, dtype=torch.int64)}, "seqused_kv has dtype torch.int64"),
    "no lengths": ({"seqused_kv": None}, "seqused_kv is None"),
    "table": ({"page_table": int32(1, 2)}, "page_table is a torch.int32 tensor of shape"),
    "no columns": ({"page_table": torch.zeros(2, 0, dtype=torch.int32)}, "accepted: at least one page"),
    "rows": ({"page_table": torch.zeros(3, 4, dtype=torch.int32)}, "the rows of page_table is 3"),
    "gradient": ({"k_new": torch.zeros(5, 2, 8, requires_grad=True)}, "k_new requires a gradient"),
    "one page for all": (
        {"k_cache": torch.zeros(1, 4, 2, 8).expand(9, -1, -1, -1)},
        "k_cache has .* several rows share memory",
    ),
    "one head for all": (
        {"v_cache": torch.zeros(9, 4, 1, 8).expand(-1, -1, 2, -1)},
        "v_cache has .* several rows share memory",
    ),
}


def wrong(**changes: Any) -> None:
    call: dict[str, Any] = {
        "k_cache": torch.zeros(9, 4, 2, 8),
        "v_cache": torch.zeros(9, 4, 2, 8),
        "k_new": torch.zeros(5, 2, 8),
        "v_new": torch.zeros(5, 2, 8),
        "qkv_format": "thd_2bshd",
        "seqused_kv": int32(3, 8),
        "page_table": torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7]], dtype=torch.int32),
        "cu_seqlens_q": int32(0, 2, 5),
    }
    append_kv(**(call | changes))


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str) -> None:
    changes, text = WRONG[name]
    wrong()
    with pytest.raises((ValueError, TypeError), match=text):
        wrong(**changes)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"seqused_kv": int32(3, 14)}, r"seqused_kv\[1\] is 14 with 3 new rows; accepted: 0 to 13"),
        ({"seqused_kv": int32(-1, 8)}, r"seqused_kv\[0\] is -1 with 2 new rows"),
        ({"seqused_q": int32(3, 0)}, r"seqused_q\[0\] is 3; accepted: 0 to 2"),
        ({"cu_seqlens_q": int32(0, 2, 1)}, r"cu_seqlens_q\[2\] is 1 after"),
        (
            {"page_table": torch.tensor([[0, 9, 2, 3], [4, 5, 6, 7]], dtype=torch.int32)},
            r"page_table\[0, 1\] is 9; accepted: 0 to 8",
        ),
    ],
)
def test_values_are_checked_where_asked(changes: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong(**changes)
    monkeypatch.setenv("FLEXATTN_CHECK", "1")
    wrong()
    wrong(page_table=torch.tensor([[0, 1, -1, -1], [-1, -1, 6, -1]], dtype=torch.int32))  # entries that nothing goes to
    with pytest.raises(ValueError, match=text):
        wrong(**changes)


@pytest.mark.slow
@pytest.mark.sample(values=False)
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("packed", [True, False], ids=["thd", "bshd"])
def test_compiled(capability: int, packed: bool) -> None:
    pages = torch.zeros(8, 16, 2, 128, dtype=torch.bfloat16)
    table, used = torch.zeros(4, 4, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    rows = torch.zeros(*((64,) if packed else (4, 16)), 2, 128, dtype=torch.float32)
    new = kernels.NewTokens(rows, rows, torch.zeros(5, dtype=torch.int32) if packed else None, None)
    with pretended_device(capability, 132), recorded_launches() as launches:
        caches = (pages, pages) if packed else (pages[:4], pages[:4])
        kernels.append(*caches, new, used, table if packed else None)
    (report,) = compile_sound([request_for(launches[0], capability)])
    assert report.spill_store_bytes == 0
