"""One call of attention over ranks: its checks, its forward and its backward. A strategy runs it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from flexattn import call_cache, fp8, validation
from flexattn.cached_call import KeptCall
from flexattn.call_cache import CONSTANTS, CallKey, split_of
from flexattn.call_options import BOTH_SIDES, DEFAULTS, CacheOptions, CommonOptions, LengthOptions, ListOptions, ReturnOptions
from flexattn.dispatch.options import check_values, requested_backend
from flexattn.dispatch.spec import BIAS_TYPES, SOFTMAX_TYPES, TENSOR_FIELDS, as_bshd, from_bshd
from flexattn.distributed import agreement, capture, exchange, quantise
from flexattn.distributed.agreement import digest_of, numbers_of
from flexattn.distributed.calls import COMMON, Results, Scores, Seeds, Shared, Strategy, offset_gradient, sum_dtype
from flexattn.distributed.cost import Heads
from flexattn.distributed.gather import Gather
from flexattn.distributed.layout import size_of
from flexattn.distributed.origin import Mod
from flexattn.distributed.plans import MASK, Plan
from flexattn.distributed.ring import Ring
from flexattn.distributed.ulysses import Ulysses
from flexattn.first_order import first_order, refuse_batched
from flexattn.function_context import FunctionContext
from flexattn.functional import chosen
from flexattn.mods.trace import find_all_captures
from flexattn.ops import new_rng_state
from flexattn.prepare import cast_for_autocast, default_alibi_slopes
from flexattn.shorthands import bias_type_of, softmax_type_of

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask  # noqa: F401  # a base class names it in a string


class Options(CommonOptions["Tensor", "BlockMask", "fp8.DelayedScaling"], ReturnOptions, total=False):
    """Arguments of attention over ranks. Those of `flexattn.attention` have the same meaning, for the full sequence."""


NUM_DESCALES = 3  # for q, k and v
_OFFSET, _DESCALES = 5, 7  # indices of softmax_offset and of the first descale in `CheckedCall.inputs`
NOT_TAKEN = {
    "batch_invariant": "False, because results depend on how the plan splits a sequence",
    **dict.fromkeys((*BOTH_SIDES, *LengthOptions.__annotations__), "lengths on the host, as `documents` of the plan"),
    "causal": "attn_mask_type, which names the diagonal, of the plan or of this call",
    "mask": "a mask_mod that reads it, or bias",
    "out": "None, because results of parts are merged into a new tensor",
    "return_aux": "None, because statistics of parts are not merged; return_lse gives lse",
    **dict.fromkeys(ListOptions.__annotations__, "None, as lists of keys are not split over ranks. A block_mask is"),
    **dict.fromkeys(CacheOptions.__annotations__, "keys without pages. attention_over_ranks decodes with a cache"),
}


class CheckedCall:
    """A call of `attention` after its checks."""

    def __init__(self, runner: Strategy, plan: Plan, qkv: tuple[Tensor, Tensor, Tensor], shared: Shared) -> None:
        self.runner, self.plan, self.qkv, self.shared = runner, plan, qkv, shared
        self.qkv_format, self.return_lse, self.scores, self.needs_grad = "bshd", False, Scores(), True
        self.plan_facts: dict[str, object] = {}  # facts from the plan and the shapes, equal on all ranks
        self.is_ordinary = False  # whether the call comes from the cache, whose calls no mode sees and whose tensors are plain

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, plan: Plan, strategy: str | None, options: dict[str, Any]) -> CheckedCall:
        check_arguments(plan, options)
        mask = {name: value for name in MASK if (value := options.pop(name, None)) is not None}
        if mask:
            plan = plan.masked(**mask)
        _with_blocks(plan, options)
        fmt = options.pop("qkv_format", None) or ("thd" if plan.is_packed else "bshd")
        validation.check_name("qkv_format", fmt, ("thd",) if plan.is_packed else ("bshd", "sbhd", "bhsd"))
        q, k, v = _checked_tensors(*cast_for_autocast(q, k, v), plan, fmt)
        wanted = {name: options.pop(name, False) for name in ("return_lse", "return_max_logit")}
        for name, is_wanted in wanted.items():
            validation.check_flag(name, is_wanted)
        scores, shared = _scores(q, plan, options)
        needs_grad = torch.is_grad_enabled() and any(
            t.requires_grad for t in (q, k, v, *shared[:3], *shared.mod_tensors) if t is not None
        )
        recipe_and_state = options.get("fp8_recipe"), options.get("fp8_state")
        request = requested_backend(scores.common["backend"]), scores.common["dropout_p"] > 0
        fp8_call = quantise.check(recipe_and_state, (q, k, v), plan, needs_grad, request)
        descales = options.get("descale_q"), options.get("descale_k"), options.get("descale_v")
        rows = 0 if fp8_call is None else fp8_call.recipe.rows
        batch, dims = (len(plan.mask.lengths_q), "thd") if plan.is_packed else (q.shape[0], "bshd")
        longest = (max(plan.mask.lengths_q), None), (max(plan.mask.lengths_kv), None)
        shared = shared._replace(descales=validation.check_fp8(q, k, dims, dims, batch, longest, rows, descales))
        if wanted["return_max_logit"]:
            lowest = torch.full((q.shape[-2],), float("-inf"), dtype=sum_dtype(q.dtype), device=q.device)
            scores = dataclasses.replace(scores, peaks=lowest)
        heads = Heads(
            q.shape[-2],
            k.shape[-2],
            q.shape[-1],
            v.shape[-1],
            1 if fp8_call else q.element_size(),
            1 if plan.is_packed else q.shape[0],
        )
        chosen = plan.chosen(heads, strategy)
        if fp8_call is not None and rows:
            plan_and_strategy = (plan.inside_host()[1], "ring") if chosen == "ulysses+ring" else (plan, chosen)
            fp8_call = fp8_call._replace(local_rows=quantise.block_rows_of(*plan_and_strategy, rows))
        scores = dataclasses.replace(scores, fp8_call=fp8_call, heads_kv=k.shape[-2])
        if scores.has_own_rows and chosen.startswith("ulysses"):
            raise ValueError(
                f"bias has only the rows of this rank's queries with strategy {chosen!r}. Pass the full bias, or use strategy "
                "'gather', 'halo' or 'ring'"
            )
        call = cls(_strategy(chosen, plan, scores, heads), plan, (q, k, v), shared)
        call.qkv_format, call.return_lse, call.scores, call.needs_grad = fmt, wanted["return_lse"], scores, needs_grad
        call.plan_facts = {
            "plan": plan.digest,
            "strategy": chosen,
            "heads, head dims, bytes of an element and batch": tuple(heads),
            "FP8": None if fp8_call is None else (repr(fp8_call.recipe), [tuple(t.shape) for t in shared.descales]),
            "return_max_logit": wanted["return_max_logit"],
        }
        return call

    def kept(self, plan: Plan, key: CallKey) -> KeptRanks | None:
        """Returns what calls with this key share; None if the call has more of its own than tensors. plan: the argument."""
        scores, blocks = self.scores, self.plan.mask.blocks
        more: tuple[object, ...] = (scores.score_mod, scores.mask_mod, scores.fp8_call, scores.peaks, blocks)
        if any(part is not None for part in more) or any(self.shared[-2:]):
            return None
        given = {name: TENSOR_FIELDS.index(name) for name in _SHARED if getattr(self.shared, name) is not None}
        if any(place >= key.num_arguments or getattr(self.shared, name) is not key.tensors[place] for name, place in given.items()):
            return None  # made for this call, such as default slopes
        return KeptRanks(self, plan, given)

    def inputs(self) -> tuple[Tensor | None, ...]:
        *shared, descales, mod_tensors = self.shared
        return (*self.qkv, *shared, *(descales or (None,) * NUM_DESCALES), *mod_tensors)

    def summary(self) -> dict[str, object]:
        """Returns values that must be equal on all ranks. Reads shared tensors on the host, and so waits for the device."""
        scores, shared = self.scores, self.shared
        mod_numbers = [numbers_of(mod) for mod in (scores.score_mod, scores.mask_mod) if mod is not None]
        bias = None if scores.has_own_rows else shared.bias
        return self.plan_facts | {
            "dtype": str(self.qkv[0].dtype),
            "qkv_format": self.qkv_format,
            "softmax and bias": (*map(scores.common.get, ("softmax_scale", "softcap")), scores.bias_type, scores.softmax_type),
            "dropout": (scores.common["dropout_p"], shared.rng_state is None),
            "mods": (scores.score_mod is not None, scores.mask_mod is not None, len(shared.mod_tensors)),
            "gradients": tuple(bool(t.requires_grad) for t in self.inputs() if t is not None) if torch.is_grad_enabled() else (),
            "shapes of shared tensors": _shapes(self.inputs()[3:], scores.has_own_rows),
            "the numbers of rng_state": digest_of(shared.rng_state),
            "the numbers of bias": digest_of(bias),
            "the numbers of alibi_slopes": digest_of(shared.alibi_slopes),
            "the numbers of softmax_offset": digest_of(shared.softmax_offset),
            "the numbers of descales": [digest_of(t) for t in shared.descales],
            "the numbers of score_mod_tensors": [digest_of(t) for t in shared.mod_tensors],
            "the numbers that mods read": mod_numbers,
        }

    def run(self) -> Any:
        if self.scores.common["dropout_p"] > 0 and self.shared.rng_state is None:
            state = exchange.from_first_rank(new_rng_state(self.qkv[0].device), self.plan.group)
            self.shared = self.shared._replace(rng_state=state)
        device_type, fmt = self.qkv[0].device.type, self.qkv_format
        has_autocast = torch.is_autocast_enabled(device_type)
        with torch.autocast(device_type, enabled=False) if has_autocast else contextlib.nullcontext():
            if self.is_ordinary and not self.needs_grad:
                with torch.no_grad():
                    (out, lse), _ = self.runner.forward(*self.qkv, self.shared)
            else:
                inputs = [None if t is None else t.resolve_neg() for t in self.inputs()]  # a collective sends memory as it is
                out, lse, _ = _Attend.apply(self.runner, self.plan, *inputs)  # type: ignore[no-untyped-call]
        whole: Any = (out if fmt in _AS_COMPUTED else from_bshd(out, fmt)).contiguous()
        fp8_call = self.scores.fp8_call
        if fp8_call is not None and fp8_call.recipe.out_dtype in validation.FP8_DTYPES:
            quantised = quantise.quantise_out(out.detach(), fp8_call, self.plan)
            data = from_bshd(quantised.data, self.qkv_format).contiguous()
            whole = fp8.QuantizedTensor(data, quantised.descale, quantised.amax, whole if whole.requires_grad else None)
        peaks = self.scores.peaks
        max_logit = None if peaks is None else exchange.all_reduce_max(peaks, self.plan.group)
        if not self.return_lse and peaks is None:
            return whole
        return chosen(whole, lse, max_logit, self.return_lse, peaks is not None)


def _checked_tensors(q: Tensor, k: Tensor, v: Tensor, plan: Plan, fmt: str) -> tuple[Tensor, Tensor, Tensor]:
    """Returns this rank's tensors as [b, s, h, d] or [t, h, d]. Raises if they are not the tokens of the plan."""
    fp8.check_unpacked(q, k, v)
    for name, t in (("q", q), ("k", k), ("v", v)):
        if type(t).__name__ == "DTensor":
            raise TypeError(f"{name} is a DTensor; accepted: a local tensor, such as {name}.to_local()")
        if isinstance(t, Tensor) and isinstance(q, Tensor) and t.dtype != q.dtype:
            raise TypeError(
                f"{name} has dtype {t.dtype} and q {q.dtype}; accepted: the same dtype. Use attention_over_ranks for a cache"
            )
    validation.check_qkv(q, k, v, fmt, fmt)
    q, k, v = as_bshd(q, fmt), as_bshd(k, fmt), as_bshd(v, fmt)
    rank, dim = plan.rank, 0 if plan.is_packed else 1
    for name, t, runs in (("q", q, plan.q_runs), ("k", k, plan.kv_runs)):
        if t.shape[dim] != size_of(runs[rank]):
            raise ValueError(
                f"{name} has {t.shape[dim]} tokens on rank {rank}; accepted: the {size_of(runs[rank])} of the plan. Use "
                "`shard` to select them"
            )
    return q, k, v


