"""Cases of attention over ranks: `python -m tests.support.context_parallel_cases SUITE RANK RANKS FILE`.

They run over gloo on a CPU, or with RANKS_DEVICE=cuda over NCCL, each rank on a GPU of its own.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import functools
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import flexattn
from flexattn import distributed, fp8, ops
from flexattn.distributed import slices
from flexattn.distributed.plans import STRATEGIES
from flexattn.testing import check_close
from tests.support import context_parallel_calls as calls
from tests.support import context_parallel_graphs as graphs
from tests.support import lane_races, rank_guards, shared_memory
from tests.support.ranks import CAPTURED_PARTS, COMPILED_PARTS, EIGHT_BITS_PARTS

MOST_OF_ONE = 1.08  # of one process's root mean square error: dq of a part begins from an out that is rounded


def features() -> None:
    """Every feature under two strategies, and one of documents under all."""
    for number, problem in enumerate(calls.FEATURES.values()):
        calls.compare(problem, *calls.sampled(problem, number + dist.get_world_size()))
    calls.compare(calls.FEATURES["documents with mods and a sink"], [None], (*calls.WAYS, *calls.PACKED))
    calls.compare_drawn(range(3))
    in_eight_bits()


def all_features() -> None:
    """Every feature under every strategy in every layout, and the most used ones as packed sequences."""
    compare_features(lambda number: calls.LAYOUTS)


def all_strategies() -> None:
    """Every feature under every strategy, in one layout each, and the most used ones as packed sequences."""
    compare_features(lambda number: [calls.LAYOUTS[number % 3]])


def compare_features(layouts_of: Callable[[int], Sequence[str | None]]) -> None:
    for number, problem in enumerate(calls.FEATURES.values()):
        calls.compare(problem, layouts_of(number), calls.WAYS)
    for name in ("causal", "more queries than keys"):
        calls.compare(calls.FEATURES[name], [None], calls.PACKED)
    for number, (name, problem) in enumerate(calls.EIGHT_BITS.items()):
        whole = calls.LAYOUTS[:2]  # dealt chunks are of no whole blocks here
        layouts = layouts_of(number) if "blocks" not in name else [x for x in layouts_of(number) if x in whole] or whole[:1]
        for layout in layouts:
            calls.compare_eight(problem, layout, ["ulysses"] if "by heads" in name else calls.WAYS)


def by_shared_memory() -> None:
    """Exchanges through shared memory (files in this test) and the kernel that pulls rows."""
    shared_memory.share(dist.group.WORLD, calls.DEVICE)
    ways = ("gather", "halo", "ulysses")
    for number, problem in enumerate(calls.FEATURES.values()):
        calls.compare(problem, [calls.LAYOUTS[number // 3 % 3]], [ways[number % 3]])
    for name in ("causal", "more queries than keys", "documents with mods and a sink"):
        calls.compare(calls.FEATURES[name], [None], ways)
    for number, (name, problem) in enumerate(calls.EIGHT_BITS.items()):
        calls.compare_eight(problem, calls.LAYOUTS[number % 2], ["ulysses" if "by heads" in name else ways[number % 3]])
    assert shared_memory.BARRIERS["all"] > 100, shared_memory.BARRIERS


def in_eight_bits() -> None:
    """FP8 returns the results of one process under each strategy. Scales, states and an out in FP8 are bitwise identical."""
    for number, (name, problem) in enumerate(calls.EIGHT_BITS.items()):
        ways = ["ulysses"] if "by heads" in name else [calls.WAYS[number % 6], calls.WAYS[(number + 3) % 6]]
        calls.compare_eight(problem, calls.LAYOUTS[number % 2], ways)
    delayed_scales()
    given_in_eight_bits()
    with pytest.raises(ValueError, match="granularity is 'block', and with strategy 'halo' a part begins at position"):
        calls.compare_eight(calls.EIGHT_BITS["scales of blocks, by heads"], "contiguous", ["halo"])


def delayed_scales() -> None:
    """All ranks together record the amax of one process. The scales that follow and out in FP8 are equal too."""
    recipe = fp8.Recipe(scaling="delayed", amax_history_len=2, out_dtype=torch.float8_e4m3fn)
    given = calls.tensors_of(calls.FEATURES["causal"], torch.bfloat16)
    plan = distributed.plan(dist.group.WORLD, length=37)
    states = [fp8.DelayedScaling(recipe, 4, 2).to(calls.DEVICE) for _ in range(2)]
    for step in range(3):
        found = []
        over_ranks = functools.partial(distributed.attention, plan=plan, strategy=STRATEGIES[step])
        for i, attend in enumerate((functools.partial(flexattn.attention, attn_mask_type="causal"), over_ranks)):
            leaves = [given[name] * (1 + step) for name in "qkv"]
            leaves = [(distributed.shard(plan, t) if i else t).clone().requires_grad_() for t in leaves]
            state = states[i]
            out = attend(*leaves, fp8_recipe=recipe, fp8_state=state, backend="eager")
            fp8.dequantize(out, recipe).float().sin().sum().backward()
            found.append((out.data.view(torch.uint8), out.descale, out.amax, *(t.grad for t in leaves)))
            state.update()
        one, ranks = found
        for (name, a), b in zip(states[0].named_buffers(), states[1].buffers(), strict=True):
            torch.testing.assert_close(a, b, rtol=0.0 if name[-2:] in ("_q", "_k", "_v") else 2**-7, atol=0.0)
        assert (distributed.shard(plan, one[0]) != ranks[0]).float().mean() <= calls.OTHER_BITS
        torch.testing.assert_close(one[1:3], ranks[1:3], rtol=2**-7, atol=0.0)  # a rounding of out in bfloat16
        exact = [(given[name] * (1 + step)).double().requires_grad_() for name in "qkv"]
        flexattn.attention(*exact, attn_mask_type="causal").sin().sum().backward()
        for a, b, leaf in zip(one[3:], ranks[3:], exact, strict=True):  # as near as FP8 is to fp64
            own = distributed.shard(plan, a)
            assert leaf.grad is not None
            assert (own - b).double().square().mean() <= (a.double() - leaf.grad).square().mean()


def given_in_eight_bits() -> None:
    """q, k and v that come in FP8 with the whole's scales give one process's bits, and out in FP8."""
    problem = calls.FEATURES["a causal window"]
    for granularity in ("tensor", "batch_head"):
        recipe = fp8.Recipe(granularity=granularity)
        tensors = [fp8.quantize(t, recipe, qkv_format="bhsd") for t in list(calls.tensors_of(problem, torch.bfloat16).values())[:3]]
        given = {f"descale_{name}": t.descale for name, t in zip("qkv", tensors, strict=True)}
        given |= {"qkv_format": "bhsd", "return_lse": True, "backend": "eager"}
        plan = distributed.plan(dist.group.WORLD, **problem.plan_arguments)
        out, _ = flexattn.attention(*(t.data for t in tensors), attn_mask_type="causal", window_size=(6, -1), **given)
        own = [distributed.shard(plan, t.data.view(torch.uint8), dim=2).view(t.data.dtype) for t in tensors]
        for strategy in ("gather", "halo", "ulysses"):
            got, _ = distributed.attention(*own, plan=plan, strategy=strategy, **given)
            assert got.dtype is torch.bfloat16
            assert (got != distributed.shard(plan, out, dim=2)).float().mean() <= calls.OTHER_BITS


def in_hosts() -> None:
    """Two hosts of two ranks: heads for tokens inside, a ring between; and other strategies over the same mesh."""
    calls.GROUP = init_device_mesh(calls.DEVICE.type, (2, 2), mesh_dim_names=("host", "gpu"))
    for number, problem in enumerate(calls.FEATURES.values()):
        calls.compare(problem, [calls.LAYOUTS[number % 3]], ["ulysses+ring"])
    for name in ("causal", "documents with mods and a sink"):
        calls.compare(calls.FEATURES[name], calls.LAYOUTS, ["ulysses+ring", "auto"])
    calls.compare_drawn(range(500, 530), way="ulysses+ring")


def drawn() -> None:
    first = 100 * dist.get_world_size()
    calls.compare_drawn(range(first, first + 100))


def some_drawn() -> None:
    first = 100 * dist.get_world_size()
    calls.compare_drawn(range(first, first + 40))


def in_float32() -> None:
    """The errors are at most those of one process in float32."""
    for name in ("causal", "a sink and a softcap", "a causal window", "documents", "documents with mods and a sink"):
        calls.compare(calls.FEATURES[name], [None], calls.WAYS, torch.float32)
    calls.compare_drawn(range(400, 420), torch.float32)


def sums_in_float32() -> None:
    """In bfloat16 sums over ranks have the error of one process, because partial gradients and outs are not rounded."""
    for mask, ways in (("causal", calls.WAYS), ("no_mask", ("ring", "gather"))):
        problem = calls.Problem(((256, 256),), 1, (4, 2), (32, 32), mask=mask)
        given = calls.tensors_of(problem, torch.bfloat16)
        wide = calls.results(problem, {name: t.double() for name, t in given.items()}, torch.float64, None)
        one = calls.results(problem, given, torch.bfloat16, None)
        plan = distributed.plan(dist.group.WORLD, **problem.plan_arguments)
        exact, expected = calls.part_of(problem, wide, plan), calls.part_of(problem, one, plan)
        for way in ways:
            got = calls.results(problem, given, torch.bfloat16, plan, calls.way_of(way))
            for name in ("out", "dq", "dk", "dv"):
                squares = torch.stack([(t[name].double() - exact[name]).square().sum() for t in (got, expected)])
                dist.all_reduce(squares)
                ratio = float((squares[0] / squares[1]).sqrt())
                assert ratio <= MOST_OF_ONE, (name, way, mask, ratio)


def decoding() -> None:
    """One query, or the few newest ones, over keys on all ranks: the results equal one process's and are the same on each rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(5)
    for newest, softmax_type in ((1, "vanilla"), (3, "learnable"), (3, "off-by-one")):
        q, k, v = (_randn(2, s, h, 8, generator=generator, dtype=torch.float64) for s, h in ((newest, 4), (23, 2), (23, 2)))
        offset = _randn(4, generator=generator, dtype=torch.float64) if softmax_type == "learnable" else None
        sink: dict[str, Any] = {"softmax_type": softmax_type, "softmax_offset": offset, "return_lse": True, "backend": "eager"}
        expected = flexattn.attention(q, k, v, attn_mask_type="causal_bottom_right", **sink)
        first = [0, *(19 * i // (ranks - 1) for i in range(ranks))]  # the first rank has no keys, the last one the newest
        own = slice(first[rank], 23 if rank == ranks - 1 else first[rank + 1])
        mask = "causal_bottom_right" if rank == ranks - 1 else "no_mask"
        got = distributed.attention_over_ranks(q, k[:, own], v[:, own], group=dist.group.WORLD, attn_mask_type=mask, **sink)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0.0, atol=calls.EXACT)
            everyones = [torch.empty_like(a) for _ in range(ranks)]
            dist.all_gather(everyones, a)
            assert all(torch.equal(a, other) for other in everyones)
    used = {"attn_mask_type": "padding", "seqused_q": torch.tensor([1, 3], dtype=torch.int32, device=calls.DEVICE)}
    got = distributed.attention_over_ranks(q, k[:, own], v[:, own], group=dist.group.WORLD, **used, **sink)
    torch.testing.assert_close(got, flexattn.attention(q, k, v, **used, **sink), rtol=0.0, atol=calls.EXACT)
    packed = flexattn.attention(q[0], k[0], v[0], **_packed(newest), **sink)
    part = flexattn.attention(q[0], k[0, own], v[0, own], **_packed(newest, k[0, own].shape[0]), return_lse=True, backend="eager")
    merged = distributed.merge_over_ranks(
        *part,
        group=init_device_mesh(calls.DEVICE.type, (ranks,)),
        qkv_format="thd",
        softmax_offset=torch.zeros(4, device=calls.DEVICE),
    )
    torch.testing.assert_close(merged, packed, rtol=0.0, atol=calls.EXACT)


def pages() -> None:
    """Caches in pages that are divided between ranks return the results of one process."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(6)
    q, k, v = (_randn(*shape, generator=generator) for shape in ((2, 1, 4, 8), (12, 4, 2, 8), (12, 4, 2, 8)))
    table = torch.randperm(12, generator=generator).to(calls.DEVICE, torch.int32).view(2, 6)
    length, ends = (torch.tensor(n, dtype=torch.int32, device=calls.DEVICE) for n in ([24, 13], [0, 1, 2]))
    call: dict[str, Any] = {"attn_mask_type": "padding", "return_lse": True, "cu_seqlens_q": ends, "backend": "eager"}
    expected = flexattn.attention(q, k, v, page_table=table, seqused_kv=length, **call)
    first = 6 * rank // ranks
    columns = 6 * (rank + 1) // ranks - first
    used = (length - 4 * first).clamp(0, 4 * columns)
    own = table[:, first : first + columns].contiguous()
    got = distributed.attention_over_ranks(q, k, v, group=dist.group.WORLD, page_table=own, seqused_kv=used, **call)
    torch.testing.assert_close(got, expected)


def _randn(*shape: int, **options: Any) -> Tensor:
    return torch.randn(*shape, **options).to(calls.DEVICE)


def _packed(queries: int, keys: int = 23) -> dict[str, Any]:
    ends = {
        f"cu_seqlens_{side}": torch.tensor([0, n], dtype=torch.int32, device=calls.DEVICE)
        for side, n in (("q", queries), ("kv", keys))
    }
    return {"qkv_format": "thd", "attn_mask_type": "padding", "max_seqlen_q": queries, "max_seqlen_kv": max(keys, 1), **ends}


def layouts() -> None:
    """Unsharded tensors equal the originals, and positions are those within documents."""
    group = dist.group.WORLD
    for layout in calls.LAYOUTS:
        plan = distributed.plan(group, documents=[7, 0, 30, 1, 12], layout=layout)
        tokens, places = (t.to(calls.DEVICE) for t in (torch.arange(50), torch.cat([torch.arange(n) for n in (7, 0, 30, 1, 12)])))
        own, own_places = distributed.shard(plan, tokens, places)
        assert torch.equal(distributed.positions(plan, device=calls.DEVICE), own_places)
        assert torch.equal(distributed.unshard(plan, own), tokens)
        plan = distributed.plan(group, length=(21, 34), layout=layout)
        x = _randn(2, 34, 3, generator=torch.Generator().manual_seed(0))
        assert torch.equal(distributed.unshard(plan, distributed.shard(plan, x, keys=True), keys=True), x)
        assert pickle.loads(pickle.dumps(plan)).on(group) == plan


def one_plan_for_layers_with_and_without_a_window() -> None:
    group, problem = dist.group.WORLD, calls.FEATURES["a causal window"]
    plan = distributed.plan(group, length=37)
    windowed = distributed.plan(group, length=37, window_size=(6, -1), layout="zigzag")
    given = {name: t for name, t in calls.tensors_of(problem, torch.float64).items() if name in "qkv"}
    q, k, v = (distributed.shard(plan, calls.as_format(t, "bhsd")) for t in given.values())
    out = distributed.attention(q, k, v, plan=plan, attn_mask_type="causal", window_size=(6, -1))
    assert torch.equal(out, distributed.attention(q, k, v, plan=windowed))
    assert not torch.equal(out, distributed.attention(q, k, v, plan=plan))


def wrapped() -> None:
    """Gradients under checkpointing and torch.compile equal those of a plain call. Under autocast, out has its dtype."""
    plan = distributed.plan(dist.group.WORLD, documents=[20, 17])
    whole = _randn(3, 37, 4, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64).unbind()
    own = distributed.shard(plan, *whole)
    assert isinstance(own, tuple)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return distributed.attention(2 * q, k, v, plan=plan).sin()  # type: ignore[no-any-return]

    kinds = {
        "plain": attend,
        "checkpointed": lambda *qkv: checkpoint(attend, *qkv, use_reentrant=False),
        "compiled": torch.compile(attend, backend="eager", fullgraph=True),
    }
    found = {}
    for name, function in kinds.items():
        leaves = [t.clone().requires_grad_() for t in own]
        function(*leaves).sum().backward()
        found[name] = [t.grad for t in leaves]
    for name in kinds:
        torch.testing.assert_close(found[name], found["plain"], rtol=0.0, atol=0.0)
    leaves = [t.float().requires_grad_() for t in own]
    with torch.autocast(calls.DEVICE.type, torch.bfloat16):
        out = distributed.attention(*leaves, plan=plan)
    assert out.dtype is torch.bfloat16
    out.sum().backward()
    assert all(t.grad is not None and t.grad.dtype is torch.float32 for t in leaves)


def compiled() -> None:
    """Graphs without a break return the results of one process, and one graph runs every plan with as many tokens."""
    calls.COMPILES = "aot_eager"
    names = ("documents with mods and a sink", "dropout with a bias for each head", "blocks of documents")
    for number, name in enumerate(names):
        calls.compare(calls.FEATURES[name], [None], [calls.WAYS[number]])
    calls.compare_eight(calls.EIGHT_BITS["scales of documents"], None, ["ulysses"])
    one_graph_for_all_plans()


def all_compiled() -> None:
    """Every feature in a graph without a break."""
    calls.COMPILES = "aot_eager"
    for number, problem in enumerate(calls.FEATURES.values()):
        calls.compare(problem, [None], [calls.WAYS[number % 4], calls.WAYS[(number + 1) % 4]])
    for name, problem in calls.EIGHT_BITS.items():
        calls.compare_eight(problem, None, ["ulysses" if "by heads" in name else "halo"])
    calls.compare_drawn(range(700, 720))


def one_graph_for_all_plans() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    whole = _randn(3, 40, 4, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64).unbind()
    state = calls.DROPOUT["rng_state"].to(calls.DEVICE)

    def attend(q: Tensor, k: Tensor, v: Tensor, plan: distributed.Plan) -> Tensor:
        return distributed.attention(2 * q, k, v, plan=plan, dropout_p=0.2, rng_state=state).sin()  # type: ignore[no-any-return]

    in_graph = torch.compile(attend, fullgraph=True, backend=counter)
    for lengths in ([20, 20], [3, 30, 7], [40], [1, 0, 39]):
        found = []
        for function in (attend, in_graph):
            plan = distributed.plan(dist.group.WORLD, documents=lengths, layout="zigzag")
            leaves = [t.clone().requires_grad_() for t in distributed.shard(plan, *whole)]
            out = function(*leaves, plan)
            del plan  # a backward that is to come keeps it
            out.sum().backward()
            found.append([out.detach(), *(t.grad for t in leaves)])
        for eager, graph in zip(*found, strict=True):
            torch.testing.assert_close(graph, eager, rtol=0.0, atol=0.0)
    assert counter.frame_count == 1
    plan = distributed.plan(dist.group.WORLD, length=40)
    q = torch.zeros(1, 20, 4, 16, dtype=torch.bfloat16, device=calls.DEVICE)
    mask, recipe = flexattn.create_block_mask(calls.far, None, None, 40, 40, calls.DEVICE.type, 16), fp8.Recipe(scaling="delayed")
    refused: dict[str, dict[str, Any]] = {
        "block_mask is given to a call under torch.compile": {"block_mask": mask},
        "fp8_state is given under torch.compile": {
            "fp8_recipe": recipe,
            "fp8_state": fp8.DelayedScaling(recipe, 4).to(calls.DEVICE),
        },
        "out_dtype is torch.float8_e5m2 under torch.compile": {"fp8_recipe": fp8.Recipe(out_dtype=torch.float8_e5m2)},
        "causal is given to flexattn.distributed.attention": {"causal": True},
    }
    for text, options in refused.items():
        with pytest.raises(Exception, match=text):
            torch.compile(distributed.attention, fullgraph=True, backend="eager")(q, q, q, plan=plan, **options)


def dropout_without_an_rng_state() -> None:
    """All ranks drop the same weights as one process with the state that rank 0 draws."""
    problem = calls.FEATURES["dropout"]
    plan = distributed.plan(dist.group.WORLD, **problem.plan_arguments)
    q, k, v = (calls.tensors_of(problem, torch.float64)[name] for name in "qkv")
    torch.manual_seed(0)
    state = ops.new_rng_state(q.device)
    whole = flexattn.attention(q, k, v, attn_mask_type="causal", dropout_p=0.3, rng_state=state, backend="eager")
    torch.manual_seed(dist.get_rank())
    own = (distributed.shard(plan, t) for t in (q, k, v))
    out = distributed.attention(*own, plan=plan, dropout_p=0.3, backend="eager")
    torch.testing.assert_close(out, distributed.shard(plan, whole), rtol=0.0, atol=calls.EXACT)


def repeated() -> None:
    """Runs are equal to the bit, in each strategy."""
    problem = calls.FEATURES["documents"]
    plan = distributed.plan(dist.group.WORLD, **problem.plan_arguments)
    for strategy in STRATEGIES[:4]:
        first, *others = (
            calls.results(problem, calls.tensors_of(problem, torch.float32), torch.float32, plan, strategy) for _ in range(3)
        )
        assert all(torch.equal(first[name], other[name]) for other in others for name in first)


def checked() -> None:
    """Ranks that differ, and one that refuses its call, raise on every rank before anything is sent; later calls work."""
    rank, group = dist.get_rank(), dist.group.WORLD
    other = min(rank, 1)  # rank 0 is given one thing, and all others another one
    plans = distributed.plan(group, length=12), distributed.plan(group, length=12, window_size=(3, 0), layout="zigzag")
    plan, tokens = plans[0], sum(run.size for run in plans[0].q_runs[rank])
    q = _randn(1, tokens, 2, 8)
    wrong: dict[str, tuple[Any, str]] = {
        "differs among ranks in strategy: rank 0 has 'gather', rank 1 has 'ring'": (plan, ("gather", "ring")[other]),
        "differs among ranks in plan": (plans[other], "gather"),
    }
    for text, (given, strategy) in wrong.items():
        with pytest.raises(ValueError, match=text):
            distributed.attention(q, q, q, plan=given, strategy=strategy)
    with pytest.raises(ValueError, match="differs among ranks in gradients"):
        distributed.attention(q.clone().requires_grad_(rank == 0), q, q, plan=plan)
    masks = [flexattn.create_block_mask(mod, None, None, 12, 12, "cpu", 16) for mod in (calls.some, lambda b, h, i, j: j < 0)]
    with pytest.raises(ValueError, match="differs among ranks in plan"):
        distributed.attention(q, q, q, plan=plan, attn_mask_type="no_mask", block_mask=masks[other])
    half, recipes = q.bfloat16(), (fp8.Recipe(), fp8.Recipe(margin=1))
    with pytest.raises(ValueError, match="differs among ranks in FP8"):
        distributed.attention(half, half, half, plan=plan, fp8_recipe=recipes[other])
    text = f"q has {tokens - 1} tokens on rank 1" if rank == 1 else "raised an error on another rank: rank 1: ValueError: q has"
    with pytest.raises(ValueError, match=text):
        distributed.attention(q[:, int(rank == 1) :], q, q, plan=plan)
    same = _randn(1, 6, 2, 8)
    with pytest.raises(ValueError, match="attention_over_ranks differs among ranks in q"):
        distributed.attention_over_ranks(same[:, : 1 + other], same, same, group=group)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLEXATTN_PEER_MEMORY", ("auto", "never")[other])
        with pytest.raises(ValueError, match="differs among ranks in FLEXATTN_PEER_MEMORY: rank 0 has 'auto', rank 1 has 'never'"):
            distributed.attention(q, q, q, plan=plan)
    with pytest.raises(ValueError, match="alibi" if other else "raised an error on another rank"):
        distributed.attention_over_ranks(same, same, same, group=group, bias_type="alibi" if other else "no_bias")
    assert distributed.attention(q, q, q, plan=plan).shape == q.shape


def left_alone() -> None:
    """If a rank's neighbour does not take part, the rank raises after the group's timeout and names the operation."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=1))
    everyone = dist.new_group(timeout=datetime.timedelta(seconds=60))
    plan = distributed.plan(group, length=12)
    q = _randn(1, sum(run.size for run in plan.q_runs[plan.rank]), 2, 8)
    if dist.get_rank() == 0:
        text = rf"rank 0 of {plan.ranks} failed in the exchange of keys.*FLEXATTN_CHECK=1"
        with pytest.raises(RuntimeError, match=text):
            distributed.attention(q, q, q, plan=plan, strategy="gather")
    dist.barrier(everyone)


def others() -> None:
    """Everything that is no comparison of strategies."""
    for case in (
        decoding,
        pages,
        layouts,
        one_plan_for_layers_with_and_without_a_window,
        wrapped,
        repeated,
        dropout_without_an_rng_state,
    ):
        case()


class Layer(torch.nn.Module):
    """Attention whose projections tensor parallelism can divide by heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (torch.nn.Linear(32, heads * 8, bias=False) for heads in (4, 2, 2))
        self.out = torch.nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor, plan: distributed.Plan | None, more: dict[str, Any]) -> Tensor:
        q, k, v = (project(x).unflatten(-1, (-1, 8)) for project in (self.q, self.k, self.v))
        attended = flexattn.attention(q, k, v, **more) if plan is None else distributed.attention(q, k, v, plan=plan)
        return x + self.out(attended.flatten(-2))  # type: ignore[no-any-return]


def on_one_mesh() -> None:
    """FSDP2, tensor parallelism and context parallelism on one mesh of four processes: the gradients equal one process's."""
    mesh = init_device_mesh(calls.DEVICE.type, (2, 2), mesh_dim_names=("cp", "tp"))
    lengths = [5, 0, 20, 1, 11]
    plan = distributed.plan(mesh["cp"], documents=lengths)
    data = _randn(37, 32, generator=torch.Generator().manual_seed(2))
    torch.manual_seed(3)
    layers = torch.nn.ModuleList(Layer() for _ in range(2)).to(calls.DEVICE)
    state = {name: t.clone() for name, t in layers.state_dict().items()}
    ends = torch.tensor([0, *lengths], device=calls.DEVICE).cumsum(0, dtype=torch.int32)
    whole = {"qkv_format": "thd", "attn_mask_type": "padding_causal", "cu_seqlens_q": ends, "cu_seqlens_kv": ends}
    x = data
    for layer in layers:
        x = layer(x, None, whole)
    x.square().sum().backward()
    expected = {name: p.grad for name, p in layers.named_parameters()}

    split = torch.nn.ModuleList(Layer() for _ in range(2)).to(calls.DEVICE)
    split.load_state_dict(state)
    styles = {name: ColwiseParallel() for name in "qkv"} | {"out": RowwiseParallel()}
    for layer in split:
        parallelize_module(layer, mesh["tp"], styles)
        fully_shard(layer, mesh=mesh["cp"])
    x = distributed.shard(plan, data)
    for layer in split:
        x = layer(x, plan, {})
    (x.square().sum() * 2).backward()  # FSDP2 takes the mean over the two ranks that shard
    for name, p in split.named_parameters():
        assert isinstance(p.grad, DTensor)
        torch.testing.assert_close(p.grad.full_tensor(), expected[name], rtol=1e-4, atol=1e-4)


def sharded_dtensors() -> None:
    """Plain attention of DTensors that are sharded over the sequence keeps their sharding and returns the undivided results."""
    mesh = init_device_mesh(calls.DEVICE.type, (2, 2), mesh_dim_names=("cp", "tp"))
    for number, (queries, keys, kind) in enumerate(((7, 7, "causal"), (3, 6, "causal_bottom_right"), (1, 5, "no_mask"))):
        fmt = ("bshd", "sbhd", "bhsd")[number]
        problem = calls.Problem(((queries, keys),), qkv_format=fmt if number else "")
        whole = {name: t for name, t in calls.tensors_of(problem, torch.float64).items() if name in "qkv"}
        bias = _randn(1, 4, queries, keys, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        table = _randn(4, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
        where = calls.DEVICE.type
        blocks = flexattn.create_block_mask(calls.far, None, None, queries, keys, where, 16) if number == 1 else None
        found = []
        for spread in (False, True):
            places: list[Any] = [Shard(fmt.index("s")), Shard(fmt.index("h"))]
            leaves = [distribute_tensor(t, mesh, places) if spread else t.clone() for t in whole.values()]
            shared = [distribute_tensor(t, mesh, [Replicate()] * 2) if spread else t.clone() for t in (bias, table)]
            for leaf in (*leaves, *shared):
                leaf.requires_grad_()
            given = {"bias_type": "post_scale_bias", "bias": shared[0], "score_mod_tensors": [shared[1]], "return_lse": True}
            given["block_mask"] = blocks
            given |= {"attn_mask_type": kind, "qkv_format": fmt, "score_mod": calls.by_table, "backend": "eager"}
            results = flexattn.attention(*leaves, **given)
            if spread:
                assert [[*t.placements] for t in results] == [places, [Shard(2), Shard(1)]]
            out, lse = (t.full_tensor() if spread else t for t in results)
            (out.sin().sum() + lse.cos().sum()).backward()
            gradients = [leaf.grad for leaf in (*leaves, *shared)]
            found.append([out, lse, *(g.full_tensor() if isinstance(g, DTensor) else g for g in gradients)])
        for got, expected in zip(*found, strict=True):
            torch.testing.assert_close(got, expected, rtol=0.0, atol=calls.EXACT)
    tensors = [distribute_tensor(t, mesh, [Shard(1), Replicate()]) for t in _randn(3, 1, 4, 2, 8)]
    ends = torch.tensor([0, 3], dtype=torch.int32, device=calls.DEVICE)
    lengths = {"attn_mask_type": "padding", "cu_seqlens_q": ends, "cu_seqlens_kv": ends}
    results = flexattn.attention(*tensors, return_lse=True, **lengths)
    assert [*results[0].placements] == [Replicate()] * 2  # every rank computes an undivided result
    state = {"rng_state": calls.DROPOUT["rng_state"].to(calls.DEVICE), "return_lse": True, "return_max_logit": True}
    more: dict[str, Any] = calls.DROPOUT | state
    spread = flexattn.attention(*tensors, **more)
    assert [*spread[0].placements] == [Shard(1), Replicate()]
    for got, expected in zip(spread, flexattn.attention(*(t.full_tensor() for t in tensors), **more), strict=True):
        torch.testing.assert_close(got.full_tensor(), expected)
    out = flexattn.attention(*tensors, dropout_p=0.5).full_tensor()
    others = [torch.empty_like(out) for _ in range(4)]
    dist.all_gather(others, out)
    assert all(torch.equal(out, other) for other in others)
    with pytest.raises(ValueError, match="dropout_p is given with DTensors that are sharded over heads or the batch"):
        flexattn.attention(*(t.redistribute(mesh, [Shard(1), Shard(2)]) for t in tensors), dropout_p=0.5)


def faults() -> None:
    """Faults of a rank reach the others."""
    left_alone()
    os.environ["FLEXATTN_CHECK"] = "1"
    checked()


def on_triton() -> None:
    """Triton's kernels, interpreted: rows that a call has not, keys of others, the whole's statistics in a backward."""
    os.environ["RANKS_BACKEND"] = "triton"
    small = {
        name: calls.FEATURES[name]
        for name in (
            *("causal", "a sink and a softcap", "documents", "documents with mods and a sink"),
            *("dropout", "dropout with a bias for each head", "dropout of documents with mods and a sink"),
            *("blocks of each head", "blocks of documents"),
        )
    }
    for number, problem in enumerate(small.values()):
        dtype = (torch.bfloat16, torch.float16, torch.float32)[number % 3]
        calls.compare(problem, [None], [STRATEGIES[number % 4]], dtype)
    calls.compare_eight(calls.eight(calls.Problem(dims=(16, 16))), "contiguous", ["halo", "ring"])
    documents = calls.Problem(((64, 64), (7, 7), (40, 40)), None, dims=(16, 32), blocks="far all heads")
    calls.compare_eight(calls.eight(documents, granularity="batch_head", fp8_format="HYBRID"), "contiguous", ["ulysses"])
    blocks = calls.Problem(((128, 128),), batch=1, dims=(32, 16))
    calls.compare_eight(calls.eight(blocks, granularity="block", block_rows=64), "contiguous", ["gather"])


def compiled_kernels(part: int) -> None:
    """Kernels as a GPU runs them, in half precision: each feature under two strategies, and the most used ones under all."""
    os.environ["RANKS_BACKEND"] = "triton"
    cases = [
        (problem, *calls.sampled(problem, number + dist.get_world_size())) for number, problem in enumerate(calls.FEATURES.values())
    ]
    cases += [(calls.FEATURES[name], [None], list(calls.WAYS)) for name in ("causal", "documents with mods and a sink")]
    for number, (problem, layouts, ways) in enumerate(cases):
        if number % COMPILED_PARTS == part:
            calls.compare(calls.grown(problem), layouts, ways, (torch.bfloat16, torch.float16)[number % 5 == 4])


def kernels_in_eight_bits(part: int) -> None:
    """FP8 by the kernels that a GPU runs, under two strategies each."""
    os.environ["RANKS_BACKEND"] = "triton"
    for number, (name, problem) in enumerate(calls.EIGHT_BITS.items()):
        if number % EIGHT_BITS_PARTS == part:
            grown = calls.grown(problem, 1 if "blocks" in name else 16)
            ways = ["ulysses"] if "by heads" in name else [calls.WAYS[number % 6], calls.WAYS[(number + 3) % 6]]
            calls.compare_eight(grown, calls.LAYOUTS[number % 2], ways)


def compiled_graphs_of_kernels() -> None:
    """Graphs that Inductor makes, without a break, around calls of the kernels that a GPU runs."""
    os.environ["RANKS_BACKEND"] = "triton"
    calls.COMPILES = "inductor"
    for name, way in (
        ("documents with mods and a sink", "halo"),
        ("blocks far apart, under a window", "gather"),
        ("causal", "ring"),
    ):
        calls.compare(calls.grown(calls.FEATURES[name]), [None], [way], torch.bfloat16)
    calls.compare_eight(calls.grown(calls.EIGHT_BITS["scales of documents"]), None, ["ulysses"])


def same_bits() -> None:
    """With deterministic=True, runs of a few thousand tokens are equal to the bit, in each strategy, however calls overlap."""
    problem = dataclasses.replace(calls.FEATURES["causal"], options={"deterministic": True})
    for number, kind in enumerate((problem, calls.FEATURES["documents"])):
        grown = dataclasses.replace(calls.grown(kind, 64), heads=(8, 4))
        plan = distributed.plan(dist.group.WORLD, **grown.plan_arguments)
        given = calls.tensors_of(grown, torch.bfloat16)
        for way in calls.WAYS:
            strategy = calls.way_of(way)
            first, *others = (calls.results(grown, given, torch.bfloat16, plan, strategy) for _ in range(5))
            assert all(torch.equal(first[name], other[name]) for other in others for name in first), (number, way)


def decoding_over_long_caches() -> None:
    """Long caches over ranks, in bf16: within the error of one process, and bitwise identical on each rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(7)
    q, k, v = (_randn(3, s, h, 128, generator=generator).bfloat16() for s, h in ((1, 16), (4000, 4), (4000, 4)))
    expected = flexattn.attention(q.double(), k.double(), v.double(), return_lse=True, backend="eager")
    budget = flexattn.attention(q, k, v, return_lse=True)
    own = slice(4000 * rank // ranks, 4000 * (rank + 1) // ranks)
    got = distributed.attention_over_ranks(q, k[:, own], v[:, own], group=dist.group.WORLD, return_lse=True)
    for name, a, b, c in zip(("out", "lse"), got, expected, budget, strict=True):
        check_close(f"{name} of decoding", a, b, c)
        everyones = [torch.empty_like(a) for _ in range(ranks)]
        dist.all_gather(everyones, a)
        assert all(torch.equal(a, other) for other in everyones)


RACES = (({"length": 96}, (8, 8)), ({"documents": [50, 6, 40]}, (8, 4)), ({"length": (40, 96)}, (6, 3)))


def look_for_races(arguments: dict[str, Any], heads: tuple[int, int], way: str) -> collections.Counter[str]:
    """Returns the ops on each lane of two steps of training, in which no race is found."""
    generator = torch.Generator().manual_seed(8)
    plan = distributed.plan(dist.group.WORLD, layout="zigzag", **arguments)
    shapes = [(plan.length, heads[0], 8), *[(plan.length_kv, heads[1], 8)] * 2]
    whole = [torch.randn(shape, generator=generator) for shape in shapes]
    own = [distributed.shard(plan, t, dim=0, keys=number > 0) for number, t in enumerate(whole)]
    leaves = [(t if plan.is_packed else t[None]).requires_grad_() for t in own]  # type: ignore[index, union-attr]
    with lane_races.watched() as races:
        for _ in range(2):
            out = distributed.attention(*leaves, plan=plan, strategy=calls.way_of(way), softmax_type="off-by-one")
            out.sum().backward()
            del out
        races.look_for_freed("main")
    assert not races.found, (arguments, way, races.found[:9])
    return races.streams


def lanes_without_races() -> None:
    """Streams that overlap wait for each other wherever they must, and memory is not freed before all have read it."""
    used = collections.Counter[str]()
    slices.MIDDLE_BYTES = 1  # more slices
    for arguments, heads in RACES:
        for way in ("gather sliced", "halo sliced", "halo"):
            used |= look_for_races(arguments, heads, way)
    # Keys of other ranks arrive on the early lane if a rank has calls that do not need them. Rank 1 of 2 has its parts in one call.
    side = {"early", "side"} if dist.get_rank() == 0 else {"early"}
    assert {*used} == {"main", "back", lane_races.COLLECTIVES} | side, used


def lanes_without_races_by_shared_memory() -> None:
    """The same holds if ranks read each other's memory, in one slice or several."""
    shared_memory.share(dist.group.WORLD, calls.DEVICE)
    used = collections.Counter[str]()
    for most in (slices.NEAR_BYTES, 1):
        slices.NEAR_BYTES = most
        for arguments, heads in RACES:
            for way in ("gather", "halo"):
                used |= look_for_races(arguments, heads, way)
    assert {"main", "back", "early"} <= {*used}, used
    assert shared_memory.BARRIERS["all"] > 100, shared_memory.BARRIERS


def refused_on_all() -> None:
    os.environ["FLEXATTN_CHECK"] = "1"
    checked()


def one_does_not_come() -> None:
    """Rank 1 raises before its call; rank 0 must end too, once the group's timeout has passed."""
    plan = distributed.plan(dist.group.WORLD, length=4096)
    q, k = _randn(1, 2048, 8, 64).bfloat16(), _randn(1, 2048, 2, 64).bfloat16()
    distributed.attention(q, k, k, plan=plan)
    torch.cuda.synchronize()
    if dist.get_rank() == 1:
        raise ValueError("this rank has no batch")
    distributed.attention(q, k, k, plan=plan)
    torch.cuda.synchronize()


def on_gpus() -> None:
    """All that compares nothing with a kernel, over NCCL, in float64."""
    others()
    refused_on_all()


QUICK = (features, by_shared_memory, sums_in_float32, others, faults, compiled, graphs.no_reads, rank_guards.guards)
RACING = (lanes_without_races, lanes_without_races_by_shared_memory)
WHOLE = (all_features, drawn)  # grids and draws, parts of which are SLOW
SLOW = (all_compiled, all_strategies, in_float32, in_hosts, on_one_mesh, on_triton, sharded_dtensors, some_drawn)
ON_GPUS = (same_bits, decoding_over_long_caches, on_gpus, one_does_not_come, compiled_graphs_of_kernels)
SUITES: dict[str, Any] = {f.__name__: f for f in (*QUICK, *RACING, *SLOW, *WHOLE, *ON_GPUS)}
SUITES |= {f"kernels_{part}": functools.partial(compiled_kernels, part) for part in range(COMPILED_PARTS)}
SUITES |= {f"kernels_in_eight_bits_{part}": functools.partial(kernels_in_eight_bits, part) for part in range(EIGHT_BITS_PARTS)}
SUITES |= {f"captured_{part}": functools.partial(graphs.captured, part) for part in range(CAPTURED_PARTS)}


def main(suite: str, rank: int, ranks: int, file: str) -> None:
    """Runs a suite as one of the ranks that meet at a file, or as torchrun's rank if the file is "-"."""
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=int(os.environ.get("RANKS_TIMEOUT", "120")))
    more: dict[str, Any] = {"init_method": f"file://{file}", "rank": rank, "world_size": ranks, "timeout": timeout}
    if file == "-":
        rank = int(os.environ["LOCAL_RANK"])
        more = {"timeout": timeout}
    if os.environ.get("RANKS_DEVICE") == "cuda":
        calls.DEVICE = torch.device("cuda", rank)
        torch.cuda.set_device(calls.DEVICE)
        dist.init_process_group("nccl", device_id=calls.DEVICE, **more)
    else:
        dist.init_process_group("gloo", **more)
    SUITES[suite]()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort a process that shuts down (pytorch/pytorch#179291); failures have already raised


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
