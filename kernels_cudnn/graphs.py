"""cuDNN SDPA graphs, forward and backward: from the description of a plan to a graph that is ready to run.

Only this file converts conventions: window sides, the diagonal, layouts as strides of (b, h, s, d), token offsets.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import cudnn
import torch

from flexattn.kernels_cudnn.frontend import Graph, GraphTensor
from flexattn.kernels_cudnn.lowering import Mods
from flexattn.kernels_cudnn.mod_nodes import HIDDEN, Callbacks

Strides = tuple[int, int, int]  # strides of b, h and s, in elements. The last dim is contiguous.

DTYPES = {
    torch.float16: cudnn.data_type.HALF,
    torch.bfloat16: cudnn.data_type.BFLOAT16,
    torch.float32: cudnn.data_type.FLOAT,
    torch.float8_e4m3fn: cudnn.data_type.FP8_E4M3,
    torch.float8_e5m2: cudnn.data_type.FP8_E5M2,
    torch.int32: cudnn.data_type.INT32,
    torch.int64: cudnn.data_type.INT64,
}
ALIGNMENT = 16  # bytes, for every pointer and every stride. Otherwise cuDNN writes wrong results on sm_90 and sm_100.


class Uid(enum.IntEnum):
    """Numbers of a plan's buffers."""

    Q = 1
    K = 2
    V = 3
    OUT = 4
    STATS = 5  # lse, fp32.
    MAX = 6  # the largest score of each row. MAX and SUM_EXP together replace STATS.
    SUM_EXP = 7  # the sum of the exponentials of each row's scores.
    DOUT = 8
    DQ = 9
    DK = 10
    DV = 11
    SCALE = 12
    BIAS = 13
    DBIAS = 14
    SINK = 15
    DSINK = 16
    SEED = 17
    OFFSET = 18
    LENGTHS_Q = 19
    LENGTHS_KV = 20
    STARTS_Q = 21  # STARTS_*: the first element of each sequence, for each tensor of tokens.
    STARTS_K = 22
    STARTS_V = 23
    STARTS_OUT = 24
    STARTS_STATS = 25
    STARTS_DOUT = 26
    STARTS_DQ = 27
    STARTS_DK = 28
    STARTS_DV = 29
    # Inputs of a plan with mods, in place of cuDNN's own masks.
    HIDDEN = 30  # the value of a hidden score.
    ZERO = 31
    QUERIES = 32  # lengths, int32: one for all sequences, or one for each, as `frame_layout` lays them out.
    KEYS = 33
    LEFT = 34  # the least visible kv_idx - q_idx, in the same forms.
    RIGHT = 35  # the greatest visible kv_idx - q_idx.
    # Inputs and outputs of a plan in FP8, fp32 numbers on the device. SCALE_* multiplies a tensor before it is quantised.
    # DESCALE_* is the inverse, for a quantised tensor. AMAX_* is the largest magnitude before quantisation. S are the weights, DS
    # is the gradient of the scores.
    DESCALE_Q = 40
    DESCALE_K = 41
    DESCALE_V = 42
    DESCALE_S = 43
    SCALE_S = 44
    SCALE_OUT = 45
    DESCALE_OUT = 46
    DESCALE_DOUT = 47
    DESCALE_DS = 48
    SCALE_DS = 49
    SCALE_DQ = 50
    SCALE_DK = 51
    SCALE_DV = 52
    AMAX_OUT = 53
    AMAX_DS = 54
    AMAX_DQ = 55
    AMAX_DK = 56
    AMAX_DV = 57


FIRST_INPUT = 1000  # the uid of the mods' first input. The others follow.


