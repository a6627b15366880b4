"""TransformerEngine's module over ranks, in gloo processes: `python -m tests.support.te_ranks SUITE RANK RANKS FILE`.

This file cuts chunks by TransformerEngine's rule (`thd_get_partitioned_indices`), not by the code under test.
"""

from __future__ import annotations

import datetime
import itertools
import os
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import flexattn.integrations.te as te
from flexattn.integrations.te import context_parallel
from flexattn.integrations.te.recipe import DelayedScaling, Float8CurrentScaling

EXACT = 1e-10  # of fp64: sums over ranks in another order
HEADS, GROUPS, DIM, DIM_V = 4, 2, 8, 4
LENGTHS = (5, 0, 16, 9)  # of packed sequences, which are padded to multiples of twice the ranks


class Case(NamedTuple):
    mask: str = "causal"
    window: tuple[int, int] | None = None
    module: Mapping[str, Any] = MappingProxyType({})
    call: Mapping[str, Any] = MappingProxyType({})
    bias: str = ""  # the dims of a bias that are not 1
    is_padded: bool = False  # whether dense sequences have lengths of their own
    keys: int = 0  # other tokens of a dense sequence's keys, for each rank


def by_distance(graph: Any, score: Any, tensors: Any) -> Any:
    row, column = (graph.gen_index(input=score, axis=axis) for axis in (2, 3))
    distance = graph.sub(a=row, b=column)
    return graph.add(a=score, b=graph.mul(a=distance, b=graph.gen_index(input=score, axis=0)))


DENSE = {
    "causal": Case(),
    "no mask, a head dim of v": Case("no_mask", module={"kv_channels": (DIM, DIM_V)}, call={"core_attention_bias_type": "alibi"}),
    "a causal window": Case(window=(5, 0), module={"softmax_type": "off-by-one"}),
    "a window on both sides": Case(
        "no_mask", (3, 6), {"softmax_type": "learnable", "softcap": 0.8}, {"bottom_right_diagonal": False}
    ),
    "other keys": Case("causal_bottom_right", keys=12, module={"softmax_scale": 0.2, "return_max_logit": True}),
    "padding": Case("padding_causal", is_padded=True, module={"softmax_type": "learnable"}),
    "padding without a mask": Case("padding", (6, 6), is_padded=True),
    "computed again": Case(call={"checkpoint_core_attention": True}, module={"attention_dropout": 0.25}),
    "dropout and padding": Case("padding_causal", is_padded=True, module={"attention_dropout": 0.25}),
}
MODIFIED = {
    "dense": ("sbhd", Case("no_mask", call={"score_mod": by_distance})),
    "packed": ("thd", Case("padding_causal", call={"score_mod": by_distance})),
}
BIASED = {
    "a bias of every score": Case(bias="bhqk"),
    "a bias of all heads": Case("no_mask", bias="qk"),
    "a bias of keys": Case(bias="k"),
}
PACKED = {
    "causal": Case("padding_causal"),
    "no mask": Case("padding", module={"kv_channels": (DIM, DIM_V)}, call={"softcap": 0.8}),
    "a window, a sink": Case("padding_causal", (4, 0), {"softmax_type": "learnable"}),
    "dropout": Case("padding_causal", module={"attention_dropout": 0.25, "return_max_logit": True}),
    "ALiBi": Case("padding", (6, 2), call={"core_attention_bias_type": "alibi"}),
}


def rows_of(padded: list[int], rank: int, ranks: int) -> Tensor:
    """Returns the tokens of the whole that a rank holds: of each sequence two chunks of 2 * ranks."""
    found, start = [torch.zeros(0, dtype=torch.int64)], 0
    for length in padded:
        chunks = torch.arange(start, start + length).chunk(2 * ranks) if length else []
        found += [chunks[rank], chunks[2 * ranks - 1 - rank]] if chunks else []
        start += length
    return torch.cat(found)


