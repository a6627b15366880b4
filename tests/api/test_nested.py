"""attention() of jagged nested tensors, against each sequence alone in float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flexattn import attention, explain

H, H_KV, D, D_V = 4, 2, 8, 6
Q_LENGTHS, K_LENGTHS = (5, 0, 7, 2), (3, 4, 9, 2)


def pieces(lengths: tuple[int, ...], heads: int, d: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, heads, d, generator=generator, dtype=torch.float64).requires_grad_() for n in lengths]


def qkv() -> list[list[Tensor]]:
    return [pieces(Q_LENGTHS, H, D, 0), pieces(K_LENGTHS, H_KV, D, 1), pieces(K_LENGTHS, H_KV, D_V, 2)]


def jagged(parts: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(parts, layout=torch.jagged)


CASES: dict[str, dict[str, Any]] = {
    "no mask": {},
    "causal": {"attn_mask_type": "causal"},
    "bottom right": {"attn_mask_type": "causal_bottom_right", "window_size": (3, 0)},
    "its own name": {"attn_mask_type": "padding_causal", "softcap": 1.5},
    "a mod": {"score_mod": lambda score, b, h, i, j: score + 0.1 * b - 0.2 * (i - j).abs()},
}


def alone(tensors: list[list[Tensor]], i: int, named: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Returns out and lse of sequence i as a separate batch."""
    named = dict(named, attn_mask_type=named.get("attn_mask_type", "no_mask").removeprefix("padding_"))
    if "score_mod" in named:
        named["score_mod"] = lambda score, b, h, i_, j: score + 0.1 * i - 0.2 * (i_ - j).abs()
    out, lse = attention(*(parts[i][None] for parts in tensors), return_lse=True, backend="eager", **named)
    return out[0], lse[0]


