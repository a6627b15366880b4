"""The one list of `attention`'s arguments: their names, types and defaults. The docstring of `attention` describes each.

A TypedDict holds the arguments of one subject. The functions that take some of the arguments combine these groups.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from typing_extensions import TypedDict

from flexattn.dispatch.spec import OPEN_WINDOW, Operands

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn.attention.flex_attention import BlockMask  # noqa: F401  # a base class names it in a string

    from flexattn import fp8
    from flexattn.dispatch.spec import BackendName, BiasType, MaskType, QkvFormat, SoftmaxType, Window
    from flexattn.mods.trace import Mod

F = TypeVar("F", bound=Callable[..., Any])
# Types that differ between PyTorch and JAX: arrays, block masks, and the states of delayed scaling.
Array = TypeVar("Array")
Blocks = TypeVar("Blocks")
State = TypeVar("State")


class ScoreOptions(TypedDict, Generic[Array], total=False):
    """Masks, bias, softmax and dropout."""

    attn_mask_type: MaskType
    window_size: int | tuple[int, int] | Window
    bottom_right_diagonal: bool | None
    bias_type: BiasType | None
    bias: Array | None
    alibi_slopes: Array | None
    softmax_type: SoftmaxType | None
    softmax_offset: Array | None
    softmax_scale: float | None
    softcap: float
    dropout_p: float
    rng_state: Array | None


class ModOptions(TypedDict, Generic[Array, Blocks], total=False):
    """Functions of a score or of a mask."""

    score_mod: Mod | None
    mask_mod: Mod | None
    score_mod_tensors: Sequence[Array] | Mapping[str, Array]
    block_mask: Blocks | None


class LengthOptions(TypedDict, Generic[Array], total=False):
    """Lengths of packed and padded sequences."""

    cu_seqlens_q: Array | None
    cu_seqlens_kv: Array | None
    cu_seqlens_q_padded: Array | None
    cu_seqlens_kv_padded: Array | None
    max_seqlen_q: int | None
    max_seqlen_kv: int | None


class Fp8Options(TypedDict, Generic[Array, State], total=False):
    """Recipes and scales of FP8."""

    fp8_recipe: fp8.Recipe | None
    fp8_state: State | None
    descale_q: Array | None
    descale_k: Array | None
    descale_v: Array | None


class RunOptions(TypedDict, total=False):
    """The format of tensors, and how a call runs."""

    qkv_format: QkvFormat
    deterministic: bool | None
    backend: BackendName | None


class BackwardOptions(RunOptions, ScoreOptions[Array], LengthOptions[Array], ModOptions[Array, Blocks], total=False):
    """Arguments that a forward and its `attention_backward` share."""


class CommonOptions(RunOptions, ScoreOptions[Array], ModOptions[Array, Blocks], Fp8Options[Array, State], total=False):
    """Arguments that `attention` and `distributed.attention` both have. Each of them documents its own."""


class ArrayOptions(CommonOptions[Array, Blocks, State], LengthOptions[Array], total=False):
    """Arguments of `attention` for PyTorch and for JAX."""

    causal: bool
    cu_seqlens: Array | None
    max_seqlen: int | None
    seqused_q: Array | None
    seqused_kv: Array | None
    page_table: Array | None
    batch_invariant: bool


class ReturnOptions(TypedDict, total=False):
    """Arguments that decide the type of the result, so that overloads spell them out."""

    return_lse: bool
    return_max_logit: bool


class Options(ArrayOptions["Tensor", "BlockMask", "fp8.DelayedScaling"], total=False):
    """Arguments of `attention` for PyTorch that do not decide the type of its result."""

    mask: Tensor | None
    out: Tensor | None


class Arguments(Options, ReturnOptions, total=False):
    """All arguments of `attention` besides q, k and v."""


NO_TENSORS: tuple[Any, ...] = ()  # compared by identity
DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(Arguments.__annotations__),
    **dict.fromkeys(("causal", "batch_invariant", *ReturnOptions.__annotations__), False),
    **dict.fromkeys(("softcap", "dropout_p"), 0.0),
    "qkv_format": "bshd",
    "attn_mask_type": "no_mask",
    "window_size": OPEN_WINDOW,
    "score_mod_tensors": NO_TENSORS,
}
TENSOR_OPTIONS = Operands._fields[3 : Operands._fields.index("max_seqlen_q")]  # tensors of a kernel besides q, k and v
BOTH_SIDES = ("cu_seqlens", "max_seqlen")
ALIASES = (*BOTH_SIDES, "mask")  # options that `shorthands.without_aliases` writes as others
_TORCH = {"Array": "Tensor", "Blocks": "BlockMask", "State": "fp8.DelayedScaling"}


def taking(options: Any, types: Mapping[str, str] = _TORCH) -> Callable[[F], F]:
    """Decorates a function that takes `**options`, so that its signature shows each of them with its type and default.

    The catch-alls are left out, and arguments by position are required. types: names of the types that differ between PyTorch and
    JAX.
    """

    def with_signature(function: F) -> F:
        signature = inspect.signature(function)
        first, last = [], []
        for parameter in signature.parameters.values():
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
                first.append(parameter.replace(default=parameter.empty))
            elif parameter.kind is parameter.KEYWORD_ONLY:
                last.append(parameter)
        for name, hint in options.__annotations__.items():
            annotation = re.sub(r"\b(Array|Blocks|State)\b", lambda found: types[found[0]], hint.__forward_arg__)
            default = DEFAULTS[name]
            first.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation))
        function.__signature__ = signature.replace(parameters=[*first, *last])  # type: ignore[attr-defined]
        return function

    return with_signature
