"""A call of attention over ranks: checked against the whole, run by a strategy, and differentiated by it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypedDict

import torch
from torch import Tensor

from flexattn import fp8, validation
from flexattn.dispatch.context import requested_backend
from flexattn.dispatch.options import check_values
from flexattn.dispatch.spec import BIAS_TYPES, SOFTMAX_TYPES, Window, as_bshd, from_bshd
from flexattn.distributed import agreement, capture, exchange, quantise
from flexattn.distributed.agreement import digest_of, numbers_of
from flexattn.distributed.calls import Results, Scores, Seeds, Shared, Sums, offset_gradient, sum_dtype
from flexattn.distributed.cost import Heads
from flexattn.distributed.gather import Gather
from flexattn.distributed.layout import size_of
from flexattn.distributed.plans import MASK, Plan
from flexattn.distributed.ring import Ring
from flexattn.distributed.ulysses import Ulysses
from flexattn.first_order import first_order, refuse_batched
from flexattn.mods.trace import find_all_captures
from flexattn.ops import new_rng_state
from flexattn.prepare import default_alibi_slopes

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from flexattn.mods.trace import Mod


class Options(TypedDict, total=False):
    """Arguments of `attention` that mean what they mean for `flexattn.attention`, of the whole."""

    qkv_format: str
    attn_mask_type: str
    window_size: tuple[int, int] | Window
    bottom_right_diagonal: bool | None
    block_mask: BlockMask | None
    bias_type: str
    bias: Tensor | None
    alibi_slopes: Tensor | None
    softmax_type: str
    softmax_offset: Tensor | None
    softmax_scale: float | None
    softcap: float
    dropout_p: float
    rng_state: Tensor | None
    score_mod: Mod | None
    mask_mod: Mod | None
    score_mod_tensors: Sequence[Tensor] | Mapping[str, Tensor]
    fp8_recipe: fp8.Recipe | None
    fp8_state: fp8.DelayedScaling | None
    descale_q: Tensor | None
    descale_k: Tensor | None
    descale_v: Tensor | None
    deterministic: bool | None
    return_lse: bool
    return_max_logit: bool
    backend: str | None


NUM_DESCALES = 3  # for q, k and v
_OFFSET = 5  # the place of softmax_offset among `Checked.inputs`
NOT_TAKEN = {
    "batch_invariant": "False, as bits depend on how the plan divides a sequence",
    **dict.fromkeys(
        ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded", "max_seqlen_q", "max_seqlen_kv"),
        "lengths on the host, as `documents` of the plan",
    ),
    **dict.fromkeys(("page_table", "seqused_q", "seqused_kv"), "keys without pages; attention_over_ranks decodes over caches"),
}


class Strategy(Protocol):
    """A way to attend over ranks: `Gather`, `Ring` or `Ulysses`, each a NamedTuple."""

    @property
    def scores(self) -> Scores: ...

    def gathered(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]: ...

    def gathered_results(self, results: Results) -> Results: ...

    def _replace(self, *, scores: Scores) -> Strategy: ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, shared: Shared) -> tuple[Results, tuple[Tensor, ...]]: ...

    def backward(self, saved: tuple[Tensor, ...], seeds: Seeds, shared: Shared) -> Sums: ...


class Checked:
    """A call of `attention` that is checked."""

    def __init__(self, runner: Strategy, plan: Plan, qkv: tuple[Tensor, Tensor, Tensor], shared: Shared) -> None:
        self.runner, self.plan, self.qkv, self.shared = runner, plan, qkv, shared
        self.qkv_format, self.return_lse, self.scores = "bshd", False, Scores()
        self.of_plan: dict[str, Any] = {}  # what follows from the plan and the shapes, the same on all ranks

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, plan: Plan, strategy: str | None, options: dict[str, Any]) -> Checked:
        if not isinstance(plan, Plan):
            raise TypeError(f"plan is a {type(plan).__name__}; accepted: what flexattn.distributed.plan made")
        check_options(options)
        mask = {name: value for name in MASK if (value := options.pop(name, None)) is not None}
        if mask:
            plan = plan.masked(**mask)
        _with_blocks(plan, options)
        fmt = options.pop("qkv_format", None) or ("thd" if plan.is_packed else "bshd")
        validation.check_name("qkv_format", fmt, ("thd",) if plan.is_packed else ("bshd", "sbhd", "bhsd"))
        if isinstance(q, Tensor) and q.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(q.device.type):
            dtype = torch.get_autocast_dtype(q.device.type)
            kept = (torch.float64, *validation.FP8_DTYPES)
            q, k, v = (t.to(dtype) if isinstance(t, Tensor) and t.dtype not in kept else t for t in (q, k, v))
        fp8.check_unpacked(q, k, v)
        for name, t in (("q", q), ("k", k), ("v", v)):
            if type(t).__name__ == "DTensor":
                raise TypeError(f"{name} is a DTensor; accepted: a local tensor")
            if isinstance(t, Tensor) and isinstance(q, Tensor) and t.dtype != q.dtype:
                raise TypeError(
                    f"{name} has dtype {t.dtype} and q {q.dtype}; accepted: the same; attention_over_ranks reads caches"
                )
        validation.check_qkv(q, k, v, fmt, fmt)
        q, k, v = (as_bshd(t, fmt) for t in (q, k, v))
        rank, dim, dims = plan.rank, 0 if plan.is_packed else 1, "thd" if plan.is_packed else "bshd"
        for name, t, runs in (("q", q, plan.q_runs), ("k", k, plan.kv_runs)):
            if t.shape[dim] != size_of(runs[rank]):
                raise ValueError(
                    f"{name} has {t.shape[dim]} tokens on rank {rank}; accepted: the {size_of(runs[rank])} that the plan gives it, "
                    "as `shard` does"
                )
        wanted = {name: options.pop(name, False) for name in ("return_lse", "return_max_logit")}
        for name, is_wanted in wanted.items():
            validation.check_flag(name, is_wanted)
        scores, shared = _scores(q, plan, options)
        needs_grad = torch.is_grad_enabled() and any(
            t.requires_grad for t in (q, k, v, *shared[:3], *shared.mod_tensors) if t is not None
        )
        of_fp8 = options.get("fp8_recipe"), options.get("fp8_state")
        request = requested_backend(scores.backend), scores.dropout_p > 0
        eight = quantise.check(of_fp8, (q, k, v), plan, needs_grad, request)
        descales = options.get("descale_q"), options.get("descale_k"), options.get("descale_v")
        rows = 0 if eight is None else eight.recipe.rows
        batch = len(plan.mask.lengths_q) if plan.is_packed else q.shape[0]
        of_given = validation.check_fp8(q, k, dims, dims, batch, quantise.whole_sizes(plan), rows, descales)
        shared = shared._replace(descales=of_given)
        if wanted["return_max_logit"]:
            lowest = torch.full((q.shape[-2],), float("-inf"), dtype=sum_dtype(q.dtype), device=q.device)
            scores = dataclasses.replace(scores, peaks=lowest)
        heads = Heads(
            q.shape[-2],
            k.shape[-2],
            q.shape[-1],
            v.shape[-1],
            1 if eight else q.element_size(),
            1 if plan.is_packed else q.shape[0],
        )
        chosen = plan.chosen(heads, strategy)
        if eight is not None and rows:
            of_pieces = (plan.inside_host()[1], "ring") if chosen == "ulysses+ring" else (plan, chosen)
            eight = eight._replace(local_rows=quantise.block_rows_of(*of_pieces, rows))
        scores = dataclasses.replace(scores, eight=eight, heads_kv=k.shape[-2])
        if scores.has_own_rows and chosen.startswith("ulysses"):
            raise ValueError(
                f"bias has the rows of this rank's queries with strategy {chosen!r}; accepted: strategy 'gather', 'halo', "
                "'ring', or a bias of the whole"
            )
        runner: Strategy
        if chosen == "ulysses+ring":
            inside, between = plan.inside_host()
            runner = Ulysses(inside, scores, heads.q, heads.kv, between)
        elif chosen == "ulysses":
            runner = Ulysses(plan, scores, heads.q, heads.kv)
        else:
            runner = Ring(plan, scores) if chosen == "ring" else Gather(plan, chosen, scores)
        call = cls(runner, plan, (q, k, v), shared)
        call.qkv_format, call.return_lse, call.scores = fmt, wanted["return_lse"], scores
        call.of_plan = {
            "plan": plan.digest,
            "strategy": chosen,
            "heads, head dims, bytes of an element and batch": tuple(heads),
            "FP8": None if eight is None else (repr(eight.recipe), [tuple(t.shape) for t in of_given]),
            "return_max_logit": wanted["return_max_logit"],
        }
        return call

    def inputs(self) -> tuple[Tensor | None, ...]:
        *shared, descales, mod_tensors = self.shared
        return (*self.qkv, *shared, *(descales or (None,) * NUM_DESCALES), *mod_tensors)

    def summary(self) -> dict[str, Any]:
        """Returns what must be equal on all ranks; reads the numbers of tensors that all ranks have, which waits for the device."""
        scores, shared = self.scores, self.shared
        of_mods = [numbers_of(mod) for mod in (scores.score_mod, scores.mask_mod) if mod is not None]
        bias = None if scores.has_own_rows else shared.bias
        return self.of_plan | {
            "dtype": str(self.qkv[0].dtype),
            "qkv_format": self.qkv_format,
            "softmax and bias": (scores.softmax_scale, scores.softcap, scores.bias_type, scores.softmax_type),
            "dropout": (scores.dropout_p, shared.rng_state is None),
            "mods": (scores.score_mod is not None, scores.mask_mod is not None, len(shared.mod_tensors)),
            "gradients": tuple(bool(t.requires_grad) for t in self.inputs() if t is not None) if torch.is_grad_enabled() else (),
            "shapes of shared tensors": _shapes(self.inputs()[3:], scores.has_own_rows),
            "the numbers of rng_state": digest_of(shared.rng_state),
            "the numbers of bias": digest_of(bias),
            "the numbers of alibi_slopes": digest_of(shared.alibi_slopes),
            "the numbers of softmax_offset": digest_of(shared.softmax_offset),
            "the numbers of descales": [digest_of(t) for t in shared.descales],
            "the numbers of score_mod_tensors": [digest_of(t) for t in shared.mod_tensors],
            "the numbers that mods read": of_mods,
        }

    def run(self) -> Any:
        if self.scores.dropout_p > 0 and self.shared.rng_state is None:
            state = exchange.of_first_rank(new_rng_state(self.qkv[0].device), self.plan.group)
            self.shared = self.shared._replace(rng_state=state)
        inputs = [None if t is None else t.resolve_neg() for t in self.inputs()]  # as memory is sent
        with torch.autocast(self.qkv[0].device.type, enabled=False):
            out, lse, _ = _Attend.apply(self.runner, self.plan, *inputs)  # type: ignore[no-untyped-call]
        whole: Any = from_bshd(out, self.qkv_format).contiguous()
        eight = self.scores.eight
        if eight is not None and eight.recipe.out_dtype in validation.FP8_DTYPES:
            found = quantise.quantise_out(out.detach(), eight, self.plan)
            data = from_bshd(found.data, self.qkv_format).contiguous()
            whole = fp8.QuantizedTensor(data, found.descale, found.amax, whole if whole.requires_grad else None)
        results = [whole, *([lse] if self.return_lse else [])]
        if self.scores.peaks is not None:
            results.append(exchange.largest(self.scores.peaks, self.plan.group))
        return results[0] if len(results) == 1 else tuple(results)


def _with_blocks(plan: Plan, options: dict[str, Any]) -> None:
    """Puts the mask_mod of the plan's block mask among the options; raises ValueError where there is another one, or none."""
    blocks = plan.mask.blocks
    if blocks is None:
        return
    if options.get("mask_mod") is not None:
        raise ValueError("mask_mod is given with a block_mask, which has one of its own; accepted: one of the two")
    if blocks.mask_mod is None:
        raise ValueError(
            f"the plan was unpickled, without its block_mask's mask_mod; accepted: {' and '.join(plan.given)} given to the call too"
        )
    options["mask_mod"] = blocks.mask_mod


