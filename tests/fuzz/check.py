"""One drawn call of attention(), compared with the oracle: results, gradients, repeats, inputs and guard bytes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.fuzz import in_fp8
from tests.fuzz.calls import Call
from tests.fuzz.config import HALF, TANH_ERROR, Config, Where, draw_config, varied
from tests.fuzz.delta import ADDED_AT_ONCE, delta_errors, is_cut, row_of_out, score_roundings
from tests.fuzz.modes import attend
from tests.fuzz.oracle import Problem, Result, exact, plain
from tests.fuzz.second import compare_second
from tests.fuzz.statistics import compare_statistic
from tests.support.guarded_memory import Allocations

FORWARD_FACTOR, GRADIENT_FACTOR = 2.0, 3.0  # multiples of plain torch's error in the same dtype, like those of flexattn.testing
# Roundings that are allowed if plain torch is exact by chance: in the result's dtype; in a gradient also in the arithmetic's dtype,
# because dp and delta cancel; and in float64, which has no wider reference.
STEPS, CANCELLED, STEPS_OF_DOUBLE = 4.0, 32.0, 256.0
# In float32 on a GPU, whose tensor cores truncate sums instead of rounding them (Fasi et al., "Numerical behavior of NVIDIA
# tensor cores", PeerJ Computer Science 2021).
STEPS_OF_TENSOR_CORES = 8.0
# In the gradient of a score that is nearly 0, of the arithmetic and of out, as the largest of many, times the largest of a key.
SCORE_STEPS, OUT_STEPS = 8.0, 8.0
STEEPEST = {"affine": 2.0, "checkered": 3.0}  # by which a score_mod multiplies that gradient
MULTIPLY = ("gated",)  # score_mods whose captures multiply a score, and so get its gradient, with its error, times the score
DP = 16.0  # the size of dp, a product of rows of dout and v, which cancels against delta
NOTHING = 1e-4  # the rest of such a gradient of 0
MOST_CAP = 8.0  # the largest cap of the mods
LEVEL = 2.0**-18  # relative error of lse if scores are beyond 2**13: log2(e) is multiplied in and out

CALLS = 10**4  # more than the calls of any configuration
ALL_DIMS = tuple(range(8, 577, 8))
EAGER = Where("eager", "cpu", (*HALF, torch.float32, torch.float64), (16, 8, 24, 40, 1, 3, 64, 72, 128), (60, 130), 3)
INTERPRETED = Where("triton", "cpu", (*HALF, torch.float32), (16, 8, 24, 40, 64, 72, *(8, 16, 24, 40) * 6, *ALL_DIMS), (24, 50), 2)
# Half of the head dims are common in models, and have kernels of their own.
ON_GPU = Where("triton", "cuda", (*HALF, *HALF, *HALF, torch.float32), (*(64, 128, 192, 256) * 9, *ALL_DIMS), (150, 300), 3)


FP8_FROM = (8, 9)  # the compute capability whose tensor cores multiply FP8
LATENT_PACKINGS = ("v in k", "q is k is v")  # in which v may be the first columns of k


def place(backend: str, device: str, without: list[str]) -> Where:
    if device == "cuda":
        if backend == "triton" and torch.cuda.is_available() and torch.cuda.get_device_capability() < FP8_FROM:
            without = [*without, "fp8"]
        where = ON_GPU._replace(backend=backend)
        where = where._replace(dtypes=(*where.dtypes, torch.float64)) if backend == "eager" else where
    else:
        where = EAGER if backend == "eager" else INTERPRETED
    return where._replace(without=frozenset(without))


class Verdicts:
    """Comparisons, left on the device until they are all read at once: each an error, and the limit that it may reach."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._numbers: list[Tensor] = []

    def limit(self, what: str, error: Tensor, limit: Tensor) -> None:
        self._names.append(what)
        self._numbers += [error.double(), limit.double()]

    def never(self, what: str, is_wrong: Tensor) -> None:
        self.limit(what, is_wrong.double(), torch.zeros_like(is_wrong, dtype=torch.float64))

    def close(
        self,
        what: str,
        got: Tensor,
        ref: Tensor,
        same_dtype: Tensor,
        factor: float,
        rounding: Tensor,
        least: Tensor | float = 0.0,
        noise: Tensor | None = None,
    ) -> None:
        """err(got, ref) <= factor * err(same_dtype, ref) + rounding of ref's size, in the maximum and in the root mean square.

        least: granted in any case. noise: an error of each number; its size is granted too.
        """
        if not ref.numel():
            return
        errors, budget = (torch.where(t == ref, 0.0, (t.double() - ref).abs()) for t in (got, same_dtype))
        size = ref.abs().masked_fill(ref.isinf(), 0.0)
        limits = torch.finfo(got.dtype)
        least = least + STEPS * limits.tiny * limits.eps  # below the normal numbers, steps have one size
        for kind, norm in (("largest", torch.amax), ("rms", _rms)):
            granted = torch.where(rounding == torch.inf, rounding, factor * norm(budget) + rounding * norm(size) + least)
            if noise is not None:
                granted = granted + norm(noise.abs())
            self.limit(f"{what}, {kind} error", norm(errors), granted)

    def failures(self) -> list[str]:
        if not self._names:
            return []
        device = max((t.device for t in self._numbers), key=lambda d: d.type == "cuda")
        numbers = torch.stack([t.to(device) for t in self._numbers]).tolist()
        pairs = zip(self._names, numbers[0::2], numbers[1::2], strict=True)
        self._names, self._numbers = [], []
        return [f"{what}: {error:.3e}, at most {limit:.3e}" for what, error, limit in pairs if not error <= limit]  # NaN too


