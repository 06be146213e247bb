"""Measure a candidate revision: held-out examples, general probes, cached completions."""
