"""attention() of DTensors: each rank attends over its own heads or rows of the batch, without communication.

There are no sharding rules for the operators: torch supports none for an operator that returns a list, such as the gradients of
captured tensors. This module turns the arguments into local tensors with q's layout, and the results into DTensors again. Autograd
differentiates both steps.
"""

from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from flexattn.block_mask import BLOCK_TENSORS, Kept
from flexattn.call_options import Arguments, Fp8Options, LengthOptions, without_defaults
from flexattn.compat import tree_map
from flexattn.dispatch.options import batch_invariant
from flexattn.dispatch.spec import parse_format
from flexattn.mods.trace import Mod, find_all_captures
from flexattn.ops import new_rng_state
from flexattn.prepare import check_whole
from flexattn.warn import warn_once

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# By its name, because plain attention has one too. No call depends on whether another module imported it.
_over_sequence = importlib.import_module("flexattn.distributed.functional")
_SHIFTED = "_flexattn_shifted"
_OF_ROWS = ("cu_seqlens_q", "cu_seqlens_kv", "seqused_q", "seqused_kv", "page_table")


def attend_sharded(attend: Callable[..., Any], q: Any, k: Any, v: Any, options: Arguments) -> Any:
    """Returns attend(q, k, v, **options) if at least one of q, k and v is a DTensor.

    A mesh dim that shards q by heads or by batch keeps its sharding if it divides heads, key heads or batch. A mesh dim that
    shards q by sequence keeps it in a dense call. Every rank gets all data over any other mesh dim. k, v and the arguments with
    heads or a batch follow q. Plain tensors count as the same on every rank.
    """
    arguments: dict[str, Any] = {**options}
    if any(arguments[name] is not None for name in Fp8Options.__annotations__):
        raise ValueError("q, k or v is a DTensor and the call is in FP8; accepted: local tensors, whose amax is their own")
    if arguments["kv_indices"] is not None:
        raise ValueError("kv_indices is given and q, k or v is a DTensor; accepted: local tensors, with lists of their own")
    if arguments["return_aux"] is not None:
        raise ValueError("return_aux is given and q, k or v is a DTensor; accepted: return_lse, return_max_logit, or local tensors")
    if arguments["out"] is not None:
        raise ValueError("out is given and q, k or v is a DTensor. Leave out out, or pass local tensors.")
    mesh = next(t.device_mesh for t in (q, k, v) if isinstance(t, DTensor))
    check_whole(q, k, v, arguments)  # type: ignore[arg-type]  # parts of a tensor with too few heads or rows may fit a rank's own
    q_format, kv_format = parse_format(arguments["qkv_format"])
    head_dim, kv_head_dim = q_format.index("h"), kv_format.index("h")
    heads, heads_kv = q.shape[head_dim], k.shape[kv_head_dim]
    dense = "thd" not in (q_format, kv_format)
    batch = q.shape[q_format.index("b")] if dense else 0
    kinds = _kinds(q, q_format, kv_format, mesh, arguments, (heads, heads_kv), batch)
    _refuse(kinds, arguments)
    if arguments["dropout_p"] > 0.0 and arguments["rng_state"] is None:
        state = new_rng_state((q.to_local() if isinstance(q, DTensor) else q).device)
        drawn = DTensor.from_local(state, mesh, [Partial("max")] * mesh.ndim, run_check=False)  # the largest for all ranks
        arguments["rng_state"] = drawn.redistribute(mesh, [Replicate()] * mesh.ndim)

    def local(x: object, heads_dim: int | None, batch_dim: int | None, sequence_dim: int | None = None) -> Any:
        """Returns x's part on this rank, given its dims of heads, batch and tokens. A dim of None is not divided."""
        if not isinstance(x, Tensor):
            return x
        dims = {"heads": heads_dim, "batch": batch_dim, "sequence": sequence_dim, "all": None}
        wanted = [Replicate() if dims[kind] is None else Shard(dims[kind]) for kind in kinds]  # type: ignore[arg-type]
        # If a tensor is complete on every rank, each rank with heads or rows of its own has a part of its gradient.
        partial = [Partial() if dims[kind] is None and kind != "all" else place for kind, place in zip(kinds, wanted, strict=True)]
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)
        elif x.device_mesh != mesh:
            raise ValueError(f"a tensor is on {x.device_mesh} and another on {mesh}; accepted: one device mesh for all")
        return x.redistribute(mesh, wanted).to_local(grad_placements=partial)

    b_q, b_kv = (q_format.index("b"), kv_format.index("b")) if dense else (None, None)
    bias, slopes = arguments["bias"], arguments["alibi_slopes"]
    arguments["bias"] = local(bias, *(None if bias is None or bias.shape[dim] == 1 else dim for dim in (1, 0)))
    slopes_dims = 0 if slopes is None else slopes.dim()
    arguments["alibi_slopes"] = local(slopes, slopes_dims - 1, 0 if slopes_dims == 2 else None)
    arguments["softmax_offset"] = local(arguments["softmax_offset"], 0, None)
    for name in ("cu_seqlens_q", "cu_seqlens_kv"):
        arguments[name] = _rows(local(arguments[name], None, None), kinds, mesh, batch)
    for name in ("seqused_q", "seqused_kv"):
        arguments[name] = local(arguments[name], None, 0)
    for name in (*(name for name in LengthOptions.__annotations__ if name.endswith("_padded")), "rng_state", "page_table"):
        arguments[name] = local(arguments[name], None, None)
    first_head, first_row = (_first(kinds, mesh, kind, size) for kind, size in (("heads", heads), ("batch", batch)))
    given = arguments["score_mod_tensors"]
    if isinstance(given, Mapping):
        arguments["score_mod_tensors"] = {name: local(t, None, None) for name, t in given.items()}
    else:
        arguments["score_mod_tensors"] = [local(t, None, None) for t in given]
    for name, position in (("score_mod", 1), ("mask_mod", 0)):
        if arguments[name] is not None and (first_head or first_row):
            arguments[name] = _shifted(arguments[name], position, first_row, first_head)
    if arguments["block_mask"] is not None and arguments["block_mask"].mask_mod is None:  # lists of blocks, made for this call
        arguments["block_mask"].mask_mod = _shows_all
    if arguments["block_mask"] is not None and (first_head or first_row):
        arguments["block_mask"] = _shifted_blocks(arguments["block_mask"], first_row, first_head)
    s_q, s_kv = (q_format.index("s"), kv_format.index("s")) if dense else (None, None)
    parts = local(q, head_dim, b_q, s_q), local(k, kv_head_dim, b_kv, s_kv), local(v, kv_head_dim, b_kv, s_kv)
    if "sequence" in kinds:
        group, sizes = mesh.get_group(kinds.index("sequence")), (q.shape[s_q], k.shape[s_kv])
        results = _over_sequence.attend_over_sequence(*parts, group, sizes, arguments)
    else:
        results = attend(*parts, **without_defaults(arguments))

    def whole(x: Tensor, heads_dim: int, batch_dim: int | None, sequence_dim: int | None = None) -> Tensor:
        dims = {"heads": heads_dim, "batch": batch_dim, "sequence": sequence_dim}
        places = [Replicate() if kind == "all" else Partial("max") if dims[kind] is None else Shard(dims[kind]) for kind in kinds]  # type: ignore[arg-type]
        if "sequence" not in kinds:
            return DTensor.from_local(x, mesh, places, run_check=False)
        shape = list(x.shape)  # ranks may have different numbers of tokens
        for dim, full_size in ((heads_dim, heads), (batch_dim, batch), (sequence_dim, q.shape[s_q])):
            if dim is not None:
                shape[dim] = full_size
        strides = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(x, mesh, places, run_check=False, shape=torch.Size(shape), stride=strides)

    if isinstance(results, Tensor):
        return whole(results, head_dim, b_q, s_q)
    out, *statistics = results
    lse_head = 1 if dense or q_format != "thd" else 0
    names = [name for name in ("return_lse", "return_max_logit") if arguments[name]]
    dims: dict[str, Any] = {"return_lse": (lse_head, 0, 2), "return_max_logit": (0, None)}
    return type(results)(
        whole(out, head_dim, b_q, s_q), *(whole(t, *dims[name]) for name, t in zip(names, statistics, strict=True))
    )


