"""Calls of attention() drawn at random from all that it takes, in memory between guard bytes, with what the oracle needs of them.

A configuration is what decides which kernels run; a call of it has lengths, numbers and values of its own. Each has a seed.
"""

from __future__ import annotations

from itertools import accumulate
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn import create_block_mask
from flexattn.dispatch.spec import FORMATS, PACKINGS, Results, Window, as_bshd
from tests.fuzz.mods import EXTREME_MODS, INTEGERS, MASK_MODS, SCORE_MODS, SIZES, Drawn
from tests.fuzz.oracle import Problem, Side
from tests.support.guarded_memory import Block, Layout, write
from tests.support.pages import LAYOUTS as PAGE_LAYOUTS
from tests.support.pages import make_pool

HALF = (torch.float16, torch.bfloat16)
LAYOUTS = ("plain", "plain", "offset", "sliced", "stepped", "permuted", "expanded", "last dim strided")
EXTREMES = (-1e4, -3e4, -1e5, -1e8, -1e9, -1e10, -1e12, -1e15, -1e30, -0.7 * torch.finfo(torch.float32).max, "finfo.min")
# Sides of a window: any, and so large that a sum with a position leaves 31 or 63 bits.
WINDOWS, HUGE = (0, 1, 3, 7, 16, 40, 100, -1, -9), (2**31 - 1, 2**31, 2**62, 2**63 - 1)
# What can be left out of a run, to look for something else.
FURTHEST_FOR_A_MOD = -1e30  # that a score_mod may multiply by what is drawn here: inf - inf is NaN in plain torch too
FEATURES = ("extreme", "offset", "any order", "huge", "empty")
KINDS = ("ordinary", "empty", "wrong lengths")


class Where(NamedTuple):
    """The backend and the device that calls are drawn for, and how large these may be."""

    backend: str
    device: str
    dtypes: tuple[torch.dtype, ...]
    head_dims: tuple[int, ...]
    longest: tuple[int, int]  # most queries and most keys
    most_heads: int  # of k and v, and of q for each; and the largest batch
    without: frozenset[str] = frozenset()  # names of FEATURES


class Config(NamedTuple):
    where: Where
    kind: str
    longest: tuple[int, int]
    dtype: torch.dtype
    q_format: str
    kv_format: str
    has_lengths: bool
    gaps: str  # between slots of thd: "none", "ordered" or "any order"
    is_offset: bool  # the first slot of thd does not begin at 0
    batch: int
    heads_kv: int
    group: int
    head_dim_qk: int
    head_dim_v: int
    mask: str  # "", "causal" or "causal_bottom_right"
    window: tuple[str, ...]  # of each side "open", "any" or "huge"
    diagonal: bool | None
    max_seqlen: str  # "longest", "longer", "huge", "cut" or "none"
    bias_type: str
    bias_dims: tuple[bool, ...]  # which of b, h, sq, skv it spans
    bias_dtype: torch.dtype
    slopes: str  # "none", "h" or "bh"
    softmax_type: str
    offset_dtype: torch.dtype
    has_scale: bool
    has_softcap: bool
    dropout_p: float
    score_mod: str | None
    mask_mod: str | None
    block_mask: tuple[int, int] | None  # the size of its blocks
    size: int  # in mods
    mod_tensors: str  # how captures come: "closure", "list" or "dict"
    extreme: str | None  # where large finite negative numbers are: "bias", "slopes" or "score_mod"
    deterministic: bool | None
    wants: frozenset[str]  # what asks for a gradient
    loss: frozenset[str]  # what the loss is made of
    layouts: dict[str, str]
    padding: str  # "nan", "inf", "1e30" or "mixed"
    return_lse: bool
    return_max_logit: bool
    hopper: str  # FLEXATTN_HOPPER
    # As sequences are short:
    splits: int  # in the interpreter, how many parts keys are split in; 0: as the library finds
    has_small_blocks: bool  # in the interpreter, whether masks of whole blocks are told; on eager, whether rows come in chunks
    lengths_in: str  # "cu_seqlens" or "seqused": of dense formats
    page_size: int  # of dense keys with lengths, which then want no gradients; 0: they lie in no pages
    results: Results  # where out and gradients are asked to lie

    @property
    def heads(self) -> int:
        return self.heads_kv * self.group

    @property
    def captures(self) -> dict[str, tuple[str | int, ...]]:
        drawn = [table[name] for table, name in ((ALL_SCORE_MODS, self.score_mod), (MASK_MODS, self.mask_mod)) if name]
        return {name: dims for mod in drawn for name, dims in mod.captures.items()}


