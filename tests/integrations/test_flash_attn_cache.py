"""flash_attn_with_kvcache against attention over each sequence's own keys, in float64."""

from __future__ import annotations

import math

import pytest
import torch

from flexattn.integrations import flash_attn as fa
from flexattn.integrations.flash_attn import flash_attn_3, kv_cache

B, S, H, H_K, D = 2, 9, 4, 2, 32


def reference(q, k, v, causal=False, window=(-1, -1)):
    """Returns out and lse of one sequence [s, h, d], in float64; diagonals end at the last key."""
    q, k, v = (t.double().transpose(0, 1) for t in (q, k, v))
    k, v = k.repeat_interleave(H // H_K, 0), v.repeat_interleave(H // H_K, 0)
    distance = torch.arange(k.shape[1]) - torch.arange(q.shape[1])[:, None] - (k.shape[1] - q.shape[1])
    left, right = window[0], 0 if causal else window[1]
    hidden = (distance > right) & (right >= 0) | (distance < -left) & (left >= 0)
    s = (q @ k.transpose(-1, -2) / math.sqrt(D)).masked_fill(hidden, -math.inf)
    return (s.softmax(-1) @ v).transpose(0, 1), s.logsumexp(-1)


def turned(x, angles, is_interleaved):
    """Returns x [s, h, d] with its first dims multiplied, as complex numbers, by e ** (i * angles [s, r / 2])."""
    r = 2 * angles.shape[-1]
    head, tail = x[..., :r].double(), x[..., r:].double()
    a, b = (head[..., ::2], head[..., 1::2]) if is_interleaved else head.chunk(2, -1)
    z = torch.complex(a, b) * torch.polar(torch.ones_like(angles), angles)[:, None]
    head = torch.view_as_real(z).flatten(-2) if is_interleaved else torch.cat((z.real, z.imag), -1)
    return torch.cat((head, tail), -1)


@pytest.fixture
def case():
    torch.manual_seed(0)
    q = torch.randn(B, 2, H, D)
    k_cache, v_cache = torch.randn(2, B + 1, S, H_K, D).unbind(0)
    k, v = torch.randn(2, B, 3, H_K, D).unbind(0)
    return q, k_cache, v_cache, k, v


def close(a, b):
    torch.testing.assert_close(a.double(), b.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seqlens", [4, torch.tensor([4, 4], dtype=torch.int32), None])
def test_reads_without_new_tokens(case, seqlens):
    q, k_cache, v_cache, *_ = case
    before = k_cache.clone(), v_cache.clone()
    out, lse = fa.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=seqlens, causal=True, return_softmax_lse=True)
    n = S if seqlens is None else 4
    for i in range(B):
        right, right_lse = reference(q[i], k_cache[i, :n], v_cache[i, :n], causal=True)
        close(out[i], right)
        close(lse[i], right_lse)
    assert torch.equal(k_cache, before[0])
    assert torch.equal(v_cache, before[1])


def test_int_seqlens_are_every_sequences(case):
    q, k_cache, v_cache, k, v = case
    caches = [(k_cache.clone(), v_cache.clone()) for _ in range(2)]
    outs = [
        fa.flash_attn_with_kvcache(q, *cache, k, v, cache_seqlens=n)
        for cache, n in zip(caches, (5, torch.tensor([5, 5], dtype=torch.int32)), strict=True)
    ]
    assert torch.equal(*outs)
    assert torch.equal(caches[0][0], caches[1][0])
    assert torch.equal(caches[0][0][:B, 5:8], k)
    right, _ = reference(q[1], caches[0][0][1, :8], caches[0][1][1, :8])
    close(outs[0][1], right)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (3, 1)}], ids=str)
