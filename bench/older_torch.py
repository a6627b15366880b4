"""Stand-ins for names of torch that torchtitan imports, and that an older torch lacks.

torchtitan 0.3 needs torch 2.13 and, on Hopper, FlashAttention-3. With these stand-ins a single process runs its models on torch
2.11, and packed documents on FlashAttention-2.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from typing import TypeVar

import torch.distributed.fsdp
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.attention.varlen import varlen_attn

R = TypeVar("R")


def without_unknown(function: Callable[..., R], ignored: frozenset[str]) -> Callable[..., R]:
    """Returns the function without those keywords of `ignored` that it does not know."""
    unknown = ignored - set(inspect.signature(function).parameters)

    def call(*args: object, **options: object) -> R:
        return function(*args, **{name: x for name, x in options.items() if name not in unknown})

    return call


def prepare_torchtitan() -> None:
    """Imports torchtitan's attention, with stand-ins for the names and keywords that this torch lacks."""
    if not hasattr(torch.distributed.fsdp, "DataParallelMeshDims"):  # names the axes of a mesh for FSDP
        vars(torch.distributed.fsdp)["DataParallelMeshDims"] = object
    from torchtitan.models.common import attention, decoder
    from torchtitan.tools import utils

    # An older varlen_attn takes grouped heads without a word, and never divides the keys between programs.
    attention.varlen_attn = without_unknown(varlen_attn, frozenset({"num_splits", "enable_gqa"}))
    # An older create_block_mask always separates full blocks, as torchtitan asks for. Compiled it takes half a minute.
    decoder.create_attention_mask = without_unknown(create_block_mask, frozenset({"separate_full_blocks"}))
    if importlib.util.find_spec("flash_attn_interface") is None:
        utils.get_cuda_flash_attention_impl = lambda: None  # torch's default is then FlashAttention-2
