"""score_mod and mask_mod: traced, run and differentiated on each backend, against autograd on the user's own function."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flexattn import attention
from flexattn.mods.bands import Masks
from flexattn.mods.trace import cache_info, clear_cache, trace_mods

HEADS, HEADS_KV = 4, 2


def whole(function: Callable[..., Any], sq: int, skv: int, *given: Tensor) -> Tensor:
    """The user's function itself on every (score, b, h, q_idx, kv_idx), by broadcasting: no trace, no code of flexattn."""
    b, h = torch.arange(2)[:, None, None, None], torch.arange(HEADS)[:, None, None]
    q_idx, kv_idx = torch.arange(sq)[:, None], torch.arange(skv)
    return torch.as_tensor(function(*given, b, h, q_idx, kv_idx))


def plain(q: Tensor, k: Tensor, v: Tensor, score_mod: Any = None, mask_mod: Any = None) -> Tensor:
    sq, skv = q.shape[1], k.shape[1]
    k, v = (t.repeat_interleave(HEADS // HEADS_KV, 2) for t in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    if score_mod is not None:
        scores = whole(score_mod, sq, skv, scores).to(scores.dtype).expand(scores.shape)
    if mask_mod is not None:
        scores = scores.masked_fill(~whole(mask_mod, sq, skv), -math.inf)
    weights = scores.softmax(-1).nan_to_num()  # a row that sees nothing
    return torch.einsum("bhij,bjhd->bihd", weights, v)


def make_qkv(sq: int = 37, skv: int = 45) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, length, heads, 16, generator=generator, dtype=torch.float64).requires_grad_()
        for length, heads in ((sq, HEADS), (skv, HEADS_KV), (skv, HEADS_KV))
    )
    return q, k, v


def check(score_mod: Any, mask_mod: Any = None, captured: tuple[Tensor, ...] = (), **call: Any) -> None:
    """The eager backend in fp64 against `plain`, forward and backward."""
    q, k, v = make_qkv()
    out = attention(q, k, v, score_mod=score_mod, mask_mod=mask_mod, backend="eager", **call)
    want = plain(q, k, v, score_mod, mask_mod)
    torch.testing.assert_close(out, want, rtol=1e-9, atol=1e-9)
    dout = torch.randn_like(want)
    leaves = (q, k, v, *captured)
    got = torch.autograd.grad(out, leaves, dout, allow_unused=True, materialize_grads=True)
    expected = torch.autograd.grad(want, leaves, dout, allow_unused=True, materialize_grads=True)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()


