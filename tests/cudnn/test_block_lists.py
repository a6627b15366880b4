"""Lists of blocks on cuDNN's block-sparse attention, against dense attention in fp64 with the mask that the lists spell.

On an NVIDIA H200 with the frontend from 1.32 on, its kernels run. Elsewhere a stand-in in plain torch has their contract.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("cudnn", reason="nvidia-cudnn-frontend is not installed")

import flexattn
from flexattn import attention, ops
from flexattn.block_mask import ordered
from flexattn.dispatch import cudnn_backend, cudnn_block_lists, cudnn_rules, select
from flexattn.dispatch.spec import Band, Results, with_classes
from flexattn.kernels_cudnn.block_lists import Problem, blocks_of
from flexattn.testing import GRADIENT_FACTOR, check_close, make_call, make_inputs
from tests.support import cudnn_block_sparse

IS_REAL = (
    torch.cuda.is_available()
    and torch.cuda.get_device_capability() == (9, 0)
    and (cudnn_backend.library_error() or cudnn_block_lists.frontend_error()) is None
)
DEVICE = "cuda" if IS_REAL else "cpu"


@pytest.fixture(autouse=True)
def frontend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The frontend's kernels, or the stand-in and an imitated H200."""
    calls = None
    if not IS_REAL:
        calls = cudnn_block_sparse.install(monkeypatch)
        real = ops.make_spec
        monkeypatch.setattr(
            ops,
            "spec_to_run",
            lambda x, settings: with_classes(real(x, settings, (9, 0)), x)._replace(device_type="cuda"),
        )
    select.forget_rejections()
    yield calls
    monkeypatch.undo()
    select.forget_rejections()


def draw(batch: int, heads: int, rows: int, columns: int, n: int) -> tuple[Tensor, Tensor]:
    """Returns lists of n blocks with empty entries and repeats, and counts. The lists of the first queries are empty."""
    generator = torch.Generator().manual_seed(rows * columns + heads)
    indices = torch.randint(-1, columns, (batch, heads, rows, n), generator=generator, dtype=torch.int32)
    counts = torch.randint(1, n + 1, (batch, heads, rows), generator=generator, dtype=torch.int32)
    counts[:, 0, 0] = 0
    indices[..., -1, 0] = columns - 1  # the last block, which may not be full
    return indices.to(DEVICE), counts.to(DEVICE)


