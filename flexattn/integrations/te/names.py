"""TransformerEngine's names for formats, layouts, masks and backends: their values in its C interface, and what layouts mean.

The values are those of `transformer_engine/fused_attn.h`, and of the FP8 tensor indices in `transformer_engine_torch`.
"""

from __future__ import annotations

import enum
import functools
from typing import Any, NamedTuple

from torch import Tensor


def _numbered(names: str) -> dict[str, int]:
    """Returns the numbers 0, 1, ... by the names."""
    return {name: number for number, name in enumerate(names.split())}


QKVFormat = _numbered("sbhd bshd thd bshd_2sbhd sbhd_2bshd thd_2bshd thd_2sbhd bhsd")
QKVLayout = _numbered(
    """
    sb3hd sbh3d sbhd_sb2hd sbhd_sbh2d sbhd_sbhd_sbhd
    bs3hd bsh3d bshd_bs2hd bshd_bsh2d bshd_bshd_bshd
    t3hd th3d thd_t2hd thd_th2d thd_thd_thd
    sbhd_bshd_bshd bshd_sbhd_sbhd thd_bshd_bshd thd_sbhd_sbhd
    paged_kv_bshd_bshd_bshd paged_kv_bshd_sbhd_sbhd paged_kv_sbhd_bshd_bshd
    paged_kv_sbhd_sbhd_sbhd paged_kv_thd_bshd_bshd paged_kv_thd_sbhd_sbhd
    bhsd_bhsd_bhsd
    """
)
AttnBiasType = _numbered("no_bias pre_scale_bias post_scale_bias alibi")
AttnMaskType = _numbered("no_mask padding causal padding_causal causal_bottom_right padding_causal_bottom_right")
SoftmaxType = _numbered("vanilla off-by-one learnable")

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


_PAGED = "paged_kv_"


class Layout(NamedTuple):
    """A layout of q, k and v: the format of each, and the tensors that they share.

    packing: "3hd" or "h3d" if q, k and v share one tensor, with a dim of 3 before or after the heads. "hd_2hd" or "hd_h2d" if k
    and v share one, with a dim of 2. "" for three tensors. is_paged: k and v are pages, [pages, page_size, h, d] if kv_format is
    bshd, and [page_size, pages, h, d] if it is sbhd.
    """

    q_format: str
    kv_format: str
    packing: str
    is_paged: bool

    @property
    def qkv_format(self) -> str:
        """Both formats in one name, for `flexattn.attention`; pages have the format of `in_bshd`'s result."""
        kv_format = "bshd" if self.is_paged else self.kv_format
        return self.q_format if self.q_format == kv_format else f"{self.q_format}_2{kv_format}"

    def in_bshd(self, pages: Tensor) -> Tensor:
        """Returns pages of this layout as a view [pages, page_size, h, d]."""
        return pages.transpose(0, 1) if self.kv_format == "sbhd" else pages


@functools.cache
def parse_layout(name: str, argument: str = "qkv_layout") -> Layout:
    """Returns the layout for one of TransformerEngine's 26 layout names. argument: the argument's name, for errors.

    Raises ValueError for another name.
    """
    if name not in QKVLayout:
        raise ValueError(f"{argument} is {name!r}; accepted: {', '.join(QKVLayout)}")
    parts = name.removeprefix(_PAGED).split("_")
    formats = [part.replace("3", "").replace("2", "") for part in parts]
    count = "3" if len(parts) == 1 else "2" if len(parts) == 2 else ""
    packing = ""
    if count:
        before = parts[-1].endswith(f"{count}hd")
        packing = {"3": ("h3d", "3hd"), "2": ("hd_h2d", "hd_2hd")}[count][before]
    return Layout(formats[0], formats[-1], packing, name.startswith(_PAGED))


def unpaged_layout(name: str, argument: str = "qkv_layout") -> Layout:
    """Returns `parse_layout`'s result; raises NotImplementedError for the six paged layouts, which have no gradients."""
    layout = parse_layout(name, argument)
    if layout.is_paged:
        raise NotImplementedError(
            f"{argument} is {name!r}, but pages have no gradients; accepted: k and v without pages, such as "
            f"{name.removeprefix(_PAGED)!r} of the keys and values gathered from them"
        )
    return layout
