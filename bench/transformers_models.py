"""Models of Hugging Face transformers on flexattn, timed beside transformers' own attention implementations in one run.

    python -m flexattn.bench.transformers_models --out transformers.json

A training step (forward and backward, bfloat16) of two layers of each model, over one sequence, over packed sequences and over a
padded batch, and the peak memory of the step. Before it is timed, each implementation's logits are compared with eager's in
float32, at a small size, where they may be off by `WORST` times what eager in bfloat16 is off. Needs a GPU, and transformers 5.17
or later.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Those of a group take turns by model. FlexAttention's, which is compiled for minutes, comes when the others are on file.
GROUPS = (("eager", "sdpa", "flexattn"), ("flex_attention",))
IMPLEMENTATIONS = tuple(itertools.chain(*GROUPS))
BATCHES = ("one sequence", "packed", "left-padded")
WORST = 2.0
WARM_UPS, CALLS = 3, 10
SIZES: dict[str, Any] = {"vocab_size": 1000, "num_hidden_layers": 2, "max_position_embeddings": 32768, "pad_token_id": 0}
LARGE = SIZES | {
    "hidden_size": 4096,
    "intermediate_size": 1024,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
SMALL = SIZES | {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16}
SHARP = {"initializer_range": 0.2, "sliding_window": 64}  # scores that a softcap, a window or a sink changes
EXPERTS = {"num_local_experts": 1, "num_experts_per_tok": 1}  # one, as rounding may choose another of several
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"sliding_window": 1024}),
    "gemma2": ("Gemma2Config", {"sliding_window": 1024, "attn_logit_softcapping": 2.0}),
    "gpt_oss": ("GptOssConfig", {"sliding_window": 128, **EXPERTS}),
}


class Batch(NamedTuple):
    """Arguments of a model, and which of its logits count."""

    inputs: dict[str, Tensor]
    kept: Tensor


def batches(tokens: int, device: torch.device) -> dict[str, Batch]:
    """Returns the same tokens as one sequence, as six packed sequences, and as four rows, two of which begin with padding."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, SIZES["vocab_size"], (1, tokens), generator=generator).to(device)
    lengths = [tokens * n // 64 for n in (24, 2, 12, 4, 15)]
    positions = torch.cat([torch.arange(n) for n in (*lengths, tokens - sum(lengths))])[None].to(device)
    rows = ids.view(4, -1)
    padding = torch.ones_like(rows)
    padding[1, : rows.shape[1] // 2] = padding[3, : rows.shape[1] // 4] = 0
    everything = torch.ones_like(ids, dtype=torch.bool)
    return {
        "one sequence": Batch({"input_ids": ids}, everything),
        "packed": Batch({"input_ids": ids, "position_ids": positions}, everything),
        "left-padded": Batch({"input_ids": rows, "attention_mask": padding}, padding.bool()),
    }


def build(model: str, sizes: dict[str, Any], implementation: str, dtype: torch.dtype, device: torch.device) -> Any:
    """Returns a model with the same random weights for every implementation and dtype."""
    import transformers

    name, settings = MODELS[model]
    scalar = {"query_pre_attn_scalar": sizes["head_dim"]} if model == "gemma2" else {}
    entries = settings | {key: value for key, value in sizes.items() if key != "sliding_window" or key in settings} | scalar
    torch.manual_seed(1)
    config = getattr(transformers, name)(**entries)
    made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    for key, weight in made.named_parameters():
        if key.endswith("sinks"):
            torch.nn.init.normal_(weight)
    return made.to(device, dtype)


def logits_of(model: Any, batch: Batch) -> Tensor:
    """Logits of the tokens that count, float32 [tokens, vocabulary]."""
    with torch.no_grad():
        logits: Tensor = model(**batch.inputs, use_cache=False).logits[batch.kept].float()
    return logits


def step(model: Any, batch: Batch) -> None:
    """Makes a forward and a backward, and forgets the gradients."""
    model(**batch.inputs, use_cache=False).logits.float().square().mean().backward()
    model.zero_grad(set_to_none=True)


def time_steps(model: Any, batch: Batch) -> dict[str, float]:
    """Returns milliseconds of steps (median and quartiles) and the peak memory of one in GiB, what was held before it included."""
    for _ in range(WARM_UPS):
        step(model, batch)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    ms = []
    for _ in range(CALLS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        step(model, batch)
        end.record()
        end.synchronize()
        ms.append(start.elapsed_time(end))
    q1, median, q3 = statistics.quantiles(ms, n=4)
    return {"ms": median, "ms_q1": q1, "ms_q3": q3, "peak_gib": torch.cuda.max_memory_allocated() / 2**30}


def errors(model: str, implementation: str, tokens: int, device: torch.device, names: Sequence[str] = BATCHES) -> dict[str, float]:
    """Returns for each batch the largest error of the logits in bfloat16, over eager's; right is eager in float32."""
    exact = build(model, SMALL | SHARP, "eager", torch.float32, device).eval()
    plain, subject = (build(model, SMALL | SHARP, name, torch.bfloat16, device).eval() for name in ("eager", implementation))
    found = {}
    for name in names:
        batch = batches(tokens, device)[name]
        wanted = logits_of(exact, batch)
        off, plainly_off = ((logits_of(run, batch) - wanted).abs().max().item() for run in (subject, plain))
        found[name] = off / plainly_off
    return found


class Chosen(NamedTuple):
    """Cells to measure."""

    tokens: int
    models: Sequence[str]
    implementations: Sequence[str]
    batches: Sequence[str]


def measure(chosen: Chosen, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yields a row for each model, implementation and batch, measured, wrong or refused."""
    for group, model in itertools.product(GROUPS, chosen.models):
        for implementation in (name for name in group if name in chosen.implementations):
            torch._dynamo.reset()  # a few shapes are compiled for one function; of more, FlexAttention keeps all scores
            row: dict[str, Any] = {"model": model, "implementation": implementation}
            try:
                off = errors(model, implementation, 512, device, chosen.batches)
                subject = build(model, LARGE, implementation, torch.bfloat16, device).train()
            except (ImportError, NotImplementedError, RuntimeError, ValueError) as e:
                yield row | {"status": "refused", "reason": str(e).splitlines()[0]}
                continue
            for name in chosen.batches:
                batch = batches(chosen.tokens, device)[name]
                torch._dynamo.reset()
                cell = row | {"batch": name, "error": off[name]}
                if off[name] > WORST:
                    yield cell | {"status": "wrong"}
                    continue
                try:
                    measured = time_steps(subject, batch)
                except torch.cuda.OutOfMemoryError as e:
                    yield cell | {"status": "refused", "reason": str(e).splitlines()[0]}
                else:
                    yield cell | {"status": "measured"} | measured
            del subject
            gc.collect()
            torch.cuda.empty_cache()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="where the JSON is written, after every row")
    parser.add_argument("--tokens", type=int, default=8192, help="of a step, a multiple of 64")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--implementations", nargs="+", choices=IMPLEMENTATIONS, default=IMPLEMENTATIONS)
    parser.add_argument("--batches", nargs="+", choices=BATCHES, default=BATCHES)
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("no CUDA device; transformers_models measures device time")
    from flexattn.bench import record
    from flexattn.integrations.transformers import register

    register()
    result = {
        "command": record.command_line("flexattn.bench.transformers_models", sys.argv[1:], options.out),
        "started": record.now(),
        "device": record.device_facts(),
        "versions": record.versions(),
        "transformers": record.installed("transformers"),
        "method": __doc__,
        "tokens": options.tokens,
    }
    rows = []
    chosen = Chosen(options.tokens, options.models, options.implementations, options.batches)
    for row in measure(chosen, torch.device("cuda")):
        rows.append(row)
        what = f"{row['ms']:8.1f} ms {row['peak_gib']:5.1f} GiB" if row["status"] == "measured" else row["status"]
        print(f"{what:22} {row['model']:8} {row['implementation']:15} {row.get('batch', '')} {row.get('reason', '')}", flush=True)
        if options.out is not None:
            options.out.write_text(json.dumps(result | {"rows": rows}, indent=1) + "\n")
    return int(any(row["status"] == "wrong" and row["implementation"] == "flexattn" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
