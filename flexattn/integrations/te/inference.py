"""The cache of keys and values for generation, under the names of TransformerEngine's `InferenceParams`, with pages or without."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.append import append_kv
from flexattn.dispatch.neutral import is_capturing, making_state, refuse_capture
from flexattn.integrations.te.pages import Pages
from flexattn.validation import check_count, check_name, describe

FORMATS = ("bshd", "sbhd", "thd")


class Stepped(NamedTuple):
    """Keys and values in the cache after a step, and what attention over them needs.

    k, v: [b, max_sequence_length, h_kv, d], views of the cache, of the sequences in the step; or all pages, [total_num_pages,
    page_size, h_kv, d]. cu_seqlens_q, cu_seqlens_kv: int32 [b + 1], of the new tokens and of all; the same memory in each step.
    max_seqlen_q: the most new tokens of a sequence, in a CUDA graph the most that any step may have. max_seqlen_kv: the tokens that
    the cache has room for in one sequence. qkv_format: of q and the cache.
    """

    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_kv: Tensor
    max_seqlen_q: int
    max_seqlen_kv: int
    qkv_format: str


class _OnDevice:
    """Lengths and pages of a step on a device. They lie in the same memory in each step, as a captured CUDA graph needs it."""

    def __init__(self, rows: int, columns: int, device: torch.device) -> None:
        sizes = [rows, rows + 1, rows + 1, rows * columns]
        self._whole = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self._seqused, self._cu_seqlens_q, self._cu_seqlens_kv, table = torch.split(self._whole, sizes)
        self._table = table.view(rows, columns)

    def write(self, seqused: list[int], new: list[int], pages: list[list[int]]) -> None:
        """Takes each sequence's tokens before the step, its new ones and its pages. Rows without a sequence get none."""
        rows, columns = self._table.shape
        more = [0] * (rows - len(new))
        before, counts = seqused + more, new + more
        totals = [length + count for length, count in zip(before, counts, strict=True)]
        numbers = [*before, 0, *itertools.accumulate(counts), 0, *itertools.accumulate(totals)]
        for row in pages:
            numbers += row + [0] * (columns - len(row))
        numbers += [0] * (len(self._whole) - len(numbers))
        made = torch.tensor(numbers, dtype=torch.int32, device="cpu")
        self._whole.copy_(made.pin_memory() if self._whole.is_cuda else made, non_blocking=True)

    def seqused(self, batch: int) -> Tensor:
        """Returns the tokens of each sequence before the step, int32 [b]."""
        return self._seqused[:batch]

    def cu_seqlens(self, batch: int) -> tuple[Tensor, Tensor]:
        """Returns offsets of the new tokens and of all, int32 [b + 1] each."""
        return self._cu_seqlens_q[: batch + 1], self._cu_seqlens_kv[: batch + 1]

    def page_table(self, batch: int) -> Tensor:
        """Returns the pages of each sequence, int32 [b, columns]; 0 after the last one."""
        return self._table[:batch]


