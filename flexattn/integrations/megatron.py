"""flexattn as the core attention of Megatron-Core's models: a function for layer specs, and the module that it puts in.

Megatron-Core builds a layer from a `ModuleSpec`, whose submodules name the class of the core attention:
https://github.com/NVIDIA/Megatron-LM. TransformerEngine need not be installed.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import flexattn.integrations.te as te
from flexattn.integrations.te.backend_selection import Environment, environment
from flexattn.integrations.te.masks import check_unread_mask, masks_of, window_of
from flexattn.validation import describe

try:
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import get_cuda_rng_tracker
    from megatron.core.transformer.enums import AttnBackend, AttnMaskType
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
except ImportError as error:
    raise ImportError(
        f"Megatron-Core's attention cannot be imported: {error}; flexattn.integrations.megatron needs megatron-core 0.16 or later; "
        "pip install megatron-core"
    ) from error

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.transformer_config import TransformerConfig

_PACKED = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded", "max_seqlen_q", "max_seqlen_kv")
# Fields of PackedSeqParams for other layers, and for groups, which `forward` reads itself.
_NOT_OF_ATTENTION = {"qkv_format", "local_cp_size", "cp_group", "total_tokens", "seq_idx", "tokens_per_sample"}


def with_flexattn(spec: Any) -> Any:
    """Returns a copy of a spec whose core attentions are `DotProductAttention` of this module.

    Args:
        spec: a `ModuleSpec`, or submodules such as `TransformerBlockSubmodules`, at any depth: of a layer, a block or a model.

    Raises:
        ValueError: if the spec names no core attention.
    """
    spec, count = _replaced(spec)
    if not count:
        raise ValueError(f"spec is a {type(spec).__name__} without a core_attention; accepted: the spec of a layer or of layers")
    return spec


def _replaced(value: Any) -> tuple[Any, int]:
    """Returns a copy of a part of a spec, and how many core attentions it has."""
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        pairs = [_replaced(x) for x in value]
        return type(value)(x for x, _ in pairs), sum(count for _, count in pairs)
    if isinstance(value, type) or not dataclasses.is_dataclass(value):
        return value, 0
    value, total = copy.copy(value), 0
    for field in dataclasses.fields(value):
        part = getattr(value, field.name)
        if field.name == "core_attention" and part is not None:
            part, count = ModuleSpec(module=DotProductAttention) if isinstance(part, ModuleSpec) else DotProductAttention, 1
        else:
            part, count = _replaced(part)
        if count:
            setattr(value, field.name, part)
        total += count
    return value, total


class DotProductAttention(te.DotProductAttention):
    """Core attention of Megatron-Core, in place of its `DotProductAttention` and its `TEDotProductAttention`.

    Args:
        config: the `TransformerConfig`.
        layer_number: number of the layer, from 1.
        attn_mask_type: Megatron's `AttnMaskType`.
        attention_type: "self" or "cross"; ignored.
        attention_dropout: None: config.attention_dropout.
        softmax_scale: None: 1/sqrt(head dim).
        k_channels, v_channels: head dims of keys and values. None: config.kv_channels.
        num_splits: ignored.
        cp_comm_type: how ranks exchange keys, as in `flexattn.integrations.te.DotProductAttention`. None: "p2p".
        pg_collection: process groups tp, cp and hcp. None: those of Megatron's parallel_state.

    Raises:
        NotImplementedError: if config asks for attention in FP8, or for batch invariance.
        ValueError: if an argument is invalid.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        num_splits: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        for name in ("fp8_dot_product_attention", "fp8_multi_head_attention", "batch_invariant_mode"):
            if getattr(config, name, False):
                raise NotImplementedError(f"config.{name} is True; accepted: False")
        groups = pg_collection
        if groups is None:
            groups = ProcessGroupCollection(
                tp=parallel_state.get_tensor_model_parallel_group(check_initialized=False),
                cp=parallel_state.get_context_parallel_group(check_initialized=False),
            )
        options: dict[str, Any] = {}
        if config.context_parallel_size > 1:
            options["cp_comm_type"] = cp_comm_type or "p2p"
            hierarchical = getattr(groups, "hcp", None) or parallel_state.get_hierarchical_context_parallel_groups(False)
            options["cp_group"] = hierarchical if cp_comm_type == "a2a+p2p" else groups.cp
            options["cp_global_ranks"] = torch.distributed.get_process_group_ranks(groups.cp)
        if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
            options["window_size"] = tuple(config.window_size)
        self.config = config
        super().__init__(
            config.num_attention_heads,
            config.kv_channels if k_channels is None or v_channels is None else (k_channels, v_channels),
            config.num_query_groups,
            config.attention_dropout if attention_dropout is None else attention_dropout,
            attn_mask_type=attn_mask_type.name,
            sequence_parallel=config.sequence_parallel,
            tp_size=config.tensor_model_parallel_size,
            tp_group=groups.tp,
            get_rng_state_tracker=get_cuda_rng_tracker if get_cuda_rng_tracker().is_initialized() else None,
            layer_number=layer_number,
            attention_type=attention_type,
            softmax_scale=softmax_scale,
            softmax_type=config.softmax_type,
            return_max_logit=bool(config.qk_clip or getattr(config, "log_max_attention_logit", False)),
            **options,
        )
        self.current_max_attn_logits: Tensor | None = None  # for QK-clip, which Megatron's optimizer applies and resets
        self._groups = self._ranks

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        num_splits: int | None = None,
    ) -> Tensor:
        """Returns out with merged heads, [sq, b, h * d_v], or [t, h * d_v] of packed sequences.

        Args:
            query, key, value: [sq, b, h, d], [skv, b, h_kv, d] and [skv, b, h_kv, d_v]; [t, h, d] and so on if packed.
            attention_mask: bool, True for hidden keys, broadcastable to [b, h, sq, skv]. With a causal type it must hide what that
                type hides, which is checked on a CPU and with FLEXATTN_CHECK=1, but not with context parallelism.
            attn_mask_type: None: the constructor's.
            attention_bias: [b, h, sq, skv], added to the scaled scores; any dim may be 1. Differentiable.
            packed_seq_params: Megatron's `PackedSeqParams`, without an attention_mask.
            num_splits: ignored.

        Raises:
            TypeError: if packed_seq_params has a field that is set and that this version does not know.
            ValueError: if an argument is invalid; the text names it, its value and the accepted values.
        """
        mask_type = self.attn_mask_type if attn_mask_type is None else attn_mask_type.name
        packed = self._packed(packed_seq_params)
        fmt = packed.get("qkv_format", self.qkv_format)
        if fmt == "thd":
            if attention_mask is not None:
                raise ValueError(f"attention_mask is {describe(attention_mask)} with packed_seq_params in thd; accepted: None")
            mask_type = {"causal": "padding_causal", "no_mask": "padding"}.get(mask_type, mask_type)
        elif mask_type == "no_mask" and self.config.window_size is not None and query.shape[fmt.index("s")] == 1:
            mask_type = "causal_bottom_right"  # Megatron decodes one token without a causal mask, and a window must apply
        if attention_mask is not None and "causal" not in mask_type:
            mask_type = "arbitrary"
        elif attention_mask is not None and self._ranks is None:
            b, h, sq = (query.shape[fmt.index(dim)] for dim in "bhs")
            masks = masks_of("causal_bottom_right", window_of("causal", self.window_size), None)
            check_unread_mask(attention_mask, masks, (b, h, sq, key.shape[fmt.index("s")]))
        out = super().forward(
            query,
            key,
            value,
            attention_mask if mask_type == "arbitrary" else None,
            attn_mask_type=mask_type,
            core_attention_bias_type="no_bias" if attention_bias is None else "post_scale_bias",
            core_attention_bias=attention_bias,
            **packed,
        )
        if self.return_max_logit:
            out, max_logit = out
            last, max_logit = self.current_max_attn_logits, max_logit.detach()
            self.current_max_attn_logits = max_logit if last is None else torch.maximum(last, max_logit)
        return out  # type: ignore[no-any-return]

    def _packed(self, params: PackedSeqParams | None) -> dict[str, Any]:
        """Returns the arguments of te's forward in params, and sets the ranks that share these sequences."""
        if params is None:
            return {}
        fields = {x.name: getattr(params, x.name) for x in dataclasses.fields(params)}
        known = {name: fields[name] for name in (*_PACKED, "pad_between_seqs") if name in fields}
        for name in fields.keys() - known.keys() - _NOT_OF_ATTENTION:
            if fields[name] is not None:
                raise TypeError(f"packed_seq_params.{name} is set, which flexattn does not know; accepted: None")
        group, size = fields.get("cp_group"), fields.get("local_cp_size")
        if group is not None:  # Megatron's dynamic context parallelism: ranks of these sequences alone
            self.set_context_parallel_group(group, torch.distributed.get_process_group_ranks(group), None, self.cp_comm_type)
        elif size is not None:
            if size != 1:
                raise ValueError(f"packed_seq_params.local_cp_size is {size} without a cp_group; accepted: 1")
            self._ranks = None
        else:
            self._ranks = self._groups
        return known | ({} if fields["qkv_format"] is None else {"qkv_format": fields["qkv_format"]})

    def _environment(self) -> Environment:
        """Returns what config asks for: Megatron sets TransformerEngine's variables from it, which would exclude each other."""
        found = environment(ignored=())
        is_fused = self.config.attention_backend is not AttnBackend.unfused
        return Environment(is_fused, True, found.is_deterministic or bool(self.config.deterministic_mode))

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None) -> Any:
        """Returns the learnable softmax_offset for Megatron's distributed checkpoints, sharded over tensor-parallel ranks."""
        states = self.state_dict(prefix="", keep_vars=True) if self.softmax_type == "learnable" else {}
        groups = {"tp_group": self.tp_group, "dp_cp_group": (metadata or {})["dp_cp_group"]}
        return make_sharded_tensors_for_checkpoint(states, prefix, {"softmax_offset": 0}, sharded_offsets, **groups)

    # Without FP8 there are no scales to keep, so a state dict has the names that Megatron's own attention has.
    get_extra_state = torch.nn.Module.get_extra_state
    set_extra_state = torch.nn.Module.set_extra_state

    def _load_from_state_dict(self, state_dict: dict[str, object], prefix: str, *rest: object) -> None:
        state_dict.pop(f"{prefix}_extra_state", None)  # TransformerEngine's
        torch.nn.Module._load_from_state_dict(self, state_dict, prefix, *rest)
