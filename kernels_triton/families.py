"""The kernel families as values, and the choice among them for one call.

A family is a set of kernels that run one direction of a call. It states whether it can run a call (`unsupported`), its tile, and
how it is launched. `common/crossovers.py` says whether it is faster than the families after it. `choose` tries the families for the
call's operands in order, and launches nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

from flexattn.kernels_triton.common import crossovers
from flexattn.kernels_triton.common.crossovers import SPLIT_PROGRAMS, Facts, Rule
from flexattn.kernels_triton.common.facts import facts_of
from flexattn.kernels_triton.common.problem import Backward, Forward, Problem
from flexattn.kernels_triton.common.split_kv import Splits, splits_of, tiles_and_room
from flexattn.kernels_triton.common.tiles import DKDV, DQ, FORWARD, HOPPER_BACKWARD_WIDE, ONE_GRID, QueryTile
from flexattn.kernels_triton.portable import forward as portable_forward
from flexattn.kernels_triton.runtime.device import Tile, capability_of, has_large_l2, num_processors, pretended_device

_NOT_SHOWN = "no run on such a GPU shows that it is faster"


def _kernels(name: str) -> ModuleType:
    """Returns a module of kernels. Some take a third of a second to import, so this happens only when a call needs them."""
    return importlib.import_module(f"flexattn.kernels_triton.{name}")


def _blocks(queries: int, keys: int) -> str:
    return f"{queries} queries x {keys} keys"


Call = TypeVar("Call", Forward, Backward)


@dataclass(frozen=True)
class Family(Generic[Call]):
    """Kernels that run one direction of a call."""

    direction: ClassVar[Literal["forward", "backward"]]

    name: str
    unsupported: Callable[[Call], str | None]  # the reason if they cannot run a call; None: they can
    tile: Callable[[Call], Any]  # the committed tile
    run: Callable[[Call, Any], None]  # launches them with a tile
    blocks: Callable[[Any], str] = lambda tile: _blocks(tile.block_m, tile.block_n)  # queries and keys of an iteration
    splits: Callable[[Call, Any], Splits] | None = None  # number of KV splits for few queries; None: always one
    facts: Callable[[Call], Facts] = lambda call: facts_of(call.problem)  # the columns of a call in `crossovers`
    rules: str = ""  # `use` of the rules in `crossovers`, if it is not the name
    capabilities: frozenset[int] = frozenset()  # compute capabilities that they are written for, such as 90; empty: any
    has_run: bool = True  # on a GPU, and faster there; if False, they run only on request
    fitted_tile: Callable[[Call], Any] = lambda call: None  # a tile that fits its head dims; None: there is none
    takes_any_band: bool = False  # whether they were tested with bands that do not contain their diagonal


class ForwardFamily(Family[Forward]):
    direction = "forward"


class BackwardFamily(Family[Backward]):
    direction = "backward"


_SM_90, _SM_100, _MMA_SYNC = frozenset((90,)), frozenset((100,)), frozenset((80, 86, 89, 120))


class Policy(NamedTuple):
    """Rules of a choice that do not depend on the call."""

    portable_only: str | None = None  # the reason why only the portable family may run; None: all may
    ignores_measurements: bool = False  # FLEXATTN_HOPPER=always: slower families may run too
    takes_what_never_ran: bool = False  # FLEXATTN_HOPPER=always: families that have never run on a GPU may run too


class Choice(NamedTuple):
    """The family that runs a call, and the reason."""

    family: Family[Any]
    tile: Any
    why: str
    rejected: tuple[tuple[str, str], ...]  # (name, reason) of each family that was tried before it
    rule: Rule | None = None  # the measurement behind it
    tile_rule: Rule | None = None  # and behind a tile that fits the head dims
    splits: Splits | None = None  # for an explanation of the choice

    @property
    def blocks(self) -> str:
        return self.family.blocks(self.tile)


def choose(call: Call, policy: Policy) -> Choice:
    """Returns the first family that can run a call and is not slower, in the order for its direction and operands."""
    is_sparse = call.problem.kv_indices is not None
    order: Sequence[Family[Any]]
    if is_sparse:
        order = SPARSE_FORWARDS if isinstance(call, Forward) else SPARSE_BACKWARDS
    else:
        order = (FORWARDS if isinstance(call, Forward) else BACKWARDS)[call.problem.is_fp8]
    rejected: list[tuple[str, str]] = []
    for family in order[:-1]:
        reason = policy.portable_only or _wrong_device(family, call.problem, policy)
        reason = reason or _beside_diagonal(call.problem, family) or family.unsupported(call)
        why, rule = "FLEXATTN_HOPPER=always" if family.has_run else f"FLEXATTN_HOPPER=always; {_NOT_SHOWN}", None
        if reason is None and family.has_run and not policy.ignores_measurements:
            use, facts = family.rules or family.name, family.facts(call)
            reason = crossovers.slower(use, facts)
            why, rule = "the fastest in benchmarks of such calls", crossovers.deciding(use, facts)
        if reason is None:
            tile, tile_rule = _tile(family, call, policy)
            return Choice(family, tile, why, tuple(rejected), rule, tile_rule)
        rejected.append((family.name, reason))
    portable = order[-1]
    why = "the kernels for lists of keys" if is_sparse else "the kernels for every GPU and every call"
    return Choice(portable, portable.tile(call), why, tuple(rejected))


def _tile(family: Family[Any], call: Any, policy: Policy) -> tuple[Any, Rule | None]:
    """Returns the tile, and the rule by which it is one that fits the head dims."""
    fitted = family.fitted_tile(call)
    if fitted is None:
        return family.tile(call), None
    rule = crossovers.deciding(f"{family.rules or family.name} fitted", family.facts(call))
    return fitted if policy.takes_what_never_ran or rule is not None else family.tile(call), rule


def _wrong_device(family: Family[Any], problem: Problem, policy: Policy) -> str | None:
    """Returns the reason if a family does not run on the problem's device, or not without a request; None: it does."""
    needed = family.capabilities
    if needed and capability_of(problem.device) not in needed:
        return f"compute capability {' or '.join(f'{n // 10}.{n % 10}' for n in sorted(needed))} is needed"
    return None if family.has_run or policy.takes_what_never_ran else f"{_NOT_SHOWN}; FLEXATTN_HOPPER=always runs it"


