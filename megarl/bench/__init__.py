"""Benchmarks: `megarl bench WHAT` and `make gpu`."""
