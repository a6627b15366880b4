"""Calls of attention over ranks, compared with calls of one process: over gloo on a CPU, or NCCL on GPUs."""

from __future__ import annotations

import dataclasses
import functools
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import flexattn
from flexattn import Window, call_cache, distributed
from flexattn.block_mask import ordered
from flexattn.distributed import exchange, gather, slices
from flexattn.distributed import layout as chunks
from flexattn.distributed.plans import STRATEGIES, Plan
from flexattn.testing import GRADIENT_FACTOR, check_close

EXACT = 1e-10  # of fp64: sums over ranks and steps in another order
LAYOUTS = ("contiguous", "zigzag", "dealt")
WAYS = (*STRATEGIES[:4], "gather sliced", "halo sliced")  # the last two: keys come in slices of heads, however few they are
OTHER_BITS = 0.02  # share of out that may have other bits: torch's products of other shapes sum in another order
PACKED = ("gather packed", "halo packed")  # keys come as from ranks of several hosts
SLICES, MOST_RANKS = (slices.SLICE_BYTES, slices.SLICE_PRODUCTS), exchange.MOST_RANKS
COMPILES = ""  # the backend of torch.compile by which calls over ranks are compiled, without a break of their graph
GROUP: Any = None  # group of the plans; None: all processes
DEVICE = torch.device("cpu")  # device of this process's tensors


@dataclass(frozen=True)
class Problem:
    """A call of the whole. lengths: of packed documents, or of the one sequence of a batch; (queries, keys) each."""

    lengths: tuple[tuple[int, int], ...] = ((37, 37),)
    batch: int | None = 2  # None: packed
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (8, 8)
    mask: str = "causal"
    window: tuple[int, int] | Window = (-1, -1)
    qkv_format: str = ""
    score: str = ""  # a mod of `score_mods`
    sees: str = ""  # a mod of `mask_mods`
    blocks: str = ""  # a block mask of `block_mask_of`
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def plan_arguments(self) -> dict[str, Any]:
        sizes: dict[str, Any] = {"documents": self.lengths} if self.batch is None else {"length": self.lengths[0]}
        return sizes | {"attn_mask_type": self.mask, "window_size": self.window, "block_mask": block_mask_of(self)}


def by_table(score: Any, b: Any, h: Any, i: Any, j: Any, table: Any) -> Any:
    return score * table[h] + 0.01 * b * i - 0.02 * j * h


