"""append_kv into caches in FP8: each bit of data and scales, the attention() that reads them, and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from flexattn import PagedKVCache, append_kv, attention, ops
from flexattn.dispatch import triton_backend
from flexattn.functional import bind_call
from flexattn.kernels_triton.ahead_of_time.compile_report import request_for
from flexattn.kernels_triton.portable import append as kernels
from flexattn.kernels_triton.runtime.device import pretended_device
from flexattn.kernels_triton.runtime.launch import recorded_launches
from flexattn.testing import check_close
from tests.api.test_append import BEFORE, NEW, Case, int32, starts_of
from tests.support.compiled_kernels import compile_sound
from tests.support.pages import LAYOUTS

HEADS, HEADS_KV, DIM = 4, 2, 16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TOP = {E4M3: 448.0, E5M2: 57344.0}
KINDS = ("none", "one", "head", "sequence", "token")


@pytest.fixture(params=("triton", "torch"))
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yields the kernel, and the torch ops that replace it."""
    if request.param == "torch":
        monkeypatch.setattr(triton_backend, "device_error", lambda *_: "not here")
    return request.param


def descales_of(kind: str, cache: Tensor, batch: int) -> Tensor | None:
    generator = torch.Generator().manual_seed(len(kind))
    if kind == "none":
        return None
    if kind == "token":
        return torch.full(cache.shape[:-1], -7.0)
    shape = {"one": (), "head": (HEADS_KV,), "sequence": (batch, HEADS_KV)}[kind]
    return torch.rand(shape, generator=generator) * 0.02 + 0.001


def quantised(row: Tensor, descale: float | None, dtype: torch.dtype) -> tuple[Tensor, float]:
    """Returns a head's row of a token and its descale: the given one, or the one that maps the row to the dtype's range."""
    wide = row.float()
    if descale is None:
        amax = max((abs(x) for x in wide.tolist() if abs(x) < float("inf")), default=0.0)
        found = torch.tensor(amax, dtype=torch.float32) / TOP[dtype]
        descale = float(found) if float(found) >= 2.0**-120 else 1.0
    scaled = wide / torch.tensor(descale, dtype=torch.float32)
    return scaled.clamp(-TOP[dtype], TOP[dtype]).to(dtype), descale


def hostile(case: Case) -> None:
    """Returns new tokens with outliers, non-finite numbers, rows of zeros, and rows too small for a scale."""
    for x in (case.k, case.v):
        new = x[0, case.before[0]]
        new[0, 0] = 3e4
        new[1, 1:4] = torch.tensor([float("inf"), float("-inf"), float("nan")])
        x[2, 3, 0] = 0.0
        x[2, 4, 1] = 0.0 if x.dtype is torch.float16 else 1e-38


def expected(case: Case, which: str, cache: Tensor, descale: Tensor | None, places: Any) -> tuple[Tensor, Tensor | None]:
    """Returns the cache [n, s, h, d] and its descales after new rows, computed row by row."""
    rows, by_token = getattr(case, which), descale is not None and descale.dim() == 3
    cache, descale = cache.clone(), None if descale is None else descale.clone()
    for b, count in enumerate(case.new):
        for row in range(case.before[b], case.before[b] + count):
            for h in range(HEADS_KV):
                given: float | None = 1.0
                if descale is not None:
                    given = None if by_token else float(descale.expand(len(case.new), HEADS_KV)[b, h])
                data, own = quantised(rows[b, row, h], given, cache.dtype)
                cache.view(torch.uint8)[(*places(b, row), h)] = data.view(torch.uint8)
                if by_token:
                    descale[(*places(b, row), h)] = own
    return cache, descale


def bits(x: Tensor) -> Tensor:
    return x.reshape(-1).contiguous().view(torch.uint8)


def same(found: Tensor | None, wanted: Tensor | None) -> None:
    if wanted is None:
        assert found is None
        return
    assert found is not None
    assert torch.equal(bits(found), bits(wanted))


@pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_pages(kind: str, fp8: torch.dtype, way: str) -> None:
    dtype = {"none": torch.float32, "one": torch.bfloat16, "head": torch.float16}.get(kind, torch.float32)
    case = Case(dtype=dtype)
    hostile(case)
    layout = LAYOUTS[(KINDS.index(kind) + (fp8 is E5M2)) % len(LAYOUTS)]
    pool, _ = case.pool(16, layout)
    caches = [x.to(fp8) for x in (pool.k, pool.v)]  # of the pool's strides
    descales = [descales_of(kind, x, len(NEW)) for x in caches]

    def as_bshd(x: Tensor) -> Tensor:
        return x.transpose(1, 2) if pool.fmt == "bhsd" else x

    def places(b: int, row: int) -> tuple[int, int]:
        return int(pool.page_table[b, row // 16]), row % 16

    before = [d if d is None or kind != "token" else as_bshd(d) for d in descales]
    wanted = [expected(case, w, as_bshd(x), d, places) for w, x, d in zip("kv", caches, before, strict=True)]
    append_kv(
        *caches,
        *case.packed(),
        qkv_format=f"thd_2{pool.fmt}",
        seqused_kv=pool.seqused,
        page_table=pool.page_table,
        cu_seqlens_q=starts_of(NEW),
        descale_k=descales[0],
        descale_v=descales[1],
    )
    for cache, descale, (data, wanted_descale) in zip(caches, before, wanted, strict=True):
        same(as_bshd(cache), data)
        same(descale, wanted_descale)


@pytest.mark.parametrize("fmt", ["bshd", "bhsd", "sbhd"])
def test_dense_caches(fmt: str, way: str) -> None:
    """k has scales by token, in the cache's format and in wider strides; v by sequence. Rows that do not fit are skipped."""
    case = Case(BEFORE, (1, 2, 20, 9))
    to = {"bshd": (0, 1, 2, 3), "bhsd": (0, 2, 1, 3), "sbhd": (1, 0, 2, 3)}[fmt]
    caches = [x.to(E4M3) for x in case.caches()]
    descale_k = torch.full((*caches[0].shape[:-1], 2), -7.0)[..., 1]
    descale_v = descales_of("sequence", caches[1], len(NEW))
    fit = Case(BEFORE, (1, 2, 20, 9))
    fit.new = (1, 2, 20, 0)  # the last sequence claims more rows than the cache has

    def places(b: int, row: int) -> tuple[int, int]:
        return b, row

    wanted = [expected(fit, w, x, d, places) for w, x, d in zip("kv", caches, (descale_k, descale_v), strict=True)]
    given = [x.permute(to).clone(memory_format=torch.contiguous_format) for x in caches]
    scales = descale_k[..., None].permute(to)[..., 0]
    new = (x.permute(to).contiguous() for x in case.rows())
    used = int32(*BEFORE[:3], 10**6)
    counts = int32(1, 2, 20, 9)
    append_kv(*given, *new, qkv_format=fmt, seqused_kv=used, seqused_q=counts, descale_k=scales, descale_v=descale_v)
    for cache, (data, _) in zip(given, wanted, strict=True):
        same(cache.permute(to), data)
    same(descale_k, wanted[0][1])


def test_rows_in_fp8_are_copied(way: str) -> None:
    case = Case()
    caches = [x.to(E5M2) for x in case.caches()]
    k, v = case.packed()
    append_kv(
        *caches,
        k.to(E5M2),
        v,
        qkv_format="thd_2bshd",
        seqused_kv=int32(*BEFORE),
        cu_seqlens_q=starts_of(NEW),
        descale_v=torch.ones(()),
    )
    for cache, x in zip(caches, (case.k, case.v), strict=True):
        for b, length in enumerate(case.after):
            same(cache[b, :length], x[b, :length].to(E5M2))


@pytest.mark.sample("fp8")
@pytest.mark.parametrize("kind", KINDS[:4])
@pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=str)
def test_what_attention_reads(kind: str, fp8: torch.dtype) -> None:
    """Decoding from appended rows, starting with the first token, equals attention on the dequantised cache."""
    batch, tokens = 3, 21
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(batch, tokens, HEADS_KV, DIM, generator=generator) for _ in "kv")
    table = torch.randperm(9, generator=generator).view(3, 3).int()
    caches = [torch.full((9, 8, HEADS_KV, DIM), float("nan")).to(fp8) for _ in "kv"]
    descales = [descales_of(kind, x, batch) for x in caches]
    names = dict(zip(("descale_k", "descale_v"), descales, strict=True))
    for first, count in ((0, 13), (13, 7), (20, 1)):
        used = torch.full((batch,), first, dtype=torch.int32)
        append_kv(*caches, *(x[:, first : first + count] for x in (k, v)), seqused_kv=used, page_table=table, **names)
    q = torch.randn(batch, 1, HEADS, DIM, generator=generator)
    wide = []
    for x, d in zip((k, v), descales, strict=True):
        scale = torch.ones(()) if d is None else d.expand(batch, HEADS_KV)[:, None, :, None]
        rounded = (x / scale).clamp(-TOP[fp8], TOP[fp8]).to(fp8)
        wide.append(rounded.double() * scale.double())
    used = torch.full((batch,), tokens, dtype=torch.int32)
    call: dict[str, Any] = {"attn_mask_type": "padding_causal_bottom_right", "seqused_kv": used}
    exact = attention(q.double(), *wide, backend="eager", **call)
    eager = attention(q, *(x.float() for x in wide), backend="eager", **call)
    for backend in ("triton", "eager"):
        check_close("out", attention(q, *caches, page_table=table, backend=backend, **call, **names), exact, eager)


