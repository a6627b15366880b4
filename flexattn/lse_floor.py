"""The check that a finite score which masks, such as -1e9, has masked: that every query has a greater one.

`flexattn.mods.bands` takes such a mask for a band where that gives the same result: where lse, the logarithm of the sum of what a
query sees, exceeds it by so much that exp of the difference is 0. So lse tells, and no pass over the scores is needed.
"""

from __future__ import annotations

import torch
from torch import Tensor

MASKING = -1e8  # the largest finite score that is taken for a mask
FLOOR = 0.99 * MASKING  # greater than any such score by 1e6: far more than 104, where exp is 0 in float32, and than lse's rounding
_TEXT = (
    f"a score_mod masks with a finite score of {MASKING:.0e} or less, and a query has no score above {FLOOR:.2e} among those that "
    "it sees, so what is masked would have a weight; mask with -inf, or with a number above -1e8"
)


def check_floor(lse: Tensor) -> None:
    """Raises ValueError where an lse is not above FLOOR; on a GPU, for which nothing waits, a device-side assertion fails."""
    if lse.numel() == 0:
        return
    is_low = (lse <= FLOOR).any()  # not NaN, as of a NaN in q
    if is_low.device.type != "cpu":
        torch._assert_async(~is_low, _TEXT)
    elif is_low:
        raise ValueError(_TEXT)
