"""`flexattn.explaining`: lists each kind of call once, with its kernels and its count, and restores all state."""

from __future__ import annotations

import io
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flexattn
from flexattn import attention, call_cache, explaining, fp8, ops
from flexattn.dispatch import options


def qkv(requires_grad: bool = True, length: int = 24, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(2, length, heads, 16, **options) for heads in (4, 2, 2))
    return q.requires_grad_(requires_grad), k, v


def counts(calls: Any) -> list[tuple[int, int]]:
    return [(call.forwards, call.backwards) for call in calls]


def step(*tensors: Tensor, **arguments: Any) -> None:
    attention(*tensors, **arguments).sum().backward()


def test_one_line_for_each_distinct_call(capsys) -> None:
    with explaining():
        for _ in range(3):
            step(*qkv(), attn_mask_type="causal", backend="eager")
        attention(*qkv(False), qkv_format="sbhd", softcap=3.0, backend="eager")
        assert capsys.readouterr().out == ""
    shapes = "q [2, 24, 4, 16], k and v [2, 24, 2, 16]"
    assert capsys.readouterr().out.splitlines() == [
        f"bshd, float32, {shapes}, causal, cpu: eager (forward and backward); 3 forward, 3 backward",
        f"sbhd, float32, {shapes}, no_mask, softcap, cpu: eager (forward); 1 forward",
    ]


def test_a_line_names_the_kernels_that_ran() -> None:
    with explaining(file=io.StringIO()) as calls:
        step(*qkv(), backend="triton")
    assert str(calls[0]).endswith(": triton / portable (forward and backward); 1 forward, 1 backward")
    assert calls[0].explanation.forward_kernels is not None


def test_calls_that_are_replayed_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, ran = qkv(), []
    run = ops.run
    monkeypatch.setattr(ops, "run", lambda *call, **named: ran.append(call[1]) or run(*call, **named))
    for _ in range(3):
        step(*tensors, attn_mask_type="causal", backend="eager")
    ran.clear()
    step(*tensors, attn_mask_type="causal", backend="eager")
    assert ran == [], "no backend is selected: what was kept is replayed"
    with explaining(file=io.StringIO()) as calls:
        step(*tensors, attn_mask_type="causal", backend="eager")
    assert counts(calls) == [(1, 1)]
    ran.clear()
    step(*tensors, attn_mask_type="causal", backend="eager")
    assert ran == [], "as before"


@pytest.mark.sample
@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_calls_that_were_cached_before_the_block_are_listed(backend: str) -> None:
    tensors = qkv()
    for _ in range(3):
        step(*tensors, backend=backend)
    before = call_cache.cache_info()
    assert before["hits"] >= 2
    with explaining(file=io.StringIO()) as calls:
        for _ in range(2):
            step(*tensors, backend=backend)
    assert counts(calls) == [(2, 2)]
    assert call_cache.cache_info() == before, "neither looked up nor kept"
    step(*tensors, backend=backend)
    assert call_cache.cache_info()["hits"] == before["hits"] + 1, "kept calls run as before"
    assert counts(calls) == [(2, 2)]


def test_results_are_those_of_a_call_outside() -> None:
    tensors = qkv()

    def results() -> list[Tensor]:
        torch.manual_seed(0)
        out, lse = attention(*tensors, dropout_p=0.25, return_lse=True)
        return [out, lse, *torch.autograd.grad(out.sum() + lse.sum(), tensors[:1])]

    outside = results()
    with explaining(file=io.StringIO()):
        inside = results()
    assert all(torch.equal(a, b) for a, b in zip(outside, inside, strict=True))


def test_a_backward_without_its_forward_has_a_line_of_its_own() -> None:
    out = attention(*qkv(), backend="eager")
    with explaining(file=io.StringIO()) as calls:
        out.sum().backward()
    assert [str(call).partition(": ")[2] for call in calls] == ["eager (backward); 1 backward"]


def test_the_backward_of_a_listed_call_may_come_after_the_block() -> None:
    with explaining(file=io.StringIO()) as calls:
        out = attention(*qkv())
    out.sum().backward()
    assert counts(calls) == [(1, 0)]


def test_blocks_are_nested_and_each_lists_its_own() -> None:
    inner, outer = io.StringIO(), io.StringIO()
    with explaining(file=outer) as all_calls:
        attention(*qkv(False))
        with explaining(file=inner) as some:
            attention(*qkv(False))
            attention(*qkv(False, 25))
        attention(*qkv(False, 26))
    assert counts(some) == [(1, 0), (1, 0)]
    assert counts(all_calls) == [(2, 0), (1, 0), (1, 0)]
    assert len(inner.getvalue().splitlines()) == 2
    assert len(outer.getvalue().splitlines()) == 3
    assert ops.observers == ()
    assert options.snapshot() is not None


def test_a_block_that_raises_prints_what_ran(capsys) -> None:
    with pytest.raises(ZeroDivisionError), explaining():
        attention(*qkv(False))
        _ = 1 // 0
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert ops.observers == ()


def test_calls_of_all_threads_are_counted() -> None:
    tensors = qkv(False)
    with explaining(file=io.StringIO()) as calls:
        threads = [threading.Thread(target=lambda: [attention(*tensors) for _ in range(20)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert counts(calls) == [(80, 0)]


@pytest.mark.slow
def test_what_a_model_calls_is_listed_compiled_or_not() -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([flexattn.nn.MultiheadAttention(32, 2, batch_first=True) for _ in range(2)])
    x = torch.randn(2, 12, 32)

    def run(x: Tensor) -> Tensor:
        for layer in model:
            x = x + layer(x, x, x, need_weights=False)[0]
        return x

    compiled = torch.compile(run, backend="eager")
    lines = []
    for function in (run, compiled, compiled):
        with explaining(file=io.StringIO()) as calls:
            function(x).sum().backward()
        lines.append([str(call) for call in calls])
    assert lines[0] == lines[1] == lines[2]
    assert [line.partition("; ")[2] for line in lines[0]] == ["2 forward, 2 backward"]


def test_a_checkpointed_call_runs_twice_forward() -> None:
    q, k, v = qkv()
    with explaining(file=io.StringIO()) as calls:
        torch.utils.checkpoint.checkpoint(attention, q, k, v, use_reentrant=False).sum().backward()
    assert counts(calls) == [(2, 1)]


def test_the_parts_of_a_call_in_fp8_are_listed_by_what_each_multiplies() -> None:
    tensors = qkv(dtype=torch.bfloat16)
    with explaining(file=io.StringIO()) as calls:
        step(*tensors, fp8_recipe=fp8.Recipe(), backend="eager")
        step(*tensors, fp8_recipe=fp8.Recipe(bf16_backward=True), backend="eager")
    assert [("float8_e4m3fn" in call.text, call.forwards, call.backwards) for call in calls] == [
        (True, 1, 1),
        (True, 1, 0),
        (False, 0, 1),
    ]


def test_functions_built_on_attention_are_seen() -> None:
    q, k, v = qkv(False)
    with explaining(file=io.StringIO()) as calls:
        out, lse = attention(q, k, v, return_lse=True, score_mod=lambda score, b, h, i, j: score + h)
        for _ in range(2):
            flexattn.attention_backward(out, q, k, v, out, lse)
    assert "score_mod or mask_mod" in calls[0].text
    assert [str(call).partition(": ")[2] for call in calls] == ["eager (forward); 1 forward", "eager (backward); 2 backward"]
    assert "part of the keys" in calls[1].text
