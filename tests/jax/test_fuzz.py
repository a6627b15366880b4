"""Random calls under JAX's transforms against the fuzz's oracle, for a fixed short time, and for longer with -m exhaustive."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'flexattn[jax]'")
pytest.importorskip("flexattn.jax")
from flexattn.jax import batching  # noqa: E402
from tests.fuzz import jax_calls  # noqa: E402

pytestmark = pytest.mark.usefixtures("four_devices")
CPU = jax_calls.PLACES["cpu"]


@pytest.fixture(autouse=True)
def lengths_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths above max_seqlen are drawn on purpose."""
    monkeypatch.setenv("FLEXATTN_CHECK", "0")


@pytest.mark.parametrize("seconds", [3, pytest.param(30, marks=pytest.mark.slow), pytest.param(600, marks=pytest.mark.exhaustive)])
def test_random_calls(seconds: int) -> None:
    """Each run has a seed of its own, or FLEXATTN_FUZZ_SEED."""
    drawn: list[Any] = []
    seed = int(os.environ.get("FLEXATTN_FUZZ_SEED") or random.SystemRandom().randrange(10**6)) * 10**6
    jax_calls.run(CPU, seed, seconds, drawn.append)
    assert drawn
    wrong = [f"python -m tests.fuzz.jax_calls --only {one['name']}\n" + "\n".join(one["wrong"]) for one in drawn if one["wrong"]]
    assert not wrong, "\n\n".join(wrong)


def test_the_draws_reach_every_transform() -> None:
    plans = [jax_calls.draw(seed, CPU) for seed in range(60)]
    assert {plan.transform for plan in plans} == set(jax_calls.TRANSFORMS)
    assert {frozenset({"all"}), frozenset({"q"}), frozenset({"bias", "softmax_offset"})} <= {plan.mapped for plan in plans}


def test_the_fuzz_finds_a_wrong_batching_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that gives every call of a vmap the first call's q."""
    seed = next(
        seed
        for seed in range(1000)
        if (plan := jax_calls.draw(seed, CPU)).transform == "vmap" and "all" in plan.mapped and not plan.config.has_lengths
        and plan.config.dtype is torch.float32 and plan.config.dropout_p == 0 and plan.config.softmax_type == "vanilla"
        and min(plan.config.longest) > 4
    )  # fmt: skip
    _, wrong = jax_calls.check(f"{seed}.{seed}", CPU)
    assert not wrong
    front = batching._move_to_front
    monkeypatch.setattr(
        batching, "_move_to_front", lambda x, dim, n: jax.numpy.broadcast_to(front(x, dim, n)[:1], front(x, dim, n).shape)
    )
    jax.clear_caches()
    _, wrong = jax_calls.check(f"{seed}.{seed}", CPU)
    jax.clear_caches()
    assert wrong
