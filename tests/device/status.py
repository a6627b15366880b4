"""Makes the tables of docs/status.md from result files of device runs and benchmarks: `python -m tests.device.status`."""

from __future__ import annotations

import fnmatch
import functools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.device.steps import has_run
from tests.fuzz.check import ON_GPU
from tests.fuzz.config import draw_config, features, varied

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
PAGE = ROOT / "docs" / "status.md"
BEGIN, END = "<!-- made by `python -m tests.device.status`: begin -->", "<!-- end -->"
NOT_RUN = "not run"
NOTHING = "-"  # it is no feature of this column
NO_RUN = "no run"
GPUS = ("H100", "H200")
ENOUGH = 2000  # each feature is among so many configurations


class Feature(NamedTuple):
    """Evidence for a feature: tests that CI runs on a CPU, features of random calls, and rows of benchmarks.

    measured: (result file, word) with a row of the file that was measured and has the word.
    """

    tests: Sequence[str]
    random: Sequence[str] = ()  # patterns of one group of `known_features`
    measured: Sequence[tuple[str, str]] = ()
    jax: bool = False  # the random calls in JAX


def _standard(word: str) -> list[tuple[str, str]]:
    return [("standard_h100.json", word), ("standard_again_h200.json", word)]


def _decode(word: str) -> list[tuple[str, str]]:
    return [("decode_peers_h100.json", word), ("decode_paged_h200.json", word)]


FEATURES = {
    "bfloat16, forward and backward": Feature(
        ["tests/portable/test_attention.py"], ["dtype: bfloat16"], _standard("flexattn triton")
    ),
    "float16": Feature(["tests/api/test_support.py"], ["dtype: float16"]),
    "float32": Feature(["tests/api/test_support.py"], ["dtype: float32"]),
    "Packed sequences": Feature(["tests/portable/test_attention.py"], ["formats: thd"], _standard("ragged-")),
    "Causal masks": Feature(["tests/portable/test_attention.py"], ["mask: causal*"], _standard("causal")),
    "Windows": Feature(
        ["tests/portable/test_attention.py"], ["window: any*", "window: huge*", "window: open and [ah]*"], _standard("window")
    ),
    "Grouped heads": Feature(["tests/portable/test_attention.py"], ["heads: grouped"], _standard("llama3")),
    "Head dims above 256": Feature(["tests/hopper/test_wide.py"], ["head dims: above*"], _decode("MLA")),
    "Biases": Feature(["tests/portable/test_attention.py"], ["bias: p*"], _standard("score-relative-bias")),
    "ALiBi": Feature(["tests/portable/test_attention.py"], ["bias: alibi"], _standard("score-alibi")),
    "Softcap": Feature(["tests/portable/test_attention.py"], ["softcap: softcap"], _standard("score-softcap")),
    "Attention sinks": Feature(["tests/portable/test_attention.py"], ["softmax: learnable", "softmax: off*"], _standard("gpt-oss")),
    "Dropout": Feature(["tests/hopper/test_dropout.py"], ["dropout: dropout"]),
    "score_mod": Feature(["tests/mods/test_score_mod_triton.py"], ["score_mod: [!n]*"], _standard("flexattn score_mod")),
    "mask_mod": Feature(["tests/mods/test_mask_blocks.py"], ["mask_mod: [!n]*"], _standard("score-document-mask")),
    "Block masks": Feature(["tests/api/test_block_mask.py"], ["block_mask: block_mask"]),
    "Deterministic gradients": Feature(["tests/portable/test_attention.py"], ["deterministic: True"]),
    "FP8 attention": Feature(["tests/api/test_fp8_attention.py"], ["FP8: all*", "FP8: recipe*"]),
    "FP8 keys and values": Feature(["tests/api/test_fp8_cache.py"], ["FP8: keys*"], _decode("FP8")),
    "Pages": Feature(["tests/api/test_pages.py"], ["pages: of*"], _decode("page 16")),
    "Shared prefixes": Feature(["tests/api/test_prefix.py"], (), _decode("attention_with_prefix")),
    "batch_invariant": Feature(["tests/api/test_batch_invariance.py"], (), _decode("batch_invariant")),
    "CUDA graphs": Feature([], ["mode: graph"], [("decode_peers_h100.json", "error_of_replay")]),
    "Autocast, checkpoints, streams, threads": Feature(
        ["tests/api/test_modes.py"], ["mode: autocast", "mode: checkpoint", "mode: stream", "mode: thread"]
    ),
    "torch.compile": Feature(["tests/api/test_compile.py"]),
    "torch.export": Feature(["tests/api/test_export.py"]),
    "Nested tensors": Feature(["tests/api/test_nested.py"]),
    "flexattn.nn": Feature(["tests/api/test_nn.py"]),
    "SDPA, FlexAttention, xformers": Feature([f"tests/integrations/test_{name}.py" for name in ("sdpa", "flex", "xformers")]),
    "FlashAttention 2, 3 and 4": Feature(
        [f"tests/integrations/test_{name}.py" for name in ("flash_attn", "flash_attn_3", "flash_attn_4")]
    ),
    "TransformerEngine": Feature(["tests/integrations/test_te_module.py"]),
    "TransformerEngine's callbacks": Feature(
        ["tests/integrations/test_te_score_mod.py"], (), [("callbacks_h100.json", "callback"), ("callbacks_h200.json", "callback")]
    ),
    "Hugging Face transformers": Feature(
        ["tests/integrations/test_transformers.py"], (), [("transformers_h200.json", '"flexattn"')]
    ),
    "JAX": Feature(
        ["tests/jax/test_attention.py"], (), [("jax_calls_h200.json", "flexattn.jax"), ("jax_sharded_h100.json", "")], jax=True
    ),
    "cuDNN backend": Feature(["tests/cudnn/test_launchers.py"], (), _standard("flexattn cudnn")),
    "flexattn.distributed": Feature(
        ["tests/distributed/test_exact.py"],
        (),
        [("context_parallel_h100.json", "flexattn"), ("context_parallel_h200.json", "flexattn")],
    ),
    "DTensor and FSDP": Feature(["tests/api/test_distributed.py"]),
}


