"""Real cuDNN plans with a score_mod or a mask_mod, built without a GPU: calls that build, that do not, and that need no plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flexattn.dispatch import cudnn_backend
from flexattn.dispatch.spec import AttentionSpec, Direction, Operands
from flexattn.kernels_cudnn import lowering
from flexattn.kernels_cudnn.plans import PLANS, PlanCache
from tests.api.test_support import DIRECTIONS
from tests.cudnn.test_mods import LENGTHS
from tests.cudnn.test_plans import DEVICE, cudnns_answer, h200, loads_plans, nothing_kept  # noqa: F401  # two are fixtures
from tests.support.cudnn_mods import CALLS, CASES, SHAPES, WITH, Case, Shape, mods_call


def on_h200(case: Case, shape: Shape) -> tuple[AttentionSpec, Operands]:
    spec, x, _ = mods_call(case, shape, LENGTHS, "cpu")
    return spec._replace(device_type="cuda", capability=(9, 0)), x


def check(case: Case, shape: Shape, direction: Direction) -> None:
    """Checks our answer, and that cuDNN has a plan if we say yes."""
    spec, x = on_h200(case, shape)
    said = cudnn_backend.unsupported(spec, direction)
    if reason := case.refused or (case.backward_refused if direction == "backward" else ""):
        assert reason in str(said)
        return
    is_wrong = cudnn_backend._version() < cudnn_backend.RAGGED_WORKSPACE and "thd" in (spec.q_format, spec.kv_format)
    if is_wrong and direction == "backward":
        assert "TransformerEngine/issues/2186" in str(said)
        return
    assert said is None
    assert cudnns_answer(spec, x, direction) is None
    (plan,) = PLANS.inspect()
    assert plan.graph.selected_engine is None, "a kernel of the frontend's own stands in for cuDNN's"
    assert plan.sdpa.mods is not None


@pytest.mark.sample("name")
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", CASES)
def test_mods(name: str, direction: Direction) -> None:
    check(CASES[name], SHAPES["dense"], direction)


@pytest.mark.sample("call")
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("call", [*SHAPES, *CALLS])
def test_mods_with_the_rest(call: str, direction: Direction) -> None:
    check(CASES[WITH[0]], {**SHAPES, **CALLS}[call], direction)


def test_cudnn_itself_takes_no_third_value_for_each_query(monkeypatch: pytest.MonkeyPatch) -> None:
    from flexattn.dispatch import cudnn_mods

    monkeypatch.setattr(lowering, "ROWS", 3)
    cudnn_mods.lowered.cache_clear()
    spec, x = on_h200(CASES["three values for each query"], SHAPES["dense"])
    assert cudnn_backend.unsupported(spec, "backward") is None
    assert "cuDNN has no plan for it" in str(cudnns_answer(spec, x, "backward"))
    cudnn_mods.lowered.cache_clear()


def builds(score_mod: Any = None, mask_mod: Any = None, direction: Direction = "backward", **call: Any) -> tuple[int, int]:
    """(builds, hits) of the cache once this call is prepared too."""
    case = Case(lambda sq, skv, device: (score_mod, mask_mod))
    spec, x = on_h200(case, Shape("bshd", "equal", call))
    cudnn_backend.prepared_calls.clear()  # so that each call asks the cache
    assert cudnns_answer(spec, x, direction) is None
    return PLANS.counters.builds, PLANS.counters.hits


def capped(cap: Any) -> Any:
    return lambda score, b, h, i, j: cap * torch.tanh(score / cap)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_values_are_no_part_of_a_plan(direction: Direction) -> None:
    assert builds(capped(1.5), direction=direction) == (1, 0)
    assert builds(capped(2.5), direction=direction) == (1, 1), "another number"
    slopes = torch.rand(6)
    alibi = lambda slopes: lambda score, b, h, i, j: score - slopes[h] * (i - j).abs()  # noqa: E731
    assert builds(alibi(slopes), direction=direction) == (2, 1), "other code"
    assert builds(alibi(slopes * 2), direction=direction) == (2, 2), "another tensor"
    assert builds(alibi(slopes.to(torch.bfloat16)), direction=direction) == (2, 3), "of another dtype, which is read before"
    assert builds(lambda score, b, h, i, j: score * 1.5, direction=direction) == (3, 3)
    assert builds(lambda score, b, h, i, j: score * 2.5, direction=direction) == (3, 4), "another constant in the code"
    assert builds(lambda score, b, h, i, j: score + 1.5, direction=direction) == (4, 4), "another op"
    assert builds(lambda score, b, h, i, j: score * 1.5, lambda b, h, i, j: i >= j, direction) == (5, 4), "a mask too"
    assert builds(lambda score, b, h, i, j: score * 1.5, direction=direction, softmax_scale=0.3) == (5, 5)


def test_lengths_of_documents_are_no_part_of_a_plan() -> None:
    for step in range(3):
        ids = (torch.arange(150) // (40 + step)).to(torch.int32)
        found = builds(None, lambda b, h, i, j, ids=ids: ids[i] == ids[j])
        assert found == (1, step)


@loads_plans
def test_a_plan_with_mods_is_kept_on_disk(tmp_path: Path) -> None:
    spec, x = on_h200(CASES["softcap under a document mask"], SHAPES["lengths"])
    cudnn_backend.prepare(spec, x, "backward")
    (plan,) = PLANS.inspect()
    first, second = PlanCache(), PlanCache()
    built, loaded = (cache.get(plan.sdpa, DEVICE, str(tmp_path)) for cache in (first, second))
    assert (first.counters.builds, second.counters.builds, second.counters.loads) == (1, 0, 1)
    assert sorted(loaded.graph._variant_pack_uids()) == sorted(built.graph._variant_pack_uids())


def test_a_stream_of_shapes_stops_building_unless_a_table_is_read() -> None:
    table = torch.rand(400, 400)
    exact = cudnn_backend.EXACT_SHAPES
    for mod, expected in ((capped(2.0), exact + 1), (lambda score, b, h, i, j: score + table[i, j], exact + 4)):
        PLANS.clear()
        cudnn_backend.exact_shapes.clear()
        for step in range(exact + 4):
            case = Case(lambda sq, skv, device, mod=mod: (mod, None))
            shape = Shape("bshd", "these", {})
            lengths = {"these": ([130 + 8 * step] * 2, [130 + 8 * step] * 2)}
            spec, x, _ = mods_call(case, shape, lengths, "cpu")
            cudnn_backend.prepare(spec._replace(device_type="cuda", capability=(9, 0)), x, "forward")
        assert PLANS.counters.builds == expected


def test_a_gradient_of_a_bias_is_refused() -> None:
    bias = torch.zeros(1, 6, 133, 152)
    shape = Shape("bshd", "these", {"bias_type": "post_scale_bias", "bias": bias})
    spec, x, _ = mods_call(CASES["softcap"], shape, {"these": ([133] * 2, [152] * 2)}, "cpu")
    spec = spec._replace(device_type="cuda", capability=(9, 0))
    assert "no gradient of a bias" in str(cudnn_backend.unsupported(spec, "backward"))
    spec = spec._replace(needs_bias_grad=False)
    for direction in DIRECTIONS:
        assert cudnn_backend.unsupported(spec, direction) is None
        assert cudnns_answer(spec, x, direction) is None
