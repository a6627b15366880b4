"""Cache of keys and values for generation, under the names of TransformerEngine's `InferenceParams`, with or without pages."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn.append import append_kv
from flexattn.dispatch.neutral import is_capturing, making_state, refuse_capture
from flexattn.validation import check_count, check_name, describe

FORMATS = ("bshd", "sbhd", "thd")


class Stepped(NamedTuple):
    """Keys and values in the cache after a step, and the other arguments of attention over them.

    k, v: [b, max_sequence_length, h_kv, d], views of the cache, for the step's sequences; or all pages, [total_num_pages,
    page_size, h_kv, d]. cu_seqlens_q, cu_seqlens_kv: int32 [b + 1], for the new tokens and for all tokens, at the same addresses
    in each step. max_seqlen_q: the most new tokens of a sequence, in a CUDA graph the most in any step. max_seqlen_kv: the cache's
    capacity for one sequence in tokens. qkv_format: the format of q and the cache.
    """

    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_kv: Tensor
    max_seqlen_q: int
    max_seqlen_kv: int
    qkv_format: str


class _DeviceState:
    """Lengths and pages of a step on a device. Their addresses are the same in each step, as a captured CUDA graph requires."""

    def __init__(self, rows: int, columns: int, device: torch.device) -> None:
        sizes = [rows, rows + 1, rows + 1, rows * columns]
        self._buffer = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self._seqused, self._cu_seqlens_q, self._cu_seqlens_kv, table = torch.split(self._buffer, sizes)
        self._table = table.view(rows, columns)

    def write(self, seqused: list[int], new: list[int], pages: list[list[int]]) -> None:
        """Writes each sequence's tokens before the step, its new tokens and its pages. Unused rows have none."""
        rows, columns = self._table.shape
        unused = [0] * (rows - len(new))
        before, counts = seqused + unused, new + unused
        totals = [length + count for length, count in zip(before, counts, strict=True)]
        numbers = [*before, 0, *itertools.accumulate(counts), 0, *itertools.accumulate(totals)]
        for row in pages:
            numbers += row + [0] * (columns - len(row))
        numbers += [0] * (len(self._buffer) - len(numbers))
        host_numbers = torch.tensor(numbers, dtype=torch.int32, device="cpu")
        self._buffer.copy_(host_numbers.pin_memory() if self._buffer.is_cuda else host_numbers, non_blocking=True)

    def seqused(self, batch: int) -> Tensor:
        """Returns the number of tokens of each sequence before the step, int32 [b]."""
        return self._seqused[:batch]

    def cu_seqlens(self, batch: int) -> tuple[Tensor, Tensor]:
        """Returns cumulative lengths of the new tokens and of all tokens, int32 [b + 1] each."""
        return self._cu_seqlens_q[: batch + 1], self._cu_seqlens_kv[: batch + 1]

    def page_table(self, batch: int) -> Tensor:
        """Returns the pages of each sequence, int32 [b, columns]; 0 after the last one."""
        return self._table[:batch]


