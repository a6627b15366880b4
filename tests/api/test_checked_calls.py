"""FLEXATTN_CHECK=1: replayed calls are compared with unrecorded ones, and each call's values are checked as in its first."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import flexattn
from flexattn import call_cache, checked_call, fp8, functional, ops
from flexattn.cached_call import CachedCall
from flexattn.checked_call import CheckedCall
from tests.support.replayed import allocate_only, replay_on_cpus
from tests.support.storages import CASES, Sizes, apart, results

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="beside a GPU calls on a CPU are not replayed; see tests/gpu")

SIZES = Sizes(20, 16, torch.float32)
SLOW = ("FP8", "captured", "thd", "features")
EXHAUSTIVE = ("quantised", "bshd", "bhsd", "sbhd_2bshd", "cache in FP8")


@pytest.fixture(autouse=True)
def on_cpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    replay_on_cpus(monkeypatch)
    monkeypatch.setenv("FLEXATTN_CHECK", "1")
    monkeypatch.setattr(checked_call, "SHARE", 1.0)
    torch.manual_seed(0)
    call_cache.clear_cache()
    yield
    call_cache.clear_cache()


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The directions of the replays that are compared."""
    seen: list[str] = []
    compare = CheckedCall._compare

    def noted(self: CheckedCall, direction: str, *others: Any) -> None:
        seen.append(direction)
        compare(self, direction, *others)

    monkeypatch.setattr(CheckedCall, "_compare", noted)
    return seen


def kept() -> CachedCall:
    (call,) = call_cache.kept_calls()
    return call


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in SLOW else pytest.mark.exhaustive if name in EXHAUSTIVE else ())
        for name in CASES
    ],
)
def test_right_replays_pass(name: str, compared: list[str]) -> None:
    drawn = [CASES[name](SIZES) for _ in range(3)]
    for tensors, arguments in drawn:
        results(apart(tensors), arguments)
    assert isinstance(kept(), CheckedCall)
    assert compared == (["forward", "backward"] if "dout" in drawn[0][0] else ["forward"])


def test_torchs_own_operator_and_plain_backwards_are_compared(compared: list[str]) -> None:
    q, k, v = (torch.randn(1, 20, 2, 16, requires_grad=True) for _ in range(3))
    for _ in range(3):
        flexattn.attention(q, k, v, attn_mask_type="causal").sum().backward()
    assert compared == ["forward", "backward"]


