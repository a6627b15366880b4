"""The sentence against head dims that a backend does not take: what came, what it takes, and what runs such a call."""

from __future__ import annotations

from flexattn.dispatch.spec import AttentionSpec


def head_dim_error(spec: AttentionSpec, takes: str, multiple: int, largest: int, beyond: str) -> str | None:
    """Returns why a backend does not run the head dims of `spec`, or None where they are multiples of `multiple` up to `largest`.

    takes: the backend's part of the sentence, as "the kernels take". beyond: what to do about one that no padding brings within
    reach.
    """
    for name, dim in (("q and k", spec.head_dim_qk), ("v", spec.head_dim_v)):
        if dim % multiple or not multiple <= dim <= largest:
            can_pad = -(-dim // multiple) * multiple <= largest
            todo = "pad it with zeros" if can_pad else beyond
            return f"the head dim of {name} is {dim}; {takes} multiples of {multiple} up to {largest}; {todo}"
    return None
