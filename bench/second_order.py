"""Times and memory of tangents and double backwards on a GPU: `python -m flexattn.bench.second_order`.

Prints one line for each shape: the forward, the backward, a jvp and a double backward in milliseconds, for the Triton kernels
(FLEXATTN_HOPPER=always), the plain operations and torch's math backend, and the peak memory of the double backward.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flexattn import attention

SHAPES = {"DiT-XL/2": (256, 256, 16, 72), "8 x 2048": (8, 2048, 16, 128), "1 x 16384": (1, 16384, 16, 128)}
MOST_SCORES = 2**31  # for the math backend, whose scores of more bytes do not fit


def milliseconds(run: Callable[[], object], repeats: int = 5) -> float:
    """Returns the least time of a few runs after one that compiles."""
    run()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return float(min(times))


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v)


def math_backend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(q, k, v).transpose(1, 2)


def measure(attend: Callable[..., Tensor], shape: tuple[int, ...]) -> str:
    """Returns a line of times and memory."""
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    along = tuple(torch.randn_like(q) for _ in range(3))
    given = tuple(t.detach() for t in (q, k, v))

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(attend(q, k, v).square().sum(), (q, k, v))

    def double() -> tuple[Tensor, ...]:
        gradients = torch.autograd.grad(attend(q, k, v).square().sum(), (q, k, v), create_graph=True)
        return torch.autograd.grad(gradients, (q, k, v), along)

    runs = (lambda: attend(*given), backward, lambda: torch.func.jvp(attend, given, along), double)
    times = "  ".join(f"{milliseconds(run):9.3f}" for run in runs)
    torch.cuda.reset_peak_memory_stats()
    double()
    return f"{times}  {torch.cuda.max_memory_allocated() / 2**30:6.2f} GiB"


def main() -> None:
    print("times in ms: forward, forward + backward, jvp, forward + backward + double backward")
    for name, shape in SHAPES.items():
        for kind in ("always", "auto", "math"):
            batch, length, heads, _ = shape
            if kind == "math" and batch * heads * length**2 > MOST_SCORES:
                continue
            os.environ["FLEXATTN_HOPPER"] = "auto" if kind == "math" else kind
            print(f"{name:10} {kind:7} {measure(math_backend if kind == 'math' else ours, shape)}", flush=True)


if __name__ == "__main__":
    main()
