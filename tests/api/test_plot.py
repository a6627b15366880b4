"""`plot_mask`: the scores that it draws equal the formulas of these tests, and the picture shows them."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor

from flexattn import __main__ as command_line
from flexattn import create_block_mask, mods, ops, plot, plot_mask
from flexattn.functional import bind_call

pyplot = pytest.importorskip("matplotlib.pyplot", reason="pictures need matplotlib")

SQ, SKV, HEADS = 24, 40, 4
NEG_INF = float("-inf")
QUERY, KEY = torch.arange(SQ)[:, None], torch.arange(SKV)
CU_Q, CU_KV = (torch.tensor(x, dtype=torch.int32) for x in ([0, 5, 5, 24], [0, 9, 12, 40]))


@pytest.fixture(autouse=True)
def no_figures() -> None:
    pyplot.close("all")


def tensors(fmt: str = "bshd", batch: int = 2) -> dict[str, Tensor]:
    shapes = {"q": (SQ, HEADS), "k": (SKV, 2), "v": (SKV, 2)}
    # Numbers that must not show.
    return {name: torch.full((batch, *shape, 8) if fmt == "bshd" else (*shape, 8), 7.0) for name, shape in shapes.items()}


def drawn(call: dict[str, object], batch: int | None = None, head: int = 0) -> Tensor:
    x, settings = bind_call(**call)
    return plot.scores_of_zero(ops.spec_to_run(x, settings), x, batch, head)


def hidden_where(hidden: Tensor, scores: Tensor | float = 0.0) -> Tensor:
    return (torch.zeros(SQ, SKV, dtype=torch.float64) + scores).masked_fill(hidden, NEG_INF)


def packed(causal: bool) -> Tensor:
    """Three sequences, of 5 and 9, 0 and 3, 19 and 28 tokens."""
    expected = torch.full((SQ, SKV), NEG_INF, dtype=torch.float64)
    for b in range(3):
        for i in range(int(CU_Q[b]), int(CU_Q[b + 1])):
            for j in range(int(CU_KV[b]), int(CU_KV[b + 1])):
                if not causal or i - CU_Q[b] >= j - CU_KV[b]:
                    expected[i, j] = 0.0
    return expected


def test_scores_are_those_of_dense_masks() -> None:
    call = tensors()
    assert torch.equal(drawn(call), hidden_where(KEY < 0))
    assert torch.equal(drawn(call | {"attn_mask_type": "causal"}), hidden_where(KEY > QUERY))
    bottom = {"attn_mask_type": "causal_bottom_right", "window_size": (6, 0)}
    assert torch.equal(drawn(call | bottom), hidden_where((KEY > QUERY + SKV - SQ) | (KEY < QUERY + SKV - SQ - 6)))
    assert torch.equal(
        drawn(call | {"mask_mod": mods.dilated_sliding_window(3, 2)}),
        hidden_where(((QUERY - KEY).abs() > 6) | ((QUERY - KEY) % 2 == 1)),
    )
    prefixes = {"mask_mod": mods.prefix_lm(torch.tensor([3, 11]))}
    assert torch.equal(drawn(call | prefixes, batch=1), hidden_where((KEY > QUERY) & (KEY >= 11)))


def test_scores_are_those_of_what_is_added() -> None:
    call = tensors() | {"attn_mask_type": "causal"}
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0])
    expected = hidden_where(KEY > QUERY, -0.25 * (QUERY - KEY).abs())
    assert torch.equal(drawn(call | {"bias_type": "alibi", "alibi_slopes": slopes}, head=1), expected)
    assert torch.equal(drawn(call | {"score_mod": mods.alibi(slopes)}, head=1), expected)
    bias = torch.randn(2, HEADS, SQ, SKV, generator=torch.Generator().manual_seed(0))
    shown = drawn(
        call | {"bias_type": "post_scale_bias", "bias": bias, "softmax_type": "off-by-one", "dropout_p": 0.5}, batch=1, head=3
    )
    assert torch.equal(shown, hidden_where(KEY > QUERY, bias[1, 3].double()))


def test_scores_are_those_of_lengths() -> None:
    lengths = {
        "cu_seqlens_q": torch.tensor([0, 7, 31], dtype=torch.int32),
        "cu_seqlens_kv": torch.tensor([0, 40, 53], dtype=torch.int32),
    }
    dense = tensors() | lengths | {"attn_mask_type": "padding"}
    assert torch.equal(drawn(dense), hidden_where((QUERY >= 7).expand(SQ, SKV)))
    assert torch.equal(drawn(dense, batch=1), hidden_where((KEY >= 13).expand(SQ, SKV)))
    thd = tensors("thd") | {"qkv_format": "thd", "cu_seqlens_q": CU_Q, "cu_seqlens_kv": CU_KV}
    thd |= {"max_seqlen_q": SQ, "max_seqlen_kv": SKV}
    for mask, causal in (("padding", False), ("padding_causal", True)):
        whole = packed(causal)
        assert torch.equal(drawn(thd | {"attn_mask_type": mask}), whole)
        assert torch.equal(drawn(thd | {"attn_mask_type": mask}, batch=2), whole[5:, 12:])


def test_pictures_of_caches_have_their_lengths() -> None:
    lengths = torch.tensor([13, SKV], dtype=torch.int32)
    call = {"attn_mask_type": "padding_causal_bottom_right", "seqused_kv": lengths}
    expected = (KEY < 13) & (KEY <= QUERY + 13 - SQ)
    assert torch.equal(torch.tensor(plot_mask(**tensors(), **call).images[0].get_array()), expected)
    pages = {
        "k": torch.zeros(10, 8, 2, 8),
        "v": torch.zeros(10, 8, 2, 8),
        "page_table": torch.arange(10, dtype=torch.int32).view(2, 5),
    }
    assert torch.equal(torch.tensor(plot_mask(**tensors() | pages, **call).images[0].get_array()), expected)


def test_scores_are_those_of_block_masks() -> None:
    mask_mod = mods.sliding_window(3, 5)
    block_mask = create_block_mask(mask_mod, None, None, SQ, SKV, device="cpu", BLOCK_SIZE=16)
    assert torch.equal(drawn(tensors() | {"block_mask": block_mask}), hidden_where((QUERY - KEY > 3) | (KEY - QUERY > 5)))
    ax = plot_mask(**tensors(), block_mask=block_mask)
    assert sorted(line.get_xdata()[0] for line in ax.lines if line.get_xdata()[0] == line.get_xdata()[1]) == [15.5, 31.5]


def test_long_sides_are_thinned_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    thd = tensors("thd") | {"qkv_format": "thd", "cu_seqlens_q": CU_Q, "cu_seqlens_kv": CU_KV, "attn_mask_type": "padding_causal"}
    thd |= {"max_seqlen_q": SQ, "max_seqlen_kv": SKV}
    monkeypatch.setattr(plot, "MOST_POINTS", 10)  # every third query, every fourth key
    monkeypatch.setattr(plot, "MOST_AT_ONCE", 1000)
    assert torch.equal(drawn(thd), packed(True)[::3, ::4])


def test_the_picture_has_the_scores() -> None:
    image = plot_mask(**tensors(), attn_mask_type="causal").images[0]
    assert torch.equal(torch.tensor(image.get_array()), KEY <= QUERY)
    figure, ax = pyplot.subplots()
    assert plot_mask(**tensors(), bias_type="alibi", alibi_slopes=torch.ones(HEADS), attn_mask_type="causal", ax=ax) is ax
    shown = ax.images[0].get_array()
    assert ax.images[0].get_extent() == [-0.5, SKV - 0.5, SQ - 0.5, -0.5]
    assert torch.equal(torch.tensor(shown.mask), KEY > QUERY)
    assert shown.min() == 1 - SQ
    assert [a.get_ylabel() for a in figure.axes] == ["query", "a score of 0 becomes"]


def test_wrong_arguments_are_named() -> None:
    call = tensors()
    with pytest.raises(ValueError, match="batch is 2; accepted: an int from 0 to 1, because the call has 2"):
        plot_mask(**call, batch=2)
    with pytest.raises(ValueError, match="head is -1; accepted: an int from 0 to 3"):
        plot_mask(**call, head=-1)
    with pytest.raises(TypeError, match=r"head is 1.0 \(float\); accepted: an int"):
        plot_mask(**call, head=1.0)
    with pytest.raises(ValueError, match="there are 0 queries and 40 keys to draw"):
        plot_mask(**call | {"q": call["q"][:, :0]})
    with pytest.raises(TypeError, match="is_causal"):
        plot_mask(**call, is_causal=True)


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'flexattn\[bench\]'"):
        plot_mask(**tensors())


def test_explain_draws(tmp_path, capsys) -> None:
    question = "--q 96,4,64 --format thd --batch 3 --mask padding_causal --softmax learnable --bias alibi --fp8 tensor"
    arguments = ["explain", *question.split()]
    assert command_line.main([*arguments, "--picture", str(tmp_path / "a.png")]) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    values = pyplot.gcf().axes[0].images[0].get_array()
    i, j = torch.arange(96)[:, None], torch.arange(96)
    assert torch.equal(torch.tensor(values.mask), (i < j) | (i // 32 != j // 32))
    with pytest.raises(SystemExit):
        command_line.main([*arguments, "--picture", str(tmp_path / "a.xyz")])
    assert "'xyz' is not supported" in capsys.readouterr().err
