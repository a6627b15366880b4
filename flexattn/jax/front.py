"""`attention` for JAX arrays: the arguments, checks and errors of torch's version, and JAX's gradients around two primitives."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.ad_checkpoint import checkpoint_name
from torch import Tensor

from flexattn import ops, validation
from flexattn.call_cache import state_around
from flexattn.call_options import ALIASES, DEFAULTS, ArrayOptions, taking
from flexattn.dispatch import explain as explanations
from flexattn.dispatch.philox import ORIGIN
from flexattn.dispatch.select import Decision, unsupported
from flexattn.dispatch.spec import DIFFERENTIABLE, AttentionSpec, Direction, Operands, Window, parse_format
from flexattn.fp8 import Recipe
from flexattn.fp8_ops import QuantizeConfig, planned
from flexattn.hints import with_hints
from flexattn.jax import cuda, mods
from flexattn.jax import fp8 as jax_fp8
from flexattn.jax.block_mask import BlockMask
from flexattn.jax.call import SCALED, Call, cumulative, flat, meta_tensor, shape_of_words
from flexattn.jax.derivatives import tangent
from flexattn.jax.primitives import alike, bind, forward_p
from flexattn.key_lists import block_size
from flexattn.prepare import default_alibi_slopes, prepare
from flexattn.shorthands import in_full

if TYPE_CHECKING:
    from typing_extensions import Unpack

_ARRAYS = (
    *("q", "k", "v"),
    *(
        name
        for name, hint in ArrayOptions.__annotations__.items()
        if hint.__forward_arg__ == "Array | None" and name not in (*ALIASES, "rng_state")
    ),
)
_SCALES, _HISTORIES = (tuple(f"{kind}_{name}" for name in SCALED) for kind in ("scale", "amax_history"))  # fields of DelayedScaling
# A mask is an array that a mask_mod reads, no array is written to, and no pass over JAX arrays computes statistics.
NOT_TAKEN = ("mask", "out", "return_aux")
_TYPES = {"Array": "jax.Array", "Blocks": "BlockMask", "State": "jax_fp8.DelayedScaling"}


@with_hints
@taking(ArrayOptions, _TYPES)
def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    return_lse: bool = False,
    return_max_logit: bool = False,
    **options: Unpack[ArrayOptions[jax.Array, BlockMask, jax_fp8.DelayedScaling]],
) -> Any:
    """Returns `flexattn.attention` of JAX arrays. Arguments, shapes, dtypes, formulas and errors are the same, except as below.

    Works in jit, grad, vmap, scan and checkpoint. Numbers, names and mods are static, arrays may be traced.

    Args:
        page_table: the pages of each sequence's cache; `append_kv` writes to them.
        rng_state: a key of jax.random (jax.random.key, or its uint32 [2] or [4] words), required if dropout_p > 0. The same key
            drops the same weights; use a new one for each call. For a part of a sequence: uint32 [b, 10 or 12], the words of
            `flexattn.attention`'s int64 [b, 5 or 6], two for each number, the lower one first.
        score_mod, mask_mod: functions in jax.numpy on 0-d arrays, float32 for the score and int32 for the indices. They may read
            captured arrays at computed indices, such as slopes[h] or table[h, q_idx - kv_idx]; these receive gradients. A read
            outside of an array gives 0, unlike in JAX. Arithmetic is in float32 and in integers of 64 bits.
        block_mask: a result of `flexattn.jax.create_block_mask`.
        fp8_recipe: a `flexattn.fp8.Recipe`.
        fp8_state: the `flexattn.jax.fp8.DelayedScaling` for a recipe with scaling "delayed"; its gradient is the call's amaxes.
        backend: on a CUDA device, "auto" and "triton" mean Triton's kernels, which XLA launches itself. torch runs "cudnn" and
            "eager", in a handler that XLA calls. On a CPU "auto" means "eager".

    Returns:
        out, (out, lse), (out, max_logit) or (out, lse, max_logit), as requested. If fp8_recipe requests an FP8 output, out is a
        `flexattn.jax.fp8.QuantizedTensor`. out and lse have first and second derivatives in both modes, with respect to q, k, v,
        bias, softmax_offset and the mods' captures. In FP8 they have first ones in reverse mode. max_logit has none: its gradient
        is dropped. `jax.checkpoint` policies know out and lse as "flexattn_out" and "flexattn_lse".

    Raises:
        ValueError, TypeError: as `flexattn.attention`, when the call is traced.
        BackendError: if no backend of the platform supports the call, when it is compiled.
    """
    returned = {"return_lse": return_lse, "return_max_logit": return_max_logit}
    out, lse, max_logit = attend({"q": q, "k": k, "v": v, **returned, **options})
    if return_max_logit:
        return (out, lse, max_logit) if return_lse else (out, max_logit)
    return (out, lse) if return_lse else out


def attend(
    arguments: Mapping[str, Any], names: tuple[str, str] = ("flexattn_out", "flexattn_lse")
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns out, lse and max_logit of a call of `attention`; names: names of out and lse for `jax.checkpoint` policies."""
    key = _key(arguments, names)
    kept = None if key is None else _kept.get(key)
    if kept is None:
        given = _given(arguments)
        if key is None or (kept := _Kept.of(given, arguments, names)) is None:
            results = _differentiable(given, names)(given.arrays)
        else:
            results = kept.run(given.arrays)
            if len(_kept) >= MOST_CALLS:
                _kept.clear()
            _kept[key] = kept
    else:
        results = kept.run([arguments[name] for name in kept.sources])
    out, lse, max_logit, *more = results
    recipe = arguments.get("fp8_recipe")
    if recipe is not None and recipe.out_dtype in validation.FP8_DTYPES:
        data, descale, amax = more[:3]
        out = jax_fp8.QuantizedTensor(data, descale, amax, out, recipe.rows)
    return out, lse, max_logit


