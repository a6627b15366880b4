"""The launchers: attention forward and backward on cuDNN, with all that cuDNN leaves to its caller.

cuDNN reads the padding of dense tensors, where a NaN spreads, leaves that of packed ones unwritten, and promises nothing for a
query that sees no key. So padding is read from copies in which it is 0, and what belongs to no sequence or sees no key is written
after cuDNN. A dense problem without such queries runs with no operation but cuDNN's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import cudnn
import torch
from torch import Tensor

from flexattn.kernels_cudnn.execute import execute, host_scalar
from flexattn.kernels_cudnn.graphs import (
    FIRST_INPUT,
    Fp8,
    ModInput,
    Pages,
    Sdpa,
    Uid,
    frame_layout,
    frame_numbers,
    frame_uids,
    is_in_memory,
)
from flexattn.kernels_cudnn.lengths import Side, blind_queries, blind_rows, hidden_tokens, page_table, queries_with_keys, sides
from flexattn.kernels_cudnn.mod_nodes import BLIND
from flexattn.kernels_cudnn.plans import PLANS
from flexattn.kernels_cudnn.problem import (
    Problem,
    bias_strides,
    empty_aligned_rows,
    has_alignment,
    has_fixed_strides,
    round_up_length,
    token_strides,
)

NEG_INF = float("-inf")
NEVER = 1e30  # the lse of a query that sees nothing: exp(score - lse) is then 0 for any score, -inf included
READS_NO_RAGGED_PADDING = {91900}  # versions that were seen to leave it alone, on an NVIDIA H200: there nothing is copied
READS_NO_PAGE_PADDING: set[int] = set()  # likewise of rows of pages past a sequence's keys, which hold anything
KEY_TILE = 128  # keys in a tile of cuDNN's backward; one that is not full needs a padding mask


class Call(NamedTuple):
    """A problem ready to run: what its plan is compiled for, what that plan reads and writes, and what is left to do after it."""

    sdpa: Sdpa
    buffers: dict[int, Tensor]
    finish: Callable[[], None]


class Written(NamedTuple):
    """Outputs of a backward: gradients laid out as q, k and v, and where they are wanted those of the bias and softmax_offset."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None = None
    dsoftmax_offset: Tensor | None = None  # fp32 [h]


class Padding(NamedTuple):
    """Returns the tokens that there is nothing to read from, bool [b, s] or [total]; None without padding."""

    q: Tensor | None  # in no sequence
    kv: Tensor | None  # in no sequence, or in one without queries
    blind: Tensor | None  # in no sequence, or seeing no key
    is_read: bool  # cuDNN may read it


def attention_forward(
    problem: Problem, out: Tensor, lse: Tensor, max_logit: Tensor | None = None, directory: str | None = None
) -> None:
    """Write out, laid out as q with v's head dim, lse, fp32 [b, h, sq] or [h, total_q], and max_logit, None or fp32 [h].

    `directory` is where plans are kept between processes.

    Raises PlanNotSupported where cuDNN has no plan for the problem, before anything is written.
    """
    if problem.is_empty:
        write_empty(problem, out, lse, max_logit)
    else:
        run(forward_call(problem, out, lse, max_logit), out.device, directory)


def attention_backward(
    problem: Problem,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    gradients: Written,
    directory: str | None = None,
) -> None:
    """Write the gradients.

    `out` and `lse` are the forward's, whichever kernel it was; `dout` is laid out as `out` in any view. Raises as
    `attention_forward` does.
    """
    if problem.is_empty:
        for gradient in gradients:
            if gradient is not None:
                gradient.zero_()
    else:
        run(backward_call(problem, out, lse, dout, gradients), out.device, directory)


