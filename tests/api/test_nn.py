"""flexattn.nn in float64: MultiheadAttention compared with torch.nn's, with all gradients, and Attention with its formula."""

from __future__ import annotations

import copy
import inspect
import itertools
import math
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flexattn
from flexattn import warn
from flexattn.nn import Attention, MultiheadAttention
from tests.support.marked import marked

E, HEADS, N, L, S = 16, 4, 3, 5, 7
DOUBLE = {"dtype": torch.float64}
SAME = {"rtol": 1e-11, "atol": 1e-11}
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False, "batch_first": True},
    "kdim and vdim": {"kdim": 6, "vdim": 10},
    "bias_kv": {"add_bias_kv": True},
    "zero_attn": {"add_zero_attn": True, "batch_first": True},
    "all": {"kdim": 6, "vdim": 10, "add_bias_kv": True, "add_zero_attn": True, "batch_first": True},
}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), **DOUBLE)


def coins(*shape: int) -> Tensor:
    """True for a third, and never for a whole row."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(7)) < 0.33
    mask[..., 0] = False
    return mask


KEY_PADDING = {
    "none": lambda: None,
    "bool": lambda: coins(N, S),
    "float": lambda: random(N, S, seed=8),
    "-inf": lambda: torch.zeros(N, S, **DOUBLE).masked_fill(coins(N, S), -math.inf),
}
ATTN_MASKS = {
    "none": lambda: None,
    "bool 2-d": lambda: coins(L, S),
    "bool 3-d": lambda: coins(N * HEADS, L, S),
    "float 2-d": lambda: random(L, S, seed=9).requires_grad_(),
    "float 3-d": lambda: random(N * HEADS, L, S, seed=9).requires_grad_(),
    "-inf": lambda: torch.zeros(L, S, **DOUBLE).masked_fill(coins(L, S), -math.inf),
}


def pair(**options: Any) -> tuple[nn.MultiheadAttention, MultiheadAttention]:
    """Returns torch's layer and ours, with the same parameters, biases among them that are not 0."""
    theirs, ours = (kind(E, HEADS, **DOUBLE, **options) for kind in (nn.MultiheadAttention, MultiheadAttention))
    with torch.no_grad():
        for i, parameter in enumerate(theirs.parameters()):
            parameter.copy_(random(*parameter.shape, seed=i) / 3)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def inputs_of(layer: nn.MultiheadAttention, shared: str = "") -> list[Tensor]:
    """Returns query, key and value. shared: "kv" if key and value are one tensor, "qkv" if all three are."""
    widths = (layer.embed_dim, layer.kdim, layer.vdim)
    made = [
        random(*((N, tokens) if layer.batch_first else (tokens, N)), width, seed=i)
        for i, (tokens, width) in enumerate(zip((S if shared == "qkv" else L, S, S), widths, strict=True))
    ]
    made = [x.requires_grad_() for x in made]
    return {"": made, "kv": [made[0], made[1], made[1]], "qkv": [made[0]] * 3}[shared]


def check(layers: tuple[nn.MultiheadAttention, nn.MultiheadAttention], inputs: list[Tensor], **named: Any) -> None:
    """Compares out and the gradients of inputs, parameters and masks."""
    leaves = [*dict.fromkeys(inputs), *(t for t in named.values() if isinstance(t, Tensor) and t.requires_grad)]
    results = []
    for layer in layers:
        out, weights = layer(*inputs, need_weights=False, **named)
        assert weights is None
        gradients = torch.autograd.grad(out, [*leaves, *layer.parameters()], random(*out.shape, seed=3))
        results.append((out, *gradients))
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, **SAME)


@pytest.mark.sample("layer")
@pytest.mark.filterwarnings("ignore:Support for mismatched")  # torch's, for a bool and a floating point mask together
@pytest.mark.parametrize("padding", KEY_PADDING)
@pytest.mark.parametrize("layer", LAYERS)
def test_multihead_attention_is_torchs(layer: str, padding: str) -> None:
    layers = pair(**LAYERS[layer])
    for make in ATTN_MASKS.values():
        check(layers, inputs_of(layers[0]), key_padding_mask=KEY_PADDING[padding](), attn_mask=make())


