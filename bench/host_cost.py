"""Host time of a warm call, with and without autograd, compared with other libraries, and the time of each part.

    python -m flexattn host_cost
    python -m flexattn host_cost --out bench/results/host_cost.json

The problems are so small that the GPU waits for the host, so the time between two calls is the host's. Each figure is the median
over rounds of calls. The implementations alternate, and each round begins after the device is idle. Results are checked against the
reference before anything is timed. If there is no GPU, a driver that does nothing replaces CUDA's (`stub_driver`). The figures are
then the Python of a call, and the only peer is SDPA, on the CPU with almost nothing to compute.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from flexattn.bench import record
from flexattn.bench.harness import Row, Run, in_turns, quartiles
from flexattn.cli import Parser, program

HEADS, HEAD_DIM = 8, 64
CALLS, ROUNDS, WARM_UPS = 50, 40, 5
MEASURES = "microseconds of the host for one call, without waiting for the device; median over rounds, with quartiles"
# A forward without a gradient, a forward that autograd records, a forward and its backward, a backward whose graph is retained.
DIRECTIONS = ("forward", "recorded", "both", "retained")
KINDS = ("bshd", "bshd padded", "thd", "score_mod", "sm_90", "fp8", "fp8 delayed", "te", "te module")  # te: TransformerEngine's


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog=program("host_cost"), description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="default: all")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="default: %(default)s")
    parser.add_argument("--no-flex", action="store_true", help="do not measure FlexAttention, which torch.compile compiles slowly")
    args = parser.parse_args(argv)
    has_gpu = torch.cuda.is_available()
    if not has_gpu:
        from flexattn.bench import stub_driver

        if stub_driver.compiler() is None:
            parser.exit(1, "no C compiler (gcc, cc) for a driver that does nothing, and no GPU; install a compiler\n")
        stub_driver.install()
    from flexattn.dispatch.describe import versions

    name = record.device_facts()["name"]
    device = name if has_gpu else f"no GPU, a driver that does nothing; {name}"
    print(f"{device}, {versions()}\n{MEASURES}")
    facts = {"device": device, "python": platform.python_version(), "versions": versions(), "measures": MEASURES}
    run = Run("flexattn host_cost", __doc__, args.out, argv, **facts)
    for kind in args.kinds:
        for row in measure(kind, has_gpu, args.rounds, has_gpu and not args.no_flex):
            times = f"{row['us']:8.1f}  ({row['us_q1']:.1f} to {row['us_q3']:.1f})"
            run.add(row, f"{row['call']:12} {row['direction']:9} {row['implementation']:26} {times}")
    run.content["stages"] = parts = stages(has_gpu)
    print("\nmicroseconds of the parts of a bshd forward without gradients:")
    for name, us in parts.items():
        print(f"{name:60} {us:8.2f}")
    run.content["cold start, ms"] = starts = cold_start(has_gpu)
    print("\na new process, ms; the kernel is the portable forward's, and the GPU is initialized:")
    for name, ms in starts.items():
        print(f"{name:60} {ms:8.0f}")
    run.write()
    return 0


def measure(kind: str, has_gpu: bool, rounds: int, has_flex: bool) -> Iterator[Row]:
    """Yields the rows of one kind of call: each implementation that supports it, in each direction."""
    from flexattn import attention, fp8
    from flexattn.testing import check_close, make_call, make_inputs, reference_attention

    fmt = {"bshd padded": "bshd", "thd": "thd"}.get(kind, "bshd")
    lengths = [128, 60] if kind in ("bshd padded", "thd") else [128, 128]
    device, head_dim = "cuda" if has_gpu else "cpu", 128 if kind == "sm_90" else HEAD_DIM
    how: dict[str, Any] = {"num_heads": HEADS, "num_heads_kv": HEADS, "head_dim_qk": head_dim, "head_dim_v": head_dim}
    inputs = make_inputs(fmt, lengths_q=lengths, padding=kind == "bshd padded", dtype=torch.bfloat16, device=device, **how)
    inputs = inputs._replace(cu_seqlens_kv=inputs.cu_seqlens_q)  # self-attention
    tensors = [getattr(inputs, which).nan_to_num() for which in "qkv"]
    leaves = [t.clone().requires_grad_() for t in tensors]
    dout = torch.randn_like(inputs.q)
    mask = "causal" if inputs.cu_seqlens_q is None else "padding_causal"
    others = {name: value for name, value in inputs._asdict().items() if name not in "qkv"} | {"attn_mask_type": mask}
    if kind == "score_mod":
        slopes = torch.linspace(0.1, 1.0, HEADS, device=device)
        others["score_mod"] = lambda score, b, h, q_idx, kv_idx: score - slopes[h] * (q_idx - kv_idx).abs()
    if kind.startswith("fp8"):
        recipe = others["fp8_recipe"] = fp8.Recipe(scaling="delayed" if kind == "fp8 delayed" else "current")
        others["fp8_state"] = fp8.DelayedScaling(recipe, HEADS, device=device) if kind == "fp8 delayed" else None
    attends = implementations(kind, others, mask, tensors, has_gpu, has_flex)
    directions = DIRECTIONS[:1] if kind == "te" else DIRECTIONS  # TransformerEngine's functions record no graph
    if has_gpu:
        spec, x = make_call(inputs, attn_mask_type=mask)
        exact, budget = reference_attention(spec, x)[0], reference_attention(spec, x, dtype=spec.dtype)[0]
        if kind.startswith("fp8"):
            budget = attention(*tensors, **others, backend="eager")
        for attend in attends.values():
            if kind != "score_mod":
                check_close("out", attend(*tensors), exact, budget)
    for direction in directions:
        qkv = tensors if direction == "forward" else leaves
        timed: dict[str, Callable[[], Any]] = {name: functools.partial(attend, *qkv) for name, attend in attends.items()}
        if direction == "both":
            timed = {name: functools.partial(_both, call, leaves, dout) for name, call in timed.items()}
        elif direction == "retained":
            timed = _retained(timed, leaves, dout)
        for name, samples in _times(timed, rounds).items():
            yield {"call": kind, "direction": direction, "implementation": name, **quartiles(samples)}
    if has_gpu and kind == "bshd":
        yield from _frontend(rounds)


def implementations(
    kind: str, others: dict[str, object], mask: str, tensors: list[Tensor], has_gpu: bool, has_flex: bool
) -> dict[str, Callable[..., Tensor]]:
    import flexattn
    from flexattn.dispatch.cudnn_backend import library_error

    def ours(backend: str) -> Callable[..., Tensor]:
        return functools.partial(flexattn.attention, **others, backend=backend)

    if kind == "te":
        return {"flexattn triton": ours("triton"), **_te(tensors)}
    if kind == "te module":
        return {"flexattn triton": ours("triton"), "DotProductAttention": _te_module()}
    if kind == "sm_90":
        return {"flexattn triton, for sm_90": ours("triton")}
    if kind.startswith("fp8"):
        return {"flexattn triton": ours("triton")}
    attends = {"flexattn triton": ours("triton")}
    if has_gpu and (lacking := library_error()) is None:
        attends["flexattn cudnn"] = ours("cudnn")
    elif has_gpu and kind == "bshd":
        print(f"flexattn cudnn: {lacking}")
    if kind in ("bshd", "score_mod") and has_flex:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        batch_mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 128, 128, device="cuda")
        compiled: Any = torch.compile(flex_attention, dynamic=False)
        more = {"score_mod": others.get("score_mod"), "block_mask": batch_mask}
        attends["FlexAttention, compiled"] = lambda q, k, v: compiled(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **more
        ).transpose(1, 2)
    if kind == "bshd":
        attends["SDPA"] = lambda q, k, v: scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        ).transpose(1, 2)
        if not has_gpu:  # the call is so small that computing takes almost no time
            attends["SDPA"] = lambda q, k, v: scaled_dot_product_attention(
                q[:1, :1].transpose(1, 2), k[:1, :1].transpose(1, 2), v[:1, :1].transpose(1, 2), is_causal=True
            ).transpose(1, 2)
    return attends


def _te(tensors: list[Tensor]) -> dict[str, Callable[..., Any]]:
    """Returns TransformerEngine's functions on the same problem, run by flexattn: the forward, and backwards, also in FP8."""
    from flexattn.dispatch.options import attention_backend
    from flexattn.integrations.te import Float8CurrentScalingQuantizer, FusedAttnBackend, fused_attn_bwd, fused_attn_fwd

    batch, length = tensors[0].shape[:2]
    cu_seqlens = torch.arange(batch + 1, dtype=torch.int32, device=tensors[0].device) * length
    lengths: dict[str, Any] = {
        "max_seqlen_q": length,
        "max_seqlen_kv": length,
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_kv": cu_seqlens,
    }
    kind: dict[str, Any] = {"fake_dtype": tensors[0].dtype, "fused_attention_backend": FusedAttnBackend.F16_arbitrary_seqlen}
    layout: dict[str, Any] = {"qkv_layout": "bshd_bshd_bshd", "o_format": "bshd", "attn_mask_type": "causal"}

    call: dict[str, Any] = {**lengths, **kind, **layout}
    fp8_call: dict[str, Any] = {**call, "fused_attention_backend": FusedAttnBackend.FP8}
    formats: dict[str, Any] = {"do_format": "bshd", "dqkv_layout": "bs3hd"}
    quantize = Float8CurrentScalingQuantizer(torch.float8_e4m3fn)
    in_fp8: dict[str, Any] = {name: quantize(t) for name, t in zip("qkv", tensors, strict=True)}
    with attention_backend("triton"):
        out, aux = fused_attn_fwd(True, q=tensors[0], k=tensors[1], v=tensors[2], **call)
        fp8_out, fp8_aux = fused_attn_fwd(True, **in_fp8, **fp8_call)
    dout = torch.randn_like(out)

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Any:
        with attention_backend("triton"):
            return fused_attn_fwd(True, q=q, k=k, v=v, **call)[0]

    def backward(q: Tensor, k: Tensor, v: Tensor) -> Any:
        with attention_backend("triton"):
            fused_attn_bwd(q=q, k=k, v=v, o=out, d_o=dout, aux_ctx_tensors=aux, **formats, **call)
            return out

    def backward_in_fp8(d_o: Any, *_: Tensor) -> Any:
        with attention_backend("triton"):
            fused_attn_bwd(d_o=d_o, o=fp8_out, aux_ctx_tensors=fp8_aux, **formats, **in_fp8, **fp8_call)
            return out

    return {
        "fused_attn_fwd": forward,
        "fused_attn_bwd, dqkv packed": backward,
        "fused_attn_bwd, FP8": functools.partial(backward_in_fp8, quantize(dout)),
        "fused_attn_bwd, FP8, d_o in 16 bits": functools.partial(backward_in_fp8, dout),
    }


