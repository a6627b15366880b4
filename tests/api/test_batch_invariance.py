"""batch_invariant=True: a sequence's result is bitwise identical alone, in batches, in pages, and in chunks of queries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flexattn
from flexattn import attention, create_block_mask, mods
from flexattn.kernels_triton.common import problem as problems
from tests.support.pages import make_pool

HEADS, HEADS_KV, DIM = 4, 2, 32
LENGTHS = (90, 7, 130)


def by_distance(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score - 0.01 * (h + 1) * j


CALLS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window_size": (70, 0)},
    "softcap": {"softcap": 5.0},
    "sink": {"softmax_type": "off-by-one"},
    "alibi": {"bias_type": "alibi"},
    "score_mod": {"score_mod": by_distance},
    "mask_mod": {"mask_mod": lambda b, h, i, j: j % 5 != 3},
}


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that these lengths have several."""
    monkeypatch.setattr(problems, "SPLIT_PIECE", 32)


def cache() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, len(LENGTHS), 160, HEADS_KV, DIM, generator=generator)
    return k, v


def queries() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(n, HEADS, DIM, generator=generator) for n in LENGTHS]


def attend(rows: list[int], counts: list[int], capacity: int, page_size: int = 0, **call: Any) -> list[tuple[Tensor, Tensor]]:
    """out and lse of the last queries of some sequences, `counts` of each, in one call."""
    k, v = (t[rows, :capacity] for t in cache())
    own = queries()
    q = torch.cat([own[b][LENGTHS[b] - n :] for b, n in zip(rows, counts, strict=True)])
    lengths = [LENGTHS[b] for b in rows]
    keys: dict[str, Any] = {"seqused_kv": torch.tensor(lengths, dtype=torch.int32)}
    if page_size:
        pool = make_pool(k, v, lengths, page_size, seed=page_size)
        k, v = pool.k, pool.v
        keys |= {"page_table": pool.page_table, "max_seqlen_kv": capacity}
    out, lse = attention(
        q,
        k,
        v,
        qkv_format="thd_2bshd",
        attn_mask_type="padding_causal_bottom_right",
        cu_seqlens_q=torch.tensor([0, *counts]).cumsum(0).int(),
        max_seqlen_q=max(counts),
        batch_invariant=True,
        return_lse=True,
        backend="triton",
        **keys,
        **call,
    )
    return list(zip(out.split(counts), lse.T.split(counts), strict=True))


@pytest.mark.slow
@pytest.mark.sample(values=False)
@pytest.mark.parametrize("name", CALLS)
def test_alone_in_batches_in_pages_and_in_chunks(name: str) -> None:
    call = CALLS[name]
    if name == "alibi":
        call = call | {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.05])}
    alone = [attend([b], [n], n, **call)[0] for b, n in enumerate(LENGTHS)]  # all queries of each
    everything = range(len(LENGTHS))
    together = {
        "all": (attend([*everything], [*LENGTHS], 130, **call), LENGTHS),
        "the last token of each": (attend([*everything], [1] * len(LENGTHS), 160, **call), [1] * len(LENGTHS)),
        "pages of 16": (attend([*everything], [30, 2, 77], 160, 16, **call), [30, 2, 77]),
        "pages of 3": (attend([*everything], [1] * len(LENGTHS), 141, 3, **call), [1] * len(LENGTHS)),
    }
    for what, (found, counts) in together.items():
        for b, ((out, lse), count) in enumerate(zip(found, counts, strict=True)):
            assert torch.equal(out, alone[b][0][LENGTHS[b] - count :]), (what, b)
            assert torch.equal(lse, alone[b][1][LENGTHS[b] - count :]), (what, b)


