"""Host time of a warm call, with and without autograd, compared with other libraries, and the time of each part.

    python -m flexattn host_cost
    python -m flexattn host_cost --out bench/results/host_cost.json

The problems are so small that the GPU waits for the host, so the time between two calls is the host's. Each figure is the median
over rounds of calls, in microseconds. The implementations alternate, and each round begins after the device is idle. Results are
checked against the reference before anything is timed. If there is no GPU, a driver that does nothing replaces CUDA's
(`stub_driver`). The figures are then the Python of a call, and the only peer is SDPA, on the CPU with almost nothing to compute.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from flexattn.bench.harness import Call, Program, Row
from flexattn.bench.measure import in_turns, quartiles
from flexattn.cli import Parser

HEADS, HEAD_DIM = 8, 64
CALLS, ROUNDS, WARM_UPS = 50, 40, 5
MEASURES = "microseconds of the host for one call, without waiting for the device; median over rounds, with quartiles"
KINDS = ("bshd", "bshd padded", "thd", "score_mod", "sm_90", "fp8", "fp8 delayed")
PARTS = "parts of a bshd forward without gradients"


@functools.cache
def has_gpu() -> bool:
    """Returns whether there is a GPU. If there is none, a driver that does nothing takes the place of CUDA's."""
    if torch.cuda.is_available():
        return True
    from flexattn.bench import stub_driver

    if stub_driver.compiler() is None:
        sys.exit("no C compiler (gcc, cc) for a driver that does nothing, and no GPU; install a compiler")
    stub_driver.install()
    return False


def measure(kind: str, options: argparse.Namespace) -> Iterator[Row]:
    """Yields the rows of one kind of call: each implementation that supports it, in each direction. PARTS has those of a call."""
    from flexattn import attention, fp8
    from flexattn.testing import check_close, make_call, make_inputs, reference_attention

    if kind == PARTS:
        yield from ({"implementation": name, "us": us} for name, us in stages().items())
        return
    fmt = {"bshd padded": "bshd", "thd": "thd"}.get(kind, "bshd")
    lengths = [128, 60] if kind in ("bshd padded", "thd") else [128, 128]
    device, head_dim = "cuda" if has_gpu() else "cpu", 128 if kind == "sm_90" else HEAD_DIM
    how: dict[str, Any] = {"num_heads": HEADS, "num_heads_kv": HEADS, "head_dim_qk": head_dim, "head_dim_v": head_dim}
    inputs = make_inputs(fmt, lengths_q=lengths, padding=kind == "bshd padded", dtype=torch.bfloat16, device=device, **how)
    inputs = inputs._replace(cu_seqlens_kv=inputs.cu_seqlens_q)  # self-attention
    tensors = [getattr(inputs, which).nan_to_num() for which in "qkv"]
    dout = torch.randn_like(inputs.q)
    mask = "causal" if inputs.cu_seqlens_q is None else "padding_causal"
    others = {name: value for name, value in inputs._asdict().items() if name not in "qkv"} | {"attn_mask_type": mask}
    if kind == "score_mod":
        slopes = torch.linspace(0.1, 1.0, HEADS, device=device)
        others["score_mod"] = lambda score, b, h, q_idx, kv_idx: score - slopes[h] * (q_idx - kv_idx).abs()
    if kind.startswith("fp8"):
        recipe = others["fp8_recipe"] = fp8.Recipe(scaling="delayed" if kind == "fp8 delayed" else "current")
        others["fp8_state"] = fp8.DelayedScaling(recipe, HEADS, device=device) if kind == "fp8 delayed" else None
    attends = implementations(kind, others, has_flex=has_gpu() and not options.no_flex)
    if has_gpu():
        spec, x = make_call(inputs, attn_mask_type=mask)
        exact, budget = reference_attention(spec, x)[0], reference_attention(spec, x, dtype=spec.dtype)[0]
        if kind.startswith("fp8"):
            budget = attention(*tensors, **others, backend="eager")
        for attend in attends.values():
            if kind != "score_mod":
                check_close("out", attend(*tensors), exact, budget)
    for direction, timed in _calls(attends, tensors, dout).items():
        for name, samples in _times(timed, options.rounds).items():
            yield {"direction": direction, "implementation": name, **quartiles(samples)}


def implementations(kind: str, others: dict[str, object], has_flex: bool) -> dict[str, Callable[..., Tensor]]:
    import flexattn
    from flexattn.dispatch.cudnn_backend import library_error

    def ours(backend: str) -> Callable[..., Tensor]:
        return functools.partial(flexattn.attention, **others, backend=backend)

    if kind == "sm_90":
        return {"flexattn triton, for sm_90": ours("triton")}
    attends = {"flexattn triton": ours("triton")}
    if kind.startswith("fp8"):
        return attends
    if has_gpu() and (lacking := library_error()) is None:
        attends["flexattn cudnn"] = ours("cudnn")
    elif has_gpu() and kind == "bshd":
        print(f"flexattn cudnn: {lacking}")
    if kind in ("bshd", "score_mod") and has_flex:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        batch_mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 128, 128, device="cuda")
        compiled: Any = torch.compile(flex_attention, dynamic=False)
        attends["FlexAttention, compiled"] = _in_bhsd(compiled, score_mod=others.get("score_mod"), block_mask=batch_mask)
    if kind == "bshd":
        sdpa = _in_bhsd(scaled_dot_product_attention, is_causal=True)
        # On a CPU the call is so small that computing takes almost no time.
        attends["SDPA"] = sdpa if has_gpu() else lambda *qkv: sdpa(*(t[:1, :1] for t in qkv))
    return attends


