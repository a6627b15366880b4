"""Parts of kernels in Gluon that serve every architecture: loads, work tiles, bands, masks, rows. None of them is a kernel."""

from __future__ import annotations
