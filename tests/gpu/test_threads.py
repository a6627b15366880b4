"""Compiled calls from eight threads at once, from a cold start, beside explain, warmup, the canary and cleared caches, on a GPU."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and torch.cuda.is_available() is False")

# Every result is kept, and compared at the end with the main thread's results. `out` must be equal to the bit, because the kernel
# is the same. Gradients must be close, because the order of dq's sums may differ. If a launch is recorded but does not run, its
# results are whatever memory held.
MIX = """
import sys, threading
import torch
import flexattn
from flexattn import call_cache
from flexattn.cli import doctor
from flexattn.dispatch import canary, options
from flexattn.dispatch.select import forget_rejections
from flexattn.kernels_triton.runtime.launch import clear_kernels

THREADS, ROUNDS = 8, 12
SHAPES = ((2048, 128), (512, 64), (333, 128), (200, 72))

def kinds(n):
    slopes, documents = torch.rand(4, device="cuda"), torch.arange(2048, device="cuda") // (50 * n + 100)
    score_mod = lambda s, b, h, i, j: torch.tanh(s) * (n + 1) - slopes[h] * (i - j).abs()
    mask_mod = lambda b, h, i, j: (documents[i] == documents[j]) | (i >= j + 100 * n)
    return (
        dict(attn_mask_type="causal"), dict(score_mod=score_mod), dict(window_size=(100, 20)), dict(mask_mod=mask_mod),
        dict(bias_type="alibi"), dict(score_mod=score_mod, mask_mod=mask_mod, softcap=5.0),
    )

def case(n):
    length, head_dim = SHAPES[n % 4]
    generator = torch.Generator("cuda").manual_seed(n)
    how = dict(device="cuda", dtype=torch.bfloat16, generator=generator)
    tensors = [torch.randn(1, length, 4, head_dim, **how).requires_grad_() for _ in "qkv"]
    return tensors, dict(softmax_scale=0.05 + 0.01 * n, backend="triton", **kinds(n)[n % 6])

def run(tensors, arguments):
    out = flexattn.attention(*tensors, **arguments)
    gradients = torch.autograd.grad(out.float().square().sum(), tensors)
    return out.detach(), *gradients

def others(n, i):
    (q, k, v), arguments = CASES[n]
    which = (n + i) % 5
    if which < 2:
        flexattn.explain(q, k, v, **arguments)
    elif which == 2:
        flexattn.warmup(dict(q=q, k=k, v=v, **arguments), progress=False, workers=1)
    elif which == 3:
        call_cache.clear_cache(); forget_rejections(); canary.clear(); clear_kernels()
    else:
        doctor.report()
        with flexattn.attention_backend("eager"):
            assert options.current() == "eager"

CASES = [case(n) for n in range(THREADS)]
torch.cuda.synchronize()
start, failures, results = threading.Barrier(THREADS), [], [[] for _ in range(THREADS)]

def work(n):
    try:
        start.wait()
        with torch.cuda.stream(torch.cuda.Stream()):
            for i in range(ROUNDS):
                results[n].append(run(*CASES[n]))
                others(n, i)
                results[n] += [run(*CASES[n]) for _ in range(3)]
            torch.cuda.current_stream().synchronize()
    except BaseException as e:
        failures.append(f"thread {n}: {type(e).__name__}: {e}")

threads = [threading.Thread(target=work, args=(n,)) for n in range(THREADS)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
torch.cuda.synchronize()
for n, found in enumerate(results):
    expected = run(*CASES[n])
    for got in found:
        if not torch.equal(got[0], expected[0]):
            failures.append(f"thread {n}: out is another")
        for g, e in zip(got[1:], expected[1:]):
            if not (g - e).abs().max() <= 0.02 * e.abs().max():
                failures.append(f"thread {n}: a gradient is off")
q = torch.randn(1, 333, 4, 64, device="cuda", dtype=torch.bfloat16)
compiled = torch.compile(lambda q: flexattn.attention(q, q, q, attn_mask_type="causal"), fullgraph=True)
if not torch.equal(compiled(q), flexattn.attention(q, q, q, attn_mask_type="causal")):
    failures.append("torch.compile is wrong afterwards")
print("\\n".join(failures[:20]))
print("done", sum(map(len, results)))
"""


@pytest.mark.parametrize("canary", ["0", "1"], ids=["plain", "canary"])
def test_any_mix_of_first_calls_from_eight_threads(fresh_python, tmp_path, canary: str) -> None:
    env = {"FLEXATTN_CANARY": canary, "FLEXATTN_KERNELS": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    run = fresh_python("-c", MIX, env=env)
    assert run.stdout.split() == ["done", str(8 * 12 * 4)], run.stdout[-3000:] + run.stderr[-3000:]
