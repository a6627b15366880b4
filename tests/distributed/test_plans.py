"""Plans: who holds which tokens, how even the work is, what moves, and what is refused before anything is sent."""

from __future__ import annotations

import inspect
import itertools
import random
import re
from typing import Any

import pytest
import torch

import flexattn
from flexattn import distributed
from flexattn.distributed import functional, scaling
from flexattn.distributed import layout as layouts
from flexattn.distributed.cost import Heads, Prediction
from flexattn.distributed.layout import Run, common, size_of
from flexattn.distributed.mask import Mask, local_band, make_piece, merged
from flexattn.distributed.plans import Plan
from tests.conftest import ROOT

HEADS = Heads(32, 8, 128, 128, 2, 1)


class OneRank:
    """A group of two as far as a plan reads it; nothing can be sent."""

    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return 2


def imbalance(plan: Plan) -> float:
    areas = [plan.area(rank) for rank in range(plan.ranks)]
    return max(areas) * plan.ranks / sum(areas)


def documents(total: int, seed: int) -> list[int]:
    rng, found = random.Random(seed), []
    while sum(found) < total:
        found.append(min(1 + int(rng.lognormvariate(7.0, 1.0)), total - sum(found)))
    return found


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


def test_dealt_chunks_lie_where_their_keys_are() -> None:
    """Few keys are fetched for as even a load: less than half of those that chunks dealt by their areas alone would fetch."""
    plan = distributed.plan(8, documents=documents(131072, 0))
    area, needs = plan.mask.area, plan.mask.needs
    chunks = [Run(i * 1024, (i + 1) * 1024) for i in range(128)]
    areas, wanted = [area(chunk) for chunk in chunks], [layouts._bits(needs(chunk), chunks) for chunk in chunks]
    by_area = layouts._deal(areas, wanted, 8, 0.0)
    found = sum(size_of(plan.needs(rank)) - size_of(common(plan.q_runs[rank], plan.needs(rank))) for rank in range(8)) / 1024
    assert found < by_area.fetched / 2
    assert imbalance(plan) < 1.03


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
        found = set()
        if piece is not None:
            for wants_diagonal in (False, True):
                (before, behind), bottom_right, is_exact = local_band(piece, wants_diagonal)
                shift = piece.keys.size - piece.rows.size if bottom_right else 0
                assert is_exact == (shift == piece.diagonal)
                found = {
                    (piece.q_start + i, piece.kv_start + j)
                    for i in range(piece.rows.size)
                    for j in range(piece.keys.size)
                    if (before < 0 or j >= i + shift - before) and (behind < 0 or j <= i + shift + behind)
                }
                assert found == expected
        assert found == expected


def test_pieces_of_a_ring_are_merged_into_one_call_a_step() -> None:
    plan = distributed.plan(4, length=64)
    for rank, step in itertools.product(range(4), range(4)):
        pieces = plan.pieces(rank, plan.kv_runs[(rank - step) % 4])
        [one] = merged(pieces)
        assert one.rows.size * one.keys.size in ((16 * 16,) if step == 0 else (8 * 16,))
        assert len(pieces) > 1 or rank == 3 or step > rank  # whose parts lie side by side already


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


def test_explain_shows_each_strategy_and_the_one_taken() -> None:
    q, k = torch.empty(1, 2, 32, 128, dtype=torch.bfloat16), torch.empty(1, 2, 8, 128, dtype=torch.bfloat16)
    plan = distributed.plan(64, length=131072)
    text = plan.explain(q, k, k)
    assert "layout zigzag: up to 2 run(s) a rank; the slowest has 1.00 of the mean" in text
    assert re.search("^ulysses +32 heads for 64 ranks", text, re.MULTILINE)
    assert re.search(r"^ulysses\+ring .*<- taken$", distributed.plan((8, 8), length=131072).explain(q, k, k), re.MULTILINE)
    assert len(re.findall(r"<- taken", text)) == 1
    small = plan.explain(q, k, k, rates=distributed.Rates(most_bytes=1e8))
    assert re.search(r"^ring .*<- taken$", small, re.MULTILINE), small  # gathered keys are more
    found = plan.predictions(HEADS)
    assert isinstance(found["gather"], Prediction)
    assert found["gather"].received_bytes == 131072 * 63 // 64 * 8 * 256 * 2