@pytest.mark.parametrize("has_leftpad", [False, True])
@pytest.mark.parametrize("has_batch_idx", [False, True])
def test_rows_and_left_padding(case, options, has_leftpad, has_batch_idx):
    q, k_cache, v_cache, k, v = case
    before = k_cache.clone(), v_cache.clone()
    ends, starts, rows = [4, 6], [1, 3] if has_leftpad else [0, 0], [2, 0] if has_batch_idx else [0, 1]
    out, lse = fa.flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        cache_seqlens=torch.tensor(ends, dtype=torch.int32),
        cache_batch_idx=torch.tensor(rows, dtype=torch.int32) if has_batch_idx else None,
        cache_leftpad=torch.tensor(starts, dtype=torch.int32) if has_leftpad else None,
        return_softmax_lse=True,
        **options,
    )
    for i, (start, end, row) in enumerate(zip(starts, ends, rows, strict=True)):
        before[0][row, end : end + 3], before[1][row, end : end + 3] = k[i], v[i]
        keys, values = (cache[row, start : end + 3] for cache in before)
        right, right_lse = reference(q[i], keys, values, options.get("causal", False), options.get("window_size", (-1, -1)))
        close(out[i], right)
        close(lse[i], right_lse)
    assert torch.equal(k_cache, before[0])
    assert torch.equal(v_cache, before[1])


@pytest.mark.parametrize("function", [fa.flash_attn_with_kvcache, flash_attn_3.flash_attn_with_kvcache])
def test_padding_longer_than_a_sequence_hides_it_alone(case, function):
    q, k_cache, v_cache, _, _ = case
    ends, starts = (torch.tensor(x, dtype=torch.int32) for x in ([3, 6], [5, 2]))
    out = function(q, k_cache, v_cache, cache_seqlens=ends, cache_leftpad=starts)
    close(out[0], torch.zeros_like(out[0]))
    close(out[1], reference(q[1], k_cache[1, 2:6], v_cache[1, 2:6])[0])


@pytest.mark.parametrize("function", [fa.flash_attn_with_kvcache, flash_attn_3.flash_attn_with_kvcache])
@pytest.mark.parametrize(("b", "sq"), [(0, 2), (B, 0)])
def test_no_sequences_and_no_queries(case, function, b, sq):
    q, k_cache, v_cache, k, v = case
    out, lse, *_ = function(q[:b, :sq], k_cache, v_cache, k[:b], v[:b], cache_seqlens=3, return_softmax_lse=True)
    assert (tuple(out.shape), tuple(lse.shape)) == ((b, sq, H, D), (b, H, sq))


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (3, 1)}], ids=str)
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("r", [16, D])
def test_rotary(case, options, is_interleaved, r):
    q, k_cache, v_cache, k, v = case
    angles = torch.rand(S + 3, r // 2, dtype=torch.float64) * 2 * math.pi
    ends = [4, 6]
    before = k_cache.clone()
    out = fa.flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        angles.cos().float(),
        angles.sin().float(),
        cache_seqlens=torch.tensor(ends, dtype=torch.int32),
        cache_leftpad=torch.tensor([1, 0], dtype=torch.int32),
        rotary_interleaved=is_interleaved,
        **options,
    )
    for i, (start, end) in enumerate(zip((1, 0), ends, strict=True)):
        new = turned(k[i], angles[end : end + 3], is_interleaved)
        close(k_cache[i], torch.cat((before[i, :end].double(), new, before[i, end + 3 :].double())))
        queries = turned(q[i], angles[end : end + 2] if options else angles[[end, end]], is_interleaved)
        keys = torch.cat((before[i, start:end].double(), new))
        right, _ = reference(
            queries, keys, v_cache[i, start : end + 3], options.get("causal", False), options.get("window_size", (-1, -1))
        )
        close(out[i], right)


def test_fp8_is_rotated_in_float32(case):
    angles = torch.rand(S + 3, D // 2, dtype=torch.float64) * 2 * math.pi
    q, k_cache, v_cache, k, v = (t.to(torch.float8_e4m3fn) for t in case)
    tables = angles.cos().float(), angles.sin().float()
    ends = torch.tensor([4, 6], dtype=torch.int32)
    out = flash_attn_3.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, None, *tables, ends, rotary_interleaved=False)
    assert out.dtype == torch.bfloat16
    for i, end in enumerate((4, 6)):
        new = turned(k[i].float(), angles[end : end + 3], False)
        close(k_cache[i, end : end + 3].float(), new.float().to(torch.float8_e4m3fn).double())


