"""Verifiers of this distribution. They are registered as entry points, as plugins are."""
