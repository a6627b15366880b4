"""Models of Hugging Face transformers on flexattn, compared with transformers' attention implementations in one run.

    python -m flexattn.bench.transformers_models --out transformers.json
    python -m flexattn.bench.transformers_models --as sm_80 --implementations sdpa flexattn --out transformers_sm_80.json

The program measures a training step (forward and backward, bfloat16) of two layers of each model and its peak memory. Decoders take
one sequence, packed sequences and a padded batch; encoders take a padded batch or images. Before the timing, the results of a small
model are compared with eager's in float32; their error may be `WORST` times that of eager in bfloat16. Needs a GPU, and
transformers 5.17 or later.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flexattn import compat
from flexattn.bench import harness, record
from flexattn.bench.harness import Program, Row
from flexattn.bench.measure import peak_bytes, reason_of

IMPLEMENTATIONS = ("eager", "sdpa", "flexattn", "flex_attention")  # the last one compiles for minutes
DECODER_BATCHES = ("one sequence", "packed", "left-padded")
TOKENS = 8192  # in each step
WORST = 2.0
BUDGET_MS = 1000.0  # time of the steps of a batch
Entries = dict[str, float]
SIZES: dict[str, int] = {"vocab_size": 1000, "num_hidden_layers": 2, "max_position_embeddings": 32768, "pad_token_id": 0}
LARGE = SIZES | {
    "hidden_size": 4096,
    "intermediate_size": 1024,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
SMALL = SIZES | {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16}
SHARP = {"initializer_range": 0.2, "sliding_window": 64}  # scores large enough that a softcap, a window or a sink changes them
EXPERTS = {"num_local_experts": 1, "num_experts_per_tok": 1}  # one: rounding may choose another one of several experts
SHORT = 128  # tokens of a sentence at most
IMAGE = 224  # pixels of a side: 196 patches and a class token
ENCODER = {"num_hidden_layers": 2, "num_attention_heads": 12, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MINILM = ENCODER | {"vocab_size": 1000, "hidden_size": 384, "intermediate_size": 1536}
VIT = ENCODER | {"image_size": IMAGE, "patch_size": 16, "hidden_size": 768, "intermediate_size": 3072}


class Model(NamedTuple):
    """A configuration's class and its entries: of the model that is timed, and of the one whose results are compared."""

    config: str
    large: Entries
    small: Entries
    batches: Sequence[str] = DECODER_BATCHES
    maker: str = "AutoModelForCausalLM"


def _decoder(config: str, **settings: float) -> Model:
    sharp = {name: value for name, value in SHARP.items() if name != "sliding_window" or name in settings}
    return Model(config, LARGE | settings, SMALL | settings | sharp)


def _encoder(config: str, entries: Entries, batch: str) -> Model:
    small = {"hidden_size": 96, "intermediate_size": 192, "initializer_range": SHARP["initializer_range"]}
    return Model(config, entries, entries | small, (batch,), "AutoModel")


def _gemma2() -> Model:
    model = _decoder("Gemma2Config", sliding_window=1024, attn_logit_softcapping=2.0)
    for entries in (model.large, model.small):
        entries["query_pre_attn_scalar"] = entries["head_dim"]
    return model


MODELS = {
    "llama": _decoder("LlamaConfig"),
    "mistral": _decoder("MistralConfig", sliding_window=1024),
    "gemma2": _gemma2(),
    "gpt_oss": _decoder("GptOssConfig", sliding_window=128, **EXPERTS),
    "minilm": _encoder("BertConfig", MINILM, "right-padded"),
    "vit": _encoder("ViTConfig", VIT, "images"),
}


class Batch(NamedTuple):
    """Arguments of a model, and the mask of the tokens whose results count."""

    inputs: dict[str, bool | Tensor]
    kept: Tensor


