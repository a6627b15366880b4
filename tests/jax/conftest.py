"""JAX for the tests of flexattn.jax: a CPU that counts as four devices, which has to be said before JAX starts."""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
