"""Short forms of a call: each equals the arguments that it replaces, in every function that accepts a call of attention."""

from __future__ import annotations

import array
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch.utils import _pytree

import flexattn
from flexattn import attention, call_cache, mods
from flexattn.dispatch import spec
from flexattn.functional import bind_call

LENGTHS = [6, 0, 10]


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def packed_by_hand(lengths: Any = LENGTHS) -> dict[str, Any]:
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    sides = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens, "max_seqlen_q": max(lengths), "max_seqlen_kv": max(lengths)}
    return {"qkv_format": "thd", **sides}


DENSE, LONG, PACKED = (2, 16, 4, 8), (2, 24, 2, 8), (16, 4, 8)
SEEN = torch.ones(16, 16, dtype=torch.bool).tril(2) & (torch.arange(16) != 5)
PADDING = torch.arange(16).expand(2, 16) < torch.tensor([[9], [16]])
CU = packed_by_hand()["cu_seqlens_q"]
PAGES = {
    "page_table": torch.tensor([[0, 1], [3, 2]], dtype=torch.int32),
    "seqused_kv": torch.tensor([7, 16], dtype=torch.int32),
    "attn_mask_type": "padding",
}

# Shape of q, shape of k and v, the short form, and the long one.
Pair = tuple[tuple[int, ...], tuple[int, ...], dict[str, Any], dict[str, Any]]
FORMS: dict[str, Pair] = {
    "causal": (DENSE, DENSE, {"causal": True}, {"attn_mask_type": "causal"}),
    "causal that is named too": (
        DENSE,
        LONG,
        {"causal": True, "attn_mask_type": "causal_bottom_right"},
        {"attn_mask_type": "causal_bottom_right"},
    ),
    "causal over packed sequences": (
        PACKED,
        PACKED,
        {"causal": True, **flexattn.packed(LENGTHS)},
        {"attn_mask_type": "padding_causal", **packed_by_hand()},
    ),
    "causal over padded sequences": (
        (3, 16, 4, 8),
        (3, 24, 2, 8),
        {"causal": True, "attn_mask_type": "padding", "cu_seqlens": CU},
        {"attn_mask_type": "padding_causal", "cu_seqlens_q": CU, "cu_seqlens_kv": CU},
    ),
    "both sides": (
        PACKED,
        PACKED,
        {"qkv_format": "thd", "cu_seqlens": CU, "max_seqlen": 10},
        {"attn_mask_type": "padding", **packed_by_hand()},
    ),
    "thd with causal": (
        PACKED,
        PACKED,
        {"attn_mask_type": "causal", **packed_by_hand()},
        {"attn_mask_type": "padding_causal", **packed_by_hand()},
    ),
    "thd with causal_bottom_right": (
        PACKED,
        (21, 2, 8),
        {"attn_mask_type": "causal_bottom_right", **flexattn.packed(LENGTHS, [9, 3, 9])},
        {
            "attn_mask_type": "padding_causal_bottom_right",
            **packed_by_hand(),
            "cu_seqlens_kv": torch.tensor([0, 9, 12, 21], dtype=torch.int32),
            "max_seqlen_kv": 9,
        },
    ),
    "window": (DENSE, DENSE, {"causal": True, "window_size": 5}, {"attn_mask_type": "causal", "window_size": (4, 0)}),
    "window of one key": (
        DENSE,
        LONG,
        {"attn_mask_type": "causal_bottom_right", "window_size": 1},
        {"attn_mask_type": "causal_bottom_right", "window_size": (0, 0)},
    ),
    "bias": (DENSE, LONG, {"bias": tokens(1, 4, 16, 24)}, {"bias": tokens(1, 4, 16, 24), "bias_type": "post_scale_bias"}),
    "slopes": (DENSE, DENSE, {"alibi_slopes": torch.ones(4)}, {"alibi_slopes": torch.ones(4), "bias_type": "alibi"}),
    "sink": (DENSE, DENSE, {"softmax_offset": tokens(4)}, {"softmax_offset": tokens(4), "softmax_type": "learnable"}),
    "bool mask": (DENSE, DENSE, {"mask": SEEN}, {"mask_mod": lambda b, h, i, j: SEEN[i, j]}),
    "bool mask of heads": (
        (2, 4, 16, 8),
        (2, 2, 16, 8),
        {"mask": SEEN.expand(4, 16, 16) & (torch.arange(4) < 3)[:, None, None], "qkv_format": "bhsd"},
        {"mask_mod": lambda b, h, i, j: SEEN[i, j] & (h < 3), "qkv_format": "bhsd"},
    ),
    "bool mask of keys": (DENSE, DENSE, {"mask": PADDING[:, None, None, :]}, {"mask_mod": lambda b, h, i, j: PADDING[b, j]}),
    "bool mask beside a mask_mod": (
        DENSE,
        DENSE,
        {"mask": SEEN, "mask_mod": mods.causal()},
        {"mask_mod": lambda b, h, i, j: SEEN[i, j] & (i >= j)},
    ),
    "bool mask beside a bias": (
        DENSE,
        DENSE,
        {"mask": SEEN, "bias": tokens(1, 1, 16, 16)},
        {"mask_mod": lambda b, h, i, j: SEEN[i, j], "bias": tokens(1, 1, 16, 16), "bias_type": "post_scale_bias"},
    ),
    "bool mask of packed sequences": (
        PACKED,
        PACKED,
        {"mask": SEEN[:10, :10], "causal": True, **flexattn.packed(LENGTHS)},
        {"mask_mod": lambda b, h, i, j: SEEN[i, j], "attn_mask_type": "padding_causal", **packed_by_hand()},
    ),
    "bool mask of pages": (
        DENSE,
        (4, 8, 2, 8),
        {"mask": SEEN, **PAGES},
        {"mask_mod": lambda b, h, i, j: SEEN[i, j], **PAGES},
    ),
    "float mask": (
        DENSE,
        DENSE,
        {"mask": tokens(16, 16)},
        {"bias": tokens(16, 16)[None, None], "bias_type": "post_scale_bias"},
    ),
    "float mask of packed sequences": (
        PACKED,
        PACKED,
        {"mask": tokens(3, 1, 10, 1), **flexattn.packed(LENGTHS)},
        {"bias": tokens(3, 1, 10, 1), "bias_type": "post_scale_bias", "attn_mask_type": "padding", **packed_by_hand()},
    ),
}