def _kinds(
    q: Any, q_format: str, kv_format: str, mesh: DeviceMesh, arguments: dict[str, Any], heads: tuple[int, int], batch: int
) -> list[str]:
    """Returns "heads", "batch", "sequence" or, if a mesh dim divides nothing, "all" for it."""
    placements: tuple[Placement, ...] = q.placements if isinstance(q, DTensor) else (Replicate(),) * mesh.ndim
    kinds = []
    bias = arguments["bias"]
    shared = batch if bias is None or bias.shape[0] == 1 else math.gcd(batch, bias.shape[0])  # ranks get whole groups of entries
    left = {"heads": math.gcd(*heads), "batch": shared}
    has_lengths = any(arguments.get(name) is not None for name in _OF_ROWS)
    is_invariant = arguments["batch_invariant"] or batch_invariant()
    mask = arguments["block_mask"]
    if mask is not None and mask.kv_num_blocks.shape[:2] != (1, 1):
        left = {"heads": 1, "batch": 1}  # its lists would have to be divided too
    if getattr(arguments["score_mod"], "score_mod_gradient", None) is not None:
        left = {"heads": 1, "batch": 1}  # a custom backward reads its tensors at global indices
    for dim, place in enumerate(placements):
        letter = q_format[place.dim] if isinstance(place, Shard) else ""
        kind = {"h": "heads", "b": "batch" if batch else "all"}.get(letter, "all")
        size = mesh.size(dim)
        if letter == "s" and q_format == kv_format and not ("sequence" in kinds or has_lengths or is_invariant):
            kinds.append("sequence")
            continue
        if kind != "all" and left[kind] % size == 0:
            left[kind] //= size
        else:
            if letter and not torch.compiler.is_compiling():
                warn_once(
                    f"sharded {letter} {heads} {batch} {size}",
                    f"q is sharded over {letter!r} of {q_format}, {size} ways, and attention() gathers it on every rank; it stays "
                    "sharded over heads or a batch that can be divided by as many ranks, k's and v's heads too, or over the "
                    "sequence of a dense call without lengths, pages or batch_invariant",
                )
            kind = "all"
        kinds.append(kind)
    return kinds


