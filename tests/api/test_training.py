"""attention() in the loops of training: autocast, selective checkpoints, copies of modules, and transforms that it refuses."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import flexattn
from flexattn import mods
from flexattn.testing import make_inputs

HEADS, D = 4, 8
FORWARD = torch.ops.flexattn.attention_forward.default


def qkv(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    inputs = make_inputs(lengths_q=(5, 5), num_heads_kv=HEADS, head_dim_qk=D, head_dim_v=D, dtype=dtype)
    return [t.requires_grad_() for t in inputs[:3]]


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


class Block(torch.nn.Module):
    """Attention with everything that a module may keep: a sink, a captured parameter, a block mask."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(HEADS * D, 3 * HEADS * D)
        self.out = torch.nn.Linear(HEADS * D, HEADS * D)
        self.sink = torch.nn.Parameter(torch.zeros(HEADS))
        self.slopes = torch.nn.Parameter(torch.full((HEADS,), 0.1))
        self.block_mask = create_block_mask(causal, None, None, 32, 32, "cpu", BLOCK_SIZE=16)
        self.dropout_p = 0.25

    def score_mod(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score - self.slopes[h] * (q_idx - kv_idx)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, D)).unbind(2)
        out = flexattn.attention(
            q,
            k,
            v,
            score_mod=self.score_mod,
            block_mask=self.block_mask,
            softmax_type="learnable",
            softmax_offset=self.sink,
            dropout_p=self.dropout_p,
        )
        return x + self.out(out.flatten(2))