def batches(tokens: int, device: torch.device) -> dict[str, Batch]:
    """Returns batches of about as many tokens.

    The same tokens are one sequence, six packed sequences, four rows of which two have padding in front, and rows of SHORT tokens
    with padding behind. Images have 197 tokens each.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, SIZES["vocab_size"], (1, tokens), generator=generator).to(device)
    lengths = [tokens * n // 64 for n in (24, 2, 12, 4, 15)]
    positions = torch.cat([torch.arange(n) for n in (*lengths, tokens - sum(lengths))])[None].to(device)
    rows = ids.view(4, -1)
    padding = torch.ones_like(rows)
    padding[1, : rows.shape[1] // 2] = padding[3, : rows.shape[1] // 4] = 0
    everything = torch.ones_like(ids, dtype=torch.bool)
    short = ids.view(-1, SHORT)
    text = (torch.arange(SHORT) < torch.randint(1, SHORT + 1, (len(short), 1), generator=generator)).long().to(device)
    images = torch.randn(-(-tokens // 197), 3, IMAGE, IMAGE, generator=generator).to(device)
    decoders = {"use_cache": False}
    return {
        "one sequence": Batch({"input_ids": ids, **decoders}, everything),
        "packed": Batch({"input_ids": ids, "position_ids": positions, **decoders}, everything),
        "left-padded": Batch({"input_ids": rows, "attention_mask": padding, **decoders}, padding.bool()),
        "right-padded": Batch({"input_ids": short, "attention_mask": text}, text.bool()),
        "images": Batch({"pixel_values": images}, torch.ones(len(images), 197, dtype=torch.bool, device=device)),
    }


def build(model: Model, implementation: str, dtype: torch.dtype, device: torch.device, is_large: bool = False) -> torch.nn.Module:
    """Returns a model. Its random weights are the same for every implementation and dtype."""
    import transformers

    torch.manual_seed(1)
    config = getattr(transformers, model.config)(**(model.large if is_large else model.small))
    subject = getattr(transformers, model.maker).from_config(config, attn_implementation=implementation)
    for key, weight in subject.named_parameters():
        if key.endswith("sinks"):
            torch.nn.init.normal_(weight)
    return subject.to(device, dtype)  # type: ignore[no-any-return]


def results_of(model: torch.nn.Module, batch: Batch) -> Tensor:
    """Returns the logits, or an encoder's last states, that count: float32 [tokens, vocabulary or hidden size]."""
    with torch.no_grad():
        results: Tensor = model(**batch.inputs)[0][batch.kept].float()
    return results


def step(model: torch.nn.Module, batch: Batch) -> None:
    """Runs a forward and a backward, and drops the gradients."""
    model(**batch.inputs)[0].float().square().mean().backward()
    model.zero_grad(set_to_none=True)


def errors(model: Model, implementation: str, tokens: int, device: torch.device) -> dict[str, float]:
    """Returns for each batch the largest error of the results in bfloat16 over that of eager, against eager in float32."""
    exact = build(model, "eager", torch.float32, device).eval()
    plain, subject = (build(model, name, torch.bfloat16, device).eval() for name in ("eager", implementation))
    ratios = {}
    for name in model.batches:
        batch = batches(tokens, device)[name]
        wanted = results_of(exact, batch)
        off, plainly_off = ((results_of(run, batch) - wanted).abs().max().item() for run in (subject, plain))
        ratios[name] = off / plainly_off
    return ratios


def measure(model: Model, implementations: Sequence[str], device: torch.device) -> Iterator[Row]:
    """Yields a row for each implementation and batch of a model, with the status measured, wrong or refused."""
    for implementation in implementations:
        compat.dynamo().reset()  # Dynamo compiles few shapes of a function; past that limit FlexAttention stores all scores
        row: Row = {"implementation": implementation}
        try:
            off = errors(model, implementation, 512, device)
            subject = build(model, implementation, torch.bfloat16, device, is_large=True).train()
        except (ImportError, NotImplementedError, RuntimeError, ValueError) as e:
            yield row | {"status": "refused", "reason": reason_of(e)}
            continue
        for name in model.batches:
            call = functools.partial(step, subject, batches(TOKENS, device)[name])
            compat.dynamo().reset()
            cell = row | {"batch": name, "error": off[name]}
            if off[name] > WORST:
                yield cell | {"status": "wrong"}
                continue
            try:
                cell |= harness.times({name: call}, BUDGET_MS, "ms")[name]
                cell |= {"status": "measured", "peak_gib": (torch.cuda.memory_allocated() + peak_bytes(call)) / 2**30}
            except torch.cuda.OutOfMemoryError as e:
                cell |= {"status": "refused", "reason": reason_of(e)}
            yield cell
        del subject, call
        harness.free_memory()


def line(row: Row) -> str:
    times = f"{row['ms']:8.1f} ms {row['peak_gib']:5.1f} GiB" if row["status"] == "measured" else row["status"]
    return f"{times:22} {row['model']:8} {row['implementation']:15} {row.get('batch', '')} {row.get('reason', '')}"


def measure_on_gpu(model: Model, options: argparse.Namespace) -> Iterator[Row]:
    from flexattn.integrations.transformers import register

    register()
    return measure(model, options.implementations, torch.device("cuda"))


PROGRAM = Program(
    "flexattn.bench.transformers_models",
    __doc__,
    "model",
    MODELS,
    measure_on_gpu,
    line,
    add_options=lambda parser: parser.add_argument(
        "--implementations", nargs="+", choices=IMPLEMENTATIONS, default=IMPLEMENTATIONS
    ),
    facts=lambda: {"transformers": record.installed("transformers"), "tokens": TOKENS},
    fails="flexattn",
)

if __name__ == "__main__":
    sys.exit(PROGRAM.run())
