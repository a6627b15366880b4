"""Block masks: creates torch's `BlockMask` without a dense mask, and turns one into lists for the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from flexattn.dispatch import options
from flexattn.dispatch.mod_program import evaluate
from flexattn.dispatch.neutral import is_capturing, is_jit_traced, is_traced, may_keep, neutral_state
from flexattn.validation import check_count, check_device, check_local, describe

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from flexattn.mods.trace import Mod

MOST_AT_ONCE = 1 << 24  # elements of the mask in memory at a time
_NAME = "_flexattn_lists"
_KEY_LISTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
BLOCK_TENSORS = (*_KEY_LISTS, *(name.replace("kv_", "q_") for name in _KEY_LISTS))


class BlockLists(NamedTuple):
    """A block mask's tensors in the operators' order, and its block size (queries, keys)."""

    tensors: tuple[Tensor, ...]
    block_size: tuple[int, int]


def create_block_mask(
    mask_mod: Mod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | None = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
) -> BlockMask:
    """Creates torch's BlockMask of `mask_mod`: lists of the key blocks that each query block sees in part, and in full.

    The function equals `torch.nn.attention.flex_attention.create_block_mask`, and FlexAttention accepts the result, but it computes
    the mask a few blocks at a time: memory is that of the lists, O(blocks). You do not need a block mask if `attn_mask_type`,
    `window_size` and `cu_seqlens` can express the mask.

    Args:
        mask_mod: mask_mod(b, h, q_idx, kv_idx) -> whether the query sees the key, as for `attention`.
        B, H: batch size and number of query heads; None or 1 if the mask is the same for all.
        Q_LEN, KV_LEN: lengths of the longest sequences that the mask is for.
        device: device of the lists and of mask_mod's captures. Default: "cuda", or "cpu" if there is no GPU.
        BLOCK_SIZE: queries and keys of a block, multiples of 16; large powers of two run fastest.

    Raises:
        ValueError, TypeError: a size is not a multiple of 16, a length is negative, or mask_mod cannot be traced.
        RuntimeError: the call is under torch.jit.trace.
    """
    from torch.nn.attention.flex_attention import BlockMask

    from flexattn.mods.trace import trace_mods

    if is_jit_traced():
        raise RuntimeError(
            "create_block_mask is called under torch.jit.trace, which cannot record torch's BlockMask; accepted: a mask created "
            "before the trace, or mask_mod"
        )
    if not callable(mask_mod):
        raise TypeError(f"mask_mod is {describe(mask_mod)}; accepted: a function of b, h, q_idx and kv_idx")
    for name, value in (("B", B), ("H", H)):
        if value is not None:
            check_count(name, value, 1, "an int of at least 1, or None if the mask is the same for all")
    for name, value in (("Q_LEN", Q_LEN), ("KV_LEN", KV_LEN)):
        check_count(name, value, 0, "an int, the longest sequence that the mask is for")
    check_device("device", device)
    size_q, size_kv = _block_size(BLOCK_SIZE)
    batch, heads = B or 1, H or 1
    rows, columns = -(-Q_LEN // size_q), -(-KV_LEN // size_kv)
    traced = trace_mods(None, mask_mod)
    graph = traced.program.mask
    names = [capture.name for capture in traced.program.captures if not capture.is_number]
    check_local(dict(zip(names, traced.tensors, strict=True)), "")
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    kinds = torch.zeros(batch, heads, rows, columns, dtype=torch.int8, device=device)
    captures = traced.program.inputs(traced.tensors, traced.numbers)
    b, h = (torch.arange(n, device=device) for n in (batch, heads))
    step = max(1, MOST_AT_ONCE // max(1, batch * heads * size_q * size_kv))  # blocks at a time
    for row in range(rows):
        i = torch.arange(row * size_q, min(Q_LEN, (row + 1) * size_q), device=device)
        for column in range(0, columns, step):
            j = torch.arange(column * size_kv, min(KV_LEN, (column + step) * size_kv), device=device)
            inputs = {"b": b[:, None, None, None], "h": h[:, None, None], "q_idx": i[:, None], "kv_idx": j, **captures}
            visible = torch.ones((), dtype=torch.bool, device=device) if graph is None else evaluate(graph, inputs, torch.float32)
            by_key = visible.expand(batch, heads, len(i), len(j)).sum(2)  # queries that see each key
            by_block = torch.zeros(batch, heads, -(-len(j) // size_kv), dtype=torch.int64, device=device)
            block = (j // size_kv - column).expand_as(by_key)
            by_block.scatter_add_(-1, block, by_key)
            most = torch.zeros_like(by_block).scatter_add_(-1, block, torch.full_like(by_key, len(i)))
            kinds[:, :, row, column : column + step] = (by_block > 0).to(torch.int8) + (by_block == most).to(torch.int8)
    return BlockMask.from_kv_blocks(
        *ordered(kinds == 1), *ordered(kinds == 2), (size_q, size_kv), mask_mod, seq_lengths=(Q_LEN, KV_LEN)
    )


class Kept:
    """Value derived from a block mask's tensors. It is current if they are unchanged. A copy of the mask has none."""

    def __init__(self, tensors: Sequence[Tensor | None], value: Any) -> None:
        self.value = value
        # A tensor created in inference mode has no version counter.
        self.sources = [(t, None if t is None or t.is_inference() else t._version) for t in tensors]

    def __reduce__(self) -> Any:
        return type(None), ()  # the versions of copied tensors start again

    def is_current(self, tensors: Sequence[Tensor | None]) -> bool:
        """Returns whether a mask's tensors are the sources of the value, with unchanged content."""
        # Compares the tensors themselves, which are kept alive: a new tensor may get the address of a freed one.
        return all(
            t is known and (t is None or (not t.is_inference() and t._version == version))
            for t, (known, version) in zip(tensors, self.sources, strict=True)
        )


