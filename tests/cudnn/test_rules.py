"""Calls that the cuDNN backend refuses before it asks cuDNN: devices, versions, missing parts, and known wrong results."""

from __future__ import annotations

import re
from collections import OrderedDict
from typing import Any

import pytest
import torch

from flexattn.dispatch import cudnn_backend, cudnn_rules
from flexattn.dispatch.cudnn_rules import ALWAYS, KNOWN_BAD, KnownBad
from flexattn.dispatch.spec import FP32_GRADIENTS, AttentionSpec, Band, Fp8, Results
from flexattn.testing import make_call, make_inputs
from tests.conftest import ROOT, FreshPython
from tests.dispatch.test_select import ON_CUDA

SPEC = ON_CUDA._replace(dtype=torch.bfloat16, head_dim_qk=128, head_dim_v=128, length_q=1024, length_kv=1024)

FP8 = {"dtype": torch.float8_e4m3fn, "fp8": Fp8((False, False, False), 0, torch.bfloat16, torch.float8_e5m2, False)}

# For each row of KNOWN_BAD: its subject, and near misses that it must leave alone.
CASES: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "TransformerEngine/issues/3249": (
        {"softmax_type": "learnable", "q_format": "thd", "kv_format": "thd", "padding": True},
        [{"softmax_type": "learnable", "padding": True}, {"q_format": "thd", "kv_format": "thd", "padding": True}],
    ),
    "nvte_get_fused_attn_backend": (
        {"head_dim_qk": 256, "head_dim_v": 128},
        [
            {"head_dim_qk": 192, "head_dim_v": 128},
            {"head_dim_qk": 256, "head_dim_v": 256},
            {"head_dim_qk": 128, "head_dim_v": 64},
            {"head_dim_qk": 256, "head_dim_v": 128, "capability": (10, 0)},
        ],
    ),
    "cudnn-frontend/issues/1072": ({"length_q": 1}, [{"length_q": 2}]),
    "pytorch/issues/174245": ({"dropout": True}, [{"dropout": True, "dropout_in_sixteenths": True}]),
    "cudnn-frontend/issues/1009": (
        {**FP8, "band": Band(9, 0, False), "padding": True},
        [
            {"band": Band(9, 0, False), "padding": True},
            {**FP8, "band": Band(9, 0, False)},
            {**FP8, "band": Band(None, 0, False), "padding": True},
        ],
    ),
    "pytorch/issues/193893": (
        {"capability": (10, 0), "length_q": 1, "num_heads_kv": 4},
        [
            {"capability": (9, 0), "length_q": 1, "num_heads_kv": 4},
            {"capability": (10, 0), "length_q": 2, "num_heads_kv": 4},
            {"capability": (10, 0), "length_q": 1, "num_heads_kv": 8},
        ],
    ),
    "cudnn-frontend/issues/981": (
        {**FP8, "capability": (10, 3), "head_dim_qk": 256, "head_dim_v": 256},
        [
            {**FP8, "capability": (9, 0), "head_dim_qk": 256, "head_dim_v": 256},
            {**FP8, "capability": (10, 3), "head_dim_qk": 192},
            {"capability": (10, 3), "head_dim_qk": 256, "head_dim_v": 256},
        ],
    ),
    "TransformerEngine/issues/2186": ({"q_format": "thd", "kv_format": "thd", "padding": True}, [{"padding": True}]),
    "TransformerEngine/pull/2994": (
        {**FP8, "q_format": "thd", "kv_format": "thd", "padding": True},
        [{"q_format": "thd", "kv_format": "thd", "padding": True}, {**FP8, "padding": True}],
    ),
}


def case_of(row: KnownBad) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    (found,) = [case for issue, case in CASES.items() if issue in row.issue]
    return found


@pytest.mark.parametrize("row", KNOWN_BAD, ids=lambda row: row.issue.rsplit("/", 1)[-1])
def test_known_bad_row(row: KnownBad) -> None:
    affected, near = case_of(row)
    versions = [max(row.first, cudnn_backend.OLDEST_LIBRARY), *([row.fixed - 1] if row.fixed != ALWAYS else [])]
    for direction in ("forward", "backward"):
        for version in versions:
            reason = cudnn_rules.known_bad(SPEC._replace(**affected), direction, version)
            assert (reason is not None and row.issue in reason) == (direction in row.directions)
        for change in near:
            assert row.issue not in str(cudnn_rules.known_bad(SPEC._replace(**change), direction, versions[0]))
    for version in (row.first - 1, row.fixed):
        assert row.issue not in str(cudnn_rules.known_bad(SPEC._replace(**affected), row.directions[0], version))


