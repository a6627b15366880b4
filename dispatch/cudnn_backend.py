"""The cuDNN backend: the calls that its SDPA graphs support, and the step from a spec and its operands to the launchers."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flexattn.dispatch import cudnn_block_lists, options
from flexattn.dispatch.cudnn_mods import Lowered, lowered, mod_inputs, mods_error, reads_tables
from flexattn.dispatch.cudnn_mods import without_data as without_mod_data
from flexattn.dispatch.cudnn_rules import BLOCK_LISTS, FP8, is_banded_bottom_right, is_packed, known_bad, refusal, version_text
from flexattn.dispatch.head_dims import head_dim_error
from flexattn.dispatch.pages import with_cu_seqlens, without_pages
from flexattn.dispatch.select import RuntimeFailure, shape_of
from flexattn.dispatch.spec import (
    AttentionSpec,
    Direction,
    Gradients,
    Operands,
    as_bshd,
    dqkv_of,
    empty_gradients,
    empty_outputs,
    misses_diagonal,
)
from flexattn.forks import fork_safe

if TYPE_CHECKING:
    from flexattn.kernels_cudnn.attention import Written
    from flexattn.kernels_cudnn.graphs import Sdpa
    from flexattn.kernels_cudnn.problem import Problem

SUPPORT_IS_FINAL = False  # cuDNN's own answer comes only when a plan is built.
DTYPES = (torch.float16, torch.bfloat16)
OLDEST_CAPABILITY = (8, 0)  # the first compute capability with such graphs.
RUN_ON = ((9, 0),)  # compute capabilities with checked results. On others, only the plans are checked.
RAGGED_BACKWARD = (9, 10)  # major capabilities with plans for packed backwards. cuDNN declines them on sm_8x and sm_12x.
# The first library with all plans of later ones, as tests showed. Before it, CUDA graphs may replay a backward wrongly.
OLDEST_LIBRARY = 91501
# The first supported frontend. With 1.24 to 1.26, cuDNN 9.19 has no backward. 1.23 and older do not accept these keys of buffers.
OLDEST_FRONTEND = (1, 27)
RUN_WITH = (91900,)  # libraries with checked results, on an NVIDIA H200 and an H100.
RAGGED_WORKSPACE = 91800  # the first library that clears its workspace in a backward of packed sequences (see `known_bad`).
_GET_FRONTEND = f"pip install 'nvidia-cudnn-frontend>={'.'.join(map(str, OLDEST_FRONTEND))}'"
MOST_HEADS = 65535
EXACT_SHAPES = 8  # the number of shapes of one dense spec with their own plans. Later shapes share plans for rounded-up sizes.


def unsupported(spec: AttentionSpec, direction: Direction) -> str | None:
    """Returns why the graphs cannot run `spec` in `direction`, with an alternative, or None if no reason is known.

    It applies the rules of this file and of `cudnn_rules`, and builds nothing. cuDNN itself decides when a plan is built. If cuDNN
    has no plan, RuntimeFailure is raised, and it is cached for calls of the same shapes.
    """
    error = device_error(spec.device_type, spec.capability) or rule_error(spec, direction)
    return error or (_known_bad(spec, direction) if spec.block_size is None else cudnn_block_lists.frontend_error())


def device_error(device_type: str, capability: tuple[int, int] | None) -> str | None:
    if device_type != "cuda":
        return f"cuDNN runs on CUDA devices, not on {device_type!r}"
    if capability is None:
        return "this GPU's compute capability is unknown, and cuDNN's graphs depend on it; use backend='triton'"
    if capability < OLDEST_CAPABILITY:
        return (
            f"cuDNN's graphs need compute capability 8.0, and this device has {capability[0]}.{capability[1]}; use backend='eager'"
        )
    return library_error()


def not_run_yet(spec: AttentionSpec) -> str | None:
    """Returns the part of a spec that was not run on cuDNN yet, or None if such results were checked."""
    if spec.capability is None:
        return None
    major, minor = spec.capability
    if spec.capability not in RUN_ON:
        where = f"on sm_{major}{minor}"
    elif library_error() is None and _version() not in RUN_WITH:
        where = f"with cuDNN {version_text(_version())}"
    elif spec.page_size:
        where = "over pages"
    elif spec.block_size is not None and (frontend := cudnn_block_lists.not_run_yet()):
        where = frontend
    else:
        return None
    return f"not run {where} yet, so no result was checked"


@functools.cache
def library_error() -> str | None:
    """Returns why cuDNN's frontend or library cannot be used, with an installation command, or None if both can."""
    if importlib.util.find_spec("cudnn") is None:
        return f"the cuDNN frontend is not installed; {_GET_FRONTEND}"
    try:
        import cudnn
    except MemoryError:
        raise
    except Exception as e:  # a broken installation may raise any error.
        return f"the cuDNN frontend is installed and cannot be imported ({type(e).__name__}: {e}); reinstall nvidia-cudnn-frontend"
    if tuple(int(part) for part in cudnn.__version__.split(".")[:2]) < OLDEST_FRONTEND:
        return f"the cuDNN frontend is version {cudnn.__version__}; {_GET_FRONTEND}"
    try:
        version = cudnn.backend_version()
    except Exception as e:  # a RuntimeError in the cases seen so far.
        return f"the cuDNN library cannot be loaded ({e}); pip install nvidia-cudnn-cu13"
    if version < OLDEST_LIBRARY:
        oldest = version_text(OLDEST_LIBRARY)
        return f"the cuDNN library is {version_text(version)}, older than {oldest}; pip install -U nvidia-cudnn-cu13"
    return None


