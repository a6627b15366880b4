"""Mistakes of first calls: each raises or warns with a text that names the way out, which then runs; docs/errors.md shows them.

`python -m tests.api.test_first_mistakes` writes the page.
"""

from __future__ import annotations

import re
import textwrap
import warnings
from typing import Any, NamedTuple

import pytest
import torch

import flexattn
from flexattn import call_cache, warn
from tests.conftest import ROOT

PAGE = ROOT / "docs" / "errors.md"


class Mistake(NamedTuple):
    wrong: str
    right: str  # the right call, which the text leads to
    says: str  # a part of the text, which begins with the error's type; "" if the wrong call has a meaning


NAMES = {
    "`True` by position": Mistake(
        "attention(q, k, v, True)",
        "attention(q, k, v, causal=True)",
        "TypeError: attention() takes q, k and v by position, and got True (bool) after them. That position is dropout_p in "
        "FlashAttention and attn_mask in SDPA. Pass arguments by name, for example causal=True.",
    ),
    "FlashAttention by position": Mistake(
        "attention(q, k, v, 0.0, 0.1, True)",
        "attention(q, k, v, dropout_p=0.0, softmax_scale=0.1, causal=True)",
        "TypeError: attention() takes q, k and v by position",
    ),
    "SDPA by position": Mistake(
        "attention(q, k, v, mask)", "attention(q, k, v, mask=mask)", "TypeError: attention() takes q, k and v by position"
    ),
    "`query`, `key` and `value`": Mistake(
        "attention(query=q, key=k, value=v)",
        "attention(q, k, v)",
        "TypeError: attention() has no argument 'query', the name in SDPA",
    ),
    "`is_causal`": Mistake(
        "attention(q, k, v, is_causal=True)",
        "attention(q, k, v, causal=True)",
        "TypeError: attention() has no argument 'is_causal', the name in SDPA, jax.nn and transformers. Use causal=True",
    ),
    "`attn_mask`": Mistake(
        "attention(q, k, v, attn_mask=mask)",
        "attention(q, k, v, mask=mask)",
        "TypeError: attention() has no argument 'attn_mask', the name in SDPA and MultiheadAttention. Use mask,",
    ),
    "`key_padding_mask`": Mistake(
        "attention(q, k, v, key_padding_mask=padding)",
        "attention(q, k, v, mask=~padding[:, None, None, :])",
        "TypeError: attention() has no argument 'key_padding_mask', the name in MultiheadAttention. Use mask=~key_padding_mask",
    ),
    "`scale`": Mistake(
        "attention(q, k, v, scale=0.1)",
        "attention(q, k, v, softmax_scale=0.1)",
        "TypeError: attention() has no argument 'scale', the name in SDPA, Triton, transformers and cuDNN. Use softmax_scale.",
    ),
    "`dropout`": Mistake(
        "attention(q, k, v, dropout=0.1)",
        "attention(q, k, v, dropout_p=0.1)",
        "TypeError: attention() has no argument 'dropout', the name in transformers, xformers, TransformerEngine and cuDNN. Use "
        "dropout_p.",
    ),
    "`sliding_window`": Mistake(
        "attention(q, k, v, sliding_window=4)",
        "attention(q, k, v, causal=True, window_size=4)",
        "TypeError: attention() has no argument 'sliding_window', the name in transformers and cuDNN. Use window_size=w with "
        "causal=True",
    ),
    "`enable_gqa`": Mistake(
        "attention(q, k, v, enable_gqa=True)",
        "attention(q, k[:, :, :2], v[:, :, :2])",
        "TypeError: attention() has no argument 'enable_gqa'",
    ),
    "`need_weights`": Mistake(
        "attention(q, k, v, need_weights=True)",
        "attention(q, k, v, return_lse=True)",
        "TypeError: attention() has no argument 'need_weights'",
    ),
    "`k_scale`": Mistake(
        "attention(q, k, v, k_scale=scale)",
        "attention(q, k.to(fp8), v.to(fp8), descale_k=scale, descale_v=scale)",
        "TypeError: attention() has no argument 'k_scale', the name in FlashInfer and vLLM. Use descale_k.",
    ),
    "`block_table`": Mistake(
        "attention(q, pages, pages, block_table=table)",
        "attention(q, pages, pages, page_table=table, seqused_kv=used, attn_mask_type='padding')",
        "TypeError: attention() has no argument 'block_table', the name in FlashAttention and cuDNN. Use page_table",
    ),
    "A misspelt name": Mistake(
        "attention(q, k, v, softmaxscale=0.1)",
        "attention(q, k, v, softmax_scale=0.1)",
        "TypeError: attention() has no argument 'softmaxscale'. Did you mean softmax_scale, softmax_offset or softmax_type?",
    ),
    "An unknown name": Mistake(
        "attention(q, k, v, zzz=1)",
        "attention(q, k, v)",
        "TypeError: attention() has no argument 'zzz'. help(flexattn.attention) lists its arguments.",
    ),
}

