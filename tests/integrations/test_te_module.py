"""TransformerEngine's DotProductAttention, against plain softmax attention in fp64 that shares nothing with the library."""

from __future__ import annotations

import importlib.util
import inspect
import math
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor

from flexattn import attention_backend
from flexattn.integrations import te
from flexattn.integrations.te import context_parallel
from flexattn.integrations.te.recipe import DelayedScaling, Float8CurrentScaling, Format, recipe_of

BATCH, HEADS, DIM = 2, 4, 16
TOLERANCE = {"atol": 2e-5, "rtol": 2e-4}  # for float32: sums of some ten products of numbers about 1
LENGTHS = ((9, 5), (12, 7))  # lengths of the queries and the keys of each sequence, if a mask has padding


class Case(NamedTuple):
    """A call of the module on dense tensors; a row like the rows of TransformerEngine's tests of attention."""

    mask: str = "causal"
    fmt: str = "bshd"
    sq: int = 9
    skv: int = 9
    heads_kv: int = HEADS
    dims: tuple[int, int] = (DIM, DIM)
    window: tuple[int, int] | None = None
    diagonal: bool | None = None
    bias: str = "no_bias"
    bias_shape: str = "1hss"
    softmax: str = "vanilla"
    packed: str = ""


CASES = {
    # Masks, as in TransformerEngine's test_dpa_mask
    "no mask": Case("no_mask"),
    "causal": Case(),
    "causal, cross": Case(skv=12),
    "causal bottom right": Case("causal_bottom_right", skv=12, heads_kv=2),
    "padding": Case("padding", skv=12),
    "padding causal": Case("padding_causal", fmt="sbhd", heads_kv=2),
    "padding causal bottom right": Case("causal_padding", skv=12, window=(3, 0)),
    "causal,padding": Case("causal,padding", fmt="sbhd", skv=12),
    "arbitrary": Case("arbitrary", skv=12, fmt="sbhd"),
    # Biases, as in test_dpa_bias and test_dpa_bias_shapes
    "post scale bias": Case(bias="post_scale_bias", skv=9),
    "pre scale bias": Case("no_mask", bias="pre_scale_bias", skv=12),
    "bias bhss": Case(bias="post_scale_bias", bias_shape="bhss"),
    "bias b1ss": Case(bias="post_scale_bias", bias_shape="b1ss", fmt="sbhd"),
    "bias 11ss": Case("no_mask", bias="post_scale_bias", bias_shape="11ss"),
    "bias 111s": Case("no_mask", bias="post_scale_bias", bias_shape="111s", skv=12),
    "bias, padding": Case("padding_causal", bias="post_scale_bias", skv=12),
    # Windows, as in test_dpa_sliding_window
    "window, no mask": Case("no_mask", window=(2, 3), skv=12),
    "window, top left": Case("no_mask", window=(2, 3), skv=12, diagonal=False),
    "window, causal": Case(window=(4, 0), skv=12),
    "window, padding": Case("padding", window=(2, 1), skv=12),
    # ALiBi, as in test_dpa_alibi_slopes
    "alibi": Case(bias="alibi"),
    "alibi, bottom right": Case("causal_bottom_right", bias="alibi", skv=12, heads_kv=1),
    # Layouts, as in test_dpa_qkv_layout
    "sb3hd": Case(fmt="sbhd", packed="3hd"),
    "bsh3d": Case("no_mask", packed="h3d"),
    "sbhd_sb2hd": Case(fmt="sbhd", packed="hd_2hd", skv=12, heads_kv=2),
    "bshd_bsh2d": Case("padding", packed="hd_h2d", skv=12),
    # Sinks, as in test_dpa_softmax
    "off by one": Case("causal_bottom_right", softmax="off-by-one", skv=12),
    "learnable": Case(softmax="learnable", window=(4, 0)),
    # Different head dims, as in test_dpa_mla
    "192/128 in small": Case(dims=(24, 16)),
    "v wider than q": Case("padding_causal", dims=(16, 32), skv=12),
}


class Made(NamedTuple):
    module: te.DotProductAttention
    arguments: dict[str, Any]
    leaves: dict[str, Tensor]
    bshd: tuple[Tensor, Tensor, Tensor]  # q, k and v in the reference's form


def to_bshd(t: Tensor, fmt: str) -> Tensor:
    return t.transpose(0, 1) if fmt == "sbhd" else t


def visible(case: Case, hidden: Tensor | None) -> Tensor:
    """[b, h | 1, sq, skv]: whether a query sees a key, from the mask's definition and one loop over sequences."""
    seen = torch.zeros(BATCH, 1, case.sq, case.skv, dtype=torch.bool)
    kind = case.mask.replace(",", "_").replace("causal_padding", "padding_causal")
    for b in range(BATCH):
        nq, nkv = (LENGTHS[0][b], LENGTHS[1][b] if case.skv == 12 else LENGTHS[0][b]) if "padding" in kind else (case.sq, case.skv)
        top_left = kind in ("causal", "padding_causal") or case.diagonal is False
        shift = 0 if top_left else nkv - nq
        left, right = case.window or (-1, -1)
        for i in range(nq):
            for j in range(nkv):
                distance = j - i - shift
                in_window = (left < 0 or distance >= -left) and ((right < 0 and "causal" not in kind) or distance <= max(right, 0))
                seen[b, 0, i, j] = in_window
    return seen if hidden is None else seen & ~hidden


