"""Named tuples of results of `attention`: they unpack as plain tuples do."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from flexattn.compat import register_namedtuple


class OutLse(NamedTuple):
    """Result of `attention` with return_lse=True."""

    out: Tensor
    lse: Tensor


class OutMaxLogit(NamedTuple):
    """Result of `attention` with return_max_logit=True."""

    out: Tensor
    max_logit: Tensor


class OutLseMaxLogit(NamedTuple):
    """Result of `attention` with return_lse=True and return_max_logit=True."""

    out: Tensor
    lse: Tensor
    max_logit: Tensor


for _kind in (OutLse, OutMaxLogit, OutLseMaxLogit):
    register_namedtuple(_kind, f"flexattn.{_kind.__name__}")


def chosen(out: Any, lse: Any, max_logit: Any, return_lse: bool, return_max_logit: bool) -> Any:
    """Returns the results that the caller asked for; max_logit is None only where it was not."""
    if return_max_logit:
        return _new(OutLseMaxLogit, (out, lse, max_logit)) if return_lse else _new(OutMaxLogit, (out, max_logit))
    return _new(OutLse, (out, lse)) if return_lse else out


_new: Any = tuple.__new__  # a NamedTuple's own constructor takes twice the time