def _beside_diagonal(problem: Problem, family: Family[Any]) -> str | None:
    """Returns the reason if the band does not contain its diagonal and the family does not run such bands; otherwise None."""
    sides = (problem.window_left, problem.window_right)
    if family.takes_any_band or all(side is None or side >= 0 for side in sides):
        return None
    return "it was not tested with a window that ends before its diagonal"


def _unsupported_out(call: Forward) -> str | None:
    return "it writes out in 16 bits" if call.out.element_size() > max(2, call.problem.q.element_size()) else None


def _portable_splits(call: Forward, tile: Any) -> Splits:
    group = portable_forward.heads_of_a_tile(call.problem, tile, call.max_logit is not None)
    return splits_of(call.problem, *tiles_and_room(call.problem, tile, group, SPLIT_PROGRAMS))


PORTABLE_FORWARD = ForwardFamily(
    name="portable",
    unsupported=lambda call: None,
    tile=lambda call: call.problem.tile(FORWARD),
    run=lambda call, tile: portable_forward.attention_forward(call.problem, call.out, call.lse, call.max_logit, tile),
    splits=_portable_splits,
)


def fits_one_grid(problem: Problem) -> bool:
    """Returns whether one launch for all gradients was measured to be faster for such a backward."""
    return crossovers.fastest_tile("portable", facts_of(problem)) == "one_grid"


def _run_portable_backward(call: Backward, tile: Any) -> None:
    # imported here, so that a forward does not wait for it
    from flexattn.kernels_triton.portable.backward import attention_backward

    dq_tile, dkdv_tile, one_grid = tile
    attention_backward(_with_key_lists(_with_dout(call)), dq_tile, dkdv_tile, one_grid=one_grid)


