"""cuDNN's SDPA graphs: what they take, and the way from a spec and its operands to their launchers."""

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

from flexattn.dispatch import options, runtime_failures
from flexattn.dispatch.cudnn_mods import Lowered, lowered, mod_inputs, mods_error, reads_tables
from flexattn.dispatch.cudnn_mods import without_data as without_mod_data
from flexattn.dispatch.head_dims import head_dim_error
from flexattn.dispatch.known_bad import known_bad, version_text
from flexattn.dispatch.pages import with_cu_seqlens, without_pages
from flexattn.dispatch.runtime_failures import RuntimeFailure
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
    from flexattn.kernels_cudnn.graphs import Sdpa

SUPPORT_IS_FINAL = False  # cuDNN's own answer comes with a plan
DTYPES = (torch.float16, torch.bfloat16)
OLDEST_CAPABILITY = (8, 0)  # the first that cuDNN has such graphs for
RUN_ON = ((9, 0),)  # where results were checked; elsewhere cuDNN's plans are all that is known
RAGGED_BACKWARD = (9, 10)  # major capabilities with plans for it; cuDNN declines it on sm_8x and sm_12x
OLDEST_LIBRARY = 91501  # the first with all plans of later ones, as was seen; before it CUDA graphs may replay a backward wrongly
OLDEST_FRONTEND = (1, 27)  # from 1.24 to 1.26 cuDNN 9.19 has no backward; 1.23 and older take no such keys of buffers
RUN_WITH = (91900,)  # libraries with which results were checked, on an NVIDIA H200 and an H100
RAGGED_WORKSPACE = 91800  # the first that clears its workspace in a backward of packed sequences (`known_bad`)
_GET_FRONTEND = f"pip install 'nvidia-cudnn-frontend>={'.'.join(map(str, OLDEST_FRONTEND))}'"
MOST_HEADS = 65535
EXACT_SHAPES = 8  # sizes of one dense spec that get a plan of their own; later ones share plans for rounded-up sizes


def unsupported(spec: AttentionSpec, direction: Direction) -> str | None:
    """None if the graphs can run `spec` in `direction` as far as is known without building one, else why not and what to change.

    Asks our rules first, then `known_bad`. cuDNN itself answers when a plan is built to be run: where it has none, it raises
    RuntimeFailure, which is remembered for calls of the same shapes.
    """
    return device_error(spec.device_type, spec.capability) or rule_error(spec, direction) or _known_bad(spec, direction)


def device_error(device_type: str, capability: tuple[int, int] | None) -> str | None:
    if device_type != "cuda":
        return f"cuDNN runs on CUDA devices, not on {device_type!r}"
    if capability is None:
        return "cuDNN has other graphs for each kind of GPU, and this one's compute capability is unknown; use backend='triton'"
    if capability < OLDEST_CAPABILITY:
        return (
            f"cuDNN's graphs need compute capability 8.0, and this device has {capability[0]}.{capability[1]}; use backend='eager'"
        )
    return library_error()


def not_run_yet(spec: AttentionSpec) -> str | None:
    """None where results of such a spec on its kind of GPU were checked, else what is not known."""
    if spec.capability is None:
        return None
    major, minor = spec.capability
    if spec.capability not in RUN_ON:
        where = f"on sm_{major}{minor}"
    elif library_error() is None and _version() not in RUN_WITH:
        where = f"with cuDNN {version_text(_version())}"
    elif spec.page_size:
        where = "over pages"
    else:
        return None
    return f"not run {where} yet: cuDNN's own rules speak for it alone, and no result was checked"


@functools.cache
def library_error() -> str | None:
    """None if cudnn's frontend and library are there and of versions that will do, else what is missing and how to get it."""
    if importlib.util.find_spec("cudnn") is None:
        return f"the cuDNN frontend is not installed; {_GET_FRONTEND}"
    try:
        import cudnn
    except MemoryError:
        raise
    except Exception as e:  # a broken installation may raise anything
        return f"the cuDNN frontend is installed and cannot be imported ({type(e).__name__}: {e}); reinstall nvidia-cudnn-frontend"
    if tuple(int(part) for part in cudnn.__version__.split(".")[:2]) < OLDEST_FRONTEND:
        return f"the cuDNN frontend is version {cudnn.__version__}; {_GET_FRONTEND}"
    try:
        version = cudnn.backend_version()
    except Exception as e:  # RuntimeError, as found
        return f"the cuDNN library cannot be loaded ({e}); pip install nvidia-cudnn-cu13"
    if version < OLDEST_LIBRARY:
        oldest = version_text(OLDEST_LIBRARY)
        return f"the cuDNN library is {version_text(version)}, older than {oldest}; pip install -U nvidia-cudnn-cu13"
    return None


