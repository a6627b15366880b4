"""Arguments of kernels: the same bytes whether Triton launches them, the driver's own call does, or a recording is replayed."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from flexattn.bench import stub_driver
from flexattn.kernels_triton.runtime import launch

COMPARE = """
import os, re, sys, threading
import torch
from flexattn.bench import stub_driver

library = stub_driver.install()
import flexattn
from flexattn import call_cache
from flexattn.kernels_triton.mods import diagonals
from flexattn.kernels_triton.runtime import launch, store
from flexattn.testing import make_inputs
from triton.backends.nvidia.compiler import CUDABackend, llvm

# The stub driver runs no code, so LLVM and ptxas make none. They and the check of the code would take more than half of the time.
CUDABackend.make_cubin, store.check_code = lambda *_: b"no code", lambda *_: None
llvm.optimize_module = lambda *_, **__: None
llvm.translate_to_asm = lambda ir, *_: ".visible .entry " + re.search(r"^define .*?@(\\w+)", ir, re.MULTILINE)[1]

# No memory is freed, so that each tensor has an address of its own, as those of a recording have.
kept = []
def keeping(make):
    def wrapper(*args, **kwargs):
        kept.append(make(*args, **kwargs))
        return kept[-1]
    return wrapper
for owner, names in ((torch, "empty empty_like zeros zeros_like"), (torch.Tensor, "new_empty new_zeros contiguous float sum")):
    for name in names.split():
        setattr(owner, name, keeping(getattr(owner, name)))

from flexattn.dispatch import replay
torch_allocator = replay._allocator
replay._allocator = lambda device: keeping(torch_allocator(device))

def biased(score, b, h, i, j):
    return score * factor + slopes[h] * (i - j)

def own_document(b, h, i, j):
    return (documents[i] == documents[j]) & (i >= j)

def relative(score, b, h, i, j):
    return score + table[h, i - j + 40]

def masked_by_a_number(score, b, h, i, j):
    return torch.where(i >= j, score, -1e9)

diagonals.TABLE_SCORES = diagonals.TABLE_SCORES_OF_ENTRY = 0
documents, table = torch.arange(1100) // 300, torch.zeros(6, 90)
factor, slopes = 0.5, torch.ones(6, requires_grad=True)
D = {"num_heads": 6, "num_heads_kv": 2, "dtype": torch.bfloat16, "head_dim_qk": 64, "head_dim_v": 64}
CASES = {
    "bshd": ({"qkv_format": "bshd", "lengths_q": [70, 70]}, {"attn_mask_type": "causal"}),
    "thd": ({"qkv_format": "thd", "lengths_q": [70, 0, 33]}, {"attn_mask_type": "padding_causal"}),
    "mods": ({"qkv_format": "bhsd", "lengths_q": [40, 40]}, {"score_mod": biased}),
    "a table": ({"qkv_format": "bshd", "lengths_q": [40, 40]}, {"score_mod": relative, "attn_mask_type": "causal"}),
    "a finite mask": ({"qkv_format": "bshd", "lengths_q": [70, 70]}, {"score_mod": masked_by_a_number}),
    "documents": ({"qkv_format": "bshd", "lengths_q": [1100, 1100]}, {"mask_mod": own_document}),
    "persistent backward": ({"qkv_format": "bshd", "lengths_q": [1100, 1100], "num_heads_kv": 6}, {"attn_mask_type": "causal"}),
    "converting backward": (
        {"qkv_format": "bshd", "lengths_q": [600, 600], "num_heads_kv": 6, "head_dim_qk": 128, "head_dim_v": 128},
        {"attn_mask_type": "no_mask"},
    ),
    "split keys": ({"qkv_format": "bshd", "lengths_q": [3], "lengths_kv": [1100]}, {"attn_mask_type": "causal_bottom_right"}),
    "fp8": ({"qkv_format": "bshd", "lengths_q": [70, 70]}, {"attn_mask_type": "causal", "fp8_recipe": flexattn.fp8.Recipe()}),
    "fp8 by block": (
        {"qkv_format": "thd", "lengths_q": [70, 0, 33]},
        {"attn_mask_type": "padding", "fp8_recipe": flexattn.fp8.Recipe(granularity="block"), "softcap": 3.0},
    ),
    "everything": (
        {"qkv_format": "sbhd", "lengths_q": [40, 40], "lengths_kv": [50, 50]},
        {"softcap": 3.0, "softmax_type": "learnable", "softmax_offset": torch.zeros(6, requires_grad=True), "dropout_p": 0.1,
         "rng_state": torch.tensor([1, 2]), "window_size": (9, 0), "attn_mask_type": "causal", "bias_type": "post_scale_bias",
         "bias": torch.zeros(1, 6, 40, 50, requires_grad=True), "return_max_logit": True},
    ),
}

