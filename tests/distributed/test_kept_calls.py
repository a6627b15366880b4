"""Kept calls over ranks: the second of two equal calls is not checked again, and a call that differs in anything is."""

from __future__ import annotations

from tests.conftest import FreshPython

CALLS = """
import os, torch, torch.distributed as dist
import flexattn
from flexattn import call_cache, distributed
from flexattn.distributed import whole_call

dist.init_process_group("gloo", "tcp://127.0.0.1:0", rank=0, world_size=1)
plan = distributed.plan(dist.group.WORLD, length=8, attn_mask_type="causal")
q, k, v = (torch.randn(1, 8, 2, 16) for _ in range(3))
checked, check = [], whole_call._checked_call

def note(*arguments):
    checked.append(arguments)
    return check(*arguments)

whole_call._checked_call = note

def is_checked(q, k, v, plan=plan, **options):
    before = len(checked)
    out = distributed.attention(q, k, v, plan=plan, **options)
    result, is_new = out[0] if isinstance(out, tuple) else out, len(checked) > before
    full = {name: value for name, value in options.items() if name != "strategy"}
    if plan is globals()["plan"] and not full.get("dropout_p"):
        full = {"attn_mask_type": "causal"} | full
        wanted = flexattn.attention(q, k, v, **full)
        torch.testing.assert_close(result, wanted[0] if isinstance(wanted, tuple) else wanted)
    return is_new

bias, offset = torch.randn(1, 1, 8, 8), torch.randn(2)
different = [
    {}, {"softmax_scale": 0.5}, {"softmax_scale": 0.25}, {"softcap": 2.0}, {"bias": bias}, {"softmax_offset": offset},
    {"return_lse": True}, {"strategy": "ring"}, {"strategy": "ulysses"}, {"deterministic": True},
    {"attn_mask_type": "causal", "window_size": (2, 0)},
]
for options in different:
    assert is_checked(q, k, v, **options), options
for options in different:
    assert not is_checked(v, q, k, **options), options

bias += 1  # the tensors of each call are read
assert not is_checked(q, k, v, bias=bias)
assert not is_checked(q, k, v, bias=torch.randn(1, 1, 8, 8))
assert is_checked(q, k, v, bias=torch.randn(1, 2, 8, 8))
assert is_checked(q.double(), k.double(), v.double())
leaf = q.clone().requires_grad_()
assert is_checked(leaf, k, v)
first, second = (torch.autograd.grad(distributed.attention(leaf, k, v, plan=plan).square().sum(), leaf)[0] for _ in range(2))
assert torch.equal(first, second)

other = distributed.plan(dist.group.WORLD, length=8, attn_mask_type="no_mask")  # of another mask
assert is_checked(q, k, v, plan=other)
assert not torch.equal(distributed.attention(q, k, v, plan=other), distributed.attention(q, k, v, plan=plan))

state = torch.tensor([1, 2])
dropped = [distributed.attention(q, k, v, plan=plan, dropout_p=0.5, rng_state=state + n) for n in (0, 0, 1)]
assert torch.equal(dropped[0], dropped[1]) and not torch.equal(dropped[0], dropped[2])
drawn = [distributed.attention(q, k, v, plan=plan, dropout_p=0.5) for _ in range(2)]
assert not torch.equal(*drawn)

# These are checked each time: tensors in place of numbers, mods, slopes that the call makes, and all calls under FLEXATTN_CHECK.
scale = torch.tensor(0.5)
for n in range(2):
    scale += n
    assert is_checked(q, k, v, softmax_scale=scale)
    assert is_checked(q, k, v, score_mod=lambda score, b, h, q_idx, kv_idx: score * 2)
    assert is_checked(q, k, v, bias_type="alibi")
os.environ["FLEXATTN_CHECK"] = "1"
assert is_checked(q, k, v) and is_checked(q, k, v)
os.environ["FLEXATTN_CHECK"] = "0"
with torch.autocast("cpu", torch.bfloat16):
    assert distributed.attention(q, k, v, plan=plan).dtype is torch.bfloat16
    assert distributed.attention(q, k, v, plan=plan).dtype is torch.bfloat16
for wrong in ({"softcap": True}, {"return_lse": 1}, {"softmax_scale": -1.0}, {"strategy": "none"}, {"causal": True}):
    try:
        distributed.attention(q, k, v, plan=plan, **{"softcap": 1.0} | wrong)
    except (TypeError, ValueError):
        continue
    raise AssertionError(wrong)
call_cache.clear_cache()
call_cache.MOST_CALLS = 8
for n in range(1, 20):
    assert is_checked(q, k, v, softmax_scale=float(n)), n
    assert call_cache.cache_info()["size"] <= 8, n
assert is_checked(q, k, v, softmax_scale=1.0)  # dropped
dist.destroy_process_group()
"""


def test_kept_calls(forked_python: FreshPython) -> None:
    result = forked_python("-c", CALLS)
    assert result.returncode == 0, result.stdout + result.stderr
