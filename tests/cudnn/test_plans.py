"""Real cuDNN plans for sm_90, built without a GPU: calls that build or do not, the number of builds, and kept plans."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.api.test_support import DIRECTIONS, ROWS, Row, cudnn_call, on_h200, refusal
from tests.support import cudnn_stub

if reason := ("a GPU is here: tests/gpu/test_cudnn.py builds plans for it" if torch.cuda.is_available() else cudnn_stub.missing()):
    pytest.skip(reason, allow_module_level=True)

import cudnn

from flexattn.build_ahead import explain_built
from flexattn.dispatch import cudnn_backend
from flexattn.dispatch.explain import explain
from flexattn.dispatch.select import RuntimeFailure
from flexattn.dispatch.spec import AttentionSpec, Direction, Operands
from flexattn.kernels_cudnn import plans
from flexattn.kernels_cudnn.graphs import Sdpa, build
from flexattn.kernels_cudnn.plans import PLANS, PlanCache, PlanNotSupported, target_of
from flexattn.testing import make_call, make_inputs

DEVICE = torch.device("cpu")  # plans are for the H200 that `without_device` describes, wherever tensors are


@pytest.fixture(scope="module", autouse=True)
def h200() -> Iterator[None]:
    cudnn_stub.load()
    with plans.without_device(cudnn_stub.H200):
        yield


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("FLEXATTN_PLANS", raising=False)
    forget()
    yield
    forget()


def forget() -> None:
    PLANS.clear()
    cudnn_backend.exact_shapes.clear()
    cudnn_backend.prepared_calls.clear()


def call_of(fmt: str = "bshd", *, inputs: dict[str, Any] | None = None, **call: Any) -> tuple[AttentionSpec, Operands]:
    """A bfloat16 call as the operators would make it on an H200."""
    defaults = {"lengths_q": [200, 200], "num_heads": 8, "head_dim_qk": 64, "head_dim_v": 64, "dtype": torch.bfloat16}
    spec, x = make_call(make_inputs(fmt, **(defaults | (inputs or {}))), **({"return_max_logit": False} | call))
    return on_h200(spec, x), x


def cudnns_answer(spec: AttentionSpec, x: Operands, direction: Direction) -> str | None:
    """Returns cuDNN's answer about the plan, whatever our rules say."""
    try:
        cudnn_backend.prepare(spec, x, direction)
    except RuntimeFailure as e:
        return str(e)
    return None


# The first direction of a row runs by default: backward for every other row.
SUPPORTED = [
    pytest.param(row, direction, id=f"{name}-{direction}")
    for n, (name, row) in enumerate((name, row) for section in ROWS.values() for name, row in section.items())
    for direction in DIRECTIONS[:: -1 if n % 2 else 1]
    if refusal("cudnn", row, direction, cudnn.backend_version()) is None
]


@pytest.mark.sample("row")
@pytest.mark.parametrize(("row", "direction"), SUPPORTED)
def test_every_supported_row_builds(row: Row, direction: Direction) -> None:
    spec, operands = cudnn_call(row, direction)
    assert cudnn_backend.unsupported(spec, direction) is None
    assert cudnns_answer(spec, operands, direction) is None
    (plan,) = PLANS.inspect()
    assert plan.graph.selected_engine is None, "a kernel of the frontend's own stands in for cuDNN's"
    assert plan.sdpa.direction == direction


ZERO_BIAS = torch.zeros(1, 8, 200, 200)
SINK = {"softmax_type": "learnable", "softmax_offset": torch.zeros(8)}
DROPOUT = {"dropout_p": 0.25, "rng_state": torch.zeros(2, dtype=torch.int64)}