def groups_of(cp_comm_type: str) -> tuple[Any, list[int]]:
    """Returns cp_group and cp_global_ranks of all ranks. Under "a2a+p2p", two neighbours exchange heads."""
    ranks = list(range(dist.get_world_size()))
    if cp_comm_type != "a2a+p2p":
        return dist.group.WORLD, ranks
    return [_group([ranks[i : i + 2] for i in ranks[::2]]), _group([ranks[i::2] for i in (0, 1)])], ranks


def _group(all_ranks: list[list[int]]) -> Any:
    groups = [dist.new_group(ranks) for ranks in all_ranks]
    return next(group for group, ranks in zip(groups, all_ranks, strict=True) if dist.get_rank() in ranks)


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)


class Whole(NamedTuple):
    """A call of the whole: its tensors, its other arguments, and for q's and k's tokens the dim and this rank's."""

    qkv: list[Tensor]
    dout: Tensor
    call: dict[str, Any]
    dim: int
    own: tuple[Tensor, Tensor]


def whole_of(case: Case, fmt: str) -> Whole:
    """Returns the same on every rank."""
    generator = torch.Generator().manual_seed(7)
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    dims = case.module.get("kv_channels", (DIM, DIM))
    call: dict[str, Any] = {"core_attention_bias_type": "post_scale_bias"} if case.bias else {}
    call |= dict(case.call)
    if fmt == "thd":
        padded = [-(-length // (2 * ranks)) * 2 * ranks for length in LENGTHS]
        for side in ("q", "kv"):
            call |= {f"cu_seqlens_{side}": offsets([*LENGTHS]), f"cu_seqlens_{side}_padded": offsets(padded)}
        total = sum(padded)
        qkv = [draw(total, *shape) for shape in ((HEADS, dims[0]), (GROUPS, dims[0]), (GROUPS, dims[1]))]
        own = rows_of(padded, rank, ranks)
        return Whole(qkv, draw(total, HEADS * dims[1]), call, 0, (own, own))
    queries, keys = 12 * ranks, (12 + case.keys) * ranks
    qkv = [draw(3, s, *shape) for s, *shape in ((queries, HEADS, dims[0]), (keys, GROUPS, dims[0]), (keys, GROUPS, dims[1]))]
    dout = draw(3, queries, HEADS * dims[1])
    if case.is_padded:
        call |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), offsets([queries, 7, 0]))
    if case.bias:
        sizes = {"b": 3, "h": HEADS, "q": queries, "k": keys}
        call["core_attention_bias"] = draw(*(size if name in case.bias else 1 for name, size in sizes.items()))
    if fmt == "sbhd":
        qkv, dout = [t.transpose(0, 1).contiguous() for t in qkv], dout.transpose(0, 1).contiguous()
    own = (rows_of([queries], rank, ranks), rows_of([keys], rank, ranks))
    return Whole(qkv, dout, call, fmt.index("s"), own)


def module_of(case: Case, fmt: str, **groups: Any) -> te.DotProductAttention:
    arguments = {"kv_channels": DIM, "num_gqa_groups": GROUPS, "attn_mask_type": case.mask, "window_size": case.window}
    module = te.DotProductAttention(HEADS, qkv_format=fmt, **(arguments | dict(case.module)), **groups)
    if module.softmax_offset is not None:
        module.softmax_offset.data = torch.linspace(-1, 1, HEADS, dtype=torch.float64)
    return module


def results(module: te.DotProductAttention, qkv: list[Tensor], dout: Tensor, call: dict[str, Any]) -> dict[str, Tensor | None]:
    leaves = [t.detach().clone().requires_grad_() for t in qkv]
    bias = call.get("core_attention_bias")
    if bias is not None:
        bias = bias.detach().clone().requires_grad_()
        call = call | {"core_attention_bias": bias}
    out = module(*leaves, **call)
    out, max_logit = out if module.return_max_logit else (out, None)
    out.backward(dout)
    found = {"out": out.detach(), "max_logit": max_logit} | {f"d{name}": t.grad for name, t in zip("qkv", leaves, strict=True)}
    offset = module.softmax_offset
    return found | {"dbias": None if bias is None else bias.grad, "doffset": None if offset is None else offset.grad}


