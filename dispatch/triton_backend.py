"""The triton backend: the calls that the Triton kernels support, and the step from a spec and its operands to the launchers."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from flexattn.dispatch import options
from flexattn.dispatch.head_dims import head_dim_error
from flexattn.dispatch.spec import (
    AttentionSpec,
    Direction,
    Fp8,
    Gradients,
    Operands,
    as_bshd,
    capability_of,
    dqkv_of,
    empty_gradients,
    empty_outputs,
)

if TYPE_CHECKING:
    from flexattn.dispatch.mod_program import Program
    from flexattn.dispatch.quantization import Unquantized
    from flexattn.kernels_triton.common.problem import Backward, Forward, Problem
    from flexattn.kernels_triton.families import Choice, Policy

SUPPORT_IS_FINAL = True
_PROCESSORS = 132  # multiprocessors of a GPU that is absent: those of an H200.
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
WIDEST = (576, 512)
"""The largest head dims of q and k, and of v, in 16 bits. Gemma 4 has 512. Absorbed latent attention (MLA) has 576 and 512."""
FP8_BLOCK = 32
"""In FP8, both sides of a block mask's blocks are multiples of this, because matrix instructions sum over at least 32 products."""


def unsupported(spec: AttentionSpec, direction: Direction) -> str | None:
    """Returns why the kernels cannot run `spec` in `direction`, with an alternative, or None if they can."""
    if spec.batch_invariant and direction == "forward" and spec.fp8 is not None:
        return "FP8 scales depend on the batch; leave out fp8_recipe, or batch_invariant"
    if spec.kv_dtype is torch.float8_e4m3fn and spec.capability is not None and spec.capability < (8, 9):
        return (
            "keys in float8_e4m3fn need compute capability 8.9 (Ada) or later, and this GPU has "
            f"{spec.capability[0]}.{spec.capability[1]}; use float8_e5m2, or 16 bits"
        )
    if spec.fp8 is not None:
        return _fp8_error(spec, direction) or device_error(spec.device_type, spec.capability)
    if spec.dtype not in _DTYPES:
        return f"the kernels support fp16, bf16 and fp32, not {str(spec.dtype).removeprefix('torch.')}; cast q, k and v"
    if spec.dtype is torch.float32:
        reason = head_dim_error(spec, "in fp32 the kernels support", 8, (256, 256), _beyond(spec, "larger ones run in 16 bits, or"))
    elif spec.kv_dtype is not None:
        beyond = _beyond(spec, "larger ones run with 16-bit keys, or")
        reason = head_dim_error(spec, "with FP8 keys the kernels support", 8, (256, 256), beyond)
    else:
        reason = head_dim_error(spec, "the kernels support", 8, WIDEST, _beyond(spec, "larger ones run"))
    return reason or (_lists_error(spec) if spec.kv_lists else None) or device_error(spec.device_type, spec.capability)


def _lists_error(spec: AttentionSpec) -> str | None:
    """Returns why the kernels for lists of keys cannot run a call, or None if they can."""
    others = {
        "a bias": spec.bias_type not in ("no_bias", "alibi"),
        "ALiBi": spec.bias_type == "alibi",
        "score_mod or mask_mod": spec.mods is not None,
        "max_logit": spec.return_max_logit,
    }
    given = [name for name, is_given in others.items() if is_given]
    return f"kv_indices with {' and '.join(given)} has no kernel; use backend='eager', or leave it out" if given else None


def _beyond(spec: AttentionSpec, larger_ones: str) -> str:
    """Returns the advice for a head dim that is too large for the kernels, so that padding does not help."""
    widest_qk, widest_v = WIDEST
    parts = (
        f"; or pass v in parts of up to {widest_v} columns, one call for each"
        if spec.head_dim_qk <= widest_qk and spec.head_dim_v > widest_v
        else ""
    )
    return f"{larger_ones} on backend='eager'{parts}"