# Refused calls: (direction, the call, our reason, the first cuDNN with a plan for it all the same if our reason is another).
NEVER, ALWAYS = 0, 10**9  # declined by cuDNN itself
REFUSED: dict[str, tuple[Direction, dict[str, Any], str, int]] = {
    "head dim above 512": ("forward", {"inputs": {"head_dim_qk": 520, "head_dim_v": 520}}, "up to 512", NEVER),
    "head dim above 256": ("backward", {"inputs": {"head_dim_qk": 264, "head_dim_v": 264}}, "up to 256", ALWAYS),
    "head dim no multiple of 8": ("forward", {"inputs": {"head_dim_qk": 12, "head_dim_v": 12}}, "multiples of 8", ALWAYS),
    "float32 backward": ("backward", {"inputs": {"dtype": torch.float32}}, "fp16 and bf16", ALWAYS),
    "float32 forward": ("forward", {"inputs": {"dtype": torch.float32}}, "fp16 and bf16", NEVER),
    "one key": ("forward", {"inputs": {"lengths_kv": [1, 1]}}, "single key", NEVER),
    "one query": ("backward", {"inputs": {"lengths_q": [1, 1], "lengths_kv": [200, 200]}}, "single query", NEVER),
    "sink with one query": ("forward", {"inputs": {"lengths_q": [1, 1], "lengths_kv": [200, 200]}, **SINK}, "single query", ALWAYS),
    "sink and max_logit": ("forward", {**SINK, "return_max_logit": True}, "max_logit with a sink", 92100),
    "sink over packed sequences": ("backward", {"fmt": "thd", **SINK}, "TransformerEngine/issues/3249", NEVER),
    "dropout, bottom right": ("forward", {"attn_mask_type": "causal_bottom_right", **DROPOUT}, "bottom-right", ALWAYS),
    "dropout over packed sequences": ("forward", {"fmt": "thd", **DROPOUT}, "dropout over packed", NEVER),
    "dropout not in sixteenths": ("forward", {**DROPOUT, "dropout_p": 0.1}, "pytorch/issues/174245", NEVER),
    "bias, bottom right": (
        "forward",
        {"attn_mask_type": "causal_bottom_right", "bias_type": "post_scale_bias", "bias": ZERO_BIAS},
        "bottom-right",
        ALWAYS,
    ),
    "bias over packed sequences": (
        "forward",
        {"fmt": "thd", "bias_type": "post_scale_bias", "bias": ZERO_BIAS},
        "bias over packed",
        ALWAYS,  # not for its own lengths, but in a plan for rounded-up ones, which a bias does not have
    ),
    "bias over no keys": (
        "forward",
        {"bias_type": "post_scale_bias", "bias": ZERO_BIAS[..., :1]},
        "broadcast over the keys",
        NEVER,
    ),
    "backward of a bias over no queries": (
        "backward",
        {"bias_type": "post_scale_bias", "bias": ZERO_BIAS[:, :, :1]},
        "broadcast over the queries",
        NEVER,
    ),
    "wide and uneven head dims": ("backward", {"inputs": {"head_dim_qk": 256, "head_dim_v": 128}}, "128 or more and differ", NEVER),
}

RIGHT_FROM = {"sink over packed sequences": 92600}
"""The first cuDNN for which a call above is not refused, as its kernel is right."""


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_why_and_cudnns_answer_is_known(name: str) -> None:
    direction, call, reason, builds_from = REFUSED[name]
    spec, x = call_of(**call)
    if cudnn.backend_version() < RIGHT_FROM.get(name, ALWAYS):
        assert reason in str(cudnn_backend.unsupported(spec, direction))
    else:
        assert cudnn_backend.unsupported(spec, direction) is None
    assert (cudnns_answer(spec, x, direction) is not None) == (cudnn.backend_version() < builds_from)


def test_every_rule_is_tried_here_or_has_no_graph() -> None:
    """A rule without a row above covers calls that no graph can express, so cuDNN cannot be asked."""
    unsayable = {"softcap": {"softcap": 5.0}, "alibi": {"bias_type": "alibi"}, "pre-scale": {"bias_type": "pre_scale_bias"}}
    for call in unsayable.values():
        spec, _ = call_of(**call)
        assert cudnn_backend.unsupported(spec, "forward") is not None


def test_the_deterministic_backward_would_be_quadratic() -> None:
    spec, _ = call_of(deterministic=True)
    assert "quadratic" in str(cudnn_backend.unsupported(spec, "backward"))
    sizes = {}
    for length in (2048, 4096):
        spec, x = call_of(inputs={"lengths_q": [length], "num_heads": 1, "num_heads_kv": 1})
        cudnn_backend.prepare(spec, x, "backward")
        (plan,) = PLANS.inspect()
        for deterministic in (False, True):
            sdpa = plan.sdpa._replace(deterministic=deterministic)
            sizes[deterministic, length] = build(sdpa, target_of(DEVICE)).get_workspace_size()
        forget()
    assert sizes[False, 4096] < 2.5 * sizes[False, 2048]
    if cudnn.backend_version() < 92500:
        assert sizes[True, 4096] >= 4096 * 4096 * 2


