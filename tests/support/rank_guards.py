"""Arguments that a call over ranks must refuse or read unchanged, in any strategy. `context_parallel_cases` runs these checks."""

from __future__ import annotations

import os
import pickle
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

import flexattn
from flexattn import distributed
from flexattn.distributed.plans import STRATEGIES
from flexattn.first_order import BATCHED, MESSAGE
from flexattn.integrations.te.context_parallel import _WholeGradient
from tests.support import context_parallel_calls as calls

SENTENCE, OF_BATCHES = (re.escape(text[:60]) for text in (MESSAGE, BATCHED))
LENGTH = 12


def _leaves(plan: distributed.Plan) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(3, 1, LENGTH, 4, 8, generator=generator, dtype=torch.float64).to(calls.DEVICE)
    return [t.clone().requires_grad_() for t in distributed.shard(plan, *whole.unbind())]


def second_derivatives() -> None:
    """A penalty on a gradient raises the sentence of plain attention, for every tensor and with every strategy."""
    plan = distributed.plan(dist.group.WORLD, length=LENGTH)
    q, k, v = _leaves(plan)
    sink = torch.linspace(-1, 1, 4, device=calls.DEVICE, requires_grad=True)
    for strategy in STRATEGIES[:4]:
        offset = _WholeGradient.apply(dist.group.WORLD, sink)  # type: ignore[no-untyped-call]
        call = {"plan": plan, "strategy": strategy, "softmax_type": "learnable", "softmax_offset": offset, "return_lse": True}
        for place in range(2):
            result = distributed.attention(q, k, v, **call)[place]
            for gradient in torch.autograd.grad(result.sum(), [q, k, v, sink], create_graph=True):
                assert gradient.requires_grad
                with pytest.raises(RuntimeError, match=SENTENCE):
                    torch.autograd.grad(gradient.sum(), q, retain_graph=True)


def batched_gradients() -> None:
    """They are refused before anything is sent."""
    plan = distributed.plan(dist.group.WORLD, length=LENGTH)
    q, k, v = _leaves(plan)
    for strategy in STRATEGIES[:4]:
        out = distributed.attention(q, k, v, plan=plan, strategy=strategy)
        with pytest.raises(RuntimeError, match=OF_BATCHES):
            torch.autograd.grad(out, [q, k, v], torch.randn(2, *out.shape, dtype=out.dtype).to(out.device), is_grads_batched=True)


def negated() -> None:
    """Negated tensors are sent as they are read: operands, tensors that all ranks have, and both incoming gradients."""
    plan = distributed.plan(dist.group.WORLD, length=LENGTH)
    q, k, v = (t.detach() for t in _leaves(plan))
    bias = torch.linspace(-1, 1, LENGTH * LENGTH, dtype=torch.float64, device=calls.DEVICE).view(1, 1, LENGTH, LENGTH)
    tensors = {"q": q, "k": k, "v": v, "bias": bias, "dout": q.sin(), "dlse": q[..., 0].cos().transpose(1, 2).contiguous()}

    def results(given: dict[str, Tensor], strategy: str) -> list[Tensor]:
        leaves = [given[name].detach().requires_grad_() for name in ("q", "k", "v", "bias")]
        options = {"bias_type": "post_scale_bias", "bias": leaves[3], "return_lse": True, "plan": plan, "strategy": strategy}
        found = distributed.attention(*leaves[:3], **options)
        return [*found, *torch.autograd.grad(found, leaves, [given["dout"], given["dlse"]])]

    stored = {name: torch._neg_view(t.neg()) for name, t in tensors.items()}
    assert all(t.is_neg() for t in stored.values())
    for strategy in STRATEGIES[:4]:
        want = results(tensors, strategy)
        for got, expected in zip(results(stored, strategy), want, strict=True):
            torch.testing.assert_close(got, expected, rtol=0.0, atol=calls.EXACT)