def _known_bad(spec: AttentionSpec, direction: Direction) -> str | None:
    return known_bad(spec, direction, _version())


def _version() -> int:
    """Returns the library's version as its number, such as 91900 for 9.19.0."""
    import cudnn

    return int(cudnn.backend_version())


def _is_before(version: int) -> bool:
    """Returns whether the library is installed and older than a version."""
    return library_error() is None and _version() < version


def rule_error(spec: AttentionSpec, direction: Direction) -> str | None:
    """Returns why this file refuses a spec, or None if it does not.

    It refuses calls that the graphs cannot express, that every cuDNN version declines, that end the process, or that are untested.
    """
    is_backward = direction == "backward"
    if spec.block_size is not None:
        reason = refusal(BLOCK_LISTS, spec, direction)
        return None if reason is None else f"cuDNN's block-sparse attention {reason}"
    if spec.fp8 is not None:
        if reason := refusal(FP8, spec, direction):
            return reason
    elif spec.dtype not in DTYPES:
        return (
            f"cuDNN's graphs support fp16 and bf16, not {str(spec.dtype).removeprefix('torch.')}; cast q, k and v, or use "
            "backend='triton'"
        )
    largest = 256 if is_backward else 512
    limit = f"cuDNN's {direction} supports"
    if reason := head_dim_error(spec, limit, 8, (largest, largest), "larger ones run on backend='eager'"):
        return reason
    if spec.num_heads > MOST_HEADS:
        return f"there are {spec.num_heads} heads, and cuDNN supports up to {MOST_HEADS}; split them"
    if spec.batch_invariant and not is_backward:
        return (
            "cuDNN's rounding of a sequence may depend on the rest of the batch; use backend='triton', or leave out batch_invariant"
        )
    if spec.kv_dtype is not None:
        return "cuDNN's graphs support only one dtype for q, k and v; use backend='triton' for FP8 keys with 16-bit queries"
    if spec.page_size and (reason := _pages_error(spec, is_backward)):
        return reason
    if misses_diagonal(spec.band.left, spec.band.right):
        return "a window that ends before its diagonal is untested on cuDNN; use backend='triton'"
    if spec.softcap:
        return "cuDNN's graphs have no softcap; use backend='triton'"
    if spec.kv_lists:
        return "cuDNN's graphs have no lists of keys (kv_indices); use backend='triton' or 'eager'"
    if spec.length_kv == 1:
        return "cuDNN does not support a single key; use backend='triton'"
    if is_backward and spec.length_q == 1:
        return (
            "cuDNN's gradients of a single query may be NaN (cudnn-frontend issue 1072), or the process may end (issue 1071); use "
            "backend='triton'"
        )
    if is_backward and spec.needs_lse_grad:
        return "cuDNN takes no gradient of lse; use backend='triton', or leave lse out of the loss"
    if is_backward and spec.is_part and spec.softmax_type == "learnable":
        return (
            "cuDNN's dsoftmax_offset lacks the queries that see none of these keys, but see keys of another part; use "
            "backend='triton'"
        )
    if is_backward and spec.results.fp32 != "none":
        return "cuDNN returns gradients in 16 bits; use backend='triton', or fp32_gradients='none'"
    if not is_backward and spec.results.fp32_out:
        return "cuDNN returns out in 16 bits; use backend='triton'"
    if is_backward and spec.deterministic:
        return "cuDNN's deterministic backward needs memory quadratic in the sequence length; use backend='triton'"
    return (
        _bias_error(spec, is_backward)
        or _dropout_error(spec)
        or _softmax_error(spec)
        or (mods_error(spec, direction) if spec.mods is not None else None)
    )


