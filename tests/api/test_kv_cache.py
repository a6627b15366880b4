"""PagedKVCache: sequences that join, grow, fork and leave equal dense tensors, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor

from flexattn import PagedKVCache, attention
from flexattn.kv_cache import OutOfPagesError

HEADS, HEADS_KV, DIM = 4, 2, 8
LAYERS, PAGES, ROWS = 2, 12, 4


def make_pools(page_size: int, kv_format: str, device: str = "cpu") -> list[tuple[Tensor, Tensor]]:
    """The second layer's k and v lie side by side. NaN everywhere."""
    shape = (page_size, HEADS_KV, DIM) if kv_format == "bshd" else (HEADS_KV, page_size, DIM)
    first = torch.full((2, PAGES, *shape), float("nan"), device=device)
    second = torch.full((PAGES, 2, *shape), float("nan"), device=device)
    return [(first[0], first[1]), (second[:, 0], second[:, 1])]


class Serving:
    """A cache, and the same keys and values of each sequence in dense tensors: [layer, k or v, length, h_kv, d]."""

    def __init__(self, page_size: int = 4, kv_format: str = "bshd", max_length: int = 30) -> None:
        self.cache = PagedKVCache(make_pools(page_size, kv_format), max_sequences=ROWS, max_length=max_length, kv_format=kv_format)
        self.dense: dict[int, Tensor] = {}
        self.generator = torch.Generator().manual_seed(0)

    def add(self) -> int:
        n = self.cache.add()
        self.dense[n] = torch.zeros(LAYERS, 2, 0, HEADS_KV, DIM)
        return n

    def fork(self, n: int, length: int | None = None) -> int:
        forked = self.cache.fork(n, length)
        self.dense[forked] = self.dense[n][:, :, :length].clone()
        return forked

    def free(self, n: int) -> None:
        self.cache.free(n)
        del self.dense[n]

    def step(self, new: dict[int, int]) -> None:
        """Appends, attends, and compares each sequence with a call of its own over dense tensors."""
        self.cache.step(new)
        total = sum(new.values())
        made = torch.randn(LAYERS, 2, total, HEADS_KV, DIM, generator=self.generator)
        q = torch.randn(total, HEADS, DIM, generator=self.generator)
        at = 0
        for n in sorted(new):
            self.dense[n] = torch.cat((self.dense[n], made[:, :, at : at + new[n]]), 2)
            at += new[n]
        for layer in range(LAYERS):
            self.cache.append(layer, *made[layer])
            out = attention(q, *self.cache.pools[layer], backend="eager", **self.cache.arguments())
            at = 0
            for n in sorted(new):
                count = new[n]
                if count:
                    self.compare(out[at : at + count], q[at : at + count], self.dense[n][layer])
                at += count

    def compare(self, out: Tensor, q: Tensor, kv: Tensor) -> None:
        starts = torch.tensor([0, len(q)], dtype=torch.int32)
        wanted = attention(
            q,
            kv[:1],
            kv[1:],
            qkv_format="thd_2bshd",
            attn_mask_type="padding_causal_bottom_right",
            cu_seqlens_q=starts,
            max_seqlen_q=len(q),
            seqused_kv=torch.tensor([kv.shape[1]], dtype=torch.int32),
            backend="eager",
        )
        torch.testing.assert_close(out, wanted, rtol=1e-6, atol=1e-6)

    def check(self) -> None:
        """The counts of shared pages are right, each page is free or in use, and all keys of all sequences are present."""
        cache = self.cache
        owners = [page for n in cache.sequences for page in cache._pages_of(n)]
        assert [owners.count(page) for page in range(PAGES)] == cache._shares
        assert sorted(cache._free_pages) == [page for page in range(PAGES) if page not in owners]
        assert cache.sequences == sorted(self.dense)
        for n, dense in self.dense.items():
            assert cache.length(n) == dense.shape[2]
            pages = torch.tensor(cache._pages_of(n), dtype=torch.long)
            for layer, pools in enumerate(cache.pools):
                for kind, pool in enumerate(pools):
                    found = (pool.transpose(1, 2) if cache._kv_format == "bhsd" else pool)[pages].flatten(0, 1)
                    assert torch.equal(found[: dense.shape[2]], dense[layer, kind])


