"""Kernels in plain Triton for calls in which each query has a list of keys (kv_indices).

A program owns one query and a group of heads that share a key head. These heads are the rows of its matrix products.
"""
