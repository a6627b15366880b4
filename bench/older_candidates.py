"""Candidates that `older_tiles` compiles and times: their calls, launches and results."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from flexattn.bench.implementations import committed_tile, problem_of
from flexattn.bench.inputs import Tensors, make_tensors
from flexattn.bench.shapes import Workload
from flexattn.bench.tiles import OLDER_SPACE, parse_tile, tile_name
from flexattn.testing import Inputs, make_call, reference_attention, reference_gradients

if TYPE_CHECKING:
    from flexattn.kernels_triton.common.problem import Problem
    from flexattn.kernels_triton.runtime.device import Tile
    from flexattn.kernels_triton.runtime.launch import Launch

DEVICE = "cuda"
CHECKED_LENGTH = 512
CHECKED_KEYS = 2048  # keys of a checked decode: enough to be split


class Job(NamedTuple):
    """One candidate."""

    kernel: str
    head_dim: int
    is_causal: bool
    tile: str
    committed: tuple[int, ...] = ()  # capabilities whose table has this tile

    @property
    def cell(self) -> tuple[str, int, bool]:
        return self.kernel, self.head_dim, self.is_causal

    @property
    def base(self) -> str:
        """The kernel without its features."""
        return self.kernel.partition("+")[0]

    @property
    def checked_length(self) -> int:
        return CHECKED_KEYS if self.kernel == "decode" else CHECKED_LENGTH


def jobs_of(head_dims: Sequence[int], kernels: Sequence[str], masks: Sequence[str]) -> list[Job]:
    """Returns all candidates, each cell's committed tiles first; cells in the order of the arguments."""
    jobs: list[Job] = []
    groups = (("forward", "dq", "dkdv"), ("one_grid", "decode"), ("forward+bias", "dq+bias", "dkdv+bias"))
    for group, head_dim, mask in itertools.product(groups, head_dims, masks):
        for kernel in (kernel for kernel in group if kernel in kernels):
            if (kernel == "decode" or "+" in kernel) and mask == "causal" and "full" in masks:
                continue  # the single query of a decode sees all keys
            job = Job(kernel, head_dim, mask == "causal", "")
            table = "forward" if kernel == "decode" else job.base
            call = workload_of(*job.cell, 4096)
            own = {sm: tile_name(_committed(kernel, table, call, sm)) for sm in (80, 86)}
            space = OLDER_SPACE[kernel][64 if head_dim <= 64 else 128 if head_dim <= 128 else 256].split()
            tiles = dict.fromkeys([*own.values(), *space])
            jobs += [job._replace(tile=tile, committed=tuple(sm for sm in own if own[sm] == tile)) for tile in tiles]
    return jobs


def _committed(kernel: str, table: str, call: Workload, sm: int) -> Tile:
    from flexattn.kernels_triton.common.tiles import FORWARD, ONE_GRID, row_of, split_head_dim

    if kernel == "one_grid":
        return ONE_GRID
    few = row_of(FORWARD, sm, 2, 2 * sum(split_head_dim(call.head_dim_qk))).few if kernel == "decode" else None
    return few or committed_tile(table, call, sm)