@pytest.mark.sample
@pytest.mark.parametrize("layout", ["bshd", "bhsd", "dense", "one head"])
@pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=str)
def test_what_attention_reads_with_descales_of_tokens(layout: str, fp8: torch.dtype) -> None:
    """append_kv wrote the descales. Descales and rows of missing tokens are NaN."""
    batch, tokens, heads = 3, 21, 1 if layout == "one head" else HEADS_KV
    generator = torch.Generator().manual_seed(0)
    k, v = (
        torch.randn(batch, tokens, heads, DIM, generator=generator) * 10.0 ** torch.randn(batch, tokens, 1, 1, generator=generator)
        for _ in "kv"
    )
    used = torch.tensor([21, 0, 13], dtype=torch.int32)
    call: dict[str, Any] = {"qkv_format": "bshd_2bhsd" if layout == "bhsd" else "bshd"}
    shape = (batch, 24, heads)
    if layout != "dense":
        call["page_table"] = torch.randperm(9, generator=generator).view(3, 3).int()
        shape = (9, heads, 8) if layout == "bhsd" else (9, 8, heads)
    caches = [torch.full((*shape, DIM), float("nan")).to(fp8) for _ in "kv"]
    names = {name: torch.full(shape, float("nan")) for name in ("descale_k", "descale_v")}
    append_kv(*caches, k, v, seqused_kv=torch.zeros_like(used), seqused_q=used, **call, **names)
    q = torch.randn(batch, 2, HEADS, DIM, generator=generator)
    call |= {"attn_mask_type": "padding_causal_bottom_right", "seqused_kv": used}
    wide = []
    for x in (k, v):
        scale = x.abs().amax(-1, keepdim=True) / TOP[fp8]
        wide.append((x / scale).to(fp8).double() * scale.double())
    dense = {"attn_mask_type": "padding_causal_bottom_right", "seqused_kv": used, "backend": "eager"}
    exact, eager = attention(q.double(), *wide, **dense), attention(q, *(x.float() for x in wide), **dense)
    for backend in ("triton", "eager"):
        check_close("out", attention(q, *caches, backend=backend, **call, **names), exact, eager)
    if layout == "bshd" and fp8 is E5M2:
        compiled = torch.compile(lambda *x: attention(*x, **call, **names), backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(q, *caches), attention(q, *caches, **call, **names))