def _rms(t: Tensor) -> Tensor:
    return t.square().mean().sqrt()


def compare(verdicts: Verdicts, when: str, call: Call, got: dict[str, Tensor]) -> None:
    """The results of a call with the oracle's, of the tensors as they are now."""
    config, wanted = call.config, call.wanted
    problem, dtype, is_double = call.problem(), config.dtype, config.dtype is torch.float64
    seeds = {"dout": call.dout, "dlse": call.dlse}
    meant = call.meant
    ref = exact(problem, meant, **seeds, wanted=wanted, delta_errors=partial(delta_errors, call))
    same = plain(problem, meant, **seeds, wanted=wanted)
    eps = torch.finfo(torch.float64 if is_double else torch.float32).eps
    tanh_error = TANH_ERROR * (problem.softcap + MOST_CAP) if dtype in HALF else 0.0
    score_error = ref.largest * eps + tanh_error
    cuts = dtype is torch.float32 and is_cut(config)
    sum_error = _sum_error(config, problem)
    steps = STEPS_OF_DOUBLE if is_double else STEPS_OF_TENSOR_CORES if cuts else STEPS
    vague = row_of_out(ref.is_vague, config.q_format)
    for name, t in got.items():
        what = f"{when}: {name}"
        if name == "out":
            assert t.dtype == dtype, f"out has dtype {t.dtype}"
            # An error of a score is a relative error of its weight. If dropout drops the other weights, nothing cancels it.
            rounding = steps * torch.finfo(dtype).eps + score_error + sum_error
            # A mean of values, which may cancel, and of which each has a weight that is rounded.
            values = meant["v"].double().nan_to_num(0.0, 0.0, 0.0).abs()
            least = eps / (1.0 - config.dropout_p) * (values.max() if values.numel() else 0.0)
            verdicts.close(what, *(x.masked_fill(vague, 0.0) for x in (t, ref.out, same.out)), FORWARD_FACTOR, rounding, least)
            verdicts.never(f"{what} is not finite", ~t.isfinite().all())
        elif name == "lse":
            large = ref.is_level | ref.is_vague
            verdicts.close(
                what,
                *(x.masked_fill(large, 0.0) for x in (t, ref.lse, same.lse)),
                FORWARD_FACTOR,
                steps * eps + score_error,
                steps * eps + tanh_error + sum_error,
            )
            if config.extreme and t.numel():
                error = torch.where(large, (t.double() - ref.lse).abs() / ref.lse.abs(), 0.0)
                verdicts.limit(f"{what} of large scores, relative error", error.max(), torch.full_like(error.max(), LEVEL))
        elif name == "max_logit":
            size = ref.max_logit.abs().masked_fill(ref.max_logit.isinf(), 0.0).clamp(min=1.0)
            error, budget = (
                torch.where(x == ref.max_logit, 0.0, (x.double() - ref.max_logit).abs()) / size for x in (t, same.max_logit)
            )
            roundings = (STEPS_OF_DOUBLE if is_double else CANCELLED) * eps + tanh_error
            verdicts.limit(what, error.max(), FORWARD_FACTOR * budget.max() + roundings + sum_error)
        elif name in ref.statistics:
            compare_statistic(verdicts, what, call, name, t, ref)
        else:
            _compare_gradient(verdicts, what, call, name[1:], t, ref, same, problem)


