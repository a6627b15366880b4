"""Programs of JAX, compiled by XLA for an absent CUDA device, and a search for memory that two results share.

Run as a script, this file prints the defects that it finds as JSON, by program.
"""

from __future__ import annotations

import json
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import flexattn
from flexattn.jax import append_kv, attention, compiled_for, cuda
from flexattn.jax import fp8 as jax_fp8
from flexattn.jax.custom_call import CustomCall

# An H100 as XLA describes it: https://github.com/openxla/xla/blob/main/xla/backends/gpu/target_config/specs/h100_sxm.txtpb
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84942979072 shared_memory_per_block_optin: 232448 cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
runtime_version { major: 13 minor: 0 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""

KEYS, HEADS, DIM = 512, 4, 64  # rows of 128 bytes, as XLA fuses slices whose addresses are multiples of 128 alone
LOOP = 3
EMPTY_KERNEL = ".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry k(%s){ ret; }\n"


def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    """Returns an array without memory."""
    return jax.ShapeDtypeStruct(shape, dtype)


def gradients(count: int = 3, **how: Any) -> Callable[..., Any]:
    """Returns the gradients of the first arrays of a call: q, k, v, and one that `how` names by its place among the arguments."""
    names = tuple(name for name, value in how.items() if value is None)
    static = {name: value for name, value in how.items() if value is not None}

    def loss(q: Any, k: Any, v: Any, *more: Any) -> Any:
        return attention(q, k, v, **static, **dict(zip(names, more, strict=True))).astype(jnp.float32).sum()

    return jax.grad(loss, tuple(range(count)))


def captures_program(deterministic: bool) -> Callable[..., Any]:
    """Returns the gradients of two tables that a mod reads."""

    def loss(q: Any, k: Any, v: Any, first: Any, second: Any) -> Any:
        mod = lambda s, b, h, i, j: s + first[h, (i - j) % 32] * second[h, j % 32]  # noqa: E731
        return attention(q, k, v, score_mod=mod, deterministic=deterministic).astype(jnp.float32).sum()

    return jax.grad(loss, (0, 1, 2, 3, 4))


def state_program(recipe: Any) -> Callable[..., Any]:
    """Returns the gradients of q, k, v and of a state of delayed scaling."""

    def loss(state: Any, q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, fp8_recipe=recipe, fp8_state=state).astype(jnp.float32).sum()

    return jax.grad(loss, (0, 1, 2, 3))


def append(k_cache: Any, v_cache: Any, new: Any, used: Any) -> Any:
    """Returns caches with a new token."""
    return append_kv(k_cache, v_cache, new, new, seqused_kv=used)


def in_loop(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that runs another for each index of the first axis of all its arrays."""
    return lambda *arrays: jax.lax.map(lambda parts: function(*parts), arrays)


def stacked(arrays: Any) -> Any:
    """Returns arrays with an axis more."""
    return jax.tree.map(lambda x: array(LOOP, *x.shape, dtype=x.dtype), arrays)


def programs() -> dict[str, tuple[Callable[..., Any], Any]]:
    """Returns functions and their arrays, by name: each differentiated feature plain, under vmap and in a loop, and caches."""
    q, one = array(1, KEYS, HEADS, DIM), array(1, KEYS, 1, DIM)
    wide = array(1, KEYS, 32, DIM)
    table = array(HEADS, 32, dtype=jnp.float32)
    heads = array(HEADS, dtype=jnp.float32)
    recipe = flexattn.fp8.Recipe(scaling="delayed")
    state = jax.eval_shape(lambda: jax_fp8.DelayedScaling.create(recipe, HEADS))
    features: dict[str, tuple[Callable[..., Any], Any]] = {
        "plain": (gradients(attn_mask_type="causal"), (q, q, q)),
        "splits": (gradients(), (wide, one, one)),
        "sinks, splits": (
            gradients(4, softmax_type="learnable", softmax_offset=None),
            (wide, one, one, array(32, dtype=jnp.float32)),
        ),
        "bias": (gradients(4, bias_type="post_scale_bias", bias=None), (q, q, q, array(1, HEADS, KEYS, KEYS))),
        "ALiBi": (gradients(bias_type="alibi", alibi_slopes=None), (q, q, q, heads)),
        "captures": (captures_program(False), (q, q, q, table, table)),
        "captures, deterministic": (captures_program(True), (q, q, q, table, table)),
        "FP8": (gradients(fp8_recipe=flexattn.fp8.Recipe()), (q, q, q)),
        "FP8, delayed": (state_program(recipe), (state, q, q, q)),
    }
    found: dict[str, tuple[Callable[..., Any], Any]] = {}
    for name, (function, arrays) in features.items():
        found[name] = (function, arrays)
        found[f"{name}, vmap"] = (jax.vmap(function), stacked(arrays))
        found[f"{name}, loop"] = (in_loop(function), stacked(arrays))
    no_keys = array(1, 0, HEADS, DIM)
    found["no keys"] = (gradients(), (q, no_keys, no_keys))
    cache, new, used = array(2, KEYS, HEADS, DIM), array(2, 1, HEADS, DIM), array(2, dtype=jnp.int32)

    def zeros() -> Any:
        return jnp.zeros(cache.shape, cache.dtype), jnp.zeros(cache.shape, cache.dtype)

    found["append"] = (append, (cache, cache, new, used))
    found["append, equal caches"] = (lambda c, *x: append(c, c, *x), (cache, new, used))
    found["append, caches of zeros"] = (lambda *x: append(*zeros(), *x), (new, used))
    found["append, vmap"] = (jax.vmap(append), stacked((cache, cache, new, used)))
    found["append, equal caches, loop"] = (in_loop(lambda c, *x: append(c, c, *x)), stacked((cache, new, used)))
    step = lambda caches, x: (append(*caches, *x), 0)  # noqa: E731
    found["append, zeros, scan"] = (lambda *x: jax.lax.scan(step, zeros(), x), stacked((new, used)))
    return found


def described(step: Any, written: frozenset[int], architecture: int, zeros: Any) -> CustomCall:
    """Returns the custom call of a launch, with a kernel that does nothing, which compiles at once."""
    from jax._src.lib import gpu_triton

    operands = tuple(dict.fromkeys(step.buffers))
    count = len(operands) + len(written & set(operands))
    ptx = EMPTY_KERNEL % ", ".join(f".param .u64 p{i}" for i in range(count))
    kernel = gpu_triton.TritonKernel("k", 4, 1, 0, ptx, "", architecture)
    call = gpu_triton.TritonKernelCall(kernel, 1, 1, 1, [gpu_triton.create_array_parameter(0, 16)] * count)
    return CustomCall(zlib.compress(call.to_proto("k", b"")), operands, (), frozenset(zeros.keys() & set(operands)))


def compiled(function: Callable[..., Any], arrays: Any, devices: Any) -> str:
    """Returns the text of a function that XLA compiled, if needed for absent devices."""
    mesh = jax.sharding.Mesh(devices, ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arrays)
    return str(jax.jit(function, out_shardings=sharding).lower(*placed).compile().as_text())


def shared(text: str) -> Iterator[str]:
    """Yields errors in the text of a compiled program about memory that a kernel writes.

    If an operand is aliased to a result, it must be the only operand in its memory and not a slice of an array, because XLA copies
    nothing inside a fusion.
    """
    defined: dict[str, tuple[str, list[str], str]] = {}

    def origin(name: str) -> str:
        operation, operands, rest = defined.get(name, ("", [], ""))
        if operation == "bitcast":
            return origin(operands[0])
        if operation == "get-tuple-element" and (index := re.search(r"index=(\d+)", rest)):
            return f"{operands[0]}#{index[1]}"
        return name

    for line in text.splitlines():
        if re.match(r"(ENTRY )?%?[\w.-]+ .*\{$", line):  # a computation begins, and names belong to one
            defined.clear()
            continue
        found = re.match(r"\s+(?:ROOT )?%([\w.-]+) = (?:\(.*?\)|\S+) ([\w-]+)\((.*?)\)(.*)$", line)
        if found is None:
            continue
        name, operation, inside, rest = found.groups()
        operands = re.findall(r"%([\w.-]+)", inside)
        defined[name] = (operation, operands, rest)
        if operation != "custom-call" or f'"{cuda.TARGET}"' not in rest:
            continue
        origins = [origin(one) for one in operands]
        aliases = re.search(r"output_to_operand_aliasing=\{(.*?)\}, \w", rest)
        for place in {int(one) for one in re.findall(r"\((\d+), \{\}\)", aliases[1] if aliases else "")}:
            if origins.count(origins[place]) > 1:
                yield f"{name} gets {origins[place]} twice, and writes to it"
            if "slice" in defined.get(origins[place].partition("#")[0], ("",))[0]:
                yield f"{name} writes to {origins[place]}, a slice"


def unprotected(text: str) -> Iterator[str]:
    """Yields operands that XLA's passes may merge: they are written, and do not come from one barrier."""
    barriers: set[str] = set()
    for line in text.splitlines():
        if found := re.match(r"\s*(%\w+)(?::\d+)? = stablehlo\.optimization_barrier", line):
            barriers.add(found[1])
        elif found := re.search(rf"stablehlo\.custom_call @{cuda.TARGET}\((.*?)\)", line):
            operands = found[1].split(", ")
            written = [operands[int(one)] for one in re.findall(r"operand_index = (\d+)", line)]
            if len({*written}) < len(written) or len({one.partition("#")[0] for one in written}) > 1:
                yield f"written are {written}"
            yield from (f"{one} is written" for one in written if one.partition("#")[0] not in barriers)


def calls(text: str) -> int:
    """Returns the number of launches in XLA's text of a compiled program."""
    return text.count(f'custom_call_target="{cuda.TARGET}"')


def main() -> None:
    from jax.experimental import topologies

    devices = topologies.get_topology_desc("h100", platform="cuda", target_config=H100, topology="1x1x1").devices
    cuda.custom_call = described
    names = sys.argv[1:]
    result = {}
    with compiled_for((8, 9), processors=132):
        for name, (function, arrays) in programs().items():
            if not names or name in names:
                text = compiled(function, arrays, devices)
                result[name] = [calls(text), *shared(text)]
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
