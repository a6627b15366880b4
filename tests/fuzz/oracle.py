"""The meaning of attention(), written a second time from docs/semantics.md: dense, in fp64, with nothing of the library in it.

Every sequence is laid into a rectangle [b, h, sq, skv] by a table of its tokens, and torch's autograd makes the gradients. `exact`
is the truth; `plain` does the same in the call's own dtype, rounded after each step as eager code does: its error is the budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# Masks of large finite numbers leave scores beyond this. The softmax is defined in float32, which cannot hold their differences as
# float64 does, so the oracle rounds them to it before an exact softmax. Smaller ones stay: a rounding does little there.
LARGE = 2.0**13
LONE = 2.0**11
FARTHEST = 104.0  # distance from a row's largest score at which exp is 0 in float32
NEG_INF = float("-inf")
WORD = 0xFFFFFFFF


class Side(NamedTuple):
    """The sequences of a tensor in format `fmt`."""

    fmt: str
    starts: Sequence[int]  # the first token of each: in thd along its tokens, else along b * s
    lengths: Sequence[int]


class Problem(NamedTuple):
    """The arguments of a call of attention() that are not tensors."""

    q: Side
    kv: Side
    mask_type: str
    window: tuple[int | None, int | None]  # None for open
    bottom_right_diagonal: bool | None
    bias_type: str
    softmax_type: str
    scale: float
    softcap: float
    dropout_p: float
    rng_state: tuple[int, int]
    score_mod: Callable[[dict[str, Tensor]], Callable[..., Tensor]] | None  # of the captures, to be called with whole index tensors
    mask_mod: Callable[[dict[str, Tensor]], Callable[..., Tensor]] | None
    is_extreme: bool  # scores beyond LARGE may come up


SIGNS = 4  # draws of the signs of errors


class Result(NamedTuple):
    out: Tensor
    lse: Tensor
    max_logit: Tensor
    gradients: dict[str, Tensor]
    dscore: Tensor  # the largest gradient of a score, by magnitude
    num_scores: int
    is_level: Tensor  # bool, shaped like lse: the row's largest score is beyond LARGE, and the others equal it or are far from it
    is_rounded: Tensor  # bool, shaped like lse: out is not the value of a single key, which a 16-bit dtype holds exactly
    is_vague: Tensor  # bool, shaped like lse: it is beyond LARGE, and others are so near that a rounding decides
    largest: Tensor  # the largest score of each of the other rows: the largest of these, by magnitude
    noise: dict[str, Tensor]  # the errors of gradients, of v's none, that errors of delta make, one a row
    statistics: dict[str, Tensor]  # of the weights before dropout, by their names in AuxOutput; row_weights if `rows` is a tensor


Rounding = Callable[[Tensor], Tensor]


def exact(
    problem: Problem,
    tensors: dict[str, Tensor],
    dout: Tensor | None,
    dlse: Tensor | None,
    wanted: Sequence[str],
    delta_errors: Callable[[Result], Tensor] | None = None,
) -> Result:
    """Returns the results in float64. tensors: by their names in attention(), or their own names if mods capture them.

    delta_errors: returns an error of delta for each row, shaped like lse, of which `noise` is made.
    """
    is_rounded = problem.is_extreme and tensors["q"].dtype is not torch.float64

    def rounding(x: Tensor) -> Tensor:
        return torch.where(x.abs() > LARGE, x.float().double(), x) if is_rounded else x

    return _results(problem, tensors, dout, dlse, wanted, torch.float64, rounding, delta_errors)


def plain(problem: Problem, tensors: dict[str, Tensor], dout: Tensor | None, dlse: Tensor | None, wanted: Sequence[str]) -> Result:
    """Returns the results in the dtype of q; large scores are in float32, because 16 bits cannot hold them."""
    dtype = tensors["q"].dtype
    if dtype not in (torch.float16, torch.bfloat16):
        return _results(problem, tensors, dout, dlse, wanted, dtype, lambda x: x)

    def rounding(x: Tensor) -> Tensor:
        rounded = x.to(dtype).float()  # and so is the gradient that comes back
        return torch.where(x.abs() > LARGE, x, rounded) if problem.is_extreme else rounded

    return _results(problem, tensors, dout, dlse, wanted, torch.float32, rounding)


class Twice(NamedTuple):
    """Tangents of out and lse, and derivatives of <along, gradients> for the tensors, by name."""

    found: dict[str, Tensor]
    size: Tensor  # the largest of the scores' gradients and tangents, and of products of both
    noise: dict[str, Tensor]  # the errors of the tensors' derivatives that errors of delta and of its tangent make, one a row


def twice(
    problem: Problem,
    tensors: dict[str, Tensor],
    dout: Tensor | None,
    dlse: Tensor | None,
    along: dict[str, Tensor],
    is_exact: bool,
    delta_errors: Callable[[Result, Tensor], tuple[Tensor, Tensor]] | None = None,
) -> Twice:
    """Returns derivatives along tangents of the tensors, in float64 or as `plain` computes. The double backward of autograd.

    delta_errors: returns an error of delta and one of its tangent for each row, shaped like lse, of which `noise` is made. It
    receives the result and the tangent of out.
    """
    own = tensors["q"].dtype
    dtype = torch.float64 if is_exact else torch.float32 if own in (torch.float16, torch.bfloat16) else own
    rounding: Rounding = (lambda x: x.to(own).float()) if not is_exact and dtype is not own else lambda x: x
    leaves = {name: t.detach().to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
    leaves = {name: t.clone().requires_grad_() if name in along else t for name, t in leaves.items()}
    result, scores, is_real = _attend(problem, leaves, dtype, rounding)
    shape = tensors["q"].shape
    seeds = []
    for output, seed, as_output in ((result.out, dout, _to_format), (result.lse, dlse, _to_lse_format)):
        zeros = torch.zeros_like(output)
        given = zeros if seed is None else torch.where(as_output(is_real, problem.q, shape), seed.to(dtype), 0.0)
        seeds.append(given.detach().requires_grad_())
    sources, tangents = [leaves[name] for name in along], [t.to(dtype).nan_to_num(0.0) for t in along.values()]
    outputs = [(t, seed) for t, seed in zip((result.out, result.lse), seeds, strict=True) if t.requires_grad]
    names, every = ("out", "lse", *along), [*seeds, *sources]
    found: Sequence[Tensor] = [torch.zeros_like(t) for t in every]
    size = torch.zeros((), dtype=torch.float64, device=scores.device)
    if outputs:
        results, given_seeds = ([pair[i] for pair in outputs] for i in (0, 1))
        wanted = [*sources, *([scores] if scores.requires_grad else [])]
        gradients = torch.autograd.grad(results, wanted, given_seeds, create_graph=True, allow_unused=True, materialize_grads=True)
        pairs = [(g, t) for g, t in zip(gradients, tangents, strict=False) if g.requires_grad]
        if pairs:
            more = [scores] if scores.requires_grad else []
            found = torch.autograd.grad(
                [g for g, _ in pairs],
                [*every, *more],
                [t for _, t in pairs],
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
        sizes = [t.detach().abs().amax().double() for t in (*found, *gradients[len(sources) :]) if t.numel()]
        size = torch.stack([*sizes, size]).amax()
    noise: dict[str, Tensor] = {}
    if is_exact and delta_errors is not None and along and result.lse.requires_grad:
        is_row, used = _to_lse_format(is_real, problem.q, shape), {name: leaves[name] for name in along}
        first_errors, second_errors = (torch.where(is_row, t, 0.0) for t in delta_errors(result, found[0].detach()))
        noise = _noise(result.lse, used, second_errors)
        for name, t in _noise(result.lse, used, first_errors, tangents).items():
            noise[name] = noise.get(name, 0.0) + t
    return Twice({name: t.detach() for name, t in zip(names, found, strict=False)}, size, noise)


def _results(
    problem: Problem,
    tensors: dict[str, Tensor],
    dout: Tensor | None,
    dlse: Tensor | None,
    wanted: Sequence[str],
    dtype: torch.dtype,
    rounding: Rounding,
    delta_errors: Callable[[Result], Tensor] | None = None,
) -> Result:
    leaves = {name: t.detach().to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
    leaves = {name: t.clone().requires_grad_() if name in wanted else t for name, t in leaves.items()}
    result, scores, is_real = _attend(problem, leaves, dtype, rounding)
    outputs, seeds = [], []
    for output, seed, as_output in ((result.out, dout, _to_format), (result.lse, dlse, _to_lse_format)):
        if seed is not None and output.requires_grad:
            outputs.append(output)
            seeds.append(torch.where(as_output(is_real, problem.q, tensors["q"].shape), seed.to(dtype), 0.0))
    sources = [scores, *(leaves[name] for name in wanted)] if scores.requires_grad else [leaves[name] for name in wanted]
    found: Sequence[Tensor | None] = [None] * len(sources)
    if delta_errors is not None and wanted and result.lse.requires_grad:
        errors = torch.where(_to_lse_format(is_real, problem.q, tensors["q"].shape), delta_errors(result), 0.0)
        result = result._replace(noise=_noise(result.lse, {name: leaves[name] for name in wanted}, errors))
    if outputs and sources:
        found = torch.autograd.grad(outputs, sources, seeds, allow_unused=True)
    zeros = [torch.zeros_like(source) if gradient is None else gradient for source, gradient in zip(sources, found, strict=True)]
    dscore = zeros[0].abs().amax() if scores.requires_grad and scores.numel() else result.dscore
    gradients = dict(zip(wanted, zeros[len(zeros) - len(wanted) :], strict=True))
    return result._replace(out=result.out.detach(), lse=result.lse.detach(), gradients=gradients, dscore=dscore)


def _noise(lse: Tensor, leaves: dict[str, Tensor], errors: Tensor, along: Sequence[Tensor] = ()) -> dict[str, Tensor]:
    """Returns the errors of gradients that errors of delta, one a row, make: of p * (dp - delta), as a gradient of lse does.

    The signs of errors are independent. With one draw of them, those of a few rows may cancel, so each number is the largest of
    several draws. The first has the given signs. along: tangents of the leaves, along which the errors' derivatives are returned.
    """
    generator = torch.Generator(errors.device).manual_seed(0)
    draws = [torch.randint(0, 2, errors.shape, generator=generator, device=errors.device) * 2 - 1 for _ in range(SIGNS - 1)]
    found = [_made_by(lse, [*leaves.values()], errors * signs, along) for signs in (1, *draws)]
    by_leaf = zip(leaves, zip(*found, strict=True), strict=True)
    return {name: torch.stack([t.abs() for t in drawn]).amax(0) for name, drawn in by_leaf if drawn[0] is not None}


def _made_by(lse: Tensor, leaves: list[Tensor], errors: Tensor, along: Sequence[Tensor]) -> Sequence[Tensor | None]:
    found = torch.autograd.grad(lse, leaves, errors, retain_graph=True, create_graph=bool(along), allow_unused=True)
    if not along:
        return found
    total = sum(((g * t).sum() for g, t in zip(found, along, strict=True) if g is not None), start=errors.new_zeros(()))
    if not total.requires_grad:
        return [None] * len(leaves)
    return torch.autograd.grad(total, leaves, retain_graph=True, allow_unused=True)


def _attend(p: Problem, x: dict[str, Tensor], dtype: torch.dtype, rounding: Rounding) -> tuple[Result, Tensor, Tensor]:
    """The result without gradients, the scores, and which rows of q are tokens of a sequence, [t, 1, 1]."""
    q, q_rows, q_real = _rectangle(x["q"], p.q)
    k, kv_rows, kv_real = _rectangle(x["k"], p.kv)
    v, _, _ = _rectangle(x["v"], p.kv)
    batch, heads, sq, _ = q.shape
    skv, device = k.shape[2], q.device
    k, v = (t.repeat_interleave(heads // t.shape[1], 1) for t in (k, v))
    b = torch.arange(batch, device=device)[:, None, None, None]
    h = torch.arange(heads, device=device)[:, None, None]
    i, j = torch.arange(sq, device=device)[:, None], torch.arange(skv, device=device)

    causal = "causal" in p.mask_type
    bottom_right = p.mask_type not in ("causal", "padding_causal") if p.bottom_right_diagonal is None else p.bottom_right_diagonal
    shifts = [n_kv - n_q if bottom_right else 0 for n_q, n_kv in zip(p.q.lengths, p.kv.lengths, strict=True)]
    diagonal = i + torch.tensor(shifts, dtype=torch.int64).to(device, non_blocking=True)[:, None, None, None]
    left, right = p.window
    right = 0 if causal and right is None else right
    visible = (q_real[:, None, :, None] & kv_real[:, None, None, :]).expand(batch, heads, sq, skv)
    if left is not None:
        visible = visible & (j >= diagonal - min(left, sq + skv))
    if right is not None:
        visible = visible & (j <= diagonal + min(right, sq + skv))
    if p.mask_mod is not None:
        visible = visible & p.mask_mod(x)(b, h, i, j)

    if "kv_indices" in x:
        visible = visible & _listed(x["kv_indices"], q_rows, p.q.fmt, heads, skv)

    bias = _fitted(x["bias"], batch, sq, skv) if "bias" in x else None
    s = rounding(torch.einsum("bhid,bhjd->bhij", q, k))
    if p.bias_type == "pre_scale_bias":
        s = rounding(s + bias)
    s = rounding(s * p.scale)
    if p.softcap:
        s = rounding(p.softcap * torch.tanh(s / p.softcap))
    if p.score_mod is not None:
        s = rounding(p.score_mod(x)(s, b, h, i, j).to(dtype).expand(s.shape))
    if p.bias_type == "post_scale_bias":
        s = rounding(s + bias)
    if p.bias_type == "alibi":
        slopes = x["alibi_slopes"] if "alibi_slopes" in x else torch.tensor(press_slopes(heads), device=device)
        s = rounding(s - rounding(slopes.to(dtype)[..., None, None] * (j - diagonal).abs()))
    scores, s = s, s.masked_fill(~visible, NEG_INF)

    row_max = s.detach().amax(-1)
    peak, sink = row_max, None
    if p.softmax_type != "vanilla":
        sink = x["softmax_offset"] if p.softmax_type == "learnable" else torch.zeros(heads, dtype=dtype, device=device)
        sink = sink[:, None].expand(heads, sq)
        peak = torch.maximum(row_max, sink.detach())
    origin = peak.masked_fill(peak == NEG_INF, 0.0)
    weights = torch.exp(s - origin[..., None])
    total = weights.sum(-1) + (0.0 if sink is None else torch.exp(sink - origin))
    is_blind = total == 0
    total = total.masked_fill(is_blind, 1.0)
    lse = (origin + torch.log(total)).masked_fill(is_blind, NEG_INF)
    shares = rounding(weights / total[..., None])
    statistics = _statistics(x, shares.detach(), row_max, (p, q_rows, kv_rows))
    if p.dropout_p:
        probability = round(p.dropout_p * 65536) / 65536
        kept = dropout_keeps(p.rng_state, probability, batch, heads, sq, skv, device)
        shares = rounding(shares.masked_fill(~kept, 0.0) / (1 - probability))
    out = rounding(torch.einsum("bhij,bhjd->bhid", shares, v))

    size = origin.abs()
    is_large = (size > LARGE) & (peak == row_max)
    # Kernels multiply by log2(e) and round again: what is some roundings from the largest score may become equal to it. And where a
    # score_mod computes with large scores, equal ones may become unequal: torch's vectorised sigmoid, say, rounds otherwise than
    # the one that it takes for the last elements of a tensor.
    is_below = s < row_max[..., None]
    may_part = p.score_mod is not None and p.bias_type == "pre_scale_bias"
    others = (s > NEG_INF) if may_part else is_below
    near = (others & (s > (row_max - size * 2.0**-19)[..., None])).sum(-1) > (1 if may_part else 0)
    counts = (is_below & (s > row_max[..., None] - FARTHEST)).any(-1)  # a weight that a rounding of the scores moves
    largest = torch.cat([size.masked_fill(is_large & ~counts, 0.0).flatten(), size.new_zeros(1)]).max()

    # A lone weight is 1, unless its score is so large that log2(e) times it is rounded by more than a half type would hide.
    is_rounded = ((shares.detach() != 0) & (shares.detach() != 1)).any(-1) | (size > LONE)

    total_q = _rows(x["q"], p.q.fmt).shape[0]
    lse, is_rounded, is_level, is_vague = (
        _to_lse_format(_scattered(t.permute(0, 2, 1)[..., None], q_rows, total_q, fill), p.q, x["q"].shape)
        for t, fill in ((lse, NEG_INF), (is_rounded, False), (is_large & ~near, False), (is_large & near, False))
    )
    out = _to_format(_scattered(out.permute(0, 2, 1, 3), q_rows, total_q, 0.0), p.q, x["q"].shape)
    is_real = _scattered(q_real[..., None, None], q_rows, total_q, False)
    max_logit = row_max.amax((0, 2)) if batch else row_max.new_full((heads,), NEG_INF)
    return (
        Result(out, lse, max_logit, {}, size.new_zeros(()), s.numel(), is_level, is_rounded, is_vague, largest, {}, statistics),
        scores,
        is_real,
    )


def _statistics(x: dict[str, Tensor], shares: Tensor, row_max: Tensor, places: tuple[Problem, Tensor, Tensor]) -> dict[str, Tensor]:
    """The statistics in the formats of their tensors. shares: the weights [b, h, sq, skv]."""
    p, q_rows, kv_rows = places
    entropy, columns = -torch.xlogy(shares, shares).sum(-1), shares.sum(2)
    found = {}
    for name, t, numbers, (side, tensor), fill in (
        ("max_scores", row_max, q_rows, (p.q, x["q"]), NEG_INF),
        ("entropy", entropy, q_rows, (p.q, x["q"]), 0.0),
        ("column_sums", columns, kv_rows, (p.kv, x["k"]), 0.0),
    ):
        rows = _scattered(t.permute(0, 2, 1)[..., None], numbers, _rows(tensor, side.fmt).shape[0], fill)
        found[name] = _to_lse_format(rows, side, tensor.shape)
    if "rows" in x:
        own = x["rows"].long().expand(shares.shape[0], -1)
        lengths = torch.tensor(p.q.lengths, device=own.device).view(-1, 1)
        is_query = (own >= 0) & (own < lengths)
        place = torch.where(is_query, own, 0)[:, None, :, None].expand(-1, shares.shape[1], -1, shares.shape[3])
        found["row_weights"] = shares.gather(2, place).masked_fill(~is_query[:, None, :, None], 0.0)
    return found


def _listed(lists: Tensor, q_rows: Tensor, fmt: str, heads: int, skv: int) -> Tensor:
    """Whether a query's list has a key, [b, h, sq, skv]. lists: [b, s, n] or [b, s, h_kv, n], in thd [t, n] or [t, h_kv, n]."""
    rows = lists if fmt == "thd" else lists.flatten(0, 1)
    rows = rows[:, None] if rows.dim() == 2 else rows
    rows = torch.cat([rows, rows.new_full((1, *rows.shape[1:]), -1)])
    own = rows[q_rows].permute(0, 2, 1, 3).long()  # [b, 1 or h_kv, sq, n]
    is_key = (own >= 0) & (own < skv)
    seen = torch.zeros((*own.shape[:-1], skv + 1), dtype=torch.bool, device=own.device)
    seen.scatter_(-1, torch.where(is_key, own, skv), True)
    return seen[..., :skv].repeat_interleave(heads // own.shape[1], 1)


def press_slopes(heads: int) -> list[float]:
    """ALiBi's slopes as Press et al. (2022) give them, in the code of their paper's appendix."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8.0 * (n + 1) / power) for n in range(power)]
    return slopes if power == heads else slopes + press_slopes(2 * power)[0::2][: heads - power]


def dropout_keeps(
    rng_state: tuple[int, int], probability: float, batch: int, heads: int, sq: int, skv: int, device: torch.device
) -> Tensor:
    """Returns the kept weights, bool [b, h, sq, skv], by the definition in docs/semantics.md (Dropout and rng_state)."""
    seed, offset = rng_state
    groups = torch.arange(-(-skv // 8), device=device)
    rows = torch.arange(sq, device=device)[:, None]
    head_numbers = torch.arange(batch * heads, device=device).view(batch, heads, 1, 1)
    counter = torch.broadcast_tensors(groups, rows, head_numbers, torch.tensor(offset & WORD, device=device))
    words = philox((seed & WORD, seed >> 32 & WORD), counter)  # of eight keys: each word is a pair's
    drawn = torch.stack([(words & 0xFFFF) * 65536, words], -1).flatten(-3)[..., :skv]
    return drawn >= int(probability * 2**32)


def philox(key: tuple[int, int], counter: Sequence[Tensor]) -> Tensor:
    """Four words [..., 4] of Philox4x32 with 7 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011)."""
    k, c = list(key), list(counter)
    for _ in range(7):
        high0, low0 = _product(0xD2511F53, c[0])
        high1, low1 = _product(0xCD9E8D57, c[2])
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [k[0] + 0x9E3779B9 & WORD, k[1] + 0xBB67AE85 & WORD]
    return torch.stack(c, -1)


def _product(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """The high and the low word of a product of two words, in halves so that none of it passes 63 bits."""
    high = (b >> 16) * a + ((b & 0xFFFF) * a >> 16)
    return high >> 16, (high << 16 | (b & 0xFFFF) * a & 0xFFFF) & WORD


def _rectangle(x: Tensor, side: Side) -> tuple[Tensor, Tensor, Tensor]:
    """Returns sequences [b, h, s, d] with zeros after their ends, the row of each token [b, s], and whether it is a token [b, s].

    s is at least 1.
    """
    rows = _rows(x, side.fmt)
    longest = max(1, *side.lengths) if side.lengths else 1
    numbers = torch.tensor(
        [
            [start + n if n < length else len(rows) for n in range(longest)]
            for start, length in zip(side.starts, side.lengths, strict=True)
        ],
        dtype=torch.int64,
    ).view(len(side.lengths), longest)
    numbers = numbers.to(x.device, non_blocking=True)
    rows = torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])
    return (
        rows.index_select(0, numbers.flatten()).view(*numbers.shape, *rows.shape[1:]).permute(0, 2, 1, 3),
        numbers,
        numbers < len(rows) - 1,
    )


def _scattered(t: Tensor, numbers: Tensor, total: int, fill: float) -> Tensor:
    """Returns the rows [total, h, d] of a rectangle [b, s, h, d]. A row that belongs to no sequence is `fill`."""
    rows = torch.full((total + 1, *t.shape[2:]), fill, dtype=t.dtype, device=t.device)
    return rows.index_copy(0, numbers.flatten(), t.flatten(0, 1))[:total]


def _rows(x: Tensor, fmt: str) -> Tensor:
    """[t, h, d]"""
    if fmt == "thd":
        return x
    return x.permute([fmt.index(dim) for dim in "bshd"]).flatten(0, 1)


def _to_format(rows: Tensor, side: Side, shape: torch.Size) -> Tensor:
    """[t, h, d] in the format of a tensor of this shape."""
    if side.fmt == "thd":
        return rows
    sizes = [shape[side.fmt.index(dim)] for dim in "bs"]
    return rows.view(*sizes, *rows.shape[1:]).permute(["bshd".index(dim) for dim in side.fmt])


def _to_lse_format(rows: Tensor, side: Side, shape: torch.Size) -> Tensor:
    """[b, h, s], or [h, t] for thd, of rows [t, h, 1]; shape: that of q."""
    in_format = _to_format(rows, side, shape)
    return in_format[..., 0].T if side.fmt == "thd" else in_format[..., 0].permute([side.fmt.index(dim) for dim in "bhs"])


def _fitted(bias: Tensor, batch: int, sq: int, skv: int) -> Tensor:
    """Cut, or filled with zeros that no token meets, to the rectangle's size; a dim of 1 stays. Shared entries are repeated."""
    if bias.shape[0] not in (1, batch):
        bias = bias.repeat_interleave(batch // bias.shape[0], 0)
    for dim, size in ((2, sq), (3, skv)):
        if bias.shape[dim] != 1:
            bias = bias.narrow(dim, 0, min(size, bias.shape[dim]))
            missing = size - bias.shape[dim]
            bias = torch.cat([bias, bias.new_zeros([missing if n == dim else have for n, have in enumerate(bias.shape)])], dim)
    return bias
