"""Other libraries' names for arguments of `attention`, and errors with the names here. Used only after a call has failed.

The names are those of the signatures of

- FlashAttention 2 to 4: https://github.com/Dao-AILab/flash-attention
- SDPA, MultiheadAttention and FlexAttention: https://docs.pytorch.org/docs/stable/nn.html
- TransformerEngine: https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/api/pytorch.html
- xformers: https://facebookresearch.github.io/xformers/components/ops.html
- transformers: https://huggingface.co/docs/transformers/attention_interface
- jax.nn: https://docs.jax.dev/en/latest/_autosummary/jax.nn.dot_product_attention.html
- the cuDNN frontend: https://docs.nvidia.com/deeplearning/cudnn/frontend/latest/operations/Attention.html
- FlashInfer: https://docs.flashinfer.ai
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from flexattn.validation import describe

F = TypeVar("F", bound=Callable[..., Any])


class Hint(NamedTuple):
    names: tuple[str, ...]
    libraries: str  # the libraries that have these names
    ours: str  # the replacement


HINTS = (
    Hint(("query", "query_layer", "query_states"), "SDPA, TransformerEngine and transformers", "q"),
    Hint(("key", "key_layer", "key_states"), "SDPA, TransformerEngine and transformers", "k"),
    Hint(("value", "value_layer", "value_states"), "SDPA, TransformerEngine and transformers", "v"),
    Hint(
        ("is_causal",),
        "SDPA, jax.nn and transformers",
        "causal=True for as many queries as keys; else attn_mask_type='causal', which counts from the first key as SDPA does "
        "(transformers means 'causal_bottom_right')",
    ),
    Hint(("use_causal_mask",), "cuDNN", "attn_mask_type='causal'"),
    Hint(("use_causal_mask_bottom_right",), "cuDNN", "attn_mask_type='causal_bottom_right'"),
    Hint(
        ("diagonal_alignment",),
        "cuDNN",
        "attn_mask_type='causal' (top left) or 'causal_bottom_right'; for a window without a causal mask bottom_right_diagonal",
    ),
    Hint(("scale", "sm_scale", "scaling", "attn_scale"), "SDPA, Triton, transformers and cuDNN", "softmax_scale"),
    Hint(
        ("attn_mask",),
        "SDPA and MultiheadAttention",
        "mask, a bool tensor whose True is a key that a query sees, as in SDPA (MultiheadAttention's True is hidden: mask=~m), or "
        "a float tensor that is added to scores",
    ),
    Hint(
        ("attention_mask",),
        "transformers and TransformerEngine",
        "mask, a bool tensor whose True is a key that a query sees (TransformerEngine's True is hidden: mask=~m), or a float "
        "tensor that is added to scores; for padding mask=m.bool()[:, None, None, :], or attn_mask_type='padding' and seqused_kv",
    ),
    Hint(
        ("lengths", "seqlens", "seq_lens", "seqlen"),
        "other code",
        "**flexattn.packed(lengths) for packed sequences; for padded ones seqused_q and seqused_kv, int32 [b], with an "
        "attn_mask_type with padding in its name",
    ),
    Hint(
        ("mask",),
        "jax.nn",
        "attn_mask_type='padding' and the lengths, cu_seqlens_q and cu_seqlens_kv, for padding; else a mask_mod, True for a key "
        "that a query sees (TransformerEngine's True is hidden), or bias, which is added",
    ),
    Hint(
        ("key_padding_mask",),
        "MultiheadAttention",
        "mask=~key_padding_mask[:, None, None, :], as its True is hidden; or attn_mask_type='padding' and the lengths, seqused_kv",
    ),
    Hint(
        ("attn_bias", "position_bias", "core_attention_bias"),
        "xformers, T5 and TransformerEngine",
        "bias (xformers' mask classes: attn_mask_type, window_size and cu_seqlens_q)",
    ),
    Hint(("core_attention_bias_type", "attn_bias_type"), "TransformerEngine", "bias_type"),
    Hint(("use_alibi_mask",), "cuDNN", "bias_type='alibi'"),
    Hint(
        ("dropout", "p", "attention_dropout", "dropout_probability"),
        "transformers, xformers, TransformerEngine and cuDNN",
        "dropout_p",
    ),
    Hint(
        ("sliding_window", "sliding_window_length"),
        "transformers and cuDNN",
        "window_size=w with causal=True: the query's own key and the w - 1 before it",
    ),
    Hint(
        ("window", "window_left", "left_window_size", "local_window_size"),
        "FlashInfer and jax.nn",
        "window_size=(left, right), inclusive, -1 for open",
    ),
    Hint(("diagonal_band_left_bound", "diagonal_band_right_bound"), "cuDNN", "window_size=(left, right), inclusive, -1 for open"),
    Hint(("cu_seqlens_k", "cu_seq_k", "cu_seq_lens_k"), "FlashAttention, varlen_attn and transformers", "cu_seqlens_kv"),
    Hint(("cu_seq_q", "cu_seq_lens_q"), "varlen_attn and transformers", "cu_seqlens_q"),
    Hint(("max_seqlen_k", "max_k", "max_length_k"), "FlashAttention, varlen_attn and transformers", "max_seqlen_kv"),
    Hint(("max_q", "max_length_q"), "varlen_attn and transformers", "max_seqlen_q"),
    Hint(
        ("query_seq_lengths", "seq_len_q"),
        "jax.nn and cuDNN",
        "seqused_q, int32 [b], with an attn_mask_type with padding in its name",
    ),
    Hint(
        ("seqused_k", "cache_seqlens", "key_value_seq_lengths", "seq_len_kv"),
        "FlashAttention, jax.nn and cuDNN",
        "seqused_kv, int32 [b], with an attn_mask_type with padding in its name",
    ),
    Hint(("use_padding_mask",), "cuDNN", "attn_mask_type='padding', cu_seqlens_q and cu_seqlens_kv"),
    Hint(
        ("block_table", "paged_attention_k_table", "paged_attention_v_table"),
        "FlashAttention and cuDNN",
        "page_table, int32 [b, columns], with k and v as pages and seqused_kv",
    ),
    Hint(
        ("return_attn_probs", "need_weights", "output_attentions"),
        "FlashAttention, MultiheadAttention and transformers",
        "return_lse=True: the weights are never made, and are exp(score - lse)",
    ),
    Hint(("return_softmax_lse", "generate_stats", "return_residual"), "FlashAttention, cuDNN and jax.nn", "return_lse"),
    Hint(
        ("logits_soft_cap", "logit_cap", "attn_logit_softcapping", "soft_cap"), "FlashInfer and configurations of models", "softcap"
    ),
    Hint(
        ("s_aux", "learnable_sink", "sinks", "sink", "sink_token"),
        "transformers, FlashAttention 4 and cuDNN",
        "softmax_offset, [h]",
    ),
    Hint(("q_descale",), "FlashAttention 3", "descale_q, which is for query heads: repeat it for the heads of each group"),
    Hint(("k_descale",), "FlashAttention 3", "descale_k"),
    Hint(("v_descale",), "FlashAttention 3", "descale_v"),
    Hint(("q_scale", "scale_q"), "FlashInfer and vLLM", "descale_q"),
    Hint(("k_scale", "scale_k"), "FlashInfer and vLLM", "descale_k"),
    Hint(("v_scale", "scale_v"), "FlashInfer and vLLM", "descale_v"),
    Hint(
        ("score_mod_bprop", "score_mod_bwd"),
        "TransformerEngine and FlashAttention 4",
        "score_mod alone, whose backward is derived; for TransformerEngine's callbacks on graphs "
        "score_mod=flexattn.integrations.te.TEScoreMod(score_mod, score_mod_bprop, tensors)",
    ),
    Hint(("aux_tensors",), "FlashAttention 4", "score_mod_tensors, or tensors that score_mod captures"),
    Hint(("qkv_layout", "layout", "input_layout", "tensor_layout"), "TransformerEngine and SageAttention", "qkv_format"),
    Hint(
        ("enable_gqa", "num_splits", "pack_gqa", "sm_margin", "kernel_options", "op", "implementation"),
        "SDPA, FlashAttention 3, FlexAttention, xformers and jax.nn",
        "nothing: omit it, attention() decides it (`backend` selects a backend)",
    ),
    Hint(
        ("rng_gen", "generator", "seed"),
        "TransformerEngine and SageAttention",
        "rng_state, int64 [2], a seed and an offset; without it torch.manual_seed applies",
    ),
    Hint(("rotary_cos", "rotary_sin", "rotary_interleaved"), "FlashAttention", "nothing: rotate q and k before the call"),
    Hint(("use_deterministic_algorithm",), "cuDNN", "deterministic"),
)
_HINT_OF = {name: hint for hint in HINTS for name in hint.names}

# The arguments after q, k and v of functions that are called by position.
_FLASH = ("dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes", "deterministic", "return_attn_probs")
_FLASH_VARLEN = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", *_FLASH)
_SDPA = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_FLEX = ("score_mod", "block_mask", "scale", "enable_gqa", "return_lse", "kernel_options")


def refuse_foreign(signature: inspect.Signature, positional: Sequence[object], named: Mapping[str, object]) -> None:
    """Raises TypeError if a function like `attention` does not have an argument, with the library of each name and the replacement.

    signature: the function's signature. positional: arguments after q, k and v by position. named: all arguments by name.
    """
    lines = [_line(name, signature) for name in named if name not in signature.parameters]
    if positional:
        lines.insert(0, _positional_line(positional, signature))
    if lines:
        raise TypeError(" ".join(lines)) from None


def with_hints(function: F) -> F:
    """Wraps a function like `attention`, so that an unknown argument raises the error of `refuse_foreign`.

    It suits traced functions, because it binds the arguments before each call. The signature stays.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*positional: Any, **named: Any) -> Any:
        try:
            signature.bind(*positional, **named)
        except TypeError:
            refuse_foreign(signature, positional[3:], named)
            raise
        return function(*positional, **named)

    return call  # type: ignore[return-value]