def _strategy(name: str, plan: Plan, scores: Scores, heads: Heads) -> Strategy:
    """Returns the strategy with this name."""
    if name == "ulysses+ring":
        inside, between = plan.inside_host()
        return Ulysses(scores, inside, heads.q, heads.kv, between)
    if name == "ulysses":
        return Ulysses(scores, plan, heads.q, heads.kv)
    return Ring(scores, plan) if name == "ring" else Gather(scores, plan, name, {})


def _with_blocks(plan: Plan, options: dict[str, object]) -> None:
    """Adds the mask_mod of the plan's block mask to the options. Raises ValueError if there is another one, or none."""
    blocks = plan.mask.blocks
    if blocks is None:
        return
    if options.get("mask_mod") is not None:
        raise ValueError("mask_mod is given with a block_mask, which has one of its own; accepted: one of the two")
    if blocks.mask_mod is None:
        raise ValueError(
            f"the plan was unpickled and has lost its block_mask's mask_mod. Pass {' and '.join(plan.given)} to the call too"
        )
    options["mask_mod"] = blocks.mask_mod


def _shapes(shared: Sequence[Tensor | None], has_own_rows: bool) -> tuple[object, ...]:
    """Returns the shapes of shared tensors, bias first. Omits the rows of a bias that has only this rank's rows."""
    shapes = [None if t is None else tuple(t.shape) for t in shared]
    if has_own_rows and shapes[0] is not None:
        b, h, _, keys = shapes[0]
        return ((b, h, "own", keys), *shapes[1:])
    return tuple(shapes)


