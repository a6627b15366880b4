"""The checks of attention()'s arguments, in call order. `lengths` checks the lengths of sequences.

A check reads only types, shapes, dtypes and devices, so none waits for a device, and torch.compile removes them all. The checks of
values, `check_descale_values` and `lengths.check_values`, run only if FLEXATTN_CHECK=1.
"""

from __future__ import annotations

import numbers
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from flexattn import compat
from flexattn.dispatch import options, triton_backend
from flexattn.dispatch.neutral import is_ordinary
from flexattn.dispatch.options import check_name as check_name
from flexattn.dispatch.spec import FORMATS, PACKINGS, Operands, Results, as_index, is_host_number, parse_format
from flexattn.warn import warn_once

if TYPE_CHECKING:
    from flexattn.dispatch.mod_program import Capture

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
CACHED_FOR = (torch.float16, torch.bfloat16, torch.float32)  # dtypes of q with keys and values in FP8
DEVICES = ("cpu", "cuda", "meta")
DIMS = {"b": "batch", "s": "sequence", "h": "heads", "d": "head dim", "t": "total tokens"}
NOT_READ = "a tensor is read only if that waits for nothing: a 0-d tensor on a CPU, without a gradient, outside of torch.compile"
MAX_DROPOUT = 1 - 2**-16  # an element is kept iff its 16 random bits reach dropout_p * 2**16


def are_values_read(t: Tensor) -> bool:
    """Returns whether a check may read a tensor's values: on a CPU, which waits for nothing; elsewhere under FLEXATTN_CHECK=1.

    A trace, a mode or a transform has no values to read, or would record the check.
    """
    if torch.compiler.is_compiling() or type(t) not in (Tensor, torch.nn.Parameter) or t.device.type == "meta" or not is_ordinary():
        return False
    return t.device.type == "cpu" or options.check_values()


def is_one_of(shape: Sequence[int], shapes: Iterable[Sequence[int]]) -> bool:
    """Returns whether a shape is one of the shapes. It compares none of another number of dims.

    Tuples of different lengths compare their first items, and each comparison is a guard on a size that torch.export leaves open.
    """
    return any(len(other) == len(shape) and tuple(other) == tuple(shape) for other in shapes)


def check_flag(argument: str, value: object, *, optional: bool = False) -> None:
    if not (isinstance(value, bool) or (optional and value is None)):
        raise TypeError(f"{argument} is {describe(value)}; accepted: True, False{', None' if optional else ''}")


def check_flags(**flags: object) -> None:
    """Raises TypeError unless each value is a bool, 0 or 1. Strings and tensors would count as True, or wait for the device."""
    for name, value in flags.items():
        is_bool = value is True or value is False or isinstance(value, torch.SymBool) or type(value).__name__ in ("bool", "bool_")
        if not is_bool and not (isinstance(value, int) and value in (0, 1)):
            raise TypeError(f"{name} is {describe(value)}; accepted: True, False")


def check_number(argument: str, value: Any, limit: float, accepted: str) -> float:
    """Returns a real number or a 0-d tensor on a CPU as a Python number; raises unless 0 <= value <= limit.

    A tensor on another device is refused, because reading it would wait. A tensor that requires a gradient would lose it.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
        if isinstance(value, Tensor):
            is_readable, hint = not torch.compiler.is_compiling() and is_host_number(value), f"; {NOT_READ}"
        else:
            is_readable, hint = isinstance(value, numbers.Real) and not isinstance(value, bool), ""
        if not is_readable:
            raise TypeError(f"{argument} is {describe(value)}; accepted: {accepted}{hint}")
        value = float(value)
    if not 0.0 <= value <= limit:
        raise ValueError(f"{argument} is {value}; accepted: {accepted}")
    return value  # type: ignore[no-any-return]


def check_count(argument: str, value: object, least: int, accepted: str, most: int | None = None) -> None:
    """Raises unless the value is an int of at least `least`, and at most `most` if that is given."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{argument} is {describe(value)}; accepted: {accepted}")
    if value < least or (most is not None and value > most):
        raise ValueError(f"{argument} is {value}; accepted: {accepted}")


