"""Configurations of calls of attention(), drawn at random from all its arguments, and a call's choices that compile no kernel."""

from __future__ import annotations

from random import Random
from typing import NamedTuple

import torch

from flexattn.dispatch.spec import FORMATS, PACKINGS, Results
from tests.fuzz.mods import EXTREME_MODS, MASK_MODS, SCORE_MODS, SIZES, Drawn

HALF = (torch.float16, torch.bfloat16)
TANH_ERROR = 6e-7  # absolute error of tanh in half types, which a softcap multiplies
LAYOUTS = ("plain", "plain", "offset", "sliced", "stepped", "permuted", "expanded", "last dim strided")
EXTREMES = (-1e4, -3e4, -1e5, -1e8, -1e9, -1e10, -1e12, -1e15, -1e30, -0.7 * torch.finfo(torch.float32).max, "finfo.min")
# Sides of a window: any, and so large that a sum with a position leaves 31 or 63 bits.
WINDOWS, HUGE = (0, 1, 3, 7, 16, 40, 100, -1, -9), (2**31 - 1, 2**31, 2**62, 2**63 - 1)
# Features that a run can leave out, to look for other defects.
FURTHEST_FOR_A_MOD = -1e30  # a score_mod may multiply it by the numbers drawn here: inf - inf is NaN in plain torch too
FEATURES = ("extreme", "offset", "any order", "huge", "empty", "fp8", "sharing", "modes", "second order")
# Shapes of a descale of keys or values in FP8.
DESCALES = ("none", "one", "heads", "one head", "sequences and heads", "sequences", "blocks", "tokens")
# Tensors in FP8: only k and v, without a rounding; all three; or all three, quantised by a recipe.
FP8_OF = ("keys", "keys", "all", "recipe")
MOST_FP8_DIM = 256  # the largest head dim of keys in FP8 on Triton
DIMS_OF_FP8_KERNELS = ((64, 64), (128, 128), (192, 128), (256, 256))  # of q, k and of v, that kernels for sm_90 take
BLOCKS_OF_64 = "blocks of 64"  # rows with a scale, half as many as the FP8 backwards for sm_90 take
# Backwards for sm_90 that few calls reach: whether they are in FP8, the head dims of q and k and of v, whether they repeat to the
# bit, and whether they take scores that are modified.
RARE_BACKWARDS: dict[str, tuple[bool, tuple[int, ...], tuple[int, ...], bool, bool]] = {
    "sm_90 fused 192": (False, tuple(range(136, 193, 8)), tuple(range(8, 129, 8)), False, False),
    "sm_90 fused, dequantized": (True, tuple(range(16, 129, 16)), tuple(range(16, 129, 16)), False, True),
    "sm_90 fused 192, dequantized": (True, tuple(range(144, 193, 16)), tuple(range(16, 129, 16)), False, False),
    "sm_90 two-kernel, dequantized": (True, tuple(range(16, 257, 16)), tuple(range(16, 257, 16)), True, True),
}
FP8_BLOCK_MASK = (32, 64)  # block size of a block mask if Triton multiplies in FP8 and the drawn size is not a multiple of 32
# Tensors that lie in one memory: side by side, or one in another.
PACKINGS_OF_CALLS = ("", "", "", "k and v", "q, k and v", "v in k", "q is k is v")
# Modes that each of the three calls may be made in.
MODES = ("no_grad", "inference", "autocast", "default device", "thread", "checkpoint", "saved tensors")
GPU_MODES = ("stream", "graph", "graph", "graph")
KINDS = ("ordinary", "empty", "wrong lengths")
STATISTICS = ("max_scores", "entropy", "column_sums", "rows")