def forward_call(
    problem: Problem, out: Tensor, lse: Tensor, max_logit: Tensor | None = None, numbers: dict[Uid, Tensor] | None = None
) -> Call:
    """Returns the plan and buffers that `attention_forward` runs; with tensors on the meta device, the plan that it would need.

    `numbers` are the scales and maxima of an FP8 plan.
    """
    x = problem
    side_q, side_kv = sides(x, _has_lengths(x, is_backward=False))
    padding = _padding(x, side_q, side_kv)
    unread_q = padding.q if x.is_fp8 else None  # what is read there is in the maximum of out
    unread_kv = padding.kv if padding.is_read else None
    q, k, v = _readable(x, x.q, unread_q), x.k, x.v
    if x.page_table is None:
        k, v = _readable(x, k, unread_kv), _readable(x, v, unread_kv)
    written, stats = _writable(x, out), _statistics(x, lse)
    buffers: dict[int, Tensor] = {Uid.Q: q, Uid.K: k, Uid.V: v, Uid.OUT: written, **(numbers or {})}
    if max_logit is None:
        buffers[Uid.STATS] = stats
    else:
        buffers |= {Uid.MAX: stats, Uid.SUM_EXP: torch.empty_like(stats)}
    sdpa = _describe(x, "forward", buffers, side_q, side_kv)._replace(wants_max=max_logit is not None)

    def finish() -> None:
        lse_of, stats_of = _by_token(lse), stats if x.is_ragged else _by_token(stats)
        if max_logit is not None:
            sums = buffers[Uid.SUM_EXP]
            _hide(x, stats_of, padding.blind, NEG_INF)
            if x.mods is not None:
                stats_of.masked_fill_(stats_of < BLIND, NEG_INF)
            torch.amax(stats_of.flatten(0, -2), 0, out=max_logit)
            lse_of.copy_(stats_of + (sums if x.is_ragged else _by_token(sums)).log())
        elif x.is_ragged:
            lse_of.copy_(stats_of)
        if written is not out:
            out.copy_(written)
        if x.mods is not None:  # which queries see no key, only the mods know
            blind = lse_of < BLIND
            lse_of.masked_fill_(blind, NEG_INF)
            out.masked_fill_(blind[..., None], 0.0)
        _hide(x, out, padding.blind)
        _hide(x, lse_of, padding.blind, _sink(x) if x.has_sink else NEG_INF)
        if x.has_sink and padding.q is not None:
            lse_of.masked_fill_(padding.q[..., None], NEG_INF)

    return Call(sdpa, buffers, finish)


def backward_call(
    problem: Problem,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    gradients: Written,
    numbers: dict[Uid, Tensor] | None = None,
) -> Call:
    """Returns the same for `attention_backward`."""
    x = problem
    dq, dk, dv, dbias, dsoftmax_offset = gradients
    side_q, side_kv = sides(x, _has_lengths(x, is_backward=True))
    padding = _padding(x, side_q, side_kv)
    unread_q, unread_kv = (padding.blind, padding.kv) if padding.is_read else (None, None)
    q, k, v = (_dense_rows(t) for t in (x.q, x.k, x.v))
    out = _readable(x, _dense_rows(out))
    dout = _readable(x, dout, unread_q)
    if dout.stride() != out.stride() and not x.is_fp8:  # so that there is one plan, whichever view comes in
        dout = torch.empty_like(out).copy_(dout)
    buffers: dict[int, Tensor] = {
        Uid.Q: _readable(x, q, unread_q),
        Uid.K: _readable(x, k, unread_kv),
        Uid.V: _readable(x, v, unread_kv),
        Uid.OUT: out,
        Uid.DOUT: dout,
        Uid.STATS: _readable_statistics(x, lse, padding.blind),
        **(numbers or {}),
    }
    targets = {Uid.DQ: dq, Uid.DK: dk, Uid.DV: dv}
    written = {uid: _writable(x, target) for uid, target in targets.items()}
    buffers |= written
    if dbias is not None:
        targets[Uid.DBIAS] = dbias
        # cuDNN writes it in the dtype of q and compact, or not at all.
        written[Uid.DBIAS] = buffers[Uid.DBIAS] = torch.empty_like(dbias, dtype=x.q.dtype, memory_format=torch.contiguous_format)
    if dsoftmax_offset is not None:
        buffers[Uid.DSINK] = dsoftmax_offset
    elif x.has_sink:
        buffers[Uid.DSINK] = torch.empty(x.num_heads, dtype=torch.float32, device=dq.device)
    sdpa = _describe(x, "backward", buffers, side_q, side_kv)

    def finish() -> None:
        for uid, target in targets.items():
            if written[uid] is not target:
                target.copy_(written[uid])
        _hide(x, dq, padding.blind)
        if padding.kv is not None:
            for target in (dk, dv):
                _zero(target, padding.kv[..., None, None])

    return Call(sdpa, buffers, finish)


def run(call: Call, device: torch.device, directory: str | None) -> None:
    execute(PLANS.get(call.sdpa, device, directory), call.buffers, device)
    call.finish()


