"""A training forward over packed documents has the bits of prefill, of chunks and of decoding over pages, through each door."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from flexattn import append_kv, attention
from flexattn.integrations import flash_attn
from flexattn.integrations.flash_attn import flash_attn_3
from flexattn.kernels_triton.common import problem as problems

HEADS, HEADS_KV = 4, 2


class Pages(NamedTuple):
    """A pool of pages that holds one document, and the keys and values that it will hold: what an engine has between steps."""

    k: Tensor
    v: Tensor
    table: Tensor  # int32 [1, columns], in no order
    new_k: Tensor  # all tokens of the document, [n, h_kv, d]
    new_v: Tensor


class Door(NamedTuple):
    """train(q, k, v, cu_seqlens, longest) returns out [t, h, d] and lse [h, t]. step(q, pages, done), for queries [n, h, d] after
    `done` tokens, writes their keys to the pages and returns out [n, h, d] and lse [h, n]. A door without lse returns None.
    """

    train: Callable[..., tuple[Tensor, Tensor | None]]
    step: Callable[..., tuple[Tensor, Tensor | None]]
    keys: torch.dtype | None = None  # of the cache, and of the trainer's keys; None: those of q


def int32(numbers: Any, like: Tensor) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=like.device)


def trained(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    lengths = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens, "max_seqlen_q": longest, "max_seqlen_kv": longest}
    scales = {"descale_k": q.new_tensor([0.5, 2.0]).float()} if k.element_size() == 1 else {}
    return attention(q, k, v, qkv_format="thd", attn_mask_type="padding_causal", return_lse=True, **lengths, **scales)


def stepped(q: Tensor, pages: Pages, done: int) -> tuple[Tensor, Tensor]:
    end, used = done + len(q), int32([done + len(q)], q)
    new_k, new_v = (x[None, done:end] for x in (pages.new_k, pages.new_v))
    append_kv(pages.k, pages.v, new_k, new_v, seqused_kv=int32([done], q), page_table=pages.table)
    scales = {"descale_k": q.new_tensor([0.5, 2.0]).float()} if pages.k.element_size() == 1 else {}
    where = {"seqused_kv": used, "page_table": pages.table, "attn_mask_type": "padding_causal_bottom_right", **scales}
    out, lse = attention(q[None], pages.k, pages.v, return_lse=True, **where)
    return out[0], lse[0]


def trained_by_flash_attn(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    lengths = (cu_seqlens, cu_seqlens, longest, longest)
    out, lse, _ = flash_attn.flash_attn_varlen_func(q, k, v, *lengths, causal=True, return_attn_probs=True)
    return out, lse


def stepped_by_flash_attn(q: Tensor, pages: Pages, done: int) -> tuple[Tensor, Tensor]:
    new = (x[None, done : done + len(q)] for x in (pages.new_k, pages.new_v))
    where = {"cache_seqlens": int32([done], q), "block_table": pages.table, "causal": True}
    out, lse = flash_attn.flash_attn_with_kvcache(q[None], pages.k, pages.v, *new, **where, return_softmax_lse=True)
    return out[0], lse[0]


def trained_by_flash_attn_3(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    lengths = (cu_seqlens, cu_seqlens, longest, longest)
    return flash_attn_3.flash_attn_varlen_func(q, k, v, *lengths, causal=True, return_attn_probs=True)


def stepped_by_flash_attn_3(q: Tensor, pages: Pages, done: int) -> tuple[Tensor, Tensor]:
    new = (x[None, done : done + len(q)] for x in (pages.new_k, pages.new_v))
    where = {"cache_seqlens": int32([done], q), "page_table": pages.table, "causal": True}
    out, lse, *_ = flash_attn_3.flash_attn_with_kvcache(q[None], pages.k, pages.v, *new, **where, return_softmax_lse=True)
    return out[0], lse[0]


LAYER: Any = SimpleNamespace(is_causal=True, config=None)


def trained_by_transformers(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int) -> tuple[Tensor, None]:
    from flexattn.integrations.transformers.forward import attention_forward

    lengths: Any = {name + x: n for name, n in (("cu_seq_lens_", cu_seqlens), ("max_length_", longest)) for x in "qk"}
    return attention_forward(LAYER, *(x.transpose(0, 1)[None] for x in (q, k, v)), None, **lengths)[0][0], None


def stepped_by_transformers(q: Tensor, pages: Pages, done: int) -> tuple[Tensor, None]:
    """Over a DynamicCache, which is dense."""
    from flexattn.integrations.transformers.forward import attention_forward

    keys = (x[: done + len(q)] for x in (pages.new_k, pages.new_v))
    return attention_forward(LAYER, *(x.transpose(0, 1)[None] for x in (q, *keys)), None)[0][0], None


DOORS = {
    "attention": Door(trained, stepped),
    "attention, an FP8 cache": Door(trained, stepped, torch.float8_e5m2),
    "flash_attn": Door(trained_by_flash_attn, stepped_by_flash_attn),
    "flash_attn_3": Door(trained_by_flash_attn_3, stepped_by_flash_attn_3),
    "transformers": Door(trained_by_transformers, stepped_by_transformers),
}


@pytest.mark.sample
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.exhaustive if name not in ("attention", "attention, an FP8 cache") else ())
        for name in DOORS
    ],
)
def test_trainer_and_engine_have_the_same_bits(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "transformers":
        pytest.importorskip("transformers")
    monkeypatch.setenv("FLEXATTN_BATCH_INVARIANT", "1")  # no door has the argument
    door = DOORS[name]
    on_gpu = device == "cuda"
    if not on_gpu:
        monkeypatch.setattr(problems, "SPLIT_PIECE", 64)  # so that a short document has several pieces
    lengths, dim, dtype = ((2500, 700), 128, torch.bfloat16) if on_gpu else ((5, 70), 16, torch.float32)
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randn(sum(lengths), heads, dim, generator=generator) for heads in (HEADS, HEADS_KV, HEADS_KV))
    q, k, v = (x.to(device, dtype) for x in drawn)
    if door.keys is not None:
        k, v = k.to(door.keys), v.to(door.keys)
    cu_seqlens = int32([0, *lengths], q).cumsum(0, dtype=torch.int32)
    train_q = q.clone().requires_grad_(door.keys is None)
    out, lse = door.train(train_q, k, v, cu_seqlens, max(lengths))
    for b, n in enumerate(lengths):
        rows = slice(int(cu_seqlens[b]), int(cu_seqlens[b]) + n)
        # all at once; then a chunk, another one, and single tokens, over other pages
        for size, steps in ((16, [n]), (64 if on_gpu else 8, [n // 2, n - n // 2 - 2, 1, 1])):
            columns = -(-n // size)
            order = torch.randperm(columns + 3, generator=generator)[:columns]
            pool = torch.zeros(2, columns + 3, size, HEADS_KV, dim, device=device, dtype=k.dtype)
            pages = Pages(pool[0], pool[1], int32([order.tolist()], q), k[rows], v[rows])
            done = 0
            for step in steps:
                queries = slice(rows.start + done, rows.start + done + step)
                found, found_lse = door.step(q[queries], pages, done)
                assert torch.equal(found, out[queries]), (b, size, done)
                if lse is not None and found_lse is not None:
                    assert torch.equal(found_lse, lse[:, queries]), (b, size, done)
                done += step
            assert done == n
