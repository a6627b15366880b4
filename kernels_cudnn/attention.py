"""Launchers of attention forward and backward on cuDNN, and the steps that cuDNN leaves to its caller.

cuDNN reads the padding of dense tensors, so a NaN there spreads. It does not write the padding of packed tensors, and its results
are undefined if a query sees no key. So cuDNN reads copies in which the padding is 0. After cuDNN, the launchers write the
results of tokens that belong to no sequence or see no key. A dense problem without such tokens runs no operation besides cuDNN's
plan.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import cudnn
import torch
from torch import Tensor

from flexattn.kernels_cudnn import graphs
from flexattn.kernels_cudnn.execute import execute, host_scalar
from flexattn.kernels_cudnn.lengths import Side, blind_queries, blind_rows, hidden_tokens, queries_with_keys, sides
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
NEVER = 1e30  # the lse of a query that sees no key, so that exp(score - lse) is 0 for any score, -inf included.
# cuDNN versions that did not read the padding of packed tensors on an NVIDIA H200. No copy is made for them.
READS_NO_RAGGED_PADDING = {91900}
KEY_TILE = 128  # keys in a tile of cuDNN's backward. If the last tile is not full, the plan needs a padding mask.


class Call(NamedTuple):
    """A problem that is ready to run: the description of its plan, the plan's buffers, and the steps after the plan."""

    sdpa: graphs.Sdpa
    buffers: dict[int, Tensor]
    finish: Callable[[], None]