def _shapes(shared: Sequence[Tensor | None], has_own_rows: bool) -> tuple[Any, ...]:
    """Returns the shapes of the tensors that all ranks have, bias first, without the rows of this rank alone."""
    shapes = [None if t is None else tuple(t.shape) for t in shared]
    if has_own_rows and shapes[0] is not None:
        b, h, _, keys = shapes[0]
        return ((b, h, "own", keys), *shapes[1:])
    return tuple(shapes)


def check_options(options: dict[str, Any]) -> None:
    """Raises for an argument that is none of `attention`'s, or that cannot be split."""
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


def _scores(q: Tensor, plan: Plan, options: dict[str, Any]) -> tuple[Scores, Shared]:
    """Returns the arguments that mean the same on each part, and the tensors that all ranks have, checked against the whole."""
    heads, batch = q.shape[-2], len(plan.mask.lengths_q) if plan.is_packed else q.shape[0]
    bias_type, softmax_type = options.get("bias_type", "no_bias"), options.get("softmax_type", "vanilla")
    validation.check_name("bias_type", bias_type, BIAS_TYPES)
    validation.check_name("softmax_type", softmax_type, SOFTMAX_TYPES)
    validation.check_flag("deterministic", options.get("deterministic"), optional=True)
    numbers = (options.get(name, default) for name, default in (("softmax_scale", None), ("softcap", 0.0), ("dropout_p", 0.0)))
    scale, softcap, dropout_p = validation.check_scalars(*numbers)
    rng_state = options.get("rng_state")
    validation.check_rng_state(rng_state, q)
    bias, slopes, offset = (options.get(name) for name in ("bias", "alibi_slopes", "softmax_offset"))
    if plan.is_packed and bias is not None:
        raise ValueError("bias is given with a plan of documents; accepted: a score_mod that reads it at the documents' positions")
    own_rows = size_of(plan.q_runs[plan.rank])
    has_own_rows = (
        isinstance(bias, torch.Tensor) and bias.dim() == 4 and bias.shape[2] == own_rows and own_rows not in (1, plan.length)
    )
    validation.check_bias(bias_type, bias, q, (batch, heads, own_rows if has_own_rows else plan.length, plan.length_kv))
    validation.check_alibi_slopes(bias_type, slopes, q, batch, heads)
    validation.check_softmax_offset(softmax_type, offset, q, heads)
    if bias_type == "alibi" and slopes is None:
        slopes = default_alibi_slopes(heads, q)
    if softmax_type == "off-by-one":
        offset = torch.zeros(heads, dtype=torch.float32, device=q.device)
    blocks = plan.mask.blocks
    if blocks is not None:
        of_batch, of_heads = blocks.kinds.shape[:2]
        if of_batch not in (1, batch) or of_heads not in (1, heads):
            raise ValueError(
                f"block_mask is for batch {of_batch} and {of_heads} heads; accepted for this call: batch 1 or {batch}, 1 or "
                f"{heads} heads, of the whole"
            )
    score_mod, mask_mod, tensors = options.get("score_mod"), options.get("mask_mod"), options.get("score_mod_tensors", ())
    validation.check_mod_arguments(score_mod, mask_mod, tensors)
    for name, mod in (("score_mod", score_mod), ("mask_mod", mask_mod)):
        if mod is not None:
            _check_mod(name, mod, tensors if name == "score_mod" else (), (batch, heads, plan))
    names = tuple(tensors) if isinstance(tensors, Mapping) else None
    values = tuple(tensors.values() if isinstance(tensors, Mapping) else tensors)
    scores = Scores(
        softmax_scale=scale,
        softcap=softcap,
        score_mod=score_mod,
        mask_mod=mask_mod,
        tensor_names=names,
        bias_type=bias_type,
        softmax_type=softmax_type,
        deterministic=options.get("deterministic"),
        backend=options.get("backend"),
        has_own_rows=has_own_rows,
        dropout_p=dropout_p,
        heads=(0, heads),
    )
    return scores, Shared(bias, slopes, offset, rng_state if dropout_p > 0 else None, (), values)


