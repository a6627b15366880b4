"""flexattn as the inner attention of torchtitan's models: a converter for model configurations, and the modules that it puts in.

A model's configuration names its inner attention by a `Config` object, and torchtitan makes masks and context parallelism by that
object's class: https://github.com/pytorch/torchtitan. Each module here is thus a subclass of the module that it replaces.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from flexattn import compat
from flexattn.dispatch.spec import MaskType
from flexattn.functional import attention
from flexattn.integrations.flex import flex_attention
from flexattn.validation import describe

try:
    import spmd_types as spmd
    from spmd_types.runtime import get_partition_spec
    from torchtitan.distributed.utils import get_spmd_backend, is_in_batch_invariant_mode
    from torchtitan.models.common import attention as titan
    from torchtitan.protocols.model import ModelConfigConverter
except ImportError as error:
    raise ImportError(
        f"torchtitan's attention cannot be imported: {error}; flexattn.integrations.torchtitan needs torchtitan 0.3 or later; "
        "pip install torchtitan"
    ) from error

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.nn.attention.flex_attention import BlockMask

    from flexattn.distributed.plans import Plan

OutTransform = Callable[[Tensor, Tensor], Tensor]


class FlexattnConverter(ModelConfigConverter):  # type: ignore[misc]  # torchtitan need not be installed, and has no type then
    """Converter that makes every inner attention of a model run on flexattn: `converters=[FlexattnConverter.Config()]`."""

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):  # type: ignore[misc]
        """Configuration of the converter; it has no fields of its own."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def convert(self, model_config: Any) -> Any:
        """Returns model_config, changed in place, as `convert` does."""
        return convert(model_config)


def convert(model_config: Any) -> Any:
    """Returns a model's configuration, changed in place: every inner attention of torchtitan becomes flexattn's.

    The fields of each inner attention keep their values.

    Raises:
        ValueError: if the configuration has no inner attention of a known class.
    """
    count = 0
    for known, module in _MODULES.items():
        for _, config, parent, field in list(model_config.traverse(known.Config)):
            if parent is None:
                raise ValueError(f"model_config is a {type(config).__qualname__}; accepted: the configuration of a model")
            if type(config) is known.Config:
                values = {x.name: getattr(config, x.name) for x in dataclasses.fields(config)}
                replacement = module.Config(**values)
                if isinstance(field, int):
                    parent[field] = replacement
                else:
                    setattr(parent, field, replacement)
            count += isinstance(config, (known.Config, module.Config))
    if not count:
        accepted = ", ".join(f"{known.__name__}.Config" for known in _MODULES)
        raise ValueError(f"model_config is a {type(model_config).__qualname__} without an inner attention; accepted: {accepted}")
    return model_config