def _te_module() -> Callable[..., Tensor]:
    """Returns TransformerEngine's module on the same problem, run by flexattn; its out is viewed in q's shape."""
    from flexattn.dispatch.options import attention_backend
    from flexattn.integrations.te import DotProductAttention

    module = DotProductAttention(HEADS, HEAD_DIM, qkv_format="bshd", attn_mask_type="causal")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with attention_backend("triton"):
            return module(q, k, v).view(q.shape)  # type: ignore[no-any-return]

    return attend


def _both(forward: Callable[[], Tensor], leaves: list[Tensor], dout: Tensor) -> object:
    out = forward()
    return torch.autograd.grad(out, leaves, dout if out.shape == dout.shape else torch.ones_like(out))


def _retained(forwards: dict[str, Callable[[], Tensor]], leaves: list[Tensor], dout: Tensor) -> dict[str, Callable[[], object]]:
    """Returns backwards over a retained graph: of a repeated call, and for flexattn also of the first call of its kind.

    FlexAttention is not measured: torch.compile's backward cannot retain its graph, because it reuses the buffers that the forward
    saved ("donated buffers").
    """
    from flexattn import call_cache

    timed: dict[str, Callable[[], object]] = {}
    for name, forward in forwards.items():
        if name.startswith("FlexAttention"):
            continue
        _set_family(name)
        outs = {name: forward()}
        if name.startswith("flexattn"):
            call_cache.clear_cache()
            outs[f"{name}, first call"] = forward()
        for graph, out in outs.items():
            seed = dout if out.shape == dout.shape else torch.ones_like(out)
            timed[graph] = functools.partial(torch.autograd.grad, out, leaves, seed, retain_graph=True)
    return timed