@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("dims", [(DIM, DIM), (160, 96), (256, 128)], ids=str)
def test_descales_of_tokens_of_one_side_alone(side: str, dims: tuple[int, int]) -> None:
    """The other one's go by head; head dims in one part and in two, and v in k's storage."""
    generator = torch.Generator().manual_seed(0)
    heads = 1 if dims[0] == 256 else HEADS_KV
    k = torch.randn(2, 40, heads, dims[0], generator=generator).to(E4M3)
    v = k[..., : dims[1]] if dims[0] == 256 else torch.randn(2, 40, heads, dims[1], generator=generator).to(E4M3)
    q = torch.randn(2, 3, 4, dims[0], generator=generator, dtype=torch.bfloat16)
    scales = {"k": torch.rand(heads, generator=generator) + 0.5, "v": torch.rand(heads, generator=generator) + 0.5}
    scales[side] = 10.0 ** torch.randn(2, 40, heads, generator=generator)
    wide = [x.double() * scales[name].double()[..., None] for name, x in (("k", k), ("v", v))]
    call: dict[str, Any] = {"attn_mask_type": "causal_bottom_right"}
    exact = attention(q.double(), *wide, backend="eager", **call)
    eager = attention(q, *(x.bfloat16() for x in wide), backend="eager", **call)
    found = attention(q, k, v, descale_k=scales["k"], descale_v=scales["v"], backend="triton", **call)
    check_close("out", found, exact, eager)


def test_descales_are_checked_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = torch.randn(2, 3, HEADS, DIM), torch.randn(2, 9, HEADS_KV, DIM).to(E4M3)
    monkeypatch.setenv("FLEXATTN_CHECK", "1")
    attention(q, k, k, descale_k=torch.ones(HEADS_KV), descale_v=torch.ones(2, 9, HEADS_KV))
    with pytest.raises(ValueError, match=r"descale_v is -0.5 at \[0, 1, 0\]"):
        attention(q, k, k, descale_v=torch.tensor([1.0, -0.5]))
    with pytest.raises(
        ValueError, match=r"descale_k has shape \(2, 8, 2\); accepted: .* or \[2, 9, 2\], one for each token and head"
    ):
        attention(q, k, k, descale_k=torch.ones(2, 8, HEADS_KV))


def serving(kind: str) -> tuple[PagedKVCache, dict[int, Tensor]]:
    pools = [torch.zeros(2, 12, 4, HEADS_KV, DIM).to(E4M3) for _ in range(2)]
    shape = {"one": (), "head": (HEADS_KV,), "token": (12, 4, HEADS_KV)}[kind]
    descales = [
        tuple(torch.rand(shape, generator=torch.Generator().manual_seed(n)) * 0.02 + 0.005 for n in pair)
        for pair in ((0, 1), (2, 3))
    ]
    return PagedKVCache(pools, max_sequences=4, max_length=20, descales=descales), {}


@pytest.mark.parametrize("kind", ["one", "head", "token"])
def test_sequences_that_join_fork_and_leave(kind: str) -> None:
    """PagedKVCache in FP8 against the same numbers in dense tensors, in each layer."""
    cache, dense = serving(kind)
    generator = torch.Generator().manual_seed(5)

    def step(new: dict[int, int]) -> None:
        cache.step(new)
        made = torch.randn(2, 2, sum(new.values()), HEADS_KV, DIM, generator=generator)
        q = torch.randn(sum(new.values()), HEADS, DIM, generator=generator)
        at = 0
        for n in sorted(new):
            dense[n] = torch.cat((dense[n], made[:, :, at : at + new[n]]), 2)
            at += new[n]
        for layer in range(2):
            cache.append(layer, *made[layer])
            out = attention(q, *cache.pools[layer], backend="eager", **cache.arguments(layer))
            at = 0
            for n in sorted(new):
                wide = []
                for x, scale in zip(dense[n][layer], cache.descales[layer], strict=True):
                    if kind == "token":
                        scale = x.abs().amax(-1, keepdim=True) / 448.0
                    else:
                        scale = scale.expand(HEADS_KV)[:, None]
                    wide.append(((x / scale).clamp(-448.0, 448.0).to(E4M3).double() * scale.double())[None])
                rows = q[at : at + new[n]][None].double()
                wanted = attention(rows, *wide, attn_mask_type="causal_bottom_right", backend="eager")
                torch.testing.assert_close(out[at : at + new[n]].double(), wanted[0], rtol=1e-5, atol=1e-5)
                at += new[n]

    for _ in range(2):
        dense[cache.add()] = torch.zeros(2, 2, 0, HEADS_KV, DIM)
    step({0: 6, 1: 3})
    dense[cache.fork(0)] = dense[0].clone()
    step({0: 1, 1: 2, 2: 4})
    cache.free(0)
    dense[cache.add()] = torch.zeros(2, 2, 0, HEADS_KV, DIM)
    step({0: 5, 2: 1})
    with pytest.raises(ValueError, match=r"layer is None, and the descales of each layer differ; accepted: 0 to 1"):
        cache.arguments()


