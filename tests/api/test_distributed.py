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
    monkeypatch.setattr(sharded, "attend_sharded", lambda attend, q, k, v, arguments: seen.append(arguments))
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
used, table = torch.tensor([5], dtype=torch.int32), torch.tensor([[0]], dtype=torch.int32)
pages = {"attn_mask_type": "padding", "seqused_kv": used}
spread = [distribute_tensor(t, mesh, [Replicate()]) for t in (*whole, table)]
out = flexattn.attention(*spread[:3], page_table=spread[3], **pages)
torch.testing.assert_close(out.full_tensor(), flexattn.attention(*whole, page_table=table, **pages))
lengths = {"attn_mask_type": "padding", "cu_seqlens_q": ends, "cu_seqlens_kv": ends}
assert list(flexattn.attention(*qkv, **lengths).placements) == [Replicate()]
"""

# Continues in the same process. A DTensor beside plain tensors, or in a mod, is refused by name.
MIXED = """
x, used = torch.randn(2, 8, 4, 16), torch.zeros(2, dtype=torch.int32)
whole, heads = distribute_tensor(x, mesh, [Replicate()]), distribute_tensor(torch.rand(4), mesh, [Replicate()])
visible = distribute_tensor(torch.ones(8, 8, dtype=torch.bool), mesh, [Replicate()])
score_mod = lambda score, b, h, i, j: score + heads[h]
with_tensors = lambda score, b, h, i, j, slopes: score + slopes[h]
cases = {
    "heads, which score_mod": lambda: flexattn.attention(whole, whole, whole, score_mod=score_mod),
    "visible, which": lambda: flexattn.attention(whole, whole, whole, mask_mod=lambda b, h, i, j: visible[i, j]),
    "mask, which": lambda: flexattn.attention(whole, whole, whole, mask=visible),
    "tensors_0, which": lambda: flexattn.attention(x, x, x, score_mod=with_tensors, score_mod_tensors=[heads]),
    "bias is": lambda: flexattn.attention(x, x, x, bias=whole[:1].transpose(1, 2)[..., :8]),
    "softmax_offset is": lambda: flexattn.attention(x, x, x, softmax_offset=heads),
    "visible is": lambda: flexattn.create_block_mask(lambda b, h, i, j: visible[i, j], None, None, 8, 8, "cpu"),
    "k_new is": lambda: flexattn.append_kv(x, x.clone(), whole, whole, seqused_kv=used),
    "x is": lambda: flexattn.fp8.quantize(whole),
}
for name, call in cases.items():
    try:
        call()
    except TypeError as error:
        assert str(error).startswith(name) and "a DTensor; accepted: a plain tensor" in str(error), error
    else:
        raise AssertionError(name)
with_heads = flexattn.attention(whole, whole, whole, score_mod=with_tensors, score_mod_tensors=[heads]).to_local()
mod = lambda score, b, h, i, j, local=heads.to_local(): score + local[h]
assert torch.equal(with_heads, flexattn.attention(x, x, x, score_mod=mod))
"""


def test_a_sharded_sequence_stays_so_whether_or_not_ranks_were_imported(forked_python: FreshPython) -> None:
    ended = forked_python("-c", SHARDED_SEQUENCE + MIXED)
    assert ended.returncode == 0, ended.stderr


# Rank 1 of two. Its collectives send nothing, so its results are compared with its part of those of one process.
SECOND_RANK = """
import sys
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
import flexattn

dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
mesh = init_device_mesh("cpu", (2,))
whole = torch.randn(3, 4, 8, 4, 16, generator=torch.Generator().manual_seed(0)).unbind()


def parts(dim):
    return [DTensor.from_local(t.chunk(2, dim)[1], mesh, [Shard(dim)]) for t in whole]


shifts = torch.tensor([[0, 3, 1, 2], [4, 1, 0, 2], [3, 3, 0, 5], [1, 0, 2, 4]])
mask = flexattn.create_block_mask(lambda b, h, i, j: i + shifts[b, h] >= j, None, None, 8, 8, device="cpu")
for dim in (0, 2):
    for compiled in ((False,), (False, True))["compiled" in sys.argv]:
        want = flexattn.attention(*whole, block_mask=mask).chunk(2, dim)[1]
        call = torch.compile(flexattn.attention, backend="eager") if compiled else flexattn.attention
        for _ in range(2):
            torch.testing.assert_close(call(*parts(dim), block_mask=mask).to_local(), want)
kept = mask._flexattn_shifted.value[1]
flexattn.attention(*parts(2), block_mask=mask)
assert mask._flexattn_shifted.value[1] is kept
lists = {"kv_indices": torch.zeros(1, 1, 1, 1, dtype=torch.int32), "kv_block_size": 16}  # which have no mask_mod
for dim in (0, 2):
    want = flexattn.attention(*whole, **lists).chunk(2, dim)[1]
    torch.testing.assert_close(flexattn.attention(*parts(dim), **lists).to_local(), want)
flexattn.attention(*parts(1), **lists)

ends = torch.tensor([0, 8, 16], dtype=torch.int32)
for dim, call, text in (
    (2, {"bias": torch.ones(1, 2, 8, 8)}, r"bias has shape \\(1, 2, 8, 8\\)"),
    (0, {"bias": torch.ones(3, 1, 8, 8)}, r"bias has shape \\(3, 1, 8, 8\\)"),
    (2, {"bias": torch.ones(8)}, r"bias has shape \\(8,\\)"),
    (2, {"softmax_offset": torch.ones(3)}, r"softmax_offset has shape \\(3,\\)"),
    (0, {"attn_mask_type": "padding", "cu_seqlens": ends}, "the length of cu_seqlens_q less one is 2"),
    (0, {"attn_mask_type": "padding", "seqused_kv": ends}, "the length of seqused_kv is 3"),
    (2, {"score_mod": flexattn.mods.alibi(torch.ones(2))}, r"slopes has shape \\(2,\\), with 2 heads"),
    (1, {"attn_mask_type": "padding"}, "cu_seqlens_q and cu_seqlens_kv are None"),
    (1, {"cu_seqlens_q_padded": ends}, "cu_seqlens_q_padded is given with format bshd"),
):
    with pytest.raises(ValueError, match=text):
        flexattn.attention(*parts(dim), **call)
with pytest.raises(flexattn.BackendError, match="leave out batch_invariant"):  # not dropped
    flexattn.attention(*parts(1), batch_invariant=True)
with torch.autocast("cpu", torch.bfloat16):
    out = flexattn.attention(*parts(2)[:2], parts(2)[2].bfloat16(), bias=torch.ones(1, 4, 8, 8, dtype=torch.float16))
assert out.dtype is torch.bfloat16
"""


@pytest.mark.parametrize("how", ["eager", pytest.param("compiled", marks=pytest.mark.slow)])
def test_a_rank_checks_the_whole_and_gives_mods_indices_of_the_whole(how: str, forked_python: FreshPython) -> None:
    ended = forked_python("-c", SECOND_RANK, how)
    assert ended.returncode == 0, ended.stderr
