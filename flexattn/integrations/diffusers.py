"""flexattn as an attention backend of Hugging Face diffusers: `register()`, and a processor for models with UNets.

diffusers sends the attention of its transformers through `diffusers.models.attention_dispatch`, which looks a function up by the
name of a backend: https://huggingface.co/docs/diffusers/optimization/attention_backends. Its names are a closed enumeration, so
`register` adds a member to it.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from torch import Tensor

from flexattn.backward import attention_backward
from flexattn.function_context import FunctionContext
from flexattn.functional import attention
from flexattn.masks import mask_arguments, mask_dtypes
from flexattn.prepare import cast_for_autocast

NAME = "flexattn"


def register() -> None:
    """Adds "flexattn" to diffusers' attention backends.

    Then `model.set_attention_backend("flexattn")`, `with attention_backend("flexattn")` and, if `register` precedes the import of
    models, the environment variable `DIFFUSERS_ATTN_BACKEND=flexattn` select it. Repeated registration is harmless.

    Raises:
        ImportError: if diffusers is not installed, or has no registry of attention backends.
    """
    needed = 'flexattn.integrations.diffusers needs diffusers 0.42 or later; pip install "diffusers>=0.42"'
    try:
        from diffusers.utils import constants
    except ImportError as error:
        raise ImportError(f"diffusers cannot be imported: {error}; {needed}") from error
    is_default = getattr(constants, "DIFFUSERS_ATTN_BACKEND", "") == NAME
    if is_default:  # the registry looks this name up when it is imported, which precedes the new member
        constants.DIFFUSERS_ATTN_BACKEND = "native"
    try:
        from diffusers.models import attention_dispatch as dispatch

        names, registry = dispatch.AttentionBackendName, dispatch._AttentionBackendRegistry
    except (ImportError, AttributeError) as error:
        raise ImportError(f"this diffusers version has another registry of attention backends: {error}; {needed}") from error
    finally:
        if is_default:
            constants.DIFFUSERS_ATTN_BACKEND = NAME
    if NAME in names._value2member_map_:
        return
    member: Any = str.__new__(names, NAME)
    member._name_, member._value_, member._sort_order_ = NAME.upper(), NAME, len(names)
    type.__setattr__(names, member._name_, member)  # Python 3.12 finds members there alone
    names._member_names_.append(member._name_)
    names._member_map_[member._name_] = names._value2member_map_[NAME] = member
    registry.register(member, supports_context_parallel=True)(_attention)
    if is_default:
        registry.set_active_backend(member)


def _options(query: Tensor, key: Tensor, call: _Call) -> dict[str, Any]:
    """Returns `attention`'s arguments for a call of diffusers, whose tensors are [b, s, h, d]."""
    mask = call.attn_mask
    options: dict[str, Any] = {"attn_mask_type": "causal" if call.is_causal else "no_mask", "softmax_scale": call.scale}
    if mask is not None:
        if tuple(mask.shape) == (query.shape[0], key.shape[1]):  # diffusers reads two dims as [batch, keys] first
            mask = mask[:, None, None]
        scores = (query.shape[2], query.shape[1], key.shape[1])
        options |= mask_arguments("attn_mask", mask, query.shape[:1], scores, mask_dtypes(query), query.device)
    return options


class _Call(NamedTuple):
    """Arguments of a call behind query, key and value, in the order in which diffusers passes them to an operator."""

    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    return_lse: bool = False


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Any:
    """Returns out [b, sq, h, d], and lse [b, h, sq] if return_lse. query: [b, sq, h, d]; key, value: [b, skv, h or h_kv, d]."""
    call = _Call(attn_mask, dropout_p, is_causal, scale, enable_gqa, return_lse)
    if query.shape[2] != key.shape[2] and not enable_gqa:
        raise ValueError(
            f"query has {query.shape[2]} heads and key has {key.shape[2]}; accepted: equal counts, or enable_gqa=True with a "
            "multiple of key's"
        )
    if _parallel_config is None:
        return attention(query, key, value, dropout_p=dropout_p, return_lse=return_lse, **_options(query, key, call))
    from diffusers.models.attention_dispatch import _templated_context_parallel_attention as template

    return template(query, key, value, *call, forward_op=_forward, backward_op=_backward, _parallel_config=_parallel_config)


