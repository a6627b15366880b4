"""Scores modified by options, by mods in torch and by TransformerEngine's callbacks, timed beside each other in one run.

    python -m flexattn.bench.callbacks --out callbacks.json

For each backend the same attention in every spelling, forward and backward, and FlexAttention's, compiled; each result is checked
against the eager backend, in float32, before it is timed. Answers whether a callback costs what the option costs. Needs a GPU.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FLUSH_BYTES, FLUSHES = 2**28, 6  # written before each call, several times: empties L2, and hides the host's part of the call
ROUNDS, CALLS = 7, 10  # turns of each spelling, and calls in each
WORST = 2.0**-4  # share of a result's largest number: far above rounding in bf16, far below a wrong result
SHAPE = (4, 4096, 16, 128)  # batch, tokens, heads, head dim
CAP = 30.0
BACKENDS = ("triton", "cudnn")

Call = Callable[..., Tensor]


class SoftcapCallback:
    """CAP * tanh(score / CAP) as TransformerEngine's pull request 2984 writes it, with its bprop."""

    def forward(self, graph: Any, score: Any, tensors: Any) -> Any:
        self.scaled = graph.div(a=score, b=tensors["cap"])
        return graph.mul(a=graph.tanh(input=self.scaled), b=tensors["cap"])

    def backward(self, graph: Any, gradient: Any, tensors: Any) -> Any:
        scaled = graph.mul(a=gradient, b=tensors["cap"])
        return graph.div(a=graph.tanh_backward(loss=scaled, input=self.scaled), b=tensors["cap"])


def _keeps(graph: Any, score: Any) -> Any:
    row, column = (graph.gen_index(input=score, axis=axis) for axis in (2, 3))
    return graph.cmp_ge(input=row, comparison=column)


def causal(graph: Any, score: Any, tensors: Any) -> Any:
    return graph.binary_select(input0=score, input1=tensors["neg_inf"], mask=_keeps(graph, score))


def causal_bprop(graph: Any, gradient: Any, tensors: Any) -> Any:
    return graph.binary_select(input0=gradient, input1=tensors["zero"], mask=_keeps(graph, gradient))


def distance(graph: Any, score: Any, tensors: Any) -> Any:
    row, column = (graph.gen_index(input=score, axis=axis) for axis in (2, 3))
    return graph.add(a=score, b=graph.sub(a=row, b=column))


def spellings() -> dict[tuple[str, str], dict[str, Any]]:
    """Arguments of attention() for each (score, spelling)."""
    from flexattn import mods
    from flexattn.integrations.te import TEScoreMod

    softcap = SoftcapCallback()
    fill, zero, cap = {"neg_inf": -1e9}, {"zero": 0.0}, {"cap": CAP}
    return {
        ("plain", "full"): {},
        ("causal", "option"): {"attn_mask_type": "causal"},
        ("causal", "callback, bprop given"): {"score_mod": TEScoreMod(causal, causal_bprop, fill, zero)},
        ("causal", "callback"): {"score_mod": TEScoreMod(causal, None, fill)},
        ("softcap", "option"): {"softcap": CAP},
        ("softcap", "mods.softcap"): {"score_mod": mods.softcap(CAP)},
        ("softcap", "callback, bprop given"): {"score_mod": TEScoreMod(softcap.forward, softcap.backward, cap)},
        ("softcap", "callback"): {"score_mod": TEScoreMod(softcap.forward, None, cap)},
        ("distance", "score_mod"): {"score_mod": lambda score, b, h, q_idx, kv_idx: score + (q_idx - kv_idx)},
        ("distance", "callback, bprop given"): {"score_mod": TEScoreMod(distance, lambda graph, gradient, tensors: gradient)},
        ("distance", "callback"): {"score_mod": TEScoreMod(distance)},
    }