class Written(NamedTuple):
    """Outputs of a backward: gradients laid out as q, k and v, and optionally those of the bias and softmax_offset."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None = None
    dsoftmax_offset: Tensor | None = None  # fp32 [h].


class Padding(NamedTuple):
    """Masks of tokens, bool [b, s] or [total]. They are None if the problem has no padding."""

    q: Tensor | None  # queries in no sequence.
    kv: Tensor | None  # keys in no sequence, or in a sequence without queries.
    blind: Tensor | None  # queries in no sequence, or that see no key.
    is_read: bool  # whether cuDNN may read these tokens.


def attention_forward(
    problem: Problem, out: Tensor, lse: Tensor, max_logit: Tensor | None = None, directory: str | None = None
) -> None:
    """Writes out (as q, with v's head dim), lse (fp32 [b, h, sq] or [h, total_q]) and max_logit (fp32 [h], or None).

    `directory` keeps plans for other processes.

    Raises PlanNotSupported if cuDNN has no plan for the problem. Nothing is written then.
    """
    if problem.is_empty:
        write_empty(problem, out, lse, max_logit)
    else:
        run(forward_call(problem, out, lse, max_logit), out.device, directory)


def attention_backward(
    problem: Problem, out: Tensor, lse: Tensor, dout: Tensor, gradients: Written, directory: str | None = None
) -> None:
    """Writes the gradients.

    `out` and `lse` come from a forward of any kernel. `dout` has the shape of `out`, in any strides. Raises as
    `attention_forward` does.
    """
    if problem.is_empty:
        for gradient in gradients:
            if gradient is not None:
                gradient.zero_()
    else:
        run(backward_call(problem, out, lse, dout, gradients), out.device, directory)


def forward_call(
    problem: Problem, out: Tensor, lse: Tensor, max_logit: Tensor | None = None, numbers: dict[int, Tensor] | None = None
) -> Call:
    """Returns the plan and buffers of `attention_forward`. If the tensors are on the meta device, only the plan is of use.

    `numbers` are the scales and maxima of an FP8 plan.
    """
    x = problem
    side_q, side_kv = sides(x, _has_lengths(x, is_backward=False))
    padding = _padding(x, side_q, side_kv)
    unread_q = padding.q if x.is_fp8 else None  # otherwise padding would count in the maximum of out.
    unread_kv = padding.kv if padding.is_read else None
    q, k, v = _readable(x, x.q, unread_q), _readable(x, x.k, unread_kv), _readable(x, x.v, unread_kv)
    written, stats = _writable(x, out), _statistics(x, lse)
    buffers: dict[int, Tensor] = {graphs.Uid.Q: q, graphs.Uid.K: k, graphs.Uid.V: v, graphs.Uid.OUT: written, **(numbers or {})}
    if max_logit is None:
        buffers[graphs.Uid.STATS] = stats
    else:
        buffers |= {graphs.Uid.MAX: stats, graphs.Uid.SUM_EXP: torch.empty_like(stats)}
    sdpa = _describe(x, "forward", buffers, side_q, side_kv)._replace(wants_max=max_logit is not None)

    def finish() -> None:
        token_lse, token_stats = _by_token(lse), stats if x.is_ragged else _by_token(stats)
        if max_logit is not None:
            sums = buffers[graphs.Uid.SUM_EXP]
            _hide(x, token_stats, padding.blind, NEG_INF)
            if x.mods is not None:
                token_stats.masked_fill_(token_stats < BLIND, NEG_INF)
            torch.amax(token_stats.flatten(0, -2), 0, out=max_logit)
            token_lse.copy_(token_stats + (sums if x.is_ragged else _by_token(sums)).log())
        elif x.is_ragged:
            token_lse.copy_(token_stats)
        if written is not out:
            out.copy_(written)
        if x.mods is not None:  # only the mods determine the queries that see no key.
            blind = token_lse < BLIND
            token_lse.masked_fill_(blind, NEG_INF)
            out.masked_fill_(blind[..., None], 0.0)
        _hide(x, out, padding.blind)
        _hide(x, token_lse, padding.blind, _sink(x) if x.has_sink else NEG_INF)
        if x.has_sink and padding.q is not None:
            token_lse.masked_fill_(padding.q[..., None], NEG_INF)

    return Call(sdpa, buffers, finish)


def backward_call(
    problem: Problem, out: Tensor, lse: Tensor, dout: Tensor, gradients: Written, numbers: dict[int, Tensor] | None = None
) -> Call:
    """Returns the plan and buffers of `attention_backward`, as `forward_call` does for the forward."""
    x = problem
    dq, dk, dv, dbias, dsoftmax_offset = gradients
    side_q, side_kv = sides(x, _has_lengths(x, is_backward=True))
    padding = _padding(x, side_q, side_kv)
    unread_q, unread_kv = (padding.blind, padding.kv) if padding.is_read else (None, None)
    q, k, v = (_dense_rows(t) for t in (x.q, x.k, x.v))
    out = _readable(x, _dense_rows(out))
    dout = _readable(x, dout, unread_q)
    if dout.stride() != out.stride() and not x.is_fp8:  # one plan then serves dout in any strides.
        dout = torch.empty_like(out).copy_(dout)
    buffers: dict[int, Tensor] = {
        graphs.Uid.Q: _readable(x, q, unread_q),
        graphs.Uid.K: _readable(x, k, unread_kv),
        graphs.Uid.V: _readable(x, v, unread_kv),
        graphs.Uid.OUT: out,
        graphs.Uid.DOUT: dout,
        graphs.Uid.STATS: _readable_statistics(x, lse, padding.blind),
        **(numbers or {}),
    }
    targets: dict[int, Tensor] = {graphs.Uid.DQ: dq, graphs.Uid.DK: dk, graphs.Uid.DV: dv}
    written = {uid: _writable(x, target) for uid, target in targets.items()}
    buffers |= written
    if dbias is not None:
        targets[graphs.Uid.DBIAS] = dbias
        # cuDNN writes this gradient only as a compact tensor in the dtype of q.
        written[graphs.Uid.DBIAS] = buffers[graphs.Uid.DBIAS] = torch.empty_like(
            dbias, dtype=x.q.dtype, memory_format=torch.contiguous_format
        )
    if dsoftmax_offset is not None:
        buffers[graphs.Uid.DSINK] = dsoftmax_offset
    elif x.has_sink:
        buffers[graphs.Uid.DSINK] = torch.empty(x.num_heads, dtype=torch.float32, device=dq.device)
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


def _describe(x: Problem, direction: str, buffers: dict[int, Tensor], side_q: Side, side_kv: Side) -> graphs.Sdpa:
    """Returns the description of the plan for these tensors. Adds the buffers of the steps from scores to weights to `buffers`."""
    batch, len_q, len_kv = x.sizes
    is_backward = direction == "backward"
    if x.is_fp8:  # the FP8 kernel does not end if a tile of queries sees no key (cudnn-frontend issue 1009).
        side_q = queries_with_keys(side_q, side_kv)
    has_lengths = side_q.lengths is not None
    buffers[graphs.Uid.SCALE] = host_scalar(x.softmax_scale)
    if has_lengths:
        buffers |= {graphs.Uid.LENGTHS_Q: side_q.known_lengths, graphs.Uid.LENGTHS_KV: side_kv.known_lengths}
    bias = None
    if x.bias is not None:
        bias = x.bias if has_alignment(x.bias) else empty_aligned_rows(x.bias, x.bias.dtype).copy_(x.bias)
        buffers[graphs.Uid.BIAS] = bias
    if x.has_sink:
        buffers[graphs.Uid.SINK] = _sink(x)
    if x.dropout_p:
        assert x.rng_state is not None
        state = x.rng_state[:, None].repeat(1, 2)  # each number gets a row of 16 bytes, because cuDNN needs aligned pointers.
        buffers |= {graphs.Uid.SEED: state[0], graphs.Uid.OFFSET: state[1]}
    for i, tensor in enumerate(x.mod_inputs):
        buffers[graphs.FIRST_INPUT + i] = tensor.reshape(1, 1, 1, 1) if _is_host(tensor) else tensor
    strides: dict[graphs.Uid, graphs.Strides] = {}
    token_sides = dict.fromkeys((graphs.Uid.Q, graphs.Uid.OUT, graphs.Uid.DOUT, graphs.Uid.DQ), (side_q, len_q))
    token_sides |= dict.fromkeys((graphs.Uid.K, graphs.Uid.V, graphs.Uid.DK, graphs.Uid.DV), (side_kv, len_kv))
    starts: dict[graphs.Uid, tuple[Side, int]] = {}
    for uid, (side, length) in token_sides.items():
        if uid in buffers:
            strides[uid] = token_strides(buffers[uid], length, x.is_ragged)
            starts[graphs.Uid[f"STARTS_{uid.name}"]] = (side, _unit_stride(buffers[uid]))
    starts[graphs.Uid.STARTS_STATS] = (side_q, x.num_heads if side_q.is_packed else x.num_heads * side_q.tokens)
    if x.is_ragged:
        for side in {id(side): side for side, _ in starts.values()}.values():
            unit_strides = [(uid, step) for uid, (other, step) in starts.items() if other is side]
            steps = tuple(dict.fromkeys(step for _, step in unit_strides))
            rows = dict(zip(steps, side.offsets(steps), strict=True))
            buffers |= {uid: rows[step] for uid, step in unit_strides}
    sdpa = graphs.Sdpa(
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
        bias_shape=None if bias is None else _four_dims(bias),
        bias_strides=None if bias is None else bias_strides(bias),
        bias_dtype=None if bias is None else bias.dtype,
        has_dbias=graphs.Uid.DBIAS in buffers,
        has_sink=x.has_sink,
        dropout_p=x.dropout_p,
        mods=x.mods,
        mod_inputs=tuple(_mod_input(tensor) for tensor in x.mod_inputs),
        fp8=_fp8_dtypes(buffers) if x.is_fp8 else None,
        strides_q=strides[graphs.Uid.Q],
        strides_k=strides[graphs.Uid.K],
        strides_v=strides[graphs.Uid.V],
        strides_out=strides[graphs.Uid.OUT],
        strides_dout=strides.get(graphs.Uid.DOUT),
        strides_dq=strides.get(graphs.Uid.DQ),
        strides_dk=strides.get(graphs.Uid.DK),
        strides_dv=strides.get(graphs.Uid.DV),
    )
    if x.mods is not None:
        for number_uid, number in graphs.frame_numbers(sdpa).items():
            buffers[number_uid] = host_scalar(number, torch.int32 if isinstance(number, int) else torch.float32)
        buffers |= _frame_tensors(sdpa, side_q, side_kv)
    return sdpa


def _fp8_dtypes(buffers: dict[int, Tensor]) -> graphs.Fp8:
    out, dout, dq = (buffers.get(uid) for uid in (graphs.Uid.OUT, graphs.Uid.DOUT, graphs.Uid.DQ))
    assert out is not None
    return graphs.Fp8(out.dtype, None if dout is None else dout.dtype, None if dq is None else dq.dtype)


def _four_dims(t: Tensor) -> tuple[int, int, int, int]:
    batch, heads, rows, columns = t.shape
    return batch, heads, rows, columns


def _is_host(mod_input: Tensor) -> bool:
    return mod_input.dim() == 0


def _mod_input(t: Tensor) -> graphs.ModInput:
    if _is_host(t):
        return graphs.ModInput((1, 1, 1, 1), (1, 1, 1, 1), t.dtype, True)
    return graphs.ModInput(tuple(t.shape), t.stride(), t.dtype, False)


def _frame_tensors(sdpa: graphs.Sdpa, side_q: Side, side_kv: Side) -> dict[int, Tensor]:
    """Returns the lengths, and the sides of a band that depend on them, for a graph with mods."""
    uids = [uid for uid in graphs.frame_uids(sdpa) if graphs.is_in_memory(sdpa, uid)]
    if not uids:
        return {}
    len_q, len_kv = (side.known_lengths[: sdpa.batch] for side in (side_q, side_kv))
    values = {
        graphs.Uid.QUERIES: len_q,
        graphs.Uid.KEYS: len_kv,
        graphs.Uid.LEFT: len_kv - len_q - min(sdpa.window_left or 0, 2**30),
        graphs.Uid.RIGHT: len_kv - len_q + min(sdpa.window_right or 0, 2**30),
    }
    dims, strides = graphs.frame_layout(sdpa)
    tensors: dict[int, Tensor] = {}
    for uid in uids:
        row = values[uid][:, None].expand(sdpa.batch, strides[0]).contiguous()
        tensors[uid] = row.as_strided(dims, strides)
    return tensors


def _has_lengths(x: Problem, is_backward: bool) -> bool:
    """Returns whether the plan has a padding mask. If cuDNN needs one, a problem without padding gets its full lengths.

    If queries outnumber keys, cuDNN supports a window or a bottom-right diagonal only with such a mask. The mask also mends a
    backward whose last tile of keys is not full. Without it, such a backward computes NaN on sm_90 before cuDNN 9.26 (pytorch issue
    196678, cudnn-frontend issue 628; confirmed with 9.19 on an NVIDIA H200). With dropout the forward gets the mask too, because
    both directions must drop the same weights.
    """
    if x.is_ragged or x.has_padding:
        return True
    if x.mods is not None:  # nodes of the graph hide the keys past the lengths.
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
    # cuDNN may skip a sequence without queries, so its keys count as padding.
    queried_kv = side_kv._replace(lengths=side_kv.known_lengths * (side_q.known_lengths > 0))
    return Padding(q, hidden_tokens(queried_kv, x.batch), blind_queries(x, side_q, side_kv), is_read)


@functools.cache
def _reads_ragged_padding() -> bool:
    return cudnn.backend_version() not in READS_NO_RAGGED_PADDING


def _readable(x: Problem, t: Tensor, hidden: Tensor | None = None) -> Tensor:
    """Returns `t`, or a copy if cuDNN cannot read `t` or must not. The tokens of `hidden` are 0 in the copy."""
    if hidden is not None:
        t = _bytes(t).masked_fill(hidden[..., None, None], 0).view(t.dtype)
    return t if _fits(x, t) else t.contiguous() if not t.is_contiguous() else t.clone()


def _dense_rows(t: Tensor) -> Tensor:
    """Returns `t` for a backward: packed tokens are copied if there are gaps between them.

    For such tokens cuDNN 9.19 returned a dq of 0 past the first sequence (on an H200).
    """
    return t.contiguous() if t.dim() == 3 else t


def _writable(x: Problem, t: Tensor) -> Tensor:
    """Returns `t`, or a contiguous tensor to write instead if cuDNN cannot write `t`.

    Packed tokens with gaps between them are replaced too, because results there are untested (see `_dense_rows`).
    """
    return t if _fits(x, t) and (t.dim() == 4 or t.is_contiguous()) else torch.empty_like(t, memory_format=torch.contiguous_format)


def _fits(x: Problem, t: Tensor) -> bool:
    return has_alignment(t) and (not x.is_ragged or has_fixed_strides(t))


def _statistics(x: Problem, lse: Tensor) -> Tensor:
    """Returns memory for cuDNN's numbers per query and head: lse itself, or a tensor by token if the plan is ragged."""
    return torch.empty_like(_by_token(lse), memory_format=torch.contiguous_format) if x.is_ragged else lse


def _readable_statistics(x: Problem, lse: Tensor, blind: Tensor | None) -> Tensor:
    first, last = (0, x.longest_q) if x.has_padding else blind_rows(x)
    if blind is not None or x.mods is not None or (first, last) != (0, x.longest_q):
        lse = torch.where(lse == NEG_INF, NEVER, lse)
    return _by_token(lse).contiguous() if x.is_ragged else lse.contiguous()


def _hide(x: Problem, t: Tensor, blind: Tensor | None, value: Tensor | float = 0.0) -> None:
    """Writes `value` to the queries of `t`, [b, s, ...] or [total, ...], that see no key. If `value` is a tensor, it is [h]."""
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
    """Returns FP8 as bytes, because torch has no masked fill of FP8. A byte of 0 is the number 0. Other dtypes stay."""
    return t.view(torch.uint8) if t.element_size() == 1 else t


def _by_token(lse: Tensor) -> Tensor:
    """Returns a view with tokens before heads: [b, h, s] as [b, s, h], or [h, total] as [total, h]."""
    return lse.transpose(-1, -2)


def _sink(x: Problem) -> Tensor:
    if x.softmax_offset is None:
        return torch.zeros(x.num_heads, dtype=torch.float32, device=x.q.device)
    return x.softmax_offset.to(torch.float32).contiguous()


def _unit_stride(t: Tensor) -> int:
    """Returns the number of elements from one token of [total, h, d], or one row of [b, s, h, d], to the next."""
    return t.stride(0) if t.shape[0] > 1 else t[0].numel()


def _most_tokens(t: Tensor, length: int) -> int:
    return round_up_length(t.shape[0] if t.dim() == 3 else t.shape[0] * t.shape[1])


def write_empty(x: Problem, out: Tensor, lse: Tensor, max_logit: Tensor | None) -> None:
    """Writes the results of a forward that has no query or no key."""
    out.zero_()
    lse.fill_(NEG_INF)
    if x.has_sink and lse.numel():
        by_token = _by_token(lse)
        by_token.copy_(_sink(x))
        if x.has_padding:
            by_token.masked_fill_(hidden_tokens(sides(x, True)[0], x.batch)[..., None], NEG_INF)
    if max_logit is not None:
        max_logit.fill_(NEG_INF)
