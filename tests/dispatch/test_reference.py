"""The oracle against independent truth: torch's own attention, naive loops, hand-computed cases and gradcheck."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flexattn.dispatch import philox
from flexattn.dispatch.philox import dropout_keep, philox4x32
from flexattn.dispatch.reference import reference_attention, reference_gradients
from flexattn.dispatch.spec import FORMATS, MASK_TYPES, AttentionSpec, Operands, Window
from flexattn.testing import Inputs, make_call, make_dlse, make_dout, make_inputs

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

TIGHT = {"rtol": 1e-12, "atol": 1e-12}  # fp64 on both sides: a few hundred roundings
NEG_INF = float("-inf")
ALL_ONES = 0xFFFFFFFF

# Random123's kat_vectors for philox4x32-10: (counter, key, words).
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ALL_ONES,) * 4, (ALL_ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_philox_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], words: tuple[int, int, int, int], device: str
) -> None:
    c0, c1, c2, c3 = (torch.tensor(c, device=device) for c in counter)
    k0, k1 = (torch.tensor(k, device=device) for k in key)
    assert tuple(int(word) for word in philox4x32((k0, k1), (c0, c1, c2, c3))) == words


if triton is not None:

    @triton.jit
    def _philox_kernel(words_ptr, seed, c1, c2, c3, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        c0 = tl.arange(0, BLOCK)
        zero = c0 * 0
        w0, w1, w2, w3 = tl.philox(seed, c0, zero + c1, zero + c2, zero + c3)
        tl.store(words_ptr + c0, w0.to(tl.uint32, bitcast=True))
        tl.store(words_ptr + BLOCK + c0, w1.to(tl.uint32, bitcast=True))
        tl.store(words_ptr + 2 * BLOCK + c0, w2.to(tl.uint32, bitcast=True))
        tl.store(words_ptr + 3 * BLOCK + c0, w3.to(tl.uint32, bitcast=True))


@pytest.mark.skipif(triton is None, reason="triton is not installed, so its philox cannot be compared")
def test_philox_is_tritons(device: str) -> None:
    block, seed, c1, c2, c3 = 16, 0x299F31D0A4093822, 7, 11, 13
    words = torch.zeros(4, block, dtype=torch.uint32, device=device)
    from flexattn.kernels_triton.runtime.interpreter import right_arithmetic  # here, as Triton may not be installed

    with right_arithmetic():  # Triton's interpreter does not restore the parts of triton.language that tl.philox calls
        _philox_kernel[(1,)](words, seed, c1, c2, c3, BLOCK=block)
    key = (torch.tensor(seed & ALL_ONES), torch.tensor(seed >> 32))
    expected = philox4x32(key, (torch.arange(block), torch.tensor(c1), torch.tensor(c2), torch.tensor(c3)))
    assert words.cpu().to(torch.int64).equal(torch.stack([word.expand(block) for word in expected]))


def test_dropout_keep_follows_its_definition(device: str) -> None:
    seed, offset, dropout_p, heads = -3, 2**32 + 9, 0.4, 3
    rows, cols = range(2, 5), range(6, 21)  # ends that are no multiples of the eight halves of a counter's words
    keep = dropout_keep(torch.tensor([seed, offset], device=device), dropout_p, torch.arange(heads, device=device), rows, cols)
    assert keep.shape == (heads, len(rows), len(cols))
    key = (torch.tensor(seed % 2**32), torch.tensor((seed % 2**64) >> 32))
    for bh, i, j in product(range(heads), rows, cols):
        words = philox4x32(key, (torch.tensor(j // 8), torch.tensor(i), torch.tensor(bh), torch.tensor(offset % 2**32)), 7)
        half = int(words[j % 8 // 2]) >> 16 * (j % 2) & 0xFFFF
        assert bool(keep[bh, i - rows.start, j - cols.start]) == (half >= round(dropout_p * 2**16))


def test_dropout_keep_tells_all_32_bits_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    dropout_p = 0.7
    threshold = round(dropout_p * 2**16) << 16
    words = torch.tensor([threshold - 1, threshold])[:, None, None]  # one head's words all fall short, the other's do not
    monkeypatch.setattr(philox, "philox4x32", lambda *_: (words,) * 4)
    keep = dropout_keep(torch.tensor([1, 2]), dropout_p, torch.arange(2), range(1), range(8))
    odd = keep[:, 0, 1::2]  # an even key takes the lower half of a word
    assert not odd[0].any()
    assert odd[1].all()


def test_dropout_keeps_the_right_share() -> None:
    keep = dropout_keep(torch.tensor([42, 0]), 0.25, torch.arange(4), range(100), range(100))
    deviation = math.sqrt(0.25 * 0.75 / keep.numel())
    assert abs(keep.double().mean() - 0.75) < 5 * deviation


@pytest.mark.parametrize("qkv_format", ["bshd", "sbhd", "bhsd"])
@pytest.mark.parametrize("num_heads_kv", [1, 2, 6])
@pytest.mark.parametrize("causal", [False, True])
def test_against_torch(qkv_format: str, num_heads_kv: int, causal: bool) -> None:
    inputs = make_inputs(
        qkv_format, lengths_q=[7, 7], lengths_kv=[5, 5], num_heads=6, num_heads_kv=num_heads_kv, head_dim_v=8, dtype=torch.float64
    )
    spec, x = make_call(inputs, attn_mask_type="causal" if causal else "no_mask", softmax_scale=0.3)
    to_bhsd = [qkv_format.index(dim) for dim in "bhsd"]
    leaves = [t.permute(to_bhsd).clone().requires_grad_() for t in (x.q, x.k, x.v)]
    with sdpa_kernel(SDPBackend.MATH):
        expected = scaled_dot_product_attention(*leaves, is_causal=causal, scale=0.3, enable_gqa=True)
    out, _, _ = reference_attention(spec, x)
    torch.testing.assert_close(out.permute(to_bhsd), expected, **TIGHT)

    dout = make_dout(inputs)
    gradients = reference_gradients(spec, x, dout)
    for got, ref in zip(gradients[:3], torch.autograd.grad(expected, leaves, dout.permute(to_bhsd)), strict=True):
        torch.testing.assert_close(got.permute(to_bhsd), ref, **TIGHT)


def naive_mask(
    attn_mask_type: str,
    window_size: tuple[int, int],
    bottom_right_diagonal: bool | None,
    sq: int,
    skv: int,
    len_q: int,
    len_kv: int,
) -> Tensor:
    """Visibility, written from the definition of the mask types and not from bands."""
    bottom_right = attn_mask_type not in ("causal", "padding_causal") if bottom_right_diagonal is None else bottom_right_diagonal
    visible = torch.zeros(sq, skv, dtype=torch.bool)
    for i, j in product(range(len_q), range(len_kv)):
        distance = j - i - (len_kv - len_q if bottom_right else 0)  # keys beyond the diagonal
        left, right = (None if side == -1 and not isinstance(window_size, Window) else side for side in window_size)
        visible[i, j] = (
            (distance <= 0 or "causal" not in attn_mask_type)
            and (left is None or distance >= -left)
            and (right is None or distance <= right)
        )
    return visible


SIGNED = [Window(None, -2), Window(None, -1), Window(-2, None), Window(-1, None), Window(4, -3), Window(-1, 5), Window(1, -4)]
MASK_CASES = [  # without the contradictions, for which make_band raises
    (attn_mask_type, window_size, bottom_right_diagonal)
    for attn_mask_type in MASK_TYPES
    for window_size in [(-1, -1), (2, 0), (0, 0), (3, -1), (1, 2), (-1, 1), *SIGNED]
    for bottom_right_diagonal in [None, False, True]
    if "causal" not in attn_mask_type or ((window_size[1] or 0) <= 0 and bottom_right_diagonal is None)
]


@pytest.mark.parametrize(("attn_mask_type", "window_size", "bottom_right_diagonal"), MASK_CASES)
def test_masks_against_naive_loops(attn_mask_type: str, window_size: tuple[int, int], bottom_right_diagonal: bool | None) -> None:
    if "padding" in attn_mask_type:
        pairs = [(5, 9), (9, 5), (0, 3), (3, 0), (7, 7)]
        batches = [
            make_inputs(lengths_q=[q for q, _ in pairs], lengths_kv=[kv for _, kv in pairs], padding=True, dtype=torch.float64)
        ]
    else:
        pairs = [(5, 9), (9, 5), (7, 7)]
        batches = [make_inputs(lengths_q=[q], lengths_kv=[kv], dtype=torch.float64) for q, kv in pairs]
    lengths = iter(pairs)
    for inputs in batches:
        spec, x = make_call(
            inputs, attn_mask_type=attn_mask_type, window_size=window_size, bottom_right_diagonal=bottom_right_diagonal
        )
        out, lse, _ = reference_attention(spec, x)
        for b in range(x.q.shape[0]):
            len_q, len_kv = next(lengths)
            mask = naive_mask(attn_mask_type, window_size, bottom_right_diagonal, x.q.shape[1], x.k.shape[1], len_q, len_kv)
            q, k, v = (t[b].nan_to_num().transpose(0, 1) for t in (x.q, x.k, x.v))
            seen = mask.any(-1)
            expected = scaled_dot_product_attention(q[:, seen], k, v, attn_mask=mask[seen], enable_gqa=True)
            torch.testing.assert_close(out[b, seen].transpose(0, 1), expected, **TIGHT)
            assert bool((out[b, ~seen] == 0).all())
            assert bool((lse[b, :, ~seen] == NEG_INF).all())
            assert bool(lse[b, :, seen].isfinite().all())


def tiny(q: list[float], k: list[float], v: list[float], **arguments: Any) -> tuple[AttentionSpec, Operands]:
    """One head, head dim 1, scale 1: every number can be computed by hand."""
    q4, k4, v4 = (torch.tensor(t, dtype=torch.float64).reshape(1, -1, 1, 1) for t in (q, k, v))
    none = dict.fromkeys(Inputs._fields[4:])
    return make_call(Inputs(q4, k4, v4, "bshd", **none), **{"softmax_scale": 1.0, **arguments})  # type: ignore[arg-type]


LN2, LN3 = math.log(2), math.log(3)
TINY_BIAS = torch.tensor([[[[LN3, 0.0]]]], dtype=torch.float64)

# With q = 1 and k = (ln 2, 0) the bare weights are 2 : 1, and v = (1, 0) makes out the first one's share.
TINY_CASES = {
    "vanilla": ({}, 2 / 3, LN3, LN2),
    "scale": ({"softmax_scale": 2.0}, 4 / 5, math.log(5), 2 * LN2),
    "off-by-one": ({"softmax_type": "off-by-one"}, 2 / 4, math.log(4), LN2),
    "learnable": ({"softmax_type": "learnable", "softmax_offset": torch.tensor([LN3])}, 2 / 6, math.log(6), LN2),
    "no sink": ({"softmax_type": "learnable", "softmax_offset": torch.tensor([NEG_INF])}, 2 / 3, LN3, LN2),
    "softcap": (
        {"softcap": 0.5, "softmax_scale": 2.0},
        1 / (1 + math.exp(-0.5 * math.tanh(4 * LN2))),
        math.log(math.exp(0.5 * math.tanh(4 * LN2)) + 1),
        0.5 * math.tanh(4 * LN2),
    ),
    # (ln 2 + ln 3) * 2 = ln 36
    "pre_scale_bias": (
        {"bias_type": "pre_scale_bias", "bias": TINY_BIAS, "softmax_scale": 2.0},
        36 / 37,
        math.log(37),
        math.log(36),
    ),
    # ln 2 * 2 + ln 3 = ln 12
    "post_scale_bias": (
        {"bias_type": "post_scale_bias", "bias": TINY_BIAS, "softmax_scale": 2.0},
        12 / 13,
        math.log(13),
        math.log(12),
    ),
    # a bias inside the cap, and one outside it
    "softcap of pre_scale_bias": (
        {"bias_type": "pre_scale_bias", "bias": TINY_BIAS, "softcap": 0.5},
        1 / (1 + math.exp(-0.5 * math.tanh(2 * math.log(6)))),
        math.log(math.exp(0.5 * math.tanh(2 * math.log(6))) + 1),
        0.5 * math.tanh(2 * math.log(6)),
    ),
    "softcap and post_scale_bias": (
        {"bias_type": "post_scale_bias", "bias": TINY_BIAS, "softcap": 0.5},
        3 / (3 + math.exp(-0.5 * math.tanh(2 * LN2))),
        math.log(3 * math.exp(0.5 * math.tanh(2 * LN2)) + 1),
        LN3 + 0.5 * math.tanh(2 * LN2),
    ),
    # Bottom-right: key 0 is one step from the only query's diagonal. 2 / 2 : 1
    "alibi": ({"bias_type": "alibi", "alibi_slopes": torch.tensor([LN2], dtype=torch.float64)}, 1 / 2, LN2, 0.0),
    # Top-left: key 1 is one step away, and a causal mask hides it.
    "alibi, top-left": (
        {"bias_type": "alibi", "alibi_slopes": torch.tensor([[LN2]], dtype=torch.float64), "bottom_right_diagonal": False},
        4 / 5,
        math.log(5 / 2),
        LN2,
    ),
    "causal": ({"attn_mask_type": "causal"}, 1.0, LN2, LN2),
    "window of one, bottom-right": ({"window_size": (0, 0)}, 0.0, 0.0, 0.0),
}


@pytest.mark.parametrize("case", TINY_CASES)
def test_by_hand(case: str) -> None:
    arguments, share, log_sum, largest = TINY_CASES[case]
    out, lse, max_logit = reference_attention(*tiny([1.0], [LN2, 0.0], [1.0, 0.0], **arguments))
    rough = {"rtol": 1e-6, "atol": 1e-7} if "learnable" in case else TIGHT  # its offset is given in fp32
    for got, expected in ((out, share), (lse, log_sum), (max_logit, largest)):
        torch.testing.assert_close(got.flatten(), torch.tensor([expected], dtype=torch.float64), **rough)


def test_dropout_scales_what_it_keeps() -> None:
    rng_state = torch.tensor([1, 2])
    keys, dropout_p = 40, 0.3
    spec, x = tiny([0.0], [0.0] * keys, [1.0] * keys, dropout_p=dropout_p, rng_state=rng_state)
    out, lse, _ = reference_attention(spec, x)
    kept = int(dropout_keep(rng_state, dropout_p, torch.tensor(0), range(1), range(keys)).sum())
    assert 0 < kept < keys
    dropped = round(dropout_p * 2**16) / 2**16
    torch.testing.assert_close(out.flatten(), torch.tensor([kept / keys / (1 - dropped)], dtype=torch.float64), **TIGHT)
    torch.testing.assert_close(lse.flatten(), torch.tensor([math.log(keys)], dtype=torch.float64), **TIGHT)


GRADCHECK_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal, sink, lse": {"attn_mask_type": "padding_causal", "softmax_type": "learnable"},
    "off-by-one, window": {"softmax_type": "off-by-one", "window_size": (1, 0)},
    "pre-bias, softcap": {"bias_type": "pre_scale_bias", "softcap": 2.0},
    "post-bias, dropout": {"bias_type": "post_scale_bias", "dropout_p": 0.3},
    "alibi, bottom-right": {
        "bias_type": "alibi",
        "alibi_slopes": torch.tensor([0.5, 0.25]),
        "attn_mask_type": "padding_causal_bottom_right",
    },
}


@pytest.mark.sample
@pytest.mark.parametrize("case", GRADCHECK_CASES)
def test_gradcheck(case: str) -> None:
    arguments = GRADCHECK_CASES[case]
    inputs = make_inputs(
        "thd",
        lengths_q=[3, 0, 2],
        lengths_kv=[2, 1, 4],
        num_heads=2,
        num_heads_kv=1,
        head_dim_qk=3,
        head_dim_v=2,
        dtype=torch.float64,
    )
    torch.manual_seed(0)
    bias = torch.randn(1, 2, 3, 4, dtype=torch.float64) if "bias" in arguments.get("bias_type", "") else None
    offset = torch.randn(2, dtype=torch.float64) if arguments.get("softmax_type") == "learnable" else None
    spec, x = make_call(inputs, bias=bias, softmax_offset=offset, rng_state=torch.tensor([5, 6]), **arguments)
    leaves = {name: getattr(x, name) for name in ("q", "k", "v", "bias", "softmax_offset") if getattr(x, name) is not None}

    def function(*values: Tensor) -> tuple[Tensor, Tensor]:
        out, lse, _ = reference_attention(spec, x._replace(**dict(zip(leaves, values, strict=True))))
        return out, lse.masked_fill(lse == NEG_INF, 0.0)

    assert torch.autograd.gradcheck(function, [t.clone().requires_grad_() for t in leaves.values()])


@pytest.mark.parametrize("qkv_format", [*FORMATS, "thd_2bshd", "bshd_2thd"])
@pytest.mark.parametrize("softmax_type", ["vanilla", "off-by-one"])
def test_padding_and_hidden_rows(qkv_format: str, softmax_type: str) -> None:
    lengths_q, lengths_kv = [4, 0, 3, 2], [6, 2, 1, 0]
    inputs = make_inputs(qkv_format, lengths_q=lengths_q, lengths_kv=lengths_kv, padding=True, gap=2, dtype=torch.float64)
    assert inputs.q.isnan().any()
    assert inputs.k.isnan().any()
    spec, x = make_call(inputs, attn_mask_type="padding_causal_bottom_right", softmax_type=softmax_type)
    out, lse, max_logit = reference_attention(spec, x)
    dout, dlse = make_dout(inputs), make_dlse(inputs)
    gradients = reference_gradients(spec, x, dout, dlse)

    is_padding_q, is_padding_kv = x.q[..., 0].isnan(), x.k[..., 0].isnan()
    assert bool((out[is_padding_q] == 0).all())
    assert bool((gradients.dq[is_padding_q] == 0).all())
    assert bool((gradients.dk[is_padding_kv] == 0).all())
    assert bool((gradients.dv[is_padding_kv] == 0).all())
    assert bool((lse[dlse.isnan()] == NEG_INF).all())
    for t in (out, max_logit, *gradients[:3]):
        assert bool(t.isfinite().all())
    # Two of sequence 2's three queries see nothing, and neither does any query of sequence 3.
    hidden = (lse == (NEG_INF if softmax_type == "vanilla" else 0.0)) & ~dlse.isnan()
    assert int(hidden.sum()) == spec.num_heads * (2 + 2)


def test_nothing_visible_has_zero_gradients() -> None:
    inputs = make_inputs(lengths_q=[3], lengths_kv=[2], dtype=torch.float64)
    offset = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)
    for arguments in ({}, {"softmax_type": "learnable", "softmax_offset": offset}):
        spec, x = make_call(inputs, bias_type="post_scale_bias", bias=torch.full((1, 1, 3, 2), NEG_INF).double(), **arguments)
        out, lse, max_logit = reference_attention(spec, x)
        dlse = make_dlse(inputs)
        gradients = reference_gradients(spec, x, make_dout(inputs), dlse)
        assert bool((out == 0).all())
        assert bool((max_logit == NEG_INF).all())
        assert all(bool((gradient == 0).all()) for gradient in gradients[:4])  # type: ignore[union-attr]
        if arguments:
            assert lse.equal(offset[:, None].expand(1, 4, 3))
            assert gradients.dsoftmax_offset is not None
            torch.testing.assert_close(gradients.dsoftmax_offset, dlse.sum((0, 2)), **TIGHT)
        else:
            assert bool((lse == NEG_INF).all())


@pytest.mark.parametrize(("batch", "sq", "skv"), [(0, 3, 3), (2, 0, 3), (2, 3, 0)])
def test_nothing_at_all(batch: int, sq: int, skv: int) -> None:
    inputs = make_inputs(lengths_q=[sq] * batch, lengths_kv=[skv] * batch, dtype=torch.float64)
    offset = torch.arange(4, dtype=torch.float64)
    inputs = inputs._replace(
        q=inputs.q.reshape(batch, sq, 4, 16), k=inputs.k.reshape(batch, skv, 2, 16), v=inputs.v.reshape(batch, skv, 2, 16)
    )
    spec, x = make_call(inputs, softmax_type="learnable", softmax_offset=offset)
    out, lse, max_logit = reference_attention(spec, x)
    assert bool((out == 0).all())
    assert lse.equal(offset[:, None].expand(batch, 4, sq))
    assert max_logit.shape == (4,)
    dlse = make_dlse(inputs)
    gradients = reference_gradients(spec, x, make_dout(inputs), dlse)
    assert [t.shape for t in gradients[:3]] == [x.q.shape, x.k.shape, x.v.shape]  # type: ignore[union-attr]
    assert gradients.dsoftmax_offset is not None
    torch.testing.assert_close(gradients.dsoftmax_offset, dlse.sum((0, 2)), **TIGHT)


@pytest.mark.parametrize("cu_seqlens", [[0, 9, 4], [0, 100, 200], [-7, 3, 6], [5, 3, 1]])
def test_wrong_cu_seqlens_stay_inside(cu_seqlens: list[int]) -> None:
    inputs = make_inputs("thd", lengths_q=[4, 2], dtype=torch.float64)
    wrong = torch.tensor(cu_seqlens, dtype=torch.int32)
    spec, x = make_call(inputs._replace(cu_seqlens_q=wrong, cu_seqlens_kv=wrong))
    out, _, _ = reference_attention(spec, x)
    assert bool(out.isfinite().all())
    assert out.shape == x.q.shape
