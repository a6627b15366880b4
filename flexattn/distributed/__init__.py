"""Context parallelism: attention over a sequence, or packed documents, that lie over the ranks of a process group.

`plan` says who holds what; `shard`, `unshard` and `positions` follow it; `attention` computes, with gradients.
"""

from __future__ import annotations

from flexattn.distributed.cost import Rates
from flexattn.distributed.functional import attention
from flexattn.distributed.plans import Plan, plan
from flexattn.distributed.shards import positions, shard, unshard

__all__ = ["Plan", "Rates", "attention", "plan", "positions", "shard", "unshard"]