def _check_mod(name: str, mod: Any, tensors: Any, sizes: tuple[int, int, Plan]) -> None:
    """Raises for a mod that cannot be split: with a gradient of its own, or with captured tensors that require one."""
    batch, heads, plan = sizes
    if getattr(mod, "score_mod_gradient", None) is not None:
        raise ValueError(f"{name} has a gradient of its own, which reads positions of a part; accepted: one that is derived")
    check_sizes = getattr(mod, "_flexattn_check_sizes", None)
    if check_sizes is not None:
        check_sizes(batch, heads, max(plan.mask.lengths_q), max(plan.mask.lengths_kv))
    if not torch.is_grad_enabled():
        return
    found = find_all_captures(name, mod, tensors)
    if found.key is None:
        raise ValueError(
            f"{name} reads tensors that cannot be known: {found.unkeyed}; accepted: a function whose captures are tensors, "
            "numbers, functions, or attributes of plain objects by their names"
        )
    for captured, t in found.tensors:
        if t.requires_grad:
            raise ValueError(
                f"{name} captures {captured}, which requires a gradient, of which each rank would have a part; accepted: tensors "
                "without one, and any in score_mod_tensors"
            )


def checked(q: Tensor, k: Tensor, v: Tensor, plan: Plan, strategy: str | None, options: dict[str, Any]) -> Checked:
    """Returns a call that is checked, on all ranks before anything is sent; raises what `attention` raises for its arguments."""
    error, call = None, None
    try:
        call = Checked.of(q, k, v, plan, strategy, options)
    except (TypeError, ValueError) as e:
        error = e
    group = getattr(plan, "group", None)
    if group is None:
        if error is not None:
            raise error
        raise ValueError("plan has no process group; accepted: one made of a group or a mesh, or plan.on(group)")
    if call is not None:
        capture.check(group, call.qkv[0].device)
    own = {} if call is None or not check_values() else call.summary()
    agreement.agree(group, "flexattn.distributed.attention", own, error)
    assert call is not None
    return call