def _with_dout(call: Backward) -> Backward:
    """Returns the call with dout in FP8; if dout is not quantised yet, a separate pass does it."""
    x = call.problem
    if not x.dout_is_to_come:
        return call
    from flexattn.kernels_triton.common.quantize import Source, quantize

    sizes = x.descales[3].shape
    source = Source(
        x=x.copies16[0],
        data=call.dout,
        cu_seqlens=x.cu_seqlens_q,
        cu_seqlens_padded=x.cu_seqlens_q_padded,
        max_seqlen=x.max_seqlen_q,
        sizes=(sizes[0], sizes[1], sizes[2]),
    )
    (descale,), _ = quantize([source], x.scale_rows, 0)
    return call._replace(problem=replace(x, descales=(*x.descales[:3], descale), dout_is_to_come=False))


def _portable_backward_tiles(call: Backward) -> tuple[Tile, Tile, bool]:
    """Returns the tiles of dq and of dk and dv, and whether one launch computes both."""
    x = call.problem
    return (ONE_GRID, ONE_GRID, True) if fits_one_grid(x) else (x.tile(DQ), x.tile(DKDV), False)


def _portable_backward_blocks(tiles: tuple[Tile, Tile, bool]) -> str:
    dq, dkdv, is_one_grid = tiles
    text = f"dq {_blocks(dq.block_m, dq.block_n)}, dk and dv {_blocks(dkdv.block_m, dkdv.block_n)}"
    return f"{text}, in one launch" if is_one_grid else text


PORTABLE_BACKWARD = BackwardFamily(
    name="portable",
    unsupported=lambda call: None,
    tile=_portable_backward_tiles,
    blocks=_portable_backward_blocks,
    run=_run_portable_backward,
)


def _gluon_splits(call: Forward, tile: QueryTile, module: str = "gluon.conditions", programs: int = 1) -> Splits:
    group = _kernels(module).heads_of_a_tile(call.problem, tile)
    return splits_of(call.problem, *tiles_and_room(call.problem, tile, group, programs))


HOPPER_FEW_KEYS = ForwardFamily(
    name="sm_90 few keys",
    takes_any_band=True,
    unsupported=lambda call: _kernels("hopper.conditions").few_keys_unsupported(call.problem, call.out),
    tile=lambda call: _kernels("hopper.conditions").few_keys_tile(call.problem),
    run=lambda call, tile: _kernels("hopper.few_keys").few_keys_forward(call.problem, call.out, call.lse, call.max_logit, tile),
    capabilities=_SM_90,
)

HOPPER_FORWARD = ForwardFamily(
    name="sm_90",
    takes_any_band=True,
    unsupported=lambda call: _kernels("hopper.conditions").forward_unsupported(call.problem, call.out),
    tile=lambda call: _kernels("hopper.conditions").forward_tile(call.problem),
    run=lambda call, tile: _kernels("hopper.forward").hopper_forward(call.problem, call.out, call.lse, call.max_logit, tile),
    splits=_gluon_splits,
    facts=lambda call: _kernels("hopper.conditions").forward_facts(call.problem),
    capabilities=_SM_90,
    fitted_tile=lambda call: _kernels("hopper.conditions").fitted_forward_tile(call.problem),
)


HOPPER_WIDE_FORWARD = ForwardFamily(
    name="sm_90 wide",
    unsupported=lambda call: _kernels("hopper.conditions").wide_unsupported(call.problem, call.out, call.max_logit is not None),
    tile=lambda call: _kernels("hopper.conditions").wide_tile(call.problem),
    run=lambda call, tile: _kernels("hopper.wide_forward").wide_forward(call.problem, call.out, call.lse, tile),
    splits=_gluon_splits,
    capabilities=_SM_90,
)


