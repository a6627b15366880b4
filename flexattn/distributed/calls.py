"""Local calls: pieces become calls of `attention` and `attention_backward` on this rank, and their results are combined."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexattn import in_layout
from flexattn.backward import Given, Gradients, attention_backward
from flexattn.dispatch.options import requested_backend
from flexattn.dispatch.spec import Fp32Gradients
from flexattn.dispatch.spec import Results as SpecResults
from flexattn.distributed import eight_bits
from flexattn.distributed.blocks import Blocks
from flexattn.distributed.capture import tables
from flexattn.distributed.eight_bits import Fp8Call
from flexattn.distributed.lanes import Lanes
from flexattn.distributed.layout import Run, Runs, union, without
from flexattn.distributed.local_blocks import LocalBlocks
from flexattn.distributed.mask import LocalBand, Piece, local_band, sees_all
from flexattn.distributed.origin import Mod, Origin, mod_of_heads, moved_mod, rng_state_of, with_alibi
from flexattn.distributed.sums import copy_all
from flexattn.functional import merge_attention

COMMON = ("softmax_scale", "softcap", "dropout_p", "deterministic", "backend")


@dataclass(frozen=True)
class Scores:
    """Arguments of a call that are not tensors and are equal for all parts. Fields have the names of `attention`'s arguments."""

    common: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # `COMMON`, which local calls take unchanged
    score_mod: Mod | None = None
    mask_mod: Mod | None = None
    tensor_names: tuple[str, ...] | None = None  # if score_mod_tensors is a mapping
    bias_type: str = "no_bias"
    softmax_type: str = "vanilla"
    has_own_rows: bool = False  # whether bias has only the rows of this rank's queries
    heads: tuple[int, int] = (0, 0)  # the call's first head in the full tensors, and the number of all heads
    heads_kv: int = 0  # number of all key heads
    fp8_call: Fp8Call | None = None  # None: no FP8
    peaks: Tensor | None = None  # [all heads], maxima of scores so far, updated by forwards. None: not requested.

    def out_dtype(self, q: Tensor) -> torch.dtype:
        """Returns the dtype of out and dq. q: the local queries."""
        return q.dtype if self.fp8_call is None else self.fp8_call.out_dtype

    def mod_tensors(self, tensors: Sequence[Tensor]) -> Sequence[Tensor] | Mapping[str, Tensor]:
        return list(tensors) if self.tensor_names is None else dict(zip(self.tensor_names, tensors, strict=True))

    @property
    def gives_fp32(self) -> bool:
        """Returns whether the requested backend can return partial results in float32."""
        return requested_backend(self.common.get("backend")) != "cudnn"

    def fp32_gradients(self, wanted: Fp32Gradients) -> Fp32Gradients:
        """Returns `wanted`, the partial gradients that are summed, or "none" if the backend cannot return float32."""
        return wanted if self.gives_fp32 else "none"


class Shared(NamedTuple):
    """Tensors that all ranks have in full."""

    bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    softmax_offset: Tensor | None = None
    rng_state: Tensor | None = None  # int64 [2], for the full sequence
    descales: tuple[Tensor, ...] = ()  # for q, k and v in FP8, and for dout: [b | 1, h | 1, blocks | 1] in full
    mod_tensors: tuple[Tensor, ...] = ()

    @property
    def has_sums(self) -> bool:
        """Returns whether calls add their gradients of bias or of the mods' tensors to common sums."""
        return any(t is not None and t.requires_grad for t in (self.bias, *self.mod_tensors))

    def zeros(self) -> list[Tensor | None]:
        """Returns zeros for the gradients of bias and of the mods' tensors. None if a tensor needs no gradient."""
        return [
            torch.zeros(t.shape, dtype=sum_dtype(t.dtype), device=t.device) if t is not None and t.requires_grad else None
            for t in (self.bias, *self.mod_tensors)
        ]