def _refuse(kinds: list[str], arguments: Mapping[str, Any]) -> None:
    if set(kinds) == {"all"}:
        return
    if arguments["page_table"] is not None:
        raise ValueError(
            "page_table is given with DTensors that are sharded; accepted: None, or local tensors with tables of their own"
        )
    if arguments["dropout_p"] > 0.0 and not set(kinds) <= {"sequence", "all"}:
        raise ValueError(
            "dropout_p is given with DTensors that are sharded over heads or the batch; accepted: 0, or sharding over the sequence "
            "alone, as every rank would drop the weights of its own part where another drops its own"
        )
    for name in ("score_mod", "mask_mod"):
        if arguments[name] is None:
            continue
        if torch.compiler.is_dynamo_compiling():
            raise ValueError(
                f"{name} is given with DTensors that are sharded, under torch.compile; accepted: eager mode, or local tensors"
            )
        explicit = arguments["score_mod_tensors"] if name == "score_mod" else ()
        on_meta = tree_map(lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"), explicit)
        found = find_all_captures(name, arguments[name], on_meta)
        if found.key is None:
            raise ValueError(
                f"{name} is given with DTensors that are sharded, and the tensors that it reads cannot be known: {found.unkeyed}; "
                "accepted: a function whose captures are tensors, numbers, functions, or attributes of plain objects by their names"
            )
        for captured, t in found.tensors:
            if isinstance(t, DTensor) or (t.requires_grad and torch.is_grad_enabled()):
                raise ValueError(
                    f"{name} captures {captured}, a {type(t).__name__} that "
                    + (
                        "a mod cannot read"
                        if isinstance(t, DTensor)
                        else "requires a gradient, of which each rank would have a part"
                    )
                    + "; accepted beside DTensors: plain tensors without a gradient, and any in score_mod_tensors"
                )


def _first(kinds: list[str], mesh: DeviceMesh, kind: str, size: int) -> int:
    """Returns this rank's first of `size` heads or rows."""
    first, part = 0, size
    for dim, divided in enumerate(kinds):
        if divided == kind:
            part //= mesh.size(dim)
            first += part * mesh.get_local_rank(dim)
    return first


def _rows(cu_seqlens: Tensor | None, kinds: list[str], mesh: DeviceMesh, batch: int) -> Tensor | None:
    """Returns the cumulative lengths of this rank's rows of a dense batch."""
    if cu_seqlens is None or "batch" not in kinds:
        return cu_seqlens
    first = _first(kinds, mesh, "batch", batch)
    rows = batch // math.prod(mesh.size(dim) for dim, kind in enumerate(kinds) if kind == "batch")
    return (cu_seqlens[first : first + rows + 1] - cu_seqlens[first]).contiguous()


def _shifted(mod: Mod, position: int, first_row: int, first_head: int) -> Mod:
    """Returns the mod for this rank, whose batch entries and heads begin at first_row and first_head."""

    def shifted(*arguments: Tensor, **named: Tensor) -> object:
        before, b, h, after = arguments[:position], arguments[position], arguments[position + 1], arguments[position + 2 :]
        return mod(*before, b + first_row, h + first_head, *after, **named)

    return shifted


def _shifted_blocks(mask: BlockMask, first_row: int, first_head: int) -> BlockMask:
    """Returns a block mask for all heads and rows whose mask_mod is this rank's. The mask keeps it for later calls."""
    tensors, place = [getattr(mask, name) for name in BLOCK_TENSORS], (first_row, first_head, mask.mask_mod)
    kept: Kept | None = None if torch.compiler.is_compiling() else getattr(mask, _SHIFTED, None)
    if kept is not None and kept.is_current(tensors) and kept.value[0] == place:
        return kept.value[1]  # type: ignore[no-any-return]
    shifted = copy.copy(mask)
    shifted.mask_mod = _shifted(mask.mask_mod, 0, first_row, first_head)
    if not torch.compiler.is_compiling():
        object.__setattr__(mask, _SHIFTED, Kept(tensors, (place, shifted)))
    return shifted


def _shows_all(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return j >= 0
