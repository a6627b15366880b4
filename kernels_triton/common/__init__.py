"""Code that the portable kernels and the Gluon kernels share."""

from __future__ import annotations
