"""The two operators, `flexattn::attention_forward` and `flexattn::attention_backward`.

Their schemas (`registered`) list the fields of a call: first the `Operands`, then the `Settings`. Each operator runs the backend
that `select` returns for its direction.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from flexattn import (
    compat,
    registered,  # noqa: F401 (registers the operators)
)
from flexattn.dispatch import options
from flexattn.dispatch.neutral import is_capturing
from flexattn.dispatch.select import Backend, RuntimeFailure, backend_module, failures_of, mark_unsupported, remember_call, select
from flexattn.dispatch.spec import (
    NUM_TENSORS,
    AttentionSpec,
    Band,
    Direction,
    Fp8,
    Gradients,
    Operands,
    Results,
    batch_of,
    empty_outputs,
    lists_of_a_query,
    parse_format,
    with_classes,
)
from flexattn.dispatch.spec import capability_of as capability_of  # tools replace it
from flexattn.lengths import check_values
from flexattn.validation import check_apart, check_descale_values, check_floor
from flexattn.warn import warn_once

if TYPE_CHECKING:
    from flexattn.dispatch.mod_program import Program

T = TypeVar("T")
Observer = Callable[[Direction, AttentionSpec, str, Operands], object]

observers: tuple[Observer, ...] = ()  # called after each run with its direction, spec, request and operands


class Settings(NamedTuple):
    """Static settings of a call, in types of an operator's schema."""

    qkv_format: str
    padding: bool
    window_left: int | None  # None for open
    window_right: int | None
    bottom_right: bool
    bias_type: str
    softmax_type: str
    return_max_logit: bool
    needs_grad: bool
    needs_bias_grad: bool
    deterministic: bool
    backend: str  # "auto" or a name
    mods: str = ""  # the text of a Program
    has_floor: bool = False  # every lse must be above validation.FLOOR
    block_size_q: int = 0  # queries of a block of the block mask
    block_size_kv: int = 0
    fp8_out: str = ""  # dtype of out and the gradients if q, k and v are in FP8, such as "bfloat16"
    fp8_grad: str = ""  # dtype of dout
    fp8_block_rows: int = 0
    bf16_backward: bool = False
    is_part: bool = False  # for a backward only: out and lse cover more keys than k and v have
    out_format: str = ""  # this and the next three fields: see `Results`
    dq_format: str = ""
    dkv_format: str = ""
    dqkv_packing: str = ""
    batch_invariant: bool = False
    fp32_gradients: str = "none"  # this and the next field: see `Results`
    fp32_out: bool = False
    kv_block: int = 1  # keys of a block that an entry of kv_indices names


_operators = torch.ops.flexattn
_forward_op, _backward_op = _operators.attention_forward.default, _operators.attention_backward.default
_forward_out_op = _operators.attention_forward_out.default


class Incoming(NamedTuple):
    """Inputs of a backward in addition to the operands: the forward's results and their gradients."""

    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None


def attend(x: Operands, settings: Settings) -> tuple[Tensor, Tensor, Tensor]:
    """Runs a forward operator and returns out, lse and max_logit."""
    if x.out is None:
        return _forward_op(*x, *settings)  # type: ignore[no-any-return]
    lse, max_logit = _forward_out_op(*x, *settings)
    return x.out, lse, max_logit


def gradients(x: Operands, settings: Settings, incoming: Incoming) -> Gradients:
    """Runs the backward operator and returns the gradients of a call."""
    out, lse, dout, dlse = incoming
    *stored, dbias, doffset, dmods = _backward_op(dout, dlse, out, lse, *x, *settings)
    dq, dk, dv = results_of(settings).views((stored[0], stored[1], stored[2]), parse_format(settings.qkv_format))
    bias, offset = dbias if settings.needs_bias_grad else None, None if x.softmax_offset is None else doffset
    return Gradients(dq, dk, dv, bias, offset, tuple(dmods) or None)


def results_of(settings: Settings) -> Results:
    """Returns the layouts and dtypes of a call's results."""
    formats = settings.out_format, settings.dq_format, settings.dkv_format, settings.dqkv_packing
    return Results(*formats, settings.fp32_gradients, settings.fp32_out)


