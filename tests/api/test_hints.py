"""Calls with the names of other libraries: each error names the library and the replacement, and the signature does not change."""

from __future__ import annotations

import inspect
import pickle
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing

import flexattn
from flexattn import hints, mods, warn
from flexattn.functional import bind_call
from flexattn.testing import make_inputs

Q = torch.randn(2, 5, 4, 16)
CU = torch.tensor([0, 5, 10], dtype=torch.int32)
OWN = inspect.signature(flexattn.attention)

# Names after q, k and v in the signatures of these libraries that `attention` does not have.
FOREIGN = {
    "flash_attn_func": "return_attn_probs",
    "flash_attn_varlen_func": "cu_seqlens_k max_seqlen_k return_attn_probs block_table",
    "flash_attn_with_kvcache": "rotary_cos rotary_sin cache_seqlens block_table rotary_interleaved return_softmax_lse",
    "FlashAttention 3": "q_descale k_descale v_descale seqused_k num_splits pack_gqa sm_margin",
    "FlashAttention 4": "learnable_sink num_splits pack_gqa score_mod_bwd aux_tensors",
    "scaled_dot_product_attention": "query key value attn_mask is_causal scale enable_gqa",
    "flex_attention": "query key value scale enable_gqa kernel_options",
    "varlen_attn": "query key value cu_seq_q cu_seq_k max_q max_k scale enable_gqa seqused_k block_table num_splits",
    "MultiheadAttention": "query key value key_padding_mask need_weights attn_mask is_causal",
    "DotProductAttention": "query_layer key_layer value_layer attention_mask core_attention_bias_type core_attention_bias",
    "fused_attn_fwd": "attn_bias attn_bias_type attn_scale dropout qkv_layout layout rng_gen",
    "TransformerEngine's layer": "attention_dropout score_mod_bprop",
    "memory_efficient_attention": "query key value attn_bias p scale op",
    "jax.nn.dot_product_attention": "query key value scale is_causal query_seq_lengths key_value_seq_lengths implementation "
    "local_window_size return_residual",
    "cuDNN's sdpa": "attn_scale use_alibi_mask use_padding_mask seq_len_q seq_len_kv use_causal_mask use_causal_mask_bottom_right "
    "sliding_window_length diagonal_alignment diagonal_band_left_bound diagonal_band_right_bound dropout paged_attention_k_table "
    "paged_attention_v_table generate_stats sink_token use_deterministic_algorithm",
    "transformers": "attention_mask scaling sliding_window s_aux cu_seq_lens_q cu_seq_lens_k max_length_q max_length_k "
    "position_bias output_attentions",
    "FlashInfer": "sm_scale logits_soft_cap window_left",
    "SageAttention": "tensor_layout sm_scale",
}


@pytest.mark.parametrize("whose", FOREIGN)
def test_foreign_name_raises_what_is_ours(whose: str) -> None:
    for name in FOREIGN[whose].split():
        with pytest.raises(TypeError, match=rf"^attention\(\) has no argument '{name}', the name in .*\. .*\.$"):
            flexattn.attention(Q, Q, Q, **{name: None})  # type: ignore[call-overload]


def test_no_own_name_is_foreign_and_each_hint_names_what_is_there() -> None:
    assert hints._HINT_OF.keys() & OWN.parameters.keys() == {"mask"}  # flexattn.jax.attention has none
    assert sum(len(hint.names) for hint in hints.HINTS) == len(hints._HINT_OF)
    for hint in hints.HINTS:
        assert hint.ours.startswith("nothing") or {*re.findall(r"\w+", hint.ours)} & {*OWN.parameters}, hint


def test_values_in_hints_are_accepted() -> None:
    """If a hint gives an argument a value, such as attn_mask_type='causal', `attention` accepts that value."""
    written = {pair for hint in hints.HINTS for pair in re.findall(r"(\w+)='(\w+)'", hint.ours)}
    beside = {
        "padding": {"cu_seqlens_q": CU, "cu_seqlens_kv": CU},
        "post_scale_bias": {"bias": Q.new_zeros(1, 1, 5, 5)},
        "learnable": {"softmax_offset": Q.new_zeros(4)},
    }
    assert len(written) >= 4
    for name, value in written:
        flexattn.explain(Q, Q, Q, **{name: value}, **beside.get(value, {}))


def test_all_foreign_names_of_a_call_are_named() -> None:
    with pytest.raises(TypeError) as e:
        flexattn.attention(query=Q, key=Q, value=Q, is_causal=True, softcap=1.0)  # type: ignore[call-overload]
    for name in ("query", "key", "value", "is_causal"):
        assert f"no argument {name!r}" in str(e.value)
    assert "softcap" not in str(e.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("softmaxscale", "Did you mean softmax_scale"),
        ("zzz", r"help\(flexattn.attention\) lists its arguments"),
        ("attention_mask", "the name in transformers and TransformerEngine. Use mask, a bool tensor whose True is a key"),
        ("lengths", r"the name in other code. Use \*\*flexattn.packed\(lengths\)"),
    ],
)
def test_unknown_name_says_what_is_there(name: str, said: str) -> None:
    with pytest.raises(TypeError, match=f"no argument {name!r}[.,] {said}"):
        flexattn.attention(Q, Q, Q, **{name: 1})  # type: ignore[call-overload]


