"""Wrong arguments of public functions other than attention (test_bad_input.py): errors name the argument and accepted values."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import flexattn
from flexattn import mods
from flexattn.fp8 import DelayedScaling, Recipe, dequantize, quantize
from tests.api.test_bad_input import cu, dense

X = torch.randn(2, 64, 4, 32).half()
QUANTIZED = quantize(X)
BLOCKS = Recipe(granularity="block", block_rows=64)
DELAYED = Recipe(scaling="delayed")
STATE = DelayedScaling(DELAYED, 4)
ONES = torch.ones(4)
META = torch.ones(64, device="meta")


class Bad(NamedTuple):
    call: Callable[[], Any]
    error: type[Exception]
    came: str  # the argument and what it was, as the message says it
    accepted: str


def attend(**changes: Any) -> Callable[[], Any]:
    return lambda: flexattn.attention(**dense(**changes))


def attend_fp8(**changes: Any) -> Callable[[], Any]:
    return lambda: flexattn.attention(**({"q": X, "k": X, "v": X} | changes))


def attend_quantized(**changes: Any) -> Callable[[], Any]:
    return attend_fp8(q=QUANTIZED.data, k=QUANTIZED.data, v=QUANTIZED.data, **changes)


def block_mask(**changes: Any) -> Any:
    call = {"mask_mod": mods.causal(), "B": None, "H": None, "Q_LEN": 64, "KV_LEN": 64, "device": "cpu", "BLOCK_SIZE": 32}
    return flexattn.create_block_mask(**(call | changes))


def make(function: Callable[..., Any], *arguments: Any, **named: Any) -> Callable[[], Any]:
    return lambda: function(*arguments, **named)


def enter(backend: Any) -> None:
    with flexattn.attention_backend(backend):
        pass


MODS = {
    "score_mod text": Bad(attend(score_mod="tanh"), TypeError, "score_mod is 'tanh' (str)", "accepted: a function, or None"),
    "score_mod tensor": Bad(attend(score_mod=ONES), TypeError, "score_mod is a torch.float32 tensor", "accepted: a function"),
    "score_mod of two": Bad(
        attend(score_mod=lambda score, b: score),
        ValueError,
        "score_mod cannot be traced",
        "accepted: a function of score, b, h, q_idx",
    ),
    "score_mod of six": Bad(
        attend(score_mod=lambda score, b, h, i, j, t: score),
        ValueError,
        "argument: 't'",
        "accepted: a function of score, b, h, q_idx",
    ),
    "score_mod raises": Bad(
        attend(score_mod=lambda score, b, h, i, j: 1 / 0),
        ValueError,
        "ZeroDivisionError: division by zero",
        "accepted: a function of",
    ),
    "score_mod module": Bad(
        attend(score_mod=torch.nn.Linear(2, 2)), ValueError, "score_mod cannot be traced", "accepted: a function of"
    ),
    "score_mod gives None": Bad(
        attend(score_mod=lambda score, b, h, i, j: None), ValueError, "score_mod returned None (NoneType)", "accepted: a 0-d tensor"
    ),
    "score_mod gives text": Bad(
        attend(score_mod=lambda score, b, h, i, j: "x"), ValueError, "score_mod returned 'x' (str)", "accepted: a 0-d tensor"
    ),
    "score_mod gives two": Bad(
        attend(score_mod=lambda score, b, h, i, j: (score, score)), ValueError, "score_mod returned (", "accepted: a 0-d tensor"
    ),
    "score_mod branches": Bad(
        attend(score_mod=lambda score, b, h, i, j: score if i > j else -score),
        ValueError,
        "score_mod asks for the value",
        "use torch.where",
    ),
    "score_mod asks": Bad(attend(score_mod=lambda score, b, h, i, j: score * float(i)), ValueError, "(__float__)", "use torch"),
    "score_mod draws": Bad(
        attend(score_mod=lambda score, b, h, i, j: score + torch.rand(())), ValueError, "score_mod uses rand", "use instead: draw"
    ),
    "score_mod multiplies matrices": Bad(
        attend(score_mod=lambda score, b, h, i, j: score * (torch.eye(2) @ torch.eye(2))[0, 0]),
        ValueError,
        "score_mod uses",
        "use instead",
    ),
    "float index": Bad(
        attend(score_mod=lambda score, b, h, i, j: score + ONES[score]),
        ValueError,
        "indexes with a torch.float32",
        "accepted: integers",
    ),
    "too many indices": Bad(
        attend(score_mod=lambda score, b, h, i, j: score + ONES[i, j]),
        ValueError,
        "indexes a tensor of 1 dims with 2 indices",
        "accepted: at most one for each",
    ),
    "capture elsewhere": Bad(
        attend(score_mod=lambda score, b, h, i, j: score + META[i]),
        ValueError,
        "META, which score_mod or mask_mod",
        "accepted: the same",
    ),
    "mask_mod text": Bad(attend(mask_mod="causal"), TypeError, "mask_mod is 'causal' (str)", "accepted: a function, or None"),
    "mask_mod with score": Bad(
        attend(mask_mod=lambda score, b, h, i, j: i > j),
        ValueError,
        "mask_mod cannot be traced",
        "accepted: a function of b, h, q_idx",
    ),
    "mask_mod gives None": Bad(
        attend(mask_mod=lambda b, h, i, j: None), ValueError, "mask_mod returned None (NoneType)", "accepted: a 0-d tensor"
    ),
    "tensors alone": Bad(
        attend(score_mod_tensors=[ONES]), ValueError, "score_mod_tensors is given without a score_mod", "accepted: ()"
    ),
    "tensors not in a list": Bad(
        attend(score_mod=lambda score, b, h, i, j, t: score + t[h], score_mod_tensors=ONES),
        TypeError,
        "score_mod_tensors is a torch.float32 tensor of shape (4,)",
        "accepted: a list or tuple of tensors",
    ),
    "tensors an int": Bad(
        attend(score_mod=lambda score, b, h, i, j: score, score_mod_tensors=3),
        TypeError,
        "score_mod_tensors is 3 (int)",
        "accepted: a list",
    ),
    "tensors of numbers": Bad(
        attend(score_mod=lambda score, b, h, i, j, t: score + t, score_mod_tensors=[1.0]),
        TypeError,
        "score_mod_tensors[0] is 1.0 (float)",
        "accepted: a list or tuple of tensors",
    ),
    "tensors named of numbers": Bad(
        attend(score_mod=lambda score, b, h, i, j, t: score + t, score_mod_tensors={"t": 1.0}),
        TypeError,
        "score_mod_tensors['t'] is 1.0 (float)",
        "accepted: a list or tuple of tensors",
    ),
    "tensors of another name": Bad(
        attend(score_mod=lambda score, b, h, i, j, t: score, score_mod_tensors={"u": ONES}),
        ValueError,
        "unexpected keyword argument 'u'",
        "accepted: a function of score, b, h, q_idx, kv_idx (and of score_mod_tensors)",
    ),
    "too many tensors": Bad(
        attend(score_mod=lambda score, b, h, i, j: score, score_mod_tensors=[ONES]),
        ValueError,
        "score_mod cannot be traced",
        "accepted: a function of score, b, h, q_idx, kv_idx (and of score_mod_tensors)",
    ),
}

BLOCK_MASKS = {
    "block_mask text": Bad(attend(block_mask="causal"), TypeError, "block_mask is a str", "accepted: a BlockMask"),
    "block_mask tensor": Bad(attend(block_mask=torch.ones(5, 7)), TypeError, "block_mask is a Tensor", "accepted: a BlockMask"),
    "block_mask beside mask_mod": Bad(
        lambda: flexattn.attention(**dense(block_mask=block_mask(), mask_mod=mods.causal())),
        ValueError,
        "mask_mod is given with a block_mask",
        "accepted: one of the two",
    ),
    "block_mask too short": Bad(
        lambda: flexattn.attention(**dense(q=torch.randn(2, 100, 4, 16), block_mask=block_mask())),
        ValueError,
        "64 queries and 64 keys",
        "at least 100 queries",
    ),
    "block_mask of another batch": Bad(
        lambda: flexattn.attention(**dense(block_mask=block_mask(B=3))),
        ValueError,
        "for batch 3",
        "accepted for this call: batch 1 or 2",
    ),
    "block_mask of other heads": Bad(
        lambda: flexattn.attention(**dense(block_mask=block_mask(H=3))), ValueError, "3 heads", "1 or 4 heads"
    ),
    "mask_mod": Bad(make(block_mask, mask_mod="causal"), TypeError, "mask_mod is 'causal' (str)", "accepted: a function"),
    "mask_mod None": Bad(make(block_mask, mask_mod=None), TypeError, "mask_mod is None (NoneType)", "accepted: a function"),
    "B negative": Bad(make(block_mask, B=-1), ValueError, "B is -1", "accepted: an int of at least 1"),
    "B zero": Bad(make(block_mask, B=0), ValueError, "B is 0", "accepted: an int of at least 1"),
    "B float": Bad(make(block_mask, B=1.5), TypeError, "B is 1.5 (float)", "accepted: an int of at least 1"),
    "H text": Bad(make(block_mask, H="2"), TypeError, "H is '2' (str)", "accepted: an int of at least 1"),
    "H bool": Bad(make(block_mask, H=True), TypeError, "H is True (bool)", "accepted: an int of at least 1"),
    "Q_LEN negative": Bad(make(block_mask, Q_LEN=-3), ValueError, "Q_LEN is -3", "accepted: an int"),
    "Q_LEN float": Bad(make(block_mask, Q_LEN=64.0), TypeError, "Q_LEN is 64.0 (float)", "accepted: an int"),
    "KV_LEN None": Bad(make(block_mask, KV_LEN=None), TypeError, "KV_LEN is None (NoneType)", "accepted: an int"),
    "device": Bad(make(block_mask, device="gpu"), ValueError, "device is 'gpu'", "accepted: a torch.device"),
    "BLOCK_SIZE 10": Bad(make(block_mask, BLOCK_SIZE=10), ValueError, "BLOCK_SIZE is 10", "accepted: a multiple of 16"),
    "BLOCK_SIZE 0": Bad(make(block_mask, BLOCK_SIZE=0), ValueError, "BLOCK_SIZE is 0", "accepted: a multiple of 16"),
    "BLOCK_SIZE text": Bad(make(block_mask, BLOCK_SIZE="32"), ValueError, "BLOCK_SIZE is '32'", "accepted: a multiple of 16"),
    "BLOCK_SIZE None": Bad(make(block_mask, BLOCK_SIZE=None), ValueError, "BLOCK_SIZE is None", "accepted: a multiple of 16"),
    "BLOCK_SIZE floats": Bad(make(block_mask, BLOCK_SIZE=(16.0, 16)), ValueError, "BLOCK_SIZE is (16.0, 16)", "a pair of them"),
    "BLOCK_SIZE of three": Bad(
        make(block_mask, BLOCK_SIZE=(16, 16, 16)), ValueError, "BLOCK_SIZE is (16, 16, 16)", "a pair of them"
    ),
}

NAMED_MODS = {
    "left": Bad(make(mods.sliding_window, -1, 0), ValueError, "left is -1", "accepted: a number of tokens"),
    "right": Bad(make(mods.sliding_window, 0, 1.0), ValueError, "right is 1.0", "accepted: a number of tokens"),
    "left bool": Bad(make(mods.sliding_window, True, 0), ValueError, "left is True", "accepted: a number of tokens"),
    "window": Bad(make(mods.dilated_sliding_window, "2", 1), ValueError, "window is '2'", "accepted: a number of tokens"),
    "dilation": Bad(make(mods.dilated_sliding_window, 2, 0), ValueError, "dilation is 0", "accepted: at least 1"),
    "document_ids float": Bad(make(mods.document, ONES), ValueError, "document_ids is a torch.float32", "accepted: integers"),
    "document_ids list": Bad(make(mods.document, [0, 1]), TypeError, "document_ids is [0, 1] (list)", "accepted: a tensor"),
    "prefix_lengths 2-d": Bad(
        make(mods.prefix_lm, cu(1, 2)[None]), ValueError, "prefix_lengths is a torch.int32", "accepted: integers, [b]"
    ),
    "prefix_lengths list": Bad(make(mods.prefix_lm, [1]), TypeError, "prefix_lengths is [1] (list)", "accepted: a tensor"),
    "kernel_size even": Bad(make(mods.natten_2d, 4, 4, 2), ValueError, "kernel_size is 2", "accepted: odd, from 1 to 4"),
    "kernel_size float": Bad(make(mods.natten_2d, 4, 4, 3.0), ValueError, "kernel_size is 3.0", "accepted: a number of tokens"),
    "height": Bad(make(mods.natten_2d, "4", 4, 3), ValueError, "height is '4'", "accepted: a number of tokens"),
    "slopes 2-d": Bad(make(mods.alibi, ONES[None]), ValueError, "slopes has shape (1, 4)", "accepted: [h]"),
    "slopes list": Bad(make(mods.alibi, [1.0]), TypeError, "slopes is [1.0] (list)", "accepted: a tensor"),
    "table 1-d": Bad(make(mods.relative_bias, ONES), ValueError, "table has shape (4,)", "accepted: [buckets, h]"),
    "table list": Bad(make(mods.relative_bias, [1]), TypeError, "table is [1] (list)", "accepted: a tensor"),
    "table small": Bad(
        make(mods.relative_bias, torch.ones(2, 4)), ValueError, "table has 2 buckets", "accepted: fewer exact buckets"
    ),
    "max_distance": Bad(
        make(mods.relative_bias, torch.ones(32, 4), max_distance=1.5),
        ValueError,
        "max_distance is 1.5",
        "accepted: a number of tokens",
    ),
    "cap 0": Bad(make(mods.softcap, 0.0), ValueError, "cap is 0.0 (float)", "accepted: a number above 0"),
    "cap text": Bad(make(mods.softcap, "x"), ValueError, "cap is 'x' (str)", "accepted: a number above 0"),
    "cap 1-d": Bad(make(mods.softcap, ONES), ValueError, "cap is a torch.float32 tensor of shape (4,)", "or a 0-d tensor"),
    "both of none": Bad(mods.both, TypeError, "mods.both() has no mask_mod", "accepted: at least one"),
    "either of text": Bad(
        make(mods.either, mods.causal(), "x"), TypeError, "mask_mods[1] of mods.either() is 'x'", "accepted: a function"
    ),
}

FP8 = {
    "fp8_recipe": Bad(attend(fp8_recipe="E4M3"), TypeError, "fp8_recipe is 'E4M3' (str)", "accepted: a flexattn.fp8.Recipe"),
    "float32 q": Bad(
        attend(fp8_recipe=Recipe()), TypeError, "q has dtype torch.float32 with an fp8_recipe", "accepted: torch.float16"
    ),
    "no fp8_state": Bad(attend_fp8(fp8_recipe=DELAYED), ValueError, "fp8_state is None", "accepted: a DelayedScaling"),
    "fp8_state alone": Bad(
        attend_fp8(fp8_state=STATE), ValueError, "fp8_state is given with no fp8_recipe", "accepted: a DelayedScaling"
    ),
    "fp8_state text": Bad(
        attend_fp8(fp8_recipe=DELAYED, fp8_state="x"), TypeError, "fp8_state is 'x' (str)", "accepted: a flexattn"
    ),
    "fp8_state of another": Bad(
        attend_fp8(fp8_recipe=Recipe(scaling="delayed", margin=1), fp8_state=STATE),
        ValueError,
        "fp8_state was made for",
        "accepted",
    ),
    "fp8_state of other heads": Bad(
        attend_fp8(q=X[:, :, :2], k=X[:, :, :2], v=X[:, :, :2], fp8_recipe=DELAYED, fp8_state=STATE),
        ValueError,
        "fp8_state was made for 4 heads of q",
        "accepted: DelayedScaling(recipe, num_heads, num_heads_kv)",
    ),
    "q quantized": Bad(attend_fp8(q=QUANTIZED), TypeError, "q is a QuantizedTensor", "accepted: q.data"),
    "descale beside float32": Bad(attend(descale_q=ONES), ValueError, "descale_q is given with q, k and v in", "accepted: None"),
    "descale number": Bad(attend_quantized(descale_k=1.0), TypeError, "descale_k is 1.0 (float)", "accepted: a tensor"),
    "descale float16": Bad(
        attend_quantized(descale_v=ONES.half()), TypeError, "descale_v has dtype torch.float16", "accepted: torch.float32"
    ),
    "descale shape": Bad(
        attend_quantized(descale_q=torch.ones(5)), ValueError, "descale_q has shape (5,)", "accepted: [], [h], [b, h]"
    ),
    "descale gradient": Bad(
        attend_quantized(descale_q=torch.ones(4, requires_grad=True)),
        ValueError,
        "descale_q requires a gradient",
        "detached descale",
    ),
    "quantize list": Bad(make(quantize, [1.0]), TypeError, "x is [1.0] (list)", "accepted: a tensor"),
    "quantize float64": Bad(make(quantize, X.double()), TypeError, "x has dtype torch.float64", "accepted: torch.float16"),
    "quantize again": Bad(make(quantize, QUANTIZED.data), TypeError, "x has dtype torch.float8_e4m3fn", "accepted: torch.float16"),
    "quantize 3-d": Bad(make(quantize, X[0]), ValueError, "x has shape (64, 4, 32)", "accepted: the 4 dims of bshd"),
    "quantize recipe": Bad(make(quantize, X, "E4M3"), TypeError, "recipe is 'E4M3' (str)", "accepted: a flexattn.fp8.Recipe"),
    "quantize delayed": Bad(make(quantize, X, DELAYED), ValueError, "recipe.scaling is 'delayed'", "accepted: 'current'"),
    "quantize useless field": Bad(
        make(quantize, X, Recipe(bf16_backward=True)), ValueError, "recipe.bf16_backward is True", "accepted: False"
    ),
    "quantize dtype": Bad(make(quantize, X, dtype=torch.int8), ValueError, "dtype is torch.int8", "accepted: torch.float8_e4m3fn"),
    "quantize format": Bad(make(quantize, X, qkv_format="xyz"), ValueError, "qkv_format is 'xyz'", "accepted: bshd"),
    "quantize two formats": Bad(
        make(quantize, X, qkv_format="thd_2bshd"), ValueError, "qkv_format is 'thd_2bshd'", "accepted: the format of x"
    ),
    "quantize thd": Bad(
        make(quantize, X[0], qkv_format="thd"), ValueError, "cu_seqlens is None with thd", "accepted: an int32 tensor"
    ),
    "quantize cu_seqlens": Bad(
        make(quantize, X, cu_seqlens=cu(0, 1)), ValueError, "cu_seqlens is a torch.int32", "accepted: a contiguous"
    ),
    "quantize gaps": Bad(
        make(quantize, X, cu_seqlens_padded=cu(0, 1, 2)),
        ValueError,
        "cu_seqlens is None with cu_seqlens_padded",
        "accepted: an int32",
    ),
    "quantize max_seqlen": Bad(make(quantize, X, max_seqlen=3), ValueError, "max_seqlen is 3", "accepted with format bshd: None"),
    "dequantize tensor": Bad(make(dequantize, X), TypeError, "x is a torch.float16 tensor", "accepted: a QuantizedTensor"),
    "dequantize None": Bad(make(dequantize, None), TypeError, "x is None (NoneType)", "accepted: a QuantizedTensor"),
    "dequantize recipe": Bad(make(dequantize, QUANTIZED, "x"), TypeError, "recipe is 'x' (str)", "accepted: a flexattn.fp8.Recipe"),
    "dequantize int8": Bad(
        make(dequantize, QUANTIZED, dtype=torch.int8), ValueError, "dtype is torch.int8", "accepted: None, torch.float16"
    ),
    "dequantize dtype text": Bad(
        make(dequantize, QUANTIZED, dtype="f"), ValueError, "dtype is 'f'", "accepted: None, torch.float16"
    ),
    "dequantize format": Bad(
        make(dequantize, QUANTIZED, qkv_format="thd"), ValueError, "x.data has shape", "accepted: the 3 dims of thd"
    ),
    "dequantize cu_seqlens": Bad(
        make(dequantize, QUANTIZED, cu_seqlens=[0, 1]), TypeError, "cu_seqlens is [0, 1] (list)", "accepted: an int32 tensor"
    ),
    "dequantize other blocks": Bad(
        lambda: dequantize(quantize(torch.randn(1, 256, 2, 32), BLOCKS), Recipe(granularity="block")),
        ValueError,
        "block_rows 128, and x is scaled by blocks of 64",
        "accepted: the recipe that made x",
    ),
    "recipe format": Bad(make(Recipe, fp8_format="E5M2"), ValueError, "fp8_format is 'E5M2'", "accepted: E4M3, HYBRID"),
    "recipe scaling": Bad(make(Recipe, scaling="dynamic"), ValueError, "scaling is 'dynamic'", "accepted: current, delayed"),
    "recipe granularity": Bad(make(Recipe, granularity="row"), ValueError, "granularity is 'row'", "accepted: tensor, head"),
    "recipe delayed blocks": Bad(
        make(Recipe, scaling="delayed", granularity="block"),
        ValueError,
        "granularity is 'block' with scaling",
        "accepted: tensor, head",
    ),
    "recipe rows": Bad(make(Recipe, block_rows=64), ValueError, "block_rows is given with granularity 'head'", "accepted: None"),
    "recipe rows 100": Bad(
        make(Recipe, granularity="block", block_rows=100), ValueError, "block_rows is 100", "accepted: a multiple of 64"
    ),
    "recipe rows text": Bad(
        make(Recipe, granularity="block", block_rows="64"), ValueError, "block_rows is '64'", "accepted: a multiple"
    ),
    "recipe margin float": Bad(make(Recipe, margin=1.0), TypeError, "margin is 1.0 (float)", "accepted: an int"),
    "recipe margin 100": Bad(make(Recipe, margin=100), ValueError, "margin is 100", "accepted: an int from"),
    "recipe history": Bad(make(Recipe, amax_history_len=4), ValueError, "amax_history_len is given with", "accepted: None"),
    "recipe history 0": Bad(
        make(Recipe, scaling="delayed", amax_history_len=0), ValueError, "amax_history_len is 0", "accepted: an int of at least 1"
    ),
    "recipe algorithm": Bad(
        make(Recipe, scaling="delayed", amax_compute_algo="mean"), ValueError, "amax_compute_algo is 'mean'", "accepted: max"
    ),
    "recipe rotation": Bad(make(Recipe, rotation=1), TypeError, "rotation is 1 (int)", "accepted: True, False"),
    "recipe bf16_backward": Bad(make(Recipe, bf16_backward=None), TypeError, "bf16_backward is None", "accepted: True, False"),
    "recipe keep_16_bit": Bad(
        make(Recipe, keep_16_bit="yes"), TypeError, "keep_16_bit is 'yes' (str)", "accepted: True, False, None"
    ),
    "recipe keep_16_bit rotated": Bad(
        make(Recipe, keep_16_bit=True, rotation=True), ValueError, "keep_16_bit is True with rotation", "accepted: None, False"
    ),
    "recipe out_dtype": Bad(make(Recipe, out_dtype=torch.float32), ValueError, "out_dtype is torch.float32", "accepted: None"),
    "state recipe": Bad(make(DelayedScaling, Recipe(), 4), ValueError, "recipe.scaling is 'current'", "accepted: 'delayed'"),
    "state no recipe": Bad(
        make(DelayedScaling, None, 4), TypeError, "recipe is None (NoneType)", "accepted: a flexattn.fp8.Recipe"
    ),
    "state heads": Bad(make(DelayedScaling, DELAYED, 0), ValueError, "num_heads is 0", "accepted: an int of at least 1"),
    "state heads float": Bad(make(DelayedScaling, DELAYED, 2.0), TypeError, "num_heads is 2.0 (float)", "accepted: an int"),
    "state key heads": Bad(make(DelayedScaling, DELAYED, 4, 0), ValueError, "num_heads_kv is 0", "accepted: an int of at least 1"),
    "state device": Bad(make(DelayedScaling, DELAYED, 4, device="gpu"), ValueError, "device is 'gpu'", "accepted: a torch.device"),
    "state scale": Bad(make(STATE.scale, "w"), ValueError, "name is 'w'", "accepted: q, k, v, dout, out"),
    "state history": Bad(make(STATE.history, "w"), ValueError, "name is 'w'", "accepted: q, k, v, dout, out"),
}

OTHERS = {
    "explain None": Bad(make(flexattn.explain, None), TypeError, "q is None (NoneType)", "accepted: a tensor"),
    "explain q alone": Bad(make(flexattn.explain, X), TypeError, "k is None (NoneType)", "accepted: a tensor"),
    "explain mod": Bad(lambda: flexattn.explain(**dense(score_mod=3)), TypeError, "score_mod is 3 (int)", "accepted: a function"),
    "warmup int": Bad(make(flexattn.warmup, 1), TypeError, "warmup() got a int", "accepted: a dict of attention's arguments"),
    "warmup call": Bad(
        lambda: flexattn.warmup(dense(attn_mask_type="x")), ValueError, "attn_mask_type is 'x'", "accepted: no_mask, padding"
    ),
    "attention_backend": Bad(make(enter, "flash"), ValueError, "backend is 'flash'", "accepted: auto, triton, cudnn, eager"),
    "attention_backend int": Bad(make(enter, 3), ValueError, "backend is 3", "accepted: auto, triton, cudnn, eager"),
    "attention_backend None": Bad(make(enter, None), ValueError, "backend is None", "accepted: auto, triton, cudnn, eager"),
    "merge list": Bad(
        make(flexattn.merge_attention, [1], ONES, ONES, ONES), TypeError, "out_a is [1] (list)", "accepted: a tensor"
    ),
    "merge format": Bad(
        make(flexattn.merge_attention, X, X, X, X, qkv_format=3), ValueError, "qkv_format is '3'", "accepted: bshd"
    ),
}

ENVIRONMENT = {"BACKEND": "auto, triton, cudnn, eager", "CHECK": "0, 1", "CANARY": "0, 1", "HOPPER": "auto, always, never"}


@pytest.mark.parametrize(
    "bad",
    [pytest.param(bad, id=name) for table in (MODS, BLOCK_MASKS, NAMED_MODS, FP8, OTHERS) for name, bad in table.items()],
)
def test_wrong_arguments_are_named(bad: Bad) -> None:
    with pytest.raises(bad.error, match=re.escape(bad.came)) as e:
        bad.call()
    assert bad.accepted in str(e.value)


@pytest.mark.parametrize("function", [flexattn.attention, flexattn.explain])
@pytest.mark.parametrize("name", ENVIRONMENT)
def test_wrong_settings_are_named(name: str, function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"FLEXATTN_{name}", "YES")
    with pytest.raises(ValueError, match=f"FLEXATTN_{name} is 'YES'; accepted: {ENVIRONMENT[name]}"):
        function(**dense())


@pytest.mark.parametrize("function", [Recipe, quantize, dequantize, flexattn.warmup, block_mask])
def test_an_argument_that_does_not_exist(function: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match="is_causal"):
        function(is_causal=True)
