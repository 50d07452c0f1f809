"""Benchmarks of the library. Not installed: `python -m benchmarks.NAME` from a checkout."""
