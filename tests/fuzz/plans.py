"""Random calls of attention over ranks, on plans with masks, against the oracle: `python -m tests.fuzz.plans --seconds 60`.

Processes of gloo on a CPU are the ranks. Masks come with the plan, with the call, by `Plan.masked`, or with both after pickling.
`--only SEED` repeats a call.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pickle
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flexattn import distributed
from flexattn.distributed.plans import Plan
from tests.fuzz.oracle import Problem, Side, exact
from tests.support import context_parallel_calls as calls

WITHIN = 1e-5  # of fp64; the sines of a score_mod are float32
MASKS_COME = ("with the plan", "with the call", "with the plan, by masked", "with both, after pickling")


def drawn(seed: int) -> tuple[calls.Problem, str, str, str]:
    """Returns a problem, a layout, a way, and how its mask comes."""
    rng, problem = random.Random(f"{seed} of plans"), calls.draw_problem(seed)
    if "other" in problem.blocks:  # lists that differ from the mask
        problem = calls.dataclasses.replace(problem, blocks=problem.blocks.split()[0])
    return problem, rng.choice(calls.LAYOUTS), rng.choice(calls.WAYS), rng.choice(MASKS_COME)


def features(problem: calls.Problem, layout: str, way: str, comes: str) -> list[str]:
    return [
        f"layout: {layout}",
        f"strategy: {way}",
        f"mask comes: {comes}",
        f"mask: {problem.mask}",
        f"window: {'none' if tuple(problem.window) == (-1, -1) else 'some'}",
        f"block mask: {problem.blocks or 'none'}",
        f"tokens: {'packed' if problem.batch is None else problem.qkv_format or 'bshd'}",
        f"score_mod: {problem.score or 'none'}",
        f"mask_mod: {problem.sees or 'none'}",
        f"softmax: {problem.options.get('softmax_type', 'vanilla')}",
        f"bias: {problem.options.get('bias_type', 'no_bias')}",
        f"dropout: {'dropout' if 'dropout_p' in problem.options else 'none'}",
    ]


def expected(problem: calls.Problem, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the oracle's results for the whole, with the gradients of the losses of `calls.results`."""
    sides = []
    for lengths in zip(*problem.lengths, strict=True):
        if problem.batch is None:
            sides.append(Side("thd", [sum(lengths[:n]) for n in range(len(lengths))], lengths))
        else:
            rows = [lengths[0] * n for n in range(problem.batch)]
            sides.append(Side(problem.qkv_format or "bshd", rows, lengths * problem.batch))
    score, blocks = calls.SCORE_MODS.get(problem.score), calls.BLOCK_MODS.get(problem.blocks.split(" ")[0])
    sees = blocks or calls.MASK_MODS.get(problem.sees)
    options = problem.options
    state = options.get("rng_state")
    is_by_table = problem.score == "table"
    whole = Problem(
        q=sides[0],
        kv=sides[1],
        mask_type="" if problem.mask == "no_mask" else problem.mask,
        window=(None if problem.window[0] == -1 else problem.window[0], None if problem.window[1] == -1 else problem.window[1]),
        bottom_right_diagonal=None,
        bias_type=options.get("bias_type", "no_bias"),
        softmax_type=options.get("softmax_type", "vanilla"),
        scale=options.get("softmax_scale") or problem.dims[0] ** -0.5,
        softcap=options.get("softcap", 0.0),
        dropout_p=options.get("dropout_p", 0.0),
        rng_state=(0, 0) if state is None else (int(state[0]), int(state[1])),
        score_mod=None if score is None else (lambda t: lambda *at: score(*at, *([t["table"]] if is_by_table else []))),
        mask_mod=None if sees is None else (lambda t: sees),
        is_extreme=False,
    )
    wanted = [name for name in given if name != "alibi_slopes"]
    ref = exact(whole, given, None, None, [])
    dlse = torch.where(ref.lse.isfinite(), -ref.lse.sin(), 0.0)
    ref = exact(whole, given, ref.out.cos(), dlse, wanted)
    found = {"out": ref.out, "lse": ref.lse, "max_logit": ref.max_logit}
    return found | {f"d{name}": ref.gradients[name] for name in wanted}