PHASES = (Phase.explicit, Phase.reuse, Phase.generate)  # no shrinking, which takes minutes with so many steps


@settings(max_examples=12, stateful_step_count=12, deadline=None, phases=PHASES)
class Batches(RuleBasedStateMachine):
    """Sequences join, grow, fork and leave in any order."""

    @initialize(page_size=st.integers(1, 9), kv_format=st.sampled_from(("bshd", "bhsd")))
    def begin(self, page_size: int, kv_format: str) -> None:
        self.serving = Serving(page_size, kv_format)
        self.serving.add()

    @rule()
    def joins(self) -> None:
        if len(self.serving.dense) < ROWS:
            self.serving.add()
        else:
            with pytest.raises(OutOfPagesError, match="all 4 rows"):
                self.serving.add()

    @rule(data=st.data())
    def grows(self, data: st.DataObject) -> None:
        cache = self.serving.cache
        room = {n: cache.max_length - cache.length(n) for n in cache.sequences}
        new = {n: data.draw(st.integers(0, min(most, 7))) for n, most in room.items() if data.draw(st.booleans())}
        if not sum(new.values()):
            return
        try:
            self.serving.step(new)
        except OutOfPagesError:
            self.serving.check()

    @rule(data=st.data())
    def forks(self, data: st.DataObject) -> None:
        if not self.serving.dense:
            return
        n = data.draw(st.sampled_from(sorted(self.serving.dense)))
        length = data.draw(st.integers(0, self.serving.cache.length(n)))
        try:
            self.serving.fork(n, length)
        except OutOfPagesError:
            self.serving.check()

    @rule(data=st.data())
    def leaves(self, data: st.DataObject) -> None:
        if self.serving.dense:
            self.serving.free(data.draw(st.sampled_from(sorted(self.serving.dense))))

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "serving"):
            self.serving.check()


TestBatches = Batches.TestCase


def test_a_fork_shares_whole_pages_and_copies_the_last() -> None:
    serving = Serving(page_size=4)
    n = serving.add()
    serving.step({n: 10})
    assert serving.cache.free_pages == PAGES - 3
    forked = serving.fork(n)
    assert serving.cache.free_pages == PAGES - 4
    serving.step({n: 3, forked: 1})
    serving.step({n: 1, forked: 5})
    serving.check()
    serving.free(n)
    serving.step({forked: 1})
    serving.check()
    serving.free(forked)
    assert serving.cache.free_pages == PAGES


def test_pages_that_run_out() -> None:
    serving = Serving(page_size=4, max_length=200)
    first, second = serving.add(), serving.add()
    serving.step({first: 40, second: 3})
    with pytest.raises(OutOfPagesError, match="2 pages of 4 tokens are needed and 1 of 12 are free"):
        serving.step({first: 1, second: 2})
    assert (serving.cache.length(first), serving.cache.length(second)) == (40, 3)
    serving.cache.reserve(first, 4)
    assert serving.cache.free_pages == 0
    with pytest.raises(OutOfPagesError, match="no page is free for a copy of the last one of sequence 1"):
        serving.fork(second)
    serving.step({first: 4, second: 1})
    serving.free(second)
    with pytest.raises(ValueError, match=r"sequence 0 would have 201 tokens; accepted: at most 200"):
        serving.cache.step({first: 157})
    serving.check()


def test_tables_stay_where_they_are() -> None:
    """A captured graph reads them at the addresses that it was captured with."""
    serving = Serving()
    n = serving.add()
    names = ("page_table", "cu_seqlens_q", "seqused_kv", "seqused_before")
    before = [getattr(serving.cache, name).data_ptr() for name in names]
    serving.step({n: 6})
    serving.step({n: 1})
    assert [getattr(serving.cache, name).data_ptr() for name in names] == before
    assert serving.cache.seqused_before.tolist() == [6, 0, 0, 0]
    assert serving.cache.seqused_kv.tolist() == [7, 0, 0, 0]
    assert serving.cache.cu_seqlens_q.tolist() == [0, 1, 1, 1, 1]