@pytest.mark.parametrize(("shared", "batch_first"), [*itertools.product(("kv", "qkv"), (False, True))])
def test_shared_inputs_are_projected_together(shared: str, batch_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for bias in (False, True):
        layers = pair(batch_first=batch_first, bias=bias)
        inputs = inputs_of(layers[0], shared)
        check(layers, inputs)
    products = []
    linear = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *given: products.append(given) or linear(*given))
    layers[1](*inputs, need_weights=False)
    assert len(products) == {"kv": 3, "qkv": 2}[shared]  # the result's among them


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.filterwarnings("ignore:need_weights is True")
def test_causal_hint_is_the_causal_mask(layer: str) -> None:
    layers = pair(**LAYERS[layer])
    inputs = inputs_of(layers[0])
    mask = torch.ones(L, S, dtype=torch.bool).triu(1)
    given = {"attn_mask": mask, "need_weights": False}
    want = layers[0](*inputs, **given)[0]
    padding = coins(N, S)
    for got in (
        layers[1](*inputs, **given, is_causal=True)[0],
        layers[1](*inputs, need_weights=False, is_causal=True)[0],
        layers[1](*inputs, is_causal=True)[0],
    ):
        torch.testing.assert_close(got, want, **SAME)
    torch.testing.assert_close(
        layers[1](*inputs, **given, is_causal=True, key_padding_mask=padding)[0],
        layers[0](*inputs, **given, key_padding_mask=padding)[0],
        **SAME,
    )


def test_a_learned_mask_is_read_whatever_the_causal_hint_says() -> None:
    layers = pair()
    inputs = inputs_of(layers[0])
    mask = random(L, S, seed=5).masked_fill(torch.ones(L, S, dtype=torch.bool).triu(1), -torch.inf).requires_grad_()
    out, want = (layer(*inputs, attn_mask=mask, need_weights=False, is_causal=layer is layers[1])[0] for layer in reversed(layers))
    torch.testing.assert_close(out, want, **SAME)
    got, expected = (torch.autograd.grad(t.sum(), mask)[0] for t in (out, want))
    torch.testing.assert_close(got, expected, **SAME)


@pytest.mark.parametrize("layer", ["plain", "all"])
def test_without_a_batch(layer: str) -> None:
    layers = pair(**LAYERS[layer])
    inputs = [x[0] if layers[0].batch_first else x[:, 0] for x in inputs_of(layers[0])]
    for padding, mask in ((None, None), (coins(S), coins(L, S)), (random(S), random(HEADS, L, S))):
        check(layers, inputs, key_padding_mask=padding, attn_mask=mask)


@pytest.mark.parametrize("average", [False, True])
def test_weights_are_torchs(average: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warn, "_warned", set())
    layers = pair()
    named = {"average_attn_weights": average, "key_padding_mask": coins(N, S)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = [layer(*inputs_of(layer), **named) for layer in (*layers, layers[1])]
    for theirs, *ours in zip(*results, strict=True):
        assert all(torch.equal(x, theirs) for x in ours)
    assert [(str(w.message).split(" is")[0], w.filename) for w in caught] == [("need_weights", __file__)]


def test_query_that_sees_no_key_gets_the_bias() -> None:
    theirs, ours = pair()
    mask = coins(L, S)
    mask[2] = True
    out, _ = ours(*inputs_of(ours), attn_mask=mask, need_weights=False)
    assert torch.equal(out[2], ours.out_proj.bias.expand(N, E))
    check((theirs, ours), inputs_of(ours), attn_mask=mask)


@pytest.mark.parametrize("layer", LAYERS)
def test_constructor_parameters_and_signature_are_torchs(layer: str) -> None:
    made = []
    for kind in (nn.MultiheadAttention, MultiheadAttention):
        torch.manual_seed(0)
        made.append(kind(E, HEADS, **LAYERS[layer]).state_dict())
    assert list(made[0]) == list(made[1])
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])
    for function in ("__init__", "forward"):
        theirs, ours = (inspect.signature(getattr(kind, function)) for kind in (nn.MultiheadAttention, MultiheadAttention))
        assert [(p.name, p.kind, p.default) for p in theirs.parameters.values()] == [
            (p.name, p.kind, p.default) for p in ours.parameters.values()
        ]


def test_dropout_is_for_training_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    call = flexattn.attention
    monkeypatch.setattr(flexattn.nn, "attention", lambda *given, **named: seen.append(named["dropout_p"]) or call(*given, **named))
    for layer, given in ((MultiheadAttention(E, HEADS, 0.25), 3), (Attention(E, HEADS, dropout_p=0.25), 1)):
        x = torch.randn(2, 5, E)
        named = {"need_weights": False} if given == 3 else {}
        for mode in (True, False):
            layer.train(mode)
            layer(*[x] * given, **named)
    assert seen == [0.25, 0.0, 0.25, 0.0]


