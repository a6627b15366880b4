"""Sizes in tuples of launch arguments, for which Triton does not specialise a kernel."""

from __future__ import annotations

import triton


def encoded_size(size: int) -> int:
    """Returns a size or stride, encoded as an odd number above 1 for a tuple of launch arguments.

    Triton specialises a kernel for an integer in a tuple if it is 1 or a multiple of 16.
    """
    return 2 * size + 3


@triton.jit
def read_size(encoded):
    # Decodes a size from `encoded_size`.
    return (encoded - 3) >> 1
