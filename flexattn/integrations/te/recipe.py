"""FP8 recipes and the context that enables FP8, under TransformerEngine's names, for attention only.

The names and defaults are those of `transformer_engine.common.recipe`, and of `fp8_autocast` and `autocast` in
`transformer_engine.pytorch`. Attention runs in FP8 if the recipe has fp8_dpa or fp8_mha.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

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
        """Returns the recipe for `flexattn.attention`, with one scale for each tensor."""
        kind: fp8.Fp8Format = "HYBRID" if self.fp8_format is Format.HYBRID else "E4M3"
        return fp8.Recipe(fp8_format=kind, granularity="tensor", bf16_backward=bf16_backward, out_dtype=out_dtype)

    def _check(self) -> None:
        if not isinstance(self.fp8_format, Format) or self.fp8_format is Format.E5M2:
            raise ValueError(f"fp8_format is {self.fp8_format!r}; accepted: Format.E4M3, Format.HYBRID")


@dataclasses.dataclass
class DelayedScaling(Recipe):
    """Scales from the amax of earlier steps.

    Args:
        margin: scales are 2**margin smaller than the largest that avoid overflow.
        fp8_format: Format.HYBRID or Format.E4M3.
        amax_history_len: number of steps in the amax history.
        amax_compute_algo: "max" or "most_recent"; functions are not supported.
        scaling_factor_compute_algo: must be None; functions are not supported.
        override_linear_precision: ignored, because it is for linear layers.
        reduce_amax: ignored; each rank has its own scales, except in context parallelism.
        fp8_dpa, fp8_mha: attention in FP8. With fp8_mha the output is in FP8 too if `fp8_output` is True.

    Raises:
        ValueError, TypeError: if a field is invalid.
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
            raise ValueError("scaling_factor_compute_algo is not supported; accepted: None, for fp8_max / amax * 2**-margin")

    def attention_recipe(self, bf16_backward: bool, out_dtype: torch.dtype | None) -> fp8.Recipe:
        return dataclasses.replace(
            super().attention_recipe(bf16_backward, out_dtype),
            scaling="delayed",
            margin=self.margin,
            amax_history_len=self.amax_history_len,
            amax_compute_algo=self.amax_compute_algo,
        )


@dataclasses.dataclass
class Float8CurrentScaling(Recipe):
    """Scales from each tensor's own amax.

    Args:
        use_power_2_scales: must be False.
        fp8_format: Format.HYBRID or Format.E4M3.
        fp8_dpa, fp8_mha: as in `DelayedScaling`.

    Raises:
        ValueError: if a field is invalid. NotImplementedError: if use_power_2_scales is True.
    """

    use_power_2_scales: bool = False
    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False
    fp8_mha: bool = False

    def __post_init__(self) -> None:
        self._check()
        if self.use_power_2_scales:
            raise NotImplementedError("use_power_2_scales is True; accepted: False, for scales that use the whole range")


def recipe_of(recipe: object) -> Recipe:
    """Returns the recipe, or its equivalent for one of TransformerEngine's own recipes, by its class's name and fields.

    Raises NotImplementedError for a recipe of another kind, such as MXFP8BlockScaling, with attention in FP8. If it has no
    attention in FP8, it becomes `Float8CurrentScaling()`. Raises TypeError if the object is not a recipe.
    """
    if isinstance(recipe, Recipe):
        return recipe
    name = type(recipe).__name__
    if not hasattr(recipe, "fp8_format"):
        raise TypeError(f"recipe is {describe(recipe)}; accepted: a DelayedScaling or Float8CurrentScaling, or None")
    kinds: dict[str, Any] = {"DelayedScaling": DelayedScaling, "Float8CurrentScaling": Float8CurrentScaling}
    if name in kinds:
        kind = kinds[name]
        fields = {field.name: getattr(recipe, field.name, field.default) for field in dataclasses.fields(kind)}
        fields["fp8_format"] = Format[recipe.fp8_format.name]
        converted: Recipe = kind(**fields)
        return converted
    if getattr(recipe, "fp8_dpa", False) or getattr(recipe, "fp8_mha", False):
        raise NotImplementedError(f"recipe is a {name} with attention in FP8; accepted: DelayedScaling, Float8CurrentScaling")
    return Float8CurrentScaling()