def test_a_cache_of_other_strides_is_written_in_place(case):
    q, k_cache, v_cache, k, v = case
    k_view, v_view = (c.transpose(1, 2).contiguous().transpose(1, 2) for c in (k_cache, v_cache))
    pointer = k_view.data_ptr()
    lengths = torch.tensor([4, 6], dtype=torch.int32)
    out = fa.flash_attn_with_kvcache(q, k_view, v_view, k, v, cache_seqlens=lengths)
    assert torch.equal(out, fa.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths))
    assert k_view.data_ptr() == pointer
    assert torch.equal(k_view, k_cache)


@pytest.mark.parametrize("leftpad", [None, torch.tensor([1, 2, 3], dtype=torch.int32)])
def test_a_row_may_be_read_twice(case, leftpad):
    _, k_cache, v_cache, *_ = case
    q, rows, ends = torch.randn(3, 2, H, D), [1, 1, 0], [4, 7, 9]
    out = fa.flash_attn_with_kvcache(
        q,
        k_cache[:2],
        v_cache[:2],
        cache_seqlens=torch.tensor(ends, dtype=torch.int32),
        cache_batch_idx=torch.tensor(rows, dtype=torch.int32),
        cache_leftpad=leftpad,
    )
    for i, (row, end) in enumerate(zip(rows, ends, strict=True)):
        start = 0 if leftpad is None else int(leftpad[i])
        close(out[i], reference(q[i], k_cache[row, start:end], v_cache[row, start:end])[0])


def test_a_query_without_keys_has_an_lse_of_inf(case):
    q, k_cache, v_cache, *_ = case
    out, lse = fa.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=1, causal=True, return_softmax_lse=True)
    assert torch.equal(out[:, 0], torch.zeros(B, H, D))
    assert (lse[..., 0] == math.inf).all()
    assert lse[..., 1].isfinite().all()


FUNCTIONS = [fa.flash_attn_with_kvcache, flash_attn_3.flash_attn_with_kvcache]


@pytest.mark.parametrize("function", FUNCTIONS, ids=("2", "3"))
@pytest.mark.parametrize("has_batch_idx", [False, True])
def test_tokens_that_a_row_has_no_room_for_raise(case, function, has_batch_idx):
    q, k_cache, v_cache, k, v = case
    rows = {"cache_batch_idx": torch.tensor([2, 0], dtype=torch.int32)} if has_batch_idx else {}
    before = k_cache.clone()
    some_fit = torch.tensor([4, S - 2], dtype=torch.int32)
    for ends, new, longest in ((S, (k, v), S + 3), (some_fit, (k, v), S + 1), (S + 1, (), S + 1)):
        with pytest.raises(
            ValueError, match=f"a sequence of {longest} tokens; accepted: at most {S}, the size of a row of the cache"
        ):
            function(q, k_cache, v_cache, *new, cache_seqlens=ends, **rows)
    assert torch.equal(k_cache, before)


@pytest.fixture
def unread(monkeypatch):
    """No check reads a value, as on a GPU."""
    monkeypatch.setattr(kv_cache, "are_values_read", lambda values: False)
    monkeypatch.setenv("FLEXATTN_CHECK", "0")


@pytest.mark.parametrize("leftpad", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS, ids=("2", "3"))
def test_tokens_without_room_are_left_out_where_no_value_is_read(case, function, leftpad, unread):
    q, k_cache, v_cache, k, v = case
    before = k_cache.clone(), v_cache.clone()
    starts = {"cache_leftpad": torch.tensor([2, 1], dtype=torch.int32)} if leftpad else {}
    out = function(q, k_cache, v_cache, k, v, cache_seqlens=torch.tensor([S - 1, 4], dtype=torch.int32), **starts)
    for cache, old, new in ((k_cache, before[0], k), (v_cache, before[1], v)):
        old[0, S - 1], old[1, 4:7] = new[0, 0], new[1]
        assert torch.equal(cache, old)
    first = 2 if leftpad else 0
    close(out[0], reference(q[0], k_cache[0, first:], v_cache[0, first:])[0])  # and no key of the second row


