"""A CUDA driver that does nothing, for machines without a GPU: measurements then show only the host's part.

`install()` compiles the driver (with gcc or cc). flexattn then compiles and "launches" its Triton kernels with CPU tensors in place
of GPU tensors, and nothing is computed. `launches()` has the arguments of each launch. Use it in a separate process, because it
cannot be uninstalled. It does not show the time of a real driver.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

SOURCE = r"""
#include <stddef.h>
#include <stdint.h>
#include <string.h>
typedef int R; typedef unsigned long long U;
/* What was launched: 7 numbers of the grid, block and shared memory, the stream, the kernel, and then its arguments' bytes. */
#define MOST 4096
typedef struct { unsigned numbers[8]; U stream, function; unsigned size; unsigned char bytes[MOST]; } Launch;
Launch stub_log[64]; unsigned stub_count = 0, stub_logs = 0;
static struct { U function; unsigned count; unsigned sizes[256]; } known[256]; static unsigned num_known = 0;
void stub_sizes(U f, unsigned n, const unsigned *sizes) {
  unsigned i = 0; while (i < num_known && known[i].function != f) i++;
  if (i == num_known) num_known++;
  known[i].function = f; known[i].count = n; memcpy(known[i].sizes, sizes, 4 * n);
}
static __thread void *context = NULL; /* as a new thread has none, nothing can be launched in it */
R cuLaunchKernelEx(const void *config, U f, void **params, void **extra) {
  if (!context) return 201;
  stub_count++;
  if (!stub_logs) return 0;
  Launch *log = &stub_log[(stub_count - 1) % 64];
  memcpy(log->numbers, config, 28); log->stream = *(const U *)((const char *)config + 32); log->function = f;
  log->numbers[7] = *(const unsigned *)((const char *)config + 48); log->size = 0;
  for (unsigned i = 0; i < num_known; i++) if (known[i].function == f)
    for (unsigned p = 0; p < known[i].count; p++) {
      memcpy(log->bytes + log->size, params[p], known[i].sizes[p]); log->size += known[i].sizes[p];
    }
  return 0;
}
/* A map that two calls fill alike iff all that they are given is equal. */
R cuTensorMapEncodeTiled(void *m, int dt, unsigned r, void *a, const U *gd, const U *gs, const unsigned *bd, const unsigned *es,
                         int i, int s, int l2, int oob) {
  U h = 1469598103934665603ull, v[64]; unsigned n = 0;
  if ((uintptr_t)m % 64) return 1;
  v[n++] = dt; v[n++] = r; v[n++] = i; v[n++] = s; v[n++] = l2; v[n++] = oob;
  for (unsigned d = 0; d < r; d++) { v[n++] = gd[d]; v[n++] = bd[d]; v[n++] = es[d]; if (d + 1 < r) v[n++] = gs[d]; }
  for (unsigned j = 0; j < n; j++) h = (h ^ v[j]) * 1099511628211ull;
  memset(m, 0, 128); memcpy(m, &a, 8); memcpy((char *)m + 8, &h, 8);
  return 0;
}
static U functions = 0x1000;
R cuModuleGetFunction(U *f, void *m, const char *n) { *f = functions += 16; return 0; }
R cuInit(unsigned f) { return 0; }
R cuDeviceGet(int *d, int o) { *d = 0; return 0; }
R cuDeviceGetAttribute(int *v, int a, int d) { *v = 232448; return 0; }
R cuGetErrorString(R e, const char **s) { *s = "the stub driver"; return 0; }
R cuCtxGetCurrent(void **c) { *c = context; return 0; }
R cuCtxSetCurrent(void *c) { context = c; return 0; }
R cuDevicePrimaryCtxRetain(void **c, int d) { *c = (void *)1; return 0; }
R cuCtxGetLimit(size_t *p, int l) { *p = 1 << 20; return 0; }
R cuCtxSetLimit(int l, size_t v) { return 0; }
R cuModuleLoadData(void **m, const void *p) { *m = (void *)2; return context ? 0 : 201; }
R cuModuleUnload(void *m) { return 0; }
R cuFuncGetAttribute(int *v, int a, void *f) { *v = a == 0 ? 1024 : 0; return 0; }
R cuFuncSetAttribute(void *f, int a, int v) { return 0; }
R cuFuncSetCacheConfig(void *f, int c) { return 0; }
R cuOccupancyMaxActiveClusters(int *n, void *f, const void *c) { *n = 1; return 0; }
R cuPointerGetAttribute(void *d, int a, U p) { *(U *)d = p; return 0; }
R cuPointerGetAttributes(unsigned n, int *a, void **d, U p) { for (unsigned i = 0; i < n; i++) *(U *)d[i] = p; return 0; }
R cuCtxGetDevice(int *d) { *d = 0; return 0; }
R cuDriverGetVersion(int *v) { *v = 13000; return 0; }
R cuMemsetD8Async(U p, unsigned char c, size_t n, void *s) { return context ? 0 : 201; }
R cuStreamIsCapturing(void *s, int *c) { *c = 0; return 0; }
R cuTensorMapEncodeIm2col(void *m) { return 0; }
"""


class Launched(NamedTuple):
    """grid, block and shared memory; the kernel; the bytes of each argument."""

    numbers: tuple[int, ...]
    function: int
    arguments: tuple[bytes, ...]


class _Launch(ctypes.Structure):
    _fields_ = (
        ("numbers", ctypes.c_uint * 8),
        ("stream", ctypes.c_ulonglong),
        ("function", ctypes.c_ulonglong),
        ("size", ctypes.c_uint),
        ("bytes", ctypes.c_ubyte * 4096),
    )


_sizes: dict[int, list[int]] = {}


def compiler() -> str | None:
    return shutil.which("gcc") or shutil.which("cc")


def build(directory: Path) -> Path:
    """libcuda.so.1 in the directory."""
    found = compiler()
    if found is None:
        raise RuntimeError("the stub driver is compiled, and there is no C compiler (gcc, cc); install one")
    source, library = directory / "stub_driver.c", directory / "libcuda.so.1"
    source.write_text(SOURCE)
    flags = ("-O1", "-w", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1")
    subprocess.run([found, *flags, "-o", str(library), str(source)], check=True)
    return library


def install(capability: tuple[int, int] = (9, 0), processors: int = 132) -> Any:
    """Makes flexattn's Triton kernels believe that this process has a GPU. Returns the driver's library."""
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        raise RuntimeError("TRITON_INTERPRET is set, under which Triton compiles nothing; unset it")
    directory = Path(tempfile.mkdtemp(prefix="flexattn-stub-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    library = ctypes.CDLL(str(build(directory)), mode=ctypes.RTLD_GLOBAL)
    os.environ["TRITON_LIBCUDA_PATH"] = str(directory)

    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime import driver

    class Stub:
        def __init__(self) -> None:
            self.launcher_cls = nvidia.CudaLauncher
            self.get_current_device: Callable[[], int] = lambda: 0
            self.get_current_stream: Callable[[int], int] = lambda device: 0

        @functools.cached_property
        def utils(self) -> Any:  # like Triton's driver, which sets its module's names when it is first used
            return nvidia.CudaUtils()

        def get_current_target(self) -> object:
            return GPUTarget("cuda", 10 * capability[0] + capability[1], 32)

        def map_python_to_cpp_type(self, kind: str) -> str:
            return nvidia.ty_to_cpp(kind)  # type: ignore[no-any-return]

    driver.set_active(Stub())

    from flexattn import ops
    from flexattn.dispatch import triton_backend
    from flexattn.kernels_triton.runtime import device, direct, launch

    triton_backend.device_error = lambda device_type, capability: None  # type: ignore[assignment]
    ops.capability_of = lambda device: capability  # type: ignore[assignment]
    launch.current_stream, launch.stream_of, launch.is_current = lambda device: 0, lambda device: int, lambda device: True
    direct.current_device = lambda: 0
    device._capability_of = lambda device: 10 * capability[0] + capability[1]  # type: ignore[assignment]
    device._num_processors = lambda device: processors  # type: ignore[assignment]
    return library


def logs(library: Any, on: bool) -> None:
    """Starts or stops recording the arguments of launches (the last 64)."""
    ctypes.c_uint.in_dll(library, "stub_logs").value = on
    ctypes.c_uint.in_dll(library, "stub_count").value = 0


def count(library: Any) -> int:
    """Launches since `logs`."""
    return ctypes.c_uint.in_dll(library, "stub_count").value


def knows(library: Any, function: int, sizes: list[int]) -> None:
    """Tell the driver how large the arguments of a kernel are, which it would read off the kernel."""
    _sizes[function] = sizes
    library.stub_sizes(ctypes.c_ulonglong(function), len(sizes), (ctypes.c_uint * len(sizes))(*sizes))


def launches(library: Any) -> list[Launched]:
    """Returns the arguments of the launches since `logs`, for the kernels that were passed to `knows`."""
    log = (_Launch * 64).in_dll(library, "stub_log")
    found = []
    for entry in log[: count(library)]:
        data, arguments, at = bytes(entry.bytes[: entry.size]), [], 0
        for size in _sizes.get(entry.function, []):
            arguments.append(data[at : at + size])
            at += size
        found.append(Launched((*entry.numbers, entry.stream), entry.function, tuple(arguments)))
    return found
