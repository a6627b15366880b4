"""Comparison of the statistics that a call returns with return_aux, each with the oracle's weights in fp64."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tests.fuzz.config import HALF, TANH_ERROR

if TYPE_CHECKING:
    from tests.fuzz.calls import Call
    from tests.fuzz.check import Verdicts
    from tests.fuzz.oracle import Result

OUTSIDE = (-1, -7, 2**31 - 1, 2**32, 2**40 + 1)  # indices of no query; those beyond 31 bits are only in int64
STEPS, STEPS_OF_DOUBLE = 32.0, 1024.0  # roundings of a score, and of the sums that normalise its weight
TINY = 1e-37  # weights below the normal numbers of float32 may be 0


def request(call: Call) -> Any:
    """Returns the AuxRequest of a call."""
    from flexattn import AuxRequest

    config = call.config
    flags = {name: True for name in config.aux if name != "rows"}
    return AuxRequest(config.return_lse, config.return_max_logit, **flags, rows=call.tensors.get("rows"))


def draw_rows(rng: Random, shape: tuple[int, ...], dtype: torch.dtype, longest: int) -> Tensor:
    """Returns positions of queries, some twice, and a few that are in no sequence."""
    outside = [n for n in OUTSIDE if dtype is torch.int64 or abs(n) < 2**31]
    count = torch.Size(shape).numel()
    drawn = [rng.choice(outside) if rng.random() < 0.2 else rng.randint(0, max(0, longest)) for _ in range(count)]
    return torch.tensor(drawn, dtype=dtype).view(shape)


def compare_statistic(verdicts: Verdicts, what: str, call: Call, name: str, got: Tensor, ref: Result) -> None:
    """Compares each number: a score by its absolute error, and weights by the relative error that errors of scores make."""
    config, problem, wanted = call.config, call.problem(), ref.statistics[name]
    is_double = config.dtype is torch.float64
    if name == "row_weights":  # the oracle's rectangle ends at the longest sequence
        beyond = got.shape[-1] - wanted.shape[-1]
        wanted = torch.nn.functional.pad(wanted, (0, beyond)) if beyond >= 0 else wanted[..., : got.shape[-1]]
    assert got.dtype is (torch.float64 if is_double else torch.float32), f"{what} has dtype {got.dtype}"
    assert got.shape == wanted.shape, f"{what} has shape {tuple(got.shape)}, not {tuple(wanted.shape)}"
    eps = torch.finfo(got.dtype).eps * (STEPS_OF_DOUBLE if is_double else STEPS)
    score_error = eps * (1.0 + ref.largest + abs(problem.scale) * config.head_dim_qk**0.5)
    if config.dtype in HALF:
        score_error = score_error + TANH_ERROR * problem.softcap
    is_vague = ref.is_vague.any()
    if name == "max_scores":
        granted = score_error + eps * wanted.abs()
    elif name == "entropy":
        granted = 2.0 * score_error * (2.0 + wanted)
    else:  # a column sum has a weight of each query
        weights = max(problem.q.lengths, default=0) if name == "column_sums" else 1
        own_score = wanted.clamp(min=TINY).log().abs()  # relative to lse: the logarithm of a small weight is large
        granted = 2.0 * (score_error + eps * own_score) * wanted + TINY * weights
    is_equal = (got == wanted) | (is_vague if name != "max_scores" else torch.zeros_like(is_vague))
    error = torch.where(is_equal, 0.0, (got.double() - wanted).abs() / granted)
    if error.numel():
        verdicts.limit(f"{what}, error by the one that is granted", error.max(), torch.ones_like(error.max()))
