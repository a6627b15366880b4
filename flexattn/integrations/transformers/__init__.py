"""flexattn as an attention implementation of Hugging Face transformers.

    from flexattn.integrations import transformers as flexattn_transformers
    flexattn_transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="flexattn")

Importing this module changes nothing; `register` adds names to transformers' tables and replaces none of transformers' own.
"""

from __future__ import annotations

import inspect

from flexattn.integrations.transformers.forward import attention_forward
from flexattn.integrations.transformers.masks import attention_mask
from flexattn.integrations.transformers.paged import paged_attention_forward

__all__ = ["attention_forward", "attention_mask", "paged_attention_forward", "register"]


def register(name: str = "flexattn") -> None:
    """Adds this library to transformers as `attn_implementation=name`, and as `"paged|" + name` for continuous batching.

    The attention and the mask function go in together: with one alone transformers makes no masks, and says nothing. Registering
    again is harmless. After https://huggingface.co/docs/transformers/attention_interface.

    Args:
        name: without "flash", by which transformers looks for FlashAttention itself, and without "/", ":" and "|", by which it
            looks for kernels on the Hub and for paged attention; none of transformers' own names.

    Raises:
        ImportError: transformers is not installed, or too old.
        ValueError: a name that transformers would take for something else.
    """
    needed = 'flexattn.integrations.transformers needs transformers 5.17 or later; pip install "transformers>=5.17"'
    try:
        from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
    except ImportError as error:
        raise ImportError(f"transformers cannot be imported: {error}; {needed}") from error
    if "q_length" not in inspect.signature(masking_utils.sdpa_mask).parameters:
        raise ImportError(f"this transformers describes masks in another way; {needed}")

    taken = ("eager", "sdpa", "flex_attention")
    if not name or name in taken or "flash" in name or set(name) & set("/:|"):
        raise ValueError(
            f"name is {name!r}, which transformers reads in its own way; accepted: a name without 'flash', '/', ':' and '|' that "
            f"is none of {', '.join(taken)}, as 'flexattn'"
        )
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)
    AttentionInterface.register(f"paged|{name}", paged_attention_forward)