def _unsupported_by_fp8_cache(call: Forward) -> str | None:
    if not call.problem.descales_kv:  # checked here, so that most calls do not wait for the import
        return "it needs k and v in FP8 with q in 16 bits"
    reason: str | None = _kernels("hopper.fp8_cache").unsupported(call.problem, call.out, call.max_logit is not None)
    return _unsupported_out(call) or reason


HOPPER_FP8_CACHE = ForwardFamily(
    name="sm_90 FP8 cache",
    unsupported=_unsupported_by_fp8_cache,
    tile=lambda call: _kernels("hopper.fp8_cache").tile_of(call.problem),
    run=lambda call, tile: _kernels("hopper.fp8_cache").fp8_cache_forward(call.problem, call.out, call.lse, tile),
    splits=lambda call, tile: _gluon_splits(call, tile, "hopper.fp8_cache", _kernels("hopper.fp8_cache").programs_of(tile)),
    capabilities=_SM_90,
)


def _run_fp8_forward(call: Forward, tile: Any) -> None:
    from flexattn.kernels_triton.gluon.descales import scales_of
    from flexattn.kernels_triton.hopper.fp8 import empty_transposed
    from flexattn.kernels_triton.hopper.fp8_forward import hopper_fp8_forward
    from flexattn.kernels_triton.hopper.fp8_passes import transpose

    x = call.problem
    scale_q, scale_k, scale_v, *_ = scales_of(x)
    v_transposed = empty_transposed(x.v, x.batch)
    transpose(x, "kv", x.v, v_transposed)
    hopper_fp8_forward(x, v_transposed, (scale_q, scale_k, scale_v), call.out, call.lse, tile)


HOPPER_FP8_FORWARD = ForwardFamily(
    name="sm_90 FP8",
    unsupported=lambda call: (
        _unsupported_out(call) or _kernels("hopper.fp8_forward").unsupported(call.problem, call.out, call.max_logit is not None)
    ),
    tile=lambda call: _kernels("hopper.fp8_forward").tile_of(call.problem),
    run=_run_fp8_forward,
    capabilities=_SM_90,
)


BLACKWELL_FORWARD = ForwardFamily(
    name="sm_100",
    takes_any_band=True,
    unsupported=lambda call: _unsupported_out(call) or _kernels("blackwell.conditions").forward_unsupported(call.problem, call.out),
    tile=lambda call: _kernels("blackwell.conditions").forward_tile(call.problem),
    run=lambda call, tile: _kernels("blackwell.forward").blackwell_forward(call.problem, call.out, call.lse, call.max_logit, tile),
    splits=_gluon_splits,
    capabilities=_SM_100,
    has_run=False,
)


MMA_FORWARD = ForwardFamily(
    name="mma.sync",
    takes_any_band=True,
    unsupported=lambda call: _kernels("mma.conditions").forward_unsupported(call.problem, call.out),
    tile=lambda call: _kernels("mma.tiles").forward_tile(call.problem),
    run=lambda call, tile: _kernels("mma.forward").mma_forward(call.problem, call.out, call.lse, call.max_logit, tile),
    splits=lambda call, tile: _gluon_splits(call, tile, programs=SPLIT_PROGRAMS),
    capabilities=_MMA_SYNC,
)


MMA_FP8_FORWARD = replace(
    MMA_FORWARD,
    name="mma.sync FP8",
    takes_any_band=True,
    unsupported=lambda call: _kernels("mma.conditions").fp8_forward_unsupported(call.problem, call.out, call.max_logit is not None),
    capabilities=frozenset((89, 120)),
)


def _unsupported_if_repeated(call: Backward) -> str | None:
    return "its dq is not deterministic" if call.deterministic else None


def _unsupported_in_fp32(call: Backward) -> str | None:
    return "it writes dk and dv in 16 bits" if call.dk.element_size() == 4 else None


