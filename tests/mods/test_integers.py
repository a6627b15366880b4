"""Integers in mods: they wrap as torch's do, no read leaves a tensor or a slice, and no name of a capture meets a generated one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flexattn import attention
from flexattn.mod_values import INT64, bounds_of
from flexattn.mods.bands import implied_band
from flexattn.mods.trace import trace_mods

LENGTH, HEADS, DIM = 40, 2, 16
HASH = 6364136223846793005  # multiplier of a linear congruential generator: the products leave int64
EXTREMES = [2**62, -(2**63), 3, 2**63 - 1, -7] * (LENGTH // 5)

# Conditions of (i, j, x), with x holding EXTREMES; torch's results on whole tensors define them.
CONDITIONS: dict[str, Any] = {
    "hash": lambda i, j, x: (i * HASH + j * 40503) % 10 < 3,
    "hash, divided": lambda i, j, x: (i * HASH + j * 1442695040888963407) // 3 % 7 < 3,
    "hash, bits": lambda i, j, x: ((i * HASH) ^ (j * 40503)) & 255 < 90,
    "chain of products": lambda i, j, x: i * 1000003 * 1000003 * 1000003 * 1000003 + j > 5,
    "negated": lambda i, j, x: -x[i] < j,
    "absolute": lambda i, j, x: x[i].abs() < j,
    "doubled": lambda i, j, x: x[i] + x[i] <= j,
    "remainder of a hash by a negative": lambda i, j, x: (i * HASH + j) % -7 < -3,
    "remainder of what was read": lambda i, j, x: x[i] % 7 < j % 5,
    "quotient toward zero": lambda i, j, x: torch.div(x[i] + j, 3, rounding_mode="trunc") % 5 < 2,
    "difference past int64": lambda i, j, x: i + (2**63 - 1) >= j,
    "int32": lambda i, j, x: (i.to(torch.int32) * 50000017 * (j.to(torch.int32) + 1)) % 5 < 2,
    "int8": lambda i, j, x: (i * 37).to(torch.int8) < j,
    "uint8": lambda i, j, x: (i * 37).to(torch.uint8) - j.to(torch.uint8) < 100,
    "read in int32": lambda i, j, x: x[i].to(torch.int32) * 3 <= j,
    "numbers past int32": lambda i, j, x: (i < 3000000000) & (j > -5000000000) & (i.clamp(min=-5000000000, max=6000000000) > j),
    "sum of booleans": lambda i, j, x: (i <= 3) + (j <= i),
}


def visible(mask_mod: Any, backend: str, device: str) -> Tensor:
    """[sq, skv]: the keys that a call sees, from its softmax weights."""
    q, k = (torch.zeros(1, LENGTH, 1, DIM, device=device) for _ in "qk")
    v = torch.eye(LENGTH, device=device).view(1, LENGTH, 1, LENGTH)
    return attention(q, k, v, mask_mod=mask_mod, backend=backend)[0, :, 0] > 0


@pytest.mark.sample("name", "backend")
@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("name", CONDITIONS)
def test_conditions_mean_what_torch_says(name: str, backend: str, device: str) -> None:
    x = torch.tensor(EXTREMES, device=device)
    condition = CONDITIONS[name]
    i, j = torch.arange(LENGTH, device=device)[:, None], torch.arange(LENGTH, device=device)[None, :]
    expected = condition(i.expand(LENGTH, LENGTH), j.expand(LENGTH, LENGTH), x).bool()
    assert 0 < expected.sum() < LENGTH**2 or name == "difference past int64"
    assert torch.equal(visible(lambda b, h, i, j: condition(i, j, x), backend, device), expected)


def test_what_may_wrap_is_no_band() -> None:
    for number in (2**63 - 1, -(2**63), 2**40):
        mask = trace_mods(None, lambda b, h, i, j: i + number >= j).program.mask  # noqa: B023
        assert mask is not None
        assert implied_band(mask)[:2] == (None, None)


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(
    st.sampled_from(
        ["add", "sub", "mul", "remainder", "floor_divide", "fmod", "neg", "abs", "bitwise_and", "bitwise_xor", "maximum"]
    ),
    st.lists(st.lists(st.integers(*INT64) | st.integers(-9, 9), min_size=2, max_size=2), min_size=2, max_size=2),
    st.data(),
)
def test_bounds_hold(op: str, ranges: list[list[int]], data: Any) -> None:
    ranges = [sorted(ends) for ends in ranges]
    x, y = (data.draw(st.integers(*ends)) for ends in ranges)
    if (op in ("remainder", "floor_divide", "fmod") and y in (0, -1)) or (op == "floor_divide" and x == INT64[0]):
        return  # no result, or one that CPUs trap on
    operands = [torch.tensor(n) for n in (x, y)][: 1 if op in ("neg", "abs") else 2]
    found = int(getattr(torch, op)(*operands))
    low, high = bounds_of(op, [(ends[0], ends[1]) for ends in ranges[: len(operands)]])
    assert low <= found <= high


READS: dict[str, Any] = {
    "hash": lambda t: lambda s, b, h, i, j: s + t[(i * HASH + j) % 8],
    "negative remainder": lambda t: lambda s, b, h, i, j: s + t[(i * HASH + j).fmod(8)],
    "float to 8 bits": lambda t: lambda s, b, h, i, j: s + t[(s * 1000).to(torch.uint8).to(torch.int64)],
    "float to 64 bits": lambda t: lambda s, b, h, i, j: s + t[(s * 1000).to(torch.int64)],
    "by a number that may be 0": lambda t: lambda s, b, h, i, j: s + t[j % (i + 1)],
}


@pytest.mark.parametrize("name", READS)
def test_reads_stay_inside(name: str, device: str) -> None:
    # a tensor between others, whose values would show; scores are integers, so that both backends read at the same place
    memory = torch.full((600,), 1e6, device=device)
    t = memory[300:308]
    t.copy_(torch.randn(8))
    q = torch.randint(-3, 4, (1, LENGTH, HEADS, DIM), device=device).float()
    ours, theirs = (
        attention(q, q, q, score_mod=READS[name](t), softmax_scale=0.5, backend=backend) for backend in ("triton", "eager")
    )
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


SLICES: dict[str, tuple[Any, Any]] = {
    # a slice, and the indices of the full tensor, 8, by the slice's; -1: outside
    "first": (lambda t: t[:4], [0, 1, 2, 3]),
    "last": (lambda t: t[-3:], [5, 6, 7]),
    "every other": (lambda t: t[1:7:2], [1, 3, 5]),
    "of a slice": (lambda t: t[2:][1:3], [3, 4]),
    "of every other": (lambda t: t[1::2][1:3], [3, 5]),
    "none": (lambda t: t[5:5], []),
    "all": (lambda t: t[:], list(range(8))),
    "past the end": (lambda t: t[6:100], [6, 7]),
}


@pytest.mark.sample("name", "backend")
@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("name", SLICES)
def test_slices_end_where_they_end(name: str, backend: str, device: str) -> None:
    t = torch.arange(1, 9, device=device)
    shown, places = SLICES[name]
    seen = visible(lambda b, h, i, j: shown(t)[i - 15] == j, backend, device)
    expected = torch.zeros(LENGTH, LENGTH, dtype=torch.bool, device=device)
    for i in range(LENGTH):
        at = i - 15 + (len(places) if i < 15 else 0)
        expected[i, int(t[places[at]]) if 0 <= at < len(places) else 0] = True
    assert torch.equal(seen, expected)


def test_a_number_outside_of_a_slice_is_refused(device: str) -> None:
    t = torch.randn(8, device=device)
    q = torch.randn(1, 5, HEADS, DIM, device=device)
    with pytest.raises(ValueError, match=r"index within the slice of 4 entries instead of 6"):
        attention(q, q, q, score_mod=lambda s, b, h, i, j: s + t[:4][6])


def test_gradient_of_a_slice(device: str) -> None:
    q = torch.randn(1, LENGTH, HEADS, DIM, device=device)
    tables = [torch.linspace(-1, 1, 8, device=device).requires_grad_() for _ in range(2)]
    for t, backend in zip(tables, ("triton", "eager"), strict=True):
        attention(q, q, q, score_mod=lambda s, b, h, i, j: s + t[1:4][i - j], backend=backend).square().sum().backward()  # noqa: B023
    torch.testing.assert_close(tables[0].grad, tables[1].grad)
    assert tables[0].grad is not None
    assert tables[0].grad.nonzero().flatten().tolist() == [1, 2, 3]


NAMES = [
    "sums",
    "scales",
    "MODE",
    "captures",
    "tl",
    "mod_math",
    "distance",
    "keys0",
    "queries0",
    "float",
    "x0_low",
    "gradient0_at0",
]


@pytest.mark.sample
@pytest.mark.parametrize("name", [*NAMES, "t_size0", "t_stride0", "t_value", "t_at0", "t_value_at0", "where", "score_mod"])
def test_names_of_captures(name: str, device: str) -> None:
    """A learnable capture of any name, next to one called t."""

    def run(backend: str) -> list[Tensor]:
        gen = torch.Generator().manual_seed(0)
        q = torch.randn(1, LENGTH, HEADS, DIM, generator=gen).to(device).requires_grad_()
        t, other = (torch.randn(HEADS, 60, generator=gen).to(device).requires_grad_() for _ in range(2))
        source = f"lambda t, {name}: lambda s, b, h, i, j: torch.where(i >= j - 9, s + t[h, i - j] * {name}[h, i - j + 20], s)"
        out = attention(q, q, q, score_mod=eval(source)(t, other), backend=backend)
        out.square().sum().backward()
        return [out, *(x.grad for x in (q, t, other) if x.grad is not None)]

    for ours, theirs in zip(run("triton"), run("eager"), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)