def _in_bhsd(attend: Callable[..., Tensor], **options: Any) -> Callable[..., Tensor]:
    """Returns a function of q, k and v [b, s, h, d] that calls one of [b, h, s, d]."""
    return lambda q, k, v: attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **options).transpose(1, 2)


def _calls(attends: Mapping[str, Callable[..., Tensor]], tensors: list[Tensor], dout: Tensor) -> dict[str, dict[str, Call]]:
    """Returns the calls of each direction, by implementation.

    A forward without a gradient, a forward that autograd records, a forward and its backward, and a backward whose graph is
    retained. FlexAttention has no retained one: torch.compile's backward reuses the buffers that the forward saved.
    """
    leaves = [t.clone().requires_grad_() for t in tensors]

    def backward(out: Tensor, retain_graph: bool = False) -> object:
        seed = dout if out.shape == dout.shape else torch.ones_like(out)
        return torch.autograd.grad(out, leaves, seed, retain_graph=retain_graph)

    def outs() -> Iterator[tuple[str, Tensor]]:
        for name, attend in attends.items():
            if not name.startswith("FlexAttention"):
                _set_family(name)
                yield name, attend(*leaves)

    return {
        "forward": {name: functools.partial(attend, *tensors) for name, attend in attends.items()},
        "recorded": {name: functools.partial(attend, *leaves) for name, attend in attends.items()},
        "both": {name: lambda attend=attend: backward(attend(*leaves)) for name, attend in attends.items()},  # type: ignore[misc]
        "retained": {name: functools.partial(backward, out, True) for name, out in outs()},
    }


def _set_family(implementation: str) -> None:
    os.environ["FLEXATTN_HOPPER"] = "always" if "sm_90" in implementation else "never"


def _times(timed: Mapping[str, Call], rounds: int) -> dict[str, list[float]]:
    wait: Callable[[], object] = torch.cuda.synchronize if torch.cuda.is_available() else int

    def turn(name: str) -> list[float]:
        _set_family(name)
        function = timed[name]
        wait()
        began = time.perf_counter()
        for _ in range(CALLS):
            function()
        return [(time.perf_counter() - began) / CALLS * 1e6]

    in_turns(timed, WARM_UPS, turn)
    return in_turns(timed, rounds, turn)


def stages() -> dict[str, float]:
    """Returns the microseconds of each part of one call, the least of many rounds. The last entry is another call."""
    import flexattn
    from flexattn import call_cache
    from flexattn.cached_call import CachedCall
    from flexattn.dispatch import options
    from flexattn.dispatch.replay import Recording
    from flexattn.kernels_triton.runtime import launch

    os.environ["FLEXATTN_HOPPER"] = "never"
    device = torch.device("cuda", 0) if has_gpu() else torch.device("cpu")
    q, k, v = (torch.zeros(2, 128, HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device) for _ in range(3))

    def attend() -> Any:
        return flexattn.attention(q, k, v, attn_mask_type="causal", backend="triton")

    for _ in range(3):
        attend()
    seen: list[Any] = []
    original = call_cache.look_up
    call_cache.look_up = lambda *given: (seen.append(given), original(*given))[1]  # type: ignore[func-returns-value]
    attend()
    call_cache.look_up = original
    key, call = original(*seen[0])
    assert key is not None
    assert isinstance(call, CachedCall)
    recording, likeness = call.forwards.recording, call.likeness
    assert isinstance(recording, Recording)
    assert likeness is not None
    (prepared,) = recording.prepared
    places = next(how for kind, _, how in recording.steps if kind == "launch")
    addresses = [q.data_ptr()] * len(places)  # outputs are at most as large as q
    shapes = [how for kind, _, how in recording.steps if kind == "allocate"]

    def anew() -> None:
        call_cache.clear_cache()
        attend()

    found: dict[str, Call] = {
        "the whole call": attend,
        "  the key and the look-up": lambda: original(*seen[0]),
        "    of it: modes, switches, environment": call_cache.state_around,
        "      of it: the environment": options.snapshot,
        "    of it: tensors compared, addresses": lambda: likeness.addresses(key.tensors),
        "  what is played: memory, addresses, the launch": lambda: call.run(key, False),
        "    of it: memory for out and lse": lambda: [recording.allocate(*how) for how in shapes],
        "    of it: the launch, arguments packed": lambda: prepared.launch(launch.current_stream(device), addresses),
    }
    new = {"a call with a key that is new (lengths that never came)": anew}
    return {name: min(us) for name, us in (*_times(found, ROUNDS).items(), *_times(new, ROUNDS).items())}


def line(row: Row) -> str:
    if row["call"] == PARTS:
        return f"{row['implementation']:60} {row['us']:8.2f} us"
    times = f"{row['us']:8.1f} us  ({row['us_q1']:.1f} to {row['us_q3']:.1f})"
    return f"{row['call']:12} {row['direction']:9} {row['implementation']:26} {times}"


def add_options(parser: Parser) -> None:
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="default: %(default)s")
    parser.add_argument("--no-flex", action="store_true", help="do not measure FlexAttention, which torch.compile compiles slowly")


PROGRAM = Program(
    "flexattn host_cost",
    __doc__,
    "call",
    {kind: kind for kind in (*KINDS, PARTS)},
    measure,
    line,
    add_options=add_options,
    facts=lambda: {"measures": MEASURES, "has_gpu": torch.cuda.is_available()},
    needs_gpu=False,
)
main = PROGRAM.run
