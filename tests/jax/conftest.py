"""JAX for the tests of flexattn.jax: a CPU that counts as four devices, which must be set before JAX starts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

flags = [os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=4"]
if os.environ.setdefault("JAX_PLATFORMS", "cpu") == "cpu":  # LLVM's optimisation takes a third of the time of these tests
    flags.append("--xla_backend_optimization_level=0")
os.environ["XLA_FLAGS"] = " ".join(flags).strip()


@pytest.fixture
def four_devices() -> None:
    """Skips the test if JAX had started before this file could set its number of devices."""
    import jax

    if len(jax.devices()) < 4:
        pytest.skip(f"JAX has {len(jax.devices())} devices, and the mesh needs four")


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Makes this machine's CPU a CUDA device for flexattn.jax; yields the launches."""
    from tests.support.xla_launches import interpreted_launches  # here, because JAX may be missing

    yield from interpreted_launches(monkeypatch)