def _set_family(implementation: str) -> None:
    os.environ["FLEXATTN_HOPPER"] = "always" if "sm_90" in implementation else "never"


def _times(timed: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
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


def _frontend(rounds: int) -> Iterator[Row]:
    """Yields rows of cuDNN's Python frontend: it executes an existing graph with allocated memory."""
    from flexattn.bench.cudnn_frontend import CUDNN_FRONTEND, prepare_cudnn
    from flexattn.bench.implementations import Unavailable
    from flexattn.bench.inputs import make_tensors
    from flexattn.bench.shapes import Workload

    workload = Workload("host", "host", (128, 128), (128, 128), HEADS, HEADS, HEAD_DIM, HEAD_DIM, "causal")
    for direction in ("forward", "both"):
        try:
            prepared = prepare_cudnn(workload, make_tensors(workload, "cuda"), direction)
        except Unavailable as e:
            print(f"{CUDNN_FRONTEND}: {e}")
            return
        samples = _times({CUDNN_FRONTEND: prepared.timed}, rounds)[CUDNN_FRONTEND]
        yield {"call": "bshd", "direction": direction, "implementation": CUDNN_FRONTEND, **quartiles(samples)}


def stages(has_gpu: bool) -> dict[str, float]:
    """Returns the microseconds of each part of one call, the least of many rounds. The last entry is another call."""
    import flexattn
    from flexattn import call_cache
    from flexattn.cached_call import CachedCall
    from flexattn.dispatch import options
    from flexattn.dispatch.replay import Recording
    from flexattn.kernels_triton.runtime import launch

    os.environ["FLEXATTN_HOPPER"] = "never"
    device = torch.device("cuda", 0) if has_gpu else torch.device("cpu")
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

    found: dict[str, Callable[[], object]] = {
        "the whole call": attend,
        "  the key and the look-up": lambda: original(*seen[0]),
        "    of it: modes, switches, environment": call_cache.state_around,
        "      of it: the environment": options.snapshot,
        "    of it: tensors compared, addresses": lambda: likeness.addresses(key.tensors),
        "  what is played: memory, addresses, the launch": lambda: call.run(key, False),
        "    of it: memory for out and lse": lambda: [recording.allocate(*how) for how in shapes],
        "    of it: the launch, arguments packed": lambda: prepared.launch(launch.current_stream(device), addresses),
    }
    new: dict[str, Callable[[], object]] = {"a call with a key that is new (lengths that never came)": anew}
    return {name: min(us) for name, us in (*_times(found, ROUNDS).items(), *_times(new, ROUNDS).items())}


CHILD = """
import json, sys, time
clock = time.perf_counter
began = clock()
import torch
has_torch = clock()
import flexattn
has_flexattn = clock()
import triton, triton.language
has_triton = clock()
has_gpu = torch.cuda.is_available()
loaded = 0
if not has_gpu:
    began_to_load = clock()
    import flexattn.kernels_triton.runtime.launch  # which the first call needs, and the driver that stands in too
    loaded = clock() - began_to_load
    from flexattn.bench import stub_driver
    stub_driver.install()
q = torch.zeros(2, 128, 8, 64, dtype=torch.bfloat16, device="cuda" if has_gpu else "cpu")
wait = torch.cuda.synchronize if has_gpu else int
wait()
before = clock()
flexattn.attention(q, q, q, attn_mask_type="causal", backend="triton")
wait()
first = clock()
flexattn.attention(q, q, q, attn_mask_type="causal", backend="triton")
wait()
again = clock()
flexattn.attention(q[:1], q[:1], q[:1], attn_mask_type="causal", backend="triton")
wait()
imports = [has_torch - began, has_flexattn - has_torch, has_triton - has_flexattn]
times = [*imports, loaded + first - before, again - first, clock() - again]
print(json.dumps(times))
"""


def cold_start(has_gpu: bool) -> dict[str, float]:
    """Returns the milliseconds of the steps that a process runs once: the least of several processes.

    A line without a kernel on disk comes from a single process. Python's bytecode is on disk, as after pip; the import without
    bytecode is a separate line.
    """
    imports = ("import torch", "import flexattn, after it", "import triton, which the first call needs")
    names = (*imports, "first call", "the same call again, which is recorded", "a call of another batch size")
    with tempfile.TemporaryDirectory() as folder:

        def run(kernels: str) -> list[float]:
            env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
            env |= {"TRITON_CACHE_DIR": str(Path(folder, kernels)), "FLEXATTN_KERNELS": str(Path(folder, kernels, "kernels"))}
            env["PYTHONPYCACHEPREFIX"] = str(Path(folder, "bytecode"))
            ran = subprocess.run([sys.executable, "-c", CHILD], env=env, check=True, capture_output=True, text=True)
            times: list[float] = json.loads(ran.stdout)
            return times

        (_, without_bytecode, *_), cold, *warm = [run("first"), *(run("second") for _ in range(4))]
    found = {name: 1e3 * min(run[i] for run in warm) for i, name in enumerate(names)}
    found["import flexattn, with no bytecode on disk"] = 1e3 * without_bytecode
    return {**found, "first call, with no kernel on disk": 1e3 * cold[3]}


if __name__ == "__main__":
    sys.exit(main())