def check_arguments(plan: object, options: dict[str, object]) -> None:
    """Raises for a wrong plan, and for an argument that `attention` does not have or that cannot be split."""
    if not isinstance(plan, Plan):
        raise TypeError(f"plan is a {type(plan).__name__}; accepted: a Plan from flexattn.distributed.plan")
    for name, value in options.items():
        if name in NOT_TAKEN:
            is_given = value is not None and not (isinstance(value, (bool, int, float)) and not value)
            if is_given:
                raise ValueError(f"{name} is given to flexattn.distributed.attention; accepted: {NOT_TAKEN[name]}")
        elif name not in Options.__annotations__:
            accepted = ", ".join(("plan", "strategy", *Options.__annotations__))
            raise TypeError(f"{name} is no argument of flexattn.distributed.attention; accepted: {accepted}")
    for name in NOT_TAKEN:
        options.pop(name, None)
    if getattr(options.get("score_mod"), "score_mod_gradient", None) is not None:
        raise ValueError("score_mod has its own gradient, which cannot be split over ranks. Use one whose gradient is derived")


def _scores(q: Tensor, plan: Plan, options: dict[str, Any]) -> tuple[Scores, Shared]:
    """Returns the arguments that are equal for all parts, and the shared tensors. Checks them against the full sequence."""
    heads, batch = q.shape[-2], len(plan.mask.lengths_q) if plan.is_packed else q.shape[0]
    bias_type = bias_type_of(options.get("bias_type"), options.get("bias"), options.get("alibi_slopes"))
    softmax_type = softmax_type_of(options.get("softmax_type"), options.get("softmax_offset"))
    validation.check_name("bias_type", bias_type, BIAS_TYPES)
    validation.check_name("softmax_type", softmax_type, SOFTMAX_TYPES)
    validation.check_flag("deterministic", options.get("deterministic"), optional=True)
    full = DEFAULTS | options
    _, _, dropout_p = numbers = validation.check_scalars(*(full[name] for name in COMMON[:3]))
    rng_state = options.get("rng_state")
    if rng_state is not None:
        validation.check_rng_state(rng_state, q)
    bias, slopes, offset = (options.get(name) for name in ("bias", "alibi_slopes", "softmax_offset"))
    if plan.is_packed and bias is not None:
        raise ValueError("bias is given with a plan of documents; accepted: a score_mod that reads it by position in the document")
    own_rows = size_of(plan.q_runs[plan.rank])
    has_own_rows = (
        isinstance(bias, torch.Tensor) and bias.dim() == 4 and bias.shape[2] == own_rows and own_rows not in (1, plan.length)
    )
    validation.check_bias(bias_type, bias, q, (batch, heads, own_rows if has_own_rows else plan.length, plan.length_kv))
    if slopes is not None:
        validation.check_alibi_slopes(bias_type, slopes, q, batch, heads)
    validation.check_softmax_offset(softmax_type, offset, q, heads)
    if bias_type == "alibi" and slopes is None:
        slopes = default_alibi_slopes(heads, q.device)
    if softmax_type == "off-by-one":
        offset = torch.zeros(heads, dtype=torch.float32, device=q.device)
    blocks = plan.mask.blocks
    if blocks is not None:
        mask_batch, mask_heads = blocks.kinds.shape[:2]
        if mask_batch not in (1, batch) or mask_heads not in (1, heads):
            raise ValueError(
                f"block_mask is for batch {mask_batch} and {mask_heads} heads; accepted for this call: batch 1 or {batch}, 1 or "
                f"{heads} heads"
            )
    score_mod, mask_mod, tensors = options.get("score_mod"), options.get("mask_mod"), options.get("score_mod_tensors", ())
    validation.check_mod_arguments(score_mod, mask_mod, tensors)
    for name, mod in (("score_mod", score_mod), ("mask_mod", mask_mod)):
        if mod is not None:
            _check_mod(name, mod, tensors if name == "score_mod" else (), (batch, heads, plan))
    names = tuple(tensors) if isinstance(tensors, Mapping) else None
    values = tuple(tensors.values() if isinstance(tensors, Mapping) else tensors)
    scores = Scores(
        common={name: full[name] for name in COMMON} | dict(zip(COMMON, numbers, strict=False)),
        score_mod=score_mod,
        mask_mod=mask_mod,
        tensor_names=names,
        bias_type=bias_type,
        softmax_type=softmax_type,
        has_own_rows=has_own_rows,
        heads=(0, heads),
    )
    return scores, Shared(bias, slopes, offset, rng_state if dropout_p > 0 else None, (), values)