def _pages_error(spec: AttentionSpec, is_backward: bool) -> str | None:
    if is_backward:
        return "pages have no backward; gather k and v with k[page_table]"
    if spec.page_size & (spec.page_size - 1):
        return f"cuDNN supports page sizes that are a power of two, not {spec.page_size}; use backend='triton'"
    if spec.mods is not None:
        return "score_mod and mask_mod over pages are not supported on cuDNN; use backend='triton'"
    if spec.dropout:
        return "dropout over pages is untested on cuDNN; use backend='triton'"
    return None


_TOP_LEFT = (
    "with a mask on the bottom-right diagonal; if sq == skv, use the top-left diagonal, which is the same "
    "(attn_mask_type='causal', or bottom_right_diagonal=False)"
)


def _bias_error(spec: AttentionSpec, is_backward: bool) -> str | None:
    if spec.bias_type == "pre_scale_bias":
        return "cuDNN adds a bias after the scale; pass bias * softmax_scale as a post_scale_bias"
    if spec.bias_type == "alibi":
        return "cuDNN's ALiBi supports only fixed slopes and causal masks; use backend='triton'"
    if spec.bias_dims is None:
        return None
    if spec.bias_is_shared:
        return "batch entries share entries of the bias; use backend='triton', or pass bias.repeat_interleave(b // len(bias), 0)"
    if not spec.bias_dims[3]:
        return (
            "the bias is broadcast over the keys, and cuDNN needs a value for each key; expand the bias, or leave it out, because "
            "it changes only lse"
        )
    if is_packed(spec):
        return "a bias over packed sequences is untested on cuDNN; use backend='triton', or a dense format with cu_seqlens"
    if is_banded_bottom_right(spec):
        return f"cuDNN does not support a bias {_TOP_LEFT}"
    if is_backward and not spec.bias_dims[2]:
        return "cuDNN 9.19 computes wrong gradients if the bias is broadcast over the queries; use backend='triton'"
    return None


def _dropout_error(spec: AttentionSpec) -> str | None:
    if not spec.dropout:
        return None
    if spec.has_origin:
        return (
            "cuDNN draws its own random numbers and does not support an rng_state of two dims, which has positions in a larger "
            "call; use backend='triton'"
        )
    if is_packed(spec):
        return "dropout over packed sequences is untested on cuDNN; use backend='triton', or a dense format with cu_seqlens"
    if is_banded_bottom_right(spec):
        return f"cuDNN does not support dropout {_TOP_LEFT}"
    if spec.length_q == 1:
        return "cuDNN does not support dropout with a single query; use backend='triton'"
    return None