def leaves(q_shape: tuple[int, ...], k_shape: tuple[int, ...], needs_grad: bool = True) -> list[Tensor]:
    return [tokens(*shape, seed=i).requires_grad_(needs_grad) for i, shape in enumerate((q_shape, k_shape, k_shape))]


@pytest.mark.sample("name", "backend")
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_a_short_form_gives_what_the_long_one_gives(name: str, backend: str) -> None:
    if backend == "triton":
        pytest.importorskip("triton", reason="triton is not installed")
    q_shape, k_shape, short, written_out = FORMS[name]
    found = []
    for form in (short, written_out):
        qkv = leaves(q_shape, k_shape, "page_table" not in form)
        out = attention(*qkv, **form, backend=backend)
        if out.requires_grad:
            out.sum().backward()
        found.append([out, *(t.grad for t in qkv)])
    for a, b in zip(*found, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.parametrize("name", FORMS)
def test_other_functions_take_short_forms(name: str) -> None:
    """The functions explain, compile ahead or draw a call. A second and third call are found in the cache."""
    q_shape, k_shape, short, written_out = FORMS[name]
    qkv = leaves(q_shape, k_shape, False)
    (x, settings), (y, wanted) = bind_call(*qkv, **short), bind_call(*qkv, **written_out)
    assert settings._replace(mods="") == wanted._replace(mods="")
    assert (settings.mods == "") == (wanted.mods == "")
    assert (x.max_seqlen_q, x.max_seqlen_kv) == (y.max_seqlen_q, y.max_seqlen_kv)
    assert flexattn.explain(*qkv, **short, backend="eager").forward.backend == "eager"
    flexattn.warmup({"q": qkv[0], "k": qkv[1], "v": qkv[2], **short}, progress=False)
    call_cache.clear_cache()
    first = attention(*qkv, **short)
    for _ in range(2):
        assert torch.equal(attention(*qkv, **short), first)
    assert call_cache.cache_info()["hits"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "bool mask beside a mask_mod",
        *(
            pytest.param(name, marks=pytest.mark.exhaustive)
            for name in ("causal", "window", "both sides", "sink", "bool mask", "float mask")
        ),
    ],
)
def test_a_short_form_compiles_to_one_graph(name: str) -> None:
    q_shape, k_shape, short, _ = FORMS[name]
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attention(q, k, v, **short, return_lse=True)

    qkv = leaves(q_shape, k_shape)
    found, wanted = torch.compile(call, fullgraph=True, backend=counter)(*qkv), call(*qkv)
    assert counter.frame_count == 1
    assert type(found) is type(wanted) is flexattn.OutLse
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    "short",
    [
        pytest.param(lambda n: {"causal": True}, id="causal", marks=pytest.mark.exhaustive),
        pytest.param(lambda n: {"causal": True, "window_size": 3}, id="window", marks=pytest.mark.exhaustive),
        pytest.param(lambda n: {"mask": torch.ones(n, n, dtype=torch.bool).tril()}, id="bool mask", marks=pytest.mark.exhaustive),
        pytest.param(lambda n: {"mask": tokens(2, 1, 1, n)}, id="float mask", marks=pytest.mark.exhaustive),
        pytest.param(
            lambda n: {"mask": tokens(2, 1, n, n) > 0, "causal": True}, id="causal and a mask", marks=pytest.mark.exhaustive
        ),
        pytest.param(lambda n: {"causal": True, **flexattn.packed([n - 3, 3])}, id="packed"),
    ],
)
def test_a_new_length_compiles_no_more_than_once(short: Callable[[int], dict[str, Any]]) -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(attention, fullgraph=True, backend=counter)
    for n in (16, 21, 40):
        given = short(n)
        lead = () if "qkv_format" in given else (2,)
        q, k, v = (tokens(*lead, n, heads, 8, seed=heads) for heads in (4, 2, 2))
        assert torch.equal(compiled(q, k, v, **given), attention(q, k, v, **given))
    assert counter.frame_count == 2