class ModInput(NamedTuple):
    """The properties of a mod's input that a plan depends on."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    is_host: bool  # whether it is passed by value.


class Fp8(NamedTuple):
    """The dtypes of an FP8 plan, apart from the dtype of q, k, v and the weights."""

    out: torch.dtype  # FP8. A backward, which reads out, also supports fp16 and bf16.
    dout: torch.dtype | None = None  # backward only. The gradient of the scores has this dtype too.
    gradients: torch.dtype | None = None  # backward only, FP8.


class Sdpa(NamedTuple):
    """The description of a plan: everything that it is compiled for. Scale, seeds, lengths and offsets are run-time values."""

    direction: str  # "forward" or "backward".
    dtype: torch.dtype
    batch: int
    num_heads: int
    num_heads_kv: int
    len_q: int
    len_kv: int
    head_dim_qk: int
    head_dim_v: int
    strides_q: Strides
    strides_k: Strides
    strides_v: Strides
    strides_out: Strides
    strides_dout: Strides | None = None  # backward only, as the next three.
    strides_dq: Strides | None = None
    strides_dk: Strides | None = None
    strides_dv: Strides | None = None
    is_ragged: bool = False  # whether STARTS_* are the starts of sequences, and STATS is [tokens, h].
    has_lengths: bool = False  # whether LENGTHS_* are the lengths of sequences. True if the plan is ragged.
    tokens_q: int = 0  # ragged backward only: the largest number of tokens in all sequences together.
    tokens_kv: int = 0
    window_left: int | None = None
    window_right: int | None = None
    bottom_right: bool = False
    bias_shape: tuple[int, int, int, int] | None = None
    bias_strides: Strides | None = None
    bias_dtype: torch.dtype | None = None
    has_dbias: bool = False  # backward only. The gradient is compact and in the dtype of q, because cuDNN supports no other.
    has_sink: bool = False
    dropout_p: float = 0.0  # compiled into the plan, unlike the seed.
    wants_max: bool = False  # forward only: whether the plan returns MAX and SUM_EXP instead of STATS.
    deterministic: bool = False
    mods: Mods | None = None  # with mods, the band and the lengths are pointwise nodes too.
    mod_inputs: tuple[ModInput, ...] = ()
    fp8: Fp8 | None = None


class Target(NamedTuple):
    """The target of a graph: a handle for its device, or the properties of a device that this machine lacks."""

    handle: object = None
    properties: object = None
    sm_version: int | None = None


def build(x: Sdpa, target: Target) -> Graph:
    """Returns a built cudnn.pygraph for `x`.

    Raises cuDNN's own errors if it does not support the graph. They have several types (cudnnGraphNotSupportedError, RuntimeError,
    ValueError). Some come only from the last step, which compiles.
    """
    graph: Graph = cudnn.pygraph(
        name=f"flexattn_{x.direction}",
        io_data_type=DTYPES[x.dtype],
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=target.handle,
        device_property=target.properties,
        sm_version=target.sm_version,
    )
    callbacks = make_callbacks(graph, x)
    if x.fp8 is not None:
        (_fp8_forward if x.direction == "forward" else _fp8_backward)(graph, x)
    elif x.direction == "forward":
        _forward(graph, x, callbacks)
    else:
        _backward(graph, x, callbacks)
    try:
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
    finally:
        if callbacks is not None:
            callbacks.release()
    return graph


def band_arguments(left: int | None, right: int | None, bottom_right: bool) -> dict[str, object]:
    """Returns cuDNN's arguments for a band: query i sees key j if and only if -left <= j - i - shift <= right.

    cuDNN hides column j from row i unless j + left_bound > i + shift and j <= i + shift + right_bound. So its left bound is left
    + 1 (cudnn-frontend, `docs/operations/Attention.md`; TransformerEngine passes left + 1 too). With a padding mask, the diagonal
    follows each sequence's own lengths, as in this library.
    """
    if left is None and right is None:
        return {}
    diagonal = cudnn.diagonal_alignment
    arguments: dict[str, object] = {"diagonal_alignment": diagonal.BOTTOM_RIGHT if bottom_right else diagonal.TOP_LEFT}
    if left is not None:
        arguments["diagonal_band_left_bound"] = min(left, 2**30) + 1
    if right is not None:
        arguments["diagonal_band_right_bound"] = min(right, 2**30)
    return arguments


def _forward(graph: Graph, x: Sdpa, callbacks: Callbacks | None) -> None:
    arguments = _inputs(graph, x) | _score_arguments(graph, x, callbacks)
    if x.wants_max:
        starts = _starts_of_statistics(graph, x)
        for name, uid in (("score_max", Uid.MAX), ("score_sum_exp", Uid.SUM_EXP)):
            arguments[name] = _statistics(graph, x, uid, starts).set_output(True)
    out, stats = graph.sdpa(name="sdpa", generate_stats=not x.wants_max, **arguments)
    _output(graph, x, out, Uid.OUT)
    if not x.wants_max:
        _stats_output(graph, x, stats)


def _backward(graph: Graph, x: Sdpa, callbacks: Callbacks | None) -> None:
    arguments = _backward_inputs(graph, x) | _score_arguments(graph, x, callbacks)
    if callbacks is not None:
        arguments["score_mod_bprop"] = callbacks.score_mod_bprop
    if x.is_ragged:
        arguments |= {"max_total_seq_len_q": x.tokens_q, "max_total_seq_len_kv": x.tokens_kv}
    if x.has_dbias:
        assert x.bias_shape is not None
        _, heads, rows, columns = x.bias_shape
        compact = (heads * rows * columns, rows * columns, columns, 1)
        arguments["dBias"] = _tensor(graph, Uid.DBIAS, x.bias_shape, compact, x.dtype).set_output(True)
    if x.has_sink:
        arguments["dSink_token"] = _per_head(graph, x, Uid.DSINK).set_output(True)
    gradients = graph.sdpa_backward(name="sdpa_backward", **arguments)
    _gradient_outputs(graph, x, gradients)


# The numbers of FP8 graphs, by the arguments of cuDNN's operations.
_FP8_INPUTS = {"descale_q": Uid.DESCALE_Q, "descale_k": Uid.DESCALE_K, "descale_v": Uid.DESCALE_V}
_FP8_WEIGHTS = {"descale_s": Uid.DESCALE_S, "scale_s": Uid.SCALE_S}
_FP8_FORWARD = _FP8_INPUTS | _FP8_WEIGHTS | {"scale_o": Uid.SCALE_OUT}
_FP8_BACKWARD = _FP8_INPUTS | _FP8_WEIGHTS | {"descale_o": Uid.DESCALE_OUT, "descale_dO": Uid.DESCALE_DOUT}
_FP8_BACKWARD |= {"descale_dP": Uid.DESCALE_DS, "scale_dP": Uid.SCALE_DS}
_FP8_BACKWARD |= {"scale_dQ": Uid.SCALE_DQ, "scale_dK": Uid.SCALE_DK, "scale_dV": Uid.SCALE_DV}


def _fp8_forward(graph: Graph, x: Sdpa) -> None:
    arguments = _inputs(graph, x) | _fp8_names(_score_arguments(graph, x, None)) | _device_numbers(graph, _FP8_FORWARD)
    out, stats, _, amax_out = graph.sdpa_fp8(name="sdpa", generate_stats=True, **arguments)
    _output(graph, x, out, Uid.OUT)
    _stats_output(graph, x, stats)
    _amax_output(amax_out, Uid.AMAX_OUT)


def _fp8_backward(graph: Graph, x: Sdpa) -> None:
    arguments = _backward_inputs(graph, x) | _fp8_names(_score_arguments(graph, x, None)) | _device_numbers(graph, _FP8_BACKWARD)
    *gradients, amax_dq, amax_dk, amax_dv, amax_ds = graph.sdpa_fp8_backward(name="sdpa_backward", **arguments)
    _gradient_outputs(graph, x, gradients)
    for amax, uid in ((amax_dq, Uid.AMAX_DQ), (amax_dk, Uid.AMAX_DK), (amax_dv, Uid.AMAX_DV), (amax_ds, Uid.AMAX_DS)):
        _amax_output(amax, uid)


def _fp8_names(arguments: dict[str, object]) -> dict[str, object]:
    """Returns the same arguments with the names that the FP8 operations use."""
    return {name.removeprefix("diagonal_band_"): value for name, value in arguments.items()}


def _inputs(graph: Graph, x: Sdpa) -> dict[str, object]:
    return {"q": _tokens(graph, x, Uid.Q), "k": _tokens(graph, x, Uid.K), "v": _tokens(graph, x, Uid.V)}


def _backward_inputs(graph: Graph, x: Sdpa) -> dict[str, object]:
    return _inputs(graph, x) | {
        "o": _tokens(graph, x, Uid.OUT),
        "dO": _tokens(graph, x, Uid.DOUT),
        "stats": _statistics(graph, x, Uid.STATS, _starts_of_statistics(graph, x)),
        "use_deterministic_algorithm": x.deterministic,
    }


def _score_arguments(graph: Graph, x: Sdpa, callbacks: Callbacks | None) -> dict[str, object]:
    """Returns the arguments of everything between q k^T and the weights. They are the same in both directions."""
    arguments: dict[str, object] = {"attn_scale": _number(graph, Uid.SCALE, torch.float32)}
    if callbacks is not None:
        arguments["score_mod"] = callbacks.score_mod
    else:
        arguments |= band_arguments(x.window_left, x.window_right, x.bottom_right)
    if x.has_lengths:
        if callbacks is None:
            arguments["use_padding_mask"] = True
        for name, uid in (("seq_len_q", Uid.LENGTHS_Q), ("seq_len_kv", Uid.LENGTHS_KV)):
            arguments[name] = _tensor(graph, uid, (x.batch, 1, 1, 1), (1, 1, 1, 1), torch.int32)
    if x.bias_shape is not None:
        assert x.bias_strides is not None
        assert x.bias_dtype is not None
        arguments["bias"] = _tensor(graph, Uid.BIAS, x.bias_shape, (*x.bias_strides, 1), x.bias_dtype)
    if x.has_sink:
        arguments["sink_token"] = _per_head(graph, x, Uid.SINK)
    if x.dropout_p:
        seed, offset = (_tensor(graph, uid, (1, 1, 1, 1), (1, 1, 1, 1), torch.int64) for uid in (Uid.SEED, Uid.OFFSET))
        arguments["dropout"] = (x.dropout_p, seed, offset)
    return arguments


def make_callbacks(graph: Graph, x: Sdpa) -> Callbacks | None:
    """Returns the callbacks for the mods of `x`, with their input tensors in `graph`. Returns None if there are no mods."""
    if x.mods is None:
        return None
    inputs = []
    for i, mod_input in enumerate(x.mod_inputs):
        input_uid = FIRST_INPUT + i
        if mod_input.is_host:
            inputs.append(_number(graph, input_uid, mod_input.dtype))
        else:
            inputs.append(_tensor(graph, input_uid, mod_input.shape, mod_input.strides, mod_input.dtype))
    frame = {name: _number(graph, uid, torch.float32) for name, uid in (("hidden", Uid.HIDDEN), ("zero", Uid.ZERO))}
    for uid in frame_uids(x):
        if is_in_memory(x, uid):
            frame[uid.name.lower()] = _tensor(graph, uid, *frame_layout(x), torch.int32)
        else:
            frame[uid.name.lower()] = _number(graph, uid, torch.int32)
    return Callbacks(x.mods, inputs, frame)


def frame_uids(x: Sdpa) -> list[Uid]:
    """Returns the uids of the lengths and of the band's closed sides in a plan with mods."""
    sides = ((Uid.LEFT, x.window_left), (Uid.RIGHT, x.window_right))
    return [Uid.QUERIES, Uid.KEYS, *(uid for uid, side in sides if side is not None)]


