"""flexattn's functions in transformers' tables: names, masks of each kind, compilation, checkpointing, continuous batching."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", reason="transformers is not installed, whose tables these functions stand in")

from torch.nn.attention.flex_attention import create_block_mask  # noqa: E402
from transformers import masking_utils  # noqa: E402

from flexattn.integrations.transformers import attention_forward, attention_mask, paged_attention_forward, register  # noqa: E402
from flexattn.integrations.transformers.masks import (  # noqa: E402
    Pattern,
    Visible,
    recognize,
)
from tests.support.transformers_models import (  # noqa: E402
    DECODERS,
    REFERENCE,
    SIZES,
    VOCABULARY,
    config,
    decoder,
    make,
    register_both,
)

ROOT = Path(__file__).parents[2]
B, H, H_KV, S, D = 2, 4, 2, 24, 8
EXACT = {"atol": 1e-12, "rtol": 0.0}
TOLERANCE = {"atol": 2e-6, "rtol": 0.0}  # models round norms to float32
TOKENS = torch.randint(3, VOCABULARY, (2, S), generator=torch.Generator().manual_seed(1))
POSITIONS = torch.cat([torch.arange(n) for n in (9, 2, 13)])[None].expand(2, -1)


def _qkv(dtype: torch.dtype = torch.float64, sq: int = S) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((B, H, sq, D), (B, H_KV, S, D), (B, H_KV, S, D))
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes)  # type: ignore[return-value]


class _Layer(torch.nn.Module):
    is_causal = True


def _ours(qkv: tuple[Tensor, Tensor, Tensor], mask: Any = None, **options: Any) -> Tensor:
    return attention_forward(_Layer(), *qkv, mask, **options)[0]


def _dense(qkv: tuple[Tensor, Tensor, Tensor], seen: Tensor | None, bias: Tensor | None = None) -> Tensor:
    q, k, v = qkv[0], *(x.repeat_interleave(H // H_KV, 1) for x in qkv[1:])
    scores = q @ k.mT / D**0.5
    scores = scores if bias is None else scores + bias
    scores = scores if seen is None else scores.masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def _same_with_gradients(got: Tensor, wanted: Tensor, inputs: tuple[Tensor, ...]) -> None:
    torch.testing.assert_close(got, wanted, **EXACT)
    gradients = (torch.autograd.grad(out.square().sum(), inputs) for out in (got, wanted))
    torch.testing.assert_close(*gradients, **EXACT)


CAUSAL = torch.ones(S, S, dtype=torch.bool).tril()


def test_both_functions_stand_under_the_name_and_the_paged_one_beside_them() -> None:
    register("flexattn_again")
    attentions, masks = transformers.AttentionInterface(), transformers.AttentionMaskInterface()
    assert attentions["flexattn_again"] is attention_forward
    assert masks["flexattn_again"] is attention_mask
    assert attentions["paged|flexattn_again"] is paged_attention_forward


@pytest.mark.parametrize("name", ["", "sdpa", "eager", "flex_attention", "flash_flexattn", "me/flexattn", "paged|flexattn", "a:b"])
def test_a_name_that_transformers_reads_otherwise_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"name is '{re.escape(name)}'.*accepted: a name without 'flash'"):
        register(name)


def test_registering_without_transformers_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masking_utils, "sdpa_mask", lambda batch_size, cache_position: None)
    with pytest.raises(ImportError, match=r'version has another mask interface.*pip install "transformers>='):
        register()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r'transformers cannot be imported.*pip install "transformers>='):
        register()


def _function(name: str) -> Callable[..., Any]:
    packed = (POSITIONS == 0).cumsum(1)
    return {
        "causal": masking_utils.causal_mask_function,
        "bidirectional": masking_utils.bidirectional_mask_function,
        "window": masking_utils.sliding_window_causal_mask_function(5),
        "bidirectional window": masking_utils.sliding_window_bidirectional_mask_function(5),
        "packed": masking_utils.and_masks(
            masking_utils.sliding_window_causal_mask_function(5), masking_utils.packed_sequence_mask_function(packed)
        ),
        "chunks": masking_utils.chunked_causal_mask_function(8, torch.tensor([3, 0])),
        "blocks": masking_utils.or_masks(masking_utils.causal_mask_function, masking_utils.blockwise_overlay(packed % 2 - 1)),
        "own": masking_utils.and_masks(masking_utils.causal_mask_function, lambda b, h, i, j: (i - j) % 3 != 1),
    }[name]


RECOGNIZED: dict[str, tuple[int | None, int | None] | None] = {
    "causal": (None, 0),
    "bidirectional": (None, None),
    "window": (4, 0),
    "bidirectional window": (5, 5),
    "packed": (4, 0),
    "chunks": None,
    "blocks": None,
    "own": None,
}


@pytest.mark.parametrize("name", RECOGNIZED)
def test_recognized_patterns_are_those_of_transformers_own_functions(name: str) -> None:
    pattern = recognize(_function(name))
    assert (pattern and pattern[:2]) == RECOGNIZED[name]
    assert (pattern is not None and pattern.sequences is not None) == (name == "packed")


@pytest.mark.sample("name", "padded")
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("offsets", [(0, 0), (11, 0), (40, 27)])
@pytest.mark.parametrize("name", RECOGNIZED)
def test_a_mask_shows_the_keys_that_sdpas_shows(name: str, offsets: tuple[int, int], padded: bool) -> None:
    """Whole prompts, later pieces of them, and pieces over a sliding cache, whose keys come from the middle."""
    if name in ("packed", "blocks") and offsets != (0, 0):
        pytest.skip("transformers packs only without a cache, and gives blocks by position")
    q_offset, kv_offset = offsets
    sq = S - (q_offset - kv_offset)
    padding = torch.ones(B, kv_offset + S, dtype=torch.bool)
    padding[0, : kv_offset + 4] = False
    options: dict[str, Any] = {
        "mask_function": _function(name),
        "attention_mask": padding if padded and name != "packed" else None,
        "allow_is_bidirectional_skip": True,
        "use_vmap": name == "own",
    }
    place = (B, sq, S, q_offset, kv_offset)
    mask = attention_mask(*place, **options)
    seen = masking_utils.sdpa_mask(*place, **options | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
    assert isinstance(mask, Visible)  # no booleans for every query and key
    qkv = _qkv(sq=sq)
    layer = _Layer()
    layer.is_causal = not name.startswith("bidirectional")
    got = attention_forward(layer, *qkv, mask)[0]
    row_sees = seen.any(-1).expand(B, 1, sq)[:, 0]
    wanted = _dense(qkv, seen | ~row_sees[:, None, :, None])
    _same_with_gradients(got[row_sees], wanted[row_sees], qkv)
    assert not got[~row_sees].any()


@pytest.mark.parametrize("case", ["padding", "ids that return", "ids that fall", "queries behind a cache"])
def test_tokens_of_one_id_see_each_other(case: str) -> None:
    ids = torch.arange(S).expand(B, S) // 5
    ids = {"ids that return": ids % 2, "ids that fall": -ids}.get(case, ids)
    sq = 6 if case == "queries behind a cache" else S
    options: dict[str, Any] = {"attention_mask": torch.arange(S) < torch.tensor([[9], [S]])} if case == "padding" else {}
    options["mask_function"] = masking_utils.packed_sequence_mask_function(ids)
    mask = attention_mask(B, sq, S, S - sq, **options)
    assert isinstance(mask, Visible)
    assert (mask.packed is None) == (case != "ids that fall")
    seen = masking_utils.sdpa_mask(B, sq, S, S - sq, **options, allow_is_causal_skip=False)
    row_sees = seen.any(-1)[:, 0]
    qkv = _qkv(sq=sq)
    got, wanted = _ours(qkv, mask), _dense(qkv, seen | ~row_sees[:, None, :, None])
    _same_with_gradients(got[row_sees], wanted[row_sees], qkv)


@pytest.mark.parametrize("agrees", [False, True])
def test_offsets_separate_tokens_in_addition_to_a_mask_of_packed_sequences(agrees: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.arange(S).expand(B, S) // 8
    function = masking_utils.packed_sequence_mask_function(ids)
    mask = attention_mask(B, S, S, mask_function=function)
    seen = masking_utils.sdpa_mask(B, S, S, mask_function=function, allow_is_causal_skip=False)
    offsets = torch.arange(0, B * S + 1, 8 if agrees else 12, dtype=torch.int32)
    same = torch.bucketize(torch.arange(B * S), offsets[1:], right=True).view(B, S)
    qkv = _qkv()
    if agrees:  # one packed call, without a mask function
        monkeypatch.setattr("flexattn.integrations.transformers.forward._separate", None)
    for _ in range(2):  # layers
        got = _ours(qkv, mask, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets, max_length_q=12, max_length_k=12)
        _same_with_gradients(got, _dense(qkv, seen & (same[:, None, :, None] == same[:, None, None])), qkv)


@pytest.mark.parametrize("name", ["causal", "window", "own"])
def test_a_static_cache_hides_the_slots_that_nothing_was_written_to(name: str) -> None:
    options = {"mask_function": _function(name), "use_vmap": name == "own"}
    for q_length in (1, 6):
        place = (B, q_length, S, torch.tensor(9), 0)
        mask = attention_mask(*place, **options)
        seen = masking_utils.sdpa_mask(*place, **options, allow_is_causal_skip=False)
        qkv = _qkv(sq=q_length)
        _same_with_gradients(_ours(qkv, mask), _dense(qkv, seen), qkv)
        assert isinstance(mask, Tensor) == (q_length == 1)


def test_one_query_over_all_keys_needs_no_mask() -> None:
    padding = torch.ones(B, S, dtype=torch.bool)
    window = masking_utils.sliding_window_causal_mask_function(S)
    for mask in (
        attention_mask(B, 1, S, S - 1, 0, attention_mask=padding),
        attention_mask(B, 1, S, 40, 41 - S, mask_function=window, local_size=S),
    ):
        assert isinstance(mask, Visible)
        assert (mask.band, mask.mask_mod, mask.packed) == (("causal_bottom_right", (-1, 0)), None, None)
    narrower = masking_utils.sliding_window_causal_mask_function(S - 1)
    mask = attention_mask(B, 1, S, 40, 41 - S, mask_function=narrower, local_size=S - 1)
    qkv = _qkv(sq=1)
    _same_with_gradients(_ours(qkv, mask), _dense(qkv, torch.arange(S) > 0), qkv)


@pytest.mark.parametrize(("name", "q_offset"), [("bidirectional window", 0), ("causal", 20), ("window", 16)])
def test_a_diagonal_that_does_not_end_at_the_last_key_stays_where_it_is(name: str, q_offset: int) -> None:
    options: dict[str, Any] = {"mask_function": _function(name), "allow_is_bidirectional_skip": True}
    place = (B, 10, S, q_offset, 0)
    seen = masking_utils.sdpa_mask(*place, **options | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
    qkv = _qkv(sq=10)
    _same_with_gradients(_ours(qkv, attention_mask(*place, **options)), _dense(qkv, seen), qkv)


def test_a_model_that_computes_with_its_mask_gets_a_tensor() -> None:
    mask = attention_mask(B, S, S, allow_is_causal_skip=False)
    assert isinstance(mask, Tensor)
    assert torch.equal(mask, CAUSAL.expand(B, 1, S, S))


def test_taking_a_mask_apart_is_refused() -> None:
    mask: Any = attention_mask(B, S, S, mask_function=_function("window"))
    with pytest.raises(TypeError, match=r"attention_mask\[3\]: this model computes with its mask.*accepted: attn_implementation="):
        mask[3]
    with pytest.raises(AttributeError, match=r"attention_mask\.dtype: this model computes with its mask"):
        mask.dtype  # noqa: B018
    assert attention_mask(B, S, S, attention_mask=mask) is mask  # generate() makes it so, and the model asks again
    assert mask.contiguous() is mask
    with pytest.raises(TypeError, match=r"attention_mask\.to\(torch\.float32\): this model computes with its mask"):
        mask.to(torch.float32)


def test_a_mask_follows_a_model_to_its_next_device() -> None:
    padding = torch.ones(B, S, dtype=torch.bool)
    padding[0, :3] = False
    packed = {"mask_function": _function("packed")}
    for options in ({"attention_mask": padding}, packed, {"mask_function": _function("chunks"), "attention_mask": padding}):
        mask = attention_mask(B, S, S, **options)
        assert isinstance(mask, Visible)
        moved = mask.to("meta", non_blocking=True)
        tensors = [moved.padding, moved.packed and moved.packed.cu_seqlens]
        assert [x.device.type for x in tensors if x is not None] == ["meta"]
        qkv = _qkv()
        torch.testing.assert_close(_ours(qkv, mask.to(torch.device("cpu"))), _ours(qkv, mask), atol=0.0, rtol=0.0)


def test_a_mask_for_other_lengths_is_refused() -> None:
    """A model may add keys after its mask was made."""
    with pytest.raises(ValueError, match="made for 24 queries and 23 keys but comes with 24 and 24; accepted: equal"):
        _ours(_qkv(), attention_mask(B, S, S - 1))


def test_masks_of_the_caller_are_the_whole_mask() -> None:
    generator = torch.Generator().manual_seed(5)
    for shape in ((B, 1, S, S), (1, H, S, S + 3), (1, 1, 1, S)):
        seen = torch.rand(shape, generator=generator) > 0.4
        seen[..., 0] = True
        qkv = _qkv()
        _same_with_gradients(_ours(qkv, seen, sliding_window=2), _dense(qkv, seen[..., :S]), qkv)
        bias = torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        position_bias = torch.randn(1, H, S, S, generator=generator, dtype=torch.float64).requires_grad_()
        got = _ours(qkv, bias, position_bias=position_bias)
        _same_with_gradients(got, _dense(qkv, None, bias[..., :S] + position_bias), (*qkv, bias, position_bias))
    blocks = create_block_mask(lambda b, h, i, j: j <= i, None, None, S, S, device="cpu")
    qkv = _qkv()
    _same_with_gradients(_ours(qkv, blocks), _dense(qkv, CAUSAL), qkv)


def test_arguments_hold_where_there_is_no_mask() -> None:
    qkv = _qkv()
    distance = torch.arange(S)[:, None] - torch.arange(S)
    _same_with_gradients(_ours(qkv), _dense(qkv, CAUSAL), qkv)
    _same_with_gradients(_ours(qkv, is_causal=False), _dense(qkv, None), qkv)
    _same_with_gradients(_ours(qkv, sliding_window=5), _dense(qkv, CAUSAL & (distance < 5)), qkv)
    _same_with_gradients(_ours(qkv, is_causal=False, sliding_window=5), _dense(qkv, distance.abs() < 5), qkv)


@pytest.mark.parametrize("kind", ["none", "window", "position_bias", "tensor", "own"])
def test_cu_seq_lens_keep_sequences_apart_on_top_of_any_mask(kind: str) -> None:
    starts = torch.tensor([0, 9, 11, S, S + 5, 2 * S])  # int64, of both rows, from transformers' collator
    ids = torch.bucketize(torch.arange(2 * S), starts[1:], right=True).view(2, S)
    seen = CAUSAL & (ids[:, None, :, None] == ids[:, None, None])
    lengths = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": torch.tensor(19), "max_length_k": 19}
    qkv, bias = _qkv(), None
    mask: Any = None
    if kind in ("window", "own"):
        mask = attention_mask(B, S, S, mask_function=_function(kind), use_vmap=kind == "own")
        seen = seen & masking_utils.sdpa_mask(B, S, S, mask_function=_function(kind), allow_is_causal_skip=False)
    elif kind == "tensor":
        mask = CAUSAL.expand(B, 1, S, S)
    elif kind == "position_bias":
        bias = torch.randn(1, H, S, S, dtype=torch.float64)
    _same_with_gradients(_ours(qkv, mask, position_bias=bias, **lengths), _dense(qkv, seen, bias), qkv)


def test_the_result_is_contiguous_as_some_models_view_it() -> None:
    for mask in (None, CAUSAL.expand(B, 1, S, S)):
        assert _ours(_qkv(), mask).is_contiguous()


def test_wrong_arguments_are_named() -> None:
    qkv = _qkv()
    with pytest.raises(ValueError, match=r"attention_mask is a tensor \[2, 24\].*register the mask function too"):
        _ours(qkv, torch.ones(B, S, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"attention_mask is a tensor \[2, 1, 24, 23\] with queries \[2, 4, 24\] and 24 keys"):
        _ours(qkv, torch.ones(B, 1, S, S - 1, dtype=torch.bool))
    with pytest.raises(TypeError, match="attention_mask is a dict; accepted"):
        _ours(qkv, {})
    with pytest.raises(ValueError, match="cu_seq_lens_k is missing; accepted: cu_seq_lens_q and cu_seq_lens_k together"):
        _ours(qkv, cu_seq_lens_q=torch.tensor([0, 2 * S]))
    blocks = create_block_mask(lambda b, h, i, j: j <= i, None, None, S, S, device="cpu")
    with pytest.raises(ValueError, match="a BlockMask and comes with cu_seq_lens_q and cu_seq_lens_k; accepted: one of the two"):
        _ours(qkv, blocks, cu_seq_lens_q=torch.tensor([0, 2 * S]), cu_seq_lens_k=torch.tensor([0, 2 * S]))
    with pytest.raises(ValueError, match=r"accepted: the cache of model\.generate_batch\(\)"):
        paged_attention_forward(_Layer(), *qkv, None)
    with pytest.warns(RuntimeWarning, match="output_attentions=True: flexattn never computes the softmax weights"):
        _ours(qkv, output_attentions=True)


def test_autocast_runs_in_its_dtype() -> None:
    qkv = _qkv(torch.float32)
    mixed = (qkv[0], qkv[1].bfloat16(), qkv[2])
    with torch.autocast("cpu", torch.bfloat16):
        got = _ours(mixed)
    assert got.dtype == torch.bfloat16
    rounded = tuple(x.bfloat16() for x in qkv)
    torch.testing.assert_close(got, _ours(rounded), atol=0.0, rtol=0.0)  # type: ignore[arg-type]


def test_dropout_drops_in_training_and_not_in_evaluation() -> None:
    qkv = _qkv()
    torch.manual_seed(0)
    assert not torch.allclose(_ours(qkv, dropout=0.5), _ours(qkv))
    register_both()
    entries = SIZES | {"attn_pdrop": 0.5, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    model = make(transformers.AutoModelForCausalLM, config("GPT2Config", entries), "flexattn")
    with torch.no_grad():
        quiet = [model(TOKENS, use_cache=False).logits for _ in range(2)]
        model.train()
        noisy = [model(TOKENS, use_cache=False).logits for _ in range(2)]
    assert torch.equal(*quiet)
    assert not torch.allclose(*noisy)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_gradient_checkpointing_changes_no_gradient(name: str) -> None:
    register_both()
    found = []
    for checkpointing in (True, False):
        model = make(transformers.AutoModelForCausalLM, config(*DECODERS[name]), "flexattn").train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(TOKENS, position_ids=POSITIONS, use_cache=False).logits.square().mean().backward()
        found.append({key: weight.grad for key, weight in model.named_parameters()})
    torch.testing.assert_close(*found, **EXACT)


def _compiled(model: Any, backend: str = "aot_eager") -> tuple[Any, Any]:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    return torch.compile(model, fullgraph=True, backend=counter), counter


@pytest.mark.slow
@torch.no_grad()
def test_a_model_compiles_whole_and_packed_sequences_stay_apart() -> None:
    register_both()
    settings = config("LlamaConfig", DECODERS["llama"][1] | {"num_hidden_layers": 1})
    model, reference = (make(transformers.AutoModelForCausalLM, settings, name) for name in ("flexattn", REFERENCE))
    compiled, counter = _compiled(model, "eager")
    for length in (17, 20, 23):
        tokens = TOKENS[:, :length]
        torch.testing.assert_close(compiled(tokens, use_cache=False).logits, reference(tokens, use_cache=False).logits, **TOLERANCE)
    assert counter.frame_count == 2  # the first length, and all others
    packed = {"position_ids": POSITIONS, "use_cache": False}
    torch.testing.assert_close(compiled(TOKENS, **packed).logits, reference(TOKENS, **packed).logits, **TOLERANCE)


@pytest.mark.exhaustive
@pytest.mark.sample(values=False)
@pytest.mark.parametrize("name", ["gemma2", "gpt2"])
def test_more_models_compile_whole_with_padding_and_gradients(name: str) -> None:
    model, reference = decoder(name, "flexattn"), decoder(name, REFERENCE)
    compiled, _ = _compiled(model)
    kept = torch.ones_like(TOKENS)
    kept[0, :5] = 0
    for options in ({"attention_mask": kept}, {"position_ids": POSITIONS}):
        results = [run(TOKENS, use_cache=False, **options).logits[kept.bool()] for run in (compiled, reference)]
        torch.testing.assert_close(*results, **TOLERANCE)
        weights = [next(run.parameters()) for run in (model, reference)]
        gradients = [torch.autograd.grad(out.square().mean(), w)[0] for out, w in zip(results, weights, strict=True)]
        torch.testing.assert_close(*gradients, **TOLERANCE)


@pytest.mark.slow
def test_an_encoder_with_windows_compiles_whole() -> None:
    register_both()
    entries = SIZES | {"local_attention": 8, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2}
    kept = torch.ones_like(TOKENS)
    kept[0, -5:] = 0
    models = [make(transformers.ModernBertModel, config("ModernBertConfig", entries), name) for name in ("flexattn", REFERENCE)]
    compiled, _ = _compiled(models[0])
    for options in ({}, {"attention_mask": kept}):
        got, wanted = (run(TOKENS, **options).last_hidden_state[kept.bool()] for run in (compiled, models[1]))
        torch.testing.assert_close(got, wanted, **TOLERANCE)


@pytest.mark.slow
@pytest.mark.sample(values=False)
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_decoding_over_a_static_cache_compiles_whole(name: str) -> None:
    """generate() compiles this step by itself on a GPU."""
    register_both()
    model = decoder(name, "flexattn")
    torch._dynamo.reset()
    options = {"attention_mask": torch.ones_like(TOKENS), "max_new_tokens": 8, "do_sample": False, "cache_implementation": "static"}
    compilation = transformers.CompileConfig(fullgraph=True, backend="aot_eager", mode="default", dynamic=None)
    compilation._compile_all_devices = True
    got = model.generate(TOKENS, compile_config=compilation, **options)
    assert got.tolist() == decoder(name, REFERENCE).generate(TOKENS, **options).tolist()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_continuous_batching_gives_the_tokens_of_each_request_alone(name: str) -> None:
    pytest.importorskip(
        "psutil", reason="psutil is not installed, by which transformers' continuous batching looks at a CPU's memory"
    )
    reference = decoder(name, REFERENCE, torch.float32)
    model = make(transformers.AutoModelForCausalLM, config(*DECODERS[name]), "paged|flexattn", torch.float32)
    prompts = [TOKENS[0, :5].tolist(), TOKENS[1, :11].tolist(), TOKENS[0].tolist()]
    try:
        found = model.generate_batch(
            prompts,
            generation_config=transformers.GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=2, pad_token_id=0),
            continuous_batching_config=transformers.ContinuousBatchingConfig(block_size=32, num_blocks=16, max_batch_tokens=64),
            progress_bar=False,
        )
    except ValueError as error:
        if "not supported for continuous batching" not in str(error):
            raise
        pytest.skip(f"transformers {transformers.__version__} takes only its own implementations for continuous batching")
    for prompt, result in zip(prompts, found.values(), strict=True):
        alone = reference.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)
        assert result.generated_tokens == alone[0, len(prompt) :].tolist()


def test_softcaps_and_sinks_reach_the_kernels() -> None:
    """Both change a model's numbers, so the comparisons of decoders fail if one is dropped."""
    for name, entries in (("gemma2", {"attn_logit_softcapping": None}), ("gpt_oss", None)):
        model = decoder(name, "flexattn")
        kind, settings = DECODERS[name]
        other = make(transformers.AutoModelForCausalLM, config(kind, settings | (entries or {})), "flexattn")
        with torch.no_grad():
            for key, weight in other.named_parameters():
                if entries is None and key.endswith("sinks"):
                    weight.fill_(-1e4)
            difference = (model(TOKENS, use_cache=False).logits - other(TOKENS, use_cache=False).logits).abs().max()
        assert difference > 1e-3


def test_the_pattern_of_several_windows_is_the_smallest() -> None:
    both = masking_utils.and_masks(
        masking_utils.sliding_window_causal_mask_function(9), masking_utils.sliding_window_bidirectional_overlay(3)
    )
    assert recognize(both) == Pattern(3, 0)


PAGE = (ROOT / "docs" / "transformers.md").read_text("utf-8")


@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_an_example_of_the_page_prints_what_it_shows(number: int, forked_python: Any, tmp_path: Path) -> None:
    """They are fenced as `py` and not `python`, because they need transformers."""
    examples = re.findall(r"^```py\n(.*?)^```\n\n```text\n(.*?)^```$", PAGE, re.M | re.S)
    assert len(examples) == 2
    code, shown = examples[number]
    script = tmp_path / "example.py"
    script.write_text(code, "utf-8")
    ran = forked_python(str(script), env={"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"})
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == shown
