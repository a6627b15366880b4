"""On a GPU: keys in pages, replays with other lengths and tables, batch invariance, FP8 caches, latents, wide heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flexattn import append_kv, attention, attention_with_prefix, merge_attention
from flexattn.testing import GRADIENT_FACTOR, check_close
from tests.support.pages import Pool, make_pool
from tests.support.trees import tree

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and torch.cuda.is_available() is False")

E4M3 = torch.float8_e4m3fn
HEADS, HEADS_KV = 8, 2
LENGTHS = (3000, 0, 1, 700, 64, 4096)
MASK = "padding_causal_bottom_right"


def by_distance(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score - 0.001 * (h + 1) * (i - j).abs() + 0.1 * b


CALLS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window_size": (200, 0)},
    "softcap": {"softcap": 5.0},
    "sink": {"softmax_type": "off-by-one"},
    "alibi": {"bias_type": "alibi"},
    "score_mod": {"score_mod": by_distance},
    "mask_mod": {"mask_mod": lambda b, h, i, j: (i + j) % 3 != b % 3},
}


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda", dtype=torch.float32).to(dtype)


def keys(dim: int, dim_v: int | None = None) -> tuple[Tensor, Tensor]:
    return normal(len(LENGTHS), max(LENGTHS), HEADS_KV, dim, seed=1), normal(
        len(LENGTHS), max(LENGTHS), HEADS_KV, dim_v or dim, seed=2
    )


def int32(numbers: Any) -> Tensor:
    return torch.as_tensor(numbers, dtype=torch.int32).cuda()


def over(pool: Pool) -> dict[str, Any]:
    return {"k": pool.k, "v": pool.v, "page_table": pool.page_table, "seqused_kv": pool.seqused, "max_seqlen_kv": max(LENGTHS)}


def check(found: Any, call: dict[str, Any]) -> None:
    """Compares found, (out, lse) of the call, with eager in fp64; the budget is the error of eager in its own dtype."""
    floats = {name: call[name].double() for name in "qkv"}
    exact, same = (attention(**how, return_lse=True, backend="eager") for how in (call | floats, call))
    for name, got, ref, eager in zip(("out", "lse"), found, exact, same, strict=True):
        check_close(name, got, ref, eager.to(ref.dtype))


@pytest.mark.parametrize("hopper", ["always", "never"])  # both calls then run on kernels of one family
@pytest.mark.parametrize("page_size", [1, 8, 16, 48, 64, 256])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_pages_have_the_bits_of_dense_keys(dim: int, page_size: int, hopper: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXATTN_HOPPER", "never" if page_size < 8 else hopper)  # smaller pages run on the portable kernels
    k, v = keys(dim)
    for counts in ((1,) * len(LENGTHS), (5, 1, 1, 200, 64, 7)):
        q = normal(sum(counts), HEADS, dim)
        call: dict[str, Any] = {
            "q": q,
            "attn_mask_type": MASK,
            "cu_seqlens_q": int32([0, *counts]).cumsum(0, dtype=torch.int32),
            "max_seqlen_q": max(counts),
            "qkv_format": "thd_2bshd",
            "return_lse": True,
            "backend": "triton",
        }
        dense = call | {"k": k, "v": v, "seqused_kv": int32(LENGTHS)}
        wanted = attention(**dense)
        for layout in ("bshd", "bhsd", "interleaved"):
            pool = make_pool(k, v, LENGTHS, page_size, layout)
            got = attention(**call | {"qkv_format": f"thd_2{pool.fmt}"} | over(pool))
            for a, b in zip(got, wanted, strict=True):
                assert torch.equal(a, b)
        del dense["return_lse"], dense["backend"]
        check(wanted, dense)


@pytest.mark.parametrize("name", [*CALLS, "tree"])
@pytest.mark.parametrize("hopper", ["auto", "never"])
def test_every_feature_over_pages(name: str, hopper: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXATTN_HOPPER", hopper)
    k, v = keys(128)
    q = normal(len(LENGTHS), 3, HEADS, 128)
    call = {"q": q, "attn_mask_type": MASK, "seqused_kv": int32(LENGTHS), **CALLS.get(name, {})}
    if name == "tree":
        call |= {"attn_mask_type": "padding", "mask_mod": tree((3,) * len(LENGTHS), LENGTHS, "cuda")}
    paged = call | over(make_pool(k, v, LENGTHS, 16))
    check(attention(**paged, return_lse=True, backend="triton"), call | {"k": k, "v": v})


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("page_size", [16, 64])
def test_a_graph_replays_with_other_lengths_and_tables(page_size: int, batch_invariant: bool) -> None:
    k, v = keys(128)
    q = normal(len(LENGTHS), 1, HEADS, 128)
    pool = make_pool(k, v, LENGTHS, page_size)
    call = over(pool) | {"q": q, "attn_mask_type": MASK, "backend": "triton", "batch_invariant": batch_invariant}
    for _ in range(2):
        attention(**call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(**call)
    generator = torch.Generator().manual_seed(5)
    for _ in range(50):
        order = torch.randperm(len(LENGTHS), generator=generator).cuda()
        shorter = (torch.rand(len(LENGTHS), generator=generator) * 1.3).clamp(max=1).cuda()
        pool.page_table.copy_(pool.page_table[order])
        pool.seqused.copy_((pool.seqused[order] * shorter).int().where(shorter < 1, pool.seqused[order]))
        out.fill_(torch.nan)
        graph.replay()
        again = attention(**call)
        assert not out.isnan().any()
        assert torch.equal(out, again)
    del call["batch_invariant"], call["backend"]
    exact = call | {name: call[name].double() for name in "qkv"}
    check_close("out", out, *(attention(**how, backend="eager") for how in (exact, call)))


@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("hopper", ["auto", "never"])
def test_the_bits_of_a_sequence_alone(hopper: str, latent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXATTN_HOPPER", hopper)
    dim = 576 if latent else 128
    k, v = keys(dim)
    q = normal(len(LENGTHS), 300, HEADS, dim)

    def attend(rows: list[int], chunk: slice, page_size: int, seed: int) -> Tensor:
        # the last query of a chunk is the last key of the call, as in chunked prefill
        ends = [max(LENGTHS[b] - (300 - (chunk.stop or 300)), 0) for b in rows]
        pool = make_pool(k[rows], v[rows], ends, page_size, seed=seed)
        out = attention(
            q[rows, chunk],
            pool.k,
            pool.k[..., :512] if latent else pool.v,
            attn_mask_type=MASK,
            seqused_kv=pool.seqused,
            page_table=pool.page_table,
            max_seqlen_kv=max(LENGTHS),
            batch_invariant=True,
            backend="triton",
        )
        assert isinstance(out, Tensor)
        return out

    whole = attend(list(range(len(LENGTHS))), slice(0, 300), 64, 0)
    for b in (0, 3, 5):
        assert torch.equal(attend([b], slice(0, 300), 16, 1)[0], whole[b])
        assert torch.equal(attend([b, 0, 4] * 20, slice(0, 300), 32, 2)[0], whole[b])
        parts = [attend([b], slice(n, n + 60), 64, 3)[0] for n in range(0, 300, 60)]
        assert torch.equal(torch.cat(parts), whole[b])
        assert torch.equal(attend([b], slice(299, 300), 64, 4)[0, 0], whole[b, 299])


def test_thirty_repeats_have_the_same_bits() -> None:
    k, v = keys(128)
    call = over(make_pool(k, v, LENGTHS, 16)) | {"q": normal(len(LENGTHS), 1, HEADS, 128), "attn_mask_type": MASK}
    first = attention(**call)
    for _ in range(30):
        assert torch.equal(attention(**call), first)


@pytest.mark.parametrize("kept_in", [E4M3, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_fp8_caches(dim: int, kept_in: torch.dtype) -> None:
    k, v = (t.to(kept_in) for t in keys(dim))
    scales = [torch.linspace(0.5, 1.5, HEADS_KV, device="cuda"), torch.linspace(2.0, 0.1, HEADS_KV, device="cuda")]
    q = normal(len(LENGTHS), 2, HEADS, dim)
    call: dict[str, Any] = {"attn_mask_type": MASK, "seqused_kv": int32(LENGTHS)}
    got = attention(q, k, v, descale_k=scales[0], descale_v=scales[1], return_lse=True, backend="triton", **call)
    meant = {n: t.double() * scale[:, None].double() for n, t, scale in (("k", k, scales[0]), ("v", v, scales[1]))}
    exact = attention(q.double(), **meant, return_lse=True, backend="eager", **call)
    same = attention(q, **{n: t.to(q.dtype) for n, t in meant.items()}, return_lse=True, backend="eager", **call)
    for name, a, ref, eager in zip(("out", "lse"), got, exact, same, strict=True):
        check_close(name, a, ref, eager.to(ref.dtype))


@pytest.mark.parametrize("page_size", [0, 1, 16, 64])
def test_append(page_size: int) -> None:
    """The same call on a CPU writes the same rows."""
    before, counts = (17, 0, 250), (3, 5, 1)
    total = sum(counts)
    k, v = normal(3, 256, 2, 64), normal(3, 256, 2, 64, seed=1)
    new_k, new_v = normal(total, 2, 64, seed=2), normal(total, 2, 64, seed=3)
    call: dict[str, Any] = {
        "qkv_format": "thd_2bshd",
        "cu_seqlens_q": int32([0, *counts]).cumsum(0, dtype=torch.int32),
        "seqused_kv": int32(before),
    }
    if page_size:
        pool = make_pool(k, v, (256, 256, 256), page_size)
        k, v = pool.k, pool.v
        call["page_table"] = pool.page_table
    ours = [k.clone(), v.clone()]
    theirs = [k.cpu(), v.cpu()]
    append_kv(*ours, new_k, new_v, **call)
    append_kv(*theirs, new_k.cpu(), new_v.cpu(), **{n: t.cpu() if isinstance(t, Tensor) else t for n, t in call.items()})
    for got, want, old in zip(ours, theirs, (k, v), strict=True):
        assert not torch.equal(got, old)
        assert torch.equal(got.cpu().nan_to_num(7.0), want.nan_to_num(7.0))


def test_a_shared_prefix() -> None:
    """Its keys are read once; the result equals one call's, up to the rounding of two results."""
    pool = make_pool(*keys(128), LENGTHS, 16)
    table = pool.page_table.clone()
    lengths = int32([3000, 700, 900, 1000])
    table = table[[0, 0, 0, 0]].contiguous()
    table[1:, 16:] = pool.page_table[5, : table.shape[1] - 16]
    q = normal(4, HEADS, 128)
    call: dict[str, Any] = {
        "qkv_format": "thd_2bshd",
        "attn_mask_type": MASK,
        "cu_seqlens_q": int32([0, 1, 2, 3, 4]),
        "max_seqlen_q": 1,
        "seqused_kv": lengths,
        "page_table": table,
        "max_seqlen_kv": 3000,
    }
    got = attention_with_prefix(q, pool.k, pool.v, prefix_length=256, **call)
    exact = attention(q.double(), pool.k.double(), pool.v.double(), backend="eager", **call)
    eager = attention(q, pool.k, pool.v, backend="eager", **call)
    check_close("out", got, exact, eager)


