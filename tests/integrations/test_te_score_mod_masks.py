"""Masks in callbacks: masks by distance become bands, with the kernels of the option, if the results are equal."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flexattn import attention, explain, mods
from flexattn.dispatch import triton_backend
from flexattn.dispatch.spec import Operands
from flexattn.functional import bind_call
from flexattn.integrations.te import TEScoreMod
from flexattn.ops import Settings, spec_to_run
from flexattn.validation import FLOOR, MASKING
from tests.support import te_callbacks
from tests.support.te_callbacks import by_value

INF = math.inf
LIMIT = 2e-5  # share of the largest value: fp32 against fp64


def inputs(device: str, sq: int = 20, skv: int = 45, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, sq, 4, 16), (2, skv, 2, 16), (2, skv, 2, 16))
    return [(torch.randn(shape, generator=generator) * scale).to(device, dtype).requires_grad_() for shape in shapes]


def settings_of(mod: Any, q: Tensor, k: Tensor, v: Tensor, **call: Any) -> Any:
    return bind_call(q, k, v, score_mod=mod, **call)[1]


def reference(qkv: list[Tensor], modify: Callable[..., Tensor], offset: float | None = None) -> list[Tensor]:
    """out and gradients of out.square().sum() in fp64; modify(scores, q_idx, kv_idx); offset: a sink's."""
    q, k, v = (x.detach().double().requires_grad_() for x in qkv)
    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, 2)) * q.shape[-1] ** -0.5
    i, j = torch.arange(q.shape[1], device=q.device)[:, None], torch.arange(k.shape[1], device=q.device)[None]
    scores = modify(scores, i, j)
    if offset is not None:
        scores = torch.cat([scores, torch.full_like(scores[..., :1], offset)], -1)
    weights = scores.softmax(-1)
    weights = torch.where(weights.isnan(), 0.0, weights)[..., : k.shape[1]]
    out = torch.einsum("bhij,bjhd->bihd", weights, v.repeat_interleave(2, 2))
    return [out, *torch.autograd.grad(out.square().sum(), (q, k, v))]


def results(mod: Any, qkv: list[Tensor], **call: Any) -> list[Tensor]:
    out = attention(*qkv, score_mod=mod, **call)
    return [out, *torch.autograd.grad(out.square().sum(), qkv)]


