"""A cuDNN plan's results in plain torch, on any device, from the plan's configuration and its buffers.

The emulator replaces `execute` if there is no GPU, so that tests cover the launchers everywhere. It does everything that cuDNN may
do: it reads whole tiles of 128 tokens beyond a sequence's end, multiplies masked values by 0 instead of skipping them, writes
nothing past a sequence's end, and returns NaN if a query sees no key. In FP8 such a query may hang a GPU, so the emulator fails.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexattn.dispatch.philox import dropout_keep
from flexattn.kernels_cudnn.graphs import Sdpa, Uid, make_callbacks
from flexattn.kernels_cudnn.mod_nodes import Callbacks
from flexattn.kernels_cudnn.plans import Plan
from tests.support.cudnn_mod_graph import ModGraph, Value

TILE = 128
reads_ragged_padding = True  # as versions of cuDNN may that nobody has tried
NEG_INF = float("-inf")
NAN = float("nan")


class EmulatedPlans:
    """Replaces the plan cache: it builds nothing, and records the requested plans."""

    def __init__(self) -> None:
        self.asked: list[Sdpa] = []

    def get(self, sdpa: Sdpa, device: torch.device, directory: str | None = None) -> Plan:
        self.asked.append(sdpa)
        return Plan(sdpa, None, 0, 0.0, False)

    def known(self, sdpa: Sdpa, device: torch.device) -> Plan | None:
        return Plan(sdpa, None, 0, 0.0, False) if sdpa in self.asked else None


def execute(plan: Plan, buffers: dict[int, Tensor], device: torch.device) -> None:
    x = plan.sdpa
    for uid in set(AMAX.values()) & buffers.keys():
        buffers[uid].zero_()
    for b in range(x.batch):
        len_q, len_kv = x.len_q, x.len_kv
        if x.has_lengths:
            len_q, len_kv = (int(buffers[uid].flatten()[b]) for uid in (Uid.LENGTHS_Q, Uid.LENGTHS_KV))
            assert 0 <= len_q <= x.len_q
            assert 0 <= len_kv <= x.len_kv
        if len_q == 0:
            continue
        if x.fp8 is not None:
            (_fp8_forward if x.direction == "forward" else _fp8_backward)(x, buffers, b, len_q, len_kv)
        elif x.direction == "forward":
            _forward(x, buffers, b, len_q, len_kv)
        else:
            _backward(x, buffers, b, len_q, len_kv)


def _forward(x: Sdpa, buffers: dict[int, Tensor], b: int, len_q: int, len_kv: int) -> None:
    s, keep, _, _ = _scores(x, buffers, b, len_q, len_kv)
    v = _heads(x, _read(x, buffers, Uid.V, b, len_kv))
    peak = s.amax(-1) if s.shape[-1] else s.new_full(s.shape[:-1], NEG_INF)
    if x.has_sink and x.mods is not None:  # a hidden score is finite then, and the sink alone may be above all
        peak = torch.maximum(peak, _per_head(buffers[Uid.SINK]))
    total = torch.exp(s - peak[..., None]).sum(-1)  # NaN if no key is visible
    if x.has_sink:
        total = total + torch.exp(_per_head(buffers[Uid.SINK]) - peak)
    p = torch.exp(s - peak[..., None]) / total[..., None]
    out = (p * keep).nan_to_num(0.0) @ v if x.has_sink else (p * keep) @ v
    rows = slice(0, len_q)
    _view(x, buffers, Uid.OUT, b, len_q).copy_(out[:, rows])
    statistics = {Uid.MAX: peak, Uid.SUM_EXP: total} if x.wants_max else {Uid.STATS: peak + total.log()}
    for uid, values in statistics.items():
        _view(x, buffers, uid, b, len_q)[..., 0].copy_(values[:, rows])


def _backward(x: Sdpa, buffers: dict[int, Tensor], b: int, len_q: int, len_kv: int) -> None:
    s, keep, graph, callbacks = _scores(x, buffers, b, len_q, len_kv)
    q, dout, out = (_read(x, buffers, uid, b, len_q) for uid in (Uid.Q, Uid.DOUT, Uid.OUT))
    k, v = (_heads(x, _read(x, buffers, uid, b, len_kv)) for uid in (Uid.K, Uid.V))
    stats = _read(x, buffers, Uid.STATS, b, len_q)
    delta = (dout * out).sum(-1, keepdim=True)
    p = torch.exp(s - stats)
    if callbacks is None:  # a padding mask of cuDNN's own leaves out such rows
        p[:, len_q:] = 0.0
    ds = p * (keep * (dout @ v.transpose(-1, -2)) - delta)
    if callbacks is not None:
        ds = callbacks.score_mod_bprop(graph, Value(ds, is_given=False)).value.expand(ds.shape)
    scale = float(buffers[Uid.SCALE])
    _view(x, buffers, Uid.DQ, b, len_q).copy_((ds @ k * scale)[:, :len_q])
    for uid, grad in ((Uid.DK, ds.transpose(-1, -2) @ q * scale), (Uid.DV, (p * keep).transpose(-1, -2) @ dout)):
        grad = grad.unflatten(0, (x.num_heads_kv, -1)).sum(1)
        _view(x, buffers, uid, b, len_kv).copy_(grad[:, :len_kv])
    if x.has_dbias:
        target = buffers[Uid.DBIAS]
        if b == 0:
            target.zero_()
        part = ds[None, :, :len_q, :len_kv]
        for dim in (1, 2, 3):
            part = part.sum(dim, keepdim=True) if target.shape[dim] == 1 else part
        target[b if target.shape[0] > 1 else 0][:, : part.shape[2], : part.shape[3]] += part[0].to(target.dtype)
    if x.has_sink:
        target = buffers[Uid.DSINK]
        if b == 0:
            target.zero_()
        sink = torch.exp(_per_head(buffers[Uid.SINK]) - stats[..., 0])
        target -= (sink * delta[..., 0])[:, :len_q].sum(-1).to(target.dtype)


def _fp8_forward(x: Sdpa, buffers: dict[int, Tensor], b: int, len_q: int, len_kv: int) -> None:
    s, _, _, _ = _scores(x, buffers, b, len_q, len_kv, _times(buffers, Uid.DESCALE_Q, Uid.DESCALE_K))
    assert not (s[:, :len_q] == NEG_INF).all(-1).any(), f"sequence {b} has a query without a key: it never ends"
    v = _heads(x, _read(x, buffers, Uid.V, b, len_kv))
    peak = s.amax(-1)
    p = torch.exp(s - peak[..., None])
    total = p.sum(-1)
    weights = _rounded(p * buffers[Uid.SCALE_S], x.dtype)
    out = weights @ v * _times(buffers, Uid.DESCALE_S, Uid.DESCALE_V) / total[..., None]
    _write8(x, buffers, Uid.OUT, b, out[:, :len_q])
    _view(x, buffers, Uid.STATS, b, len_q)[..., 0].copy_((peak + total.log())[:, :len_q])


def _fp8_backward(x: Sdpa, buffers: dict[int, Tensor], b: int, len_q: int, len_kv: int) -> None:
    s, _, _, _ = _scores(x, buffers, b, len_q, len_kv, _times(buffers, Uid.DESCALE_Q, Uid.DESCALE_K))
    q, dout, out = (_read(x, buffers, uid, b, len_q) for uid in (Uid.Q, Uid.DOUT, Uid.OUT))
    k, v = (_heads(x, _read(x, buffers, uid, b, len_kv)) for uid in (Uid.K, Uid.V))
    delta = (dout * out).sum(-1, keepdim=True) * _times(buffers, Uid.DESCALE_OUT, Uid.DESCALE_DOUT)
    p = torch.exp(s - _read(x, buffers, Uid.STATS, b, len_q))
    p[:, len_q:] = 0.0
    weights = _rounded(p * buffers[Uid.SCALE_S], x.dtype)
    dv = weights.transpose(-1, -2) @ dout * _times(buffers, Uid.DESCALE_S, Uid.DESCALE_DOUT)
    dp = dout @ v.transpose(-1, -2) * _times(buffers, Uid.DESCALE_DOUT, Uid.DESCALE_V)
    ds = p * (dp - delta) * float(buffers[Uid.SCALE])
    _note(buffers, Uid.AMAX_DS, ds)
    ds = _rounded(ds * buffers[Uid.SCALE_DS], x.fp8.dout)
    dq = ds @ k * _times(buffers, Uid.DESCALE_DS, Uid.DESCALE_K)
    dk = ds.transpose(-1, -2) @ q * _times(buffers, Uid.DESCALE_DS, Uid.DESCALE_Q)
    _write8(x, buffers, Uid.DQ, b, dq[:, :len_q])
    for uid, grad in ((Uid.DK, dk), (Uid.DV, dv)):
        _write8(x, buffers, uid, b, grad.unflatten(0, (x.num_heads_kv, -1)).sum(1)[:, :len_kv])


AMAX = {Uid.OUT: Uid.AMAX_OUT, Uid.DQ: Uid.AMAX_DQ, Uid.DK: Uid.AMAX_DK, Uid.DV: Uid.AMAX_DV, Uid.AMAX_DS: Uid.AMAX_DS}


def _write8(x: Sdpa, buffers: dict[int, Tensor], uid: Uid, b: int, values: Tensor) -> None:
    _note(buffers, AMAX[uid], values)
    view = _view(x, buffers, uid, b, values.shape[1])
    view.copy_(_rounded(values * buffers[Uid[f"SCALE_{uid.name}"]], view.dtype))


def _note(buffers: dict[int, Tensor], uid: Uid, values: Tensor) -> None:
    buffers[uid].copy_(torch.maximum(buffers[uid], values.abs().amax()))


def _rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds fp32 to an FP8 dtype, to which it is saturated."""
    largest = torch.finfo(dtype).max
    return values.clamp(-largest, largest).to(dtype).float()