ALL_SCORE_MODS: dict[str, Drawn] = SCORE_MODS | EXTREME_MODS
TENSORS = ("q", "k", "v", "bias", "alibi_slopes", "softmax_offset", "dout", "dlse")
DIFFERENTIABLE = ("q", "k", "v", "bias", "softmax_offset")


def draw_config(seed: int, where: Where) -> Config:
    rng = Random(seed)

    def chance(p: float) -> bool:
        return rng.random() < p

    kind = rng.choices(KINDS, (90, 0 if "empty" in where.without else 4, 6))[0]
    q_format = rng.choice(["bshd", "sbhd", "bhsd", "thd"])
    kv_format = rng.choice([q_format, q_format, "bshd", "thd", "bhsd"])
    has_lengths = kind == "wrong lengths" or "thd" in (q_format, kv_format) or chance(0.4)
    mask = rng.choice(["", "", "causal", "causal_bottom_right"])
    dtype = rng.choice(where.dtypes)
    head_dims = where.head_dims
    if where.backend == "triton" and dtype is torch.float32:
        head_dims = tuple(dim for dim in head_dims if dim <= 256)
    head_dim = rng.choice(head_dims)
    bias_type = rng.choices(["no_bias", "pre_scale_bias", "post_scale_bias", "alibi"], (60, 12, 15, 13))[0]
    score_mod = rng.choice(tuple(SCORE_MODS)) if chance(0.35) else None
    mask_mod = rng.choice(tuple(MASK_MODS)) if chance(0.3) else None
    block_mask = rng.choice([(16, 16), (32, 32), (16, 48), (128, 128)]) if mask_mod and chance(0.4) else None
    extreme = None
    if chance(0.12) and dtype is not torch.float64 and "extreme" not in where.without:
        extreme = {"no_bias": "score_mod", "alibi": "slopes"}.get(bias_type, "bias")
        if extreme == "score_mod":
            score_mod = rng.choice(tuple(EXTREME_MODS))
    max_seqlen = "longest"
    if "thd" in (q_format, kv_format):
        max_seqlen = rng.choice(["longest", "longest", "longer", "cut", "cut", "huge", "none"])
        if bias_type in ("pre_scale_bias", "post_scale_bias") and max_seqlen in ("huge", "none"):
            max_seqlen = "longer"
        if max_seqlen == "huge" and ("huge" in where.without or block_mask):
            max_seqlen = "longer"
    names = [*TENSORS, *(name for mods in (ALL_SCORE_MODS, MASK_MODS) for mod in mods.values() for name in mod.captures)]
    is_long = chance(0.06) and where.device == "cuda"  # from 1024 tokens on keys are split, and blocks of masks are told apart
    outputs = rng.choice([{"out"}, {"out"}, {"out", "lse"}, {"lse"}, {"out", "lse"}])
    config = Config(
        where=where,
        kind=kind,
        longest=(1100, 1300) if is_long else where.longest,
        dtype=dtype,
        q_format=q_format,
        kv_format=kv_format,
        has_lengths=has_lengths,
        gaps=rng.choice(["none", "ordered", "ordered" if "any order" in where.without else "any order"]),
        is_offset=chance(0.25) and "offset" not in where.without,
        batch=1 if is_long else rng.randint(1, where.most_heads),
        heads_kv=1 if is_long else rng.randint(1, where.most_heads),
        group=rng.choice([1, 2, 3, 4][: where.most_heads + 1]),
        head_dim_qk=head_dim,
        head_dim_v=rng.choice([head_dim, head_dim, rng.choice(head_dims)]),
        mask=mask,
        window=tuple(rng.choices(["open", "any", "huge"], (60, 35, 0 if "huge" in where.without else 5))[0] for _ in "lr"),
        diagonal=None if mask else rng.choice([None, True, False]),
        max_seqlen=max_seqlen,
        bias_type=bias_type,
        bias_dims=tuple(chance(0.6) for _ in "bhij"),
        bias_dtype=rng.choice([dtype, torch.float32]) if dtype is not torch.float64 else dtype,
        slopes=rng.choice(["h", "bh"] if extreme == "slopes" else ["none", "h", "bh"]),
        softmax_type=rng.choices(["vanilla", "off-by-one", "learnable"], (60, 15, 25))[0],
        offset_dtype=rng.choice([dtype, torch.float32]) if dtype is not torch.float64 else dtype,
        has_scale=chance(0.25),
        has_softcap=chance(0.2),
        dropout_p=rng.choice([0.1, 0.25, 0.5, 0.9]) if chance(0.25) else 0.0,
        score_mod=score_mod,
        mask_mod=mask_mod,
        block_mask=block_mask,
        size=rng.choice(SIZES),
        mod_tensors=rng.choice(["closure", "closure", "list", "dict"]),
        extreme=extreme,
        deterministic=rng.choice([None, False, True]),
        wants=frozenset(name for name in names if chance(rng.choice([0.9, 0.4]))) if chance(0.9) else frozenset(),
        loss=frozenset(outputs),
        layouts={name: rng.choice(LAYOUTS) if chance(0.5) else "plain" for name in dict.fromkeys(names)},
        padding=rng.choice(["nan", "inf", "1e30", "mixed"]),
        return_lse="lse" in outputs or chance(0.5),
        return_max_logit=chance(0.4),
        hopper=rng.choice(["auto", "always", "never"]) if where.device == "cuda" else "auto",
        splits=rng.choice([0, 0, 2, 5]),
        has_small_blocks=chance(0.5),
        lengths_in=rng.choice(["cu_seqlens", "seqused"]),
        page_size=rng.choice([1, 3, 8, 16, 48, 64]) if chance(0.3) else 0,
        results=Results(*(rng.choice(["", *FORMATS]) for _ in range(3)), rng.choice(["", *PACKINGS]))
        if chance(0.15)
        else Results(),
    )
    if config.kind != "ordinary" or not has_lengths or kv_format not in ("bshd", "bhsd"):
        config = config._replace(page_size=0)
    if config.kind != "ordinary":
        config = config._replace(lengths_in="cu_seqlens", results=Results())
    return config._replace(wants=frozenset()) if config.page_size else config