def test_predictions_are_near_what_two_gpus_measured() -> None:
    for (strategy, length, window), (forward, both) in scaling.MEASURED.items():
        found = distributed.plan(2, length=length, window_size=(window or -1, 0)).predictions(HEADS)[strategy]
        assert isinstance(found, Prediction)
        assert found.forward_ms == pytest.approx(forward, rel=0.15)
        assert found.forward_ms + found.backward_ms == pytest.approx(both, rel=0.15)


def test_the_page_shows_what_the_model_of_many_hosts_prints() -> None:
    page = (ROOT / "docs" / "distributed.md").read_text("utf-8")
    assert "\n".join(line.rstrip() for line in scaling.lines()) in page
    assert scaling.efficiency("ulysses", 64, 131072) is None
    shares = [scaling.efficiency("ring", gpus, 1048576) for gpus in scaling.GPUS]
    assert shares == sorted(shares, reverse=True)  # fewer tokens a rank hide less


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


WEIGHT = torch.ones((), requires_grad=True)

REFUSED: dict[str, dict[str, Any]] = {
    r"rng_state is .*; accepted: a contiguous tensor of shape \[2\], the Philox seed and offset$": {
        "dropout_p": 0.1,
        "rng_state": torch.zeros(1, 5, dtype=torch.int64),
    },
    "block_mask is given .* accepted: mask_mod=block_mask.mask_mod": {"block_mask": object()},
    "cu_seqlens_q is given .* `documents` of the plan": {"cu_seqlens_q": torch.zeros(2)},
    "fp8_recipe is given": {"fp8_recipe": object()},
    "return_max_logit is 1": {"return_max_logit": 1},
    "causal is no argument of flexattn.distributed.attention; accepted: plan": {"causal": True},
    "strategy is 'ulysses' with 1 heads for 2 ranks": {"strategy": "ulysses"},
    r"strategy is 'ulysses\+ring' with a plan of one dim": {"strategy": "ulysses+ring"},
    "strategy is 'alltoall'": {"strategy": "alltoall"},
    "q has 3 tokens on rank 1; accepted: the 4 that the plan gives it": {"q": torch.zeros(1, 3, 1, 8)},
    "q has dtype torch.float8_e4m3fn; accepted: a local tensor": {"q": torch.zeros(1, 4, 1, 8).to(torch.float8_e4m3fn)},
    "qkv_format is 'thd'; accepted: bshd": {"qkv_format": "thd"},
    r"bias has shape \(1, 1, 3, 8\)": {"bias_type": "post_scale_bias", "bias": torch.zeros(1, 1, 3, 8)},
    "bias has the rows of this rank's queries with strategy 'ulysses'": {
        "bias_type": "post_scale_bias",
        "bias": torch.zeros(1, 1, 4, 8),
        "strategy": "ulysses",
        **dict.fromkeys("qkv", torch.zeros(1, 4, 2, 8)),
    },
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
    of_whole = {*inspect.signature(flexattn.attention).parameters} - {"q", "k", "v"}
    assert of_whole == {*functional.Options.__annotations__} | {*functional.NOT_TAKEN}


def test_arguments_of_decoding_are_refused_by_name() -> None:
    x = torch.zeros(1, 1, 2, 8)
    wrong: dict[str, dict[str, Any]] = {
        "dropout_p is given to attention_over_ranks": {"dropout_p": 0.5},
        "bias_type is 'alibi'": {"bias_type": "alibi"},
        "q requires a gradient; accepted: under torch.no_grad": {"q": x.clone().requires_grad_()},
    }
    for text, changes in wrong.items():
        with pytest.raises(ValueError, match=text):
            distributed.attention_over_ranks(**({"q": x, "k": x, "v": x, "group": OneRank()} | changes))