def compare(name: str, case: Case, fmt: str, cp_comm_type: str) -> None:
    """Asserts that each rank has its tokens of one process's results."""
    qkv, dout, call, dim, (own_q, own_k) = whole_of(case, fmt)
    torch.manual_seed(0)
    expected = results(module_of(case, fmt), qkv, dout, call)
    torch.manual_seed(dist.get_rank())  # rank 0 draws the dropout state of all ranks
    group, ranks = groups_of(cp_comm_type)
    module = module_of(case, fmt, cp_group=group, cp_global_ranks=ranks, cp_comm_type=cp_comm_type)
    own = {"out": own_q, "dq": own_q, "dk": own_k, "dv": own_k}
    parts = [t.index_select(dim, index) for t, index in zip(qkv, (own_q, own_k, own_k), strict=True)]
    bias = call.get("core_attention_bias")
    is_of_queries = bias is not None and bias.shape[2] > 1
    if bias is not None and is_of_queries:
        call = call | {"core_attention_bias": bias.index_select(2, own_q)}
    got = results(module, parts, dout.index_select(dim, own_q), call)
    if bias is not None and not is_of_queries:
        dist.all_reduce(got["dbias"])  # each rank has a part
    for key, t in got.items():
        wanted = expected[key]
        if key in own and wanted is not None:
            wanted = wanted.index_select(dim, own[key])
        if key == "dbias" and wanted is not None and is_of_queries:
            wanted = wanted.index_select(2, own_q)
        assert (t is None) == (wanted is None), key
        if t is not None and wanted is not None:
            where = f"{key} of {name} in {fmt} by {cp_comm_type} on {dist.get_world_size()}"
            torch.testing.assert_close(t, wanted, rtol=0.0, atol=EXACT, msg=lambda text, at=where: f"{at}: {text}")


def served() -> None:
    """Every case under every way of communicating, in every format."""
    for cp_comm_type in context_parallel.STRATEGIES:
        for fmt, (name, case) in itertools.product(("bshd", "sbhd"), DENSE.items()):
            compare(name, case, fmt, cp_comm_type)
        for name, case in PACKED.items():
            compare(name, case, "thd", cp_comm_type)
        for name, (fmt, case) in MODIFIED.items():
            compare(f"a score_mod, {name}", case, fmt, cp_comm_type)
        os.environ["FLEXATTN_CHECK"] = "1"  # ranks compare their calls, but for the rows that each has of a bias
        for name, case in BIASED.items():
            if case.bias == "k" or not cp_comm_type.startswith("a2a"):
                compare(name, case, "bshd", cp_comm_type)
        del os.environ["FLEXATTN_CHECK"]
    in_eight_bits()
    plans_are_kept()
    rows_behind_all_sequences()
    refused()