MASKS = {
    "`causal` with two lengths": Mistake(
        "attention(q[:, :8], k, v, causal=True)",
        "attention(q[:, :8], k, v, attn_mask_type='causal_bottom_right')",
        "ValueError: causal is True and there are 8 queries and 16 keys, so two diagonals are possible. Pass "
        "attn_mask_type='causal' if "
        "query i sees keys j <= i",
    ),
    "`window_size` without a diagonal": Mistake(
        "attention(q, k, v, window_size=4)",
        "attention(q, k, v, causal=True, window_size=4)",
        "ValueError: window_size is 4 without a causal mask, which has two meanings. Pass window_size=4 with causal=True for "
        "the last 4 "
        "keys, or (4, 4) for 4 keys on each side.",
    ),
    "`window_size` to the right": Mistake(
        "attention(q, k, v, causal=True, window_size=(4, 1))",
        "attention(q, k, v, causal=True, window_size=(4, 0))",
        "ValueError: window_size is (4, 1) with attn_mask_type 'causal'",
    ),
    "`attn_mask_type` misspelt": Mistake(
        "attention(q, k, v, attn_mask_type='casual')",
        "attention(q, k, v, attn_mask_type='causal')",
        "Did you mean 'causal'?",
    ),
    "`attn_mask_type` of None": Mistake(
        "attention(q, k, v, attn_mask_type=None)",
        "attention(q, k, v)",
        "Leave it out for 'no_mask'.",
    ),
    "`attn_mask_type` of True": Mistake(
        "attention(q, k, v, attn_mask_type=True)",
        "attention(q, k, v, causal=True)",
        "Pass causal=True, or one of these names.",
    ),
    "A tensor as `mask_mod`": Mistake(
        "attention(q, k, v, mask_mod=mask)",
        "attention(q, k, v, mask=mask)",
        "accepted: a function, or None. Pass a tensor as mask=",
    ),
    "A bool tensor as `bias`": Mistake(
        "attention(q, k, v, bias=mask[None, None])",
        "attention(q, k, v, mask=mask)",
        "accepted: torch.float32. Pass a bool tensor as mask=, True where a query sees a key.",
    ),
    "A mask of another size": Mistake(
        "attention(q, k, v, mask=mask[:8])",
        "attention(q[:, :8], k, v, mask=mask[:8])",
        "accepted: dims that broadcast to [2, 4, 16, 16]",
    ),
    "A padding mask of two dims": Mistake(
        "attention(q, k, v, mask=~padding)",
        "attention(q, k, v, mask=~padding[:, None, None, :])",
        "Pass mask[:, None, None, :] if it is [batch, keys].",
    ),
    "A mask of integers": Mistake(
        "attention(q, k, v, mask=mask.long())",
        "attention(q, k, v, mask=mask)",
        "Convert it with mask.bool() if 1 is a key that a query sees.",
    ),
    "A bias with two dims": Mistake(
        "attention(q, k, v, bias=torch.zeros(16, 16))",
        "attention(q, k, v, bias=torch.zeros(1, 1, 16, 16))",
        "accepted: [b, h, sq, skv] = [2, 4, 16, 16], any of which may be 1",
    ),
    "A mod that branches": Mistake(
        "attention(q, k, v, score_mod=lambda score, b, h, i, j: score if i > j else -score)",
        "attention(q, k, v, score_mod=lambda score, b, h, i, j: torch.where(i > j, score, -score))",
        "score_mod asks for the value of a tensor (__bool__); it is known only in the kernel: use torch.where instead of if",
    ),
    "A mod that is not made": Mistake(
        "attention(q, k, v, score_mod=flexattn.mods.softcap)",
        "attention(q, k, v, score_mod=flexattn.mods.softcap(30.0))",
        "score_mod is the function mods.softcap itself",
    ),
    "One query with a causal mask": Mistake(
        "attention(q[:, :1], k, v, attn_mask_type='causal')",
        "attention(q[:, :1], k, v, attn_mask_type='causal_bottom_right')",
        "RuntimeWarning: attn_mask_type is 'causal' with one query and 16 keys",
    ),
}

