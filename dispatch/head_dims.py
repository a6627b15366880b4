"""The error text for head dims that a backend does not support: the head dim, the supported ones, and an alternative."""

from __future__ import annotations

from flexattn.dispatch.spec import AttentionSpec


def head_dim_error(spec: AttentionSpec, supports: str, multiple: int, largest: tuple[int, int], beyond: str) -> str | None:
    """Returns why a backend does not support the head dims of `spec`, or None if they are multiples of `multiple` up to `largest`.

    supports: the start of the limit, such as "the kernels support".
    largest: the largest head dims of q and k, and of v.
    beyond: the advice if padding does not help.
    """
    for name, dim, most in (("q and k", spec.head_dim_qk, largest[0]), ("v", spec.head_dim_v, largest[1])):
        if dim % multiple or not multiple <= dim <= most:
            can_pad = -(-dim // multiple) * multiple <= most
            advice = "pad it with zeros" if can_pad else beyond
            return f"the head dim of {name} is {dim}; {supports} multiples of {multiple} up to {most}; {advice}"
    return None
