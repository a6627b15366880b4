"""TransformerEngine's layout names, and the formats and packings of q, k, v and their gradients that they mean."""

from __future__ import annotations

import functools
from typing import NamedTuple

from torch import Tensor

from flexattn.integrations.te.names import QKVLayout

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
