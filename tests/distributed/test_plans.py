"""Plans: which rank holds which tokens, how even the work is, which keys are fetched, and which arguments raise errors."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
import pickle
import random
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flexattn
from flexattn import distributed, fp8
from flexattn.bench.context_parallel import CELLS
from flexattn.bench.shapes import log_normal_lengths
from flexattn.dispatch.reference import block_kinds
from flexattn.distributed import deal, gather, scaling, slices, ulysses, whole_call
from flexattn.distributed import layout as layouts
from flexattn.distributed.blocks import Blocks
from flexattn.distributed.calls import make_calls
from flexattn.distributed.cost import Heads, Prediction
from flexattn.distributed.layout import Run, common, size_of, union, without
from flexattn.distributed.local_blocks import LocalBlocks
from flexattn.distributed.mask import LocalBand, Mask, Piece, local_band, make_piece, merged, sees_all
from flexattn.distributed.plans import Plan
from flexattn.mods.library import causal, sliding_window
from tests.conftest import ROOT
from tests.support.context_parallel_calls import packed_tree, some

HEADS = Heads(32, 8, 128, 128, 2, 1)
FEW = CELLS["128k, documents"].documents  # 63 documents
MANY = log_normal_lengths(1 << 20, 1000.0, 1.0, 65536)  # 602 documents


class OneRank:
    """A group of two ranks, with the attributes that a plan reads. It cannot send."""

    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return 2


def imbalance(plan: Plan) -> float:
    areas = [plan.area(rank) for rank in range(plan.ranks)]
    return max(areas) * plan.ranks / sum(areas)


def documents(total: int, seed: int) -> list[int]:
    rng, lengths = random.Random(seed), []
    while sum(lengths) < total:
        lengths.append(min(1 + int(rng.lognormvariate(7.0, 1.0)), total - sum(lengths)))
    return lengths


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_each_token_is_on_one_rank_and_ranks_have_equally_many(ranks: int) -> None:
    for layout, length in itertools.product(("contiguous", "zigzag", "dealt"), (0, 1, 7, 64, 4096)):
        plan = distributed.plan(ranks, length=length, layout=layout)
        positions = [i for runs in plan.q_runs for run in runs for i in range(*run)]
        assert sorted(positions) == list(range(length))
        counts = [size_of(runs) for runs in plan.q_runs]
        assert max(counts) - min(counts) <= max(1, 2 * (layout == "zigzag"), len(plan.q_runs[0]) * (layout == "dealt"))


def test_layout_follows_the_mask_and_balances_it() -> None:
    plans = {
        "zigzag": distributed.plan(8, length=131072),
        "contiguous": distributed.plan(8, length=131072, window_size=(4096, 0)),
        "dealt": distributed.plan(8, documents=documents(131072, 0)),
    }
    for layout, plan in plans.items():
        assert plan.layout == layout
        assert imbalance(plan) < 1.02, layout
    assert imbalance(distributed.plan(8, length=131072, layout="contiguous")) > 1.8
    assert imbalance(distributed.plan(8, documents=documents(131072, 0), layout="zigzag")) > 1.1
    assert distributed.plan(8, length=64, attn_mask_type="no_mask").layout == "contiguous"


def in_chunks(plan: Plan) -> Plan:
    runs = layouts.dealt(plan.length, plan.ranks, plan.mask.area, plan.mask.needs)
    return dataclasses.replace(plan, q_runs=runs, kv_runs=runs)


def received(plan: Plan) -> list[int]:
    """Returns the number of keys that each rank fetches."""
    needs = [(plan.needs(rank), plan.kv_runs[rank]) for rank in range(plan.ranks)]
    return [size_of(keys) - size_of(common(keys, held)) for keys, held in needs]


def calls(plan: Plan) -> int:
    """Returns the largest number of calls of a rank."""
    pieces_of_ranks = ((plan.pieces(rank, plan.held("halo", rank))) for rank in range(plan.ranks))
    return max(len(make_calls(pieces, plan.is_packed, None, False, torch.device("cpu"))) for pieces in pieces_of_ranks)


def test_dealt_chunks_lie_where_their_keys_are() -> None:
    """Ranks fetch less than half of the keys that they would fetch if chunks were dealt by their areas alone."""
    plan = in_chunks(distributed.plan(8, documents=documents(131072, 0)))
    area, needs = plan.mask.area, plan.mask.needs
    chunks = [Run(i * 1024, (i + 1) * 1024) for i in range(128)]
    starts = [chunk.start for chunk in chunks]
    areas, wanted = [area(chunk) for chunk in chunks], [layouts._bits(needs(chunk), starts) for chunk in chunks]
    by_area = layouts._deal(areas, wanted, 8, 0.0)
    assert sum(received(plan)) / 1024 < by_area.fetched / 2
    assert imbalance(plan) < 1.03


# The most keys of one rank, as a fraction of all. One document has 1.17 times a rank's mean scores on 4 ranks, and 2.33 on 8.
MOST_RECEIVED = {2: 0.001, 4: 0.036, 8: 0.082}


@pytest.mark.parametrize("ranks", MOST_RECEIVED)
def test_documents_stay_whole_where_they_can(ranks: int) -> None:
    """Ranks fetch few keys of the benchmark's documents, fewer than with chunks, and have one or two calls."""
    plan = distributed.plan(ranks, documents=FEW)
    most = max(received(plan))
    assert most <= MOST_RECEIVED[ranks] * plan.length
    assert most < max(received(in_chunks(plan)))
    assert {size_of(runs) for runs in plan.q_runs} == {plan.length // ranks}
    assert imbalance(plan) < 1.005
    assert calls(plan) == (1 if ranks == 2 else 2)
    assert calls(in_chunks(plan)) == {2: 1, 4: 3, 8: 5}[ranks]


def test_documents_that_fit_are_moved_by_a_few_tokens_alone() -> None:
    """A document is cut only if a rank needs another number of tokens. Ranks fetch no more keys than tokens that moved."""
    for seed in range(4):
        plan = distributed.plan(4, documents=[random.Random(seed).randint(100, 900) for _ in range(200)])
        assert max(received(plan)) < 64
        assert imbalance(plan) < 1.003
        assert calls(plan) == 1
        starts, stops = {*plan.mask.q.starts}, {*itertools.accumulate(plan.mask.lengths_q)}
        ends = [(run.start, run.stop) for runs in plan.q_runs for run in runs]
        assert sum((start not in starts) + (stop not in stops) for start, stop in ends) <= 4 * (plan.ranks - 1)


MASKS: dict[str, dict[str, Any]] = {
    "causal": {},
    "no mask": {"attn_mask_type": "no_mask"},
    "a window": {"window_size": (50, 0)},
    "a window on both sides": {"attn_mask_type": "no_mask", "window_size": (30, 200)},
}


def drawn(rng: random.Random) -> list[int]:
    """Returns lengths of documents, from many short ones to few long ones. Some are empty, and some have one token."""
    total, lengths = rng.choice((0, 1, 6, 64, 500, 4096, 30011)), []
    median, sigma = rng.uniform(0, 8), rng.uniform(0, 2)
    while sum(lengths) < total and len(lengths) < 400:
        lengths.append(
            min(rng.choice((0, 1)) if rng.random() < 0.1 else 1 + int(rng.lognormvariate(median, sigma)), total - sum(lengths))
        )
    return lengths or [0]


@pytest.mark.sample
@pytest.mark.parametrize("name", MASKS)
def test_a_deal_is_never_worse_than_one_of_chunks(name: str) -> None:
    rng = random.Random(name)
    for _ in range(40):
        ranks, lengths = rng.choice((1, 2, 3, 4, 8)), drawn(rng)
        plan = distributed.plan(ranks, documents=lengths, layout="dealt", **MASKS[name])
        runs = sorted(run for runs in plan.q_runs for run in runs)
        assert union(runs) == (() if plan.length == 0 else (Run(0, plan.length),))
        assert size_of(runs) == plan.length
        assert all(list(own) == sorted(own) for own in plan.q_runs)
        counts = [size_of(own) for own in plan.q_runs]
        chunks = in_chunks(plan)
        assert max(counts) - min(counts) <= max(2, len(chunks.q_runs[0]))
        areas = [[one.area(rank) for rank in range(ranks)] for one in (plan, chunks)]
        assert max(areas[0]) <= max(1.02 * sum(areas[0]) / ranks, max(areas[1]))
        assert max(received(plan)) <= max(received(chunks))
        assert plan.digest == distributed.plan(ranks, documents=lengths, layout="dealt", **MASKS[name]).digest


@pytest.mark.parametrize("name", MASKS)
def test_deals_of_documents_have_exact_numbers_of_tokens(name: str) -> None:
    rng, deals = random.Random(name), 0
    for _ in range(40):
        ranks, lengths = rng.choice((1, 2, 3, 4, 8)), drawn(rng)
        mask = distributed.plan(ranks, documents=lengths, layout="contiguous", **MASKS[name]).mask
        for q_runs in deal.whole_documents(mask, ranks):
            deals += 1
            assert [size_of(runs) for runs in q_runs] == [run.size for run in layouts.cut(sum(lengths), ranks)]
            assert union(run for runs in q_runs for run in runs) == (Run(0, sum(lengths)),)
    assert deals > 40


def test_a_deal_keeps_keys_where_other_ranks_hold_them() -> None:
    """If there are other keys than queries, keys are contiguous. Fetched keys are counted from there."""
    rng = random.Random(5)
    for _ in range(20):
        lengths = [(n, rng.randint(0, 2 * n)) for n in drawn(rng)]
        plan = distributed.plan(3, documents=lengths, layout="dealt", attn_mask_type="causal_bottom_right")
        assert plan.kv_runs == layouts.contiguous(plan.length_kv, 3)
        chunks = dataclasses.replace(in_chunks(plan), kv_runs=plan.kv_runs)
        assert max(received(plan)) <= max(received(chunks))


def test_one_long_document_is_dealt_in_few_runs() -> None:
    plan = distributed.plan(4, documents=[131072])
    assert imbalance(plan) < 1.001
    assert [len(runs) for runs in plan.q_runs] == [2, 2, 2, 1]  # chunks have up to 28


def test_a_long_document_among_many_is_cut_for_many_ranks_alone() -> None:
    """It has 0.9 times the scores of one of four ranks, and 14 times those of one of 64. Fewer keys move than with chunks."""
    plan = distributed.plan(4, documents=MANY)
    assert max(received(plan)) < 0.001 * plan.length
    assert imbalance(plan) < 1.002
    plan = distributed.plan(64, documents=MANY)

    def most_sent(of: Plan) -> int:
        needs = [of.needs(rank) for rank in range(64)]
        sent = [sum(size_of(common(needs[other], of.q_runs[rank])) for other in range(64) if other != rank) for rank in range(64)]
        return max(sent)

    chunks = in_chunks(plan)
    assert max(received(plan)) < 0.65 * max(received(chunks))
    assert sum(received(plan)) < 0.3 * sum(received(chunks))
    assert most_sent(plan) < 0.95 * most_sent(chunks)
    assert imbalance(plan) < 1.005 < imbalance(chunks)


@pytest.mark.slow
def test_the_lab_notes_show_what_comes_to_ranks() -> None:
    def share(part: float) -> str:
        return f"{100 * part:.2f} %" if part < 0.01 else f"{100 * part:.1f} %"

    page = (ROOT / "notes" / "measured_distributed.md").read_text("utf-8")
    for lengths, ranks in (*((FEW, n) for n in (2, 4, 8)), (MANY, 8), (MANY, 64)):
        plan = distributed.plan(ranks, documents=lengths)
        both = [
            (
                share(max(received(one)) / one.length),
                share(sum(received(one)) / ranks / one.length),
                calls(one),
                share(imbalance(one) - 1),
            )
            for one in (plan, in_chunks(plan))
        ]
        (most, mean, count, over), (most_before, mean_before, count_before, over_before) = both
        cells = f"{plan.length}, {ranks}", f"{most}, in chunks {most_before}", f"{mean}, {mean_before}", f"{count}, {count_before}"
        row = r" *\| ".join(map(re.escape, (*cells, f"{over}, {over_before}")))
        assert re.search(rf"^\| {row} *\|$", page, re.MULTILINE), row


def steps(make: Callable[[], Any]) -> int:
    """Returns the number of calls of functions, in Python or C. Unlike a time, other processes do not change it."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        make()
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.slow
def test_planning_takes_few_steps() -> None:
    assert steps(lambda: distributed.plan(4, documents=FEW)) < 90_000
    assert steps(lambda: distributed.plan(64, documents=MANY)) < 550_000
    most = [1] * (deal.MOST_PAIRS // 16 + 1)  # larger deals use chunks
    assert not [*deal.whole_documents(Mask(None, 0, False, (*most,), (*most,)), 16)]


def test_pieces_of_one_row_are_in_their_neighbours_call() -> None:
    """A document of one token has no band of its own. If the mask is causal, it sees all its keys."""
    for arguments, count in (({}, 1), ({"window_size": (3, 0)}, 1), ({"attn_mask_type": "no_mask"}, 1)):
        plan = distributed.plan(1, documents=[5, 1, 7, 1, 1, 9], **arguments)
        assert calls(plan) == count
    one_call = make_calls(distributed.plan(1, documents=[5, 1, 7]).pieces(0, (Run(0, 13),)), True, None, True, torch.device("cpu"))
    assert [(call.band.window_size, call.band.is_exact) for call in one_call] == [((-1, 0), True)]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_calls_of_own_keys_have_no_room_for_them(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, uncut = distributed.plan(ranks, documents=[40, 3, 300, 25, 70, 12, 6, 90, 31]), set[int]()
    for rank in range(ranks):
        monkeypatch.setattr(Plan, "rank", rank)
        gather._work.cache_clear()
        work = gather._work(plan, "halo", False, True, torch.device("cpu"))
        rows = sorted(piece.rows for call in work.calls.longest_first for piece in call.pieces)
        assert union(rows) == (Run(0, size_of(plan.q_runs[rank])),)
        assert sum(run.size for run in rows) == size_of(plan.q_runs[rank])
        fetching = [piece for call in work.calls.longest_first if not call.is_own for piece in call.pieces]
        assert work.lists.held == size_of(union(piece.keys for piece in fetching))
        fetched = size_of(without(plan.needs(rank), plan.kv_runs[rank]))
        assert sum(map(size_of, work.lists.receives)) == fetched
        whole = {
            document
            for document, length in enumerate(plan.mask.lengths_q)
            for call in work.calls.longest_first
            if call.is_own
            for piece in call.pieces
            if piece.document == document and piece.rows.size == length
        }
        assert not whole & {piece.document for piece in fetching}
        uncut |= whole
    assert len(uncut) >= 5
    gather._work.cache_clear()


def test_a_band_that_shows_a_piece_whole() -> None:
    rng = random.Random(6)
    for _ in range(400):
        rows, keys, diagonal = rng.randint(1, 5), rng.randint(1, 5), rng.randint(-3, 3)
        piece = Piece(0, 0, 0, Run(0, rows), Run(0, keys), None, None, diagonal)
        (left, right), bottom_right = (rng.randint(-1, 6) for _ in range(2)), rng.random() < 0.5
        shift = keys - rows if bottom_right else 0
        sees_all_keys = all(
            (left < 0 or j >= i + shift - left) and (right < 0 or j <= i + shift + right) for i in range(rows) for j in range(keys)
        )
        assert sees_all(piece, LocalBand((left, right), bottom_right, False)) == sees_all_keys
        assert sees_all(piece, LocalBand((left, right), bottom_right, True)) == (sees_all_keys and shift == diagonal)


def test_only_what_a_window_needs_is_fetched() -> None:
    plan = distributed.plan(4, length=4096, window_size=(100, 0))
    assert [size_of(plan.needs(rank)) for rank in range(4)] == [1024, 1124, 1124, 1124]
    assert plan.work("halo").received == 100
    assert plan.work("gather").received == 3072
    assert plan.chosen(HEADS) == "halo"


def brute(mask: Mask, document: int, i: int, j: int) -> bool:
    at = j - i - mask.shift(document)
    return (mask.left is None or at >= -mask.left) and (mask.right is None or at <= mask.right)


def test_pieces_are_the_mask_for_any_queries_and_keys() -> None:
    rng = random.Random(1)
    for _ in range(600):
        left, right = (rng.choice((None, 0, rng.randint(1, 9))) for _ in range(2))
        mask = Mask(left, right, rng.random() < 0.5, (rng.randint(1, 12),), (rng.randint(1, 12),))
        ends = [sorted(rng.sample(range(n + 1), 2)) for n in (mask.lengths_q[0], mask.lengths_kv[0])]
        (q_start, q_stop), (k_start, k_stop) = ends
        queries, keys = (Run(*pair) for pair in ends)
        piece = make_piece(mask, 0, queries, keys, (q_start, k_start))
        expected = {(i, j) for i in range(q_start, q_stop) for j in range(k_start, k_stop) if brute(mask, 0, i, j)}
        visible = set()
        if piece is not None:
            for wants_diagonal in (False, True):
                (before, behind), bottom_right, is_exact = local_band(piece, wants_diagonal)
                shift = piece.keys.size - piece.rows.size if bottom_right else 0
                assert is_exact == (shift == piece.diagonal)
                visible = {
                    (piece.q_start + i, piece.kv_start + j)
                    for i in range(piece.rows.size)
                    for j in range(piece.keys.size)
                    if (before < 0 or j >= i + shift - before) and (behind < 0 or j <= i + shift + behind)
                }
                assert visible == expected
        assert visible == expected


def test_pieces_of_a_ring_are_merged_into_one_call_a_step() -> None:
    plan = distributed.plan(4, length=64)
    for rank, step in itertools.product(range(4), range(4)):
        pieces = plan.pieces(rank, plan.kv_runs[(rank - step) % 4])
        [one] = merged(pieces)
        assert one.rows.size * one.keys.size in ((16 * 16,) if step == 0 else (8 * 16,))
        assert len(pieces) > 1 or rank == 3 or step > rank  # parts of the last rank are adjacent


def test_areas_are_counts_of_scores() -> None:
    for kind, window in itertools.product(("no_mask", "causal", "causal_bottom_right"), ((-1, -1), (3, -1), (0, 0))):
        plan = distributed.plan(3, documents=[(7, 9), (0, 2), (5, 3)], attn_mask_type=kind, window_size=window)
        mask = plan.mask
        count = sum(
            brute(mask, document, i, j)
            for document, (len_q, len_kv) in enumerate(zip(mask.lengths_q, mask.lengths_kv, strict=True))
            for i in range(len_q)
            for j in range(len_kv)
        )
        assert sum(plan.area(rank) for rank in range(3)) == count


@pytest.mark.parametrize("bottom_right", [False, True])
@pytest.mark.parametrize(("left", "right"), [*itertools.product((None, -3, 0, 4), (None, -2, 0, 5))])
def test_scores_of_any_run_in_any_band(left: int | None, right: int | None, bottom_right: bool) -> None:
    mask = Mask(left, right, bottom_right, (7, 0, 5), (9, 2, 3))
    query_scores = [
        sum(brute(mask, document, i, j) for j in range(mask.lengths_kv[document]))
        for document, length in enumerate(mask.lengths_q)
        for i in range(length)
    ]
    for start, stop in itertools.combinations_with_replacement(range(len(query_scores) + 1), 2):
        assert mask.area(Run(start, stop)) == sum(query_scores[start:stop])


def sparse(b: Any, h: Any, i: Any, j: Any) -> Any:
    """Some first keys, a window, and one far stripe. Later queries see more."""
    return (j < 100) | ((i - j).abs() < 200) | ((j > 1500) & (j < 1500 + i // 4))


@pytest.mark.slow
@pytest.mark.parametrize("mod", [sparse, *(pytest.param(mod, marks=pytest.mark.slow) for mod in (causal(), packed_tree(4096)))])
def test_block_masks_are_balanced_in_chunks_of_whole_blocks(mod: Any) -> None:
    mask = flexattn.create_block_mask(mod, None, None, 4096, 4096, "cpu")
    plan = distributed.plan(4, length=4096, block_mask=mask)
    assert plan.layout == "dealt"
    assert imbalance(plan) < 1.03
    assert all(run.start % 128 == 0 for runs in plan.q_runs for run in runs)
    computed = int(mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum()) * 128 * 128
    assert sum(plan.area(rank) for rank in range(4)) == computed
    window = flexattn.create_block_mask(sliding_window(127, 128), None, None, 8192, 8192, "cpu")
    assert distributed.plan(4, length=8192, block_mask=window).layout == "contiguous"


def test_only_what_blocks_need_is_fetched() -> None:
    mask = flexattn.create_block_mask(sparse, None, None, 2048, 2048, "cpu", 64)
    plan = distributed.plan(4, length=2048, block_mask=mask, layout="contiguous")
    dense = mask.to_dense()[0, 0].bool()
    for rank in range(4):
        rows = dense[slice(rank * 8, rank * 8 + 8)].any(0)
        assert plan.needs(rank) == union(Run(int(i) * 64, int(i) * 64 + 64) for i in rows.nonzero())
        [held] = plan.held("halo", rank)
        assert (held.start, held.stop) == (plan.needs(rank)[0].start, plan.needs(rank)[-1].stop)
    assert plan.work("halo").received < plan.work("gather").received


@pytest.mark.parametrize("is_packed", [False, True])
def test_blocks_of_a_piece_are_those_of_the_whole_wherever_it_begins(is_packed: bool) -> None:
    rng = random.Random(2)
    kinds = torch.randint(0, 3, (2, 2, 5, 6), generator=torch.Generator().manual_seed(3), dtype=torch.int8)
    blocks = Blocks(kinds, 16, 32, some)
    i, j = torch.arange(80)[:, None], torch.arange(192)
    b, h = torch.arange(2)[:, None, None, None], torch.arange(2)[:, None, None]
    whole = visible_scores(kinds, i, j, some(b, h, i, j))
    for _ in range(20):
        cuts = [[sorted(rng.sample(range(n + 1), 2)) for n in (80, 192)] for _ in range(2 if is_packed else 1)]
        pieces = [
            Piece(row, q, k, Run(0, q_stop - q), Run(0, k_stop - k), None, None, 0)
            for row, ((q, q_stop), (k, k_stop)) in enumerate(cuts)
        ]
        heads = Run(*rng.choice(((0, 2), (1, 2))))
        local_blocks = LocalBlocks(blocks, pieces, is_packed, torch.device("cpu"))
        for piece in pieces:
            rows_q, rows_kv = (
                slice(start, start + run.size) for start, run in ((piece.q_start, piece.rows), (piece.kv_start, piece.keys))
            )
            row = slice(piece.document, piece.document + 1) if is_packed else slice(0, 2)

            def moved(b: Any, h: Any, i: Any, j: Any, origin: Piece = piece, first: int = heads.start) -> Any:
                return some(b, h + first, i + origin.q_start, j + origin.kv_start)

            mask = local_blocks.block_mask(moved, heads)
            rows, columns = i[: piece.rows.size], j[: piece.keys.size]
            seen = mask.mask_mod(b[row], h[: heads.size], rows, columns)
            kinds_by_row = block_kinds((mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices))
            kinds_by_column = block_kinds((mask.q_num_blocks, mask.q_indices, mask.full_q_num_blocks, mask.full_q_indices))
            assert torch.equal(kinds_by_column.transpose(-1, -2), kinds_by_row)
            assert torch.equal(visible_scores(kinds_by_row[row], rows, columns, seen), whole[row, slice(*heads), rows_q, rows_kv])


def visible_scores(kinds: torch.Tensor, i: torch.Tensor, j: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Returns the visible scores of blocks of 16 queries and 32 keys. `seen` decides in blocks that are partly visible."""
    kind = kinds[..., i // 16, j // 32]
    return (kind == 2) | ((kind == 1) & seen)


def test_a_plan_of_blocks_is_pickled_without_their_mod() -> None:
    masks = [flexattn.create_block_mask(mod, None, None, 64, 64, "cpu", 16) for mod in (sparse, causal())]
    plans = [distributed.plan(2, length=64, block_mask=mask, layout="contiguous") for mask in (masks[0], *masks)]
    assert plans[0] == plans[1] != plans[2]
    again = pickle.loads(pickle.dumps(plans[0])).on(OneRank())
    assert again.digest == plans[0].digest
    x = torch.zeros(1, 32, 1, 8)
    with pytest.raises(ValueError, match=r"the plan was unpickled .*block_mask's mask_mod\. Pass block_mask to the call"):
        distributed.attention(x, x, x, plan=again)
    assert again.masked(block_mask=masks[0]).mask.blocks.mask_mod is sparse


def test_a_mask_of_a_call_names_all_that_the_plan_has() -> None:
    block_mask = flexattn.create_block_mask(sparse, None, None, 64, 64, "cpu", 16)
    own: dict[str, Any] = {
        "attn_mask_type": "causal_bottom_right",
        "window_size": (5, -1),
        "bottom_right_diagonal": True,
        "block_mask": block_mask,
    }
    for number in range(1, 16):
        given = {name: value for bit, (name, value) in enumerate(own.items()) if number >> bit & 1}
        plan = distributed.plan(2, length=64, **{"attn_mask_type": "no_mask"} | given)
        assert plan.given == tuple(given)
        assert plan.masked(**given).mask == plan.mask
        for name in given:
            with pytest.raises(ValueError, match=f"a mask is given without {name}"):
                plan.masked(**{other: value for other, value in own.items() if other != name})
    assert distributed.plan(2, length=64, window_size=(5, 0)).masked("causal", (-1, -1)).mask.left is None
    assert distributed.plan(2, length=64).masked("no_mask").mask.right is None


def test_explain_shows_each_strategy_and_the_one_taken() -> None:
    q, k = torch.empty(1, 2, 32, 128, dtype=torch.bfloat16), torch.empty(1, 2, 8, 128, dtype=torch.bfloat16)
    plan = distributed.plan(64, length=131072)
    text = plan.explain(q, k, k)
    assert "layout zigzag: up to 2 run(s) a rank; the slowest has 1.00 of the mean" in text
    assert re.search("^ulysses +32 heads for 64 ranks", text, re.MULTILINE)
    assert re.search(r"^ulysses\+ring .*<- taken$", distributed.plan((8, 8), length=131072).explain(q, k, k), re.MULTILINE)
    assert len(re.findall(r"<- taken", text)) == 1
    small = plan.explain(q, k, k, rates=distributed.Rates(most_bytes=1e8))
    assert re.search(r"^ring .*<- taken$", small, re.MULTILINE), small  # gathered keys need more
    predictions = plan.predictions(HEADS)
    assert isinstance(predictions["gather"], Prediction)
    assert predictions["gather"].received_bytes == 131072 * 63 // 64 * 8 * 256 * 2


def test_what_gpus_measured_is_on_file() -> None:
    folder = ROOT / "bench" / "results"
    runs = [
        run for gpu in ("h100", "h200") for run in json.loads((folder / f"context_parallel_{gpu}.json").read_text("utf-8"))["runs"]
    ]
    names = {32768: "32k", 131072: "128k"}
    for (gpus, strategy, length, window), measured in scaling.MEASURED.items():
        cell = names[length] + (f", window {window}" if window else "")
        times_on_file = [
            (row["forward_ms"], row["both_ms"])
            for run in runs
            if run["ranks"] == gpus
            for row in run["rows"]
            if (row["status"], row["cell"]) == ("measured", cell)
            and (row["implementation"] == f"flexattn, {strategy}" or row.get("takes") == strategy)
        ]
        assert any(measured == pytest.approx(times, rel=1e-2) for times in times_on_file), (gpus, strategy, cell, times_on_file)


def test_predictions_are_near_what_gpus_measured() -> None:
    for (gpus, strategy, length, window), (forward, both) in scaling.MEASURED.items():
        prediction = distributed.plan(gpus, length=length, window_size=(window or -1, 0)).predictions(HEADS)[strategy]
        assert isinstance(prediction, Prediction)
        assert prediction.forward_ms == pytest.approx(forward, rel=0.15)
        assert prediction.forward_ms + prediction.backward_ms == pytest.approx(both, rel=0.15)


def test_auto_takes_what_was_fastest_where_all_were_measured() -> None:
    taken = {gpus: distributed.plan(gpus, length=32768).chosen(HEADS) for gpus in (1, 2, 4)}
    assert taken == {1: "halo", 2: "ulysses", 4: "ulysses"}  # on two GPUs within a tie of the least predicted time
    assert [distributed.plan(gpus, length=131072).chosen(HEADS) for gpus in (2, 4)] == ["ulysses", "ulysses"]
    assert distributed.plan(4, length=131072, window_size=(4096, 0)).chosen(HEADS) == "halo"


def test_keys_come_in_slices_where_there_is_enough_to_compute() -> None:
    def count(gpus: int, length: int) -> int:
        work = distributed.plan(gpus, length=length).work("halo")
        load = slices.Load(work.received * HEADS.kv * 2 * HEADS.dim * 2, 4 * work.areas[0] * HEADS.q * HEADS.dim)
        found = slices.key_slices(HEADS.q, HEADS.kv, load, 2)
        assert [head for of in found for head in range(*of.kv)] == list(range(HEADS.kv))
        return len(found)

    assert [count(2, 4096), count(2, 32768), count(4, 32768), count(4, 131072), count(4, 1 << 20)] == [1, 3, 1, 3, 6]


def test_keys_that_ranks_read_where_they_lie_come_at_once_if_there_is_room() -> None:
    counts = {
        n: len(slices.key_slices(32, 8, slices.Load(n * slices.NEAR_BYTES, 1e13, is_near=True), 2)) for n in (0, 1, 1.5, 5, 100)
    }
    assert counts == {0: 1, 1: 1, 1.5: 2, 5: 5, 100: 8}


def test_the_lab_notes_show_what_the_model_of_many_hosts_prints() -> None:
    page = (ROOT / "notes" / "measured_distributed.md").read_text("utf-8")
    assert "\n".join(line.rstrip() for line in scaling.lines()) in page
    assert scaling.efficiency("ulysses", 64, 131072) is None
    shares = [scaling.efficiency("ring", gpus, 1048576) for gpus in scaling.GPUS]
    assert shares == sorted(shares, reverse=True)  # with fewer tokens, a rank hides less


def test_the_guide_shows_what_explain_prints() -> None:
    page = (ROOT / "docs" / "distributed.md").read_text("utf-8")
    q, k = (torch.empty(1, 16384, heads, 128, dtype=torch.bfloat16) for heads in (32, 8))
    assert distributed.plan(8, length=131072, window_size=(4096, 0)).explain(q, k, k) in page


def test_a_picture_needs_tokens() -> None:
    with pytest.raises(ValueError, match="plan has 0 queries and 0 keys"):
        distributed.plot_plan(distributed.plan(2, length=0))


def test_plans_are_equal_where_they_say_the_same() -> None:
    a, b = (distributed.plan(2, documents=[5, 3], attn_mask_type="causal") for _ in range(2))
    assert a == b
    assert hash(a) == hash(b)
    assert a != distributed.plan(2, documents=[5, 3], attn_mask_type="causal", window_size=(2, 0))
    assert a.masked("causal", (2, 0)).q_runs == a.q_runs


WRONG_PLANS: dict[str, dict[str, Any]] = {
    "length is None and documents None; accepted: one of the two": {},
    "length is 3 and documents given": {"length": 3, "documents": [3]},
    "length is or has -1": {"length": -1},
    r"documents is or has \(1, 2, 3\)": {"documents": [(1, 2, 3)]},
    "documents is empty": {"documents": []},
    "strategy is 'allgather'; accepted: 'auto', 'gather'": {"length": 3, "strategy": "allgather"},
    "layout is 'striped'; accepted: None, 'contiguous'": {"length": 3, "layout": "striped"},
    "attn_mask_type is 'arrow'": {"length": 3, "attn_mask_type": "arrow"},
    r"block_mask has 2 rows and the plan 3 document\(s\); accepted: 1 row": {
        "documents": [3, 4, 5],
        "block_mask": flexattn.create_block_mask(causal(), 2, None, 8, 8, "cpu", 16),
    },
    "group_or_mesh is 0": {"group_or_mesh": 0, "length": 3},
    "group_or_mesh is a str": {"group_or_mesh": "world", "length": 3},
}


@pytest.mark.parametrize("text", WRONG_PLANS)
def test_wrong_plans_are_refused(text: str) -> None:
    arguments = {"group_or_mesh": 2} | WRONG_PLANS[text]
    with pytest.raises((TypeError, ValueError), match=text):
        distributed.plan(**arguments)


def weighted(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return score * WEIGHT


def derived_by_hand(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return score


derived_by_hand.score_mod_gradient = weighted  # type: ignore[attr-defined]
WEIGHT = torch.ones((), requires_grad=True)

REFUSED: dict[str, dict[str, Any]] = {
    r"rng_state is .*; accepted: a contiguous tensor of shape \[2\], the Philox seed and offset$": {
        "dropout_p": 0.1,
        "rng_state": torch.zeros(1, 5, dtype=torch.int64),
    },
    "block_mask is a object; accepted: a BlockMask": {"attn_mask_type": "no_mask", "block_mask": object()},
    "block_mask is for batch 1, 1 heads, 4 queries and 8 keys; .* at least 8 queries": {
        "attn_mask_type": "no_mask",
        "block_mask": flexattn.create_block_mask(causal(), None, None, 4, 8, "cpu", 16),
    },
    "block_mask is for batch 1 and 3 heads; accepted for this call: batch 1 or 1, 1 or 1 heads": {
        "attn_mask_type": "no_mask",
        "block_mask": flexattn.create_block_mask(causal(), None, 3, 8, 8, "cpu", 16),
    },
    "mask_mod is given with a block_mask": {
        "attn_mask_type": "no_mask",
        "block_mask": flexattn.create_block_mask(causal(), None, None, 8, 8, "cpu", 16),
        "mask_mod": causal(),
    },
    "cu_seqlens_q is given .* `documents` of the plan": {"cu_seqlens_q": torch.zeros(2)},
    "fp8_recipe is .*object.*; accepted: a flexattn.fp8.Recipe": {"fp8_recipe": object()},
    "q has dtype torch.float32 with an fp8_recipe": {"fp8_recipe": fp8.Recipe()},
    "descale_q is given with q, k and v in torch.float32": {"descale_q": torch.ones(1)},
    "fp8_recipe.keep_16_bit is True; accepted over ranks": {
        "fp8_recipe": fp8.Recipe(keep_16_bit=True),
        **dict.fromkeys("qkv", torch.zeros(1, 4, 1, 8, dtype=torch.bfloat16)),
    },
    "fp8_recipe.out_dtype is torch.float8_e5m2 with granularity 'block', which needs each sequence on one rank": {
        "fp8_recipe": fp8.Recipe(granularity="block", out_dtype=torch.float8_e5m2),
        **dict.fromkeys("qkv", torch.zeros(1, 4, 1, 8, dtype=torch.bfloat16)),
    },
    "granularity is 'block', and with strategy 'gather' a part begins at position [246] of its sequence. Parts must": {
        "fp8_recipe": fp8.Recipe(granularity="block"),
        "strategy": "gather",
        **dict.fromkeys("qkv", torch.zeros(1, 4, 1, 8, dtype=torch.bfloat16)),
    },
    "backend is 'cudnn' with FP8": {
        "fp8_recipe": fp8.Recipe(),
        "backend": "cudnn",
        **dict.fromkeys("qkv", torch.zeros(1, 4, 1, 8, dtype=torch.bfloat16)),
    },
    "return_max_logit is 1": {"return_max_logit": 1},
    "causal is given to flexattn.distributed.attention; accepted: attn_mask_type": {"causal": True},
    "is_causal is no argument of flexattn.distributed.attention; accepted: plan": {"is_causal": True},
    "strategy is 'ulysses' with 1 heads for 2 ranks": {"strategy": "ulysses"},
    r"strategy is 'ulysses\+ring' with a plan of one dim": {"strategy": "ulysses+ring"},
    "strategy is 'alltoall'": {"strategy": "alltoall"},
    "q has 3 tokens on rank 1; accepted: the 4 of the plan": {"q": torch.zeros(1, 3, 1, 8)},
    "k has dtype torch.float32 and q torch.float8_e4m3fn; accepted: the same": {
        "q": torch.zeros(1, 4, 1, 8).to(torch.float8_e4m3fn)
    },
    "qkv_format is 'thd'; accepted: bshd": {"qkv_format": "thd"},
    r"bias has shape \(1, 1, 3, 8\)": {"bias_type": "post_scale_bias", "bias": torch.zeros(1, 1, 3, 8)},
    "bias has only the rows of this rank's queries with strategy 'ulysses'": {
        "bias_type": "post_scale_bias",
        "bias": torch.zeros(1, 1, 4, 8),
        "strategy": "ulysses",
        **dict.fromkeys("qkv", torch.zeros(1, 4, 2, 8)),
    },
    "score_mod has its own gradient, which cannot be split over ranks": {"score_mod": derived_by_hand},
    "score_mod captures WEIGHT, which requires a gradient": {"score_mod": weighted},
    "plan is a int": {"plan": 3},
    "plan has no process group": {"plan": distributed.plan(2, length=8)},
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_cannot_be_split_is_refused_by_name(text: str) -> None:
    x = torch.zeros(1, 4, 1, 8)
    arguments = {"q": x, "k": x, "v": x, "plan": distributed.plan(OneRank(), length=8)} | REFUSED[text]  # type: ignore[arg-type]
    with pytest.raises((TypeError, ValueError), match=text):
        distributed.attention(**arguments)


def test_a_bias_of_packed_documents_is_refused() -> None:
    x = torch.zeros(4, 1, 8)
    plan = distributed.plan(OneRank(), documents=[8])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="bias is given with a plan of documents; accepted: a score_mod"):
        distributed.attention(x, x, x, plan=plan, bias_type="post_scale_bias", bias=torch.zeros(1, 1, 8, 8))


def test_each_argument_of_attention_is_taken_or_refused_by_name() -> None:
    arguments = {*inspect.signature(flexattn.attention).parameters} - {"q", "k", "v"}
    assert arguments == {*whole_call.Options.__annotations__} | {*whole_call.NOT_TAKEN}


def test_rows_are_reordered_whatever_the_stride_of_a_dim_of_size_1() -> None:
    x = torch.arange(4.0 * 8).bfloat16().view(4, 1, 8)
    order = torch.tensor([2, 0, 3, 1])
    assert torch.equal(ulysses._in_order(x.as_strided((4, 1, 8), (8, 1, 1)), order), x[order])


def test_arguments_of_decoding_are_refused_by_name() -> None:
    x = torch.zeros(1, 1, 2, 8)
    wrong: dict[str, dict[str, Any]] = {
        "dropout_p is given to attention_over_ranks": {"dropout_p": 0.5},
        "return_aux is given to attention_over_ranks": {"return_aux": flexattn.AuxRequest(entropy=True)},
        "bias_type is 'alibi'": {"bias_type": "alibi"},
        "q requires a gradient, and decoding has none. Call it under torch.no_grad": {"q": x.clone().requires_grad_()},
        "a sink or a captured tensor requires a gradient": {"softmax_offset": torch.zeros(2, requires_grad=True)},
    }
    for text, changes in wrong.items():
        with pytest.raises(ValueError, match=text):
            distributed.attention_over_ranks(**({"q": x, "k": x, "v": x, "group": OneRank()} | changes))
