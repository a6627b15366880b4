"""Runs the code of an older GPU on the GPU at hand.

PTX is forward compatible: ptxas assembles PTX of sm_80 or sm_89 for sm_90, and the GPU then executes the older instructions. After
`imitate(80)` this process compiles and selects kernels as on an A100. Results are correct or wrong as they are there, except for
ptxas' choices. Launches have so much shared memory that a multiprocessor holds as many programs as one of the older GPU. Times are
only meaningful beside other code of the same target in the same run: the ratio of tensor cores to bandwidth, the L2 cache and the
clocks are those of the GPU at hand, and other libraries' kernels have its occupancy. `imitation.label` names both in a result file.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
from typing import Any, cast

from flexattn.kernels_triton.runtime import imitation

# Resources of a multiprocessor by compute capability: bytes of shared memory, and warps. CUDA C++ Programming Guide, "Compute
# Capabilities", technical specifications.
_SHARED = {80: 164 << 10, 86: 100 << 10, 89: 100 << 10, 90: 228 << 10, 100: 228 << 10, 120: 100 << 10}
_WARPS = {80: 64, 86: 48, 89: 48, 90: 64, 100: 64, 120: 48}
_REGISTERS = 65536
_RESERVED = 1024  # bytes of shared memory that the system uses for each program
_NUM_REGISTERS, _MAX_SHARED = 4, 8  # CU_FUNC_ATTRIBUTE_NUM_REGS, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


def _programs(capability: int, shared: int, registers: int, warps: int) -> int:
    """Returns how many programs a multiprocessor holds."""
    per_warp = -(-max(registers, 1) * 32 // 256) * 256
    return min(_SHARED[capability] // (shared + _RESERVED), _REGISTERS // (per_warp * warps), _WARPS[capability] // warps)


def padded_shared(capability: int, real: int, shared: int, registers: int, warps: int) -> int:
    """Returns the bytes of shared memory with which a multiprocessor of `real` holds as many programs as one of `capability`."""
    from flexattn.kernels_triton.runtime.compiler import SHARED_MEMORY_LIMIT

    programs = max(1, _programs(capability, shared, registers, warps))
    if _programs(real, shared, registers, warps) <= programs:
        return shared
    least = _SHARED[real] // (programs + 1) - _RESERVED + 1  # with which one more does not fit
    return min(max(shared, -(-least // 128) * 128), SHARED_MEMORY_LIMIT[real])


def parse(text: str) -> int:
    """Returns the compute capability that a text names: "sm_80", "80" or "8.0" is 80. Raises ValueError."""
    match = re.fullmatch(r"(?:sm_?)?(\d+)\.?(\d)", text.strip())
    capability = 10 * int(match[1]) + int(match[2]) if match else None
    if capability not in imitation.COMPILED_FOR:
        accepted = ", ".join(f"sm_{sm}" for sm in imitation.COMPILED_FOR)
        raise ValueError(f"the target is {text!r}; accepted: {accepted}")
    return capability


def imitate_named(text: str) -> int:
    """Calls `imitate` for a target such as "sm_80" if there is a GPU; returns the capability. Raises the errors of both."""
    import torch

    capability = parse(text)
    if torch.cuda.is_available():
        imitate(capability)
    return capability


def imitate(capability: int) -> None:
    """From now on, this process treats its GPU as one of an older compute capability, for the rest of its life.

    capability: 80, 86, 89 or 120 (12.0's tiles, compiled for 8.9).

    Call it before the first kernel is compiled. Compiled kernels of the imitation have their own keys in every cache on disk.
    FlexAttention compiles for the same target. Libraries whose kernels are compiled already, such as SDPA and cuDNN, do not change.

    Raises ValueError for another capability, RuntimeError if the GPU's own capability is lower or the process imitates another one.
    """
    import torch

    from flexattn.kernels_triton.runtime import device

    if capability not in imitation.COMPILED_FOR:
        raise ValueError(f"capability is {capability!r}; accepted: {', '.join(map(str, imitation.COMPILED_FOR))}")
    if imitation.current is not None:
        if imitation.current.capability != capability:
            raise RuntimeError(
                f"this process imitates {imitation.current.capability} already; start another process for {capability}"
            )
        return
    torch.cuda.init()  # type: ignore[no-untyped-call]
    major, minor = torch.cuda.get_device_capability()
    real = 10 * major + minor
    if real == capability:
        return  # its own code
    if real < imitation.COMPILED_FOR[capability]:
        raise RuntimeError(
            f"capability is {capability}, and the GPU's own is {real}; code runs on its own capability and on later ones"
        )
    # FlexAttention's compiler must not ask other processes, which imitate nothing.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR", os.path.join(os.path.expanduser("~"), ".cache", "flexattn_inductor"))
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{cache}_as_{capability}"
    install(capability, real)
    torch.cuda.get_device_capability = lambda device=None: divmod(capability, 10)
    device._capability_of.cache_clear()


def install(capability: int, real: int) -> None:
    """Makes Triton compile for `capability` and assemble for `real`, in this process, which needs no GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia import compiler, driver
    from triton.compiler import compiler as loading

    from flexattn.kernels_triton.runtime import direct
    from flexattn.kernels_triton.runtime.compiler import SHARED_MEMORY_LIMIT

    imitation.current = imitation.Imitation(capability, real)
    compiled_for, limit = imitation.COMPILED_FOR[capability], SHARED_MEMORY_LIMIT[capability]
    backend: Any = compiler.CUDABackend
    make_cubin, key, load = backend.make_cubin, backend.hash, direct._load

    @functools.wraps(make_cubin)
    def make_cubin_for_real(self: Any, src: str, metadata: Any, opt: Any, arch: int) -> bytes:
        if arch >= real:
            return cast("bytes", make_cubin(self, src, metadata, opt, arch))
        target = self.target
        self.target = GPUTarget("cuda", real, 32)  # selects ptxas
        try:
            return cast("bytes", make_cubin(self, src, metadata, opt, real))
        finally:
            self.target = target

    @functools.wraps(load)
    def load_if_it_fits(binary: Any) -> int:
        if binary.shared > limit:
            raise direct.LaunchError(f"{binary.name} needs {binary.shared} bytes of shared memory; sm_{capability} has {limit}")
        return load(binary)

    def shared_with_padding(binary: Any, function: int) -> int:
        driver, registers, handle = direct._library(), ctypes.c_int(), ctypes.c_void_p(function)
        direct._check(driver.cuFuncGetAttribute(ctypes.byref(registers), _NUM_REGISTERS, handle), "cuFuncGetAttribute")
        shared = padded_shared(capability, real, binary.shared, registers.value, binary.num_warps)
        direct._check(
            driver.cuFuncSetAttribute(handle, _MAX_SHARED, shared), f"giving {binary.name} {shared} bytes of shared memory"
        )
        return shared

    backend.make_cubin = make_cubin_for_real
    backend.hash = lambda self: f"{key(self)}-{imitation.code_key()}"
    driver.CudaDriver.get_current_target = lambda self: GPUTarget("cuda", compiled_for, 32)
    loading.max_shared_mem = lambda device: limit
    direct._load = load_if_it_fits
    direct._launched_shared = shared_with_padding
