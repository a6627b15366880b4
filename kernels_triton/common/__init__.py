"""Code that the portable kernels and those for sm_90 share."""

from __future__ import annotations