def settings_of_backward(settings: Settings) -> Settings:
    """Returns the settings of the backward: without FP8 if it multiplies in 16 bits."""
    return settings._replace(fp8_out="", fp8_grad="", fp8_block_rows=0, bf16_backward=False) if settings.bf16_backward else settings


def new_rng_state(device: torch.device) -> Tensor:
    """Draws a seed and offset from torch's generator of the device."""
    return torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64, device=device)


def is_differentiated(tensors: Iterable[Tensor | None]) -> bool:
    """Returns whether a derivative of torch.func or of forward mode is taken with respect to one of the tensors.

    Raises RuntimeError if torch.vmap alone maps one of them.
    """
    if compat.forward_mode_level() < 0 and not compat.has_transforms():
        return False
    given = [t for t in tensors if isinstance(t, Tensor)]
    if any(compat.is_differentiated(t) for t in given):
        return True
    if any(compat.is_batched(t) for t in given):
        raise RuntimeError(
            "attention() has no rule for torch.vmap; pass a tensor with one batch dim: reshape the mapped dim into b"
        )
    return False


def _program_of(mods: str) -> Program | None:
    from flexattn.dispatch.mod_program import parse_program  # a late import: calls without mods should not wait for it

    return parse_program(mods)


@functools.cache
def dtype_of(name: str) -> torch.dtype:
    """Returns the dtype of a name such as "float8_e4m3fn", because an operator's schema carries it as a str."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def make_spec(x: Operands, settings: Settings, capability: tuple[int, int] | None) -> AttentionSpec:
    q_format, kv_format = parse_format(settings.qkv_format)
    return AttentionSpec(
        q_format=q_format,
        kv_format=kv_format,
        dtype=x.q.dtype,
        num_heads=x.q.shape[q_format.index("h")],
        num_heads_kv=x.k.shape[kv_format.index("h")],
        head_dim_qk=x.q.shape[-1],
        head_dim_v=x.v.shape[-1],
        padding=settings.padding,
        band=Band(settings.window_left, settings.window_right, settings.bottom_right),
        bias_type=settings.bias_type,
        bias_dims=None if x.bias is None else tuple(size != 1 for size in x.bias.shape),  # type: ignore[arg-type]
        softmax_type=settings.softmax_type,
        softcap=x.softcap != 0.0,
        dropout=x.dropout_p != 0.0,
        return_max_logit=settings.return_max_logit,
        needs_grad=settings.needs_grad,
        needs_bias_grad=settings.needs_bias_grad,
        deterministic=settings.deterministic,
        device_type=x.q.device.type,
        capability=capability,
        mods=_program_of(settings.mods) if settings.mods else None,
        block_size=(settings.block_size_q, settings.block_size_kv) if settings.block_size_q else None,
        fp8=_fp8(x, settings) if settings.fp8_out else None,
        is_part=settings.is_part,
        results=results_of(settings),
        batch_invariant=settings.batch_invariant,
        kv_dtype=None if x.k.dtype == x.q.dtype else x.k.dtype,
        page_size=0 if x.page_table is None else x.k.shape[kv_format.index("s")],
        has_origin=x.rng_state is not None and x.rng_state.dim() == 2,
        bias_is_shared=x.bias is not None and x.bias.shape[0] != 1 and x.bias.shape[0] != batch_of(q_format, x),
        kv_lists=0 if x.kv_indices is None else lists_of_a_query(x.kv_indices, q_format),
        kv_block=settings.kv_block,
    )


def _fp8(x: Operands, settings: Settings) -> Fp8:
    dims = tuple(any(descale.shape[dim] != 1 for descale in x.descales) for dim in range(3))
    dtypes = dtype_of(settings.fp8_out), dtype_of(settings.fp8_grad)
    return Fp8(dims, settings.fp8_block_rows, *dtypes, settings.bf16_backward)  # type: ignore[arg-type]


def spec_to_run(x: Operands, settings: Settings) -> AttentionSpec:
    """Returns the spec of a call on its device, for `explain` and the operators."""
    return with_classes(make_spec(x, settings, capability_of(x.q.device)), x)


def call_of(call: tuple[Any, ...]) -> tuple[Operands, Settings]:
    """Returns the operands and settings in an operator's arguments."""
    fields = len(Operands._fields)
    if None in call[_LISTS]:  # AOTInductor turns an empty list into None
        call = (*call[: _LISTS.start], *(part or () for part in call[_LISTS]), *call[_LISTS.stop :])
    return Operands(*call[:fields]), Settings(*call[fields:])