def operands() -> tuple[Any, ...]:
    case = Case()
    pool, _ = case.pool(16, "bshd")
    caches = [x.to(E4M3) for x in (pool.k, pool.v)]
    return *caches, *case.packed(), pool.page_table, pool.seqused, starts_of(NEW)


def test_operator() -> None:
    """The schema marks the written tensors, including scales by token; the fake and functionalisation agree with it."""
    k, v, *others = operands()
    operator = torch.ops.flexattn.append_kv.default
    own = torch.zeros(k.shape[:-1])
    call = (k, v, *others, None, "thd_2bshd", None, torch.ones(HEADS_KV), own, None)
    # torch's own test of the schema compares by allclose, which FP8 has not.
    torch.library.opcheck(operator, call, test_utils=("test_autograd_registration", "test_faketensor"))
    before = [(x.clone(), x._version) if isinstance(x, Tensor) else None for x in call]
    operator(*call)
    for argument, x, old in zip(operator._schema.arguments, call, before, strict=True):
        if old is not None:
            is_written = argument.alias_info is not None
            assert torch.equal(bits(x), bits(old[0])) is not is_written
            assert (x._version > old[1]) is is_written


@pytest.mark.slow
def test_one_graph_under_compile() -> None:
    k, v, *others = operands()
    table, used, starts = others[2:]

    def step(k: Tensor, v: Tensor, own: Tensor, descale: Tensor, *new: Tensor) -> Tensor:
        call: dict[str, Any] = {"page_table": table, "qkv_format": "thd_2bshd", "cu_seqlens_q": starts}
        append_kv(k, v, *new, seqused_kv=used, descale_k=own, descale_v=descale, **call)
        return own * 2

    runs = []
    for run in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        given = (k.clone(), v.clone(), torch.zeros(k.shape[:-1]), torch.full((HEADS_KV,), 0.01))
        runs.append((*given, run(*given, *others[:2])))
    for found, wanted in zip(*runs, strict=True):
        same(found, wanted)
    assert not torch.equal(runs[0][0].view(torch.uint8), k.view(torch.uint8))


WRONG_DESCALES: dict[str, tuple[Any, str]] = {
    "layers": ([], "descales has 0 layers and pools has 1"),
    "sequences": ([(torch.ones(4, 2), torch.ones(2))], r"descale_k of layer 0 has shape \(4, 2\); accepted: .* or \[3, 5, 2\]"),
    "dtype": ([(torch.ones(2).half(), torch.ones(2))], "descale_k of layer 0 has dtype torch.float16"),
}