def _key(arguments: Mapping[str, Any], names: tuple[str, str]) -> Hashable | None:
    """Returns the key of a call, with everything that its checks and its form depend on; None if it has none, as with mods."""
    parts: list[object] = [names, state_around(), jax.config.jax_enable_x64]
    if parts[1] is None:
        return None
    arrays = []
    for name, value in arguments.items():
        kind = type(value)
        parts += (name, kind)
        if name in _KEYED_ARRAYS and isinstance(value, jax.Array):
            if any(type(size) is not int for size in value.shape):
                return None
            arrays.append(id(value))
            parts += (value.shape, value.dtype)
        elif kind in _KEYED or (kind in (tuple, Window) and _KEYED.issuperset(map(type, value))):
            parts += (value, tuple(map(type, value)) if kind in (tuple, Window) else None)
        else:
            return None
    return tuple(parts), tuple(map(arrays.index, arrays))  # an array may be given twice


class _Kept(NamedTuple):
    """A call that passed its checks: the names of the arguments that are its arrays, in order, and the call as a function of them.

    Calls with the same key are kept in and outside of jit, without their arrays.
    """

    sources: tuple[str, ...]
    run: Callable[[Sequence[jax.Array]], tuple[jax.Array, ...]]

    @classmethod
    def of(cls, given: _Given, arguments: Mapping[str, object], names: tuple[str, str]) -> _Kept | None:
        """Returns a call to keep; None if one of its arrays is not an argument, such as default slopes or the words of a key."""
        sources = []
        for name, array in zip(given.names, given.arrays, strict=False):
            places = [place for place in (name, name.rpartition("_")[0]) if arguments.get(place) is array]
            sources += places[:1]
        if len(sources) < len(given.arrays):
            return None
        shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in given.arrays]
        return cls(tuple(sources), _differentiable(given._replace(arrays=shapes), names))


MOST_CALLS = 256
_kept: dict[Hashable, _Kept] = {}
_KEYED_ARRAYS = frozenset((*_ARRAYS, "cu_seqlens", "rng_state"))
_KEYED = frozenset((bool, int, float, str, type(None), Recipe))  # types of the other arguments of a call with a key


def explain(q: jax.Array, k: jax.Array, v: jax.Array, **arguments: object) -> explanations.Explanation:
    """Returns the backend that runs a call of `attention`, with the reasons; runs nothing.

    The target is the CUDA device for compilation (JAX's first, or that of `compiled_for`), or the CPU if there is none. All
    floating-point arrays are assumed to need a gradient. Raises the errors of `attention` for the arguments, and BackendError if no
    backend supports the call.
    """
    given = _given({"q": q, "k": k, "v": v} | arguments)
    x, settings, config = given.prepare([True] * len(given.arrays))
    x = x if config is None else planned(x, settings, config)
    spec, device = ops.spec_to_run(x, settings), cuda.device()
    if device is None:
        return explanations.explain(spec._replace(device_type="cpu"), settings.backend, x)
    on_cuda = spec._replace(device_type="cuda", capability=device.capability)
    for direction in explanations.directions_of(on_cuda):
        cuda.check(on_cuda if direction == "forward" else on_cuda.for_backward(), settings.backend, direction)
    if settings.backend in cuda.HOSTED:
        return explanations.explain(on_cuda, settings.backend, x)
    found = explanations.explain(on_cuda, "triton", x)
    return found._replace(
        request=settings.backend,
        forward=_planned(found.forward, on_cuda, "forward"),
        backward=None if found.backward is None else _planned(found.backward, on_cuda, "backward"),
    )