def _describe(x: Problem, direction: str, buffers: dict[int, Tensor], side_q: Side, side_kv: Side) -> Sdpa:
    """Returns what the plan is compiled for, from its tensors; adds to `buffers` those that turn scores into weights."""
    batch, len_q, len_kv = x.sizes
    is_backward = direction == "backward"
    if x.is_fp8:  # a tile of queries without a key never ends there (cudnn-frontend issue 1009)
        side_q = queries_with_keys(side_q, side_kv)
    has_lengths = side_q.lengths is not None
    buffers[Uid.SCALE] = host_scalar(x.softmax_scale)
    if has_lengths:
        buffers |= {Uid.LENGTHS_Q: side_q.lengths, Uid.LENGTHS_KV: side_kv.lengths}
    bias = None
    if x.bias is not None:
        bias = x.bias if has_alignment(x.bias) else empty_aligned_rows(x.bias, x.bias.dtype).copy_(x.bias)
        buffers[Uid.BIAS] = bias
    if x.has_sink:
        buffers[Uid.SINK] = _sink(x)
    if x.dropout_p:
        assert x.rng_state is not None
        state = x.rng_state[:, None].repeat(1, 2)  # a row of 16 bytes for each, as cuDNN wants its pointers aligned
        buffers |= {Uid.SEED: state[0], Uid.OFFSET: state[1]}
    for i, given in enumerate(x.mod_inputs):
        buffers[FIRST_INPUT + i] = given.reshape(1, 1, 1, 1) if _is_host(given) else given
    strides = {}
    sides_of = dict.fromkeys((Uid.Q, Uid.OUT, Uid.DOUT, Uid.DQ), (side_q, len_q))
    sides_of |= dict.fromkeys((Uid.K, Uid.V, Uid.DK, Uid.DV), (side_kv, len_kv))
    starts: dict[Uid, tuple[Side, int]] = {}
    pages = None
    if x.page_table is not None:
        table = buffers[Uid.PAGES_K] = buffers[Uid.PAGES_V] = page_table(x)
        pages = Pages(x.k.shape[0], x.k.shape[1], table.shape[1])
    for uid, (side, length) in sides_of.items():
        tensor = buffers.get(uid)
        if tensor is None:
            continue
        is_pool = pages is not None and uid in (Uid.K, Uid.V)
        strides[f"strides_{uid.name.lower()}"] = token_strides(
            tensor, tensor.shape[1] if is_pool else length, x.is_ragged and not is_pool
        )
        if is_pool:
            continue
        starts[Uid[f"STARTS_{uid.name}"]] = (side, _unit_stride(tensor))
    starts[Uid.STARTS_STATS] = (side_q, x.num_heads if side_q.is_packed else x.num_heads * side_q.tokens)
    if x.is_ragged:
        for side in {id(side): side for side, _ in starts.values()}.values():
            mine = [(uid, step) for uid, (of, step) in starts.items() if of is side]
            steps = tuple(dict.fromkeys(step for _, step in mine))
            rows = dict(zip(steps, side.offsets(steps), strict=True))
            buffers |= {uid: rows[step] for uid, step in mine}
    sdpa = Sdpa(
        direction=direction,
        dtype=x.q.dtype,
        batch=batch,
        num_heads=x.num_heads,
        num_heads_kv=x.k.shape[-2],
        len_q=len_q,
        len_kv=len_kv,
        head_dim_qk=x.q.shape[-1],
        head_dim_v=x.v.shape[-1],
        is_ragged=x.is_ragged,
        has_lengths=has_lengths,
        tokens_q=_most_tokens(x.q, len_q) if is_backward and x.is_ragged else 0,
        tokens_kv=_most_tokens(x.k, len_kv) if is_backward and x.is_ragged else 0,
        window_left=x.window_left,
        window_right=x.window_right,
        bottom_right=x.bottom_right and (x.window_left is not None or x.window_right is not None),
        bias_shape=None if bias is None else tuple(bias.shape),
        bias_strides=None if bias is None else bias_strides(bias),
        bias_dtype=None if bias is None else bias.dtype,
        has_dbias=Uid.DBIAS in buffers,
        has_sink=x.has_sink,
        dropout_p=x.dropout_p,
        mods=x.mods,
        mod_inputs=tuple(_known_of(given) for given in x.mod_inputs),
        fp8=_fp8_dtypes(buffers) if x.is_fp8 else None,
        pages=pages,
        **strides,
    )
    if x.mods is not None:
        for uid, number in frame_numbers(sdpa).items():
            buffers[uid] = host_scalar(number, torch.int32 if isinstance(number, int) else torch.float32)
        buffers |= _frame_tensors(sdpa, side_q, side_kv)
    return sdpa