def test_layer_runs_in_torchs_transformer_and_is_copied_and_pickled() -> None:
    torch.manual_seed(0)
    theirs = nn.TransformerEncoderLayer(E, HEADS, 32, 0.0, batch_first=True, **DOUBLE)
    ours = copy.deepcopy(theirs)
    ours.self_attn = MultiheadAttention(E, HEADS, batch_first=True, **DOUBLE)
    ours.load_state_dict(theirs.state_dict())
    ours = pickle.loads(pickle.dumps(ours))
    x, padding = random(N, L, E), coins(N, L)
    causal = nn.Transformer.generate_square_subsequent_mask(L, **DOUBLE)
    for named in ({}, {"src_key_padding_mask": padding}, {"src_mask": causal, "is_causal": True}):
        torch.testing.assert_close(ours(x, **named), theirs(x, **named), **SAME)


@pytest.mark.slow
def test_compiled_layers_are_one_graph() -> None:
    torch._dynamo.reset()
    layers = pair(batch_first=True)
    x = inputs_of(layers[1], "qkv")
    named = {"key_padding_mask": coins(N, S), "need_weights": False}
    compiled = torch.compile(layers[1], fullgraph=True, backend="aot_eager")
    out = compiled(*x, **named)[0]
    want = layers[0](*x, **named)[0]
    torch.testing.assert_close(out, want, **SAME)
    results = ((out, layers[1]), (want, layers[0]))
    gradients = [torch.autograd.grad(y.square().sum(), [x[0], *layer.parameters()]) for y, layer in results]
    for got, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(got, expected, **SAME)


def test_autocast_runs_in_its_dtype() -> None:
    layer = MultiheadAttention(E, HEADS, add_bias_kv=True, batch_first=True)
    x = torch.randn(2, 6, E)
    mask = torch.randn(6, 6)
    want = layer(x, x, x, attn_mask=mask, need_weights=False)[0]
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x, x, x, attn_mask=mask, need_weights=False)[0]
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), want, rtol=0, atol=0.02)


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"query": [1.0]}, TypeError, "query is [1.0] (list)"),
        ({"query": torch.nested.nested_tensor([torch.ones(2, E), torch.ones(3, E)])}, TypeError, "query is a nested tensor"),
        ({"query": torch.ones(5, E + 1)}, ValueError, "the last of size 16"),
        ({"key": torch.ones(S, E)}, ValueError, "key is a torch.float32 tensor of shape (7, 16)"),
        ({"value": torch.ones(S + 1, N, E)}, ValueError, "accepted: the same tokens for both"),
        ({"query": torch.ones(L, N + 1, E)}, ValueError, "accepted: one batch size"),
        ({"attn_mask": torch.ones(L, S + 1)}, ValueError, "accepted: shape (5, 7) or (12, 5, 7)"),
        ({"attn_mask": torch.ones(L, S).int()}, TypeError, "attn_mask is a torch.int32 tensor"),
        ({"attn_mask": True}, TypeError, "attn_mask is True (bool)"),
        ({"key_padding_mask": torch.ones(N, S + 1)}, ValueError, "key_padding_mask is a torch.float32 tensor of shape (3, 8)"),
        ({"key_padding_mask": torch.ones(S)}, ValueError, "accepted: shape (3, 7)"),
    ],
)
def test_wrong_arguments_are_named(changes: dict[str, Any], error: type[Exception], said: str) -> None:
    call = {"query": torch.ones(L, N, E), "key": torch.ones(S, N, E), "value": torch.ones(S, N, E), "need_weights": False}
    with pytest.raises(error) as e:
        MultiheadAttention(E, HEADS)(**(call | changes))
    assert said in str(e.value)


@pytest.mark.parametrize("name", ["attn_mask", "key_padding_mask"])
def test_a_mask_whose_class_gives_it_a_meaning_is_refused(name: str) -> None:
    x, mask = torch.ones(S, N, E), torch.zeros((S, S) if name == "attn_mask" else (N, S), dtype=torch.bool)
    with pytest.raises(TypeError, match=f"{name} is a Marked, whose elements may not be its value"):
        MultiheadAttention(E, HEADS)(x, x, x, need_weights=False, **{name: marked(mask)})


@pytest.mark.parametrize(("queries", "batch", "keys"), [(0, N, S), (L, 0, S), (L, N, 0), (0, 0, 0)])
@pytest.mark.parametrize("dims", [2, 3])
def test_masks_without_elements_are_taken(dims: int, queries: int, batch: int, keys: int) -> None:
    layers = pair(batch_first=True)
    query, key = torch.ones(batch, queries, E, **DOUBLE), torch.ones(batch, keys, E, **DOUBLE)
    mask = torch.zeros(*((queries, keys) if dims == 2 else (batch * HEADS, queries, keys)), dtype=torch.bool)
    padding = torch.zeros(batch, keys, dtype=torch.bool)
    got = layers[1](query, key, key, padding, need_weights=False, attn_mask=mask)[0]
    want = layers[0](query, key, key, need_weights=False)[0]  # torch cannot view a mask of three dims without elements
    torch.testing.assert_close(got, want, **SAME)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("layer", [Attention(E, HEADS), MultiheadAttention(E, HEADS)], ids=lambda layer: type(layer).__name__)
