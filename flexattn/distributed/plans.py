"""Plans: the split of a sequence's tokens and keys over ranks, as host data. Every rank makes an equal plan."""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from flexattn.dispatch.neutral import neutral_state
from flexattn.dispatch.spec import OPEN_WINDOW, Band, Window, as_index, make_band, window_of
from flexattn.distributed import layout as layouts
from flexattn.distributed.blocks import Blocks, read_blocks
from flexattn.distributed.cost import DEFAULT_RATES, Heads, Prediction, Rates, Work, between_hosts, predict, predict_hosts, table
from flexattn.distributed.deal import dealt
from flexattn.distributed.layout import LAYOUTS, Run, Runs, common, joined, row_of, rows_of, size_of, union
from flexattn.distributed.mask import Mask, Piece, hull, make_piece

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn.attention.flex_attention import BlockMask

_NUMBERS = itertools.count()
_KNOWN: weakref.WeakValueDictionary[int, Plan] = weakref.WeakValueDictionary()
_RECENT: collections.OrderedDict[int, Plan] = collections.OrderedDict()  # plans of compiled calls, whose backwards may still come
_MOST_RECENT = 64

TIE = 0.015  # fraction of the least predicted time within which Ulysses is preferred: the model is no more exact
MASK = ("attn_mask_type", "window_size", "bottom_right_diagonal", "block_mask")  # arguments of the mask, of a plan or of a call
STRATEGIES = ("gather", "halo", "ulysses", "ring", "ulysses+ring")