def _known_bad(spec: AttentionSpec, direction: Direction) -> str | None:
    return known_bad(spec, direction, _version())


def _version() -> int:
    """Returns the library's version as its own number, 91900 for 9.19.0."""
    import cudnn

    return int(cudnn.backend_version())


def _is_before(version: int) -> bool:
    """Returns whether the library is there and older."""
    return library_error() is None and _version() < version


def rule_error(spec: AttentionSpec, direction: Direction) -> str | None:
    """Returns what the graphs cannot say, cuDNN declines in every version, would kill the process, or is unproved."""
    is_backward = direction == "backward"
    if spec.fp8 is not None:
        if reason := _fp8_error(spec, direction):
            return reason
    elif spec.dtype not in DTYPES:
        return (
            f"the graphs take fp16 and bf16, not {str(spec.dtype).removeprefix('torch.')}; cast q, k and v, or use backend='triton'"
        )
    largest = 256 if is_backward else 512
    if reason := head_dim_error(spec, f"the {direction} takes", 8, (largest, largest), "larger ones run on backend='eager'"):
        return reason
    if spec.num_heads > MOST_HEADS:
        return f"there are {spec.num_heads} heads; cuDNN takes up to {MOST_HEADS}; split them"
    if spec.batch_invariant and not is_backward:
        return "cuDNN's kernels may round a sequence otherwise in another batch; use backend='triton', or leave out batch_invariant"
    if spec.kv_dtype is not None:
        return "the graphs take q, k and v in one dtype; use backend='triton' for keys in FP8 beside other queries"
    if spec.page_size and (reason := _pages_error(spec, is_backward)):
        return reason
    if misses_diagonal(spec.band.left, spec.band.right):
        return "a window that ends before its diagonal was not run on cuDNN; use backend='triton'"
    if spec.softcap:
        return "the graphs have no softcap; use backend='triton'"
    if spec.block_size is not None:
        return "cuDNN has no block masks; pass what it hides as a mask_mod alone, or use backend='triton'"
    if spec.length_kv == 1:
        return "there is one key, which cuDNN's kernels are not made for; use backend='triton'"
    if is_backward and spec.length_q == 1:
        return (
            "there is one query, and plans for its gradients can give NaN (cudnn-frontend issue 1072) or end the process (issue "
            "1071); use backend='triton'"
        )
    if is_backward and spec.needs_lse_grad:
        return "cuDNN takes no gradient of lse; use backend='triton', or no lse in the loss"
    if is_backward and spec.is_part and spec.softmax_type == "learnable":
        return (
            "cuDNN leaves out of dsoftmax_offset the queries that see none of these keys, though they see others of the whole; use "
            "backend='triton'"
        )
    if is_backward and spec.results.fp32 != "none":
        return "cuDNN gives gradients in 16 bits; use backend='triton', or fp32_gradients='none'"
    if not is_backward and spec.results.fp32_out:
        return "cuDNN gives out in 16 bits; use backend='triton'"
    if is_backward and spec.deterministic:
        return (
            "cuDNN's deterministic backward needs memory quadratic in the length; use backend='triton', whose deterministic "
            "backward does not"
        )
    return (
        _bias_error(spec, is_backward)
        or _dropout_error(spec)
        or _softmax_error(spec)
        or (mods_error(spec, direction) if spec.mods is not None else None)
    )


def _pages_error(spec: AttentionSpec, is_backward: bool) -> str | None:
    if is_backward:
        return "there is no backward through pages; gather k and v by k[page_table]"
    if spec.page_size & (spec.page_size - 1):
        return f"cuDNN takes pages of a power of two of tokens, and these have {spec.page_size}; use backend='triton'"
    if spec.mods is not None:
        return "score_mod and mask_mod over pages are not lowered to cuDNN's graphs; use backend='triton'"
    if spec.dropout:
        return "dropout over pages is not proved right on cuDNN; use backend='triton'"
    return None


def _fp8_error(spec: AttentionSpec, direction: Direction) -> str | None:
    from flexattn.kernels_cudnn.fp8_rules import Fp8Call, fp8_error

    assert spec.fp8 is not None
    call = Fp8Call(
        direction,
        spec.head_dim_qk,
        spec.head_dim_v,
        per_tensor=not any(spec.fp8.descale_dims),
        is_packed="thd" in (spec.q_format, spec.kv_format),
        one_query=spec.length_q == 1,
        is_bottom_right=_is_banded_bottom_right(spec),
        has_bias=spec.bias_type != "no_bias",
        has_sink=spec.softmax_type != "vanilla",
        has_mods=spec.mods is not None,
        has_dropout=spec.dropout,
        wants_max=spec.return_max_logit,
    )
    return fp8_error(call)