def _softmax_error(spec: AttentionSpec) -> str | None:
    if spec.softmax_type == "vanilla":
        return None
    if spec.length_q == 1:
        return "cuDNN does not support a sink with a single query; use backend='triton'"
    if spec.return_max_logit:
        return "cuDNN does not return max_logit with a sink; use backend='triton'"
    return None


def forward(spec: AttentionSpec, x: Operands) -> tuple[Tensor, Tensor, Tensor]:
    if spec.block_size is not None:
        return cudnn_block_lists.forward(spec, x)
    is_bucketed = _is_bucketed(spec, x)  # before pages are gathered, as in `prepare`.
    if x.page_table is not None:  # cuDNN reads the rows of pages past a sequence's keys, which hold any values.
        spec, x = without_pages(spec, x)
    out, lse, max_logit = empty_outputs(spec, x)
    problem, out_view, directory = _problem(spec, x, "forward", is_bucketed), as_bshd(out, spec.q_format), options.plan_directory()
    with _failures():
        if spec.fp8 is not None:
            from flexattn.kernels_cudnn.fp8 import Descales, fp8_forward

            fp8_forward(problem, Descales(*x.descales[:3]), out_view, lse, directory=directory)
        else:
            from flexattn.kernels_cudnn.attention import attention_forward

            max_target = max_logit if spec.return_max_logit else None
            attention_forward(problem, out_view, lse, max_target, directory)
    return out, lse, max_logit


def backward(spec: AttentionSpec, x: Operands, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None) -> Gradients:
    if dlse is not None:
        raise ValueError("dlse is given, and cuDNN takes no gradient of lse; select() with needs_lse_grad refuses such calls")
    if spec.block_size is not None:
        return cudnn_block_lists.backward(spec, x, out, lse, dout)
    if spec.fp8 is not None and dout.element_size() > 1:
        raise ValueError(
            f"dout is {dout.dtype}, and cuDNN's FP8 backward needs dout in FP8 with a descale; name backend='cudnn' in the "
            "call, so that dout is quantised"
        )
    gradients = empty_gradients(spec, x)
    problem, directory = _problem(spec, x, "backward"), options.plan_directory()
    out_view, dout_view = as_bshd(out, spec.q_format), as_bshd(dout, spec.q_format)
    written = _launcher_views(spec, gradients)
    with _failures():
        if spec.fp8 is not None:
            from flexattn.kernels_cudnn.fp8 import Descales, Incoming, fp8_backward

            *input_descales, descale_dout = x.descales
            incoming = Incoming(out_view, lse, dout_view, descale_dout)
            fp8_backward(problem, Descales(*input_descales), incoming, written, directory=directory)
        else:
            from flexattn.kernels_cudnn.attention import attention_backward

            attention_backward(problem, out_view, lse, dout_view, written, directory)
    doffset = gradients.dsoftmax_offset
    if doffset is not None and x.softmax_offset is not None:
        gradients = gradients._replace(dsoftmax_offset=doffset.to(x.softmax_offset.dtype))
    return gradients


def prepare(spec: AttentionSpec, x: Operands, direction: Direction) -> None:
    """Builds the plan of a call unless it is cached. Raises RuntimeFailure if cuDNN has no plan. It reads no data."""
    if spec.block_size is not None:
        if reason := cudnn_block_lists.shape_error(spec, x):
            raise RuntimeFailure(reason)
        return
    from flexattn.kernels_cudnn.plans import PLANS, place_of

    device = _device_of(spec, x)
    key = (spec, direction, place_of(device), shape_of(x), *map(_is_aligned, (x.q, x.k, x.v, x.bias, *x.mod_tensors)))
    if key in prepared_calls:
        return
    with _failures():
        sdpa = _sdpa(spec, x, direction, _is_bucketed(spec, x))
        if sdpa is None:
            return
        PLANS.get(sdpa, device, options.plan_directory())
    if len(prepared_calls) >= _MOST_PREPARED:
        prepared_calls.clear()
    prepared_calls.add(key)