class Counter(TorchDispatchMode):
    """Counts how often each operator ran."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: dict[Any, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran[func] = self.ran.get(func, 0) + 1
        return func(*args, **(kwargs or {}))


def gradients_of(block: Block, run: Any) -> list[Tensor]:
    torch.manual_seed(0)
    x = torch.randn(2, 9, HEADS * D, generator=torch.Generator().manual_seed(1)).requires_grad_()
    return list(torch.autograd.grad(run(block, x).square().sum(), (x, *block.parameters())))


def step(block: Block, run: Any) -> tuple[list[Tensor], dict[Any, int]]:
    with Counter() as counter:
        return gradients_of(block, run), counter.ran


def policies() -> dict[str, Any]:
    def save(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op is FORWARD else CheckpointPolicy.PREFER_RECOMPUTE

    return {"list": [FORWARD], "function": save}


@pytest.mark.parametrize("policy", policies())
def test_a_policy_saves_attention_and_recomputes_the_rest(policy: str) -> None:
    block = Block()
    plain = gradients_of(block, Block.__call__)

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(policies()[policy])

    everything, recomputed = step(block, lambda block, x: checkpoint(block, x, use_reentrant=False))
    chosen, saved = step(block, lambda block, x: checkpoint(block, x, use_reentrant=False, context_fn=contexts))
    linear = torch.ops.aten.addmm.default
    assert (recomputed[FORWARD], saved[FORWARD]) == (2, 1)
    assert recomputed[linear] == saved[linear]
    for a, b, c in zip(plain, everything, chosen, strict=True):  # the same weights dropped, too
        torch.testing.assert_close(b, a, rtol=0, atol=0)
        torch.testing.assert_close(c, a, rtol=0, atol=0)


@pytest.mark.slow
def test_checkpoints_compile() -> None:
    torch.compiler.reset()
    block = Block()
    block.dropout_p = 0.0  # compiled and eager draw differently
    plain = gradients_of(block, Block.__call__)
    context_fn = functools.partial(create_selective_checkpoint_contexts, [FORWARD])
    compiled = torch.compile(
        lambda block, x: checkpoint(block, x, use_reentrant=False, context_fn=context_fn), fullgraph=True, backend="aot_eager"
    )
    for a, b in zip(plain, gradients_of(block, compiled), strict=True):
        torch.testing.assert_close(b, a)


@pytest.mark.parametrize("make", [copy.deepcopy, lambda block: pickle.loads(pickle.dumps(block))], ids=["deepcopy", "pickle"])
def test_a_copied_module_does_the_same(make: Any) -> None:
    block = Block()
    before = gradients_of(block, Block.__call__)  # the cached value on the block mask is copied with it
    made = make(block)
    for a, b in zip(before, gradients_of(made, Block.__call__), strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=0)
    made.load_state_dict(block.state_dict(), strict=True)


@pytest.mark.parametrize(
    "make",
    [
        lambda: mods.causal(),
        lambda: mods.sliding_window(3, 1),
        lambda: mods.dilated_sliding_window(3, 2),
        lambda: mods.document(torch.arange(9) // 4),
        lambda: mods.document((torch.arange(18) // 4).view(2, 9)),
        lambda: mods.prefix_lm(torch.tensor([2, 3])),
        lambda: mods.natten_2d(3, 3, 3),
        lambda: mods.both(mods.causal(), mods.either(mods.sliding_window(2, 0), mods.prefix_lm(torch.tensor([2, 3])))),
    ],
)
def test_the_library_s_masks_can_be_pickled(make: Any) -> None:
    mask_mod = make()
    q, k, v = (torch.randn(2, 9, HEADS, D) for _ in "qkv")
    want = flexattn.attention(q, k, v, mask_mod=mask_mod)
    assert torch.equal(flexattn.attention(q, k, v, mask_mod=pickle.loads(pickle.dumps(mask_mod))), want)


def test_autocast_casts_what_is_multiplied() -> None:
    q, k, v = qkv()
    bias, sink = torch.randn(1, HEADS, 5, 5), torch.randn(HEADS)
    more = {"bias_type": "post_scale_bias", "softmax_type": "learnable"}
    half = [t.to(torch.bfloat16) for t in (q, k, v)]
    want = flexattn.attention(*half, bias=bias, softmax_offset=sink, **more)
    with torch.autocast("cpu", torch.bfloat16):
        out = flexattn.attention(q, k.to(torch.bfloat16), v, bias=bias, softmax_offset=sink, **more)
        double = flexattn.attention(*(t.double() for t in (q, k, v)))
        assert flexattn.explain(q, k, v).spec.dtype is torch.bfloat16
    assert out.dtype is torch.bfloat16
    assert double.dtype is torch.float64
    assert torch.equal(out, want)
    gradients = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    expected = torch.autograd.grad(want.float().square().sum(), (q, k, v))
    for got, wanted in zip(gradients, expected, strict=True):
        assert got.dtype is torch.float32
        assert torch.equal(got, wanted)


@pytest.mark.slow
def test_autocast_of_a_compiled_call() -> None:
    torch.compiler.reset()
    q, k, v = qkv()
    compiled = torch.compile(flexattn.attention, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(compiled(q, k, v), flexattn.attention(q, k, v))


def test_vmap_alone_is_refused() -> None:
    q, k, v = (t.detach() for t in qkv())
    stacked = torch.stack((q, q))
    with pytest.raises(RuntimeError, match=r"no rule for torch\.vmap.*reshape"):
        torch.vmap(lambda q: flexattn.attention(q, k, v))(stacked)
    with torch.no_grad():
        for mapped in ({"out": torch.zeros(3, *q.shape)}, {"descale_k": torch.ones(3, k.shape[2])}):
            keys = (k, v) if "out" in mapped else (k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn))
            with pytest.raises(RuntimeError, match=r"no rule for torch\.vmap"):
                torch.vmap(lambda given, keys=keys: flexattn.attention(q, *keys, **given))(mapped)


def test_operators_that_may_write_refuse_vmap() -> None:
    x, used = torch.randn(3, 2, 4, 2, 16), torch.zeros(3, 2, dtype=torch.int32)
    caches = torch.zeros(3, 2, 8, 2, 16), torch.zeros(3, 2, 8, 2, 16)

    def append(k_cache: Tensor, v_cache: Tensor, new: Tensor, used: Tensor) -> Tensor:
        flexattn.append_kv(k_cache, v_cache, new, new, seqused_kv=used)
        return k_cache

    for dims in ((0, 0, 0, 0), (None, None, 0, None), (0, 0, None, None), (None, None, None, 0)):
        given = [t if dim == 0 else t[0] for t, dim in zip((*caches, x, used), dims, strict=True)]
        with pytest.raises(RuntimeError, match=r"flexattn::append_kv has no rule for torch\.vmap.*outside of torch.vmap"):
            torch.vmap(append, dims)(*given)
    assert not caches[0].any()
    with pytest.raises(RuntimeError, match=r"flexattn::quantize has no rule for torch\.vmap"):
        torch.vmap(lambda x: flexattn.fp8.quantize(x).data)(x)


def test_transforms_take_dequantize() -> None:
    x = flexattn.fp8.quantize(torch.randn(2, 4, 2, 16))
    descales = torch.rand(3, 1, 2, 1)
    rows = torch.vmap(lambda descale: flexattn.fp8.dequantize(x._replace(descale=descale)))(descales)
    assert torch.equal(rows, torch.stack([flexattn.fp8.dequantize(x._replace(descale=d)) for d in descales]))

    def total(source: Tensor) -> Tensor:
        return (flexattn.fp8.dequantize(x._replace(source=source)) * source.detach()).sum()

    source = torch.randn(2, 4, 2, 16)
    assert torch.equal(torch.func.grad(total)(source), source)


def test_a_call_beside_a_transform_is_none_of_its_business() -> None:
    q, k, v = (t.detach() for t in qkv())
    want = flexattn.attention(q, k, v)
    with forward_ad.dual_level():
        assert torch.equal(flexattn.attention(q, k, v), want)
    assert torch.equal(torch.vmap(lambda x: x * flexattn.attention(q, k, v).sum())(torch.ones(3))[0], want.sum())


@pytest.mark.parametrize("case", ["dense", "packed", "block mask"])
def test_a_hook_may_bring_saved_tensors_back_in_other_strides(case: str) -> None:
    """Such as a hook that compresses or moves the columns of a tensor, and transposes it for that."""
    shape = (37, HEADS, D) if case == "packed" else (2, 19, HEADS, D)
    q, k, v = (torch.randn(shape).requires_grad_() for _ in range(3))
    more: dict[str, Any] = {"softmax_offset": torch.randn(HEADS), "dropout_p": 0.25, "rng_state": torch.tensor([5, 1])}
    if case == "packed":
        more |= flexattn.packed([20, 17])
    elif case == "block mask":
        more |= {"block_mask": create_block_mask(lambda b, h, i, j: (i // 16 + j // 16) % 2 == 0, None, None, 19, 19, "cpu", 16)}

    def gradients() -> tuple[Tensor, ...]:
        out, lse = flexattn.attention(q, k, v, return_lse=True, backend="triton", **more)
        return torch.autograd.grad(out.sin().sum() + lse.nan_to_num(neginf=0.0).cos().sum(), (q, k, v), create_graph=True)

    def transposed(t: Tensor) -> Tensor:
        order = [*reversed(range(t.dim()))]
        memory = torch.empty([2 * t.shape[dim] for dim in order], dtype=t.dtype)
        return memory[tuple(slice(None, None, 2) for _ in order)].permute(order).copy_(t)

    for _ in range(2):  # computed step by step, then recorded
        wanted = gradients()
        with torch.autograd.graph.saved_tensors_hooks(transposed, lambda t: t):
            found = gradients()
        second = (torch.autograd.grad(sum((g**2).sum() for g in of), (q, k, v)) for of in (found, wanted))
        for a, b in zip((*found, *next(second)), (*wanted, *next(second)), strict=True):
            torch.testing.assert_close(a, b)