def _check_mod(name: str, mod: Mod, tensors: Mapping[str, Tensor] | Sequence[Tensor], sizes: tuple[int, int, Plan]) -> None:
    """Raises for a mod that cannot be split, because its captured tensors require a gradient."""
    batch, heads, plan = sizes
    check_sizes = getattr(mod, "_flexattn_check_sizes", None)
    if check_sizes is not None:
        check_sizes(batch, heads, max(plan.mask.lengths_q), max(plan.mask.lengths_kv))
    if not torch.is_grad_enabled():
        return
    captures = find_all_captures(name, mod, tensors)
    if captures.key is None:
        raise ValueError(
            f"the tensors that {name} reads cannot be determined: {captures.unkeyed}. Use a function that captures only tensors, "
            "numbers, functions, or named attributes of plain objects"
        )
    for captured, t in captures.tensors:
        if t.requires_grad:
            raise ValueError(f"{name} captures {captured}, which requires a gradient. Pass it in score_mod_tensors, or detach it")


_SHARED = Shared._fields[:4]  # those that may be arguments of a kept call
_AS_COMPUTED = ("bshd", "thd")  # formats in which calls are computed


class KeptRanks(KeptCall):
    """Calls over ranks with one key: a checked call without its tensors. Its strategy keeps the exchanges and the local calls."""

    def __init__(self, call: CheckedCall, plan: Plan, given: dict[str, int]) -> None:
        """plan: the argument, whose id is in the key. given: the places of shared tensors among the key's tensors."""
        nothing: dict[str, Any] = dict.fromkeys(given)
        self._plan, self._given, self._shared = plan, given, call.shared._replace(**nothing)
        self._facts = {name: value for name, value in vars(call).items() if name not in ("qkv", "shared")} | {"is_ordinary": True}

    def call(self, key: CallKey) -> CheckedCall:
        """Returns the call with the tensors of a key."""
        q, k, v, *_ = key.tensors
        assert q is not None
        assert k is not None
        assert v is not None
        if q.is_cuda:
            capture.check(self._plan.group, q.device)
        call = CheckedCall.__new__(CheckedCall)
        vars(call).update(self._facts)
        fmt = call.qkv_format
        call.qkv = (q, k, v) if fmt in _AS_COMPUTED else (as_bshd(q, fmt), as_bshd(k, fmt), as_bshd(v, fmt))
        given: dict[str, Any] = {name: key.tensors[place] for name, place in self._given.items()}
        call.shared = self._shared._replace(**given)
        return call

    def run(self, key: CallKey, returns_lse: bool) -> Any:
        """Returns the results of `attention`."""
        return self.call(key).run()