def _times(buffers: dict[int, Tensor], *uids: Uid) -> Tensor:
    for uid in uids:
        assert buffers[uid].data_ptr() % 16 == 0
        assert buffers[uid].dtype is torch.float32
    return buffers[uids[0]] * buffers[uids[1]]


def _scores(
    x: Sdpa, buffers: dict[int, Tensor], b: int, len_q: int, len_kv: int, descale: Tensor | float = 1.0
) -> tuple[Tensor, Tensor, ModGraph | None, Callbacks | None]:
    """Returns masked scores [h, r, c] and dropout's factors for whole tiles of rows and columns, and the mods' graph."""
    q, k = _read(x, buffers, Uid.Q, b, len_q), _heads(x, _read(x, buffers, Uid.K, b, len_kv))
    s = q @ k.transpose(-1, -2) * float(buffers[Uid.SCALE]) * descale
    i, j = torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])
    graph, callbacks = None, None
    if x.mods is not None:
        graph = ModGraph(x, buffers, b, q.shape[1], k.shape[1])
        callbacks = make_callbacks(graph, x)
        assert callbacks is not None
        s = callbacks.score_mod(graph, Value(s, is_given=False)).value.expand(s.shape)
    if x.bias_shape is not None:
        bias = buffers[Uid.BIAS]
        bias = bias[b if bias.shape[0] > 1 else 0].to(s.dtype).expand(x.num_heads, x.len_q, x.len_kv)
        s = (
            s + torch.nn.functional.pad(bias, (0, s.shape[2] - x.len_kv, 0, s.shape[1] - x.len_q))
            if s.shape[1:] != bias.shape[1:]
            else s + bias
        )
    visible = (j < len_kv) & (i >= 0)
    diagonal = i + (len_kv - len_q if x.bottom_right else 0)
    if x.window_left is not None:
        visible = visible & (j >= diagonal - x.window_left)
    if x.window_right is not None:
        visible = visible & (j <= diagonal + x.window_right)
    keep = torch.ones(())
    if x.dropout_p:  # cuDNN chooses the dropped weights; the emulator drops those of the reference
        state = torch.stack([buffers[uid].flatten()[0] for uid in (Uid.SEED, Uid.OFFSET)])
        head = b * x.num_heads + torch.arange(x.num_heads)
        keep = dropout_keep(state, x.dropout_p, head, range(s.shape[1]), range(s.shape[2])) / (1.0 - x.dropout_p)
    return (s if callbacks is not None else torch.where(visible, s, NEG_INF)), keep, graph, callbacks