def flex_attention_calls(length: int) -> dict[tuple[str, str], Call]:
    """The same by FlexAttention, compiled: causal by a block mask and by a score_mod."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled: Any = torch.compile(flex_attention, dynamic=False)
    block = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device="cuda")

    def call(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
        out: Tensor = compiled(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **how)
        return out.transpose(1, 2)

    mods: dict[tuple[str, str], dict[str, Any]] = {
        ("causal", "block mask"): {"block_mask": block},
        ("causal", "score_mod"): {"score_mod": lambda score, b, h, i, j: torch.where(i >= j, score, -1e9)},
        ("softcap", "score_mod"): {"score_mod": lambda score, b, h, i, j: CAP * torch.tanh(score / CAP)},
        ("distance", "score_mod"): {"score_mod": lambda score, b, h, i, j: score + (i - j)},
    }
    return {name: functools.partial(call, **how) for name, how in mods.items()}


def wanted(leaves: list[Tensor], dout: Tensor, how: dict[str, Any]) -> list[Tensor]:
    """Returns out and the gradients by the eager backend in float32, head by head, which needs less memory."""
    from flexattn import attention

    parts = []
    for head in range(dout.shape[2]):
        qkv = [t.detach()[:, :, head : head + 1].float().requires_grad_() for t in leaves]
        out = attention(*qkv, **how, backend="eager")
        parts.append([out, *torch.autograd.grad(out, qkv, dout[:, :, head : head + 1].float())])
    return [torch.cat(part, 2).detach() for part in zip(*parts, strict=True)]


def time_calls(call: Callable[[], Any], flush: Tensor, calls: int = CALLS) -> list[float]:
    """Microseconds of device time of each call."""
    made = [torch.cuda.Event(enable_timing=True) for _ in range(2 * calls)]  # type: ignore[no-untyped-call]
    events = list(zip(made[::2], made[1::2], strict=True))
    for start, end in events:
        for _ in range(FLUSHES):
            flush.zero_()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [1e3 * start.elapsed_time(end) for start, end in events]


def measure() -> list[dict[str, Any]]:
    """Returns a row for each implementation, score, spelling and direction."""
    from flexattn import BackendError, attention

    torch.manual_seed(0)
    leaves = [torch.randn(SHAPE, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    dout = torch.randn(SHAPE, device="cuda", dtype=torch.bfloat16)
    ours = spellings()
    made: dict[tuple[str, str, str], Call] = {
        (backend, *name): functools.partial(attention, **how, backend=backend) for backend in BACKENDS for name, how in ours.items()
    }
    made |= {("FlexAttention", *name): call for name, call in flex_attention_calls(SHAPE[1]).items()}
    truth: dict[str, dict[str, Any]] = {
        "plain": {},
        "causal": {"attn_mask_type": "causal"},
        "softcap": {"softcap": CAP},
        "distance": ours["distance", "score_mod"],
    }
    exact = {score: wanted(leaves, dout, how) for score, how in truth.items()}
    rows: list[dict[str, Any]] = []
    timed: dict[tuple[str, str, str, str], Callable[[], Any]] = {}
    for (implementation, score, spelling), call in made.items():
        row: dict[str, Any] = {"implementation": implementation, "score": score, "spelling": spelling}
        try:
            out = call(*leaves)
            got = [out, *torch.autograd.grad(out, leaves, dout, retain_graph=True)]
        except BackendError as e:
            rows.append(row | {"status": "refused", "reason": str(e).splitlines()[1].strip()})
            continue
        errors = [((a.float() - b).abs().amax() / b.abs().amax()).item() for a, b in zip(got, exact[score], strict=True)]
        if max(errors) > WORST:
            rows.append(row | {"status": "wrong", "error": max(errors)})
            continue
        rows += [
            row | {"status": "measured", "direction": direction, "error": max(errors)} for direction in ("forward", "backward")
        ]
        detached = [t.detach() for t in leaves]
        timed[implementation, score, spelling, "forward"] = functools.partial(call, *detached)
        timed[implementation, score, spelling, "backward"] = functools.partial(
            torch.autograd.grad, out, leaves, dout, retain_graph=True
        )
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    times: dict[tuple[str, ...], list[float]] = {name: [] for name in timed}
    for timed_call in timed.values():
        time_calls(timed_call, flush, 4)
    for _ in range(ROUNDS):
        for name, timed_call in timed.items():
            times[name] += time_calls(timed_call, flush)
    for row in rows:
        if row["status"] == "measured":
            q1, median, q3 = statistics.quantiles(
                times[row["implementation"], row["score"], row["spelling"], row["direction"]], n=4
            )
            row |= {"us": median, "us_q1": q1, "us_q3": q3}
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="where the JSON is written")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("no CUDA device; callbacks measures device time")
    from flexattn.bench import record

    rows = measure()
    for row in rows:
        what = f"{row['us']:9.1f} us {row['direction']:8}" if row["status"] == "measured" else f"{row['status']}"
        print(f"{what:22} {row['implementation']:13} {row['score']:8} {row['spelling']} {row.get('reason', '')}")
    if options.out is not None:
        result = {
            "command": record.command_line("flexattn.bench.callbacks", sys.argv[1:], options.out),
            "started": record.now(),
            "device": record.device_facts(),
            "versions": record.versions(),
            "method": __doc__,
            "shape": dict(zip(("b", "s", "h", "d"), SHAPE, strict=True)),
            "rows": rows,
        }
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return int(any(row["status"] == "wrong" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