def _fp8_error(spec: AttentionSpec, direction: Direction) -> str | None:
    if reason := head_dim_error(spec, "in FP8 the kernels support", 16, (256, 256), "larger ones run on backend='eager'"):
        return reason
    if spec.block_size is not None and any(size % FP8_BLOCK for size in spec.block_size):
        return (
            f"in FP8 the block size of a block_mask must be a multiple of {FP8_BLOCK}, and it is {spec.block_size}; make it with "
            f"BLOCK_SIZE={tuple(-(-size // FP8_BLOCK) * FP8_BLOCK for size in spec.block_size)}, or leave out fp8_recipe"
        )
    if spec.device_type == "cuda" and spec.capability is not None and spec.capability < (8, 9):
        return (
            "FP8 matrix instructions need compute capability 8.9 (Ada) or later, and this GPU has "
            f"{spec.capability[0]}.{spec.capability[1]}; leave out fp8_recipe"
        )
    return None


@functools.cache
def device_error(device_type: str, capability: tuple[int, int] | None) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; pip install 'triton>=3.6'"
    if device_type == "cuda":
        if capability is not None and capability < (8, 0):
            return (
                f"compute capability {capability[0]}.{capability[1]} is older than 8.0 (Ampere), the first that the kernels run on"
            )
        return None
    if device_type == "cpu":
        from flexattn.kernels_triton.runtime.interpreter import INTERPRETED

        if INTERPRETED:
            return None
        return (
            "tensors on the CPU run only in Triton's interpreter; move them to a GPU, or set TRITON_INTERPRET=1 before triton is "
            "imported"
        )
    return f"the kernels run on CUDA devices, not on {device_type!r}"


def can_quantize(x: Tensor) -> bool:
    """Returns whether `quantize` and `unrotate` run on x's device. If x has no memory, the device is the pretended GPU."""
    if x.is_meta:
        from flexattn.kernels_triton.runtime import device

        return device.capability_of(x.device) >= 89
    return _can_quantize(x.device)


@functools.cache
def _can_quantize(device: torch.device) -> bool:
    capability = capability_of(device)
    return device_error(device.type, capability) is None and (capability is None or capability >= (8, 9))