def run(
    spec: AttentionSpec, direction: Direction, request: str, x: Operands, call: Callable[[Backend], T], warns: bool = True
) -> T:
    """Returns `call` of a selected backend. If it fails at run time, tries the next one. Raises BackendError if none is left."""
    options.check_all()
    failures = failures_of(x)
    while True:
        decision = select(spec, direction, request, failures)
        name = decision.backend
        if options.canary() and x.q.device.type != "meta" and (wrong := _mismatch(name, spec, direction, x.q.device)):
            mark_unsupported(name, spec, direction, wrong)
            from flexattn.dispatch.describe import describe  # a late import: few processes need it

            warn_once(f"{wrong} {spec}", f"the {direction} will not run on {name}: {wrong} ({describe(spec)})")
            continue
        if decision.warning is not None and warns:
            warn_once(decision.warning, decision.warning)
        try:
            return call(backend_module(name))
        except RuntimeFailure as e:
            remember_call(x, (name, spec, direction), str(e))
            failures = (*failures, ((name, spec, direction), str(e)))


def backend_of(spec: AttentionSpec, direction: Direction, request: str, x: Operands) -> Backend:
    """Returns the backend that will run a call, unless it refuses at run time."""
    return backend_module(backend_name(spec, direction, request, x))


def backend_name(spec: AttentionSpec, direction: Direction, request: str, x: Operands) -> str:
    """Returns the name of the backend that will run a call."""
    return select(spec, direction, request, failures_of(x)).backend


def _mismatch(name: str, spec: AttentionSpec, direction: Direction, device: torch.device) -> str | None:
    from flexattn.dispatch import canary  # a late import: importing flexattn should not import the reference

    return canary.mismatch(name, spec, direction, device)


def _ask(backend: Backend, spec: AttentionSpec, x: Operands, direction: Direction) -> None:
    """Raises RuntimeFailure if the backend cannot build the call."""
    if not backend.SUPPORT_IS_FINAL:
        backend.prepare(spec, x, direction)


def check_operands(spec: AttentionSpec, x: Operands) -> None:
    """Raises ValueError if lengths or page ids do not fit, on a CPU or under FLEXATTN_CHECK=1, which also checks descales."""
    if spec.padding and options.are_lengths_checked(x.q.device.type):
        check_values(spec, x, is_strict=options.check_values())
    if (spec.fp8 is not None or spec.kv_dtype is not None) and options.check_values():
        check_descale_values(x)


def check_logits(spec: AttentionSpec, backend: Backend, x: Operands, lse: Tensor, direction: Direction) -> None:
    """Raises ValueError if logits are too large for a backend. Only FLEXATTN_CHECK=1 calls this check. A graph's capture skips it.

    The check reads lse, so no recording contains it: it is called separately after a run is recorded or replayed.
    """
    if backend is backend_module("triton") and not is_capturing():
        from flexattn.dispatch.large_logits import check_logits as check  # a late import: few processes check values

        check(spec, x, lse, direction)


def run_forward(spec: AttentionSpec, request: str, x: Operands) -> tuple[Tensor, Tensor, Tensor]:
    """Runs the forward on the selected backend; the forward operator's implementation."""
    check_operands(spec, x)
    if spec.needs_grad and spec.for_backward() is not spec:
        select(spec.for_backward(), "backward", request, failures_of(x))
    elif spec.needs_grad:  # a call whose backward is not supported fails here, not after its forward
        run(spec, "backward", request, x, lambda backend: _ask(backend, spec, x, "backward"), warns=False)

    def forward(backend: Backend) -> tuple[Tensor, Tensor, Tensor]:
        results = backend.forward(spec, x)
        if options.check_values():
            check_logits(spec, backend, x, results[1], "forward")
        return results

    results = run(spec, "forward", request, x, forward)
    for observe in observers:
        observe("forward", spec, request, x)
    return results


