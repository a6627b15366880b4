"""Attention over ranks, in processes on a CPU."""