def mask_of(indices: Tensor, counts: Tensor | None, size: int, sizes: tuple[int, int, int]) -> Tensor:
    """Returns the dense mask, bool [b, heads, sq, skv], that lists of blocks spell."""
    heads, queries, keys = sizes
    columns = -(-keys // size)
    chosen = torch.zeros(*indices.shape[:-1], columns, dtype=torch.bool, device=indices.device)
    for i in range(indices.shape[-1]):
        block, is_listed = indices[..., i], indices[..., i] >= 0
        is_listed = is_listed if counts is None else is_listed & (i < counts)
        chosen |= (torch.arange(columns, device=indices.device) == block[..., None]) & is_listed[..., None]
    chosen = chosen.repeat_interleave(size, 2)[:, :, :queries].repeat_interleave(size, 3)[..., :keys]
    return chosen.repeat_interleave(heads // chosen.shape[1], 1)


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Returns out [b, h, sq, d] and lse of q, k and v [b, h, s, d]."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(~mask, float("-inf"))
    lse = scores.float().logsumexp(-1) if q.dtype is not torch.float64 else scores.logsumexp(-1)
    weights = scores.softmax(-1).masked_fill(~mask.any(-1, keepdim=True), 0.0)
    return weights @ v, lse


def tensors(fmt: str, shape: tuple[int, int, int, int, int], dims: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    """Returns leaves q, k and v. shape: batch, heads, key heads, queries and keys."""
    batch, heads, heads_kv, queries, keys = shape
    generator = torch.Generator().manual_seed(1)
    leaves = []
    for h, s, d in ((heads, queries, dims[0]), (heads_kv, keys, dims[0]), (heads_kv, keys, dims[1])):
        sizes = {"b": batch, "h": h, "s": s, "d": d}
        leaves.append(torch.randn([sizes[dim] for dim in fmt], generator=generator).to(DEVICE, dtype).requires_grad_())
    return leaves


def bhsd(t: Tensor, fmt: str) -> Tensor:
    return t.permute([fmt.index(dim) for dim in "bhsd"])


def check(leaves: list[Tensor], fmt: str, lists: tuple[Tensor, Tensor | None], size: int, **options: Any) -> None:
    """Compares out, lse and, if cuDNN has them, gradients."""
    q, k, _ = leaves
    scale = options.get("softmax_scale", q.shape[-1] ** -0.5)
    mask = mask_of(*lists, size, (bhsd(q, fmt).shape[1], bhsd(q, fmt).shape[2], bhsd(k, fmt).shape[2]))
    is_trained = q.dtype is torch.bfloat16 and {t.shape[-1] for t in leaves} == {128}
    is_trained = is_trained and bhsd(q, fmt).shape[1] == bhsd(k, fmt).shape[1]
    given = leaves if is_trained else [t.detach() for t in leaves]
    results = attention(
        *given,
        qkv_format=fmt,
        kv_indices=lists[0],
        kv_index_counts=lists[1],
        kv_block_size=size,
        backend="cudnn",
        return_lse=True,
        **options,
    )
    expected = {}
    for dtype in (torch.float64, q.dtype):
        inputs = [t.detach().to(dtype).requires_grad_() for t in leaves]
        out, lse = dense(*(bhsd(t, fmt) for t in inputs), mask, scale)
        expected[dtype] = [bhsd(out, "bhsd").permute(["bhsd".index(dim) for dim in fmt]), lse]
        if is_trained:
            dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(DEVICE, q.dtype)
            dout = dout.permute(["bhsd".index(dim) for dim in fmt])
            expected[dtype] += torch.autograd.grad(expected[dtype][0], inputs, dout.to(dtype))
    got = [*results, *(torch.autograd.grad(results[0], leaves, dout) if is_trained else ())]
    assert got[0].shape == expected[q.dtype][0].shape
    for name, t, exact, same in zip(
        ("out", "lse", "dq", "dk", "dv"), got, expected[torch.float64], expected[q.dtype], strict=False
    ):
        check_close(name, t, exact, same, factor=GRADIENT_FACTOR if name.startswith("d") else 2.0)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("size", "queries", "keys", "fmt"),
    [
        (64, 192, 230, "bshd"),
        (128, 300, 384, "bhsd"),
        pytest.param(64, 192, 230, "bhsd", marks=SLOW),
        pytest.param(64, 128, 384, "sbhd", marks=SLOW),
        pytest.param(128, 300, 290, "bshd", marks=SLOW),
        pytest.param(128, 256, 384, "sbhd", marks=SLOW),
    ],
)
def test_results_and_gradients(size: int, queries: int, keys: int, fmt: str, frontend: Any) -> None:
    leaves = tensors(fmt, (2, 2, 2, queries, keys), (128, 128), torch.bfloat16)
    check(leaves, fmt, draw(2, 2, -(-queries // size), -(-keys // size), 3), size)
    assert frontend is None or (frontend.forward, frontend.backward) == (1, 1)


@pytest.mark.parametrize(
    ("size", "dims", "dtype"), [(64, (64, 128), torch.float16), (64, (96, 64), torch.bfloat16), (128, (96, 64), torch.float16)]
)
def test_grouped_heads_have_a_forward(size: int, dims: tuple[int, int], dtype: torch.dtype) -> None:
    leaves = tensors("bshd", (2, 4, 2, 128, 200), dims, dtype)
    lists = draw(1, 2, 128 // size, -(-200 // size), 2)
    check(leaves, "bshd", (lists[0], None), size)


@pytest.mark.parametrize(("size", "scale"), [(64, 0.0), (128, 0.0), (64, 0.2)])
def test_other_scales(size: int, scale: float) -> None:
    leaves = tensors("bshd", (1, 2, 2, 128, 128), (128, 128), torch.bfloat16)
    check(leaves, "bshd", draw(1, 1, 128 // size, 128 // size, 2), size, softmax_scale=scale)


def test_views_of_one_buffer_and_other_memory() -> None:
    """Packed q, k and v give a packed gradient. Tensors off the kernels' alignment are copied. out goes to the caller's memory."""
    lists, _ = draw(1, 2, 2, 2, 2)
    qkv = torch.randn(2, 128, 3, 2, 128, device=DEVICE).bfloat16()
    shifted = torch.empty(qkv.numel() + 1, dtype=qkv.dtype, device=DEVICE)[1:].view_as(qkv).copy_(qkv)
    results = []
    for buffer in (qkv.requires_grad_(), shifted.requires_grad_()):
        out = attention(*buffer.unbind(2), kv_indices=lists, kv_block_size=64, backend="cudnn")
        results.append((out, *torch.autograd.grad(out.float().square().sum(), [buffer])))
    q, k, v = (t.detach().clone().requires_grad_() for t in qkv.unbind(2))
    out = attention(q, k, v, kv_indices=lists, kv_block_size=64, backend="cudnn")
    wanted = torch.stack(torch.autograd.grad(out.float().square().sum(), (q, k, v)), 2)
    for _ in range(3):  # a later call of the same kind is kept, and its second run may be recorded
        assert torch.equal(attention(q, k, v, kv_indices=lists, kv_block_size=64, backend="cudnn"), out)
    for got, gradient in results:
        assert torch.equal(got, out)
        assert torch.allclose(gradient.float(), wanted.float(), atol=2e-2, rtol=2e-2)
    given = torch.empty_like(q)
    with torch.no_grad():
        assert attention(q, k, v, kv_indices=lists, kv_block_size=64, backend="cudnn", out=given) is given
    assert torch.equal(given, out)


def test_empty_calls() -> None:
    q, k = (
        torch.randn(1, 64, 2, 128, dtype=torch.bfloat16, device=DEVICE),
        torch.randn(1, 0, 2, 128, dtype=torch.bfloat16, device=DEVICE),
    )
    q.requires_grad_()
    lists = torch.full((1, 1, 1, 1), -1, dtype=torch.int32, device=DEVICE)
    out, lse = attention(q, k, k, kv_indices=lists, kv_block_size=64, backend="cudnn", return_lse=True)
    assert out.eq(0).all()
    assert lse.eq(-math.inf).all()
    assert torch.autograd.grad(out.sum(), q)[0].eq(0).all()


def test_lists_of_longer_masks_and_of_both_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks past the call's keys are left out, blocks in part and in full are one list, and nothing waits for the device."""
    chosen = torch.tensor([[1, 1, 0, 1, 1], [0, 0, 0, 0, 1], [1, 0, 1, 0, 0]], dtype=torch.bool)[None, None]
    full = torch.tensor([[0, 1, 0, 0, 0], [0, 0, 0, 0, 0], [0, 0, 1, 0, 0]], dtype=torch.bool)[None, None]
    lists = (*ordered(chosen & ~full), *ordered(full))
    q, k = torch.empty(2, 100, 3, 64), torch.empty(2, 250, 1, 64)
    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "cpu", "nonzero", "__bool__", "__int__", "__index__"):
            patch.setattr(torch.Tensor, name, lambda self, *args: pytest.fail("waits for the device"))
        counts, indices = blocks_of(Problem(q, k, k, lists, 64, 1.0, "bshd"))
    assert counts.shape == (2, 3, 2)
    assert indices.shape == (2, 3, 2, 4)
    assert counts[1, 2].tolist() == [3, 0]
    assert sorted(indices[1, 2, 0, :3].tolist()) == [0, 1, 3]


def test_a_block_mask_without_a_mask_mod_runs_too() -> None:
    from torch.nn.attention.flex_attention import BlockMask

    q, k, v = (t.detach() for t in tensors("bshd", (1, 2, 2, 128, 128), (128, 128), torch.bfloat16))
    counts, indices = (
        torch.tensor([[[1, 2]]], dtype=torch.int32, device=DEVICE),
        torch.tensor([[[[1, 0], [0, 1]]]], dtype=torch.int32, device=DEVICE),
    )
    mask = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=64)
    lists = torch.tensor([[[[1, -1], [0, 1]]]], dtype=torch.int32, device=DEVICE)
    out = attention(q, k, v, block_mask=mask, backend="cudnn")
    assert torch.equal(out, attention(q, k, v, kv_indices=lists, kv_block_size=64, backend="cudnn"))


SPEC = make_call(
    make_inputs(lengths_q=[64], num_heads=4, num_heads_kv=4, head_dim_qk=128, head_dim_v=128, device="meta", dtype=torch.bfloat16)
)[0]._replace(return_max_logit=False, device_type="cuda", capability=(9, 0), block_size=(64, 64))
FORWARD, BACKWARD, BOTH = ("forward",), ("backward",), ("forward", "backward")
REFUSED: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "is untested on GPUs other than those of compute capability 9.0": (BOTH, {"capability": (10, 0)}),
    "has no block masks with a mask_mod or score_mod": (BOTH, {"mods": object()}),
    "supports blocks of 64 x 64 and 128 x 128 tokens, not 64 x 128": (BOTH, {"block_size": (64, 128)}),
    "is not supported here in FP8": (BOTH, {"kv_dtype": torch.float8_e4m3fn}),
    "supports fp16 and bf16, not torch.float32": (BOTH, {"dtype": torch.float32}),
    "has no pages (page_table)": (BOTH, {"page_size": 16}),
    "has no lengths (cu_seqlens, seqused)": (BOTH, {"padding": True}),
    "has no causal mask or window (attn_mask_type, window_size)": (BOTH, {"band": Band(None, 0, True)}),
    "has no bias and no alibi_slopes": (BOTH, {"bias_type": "alibi"}),
    "has no sink (softmax_type)": (BOTH, {"softmax_type": "learnable"}),
    "has no softcap": (BOTH, {"softcap": True}),
    "has no dropout (dropout_p)": (BOTH, {"dropout": True}),
    "returns no max_logit (return_max_logit)": (FORWARD, {"return_max_logit": True}),
    "gives no guarantee of batch_invariant": (FORWARD, {"batch_invariant": True}),
    "returns out in 16 bits": (FORWARD, {"results": Results(fp32_out=True)}),
    "supports head dims of 64, 96 and 128, not 128 and 80": (FORWARD, {"head_dim_v": 80}),
    "has gradients for head dims of 128, not 64 and 64": (BACKWARD, {"head_dim_qk": 64, "head_dim_v": 64}),
    "has gradients in bf16 alone, not in torch.float16": (BACKWARD, {"dtype": torch.float16}),
    "has gradients for as many key heads as query heads, not for 4 over 2": (BACKWARD, {"num_heads_kv": 2}),
    "adds gradients in any order (deterministic)": (BACKWARD, {"deterministic": True}),
    "takes no gradient of lse": (BACKWARD, {"needs_lse_grad": True}),
    "returns gradients in 16 bits (fp32_gradients)": (BACKWARD, {"results": Results(fp32="dq")}),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_other_calls_are_refused_with_a_reason(reason: str) -> None:
    directions, change = REFUSED[reason]
    for direction in BOTH:
        assert cudnn_backend.unsupported(SPEC, direction) is None
        found = cudnn_backend.unsupported(SPEC._replace(**change), direction)
        assert (f"cuDNN's block-sparse attention {reason}" in str(found)) == (direction in directions)


def test_every_rule_has_a_case() -> None:
    found = {
        next(rule for rule in cudnn_rules.BLOCK_LISTS if rule.applies(SPEC._replace(**change)) and directions[0] in rule.directions)
        for directions, change in REFUSED.values()
    }
    assert found == set(cudnn_rules.BLOCK_LISTS)


def test_shapes_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(1, 100, 2, 128, dtype=torch.bfloat16, device=DEVICE)
    call: dict[str, Any] = {"kv_indices": torch.zeros(1, 1, 2, 1, dtype=torch.int32, device=DEVICE), "kv_block_size": 64}
    assert "q has 100 queries" in str(flexattn.explain(q, q, q, **call, backend="cudnn").forward_provisional)
    with pytest.raises(
        flexattn.BackendError, match="q has 100 queries, and cuDNN's kernel for blocks of 64 needs a multiple of 64"
    ):
        attention(q, q, q, **call, backend="cudnn")
    monkeypatch.setattr(cudnn_block_lists, "MOST_HEADS", 1)
    with pytest.raises(flexattn.BackendError, match="q has 2 heads in 1 batch entries"):
        attention(q[:, :64], q, q, **(call | {"kv_indices": call["kv_indices"][:, :, :1]}), backend="cudnn")


def test_auto_falls_back_to_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    from flexattn.dispatch import triton_backend

    monkeypatch.setattr(triton_backend, "unsupported", lambda spec, direction: "Triton is not installed")
    q, k, v = tensors("bshd", (1, 2, 2, 128, 128), (128, 128), torch.bfloat16)
    call = {"kv_indices": draw(1, 2, 2, 2, 2)[0], "kv_block_size": 64}
    explanation = flexattn.explain(q, k, v, **call)
    assert explanation.runs_on == "cudnn (forward and backward)"
    assert "compiles its kernels when the call first runs" in str(explanation.forward_provisional)
    assert "not triton: Triton is not installed" in str(explanation)
    assert flexattn.explain(q, k, v, **call, causal=True).runs_on == "eager (forward and backward)"


def test_a_refusal_by_the_frontend_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise NotImplementedError("not on Tuesdays")

    cudnn_block_sparse.install(monkeypatch)
    monkeypatch.setattr(sys.modules["cudnn.block_sparse_attention"], "block_sparse_attention_forward", refuse)
    q, k, v = (t.detach() for t in tensors("bshd", (1, 2, 2, 128, 128), (128, 128), torch.bfloat16))
    with pytest.raises(flexattn.BackendError, match="cuDNN's frontend refuses it: not on Tuesdays"):
        attention(q, k, v, kv_indices=draw(1, 2, 2, 2, 2)[0], kv_block_size=64, backend="cudnn")


@pytest.mark.parametrize(
    ("version", "broken", "said"),
    [
        ("1.31.2", False, "the cuDNN frontend is version 1.31.2, and its block-sparse attention needs 1.32; pip install"),
        ("1.32.0", True, "cannot be imported (ImportError: no CuTe DSL); pip install 'nvidia-cudnn-frontend>=1.32'"),
        ("1.33.0", False, None),
    ],
)
def test_frontends(version: str, broken: bool, said: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    cudnn_block_sparse.install(monkeypatch)
    monkeypatch.setattr(sys.modules["cudnn"], "__version__", version)
    if broken:

        def missing(name: str) -> object:
            raise ImportError("no CuTe DSL")

        monkeypatch.delattr(sys.modules["cudnn.block_sparse_attention"], "block_sparse_attention_forward")
        monkeypatch.setattr(sys.modules["cudnn.block_sparse_attention"], "__getattr__", missing, raising=False)
    select.forget_rejections()
    found = cudnn_backend.unsupported(SPEC, "forward")
    assert found is None if said is None else said in str(found)
    untested = "not run with cuDNN's frontend 1.33 yet, so no result was checked"
    assert cudnn_backend.not_run_yet(SPEC) == (untested if said is None else None)


def test_the_stand_in_has_the_frontends_signatures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the frontend itself
    if importlib.util.find_spec("cudnn") is None or importlib.util.find_spec("cudnn.block_sparse_attention") is None:
        pytest.skip("the cuDNN frontend is not installed, or is older than 1.32")
    try:
        from cudnn.block_sparse_attention import api
    except ImportError as e:
        pytest.skip(f"the frontend's block-sparse attention cannot be imported: {e}")
    for name in ("block_sparse_attention_forward", "block_sparse_attention_backward"):
        parameters = [
            [(p.name, p.kind, p.default) for p in inspect.signature(getattr(module, name)).parameters.values()]
            for module in (api, cudnn_block_sparse)
        ]
        assert parameters[0] == parameters[1]


@pytest.mark.slow
def test_torch_compile_has_the_forward() -> None:
    """A traced backward has a gradient of lse, of zeros. As cuDNN's graphs, these kernels take none."""
    q, k, v = leaves = tensors("bshd", (1, 2, 2, 128, 128), (128, 128), torch.bfloat16)
    lists, _ = draw(1, 2, 2, 2, 2)

    def call(q: Tensor, k: Tensor, v: Tensor, lists: Tensor) -> Tensor:
        return attention(q, k, v, kv_indices=lists, kv_block_size=64, backend="cudnn")

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(q, k, v, lists), call(q, k, v, lists))
    with pytest.raises(flexattn.BackendError, match="takes no gradient of lse"):
        torch.autograd.grad(compiled(q, k, v, lists).sum(), leaves)


@pytest.mark.skipif(not IS_REAL, reason="needs an H200 and the cuDNN frontend from 1.32 on")
@pytest.mark.parametrize("size", [64, 128])
def test_cuda_graphs_follow_lists_that_change(size: int) -> None:
    q, k, v = leaves = tensors("bshd", (1, 2, 2, 384, 384), (128, 128), torch.bfloat16)
    rows = 384 // size
    lists, others = (torch.randint(0, rows, (1, 2, rows, 2), dtype=torch.int32, device=DEVICE) for _ in range(2))

    def call() -> tuple[Tensor, ...]:
        out = attention(q, k, v, kv_indices=lists, kv_block_size=size, backend="cudnn")
        return out, *torch.autograd.grad(out.float().square().sum(), leaves)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = call()
    lists.copy_(others)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(results[0], call()[0])
    for t, exact in zip(results[1:], call()[1:], strict=True):
        assert torch.allclose(t.float(), exact.float(), atol=2e-2, rtol=2e-2)
