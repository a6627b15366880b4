"""The fuzz draws every feature, and finds defects in shared memory, in modes, in FP8 and over ranks."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from itertools import count, islice
from typing import Any

import pytest
import torch
from torch import Tensor

import flexattn
from flexattn.dispatch import quantization, statistics
from flexattn.kernels_triton import families
from flexattn.kernels_triton.common.problem import Backward
from tests.fuzz import plans
from tests.fuzz.calls import Call
from tests.fuzz.check import ALL_DIMS, CALLS, EAGER, ON_GPU, check_by_name, config_of
from tests.fuzz.config import BLOCKS_OF_64, RARE_BACKWARDS, Config, draw_config, features, varied
from tests.fuzz.modes import attend
from tests.fuzz.run import ROOT, Plan, names, run, told
from tests.support.gluon_calls import without_gpu
from tests.support.guarded_memory import Allocations, guarded_allocations
from tests.support.hopper_fp8_calls import on_sm_90

ENOUGH = 60  # each defect shows among so many drawn calls of a kind


@pytest.fixture
def allocations() -> Iterator[Allocations]:
    with guarded_allocations() as found, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield found


def calls_of(kind: Callable[[Config], bool], skipped: int = 0) -> Iterator[str]:
    drawn = (f"{seed}.0" for seed in count(skipped))
    return (name for name in drawn if kind(config_of(EAGER, name)))


def is_found(allocations: Allocations, kind: Callable[[Config], bool]) -> bool:
    return any(is_wrong(allocations, name) for name in islice(calls_of(kind), ENOUGH))


def is_wrong(allocations: Allocations, name: str) -> bool:
    try:
        return bool(check_by_name(EAGER, name, allocations))
    except RuntimeError:  # a run takes it for a failure too
        return True


def plain(config: Config) -> bool:
    """Tells whether a call has no mode that is known for errors of its own."""
    return config.kind == "ordinary" and "default device" not in config.modes


def test_a_gpu_gets_all_head_dims_and_features() -> None:
    configs = [varied(draw_config(seed, ON_GPU), seed) for seed in range(3000)]
    assert {c.head_dim_qk for c in configs} == set(ALL_DIMS)
    assert {c.head_dim_v for c in configs} >= {dim for dim in ALL_DIMS if dim <= 512}
    assert all(c.head_dim_v <= 512 for c in configs)
    drawn = {f"{group}: {feature}" for c in configs for group, feature in features(c).items()}
    assert drawn >= {"mode: graph", "mode: inference", "memory: v in k", "moves: apart", "descales: tokens"}
    assert drawn >= {f"FP8: {how} in {dtype}" for how in ("keys", "all", "recipe") for dtype in ("float8_e4m3fn", "float8_e5m2")}
    assert {c.fp8_of for c in configs if c.page_size} == {"", "keys"}
    assert {c.head_dim_qk for c in configs if c.fp8_of == "keys"} == {dim for dim in ALL_DIMS if dim <= 256}
    assert {c.head_dim_qk for c in configs if c.fp8_of in ("all", "recipe")} == {
        dim for dim in ALL_DIMS if dim <= 256 and dim % 16 == 0
    }


@functools.cache
def drawn_configs() -> list[Config]:
    return [draw_config(seed, ON_GPU) for seed in range(4000)]


@pytest.mark.slow
@pytest.mark.sample
@without_gpu
@pytest.mark.parametrize("name", RARE_BACKWARDS)
def test_backwards_for_sm_90_that_few_calls_reach_are_drawn(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is reached, in a short call."""
    is_fp8, dims_qk, dims_v, repeats, takes_modified = RARE_BACKWARDS[name]

    def is_drawn(c: Config) -> bool:
        is_rare = c.hopper == "always" and c.wants == {"q", "k", "v"} and c.deterministic is repeats
        is_plain = not (c.bias_type != "no_bias" or c.score_mod or c.mask_mod or c.has_softcap or c.dropout_p)
        kind = c.recipe[0] == BLOCKS_OF_64 if is_fp8 else not c.fp8 and c.recipe[0] == BLOCKS_OF_64
        return is_rare and kind and bool(c.fp8) == is_fp8 and c.head_dim_qk in dims_qk and (is_plain or takes_modified)

    drawn = [c for c in drawn_configs() if is_drawn(c) and (is_fp8 or c.head_dim_v in dims_v)]
    assert len(drawn) > 10
    on_sm_90(monkeypatch)
    reached: list[str] = []
    right = families.choose

    def choose(call: Any, policy: Any) -> Any:
        is_backward = isinstance(call, Backward)
        if is_backward:
            reached.append(right(call, policy).family.name)
        portable = (families.BACKWARDS if is_backward else families.FORWARDS)[call.problem.is_fp8][-1]
        return families.Choice(portable, portable.tile(call), "", ())

    monkeypatch.setattr(families, "choose", choose)
    for c in drawn[:20]:
        where = c.where._replace(device="cpu")
        config = c._replace(
            where=where, longest=(70, 70), layouts={}, batch=1, heads_kv=1, group=1, is_offset=False, max_seqlen="longest"
        )
        calls = (Call(config, seed) for seed in range(40))
        call = next((x for x in calls if all(x.tensors[t].numel() > 64 * x.tensors[t].shape[-1] for t in "qkv")), None)
        if call is None:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            attend(call)
        if name in reached:
            break
    assert name in reached


