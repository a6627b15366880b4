"""TransformerEngine's context parallelism as plans of `flexattn.distributed`.

Each sequence is cut into 2 * n chunks for n ranks, of which rank r holds the chunks r and 2 * n - 1 - r, one after the other.
Packed sequences are cut so one by one, with the padding behind them. These are the rules of `attn_forward_func_with_cp` in
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

from flexattn.dispatch.neutral import is_capturing
from flexattn.dispatch.spec import Band, as_bshd, make_band
from flexattn.first_order import first_order
from flexattn.mods.eager import runs_as_it_is
from flexattn.validation import check_name, describe

if TYPE_CHECKING:
    from flexattn.distributed.layout import Runs
    from flexattn.distributed.plans import Plan

STRATEGIES = {"p2p": "ring", "all_gather": "gather", "a2a": "ulysses", "a2a+p2p": "ulysses+ring"}
_SAME_ON_ALL = (
    *("bias_type", "bias", "softmax_type", "softmax_scale", "deterministic", "backend", "score_mod"),
    *("dropout_p", "rng_state", "return_max_logit", "fp8_recipe", "fp8_state"),
)

_READ: Any = WeakIdKeyDictionary()  # offsets -> (their version, their values)


class Ranks(NamedTuple):
    """The ranks that a sequence lies over: the group of all, and for "a2a+p2p" those of (p2p, a2a) that this rank is in."""

    group: Any
    of_hosts: tuple[Any, Any] | None
    cp_comm_type: str
    size: int

    def shared(self, rng_state: Tensor) -> Tensor:
        """Returns rank 0's on each rank, by which all drop the weights of one whole."""
        from flexattn.distributed.exchange import of_first_rank

        return of_first_rank(rng_state, self.group)


def ranks_of(cp_group: Any, cp_global_ranks: Sequence[int] | None, cp_comm_type: str) -> Ranks | None:
    """Returns the ranks of `DotProductAttention.set_context_parallel_group`'s arguments, None for no group and for one rank.

    Raises:
        ValueError, TypeError: an argument that has no meaning; the text names it, what came and what is accepted.
    """
    check_name("cp_comm_type", cp_comm_type, tuple(STRATEGIES))
    groups = list(cp_group) if isinstance(cp_group, (tuple, list)) else [] if cp_group is None else [cp_group]
    for group in groups:
        if not hasattr(group, "rank") or not hasattr(group, "size"):
            raise TypeError(
                f"cp_group is or has a {type(group).__name__}; accepted: a process group, or for 'a2a+p2p' two in a list"
            )
    sizes = [group.size() for group in groups]
    if max(sizes, default=1) == 1:
        return None
    if cp_comm_type != "a2a+p2p":
        if len(groups) != 1:
            raise ValueError(f"cp_group is a list of {len(groups)} with cp_comm_type {cp_comm_type!r}; accepted: one process group")
        return Ranks(groups[0], None, cp_comm_type, sizes[0])
    if len(groups) != 2:
        raise ValueError(f"cp_group has {len(groups)} process group(s) with cp_comm_type 'a2a+p2p'; accepted: [of a2a, of p2p]")
    if 1 in sizes:  # as there: the other one alone
        return Ranks(groups[sizes.index(1) ^ 1], None, "p2p" if sizes[0] == 1 else "a2a", max(sizes))
    of_both = _group_of_both(groups[0], groups[1], cp_global_ranks)
    return Ranks(of_both, (groups[1], groups[0]), cp_comm_type, sizes[0] * sizes[1])


def _group_of_both(of_a2a: Any, of_p2p: Any, cp_global_ranks: Sequence[int] | None) -> Any:
    """Returns the process group of all ranks, in which the ranks of an a2a group follow each other."""
    found = () if cp_global_ranks is None else tuple(int(rank) for rank in cp_global_ranks)
    inside, between = (tuple(torch.distributed.get_process_group_ranks(group)) for group in (of_a2a, of_p2p))
    width, host, place = len(inside), of_p2p.rank(), of_a2a.rank()
    fits = len(found) == width * len(between) and list(found) == sorted(found)
    if not fits or found[host * width : (host + 1) * width] != inside or found[place::width] != between:
        raise ValueError(
            f"cp_global_ranks is {cp_global_ranks!r} with cp_group {[list(inside), list(between)]}; accepted with 'a2a+p2p': the "
            "global ranks of all, ascending, those of an a2a group one after another, each in the same place of its p2p group"
        )
    return _made_group(found)


@functools.lru_cache(maxsize=16)
def _made_group(ranks: tuple[int, ...]) -> Any:
    everyone = torch.distributed.group.WORLD
    if len(ranks) == torch.distributed.get_world_size(everyone):
        return everyone
    return torch.distributed.new_group(list(ranks), use_local_synchronization=True)