def result_files(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """Returns the contents of the device runs' result files, by their names."""
    return [json.loads(path.read_text("utf-8")) | {"name": path.name} for path in sorted(folder.glob("device_*.json"))]


def tables(runs: Sequence[dict[str, Any]]) -> str:
    """Returns the text between the page's marks."""
    devices = list(dict.fromkeys(run["device"]["name"] for run in runs))
    own = [[run for run in runs if run["device"]["name"] == device] for device in devices] or [[]]
    heads = devices or ["any GPU"]
    links = [
        f"- {run['device']['name']}: [{run['name']}](../bench/results/{run['name']}), {run['started'][:10]}, "
        f"torch {run['versions']['torch']}, Triton {run['versions']['triton']}" + ", ended before its time" * (not run["complete"])
        for run in runs
    ]
    return "\n\n".join(
        [
            _table(
                ["feature", "CPU", *GPUS, "2 to 4 GPUs"],
                (
                    [name, "tests" if feature.tests else NOTHING, *(_of_gpu(feature, gpu, runs) for gpu in GPUS), _of_gpus(feature)]
                    for name, feature in FEATURES.items()
                ),
            ),
            "### Device runs",
            "\n".join(links) or "No device run is on file.",
            *_failures(runs),
            _table(["step", *heads], ([step, *(_of_step(step, runs) for runs in own)] for step in STEPS)),
            _table(["kernel family", *heads], ([name, *(_of_family(name, runs) for runs in own)] for name in families())),
        ]
    )


def _of_gpu(feature: Feature, gpu: str, runs: Sequence[dict[str, Any]]) -> str:
    """Returns the evidence for a feature on one GPU."""
    own = [run for run in runs if gpu in run["device"]["name"]]
    names = {name for name in _drawn("fuzz", own) if any(fnmatch.fnmatchcase(name, pattern) for pattern in feature.random)}
    counts = [found["features"][name] for found in _found("fuzz", own) for name in names & found["features"].keys()]
    if feature.jax:
        counts += [[found["compositions"], found["wrong"]] for found in _found("jax", own)]
    calls, wrong = (sum(count[n] for count in counts) for n in (0, 1))
    parts = [f"{calls:,} random calls" + f", {wrong} failed" * bool(wrong)] if calls else []
    parts += ["measured"] * any(gpu in device and gpus == 1 for device, gpus in _measured(feature.measured))
    return ", ".join(parts) or (NO_RUN if _of_gpus(feature) == NOTHING else NOTHING)


def _of_gpus(feature: Feature) -> str:
    found = sorted({(gpu, gpus) for device, gpus in _measured(feature.measured) for gpu in GPUS if gpu in device and gpus > 1})
    return ", ".join(f"{gpus} {gpu}" for gpu, gpus in found) or NOTHING


def _measured(evidence: Iterable[tuple[str, str]]) -> set[tuple[str, int]]:
    """Returns the devices, and how many of them, on which a row was measured."""
    found = set()
    for name, word in evidence:
        content = _content(name)
        for run in content.get("runs", [content]):
            if any(row.get("status") == "measured" and word in json.dumps(row) for row in run["rows"]):
                found.add((run["device"]["name"], run.get("ranks", run.get("devices", 1))))
    return found


def _failures(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the table of the errors of random calls that failed, if there are any."""
    kinds: Counter[str] = Counter()
    for failure in (failure for run in runs for found in _found("fuzz", [run]) for failure in found.get("failures", ())):
        errors = [name for text in failure["what"] for name in re.findall(r"\b(\w+Error)\b", text)]
        kinds[errors[0] if errors else "larger error than allowed"] += 1
    return (
        [_table(["random calls that failed", "calls"], ([name, str(count)] for name, count in kinds.most_common()))]
        if kinds
        else []
    )


@functools.cache
def _content(name: str) -> Mapping[str, Any]:
    content: dict[str, Any] = json.loads((RESULTS / name).read_text("utf-8"))
    return content


def _of_tests(found: Counter[str]) -> str:
    skipped = f", {found['skipped']:,} skipped" * bool(found["skipped"])
    crashed = f", {found['crashed']:,} processes crashed" * bool(found["crashed"])
    return f"{found['passed']:,} passed, {found['failed']:,} failed{skipped}, {found['not run']:,} not run{crashed}"


def _of_memcheck(found: Counter[str]) -> str:
    unknown = found["processes"] - found["processes with a summary"]
    ended = f"; {unknown:,} of {found['processes']:,} processes ended without a summary" * bool(unknown)
    return f"{found['calls of attention']:,} calls, {found['errors']:,} errors, {found['wrong']:,} wrong{ended}"


STEPS: dict[str, Callable[[Counter[str]], str]] = {
    "tests": _of_tests,
    "fuzz": lambda found: (
        f"{found['compositions']:,} compositions of {found['configurations']:,} configurations, {found['wrong']:,} wrong"
    ),
    "jax": lambda found: f"{found['compositions']:,} compositions, {found['wrong']:,} wrong",
    "memcheck": _of_memcheck,
}


def _found(step: str, runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the findings of a step, without runs that made no call, because these show nothing."""
    every = [run["steps"][step] for run in runs if step in run["steps"]]
    return [found for found in every if has_run(step, found)]


def _of_step(step: str, runs: Sequence[dict[str, Any]]) -> str:
    every = _found(step, runs)
    sums = Counter[str]()
    for found in every:
        sums.update({name: value for name, value in found.items() if isinstance(value, int)})
    return STEPS[step](sums) if every else NOT_RUN


def families() -> list[str]:
    """Returns the names of all kernel families, with their directions."""
    from flexattn.kernels_triton.families import BACKWARDS, FORWARDS

    every = [family for order in (FORWARDS, BACKWARDS) for kernels in order.values() for family in kernels]
    return list(dict.fromkeys(f"{family.name} {family.direction}" for family in every))


def _of_family(name: str, runs: Sequence[dict[str, Any]]) -> str:
    return "reached" if any(name in run["families"]["reached"] for run in runs) else NOT_RUN


@functools.cache
def known_features() -> set[str]:
    """Returns every feature that the fuzz draws on a GPU."""
    drawn = (varied(draw_config(seed, ON_GPU), seed) for seed in range(ENOUGH))
    return {f"{group}: {feature}" for config in drawn for group, feature in features(config).items()}


def _drawn(step: str, runs: Iterable[dict[str, Any]]) -> set[str]:
    return {name for run in runs for name in run["steps"].get(step, {}).get("features", ())}


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(heads) + " |", "|---" + "|:---:" * (len(heads) - 1) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def page(text: str, runs: Sequence[dict[str, Any]]) -> str:
    """Returns the page with new tables."""
    marked = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.S)
    assert len(marked.findall(text)) == 1
    return marked.sub(lambda _: f"{BEGIN}\n\n{tables(runs)}\n\n{END}", text)


def main() -> None:
    PAGE.write_text(page(PAGE.read_text("utf-8"), result_files()), "utf-8")


if __name__ == "__main__":
    main()