def in_eight_bits() -> None:
    """FP8 in an autocast: out is one process's to the bit but for a ring's, and padding counts for no scale."""
    for fmt, mask in (("bshd", "causal"), ("thd", "padding_causal")):
        qkv, dout, call, dim, (own, _) = whole_of(Case(mask), fmt)
        if fmt == "thd":  # all tokens but those of sequences are padding
            starts, ends = (call[name].tolist() for name in ("cu_seqlens_q_padded", "cu_seqlens_q"))
            real = torch.zeros(qkv[0].shape[0], dtype=torch.bool)
            for start, (a, b) in zip(starts, itertools.pairwise(ends), strict=False):
                real[start : start + b - a] = True
            qkv = [torch.where(real[:, None, None], t, 1e4) for t in qkv]
            dout = dout * real[:, None]
        exact: dict[str, Any] = results(
            module_of(Case(mask), fmt), [t.bfloat16().double() for t in qkv], dout.bfloat16().double(), call
        )
        for made, cp_comm_type in itertools.product((Float8CurrentScaling, DelayedScaling), ("p2p", "all_gather", "a2a")):
            modules = [module_of(Case(mask), fmt), module_of(Case(mask), fmt, cp_group=dist.group.WORLD, cp_comm_type=cp_comm_type)]
            for _ in range(3):
                found = []
                for module, index in zip(modules, (None, own), strict=True):
                    parts = [t if index is None else t.index_select(dim, index) for t in (*qkv, dout)]
                    with te.autocast(recipe=made(fp8_dpa=True)):
                        leaves = [t.bfloat16().requires_grad_() for t in parts[:3]]
                        out = module(*leaves, **call)
                    out.backward(parts[3].bfloat16())
                    found.append([out.detach(), *(t.grad for t in leaves)])
                for name, one, got in zip(("out", "dq", "dk", "dv"), *found, strict=True):
                    budget = (one.double() - exact[name]).square().mean()  # FP8's own error in one process
                    one = one.index_select(dim, own)
                    if name == "out" and cp_comm_type != "p2p":
                        assert torch.equal(one, got), (name, fmt, made, cp_comm_type)
                    apart = (one.double() - got.double()).square().mean()
                    assert apart < budget, (name, fmt, made, cp_comm_type, apart, budget)


def plans_are_kept() -> None:
    """Layers of one step share a plan, and read offsets once, until they are written to."""
    case = Case("padding_causal")
    qkv, _, call, dim, (own, _) = whole_of(case, "thd")
    modules = [module_of(case, "thd", cp_group=dist.group.WORLD) for _ in range(2)]
    parts = [t.index_select(dim, own) for t in qkv]
    context_parallel._packed_plan.cache_clear()
    first = modules[0](*parts, **call)
    reads = dict(context_parallel._CACHED_OFFSETS)
    assert torch.equal(modules[1](*parts, **call), first)
    assert context_parallel._packed_plan.cache_info()[:2] == (1, 1)
    assert all(context_parallel._CACHED_OFFSETS[t] is found for t, found in reads.items())
    for side in ("q", "kv"):
        call[f"cu_seqlens_{side}"].zero_()
    assert not modules[0](*parts, **call).any()
    assert first.any()
    assert context_parallel._packed_plan.cache_info().misses == 2


def rows_behind_all_sequences() -> None:
    """Rows that belong to no sequence get 0, and change nothing."""
    case = Case("padding_causal")
    qkv, _, call, dim, (own, _) = whole_of(case, "thd")
    module = module_of(case, "thd", cp_group=dist.group.WORLD, cp_comm_type="all_gather")
    parts = [t.index_select(dim, own) for t in qkv]
    out = module(*parts, **call)
    longer = module(*(torch.cat((t, torch.full_like(t[:3], torch.nan))) for t in parts), **call)
    assert torch.equal(longer[:-3], out)
    assert not longer[-3:].any()