SHAPES = {
    "Heads before tokens in the default format": Mistake(
        "attention(heads_first, heads_first, heads_first)",
        "attention(heads_first, heads_first, heads_first, qkv_format='bhsd')",
        "if these are [batch, heads, seq, dim], pass qkv_format='bhsd'",
    ),
    "Three dims": Mistake(
        "attention(q[0], k[0], v[0])",
        "attention(q[:1], k[:1], v[:1])",
        "ValueError: q has 3 dims, shape (16, 4, 8); accepted: the 4 dims of bshd",
    ),
    "Two dtypes": Mistake(
        "attention(q.half(), k, v)",
        "attention(q.half(), k.half(), v.half())",
        "TypeError: k has dtype torch.float32 and q has torch.float16",
    ),
    "Two devices": Mistake(
        "attention(q, k.to('meta'), v)", "attention(q, k, v)", "ValueError: k is on meta and q is on cpu; accepted: the same device"
    ),
    "Heads that do not divide": Mistake(
        "attention(q, k[:, :, :3], v[:, :, :3])",
        "attention(q, k[:, :, :2], v[:, :, :2])",
        "ValueError: q has 4 heads and k and v have 3",
    ),
    "A backend that does not exist": Mistake(
        "attention(q, k, v, backend='flash')",
        "attention(q, k, v, backend='eager')",
        "ValueError: backend is 'flash'; accepted: auto, triton, cudnn, eager",
    ),
    "`out` with a gradient": Mistake(
        "attention(q.requires_grad_(), k, v, out=torch.empty_like(q))",
        "attention(q, k, v, out=torch.empty_like(q))",
        "ValueError: out is given and a gradient is needed. Call attention() under torch.no_grad(), or do not pass out.",
    ),
}