def _planned(decision: Decision, spec: AttentionSpec, direction: Direction) -> Decision:
    """Returns the decision for Triton's kernels, in JAX's form for a CUDA device."""
    others = tuple(
        (name, unsupported(name, spec, direction, name) or f"torch would run it; ask for it with backend={name!r}")
        for name in cuda.HOSTED
    )
    return decision._replace(why="on a CUDA device XLA launches Triton's kernels itself", rejected=others)


class _Given(NamedTuple):
    """A call's arrays, and its static arguments."""

    names: tuple[str, ...]  # names of arrays that are arguments; captures and lists of a block mask follow
    arrays: list[jax.Array]
    static: dict[str, Any]
    traced: dict[str, mods.Traced | mods.InTorch]  # by role
    captures: list[jax.Array]  # the mods' arrays
    block_mask: BlockMask | None

    def prepare(self, perturbed: Sequence[bool]) -> tuple[Operands, ops.Settings, QuantizeConfig | None]:
        """Returns the checked call with meta tensors; perturbed: whether each array needs a gradient."""
        x, settings, config, _ = self._prepared(perturbed)
        return x, settings, config

    def bind(self, perturbed: Sequence[bool]) -> tuple[Call, list[_Source]]:
        """Returns the call, and the source of each operand."""
        x, settings, config, places = self._prepared(perturbed)
        sources: list[_Source] = []
        for t in flat(x):
            place = places.get(t.untyped_storage()._cdata)
            sources.append(
                self._lengths(x, "q" if t is x.cu_seqlens_q else "kv") if place is None else _Same(place, tuple(t.shape))
            )
        state_places = [self.names.index(name) for name in _SCALES if name in self.names]
        sources += [_Same(i, tuple(self.arrays[i].shape)) for i in state_places]
        return Call.of(x, settings, config, self.static["fp8_recipe"]), sources

    def _lengths(self, x: Operands, side: str) -> _Lengths:
        """Returns the source of the cu_seqlens that `prepare` substituted for seqused, for a backward."""
        used, cu = (self.names.index(name) if (name := f"{of}_{side}") in self.names else None for of in ("seqused", "cu_seqlens"))
        fmt, tensor = parse_format(self.static["qkv_format"])[side == "kv"], x.q if side == "q" else x.k
        dense = (0, 0) if fmt == "thd" else (int(tensor.shape[fmt.index("b")]), int(tensor.shape[fmt.index("s")]))
        return _Lengths(used, cu, *dense)

    def _prepared(self, perturbed: Sequence[bool]) -> tuple[Operands, ops.Settings, QuantizeConfig | None, dict[int, int]]:
        places: dict[int, int] = {}
        kept: list[Tensor] = []  # keeps storages alive, so that their addresses are unique

        def stand_in(i: int, name: str, wanted: bool) -> Tensor:
            array = self.arrays[i]
            if name == "rng_state":
                t = torch.empty(shape_of_words(array.shape), dtype=torch.int64, device="meta")
            else:
                t = meta_tensor(name, array)
            places[t.untyped_storage()._cdata] = i
            kept.append(t)
            return t.requires_grad_(wanted and t.is_floating_point())

        is_state_perturbed = any(perturbed[i] for i, name in enumerate(self.names) if name in (*_SCALES, *_HISTORIES))

        def is_wanted(i: int, name: str) -> bool:
            return (perturbed[i] and name in DIFFERENTIABLE) or (name == "q" and is_state_perturbed)

        tensors = {name: stand_in(i, name, is_wanted(i, name)) for i, name in enumerate(self.names)}
        if "scale_q" in tensors:
            buffers = {name: tensors.pop(name) for name in (*_SCALES, *_HISTORIES)}
            tensors["fp8_state"] = jax_fp8.stand_in(self.static["fp8_recipe"], buffers)
        first = len(self.names)
        captures = {
            id(array): stand_in(first + i, "what a mod captures", perturbed[first + i]) for i, array in enumerate(self.captures)
        }
        first += len(self.captures)
        qkv = tensors.pop("q"), tensors.pop("k"), tensors.pop("v")
        options: Any = self.static | tensors | {role: traced.written(captures) for role, traced in self.traced.items()}
        lists = []
        if self.block_mask is not None:
            lists = [stand_in(first + i, "block_mask", False) for i in range(len(self.arrays) - first)]
            options |= {"block_mask": self.block_mask.stand_in(lists, options["mask_mod"]), "mask_mod": None}
        with torch.enable_grad():
            x, settings, config = prepare(*qkv, options, can_check_floor=False)
        if lists:
            x = x._replace(block_mask=tuple(lists))
        return x, settings, config, places