def test_captured_tensors_of_every_rank() -> None:
    cap, slopes, per_batch, table = (
        leaf().detach().abs().add(1).requires_grad_(),
        leaf(HEADS),
        leaf(2, HEADS, 40),
        leaf(3, 2, 4, 45),
    )

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        score = cap * torch.tanh(score / cap)
        score = score - slopes[h] * (q_idx - kv_idx).abs() + per_batch[b, h, q_idx] * per_batch[b, h, kv_idx % 40]
        score += table[2, b, h, kv_idx] + table.permute(3, 0, 2, 1)[kv_idx, 0, h, b]
        return score + table[1, :, 1:, 3][b, -1] + table[0].mT[..., 1, kv_idx, h] + per_batch[b, h, -40 + q_idx // 2]

    check(score_mod, captured=(cap, slopes, per_batch, table))


def test_one_index_at_a_time() -> None:
    table = leaf(2, HEADS, 40)
    results = []
    for read in (
        lambda b, h, i: table[b, h, i % 40],
        lambda b, h, i: table[b][h][i % 40],
        lambda b, h, i: table[:, h, ...][b, i % 40],
    ):
        q, k, v = make_qkv()
        out = attention(q, k, v, score_mod=lambda score, b, h, i, j: score + read(b, h, i) * j)  # noqa: B023
        results.append((out, *torch.autograd.grad(out.sum(), (q, table))))
    for other in results[1:]:
        for got, want in zip(other, results[0], strict=True):
            assert torch.equal(got, want)


def test_reads_outside_of_the_tensor_give_0() -> None:
    table = leaf(9)
    q, k, v = make_qkv()
    out = attention(q, k, v, score_mod=lambda score, b, h, i, j: score + table[j - i])
    want = plain(
        q, k, v, lambda score, b, h, i, j: score + torch.where((j - i >= -9) & (j - i < 9), table[(j - i).clamp(-9, 8)], 0.0)
    )
    torch.testing.assert_close(out, want, rtol=1e-9, atol=1e-9)
    got, expected = (torch.autograd.grad(t.square().sum(), table)[0] for t in (out, want))
    torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(
    "mod",
    [
        lambda score, b, h, q_idx, kv_idx: torch.where(q_idx >= kv_idx, score, -math.inf),
        lambda score, b, h, q_idx, kv_idx: score.masked_fill((q_idx - kv_idx).abs() > 5, -1e9),
        lambda score, b, h, q_idx, kv_idx: 1.5,
        lambda score, b, h, q_idx, kv_idx: (q_idx * kv_idx) % 7,
        lambda score, b, h, q_idx, kv_idx: torch.nn.functional.gelu(score) + torch.nn.functional.silu(score) ** 2,
        lambda score, b, h, q_idx, kv_idx: score.exp().log1p() * torch.sigmoid(score) + torch.nn.functional.softplus(score),
        lambda score, b, h, q_idx, kv_idx: score.clamp(-0.5, 0.25) + score.relu() - 2 * score.abs().sqrt(),
        lambda score, b, h, q_idx, kv_idx: score + (kv_idx - q_idx) // 3 + torch.fmod(kv_idx - q_idx, 3) * 0.5,
        lambda score, b, h, q_idx, kv_idx: score * torch.tensor(2.0) + torch.maximum(score, -score) + torch.full((), 3),
        lambda score, b, h, q_idx, kv_idx: score + (h.to(torch.float32) + 1).log2() - b.float() / 2 + (q_idx & 3) * ~(kv_idx > 3),
        lambda score, b, h, q_idx, kv_idx: torch.add(score, kv_idx, alpha=0.5) - torch.sub(b, score, alpha=2),
        lambda score, b, h, q_idx, kv_idx: torch.lerp(score, -score, 0.7),  # torch computes 1 - 0.7 as an op of constants
    ],
)
def test_pointwise_ops(mod: Any) -> None:
    check(mod)


def test_mask_and_score_together() -> None:
    documents = torch.arange(45) // 7

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (documents[q_idx] == documents[kv_idx]) & (q_idx >= kv_idx) | (h == 3)

    check(lambda score, b, h, q_idx, kv_idx: score * (h + 1), mask_mod)
    check(None, lambda b, h, q_idx, kv_idx: q_idx < 30)  # the last queries see nothing


def test_explicit_tensors() -> None:
    slopes = leaf(HEADS)

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, slopes: Any) -> Any:
        return score + slopes[h] * kv_idx

    def bound(*given: Any) -> Any:
        return score_mod(*given, slopes)

    q, k, v = make_qkv()
    want = plain(q, k, v, bound)
    for tensors in ([slopes], {"slopes": slopes}):
        out = attention(q, k, v, score_mod=score_mod, score_mod_tensors=tensors)  # type: ignore[arg-type]
        torch.testing.assert_close(out, want, rtol=1e-9, atol=1e-9)
        (got,) = torch.autograd.grad(out.sum(), slopes)
        (expected,) = torch.autograd.grad(want.sum(), slopes, retain_graph=True)
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


class Errors:
    table = torch.zeros(4, 5)


@pytest.mark.parametrize(
    ("mod", "words"),
    [
        (lambda score, b, h, q_idx, kv_idx: score if q_idx > kv_idx else -score, ["__bool__", "torch.where", "test_score_mod.py"]),
        (lambda score, b, h, q_idx, kv_idx: score + torch.rand(()), ["rand", "dropout_p", "test_score_mod.py"]),
        (lambda score, b, h, q_idx, kv_idx: score + Errors.table.exp()[h, 0], ["exp", "index the captured tensor first"]),
        (lambda score, b, h, q_idx, kv_idx: score + Errors.table.view(-1)[h], ["view", "reshape it before the call"]),
        (lambda score, b, h, q_idx, kv_idx: score + Errors.table[h], ["returns a tensor|scalars"]),
        (lambda score, b, h, q_idx, kv_idx: score + Errors.table[h, 0, 1], ["indexes a tensor of 2 dims with 3 indices"]),
        (lambda score, b, h, q_idx, kv_idx: score + Errors.table[h, q_idx * 0.5], ["indexes with a torch.float32 tensor"]),
        (lambda score, b, h, q_idx, kv_idx: (score, score), ["returned", "accepted: a 0-d tensor or a number"]),
        (lambda score, b, h, q_idx: score, ["cannot be traced", "TypeError"]),
    ],
)
def test_what_cannot_be_traced_says_why(mod: Any, words: list[str]) -> None:
    q, k, v = make_qkv()
    with pytest.raises(ValueError, match=r"score_mod") as raised:
        attention(q, k, v, score_mod=mod)
    for word in words:
        assert any(w in str(raised.value) for w in word.split("|")), str(raised.value)


