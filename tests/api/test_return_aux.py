"""`attention(..., return_aux=...)`: its results by format, what it refuses, and torch.compile."""

from __future__ import annotations

import doctest
from typing import Any

import pytest
import torch
from torch import Tensor

import flexattn
from flexattn import AuxRequest, attention, statistics
from flexattn.dispatch import statistics as statistics_of_weights
from flexattn.fp8 import Recipe

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EVERYTHING = AuxRequest(True, True, True, True, True, torch.tensor([[8, 2], [0, 5]], device=DEVICE))
LENGTHS_Q, LENGTHS_KV = [9, 6], [9, 11]


def qkv(**options: Any) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    sizes = ((2, 9, 4, 16), (2, 11, 2, 16), (2, 11, 2, 16))
    return tuple(torch.randn(size, generator=generator, **options).to(DEVICE) for size in sizes)  # type: ignore[return-value]


def dense(fmt: str, **options: Any) -> tuple[Any, flexattn.AuxOutput]:
    """Returns the results, of two sequences with unequal lengths, with all dims in the order of bshd and thd."""
    q, k, v = qkv()
    lengths = [torch.tensor([0, a, a + b], dtype=torch.int32, device=DEVICE) for a, b in (LENGTHS_Q, LENGTHS_KV)]
    options |= {"cu_seqlens_q": lengths[0], "cu_seqlens_kv": lengths[1], "attn_mask_type": "padding_causal_bottom_right"}
    if fmt == "thd":
        q, k, v = (
            torch.cat([x[b, :n] for b, n in enumerate(sizes)]) for x, sizes in ((q, LENGTHS_Q), (k, LENGTHS_KV), (v, LENGTHS_KV))
        )
        options |= {"max_seqlen_q": 9, "max_seqlen_kv": 11}
    order = {"sbhd": (1, 0, 2, 3), "bhsd": (0, 2, 1, 3)}.get(fmt)
    q, k, v = (x if order is None else x.permute(order).contiguous() for x in (q, k, v))
    return attention(q, k, v, qkv_format=fmt, return_aux=EVERYTHING, **options)


@pytest.mark.sample("backend")
@pytest.mark.parametrize("backend", ["triton", "eager"])
@pytest.mark.parametrize("fmt", ["sbhd", "bhsd", "thd"])
def test_formats_have_the_same_statistics(fmt: str, backend: str) -> None:
    _, want = dense("bshd", backend=backend)
    _, got = dense(fmt, backend=backend)
    for name, t in got._asdict().items():
        whole = getattr(want, name)
        if fmt == "thd" and name not in ("row_weights", "max_logit"):
            sizes = LENGTHS_KV if name == "column_sums" else LENGTHS_Q
            whole = torch.cat([whole[b, :, :n] for b, n in enumerate(sizes)], -1)
        torch.testing.assert_close(t, whole)
    assert got.row_weights is not None
    assert got.row_weights.shape == (2, 4, 2, 11)


def test_dropout_changes_no_statistic() -> None:
    (_, plain), (_, dropped) = (dense("bshd", dropout_p=p) for p in (0.0, 0.5))
    for a, b in zip(plain, dropped, strict=True):
        torch.testing.assert_close(a, b)


def test_only_the_requested_statistics_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv()
    for name in ("max_scores", "entropy", "column_sums"):
        aux = attention(q, k, v, return_aux=AuxRequest(**{name: True})).aux
        assert [field for field, t in aux._asdict().items() if t is not None] == [name]
    monkeypatch.setattr(statistics_of_weights, "statistics", None)  # the forward makes these two
    aux = attention(q, k, v, return_aux=AuxRequest(lse=True, max_logit=True)).aux
    want = attention(q, k, v, return_lse=True, return_max_logit=True)
    assert torch.equal(aux.lse, want.lse)
    assert torch.equal(aux.max_logit, want.max_logit)


def test_a_gradient_of_lse_alone() -> None:
    q, k, v = qkv()
    out, aux = attention(q.requires_grad_(), k, v, return_aux=EVERYTHING)
    (out.sum() + aux.lse.sum() + aux.entropy.detach().sum()).backward()
    assert q.grad is not None
    for name in ("max_scores", "entropy", "column_sums", "row_weights"):
        with pytest.raises(RuntimeError, match=rf"aux\.{name} of attention\(\) has no gradient"):
            getattr(aux, name).sum().backward()
    with torch.no_grad():
        assert not attention(q, k, v, return_aux=AuxRequest(entropy=True)).aux.entropy.requires_grad


def test_transforms_are_refused() -> None:
    q, k, v = qkv()
    with pytest.raises(RuntimeError, match="return_aux under a transform"):
        torch.func.grad(lambda q: attention(q, k, v, return_aux=AuxRequest(entropy=True)).out.sum())(q)
    with pytest.raises(RuntimeError, match=r"attention\(\) has no rule for torch\.vmap"):
        torch.vmap(lambda rows: attention(q, k, v, return_aux=AuxRequest(rows=rows)).aux.row_weights)(EVERYTHING.rows)


@pytest.mark.sample
@pytest.mark.slow
@pytest.mark.parametrize("requires_grad", [True, False])
def test_compiled_in_one_graph(requires_grad: bool) -> None:
    q, k, v = qkv()
    q.requires_grad_(requires_grad)

    def run(q: Tensor, rows: Tensor) -> Any:
        return attention(q, k, v, causal=False, return_aux=EVERYTHING._replace(rows=rows))

    out, aux = torch.compile(run, fullgraph=True, backend="aot_eager")(q, EVERYTHING.rows)
    want, want_aux = run(q, EVERYTHING.rows)
    torch.testing.assert_close(out, want)
    for name, t in aux._asdict().items():
        torch.testing.assert_close(t, getattr(want_aux, name))
        assert t.requires_grad == (requires_grad and name == "lse")
    if requires_grad:
        (out.sum() + aux.lse.sum()).backward()
        assert q.grad is not None