def cannot_build(spec: AttentionSpec, x: Operands) -> str | None:
    from flexattn.kernels_cudnn.plans import is_without_device

    if is_without_device() or x.q.device.type == "cuda":
        return None
    if torch.cuda.is_available() and torch.cuda.get_device_capability() == spec.capability:
        return None
    return "cuDNN builds plans only for a present GPU, and this machine has none of this kind"


def provisional(spec: AttentionSpec, x: Operands, direction: Direction) -> str | None:
    if spec.block_size is not None:
        return cudnn_block_lists.provisional(spec, x)
    from flexattn.kernels_cudnn.plans import PLANS, Plan

    try:
        with _failures():
            sdpa = _sdpa(spec, x, direction, _is_bucketed(spec, x, takes_slot=False))
    except RuntimeFailure as e:  # the shapes already show it.
        return f"it will be refused when the call first runs, or by explain(..., build=True): {e}"
    if sdpa is None or isinstance(PLANS.known(sdpa, _device_of(spec, x)), Plan):
        return None
    advice = cannot_build(spec, x) or "explain(..., build=True) builds it now"
    return f"cuDNN may refuse the plan, which is built when the call first runs; {advice}"


def _device_of(spec: AttentionSpec, x: Operands) -> torch.device:
    """Returns the device of a call's plans: that of the operands, or the current one if the operands have no memory."""
    if x.q.device.type == "meta" and cannot_build(spec, x) is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return x.q.device


def _sdpa(spec: AttentionSpec, x: Operands, direction: Direction, is_bucketed: bool) -> Sdpa | None:
    """Returns the description of a call's plan, or None if the call is empty and runs no plan. It reads no data.

    Raises PlanNotSupported if the shapes already show that there is no plan.
    """
    from flexattn.kernels_cudnn.attention import backward_call, forward_call
    from flexattn.kernels_cudnn.fp8 import fp8_call
    from flexattn.kernels_cudnn.problem import without_data

    shadows = {id(t): without_data(t) for t in x if isinstance(t, Tensor)}  # identical tensors stay identical.
    named: dict[str, Any] = {name: shadows[id(t)] for name, t in x._asdict().items() if isinstance(t, Tensor)}
    meta = x._replace(**named, mod_tensors=[without_mod_data(t) for t in x.mod_tensors])
    if x.page_table is not None:
        spec, meta = without_pages(spec, meta)
    problem = _problem(spec, meta, direction, is_bucketed)
    if problem.is_empty:
        return None
    out, lse, max_logit = empty_outputs(spec, meta)
    out_view = as_bshd(out, spec.q_format)
    if spec.fp8 is not None:
        is_forward = direction == "forward"
        dout = None if is_forward else torch.empty_like(out_view, dtype=spec.fp8.grad_dtype)
        return fp8_call(
            problem, out_view, lse, dout, None if is_forward else _launcher_views(spec, empty_gradients(spec, meta))
        ).sdpa
    if direction == "forward":
        return forward_call(problem, out_view, lse, max_logit if spec.return_max_logit else None).sdpa
    return backward_call(problem, out_view, lse, out_view, _launcher_views(spec, empty_gradients(spec, meta))).sdpa


def watched(watcher: Callable[[object, dict[int, Tensor]], None]) -> contextlib.AbstractContextManager[None]:
    from flexattn.kernels_cudnn.execute import watched_executions

    return watched_executions(watcher)


def can_be_recorded() -> bool:
    return True


def forget_failures() -> None:
    """Forgets a missing cuDNN, refused plans, and the calls whose plans are known to be built."""
    library_error.cache_clear()
    cudnn_block_lists.frontend_error.cache_clear()
    prepared_calls.clear()
    plans = sys.modules.get("flexattn.kernels_cudnn.plans")  # if it is not imported, no plan has failed.
    if plans is not None:
        plans.PLANS.forget_failures()