PACKED = {
    "`thd` without lengths": Mistake(
        "attention(x, x, x, qkv_format='thd')",
        "attention(x, x, x, **flexattn.packed([6, 10]))",
        "ValueError: cu_seqlens_q and cu_seqlens_kv are None with qkv_format 'thd'. Pass an int32 tensor [batch + 1]",
    ),
    "`cu_seqlens` in int64": Mistake(
        "attention(x, x, x, qkv_format='thd', cu_seqlens=cu_seqlens.long(), max_seqlen=10)",
        "attention(x, x, x, qkv_format='thd', cu_seqlens=cu_seqlens, max_seqlen=10)",
        "TypeError: cu_seqlens_q and cu_seqlens_kv have dtype torch.int64; accepted: torch.int32. Convert with .to(torch.int32)",
    ),
    "`cu_seqlens` as a list": Mistake(
        "attention(x, x, x, qkv_format='thd', cu_seqlens=[0, 6, 16], max_seqlen=10)",
        "attention(x, x, x, **flexattn.packed([6, 10]))",
        "TypeError: cu_seqlens_q is [0, 6, 16] (list); accepted: a tensor",
    ),
    "`cu_seqlens_k`": Mistake(
        "attention(x, x, x, qkv_format='thd', cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)",
        "attention(x, x, x, qkv_format='thd', cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens, max_seqlen=10)",
        "TypeError: attention() has no argument 'cu_seqlens_k', the name in FlashAttention, varlen_attn and transformers. Use "
        "cu_seqlens_kv.",
    ),
    "`cu_seqlens` past the end": Mistake(
        "attention(x, x, x, qkv_format='thd', cu_seqlens=cu_seqlens + cu_seqlens, max_seqlen=20)",
        "attention(x, x, x, qkv_format='thd', cu_seqlens=cu_seqlens, max_seqlen=10)",
        "ValueError: cu_seqlens_q[2] is 32; accepted: at most the total number of tokens, 16",
    ),
    "`max_seqlen` too small": Mistake(
        "attention(x, x, x, qkv_format='thd', cu_seqlens=cu_seqlens, max_seqlen=6)",
        "attention(x, x, x, qkv_format='thd', cu_seqlens=cu_seqlens, max_seqlen=10)",
        "ValueError: cu_seqlens_q[2] - cu_seqlens_q[1] is 10; accepted: at most max_seqlen_q, 6",
    ),
    "`max_seqlen` left out": Mistake(
        "attention(x, x, x, qkv_format='thd', cu_seqlens=cu_seqlens)",
        "attention(x, x, x, qkv_format='thd', cu_seqlens=cu_seqlens, max_seqlen=10)",
        "RuntimeWarning: max_seqlen_q is None with thd",
    ),
    "`causal` with two tensors of lengths": Mistake(
        "attention(x, x, x, causal=True, **flexattn.packed([6, 10], [6, 10]))",
        "attention(x, x, x, causal=True, **flexattn.packed([6, 10]))",
        "ValueError: causal is True and queries and keys have lengths of their own, so their diagonals may differ. Pass one tensor",
    ),
    "Lengths without a mask type": Mistake(
        "attention(q, k, v, seqused_kv=used)",
        "attention(q, k, v, seqused_kv=used, attn_mask_type='padding')",
        "Pass attn_mask_type='padding', which reads the lengths.",
    ),
    "Pages with a gradient": Mistake(
        "attention(q.requires_grad_(), pages, pages, page_table=table, seqused_kv=used, attn_mask_type='padding')",
        "attention(q, pages, pages, page_table=table, seqused_kv=used, attn_mask_type='padding')",
        "ValueError: page_table is given and a gradient is needed",
    ),
}

WORKS = {
    "causal": Mistake("attention(q, k, v, causal=True)", "attention(q, k, v, attn_mask_type='causal')", ""),
    "mask": Mistake("attention(q, k, v, mask=mask)", "attention(q, k, v, mask_mod=lambda b, h, i, j: mask[i, j])", ""),
    "bias alone": Mistake("attention(q, k, v, bias=bias)", "attention(q, k, v, bias=bias, bias_type='post_scale_bias')", ""),
    "window_size=4": Mistake(
        "attention(q, k, v, causal=True, window_size=4)", "attention(q, k, v, causal=True, window_size=(3, 0))", ""
    ),
    "thd with causal": Mistake(
        "attention(x, x, x, attn_mask_type='causal', **flexattn.packed([6, 10]))",
        "attention(x, x, x, attn_mask_type='padding_causal', **flexattn.packed([6, 10]))",
        "",
    ),
}

GROUPS = {
    "Names and positions": NAMES,
    "Masks, windows and scores": MASKS,
    "Shapes, dtypes and backends": SHAPES,
    "Packed sequences and caches": PACKED,
}
MISTAKES = {name: mistake for group in GROUPS.values() for name, mistake in group.items()}
SHOWN_WITH_TEXT = {  # on the page; the others are rows of a table
    "`True` by position",
    "`is_causal`",
    "`causal` with two lengths",
    "`window_size` without a diagonal",
    "`attn_mask_type` misspelt",
    "A mask of another size",
    "A mod that branches",
    "One query with a causal mask",
    "Heads before tokens in the default format",
    "Two dtypes",
    "`thd` without lengths",
    "`max_seqlen` left out",
    "`causal` with two tensors of lengths",
}


