"""Attention over 2 and 4 ranks equals that of one process, forward and backward. context_parallel_calls.py has the calls."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import ROOT, FreshPython
from tests.support.ranks import run_ranks


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_every_feature(ranks: int, forked_python: FreshPython, tmp_path: Path) -> None:
    run_ranks(forked_python, tmp_path, "features", ranks)


@pytest.mark.slow
def test_sums_over_ranks_are_as_exact_as_one_process(forked_python: FreshPython, tmp_path: Path) -> None:
    run_ranks(forked_python, tmp_path, "sums_in_float32", 4)


@pytest.mark.slow
def test_decoding_layouts_and_wrapped_calls(forked_python: FreshPython, tmp_path: Path) -> None:
    run_ranks(forked_python, tmp_path, "others", 2)


@pytest.mark.parametrize(
    "suite", [pytest.param("compiled", marks=pytest.mark.slow), pytest.param("all_compiled", marks=pytest.mark.exhaustive)]
)
def test_graphs_without_a_break(suite: str, forked_python: FreshPython, tmp_path: Path) -> None:
    run_ranks(forked_python, tmp_path, suite, 2)


@pytest.mark.slow
def test_streams_that_overlap_wait_for_each_other(forked_python: FreshPython, tmp_path: Path) -> None:
    run_ranks(forked_python, tmp_path, "lanes_without_races", 2)


@pytest.mark.exhaustive
def test_streams_that_overlap_wait_for_each_other_with_shared_memory(forked_python: FreshPython, tmp_path: Path) -> None:
    run_ranks(forked_python, tmp_path, "lanes_without_races_by_shared_memory", 2, {"TRITON_INTERPRET": "1"})


def test_calls_in_a_cuda_graph_read_nothing_on_the_host(forked_python: FreshPython, tmp_path: Path) -> None:
    run_ranks(forked_python, tmp_path, "no_reads", 2)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_ranks_that_differ_or_do_not_come(ranks: int, forked_python: FreshPython, tmp_path: Path) -> None:
    run_ranks(forked_python, tmp_path, "faults", ranks)


def test_what_is_refused_and_what_is_read_as_it_is(forked_python: FreshPython, tmp_path: Path) -> None:
    run_ranks(forked_python, tmp_path, "guards", 2)


@pytest.mark.parametrize(
    ("suite", "ranks"),
    [
        *(pytest.param(*run, marks=pytest.mark.slow) for run in (("all_strategies", 2), ("some_drawn", 3))),
        *(
            pytest.param(*run, marks=pytest.mark.exhaustive)
            for run in (("all_features", 2), ("all_features", 4), ("drawn", 2), ("drawn", 3), ("drawn", 4), ("in_float32", 2))
        ),
    ],
)
def test_every_strategy_in_every_layout(suite: str, ranks: int, forked_python: FreshPython, tmp_path: Path) -> None:
    run_ranks(forked_python, tmp_path, suite, ranks)


@pytest.mark.slow
def test_kernels_of_triton(forked_python: FreshPython, tmp_path: Path) -> None:
    run_ranks(forked_python, tmp_path, "on_triton", 2, {"TRITON_INTERPRET": "1"})


@pytest.mark.slow
def test_heads_inside_hosts_and_a_ring_between(forked_python: FreshPython, tmp_path: Path) -> None:
    run_ranks(forked_python, tmp_path, "in_hosts", 4)


@pytest.mark.slow
def test_dtensors_that_are_sharded_over_their_sequence(forked_python: FreshPython, tmp_path: Path) -> None:
    run_ranks(forked_python, tmp_path, "sharded_dtensors", 4)


@pytest.mark.slow
def test_fsdp_and_tensor_parallelism_on_the_same_mesh(forked_python: FreshPython, tmp_path: Path) -> None:
    run_ranks(forked_python, tmp_path, "on_one_mesh", 4)


@pytest.mark.parametrize(
    "strategy", [pytest.param("auto", marks=pytest.mark.slow), pytest.param("ring", marks=pytest.mark.exhaustive)]
)
def test_training_on_packed_documents_has_the_same_losses_on_any_number_of_ranks(
    strategy: str, forked_python: FreshPython, tmp_path: Path
) -> None:
    page = (ROOT / "docs" / "distributed.md").read_text("utf-8")
    shown = [float(loss) for loss in re.findall(r"^step .* loss (\S+)", page, re.MULTILINE)]
    for ranks in (1, 2, 4) if strategy == "auto" else (2,):
        (tmp_path / str(ranks)).mkdir()
        [first, *_] = run_ranks(forked_python, tmp_path / str(ranks), f"docs/train_packed.py --strategy {strategy}", ranks)
        losses = [float(loss) for loss in re.findall(r"loss (\S+)", first.stdout)]
        assert len(losses) == 5
        assert losses == pytest.approx(shown, abs=1e-5)
    assert shown[-1] < shown[0] - 0.3


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.exhaustive), pytest.param(4, marks=pytest.mark.slow)])
def test_exchanges_by_memory_that_ranks_share(ranks: int, forked_python: FreshPython, tmp_path: Path) -> None:
    run_ranks(forked_python, tmp_path, "by_shared_memory", ranks, {"TRITON_INTERPRET": "1", "RANKS_BACKEND": "eager"})