_TOP_LEFT = (
    "a mask follows the bottom-right diagonal; where sq == skv the top-left one is the same: attn_mask_type='causal', or "
    "bottom_right_diagonal=False"
)


def _bias_error(spec: AttentionSpec, is_backward: bool) -> str | None:
    if spec.bias_type == "pre_scale_bias":
        return "cuDNN adds a bias after the scale; pass bias * softmax_scale as a post_scale_bias"
    if spec.bias_type == "alibi":
        return "cuDNN's ALiBi has fixed slopes and causal masks alone; use backend='triton'"
    if spec.bias_dims is None:
        return None
    if not spec.bias_dims[3]:
        return (
            "the bias is broadcast over the keys, where cuDNN wants a value for each; expand it, or leave it out, as it changes "
            "nothing but lse"
        )
    if "thd" in (spec.q_format, spec.kv_format):
        return "a bias over packed sequences is not proved right on cuDNN; use backend='triton', or a dense format with cu_seqlens"
    if _is_banded_bottom_right(spec):
        return f"cuDNN takes no bias where {_TOP_LEFT}"
    if is_backward and not spec.bias_dims[2]:
        return "gradients come out wrong where the bias is broadcast over the queries (seen on cuDNN 9.19); use backend='triton'"
    return None


def _dropout_error(spec: AttentionSpec) -> str | None:
    if not spec.dropout:
        return None
    if spec.has_origin:
        return (
            "cuDNN draws its own numbers, at no positions of a whole, which an rng_state of two dims asks for; use backend='triton'"
        )
    if "thd" in (spec.q_format, spec.kv_format):
        return "dropout over packed sequences is not proved right on cuDNN; use backend='triton', or a dense format with cu_seqlens"
    if _is_banded_bottom_right(spec):
        return f"cuDNN takes no dropout where {_TOP_LEFT}"
    if spec.length_q == 1:
        return "cuDNN takes no dropout with one query; use backend='triton'"
    return None


def _softmax_error(spec: AttentionSpec) -> str | None:
    if spec.softmax_type == "vanilla":
        return None
    if spec.length_q == 1:
        return "cuDNN takes no sink with one query; use backend='triton'"
    if spec.return_max_logit:
        return "cuDNN gives no max_logit beside a sink; use backend='triton'"
    return None


def _is_banded_bottom_right(spec: AttentionSpec) -> bool:
    return spec.band.bottom_right and (spec.band.left is not None or spec.band.right is not None)


def _needs_gathered_keys(x: Operands) -> bool:
    """Returns whether the call is run with each sequence's pages copied into a dense tensor, as cuDNN must not read the pools."""
    if x.page_table is None:
        return False
    from flexattn.kernels_cudnn.attention import reads_pages

    return not reads_pages(x.k, x.v)


def forward(spec: AttentionSpec, x: Operands) -> tuple[Tensor, Tensor, Tensor]:
    is_bucketed = _is_bucketed(spec, x)  # before pages are gathered, as `prepare` asks
    if _needs_gathered_keys(x):
        spec, x = without_pages(spec, x)
    out, lse, max_logit = empty_outputs(spec, x)
    problem, out_view, directory = _problem(spec, x, "forward", is_bucketed), as_bshd(out, spec.q_format), options.plan_directory()
    with _failures():
        if spec.fp8 is not None:
            from flexattn.kernels_cudnn.fp8 import Descales, fp8_forward

            fp8_forward(problem, Descales(*x.descales[:3]), out_view, lse, directory=directory)
        else:
            from flexattn.kernels_cudnn.attention import attention_forward

            wanted = max_logit if spec.return_max_logit else None
            attention_forward(problem, out_view, lse, wanted, directory)
    return out, lse, max_logit