class Call(NamedTuple):
    """One local call of attention: sequences of a packed call, or the only piece of a dense one. Tensors are on the device."""

    pieces: tuple[Piece, ...]
    band: LocalBand
    origin: Origin
    packing: dict[str, Any] | None  # cu_seqlens and max_seqlen if packed, relative to the first of `rows` and `keys`
    by_eights: bool  # whether each piece's first key is at a multiple of 8
    blocks: LocalBlocks | None
    rows: Run  # from the first query of a piece to the last, or all rows of q
    keys: Run
    runs: Runs  # rows of q that the pieces cover
    arguments: dict[str, Any]  # the arguments of `attention` that say which keys a query sees
    is_own: bool = False  # whether its keys are rows of this rank's tensors, not of the fetched ones


Index = tuple[slice | EllipsisType, ...]  # selects rows of a tensor


class Part(NamedTuple):
    """Queries, keys and values from which calls take their rows. `Call` says which rows."""

    q: Tensor
    k: Tensor
    v: Tensor


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def make_calls(
    pieces: Sequence[Piece],
    is_packed: bool,
    blocks: Blocks | None,
    wants_diagonal: bool,
    device: torch.device,
    within: tuple[Run, Run] | None = None,
) -> list[Call]:
    """Returns calls that cover all pieces. Pieces of one call have the same local band, and share no query and no key.

    within: all rows of q and of k. A packed call with at least half of the rows of q takes all of them. Other calls can then
    write their rows into its results.
    """
    groups: list[tuple[LocalBand, list[Piece]]] = []
    bands = _shared_bands(pieces, wants_diagonal) if is_packed else [local_band(piece, wants_diagonal) for piece in pieces]
    for piece, band in sorted(zip(pieces, bands, strict=True), key=lambda pair: (pair[0].keys.start, pair[0].rows.start)):
        fitting = (members for group_band, members in groups if is_packed and group_band == band and _is_apart(members, piece))
        group = next(fitting, None)
        if group is None:
            groups.append((band, [piece]))
        else:
            group.append(piece)
    calls = []
    for band, group in groups:
        ordered = tuple(sorted(group, key=lambda piece: piece.rows.start))
        local_blocks = None if blocks is None else LocalBlocks(blocks, ordered, is_packed, device)
        calls.append(_call(ordered, band, local_blocks, is_packed, device, _hulls(ordered, within)))
    return calls


def _shared_bands(pieces: Sequence[Piece], wants_diagonal: bool) -> list[LocalBand]:
    """Returns the local band of each piece. Pieces that see all their keys, such as one token, take another band if possible."""
    bands = [local_band(piece, wants_diagonal) for piece in pieces]
    if not wants_diagonal:  # calls then do not read it
        bands = [band._replace(is_exact=False) for band in bands]
    are_open = [piece.low is None and piece.high is None for piece in pieces]
    counts = collections.Counter(band for band, is_open in zip(bands, are_open, strict=True) if not is_open)
    other_bands = sorted(counts, key=lambda band: (-counts[band], band))
    return [
        next((other for other in other_bands if sees_all(piece, other)), band) if is_open else band
        for piece, band, is_open in zip(pieces, bands, are_open, strict=True)
    ]


def _is_apart(group: list[Piece], piece: Piece) -> bool:
    # Pieces are sorted by their keys, so only the last one's keys can overlap.
    rows, keys = piece.rows, piece.keys
    return group[-1].keys.stop <= keys.start and all(x.rows.stop <= rows.start or rows.stop <= x.rows.start for x in group)


def _hulls(pieces: tuple[Piece, ...], within: tuple[Run, Run] | None) -> tuple[Run, Run]:
    """Returns the rows of q and of k that a call of these pieces takes. See `make_calls`."""
    if within is not None and 2 * sum(piece.rows.size for piece in pieces) >= within[0].size:
        return within
    sides = [piece.rows for piece in pieces], [piece.keys for piece in pieces]
    q, k = (Run(min(run.start for run in runs), max(run.stop for run in runs)) for runs in sides)
    return q, k


