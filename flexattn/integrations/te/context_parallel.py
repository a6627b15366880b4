"""TransformerEngine's context parallelism as plans of `flexattn.distributed`.

Each sequence is cut into 2 * n chunks for n ranks. Rank r has the chunks r and 2 * n - 1 - r, one after the other.
Each packed sequence is cut by itself, together with its padding. These are the rules of `attn_forward_func_with_cp` in
https://github.com/NVIDIA/TransformerEngine/blob/main/transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from flexattn.compat import runs_as_it_is
from flexattn.dispatch.neutral import is_capturing
from flexattn.dispatch.spec import Band, as_bshd, make_band
from flexattn.first_order import first_order
from flexattn.function_context import FunctionContext
from flexattn.validation import check_name, describe

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from flexattn.distributed.layout import Runs
    from flexattn.distributed.plans import Plan

STRATEGIES = {"p2p": "ring", "all_gather": "gather", "a2a": "ulysses", "a2a+p2p": "ulysses+ring"}
_UNSPLIT_ARGUMENTS = (
    *("bias_type", "bias", "softmax_type", "softmax_scale", "softcap", "deterministic", "backend", "score_mod"),
    *("dropout_p", "rng_state", "return_max_logit", "fp8_recipe", "fp8_state"),
)

_CACHED_OFFSETS: Any = WeakIdKeyDictionary()  # offsets -> (their version, their values)


class Ranks(NamedTuple):
    """Ranks that share a sequence: the group of all, and for "a2a+p2p" this rank's groups (p2p, a2a)."""

    group: ProcessGroup
    host_groups: tuple[ProcessGroup, ProcessGroup] | None
    cp_comm_type: str
    size: int

    def shared(self, rng_state: Tensor) -> Tensor:
        """Returns rank 0's state on each rank, so that all ranks drop the same weights."""
        from flexattn.distributed.exchange import from_first_rank

        return from_first_rank(rng_state, self.group)


def ranks_of(
    cp_group: ProcessGroup | list[ProcessGroup] | None, cp_global_ranks: Sequence[int] | None, cp_comm_type: str
) -> Ranks | None:
    """Returns the ranks for `DotProductAttention.set_context_parallel_group`'s arguments, or None for no group or one rank.

    Raises:
        ValueError, TypeError: if an argument is invalid; the text names it, its value and the accepted values.
    """
    check_name("cp_comm_type", cp_comm_type, tuple(STRATEGIES))
    groups = list(cp_group) if isinstance(cp_group, (tuple, list)) else [] if cp_group is None else [cp_group]
    for group in groups:
        if not hasattr(group, "rank") or not hasattr(group, "size"):
            raise TypeError(
                f"cp_group is or contains a {type(group).__name__}; accepted: a process group, or for 'a2a+p2p' two in a list"
            )
    sizes = [group.size() for group in groups]
    if max(sizes, default=1) == 1:
        return None
    if cp_comm_type != "a2a+p2p":
        if len(groups) != 1:
            raise ValueError(f"cp_group is a list of {len(groups)} with cp_comm_type {cp_comm_type!r}; accepted: one process group")
        return Ranks(groups[0], None, cp_comm_type, sizes[0])
    if len(groups) != 2:
        raise ValueError(f"cp_group has {len(groups)} process group(s) with cp_comm_type 'a2a+p2p'; accepted: [a2a, p2p]")
    if 1 in sizes:  # only the other group counts, as in TransformerEngine
        return Ranks(groups[sizes.index(1) ^ 1], None, "p2p" if sizes[0] == 1 else "a2a", max(sizes))
    joint_group = _make_joint_group(groups[0], groups[1], cp_global_ranks)
    return Ranks(joint_group, (groups[1], groups[0]), cp_comm_type, sizes[0] * sizes[1])


