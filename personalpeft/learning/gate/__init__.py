"""Decide whether a candidate revision goes live, and whether it stays live."""
