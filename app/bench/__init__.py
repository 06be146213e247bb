"""Benchmarks: what was promised, measured through the public surface."""