def is_in_memory(x: Sdpa, uid: Uid) -> bool:
    """Returns whether one of `frame_uids` differs between sequences."""
    return x.has_lengths and (uid in (Uid.QUERIES, Uid.KEYS) or x.bottom_right)


def frame_layout(x: Sdpa) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns (dims, strides) of a tensor with one number per sequence.

    The number is repeated for each key, because cuDNN reads a tensor with fewer values wrongly.
    """
    row = -(-x.len_kv // 4) * 4
    return (x.batch, 1, x.len_q, x.len_kv), (row, row, 0, 1)


def frame_numbers(x: Sdpa) -> dict[int, float | int]:
    """Returns the numbers that are passed by value to a plan with mods, apart from the mods' own."""
    shift = x.len_kv - x.len_q if x.bottom_right else 0
    numbers: dict[int, float | int] = {Uid.HIDDEN: HIDDEN, Uid.ZERO: 0.0}
    integers = {Uid.QUERIES: x.len_q, Uid.KEYS: x.len_kv}
    integers |= {Uid.LEFT: shift - min(x.window_left or 0, 2**30), Uid.RIGHT: shift + min(x.window_right or 0, 2**30)}
    return numbers | {uid: integers[uid] for uid in frame_uids(x) if not is_in_memory(x, uid)}