class Where(NamedTuple):
    """The backend and the device of drawn calls, and the largest sizes."""

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
    extreme: str | None  # the argument with large finite negative numbers: "bias", "slopes" or "score_mod"
    deterministic: bool | None
    wants: frozenset[str]  # the tensors that need a gradient
    loss: frozenset[str]  # the results in the loss
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
    results: Results  # the layouts of out and gradients
    # Keys and values in FP8:
    fp8: str = ""  # the dtype of k and v if it differs from q's; then no tensor needs a gradient
    fp8_of: str = ""  # of FP8_OF
    descales: tuple[str, str, str] = ("none", "none", "none")  # of q, k and v: names of DESCALES
    recipe: tuple[str, bool] = ("tensor", False)  # its granularity, or BLOCKS_OF_64, and whether it has a rotation
    gives_out: bool = False  # whether calls without gradients are given memory for out
    listed: int = 0  # keys that a list names for each query; 0: no lists
    has_lists_of_heads: bool = False  # whether each key head has lists of its own
    shares_bias: bool = False  # whether pairs of batch entries share an entry of the bias; the batch is then BATCH_OF_PAIRS
    is_second_order: bool = False  # whether its tangents and second derivatives are compared too
    aux: tuple[str, ...] = ()  # the statistics beside lse and max_logit that it returns
    # Each call draws these fields again (`varied`):
    packing: str = ""  # one of PACKINGS_OF_CALLS, if the shapes allow it: strides of tensors that share memory
    as_views: bool = False  # then they are views of one tensor to autograd, else tensors of their own
    together: tuple[bool, bool] = (
        True,
        True,
    )  # whether the two sets of tensors share memory or are separate, with equal strides
    sets: tuple[int, int, int] = (0, 0, 0)  # the set of tensors for each of the three calls
    modes: tuple[str, str, str] = ("", "", "")  # the mode that each is made in

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
BATCH_OF_PAIRS = 4


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
    if where.backend == "triton":
        config = config._replace(head_dim_v=min(config.head_dim_v, 512))
    if config.kind != "ordinary" or not has_lengths or kv_format not in ("bshd", "bhsd"):
        config = config._replace(page_size=0)
    if config.kind != "ordinary":
        config = config._replace(lengths_in="cu_seqlens", results=Results())
    config = config._replace(wants=frozenset()) if config.page_size else config
    config = config._replace(gives_out=Random(f"{seed} in memory").random() < 0.3)
    if (rng := Random(f"{seed} with lists of keys")).random() < 0.08:
        return _with_second_order(_with_lists(config, rng), Random(f"{seed} of second order"))
    if config.bias_type in ("pre_scale_bias", "post_scale_bias") and not is_long and Random(f"{seed} of pairs").random() < 0.25:
        config = config._replace(shares_bias=True, batch=BATCH_OF_PAIRS)
    if "fp8" not in where.without:
        config = _with_rare_backward(_with_fp8(config, Random(f"{seed} in FP8")), Random(f"{seed} with a rare backward"))
    config = _with_statistics(config, Random(f"{seed} of statistics"))
    return _with_second_order(config, Random(f"{seed} of second order"))


def _with_statistics(config: Config, rng: Random) -> Config:
    """Returns the configuration, and now and then one that returns statistics of its weights, which FP8 does not have."""
    if config.fp8 or rng.random() >= 0.2:
        return config
    # Weights of rows have max_seqlen_kv columns.
    possible = STATISTICS[:-1] if config.max_seqlen == "huge" else STATISTICS
    return config._replace(aux=tuple(name for name in possible if rng.random() < 0.6) or ("entropy",), results=Results())


def _with_second_order(config: Config, rng: Random) -> Config:
    """Returns the configuration, and now and then one whose tangents and second derivatives are compared too."""
    can = config.kind == "ordinary" and not (config.fp8 or config.page_size or config.extreme or max(config.longest) > 1000)
    return config._replace(is_second_order=can and rng.random() < 0.2 and "second order" not in config.where.without)


def _with_lists(config: Config, rng: Random) -> Config:
    """Returns a variant with lists of keys, without the features that the backend does not combine with them."""
    config = config._replace(
        listed=rng.choice([1, 5, 20]), has_lists_of_heads=rng.random() < 0.5, dropout_p=0.0, block_mask=None, extreme=None
    )
    if config.score_mod in EXTREME_MODS:
        config = config._replace(score_mod=None)
    if config.where.backend != "triton":
        return config
    return config._replace(bias_type="no_bias", score_mod=None, mask_mod=None, return_max_logit=False)


