"""FP8 over ranks: each rank quantises its tokens with the scales of the full sequence, so keys travel in FP8.

An amax is the maximum over ranks. So scales are bitwise identical to those of one process. The data are too, except that a rotation
may sum in another order. A document is ignored here if it has queries and no keys, or keys and no queries.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flexattn import fp8, ops
from flexattn.dispatch import quantization
from flexattn.dispatch.quantization import cast, note_amax, num_blocks, rotation_matrix, scale_of
from flexattn.distributed.capture import tables
from flexattn.distributed.eight_bits import Fp8Call
from flexattn.distributed.exchange import all_reduce_max
from flexattn.distributed.plans import Plan
from flexattn.fp8_ops import OPERATORS


class Tokens(NamedTuple):
    """A tensor to quantise. name: as in `DelayedScaling`. are_keys: whether its tokens are keys or values."""

    name: str
    x: Tensor
    are_keys: bool
    dtype: torch.dtype
    rotation: bool = False


def block_rows_of(plan: Plan, strategy: str, rows: int) -> int:
    """Returns the number of rows that share a scale in local calls, if `rows` share one in the full sequence.

    Raises ValueError on all ranks if a part begins inside such rows, at no multiple of 64.
    """
    starts = _piece_starts(plan, strategy)
    local_rows = math.gcd(rows, *starts)
    if local_rows % 64 == 0:
        return local_rows
    worst = next(start for start in starts if math.gcd(rows, start) % 64)
    raise ValueError(
        f"fp8_recipe.granularity is 'block', and with strategy {strategy!r} a part begins at position {worst} of its sequence. "
        "Parts must begin at multiples of 64: use lengths that are multiples of 128 times the ranks, strategy 'ulysses' for "
        "sequences without a window, or another granularity"
    )


@functools.lru_cache(maxsize=32)
def _piece_starts(plan: Plan, strategy: str) -> tuple[int, ...]:
    """Returns the positions, in their sequences, of the first query and key of every rank's pieces."""
    if strategy == "ulysses":
        pieces = plan.whole_pieces()
    elif strategy in ("gather", "halo"):
        pieces = [piece for rank in range(plan.ranks) for piece in plan.pieces(rank, plan.held(strategy, rank))]
    else:  # keys of any rank
        pieces = [piece for rank in range(plan.ranks) for keys in plan.kv_runs for piece in plan.pieces(rank, keys)]
    return tuple({start for piece in pieces for start in (piece.q_start, piece.kv_start)})


