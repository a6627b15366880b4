"""memory_efficient_attention with xformers' signature and bias classes, against attention written out in float64.

Stand-ins have the names and the attributes of xformers' classes (xformers 0.0.35, attn_bias.py; mslk 1.1.0). The visible keys of
each class are written here from their documentation. If xformers is installed, its objects and their `materialize` are used too.
"""

from __future__ import annotations

import importlib
import inspect
import math
import re
from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flexattn.integrations import xformers as door
from flexattn.integrations.xformers import memory_efficient_attention

H, D, D_V = 4, 8, 6
Q_LENGTHS, K_LENGTHS = [5, 3, 0, 7], [9, 3, 4, 8]  # xformers requires at least as many keys as queries
STARTS = [2, 12, 17, 22]  # starts of sequences of keys with gaps between them


def make(*sizes: int, seed: int = 0) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def qkv(b: int = 2, sq: int = 6, skv: int = 9, heads: tuple[int, ...] = (H,)) -> list[Tensor]:
    return [make(b, sq, *heads, D), make(b, skv, *heads, D, seed=1), make(b, skv, *heads, D_V, seed=2)]


def written_out(tensors: list[Tensor], bias: Tensor | float = 0.0, seen: Tensor | None = None, scale: float = D**-0.5) -> Tensor:
    """Returns attention of [b, s, h, d]; seen and bias broadcast to [b, h, sq, skv]."""
    q, k, v = (t.transpose(1, 2) for t in tensors)
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = scale * (q @ k.mT) + bias
    if seen is None:
        return (scores.softmax(-1) @ v).transpose(1, 2)
    empty = ~seen.any(-1, keepdim=True)
    weights = scores.masked_fill(~(seen | empty), -math.inf).softmax(-1).masked_fill(empty, 0.0)
    return (weights @ v).transpose(1, 2)


def check(tensors: list[Tensor], out: Tensor, want: Tensor, *captured: Tensor) -> None:
    assert out.shape == want.shape
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)
    dout, leaves = make(*out.shape, seed=9).detach(), [*tensors, *captured]
    for a, b in zip(torch.autograd.grad(out, leaves, dout), torch.autograd.grad(want, leaves, dout), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


Rule = Callable[[Tensor, Tensor, int], Tensor]  # query i, key j, num_keys - num_queries -> seen


def stand_in(name: str, **attributes: Any) -> Any:
    thing = type(name, (), {})()
    thing.__dict__.update(attributes)
    return thing


# class: (its attributes, its rule)
DENSE: dict[str, tuple[dict[str, Any], Rule]] = {
    "LowerTriangularMask": ({}, lambda i, j, shift: j <= i),
    "LowerTriangularFromBottomRightMask": ({}, lambda i, j, shift: j <= i + shift),
    "LowerTriangularFromBottomRightLocalAttentionMask": (
        {"_window_size": 3},
        lambda i, j, shift: (j <= i + shift) & (j > i + shift - 3),
    ),
    "LocalAttentionFromBottomRightMask": (
        {"window_left": 1, "window_right": 2},
        lambda i, j, shift: (i + shift - 1 <= j) & (j <= i + shift + 2),
    ),
}
PACKED: dict[str, tuple[dict[str, Any], Rule]] = {
    "BlockDiagonalMask": ({}, lambda i, j, shift: j >= 0),
    "BlockDiagonalCausalMask": ({}, lambda i, j, shift: j <= i),
    "BlockDiagonalCausalFromBottomRightMask": ({}, lambda i, j, shift: j <= i + shift),
    "BlockDiagonalCausalLocalAttentionMask": ({"_window_size": 3}, lambda i, j, shift: (j <= i) & (j > i - 3)),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": (
        {"_window_size": 3},
        lambda i, j, shift: (j <= i + shift) & (j > i + shift - 3),
    ),
}
PADDED: dict[str, tuple[dict[str, Any], Rule]] = {
    "BlockDiagonalPaddedKeysMask": ({}, lambda i, j, shift: j >= 0),
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": ({}, lambda i, j, shift: j <= i + shift),
    "BlockDiagonalLocalAttentionPaddedKeysMask": (
        {"window_left": 1, "window_right": 2},
        lambda i, j, shift: (i + shift - 1 <= j) & (j <= i + shift + 2),
    ),
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": (
        {"_window_size": 3},
        lambda i, j, shift: (j <= i + shift) & (j > i + shift - 3),
    ),
}
GAPPY: dict[str, tuple[dict[str, Any], Rule]] = {
    "BlockDiagonalGappyKeysMask": ({}, lambda i, j, shift: j >= 0),
    "BlockDiagonalCausalWithOffsetGappyKeysMask": ({}, lambda i, j, shift: j <= i + shift),
    "BlockDiagonalLocalAttentionFromBottomRightGappyKeysMask": (
        {"window_left": 1, "window_right": 2},
        lambda i, j, shift: (i + shift - 1 <= j) & (j <= i + shift + 2),
    ),
}