def _with_fp8(config: Config, rng: Random) -> Config:
    """Returns the configuration, and now and then a variant with keys and values in FP8."""
    if config.kind != "ordinary" or config.dtype is torch.float64 or rng.random() >= 0.25:
        return config
    dims, fp8_of = [config.head_dim_qk, config.head_dim_v], rng.choice(FP8_OF)
    if fp8_of != "keys":
        if config.dtype not in HALF or config.extreme:
            return config
        config = config._replace(page_size=0, has_scale=False)
        if config.where.backend == "triton" and config.block_mask and any(size % 32 for size in config.block_mask):
            config = config._replace(block_mask=FP8_BLOCK_MASK)
    if config.where.backend == "triton":
        multiple = 8 if fp8_of == "keys" else 16
        possible = [dim for dim in config.where.head_dims if dim <= MOST_FP8_DIM and dim % multiple == 0]
        dims = [dim if dim in possible else rng.choice(possible) for dim in dims]
        if fp8_of != "keys" and config.where.device == "cuda":
            either = (rng.choice(DIMS_OF_FP8_KERNELS), (rng.choice(sorted(set(possible))), dims[1]))
            dims = list(rng.choice(either))
    page_size = config.page_size
    if config.has_lengths and config.kv_format in ("bshd", "bhsd") and fp8_of == "keys" and rng.random() < 0.5:
        page_size = page_size or rng.choice([1, 16, 64, 24])
    # Packed keys have no descales of tokens, and keys with queries in FP8 have none either.
    descales = [name for name in DESCALES if name != "tokens" or (config.kv_format != "thd" and fp8_of == "keys")]
    return config._replace(
        fp8=rng.choice(["float8_e4m3fn", "float8_e4m3fn", "float8_e5m2"]),
        fp8_of=fp8_of,
        descales=("none" if fp8_of == "keys" else rng.choice(descales), rng.choice(descales), rng.choice(descales)),
        recipe=(rng.choice(["tensor", "head", "batch_head"]), rng.random() < 0.3),
        dtype=torch.bfloat16 if fp8_of == "all" else config.dtype,
        bias_dtype=torch.float32 if fp8_of == "all" else config.bias_dtype,
        offset_dtype=torch.float32 if fp8_of == "all" else config.offset_dtype,
        head_dim_qk=dims[0],
        head_dim_v=dims[1],
        page_size=page_size,
        results=Results(),
        wants=config.wants if fp8_of == "recipe" else frozenset(),
    )


def _with_rare_backward(config: Config, rng: Random) -> Config:
    """Returns the configuration, and on a GPU now and then a variant whose backward is one of RARE_BACKWARDS."""
    c = config
    if (c.where.backend, c.where.device, c.kind) != ("triton", "cuda", "ordinary") or c.dtype not in HALF or rng.random() >= 0.1:
        return c
    is_fp8, dims_qk, dims_v, repeats, takes_modified = RARE_BACKWARDS[rng.choice(tuple(RARE_BACKWARDS))]
    c = c._replace(
        hopper="always",
        deterministic=repeats,
        head_dim_qk=rng.choice(dims_qk),
        head_dim_v=rng.choice(dims_v),
        wants=frozenset({"q", "k", "v"}),
        page_size=0,
        results=Results(),
        extreme=None,
        block_mask=None,
        score_mod=None if c.extreme else c.score_mod,
        fp8=rng.choice(["float8_e4m3fn", "float8_e5m2"]) if is_fp8 else "",
        fp8_of="recipe" if is_fp8 else "",
        recipe=(BLOCKS_OF_64, rng.random() < 0.3),
        has_scale=c.has_scale and not is_fp8,
    )
    if takes_modified:
        return c
    return c._replace(bias_type="no_bias", score_mod=None, mask_mod=None, has_softcap=False, dropout_p=0.0)


def varied(config: Config, seed: int) -> Config:
    """Returns the configuration with other sequences, heads, numbers, strides, memory and modes.

    They need few new kernels. On a GPU a configuration has hundreds of calls, because its kernels take ten seconds or more.
    """
    rng, where = Random(f"{seed} varied"), config.where
    modes = [*MODES, *(GPU_MODES if where.device == "cuda" else ())]
    mode = rng.choice(modes) if rng.random() < 0.45 and "modes" not in where.without else ""
    if mode == "autocast" and config.dtype not in HALF:
        mode = ""
    if mode == "graph":
        call_modes = ("", "", "graph")
    else:
        call_modes = rng.choice([(mode, "", ""), ("", "", mode), (mode, mode, ""), (mode, mode, mode), ("", mode, "")])
    is_long = config.longest != where.longest
    config = config._replace(
        batch=config.batch if is_long or config.shares_bias else rng.randint(1, where.most_heads),
        heads_kv=config.heads_kv if is_long else rng.randint(1, where.most_heads),
        is_offset=rng.random() < 0.25 and "offset" not in where.without,
        gaps=rng.choice(["none", "ordered", "ordered" if "any order" in where.without else "any order"]),
        layouts={name: rng.choice(LAYOUTS) if rng.random() < 0.5 else "plain" for name in config.layouts},
        padding=rng.choice(["nan", "inf", "1e30", "mixed"]),
        modes=call_modes,
    )
    config = _with_other_numbers(config, Random(f"{seed} of other numbers"))
    if "sharing" in where.without:
        return config
    return config._replace(
        packing=rng.choice(PACKINGS_OF_CALLS),
        as_views=rng.random() < 0.5,
        together=rng.choice([(True, True), (True, False), (False, True), (True, False), (False, True), (False, False)]),
        sets=rng.choice([(0, 0, 0), (0, 0, 1), (0, 1, 0)]),
    )