class VarlenAttention(titan.VarlenAttention):  # type: ignore[misc]
    """Attention over packed documents, in place of torchtitan's `VarlenAttention`; it runs in the tensors' own dtype."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan.VarlenAttention.Config):  # type: ignore[misc]
        """Configuration, with torchtitan's fields."""

    def __init__(self, config: Config) -> None:
        titan.Module.__init__(self)  # the parent's constructor chooses torch's own kernels
        self.window_size = config.window_size

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: titan.VarlenMetadata,
        scale: float | None = None,
        enable_gqa: bool = False,
        out_transform: OutTransform | None = None,
    ) -> Tensor:
        """Returns out [b, s, h, d_v] of q's dtype, or out_transform(out, lse).

        Args:
            q_BLNH: [b, s, h, d].
            k_BLNH, v_BLNH: [b, s, h_kv, d] and [b, s, h_kv, d_v].
            attention_masks: torchtitan's `VarlenMetadata`, the offsets of all documents of the batch.
            scale: scale of the scores. None: 1/sqrt(d).
            enable_gqa: whether query heads share heads of keys.
            out_transform: function of out and lse, [b, s, h]; gradients go through both.

        Raises:
            TypeError: if attention_masks is no VarlenMetadata.
            ValueError: if enable_gqa is False and the heads differ; also as `flexattn.attention`.
        """
        if not isinstance(attention_masks, titan.VarlenMetadata):
            raise TypeError(f"attention_masks is a {type(attention_masks).__name__}; accepted: a VarlenMetadata")
        _check_heads(q_BLNH, k_BLNH, enable_gqa)
        q, k, v = (
            x.reshape(-1, *x.shape[2:]) for x in (q_BLNH, k_BLNH, v_BLNH)
        )  # outside: torchtitan refuses a split sequence here
        left, right = self.window_size
        with _untyped():
            out, lse = attention(
                q,
                k,
                v,
                qkv_format="thd",
                cu_seqlens_q=attention_masks.cu_seq_q,
                cu_seqlens_kv=attention_masks.cu_seq_k,
                max_seqlen_q=attention_masks.max_q,
                max_seqlen_kv=attention_masks.max_k,
                attn_mask_type="padding_causal_bottom_right" if right == 0 else "padding",
                window_size=(left, right),
                softmax_scale=scale,
                batch_invariant=is_in_batch_invariant_mode(),
                return_lse=True,
            )
            out, lse = out.view(*q_BLNH.shape[:-1], -1), lse.transpose(0, 1).reshape(q_BLNH.shape[:-1])
        return _transformed(out, lse, q_BLNH, out_transform)


class FlexAttention(titan.FlexAttention):  # type: ignore[misc]
    """Attention under torch's BlockMask, in place of torchtitan's `FlexAttention`; it needs no torch.compile."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan.FlexAttention.Config):  # type: ignore[misc]
        """Configuration, with torchtitan's fields. kernel_options are checked, and have no effect."""

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: BlockMask,
        score_mod: Callable[..., Tensor] | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        out_transform: OutTransform | None = None,
    ) -> Tensor:
        """Returns out [b, sq, h, d_v] of q's dtype, or out_transform(out, lse).

        Args:
            q_BLNH: [b, sq, h, d].
            k_BLNH, v_BLNH: [b, skv, h_kv, d] and [b, skv, h_kv, d_v].
            attention_masks: torch's BlockMask.
            score_mod, scale, enable_gqa: as in `flexattn.integrations.flex.flex_attention`.
            out_transform: function of out and lse, [b, sq, h]; gradients go through both.

        Raises:
            TypeError: if attention_masks is no BlockMask.
            NotImplementedError: in torchtitan's batch-invariant mode.
            ValueError: as `flexattn.integrations.flex.flex_attention`.
        """
        if not hasattr(attention_masks, "kv_num_blocks"):
            raise TypeError(f"attention_masks is a {type(attention_masks).__name__}; accepted: a BlockMask")
        if is_in_batch_invariant_mode():
            raise NotImplementedError("FlexAttention runs in torchtitan's batch-invariant mode; accepted: VarlenAttention")
        q, k, v = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
        with _untyped():
            result: Any = flex_attention(
                q, k, v, score_mod, attention_masks, scale, enable_gqa, return_lse=True, kernel_options=self.kernel_options
            )
            out, lse = (x.transpose(1, 2) for x in result)
        return _transformed(out, lse, q_BLNH, out_transform)