def _number(graph: Graph, uid: int, dtype: torch.dtype) -> GraphTensor:
    ones = [1, 1, 1, 1]
    return graph.tensor(name=_name(uid), dim=ones, stride=ones, data_type=DTYPES[dtype], is_pass_by_value=True, uid=uid)


def _device_numbers(graph: Graph, uids: Mapping[str, Uid]) -> dict[str, GraphTensor]:
    return {name: _tensor(graph, uid, (1, 1, 1, 1), (1, 1, 1, 1), torch.float32) for name, uid in uids.items()}


def _amax_output(tensor: GraphTensor, uid: Uid) -> None:
    tensor.set_output(True).set_uid(uid).set_data_type(cudnn.data_type.FLOAT).set_dim([1, 1, 1, 1]).set_stride([1, 1, 1, 1])


def _layout(x: Sdpa, uid: Uid) -> tuple[tuple[int, int, int, int], tuple[int, int, int, int]]:
    """Returns (dims, strides) of a tensor of tokens."""
    is_query, has_v_dim = uid in (Uid.Q, Uid.OUT, Uid.DOUT, Uid.DQ), uid in (Uid.V, Uid.OUT, Uid.DOUT, Uid.DV)
    heads, length = (x.num_heads, x.len_q) if is_query else (x.num_heads_kv, x.len_kv)
    strides: Strides | None = getattr(x, f"strides_{uid.name.lower()}")
    assert strides is not None
    return (x.batch, heads, length, x.head_dim_v if has_v_dim else x.head_dim_qk), (*strides, 1)