WRONG_POOLS: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({"pools": []}, "pools is empty"),
    "dims": ({"pools": [(torch.zeros(2, 3, 4), torch.zeros(2, 3, 4))]}, "k of pools"),
    "pages": ({"pools": [(torch.zeros(2, 3, 4, 5), torch.zeros(3, 3, 4, 5))]}, "v of pools.0. has 3 pages of 3 tokens"),
    "page size": ({"pools": [torch.zeros(2, 2, 3, 4, 5), torch.zeros(2, 2, 4, 4, 5)]}, "k of pools.1. has 2 pages of 4 tokens"),
    "format": ({"kv_format": "sbhd"}, "kv_format is 'sbhd'"),
    "rows": ({"max_sequences": 0}, "max_sequences is 0"),
    "length": ({"max_length": 1.5}, "max_length is 1.5"),
}


@pytest.mark.parametrize("name", WRONG_POOLS)
def test_wrong_pools(name: str) -> None:
    changes, text = WRONG_POOLS[name]
    call: dict[str, Any] = {"pools": [torch.zeros(2, 2, 3, 4, 5)], "max_sequences": 2, "max_length": 5}
    PagedKVCache(**call)
    with pytest.raises((ValueError, TypeError), match=text):
        PagedKVCache(**(call | changes))


def test_sequences_that_are_not_there() -> None:
    cache = PagedKVCache(make_pools(4, "bshd"), max_sequences=2, max_length=16)
    n = cache.add()
    cache.step({n: 5})
    for use in (cache.free, cache.length, cache.fork):
        with pytest.raises(ValueError, match=r"sequence is 1 \(int\); accepted: a number from add\(\) or fork\(\), now \[0\]"):
            use(1)
    with pytest.raises(ValueError, match="length is 6; accepted: 0 to 5"):
        cache.fork(n, 6)
    with pytest.raises(ValueError, match="the new tokens of sequence 0 is -1"):
        cache.step({n: -1})
    with pytest.raises(ValueError, match="sequence is 7"):
        cache.step({n: 1, 7: 1})
    assert cache.length(n) == 5


def test_a_captured_call_serves_later_steps_of_more_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph keeps the numbers of its capture, which hold for any step or for steps within `longest`."""
    serving = Serving()
    cache, first = serving.cache, serving.add()
    cache.step({first: 1})
    cache.append(0, *torch.randn(2, 1, HEADS_KV, DIM))
    assert cache.arguments()["max_seqlen_q"] == 1
    assert cache.arguments(longest=3)["max_seqlen_q"] == 3
    with pytest.raises(
        ValueError, match="longest is 0; accepted: an int of at least 1, the most new tokens of a sequence, or None"
    ):
        cache.arguments(longest=0)
    with pytest.raises(TypeError, match=r"longest is 1\.5"):
        cache.arguments(longest=1.5)  # type: ignore[arg-type]
    with monkeypatch.context() as capture:
        capture.setattr(torch.cuda, "is_initialized", lambda: True)
        capture.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert cache.arguments()["max_seqlen_q"] == cache.max_length
        assert cache.arguments(longest=1)["max_seqlen_q"] == 1
        for call in (lambda: cache.step({first: 1}), lambda: cache.fork(first)):
            with pytest.raises(RuntimeError, match="called while a CUDA graph is captured"):
                call()
    assert cache.length(first) == 1
    frozen = cache.arguments(longest=3)  # the argument of a graph with three rows
    cache.step({first: 3})
    q, k, v = (torch.randn(3, h, DIM) for h in (HEADS, HEADS_KV, HEADS_KV))
    cache.append(0, k, v)
    out, again = (attention(q, *cache.pools[0], **named, backend="eager") for named in (frozen, cache.arguments()))
    assert torch.equal(out, again)


def test_a_cache_that_is_made_in_inference_mode_is_written_to_outside() -> None:
    with torch.inference_mode():
        cache = PagedKVCache([torch.zeros(2, 4, 4, HEADS_KV, DIM)], max_sequences=2, max_length=8)
    cache.step({cache.add(): 3})
    assert cache.seqused_kv.tolist() == [3, 0]