_UNSUPPORTED = ("MXFP8BlockScaling", "Float8BlockScaling", "NVFP4BlockScaling", "CustomRecipe")


def __getattr__(name: str) -> NoReturn:
    if name in _UNSUPPORTED:
        raise ImportError(f"recipe {name} is not supported for attention; accepted: DelayedScaling, Float8CurrentScaling")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Active(threading.local):
    recipe: Recipe | None = None
    depth: int = 0  # number of enabled contexts around
    step: int = 0  # number of outermost contexts entered


_active = _Active()


def active_recipe() -> Recipe | None:
    """Returns the recipe of this thread's innermost context. None outside of contexts, and if it has no attention in FP8."""
    recipe = _active.recipe
    return recipe if recipe is not None and recipe.has_attention else None


def current_step() -> int:
    """Returns a number that changes with each outermost context of this thread; delayed scaling then advances by a step."""
    return _active.step


@contextlib.contextmanager
def autocast(
    enabled: bool = True, calibrating: bool = False, recipe: Any = None, amax_reduction_group: Any = None, _graph: bool = False
) -> Iterator[None]:
    """Context in which modules run in FP8 with a recipe. None: `DelayedScaling()`, in which attention stays in 16 bits.

    enabled: if False, FP8 is off inside. _graph: ignored.

    Raises:
        NotImplementedError: if calibrating is True, amax_reduction_group has more than one rank, or the recipe is of another kind.
        TypeError: if the object is not a recipe.
    """
    if calibrating:
        raise NotImplementedError("calibrating is True; accepted: False, because no amax is collected without FP8")
    if amax_reduction_group is not None and torch.distributed.get_world_size(amax_reduction_group) > 1:
        raise NotImplementedError(
            "amax_reduction_group has more than one rank; accepted: None, because each rank has its own scales"
        )
    before, new_recipe = _active.recipe, recipe_of(DelayedScaling() if recipe is None else recipe) if enabled else None
    _active.recipe = new_recipe
    _active.step += _active.depth == 0 and enabled
    _active.depth += enabled
    try:
        yield
    finally:
        _active.recipe = before
        _active.depth -= enabled


def checkpoint(function: Callable[..., object], *args: object, use_reentrant: bool = True, **kwargs: Any) -> Any:
    """Returns function(*args, **kwargs). The backward recomputes its activations, with the same FP8 recipe.

    This is TransformerEngine's `checkpoint`, based on torch.utils.checkpoint. distribute_saved_activations must be False, and
    get_rng_state_tracker and tp_group None.

    Raises NotImplementedError for other values.
    """
    for name, default in (("distribute_saved_activations", False), ("get_rng_state_tracker", None), ("tp_group", None)):
        if kwargs.pop(name, default) is not default:
            raise NotImplementedError(f"{name} is not supported; accepted: {default}, because activations stay on their rank")
    recipe = _active.recipe

    def run(*inputs: object, **keywords: object) -> Any:
        before, _active.recipe = _active.recipe, recipe  # without a new step
        try:
            return function(*inputs, **keywords)
        finally:
            _active.recipe = before

    return torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=use_reentrant, **kwargs)


def fp8_autocast(
    enabled: bool = True, calibrating: bool = False, fp8_recipe: object = None, fp8_group: object = None, _graph: bool = False
) -> contextlib.AbstractContextManager[None]:
    """Returns `autocast`, under the older names of its arguments."""
    return autocast(enabled, calibrating, fp8_recipe, fp8_group, _graph)
