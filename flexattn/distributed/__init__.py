"""Context parallelism: attention over a sequence, or packed documents, that lie over the ranks of a process group.

`plan` says who holds what; `shard`, `unshard` and `positions` follow it; `attention` computes, with gradients;
`attention_over_ranks` decodes. Plain `flexattn.attention` of DTensors that are sharded over their sequence leaves them so by this.
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