BY_POSITION: dict[str, tuple[tuple[Any, ...], list[str]]] = {
    "flash_attn_func": (
        (0.0, 0.25, True),
        ["0.0 (float)", "FlashAttention's order", "dropout_p=; softmax_scale=; for causal: causal=True"],
    ),
    "flash_attn_varlen_func": (
        (CU, CU, 5, 5),
        ["FlashAttention's order", "cu_seqlens_q=; for cu_seqlens_k: cu_seqlens_kv; max_seq"],
    ),
    "sdpa, bool": (
        (torch.ones(5, 5).bool(),),
        ["torch.bool tensor of shape (5, 5)", "SDPA's order", "for attn_mask: mask"],
    ),
    "sdpa, float": ((torch.ones(5),), ["SDPA's order", "a float tensor that is added"]),
    "sdpa, causal": ((None, 0.0, True), ["SDPA's order", "dropout_p=; for is_causal: causal=True"]),
    "flex_attention": ((lambda s, b, h, i, j: s,), ["FlexAttention's order these are score_mod="]),
    "too many": (tuple(range(20)), ["0 (int), 1 (int), 2 (int), ... after them. Pass all others by name"]),
    "None": ((None,), ["Pass all others by name"]),
    "packed": ((flexattn.packed([5, 5]),), ["(dict) after them. Pass its items by name: attention(q, k, v, **arguments)"]),
    "a format": (("bhsd",), ["'bhsd' (str) after them. Pass all others by name"]),
}


@pytest.mark.parametrize("order", BY_POSITION)
def test_call_by_position_names_its_arguments(order: str) -> None:
    positional, said = BY_POSITION[order]
    for call in (flexattn.attention, bind_call):
        with pytest.raises(TypeError) as e:
            call(Q, Q, Q, *positional)  # type: ignore[call-overload, operator]
        assert all(part in str(e.value) for part in said), str(e.value)


def test_explain_and_bound_calls_give_the_same_hints() -> None:
    with pytest.raises(TypeError, match="no argument 'is_causal'"):
        flexattn.explain(Q, Q, Q, is_causal=True)
    with pytest.raises(TypeError, match="missing a required argument: 'k'"):
        bind_call(Q)
    for call in (flexattn.attention, flexattn.explain):
        with pytest.raises(TypeError, match="v is None"):
            call(Q, Q)  # type: ignore[operator]


def test_signature_is_that_of_right_calls() -> None:
    kinds = {p.kind for p in OWN.parameters.values()}
    assert kinds == {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
    assert list(OWN.parameters)[:4] == ["q", "k", "v", "qkv_format"]
    with pytest.raises(TypeError, match="missing a required argument"):
        OWN.bind(Q, Q)
    assert inspect.getfullargspec(flexattn.attention).varkw is None
    assert pickle.loads(pickle.dumps(flexattn.attention)) is flexattn.attention


@pytest.mark.slow
def test_compiled_call_is_one_graph_and_its_hint_the_same() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(flexattn.attention, fullgraph=True, backend=counter)
    for _ in range(2):
        assert torch.equal(compiled(Q, Q, Q, attn_mask_type="causal"), flexattn.attention(Q, Q, Q, attn_mask_type="causal"))
    assert counter.frame_count == 1
    with pytest.raises(TypeError, match="no argument 'is_causal'"):
        torch.compile(flexattn.attention, backend=counter)(Q, Q, Q, is_causal=True)  # type: ignore[call-overload]


def test_function_with_hints_keeps_its_signature() -> None:
    @hints.with_hints
    def attend(q: int, k: int, v: int, *, softmax_scale: float = 1.0) -> float:
        return q * k * v * softmax_scale

    assert attend(2, 3, 4, softmax_scale=0.5) == 12
    assert str(inspect.signature(attend)).startswith("(q: 'int', k: 'int', v: 'int', *, softmax_scale:")
    with pytest.raises(TypeError, match="no argument 'scale'"):
        attend(2, 3, 4, scale=0.5)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="for causal: "):
        attend(2, 3, 4, 0.0, 0.5, True)  # type: ignore[call-arg, misc]
    with pytest.raises(TypeError, match="missing a required argument"):
        attend(2, 3)  # type: ignore[call-arg]


def causal_calls() -> dict[str, tuple[bool, Callable[[], Any]]]:
    """Returns calls, and whether each warns of one query that sees only the first key."""
    one, many = Q[:, :1], Q
    lengths_q, lengths_kv = torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([0, 5, 8], dtype=torch.int32)
    packed = make_inputs("thd", lengths_q=(1, 1), lengths_kv=(5, 3))._asdict()

    def call(q: Any, k: Any, **arguments: Any) -> Callable[[], Any]:
        return lambda: flexattn.attention(q, k, k, **arguments)

    lengths = {"cu_seqlens_q": lengths_q, "cu_seqlens_kv": lengths_kv}
    return {
        "causal": (True, call(one, many, attn_mask_type="causal")),
        "padding_causal": (True, call(one, many, attn_mask_type="padding_causal", **lengths)),
        "packed": (True, lambda: flexattn.attention(**packed, attn_mask_type="padding_causal")),
        "bottom right": (False, call(one, many, attn_mask_type="causal_bottom_right")),
        "no mask": (False, call(one, many)),
        "one key": (False, call(one, one, attn_mask_type="causal")),
        "many queries": (False, call(many, many, attn_mask_type="causal")),
        "two queries": (False, call(Q[:, :2], many, attn_mask_type="causal")),
    }


