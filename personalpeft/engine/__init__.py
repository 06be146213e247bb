"""Serve requests: scheduler, fair queue, adapter cache."""
