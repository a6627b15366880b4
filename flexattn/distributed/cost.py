"""Cost model: predicted milliseconds of each strategy, from the scores that a rank computes and the rows that it receives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from flexattn.distributed import slices
from flexattn.distributed.peer_memory import MOST_RANKS

STATISTICS = 4  # bytes of one lse, and of one element of a gradient in transit: both are float32
PART = 1.04  # relative cost of a backward of some queries over all keys, because fewer queries see each key
BACKWARD_WORK = 2.8  # time of a backward, in forwards, measured on two and four GPUs: 2.5 times the products, at a lower speed


class Rates(NamedTuple):
    """Speeds that predictions use. The defaults describe two and four H100s and H200s (NVLink, NCCL), causal, bf16, head dim 128.

    flops: products of a forward, in FLOP/s. call: seconds that each slice or ring step adds, because its last tiles leave
    multiprocessors idle. A backward adds more, in proportion to its products. link: bytes per second that a rank receives. latency:
    fixed seconds of a collective. memory: bytes per second of reads and writes in merges. most_bytes: limit of gathered keys on a
    rank under "auto". network: bytes per second that a rank receives from other hosts, through a card of its own (400 Gbit/s; not
    measured). near: largest number of ranks that use symmetric memory, or 0 for none. near_link, near_latency: bytes per second of
    reads from symmetric memory, and seconds of a barrier.
    """

    flops: float = 6.5e14
    call: float = 8e-5
    link: float = 2.6e11
    latency: float = 7e-5
    memory: float = 3e12
    most_bytes: float = 1.6e10
    network: float = 4.5e10
    near: int = MOST_RANKS
    near_link: float = 3.5e11
    near_latency: float = 3e-5


DEFAULT_RATES = Rates()


class Heads(NamedTuple):
    """Sizes of a call without its lengths."""

    q: int
    kv: int
    dim: int
    dim_v: int
    itemsize: int
    batch: int


class Work(NamedTuple):
    """Maxima over ranks: scores of each step, key rows received in each collective and in each step, own and attended queries.

    held: rows of keys in memory at once.
    """

    areas: tuple[float, ...]
    received: int
    per_step: int
    own_q: int
    queries: int
    held: int


class Prediction(NamedTuple):
    forward_ms: float
    backward_ms: float
    received_bytes: int  # in a forward, by the rank that receives most
    held_bytes: int  # keys and values besides the rank's own


def predict(strategy: str, work: Work, heads: Heads, ranks: int, rates: Rates) -> Prediction:
    """Returns the predicted time of a call: its computation, and the part of the transfers that computation does not overlap.

    If keys come in messages, the call waits for the first slice, and for the gradients of the last slice. Reads from symmetric
    memory do not overlap at all. A ring's keys and gradients travel during a step. A backward fetches the keys again, and sends
    their gradients in float32.
    """
    is_near = ranks <= rates.near and strategy != "ring"
    if is_near:
        rates = rates._replace(link=rates.near_link, latency=rates.near_latency)
    if strategy == "ulysses":
        return _ulysses(work, heads, ranks, rates)
    kv_row = heads.batch * heads.kv * (heads.dim + heads.dim_v) * heads.itemsize
    grad_row = heads.batch * heads.kv * (heads.dim + heads.dim_v) * STATISTICS
    per_score = 2 * heads.batch * heads.q * (heads.dim + heads.dim_v) / rates.flops
    if strategy == "ring":
        send = (rates.latency + work.per_step * kv_row / rates.link) if ranks > 1 else 0.0
        send_back = send + (rates.latency + work.per_step * grad_row / rates.link if ranks > 1 else 0.0)
        merge = 5 * work.own_q * heads.batch * heads.q * heads.dim_v * STATISTICS / rates.memory
        times = [area * per_score + rates.call for area in work.areas]
        forward = sum(max(t, send) for t in times[:-1]) + times[-1] + merge * (len(times) - 1)
        added = 3 * (work.own_q * heads.batch * heads.q * heads.dim * STATISTICS + work.per_step * grad_row) / rates.memory
        computed = [t * BACKWARD_WORK for t in times]
        backward = sum(max(t, send_back) for t in computed[:-1]) + computed[-1] + added * len(times) + send_back
        return _milliseconds(forward, backward, ((ranks - 1) * work.per_step * kv_row, work.held * kv_row))
    wait, compute = rates.latency if work.received else 0.0, work.areas[0] * per_score
    load = slices.Load(work.received * kv_row, compute * rates.flops, is_near)
    one, both = (slices.key_slices(heads.q, heads.kv, load, ends) for ends in (1, 2))
    waited = [1.0, 1.0, 1.0] if is_near else [part.kv.size / heads.kv for part in (one[0], both[0], both[-1])]
    forward = compute + len(one) * rates.call + wait + waited[0] * work.received * kv_row / rates.link
    moved = work.received * ((waited[1] * kv_row + waited[2] * grad_row) / rates.link + 3 * grad_row / rates.memory)
    part = PART if work.received else 1.0
    backward = (compute * part + len(both) * rates.call) * BACKWARD_WORK + 2 * wait + moved
    return _milliseconds(forward, backward, (work.received * kv_row, work.held * kv_row))


def _ulysses(work: Work, heads: Heads, ranks: int, rates: Rates) -> Prediction:
    """Returns the time of Ulysses: all-to-alls of q, k, v, out and as many gradients. None of them overlaps with attention."""
    kv_row = heads.batch * heads.kv * (heads.dim + heads.dim_v) * heads.itemsize
    share = (ranks - 1) / ranks
    largest = -(-heads.q // ranks) * ranks / heads.q  # heads of the busiest rank, over the mean
    own_kv = max(1.0, heads.kv / ranks) / heads.kv
    sent_q = share * work.queries / ranks * heads.batch * heads.q * (heads.dim + heads.dim_v) * heads.itemsize
    sent_kv = share * work.held * own_kv * kv_row
    wide = 1.0 if heads.kv % ranks == 0 else STATISTICS / heads.itemsize  # gradients of keys that several ranks use are float32
    compute = work.areas[0] * largest * 2 * heads.batch * heads.q * (heads.dim + heads.dim_v) / rates.flops + rates.call
    # Each element is written and read once before other ranks read it. Messages are copied once more on arrival.
    copies = 2 if ranks <= rates.near else 4
    overhead = 3 * rates.latency + copies * (sent_q + sent_kv) / share / rates.memory if ranks > 1 else 0.0
    forward = compute + overhead + (sent_q + sent_kv) / rates.link
    backward = compute * BACKWARD_WORK + overhead + (sent_q + wide * sent_kv) / rates.link
    return _milliseconds(forward, backward, (sent_q + sent_kv, work.held * own_kv * kv_row))


def between_hosts(strategy: str, ranks: int, host: int, rates: Rates) -> Rates:
    """Returns the rates of a strategy if ranks are on hosts of `host` GPUs each. On one host they are unchanged.

    An all-gather uses all network cards of a host. In a ring and in halos, one rank of each host receives from another host through
    one card, and all ranks wait for it. In an all-to-all, each rank receives data of other hosts through its own card.
    """
    if ranks <= host:
        return rates
    rates = rates._replace(near=0)
    if strategy == "gather":
        return rates._replace(link=min(rates.link, host * rates.network))
    if strategy == "ulysses":
        remote = (ranks - host) / ranks
        return rates._replace(link=1 / ((1 - remote) / rates.link + remote / rates.network))
    return rates._replace(link=rates.network)


def predict_hosts(work: Work, heads: Heads, hosts: int, host: int, rates: Rates) -> Prediction:
    """Returns the time of Ulysses inside each host, then a ring of hosts. work: one rank's, in one step.

    A rank has 1 / host of the heads of a host's tokens: as many bytes and scores as all heads of its own tokens.
    """
    own, own_kv = work.own_q, work.per_step
    inside = predict("ulysses", Work((0.0,), 0, 0, own, own * host, own_kv * host), heads, host, rates)
    steps = Work((work.areas[0] / hosts,) * hosts, own_kv, own_kv, own, own, 2 * own_kv)
    between = predict("ring", steps, heads, hosts, rates._replace(link=rates.network))
    forward, backward = inside.forward_ms + between.forward_ms, inside.backward_ms + between.backward_ms
    return Prediction(forward, backward, inside.received_bytes + between.received_bytes, between.held_bytes)


def _milliseconds(forward: float, backward: float, sizes: tuple[float, float]) -> Prediction:
    return Prediction(forward * 1e3, backward * 1e3, int(sizes[0]), int(sizes[1]))


def table(predictions: Mapping[str, Prediction | str], taken: str) -> list[str]:
    """Returns lines of text, one for each strategy."""
    lines = ["strategy      forward ms  backward ms  received MiB  held MiB"]
    for name, prediction in predictions.items():
        mark = "  <- taken" if name == taken else ""
        if isinstance(prediction, str):
            lines.append(f"{name:13} {prediction}{mark}")
        else:
            sizes = f"{prediction.received_bytes / 2**20:13.1f} {prediction.held_bytes / 2**20:9.1f}"
            lines.append(f"{name:13} {prediction.forward_ms:10.3f} {prediction.backward_ms:12.3f} {sizes}{mark}")
    return lines