def refused() -> None:
    """A call that is not served raises by name on every rank, before anything is sent."""
    x = torch.zeros(1, 4, HEADS, DIM, dtype=torch.float64)
    offsets_of_odd = torch.tensor([0, 6], dtype=torch.int32)
    odd_lengths = {"cu_seqlens_q": offsets_of_odd, "cu_seqlens_kv": offsets_of_odd, "qkv_format": "thd"}
    bias = {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": torch.zeros(1, 1, 4, 4 * dist.get_world_size())}
    policies = [{"sequence_ids": torch.tensor([0]), "mask_type": "padding", "window_size": (-1, -1)}]
    cache = te.InferenceParams(2, 8, 2, DIM, torch.float32)
    cases: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("a call with attn_mask_type 'arbitrary'", {"attn_mask_type": "arbitrary"}, {}),
        (
            "a call with thd_attention_policies",
            {},
            {**odd_lengths, **_layers(x[0]), "thd_attention_policies": policies},
        ),
        ("a call with inference_params", {"attn_mask_type": "padding", "layer_number": 1}, {"inference_params": cache}),
        ("a core_attention_bias and padding", {"attn_mask_type": "padding"}, bias),
        ("core_attention_bias is .* with cp_comm_type 'a2a'", {"cp_comm_type": "a2a"}, bias),
        ("query_layer has 3 tokens on a rank; accepted: an even number", {}, dict.fromkeys(("query_layer", "key_layer"), x[:, :3])),
        (r"cu_seqlens_q is \[0, 6\] for 4 tokens", {"attn_mask_type": "padding"}, {**odd_lengths, **_layers(x[0])}),
        (
            "cu_seqlens_q has 2 offsets, for bshd",
            {"attn_mask_type": "padding"},
            {**odd_lengths, "qkv_format": "bshd", **_layers(x.expand(2, -1, -1, -1))},
        ),
        (
            "cu_seqlens_q has lengths .* accepted: from 0 to",
            {"attn_mask_type": "padding"},
            {"cu_seqlens_q": 100 * offsets_of_odd, "cu_seqlens_kv": offsets_of_odd},
        ),
        (
            "cu_seqlens_q is .* accepted: an int32 tensor",
            {"attn_mask_type": "padding"},
            {"cu_seqlens_q": [0, 4], "cu_seqlens_kv": [0, 4]},
        ),
        ("cp_group is a list of 2 with cp_comm_type 'p2p'", {"cp_group": [dist.group.WORLD] * 2}, {}),
        ("cp_group has 1 process group", {"cp_group": [dist.group.WORLD], "cp_comm_type": "a2a+p2p"}, {}),
        ("cp_global_ranks is None with cp_group", {"cp_group": [dist.group.WORLD] * 2, "cp_comm_type": "a2a+p2p"}, {}),
        ("cp_group is or contains a str", {"cp_group": "world"}, {}),
    ]
    for text, module_arguments, call_arguments in cases:
        with pytest.raises((NotImplementedError, TypeError, ValueError), match=text):
            te.DotProductAttention(HEADS, DIM, qkv_format="bshd", **({"cp_group": dist.group.WORLD} | module_arguments))(
                **(_layers(x) | call_arguments)
            )
    module = te.DotProductAttention(HEADS, DIM, qkv_format="bshd", cp_group=dist.group.WORLD)
    with te.autocast(recipe=DelayedScaling(fp8_dpa=True)), pytest.raises(NotImplementedError, match="fp8_output"):
        module(**_layers(x.bfloat16()), fp8_output=True)


def _layers(x: Tensor) -> dict[str, Any]:
    return dict.fromkeys(("query_layer", "key_layer", "value_layer"), x)


def compiled() -> None:
    """Results are the same under torch.compile, which breaks its graph at the call."""
    for fmt, case in (("bshd", DENSE["computed again"]), ("thd", PACKED["dropout"]), ("thd", PACKED["a window, a sink"])):
        qkv, dout, call, dim, (own, _) = whole_of(case, fmt)
        parts, own_dout = [t.index_select(dim, own) for t in qkv], dout.index_select(dim, own)
        found = []
        for compiles in (False, True):
            torch.manual_seed(0)
            module = module_of(case, fmt, cp_group=dist.group.WORLD, cp_comm_type="all_gather")
            if compiles:
                module.compile(backend="eager")
            found.append(results(module, parts, own_dout, call))
        torch.testing.assert_close(*found, rtol=0.0, atol=0.0)


SUITES = {"served": served, "compiled": compiled}


def main(suite: str, rank: int, ranks: int, file: str) -> None:
    os.environ["NVTE_FUSED_ATTN"] = "0"  # fp64
    # A row of a product has the same bits in any number of rows (oneMKL, "Conditional Numerical Reproducibility").
    os.environ["MKL_CBWR"] = "COMPATIBLE"
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks, timeout=timeout)
    SUITES[suite]()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort a process that shuts down (pytorch/pytorch#179291); failures have already raised


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
