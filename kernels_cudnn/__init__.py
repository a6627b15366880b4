"""The cuDNN backend: graphs, their plans and their execution."""