class Forward(NamedTuple):
    """Results of a call, in the layout of bshd or thd, and what its backward begins from."""

    results: Results
    saved: tuple[Tensor, ...]
    descales: tuple[Tensor | None, ...]  # for q, k and v in FP8


def run_forward(runner: Strategy, plan: Plan, tensors: Sequence[Tensor | None]) -> Forward:
    """Runs a call; tensors: those of `Checked.inputs`."""
    q, k, v, bias, slopes, offset, rng_state, *rest = tensors
    assert q is not None
    assert k is not None
    assert v is not None
    eight = runner.scores.eight
    descales: tuple[Tensor | None, ...] = tuple(rest[:NUM_DESCALES])
    given = q, k, v
    if eight is not None and eight.config is not None:
        (q, descale_q, _), (k, descale_k, _), (v, descale_v, _) = quantise.quantise_qkv(q, k, v, eight, plan)
        descales = descale_q, descale_k, descale_v
    shared = Shared(bias, slopes, offset, rng_state, _present(descales), _present(rest[NUM_DESCALES:]))
    results, saved = runner.forward(q, k, v, shared)
    if eight is not None and eight.recipe.bf16_backward:
        saved = (*given, *saved[-2:])
    return Forward(results, saved, descales)


def resumed(runner: Strategy, plan: Plan, tensors: Sequence[Tensor | None], results: Results) -> Forward:
    """Returns what `run_forward` gave, from its arguments and results, without attending again: FP8 and heads are made anew."""
    q, k, v = (t for t in tensors[:3] if t is not None)
    eight = runner.scores.eight
    descales: tuple[Tensor | None, ...] = (None,) * NUM_DESCALES
    if eight is not None and eight.recipe.bf16_backward:
        return Forward(results, (q, k, v, *runner.gathered_results(results)), descales)
    if eight is not None:
        (q, descale_q, _), (k, descale_k, _), (v, descale_v, _) = quantise.quantise_qkv(q, k, v, eight, plan)
        descales = descale_q, descale_k, descale_v
    return Forward(results, (*runner.gathered(q, k, v), *runner.gathered_results(results)), descales)