def check_device(argument: str, device: Any) -> None:
    try:
        torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError) as e:
        raise ValueError(f"{argument} is {device!r}; accepted: a torch.device, or its name, such as 'cuda' or 'cuda:1'") from e


def check_mod_arguments(score_mod: object, mask_mod: object, tensors: object) -> None:
    """Raises TypeError if a mod has a wrong type. The trace checks the computation of a mod."""
    for name, mod in (("score_mod", score_mod), ("mask_mod", mask_mod)):
        if mod is not None and not callable(mod):
            hint = ""
            if isinstance(mod, Tensor):
                hint = ". Pass a tensor as mask=, or read it in a function: lambda b, h, q_idx, kv_idx: m[q_idx, kv_idx]"
                if name == "score_mod":
                    hint = ". Pass a tensor that is added to scores as bias=, [b, h, sq, skv]"
            raise TypeError(f"{name} is {describe(mod)}; accepted: a function, or None{hint}")
    accepted = "a list or tuple of tensors, or a dict from names of score_mod's arguments to tensors"
    if not isinstance(tensors, (list, tuple, Mapping)):
        raise TypeError(f"score_mod_tensors is {describe(tensors)}; accepted: {accepted}")
    if score_mod is None and tensors:
        raise ValueError("score_mod_tensors is given without a score_mod; accepted: (), or a score_mod that takes them")
    for key, t in dict(tensors if isinstance(tensors, Mapping) else enumerate(tensors)).items():
        if not isinstance(t, Tensor):
            raise TypeError(f"score_mod_tensors[{key!r}] is {describe(t)}; accepted: {accepted} (score_mod can capture numbers)")
        check_meaning(f"score_mod_tensors[{key!r}]", t)


MANY_HEADS = 129  # models without GQA have up to 128 heads, some with v padded to the head dim of k


def warn_of_mistakes(
    q: Tensor, k: Tensor, v: Tensor, formats: tuple[str, str], attn_mask_type: str, longest: tuple[int | None, int | None]
) -> None:
    """Warns once for each usual mistake of a valid call. longest: the longest sequences of queries and of keys.

    The only query sees just the first of several keys: the usual result of decoding with the wrong diagonal. Or tensors in bshd
    look like [batch, heads, sequence, head dim]: more heads than tokens, and very many heads. Short prompts and steps of decoding
    also have more heads than tokens, but fewer heads, one query, or more keys than queries.
    """
    if torch.compiler.is_compiling():
        return
    max_q, max_kv = longest
    is_from_first = attn_mask_type in ("causal", "padding_causal")
    if is_from_first and isinstance(max_q, int) and isinstance(max_kv, int) and max_q == 1 and max_kv > 1:
        warn_once(
            "one query",
            f"attn_mask_type is {attn_mask_type!r} with one query and {max_kv} keys: it counts from the first key, so the query "
            "sees only that one; if the query is the last of the sequence, as in decoding, use "
            f"{attn_mask_type + '_bottom_right'!r}",
            at_caller=True,
        )
    if formats != ("bshd", "bshd"):
        return
    (sq, heads), (skv, heads_kv) = q.shape[1:3], k.shape[1:3]
    if heads == heads_kv >= MANY_HEADS and q.shape[3] == v.shape[3] and heads > sq >= skv and sq > 1:
        warn_once(
            "swapped dims",
            f"q and k have {heads} heads and {sq} and {skv} tokens in qkv_format 'bshd'; if these are [batch, heads, seq, dim], "
            "pass qkv_format='bhsd'",
            at_caller=True,
        )


