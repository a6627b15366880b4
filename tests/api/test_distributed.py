"""Two processes on a CPU: tensor parallelism by DTensors, FSDP2 and DDP. The cases are in distributed_cases.py."""

from __future__ import annotations

import inspect
import os
import socket
import subprocess
import sys
from typing import Any

import pytest
import torch

import flexattn
from flexattn import sharded
from tests.conftest import ROOT, SETTINGS, FreshPython


@pytest.mark.slow
def test_two_processes() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {name: value for name, value in os.environ.items() if not name.startswith(SETTINGS)}
    environment |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.support.distributed_cases"]
    started = [
        subprocess.Popen([*command, str(rank), port], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=300)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], "\n".join(outputs)


def test_every_argument_reaches_a_sharded_call(monkeypatch: pytest.MonkeyPatch) -> None:
    class DTensor(torch.Tensor):
        pass

    seen: list[dict[str, Any]] = []
    q = torch.randn(1, 3, 2, 8).as_subclass(DTensor)
    with pytest.raises(ValueError, match="the call is in FP8"):
        flexattn.attention(q, q, q, fp8_recipe=flexattn.fp8.Recipe())
    monkeypatch.setattr(sharded, "attend_sharded", lambda attend, q, k, v, arguments, slopes: seen.append(arguments))
    flexattn.attention(q, q, q)
    short_forms = {"causal", "cu_seqlens", "max_seqlen", "mask"}
    assert {"q", "k", "v", *seen[0]} == inspect.signature(flexattn.attention).parameters.keys() - short_forms
    flexattn.attention(q, q, q, causal=True, mask=torch.ones(3, 3))
    assert (seen[1]["attn_mask_type"], seen[1]["bias_type"]) == ("causal", "post_scale_bias")


SHARDED_SEQUENCE = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
import flexattn

assert "flexattn.distributed" not in sys.modules
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
whole = torch.randn(3, 1, 6, 2, 8).unbind()
qkv = [distribute_tensor(t, mesh, [Shard(1)]) for t in whole]
out = flexattn.attention(*qkv, attn_mask_type="causal")
assert list(out.placements) == [Shard(1)], out.placements
torch.testing.assert_close(out.full_tensor(), flexattn.attention(*whole, attn_mask_type="causal"))
ends = torch.tensor([0, 6], dtype=torch.int32)
out = torch.empty(1, 6, 2, 8)
try:
    flexattn.attention(*qkv, out=out)
except ValueError as e:
    assert "out is given and q, k or v is a DTensor" in str(e)
else:
    raise AssertionError("out was taken")
assert list(flexattn.attention(*qkv, causal=True, return_lse=True).out.placements) == [Shard(1)]
lengths = {"attn_mask_type": "padding", "cu_seqlens_q": ends, "cu_seqlens_kv": ends}
assert list(flexattn.attention(*qkv, **lengths).placements) == [Replicate()]
"""


def test_a_sharded_sequence_stays_so_whether_or_not_ranks_were_imported(forked_python: FreshPython) -> None:
    ended = forked_python("-c", SHARDED_SEQUENCE)
    assert ended.returncode == 0, ended.stderr