PACKED = {"q_format": "thd", "kv_format": "thd", "padding": True}
REFUSED: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {  # direction, subject, and a near miss
    "takes no gradient of lse": ("backward", {"needs_lse_grad": True}, {}),
    "deterministic backward needs memory": ("backward", {"deterministic": True}, {}),
    "bias over packed sequences": (
        "forward",
        {**PACKED, "bias_type": "post_scale_bias", "bias_dims": (True, True, True, True)},
        {"padding": True, "bias_type": "post_scale_bias", "bias_dims": (True, True, True, True)},
    ),
    "dropout over packed sequences": ("forward", {**PACKED, "dropout": True}, {"padding": True, "dropout": True}),
    "adds a bias after the scale": (
        "forward",
        {"bias_type": "pre_scale_bias", "bias_dims": (True, True, True, True)},
        {"bias_type": "post_scale_bias", "bias_dims": (True, True, True, True)},
    ),
    "does not support dropout with a mask on the bottom-right diagonal": (
        "forward",
        {"dropout": True, "band": Band(None, 0, True)},
        {"dropout": True, "band": Band(None, 0, False)},
    ),
    "multiples of 8 up to 256": ("backward", {"head_dim_v": 264}, {"head_dim_v": 248}),
    "no softcap": ("forward", {"softcap": True}, {}),
    "has no causal mask or window": (
        "forward",
        {"block_size": (128, 128)},
        {"block_size": (128, 128), "band": Band(None, None, False)},
    ),
    "does not support a single key": ("forward", {"length_kv": 1}, {"length_kv": 2}),
    "does not return max_logit with a sink": (
        "forward",
        {"softmax_type": "learnable", "return_max_logit": True},
        {"softmax_type": "learnable"},
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_rules_refuse_with_a_reason(reason: str) -> None:
    direction, refused, near = REFUSED[reason]
    assert reason in str(cudnn_backend.rule_error(SPEC._replace(**refused), direction))
    assert cudnn_backend.rule_error(SPEC._replace(**near), direction) is None


def test_every_known_bad_row_has_a_case_and_a_public_source() -> None:
    assert len(KNOWN_BAD) == len(CASES)
    for row in KNOWN_BAD:
        assert row.issue.startswith("https://github.com/")
        assert row.what
        assert case_of(row)


def test_the_rules_know_every_field_of_a_spec() -> None:
    """A new feature must not reach a graph without it: if you add a field, decide here how cuDNN treats it."""
    decided = {
        *("q_format", "kv_format", "dtype", "num_heads", "num_heads_kv", "head_dim_qk", "head_dim_v", "padding", "band"),
        *("bias_type", "bias_dims", "softmax_type", "softcap", "dropout", "return_max_logit", "needs_grad", "needs_bias_grad"),
        *("deterministic", "device_type", "capability", "length_q", "length_kv", "dropout_in_sixteenths", "needs_lse_grad"),
        *(
            "mods",
            "block_size",
            "fp8",
            "is_part",
            "results",
            "page_size",
            "batch_invariant",
            "kv_dtype",
            "has_origin",
            "bias_is_shared",
            "kv_lists",
            "kv_block",
        ),
    }
    assert set(AttentionSpec._fields) == decided


def test_a_sink_of_a_part_of_the_keys_has_no_gradient_on_cudnn() -> None:
    """The queries that see none of them are omitted, though their out is not 0."""
    part = SPEC._replace(softmax_type="learnable", is_part=True)
    assert "dsoftmax_offset" in str(cudnn_backend.rule_error(part, "backward"))
    for near in (part._replace(softmax_type="vanilla"), part._replace(is_part=False)):
        assert cudnn_backend.rule_error(near, "backward") is None


@pytest.mark.parametrize("results", [Results(fp32=name) for name in FP32_GRADIENTS[1:]] + [Results(fp32_out=True)])
def test_cudnn_gives_16_bits(results: Results) -> None:
    directions = [d for d in ("forward", "backward") if cudnn_backend.rule_error(SPEC._replace(results=results), d)]
    assert directions == ["forward" if results.fp32_out else "backward"]


@pytest.mark.parametrize(
    "affected",
    [
        {"band": Band(9, None, False), "q_format": "thd", "kv_format": "thd", "padding": True},
        {"band": Band(9, None, True), "padding": True},
        {"band": Band(9, 4, False), "length_q": 2048},
    ],
)
def test_no_window_in_fp8_may_leave_a_query_without_a_key(affected: dict[str, Any]) -> None:
    spec = SPEC._replace(**{**FP8, **affected})
    assert "issues/1009" in str(cudnn_rules.known_bad(spec, "forward", 92300))
    assert "issues/1009" not in str(cudnn_rules.known_bad(spec, "backward", 92300))


FP8_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "scales by head": ({"fp8": FP8["fp8"]._replace(descale_dims=(False, True, False))}, "granularity='tensor'"),
    "head dims": ({"head_dim_qk": 40, "head_dim_v": 40}, "head dims are 40 and 40"),
    "causal, bottom right": ({"band": Band(None, 0, True)}, "attn_mask_type='causal'"),
    "bias": ({"bias_type": "post_scale_bias", "bias_dims": (True,) * 4}, "do not support a bias"),
    "sink": ({"softmax_type": "learnable"}, "does not compile"),
    "softcap": ({"softcap": True}, "no softcap"),
    "dropout": ({"dropout": True}, "is untested"),
    "block mask": ({"block_size": (128, 128)}, "is not supported here in FP8"),
}


@pytest.mark.parametrize("name", FP8_REFUSED)
def test_features_that_cudnn_lacks_in_fp8_are_refused(name: str) -> None:
    change, reason = FP8_REFUSED[name]
    for direction in ("forward", "backward"):
        assert cudnn_backend.rule_error(SPEC._replace(**FP8), direction) is None
        assert reason in str(cudnn_backend.rule_error(SPEC._replace(**{**FP8, **change}), direction))


def test_fp8_over_packed_sequences_has_no_backward_on_cudnn() -> None:
    spec = SPEC._replace(**FP8, q_format="thd", kv_format="thd", padding=True)
    assert cudnn_backend.rule_error(spec, "forward") is None
    assert "does not support packed sequences" in str(cudnn_backend.rule_error(spec, "backward"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device_type": "cpu", "capability": None}, "cuDNN runs on CUDA devices, not on 'cpu'"),
        ({"capability": (7, 5)}, "need compute capability 8.0, and this device has 7.5; use backend='eager'"),
        ({"capability": None}, "this GPU's compute capability is unknown, and cuDNN's graphs depend on it; use backend='triton'"),
    ],
)
def test_other_devices(change: dict[str, Any], reason: str) -> None:
    for direction in ("forward", "backward"):
        assert reason in str(cudnn_backend.unsupported(SPEC._replace(**change), direction))


FAKE = "import sys, types; m = types.ModuleType('cudnn'); m.__spec__ = types.SimpleNamespace(); sys.modules['cudnn'] = m\n"
ASK = "from flexattn.dispatch.cudnn_backend import library_error; print(library_error())"


MISSING_PARTS = {
    "no frontend": ("import sys; sys.modules['cudnn'] = None", "not installed; pip install 'nvidia-cudnn-frontend>=1.27'"),
    "broken frontend": (
        "import sys, importlib.util as u; real = u.find_spec\n"
        "u.find_spec = lambda name, *a: object() if name == 'cudnn' else real(name, *a)\n"
        "sys.modules['cudnn'] = None",
        "is installed and cannot be imported (ModuleNotFoundError: ",
    ),
    "old frontend": (
        FAKE + "m.__version__ = '1.26.0'",
        "the cuDNN frontend is version 1.26.0; pip install 'nvidia-cudnn-frontend>=1.27'",
    ),
    "no library": (
        FAKE + "m.__version__ = '1.28.0'\ndef no():\n    raise RuntimeError('no symbol')\nm.backend_version = no",
        "the cuDNN library cannot be loaded (no symbol); pip install nvidia-cudnn-cu13",
    ),
    "old library": (
        FAKE + "m.__version__ = '1.40.0'\nm.backend_version = lambda: 91500",
        "the cuDNN library is 9.15.0, older than 9.15.1; pip install -U nvidia-cudnn-cu13",
    ),
    "all there": (FAKE + "m.__version__ = '1.32.0'\nm.backend_version = lambda: 92400", "None"),
}
# Each setup runs in a process that is forked after the imports, which take most of the time.
ASK_EACH = f"""
import os, sys
import flexattn.dispatch.cudnn_backend
for setup in {[setup for setup, _ in MISSING_PARTS.values()]}:
    if not (child := os.fork()):
        exec(setup + "\\n{ASK}")
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


def test_each_missing_part_is_one_clear_reason(forked_python: FreshPython) -> None:
    ran = forked_python("-c", ASK_EACH)
    assert ran.returncode == 0, ran.stderr
    for line, (name, (_, said)) in zip(ran.stdout.splitlines(), MISSING_PARTS.items(), strict=True):
        assert said in line, name


def test_a_cudnn_whose_packed_backward_is_wrong_has_exact_plans_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded-up plans are for packed sequences."""
    monkeypatch.setattr(cudnn_backend, "library_error", lambda: None)
    spec, x = make_call(make_inputs(lengths_q=[64], device="meta"))
    spec = spec._replace(device_type="cuda", capability=(9, 0))
    for version, is_bucketed in ((91799, False), (91800, True), (91501, False)):
        monkeypatch.setattr(cudnn_backend, "_version", lambda version=version: version)
        monkeypatch.setattr(cudnn_backend, "exact_shapes", OrderedDict())
        monkeypatch.setattr(cudnn_backend, "EXACT_SHAPES", 0)
        assert cudnn_backend._is_bucketed(spec, x) is is_bucketed


@pytest.mark.parametrize(("version", "said"), [(91900, None), (91501, "with cuDNN 9.15.1"), (92400, "with cuDNN 9.24.0")])
def test_versions_with_which_no_result_was_checked_say_so(version: int, said: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn_backend, "library_error", lambda: None)
    monkeypatch.setattr(cudnn_backend, "_version", lambda: version)
    for page_size in (0, 16):
        found = cudnn_backend.not_run_yet(SPEC._replace(page_size=page_size))
        wanted = said or ("over pages" if page_size else None)
        assert found == (wanted and f"not run {wanted} yet, so no result was checked")


def test_the_oldest_versions_are_those_of_the_requirement_and_of_ci() -> None:
    frontend, library = ".".join(map(str, cudnn_backend.OLDEST_FRONTEND)), cudnn_rules.version_text(cudnn_backend.OLDEST_LIBRARY)
    assert f'"nvidia-cudnn-frontend>={frontend}; ' in (ROOT / "pyproject.toml").read_text()
    ci, page = (ROOT / ".ci" / "run").read_text(), (ROOT / "docs" / "cudnn.md").read_text()
    assert re.search(rf"nvidia-cudnn-cu13=={re.escape(library)}\.\d+ nvidia-cudnn-frontend=={re.escape(frontend)}\.", ci)
    assert f"supports cuDNN from {library} on and its frontend from {frontend} on" in page
    for version in re.findall(r"nvidia-cudnn-cu13==(\d+\.\d+\.\d+)\.", ci):
        built = "(built by `.ci/run`|`.ci/run` builds some)"
        assert re.search(rf"^\| {re.escape(version)} +\| yes +\| all[,;].*{built}", page, re.MULTILINE)


def test_without_cudnn_a_call_names_what_to_install(forked_python: FreshPython) -> None:
    code = (
        "import sys; sys.modules['cudnn'] = None\n"
        "import torch, flexattn\n"
        "from flexattn import ops\n"
        "real = ops.make_spec\n"
        "ops.spec_to_run = lambda x, s: real(x, s, (9, 0))._replace(device_type='cuda')\n"
        "q = torch.randn(1, 9, 2, 8, dtype=torch.bfloat16)\n"
        "try:\n    flexattn.attention(q, q, q, backend='cudnn')\n"
        "except flexattn.BackendError as e:\n    print(e)\n"
    )
    ran = forked_python("-c", code)
    assert "cudnn: the cuDNN frontend is not installed; pip install" in ran.stdout, ran.stderr