def _make_joint_group(a2a_group: ProcessGroup, p2p_group: ProcessGroup, cp_global_ranks: Sequence[int] | None) -> ProcessGroup:
    """Returns the process group of all ranks; in its order, the ranks of an a2a group follow one another."""
    global_ranks = () if cp_global_ranks is None else tuple(int(rank) for rank in cp_global_ranks)
    inside, between = (tuple(torch.distributed.get_process_group_ranks(group)) for group in (a2a_group, p2p_group))
    width, host, position = len(inside), p2p_group.rank(), a2a_group.rank()
    fits = len(global_ranks) == width * len(between) and list(global_ranks) == sorted(global_ranks)
    if not fits or global_ranks[host * width : (host + 1) * width] != inside or global_ranks[position::width] != between:
        raise ValueError(
            f"cp_global_ranks is {cp_global_ranks!r} with cp_group {[list(inside), list(between)]}; accepted with 'a2a+p2p': all "
            "global ranks, ascending, the ranks of an a2a group one after another, each at the same position of its p2p group"
        )
    return _new_group(global_ranks)


@functools.lru_cache(maxsize=16)
def _new_group(ranks: tuple[int, ...]) -> ProcessGroup:
    everyone = torch.distributed.group.WORLD
    assert everyone is not None
    if len(ranks) == torch.distributed.get_world_size(everyone):
        return everyone
    group: ProcessGroup = torch.distributed.new_group(list(ranks), use_local_synchronization=True)
    return group


