"""Arrays for the tests of flexattn.jax."""

from __future__ import annotations

from typing import Any

import numpy as np


def normal(seed: int, *shape: int) -> Any:
    """Returns normal numbers, fp32, made by numpy: XLA takes seconds to compile jax.random for each shape."""
    import jax.numpy as jnp  # here, because JAX may be missing

    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))
