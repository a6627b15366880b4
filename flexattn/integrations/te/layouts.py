"""TransformerEngine's layout names, as formats of q, k and v and as where their gradients lie."""

from __future__ import annotations

import functools
from typing import NamedTuple

from torch import Tensor

from flexattn.integrations.te.names import QKVLayout

_PAGED = "paged_kv_"


class Layout(NamedTuple):
    """A layout of q, k and v: the format of each, and which of them share a tensor.

    packing: "3hd" or "h3d" for q, k and v in one tensor, with a dim of 3 in front of the heads or behind them; "hd_2hd" or
    "hd_h2d" for k and v in one, with a dim of 2; "" for three tensors. is_paged: k and v are pages, [pages, page_size, h, d] where
    kv_format is bshd, [page_size, pages, h, d] where it is sbhd.
    """

    q_format: str
    kv_format: str
    packing: str
    is_paged: bool

    @property
    def qkv_format(self) -> str:
        """Both formats in one name, as `flexattn.attention` takes them; that of pages once `in_bshd` has turned them."""
        kv_format = "bshd" if self.is_paged else self.kv_format
        return self.q_format if self.q_format == kv_format else f"{self.q_format}_2{kv_format}"

    def in_bshd(self, pages: Tensor) -> Tensor:
        """Returns pages of this layout as [pages, page_size, h, d], a view."""
        return pages.transpose(0, 1) if self.kv_format == "sbhd" else pages


@functools.cache
def parse_layout(name: str, argument: str = "qkv_layout") -> Layout:
    """Returns what one of TransformerEngine's 26 layout names says. argument: its name, for errors.

    Raises ValueError for another name.
    """
    if name not in QKVLayout:
        raise ValueError(f"{argument} is {name!r}; accepted: {', '.join(QKVLayout)}")
    parts = name.removeprefix(_PAGED).split("_")
    formats = [part.replace("3", "").replace("2", "") for part in parts]
    number = "3" if len(parts) == 1 else "2" if len(parts) == 2 else ""
    packing = ""
    if number:
        before = parts[-1].endswith(f"{number}hd")
        packing = {"3": ("h3d", "3hd"), "2": ("hd_h2d", "hd_2hd")}[number][before]
    return Layout(formats[0], formats[-1], packing, name.startswith(_PAGED))


def unpaged_layout(name: str, argument: str = "qkv_layout") -> Layout:
    """Returns `parse_layout`; raises NotImplementedError for the six layouts with page tables, which have no gradients."""
    layout = parse_layout(name, argument)
    if layout.is_paged:
        raise NotImplementedError(
            f"{argument} is {name!r}, and pages have no gradients; accepted: k and v without pages, as "
            f"{name.removeprefix(_PAGED)!r} of the keys and values gathered from them"
        )
    return layout
