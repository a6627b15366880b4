"""The one list of `attention`'s arguments: their names, types, defaults and documentation.

A TypedDict holds the arguments of one subject. The functions that take some of the arguments combine these groups. `taking` puts
their documentation into the docstring of `attention`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from typing_extensions import TypedDict

from flexattn.dispatch.spec import OPEN_WINDOW, TENSOR_FIELDS

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn.attention.flex_attention import BlockMask  # noqa: F401  # a base class names it in a string

    from flexattn import fp8
    from flexattn.dispatch.spec import BackendName, BiasType, MaskType, QkvFormat, SoftmaxType, Window
    from flexattn.mods.trace import Mod
    from flexattn.statistics import AuxRequest

F = TypeVar("F", bound=Callable[..., Any])
# Types that differ between PyTorch and JAX: arrays, block masks, and the states of delayed scaling.
Array = TypeVar("Array")
Blocks = TypeVar("Blocks")
State = TypeVar("State")


class FormatOptions(TypedDict, total=False):
    """Format.

    Args:
        qkv_format (str, default "bshd"): "bshd", "sbhd", "bhsd", or "thd" for sequences packed one after another. Two of them name
            q's format, then that of k and v: "thd_2bshd".
    """

    qkv_format: QkvFormat


class ShortOptions(TypedDict, Generic[Array], total=False):
    """Short forms of other arguments.

    Args:
        causal (bool, default False): True lets query i see keys j <= i. It needs as many queries as keys, or for packed sequences
            the same cu_seqlens for both. Otherwise pass the attn_mask_type that names the diagonal.
        cu_seqlens (Tensor, optional): cu_seqlens_q and cu_seqlens_kv in one. `flexattn.packed` makes a packed call's arguments.
        max_seqlen (int, optional): max_seqlen_q and max_seqlen_kv in one.
    """

    causal: bool
    cu_seqlens: Array | None
    max_seqlen: int | None


class MaskOptions(TypedDict, total=False):
    """Masking.

    Args:
        attn_mask_type (str, default "no_mask"): "no_mask", "causal" (query i sees keys j <= i), "causal_bottom_right" (keys j <= i
            + skv - sq), or these with lengths for each sequence: "padding", "padding_causal", "padding_causal_bottom_right". With
            padding in its name the lengths below apply, and the diagonal follows them. "thd" always has lengths, and takes the
            first three names for the last three.
        window_size (int or (int, int) or Window, default (-1, -1)): with a causal mask an int n shows the last n keys. A pair
            (left, right) shows keys i - left to i + right, counted from the diagonal, -1 for open; right is 0 or -1 with a causal
            mask. A `flexattn.Window` may have negative sides: Window(None, -1) hides a query's own key.
        bottom_right_diagonal (bool, optional): for "no_mask" and "padding", whether the diagonal of the window and of ALiBi is the
            bottom-right one. Default: True. Other mask types say it in their name.
    """

    attn_mask_type: MaskType
    window_size: int | tuple[int, int] | Window
    bottom_right_diagonal: bool | None


class BiasOptions(TypedDict, Generic[Array], total=False):
    """Bias.

    Args:
        bias (Tensor, optional): q's dtype or float32, [b, h, sq, skv], where any dim may be 1. The first may also be n, if n
            divides b: batch entry i then adds bias[i // (b // n)]. For packed sequences sq and skv are max_seqlen_q and
            max_seqlen_kv, and entries are indexed within each sequence. Differentiable.
        bias_type (str, optional): "no_bias", "pre_scale_bias" ((q k^T + bias) * softmax_scale), "post_scale_bias" (added after
            softmax_scale and softcap) or "alibi" (-slope * |distance from the diagonal|, added at the same place). Default:
            "post_scale_bias" with a bias, "alibi" with alibi_slopes, else "no_bias".
        alibi_slopes (Tensor, optional): float32 [h] or [b, h], not differentiable. Default for "alibi": the slopes of Press et al.,
            "Train Short, Test Long" (2022).
    """

    bias_type: BiasType | None
    bias: Array | None
    alibi_slopes: Array | None


class SoftmaxOptions(TypedDict, Generic[Array], total=False):
    """Softmax.

    Args:
        softmax_scale (float, optional): at least 0. Default: 1/sqrt(d).
        softcap (float, default 0.0): c > 0 turns each scaled score s into c * tanh(s / c).
        softmax_type (str, optional): "vanilla"; "off-by-one" adds 1 to the denominator; "learnable" adds exp(softmax_offset).
            Default: "learnable" with a softmax_offset, else "vanilla".
        softmax_offset (Tensor, optional): [h], in q's dtype, float16, bfloat16 or float32. Differentiable.
    """

    softmax_type: SoftmaxType | None
    softmax_offset: Array | None
    softmax_scale: float | None
    softcap: float


class DropoutOptions(TypedDict, Generic[Array], total=False):
    """Dropout.

    Args:
        dropout_p (float, default 0.0): probability in [0, 1), rounded to a multiple of 2**-16, that a softmax weight is dropped.
            The others are divided by 1 - dropout_p. It applies in evaluation too: pass 0.0 there.
        rng_state (Tensor, optional): int64 [2] on q's device, a seed and an offset of the Philox generator. Equal states drop equal
            weights in every format; the cuDNN backend has a stream of its own. Default: drawn from torch's generator of the device,
            so that torch.manual_seed, checkpointing and CUDA graphs apply. For a part of a larger call pass int64 [b, 5]: seed,
            offset, the part's first query, its first key (a multiple of 8) and batch index * heads + its first head. [b, 6] adds a
            column for the remainder of the first key (slower). Parts run on the eager backend and the portable Triton kernels.
    """

    dropout_p: float
    rng_state: Array | None


class ScoreOptions(MaskOptions, BiasOptions[Array], SoftmaxOptions[Array], DropoutOptions[Array], total=False):
    """Masks, bias, softmax and dropout."""


class ModOptions(TypedDict, Generic[Array, Blocks], total=False):
    """Functions of a score or of a mask.

    Args:
        score_mod (callable, optional): score_mod(score, b, h, q_idx, kv_idx) returns the modified score of one query and key, in
            torch ops on 0-d tensors: float32 for the scaled, capped score, int64 for the indices, which count within a sequence. It
            is traced once and runs inside the kernel; its backward is derived. Tensors that it captures are read at computed
            indices (`slopes[h]`, `table[h, q_idx - kv_idx]`) and get gradients. Bias, ALiBi and masks apply after it.
        score_mod_tensors (sequence or mapping of Tensor, default ()): tensors that score_mod takes after its five arguments, in
            order or by name.
        mask_mod (callable, optional): mask_mod(b, h, q_idx, kv_idx) returns whether the query sees the key, on top of all other
            masks. It is traced like score_mod.
        block_mask (BlockMask, optional): of `create_block_mask`, torch's or flexattn's, with its own mask_mod. Kernels skip blocks
            without a visible key, and mask no block that is fully visible. It may be for more queries and keys than there are.
    """

    score_mod: Mod | None
    mask_mod: Mod | None
    score_mod_tensors: Sequence[Array] | Mapping[str, Array]
    block_mask: Blocks | None


class LengthOptions(TypedDict, Generic[Array], total=False):
    """Packed and padded sequences.

    Args:
        cu_seqlens_q, cu_seqlens_kv (Tensor, optional): int32 [b + 1], contiguous, on q's device: 0, then the running sum of the
            sequences' lengths. In a dense format sequence i is the first cu_seqlens[i + 1] - cu_seqlens[i] tokens of row i.
        max_seqlen_q, max_seqlen_kv (int, optional): longest sequence of a packed call, or of pages. A longer sequence raises on a
            CPU, and is truncated on a GPU. Default: the total number of tokens, or columns * page_size, which launches programs
            that do nothing. A bias needs them. A number of numpy and a 0-d tensor on a CPU are accepted too.
        cu_seqlens_q_padded, cu_seqlens_kv_padded (Tensor, optional): int32 [b + 1], for "thd" with gaps: the first token of each
            sequence, in any order and without overlap. The last entry is not read. Default: cu_seqlens.
    """

    cu_seqlens_q: Array | None
    cu_seqlens_kv: Array | None
    cu_seqlens_q_padded: Array | None
    cu_seqlens_kv_padded: Array | None
    max_seqlen_q: int | None
    max_seqlen_kv: int | None


class Fp8Options(TypedDict, Generic[Array, State], total=False):
    """FP8.

    Args:
        fp8_recipe (fp8.Recipe, optional): quantises q, k and v, in float16 or bfloat16, and multiplies in FP8. The backward runs in
            FP8 too, unless the recipe has bf16_backward. Gradients are in q's dtype. For q, k and v in FP8 it gives out's dtype.
        fp8_state (fp8.DelayedScaling, optional): the state of a recipe with scaling "delayed".
        descale_q, descale_k, descale_v (Tensor, optional): float32 [], [h], [b, h] or [b, h, blocks], where any dim may be 1, with
            h_kv for k and v: factors of q, k and v in FP8, positive and finite, as `flexattn.fp8.quantize` returns them. Keys and
            values in FP8 beside other queries may have one for each token and head, in the dims of k without the last, but not in
            "thd". Default: 1. Not differentiable.
    """

    fp8_recipe: fp8.Recipe | None
    fp8_state: State | None
    descale_q: Array | None
    descale_k: Array | None
    descale_v: Array | None


class CacheOptions(TypedDict, Generic[Array], total=False):
    """KV cache.

    Args:
        seqused_q, seqused_kv (Tensor, optional): int32 [b], contiguous, on q's device, with a padding mask type: the tokens that
            each sequence uses, for caches whose lengths change in place. For "thd" cu_seqlens then gives the slots. In a dense
            format they replace cu_seqlens, and a side without lengths uses all of its tokens.
        page_table (Tensor, optional): int32 [b, columns] on q's device. k and v are pools of pages, [pages, page_size, h_kv, d] or
            [pages, h_kv, page_size, d] ("bhsd"), and page_table[i, n] is the page of keys n * page_size and on of sequence i.
            Entries beyond a sequence's length are not read. Forward only, in 16 or 32 bits, with seqused_kv or cu_seqlens_kv
            (docs/paged.md).
    """

    seqused_q: Array | None
    seqused_kv: Array | None
    page_table: Array | None


class ListOptions(TypedDict, Generic[Array], total=False):
    """Sparse attention.

    Args:
        kv_indices (Tensor, optional): int32 on q's device, the keys that each query sees, counted within its sequence: [b, sq, n],
            or [b, sq, h_kv, n] with a list for each key head, in every dense format of q; [t_q, n] or [t_q, h_kv, n] for "thd".
            Masks, windows and lengths hide keys of a list too. An entry without such a key, as -1, is empty. A key counts once for
            each entry that lists it (docs/sparse.md).
        kv_index_counts (Tensor, optional): int32, kv_indices' shape without the last dim: the entries of each list that count, from
            the first on. Default: all.
        kv_block_size (int or (int, int), optional): makes the entries blocks of so many keys. A pair (1, keys) leaves the shapes as
            above. A pair (queries, keys) of multiples of 16, or one number for both, makes kv_indices [b, h_kv, query blocks, n]: a
            list for each block of queries, in which a block counts once; b and h_kv may be 1.
    """

    kv_indices: Array | None
    kv_index_counts: Array | None
    kv_block_size: int | tuple[int, int] | None


class RunOptions(TypedDict, total=False):
    """Execution.

    Args:
        deterministic (bool, optional): True makes repeated runs bitwise identical, or raises. False may use faster gradients that
            vary from run to run. Default: torch.are_deterministic_algorithms_enabled().
        backend (str, optional): "auto", "triton", "cudnn" or "eager". A name never falls back. Default: that of
            `attention_backend()`, else FLEXATTN_BACKEND, else "auto". `explain` shows the choice and its reasons.
    """

    deterministic: bool | None
    backend: BackendName | None


class BackwardOptions(FormatOptions, ScoreOptions[Array], ModOptions[Array, Blocks], LengthOptions[Array], RunOptions, total=False):
    """Arguments that a forward and its `attention_backward` share."""


class CommonOptions(
    FormatOptions, ScoreOptions[Array], ModOptions[Array, Blocks], Fp8Options[Array, State], RunOptions, total=False
):
    """Arguments that `attention` and `distributed.attention` both have. Each of them documents its own."""


class ArrayOptions(
    FormatOptions,
    ShortOptions[Array],
    ScoreOptions[Array],
    ModOptions[Array, Blocks],
    LengthOptions[Array],
    CacheOptions[Array],
    ListOptions[Array],
    Fp8Options[Array, State],
    RunOptions,
    total=False,
):
    """Batch invariance.

    These are the arguments for PyTorch and for JAX.

    Args:
        batch_invariant (bool, default False): True makes out and lse of a sequence bitwise independent of the rest of the batch, of
            the place of its keys, and of the division of its queries into calls, or raises (docs/reproducible.md). So does
            FLEXATTN_BATCH_INVARIANT=1 for every call.
    """

    batch_invariant: bool


class ReturnOptions(TypedDict, total=False):
    """Statistics.

    These arguments decide the type of the result, so that overloads spell them out.

    Args:
        return_lse (bool, default False): whether to return lse too.
        return_max_logit (bool, default False): whether to return max_logit too.
    """

    return_lse: bool
    return_max_logit: bool


class AuxOptions(TypedDict, total=False):
    """Statistics of the weights.

    Args:
        return_aux (AuxRequest, optional): returns (out, aux) with the statistics that a `flexattn.AuxRequest` asks for: lse, the
            largest scores, entropy, column sums of the weights, and the weights of chosen queries. It takes the place of return_lse
            and return_max_logit. Without FP8 and kv_indices, unless it asks for lse and max_logit alone.
    """

    return_aux: AuxRequest | None


class Options(ArrayOptions["Tensor", "BlockMask", "fp8.DelayedScaling"], total=False):
    """Tensors of PyTorch.

    These are the arguments that do not decide the type of the result.

    Args:
        mask (Tensor, optional): broadcastable to [b, h, sq, skv], on q's device. bool: True where a query sees a key, as in SDPA.
            float32 or q's dtype: added to the scores, as a post_scale_bias, differentiable. For packed sequences sq and skv are
            max_seqlen_q and max_seqlen_kv, and entries are indexed within each sequence. A bool mask joins mask_mod.
        out (Tensor, optional): contiguous memory for out, of its shape and dtype, that begins at a multiple of 16 bytes and
            overlaps no input. The kernels write into it and it is returned. Forward only: it raises where a gradient is needed.
    """

    mask: Tensor | None
    out: Tensor | None


class Arguments(Options, ReturnOptions, AuxOptions, total=False):
    """All arguments of `attention` besides q, k and v."""


_SUBJECTS: tuple[object, ...] = (  # in the order of the docstring
    *(FormatOptions, ShortOptions, MaskOptions, BiasOptions, SoftmaxOptions, DropoutOptions, ModOptions),
    *(LengthOptions, CacheOptions, ListOptions, Fp8Options, RunOptions, ArrayOptions, Options, ReturnOptions, AuxOptions),
)
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
TENSOR_OPTIONS = TENSOR_FIELDS[3:]  # tensors of a kernel besides q, k and v
BOTH_SIDES = ("cu_seqlens", "max_seqlen")
ALIASES = (*BOTH_SIDES, "mask")  # options that `shorthands.without_aliases` writes as others
_TORCH = {"Array": "Tensor", "Blocks": "BlockMask", "State": "fp8.DelayedScaling"}


def without_defaults(arguments: Mapping[str, object]) -> dict[str, object]:
    """Returns the arguments that do not have their defaults."""
    return {name: value for name, value in arguments.items() if value is not DEFAULTS[name]}


def _documentation() -> str:
    """Returns the arguments of all subjects, each with its title, as sections of a docstring."""
    sections = []
    for subject in _SUBJECTS:
        title, _, arguments = (subject.__doc__ or "").partition("\n    Args:\n")
        sections.append(f"\n    Args: {title.partition('.')[0]}\n{arguments.rstrip()}\n")
    return "".join(sections)


def taking(options: object, types: Mapping[str, str] = _TORCH) -> Callable[[F], F]:
    """Decorates a function that takes `**options`, so that its signature shows each of them with its type and default.

    The catch-alls are left out, and arguments by position are required. An entry "options:" of the docstring becomes the
    documentation of each subject. types: names of the types that differ between PyTorch and JAX.
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
        function.__doc__ = re.sub(r"^        options: .*\n", _documentation(), function.__doc__ or "", flags=re.MULTILINE)
        function.__signature__ = signature.replace(parameters=[*first, *last])  # type: ignore[attr-defined]
        return function

    return with_signature