class InferenceParams:
    """Keys and values of the tokens so far, of each layer: [max_batch_size, max_sequence_length, h_kv, d], or with is_paged
    [total_num_pages, page_size, h_kv, d], of which each sequence has as many as its tokens need.

    Call `pre_step` once for a step, with its sequences and their new tokens, and then each layer's attention, which calls `step`.
    Sequences that a step does not name are finished: others move up in the cache, or may have their pages.

    A CUDA graph may hold the layers of a step: lengths and pages lie in the same memory in each step. Allocate the memory of all
    layers before the capture, and call `pre_step` before each replay, with as many sequences as were captured.

    Args:
        max_batch_size: sequences at once.
        max_sequence_length: tokens of a sequence, those of its prompt and those that follow.
        num_heads_kv, head_dim_k, dtype: of the keys.
        head_dim_v: of the values; None: as of the keys.
        is_paged: whether the cache is in pages.
        total_num_pages, page_size: of a paged cache, and without effect for another. page_size divides max_sequence_length.
            total_num_pages, where TransformerEngine wants pages for max_batch_size * max_sequence_length tokens, may be fewer.
        max_ctx_len: accepted, and without effect: thd needs no room of its own here.
        qkv_format: of q and of new keys and values: "bshd", "sbhd" or "thd".
        custom_cache_manager: None.

    Raises:
        NotImplementedError: a cache manager. ValueError, TypeError: numbers that have no meaning.
    """

    def __init__(
        self,
        max_batch_size: int,
        max_sequence_length: int,
        num_heads_kv: int | None = None,
        head_dim_k: int | None = None,
        dtype: torch.dtype | None = None,
        head_dim_v: int | None = None,
        is_paged: bool = False,
        total_num_pages: int | None = None,
        page_size: int | None = None,
        max_ctx_len: int | None = None,
        qkv_format: str = "bshd",
        custom_cache_manager: Any = None,
    ) -> None:
        if custom_cache_manager is not None:
            raise NotImplementedError("custom_cache_manager is given; accepted: None, the caches that is_paged says")
        check_count("max_batch_size", max_batch_size, 1, "an int of at least 1, sequences at once")
        check_count("max_sequence_length", max_sequence_length, 1, "an int of at least 1, tokens of a sequence")
        for name, count in (("num_heads_kv", num_heads_kv), ("head_dim_k", head_dim_k)):
            check_count(name, count, 1, "an int of at least 1, of the keys")
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype is {describe(dtype)}; accepted: that of the keys, as torch.bfloat16")
        check_name("qkv_format", qkv_format, FORMATS)
        self.max_batch_size, self.max_sequence_length = max_batch_size, max_sequence_length
        self.num_heads_kv, self.head_dim_k, self.dtype = num_heads_kv, head_dim_k, dtype
        self.head_dim_v = head_dim_k if head_dim_v is None else head_dim_v
        self.is_paged, self.qkv_format = bool(is_paged), qkv_format
        self.total_num_pages, self.page_size = total_num_pages, page_size
        self.pages = _pages(max_sequence_length, total_num_pages, page_size) if is_paged else None
        self.cache: dict[int, tuple[Tensor, Tensor]] = {}
        self.sequences: OrderedDict[Hashable, int] = OrderedDict()
        self._new: list[int] = []
        self._on_devices: dict[torch.device, _OnDevice] = {}

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_on_devices": {}}  # they are made again of the numbers above

    def allocate_memory(self, layer_number: int, device: torch.device | str | None = None) -> None:
        """Allocates the cache of a layer, of zeros; device None: the current CUDA device, or the CPU where there is none.

        Raises RuntimeError while a CUDA graph is captured, whose replays would write the zeros again.
        """
        where = torch.device(device if device is not None else ("cuda" if torch.cuda.is_available() else "cpu"))
        rows = (self.max_batch_size, self.max_sequence_length)
        sizes: list[Any] = [*(rows if self.pages is None else (self.pages.total, self.pages.size)), self.num_heads_kv]
        shapes = [[*sizes, dim] for dim in (self.head_dim_k, self.head_dim_v)]
        with making_state("InferenceParams.allocate_memory"):
            k, v = (torch.zeros(shape, dtype=self.dtype, device=where) for shape in shapes)
        self.cache[layer_number] = k, v

    def reset(self) -> None:
        """Forgets all sequences; the memory stays, and what is in it is not read."""
        self.sequences.clear()
        if self.pages is not None:
            self.pages.reset()
        self._new = []

    def get_seqlens_pre_step(self) -> Tensor:
        """Returns the tokens that each sequence of the step had before it, int32 [b], on the CPU."""
        return torch.tensor(self._before(), dtype=torch.int32, device="cpu")

    @property
    def max_seqlen_q(self) -> int:
        """The most new tokens that a sequence of the step has."""
        return max(self._new, default=0)

    def pre_step(self, step_dict: Mapping[Hashable, int]) -> None:
        """Begins a step: sequence id -> new tokens, in the order of the batch. Sequences that are not named are finished.

        Raises:
            ValueError: more sequences, or more tokens of one or of all, than there is room for; nothing has changed then.
            TypeError: a number of tokens that is no int.
            RuntimeError: a CUDA graph is being captured, whose replays would repeat this step's numbers.
        """
        refuse_capture("InferenceParams.pre_step")
        if len(step_dict) > self.max_batch_size:
            raise ValueError(f"step_dict has {len(step_dict)} sequences; accepted: up to max_batch_size, {self.max_batch_size}")
        totals: OrderedDict[Hashable, int] = OrderedDict()
        for name, new in step_dict.items():
            check_count(f"step_dict[{name!r}]", new, 0, "an int of at least 0, the new tokens of a sequence")
            totals[name] = self.sequences.get(name, 0) + new
            if totals[name] > self.max_sequence_length:
                raise ValueError(
                    f"sequence {name!r} would have {totals[name]} tokens; accepted: up to max_sequence_length, "
                    f"{self.max_sequence_length}"
                )
        if self.pages is not None:
            self.pages.take(totals)
        if self.pages is None:
            before = {name: row for row, name in enumerate(self.sequences)}
            self._move([before.get(name, row) for row, name in enumerate(totals)])  # a new sequence's row may hold anything
        self.sequences = totals
        self._new = list(step_dict.values())
        for on_device in self._on_devices.values():
            self._write(on_device)

    def step(self, layer_number: int, new_k: Tensor, new_v: Tensor, qkv_format: str) -> Stepped:
        """Puts a layer's new keys and values behind those in the cache.

        Args:
            layer_number: any number; a layer that is new is given memory.
            new_k, new_v: in qkv_format, [b, s, h_kv, d] with each sequence's new tokens first, [s, b, h_kv, d], or
                [t, h_kv, d] with those of all sequences one after another. b: the sequences of the step.
            qkv_format: their format, and q's.

        Raises:
            ValueError: tensors that do not fit the step or the cache.
        """
        check_name("qkv_format", qkv_format, FORMATS)
        if layer_number not in self.cache:
            self.allocate_memory(layer_number, new_k.device)
        caches = self.cache[layer_number]
        batch, total = len(self._new), sum(self._new)
        if not batch:
            raise ValueError("the step has no sequences; call pre_step with those of this step and their new tokens first")
        on_device = self._on(new_k.device)
        for name, cache, new in (("new_k", caches[0], new_k), ("new_v", caches[1], new_v)):
            sizes = tuple(new.shape[-2:]) == tuple(cache.shape[-2:])
            if qkv_format == "thd":
                fits = new.dim() == 3 and new.shape[0] >= total
            else:
                rows, tokens = new.shape[:2] if qkv_format == "bshd" else (new.shape[1], new.shape[0])
                fits = new.dim() == 4 and rows == batch and tokens >= self.max_seqlen_q
            if not (sizes and fits and new.dtype is cache.dtype):
                raise ValueError(
                    f"{name} is {describe(new)}; accepted in {qkv_format}: {total} new tokens of {batch} sequences, at most "
                    f"{self.max_seqlen_q} of one, with heads and head dim {tuple(cache.shape[-2:])}, in {cache.dtype}"
                )
        fmt = "bshd" if qkv_format == "bshd" else f"{qkv_format}_2bshd"
        k, v = caches if self.pages is not None else (cache[:batch] for cache in caches)
        cu_seqlens_q, cu_seqlens_kv = on_device.cu_seqlens(batch)
        with torch.no_grad():
            append_kv(
                k,
                v,
                new_k,
                new_v,
                seqused_kv=on_device.seqused(batch),
                page_table=None if self.pages is None else on_device.page_table(batch),
                qkv_format=fmt,
                cu_seqlens_q=cu_seqlens_q,
            )
        # A captured graph would keep this step's number.
        longest = self.max_sequence_length if is_capturing() else self.max_seqlen_q
        return Stepped(k, v, cu_seqlens_q, cu_seqlens_kv, longest, self.max_sequence_length, fmt)

    def page_table(self, device: torch.device | str) -> Tensor:
        """Returns the pages of the step's sequences, int32 [b, max_sequence_length / page_size], 0 behind those of each.

        Raises ValueError for a cache without pages.
        """
        if self.pages is None:
            raise ValueError("is_paged is False, and page_table was asked for; accepted: a cache with is_paged=True")
        return self._on(torch.device(device)).page_table(len(self._new))

    def convert_paged_to_nonpaged(self, layer_number: int) -> tuple[Tensor, Tensor]:
        """Returns copies of a layer's keys and values in rows, [b, max_sequence_length, h_kv, d], of the step's sequences.

        What lies behind a sequence's tokens may be anything. Raises ValueError for a cache without pages, KeyError for a layer
        that has no memory yet.
        """
        k, v = self.cache[layer_number]
        table = self.page_table(k.device).long()
        return k[table].flatten(1, 2), v[table].flatten(1, 2)

    def _move(self, rows: list[int]) -> None:
        """Moves rows of all layers: row i becomes what row rows[i] was."""
        if rows == list(range(len(rows))):
            return
        sources = {device: torch.tensor(rows, device=device) for device in {k.device for k, _ in self.cache.values()}}
        with torch.no_grad():
            for caches in self.cache.values():
                for cache in caches:
                    cache[: len(rows)] = cache.index_select(0, sources[cache.device])

    def _before(self) -> list[int]:
        """Returns the tokens that each sequence of the step had before it."""
        return [total - new for total, new in zip(self.sequences.values(), self._new, strict=True)]

    def _on(self, device: torch.device) -> _OnDevice:
        found = self._on_devices.get(device)
        if found is None:
            columns = 0 if self.pages is None else self.pages.columns
            with making_state("the first InferenceParams.step on a device"):
                found = _OnDevice(self.max_batch_size, columns, device)
                self._write(found)
            self._on_devices[device] = found
        return found

    def _write(self, on_device: _OnDevice) -> None:
        on_device.write(self._before(), self._new, [] if self.pages is None else self.pages.of(self.sequences))


def _pages(max_sequence_length: int, total_num_pages: Any, page_size: Any) -> Pages:
    check_count("page_size", page_size, 1, "an int of at least 1, the tokens of a page, with is_paged")
    check_count("total_num_pages", total_num_pages, 1, "an int of at least 1, the pages of all sequences, with is_paged")
    if max_sequence_length % page_size:
        raise ValueError(
            f"max_sequence_length is {max_sequence_length} with page_size {page_size}; accepted: a multiple of the page size"
        )
    return Pages(total_num_pages, page_size, max_sequence_length // page_size)