def plan_and_arguments(problem: calls.Problem, layout: str, comes: str) -> tuple[Plan, dict[str, Any]]:
    """Returns a plan, and the arguments of a call that give it the mask too."""
    mask = {"attn_mask_type": problem.mask, "window_size": problem.window}
    blocks = calls.block_mask_of(problem)
    mask |= {} if blocks is None else {"block_mask": blocks}
    plan = calls.plan_of(problem, layout)
    if comes == "with the plan":
        return plan, {}
    if comes == "with both, after pickling":
        return pickle.loads(pickle.dumps(plan)).on(dist.group.WORLD), mask
    sizes = {name: value for name, value in problem.plan_arguments.items() if name in ("documents", "length")}
    bare = calls.dataclasses.replace(plan, mask=distributed.plan(dist.group.WORLD, **sizes, attn_mask_type="no_mask").mask)
    return (bare.masked(**mask), {}) if comes == "with the plan, by masked" else (bare, mask)


def check(seed: int) -> list[str]:
    """Returns the defects of this rank's part of a call."""
    problem, layout, way, comes = drawn(seed)
    given = calls.tensors_of(problem, torch.float64)
    plan, mask = plan_and_arguments(problem, layout, comes)
    right = distributed.attention
    try:
        distributed.attention = lambda *qkv, **options: right(*qkv, **options, **mask)
        got = calls.results(problem, given, torch.float64, plan, calls.way_of(way))
    finally:
        distributed.attention = right
    wanted = calls.part_of(problem, expected(problem, given), plan)
    wrong = []
    for name, t in got.items():
        error = torch.where(t == wanted[name], 0.0, (t - wanted[name]).abs())
        if error.numel() and not float(error.max()) <= WITHIN:
            wrong.append(f"{name} on rank {plan.rank}: {float(error.max()):.3e}, at most {WITHIN:.0e}")
    return wrong


def run_rank(options: argparse.Namespace) -> None:
    """Makes calls until rank 0 announces the end of the time. Rank 0 writes the findings of all ranks."""
    torch.set_num_threads(1)
    more = {"init_method": f"file://{options.rendezvous}", "rank": options.rank, "world_size": options.ranks}
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60), **more)
    end, seed = time.monotonic() + options.seconds, options.seed * 10**6
    seeds: Sequence[int] = [options.only] if options.only is not None else range(seed, seed + 10**6)
    for own in seeds:
        goes_on = torch.tensor(int(time.monotonic() < end))
        dist.broadcast(goes_on, 0)
        if not goes_on:
            break
        try:
            wrong = check(own)
        except Exception:
            wrong = traceback.format_exc().splitlines()[-8:]
        found: list[Any] = [None] * options.ranks
        dist.all_gather_object(found, wrong)
        if options.rank == 0:
            line = {"name": str(own), "has": features(*drawn(own)), "wrong": [text for texts in found for text in texts]}
            with open(options.out, "a") as log:
                log.write(json.dumps(line) + "\n")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # as in tests/support/context_parallel_cases.py


def run(seconds: float, seed: int, ranks: int, only: int | None = None) -> list[dict[str, Any]]:
    """Returns the lines that rank 0 wrote of all calls."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "plans.jsonl"
        out.touch()
        command = [sys.executable, "-m", "tests.fuzz.plans", "--seconds", str(seconds), "--seed", str(seed), "--ranks", str(ranks)]
        command += ["--out", str(out), "--rendezvous", str(Path(folder) / "rendezvous")]
        command += [] if only is None else ["--only", str(only)]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        processes = [subprocess.Popen([*command, "--rank", str(rank)], env=environment) for rank in range(ranks)]
        statuses = [process.wait() for process in processes]
        lines = [json.loads(line) for line in out.read_text().splitlines()]
    return lines if not any(statuses) else [*lines, {"name": "ranks", "has": [], "wrong": [f"ended with {statuses}"]}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0, help="the first call is that of seed * 10**6")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", type=int, help="one call, as a failure names it")
    parser.add_argument("--out", help="where a line of JSON is written for each call")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rendezvous", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        run_rank(options)
    lines = run(options.seconds, options.seed, options.ranks, options.only)
    if options.out:
        Path(options.out).write_text("".join(json.dumps(line) + "\n" for line in lines))
    wrong = [line for line in lines if line["wrong"]]
    for line in wrong[:20]:
        sys.stdout.write(f"python -m tests.fuzz.plans --ranks {options.ranks} --only {line['name']}: {line['wrong'][:8]}\n")
    sys.stdout.write(f"{len(lines)} calls, {len(wrong)} wrong\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
