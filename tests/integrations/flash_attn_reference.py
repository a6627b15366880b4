"""Attention written out in float64, in FlashAttention's layout, for the tests of its names."""

from __future__ import annotations

import math

import torch


def band_of(sq, sk, left=None, right=None):
    """Returns which keys a window shows [sq, sk], counted from the bottom-right corner; None is open, sides may be negative."""
    distance = torch.arange(sk) - torch.arange(sq)[:, None] - (sk - sq)
    seen = torch.ones(sq, sk, dtype=torch.bool)
    if left is not None:
        seen &= distance >= -left
    return seen if right is None else seen & (distance <= right)


def reference(q, k, v, seen, scale=None, bias=0.0, sink=None):
    """Returns out and lse of a dense batch.

    Args:
        q, k, v: [b, s, h, d].
        seen: bool, broadcast to [b, h, sq, sk].
        scale: None is 1 / sqrt(d).
        bias: added to the scaled scores.
        sink: [h], the logarithm of an addend to each denominator.
    """
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    s = q @ k.transpose(-1, -2) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale) + bias
    s = s.masked_fill(~seen, -math.inf)
    if sink is not None:
        s = torch.cat((s, sink.double().view(-1, 1, 1).expand(*s.shape[:-1], 1)), -1)
    lse = s.logsumexp(-1)
    weights = s.softmax(-1).masked_fill((lse == -math.inf)[..., None], 0.0)[..., : k.shape[-2]]
    return (weights @ v).transpose(1, 2), lse


def close(a, b):
    torch.testing.assert_close(a.double(), b.double(), rtol=1e-5, atol=1e-5)
