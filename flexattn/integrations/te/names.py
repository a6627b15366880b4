"""TransformerEngine's names for formats, layouts, masks and backends, with their values in its C interface.

The values are those of `transformer_engine/fused_attn.h`, and of the FP8 tensor indices in `transformer_engine_torch`.
"""

from __future__ import annotations

import enum
from typing import Any

QKVFormat = {
    "sbhd": 0,
    "bshd": 1,
    "thd": 2,
    "bshd_2sbhd": 3,
    "sbhd_2bshd": 4,
    "thd_2bshd": 5,
    "thd_2sbhd": 6,
    "bhsd": 7,
}
QKVLayout = {
    "sb3hd": 0,
    "sbh3d": 1,
    "sbhd_sb2hd": 2,
    "sbhd_sbh2d": 3,
    "sbhd_sbhd_sbhd": 4,
    "bs3hd": 5,
    "bsh3d": 6,
    "bshd_bs2hd": 7,
    "bshd_bsh2d": 8,
    "bshd_bshd_bshd": 9,
    "t3hd": 10,
    "th3d": 11,
    "thd_t2hd": 12,
    "thd_th2d": 13,
    "thd_thd_thd": 14,
    "sbhd_bshd_bshd": 15,
    "bshd_sbhd_sbhd": 16,
    "thd_bshd_bshd": 17,
    "thd_sbhd_sbhd": 18,
    "paged_kv_bshd_bshd_bshd": 19,
    "paged_kv_bshd_sbhd_sbhd": 20,
    "paged_kv_sbhd_bshd_bshd": 21,
    "paged_kv_sbhd_sbhd_sbhd": 22,
    "paged_kv_thd_bshd_bshd": 23,
    "paged_kv_thd_sbhd_sbhd": 24,
    "bhsd_bhsd_bhsd": 25,
}
AttnBiasType = {"no_bias": 0, "pre_scale_bias": 1, "post_scale_bias": 2, "alibi": 3}
AttnMaskType = {
    "no_mask": 0,
    "padding": 1,
    "causal": 2,
    "padding_causal": 3,
    "causal_bottom_right": 4,
    "padding_causal_bottom_right": 5,
}
SoftmaxType = {"vanilla": 0, "off-by-one": 1, "learnable": 2}

META_QKV, META_O, META_S = 2, 3, 8  # indices of the forward's FP8 tensors: GEMM1_OUTPUT, GEMM2_INPUT, GEMM3_OUTPUT
META_DQKV, META_DO, META_DP = 0, 3, 5  # indices of the backward's: GRAD_OUTPUT1, GRAD_INPUT2, GRAD_INPUT3


class FusedAttnBackend(enum.IntEnum):
    """Kinds of fused attention by TransformerEngine's numbers; `FusedAttnBackend["FP8"]` is a member by name.

    A kind only determines the dtype of q, k and v: 16 bits (or float32), or FP8. flexattn selects the kernels itself
    (docs/backends.md).
    """

    No_Backend = -1
    F16_arbitrary_seqlen = 1
    FP8 = 2

    @classmethod
    def cast(cls, value: Any) -> FusedAttnBackend:
        """Returns the member for a member, a number, a name, or another library's enum with such a value or name.

        Raises ValueError for anything else, including F16_max512_seqlen (0) of older versions.
        """
        if isinstance(value, str):
            member = cls.__members__.get(value)
        else:
            try:
                member = next((kind for kind in cls if kind == int(value)), None)
            except (TypeError, ValueError):
                member = cls.__members__.get(str(getattr(value, "name", "")).removeprefix("NVTE_"))
        if member is None:
            accepted = ", ".join(f"{kind.name} ({kind.value})" for kind in cls)
            raise ValueError(f"fused_attention_backend is {value!r}; accepted: {accepted}")
        return member