class Slots(NamedTuple):
    """Places of the sequences of a tensor: in thd along its tokens; `end` is behind the last, or the longest of a dense format."""

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
        self._longest = tuple(longest)
        self._slots = [self._draw_slots(fmt, n) for fmt, n in zip(self._formats, longest, strict=True)]
        self._rows = [slots.end + (rng.choice([0, 0, 3, 30]) if c.has_lengths else 0) for slots in self._slots]
        self._max_seqlens = [self._draw_max_seqlen(fmt, n) for fmt, n in zip(self._formats, longest, strict=True)]
        self._draw_numbers()
        self._block = Block(self._layouts(), c.where.device)
        self.tensors = self._block.tensors
        for name in self.wanted:
            self.tensors[name].requires_grad_()
        self._write()

    @property
    def wanted(self) -> list[str]:
        """Returns the tensors that a gradient is asked of, by name."""
        possible = (*DIFFERENTIABLE, *(name for name in self.config.captures if name not in INTEGERS))
        return [name for name in possible if name in self.config.wants and name in self._block.tensors]

    @property
    def results(self) -> Results:
        """Formats of results that are not those of q, k and v, as far as the call can have them."""
        wanted, (q_format, kv_format) = self.config.results, self._formats
        own = (q_format, q_format, kv_format)
        formats = [w if w and (w == "thd") == (fmt == "thd") else "" for w, fmt in zip(wanted[:3], own, strict=True)]
        q, k, v = (self.tensors[name] for name in "qkv")
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

    def is_changed(self) -> Tensor:
        """bool []: whether memory of the inputs is another than `refill` left it."""
        return self._block.is_changed()

    def refill(self) -> None:
        """Other lengths and values, and sometimes other numbers, where the tensors lie."""
        self._slots = [
            self._draw_slots(fmt, longest, rows)
            for fmt, longest, rows in zip(self._formats, self._longest, self._rows, strict=True)
        ]
        if self._rng.random() < 0.3:
            self._draw_numbers()
        self._write()

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
        others = ("bias", "alibi_slopes", "softmax_offset", "rng_state")
        lengths = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
        call |= {name: t[name] for name in (*others, *lengths) if name in t}
        for name, fmt, value in zip(("max_seqlen_q", "max_seqlen_kv"), self._formats, self._max_seqlens, strict=True):
            if fmt == "thd":
                call[name] = value
        if c.score_mod is not None:
            call |= self._score_mod(ALL_SCORE_MODS[c.score_mod])
        if c.mask_mod is not None:
            mask_mod = MASK_MODS[c.mask_mod].make(t, self._numbers)
            call |= {"mask_mod": mask_mod} if self._block_sizes is None else {"block_mask": self._block_mask(mask_mod)}
        if c.has_lengths and c.lengths_in == "seqused":
            self._with_seqused(call)
        return call | self._pages() if c.page_size and self._rows[1] else call

    def _with_seqused(self, call: dict[str, Any]) -> None:
        """Says the lengths of dense formats by seqused."""
        for name, fmt, slots in zip(("q", "kv"), self._formats, self._slots, strict=True):
            if fmt != "thd":
                del call[f"cu_seqlens_{name}"]
                call[f"seqused_{name}"] = torch.tensor(slots.lengths, dtype=torch.int32).to(self.tensors["q"].device)

    def _pages(self) -> dict[str, Any]:
        """The arguments that the same keys in pages have, other pages in each call but those that repeat it."""
        c, lengths = self.config, self._slots[1].lengths
        k, v = (as_bshd(self.tensors[name].detach(), c.kv_format) for name in ("k", "v"))
        layout = PAGE_LAYOUTS[sum(lengths) % len(PAGE_LAYOUTS)]
        pool = make_pool(k.cpu(), v.cpu(), lengths, c.page_size, layout, seed=sum(lengths))
        fmt = c.q_format if c.q_format == pool.fmt else f"{c.q_format}_2{pool.fmt}"
        k, v, table = (t.to(self.tensors["q"].device) for t in pool[:3])
        return {"k": k, "v": v, "page_table": table, "qkv_format": fmt, "max_seqlen_kv": self._rows[1]}

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
        """Lengths of q's and kv's sequences, as far as max_seqlen lets them be seen."""
        return [
            [length if most is None else min(most, length) for length in slots.lengths]
            for slots, most in zip(self._slots, self._max_seqlens, strict=True)
        ]

    def _draw_slots(self, fmt: str, longest: int, rows: int | None = None) -> Slots:
        """In so many rows, if they are given."""
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
            of_dim = {"b": self._batch, "s": self._rows[side], "t": self._rows[side], "h": heads, "d": dim}
            sizes[name] = tuple(of_dim[d] for d in self._formats[side])
        sizes["dlse"] = (c.heads, self._rows[0]) if c.q_format == "thd" else (self._batch, c.heads, self._rows[0])
        if c.bias_type in ("pre_scale_bias", "post_scale_bias"):
            whole = (self._batch, c.heads, *most)
            sizes["bias"] = tuple(size if spans else 1 for size, spans in zip(whole, c.bias_dims, strict=True))
        if c.bias_type == "alibi" and c.slopes != "none":
            sizes["alibi_slopes"] = (self._batch, c.heads)[-len(c.slopes) :]
        if c.softmax_type == "learnable":
            sizes["softmax_offset"] = (c.heads,)
        if c.dropout_p:
            sizes["rng_state"] = (2,)
        for name, fmt in zip(("q", "kv"), self._formats, strict=True):
            if c.has_lengths:
                sizes[f"cu_seqlens_{name}"] = (self._batch + 1,)
                if fmt == "thd" and c.gaps != "none":
                    sizes[f"cu_seqlens_{name}_padded"] = (self._batch + 1,)
        self._block_sizes = None
        if c.block_mask and min(most) > 0 and self._batch:
            self._block_sizes = [n + self._rng.choice([0, 17]) for n in most]
        longest = max(*self._longest, *(self._block_sizes or ())) + 1
        of_name = {"b": self._batch, "h": c.heads, "s": longest}
        for name, dims in c.captures.items():
            sizes[name] = tuple(of_name[d] if isinstance(d, str) else d for d in dims)
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
            if name.startswith("cu_"):
                dtype = torch.int32
            elif name in INTEGERS:
                dtype = self._rng.choice([torch.int32, torch.int64])
            else:
                dtype = own.get(name, c.dtype if name in ("q", "k", "v", "dout") else torch.float32)
            kind = "plain" if name.startswith("cu_") or name == "rng_state" else c.layouts[name]
            layouts[name] = _draw_layout(self._rng, sizes, dtype, kind, self._heads_dim(name))
        return layouts

    def _heads_dim(self, name: str) -> int | None:
        """The dim that may be expanded: that of the heads, as what is padding differs along the others."""
        c = self.config
        if name in ("q", "k", "v", "dout"):
            return self._formats[name in ("k", "v")].index("h")
        return {"dlse": 0 if c.q_format == "thd" else 1, "bias": 1}.get(name)

    def _write(self) -> None:
        """Numbers into the tensors; padding is never read, so it gets what would be seen."""
        c, rng = self.config, self._rng
        lengths = self._lengths()
        for name, t in self.tensors.items():
            if name.startswith("cu_"):
                values = torch.tensor(self._cumulative(name), dtype=torch.int32)
            elif name == "rng_state":
                values = torch.tensor(self._rng_state)
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
                self._spoil(values, is_padding.to(t.device), self._token_dims(name))
            write(t, values.to(t.dtype))
        self._block.remember()

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
        kinds["mixed"] = [value for of_kind in kinds.values() for value in of_kind]
        tokens = values.movedim(dims, tuple(range(len(dims))))
        tokens[is_padding] = self._rng.choice(kinds[self.config.padding])

    def _cumulative(self, name: str) -> list[int]:
        c, rng = self.config, self._rng
        side = int("_kv" in name)
        slots, rows = self._slots[side], self._rows[side]
        if name.endswith("_padded"):
            values = [*slots.starts, slots.end]
        else:
            of_thd = self._formats[side] == "thd" and c.gaps == "none"
            values = list(accumulate(slots.lengths, initial=slots.starts[0] if of_thd and slots.starts else 0))
        if c.kind == "wrong lengths" and rng.random() < 0.7:
            wrong = [-1, -(2**31), 2**31 - 1, rows + 1, 2 * rows, rng.randint(-rows - 1, 2 * rows + 1), 0]
            values = [rng.choice([value, *wrong]) for value in values] if rng.random() < 0.7 else values[::-1]
        return values

    def _integers(self, name: str, shape: tuple[int, ...]) -> Tensor:
        rng = self._rng
        if name == "documents":
            return torch.arange(shape[0]) // rng.randint(1, 40)
        highest = 2 if name == "hidden" else max(2, self._longest[1] + 2)
        return torch.randint(0, highest, shape, generator=torch.Generator().manual_seed(rng.randrange(2**32)))

    def _score_mod(self, drawn: Drawn) -> dict[str, Any]:
        names, how, numbers = tuple(drawn.captures), self.config.mod_tensors, self._numbers
        captures = {name: self.tensors[name] for name in names}
        if not names or drawn.dense is not None or how == "closure":  # what flexattn.mods makes is made before a trace
            return {"score_mod": drawn.make(captures, numbers)}

        def in_order(score: Any, b: Any, h: Any, i: Any, j: Any, *given: Tensor) -> Any:
            return drawn.make(dict(zip(names, given, strict=True)), numbers)(score, b, h, i, j)

        def by_name(score: Any, b: Any, h: Any, i: Any, j: Any, **given: Tensor) -> Any:
            return drawn.make(given, numbers)(score, b, h, i, j)

        if how == "list":
            return {"score_mod": in_order, "score_mod_tensors": list(captures.values())}
        return {"score_mod": by_name, "score_mod_tensors": captures}

    def _block_mask(self, mask_mod: Any) -> Any:
        """For all heads, or all batch entries, at once where the mask is the same for them."""
        c = self.config
        batch = self._batch if c.mask_mod in ("rows", "prefix") or c.size == SIZES[0] else None
        heads = c.heads if c.mask_mod in ("pattern", "groups") or c.size == SIZES[1] else None
        return create_block_mask(mask_mod, batch, heads, *self._block_sizes, device=c.where.device, BLOCK_SIZE=c.block_mask)