@pytest.mark.parametrize(
    "piece", [32, pytest.param(96, marks=pytest.mark.slow)]
)  # blocks of 64 keys are cut by the pieces, or the pieces by the blocks
def test_a_block_mask_has_the_bits_of_its_mask_mod(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A packed tree: whole, in chunks with a block mask of their own, and beside another row, whose lists are others."""
    monkeypatch.setattr(problems, "SPLIT_PIECE", piece)
    tokens = 110
    segments = torch.tensor([[-1, -1, 1, 1, 3], [3, 32, 70, 76, 100], [30, 70, 76, 100, tokens]])
    tree = mods.tree(*segments, tokens)
    q, k, v = torch.randn(3, 2, tokens, 1, 16, generator=torch.Generator().manual_seed(2))

    def masked(first: int, end: int, rows: int = 1, **call: Any) -> tuple[Tensor, ...]:
        def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return tree(b, h, i + first, j) & ((b == 0) | (j % 2 == 0))

        if call:
            call = {"block_mask": create_block_mask(mask_mod, rows, None, end - first, tokens, "cpu", **call)}
        else:
            call = {"mask_mod": mask_mod}
        chunk = q[:rows, first:end]
        return attention(chunk, k[:rows], v[:rows], **call, batch_invariant=True, return_lse=True, backend="triton")

    alone = masked(0, tokens)
    for first, end, rows, size in ((0, tokens, 1, 32), (40, tokens, 2, 64)):
        out, lse = masked(first, end, rows, BLOCK_SIZE=size)
        assert torch.equal(out[:1], alone[0][:, first:end]), (first, rows, size)
        assert torch.equal(lse[:1], alone[1][..., first:end]), (first, rows, size)
    right = attention(*(x[:1].double() for x in (q, k, v)), mask_mod=tree, return_lse=True, backend="eager")
    for found, wanted in zip(alone, right, strict=True):
        torch.testing.assert_close(found, wanted.float(), rtol=2e-6, atol=2e-6)


@pytest.mark.slow
def test_the_result_is_right() -> None:
    counts = [9, 21]
    found = attend([0, 2], counts, 160)
    for b, count, (out, lse) in zip((0, 2), counts, found, strict=True):
        k, v = (t[b : b + 1, : LENGTHS[b]].double() for t in cache())
        wanted = attention(queries()[b][None].double(), k, v, attn_mask_type="causal", return_lse=True, backend="eager")
        torch.testing.assert_close(out, wanted[0][0, -count:].float(), rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(lse, wanted[1][0].T[-count:].float(), rtol=2e-6, atol=2e-6)


def test_without_it_the_bits_differ() -> None:
    """The comparison above can fail: shared splits go with the length."""
    whole = attend([2], [1], 130)[0][0]
    k, v = (t[2:3, :130] for t in cache())
    plain = attention(queries()[2][None, -1:], k, v, backend="triton")
    assert not torch.equal(plain[0], whole)


@pytest.mark.parametrize("by", ["argument", "variable"])
def test_backends_that_cannot_say_so(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = torch.randn(3, 1, 8, 2, 16)
    call = {"batch_invariant": True} if by == "argument" else {}
    if by == "variable":
        monkeypatch.setenv("FLEXATTN_BATCH_INVARIANT", "1")
    with pytest.raises(flexattn.BackendError, match="the rounding of torch's matrix products may depend on the batch"):
        attention(q, k, v, backend="eager", **call)
    with pytest.raises(flexattn.BackendError, match="FP8 scales depend on the batch"):
        attention(*(x.bfloat16() for x in (q, k, v)), fp8_recipe=flexattn.fp8.Recipe(), backend="triton", **call)
    text = flexattn.explain(q, k, v, backend="triton", **call).details
    assert "cuDNN runs on CUDA devices" in text or "cuDNN's rounding of a sequence may depend on the rest of the batch" in text


def test_a_flag_that_is_none() -> None:
    x = torch.randn(1, 4, 2, 16)
    with pytest.raises(TypeError, match="batch_invariant is 1"):
        attention(x, x, x, batch_invariant=1)
