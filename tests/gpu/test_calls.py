"""Recorded calls replayed on a GPU: the same bits as an ordinary call, with other tensors, streams and threads."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor

import flexattn
from flexattn import call_cache, checked_call, fp8
from flexattn.kernels_triton.runtime import launch
from flexattn.testing import make_inputs
from tests.support import storages

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and torch.cuda.is_available() is False")

HEADS = 6


def biased(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score * FACTOR + SLOPES[h] * (i - j)


FACTOR = 0.5
SLOPES = torch.linspace(0.1, 1.0, HEADS, device="cuda", requires_grad=True) if torch.cuda.is_available() else torch.ones(HEADS)
LONG = {"head_dim_qk": 128, "head_dim_v": 128, "dtype": torch.bfloat16}
DELAYED = fp8.Recipe(scaling="delayed")
STATE = fp8.DelayedScaling(DELAYED, HEADS, 2, device="cuda" if torch.cuda.is_available() else "cpu")  # scales stay 1 without update
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "causal": ({"qkv_format": "bshd", "lengths_q": [333, 333], **LONG}, {"attn_mask_type": "causal"}),
    "full, d 64": ({"qkv_format": "bhsd", "lengths_q": [70, 70], "dtype": torch.float16, "head_dim_qk": 64, "head_dim_v": 64}, {}),
    "strided": ({"qkv_format": "sbhd", "lengths_q": [200], "lengths_kv": [300], "strided": True, **LONG}, {"window_size": (50, 9)}),
    "packed": ({"qkv_format": "thd", "lengths_q": [200, 0, 333, 1], "gap": 3, **LONG}, {"attn_mask_type": "padding_causal"}),
    "split keys": (
        {"qkv_format": "thd", "lengths_q": [3, 1], "lengths_kv": [4000, 3000], "gap": 3, **LONG},
        {"attn_mask_type": "padding_causal_bottom_right"},
    ),
    "mod": ({"qkv_format": "bshd", "lengths_q": [150], **LONG}, {"score_mod": biased}),
    "everything": (
        {"qkv_format": "bshd", "lengths_q": [150, 150], "lengths_kv": [180, 180], **LONG},
        {"softcap": 5.0, "softmax_type": "learnable", "dropout_p": 0.2, "attn_mask_type": "causal_bottom_right", "has_bias": True},
    ),
    "fp8": ({"qkv_format": "bshd", "lengths_q": [333, 333], **LONG}, {"attn_mask_type": "causal", "fp8_recipe": fp8.Recipe()}),
    "fp8 packed": (
        {"qkv_format": "thd", "lengths_q": [200, 0, 333, 1], "gap": 3, **LONG},
        {"attn_mask_type": "padding_causal", "fp8_recipe": fp8.Recipe(granularity="block", rotation=True, fp8_format="HYBRID")},
    ),
    "fp8 delayed": ({"qkv_format": "bshd", "lengths_q": [333], **LONG}, {"fp8_recipe": DELAYED, "fp8_state": STATE}),
    "fp32": ({"qkv_format": "bshd", "lengths_q": [90], "head_dim_qk": 72, "head_dim_v": 40}, {"attn_mask_type": "causal"}),
}


def make_arguments(name: str, seed: int) -> tuple[dict[str, Any], list[Tensor]]:
    how, more = CASES[name]
    inputs = make_inputs(**how, num_heads=HEADS, num_heads_kv=2, device="cuda", seed=seed)
    arguments = inputs._asdict() | {name: value for name, value in more.items() if name != "has_bias"}
    leaves = [arguments[n].nan_to_num().requires_grad_() for n in "qkv"]
    arguments |= dict(zip("qkv", leaves, strict=True))
    if "has_bias" in more:
        arguments["bias_type"] = "post_scale_bias"
        arguments["bias"] = torch.randn(1, HEADS, 150, 180, device="cuda", dtype=inputs.q.dtype, requires_grad=True)
        arguments["softmax_offset"] = torch.randn(HEADS, device="cuda", requires_grad=True)
        leaves += [arguments["bias"], arguments["softmax_offset"]]
    if "dropout_p" in more:
        arguments["rng_state"] = torch.tensor([seed, 7], device="cuda")
    return arguments, leaves + ([SLOPES] if "score_mod" in more else [])


def run(arguments: dict[str, Any], leaves: list[Tensor], deterministic: bool = True) -> list[Tensor]:
    out, lse = flexattn.attention(**arguments, backend="triton", deterministic=deterministic, return_lse=True)
    gradients = torch.autograd.grad((out, lse), leaves, (torch.sin(out.detach()), torch.cos(lse.detach().nan_to_num(neginf=0.0))))
    return [out.detach(), lse.detach(), *gradients]


def ordinary(arguments: dict[str, Any], leaves: list[Tensor]) -> list[Tensor]:
    call_cache.clear_cache()
    return run(arguments, leaves)


@pytest.mark.parametrize("hopper", ["never", "always"])
@pytest.mark.parametrize("name", CASES)
def test_a_tape_gives_the_bits_of_an_ordinary_call(name: str, hopper: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXATTN_HOPPER", hopper)
    given = [make_arguments(name, seed) for seed in range(4)]
    wanted = [ordinary(*one) for one in given]
    call_cache.clear_cache()
    for _ in range(3):
        run(*given[0])
    assert call_cache.cache_info()["recordings"] == 2, call_cache.cache_info()
    side = torch.cuda.Stream()
    for (arguments, leaves), want in zip(given, wanted, strict=True):
        for stream in (torch.cuda.current_stream(), side):
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                got = run(arguments, leaves)
            torch.cuda.synchronize()
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), f"{name} on {stream}"
    assert call_cache.cache_info()["size"] == 1


@pytest.mark.parametrize("ways", [("one storage", "apart"), ("apart", "one storage"), ("one storage", "one storage, reversed")])
@pytest.mark.parametrize("sizes", [storages.Sizes(20, 64, torch.bfloat16), storages.Sizes(500, 128, torch.bfloat16)])
@pytest.mark.parametrize("hopper", ["never", "always"])
@pytest.mark.parametrize("name", storages.CASES)
def test_a_replay_reads_the_tensors_it_is_given(
    name: str, hopper: str, sizes: storages.Sizes, ways: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded from tensors in one storage and replayed with tensors apart, and the other way round."""
    monkeypatch.setenv("FLEXATTN_HOPPER", hopper)
    torch.manual_seed(0)
    drawn = storages.CASES[name](sizes), storages.CASES[name](sizes)
    recorded, replayed = (storages.PLACES[way] for way in ways)
    storages.check_replay(drawn, recorded, replayed, "cuda")


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("hopper", ["never", "always"])
@pytest.mark.parametrize("name", CASES)
def test_replays_that_are_compared_pass(name: str, hopper: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXATTN_HOPPER", hopper)
    monkeypatch.setenv("FLEXATTN_CHECK", "1")
    monkeypatch.setattr(checked_call, "SHARE", 1.0)
    compared: list[str] = []
    compare = checked_call.CheckedCall._compare

    def noted(self: checked_call.CheckedCall, direction: str, *others: Any) -> None:
        compared.append(direction)
        compare(self, direction, *others)

    monkeypatch.setattr(checked_call.CheckedCall, "_compare", noted)
    call_cache.clear_cache()
    for seed in range(10):
        run(*make_arguments(name, seed), deterministic)
    assert compared == ["forward", "backward"] * 8


@pytest.mark.parametrize("name", ["causal", "packed"])
def test_a_wrong_replay_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXATTN_CHECK", "1")
    monkeypatch.setattr(checked_call, "SHARE", 1.0)
    call_cache.clear_cache()
    for seed in range(3):
        run(*make_arguments(name, seed))
    (kept,) = call_cache.kept_calls()
    recording: Any = kept.forwards.recording
    replay, others = recording.replay, make_arguments(name, 9)[0]

    def wrong(tensors: Any, addresses: Any) -> Any:
        return replay((others["q"], *tensors[1:]), (others["q"].data_ptr(), *addresses[1:]))

    recording.replay = wrong
    with pytest.raises(RuntimeError, match="a replayed forward gave another out than the same call unrecorded"):
        run(*make_arguments(name, 4))


@pytest.mark.parametrize("name", ["causal", "full, d 64", "packed"])
def test_a_recording_of_cudnn(name: str) -> None:
    given = [make_arguments(name, seed) for seed in range(3)]
    try:
        flexattn.explain(**given[0][0], backend="cudnn")
    except flexattn.BackendError as e:
        pytest.skip(str(e))

    def run_cudnn(arguments: dict[str, Any], leaves: list[Tensor]) -> tuple[Tensor, ...]:
        out = flexattn.attention(**arguments, backend="cudnn")
        return out.detach(), *torch.autograd.grad(out, leaves, torch.sin(out.detach()))

    wanted = []
    for one in given:
        call_cache.clear_cache()
        wanted.append(run_cudnn(*one))
    call_cache.clear_cache()
    for _ in range(3):
        run_cudnn(*given[0])
    assert call_cache.cache_info()["recordings"] == 2, call_cache.cache_info()
    for one, want in zip(given, wanted, strict=True):
        got = run_cudnn(*one)
        assert torch.equal(got[0], want[0])
        for mine, theirs in zip(got[1:], want[1:], strict=True):  # sums by atomic additions, in any order
            assert (mine - theirs).abs().max() <= 0.02 * theirs.abs().max()


def test_without_gradients_and_under_inference_mode() -> None:
    arguments, _ = make_arguments("causal", 0)
    with torch.no_grad():
        first = flexattn.attention(**arguments, backend="triton")
        for _ in range(3):
            assert torch.equal(first, flexattn.attention(**arguments, backend="triton"))
    with torch.inference_mode():
        for _ in range(4):
            out = flexattn.attention(**arguments, backend="triton")
            assert torch.equal(first, out)
        assert out.is_inference()
    assert call_cache.cache_info()["recordings"] == 1


@pytest.mark.parametrize("hopper", ["never", "always"])
@pytest.mark.parametrize("name", CASES)
def test_another_scale_gives_the_bits_of_an_ordinary_call(name: str, hopper: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/runtime/test_launches.py shows that its first run is a replay. Here it is not: recordings poison their results."""
    monkeypatch.setenv("FLEXATTN_HOPPER", hopper)
    arguments, leaves = make_arguments(name, 0)
    others = [arguments | {"softmax_scale": scale} for scale in (0.05, 0.2)]
    others += [one | {"softcap": 3.0} for one in others if "softcap" in arguments]
    wanted = [ordinary(one, leaves) for one in others]
    call_cache.clear_cache()
    for _ in range(3):
        run(arguments | {"softmax_scale": 0.1}, leaves)
    for _ in range(3):
        for one, want in zip(others, wanted, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(run(one, leaves), want, strict=True))


def test_threads_share_tapes() -> None:
    given = [make_arguments("causal", seed) for seed in range(4)]
    wanted = [ordinary(*one) for one in given]
    wrong: list[int] = []

    def work(n: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                got = run(*given[n])
                torch.cuda.current_stream().synchronize()
                if not all(torch.equal(a, b) for a, b in zip(got, wanted[n], strict=True)):
                    wrong.append(n)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert call_cache.cache_info()["size"] == 1


def test_a_graph_of_played_calls_replays() -> None:
    arguments, leaves = make_arguments("packed", 0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run(arguments, leaves)
    torch.cuda.current_stream().wait_stream(side)
    before = call_cache.cache_info()["recordings"]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(arguments, leaves)
    assert call_cache.cache_info()["recordings"] == before == 2
    other, other_leaves = make_arguments("packed", 1)
    with torch.no_grad():
        for mine, theirs in zip(leaves, other_leaves, strict=True):
            mine.copy_(theirs)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(captured, ordinary(other, other_leaves), strict=True))


def test_slopes_that_a_captured_graph_made_are_not_kept() -> None:
    q = torch.randn(1, 64, HEADS, 64, device="cuda", dtype=torch.bfloat16)
    call = {"q": q, "k": q, "v": q, "bias_type": "alibi", "backend": "triton"}
    first = flexattn.attention(**call)
    torch.cuda.synchronize()
    call_cache.clear_cache()  # its kernels stay loaded: the call that is captured is again the first of its kind
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = flexattn.attention(**call)
    assert call_cache.cache_info()["recordings"] == 0
    graph.replay()
    assert torch.equal(captured, first)
    for _ in range(3):
        assert torch.equal(flexattn.attention(**call), first)


def test_nothing_but_outputs_stays_allocated() -> None:
    arguments, leaves = make_arguments("everything", 0)
    for _ in range(4):
        run(arguments, leaves)
    gc.collect()  # left in cycles by earlier tests
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(10):
        run(arguments, leaves)
    torch.cuda.synchronize()
    for _ in range(100):  # autograd's thread releases its results a moment later
        if torch.cuda.memory_allocated() == before:
            break
        time.sleep(0.01)
    assert torch.cuda.memory_allocated() == before


def test_a_hook_on_launches_sees_them() -> None:
    import triton

    arguments, leaves = make_arguments("causal", 0)
    for _ in range(4):
        run(arguments, leaves)
    seen: list[str] = []
    hooks = triton.knobs.runtime.launch_enter_hook

    def hook(metadata: Any) -> None:
        seen.append(metadata.get()["name"])

    hooks.add(hook)
    try:
        run(arguments, leaves)
    finally:
        hooks.remove(hook)
    assert len(seen) >= 3
    assert launch.is_plain()


def test_a_capture_that_moves() -> None:
    """If saved tensors come back with other strides, no recording fits."""
    q = torch.randn(2, 100, 6, 128, device="cuda", dtype=torch.bfloat16).transpose(1, 2).contiguous().transpose(1, 2)
    q.requires_grad_()
    dout = torch.randn(2, 100, 6, 128, device="cuda", dtype=torch.bfloat16)

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(flexattn.attention(q, q, q, backend="triton", deterministic=True), q, dout)

    want = gradients()
    for _ in range(3):
        gradients()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.cpu(), lambda t: t.cuda().contiguous()):
        assert torch.equal(gradients()[0], want[0])