def _sum_error(config: Config, problem: Problem) -> float:
    """Returns the error of a score in float32, which is a relative error of its weight."""
    if config.dtype is not torch.float32:
        return 0.0
    steepness = STEEPEST.get(config.score_mod or "", 1.0)
    return steepness * torch.finfo(torch.float32).eps * score_roundings(config.head_dim_qk, problem.scale, is_cut(config))


def _compare_gradient(
    verdicts: Verdicts, what: str, call: Call, name: str, got: Tensor, ref: Result, same: Result, problem: Problem
) -> None:
    config, leaf = call.config, call.tensors[name]
    if got.dtype != leaf.dtype or got.shape != leaf.shape:
        raise AssertionError(f"{what} is {got.dtype} {tuple(got.shape)}, of {leaf.dtype} {tuple(leaf.shape)}")
    verdicts.never(f"{what} is not finite", ~got.isfinite().all())
    if name in config.captures and config.dtype in HALF:
        return  # the rounding of out, which all keys of a row share, adds up there (docs/score_mod.md, Gradients)
    eps = torch.finfo(torch.float64 if config.dtype is torch.float64 else torch.float32).eps
    steps = STEPS_OF_DOUBLE if config.dtype is torch.float64 else STEPS
    cancelled = (STEPS_OF_DOUBLE if config.dtype is torch.float64 else CANCELLED) * eps / (1.0 - config.dropout_p)
    coarsest = max(torch.finfo(dtype).eps for dtype in (config.dtype, got.dtype))  # out's, which delta is made of, and the result's
    rounding = torch.where(
        ref.is_vague.any(), torch.inf, steps * coarsest + cancelled + ref.largest * eps + _sum_error(config, problem)
    )
    wanted = ref.gradients[name]
    # A score's gradient is a difference of dp and delta, sums over head_dim_v. In half types delta is made of out once that is
    # rounded, which plain torch does not do: where few rows are summed its luck is no budget. Of one visible key out is v, and
    # exact, and nothing else may be left of a gradient.
    out_eps = torch.finfo(config.dtype).eps if config.dtype in HALF else 0.0
    steepness = STEEPEST.get(config.score_mod or "", 1.0)
    cuts = config.head_dim_v / ADDED_AT_ONCE if is_cut(config) else 0.0
    delta_error = steepness * (SCORE_STEPS + cuts) * eps * config.head_dim_v**0.5
    if out_eps and call.dout is not None and ref.out.numel():
        rounded_out = torch.where(row_of_out(ref.is_rounded, config.q_format), ref.out * call.dout.double(), 0.0).nan_to_num()
        delta_error = delta_error + steepness * OUT_STEPS * out_eps / 2 * rounded_out.square().sum(-1).max().sqrt()
    # Roundings of a score's gradient may have one sign in several rows: all columns of out have the factor of a single key's
    # weight, and heads may share v and dout. Captures may multiply them by the distance of a query and a key.
    noise = ref.noise.get(name)
    if noise is not None and name in ("k", *config.captures):  # it adds up over queries with the signs of few draws
        noise = GRADIENT_FACTOR * noise
    if name in ("q", "k"):
        terms = ref.num_scores * leaf.shape[-1] / max(1, leaf.numel())
        lost = torch.finfo(torch.float32).tiny  # weights below the normal numbers may be 0
        if config.dtype in HALF and problem.softcap:  # 1 - tanh**2, by which a softcap multiplies a score's gradient
            lost += 2.0 * TANH_ERROR * abs(problem.scale)
        least = torch.where(wanted.any(), lost * DP * max(1.0, terms) ** 0.5, NOTHING)
    elif name == "v":
        rounded = torch.as_tensor(delta_error * problem.scale, dtype=torch.float64, device=got.device)
        least = torch.where(wanted.any(), rounded, rounded.clamp(min=NOTHING))
    else:  # sums of the gradients of many scores, which may cancel altogether
        terms = (ref.lse.numel() if name == "softmax_offset" else ref.num_scores) / max(1, leaf.numel())
        score_error = ref.largest.clamp(min=1.0) if config.score_mod in MULTIPLY else 1.0
        errors = cancelled * (ref.dscore + DP) + out_eps / 4.0 * ref.dscore + delta_error / 4.0
        least = errors * score_error * max(1.0, terms) ** 0.5
    verdicts.close(what, got, wanted, same.gradients[name], GRADIENT_FACTOR, rounding, least, noise)


