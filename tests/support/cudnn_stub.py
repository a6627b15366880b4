"""Real cuDNN plans on a machine without a GPU: a stub of the CUDA driver, and the properties of GPUs.

cuDNN looks up functions in a driver library by name when it builds a plan. If it has a device's properties, it launches nothing.
The stub therefore has every name in cuDNN's libraries, and each function returns "no device". Two functions must succeed: the
version, and loading the compiled kernel. Nothing can be executed.
"""

from __future__ import annotations

import ctypes
import json
import re
import shutil
import subprocess
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple


class _Gpu(NamedTuple):
    name: str
    capability: tuple[int, int]
    processors: int
    shared_memory: int  # bytes that a block may opt in to
    threads: int  # per processor, as the next
    blocks: int
    cache: int  # L2, bytes
    memory: int  # bytes


def _properties(gpu: _Gpu) -> str:
    """As cudnn's device properties serialize. Clocks and ids are of an NVIDIA H200, and decide nothing."""
    return json.dumps(
        {
            "maxGridSize": [2147483647, 65535, 65535],
            "maxBlockSize": [1024, 1024, 64],
            "regsPerBlock": 65536,
            "multiProcessorCount": gpu.processors,
            "warpSize": 32,
            "maxSharedMemoryPerBlock": 49152,
            "maxSharedMemoryPerBlockOptin": gpu.shared_memory,
            "reservedSharedMemoryPerBlock": 1024,
            "maxRegistersPerSM": 65536,
            "maxCtasPerSM": gpu.blocks,
            "maxThreadsPerBlock": 1024,
            "maxThreadsPerSM": gpu.threads,
            "pciDeviceId": 0,
            "isTccDriver": 0,
            "supportCoopLaunch": 1,
            "smClockRateKHz": 1980000,
            "memClockRateKHz": 3201000,
            "memoryBusWidth": 5120,  # asked for by cuDNN 9.27, as is the next
            "oversizedSharedMemoryPerBlock": 0,
            "l2CacheSize": gpu.cache,
            "deviceName": gpu.name,
            "deviceVer": 100 * gpu.capability[0] + 10 * gpu.capability[1],
            "driverVer": 13000,
            "cudaDeviceId": 0,
            "totalGlobalMem": gpu.memory,
        }
    )


# By NVIDIA's data sheets and the CUDA C++ Programming Guide's table of technical specifications per compute capability.
_GPUS = (
    _Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 166912, 2048, 32, 40 << 20, 80 << 30),
    _Gpu("NVIDIA GeForce RTX 3090", (8, 6), 82, 101376, 1536, 16, 6 << 20, 24 << 30),
    _Gpu("NVIDIA GeForce RTX 4090", (8, 9), 128, 101376, 1536, 24, 72 << 20, 24 << 30),
    _Gpu("NVIDIA H200", (9, 0), 132, 232448, 2048, 32, 62914560, 150121545728),
    _Gpu("NVIDIA B200", (10, 0), 148, 232448, 2048, 32, 126 << 20, 180 << 30),
    _Gpu("NVIDIA B300", (10, 3), 148, 232448, 2048, 32, 126 << 20, 270 << 30),
    _Gpu("NVIDIA GeForce RTX 5090", (12, 0), 170, 101376, 1536, 24, 96 << 20, 32 << 30),
)
DEVICES = {gpu.capability: _properties(gpu) for gpu in _GPUS}
H200 = DEVICES[9, 0]

NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
DRIVER_VERSION = 13000
NAME = re.compile(rb"\0(cu[A-Z][A-Za-z0-9_]{2,60})\0")  # in a library's strings, driver functions and a few that are none


@cache
def missing() -> str | None:
    """Returns the reason why no plan can be built here, with a remedy; None if plans can be built."""
    for module, package in (("cudnn", "nvidia-cudnn-frontend"), ("nvidia", "nvidia-cudnn-cu13")):
        if find_spec(module) is None:
            return f"{package} is not installed; pip install 'flexattn[plans]'"
    for name in ("libcudnn.so.*", "libcublasLt.so.*", "libnvrtc.so.*"):
        if not _libraries(name):
            return f"no {name} beside the nvidia package; pip install 'flexattn[plans]'"
    if shutil.which("cc") is None:
        return "no C compiler for the stand-in driver"
    return None


def cannot_load() -> str | None:
    """Returns the reason why no saved plan can be read here; None if plans can be read. tests/gpu/test_cudnn.py reads one."""
    import cudnn

    is_old = tuple(map(int, cudnn.__version__.split(".")[:2])) < (1, 28)
    return "before 1.28 the frontend reads no plan for a GPU that is not here" if is_old else None


@cache  # the names of all driver functions are looked for in a gigabyte of libraries
def load() -> None:
    """Loads the driver stub, and the libraries that cuDNN opens by name, into this process before cuDNN searches for them."""
    with tempfile.TemporaryDirectory() as folder:
        ctypes.CDLL(str(build(Path(folder))), mode=ctypes.RTLD_GLOBAL)
    for name in ("libnvrtc-builtins.so.*", "libnvrtc.so.*", "libcublasLt.so.*", "libcublas.so.*", "libcudnn.so.*"):
        for library in _libraries(name):
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def build(folder: Path) -> Path:
    """libcuda.so.1 in `folder`."""
    names = sorted({name.decode() for library in _libraries("libcudnn*.so.*") for name in NAME.findall(library.read_bytes())})
    source, library = folder / "driver.c", folder / "libcuda.so.1"
    source.write_text("\n".join(map(_function, names)) + "\n")
    command = ["cc", "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", "-o", str(library), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    return library


def _function(name: str) -> str:
    if name == "cuDriverGetVersion":
        return f"int {name}(int *version) {{ *version = {DRIVER_VERSION}; return 0; }}"
    if name in ("cuLibraryLoadData", "cuLibraryGetKernel"):
        return f"int {name}(void **handle) {{ if (handle) *handle = (void *)0x1000; return 0; }}"
    return f"int {name}(void) {{ return {0 if name == 'cuLibraryUnload' else NO_DEVICE}; }}"


def _libraries(pattern: str) -> list[Path]:
    spec = find_spec("nvidia")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    found = (sorted(folder.glob(f"*/lib/{pattern}")) for folder in folders)
    return next((libraries for libraries in found if libraries), [])  # of the first folder on the path that has any