def _given(given: Mapping[str, object]) -> _Given:
    """Returns a call's arrays, in a fixed order, apart from its static arguments."""
    unknown = sorted(given.keys() - (DEFAULTS.keys() - {*NOT_TAKEN}) - {"q", "k", "v"})
    if unknown:
        raise TypeError(f"attention() was given {', '.join(unknown)}, which it does not take")
    size = given.get("kv_block_size")
    if size is not None and block_size(size)[0] != 1:
        raise ValueError(
            f"kv_block_size is {size!r}; accepted for JAX arrays: (1, keys), with a list for each query; for lists of query blocks "
            "pass a block_mask of flexattn.jax.create_block_mask"
        )
    arguments: dict[str, Any] = in_full(given["q"], given["k"], given)
    state = jax_fp8.checked_state(arguments.pop("fp8_state"))
    if state is not None and getattr(arguments["fp8_recipe"], "scaling", "current") != "delayed":
        recipe = arguments["fp8_recipe"]
        raise ValueError(
            f"fp8_state is given with {'no fp8_recipe' if recipe is None else recipe}; accepted: an fp8_recipe with scaling "
            "'delayed'"
        )
    score_mod, mask_mod = arguments.pop("score_mod"), arguments.pop("mask_mod")
    explicit, block_mask = arguments.pop("score_mod_tensors"), arguments.pop("block_mask")
    if block_mask is not None:
        if not isinstance(block_mask, BlockMask):
            raise TypeError(
                f"block_mask is a {type(block_mask).__name__}; accepted: what flexattn.jax.create_block_mask gives, or None"
            )
        if mask_mod is not None:
            raise ValueError("mask_mod is given with a block_mask, which has one of its own; accepted: one of the two")
        mask_mod = block_mask.mask_mod
    if score_mod is None and explicit:
        raise ValueError("score_mod_tensors is given without a score_mod; accepted: (), or a score_mod that takes them")
    arrays: dict[str, jax.Array] = {}
    for name in _ARRAYS:
        value = arguments.pop(name)
        if value is not None or name in ("q", "k", "v"):
            if not isinstance(value, (jax.Array, np.ndarray)):
                raise TypeError(f"{name} is {validation.describe(value)}; accepted: a JAX or NumPy array")
            arrays[name] = jnp.asarray(value)  # in JAX's dtype, such as float32 for float64
    if (words := arguments.pop("rng_state")) is not None:
        arrays["rng_state"] = words_of(words)
    elif validation.check_scalars(None, 0.0, arguments["dropout_p"])[2] > 0.0:
        raise ValueError("rng_state is None with dropout_p > 0; accepted: a key of jax.random, as jax.random.key(0)")
    if arguments["bias_type"] == "alibi" and "alibi_slopes" not in arrays and arrays["q"].ndim:
        heads = _heads(arrays["q"], arguments["qkv_format"])
        if heads is not None:
            arrays["alibi_slopes"] = jnp.asarray(default_alibi_slopes(heads, torch.device("cpu")).numpy())
    for name in "qkv":
        if jnp.dtype(arrays[name].dtype).name.startswith("float8"):
            arrays.setdefault(f"descale_{name}", jnp.ones((), jnp.float32))
    if state is not None:
        arrays |= state._asdict()
    traced = {}
    for role, mod in (("score_mod", score_mod), ("mask_mod", mask_mod)):
        if mod is not None:
            traced[role] = mods.trace(role, mod, explicit if role == "score_mod" else ())
    captures = list({id(a): a for t in traced.values() for a in t.all_arrays()}.values())
    absent = (name for name in (*_ARRAYS, "rng_state") if name not in arrays)
    static = dict.fromkeys((*absent, "score_mod", "mask_mod", "block_mask", "fp8_state")) | arguments | {"score_mod_tensors": ()}
    lists = [] if block_mask is None else list(block_mask.lists)
    return _Given(tuple(arrays), [*arrays.values(), *captures, *lists], static, traced, captures, block_mask)


def _heads(q: jax.Array, qkv_format: object) -> int | None:
    """Returns the number of q's heads, or None if its format is invalid, which the checks report later."""
    fmt = str(qkv_format).partition("_2")[0]
    return int(q.shape[fmt.index("h")]) if "h" in fmt and q.ndim == len(fmt) and q.shape[fmt.index("h")] else None


