"""Cost model for many machines. `python -m flexattn.distributed.scaling` prints it, with measurements of one machine.

The example is a causal sequence with 32 heads over 8, head dim 128, bf16, forward and backward, on hosts of eight GPUs. GPUs of a
host reach each other at one rate. Each GPU has its own network card to other hosts (`cost.between_hosts`). "ulysses+ring" exchanges
heads for tokens inside a host. Every GPU then sends through its own card in a ring of hosts. Each step has eight times the work of
a flat ring, to overlap with the same bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from flexattn.distributed.cost import (
    BACKWARD_WORK,
    DEFAULT_RATES,
    Heads,
    Prediction,
    Rates,
    Work,
    between_hosts,
    predict,
    predict_hosts,
)
from flexattn.distributed.plans import plan

HOST = 8  # number of GPUs
HEADS = Heads(32, 8, 128, 128, 2, 1)
GPUS = (8, 16, 64, 256, 1024)
LENGTHS = (131072, 1048576, 10485760)
STRATEGIES = ("gather", "ring", "ulysses", "ulysses+ring")

# Milliseconds of (forward, forward and backward) by (GPUs of one host, strategy, length, window or 0), measured on H100s. They are
# from the last runs in bench/results/context_parallel_h100.json. Rings of two are from its second run, and rings of four from
# context_parallel_h200.json.
MEASURED = {
    (2, "halo", 32768, 0): (6.94, 26.77),
    (2, "ring", 32768, 0): (8.39, 30.07),
    (2, "ulysses", 32768, 0): (7.31, 28.04),
    (2, "halo", 131072, 0): (109.6, 420.5),
    (2, "ring", 131072, 0): (116.0, 430.9),
    (2, "ulysses", 131072, 0): (114.4, 412.2),
    (2, "halo", 131072, 4096): (7.36, 29.05),
    (2, "ulysses", 131072, 4096): (9.53, 31.81),
    (4, "halo", 32768, 0): (3.73, 14.56),
    (4, "ring", 32768, 0): (4.55, 15.96),
    (4, "ulysses", 32768, 0): (3.78, 13.64),
    (4, "halo", 131072, 0): (54.7, 212.4),
    (4, "ring", 131072, 0): (59.1, 219.2),
    (4, "ulysses", 131072, 0): (54.3, 203.4),
    (4, "halo", 131072, 4096): (3.79, 14.11),
    (4, "ulysses", 131072, 4096): (5.20, 16.90),
}


def efficiency(strategy: str, gpus: int, length: int, rates: Rates = DEFAULT_RATES) -> float | None:
    """Returns the fraction of a forward and backward in which GPUs compute. None if there are too few heads."""
    area, own, hosts = length * length / 2 / gpus, length // gpus, max(1, gpus // HOST)
    ideal = 2 * area * HEADS.q * (HEADS.dim + HEADS.dim_v) / rates.flops * (1 + BACKWARD_WORK) * 1e3
    if strategy == "ulysses" and gpus > HEADS.q:
        return None
    if strategy == "ulysses+ring":
        prediction = predict_hosts(Work((area,), own, own, own, own, own), HEADS, hosts, HOST, rates)
    else:
        works = {
            "gather": Work((area,), length - own, 0, own, own, length),
            "ring": Work((area / gpus,) * gpus, own, own, own, own, 2 * own),
            "ulysses": Work((area,), 0, 0, own, length, length),
        }
        prediction = predict(strategy, works[strategy], HEADS, gpus, between_hosts(strategy, gpus, HOST, rates))
    return ideal / (prediction.forward_ms + prediction.backward_ms)


def lines() -> Iterator[str]:
    """Yields the lines that the command prints."""
    yield "GPUs of one host: milliseconds predicted, and measured"
    yield f"{'':29} {'forward':>17}   {'and backward':>17}"
    for (gpus, strategy, length, window), measured in MEASURED.items():
        prediction = plan(gpus, length=length, window_size=(window or -1, 0)).predictions(HEADS)[strategy]
        assert isinstance(prediction, Prediction)
        pairs = zip((prediction.forward_ms, prediction.forward_ms + prediction.backward_ms), measured, strict=True)
        name = f"{gpus}, {strategy}, {length // 1024}k" + (f", window {window}" if window else "")
        yield f"{name:29} " + "   ".join(f"{a:8.2f} {b:8.2f}" for a, b in pairs)
    yield ""
    yield f"Hosts of {HOST} GPUs: share of forward and backward in which GPUs compute (modelled)"
    yield f"{'GPUs':>5} {'tokens':>9} {'a GPU':>8}  " + "  ".join(f"{name:>8}" for name in STRATEGIES)
    for gpus in GPUS:
        for length in LENGTHS:
            shares = [efficiency(name, gpus, length) for name in STRATEGIES]
            cells = ["-" if share is None else f"{share:.2f}" for share in shares]
            columns = "  ".join(f"{cell:>{max(8, len(name))}}" for cell, name in zip(cells, STRATEGIES, strict=True))
            yield f"{gpus:5} {length:9} {length // gpus:8}  {columns}"


if __name__ == "__main__":
    sys.stdout.write("\n".join(lines()) + "\n")