def _read(x: Sdpa, buffers: dict[int, Tensor], uid: Uid, b: int, length: int) -> Tensor:
    """Returns [h, whole tiles of tokens, d] in fp32, up to the end of the memory."""
    strides = _strides(x, uid)
    start = _start(x, buffers, uid, b)
    most = buffers[uid].untyped_storage().nbytes() // buffers[uid].element_size() - buffers[uid].storage_offset()
    heads, head_dim = _shape(x, uid)
    last = (most - start - head_dim - (heads - 1) * strides[1]) // strides[2] + 1
    tokens = min(-(-length // TILE) * TILE, max(last, 0))
    if not x.is_ragged:
        tokens = min(tokens, x.len_kv if uid in (Uid.K, Uid.V) else x.len_q)
    assert tokens >= length, f"{uid.name}: sequence {b} of {length} tokens lies outside its buffer"
    read = length if x.is_ragged and not reads_ragged_padding else tokens
    found = _strided(buffers[uid], (heads, read, head_dim), (strides[1], strides[2], 1), start).float()
    return torch.nn.functional.pad(found, (0, 0, 0, tokens - read))


def _view(x: Sdpa, buffers: dict[int, Tensor], uid: Uid, b: int, length: int) -> Tensor:
    strides, (heads, head_dim) = _strides(x, uid), _shape(x, uid)
    return _strided(buffers[uid], (heads, length, head_dim), (strides[1], strides[2], 1), _start(x, buffers, uid, b))


def _strided(t: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], start: int) -> Tensor:
    return torch.as_strided(t, shape, strides, t.storage_offset() + start)


def _start(x: Sdpa, buffers: dict[int, Tensor], uid: Uid, b: int) -> int:
    if not x.is_ragged:
        return b * _strides(x, uid)[0]
    name = "STATS" if uid in (Uid.MAX, Uid.SUM_EXP) else uid.name
    starts = buffers[Uid[f"STARTS_{name}"]]
    assert starts.dtype is torch.int64
    assert starts.shape[0] > x.batch
    return int(starts[b])


def _strides(x: Sdpa, uid: Uid) -> tuple[int, int, int]:
    if uid in (Uid.STATS, Uid.MAX, Uid.SUM_EXP):
        return (x.len_q * x.num_heads, 1, x.num_heads) if x.is_ragged else (x.num_heads * x.len_q, x.len_q, 1)
    return getattr(x, f"strides_{uid.name.lower()}")


def _shape(x: Sdpa, uid: Uid) -> tuple[int, int]:
    """(heads, head dim)"""
    if uid in (Uid.STATS, Uid.MAX, Uid.SUM_EXP):
        return x.num_heads, 1
    heads = x.num_heads_kv if uid in (Uid.K, Uid.V, Uid.DK, Uid.DV) else x.num_heads
    return heads, x.head_dim_v if uid in (Uid.V, Uid.DV, Uid.OUT, Uid.DOUT) else x.head_dim_qk


def _heads(x: Sdpa, t: Tensor) -> Tensor:
    return t.repeat_interleave(x.num_heads // x.num_heads_kv, 0)


def _per_head(t: Tensor) -> Tensor:
    return t.flatten()[:, None]
