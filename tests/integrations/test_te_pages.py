"""TransformerEngine's functions over pages: equal to the same keys in rows, and to attention written out in float64."""

from __future__ import annotations

import math
import types
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

import flexattn.integrations.te as te
from flexattn.integrations.te import AttentionParams, QKVLayout, explain_attention_backend, fused_attn_bwd, fused_attn_fwd
from tests.support.pages import make_pool

LAYOUTS = [name for name in QKVLayout if name.startswith("paged_kv_")]
MASKS = ("padding", "padding_causal", "padding_causal_bottom_right")
HEADS, HEADS_KV, DIM, DIM_V, SIZE = 4, 2, 16, 24, 4
NEW, TOTAL = [3, 1, 2], [11, 4, 2]  # queries and keys of each sequence
SQ, SKV = 3, 12
CLOSE = {"atol": 2e-5, "rtol": 2e-4}  # for float32: sums of some ten products of numbers about 1


def cumulative(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


class Case:
    """A call over pages: `given` has the arguments of fused_attn_fwd, q and keys are rows, [b, s, h, d]."""

    def __init__(self, layout: str, mask: str) -> None:
        torch.manual_seed(len(layout) + len(mask))
        self.q_format, kv_format = layout.split("_")[2:4]
        self.q, self.k, self.v = (
            torch.randn(3, s, h, d) for s, h, d in ((SQ, HEADS, DIM), (SKV, HEADS_KV, DIM), (SKV, HEADS_KV, DIM_V))
        )
        pool = make_pool(self.k, self.v, TOTAL, SIZE)
        pages = [t.transpose(0, 1).contiguous() if kv_format == "sbhd" else t for t in (pool.k, pool.v)]
        self.given: dict[str, Any] = {
            "is_training": False,
            "max_seqlen_q": SQ,
            "max_seqlen_kv": SKV,
            "cu_seqlens_q": cumulative(NEW),
            "cu_seqlens_kv": cumulative(TOTAL),
            "q": self.in_format(self.q),
            "k": pages[0],
            "v": pages[1],
            "fake_dtype": torch.float32,
            "fused_attention_backend": "F16_arbitrary_seqlen",
            "qkv_layout": layout,
            "o_format": self.q_format,
            "attn_mask_type": mask,
            "page_table_k": pool.page_table,
            "page_table_v": pool.page_table,
        }

    def in_format(self, x: Tensor) -> Tensor:
        if self.q_format == "thd":
            return torch.cat([row[:n] for row, n in zip(x, NEW, strict=True)])
        return x.transpose(0, 1).contiguous() if self.q_format == "sbhd" else x

    def in_rows(self) -> dict[str, Any]:
        """Returns the same call without pages."""
        plain = {"k": self.k, "v": self.v, "page_table_k": None, "page_table_v": None}
        layout = "bshd_bshd_bshd" if self.q_format == "bshd" else f"{self.q_format}_bshd_bshd"
        return self.given | plain | {"qkv_layout": layout}


def right(case: Case, mask: str) -> Tensor:
    """Returns attention in float64, [b, s, h, d_v], 0 if a sequence has no query."""
    out = torch.zeros(3, SQ, HEADS, DIM_V, dtype=torch.float64)
    for i, (new, total) in enumerate(zip(NEW, TOTAL, strict=True)):
        k, v = (t[i, :total].double().repeat_interleave(HEADS // HEADS_KV, 1) for t in (case.k, case.v))
        scores = torch.einsum("ihd,jhd->hij", case.q[i, :new].double(), k) / math.sqrt(DIM)
        if "causal" in mask:
            shift = total - new if "bottom" in mask else 0
            scores = scores.masked_fill(torch.ones(new, total).triu(1 + shift).bool(), -math.inf)
        out[i, :new] = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v)
    return out


@pytest.mark.sample("backend", "mask", "layout")
@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_give_what_rows_give(layout: str, mask: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend == "triton":
        pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setenv("FLEXATTN_BACKEND", backend)
    case = Case(layout, mask)
    out, aux = fused_attn_fwd(**case.given)
    same, same_aux = fused_attn_fwd(**case.in_rows())
    assert torch.equal(out, same)
    assert torch.equal(aux[0], same_aux[0])
    torch.testing.assert_close(out.double(), case.in_format(right(case, mask)), **CLOSE)


WRONG = {
    "no table": ({"page_table_v": None}, ValueError, "page_table_v is None .*with a layout paged_kv_.*; accepted: an int32"),
    "two tables": (
        {"page_table_v": torch.zeros(3, 3, dtype=torch.int32)},
        NotImplementedError,
        "page_table_v is a different tensor",
    ),
    "no pages": ({"qkv_layout": "bshd_bshd_bshd"}, ValueError, "page_table_k comes with a qkv_layout without pages"),
    "mask": ({"attn_mask_type": "causal"}, ValueError, "attn_mask_type is 'causal' with a layout paged_kv_"),
    "table's dtype": (
        {"page_table_k": (long := torch.zeros(3, 3).long()), "page_table_v": long},
        TypeError,
        "page_table has dtype",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused(name: str) -> None:
    more, error, text = WRONG[name]
    case = Case("paged_kv_bshd_bshd_bshd", "padding")
    with pytest.raises(error, match=text):
        fused_attn_fwd(**case.given | more)


PAGED: dict[str, Any] = {"qkv_layout": "paged_kv_thd_bshd_bshd", "attn_mask_type": "padding_causal", "is_training": False}


def test_the_answer_for_pages() -> None:
    cache = types.SimpleNamespace(is_paged=True, page_size=16)
    dense = {"qkv_layout": "thd_bshd_bshd", "inference_params": cache}
    for fields in (PAGED, PAGED | dense):
        found = explain_attention_backend(AttentionParams(**fields))
        assert found.has_unfused
        assert ("cudnn", "forward") in {(name, direction) for name, direction, _ in found.rejected}
        for more, reason in (
            ({"is_training": True}, "in pages, which have no gradients; accepted: is_training=False"),
            ({"fp8": True}, "in pages, which FP8 does not support; accepted: fp8=False"),
            (
                {"attn_mask_type": "causal", "qkv_layout": "bshd_bshd_bshd", "inference_params": cache},
                "attn_mask_type is 'causal'; acc",
            ),
        ):
            refused = explain_attention_backend(AttentionParams(**fields | more))
            assert not refused.has_unfused
            assert not refused.has_fused
            assert reason in str(refused)


def test_pages_have_no_fp8_and_no_backward() -> None:
    case = Case("paged_kv_bshd_bshd_bshd", "padding")
    quantise = te.Float8CurrentScalingQuantizer(torch.float8_e4m3fn)
    fp8_arguments = {name: quantise(case.given[name].nan_to_num().bfloat16()) for name in "qkv"}
    fp8_arguments |= {"fused_attention_backend": "FP8", "fake_dtype": torch.bfloat16}
    with pytest.raises(NotImplementedError, match="fused_attention_backend is FP8 with a layout paged_kv_"):
        fused_attn_fwd(**case.given | fp8_arguments)
    out, aux = fused_attn_fwd(**case.given)
    names = ("is_training", "page_table_k", "page_table_v")
    given = {name: value for name, value in case.given.items() if name not in names}
    with pytest.raises(
        NotImplementedError, match=r"qkv_layout is 'paged_kv_.*pages have no gradients; accepted: .*'bshd_bshd_bshd'"
    ):
        fused_attn_bwd(**given, o=out, d_o=out, aux_ctx_tensors=aux, do_format="bshd", dqkv_layout="bshd_bshd_bshd")


def test_two_views_of_one_table_are_one_table() -> None:
    case = Case("paged_kv_thd_bshd_bshd", "padding")
    table = case.given["page_table_k"]
    out, _ = fused_attn_fwd(**case.given | {"page_table_v": table[:]})
    assert torch.equal(out, fused_attn_fwd(**case.given)[0])