def words_of(key: jax.Array) -> jax.Array:
    """Returns a key of jax.random as uint32 [4], the words of a seed and an offset; raises TypeError if it is not a key.

    The words of a part's rng_state, which has a row for each sequence, are returned unchanged.
    """
    if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.key_data(key)
    widths = (2 * len(ORIGIN), 2 * len(ORIGIN) + 2)
    if isinstance(key, (jax.Array, np.ndarray)) and key.dtype == jnp.uint32 and key.ndim == 2 and key.shape[1] in widths:
        return jnp.asarray(key)
    if not isinstance(key, (jax.Array, np.ndarray)) or key.dtype != jnp.uint32 or key.shape not in ((2,), (4,)):
        came = f"{key.dtype} of shape {key.shape}" if hasattr(key, "shape") else repr(key)
        raise TypeError(
            f"rng_state is {came}; accepted: one key of jax.random, as jax.random.key(0), or its uint32 [2] or [4] words, or "
            f"uint32 [b, {widths[0]} or {widths[1]}], those of a part of a whole"
        )
    words = jnp.concatenate([jnp.asarray(key), jnp.zeros(4 - key.shape[0], jnp.uint32)])
    return words & jnp.array([0xFFFFFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FFFFFFF], jnp.uint32)  # nonnegative, as in torch


def _differentiable(given: _Given, names: tuple[str, str]) -> Callable[[Sequence[jax.Array]], tuple[jax.Array, ...]]:
    """Returns the call as a function of its arrays, with its derivatives; names: of out and lse, for checkpoint policies."""
    bound = functools.cache(given.bind)
    zero = jax.custom_derivatives.SymbolicZero

    def primal(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        one, sources = bound((False,) * len(arrays))
        return tuple(bind(forward_p, _operands(arrays, sources), one))

    def rule(arrays: tuple[jax.Array, ...], tangents: Any) -> Any:
        perturbed = tuple(type(t) is not zero and t.dtype != jax.dtypes.float0 for t in tangents)
        one, sources = bound(perturbed)
        operands = _operands(arrays, sources)
        out, lse, *more = bind(forward_p, operands, one)
        found = (checkpoint_name(out, names[0]), checkpoint_name(lse, names[1]), *more)
        same = {i: source for i in one.wanted() if isinstance(source := sources[i], _Same)}  # no other array has gradients
        along = {i: source.made(tangents) for i, source in same.items() if perturbed[source.place]}
        places = {name: given.names.index(history) for name, history in zip(SCALED, _HISTORIES, strict=True) if one.is_delayed}
        histories = {name: tangents[place] for name, place in places.items() if perturbed[place]}
        moved = [zero(jax.typeof(t).to_tangent_aval()) for t in found]
        if along or histories:
            moved[:2] = tangent(one, operands, found, along, histories)
        return found, tuple(moved)

    call = jax.custom_jvp(primal)
    call.defjvp(rule, symbolic_zeros=True)

    def run(arrays: Sequence[Any]) -> tuple[Any, ...]:
        found: tuple[Any, ...] = call(*alike(arrays))
        return found

    return run


class _Same(NamedTuple):
    """An operand that is one of the call's arrays, reshaped."""

    place: int
    shape: tuple[int, ...]

    def made(self, arrays: Sequence[jax.Array]) -> Any:
        """Returns the operand."""
        array = jnp.asarray(arrays[self.place])
        is_words = array.dtype == jnp.uint32  # words of a key, which is int64 [2] in torch
        return array if is_words or array.shape == self.shape else array.reshape(self.shape)


class _Lengths(NamedTuple):
    """An operand cu_seqlens that is computed from the arrays seqused and cu_seqlens, as in `flexattn.dispatch.pages`."""

    used: int | None
    slots: int | None
    batch: int  # sequences and tokens of a dense format
    tokens: int

    def made(self, arrays: Sequence[jax.Array]) -> Any:
        """Returns the operand, int32 [batch + 1]."""
        slots = jnp.full(self.batch, self.tokens, jnp.int32) if self.slots is None else jnp.diff(arrays[self.slots])
        lengths = slots if self.used is None else jnp.clip(arrays[self.used], 0, slots)
        return cumulative(lengths)


_Source = _Same | _Lengths


def _operands(arrays: Sequence[jax.Array], sources: Sequence[_Source]) -> list[jax.Array]:
    return [source.made(arrays) for source in sources]