class _Tagged(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_dispatch__(func, types, args, kwargs or {})


def subclasses() -> None:
    """A gradient of a class with dispatch of its own, which may have no memory, becomes a plain tensor or is refused."""
    plan = distributed.plan(dist.group.WORLD, length=LENGTH)
    leaves = _leaves(plan)
    out = distributed.attention(*leaves, plan=plan, strategy="gather")
    want = torch.autograd.grad(out, leaves, out.detach().cos(), retain_graph=True)
    found = torch.autograd.grad(out, leaves, out.detach().cos().as_subclass(_Tagged), retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    mesh = init_device_mesh(calls.DEVICE.type, (dist.get_world_size(),))
    with pytest.raises(TypeError, match="the gradient of out is a DTensor"):
        torch.autograd.grad(out, leaves, distribute_tensor(torch.ones_like(out), mesh, [Replicate()]))


def masks() -> None:
    """A call's mask must have all arguments of the plan's mask; an unpickled plan names them."""
    group = dist.group.WORLD
    block_mask = flexattn.create_block_mask(calls.far, None, None, LENGTH, LENGTH, calls.DEVICE.type, 16)
    plan = distributed.plan(group, length=LENGTH, attn_mask_type="causal", block_mask=block_mask)
    q, k, v = (t.detach() for t in _leaves(plan))
    want = distributed.attention(q, k, v, plan=plan)
    again = pickle.loads(pickle.dumps(plan)).on(group)
    with pytest.raises(ValueError, match="Pass attn_mask_type and block_mask to the call too"):
        distributed.attention(q, k, v, plan=again)
    with pytest.raises(ValueError, match="a mask is given without attn_mask_type"):
        distributed.attention(q, k, v, plan=again, block_mask=block_mask)
    assert torch.equal(distributed.attention(q, k, v, plan=again, attn_mask_type="causal", block_mask=block_mask), want)
    causal = distributed.plan(group, length=LENGTH, layout="contiguous")
    with pytest.raises(ValueError, match="the plan has attn_mask_type, and a mask is given without attn_mask_type"):
        distributed.attention(q, k, v, plan=causal, window_size=(3, -1))


def numbers() -> None:
    """Under FLEXATTN_CHECK=1 a call raises if ranks differ in tensors that must be the same on all."""
    plan, other = distributed.plan(dist.group.WORLD, length=LENGTH), float(min(dist.get_rank(), 1))
    q, k, v = (t.detach() for t in _leaves(plan))
    own, same = torch.full((4,), other, device=calls.DEVICE), torch.ones(4, device=calls.DEVICE)
    state = torch.tensor([3, int(other)], device=calls.DEVICE)
    far = 5 + int(other)
    given: dict[str, dict[str, Any]] = {
        "rng_state": {"dropout_p": 0.5, "rng_state": state, "backend": "eager"},
        "softmax_offset": {"softmax_type": "learnable", "softmax_offset": own},
        "alibi_slopes": {"bias_type": "alibi", "alibi_slopes": own},
        "bias": {"bias_type": "post_scale_bias", "bias": own.view(1, 4, 1, 1)},
        "score_mod_tensors": {"score_mod": lambda s, b, h, i, j, t: s * t[h], "score_mod_tensors": [own]},
        "that mods read": {"score_mod": lambda s, b, h, i, j: s * (1.0 + other)},
        "numbers that mods": {"score_mod": lambda s, b, h, i, j: s + own[h]},
        "the numbers that": {"mask_mod": lambda b, h, i, j: i - j < far},
    }
    for name, options in given.items():
        with pytest.raises(ValueError, match=f"differs among ranks in the numbers .*{name}" if " " not in name else name):
            distributed.attention(q, k, v, plan=plan, **options)
    distributed.attention(q, k, v, plan=plan, score_mod=lambda s, b, h, i, j: s * 0.5 + same[h], mask_mod=calls.some)


def guards() -> None:
    second_derivatives()
    batched_gradients()
    negated()
    subclasses()
    masks()
    os.environ["FLEXATTN_CHECK"] = "1"
    numbers()
