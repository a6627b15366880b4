"""Attention kernels for sm_100 in Gluon. They were compiled and emulated, and have not run on a GPU."""