class InferenceParams:
    """Cache of each layer's keys and values: [max_batch_size, max_sequence_length, h_kv, d], or with is_paged
    [total_num_pages, page_size, h_kv, d], with pages assigned to each sequence on demand.

    Call `pre_step` once per step, with its sequences and their new tokens, and then each layer's attention, which calls `step`.
    A sequence that a step leaves out is finished: other sequences move up in the cache, or take over its pages.

    A CUDA graph may contain the layers of a step, because lengths and pages stay at the same addresses. Allocate the memory of all
    layers before the capture, and call `pre_step` before each replay, with the captured number of sequences.

    Args:
        max_batch_size: maximum number of sequences.
        max_sequence_length: maximum number of tokens of a sequence, including its prompt.
        num_heads_kv, head_dim_k, dtype: heads, head dim and dtype of the keys.
        head_dim_v: head dim of the values. None: head_dim_k.
        is_paged: whether the cache is paged.
        total_num_pages, page_size: size of a paged cache; ignored otherwise. page_size must divide max_sequence_length.
            TransformerEngine requires pages for max_batch_size * max_sequence_length tokens; flexattn accepts fewer.
        max_ctx_len: ignored; thd needs no extra memory.
        qkv_format: format of q and of new keys and values: "bshd", "sbhd" or "thd".
        custom_cache_manager: must be None.

    Raises:
        NotImplementedError: if custom_cache_manager is set.
        ValueError, TypeError: if a number is invalid.
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
        custom_cache_manager: object = None,
    ) -> None:
        if custom_cache_manager is not None:
            raise NotImplementedError("custom_cache_manager is not supported; accepted: None, and is_paged to select the cache")
        check_count("max_batch_size", max_batch_size, 1, "an int of at least 1, sequences at once")
        check_count("max_sequence_length", max_sequence_length, 1, "an int of at least 1, tokens of a sequence")
        for name, count in (("num_heads_kv", num_heads_kv), ("head_dim_k", head_dim_k)):
            check_count(name, count, 1, "an int of at least 1, of the keys")
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype is {describe(dtype)}; accepted: the keys' dtype, such as torch.bfloat16")
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
        self._device_states: dict[torch.device, _DeviceState] = {}

    def __getstate__(self) -> dict[str, object]:
        return vars(self) | {"_device_states": {}}  # derived from the numbers above

    def allocate_memory(self, layer_number: int, device: torch.device | str | None = None) -> None:
        """Allocates the cache of a layer, filled with zeros. device None: the current CUDA device, or the CPU if there is none.

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
        """Removes all sequences. The memory stays allocated, and its contents are not read."""
        self.sequences.clear()
        if self.pages is not None:
            self.pages.reset()
        self._new = []

    def get_seqlens_pre_step(self) -> Tensor:
        """Returns the number of tokens of each sequence before the step, int32 [b], on the CPU."""
        return torch.tensor(self._before(), dtype=torch.int32, device="cpu")

    @property
    def max_seqlen_q(self) -> int:
        """The largest number of new tokens of a sequence in the step."""
        return max(self._new, default=0)

    def pre_step(self, step_dict: Mapping[Hashable, int]) -> None:
        """Begins a step: sequence id -> new tokens, in the order of the batch. Sequences that are left out are finished.

        Raises:
            ValueError: if there is no room for the sequences or tokens. The state is then unchanged.
            TypeError: if a number of tokens is not an int.
            RuntimeError: if a CUDA graph is being captured, because its replays would repeat this step's numbers.
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
            self._move([before.get(name, row) for row, name in enumerate(totals)])  # a new sequence's row has undefined contents
        self.sequences = totals
        self._new = list(step_dict.values())
        for device_state in self._device_states.values():
            self._write(device_state)

    def step(self, layer_number: int, new_k: Tensor, new_v: Tensor, qkv_format: str) -> Stepped:
        """Appends a layer's new keys and values to the cache.

        Args:
            layer_number: any number; a new layer's memory is allocated.
            new_k, new_v: in qkv_format, [b, s, h_kv, d] with each sequence's new tokens first, [s, b, h_kv, d], or
                [t, h_kv, d] with all sequences packed. b is the number of sequences in the step.
            qkv_format: the format of new_k, new_v and q.

        Raises:
            ValueError: if the tensors do not fit the step or the cache.
        """
        check_name("qkv_format", qkv_format, FORMATS)
        if layer_number not in self.cache:
            self.allocate_memory(layer_number, new_k.device)
        caches = self.cache[layer_number]
        batch, total = len(self._new), sum(self._new)
        if not batch:
            raise ValueError("the step has no sequences; first call pre_step with this step's sequences and their new tokens")
        device_state = self._state_on(new_k.device)
        for name, cache, new in (("new_k", caches[0], new_k), ("new_v", caches[1], new_v)):
            has_sizes = tuple(new.shape[-2:]) == tuple(cache.shape[-2:])
            if qkv_format == "thd":
                fits = new.dim() == 3 and new.shape[0] >= total
            else:
                rows, tokens = new.shape[:2] if qkv_format == "bshd" else (new.shape[1], new.shape[0])
                fits = new.dim() == 4 and rows == batch and tokens >= self.max_seqlen_q
            if not (has_sizes and fits and new.dtype is cache.dtype):
                raise ValueError(
                    f"{name} is {describe(new)}; accepted in {qkv_format}: {total} new tokens of {batch} sequences, at most "
                    f"{self.max_seqlen_q} of one, with heads and head dim {tuple(cache.shape[-2:])}, in {cache.dtype}"
                )
        fmt = "bshd" if qkv_format == "bshd" else f"{qkv_format}_2bshd"
        k, v = caches if self.pages is not None else (cache[:batch] for cache in caches)
        cu_seqlens_q, cu_seqlens_kv = device_state.cu_seqlens(batch)
        with torch.no_grad():
            append_kv(
                k,
                v,
                new_k,
                new_v,
                seqused_kv=device_state.seqused(batch),
                page_table=None if self.pages is None else device_state.page_table(batch),
                qkv_format=fmt,
                cu_seqlens_q=cu_seqlens_q,
            )
        # A captured graph would keep this step's number, so it gets the maximum.
        longest = self.max_sequence_length if is_capturing() else self.max_seqlen_q
        return Stepped(k, v, cu_seqlens_q, cu_seqlens_kv, longest, self.max_sequence_length, fmt)

    def page_table(self, device: torch.device | str) -> Tensor:
        """Returns the pages of the step's sequences, int32 [b, max_sequence_length / page_size], 0 after each sequence's last page.

        Raises ValueError if the cache has no pages.
        """
        if self.pages is None:
            raise ValueError("page_table needs pages but is_paged is False; accepted: a cache with is_paged=True")
        return self._state_on(torch.device(device)).page_table(len(self._new))

    def convert_paged_to_nonpaged(self, layer_number: int) -> tuple[Tensor, Tensor]:
        """Returns copies of a layer's keys and values in rows, [b, max_sequence_length, h_kv, d], for the step's sequences.

        Values after a sequence's tokens are undefined. Raises ValueError if the cache has no pages, and KeyError if the layer has
        no memory yet.
        """
        k, v = self.cache[layer_number]
        table = self.page_table(k.device).long()
        return k[table].flatten(1, 2), v[table].flatten(1, 2)

    def _move(self, rows: list[int]) -> None:
        """Permutes the rows of all layers: row i becomes the old row rows[i]."""
        if rows == list(range(len(rows))):
            return
        sources = {device: torch.tensor(rows, device=device) for device in {k.device for k, _ in self.cache.values()}}
        with torch.no_grad():
            for caches in self.cache.values():
                for cache in caches:
                    cache[: len(rows)] = cache.index_select(0, sources[cache.device])

    def _before(self) -> list[int]:
        """Returns the number of tokens of each sequence before the step."""
        return [total - new for total, new in zip(self.sequences.values(), self._new, strict=True)]

    def _state_on(self, device: torch.device) -> _DeviceState:
        state = self._device_states.get(device)
        if state is None:
            columns = 0 if self.pages is None else self.pages.columns
            with making_state("the first InferenceParams.step on a device"):
                state = _DeviceState(self.max_batch_size, columns, device)
                self._write(state)
            self._device_states[device] = state
        return state

    def _write(self, device_state: _DeviceState) -> None:
        device_state.write(self._before(), self._new, [] if self.pages is None else self.pages.of(self.sequences))


def _pages(max_sequence_length: int, total_num_pages: Any, page_size: Any) -> Pages:
    check_count("page_size", page_size, 1, "an int of at least 1, the tokens of a page, with is_paged")
    check_count("total_num_pages", total_num_pages, 1, "an int of at least 1, the pages of all sequences, with is_paged")
    if max_sequence_length % page_size:
        raise ValueError(
            f"max_sequence_length is {max_sequence_length} with page_size {page_size}; accepted: a multiple of the page size"
        )
    return Pages(total_num_pages, page_size, max_sequence_length // page_size)


class Pages:
    """Pool of pages: pages that sequences own, and free pages.

    total: pages in the pool. size: tokens of a page. columns: maximum number of pages of a sequence.
    """

    def __init__(self, total: int, size: int, columns: int) -> None:
        self.total, self.size, self.columns = total, size, columns
        self.reset()

    def reset(self) -> None:
        """Frees all pages."""
        self._free = list(range(self.total))
        self._taken: dict[Hashable, list[int]] = {}

    def take(self, tokens: Mapping[Hashable, int]) -> None:
        """Assigns each sequence enough pages for its number of tokens. Sequences that are left out lose their pages.

        Raises ValueError if there are too few pages. The state is then unchanged.
        """
        needed = {name: -(-count // self.size) for name, count in tokens.items()}
        if sum(needed.values()) > self.total:
            raise ValueError(
                f"step_dict's sequences need {sum(needed.values())} pages of {self.size} tokens; accepted: up to "
                f"total_num_pages, {self.total}; leave out a finished sequence, or pass a larger total_num_pages"
            )
        for name in [name for name in self._taken if name not in needed]:
            self._free += self._taken.pop(name)
        for name, count in needed.items():
            pages = self._taken.setdefault(name, [])
            missing = count - len(pages)
            pages += self._free[:missing]
            del self._free[:missing]

    def of(self, names: Iterable[Hashable]) -> list[list[int]]:
        """Returns the pages of each named sequence."""
        return [self._taken[name] for name in names]
