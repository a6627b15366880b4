"""Modules: `Attention`, projections around `flexattn.attention`, and `MultiheadAttention`, which replaces torch.nn's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexattn.functional import attention
from flexattn.masks import reading, seen_by_both
from flexattn.mods.trace import Mod
from flexattn.norm_rope import qk_norm_rope
from flexattn.validation import check_flags, check_meaning, describe, is_one_of
from flexattn.warn import warn_once

__all__ = ["Attention", "MultiheadAttention", "qk_norm_rope"]

Rotate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def _refuse_scripts(module: nn.Module) -> nn.Module:
    """Raises NotImplementedError. torch.jit.script calls this function on each module that it compiles."""
    name = type(module).__name__
    hint = ", or script a torch.nn.MultiheadAttention, which loads this layer's state_dict"
    hint = hint if isinstance(module, nn.MultiheadAttention) else ""
    raise NotImplementedError(f"torch.jit.script cannot compile flexattn.nn.{name}; use torch.compile or torch.export{hint}")


class Attention(nn.Module):
    """Attention layer: projections of q, k, v and the result, and `flexattn.attention` between them, with all of its arguments.

    Args:
        embed_dim: width of the input and of the result.
        num_heads: heads of q.
        num_kv_heads: heads of k and v; num_heads is a multiple of it. None: num_heads.
        head_dim: head dim of q, k and v. None: embed_dim // num_heads.
        bias: whether the four projections have a bias.
        dropout_p: probability of dropping a weight in training mode.
        factory: device and dtype of the parameters, as for torch.nn.Linear.

    The projections q_proj, k_proj, v_proj and o_proj are torch.nn.Linear modules with the names of Llama's weights.

    Raises:
        ValueError: sizes do not fit together.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        head_dim: int | None = None,
        bias: bool = False,
        dropout_p: float = 0.0,
        **factory: object,
    ) -> None:
        super().__init__()
        if unknown := sorted(factory.keys() - {"device", "dtype"}):
            raise TypeError(
                f"Attention() has no argument {', '.join(unknown)}; accepted: embed_dim, num_heads, num_kv_heads, head_dim, bias, "
                "dropout_p, device, dtype"
            )
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(f"num_heads is {num_heads} and num_kv_heads {num_kv_heads}; accepted: a multiple of num_kv_heads")
        if head_dim is None and embed_dim % num_heads:
            raise ValueError(f"embed_dim is {embed_dim} and num_heads {num_heads}; accepted: a multiple of it, or a head_dim")
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        self.dropout_p = dropout_p
        self.q_proj = nn.Linear(embed_dim, num_heads * self.head_dim, bias, **factory)
        self.k_proj = nn.Linear(embed_dim, num_kv_heads * self.head_dim, bias, **factory)
        self.v_proj = nn.Linear(embed_dim, num_kv_heads * self.head_dim, bias, **factory)
        self.o_proj = nn.Linear(num_heads * self.head_dim, embed_dim, bias, **factory)

    __prepare_scriptable__ = _refuse_scripts

    def forward(self, x: Tensor, context: Tensor | None = None, *, rotate: Rotate | None = None, **arguments: Any) -> Tensor:
        """Returns the layer's result for the queries of x over the keys and values of context, or of x if context is None.

        Args:
            x: [b, sq, embed_dim]; [sq, b, embed_dim] with qkv_format "sbhd"; [t_q, embed_dim] with "thd".
            context: a tensor of the same layout, whose lengths may differ.
            rotate: rotate(q, k) -> (q, k), called between the projections and attention, for rotary positions or norms. q and k
                are [b, s, heads, head_dim], or in qkv_format if that differs.
            arguments: arguments of `flexattn.attention`, except those that the layer sets: q, k, v, dropout_p, return_lse,
                return_max_logit and return_aux.

        Returns:
            A tensor of x's shape.

        Raises:
            TypeError: an argument that the layer sets.
            ValueError, TypeError, BackendError: errors of `flexattn.attention`.
        """
        if reserved := {"dropout_p", "return_lse", "return_max_logit", "return_aux"} & arguments.keys():
            raise TypeError(f"{', '.join(sorted(reserved))} is given to Attention.forward(), which sets it; accepted: all others")
        if "bhsd" in str(arguments.get("qkv_format", "bshd")):
            raise ValueError(f"qkv_format is {arguments['qkv_format']!r} for x without heads; accepted: bshd, sbhd or thd")
        context = x if context is None else context
        q, k, v = (
            project(source).unflatten(-1, (-1, self.head_dim))
            for project, source in ((self.q_proj, x), (self.k_proj, context), (self.v_proj, context))
        )
        if rotate is not None:
            q, k = rotate(q, k)
        out = attention(q, k, v, dropout_p=self.dropout_p if self.training else 0.0, **arguments)
        return self.o_proj(out.flatten(-2))  # type: ignore[no-any-return]