def indices(sq: int, skv: int) -> tuple[Tensor, Tensor, int]:
    return torch.arange(sq)[:, None], torch.arange(skv), skv - sq


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("sq", [6, 12])
def test_dense_classes(name: str, sq: int) -> None:
    attributes, rule = DENSE[name]
    tensors = qkv(sq=sq)
    out = memory_efficient_attention(*tensors, stand_in(name, **attributes))
    check(tensors, out, written_out(tensors, seen=rule(*indices(sq, 9))))


def sequences(slots: list[int], lengths: list[int] | None = None) -> Any:
    """Returns a stand-in for _SeqLenInfo; if there are lengths, for _PaddedSeqLenInfo and _GappySeqInfo."""
    info = SimpleNamespace(seqstart_py=slots, seqstart=torch.tensor(slots, dtype=torch.int32))
    if lengths is not None:
        info.seqlen_py, info.seqlen = lengths, torch.tensor(lengths, dtype=torch.int32)
    info.max_seqlen = max(lengths or [b - a for a, b in pairwise(slots)])
    return info


def in_sequences(rule: Rule, starts: list[int], num_keys: int) -> Tensor:
    """Returns the visible scores of queries of Q_LENGTHS and keys that begin at starts."""
    seen, first = torch.zeros(sum(Q_LENGTHS), num_keys, dtype=torch.bool), 0
    for sq, skv, start in zip(Q_LENGTHS, K_LENGTHS, starts, strict=True):
        seen[first : first + sq, start : start + skv] = rule(*indices(sq, skv))
        first += sq
    return seen


@pytest.mark.parametrize("name", [*PACKED, *PADDED, *GAPPY])
def test_classes_of_sequences(name: str) -> None:
    attributes, rule = (PACKED | PADDED | GAPPY)[name]
    if name in PACKED:
        slots = [0, *accumulate(K_LENGTHS)]
        key_info = sequences(slots)
    else:
        slots = [0, 10, 20, 30, 40] if name in PADDED else [*STARTS, 31]
        key_info = sequences(slots, K_LENGTHS)
    query_info = sequences([0, *accumulate(Q_LENGTHS)])
    tensors = qkv(1, sum(Q_LENGTHS), slots[-1])
    bias = stand_in(name, q_seqinfo=query_info, k_seqinfo=key_info, **attributes)
    seen = in_sequences(rule, slots[:-1], slots[-1])
    check(tensors, memory_efficient_attention(*tensors, bias), written_out(tensors, seen=seen))
    grouped = qkv(1, sum(Q_LENGTHS), slots[-1], (2, 2))
    flat = [t.flatten(2, 3) for t in grouped]
    out = memory_efficient_attention(*grouped, bias, scale=-0.5)
    check(grouped, out, written_out(flat, seen=seen, scale=-0.5).unflatten(2, (2, 2)))


def test_sequences_of_keys_in_any_order() -> None:
    starts = [22, 12, 0, 4]
    bias = stand_in(
        "BlockDiagonalGappyKeysMask",
        q_seqinfo=sequences([0, *accumulate(Q_LENGTHS)]),
        k_seqinfo=sequences([*starts, 31], K_LENGTHS),
    )
    tensors = qkv(1, sum(Q_LENGTHS), 31)
    seen = in_sequences(GAPPY["BlockDiagonalGappyKeysMask"][1], starts, 31)
    check(tensors, memory_efficient_attention(*tensors, bias), written_out(tensors, seen=seen))