def names() -> dict[str, Any]:
    """Returns the names in the calls."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 16, 4, 8)
    return {
        "attention": flexattn.attention,
        "flexattn": flexattn,
        "torch": torch,
        "q": q,
        "k": k,
        "v": v,
        "x": torch.randn(16, 4, 8),
        "heads_first": torch.randn(1, 2, 256, 8),
        "mask": torch.ones(16, 16, dtype=torch.bool).tril(),
        "padding": torch.arange(16).expand(2, 16) >= torch.tensor([[9], [16]]),
        "bias": torch.randn(1, 4, 16, 16),
        "cu_seqlens": torch.tensor([0, 6, 16], dtype=torch.int32),
        "used": torch.tensor([5, 12], dtype=torch.int32),
        "pages": torch.randn(4, 8, 4, 8),
        "table": torch.tensor([[0, 1], [2, 3]], dtype=torch.int32),
        "fp8": torch.float8_e4m3fn,
        "scale": torch.ones(()),
    }


def text_of(call: str) -> str:
    """Returns the error or the warning of a call, with its type in front; "" if there is none."""
    call_cache.clear_cache()  # a warm call warns of nothing
    warn._warned.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            eval(call, names())
        except (TypeError, ValueError) as e:
            return f"{type(e).__name__}: {e}"
    ours = [w for w in caught if issubclass(w.category, RuntimeWarning)]
    return f"{ours[0].category.__name__}: {ours[0].message}" if ours else ""


@pytest.fixture(autouse=True)
def warns_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warn, "_warned", set())


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_names_the_way_out_which_runs(name: str) -> None:
    wrong, right, says = MISTAKES[name]
    found = text_of(wrong)
    assert says in found
    assert re.match(r"\w*(TypeError|ValueError|RuntimeWarning): \S", found)
    assert text_of(right) == ""


@pytest.mark.parametrize("name", WORKS)
def test_what_newcomers_write_means_what_they_mean(name: str) -> None:
    short, written_out, _ = WORKS[name]
    assert torch.equal(eval(short, names()), eval(written_out, names()))


def test_there_are_as_many_as_the_page_promises() -> None:
    assert len(MISTAKES) >= 40


def page() -> str:
    """Returns docs/errors.md."""
    lines = [
        "# Error messages",
        "",
        "This page lists common mistakes in calls of `attention`, the right call for each, and the longer messages.",
        "",
        "```py",
        "q, k, v = torch.randn(3, 2, 16, 4, 8)  # [batch, seq, heads, head dim]",
        "x = torch.randn(16, 4, 8)  # two packed sequences, of 6 and 10 tokens",
        "cu_seqlens = torch.tensor([0, 6, 16], dtype=torch.int32)",
        "mask = torch.ones(16, 16, dtype=torch.bool).tril()  # True where a query sees a key",
        "```",
        "",
        "Every message names the argument, its value, and what to do. An error of the arguments comes before any kernel runs.",
        "",
        "- On a CPU every call compares the lengths of its sequences with the tensors and with `max_seqlen`.",
        "- On a GPU that waits for the device. Set `FLEXATTN_CHECK=1` to make these checks there too.",
        "- A `BackendError` gives the reason of each backend. `flexattn.explain` prints the same text without a call.",
        "- In the tables `q, k, v` or the packed `x, x, x` come before the arguments, if a row does not name its tensors.",
    ]
    for title, group in GROUPS.items():
        lines += ["", f"## {title}"]
        rows = []
        for name, (wrong, right, _) in group.items():
            wrong, right = (call.replace("'", '"') for call in (wrong, right))
            if name in SHOWN_WITH_TEXT:
                text = textwrap.wrap(text_of(wrong), 84, break_long_words=False, break_on_hyphens=False)
                calls = [f"{wrong}  # wrong", f"{right}  # right"]
                lines += ["", f"### {name}", "", "```py", *calls, "```", "", "```text", *text, "```"]
            else:
                rows.append(f"| {name} | `{arguments(wrong)}` | `{arguments(right)}` |")
        lines += [
            "",
            f"### More {title[0].lower()}{title[1:]}",
            "",
            "| mistake | wrong arguments | right arguments |",
            "|---|---|---|",
            *rows,
        ]
    return "\n".join(lines) + "\n"


def arguments(call: str) -> str:
    """Returns the arguments of a call, without a q, k and v in front."""
    return call.removeprefix("attention(").removesuffix(")").removeprefix("q, k, v, ").removeprefix("x, x, x, ")


def test_the_page_shows_what_calls_say() -> None:
    """Run `python -m tests.api.test_first_mistakes` after a change."""
    assert PAGE.read_text("utf-8") == page()


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