def quantize(
    tensors: Sequence[Unquantized], dtype: torch.dtype, granularity: str, block_rows: int, margin: int
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Returns (data, descales, amax) as `quantization.quantize` does, for one tensor or for q, k and v."""
    from flexattn.dispatch.quantization import amax_sizes
    from flexattn.kernels_triton.common.quantize import Source, quantize

    data = [t.x.new_empty(t.x.shape, dtype=dtype) for t in tensors]
    sources = [
        Source(
            x=as_bshd(_loadable(t.x), t.fmt),
            data=as_bshd(target, t.fmt),
            cu_seqlens=t.cu_seqlens,
            cu_seqlens_padded=t.cu_seqlens_padded,
            max_seqlen=t.max_seqlen,
            scale=t.scale,
            history=t.history,
            sizes=amax_sizes(t.x, t.fmt, t.cu_seqlens, t.max_seqlen, granularity, block_rows),
            rotation=t.rotation,
        )
        for t, target in zip(tensors, data, strict=True)
    ]
    return data, *quantize(sources, block_rows, margin)


def unrotate(dq: Tensor, dk: Tensor) -> tuple[Tensor, Tensor]:
    from flexattn.kernels_triton.common.quantize import unrotate

    return unrotate(dq.contiguous(), dk.contiguous())


def can_merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> bool:
    """Returns whether `merge` supports these tensors. The caller has checked their shapes."""
    tensors = (out_a, lse_a, out_b, lse_b)
    if out_a.dtype not in _DTYPES or any(type(t) not in (Tensor, torch.nn.Parameter) or t.is_neg() for t in tensors):
        return False
    return device_error(out_a.device.type, capability_of(out_a.device)) is None and out_a.stride(-1) == out_b.stride(-1) == 1


def merge(fmt: str, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Returns out (contiguous) and lse of `flexattn.merge_attention`, computed by one kernel."""
    from flexattn.kernels_triton.portable.merge import merge as merge_rows

    out, lse = torch.empty_like(out_a, memory_format=torch.contiguous_format), torch.empty(lse_a.shape, device=lse_a.device)
    a, b, results = (
        (t[None] if fmt == "thd" else as_bshd(t, fmt), row_lse[None] if fmt == "thd" else row_lse)
        for t, row_lse in ((out_a, lse_a.contiguous()), (out_b, lse_b.contiguous()), (out, lse))
    )
    merge_rows(a, b, results)
    return out, lse


@functools.cache
def can_check_floor(device: torch.device) -> bool:
    """Returns whether `check_floor` runs on the device. It runs only on a GPU, which does not wait, and not interpreted."""
    return can_be_recorded() and device_error(device.type, capability_of(device)) is None


def check_floor(lse: Tensor, floor: float, text: str) -> None:
    """Launches a kernel with a device-side assertion, which fails with `text` if a number of lse is not above `floor`."""
    from flexattn.kernels_triton.portable.floor import check_floor as check

    check(lse.contiguous(), floor, text)


def forward(spec: AttentionSpec, x: Operands, latent_rows: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Runs a forward. latent_rows: with lists of keys, the keys and values as rows of bytes in k's layout."""
    from flexattn.kernels_triton.families import choose

    results = empty_outputs(spec, x)
    call = _forward_call(spec, x, results)
    if latent_rows is not None:
        call = call._replace(problem=replace(call.problem, latent_rows=as_bshd(latent_rows, spec.kv_format)))
    choice = choose(call, policy_of(spec))
    choice.family.run(call, choice.tile)
    return results


def backward(spec: AttentionSpec, x: Operands, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None) -> Gradients:
    from flexattn.kernels_triton.families import choose

    gradients = empty_gradients(spec, x)
    spec = spec._replace(batch_invariant=False)  # a backward is not, and takes the fastest kernels
    policy = policy_of(spec)
    call = _backward_call(spec, x, (out, lse, dout, dlse), gradients, policy)
    choice = choose(call, policy)
    choice.family.run(call, choice.tile)
    if gradients.dsoftmax_offset is not None and x.softmax_offset is not None:
        gradients = gradients._replace(dsoftmax_offset=gradients.dsoftmax_offset.to(x.softmax_offset.dtype))
    return gradients


def policy_of(spec: AttentionSpec) -> Policy:
    """Returns the policy of FLEXATTN_HOPPER. Triton's interpreter runs only portable kernels, because it does not run Gluon."""
    from flexattn.kernels_triton.families import Policy
    from flexattn.kernels_triton.runtime.interpreter import INTERPRETED

    if INTERPRETED:
        return Policy(portable_only="Triton's interpreter runs no Gluon")
    setting = options.hopper()
    if setting == "never":
        return Policy(portable_only="FLEXATTN_HOPPER=never")
    return Policy(ignores_measurements=setting == "always" or spec.batch_invariant, takes_what_never_ran=setting == "always")


def choice_of(spec: AttentionSpec, x: Operands, direction: Direction) -> Choice | None:
    """Returns the kernels that `forward` or `backward` runs for these operands, or None if a backward's are not known before it.

    It allocates and launches nothing. It takes the operands as they are, except for their addresses.
    """
    from flexattn.dispatch.quantization import dout_like
    from flexattn.kernels_triton.families import choose
    from flexattn.kernels_triton.runtime.device import has_large_l2

    if direction == "backward" and spec.for_backward() is not spec:
        return None
    if direction == "backward":
        spec = spec._replace(batch_invariant=False)
    is_large, x = has_large_l2(x.q.device), on_meta(x)
    with torch.no_grad(), recorded_on(spec, has_large_l2=is_large):
        results, policy = empty_outputs(spec, x), policy_of(spec)
        if direction == "backward":
            out, lse, _ = results
            results_and_dout = (out, lse, dout_like(spec, x, out), None)
            return choose(_backward_call(spec, x, results_and_dout, empty_gradients(spec, x), policy), policy)
        call = _forward_call(spec, x, results)
        choice = choose(call, policy)
        splits = choice.family.splits
        return choice if splits is None else choice._replace(splits=splits(call, choice.tile))


def on_meta(x: Operands) -> Operands:
    """Returns the operands with their tensors on the meta device, in the same strides. If v is columns of k, it stays so."""
    from flexattn.kernels_triton.common.problem import are_first_columns

    moved = Operands._make(map(_on_meta, x))
    return moved._replace(v=moved.k[..., : x.v.shape[-1]]) if are_first_columns(x.v, x.k) else moved


def _on_meta(value: object) -> object:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return tuple(map(_on_meta, value)) if isinstance(value, (tuple, list)) else value


@contextmanager
def recorded_on(spec: AttentionSpec, *, has_large_l2: bool = True) -> Iterator[list[Any]]:
    """Pretends inside the block that tensors are on a GPU of the spec's capability, and appends its launches to the list.

    has_large_l2: see `pretended_device`.
    """
    from flexattn.kernels_triton.runtime.device import pretended_device
    from flexattn.kernels_triton.runtime.launch import recorded_launches

    major, minor = spec.capability or (0, 0)
    pretended = pretended_device(10 * major + minor, _PROCESSORS, has_large_l2=has_large_l2)
    with pretended, recorded_launches() as launches:
        yield launches


def _forward_call(spec: AttentionSpec, x: Operands, results: tuple[Tensor, Tensor, Tensor]) -> Forward:
    from flexattn.kernels_triton.common.problem import Forward

    out, lse, max_logit = results
    problem = to_problem(spec, x)
    if not spec.batch_invariant:  # the batch decides whether tables and lists are worth their cost.
        problem = _with_made_of_mods(problem, "forward")
    return Forward(problem, as_bshd(out, spec.q_format), lse, max_logit if spec.return_max_logit else None)


def _backward_call(
    spec: AttentionSpec,
    x: Operands,
    results_and_dout: tuple[Tensor, Tensor, Tensor, Tensor | None],
    gradients: Gradients,
    policy: Policy,
) -> Backward:
    """Returns the call of a backward. results_and_dout: out, lse, dout and dlse."""
    from flexattn.kernels_triton.common.problem import Backward

    out, lse, dout, dlse = results_and_dout
    dq, dk, dv = dqkv_of(spec, gradients)
    dcaptures: list[Tensor] = []
    if spec.mods and gradients.dmod_tensors is not None:
        dcaptures = [t for t, is_reached in zip(gradients.dmod_tensors, spec.mods.is_reached, strict=True) if is_reached]
    quantises = spec.fp8 is not None and dout.element_size() > 1
    if quantises:
        x, dout = _with_dout_to_come(spec, x, dout)
    is_portable = policy.portable_only is not None or spec.capability != (9, 0)  # only sm_90 has its own backward.
    needs_all = gradients.dbias is not None or bool(dcaptures) or spec.deterministic or is_portable
    problem, dout = replace(to_problem(spec, x), dout_is_to_come=quantises), as_bshd(_loadable(dout), spec.q_format)
    if spec.deterministic and spec.fp8 is None and x.q.element_size() == 2 and not (is_portable or spec.kv_lists):
        from flexattn.kernels_triton.gluon.descriptors import readable

        # A hook for saved tensors may change the strides, and the kernels that repeat to the bit must not depend on them.
        problem = replace(problem, q=readable(problem.q), k=readable(problem.k), v=readable(problem.v))
        dout = readable(dout)
    return Backward(
        problem=_with_made_of_mods(problem, "backward" if needs_all else "one pass"),
        out=as_bshd(_loadable(out), spec.q_format),
        lse=lse.contiguous(),
        dout=dout,
        dlse=dlse.contiguous() if dlse is not None else None,
        dq=as_bshd(dq, spec.q_format),
        dk=as_bshd(dk, spec.kv_format),
        dv=as_bshd(dv, spec.kv_format),
        dsoftmax_offset=gradients.dsoftmax_offset,
        dbias=gradients.dbias,
        dcaptures=dcaptures,
        deterministic=spec.deterministic,
    )


def _with_made_of_mods(problem: Problem, direction: Literal["forward", "backward", "one pass"]) -> Problem:
    """Returns the problem with the tables and the block mask that kernels make from its mods, if they are worth their cost."""
    if problem.mods is None:
        return problem
    from flexattn.kernels_triton.mods.diagonals import with_diagonals
    from flexattn.kernels_triton.mods.mask_blocks import with_mask_blocks

    return with_diagonals(with_mask_blocks(problem, direction))


def _with_dout_to_come(spec: AttentionSpec, x: Operands, dout: Tensor) -> tuple[Operands, Tensor]:
    """Returns the operands with the 16-bit dout and memory for its descale, and memory for dout in FP8.

    The kernel that reads dout first fills both.
    """
    from flexattn.dispatch.quantization import BLOCK_ROWS, amax_sizes

    assert spec.fp8 is not None
    sizes = amax_sizes(dout, spec.q_format, x.cu_seqlens_q, x.max_seqlen_q, "block", BLOCK_ROWS)
    descale = torch.empty(sizes, dtype=torch.float32, device=dout.device)
    data = torch.empty(dout.shape, dtype=spec.fp8.grad_dtype, device=dout.device)
    return x._replace(descales=[*x.descales, descale], copies16=[dout, *x.copies16]), data


def prepare(spec: AttentionSpec, x: Operands, direction: Direction) -> None:
    """Compiles the kernels by running them once, and drops their results."""
    if direction == "forward":
        forward(spec, x)
    else:
        from flexattn.dispatch.quantization import dout_like

        out, lse, _ = forward(spec, x)
        backward(spec, x, out, lse, dout_like(spec, x, out), None)


def can_be_recorded() -> bool:
    if importlib.util.find_spec("triton") is None:
        return False
    from flexattn.kernels_triton.runtime.interpreter import INTERPRETED

    return not INTERPRETED


def quantises_unrecorded(device: torch.device) -> bool:
    """Returns whether kernels quantise on the device, and a recording cannot contain them."""
    return _can_quantize(device) and not can_be_recorded()


def watched(watcher: Callable[..., None]) -> AbstractContextManager[None]:
    from flexattn.kernels_triton.runtime.launch import watched_launches

    return watched_launches(watcher)


_CONTIGUOUS = (
    *("alibi_slopes", "softmax_offset", "rng_state", "seqused_q", "seqused_kv"),
    *("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"),
)


def to_problem(spec: AttentionSpec, x: Operands) -> Problem:
    from flexattn.kernels_triton.common.problem import Problem
    from flexattn.kernels_triton.runtime import launch

    launch.keep_in(options.kernel_directory())
    mods = {} if spec.mods is None else _mods(spec.mods, x)
    copy_formats = (spec.q_format, spec.q_format, spec.kv_format)
    loadable: dict[str, Any] = {
        "q": as_bshd(_loadable(x.q), spec.q_format),
        "k": as_bshd(_loadable(x.k), spec.kv_format),
        "v": as_bshd(_loadable(x.v), spec.kv_format),
        # A hook for saved tensors may change the strides of any of them.
        **{name: t.contiguous() for name in _CONTIGUOUS if (t := getattr(x, name)) is not None},
        "block_mask": None if spec.block_size is None else _block_lists(x.block_mask, spec.block_size),
        **(_key_lists(spec, x) if spec.kv_lists else {}),
        "descales": () if spec.kv_dtype else tuple(descale.contiguous() for descale in x.descales),
        "copies16": tuple(as_bshd(_loadable(t), fmt) for t, fmt in zip(x.copies16, copy_formats, strict=False)),
    }
    return Problem(
        **(x.shared_with(Problem) | loadable),
        window_left=spec.band.left,
        window_right=spec.band.right,
        bottom_right=spec.band.bottom_right,
        bias_is_pre_scale=spec.bias_type == "pre_scale_bias",
        has_sink=spec.softmax_type != "vanilla",
        **mods,
        descales_kv=tuple(
            as_bshd(descale, spec.kv_format) if descale.dim() == 4 else descale.contiguous() for descale in x.descales
        )
        if spec.kv_dtype
        else (),
        scale_rows=0 if spec.fp8 is None else _scale_rows(spec.fp8),
        is_part=spec.is_part,
        is_batch_invariant=spec.batch_invariant,
    )


def _scale_rows(fp8: Fp8) -> int:
    from flexattn.dispatch.quantization import BLOCK_ROWS

    return fp8.block_rows or BLOCK_ROWS


def mod_source(program: Program, tensors: Sequence[Tensor]) -> str:
    """Returns the source that the kernels inline for a program, if q, k and v are in 16 bits and there are many scores."""
    from flexattn.kernels_triton.mods.lowering import layouts, source_of

    mods, with_tables = _lowered(program, layouts([(c.name, c.dtype, c.ndim) for c in program.captures], tensors), False)
    x = with_tables or mods
    parts = (mods.per_distance, x.per_head, x.score, x.gradient, x.accumulate, x.mask)
    return "\n".join(source_of(function) for function in parts if function is not None)


def _block_lists(tensors: Sequence[Tensor], block_size: tuple[int, int]) -> Any:
    from flexattn.kernels_triton.common.problem import BlockLists

    return BlockLists(*(t.contiguous() for t in tensors), *block_size)  # type: ignore[call-arg, arg-type]  # eight tensors


def _key_lists(spec: AttentionSpec, x: Operands) -> dict[str, Any]:
    indices, counts = x.kv_indices, x.kv_index_counts
    assert indices is not None
    if indices.dim() == x.q.dim() - 1:  # one list for all key heads
        indices, counts = indices.unsqueeze(-2), None if counts is None else counts.unsqueeze(-1)
    counts = None if counts is None else counts.contiguous()
    if not indices.shape[-1]:  # kernels loop over the entries of a list, so that a list without any gets one that is no key
        indices = indices.new_full((*indices.shape[:-1], 1), -1)
    return {"kv_indices": indices.contiguous(), "kv_index_counts": counts, "kv_block": spec.kv_block}


def _mods(program: Program, x: Operands) -> dict[str, Any]:
    """Returns the functions that kernels inline, without and with tables, and the captures that these functions read."""
    from flexattn.kernels_triton.mods.lowering import flatten, layouts

    capture_layouts = layouts([(c.name, c.dtype, c.ndim) for c in program.captures], x.mod_tensors)
    mods, with_tables = _lowered(program, capture_layouts, x.q.dtype is torch.float32)
    return {"mods": mods, "mods_of_tables": with_tables, "captures": flatten(capture_layouts, x.mod_tensors, x.mod_numbers)}


@functools.lru_cache(maxsize=256)
def _lowered(program: Program, capture_layouts: tuple[object, ...], is_fp32: bool) -> tuple[Any, Any]:
    """Returns the program's graphs as Triton functions, and as Triton functions that read tables, or None without tables."""
    from flexattn.kernels_triton.mods.hoisting import hoist

    graphs = (program.score, program.derivative, program.mask)
    hoisted = hoist(graphs, tabulates=True)
    mods = _functions(program, capture_layouts, is_fp32, hoist(graphs, tabulates=False), hoisted.per_distance)
    return mods, _functions(program, capture_layouts, is_fp32, hoisted, None) if hoisted.per_distance is not None else None


def _functions(program: Program, capture_layouts: tuple[Any, ...], is_fp32: bool, hoisted: Any, tabulated: Any) -> object:
    """Returns the Triton functions. hoisted: the hoisted graphs. tabulated: the graph to tabulate, for the maker of tables."""
    from flexattn.dispatch.mod_program import ARGUMENTS, GRADIENT
    from flexattn.kernels_triton.common.problem import Mods
    from flexattn.kernels_triton.mods import lowering
    from flexattn.kernels_triton.mods.intervals import lower_intervals

    score, derivative, mask = hoisted.graphs
    num_tables = lowering.num_outputs(hoisted.per_distance)
    per_head_function = lowering.lower_per_head(hoisted.per_head, num_tables, capture_layouts, is_fp32)
    kind = (capture_layouts, is_fp32, per_head_function)
    with_gradient = (GRADIENT, *ARGUMENTS)
    test = None if program.mask is None else lower_intervals(program.mask, capture_layouts)
    mask_dependencies, table_dependencies = (lowering.dependencies(graph) for graph in (program.mask, tabulated))
    return Mods(
        score=score and lowering.lower(score, "score_mod", ARGUMENTS, *kind),
        gradient=derivative and lowering.lower(derivative, "score_mod_gradient", with_gradient, *kind),
        mask=mask and lowering.lower(mask, "mask_mod", ARGUMENTS[1:], *kind),
        per_head=per_head_function.per_head,
        per_distance=tabulated and lowering.lower_per_distance(tabulated, capture_layouts, is_fp32),
        distance_depends_on=("b" in table_dependencies, "h" in table_dependencies),
        num_tables=num_tables,
        **({} if test is None else test._asdict()),
        mask_depends_on=("b" in mask_dependencies, "h" in mask_dependencies),
        masks_keys="kv_idx" in mask_dependencies and "q_idx" not in mask_dependencies,
        accumulate=lowering.lower_accumulation(derivative, with_gradient, *kind) if derivative and program.added_to else None,
        score_is_finite=lowering.is_finite(program.score),
        reads_tiles=lowering.reads_tiles(program.score) or lowering.reads_tiles(program.mask),
    )


def _loadable(x: Tensor) -> Tensor:
    """Returns x, or a contiguous copy if the kernels cannot load its rows."""
    from flexattn.kernels_triton.common.problem import is_loadable

    return x if is_loadable(x) else x.clone(memory_format=torch.contiguous_format)