def repeats_to_the_bit(config: Config, name: str) -> bool:
    """Returns whether docs/reproducible.md promises that a call repeats. On a CPU every call repeats."""
    if config.where.device == "cpu":
        return True
    latent = [config.packing in LATENT_PACKINGS and config.together[n] for n in config.sets[:2]]
    if config.head_dim_qk > 256 and latent[0] != latent[1]:
        return False
    return not name.startswith("d") or config.deterministic is True


def check(config: Config, seed: int, allocations: Allocations) -> list[str]:
    """Returns the defects of one drawn call, made three times."""
    call, verdicts = Call(config, seed), Verdicts()
    is_judged = config.kind != "wrong lengths"
    judge = in_fp8.compare if config.fp8_of in ("all", "recipe") else compare
    first = attend(call, config.modes[0])
    verdicts.never("an input was changed by the first call", call.is_changed())
    call.move(config.sets[1])
    second = attend(call, config.modes[1])
    for name in sorted(first.keys() & second.keys()):
        if repeats_to_the_bit(config, name) and is_judged:
            verdicts.never(f"a repeated call has another {name}", (first[name] != second[name]).any())
    verdicts.never("an input was changed", call.is_changed())
    if is_judged:
        judge(verdicts, "first call", call, second | first)
    call.move(config.sets[2])
    call.refill()
    third = attend(call, config.modes[2])
    verdicts.never("an input was changed by the third call", call.is_changed())
    verdicts.never("memory beside an output was written", allocations.are_damaged())
    if is_judged:
        judge(verdicts, "third call, with other values", call, third)
    if config.is_second_order:
        compare_second(verdicts, call)
    return verdicts.failures()


def config_of(where: Where, name: str) -> Config:
    """Returns the configuration of a call by its name: the configuration's seed, a point, and the call's number."""
    config_seed, call_number = map(int, name.split("."))
    return varied(draw_config(config_seed, where), config_seed * CALLS + call_number)


def check_by_name(where: Where, name: str, allocations: Allocations) -> list[str]:
    config, (config_seed, call_number) = config_of(where, name), map(int, name.split("."))
    with settings(config):
        return check(config, config_seed * CALLS + call_number, allocations)


@contextmanager
def settings(config: Config) -> Iterator[None]:
    """Sets the options of a configuration that are not arguments of the call."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, FLEXATTN_HOPPER=config.hopper))
        if config.where.backend == "eager" and config.has_small_blocks:
            from flexattn.dispatch import eager_backend

            stack.enter_context(mock.patch.multiple(eager_backend, BAND_ROWS=16, SCORE_BYTES=1 << 14))
        if config.where == INTERPRETED._replace(without=config.where.without):
            from flexattn.kernels_triton.mods import mask_blocks
            from flexattn.kernels_triton.portable import forward

            def number_of_splits(*_: Any) -> int:
                return config.splits

            if config.splits:
                stack.enter_context(mock.patch.object(forward, "number_of_splits", number_of_splits))
            if config.has_small_blocks:
                stack.enter_context(mock.patch.multiple(mask_blocks, BLOCK=32, SHORTEST=1))
        yield


def config_seed(name: str) -> int:
    """Returns the seed of the configuration in the name of a call."""
    return int(name.split(".")[0])