def _forward(
    ctx: FunctionContext, query: Tensor, key: Tensor, value: Tensor, *arguments: Any, _save_ctx: bool, _parallel_config: Any
) -> Any:
    """Runs one rank's part of a call over several ranks, as diffusers' templates ask for: out, and lse [b, sq, h] if return_lse.

    _save_ctx: whether the tensors are kept for `_backward`.
    """
    call = _Call(*arguments)
    if call.dropout_p:
        raise ValueError(f"dropout_p is {call.dropout_p} with context parallelism; accepted: 0.0")
    if call.attn_mask is not None and _parallel_config.context_parallel_config.ring_degree > 1:
        raise ValueError(
            f"attn_mask is {tuple(call.attn_mask.shape)} with ring_degree {_parallel_config.context_parallel_config.ring_degree}; "
            "accepted: None, because diffusers gives every part of the keys the same mask. Use ulysses_degree."
        )
    if call.attn_mask is not None and call.attn_mask.requires_grad:
        raise ValueError("attn_mask requires a gradient with context parallelism; accepted: a mask without")
    query, key, value = cast_for_autocast(query, key, value)  # the backward runs outside of autocast
    options = _options(query, key, call)
    out, lse = attention(query, key, value, return_lse=True, **options)
    if _save_ctx:
        ctx.save_for_backward(query, key, value, out, lse.transpose(1, 2))
        ctx.flexattn_options = options
    return (out, lse.transpose(1, 2)) if call.return_lse else out


def _backward(
    ctx: FunctionContext,
    grad_out: Tensor,
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of query, key and value. A step of a ring passes tensors in place of the saved ones."""
    saved = ctx.saved_tensors
    q, k, v, o, statistics = (x if y is None else y for x, y in zip(saved, (query, key, value, out, lse), strict=True))
    dout, o, statistics = grad_out.to(q.dtype), o.to(q.dtype), statistics.transpose(1, 2).to(saved[-1].dtype)
    gradients = attention_backward(dout, q, k, v, o, statistics, **ctx.flexattn_options)
    return gradients.dq, gradients.dk, gradients.dv


class AttnProcessor:
    """Attention processor for UNets and VAEs, which do not use diffusers' backends: `unet.set_attn_processor(AttnProcessor())`.

    It computes the same as diffusers' `AttnProcessor2_0`, for modules of class `diffusers.models.attention_processor.Attention`.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
        image_rotary_emb: object = None,
    ) -> Tensor:
        """Returns the module's result, of hidden_states' shape.

        Args:
            attn: the module, with its projections and norms.
            hidden_states: [b, tokens, channels], or an image [b, channels, height, width].
            encoder_hidden_states: tokens that the keys and values are made of. None: hidden_states.
            attention_mask: as `Attention.prepare_attention_mask` accepts it.
            temb: the embedding of the time step, which a spatial norm reads.
            image_rotary_emb: must be None.

        Raises:
            NotImplementedError: if the module has keys of its own for the context, or if image_rotary_emb is passed.
        """
        if attn.add_k_proj is not None or image_rotary_emb is not None:
            reason = "image_rotary_emb is passed" if attn.add_k_proj is None else "the module has add_k_proj"
            raise NotImplementedError(
                f"{reason}, which AttnProcessor does not read; accepted: the model's processor for this module"
            )
        x = hidden_states if attn.spatial_norm is None else attn.spatial_norm(hidden_states, temb)
        if hidden_states.dim() == 4:
            x = x.flatten(2).transpose(1, 2)
        batch, tokens, _ = (x if encoder_hidden_states is None else encoder_hidden_states).shape
        mask = None
        if attention_mask is not None:
            mask = attn.prepare_attention_mask(attention_mask, tokens, batch)
            mask = mask.reshape(batch, attn.heads, -1, mask.shape[-1])
        if attn.group_norm is not None:
            x = attn.group_norm(x.transpose(1, 2)).transpose(1, 2)
        context = x if encoder_hidden_states is None else encoder_hidden_states
        if encoder_hidden_states is not None and attn.norm_cross:
            context = attn.norm_encoder_hidden_states(context)
        q, k, v = (
            projection(y).unflatten(-1, (attn.heads, -1))
            for projection, y in ((attn.to_q, x), (attn.to_k, context), (attn.to_v, context))
        )
        q, k = (t if norm is None else norm(t.transpose(1, 2)).transpose(1, 2) for norm, t in ((attn.norm_q, q), (attn.norm_k, k)))
        out = _attention(q, k, v, mask)
        out = functools.reduce(lambda y, layer: layer(y), attn.to_out, out.flatten(2).to(q.dtype))
        if hidden_states.dim() == 4:
            out = out.transpose(1, 2).reshape(hidden_states.shape)
        if attn.residual_connection:
            out = out + hidden_states
        return out / attn.rescale_output_factor  # type: ignore[no-any-return]
