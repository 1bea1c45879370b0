"""Benchmarks: a registry of cases, each run against its peer in the same process."""