class ScaledDotProductAttention(titan.ScaledDotProductAttention):  # type: ignore[misc]
    """Attention without document masks, in place of torchtitan's `ScaledDotProductAttention`."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan.ScaledDotProductAttention.Config):  # type: ignore[misc]
        """Configuration; it has no fields of its own."""

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        is_causal: bool = True,
    ) -> Tensor:
        """Returns out [b, s, h, d_v] of q's dtype; of this rank's tokens if the tensors are DTensors that are sharded over tokens.

        Args:
            q_BLNH: [b, s, h, d].
            k_BLNH, v_BLNH: [b, s, h_kv, d] and [b, s, h_kv, d_v].
            attention_masks: None, as in torchtitan.
            scale: scale of the scores. None: 1/sqrt(d).
            enable_gqa: whether query heads share heads of keys.
            is_causal: whether a query sees only the keys before it, and its own.

        Raises:
            ValueError: if attention_masks is given, or if enable_gqa is False and the heads differ.
        """
        if attention_masks is not None:
            raise ValueError(
                f"attention_masks is a {type(attention_masks).__name__}; accepted: None; use VarlenAttention or FlexAttention"
            )
        _check_heads(q_BLNH, k_BLNH, enable_gqa)
        mask: MaskType = "causal" if is_causal else "no_mask"
        if isinstance(q_BLNH, DTensor) and any(place == Shard(1) for place in q_BLNH.placements):
            return _over_ranks({"q_BLNH": q_BLNH, "k_BLNH": k_BLNH, "v_BLNH": v_BLNH}, mask, scale)
        with _untyped():
            out = attention(q_BLNH, k_BLNH, v_BLNH, attn_mask_type=mask, softmax_scale=scale)
        return _typed(out, q_BLNH)


_MODULES: dict[Any, Any] = {
    titan.VarlenAttention: VarlenAttention,
    titan.FlexAttention: FlexAttention,
    titan.ScaledDotProductAttention: ScaledDotProductAttention,
}


def _check_heads(q: Tensor, k: Tensor, enable_gqa: bool) -> None:
    if q.shape[2] != k.shape[2] and not enable_gqa:
        raise ValueError(f"q_BLNH has {q.shape[2]} heads and k_BLNH has {k.shape[2]}; accepted: equal counts, or enable_gqa=True")


def _over_ranks(qkv: Mapping[str, Any], mask: MaskType, scale: float | None) -> Tensor:
    """Returns this rank's tokens of a call whose tensors are sharded over the tokens, as torchtitan's context parallelism does."""
    from flexattn import distributed

    for name, x in qkv.items():
        if not isinstance(x, DTensor) or x.placements != (Shard(1),):
            raise ValueError(
                f"{name} is {describe(x)}, placed as {getattr(x, 'placements', None)}; accepted: a DTensor, placed as (Shard(1),)"
            )
    is_zigzag = mask == "causal" and compat.is_ring_balanced()
    lengths = qkv["q_BLNH"].shape[1], qkv["k_BLNH"].shape[1]
    plan = _plan(qkv["q_BLNH"].device_mesh.get_group(), lengths, mask, "zigzag" if is_zigzag else "contiguous")
    q, k, v = (x.to_local() for x in qkv.values())
    out: Tensor = distributed.attention(q, k, v, plan=plan, softmax_scale=scale)
    return out


@functools.lru_cache(maxsize=16)
def _plan(group: ProcessGroup, lengths: tuple[int, int], mask: MaskType, layout: str) -> Plan:
    from flexattn import distributed

    return distributed.plan(group, length=lengths, attn_mask_type=mask, layout=layout)


def _untyped() -> contextlib.AbstractContextManager[None]:
    """Returns a context without spmd_types' checks of types, which know torch's operators alone."""
    context: contextlib.AbstractContextManager[None] = spmd.no_typecheck()
    return context


def _typed(x: Tensor, q: Tensor) -> Tensor:
    """Returns x with the first dims of q's type of spmd_types, where torchtitan checks such types."""
    if get_spmd_backend() == "spmd_types" and spmd.is_type_checking():
        shards = get_partition_spec(q)
        spmd.assert_type(x, spmd.get_local_type(q), None if shards is None else spmd.PartitionSpec(*tuple(shards)[: x.dim()]))
    return x


def _transformed(out: Tensor, lse: Tensor, q: Tensor, out_transform: OutTransform | None) -> Tensor:
    out = _typed(out, q)
    return out if out_transform is None else out_transform(out, _typed(lse, q))