def _call(
    pieces: tuple[Piece, ...],
    band: LocalBand,
    blocks: LocalBlocks | None,
    is_packed: bool,
    device: torch.device,
    hulls: tuple[Run, Run],
) -> Call:
    def tensor(values: list[int] | int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cpu").to(device)

    def origin_of(name: str) -> Tensor:
        return tensor([getattr(piece, name) for piece in pieces] if is_packed else getattr(pieces[0], name))

    sides = {"q": [piece.rows for piece in pieces], "kv": [piece.keys for piece in pieces]}
    arguments: dict[str, object] = {
        "qkv_format": "thd" if is_packed else "bshd",
        "attn_mask_type": "padding" if is_packed else "no_mask",
        "window_size": band.window_size,
        "bottom_right_diagonal": band.bottom_right,
    }
    packing: dict[str, Any] = {}
    for (side, runs), hull in zip(sides.items(), hulls, strict=True) if is_packed else ():
        ends = list(itertools.accumulate((run.size for run in runs), initial=0))
        starts = [run.start - hull.start for run in runs]
        packing[f"cu_seqlens_{side}"] = tensor(ends)
        is_full = starts == ends[:-1] and ends[-1] == hull.size
        packing[f"cu_seqlens_{side}_padded"] = None if is_full else tensor([*starts, hull.size])
        packing[f"max_seqlen_{side}"] = max(run.size for run in runs)
    document = origin_of("document") if is_packed else None
    origin = Origin(document, *map(origin_of, ("q_start", "kv_start", "diagonal")))
    by_eights = all(piece.kv_start % 8 == 0 for piece in pieces)
    q_runs = union(sides["q"])
    return Call(pieces, band, origin, packing or None, by_eights, blocks, *hulls, q_runs, arguments | packing)


def rows_of_call(call: Call, part: Part) -> tuple[Part, Index, Index]:
    """Returns a call's tensors, and the index of its rows in q and in k."""
    tokens = () if call.packing is not None else (slice(None),)
    rows, keys = (*tokens, slice(*call.rows)), (*tokens, slice(*call.keys))
    return Part(part.q[rows], part.k[keys], part.v[keys]), rows, keys


def lse_index(index: Index) -> Index:
    """Returns the index into lse, [b, h, s] or [h, t], for rows with this index in q."""
    return (..., index[-1])


def arguments_of(call: Call, scores: Scores, shared: Shared, q: Tensor) -> dict[str, Any]:
    """Returns the arguments of `attention` besides q, k and v, without a sink. q: queries of the call.

    Arguments that have their defaults are left out, because each of them costs a call time.
    """
    arguments, bias = {**scores.common, **call.arguments}, shared.bias
    if bias is not None:
        arguments |= {"bias_type": scores.bias_type, "bias": bias[bias_index(bias, call.pieces[0], scores.has_own_rows)]}
    if shared.rng_state is not None:
        arguments["rng_state"] = rng_state_of(shared.rng_state, call.origin, q.shape[0], scores.heads, call.by_eights)
    if scores.score_mod is None and scores.mask_mod is None and shared.alibi_slopes is None:
        return arguments
    origin, slopes = call.origin, shared.alibi_slopes
    score_mod = moved_mod(scores.score_mod, 1, origin)
    if slopes is not None and slopes.dim() == 2 and origin.document is not None:
        slopes = slopes.index_select(0, origin.document)
    if slopes is not None and not call.band.is_exact:
        score_mod, slopes = with_alibi(score_mod, slopes, origin), None
    if slopes is not None:
        arguments |= {"bias_type": scores.bias_type, "alibi_slopes": slopes}
    mask_mod, first = moved_mod(scores.mask_mod, 0, origin), scores.heads[0]
    block_mask = None
    if call.blocks is not None and mask_mod is not None:
        block_mask = call.blocks.block_mask(mask_mod, Run(first, first + q.shape[-2]))
        mask_mod = None
    mods = {"score_mod": score_mod, "mask_mod": mask_mod, "block_mask": block_mask}
    return arguments | mods | {"score_mod_tensors": scores.mod_tensors(shared.mod_tensors)}


def bias_index(bias: Tensor, piece: Piece, has_own_rows: bool) -> Index:
    """Returns the index of a piece in the full bias, or in the bias of this rank's queries. Dims of size 1 stay."""
    first = piece.rows.start if has_own_rows else piece.q_start
    starts = ((first, piece.rows.size, 2), (piece.kv_start, piece.keys.size, 3))
    return (..., *(slice(None) if bias.shape[dim] == 1 else slice(start, start + size) for start, size, dim in starts))


class Results(NamedTuple):
    out: Tensor
    lse: Tensor


COMPLETE, PARTIAL = SpecResults(), SpecResults(fp32_out=True)


def attend(call: Call, part: Part, scores: Scores, shared: Shared, sink: Tensor | None, is_partial: bool = False) -> Results:
    """Returns out and lse of a call's rows. sink: softmax_offset of all heads, only for the part that includes it.

    is_partial: whether out will be merged with others. It is then float32, except with FP8 or cuDNN.
    """
    arguments = arguments_of(call, scores, shared, part.q)
    if scores.fp8_call is not None:
        names = ("descale_q", "descale_k", "descale_v")
        arguments |= dict(zip(names, _descales(call, scores, shared, part), strict=False)) | {
            "fp8_recipe": scores.fp8_call.part_recipe
        }
    if sink is not None:
        arguments |= {"softmax_type": "learnable", "softmax_offset": sink}
    arguments["return_lse"] = True
    if scores.peaks is not None:
        arguments["return_max_logit"] = True
    in_fp32 = is_partial and scores.fp8_call is None and scores.gives_fp32
    out, lse, max_logit = in_layout.attend_with(PARTIAL if in_fp32 else COMPLETE, *part, arguments)
    assert lse is not None
    if scores.peaks is None or max_logit is None:
        return Results(out, lse)
    head_peaks = scores.peaks[scores.heads[0] : scores.heads[0] + max_logit.shape[0]]
    torch.maximum(head_peaks, max_logit, out=head_peaks)
    return Results(out, lse)


class Seeds(NamedTuple):
    """Gradients of a call's results. dout8 is dout in FP8, if its scales cover all ranks."""

    dout: Tensor
    dlse: Tensor | None
    dout8: Tensor | None = None

    def for_heads(self, heads: slice) -> Seeds:
        return Seeds(*(None if t is None else t[..., heads, :] for t in self))  # type: ignore[arg-type]

    def at(self, rows: Index) -> Seeds:
        """Returns the gradients for rows with this index in dout."""
        dout, dlse, dout8 = self
        return Seeds(dout[rows], None if dlse is None else dlse[lse_index(rows)], None if dout8 is None else dout8[rows])


class InputGradients(NamedTuple):
    """Gradients of q, k, v and the shared tensors."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    shared: list[Tensor | None]


@dataclass(frozen=True)
class Strategy:
    """A way to compute attention over ranks. The defaults are for one whose backward fetches keys again."""

    scores: Scores

    def gathered(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Returns the tensors that a backward needs besides results."""
        return q, k, v

    def gathered_results(self, results: Results) -> Results:
        """Returns the results as a backward needs them."""
        return results

    def forward(self, q: Tensor, k: Tensor, v: Tensor, shared: Shared) -> tuple[Results, tuple[Tensor, ...]]:
        """Returns out and lse of this rank's queries, and the tensors that a backward needs."""
        raise NotImplementedError

    def backward(self, saved: tuple[Tensor, ...], seeds: Seeds, shared: Shared) -> InputGradients:
        """Returns the gradients of this rank's q, k and v, and this rank's part of those of the shared tensors."""
        raise NotImplementedError


def differentiate(
    call: Call,
    part: Part,
    results: Results,
    seeds: Seeds,
    context: tuple[Scores, Shared],
    shared_sums: list[Tensor | None],
    fp32: Fp32Gradients,
) -> Gradients:
    """Returns the gradients of a call's rows, computed from the full out and lse in `results`.

    Adds the gradients of shared tensors to `shared_sums`. fp32: the gradients that others will be added to, one of
    `FP32_GRADIENTS`.
    """
    local, rows, _ = rows_of_call(call, part)
    scores, shared = context
    dout, dlse, dout8 = seeds.at(rows)
    leaves = shared._replace(mod_tensors=tuple(t.detach().requires_grad_(t.requires_grad) for t in shared.mod_tensors))
    bias = shared.bias
    if bias is not None:
        leaves = leaves._replace(bias=bias.detach().requires_grad_(bias.requires_grad))
    with torch.enable_grad():
        arguments = arguments_of(call, scores, leaves, local.q)
    operands = Given(dout, *local, results.out[rows], results.lse[lse_index(rows)], dlse)
    summed = scores.fp32_gradients(fp32)
    if scores.fp8_call is None:
        gradients = attention_backward(*operands[:-1], dlse=dlse, **arguments, fp32_gradients=summed)
    else:
        gradients = eight_bits.differentiate(
            operands, scores.fp8_call, _descales(call, scores, shared, local), dout8, arguments, summed
        )
    if gradients.dbias is not None and bias is not None and shared_sums[0] is not None:
        shared_sums[0][bias_index(bias, call.pieces[0], scores.has_own_rows)] += gradients.dbias
    for leaf, total in zip(leaves.mod_tensors, shared_sums[1:], strict=True):
        for captured, gradient in gradients.dcaptures:
            if captured is leaf and total is not None:
                total += gradient
    return gradients


def _descales(call: Call, scores: Scores, shared: Shared, part: Part) -> list[Tensor]:
    """Returns the descales of a call's tensors."""
    fp8_call, (first, heads) = scores.fp8_call, scores.heads
    assert fp8_call is not None
    count, count_kv = part.q.shape[-2], part.k.shape[-2]
    heads_q = heads_kv = None
    if (first, count) != (0, heads):
        indices = torch.arange(first, first + count, device=part.q.device)
        heads_q, heads_kv = indices, indices[:: count // count_kv] // (heads // scores.heads_kv)
    origin = call.origin
    if call.packing is None:
        longest_q, longest_kv = call.pieces[0].rows.size, call.pieces[0].keys.size
    else:
        longest_q, longest_kv = (call.packing[f"max_seqlen_{side}"] for side in ("q", "kv"))
    queries = eight_bits.Span(origin.document, origin.q_start, longest_q), heads_q
    keys = eight_bits.Span(origin.document, origin.kv_start, longest_kv), heads_kv
    sides, rows = (queries, keys, keys, queries), (fp8_call.recipe.rows, fp8_call.local_rows)
    return [eight_bits.local_descale(t, *side, rows) for t, side in zip(shared.descales, sides, strict=False)]


def offset_gradient(results: Results, seeds: Seeds, offset: Tensor, is_packed: bool) -> Tensor:
    """Returns a sink's gradient from this rank's rows: the sum of -exp(offset - lse) * (sum(out * dout) - dlse), by head."""
    dout, dlse, _ = seeds
    dtype = results.lse.dtype
    delta = (results.out.to(dtype) * dout.to(dtype)).sum(-1).transpose(-1, -2)  # [b, h, s] or [h, t], as lse
    if dlse is not None:
        delta = delta - dlse
    weight = torch.exp(offset.to(dtype).unsqueeze(-1) - results.lse)
    return -(weight * delta).sum(-1 if is_packed else (0, -1))


def empty_results(q: Tensor, dim_v: int, dtype: torch.dtype) -> Results:
    """Returns uninitialised out and lse for queries [b, s, h, d] or [t, h, d]."""
    lse = torch.empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=sum_dtype(q.dtype), device=q.device)
    return Results(torch.empty((*q.shape[:-1], dim_v), dtype=dtype, device=q.device), lse)


def add_sink(results: Results, offset: Tensor) -> Results:
    """Returns out and lse with a sink added to the denominator. The inputs must have none."""
    lse = torch.logaddexp(results.lse, offset.to(results.lse.dtype).unsqueeze(-1).expand_as(results.lse))
    share = torch.exp(results.lse - lse).transpose(-1, -2).unsqueeze(-1)
    return Results((results.out * share).to(results.out.dtype), lse)


def merge_into(results: Results, call: Call, out: Tensor, lse: Tensor) -> None:
    """Merges a call's out and lse into the results of its rows. Rows without a key have lse -inf."""
    index: Index = (*(() if call.packing is not None else (slice(None),)), slice(*call.rows))
    at = lse_index(index)
    fmt = "bshd" if call.packing is None else "thd"
    before = results.out[index], results.lse[at]
    merged = merge_attention(*before, out.to(results.out.dtype), lse, qkv_format=fmt)
    results.out[index], results.lse[at] = merged


@tables(None)
def _first_head(head: int, device: torch.device) -> Tensor:
    return torch.tensor(head, dtype=torch.int32, device="cpu").to(device)


def for_heads(scores: Scores, shared: Shared, heads: Run, device: torch.device) -> tuple[Scores, Shared]:
    """Returns the arguments and the shared tensors for some query heads. A call counts these heads from 0."""
    bias, slopes, offset = shared.bias, shared.alibi_slopes, shared.softmax_offset
    part = slice(*heads)
    if scores.score_mod is not None or scores.mask_mod is not None:
        first = _first_head(heads.start, device)
        mods = mod_of_heads(scores.score_mod, 1, first), mod_of_heads(scores.mask_mod, 0, first)
        scores = dataclasses.replace(scores, score_mod=mods[0], mask_mod=mods[1])
    scores = dataclasses.replace(scores, heads=(scores.heads[0] + heads.start, scores.heads[1]))
    restricted = shared._replace(
        bias=bias if bias is None or bias.shape[1] == 1 else bias[:, part].detach().requires_grad_(bias.requires_grad),
        alibi_slopes=None if slopes is None else slopes[..., part].contiguous(),
        softmax_offset=None if offset is None else offset[part].contiguous(),
    )
    return scores, restricted


def whole_gradients(gradients: list[Tensor | None], shared: Shared, heads: Run) -> list[Tensor | None]:
    """Returns the gradients of the shared tensors for all heads, from those of some heads. Other heads of the bias get zero."""
    dbias, *dmods = gradients
    if dbias is None or shared.bias is None or shared.bias.shape[1] == 1:
        return gradients
    whole = dbias.new_zeros(shared.bias.shape)
    whole[:, slice(*heads)] = dbias
    return [whole, *dmods]


class Calls(NamedTuple):
    """Calls of a part, with each query in at most one of them."""

    longest_first: tuple[Call, ...]
    left: Runs  # rows of q without a call
    beside: tuple[bool, ...]  # for each call, whether it runs on the side lane
    whole: int | None  # A call on the main lane with all rows of q. The other calls write their rows into its results.

    @classmethod
    def of(cls, calls: Sequence[Call], rows: int) -> Calls:
        longest = sorted(calls, key=lambda call: -sum(piece.rows.size * piece.keys.size for piece in call.pieces))
        left = tuple(without((Run(0, rows),), (run for call in calls for run in call.runs)))
        # The side lane runs the calls that fetch keys. If all calls do, it runs all calls but the longest.
        has_own = any(call.is_own for call in longest)
        beside = tuple(not call.is_own if has_own else n > 0 for n, call in enumerate(longest))
        have_all = (n for n, call in enumerate(longest) if call.rows == Run(0, rows) and not beside[n])
        return cls(tuple(longest), left, beside, next(have_all, None))

    def write(self, whole: Tensor, parts: Sequence[Tensor]) -> None:
        """Copies each call's rows of `parts` to `whole`, except for a part that is `whole` itself. See `self.whole`."""
        copy_all(
            [
                (whole[slice(*run)], part[run.start - call.rows.start : run.stop - call.rows.start])
                for call, part in zip(self.longest_first, parts, strict=True)
                if part.data_ptr() != whole.data_ptr()
                for run in call.runs
            ]
        )


def attend_all(
    calls: Calls, part: Part, context: tuple[Scores, Shared], lanes: Lanes, into: Results | None = None, own: Part | None = None
) -> Results:
    """Returns out and lse of all queries of a part. Each call includes the sink.

    lanes: calls run on the main or the side lane (`Calls.is_beside`), and copies on the back lane. into: tensors for the results;
    None: new ones. own: the part for calls on own keys.
    """
    scores, shared = context
    sink = shared.softmax_offset
    is_packed = part.q.dim() == 3
    lanes.fork()
    outputs: list[Results] = []
    for call, is_beside in zip(calls.longest_first, calls.beside, strict=True):
        with lanes.side() if is_beside else contextlib.nullcontext():
            outputs.append(attend(call, rows_of_call(call, part_of(call, part, own))[0], scores, shared, sink))
    if into is not None:
        results = into
    elif calls.whole is not None:
        results = outputs[calls.whole]
    else:
        results = empty_results(part.q, part.v.shape[-1], scores.out_dtype(part.q))
    rows = tokens_first(results.out, is_packed)
    lanes.meet()
    with lanes.back():
        for run in calls.left:
            rows[slice(*run)].zero_()
            lse = results.lse[..., slice(*run)]
            lse.fill_(float("-inf")) if sink is None else lse.copy_(sink.to(lse.dtype).unsqueeze(-1).expand_as(lse))
        calls.write(rows, [tokens_first(out, is_packed) for out, _ in outputs])
        calls.write(results.lse.movedim(-1, 0), [lse.movedim(-1, 0) for _, lse in outputs])
        lanes.keep(part.k, part.v, *(t for both in outputs for t in both))
    return results


class CallGradients(NamedTuple):
    """Gradients of each call of a part, for its queries and keys, with tokens first (`tokens_first`).

    kept: tensors that other lanes read. Their memory must not be reused before that.
    """

    dq: list[Tensor]
    dk: list[Tensor]
    dv: list[Tensor]
    shared: list[Tensor | None]
    kept: tuple[Tensor, ...]

    def write_dq(self, calls: Calls, dq: Tensor) -> None:
        """Writes the gradient of all queries, tokens first. dq may be that of `calls.whole`. Rows without a call become 0."""
        for run in calls.left:
            dq[slice(*run)].zero_()
        calls.write(dq, self.dq)


def part_of(call: Call, part: Part, own: Part | None) -> Part:
    """Returns the part from which a call takes its rows."""
    return own if own is not None and call.is_own else part


def differentiate_all(
    calls: Calls,
    part: Part,
    results: Results,
    seeds: Seeds,
    context: tuple[Scores, Shared],
    lanes: Lanes,
    fp32: Sequence[Fp32Gradients],
    own: Part | None = None,
) -> CallGradients:
    """Returns the gradients of `attend_all`, except for the sink, on the same lanes. The back lane may use them next.

    fp32: as in `differentiate`, for each call. own: as in `attend_all`.
    """
    shared_sums, is_packed = context[1].zeros(), part.q.dim() == 3
    lanes.fork()
    gradients: list[Gradients] = []
    for i, call in enumerate(calls.longest_first):
        with lanes.side() if calls.beside[i] else contextlib.nullcontext():
            gradients.append(differentiate(call, part_of(call, part, own), results, seeds, context, shared_sums, fp32[i]))
    lanes.meet()
    dense = [[tokens_first(t, is_packed) for t in (g.dq, g.dk, g.dv)] for g in gradients]
    dq, dk, dv = ([tensors[i] for tensors in dense] for i in range(3))
    return CallGradients(dq, dk, dv, shared_sums, (part.k, part.v, *dq, *dk, *dv))


def tokens_first(t: Tensor, is_packed: bool) -> Tensor:
    """Returns a view of [b, s, h, d] with the tokens first, [s, b, h, d], or the reverse. Packed tensors, [t, h, d], stay."""
    return t if is_packed else t.transpose(0, 1)


def concatenate_kv(k: Tensor, v: Tensor, is_packed: bool) -> Tensor:
    """Returns k and v in one contiguous tensor, tokens first: [s, b, h, d + d_v] or [t, h, d + d_v]."""
    return torch.cat((k, v) if is_packed else (k.transpose(0, 1), v.transpose(0, 1)), -1)


def split_kv(kv: Tensor, dim: int, is_packed: bool) -> tuple[Tensor, Tensor]:
    """Returns views of k and v in a tensor of `concatenate_kv`. dim: the head dim of k."""
    kv = kv if is_packed else kv.transpose(0, 1)
    return kv[..., :dim], kv[..., dim:]