def test_a_build_that_our_rules_exclude_is_never_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """One query, key and head end the process in cuDNN 9.26 (cudnn-frontend issue 1071)."""
    import flexattn
    from flexattn import ops

    monkeypatch.setattr(plans, "build", lambda *args: pytest.fail("a graph was built"))
    monkeypatch.setattr(ops, "spec_to_run", lambda x, settings: on_h200(ops.make_spec(x, settings, (9, 0)), x))
    q = torch.randn(1, 1, 1, 64, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(flexattn.BackendError, match="a single key"):
        flexattn.attention(q, q, q, backend="cudnn")


# The cache.


def prepared(fmt: str = "thd", direction: Direction = "forward", **kwargs: Any) -> plans.Counters:
    mask = "padding_causal" if fmt == "thd" else "causal"
    spec, x = call_of(fmt, **({"attn_mask_type": mask} | kwargs))
    cudnn_backend.prepared_calls.clear()  # so that each call asks the cache
    cudnn_backend.prepare(spec, x, direction)
    return PLANS.counters


def test_the_same_call_builds_once() -> None:
    for step in range(4):
        counters = prepared()
        assert (counters.builds, counters.misses, counters.hits) == (1, 1, step)
    assert counters.seconds > 0
    assert prepared(direction="backward").builds == 2
    assert [plan.sdpa.direction for plan in PLANS.inspect()] == ["forward", "backward"]


def test_scale_and_seed_are_no_part_of_a_plan() -> None:
    prepared("bshd", **DROPOUT)
    counters = prepared("bshd", softmax_scale=0.7, **(DROPOUT | {"rng_state": torch.tensor([7, 8])}))
    assert (counters.builds, counters.hits) == (1, 1)
    assert prepared("bshd", **(DROPOUT | {"dropout_p": 0.5})).builds == 2, "dropout_p is compiled in"


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_packed_lengths_within_a_bucket_build_nothing(direction: Direction) -> None:
    lengths = ([190, 180, 150], [150, 170, 160, 190], [192, 129, 100, 140], [191, 1, 190, 150])
    for n in lengths:
        counters = prepared(direction=direction, inputs={"lengths_q": n})
    assert (counters.builds, counters.hits) == (1, len(lengths) - 1)
    assert prepared(direction=direction, inputs={"lengths_q": [300, 100, 120]}).builds == 2, "a longer bucket"
    assert prepared(direction=direction, inputs={"lengths_q": [130] * 5}).builds == 3, "a larger batch"


@pytest.mark.sample(values=False)
@pytest.mark.parametrize("fmt", ["bshd", "sbhd", "bhsd"])
def test_a_stream_of_dense_shapes_stops_building(fmt: str) -> None:
    exact = cudnn_backend.EXACT_SHAPES
    for step in range(exact + 6):
        counters = prepared(fmt, inputs={"lengths_q": [130 + 8 * step] * 2})
        if step < exact:
            assert counters.builds == step + 1, "the first shapes have plans of their own"
    assert counters.builds == exact + 1, "the rest share one for up to 256 tokens"
    assert prepared(fmt, inputs={"lengths_q": [130] * 2}).builds == exact + 1, "a shape keeps what it was given"


def test_a_million_lengths_need_few_plans() -> None:
    from flexattn.kernels_cudnn.problem import round_up_batch, round_up_length

    lengths = [round_up_length(n) for n in range(1, 131_073)]
    assert all(n <= rounded for n, rounded in enumerate(lengths, start=1))
    assert all(rounded <= 1.5 * n for n, rounded in enumerate(lengths, start=1) if 128 <= n <= 32768)
    assert len(set(lengths)) == 20
    batches = [round_up_batch(n) for n in range(1, 4097)]
    assert all(n <= rounded < 2 * n + 1 for n, rounded in enumerate(batches, start=1))
    assert len(set(batches)) == 17


def some_sdpa(number: int) -> Sdpa:
    return Sdpa("forward", torch.bfloat16, number, 1, 1, 128, 128, 64, 64, *([(8192, 64, 64)] * 4))


def test_eviction_drops_the_least_recently_used(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []

    class Graph:
        def get_workspace_size(self) -> int:
            return 0

    monkeypatch.setattr(plans, "build", lambda sdpa, target: built.append(sdpa.batch) or Graph())
    cache = PlanCache(capacity=2)
    for number in (1, 2, 1, 3, 1, 2):
        cache.get(some_sdpa(number), DEVICE)
    assert built == [1, 2, 3, 2], "2 was evicted, as 1 had been used since"
    assert (cache.counters.evictions, len(cache.inspect())) == (2, 2)
    pinned = cache.get(some_sdpa(2), DEVICE)
    pinned.is_pinned = True
    for number in (5, 6, 7):
        cache.get(some_sdpa(number), DEVICE)
    assert cache.get(some_sdpa(2), DEVICE) is pinned, "what a CUDA graph captured stays"
    cache.clear()
    assert cache.inspect() == []
    assert cache.counters == plans.Counters()


def test_two_threads_build_a_plan_once() -> None:
    cache, found, start = PlanCache(), [], threading.Barrier(2)

    def get() -> None:
        start.wait()
        with plans.without_device(cudnn_stub.H200):  # each thread has its own
            found.append(cache.get(some_sdpa(2), DEVICE))

    threads = [threading.Thread(target=get) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] is found[1]
    assert cache.counters.builds == 1


def test_a_refusal_is_remembered() -> None:
    cache = PlanCache()
    wrong = some_sdpa(1)._replace(head_dim_qk=12, head_dim_v=12)
    texts = []
    for _ in range(3):
        with pytest.raises(PlanNotSupported) as e:
            cache.get(wrong, DEVICE)
        texts.append(str(e.value))
    assert "multiple of 8" in texts[0]
    assert texts == [texts[0]] * 3
    assert (cache.counters.failures, cache.counters.builds) == (1, 0)
    assert isinstance(cache.known(wrong, DEVICE), PlanNotSupported)
    assert cache.known(some_sdpa(1), DEVICE) is None


loads_plans = pytest.mark.skipif(cudnn_stub.cannot_load() is not None, reason=str(cudnn_stub.cannot_load()))


@loads_plans
def test_plans_are_kept_on_disk(tmp_path: Path) -> None:
    folder = tmp_path / "plans"
    first, second = PlanCache(), PlanCache()
    built = first.get(some_sdpa(1), DEVICE, str(folder))
    loaded = second.get(some_sdpa(1), DEVICE, str(folder))
    assert (first.counters.builds, first.counters.loads) == (1, 0)
    assert (second.counters.builds, second.counters.loads) == (0, 1)
    assert loaded.is_loaded
    assert loaded.workspace_bytes == built.workspace_bytes
    assert loaded.graph._variant_pack_uids() == built.graph._variant_pack_uids()
    assert loaded.seconds < built.seconds / 5
    second.get(some_sdpa(2), DEVICE, str(folder))
    assert second.counters.builds == 1, "another plan is another file"
    assert len(list(folder.iterdir())) == 2


def test_a_file_for_something_else_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    PlanCache().get(some_sdpa(1), DEVICE, str(tmp_path))
    (file,) = tmp_path.iterdir()
    for change in (
        lambda patch: patch.setattr(plans, "FILE_FORMAT", 999),
        lambda patch: patch.setattr(cudnn, "__version__", "1.99.0"),
        lambda patch: patch.setattr(cudnn, "backend_version", lambda: 99999),
    ):
        with monkeypatch.context() as patch:
            change(patch)
            assert plans._fingerprint(some_sdpa(1), DEVICE) != file.stem
    with plans.without_device(cudnn_stub.H200.replace("132", "114")):
        assert plans._fingerprint(some_sdpa(1), DEVICE) != file.stem
    assert plans._fingerprint(some_sdpa(1), DEVICE) == file.stem


@pytest.mark.filterwarnings("ignore:compiled plans are not read")
def test_a_broken_file_is_built_anew(tmp_path: Path) -> None:
    PlanCache().get(some_sdpa(1), DEVICE, str(tmp_path))
    (file,) = tmp_path.iterdir()
    file.write_bytes(b"not a plan")
    cache = PlanCache()
    cache.get(some_sdpa(1), DEVICE, str(tmp_path))
    assert (cache.counters.builds, cache.counters.loads) == (1, 0)
    assert len(file.read_bytes()) > 1000


@loads_plans
def test_the_environment_says_where_plans_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXATTN_PLANS", str(tmp_path))
    prepared()
    forget()
    assert prepared().loads == 1


def test_what_is_explained_as_final_is_a_plan() -> None:
    spec, x = call_of()
    spec = spec._replace(needs_grad=True)
    before = explain(spec, "cudnn", x)
    assert not before.is_final
    assert PLANS.inspect() == [], "explaining builds nothing unless it is asked to"
    assert cudnn_backend.exact_shapes == {}
    answer = explain_built(spec, "cudnn", x)
    assert answer.is_final
    assert [plan.sdpa.direction for plan in PLANS.inspect()] == ["backward", "forward"]
    assert explain(spec, "cudnn", x).is_final
    assert not explain(spec, "cudnn", call_of(inputs={"lengths_q": [300, 300]})[1]).is_final