@pytest.mark.slow
def test_delayed_scaling_notes_what_it_notes_without_the_check(monkeypatch: pytest.MonkeyPatch, compared: list[str]) -> None:
    recipe = fp8.Recipe(scaling="delayed", amax_history_len=3)
    found = []
    for is_checked in ("1", "0"):
        monkeypatch.setenv("FLEXATTN_CHECK", is_checked)
        torch.manual_seed(1)
        state = fp8.DelayedScaling(recipe, 1)
        for _ in range(4):
            q, k, v = (torch.randn(1, 20, 1, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
            flexattn.attention(q, k, v, fp8_recipe=recipe, fp8_state=state, backend="triton").sum().backward()
            state.update()
        found.append([t.clone() for t in fp8.state_tensors(state) or ()])
    assert compared == ["forward", "backward"] * 2
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


CHANGED: dict[str, tuple[int, int, float]] = {"out": (0, 0, 1e-3), "lse": (0, 1, 1e-5), "dq": (1, 0, 0.1), "dv": (1, 2, 0.1)}


@pytest.mark.sample
@pytest.mark.parametrize("name", CHANGED)
def test_a_wrong_replay_is_named(name: str) -> None:
    """By a number that is off in one result of the replay."""
    is_backward, place, by = CHANGED[name]
    q, k, v = (torch.randn(1, 20, 1, 16, requires_grad=True) for _ in range(3))

    def call() -> None:
        flexattn.attention(q, k, v, attn_mask_type="causal", backend="triton").square().sum().backward()

    for _ in range(3):
        call()
    one: Any = kept()
    recording = (next(iter(one.backwards.values())) if is_backward else one.forwards).recording
    replay = recording.replay

    def wrong(*given: Any) -> Any:
        found = list(replay(*given))
        found[place].view(-1)[7] += by
        return tuple(found)

    recording.replay = wrong
    direction = "backward" if is_backward else "forward"
    text = f"a replayed {direction} gave another {name} than the same call unrecorded: 1 of .* causal|band.*q, k and v of \\(1, 20"
    with pytest.raises(RuntimeError, match=text):
        call()


def test_sums_in_any_order_pass_and_no_more() -> None:
    want = torch.randn(1000)
    nothing = torch.zeros(())
    assert checked_call._wrong(want * (1 + 2.0**-24), want, want, is_exact=False) == ""
    assert checked_call._wrong(want + want.abs().max() * 2.0**-15, want, want, is_exact=False) == ""
    assert checked_call._wrong(want + want.abs().max() * 2.0**-12, want, want, is_exact=False)
    assert checked_call._wrong(want + 2e-3, want, want + 1e-3, is_exact=False) == ""
    assert checked_call._wrong(want.roll(1), want, want, is_exact=False)
    assert "1 of 1000 numbers differ, first at (3,)" in checked_call._wrong(
        want.index_fill(0, torch.tensor([3]), 9.0), want, want, is_exact=True
    )
    assert checked_call._wrong(want[:5], want, want, is_exact=False)
    infinite = torch.tensor([1.0, float("-inf"), float("nan")])
    assert checked_call._wrong(infinite, infinite, infinite, is_exact=False) == ""
    assert checked_call._wrong(torch.tensor([1.0, 0.0, 0.0]), infinite, infinite, is_exact=False)
    assert checked_call._wrong(nothing, nothing, nothing, is_exact=True) == ""


def test_one_in_a_hundred_is_compared_and_always_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.find_spec("flexattn.checked_call")
    assert spec is not None
    assert spec.loader is not None
    drawn = []
    for _ in range(2):  # as in two processes
        module: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        drawn.append([n for n in range(2000) if module._draw() < module.SHARE])
    assert drawn[0] == drawn[1]
    assert 10 <= len(drawn[0]) <= 30
    monkeypatch.setattr(checked_call, "SHARE", 0.01)
    monkeypatch.setattr(checked_call, "_draw", iter([0.5, 0.001, 0.5]).__next__)
    q = torch.randn(1, 20, 2, 16)
    seen: list[str] = []
    monkeypatch.setattr(CheckedCall, "_compare", lambda self, direction, *_: seen.append(direction))
    for _ in range(5):
        flexattn.attention(q, q, q, backend="triton")
    assert seen == ["forward"]


def test_values_are_checked_in_replayed_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = torch.tensor([0, 8, 20], dtype=torch.int32)
    q = torch.randn(20, 2, 16)
    call: dict[str, Any] = {"qkv_format": "thd", "attn_mask_type": "padding", "max_seqlen_q": 20, "max_seqlen_kv": 20}
    call |= {"cu_seqlens_q": ends, "cu_seqlens_kv": ends, "backend": "triton"}
    for _ in range(4):
        flexattn.attention(q, q, q, **call)
    ends[1] = 30
    monkeypatch.setattr(ops, "run_forward", lambda *_: pytest.fail("it ran"))
    with pytest.raises(ValueError, match="cu_seqlens"):
        flexattn.attention(q, q, q, **call)


def test_replayed_calls_are_prepared_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same holds because preparing checks a mod's tensors, blocks and positions."""
    prepared, prepare = [], functional.prepare

    def counted(*given: Any, **named: Any) -> Any:
        prepared.append(None)
        return prepare(*given, **named)

    monkeypatch.setattr(functional, "prepare", counted)
    q = torch.randn(1, 20, 2, 16)
    for _ in range(4):
        flexattn.attention(q, q, q, backend="triton")
    assert len(prepared) == 4
    assert call_cache.cache_info() == {"hits": 3, "misses": 1, "recordings": 1, "size": 1}


def test_without_the_check_calls_are_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXATTN_CHECK", "0")
    q = torch.randn(1, 20, 2, 16)
    flexattn.attention(q, q, q)
    assert type(kept()) is CachedCall


def test_another_scale_is_compared(compared: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first run replays the recording of the other one."""
    allocate_only(monkeypatch)
    q = torch.randn(1, 20, 2, 16)
    for scale in (0.5, 0.5, 0.5, 0.25, 0.25):
        flexattn.attention(q, q, q, softmax_scale=scale, backend="triton")
    assert compared == ["forward"] * 3
    assert {type(call) for call in call_cache.kept_calls()} == {CheckedCall}


@pytest.mark.parametrize(("factor", "direction"), [(1e6, "forward"), (1e3, "backward")])
def test_large_logits_of_replayed_calls_are_named(monkeypatch: pytest.MonkeyPatch, factor: float, direction: str) -> None:
    monkeypatch.setattr(checked_call, "SHARE", 0.0)  # unrecorded runs check them too
    q, k, v = (torch.randn(1, 20, 2, 16, dtype=torch.bfloat16) for _ in range(3))
    for scale in (1.0, 1.0, 1.0, factor):
        leaves = [x.clone().requires_grad_() for x in (q * scale, k * scale, v)]
        names_it = pytest.raises(ValueError, match=f"accepted in a {direction} on the triton backend")
        with names_it if scale > 1.0 else nullcontext():
            flexattn.attention(*leaves, backend="triton").sum().backward()
    assert kept().forwards.recording is not None
    assert call_cache.cache_info()["recordings"] == 2


@pytest.mark.parametrize("of", ["bias", "alibi", "score_mod"])
def test_logits_that_have_kernels_for_any_size_pass(of: str) -> None:
    q, k, v = (torch.randn(1, 4, 2, 16) * 1e6 for _ in range(3))
    options: dict[str, dict[str, Any]] = {
        "bias": {"bias_type": "post_scale_bias", "bias": torch.zeros(1, 1, 4, 4)},
        "alibi": {"bias_type": "alibi"},
        "score_mod": {"score_mod": lambda score, b, h, q_idx, kv_idx: score * 1.0},
    }
    for _ in range(2):
        assert flexattn.attention(q, k, v, backend="triton", **options[of]).isfinite().all()