def by_place(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return score + torch.sin(i * 0.7 - j * 0.3 + h + b)


def some(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (i + 2 * j + h + b) % 5 != 1


def near_or_first(b: Any, h: Any, i: Any, j: Any) -> Any:
    return ((i - j).abs() < 5 + 3 * h) | (j < 3 + 2 * b)


def far(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (j < 7) | (j > i + 30)


BLOCK_MODS: dict[str, Callable[..., Any]] = {"near": near_or_first, "far": far}


def packed_tree(tokens: int) -> Any:
    """Returns the mask of a prompt with two answers, the second with two continuations, in a row of so many tokens."""
    parents = torch.tensor([-1, 0, 0, 2, 2], device=DEVICE)
    bounds = torch.tensor([0, 3, 4, 6, 7, 8], device=DEVICE) * tokens // 8
    return flexattn.mods.tree(parents, bounds[:-1], bounds[1:], tokens)


@functools.cache
def _block_mask(name: str, sizes: tuple[int | None, int | None, int, int], block_size: int) -> Any:
    name, _, change = name.partition(" ")
    mod = packed_tree(sizes[3]) if name == "tree" else BLOCK_MODS[name]
    mask = flexattn.create_block_mask(mod, *sizes, device=DEVICE.type, BLOCK_SIZE=block_size)
    if change == "other":  # lists that contradict the mod: blocks that are hidden, or visible in full
        places = torch.meshgrid(
            *(torch.arange(n, device=DEVICE) for n in (*mask.kv_num_blocks.shape, mask.kv_indices.shape[-1])), indexing="ij"
        )
        kinds = (3 * places[2] + 5 * places[3] + places[1] + places[0]).remainder(4)
        lists = (*ordered(kinds == 1), *ordered(kinds > 2))
        mask = type(mask).from_kv_blocks(*lists, (block_size, block_size), mask.mask_mod, seq_lengths=sizes[2:])
    return mask


def block_mask_of(problem: Problem) -> Any:
    """Returns the block mask of a problem for its heads and its batch or documents; None if it has none."""
    if not problem.blocks:
        return None
    lengths = [max(side) for side in zip(*problem.lengths, strict=True)]
    rows = len(problem.lengths) if problem.batch is None else problem.batch
    mask_heads = None if "all heads" in problem.blocks else problem.heads[0]
    rows = None if "all heads" in problem.blocks else rows
    block_size = 32 if "fp8_recipe" in problem.options else 16  # in FP8 the kernels read keys 32 at a time
    return _block_mask(problem.blocks.replace(" all heads", ""), (rows, mask_heads, *lengths), block_size)


SCORE_MODS: dict[str, Callable[..., Any]] = {"table": by_table, "place": by_place}
MASK_MODS: dict[str, Callable[..., Any]] = {"some": some}


def tensors_of(problem: Problem, dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns q, k, v of the whole in its format, and the tensors that all ranks share; always the same numbers."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)

    (heads, heads_kv), (dim, dim_v) = problem.heads, problem.dims
    total_q, total_kv = (sum(lengths) for lengths in zip(*problem.lengths, strict=True))
    shape = () if problem.batch is None else (problem.batch,)
    found = {
        "q": draw(*shape, total_q, heads, dim),
        "k": draw(*shape, total_kv, heads_kv, dim),
        "v": draw(*shape, total_kv, heads_kv, dim_v),
    }
    if problem.qkv_format:
        found = {name: as_format(t, problem.qkv_format) for name, t in found.items()}
    batch = problem.batch or len(problem.lengths)
    options = problem.options
    if options.get("softmax_type") == "learnable":
        found["softmax_offset"] = draw(heads)
    if "bias" in options.get("bias_type", ""):
        found["bias"] = (
            draw(1, heads, total_q, total_kv) if options["bias_type"] == "post_scale_bias" else draw(batch, 1, 1, total_kv)
        )
    if options.get("bias_type") == "alibi" and heads % 2:
        found["alibi_slopes"] = draw(batch, heads).abs().float()
    if problem.score == "table":
        found["table"] = draw(heads)
    return found


def as_format(t: Tensor, fmt: str) -> Tensor:
    """Returns a contiguous tensor in the format, of one in bshd, or the reverse."""
    return (t.transpose(0, 1) if fmt == "sbhd" else t.transpose(1, 2) if fmt == "bhsd" else t).contiguous()


def plan_of(problem: Problem, layout: str | None) -> Plan:
    """Returns the plan of a problem. Documents are dealt in chunks if the other layouts would hold few tokens."""
    plan = distributed.plan(GROUP or dist.group.WORLD, layout=layout, **problem.plan_arguments)
    others = chunks.contiguous(plan.length, plan.ranks), chunks.zigzag(plan.length, plan.ranks)
    if layout != "dealt" or plan.q_runs not in others:
        return plan
    q_runs = chunks.dealt(plan.length, plan.ranks, plan.mask.area, plan.mask.needs)
    same = plan.mask.lengths_q == plan.mask.lengths_kv
    return dataclasses.replace(plan, q_runs=q_runs, kv_runs=q_runs if same else plan.kv_runs)


def arguments_of(problem: Problem, tensors: dict[str, Tensor], plan: Plan | None) -> dict[str, Any]:
    """Returns the arguments of either attention after q, k and v."""
    shared = {name: t for name, t in tensors.items() if name not in ("q", "k", "v", "table")}
    mods: dict[str, Any] = {"score_mod": SCORE_MODS.get(problem.score), "mask_mod": MASK_MODS.get(problem.sees)}
    if "table" in tensors:
        mods["score_mod_tensors"] = {"table": tensors["table"]}
    format_argument = {"qkv_format": problem.qkv_format} if problem.qkv_format else {}
    options = {name: value.to(DEVICE) if isinstance(value, Tensor) else value for name, value in problem.options.items()}
    found = options | shared | mods | format_argument | {"return_lse": True, "return_max_logit": True}
    if tensors["q"].dtype is torch.float64:
        found.pop("fp8_recipe", None)
    if plan is not None:
        return found
    found |= {"attn_mask_type": problem.mask, "window_size": problem.window, "block_mask": block_mask_of(problem)}
    if problem.batch is None:
        found |= {"qkv_format": "thd", "attn_mask_type": "padding" if problem.mask == "no_mask" else f"padding_{problem.mask}"}
        for side, lengths in zip(("q", "kv"), zip(*problem.lengths, strict=True), strict=True):
            found[f"cu_seqlens_{side}"] = torch.tensor([0, *lengths], device=DEVICE).cumsum(0, dtype=torch.int32)
            found[f"max_seqlen_{side}"] = max(1, *lengths)
    return found


def backend_of(problem: Problem) -> str | None:
    """Returns the backend for narrow dtypes. In FP8 it is explicit, because each backend rounds differently."""
    return os.environ.get("RANKS_BACKEND", "eager" if "fp8_recipe" in problem.options else None)


def results(
    problem: Problem, tensors: dict[str, Tensor], dtype: torch.dtype, plan: Plan | None, strategy: str = ""
) -> dict[str, Tensor]:
    """Returns out, lse, max_logit and the gradients of a call: of the whole, or of this rank's part of the same losses."""
    leaves = {name: t.detach().clone() for name, t in tensors.items()}
    if plan is not None:
        dim = {"sbhd": 0, "bhsd": 2}.get(problem.qkv_format)
        for name in "qkv":
            leaves[name] = distributed.shard(plan, leaves[name], dim=dim, keys=name != "q")
    for name, t in leaves.items():
        t.requires_grad_(name != "alibi_slopes")
    given = arguments_of(problem, leaves, plan)
    qkv = [leaves[name] for name in "qkv"]
    backend = "eager" if dtype is torch.float64 else backend_of(problem)
    if plan is None:
        out, lse, max_logit = flexattn.attention(*qkv, **given, backend=backend)
    else:
        attend: Any = distributed.attention
        if COMPILES:
            torch._dynamo.reset()  # another problem, another graph
            attend = torch.compile(attend, fullgraph=True, backend=COMPILES)
        out, lse, max_logit = attend(*qkv, plan=plan, strategy=strategy, **given, backend=backend)
    (out.double().sin().sum() + lse.double().where(lse.isfinite(), 0.0).cos().sum()).backward()
    if plan is not None:
        for name, t in leaves.items():
            if name not in "qkv" and t.grad is not None:
                dist.all_reduce(t.grad)  # each rank has a part
    gradients = {f"d{name}": t.grad for name, t in leaves.items() if t.grad is not None}
    return {"out": out.detach(), "lse": lse.detach(), "max_logit": max_logit, **gradients}


def part_of(problem: Problem, whole: dict[str, Tensor], plan: Plan) -> dict[str, Tensor]:
    """Returns this rank's tokens of the undivided results, and the gradients of shared tensors."""
    dim = {"sbhd": 0, "bhsd": 2}.get(problem.qkv_format)
    found = dict(whole)
    for name in ("out", "dq", "dk", "dv"):
        found[name] = distributed.shard(plan, whole[name], dim=dim, keys=name in ("dk", "dv"))
    found["lse"] = distributed.shard(plan, whole["lse"], dim=-1)
    return found


def way_of(way: str) -> str:
    """Returns the strategy of a way, and makes keys arrive in its form: in slices, or packed as for ranks of several hosts."""
    strategy, _, how = way.partition(" ")
    slices.SLICE_BYTES, slices.SLICE_PRODUCTS = (1, 0.0) if how == "sliced" else SLICES
    exchange.MOST_RANKS = 0 if how == "packed" else MOST_RANKS
    gather._work.cache_clear()
    gather._slices.cache_clear()
    call_cache.clear_cache()  # kept calls have the lists of both
    return strategy


def compare(problem: Problem, layouts: Sequence[str | None], ways: Sequence[str], dtype: torch.dtype = torch.float64) -> None:
    """Asserts that each strategy in each layout returns the results of one process."""
    given = tensors_of(problem, dtype)
    wide = results(problem, {name: t if name == "alibi_slopes" else t.double() for name, t in given.items()}, torch.float64, None)
    narrow = wide if dtype is torch.float64 else results(problem, given, dtype, None)
    for layout in layouts:
        plan = plan_of(problem, layout)
        expected, budget = part_of(problem, wide, plan), part_of(problem, narrow, plan)
        for way in ways:
            strategy = way_of(way)
            got = results(problem, given, dtype, plan, strategy)
            assert got.keys() == expected.keys(), (got.keys(), expected.keys())
            for name, t in got.items():
                label = f"{name} of {way} in {plan.layout} on {plan.ranks}: {problem}"
                if dtype is torch.float64:
                    torch.testing.assert_close(t, expected[name], rtol=0.0, atol=EXACT, msg=lambda text, at=label: f"{at}: {text}")
                else:
                    check_close(label, t, expected[name], budget[name], factor=GRADIENT_FACTOR)


def compare_eight(problem: Problem, layout: str | None, ways: Sequence[str]) -> None:
    """Asserts that FP8 over ranks returns the results of one process.

    A ring merges weights that are rounded relative to its step, and the last bit of a gradient decides its rounding. Their error
    relative to one process may therefore equal the error of one process relative to fp64. If all keys of a query are in one call,
    out is bitwise identical on eager, except for a few numbers whose weights round by a score's last bit. Kernels round weights
    relative to the largest so far, in blocks that start at a call's first key.
    """
    recipe, given = problem.options["fp8_recipe"], tensors_of(problem, torch.bfloat16)
    wide = results(problem, {name: t.double() for name, t in given.items()}, torch.float64, None)
    one = results(problem, given, torch.bfloat16, None)
    if recipe.bf16_backward:  # whose backward over ranks begins from out and lse in FP8, as kernels do, and eager's does not
        leaves = {name: t.clone().requires_grad_() for name, t in given.items()}
        arguments = arguments_of(problem, leaves, None)
        for name in ("fp8_recipe", "return_lse", "return_max_logit"):
            del arguments[name]
        out, lse = (one[name].clone().requires_grad_() for name in ("out", "lse"))
        (out.double().sin().sum() + lse.double().where(lse.isfinite(), 0.0).cos().sum()).backward()
        seeds = out.grad, *(leaves[name] for name in "qkv"), out, lse
        found = flexattn.attention_backward(*seeds, dlse=lse.grad, **arguments, backend=backend_of(problem))  # type: ignore[arg-type]
        assert found.dsoftmax_offset is not None
        sink_gradient = {"dsoftmax_offset": found.dsoftmax_offset}
        one |= sink_gradient | {f"d{name}": t for name, t in zip("qkv", found, strict=False)}
    plan = plan_of(problem, layout)
    exact, expected = part_of(problem, wide, plan), part_of(problem, one, plan)
    has_bits = backend_of(problem) == "eager"
    for way in ways:
        strategy = way_of(way)
        got = results(problem, given, torch.bfloat16, plan, strategy)
        assert got.keys() == exact.keys()
        for name, t in got.items():
            label = f"{name} of {way} in {plan.layout} on {plan.ranks}: {problem}"
            assert t.dtype == expected[name].dtype, label
            if name == "out" and has_bits and "ring" not in strategy and t.numel():
                others = (t != expected[name]).float().mean()
                assert others <= OTHER_BITS, (label, others)
            finite = exact[name].isfinite()
            assert torch.equal(t.isfinite(), finite), label
            if finite.any():
                apart, budget = ((a.double() - b.double())[finite] for a, b in ((t, expected[name]), (expected[name], exact[name])))
                assert apart.square().mean() <= budget.square().mean() + 1e-12, (
                    label,
                    apart.square().mean(),
                    budget.square().mean(),
                )


DOCUMENTS = tuple((n, n) for n in (5, 0, 20, 1, 11))

DROPOUT = {"dropout_p": 0.3, "rng_state": torch.tensor([2**40 + 17, 2**33 + 5])}

FEATURES = {
    "causal": Problem(),
    "no mask": Problem(mask="no_mask", dims=(8, 4), qkv_format="sbhd"),
    "a causal window": Problem(window=(6, -1), qkv_format="bhsd"),
    "a window on both sides": Problem(mask="no_mask", window=(3, 4)),
    "a window that ends before the diagonal": Problem(window=Window(20, -7)),
    "a window that begins behind it": Problem(((30, 37),), mask="no_mask", window=Window(-3, None), options={"bias_type": "alibi"}),
    "fewer queries than keys": Problem(((19, 37),), mask="causal_bottom_right", window=(9, -1)),
    "more queries than keys": Problem(((37, 19),), mask="causal_bottom_right"),
    "more queries than keys, from the first": Problem(((37, 19),), window=(5, -1)),
    "an odd number of heads": Problem(heads=(5, 1), options={"bias_type": "alibi"}),
    "a sink and ALiBi with four key heads": Problem(heads=(8, 4), options={"softmax_type": "learnable", "bias_type": "alibi"}),
    "key heads that do not divide": Problem(heads=(6, 3), options={"softmax_scale": 0.2}),
    "a sink and a softcap": Problem(options={"softmax_type": "learnable", "softcap": 2.0}),
    "a sink for queries that see nothing": Problem(((37, 19),), mask="causal_bottom_right", options={"softmax_type": "learnable"}),
    "one in the denominator": Problem(DOCUMENTS, None, options={"softmax_type": "off-by-one"}),
    "ALiBi from both sides": Problem(mask="no_mask", options={"bias_type": "alibi"}),
    "a bias for each head": Problem(options={"bias_type": "post_scale_bias"}),
    "a bias for all heads": Problem(mask="no_mask", options={"bias_type": "pre_scale_bias"}),
    "mods": Problem(score="table", sees="some"),
    "documents": Problem(DOCUMENTS, None, options={"deterministic": True}),
    "documents with keys of other lengths": Problem(((5, 7), (0, 3), (9, 2), (4, 4), (3, 0)), None, mask="causal_bottom_right"),
    "documents with windows and ALiBi": Problem(
        DOCUMENTS, None, (5, 1), mask="no_mask", window=(3, 2), options={"bias_type": "alibi"}
    ),
    "documents with mods and a sink": Problem(DOCUMENTS, None, score="table", sees="some", options={"softmax_type": "learnable"}),
    "documents without a mask": Problem(DOCUMENTS, None, mask="no_mask", score="place"),
    "dropout": Problem(options=DROPOUT),
    "dropout, parts in eights": Problem(((64, 64),), options=DROPOUT),
    "dropout with a bias for each head": Problem(mask="no_mask", window=(9, 4), options=DROPOUT | {"bias_type": "post_scale_bias"}),
    "dropout of documents with mods and a sink": Problem(
        DOCUMENTS, None, (5, 1), score="table", options=DROPOUT | {"softmax_type": "learnable"}
    ),
    "blocks of each head": Problem(mask="no_mask", blocks="near"),
    "blocks, on ranks whole, that are not the mod's": Problem(((128, 128),), mask="no_mask", blocks="near other", score="place"),
    "blocks far apart, under a window": Problem(((96, 96),), blocks="far all heads", window=(60, -1)),
    "blocks of documents": Problem(
        ((5, 5), (0, 0), (50, 50), (1, 1), (23, 23)),
        None,
        mask="no_mask",
        blocks="near other",
        options={"softmax_type": "learnable"},
    ),
    "blocks of all documents, with a mask, ALiBi and dropout": Problem(
        ((40, 40), (7, 7), (20, 35)), None, (6, 3), blocks="far all heads", options=DROPOUT | {"bias_type": "alibi"}
    ),
    "blocks of a packed tree": Problem(((90, 90),), batch=1, mask="no_mask", blocks="tree all heads"),
    "fewer tokens than ranks": Problem(((1, 1),), batch=1),
    "no tokens": Problem(((0, 0),)),
    "no tokens in documents": Problem(((0, 0), (0, 0)), None),
}


def eight(problem: Problem, **recipe: Any) -> Problem:
    return dataclasses.replace(problem, options=problem.options | {"fp8_recipe": flexattn.fp8.Recipe(**recipe)})


EIGHT_BITS = {
    "a scale for each head": eight(FEATURES["causal"]),
    "one scale, and two formats": eight(FEATURES["no mask"], fp8_format="HYBRID", granularity="tensor", margin=1),
    "scales of documents": eight(FEATURES["documents with mods and a sink"], granularity="batch_head"),
    "rotation": eight(Problem(heads=(6, 3), dims=(24, 8), window=(9, -1)), rotation=True),
    "a backward in 16 bits": eight(FEATURES["a sink and a softcap"], granularity="tensor", bf16_backward=True),
    "scales of blocks": eight(Problem(((512, 512),), batch=1), granularity="block", block_rows=128),
    "scales of blocks, by heads": eight(
        Problem(((130, 130), (0, 0), (70, 200)), None, mask="no_mask"), granularity="block", block_rows=64
    ),
    "dropout in FP8": eight(FEATURES["dropout of documents with mods and a sink"]),
    "no tokens in FP8": eight(FEATURES["no tokens in documents"], granularity="batch_head"),
}


def grown(problem: Problem, times: int = 16) -> Problem:
    """Returns the problem with longer sequences and wider heads, for compiled kernels."""
    if isinstance(problem.window, Window):
        window: Any = Window(*(n if n is None else n * times for n in problem.window))
    else:
        window = tuple(n * times if n > 0 else n for n in problem.window)
    lengths = tuple((len_q * times, len_kv * times) for len_q, len_kv in problem.lengths)
    dims = tuple(8 * dim for dim in problem.dims)
    return dataclasses.replace(problem, lengths=lengths, window=window, dims=dims)


def draw_problem(seed: int) -> Problem:
    """Returns a random problem: lengths 0 and 1, windows, documents, heads, and score modifications."""
    rng = random.Random(seed)
    is_packed = rng.random() < 0.6

    def length() -> int:
        return rng.choice((0, 1, 1, 2, rng.randint(3, 12), rng.randint(3, 40)))

    pairs = [(n, n if same else length()) for same in [rng.random() < 0.7] for n in [length() for _ in range(rng.randint(1, 7))]]
    heads_kv = rng.choice((1, 2, 3, 4, 8))
    heads = heads_kv * rng.choice((1, 2, 3))
    while heads < 4:
        heads += heads_kv
    mask = rng.choice(("no_mask", "causal", "causal", "causal_bottom_right"))
    left, right = (rng.choice((-1, -1, 0, rng.randint(1, 20))) for _ in range(2))
    options: dict[str, Any] = rng.choice(
        (
            {},
            {},
            {"softmax_type": "learnable"},
            {"softmax_type": "off-by-one", "softcap": 1.5},
            {"bias_type": "alibi"},
            {"bias_type": "alibi", "softmax_type": "learnable"},
            {} if is_packed else {"bias_type": "post_scale_bias"},
            {} if is_packed else {"bias_type": "pre_scale_bias", "deterministic": True},
        )
    )
    problem = Problem(
        tuple(pairs if is_packed else pairs[:1]),
        None if is_packed else rng.randint(1, 3),
        (heads, heads_kv),
        (rng.choice((8, 16)), rng.choice((8, 4))),
        mask,
        (left, right if mask == "no_mask" else -1),
        "" if is_packed else rng.choice(("", "sbhd", "bhsd")),
        rng.choice(("", "", "table", "place")),
        rng.choice(("", "", "some")),
        options=options,
    )
    problem = dataclasses.replace(problem, options=options | DROPOUT) if rng.random() < 0.3 else problem
    blocks = rng.choice(("", "", "near", "far all heads", "near other", "far other"))
    return dataclasses.replace(problem, blocks=blocks, sees="") if blocks else problem


def compare_drawn(seeds: range, dtype: torch.dtype = torch.float64, way: str = "") -> None:
    for seed in seeds:
        rng = random.Random(seed)
        problem = draw_problem(seed)
        layout, strategy = rng.choice(LAYOUTS), way or rng.choice(WAYS)
        try:
            compare(problem, [layout], [strategy], dtype)
        except Exception as e:
            raise AssertionError(f"seed {seed}: {problem}") from e


def sampled(problem: Problem, number: int) -> tuple[list[str | None], list[str]]:
    """Returns one layout and two strategies, others for each number, so that all pairs come in turn."""
    return [LAYOUTS[number % 3]], [WAYS[number % 6], WAYS[(number + 1 + number // 6 % 5) % 6]]
