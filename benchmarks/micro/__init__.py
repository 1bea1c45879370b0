"""Microbenchmarks of the kernels by themselves, for pytest-benchmark."""