@pytest.mark.parametrize("shape", [(2, H, 6, 9), (1, H, 6, 9), (2, 1, 1, 9), (1, 1, 6, 1)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_tensors_as_bias(shape: tuple[int, ...], is_causal: bool) -> None:
    tensors, bias = qkv(), make(*shape, seed=4)
    given = stand_in("LowerTriangularMaskWithTensorBias", _bias=bias) if is_causal else bias
    seen = torch.ones(6, 9, dtype=torch.bool).tril() if is_causal else None
    check(tensors, memory_efficient_attention(*tensors, given), written_out(tensors, bias, seen), bias)


def test_one_head_without_a_dim() -> None:
    tensors, bias = qkv(heads=()), make(2, 6, 9, seed=4)
    want = written_out([t.unsqueeze(2) for t in tensors], bias.unsqueeze(1)).squeeze(2)
    check(tensors, memory_efficient_attention(*tensors, bias), want, bias)


def test_groups() -> None:
    tensors, bias = qkv(heads=(2, 3)), make(2, 2, 3, 6, 9, seed=4)
    want = written_out([t.flatten(2, 3) for t in tensors], bias.flatten(1, 2)).unflatten(2, (2, 3))
    check(tensors, memory_efficient_attention(*tensors, bias), want, bias)
    by_group = make(1, 2, 1, 6, 1, seed=4)
    want = written_out([t.flatten(2, 3) for t in tensors], by_group.expand(-1, -1, 3, -1, -1).flatten(1, 2)).unflatten(2, (2, 3))
    check(tensors, memory_efficient_attention(*tensors, by_group), want, by_group)


def test_groups_of_expanded_heads_are_read_once_unless_they_are_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv(heads=(2, 3))
    k, v = (t[:, :, :, :1].detach() for t in (k, v))
    heads, attention = [], door.attention
    monkeypatch.setattr(door, "attention", lambda q, k, v, **named: heads.append(k.shape[2]) or attention(q, k, v, **named))
    want = written_out([t.expand(-1, -1, -1, 3, -1).flatten(2, 3) for t in (q, k, v)]).unflatten(2, (2, 3))
    expanded = [t.expand(-1, -1, -1, 3, -1) for t in (k, v)]
    check([q], memory_efficient_attention(q, *expanded), want)
    trained = [t.detach().clone().requires_grad_().expand(-1, -1, -1, 3, -1) for t in (k, v)]
    want = written_out([t.flatten(2, 3) for t in (q, *trained)]).unflatten(2, (2, 3))
    check([q, *trained], memory_efficient_attention(q, *trained), want)
    assert heads == [2, 6]


@pytest.mark.parametrize("scale", [0.0, 0.7, -0.7])
def test_scale(scale: float) -> None:
    tensors = qkv()
    check(tensors, memory_efficient_attention(*tensors, scale=scale), written_out(tensors, scale=scale))


def test_dropout_keeps_the_mean() -> None:
    q, k, v = make(1, 64, 2, D), make(1, 512, 2, D), torch.ones(1, 512, 2, 1, dtype=torch.float64)
    torch.manual_seed(0)
    out = memory_efficient_attention(q, k, v, p=0.25)
    assert abs(out.mean() - 1.0) < 0.02
    assert out.std() > 0.01


def test_half_precision() -> None:
    tensors = [t.detach().half() for t in qkv()]
    out = memory_efficient_attention(*tensors, stand_in("LowerTriangularMask"), output_dtype=torch.float16)
    assert out.dtype == torch.float16
    want = written_out([t.double() for t in tensors], seen=torch.ones(6, 9, dtype=torch.bool).tril())
    torch.testing.assert_close(out.double(), want, rtol=2e-3, atol=2e-3)


def of_sequences(last_q: int = 6, slots: list[int] | None = None, lengths: list[int] | None = None) -> Any:
    key_info = sequences(slots or [0, 4, 9], lengths)
    return stand_in("BlockDiagonalMask", q_seqinfo=sequences([0, 2, last_q]), k_seqinfo=key_info)


REFUSED: dict[str, tuple[Callable[..., Any], type[Exception], str]] = {
    "pages": (
        lambda q, k, v: memory_efficient_attention(q, k, v, stand_in("PagedBlockDiagonalPaddedKeysMask")),
        NotImplementedError,
        "attn_bias is a PagedBlockDiagonalPaddedKeysMask; accepted: None, a tensor, LowerTriangularMask",
    ),
    "a bool tensor": (
        lambda q, k, v: memory_efficient_attention(q, k, v, torch.ones(1, 1, 6, 9, dtype=torch.bool)),
        TypeError,
        "bias has dtype torch.bool",
    ),
    "another dtype": (
        lambda q, k, v: memory_efficient_attention(q, k, v, output_dtype=torch.float16),
        NotImplementedError,
        "output_dtype is torch.float16",
    ),
    "two dims": (lambda q, k, v: memory_efficient_attention(q[0, 0], k, v), ValueError, "query is"),
    "three and four dims": (lambda q, k, v: memory_efficient_attention(q, k[0], v), ValueError, "key is .*equally many dims"),
    "groups that differ": (
        lambda q, k, v: memory_efficient_attention(*(t.unflatten(2, g) for t, g in ((q, (2, 2)), (k, (1, 4)), (v, (1, 4))))),
        ValueError,
        "equal groups",
    ),
    "sequences in a batch": (
        lambda q, k, v: memory_efficient_attention(q, k, v, of_sequences()),
        ValueError,
        "batches 2 and 2 with a BlockDiagonalMask",
    ),
    "fewer queries than there are": (
        lambda q, k, v: memory_efficient_attention(q[:1], k[:1], v[:1], of_sequences(5)),
        ValueError,
        "attn_bias ends at query 5; accepted: 6",
    ),
    "overlap": (
        lambda q, k, v: memory_efficient_attention(q[:1], k[:1], v[:1], of_sequences(6, [0, 4, 9], [5, 2])),
        ValueError,
        "keys 0 to 5 in one sequence and keys from 4 on",
    ),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
def test_refusals(case: tuple[Callable[..., Any], type[Exception], str]) -> None:
    call, error, text = case
    with pytest.raises(error, match=text):
        call(*(t.detach() for t in qkv()))


@pytest.fixture(params=["xformers.ops.fmha", "mslk.attention.fmha"])
def package(request: pytest.FixtureRequest) -> Any:
    """The package itself; only its classes are used, which need no GPU."""
    try:
        return importlib.import_module(request.param)
    except (ImportError, OSError) as e:  # an OSError if its libraries are for another machine
        pytest.skip(f"{request.param} cannot be imported: {e}")


def test_their_own_classes(package: Any) -> None:
    classes = package.attn_bias
    packed, slots = (Q_LENGTHS, K_LENGTHS), [*STARTS, 31]
    biases = [
        *(classes.LowerTriangularMask(), classes.LowerTriangularFromBottomRightMask()),
        classes.LowerTriangularFromBottomRightMask().make_local_attention(3),
        classes.LocalAttentionFromBottomRightMask(1, 2),
        classes.LowerTriangularMask().add_bias(make(2, H, 6, 9, seed=4)),
    ]
    whole = classes.BlockDiagonalMask.from_seqlens(*packed)
    biases += [whole, whole.make_causal(), whole.make_causal_from_bottomright()]
    biases += [whole.make_local_attention(8), whole.make_local_attention_from_bottomright(3)]
    padded = classes.BlockDiagonalPaddedKeysMask.from_seqlens(Q_LENGTHS, 10, K_LENGTHS)
    biases += [padded, padded.make_local_attention(1, 2)]
    biases.append(classes.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(Q_LENGTHS, 10, K_LENGTHS))
    biases.append(classes.BlockDiagonalCausalLocalAttentionPaddedKeysMask.from_seqlens_local(Q_LENGTHS, 10, K_LENGTHS, 3))
    gappy = [classes.BlockDiagonalGappyKeysMask, classes.BlockDiagonalCausalWithOffsetGappyKeysMask]
    biases += [kind.from_seqlens(Q_LENGTHS, slots, K_LENGTHS) for kind in gappy]
    if hasattr(classes, "BlockDiagonalLocalAttentionFromBottomRightGappyKeysMask"):
        kind = classes.BlockDiagonalLocalAttentionFromBottomRightGappyKeysMask
        made = kind.from_seqlens_local_gappy(Q_LENGTHS, slots, K_LENGTHS, 1, 2, torch.device("cpu"))
        assert torch.equal(made.k_seqinfo.seqstart, torch.tensor(slots, dtype=torch.int32))
        biases.append(made)
    for bias in biases:
        is_packed = hasattr(bias, "q_seqinfo")
        tensors = qkv(1, sum(Q_LENGTHS), bias.k_seqinfo.seqstart_py[-1]) if is_packed else qkv()
        q, k, _ = tensors
        added = bias.materialize((q.shape[0], H, q.shape[1], k.shape[1]), dtype=torch.float64).detach()
        out = memory_efficient_attention(*tensors, bias)
        check(tensors, out, written_out(tensors, added, added > -math.inf))
    served = {type(bias).__name__ for bias in biases}
    theirs = {n for n, c in vars(classes).items() if inspect.isclass(c) and issubclass(c, classes.AttentionBias)}
    assert {n for n in theirs - served if not n.startswith("Paged")} == {"AttentionBias"}


def test_signature_is_theirs(package: Any) -> None:
    theirs = inspect.signature(package.memory_efficient_attention).parameters
    ours = inspect.signature(memory_efficient_attention).parameters
    assert [(n, p.kind, p.default) for n, p in ours.items()] == [(n, p.kind, p.default) for n, p in theirs.items()]


def test_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "xformers.md").read_text("utf-8")
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(code, {"__name__": "page"})
    for name in (*door._DENSE, *door._PACKED):
        assert f"`{name}`" in page