def _unsupported_by(name: str, *others: Callable[[Backward], str | None]) -> Callable[[Backward], str | None]:
    """Returns the rules of backwards whose gradients have descriptors: `others`, then the function `module.name` of kernels."""
    module, _, function = name.rpartition(".")

    def unsupported(call: Backward) -> str | None:
        gradients = (("dq", call.dq), ("dk", call.dk), ("dv", call.dv))
        return (
            next(filter(None, (other(call) for other in others)), None)
            or getattr(_kernels(module), function)(call.problem, call.out, call.dout)
            or next(filter(None, (_kernels("gluon.descriptors").descriptor_error(*each) for each in gradients)), None)
        )

    return unsupported


def _unsupported_in_fp8(call: Backward) -> str | None:
    is_reached = call.dbias is not None or len(call.dcaptures) > 0
    return "gradients of a bias and of captures need values that only the portable backward writes" if is_reached else None


def _run_backward(launcher: Callable[..., None], call: Backward, tile: object) -> None:
    from flexattn.kernels_triton.portable.score_gradients import bias_and_capture_gradients

    launcher(call, tile)
    bias_and_capture_gradients(call)


def _with_key_lists(call: Backward) -> Backward:
    if call.problem.block_mask is None:
        return call
    from flexattn.kernels_triton.mods.mask_blocks import with_key_lists  # imported here, because most calls do not need it

    return call._replace(problem=with_key_lists(call.problem))


def _blocks_of_fused(tile: Any) -> str:
    return _blocks(tile.queries, _kernels("gluon.conditions").KEYS)


def _blocks_of_two_kernels(tile: Any) -> str:
    return f"dq {tile.block_n} keys, dk and dv {_blocks(tile.block_m, tile.keys)}"


HOPPER_FUSED = BackwardFamily(
    name="sm_90 fused",
    takes_any_band=True,
    unsupported=_unsupported_by("hopper.conditions.fused_unsupported", _unsupported_if_repeated),
    tile=lambda call: _kernels("hopper.conditions").fused_tile(call.problem),
    blocks=_blocks_of_fused,
    run=lambda call, tile: _run_backward(_kernels("hopper.backward_fused").fused_backward, call, tile),
    capabilities=_SM_90,
    fitted_tile=lambda call: _kernels("hopper.conditions").fitted_fused_tile(call.problem),
)

HOPPER_FUSED_192 = BackwardFamily(
    name="sm_90 fused 192",
    takes_any_band=True,
    unsupported=_unsupported_by("hopper.conditions.fused_192_unsupported", _unsupported_if_repeated),
    tile=lambda call: _kernels("hopper.conditions").fused_192_tile(call.problem),
    blocks=_blocks_of_fused,
    run=lambda call, tile: _run_backward(_kernels("hopper.backward_fused_192").fused_192_backward, call, tile),
    capabilities=_SM_90,
)

BLACKWELL_FUSED = BackwardFamily(
    name="sm_100 fused",
    takes_any_band=True,
    unsupported=_unsupported_by("blackwell.conditions.backward_unsupported", _unsupported_if_repeated, _unsupported_in_fp32),
    tile=lambda call: _kernels("blackwell.conditions").backward_tile(call.problem),
    run=lambda call, tile: _run_backward(_kernels("blackwell.backward").blackwell_backward, call, tile),
    capabilities=_SM_100,
    has_run=False,
)

MMA_FUSED = BackwardFamily(
    name="mma.sync fused",
    takes_any_band=True,
    unsupported=lambda call: _kernels("mma.conditions").backward_unsupported(call),
    tile=lambda call: _kernels("mma.tiles").backward_tile(call.problem),
    run=lambda call, tile: _run_backward(_kernels("mma.backward").mma_backward, call, tile),
    capabilities=_MMA_SYNC,
)

MMA_TWO_KERNELS = BackwardFamily(
    name="mma.sync two-kernel",
    takes_any_band=True,
    unsupported=lambda call: _kernels("mma.conditions").two_kernels_unsupported(call),
    tile=lambda call: (_kernels("mma.tiles").dq_tile(call.problem), _kernels("mma.tiles").backward_tile(call.problem)),
    blocks=lambda tiles: (
        f"dq {_blocks(tiles[0].block_m, tiles[0].block_n)}, dk and dv {_blocks(tiles[1].block_m, tiles[1].block_n)}"
    ),
    run=lambda call, tiles: _run_backward(_kernels("mma.backward_dq").mma_two_kernel_backward, _with_key_lists(call), tiles),
    capabilities=_MMA_SYNC,
)

