"""Plain `attention()` of DTensors that are sharded over their sequence, as a plan with a contiguous layout."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from flexattn.dispatch.spec import Band, make_band
from flexattn.distributed import agreement
from flexattn.distributed.blocks import Blocks, read_blocks
from flexattn.distributed.functional import attention
from flexattn.distributed.layout import chunks
from flexattn.distributed.mask import Mask
from flexattn.distributed.plans import MASK, Plan
from flexattn.distributed.whole_call import Options

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

_OF_BAND = MASK[:3]


def attend_over_sequence(
    q: Tensor, k: Tensor, v: Tensor, group: ProcessGroup, lengths: tuple[int, int], arguments: dict[str, Any]
) -> Any:
    """Returns `attention` of this rank's tokens, which are split as DTensor's Shard splits them.

    lengths: numbers of all queries and keys. arguments: those of `flexattn.attention`, for the full sequence.
    """
    band = make_band(*(arguments[name] for name in _OF_BAND))
    blocks = None if arguments["block_mask"] is None else read_blocks(arguments["block_mask"], lengths)
    taken = {name: arguments[name] for name in Options.__annotations__ if name in arguments and name not in MASK}
    return attention(q, k, v, plan=_plan(group, lengths, band, blocks), **taken)


agreement.breaks_graphs(attend_over_sequence)  # because it makes plans


@functools.lru_cache(maxsize=64)
def _plan(group: ProcessGroup, lengths: tuple[int, int], band: Band, blocks: Blocks | None) -> Plan:
    queries, keys = lengths
    runs = (chunks(queries, group.size()), chunks(keys, group.size()))
    mask = Mask(*band, (queries,), (keys,), blocks)
    return Plan(group.size(), "contiguous", "auto", False, *runs, mask, group.size(), group)