def _fp8_dtypes(buffers: dict[int, Tensor]) -> Fp8:
    out, dout, dq = (buffers.get(uid) for uid in (Uid.OUT, Uid.DOUT, Uid.DQ))
    assert out is not None
    return Fp8(out.dtype, None if dout is None else dout.dtype, None if dq is None else dq.dtype)


def _is_host(given: Tensor) -> bool:
    return given.dim() == 0


def _known_of(given: Tensor) -> ModInput:
    if _is_host(given):
        return ModInput((1, 1, 1, 1), (1, 1, 1, 1), given.dtype, True)
    return ModInput(tuple(given.shape), given.stride(), given.dtype, False)


def _frame_tensors(sdpa: Sdpa, side_q: Side, side_kv: Side) -> dict[int, Tensor]:
    """Lengths, and the sides of a band that follow them, as the mods' graph reads them."""
    wanted = [uid for uid in frame_uids(sdpa) if is_in_memory(sdpa, uid)]
    if not wanted:
        return {}
    len_q, len_kv = (side.lengths[: sdpa.batch] for side in (side_q, side_kv))
    values = {
        Uid.QUERIES: len_q,
        Uid.KEYS: len_kv,
        Uid.LEFT: len_kv - len_q - min(sdpa.window_left or 0, 2**30),
        Uid.RIGHT: len_kv - len_q + min(sdpa.window_right or 0, 2**30),
    }
    dims, strides = frame_layout(sdpa)
    found: dict[int, Tensor] = {}
    for uid in wanted:
        row = values[uid][:, None].expand(sdpa.batch, strides[0]).contiguous()
        found[uid] = row.as_strided(dims, strides)
    return found


def _has_lengths(x: Problem, is_backward: bool) -> bool:
    """Returns whether the plan has a padding mask: without padding too, with the full lengths, where cuDNN needs one.

    Where queries outnumber keys, cuDNN takes a window or a bottom-right diagonal only so. And a backward whose last tile of keys
    is not full computes NaN on sm_90 before cuDNN 9.26 without one (pytorch issue 196678, cudnn-frontend issue 628): seen so on an
    NVIDIA H200 with 9.19, and cured by the mask. Dropout must not differ between the directions.
    """
    if x.is_ragged or x.has_padding:
        return True
    if x.mods is not None:  # their nodes hide what lies past the lengths
        return False
    if x.longest_q > x.longest_kv and (x.window_left is not None or (x.bottom_right and x.window_right is not None)):
        return True
    return (is_backward or x.dropout_p > 0) and x.longest_kv % KEY_TILE != 0


def _padding(x: Problem, side_q: Side, side_kv: Side) -> Padding:
    if not x.has_padding:
        return Padding(None, None, None, False)
    q, is_read = hidden_tokens(side_q, x.batch), not x.is_ragged or x.is_fp8 or _reads_ragged_padding()
    if side_kv is side_q:
        return Padding(q, q, q, is_read)
    if x.page_table is not None:  # nobody copies pools to hide what lies past a sequence's keys: `reads_pages` tells who needs it
        return Padding(q, None, blind_queries(x, side_q, side_kv), is_read)
    asked_for = side_kv._replace(lengths=side_kv.lengths * (side_q.lengths > 0))  # cuDNN may skip a sequence without queries
    return Padding(q, hidden_tokens(asked_for, x.batch), blind_queries(x, side_q, side_kv), is_read)


@functools.cache
def _reads_ragged_padding() -> bool:
    return cudnn.backend_version() not in READS_NO_RAGGED_PADDING


def reads_pages(k: Tensor, v: Tensor) -> bool:
    """Returns whether cuDNN may read pools of pages as they lie: aligned, by a version that leaves alone what is past the keys."""
    return _reads_no_page_padding() and has_alignment(k) and has_alignment(v)


@functools.cache
def _reads_no_page_padding() -> bool:
    return cudnn.backend_version() in READS_NO_PAGE_PADDING


