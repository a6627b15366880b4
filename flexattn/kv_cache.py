"""`PagedKVCache`: pages of keys and values, and the table that assigns them to sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from flexattn.append import append_kv
from flexattn.dispatch import neutral
from flexattn.validation import DTYPES, FP8_DTYPES, check_count, check_tensor, describe

_VIEWS = ("page_table", "seqused_before", "seqused_kv", "cu_seqlens_q")  # a pickle gives each view a storage of its own


class OutOfPagesError(RuntimeError):
    """A `PagedKVCache` has too few free pages or no free row for a request. The cache is unchanged."""


class PagedKVCache:
    """Keys and values of sequences that join, grow, share prefixes and leave, in pages of tensors that the caller allocates.

    Each sequence is identified by its number, which is its row of the page table. Its pages and its length are Python ints on the
    host; `step` copies the tables to the device, once for all layers. The device tensors stay the same from step to step. If a CUDA
    graph has captured `append` and `attention(**cache.arguments())`, each replay reads the new tables.

    A step of a model: `step({sequence: new tokens})`, then in each layer `append(layer, k, v)` and
    `attention(q, *cache.pools[layer], **cache.arguments())`. Tokens of a step are packed ([total, h, d]) in the order of sequence
    numbers. One call can hold both chunks of prefill and decoding.

    Sequences share the whole pages of a prefix, as in vLLM's PagedAttention (Kwon et al., 2023, https://arxiv.org/abs/2309.06180).

    Args:
        pools: k and v of each layer, [pages, page_size, h_kv, d] (or d_v for v), in any strides with a contiguous last dim. The
            number of pages and their size are the same in all pools.
        max_sequences: rows of the page table.
        max_length: the most tokens of a sequence, rounded up to a multiple of the page size.
        kv_format: "bshd", or "bhsd" for pools [pages, h_kv, page_size, d].
        descales: if pools are in FP8, float32 descale_k and descale_v of each layer, as for `append_kv` and `attention`: [] or
            [h_kv], or the dims of the pool without the last, which `append` then writes. None: 1.

    Attributes:
        pools, descales: the arguments.
        page_size, max_length: ints.
        page_table: int32 [max_sequences, columns] on the device, as of the last `step`. Rows without a sequence, and columns after
            a sequence's last page, keep their old values.
        seqused_before, seqused_kv: int32 [max_sequences] on the device: tokens of each sequence before and after the last `step`.
        cu_seqlens_q: int32 [max_sequences + 1] on the device: the start of each sequence's tokens in the last `step`.

    Raises:
        ValueError, TypeError: pools do not fit together.
    """

    def __init__(
        self,
        pools: Sequence[tuple[Tensor, Tensor] | Tensor],
        *,
        max_sequences: int,
        max_length: int,
        kv_format: str = "bshd",
        descales: Sequence[tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        if kv_format not in ("bshd", "bhsd"):
            raise ValueError(f"kv_format is {kv_format!r}; accepted: 'bshd', 'bhsd'")
        check_count("max_sequences", max_sequences, 1, "an int of at least 1")
        check_count("max_length", max_length, 1, "an int of at least 1")
        self.pools = [(k, v) for k, v in pools]
        if not self.pools:
            raise ValueError("pools is empty; accepted: k and v of at least one layer")
        shape, device = _shape_of_pages(self.pools, kv_format)
        self.descales = None if descales is None else [(k, v) for k, v in descales]
        _check_descales(self.pools, self.descales, kv_format)
        num_pages, self.page_size = shape
        self._kv_format = kv_format
        columns = -(-max_length // self.page_size)
        self.max_length = columns * self.page_size
        self._free_pages = list(range(num_pages - 1, -1, -1))
        self._shares = [0] * num_pages  # number of sequences that use each page
        self._pages: list[list[int] | None] = [None] * max_sequences
        self._lengths = [0] * max_sequences
        self._new = [0] * max_sequences
        with torch.inference_mode(False):  # calls outside of inference mode cannot write to an inference tensor
            self._table = torch.zeros(max_sequences, columns, dtype=torch.int32, device="cpu")
            self._on_device = torch.zeros(max_sequences * (columns + 3) + 1, dtype=torch.int32, device=device)
        self._share()

    def _share(self) -> None:
        """Makes the device attributes views of one tensor, so that `step` writes them with one copy."""
        rows, columns = self._table.shape
        table, *lengths = torch.split(self._on_device, [rows * columns, rows, rows, rows + 1])
        self.page_table = table.view(rows, columns)
        self.seqused_before, self.seqused_kv, self.cu_seqlens_q = lengths

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name not in _VIEWS}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._share()

    @property
    def free_pages(self) -> int:
        """Number of pages that no sequence uses."""
        return len(self._free_pages)

    @property
    def sequences(self) -> list[int]:
        """Numbers of the current sequences, ascending."""
        return [n for n, pages in enumerate(self._pages) if pages is not None]

    def length(self, sequence: int) -> int:
        """Returns the number of tokens of a sequence, including those of the last `step`."""
        self._pages_of(sequence)
        return self._lengths[sequence]

    def add(self) -> int:
        """Returns the number of a new sequence without tokens. Raises OutOfPagesError if max_sequences sequences exist."""
        for sequence, pages in enumerate(self._pages):
            if pages is None:
                self._pages[sequence], self._lengths[sequence] = [], 0
                return sequence
        raise OutOfPagesError(
            f"all {len(self._pages)} rows of the page table are in use; free a sequence, or set max_sequences higher"
        )

    def reserve(self, sequence: int, tokens: int) -> None:
        """Reserves the pages that a sequence needs to grow by `tokens` tokens. `step` does this for its new tokens.

        Raises OutOfPagesError if too few pages are free, and ValueError if the sequence would exceed max_length tokens.
        """
        self._take({sequence: tokens})

    def step(self, new: Mapping[int, int]) -> None:
        """Begins a step: extends each sequence by its new tokens, and copies tables and lengths to the device.

        Args:
            new: sequence -> number of tokens that it appends in this step. Other sequences append none.

        Raises:
            OutOfPagesError: too few pages are free; the cache is unchanged.
            ValueError, TypeError: a sequence does not exist, or would have more than max_length tokens.
            RuntimeError: a CUDA graph is being captured; its replays would copy these tables again.
        """
        neutral.refuse_capture("PagedKVCache.step")
        self._take(new)
        self._new = [new.get(n, 0) for n in range(len(self._pages))]
        before = list(self._lengths)
        self._lengths = [length + count for length, count in zip(before, self._new, strict=True)]
        lengths = torch.tensor([*before, *self._lengths, 0, *accumulate(self._new)], dtype=torch.int32, device="cpu")
        tables = torch.cat((self._table.flatten(), lengths))  # a new tensor for each step: the last copy may still be pending
        if self._on_device.is_cuda:
            tables = tables.pin_memory()
        self._on_device.copy_(tables, non_blocking=True)

    def append(self, layer: int, k_new: Tensor, v_new: Tensor) -> None:
        """Writes a layer's keys and values of the step's tokens, [total, h_kv, d], by `append_kv`, which ignores further rows."""
        append_kv(
            *self.pools[layer],
            k_new,
            v_new,
            qkv_format=f"thd_2{self._kv_format}",
            page_table=self.page_table,
            seqused_kv=self.seqused_before,
            cu_seqlens_q=self.cu_seqlens_q,
            **self._descales_of(layer),
        )

    def arguments(self, layer: int | None = None, *, longest: int | None = None) -> dict[str, Any]:
        """Returns the arguments of `attention` after q, [total, h, d], and a layer's pools: a causal call over the step's tokens.

        Args:
            layer: index of the layer whose descales are included. None is accepted if the cache has no descales.
            longest: the most new tokens of a sequence in any step that the call is for. A captured CUDA graph keeps this number:
                its replays compute no query beyond it. None: the most of the last `step`; while a graph is captured, all rows of q.

        Raises:
            ValueError: `layer` is None and the cache has descales; `longest` is less than a sequence's new tokens in the last step.
            TypeError: `longest` is not an int.
        """
        if layer is None and self.descales is not None:
            raise ValueError(f"layer is None, and the descales of each layer differ; accepted: 0 to {len(self.pools) - 1}")
        newest = max(self._new)
        if longest is None:
            longest = self.max_length if neutral.is_capturing() else newest
        else:
            check_count("longest", longest, newest, f"an int of at least {newest}, the most new tokens of a sequence, or None")
        return {
            **({} if layer is None else self._descales_of(layer)),
            "qkv_format": f"thd_2{self._kv_format}",
            "attn_mask_type": "padding_causal_bottom_right",
            "cu_seqlens_q": self.cu_seqlens_q,
            "max_seqlen_q": longest,
            "seqused_kv": self.seqused_kv,
            "page_table": self.page_table,
        }

    def fork(self, sequence: int, length: int | None = None) -> int:
        """Returns the number of a new sequence that begins with the tokens of `sequence`, without computing their keys again.

        Both sequences share the full pages. A page that is only partly filled is copied in all layers, so call this between steps,
        after all layers have appended. The copy does not wait for the device.

        Args:
            length: number of tokens to begin with; None: all.

        Raises:
            OutOfPagesError: no row or no page for the copy is free; the cache is unchanged.
            ValueError: the sequence does not exist, or is shorter than `length`.
            RuntimeError: a CUDA graph is being captured; its replays would copy these pages again.
        """
        neutral.refuse_capture("PagedKVCache.fork")
        pages, most = self._pages_of(sequence), self._lengths[sequence]
        count = most if length is None else length
        check_count("length", count, 0, f"0 to {most}, the sequence's length, or None", most)
        whole, rest = divmod(count, self.page_size)
        if rest and not self._free_pages:
            raise OutOfPagesError(f"no page is free for a copy of the last one of sequence {sequence}; free a sequence")
        forked = self.add()
        for page in pages[:whole]:
            self._give(forked, page)
        if rest:
            to = self._free_pages.pop()
            self._give(forked, to)
            for pair in (*self.pools, *(self.descales or ())):
                for x in pair:
                    if x.dim() > 1:  # a descale of fewer dims has no token dim
                        x[to].copy_(x[pages[whole]])
        self._lengths[forked] = count
        return forked

    def free(self, sequence: int) -> None:
        """Releases a sequence's row, and each of its pages if no other sequence shares it."""
        for page in self._pages_of(sequence):
            self._shares[page] -= 1
            if self._shares[page] == 0:
                self._free_pages.append(page)
        self._pages[sequence], self._lengths[sequence] = None, 0

    def _descales_of(self, layer: int) -> dict[str, Tensor]:
        return {} if self.descales is None else dict(zip(("descale_k", "descale_v"), self.descales[layer], strict=True))

    def _pages_of(self, sequence: int) -> list[int]:
        known = isinstance(sequence, int) and 0 <= sequence < len(self._pages)
        pages = self._pages[sequence] if known else None
        if pages is None:
            raise ValueError(f"sequence is {describe(sequence)}; accepted: a number from add() or fork(), now {self.sequences}")
        return pages

    def _give(self, sequence: int, page: int) -> None:
        """Appends a page to a sequence."""
        pages = self._pages_of(sequence)
        self._table[sequence, len(pages)] = page
        self._shares[page] += 1
        pages.append(page)

    def _take(self, new: Mapping[int, int]) -> None:
        """Reserves pages for new tokens of sequences. If too few pages are free, no sequence gets any."""
        needed = {}
        for sequence, count in new.items():
            pages = self._pages_of(sequence)
            check_count(f"the new tokens of sequence {sequence}", count, 0, "an int of at least 0")
            length = self._lengths[sequence] + count
            if length > self.max_length:
                raise ValueError(
                    f"sequence {sequence} would have {length} tokens; accepted: at most {self.max_length}, the capacity of a row "
                    "of the page table; set max_length higher"
                )
            needed[sequence] = max(0, -(-length // self.page_size) - len(pages))
        if sum(needed.values()) > len(self._free_pages):
            raise OutOfPagesError(
                f"{sum(needed.values())} pages of {self.page_size} tokens are needed and {len(self._free_pages)} of "
                f"{len(self._shares)} are free; free a sequence, or make larger pools"
            )
        for sequence, count in needed.items():
            for _ in range(count):
                self._give(sequence, self._free_pages.pop())


def _shape_of_pages(pools: Sequence[tuple[Tensor, Tensor]], kv_format: str) -> tuple[tuple[int, int], torch.device]:
    """Returns (pages, tokens of a page) and the device. Raises if pools differ in any of the three."""
    common: tuple[tuple[int, int], torch.device] | None = None
    for layer, pool in enumerate(pools):
        for kind, x in zip("kv", pool, strict=True):
            name = f"{kind} of pools[{layer}]"
            check_tensor(name, x, (*DTYPES, *FP8_DTYPES), None)
            if x.dim() != 4 or 0 in x.shape or (x.stride(-1) != 1 and x.shape[-1] != 1):
                raise ValueError(f"{name} is {describe(x)}; accepted: the dims of {kv_format}, none empty, the last contiguous")
            (pages, size), device = form = (x.shape[0], x.shape[kv_format.index("s")]), x.device
            common = common or form
            if form != common:
                raise ValueError(
                    f"{name} has {pages} pages of {size} tokens on {device}, and the first pool has {common[0][0]} of "
                    f"{common[0][1]} on {common[1]}; accepted: the same in all layers, for k and v"
                )
    assert common is not None
    return common


def _check_descales(
    pools: Sequence[tuple[Tensor, Tensor]], descales: Sequence[tuple[Tensor, Tensor]] | None, kv_format: str
) -> None:
    """Raises unless there is one pair of descales for each layer, of an accepted shape, and all pools are in FP8."""
    if descales is None:
        return
    if len(descales) != len(pools):
        raise ValueError(
            f"descales has {len(descales)} layers and pools has {len(pools)}; accepted: descale_k and descale_v of each layer"
        )
    for layer, (pool, pair) in enumerate(zip(pools, descales, strict=True)):
        for kind, x, descale in zip("kv", pool, pair, strict=True):
            name = f"descale_{kind} of layer {layer}"
            if x.dtype not in FP8_DTYPES:
                raise ValueError(f"{name} is given with pools in {x.dtype}; accepted: None, or pools in FP8")
            check_tensor(name, descale, (torch.float32,), x.device)
            heads = x.shape[kv_format.index("h")]
            if tuple(descale.shape) not in ((), (1,), (heads,), tuple(x.shape[:-1])):
                raise ValueError(
                    f"{name} has shape {tuple(descale.shape)}; accepted: [] or [h_kv] = [{heads}], for all sequences, or "
                    f"{list(x.shape[:-1])}, one for each token and head"
                )
