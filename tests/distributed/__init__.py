"""Tests of attention over ranks, in processes on a CPU."""
