"""FP8 recipes and the context that switches FP8 on, under TransformerEngine's names, as far as attention is concerned.

The names and defaults are those of `transformer_engine.common.recipe`, and of `fp8_autocast` and `autocast` in
`transformer_engine.pytorch`. Attention runs in FP8 where the recipe has fp8_dpa or fp8_mha.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint

from flexattn import fp8
from flexattn.validation import check_count, check_name, describe


class Format(enum.Enum):
    """FP8 formats: E4M3 everywhere, or HYBRID, with E5M2 for gradients ("FP8 Formats for Deep Learning", 2022)."""

    E4M3 = "E4M3"
    E5M2 = "E5M2"
    HYBRID = "HYBRID"


class Recipe:
    """Base class of the recipes."""

    fp8_format: Format
    fp8_dpa: bool
    fp8_mha: bool

    @property
    def has_attention(self) -> bool:
        """Returns whether attention is in FP8."""
        return self.fp8_dpa or self.fp8_mha

    def attention_recipe(self, bf16_backward: bool, out_dtype: torch.dtype | None) -> fp8.Recipe:
        """Returns the recipe that `flexattn.attention` takes, with one scale for each tensor."""
        raise NotImplementedError

    def _check(self) -> None:
        if not isinstance(self.fp8_format, Format) or self.fp8_format is Format.E5M2:
            raise ValueError(f"fp8_format is {self.fp8_format!r}; accepted: Format.E4M3, Format.HYBRID")


@dataclasses.dataclass
class DelayedScaling(Recipe):
    """Scales from the amax of earlier steps.

    Args:
        margin: scales are 2**margin smaller than what fills the range.
        fp8_format: Format.HYBRID or Format.E4M3.
        amax_history_len: steps that are remembered.
        amax_compute_algo: "max" or "most_recent"; a function is not taken.
        scaling_factor_compute_algo: None; a function is not taken.
        override_linear_precision: accepted, and without effect: it is of linear layers.
        reduce_amax: accepted, and without effect: each rank has scales of its own.
        fp8_dpa, fp8_mha: attention in FP8; with fp8_mha its output is in FP8 too where `fp8_output` asks for it.

    Raises:
        ValueError, TypeError: a field that is not accepted.
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    override_linear_precision: tuple[bool, bool, bool] = (False, False, False)
    scaling_factor_compute_algo: None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False

    def __post_init__(self) -> None:
        self._check()
        check_count("amax_history_len", self.amax_history_len, 1, "an int of at least 1")
        check_name("amax_compute_algo", self.amax_compute_algo, fp8.ALGORITHMS)
        if self.scaling_factor_compute_algo is not None:
            raise ValueError("scaling_factor_compute_algo is given; accepted: None, fp8_max / amax * 2**-margin")

    def attention_recipe(self, bf16_backward: bool, out_dtype: torch.dtype | None) -> fp8.Recipe:
        return fp8.Recipe(
            fp8_format=_ours(self.fp8_format),
            scaling="delayed",
            granularity="tensor",
            margin=self.margin,
            amax_history_len=self.amax_history_len,
            amax_compute_algo=self.amax_compute_algo,
            bf16_backward=bf16_backward,
            out_dtype=out_dtype,
        )


@dataclasses.dataclass
class Float8CurrentScaling(Recipe):
    """Scales from each tensor's own amax.

    Args:
        use_power_2_scales: False.
        fp8_format: Format.HYBRID or Format.E4M3.
        fp8_dpa, fp8_mha: as of `DelayedScaling`.

    Raises:
        ValueError: a field that is not accepted. NotImplementedError: use_power_2_scales.
    """

    use_power_2_scales: bool = False
    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False
    fp8_mha: bool = False

    def __post_init__(self) -> None:
        self._check()
        if self.use_power_2_scales:
            raise NotImplementedError("use_power_2_scales is True; accepted: False, scales that fill the range")

    def attention_recipe(self, bf16_backward: bool, out_dtype: torch.dtype | None) -> fp8.Recipe:
        return fp8.Recipe(fp8_format=_ours(self.fp8_format), granularity="tensor", bf16_backward=bf16_backward, out_dtype=out_dtype)


def _ours(fp8_format: Format) -> fp8.Fp8Format:
    return "HYBRID" if fp8_format is Format.HYBRID else "E4M3"