@pytest.mark.slow
def test_nested_tensors() -> None:
    q, k, v = ([x[b, :n] for b, n in enumerate(sizes)] for x, sizes in zip(qkv(), (LENGTHS_Q, LENGTHS_KV, LENGTHS_KV), strict=True))
    values = [torch.nested.nested_tensor(x, layout=torch.jagged) for x in (q, k)]
    offsets = values[1].offsets()
    v_nested = torch.nested.nested_tensor_from_jagged(torch.cat(v), offsets)
    want = dense("thd").aux  # type: ignore[attr-defined]
    got = attention(*values, v_nested, attn_mask_type="causal_bottom_right", return_aux=EVERYTHING).aux
    torch.testing.assert_close(got.column_sums, want.column_sums)
    torch.testing.assert_close(got.entropy, want.entropy)


@pytest.mark.parametrize("longest", [11, 40])
def test_chosen_rows_are_as_wide_as_a_bias(longest: int) -> None:
    """The bias may be wider than the number of all tokens, at which the kernels' own longest length ends."""
    q, k, v = (x[:1, :n].flatten(0, 1) for x, n in zip(qkv(), (9, 11, 11), strict=True))
    lengths = {"cu_seqlens_q": [0, 9], "cu_seqlens_kv": [0, 11]}
    packed = {name: torch.tensor(x, dtype=torch.int32, device=DEVICE) for name, x in lengths.items()}
    rows = torch.tensor([2, 0, 8, 9], device=DEVICE)
    bias = torch.randn(1, 1, 1, longest, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    call = {**packed, "bias": bias, "qkv_format": "thd", "attn_mask_type": "padding", "max_seqlen_q": 9, "max_seqlen_kv": longest}
    got, want = (
        attention(q, k, v, **call, backend=backend, return_aux=AuxRequest(rows=rows)).aux.row_weights
        for backend in ("triton", "eager")
    )
    assert got.shape == want.shape == (1, 4, 4, longest)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_pages(backend: str) -> None:
    """The kernels read a copy of the pages. Keys behind a sequence's length are in it, and count nowhere."""
    q, k, v = qkv()
    k[1, 7:], v[1, 7:] = float("nan"), float("nan")
    pages = {
        "page_table": torch.tensor([[1], [0]], dtype=torch.int32, device=DEVICE),
        "attn_mask_type": "padding",
        "max_seqlen_kv": 11,
        "backend": backend,
    }
    used = torch.tensor([11, 7], dtype=torch.int32, device=DEVICE)
    paged = attention(q, k.flip(0), v.flip(0), seqused_kv=used, return_aux=EVERYTHING, **pages).aux
    whole = attention(q, k, v, seqused_kv=used, attn_mask_type="padding", return_aux=EVERYTHING).aux
    for a, b in zip(paged, whole, strict=True):
        torch.testing.assert_close(a, b)
    if torch.cuda.is_available():
        with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
            again = attention(q, k.flip(0), v.flip(0), seqused_kv=used, return_aux=EVERYTHING, **pages).aux
        graph.replay()
        for a, b in zip(again, paged, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.slow
def test_the_example_of_the_docstring_holds() -> None:
    found = doctest.testmod(statistics)
    assert found.attempted > 5
    assert found.failed == 0


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "another type": ({"return_aux": True}, TypeError, r"return_aux is True \(bool\); accepted: a flexattn.AuxRequest"),
    "a flag": ({"return_aux": AuxRequest(entropy=1)}, TypeError, "return_aux.entropy"),  # type: ignore[arg-type]
    "both": (
        {"return_aux": AuxRequest(), "return_lse": True},
        ValueError,
        r"accepted: one of them, such as AuxRequest\(lse=True\)",
    ),
    "dtype of rows": ({"return_aux": AuxRequest(rows=torch.zeros(2))}, TypeError, "return_aux.rows is .*int32 or int64"),
    "shape of rows": ({"return_aux": AuxRequest(rows=torch.zeros(3, 2).long())}, ValueError, r"return_aux.rows has shape \(3, 2\)"),
    "FP8": (
        {"return_aux": AuxRequest(entropy=True), "fp8_recipe": Recipe()},
        ValueError,
        "asks for entropy and the call is in FP8",
    ),
    "keys in FP8": (
        {
            "return_aux": AuxRequest(entropy=True),
            **dict.fromkeys("kv", torch.zeros(2, 11, 2, 16, dtype=torch.float8_e4m3fn)),
        },
        ValueError,
        "asks for entropy and the call is in FP8",
    ),
    "lists": (
        {"return_aux": AuxRequest(column_sums=True), "kv_indices": torch.zeros(2, 9, 1, dtype=torch.int32)},
        ValueError,
        "asks for column_sums and kv_indices is given; .* flexattn.key_weights",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_requests(name: str) -> None:
    options, error, text = BAD[name]
    tensors = dict(zip("qkv", (x.cpu() for x in qkv(dtype=torch.bfloat16)), strict=True))
    with pytest.raises(error, match=text):
        attention(**tensors | options)


def test_explain_names_the_kernels() -> None:
    q, k, v = qkv()

    def told(**options: Any) -> str:
        details = str(flexattn.explain(q, k, v, **options).details)
        return details.partition("statistics of the weights: ")[2].partition("\n")[0]

    assert told(return_aux=AuxRequest(entropy=True), backend="triton") == "triton"
    assert told(return_aux=AuxRequest(entropy=True), backend="eager").startswith("torch operations, because backend='eager'")
    assert told(return_aux=AuxRequest(lse=True, max_logit=True)) == told() == ""
