"""attention_with_prefix: it returns the results of one call over the same pages, and refuses other arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flexattn import attention, attention_with_prefix

HEADS, HEADS_KV, DIM = 4, 2, 16
PREFIX, OWN, QUERIES = 24, (7, 1, 0, 13), (3, 1, 0, 9)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_call(page_size: int, fmt: str = "bshd") -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """A call over random pages; the table of the third sequence, which has no queries, is garbage."""
    shared, columns = PREFIX // page_size, -(-(PREFIX + max(OWN)) // page_size)
    num_pages = shared + 4 * (columns - shared)
    ids = torch.randperm(num_pages, generator=torch.Generator().manual_seed(1)).int()
    table = torch.cat((ids[:shared].expand(4, shared), ids[shared:].view(4, -1)), 1)
    table[2] = 2147480000
    shape = (num_pages, page_size, HEADS_KV, DIM)
    k, v = (normal(*shape, seed=seed) for seed in (2, 3))
    if fmt == "bhsd":
        k, v = k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()
    used = torch.tensor(OWN, dtype=torch.int32) + PREFIX
    used[2] = 0
    arguments = {
        "qkv_format": f"thd_2{fmt}",
        "attn_mask_type": "padding_causal_bottom_right",
        "cu_seqlens_q": torch.tensor([0, *QUERIES]).cumsum(0).int(),
        "max_seqlen_q": max(QUERIES),
        "page_table": table,
        "seqused_kv": used,
    }
    return (normal(sum(QUERIES), HEADS, DIM, seed=4), k, v), arguments


CALLS: dict[str, dict[str, Any]] = {
    "causal": {},
    "padding": {"attn_mask_type": "padding"},
    "softcap": {"softcap": 3.0, "softmax_scale": 0.5},
    "sinks": {"softmax_type": "learnable", "softmax_offset": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "bound": {"max_seqlen_kv": PREFIX + max(OWN)},
}


@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("name", CALLS)
def test_one_call(name: str, backend: str) -> None:
    tensors, arguments = make_call(8, "bhsd" if name == "causal" else "bshd")
    arguments |= {**CALLS[name], "backend": backend, "return_lse": True}
    found = attention_with_prefix(*tensors, prefix_length=PREFIX, prefix_row=1, **arguments)
    arguments["page_table"] = arguments["page_table"].clamp(max=len(tensors[1]) - 1)
    exact = attention(*(t.double() for t in tensors), **(arguments | {"backend": "eager"} | _in_fp64(CALLS[name])))
    for got, want in zip(found, exact, strict=True):
        torch.testing.assert_close(got.double(), want.double(), rtol=3e-6, atol=3e-6)


def _in_fp64(call: dict[str, Any]) -> dict[str, Any]:
    return {name: t.double() for name, t in call.items() if isinstance(t, Tensor)}


def test_the_prefix_is_read_from_its_row_alone() -> None:
    tensors, arguments = make_call(8)
    wanted = attention_with_prefix(*tensors, prefix_length=PREFIX, **arguments)
    others = arguments["page_table"].clone()
    others[[0, 1, 2], : PREFIX // 8] = -1
    found = attention_with_prefix(*tensors, prefix_length=PREFIX, prefix_row=3, **(arguments | {"page_table": others}))
    assert torch.equal(found, wanted)


@pytest.mark.slow
def test_one_graph_under_compile() -> None:
    tensors, arguments = make_call(8)

    def call(*tensors: Tensor) -> Tensor:
        return attention_with_prefix(*tensors, prefix_length=PREFIX, **arguments)  # type: ignore[no-any-return]

    torch.testing.assert_close(torch.compile(call, backend="aot_eager", fullgraph=True)(*tensors), call(*tensors))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"prefix_length": 20}, "prefix_length is 20; accepted: a multiple of the page size, 8, up to 32"),
        ({"prefix_length": 40}, "prefix_length is 40; accepted"),
        ({"prefix_length": 0}, "prefix_length is 0; accepted"),
        ({"prefix_row": 4}, "prefix_row is 4; accepted: 0 to 3"),
        ({"window_size": (5, 0)}, "window_size given; accepted with lengths and pages"),
        (
            {"attn_mask_type": "padding_causal"},
            "attn_mask_type is 'padding_causal'; accepted: padding, padding_causal_bottom_right",
        ),
        ({"qkv_format": "bshd"}, "qkv_format is 'bshd'"),
        ({"page_table": None}, "page_table is None"),
    ],
)
def test_wrong_arguments(changes: dict[str, Any], text: str) -> None:
    tensors, arguments = make_call(8)
    with pytest.raises((ValueError, TypeError), match=text):
        attention_with_prefix(*tensors, **({"prefix_length": PREFIX} | arguments | changes))


def test_values_are_checked_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXATTN_CHECK", "1")
    tensors, arguments = make_call(8)
    attention_with_prefix(*tensors, prefix_length=PREFIX, **arguments)
    short = arguments["seqused_kv"].clone()
    short[3] = PREFIX + 5
    with pytest.raises(ValueError, match=r"seqused_kv\[3\] is 4 tokens too small for 9 queries after the prefix"):
        attention_with_prefix(*tensors, prefix_length=PREFIX, **(arguments | {"seqused_kv": short}))
    table = arguments["page_table"].clone()
    table[1, 2] = table[3, 4]
    with pytest.raises(ValueError, match=r"page_table\[1\] does not begin like page_table\[0\]"):
        attention_with_prefix(*tensors, prefix_length=PREFIX, **(arguments | {"page_table": table}))
