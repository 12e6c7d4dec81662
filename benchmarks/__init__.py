"""Benchmarks of speed: `python -m benchmarks.run`."""