def checked_call(q: Tensor, k: Tensor, v: Tensor, plan: Plan, strategy: str | None, options: dict[str, object]) -> CheckedCall:
    """Returns the checked call. On all ranks, raises errors of arguments before anything is sent.

    A call is checked once if it can be kept. Calls with mods or in FP8, and all calls under FLEXATTN_CHECK, are checked each time.
    """
    key = None
    split = split_of(tuple(options))
    if split.is_known and split.fp8 is None and not torch.compiler.is_compiling():
        values = [*CONSTANTS, split, q, k, v, *options.values()]
        if split.mods is None or split.mods_of(values) is None:
            others = (None, None, *split.others(values), id(plan), strategy)
            key, known = call_cache.look_up(split.tensors(values), others, split.window(values), None)
            if key is not None and isinstance(known, KeptRanks):
                return known.call(key)
    call = _checked_call(q, k, v, plan, strategy, dict(options))
    is_as_given = all(t.dtype is given.dtype for t, given in zip(call.qkv, (q, k, v), strict=True))  # not cast by autocast
    if key is not None and is_as_given and not check_values() and (kept := call.kept(plan, key)) is not None:
        call_cache.remember(key, kept)
    return call


def _checked_call(q: Tensor, k: Tensor, v: Tensor, plan: Plan, strategy: str | None, options: dict[str, object]) -> CheckedCall:
    error, call = None, None
    try:
        call = CheckedCall.of(q, k, v, plan, strategy, options)
    except (TypeError, ValueError) as e:
        error = e
    group = getattr(plan, "group", None)
    if group is None:
        if error is not None:
            raise error
        raise ValueError("plan has no process group. Make it with a group or a mesh, or use plan.on(group)")
    if call is not None:
        capture.check(group, call.qkv[0].device)
    summary = {} if call is None or not check_values() else call.summary()
    agreement.agree(group, "flexattn.distributed.attention", summary, error)
    assert call is not None
    return call