def traces(run: Callable[[], Any]) -> int:
    before = cache_info()["traces"]
    run()
    return cache_info()["traces"] - before


def test_a_new_value_is_no_new_trace() -> None:
    q, k, v = make_qkv()

    def run(scale: float, slopes: Tensor, shift: int = 0) -> None:
        out = attention(q, k, v, score_mod=lambda score, b, h, q_idx, kv_idx: score * scale + slopes[h] * (kv_idx - shift))
        want = plain(q, k, v, lambda score, b, h, q_idx, kv_idx: score * scale + slopes[h] * (kv_idx - shift))
        torch.testing.assert_close(out, want, rtol=1e-7, atol=1e-7)

    clear_cache()
    texts = set()
    assert traces(lambda: run(2.0, leaf(HEADS))) == 1
    assert traces(lambda: [run(s, leaf(n).detach()) for s, n in ((3.5, 4), (-1.0, 9))]) == 1  # a tensor without a gradient
    assert traces(lambda: run(2.0, leaf(HEADS), shift=3)) == 1
    assert traces(lambda: run(2.0, leaf(HEADS), shift=3)) == 0
    for value in (1.0, 2.0):
        texts.add(trace_mods(lambda score, *_: score * value, None).program.text)  # noqa: B023
    assert len(texts) == 1


def test_redefinition_and_neighbours() -> None:
    q, k, v = make_qkv()
    results = []
    for body in ("score + 1.0 * kv_idx", "score - 1.0 * kv_idx"):
        scope: dict[str, Any] = {}
        exec(f"def mod(score, b, h, q_idx, kv_idx): return {body}", scope)
        results.append(attention(q, k, v, score_mod=scope["mod"]))
    up, down = lambda s, b, h, i, j: s + 1.0 * j, lambda s, b, h, i, j: s - 1.0 * j
    again = [attention(q, k, v, score_mod=mod) for mod in (up, down)]
    assert not torch.allclose(results[0], results[1])
    for got, want in zip(again, results, strict=True):
        torch.testing.assert_close(got, want)


