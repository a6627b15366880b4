"""The run on a GPU that a maintainer repeats: tests, random calls and a memory check, with one result file."""