def attend(ranks: Ranks, arguments: dict[str, Any], q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
    """Returns attention of this rank's queries over the keys of all, with its heads merged, in q's format, and max_logit.

    max_logit is in q's dtype, and None where it is not asked for.

    arguments: of `flexattn.attention`, with cu_seqlens of the whole; a bias has this rank's queries, or 1, and the keys of all.

    Raises:
        ValueError: lengths that cannot be cut into 2 chunks for each rank, and what `flexattn.distributed.attention` raises.
    """
    from flexattn import distributed  # here, as most modules run on one rank

    given = {name: arguments[name] for name in _SAME_ON_ALL if name in arguments}
    bias, offset = given["bias"], arguments.get("softmax_offset")
    if ranks.cp_comm_type.startswith("a2a") and bias is not None and (bias.dim() != 4 or bias.shape[2] != 1):
        raise ValueError(
            f"core_attention_bias is {describe(bias)} with cp_comm_type {ranks.cp_comm_type!r}; accepted: one of the keys alone, "
            "[b, h, 1, skv], or cp_comm_type 'p2p' or 'all_gather'"
        )
    given["strategy"] = STRATEGIES[ranks.cp_comm_type]
    if offset is not None:
        given["softmax_offset"] = _WholeGradient.apply(ranks.group, offset)  # type: ignore[no-untyped-call]
    of_call = (_packed if "padding" in arguments["attn_mask_type"] else _dense)(ranks, arguments, (q, k, v))
    rows_q, rows_k, rows_v = of_call.qkv
    results = distributed.attention(rows_q, rows_k, rows_v, plan=of_call.plan, **given, **of_call.more)
    out, max_logit = results if arguments["return_max_logit"] else (results, None)
    out, fmt = out.flatten(-2), arguments["qkv_format"]
    if of_call.plan.is_packed and fmt != "thd":
        out = out.unflatten(0, (q.shape[fmt.index("b")], q.shape[fmt.index("s")]))
        out = (out.transpose(0, 1) if fmt == "sbhd" else out).contiguous()
    return out, None if max_logit is None else max_logit.to(q.dtype)


_NOT_TRACED: tuple[Any, ...] = (attend, Ranks.shared)  # torch.compile breaks its graph, as they look up plans and wait for ranks
for _function in _NOT_TRACED:
    _function._torchdynamo_disable = True
    runs_as_it_is(_function)


class _Call(NamedTuple):
    """Tensors as a plan has them, and the arguments of `flexattn.distributed.attention` that depend on it."""

    plan: Plan
    qkv: tuple[Tensor, Tensor, Tensor]
    more: dict[str, Any]


def _dense(ranks: Ranks, arguments: dict[str, Any], qkv: tuple[Tensor, Tensor, Tensor]) -> _Call:
    fmt = arguments["qkv_format"]
    lengths = tuple(t.shape[fmt.index("s")] for t in qkv[:2])
    for name, length in zip(("query_layer", "key_layer"), lengths, strict=True):
        if length % 2:
            raise ValueError(f"{name} has {length} tokens on a rank; accepted: an even number, in two chunks")
    plan = _dense_plan(ranks, (lengths[0] * ranks.size, lengths[1] * ranks.size), _band(arguments))
    return _Call(plan, qkv, {"qkv_format": fmt, "alibi_slopes": arguments["alibi_slopes"]})


def _packed(ranks: Ranks, arguments: dict[str, Any], qkv: tuple[Tensor, Tensor, Tensor]) -> _Call:
    """Returns a call of documents, which dense sequences with lengths of their own are too."""
    fmt, slopes = arguments["qkv_format"], arguments["alibi_slopes"]
    sides = [_side(side, arguments, t.shape, ranks.size) for side, t in zip(("q", "kv"), qkv, strict=False)]
    plan = _packed_plan(ranks, sides[0], sides[1], _band(arguments))
    if slopes is not None and slopes.dim() == 2 and slopes.shape[0] == len(sides[0].lengths):
        slopes = torch.nn.functional.pad(slopes, (0, 0, 0, len(plan.mask.lengths_q) - slopes.shape[0]))  # padding has a row too
    q, k, v = (t if fmt == "thd" else as_bshd(t, fmt).flatten(0, 1) for t in qkv)
    return _Call(plan, (q, k, v), {"alibi_slopes": slopes})


def _band(arguments: dict[str, Any]) -> Band:
    return make_band(*(arguments[name] for name in ("attn_mask_type", "window_size", "bottom_right_diagonal")))


class _Side(NamedTuple):
    """Sequences of the queries or of the keys: each one's tokens, and with those of its padding; rows: of a rank."""

    lengths: tuple[int, ...]
    padded: tuple[int, ...]
    rows: int

    def runs(self, ranks: int) -> tuple[Runs, ...]:
        """Returns each rank's runs of a whole in which the tokens of all sequences lie before their padding."""
        from flexattn.distributed.layout import Run, joined

        tokens, by_rank = sum(self.lengths), []
        tail = self.rows - sum(self.padded) // ranks  # rows of each rank behind all sequences
        for rank in range(ranks):
            found, start, empty = [], 0, tokens
            for length, padded in zip(self.lengths, self.padded, strict=True):
                size = padded // (2 * ranks)
                for chunk in (rank, 2 * ranks - 1 - rank):
                    ends = (chunk * size, (chunk + 1) * size)
                    found.append(Run(*(start + min(end, length) for end in ends)))
                    found.append(Run(*(empty + max(end - length, 0) for end in ends)))
                start, empty = start + length, empty + padded - length
            found.append(Run(empty + rank * tail, empty + (rank + 1) * tail))
            by_rank.append(joined(found))
        return tuple(by_rank)


def _side(side: str, arguments: dict[str, Any], shape: torch.Size, ranks: int) -> _Side:
    """Returns the sequences of "q" or "kv", from offsets of the whole, which are read on the host."""
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
                f"{name} is {_few(ends)} for {rows} tokens on each of {ranks} ranks; accepted: {len(lengths) + 1} offsets from 0 "
                f"on, of sequences that are with their padding multiples of {2 * ranks} long, and together fit in the ranks"
            )
    else:
        padded = (shape[fmt.index("s")] * ranks,) * shape[fmt.index("b")]
        if len(padded) != len(lengths) or (padded and padded[0] % (2 * ranks)):
            raise ValueError(
                f"{name} has {len(ends)} offsets, for {fmt} of shape {tuple(shape)} on a rank; accepted: {len(padded) + 1}, and an "
                "even number of tokens on a rank"
            )
    if any(not 0 <= length <= size for length, size in zip(lengths, padded, strict=True)):
        raise ValueError(
            f"cu_seqlens_{side} has lengths {_few(lengths)}; accepted: from 0 to {_few(padded)}, the tokens that are there"
        )
    return _Side(lengths, padded, rows)