def test_torch_jit_script_is_refused_and_says_what_to_use(layer: nn.Module) -> None:
    for module in (layer, nn.Sequential(layer)):
        with pytest.raises(NotImplementedError, match=rf"cannot compile flexattn.nn.{type(layer).__name__}; use torch.compile"):
            torch.jit.script(module)


def reference(layer: Attention, x: Tensor, context: Tensor, hidden: Tensor | None = None, scale: float | None = None) -> Tensor:
    """The layer's formula: every score, a softmax, and the four products."""
    q, k, v = (
        project(given).unflatten(-1, (-1, layer.head_dim)).transpose(-2, -3)
        for project, given in ((layer.q_proj, x), (layer.k_proj, context), (layer.v_proj, context))
    )
    k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * (layer.head_dim**-0.5 if scale is None else scale)
    if hidden is not None:
        scores = scores.masked_fill(hidden, -math.inf)
    return layer.o_proj((scores.softmax(-1) @ v).transpose(-2, -3).flatten(-2))


@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 2}, {"num_kv_heads": 1, "head_dim": 6, "bias": True}])
def test_attention_is_its_formula(options: dict[str, Any]) -> None:
    layer = Attention(E, HEADS, **DOUBLE, **options)
    x, context = random(N, L, E).requires_grad_(), random(N, S, E, seed=1).requires_grad_()
    causal = torch.ones(L, L, dtype=torch.bool).triu(1)
    for got, want in (
        (layer(x), reference(layer, x, x)),
        (layer(x, context), reference(layer, x, context)),
        (layer(x, attn_mask_type="causal", softmax_scale=0.3), reference(layer, x, x, causal, 0.3)),
        (layer(x.transpose(0, 1), qkv_format="sbhd").transpose(0, 1), reference(layer, x, x)),
    ):
        torch.testing.assert_close(got, want, **SAME)
        leaves = [x, *layer.parameters()]
        dout = random(*want.shape, seed=2)
        for a, b in zip(torch.autograd.grad(got, leaves, dout), torch.autograd.grad(want, leaves, dout), strict=True):
            torch.testing.assert_close(a, b, **SAME)


def test_attention_takes_packed_sequences_and_rotates() -> None:
    layer = Attention(E, HEADS, 2, **DOUBLE)
    x = random(8, E)
    cu_seqlens = torch.tensor([0, 3, 8], dtype=torch.int32)
    packed = {"qkv_format": "thd", "attn_mask_type": "padding", "cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens}
    packed |= {"max_seqlen_q": 5, "max_seqlen_kv": 5}
    want = torch.cat([reference(layer, part, part) for part in (x[:3], x[3:])])
    torch.testing.assert_close(layer(x, **packed), want, **SAME)
    shapes = []

    def rotate(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        shapes.append((q.shape, k.shape))
        return -q, k * 0.5

    want = torch.cat([reference(layer, part, part, scale=-0.5 * layer.head_dim**-0.5) for part in (x[:3], x[3:])])
    torch.testing.assert_close(layer(x, rotate=rotate, **packed), want, **SAME)
    assert shapes == [((8, HEADS, 4), (8, 2, 4))]


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: Attention(E, 4, 3), ValueError, "num_heads is 4 and num_kv_heads 3"),
        (lambda: Attention(E, 3), ValueError, "embed_dim is 16 and num_heads 3"),
        (lambda: Attention(E, 4)(torch.ones(1, 2, E), dropout_p=0.1), TypeError, "dropout_p is given to Attention.forward()"),
        (lambda: Attention(E, 4, heads_kv=2), TypeError, "Attention() has no argument heads_kv; accepted: embed_dim"),
        (lambda: Attention(E, 4)(torch.ones(1, 2, E), return_lse=True), TypeError, "return_lse is given"),
        (lambda: Attention(E, 4)(torch.ones(1, 2, E), qkv_format="bhsd"), ValueError, "qkv_format is 'bhsd' for x without heads"),
        (lambda: Attention(E, 4)(torch.ones(1, 2, E), is_causal=True), TypeError, "Use causal=True"),
    ],
)
def test_wrong_arguments_of_attention_are_named(make: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error) as e:
        make()
    assert said in str(e.value)