@pytest.mark.parametrize("name", causal_calls())
def test_one_query_that_sees_the_first_key_alone_warns_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warn, "_warned", set())
    warns, call = causal_calls()[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
        call()
    assert len(caught) == warns
    if warns:
        assert "_bottom_right'" in str(caught[0].message)
        assert caught[0].filename == __file__  # the line that called, none of ours


SWAPPED: dict[str, tuple[bool, tuple[int, ...], tuple[int, ...], dict[str, str]]] = {  # shapes of q, and of k and v
    "heads and tokens swapped": (True, (2, 8, 1024, 16), (2, 8, 1024, 16), {}),
    "cross-attention with heads and tokens swapped": (True, (2, 8, 129, 16), (2, 4, 129, 16), {}),
    "the format that the tensors have": (False, (2, 8, 1024, 16), (2, 8, 1024, 16), {"qkv_format": "bhsd"}),
    "a step of decoding": (False, (2, 1, 256, 16), (2, 1, 256, 16), {}),
    "a step of decoding behind others": (False, (2, 1, 256, 16), (2, 7, 256, 16), {}),
    "a few queries behind others": (False, (2, 4, 256, 16), (2, 7, 256, 16), {}),
    "a short prompt": (False, (2, 5, 96, 16), (2, 5, 96, 16), {}),
    "a short prompt of a model with 128 heads": (False, (2, 5, 128, 16), (2, 5, 128, 16), {}),
    "grouped heads": (False, (2, 5, 256, 16), (2, 5, 8, 16), {}),
    "as many tokens as heads": (False, (2, 256, 256, 16), (2, 256, 256, 16), {}),
}


@pytest.mark.parametrize("name", SWAPPED)
def test_heads_in_the_place_of_tokens_warn_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warn, "_warned", set())
    warns, q_shape, k_shape, arguments = SWAPPED[name]
    q, k = torch.zeros(q_shape, device="meta"), torch.zeros(k_shape, device="meta")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            flexattn.attention(q, k, k, **arguments)  # type: ignore[call-overload]
    assert len(caught) == warns
    if warns:
        assert "pass qkv_format='bhsd'" in str(caught[0].message)
        assert caught[0].filename == __file__


def test_heads_with_a_head_dim_of_their_own_for_v_do_not_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A latent model has as many heads of keys as of queries, and another head dim for v."""
    monkeypatch.setattr(warn, "_warned", set())
    q, v = torch.zeros(1, 9, 256, 24, device="meta"), torch.zeros(1, 9, 256, 16, device="meta")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flexattn.attention(q, q, v)


@pytest.mark.slow
def test_mods_are_there_after_import_flexattn() -> None:
    code = "import flexattn; print(flexattn.mods.causal().__name__)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "_causal\n"
    assert "mods" in flexattn.__all__


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"mask_mod": mods.causal}, "mask_mod is the function mods.causal itself; accepted: its result, mods.causal()"),
        ({"mask_mod": mods.sliding_window}, "accepted: its result, mods.sliding_window(left, right)"),
        ({"score_mod": mods.softcap}, "score_mod is the function mods.softcap itself"),
        ({"score_mod": mods.causal()}, "score_mod is a mask_mod of flexattn.mods; accepted: a score_mod; pass this as mask_mod"),
        ({"mask_mod": mods.softcap(2.0)}, "mask_mod is a score_mod of flexattn.mods"),
        (
            {"mask_mod": mods.document(torch.zeros(2, 5).int()), "score_mod": mods.document(torch.zeros(5).int())},
            "score_mod is a mask",
        ),
    ],
)
def test_mod_in_the_wrong_place_is_named(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError) as e:
        flexattn.attention(Q, Q, Q, **arguments)
    assert said in str(e.value)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: mods.both(mods.causal), "mask_mods[0] of mods.both() is the function mods.causal itself"),
        (lambda: mods.either(mods.causal(), mods.softcap(2.0)), "mask_mods[1] of mods.either() is a score_mod"),
        (lambda: mods.alibi(4), "slopes is 4 (int); accepted: a tensor"),
        (lambda: mods.document([0, 1]), "document_ids is [0, 1] (list); accepted: a tensor"),
        (lambda: mods.prefix_lm(3), "prefix_lengths is 3 (int); accepted: a tensor"),
        (lambda: mods.relative_bias(torch.ones(32, 4), bidirectional=1), "bidirectional is 1 (int); accepted: True, False"),
    ],
)
def test_functions_of_mods_name_a_wrong_argument(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(TypeError) as e:
        make()
    assert said in str(e.value)