@tables(32)
def _token_places(plan: Plan, are_keys: bool, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Returns for each of this rank's tokens its document, its position there, and whether the document has queries and keys.

    Tokens of other documents may be padding, so they do not affect scales.
    """
    runs, side = (plan.kv_runs, plan.mask.kv) if are_keys else (plan.q_runs, plan.mask.q)
    parts = [part for run in runs[plan.rank] for part in side.within(run)]
    positions = [torch.arange(part.start, part.stop, device="cpu") for _, part in parts]
    documents = [torch.full((part.size,), document, device="cpu") for document, part in parts]
    empty = torch.zeros(0, dtype=torch.int64, device="cpu")
    document = torch.cat([empty, *documents])
    others = torch.tensor(plan.mask.lengths_q if are_keys else plan.mask.lengths_kv, device="cpu")
    return document.to(device), torch.cat([empty, *positions]).to(device), (others[document] > 0).to(device)


def quantise(tensors: Sequence[Tokens], fp8_call: Fp8Call, plan: Plan) -> list[fp8.QuantizedTensor]:
    """Returns this rank's tokens in FP8, with the scales that one process computes. Exchanges all amax at once.

    Tensors are [b, s, h, d], or [t, h, d] for packed documents. A state of delayed scaling records the amax of the full sequence.
    """
    recipe = fp8_call.recipe
    local = []
    for name, x, are_keys, _, rotation in tensors:
        rows = x.float()
        if rotation:
            rows = rows @ rotation_matrix(x.shape[-1], x.device)
        document, position, counts = _token_places(plan, are_keys, x.device)
        lengths = plan.mask.lengths_kv if are_keys else plan.mask.lengths_q
        if not plan.is_packed:
            shape = x.shape[:2]
            document, position = torch.arange(x.shape[0], device=x.device)[:, None].expand(shape), position.expand(shape)
        sizes = (
            (len(lengths) if plan.is_packed else x.shape[0]) if recipe.granularity in ("batch_head", "block") else 1,
            x.shape[-2] if recipe.granularity != "tensor" else 1,
            num_blocks(max(lengths), recipe.rows) if recipe.rows else 1,
        )
        group = quantization.groups(document, position, x.shape[-2], sizes, recipe.rows)
        magnitude = torch.where(rows.isfinite() & counts[:, None, None], rows.abs(), 0.0).amax(-1)
        amax = magnitude.new_zeros(sizes).flatten().scatter_reduce(0, group.flatten(), magnitude.flatten(), "amax")
        local.append((name, rows, group, sizes, amax))
    whole = all_reduce_max(torch.cat([amax for *_, amax in local]), plan.group, "the exchange of the largest values")
    results = []
    parts = torch.split(whole, [amax.numel() for *_, amax in local])
    for (name, rows, group, sizes, _), amax_part, t in zip(local, parts, tensors, strict=True):
        amax = amax_part.view(sizes)
        if fp8_call.state is None:
            scale = scale_of(amax, t.dtype, recipe.margin)
        else:
            note_amax(fp8_call.state.history(name), amax)
            scale = fp8_call.state.scale(name).view(1, -1, 1)
        data = cast(rows, scale.flatten()[group][..., None], t.dtype)
        results.append(fp8.QuantizedTensor(data, 1.0 / scale, amax))
    return results


def quantise_qkv(q: Tensor, k: Tensor, v: Tensor, fp8_call: Fp8Call, plan: Plan) -> list[fp8.QuantizedTensor]:
    """Returns this rank's q, k and v in FP8."""
    kinds = ((q, False, "q"), (k, True, "k"), (v, True, "v"))
    dtype = torch.float8_e4m3fn
    tensors = [Tokens(name, t, are_keys, dtype, fp8_call.recipe.rotation and name != "v") for t, are_keys, name in kinds]
    return quantise(tensors, fp8_call, plan)


def quantise_out(out: Tensor, fp8_call: Fp8Call, plan: Plan) -> fp8.QuantizedTensor:
    """Returns this rank's rows of out in the recipe's FP8 dtype."""
    assert fp8_call.recipe.out_dtype is not None
    [quantised] = quantise([Tokens("out", out, False, fp8_call.recipe.out_dtype)], fp8_call, plan)
    return quantised


def quantise_dout(dout: Tensor, fp8_call: Fp8Call, plan: Plan) -> fp8.QuantizedTensor | None:
    """Returns this rank's rows of dout in FP8. None if the backward quantises it in rows of its own."""
    assert fp8_call.config is not None
    if not fp8_call.config.quantises_dout:
        return None
    [quantised] = quantise([Tokens("dout", dout, False, fp8_call.recipe.grad_dtype)], fp8_call, plan)
    return quantised


def unrotate(dq: Tensor, dk: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients of q and k from those of the rotated q and k."""
    return OPERATORS.unrotate(dq.contiguous(), dk.contiguous())


def check(
    recipe_and_state: tuple[fp8.Recipe | None, fp8.DelayedScaling | None],
    qkv: tuple[Tensor, Tensor, Tensor],
    plan: Plan,
    needs_grad: bool,
    request: tuple[str, bool],
) -> Fp8Call | None:
    """Returns the FP8 settings of a call without local_rows, or None without FP8. Raises for arguments that cannot be split.

    request: the backend, and whether there is dropout.
    """
    recipe, state = recipe_and_state
    q, k, _ = qkv
    backend, dropout = request
    fp8.check_recipe(recipe, state)
    config, fields = fp8.quantize_config(recipe, state, q, (q.shape[-2], k.shape[-2]), needs_grad, dropout, backend)
    if not fields:
        return None
    recipe = fp8.Recipe() if recipe is None else recipe
    if backend == "cudnn":
        raise ValueError("backend is 'cudnn' with FP8; accepted over ranks: 'triton', 'eager' or 'auto'")
    if recipe.keep_16_bit:
        raise ValueError("fp8_recipe.keep_16_bit is True; accepted over ranks: None or False, because keys travel in FP8")
    to_fp8 = recipe.out_dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
    if to_fp8 and (recipe.granularity == "block" or (plan.is_packed and recipe.granularity == "batch_head")):
        raise ValueError(
            f"fp8_recipe.out_dtype is {recipe.out_dtype} with granularity {recipe.granularity!r}, which needs each "
            "sequence on one rank; accepted: granularity 'tensor' or 'head', or a 16-bit out_dtype"
        )
    if config is not None:
        config = config._replace(keeps_16_bit=False)
    return Fp8Call(recipe, config, state, ops.dtype_of(fields["fp8_out"]), 0)