@pytest.mark.parametrize("heads", [1, 16, 64, 128])
@pytest.mark.parametrize("hopper", ["auto", "never"])
def test_absorbed_latents(heads: int, hopper: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLA: 576 columns of k, whose first 512 are v."""
    monkeypatch.setenv("FLEXATTN_HOPPER", hopper)
    cache = normal(len(LENGTHS), max(LENGTHS), 1, 576)
    for count in (1, 3):
        q = normal(len(LENGTHS), count, heads, 576, seed=2)
        call: dict[str, Any] = {"q": q, "attn_mask_type": MASK, "seqused_kv": int32(LENGTHS), "softmax_scale": 192**-0.5}
        pool = make_pool(cache, cache, LENGTHS, 64)
        paged = over(pool) | call | {"v": pool.k[..., :512]}
        check(attention(**paged, return_lse=True, backend="triton"), call | {"k": cache, "v": cache[..., :512]})


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dims", [(320, 320), (512, 512), (576, 512)], ids=str)
def test_wide_heads(dims: tuple[int, int], name: str) -> None:
    """Forward and backward."""
    qkv = [
        normal(2, 300, heads, dim, seed=n).requires_grad_()
        for n, (heads, dim) in enumerate(((4, dims[0]), (2, dims[0]), (2, dims[1])))
    ]
    dout = normal(2, 300, 4, dims[1], seed=4)
    call = {"attn_mask_type": "causal"} | CALLS[name]
    found = []
    for dtype, backend in ((torch.bfloat16, "triton"), (torch.float64, "eager"), (torch.bfloat16, "eager")):
        cast = [t.detach().to(dtype).requires_grad_() for t in qkv]
        out = attention(*cast, backend=backend, **call)
        assert isinstance(out, Tensor)
        found.append([out, *torch.autograd.grad(out, cast, dout.to(dtype))])
    for result, got, ref, eager in zip(("out", "dq", "dk", "dv"), *found, strict=True):
        check_close(result, got, ref, eager, factor=GRADIENT_FACTOR)


@pytest.mark.parametrize("fmt", ["bshd", "thd"])
def test_merge(fmt: str) -> None:
    shape, rows = ((2, 700, 8, 128), (2, 8, 700)) if fmt == "bshd" else ((1400, 8, 128), (8, 1400))
    sides = []
    for seed in (0, 2):
        sides += [normal(*shape, seed=seed), 10 * normal(*rows, dtype=torch.float32, seed=seed + 1)]
    got = merge_attention(*sides, qkv_format=fmt)
    exact = merge_attention(*(t.double() for t in sides), qkv_format=fmt)
    for a, b in zip(got, exact, strict=True):
        torch.testing.assert_close(a, b.to(a.dtype))