def _line(name: str, signature: inspect.Signature) -> str:
    hint = _HINT_OF.get(name)
    if hint is not None:
        ours = hint.ours.removeprefix("nothing: ")
        use = f"Use {ours}" if ours == hint.ours else ours[0].upper() + ours[1:]
        return f"attention() has no argument {name!r}, the name in {hint.libraries}. {use}."
    near = difflib.get_close_matches(name, signature.parameters, n=3, cutoff=0.5)
    if near:
        *others, last = near
        return f"attention() has no argument {name!r}. Did you mean {', '.join(others)}{' or ' if others else ''}{last}?"
    return f"attention() has no argument {name!r}. help(flexattn.attention) lists its arguments."


def _positional_line(positional: Sequence[object], signature: inspect.Signature) -> str:
    """Returns the line for a call by position: the library whose order it seems to be, and the name of each argument here."""
    values = ", ".join(map(describe, positional[:3])) + (", ..." if len(positional) > 3 else "")
    line = f"attention() takes q, k and v by position, and got {values} after them."
    if len(positional) == 1 and isinstance(positional[0], bool):
        return (
            f"{line} That position is dropout_p in FlashAttention and attn_mask in SDPA. Pass arguments by name, for example "
            "causal=True."
        )
    if len(positional) == 1 and isinstance(positional[0], Mapping):
        return f"{line} Pass its items by name: attention(q, k, v, **arguments), such as **flexattn.packed(lengths)."
    library, order = _order_of(positional)
    names = [name for name, value in zip(order, positional, strict=False) if value is not None]
    if len(positional) > len(order) or not names:
        return f"{line} Pass all others by name."
    replacements = [f"for {name}: {ours}" if (ours := _ours(name)) else f"{name}=" for name in names]
    return f"{line} In {library} order these are {'; '.join(replacements)}. Pass them by name."


def _ours(name: str) -> str:
    """Returns the replacement of another library's parameter; "" if the name is the same here."""
    if name == "causal":
        return "causal=True for as many queries as keys, else attn_mask_type='causal_bottom_right'"
    return _HINT_OF[name].ours if name in _HINT_OF else ""


def _order_of(positional: Sequence[object]) -> tuple[str, tuple[str, ...]]:
    first = positional[0]
    if isinstance(first, Tensor):
        return ("SDPA's", _SDPA) if first.is_floating_point() or first.dim() > 1 else ("FlashAttention's", _FLASH_VARLEN)
    if callable(first) or (len(positional) > 1 and type(positional[1]).__name__ == "BlockMask"):
        return "FlexAttention's", _FLEX
    if first is None:
        return "SDPA's", _SDPA
    return ("FlashAttention's", _FLASH) if isinstance(first, (int, float)) else ("", ())