HOPPER_TWO_KERNELS = BackwardFamily(
    name="sm_90 two-kernel",
    takes_any_band=True,
    unsupported=_unsupported_by("hopper.conditions.backward_unsupported"),
    tile=lambda call: _kernels("hopper.conditions").backward_tile(call.problem),
    blocks=_blocks_of_two_kernels,
    run=lambda call, tile: _run_backward(_kernels("hopper.backward").hopper_backward, _with_key_lists(call), tile),
    capabilities=_SM_90,
)

HOPPER_WIDE_BACKWARD = BackwardFamily(
    name="sm_90 wide two-kernel",
    takes_any_band=True,
    unsupported=_unsupported_by("hopper.conditions.wide_backward_unsupported"),
    tile=lambda call: HOPPER_BACKWARD_WIDE,
    blocks=_blocks_of_two_kernels,
    run=lambda call, tile: _run_backward(_kernels("hopper.backward_wide").wide_backward, _with_key_lists(call), tile),
    capabilities=_SM_90,
)

HOPPER_FP8_FUSED = BackwardFamily(
    name="sm_90 FP8 fused",
    unsupported=_unsupported_by("hopper.fp8_backward_fused.unsupported", _unsupported_in_fp8, _unsupported_if_repeated),
    tile=lambda call: _kernels("hopper.fp8_backward_fused").tile_of(call.problem),
    blocks=_blocks_of_fused,
    run=lambda call, tile: _run_backward(_kernels("hopper.fp8_backward_fused").fp8_fused_backward, call, tile),
    rules="sm_90 fused",  # faster if the 16-bit kernel is, because that one needs a dequantisation first
    capabilities=_SM_90,
)

HOPPER_FP8_TWO_KERNELS = BackwardFamily(
    name="sm_90 FP8 two-kernel",
    unsupported=_unsupported_by("hopper.fp8_backward.unsupported", _unsupported_in_fp8),
    tile=lambda call: _kernels("hopper.fp8_backward").tile_of(call.problem),
    blocks=_blocks_of_two_kernels,
    run=lambda call, tile: _run_backward(_kernels("hopper.fp8_backward").fp8_backward, _with_key_lists(call), tile),
    rules="sm_90 two-kernel",
    capabilities=_SM_90,
)


def _heads_and_keys(tile: Tile) -> str:
    return f"{tile.block_m} heads x {tile.block_n} keys"


SPARSE_FORWARD = ForwardFamily(
    name="sparse",
    unsupported=lambda call: None,
    tile=lambda call: _kernels("sparse.tiles").forward_tile(call.problem),
    blocks=_heads_and_keys,
    run=lambda call, tile: _kernels("sparse.forward").sparse_forward(call.problem, call.out, call.lse, tile),
    splits=lambda call, tile: _kernels("sparse.forward").num_splits(call.problem, tile),
)


HOPPER_SPARSE_LATENT = ForwardFamily(
    name="sm_90 sparse latent",
    takes_any_band=True,
    unsupported=lambda call: _unsupported_out(call) or _kernels("sparse.conditions").wide_unsupported(call.problem),
    tile=lambda call: _kernels("sparse.conditions").wide_tile(call.problem),
    blocks=_heads_and_keys,
    run=lambda call, tile: _kernels("sparse.hopper_wide_forward").wide_forward(call.problem, call.out, call.lse, tile),
    capabilities=_SM_90,
)


SPARSE_BLOCK_FORWARD = ForwardFamily(
    name="sparse by block",
    takes_any_band=True,
    unsupported=lambda call: _unsupported_out(call) or _kernels("sparse.conditions").block_unsupported(call.problem),
    tile=lambda call: _kernels("sparse.tiles").block_forward_tile(call.problem),
    run=lambda call, tile: _kernels("sparse.block_forward").block_forward(call.problem, call.out, call.lse, tile),
)


