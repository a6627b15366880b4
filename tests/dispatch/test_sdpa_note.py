"""An explanation says if PyTorch's own attention was measured to be faster than the portable kernels."""

from __future__ import annotations

import pytest

from flexattn import __main__ as command_line
from flexattn.kernels_triton.common import crossovers
from flexattn.kernels_triton.common.crossovers import Rule
from flexattn.kernels_triton.runtime import interpreter

RULE = Rule(
    use="sdpa",
    direction="forward",
    capability=(80, 86),
    dtype="bfloat16",
    head_dim_qk=128,
    head_dim_v=128,
    mask="causal",
    layout="dense",
    kind="plain",
    tokens=(1024, 4096),
    gain=1.25,
    source="older_tiles_h100.json",
)
NOTE = "slower than SDPA: PyTorch's FlashAttention-2 was 1.25 times as fast in a run of sm_80 code on a newer GPU"


@pytest.mark.parametrize(
    ("arguments", "is_said"),
    [
        (("--q", "2,1024,8,128", "--mask", "causal", "--capability", "8.0"), True),
        (("--q", "2,1024,8,128", "--mask", "causal", "--capability", "8.6"), True),
        (("--q", "2,1024,8,128", "--mask", "causal", "--capability", "9.0"), False),
        (("--q", "2,1024,8,64", "--mask", "causal", "--capability", "8.0"), False),
        (("--q", "2,1024,8,128", "--capability", "8.0"), False),
        (("--q", "2,1024,8,128", "--mask", "causal", "--softcap", "20", "--capability", "8.0"), False),
    ],
)
def test_a_slower_call_is_said_to_be_slower(
    arguments: tuple[str, ...], is_said: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(crossovers.RULES, "sdpa", (RULE,))
    assert command_line.main(["explain", *arguments, "--no-grad"]) == 0
    assert (NOTE in " ".join(capsys.readouterr().out.split())) == is_said


@pytest.mark.parametrize("use", ["sdpa", "sdpa beside mma.sync"])
def test_the_kernels_for_mma_sync_have_rules_of_their_own(
    use: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If they are chosen, a measurement beside the portable kernels says nothing."""
    monkeypatch.setattr(interpreter, "INTERPRETED", False)  # nothing is run
    monkeypatch.setenv("FLEXATTN_HOPPER", "always")
    for name in ("sdpa", "sdpa beside mma.sync"):
        monkeypatch.setitem(crossovers.RULES, name, (RULE,) if name == use else ())
    arguments = ("--q", "2,1024,8,128", "--mask", "causal", "--capability", "8.0", "--no-grad")
    assert command_line.main(["explain", *arguments]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "mma.sync" in said
    assert (NOTE in said) == (use != "sdpa")
