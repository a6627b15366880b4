"""Lists of keys and of blocks (kv_indices): equal to the dense call with the mask that they spell, on the eager backend."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import flexattn
from flexattn import attention, fp8
from flexattn.dispatch import triton_second_order
from flexattn.dispatch.reference import reference_attention, reference_gradients
from flexattn.ops import make_spec
from flexattn.prepare import prepare
from flexattn.shorthands import in_full
from tests.support.key_lists import dense, draw_lists

HEADS, KEY_HEADS, DIM, VALUE_DIM = 4, 2, 16, 8
LENGTHS_Q, LENGTHS_KV = [13, 1, 0], [17, 9, 4]


def tensors(batch: int, sq: int, skv: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = (sq, HEADS, DIM), (skv, KEY_HEADS, DIM), (skv, KEY_HEADS, VALUE_DIM)
    return [torch.randn(batch, *size, generator=generator, dtype=dtype).requires_grad_() for size in sizes]


def assert_equal_with_gradients(got: Tensor, wanted: Tensor, leaves: list[Tensor]) -> None:
    torch.testing.assert_close(got, wanted)
    seed = torch.linspace(-1, 1, got.numel(), dtype=got.dtype).view(got.shape)
    for a, b in zip(torch.autograd.grad(got, leaves, seed), torch.autograd.grad(wanted, leaves, seed), strict=True):
        torch.testing.assert_close(a, b)


FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"attn_mask_type": "causal"},
    "bottom right with a window": {"attn_mask_type": "causal_bottom_right", "window_size": (6, 0)},
    "window": {"window_size": (3, 5), "bottom_right_diagonal": False},
    "softcap": {"softcap": 1.5, "softmax_scale": 0.7},
    "sink of 1": {"softmax_type": "off-by-one"},
    "sinks": {"softmax_offset": torch.linspace(-1, 2, HEADS, dtype=torch.float64).requires_grad_()},
    "ALiBi": {"bias_type": "alibi"},
    "bias": {"bias": torch.randn(1, HEADS, 13, 17, dtype=torch.float64).requires_grad_()},
    "row of a bias": {"bias": torch.randn(2, 1, 1, 17, dtype=torch.float64).requires_grad_(), "bias_type": "pre_scale_bias"},
    "mods": {
        "score_mod": lambda s, b, h, i, j: s + 0.1 * (i - j) * (h + 1),
        "mask_mod": lambda b, h, i, j: (i + j + h) % 3 != b,
    },
}


@pytest.mark.parametrize("per_head", [False, True], ids=["one list", "lists of heads"])
@pytest.mark.parametrize("feature", FEATURES)
def test_lists_are_the_dense_call_with_their_mask(feature: str, per_head: bool) -> None:
    leaves = tensors(2, 13, 17)
    indices, counts = draw_lists((2, 13), KEY_HEADS if per_head else 0, 17, 7)
    options = FEATURES[feature]
    leaves += [t for t in options.values() if isinstance(t, Tensor)]
    q, k, v = leaves[:3]
    visible = dense(indices, counts, 17, HEADS) > 0
    result = attention(q, k, v, kv_indices=indices, kv_index_counts=counts, return_lse=True, return_max_logit=True, **options)
    inside = options.get("mask_mod")
    mask = {"mask": visible} if inside is None else {"mask_mod": lambda b, h, i, j: inside(b, h, i, j) & visible[b, h, i, j]}
    wanted = attention(q, k, v, return_lse=True, return_max_logit=True, **(options | mask))
    finite = wanted.lse.isfinite()
    assert torch.equal(finite, result.lse.isfinite())
    got, dense_result = (torch.cat((x.out.flatten(), x.lse[finite])) for x in (result, wanted))
    assert_equal_with_gradients(got, dense_result, leaves)
    torch.testing.assert_close(result.max_logit, wanted.max_logit)


def test_a_key_counts_once_for_each_entry() -> None:
    leaves = tensors(2, 13, 17)
    indices, counts = draw_lists((2, 13), KEY_HEADS, 17, 12, repeats=True)
    times = dense(indices, counts, 17, HEADS)
    assert times.max() > 1
    wanted = attention(*leaves, mask=times.double().log())
    assert_equal_with_gradients(attention(*leaves, kv_indices=indices, kv_index_counts=counts), wanted, leaves)


@pytest.mark.parametrize("fmt", ["sbhd", "bhsd", "thd", "bshd_2thd", "thd_2bshd"])
def test_lists_in_every_format_and_with_lengths(fmt: str) -> None:
    q_format, _, kv_format = fmt.partition("_2")
    kv_format = kv_format or q_format
    leaves = tensors(3, max(LENGTHS_Q), max(LENGTHS_KV))
    indices, _ = draw_lists((3, max(LENGTHS_Q)), KEY_HEADS, max(LENGTHS_KV), 6)
    indices[:, :, :, 0] = 2**31 - 1  # no key of any sequence

    def packed(t: Tensor, lengths: list[int]) -> Tensor:
        return torch.cat([row[:length] for row, length in zip(t, lengths, strict=True)])

    def laid_out(t: Tensor, form: str, lengths: list[int]) -> Tensor:
        return packed(t, lengths) if form == "thd" else t.permute(["bshd".index(dim) for dim in form])

    cu_q, cu_kv = (torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (LENGTHS_Q, LENGTHS_KV))
    given = [laid_out(t, *side) for t, side in zip(leaves, [(q_format, LENGTHS_Q)] + [(kv_format, LENGTHS_KV)] * 2, strict=True)]
    out = attention(
        *given,
        qkv_format=fmt,
        attn_mask_type="padding_causal_bottom_right",
        cu_seqlens_q=cu_q,
        cu_seqlens_kv=cu_kv,
        max_seqlen_q=max(LENGTHS_Q),
        max_seqlen_kv=max(LENGTHS_KV),
        kv_indices=packed(indices, LENGTHS_Q) if q_format == "thd" else indices,
    )
    wanted = torch.zeros(3, max(LENGTHS_Q), HEADS, VALUE_DIM, dtype=torch.float64)
    for b, (sq, skv) in enumerate(zip(LENGTHS_Q, LENGTHS_KV, strict=True)):
        if sq:
            one = [t[b : b + 1, :n] for t, n in zip(leaves, (sq, skv, skv), strict=True)]
            mask = dense(indices[b : b + 1, :sq], None, skv, HEADS) > 0
            wanted[b, :sq] = attention(*one, mask=mask, attn_mask_type="causal_bottom_right")[0]
    assert_equal_with_gradients(out, laid_out(wanted, q_format, LENGTHS_Q), leaves)


@pytest.mark.parametrize("has_mod", [False, True])
@pytest.mark.parametrize("fmt", ["bshd", "thd"])
def test_lists_of_blocks_are_the_dense_call_with_their_mask(fmt: str, has_mod: bool) -> None:
    length, size = 40, 16
    leaves = tensors(2, length, length)
    generator = torch.Generator().manual_seed(1)
    indices = torch.randint(-1, 4, (2, KEY_HEADS, 3, 4), generator=generator, dtype=torch.int32)  # with repeats, and no block 3
    counts = torch.randint(0, 5, (2, KEY_HEADS, 3), generator=generator, dtype=torch.int32)
    blocks = dense(indices.transpose(1, 2), counts.transpose(1, 2), 3, HEADS) > 0
    mask = blocks.repeat_interleave(size, 2).repeat_interleave(size, 3)[:, :, :length, :length]
    given: list[Tensor] = leaves
    packing: dict[str, Any] = {}
    if fmt == "thd":
        given, packing = [t.flatten(0, 1) for t in leaves], flexattn.packed([length, length])
    mods: dict[str, Any] = {"mask_mod": lambda b, h, i, j: (i + j + h) % 3 != b} if has_mod else {}
    out = attention(*given, causal=True, kv_indices=indices, kv_index_counts=counts, kv_block_size=size, **packing, **mods)
    seen = mask & mods["mask_mod"](*torch.meshgrid(*map(torch.arange, mask.shape), indexing="ij")) if has_mod else mask
    assert_equal_with_gradients(out, attention(*leaves, causal=True, mask=seen).view(out.shape), leaves)


def test_entries_of_each_query_may_be_blocks() -> None:
    leaves = tensors(2, 13, 17)
    indices, counts = draw_lists((2, 13), KEY_HEADS, 5, 3)
    keys = (indices[..., None] * 4 + torch.arange(4)).where(indices[..., None] >= 0, -1).flatten(-2).int()
    out = attention(*leaves, kv_indices=indices, kv_index_counts=counts, kv_block_size=(1, 4))
    assert_equal_with_gradients(out, attention(*leaves, kv_indices=keys, kv_index_counts=counts * 4), leaves)


def test_results_equal_the_reference_and_repeat_from_the_kept_call() -> None:
    q, k, v = tensors(2, 13, 17, dtype=torch.float32)
    indices, counts = draw_lists((2, 13), 0, 17, 7)
    options = {"kv_indices": indices, "kv_index_counts": counts, "attn_mask_type": "causal_bottom_right"}
    x, settings, _ = prepare(q, k, v, in_full(q, k, options))
    spec = make_spec(x, settings, None)
    wanted, _, _ = reference_attention(spec, x)
    gradients = reference_gradients(spec, x, torch.ones_like(wanted))
    for _ in range(4):
        out = attention(q, k, v, **options)
        torch.testing.assert_close(out, wanted.float())
        for got, gradient in zip(torch.autograd.grad(out.sum(), (q, k, v)), gradients[:3], strict=True):
            torch.testing.assert_close(got, gradient.float())
    indices.fill_(3)  # lists that change in place, as in a graph
    other = attention(q, k, v, **options)
    torch.testing.assert_close(other, attention(q, k, v, **(options | {"kv_indices": indices.clone()})))
    assert not torch.allclose(other, out)


def test_no_score_matrix_is_made() -> None:
    class Largest(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            for t in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(t, Tensor):
                    self.most = max(self.most, t.numel())
            return result

    length, n = 1000, 8
    q, k, v = (torch.randn(1, length, 1, 8).requires_grad_() for _ in range(3))
    indices, _ = draw_lists((1, length), 0, length, n)
    with Largest() as seen:
        attention(q, k, v, kv_indices=indices, causal=True).sum().backward()
    assert seen.most <= length * n * 8  # rows of gathered keys, and 1e6 scores would be more


def test_hidden_and_missing_keys_are_not_read() -> None:
    q, k, v = tensors(1, 3, 5)
    spoiled = [t.detach().index_fill(1, torch.tensor([0]), float("nan")) for t in (k, v)]
    indices = torch.tensor([[1, -1], [-1, -7], [4, 5]], dtype=torch.int32)[None]
    out, lse = attention(q, *spoiled, kv_indices=indices, return_lse=True)
    assert out.isfinite().all()
    assert lse[0, :, 1].isneginf().all()
    assert not out[0, 1].any()
    for no_keys in (attention(q, k, v, kv_indices=indices[..., :0]), attention(q, k[:, :0], v[:, :0], kv_indices=indices)):
        assert not no_keys.any()
        assert not any(gradient.any() for gradient in torch.autograd.grad(no_keys.sum(), (q, k, v)))


@pytest.mark.slow
def test_a_compiled_call_has_one_graph() -> None:
    leaves = tensors(2, 13, 17, dtype=torch.float32)
    indices, counts = draw_lists((2, 13), 0, 17, 7)
    blocks = torch.zeros(1, 1, 1, 1, dtype=torch.int32)

    def both(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = attention(q, k, v, kv_indices=indices, kv_index_counts=counts)
        return out + attention(q, k, v, kv_indices=blocks, kv_block_size=16)

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    assert_equal_with_gradients(compiled(*leaves), both(*leaves), leaves)


def test_explain_names_the_lists() -> None:
    q, k, v = tensors(2, 13, 17)
    indices, _ = draw_lists((2, 13), KEY_HEADS, 17, 7)
    assert "kv_indices for each key head" in str(flexattn.explain(q, k, v, kv_indices=indices).details)
    text = str(flexattn.explain(q, k, v, kv_indices=indices, kv_block_size=(1, 8)).details)
    assert "kv_indices of blocks of 8 keys" in text


ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"kv_indices": torch.zeros(2, 13, 3)}, "kv_indices has dtype torch.float32"),
    ({"kv_indices": torch.zeros(2, 13, 3, dtype=torch.int64)}, "Convert with .to(torch.int32)"),
    ({"kv_indices": torch.zeros(2, 13, 3, 3, dtype=torch.int32)}, "kv_indices has shape (2, 13, 3, 3); accepted: [b, sq, n]"),
    ({"kv_index_counts": torch.zeros(2, 13, dtype=torch.int32)}, "kv_index_counts is given without kv_indices"),
    ({"kv_block_size": 64}, "kv_block_size is 64 without kv_indices"),
    ({"kv_index_counts": torch.zeros(2, 12, dtype=torch.int32), "+": 1}, "kv_index_counts has shape (2, 12); accepted: [2, 13]"),
    ({"dropout_p": 0.5, "+": 1}, "dropout_p is 0.5 with kv_indices; accepted: 0.0"),
    ({"fp8_recipe": fp8.Recipe(), "+": 1}, "kv_indices is given with q in FP8"),
    ({"kv_block_size": 24, "+": 1}, "kv_block_size is 24; accepted: a multiple of 16"),
    ({"kv_block_size": (1, 0), "+": 1}, "kv_block_size is (1, 0); accepted"),
    ({"kv_block_size": 16, "+": 1}, "accepted: [b, h_kv, query blocks, n] = [2, 2, 1, n]"),
]


@pytest.mark.parametrize(("options", "text"), ERRORS, ids=[text[:40] for _, text in ERRORS])
def test_errors_name_the_argument(options: dict[str, Any], text: str) -> None:
    q, k, v = tensors(2, 13, 17, dtype=torch.float32)
    given = {"kv_indices": torch.zeros(2, 13, 3, dtype=torch.int32)} if options.get("+") else {}
    with pytest.raises((ValueError, TypeError), match=re.escape(text)):
        attention(q, k, v, **given, **{name: value for name, value in options.items() if name != "+"})


def test_other_calls_refuse_lists_by_name() -> None:
    q, k, v = tensors(2, 16, 16, dtype=torch.float32)
    indices = torch.zeros(2, 16, 3, dtype=torch.int32)
    with pytest.raises(ValueError, match="block_mask is given with kv_indices"):
        attention(
            q, k, v, kv_indices=indices, block_mask=flexattn.create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 16, 16, "cpu")
        )
    nested = [torch.nested.nested_tensor(list(t.detach()), layout=torch.jagged) for t in (q, k, v)]
    with pytest.raises(ValueError, match="kv_indices is given and q, k and v are nested"):
        attention(*nested, kv_indices=indices)
    with pytest.raises(TypeError, match="kv_indices"):
        flexattn.attention_backward(q, q, k, v, q, q[..., 0], kv_indices=indices)  # type: ignore[call-arg]


def test_dense_helper_counts_entries() -> None:
    indices = torch.tensor([[[0, 2, 2, -1]]], dtype=torch.int32)
    assert dense(indices, torch.tensor([[2]]), 3, 1).tolist() == [[[[1, 0, 1]]]]
    assert [b - a for a, b in pairwise(dense(indices, None, 3, 1)[0, 0, 0].tolist())] == [-1, 2]


def test_a_list_of_one_key_gives_its_value_in_float32() -> None:
    """torch's own operator, which runs plain calls on a CPU, has no lists."""
    q, k, v = (torch.randn(1, 16, 2, 8) for _ in range(3))
    indices = torch.arange(16, dtype=torch.int32).flip(0).view(1, 16, 1)
    torch.testing.assert_close(attention(q, k, v, kv_indices=indices), v.flip(1))
    none = attention(q, k, v, kv_indices=torch.full((1, 1, 1, 1), -1, dtype=torch.int32), kv_block_size=16)
    assert not none.any()


@pytest.mark.slow
def test_second_derivatives_are_those_of_the_mask() -> None:
    leaves = [torch.randn(1, 6, 2, 16, generator=torch.Generator().manual_seed(n)).requires_grad_() for n in range(3)]
    indices, _ = draw_lists((1, 6), 0, 6, 3)
    found = []
    for options in ({"kv_indices": indices}, {"mask": dense(indices, None, 6, 1) > 0}):
        out = attention(*leaves, **options, backend="triton")  # type: ignore[arg-type]
        (dq,) = torch.autograd.grad(out.square().sum(), leaves[0], create_graph=True)
        found.append(torch.autograd.grad(dq.square().sum(), leaves))
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    x, settings, _ = prepare(*leaves, in_full(*leaves[:2], {"kv_indices": indices}))
    reason = triton_second_order.unsupported(make_spec(x, settings, None), x, False)
    assert reason is not None
    assert "no kv_indices" in reason
