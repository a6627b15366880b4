"""Context parallelism: attention over a sequence, or packed documents, that are split over the ranks of a process group.

`plan` chooses which rank holds which tokens. `shard`, `unshard` and `positions` apply a plan to tensors. `attention` computes, with
gradients. `attention_over_ranks` decodes. Plain `flexattn.attention` uses this package for DTensors that are sharded over their
sequence.
"""

from __future__ import annotations

from flexattn.distributed.cost import Rates
from flexattn.distributed.decode import attention_over_ranks, merge_over_ranks
from flexattn.distributed.functional import attention
from flexattn.distributed.picture import plot_plan
from flexattn.distributed.plans import Plan, plan
from flexattn.distributed.shards import positions, shard, unshard

__all__ = [
    "Plan",
    "Rates",
    "attention",
    "attention_over_ranks",
    "merge_over_ranks",
    "plan",
    "plot_plan",
    "positions",
    "shard",
    "unshard",
]