def close(got: list[Tensor], want: list[Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        assert (a.detach().double() - b).abs().max() <= LIMIT * max(1.0, float(b.detach().abs().max()))


def selecting(visible: Callable[[Any, Any, Any], Any]) -> Callable[..., Any]:
    """A callback that keeps the scores for which `visible(graph, q_idx, kv_idx)` holds."""

    def callback(graph: Any, score: Any, tensors: Any) -> Any:
        row, column = graph.gen_index(score, axis=2), graph.gen_index(score, axis=3)
        return graph.binary_select(score, tensors["fill"], visible(graph, row, column))

    return callback


# name -> (visible scores, the band: left and right)
BANDS: dict[str, tuple[Callable[[Any, Any, Any], Any], tuple[int | None, int]]] = {
    "ge": (lambda g, i, j: g.cmp_ge(i, j), (None, 0)),
    "le, the other way round": (lambda g, i, j: g.cmp_le(j, i), (None, 0)),
    "not lt": (lambda g, i, j: g.logical_not(g.cmp_lt(i, j)), (None, 0)),
    "gt or eq": (lambda g, i, j: g.logical_or(g.cmp_gt(i, j), g.cmp_eq(i, j)), (None, 0)),
    "an offset": (lambda g, i, j: g.cmp_ge(g.add(i, 3), j), (None, 3)),
    "a difference": (lambda g, i, j: g.cmp_ge(g.sub(i, j), g.tensor_scalar(0, None)), (None, 0)),
    "a window": (lambda g, i, j: g.logical_and(g.cmp_ge(i, j), g.cmp_le(g.sub(i, j), 9)), (9, 0)),
    "not outside of a window": (
        lambda g, i, j: g.logical_not(g.logical_or(g.cmp_lt(i, j), g.cmp_gt(g.sub(i, j), 9))),
        (9, 0),
    ),
    "a distance": (lambda g, i, j: g.cmp_lt(g.abs(g.sub(i, j)), 5), (4, 4)),
}
FILLS = {
    "-1e9 by value": by_value(-1e9),
    "-inf by value": by_value(-INF),
    "rank 0": torch.tensor(-1e9),
    "-1e9": -1e9,
    "-inf": -INF,
    "least": torch.finfo(torch.float32).min,
}


@pytest.mark.sample("band", "fill", "backend")
@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("band", BANDS)
def test_a_mask_by_distance_is_a_band(band: str, fill: str, backend: str, device: str) -> None:
    visible, sides = BANDS[band]
    qkv, mod = inputs(device), TEScoreMod(selecting(visible), score_mod_tensors={"fill": FILLS[fill]})
    settings = settings_of(mod, *qkv)
    assert (settings.window_left, settings.window_right, settings.mods) == (*sides, "")
    assert settings.has_floor is (fill not in ("-inf", "-inf by value"))
    left, right = (INF if side is None else side for side in sides)
    want = reference(qkv, lambda s, i, j: s.masked_fill((i - j > left) | (j - i > right), -INF))
    close(results(mod, qkv, backend=backend), want)


def nested(graph: Any, score: Any, tensors: Any) -> Any:
    row, column = graph.gen_index(score, axis=2), graph.gen_index(score, axis=3)
    near = graph.binary_select(score, tensors["fill"], graph.cmp_le(graph.sub(row, column), 9))
    return graph.binary_select(tensors["fill"], near, graph.cmp_lt(row, column))


def test_chained_selects_are_one_band(device: str) -> None:
    settings = settings_of(TEScoreMod(nested, None, {"fill": by_value(-1e9)}), *inputs(device))
    assert (settings.window_left, settings.window_right, settings.mods) == (9, 0, "")


def test_a_mod_in_torch_is_recognised_with_a_number_too(device: str) -> None:
    for fill in (-1e9, -INF):
        settings = settings_of(lambda s, b, h, i, j, fill=fill: torch.where(i >= j, s, fill), *inputs(device))
        assert (settings.window_right, settings.mods) == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize("fill", [-1e9, -INF])
def test_a_mask_is_a_band_under_torch_compile(fill: float, device: str) -> None:
    """Dynamo's recording does not know the type of a comparison; it knows a number in the dict."""
    q, k, v = (x.detach() for x in inputs(device))
    mod, seen = TEScoreMod(selecting(BANDS["ge"][0]), None, {"fill": fill}), []

    def note(module: Any, _: Any) -> Any:
        seen.extend(node.args for node in module.graph.nodes if "attention_forward" in str(node.target))
        return module

    out = torch.compile(lambda q, k, v: attention(q, k, v, score_mod=mod), backend=note, fullgraph=True)(q, k, v)
    settings = Settings(*seen[0][len(Operands._fields) :])
    assert (settings.window_right, settings.mods, settings.has_floor) == (0, "", fill == -1e9)
    close([out], [attention(q.double(), k.double(), v.double(), attn_mask_type="causal", backend="eager")])


@pytest.mark.parametrize("number", [by_value, float])
@pytest.mark.parametrize("with_bprop", [True, False])
def test_a_causal_callback_is_the_option(with_bprop: bool, number: Any, device: str) -> None:
    """The spec is the same, so every choice, kernel and launch is the same."""
    qkv = inputs(device, 45, 45, dtype=torch.bfloat16)
    specs = []
    for call in ({"score_mod": te_callbacks.CASES["causal"].make(with_bprop, number)}, {"attn_mask_type": "causal"}):
        specs.append(spec_to_run(*bind_call(*qkv, **call)))  # type: ignore[arg-type]
        assert specs[-1].needs_grad
    assert specs[0] == specs[1]
    assert str(explain(*qkv, score_mod=te_callbacks.CASES["causal"].make(with_bprop, number))) == str(
        explain(*qkv, attn_mask_type="causal")
    )


@pytest.mark.parametrize("number", [by_value, float])
@pytest.mark.parametrize("with_bprop", [True, False])
def test_a_softcap_callback_is_the_program_of_mods_softcap(with_bprop: bool, number: Any, device: str) -> None:
    qkv = inputs(device, 45, 45)
    callback = settings_of(te_callbacks.CASES["softcap"].make(with_bprop, number), *qkv)
    assert callback.mods == settings_of(mods.softcap(te_callbacks.SOFTCAP), *qkv).mods != ""


@pytest.mark.slow
def test_a_bprop_that_is_not_the_derivative_stays(device: str) -> None:
    class Half(te_callbacks.Softcap):
        def backward(self, graph: Any, gradient: Any, tensors: Any) -> Any:
            return graph.mul(super().backward(graph, gradient, tensors), tensors["half"])

    half, tensors = Half(), {"softcap": te_callbacks.SOFTCAP, "half": 0.5}
    qkv, mod = inputs(device, 45, 45), TEScoreMod(half.forward, half.backward, tensors)
    assert '"is_given":true' in settings_of(mod, *qkv).mods
    halves, whole = (results(m, qkv, backend="triton") for m in (mod, mods.softcap(te_callbacks.SOFTCAP)))
    torch.testing.assert_close(halves[1], whole[1] / 2)


def capped_and_causal(graph: Any, score: Any, tensors: Any) -> Any:
    capped = graph.mul(tensors["cap"], graph.tanh(graph.div(score, tensors["cap"])))
    keep = graph.cmp_ge(graph.gen_index(score, 2), graph.gen_index(score, 3))
    return graph.binary_select(capped, tensors["fill"], keep)


def test_what_is_left_beside_the_band_is_computed(device: str) -> None:
    qkv = inputs(device)
    mod = TEScoreMod(capped_and_causal, None, {"cap": 1.5, "fill": -1e9})
    settings = settings_of(mod, *qkv)
    assert (settings.window_right, settings.mods) == (0, settings_of(mods.softcap(1.5), *qkv).mods)
    want = reference(qkv, lambda s, i, j: (1.5 * torch.tanh(s / 1.5)).masked_fill(i < j, -INF))
    for backend in ("eager", "triton"):
        close(results(mod, qkv, backend=backend), want)


def documents(graph: Any, score: Any, tensors: Any) -> Any:
    same = graph.cmp_eq(tensors["query_ids"], tensors["key_ids"])
    causal = graph.cmp_ge(graph.gen_index(score, 2), graph.gen_index(score, 3))
    return graph.binary_select(score, tensors["fill"], graph.logical_and(same, causal))


@pytest.mark.slow
def test_what_is_no_band_of_a_mask_stays_a_mask(device: str) -> None:
    """If the mask fills with -inf it is a mask_mod, tested for whole blocks; if with a finite number, it is computed as written."""
    qkv, ids = inputs(device, 45, 45), (torch.arange(45, device=device) // 13)
    tensors = {"query_ids": ids[:, None], "key_ids": ids[None]}
    exact, finite = (settings_of(TEScoreMod(documents, None, {**tensors, "fill": fill}), *qkv) for fill in (-INF, -1e9))
    assert (exact.window_right, exact.has_floor) == (0, False)
    assert '"mask":[' in exact.mods
    assert (finite.window_right, finite.has_floor) == (None, False)
    want = reference(qkv, lambda s, i, j: s.masked_fill((i < j) | (ids[i] != ids[j]), -INF))
    for fill in (-INF, -1e9):
        close(results(TEScoreMod(documents, None, {**tensors, "fill": fill}), qkv, backend="triton"), want)


IDS = torch.arange(45, dtype=torch.int32) // 13
# name -> (visible scores, whether every query certainly sees the key at its own position)
REST: dict[str, tuple[Callable[..., Tensor], bool]] = {
    "documents": (lambda ids, i, j: ids[i] == ids[j], True),
    "documents, causal": (lambda ids, i, j: (ids[j] == ids[i]) & (i >= j), True),
    "not another document": (lambda ids, i, j: ~(ids[i] != ids[j]), True),
    "a prefix": (lambda ids, i, j: (i >= j) | (j < 7), True),
    "a prefix in documents": (lambda ids, i, j: (ids[i] == ids[j]) & ((j < 7) | (i + 2 > j + 1)), True),
    "documents in half the places": (lambda ids, i, j: ids[i // 2] >= ids[j // 2], True),
    "a read past the end": (lambda ids, i, j: ids[i + 20] == ids[j + 20], True),
    "other documents": (lambda ids, i, j: ids[i] != ids[j], False),
    "later documents": (lambda ids, i, j: ids[i] > ids[j], False),
    "keys before": (lambda ids, i, j: (ids[i] == ids[j]) & (i > j), False),
    "the next one's document": (lambda ids, i, j: ids[i] == ids[j + 1], False),
    "documents by numbers that may be NaN": (lambda ids, i, j: ids[i] * 1.0 == ids[j] * 1.0, False),
    "a table": (lambda ids, i, j: ids[j] == 1, False),
    "one document": (lambda ids, i, j: (ids[i] == ids[j]) & (ids[j] == 1), False),
    "one of both": (lambda ids, i, j: (ids[i] == ids[j]) | (ids[j] == 1), True),
    "an exclusive or": (lambda ids, i, j: (ids[i] == ids[j]) ^ (j == 3), False),
}


@pytest.mark.sample("name", "backend")
@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("name", REST)
def test_a_finite_number_hides_where_each_query_sees_its_own_position(name: str, backend: str, device: str) -> None:
    """If such a mask is no band, it is one by block, with the check of lse; any other mask is computed as written."""
    (visible, is_shown), ids = REST[name], IDS.to(device)
    qkv = inputs(device, 45, 45)

    def masked(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.where(visible(ids, i, j), score, -1e9)

    settings = settings_of(masked, *qkv)
    assert (settings.has_floor, '"mask":[' in settings.mods) == (is_shown, is_shown)
    read = torch.cat([ids, ids.new_zeros(65)])  # past the end 0
    want = reference(qkv, lambda s, i, j: s.masked_fill(~visible(read, i, j), -1e9))
    close(results(masked, qkv, backend=backend), want)
    more_queries = settings_of(masked, *inputs(device, 46, 45))
    assert not more_queries.has_floor or more_queries.mods == ""


def test_a_low_score_under_a_mask_by_block_raises(device: str) -> None:
    q, k, v = (x.detach() for x in inputs(device, 24, 24))
    q, k, ids = torch.full_like(q, 1e5), torch.full_like(k, -1e9 / 16 / 1e5 * 4), IDS.to(device)
    with pytest.raises(ValueError, match="masks with a finite score"):
        attention(q, k, v, score_mod=lambda s, b, h, i, j: torch.where(ids[i] == ids[j], s, -1e9))


# Calls whose finite fill is no band, because a query may see only masked keys; sq, skv, the band, the other arguments.
FINITE_IS_EXACT: dict[str, tuple[int, int, str, dict[str, Any], bool]] = {
    "more keys": (20, 45, "ge", {}, True),
    "more queries": (45, 37, "ge", {}, True),
    "a window, more keys": (20, 45, "a window", {}, True),
    "a window, queries beyond the keys": (60, 20, "a window", {}, False),
    "a sink": (20, 45, "ge", {"softmax_type": "off-by-one"}, True),
    "dropout": (20, 45, "ge", {"dropout_p": 0.25}, True),
    "softcap": (20, 45, "ge", {"softcap": 2.0}, True),
    "a causal call": (20, 45, "an offset", {"attn_mask_type": "causal"}, True),
    "a window of the call": (20, 45, "ge", {"window_size": (7, 3), "bottom_right_diagonal": False}, True),
    "a window of the call that ends": (60, 20, "ge", {"window_size": (7, 3), "bottom_right_diagonal": False}, False),
    "a diagonal of the call's own": (20, 45, "ge", {"attn_mask_type": "causal_bottom_right"}, False),
    "a bias": (20, 45, "ge", {"bias_type": "post_scale_bias", "bias": torch.zeros(1, 1, 20, 45)}, False),
    "ALiBi": (20, 45, "ge", {"bias_type": "alibi"}, False),
    "padding": (45, 45, "ge", {"attn_mask_type": "padding"}, False),
    "max_logit": (20, 45, "ge", {"return_max_logit": True}, False),
    "a mask_mod": (20, 45, "ge", {"mask_mod": mods.document(torch.zeros(45, dtype=torch.int32))}, False),
}


@pytest.mark.parametrize("what", FINITE_IS_EXACT)
def test_a_finite_number_is_a_band_only_where_no_query_sees_it_alone(what: str, device: str) -> None:
    sq, skv, band, call, is_band = FINITE_IS_EXACT[what]
    qkv = inputs(device, sq, skv)
    call = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in call.items()}
    if what == "padding":
        call |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), torch.tensor([0, 45, 60], dtype=torch.int32, device=device))
    finite, exact = (
        settings_of(TEScoreMod(selecting(BANDS[band][0]), None, {"fill": fill}), *qkv, **call) for fill in (-1e9, -INF)
    )
    assert (finite.mods == "", finite.has_floor) == (is_band, is_band)
    if what not in ("a diagonal of the call's own", "ALiBi", "a mask_mod"):
        assert exact.mods == ""


@pytest.mark.slow
def test_queries_that_see_no_key(device: str) -> None:
    """With -inf the result is 0; with a finite number all keys count alike, as in softmax."""
    qkv, visible = inputs(device, 60, 20), BANDS["a window"][0]
    for fill in (-INF, -1e9):
        want = reference(qkv, lambda s, i, j, fill=fill: s.masked_fill((i < j) | (i - j > 9), fill))
        for backend in ("eager", "triton"):
            close(results(TEScoreMod(selecting(visible), None, {"fill": fill}), qkv, backend=backend), want)


def test_a_sink_beside_a_band(device: str) -> None:
    qkv, mod = inputs(device), te_callbacks.CASES["causal"].make(True, by_value)
    want = reference(qkv, lambda s, i, j: s.masked_fill(i < j, -1e9), offset=0.0)
    for backend in ("eager", "triton"):
        close(results(mod, qkv, backend=backend, softmax_type="off-by-one"), want)


def test_lse_is_the_same_and_dropout_drops_the_same(device: str) -> None:
    qkv, mod = inputs(device), te_callbacks.CASES["causal"].make(False, by_value)
    call: dict[str, Any] = {"rng_state": torch.tensor([3, 0], device=device), "dropout_p": 0.25, "return_lse": True}
    for a, b in zip(attention(*qkv, score_mod=mod, **call), attention(*qkv, attn_mask_type="causal", **call), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("fill", [MASKING, -1e9])
@pytest.mark.parametrize("kept", [True, False])
def test_scores_near_a_finite_fill_raise_and_are_never_wrong(fill: float, kept: bool, device: str) -> None:
    """Scores of -1e9 need rows of 1e5 in fp32. If there were any, masked keys would count, and the band would omit them."""
    q, k, v = (x.detach() for x in inputs(device, 24, 24))
    q, k = torch.full_like(q, 1e5), torch.full_like(k, fill / 16 / 1e5 * 4)
    q.requires_grad_(kept)
    mod = TEScoreMod(selecting(BANDS["ge"][0]), None, {"fill": fill})
    for _ in range(3):  # step by step, recorded, replayed
        with pytest.raises(ValueError, match="masks with a finite score of -1e\\+08 or less, and a query has no score above"):
            attention(q, k, v, score_mod=mod)
    k = k * (FLOOR / fill) * 0.999  # just above the floor: exact
    close(
        [attention(q, k, v, score_mod=mod)],
        [attention(q.double(), k.double(), v.double(), attn_mask_type="causal", backend="eager")],
    )


@pytest.mark.parametrize("needs_grad", [False, True])
def test_where_a_kernel_checks_it_runs_once_in_every_call(needs_grad: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []
    monkeypatch.setattr(triton_backend, "can_check_floor", lambda device: True)
    monkeypatch.setattr(triton_backend, "check_floor", lambda lse, floor, text: seen.append(lse.clone()))
    q, k, v = (x.detach().requires_grad_(needs_grad) for x in inputs(device, 30, 31))
    mod = TEScoreMod(selecting(BANDS["ge"][0]), None, {"fill": -1e9})
    for calls in range(1, 5):  # step by step, recorded, replayed
        _, lse = attention(q, k, v, score_mod=mod, backend="triton", return_lse=True)
        assert len(seen) == calls
        assert torch.equal(seen[-1], lse)
    attention(q, k, v, attn_mask_type="causal", backend="triton")
    assert len(seen) == calls


@pytest.mark.sample
@pytest.mark.parametrize("fill", [0.999 * MASKING, -65504.0, -10000.0, INF, math.nan, 0.0])
def test_any_other_number_is_computed_as_it_is(fill: float, device: str) -> None:
    qkv, mod = inputs(device), TEScoreMod(selecting(BANDS["ge"][0]), None, {"fill": by_value(fill)})
    settings = settings_of(mod, *qkv)
    assert (settings.window_right, settings.has_floor, settings.mods == "") == (None, False, False)
    if math.isfinite(fill):
        close(results(mod, qkv, backend="triton"), reference(qkv, lambda s, i, j: s.masked_fill(i < j, fill)))


def test_the_number_of_each_call_decides(device: str) -> None:
    qkv, fill = inputs(device), by_value(-1e9)
    mod = TEScoreMod(selecting(BANDS["ge"][0]), None, {"fill": fill})
    for value in (-1e9, 0.5, -INF, -2e9, 0.5):
        fill.fill_(value)
        close(results(mod, qkv), reference(qkv, lambda s, i, j, value=value: s.masked_fill(i < j, value)))


def test_a_tensor_that_may_need_a_gradient_or_lies_elsewhere_is_not_read() -> None:
    qkv, visible = inputs("cpu"), selecting(BANDS["ge"][0])
    learnt = by_value(-1e9).requires_grad_()
    assert settings_of(TEScoreMod(visible, None, {"fill": learnt}), *qkv).window_right is None
    on_meta = by_value(-1e9).to("meta")  # like a GPU, whose values cannot be read
    assert TEScoreMod(visible, None, {"fill": on_meta})._flexattn_state()["tensors"]["fill"].is_meta


def bprop(of: str) -> Callable[..., Any]:
    def callback(graph: Any, gradient: Any, tensors: Any) -> Any:
        row, column = graph.gen_index(gradient, axis=2), graph.gen_index(gradient, axis=3)
        if of == "identity":
            return gradient
        if of == "twice":
            return graph.mul(gradient, 2.0)
        if of == "constant":
            return graph.add(gradient, 0.5)
        keep = graph.cmp_ge(row, column) if of == "the same" else graph.cmp_gt(row, column)
        return graph.binary_select(gradient, 0.0, keep)

    return callback


@pytest.mark.sample
@pytest.mark.parametrize(
    ("of", "is_band", "is_empty"),
    [
        ("the same", True, True),
        ("identity", True, True),
        ("twice", True, False),
        ("another", True, False),
        ("constant", False, False),
    ],
)
def test_a_given_bprop_gives_the_same_beside_a_band(of: str, is_band: bool, is_empty: bool, device: str) -> None:
    """Hidden scores have no weight, so their gradient is 0, which a linear bprop keeps. With any other bprop the mask stays."""
    qkv, call = inputs(device), selecting(BANDS["ge"][0])
    mod = TEScoreMod(call, bprop(of), {"fill": -1e9})
    settings = settings_of(mod, *qkv)
    assert (settings.window_right == 0, settings.mods == "") == (is_band, is_empty)
    as_written = TEScoreMod(call, bprop(of), {"fill": 0.999 * MASKING})
    assert settings_of(as_written, *qkv).window_right is None
    for backend in ("eager", "triton"):
        close(results(mod, qkv, backend=backend), [x.detach().double() for x in results(as_written, qkv, backend="eager")])