def block_lists(block_mask: object, batch: int, heads: int, longest_q: int, longest_kv: int, device: torch.device) -> BlockLists:
    """Returns the lists of a BlockMask for the operators, each ascending, and caches them on the mask.

    While a CUDA graph is captured, the lists are computed again, so that replays follow changes of the mask's tensors. Raises
    TypeError if block_mask is not a BlockMask, and ValueError if it does not fit batch, heads, lengths or device.
    """
    tensors, block_size = checked_tensors(block_mask, batch, heads, (longest_q, longest_kv), device)
    if not may_keep():
        return _lists(tensors, block_size)
    kept: Kept | None = getattr(block_mask, _NAME, None)
    if kept is None or not kept.is_current(tensors):
        with neutral_state():
            kept = Kept(tensors, _lists(tensors, block_size))
        object.__setattr__(block_mask, _NAME, kept)
    lists: BlockLists = kept.value
    return lists


def checked_tensors(
    block_mask: Any, batch: int, heads: int, longest: tuple[int, int], device: torch.device
) -> tuple[list[Tensor | None], tuple[int, int]]:
    """Returns the tensors of a BlockMask and its block size. Raises the errors of `block_lists`."""
    if not all(hasattr(block_mask, name) for name in (*BLOCK_TENSORS, "BLOCK_SIZE", "mask_mod")):
        raise TypeError(
            f"block_mask is a {type(block_mask).__name__}; accepted: a BlockMask of torch or of create_block_mask, or None"
        )
    size_q, size_kv = _block_size(block_mask.BLOCK_SIZE)
    longest_q, longest_kv = longest
    counts = block_mask.kv_num_blocks
    if counts.device != device:
        raise ValueError(
            f"block_mask is on {counts.device} and q is on {device}; accepted: the same device; use block_mask.to(...)"
        )
    sizes = (*counts.shape[:2], counts.shape[2] * size_q, block_mask.kv_indices.shape[3] * size_kv)
    lengths = getattr(block_mask, "seq_lengths", None) or sizes[2:]
    if sizes[0] not in (1, batch) or sizes[1] not in (1, heads) or min(lengths[0], sizes[2]) < longest_q or lengths[1] < longest_kv:
        raise ValueError(
            f"block_mask is for batch {sizes[0]}, {sizes[1]} heads, {lengths[0]} queries and {lengths[1]} keys; accepted for this "
            f"call: batch 1 or {batch}, 1 or {heads} heads, at least {longest_q} queries and {longest_kv} keys"
        )
    tensors = [getattr(block_mask, name) for name in BLOCK_TENSORS]
    if tensors[4] is None:
        raise ValueError("block_mask has no lists of query blocks (q_indices); accepted: one made with compute_q_blocks=True")
    _check_shapes(tensors, BLOCK_TENSORS, -(-longest_kv // size_kv))
    if options.check_values() and not is_traced() and not is_capturing():
        _check_values(tensors, BLOCK_TENSORS)
    return tensors, (size_q, size_kv)


def _check_shapes(tensors: Sequence[Tensor | None], names: Sequence[str], columns: int) -> None:
    """Raises ValueError unless the lists of each side have equal shapes, and at least `columns` blocks of keys have a list."""
    for i in range(0, 8, 2):
        counts, indices, like = tensors[i], tensors[i + 1], tensors[i // 4 * 4]
        if counts is None or indices is None:  # no full blocks
            continue
        assert like is not None
        other = tensors[i // 4 * 4 + 1]
        if counts.shape != like.shape or indices.shape[:-1] != like.shape or (other is not None and indices.shape != other.shape):
            raise ValueError(
                f"block_mask.{names[i]} has shape {tuple(counts.shape)} and {names[i + 1]} {tuple(indices.shape)}, with "
                f"{names[i // 4 * 4]} of {tuple(like.shape)}; accepted: [b, h, blocks] and one dim more, the same for both"
            )
    rows, query_counts = tensors[0], tensors[4]
    if rows is None or query_counts is None:
        return
    if query_counts.shape[:2] != rows.shape[:2] or query_counts.shape[2] < columns:
        raise ValueError(
            f"block_mask.q_num_blocks has shape {tuple(query_counts.shape)}, and the call has {columns} blocks of keys; accepted: "
            f"{[*rows.shape[:2], columns]} or more of them"
        )


def _check_values(tensors: Sequence[Tensor | None], names: Sequence[str]) -> None:
    """Raises ValueError if a count or index is out of range or a block is listed twice. Only FLEXATTN_CHECK=1 runs this check."""
    for i in range(0, 8, 4):
        seen: Tensor | int = 0
        for counts, indices, name in zip(tensors[i : i + 4 : 2], tensors[i + 1 : i + 4 : 2], names[i : i + 4 : 2], strict=True):
            if counts is None or indices is None:
                continue
            columns = indices.shape[-1]
            if counts.numel() and not 0 <= (worst := _farthest(counts)) <= columns:
                raise ValueError(f"block_mask.{name} has a count of {worst}; accepted: 0 to {columns}, the number of blocks")
            valid = torch.arange(columns, device=indices.device) < counts[..., None]
            listed = torch.where(valid, indices, 0)
            if listed.numel() and not 0 <= (worst := _farthest(listed)) < columns:
                name = name.replace("num_blocks", "indices")
                raise ValueError(f"block_mask.{name} has an index of {worst}; accepted: 0 to {columns - 1}, one of the blocks")
            seen = seen + torch.zeros_like(listed).scatter_add_(-1, listed.long(), valid.to(listed.dtype))
        if isinstance(seen, Tensor) and bool((seen > 1).any()):
            block = int((seen > 1).nonzero()[0, -1])
            raise ValueError(f"block_mask lists block {block} twice in {names[i + 1]} and the full ones; accepted: once")


def _farthest(values: Tensor) -> int:
    """Returns the least of the values if it is negative, else the largest."""
    low, high = (int(x) for x in values.aminmax())
    return low if low < 0 else high


def _lists(sources: Sequence[Tensor | None], block_size: tuple[int, int]) -> BlockLists:
    tensors: list[Tensor] = []
    for i in range(0, 8, 2):
        num_blocks, indices = sources[i], sources[i + 1]
        if num_blocks is None or indices is None:  # no full blocks
            partial, indices = sources[i - 2], sources[i - 1]
            assert partial is not None
            assert indices is not None
            num_blocks = torch.zeros_like(partial)
        # The kernels check neither: entries out of range are clamped here, once, so later calls pay nothing.
        counts = num_blocks.clamp(0, indices.shape[-1]).to(torch.int32).contiguous()
        tensors += [counts, _ascending(counts, indices)]
    return BlockLists(tuple(tensors), block_size)


def _block_size(value: int | tuple[int, int]) -> tuple[int, int]:
    size = tuple(value) if isinstance(value, (tuple, list)) else (value, value)
    if len(size) != 2 or any(not isinstance(n, int) or n < 16 or n % 16 for n in size):
        raise ValueError(f"BLOCK_SIZE is {value!r}; accepted: a multiple of 16, or a pair of them for queries and keys")
    return size[0], size[1]


def ordered(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the number of chosen entries in the last dim, and the indices with the chosen ones first, ascending; int32."""
    order = torch.argsort(chosen.to(torch.int8), dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32), order.to(torch.int32)


def _ascending(num_blocks: Tensor, indices: Tensor) -> Tensor:
    columns = indices.shape[-1]
    place = torch.arange(columns, device=indices.device)
    valid = place < num_blocks[..., None]
    indices = indices.clamp(0, max(0, columns - 1))
    return torch.where(valid, indices, torch.iinfo(torch.int32).max).to(torch.int32).sort(-1).values.where(valid, 0).contiguous()