class MultiheadAttention(nn.MultiheadAttention):
    """torch.nn.MultiheadAttention, with its constructor, parameters, state_dict and forward, run by `flexattn.attention`.

    The arguments are those of https://docs.pytorch.org/docs/stable/generated/torch.nn.MultiheadAttention.html. The class is a
    subclass, so an isinstance check for torch's class accepts it.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns (out, weights). weights is None unless need_weights is True.

        L is the number of queries, S the number of keys, n the batch size. The batch dim may be absent.

        Args:
            query: [L, n, embed_dim], or [n, L, embed_dim] with batch_first, or [L, embed_dim].
            key: same layout as query, with S tokens of kdim.
            value: same layout as key, with tokens of vdim.
            key_padding_mask: [n, S], or [S] without a batch: bool, True if a key is hidden, or floating point, added to the scores.
            need_weights: if True (torch's default), torch's forward runs, because a fused call never computes the weights; a
                warning says so once.
            attn_mask: [L, S] or [n * num_heads, L, S]: bool, True if a key is hidden, or floating point, added to the scaled
                scores. It gets a gradient if it requires one.
            average_attn_weights: whether weights are [n, L, S], or [n, num_heads, L, S].
            is_causal: declares that attn_mask is the causal mask, which is then not read; without attn_mask, query i sees keys
                j <= i. With add_bias_kv or add_zero_attn, attn_mask is read, because every query sees their keys. A mask that
                requires a gradient is read too.

        Returns:
            out of query's shape. If a query sees no key, its row is out_proj's bias.

        Raises:
            ValueError, TypeError: shapes or dtypes do not fit together; a tensor is nested; errors of `flexattn.attention`.
            BackendError: no backend can run the call.
        """
        check_flags(need_weights=need_weights, average_attn_weights=average_attn_weights, is_causal=is_causal)
        self._check(query, key, value)
        batch_dim, seq_dim = (0, 1) if self.batch_first else (1, 0)
        is_batched = query.dim() == 3
        len_q, len_kv = (x.shape[seq_dim if is_batched else 0] for x in (query, key))
        extra = int(self.bias_k is not None) + int(self.add_zero_attn)
        if is_causal and attn_mask is None and (need_weights or extra):
            attn_mask = torch.ones(len_q, len_kv, dtype=torch.bool, device=query.device).triu(1)
        if need_weights:
            if not torch.compiler.is_compiling():
                warn_once(
                    "need_weights",
                    "need_weights is True, torch's default: the weights need torch's attention, and memory quadratic in the "
                    "lengths; pass need_weights=False to MultiheadAttention if you do not use them",
                    at_caller=True,
                )
            named = {"average_attn_weights": average_attn_weights, "is_causal": is_causal}
            return super().forward(query, key, value, key_padding_mask, True, attn_mask, **named)
        q, k, v = self._projected(query, key, value)
        if not is_batched:
            q, k, v = (x.unsqueeze(batch_dim) for x in (q, k, v))
        is_learned = torch.is_grad_enabled() and isinstance(attn_mask, Tensor) and attn_mask.requires_grad
        is_band = is_causal and not extra and not is_learned
        sizes = (q.shape[batch_dim], self.num_heads, len_q, len_kv)
        masks = _mask_arguments(key_padding_mask, None if is_band else attn_mask, is_batched, sizes, extra)
        if "bias" in masks and masks["bias"].dtype not in (q.dtype, torch.float32):
            masks["bias"] = masks["bias"].to(q.dtype)
        if extra:
            k, v = (self._with_extra_keys(x, added, seq_dim) for x, added in ((k, self.bias_k), (v, self.bias_v)))
        out = attention(
            q,
            k,
            v,
            qkv_format="bshd" if self.batch_first else "sbhd",
            attn_mask_type="causal" if is_band else "no_mask",
            dropout_p=self.dropout if self.training else 0.0,
            **masks,
        )
        out = self.out_proj(out.flatten(-2))
        return (out if is_batched else out.squeeze(batch_dim)), None

    __prepare_scriptable__ = _refuse_scripts

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Raises if query, key and value do not fit the layer or each other."""
        widths = {"query": self.embed_dim, "key": self.kdim, "value": self.vdim}
        for (name, width), x in zip(widths.items(), (query, key, value), strict=True):
            if not isinstance(x, Tensor) or x.is_nested:
                raise TypeError(f"{name} is {describe(x)}; accepted: a dense tensor; hide padding with key_padding_mask")
            if x.dim() not in (2, 3) or x.dim() != query.dim() or x.shape[-1] != width:
                raise ValueError(f"{name} is {describe(x)}; accepted: 2 or 3 dims, as many as query's, the last of size {width}")
        if key.shape[:-1] != value.shape[:-1]:
            raise ValueError(f"value is {describe(value)} and key {describe(key)}; accepted: the same tokens for both")
        batch_dim = 0 if self.batch_first else 1
        if query.dim() == 3 and query.shape[batch_dim] != key.shape[batch_dim]:
            raise ValueError(
                f"query is {describe(query)} and key {describe(key)}, with batch_first {self.batch_first}; accepted: one batch size"
            )

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Returns q, k and v with the heads as the dim before the last. One matrix product projects each distinct input."""
        heads = (self.num_heads, self.head_dim)
        if self._qkv_same_embed_dim and key is value:
            weight, bias = self.in_proj_weight, self.in_proj_bias
            if query is key:
                return _split(F.linear(query, weight, bias), 3, *heads).unbind(-3)
            q_rows, kv_rows = slice(self.embed_dim), slice(self.embed_dim, None)
            q = F.linear(query, weight[q_rows], None if bias is None else bias[q_rows])
            kv = F.linear(key, weight[kv_rows], None if bias is None else bias[kv_rows])
            return _split(q, *heads), *_split(kv, 2, *heads).unbind(-3)
        if self._qkv_same_embed_dim:
            weights = self.in_proj_weight.chunk(3)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        inputs = (query, key, value)
        return tuple(_split(F.linear(x, w, b), *heads) for x, w, b in zip(inputs, weights, biases, strict=True))

    def _with_extra_keys(self, x: Tensor, added: Tensor | None, seq_dim: int) -> Tensor:
        """Appends the learned token of add_bias_kv and the zero token of add_zero_attn to k or v."""
        shape = [*x.shape]
        shape[seq_dim] = 1
        parts = [x]
        if added is not None:
            parts.append(added.view(1, 1, self.num_heads, self.head_dim).expand(shape).to(x.dtype))
        if self.add_zero_attn:
            parts.append(x.new_zeros(shape))
        return torch.cat(parts, seq_dim)