def test_an_object_at_the_address_of_another() -> None:
    q, k, v = make_qkv()

    class Scaled:
        def __init__(self, factor: int, weight: float) -> None:
            self.factor, self.weight = factor, weight

        def __call__(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return self.helper(score) + self.weight * kv_idx

        def helper(self, score: Any) -> Any:
            return score * self.factor

    clear_cache()
    for factor, weight, new in ((2, 0.1, 1), (3, 0.1, 1), (2, 0.7, 0), (3, 0.0, 0)):
        mod = Scaled(factor, weight)
        assert traces(lambda: trace_mods(mod, None)) == new  # noqa: B023
        want = plain(q, k, v, lambda score, b, h, i, j: score * factor + weight * j)  # noqa: B023
        torch.testing.assert_close(attention(q, k, v, score_mod=mod), want, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(attention(q, k, v, score_mod=mod.__call__), want, rtol=1e-6, atol=1e-6)


WINDOW = 5


def test_globals_defaults_and_partials() -> None:
    q, k, v = make_qkv()

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, weight: float = 0.5, *, extra: int = 1) -> Any:
        return torch.where((q_idx - kv_idx).abs() <= WINDOW, score * weight + extra * kv_idx, -math.inf)

    for window, weight, extra in ((5, 0.5, 1), (9, 0.5, 1), (9, 0.25, 2)):
        globals()["WINDOW"] = window
        given = functools.partial(mod, weight=weight, extra=extra)
        torch.testing.assert_close(attention(q, k, v, score_mod=given), plain(q, k, v, given), rtol=1e-7, atol=1e-7)


def test_a_float_that_python_computes_with() -> None:
    q, k, v = make_qkv()
    clear_cache()
    for scale in (4.0, 9.0, 4.0):
        mod = lambda score, b, h, i, j: score / math.sqrt(scale) if scale > 5 else score * scale  # noqa: B023, E731
        torch.testing.assert_close(attention(q, k, v, score_mod=mod), plain(q, k, v, mod))
    assert cache_info()["traces"] == 2


def test_a_shape_that_the_mod_reads() -> None:
    q, k, v = make_qkv()
    clear_cache()
    for n in (3, 7, 3):
        table = leaf(n).detach()
        mod = lambda score, b, h, i, j: score + table[(j - i).clamp(0, table.shape[0] - 1)] / len(table)  # noqa: B023, E731
        torch.testing.assert_close(attention(q, k, v, score_mod=mod), plain(q, k, v, mod))
    assert cache_info()["traces"] == 2


def test_what_has_no_key_is_traced_each_time_and_says_so_once() -> None:
    q, k, v = make_qkv()
    values = iter([])
    unkeyed = {object(): 1.0}

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        assert values is not None
        return score * next(iter(unkeyed.values()))

    with pytest.warns(RuntimeWarning, match="traced again in each call"):
        out = attention(q, k, v, score_mod=mod)
    assert traces(lambda: attention(q, k, v, score_mod=mod)) == 1
    torch.testing.assert_close(out, plain(q, k, v))


def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexattn.mods.trace._CACHE_SIZE", 4)
    clear_cache()
    for n in range(9):
        trace_mods(lambda score, b, h, i, j: score + n, None)  # noqa: B023
    info = cache_info()
    assert info["traces"] == 9
    assert info["size"] == 4


BANDS = [
    (lambda b, h, i, j: i >= j, (None, 0, True)),
    (lambda b, h, i, j: j <= i, (None, 0, True)),
    (lambda b, h, i, j: (i - j <= 7) & (j - i <= 3), (7, 3, True)),
    (lambda b, h, i, j: (i - j).abs() < 5, (4, 4, True)),
    (lambda b, h, i, j: (i >= j) & (i - j < 9) & (j > i - 20), (8, 0, True)),
    (lambda b, h, i, j: i + 2 > j + 1, (None, 0, True)),
    (lambda b, h, i, j: torch.logical_and((j - i).abs() <= 5, -(i - j) <= 2), (5, 2, True)),
    (lambda b, h, i, j: (i >= j) & (h != 1), (None, 0, False)),
    (lambda b, h, i, j: i > j, (None, None, False)),  # a band begins at the diagonal
    (lambda b, h, i, j: (i >= j) | (j < 3), (None, None, False)),
    (lambda b, h, i, j: 2 * i >= j, (None, None, False)),
    (lambda b, h, i, j: j < 30, (None, None, False)),
]


@pytest.mark.sample
@pytest.mark.parametrize(("mask_mod", "band"), BANDS)
def test_a_mask_that_is_a_band_becomes_one(mask_mod: Any, band: tuple[int | None, int | None, bool]) -> None:
    score_mods = [
        None,
        lambda score, b, h, i, j: torch.where(mask_mod(b, h, i, j), score, -math.inf),
        lambda score, b, h, i, j: (score * h).masked_fill(~mask_mod(b, h, i, j), -math.inf),
    ]
    for score_mod in score_mods:
        given = None if score_mod else mask_mod
        traced = trace_mods(score_mod, given, masks=Masks.EXACT)
        assert (traced.left, traced.right, traced.program.mask is None) == band
        check(score_mod, given)
    assert trace_mods(score_mods[1], None, masks=Masks.EXACT).program.score is None
    check(score_mods[1], mask_mod)
    whole = trace_mods(score_mods[2], mask_mod)
    assert (whole.left, whole.right) == (None, None)
    assert whole.program.mask is not None


def test_an_implied_band_meets_the_one_that_is_given() -> None:
    q, k, v = make_qkv(45, 45)
    mask_mod = lambda b, h, i, j: (i - j <= 9) & (j - i <= 4)  # noqa: E731
    for given, (left, right) in (
        ({"window_size": (5, 20), "bottom_right_diagonal": False}, (5, 4)),
        ({"attn_mask_type": "causal"}, (9, 0)),
        ({"window_size": (20, 2)}, (9, 2)),  # at the bottom right, which is the same diagonal here, and the mask stays a mask
    ):
        out = attention(q, k, v, mask_mod=mask_mod, **given)  # type: ignore[arg-type]
        want = attention(q, k, v, window_size=(left, right), bottom_right_diagonal=False)
        torch.testing.assert_close(out, want, rtol=1e-9, atol=1e-9)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.1])
    q = make_qkv(37, 45)[0]
    out = attention(q, k, v, mask_mod=mask_mod, bias_type="alibi", alibi_slopes=slopes)
    # ALiBi's diagonal still is the bottom-right one
    want = plain(q, k, v, lambda score, b, h, i, j: score - slopes[h] * (j - i - 8).abs(), mask_mod)
    torch.testing.assert_close(out, want, rtol=1e-6, atol=1e-6)