@dataclass(frozen=True, eq=False)
class Plan:
    """A split of a sequence over ranks, as host data. `plan` makes it. It is equal on all ranks, hashable and picklable.

    A pickle does not contain the process groups.

    Attributes:
        ranks: int, number of ranks.
        layout: "contiguous", "zigzag" or "dealt".
        strategy: "auto", or a name in `STRATEGIES`.
        is_packed: bool, whether there are documents. Tensors are then [tokens, ...], else [batch, tokens, ...].
        q_runs, kv_runs: for each rank, its runs of the full sequence's queries and keys, in the order in which it holds them.
        mask: the documents, the band and the blocks.
        host: int, number of ranks on a host. All ranks, if the plan was made of one dim.
        group: the process group, or None for a plan that is only inspected.
        host_groups: for a plan of two dims, two groups of this rank: one rank of each host, and the ranks of its host. Else None.
        given: names of the mask's arguments that differ from the defaults of `attention`.
    """

    ranks: int
    layout: str
    strategy: str
    is_packed: bool
    q_runs: tuple[Runs, ...]
    kv_runs: tuple[Runs, ...]
    mask: Mask
    host: int
    group: ProcessGroup | None = dataclasses.field(default=None, repr=False)
    host_groups: tuple[ProcessGroup, ProcessGroup] | None = dataclasses.field(default=None, repr=False)
    given: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    token: Tensor = dataclasses.field(init=False, repr=False)  # int64 [], by which a compiled call finds its plan

    def __post_init__(self) -> None:
        number = next(_NUMBERS)
        _KNOWN[number] = self
        with neutral_state():
            object.__setattr__(self, "token", torch.tensor(number, device="cpu"))

    @functools.cached_property
    def digest(self) -> str:
        """Returns a text that is equal for equal plans, in any process."""
        whole = (self.ranks, self.host, self.layout, self.strategy, self.is_packed, self.q_runs, self.kv_runs, self.mask.digest)
        return hashlib.sha256(repr(whole).encode()).hexdigest()[:16]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.digest == other.digest and self.group is other.group

    def __hash__(self) -> int:
        return hash(self.digest)

    def __getstate__(self) -> dict[str, object]:
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.init}
        return own | {"group": None, "host_groups": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self.__post_init__()

    def on(self, group_or_mesh: ProcessGroup | DeviceMesh) -> Plan:
        """Returns the plan with a group of the same size. Use it after you unpickle a plan."""
        ranks, host, group, host_groups = _group_of(group_or_mesh)
        if (ranks, host) != (self.ranks, self.host):
            raise ValueError(
                f"group_or_mesh has {ranks} ranks, {host} on each host, and the plan {self.ranks}, {self.host} on each; accepted: "
                "the same"
            )
        return dataclasses.replace(self, group=group, host_groups=host_groups)

    @property
    def rank(self) -> int:
        """This process's rank in the plan's group."""
        if self.group is None:
            raise ValueError("the plan has no process group. Make it with a group or a mesh, or use plan.on(group)")
        return self.group.rank()

    @property
    def length(self) -> int:
        """Number of queries in the full sequence."""
        return sum(self.mask.lengths_q)

    @property
    def length_kv(self) -> int:
        """Number of keys in the full sequence."""
        return sum(self.mask.lengths_kv)

    def masked(
        self,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | Window | None = None,
        bottom_right_diagonal: bool | None = None,
        block_mask: BlockMask | None = None,
    ) -> Plan:
        """Returns a plan with the same tokens on the same ranks and another mask, for example for layers without a window.

        None is the default of `attention`. It is accepted only if the plan has no such argument.

        Raises ValueError if an argument is None that the plan has, because that would drop the plan's mask.
        """
        named = attn_mask_type, window_size, bottom_right_diagonal, block_mask
        missing = [name for name, value in zip(MASK, named, strict=True) if value is None and name in self.given]
        if missing:
            raise ValueError(
                f"the plan has {' and '.join(self.given)}, and a mask is given without {' and '.join(missing)}. Pass every "
                "argument that the plan has, such as attn_mask_type='no_mask' or window_size=(-1, -1) to turn one off, or pass "
                "none to use the plan's mask. For calls with and without a block_mask, make a plan without one"
            )
        if window_size is None:
            window_size = OPEN_WINDOW
        given, band = _named_arguments(attn_mask_type or "no_mask", window_size, bottom_right_diagonal, block_mask)
        lengths = self.mask.lengths_q, self.mask.lengths_kv
        mask = Mask(*band, *lengths, _blocks(block_mask, lengths, self.is_packed))
        return dataclasses.replace(self, mask=mask, given=given)

    def area(self, rank: int) -> int:
        """Returns the number of scores of a rank's queries."""
        return sum(self.mask.area(run) for run in self.q_runs[rank])

    def needs(self, rank: int) -> Runs:
        """Returns the keys that a rank's queries see, sorted and disjoint, in positions of the full sequence."""
        return union(keys for run in self.q_runs[rank] for keys in self.mask.needs(run))

    def fetched(self, strategy: str, rank: int) -> Runs:
        """Returns the keys that a rank has under "gather" or "halo", in order. Its own keys are included if it sees them."""
        if strategy == "gather":
            return (Run(0, self.length_kv),) if self.length_kv else ()
        return self.needs(rank)

    def held(self, strategy: str, rank: int) -> Runs:
        """Returns the runs of keys for which a rank has room. They contain the fetched keys, and each piece lies in one of them."""
        if strategy == "gather" or self.mask.blocks is None:
            return self.fetched(strategy, rank)
        return union(keys for run in self.q_runs[rank] for keys in self.mask.hulls(run))

    def pieces(self, rank: int, keys: Runs) -> list[Piece]:
        """Returns the pieces of a rank's queries over a tensor of these runs of keys."""
        return _pieces(self.mask, self.q_runs[rank], keys)

    def whole_pieces(self) -> list[Piece]:
        """Returns the pieces of all queries over all keys, both in the order of the full sequence."""
        return _pieces(self.mask, joined((Run(0, self.length),)), joined((Run(0, self.length_kv),)))

    def work(self, strategy: str) -> Work:
        """Returns the most that any rank computes and receives, in scores and in rows of keys and queries."""
        ranks = range(self.ranks)
        whole = sum(self.area(rank) for rank in ranks)
        most_q, most_kv = (max(size_of(runs) for runs in side_runs) for side_runs in (self.q_runs, self.kv_runs))
        if strategy == "ulysses":
            return Work((whole / self.ranks,), 0, 0, most_q, self.length, self.length_kv)
        busiest = max(self.area(rank) for rank in ranks)
        if strategy == "ulysses+ring":
            return Work((float(busiest),), most_kv, most_kv, most_q, most_q, most_kv)
        if strategy == "ring":
            # an estimate: the pieces of all pairs of ranks take long to compute
            return Work((busiest / self.ranks,) * self.ranks, most_kv, most_kv, most_q, most_q, 2 * most_kv)
        received, held = 0, 0
        for rank in ranks:
            keys = self.fetched(strategy, rank)
            own = union(self.kv_runs[rank])
            received = max(received, size_of(keys) - size_of(common(own, keys)))
            held = max(held, size_of(self.held(strategy, rank)))
        return Work((float(busiest),), received, 0, most_q, most_q, held)

    def predictions(self, heads: Heads, rates: Rates = DEFAULT_RATES) -> dict[str, Prediction | str]:
        """Returns the predicted cost of each strategy, or the reason why it cannot run."""
        result: dict[str, Prediction | str] = {}
        for strategy in STRATEGIES:
            refusal = self.refusal(strategy, heads)
            if refusal:
                result[strategy] = refusal
            elif strategy == "ulysses+ring":
                result[strategy] = predict_hosts(self.work(strategy), heads, self.ranks // self.host, self.host, rates)
            else:
                reached = between_hosts(strategy, self.ranks, self.host, rates)
                result[strategy] = predict(strategy, self.work(strategy), heads, self.ranks, reached)
        return result

    def refusal(self, strategy: str, heads: Heads) -> str:
        """Returns the reason why a strategy cannot run, or ""."""
        if strategy == "ulysses" and heads.q < self.ranks:
            return f"{heads.q} heads for {self.ranks} ranks; accepted: at least one head for each"
        if strategy == "ulysses+ring":
            if self.host == self.ranks:
                return "a plan of one dim; accepted: a mesh of two dims, (hosts, GPUs of a host)"
            if heads.q < self.host:
                return f"{heads.q} heads for {self.host} ranks of a host; accepted: at least one head for each"
        return ""

    def inside_host(self) -> tuple[Plan, Plan]:
        """Returns the plan inside this rank's host, over the host's tokens, and the plan of all hosts' tokens."""
        return _inside_host(self)

    def chosen(self, heads: Heads, strategy: str | None = None, rates: Rates = DEFAULT_RATES) -> str:
        """Returns the strategy that runs: the argument, else the plan's, else the one with the least predicted time."""
        wanted = self.strategy if strategy is None else strategy
        if wanted not in ("auto", *STRATEGIES):
            raise ValueError(f"strategy is {wanted!r}; accepted: 'auto', {', '.join(map(repr, STRATEGIES))}")
        if wanted != "auto":
            refusal = self.refusal(wanted, heads)
            if refusal:
                raise ValueError(f"strategy is {wanted!r} with {refusal}, or another strategy")
            return wanted
        return _cheapest(self, heads, rates)

    def explain(self, q: Tensor, k: Tensor, v: Tensor, *, rates: Rates = DEFAULT_RATES) -> str:
        """Returns the layout, the transfers and the predicted milliseconds of each strategy, as a text.

        q, k, v: tensors of any rank, as in `attention`. Only their heads, head dims and dtype are read. rates: speeds of the
        machine. The default is H200s with NVLink.
        """
        dim = 1 if self.is_packed else 2
        heads = Heads(q.shape[dim], k.shape[dim], q.shape[-1], v.shape[-1], q.element_size(), 1 if self.is_packed else q.shape[0])
        predictions = self.predictions(heads, rates)
        taken = self.chosen(heads, None, rates)
        areas = [self.area(rank) for rank in range(self.ranks)]
        mean = sum(areas) / self.ranks
        balance = max(areas) / mean if mean else 1.0
        runs = max(len(runs) for runs in self.q_runs)
        lines = [
            f"{self.length} queries and {self.length_kv} keys in {len(self.mask.lengths_q)} document(s) on {self.ranks} rank(s)",
            f"layout {self.layout}: up to {runs} run(s) a rank; the slowest has {balance:.2f} of the mean",
            *table(predictions, taken),
        ]
        return "\n".join(lines)


def plan_of(token: Tensor) -> Plan:
    """Returns the plan with this token. Raises RuntimeError if the plan no longer exists."""
    number = int(token)
    known = _KNOWN.get(number)
    if known is None:
        raise RuntimeError(
            f"the plan of a compiled flexattn.distributed.attention was deleted, and {_MOST_RECENT} others were used since. Keep a "
            "reference to it until its backward has run"
        )
    _RECENT[number] = known
    _RECENT.move_to_end(number)
    if len(_RECENT) > _MOST_RECENT:
        _RECENT.popitem(last=False)
    return known


def _pieces(mask: Mask, queries: Runs, keys: Runs) -> list[Piece]:
    pieces = []
    key_rows = rows_of(keys)
    for run, rows in zip(queries, rows_of(queries), strict=True):
        for document, part in mask.q.within(run):
            row = rows.start + mask.q.starts[document] + part.start - run.start
            start = mask.kv.starts[document]
            visible = mask.keys(document, part)
            for held in common((Run(start + visible.start, start + visible.stop),), keys):
                seen = hull(mask.seen(document, part, Run(held.start - start, held.stop - start)))
                if not seen.size:
                    continue
                piece = make_piece(mask, document, part, seen, (row, row_of(start + seen.start, keys, key_rows)))
                if piece is not None:
                    pieces.append(piece)
    return pieces


@functools.lru_cache(maxsize=32)
def _inside_host(plan: Plan) -> tuple[Plan, Plan]:
    if plan.host_groups is None:
        raise ValueError("the plan has no process groups of hosts. Make it with a mesh of two dims, or use plan.on(mesh)")
    between, inside = plan.host_groups
    own_host = plan.rank // plan.host
    own_ranks = slice(own_host * plan.host, (own_host + 1) * plan.host)
    hosts: list[tuple[Runs, ...]] = []
    own: list[tuple[Runs, ...]] = []
    for side in (plan.q_runs, plan.kv_runs):
        host_runs = [union(run for runs in side[i : i + plan.host] for run in runs) for i in range(0, plan.ranks, plan.host)]
        rows = rows_of(host_runs[own_host])
        places = [[(row_of(run.start, host_runs[own_host], rows), run.size) for run in runs] for runs in side[own_ranks]]
        hosts.append(tuple(host_runs))
        own.append(tuple(tuple(Run(row, row + size) for row, size in runs) for runs in places))
    count = plan.ranks // plan.host
    inner: dict[str, Any] = {"ranks": plan.host, "host": plan.host, "q_runs": own[0], "kv_runs": own[1], "group": inside}
    outer: dict[str, Any] = {"ranks": count, "host": count, "q_runs": hosts[0], "kv_runs": hosts[1], "group": between}
    return dataclasses.replace(plan, **inner, host_groups=None), dataclasses.replace(plan, **outer, host_groups=None)


@functools.lru_cache(maxsize=256)
def _cheapest(plan: Plan, heads: Heads, rates: Rates) -> str:
    predictions = plan.predictions(heads, rates)
    fits = {name: prediction for name, prediction in predictions.items() if isinstance(prediction, Prediction)}
    small = {name: prediction for name, prediction in fits.items() if prediction.held_bytes <= rates.most_bytes}
    times = {name: fits[name].forward_ms + fits[name].backward_ms for name in small or fits}
    least = min(times.values())
    # Prefer Ulysses in a tie: its dk and dv are bitwise identical to those of one process. One rank exchanges nothing.
    if plan.ranks > 1 and times.get("ulysses", float("inf")) <= (1 + TIE) * least:
        return "ulysses"
    # Prefer a halo to a gather in a tie: it never fetches more keys, and fewer on some ranks.
    return min(times, key=lambda name: (times[name], name == "gather"))


def plan(
    group_or_mesh: ProcessGroup | DeviceMesh | int | tuple[int, int],
    *,
    length: int | tuple[int, int] | None = None,
    documents: Sequence[int] | Sequence[tuple[int, int]] | None = None,
    attn_mask_type: str | None = None,
    window_size: tuple[int, int] | Window = OPEN_WINDOW,
    bottom_right_diagonal: bool | None = None,
    block_mask: BlockMask | None = None,
    layout: str | None = None,
    strategy: str = "auto",
) -> Plan:
    """Returns the plan of a sequence, or of packed documents, over the ranks of a group. Nothing is sent.

    Args:
        group_or_mesh: a process group, or a DeviceMesh of one dim (such as mesh["cp"]) or of two named dims (hosts, GPUs of a
            host). A number of ranks, or a pair (hosts, GPUs of a host), makes a plan to inspect.
        length: tokens of one sequence. The batch may have any size. Tensors are [batch, tokens, ...]. Pass a pair (queries, keys)
            if they differ.
        documents: lengths of packed documents, instead of `length`. 0 is allowed. Tensors are [tokens, ...]. Pass pairs (queries,
            keys) if they differ.
        attn_mask_type, window_size, bottom_right_diagonal: as in `flexattn.attention`. "padding" in the type's name has no effect,
            because documents have lengths. The default type is "causal", or "no_mask" with a block_mask.
        block_mask: as in `flexattn.attention`, of the full sequence. For packed documents, one mask for all of them, or one row of
            the batch for each. It is read on the host once. Its mask_mod sees positions in the full sequence.
        layout: "contiguous", "zigzag" (one early and one late part for each rank) or "dealt". "dealt" leaves documents uncut if
            possible, or deals chunks, so that scores are even and few keys are fetched. None: "contiguous" for windows, for masks
            that are not causal, and if keys and queries differ; "zigzag" for one causal sequence; "dealt" for packed documents.
            With a block mask, "contiguous" if its scores are even then, else "dealt".
        strategy: "gather", "halo", "ulysses", "ring" or "ulysses+ring" (heads inside a host, a ring between hosts; needs a mesh of
            two dims). "auto": the least predicted time, see `Plan.explain`.

    Raises:
        ValueError, TypeError: an invalid argument. The text names it, its value and the accepted values.
    """
    ranks, host, group, host_groups = _group_of(group_or_mesh)
    if attn_mask_type is None:
        attn_mask_type = "causal" if block_mask is None else "no_mask"
    given, (left, right, bottom_right) = _named_arguments(attn_mask_type, window_size, bottom_right_diagonal, block_mask)
    if (length is None) == (documents is None):
        raise ValueError(f"length is {length} and documents {'None' if documents is None else 'given'}; accepted: one of the two")
    is_packed = documents is not None
    pairs = [_lengths("documents", n) for n in documents] if documents is not None else [_lengths("length", length)]
    if not pairs:
        raise ValueError("documents is empty; accepted: at least one length, 0 too")
    lengths_q, lengths_kv = (tuple(side) for side in zip(*pairs, strict=True))
    if strategy not in ("auto", *STRATEGIES):
        raise ValueError(f"strategy is {strategy!r}; accepted: 'auto', {', '.join(map(repr, STRATEGIES))}")
    if layout not in (None, *LAYOUTS):
        raise ValueError(f"layout is {layout!r}; accepted: None, {', '.join(map(repr, LAYOUTS))}")
    mask = Mask(left, right, bottom_right, lengths_q, lengths_kv, _blocks(block_mask, (lengths_q, lengths_kv), is_packed))
    same = lengths_q == lengths_kv
    total_q, total_kv = sum(lengths_q), sum(lengths_kv)
    if layout is None and mask.blocks is not None:
        areas = [sum(map(mask.area, runs)) for runs in layouts.contiguous(total_q, ranks)]
        layout = "contiguous" if max(areas) * ranks <= layouts.MOST_IMBALANCE * sum(areas) else "dealt"
    elif layout is None:
        layout = "contiguous" if left is not None or right is None or not same else "dealt" if is_packed else "zigzag"
    if layout == "contiguous":
        q_runs = layouts.contiguous(total_q, ranks)
    elif layout == "zigzag":
        q_runs = layouts.zigzag(total_q, ranks)
    else:
        q_runs = dealt(mask, ranks, None if same else layouts.contiguous(total_kv, ranks))
    kv_runs = q_runs if same else layouts.contiguous(total_kv, ranks)
    return Plan(ranks, layout, strategy, is_packed, q_runs, kv_runs, mask, host, group, host_groups, given)


def _named_arguments(
    attn_mask_type: str, window_size: tuple[int, int] | Window, bottom_right_diagonal: bool | None, block_mask: object
) -> tuple[tuple[str, ...], Band]:
    """Returns the names of a mask's arguments that differ from the defaults of `attention`, and the band."""
    band = make_band(attn_mask_type, window_size, bottom_right_diagonal)
    is_own = (
        "causal" in attn_mask_type,
        window_of(window_size, attn_mask_type) != window_of(OPEN_WINDOW),
        bottom_right_diagonal is not None,
        block_mask is not None,
    )
    return tuple(name for name, is_given in zip(MASK, is_own, strict=True) if is_given), band


def _blocks(block_mask: object, lengths: tuple[tuple[int, ...], tuple[int, ...]], is_packed: bool) -> Blocks | None:
    """Returns the blocks of a full mask. Raises ValueError if it does not cover these sequences."""
    if block_mask is None:
        return None
    blocks = read_blocks(block_mask, (max(lengths[0]), max(lengths[1])))
    rows, documents = blocks.kinds.shape[0], len(lengths[0])
    if is_packed and rows not in (1, documents):
        raise ValueError(f"block_mask has {rows} rows and the plan {documents} document(s); accepted: 1 row, or one for each")
    return blocks


def _lengths(name: str, value: object) -> tuple[int, int]:
    """Returns the tokens of queries and of keys."""
    sides = tuple(value) if isinstance(value, (tuple, list)) else (value, value)
    counts = [as_index(side) for side in sides]
    if len(counts) == 2 and counts[0] is not None and counts[1] is not None and min(counts[0], counts[1]) >= 0:
        return counts[0], counts[1]
    raise ValueError(
        f"{name} is or has {value!r}; accepted: numbers of tokens (int on the host, 0 or more), or pairs (queries, keys)"
    )


def _group_of(group_or_mesh: Any) -> tuple[int, int, Any, Any]:
    """Returns the numbers of ranks and of ranks on a host, the process group, and the two groups of a mesh of two dims.

    The groups are None if the argument is a number.
    """
    sizes = group_or_mesh if isinstance(group_or_mesh, tuple) and len(group_or_mesh) == 2 else (1, group_or_mesh)
    hosts, host = (as_index(size) for size in sizes)
    if hosts is not None and host is not None:
        if hosts < 1 or host < 1:
            raise ValueError(f"group_or_mesh is {group_or_mesh}; accepted: a process group, a DeviceMesh, or at least one rank")
        return hosts * host, host, None, None
    if hasattr(group_or_mesh, "get_group"):
        if group_or_mesh.ndim == 2:
            if not group_or_mesh.mesh_dim_names:
                raise ValueError("group_or_mesh is a mesh of two dims without names; accepted: one with mesh_dim_names")
            group = group_or_mesh._flatten().get_group()
            return group.size(), group_or_mesh.size(1), group, (group_or_mesh.get_group(0), group_or_mesh.get_group(1))
        if group_or_mesh.ndim != 1:
            raise ValueError(f"group_or_mesh is a mesh of {group_or_mesh.ndim} dims; accepted: one dim, such as mesh['cp'], or two")
        group_or_mesh = group_or_mesh.get_group()
    if not hasattr(group_or_mesh, "rank") or not hasattr(group_or_mesh, "size"):
        raise TypeError(
            f"group_or_mesh is a {type(group_or_mesh).__name__}; accepted: a process group, a DeviceMesh of one or two dims, or a "
            "number"
        )
    return group_or_mesh.size(), group_or_mesh.size(), group_or_mesh, None