_Descales = tuple[Tensor | None, ...]  # for q, k and v in FP8


class Forward(NamedTuple):
    """Results of a call, in bshd or thd, and the tensors that its backward needs."""

    results: Results
    saved: tuple[Tensor, ...]
    descales: _Descales


def run_forward(runner: Strategy, plan: Plan, tensors: Sequence[Tensor | None]) -> Forward:
    """Runs a call. tensors: `CheckedCall.inputs`."""
    bias, slopes, offset, rng_state, *rest = tensors[3:]
    (q, k, v), descales = _quantised(runner, plan, tensors)
    shared = Shared(bias, slopes, offset, rng_state, _present(descales), _present(rest[NUM_DESCALES:]))
    results, saved = runner.forward(q, k, v, shared)
    fp8_call = runner.scores.fp8_call
    if fp8_call is not None and fp8_call.recipe.bf16_backward:
        saved = (*_present(tensors[:3]), *saved[-2:])
    return Forward(results, saved, descales)


def resume_forward(runner: Strategy, plan: Plan, tensors: Sequence[Tensor | None], results: Results) -> Forward:
    """Returns the result of `run_forward` for the same arguments, from its results: only FP8 tensors and heads are made again."""
    fp8_call = runner.scores.fp8_call
    descales: _Descales = (None,) * NUM_DESCALES
    if fp8_call is not None and fp8_call.recipe.bf16_backward:
        saved = _present(tensors[:3])
    else:
        qkv, descales = _quantised(runner, plan, tensors)
        saved = runner.gathered(*qkv)
    return Forward(results, (*saved, *runner.gathered_results(results)), descales)


def _quantised(runner: Strategy, plan: Plan, tensors: Sequence[Tensor | None]) -> tuple[tuple[Tensor, Tensor, Tensor], _Descales]:
    """Returns q, k and v as local calls take them, and their descales. tensors: `CheckedCall.inputs`.

    Only a call with a config quantises. Without one, q, k and v are in FP8 already, with their descales, or the call has no FP8.
    """
    q, k, v = tensors[:3]
    assert q is not None
    assert k is not None
    assert v is not None
    fp8_call = runner.scores.fp8_call
    if fp8_call is None or fp8_call.config is None:
        return (q, k, v), tuple(tensors[_DESCALES : _DESCALES + NUM_DESCALES])
    quantised = quantise.quantise_qkv(q, k, v, fp8_call, plan)
    q, k, v = (x.data for x in quantised)
    return (q, k, v), tuple(x.descale for x in quantised)


