"""Models of transformers that select keys for each query, or have a sink for each token: flexattn equals eager."""

from __future__ import annotations

import functools
import types
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", reason="transformers is not installed, whose models these tests run")

from flexattn.integrations.transformers import attention_forward, attention_mask  # noqa: E402
from tests.support.transformers_models import SIZES, VOCABULARY, make, register_both  # noqa: E402

LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12}
EXPERTS = {"n_routed_experts": 2, "n_shared_experts": 1, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
GROUPS = {"n_group": 1, "topk_group": 1}
INDEXER = {"index_topk": 4, "index_n_heads": 2, "index_head_dim": 16}
LATENTS = SIZES | {"num_key_value_heads": 4, "head_dim": 8} | LATENT | EXPERTS | GROUPS | INDEXER
BLOCKS = {"index_n_heads": 2, "index_head_dim": 8, "index_block_size": 4, "index_topk_blocks": 2, "index_local_blocks": 1}
MODELS: dict[str, dict[str, Any]] = {
    "DeepseekV32Config": LATENTS | {"first_k_dense_replace": 2},
    "GlmMoeDsaConfig": LATENTS | {"first_k_dense_replace": 2},
    "AXK2Config": LATENTS | {"gated_norm_rank": 4, "mlp_layer_types": ["dense", "dense"]},
    "HYV4Config": LATENTS | {"mlp_layer_types": ["dense", "dense"]},
    "MistralLarge4TextConfig": LATENTS | {"first_k_dense_replace": 2},
    "Dots3NoteTextConfig": LATENTS | {"mlp_layer_types": ["dense", "dense"]},
    "MiniMaxM3VLTextConfig": SIZES
    | {"num_key_value_heads": 2, "head_dim": 8, "rotary_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}
    | {"dense_intermediate_size": 24, "shared_intermediate_size": 24, "mlp_layer_types": ["dense", "dense"]}
    | {"layer_types": ["minimax_m3_sparse", "minimax_m3_sparse"]}
    | BLOCKS,
    "Inkling2TextConfig": SIZES | {"num_key_value_heads": 2, "head_dim": 8, "unpadded_vocab_size": VOCABULARY},
    "Inkling2LoopTextConfig": SIZES
    | {"num_key_value_heads": 2, "head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8}
    | {"unpadded_vocab_size": VOCABULARY, "num_hidden_layers": 4, "sliding_window_size": 5, "rel_extent": 6, "d_rel": 4}
    | {"loop_layer_index_start": 2, "loop_layer_index_end": 4, "loop_num_passes": 2, "loop_gate_rank": 4}
    | {"n_layers_per_attn_res_block": 2, "moe_intermediate_size": 16, "n_routed_experts": 2, "num_experts_per_tok": 1},
    "HYV4VLTextConfig": LATENTS
    | {"mlp_layer_types": ["dense", "dense"]}
    | {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", "mrope_section": [2, 1, 1]}},
    "Glm5NextTextConfig": LATENTS
    | {"qk_rope_head_dim": 0, "head_dim": 0, "mlp_layer_types": ["dense", "dense"], "indexer_types": ["full", "full"]}
    | {"layer_types": ["full_attention", "full_attention"], "linear_head_dim": 8, "linear_num_heads": 2, "index_kpool": 2},
    "Qwen4ExpTextConfig": SIZES
    | {"num_key_value_heads": 2, "head_dim": 8, "layer_types": ["full_attention", "full_attention"]}
    | {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 2}
    | {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 2, "num_experts_per_tok": 1}
    | {"hc_count": 2, "hc_lowrank": 8, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8}
    | {"indexer_budget": 4, "indexer_compress_ratio": 2},
    "DeepseekV4Config": {name: value for name, value in SIZES.items() if name != "intermediate_size"}
    | {"num_hidden_layers": 3, "num_key_value_heads": 1, "head_dim": 16, "q_lora_rank": 16, "sliding_window": 5}
    | {"layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]}
    | {"compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4}}
    | {"mlp_layer_types": ["moe", "moe", "moe"], "o_groups": 2, "o_lora_rank": 8, "partial_rotary_factor": 0.5, "hc_mult": 2}
    | {"qk_rope_head_dim": 8, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 3}
    | EXPERTS,
}
RIGHT_FROM = {"Qwen4ExpTextConfig": (5, 24)}  # eager attention of earlier ones is NaN for queries that see no key
LENGTH = 14
TOKENS = torch.randint(3, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))
PADDED = torch.ones(2, LENGTH, dtype=torch.int64)
PADDED[1, :5] = 0


def padding(name: str) -> Tensor:
    """Returns padding on the left; on the right for MiniMax-M3, whose padded keys may win a block as transformers says."""
    return PADDED.flip(1) if name.startswith("MiniMax") else PADDED


@functools.cache
def model(name: str, implementation: str) -> Any:
    kind = getattr(transformers, name, None)
    version = tuple(map(int, transformers.__version__.split(".")[:2]))
    if kind is None or version < RIGHT_FROM.get(name, version):
        pytest.skip(f"transformers {transformers.__version__} has no {name} that is right")
    register_both()
    has_head = kind in transformers.AutoModelForCausalLM._model_mapping
    way = transformers.AutoModelForCausalLM if has_head else getattr(transformers, name.replace("Config", "Model"))
    return make(way, kind(**MODELS[name]), implementation, torch.float32)


def logits_and_gradients(name: str, implementation: str, mask: Tensor | None) -> list[Tensor]:
    chosen = model(name, implementation)
    chosen.zero_grad()
    result = chosen(TOKENS, attention_mask=mask, use_cache=False)[0]  # logits, or the last states of a model without a head
    seen = slice(None) if mask is None else mask.bool()
    weights = torch.linspace(-1, 1, result.shape[-1])
    (result[seen] * weights).square().mean().backward()
    return [result[seen].detach(), *(p.grad for p in chosen.parameters() if p.grad is not None)]


@pytest.mark.sample("name", "padded")
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_are_those_of_eager(name: str, padded: bool) -> None:
    ours, wanted = (logits_and_gradients(name, way, padding(name) if padded else None) for way in ("flexattn", "eager"))
    assert len(ours) == len(wanted) > 10
    for got, right in zip(ours, wanted, strict=True):
        torch.testing.assert_close(got, right, atol=2e-5 * max(1.0, right.abs().max().item()), rtol=0.0)


def generated(name: str, implementation: str, **options: Any) -> tuple[Tensor, Tensor]:
    chosen = model(name, implementation)
    if not hasattr(chosen, "generate"):
        pytest.skip("this model has no head")
    with torch.no_grad():
        made = chosen.generate(
            TOKENS,
            attention_mask=None if name.startswith("MiniMax") else PADDED,
            max_new_tokens=5,
            do_sample=False,
            output_scores=True,
            return_dict_in_generate=True,
            **options,
        )
    return made.sequences, torch.stack(made.scores)


CACHES: dict[str, dict[str, Any]] = {
    "static": {"cache_implementation": "static"},  # the one that runs by default
    "none": {"use_cache": False},
    "dynamic": {},
    "chunks": {"prefill_chunk_size": 4},
}


@pytest.mark.sample("name")
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", MODELS)
def test_generation_is_that_of_eager_with_each_cache(name: str, cache: str) -> None:
    try:
        tokens, scores = generated(name, "eager", **CACHES[cache])
    except Exception as error:  # a cache that this model does not support
        pytest.skip(f"transformers' own attention raises {type(error).__name__}: {str(error)[:80]}")
    ours, our_scores = generated(name, "flexattn", **CACHES[cache])
    assert torch.equal(ours, tokens)
    torch.testing.assert_close(our_scores, scores, atol=1e-4, rtol=1e-4)


class _Layer(torch.nn.Module):
    is_causal = True


@pytest.mark.parametrize("queries", [1, 4])
def test_a_model_that_extends_its_mask_gets_numbers(queries: int) -> None:
    """DeepSeek-V4 appends 0 or -inf for each compressed key, in the mask's dtype."""
    config = types.SimpleNamespace(model_type="deepseek_v4")
    padding = torch.tensor([[False, True, True, True]])
    first = 4 - queries
    mask = attention_mask(1, queries, 4, q_offset=first, attention_mask=padding, dtype=torch.bfloat16, config=config)
    seen = torch.ones(queries, 4, dtype=torch.bool).tril(first) & padding
    lowest = torch.finfo(torch.bfloat16).min
    assert torch.equal(mask, torch.where(seen, 0.0, lowest).to(torch.bfloat16)[None, None])


def test_wrong_selections_are_named() -> None:
    q = torch.zeros(1, 2, 4, 8)
    lists = torch.zeros(1, 2, 4, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"block_indices is passed by _Layer, which has no indexer\.block_size"):
        attention_forward(_Layer(), q, q, q, None, block_indices=lists)
    with pytest.raises(ValueError, match="indices and block_indices are passed"):
        attention_forward(_Layer(), q, q, q, None, indices=lists[:, 0], block_indices=lists)
    with pytest.raises(ValueError, match=r"dropout_p is 0\.5 with kv_indices"):
        attention_forward(_Layer(), q, q, q, None, indices=lists[:, 0], dropout=0.5)


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_an_indexer_may_have_any_number_of_heads(heads: int) -> None:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, n, 10, 8, generator=generator, dtype=torch.float64) for n in (4, 2, 2))
    layer = _Layer()
    layer.indexer = torch.nn.Module()
    layer.indexer.block_size = 4  # type: ignore[assignment]
    blocks = torch.rand(2, heads, 10, 3, generator=generator).argsort(-1)[..., :2]
    blocks[:, :, 3, 1] = -1
    seen = torch.zeros(2, heads, 10, 4, dtype=torch.bool).scatter(-1, torch.where(blocks < 0, 3, blocks), True)[..., :3]
    seen = seen.repeat_interleave(4, 3)[..., :10].repeat_interleave(4 // heads, 1)
    for mask in (None, torch.rand(2, 1, 10, 10, generator=generator) < 0.7):
        shown = seen & (torch.ones(10, 10, dtype=torch.bool).tril() if mask is None else mask)
        wanted = attention_forward(_Layer(), q, k, v, shown)[0]
        got = attention_forward(layer, q, k, v, mask, block_indices=blocks)[0]
        torch.testing.assert_close(got, wanted)


def test_sinks_for_each_token_take_a_share() -> None:
    generator = torch.Generator().manual_seed(4)
    q, k, v, sinks = (
        torch.randn(*size, generator=generator, dtype=torch.float64).requires_grad_()
        for size in ((2, 4, 6, 8), (2, 2, 6, 8), (2, 2, 6, 8), (2, 4, 6, 1))
    )
    scores = (q @ k.repeat_interleave(2, 1).mT * 0.5).masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril(), -torch.inf)
    wanted = (torch.cat((scores, sinks), -1).softmax(-1)[..., :6] @ v.repeat_interleave(2, 1)).transpose(1, 2)
    got = attention_forward(_Layer(), q, k, v, None, scaling=0.5, sinks=sinks)[0]
    torch.testing.assert_close(got, wanted)
    gradients = (torch.autograd.grad(out.square().sum(), (q, k, v, sinks)) for out in (got, wanted))
    torch.testing.assert_close(*gradients)