@pytest.mark.parametrize("name", WRONG_DESCALES)
def test_wrong_descales_of_a_cache(name: str) -> None:
    descales, text = WRONG_DESCALES[name]
    pools = [torch.zeros(2, 3, 5, 2, 8)]
    with pytest.raises((ValueError, TypeError), match=text):
        PagedKVCache([x.to(E4M3) for x in pools], max_sequences=4, max_length=8, descales=descales)
    with pytest.raises(ValueError, match="descale_k of layer 0 is given with pools"):
        PagedKVCache(pools, max_sequences=4, max_length=8, descales=[(torch.ones(()), torch.ones(()))])


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "16 bits": (
        {"k_cache": torch.zeros(2, 4, 2, 8), "v_cache": torch.zeros(2, 4, 2, 8)},
        "descale_k is given with k_cache in torch.float32",
    ),
    "rows in FP8": ({"k_new": torch.zeros(2, 1, 2, 8).to(E4M3)}, "descale_k is given with k_new in torch.float8_e4m3fn"),
    "other FP8": ({"k_new": torch.zeros(2, 1, 2, 8).to(E5M2), "descale_k": None}, "k_new has dtype torch.float8_e5m2"),
    "dtype": ({"descale_v": torch.ones(2).double()}, "descale_v has dtype torch.float64"),
    "heads": ({"descale_v": torch.ones(3)}, r"descale_v has shape \(3,\); accepted: .* = \[2, 2\], .* \[2, 4, 2\]"),
    "tokens": ({"descale_k": torch.ones(2, 2, 4)}, r"descale_k has shape \(2, 2, 4\)"),
    "gradient": ({"descale_k": torch.ones((), requires_grad=True)}, "descale_k requires a gradient"),
    "one row for all": ({"descale_v": torch.ones(()).expand(2, 4, 2)}, "descale_v has .* several rows share memory"),
}


def wrong(**changes: Any) -> None:
    caches = {name: torch.zeros(2, 4, 2, 8).to(E4M3) for name in ("k_cache", "v_cache")}
    new = {name: torch.zeros(2, 1, 2, 8) for name in ("k_new", "v_new")}
    append_kv(**(caches | new | {"seqused_kv": int32(1, 3), "descale_k": torch.ones(()), "descale_v": None} | changes))


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str) -> None:
    changes, text = WRONG[name]
    wrong()
    with pytest.raises((ValueError, TypeError), match=text):
        wrong(**changes)


def test_values_are_checked_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = torch.tensor([1.0, 0.0])
    wrong(descale_k=bad)
    monkeypatch.setenv("FLEXATTN_CHECK", "1")
    wrong()
    with pytest.raises(ValueError, match="descale_k has a value that is not positive and finite"):
        wrong(descale_k=bad)


@pytest.mark.parametrize(
    ("capability", "fp8"),
    [
        (90, E4M3),
        pytest.param(89, E5M2, marks=pytest.mark.slow),
        *(pytest.param(*row, marks=pytest.mark.exhaustive) for row in ((90, E5M2), (89, E4M3), (100, E4M3), (100, E5M2))),
    ],
)
def test_compiled(capability: int, fp8: torch.dtype) -> None:
    pages = torch.zeros(8, 16, 2, 128).to(fp8)
    table, used, starts = (torch.zeros(n, dtype=torch.int32) for n in ((4, 4), (4,), (5,)))
    rows = torch.zeros(64, 2, 128, dtype=torch.bfloat16)
    new = kernels.NewTokens(rows, rows, starts, None, torch.ones(4, 2), torch.zeros(8, 16, 2))
    with pretended_device(capability, 132), recorded_launches() as launches:
        kernels.append(pages, pages, new, used, table)
    (report,) = compile_sound([request_for(launches[0], capability)])
    assert report.spill_store_bytes == 0


@pytest.mark.slow
@pytest.mark.sample(values=False)
@pytest.mark.parametrize("capability", [89, 90, 100])
@pytest.mark.parametrize("kind", ["token", "head"])
def test_the_forward_that_reads_them_compiles(kind: str, capability: int) -> None:
    pages = torch.zeros(64, 16, 8, 128).to(E4M3)
    lengths, table = torch.zeros(4, dtype=torch.int32), torch.zeros(4, 16, dtype=torch.int32)
    descale = torch.ones(64, 16, 8) if kind == "token" else torch.ones(8)
    call: dict[str, Any] = {"attn_mask_type": "padding_causal_bottom_right", "descale_k": descale, "descale_v": descale}
    q = torch.zeros(4, 1, 32, 128, dtype=torch.bfloat16)
    x, settings = bind_call(q, pages, pages.clone(), page_table=table, seqused_kv=lengths, **call)
    with pretended_device(capability, 132), recorded_launches() as launches:
        triton_backend.forward(ops.spec_to_run(x, settings), x)
    reports = compile_sound([request_for(launch, capability) for launch in launches])
    assert [report.spill_store_bytes for report in reports] == [0] * len(reports)
