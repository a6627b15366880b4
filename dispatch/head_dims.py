"""The sentence against head dims that a backend does not take: what came, what it takes, and what runs such a call."""

from __future__ import annotations

from flexattn.dispatch.spec import AttentionSpec


def head_dim_error(spec: AttentionSpec, takes: str, multiple: int, largest: tuple[int, int], beyond: str) -> str | None:
    """Returns why a backend does not run the head dims of `spec`, or None where they are multiples of `multiple` up to `largest`.

    takes: the backend's part of the sentence, as "the kernels take". largest: of q and k, and of v. beyond: what to do about one
    that no padding brings within reach.
    """
    for name, dim, most in (("q and k", spec.head_dim_qk, largest[0]), ("v", spec.head_dim_v, largest[1])):
        if dim % multiple or not multiple <= dim <= most:
            can_pad = -(-dim // multiple) * multiple <= most
            todo = "pad it with zeros" if can_pad else beyond
            return f"the head dim of {name} is {dim}; {takes} multiples of {multiple} up to {most}; {todo}"
    return None