def _readable(x: Problem, t: Tensor, hidden: Tensor | None = None) -> Tensor:
    """`t`, or a copy of it where cuDNN cannot read it as it is or must not."""
    if hidden is not None:
        t = _bytes(t).masked_fill(hidden[..., None, None], 0).view(t.dtype)
    return t if _fits(x, t) else t.contiguous() if not t.is_contiguous() else t.clone()


def _dense_rows(t: Tensor) -> Tensor:
    """For the backward: of [total, h, d] with room between its tokens cuDNN 9.19 gave a dq of 0 past the first sequence (H200)."""
    return t.contiguous() if t.dim() == 3 else t


def _writable(x: Problem, t: Tensor) -> Tensor:
    """`t`, or a tensor that stands in for it where cuDNN cannot write it as it is, or where, as of packed tokens with room between
    them (`_dense_rows`), it is not proved right.
    """
    return t if _fits(x, t) and (t.dim() == 4 or t.is_contiguous()) else torch.empty_like(t, memory_format=torch.contiguous_format)


def _fits(x: Problem, t: Tensor) -> bool:
    return has_alignment(t) and (not x.is_ragged or has_fixed_strides(t))


def _statistics(x: Problem, lse: Tensor) -> Tensor:
    """Allocates the numbers per query and head that cuDNN writes: laid out as lse, or by token where it is ragged."""
    return torch.empty_like(_by_token(lse), memory_format=torch.contiguous_format) if x.is_ragged else lse


def _readable_statistics(x: Problem, lse: Tensor, blind: Tensor | None) -> Tensor:
    first, last = (0, x.longest_q) if x.has_padding else blind_rows(x)
    if blind is not None or x.mods is not None or (first, last) != (0, x.longest_q):
        lse = torch.where(lse == NEG_INF, NEVER, lse)
    return _by_token(lse).contiguous() if x.is_ragged else lse.contiguous()


def _hide(x: Problem, t: Tensor, blind: Tensor | None, value: Any = 0.0) -> None:
    """Write `value` where a query sees no key, in [b, s, ...] or [total, ...]: a number, or [h] for [..., h]."""
    if blind is not None:
        mask = blind.reshape(*blind.shape, *(1,) * (t.dim() - blind.dim()))
        if isinstance(value, Tensor):
            t.copy_(torch.where(mask, value, t))
        else:
            _zero(t, mask) if value == 0.0 else t.masked_fill_(mask, value)
    elif not x.has_padding:
        first, last = blind_rows(x)
        for rows in (slice(0, first), slice(last, x.longest_q)):
            if rows.start < rows.stop:
                t[:, rows].copy_(value) if isinstance(value, Tensor) else t[:, rows].fill_(value)


def _zero(t: Tensor, mask: Tensor) -> None:
    _bytes(t).masked_fill_(mask, 0)


def _bytes(t: Tensor) -> Tensor:
    """FP8 as bytes, of which 0 is 0, as torch fills no FP8 under a mask; any other tensor as it is."""
    return t.view(torch.uint8) if t.element_size() == 1 else t


def _by_token(lse: Tensor) -> Tensor:
    """[b, h, s] as [b, s, h], [h, total] as [total, h]: a view."""
    return lse.transpose(-1, -2)


def _sink(x: Problem) -> Tensor:
    if x.softmax_offset is None:
        return torch.zeros(x.num_heads, dtype=torch.float32, device=x.q.device)
    return x.softmax_offset.to(torch.float32).contiguous()


def _unit_stride(t: Tensor) -> int:
    """Elements from one token of [total, h, d] to the next, or from one row of [b, s, h, d]."""
    return t.stride(0) if t.shape[0] > 1 else t[0].numel()


def _most_tokens(t: Tensor, length: int) -> int:
    return round_up_length(t.shape[0] if t.dim() == 3 else t.shape[0] * t.shape[1])


def write_empty(x: Problem, out: Tensor, lse: Tensor, max_logit: Tensor | None) -> None:
    """The forward where there is no query or no key."""
    out.zero_()
    lse.fill_(NEG_INF)
    if x.has_sink and lse.numel():
        by_token = _by_token(lse)
        by_token.copy_(_sink(x))
        if x.has_padding:
            by_token.masked_fill_(hidden_tokens(sides(x, True)[0], x.batch)[..., None], NEG_INF)
    if max_logit is not None:
        max_logit.fill_(NEG_INF)