def check_qkv(q: Tensor, k: Tensor, v: Tensor, q_format: str, kv_format: str) -> None:
    for name, x, fmt in (("q", q, q_format), ("k", k, kv_format), ("v", v, kv_format)):
        check_tensor(name, x, (*DTYPES, *FP8_DTYPES), None if name == "q" else q.device)
        is_kept = name != "q" and x.dtype in FP8_DTYPES and q.dtype in CACHED_FOR and k.dtype == v.dtype
        if x.dtype != q.dtype and not is_kept:
            raise TypeError(
                f"{name} has dtype {x.dtype} and q has {q.dtype}; accepted: the same for q, k and v, or k and v both in one FP8 "
                f"dtype with q in 16 or 32 bits. Convert with {name}.to(q.dtype), or call under autocast."
            )
        if x.dim() != len(fmt):
            dims = ", ".join(DIMS[dim] for dim in fmt)
            hint = ""
            if x.dim() == 3 and len(fmt) == 4:
                hint = ". Add a batch dim of 1, or pass qkv_format='thd' with cu_seqlens for packed sequences."
            elif fmt == "thd":
                hint = ". Pack the batch's sequences one after another, or pass the format of padded tensors, such as 'bshd'."
            raise ValueError(
                f"{name} has {x.dim()} dims, shape {tuple(x.shape)}; accepted: the {len(fmt)} dims of {fmt} ({dims}){hint}"
            )
        if x.shape[fmt.index("h")] == 0 or x.shape[-1] == 0:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)} in format {fmt}; accepted: at least one head and a head dim of at least 1"
            )
    for dim in kv_format[:-1]:
        axis = kv_format.index(dim)
        if k.shape[axis] != v.shape[axis]:
            raise ValueError(
                f"v has {DIMS[dim]} {v.shape[axis]} and k has {k.shape[axis]} (format {kv_format}); accepted: the same for both"
            )
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k has head dim {k.shape[-1]} and q has {q.shape[-1]}; accepted: the same for both (v's may differ)")
    heads, heads_kv = q.shape[q_format.index("h")], k.shape[kv_format.index("h")]
    if heads % heads_kv != 0:
        raise ValueError(
            f"q has {heads} heads and k and v have {heads_kv}, because shape {tuple(q.shape)} is {q_format} and {tuple(k.shape)} "
            f"is {kv_format}; accepted: a multiple of the heads of k and v (qkv_format names the dim of heads)"
        )


def check_bias(bias_type: str, bias: Tensor | None, q: Tensor, shape: tuple[int, int, int, int]) -> None:
    if bias_type not in ("pre_scale_bias", "post_scale_bias"):
        if bias is not None:
            raise ValueError(
                f"bias is given with bias_type {bias_type!r}; accepted: None, or bias_type pre_scale_bias or post_scale_bias"
            )
        return
    if bias is None:
        raise ValueError(
            f"bias is None with bias_type {bias_type!r}; accepted: a tensor that broadcasts to [b, h, sq, skv] = {list(shape)}"
        )
    if isinstance(bias, Tensor) and bias.dtype is torch.bool:
        dtypes = " or ".join(dict.fromkeys((str(q.dtype), "torch.float32")))
        raise TypeError(
            f"bias has dtype torch.bool; accepted: {dtypes}. Pass a bool tensor as mask=, True where a query sees a key."
        )
    check_tensor("bias", bias, (q.dtype, torch.float32), q.device)
    fits = bias.dim() == 4 and all(size in (full, 1) for size, full in zip(bias.shape[1:], shape[1:], strict=True))
    if not fits or not (bias.shape[0] in (shape[0], 1) or (shape[0] > bias.shape[0] > 0 and shape[0] % bias.shape[0] == 0)):
        hint = " Add dims of size 1 in front, such as bias[None, None], or pass it as mask=."
        if bias.dim() >= 4:
            hint = " The first may also be n, if n divides b: batch entry i then adds bias[i // (b // n)]."
        raise ValueError(
            f"bias has shape {tuple(bias.shape)}; accepted: [b, h, sq, skv] = {list(shape)}, any of which may be 1.{hint}"
        )


def check_alibi_slopes(bias_type: str, slopes: Tensor, q: Tensor, batch: int, heads: int) -> None:
    if bias_type != "alibi":
        raise ValueError(f"alibi_slopes is given with bias_type {bias_type!r}; accepted: None, or bias_type alibi")
    check_tensor("alibi_slopes", slopes, (torch.float32,), q.device)
    if not is_one_of(slopes.shape, ((heads,), (batch, heads))):
        raise ValueError(f"alibi_slopes has shape {tuple(slopes.shape)}; accepted: [h] = [{heads}] or [b, h] = [{batch}, {heads}]")
    if slopes.requires_grad and torch.is_grad_enabled():
        raise ValueError("alibi_slopes requires a gradient; accepted: detached slopes, because they are not differentiable")


def check_softmax_offset(softmax_type: str, offset: Tensor | None, q: Tensor, heads: int) -> None:
    if softmax_type != "learnable":
        if offset is not None:
            raise ValueError(
                f"softmax_offset is given with softmax_type {softmax_type!r}; accepted: None, or softmax_type learnable"
            )
        return
    if offset is None:
        raise ValueError(f"softmax_offset is None with softmax_type 'learnable'; accepted: a tensor of shape [h] = [{heads}]")
    check_tensor("softmax_offset", offset, (q.dtype, torch.float16, torch.bfloat16, torch.float32), q.device)
    if tuple(offset.shape) != (heads,):
        raise ValueError(f"softmax_offset has shape {tuple(offset.shape)}; accepted: [h] = [{heads}]")


def check_out(out: Any, q: Tensor, v: Tensor, dtype: torch.dtype, needs_grad: bool) -> None:
    """Raises if a forward cannot write its result into `out`."""
    check_tensor("out", out, (dtype,), q.device)
    shape = (*q.shape[:-1], v.shape[-1])
    if tuple(out.shape) != shape or not out.is_contiguous():
        raise ValueError(f"out is {describe(out)}; accepted: contiguous, of shape {shape}, which is q's shape with v's head dim")
    if needs_grad or (out.requires_grad and torch.is_grad_enabled()):
        raise ValueError("out is given and a gradient is needed. Call attention() under torch.no_grad(), or do not pass out.")
    if torch.compiler.is_compiling() or out.is_meta or type(out) not in (Tensor, torch.nn.Parameter):
        return
    if compat.is_batched(out):
        raise RuntimeError("out belongs to torch.vmap, and attention() has no rule for torch.vmap; leave out out, or map nothing")
    if out.data_ptr() % 16:
        raise ValueError(f"out begins at address {out.data_ptr():#x}. Pass a tensor that begins at a multiple of 16 bytes.")


def check_apart(x: Operands) -> None:
    """Raises if `out`, which the call has, may share memory with another tensor of it."""
    out, plain = x.out, (Tensor, torch.nn.Parameter)
    assert out is not None
    if torch.compiler.is_compiling() or type(out) not in plain or out.device.type not in ("cpu", "cuda"):
        return
    begin, size = out.data_ptr(), extent(out)
    for name, value in x._asdict().items():
        for t in value if isinstance(value, (tuple, list)) else (value,):
            if name != "out" and type(t) in plain and t.device == out.device and is_shared(begin, size, t.data_ptr(), extent(t)):
                refuse_shared(name)


def refuse_shared(name: str) -> NoReturn:
    """Raises ValueError. name: a field of `Operands` that may share memory with `out`."""
    name = {"bias": "bias or mask", "mod_tensors": "a tensor that a mod captures"}.get(name, name)
    raise ValueError(f"out may share memory with {name}. Pass separate memory.")


def is_shared(a: int, bytes_a: int, b: int, bytes_b: int) -> bool:
    """Returns whether two ranges of addresses overlap. Each range is an address and a size in bytes."""
    return b < a + bytes_a and a < b + bytes_b and bytes_a > 0 and bytes_b > 0


def extent(t: Tensor | None) -> int:
    """Returns the number of bytes from a tensor's first element to the end of its last; 0 for None."""
    if t is None or t.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return (last + 1) * t.element_size()


def check_rng_state(rng_state: Tensor, q: Tensor, batch: int | None = None) -> None:
    """Raises if rng_state has a wrong dtype, device or shape. batch: the batch size if the call may be part of a larger one."""
    from flexattn.dispatch.philox import ORIGIN  # a late import: few calls have an rng_state

    check_tensor("rng_state", rng_state, (torch.int64,), q.device)
    is_by_sequence = batch is not None and is_one_of(rng_state.shape, ((batch, len(ORIGIN)), (batch, len(ORIGIN) + 1)))
    if not (is_by_sequence or is_one_of(rng_state.shape, ((2,),))) or not rng_state.is_contiguous():
        also = "" if batch is None else f", or [b, 5 or 6] with b = {batch}: {', '.join(ORIGIN)} of each sequence in a whole"
        raise ValueError(
            f"rng_state is {describe(rng_state)}; accepted: a contiguous tensor of shape [2], the Philox seed and offset{also}"
        )
    device_type = rng_state.device.type
    is_read = (
        is_by_sequence
        and not torch.compiler.is_compiling()
        and (device_type == "cpu" or (device_type != "meta" and options.check_values()))
    )
    if is_read and bool((rng_state[:, 3] % 8).any() | (rng_state[:, 5:] // 8).any() | (rng_state[:, 2:] < 0).any()):
        raise ValueError(
            f"rng_state has first keys {reprlib.repr(rng_state[:, 3].tolist())}; accepted: positions of 0 or more, multiples "
            "of 8 in this column, with the remainder, 0 to 7, in a sixth column"
        )


def check_mod_tensors(captures: Sequence[Capture], tensors: Sequence[Tensor], q: Tensor) -> tuple[Tensor, ...]:
    """Returns the captured tensors on q's device. A 0-d tensor on the CPU is moved; any other must be on the device."""
    names = [capture.name for capture in captures if not capture.is_number]
    checked = []
    for name, t in zip(names, tensors, strict=True):
        check_meaning(name, t)
        if _is_dtensor(t) and not _is_dtensor(q):
            raise TypeError(
                f"{name}, which score_mod or mask_mod captures, is a DTensor; accepted: a plain tensor, such as {name}.to_local(); "
                "or, if q is a DTensor, any tensor in score_mod_tensors"
            )
        if t.device != q.device and not (t.dim() == 0 and t.device.type == "cpu"):
            raise ValueError(
                f"{name}, which score_mod or mask_mod captures, is {describe(t)} and q is on {q.device}; accepted: the same "
                "device, or a 0-d tensor on the CPU"
            )
        checked.append(t if t.device == q.device else t.to(q.device, non_blocking=True))
    return tuple(checked)


def _is_dtensor(t: object) -> bool:
    return type(t).__name__ == "DTensor"  # by name, because its import takes long


def check_local(tensors: Mapping[str, Any], accepted: str) -> None:
    """Raises TypeError for a DTensor, which torch cannot pass to an operator beside plain tensors."""
    for name, t in tensors.items():
        if _is_dtensor(t):
            raise TypeError(f"{name} is a DTensor; accepted: a plain tensor, such as {name}.to_local(){accepted}")


def check_scalars(softmax_scale: object, softcap: object, dropout_p: object) -> tuple[float | None, float, float]:
    """Returns the three arguments as Python numbers; raises if one is out of range."""
    largest = torch.finfo(torch.float32).max
    if softmax_scale is not None:
        accepted = "a finite Python number, at least 0, or None for 1/sqrt(head dim)"
        softmax_scale = check_number("softmax_scale", softmax_scale, largest, accepted)
    softcap = check_number("softcap", softcap, largest, "a finite Python number, at least 0 (0 for none)")
    smallest = torch.finfo(torch.float32).tiny
    if 0.0 < softcap < smallest:
        raise ValueError(
            f"softcap is {softcap}; accepted: 0 for none, or at least {smallest:.3g}, so that float32 holds its inverse"
        )
    dropout_p = check_number("dropout_p", dropout_p, MAX_DROPOUT, "a Python number in [0, 1), at most 1 - 2**-16")
    return softmax_scale, softcap, dropout_p


def check_backward(x: Operands, qkv_format: str, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None) -> None:
    """Raises if the results of a forward or their gradients do not fit the call. The call's arguments are already checked."""
    q, q_format = x.q, parse_format(qkv_format)[0]
    shape = (*q.shape[:-1], x.v.shape[-1])
    for name, t in (("out", out), ("dout", dout)):
        check_tensor(name, t, (q.dtype,), q.device)
        if t.shape != shape:
            raise ValueError(f"{name} has shape {tuple(t.shape)}; accepted: {tuple(shape)}, which is q's shape with v's head dim")
    check_lse("lse", lse, q, q_format)
    if dlse is not None:
        check_lse("dlse", dlse, q, q_format)


def check_lse(name: str, lse: Tensor, q: Tensor, q_format: str) -> None:
    """Raises if a tensor is no lse of these queries."""
    check_tensor(name, lse, (torch.float64 if q.dtype is torch.float64 else torch.float32,), q.device)
    shape = (q.shape[1], q.shape[0]) if q_format == "thd" else tuple(q.shape[q_format.index(dim)] for dim in "bhs")
    if lse.shape != shape:
        dims = "[h, t_q]" if q_format == "thd" else "[b, h, sq]"
        raise ValueError(f"{name} has shape {tuple(lse.shape)}; accepted: {shape}, {dims}")


def checked_results(results: Results, q: Tensor, k: Tensor, v: Tensor, formats: tuple[str, str]) -> Results:
    """Returns results with "" for each format that equals the operand's. Raises ValueError if results are not possible."""
    defaults = {"out": formats[0], "dq": formats[0], "dkv": formats[1]}
    for name, fmt in defaults.items():
        wanted = getattr(results, name)
        accepted = [known for known in FORMATS if (known == "thd") == (fmt == "thd")]
        if wanted and wanted not in accepted:
            raise ValueError(f"the format of {name} is {wanted!r} for a tensor in {fmt}; accepted: {', '.join(accepted)}")
    out, dq, dkv = ("" if getattr(results, name) == fmt else getattr(results, name) for name, fmt in defaults.items())
    results = results._replace(out=out, dq=dq, dkv=dkv)
    if q.dtype.itemsize >= 4:
        results = results._replace(fp32="none", fp32_out=False)
    if not results.packing:
        return results
    if results.fp32 != "none":
        raise ValueError(f"{results.fp32} is to be in float32 in a buffer that gradients share; accepted: separate gradients")
    check_name("the packing of dq, dk and dv", results.packing, tuple(PACKINGS))
    shared = (q, k, v) if PACKINGS[results.packing][0] == 3 else (k, v)
    shapes = [tuple(t.shape) for t in shared]
    same_formats = len(shared) == 2 or (formats[0] == formats[1] and results.dq == results.dkv)
    if len(set(shapes)) > 1 or not same_formats:
        names = "q, k and v" if len(shared) == 3 else "k and v"
        raise ValueError(
            f"{names} have shapes {', '.join(map(str, shapes))} in {formats[0]} and {formats[1]}, and their gradients cannot share "
            "a buffer; accepted: equal shapes and formats, or separate gradients"
        )
    return results


def check_merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, qkv_format: str) -> str:
    """Returns q's format. Raises unless the four tensors of merge_attention() fit it and each other."""
    fmt, _ = parse_format(str(qkv_format))
    check_tensor("out_a", out_a, DTYPES, None)
    check_tensor("out_b", out_b, (out_a.dtype,), out_a.device)
    if out_a.dim() != len(fmt):
        raise ValueError(f"out_a has shape {tuple(out_a.shape)}; accepted: the {len(fmt)} dims of {fmt}")
    if out_b.shape != out_a.shape:
        raise ValueError(f"out_b has shape {tuple(out_b.shape)} and out_a has {tuple(out_a.shape)}; accepted: the same for both")
    lse_shape = tuple(out_a.shape[fmt.index(dim)] for dim in ("ht" if fmt == "thd" else "bhs"))
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        check_tensor(name, lse, (torch.float64,) if out_a.dtype is torch.float64 else (torch.float32,), out_a.device)
        if tuple(lse.shape) != lse_shape:
            raise ValueError(
                f"{name} has shape {tuple(lse.shape)}; accepted for out_a's shape {tuple(out_a.shape)} in {fmt}: {lse_shape}"
            )
    return fmt


def check_fp8(
    q: Tensor,
    k: Tensor,
    q_format: str,
    kv_format: str,
    batch: int,
    lengths: tuple[tuple[int, Any], tuple[int, Any]],
    block_rows: int,
    descales: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> tuple[Tensor, ...]:
    """Returns the descales of q, k and v in FP8 as [b | 1, h | 1, blocks | 1]: all three, those of k and v, or none.

    If keys and values in FP8 have a descale for each token and head, its shape is k's with a last dim of 1.

    lengths: for q and for k and v, (the planned length, max_seqlen as passed). The number of blocks may be that of either.
    """
    checked = []
    for name, descale, x, fmt, length in zip(
        "qkv", descales, (q, k, k), (q_format, kv_format, kv_format), (lengths[0], lengths[1], lengths[1]), strict=True
    ):
        if x.dtype not in FP8_DTYPES:
            if descale is not None:
                tensors = "q, k and v" if k.dtype == q.dtype else "q"
                raise ValueError(
                    f"descale_{name} is given with {tensors} in {q.dtype}; accepted: None, or {tensors} in "
                    f"{' or '.join(map(str, FP8_DTYPES))}"
                )
            continue
        if descale is None:
            checked.append(as_scales(None, q.device))
            continue
        from flexattn.dispatch.quantization import num_blocks  # a late import: calls without FP8 should not wait for it

        check_tensor(f"descale_{name}", descale, (torch.float32,), q.device)
        may_be_by_token = k.dtype != q.dtype and fmt != "thd"  # kernels read descales by token only of dense tensors and pages
        is_by_token = may_be_by_token and tuple(descale.shape) == tuple(x.shape[:-1])
        heads = x.shape[fmt.index("h")]
        blocks = [num_blocks(n, block_rows) if block_rows else 1 for n in map(as_index, length) if n is not None]
        sizes = _scale_sizes(descale)
        fits = len(sizes) == 3 and all(
            size in full or size == 1 for size, full in zip(sizes, ([batch], [heads], blocks), strict=True)
        )
        if not fits and not is_by_token:
            hint = "" if block_rows else " (blocks: give an fp8_recipe with granularity 'block')"
            if k.dtype != q.dtype:
                hint = ""
            if may_be_by_token:
                hint = f", or {list(x.shape[:-1])}, one for each token and head"
            raise ValueError(
                f"descale_{name} has shape {tuple(descale.shape)}; accepted: [], [h], [b, h] or [b, h, blocks] = "
                f"{[batch, heads, blocks[0]]}, any of which may be 1{hint}"
            )
        if descale.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"descale_{name} requires a gradient; accepted: a detached descale, because descales are not differentiable"
            )
        checked.append(as_cache_scales(descale, x) if k.dtype != q.dtype else as_scales(descale, q.device))
    return tuple(checked)


def as_scales(descale: Tensor | None, device: torch.device) -> Tensor:
    """Returns a descale of attention() as [b | 1, h | 1, blocks | 1]."""
    if descale is None:
        return torch.ones(1, 1, 1, dtype=torch.float32, device=device)
    return descale.view(_scale_sizes(descale))


def as_cache_scales(descale: Tensor | None, cache: Tensor) -> Tensor:
    """Returns a descale of an FP8 cache with 16-bit or 32-bit queries: as `as_scales`, or the cache's dims with a last dim of 1."""
    is_by_token = descale is not None and cache.dim() == 4 and descale.shape == cache.shape[:-1]
    return descale[..., None] if descale is not None and is_by_token else as_scales(descale, cache.device)


def _scale_sizes(descale: Tensor) -> tuple[int, ...]:
    return tuple(descale.shape) if descale.dim() == 3 else (1,) * (2 - descale.dim()) + tuple(descale.shape) + (1,)


def check_descale_values(x: Operands) -> None:
    """Raises ValueError if a descale is not positive and finite. Only FLEXATTN_CHECK=1 runs this check.

    It transfers one flag for each descale, all at once, and waits for them.
    """
    names = "qkv" if x.k.dtype == x.q.dtype else "kv"
    # Descales by token are not checked: rows without a token may hold any value.
    by_block = {name: descale for name, descale in zip(names, x.descales, strict=False) if descale.dim() == 3}
    if not by_block:
        return
    is_right = [(descale > 0) & descale.isfinite() for descale in by_block.values()]
    are_all = torch.stack([right.all() for right in is_right]).tolist()
    for (name, descale), right, is_all in zip(by_block.items(), is_right, are_all, strict=True):
        if not is_all:
            b, h, block = (~right).nonzero()[0].tolist()
            raise ValueError(
                f"descale_{name} is {descale[b, h, block].item()} at [{b}, {h}, {block}] of [b, h, blocks]; accepted: positive and "
                "finite values, as from fp8.quantize (with an fp8_state they are 1 / scale)"
            )


def describe(value: object) -> str:
    """Returns the words for a value in an error: dtype, shape, strides and device of a tensor, else the value and its type."""
    if not isinstance(value, Tensor):
        return f"{reprlib.repr(value)} ({type(value).__name__})"
    if value.is_nested:
        return "a nested tensor"
    strides = "" if value.layout is not torch.strided or value.is_contiguous() else f" with strides {value.stride()}"
    return f"a {value.dtype} tensor of shape {tuple(value.shape)}{strides} on {value.device}"


def check_meaning(name: str, x: Tensor) -> None:
    """Raises TypeError if a tensor's elements are not its value, as in torch's CausalBias.

    Such a class overrides torch's functions but not its operators, so torch.library and kernels would read its memory.
    """
    kind = type(x)
    if kind is Tensor or kind is torch.nn.Parameter or kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return
    function: Any = getattr(kind.__torch_function__, "__func__", None)
    if function is None or function is Tensor.__torch_function__.__func__:  # type: ignore[attr-defined]
        return
    raise TypeError(
        f"{name} is a {kind.__name__}, whose elements may not be its value; accepted: a torch.Tensor; instead of torch's "
        "CausalBias pass attn_mask_type 'causal' or 'causal_bottom_right', and convert any other class to a tensor first"
    )


def check_tensor(name: str, x: object, dtypes: tuple[torch.dtype, ...], device: torch.device | None) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is {describe(x)}; accepted: a tensor")
    check_meaning(name, x)
    if x.is_nested or x.layout is not torch.strided:
        nested = "is nested and " if x.is_nested else ""
        raise TypeError(
            f"{name} {nested}has layout {x.layout}; accepted: a plain torch.strided tensor (pack uneven lengths as thd)"
        )
    if x.dtype not in dtypes:
        raise TypeError(f"{name} has dtype {x.dtype}; accepted: {', '.join(dict.fromkeys(map(str, dtypes)))}")
    if device is None and x.device.type not in DEVICES:
        raise ValueError(f"{name} is on {x.device}; accepted: a tensor on {', '.join(DEVICES)}")
    if device is not None and x.device != device:
        raise ValueError(f"{name} is on {x.device} and q is on {device}; accepted: the same device for both. Move it there first.")


MASKING = -1e8  # the largest finite score that counts as a mask
FLOOR = 0.99 * MASKING  # above each masking score by 1e6, which exceeds lse's rounding and 104, past which exp is 0 in float32
_BELOW_FLOOR = (
    f"a score_mod masks with a finite score of {MASKING:.0e} or less, and a query has no score above {FLOOR:.2e} among the keys "
    "that it sees, so masked keys would have a weight; mask with -inf, or with a number above -1e8"
)


def check_floor(lse: Tensor) -> None:
    """Checks that finite masking scores, such as -1e9, have no weight: each query has a much greater score.

    `flexattn.mods.bands` turns such a mask into a band, which is exact if each query's lse exceeds the masking score by so much
    that exp of the difference is 0. The check therefore reads lse and needs no pass over the scores. It raises ValueError if an lse
    is not above FLOOR. On a GPU nothing waits: a device-side assertion fails.
    """
    if lse.numel() == 0:
        return
    if triton_backend.can_check_floor(lse.device):
        triton_backend.check_floor(lse, FLOOR, _BELOW_FLOOR)
        return
    is_low = (lse <= FLOOR).any()  # false for NaN, which a NaN in q causes
    if is_low.device.type != "cpu":
        compat.assert_async(~is_low, _BELOW_FLOOR)
    elif is_low:
        raise ValueError(_BELOW_FLOOR)
