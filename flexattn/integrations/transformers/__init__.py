"""flexattn as an attention implementation for Hugging Face transformers.

    from flexattn.integrations import transformers as flexattn_transformers
    flexattn_transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="flexattn")

Importing this module changes nothing; `register` adds names to transformers' tables and replaces none of transformers' own.
"""

from __future__ import annotations

import inspect

from flexattn.integrations.transformers.forward import attention_forward, paged_attention_forward
from flexattn.integrations.transformers.masks import attention_mask

__all__ = ["attention_forward", "attention_mask", "paged_attention_forward", "register"]


def register(name: str = "flexattn") -> None:
    """Registers flexattn in transformers as `attn_implementation=name`, and as `"paged|" + name` for continuous batching.

    This registers the attention function and the mask function together: with only one of them transformers creates no masks, and
    does not warn. Repeated registration is harmless. See https://huggingface.co/docs/transformers/attention_interface.

    Args:
        name: a name without "flash", which means FlashAttention in transformers, and without "/", ":" and "|", which mean kernels
            of the Hub and paged attention. It must not be one of transformers' own names.

    Raises:
        ImportError: if transformers is not installed, or too old.
        ValueError: if transformers would interpret the name in another way.
    """
    needed = 'flexattn.integrations.transformers needs transformers 5.17 or later; pip install "transformers>=5.17"'
    try:
        from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
    except ImportError as error:
        raise ImportError(f"transformers cannot be imported: {error}; {needed}") from error
    if "q_length" not in inspect.signature(masking_utils.sdpa_mask).parameters:
        raise ImportError(f"this transformers version has another mask interface; {needed}")

    reserved = ("eager", "sdpa", "flex_attention")
    if not name or name in reserved or "flash" in name or set(name) & set("/:|"):
        raise ValueError(
            f"name is {name!r}, which transformers interprets in its own way; accepted: a name without 'flash', '/', ':' and '|', "
            f"other than {', '.join(reserved)}, such as 'flexattn'"
        )
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)
    AttentionInterface.register(f"paged|{name}", paged_attention_forward)