def run_backward(spec: AttentionSpec, request: str, x: Operands, incoming: Incoming) -> Gradients:
    """Runs the backward on the selected backend; the backward operator's implementation."""
    if spec.is_part:  # else the forward has checked them
        check_operands(spec, x)

    def backward(backend: Backend) -> Gradients:
        if options.check_values():
            check_logits(spec, backend, x, incoming.lse, "backward")
        return backend.backward(spec, x, *incoming)

    # The eager backend differentiates with autograd, which torch switches off in an operator's kernel under a dispatch mode.
    with compat.dispatch_key_excluded(compat.DispatchKey.AutogradFunctionality, False):
        gradients = run(spec, "backward", request, x, backward)
    for observe in observers:
        observe("backward", spec, request, x)
    return gradients


def attention_forward_implementation(*call: object) -> tuple[Tensor, Tensor, Tensor]:
    x, settings = call_of(call)
    results = run_forward(spec_to_run(x, settings), settings.backend, x)
    if settings.has_floor:
        check_floor(results[1])
    return results


def attention_forward_out_implementation(*call: object) -> tuple[Tensor, Tensor]:
    x, _ = call_of(call)
    check_apart(x)  # a compiled call's memory is known only now
    _, lse, max_logit = attention_forward_implementation(*call)
    assert x.out is not None  # this operator is called only if there is an out
    increment_version(x.out)
    return lse, max_logit


def attention_backward_implementation(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, *call: object
) -> tuple[object, ...]:
    x, settings = call_of(call)
    spec = spec_to_run(x, settings)._replace(needs_lse_grad=dlse is not None)
    gradients = run_backward(spec, settings.backend, x, Incoming(out, lse, dout, dlse))
    dense = (x.q.new_empty(0, dtype=spec.out_dtype) if gradient is None else gradient for gradient in gradients[:-1])
    return (*dense, list(gradients.dmod_tensors or ()))


def attention_forward_fake(*call: object) -> tuple[Tensor, Tensor, Tensor]:
    x, settings = call_of(call)
    # Without descales: torch.compile would guard their number of blocks.
    return empty_outputs(make_spec(x._replace(descales=()), settings, None), x)


def attention_forward_out_fake(*call: object) -> tuple[Tensor, Tensor]:
    _, lse, max_logit = attention_forward_fake(*call)
    return lse, max_logit


def attention_backward_fake(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, *call: object) -> tuple[object, ...]:
    x, settings = call_of(call)
    bias = x.bias if settings.needs_bias_grad else None
    dtype = dtype_of(settings.fp8_out) if settings.fp8_out else x.q.dtype
    dqkv = results_of(settings).empty_dqkv((x.q, x.k, x.v), parse_format(settings.qkv_format), dtype)
    dense = [x.q.new_empty(0, dtype=dtype) if t is None else t for t in dqkv]
    dense += (x.q.new_empty(0, dtype=dtype) if t is None else t.new_empty(t.shape) for t in (bias, x.softmax_offset))
    program = _program_of(settings.mods)
    wanted = program.wanted(x.mod_tensors) if program else ()
    return (*dense, [t.new_empty(t.shape) for t in wanted])


def captures_with_gradients(mods: str) -> tuple[bool, ...]:
    program = _program_of(mods)
    return program.tensor_needs_grad if program else ()


# The flag that torch.compiler.assume_constant_result sets; calling that would import Dynamo.
captures_with_gradients._dynamo_marked_constant = True  # type: ignore[attr-defined]


_LISTS = slice(Operands._fields.index("mod_tensors"), len(Operands._fields))


def tensors_of(x: Operands) -> tuple[Tensor | None, ...]:
    """Returns all tensors of a call: the fields, then the captures of mods, then the tensors of a block mask."""
    fields: tuple[Any, ...] = x[:NUM_TENSORS]
    return (*fields, *x.mod_tensors, *x.block_mask)
