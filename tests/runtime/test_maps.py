"""Tensor maps that launches by the driver's own call keep."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flexattn.kernels_triton.runtime import direct


def test_tensors_at_hundreds_of_addresses_keep_their_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of a deep model's layers come back in turn, over some batches; the number of kept maps is bounded."""
    encoded: list[int] = []
    contexts: list[int] = []
    monkeypatch.setattr(direct, "_make_current", lambda: contexts.append(len(encoded)))
    monkeypatch.setattr(direct.triton_driver, "make_tensordesc_arg", lambda descriptor, meta: [descriptor.base.data_ptr()])
    monkeypatch.setattr(direct.ctypes, "string_at", lambda address, size: encoded.append(address) or bytes(size))
    maps = direct._Maps(SimpleNamespace(base=None), None)
    for address in [*range(16, 16 * 801, 16)] * 3:
        assert len(maps.at(address)) == 128
    assert len(encoded) == 800
    assert contexts == list(range(800))  # CUDA encodes a map in the thread's context: a thread may have none before
    for address in range(2**20, 2**20 + 16 * 5000, 16):
        maps.at(address)
    assert len(maps.known) <= 1024
