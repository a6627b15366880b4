"""Calls from several threads at once, from a cold start, while another thread records, pretends or clears: all are right."""

from __future__ import annotations

import pytest

# Every thread has a shape, mask and scale of its own and compares each result with the eager backend's of the main thread. What the
# other half of the threads do records launches, pretends to be on a GPU, clears caches, or runs the canary.
MIX = """
import sys, threading, warnings
import torch
import flexattn
from flexattn import call_cache
from flexattn.dispatch import canary, options
from flexattn.dispatch.select import forget_rejections

def case(n):
    torch.manual_seed(n)
    q, k, v = (torch.randn(1, s, 2, 16, requires_grad=True) for s in (9 + n, 12 + n, 12 + n))
    return (q, k, v), dict(softmax_scale=0.1 + 0.05 * n, **kinds(n)[n % 6])

def kinds(n):
    slopes, documents = torch.rand(2, requires_grad=True), torch.arange(30) // (n + 4)
    score_mod = lambda s, b, h, i, j: torch.tanh(s) * n - slopes[h] * (i - j).abs()
    mask_mod = lambda b, h, i, j: (documents[i] == documents[j]) | (i >= j + n)
    return (
        dict(attn_mask_type="causal"), dict(score_mod=score_mod), dict(window_size=(3, 2)), dict(mask_mod=mask_mod),
        dict(bias_type="alibi"), dict(score_mod=score_mod, mask_mod=mask_mod, softcap=2.0),
    )

def run(tensors, arguments, backend):
    out = flexattn.attention(*tensors, backend=backend, **arguments)
    return out.detach(), *torch.autograd.grad(out.square().sum(), tensors)

THREADS, ROUNDS = 8, 2
CASES = [case(n) for n in range(THREADS)]
failures, expected = [], [None] * THREADS

def call(n):
    got = run(*CASES[n], "triton")
    for name, g, e in zip(("out", "dq", "dk", "dv"), got, expected[n]):
        error = float((g - e).abs().max())
        if not error <= 1e-4 * max(1.0, float(e.abs().max())):
            failures.append(f"thread {n}: {name} is off by {error}")

def explain(n):
    tensors, arguments = CASES[n]
    said = flexattn.explain(*tensors, backend="triton", **arguments)
    if said.forward_kernels is None or said.forward_kernels.family.name != "portable":
        failures.append(f"thread {n}: explain says {said}")

def warm(n):
    (q, k, v), arguments = CASES[n]
    flexattn.warmup(dict(q=q, k=k, v=v, backend="triton", **arguments), progress=False)

def clear(n):
    call_cache.clear_cache(); forget_rejections(); canary.clear()

def doctor(n):
    from flexattn.cli import doctor
    if not doctor.report():
        failures.append("doctor says nothing")

def block(n):
    with flexattn.attention_backend(("eager", "triton")[n % 2]):
        call(n)
        if options.current() != ("eager", "triton")[n % 2]:
            failures.append(f"thread {n}: the block's backend is {options.current()}")

OTHERS = (explain, warm, clear, doctor, block)

def work(n):
    try:
        start.wait()
        for i in range(ROUNDS):
            call(n)
            OTHERS[(n + i) % len(OTHERS)](n)
            call(n)
    except BaseException as e:
        failures.append(f"thread {n}: {type(e).__name__}: {e}")

def first(n):  # the eager results too are made in threads
    start.wait()
    expected[n] = run(*CASES[n], "eager")

def in_threads(target):
    threads = [threading.Thread(target=target, args=(n,)) for n in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

sys.setswitchinterval(1e-5)
warnings.simplefilter("error")
start = threading.Barrier(THREADS)
in_threads(first)
in_threads(work)
q = torch.randn(1, 9, 2, 16)
compiled = torch.compile(lambda q: flexattn.attention(q, q, q, attn_mask_type="causal"), fullgraph=True, backend="eager")
if not torch.allclose(compiled(q), flexattn.attention(q, q, q, attn_mask_type="causal"), atol=1e-5):
    failures.append("torch.compile is wrong afterwards")
if options.current() is not None:
    failures.append("attention_backend() left something")
print("\\n".join(failures))
print("done")
"""


@pytest.mark.sample(values=False)
@pytest.mark.parametrize("canary", ["0", "1"], ids=["plain", "canary"])
@pytest.mark.slow
def test_any_mix_of_first_calls_from_eight_threads(forked_python, canary: str) -> None:
    run = forked_python("-c", MIX, env={"TRITON_INTERPRET": "1", "FLEXATTN_CANARY": canary})
    assert run.stdout.split() == ["done"], run.stdout[-3000:] + run.stderr[-3000:]
