"""Lists of keys for each query: the checks of kv_indices, and the block mask that lists of blocks become."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flexattn.block_mask import ordered
from flexattn.call_options import DEFAULTS, ListOptions
from flexattn.dispatch.spec import as_index, parse_format
from flexattn.validation import FP8_DTYPES, check_tensor, describe

if TYPE_CHECKING:
    from flexattn.call_options import Arguments


def check_lists(q: Tensor, q_format: str, heads_kv: int, arguments: Arguments) -> int:
    """Returns the number of keys that an entry of kv_indices names.

    Raises if kv_indices and kv_index_counts do not fit the call, or another argument does not combine with them.
    """
    indices, counts = arguments["kv_indices"], arguments["kv_index_counts"]
    if indices is None:
        raise ValueError("kv_index_counts is given without kv_indices. Pass both, or leave out kv_index_counts.")
    tokens = tuple(q.shape[q_format.index(dim)] for dim in ("t" if q_format == "thd" else "bs"))
    _check_tensor("kv_indices", indices, q)
    shape = tuple(indices.shape[:-1])
    if shape not in (tokens, (*tokens, heads_kv)):
        names = "t_q" if q_format == "thd" else "b, sq"
        raise ValueError(
            f"kv_indices has shape {tuple(indices.shape)}; accepted: [{names}, n] = {_shape(*tokens)} or [{names}, h_kv, n] = "
            f"{_shape(*tokens, heads_kv)}. Pass kv_block_size for lists of blocks."
        )
    if counts is not None:
        _check_tensor("kv_index_counts", counts, q)
        _check_counts(counts, shape)
    if arguments["block_mask"] is not None:
        raise ValueError("block_mask is given with kv_indices, which lists keys. Pass its mask_mod as mask_mod, or leave one out.")
    if arguments["dropout_p"]:
        raise ValueError(f"dropout_p is {arguments['dropout_p']} with kv_indices; accepted: 0.0")
    if arguments["fp8_recipe"] is not None or q.dtype in FP8_DTYPES:
        raise ValueError("kv_indices is given with q in FP8, or an fp8_recipe; accepted with lists of keys: q in 16 or 32 bits")
    return 1 if arguments["kv_block_size"] is None else block_size(arguments["kv_block_size"])[1]


def _check_counts(counts: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(counts.shape) != shape:
        raise ValueError(
            f"kv_index_counts has shape {tuple(counts.shape)}; accepted: {list(shape)}, kv_indices' shape without the last dim"
        )


def _shape(*dims: int) -> str:
    """Returns the text of a shape with n entries in each list."""
    return f"[{', '.join(map(str, dims))}, n]"


def _check_tensor(name: str, t: Any, q: Tensor) -> None:
    if isinstance(t, Tensor) and t.dtype is torch.int64:
        raise TypeError(f"{name} has dtype torch.int64; accepted: torch.int32. Convert with .to(torch.int32).")
    check_tensor(name, t, (torch.int32,), q.device)
    if t.dim() == 0:
        raise ValueError(f"{name} is {describe(t)}; accepted: a tensor with a dim for each token")


def with_block_mask(
    q: Any, k: Any, given: dict[str, Any], sizes_of: Callable[[Any, Any, dict[str, Any]], tuple[Any, ...]]
) -> dict[str, object]:
    """Returns options of `attention` whose lists of blocks are a block_mask, if blocks of queries have lists.

    given: options with a kv_block_size. sizes_of: `shorthands.score_sizes`. If each query has a list, the options
    stay as they are.
    """
    size_q, size_kv = block_size(given["kv_block_size"])
    indices, counts = given.get("kv_indices"), given.get("kv_index_counts")
    if indices is None:
        raise ValueError(f"kv_block_size is {given['kv_block_size']!r} without kv_indices. Pass both, or leave out kv_block_size.")
    if size_q == 1:
        return given
    if given.get("block_mask") is not None:
        raise ValueError("block_mask is given with kv_block_size, which makes one of kv_indices. Leave one out.")
    batch, heads, longest_q, longest_kv = sizes_of(q, k, DEFAULTS | given)
    heads_kv = k.shape[parse_format(str((DEFAULTS | given)["qkv_format"]))[1].index("h")]
    _check_tensor("kv_indices", indices, q)
    rows = -(-longest_q // size_q)
    shape = tuple(indices.shape)
    if len(shape) != 4 or shape[0] not in (1, batch) or shape[1] not in (1, heads_kv) or shape[2] != rows:
        raise ValueError(
            f"kv_indices has shape {shape} with kv_block_size {(size_q, size_kv)}; accepted: [b, h_kv, query blocks, n] = "
            f"{_shape(batch, heads_kv, rows)}, in which b and h_kv may be 1"
        )
    if counts is not None:
        _check_tensor("kv_index_counts", counts, q)
        _check_counts(counts, shape[:-1])
    if shape[1] > 1:  # a block mask has a list for each query head
        indices = indices.repeat_interleave(heads // heads_kv, 1)
        counts = None if counts is None else counts.repeat_interleave(heads // heads_kv, 1)
    columns = -(-longest_kv // size_kv)
    is_listed = (indices >= 0) & (indices < columns)
    if counts is not None:
        is_listed &= torch.arange(shape[-1], device=indices.device) < counts[..., None]
    chosen = torch.zeros((*indices.shape[:-1], columns + 1), dtype=torch.bool, device=indices.device)
    chosen = chosen.scatter(-1, torch.where(is_listed, indices, columns).long(), True)[..., :columns]
    mask_mod = given.get("mask_mod")
    left = {name: value for name, value in given.items() if name not in (*ListOptions.__annotations__, "mask_mod")}
    return {**left, "block_mask": ListedBlocks(chosen, (size_q, size_kv), mask_mod, (longest_q, longest_kv))}


class ListedBlocks:
    """A block mask of the blocks that lists name, with torch's names. All of their keys are visible, or a mask_mod hides some."""

    def __init__(self, chosen: Tensor, size: tuple[int, int], mask_mod: Any, lengths: tuple[int, int]) -> None:
        """chosen: bool [b, h, query blocks, key blocks]. lengths: the longest sequences of queries and of keys."""
        self.BLOCK_SIZE, self.mask_mod, self.seq_lengths = size, mask_mod, lengths
        by_query, by_key = ordered(chosen), ordered(chosen.transpose(-1, -2))
        none = tuple((torch.zeros_like(counts), indices) for counts, indices in (by_query, by_key))
        partial, full = ((by_query, by_key), none) if mask_mod is not None else (none, (by_query, by_key))
        (self.kv_num_blocks, self.kv_indices), (self.q_num_blocks, self.q_indices) = partial
        (self.full_kv_num_blocks, self.full_kv_indices), (self.full_q_num_blocks, self.full_q_indices) = full


def block_size(value: object) -> tuple[int, int]:
    """Returns kv_block_size as the numbers of queries and of keys of a block. Raises if it is not valid."""
    sides = tuple(value) if isinstance(value, (tuple, list)) else (value, value)
    numbers = [as_index(side) for side in sides]
    size_q, size_kv = numbers if len(numbers) == 2 else (None, None)
    if size_q is None or size_kv is None or size_kv < 1 or (size_q != 1 and (size_q < 16 or size_q % 16 or size_kv % 16)):
        raise ValueError(
            f"kv_block_size is {value!r}; accepted: a multiple of 16, a pair (queries, keys) of them, or (1, keys) for a list for "
            "each query"
        )
    return size_q, size_kv