def _with_other_numbers(config: Config, rng: Random) -> Config:
    """Draws the numbers and strides of a kernel's arguments again."""
    c, is_changed = config, rng.random() < 0.7
    if not is_changed:
        return c
    sides = ["any", "any", "any", "any" if "huge" in c.where.without else "huge"]
    has_results = c.kind == "ordinary" and not c.fp8 and not c.aux and rng.random() < 0.15
    return c._replace(
        window=tuple(side if side == "open" else rng.choice(sides) for side in c.window),
        diagonal=None if c.mask else rng.choice([None, True, False]),
        bias_dims=c.bias_dims if "bias" in c.wants or c.shares_bias else tuple(rng.random() < 0.6 for _ in "bhij"),
        slopes=c.slopes if c.slopes == "none" else rng.choice(["h", "bh"]),
        has_scale=rng.random() < 0.25 and c.fp8_of not in ("all", "recipe"),
        dropout_p=rng.choice([0.1, 0.25, 0.5, 0.9]) if c.dropout_p else 0.0,
        return_lse="lse" in c.loss or rng.random() < 0.5,
        results=Results(*(rng.choice(["", *FORMATS]) for _ in range(3)), rng.choice(["", *PACKINGS])) if has_results else Results(),
    )


def features(config: Config) -> dict[str, str]:
    """Returns the features of a call of the configuration, by group. A call has one feature of each group."""
    c = config
    formats = c.q_format if c.q_format == c.kv_format else "mixed"
    has_bias, dims = c.bias_type in ("pre_scale_bias", "post_scale_bias"), (c.head_dim_qk, c.head_dim_v)
    return {
        "kind": c.kind,
        "formats": formats,
        "dtype": str(c.dtype)[6:],
        "head dims": _kind_of_dims(*dims),
        "heads": "grouped" if c.group > 1 else "as many",
        "lengths": ("seqused" if c.lengths_in == "seqused" else "cu_seqlens") if c.has_lengths else "none",
        "pages": "none" if not c.page_size else "of a power of two" if c.page_size & (c.page_size - 1) == 0 else "of any size",
        "FP8": f"{c.fp8_of} in {c.fp8}" if c.fp8 else "none",
        "descales": "of two kinds" if c.descales[1] != c.descales[2] else c.descales[1],
        "mask": c.mask or "none",
        "window": " and ".join(c.window),
        "bias": c.bias_type
        + (f" {'of pairs' if c.shares_bias else 'bhij' if all(c.bias_dims) else 'broadcast'}" if has_bias else ""),
        "softmax": c.softmax_type,
        "softcap": "softcap" if c.has_softcap else "none",
        "dropout": "dropout" if c.dropout_p else "none",
        "score_mod": "large negatives" if c.extreme == "score_mod" else c.score_mod or "none",
        "mask_mod": c.mask_mod or "none",
        "block_mask": "block_mask" if c.block_mask else "none",
        "lists of keys": ("of heads" if c.has_lists_of_heads else "one") if c.listed else "none",
        "gradients": "of scores" if c.wants - {"q", "k", "v"} else "of q, k and v" if c.wants else "none",
        "loss": " and ".join(sorted(c.loss)) if c.wants else "none",
        "deterministic": str(c.deterministic),
        "statistics": " and ".join(c.aux) or "none",
        "results": "as inputs" if c.results == Results() else "elsewhere",
        "strides": "plain" if all(c.layouts[name] == "plain" for name in "qkv") else "any",
        "memory": c.packing or "of each",
        "moves": "no" if len(set(c.sets)) == 1 else "to one memory" if c.together[1] else "apart",
        "mode": next(filter(None, c.modes), "none"),
        "hopper": c.hopper,
    }


def _kind_of_dims(d_qk: int, d_v: int) -> str:
    widest = max(d_qk, d_v)
    kind = "above 256" if widest > 256 else "a power of two" if widest & (widest - 1) == 0 else "in parts"
    return kind if d_qk == d_v else f"{kind}, two of them"
