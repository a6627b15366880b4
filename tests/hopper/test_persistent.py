"""The fused backward for sm_90 with persistent programs: the calls that it is chosen for, and its gradients on such a GPU.

`test_emulated.py` and `test_mods.py` run it in the emulator, and `test_attention.py` compiles it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flexattn.kernels_triton.common.problem import Problem
from flexattn.kernels_triton.hopper import conditions
from tests.hopper.test_attention import BANDS, UNEVEN, check, choose_persistent, on_hopper
from tests.hopper.test_attention import launches as launches


def test_persistent_programs_are_chosen_by_mask_length_and_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conditions, "num_processors", lambda device: 132)
    lengths = (256, 512, 1024, 2048, 4096, 8192, 16384)
    window = {"window_left": 1023, "window_right": 0}
    for dim, more, chosen in (
        (64, {}, (512, 1024, 2048, 4096)),
        (64, {"window_right": 0}, (1024, 2048, 4096, 8192)),
        (64, window, (2048, 4096, 8192)),
        (128, {}, (2048, 4096)),
        (128, {"window_right": 0}, (1024, 2048, 4096, 8192)),
        (128, window, (2048, 4096, 8192)),
        (64, {"softcap": 30.0}, ()),
        (128, {"dropout_p": 0.1, "window_right": 0}, ()),
        (128, {"block_mask": object()}, ()),
    ):
        for length in lengths:
            x = torch.empty((16384 // length, length, 2048 // dim, dim), dtype=torch.bfloat16, device="meta")
            tile = conditions.fused_tile(Problem(x, x, x, softmax_scale=0.1, **more))
            assert tile.is_persistent == (length in chosen), (dim, more, length)
            assert dim == 64 or not tile.is_persistent or tile.dq_stages == 1  # else shared memory is too small
            assert dim == 64 or more or (tile.dq_stages == 1) == (length >= 2048)
            grouped = x[:, :, : x.shape[2] // 4]
            assert not conditions.fused_tile(Problem(x, grouped, grouped, softmax_scale=0.1, **more)).is_persistent
    short = torch.empty((32, 512, 32, 64), dtype=torch.bfloat16, device="meta")
    grouped = short[:, :, :8]
    assert "1024 tokens" in str(conditions.fused_slower(Problem(short, grouped, grouped, softmax_scale=0.1)))


@on_hopper
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (40, 72)], ids=str)
@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("fmt", ["bshd", "sbhd", "thd", "sbhd_2thd"])
def test_persistent_programs(
    fmt: str, band: dict[str, Any], dims: tuple[int, int], launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    choose_persistent(monkeypatch)
    heads = {"num_heads": 6, "num_heads_kv": 6 if "300" in str(band) else 2, "head_dim_qk": dims[0], "head_dim_v": dims[1]}
    check(launches, {"attn_mask_type": "padding", **band}, qkv_format=fmt, padding=True, gap=13, **heads, **UNEVEN)


@on_hopper
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("mask", ["no_mask", "causal", "causal_bottom_right"])
@pytest.mark.parametrize(("sq", "skv"), [(1024, 1024), (700, 333), (333, 700), (1, 500), (300, 1)])
def test_persistent_programs_of_dense_calls(
    sq: int, skv: int, mask: str, dim: int, launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    choose_persistent(monkeypatch)
    heads = {"num_heads": 24, "num_heads_kv": 24, "head_dim_qk": dim, "head_dim_v": dim}
    check(launches, {"attn_mask_type": mask}, lengths_q=[sq] * 3, lengths_kv=[skv] * 3, **heads)
