"""Benchmarks, each a program of its own: `python -m megarl.bench.kernels`."""