def reference(case: Case, made: Made, seen: Tensor) -> tuple[Tensor, list[Tensor]]:
    """(out [b, sq, h * d_v], leaves in fp64 in the order of made.leaves)."""
    leaves = {name: t.detach().double().requires_grad_() for name, t in made.leaves.items()}
    q, k, v = qkv_of(case, leaves)
    group = HEADS // case.heads_kv
    k, v = (t.repeat_interleave(group, 2) for t in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k)
    scale = q.shape[-1] ** -0.5
    if case.bias == "pre_scale_bias":
        scores = (scores + leaves["bias"]) * scale
    else:
        scores = scores * scale
    if case.bias == "post_scale_bias":
        scores = scores + leaves["bias"]
    if case.bias == "alibi":
        slopes = torch.tensor([2.0 ** (-8 * (head + 1) / HEADS) for head in range(HEADS)], dtype=torch.float64)
        shift = case.skv - case.sq if "bottom_right" in case.mask else 0
        distance = (torch.arange(case.skv)[None] - torch.arange(case.sq)[:, None] - shift).abs()
        scores = scores - slopes[None, :, None, None] * distance
    scores = scores.masked_fill(~seen, -math.inf)
    sink = leaves.get("offset", torch.zeros(HEADS, dtype=torch.float64)) if case.softmax != "vanilla" else None
    if sink is not None:
        scores = torch.cat((scores, sink[None, :, None, None].expand(BATCH, HEADS, case.sq, 1)), -1)
    weights = scores.softmax(-1).nan_to_num()
    weights = weights if sink is None else weights[..., :-1]
    return torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2), list(leaves.values())