def _tokens(graph: Graph, x: Sdpa, uid: Uid) -> GraphTensor:
    tensor = _tensor(graph, uid, *_layout(x, uid), _dtype_of(x, uid))
    if x.is_ragged:
        tensor.set_ragged_offset(_starts(graph, x, Uid[f"STARTS_{uid.name}"]))
    return tensor


def _output(graph: Graph, x: Sdpa, tensor: GraphTensor, uid: Uid) -> None:
    dims, strides = _layout(x, uid)
    tensor.set_output(True).set_uid(uid).set_data_type(DTYPES[_dtype_of(x, uid)]).set_dim(list(dims)).set_stride(list(strides))
    if x.is_ragged:
        tensor.set_ragged_offset(_starts(graph, x, Uid[f"STARTS_{uid.name}"]))


def _dtype_of(x: Sdpa, uid: Uid) -> torch.dtype:
    if x.fp8 is None:
        return x.dtype
    others = {Uid.OUT: x.fp8.out, Uid.DOUT: x.fp8.dout} | dict.fromkeys((Uid.DQ, Uid.DK, Uid.DV), x.fp8.gradients)
    dtype = others.get(uid, x.dtype)
    assert dtype is not None  # only a forward lacks the last two dtypes, and it has no such tensors.
    return dtype


def _gradient_outputs(graph: Graph, x: Sdpa, gradients: Sequence[GraphTensor]) -> None:
    for gradient, uid in zip(gradients, (Uid.DQ, Uid.DK, Uid.DV), strict=True):
        _output(graph, x, gradient, uid)


def _stats_output(graph: Graph, x: Sdpa, stats: GraphTensor) -> None:
    stats.set_output(True).set_uid(Uid.STATS).set_data_type(cudnn.data_type.FLOAT)
    stats.set_dim([x.batch, x.num_heads, x.len_q, 1]).set_stride(_statistics_strides(x))
    if (starts := _starts_of_statistics(graph, x)) is not None:
        stats.set_ragged_offset(starts)


def _statistics(graph: Graph, x: Sdpa, uid: Uid, starts: GraphTensor | None) -> GraphTensor:
    tensor = _tensor(graph, uid, (x.batch, x.num_heads, x.len_q, 1), tuple(_statistics_strides(x)), torch.float32)
    if starts is not None:
        tensor.set_ragged_offset(starts)
    return tensor


def _starts_of_statistics(graph: Graph, x: Sdpa) -> GraphTensor | None:
    """Returns the offsets of ragged statistics, or None if the statistics are dense."""
    return _starts(graph, x, Uid.STARTS_STATS) if x.is_ragged else None


def _statistics_strides(x: Sdpa) -> list[int]:
    # Ragged statistics are token-major, because a backward reads head-major ones as zeros (cudnn-frontend issue 462).
    if x.is_ragged:
        return [x.len_q * x.num_heads, 1, x.num_heads, 1]
    return [x.num_heads * x.len_q, x.len_q, 1, 1]


def _starts(graph: Graph, x: Sdpa, uid: Uid) -> GraphTensor:
    return _tensor(graph, uid, (x.batch + 1, 1, 1, 1), (1, 1, 1, 1), torch.int64)


def _per_head(graph: Graph, x: Sdpa, uid: Uid) -> GraphTensor:
    return _tensor(graph, uid, (1, x.num_heads, 1, 1), (x.num_heads, 1, 1, 1), torch.float32)


def _tensor(graph: Graph, uid: int, dims: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> GraphTensor:
    return graph.tensor(name=_name(uid), dim=list(dims), stride=list(strides), data_type=DTYPES[dtype], uid=uid)


def _name(uid: int) -> str:
    return Uid(uid).name.lower() if uid < FIRST_INPUT else f"input{uid - FIRST_INPUT}"
