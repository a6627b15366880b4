"""Small models of Hugging Face transformers with random weights, and attention in float64 as the reference.

Import it after `pytest.importorskip("transformers")`.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import masking_utils

from flexattn.integrations.transformers import register

REFERENCE = "reference_in_float64"
VOCABULARY = 99
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = SIZES | {"num_key_value_heads": 2}
HEADED = GROUPED | {"head_dim": 8}
MIXED = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}

DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", HEADED),
    "mistral": ("MistralConfig", HEADED | {"sliding_window": 7}),
    "qwen2": ("Qwen2Config", GROUPED | {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", HEADED),
    "gemma2": ("Gemma2Config", HEADED | MIXED | {"attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 8}),
    "gemma3": ("Gemma3TextConfig", HEADED | MIXED | {"query_pre_attn_scalar": 8}),
    "gpt_oss": ("GptOssConfig", HEADED | MIXED | EXPERTS),
    "phi3": ("Phi3Config", GROUPED | {"sliding_window": 7}),
    "mixtral": ("MixtralConfig", HEADED | EXPERTS | {"sliding_window": 7}),
    "cohere2": ("Cohere2Config", GROUPED | MIXED),
    "gpt2": ("GPT2Config", SIZES),
    "deepseek_v3": (
        "DeepseekV3Config",
        SIZES
        | {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
        | {"v_head_dim": 12, "first_k_dense_replace": 2, "n_routed_experts": 2, "n_group": 1, "topk_group": 1}
        | {"num_experts_per_tok": 1, "moe_intermediate_size": 16},
    ),
    "llama4": (
        "Llama4TextConfig",
        HEADED
        | {"attention_chunk_size": 8, "num_local_experts": 2, "intermediate_size_mlp": 48}
        | {"layer_types": ["chunked_attention", "full_attention"]},
    ),
}


def register_both() -> None:
    """Adds flexattn and the float64 attention to transformers, which runs one only if a model selects it."""
    register()
    transformers.AttentionInterface.register(REFERENCE, _attend)
    transformers.AttentionMaskInterface.register(REFERENCE, _mask)


def _mask(*args: Any, **options: Any) -> Tensor:
    options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    made: Tensor = masking_utils.sdpa_mask(*args, **options)
    return made


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Returns attention with every score in float64 and the features of transformers' eager functions of all models."""
    dtype, groups = query.dtype, query.shape[1] // key.shape[1]
    q, k, v = query.double(), key.double().repeat_interleave(groups, 1), value.double().repeat_interleave(groups, 1)
    scaling = options.get("scaling")
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    if options.get("softcap"):
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    if options.get("position_bias") is not None:
        scores = scores + options["position_bias"].double()
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask[..., : k.shape[2]], -torch.inf)
    elif attention_mask is not None:
        scores = scores + attention_mask
    elif getattr(module, "is_causal", True) and options.get("is_causal") is not False:
        assert q.shape[2] == k.shape[2], "a causal layer got no mask"
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -torch.inf)
    if options.get("s_aux") is not None:
        sinks = options["s_aux"].double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sinks), -1)
    hidden = scores.isneginf().all(-1, keepdim=True)
    weights = scores.masked_fill(hidden, 0.0).softmax(-1).masked_fill(hidden, 0.0)[..., : k.shape[2]]
    return (weights @ v).transpose(1, 2).to(dtype), None


def config(name: str, entries: dict[str, Any]) -> Any:
    kept = entries
    if name == "GPT2Config":
        kept = {
            {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}.get(key, key): value
            for key, value in entries.items()
            if key not in ("intermediate_size", "max_position_embeddings")
        } | {"n_positions": entries["max_position_embeddings"]}
    return getattr(transformers, name)(**kept)


def make(kind: Any, settings: Any, implementation: str, dtype: torch.dtype = torch.float64) -> Any:
    """Returns a model of class `kind` with the same random weights for every implementation, large enough for sharp softmaxes."""
    torch.manual_seed(0)
    build = getattr(kind, "from_config", None) or kind._from_config
    model = build(copy.deepcopy(settings), attn_implementation=implementation, experts_implementation="eager").eval()
    for name, weight in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(weight)
        elif weight.dim() > 1:
            weight.data *= 5.0
    return model.to(dtype)


@functools.cache
def decoder(name: str, implementation: str, dtype: torch.dtype = torch.float64) -> Any:
    """Returns the decoder of `DECODERS`; kept, so a test leaves it as it was."""
    register_both()
    return make(transformers.AutoModelForCausalLM, config(*DECODERS[name]), implementation, dtype)
