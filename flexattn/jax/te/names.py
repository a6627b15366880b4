"""TransformerEngine's enumerations for JAX: names, values and methods of `transformer_engine/jax/attention.py`.

Values are the numbers of TransformerEngine's C interface. https://github.com/NVIDIA/TransformerEngine/blob/main/transformer_engine/jax/attention.py
"""

from __future__ import annotations

from enum import Enum
from typing import TypeVar

from flexattn.integrations.te import names
from flexattn.validation import describe

E = TypeVar("E", bound=Enum)


class AttnBiasType(Enum):
    """Kinds of biases: none, one added before the scores are scaled, or one after."""

    NO_BIAS = names.AttnBiasType["no_bias"]
    PRE_SCALE_BIAS = names.AttnBiasType["pre_scale_bias"]
    POST_SCALE_BIAS = names.AttnBiasType["post_scale_bias"]


class AttnMaskType(Enum):
    """Kinds of masks: causal or not, the diagonal's alignment, and whether sequences have different lengths."""

    NO_MASK = names.AttnMaskType["no_mask"]
    PADDING_MASK = names.AttnMaskType["padding"]
    CAUSAL_MASK = names.AttnMaskType["causal"]
    PADDING_CAUSAL_MASK = names.AttnMaskType["padding_causal"]
    CAUSAL_BOTTOM_RIGHT_MASK = names.AttnMaskType["causal_bottom_right"]
    PADDING_CAUSAL_BOTTOM_RIGHT_MASK = names.AttnMaskType["padding_causal_bottom_right"]

    def is_causal(self) -> bool:
        """Returns whether later keys are hidden."""
        return "CAUSAL" in self.name

    def is_padding(self) -> bool:
        """Returns whether sequences have different lengths."""
        return "PADDING" in self.name

    def is_bottom_right(self) -> bool:
        """Returns whether the diagonal ends at the last query and the last key."""
        return "BOTTOM_RIGHT" in self.name


class AttnSoftmaxType(Enum):
    """Kinds of softmax, by the extra term of the denominator: none, 1, or exp of an offset for each head."""

    VANILLA_SOFTMAX = names.SoftmaxType["vanilla"]
    OFF_BY_ONE_SOFTMAX = names.SoftmaxType["off-by-one"]
    LEARNABLE_SOFTMAX = names.SoftmaxType["learnable"]

    @classmethod
    def from_str(cls, softmax_type: str) -> AttnSoftmaxType:
        """Returns the member for "vanilla", "off_by_one" (or "off-by-one") or "learnable"; raises ValueError for another name."""
        result = cls.__members__.get(f"{str(softmax_type).replace('-', '_').upper()}_SOFTMAX")
        if result is None:
            raise ValueError(f"softmax_type is {softmax_type!r}; accepted: 'vanilla', 'off_by_one', 'learnable'")
        return result


class QKVFormat(Enum):
    """Dims of q, k and v. THD has the dims of BSHD, with several sequences per row."""

    SBHD = names.QKVFormat["sbhd"]
    BSHD = names.QKVFormat["bshd"]
    THD = names.QKVFormat["thd"]


class QKVLayout(Enum):
    """Layouts of q, k and v: all in one array, [b, s, 3, h, d], k and v in one, [b, s, 2, h, d], or three arrays.

    T3HD, THD_T2HD and THD_THD_THD have the same shapes, with several sequences per row.
    """

    BS3HD = names.QKVLayout["bs3hd"]
    BSHD_BS2HD = names.QKVLayout["bshd_bs2hd"]
    BSHD_BSHD_BSHD = names.QKVLayout["bshd_bshd_bshd"]
    T3HD = names.QKVLayout["t3hd"]
    THD_T2HD = names.QKVLayout["thd_t2hd"]
    THD_THD_THD = names.QKVLayout["thd_thd_thd"]

    def get_qkv_format(self) -> QKVFormat:
        """Returns the format of q, k and v."""
        return QKVFormat.THD if self.is_thd() else QKVFormat.BSHD

    def is_qkvpacked(self) -> bool:
        """Returns whether q, k and v are one array."""
        return self in (QKVLayout.BS3HD, QKVLayout.T3HD)

    def is_kvpacked(self) -> bool:
        """Returns whether k and v are one array."""
        return self in (QKVLayout.BSHD_BS2HD, QKVLayout.THD_T2HD)

    def is_separate(self) -> bool:
        """Returns whether q, k and v are three arrays."""
        return self in (QKVLayout.BSHD_BSHD_BSHD, QKVLayout.THD_THD_THD)

    def is_thd(self) -> bool:
        """Returns whether a row may have several sequences."""
        return self in (QKVLayout.T3HD, QKVLayout.THD_T2HD, QKVLayout.THD_THD_THD)

    def to_qkvpacked(self) -> QKVLayout:
        """Returns the layout of this format with q, k and v in one array."""
        return QKVLayout.T3HD if self.is_thd() else QKVLayout.BS3HD

    def to_kvpacked(self) -> QKVLayout:
        """Returns the layout of this format with k and v in one array."""
        return QKVLayout.THD_T2HD if self.is_thd() else QKVLayout.BSHD_BS2HD

    def to_separate(self) -> QKVLayout:
        """Returns the layout of this format with three arrays."""
        return QKVLayout.THD_THD_THD if self.is_thd() else QKVLayout.BSHD_BSHD_BSHD


class CPStrategy(Enum):
    """Strategies to split sequences over devices; only DEFAULT without a mesh axis is supported."""

    DEFAULT = 0
    ALL_GATHER = 1
    RING = 2


def member(kind: type[E], argument: str, value: object) -> E:
    """Returns the member for a member, or for a member of the same name of TransformerEngine's own enumeration.

    Raises ValueError for anything else.
    """
    if isinstance(value, kind):
        return value
    result = kind.__members__.get(str(getattr(value, "name", "")))
    if result is None:
        raise ValueError(f"{argument} is {describe(value)}; accepted: a {kind.__name__}: {', '.join(kind.__members__)}")
    return result


_NAMES = {AttnBiasType: names.AttnBiasType, AttnMaskType: names.AttnMaskType, AttnSoftmaxType: names.SoftmaxType}


def name_of(value: AttnBiasType | AttnMaskType | AttnSoftmaxType) -> str:
    """Returns `flexattn.jax.attention`'s name for a member."""
    return next(name for name, number in _NAMES[type(value)].items() if number == value.value)


_MASK_TYPES = {
    **{name: AttnMaskType(value) for name, value in names.AttnMaskType.items()},
    "bottom_right_causal": AttnMaskType.CAUSAL_BOTTOM_RIGHT_MASK,
    "causal_padding": AttnMaskType.PADDING_CAUSAL_MASK,
    **dict.fromkeys(
        ("causal_padding_bottom_right", "bottom_right_causal_padding", "bottom_right_padding_causal"),
        AttnMaskType.PADDING_CAUSAL_BOTTOM_RIGHT_MASK,
    ),
}


def canonicalize_attn_mask_type(attn_mask_type: str) -> AttnMaskType:
    """Returns the member for a mask type's name, such as "padding_causal" or "causal_padding"; raises ValueError for others."""
    if attn_mask_type not in _MASK_TYPES:
        raise ValueError(f"attn_mask_type is {attn_mask_type!r}; accepted: {', '.join(_MASK_TYPES)}")
    return _MASK_TYPES[attn_mask_type]