SPARSE_FORWARDS: tuple[Family[Forward], ...] = (HOPPER_SPARSE_LATENT, SPARSE_BLOCK_FORWARD, SPARSE_FORWARD)
"""Families for lists of keys, in the order of the choice."""


SPARSE_BACKWARD = BackwardFamily(
    name="sparse",
    unsupported=lambda call: None,
    tile=lambda call: _kernels("sparse.tiles").backward_tile(call.problem),
    blocks=_heads_and_keys,
    run=lambda call, tile: _kernels("sparse.backward").sparse_backward(call, tile),
)


SPARSE_BLOCK_BACKWARD = BackwardFamily(
    name="sparse by block",
    takes_any_band=True,
    unsupported=lambda call: _kernels("sparse.conditions").block_unsupported(call.problem),
    tile=lambda call: _kernels("sparse.tiles").block_backward_tile(call.problem),
    run=lambda call, tile: _kernels("sparse.block_backward").block_backward(call, tile),
)


SPARSE_BACKWARDS: tuple[Family[Backward], ...] = (SPARSE_BLOCK_BACKWARD, SPARSE_BACKWARD)


def _dequantized(family: Family[Backward]) -> Family[Backward]:
    """Runs a 16-bit family on dequantised FP8 operands."""

    def evaluate(question: Callable[[Backward], object], call: Backward) -> Any:
        """Calls a family's function with the 16-bit call, on meta tensors."""
        x = call.problem
        problem, dout = _kernels("hopper.fp8_backward_operands").in_16_bits(x, call.dout, call.out.dtype, "meta")
        with pretended_device(capability_of(x.device), num_processors(x.device), has_large_l2=has_large_l2(x.device)):
            return question(call._replace(problem=problem, dout=dout))

    def run(call: Backward, tile: Any) -> None:
        kernels = _kernels("hopper.fp8_backward_operands")
        problem, dout = kernels.in_16_bits(call.problem, call.dout, call.out.dtype)
        kernels.fill_16_bits(call.problem, call.dout, problem, dout)
        family.run(call._replace(problem=problem, dout=dout), tile)

    return replace(
        family,
        name=f"{family.name}, dequantized",
        takes_any_band=False,
        unsupported=lambda call: _unsupported_in_fp8(call) or evaluate(family.unsupported, call),
        tile=lambda call: evaluate(family.tile, call),
        fitted_tile=lambda call: evaluate(family.fitted_tile, call),
        facts=lambda call: evaluate(family.facts, call),
        rules=family.rules or family.name,
        run=run,
    )


# In the order of the choice, by whether q, k and v are in FP8. The portable family runs all calls that the others do not.
FORWARDS: dict[bool, tuple[Family[Forward], ...]] = {
    False: (
        *(HOPPER_FEW_KEYS, HOPPER_FORWARD, HOPPER_WIDE_FORWARD, HOPPER_FP8_CACHE),
        *(BLACKWELL_FORWARD, MMA_FORWARD, PORTABLE_FORWARD),
    ),
    True: (HOPPER_FP8_FORWARD, MMA_FP8_FORWARD, PORTABLE_FORWARD),
}
BACKWARDS: dict[bool, tuple[Family[Backward], ...]] = {
    False: (
        *(HOPPER_FUSED, HOPPER_FUSED_192, HOPPER_TWO_KERNELS, HOPPER_WIDE_BACKWARD),
        *(BLACKWELL_FUSED, MMA_FUSED, MMA_TWO_KERNELS, PORTABLE_BACKWARD),
    ),
    True: (
        HOPPER_FP8_FUSED,
        HOPPER_FP8_TWO_KERNELS,
        _dequantized(HOPPER_FUSED),
        _dequantized(HOPPER_FUSED_192),
        _dequantized(HOPPER_TWO_KERNELS),
        _dequantized(MMA_FUSED),
        PORTABLE_BACKWARD,
    ),
}
