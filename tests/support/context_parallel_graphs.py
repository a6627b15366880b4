"""CUDA graphs of attention over ranks: captures over NCCL, and checks on any device for operations that a capture forbids."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flexattn import distributed
from flexattn.bench import harness
from flexattn.bench.context_parallel import wait_for_all
from flexattn.distributed import capture
from tests.support import context_parallel_calls as calls
from tests.support.ranks import CAPTURED_PARTS

_HOST_DATA = ("plans.py", "mask.py", "blocks.py")  # of plans, on the host by intent
_READS = ("aten._local_scalar_dense.default", "aten.nonzero.default", "aten.equal.default")
_MADE = ("aten.lift_fresh.default", "aten.lift_fresh_copy.default")


class _HostReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records each place at which `flexattn.distributed` reads a tensor on the host, or creates one from the host's numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []
        self.ops = 0

    def note(self, what: str) -> None:
        frame: Any = sys._getframe(2)
        while frame is not None and (f"{os.sep}torch{os.sep}" in frame.f_code.co_filename or frame.f_code.co_filename == __file__):
            frame = frame.f_back
        folder, name = os.path.split(frame.f_code.co_filename)
        if folder.endswith(os.path.join("flexattn", "distributed")) and name not in _HOST_DATA:
            self.found.append(f"{what} in {name}, line {frame.f_lineno}")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops += 1
        if str(func) in (*_READS, *_MADE):
            self.note(str(func))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _as_if_captured() -> Iterator[_HostReads]:
    """Runs calls as if a graph were captured, on any device and over any group, and watches their reads."""
    reads = _HostReads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capture, "is_capturing", lambda device: True)
        patch.setattr(capture, "is_over_nccl", lambda group: True)
        for name in ("tolist", "cpu", "numpy"):
            method = getattr(Tensor, name)

            def noted(t: Tensor, *arguments: Any, of: Any = method, called: str = name, **named: Any) -> Any:
                reads.note(called)
                return of(t, *arguments, **named)

            patch.setattr(Tensor, name, noted)
        with reads:
            yield reads


_NO_READS = (
    ("causal", "gather sliced"),
    ("an odd number of heads", "ulysses"),
    ("key heads that do not divide", "ulysses"),
    ("a bias for each head", "ring"),
    ("a sink and a softcap", "ring"),
    ("documents", "halo"),
    ("documents with windows and ALiBi", "halo packed"),
    ("documents with mods and a sink", "halo sliced"),
    ("documents with mods and a sink", "ulysses"),
    ("dropout of documents with mods and a sink", "ring"),
    ("dropout", "ulysses"),
    ("blocks of each head", "gather sliced"),
    ("blocks of documents", "ulysses"),
)
_NO_READS_IN_FP8 = (("scales of documents", "ring"), ("rotation", "halo sliced"), ("scales of blocks, by heads", "ulysses"))


def no_reads() -> None:
    """If a similar call came before, a call that a graph may capture reads nothing on the host and creates nothing from it."""
    assert not capture._read
    for names, dtype in ((_NO_READS, torch.float64), (_NO_READS_IN_FP8, torch.bfloat16)):
        for name, way in names:
            problem = (calls.FEATURES if dtype is torch.float64 else calls.EIGHT_BITS)[name]
            plan = distributed.plan(dist.group.WORLD, **problem.plan_arguments)
            given, strategy = calls.tensors_of(problem, dtype), calls.way_of(way)
            wanted = calls.results(problem, given, dtype, plan, strategy)
            with _as_if_captured() as reads:
                found = calls.results(problem, given, dtype, plan, strategy)
            assert reads.ops > 20
            assert not reads.found, (name, way, set(reads.found))
            for of, t in found.items():
                torch.testing.assert_close(t, wanted[of], rtol=0.0, atol=0.0, equal_nan=True)
    assert capture._read  # inputs of a graph stay alive
    refused()


def refused() -> None:
    """Calls that no graph can hold are refused by name: of other groups than NCCL, with ranks compared, with tables to make."""
    plan = distributed.plan(dist.group.WORLD, length=14)
    q = torch.zeros(1, 7, 2, 8, device=calls.DEVICE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capture, "is_capturing", lambda device: True)
        if calls.DEVICE.type == "cpu":
            for call in (
                functools.partial(distributed.attention, plan=plan),
                functools.partial(distributed.attention_over_ranks, group=plan.group),
            ):
                with pytest.raises(ValueError, match=r"process group uses .*gloo.* while a CUDA graph is captured"):
                    call(q, q, q)
        patch.setattr(capture, "is_over_nccl", lambda group: True)
        for strategy in ("gather", "halo", "ulysses", "ring"):
            with pytest.raises(RuntimeError, match="cannot make the tables of a call while a CUDA graph is captured"):
                distributed.attention(q, q, q, plan=plan, strategy=strategy)
        patch.setenv("FLEXATTN_CHECK", "1")
        with pytest.raises(ValueError, match=r"FLEXATTN_CHECK is 1.* while a CUDA graph is captured"):
            distributed.attention(q, q, q, plan=plan)


def _replay(problem: calls.Problem, dtype: torch.dtype, way: str) -> None:
    """Asserts that replays of a forward, and of a forward and backward, give other inputs the bits that plain calls give."""
    strategy = calls.way_of(way)
    plan = distributed.plan(dist.group.WORLD, **problem.plan_arguments)
    given = calls.tensors_of(problem, dtype)
    leaves = {name: distributed.shard(plan, t, keys=name != "q") if name in "qkv" else t for name, t in given.items()}
    leaves = {name: t.clone().requires_grad_(name != "alibi_slopes") for name, t in leaves.items()}
    arguments = calls.arguments_of(problem, leaves, plan) | {"deterministic": True, "backend": "triton", "plan": plan}
    qkv = [leaves[name] for name in "qkv"]
    wanted = [t for t in leaves.values() if t.requires_grad]

    def forward() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return tuple(distributed.attention(*qkv, strategy=strategy, **arguments))

    def both() -> tuple[Tensor, ...]:
        out, lse, largest = distributed.attention(*qkv, strategy=strategy, **arguments)
        loss = out.float().sin().sum() + lse.where(lse.isfinite(), 0.0).cos().sum()
        return (out, lse, largest, *torch.autograd.grad(loss, wanted))

    for step in (forward, both):
        graph, got = harness.capture(step, wait_for_all)
        for seed in range(2):
            generator = torch.Generator(calls.DEVICE).manual_seed(seed + dist.get_rank())
            with torch.no_grad():
                for t in qkv:
                    t.copy_(torch.randn(t.shape, generator=generator, device=t.device))
            graph.replay()
            kept = [t.detach().clone() for t in got]
            for number, (a, b) in enumerate(zip(kept, step(), strict=True)):
                assert torch.equal(a.nan_to_num(), b.nan_to_num()), (number, seed, way, problem)
            assert all(bool(t.isfinite().all()) for t in (kept[0], *kept[3:]))
        torch.cuda.synchronize()


def _cases() -> list[tuple[calls.Problem, torch.dtype, str]]:
    half = torch.bfloat16
    features = (
        ("causal", "gather sliced"),
        ("causal", "ring"),
        ("causal", "ulysses"),
        ("a causal window", "halo"),
        ("documents", "halo sliced"),
        ("documents with mods and a sink", "halo"),
        ("dropout of documents with mods and a sink", "ring"),
        ("blocks of documents", "halo"),
    )
    cases = [(calls.grown(calls.FEATURES[name]), half, way) for name, way in features]
    eight = calls.eight(calls.Problem(((512, 512),), dims=(64, 64)))
    return [*cases, (eight, half, "halo"), (eight, half, "ulysses")]


def captured(part: int) -> None:
    for number, (problem, dtype, way) in enumerate(_cases()):
        if number % CAPTURED_PARTS == part:
            plain = {name: value for name, value in problem.options.items() if name != "deterministic"}
            _replay(dataclasses.replace(problem, qkv_format="", options=plain), dtype, way)