def test_a_float_mask_gets_its_gradient() -> None:
    q, k, v = leaves(DENSE, DENSE)
    mask = tokens(4, 1, 16).requires_grad_()
    dout = tokens(*DENSE, seed=9)
    attention(q, k, v, mask=mask).backward(dout)
    found, mask.grad = mask.grad, None
    attention(q, k, v, bias=mask[None].expand(1, 4, 16, 16)).backward(dout)
    torch.testing.assert_close(found, mask.grad)


def test_a_mask_under_autocast_may_be_of_16_bits() -> None:
    q, k, v = leaves(DENSE, DENSE, False)
    mask = tokens(16, 16).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(attention(q, k, v, mask=mask), attention(q, k, v, bias=mask[None, None]))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"mask": SEEN, "block_mask": flexattn.create_block_mask(mods.causal(), None, None, 16, 16, "cpu", 16)},
            "mask is given with a block_mask",
        ),
        ({"mask": SEEN, "mask_mod": mods.causal}, "mask_mod is the function mods.causal itself"),
        ({"mask": SEEN, "mask_mod": mods.document(torch.zeros(2, 5).int())}, "document_ids has shape (2, 5)"),
        ({"mask": lambda b, h, i, j: i >= j}, "Pass a function as mask_mod=."),
        ({"mask": SEEN.tolist()}, "(list); accepted: a tensor of bool, torch.float32, with dims that broadcast to [2, 4, 16, 16]"),
        ({"mask": SEEN.double()}, "Convert it with mask.to(torch.float32)."),
        ({"mask": SEEN.expand(2, 16, 16)}, "Pass mask[:, None] if it is [batch, queries, keys]."),
        ({"mask": SEEN.to_sparse()}, "mask has layout torch.sparse_coo"),
        ({"mask": SEEN.to("meta")}, "mask is on meta and q is on cpu"),
        ({"cu_seqlens": CU, "cu_seqlens_kv": CU}, "cu_seqlens and cu_seqlens_kv are given"),
    ],
)
def test_short_forms_that_contradict_others_are_named(given: dict[str, Any], said: str) -> None:
    for call in (attention, flexattn.explain):
        with pytest.raises((TypeError, ValueError)) as e:
            call(*leaves(DENSE, DENSE), **given)
        assert said in str(e.value)


