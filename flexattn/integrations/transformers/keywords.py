"""Keywords that transformers' models pass to an attention function, and the check that raises for unknown ones."""

from __future__ import annotations

from collections.abc import Mapping

import torch

# Keywords that do not change an attention function's result. transformers' own functions ignore them too.
HARMLESS = frozenset(
    {
        # Queries and keys are already rotated by position, and the mask function has separated packed sequences.
        "position_ids",
        "position_embeddings",
        "cache_position",
        # The layer writes its keys to the cache before it calls the attention function, and passes all cached keys.
        "use_cache",
        "past_key_values",
        "cache",
        "cache_params",
        # The model or its output class reads these after its layers.
        "return_dict",
        "output_hidden_states",
        "output_router_logits",
        "num_items_in_batch",  # the loss divides by it
        "logits_indices",  # continuous batching picks these tokens' logits
        "logits_processor_args",  # continuous batching selects tokens by them
        # Some models pass these inputs of embeddings, towers and other stacks to every layer below.
        "input_ids",
        "inputs_embeds",
        "token_type_ids",
        "grid_thw",
        "encoder_outputs",
        "decoder_input_ids",
        "decoder_inputs_embeds",
        "decoder_position_ids",
        "decoder_attention_mask",  # the model has already made a mask of it
        "query_length",  # a feed-forward layer splits its tokens by it
        # Convolutions and state-space layers of hybrid models separate packed sequences by it; attention uses its mask.
        "seq_idx",
    }
)

# Keywords that change the result. `attention_forward` has parameters for them; continuous batching does not support them.
REFUSED = {
    "indices": "the keys that each query selects (sparse attention); without them attention would be dense",
    "block_indices": "the blocks of keys that each query selects (sparse attention); without them attention would be dense",
    "sinks": "logits of a sink for each token and head; paged attention has sinks for each head, [h], as s_aux",
}


def check_keywords(module: torch.nn.Module, keywords: Mapping[str, object], harmless: frozenset[str] = HARMLESS) -> None:
    """Raises TypeError if a keyword may change the result. A keyword that is None passes.

    Args:
        module: the layer that calls, for the error message.
        keywords: all keywords for which the attention function has no parameter.
        harmless: names that pass with any value.
    """
    for name, value in keywords.items():
        if name in harmless or value is None:
            continue
        reason = REFUSED.get(name, "an unknown keyword, which may change the result")
        raise TypeError(
            f"{name} is passed by {type(module).__name__} ({type(value).__name__}): {reason}; accepted: None. Run this model with "
            'attn_implementation="eager"'
        )