prepared_calls: set[object] = set()  # calls whose plan is built. Each forward prepares its backward, so this check must be fast.
_MOST_PREPARED = 4096


def _is_aligned(t: Tensor | None) -> bool:
    return t is None or t.data_ptr() % 16 == 0


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    from flexattn.kernels_cudnn.plans import PlanNotSupported

    try:
        yield
    except PlanNotSupported as e:
        raise RuntimeFailure(f"cuDNN has no plan for it: {e}") from e


def _launcher_views(spec: AttentionSpec, gradients: Gradients) -> Written:
    from flexattn.kernels_cudnn.attention import Written

    dq, dk, dv = dqkv_of(spec, gradients)
    views = (as_bshd(dq, spec.q_format), as_bshd(dk, spec.kv_format), as_bshd(dv, spec.kv_format))
    return Written(*views, gradients.dbias, gradients.dsoftmax_offset)


def _problem(spec: AttentionSpec, x: Operands, direction: Direction, is_bucketed: bool | None = None) -> Problem:
    from flexattn.kernels_cudnn.problem import Problem

    x = with_cu_seqlens(x, (spec.q_format, spec.kv_format))
    views = {"q": as_bshd(x.q, spec.q_format), "k": as_bshd(x.k, spec.kv_format), "v": as_bshd(x.v, spec.kv_format)}
    problem = Problem(
        **(x.shared_with(Problem) | views),
        window_left=spec.band.left,
        window_right=spec.band.right,
        bottom_right=spec.band.bottom_right,
        has_sink=spec.softmax_type != "vanilla",
        is_bucketed=_is_bucketed(spec, x) if is_bucketed is None else is_bucketed,
    )
    if spec.mods is None or problem.is_empty:
        return problem
    result = lowered(spec.mods, direction)
    assert isinstance(result, Lowered), result
    inputs = mod_inputs(spec.mods, result.recipes, x, spec.num_heads, problem.sizes)
    return dataclasses.replace(problem, mods=result.mods, mod_inputs=inputs)


exact_shapes: OrderedDict[AttentionSpec, set[tuple[torch.Size, torch.Size, int]]] = OrderedDict()
_MOST_SPECS = 1024
_shapes_lock = fork_safe(threading.Lock())


def _is_bucketed(spec: AttentionSpec, x: Operands, takes_slot: bool = True) -> bool:
    """Returns whether a dense call runs on a plan for rounded-up sizes. It does after the first EXACT_SHAPES shapes of a spec.

    A plan for the exact shape is faster, and training has few shapes. If shapes keep changing, builds must stop. A shape keeps its
    kind of plan, so that a repeated call and its backward run alike.

    Some calls always have exact plans. Lengths are in the strides of a bias, and of a table that a mod reads. A sink's gradient
    over packed sequences is wrong (see `known_bad`), and FP8 has no backward over packed sequences. On some GPUs, cuDNN has no
    backward over packed sequences at all.

    takes_slot: if False, the call does not count as one of the first shapes.
    """
    if spec.fp8 is not None:
        return False
    if spec.mods is not None and reads_tables(spec.mods):
        return False
    if is_packed(spec) or x.bias is not None or spec.softmax_type != "vanilla":
        return False
    if spec.capability is not None and (spec.capability[0] not in RAGGED_BACKWARD or _is_before(RAGGED_WORKSPACE)):
        return False
    family = spec._replace(length_q=0, length_kv=0, needs_grad=False, needs_lse_grad=False, return_max_logit=False)
    shape = (x.q.shape, x.k.shape, x.max_seqlen_kv if spec.page_size else 0)
    known = exact_shapes.get(family, ())
    if shape in known:
        return False
    if not takes_slot:
        return len(known) >= EXACT_SHAPES
    with _shapes_lock:
        shapes = exact_shapes.setdefault(family, set())
        while len(exact_shapes) > _MOST_SPECS:
            exact_shapes.popitem(last=False)
        if len(shapes) < EXACT_SHAPES:
            shapes.add(shape)
        return shape not in shapes