@pytest.mark.parametrize("packing", ["k and v", "q, k and v", "v in k", "q is k is v"])
def test_tensors_share_a_memory_and_then_do_not(packing: str) -> None:
    wanted = (
        (name, call)
        for name in calls_of(lambda c: c.packing == packing and c.together == (True, False) and max(c.sets) > 0)
        for call in [Call(config_of(EAGER, name), int(name[:-2]) * CALLS)]
        if call.packing == packing and "pages_k" not in call.tensors and call.tensors["k"].numel() > 9
    )
    _, call = next(wanted)
    shared = "qkv" if packing in ("q, k and v", "q is k is v") else "kv"
    call.move(0)
    before = {name: call.tensors[name] for name in shared}
    assert len({t.untyped_storage().data_ptr() for t in before.values()}) == 1
    assert (len({t.data_ptr() for t in before.values()}) == 1) == (packing in ("v in k", "q is k is v"))
    call.move(1)
    after = {name: call.tensors[name] for name in shared}
    assert len({t.untyped_storage().data_ptr() for t in after.values()}) == len(shared)
    for name in shared:
        assert before[name].stride() == after[name].stride()
        assert torch.equal(before[name].double().nan_to_num(), after[name].double().nan_to_num())


def test_a_call_that_keeps_its_first_tensors_is_found(monkeypatch: pytest.MonkeyPatch, allocations: Allocations) -> None:
    right, first = flexattn.attention, dict[Any, Tensor]()

    def attention(**arguments: Any) -> Any:
        k = first.setdefault((arguments["q"].shape, arguments["k"].stride()), arguments["k"])
        return right(**arguments | {"k": k if k.shape == arguments["k"].shape else arguments["k"]})

    monkeypatch.setattr(flexattn, "attention", attention)
    assert is_found(allocations, lambda c: plain(c) and c.sets == (0, 0, 1) and not (c.wants or c.fp8 or c.mask_mod))


def test_a_value_that_is_kept_from_inference_mode_is_found(monkeypatch: pytest.MonkeyPatch, allocations: Allocations) -> None:
    right, kept = flexattn.attention, dict[Any, Tensor]()

    def attention(**arguments: Any) -> Any:
        q = arguments["q"]
        ones = kept.setdefault(q.dtype, torch.ones((), dtype=q.dtype, device=q.device))
        return right(**arguments | {"q": q * ones})

    monkeypatch.setattr(flexattn, "attention", attention)
    assert is_found(allocations, lambda c: plain(c) and c.modes[0] == "inference" != c.modes[2] and "q" in c.wants and not c.fp8)


@pytest.mark.slow
def test_a_descale_that_is_not_read_is_found(monkeypatch: pytest.MonkeyPatch, allocations: Allocations) -> None:
    right = quantization.dequantize_one
    monkeypatch.setattr(
        quantization, "dequantize_one", lambda data, descale, *others: right(data, descale.mean(1, keepdim=True), *others)
    )
    assert is_found(allocations, lambda c: plain(c) and c.fp8_of == "keys" and "heads" in c.descales[1:] and c.heads_kv > 1)
    assert is_found(allocations, lambda c: plain(c) and c.fp8_of == "all" and "heads" in c.descales and c.heads_kv > 1)


@pytest.mark.slow
def test_a_gradient_of_a_recipe_with_a_wrong_sign_is_found(monkeypatch: pytest.MonkeyPatch, allocations: Allocations) -> None:
    right = flexattn.attention
    monkeypatch.setattr(flexattn, "attention", lambda **given: right(**given | {"k": 2.0 * given["k"].detach() - given["k"]}))
    assert is_found(allocations, lambda c: plain(c) and c.fp8_of == "recipe" and "k" in c.wants and "out" in c.loss)


