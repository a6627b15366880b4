"""Types of the options of `attention`, and of those that attention over ranks has too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn.attention.flex_attention import BlockMask

    from flexattn import fp8
    from flexattn.dispatch.spec import BackendName, BiasType, MaskType, QkvFormat, SoftmaxType, Window
    from flexattn.mods.trace import Mod


class CommonOptions(TypedDict, total=False):
    """Arguments that `attention` and `distributed.attention` both have. Each of them documents its own."""

    qkv_format: QkvFormat
    attn_mask_type: MaskType
    window_size: int | tuple[int, int] | Window
    bottom_right_diagonal: bool | None
    bias_type: BiasType | None
    bias: Tensor | None
    alibi_slopes: Tensor | None
    softmax_type: SoftmaxType | None
    softmax_offset: Tensor | None
    softmax_scale: float | None
    softcap: float
    dropout_p: float
    rng_state: Tensor | None
    score_mod: Mod | None
    mask_mod: Mod | None
    score_mod_tensors: Sequence[Tensor] | Mapping[str, Tensor]
    block_mask: BlockMask | None
    fp8_recipe: fp8.Recipe | None
    fp8_state: fp8.DelayedScaling | None
    descale_q: Tensor | None
    descale_k: Tensor | None
    descale_v: Tensor | None
    deterministic: bool | None
    backend: BackendName | None


class Options(CommonOptions, total=False):
    """Arguments of `attention` that do not decide what it returns, for its overloads. `attention` documents them."""

    causal: bool
    mask: Tensor | None
    cu_seqlens: Tensor | None
    max_seqlen: int | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_kv: Tensor | None
    cu_seqlens_q_padded: Tensor | None
    cu_seqlens_kv_padded: Tensor | None
    seqused_q: Tensor | None
    seqused_kv: Tensor | None
    page_table: Tensor | None
    max_seqlen_q: int | None
    max_seqlen_kv: int | None
    batch_invariant: bool
    out: Tensor | None