class Doubled(torch.autograd.Function):
    """A function with a backward that is not its derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


def without_gradients(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, table: Any) -> Any:
    with torch.no_grad():
        turned = table.mT
        share = torch.tanh(score) * table[h, q_idx]
    return score * share + turned[kv_idx, h] * table[h, q_idx]


# Each takes a captured table after its arguments.
DETACHED: dict[str, Callable[..., Any]] = {
    "score": lambda s, b, h, i, j, t: s * s.detach() + t[h, j],
    "straight through": lambda s, b, h, i, j, t: s * t[h, i] + (torch.round(s) - s).detach(),
    "read": lambda s, b, h, i, j, t: s * t[h, j].detach() * t[h, i],
    "table": lambda s, b, h, i, j, t: s * s + s * t.detach()[h, j] * t[h, i] + t.data[0, j],
    "no_grad": without_gradients,
}


@pytest.mark.filterwarnings("ignore:score_mod .* is traced again in each call")
@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("name", list(DETACHED))
def test_no_gradient_passes_a_detached_value(name: str, backend: str) -> None:
    """First and second derivatives, and those of a compiled call."""
    dtype, near = (torch.float64, 1e-9) if backend == "eager" else (torch.float32, 2e-4)
    mod, leaves = DETACHED[name], [t.detach().requires_grad_() for t in (*make_qkv(5, 7), leaf(HEADS, 7))]

    def derivatives(attend: Any, leaves: list[Tensor], is_twice: bool = True) -> list[Tensor]:
        q, k, v, table = leaves
        out = attend(q, k, v, lambda *scalars: mod(*scalars, table))
        first = torch.autograd.grad(out.sin().sum(), leaves, create_graph=is_twice)
        second = torch.autograd.grad(sum(t.square().sum() for t in first), leaves, materialize_grads=True) if is_twice else ()
        return [out, *first, *second]

    def ours(q: Tensor, k: Tensor, v: Tensor, score_mod: Any) -> Tensor:
        return attention(q, k, v, score_mod=score_mod, backend=backend)

    want = derivatives(plain, leaves)
    cast = [t.detach().to(dtype).requires_grad_() for t in leaves]
    torch.compiler.reset()
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    for found in (derivatives(ours, cast), derivatives(compiled, cast, is_twice=False)):
        for a, b in zip(found, want, strict=False):
            torch.testing.assert_close(a.double(), b, rtol=near, atol=near * float(b.detach().abs().max().clamp(min=1)))


@pytest.mark.filterwarnings("ignore:score_mod .* is traced again in each call")
def test_a_function_with_a_backward_of_its_own_is_refused() -> None:
    q, k, v = make_qkv()

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return Doubled.apply(score)

    with pytest.raises(ValueError, match=r"score_mod calls a torch.autograd.Function at .*accepted: torch ops"):
        attention(q, k, v, score_mod=mod)
    mod.score_mod_gradient = lambda dscore, score, b, h, q_idx, kv_idx: 2 * dscore  # type: ignore[attr-defined]
    want = plain(q, k, v, lambda score, *_: Doubled.apply(score))
    found, expected = (torch.autograd.grad(out.sin().sum(), q)[0] for out in (attention(q, k, v, score_mod=mod), want))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore:score_mod .* is traced again in each call")
@pytest.mark.parametrize("view", ["reshape", "expand_as", "detach"])
def test_a_change_of_a_view_in_place_is_refused(view: str) -> None:
    def mod(score: Any, *_: Any) -> Any:
        scaled = score * 1.0
        given = {"reshape": (scaled.shape,), "expand_as": (scaled,), "detach": ()}[view]
        other = getattr(scaled, view)(*given)
        other *= 2
        return scaled

    with pytest.raises(ValueError, match=r"score_mod changes a tensor in place that it has a view of at .*`other \*= 2`; accepted"):
        attention(*make_qkv(), score_mod=mod)


@pytest.mark.filterwarnings("ignore:score_mod .* is traced again in each call")
def test_a_tensor_without_views_may_change_in_place() -> None:
    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        changed = score * 2
        changed += 0.5 * kv_idx
        with torch.no_grad():
            share = torch.tanh(score)
            share += 1
        return changed * share

    check(mod)
