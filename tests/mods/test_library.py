"""The library of mods: each on every backend, forward and backward, against its definition written out as a dense tensor."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from flexattn import attention, create_block_mask, mods
from flexattn.mods.captures import find_captures
from tests.mods.test_score_mod import HEADS, HEADS_KV

GPU = torch.cuda.is_available()
SQ, SKV = (210, 280) if GPU else (42, 56)
LIMIT = 2e-5  # share of the largest value: fp32 against fp64


def positions() -> tuple[Tensor, Tensor]:
    return torch.arange(SQ)[:, None], torch.arange(SKV)


def dense(name: str, tensors: tuple[Tensor, ...]) -> Tensor:
    """[b | 1, h | 1, sq, skv]: the mod's addend to the scores, or -inf; written out from the papers, in fp64."""
    i, j = positions()
    hidden = {
        "causal": lambda: j > i,
        "sliding_window": lambda: (j < i - 7) | (j > i + 3),
        "dilated_sliding_window": lambda: ((i - j).abs() > 12) | ((i - j) % 3 != 0),
        "document": lambda: (torch.arange(SQ) // 11)[:, None] != (torch.arange(SKV) // 11),
        "document of each batch entry": lambda: torch.stack(
            [(torch.arange(SQ) // n)[:, None] != (torch.arange(SKV) // n) for n in (5, 9)]
        )[:, None],
        "prefix_lm": lambda: torch.stack([(j > i) & (j >= n) for n in (20, 3)])[:, None],
        "both": lambda: (j > i) | (j < i - 7),
        "either": lambda: (j > i) & ((j < i - 4) | (j > i + 4)),
        "natten_2d": lambda: torch.tensor([[not near(a, c) for c in range(SKV)] for a in range(SQ)]),
    }
    if name in hidden:
        mask = hidden[name]()
        return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(mask, -math.inf)
    if name == "alibi":
        return -tensors[0][:, None, None] * (i - j).abs()
    buckets = torch.tensor([[t5_bucket(c - a, "causal" not in name) for c in range(SKV)] for a in range(SQ)])
    return tensors[0][buckets].permute(2, 0, 1)


def near(query: int, key: int, width: int = 7, size: int = 3) -> bool:
    """Neighbourhood attention, one query and key: the window is centred and pushed inward at the borders."""
    height = SKV // width
    starts = [min(max(at - size // 2, 0), n - size) for at, n in ((query // width, height), (query % width, width))]
    return all(s <= at < s + size for s, at in zip(starts, (key // width, key % width), strict=True))


def t5_bucket(relative: int, bidirectional: bool, num_buckets: int = 12, max_distance: int = 40) -> int:
    """Raffel et al. (2020), one distance at a time in plain Python."""
    bucket = 0
    if bidirectional:
        num_buckets //= 2
        bucket = num_buckets if relative > 0 else 0
        distance = abs(relative)
    else:
        distance = max(-relative, 0)
    exact = num_buckets // 2
    if distance < exact:
        return bucket + distance
    wide = exact + int(math.log(distance / exact) / math.log(max_distance / exact) * (num_buckets - exact))
    return bucket + min(wide, num_buckets - 1)


def make(name: str, device: str, tensors: tuple[Tensor, ...]) -> dict[str, Any]:
    masks = {
        "causal": lambda: mods.causal(),
        "sliding_window": lambda: mods.sliding_window(7, 3),
        "dilated_sliding_window": lambda: mods.dilated_sliding_window(4, 3),
        "document": lambda: mods.document(torch.arange(SKV, device=device) // 11),
        "document of each batch entry": lambda: mods.document(torch.stack([torch.arange(SKV, device=device) // n for n in (5, 9)])),
        "prefix_lm": lambda: mods.prefix_lm(torch.tensor([20, 3], device=device)),
        "both": lambda: mods.both(mods.causal(), mods.sliding_window(7, 10**6)),
        "either": lambda: mods.either(mods.causal(), mods.sliding_window(4, 4)),
        "natten_2d": lambda: mods.natten_2d(SKV // 7, 7, 3),
    }
    if name in masks:
        return {"mask_mod": masks[name]()}
    scores = {
        "softcap": lambda: mods.softcap(*tensors),
        "alibi": lambda: mods.alibi(*tensors),
        "relative_bias": lambda: mods.relative_bias(*tensors, max_distance=40),
        "relative_bias, causal": lambda: mods.relative_bias(*tensors, bidirectional=False, max_distance=40),
    }
    return {"score_mod": scores[name]()}


TENSORS: dict[str, tuple[int, ...]] = {
    "softcap": (),
    "alibi": (HEADS,),
    "relative_bias": (12, HEADS),
    "relative_bias, causal": (12, HEADS),
}
NAMES = [
    *(
        "causal",
        "sliding_window",
        "dilated_sliding_window",
        "document",
        "document of each batch entry",
        "prefix_lm",
        "both",
        "either",
    ),
    *("natten_2d", *TENSORS),
]


def results(name: str, backend: str, device: str, block_mask: bool = False) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    dtype = torch.float64 if backend == "dense" else torch.float32

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()

    q, k, v = leaf(2, SQ, HEADS, 16), leaf(2, SKV, HEADS_KV, 16), leaf(2, SKV, HEADS_KV, 16)
    tensors = (leaf(*TENSORS[name]).abs().detach().requires_grad_(),) if name in TENSORS else ()
    dout = leaf(2, SQ, HEADS, 16).detach()
    if backend == "dense":
        scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, 2)) / 4
        scores = tensors[0] * torch.tanh(scores / tensors[0]) if name == "softcap" else scores + dense(name, tensors).to(device)
        out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1).nan_to_num(), v.repeat_interleave(2, 2))
    else:
        call = make(name, device, tensors)
        if block_mask:
            call = {"block_mask": create_block_mask(call["mask_mod"], 2, None, SQ, SKV, device, 32)}
        out = attention(q, k, v, **call, backend=backend)  # type: ignore[assignment]
    return [out, *torch.autograd.grad(out, (q, k, v, *tensors), dout)]


@pytest.mark.sample("name")
@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("name", NAMES)
def test_against_the_definition(name: str, backend: str, device: str) -> None:
    want = results(name, "dense", "cpu")
    runs = [results(name, backend, device)]
    if name in ("document", "prefix_lm", "natten_2d") and backend == "triton":
        runs.append(results(name, backend, device, block_mask=True))
    for got in runs:
        for a, b in zip(got, want, strict=True):
            assert (a.cpu().double() - b).abs().max() <= LIMIT * max(1.0, float(b.abs().max()))


@pytest.mark.parametrize(
    ("make_mod", "words"),
    [
        (lambda: mods.sliding_window(-1, 3), "left is -1"),
        (lambda: mods.dilated_sliding_window(4, 0), "dilation is 0"),
        (lambda: mods.document(torch.zeros(3)), "document_ids is a torch.float32"),
        (lambda: mods.prefix_lm(torch.zeros(2, 2, dtype=torch.int32)), "prefix_lengths"),
        (lambda: mods.natten_2d(4, 9, 5), "kernel_size is 5"),
        (lambda: mods.alibi(torch.zeros(2, 2)), "slopes has shape"),
        (lambda: mods.relative_bias(torch.zeros(4)), "table has shape"),
        (lambda: mods.relative_bias(torch.zeros(64, 2), max_distance=8), "table has 64 buckets"),
    ],
)
def test_errors(make_mod: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_mod()


IDS = torch.zeros(1, SKV, dtype=torch.int32)  # for one sequence, although calls have two
SMALL = {
    "slopes": {"score_mod": mods.alibi(torch.ones(HEADS - 1))},
    "table": {"score_mod": mods.relative_bias(torch.ones(32, HEADS - 1))},
    "document_ids": {"mask_mod": mods.document(IDS)},
    "document_ids of one batch": {"mask_mod": mods.document(IDS[0, 1:])},
    "prefix_lengths": {"mask_mod": mods.prefix_lm(torch.ones(1, dtype=torch.int32))},
    "document_ids of a part": {"mask_mod": mods.both(mods.causal(), mods.either(mods.causal(), mods.document(IDS)))},
}


@pytest.mark.parametrize("name", SMALL)
def test_a_tensor_with_too_few_values_for_a_call_is_named(name: str) -> None:
    q, k = torch.randn(2, SQ, HEADS, 16), torch.randn(2, SKV, HEADS, 16)
    with pytest.raises(ValueError, match=rf"{name.split()[0]} has shape .*accepted: at least"):
        attention(q, k, k, **SMALL[name])


def test_lengths_that_are_not_known_are_not_checked() -> None:
    """They are on the device. max_seqlen, and the rows of a dense tensor, may be larger."""
    ids, starts = torch.zeros(4, dtype=torch.int32), torch.tensor([0, 4, 6], dtype=torch.int32)
    x = torch.randn(6, HEADS, 16)
    packed = {"qkv_format": "thd", "attn_mask_type": "padding", "cu_seqlens_q": starts, "cu_seqlens_kv": starts}
    call = {"mask_mod": mods.document(ids), **packed}
    assert attention(x, x, x, max_seqlen_q=4, max_seqlen_kv=4, **call).shape == x.shape
    assert attention(x, x, x, max_seqlen_q=5, max_seqlen_kv=5, **call).shape == x.shape
    rows = torch.randn(2, 6, HEADS, 16)
    lengths = {"attn_mask_type": "padding", "cu_seqlens_q": starts, "cu_seqlens_kv": starts}
    assert attention(rows, rows, rows, mask_mod=mods.document(ids), **lengths).shape == rows.shape
    with pytest.raises(ValueError, match="document_ids has shape"):
        attention(rows, rows, rows, mask_mod=mods.document(ids))


def test_mods_of_the_library_can_be_pickled_and_keyed() -> None:
    mod = mods.both(mods.causal(), mods.document(IDS))
    assert find_captures(mod).key is not None
    with pytest.raises(ValueError, match="document_ids has shape"):
        pickle.loads(pickle.dumps(mod))._flexattn_check_sizes(2, HEADS, SQ, SKV)