def backward(spec: AttentionSpec, x: Operands, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None) -> Gradients:
    if dlse is not None:
        raise ValueError("cuDNN takes no gradient of lse, and dlse is given; select() with needs_lse_grad refuses such a call")
    if spec.fp8 is not None and dout.element_size() > 1:
        raise ValueError(
            f"dout is {dout.dtype}, and cuDNN's backward in FP8 takes it in FP8 with a descale; a call that names backend='cudnn' "
            "gives it so"
        )
    gradients = empty_gradients(spec, x)
    problem, directory = _problem(spec, x, "backward"), options.plan_directory()
    out_view, dout_view = as_bshd(out, spec.q_format), as_bshd(dout, spec.q_format)
    written = _launcher_views(spec, gradients)
    with _failures():
        if spec.fp8 is not None:
            from flexattn.kernels_cudnn.fp8 import Descales, Incoming, fp8_backward

            *of_inputs, descale_dout = x.descales
            incoming = Incoming(out_view, None, lse, dout_view, descale_dout)
            fp8_backward(problem, Descales(*of_inputs), incoming, written, directory=directory)
        else:
            from flexattn.kernels_cudnn.attention import attention_backward

            attention_backward(problem, out_view, lse, dout_view, written, directory)
    doffset = gradients.dsoftmax_offset
    if doffset is not None and x.softmax_offset is not None:
        gradients = gradients._replace(dsoftmax_offset=doffset.to(x.softmax_offset.dtype))
    return gradients


def prepare(spec: AttentionSpec, x: Operands, direction: Direction) -> None:
    """Builds the plan that the call will run, or finds it; raises RuntimeFailure where cuDNN has none. Reads no data."""
    from flexattn.kernels_cudnn.plans import PLANS, place_of

    device = _device_of(spec, x)
    key = (
        spec,
        direction,
        place_of(device),
        runtime_failures.shape_of(x),
        *map(_is_aligned, (x.q, x.k, x.v, x.bias, *x.mod_tensors)),
    )
    if key in _prepared:
        return
    with _failures():
        sdpa = _sdpa(spec, x, direction, _is_bucketed(spec, x))
        if sdpa is None:
            return
        PLANS.get(sdpa, device, options.plan_directory())
    if len(_prepared) >= _MOST_PREPARED:
        _prepared.clear()
    _prepared.add(key)


def cannot_build(spec: AttentionSpec, x: Operands) -> str | None:
    from flexattn.kernels_cudnn.plans import is_without_device

    if is_without_device() or x.q.device.type == "cuda":
        return None
    if torch.cuda.is_available() and torch.cuda.get_device_capability() == spec.capability:
        return None
    return "cuDNN builds plans for a GPU that is here, and none of this kind is"


def provisional(spec: AttentionSpec, x: Operands, direction: Direction) -> str | None:
    from flexattn.kernels_cudnn.plans import PLANS, Plan

    try:
        with _failures():
            sdpa = _sdpa(spec, x, direction, _is_bucketed(spec, x, takes_slot=False))
    except RuntimeFailure as e:  # as its shapes alone tell
        return f"it will be refused when the call first runs, or by explain(..., build=True): {e}"
    if sdpa is None or isinstance(PLANS.known(sdpa, _device_of(spec, x)), Plan):
        return None
    how = cannot_build(spec, x) or "explain(..., build=True) builds it now"
    return f"cuDNN may refuse the plan, which is built when the call first runs; {how}"


def _device_of(spec: AttentionSpec, x: Operands) -> torch.device:
    """Returns the device that plans are built for: the operands', or for operands without memory the current one."""
    if x.q.device.type == "meta" and cannot_build(spec, x) is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return x.q.device


def _sdpa(spec: AttentionSpec, x: Operands, direction: Direction, is_bucketed: bool) -> Sdpa | None:
    """Returns what a call's plan is compiled for; None where it runs none, as it is empty. Reads no data.

    Raises PlanNotSupported for what the shapes alone are against.
    """
    from flexattn.kernels_cudnn.attention import backward_call, forward_call
    from flexattn.kernels_cudnn.fp8 import fp8_call
    from flexattn.kernels_cudnn.problem import without_data

    shadows = {id(t): without_data(t) for t in x if isinstance(t, Tensor)}  # one tensor that comes twice is one here too
    named: dict[str, Any] = {name: shadows[id(t)] for name, t in x._asdict().items() if isinstance(t, Tensor)}
    meta = x._replace(**named, mod_tensors=[without_mod_data(t) for t in x.mod_tensors])
    if _needs_gathered_keys(x):
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


def watched(watcher: Callable[[Any, dict[int, Tensor]], None]) -> contextlib.AbstractContextManager[None]:
    from flexattn.kernels_cudnn.execute import watched_executions

    return watched_executions(watcher)


def can_be_recorded() -> bool:
    return True