def _few(values: Sequence[int]) -> str:
    return str(list(values)) if len(values) <= 8 else f"[{', '.join(map(str, values[:8]))}, ...]"


def _on_host(name: str, t: Any) -> tuple[int, ...]:
    """Returns the values of offsets, which are read once for all layers of a step, as long as nothing writes to them.

    Raises RuntimeError if they are still to be read while a CUDA graph is captured.
    """
    if not isinstance(t, Tensor) or t.dtype is not torch.int32 or t.dim() != 1 or t.shape[0] < 1:
        raise ValueError(f"{name} is {describe(t)}; accepted: an int32 tensor [b + 1] of offsets in the whole")
    if t.is_inference():  # nothing counts writes to it
        return _read(name, t)
    version, values = _READ.get(t, (None, ()))
    if version != t._version:
        values = _read(name, t)
        _READ[t] = (t._version, values)
    return values  # type: ignore[no-any-return]


def _read(name: str, t: Tensor) -> tuple[int, ...]:
    if is_capturing(t.device):
        raise RuntimeError(
            f"{name} cannot be read on the host while a CUDA graph is captured. Run the layer once with this tensor before the "
            "capture, outside of inference mode; the graph keeps the lengths that the tensor has then"
        )
    return tuple(t.tolist())


@functools.lru_cache(maxsize=64)
def _dense_plan(ranks: Ranks, lengths: tuple[int, int], band: Band) -> Plan:
    from flexattn.distributed.layout import zigzag

    return _plan(ranks, (lengths[:1], lengths[1:]), (zigzag(lengths[0], ranks.size), zigzag(lengths[1], ranks.size)), band)


@functools.lru_cache(maxsize=64)
def _packed_plan(ranks: Ranks, q: _Side, kv: _Side, band: Band) -> Plan:
    """Returns a plan whose documents are the sequences; padding is a document of queries alone, and one of keys alone."""
    count = ranks.size
    empty_q, empty_kv = (side.rows * count - sum(side.lengths) for side in (q, kv))
    of_padding = ((empty_q, 0), (0, empty_kv)) if empty_q or empty_kv else ((), ())
    lengths = (q.lengths + of_padding[0], kv.lengths + of_padding[1])
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

    host = ranks.size if ranks.of_hosts is None else ranks.of_hosts[1].size()
    strategy = STRATEGIES[ranks.cp_comm_type]
    return Plan(ranks.size, "zigzag", strategy, is_packed, *runs, Mask(*band, *lengths), host, ranks.group, ranks.of_hosts)


class _WholeGradient(torch.autograd.Function):
    """A tensor that all ranks have, whose gradient is on each rank the sum of all ranks' parts, as TransformerEngine gives it."""

    @staticmethod
    def forward(ctx: Any, group: Any, t: Tensor) -> Tensor:
        ctx.group = group
        ctx.save_for_backward(t)
        return t.view_as(t)

    @staticmethod
    @first_order
    def backward(ctx: Any, _saved: Any, gradient: Tensor) -> tuple[None, Tensor]:
        from flexattn.distributed.exchange import waiting

        total = gradient.clone()
        with waiting("the sum of a sink's gradients", ctx.group):
            torch.distributed.all_reduce(total, group=ctx.group)
        return None, total