def _window_size(window: Window) -> tuple[int, int] | Window:
    """Returns the argument for a window: a plain pair where no side is negative."""
    left, right = window
    if min(0 if side is None else side for side in window) < 0:
        return window
    return -1 if left is None else left, -1 if right is None else right


def _closed_form(drawn: Drawn, numbers: dict[str, Any]) -> Any:
    make = drawn.dense or drawn.make
    return lambda captures: make(captures, numbers)


def _draw_layout(rng: Random, sizes: tuple[int, ...], dtype: torch.dtype, kind: str, expandable: int | None) -> Layout:
    """Strides from the innermost dim on; a margin leaves room behind a dim, a step behind each of its elements."""
    order, steps, margins = list(range(len(sizes))), [1] * len(sizes), [0] * len(sizes)
    offset = rng.randint(1, 7) if kind == "offset" else 0
    if kind == "permuted" and len(sizes) > 1:
        order[:-1] = rng.sample(order[:-1], len(order) - 1)
    if kind == "last dim strided":
        rng.shuffle(order)
    if kind == "sliced":
        margins = [rng.choice([0, 1, 8]) for _ in sizes]
        offset = rng.choice([0, 8])
    if kind == "stepped" and len(sizes) > 1:
        steps[rng.randrange(len(sizes) - 1)] = 2
    strides, stride = [0] * len(sizes), 1
    for dim in reversed(order):
        if kind == "expanded" and dim == expandable:
            continue
        strides[dim] = stride * steps[dim]
        stride = strides[dim] * max(1, sizes[dim] + margins[dim])
    return Layout(sizes, tuple(strides), dtype, offset)