def forget_failures() -> None:
    """Lets cuDNN be looked for again, and asked again for plans that it refused and whether it has those that it built."""
    library_error.cache_clear()
    _prepared.clear()
    plans = sys.modules.get("flexattn.kernels_cudnn.plans")  # not imported: none failed
    if plans is not None:
        plans.PLANS.forget_failures()


_prepared: set[Any] = set()  # calls whose plan is known to be there, as a forward asks for its backward's each time
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


def _launcher_views(spec: AttentionSpec, gradients: Gradients):  # type: ignore[no-untyped-def]  # its module imports cudnn
    from flexattn.kernels_cudnn.attention import Written

    dq, dk, dv = dqkv_of(spec, gradients)
    views = (as_bshd(dq, spec.q_format), as_bshd(dk, spec.kv_format), as_bshd(dv, spec.kv_format))
    return Written(*views, gradients.dbias, gradients.dsoftmax_offset)


def _problem(  # type: ignore[no-untyped-def]  # its module imports cudnn
    spec: AttentionSpec, x: Operands, direction: Direction, is_bucketed: bool | None = None
):
    from flexattn.kernels_cudnn.problem import Problem

    x = with_cu_seqlens(x, (spec.q_format, spec.kv_format))
    problem = Problem(
        q=as_bshd(x.q, spec.q_format),
        k=as_bshd(x.k, spec.kv_format),
        v=as_bshd(x.v, spec.kv_format),
        softmax_scale=x.softmax_scale,
        window_left=spec.band.left,
        window_right=spec.band.right,
        bottom_right=spec.band.bottom_right,
        bias=x.bias,
        has_sink=spec.softmax_type != "vanilla",
        softmax_offset=x.softmax_offset,
        dropout_p=x.dropout_p,
        rng_state=x.rng_state,
        cu_seqlens_q=x.cu_seqlens_q,
        cu_seqlens_kv=x.cu_seqlens_kv,
        cu_seqlens_q_padded=x.cu_seqlens_q_padded,
        cu_seqlens_kv_padded=x.cu_seqlens_kv_padded,
        max_seqlen_q=x.max_seqlen_q,
        max_seqlen_kv=x.max_seqlen_kv,
        page_table=x.page_table,
        is_bucketed=_is_bucketed(spec, x) if is_bucketed is None else is_bucketed,
    )
    if spec.mods is None or problem.is_empty:
        return problem
    found = lowered(spec.mods, direction)
    assert isinstance(found, Lowered), found
    inputs = mod_inputs(spec.mods, found.recipes, x, spec.num_heads, problem.sizes)
    return dataclasses.replace(problem, mods=found.mods, mod_inputs=inputs)


_exact_shapes: OrderedDict[AttentionSpec, set[tuple[torch.Size, torch.Size, int]]] = OrderedDict()
_MOST_SPECS = 1024
_shapes_lock = fork_safe(threading.Lock())


def _is_bucketed(spec: AttentionSpec, x: Operands, takes_slot: bool = True) -> bool:
    """Returns whether a dense call runs on a plan for rounded-up sizes: beyond the first EXACT_SHAPES shapes that a spec came with.

    A plan for the exact shape is the faster one, and training has few shapes; a stream of ever new ones must stop building. What a
    shape was given once it keeps, so that a repeated call and its backward run alike. A bias has its lengths in its strides, as has
    a table that a mod reads, and a sink's gradient over packed sequences is wrong (`known_bad`), and FP8 has no backward over
    packed sequences, so these have exact plans alone, as have GPUs on which cuDNN has no backward over packed ones. takes_slot:
    False only asks, and leaves the first shapes to calls that run.
    """
    if spec.fp8 is not None:
        return False
    if spec.mods is not None and reads_tables(spec.mods):
        return False
    if "thd" in (spec.q_format, spec.kv_format) or x.bias is not None or spec.softmax_type != "vanilla":
        return False
    if spec.capability is not None and (spec.capability[0] not in RAGGED_BACKWARD or _is_before(RAGGED_WORKSPACE)):
        return False
    family = spec._replace(length_q=0, length_kv=0, needs_grad=False, needs_lse_grad=False, return_max_logit=False)
    shape = (x.q.shape, x.k.shape, x.max_seqlen_kv if spec.page_size else 0)
    known = _exact_shapes.get(family, ())
    if shape in known:
        return False
    if not takes_slot:
        return len(known) >= EXACT_SHAPES
    with _shapes_lock:
        shapes = _exact_shapes.setdefault(family, set())
        while len(_exact_shapes) > _MOST_SPECS:
            _exact_shapes.popitem(last=False)
        if len(shapes) < EXACT_SHAPES:
            shapes.add(shape)
        return shape not in shapes