def run_backward(
    runner: Strategy, plan: Plan, forward: Forward, shared_tensors: Sequence[Tensor | None], incoming: tuple[Tensor, Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Returns the gradients of `Checked.inputs`.

    shared_tensors: those behind q, k and v, which say whether they require a gradient. incoming: dout and dlse.
    """
    results, saved, descales = forward
    bias, slopes, offset, rng_state, *rest = shared_tensors
    shared = Shared(bias, slopes, offset, rng_state, _present(descales), _present(rest[NUM_DESCALES:]))
    seeds = Seeds(*incoming)
    eight = runner.scores.eight
    if eight is not None and eight.recipe.bf16_backward:
        runner = runner._replace(scores=dataclasses.replace(runner.scores, eight=None))
        saved, eight = (*runner.gathered(*saved[:3]), *saved[3:]), None
    elif eight is not None:
        found = quantise.quantise_dout(seeds.dout, eight, plan)
        if found is not None:
            seeds, shared = seeds._replace(dout8=found.data), shared._replace(descales=(*shared.descales, found.descale))
    sums = runner.backward(saved, seeds, shared)
    of_offset = None
    if offset is not None and offset.requires_grad:
        of_offset = offset_gradient(results, seeds, offset, plan.is_packed)
    of_bias, *of_mods = sums.shared
    dtype = seeds.dout.dtype
    dq, dk, dv = (sums.dq.to(dtype), sums.dk.to(dtype), sums.dv.to(dtype))
    if eight is not None and eight.recipe.rotation:
        dq, dk = quantise.unrotate(dq, dk)
    of_each = (of_bias, None, of_offset, None, *(None,) * NUM_DESCALES, *of_mods)
    of_shared = [
        None if total is None or t is None else total.to(t.dtype) for total, t in zip(of_each, shared_tensors, strict=True)
    ]
    return (dq, dk, dv, *of_shared)


def _stored(name: str, t: Tensor) -> Tensor:
    """Returns a contiguous tensor whose memory holds its values, as a collective sends that: no subclass, and not negated."""
    if type(t).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        t = t.clone()  # a plain tensor, if a collective is still to fill this one
    if type(t).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise TypeError(f"{name} is a {type(t).__name__}; accepted: a plain tensor, as that of to_local()")
    return t.resolve_neg().contiguous()


def _present(tensors: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    return tuple(t for t in tensors if t is not None)


class _Attend(torch.autograd.Function):
    """One node for a call: its collectives come in the same order on each rank, whatever the rank computes."""

    @staticmethod
    def forward(ctx: Any, runner: Strategy, plan: Plan, *tensors: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        results, saved, descales = run_forward(runner, plan, tensors)
        eight, scale_dout = runner.scores.eight, None
        if eight is not None and eight.state is not None and not eight.recipe.bf16_backward:
            scale_dout = eight.state.scale("dout")  # saved so that autograd tells where it is written to before the backward
        ctx.runner, ctx.plan, ctx.count, ctx.shape = runner, plan, len(saved), results.out.shape
        of_sink = tuple(results) if tensors[_OFFSET] is not None else (None, None)
        anchor = results.out.new_empty(0)  # an output that is saved first, as `first_order` wants it, in place of all of out
        ctx.save_for_backward(anchor, *saved, scale_dout, *of_sink, *descales, *tensors[3:])
        ctx.set_materialize_grads(False)
        return results.out, results.lse, anchor

    @staticmethod
    @first_order
    def backward(ctx: Any, given: Any, dout: Tensor | None, dlse: Tensor | None, _: None) -> tuple[Any, ...]:
        anchor, *tensors = given
        saved, (_, out, lse, *rest) = tuple(tensors[: ctx.count]), tensors[ctx.count :]
        descales, shared_tensors = tuple(rest[:NUM_DESCALES]), rest[NUM_DESCALES:]
        wanted = ctx.needs_input_grad[5:]
        leaves = [None if t is None else t.detach().requires_grad_(wants) for t, wants in zip(shared_tensors, wanted, strict=True)]
        refuse_batched(dout, dlse)  # before anything is sent
        dout = anchor.new_zeros(ctx.shape) if dout is None else _stored("the gradient of out", dout)
        incoming = dout, None if dlse is None else _stored("the gradient of lse", dlse)
        return None, None, *run_backward(ctx.runner, ctx.plan, Forward(Results(out, lse), saved, descales), leaves, incoming)