def recipe_of(recipe: Any) -> Recipe:
    """Returns one of the recipes above for it, or for one of TransformerEngine's own, by its class's name and fields.

    Raises NotImplementedError for a recipe of another kind, as MXFP8BlockScaling, that has attention in FP8; one that has not is
    no matter of attention, and becomes `Float8CurrentScaling()`. TypeError: no recipe.
    """
    if isinstance(recipe, Recipe):
        return recipe
    name = type(recipe).__name__
    if not hasattr(recipe, "fp8_format"):
        raise TypeError(f"recipe is {describe(recipe)}; accepted: a DelayedScaling or Float8CurrentScaling, or None")
    kinds: dict[str, Any] = {"DelayedScaling": DelayedScaling, "Float8CurrentScaling": Float8CurrentScaling}
    if name in kinds:
        kind = kinds[name]
        given = {field.name: getattr(recipe, field.name, field.default) for field in dataclasses.fields(kind)}
        given["fp8_format"] = Format[recipe.fp8_format.name]
        made: Recipe = kind(**given)
        return made
    if getattr(recipe, "fp8_dpa", False) or getattr(recipe, "fp8_mha", False):
        raise NotImplementedError(f"recipe is a {name} with attention in FP8; accepted: DelayedScaling, Float8CurrentScaling")
    return Float8CurrentScaling()


_OTHERS = ("MXFP8BlockScaling", "Float8BlockScaling", "NVFP4BlockScaling", "CustomRecipe")


def __getattr__(name: str) -> Any:
    if name in _OTHERS:
        raise ImportError(f"there is no recipe {name} for attention; accepted: DelayedScaling, Float8CurrentScaling")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Active(threading.local):
    recipe: Recipe | None = None
    depth: int = 0  # enabled contexts around
    step: int = 0  # how many outermost ones were entered


_active = _Active()


def active_recipe() -> Recipe | None:
    """Returns the recipe of the innermost context in this thread, None outside of one and where it has no attention in FP8."""
    recipe = _active.recipe
    return recipe if recipe is not None and recipe.has_attention else None


def current_step() -> int:
    """Returns a number that is another in each outermost context of this thread: delayed scaling goes one step on with it."""
    return _active.step


@contextlib.contextmanager
def autocast(
    enabled: bool = True, calibrating: bool = False, recipe: Any = None, amax_reduction_group: Any = None, _graph: bool = False
) -> Iterator[None]:
    """Inside, modules run in FP8 as the recipe says; None is `DelayedScaling()`, in which attention stays in 16 bits.

    enabled: False switches FP8 off inside. _graph: accepted, and without effect.

    Raises:
        NotImplementedError: calibrating, a group of more than one rank to reduce amax over, and recipes of other kinds.
        TypeError: no recipe.
    """
    if calibrating:
        raise NotImplementedError("calibrating is True; accepted: False, as no amax is collected without FP8")
    if amax_reduction_group is not None and torch.distributed.get_world_size(amax_reduction_group) > 1:
        raise NotImplementedError(
            "amax_reduction_group has more than one rank; accepted: None, as each rank has scales of its own here"
        )
    before, found = _active.recipe, recipe_of(DelayedScaling() if recipe is None else recipe) if enabled else None
    _active.recipe = found
    _active.step += _active.depth == 0 and enabled
    _active.depth += enabled
    try:
        yield
    finally:
        _active.recipe = before
        _active.depth -= enabled


@contextlib.contextmanager
def with_recipe(recipe: Recipe | None) -> Iterator[None]:
    """Inside, the active recipe is this one, in the step that it is; for what a checkpoint computes again."""
    before, _active.recipe = _active.recipe, recipe
    try:
        yield
    finally:
        _active.recipe = before


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = True, **kwargs: Any) -> Any:
    """Returns function(*args, **kwargs), whose activations are not kept but computed again in the backward, in the same FP8.

    TransformerEngine's `checkpoint` over that of torch.utils. distribute_saved_activations, get_rng_state_tracker and tp_group are
    accepted as False and None.

    Raises NotImplementedError for others.
    """
    for name, without in (("distribute_saved_activations", False), ("get_rng_state_tracker", None), ("tp_group", None)):
        if kwargs.pop(name, without) is not without:
            raise NotImplementedError(f"{name} is given; accepted: {without}, as activations are not distributed over ranks")
    recipe = _active.recipe

    def run(*given: Any, **named: Any) -> Any:
        with with_recipe(recipe):
            return function(*given, **named)

    return torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=use_reentrant, **kwargs)


def fp8_autocast(
    enabled: bool = True, calibrating: bool = False, fp8_recipe: Any = None, fp8_group: Any = None, _graph: bool = False
) -> contextlib.AbstractContextManager[None]:
    """Returns `autocast` under the names that its arguments had before."""
    return autocast(enabled, calibrating, fp8_recipe, fp8_group, _graph)