@pytest.mark.parametrize("has_table", [False, True])
def test_an_index_of_no_row_raises_and_reaches_no_other_memory(case, has_table, monkeypatch):
    q, k_cache, v_cache, k, v = case
    table = {"block_table": torch.tensor([[0], [1], [2]], dtype=torch.int32)} if has_table else {}
    for wrong in (-1, B + 1):
        given = table | {"cache_seqlens": 4, "cache_batch_idx": torch.tensor([0, wrong], dtype=torch.int32)}
        with pytest.raises(ValueError, match=rf"cache_batch_idx is \[0, {wrong}\]; accepted: 0 to 2, as there are 3 rows"):
            fa.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, **given)
        with monkeypatch.context() as patch:
            patch.setattr(kv_cache, "are_values_read", lambda values: False)
            assert fa.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, **given).isfinite().all()


def test_positions_beyond_the_rotary_tables_raise_and_reach_no_other_memory(case, monkeypatch):
    q, k_cache, v_cache, k, v = case
    given = {"rotary_cos": torch.ones(6, D // 2), "rotary_sin": torch.zeros(6, D // 2), "cache_seqlens": 4, "causal": True}
    with pytest.raises(ValueError, match="rotary_cos and rotary_sin have 6 rows but a token is at position 6"):
        fa.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, **given)
    monkeypatch.setattr(kv_cache, "are_values_read", lambda values: False)
    assert fa.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, **given).isfinite().all()


def test_new_tokens_behind_the_last_sequence_are_not_written(case, unread):
    _, k_cache, v_cache, k, v = case
    q, starts = torch.randn(4, H, D), torch.tensor([0, 2, 4], dtype=torch.int32)
    new, before = [x.flatten(0, 1) for x in (k, v)], k_cache.clone()  # six tokens, two of them behind the end
    tables = torch.ones(S, D // 2), torch.zeros(S, D // 2)
    flash_attn_3.flash_attn_with_kvcache(
        q, k_cache, v_cache, *new, None, *tables, 3, cu_seqlens_q=starts, cu_seqlens_k_new=starts, max_seqlen_q=2
    )
    before[0, 3:5], before[1, 3:5] = new[0][:2], new[0][2:4]
    assert torch.equal(k_cache, before)


@pytest.mark.parametrize("name", ["k", "v"])
def test_new_tokens_of_another_dtype_raise(case, name):
    q, k_cache, v_cache, k, v = case
    new = {"k": k, "v": v}
    with pytest.raises(TypeError, match=f"{name} has dtype torch.float16 and {name}_cache has torch.float32"):
        fa.flash_attn_with_kvcache(q, k_cache, v_cache, **(new | {name: new[name].half()}), cache_seqlens=3)


def test_what_is_refused(case):
    q, k_cache, v_cache, k, v = case
    table = torch.ones(S, D // 2)
    for given in ({"k": k}, {"v": v, "cache_seqlens": 3}, {"k": k, "v": v}):
        with pytest.raises(ValueError, match="k, v or cache_seqlens is missing"):
            fa.flash_attn_with_kvcache(q, k_cache, v_cache, **given)
    for given in (
        {"rotary_cos": table, "k": k, "v": v},
        {"rotary_sin": table, "k": k, "v": v},
        {"rotary_cos": table, "rotary_sin": table},
    ):
        with pytest.raises(ValueError, match="rotary_cos, rotary_sin or k is missing"):
            fa.flash_attn_with_kvcache(q, k_cache, v_cache, **given, cache_seqlens=3)
