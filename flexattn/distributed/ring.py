"""Strategy "ring": keys travel from rank to rank, one step before their use. Partial results are merged in float32.

A rank holds the keys of two ranks at a time. A sink is added once, at the end. In the backward, the float32 gradients of keys
travel with the keys, and one step further to their owner: Liu et al., "Ring Attention with Blockwise Transformers" (2023,
https://arxiv.org/abs/2310.01889).
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from flexattn.dispatch.spec import Fp32Gradients
from flexattn.distributed import calls as local_calls
from flexattn.distributed.calls import Call, InputGradients, Part, Results, Seeds, Shared, Strategy
from flexattn.distributed.capture import tables
from flexattn.distributed.exchange import PendingReceive, rotate
from flexattn.distributed.layout import size_of
from flexattn.distributed.mask import merged
from flexattn.distributed.plans import Plan


@tables(32)
def _steps(plan: Plan, wants_diagonal: bool, wants_positions: bool, device: torch.device) -> tuple[list[Call], ...]:
    steps = []
    for step in range(plan.ranks):
        pieces = plan.pieces(plan.rank, plan.kv_runs[(plan.rank - step) % plan.ranks])
        if not wants_positions:
            pieces = merged(pieces)
        steps.append(local_calls.make_calls(pieces, plan.is_packed, plan.mask.blocks, wants_diagonal, device))
    return tuple(steps)


@dataclasses.dataclass(frozen=True)
class Ring(Strategy):
    """Strategy that sends keys around a ring."""

    plan: Plan

    def _steps(self, shared: Shared, device: torch.device) -> tuple[list[Call], ...]:
        has_slopes, has_mods = shared.alibi_slopes is not None, (self.scores.score_mod or self.scores.mask_mod) is not None
        wants_positions = has_slopes or has_mods or shared.bias is not None or shared.rng_state is not None
        has_blocks = self.plan.mask.blocks is not None or (self.scores.fp8_call is not None and self.scores.fp8_call.local_rows > 0)
        wants_positions = wants_positions or has_blocks
        return _steps(self.plan, has_slopes, wants_positions, device)

    def _rotate(self, x: Tensor, step: int) -> PendingReceive:
        """Starts to send x to the next rank, and to receive the same for the keys that this rank has in a step."""
        return rotate(x, size_of(self.plan.kv_runs[(self.plan.rank - step) % self.plan.ranks]), self.plan.group)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, shared: Shared) -> tuple[Results, tuple[Tensor, ...]]:
        plan, dim = self.plan, k.shape[-1]
        results = local_calls.empty_results(q, v.shape[-1], local_calls.sum_dtype(q.dtype))
        results.out.zero_()
        results.lse.fill_(float("-inf"))
        kv = local_calls.concatenate_kv(k, v, plan.is_packed)
        for step, calls in enumerate(self._steps(shared, q.device)):
            arriving = self._rotate(kv, step + 1) if step + 1 < plan.ranks else None
            for call in calls:
                local, _, _ = local_calls.rows_of_call(call, Part(q, *local_calls.split_kv(kv, dim, plan.is_packed)))
                local_calls.merge_into(results, call, *local_calls.attend(call, local, self.scores, shared, None, is_partial=True))
            if arriving is not None:
                [kv] = arriving.wait(plan.group)
        if shared.softmax_offset is not None:
            results = local_calls.add_sink(results, shared.softmax_offset)
        results = results._replace(out=results.out.to(self.scores.out_dtype(q)))
        return results, (q, k, v, *results)

    def backward(self, saved: tuple[Tensor, ...], seeds: Seeds, shared: Shared) -> InputGradients:
        q, k, v, out, lse = saved
        plan, dim, packed, wide = self.plan, k.shape[-1], self.plan.is_packed, local_calls.sum_dtype(q.dtype)
        dq, shared_sums = torch.zeros(q.shape, dtype=wide, device=q.device), shared.zeros()
        kv = local_calls.concatenate_kv(k, v, packed)
        grad = torch.zeros(kv.shape, dtype=wide, device=kv.device)
        steps = self._steps(shared, q.device)
        fp32: Fp32Gradients = "dqkv" if plan.ranks > 1 or len(steps[0]) > 1 else "none"
        for step, calls in enumerate(steps):
            arriving = self._rotate(kv, step + 1) if step + 1 < plan.ranks else None
            if step:  # the previous rank's sums arrive while this step's gradients are computed
                travelling = self._rotate(grad, step)
            part = Part(q, *local_calls.split_kv(kv, dim, packed))
            context = self.scores, shared
            all_gradients = [
                local_calls.differentiate(call, part, Results(out, lse), seeds, context, shared_sums, fp32) for call in calls
            ]
            if step:
                [grad] = travelling.wait(plan.group)
            dk, dv = local_calls.split_kv(grad, dim, packed)
            for call, gradients in zip(calls, all_gradients, strict=True):
                _, rows, keys = local_calls.rows_of_call(call, part)
                dq[rows] += gradients.dq
                dk[keys] += gradients.dk
                dv[keys] += gradients.dv
            if arriving is not None:
                [kv] = arriving.wait(plan.group)
        if plan.ranks > 1:
            [grad] = self._rotate(grad, plan.ranks).wait(plan.group)
        return InputGradients(dq, *local_calls.split_kv(grad, dim, packed), shared_sums)