@pytest.mark.parametrize("named", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("fmt", ["bshd", "bhsd"])
def test_each_sequence_is_attended_to_alone(named: dict[str, Any], fmt: str) -> None:
    tensors = qkv()
    nested = [jagged(parts) for parts in tensors]
    if fmt == "bhsd":
        nested = [x.transpose(1, 2) for x in nested]
    out, lse = attention(*nested, qkv_format=fmt, return_lse=True, **named)
    assert out.is_nested
    assert out.shape[:-1] == nested[0].shape[:-1]
    assert out.shape[-1] == D_V
    want, want_lse = zip(*(alone(tensors, i, named) for i in range(4)), strict=True)
    for got, expected in zip(out.unbind(), want, strict=True):
        torch.testing.assert_close(got if fmt == "bshd" else got.transpose(0, 1), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, torch.cat(want_lse, 1), rtol=1e-12, atol=1e-12)
    values = (out if fmt == "bshd" else out.transpose(1, 2)).values()
    dout = torch.randn(values.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    leaves = [part for parts in tensors for part in parts]
    got = torch.autograd.grad((values * dout).sum(), leaves)
    for a, b in zip(got, torch.autograd.grad((torch.cat(want) * dout).sum(), leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_gaps_are_not_read() -> None:
    padded = [torch.full((4, 9, heads, d), torch.nan, dtype=torch.float64) for heads, d in ((H, D), (H_KV, D), (H_KV, D_V))]
    starts = torch.tensor([2, 0, 1, 0])
    tensors = qkv()
    for whole, parts in zip(padded, tensors, strict=True):
        for i, part in enumerate(parts):
            whole[i, starts[i] : starts[i] + len(part)] = part.detach()[: 9 - int(starts[i])]
    lengths = (torch.tensor(Q_LENGTHS), *(torch.tensor((3, 4, 8, 2)),) * 2)  # the third sequence begins at 1, and 9 do not fit
    narrowed = [torch.nested.narrow(x, 1, starts, n, layout=torch.jagged) for x, n in zip(padded, lengths, strict=True)]
    tensors = [[part[:8] for part in parts] for parts in tensors]
    out = attention(*narrowed, attn_mask_type="causal")
    for i, got in enumerate(out.unbind()):
        torch.testing.assert_close(got, alone(tensors, i, {"attn_mask_type": "causal"})[0], rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:max_seqlen_(q|kv) is None")
def test_results_go_on_with_the_inputs() -> None:
    x = jagged(pieces(Q_LENGTHS, H, D, 0)).detach()
    out = attention(x, x, x)
    assert (x + out).is_nested
    assert out._maybe_max_seqlen == 7
    from_values = torch.nested.nested_tensor_from_jagged(x.values(), x.offsets())  # its longest length is not known
    torch.testing.assert_close(attention(from_values, from_values, from_values).values(), out.values())
    told = attention(from_values, from_values, from_values, max_seqlen_q=7, max_seqlen_kv=7)
    torch.testing.assert_close(told.values(), out.values())
    assert from_values._maybe_max_seqlen is None


def test_a_bias_is_indexed_within_each_sequence() -> None:
    tensors = qkv()
    bias = torch.randn(4, 1, 7, 9, generator=torch.Generator().manual_seed(4), dtype=torch.float64).requires_grad_()
    out = attention(*(jagged(parts) for parts in tensors), bias_type="post_scale_bias", bias=bias)
    cut = [bias[i : i + 1, :, :q, :k] for i, (q, k) in enumerate(zip(Q_LENGTHS, K_LENGTHS, strict=True))]
    want = torch.cat([alone(tensors, i, {"bias_type": "post_scale_bias", "bias": cut[i]})[0] for i in range(4)])
    torch.testing.assert_close(out.values(), want, rtol=1e-12, atol=1e-12)
    (got,), (expected,) = (torch.autograd.grad((x * x).sum(), bias) for x in (out.values(), want))
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.slow
def test_compiles_in_one_graph() -> None:
    parts = [torch.randn(n, H, D) for n in (5, 7)]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged)

    def run(x: Tensor) -> Tensor:
        return attention(x, x, x, attn_mask_type="causal") + x

    torch.testing.assert_close(torch.compile(run, fullgraph=True, backend="aot_eager")(x).values(), run(x).values())


@pytest.mark.parametrize("fmt", ["bshd", "bhsd"])
def test_explain_says_what_runs(fmt: str) -> None:
    tensors = [jagged(parts) for parts in qkv()]
    nested = [x if fmt == "bshd" else x.transpose(1, 2) for x in tensors]
    lengths = {f"cu_seqlens_{side}": x.offsets().int() for side, x in (("q", tensors[0]), ("kv", tensors[1]))}
    longest = {"max_seqlen_q": 7, "max_seqlen_kv": 9}
    packed = explain(
        *(x.values() for x in tensors), qkv_format="thd", attn_mask_type="padding_causal", softcap=1.5, **lengths, **longest
    )
    told = explain(*nested, qkv_format=fmt, attn_mask_type="causal", softcap=1.5)
    assert told.details == packed.details
    assert told.backward is not None
    assert explain(*(x.detach() for x in nested), qkv_format=fmt).backward is None


def _with(x: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Returns the tokens of x as sequences of other lengths."""
    return torch.nested.nested_tensor_from_jagged(x.values(), torch.tensor([0, *itertools.accumulate(lengths)]))


def test_keys_and_values_may_have_equal_lengths_of_their_own() -> None:
    x = jagged(pieces(Q_LENGTHS, H, D, 0)).detach()
    assert torch.equal(attention(x, x, _with(x, Q_LENGTHS)).values(), attention(x, x, x).values())


REFUSED: dict[str, tuple[Callable[[Tensor], Any], type[Exception], str]] = {
    "one of three": (lambda x: attention(x, x.values(), x.values()), TypeError, "q is nested"),
    "two of three": (lambda x: attention(x.values()[None], x, x), TypeError, "k is nested"),
    "thd": (lambda x: attention(x, x, x, qkv_format="thd"), ValueError, "q is nested with shape .* and qkv_format is 'thd'"),
    "another dim": (lambda x: attention(x, x, x, qkv_format="bhsd"), ValueError, "accepted: .*jagged, heads"),
    "lengths": (lambda x: attention(x, x, x, cu_seqlens_q=x.offsets().int()), ValueError, "cu_seqlens_q is given and q, k"),
    "lengths, explained": (lambda x: explain(x, x, x, cu_seqlens_q=x.offsets().int()), ValueError, "cu_seqlens_q is given and q"),
    "FP8, explained": (lambda x: explain(x, x, x, descale_q=torch.ones(())), ValueError, "nested and the call is in FP8"),
    "other lengths of v": (
        lambda x: attention(x, x, _with(x, (0, 5, 7, 2))),
        ValueError,
        r"different sequences: \[5, 0, 7, 2\] and",
    ),
    "more sequences of v": (lambda x: attention(x, x, _with(x, (5, 0, 7, 2, 0))), ValueError, "nested with different sequences"),
    "FP8": (lambda x: attention(x, x, x, descale_q=torch.ones(())), ValueError, "nested and the call is in FP8"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
def test_refusals(case: tuple[Callable[[Tensor], Any], type[Exception], str]) -> None:
    call, error, text = case
    with pytest.raises(error, match=text):
        call(jagged(pieces(Q_LENGTHS, H, D, 0)).detach())