def run(call, leaves, outputs):
    out = flexattn.attention(**call, backend="triton", return_lse=True)
    gradients = torch.autograd.grad(out[:2], leaves, [torch.ones_like(t) for t in out[:2]] if not outputs else outputs)
    return [*out, *gradients]

def logged(work):
    stub_driver.logs(library, True)
    work()
    found = stub_driver.launches(library)
    stub_driver.logs(library, False)
    return found

def normalised(found, inputs, by_triton):
    # addresses by what they are of: an input, or the n-th memory that comes
    names, rows = dict(inputs), []
    for (*numbers, attributes, stream), function, arguments in found:
        direct = directs[function]
        # Triton lets no kernel begin early, which only the driver's own call asks for
        assert attributes == (0 if by_triton else direct.attributes[1]), (direct.name, attributes)
        numbers.append(stream)
        first, maps = 64 + 128 * len(direct.maps), 64
        row = [numbers, direct.name]
        for offset, data in zip(direct.offsets, arguments):
            is_map, is_pointer = maps <= offset < first, first <= offset < first + 8 * len(direct.pointers)
            if is_map or is_pointer:
                address = int.from_bytes(data[:8], "little")
                base = next((start for start in names if start <= address < start + names[start][1]), None)
                if base is None:
                    base = address
                    names[address] = (f"new {len(names)}", 1)
                row.append((names[base][0], address - base, data[8:]))
            else:
                row.append(data)
        rows.append(row)
    return rows

for hopper in sys.argv[1].split():
    os.environ["FLEXATTN_HOPPER"] = hopper
    for name in sys.argv[2:] or CASES:
        how, more = CASES[name]
        inputs = make_inputs(**{**D, **how})
        call = inputs._asdict() | {"softmax_scale": 0.25} | more
        leaves = [call[n].nan_to_num().requires_grad_() for n in "qkv"]
        call |= dict(zip("qkv", leaves))
        leaves += [t for n in ("bias", "softmax_offset") if (t := call.get(n)) is not None]
        leaves += [slopes] if name == "mods" else []
        out, lse = flexattn.attention(**call, backend="triton", return_lse=True)[:2]
        outputs = [torch.ones_like(out), torch.ones_like(lse)]
        run(call, leaves, outputs)
        plain, look_up = launch.is_plain, call_cache.look_up
        call_cache.look_up = lambda *_: (None, None)
        launch.is_plain = lambda: False
        run(call, leaves, outputs)
        directs = {d.function: d for d in launch._kernels.values()}
        by_what = {repr((d.name, d.signature, d.metas, d.shared)): d for d in directs.values()}
        for kernel in {getattr(sys.modules[fn.__module__], fn.__name__) for fn, *_ in launch._kernels}:
            for compiled in kernel.device_caches[0][0].values():
                binary = store.binary_of(compiled)
                if compiled.function:
                    directs[compiled.function] = by_what[repr((binary.name, binary.signature, binary.maps, binary.shared))]
        for function, direct in directs.items():
            stub_driver.knows(library, function, direct.sizes)
        by_triton = logged(lambda: run(call, leaves, outputs))
        launch.is_plain = plain
        by_driver = logged(lambda: run(call, leaves, outputs))
        call_cache.look_up = look_up
        before = call_cache.cache_info()
        for _ in range(3):
            results = run(call, leaves, outputs)
        thread = threading.Thread(target=run, args=(call, leaves, outputs))  # which has no context yet
        played = logged(lambda: (thread.start(), thread.join()))
        info = call_cache.cache_info()
        assert info["recordings"] >= before["recordings"], info
        recordings = [c for c in call_cache.kept_calls() if c.forwards.recording]
        other = call | {"softmax_scale": 0.3} | ({"softcap": 5.0} if "softcap" in call else {})
        factor *= 1.5  # which a mod captures
        call_cache.look_up = lambda *_: (None, None)
        other_rows = logged(lambda: run(other, leaves, outputs))
        call_cache.look_up = look_up
        recorded = call_cache.cache_info()["recordings"]
        varied = logged(lambda: run(other, leaves, outputs))  # its first call, made of a kept one
        has_operators = name == "everything" or name.startswith("fp8")  # of torch, with which numbers may be computed
        assert has_operators or call_cache.cache_info()["recordings"] == recorded, (hopper, name)
        given = {t.data_ptr(): (str(n), max(1, t.numel() * t.element_size())) for n, t in enumerate([*leaves, *outputs])}
        given |= {t.data_ptr(): (n, t.numel() * t.element_size()) for n, t in call.items() if isinstance(t, torch.Tensor)}
        rows = [normalised(found, given, found is by_triton) for found in (by_triton, by_driver, played)]
        assert len(rows[0]) > 2 and len(rows[0]) == len(rows[1]) == len(rows[2]), [len(r) for r in rows]
        rows += [normalised(found, given, False) for found in (other_rows, varied)]
        assert rows[3] != rows[1], (hopper, name)
        factor /= 1.5
        for kind, one, other in (("direct", *rows[:2]), ("played", rows[0], rows[2]), ("varied", *rows[3:])):
            assert len(one) == len(other)
            for a, b in zip(one, other):
                different = [i for i, (x, y) in enumerate(zip(a, b)) if x != y]
                assert not different, (hopper, name, kind, a[1], [(i, a[i], b[i]) for i in different][:4])
        assert recordings, (hopper, name)
        print(hopper, name, [row[1] for row in rows[2]])