def attend(ranks: Ranks, arguments: dict[str, Any], q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
    """Returns attention of this rank's queries over the keys of all ranks, with merged heads, in q's format, and max_logit.

    max_logit is in q's dtype, or None if it is not requested.

    arguments: arguments of `flexattn.attention`, with cu_seqlens of the whole sequences. A bias has this rank's queries, or 1,
    and the keys of all ranks.

    Raises:
        ValueError: if lengths cannot be cut into 2 chunks per rank; also as `flexattn.distributed.attention`.
    """
    from flexattn import distributed  # a late import, because most modules run on one rank

    options = {name: arguments[name] for name in _UNSPLIT_ARGUMENTS if name in arguments}
    bias, offset = options["bias"], arguments.get("softmax_offset")
    if ranks.cp_comm_type.startswith("a2a") and bias is not None and (bias.dim() != 4 or bias.shape[2] != 1):
        raise ValueError(
            f"core_attention_bias is {describe(bias)} with cp_comm_type {ranks.cp_comm_type!r}; accepted: a bias over keys only, "
            "[b, h, 1, skv], or cp_comm_type 'p2p' or 'all_gather'"
        )
    options["strategy"] = STRATEGIES[ranks.cp_comm_type]
    if offset is not None:
        options["softmax_offset"] = _WholeGradient.apply(ranks.group, offset)  # type: ignore[no-untyped-call]
    call = (_packed if "padding" in arguments["attn_mask_type"] else _dense)(ranks, arguments, (q, k, v))
    rows_q, rows_k, rows_v = call.qkv
    results = distributed.attention(rows_q, rows_k, rows_v, plan=call.plan, **options, **call.plan_arguments)
    out, max_logit = results if arguments["return_max_logit"] else (results, None)
    out, fmt = out.flatten(-2), arguments["qkv_format"]
    if call.plan.is_packed and fmt != "thd":
        out = out.unflatten(0, (q.shape[fmt.index("b")], q.shape[fmt.index("s")]))
        out = (out.transpose(0, 1) if fmt == "sbhd" else out).contiguous()
    return out, None if max_logit is None else max_logit.to(q.dtype)


# torch.compile breaks its graph at these functions, because they look up plans and wait for other ranks.
_NOT_TRACED: tuple[Any, ...] = (attend, Ranks.shared)
for _function in _NOT_TRACED:
    runs_as_it_is(_function)


class _Call(NamedTuple):
    """Tensors in a plan's layout, and the arguments of `flexattn.distributed.attention` that depend on the plan."""

    plan: Plan
    qkv: tuple[Tensor, Tensor, Tensor]
    plan_arguments: dict[str, Any]


def _dense(ranks: Ranks, arguments: dict[str, Any], qkv: tuple[Tensor, Tensor, Tensor]) -> _Call:
    fmt = arguments["qkv_format"]
    lengths = tuple(t.shape[fmt.index("s")] for t in qkv[:2])
    for name, length in zip(("query_layer", "key_layer"), lengths, strict=True):
        if length % 2:
            raise ValueError(f"{name} has {length} tokens on a rank; accepted: an even number, for two chunks")
    plan = _dense_plan(ranks, (lengths[0] * ranks.size, lengths[1] * ranks.size), _band(arguments))
    return _Call(plan, qkv, {"qkv_format": fmt, "alibi_slopes": arguments["alibi_slopes"]})


def _packed(ranks: Ranks, arguments: dict[str, Any], qkv: tuple[Tensor, Tensor, Tensor]) -> _Call:
    """Returns a call of documents; dense sequences with different lengths become documents too."""
    fmt, slopes = arguments["qkv_format"], arguments["alibi_slopes"]
    sides = [_side(side, arguments, t.shape, ranks.size) for side, t in zip(("q", "kv"), qkv, strict=False)]
    plan = _packed_plan(ranks, sides[0], sides[1], _band(arguments))
    if slopes is not None and slopes.dim() == 2 and slopes.shape[0] == len(sides[0].lengths):
        slopes = torch.nn.functional.pad(slopes, (0, 0, 0, len(plan.mask.lengths_q) - slopes.shape[0]))  # a row for padding
    q, k, v = (t if fmt == "thd" else as_bshd(t, fmt).flatten(0, 1) for t in qkv)
    return _Call(plan, (q, k, v), {"alibi_slopes": slopes})


def _band(arguments: dict[str, Any]) -> Band:
    return make_band(*(arguments[name] for name in ("attn_mask_type", "window_size", "bottom_right_diagonal")))


class _Side(NamedTuple):
    """Sequences of the queries or of the keys: each one's tokens without and with its padding; rows: tokens of a rank."""

    lengths: tuple[int, ...]
    padded: tuple[int, ...]
    rows: int

    def runs(self, ranks: int) -> tuple[Runs, ...]:
        """Returns each rank's runs, in a global order with the tokens of all sequences before all padding."""
        from flexattn.distributed.layout import Run, joined

        tokens, by_rank = sum(self.lengths), []
        tail = self.rows - sum(self.padded) // ranks  # rows of each rank after all sequences
        for rank in range(ranks):
            runs, start, padding_start = [], 0, tokens
            for length, padded in zip(self.lengths, self.padded, strict=True):
                size = padded // (2 * ranks)
                for chunk in (rank, 2 * ranks - 1 - rank):
                    ends = (chunk * size, (chunk + 1) * size)
                    runs.append(Run(*(start + min(end, length) for end in ends)))
                    runs.append(Run(*(padding_start + max(end - length, 0) for end in ends)))
                start, padding_start = start + length, padding_start + padded - length
            runs.append(Run(padding_start + rank * tail, padding_start + (rank + 1) * tail))
            by_rank.append(joined(runs))
        return tuple(by_rank)


def _side(side: str, arguments: dict[str, Any], shape: torch.Size, ranks: int) -> _Side:
    """Returns the sequences of "q" or "kv", from the offsets of the whole sequences, which are read on the host."""
    fmt, name = arguments["qkv_format"], f"cu_seqlens_{side}"
    ends = _on_host(name, arguments[name])
    lengths = tuple(b - a for a, b in itertools.pairwise(ends))
    rows = shape[0] if fmt == "thd" else shape[0] * shape[1]
    if fmt == "thd":
        starts = arguments.get(f"{name}_padded")
        name, ends = (name, ends) if starts is None else (f"{name}_padded", _on_host(f"{name}_padded", starts))
        padded = tuple(b - a for a, b in itertools.pairwise(ends))
        if len(padded) != len(lengths) or ends[0] or sum(padded) > rows * ranks or any(size % (2 * ranks) for size in padded):
            raise ValueError(
                f"{name} is {_shorten(ends)} for {rows} tokens on each of {ranks} ranks; accepted: {len(lengths) + 1} offsets, "
                f"starting at 0, of sequences whose padded lengths are multiples of {2 * ranks} and fit in the ranks' tokens"
            )
    else:
        padded = (shape[fmt.index("s")] * ranks,) * shape[fmt.index("b")]
        if len(padded) != len(lengths) or (padded and padded[0] % (2 * ranks)):
            raise ValueError(
                f"{name} has {len(ends)} offsets, for {fmt} of shape {tuple(shape)} on a rank; accepted: {len(padded) + 1}, "
                "and an even number of tokens on a rank"
            )
    if any(not 0 <= length <= size for length, size in zip(lengths, padded, strict=True)):
        raise ValueError(
            f"cu_seqlens_{side} has lengths {_shorten(lengths)}; accepted: from 0 to {_shorten(padded)}, the available tokens"
        )
    return _Side(lengths, padded, rows)


def _shorten(values: Sequence[int]) -> str:
    return str(list(values)) if len(values) <= 8 else f"[{', '.join(map(str, values[:8]))}, ...]"


def _on_host(name: str, t: object) -> tuple[int, ...]:
    """Returns the values of offsets. They are read once for all layers of a step, unless the tensor is written to.

    Raises RuntimeError if they must be read while a CUDA graph is captured.
    """
    if not isinstance(t, Tensor) or t.dtype is not torch.int32 or t.dim() != 1 or t.shape[0] < 1:
        raise ValueError(f"{name} is {describe(t)}; accepted: an int32 tensor [b + 1] of offsets of the whole sequences")
    if t.is_inference():  # has no version counter
        return _read(name, t)
    version, values = _CACHED_OFFSETS.get(t, (None, ()))
    if version != t._version:
        values = _read(name, t)
        _CACHED_OFFSETS[t] = (t._version, values)
    return values  # type: ignore[no-any-return]


def _read(name: str, t: Tensor) -> tuple[int, ...]:
    if is_capturing(t.device):
        raise RuntimeError(
            f"{name} cannot be read on the host while a CUDA graph is captured. Run the layer once with this tensor before the "
            "capture, outside of inference mode; the graph keeps the lengths of that run"
        )
    return tuple(t.tolist())


@functools.lru_cache(maxsize=64)
def _dense_plan(ranks: Ranks, lengths: tuple[int, int], band: Band) -> Plan:
    from flexattn.distributed.layout import zigzag

    return _plan(ranks, (lengths[:1], lengths[1:]), (zigzag(lengths[0], ranks.size), zigzag(lengths[1], ranks.size)), band)


@functools.lru_cache(maxsize=64)
def _packed_plan(ranks: Ranks, q: _Side, kv: _Side, band: Band) -> Plan:
    """Returns a plan whose documents are the sequences. Padding is one document of queries and one of keys."""
    count = ranks.size
    padding_q, padding_kv = (side.rows * count - sum(side.lengths) for side in (q, kv))
    padding_lengths = ((padding_q, 0), (0, padding_kv)) if padding_q or padding_kv else ((), ())
    lengths = (q.lengths + padding_lengths[0], kv.lengths + padding_lengths[1])
    return _plan(ranks, lengths, (q.runs(count), kv.runs(count)), band, is_packed=True)


def _plan(
    ranks: Ranks,
    lengths: tuple[tuple[int, ...], tuple[int, ...]],
    runs: tuple[tuple[Runs, ...], tuple[Runs, ...]],
    band: Band,
    is_packed: bool = False,
) -> Plan:
    from flexattn.distributed.mask import Mask
    from flexattn.distributed.plans import Plan

    host = ranks.size if ranks.host_groups is None else ranks.host_groups[1].size()
    strategy = STRATEGIES[ranks.cp_comm_type]
    return Plan(ranks.size, "zigzag", strategy, is_packed, *runs, Mask(*band, *lengths), host, ranks.group, ranks.host_groups)


class _WholeGradient(torch.autograd.Function):
    """A tensor replicated on all ranks; its gradient on each rank is the sum over ranks, as in TransformerEngine."""

    @staticmethod
    def forward(ctx: FunctionContext, group: ProcessGroup, t: Tensor) -> Tensor:
        ctx.group = group
        ctx.save_for_backward(t)
        return t.view_as(t)

    @staticmethod
    @first_order
    def backward(ctx: FunctionContext, _saved: object, gradient: Tensor) -> tuple[None, Tensor]:
        from flexattn.distributed.exchange import waiting

        total = gradient.clone()
        with waiting("the sum of a sink's gradients", ctx.group):
            torch.distributed.all_reduce(total, group=ctx.group)
        return None, total