def test_a_call_that_was_found_right_does_not_excuse_one_that_is_not() -> None:
    """A call's key has short forms as they were passed, with their types."""
    q, k, v = leaves(DENSE, DENSE)
    for _ in range(3):
        attention(q, k, v, causal=True, window_size=1)
    for wrong in ({"causal": 1, "window_size": 1}, {"causal": True, "window_size": True}, {"window_size": 1}):
        with pytest.raises((TypeError, ValueError)):
            attention(q, k, v, **wrong)
    plain = attention(q, k, v)
    for _ in range(3):
        assert not torch.equal(attention(q, k, v, causal=True), plain)
        assert torch.equal(attention(q, k, v), plain)


def nested(*lengths: int) -> Tensor:
    return torch.nested.nested_tensor([tokens(n, 4, 8, seed=n) for n in lengths], layout=torch.jagged)


def test_causal_of_nested_tensors_needs_one_structure() -> None:
    q, other = nested(3, 5), nested(4, 5)
    found, wanted = attention(q, q, q, causal=True, return_lse=True), attention(q, q, q, attn_mask_type="causal")
    assert type(found) is flexattn.OutLse
    assert torch.equal(found.out.values(), wanted.values())
    with pytest.raises(ValueError, match="so two diagonals are possible"):
        attention(q, other, other, causal=True)
    with pytest.raises(ValueError, match="mask is given and q is nested"):
        attention(q, q, q, mask=SEEN)