"""


@pytest.mark.skipif(stub_driver.compiler() is None, reason="the driver that stands in for CUDA's needs a C compiler")
@pytest.mark.slow
def test_a_launch_has_the_same_arguments_whoever_makes_it(forked_python, tmp_path) -> None:
    done = forked_python("-c", COMPARE, "never always", "thd", env=own_folders(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [["never", "thd"], ["always", "thd"]]


@pytest.mark.skipif(stub_driver.compiler() is None, reason="the driver that stands in for CUDA's needs a C compiler")
@pytest.mark.slow
@pytest.mark.parametrize("hopper", [pytest.param("never", marks=pytest.mark.exhaustive), "always"])
def test_every_launch_has_the_same_arguments_whoever_makes_it(forked_python, tmp_path, hopper: str) -> None:
    done = forked_python("-c", COMPARE, hopper, env=own_folders(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("_kernel") > 60
    assert done.stdout.count("_mask_blocks_kernel") == (3 if hopper == "never" else 2)  # one for each pass
    assert done.stdout.count("_diagonals_kernel") == 2
    assert done.stdout.count("_floor_kernel") == 1  # once for a forward
    assert done.stdout.count("_combine_splits_kernel") == 1


def own_folders(folder: Path) -> dict[str, str]:
    """Returns the environment of a process whose kernels have no code, so that no other process finds them."""
    return {"TRITON_CACHE_DIR": str(folder), "FLEXATTN_KERNELS": str(folder)}


def test_a_kernel_is_kept_for_no_other_arguments_than_triton_compiles_it_for() -> None:
    from triton._C.libtriton import native_specialize_impl
    from triton.backends import backends

    memory = torch.zeros(64)
    numbers = [(n,) for n in (0, 1, 3, 16, -16, 2**40, 2**40 + 1, 2.0, True)]
    arguments = [
        None,
        memory,
        memory.half(),
        *numbers,
        (memory,),
        (memory[1:],),
        (memory.half(),),
        (None,),
        ((1,), 3),
        ((3,), 3),
        (1, 3),
    ]
    for a, b in itertools.combinations(arguments, 2):
        kinds = [native_specialize_impl(backends["nvidia"].compiler, x, False, False, False) for x in (a, b)]
        if kinds[0] != kinds[1]:
            assert launch._compiled_for(a, (False, False)) != launch._compiled_for(b, (False, False)), (a, b)
