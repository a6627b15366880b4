"""Random calls of attention() with all of its arguments, in memory between guard bytes, with the inputs of the oracle.

A configuration decides the kernels. Its calls differ in lengths, numbers and values. Each has a seed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn import create_block_mask, fp8
from flexattn.dispatch.spec import PACKINGS, Results, Window
from tests.fuzz.config import ALL_SCORE_MODS, BLOCKS_OF_64, DIFFERENTIABLE, EXTREMES, FURTHEST_FOR_A_MOD, HUGE, WINDOWS, Config
from tests.fuzz.layouts import draw_layout
from tests.fuzz.mods import INTEGERS, MASK_MODS, SIZES, Drawn
from tests.fuzz.oracle import Problem, Side
from tests.fuzz.statistics import draw_rows
from tests.support.guarded_memory import Block, Layout, write

GARBAGE = (2147480000, -5)  # in unused entries of page tables
LENGTHS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded", "seqused_q", "seqused_kv")
SPARE_PAGES = 3


class Slots(NamedTuple):
    """Positions of a tensor's sequences, in thd along its tokens. `end`: end of the last, or the longest of a dense format."""

    starts: list[int]
    lengths: list[int]
    end: int


class Call:
    """One call of a configuration. `refill` draws other lengths and values into the same memory."""

    def __init__(self, config: Config, seed: int) -> None:
        self.config, self._rng = config, Random(seed)
        self._generator = torch.Generator(config.where.device).manual_seed(seed)
        c, rng = config, self._rng
        longest = [rng.choice([1, 5, most // 3, most]) for most in c.longest]
        if not c.has_lengths and rng.random() < 0.3:
            longest[0] = 1  # as in decoding
        self._batch = c.batch
        if c.kind == "empty":
            empty = rng.choice(["batch", "queries", "keys", "both"])
            self._batch = 0 if empty == "batch" else c.batch
            longest = [0 if empty in (name, "both") else n for name, n in zip(("queries", "keys"), longest, strict=True)]
        self.packing = self._possible_packing()
        if self.packing in ("q, k and v", "q is k is v"):
            longest[1] = longest[0]
        self._longest = tuple(longest)
        self._slots = self._draw_all_slots([None, None])
        self._rows = [slots.end + (rng.choice([0, 0, 3, 30]) if c.has_lengths else 0) for slots in self._slots]
        if self.packing in ("q, k and v", "q is k is v"):
            self._rows = [max(self._rows)] * 2
        self._max_seqlens = [self._draw_max_seqlen(fmt, n) for fmt, n in zip(self._formats, longest, strict=True)]
        self._draw_numbers()
        layouts = self._layouts()
        together = self._pack(layouts)
        self.wanted = self._wanted(layouts)
        self._blocks = [
            Block(layouts, c.where.device, together if is_together else (), c.as_views, self.wanted)
            for is_together in c.together[: 1 + max(c.sets)]
        ]
        self._use(c.sets[0])
        self._write()

    def _wanted(self, names: Iterable[str]) -> list[str]:
        """Returns the tensors that need a gradient, by name."""
        possible = (*DIFFERENTIABLE, *(name for name in self.config.captures if name not in INTEGERS))
        return [name for name in possible if name in self.config.wants and name in names]

    def _use(self, number: int) -> None:
        self._block = self._blocks[number]
        self.tensors = self._block.tensors

    def renew_leaves(self) -> None:
        """Replaces the tensors by others in the same memory, which autograd has seen on no stream."""
        new = {name: t.detach().requires_grad_(t.requires_grad) for name, t in self.tensors.items()}
        self._block.tensors = self.tensors = new

    def move(self, number: int) -> None:
        """Uses another set of tensors, which have the same values and strides from then on."""
        tensors = self.tensors
        self._use(number)
        if tensors is not self.tensors:
            for name, t in tensors.items():
                write(self.tensors[name], t.detach())
            self._block.remember()

    @property
    def results(self) -> Results:
        """Draws formats of results that differ from those of q, k and v, if the call supports them."""
        wanted, (q_format, kv_format) = self.config.results, self._formats
        own = (q_format, q_format, kv_format)
        formats = [w if w and (w == "thd") == (fmt == "thd") else "" for w, fmt in zip(wanted[:3], own, strict=True)]
        q, k, v = (self.tensors.get(f"pages_{name}", self.tensors[name]) for name in "qkv")
        shared = (q, k, v) if PACKINGS.get(wanted.packing, (0, 0))[0] == 3 else (k, v)
        is_one = len({t.shape for t in shared}) == 1 and (len(shared) == 2 or q_format == kv_format)
        if len(shared) == 3 and is_one:
            formats[2] = formats[1]
        return Results(*formats, wanted.packing if is_one else "")

    @property
    def dout(self) -> Tensor | None:
        return self.tensors["dout"] if "out" in self.config.loss else None

    @property
    def dlse(self) -> Tensor | None:
        return self.tensors["dlse"] if "lse" in self.config.loss else None

    @property
    def generator(self) -> torch.Generator:
        return self._generator

    def is_changed(self) -> Tensor:
        """bool []: whether memory of the inputs is another than `refill` left it."""
        return self._block.is_changed()

    def refill(self, is_captured: bool = False) -> None:
        """Draws other lengths and values, and sometimes other numbers, into the tensors' memory.

        is_captured: in a graph, which keeps numbers and the tables of a block mask.
        """
        self._slots = self._draw_all_slots(self._rows)
        if self._rng.random() < 0.3 and not is_captured:
            self._draw_numbers()
        self._write((*INTEGERS, "rng_state") if is_captured else ())

    @property
    def meant(self) -> dict[str, Tensor]:
        """Returns the tensors as the oracle takes them: keys and values in FP8 in fp64, with their descales."""
        return self.tensors | {name: self._stands_for(name) for name in self._in_fp8}

    @property
    def _in_fp8(self) -> str:
        return {"keys": "kv", "all": "qkv"}.get(self.config.fp8_of, "")

    def _stands_for(self, name: str) -> Tensor:
        c, x, descale = self.config, self.tensors[name].detach().double(), self._descales.get(name)
        if descale is None:
            return x
        descale = descale.double().to(x.device)
        if self._kind_of_descale(name) == "tokens":
            return x * descale[..., None]
        sizes = descale.shape if descale.dim() > 1 else (1, max(1, descale.numel()))
        side = int(name != "q")
        head_descales = descale.view(sizes[0], sizes[1]).expand(self._batch, c.heads_kv if side else c.heads)
        if self._formats[side] != "thd":
            return x * head_descales[..., None, None].permute(["bhsd".index(dim) for dim in self._formats[side]])
        slots = self._slots[side]
        for factors, start, length in zip(head_descales, slots.starts, slots.lengths, strict=True):
            x[start : start + length] *= factors[:, None]
        return x

    def _kind_of_descale(self, name: str) -> str:
        return self.config.descales["qkv".index(name)]

    def _possible_packing(self) -> str:
        """Returns how tensors can share one memory: the wanted kind, or a smaller one."""
        c = self.config
        is_even = c.head_dim_qk == c.head_dim_v
        has_one_kind = c.q_format == c.kv_format and is_even and not (self._in_fp8 or c.page_size) and c.kind == "ordinary"
        if c.packing == "q is k is v" and not (has_one_kind and c.group == 1):
            return "v in k" if is_even else ""
        if c.packing == "q, k and v" and not has_one_kind:
            return "k and v"
        return "" if c.packing == "v in k" and c.head_dim_v > c.head_dim_qk else c.packing

    def _pack(self, layouts: dict[str, Layout]) -> list[list[str]]:
        """Gives tensors that lie in one memory their strides and places; returns their names, by memory."""
        rng, prefix = self._rng, "pages_" if "pages_k" in layouts else ""
        groups = []
        if self.packing:
            keys = [f"{prefix}k", f"{prefix}v"]
            groups = [["q", *keys] if self.packing in ("q, k and v", "q is k is v") else keys]
            pairs = [["descale_k", "descale_v"], ["cu_seqlens_q", "cu_seqlens_kv"], ["seqused_q", "seqused_kv"]]
            groups += [pair for pair in pairs if all(name in layouts for name in pair)]
        together = []
        for names in groups:
            sizes = [layouts[name].sizes for name in names]
            if self.packing == "v in k" and prefix:  # the oracle's v then has as many heads as k
                sizes_v = layouts["v"].sizes
                layouts["v"] = Layout(sizes_v, torch.empty(sizes_v, device="meta").stride(), layouts["v"].dtype)
            if self.packing in ("v in k", "q is k is v") and names is groups[0]:
                whole = torch.empty(sizes[-2], device="meta")
                views = [whole, whole.narrow(-1, 0, sizes[-1][-1])] if len(names) == 2 else [whole] * 3
            elif len(set(sizes)) == 1 and (names is not groups[0] or rng.random() < 0.6):
                dim = rng.randrange(len(sizes[0])) if names is groups[0] else 0
                views = list(torch.empty((*sizes[0][:dim], len(names), *sizes[0][dim:]), device="meta").unbind(dim))
            elif names is groups[0]:
                dim = self._formats[1].index("h") if sizes[-1][-1] == sizes[0][-1] else -1
                along = [size[dim] for size in sizes]
                full = list(sizes[0])
                full[dim] = sum(along)
                views = list(torch.empty(full, device="meta").split(along, dim))
            else:
                continue
            for name, view in zip(names, views, strict=True):
                layouts[name] = Layout(tuple(view.shape), view.stride(), layouts[name].dtype, view.storage_offset())
            together.append(names)
        return together

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of attention(), with mods that were not seen before."""
        c, t = self.config, self.tensors
        padding = "padding" if c.has_lengths else ""
        call: dict[str, Any] = {name: t[name] for name in ("q", "k", "v")}
        call |= {
            "qkv_format": c.q_format if c.q_format == c.kv_format else f"{c.q_format}_2{c.kv_format}",
            "attn_mask_type": "_".join(filter(None, [padding, c.mask])) or "no_mask",
            "window_size": _window_size(self._window),
            "bottom_right_diagonal": c.diagonal,
            "bias_type": c.bias_type,
            "softmax_type": c.softmax_type,
            "softmax_scale": self._scale if c.has_scale else None,
            "softcap": self._softcap,
            "dropout_p": c.dropout_p,
            "deterministic": c.deterministic,
            "return_lse": c.return_lse,
            "return_max_logit": c.return_max_logit,
            "backend": c.where.backend,
        }
        others = (
            "bias",
            "alibi_slopes",
            "softmax_offset",
            "rng_state",
            "descale_q",
            "descale_k",
            "descale_v",
            "page_table",
            "kv_indices",
        )
        call |= {name: t[name] for name in (*others, *LENGTHS) if name in t}
        if c.fp8_of == "recipe":
            fmt = "HYBRID" if c.fp8 == "float8_e5m2" else "E4M3"
            granularity, rotation = c.recipe
            rows = {"granularity": "block", "block_rows": 64} if granularity == BLOCKS_OF_64 else {"granularity": granularity}
            call["fp8_recipe"] = fp8.Recipe(fp8_format=fmt, rotation=rotation, **rows)
        if "page_table" in t:
            call |= {"k": t["pages_k"], "v": t["pages_v"], "max_seqlen_kv": self._rows[1]}
        for name, fmt, value in zip(("max_seqlen_q", "max_seqlen_kv"), self._formats, self._max_seqlens, strict=True):
            if fmt == "thd":
                call[name] = value
        if c.score_mod is not None:
            call |= self._score_mod(ALL_SCORE_MODS[c.score_mod])
        if c.mask_mod is not None:
            mask_mod = MASK_MODS[c.mask_mod].make(t, self._numbers)
            call |= {"mask_mod": mask_mod} if self._block_sizes is None else {"block_mask": self._block_mask(mask_mod)}
        return call

    def problem(self) -> Problem:
        """The same for the oracle."""
        c = self.config
        sides = [
            Side(fmt, slots.starts if fmt == "thd" else [rows * n for n in range(self._batch)], lengths)
            for fmt, slots, rows, lengths in zip(self._formats, self._slots, self._rows, self._lengths(), strict=True)
        ]
        score_mod, mask_mod = (
            _closed_form(table[name], self._numbers) if name else None
            for table, name in ((ALL_SCORE_MODS, c.score_mod), (MASK_MODS, c.mask_mod))
        )
        return Problem(
            q=sides[0],
            kv=sides[1],
            mask_type=c.mask,
            window=self._window,
            bottom_right_diagonal=c.diagonal,
            bias_type=c.bias_type,
            softmax_type=c.softmax_type,
            scale=self._scale if c.has_scale else c.head_dim_qk**-0.5,
            softcap=self._softcap,
            dropout_p=c.dropout_p,
            rng_state=self._rng_state,
            score_mod=score_mod,
            mask_mod=mask_mod,
            is_extreme=c.extreme is not None,
        )

    @property
    def _formats(self) -> tuple[str, str]:
        return self.config.q_format, self.config.kv_format

    def _lengths(self) -> list[list[int]]:
        """Returns the lengths of q's and kv's sequences, cut at max_seqlen."""
        return [
            [length if most is None else min(most, length) for length in slots.lengths]
            for slots, most in zip(self._slots, self._max_seqlens, strict=True)
        ]

    def _draw_all_slots(self, rows: Sequence[int | None]) -> list[Slots]:
        """Draws the positions of the sequences of q and of k and v. rows: the number of rows, if it is fixed."""
        q_slots, kv_slots = (self._draw_slots(*of) for of in zip(self._formats, self._longest, rows, strict=True))
        return [q_slots, q_slots if self.packing == "q is k is v" else kv_slots]

    def _draw_slots(self, fmt: str, longest: int, rows: int | None = None) -> Slots:
        """Draws the positions of sequences, within `rows` rows if they are given."""
        c, rng = self.config, self._rng
        lengths = [longest] * self._batch
        if c.has_lengths:
            lengths = [rng.choice([min(1, longest), rng.randint(0, longest), longest]) for _ in lengths]
            if rng.random() < 0.3 and lengths:
                lengths[rng.randrange(len(lengths))] = 0
        if fmt != "thd":
            return Slots([0] * self._batch, lengths, longest)
        first = rng.randint(1, 6) if c.is_offset else 0
        room = [rng.randint(0, 4) if c.gaps != "none" else 0 for _ in lengths]
        if rows is not None and first + sum(lengths) + sum(room) > rows:
            room = [0 for _ in lengths]
            while sum(lengths) > rows - first:
                first, lengths = min(first, rows), [length // 2 for length in lengths]
        order = list(range(self._batch))
        if c.gaps == "any order":
            rng.shuffle(order)
        starts, end = [0] * self._batch, first
        for n in order:
            starts[n], end = end, end + lengths[n] + room[n]
        return Slots(starts, lengths, end)

    def _draw_max_seqlen(self, fmt: str, longest: int) -> int | None:
        if fmt != "thd":
            return None
        kind = self.config.max_seqlen
        if kind == "huge":
            return self._rng.choice(HUGE)
        return {"longest": longest, "longer": longest + 3, "cut": max(1, longest - 2), "none": None}[kind]

    def _draw_numbers(self) -> None:
        c, rng = self.config, self._rng
        left, right = ({"open": None, "any": rng.choice(WINDOWS), "huge": rng.choice(HUGE)}[side] for side in c.window)
        self._window = Window(left, min(0, right) if c.mask and right is not None else right)
        self._scale = rng.choice([0.5, 1.0, 0.05, 0.0])
        self._softcap = rng.choice([2.0, 20.0, 50.0]) if c.has_softcap else 0.0
        self._rng_state = rng.randint(-(2**63), 2**63 - 1), rng.randint(0, 2**40)
        lowest = torch.finfo(c.bias_dtype if c.extreme == "bias" else torch.float32).min
        if c.bias_type == "pre_scale_bias" and c.score_mod is not None:
            lowest = max(lowest, FURTHEST_FOR_A_MOD)
        value = rng.choice(EXTREMES)
        value = lowest if value == "finfo.min" else max(float(value), lowest)
        self._numbers = {
            "factor": rng.uniform(0.5, 2.0),
            "shift": rng.uniform(-1.0, 1.0),
            "cap": rng.uniform(2.0, 6.0),
            "size": c.size,
            "value": value,
        }

    def _sizes(self) -> dict[str, tuple[int, ...]]:
        """Sizes of every tensor of the call."""
        c = self.config
        sizes: dict[str, tuple[int, ...]] = {}
        most = [rows if n is None else n for rows, n in zip(self._rows, self._max_seqlens, strict=True)]
        for name, side, heads, dim in (
            ("q", 0, c.heads, c.head_dim_qk),
            ("k", 1, c.heads_kv, c.head_dim_qk),
            ("v", 1, c.heads_kv, c.head_dim_v),
            ("dout", 0, c.heads, c.head_dim_v),
        ):
            sizes_by_dim = {"b": self._batch, "s": self._rows[side], "t": self._rows[side], "h": heads, "d": dim}
            sizes[name] = tuple(sizes_by_dim[d] for d in self._formats[side])
        if c.page_size and self._rows[1]:
            columns = -(-self._rows[1] // c.page_size)
            sizes_by_dim = {"b": self._batch * columns + SPARE_PAGES, "s": c.page_size, "h": c.heads_kv}
            sizes |= {f"pages_{name}": (*(sizes_by_dim[d] for d in c.kv_format[:-1]), sizes[name][-1]) for name in "kv"}
            sizes["page_table"] = (self._batch, columns)
        for name in self._in_fp8:
            heads = c.heads if name == "q" else c.heads_kv
            shapes: dict[str, tuple[int, ...]] = {
                "one": (),
                "heads": (heads,),
                "one head": (1,),
                "sequences and heads": (self._batch, heads),
                "sequences": (self._batch, 1),
                "blocks": (self._batch, heads, 1),
                "tokens": sizes[f"pages_{name}" if "page_table" in sizes else name][:-1],
            }
            if self._kind_of_descale(name) != "none":
                sizes[f"descale_{name}"] = shapes[self._kind_of_descale(name)]
        if c.listed:
            tokens = (self._rows[0],) if c.q_format == "thd" else (self._batch, self._rows[0])
            sizes["kv_indices"] = (*tokens, *((c.heads_kv,) if c.has_lists_of_heads else ()), c.listed)
        if "rows" in c.aux:
            sizes["rows"] = self._rng.choice([(), (1,), (self._batch,)]) + (self._rng.choice([1, 3, 20]),)
        sizes["dlse"] = (c.heads, self._rows[0]) if c.q_format == "thd" else (self._batch, c.heads, self._rows[0])
        if c.bias_type in ("pre_scale_bias", "post_scale_bias"):
            whole = (self._batch, c.heads, *most)
            sizes["bias"] = tuple(size if spans else 1 for size, spans in zip(whole, c.bias_dims, strict=True))
            if c.shares_bias and self._batch > 1:
                sizes["bias"] = (self._batch // 2, *sizes["bias"][1:])
        if c.bias_type == "alibi" and c.slopes != "none":
            sizes["alibi_slopes"] = (self._batch, c.heads)[-len(c.slopes) :]
        if c.softmax_type == "learnable":
            sizes["softmax_offset"] = (c.heads,)
        if c.dropout_p:
            sizes["rng_state"] = (2,)
        for name, fmt in zip(("q", "kv"), self._formats, strict=True):
            if c.has_lengths and c.lengths_in == "seqused" and fmt != "thd":
                sizes[f"seqused_{name}"] = (self._batch,)
            elif c.has_lengths:
                sizes[f"cu_seqlens_{name}"] = (self._batch + 1,)
                if fmt == "thd" and c.gaps != "none":
                    sizes[f"cu_seqlens_{name}_padded"] = (self._batch + 1,)
        self._block_sizes = None
        if c.block_mask and min(most) > 0 and self._batch:
            self._block_sizes = [n + self._rng.choice([0, 17]) for n in most]
        longest = max(*self._longest, *(self._block_sizes or ())) + 1
        sizes_by_name = {"b": self._batch, "h": c.heads, "s": longest}
        for name, dims in c.captures.items():
            sizes[name] = tuple(sizes_by_name[d] if isinstance(d, str) else d for d in dims)
        return sizes

    def _layouts(self) -> dict[str, Layout]:
        c = self.config
        own = {
            "dlse": torch.float64 if c.dtype is torch.float64 else torch.float32,
            "bias": c.bias_dtype,
            "alibi_slopes": torch.float32,
            "softmax_offset": c.offset_dtype,
            "rng_state": torch.int64,
        }
        layouts = {}
        for name, sizes in self._sizes().items():
            base_name = name.removeprefix("pages_")
            if name in LENGTHS or name in ("page_table", "kv_indices"):
                dtype = torch.int32
            elif name in (*INTEGERS, "rows"):
                dtype = self._rng.choice([torch.int32, torch.int64])
            elif base_name in (*self._in_fp8,):
                dtype = getattr(torch, c.fp8)
            else:
                dtype = own.get(name, c.dtype if base_name in ("q", "k", "v", "dout") else torch.float32)
            kind = c.layouts.get(base_name, "plain")
            if base_name != name and kind in ("expanded", "last dim strided"):
                kind = "plain"
            layouts[name] = draw_layout(self._rng, sizes, dtype, kind, self._heads_dim(name))
        return layouts

    def _heads_dim(self, name: str) -> int | None:
        """Returns the dim that may be expanded: the heads, because padding differs along the others."""
        c = self.config
        if name in ("q", "k", "v", "dout"):
            return self._formats[name in ("k", "v")].index("h")
        return {"dlse": 0 if c.q_format == "thd" else 1, "bias": 1}.get(name)

    def _write(self, kept: Sequence[str] = ()) -> None:
        """Draws numbers into all tensors that are not kept. Padding gets numbers that would show in results if they were read."""
        c, rng = self.config, self._rng
        lengths = self._lengths()
        exact_kv = {}
        self._descales: dict[str, Tensor] = {}
        for name, t in self.tensors.items():
            if name in kept or name.startswith(("page", "descale")):
                continue
            if name.startswith("seqused"):
                values = torch.tensor(self._slots[name == "seqused_kv"].lengths, dtype=torch.int32)
            elif name.startswith("cu_"):
                values = torch.tensor(self._cumulative(name), dtype=torch.int32)
            elif name == "rng_state":
                values = torch.tensor(self._rng_state)
            elif name == "kv_indices":
                values = self._lists(tuple(t.shape))
            elif name == "rows":
                values = draw_rows(rng, tuple(t.shape), t.dtype, self._longest[0])
            elif name in INTEGERS:
                values = self._integers(name, tuple(t.shape))
            else:
                values = torch.randn(t.shape, generator=self._generator, device=t.device)
            if name == "cap":
                values = values.abs() + 2.0
            if name == "alibi_slopes":
                values = values.abs()
                if c.extreme == "slopes":
                    values[..., rng.randrange(c.heads)] = min(-self._numbers["value"], 1e30)
            if name == "bias" and c.extreme == "bias":
                region = values[..., : rng.randint(0, values.shape[3])] if rng.random() < 0.6 else values[:, :, ::3]
                region.fill_(self._numbers["value"])
            if name in ("q", "k", "v", "dout", "dlse"):
                side = int(name in ("k", "v"))
                is_padding = self._is_padding(self._formats[side], self._slots[side], lengths[side], self._rows[side])
                self._spoil(values, is_padding.to(t.device, non_blocking=True), self._token_dims(name))
            if name == "v" and self.packing == "v in k":
                values = exact_kv["k"][..., : c.head_dim_v]
            if name in ("k", "v") and self.packing == "q is k is v":
                values = self.tensors["q"].detach()
            write(t, values.to(t.dtype))
            if name in ("k", "v"):
                exact_kv[name] = t.detach().double()
        for name in self._in_fp8:
            self._write_descale(name)
        if "page_table" in self.tensors:
            self._write_pages(exact_kv)
        self._block.remember()

    def _write_descale(self, name: str) -> None:
        """Returns positive numbers, and NaN for tokens beyond a length."""
        kind, t = self._kind_of_descale(name), self.tensors.get(f"descale_{name}")
        if t is None:
            return
        is_of_tokens = kind == "tokens"
        shape = tuple(self.tensors[name].shape[:-1]) if is_of_tokens else tuple(t.shape)
        values = 0.5 + torch.rand(shape, generator=self._generator, device=t.device)
        if is_of_tokens:
            is_padding = self._is_padding(self._formats[1], self._slots[1], self._lengths()[1], self._rows[1])
            values.movedim(self._token_dims(name), tuple(range(is_padding.dim())))[is_padding.to(t.device)] = float("nan")
        self._descales[name] = values
        if not (is_of_tokens and "page_table" in self.tensors):
            write(t, values)

    def _write_pages(self, exact_kv: dict[str, Tensor]) -> None:
        """Lays keys, values and descales of tokens into pages of any order, with NaN elsewhere."""
        c, rng = self.config, self._rng
        table = self.tensors["page_table"]
        places = torch.randperm(table.numel() + SPARE_PAGES, generator=torch.Generator().manual_seed(rng.randrange(2**32)))
        columns, sequences, tokens, rows = table.shape[1], [], [], []
        entries = torch.full(table.shape, rng.choice(GARBAGE), dtype=torch.int32)
        for b, length in enumerate(self._slots[1].lengths):
            for n in range(-(-length // c.page_size)):
                entries[b, n] = places[b * columns + n]
            for j in range(length):
                sequences.append(b)
                tokens.append(j)
                rows.append(int(entries[b, j // c.page_size]) * c.page_size + j % c.page_size)
        write(table, entries.to(table.device))
        sources = {f"pages_{name}": exact_kv[name] for name in "kv"}
        sources |= {
            f"descale_{name}": t[..., None] for name, t in self._descales.items() if self._kind_of_descale(name) == "tokens"
        }
        order = ["bshd".index(dim) for dim in c.kv_format]
        for name, source in sources.items():
            dense = source.permute([c.kv_format.index(dim) for dim in "bshd"])
            pool = dense.new_full((len(places) * c.page_size, *dense.shape[2:]), float("nan"))
            pool[torch.tensor(rows, device=pool.device, dtype=torch.int64)] = dense[sequences, tokens]
            values = pool.view(len(places), c.page_size, *dense.shape[2:]).permute(order)
            t = self.tensors[name]
            write(t, (values if name.startswith("pages") else values[..., 0]).to(t.dtype))

    def _is_padding(self, fmt: str, slots: Slots, lengths: list[int], rows: int) -> Tensor:
        """bool [b, s], or [t] for thd"""
        is_padding = torch.ones((rows,) if fmt == "thd" else (self._batch, rows), dtype=torch.bool)
        for n, (start, length) in enumerate(zip(slots.starts, lengths, strict=True)):
            (is_padding if fmt == "thd" else is_padding[n])[start : start + length] = False
        return is_padding

    def _token_dims(self, name: str) -> tuple[int, ...]:
        """The dims of a tensor that `_is_padding` has."""
        if name == "dlse":
            return (1,) if self.config.q_format == "thd" else (0, 2)
        fmt = self._formats[name in ("k", "v")]
        return tuple(fmt.index(dim) for dim in ("t" if fmt == "thd" else "bs"))

    def _spoil(self, values: Tensor, is_padding: Tensor, dims: tuple[int, ...]) -> None:
        largest = 3e4 if self.config.dtype is torch.float16 else 1e30
        kinds = {"nan": [float("nan")], "inf": [float("inf"), float("-inf")], "1e30": [largest, -largest]}
        kinds["mixed"] = [value for group in kinds.values() for value in group]
        tokens = values.movedim(dims, tuple(range(len(dims))))
        tokens[is_padding] = self._rng.choice(kinds[self.config.padding])

    def _cumulative(self, name: str) -> list[int]:
        c, rng = self.config, self._rng
        side = int("_kv" in name)
        slots, rows = self._slots[side], self._rows[side]
        if name.endswith("_padded"):
            values = [*slots.starts, slots.end]
        else:
            is_gapless = self._formats[side] == "thd" and c.gaps == "none"
            values = list(accumulate(slots.lengths, initial=slots.starts[0] if is_gapless and slots.starts else 0))
        if c.kind == "wrong lengths" and rng.random() < 0.7:
            wrong = [-1, -(2**31), 2**31 - 1, rows + 1, 2 * rows, rng.randint(-rows - 1, 2 * rows + 1), 0]
            values = [rng.choice([value, *wrong]) for value in values] if rng.random() < 0.7 else values[::-1]
        return values

    def _lists(self, shape: tuple[int, ...]) -> Tensor:
        """Returns keys in any order, once each, and entries that are no key, some just behind the longest sequence."""
        generator = torch.Generator().manual_seed(self._rng.randrange(2**32))
        order = torch.rand(*shape[:-1], max(shape[-1], self._longest[1] + 2), generator=generator).argsort(-1)[..., : shape[-1]]
        empty = torch.tensor((-1, *GARBAGE))[torch.randint(0, 3, shape, generator=generator)]
        return torch.where(torch.rand(shape, generator=generator) < 0.2, empty, order).to(torch.int32)

    def _integers(self, name: str, shape: tuple[int, ...]) -> Tensor:
        rng = self._rng
        if name == "documents":
            return torch.arange(shape[0]) // rng.randint(1, 40)
        highest = 2 if name == "hidden" else max(2, self._longest[1] + 2)
        return torch.randint(0, highest, shape, generator=torch.Generator().manual_seed(rng.randrange(2**32)))

    def _score_mod(self, drawn: Drawn) -> dict[str, Any]:
        names, how, numbers = tuple(drawn.captures), self.config.mod_tensors, self._numbers
        captures = {name: self.tensors[name] for name in names}
        if not names or drawn.dense is not None or how == "closure":  # mods of flexattn.mods are created before a trace
            return {"score_mod": drawn.make(captures, numbers)}

        def in_order(score: Any, b: Any, h: Any, i: Any, j: Any, *given: Tensor) -> Any:
            return drawn.make(dict(zip(names, given, strict=True)), numbers)(score, b, h, i, j)

        def by_name(score: Any, b: Any, h: Any, i: Any, j: Any, **given: Tensor) -> Any:
            return drawn.make(given, numbers)(score, b, h, i, j)

        if how == "list":
            return {"score_mod": in_order, "score_mod_tensors": list(captures.values())}
        return {"score_mod": by_name, "score_mod_tensors": captures}

    def _block_mask(self, mask_mod: Any) -> Any:
        """Draws a block mask, one for all heads or all batch entries if the mask is the same for them."""
        c = self.config
        batch = self._batch if c.mask_mod in ("rows", "prefix") or c.size == SIZES[0] else None
        heads = c.heads if c.mask_mod in ("pattern", "groups") or c.size == SIZES[1] else None
        return create_block_mask(mask_mod, batch, heads, *self._block_sizes, device=c.where.device, BLOCK_SIZE=c.block_mask)


def _window_size(window: Window) -> tuple[int, int] | Window:
    """Returns the argument for a window: a plain pair if no side is negative."""
    left, right = window
    if min(0 if side is None else side for side in window) < 0:
        return window
    return -1 if left is None else left, -1 if right is None else right


def _closed_form(drawn: Drawn, numbers: dict[str, Any]) -> Any:
    make = drawn.dense or drawn.make
    return lambda captures: make(captures, numbers)
