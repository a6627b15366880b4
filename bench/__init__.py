"""Measurements and the kernel developer's playground: `python -m flexattn bench` and `python -m flexattn play`."""