def _split(x: Tensor, *sizes: int) -> Tensor:
    """Splits the last dim of x into dims of these sizes."""
    return x.view(*x.shape[:-1], *sizes)


def _mask_arguments(
    key_padding_mask: Tensor | None, attn_mask: Tensor | None, is_batched: bool, sizes: tuple[int, int, int, int], extra: int
) -> dict[str, Any]:
    """Returns attention's arguments for the two masks. sizes: batch, heads, queries, keys. extra: appended keys, never hidden."""
    batch, heads, len_q, len_kv = sizes
    padding_shapes = [(batch, len_kv) if is_batched else (len_kv,)]
    pair_shapes = [(len_q, len_kv), (batch * heads, len_q, len_kv)]
    masks = (("key_padding_mask", key_padding_mask, padding_shapes), ("attn_mask", attn_mask, pair_shapes))
    visible: list[Mod] = []
    added: list[Tensor] = []
    for name, mask, shapes in masks:
        if mask is None:
            continue
        if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
            raise TypeError(f"{name} is {describe(mask)}; accepted: bool, True if hidden, or floating point, added to the scores")
        check_meaning(name, mask)
        if not is_one_of(mask.shape, shapes):
            raise ValueError(f"{name} is {describe(mask)}; accepted: shape {' or '.join(map(str, shapes))}")
        if name == "key_padding_mask":
            mask = mask.view(batch, 1, 1, len_kv)
        else:  # explicit sizes: view cannot infer one if the tensor is empty
            mask = mask.view(*((batch, heads) if mask.dim() == 3 else (1, 1)), len_q, len_kv)
        if extra:
            mask = F.pad(mask, (0, extra))
        if mask.dtype == torch.bool:
            visible.append(reading(mask, hides=True))
        else:
            added.append(mask)
    arguments: dict[str, Any] = {}
    if visible:
        arguments["mask_mod"] = visible[0] if len(visible) == 1 else seen_by_both(visible[0], visible[1])
    if added:
        arguments |= {"bias_type": "post_scale_bias", "bias": added[0] if len(added) == 1 else added[0] + added[1]}
    return arguments