def run_backward(
    runner: Strategy, plan: Plan, forward: Forward, shared_tensors: Sequence[Tensor | None], incoming: tuple[Tensor, Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Returns the gradients of `CheckedCall.inputs`.

    shared_tensors: the inputs after q, k and v. They say whether they require a gradient. incoming: dout and dlse.
    """
    results, saved, descales = forward
    bias, slopes, offset, rng_state, *rest = shared_tensors
    shared = Shared(bias, slopes, offset, rng_state, _present(descales), _present(rest[NUM_DESCALES:]))
    seeds = Seeds(*incoming)
    fp8_call = runner.scores.fp8_call
    if fp8_call is not None and fp8_call.recipe.bf16_backward:
        runner = dataclasses.replace(runner, scores=dataclasses.replace(runner.scores, fp8_call=None))
        saved, fp8_call = (*runner.gathered(*saved[:3]), *saved[3:]), None
    elif fp8_call is not None:
        quantised = quantise.quantise_dout(seeds.dout, fp8_call, plan)
        if quantised is not None:
            seeds, shared = seeds._replace(dout8=quantised.data), shared._replace(descales=(*shared.descales, quantised.descale))
    sums = runner.backward(saved, seeds, shared)
    doffset = None
    if offset is not None and offset.requires_grad:
        doffset = offset_gradient(results, seeds, offset, plan.is_packed)
    dbias, *dmods = sums.shared
    dtype = seeds.dout.dtype
    dq, dk, dv = (sums.dq.to(dtype), sums.dk.to(dtype), sums.dv.to(dtype))
    if fp8_call is not None and fp8_call.recipe.rotation:
        dq, dk = quantise.unrotate(dq, dk)
    totals = (dbias, None, doffset, None, *(None,) * NUM_DESCALES, *dmods)
    shared_gradients = [
        None if total is None or t is None else total.to(t.dtype) for total, t in zip(totals, shared_tensors, strict=True)
    ]
    return (dq, dk, dv, *shared_gradients)


def _stored(name: str, t: Tensor) -> Tensor:
    """Returns a contiguous plain tensor whose memory holds its values, without a negative bit, for a collective."""
    if type(t).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        t = t.clone()  # becomes a plain tensor, if a collective is still to fill this one
    if type(t).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise TypeError(f"{name} is a {type(t).__name__}; accepted: a plain tensor, such as the result of to_local()")
    return t.resolve_neg().contiguous()


def _present(tensors: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    return tuple(t for t in tensors if t is not None)


class _Attend(torch.autograd.Function):
    """One autograd node for a call, so that its collectives run in the same order on each rank."""

    @staticmethod
    def forward(ctx: FunctionContext, runner: Strategy, plan: Plan, *tensors: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        results, saved, descales = run_forward(runner, plan, tensors)
        fp8_call, scale_dout = runner.scores.fp8_call, None
        if fp8_call is not None and fp8_call.state is not None and not fp8_call.recipe.bf16_backward:
            scale_dout = fp8_call.state.scale("dout")  # saved so that autograd detects a write before the backward
        ctx.runner, ctx.plan, ctx.count, ctx.shape = runner, plan, len(saved), results.out.shape
        sink_results = tuple(results) if tensors[_OFFSET] is not None else (None, None)
        anchor = results.out.new_empty(0)  # an empty output that is saved first, because `first_order` needs one, instead of out
        ctx.save_for_backward(anchor, *saved, scale_dout, *sink_results, *descales, *tensors[3:])
        ctx.set_materialize_grads(False)
        return results.out, results.lse, anchor

    @staticmethod
    @first_order
    def backward(ctx: FunctionContext, saved_tensors: Any, dout: Tensor | None, dlse: Tensor | None, _: None) -> tuple[Any, ...]:
        anchor, *tensors = saved_tensors
        saved, (_, out, lse, *rest) = tuple(tensors[: ctx.count]), tensors[ctx.count :]
        descales, shared_tensors = tuple(rest[:NUM_DESCALES]), rest[NUM_DESCALES:]
        wanted = ctx.needs_input_grad[5:]
        leaves = [None if t is None else t.detach().requires_grad_(wants) for t, wants in zip(shared_tensors, wanted, strict=True)]
        refuse_batched(dout, dlse)  # before anything is sent
        dout = anchor.new_zeros(ctx.shape) if dout is None else _stored("the gradient of out", dout)
        incoming = dout, None if dlse is None else _stored("the gradient of lse", dlse)
        return None, None, *run_backward(ctx.runner, ctx.plan, Forward(Results(out, lse), saved, descales), leaves, incoming)
