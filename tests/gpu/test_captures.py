"""CUDA graphs captured before a first use, after other steps and before a change in place; default devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from flexattn import PagedKVCache, attention, create_block_mask, mods
from flexattn.integrations import te
from flexattn.integrations.te.recipe import DelayedScaling
from flexattn.testing import FORWARD_FACTOR, GRADIENT_FACTOR, check_close

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and torch.cuda.is_available() is False")

HEADS, HEADS_KV, DIM, TOKENS = 4, 2, 64, 384


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").bfloat16()


def capture(run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Captures a call, in CUDA's default mode: a forbidden call in any thread ends the capture."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    return graph, results


def overwrite_free_memory() -> None:
    """Fills memory that nothing owns, which a graph or a cache might still read."""
    for size in (1 << 10, 1 << 14, 1 << 20):
        blocks = [torch.full((size,), 0x7F7F7F7F, dtype=torch.int32, device="cuda") for _ in range(64)]
        del blocks


def block_mask(reach: int) -> Any:
    return create_block_mask(lambda b, h, i, j: (j <= i) & (j > i - reach), None, None, TOKENS, TOKENS, "cuda", 64)


def qkv() -> list[Tensor]:
    return [normal(2, TOKENS, h, DIM, seed=h).requires_grad_() for h in (HEADS, HEADS_KV, HEADS_KV)]


def with_gradients(mask: Any, tensors: list[Tensor], backend: str = "triton") -> list[Tensor]:
    with torch.enable_grad():
        out = attention(*tensors, block_mask=mask, backend=backend)
        return [out, *torch.autograd.grad(out, tensors, normal(*out.shape, seed=9).to(out.dtype))]


def compare(got: Any, tensors: list[Tensor], run: Callable[[list[Tensor]], Any]) -> None:
    """Compares results, out first, with `run` of the tensors on the eager backend, in float64 and in their own dtype."""
    exact, same = (run([t.detach().to(dtype).requires_grad_() for t in tensors]) for dtype in (torch.float64, torch.bfloat16))
    each = zip(got, exact, same, strict=True) if isinstance(got, list) else [(got, exact, same)]
    for i, (x, ref, eager) in enumerate(each):
        check_close(f"result {i}", x, ref, eager, factor=GRADIENT_FACTOR if i else FORWARD_FACTOR)


def test_a_block_mask_whose_first_use_is_captured() -> None:
    tensors, dout = qkv(), normal(2, TOKENS, HEADS, DIM, seed=9)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            with_gradients(block_mask(100), tensors)
    torch.cuda.synchronize()
    mask = block_mask(150)

    def run() -> list[Tensor]:
        out = attention(*tensors, block_mask=mask, backend="triton")
        return [out, *torch.autograd.grad(out, tensors, dout)]

    graph, captured = capture(run)
    # Before any replay has written the graph's lists.
    compare(with_gradients(mask, tensors), tensors, lambda given: with_gradients(mask, given, "eager"))
    overwrite_free_memory()
    graph.replay()
    compare(captured, tensors, lambda given: with_gradients(mask, given, "eager"))


@pytest.mark.parametrize("is_used_before", [False, True])
def test_a_replay_follows_changes_of_a_block_mask(is_used_before: bool) -> None:
    tensors = qkv()
    with torch.no_grad():
        for _ in range(3):
            attention(*tensors, block_mask=block_mask(100), backend="triton")
        mask = block_mask(200)
        if is_used_before:
            attention(*tensors, block_mask=mask, backend="triton")
        graph, out = capture(lambda: attention(*tensors, block_mask=mask, backend="triton"))
        graph.replay()
        before = out.clone()
        mask.full_kv_num_blocks.zero_()
        graph.replay()
        assert not torch.equal(out, before)
        compare(out, tensors, lambda given: attention(*given, block_mask=mask, backend="eager"))


@pytest.mark.parametrize("longest", [None, 3])
def test_a_cache_captured_in_a_step_of_one_token_serves_steps_of_three(longest: int | None) -> None:
    cache = PagedKVCache([torch.zeros(2, 32, 16, HEADS_KV, DIM, device="cuda").bfloat16()], max_sequences=3, max_length=128)
    first, second = cache.add(), cache.add()
    rows = [normal(6, h, DIM, seed=h) for h in (HEADS, HEADS_KV, HEADS_KV)]

    def run() -> Tensor:
        cache.append(0, *rows[1:])
        return attention(rows[0], *cache.pools[0], **cache.arguments(longest=longest), backend="triton")

    for new in ({first: 40, second: 17}, {first: 1, second: 1}):
        cache.step(new)
        total = sum(new.values())
        cache.append(0, *(normal(total, HEADS_KV, DIM, seed=total + i) for i in range(2)))
    with torch.no_grad():
        attention(rows[0], *cache.pools[0], **cache.arguments(longest=3), backend="triton")
        attention(rows[0], *cache.pools[0], **(cache.arguments() | {"max_seqlen_q": 128}), backend="triton")
        graph, out = capture(run)
        for new in ({first: 3, second: 3}, {first: 1, second: 2}, {first: 0, second: 3}):
            cache.step(new)
            for x in rows:
                x.normal_()
            graph.replay()
            total = sum(new.values())
            named = cache.arguments()
            tensors = [rows[0][:total], *cache.pools[0]]
            compare(out[:total], tensors, lambda given: attention(*given, **named, backend="eager"))  # noqa: B023


def test_a_step_is_not_captured() -> None:
    cache = PagedKVCache([torch.zeros(2, 8, 16, HEADS_KV, DIM, device="cuda")], max_sequences=2, max_length=64)
    sequence = cache.add()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match=r"PagedKVCache.step is called while a CUDA graph is captured"), torch.cuda.graph(graph):
        torch.zeros(1, device="cuda")
        cache.step({sequence: 1})


@pytest.mark.parametrize("fmt", ["bshd", "thd"])
@pytest.mark.parametrize("pages", [{}, {"is_paged": True, "total_num_pages": 40, "page_size": 16}], ids=["rows", "pages"])
def test_layers_of_transformer_engine_s_cache_in_a_graph(fmt: str, pages: dict[str, Any]) -> None:
    """Captured in a step of one token each; later steps have more tokens, and another sequence in a row."""
    module = te.DotProductAttention(
        HEADS, DIM, num_gqa_groups=HEADS_KV, qkv_format=fmt, attn_mask_type="padding_causal", layer_number=1
    )
    module.eval()
    shapes = [(2, 3, h, DIM) if fmt == "bshd" else (6, h, DIM) for h in (HEADS, HEADS_KV, HEADS_KV)]
    layers = [normal(*shape, seed=i) for i, shape in enumerate(shapes)]
    caches = [te.InferenceParams(2, 128, HEADS_KV, DIM, torch.bfloat16, qkv_format=fmt, **pages) for _ in range(2)]
    with torch.no_grad():
        for cache in caches:
            for step in ({"a": 3, "b": 2}, {"a": 1, "b": 1}):
                cache.pre_step(step)
                module(*layers, inference_params=cache)
        if fmt == "thd":  # compiles the kernels of the capture
            cache = te.InferenceParams(2, 128, HEADS_KV, DIM, torch.bfloat16, qkv_format=fmt, **pages)
            cache.pre_step({"a": 3, "b": 3})
            module(*layers, inference_params=cache)
        graph, out = capture(lambda: module(*layers, inference_params=caches[0]))
        for step in ({"a": 3, "b": 2}, {"b": 1, "c": 3}, {"c": 2, "b": 3}):
            for x in layers:
                x.normal_()
            for cache in caches:
                cache.pre_step(step)
            graph.replay()
            wanted = module(*layers, inference_params=caches[1])
            counts = list(step.values())
            got, wanted = (
                torch.cat([x[i, :n] for i, n in enumerate(counts)]) if fmt == "bshd" else x[: sum(counts)] for x in (out, wanted)
            )
            # The graph's launches are those of longer steps, so sums over keys may have another order.
            torch.testing.assert_close(got, wanted, rtol=2**-6, atol=2**-6)


def test_slopes_whose_first_use_is_captured() -> None:
    from flexattn import prepare

    tensors = qkv()
    with torch.no_grad():
        for _ in range(3):
            attention(*tensors, bias_type="alibi", attn_mask_type="causal", backend="triton")
        prepare.default_alibi_slopes.cache_clear()  # type: ignore[attr-defined]
        graph, out = capture(lambda: attention(*tensors, bias_type="alibi", attn_mask_type="causal", backend="triton"))
        options = {"bias_type": "alibi", "attn_mask_type": "causal", "backend": "eager"}
        attention(*tensors, **options)
        overwrite_free_memory()
        graph.replay()
        compare(out, tensors, lambda given: attention(*given, **options))


def test_a_layer_with_delayed_scaling_is_called_before_a_capture() -> None:
    module = te.DotProductAttention(HEADS, DIM, num_gqa_groups=HEADS_KV, qkv_format="bshd", attn_mask_type="causal")
    tensors = [t.detach() for t in qkv()]
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(RuntimeError, match=r"the first call of a layer with delayed scaling"),
        torch.cuda.graph(graph),
        te.autocast(recipe=DelayedScaling(fp8_dpa=True)),
    ):
        torch.zeros(1, device="cuda")
        module(*tensors)


@pytest.fixture
def cuda_by_default() -> Iterator[None]:
    torch.set_default_device("cuda")
    yield
    torch.set_default_device(None)


@pytest.mark.usefixtures("cuda_by_default")
def test_calls_with_the_gpu_as_the_default_device() -> None:
    cache = PagedKVCache([torch.zeros(2, 8, 16, HEADS_KV, DIM).bfloat16()], max_sequences=2, max_length=64)
    cache.step({cache.add(): 3})
    cache.append(0, *(normal(3, HEADS_KV, DIM, seed=i) for i in range(2)))
    out = attention(normal(3, HEADS, DIM), *cache.pools[0], **cache.arguments())
    assert out.isfinite().all()
    factor, table = 0.5, mods.relative_bias(normal(32, HEADS).float())
    tensors = qkv()

    def run(given: list[Tensor], backend: str = "eager") -> Tensor:
        return attention(*given, score_mod=lambda s, b, h, i, j: table(s * factor, b, h, i, j), backend=backend)

    compare(run(tensors, "triton"), tensors, run)
    inference = te.InferenceParams(2, 64, HEADS_KV, DIM, torch.bfloat16, is_paged=True, total_num_pages=8, page_size=16)
    inference.pre_step({"a": 2})
    assert inference.get_seqlens_pre_step().device.type == "cpu"
    inference.step(1, *normal(2, 1, 2, HEADS_KV, DIM), "bshd")
    doubled = te.TEScoreMod(
        lambda graph, score, tensors: graph.mul(a=score, b=tensors["two"]),
        lambda graph, dscore, tensors: graph.mul(a=dscore, b=tensors["two"]),
        {"two": 2.0},
    )
    doubled.check_bprop()