def workload_of(kernel: str, head_dim: int, is_causal: bool, length: int) -> Workload:
    """Returns the call of a timed cell; a small one for the checked length."""
    queries = 1 if kernel == "decode" else length
    if kernel == "decode":
        batch, heads, heads_kv = (2, 8, 2) if length == CHECKED_KEYS else (max(1, 32768 // length), 32, 8)
    elif length == CHECKED_LENGTH:
        batch, heads, heads_kv = 1, 2, 2
    else:
        tokens, columns = (4096, 1024) if kernel == "one_grid" else (16384, 2048)
        batch, heads, heads_kv = max(1, tokens // length), *[max(1, columns // head_dim)] * 2
    score, mask = "relative_bias" if "+bias" in kernel else "", "causal" if is_causal else "no_mask"
    sizes = (queries,) * batch, (length,) * batch, heads, heads_kv, head_dim, head_dim
    return Workload(f"{kernel} s{length}", "older", *sizes, attn_mask_type=mask, score=score)


class Cell(NamedTuple):
    """The inputs of one cell, and results that another implementation computed."""

    problem: Problem
    dout: Tensor
    out: Tensor
    lse: Tensor
    gradients: tuple[Tensor, ...]


def make_cell(workload: Workload, device: str) -> Cell:
    """Returns a cell with results in fp32; without gradients for a decode and for a timed cell, whose scores would not fit."""
    tensors = make_tensors(workload, device)
    problem, (q, k, v, dout) = problem_of(workload, tensors), tensors[:4]
    if device == DEVICE and workload.seqlen_q not in (1, CHECKED_LENGTH):
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        found = torch.ops.aten._scaled_dot_product_flash_attention(*heads_first, 0.0, workload.is_causal)
        return Cell(problem, dout, found[0].transpose(1, 2).contiguous(), found[1].float().contiguous(), ())
    options: dict[str, Any] = {} if problem.bias is None else {"bias_type": "post_scale_bias", "bias": problem.bias}
    inputs = Inputs(q, k, v, "bshd", *(None,) * 6)
    spec, x = make_call(inputs, attn_mask_type=workload.attn_mask_type, return_max_logit=False, **options)
    out, lse, _ = reference_attention(spec, x, torch.float32)
    gradients = () if workload.seqlen_q == 1 else tuple(reference_gradients(spec, x, dout, dtype=torch.float32)[:3])
    return Cell(problem, dout, out.to(torch.bfloat16), lse.contiguous(), gradients)


def empty_cell(workload: Workload) -> Cell:
    """Returns a cell on the CPU with arbitrary values."""
    shapes = make_tensors(workload, "meta")
    tensors = Tensors(*(None if t is None else torch.zeros_like(t, device="cpu") for t in shapes))  # type: ignore[arg-type]
    lse = torch.zeros(workload.batch, workload.num_heads, workload.seqlen_q)
    return Cell(problem_of(workload, tensors), tensors.dout, torch.zeros_like(tensors.dout), lse, ())


class Outputs(NamedTuple):
    out: Tensor
    lse: Tensor
    gradients: tuple[Tensor, ...]


def outputs_of(cell: Cell) -> Outputs:
    """Returns outputs of NaN. A decode, which has one query, has no gradients."""
    x = cell.problem
    gradients = () if x.q.shape[1] == 1 else tuple(torch.full_like(t, float("nan")) for t in (x.q, x.k, x.v))
    return Outputs(torch.full_like(cell.out, float("nan")), torch.full_like(cell.lse, float("nan")), gradients)


def launches_of(job: Job, cell: Cell, outputs: Outputs) -> list[Launch]:
    """Returns the launches of a candidate; before dk and dv the statistics are in place."""
    from flexattn.kernels_triton.common.problem import Backward
    from flexattn.kernels_triton.portable.backward import attention_backward
    from flexattn.kernels_triton.portable.forward import attention_forward
    from flexattn.kernels_triton.runtime.device import pretended_device
    from flexattn.kernels_triton.runtime.launch import recorded_launches

    tile = parse_tile(job.tile)
    with pretended_device(80, 132), recorded_launches() as launches:
        if job.base in ("forward", "decode"):
            attention_forward(cell.problem, outputs.out, outputs.lse, None, tile)
            return list(launches)
        dq, dk, dv = outputs.gradients
        call = Backward(cell.problem, cell.out, cell.lse, cell.dout, None, dq, dk, dv)
        if job.base == "one_grid":
            attention_backward(call, tile, tile, one_grid=True)
            return list(launches)
        small = parse_tile("16x16x4x1")
        attention_backward(call, tile if job.base == "dq" else small, tile if job.base == "dkdv" else small)
    # The kernel of large rows looks at each lse before the others.
    own = [x for x in launches if job.base in x.kernel.__name__ or "large_rows" in x.kernel.__name__]
    for launch in own:
        if "dkdv" in launch.kernel.__name__:
            _fill_statistics(launch, cell)
    return own


def _fill_statistics(launch: Launch, cell: Cell) -> None:
    """Writes the statistics of each query, which the kernel of dq computes, to the tensors of a launch of dk and dv."""
    values = dict(zip(launch.kernel.arg_names, launch.arguments, strict=True))
    if values["statistics_lse_log2_ptr"].is_meta or values["statistics_lse_log2_ptr"].shape.numel() < cell.lse.numel():
        raise RuntimeError(f"statistics of {tuple(values['statistics_lse_log2_ptr'].shape)} for lse of {tuple(cell.lse.shape)}")
    delta = (cell.out.float() * cell.dout.float()).sum(-1).transpose(1, 2)
    for name, source in (("statistics_lse_log2_ptr", cell.lse * 1.4426950408889634), ("statistics_delta_ptr", delta)):
        values[name].view(-1)[: source.numel()].copy_(source.reshape(-1))


def error_of(job: Job, cell: Cell, outputs: Outputs) -> float:
    """Returns the largest error of the results of a candidate, as a share of the largest value."""
    pairs: list[tuple[Tensor, Tensor]] = []
    if job.base in ("forward", "decode"):
        pairs = [(outputs.out, cell.out), (outputs.lse, cell.lse)]
    if job.base in ("dq", "one_grid"):
        pairs += [(outputs.gradients[0], cell.gradients[0])]
    if job.base in ("dkdv", "one_grid"):
        pairs += list(zip(outputs.gradients[1:], cell.gradients[1:], strict=True))
    errors = [((a.double() - b.double()).abs().max() / b.double().abs().max().clamp_min(1e-6)).item() for a, b in pairs]
    return max(error if error < float("inf") else 1e9 for error in errors)  # JSON has no NaN