@pytest.mark.parametrize("name", ["max_scores", "entropy", "column_sums", "row_weights"])
def test_a_statistic_of_weights_with_a_wrong_digit_is_found(
    name: str, monkeypatch: pytest.MonkeyPatch, allocations: Allocations
) -> None:
    right = statistics.statistics

    def wrong(*call: Any) -> Any:
        found = right(*call)
        return found._replace(**{name: getattr(found, name) * (1.0 + 1e-3)})

    monkeypatch.setattr("flexattn.statistics.statistics", wrong)
    assert is_found(
        allocations, lambda c: plain(c) and not (c.extreme or c.is_second_order) and name.replace("row_weights", "rows") in c.aux
    )


def test_three_failures_end_a_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[dict[str, Any]] = []
    monkeypatch.setattr("tests.fuzz.run.check_by_name", lambda where, name, allocations: ["off"])

    def note(event: dict[str, Any]) -> None:
        events.append(event)
        if len(events) > 12:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(Plan(EAGER, 0, 60.0, 30), note)
    begun = [event["begins"] for event in events if "begins" in event]
    assert [name.split(".")[1] for name in begun[:6]] == ["0", "1", "2", "0", "1", "2"]


def test_a_failure_begins_with_the_error_that_led_to_it() -> None:
    def fails() -> None:
        try:
            try:
                raise ValueError("of the kernel\n\nK is 16")
            except ValueError as e:
                raise RuntimeError("at body(...)") from e
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    with pytest.raises(RuntimeError) as failed:
        fails()
    assert told(failed.value)[:2] == ["ValueError: of the kernel", "K is 16"]
    assert told(failed.value)[-1] == "RuntimeError: operation failed due to a previous error during capture"
    assert str(ROOT) not in "\n".join(told(failed.value))


def test_calls_of_a_configuration_differ_in_numbers_alone() -> None:
    """Nothing that decides which kernels are compiled: hundreds of calls share them."""
    where = ON_GPU._replace(without=frozenset({"sharing", "modes"}))
    kind = (c for c in (draw_config(seed, where) for seed in count()) if c.dropout_p and "any" in c.window and not c.mask)
    base = next(c for c in kind if not c.fp8)
    calls = [varied(base, seed) for seed in range(60)]
    assert len({c.dropout_p for c in calls}) == 4
    assert len({c.diagonal for c in calls}) == 3
    assert {c.has_scale for c in calls} == {False, True}
    for c in calls:
        assert [side == "open" for side in c.window] == [side == "open" for side in base.window]
        assert bool(c.dropout_p) == bool(base.dropout_p)
        assert (c.slopes == "none") == (base.slopes == "none")
        assert "lse" not in c.loss or c.return_lse


def test_triton_in_fp8_gets_blocks_that_it_takes() -> None:
    sizes = {c.block_mask for c in drawn_configs() if c.block_mask and c.fp8_of in ("all", "recipe")}
    assert sizes
    assert all(size % 32 == 0 for pair in sizes for size in pair)


def test_configurations_are_chosen_by_new_pairs() -> None:
    chosen = [int(name.split(".")[0]) for name in islice(names(Plan(EAGER, 40, 60.0, 1), float("inf")), 12)]
    assert [seed // 4 for seed in chosen] == list(range(10, 22))  # one in every four
    assert len({seed % 4 for seed in chosen}) > 1


@pytest.mark.parametrize("seed", [0, 9, 24])
def test_the_oracle_of_plans_is_one_process(seed: int) -> None:
    problem = plans.drawn(seed)[0]
    given = plans.calls.tensors_of(problem, torch.float64)
    one, own = plans.calls.results(problem, given, torch.float64, None), plans.expected(problem, given)
    for name, t in one.items():
        torch.testing.assert_close(t, own[name], rtol=0.0, atol=plans.WITHIN)


@pytest.mark.slow
def test_plans_over_ranks() -> None:
    lines = plans.run(20.0, 5, 2)
    assert len(lines) > 3
    assert [line for line in lines if line["wrong"]] == []


def test_results_over_pages_are_packed_only_if_pages_have_the_shape_of_q() -> None:
    config = config_of(ON_GPU, "4801005000011.145")
    call = Call(config._replace(where=config.where._replace(device="cpu")), 0)
    assert (config.results.packing, config.page_size) == ("3hd", 16)
    assert call.results.packing == ""
