"""Decoders of transformers on flexattn: logits, gradients and tokens match attention in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="transformers is not installed, whose models these tests run")

from transformers import DynamicCache, StaticCache

from tests.support.transformers_models import DECODERS, REFERENCE, VOCABULARY, decoder

TOKENS = 21
# Norms and RoPE are computed in float32 for any dtype of the model, and may round sums that differ by 1e-16 differently.
TOLERANCE = {"atol": 2e-6, "rtol": 0.0}


def _tokens() -> Tensor:
    return torch.randint(3, VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(1))


def _padding(side: str) -> Tensor:
    kept = torch.ones(2, TOKENS, dtype=torch.long)
    kept[0, :6] = 0
    return kept if side == "left" else kept.flip(1)


@pytest.fixture(params=DECODERS)
def models(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """The same model on flexattn, and on attention in float64."""
    return decoder(request.param, "flexattn"), decoder(request.param, REFERENCE)


@torch.no_grad()
def test_logits_of_whole_and_padded_batches_are_the_references(models: tuple[Any, Any]) -> None:
    tokens = _tokens()
    torch.testing.assert_close(*(model(tokens, use_cache=False).logits for model in models), **TOLERANCE)
    for side in ("left", "right"):
        kept = _padding(side)
        got, wanted = (model(tokens, attention_mask=kept, use_cache=False).logits[kept.bool()] for model in models)
        torch.testing.assert_close(got, wanted, **TOLERANCE)


@torch.no_grad()
def test_packed_sequences_are_kept_apart(models: tuple[Any, Any]) -> None:
    positions = torch.cat([torch.arange(n) for n in (9, 2, 10)])[None].expand(2, -1)
    got, wanted = (model(_tokens(), position_ids=positions, use_cache=False).logits for model in models)
    torch.testing.assert_close(got, wanted, **TOLERANCE)


def test_gradients_are_the_references(models: tuple[Any, Any]) -> None:
    tokens, kept = _tokens(), _padding("left")
    gradients = []
    for model in models:
        logits = model(tokens, attention_mask=kept, use_cache=False).logits[kept.bool()]
        weights = {name: weight for name, weight in model.named_parameters() if "layers.0" in name or ".h.0." in name}
        found = torch.autograd.grad(logits.square().mean(), list(weights.values()), allow_unused=True)
        gradients.append(dict(zip(weights, found, strict=True)))
    assert any(name.endswith(("q_proj.weight", "c_attn.weight", "qkv_proj.weight", "q_a_proj.weight")) for name in gradients[0])
    torch.testing.assert_close(*gradients, **TOLERANCE)


@torch.no_grad()
@pytest.mark.sample("models", "cache")
@pytest.mark.parametrize("cache", [DynamicCache, StaticCache])
def test_prompts_in_chunks_see_what_the_cache_holds(models: tuple[Any, Any], cache: type) -> None:
    tokens, got = _tokens(), []
    for model in models:
        lengths = {"max_cache_len": 40} if cache is StaticCache else {}
        kept = cache(config=model.config, **lengths)
        pieces = tokens.split((5, 7, 1, 8), 1)
        got.append(torch.cat([model(piece, past_key_values=kept).logits for piece in pieces], 1))
    torch.testing.assert_close(*got, **TOLERANCE)


@torch.no_grad()
@pytest.mark.sample("models", "cache")
@pytest.mark.parametrize("cache", [None, "static"])
def test_generate_gives_the_references_tokens(models: tuple[Any, Any], cache: str | None) -> None:
    if cache and models[0].config.model_type == "llama4_text":
        pytest.skip("transformers cannot make its chunked masks for a static cache in generate()")
    for kept in (torch.ones(2, TOKENS, dtype=torch.long), _padding("left")):
        options = {"attention_mask": kept, "cache_implementation": cache, "max_new_tokens": 4, "do_sample": False}
        got, wanted = (model.generate(_tokens(), **options) for model in models)
        assert got.tolist() == wanted.tolist()
