"""Stand-in for FlashAttention's packages: the functions of versions 2, 3 and 4, with their signatures, run by flexattn.

    from flexattn.integrations import flash_attn
    flash_attn.install()
    from flash_attn import flash_attn_func  # this package's

Importing this package changes nothing; only `install` does.
"""

from __future__ import annotations

import importlib.util
import sys

from flexattn.integrations.flash_attn import bert_padding, block_sparsity, cute, flash_attn_3, flash_attn_interface
from flexattn.integrations.flash_attn.flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

__all__ = [
    "bert_padding",
    "cute",
    "flash_attn_3",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "install",
]

__version__ = "2.8.4"  # version of FlashAttention 2 with these signatures; other libraries compare it


def install(override: bool = False) -> None:
    """Redirects imports of FlashAttention 2, 3 and 4 to this package's modules, in this process.

    The names are `flash_attn` with `flash_attn_interface` and `bert_padding`; `flash_attn_interface` and `flash_attn_3`; and
    `flash_attn.cute` with `interface` and `block_sparsity`.

    Args:
        override: if True, hides a FlashAttention that is installed or already imported.

    Raises:
        RuntimeError: if another FlashAttention is found and override is False.
    """
    modules: dict[str, object] = {
        "flash_attn": sys.modules[__name__],
        "flash_attn.flash_attn_interface": flash_attn_interface,
        "flash_attn.bert_padding": bert_padding,
        "flash_attn.cute": cute,
        "flash_attn.cute.interface": cute,
        "flash_attn.cute.block_sparsity": block_sparsity,
        "flash_attn_interface": flash_attn_3,
        "flash_attn_3": flash_attn_3,
        "flash_attn_3.flash_attn_interface": flash_attn_3,
    }
    packages = [name for name in modules if "." not in name]
    for name in packages:
        loaded = sys.modules.get(name)
        is_foreign = loaded is not modules[name] if loaded is not None else importlib.util.find_spec(name) is not None
        if is_foreign and not override:
            raise RuntimeError(
                f"another {name} is installed; uninstall it, or call install(override=True), which hides it in this process"
            )
    for name in [n for n in sys.modules if n.split(".")[0] in packages]:
        del sys.modules[name]
    sys.modules.update(modules)  # type: ignore[arg-type]
    for name, module in modules.items():  # sets attributes as an import does, for `import flash_attn.cute.interface`
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