def test_attention_backward_infers_types_and_takes_a_window_in_keys() -> None:
    q, k, v = leaves(DENSE, DENSE)
    bias = tokens(1, 4, 16, 16).requires_grad_()
    out, lse = attention(q, k, v, attn_mask_type="causal", window_size=5, bias=bias, return_lse=True)
    dout = tokens(*DENSE, seed=9)
    wanted = torch.autograd.grad(out, (q, k, v, bias), dout)
    found = flexattn.attention_backward(dout, q, k, v, out, lse, attn_mask_type="causal", window_size=5, bias=bias)
    for a, b in zip(found[:4], wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_packed_makes_the_arguments_of_a_packed_call() -> None:
    made, by_hand = flexattn.packed(LENGTHS), packed_by_hand()
    assert made.keys() == by_hand.keys()
    assert all(torch.equal(made[n], by_hand[n]) if isinstance(by_hand[n], Tensor) else made[n] == by_hand[n] for n in made)  # type: ignore[literal-required]
    assert made["cu_seqlens_q"] is made["cu_seqlens_kv"]
    assert flexattn.packed(torch.tensor(LENGTHS))["max_seqlen_q"] == 10
    assert flexattn.packed(array.array("i", LENGTHS))["max_seqlen_q"] == 10
    two = flexattn.packed([1, 2], [4, 3], device="meta")
    assert (two["max_seqlen_q"], two["max_seqlen_kv"], two["cu_seqlens_kv"].device.type) == (2, 4, "meta")


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: flexattn.packed([]), TypeError, "lengths is [] (list). Pass a list"),
        (lambda: flexattn.packed(3), TypeError, "lengths is 3 (int). Pass a list"),  # type: ignore[arg-type]
        (lambda: flexattn.packed("36"), TypeError, "lengths is '36' (str). Pass a list"),  # type: ignore[arg-type]
        (lambda: flexattn.packed([1.5]), TypeError, "lengths is [1.5] (list). Pass a list"),  # type: ignore[list-item]
        (lambda: flexattn.packed([3, -1]), ValueError, "lengths is [3, -1] (list). Pass lengths of 0 or more"),
        (lambda: flexattn.packed([2**31]), ValueError, "fewer than 2**31 tokens"),
        (lambda: flexattn.packed([1], [1, 2]), ValueError, "lengths has 1 sequences and lengths_kv has 2"),
        (lambda: flexattn.packed(torch.ones(2, device="meta")), TypeError, "reading a tensor waits"),
        (lambda: flexattn.packed([1], device="gpu"), ValueError, "device is 'gpu'; accepted: a torch.device"),
    ],
)
def test_packed_names_wrong_lengths(make: Callable[[], Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error) as e:
        make()
    assert said in str(e.value)


def test_one_error_lists_all_that_a_packed_call_lacks() -> None:
    x = tokens(*PACKED)
    with pytest.raises(ValueError, match=r"^cu_seqlens_q and cu_seqlens_kv are None with qkv_format 'thd'\. Pass an int32 tensor"):
        attention(x, x, x, qkv_format="thd")
    with pytest.raises(ValueError, match=r"^cu_seqlens_q, cu_seqlens_kv, max_seqlen_q and max_seqlen_kv are None"):
        attention(x, x, x, qkv_format="thd", bias=tokens(1, 1, 10, 10))
    with pytest.raises(
        ValueError, match=r"^cu_seqlens_kv is None with qkv_format 'thd' and cu_seqlens_q has dtype torch.int64\. Pass"
    ):
        attention(x, x, x, qkv_format="thd", cu_seqlens_q=CU.long())
    with pytest.raises(TypeError, match=r"^cu_seqlens_q and cu_seqlens_kv have dtype torch.int64; accepted: torch.int32"):
        attention(x, x, x, qkv_format="thd", cu_seqlens=CU.long(), max_seqlen=10)


def test_each_name_that_is_accepted_is_in_one_list() -> None:
    """The types of the signature are the lists that checks compare with, and every name in them is taken."""
    pairs = [(f"{a}_2{b}" if a != b else a) for a in spec.FORMATS for b in spec.FORMATS]
    assert sorted(get_args(spec.QkvFormat)) == sorted(pairs)
    for name in pairs:
        assert spec.parse_format(name)
    assert tuple(name for name in get_args(spec.BackendName) if name != "auto") == spec.BACKENDS
    for kind, names in ((spec.MaskType, spec.MASK_TYPES), (spec.BiasType, spec.BIAS_TYPES), (spec.SoftmaxType, spec.SOFTMAX_TYPES)):
        assert get_args(kind) == names


def test_results_have_names_and_are_trees() -> None:
    qkv = leaves(DENSE, DENSE)
    both = attention(*qkv, return_lse=True, return_max_logit=True)
    for _ in range(3):
        assert attention(*qkv, return_lse=True, return_max_logit=True)._fields == both._fields == ("out", "lse", "max_logit")
    assert attention(*qkv, return_max_logit=True)._fields == ("out", "max_logit")
    flat, tree = _pytree.tree_flatten(both)
    assert len(flat) == 3
    assert type(_pytree.tree_unflatten(flat, tree)) is flexattn.OutLseMaxLogit
    merged = flexattn.merge_attention(both.out, both.lse, both.out, both.lse)
    torch.testing.assert_close(merged.out, both.out)


def test_the_package_shows_what_users_call() -> None:
    shown = {name for name in dir(flexattn) if not name.startswith("_")}
    assert shown - {"jax"} == {*flexattn.__all__, "distributed", "integrations", "testing"}
    assert "functional" not in shown
    assert flexattn.integrations.sdpa.scaled_dot_product_attention
    assert "sdpa" in dir(flexattn.integrations)
    with pytest.raises(AttributeError, match="no attribute 'sdp'"):
        flexattn.integrations.sdp  # noqa: B018