def qkv_of(case: Case, leaves: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """q, k and v as [b, s, h, d]."""
    if case.packed in ("3hd", "h3d"):
        parts = leaves["qkv_layer"].unbind(-3 if case.packed == "3hd" else -2)
    elif case.packed:
        parts = (leaves["query_layer"], *leaves["kv_layer"].unbind(-3 if case.packed == "hd_2hd" else -2))
    else:
        parts = tuple(leaves[name] for name in ("query_layer", "key_layer", "value_layer"))
    return tuple(to_bshd(t, case.fmt) for t in parts)


def make(case: Case, dtype: torch.dtype = torch.float32) -> tuple[Made, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    def layer(length: int, *rest: int) -> Tensor:
        return normal(*((length, BATCH) if case.fmt == "sbhd" else (BATCH, length)), *rest).requires_grad_()

    d, d_v = case.dims
    leaves: dict[str, Tensor] = {}
    if case.packed in ("3hd", "h3d"):
        leaves["qkv_layer"] = layer(case.sq, *((3, HEADS, d) if case.packed == "3hd" else (HEADS, 3, d)))
    else:
        leaves["query_layer"] = layer(case.sq, HEADS, d)
        if case.packed:
            leaves["kv_layer"] = layer(case.skv, *((2, case.heads_kv, d) if case.packed == "hd_2hd" else (case.heads_kv, 2, d)))
        else:
            leaves["key_layer"], leaves["value_layer"] = layer(case.skv, case.heads_kv, d), layer(case.skv, case.heads_kv, d_v)
    arguments: dict[str, Any] = dict(leaves)
    if case.packed:
        arguments["qkv_interleave_dim"] = -3 if "hd" in case.packed[-3:] and case.packed[-3] in "23" else -2
    module = te.DotProductAttention(
        HEADS,
        d if d == d_v else (d, d_v),
        num_gqa_groups=case.heads_kv,
        qkv_format=case.fmt,
        attn_mask_type=case.mask,
        window_size=case.window,
        bottom_right_diagonal=case.diagonal,
        softmax_type=case.softmax,
    ).cpu()
    if case.softmax == "learnable":
        with torch.no_grad():
            module.softmax_offset.copy_(normal(HEADS))
        leaves["offset"] = module.softmax_offset
    if case.bias.endswith("scale_bias"):
        shape = [
            {"b": BATCH, "h": HEADS, "1": 1}.get(name, size)
            for name, size in zip(case.bias_shape, (0, 0, case.sq, case.skv), strict=True)
        ]
        leaves["bias"] = normal(*shape).requires_grad_()
        arguments |= {"core_attention_bias": leaves["bias"]}
    arguments["core_attention_bias_type"] = case.bias
    hidden = None
    if case.mask == "arbitrary":
        hidden = torch.rand(1, 1, case.sq, case.skv, generator=generator) < 0.4
        hidden[..., 2, :] = True  # a query that sees nothing
        arguments["attention_mask"] = hidden
    elif "padding" in case.mask:
        masks = [
            torch.arange(size)[None] >= torch.tensor(of)[:, None]
            for size, of in zip((case.sq, case.skv), lengths(case), strict=True)
        ]
        pair = tuple(mask[:, None, None] for mask in masks)
        arguments["attention_mask"] = pair[0] if case.sq == case.skv else pair
    return Made(module, arguments, leaves, ()), visible(case, hidden)


def lengths(case: Case) -> tuple[tuple[int, int], tuple[int, int]]:
    return LENGTHS[0], LENGTHS[1] if case.skv == 12 else LENGTHS[0]


@pytest.mark.parametrize("name", CASES)
def test_a_configuration_agrees_with_plain_attention(name: str) -> None:
    case = CASES[name]
    made, seen = make(case)
    out = made.module(**made.arguments)
    ref, leaves = reference(case, made, seen)
    assert out.shape == (*((case.sq, BATCH) if case.fmt == "sbhd" else (BATCH, case.sq)), HEADS * case.dims[1])
    torch.testing.assert_close(to_bshd(out, case.fmt).double(), ref, **TOLERANCE)
    dout = torch.randn(ref.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    out.backward(to_bshd(dout.float(), case.fmt))
    wanted = torch.autograd.grad(ref, leaves, dout)
    for leaf, (key, t) in zip(wanted, made.leaves.items(), strict=True):
        torch.testing.assert_close(t.grad.double(), leaf, **TOLERANCE, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.sample
@pytest.mark.parametrize("name", ["padding causal", "arbitrary", "bias bhss", "sb3hd", "bshd_bsh2d", "learnable", "v wider than q"])
def test_a_configuration_agrees_on_triton(name: str) -> None:
    with attention_backend("triton"):
        test_a_configuration_agrees_with_plain_attention(name)


@pytest.mark.parametrize("packed", ["", "3hd", "h3d", "hd_2hd"])
@pytest.mark.parametrize("gap", [0, 3])
def test_packed_sequences_agree_with_each_alone(packed: str, gap: int) -> None:
    """thd, with and without gaps between the sequences (TransformerEngine's test_dpa_qkv_layout_thd)."""
    counts = LENGTHS[0]
    starts = [sum(counts[:b]) + gap * b for b in range(BATCH)]
    total = sum(counts) + gap * BATCH
    cu = torch.tensor([0, counts[0], sum(counts)], dtype=torch.int32)
    padded = torch.tensor([*starts, total], dtype=torch.int32)
    shapes = {"3hd": [(3, HEADS, DIM)], "h3d": [(HEADS, 3, DIM)], "hd_2hd": [(HEADS, DIM), (2, HEADS, DIM)]}
    given = [torch.randn(total, *shape, requires_grad=True) for shape in shapes.get(packed, [(HEADS, DIM)] * 3)]
    names = {"3hd": ["qkv_layer"], "h3d": ["qkv_layer"], "hd_2hd": ["query_layer", "kv_layer"]}.get(
        packed, ["query_layer", "key_layer", "value_layer"]
    )
    module = te.DotProductAttention(HEADS, DIM, qkv_format="thd", attn_mask_type="padding_causal")
    more = {"cu_seqlens_q_padded": padded, "cu_seqlens_kv_padded": padded} if gap else {}
    layers = dict(zip(names, given, strict=True))
    lengths_of_cu = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "max_seqlen_q": max(counts), "max_seqlen_kv": max(counts)}
    out = module(**layers, **lengths_of_cu, qkv_interleave_dim=-2 if packed == "h3d" else -3, **more)
    dout = torch.randn_like(out)
    got = torch.autograd.grad(out, given, dout)
    case = Case("causal", packed=packed)
    wanted, ends = [torch.zeros_like(t, dtype=torch.float64) for t in given], []
    for start, count in zip(starts, counts, strict=True):
        part = {name: t[start : start + count].detach().double()[None].requires_grad_() for name, t in layers.items()}
        q, k, v = qkv_of(case, part)
        scores = (torch.einsum("bihd,bjhd->bhij", q, k) * DIM**-0.5).masked_fill(torch.ones(count, count).triu(1).bool(), -math.inf)
        ref = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v).flatten(2)[0]
        torch.testing.assert_close(out[start : start + count].double(), ref, **TOLERANCE)
        grads = torch.autograd.grad(ref, list(part.values()), dout[start : start + count].double())
        for t, grad in zip(wanted, grads, strict=True):
            t[start : start + count] = grad[0]
        ends.append(start + count)
    for t, ref in zip(got, wanted, strict=True):
        torch.testing.assert_close(t.double(), ref, **TOLERANCE)
    if gap:
        assert not out[ends[0] : ends[0] + gap].any(), "tokens between sequences are 0"


@pytest.mark.parametrize("interleave", [-3, -2])
def test_the_gradient_of_a_packed_tensor_is_made_without_a_copy(interleave: int) -> None:
    shape = (9, BATCH, 3, HEADS, DIM) if interleave == -3 else (9, BATCH, HEADS, 3, DIM)
    packed = torch.randn(shape, requires_grad=True)
    seen: list[int] = []

    class Stacks(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in (torch.ops.aten.stack.default, torch.ops.aten.cat.default):
                seen.append(sum(t.numel() for t in args[0]))
            return func(*args, **(kwargs or {}))

    out = te.DotProductAttention(HEADS, DIM)(qkv_layer=packed, qkv_interleave_dim=interleave)
    (gradient,) = torch.autograd.grad(out, packed, torch.ones_like(out))
    out = te.DotProductAttention(HEADS, DIM)(qkv_layer=packed, qkv_interleave_dim=interleave)
    with Stacks():
        (again,) = torch.autograd.grad(out, packed, torch.ones_like(out))
    assert gradient.shape == packed.shape
    assert torch.equal(gradient, again)
    assert packed.numel() not in seen


def test_windows_follow_the_mask() -> None:
    from flexattn.integrations.te.masks import window_of

    assert window_of("causal", None) == window_of("padding_causal", (-1, 0)) == (-1, 0)
    assert window_of("causal", (4, 0)) == (4, 0)
    assert window_of("no_mask", None) == window_of("padding", (-1, -1)) == (-1, -1)
    assert window_of("arbitrary", (2, 3)) == (2, 3)
    for mask, given, used in (("causal", (-1, -1), (-1, 0)), ("causal", (4, 2), (4, 0)), ("padding", (-1, 0), (-1, -1))):
        with pytest.warns(UserWarning, match="is used instead"):
            assert window_of(mask, given) == used
    for mask, given in (("causal", (-1, 3)), ("no_mask", (-1, 3)), ("padding", (3, -1)), ("causal", (-2, 0)), ("no_mask", 3)):
        with pytest.raises(ValueError, match="window_size is"):
            window_of(mask, given)


def test_dropout_is_drawn_in_training_alone_and_again_in_a_checkpoint() -> None:
    module = te.DotProductAttention(HEADS, DIM, attention_dropout=0.3)
    given = [torch.randn(9, BATCH, HEADS, DIM, requires_grad=True) for _ in range(3)]
    results = []
    for checkpointed in (False, True):
        torch.manual_seed(7)
        out = module(*given, checkpoint_core_attention=checkpointed)
        results.append((out, *torch.autograd.grad(out, given, torch.ones_like(out))))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(module(*given), module(*given))
    module.eval()
    assert torch.equal(module(*given), module(*given))


def test_the_seed_of_dropout_comes_from_the_tracker_of_tensor_parallelism() -> None:
    entered: list[bool] = []

    class Tracker:
        def fork(self) -> Any:
            entered.append(True)
            return torch.random.fork_rng(devices=[])

    given = [torch.randn(9, BATCH, HEADS // 2, DIM) for _ in range(3)]
    kept = {"attention_dropout": 0.3, "tp_size": 2, "get_rng_state_tracker": Tracker}
    module = te.DotProductAttention(HEADS, DIM, **kept)
    before = torch.get_rng_state()
    module(*given)
    assert entered == [True]
    assert torch.equal(before, torch.get_rng_state())
    te.DotProductAttention(HEADS, DIM, sequence_parallel=True, **kept)(*given)
    assert entered == [True]


@pytest.mark.sample
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_fp8_follows_the_autocast(recipe: str) -> None:
    kinds = {"delayed": DelayedScaling(fp8_dpa=True, amax_history_len=4), "current": Float8CurrentScaling(fp8_dpa=True)}
    module = te.DotProductAttention(HEADS, DIM)
    packed = torch.randn(17, BATCH, 3, HEADS, DIM).bfloat16().requires_grad_()
    exact = module(qkv_layer=packed)
    for step in range(3):
        with te.fp8_autocast(enabled=True, fp8_recipe=kinds[recipe]):
            out = module(qkv_layer=packed)
        out.sum().backward()
        error = (out - exact).abs().max().item()
        # E4M3 has steps of 1/8 to 1/16 of a number, and an average over some ten keys has less; 16 bits would be below 0.01.
        assert 0.01 < error < 0.3, (step, error)
    with te.fp8_autocast(enabled=True, fp8_recipe=kinds[recipe]), te.fp8_autocast(enabled=False):
        assert torch.equal(module(qkv_layer=packed), exact)
    with te.autocast(recipe=DelayedScaling()):  # attention needs fp8_dpa to be part of it
        assert torch.equal(module(qkv_layer=packed), exact)


def test_delayed_scales_are_those_of_the_step_before_and_survive_a_checkpoint() -> None:
    recipe = DelayedScaling(fp8_dpa=True, amax_history_len=4)
    module = te.DotProductAttention(HEADS, DIM)
    packed = torch.randn(17, BATCH, 3, HEADS, DIM).bfloat16().requires_grad_()
    with te.autocast(recipe=recipe):
        module(qkv_layer=packed).sum().backward()
        module(qkv_layer=packed).sum().backward()  # in one autocast the scales stay
    state = module._scaling.state
    assert state.scale("q").item() == 1.0
    amax = packed.detach()[:, :, 0].abs().max().item()
    with te.autocast(recipe=recipe):
        out = module(qkv_layer=packed)
    assert state.scale("q").item() == pytest.approx(448 / amax)
    other = te.DotProductAttention(HEADS, DIM)
    other.load_state_dict(module.state_dict())
    with torch.no_grad(), te.autocast(recipe=recipe):
        assert torch.equal(other(qkv_layer=packed), out)
    other.load_state_dict({})  # an older checkpoint has no such entry
    other.load_state_dict({"fused_attention._extra_state": torch.empty(0)})
    other.set_extra_state(None)
    with pytest.warns(RuntimeWarning, match="not flexattn's"):
        other.set_extra_state(torch.frombuffer(bytearray(b"another library's bytes"), dtype=torch.uint8))
    assert other.get_extra_state().numel() == 0


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("kind", ["reentrant", "not reentrant", "te"])
def test_a_checkpointed_layer_computes_again_in_fp8(kind: str, recipe: str) -> None:
    """Its gradients equal those without a checkpoint, though the backward runs outside of the autocast."""
    kinds = {"delayed": DelayedScaling(fp8_dpa=True, amax_history_len=4), "current": Float8CurrentScaling(fp8_dpa=True)}
    packed = torch.randn(17, BATCH, 3, HEADS, DIM).bfloat16().requires_grad_()
    gradients = []
    for checkpointed in (False, True):
        module = te.DotProductAttention(HEADS, DIM)

        def run(x: Tensor, module: te.DotProductAttention = module) -> Tensor:
            return module(qkv_layer=x)

        for _ in range(2):  # in the second step the scales of delayed scaling differ from 1
            with te.autocast(recipe=kinds[recipe]):
                if not checkpointed:
                    out = run(packed)
                elif kind == "te":
                    out = te.checkpoint(run, packed)
                else:
                    out = torch.utils.checkpoint.checkpoint(run, packed, use_reentrant=kind == "reentrant")
            (gradient,) = torch.autograd.grad(out, packed, torch.ones_like(out)) if kind == "not reentrant" else (None,)
            if gradient is None:
                packed.grad = None
                out.backward(torch.ones_like(out))
                gradient = packed.grad
        gradients.append(gradient)
    assert torch.equal(*gradients)


def test_recipes_of_transformer_engine_are_known_by_their_names() -> None:
    class Foreign:
        fp8_format = Format.E4M3
        fp8_dpa = True
        amax_history_len = 8

    named = type("DelayedScaling", (Foreign,), {})()
    assert recipe_of(named) == DelayedScaling(fp8_format=Format.E4M3, fp8_dpa=True, amax_history_len=8)
    with pytest.raises(NotImplementedError, match="MXFP8BlockScaling"):
        recipe_of(type("MXFP8BlockScaling", (Foreign,), {})())
    with pytest.raises(TypeError, match="recipe is"):
        recipe_of("delayed")
    with pytest.raises(ImportError, match="recipe MXFP8BlockScaling is not supported"):
        from flexattn.integrations.te.recipe import MXFP8BlockScaling  # noqa: F401
    own = DelayedScaling()
    own.fp8_dpa = True
    assert recipe_of(own).has_attention
    with pytest.raises(ValueError, match="fp8_format"):
        DelayedScaling(fp8_format=Format.E5M2)
    with pytest.raises(ValueError, match="amax_compute_algo"):
        DelayedScaling(amax_compute_algo="mean")


def test_fp8_output_is_a_quantised_tensor_with_merged_heads() -> None:
    module = te.DotProductAttention(HEADS, DIM)
    given = [torch.randn(17, BATCH, HEADS, DIM).bfloat16() for _ in range(3)]
    with te.autocast(recipe=Float8CurrentScaling(fp8_mha=True)):
        out = module(*given, fp8_output=True)
    assert out.data.dtype is torch.float8_e4m3fn
    assert out.data.shape == (17, BATCH, HEADS * DIM)
    exact = module(*given)
    assert 0.001 < (out.data.float() * out.descale - exact.float()).abs().max() < 0.3
    quantise = te.Float8CurrentScalingQuantizer(torch.float8_e4m3fn)
    quantised = module(*map(quantise, given), fp8_output=True)
    assert quantised.data.dtype is torch.float8_e4m3fn
    assert quantised.descale.numel() == 1
    assert (quantised.data.float() * quantised.descale - exact.float()).abs().max() < 0.3
    assert module(*map(quantise, given)).dtype is torch.bfloat16
    with pytest.raises(ValueError, match="only query_layer in FP8"):
        module(quantise(given[0]), *given[1:])
    with pytest.raises(ValueError, match="fp8_output is True outside"):
        module(*given, fp8_output=True)


PAGED: dict[str, Any] = {"is_paged": True, "total_num_pages": 5, "page_size": 4}  # so few that pages are reused


@pytest.mark.parametrize("pages", [{}, PAGED, {"is_paged": True, "total_num_pages": 3, "page_size": 16}], ids=["rows", "4", "16"])
@pytest.mark.parametrize("fmt", ["bshd", "sbhd", "thd"])
def test_a_cache_gives_what_the_whole_sequence_gives(fmt: str, pages: dict[str, Any]) -> None:
    """Prompts of different lengths, then steps; one sequence ends, another begins, and the order changes."""
    module = te.DotProductAttention(HEADS, DIM, num_gqa_groups=2, qkv_format=fmt, attn_mask_type="padding_causal", layer_number=3)
    module.eval()
    cache = te.InferenceParams(3, 16, 2, DIM, torch.float32, qkv_format=fmt, **pages)
    tokens = {name: [torch.randn(12, heads, DIM) for heads in (HEADS, 2, 2)] for name in "abc"}
    done: dict[str, int] = {}
    for step in ({"a": 5, "b": 3}, {"a": 1, "b": 1}, {"b": 2, "a": 1}, {"c": 4, "a": 1}, {"a": 1, "c": 1}):
        cache.pre_step(OrderedDict(step))
        assert cache.get_seqlens_pre_step().tolist() == [done.get(name, 0) for name in step]
        rows = [[t[done.get(name, 0) : done.get(name, 0) + new] for t in tokens[name]] for name, new in step.items()]
        longest = max(step.values())
        layers = []
        for parts in zip(*rows, strict=True):
            if fmt == "thd":
                layers.append(torch.cat(parts))
            else:
                whole = torch.full((len(step), longest, *parts[0].shape[1:]), math.nan)
                for row, part in zip(whole, parts, strict=True):
                    row[: len(part)] = part
                layers.append(whole if fmt == "bshd" else whole.transpose(0, 1))
        out = module(*layers, inference_params=cache)
        at = 0
        for i, (name, new) in enumerate(step.items()):
            total = done.get(name, 0) + new
            q, k, v = (t[:total].double() for t in tokens[name])
            k, v = (t.repeat_interleave(HEADS // 2, 1) for t in (k, v))
            scores = torch.einsum("ihd,jhd->hij", q, k) * DIM**-0.5
            scores = scores.masked_fill(torch.ones(total, total).triu(1).bool(), -math.inf)
            ref = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).flatten(1)[total - new :]
            got = out[at : at + new] if fmt == "thd" else to_bshd(out, fmt)[i, :new]
            torch.testing.assert_close(got.double(), ref, **TOLERANCE)
            at += new
            done[name] = total
        done = {name: total for name, total in done.items() if name in step}
        if pages:
            in_rows = cache.convert_paged_to_nonpaged(3)
            for i, name in enumerate(step):
                for rows_of, t in zip(in_rows, tokens[name][1:], strict=True):
                    assert torch.equal(rows_of[i, : done[name]], t[: done[name]])


def test_a_cache_says_what_it_has_no_room_for() -> None:
    cache = te.InferenceParams(2, 8, 2, DIM, torch.float32)
    with pytest.raises(ValueError, match="has 3 sequences"):
        cache.pre_step({"a": 1, "b": 1, "c": 1})
    with pytest.raises(ValueError, match="call pre_step"):
        cache.step(1, torch.zeros(0, 4, 2, DIM), torch.zeros(0, 4, 2, DIM), "bshd")
    cache.pre_step({"a": 8})
    with pytest.raises(ValueError, match="would have 9 tokens"):
        cache.pre_step({"a": 1})
    with pytest.raises(ValueError, match="new_k is"):
        cache.step(1, torch.zeros(1, 4, 2, DIM), torch.zeros(1, 4, 2, DIM), "bshd")
    with pytest.raises(ValueError, match="page_table needs pages but is_paged is False"):
        cache.page_table("cpu")
    module = te.DotProductAttention(HEADS, DIM, num_gqa_groups=2)
    with pytest.raises(ValueError, match="layer_number is None"):
        module(*(torch.zeros(1, 1, h, DIM) for h in (HEADS, 2, 2)), inference_params=cache)


def rows(cache: te.InferenceParams, names: str, layers: tuple[int, ...]) -> None:
    """Gives each named sequence one token, whose keys and values all are the letter's number, in these layers."""
    cache.pre_step(dict.fromkeys(names, 1))
    new = torch.tensor([float(ord(name)) for name in names]).view(-1, 1, 1, 1).expand(-1, 1, 2, DIM).contiguous()
    for layer in layers:
        cache.step(layer, new, new, "bshd")


def test_a_layer_may_miss_steps_in_which_sequences_join_and_leave() -> None:
    """Rows of a layer go to their sequences, even if the layer does not run the step."""
    cache = te.InferenceParams(4, 8, 2, DIM, torch.float32)
    rows(cache, "ab", (1, 2))
    rows(cache, "b", (1,))
    rows(cache, "bcd", (1,))
    rows(cache, "dcb", (1,))
    rows(cache, "cb", (1, 2))
    for layer, lengths in ((1, (3, 5)), (2, (0, 1))):
        k, _ = cache.cache[layer]
        for row, (name, length) in enumerate(zip("cb", lengths, strict=True)):
            assert (k[row, :length] == ord(name)).all()


@pytest.mark.parametrize("pages", [{}, PAGED], ids=["rows", "pages"])
def test_each_step_writes_into_the_same_memory(pages: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured graph reads the lengths and pages of the last step, and no number of its own step."""
    cache = te.InferenceParams(3, 16, 2, DIM, torch.float32, **pages)
    cache.pre_step({"a": 2, "b": 1})
    k = torch.randn(2, 2, 2, DIM)
    first = cache.step(1, k, k, "bshd")
    assert first.max_seqlen_q == 2
    with monkeypatch.context() as capture:
        capture.setattr(torch.cuda, "is_initialized", lambda: True)
        capture.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        captured = cache.step(1, k, k, "bshd")
        assert captured.max_seqlen_q == 16
        for refused in (lambda: cache.pre_step({"a": 1}), lambda: cache.step(2, k, k, "bshd")):
            with pytest.raises(RuntimeError, match="called while a CUDA graph is captured"):
                refused()
    tables = [cache.page_table("cpu")] if pages else []
    held = [captured.cu_seqlens_q, captured.cu_seqlens_kv, *tables]
    cache.pre_step({"a": 1, "b": 4})
    assert captured.cu_seqlens_q.tolist() == [0, 1, 5]
    assert captured.cu_seqlens_kv.tolist() == [0, 3, 8]
    now = cache.step(1, *torch.randn(2, 2, 4, 2, DIM), "bshd")
    tables = [cache.page_table("cpu")] if pages else []
    for before, after in zip(held, (now.cu_seqlens_q, now.cu_seqlens_kv, *tables), strict=True):
        assert before.data_ptr() == after.data_ptr()
    cache.pre_step({"b": 1})  # fewer sequences: if a captured row has no sequence, it has no tokens
    assert captured.cu_seqlens_q.tolist() == [0, 1, 1]
    assert captured.cu_seqlens_kv.tolist() == [0, 6, 6]


def test_pages_run_out_are_freed_and_are_no_others() -> None:
    cache = te.InferenceParams(3, 8, 2, DIM, torch.float32, is_paged=True, total_num_pages=3, page_size=4)
    cache.pre_step({"a": 5, "b": 1})
    before = cache.page_table("cpu").clone()  # the cache writes each step into the same memory
    assert before.dtype is torch.int32
    assert sorted([*before[0].tolist(), before[1, 0].item()]) == [0, 1, 2]
    assert before[1, 1] == 0
    with pytest.raises(ValueError, match=r"need 4 pages of 4 tokens; accepted: up to total_num_pages, 3"):
        cache.pre_step({"b": 1, "a": 1, "c": 1})
    assert cache.sequences == {"a": 5, "b": 1}
    assert torch.equal(cache.page_table("cpu"), before)
    cache.pre_step({"c": 7, "b": 1})
    after = cache.page_table("cpu")
    assert sorted(after[0].tolist()) == sorted(before[0].tolist())
    assert after[1, 0] == before[1, 0]
    cache.reset()
    cache.pre_step({"d": 8})
    assert cache.page_table("cpu").shape == (1, 2)


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"total_num_pages": 4}, TypeError, "page_size is None"),
        ({"page_size": 4}, TypeError, "total_num_pages is None"),
        ({"page_size": 3, "total_num_pages": 4}, ValueError, "max_sequence_length is 8 with page_size 3; accepted: a multiple"),
        ({"page_size": 0, "total_num_pages": 4}, ValueError, "page_size is 0"),
        (
            {"page_size": 4, "total_num_pages": 4, "custom_cache_manager": dict},
            NotImplementedError,
            "custom_cache_manager is not supported",
        ),
    ],
)
def test_pages_that_have_no_meaning(given: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        te.InferenceParams(2, 8, 2, DIM, torch.float32, is_paged=True, **given)


def test_a_paged_cache_has_no_gradient_and_no_fp8() -> None:
    given = {"attn_mask_type": "padding_causal", "qkv_format": "bshd", "layer_number": 1}
    module = te.DotProductAttention(HEADS, DIM, num_gqa_groups=2, **given)
    cache = te.InferenceParams(2, 16, 2, DIM, torch.float32, **PAGED)
    cache.pre_step({"a": 1})
    q, k, v = (torch.randn(1, 1, h, DIM) for h in (HEADS, 2, 2))
    for name, leaves in (("query_layer", (True, False)), ("value_layer", (False, True))):
        layers = q.clone().requires_grad_(leaves[0]), k, v.clone().requires_grad_(leaves[1])
        with pytest.raises(NotImplementedError, match=f"{name} requires a gradient but inference_params has is_paged=True"):
            module(*layers, inference_params=cache)
        with torch.no_grad():
            assert module(*layers, inference_params=cache).shape == (1, 1, HEADS * DIM)
    with (
        te.autocast(recipe=Float8CurrentScaling(fp8_dpa=True)),
        pytest.raises(NotImplementedError, match="is_paged=True in an autocast"),
    ):
        module(q, k, v, inference_params=cache)
    learnable = te.DotProductAttention(HEADS, DIM, num_gqa_groups=2, softmax_type="learnable", **given)
    with pytest.raises(NotImplementedError, match="softmax_offset requires a gradient"):
        learnable(q, k, v, inference_params=cache)


class Wrong(NamedTuple):
    constructor: dict[str, Any]
    call: dict[str, Any]
    error: type[Exception]
    text: str


Q = torch.zeros(3, 1, HEADS, DIM)
WRONG = {
    "mask type": Wrong({"attn_mask_type": "causal_padded"}, {}, ValueError, "attn_mask_type is 'causal_padded'"),
    "format": Wrong({"qkv_format": "hsbd"}, {}, ValueError, "qkv_format is 'hsbd'"),
    "dropout": Wrong({"attention_dropout": 1.5}, {}, ValueError, "attention_dropout is 1.5"),
    "communication": Wrong({"cp_comm_type": "tree"}, {}, ValueError, "cp_comm_type is 'tree'"),
    "groups": Wrong({"num_gqa_groups": 3}, {}, ValueError, "num_gqa_groups 3"),
    "channels": Wrong({"kv_channels": (DIM, DIM, DIM)}, {}, ValueError, "kv_channels"),
    "padding without lengths": Wrong({"attn_mask_type": "padding"}, {}, ValueError, "attention_mask"),
    "holes": Wrong(
        {"attn_mask_type": "padding"},
        {"attention_mask": torch.tensor([[[[True, False, False]]]])},
        ValueError,
        "hides tokens of the queries before visible ones",
    ),
    "a mask that is not read": Wrong(
        {"attn_mask_type": "causal"}, {"attention_mask": torch.ones(3, 3).bool()}, ValueError, "'causal' shows and does not read"
    ),
    "a mask that is not read, of another size": Wrong(
        {"attn_mask_type": "causal"}, {"attention_mask": torch.zeros(3, 4).bool()}, ValueError, "broadcasts to"
    ),
    "arbitrary without a mask": Wrong({"attn_mask_type": "arbitrary"}, {}, ValueError, "attention_mask is None"),
    "arbitrary of another size": Wrong(
        {"attn_mask_type": "arbitrary"}, {"attention_mask": torch.zeros(3, 4).bool()}, ValueError, "broadcasts to"
    ),
    "thd, causal": Wrong(
        {"qkv_format": "thd"}, dict.fromkeys(("query_layer", "key_layer", "value_layer"), Q[:, 0]), ValueError, "cu_seqlens_q and"
    ),
    "thd, causal, with a mask": Wrong(
        {"qkv_format": "thd"},
        {**dict.fromkeys(("query_layer", "key_layer", "value_layer"), Q[:, 0]), "attention_mask": torch.zeros(3, 3).bool()},
        ValueError,
        "attn_mask_type is 'causal' with thd",
    ),
    "heads": Wrong({}, {"key_layer": Q[:, :, :2]}, ValueError, "key_layer is"),
    "layers": Wrong({}, {"value_layer": None}, ValueError, "accepted: query_layer, key_layer and value_layer"),
    "interleave": Wrong(
        {},
        {**dict.fromkeys(("query_layer", "key_layer", "value_layer")), "qkv_layer": torch.zeros(3, 1, 4, HEADS, DIM)},
        ValueError,
        "with 3 in dim -3",
    ),
    "bias": Wrong({}, {"core_attention_bias": torch.zeros(1, 1, 3, 3)}, ValueError, "bias"),
    "bprop": Wrong({}, {"score_mod_bprop": lambda graph, x, tensors: x}, ValueError, "score_mod is None"),
    "pages between": Wrong(
        {"qkv_format": "thd", "attn_mask_type": "padding"},
        {
            **dict.fromkeys(("query_layer", "key_layer", "value_layer"), Q[:, 0]),
            **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), torch.tensor([0, 3], dtype=torch.int32)),
            **dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), 3),
            "pad_between_seqs": True,
        },
        ValueError,
        "pad_between_seqs is True",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_named(name: str) -> None:
    wrong = WRONG[name]
    with pytest.raises(wrong.error, match=wrong.text):
        te.DotProductAttention(**{"num_attention_heads": HEADS, "kv_channels": DIM, **wrong.constructor})(
            **{"query_layer": Q, "key_layer": Q, "value_layer": Q, **wrong.call}
        )


@pytest.mark.parametrize(
    ("mask_type", "window", "shift"), [("causal", (1, 0), 0), ("causal_bottom_right", (0, 0), 1), ("no_mask", (1, 0), 1)]
)
def test_a_mask_of_the_keys_that_type_and_window_show(mask_type: str, window: tuple[int, int], shift: int) -> None:
    module = te.DotProductAttention(HEADS, DIM, attn_mask_type=mask_type, window_size=window)
    distance = torch.arange(3) - torch.arange(2)[:, None] - shift
    hidden = (distance < -window[0]) | (distance > window[1])
    assert module(Q[1:], Q, Q, attention_mask=hidden).equal(module(Q[1:], Q, Q))
    with pytest.raises(ValueError, match="hides keys"):
        module(Q[1:], Q, Q, attention_mask=hidden | (distance == 0))


def test_a_mask_of_a_rank_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    # A rank has its own queries and keys, and Megatron gives it the mask of its queries and all keys.
    module = te.DotProductAttention(HEADS, DIM, attn_mask_type="causal")
    module._ranks = context_parallel.Ranks(dist.GroupMember.WORLD, None, "p2p", 2)  # type: ignore[arg-type]
    monkeypatch.setattr(context_parallel, "attend", lambda ranks, arguments, q, k, v: (q, None))
    assert module(Q, Q, Q, attention_mask=torch.ones(1, 1, 3, 6).bool()) is Q


def test_environment_variables_choose_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    module = te.DotProductAttention(HEADS, DIM)
    monkeypatch.setenv("NVTE_UNFUSED_ATTN", "0")
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    with pytest.raises(ValueError, match="NVTE_FUSED_ATTN and NVTE_UNFUSED_ATTN are 0"):
        module(Q, Q, Q)
    monkeypatch.setenv("NVTE_UNFUSED_ATTN", "1")
    assert module(Q, Q, Q).shape == (3, 1, HEADS * DIM)
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    assert te.DotProductAttention(HEADS, DIM).deterministic
    assert not module.deterministic


def test_max_logit_and_score_mod() -> None:
    module = te.DotProductAttention(HEADS, DIM, attn_mask_type="no_mask", return_max_logit=True, qkv_format="bshd")
    q, k, v = (torch.randn(BATCH, 9, HEADS, DIM) for _ in range(3))
    out, max_logit = module(
        q,
        k,
        v,
        score_mod=lambda graph, score, tensors: graph.mul(a=score, b=tensors["two"]),
        score_mod_tensors={"two": torch.full((1, 1, 1, 1), 2.0)},
    )
    scores = 2 * torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) * DIM**-0.5
    ref = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v.double()).flatten(2)
    torch.testing.assert_close(out.double(), ref, **TOLERANCE)
    torch.testing.assert_close(max_logit.double(), scores.amax((0, 2, 3)), **TOLERANCE)


class Attention(torch.nn.Module):
    """A layer of a typical model: projections around the module, which alone is swapped."""

    def __init__(self, core: torch.nn.Module, packed: bool, heads_kv: int = HEADS) -> None:
        super().__init__()
        width = HEADS * DIM
        self.core, self.packed, self.heads_kv = core, packed, heads_kv
        self.qkv_linear = torch.nn.Linear(width, width + 2 * heads_kv * DIM)
        self.out_linear = torch.nn.Linear(width, width)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        projected = self.qkv_linear(x)
        if self.packed:
            return self.out_linear(self.core(qkv_layer=projected.view(*x.shape[:2], 3, HEADS, DIM)))
        other = projected if memory is None else self.qkv_linear(memory)
        sizes = [HEADS * DIM, self.heads_kv * DIM, self.heads_kv * DIM]
        q, _, _ = projected.split(sizes, -1)
        _, k, v = other.split(sizes, -1)
        return self.out_linear(self.core(*(t.unflatten(-1, (-1, DIM)) for t in (q, k, v))))


@pytest.mark.parametrize("kind", ["self", "packed", "cross", "grouped"])
def test_a_layer_around_it_trains_as_with_sdpa(kind: str) -> None:
    """Like a multi-head attention layer: out and every weight's gradient, beside torch's own attention."""
    heads_kv = 2 if kind == "grouped" else HEADS
    mask = "no_mask" if kind == "cross" else "causal"
    core = te.DotProductAttention(HEADS, DIM, num_gqa_groups=heads_kv, qkv_format="bshd", attn_mask_type=mask)

    class Sdpa(torch.nn.Module):
        def forward(self, *qkv: Tensor, qkv_layer: Tensor | None = None) -> Tensor:
            q, k, v = (t.transpose(1, 2) for t in (qkv if qkv_layer is None else qkv_layer.unbind(-3)))
            sdpa = torch.nn.functional.scaled_dot_product_attention
            return sdpa(q, k, v, is_causal=mask == "causal", enable_gqa=True).transpose(1, 2).flatten(2)

    layers = [Attention(core, kind == "packed", heads_kv), Attention(Sdpa(), kind == "packed", heads_kv)]
    layers[1].load_state_dict({name: t for name, t in layers[0].state_dict().items() if "core" not in name})
    x, memory = torch.randn(BATCH, 9, HEADS * DIM), torch.randn(BATCH, 12, HEADS * DIM) if kind == "cross" else None
    outs = [layer(x, memory) for layer in layers]
    torch.testing.assert_close(*outs, **TOLERANCE)
    for out in outs:
        out.square().sum().backward()
    for a, b in zip(layers[0].parameters(), layers[1].parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, **TOLERANCE)


def test_the_page_names_every_argument() -> None:
    page = (Path(__file__).parents[2] / "docs" / "te.md").read_text()
    section = page[page.index("## DotProductAttention") : page.index("## fused_attn_fwd")]
    kinds = (te.DotProductAttention, te.DotProductAttention.forward)
    names = [name for kind in kinds for name in inspect.signature(kind).parameters if name != "self"]
    assert [name for name in names if f"`{name}`" not in section] == []


@pytest.mark.slow
def test_it_compiles_into_one_graph() -> None:
    module = te.DotProductAttention(HEADS, DIM, softmax_type="learnable")
    packed = torch.randn(9, BATCH, 3, HEADS, DIM, requires_grad=True)
    out = torch.compile(module, backend="aot_eager", fullgraph=True)(qkv_layer=packed)
    got = torch.autograd.grad(out, (packed, module.softmax_offset), torch.ones_like(out))
    plain = module(qkv_layer=packed)
    torch.testing.assert_close(out, plain)
    for a, b in zip(got, torch.autograd.grad(plain, (packed, module.softmax_offset), torch.ones_like(plain)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None or not torch.cuda.is_available(),
    reason="TransformerEngine is not installed, or there is no GPU for it",
)
@pytest.mark.parametrize("name", CASES)
def test_a_configuration_agrees_with_transformer_engine(name: str) -> None:
    import transformer_engine.pytorch as other

    case = CASES[name]
    made, _ = make(case, torch.bfloat16)
    theirs = other.DotProductAttention(
        HEADS,
        case.dims,
        num_gqa_groups=case.heads_kv,
        qkv_format=case.fmt,
        attn_mask_type=case.mask,
        window_size=case.window,
        bottom_right_diagonal=case.diagonal,
        softmax_type=case.softmax,
    )
    if case.softmax == "learnable":
        with torch.no_grad():
            theirs.softmax_offset.copy_(made.module.softmax_offset)
    results = []
    for module in (made.module.cuda(), theirs):
        arguments = torch.utils._pytree.tree_map_only(Tensor, lambda t: t.detach().cuda(), made.arguments)
        leaves = [t.requires_grad_() for t in arguments.values() if isinstance(t, Tensor) and t.is_floating_point()]
        out = module(**arguments)
        results.append((out, *torch.autograd.grad(out, leaves, torch.ones_like(out))))
    for ours, wanted in zip(*results, strict=True):
        torch.testing.assert_close(ours, wanted, atol=3e-2, rtol=3e-2)
